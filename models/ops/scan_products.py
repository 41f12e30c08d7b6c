"""The recurrence of S5 and LRU by matrix products: few launches, each of them large, as a GPU wants them.

A scan with constant coefficients is a linear map. A sequence is cut into chunks of T <= 64 steps, in which the states
are, for each of them, one product with the matrix [t, s] = a^(t-s). The states at the chunks' ends make a sequence that
is L / T steps long, of which the same is asked, until a single chunk is left; what is carried into a chunk is then
added by one more product. The backward pass is the same products with transposed matrices. That is O(T) operations a
step and state instead of O(1), but sequences and states are read and written a few times in all, and powers of a come
from double precision, so that errors do not grow with the length. On a CPU `recurrence` is faster.

Numbers are planar and steps are columns: states are (P, K, 2, T_1, ..., T_n, B) with real and imaginary part, where
step t = t_1 + T_1 (t_2 + T_2 (...)), so that a map from or to features is one product too, without a transposition.

Letters: B sequences, L steps, H features, P states, K directions, M columns, which are all steps of all sequences.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Complex, Complex128, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops import backends
from spt.models.ops.precision import autocast_type, without_autocast, without_tf32

_BITS = 6  # of the longest chunk's number of steps


class Level(NamedTuple):
    """Real matrices of chunks of T steps, each made of `every` steps of the sequence. On the first level, `within` maps
    inputs to states, on others, ends of chunks to what is carried into each chunk."""

    within: Float[Tensor, "P K n n"]  # n = 2 T
    ends: Float[Tensor, "P K 2 n"]  # to the state after all of them
    carried: Float[Tensor, "P K n 2"]  # from what is carried into the larger chunk

    def of_states(self, part: slice) -> "Level":
        return Level(*(matrices[part] for matrices in self))


Powers = tuple[Level, ...]


def powers(a: Complex128[Tensor, " P"], length: int, directions: int, dtype: torch.dtype) -> Powers:
    """What a product needs of the coefficients; the second direction runs backwards."""
    with torch.no_grad(), without_autocast(a):
        sizes, exponents, places = _places(length, directions)
        lags = torch.as_tensor(exponents, device=a.device)
        table = torch.polar(a.abs()[:, None] ** lags, a.angle()[:, None] * lags)
        table[:, -1] = 0  # for states that do not depend on an input
        real, imag = table.real.to(dtype), table.imag.to(dtype)
        planar = torch.stack([real, -imag, imag, real], 1)
        every = planar[..., torch.as_tensor(places, device=a.device)].unflatten(1, (2, 2))  # (P, 2, 2, all)
        made, at = [], 0
        for T in sizes:
            parts = []
            for rows, columns in ((T, T), (1, T), (T, 1)):
                count = directions * rows * columns
                part = every[..., at : at + count].unflatten(-1, (directions, rows, columns))
                parts.append(part.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3).contiguous())
                at += count
            made.append(Level(*parts))
        return tuple(made)


def recurrence_by_products(
    u: Float[Tensor, "B L H"],
    a: Complex128[Tensor, " P"],
    into: Float[Tensor, "R H"],
    out: Float[Tensor, "S H"],
    D: Float[Tensor, " H"],
    levels: Powers | None = None,
) -> Float[Tensor, "B L H"]:
    """As `recurrence`, from the real matrices of `entry_map` and `exit_rows`; `levels`: the powers of a, where they are
    known."""
    if levels is None:
        levels = powers(a, u.shape[1], len(out) // len(into), into.dtype)
    y: Tensor = _Products.apply(u, a, into, out, D, levels)
    return y


def together(x: Tensor) -> bool:
    """Whether work is done all at once: on a GPU, where launches cost more than operations."""
    return x.device.type != "cpu"


def preferred(x: Tensor) -> bool:
    """Whether products are: there, unless Triton computes scans."""
    return together(x) and not backends.uses_triton("scan", x)


def exit_rows(matrices: Complex[Tensor, "K H P"]) -> Float[Tensor, "S H"]:
    """The transpose of `exit_map`, with its rows in the order of states, directions and parts."""
    return torch.view_as_real(matrices.conj().resolve_conj()).permute(2, 0, 3, 1).flatten(0, 2)


class _Products(torch.autograd.Function):
    """Kept for the backward pass are u by columns, the states, and what is carried into the shortest chunks."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, a: Tensor, into: Tensor, out: Tensor, D: Tensor, levels: Powers) -> Tensor:
        ctx.type = autocast_type(u) or into.dtype
        with without_autocast(u):
            P = len(a)
            columns = _columns(u, levels)
            flat = columns.flatten(0, -2)
            v = torch.mm(into.to(ctx.type), flat.to(ctx.type).T).to(into.dtype)
            with without_tf32():  # products there stand for a scan
                x, carried = _solve(v.view(P, 2, -1), levels)
            y = torch.mm(x.view(len(out), -1).T.to(ctx.type), out.to(ctx.type)).to(D.dtype)
            y = _sequences(torch.addcmul(y, D, flat).view(columns.shape), u.shape[1])
        ctx.save_for_backward(columns, into, out, D, x, carried)
        ctx.levels, ctx.length = levels, u.shape[1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        columns, into, out, D, x, carried = ctx.saved_tensors
        P, K = x.shape[:2]
        gradients = _columns(dy, ctx.levels)
        flat, dflat = columns.flatten(0, -2), gradients.flatten(0, -2)
        rounded = dflat.to(ctx.type)
        dout = torch.mm(x.view(len(out), -1).to(ctx.type), rounded).to(out.dtype)
        g = torch.mm(out.to(ctx.type), rounded.T).to(out.dtype).view(x.shape)
        with without_tf32():
            g = _solve_back(g, ctx.levels)
        da = _coefficient_gradients(x, carried, g)
        dv = (g[:, 0] if K == 1 else g[:, 0] + g[:, 1]).view(2 * P, -1).to(ctx.type)
        dinto = torch.mm(dv, flat.to(ctx.type)).to(into.dtype)
        du = None
        if ctx.needs_input_grad[0]:
            du = torch.addcmul(torch.mm(dv.T, into.to(ctx.type)).to(D.dtype), D, dflat)
            du = _sequences(du.view(columns.shape), ctx.length).to(columns.dtype)
        return du, da, dinto, dout, (dflat * flat).sum(0).to(D.dtype), None


def _solve(v: Float[Tensor, "P 2 M"], levels: Powers) -> tuple[Float[Tensor, "P K 2 T m"], Float[Tensor, "P K 2 m"]]:
    """States, and what is carried into each chunk of the first level (m chunks of all sequences)."""
    first, *others = levels
    P, K, n, _ = first.within.shape
    x = torch.bmm(first.within.flatten(1, 2), v.view(P, n, -1)).view(P, K, 2, n // 2, -1)
    ends = [torch.stack([x[:, k, :, -1 if k == 0 else 0] for k in range(K)], 1)]
    for level in others[:-1]:
        ends.append(_product(level.ends, ends[-1]))
    carried = torch.zeros_like(ends[0]) if not others else _product(others[-1].within, ends[-1])
    for level, inputs in zip(others[-2::-1], ends[-2::-1], strict=True):
        carried = _product(level.within, inputs, _product(level.carried, carried))
    if others:
        _add_product(x, first.carried, carried)
    return x, carried.view(P, K, 2, -1)


def _solve_back(g: Float[Tensor, "P K 2 T m"], levels: Powers) -> Float[Tensor, "P K 2 T m"]:
    """The gradients of the inputs of each direction from those of the states: `_solve` transposed, line by line."""
    first, *others = levels
    if others:
        carried = [_product(first.carried.mT, g)]
        for level in others[:-1]:
            carried.append(_product(level.carried.mT, carried[-1]))
        ends = _product(others[-1].within.mT, carried[-1])
        for level, outputs in zip(others[-2::-1], carried[-2::-1], strict=True):
            ends = _product(level.within.mT, outputs, _product(level.ends.mT, ends))
        ends = ends.view(*g.shape[:3], -1)
        for k in range(g.shape[1]):
            g[:, k, :, -1 if k == 0 else 0].add_(ends[:, k])
    return _product(first.within.mT, g).view(g.shape)


def _product(matrices: Float[Tensor, "P K m n"], x: Tensor, more: Tensor | None = None) -> Tensor:
    """For each state and direction, with columns as many as x has numbers for each column of the matrices; `more` is
    added."""
    P, K, rows, n = matrices.shape
    columns = x.reshape(P * K, n, -1)
    if more is None:
        return torch.bmm(matrices.flatten(0, 1), columns)
    return torch.baddbmm(more.view(P * K, rows, -1), matrices.flatten(0, 1), columns)


def _add_product(x: Tensor, matrices: Float[Tensor, "P K m n"], columns: Tensor) -> None:
    P, K, rows, n = matrices.shape
    x.view(P * K, rows, -1).baddbmm_(matrices.flatten(0, 1), columns.reshape(P * K, n, -1))


def _coefficient_gradients(
    x: Float[Tensor, "P K 2 T m"], carried: Float[Tensor, "P K 2 m"], g: Float[Tensor, "P K 2 T m"]
) -> Complex128[Tensor, " P"]:
    """The sum of conj(x_{t-1}) g_t over directions, sequences and steps, in double precision."""
    before = torch.empty_like(x)
    before[:, 0, :, 1:], before[:, 0, :, 0] = x[:, 0, :, :-1], carried[:, 0]
    if x.shape[1] == 2:
        before[:, 1, :, :-1], before[:, 1, :, -1] = x[:, 1, :, 1:], carried[:, 1]
    double = torch.promote_types(x.dtype, torch.float64)
    real = (before * g).flatten(1).sum(1, dtype=double)
    imag = (before[:, :, 0] * g[:, :, 1]).addcmul_(before[:, :, 1], g[:, :, 0], value=-1).flatten(1)
    return torch.complex(real, imag.sum(1, dtype=double))


def _columns(x: Float[Tensor, "B L H"], levels: Powers) -> Float[Tensor, "*levels B H"]:
    """Padded with zeros behind its steps."""
    sizes = [level.within.shape[-1] // 2 for level in levels]
    padding = math.prod(sizes) - x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
    split = padded.unflatten(1, sizes[::-1])
    n = len(sizes)
    return split.permute(*range(n, 0, -1), 0, n + 1).contiguous()


def _sequences(columns: Float[Tensor, "*levels B H"], length: int) -> Float[Tensor, "B L H"]:
    n = columns.ndim - 2
    return columns.permute(n, *range(n - 1, -1, -1), n + 1).flatten(1, n)[:, :length].contiguous()


def _sizes(length: int) -> list[int]:
    """Steps of a chunk on each level: powers of two but for the last, so that little is padded."""
    bits = max(0, length - 1).bit_length()
    count = max(1, -(-bits // _BITS))
    sizes = []
    for left in range(count, 1, -1):
        sizes.append(1 << -(-bits // left))
        bits -= -(-bits // left)
    return [*sizes, -(-max(1, length) // math.prod(sizes))]


@functools.lru_cache(64)
def _places(length: int, directions: int) -> tuple[list[int], NDArray[np.float64], NDArray[np.int64]]:
    """Chunks, the exponents of a that occur and a last place for zeros, and for every entry of the matrices of every
    level, in their order, the place of its power."""
    sizes = _sizes(length)
    exponents: list[NDArray[np.float64]] = []
    places: list[NDArray[np.int64]] = []
    zero = sum(T + 1 for T in sizes)
    every = 1
    for i, T in enumerate(sizes):
        start, t = sum(map(len, exponents)), np.arange(T)
        exponents.append(every * np.arange(T + 1.0))
        later = int(i > 0)  # states see their own input; what is carried into a chunk does not see its end
        within = t[:, None] - t - later
        carried = t + 1 - later
        for forwards, backwards in ((within, within.T), (T - 1 - t, t), (carried, carried[::-1])):
            lags = np.stack([forwards, backwards][:directions]).reshape(-1)
            places.append(np.where(lags >= 0, start + lags, zero))
        every *= T
    return sizes, np.concatenate([*exponents, [0.0]]), np.concatenate(places)
