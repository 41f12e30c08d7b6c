"""Autocast, which the meta device does not have; TF32, which kernels and scans do without; tensors that have shapes but
no values, or signs by a flag."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only

P = ParamSpec("P")
Float32 = Literal["ieee", "tf32"]

_float32: Float32 = "ieee"  # how GPUs multiply float32 now, as far as this module was asked


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """For what loses too much in half precision: within, operations on x's device keep the types they are given."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type that autocast gives matrix products on x's device now, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else None


@contextlib.contextmanager
def float32_products(how: Float32) -> Iterator[None]:
    """Within, NVIDIA GPUs compute float32 matrix products and convolutions so: `ieee`, with all 24 bits of the factors,
    or `tf32`, with 11 of them. cuDNN's recurrent networks are never rounded, which would add up over their steps.

    By torch's settings for single operations: those for all, and those of old, raise when read beside them.
    """
    global _float32
    cudnn: Any = torch.backends.cudnn
    operations: dict[Any, Float32] = {torch.backends.cuda.matmul: how, cudnn.conv: how, cudnn.rnn: "ieee"}
    before, known = {each: each.fp32_precision for each in operations}, _float32
    try:
        _float32 = how
        for each, precision in operations.items():
            each.fp32_precision = precision
        yield
    finally:
        _float32 = known
        for each, precision in before.items():
            each.fp32_precision = precision


def without_tf32() -> AbstractContextManager[None]:
    """Within, products keep all their bits: where no gradients are asked for, as in an autograd Function."""
    return contextlib.nullcontext() if _float32 == "ieee" else float32_products("ieee")


def in_ieee(function: Callable[[], Tensor], inputs: Iterable[Tensor]) -> Tensor:
    """function(), its products and those of its gradient not in TF32 whatever others are: for kernels and scans, which
    lose three of seven digits to it. `inputs`: all tensors through which gradients flow, none computed from another."""
    if _float32 == "ieee":
        return function()
    if not torch.is_grad_enabled():
        with without_tf32():
            return function()
    given = tuple(inputs)
    result: Tensor = _InIeee.apply(function, given, *given)
    return result


def ieee_products(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A function of tensors that computes `in_ieee`."""

    @functools.wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if _float32 == "ieee" or not torch.is_grad_enabled():
            return in_ieee(lambda: function(*args, **kwargs), ())
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # Of each a copy without a past: one may be computed from another, whose gradient would be counted twice.
        inner = tree_map_only(Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), (args, kwargs))
        inside = tuple(each for each in tree_leaves(inner) if isinstance(each, Tensor))
        result: Tensor = _InIeee.apply(lambda: function(*inner[0], **inner[1]), inside, *given)
        return result

    return compute


class _InIeee(torch.autograd.Function):
    """A graph of its own, so that the settings can be made before its backward pass and undone behind it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], Tensor], inside: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """`inside`: what the function takes for the inputs."""
        with torch.enable_grad(), float32_products("ieee"):
            ctx.output = function()
        ctx.inside = inside
        result: Tensor = ctx.output.detach()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[2:]
        needed = [each for each, needs in zip(ctx.inside, asked, strict=True) if needs]
        with torch.enable_grad(), float32_products("ieee"):
            gradients = iter(torch.autograd.grad(ctx.output, needed, grad, allow_unused=True))
        return None, None, *(next(gradients) if needs else None for needs in asked)


def has_values(x: Tensor) -> bool:
    """False for tensors that only stand for others, as when memory or operations are counted."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def as_stored(x: Tensor) -> Tensor:
    """Numbers that are conjugated or negative by a flag alone, which kernels of our own do not see, written out."""
    return x.resolve_conj().resolve_neg()


def at_least_float32(x: Tensor) -> Tensor:
    """For recurrences and gates, which lose too much in half precision: float32, or float64 where x has it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
