"""Measures rounding errors of every model and writes docs/measurements/errors.json; then `make docs`.

    python docs/measure_errors.py           every model
    python docs/measure_errors.py mamba s4  these, again

The same weights and inputs in float64 are what float32 and bfloat16 (autocast) are held against, outputs and gradients,
and step by step what is computed for the whole sequence. An error is the largest difference relative to the largest
entry; of gradients, those of the input and all parameters, the norm of the difference relative to theirs.
"""

import argparse
import copy
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spt.checks.model_contract import all_valid, difference, outputs_by_step
from spt.config.plugins import find_plugin, listing
from spt.errors import UsageError
from spt.models.base import Backbone, Unsupported
from spt.runs.files import write_json
from spt.runtime.environment import environment

FILE = Path(__file__).resolve().parent / "measurements" / "errors.json"
COMMAND = "python docs/measure_errors.py"
BATCH, LENGTH, WIDTH, LAYERS = 2, 1024, 64, 2
SHAPE = {"batch": BATCH, "length": LENGTH, "d_model": WIDTH, "layers": LAYERS}


def models() -> list[str]:
    """Every native model."""
    return [row.name for row in listing("models") if row.name != "hf"]


def build(name: str, causal: bool) -> Backbone | None:
    """With fixed weights, in evaluation mode; None where the model has no such form."""
    module = find_plugin("models", name).module
    sizes = {"d_model": WIDTH, "n_layers": LAYERS, "max_length": LENGTH, "causal": causal}
    torch.manual_seed(0)
    try:
        model: Backbone = module.build(module.Config.model_validate_json(json.dumps(sizes)))
    except (Unsupported, UsageError, ValueError):
        return None
    return model.eval()


def results(model: Backbone, x: Tensor, half: bool = False) -> Iterator[Tensor]:
    """The output, then the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    weight = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view_as(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        y = model(x, all_valid(x))
    (y.double() * weight).sum().backward()
    yield y.detach().double()
    yield from (leaf.grad.double() for leaf in [x, *model.parameters()] if leaf.grad is not None)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all tensors, as one vector."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def errors(model: Backbone, x: Tensor) -> dict[str, float]:
    exact = list(results(copy.deepcopy(model).double(), x.double()))
    found = {}
    for name, half in (("float32", False), ("bfloat16", True)):
        output, *gradients = results(copy.deepcopy(model), x, half)
        found[f"{name} output"] = difference(output, exact[0])
        found[f"{name} gradients"] = float(
            norm(g - h for g, h in zip(gradients, exact[1:], strict=True)) / norm(exact[1:])
        )
    return found


@torch.no_grad()
def step_error(model: Backbone, x: Tensor) -> float | None:
    """Step by step against the whole sequence, in float32; None without a recurrence."""
    if not model.recurrent:
        return None
    return difference(outputs_by_step(model, x), model(x, all_valid(x)))


def measure(name: str) -> dict[str, Any]:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    two_sided, causal = build(name, causal=False), build(name, causal=True)
    model = two_sided or causal
    assert model is not None
    return {"causal": two_sided is None, **errors(model, x), "steps": None if causal is None else step_error(causal, x)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure rounding errors of models.")
    parser.add_argument("names", nargs="*", metavar="MODEL", help="These, again; otherwise all.")
    chosen = parser.parse_args().names
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if chosen and FILE.is_file() else {}
    for name in chosen or models():
        rows[name] = measure(name)
        print(name, rows[name], flush=True)  # noqa: T201
    facts = json.loads(json.dumps(environment(torch.device("cpu"))))
    ordered = {name: rows[name] for name in models() if name in rows}
    date = datetime.now(UTC).date().isoformat()
    write_json(FILE, {"command": COMMAND, "date": date, "shape": SHAPE, "environment": facts, "rows": ordered})


if __name__ == "__main__":
    main()
