"""Transformer: softmax attention and a feed-forward layer per block, pre-norm, rotary or absolute positions.

Vaswani et al. 2017 with rotary positions (Su et al. 2021), as in section 3 and appendix C of the SPT paper (Amos,
Berant, Gupta 2024): bias on every projection, exact GELU, LayerNorm before every sub-layer and after the last.
Positions can be combined: `[rotary, learned]`. `window` makes attention local: in the SPT paper's runs on 16,000 steps
and more, steps look at their own window and its neighbours. Letters: L steps, D width; a window stands for L in L² D.
"""

import math
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import Field, field_validator, model_validator

from spt.models.attention import Attention, Pairs, Position, Positions
from spt.models.base import Backbone, BackboneConfig, Mixer, Unsupported
from spt.models.feedforward import FeedForwardKind

PAPER = "Vaswani et al. 2017"
COST = "L² D + L D²"
PARAMETERS = 793_344


class Config(BackboneConfig):
    n_heads: int = Field(4, ge=1, description="attention heads; divides d_model, unless d_head says how wide one is")
    d_head: int | None = Field(None, ge=1, description="width of a head; by default d_model / n_heads")
    n_kv_heads: int | None = Field(
        None, ge=1, description="heads of keys and values, each shared by as many query heads; by default n_heads"
    )
    feed_forward: FeedForwardKind = Field(
        "mlp", description="none, mlp, or switch: each step through one of several mlps"
    )
    window: int | None = Field(
        None, ge=1, description="local attention: a step looks at its own window of so many steps and at neighbours"
    )
    look_back: int = Field(1, ge=0, description="with window: how many windows before its own")
    look_ahead: int | None = Field(
        None, ge=0, description="with window: how many windows after its own; by default 1, and 0 when causal"
    )
    exact_window: bool = Field(
        False,
        description="with window: a step looks back exactly look_back windows' steps and as many ahead as look_ahead "
        "says, wherever in its window it stands",
    )
    positions: tuple[Position, ...] = Field(("rotary",), description="any of rotary, learned, sinusoidal; [] for none")
    position_std: float = Field(0.02, gt=0, description="standard deviation of learned positions at the start")
    rotary_pairs: Pairs = Field(
        "interleaved", description="which features of a head turn together: neighbours, or one of each half"
    )
    rotary_base: float = Field(10000.0, gt=1, description="the slowest pair turns by about 1 / rotary_base a step")
    xpos: float | None = Field(
        None,
        gt=0,
        description="rotary positions whose scores besides shrink with the steps back (xPos); the number is its base, "
        "512 in its paper, half a window in the SPT repository",
    )
    shared_qk: bool = Field(
        False,
        description="one map for queries and keys; keys have length 1, and a step does not look at itself unless it is "
        "all there is (takes memory that grows with the square of the length, or of the window)",
    )
    temperature: bool = Field(
        False, description="the factor of the scores is trained, one a layer, as in the DLR repository"
    )
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
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        width, rotary = self.d_head or self.d_model // self.n_heads, "rotary" in self.positions
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if rotary and width % 2:
            raise ValueError(f"rotary positions turn pairs, but a head is {width} wide (d_model / n_heads, or d_head)")
        if len(set(self.positions)) < len(self.positions):
            raise ValueError(f"positions names one kind twice; choose among {', '.join(get_args(Position))}")
        if self.window is None:
            self._without("a window; add window", "look_back", "look_ahead", "exact_window")
        if "learned" not in self.positions:
            self._without("learned positions; add learned to positions", "position_std")
        if not rotary:
            self._without("rotary positions; add rotary to positions", "rotary_pairs", "rotary_base", "xpos")
        if self.causal and self.look_ahead:
            raise ValueError(f"a causal model looks at no window ahead, but look_ahead is {self.look_ahead}")
        if self.xpos is not None and not self.causal:
            raise ValueError("xpos makes scores shrink with the steps back, so it needs causal: true")
        fewer = self.n_kv_heads not in (None, self.n_heads)
        if self.shared_qk and fewer:
            raise ValueError("shared_qk has one map for queries and keys, so n_kv_heads cannot differ from n_heads")
        if self.tied_projections and (fewer or self.shared_qk or width * self.n_heads != self.d_model):
            raise ValueError(
                "tied_projections copies one map to queries, keys, values and output, which n_kv_heads, d_head and "
                "shared_qk make unlike; leave them out"
            )
        return self

    def _without(self, what: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect without {what}")


def build(config: Config) -> Backbone:
    assert config.max_length is not None, "filled in from the task"
    length, absolute = config.max_length, tuple(kind for kind in config.positions if kind != "rotary")
    if config.xpos is not None and length / 2 / config.xpos * math.log(3.5) > 80:
        raise Unsupported(f"xpos {config.xpos:g} leaves float32's range within {length:,} steps; raise it")
    window, back = config.window, config.look_back
    ahead = int(not config.causal) if config.look_ahead is None else config.look_ahead
    band = None
    if window is not None:
        if config.exact_window:
            band = (min(back * window, length), min(ahead * window, length))
        window = min(window, length)  # what lies beyond the longest sequence only costs
        back, ahead = (min(side, -(-length // window)) for side in (back, ahead))

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
            window=window,
            back=back,
            ahead=ahead,
            band=band,
            n_kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            pairs=config.rotary_pairs,
            base=config.rotary_base,
            xpos=config.xpos,
            shared_qk=config.shared_qk,
            temperature=config.temperature,
        )
        return [attention]

    positions = Positions(config.d_model, length, absolute, config.position_std) if absolute else None
    return Backbone(config, block, positions, mask_padding=config.mask_padding)
