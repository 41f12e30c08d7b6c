"""The sums of `vandermonde` by Triton, in float32: every power is made where it is used, and none is stored.

exp(l (alpha + i theta)) for each mode and position: turns theta / 2 pi become a 64-bit fraction, so that its product
with l wraps around by itself and the angle is exact at any l; sine and cosine are polynomials in an eighth of a turn.
That is about 40 instructions, which a GPU does sooner than it reads a table. Sums over modes are plain, or, where many
rows share their modes, products of matrices in IEEE float32.

backward adds its sums over positions in float64, one part of them in each program, and the parts afterwards: no atomic
operations, so the same numbers each time.

Tested in Triton's interpreter, which shows neither races nor reduced precision nor the limits of shared memory; no GPU
has run this. Letters as in `vandermonde`: G groups of R rows that share N modes, L positions.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.precision import as_stored

_PROGRAMS = 1024  # that backward divides its positions for


class Tile(NamedTuple):
    """What a program computes at once, chosen so that compilers for A100 and H100 keep no registers in memory."""

    DOT: bool  # a matrix product, or sums
    ROWS: int
    MODES: int
    POSITIONS: int
    num_warps: int


@triton.jit
@no_type_check
def _fixed_point(theta):
    """The angle of one step in turns, in units of 2^-64, without whole turns."""
    turns = theta.to(tl.float64) * 0.15915494309189535
    turns -= tl.floor(turns + 0.5)
    return (turns * 9223372036854775808.0).to(tl.int64) << 1


@triton.jit
@no_type_check
def _powers(decay, turns, position):
    """Real and imaginary part of lambda^position."""
    high = ((turns * position) >> 32).to(tl.int32)
    quarter = ((high >> 29) + 1) >> 1
    x = ((high << 2) >> 2).to(tl.float32) * 1.4629180792671596e-09  # from the nearest quarter, in radians
    s = x * x
    sine = x + x * s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880))))
    cosine = 1.0 + s * (-1 / 2 + s * (1 / 24 + s * (-1 / 720 + s * (1 / 40320 - s * (1 / 3628800)))))
    odd = (quarter & 1) != 0
    real, imag = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    magnitude = tl.exp(decay * position.to(tl.float32))
    real = tl.where(((quarter + 1) & 2) != 0, -real, real) * magnitude
    return real, tl.where((quarter & 2) != 0, -imag, imag) * magnitude


@triton.jit
@no_type_check
def _add_product(total, a, b, DOT: tl.constexpr):
    """total + a b."""
    if DOT:
        total = tl.dot(a, b, total, input_precision="ieee")
    else:
        total += tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    return total


@triton.jit
@no_type_check
def _forward(
    W, alpha, theta, kernel, R, N, L,
    DOT: tl.constexpr, ROWS: tl.constexpr, MODES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """A tile of rows and positions: all modes, some at a time."""
    g = tl.program_id(1).to(tl.int64)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    l = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    row = (g * R + r)[:, None]
    total = tl.zeros([ROWS, POSITIONS], tl.float32)
    for first in range(0, N, MODES):
        n = first + tl.arange(0, MODES)
        decay = tl.load(alpha + g * N + n, n < N, 0.0).to(tl.float32)
        turns = _fixed_point(tl.load(theta + g * N + n, n < N, 0.0))
        real, imag = _powers(decay[:, None], turns[:, None], l[None, :])
        inside = (r < R)[:, None] & (n < N)[None, :]
        weights = W + (row * N + n[None, :]) * 2
        total = _add_product(total, tl.load(weights, inside, 0.0), real, DOT)
        total = _add_product(total, -tl.load(weights + 1, inside, 0.0), imag, DOT)
    tl.store(kernel + row * L + l[None, :], total, (r < R)[:, None] & (l < L)[None, :])


@triton.jit
@no_type_check
def _backward(
    grad, alpha, theta, sums, R, N, L, span,
    DOT: tl.constexpr, ROWS: tl.constexpr, MODES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """For a tile of rows and modes, over `span` positions: sums (4, parts, G, R, N) of c lambda^l and l c lambda^l."""
    tiles = tl.cdiv(N, MODES)
    g = (tl.program_id(0) // tiles).to(tl.int64)
    n = (tl.program_id(0) % tiles) * MODES + tl.arange(0, MODES)
    part = tl.program_id(1)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = (g * R + r)[:, None]
    decay = tl.load(alpha + g * N + n, n < N, 0.0).to(tl.float32)[None, :]
    turns = _fixed_point(tl.load(theta + g * N + n, n < N, 0.0))[None, :]
    zero = tl.zeros([ROWS, MODES], tl.float32)
    real_sum = zero.to(tl.float64)
    imag_sum = zero.to(tl.float64)
    late_real = zero.to(tl.float64)
    late_imag = zero.to(tl.float64)
    for first in range(part * span, tl.minimum((part + 1) * span, L), POSITIONS):
        l = first + tl.arange(0, POSITIONS).to(tl.int64)
        c = tl.load(grad + row * L + l[None, :], (r < R)[:, None] & (l < L)[None, :], 0.0)
        real, imag = _powers(decay, turns, l[:, None])
        late = c * l[None, :].to(tl.float32)
        real_sum += _add_product(zero, c, real, DOT).to(tl.float64)
        imag_sum += _add_product(zero, c, imag, DOT).to(tl.float64)
        late_real += _add_product(zero, late, real, DOT).to(tl.float64)
        late_imag += _add_product(zero, late, imag, DOT).to(tl.float64)
    G = tl.num_programs(0) // tiles
    plane = tl.num_programs(1) * G.to(tl.int64) * R * N
    inside = (r < R)[:, None] & (n < N)[None, :]
    place = sums + (part * G * R + row) * N + n[None, :]
    tl.store(place, real_sum, inside)
    tl.store(place + plane, imag_sum, inside)
    tl.store(place + 2 * plane, late_real, inside)
    tl.store(place + 3 * plane, late_imag, inside)


def _tile_forward(rows: int) -> Tile:
    return _tile(rows, Tile(True, 64, 16, 64, 8))


def _tile_backward(rows: int) -> Tile:
    return _tile(rows, Tile(True, 32, 32, 32, 8))


def _tile(rows: int, product: Tile) -> Tile:
    """Few rows are summed; a matrix product takes 16 and more."""
    if rows <= 4:
        return Tile(False, triton.next_power_of_2(rows), 32, 64, 4)
    return product._replace(ROWS=min(product.ROWS, max(16, triton.next_power_of_2(rows))))


class Sums(torch.autograd.Function):
    """(G, R, N, 2) and (G, N), (G, N) -> (G, R, L), as in `vandermonde`; the first float32."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, alpha: Tensor, theta: Tensor, length: int) -> Tensor:
        W, alpha, theta = (as_stored(x).contiguous() for x in (W, alpha, theta))
        ctx.save_for_backward(W, alpha, theta)
        G, R, N, _ = W.shape
        kernel = W.new_empty(G, R, length)
        tile = _tile_forward(R)
        grid = (triton.cdiv(length, tile.POSITIONS), G, triton.cdiv(R, tile.ROWS))
        with torch.cuda.device_of(W):
            _forward[grid](W, alpha, theta, kernel, R, N, length, **tile._asdict())
        return kernel

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        W, alpha, theta = ctx.saved_tensors
        G, R, N, _ = W.shape
        length = grad.shape[-1]
        tile = _tile_backward(R)
        tiles, rows = G * triton.cdiv(N, tile.MODES), triton.cdiv(R, tile.ROWS)
        blocks = triton.cdiv(length, tile.POSITIONS)
        span = triton.cdiv(blocks, min(blocks, triton.cdiv(_PROGRAMS, tiles * rows))) * tile.POSITIONS
        parts = triton.cdiv(length, span)
        sums = torch.empty(4, parts, G, R, N, dtype=torch.float64, device=W.device)
        with torch.cuda.device_of(W):
            c = as_stored(grad.to(W.dtype)).contiguous()
            _backward[(tiles, parts, rows)](c, alpha, theta, sums, R, N, length, span, **tile._asdict())
        real, imag, late_real, late_imag = sums.sum(1)
        dW = torch.stack([real, -imag], -1).to(W.dtype)
        dlog = (torch.view_as_complex(W.double()) * torch.complex(late_real, late_imag)).sum(1)
        return dW, dlog.real.to(alpha.dtype), -dlog.imag.to(theta.dtype), None


def trial_of_separate_modes(device: str, small: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Modes of each feature, as S4D has them; see `backends.TRITON`."""
    return _trial((1, 3, 5), (3, 5), 70, device) if small else _trial((1, 256, 32), (256, 32), 1024, device)


def trial_of_shared_modes(device: str, small: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Modes that all features share, as DLR has them."""
    return _trial((2, 9, 5), (5,), 70, device) if small else _trial((1, 256, 512), (512,), 1024, device)


def _trial(
    rows: tuple[int, int, int], modes: tuple[int, ...], length: int, device: str
) -> Callable[[], tuple[Tensor, ...]]:
    from spt.models.ops.vandermonde import vandermonde

    def waves(*shape: int) -> Tensor:  # not drawn: the random numbers of a run stay as they are
        return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=device).sin().view(shape)

    W, c = waves(*rows, 2).float().requires_grad_(), waves(*rows[:2], length).float()
    alpha, theta = (x.requires_grad_() for x in (-0.01 * (1.1 + waves(*modes)), 3 * waves(*modes)))

    def run() -> tuple[Tensor, ...]:
        kernel = vandermonde(W, alpha, theta, length)
        return kernel, *torch.autograd.grad(kernel, (W, alpha, theta), c)

    return run
