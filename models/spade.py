"""SPADE: local attention, and in the first block an S4 state space that sees the whole sequence.

Zuo et al. 2022, "Efficient long sequence modeling via state space augmented Transformer". In the first block, the
sub-layer before the feed-forward layer maps its input x to one of

    concat    W [norm(s4(x)), norm(local(x))] + b        weighted  w norm(s4(x)) + (1 - w) norm(local(x))
    stack     local(s4(x))

and in all other blocks to local(x). S4 is only the state space: its convolution and D x, without GELU or output map. A
step attends to steps less than w away, with the relative position biases of T5 (Raffel et al. 2020) and no other
positions. The published code has only the causal language model.

Letters: B sequences, L steps, D width, H heads, N state size, w length of a block of local attention (`window`, the
published radius plus one), K keys that a block sees: 3 w, or 2 w if causal.
"""

import math
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.attention import Attention
from spt.models.base import Backbone, Context, Counts, Mixer, ParamGroup, linear_flops
from spt.models.longconv import ConjugatePairKernel, LongConvolution
from spt.models.ops import dplr
from spt.models.ops.discretise import log_uniform, parameter_for
from spt.models.ops.product import Linear
from spt.models.options import FeedForwardKind, S4Config

BUCKETS, MAX_DISTANCE = 32, 128  # of relative positions, as in T5 and in SPADE's published code

PAPER = "Zuo et al. 2022"
COST = "L D (N + log L + c + D)"
PARAMETERS = 841_664


class Config(S4Config):
    n_heads: int = Field(4, ge=1, description="number of attention heads; must divide d_model")
    window: int = Field(128, ge=1, description="a step attends to steps less than this far away; 512 in the paper")
    combine: Literal["concat", "weighted", "stack"] = Field(
        "concat",
        description="state space and local attention in the first block: concat (both normalised, then one linear "
        "map), weighted (weighted mean of both, normalised), stack (attention on the output of the state space)",
    )
    ssm_weight: float = Field(
        0.5, ge=0, le=1, description="with combine: weighted, weight of the state space in the mean"
    )
    freeze_ssm: bool = Field(
        False, description="keep dt, A, P and B at their initial values; C and D are trained, as in the published code"
    )
    attention_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate on the attention weights, in training only"
    )
    feed_forward: FeedForwardKind = Field(
        "mlp", description="last sub-layer of every block: none, mlp, or switch (a mixture of mlps)"
    )

    def own_reach(self) -> int | None:
        own = super().own_reach()
        return None if own is None else max(own, self.window - 1)

    def seen(self) -> int | None:
        """Stacked, the first block has two parts that look across steps."""
        return None if self.reach is None else (self.n_layers + (self.combine == "stack")) * self.reach

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if self.combine != "weighted":
            self.refuse_changed(("ssm_weight",), f"with combine: {self.combine}; it belongs to weighted")
        return self


class S4Kernel(ConjugatePairKernel):
    """The kernel of S4, a DPLR state space that starts as HiPPO-LegS (Gu, Goel, Ré 2022; s4.py), in S4's parameters:
    inv_dt (H, 1); A_real, A_imag (S, M); P, B (S, M, 2); C (K, H, M, 2)."""

    recurrent = continuous = False  # the attention behind it has no such form

    def __init__(self, config: Config) -> None:
        H, K = config.d_model, 1 if config.causal else 2
        inv_dt = parameter_for(log_uniform(config.dt_min, config.dt_max, H, 1), config.dt_transform)
        super().__init__(config, inv_dt=inv_dt, **dplr.legs_parameters(config.d_state, H, K, config.n_ssm))
        self.dt_transform = config.dt_transform
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name == "C" or not config.freeze_ssm

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        state_space = dplr.state_space(dict(self.named_parameters()), self.dt_transform)
        return dplr.dplr_kernel(state_space, min(length, self.limit or length), self.C.dtype)

    def flops(self, length: int) -> Counts:
        K, H, M, _ = self.C.shape
        return dplr.dplr_flops(K, H, M, min(length, self.limit or length))


def buckets(distance: Int[Tensor, "*n"], causal: bool) -> Int[Tensor, "*n"]:
    """T5's bucket of a key that comes `distance` steps after its query (negative: before it).

    If two-sided, half of the buckets are for keys after the query. Of the 32 (or 16) buckets of one side, half hold one
    distance each, the others ranges of distances that grow geometrically; the last one holds all from 128 on.
    """
    count = BUCKETS if causal else BUCKETS // 2
    away = (-distance).clamp_min(0) if causal else distance.abs()
    exact = count // 2
    fraction = torch.log2(away.clamp_min(1).double() / exact) / math.log2(MAX_DISTANCE / exact)  # 1 at MAX_DISTANCE
    logarithmic = (exact + (fraction * (count - exact)).long()).clamp_max(count - 1)
    bucket = torch.where(away < exact, away, logarithmic)
    return bucket if causal else bucket + count * (distance > 0)


class RelativeBias(nn.Module):
    """T5's bias of attention scores: one number per head and bucket, from N(0, 1). Called without arguments, it gives
    the biases of a block of w queries and its K keys."""

    param_groups: Mapping[str, ParamGroup] = {"weight": ParamGroup()}  # no weight decay
    bucket: Tensor  # of the distances from -(2w - 1) on

    def __init__(self, n_heads: int, window: int, causal: bool) -> None:
        super().__init__()
        self.window, self.keys = window, (2 if causal else 3) * window
        self.weight = nn.Parameter(torch.randn(n_heads, BUCKETS))
        distance = torch.arange(self.keys + window - 1) - (2 * window - 1)
        self.register_buffer("bucket", buckets(distance, causal), persistent=False)

    def forward(self) -> Float[Tensor, "H w K"]:
        # Row r begins at distance -w - r: the rows are windows of the list of distances, last row first.
        return self.weight[:, self.bucket].unfold(1, self.keys, 1).flip(1)

    def by_distance(self, distance: Int[Tensor, "R M"]) -> Float[Tensor, "H R M"]:
        """The biases at the given distances; distances beyond the window get arbitrary ones."""
        index = (distance + 2 * self.window - 1).clamp(0, len(self.bucket) - 1)
        return self.weight[:, self.bucket[index]]


class LocalAttention(Attention):
    """Softmax attention to the steps less than w away, in blocks of w; its linear maps have no biases.

    All layers use the same relative position biases, which are registered in the first one (`owns`).
    """

    def __init__(self, config: Config, positions: RelativeBias, owns: bool) -> None:
        super().__init__(
            config.d_model,
            config.n_heads,
            config.window,
            causal=config.causal,
            rotary=False,
            dropout=config.attention_dropout,
            window=config.window,
            band=min(config.window - 1, config.reach or config.window),
            bias=False,
        )
        nn.init.xavier_uniform_(self.qkv.weight)  # of the stacked map: 1/sqrt(2) times that of each map, as published
        nn.init.xavier_uniform_(self.out.weight)
        self.positions = positions if owns else None
        self.distance_bias = positions.by_distance
        self._shared = (positions,)  # hidden from torch by the tuple, so that it is registered once; deepcopy works

    def score_bias(self, q: Float[Tensor, "B H L E"]) -> Float[Tensor, "H w K"]:
        return self._shared[0]()


class Augmented(Mixer):
    """S4 and local attention combined, in the first block."""

    state_space = ("ssm.kernel.",)

    def __init__(self, config: Config, local: LocalAttention) -> None:
        super().__init__()
        self.combine, self.ssm_weight = config.combine, config.ssm_weight
        self.ssm = LongConvolution(config, S4Kernel(config), output="identity")
        self.local = local
        if config.combine != "stack":
            self.ssm_norm, self.local_norm = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        if config.combine == "concat":
            self.map = Linear(2 * config.d_model, config.d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        ssm = self.ssm(x, context)
        if self.combine == "stack":
            return self.local(ssm, context)
        ssm, local = self.ssm_norm(ssm), self.local_norm(self.local(x, context))
        if self.combine == "weighted":
            return self.ssm_weight * ssm + (1 - self.ssm_weight) * local
        return self.map(torch.cat([ssm, local], dim=-1))

    def flops(self, length: int) -> Counts:
        combined = linear_flops(self.map, length) if self.combine == "concat" else Counts()
        return self.ssm.flops(length) + self.local.flops(length) + combined

    def shared_flops(self, length: int) -> Counts:
        return self.ssm.shared_flops(length)


def build(config: Config) -> Backbone:
    assert config.max_length is not None, "filled in from the task"
    window = min(config.window, config.max_length)  # a longer one would see nothing more
    config = config.model_copy(update={"window": window})
    positions = RelativeBias(config.n_heads, window, config.causal)
    is_first = chain([True], repeat(False))

    def block() -> list[Mixer]:
        if next(is_first):
            return [Augmented(config, LocalAttention(config, positions, owns=True))]
        return [LocalAttention(config, positions, owns=False)]

    return Backbone(config, block)
