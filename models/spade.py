"""SPADE: local attention, joined in the first block by an S4 state space that sees everything.

Zuo et al. 2022, "Efficient long sequence modeling via state space augmented Transformer". In the first block, with x
what it is handed, the sub-layer before the feed-forward layer is one of

    concat    W [norm(s4(x)), norm(local(x))] + b        weighted  w norm(s4(x)) + (1 - w) norm(local(x))
    stack     local(s4(x))

and in all others local(x). S4 here is the state space alone, its convolution and D x, without GELU or output map. A
step attends to those less than w away; the relative positions of T5 (Raffel et al. 2020) are its only ones. The
published code has the causal language model alone.

Letters: B sequences, L steps, D width, H heads, N state size, w length of a block of local attention (`window`, the
published radius plus one), K the steps it is shown: 3 w, or 2 w if causal.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Context, Counts, Mixer, Rate, Seen, linear_flops
from spt.models.feedforward import FeedForwardKind
from spt.models.longconv import LongConvolution
from spt.models.ops.attention import local_attend, weights
from spt.models.ops.counts import attention
from spt.models.s4kernel import S4Kernel, S4Options

BUCKETS, FURTHEST = 32, 128  # of relative positions, as in T5 and in SPADE's published code
FROZEN = ("inv_dt", "A_real", "A_imag", "P", "B")

PAPER = "Zuo et al. 2022"
COST = "L D (N + log L + c + D)"
PARAMETERS = 841_664


class Config(S4Options):
    n_heads: int = Field(4, ge=1, description="attention heads; divides d_model")
    window: int = Field(128, ge=1, description="steps less than this far away are attended to; 512 in the paper's runs")
    combine: Literal["concat", "weighted", "stack"] = Field(
        "concat",
        description="the first block's state space and its local attention: concat (both normalised, through one "
        "linear map), weighted (a weighted mean of both, normalised), stack (attention to the state space's output)",
    )
    ssm_weight: float = Field(0.5, ge=0, le=1, description="combine: weighted: the state space's part in the mean")
    freeze_ssm: bool = Field(
        False,
        description="dt, A, P and B stay what they were at the start; C and D are trained, as in the published code",
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="on the attention weights, in training only")
    feed_forward: FeedForwardKind = Field(
        "mlp", description="none, mlp, or switch: each step through one of several mlps"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if self.combine != "weighted" and self.ssm_weight != 0.5:
            raise ValueError(f"ssm_weight has no effect with combine: {self.combine}; it belongs to weighted")
        return self


def buckets(distance: Int[Tensor, "*n"], causal: bool) -> Int[Tensor, "*n"]:
    """Of T5's table, for a key that comes `distance` steps after its query (negative: before it).

    Two-sided, half of the buckets are for keys that come later. Of the 32 (or 16) of one side, half hold one distance
    each, the others distances up to 128 in ranges that grow geometrically; what is further away is in the last one.
    """
    count = BUCKETS if causal else BUCKETS // 2
    away = (-distance).clamp_min(0) if causal else distance.abs()
    single = count // 2
    reach = torch.log2(away.clamp_min(1).double() / single) / math.log2(FURTHEST / single)  # 1 at the furthest
    shared = (single + (reach * (count - single)).long()).clamp_max(count - 1)
    found = torch.where(away < single, away, shared)
    return found if causal else found + count * (distance > 0)


class RelativeBias(nn.Module):
    """One number a head and bucket, from N(0, 1), as additions to the scores of a block of w queries and its K keys."""

    rates: Mapping[str, Rate] = {"weight": Rate()}  # no weight decay
    bucket: Tensor  # of the distances from -(2w - 1) on

    def __init__(self, n_heads: int, window: int, causal: bool) -> None:
        super().__init__()
        self.window, self.keys = window, (2 if causal else 3) * window
        self.weight = nn.Parameter(torch.randn(n_heads, BUCKETS))
        distance = torch.arange(self.keys + window - 1) - (2 * window - 1)
        self.register_buffer("bucket", buckets(distance, causal), persistent=False)

    def forward(self) -> Float[Tensor, "H w K"]:
        # Row r begins at distance -w - r: the rows are windows on one line of distances, the last one first.
        return self.weight[:, self.bucket].unfold(1, self.keys, 1).flip(1)

    def of(self, away: Int[Tensor, "R M"]) -> Float[Tensor, "H R M"]:
        """The same by the steps from query to key; what is too far away to be looked at gets any number."""
        line = (away + 2 * self.window - 1).clamp(0, len(self.bucket) - 1)
        return self.weight[:, self.bucket[line]]


class LocalAttention(Mixer):
    """Softmax attention to the steps less than w away, by blocks of w; no biases in its maps.

    All layers add the relative positions of the first, which alone `owns` them.
    """

    def __init__(self, config: Config, positions: RelativeBias, owns: bool) -> None:
        super().__init__()
        self.n_heads, self.window, self.causal = config.n_heads, config.window, config.causal
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        nn.init.xavier_uniform_(self.qkv.weight)  # of the stacked map: 1/sqrt(2) times that of each, as published
        nn.init.xavier_uniform_(self.out.weight)
        self.positions = positions if owns else None
        self._shared = (positions,)  # in a tuple torch does not see it: it is registered once, and copied with the rest

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, L, E)
        y = local_attend(
            q,
            k,
            v,
            self.window,
            ahead=0 if self.causal else 1,
            causal=self.causal,
            band=self.window - 1,
            valid=context.valid if context.padded and not self.causal else None,  # padding stands on the right
            bias=self._shared[0](),
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(y.transpose(1, 2).flatten(2))

    def attention_weights(self, x: Float[Tensor, "B L D"], context: Context) -> Iterator[Seen]:
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        found = weights(
            q,
            k,
            w=self.window,
            back=1,
            ahead=0 if self.causal else 1,
            causal=self.causal,
            band=self.window - 1,
            valid=context.valid if context.padded else None,
            bias=self._shared[0].of,
        )
        return (Seen(*one) for one in found)

    def flops(self, length: int) -> Counts:
        """Projections, and scores and sums over all steps that a block is shown, masked or not."""
        w = self.window
        starts = range(0, length, w)
        pairs = sum(
            (min(length, start + w) - start) * (min(length, start + (1 if self.causal else 2) * w) - max(0, start - w))
            for start in starts
        )
        width = self.out.in_features
        return linear_flops(self.qkv, length) + linear_flops(self.out, length) + attention(pairs, width, width)


class Augmented(Mixer):
    """The first block's: S4 and local attention, combined."""

    state_space = ("ssm.kernel.",)

    def __init__(self, config: Config, local: LocalAttention) -> None:
        super().__init__()
        self.combine, self.ssm_weight = config.combine, config.ssm_weight
        self.ssm = LongConvolution(config, S4Kernel(config), output="identity")
        self.local = local
        if config.freeze_ssm:
            for name in FROZEN:
                getattr(self.ssm.kernel, name).requires_grad_(False)
        if config.combine != "stack":
            self.ssm_norm, self.local_norm = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        if config.combine == "concat":
            self.map = nn.Linear(2 * config.d_model, config.d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        far = self.ssm(x, context)
        if self.combine == "stack":
            return self.local(far, context)
        far, near = self.ssm_norm(far), self.local_norm(self.local(x, context))
        if self.combine == "weighted":
            return self.ssm_weight * far + (1 - self.ssm_weight) * near
        return self.map(torch.cat([far, near], dim=-1))

    def flops(self, length: int) -> Counts:
        combined = linear_flops(self.map, length) if self.combine == "concat" else Counts()
        return self.ssm.flops(length) + self.local.flops(length) + combined

    def shared_flops(self, length: int) -> Counts:
        return self.ssm.shared_flops(length)


def build(config: Config) -> Backbone:
    assert config.max_length is not None, "filled in from the task"
    window = min(config.window, config.max_length)  # of a longer one nothing else would be seen
    config = config.model_copy(update={"window": window})
    positions = RelativeBias(config.n_heads, window, config.causal)
    first = chain([True], repeat(False))

    def block() -> list[Mixer]:
        if next(first):
            return [Augmented(config, LocalAttention(config, positions, owns=True))]
        return [LocalAttention(config, positions, owns=False)]

    return Backbone(config, block)
