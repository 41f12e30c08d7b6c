"""The delta rule, a linear recurrence that corrects what its state answers to a key, and the gated one, in chunks.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t

(Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3, where alpha
is 1; Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", section 3). With y_t = v_t - alpha_t S_{t-1}^T k_t, what
the state lacks at k_t, a step adds beta_t k_t y_t^T to alpha_t S_{t-1}. In a chunk that begins with S, of which
d_i = alpha_1 ... alpha_i remains at its step i,

    y_i = v_i - d_i S^T k_i - sum_{j<i} d_i / d_j (k_i . k_j) beta_j y_j,

a triangular system for all y of the chunk: the paper's WY form, with beta at the columns, so that nothing is divided by
it. y is linear in S. The chunks are solved in parallel, a loop over chunks with one product each finds their S, and
products give o. Every ratio of decays is the exponential of a difference of sums of logarithms that is not positive.

Only the inputs and the S of every chunk are kept for the backward pass, which solves the same systems again and one
more, transposed, for the gradients.

Letters: B sequences, L steps, N heads, K and V features of keys and values, n chunks of C steps, G = B N.
"""

import itertools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.counts import Counts
from spt.models.ops.precision import without_autocast

# Steps, at most. Of 16 to 128, it is the fastest on a CPU for heads of 24 to 48 features; for heads of 128 features, 64
# steps take a tenth less.
CHUNK = 32
_LEAST = -1000.0  # exp of it is zero, in double precision too; differences of -inf would be undefined


def delta_rule(
    q: Float[Tensor, "B L N K"],
    k: Float[Tensor, "B L N K"],
    v: Float[Tensor, "B L N V"],
    beta: Float[Tensor, "B L N"],
    log_alpha: Float[Tensor, "B L N"] | None = None,
    *,
    reverse: bool = False,
) -> Float[Tensor, "B L N V"]:
    """o_t from S_{-1} = 0; `reverse`: from S_L = 0, with S_{t+1} in the place of S_{t-1}. `log_alpha` is not positive;
    None: alpha = 1. Computed in float32, or in float64 if v is; the result has v's type.

    States stay bounded where beta |k|² is in [0, 2].
    """
    B, L, N, _ = q.shape
    n, C = chunks(L)

    def cut(x: Tensor) -> Tensor:
        """(n, G, C, ...); steps added at the end have neither keys nor values."""
        x = x.to(torch.promote_types(v.dtype, torch.float32))
        if n * C > L:
            x = torch.cat([x, x.new_zeros(B, n * C - L, *x.shape[2:])], 1)
        x = x.unflatten(1, (n, C)).transpose(2, 3).transpose(0, 1)
        return x.flatten(1, 2).contiguous()

    with without_autocast(v):
        gate = None if log_alpha is None else cut(log_alpha)
        o: Tensor = _DeltaRule.apply(cut(q), cut(k), cut(v), cut(beta), gate, reverse)
        o = o.unflatten(1, (B, N)).transpose(0, 1).transpose(2, 3)
        return o.flatten(1, 2)[:, :L].to(v.dtype)


def delta_step(
    state: Float[Tensor, "B N K V"],
    q: Float[Tensor, "B N K"],
    k: Float[Tensor, "B N K"],
    v: Float[Tensor, "B N V"],
    beta: Float[Tensor, "B N"],
    log_alpha: Float[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B N V"], Float[Tensor, "B N K V"]]:
    """o_t and S_t from S_{t-1}."""
    if log_alpha is not None:
        state = torch.exp(log_alpha)[..., None, None] * state
    y = v - torch.einsum("bnkv,bnk->bnv", state, k)
    state = state + (beta[..., None] * k)[..., None] * y[..., None, :]
    return torch.einsum("bnkv,bnk->bnv", state, q), state


def chunks(length: int) -> tuple[int, int]:
    """How many, and of how many steps: as equal as can be, so that few steps are added."""
    n = -(-length // CHUNK)
    return n, -(-length // n)


def delta_flops(length: int, heads: int, keys: int, values: int) -> Counts:
    """The products of both passes, and the systems: C² operations for every column of a right-hand side."""
    n, C = chunks(length)
    K, V = keys, values
    pair, cross, across = 2.0 * C * C, 2.0 * C * K * V, 2.0 * K * K * V * (n - 1) / n
    forward = pair * (2 * K + V) + C * C * (K + V) + 2 * C * K * K + 3 * cross + across
    backward = pair * (6 * K + 3 * V) + C * C * (K + 2 * V) + 2 * C * K * K + 7 * cross + across
    return Counts.of("attention", n * heads * forward, n * heads * backward)


class _Decays(NamedTuple):
    """Of a chunk: what remains at step i of what was there at step j <= i; of what the chunk begins with; and at its
    end, of what was there at step i, and of what it begins with."""

    between: Float[Tensor, "n G C C"] | None
    since_start: Float[Tensor, "n G C 1"] | None
    to_end: Float[Tensor, "n G C 1"] | None
    whole: Float[Tensor, "n G 1 1"] | None


class _DeltaRule(torch.autograd.Function):
    """On chunks, (n, G, C, ...)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor | None, reverse: bool
    ) -> Tensor:
        decays = _decays(log_alpha, reverse)
        K = k.shape[-1]
        overlaps = _lower(k @ k.mT, decays.between, reverse, strictly=True)
        right = torch.cat([_scaled(k, decays.since_start), v], -1)
        y = _solve(overlaps * beta[..., None, :], right, upper=reverse).mul_(beta[..., None])
        into = _scaled(k, decays.to_end).mT @ y
        S = _across(_transition(into[..., :K], decays.whole), into[..., K:].contiguous(), reverse)
        u = y[..., K:] - y[..., :K] @ S
        o = _scaled(q, decays.since_start) @ S
        o += _lower(q @ k.mT, decays.between, reverse) @ u
        ctx.save_for_backward(q, k, v, beta, log_alpha, S)
        ctx.reverse = reverse
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """d before a name: the gradient of the loss. `dS` is that of the state after each chunk."""
        q, k, v, beta, log_alpha, S = ctx.saved_tensors
        reverse, K = ctx.reverse, k.shape[-1]
        decays = _decays(log_alpha, reverse)
        beta = beta[..., None]
        q_start, k_start = _scaled(q, decays.since_start), _scaled(k, decays.since_start)
        k_end = _scaled(k, decays.to_end)
        do = do.contiguous()

        overlaps = _lower(k @ k.mT, decays.between, reverse, strictly=True)
        solved = _solve(overlaps * beta.mT, torch.cat([k_start, v - k_start @ S], -1), upper=reverse)
        w, y = beta * solved[..., :K], solved[..., K:]
        u = beta * y
        scores = _lower(q @ k.mT, decays.between, reverse)
        du = scores.mT @ do
        dS = _across(_transition(k_end.mT @ w, decays.whole).mT, q_start.mT @ do - w.mT @ du, not reverse)
        du += k_end @ dS
        dy = _solve(overlaps.mT * beta.mT, du, upper=not reverse)
        dbeta = (dy * y).sum(-1)
        dv = beta * dy

        dscores = _lower(do @ u.mT, decays.between, reverse)
        doverlaps = _lower(dv @ u.mT, decays.between, reverse, strictly=True)
        dq = _scaled(do @ S.mT, decays.since_start) + dscores @ k
        dk_later = -(_scaled(dv @ S.mT, decays.since_start) + doverlaps @ k)
        dk_earlier = _scaled(u @ dS.mT, decays.to_end) + dscores.mT @ q - doverlaps.mT @ k
        dlog = None
        if log_alpha is not None:
            # What is read at step i is in proportion to d_i, what is written there to 1 / d_i, and all to the last d.
            dlog = (q * dq + k * (dk_later - dk_earlier)).sum(-1)
            before, after, last = (slice(1, None), slice(-1), 0) if reverse else (slice(-1), slice(1, None), -1)
            dlog[before, :, last] += (S[after] * dS[before]).sum((-1, -2))
            dlog = _summed(dlog, not reverse)
        return dq, dk_later + dk_earlier, dv, dbeta, dlog, None


def _decays(log_alpha: Tensor | None, reverse: bool) -> _Decays:
    """Differences in double precision: sums over a chunk may be large where a difference is small. Those of a step and a
    later one, which are positive, are never used."""
    if log_alpha is None:
        return _Decays(None, None, None, None)
    dtype, summed = log_alpha.dtype, _summed(log_alpha.double().clamp(min=_LEAST), reverse)
    whole = summed[..., :1] if reverse else summed[..., -1:]
    between = (summed[..., :, None] - summed[..., None, :]).to(dtype).exp_()
    to_end, since_start = (torch.exp(x.to(dtype))[..., None] for x in (whole - summed, summed))
    return _Decays(between, since_start, to_end, torch.exp(whole.to(dtype))[..., None])


def _summed(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else factor * x


def _lower(pairs: Tensor, between: Tensor | None, reverse: bool, strictly: bool = False) -> Tensor:
    """The pairs of a step with itself (unless `strictly`) and those before it, times the decay between them."""
    pairs = pairs if between is None else pairs.mul_(between)
    return pairs.triu_(int(strictly)) if reverse else pairs.tril_(-int(strictly))


def _solve(overlaps: Tensor, right: Tensor, upper: bool) -> Tensor:
    """y with y + overlaps y = right."""
    return torch.linalg.solve_triangular(overlaps, right, upper=upper, unitriangular=True)


def _transition(removed: Tensor, whole: Tensor | None) -> Tensor:
    """From the state before a chunk to that after it."""
    remains = removed.neg()
    remains.diagonal(dim1=-2, dim2=-1).add_(1.0 if whole is None else whole[..., 0])
    return remains


def _across(transition: Tensor, added: Tensor, reverse: bool) -> Tensor:
    """The states before each chunk: S becomes transition S + added."""
    states = torch.empty_like(added)
    order = range(len(added) - 1, -1, -1) if reverse else range(len(added))
    states[order[0]] = 0
    for chunk, following in itertools.pairwise(order):
        torch.baddbmm(added[chunk], transition[chunk], states[chunk], out=states[following])
    return states
