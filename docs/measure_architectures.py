"""Times the architectures of docs/hugging-face.md and writes docs/measurements/architectures.json; then `make docs`.

    python docs/measure_architectures.py             those that are not there yet, or all on another machine
    python docs/measure_architectures.py mamba rwkv  these, again
    python docs/measure_architectures.py --again     all, again

Written after each architecture, so that it goes on where it was interrupted. Other work on the machine only ever adds
time, so the quickest step is what counts; the median beside it shows how quiet the machine was.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from hugging_face_page import FILE, named

from spt.bench.models import parse_models
from spt.bench.timing import Times
from spt.bench.training_step import Step
from spt.errors import UsageError, one_line
from spt.models.base import Unsupported
from spt.runs.files import write_json
from spt.runtime.environment import environment

COMMAND = "python docs/measure_architectures.py"
THREADS = 2
SIZES = {"layers": 2, "width": 64, "batch": "8", "length": "1024"}
SECONDS, LEAST, MOST = 6.0, 2, 15  # of each: steps for so long, but at least and at most so many
RELATIVE = ("options.relative_attention=true", "options.pos_att_type=[c2p,p2c]")  # without these, no positions at all
OPTIONS = {"deberta": RELATIVE, "deberta-v2": RELATIVE}


def first_step(name: str) -> Step:
    """Two-sided where the architecture can be, else causal."""
    for causal in (False, True):
        arguments = ["hf", f"architecture={name}", f"causal={str(causal).lower()}", *OPTIONS.get(name, ())]
        (variant,) = parse_models(arguments, **SIZES, cpu=True)  # type: ignore[arg-type]
        try:
            return Step(variant)
        except UsageError as error:
            if causal or not isinstance(error.__cause__, Unsupported):
                raise
    raise AssertionError


def measure(name: str) -> dict[str, Any]:
    """Seconds of the quickest step, by its parts; the median of all."""
    step = first_step(name)
    step(length=16, batch=1, optimise=False)  # loads libraries, starts threads
    steps: list[Times] = []
    began = time.perf_counter()
    while len(steps) < LEAST or (len(steps) < MOST and time.perf_counter() - began < SECONDS):
        steps.append(step())
    quickest = min(steps, key=lambda times: times.step)
    return {
        "causal": step.variant.options["causal"],
        "parameters": sum(parameter.numel() for parameter in step.parameters),
        "seconds": {**quickest._asdict(), "step": quickest.step},
        "median": statistics.median(times.step for times in steps),
        "steps": len(steps),
    }


def here() -> dict[str, Any]:
    """What the times depend on, and can be traced by."""
    found: dict[str, Any] = json.loads(json.dumps(environment(torch.device("cpu"))))
    return found


def measured_here(file: Path | None = None) -> dict[str, Any]:
    """What the file holds, if it was measured on such a machine as this, by whichever commit."""
    file = file or FILE
    if not file.is_file():
        return {}
    before, now = json.loads(file.read_text(encoding="utf-8")), here()
    same = all(before["environment"].get(key) == now[key] for key in now.keys() - {"spt", "commit"})
    return dict(before) if same else {}


def measure_all(names: Iterable[str], before: Mapping[str, Any]) -> list[str]:
    """Measure one after the other, and write each beside what was measured before, under the commit that began; returns
    those that failed."""
    rows, failed = dict(before.get("rows", {})), []
    facts = before["environment"] if rows else here()
    for name in names:
        try:
            rows[name] = measure(name)
        except Exception as error:
            sys.stderr.write(f"{name}: {one_line(error)}\n")
            failed.append(name)
            continue
        sys.stdout.write(f"{name}: {rows[name]['seconds']['step']:.3g} s\n")
        origin = {"environment": facts, "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": COMMAND}
        write_json(FILE, {"kind": "architectures", **SIZES, **origin, "rows": dict(sorted(rows.items()))})
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="architectures; default: those of the page that are missing")
    parser.add_argument("--again", action="store_true", help="all of the page")
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    before = {} if given.again else measured_here()
    names = given.names or [name for name in named() if name not in before.get("rows", {})]
    return 1 if measure_all(names, before) else 0


if __name__ == "__main__":
    sys.exit(main())
