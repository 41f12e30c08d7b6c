"""What is changed in a transformers model when it is built: errors corrected, its parameters put in order.

Changes are made in place.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def correct(model: Any, random_weights: bool) -> None:
    """Where transformers 5.23 differs from the papers, or is not reproducible from a seed."""
    for module in model.modules():
        name = type(module).__name__
        if name == "NystromformerSelfAttention":
            module.init_option = "exact"  # the other one divides by a maximum over the whole batch
        elif name == "ReformerLayer":
            # Its own methods draw a seed from the operating system.
            methods = {f"_init_{part}_seed": _seed_from_torch(part) for part in ("attention", "feed_forward")}
            module.__class__ = type(name, (type(module),), methods)
        elif random_weights and name == "xLSTMFeedForward" and hasattr(module, "proj_up_gate"):
            # Because of its name it is initialised to zero, like the gates of the recurrence.
            nn.init.normal_(module.proj_up_gate.weight, std=math.sqrt(2 / (5 * model.config.hidden_size)))


def _seed_from_torch(part: str) -> Callable[[Any], None]:
    """A method that sets a seed which follows from torch's last one, and becomes torch's (Knuth's linear congruential
    generator)."""

    def set_seed(layer: Any) -> None:
        seed = (torch.initial_seed() * 6364136223846793005 + 1442695040888963407) % 2**63
        torch.manual_seed(seed)
        setattr(layer, f"{part}_seed", seed)

    return set_seed


def make_constants_buffers(model: Any) -> None:
    """Tables that are never trained (sinusoids) become buffers, which are not saved: they follow from the settings."""
    for name, parameter in list(model.named_parameters()):
        if not parameter.requires_grad:
            parent, last = _parent(model, name)
            del parent._parameters[last]
            parent.register_buffer(last, parameter.detach(), persistent=False)


def register_shared_parameters_once(model: Any) -> None:
    """A parameter of several layers is registered, and saved, in the first; for the others it is a plain attribute."""
    registered: set[int] = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in registered:
            parent, last = _parent(model, name)
            del parent._parameters[last]
            parent.__dict__[last] = parameter
        registered.add(id(parameter))


def remove(model: Any, names: Iterable[str]) -> Callable[[], None]:
    """Remove modules and parameters; returns a function that restores them."""
    removed = []
    for name in names:
        parent, last = _parent(model, name)
        registry = parent._modules if last in parent._modules else parent._parameters
        removed.append((registry, last, registry[last]))
        registry[last] = None

    def restore() -> None:
        for registry, last, value in removed:
            registry[last] = value

    return restore


def _parent(model: Any, name: str) -> tuple[Any, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last
