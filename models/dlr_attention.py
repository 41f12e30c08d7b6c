"""The DLR paper's attention layer: softmax attention in place of a linear recurrence, full or in chunks.

The baseline of Gupta, Mehta, Berant 2022, "Simplifying and understanding state space models with diagonal linear RNNs".
Their layer has attention in place of the convolution and its own input u in place of D u:

    y = W (u + drop(gelu(attention(u)))) + b, or the glu of an output twice as wide

The attention has rotary positions and a trained temperature that starts at E^(-1/2). With a `window`, each chunk of
that many steps sees itself and both neighbours, or only the one before it if causal. In the paper's Table 6, two
feed-forward layers follow the attention within the layer: a <- a + W2 gelu(W1 norm(a)).

Letters: B sequences, L steps, D width, E width of a head, c steps of a chunk (`window`; L without one).
"""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.attention import Attention, chunk_within
from spt.models.base import Backbone, Context, Counts, Mixer, linear_flops
from spt.models.ops.dropout import Dropout
from spt.models.ops.product import Linear
from spt.models.options import LocalConfig

PAPER = "Gupta, Mehta, Berant 2022"
COST = "L D (c + D)"
PARAMETERS = 331_524


class Config(LocalConfig):
    n_heads: int = Field(4, ge=1, description="number of attention heads; must divide d_model")
    window: int | None = Field(
        None,
        ge=1,
        description="steps per chunk, which attends to itself and its neighbours; 1024 in the paper's longer tasks",
    )
    extra_feed_forward: int = Field(
        0,
        ge=0,
        description="inner width, as a multiple of d_model, of two more feed-forward layers after the attention; 16 in "
        "the paper's Table 6",
    )
    output: Literal["linear", "glu"] = Field("linear", description="output map; glu in the paper's Table 3")

    def own_reach(self) -> int | None:
        return None if self.window is None else 2 * self.window - 1

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if (self.d_model // self.n_heads) % 2:
            raise ValueError(
                f"rotary positions rotate pairs, but a head is {self.d_model // self.n_heads} wide (d_model / n_heads)"
            )
        return self


class DLRAttention(Mixer):
    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        D, inner = config.d_model, config.extra_feed_forward * config.d_model
        self.attention = Attention(
            D,
            config.n_heads,
            config.max_length,
            causal=config.causal,
            rotary=True,
            window=config.window or chunk_within(config.reach),
            band=config.reach,
            temperature=True,
        )
        self.extra = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), Linear(D, inner), nn.GELU(), Linear(inner, D))
            for _ in range(2 if inner else 0)
        )
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.gated = config.output == "glu"
        self.map = Linear(D, 2 * D if self.gated else D)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        y = self.attention(x, context)
        for feed_forward in self.extra:
            y = y + feed_forward(y)
        y = self.map(x + self.dropout(F.gelu(y)))
        return F.glu(y, dim=-1) if self.gated else y

    def flops(self, length: int) -> Counts:
        maps = [self.map, *(layer for layer in self.extra.modules() if isinstance(layer, nn.Linear))]
        return sum((linear_flops(linear, length) for linear in maps), self.attention.flops(length))


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [DLRAttention(config)], decay_all=True)
