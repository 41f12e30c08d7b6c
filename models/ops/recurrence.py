"""The linear part of S5 and LRU: x_t = a x_{t-1} + B u_t and y_t = Re(C x_t) + D u_t, with its gradients.

Complex matrices act as real ones, and states of both directions are read in one product. One sequence after another,
and its products some steps at a time, so that little memory is needed and most of it stays in a CPU's cache; scans are
in place. Only u and the states are kept for the backward pass. On a GPU `scan_products` does all of it at once.

Letters: B sequences, L steps, H features, P states, K directions.
"""

from typing import Any

import torch
from jaxtyping import Complex, Complex128, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops import scan_products
from spt.models.ops.output import blocks
from spt.models.ops.precision import autocast_type, without_autocast
from spt.models.ops.product import product
from spt.models.ops.scan import entry_map, exit_map, gradients, solve


def recurrence(
    u: Float[Tensor, "B L H"],
    a: Complex128[Tensor, " P"],
    enters: Complex[Tensor, "P H"],
    leaves: Complex[Tensor, "K H P"],
    D: Float[Tensor, " H"],
) -> Float[Tensor, "B L H"]:
    """y, from B (`enters`) and C (`leaves`); the second of two directions runs backwards. Autocast may round the
    factors of products, but not the states."""
    if scan_products.preferred(u):
        return scan_products.recurrence_by_products(u, a, entry_map(enters), scan_products.exit_rows(leaves), D)
    y: Tensor = _Recurrence.apply(u, a, entry_map(enters), exit_map(leaves), D)
    return y


class _Recurrence(torch.autograd.Function):
    """`into` (2P, H) and `out` (H, 2KP) are real; so are the states x (B, L, K, P, 2) and g, the gradients of
    B u in each direction."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, a: Tensor, into: Tensor, out: Tensor, D: Tensor) -> Tensor:
        ctx.type = autocast_type(u) or into.dtype
        with without_autocast(u):
            P, K = len(a), out.shape[1] // len(into)
            x, y = into.new_empty(*u.shape[:2], K, P, 2), torch.empty_like(u, dtype=D.dtype)
            enters, leaves = into.to(ctx.type), out.to(ctx.type)
            sequences, steps = blocks(u)
            for s in sequences:
                for t in steps:
                    x[s, t] = _map(u[s, t], enters).to(x.dtype).unflatten(-1, (1, P, 2))
                for k in range(K):
                    states = torch.view_as_complex(x[s, :, k])
                    solve(a, states, states, None, reverse=k == 1)
                for t in steps:
                    torch.addcmul(_map(x[s, t].flatten(2), leaves).to(y.dtype), D, u[s, t], out=y[s, t])
        ctx.save_for_backward(u, a, into, out, D, x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, a, into, out, D, x = ctx.saved_tensors
        du = torch.empty_like(u) if ctx.needs_input_grad[0] else None
        da, dD = torch.zeros_like(a), torch.zeros_like(D)
        dinto, dout = (torch.zeros_like(each.T, memory_format=torch.contiguous_format) for each in (into, out))
        enters, leaves = into.T.to(ctx.type), out.T.to(ctx.type)
        sequences, steps = blocks(u)
        for s in sequences:
            g = torch.empty_like(x[s])
            for t in steps:
                g[:, t] = _map(dy[s, t], leaves).view_as(g[:, t])
                _add_products(dout, x[s, t].flatten(2), dy[s, t], ctx.type)
            for k in range(x.shape[2]):
                states, change = torch.view_as_complex(x[s, :, k]), torch.view_as_complex(g[:, :, k])
                da += gradients(a, states, change, change, reverse=k == 1)
            for t in steps:
                dv = (g[:, t, 0] if x.shape[2] == 1 else g[:, t, 0] + g[:, t, 1]).flatten(2)
                _add_products(dinto, u[s, t], dv, ctx.type)
                dD += (dy[s, t] * u[s, t]).sum((0, 1))
                if du is not None:
                    torch.addcmul(_map(dv, enters).to(D.dtype), D, dy[s, t], out=du[s, t])
        return du, da, dinto.T, dout.T, dD


def _map(x: Float[Tensor, "B L K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "B L N"]:
    return product(x.flatten(0, 1).to(weight.dtype), weight).unflatten(0, x.shape[:2])


def _add_products(
    total: Float[Tensor, "M N"], a: Float[Tensor, "B L M"], b: Float[Tensor, "B L N"], dtype: torch.dtype
) -> None:
    """Add the sum of a b^T over sequences and steps."""
    total += product(a.flatten(0, 1).to(dtype).T, b.flatten(0, 1).to(dtype).T)
