"""Autocast, which the meta device does not have; and tensors that have shapes but no values."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """For what loses too much in half precision: within, operations on x's device keep the types they are given."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type that autocast gives matrix products on x's device now, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else None


def has_values(x: Tensor) -> bool:
    """False for tensors that only stand for others, as when memory or operations are counted."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def at_least_float32(x: Tensor) -> Tensor:
    """For recurrences and gates, which lose too much in half precision: float32, or float64 where x has it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
