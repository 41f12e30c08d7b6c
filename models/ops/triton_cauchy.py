"""The sums over modes of S4's kernel at the roots of unity by Triton, in float32: no denominator is stored.

For each mode and node 1 / (|w|^2 - y^2 - 2 i y Re w), which serves a conjugate pair and all rows. Close to resonance
Im w - y cancels; both therefore come as two float32, whose sum has twice the digits, and the quotient keeps all of its
own. The sums are products of matrices in IEEE float32; those over nodes, in backward, are added in float64.

Tested in Triton's interpreter, which shows neither races nor reduced precision nor the limits of shared memory; no GPU
has run this. Letters as in `dplr`: H features, M modes, R rows of numerators, Q nodes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.precision import as_stored

_PROGRAMS = 1024  # that backward divides its nodes for


class Tile(NamedTuple):
    """What a program computes at once, chosen so that compilers for A100 and H100 keep no registers in memory."""

    ROWS: int
    MODES: int
    NODES: int
    num_warps: int


@triton.jit
@no_type_check
def _inverse(real, imag, y):
    """Real and imaginary part of 1 / (|w|^2 - y^2 - 2 i y Re w), from float64."""
    imag_high, y_high = imag.to(tl.float32), y.to(tl.float32)
    imag_low, y_low = (imag - imag_high).to(tl.float32), (y - y_high).to(tl.float32)
    near = (imag_high - y_high) + (imag_low - y_low)
    far = (imag_high + y_high) + (imag_low + y_low)
    real = real.to(tl.float32)
    down = real * real + near * far
    side = -2.0 * real * y_high
    scale = 1.0 / (down * down + side * side)
    return down * scale, -side * scale


@triton.jit
@no_type_check
def _forward(
    rows, w, y, real_out, imag_out, R, H, M, Q,
    ROWS: tl.constexpr, MODES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """All rows of a feature at a tile of nodes: all modes, some at a time."""
    h = tl.program_id(1)
    r = tl.arange(0, ROWS)
    q = tl.program_id(0) * NODES + tl.arange(0, NODES)
    node = tl.load(y + q, q < Q, 0.0)[None, :]
    real_sum = tl.zeros([ROWS, NODES], tl.float32)
    imag_sum = tl.zeros([ROWS, NODES], tl.float32)
    row = (r[:, None] * H + h).to(tl.int64)
    for first in range(0, M, MODES):
        m = first + tl.arange(0, MODES)
        mode = w + (h * M + m) * 2
        real, imag = _inverse(tl.load(mode, m < M, 1.0)[:, None], tl.load(mode + 1, m < M, 1.0)[:, None], node)
        numerators = tl.load(rows + row * M + m[None, :], (r < R)[:, None] & (m < M)[None, :], 0.0)
        real_sum = tl.dot(numerators, real, real_sum, input_precision="ieee")
        imag_sum = tl.dot(numerators, imag, imag_sum, input_precision="ieee")
    place, inside = row * Q + q[None, :], (r < R)[:, None] & (q < Q)[None, :]
    tl.store(real_out + place, real_sum, inside)
    tl.store(imag_out + place, imag_sum, inside)


@triton.jit
@no_type_check
def _backward(
    rows, w, y, real_grad, imag_grad, drows, dw, R, H, M, Q, span,
    ROWS: tl.constexpr, MODES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """For a tile of modes of a feature, over `span` nodes: the gradient of rows (parts, R, H, M) and the sums that that
    of w is made of, (2, parts, H, M).

    With c the gradient of the result and T the inverse, that of rows is Re sum_q conj(c) T, and the denominator's is
    E = -T^2 sum_r rows conj(c). The denominator's derivatives by Re w and Im w are 2 Re w - 2 i y and 2 Im w.
    """
    tiles = tl.cdiv(M, MODES)
    h = tl.program_id(0) // tiles
    m = (tl.program_id(0) % tiles) * MODES + tl.arange(0, MODES)
    part = tl.program_id(1)
    r = tl.arange(0, ROWS)
    row = (r[:, None] * H + h).to(tl.int64)
    mode = w + (h * M + m) * 2
    mode_real, mode_imag = tl.load(mode, m < M, 1.0)[None, :], tl.load(mode + 1, m < M, 1.0)[None, :]
    inside = (r < R)[:, None] & (m < M)[None, :]
    numerators = tl.load(rows + row * M + m[None, :], inside, 0.0)
    total = tl.zeros([ROWS, MODES], tl.float64)
    plain = tl.zeros([MODES], tl.float64)
    weighted = tl.zeros([MODES], tl.float64)
    none = tl.zeros([NODES, MODES], tl.float32)
    for first in range(part * span, tl.minimum((part + 1) * span, Q), NODES):
        q = first + tl.arange(0, NODES)
        node = tl.load(y + q, q < Q, 0.0)[:, None]
        real, imag = _inverse(mode_real, mode_imag, node)
        place, known = row * Q + q[None, :], (r < R)[:, None] & (q < Q)[None, :]
        c_real, c_imag = tl.load(real_grad + place, known, 0.0), tl.load(imag_grad + place, known, 0.0)
        product = tl.dot(c_real, real, tl.zeros([ROWS, MODES], tl.float32), input_precision="ieee")
        product = tl.dot(c_imag, imag, product, input_precision="ieee")
        total += product.to(tl.float64)
        sum_real = tl.dot(tl.trans(c_real), numerators, none, input_precision="ieee")
        sum_imag = tl.dot(tl.trans(c_imag), numerators, none, input_precision="ieee")
        square_real, square_imag = real * real - imag * imag, 2.0 * real * imag
        plain -= tl.sum(sum_real * square_real + sum_imag * square_imag, axis=0).to(tl.float64)
        turned = (sum_real * square_imag - sum_imag * square_real) * node.to(tl.float32)
        weighted -= tl.sum(turned, axis=0).to(tl.float64)
    tl.store(drows + part.to(tl.int64) * R * H * M + row * M + m[None, :], total, inside)
    place = dw + (part * H + h) * M + m
    tl.store(place, plain, m < M)
    tl.store(place + tl.num_programs(1) * H * M, weighted, m < M)


class Sums(torch.autograd.Function):
    """Rows (R, H, M) in float32, w (H, M) complex128 and y (Q,) float64 -> real and imaginary part (R, H, Q)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows, w, y = (as_stored(x).contiguous() for x in (rows, torch.view_as_real(as_stored(w)), y))
        ctx.save_for_backward(rows, w, y)
        (R, H, M), Q = rows.shape, len(y)
        tile = _tile_forward(R, M)
        real, imag = rows.new_empty(2, R, H, Q).unbind()
        with torch.cuda.device_of(rows):
            grid = (triton.cdiv(Q, tile.NODES), H)
            _forward[grid](rows, w, y, real, imag, R, H, M, Q, **tile._asdict())
        return real, imag

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, real: Tensor, imag: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, w, y = ctx.saved_tensors
        (R, H, M), Q = rows.shape, len(y)
        tile = _tile_backward(R, M)
        tiles, blocks = H * triton.cdiv(M, tile.MODES), triton.cdiv(Q, tile.NODES)
        span = triton.cdiv(blocks, min(blocks, triton.cdiv(_PROGRAMS, tiles))) * tile.NODES
        parts = triton.cdiv(Q, span)
        drows = torch.empty(parts, R, H, M, dtype=torch.float64, device=rows.device)
        dw = torch.empty(2, parts, H, M, dtype=torch.float64, device=rows.device)
        real, imag = (as_stored(x.to(rows.dtype)).contiguous() for x in (real, imag))
        with torch.cuda.device_of(rows):
            _backward[(tiles, parts)](rows, w, y, real, imag, drows, dw, R, H, M, Q, span, **tile._asdict())
        plain, weighted = dw.sum(1)
        dmode = 2 * torch.complex(w[..., 0] * plain + weighted, w[..., 1] * plain)
        return drows.sum(0).to(rows.dtype), dmode, None


def _tile_forward(rows: int, modes: int) -> Tile:
    return _tile(rows, min(32, modes), 64)


def _tile_backward(rows: int, modes: int) -> Tile:
    return _tile(rows, min(16, modes), 32)


def _tile(rows: int, modes: int, nodes: int) -> Tile:
    """Sides of matrix products are 16 at least."""
    return Tile(max(16, triton.next_power_of_2(rows)), max(16, triton.next_power_of_2(modes)), nodes, 8)


def trial(device: str, small: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Kernels of S4 and all their gradients; see `backends.TRITON`."""
    from spt.models.ops.dplr import StateSpace, dplr_kernel
    from spt.models.ops.hippo import nplr

    H, M, length = (3, 4, 70) if small else (256, 32, 1024)
    legs = nplr(2 * M)
    A, P, B = (x.to(device, torch.complex128).repeat(H, 1) for x in (legs.w, legs.P, legs.B))
    dt = torch.logspace(-3, -1, H, dtype=torch.float64, device=device)
    # Not drawn: the random numbers of a run stay as they are.
    angle = torch.arange(H * M, dtype=torch.float64, device=device).view(1, H, M)
    C, c = torch.polar(torch.ones_like(angle), angle * angle), torch.arange(H * length, device=device).sin()
    space = StateSpace(*(x.detach().requires_grad_() for x in (dt, A, P, B, C)))

    def run() -> tuple[Tensor, ...]:
        kernel = dplr_kernel(space, length, torch.float32)
        return kernel, *torch.autograd.grad(kernel, space, c.view(1, H, length))

    return run
