"""Measures rounding errors of every model on the CPU and writes docs/measurements/errors.json; then `make docs`.

    python docs/measure_errors.py           every model
    python docs/measure_errors.py mamba s4  these, again

`spt check rounding` measures them; here the rows of earlier measurements are kept.
"""

import argparse
import json
from pathlib import Path

import torch

from spt.checks.rounding import check_rounding, native_models
from spt.runs.files import write_json

FILE = Path(__file__).resolve().parent / "measurements" / "errors.json"
COMMAND = "python docs/measure_errors.py"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure rounding errors of models.")
    parser.add_argument("names", nargs="*", metavar="MODEL", help="These, again; otherwise all.")
    chosen = parser.parse_args().names
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if chosen and FILE.is_file() else {}
    measured = check_rounding(chosen, torch.device("cpu"))
    rows |= measured["rows"]
    ordered = {name: rows[name] for name in native_models() if name in rows}
    date = measured["date"].split("T")[0]
    write_json(FILE, {**measured, "command": COMMAND, "date": date, "rows": ordered})


if __name__ == "__main__":
    main()
