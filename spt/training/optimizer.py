"""Parameter groups from what the model declares, and the learning-rate schedule, stepped once per optimiser step."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from spt.config.recipe import Train
from spt.errors import UsageError
from spt.models.base import ParamGroup


class OptimizerGroup(NamedTuple):
    """Parameters trained alike."""

    learning_rate: float
    weight_decay: float
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def optimizer_groups(model: nn.Module, train: Train) -> list[OptimizerGroup]:
    """Every trainable parameter in exactly one group, largest group first.

    A module's `param_groups` name the parameters that differ; of the rest, weight decay takes the matrices (or all
    of them, with `weight_decay_on: all`, as the published code does).
    """
    declared: dict[str, ParamGroup] = {}
    for prefix, module in model.named_modules():
        for name, group in getattr(module, "param_groups", {}).items():
            what = f"param_groups of {type(module).__name__}"
            if not isinstance(group, ParamGroup) or not _positive(group.lr, group.lr_scale):
                raise UsageError(f"{what}: {name} has {group!r}, not a ParamGroup with a positive learning rate")
            if _find_attribute(module, name) is _MISSING:
                raise UsageError(f"{what} names {name}, which it does not have")
            declared[f"{prefix}.{name}" if prefix else name] = group
    members_of: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = declared.get(name, ParamGroup(weight_decay=parameter.ndim >= 2 or None))
        learning_rate = group.lr if group.lr is not None else train.learning_rate * group.lr_scale
        decays = group.weight_decay
        if decays is None:
            decays = train.weight_decay_on == "all" and group.lr is None and group.lr_scale == 1.0
        members_of.setdefault((learning_rate, train.weight_decay if decays else 0.0), []).append((name, parameter))
    groups = [
        OptimizerGroup(lr, decay, tuple(name for name, _ in members), tuple(parameter for _, parameter in members))
        for (lr, decay), members in members_of.items()
    ]
    return sorted(groups, key=lambda group: (-group.size, group.names))


def _positive(lr: float | None, scale: float) -> bool:
    return (lr is None or 0 < lr < math.inf) and scale > 0


_MISSING = object()


def _find_attribute(module: nn.Module, name: str) -> object:
    """An attribute by dotted name; a parameter that this configuration leaves out may be None."""
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, _MISSING)
    return value


def _uncompiled(method: Any) -> Any:
    """A method without the wrapper that keeps torch.compile out of it, and imports torch's compiler for that: two
    seconds of every start. Nothing here compiles an optimiser."""
    return getattr(method, "__wrapped__", method)


class AdamW(torch.optim.AdamW):
    """Torch's AdamW (Loshchilov and Hutter 2019)."""

    add_param_group = _uncompiled(torch.optim.Optimizer.add_param_group)
    zero_grad = _uncompiled(torch.optim.Optimizer.zero_grad)
    state_dict = _uncompiled(torch.optim.Optimizer.state_dict)
    load_state_dict = _uncompiled(torch.optim.Optimizer.load_state_dict)
    step = torch.no_grad()(_uncompiled(torch.optim.AdamW.step))


def adamw(model: nn.Module, train: Train, device: torch.device) -> AdamW:
    """AdamW with one parameter group per `Group`; the peak rate is kept as `peak`."""
    parts = [
        {
            "params": list(group.parameters),
            "lr": group.learning_rate,
            "peak": group.learning_rate,
            "weight_decay": group.weight_decay,
        }
        for group in optimizer_groups(model, train)
    ]
    # One kernel for all parameters is several times faster than the loop; it knows no complex numbers.
    real = all(parameter.is_floating_point() for parameter in model.parameters())
    return AdamW(parts, betas=train.betas, fused=real and device.type in ("cpu", "cuda"))


def factor(step: int, total: int, train: Train, reductions: int = 0) -> float:
    """Multiple of the peak rate at step `step` (from 0) of `total`: linear warm-up, then the schedule.

    `cosine` falls along half a cosine to 0 at the end, or at `cosine_steps`, and stays there; with `cosine_from: start`
    it is ahead by the warm-up's steps. `steps` falls by `step_factor` at each of the milestones; `plateau` has fallen
    `reductions` times by `plateau_factor`.
    """
    warmup = warmup_steps(total, train)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if train.schedule == "cosine":
        end = train.cosine_steps or total
        begun = step if train.cosine_from == "start" else step - warmup
        fall = 1.0 if step < warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, begun / max(1, end - warmup))))
    elif train.schedule == "steps":
        fall = train.step_factor ** sum(step >= round(milestone * total) for milestone in train.milestones)
    else:
        fall = train.plateau_factor**reductions if train.schedule == "plateau" else 1.0
    return rise * fall


def reduces_rate(waited: int, train: Train) -> bool:
    """Does the rate of a plateau schedule fall now, `waited` evaluations after the last improvement?

    As torch's ReduceLROnPlateau with threshold 0: when more than `plateau_patience` evaluations were in vain, counted
    from the last improvement or the last fall.
    """
    return train.schedule == "plateau" and waited > 0 and waited % (train.plateau_patience + 1) == 0


def warmup_steps(total: int, train: Train) -> int:
    return train.warmup_steps if train.warmup_fraction is None else round(train.warmup_fraction * total)


def set_rates(optimizer: torch.optim.Optimizer, step: int, total: int, train: Train, reductions: int = 0) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor(step, total, train, reductions)
