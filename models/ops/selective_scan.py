"""The selective scan of Mamba (Gu, Dao 2023, section 3), whose step sizes, inputs and outputs depend on the input.

    h_t = exp(dt_t A) h_{t-1} + (dt_t u_t) B_t,   y_t = h_t C_t

feature by feature, each with N states; all features read the same B_t and C_t. Written out for a sequence, states are N
times as large as its features. The sequence is therefore cut into windows, and exp(dt A) and h exist for one window at
a time: backward, which needs them in the reverse order, computes each window again from the state before it.

Letters: B sequences, L steps, E features, N states of a feature, W steps of a window.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.counts import Counts
from spt.models.ops.precision import ieee_products, without_autocast
from spt.models.ops.scan import solve, solve_back

_WINDOW = {"cpu": 1 << 19, "other": 1 << 24}  # numbers of its states; on a CPU they stay in its cache
_FEWEST_STEPS = 16  # of a window, so that few states are kept; where it would hold fewer, it holds fewer sequences


@ieee_products
def selective_scan(
    u: Float[Tensor, "B L E"],
    dt: Float[Tensor, "B L E"],
    A: Float[Tensor, "E N"],
    B: Float[Tensor, "B L N"],
    C: Float[Tensor, "B L N"],
    *,
    reverse: bool = False,
) -> Float[Tensor, "B L E"]:
    """y, from a state of zero; `reverse`: from the last step to the first. dt >= 0 and A <= 0; all have one type."""
    per_step = (u * dt, dt, B, C)
    v, dt, B, C = (each.flip(1) for each in per_step) if reverse else per_step
    parts: Iterable[tuple[Tensor, ...]] = [(v, dt, B, C)]
    if not torch.compiler.is_exporting():  # a program's batches may have any size
        sequences = max(1, _window(v) // (_FEWEST_STEPS * A.numel()))
        parts = zip(*(each.split(sequences) for each in (v, dt, B, C)), strict=True)
    rates = A.mT.contiguous()
    y = torch.cat([_SelectiveScan.apply(v, dt, rates, B, C) for v, dt, B, C in parts])
    return y.flip(1) if reverse else y


def selective_scan_flops(length: int, features: int, states: int) -> Counts:
    """Of each state and step, forward: dt A, v B, a multiply-add, and C h, summed. Backward: the states again; a scan
    of their gradients, from C dy; and both factors of each of the four products."""
    numbers = float(length * features * states)
    return Counts.of("scan", 6 * numbers, 19 * numbers)


class _SelectiveScan(torch.autograd.Function):
    """Of v = dt u and A (N, E): features come last, so that every operation runs along many numbers."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        y = torch.empty_like(v)
        windows = _windows(v, A)
        borders = v.new_zeros(len(windows) + 1, v.shape[0], *A.shape)  # the state before each window
        a, h = _buffers(2, v, A, windows)
        with without_autocast(v):
            for i, steps in enumerate(windows):
                part = _Window(v[:, steps], dt[:, steps], B[:, steps], borders[i])
                _, states = part.states(A, a, h)
                y[:, steps] = (C[:, steps, None] @ states).squeeze(2)
                borders[i + 1] = states[:, -1]
        ctx.save_for_backward(v, dt, A, B, C, borders)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        v, dt, A, B, C, borders = ctx.saved_tensors
        dv, ddt, dB, dC = (torch.empty_like(each) for each in (v, dt, B, C))
        dA, later = torch.zeros_like(A), torch.zeros_like(borders[0])  # what later windows add to a state's gradient
        windows = _windows(v, A)
        a, h, free = _buffers(3, v, A, windows)
        with without_autocast(v):
            for i, steps in reversed(list(enumerate(windows))):
                part = _Window(v[:, steps], dt[:, steps], B[:, steps], borders[i])
                kept, states = part.states(A, a, h)
                g, answer = free[:, : kept.shape[1]], dy[:, steps, None]
                dC[:, steps] = torch.mul(states, answer, out=g).sum(-1)
                torch.mul(C[:, steps, :, None], answer, out=g)
                g[:, -1] += later
                solve_back(kept.flatten(2), g.flatten(2), g.flatten(2), False)
                exponent = kept.mul_(g)
                later = exponent[:, 0].clone()
                exponent[:, 0] *= borders[i]
                exponent[:, 1:] *= states[:, :-1]
                dv[:, steps] = (B[:, steps, None] @ g).squeeze(2)
                dB[:, steps] = g.mul_(v[:, steps, None]).sum(-1)
                dA += torch.mul(exponent, dt[:, steps, None], out=g).sum((0, 1))
                ddt[:, steps] = exponent.mul_(A).sum(2)
        return dv, ddt, dA, dB, dC


class _Window(NamedTuple):
    v: Float[Tensor, "B W E"]
    dt: Float[Tensor, "B W E"]
    B: Float[Tensor, "B W N"]
    before: Float[Tensor, "B N E"]

    def states(self, A: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """exp(dt A) and h, both (B, W, N, E), in the memory of a and h."""
        a, h = (each[:, : self.v.shape[1]] for each in (a, h))
        torch.mul(self.dt[:, :, None], A / math.log(2), out=a).exp2_()  # on a CPU four times as fast as exp
        torch.mul(self.B[..., None], self.v[:, :, None], out=h)
        solve(a.flatten(2), h.flatten(2), h.flatten(2), self.before.flatten(1), False)
        return a, h


def _windows(v: Tensor, A: Tensor) -> list[slice]:
    length, sequences = v.shape[1], 1 if torch.compiler.is_exporting() else v.shape[0]
    size = max(_FEWEST_STEPS, _window(v) // max(1, sequences * A.numel()))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _window(v: Tensor) -> int:
    return _WINDOW["cpu" if v.device.type == "cpu" else "other"]


def _buffers(count: int, v: Tensor, A: Tensor, windows: list[slice]) -> Tensor:
    return v.new_empty(count, v.shape[0], windows[0].stop, *A.shape)
