"""`spt check rounding`: what models lose to rounding on this device, held against their own float64 on the CPU.

The same weights and inputs in float64 are what float32 and bfloat16 (autocast) are held against, outputs and gradients,
and step by step what is computed for the whole sequence. An error is the largest difference relative to the largest
entry; of gradients, those of the input and all parameters, the norm of the difference relative to theirs.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from spt.checks.model_contract import all_valid, difference, outputs_by_step
from spt.config.plugins import find_plugin, listing
from spt.errors import UsageError, one_line
from spt.models.base import Backbone, Unsupported
from spt.runtime.environment import command_line, environment

BATCH, LENGTH, WIDTH, LAYERS = 2, 1024, 64, 2


def native_models() -> list[str]:
    """All of the package but those of Hugging Face."""
    return [row.name for row in listing("models") if row.name != "hf"]


def check_rounding(
    names: Sequence[str], device: torch.device, length: int = LENGTH, tell: Callable[[str], object] = print
) -> dict[str, Any]:
    """What `spt check rounding` prints, as plain data; `tell` hears of each model as it begins.

    A model that fails on the device is a row with the reason. Raises UsageError for a name that is not known.
    """
    for name in names:
        find_plugin("models", name)
    rows: dict[str, dict[str, Any]] = {}
    for name in names or native_models():
        tell(name)
        try:
            rows[name] = model_rounding(name, device, length)
        except Exception as error:  # whatever a driver or a library raises: the other models are still of interest
            rows[name] = {"failed": one_line(error)}
    shape = {"batch": BATCH, "length": length, "d_model": WIDTH, "layers": LAYERS}
    facts = {"shape": shape, "environment": environment(device), "command": command_line()}
    return {**facts, "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}


def model_rounding(name: str, device: torch.device, length: int = LENGTH) -> dict[str, Any]:
    """Of one model: `float32 output`, `float32 gradients`, both of bfloat16, and `steps`, None without a recurrence."""
    x = torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(1))
    two_sided, causal = _build(name, length, causal=False), _build(name, length, causal=True)
    model = two_sided or causal
    if model is None:
        raise UsageError(f"{name} can be built neither causal nor two-sided at width {WIDTH}")
    steps = None if causal is None else _step_error(causal.to(device), x.to(device))
    return {"causal": two_sided is None, **_errors(model, x, device), "steps": steps}


def _build(name: str, length: int, causal: bool) -> Backbone | None:
    """With fixed weights, in evaluation mode; None where the model has no such form."""
    module = find_plugin("models", name).module
    sizes = {"d_model": WIDTH, "n_layers": LAYERS, "max_length": length, "causal": causal}
    torch.manual_seed(0)
    try:
        model: Backbone = module.build(module.Config.model_validate_json(json.dumps(sizes)))
    except (Unsupported, UsageError, ValueError):
        return None
    return model.eval()


def _results(model: Backbone, x: Tensor, half: bool = False) -> Iterator[Tensor]:
    """The output, then the gradients of the input and of every parameter, in float64 on the CPU."""
    x = x.clone().requires_grad_()
    weight = torch.cos(torch.arange(x.numel(), dtype=torch.float64, device=x.device)).view_as(x)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        y = model(x, all_valid(x))
    (y.double() * weight).sum().backward()
    yield y.detach().double().cpu()
    yield from (leaf.grad.double().cpu() for leaf in [x, *model.parameters()] if leaf.grad is not None)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all tensors, as one vector."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def _errors(model: Backbone, x: Tensor, device: torch.device) -> dict[str, float]:
    exact = list(_results(copy.deepcopy(model).cpu().double(), x.double()))
    found = {}
    for name, half in (("float32", False), ("bfloat16", True)):
        output, *gradients = _results(copy.deepcopy(model).to(device), x.to(device), half)
        found[f"{name} output"] = difference(output, exact[0])
        found[f"{name} gradients"] = float(
            _norm(g - h for g, h in zip(gradients, exact[1:], strict=True)) / _norm(exact[1:])
        )
    return found


@torch.no_grad()
def _step_error(model: Backbone, x: Tensor) -> float | None:
    """Step by step against the whole sequence, in float32; None without a recurrence."""
    if not model.recurrent:
        return None
    return difference(outputs_by_step(model, x), model(x, all_valid(x)))
