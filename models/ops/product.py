"""Matrix products in float32 on a CPU, by oneDNN where it is faster than torch's default library.

torch hands float32 products to MKL, which uses no AVX-512 on processors of other makers. oneDNN, which torch contains
as well, is 2.3 times as fast there (AMD Zen 5: 230 against 100 GFLOP/s a core), with the same rounding of each
operation.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.ops.precision import autocast_type, has_values

_LEAST = 1 << 21  # multiplications; below, the call itself takes longer
_LEAST_WITH_GRADIENTS = 1 << 24  # and below this one, what a Function of our own takes in Python
_FEW_ROWS = 8


class Linear(nn.Linear):
    """torch's, by the faster library."""

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        return linear(x, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*B K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "*B N"]:
    """x weight^T + bias at every step, with gradients; autocast may round its factors."""
    small = torch.compiler.is_exporting() or x.numel() * len(weight) < _LEAST_WITH_GRADIENTS
    if small or autocast_type(x) is not None or not _suits_onednn(x.flatten(0, -2), weight):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        dx = linear(grad, weight.T) if ctx.needs_input_grad[0] else None
        dweight = linear(x.flatten(0, -2).T, flat.T).T if ctx.needs_input_grad[1] else None
        return dx, dweight, flat.sum(0) if ctx.needs_input_grad[2] else None


def product(
    a: Float[Tensor, "M K"], b: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "M N"]:
    """a b^T + bias, of which torch knows no gradient: for an autograd Function. `b` may be the transpose of a
    contiguous matrix at no cost; whatever else is not contiguous is copied."""
    return _by_onednn(a, b, bias) if _suits_onednn(a, b) else F.linear(a, b, bias)


def batched_product(a: Float[Tensor, "G M K"], b: Float[Tensor, "G K N"]) -> Float[Tensor, "G M N"]:
    """a b, group by group; oneDNN only serves one group."""
    return product(a[0], b[0].T)[None] if len(a) == 1 else torch.bmm(a, b)


def flop_formulas() -> dict[Any, Any]:
    """For torch's FlopCounterMode, which does not know oneDNN's products."""

    def operations(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
        return 2 * a.numel() * len(b)

    operations._get_raw = True  # type: ignore[attr-defined]  # tensors instead of their shapes
    return {torch.ops.mkldnn._linear_pointwise: operations} if _has_onednn() else {}


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # It ignores a bias's strides, and takes minutes for a matrix of which the rows are part of longer ones.
    a, bias = a.contiguous(), None if bias is None else bias.contiguous()
    b = b if b.T.is_contiguous() else b.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


def _suits_onednn(a: Tensor, b: Tensor) -> bool:
    if torch.compiler.is_compiling():  # before sizes, which would become those of a program
        return False
    large = len(a) >= _FEW_ROWS and a.numel() * len(b) >= _LEAST
    plain = a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    return large and plain and has_values(a) and _has_onednn()


@cache
def _has_onednn() -> bool:
    """Is torch's own entry to it there, and right? It has no public name for dense matrices."""
    a = torch.arange(6.0).view(2, 3)
    try:
        return torch.backends.mkldnn.is_available() and torch.equal(
            _by_onednn(a, a, a[0, :2]), F.linear(a, a, a[0, :2])
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
