"""Softmax attention, full and local, and positions.

Vaswani et al. 2017; rotary positions of Su et al. 2021; xPos of Sun et al. 2022. `backends` says which library computes
it. Letters: B sequences, L queries, M keys, H heads, G heads of keys and values (G divides H; each serves H / G
neighbouring heads of queries), E width of a head, P = E / 2 pairs in it, w length of a chunk, K of its neighbourhood.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from spt.models.ops import backends

Pairs = Literal["interleaved", "half"]
ROWS = 256  # queries at once where a causal mask has to be written down: few enough to waste little on hidden keys
HALF = (torch.float16, torch.bfloat16)  # what flash-attn takes

# ---------------------------------------------------------------------------------------------------------- positions


def sinusoids(length: int, width: int, base: float = 10000.0) -> Float[Tensor, "L E"]:
    """sin and cos of t * base^(-2i/width) in even and odd columns (Vaswani et al. 2017, section 3.5)."""
    angles = _angles(length, width, base)
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
    return table.float()


def rotary_table(
    length: int, width: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "L P 2"]:
    """cos and sin of t * base^(-2i/width) for pair i of a head."""
    angles = _angles(length, width, base)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).to(dtype)


def xpos_scale(length: int, width: int, base: float) -> Float[Tensor, "L P"]:
    """z_i^((t - length // 2) / base), z_i = (2i/width + 0.4) / 1.4, in float64: queries are multiplied by it, keys
    divided, so that a score shrinks with the steps between them (Sun et al. 2022, section 2.2)."""
    z = (torch.arange(0, width, 2, dtype=torch.float64) / width + 0.4) / 1.4
    return z ** ((torch.arange(length, dtype=torch.float64) - length // 2) / base)[:, None]


def rotate(
    x: Float[Tensor, "*B L E"], table: Float[Tensor, "L P 2"], pairs: Pairs = "interleaved"
) -> Float[Tensor, "*B L E"]:
    """Rotary embedding (Su et al. 2021, eq. 34): (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos), in float32 or better.

    The pairs of a head are neighbours (2i, 2i + 1), for which it is a complex product, or one of each half (i, P + i).
    """
    given = x.to(torch.promote_types(x.dtype, table.dtype))
    if pairs == "interleaved":
        turned = torch.view_as_complex(given.unflatten(-1, (-1, 2))) * torch.view_as_complex(table)
        return torch.view_as_real(turned).flatten(-2).type_as(x)
    x0, x1 = given.chunk(2, dim=-1)
    cos, sin = table.unbind(-1)
    turned = torch.cat([torch.addcmul(x0 * cos, x1, sin, value=-1), torch.addcmul(x0 * sin, x1, cos)], dim=-1)
    return turned.type_as(x)


class Rotary(nn.Module):
    """Rotates queries and keys by their step, 0, 1, ...; scores then depend on the steps between two.

    `xpos`: the base of xPos, with which scores also shrink with the steps back.
    """

    queries: Tensor
    keys: Tensor | None  # where they are not turned as the queries are

    def __init__(
        self, length: int, width: int, base: float = 10000.0, pairs: Pairs = "interleaved", xpos: float | None = None
    ) -> None:
        super().__init__()
        self.length, self.width, self.base, self.pairs, self.xpos = length, width, base, pairs, xpos
        queries, keys = self._tables(torch.float32)
        # Buffers that are not saved: they follow from the length, and longer ones have the same beginning (with xPos,
        # but for a factor that scores do not show).
        self.register_buffer("queries", queries, persistent=False)
        self.register_buffer("keys", keys, persistent=False)

    def forward(
        self, q: Float[Tensor, "B H L E"], k: Float[Tensor, "B G L E"]
    ) -> tuple[Float[Tensor, "B H L E"], Float[Tensor, "B G L E"]]:
        length = q.shape[2]
        keys = self.queries if self.keys is None else self.keys
        return rotate(q, self.queries[:length], self.pairs), rotate(k, keys[:length], self.pairs)

    def _tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        turn = rotary_table(self.length, self.width, self.base, dtype=torch.float64)
        if self.xpos is None:
            return turn.to(dtype), None
        scale = xpos_scale(self.length, self.width, self.xpos)[..., None]
        return (turn * scale).to(dtype), (turn / scale).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """In a model that is made float64, the tables are as exact as that; in one of half precision they are not."""
        before = self.queries.dtype
        super()._apply(fn, recurse)
        if self.queries.dtype != before:
            queries, keys = self._tables(torch.promote_types(self.queries.dtype, torch.float32))
            self.queries = queries.to(self.queries.device)
            self.keys = None if keys is None else keys.to(self.queries.device)
        return self


def _angles(length: int, width: int, base: float) -> Float[Tensor, "L P"]:
    # In float64: at step 65,536 a float32 angle is off by 4e-3.
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequency)


# ---------------------------------------------------------------------------------------------------------- attention


class _How(NamedTuple):
    """What all pieces of one attention share."""

    causal: bool
    scale: float | None
    dropout: float


def attend(
    q: Float[Tensor, "B H L E"],
    k: Float[Tensor, "B G M E"],
    v: Float[Tensor, "B G M E"],
    *,
    causal: bool = False,
    scale: float | None = None,
    valid: Bool[Tensor, "B M"] | None = None,
    bias: Float[Tensor, "#H L M"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L E"]:
    """softmax(scale q k^T + bias) v; `scale` is E^(-1/2) unless it is given.

    `valid` is False where a key is hidden; a bias of minus infinity hides one from one query. Causal: the last query
    looks at all keys, the one before it at all but the last, and so on; there are no fewer keys than queries. A query
    without any key gives zeros. What the query of a hidden step gives is finite, and depends on the backend.
    """
    if causal and k.shape[2] < q.shape[2]:
        raise ValueError(f"{k.shape[2]} keys for {q.shape[2]} queries: the first would look at nothing")
    how, backend = _How(causal, scale, dropout), backends.current("attention")
    if backend == "flash" and bias is None and k.shape[2] == q.shape[2]:
        return _without_padding(q, k, v, q.shape[2], 0, 0, valid, how)
    q, k, v = _lowered(q), _lowered(k), _lowered(v)
    return (_written_out if backend == "math" else _fused)(q, k, v, valid, bias, how)


def local_attend(
    q: Float[Tensor, "B H L E"],
    k: Float[Tensor, "B G L E"],
    v: Float[Tensor, "B G L E"],
    w: int,
    *,
    back: int = 1,
    ahead: int = 1,
    causal: bool = False,
    band: int | tuple[int, int] | None = None,
    scale: float | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
    bias: Float[Tensor, "#H w K"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L E"]:
    """Attention among neighbouring chunks of w steps: those of chunk j look at chunks j - back to j + ahead.

    The last chunk may be incomplete; nothing is padded, and one chunk is full attention. Causal (`ahead` is 0): at no
    later step. `band`: besides, at most so many steps away (two numbers: backwards and forwards). `bias` is added to
    the scores of each chunk: its rows are the steps of the chunk, its K = (back + 1 + ahead) w columns those from the
    beginning of chunk j - back on. All else is as in `attend`.

    Chunks that have all their neighbours are computed at once, without a mask unless one is asked for; the others, at
    both ends, one by one on what there is. Time and memory grow linearly with L.
    """
    B, L = q.shape[0], q.shape[2]
    if causal and ahead:
        raise ValueError("causal attention looks at no chunk ahead")
    if backends.current("attention") == "flash" and band is None and bias is None:
        return _without_padding(q, k, v, w, back, ahead, valid, _How(causal, scale, dropout))
    if band is not None:
        bias = _banded(bias, w, back, ahead, (band, band) if isinstance(band, int) else band, q)

    def piece(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, bias: Tensor | None) -> Tensor:
        return attend(q, k, v, causal=causal, scale=scale, valid=valid, bias=bias, dropout=dropout)

    def at_an_end(j: int, q: Tensor) -> Tensor:
        """Chunk j on the neighbours it has."""
        near = slice(max(0, j - back) * w, min(L, (j + 1 + ahead) * w))
        known = slice(near.start - (j - back) * w, near.stop - (j - back) * w)
        hidden = None if valid is None else valid[:, near]
        return piece(q, k[:, :, near], v[:, :, near], hidden, None if bias is None else bias[:, : q.shape[2], known])

    def within(q: Tensor) -> Tensor:
        """All chunks from `first` to `last` - 1, as sequences of their own."""
        n = last - first

        def around(x: Tensor) -> Tensor:
            chunks = x[:, :, (first - back) * w : (last + ahead) * w].unflatten(2, (-1, w)).transpose(1, 2)
            return torch.cat([chunks[:, i : i + n] for i in range(back + 1 + ahead)], dim=3).flatten(0, 1)

        hidden = None if valid is None else around(valid[:, None, :, None])[:, 0, :, 0]
        y = piece(q.unflatten(2, (n, w)).transpose(1, 2).flatten(0, 1), around(k), around(v), hidden, bias)
        return y.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)

    count = -(-L // w)
    first = min(back, count)
    last = max(first, L // w - ahead)  # of the chunks with all their neighbours, the first and the one after the last
    sizes = [min(w, L - j * w) for j in range(count)]
    before, own, behind = sizes[:first], sum(sizes[first:last]), sizes[last:]
    queries = list(q.split([*before, own, *behind], dim=2))
    pieces = [at_an_end(j, queries[j]) for j in range(first)]
    if last > first:
        pieces.append(within(queries[first]))
    pieces += [at_an_end(last + i, piece) for i, piece in enumerate(queries[first + 1 :])]
    return _joined(pieces)


def weights(
    q: Float[Tensor, "B H L E"],
    k: Float[Tensor, "B G L E"],
    *,
    w: int | None = None,
    back: int = 0,
    ahead: int = 0,
    causal: bool = False,
    band: int | tuple[int, int] | None = None,
    scale: float | None = None,
    valid: Bool[Tensor, "B L"] | None = None,
    itself: bool = True,
    bias: Callable[[Int[Tensor, "R M"]], Float[Tensor, "H R M"]] | None = None,
) -> Iterator[tuple[int, int, Float[Tensor, "B H R M"], Bool[Tensor, "#B 1 R M"]]]:
    """What `attend`, or with w `local_attend`, weighs values with: of some queries and the keys near them their first
    ones, the weights, and who may look at whom. `bias` is told the steps from query to key; without `itself` no step
    looks at itself unless it is all there is. Memory grows linearly with L."""
    L, device = q.shape[2], q.device
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    w, back, ahead = (L, 0, 0) if w is None else (w, back, ahead)
    limits = (L, L) if band is None else (band, band) if isinstance(band, int) else band
    for start in range(0, L, ROWS):
        stop = min(start + ROWS, L)
        first, last = max(0, start // w - back) * w, min(L, ((stop - 1) // w + ahead + 1) * w)
        query, key = torch.arange(start, stop, device=device)[:, None], torch.arange(first, last, device=device)
        away = key - query
        chunks = torch.div(key, w, rounding_mode="floor") - torch.div(query, w, rounding_mode="floor")
        visible = (chunks >= -back) & (chunks <= ahead) & (away >= -limits[0]) & (away <= limits[1])
        if causal:
            visible = visible & (away <= 0)
        visible = visible[None, None]
        if valid is not None:
            visible = visible & valid[:, None, None, first:last]
        if not itself:
            others = visible & (away != 0)
            visible = torch.where(others.any(-1, keepdim=True), others, visible)
        scores = q[:, :, start:stop] @ k[:, :, first:last].mT * scale
        if bias is not None:
            scores = scores + bias(away)
        hidden = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        yield start, first, hidden.softmax(dim=-1).masked_fill(~visible, 0.0), visible


def not_itself(like: Tensor, w: int, back: int = 0, ahead: int = 0) -> Float[Tensor, "1 w K"]:
    """A bias for `local_attend`, or with w = L for `attend`: no step looks at itself, unless it is all there is."""
    bias = torch.zeros(1, w, (back + 1 + ahead) * w, dtype=like.dtype, device=like.device)
    bias.diagonal(back * w, 1, 2).fill_(-5e4)  # low enough to vanish beside any other score, in half precision too
    return bias


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _banded(
    bias: Tensor | None, w: int, back: int, ahead: int, band: tuple[int, int], like: Tensor
) -> Float[Tensor, "#H w K"]:
    """Minus infinity where a key is more than so many steps away."""
    own, near = torch.arange(w, device=like.device) + back * w, torch.arange((back + 1 + ahead) * w, device=like.device)
    away = near - own[:, None]
    if bias is None:
        bias = torch.zeros(1, *away.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill((away < -band[0]) | (away > band[1]), -torch.inf)


def _lowered(x: Tensor) -> Tensor:
    """As autocast would have it; what it does not know of (a causal bias) needs it done."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _visible(L: int, M: int, device: torch.device, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Who may look at whom, (B, 1, L, M) or less where that broadcasts; the last query meets the last key."""
    keys = None if valid is None else valid[:, None, None]
    if not causal:
        return keys
    past = torch.ones(1, 1, L, M, dtype=torch.bool, device=device).tril(M - L)
    return past if keys is None else past & keys


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, bias: Tensor | None, how: _How
) -> Float[Tensor, "B H L E"]:
    """The formula as it stands, which other ways are tested against."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if how.scale is None else how.scale)
    if bias is not None:
        scores = scores + bias
    visible, hidden = _visible(q.shape[2], k.shape[2], q.device, how.causal, valid), scores.isneginf()
    if visible is not None:
        hidden = hidden | ~visible
    # Not minus infinity: in a row that has nothing else, the gradient would be no number.
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1).masked_fill(hidden, 0.0)
    return F.dropout(weights, how.dropout).to(v.dtype) @ v


def _fused(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, bias: Tensor | None, how: _How
) -> Float[Tensor, "B H L E"]:
    """scaled_dot_product_attention. A mask, where one is needed, is written down for a few queries at a time."""
    L, M = q.shape[2], k.shape[2]
    plain: dict[str, Any] = {"scale": how.scale, "dropout_p": how.dropout, "enable_gqa": k.shape[1] != q.shape[1]}
    if how.causal and valid is None and bias is None and (L == M or q.is_cuda):
        if L == M:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **plain)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(L, M), **plain)
    pieces, start = [], 0
    for rows in q.split(ROWS, dim=2) if how.causal else (q,):
        stop = start + rows.shape[2]
        seen = M - L + stop if how.causal else M
        mask = _visible(stop - start, seen, q.device, how.causal, None if valid is None else valid[:, :seen])
        if bias is not None:
            added = bias[None, :, start:stop, :seen].to(q.dtype)
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        pieces.append(F.scaled_dot_product_attention(rows, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, **plain))
        start = stop
    return _joined(pieces)


# ------------------------------------------------------------------------------------------------------- flash-attn


class Segments(NamedTuple):
    """Where, among the steps of all sequences in a row, each piece of queries and its keys are found."""

    queries: Int[Tensor, " S"] | None  # the steps that ask; None: all, in their order
    keys: Int[Tensor, " T"] | None  # the steps looked at, piece by piece
    query_ends: Int[Tensor, " N"]  # from 0 on
    key_ends: Int[Tensor, " N"]


def segments(
    B: int, L: int, w: int, back: int, ahead: int, valid: Bool[Tensor, "B L"] | None, device: torch.device
) -> Segments:
    """A piece for every chunk of every sequence, without hidden steps; chunks of nothing else are left out."""
    n = -(-L // w)
    here = torch.ones(B, L, dtype=torch.bool, device=device) if valid is None else valid
    counts = F.pad(here, (0, n * w - L)).view(B, n, w).sum(-1)
    ends = counts.flatten().cumsum(0).view(B, n)
    j = torch.arange(n, device=device)
    starts = (ends - counts)[:, (j - back).clamp(min=0)].flatten()
    near = ends[:, (j + ahead).clamp(max=n - 1)].flatten() - starts
    asking = counts.flatten()
    if valid is not None:
        some = asking > 0
        starts, near, asking = starts[some], near[some], asking[some]
    key_ends = F.pad(near.cumsum(0), (1, 0))
    query_ends = F.pad(asking.cumsum(0), (1, 0))
    queries = None if valid is None else valid.flatten().nonzero()[:, 0]
    keys = None
    if n > 1:  # neighbourhoods overlap
        keys = torch.arange(int(key_ends[-1]), device=device) + (starts - key_ends[:-1]).repeat_interleave(near)
    if queries is not None:
        keys = queries if keys is None else queries[keys]
    return Segments(queries, keys, query_ends.int(), key_ends.int())


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, w: int, back: int, ahead: int, valid: Tensor | None, how: _How
) -> Float[Tensor, "B H L E"]:
    """One call of flash-attn for all pieces, each as long as it is. Its causal mask lets the last query of a piece
    meet the piece's last key, which is the query's own step."""
    B, H, L, E = q.shape
    q, k, v = _lowered(q), _lowered(k), _lowered(v)
    if q.dtype not in HALF:
        raise backends.Unavailable(
            f"the attention backend flash computes in half precision, and these are {str(q.dtype)[6:]} numbers; "
            "use precision: bf16, or another backend"
        )
    where = segments(B, L, w, back, ahead, valid, q.device)
    rows, keys, values = (
        tokens if chosen is None else tokens[chosen]
        for tokens, chosen in zip(
            (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), (where.queries, where.keys, where.keys), strict=True
        )
    )
    y = backends.flash()(
        rows,
        keys,
        values,
        where.query_ends,
        where.key_ends,
        min(w, L),
        min((back + 1 + ahead) * w, L),
        dropout_p=how.dropout,
        softmax_scale=how.scale,
        causal=how.causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if where.queries is not None:
        y = torch.zeros(B * L, H, E, dtype=y.dtype, device=y.device).index_copy(0, where.queries, y)
    return y.unflatten(0, (B, L)).transpose(1, 2)
