"""Linear attention: products of queries with a matrix-valued state that forgets, computed chunk by chunk.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t,   g_t <= 0

Within a chunk o is a product of masked scores with values, weighted by what remains from step s to step t; between
chunks it is a scan over the states at their borders (Yang et al. 2024, section 2; Dao and Gu 2024, section 6). Never is
a positive number exponentiated, however strongly a step forgets: what remains is the exponential of a sum over the
steps between. With one decay for each head this is a matrix of scores' weights. With one for each feature of the keys
the weight is inside of the product q_t k_s, so a chunk is halved again and again: each pair of steps is split by one
border of halves, up to which the key decays, and from which on the query does.

Letters: B sequences, L steps, H heads of values, G heads of queries and keys (each for H / G of values), N width of
keys, P width of values, n chunks, C steps in one, m pairs of halves in one, I and J any widths; g log decays, c their
sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.counts import Counts
from spt.models.ops.precision import ieee_products, without_autocast
from spt.models.ops.scan import scan

CHUNK = 32  # steps, a power of two: with keys and values of 16 to 64 numbers about the fastest on a CPU
_LEAST = -1000.0  # exp of it is zero, in double precision too; -inf would make differences undefined


@ieee_products
def linear_attention(
    q: Float[Tensor, "B L G N"],
    k: Float[Tensor, "B L G N"],
    v: Float[Tensor, "B L H P"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    reverse: bool = False,
    chunk: int = CHUNK,
) -> Float[Tensor, "B L H P"]:
    """o_t of every step, from S = 0 before the first; `reverse`: from the last step to the first. Both see the present.

    `log_decay`, at most 0, is (H,), or (B, L, H), or (B, L, H, N) with one for every feature of the keys. Computed in
    float32, or in float64 if v is in it; the result has v's type. Scores are not kept for the backward pass, but
    computed again; what is kept grows with L (N + P) and with the states between chunks.
    """
    _check(q, v, log_decay, chunk)
    if reverse:
        if log_decay is not None and log_decay.ndim > 1:
            log_decay = log_decay.flip(1)
        return linear_attention(q.flip(1), k.flip(1), v.flip(1), log_decay, chunk=chunk).flip(1)
    B, L, H, P = v.shape
    C = chunk_length(L, chunk)
    with without_autocast(v):
        q, k, values = _chunks(q, C), _chunks(k, C), _chunks(v, C)
        if log_decay is not None and log_decay.ndim == 4:
            shared = H // q.shape[2]
            q, k = (x.repeat_interleave(shared, 2) if shared > 1 else x for x in (q, k))
            o = _with_vector_decays(q, k, values, _chunks(log_decay.clamp(min=_LEAST).to(values.dtype), C))
        else:
            o = _with_scalar_decays(q, k, values, _sums(log_decay, C))
        return o.transpose(2, 3).reshape(B, -1, H, P)[:, :L].to(v.dtype)


def chunk_length(length: int, chunk: int = CHUNK) -> int:
    """The steps of a chunk: no more than the power of two that holds the sequence."""
    return min(chunk, 1 << max(0, length - 1).bit_length())


def _check(q: Tensor, v: Tensor, log_decay: Tensor | None, chunk: int) -> None:
    B, L, H, _ = v.shape
    if H % q.shape[2]:
        raise ValueError(f"{H} heads of values cannot share {q.shape[2]} of queries and keys evenly")
    shapes = {1: (H,), 3: (B, L, H), 4: (B, L, H, q.shape[-1])}
    if log_decay is not None and log_decay.shape != shapes.get(log_decay.ndim):
        raise ValueError(
            f"log decays {tuple(log_decay.shape)} do not fit: give one per head, per step and head, or per feature too"
        )
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"a chunk has a power of two of steps, not {chunk}")


def _chunks(x: Float[Tensor, "B L H *N"], C: int) -> Float[Tensor, "B n H C *N"]:
    """In chunks, the last of which is filled up with zeros; in single precision at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).transpose(2, 3).contiguous()


def _sums(log_decay: Tensor | None, C: int) -> Float[Tensor, "#B #n H C"] | None:
    """c: the sum of log decays from the beginning of the chunk, whose differences need double precision."""
    if log_decay is None:
        return None
    log_decay = log_decay.double().clamp(min=_LEAST)
    if log_decay.ndim == 1:
        return log_decay[None, None, :, None] * torch.arange(1, C + 1, device=log_decay.device)
    return _chunks(log_decay, C).cumsum(-1)


# ------------------------------------------------------------------------------------------- one decay for each head


def _with_scalar_decays(
    q: Float[Tensor, "B n G C N"],
    k: Float[Tensor, "B n G C N"],
    v: Float[Tensor, "B n H C P"],
    c: Float[Tensor, "#B #n H C"] | None,
) -> Float[Tensor, "B n H C P"]:
    G = q.shape[2]
    o: Tensor = _Within.apply(q, k, v, c)
    if q.shape[1] == 1:
        return o
    entering = v if c is None else v * torch.exp(c[..., -1:] - c).to(v.dtype)[..., None]
    added = _by_group(k.mT, entering, G)  # to the state, in each chunk
    last = None if c is None else torch.exp(c[..., -1]).to(v.dtype)[..., None, None]
    states = _states_before(last, added)
    read = _by_group(q, states, G)
    return o + (read if c is None else read * torch.exp(c).to(v.dtype)[..., None])


def _by_group(a: Float[Tensor, "B n G I J"], b: Float[Tensor, "B n H J P"], G: int) -> Float[Tensor, "B n H I P"]:
    """a b, in which heads of one group share a."""
    if b.shape[2] == G:
        return a @ b
    B, n, H, J, P = b.shape
    side_by_side = b.unflatten(2, (G, -1)).transpose(3, 4).reshape(B, n, G, J, H // G * P)
    return (a @ side_by_side).unflatten(-1, (H // G, P)).transpose(3, 4).flatten(2, 3)


def _states_before(last: Tensor | None, added: Float[Tensor, "B n H N P"]) -> Float[Tensor, "B n H N P"]:
    """The state at the beginning of each chunk; `last` is what remains of it at the end."""
    if last is None or last.shape[:2] == (1, 1):  # the same in every chunk
        decays = torch.ones_like(added[0, 0]) if last is None else last[0, 0].expand_as(added[0, 0])
    else:
        decays = last.expand_as(added)
    after = scan(decays.flatten(-3), added.flatten(2)).view_as(added)
    return F.pad(after[:, :-1], (0, 0) * 3 + (1, 0))


class _Within(torch.autograd.Function):
    """sum over s <= t of q_t k_s exp(c_t - c_s) v_s within each chunk. Scores are not kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, c)
        return _weighted(q @ k.mT, _remaining(c, v), v) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        with without_autocast(do):
            return _Within.gradients(ctx, do)

    @staticmethod
    def gradients(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, c = ctx.saved_tensors
        remaining = _remaining(c, v)
        scores = _weighted(q @ k.mT, remaining, v)
        dv = scores.mT @ do
        dscores = do @ v.mT
        dc = None
        if c is not None and ctx.needs_input_grad[3]:
            slopes = scores.mul_(dscores)
            slopes.diagonal(dim1=-2, dim2=-1).zero_()  # the present does not decay
            dc = (slopes.sum(-1) - slopes.sum(-2)).double().sum_to_size(c.shape)
        dscores.mul_(remaining)
        dscores = dscores.unflatten(2, (q.shape[2], -1)).sum(3) if q.shape[2] < v.shape[2] else dscores
        return dscores @ k, dscores.mT @ q, dv, dc


def _weighted(
    scores: Float[Tensor, "B n G C C"], remaining: Float[Tensor, "*#heads C C"], v: Float[Tensor, "B n H C P"]
) -> Float[Tensor, "B n H C C"]:
    """The scores of each head of values, times what remains."""
    G, H = scores.shape[2], v.shape[2]
    if G == H:
        return scores.mul_(remaining)
    grouped = remaining.expand(*remaining.shape[:-3], H, -1, -1).unflatten(-3, (G, H // G))
    return (scores[:, :, :, None] * grouped).flatten(2, 3)


def _remaining(c: Tensor | None, v: Tensor) -> Float[Tensor, "*#heads C C"]:
    """exp(c_t - c_s) for s <= t, else 0."""
    C = v.shape[-2]
    past = torch.ones(C, C, dtype=torch.bool, device=v.device).tril_()
    if c is None:
        return past.to(v.dtype)
    return (c[..., None] - c[..., None, :]).to(v.dtype).masked_fill_(~past, -torch.inf).exp_()


# ---------------------------------------------------------------------------------------- one decay for each feature


def _with_vector_decays(
    q: Float[Tensor, "B n H C N"],
    k: Float[Tensor, "B n H C N"],
    v: Float[Tensor, "B n H C P"],
    g: Float[Tensor, "B n H C N"],
) -> Float[Tensor, "B n H C P"]:
    o, before, after = _ByHalves.apply(q, k, v, g)
    if q.shape[1] == 1:
        return o
    added = (k * torch.exp(after)).mT @ v
    states = _states_before(torch.exp(before[..., -1, :, None]), added)
    return o + (q * torch.exp(before)) @ states


class _ByHalves(torch.autograd.Function):
    """o within each chunk, and two sums of g. before: from the start of a step's half up to the step, with it. after:
    from behind the step to the end of its half. Halves double until they are the chunk."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g)
        o = (q * k).sum(-1, keepdim=True) * v
        before, after = g.clone(), torch.zeros_like(g)
        for half in _powers(g.shape[-2]):
            queries = _late(q, half) * torch.exp(_late(before, half))
            keys = _early(k, half) * torch.exp(_early(after, half))
            _late(o, half).add_((queries @ keys.mT) @ _early(v, half))
            _join(before, after, half)
        return o, before, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with without_autocast(do):
            return _ByHalves.gradients(ctx, do, dbefore, dafter)

    @staticmethod
    def gradients(ctx: Any, do: Tensor, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, g = ctx.saved_tensors
        remains, before, after = [], g.clone(), torch.zeros_like(g)
        for half in _powers(g.shape[-2]):
            remains.append((half, torch.exp(_late(before, half)), torch.exp(_early(after, half))))
            _join(before, after, half)
        dpresent, dv = (do * v).sum(-1, keepdim=True), (q * k).sum(-1, keepdim=True) * do
        dq, dk, dbefore, dafter = dpresent * k, dpresent * q, dbefore.clone(), dafter.clone()
        for half, of_queries, of_keys in reversed(remains):
            _early(dbefore, half)[..., -1, :] += _late(dbefore, half).sum(-2)
            _late(dbefore, half)[..., -1, :] += _early(dafter, half).sum(-2)
            queries, keys = _late(q, half) * of_queries, _early(k, half) * of_keys
            dscores = _late(do, half) @ _early(v, half).mT
            _early(dv, half).add_((queries @ keys.mT).mT @ _late(do, half))
            dqueries, dkeys = dscores @ keys, dscores.mT @ queries
            _late(dq, half).addcmul_(dqueries, of_queries)
            _early(dk, half).addcmul_(dkeys, of_keys)
            _late(dbefore, half).addcmul_(dqueries, queries)
            _early(dafter, half).addcmul_(dkeys, keys)
        return dq, dk, dv, dbefore


def _powers(C: int) -> list[int]:
    return [1 << i for i in range(C.bit_length() - 1)]


def _early(x: Float[Tensor, "*B C N"], half: int) -> Float[Tensor, "*B m half N"]:
    return x.unflatten(-2, (-1, 2, half)).select(-3, 0)


def _late(x: Float[Tensor, "*B C N"], half: int) -> Float[Tensor, "*B m half N"]:
    return x.unflatten(-2, (-1, 2, half)).select(-3, 1)


def _join(before: Tensor, after: Tensor, half: int) -> None:
    """From sums within halves to sums within both together."""
    _early(after, half).add_(_late(before, half)[..., -1:, :])
    _late(before, half).add_(_early(before, half)[..., -1:, :])


# -------------------------------------------------------------------------------------------------- other ways to run


def linear_attention_step(
    q: Float[Tensor, "B G N"],
    k: Float[Tensor, "B G N"],
    v: Float[Tensor, "B H P"],
    log_decay: Float[Tensor, "*B H"] | Float[Tensor, "B H N"] | None,
    state: Float[Tensor, "B H N P"] | None,
) -> tuple[Float[Tensor, "B H P"], Float[Tensor, "B H N P"]]:
    """o_t and S_t of the next step, from S_{t-1}; None: zero."""
    precise = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v):
        q, k = (x.to(precise).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        entering = k[..., None] * v.to(precise)[..., None, :]
        if state is None:
            state = entering
        else:
            if log_decay is not None:
                remains = torch.exp(log_decay.to(precise))
                state = state * (remains[..., None] if log_decay.ndim == 3 else remains[..., None, None])
            state = state + entering
        return (q[..., None, :] @ state).squeeze(-2).to(v.dtype), state


@ieee_products
def two_sided_attention(
    q: Float[Tensor, "B L H N"],
    k: Float[Tensor, "B L H N"],
    v: Float[Tensor, "B L H P"],
    valid: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B L H P"]:
    """o_t = sum over all valid steps s of (q_t k_s) v_s, which forgets nothing."""
    precise = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v):
        q, k, values = (x.to(precise).transpose(1, 2) for x in (q, k, v))
        if valid is not None:
            values = torch.where(valid[:, None, :, None], values, 0.0)
        return (q @ (k.mT @ values)).transpose(1, 2).to(v.dtype)


def linear_attention_flops(
    length: int, heads: int, N: int, P: int, *, groups: int | None = None, per_feature: bool = False, chunk: int = CHUNK
) -> Counts:
    """The products of `linear_attention` on one sequence; backward has the scores once more. The scan between chunks,
    one multiply-add for each number in the state and chunk, is left out."""
    C, G = chunk_length(length, chunk), heads if per_feature else groups or heads
    n = -(-length // C)
    carried = 4.0 * (n * C * heads * N * P if n > 1 else 0)
    pairs = n * C * (C - 1) / 2 if per_feature else n * C * C  # the former are those of a step with an earlier one
    scores, sums = 2.0 * pairs * G * N, 2.0 * pairs * heads * P
    return Counts.of("attention", scores + sums + carried, 3.0 * scores + 2.0 * sums + 2.0 * carried)


def two_sided_attention_flops(length: int, heads: int, N: int, P: int) -> Counts:
    return Counts.of("attention", 4.0 * length * heads * N * P)
