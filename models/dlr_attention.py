"""The DLR paper's attention layer: softmax attention in the place of a linear recurrence, full or among chunks.

Gupta, Mehta, Berant 2022, "Simplifying and understanding state space models with diagonal linear RNNs", compare with
it. A layer is theirs, with attention for the convolution and the layer's own input for D u:

    y = W (u + drop(gelu(attention(u)))) + b, or glu of twice as many numbers

The attention has rotary positions and a trained temperature, which starts at E^(-1/2). With a `window`, chunks of so
many steps see themselves and both neighbours, or only the one before if causal. For the paper's Table 6 two
feed-forward layers stand behind the attention, within the layer: a <- a + W2 gelu(W1 norm(a)).

Letters: B sequences, L steps, D width, E width of a head, c steps of a chunk (`window`; L without one).
"""

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.attention import Attention
from spt.models.base import Backbone, BackboneConfig, Context, Counts, Mixer, Published, linear_flops
from spt.models.ops.dropout import Dropout

PAPER = "Gupta, Mehta, Berant 2022"
COST = "L D (c + D)"
PARAMETERS = 331_524


class Config(BackboneConfig):
    n_heads: int = Field(4, ge=1, description="attention heads; divides d_model")
    window: int | None = Field(
        None,
        ge=1,
        description="steps of a chunk, which sees itself and its neighbours; 1024 in the paper's longer tasks",
    )
    extra_feed_forward: int = Field(
        0,
        ge=0,
        description="inner width, in d_model, of two more feed-forward layers behind the attention; 16 in Table 6",
    )
    output: Literal["linear", "glu"] = Field(
        "linear", description="the last map; glu in the tasks of the paper's Table 3"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if (self.d_model // self.n_heads) % 2:
            raise ValueError(
                f"rotary positions turn pairs, but a head is {self.d_model // self.n_heads} wide (d_model / n_heads)"
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
            window=config.window,
            temperature=True,
        )
        self.extra = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, inner), nn.GELU(), nn.Linear(inner, D))
            for _ in range(2 if inner else 0)
        )
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.gated = config.output == "glu"
        self.map = nn.Linear(D, 2 * D if self.gated else D)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        y = self.attention(x, context)
        for feed_forward in self.extra:
            y = y + feed_forward(y)
        y = self.map(x + self.dropout(F.gelu(y)))
        return F.glu(y, dim=-1) if self.gated else y

    def flops(self, length: int) -> Counts:
        maps = [self.map, *(layer for layer in self.extra.modules() if isinstance(layer, nn.Linear))]
        return sum((linear_flops(linear, length) for linear in maps), self.attention.flops(length))

    def import_reference(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our parameters from those of the DLR repository's `DSS` layer with kernel_type attn: `attn.Q.weight`,
        `attn.scale`, `output_linear.weight` and so on."""
        given = Published(raw)
        own = {name.removeprefix("attn."): tensor for name, tensor in raw.items() if name.startswith("attn.")}
        found = {f"attention.{name}": tensor for name, tensor in self.attention.import_reference(own).items()}
        for ours, theirs in self._published().items():
            found[ours] = given[theirs].reshape(self.get_parameter(ours).shape)
        return found

    def export_reference(self) -> dict[str, Tensor]:
        """The other way; the output map's bias has two axes there."""
        found = {f"attn.{name}": tensor for name, tensor in self.attention.export_reference().items()}
        found |= {theirs: self.get_parameter(ours) for ours, theirs in self._published().items()}
        bias = self._published()["map.bias"]
        return {**found, bias: found[bias][:, None]}

    def _published(self) -> dict[str, str]:
        """Our names but for the attention's, and theirs."""
        output = "output_linear.0" if self.gated else "output_linear"
        names = {f"map.{part}": f"{output}.{part}" for part in ("weight", "bias")}
        for name, _ in self.extra.named_parameters():
            index, _, rest = name.partition(".")
            names[f"extra.{name}"] = f"attn.{('ff', 'ff2')[int(index)]}.{rest}"
        return names


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [DLRAttention(config)], decay_all=True)
