"""Diagonal linear recurrences x_t = a_t x_{t-1} + b_t: the scan of S5 (section 3.2) and LRU, with inputs and outputs.

The sequence is cut into chunks of 16 steps, which are processed in parallel: once for the contribution of each chunk to
the state, and, when the states between chunks are known (the same problem, 16 times shorter), once more for every
state. That is O(L P) work in few, long vector operations. Only the states are kept for the backward pass, which is the
same scan in reverse.

A constant coefficient may be in double precision with a sequence in single precision: its powers that carry a state
over many steps are then exact, and errors do not grow with the length.

On a GPU, Triton can compute the same in a few kernels (`backends`, `triton_scan`).

Letters: B sequences, L steps, P states, H features, N chunks; a coefficients, b inputs, x states, z = Lambda Delta.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import torch
from jaxtyping import Complex, Complex128, Float, Float64, Inexact
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops import backends
from spt.models.ops.discretise import bilinear, zoh
from spt.models.ops.product import linear

Discretisation = Literal["zoh", "bilinear"]

CHUNK = 16  # steps, a power of two: among 8 to 64 about the fastest at every length, and only 8 is more accurate
BLOCK = 2**15  # numbers in one product that is summed
_RESPONSES = 2**22  # numbers of an impulse response computed at a time


def scan(
    a: Inexact[Tensor, "*steps P"], b: Inexact[Tensor, "B L P"], *, reverse: bool = False
) -> Inexact[Tensor, "B L P"]:
    """x with x_t = a x_{t-1} + b_t, from x_{-1} = 0; `reverse`: x_t = a x_{t+1} + b_t, from x_L = 0.

    `a` is (P,), or (B, L, P) with one coefficient for every step; a and b are both real or both complex. The result has
    the type of b.
    """
    _check(a, b)
    x: Tensor = _Scan.apply(a, b, reverse)
    return x


def sequential(
    a: Inexact[Tensor, "*steps P"], b: Inexact[Tensor, "B L P"], *, reverse: bool = False
) -> Inexact[Tensor, "B L P"]:
    """The definition of `scan`: a loop over the steps."""
    _check(a, b)
    a = a.to(b.dtype).expand_as(b)
    x = torch.zeros_like(b[:, 0])
    states: dict[int, Tensor] = {}
    for t in sorted(range(b.shape[1]), reverse=reverse):
        states[t] = x = a[:, t] * x + b[:, t]
    return torch.stack([states[t] for t in sorted(states)], 1)


def _check(a: Tensor, b: Tensor) -> None:
    if a.shape != (b.shape[-1:] if a.ndim == 1 else b.shape):
        raise ValueError(
            f"coefficients {tuple(a.shape)} do not fit inputs {tuple(b.shape)}: give one per state, or one per step too"
        )
    if a.is_complex() != b.is_complex():
        raise ValueError("coefficients and inputs of a scan must be both real or both complex")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, reverse: bool) -> Tensor:
        x = torch.empty_like(b, memory_format=torch.contiguous_format)
        solve(a, b.resolve_conj(), x, None, reverse)
        ctx.save_for_backward(a, x)
        ctx.reverse = reverse
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, Tensor, None]:
        a, x = ctx.saved_tensors
        g = torch.empty_like(x)
        if not ctx.needs_input_grad[0]:
            solve_back(a, dx.resolve_conj(), g, ctx.reverse)
            return None, g, None
        return gradients(a, x, dx.resolve_conj(), g, ctx.reverse).to(a.dtype), g, None


def gradients(a: Tensor, x: Tensor, dx: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """`solve_back`, and the gradients of a, conj(x_{t-1}) g_t; their sum, in double precision, if a is fixed."""
    if kernels := _fused(a, x):
        return kernels.gradients(a, x, dx, g, reverse)
    solve_back(a, dx, g, reverse)
    return _coefficient_gradients(a, x, g, reverse)


def solve_back(a: Tensor, dx: Tensor, g: Tensor, reverse: bool) -> None:
    """Write the gradients of b, g_t = dx_t + conj(a_{t+1}) g_{t+1}, into g, which is dx or shares no memory with it."""
    if kernels := _fused(a, dx):
        kernels.solve_back(a, dx, g, reverse)
        return
    before, after, _, last = _neighbours(dx.shape[1], reverse)
    back = (a if a.ndim == 1 else a[:, after]).conj().resolve_conj()
    g[:, last] = dx[:, last]
    if dx.shape[1] > 1:
        _solve(back, dx[:, before], g[:, before], g[:, last], not reverse)


def _coefficient_gradients(a: Tensor, x: Tensor, g: Tensor, reverse: bool) -> Tensor:
    before, after, first, _ = _neighbours(x.shape[1], reverse)
    if a.ndim == 1:
        return summed_products(x[:, before], g[:, after])
    da = torch.empty_like(g)
    da[:, first] = 0
    torch.mul(x[:, before].conj(), g[:, after], out=da[:, after])
    return da


def _neighbours(L: int, reverse: bool) -> tuple[slice, slice, int, int]:
    """In the order of the scan: all steps but the last, all but the first; the first, the last."""
    early, late = slice(0, L - 1), slice(1, L)
    return (late, early, L - 1, 0) if reverse else (early, late, 0, L - 1)


def solve(a: Tensor, b: Tensor, x: Tensor, initial: Tensor | None, reverse: bool) -> None:
    """Write the states after `initial` (None: zero) into x, which is b or shares no memory with it."""
    if kernels := _fused(a, b):
        kernels.solve(a, b, x, initial, reverse)
    else:
        _solve(a, b, x, initial, reverse)


def _fused(a: Tensor, b: Tensor) -> ModuleType | None:
    """The module of the kernels, where Triton computes a scan of this kind."""
    if not backends.uses_triton("scan" if a.ndim == 1 else "scan_varying", b):
        return None
    from spt.models.ops import triton_scan

    return triton_scan


def _solve(a: Tensor, b: Tensor, x: Tensor, initial: Tensor | None, reverse: bool) -> None:
    L = b.shape[1]
    if L <= 2 * CHUNK:
        _walk(a.to(b.dtype), b, x, initial, reverse)
        return
    N, rest = divmod(L, CHUNK)
    chunked, remainder = slice(0, L - rest), slice(L - rest, L)
    if reverse:  # the remainder comes last in the order of the scan
        chunked, remainder = slice(rest, L), slice(0, rest)
    coefficients = a.to(b.dtype)
    steps = [b, x] if a.ndim == 1 else [b, x, coefficients]
    inputs, states, *per_step = (each[:, chunked].unflatten(1, (N, CHUNK)).unbind(2) for each in steps)
    factors = per_step[0] if per_step else [coefficients] * CHUNK
    order = range(CHUNK - 1, -1, -1) if reverse else range(CHUNK)

    ends = inputs[order[0]].clone()
    for t in order[1:]:
        torch.addcmul(inputs[t], factors[t], ends, out=ends)
    if a.ndim == 1:
        across = a
        for _ in range(CHUNK.bit_length() - 1):
            across = across * across
    else:
        across = factors[order[0]].clone()
        for t in order[1:]:
            across *= factors[t]
    carried = torch.empty_like(ends)
    _solve(across, ends, carried, initial, reverse)

    state = ends  # memory that is no longer needed
    if reverse:
        state[:, :-1] = carried[:, 1:]
    else:
        state[:, 1:] = carried[:, :-1]
    state[:, -1 if reverse else 0] = 0 if initial is None else initial
    for t in order:
        state = torch.addcmul(inputs[t], factors[t], state, out=states[t])
    if rest:
        final = carried[:, 0 if reverse else -1]
        a = coefficients if a.ndim == 1 else coefficients[:, remainder]
        _walk(a, b[:, remainder], x[:, remainder], final, reverse)


def _walk(a: Tensor, b: Tensor, x: Tensor, state: Tensor | None, reverse: bool) -> None:
    inputs, states = b.unbind(1), x.unbind(1)
    factors = [a] * len(inputs) if a.ndim == 1 else a.unbind(1)
    for t in sorted(range(len(inputs)), reverse=reverse):
        if state is None:
            state = states[t].copy_(inputs[t])
        else:
            state = torch.addcmul(inputs[t], factors[t], state, out=states[t])


def summed_products(x: Tensor, g: Tensor) -> Tensor:
    """The sum of conj(x) g over sequences and steps; blocks are summed in double precision."""
    B, L, P = x.shape
    total = torch.zeros(P, dtype=torch.promote_types(x.dtype, torch.float64), device=x.device)
    size = max(1, BLOCK // (B * P)) if x.device.type == "cpu" else max(1, L)
    for start in range(0, L, size):
        block = x[:, start : start + size].conj().resolve_conj() * g[:, start : start + size]
        total += block.sum((0, 1))
    return total


def enter(u: Float[Tensor, "*B H"], matrix: Complex[Tensor, "P H"]) -> Complex[Tensor, "*B P"]:
    """matrix u at every step, as one real product; autocast may round its factors."""
    into = entry_map(matrix)
    return torch.view_as_complex(linear(u, into).to(into.dtype).unflatten(-1, (-1, 2)))


def leave(x: Complex[Tensor, "*B P"], matrix: Complex[Tensor, "H P"]) -> Float[Tensor, "*B H"]:
    """Re(matrix x) at every step, in the same way."""
    return linear(torch.view_as_real(x).flatten(-2), exit_map(matrix[None]))


def entry_map(matrix: Complex[Tensor, "P H"]) -> Float[Tensor, "R H"]:
    """The real matrix that maps u to the real and imaginary part of the first state, of the second, ..."""
    return torch.view_as_real(matrix.resolve_conj()).transpose(1, 2).flatten(0, 1)


def exit_map(matrices: Complex[Tensor, "K H P"]) -> Float[Tensor, "H R"]:
    """The real matrix that maps the parts of the states of all directions, in that order, to the sum of Re(C x)."""
    return torch.view_as_real(matrices.conj().resolve_conj()).transpose(0, 1).flatten(1)


def impulse_response(
    a: Complex128[Tensor, " P"], enters: Complex[Tensor, "P H"], leaves: Complex[Tensor, "K H P"], length: int
) -> Iterator[Float[Tensor, "K C M"]]:
    """Re(leaves a^l enters) for l = 0, ..., length - 1, a few lags at a time: K H² numbers per lag (C = H²: output by
    input). The weights of the present of both directions are added in the first."""
    rows = max(1, _RESPONSES // (leaves.shape[0] * leaves.shape[1] ** 2))
    into = torch.cat([enters.real, enters.imag])  # (2P, H)
    for start in range(0, length, rows):
        lags = torch.arange(start, min(start + rows, length), device=a.device)
        powers = torch.polar(a.abs() ** lags[:, None], a.angle() * lags[:, None]).to(leaves.dtype)  # (M, P)
        out = leaves[:, None] * powers[None, :, None]  # (K, M, H, P)
        response = (torch.cat([out.real, -out.imag], dim=-1) @ into).flatten(2).transpose(1, 2)
        if start == 0 and len(response) == 2:
            response[0, :, 0] += response[1, :, 0]
            response[1, :, 0] = 0.0
        yield response


def discretise(
    Lambda: Complex128[Tensor, " P"], Delta: Float64[Tensor, " #P"], rule: Discretisation = "zoh"
) -> tuple[Complex128[Tensor, " P"], Complex128[Tensor, " P"]]:
    """Lambda_bar and f of x' = Lambda x + B u at step size Delta, where B_bar = f B (S5, section 2.1)."""
    log_a, f = (zoh if rule == "zoh" else bilinear)(Lambda, Delta)
    return torch.exp(log_a), f


def discretise_steps(
    Lambda: Complex128[Tensor, " P"],
    Delta: Float64[Tensor, " #P"],
    gaps: Float[Tensor, "B L"],
    v: Complex[Tensor, "B L P"],
    rule: Discretisation = "zoh",
) -> tuple[Complex[Tensor, "B L P"], Complex[Tensor, "B L P"]]:
    """Lambda_bar_t and B_bar_t u_t at the step sizes Delta gap_t, from v = B u, without forming any B_bar_t."""
    if rule == "zoh":
        a, b = _ZohSteps.apply(Lambda, Delta.expand_as(Lambda), gaps, v)
        return a, b
    z = gaps[..., None] * (Lambda * Delta).to(v.dtype)
    reciprocal = 1 / (1 - z / 2)
    return (1 + z / 2) * reciprocal, gaps[..., None] * Delta.to(gaps.dtype) * reciprocal * v


# For |z| below this, the derivative of (exp(z) - 1) / z is its series, whose 14 terms suffice for double precision.
SMALL = 0.5
SLOPE = tuple((k + 1) / math.factorial(k + 2) for k in range(14))
TINY = 1e-20  # replaces an eigenvalue of exactly 0, so that f is Delta gap


class _ZohSteps(torch.autograd.Function):
    """a = exp(Lambda Delta gap) and b = f v with f = (a - 1) / Lambda. The gaps are data and get no gradient."""

    @staticmethod
    def forward(ctx: Any, Lambda: Tensor, Delta: Tensor, gaps: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        divisor = torch.where(Lambda == 0, TINY, Lambda)
        z = divisor * Delta
        expm1 = torch.expm1(gaps[..., None] * z.real.to(gaps.dtype))
        angle = gaps[..., None].double() * z.imag
        angle = angle.sub_(2 * math.pi * torch.round(angle / (2 * math.pi))).to(gaps.dtype)
        cos, sin, half = torch.cos(angle), torch.sin(angle), torch.sin(angle / 2)
        # exp(x + iy) - 1, without cancellation where the mode decays
        f = torch.complex(expm1 * cos - 2 * half * half, (expm1 + 1) * sin)
        f *= (1 / divisor).to(v.dtype)
        a = torch.complex((expm1 + 1) * cos, (expm1 + 1) * sin)
        ctx.save_for_backward(Lambda, Delta, gaps, v, a, f)
        return a, f * v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        """Sums over sequences and steps are products with rows of powers of the gaps."""
        Lambda, Delta, gaps, v, a, f = ctx.saved_tensors
        df = v.conj() * db
        back = a.conj().resolve_conj()
        longest = gaps.abs().max()
        relative = (gaps / longest).flatten()
        powers = torch.stack([relative ** (k + 2) for k in range(len(SLOPE))])
        of_a = longest * _sums(relative[None], back * da)[0]
        of_f = longest * _sums(relative[None], back * df)[0]
        moments = _sums(powers, df)

        # df / dLambda = (Delta gap a - f) / Lambda, or its series in z
        z = (Lambda * Delta * longest).conj()
        small = z.abs() < SMALL
        far = torch.where(small, 1, Lambda).conj()
        exact = (Delta * of_f - (f.conj() * df).sum((0, 1))) / far
        near = torch.where(small, z, 0)
        series = torch.zeros_like(z)
        for k in reversed(range(len(SLOPE))):
            series = series * near + SLOPE[k] * moments[k]
        dLambda = Delta * of_a + torch.where(small, (Delta * longest) ** 2 * series, exact)
        return dLambda, (Lambda.conj() * of_a + of_f).real, None, f.conj() * db


def _sums(rows: Float[Tensor, "K M"], values: Complex[Tensor, "B L P"]) -> Complex128[Tensor, "K P"]:
    flat = torch.view_as_real(values.resolve_conj()).flatten(0, 1).flatten(1)
    sums = (rows @ flat).double()
    return torch.view_as_complex(sums.unflatten(1, (-1, 2)))
