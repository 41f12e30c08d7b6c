"""Convolution kernels of diagonal models: K[l] = Re sum_n W_n lambda_n^l, accurately and without an N x L table.

Two levels, l = aT + b with 0 <= b < T: lambda^l = (lambda^T)^a lambda^b, so that N (L/T + T) powers replace N L, and
K[aT + b] = Re sum_n (W_n lambda_n^(aT)) lambda_n^b is one real matrix product of inner size 2N. The backward pass
recomputes the tables. Angles are reduced in float64: a length of 2^20 is as accurate as one of 2^5.

DLR (Gupta et al. 2022, eq. 4) shares lambda among its features; S4D and DSS have one lambda per feature. Triton or
KeOps can compute the sums instead (`backends`). Letters: K directions, H features, N modes, L positions; for the
product G groups of R rows that share their lambda, T positions in a block, A blocks.
"""

import math
from typing import Any

import torch
from jaxtyping import Complex, Complex128, Float, Float64
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops import backends
from spt.models.ops.counts import COMPLEX_MULTIPLY_ADD, COMPLEX_PRODUCT, Counts
from spt.models.ops.precision import has_values, without_autocast
from spt.models.ops.product import batched_product

_IN_CACHE, _ON_GPU = 1 << 18, 1 << 24  # complex numbers in one temporary
_LONGEST_BLOCK = 4096


def vandermonde(
    W: Float[Tensor, "K H N 2"],
    alpha: Float[Tensor, "*H N"],
    theta: Float[Tensor, "*H N"],
    length: int,
) -> Float[Tensor, "K H L"]:
    """Re sum_n W_n exp(l (alpha_n + i theta_n)) for l = 0, ..., length - 1, in the type of W.

    alpha <= 0 and theta may be float64 with a float32 W, and should be if they are computed: at large l every digit
    counts. They are (N,) if all features share them, (H, N), or (G, N) if each of G groups of neighbours shares them.
    """
    K, H, N, _ = W.shape
    alpha, theta = (modes if modes.dim() == 2 else modes[None] for modes in (alpha, theta))
    G = len(alpha)
    grouped = W.unflatten(1, (G, H // G)).transpose(0, 1).reshape(G, -1, N, 2)
    with without_autocast(W):
        kernel: Tensor = _function(grouped).apply(grouped, alpha, theta, length)
    return kernel.unflatten(1, (K, H // G)).transpose(0, 1).reshape(K, H, length)


def _function(W: Float[Tensor, "G R N 2"]) -> type[torch.autograd.Function]:
    shared = W.shape[1] > 4  # enough rows for products of matrices there; the trials are one of each
    if backends.uses_triton("vandermonde_shared" if shared else "vandermonde", W):
        from spt.models.ops import triton_vandermonde

        return triton_vandermonde.Sums
    return _Sums if backends.current() == "keops" else _Products


def complex_vandermonde(
    W: Float[Tensor, "K H N 2"],
    alpha: Float[Tensor, "*H N"],
    theta: Float[Tensor, "*H N"],
    length: int,
) -> tuple[Float[Tensor, "K H L"], Float[Tensor, "K H L"]]:
    """Real and imaginary part of the same sum, from one pair of tables."""
    both = vandermonde(torch.cat([W, times_minus_i(W)]), alpha, theta, length)
    return both[: len(W)], both[len(W) :]


def softmax_vandermonde(
    W: Complex128[Tensor, "K H N"], z: Complex128[Tensor, "H N"], L: int, length: int, dtype: torch.dtype
) -> Float[Tensor, "K H L"]:
    """Re sum_n W_n exp(z_n (l - shift_n)), where a mode that grows is shifted by L - 1, so that no power exceeds one.

    The gradient treats the shift as a constant, as published (DSS). Such modes are summed backwards in time.
    """
    grows = z.real > 0
    decaying = torch.where(grows, torch.zeros_like(z), z)
    kernel = vandermonde(torch.view_as_real(W * ~grows).to(dtype), decaying.real, decaying.imag, length)
    # Elsewhere than on a CPU to ask whether any mode grows is to wait for the device; zeros are added, where none does.
    if grows.device.type != "cpu" or not has_values(grows) or bool(grows.any()):
        back = torch.where(grows, -z, torch.zeros_like(z))
        # The last exponential is one in value and only has a gradient; flip moves position length - 1 - l to l.
        W = W * grows * torch.exp((L - length) * back - (L - 1) * (back - back.detach()))
        kernel = kernel + vandermonde(torch.view_as_real(W).to(dtype), back.real, back.imag, length).flip(-1)
    return kernel


def times_minus_i(W: Float[Tensor, "*shape 2"]) -> Float[Tensor, "*shape 2"]:
    """Im z = Re(-i z)."""
    return torch.stack([W[..., 1], -W[..., 0]], dim=-1)


def vandermonde_flops(W_shape: tuple[int, int, int], length: int, *, shared: bool) -> Counts:
    """For W of K directions, H features and N modes: per group and mode the inner table, the weights of every block,
    and the product of inner size two. Backward recomputes the first two; then products for both factors, of the blocks'
    weights with the outer table (for W) and with W (for the table), and sums over both tables weighted by position."""
    K, H, N = W_shape
    groups, R = (1, K * H) if shared else (H, K)
    T, A = _blocks(R, length)
    scaled = R * A if A > 1 else 0
    tables, product = COMPLEX_PRODUCT * (math.prod(_levels(T)) + scaled), 4.0 * R * A * T
    weighted = (COMPLEX_PRODUCT + 4) * (T + (A if A > 1 else 0))
    backward = tables + 2 * product + 2 * COMPLEX_MULTIPLY_ADD * scaled + weighted
    return Counts.of("kernel", groups * N * (tables + product), groups * N * backward)


def powers(
    alpha: Float[Tensor, "*modes"], theta: Float[Tensor, "*modes"], exponents: Float64[Tensor, " n"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*modes n"], Float[Tensor, "*modes n"]]:
    """Real and imaginary part of exp(e (alpha + i theta)); the angle is reduced in float64, then rounded."""
    magnitude = (alpha.double()[..., None] * exponents).to(dtype).exp_()
    angle = theta.double()[..., None] * exponents
    angle -= (2 * math.pi) * torch.round(angle * (0.5 / math.pi))
    angle = angle.to(dtype)
    return magnitude * torch.cos(angle), magnitude * torch.sin(angle)


def _blocks(rows: int, length: int) -> tuple[int, int]:
    """Positions in a block and blocks, by measurement: the work besides the product is proportional to N (T + rows *
    length / T), and zero with one block."""
    T = min(_LONGEST_BLOCK, max(16, 1 << round(math.log2(max(rows, 4) * length) / 2)))
    A = 1 if length <= min(2 * T, 1024) else -(-length // T)
    return -(-length // A), A


def _levels(T: int) -> tuple[int, int]:
    """C and S of b = c S + d for b < T."""
    S = 1 << (max(T - 1, 0).bit_length() + 1) // 2
    return -(-T // S), S


def _steps(count: int, every: int, device: torch.device) -> Float64[Tensor, " n"]:
    return torch.arange(count, dtype=torch.float64, device=device) * every


def _inner_table(
    alpha: Float[Tensor, "G N"], theta: Float[Tensor, "G N"], T: int, dtype: torch.dtype
) -> Float[Tensor, "G N 2 T"]:
    """Re lambda^b and -Im lambda^b for b < T, from two levels as well: b = c S + d."""
    C, S = _levels(T)
    xr, xi = (x[..., None] for x in powers(alpha, theta, _steps(C, S, alpha.device), dtype))
    yr, yi = (y[..., None, :] for y in powers(alpha, theta, _steps(S, 1, alpha.device), dtype))
    table = torch.empty(*alpha.shape, 2, C, S, dtype=dtype, device=alpha.device)
    torch.mul(xr, yr, out=table[:, :, 0]).addcmul_(xi, yi, value=-1)
    torch.mul(-xr, yi, out=table[:, :, 1]).addcmul_(xi, yr, value=-1)
    return table.view(*alpha.shape, 2, C * S)[..., :T]


class _Products(torch.autograd.Function):
    """(G, R, N, 2), (G, N), (G, N) -> (G, R, L)."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, alpha: Tensor, theta: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(W, alpha, theta)
        plan = _Plan(W, alpha, length)
        kernel = W.new_empty(plan.G, plan.R, plan.A, plan.T)
        W, alpha, theta = plan.sort(W, 2), plan.sort(alpha, 1), plan.sort(theta, 1)
        for g in plan.groups:
            inner = plan.inner(alpha[g], theta[g], W.dtype)
            outer = plan.outer(alpha[g], theta[g], W.dtype)
            weights = torch.view_as_complex(W[g])
            for a, n in plan.blocks:
                scaled = plan.scaled(weights, outer, a, n)
                rows = batched_product(scaled.flatten(1, 2), inner[:, : 2 * n])
                kernel[g, :, a] = rows.view(*scaled.shape[:3], plan.T)
        return kernel.flatten(2)[..., :length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """With S = lambda^l and c the coefficient of K in the loss: dW_n = sum_l c conj(S), and
        d log lambda_n = conj(sum_l l c W_n S), whose parts are those of alpha and theta. The weight l = aT + b falls
        into two sums, over the small outer table and over the small inner one."""
        W, alpha, theta = ctx.saved_tensors
        with without_autocast(W):
            return *_backward(W, alpha, theta, grad.to(W.dtype)), None


def _backward(W: Tensor, alpha: Tensor, theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    length = grad.shape[-1]
    plan = _Plan(W, alpha, length)
    if plan.A * plan.T > length:
        grad = torch.nn.functional.pad(grad, (0, plan.A * plan.T - length))
    grad = grad.reshape(plan.G, plan.R, plan.A, plan.T)
    kinds = (alpha.dtype, theta.dtype)
    W, alpha, theta = plan.sort(W, 2), plan.sort(alpha, 1), plan.sort(theta, 1)
    dW = torch.zeros_like(W)
    dlog = torch.zeros(plan.G, plan.N, dtype=torch.complex128, device=W.device)
    for g in plan.groups:
        inner = plan.inner(alpha[g], theta[g], W.dtype)
        outer = plan.outer(alpha[g], theta[g], W.dtype)
        weights = torch.view_as_complex(W[g])
        dinner = torch.zeros_like(inner)
        for a, n in plan.blocks:
            scaled = plan.scaled(weights, outer, a, n)
            c = grad[g, :, a].flatten(1, 2)
            dinner[:, : 2 * n] += batched_product(scaled.flatten(1, 2).mT, c)
            dscaled = batched_product(c, inner[:, : 2 * n].mT).view(scaled.shape)
            if outer is None:
                dW[g] = dscaled[:, :, 0].view(dW[g].shape)
                continue
            change = torch.view_as_complex(dscaled.unflatten(-1, (n, 2)))
            powers = outer[:, a, :n]
            torch.view_as_complex(dW[g])[:, :, :n] += (change * powers.conj()[:, None]).sum(2)
            here = (change * weights[:, :, None, :n].conj()).sum(1).to(dlog.dtype) * powers.conj()
            dlog[g, :n] += (here * plan.starts[a, None]).sum(1)
        dlog[g] += _inner_gradient(inner, dinner)
    return plan.unsort(dW, 2), plan.unsort(dlog.real, 1).to(kinds[0]), plan.unsort(dlog.imag, 1).to(kinds[1])


def _inner_gradient(inner: Float[Tensor, "G N2 T"], dinner: Float[Tensor, "G N2 T"]) -> Complex[Tensor, "G N"]:
    """From the inner table's gradient to that of log lambda: sum_b b conj(lambda^b) d(lambda^b)."""
    re, im = inner.unflatten(1, (-1, 2)).unbind(2)
    dre, dim = dinner.unflatten(1, (-1, 2)).unbind(2)
    weight = torch.arange(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    alpha = (re * dre).addcmul_(im, dim) @ weight
    theta = (im * dre).addcmul_(re, dim, value=-1) @ weight
    return torch.complex(alpha.double(), theta.double())


class _Plan:
    """How the work is divided into groups, and these into blocks of positions, so that temporaries stay small.

    Shared modes are sorted by their decay, and later blocks skip those that have decayed to nothing in the type's
    precision; but not on a GPU, which would have to wait for their number, nor for tensors without values.
    """

    def __init__(self, W: Tensor, alpha: Tensor, length: int) -> None:
        self.G, self.R, self.N, _ = W.shape
        self.T, self.A = _blocks(self.R, length)
        self.starts = _steps(self.A, self.T, W.device)
        chunk = _IN_CACHE if W.device.type == "cpu" else _ON_GPU
        n_groups = max(1, chunk // (self.N * (self.T + self.R * self.A)))
        self.groups = [slice(g, min(g + n_groups, self.G)) for g in range(0, self.G, n_groups)]
        n_blocks = max(1, chunk // (self.R * self.N * min(n_groups, self.G)))
        self.order: Tensor | None = None
        skips = self.G == 1 and self.A > 1 and W.device.type == "cpu" and has_values(alpha)
        if skips:
            n_blocks = min(n_blocks, max(1, 256 // self.R))  # just enough rows for an efficient product
        firsts = range(0, self.A, n_blocks)
        n_modes = [self.N] * len(firsts)
        if skips:
            self.order = alpha[0].argsort(descending=True)
            negligible = math.log(torch.finfo(W.dtype).eps / 64)
            n_modes = [max(1, int((alpha[0] * (a * self.T) > negligible).sum())) for a in firsts]
        self.blocks = [(slice(a, min(a + n_blocks, self.A)), n) for a, n in zip(firsts, n_modes, strict=True)]

    def sort(self, x: Tensor, axis: int) -> Tensor:
        return x.contiguous() if self.order is None else x.index_select(axis, self.order)

    def unsort(self, x: Tensor, axis: int) -> Tensor:
        return x if self.order is None else torch.empty_like(x).index_copy_(axis, self.order, x)

    def inner(self, alpha: Tensor, theta: Tensor, dtype: torch.dtype) -> Float[Tensor, "G N2 T"]:
        return _inner_table(alpha, theta, self.T, dtype).flatten(1, 2)

    def outer(self, alpha: Tensor, theta: Tensor, dtype: torch.dtype) -> Complex[Tensor, "G A N"] | None:
        """lambda^(aT); None if there is only one block."""
        if self.A == 1:
            return None
        real, imag = powers(alpha, theta, self.starts, dtype)
        return torch.complex(real, imag).mT.contiguous()

    def scaled(self, weights: Tensor, outer: Tensor | None, a: slice, n: int) -> Float[Tensor, "G R A N2"]:
        """W lambda^(aT) of the blocks a and the first n modes."""
        product = weights[:, :, None] if outer is None else weights[:, :, None, :n] * outer[:, None, a, :n]
        return torch.view_as_real(product).flatten(3)


class _Sums(torch.autograd.Function):
    """The same as `_Products` by KeOps: only the result is stored, and every power is recomputed."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, alpha: Tensor, theta: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(W, alpha, theta)
        lazy = backends.keops().LazyTensor
        real, imag, _ = _lazy_powers(lazy, alpha, theta, length, W.dtype)
        re, im = (lazy(W[:, :, None, :, part, None].contiguous()) for part in (0, 1))  # (G, R, 1, N, 1)
        return (re * real - im * imag).sum(dim=3).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        W, alpha, theta = ctx.saved_tensors
        lazy = backends.keops().LazyTensor
        real, imag, position = _lazy_powers(lazy, alpha, theta, grad.shape[-1], W.dtype)
        c = lazy(grad.to(W.dtype)[..., None, None].contiguous())  # (G, R, L, 1, 1)
        sums = (c * real).concat(-(c * imag)).concat(c * real * position).concat(c * imag * position)
        sums = sums.sum(dim=2, sum_scheme="kahan_scheme")  # over all positions, which may be a million
        dW, weighted = sums[..., :2], torch.view_as_complex(sums[..., 2:].double().contiguous())
        dlog = (torch.view_as_complex(W.double()) * weighted).sum(1)
        return dW, dlog.real.to(alpha.dtype), -dlog.imag.to(theta.dtype), None


def _lazy_powers(lazy: Any, alpha: Tensor, theta: Tensor, length: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Real and imaginary part of lambda^l and l, symbolically, over (G, 1, L, N).

    KeOps cannot mix float64 with float32. So l = 1024 i + j, and the rotations per step t and per 1024 steps s have two
    parts, the first of 12 bits: i and j times these are exact, and full rotations can be subtracted without an error.
    """

    def by_mode(values: Tensor) -> Any:
        return lazy(values.to(dtype)[:, None, None, :, None].contiguous())

    def by_position(values: Tensor) -> Any:
        return lazy(values.to(dtype)[None, None, :, None, None].contiguous())

    l = _steps(length, 1, alpha.device)
    turns = theta.double() / (2 * math.pi)
    angle: Any = None
    for position, rate in ((l // 1024, turns * 1024), (l % 1024, turns)):
        rate = rate - torch.floor(rate)
        coarse = torch.floor(rate * 4096) / 4096
        product = by_position(position) * by_mode(coarse)
        part = product - product.round() + by_position(position) * by_mode(rate - coarse)
        angle = part if angle is None else angle + part
    angle = angle * (2 * math.pi)
    position = by_position(l)
    magnitude = (position * by_mode(alpha)).exp()
    return magnitude * angle.cos(), magnitude * angle.sin(), position
