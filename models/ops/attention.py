"""Softmax attention, full and local, and positions.

Vaswani et al. 2017; rotary positions of Su et al. 2021; xPos of Sun et al. 2022. `backends` chooses the library that
computes it. Letters: B sequences, L queries, M keys, H heads of queries, G heads of keys and values (each shared by
H / G neighbouring heads of queries), E width of a head, P = E / 2 pairs in it, w length of a chunk, K of its
neighbourhood.

What holds for CUDA is checked here by the arguments that its kernels are given; no GPU has run it.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from spt.models.ops import backends
from spt.models.ops.precision import autocast_type

Pairs = Literal["interleaved", "half"]
ROWS = 256  # queries at a time where a causal mask must be materialised: few, so that little work goes to masked keys
HALF = (torch.float16, torch.bfloat16)  # types that flash attention supports
WIDEST = 256  # head of flash attention
ALIGNMENT = 8  # widths of heads and strides of masks, in numbers, that every fused kernel for CUDA accepts

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
    """z_i^((t - length // 2) / base), z_i = (2i/width + 0.4) / 1.4, in float64: queries are multiplied by it and keys
    divided, so that scores shrink with distance (Sun et al. 2022, section 2.2)."""
    z = (torch.arange(0, width, 2, dtype=torch.float64) / width + 0.4) / 1.4
    return z ** ((torch.arange(length, dtype=torch.float64) - length // 2) / base)[:, None]


def rotate(
    x: Float[Tensor, "*B L E"], table: Float[Tensor, "L P 2"], pairs: Pairs = "interleaved"
) -> Float[Tensor, "*B L E"]:
    """Rotary embedding (Su et al. 2021, eq. 34): (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos), in float32 or better.

    Pairs of a head are neighbours (2i, 2i + 1) or one of each half (i, P + i). For neighbours this is a complex
    product, which is faster on a CPU, but slow on CUDA and not compiled.
    """
    wide = x.to(torch.promote_types(x.dtype, table.dtype))
    if pairs == "interleaved" and x.device.type == "cpu" and not torch.compiler.is_compiling():
        rotated = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.view_as_complex(table)
        return torch.view_as_real(rotated).flatten(-2).type_as(x)
    return _rotate_real(wide, table, pairs).type_as(x)


def _rotate_real(x: Float[Tensor, "*B L E"], table: Float[Tensor, "L P 2"], pairs: Pairs) -> Float[Tensor, "*B L E"]:
    cos, sin = table.unbind(-1)
    x0, x1 = x.unflatten(-1, (-1, 2)).unbind(-1) if pairs == "interleaved" else x.chunk(2, dim=-1)
    rotated = torch.addcmul(x0 * cos, x1, sin, value=-1), torch.addcmul(x0 * sin, x1, cos)
    return torch.stack(rotated, dim=-1).flatten(-2) if pairs == "interleaved" else torch.cat(rotated, dim=-1)


class Rotary(nn.Module):
    """Rotates queries and keys by their step, 0, 1, ..., so that scores depend on the distance.

    `xpos`: the base of xPos, with which scores also shrink with the distance.
    """

    queries: Tensor  # table for queries, and for keys too unless these have one
    keys: Tensor | None

    def __init__(
        self, length: int, width: int, base: float = 10000.0, pairs: Pairs = "interleaved", xpos: float | None = None
    ) -> None:
        super().__init__()
        self.length, self.width, self.base, self.pairs, self.xpos = length, width, base, pairs, xpos
        queries, keys = self._tables(torch.float32)
        # Not saved: the tables depend only on the length, and longer ones have the same beginning (with xPos, up to a
        # factor that cancels in the scores).
        self.register_buffer("queries", queries, persistent=False)
        self.register_buffer("keys", keys, persistent=False)

    def forward(
        self, q: Float[Tensor, "B H L E"], k: Float[Tensor, "B G L E"]
    ) -> tuple[Float[Tensor, "B H L E"], Float[Tensor, "B G L E"]]:
        length = q.shape[2]
        keys = self.queries if self.keys is None else self.keys
        return rotate(q, self.queries[:length], self.pairs), rotate(k, keys[:length], self.pairs)

    def _tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        table = rotary_table(self.length, self.width, self.base, dtype=torch.float64)
        if self.xpos is None:
            return table.to(dtype), None
        scale = xpos_scale(self.length, self.width, self.xpos)[..., None]
        return (table * scale).to(dtype), (table / scale).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """A model made float64 gets float64 tables, recomputed; one in half precision keeps float32 ones."""
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


class AttentionWeights(NamedTuple):
    """Attention weights of R neighbouring queries on M neighbouring keys, the only ones they may attend to."""

    first_query: int
    first_key: int
    weights: Float[Tensor, "B H R M"]  # sum to 1 over keys, or to 0 for a query that may attend to nothing
    visible: Bool[Tensor, "#B 1 R M"]  # may this query attend to this key?


class _Options(NamedTuple):
    """What `attend` is given besides queries, keys and values."""

    causal: bool
    scale: float | None
    valid: Bool[Tensor, "B M"] | None
    bias: Float[Tensor, "#H L M"] | None
    dropout: float


class Chunks(NamedTuple):
    """Chunks of w steps; the queries of chunk j see the keys of chunks j - back to j + ahead."""

    w: int
    back: int = 0
    ahead: int = 0


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
    """softmax(scale q k^T + bias) v; `scale` is E^(-1/2) by default.

    `valid` is False where a key is masked; a bias of minus infinity masks a key for one query. Causal: the last query
    sees all keys, the one before it all but the last, and so on, so there must be at least as many keys as queries. A
    query that sees no key gives zeros. The output of a masked step is finite, and depends on the backend.
    """
    if causal and k.shape[2] < q.shape[2]:
        raise ValueError(f"{k.shape[2]} keys for {q.shape[2]} queries: the first query would see no key")
    options = _Options(causal, scale, valid, bias, dropout)
    if bias is None and k.shape[2] == q.shape[2] and (kernel := _packed_kernel(q, dropout, valid is not None)):
        return _packed(kernel, q, k, v, Chunks(q.shape[2]), None, options)
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    return (_formula if backends.current("attention") == "math" else _sdpa)(q, k, v, options)


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
    """Attention among neighbouring chunks of w steps: queries of chunk j see the keys of chunks j - back to j + ahead.

    The last chunk may be incomplete; nothing is padded, and one chunk is full attention. Causal (with `ahead` = 0): no
    later step either. `band`: the largest distance in steps (or two: backwards and forwards). `bias` is added to the
    scores of each chunk: its rows are the steps of the chunk, its K = (back + 1 + ahead) w columns those from the
    beginning of chunk j - back on. With a band, what is masked by `valid` is behind the valid steps of its sequence,
    since a kernel may count distances without it. All else is as in `attend`.

    Chunks with all their neighbours are computed together, without a mask unless one is needed; those at both ends are
    computed one by one. Time and memory grow linearly with L.
    """
    B, L = q.shape[0], q.shape[2]
    if causal and ahead:
        raise ValueError("causal attention sees no chunk ahead")
    chunks, limits = Chunks(w, back, ahead), (band, band) if isinstance(band, int) else band
    if limits is not None and causal:
        limits = (limits[0], 0)
    by_band = limits is not None and _decides(limits, chunks, L)
    kernel = None
    if bias is None and (limits is None or by_band):
        kernel = _packed_kernel(q, dropout, valid is not None or by_band)
    if kernel is not None:
        options = _Options(causal, scale, valid, None, dropout)
        return _packed(kernel, q, k, v, Chunks(L) if by_band else chunks, limits, options)
    if limits is not None:
        bias = _add_band(bias, chunks, limits, q)

    def piece(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, bias: Tensor | None) -> Tensor:
        return attend(q, k, v, causal=causal, scale=scale, valid=valid, bias=bias, dropout=dropout)

    def at_an_end(j: int, q: Tensor) -> Tensor:
        """Chunk j, which lacks some neighbours."""
        near = slice(max(0, j - back) * w, min(L, (j + 1 + ahead) * w))
        columns = slice(near.start - (j - back) * w, near.stop - (j - back) * w)
        mask = None if valid is None else valid[:, near]
        return piece(q, k[:, :, near], v[:, :, near], mask, None if bias is None else bias[:, : q.shape[2], columns])

    def inner(q: Tensor) -> Tensor:
        """Chunks `first` to `last` - 1, as separate sequences of one batch."""
        n = last - first

        def around(x: Tensor) -> Tensor:
            chunks = x[:, :, (first - back) * w : (last + ahead) * w].unflatten(2, (-1, w)).transpose(1, 2)
            return torch.cat([chunks[:, i : i + n] for i in range(back + 1 + ahead)], dim=3).flatten(0, 1)

        mask = None if valid is None else around(valid[:, None, :, None])[:, 0, :, 0]
        y = piece(q.unflatten(2, (n, w)).transpose(1, 2).flatten(0, 1), around(k), around(v), mask, bias)
        return y.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)

    count = -(-L // w)
    first = min(back, count)
    last = max(first, L // w - ahead)  # chunks first to last - 1 have all their neighbours
    sizes = [min(w, L - j * w) for j in range(count)]
    queries = list(q.split([*sizes[:first], sum(sizes[first:last]), *sizes[last:]], dim=2))
    outputs = [at_an_end(j, queries[j]) for j in range(first)]
    if last > first:
        outputs.append(inner(queries[first]))
    outputs += [at_an_end(last + i, chunk) for i, chunk in enumerate(queries[first + 1 :])]
    return _concatenate(outputs)


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
    mask_self: bool = False,
    bias: Callable[[Int[Tensor, "R M"]], Float[Tensor, "H R M"]] | None = None,
) -> Iterator[AttentionWeights]:
    """The attention weights of `attend`, or with w of `local_attend`, in blocks of some queries and the keys near them.
    `bias` is a function of the distance from query to key; with `mask_self` a step sees itself only if it sees nothing
    else. Memory grows linearly with L."""
    L, device = q.shape[2], q.device
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    w, back, ahead = Chunks(L) if w is None else Chunks(w, back, ahead)
    limits = (L, L) if band is None else (band, band) if isinstance(band, int) else band
    for start in range(0, L, ROWS):
        stop = min(start + ROWS, L)
        first, last = max(0, start // w - back) * w, min(L, ((stop - 1) // w + ahead + 1) * w)
        query, key = torch.arange(start, stop, device=device)[:, None], torch.arange(first, last, device=device)
        distance = key - query
        chunks = torch.div(key, w, rounding_mode="floor") - torch.div(query, w, rounding_mode="floor")
        visible = (chunks >= -back) & (chunks <= ahead) & (distance >= -limits[0]) & (distance <= limits[1])
        if causal:
            visible = visible & (distance <= 0)
        visible = visible[None, None]
        if valid is not None:
            visible = visible & valid[:, None, None, first:last]
        if mask_self:
            others = visible & (distance != 0)
            visible = torch.where(others.any(-1, keepdim=True), others, visible)
        scores = q[:, :, start:stop] @ k[:, :, first:last].mT * scale
        if bias is not None:
            scores = scores + bias(distance)
        masked = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        yield AttentionWeights(start, first, masked.softmax(dim=-1).masked_fill(~visible, 0.0), visible)


def skips_padding(x: Tensor, dropout: float) -> bool:
    """Would padding that is masked cost less than padding that is not, for queries like x?"""
    return _packed_kernel(x, dropout, True) is not None


def self_mask(like: Tensor, w: int, back: int = 0, ahead: int = 0) -> Float[Tensor, "1 w K"]:
    """A bias for `local_attend`, or with w = L for `attend`: a step sees itself only if it sees nothing else."""
    bias = torch.zeros(1, w, (back + 1 + ahead) * w, dtype=like.dtype, device=like.device)
    bias.diagonal(back * w, 1, 2).fill_(-5e4)  # finite in half precision, and negligible beside any other score
    return bias


def _concatenate(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _add_band(bias: Tensor | None, chunks: Chunks, band: tuple[int, int], like: Tensor) -> Float[Tensor, "#H w K"]:
    """The bias, with minus infinity for keys that are too far away."""
    w, back, ahead = chunks
    own, near = torch.arange(w, device=like.device) + back * w, torch.arange((back + 1 + ahead) * w, device=like.device)
    distance = near - own[:, None]
    if bias is None:
        bias = torch.zeros(1, *distance.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill((distance < -band[0]) | (distance > band[1]), -torch.inf)


def _autocast(x: Tensor) -> Tensor:
    """In autocast's type, which it does not apply by itself to every form of attention (a causal bias)."""
    return x.to(autocast_type(x) or x.dtype)


def _visible(L: int, M: int, device: torch.device, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Which key is visible to which query, broadcasting to (B, 1, L, M); the last query sees the last key."""
    keys = None if valid is None else valid[:, None, None]
    if not causal:
        return keys
    past = torch.ones(1, 1, L, M, dtype=torch.bool, device=device).tril(M - L)
    return past if keys is None else past & keys


def _formula(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Float[Tensor, "B H L E"]:
    """The formula as written, against which the other implementations are tested."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    if options.bias is not None:
        scores = scores + options.bias
    visible, masked = _visible(q.shape[2], k.shape[2], q.device, options.causal, options.valid), scores.isneginf()
    if visible is not None:
        masked = masked | ~visible
    # Not minus infinity: in a row with nothing else, the gradient would be NaN.
    weights = scores.masked_fill(masked, torch.finfo(scores.dtype).min).softmax(dim=-1).masked_fill(masked, 0.0)
    return F.dropout(weights, options.dropout).to(v.dtype) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Float[Tensor, "B H L E"]:
    """scaled_dot_product_attention. A mask, if needed, is materialised for a few queries at a time."""
    L, M = q.shape[2], k.shape[2]
    causal, scale, valid, bias, dropout = options
    fused = _fused_on_cuda if _on_cuda(q) else F.scaled_dot_product_attention
    common: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": k.shape[1] != q.shape[1]}
    if causal and valid is None and bias is None and (L == M or _on_cuda(q)):
        if L == M:
            return fused(q, k, v, is_causal=True, **common)
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler: a second or two

        return fused(q, k, v, attn_mask=causal_lower_right(L, M), **common)
    outputs, start = [], 0
    for rows in q.split(ROWS, dim=2) if causal else (q,):
        stop = start + rows.shape[2]
        keys = M - L + stop if causal else M
        mask = _visible(stop - start, keys, q.device, causal, None if valid is None else valid[:, :keys])
        if bias is not None:
            bias_block = bias[None, :, start:stop, :keys].to(q.dtype)
            mask = bias_block if mask is None else bias_block.masked_fill(~mask, -torch.inf)
        outputs.append(fused(rows, k[:, :, :keys], v[:, :, :keys], attn_mask=mask, **common))
        start = stop
    return _concatenate(outputs)


def _fused_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any = None, enable_gqa: bool, scale: float | None, **how: Any
) -> Float[Tensor, "B H L E"]:
    """scaled_dot_product_attention in a form that one of its fused kernels takes; what none takes it would compute by
    the formula, without saying so. Shared keys are only for flash attention, which needs half precision and no mask;
    the other kernel needs aligned heads and masks. (In float64 there is only the formula.)"""
    E = q.shape[-1]
    scale = E**-0.5 if scale is None else scale
    dense = isinstance(attn_mask, Tensor) and type(attn_mask) is Tensor
    if enable_gqa and (dense or q.dtype not in HALF or E > WIDEST):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        enable_gqa = False
    q, k, v = _widened(q, k, v)
    mask = _aligned(attn_mask) if dense else attn_mask
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa, scale=scale, **how)
    return y[..., :E]


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda


def _widened(*heads: Tensor) -> list[Tensor]:
    """Zeros behind each head, up to a width that kernels for CUDA accept; they change no product."""
    return [F.pad(x, (0, -x.shape[-1] % ALIGNMENT)) if x.shape[-1] % ALIGNMENT else x for x in heads]


def _aligned(mask: Tensor) -> Tensor:
    """The mask at addresses that kernels for CUDA accept: a slice of a wider one where need be."""
    strides = [step for step, size in zip(mask.stride()[:-1], mask.shape[:-1], strict=True) if size > 1]
    if mask.stride(-1) == 1 and not any(number % ALIGNMENT for number in (*strides, mask.storage_offset())):
        return mask
    M = mask.shape[-1]
    return F.pad(mask, (0, ALIGNMENT - M % ALIGNMENT))[..., :M]


# --------------------------------------------------------------------------------------------------- without padding


class Segments(NamedTuple):
    """Queries and keys of each segment, as indices into the steps of all sequences, one sequence after the other.
    Masked steps, in any order, and rows without meaning are behind the last segment."""

    queries: Int[Tensor, " S"] | None  # the step of each row; None: all steps, in their order
    keys: Int[Tensor, " T"] | None
    query_ends: Int[Tensor, " N"]  # cumulative lengths, starting with 0
    key_ends: Int[Tensor, " N"]
    rows: Int[Tensor, " S"] | None  # the row of each step; of masked steps, any row


def segments(B: int, L: int, chunks: Chunks, valid: Bool[Tensor, "B L"] | None, device: torch.device) -> Segments:
    """One segment for every chunk of every sequence, without masked steps, so that some may be empty. All shapes
    follow from B, L and the chunks: nothing waits for the device."""
    w, back, ahead = chunks
    n = -(-L // w)
    included = torch.ones(B, L, dtype=torch.bool, device=device) if valid is None else valid
    counts = F.pad(included, (0, n * w - L)).view(B, n, w).sum(-1)
    ends = counts.flatten().cumsum(0).view(B, n)
    j = torch.arange(n, device=device)
    starts = (ends - counts)[:, (j - back).clamp(min=0)].flatten()
    n_keys = ends[:, (j + ahead).clamp(max=n - 1)].flatten() - starts
    key_ends, query_ends = F.pad(n_keys.cumsum(0), (1, 0)), F.pad(ends.flatten(), (1, 0))
    queries = rows = keys = None
    if valid is not None:
        queries = valid.flatten().logical_not().to(torch.uint8).argsort(stable=True)
        rows = (valid.flatten().cumsum(0) - 1).clamp(min=0)
    if n > 1:  # neighbourhoods overlap
        most = sum(min(L, (i + 1 + ahead) * w) - max(0, i - back) * w for i in range(n))
        slots = torch.arange(B * most, device=device)
        segment = torch.searchsorted(key_ends[1:], slots, right=True).clamp(max=B * n - 1)
        # What is left over refers to rows behind the last segment, to masked steps.
        keys = (starts[segment] + slots - key_ends[segment]).clamp(max=B * L - 1)
    if queries is not None:
        keys = queries if keys is None else queries[keys]
    return Segments(queries, keys, query_ends.int(), key_ends.int(), rows)


_segments_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by `valid`, which all layers share; then by chunks


def _segments(q: Tensor, chunks: Chunks, valid: Tensor | None) -> Segments:
    """Of queries (B, H, L, E); once for all layers that are given the same `valid`."""
    B, _, L, _ = q.shape
    # A compiler finds by itself what is computed twice; of an inference tensor nobody knows whether it has changed.
    if valid is None or torch.compiler.is_compiling() or valid.is_inference():
        return segments(B, L, chunks, valid, q.device)
    known = _segments_of.setdefault(valid, {})
    key = (*chunks, valid._version)
    if key not in known:
        known[key] = segments(B, L, chunks, valid, q.device)
    found: Segments = known[key]
    return found


def _decides(band: tuple[int, int], chunks: Chunks, L: int) -> bool:
    """Is all within the band also in the neighbourhood of a chunk?"""
    sides = (chunks.back * chunks.w, chunks.ahead * chunks.w)
    return all(limit <= side or side >= L - 1 for limit, side in zip(band, sides, strict=True))


def _packed_kernel(q: Tensor, dropout: float, useful: bool) -> Callable[..., Tensor] | None:
    """What computes attention by segments, as flash_attn_varlen_func does, if the backend in use has it for such
    queries; by default only where that is `useful`."""
    backend = backends.current("attention")
    if backend == "flash":
        return backends.flash()
    if dropout > 0.0 or q.shape[-1] > WIDEST:  # which torch's own has not
        return None
    if backend == "varlen":
        return backends.varlen()
    half = (autocast_type(q) or q.dtype) in HALF
    if backend != "auto" or not (useful and half and _on_cuda(q)) or torch.compiler.is_compiling():
        return None
    return None if backends.probe("varlen", str(q.device), "attention") else backends.varlen()


def _packed(
    kernel: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    band: tuple[int, int] | None,
    options: _Options,
) -> Float[Tensor, "B H L E"]:
    """One call for all segments, without padding. Its causal mask lets the last query of a segment see the last key,
    which is the query's own step. What the kernel leaves behind the last segment is arbitrary, in gradients too, so
    masked steps are overwritten on both sides of it."""
    B, _, L, E = q.shape
    scale = E**-0.5 if options.scale is None else options.scale
    q, k, v = _widened(_autocast(q), _autocast(k), _autocast(v))
    if q.dtype not in HALF:
        raise backends.Unavailable(
            f"the attention backend {backends.current('attention')} computes in half precision, but its input is "
            f"{str(q.dtype)[6:]}; use precision: bf16, or another backend"
        )
    where = _segments(q, chunks, options.valid)
    masked = None if options.valid is None else ~options.valid.flatten()[:, None, None]

    def rows(x: Tensor, order: Tensor | None) -> Tensor:
        x = x.transpose(1, 2).flatten(0, 1)
        x = x if masked is None else x.masked_fill(masked, 0.0)
        return x if order is None else x.index_select(0, order)

    y = kernel(
        rows(q, where.queries),
        rows(k, where.keys),
        rows(v, where.keys),
        where.query_ends,
        where.key_ends,
        min(chunks.w, L),
        min((chunks.back + 1 + chunks.ahead) * chunks.w, L),
        dropout_p=options.dropout,
        softmax_scale=scale,
        causal=options.causal,
        window_size=(-1, -1) if band is None else band,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[..., :E]
    if where.rows is not None and masked is not None:
        y = y.index_select(0, where.rows).masked_fill(masked, 0.0)
    return y.unflatten(0, (B, L)).transpose(1, 2)
