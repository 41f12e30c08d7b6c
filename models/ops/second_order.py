"""Linear recurrences of second order with constant coefficients, y_t = trace y_{t-1} - determinant y_{t-2} + b_t.

With the roots p and q of z² - trace z + determinant they are two scans, one after the other:

    v_t = p v_{t-1} + b_t,    y_t = q y_{t-1} + v_t

That holds for complex pairs, for real roots and for a double root, where a matrix of eigenvectors would be singular or
nearly so. Gradients are those of trace and determinant, which are smooth where the roots are not. Letters: B sequences,
L steps, P states.
"""

from typing import Any

import torch
from jaxtyping import Complex, Float64
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops import counts
from spt.models.ops.counts import Counts
from spt.models.ops.precision import without_autocast
from spt.models.ops.scan import solve, summed_products


def second_order_scan(
    trace: Float64[Tensor, " P"],
    determinant: Float64[Tensor, " P"],
    b: Complex[Tensor, "B L P"],
    *,
    reverse: bool = False,
) -> Complex[Tensor, "B L P"]:
    """y, from y_{-1} = y_{-2} = 0; `reverse`: the same from the last step to the first."""
    y: Tensor = _SecondOrder.apply(trace, determinant, b, reverse)
    return y


def second_order_flops(length: int, states: int) -> Counts:
    """Two complex scans; backward two more, and two sums of products."""
    return 2 * counts.scan(length, states)


class _SecondOrder(torch.autograd.Function):
    """Only y is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, trace: Tensor, determinant: Tensor, b: Tensor, reverse: bool) -> Tensor:
        y = _solve(trace, determinant, b, reverse)
        ctx.save_for_backward(trace, determinant, y)
        ctx.reverse = reverse
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        with without_autocast(dy):
            return _SecondOrder.gradients(ctx, dy)

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        trace, determinant, y = ctx.saved_tensors
        g = _solve(trace, determinant, dy, not ctx.reverse)
        L, sums = y.shape[1], []
        for lag in (1, 2):
            before, after = slice(0, max(0, L - lag)), slice(lag, L)
            if ctx.reverse:
                before, after = after, before
            sums.append(summed_products(y[:, before], g[:, after]).real)
        return sums[0], -sums[1], g, None


def _solve(trace: Tensor, determinant: Tensor, b: Tensor, reverse: bool) -> Tensor:
    spread = torch.sqrt(torch.complex(trace * trace / 4 - determinant, torch.zeros_like(trace)))
    y = torch.empty_like(b, memory_format=torch.contiguous_format)
    solve(trace / 2 + spread, b.resolve_conj(), y, None, reverse)
    solve(trace / 2 - spread, y, y, None, reverse)
    return y
