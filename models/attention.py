"""Attention and positions.

Letters: B sequences, L steps, D width, H heads of queries, G heads of keys and values, E width of a head (default: D /
H), P = E / 2 pairs in it, w steps of a chunk.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from spt.models.mixer import Context, Mixer, ParamGroup, linear_flops
from spt.models.ops.attention import (
    AttentionWeights,
    Pairs,
    Rotary,
    attend,
    local_attend,
    rotary_table,
    rotate,
    self_mask,
    sinusoids,
    skips_padding,
    weights,
)
from spt.models.ops.counts import Counts, attention
from spt.models.ops.product import Linear

__all__ = ["Attention", "Pairs", "Position", "Positions", "rotary_table", "rotate", "sinusoids"]

Position = Literal["rotary", "learned", "sinusoidal"]


def chunk_within(reach: int | None) -> int | None:
    """Chunk length for attention to steps up to `reach` away, which then lie in a step's chunk and its neighbours; at
    least 32, since many small products are slow. None: no chunks."""
    return None if reach is None else max(reach, 32)


class Positions(Mixer):
    """Adds absolute positions to the stream: fixed sinusoids, a learned table, or both."""

    param_groups: Mapping[str, ParamGroup] = {"learned": ParamGroup()}  # no weight decay

    fixed: Tensor | None

    def __init__(self, d_model: int, max_length: int, kinds: tuple[Position, ...], std: float) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(max_length, d_model) * std) if "learned" in kinds else None
        # Not saved: the table depends only on the length, and a longer one has the same beginning.
        fixed = sinusoids(max_length, d_model) if "sinusoidal" in kinds else None
        self.register_buffer("fixed", fixed, persistent=False)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        for table in (self.fixed, self.learned):
            if table is not None:
                x = x + table[: x.shape[1]]
        return x

    def flops(self, length: int) -> Counts:
        return Counts()


class Attention(Mixer):
    """Multi-head softmax attention over the whole sequence, or with `window` among neighbouring chunks of that length.

    `back`, `ahead`: visible chunks on each side, 1 by default, ahead 0 if causal. `band`: largest distance in steps.
    `n_kv_heads`: heads of keys and values, each shared by a group of query heads. `xpos`: the base of xPos.
    `shared_qk`: one map for queries and keys; keys have length 1, and a step attends to itself only if it sees nothing
    else (Kitaev et al. 2020). `temperature`: the factor of the scores is trained, starting at E^(-1/2), as in the DLR
    repository. `tied`: the four projections start as copies of one linear map. Without `mask_padding`, steps attend to
    padding. `bias`: whether the linear maps have biases. A subclass may add another bias to the scores.
    """

    distance_bias: Callable[[Int[Tensor, "R M"]], Float[Tensor, "H R M"]] | None = None  # the bias of the scores

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        max_length: int,
        *,
        causal: bool,
        rotary: bool,
        dropout: float = 0.0,
        tied: bool = False,
        mask_padding: bool = True,
        window: int | None = None,
        back: int = 1,
        ahead: int | None = None,
        band: int | tuple[int, int] | None = None,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        pairs: Pairs = "interleaved",
        base: float = 10000.0,
        xpos: float | None = None,
        shared_qk: bool = False,
        temperature: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = n_heads, n_kv_heads or n_heads, d_head or d_model // n_heads
        self.causal, self.dropout, self.mask_padding, self.shared_qk = causal, dropout, mask_padding, shared_qk
        self.window, self.back, self.band = window, back, band
        self.ahead = int(not causal) if ahead is None else ahead
        self.sizes = [self.heads, self.kv_heads] if shared_qk else [self.heads, self.kv_heads, self.kv_heads]
        self.qkv = Linear(d_model, sum(self.sizes) * self.d_head, bias=bias)
        self.out = Linear(self.heads * self.d_head, d_model, bias=bias)
        self.temperature = nn.Parameter(torch.full((1,), self.d_head**-0.5)) if temperature else None
        if tied:
            with torch.no_grad():
                self.qkv.weight.copy_(self.out.weight.repeat(3, 1))
                self.qkv.bias.copy_(self.out.bias.repeat(3))
        self.rotary = Rotary(max_length, self.d_head, base, pairs, xpos) if rotary else None

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        q, k, v = self._project(x)
        dropout = self.dropout if self.training else 0.0
        # Padding is on the right, so a causal query never sees it, and a mask would only cost time, unless the backend
        # skips what is masked. A row without any valid step (our batches have none) gives zeros.
        bias = self.score_bias(q)
        skipped = bias is None and skips_padding(q, dropout)
        mask = context.padded and self.mask_padding and (not self.causal or skipped)
        options: dict[str, Any] = {
            "bias": bias,
            "causal": self.causal,
            "valid": context.valid if mask else None,
            "dropout": dropout,
        }
        if self.temperature is not None:
            options["scale"] = 1.0
        if self.window is None:
            y = attend(q, k, v, **options)
        else:
            y = local_attend(q, k, v, self.window, back=self.back, ahead=self.ahead, band=self.band, **options)
        return self.out(y.transpose(1, 2).flatten(2))

    def score_bias(self, q: Float[Tensor, "B H L E"]) -> Float[Tensor, "#H w K"] | None:
        """What is added to the scores, in the form that `attend` or, with a window, `local_attend` takes."""
        if not self.shared_qk:
            return None
        return self_mask(q, q.shape[2]) if self.window is None else self_mask(q, self.window, self.back, self.ahead)

    def _project(self, x: Float[Tensor, "B L D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, L, E), times the temperature; keys and values (B, G, L, E)."""
        q, *keys, v = self.qkv(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2).split(self.sizes, dim=1)
        k = F.normalize(q, dim=-1) if self.shared_qk else keys[0]
        if self.rotary is not None:
            q, k = self.rotary(q, k)
        return q if self.temperature is None else q * self.temperature, k, v

    def attention_weights(self, x: Float[Tensor, "B L D"], context: Context) -> Iterator[AttentionWeights]:
        q, k, _ = self._project(x)
        return weights(
            q,
            k,
            w=self.window,
            back=self.back,
            ahead=self.ahead,
            causal=self.causal,
            band=None if self.window is None else self.band,
            scale=None if self.temperature is None else 1.0,
            valid=context.valid if context.padded and self.mask_padding else None,
            mask_self=self.shared_qk,
            bias=self.distance_bias,
        )

    def flops(self, length: int) -> Counts:
        """Projections, q k^T and the weighted sum of v, over whole neighbouring chunks. Causal attention counts in
        full, as is usual."""
        maps = linear_flops(self.qkv, length) + linear_flops(self.out, length)
        width = self.heads * self.d_head
        return maps + attention(self.pairs(length), width, width)

    def pairs(self, length: int) -> int:
        """Number of query-key pairs in one head."""
        if self.window is None:
            return length**2
        w, pairs = self.window, 0
        for start in range(0, length, w):
            keys = min(length, start + (1 + self.ahead) * w) - max(0, start - self.back * w)
            pairs += min(w, length - start) * keys
        return pairs
