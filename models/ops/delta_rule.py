"""The delta rule, a linear recurrence that corrects what its state answers to a key, and the gated one, in chunks.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t

(Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3, where alpha
is 1; Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", section 3). With e_t = v_t - alpha_t S_{t-1}^T k_t, the
error of the state at k_t, a step adds beta_t k_t e_t^T to alpha_t S_{t-1}. In a chunk that begins with S, of which
d_i = alpha_1 ... alpha_i remains at its step i,

    e_i = v_i - d_i S^T k_i - sum_{j<i} d_i / d_j (k_i . k_j) beta_j e_j,

a triangular system for all beta_i e_i of the chunk, linear in S: the papers' WY form. The matrices of all chunks are
inverted in parallel, a loop over chunks with one product each finds their S, and products give o. An inverse has no
large entries where beta |k|² is in [0, 2], since it consists of products of such steps' matrices. Every ratio of decays
is the exponential of a difference of sums of logarithms that is not positive.

Only the inputs and the S of every chunk are kept for the backward pass, which inverts the matrices again.

Letters: B sequences, L steps, N heads, K and V features of keys and values, n chunks of C steps, G = B N.
"""

import itertools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.counts import Counts
from spt.models.ops.precision import ieee_products, without_autocast

# Steps, at most. Of 16 to 128, it is the fastest on a CPU for heads of 24 to 48 features; for heads of 128 features, 64
# steps take a tenth less.
CHUNK = 32
_LEAST = -1000.0  # exp of it is zero, in double precision too; differences of -inf would be undefined


@ieee_products
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
        """(n G, C, ...); steps added at the end have neither keys nor values."""
        x = x.to(torch.promote_types(v.dtype, torch.float32))
        if n * C > L:
            x = torch.cat([x, x.new_zeros(B, n * C - L, *x.shape[2:])], 1)
        x = x.unflatten(1, (n, C)).transpose(2, 3).transpose(0, 1)
        return x.flatten(0, 2).contiguous()

    with without_autocast(v):
        gate = None if log_alpha is None else cut(log_alpha)
        o: Tensor = _DeltaRule.apply(cut(q), cut(k), cut(v), cut(beta), gate, n, reverse)
        o = o.unflatten(0, (n, B, N)).transpose(0, 1).transpose(2, 3)
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
    error = v - torch.einsum("bnkv,bnk->bnv", state, k)
    state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
    return torch.einsum("bnkv,bnk->bnv", state, q), state


def chunks(length: int) -> tuple[int, int]:
    """How many, and of how many steps: as equal as can be, so that few steps are added."""
    n = -(-length // CHUNK)
    return n, -(-length // n)


def delta_flops(length: int, heads: int, keys: int, values: int) -> Counts:
    """The products of both passes, and the inverse of each chunk's system: C² operations for each of its C columns."""
    n, C = chunks(length)
    K, V = keys, values
    pair, cross, across = 2.0 * C * C, 2.0 * C * K * V, 2.0 * K * K * V * (n - 1) / n
    both = C**3 + 2 * C * K * K + across
    forward = pair * (3 * K + 2 * V) + 3 * cross + both
    backward = pair * (7 * K + 6 * V) + 7 * cross + both
    return Counts.of("attention", n * heads * forward, n * heads * backward)


class _Decays(NamedTuple):
    """Of a chunk: what remains at step i of what was there at step j <= i; of what the chunk begins with; and at its
    end, of what was there at step i, and of what it begins with."""

    between: Float[Tensor, "M C C"] | None
    since_start: Float[Tensor, "M C 1"] | None
    to_end: Float[Tensor, "M C 1"] | None
    whole: Float[Tensor, "M 1"] | None


class _DeltaRule(torch.autograd.Function):
    """On the M = n G chunks, (M, C, ...), those of one place in all sequences side by side. In a chunk, steps as rows:

    overlaps[i, j] = d_i / d_j (k_i . k_j), j < i
    writes = (I + diag(beta) overlaps)^-1 diag(beta)     the papers' T
    w = writes diag(d) k,   u = writes v - w S           the papers' W, and U - W S: all beta_i e_i
    lacking = v - diag(d) k S                            the errors if nothing were written in the chunk
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor | None, n: int, reverse: bool
    ) -> Tensor:
        decays = _decays(log_alpha, reverse)
        k_end = _scaled(k, decays.to_end)
        overlaps = _lower(k @ k.mT, decays.between, reverse, strictly=True)
        writes = _inverse(overlaps, beta, reverse).mul_(beta[:, None])
        w, u = writes @ _scaled(k, decays.since_start), writes @ v
        S = _across(_transition(k_end.mT @ w, decays.whole), k_end.mT @ u, n, reverse)
        u.baddbmm_(w, S, alpha=-1)
        o = _scaled(q, decays.since_start) @ S
        o.baddbmm_(_lower(q @ k.mT, decays.between, reverse), u)
        ctx.save_for_backward(q, k, v, beta, log_alpha, S)
        ctx.n, ctx.reverse = n, reverse
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(do):
            return _DeltaRule.gradients(ctx, do)

    @staticmethod
    def gradients(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """d before a name: the gradient of the loss. `dS` is that of the state after each chunk, `back` that of
        diag(beta) lacking."""
        q, k, v, beta, log_alpha, S = ctx.saved_tensors
        n, reverse = ctx.n, ctx.reverse
        do = do.contiguous()
        decays = _decays(log_alpha, reverse)
        q_start, k_start = _scaled(q, decays.since_start), _scaled(k, decays.since_start)
        k_end = _scaled(k, decays.to_end)

        overlaps = _lower(k @ k.mT, decays.between, reverse, strictly=True)
        inverse = _inverse(overlaps, beta, reverse)
        writes = inverse * beta[:, None]
        lacking = torch.baddbmm(v, k_start, S, alpha=-1)
        w, u = writes @ k_start, writes @ lacking
        du = _lower(q @ k.mT, decays.between, reverse).mT @ do
        dS = (q_start.mT @ do).baddbmm_(w.mT, du, alpha=-1)
        dS = _across(_transition(k_end.mT @ w, decays.whole).mT, dS, n, not reverse)
        du.baddbmm_(k_end, dS)
        back = inverse.mT @ du
        dbeta = (back * lacking.baddbmm_(overlaps, u, alpha=-1)).sum(-1)  # lacking becomes the errors
        dv = back.mul_(beta[..., None])

        dscores = _lower(do @ u.mT, decays.between, reverse)
        doverlaps = _lower(dv @ u.mT, decays.between, reverse, strictly=True)
        dq = _rescaled(do @ S.mT, decays.since_start).baddbmm_(dscores, k)
        dk_read = _rescaled(dv @ S.mT, decays.since_start).baddbmm_(doverlaps, k).neg_()
        dk_written = _rescaled(u @ dS.mT, decays.to_end).baddbmm_(dscores.mT, q).baddbmm_(doverlaps.mT, k, alpha=-1)
        dlog = None
        if log_alpha is not None:
            # What is read at step i is in proportion to d_i, what is written there to 1 / d_i, and all to the last d.
            dlog = (q * dq + k * (dk_read - dk_written)).sum(-1)
            before, after, last = (slice(1, None), slice(-1), 0) if reverse else (slice(-1), slice(1, None), -1)
            S, dS = S.unflatten(0, (n, -1)), dS.unflatten(0, (n, -1))
            dlog.unflatten(0, (n, -1))[before, :, last] += (S[after] * dS[before]).sum((-1, -2))
            dlog = _summed(dlog, not reverse)
        return dq, dk_read.add_(dk_written), dv, dbeta, dlog, None, None


def _decays(log_alpha: Tensor | None, reverse: bool) -> _Decays:
    """Differences in double precision: sums over a chunk may be large where a difference is small. Positive ones, of a
    step and a later one, are never used."""
    if log_alpha is None:
        return _Decays(None, None, None, None)
    dtype, summed = log_alpha.dtype, _summed(log_alpha.double().clamp(min=_LEAST), reverse)
    whole = summed[..., :1] if reverse else summed[..., -1:]
    between = (summed[..., :, None] - summed[..., None, :]).to(dtype).exp_()
    to_end, since_start = (torch.exp(x.to(dtype))[..., None] for x in (whole - summed, summed))
    return _Decays(between, since_start, to_end, torch.exp(whole.to(dtype)))


def _summed(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else factor * x


def _rescaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """In place."""
    return x if factor is None else x.mul_(factor)


def _lower(pairs: Tensor, between: Tensor | None, reverse: bool, strictly: bool = False) -> Tensor:
    """The pairs of a step with itself (unless `strictly`) and those before it, times the decay between them."""
    pairs = pairs if between is None else pairs.mul_(between)
    return pairs.triu_(int(strictly)) if reverse else pairs.tril_(-int(strictly))


def _inverse(overlaps: Tensor, beta: Tensor, reverse: bool) -> Tensor:
    """Of I + diag(beta) overlaps; solved from the right, which on a CPU takes half the time."""
    system, one = beta[..., None] * overlaps, torch.eye(beta.shape[-1], dtype=beta.dtype, device=beta.device)
    return torch.linalg.solve_triangular(system.mT, one, upper=not reverse, left=False, unitriangular=True).mT


def _transition(removed: Tensor, whole: Tensor | None) -> Tensor:
    """From the state before a chunk to that after it; in place."""
    remains = removed.neg_()
    remains.diagonal(dim1=-2, dim2=-1).add_(1.0 if whole is None else whole)
    return remains


def _across(transition: Tensor, added: Tensor, n: int, reverse: bool) -> Tensor:
    """The states before each chunk: S becomes transition S + added."""
    states = torch.empty_like(added)
    T, A, S = (x.unflatten(0, (n, -1)) for x in (transition, added, states))
    order = range(n - 1, -1, -1) if reverse else range(n)
    S[order[0]] = 0
    for chunk, following in itertools.pairwise(order):
        torch.baddbmm(A[chunk], T[chunk], S[chunk], out=S[following])
    return states
