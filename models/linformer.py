"""Linformer: attention to keys and values that are projected along time, from L steps to k (Wang et al. 2020).

    head_i = softmax(X W_i^Q (E' X W_i^K)^T / sqrt(D / H)) F' X W_i^V   (section 4, eq. 7)

where E' = E[:, :L] and F' = F[:, :L] for E and F of shape (k, M); the output map and a feed-forward layer follow. As in
the authors' code, all heads of a layer share E and F, X is projected before it is mapped, and maps have biases. Each
position has its own weights in E and F, so sequences are limited to `max_length` steps. Two-sided by nature: each of
the k summaries reads all steps. Letters: B sequences, L steps, M longest sequence, D width, H heads, k projected steps.
"""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spt.models.base import Backbone, Context, Counts, Mixer, Unsupported, linear_flops
from spt.models.linear_attention import AbsolutePosition, KernelAttentionConfig, make_positions
from spt.models.ops import counts
from spt.models.ops.attention import attend
from spt.models.ops.product import Linear, linear

PAPER = "Wang et al. 2020"
COST = "L D (k + D)"
PARAMETERS = 1_972_992


class Config(KernelAttentionConfig):
    projected_length: int = Field(128, ge=1, description="number of steps k that keys and values are projected to")
    sharing: Literal["headwise", "key_value", "layerwise"] = Field(
        "headwise",
        description="projections along time: two per layer, shared by its heads (headwise); one per layer, for keys "
        "and values alike (key_value); one for all layers (layerwise)",
    )
    positions: tuple[AbsolutePosition, ...] = Field(
        ("learned",), description="absolute positions: any of learned, sinusoidal; [] for none"
    )
    attention_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate on the attention weights, in training only"
    )


class Projection(nn.Module):
    """Along time. Parameter: weight (k, M), uniform with variance 1 / (k + M), as in the authors' module (their RoBERTa
    then draws all maps again, from N(0, 0.02²))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        self.weight = nn.Parameter(torch.empty(config.projected_length, config.max_length))
        nn.init.xavier_uniform_(self.weight, gain=0.5**0.5)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B k D"]:
        return linear(x.mT, self.weight[:, : x.shape[1]]).mT


class LinformerAttention(Mixer):
    """Parameters: maps D -> D of queries, keys, values and output, whose weights start as in that module, too, and
    biases at zero; E, and F unless it is shared. A projection that all layers share belongs to the first."""

    def __init__(self, config: Config, E: Projection, F: Projection, *, owner: bool) -> None:
        super().__init__()
        self.heads, self.dropout = config.n_heads, config.attention_dropout
        self.q, self.k, self.v, self.out = (Linear(config.d_model, config.d_model) for _ in range(4))
        for layer in (self.q, self.k, self.v, self.out):
            nn.init.xavier_uniform_(layer.weight, gain=1.0 if layer is self.out else 0.5**0.5)
            nn.init.zeros_(layer.bias)
        if owner:
            self.E = E
            if F is not E:
                self.F = F
        self.projections = (E, F)  # in a tuple, which torch does not search: shared ones are stored once

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        """Padding adds nothing to the k summaries, since it arrives as zeros."""
        E, F = self.projections
        to_keys = E(x)
        to_values = to_keys if F is E else F(x)
        maps = ((self.q, x), (self.k, to_keys), (self.v, to_values))
        q, k, v = (layer(u).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, u in maps)
        y = attend(q, k, v, dropout=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))

    def flops(self, length: int) -> Counts:
        D, k = self.out.in_features, self.projections[0].weight.shape[0]
        maps = linear_flops(self.q, length) + linear_flops(self.out, length)
        maps += linear_flops(self.k, k) + linear_flops(self.v, k)
        return maps + len(set(self.projections)) * counts.linear(D, length, k) + counts.attention(length * k, D, D)


def build(config: Config) -> Backbone:
    if config.causal:
        raise Unsupported(
            "linformer attends to summaries of the whole sequence, so it cannot be causal; use causal: false"
        )
    for_all = Projection(config) if config.sharing == "layerwise" else None
    layers = iter(range(config.n_layers))

    def block() -> list[LinformerAttention]:
        first = next(layers) == 0
        E = for_all or Projection(config)
        F = Projection(config) if config.sharing == "headwise" else E
        return [LinformerAttention(config, E, F, owner=first or for_all is None)]

    return Backbone(config, block, make_positions(config))
