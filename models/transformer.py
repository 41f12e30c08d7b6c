"""Transformer: softmax attention and a feed-forward layer per block, pre-norm, rotary or absolute positions.

Vaswani et al. 2017 with rotary positions (Su et al. 2021), as in section 3 and appendix C of the SPT paper (Amos,
Berant, Gupta 2024): bias on every projection, exact GELU, LayerNorm before every sub-layer and after the last.
Positions can be combined: `[rotary, learned]`.
"""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import Field, field_validator, model_validator

from spt.models.attention import Attention, Position, Positions
from spt.models.base import Backbone, BackboneConfig, Mixer
from spt.models.feedforward import FeedForwardKind


class Config(BackboneConfig):
    n_heads: int = Field(4, ge=1, description="attention heads; divides d_model")
    feed_forward: FeedForwardKind = Field(
        "mlp", description="none, mlp, or switch: each step through one of several mlps"
    )
    positions: tuple[Position, ...] = Field(("rotary",), description="any of rotary, learned, sinusoidal; [] for none")
    position_std: float = Field(0.02, gt=0, description="standard deviation of learned positions at the start")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="on the attention weights, in training only")
    mask_padding: bool = Field(
        True,
        description="false: padded steps are looked at like any others, as in the published code; an answer then "
        "depends on the longest sequence of its batch (a causal model never meets padding)",
    )
    tied_projections: bool = Field(
        False,
        description="the query, key, value and output maps of a layer start as copies of one, biases too, as in the "
        "published code; they are trained apart",
    )

    @field_validator("positions", mode="before", json_schema_input_type=Position | tuple[Position, ...])
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if "rotary" in self.positions and (self.d_model // self.n_heads) % 2:
            raise ValueError(
                f"rotary positions turn pairs, but a head is {self.d_model // self.n_heads} wide (d_model / n_heads)"
            )
        if len(set(self.positions)) < len(self.positions):
            raise ValueError(f"positions names one kind twice; choose among {', '.join(get_args(Position))}")
        return self


def build(config: Config) -> Backbone:
    assert config.max_length is not None, "filled in from the task"
    length, absolute = config.max_length, tuple(kind for kind in config.positions if kind != "rotary")

    def block() -> Sequence[Mixer]:
        attention = Attention(
            config.d_model,
            config.n_heads,
            length,
            causal=config.causal,
            rotary="rotary" in config.positions,
            dropout=config.attention_dropout,
            tied=config.tied_projections,
            mask_padding=config.mask_padding,
        )
        return [attention]

    positions = Positions(config.d_model, length, absolute, config.position_std) if absolute else None
    return Backbone(config, block, positions, mask_padding=config.mask_padding)
