"""Tries which models have a torch.export program and writes docs/measurements/programs.json; then `make docs`.

    python docs/measure_programs.py             all models, two-sided and causal
    python docs/measure_programs.py mamba s4d   these, again

Each in a small size, with random weights: what can vary is a matter of the code, not of sizes or weights.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from spt.config.plugins import find_plugin, listing
from spt.config.recipe import EncoderConfig, HeadConfig, Part
from spt.errors import UsageError
from spt.inference.program import make_program
from spt.inference.trained_model import TrainedModel
from spt.models.base import Unsupported
from spt.runs.files import write_json
from spt.tasks.base import Classes, Values
from spt.training.build import Architecture, build_network
from spt.training.objectives import Output

FILE = Path(__file__).resolve().parent / "measurements" / "programs.json"
COMMAND = "python docs/measure_programs.py"
SIZES = {"d_model": 16, "n_layers": 2}
LENGTH = 24


def models() -> list[str]:
    """Ours, but for `hf`, which is as many as transformers has."""
    return [row.name for row in listing("models") if row.source == "spt" and row.name != "hf"]


def untrained(name: str, causal: bool) -> TrainedModel:
    """A small classifier of values, as if it had been trained. Raises UsageError where the model cannot be built so."""
    config = find_plugin("models", name).module.Config(causal=causal, **SIZES)
    part, input, output = (
        Part(name=name, **config.model_dump(mode="json")),
        Values(2),
        Output("cross_entropy", False, 1, 3),
    )
    parts = Architecture(model=part, encoder=EncoderConfig(), head=HeadConfig(), seed=0)
    return TrainedModel(
        network=build_network(parts, input, output, LENGTH).eval(),
        architecture=parts,
        input=input,
        target=Classes(3),
        output=output,
        length=LENGTH,
    )


def tried(name: str, causal: bool) -> dict[str, Any] | None:
    """What the model's program takes, or why it has none; None where the model cannot be built so."""
    try:
        model = untrained(name, causal)
    except UsageError as error:
        if isinstance(error.__cause__, Unsupported):
            return None
        raise
    try:
        return make_program(model).about()
    except UsageError as error:
        return {"reason": str(error)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    asked = parser.parse_args(arguments).models
    found = json.loads(FILE.read_text(encoding="utf-8")) if asked and FILE.is_file() else {"rows": {}}
    for name in asked or models():
        row = {direction: tried(name, direction == "causal") for direction in ("two-sided", "causal")}
        found["rows"][name] = row
        sys.stdout.write(f"{name} {row}\n")
        sys.stdout.flush()
        rows = {name: found["rows"][name] for name in sorted(found["rows"])}
        write_json(FILE, {"command": COMMAND, "torch": torch.__version__.partition("+")[0], "rows": rows})


if __name__ == "__main__":
    main()
