"""Transformer: softmax attention and a feed-forward layer per block, pre-norm, rotary or absolute positions.

Vaswani et al. 2017 with rotary positions (Su et al. 2021), as in section 3 and appendix C of the SPT paper (Amos,
Berant, Gupta 2024): bias on every projection, exact GELU, LayerNorm before every sub-layer and after the last.
Positions can be combined: `[rotary, learned]`. `window` makes attention local, as in the SPT paper's runs on 16,000
or more steps, where steps attend to their own window and its neighbours. A block of two sub-layers:

    z_t = x_t + W_o sum_s a_ts v_s,   a_ts = exp(q_t · k_s / sqrt(d)) / sum_r exp(q_t · k_r / sqrt(d))   in each head
    y_t = z_t + W_2 gelu(W_1 norm(z_t))

q, k and v are maps of norm(x), and rotary positions turn q_t and k_t by angles that are proportional to t. Letters: L
steps, D width, d width of a head; with a window w, L² D becomes L w D.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

from pydantic import Field, field_validator, model_validator

from spt.models.attention import Attention, Pairs, Position, Positions, chunk_within
from spt.models.base import Backbone, Mixer, Unsupported
from spt.models.options import FeedForwardKind, LocalConfig

# Options that `Attention` calls by the same name.
SAME_NAMES = {"causal", "mask_padding", "n_kv_heads", "d_head", "xpos", "shared_qk", "temperature"}

PAPER = "Vaswani et al. 2017"
COST = "L² D + L D²"
PARAMETERS = 793_344


class Config(LocalConfig):
    inner_widths: ClassVar[tuple[str, ...]] = ("d_ff", "d_head")

    n_heads: int = Field(4, ge=1, description="number of attention heads; must divide d_model unless d_head is given")
    d_head: int | None = Field(None, ge=1, description="width of a head; default: d_model / n_heads")
    n_kv_heads: int | None = Field(
        None, ge=1, description="number of key and value heads, each shared by a group of query heads; default: n_heads"
    )
    feed_forward: FeedForwardKind = Field(
        "mlp", description="last sub-layer of every block: none, mlp, or switch (a mixture of mlps)"
    )
    window: int | None = Field(
        None,
        ge=1,
        description="local attention: a step sees its own window of this many steps and neighbouring windows",
    )
    look_back: int = Field(1, ge=0, description="with window: number of windows seen before a step's own")
    look_ahead: int | None = Field(
        None, ge=0, description="with window: number of windows seen after a step's own; default: 1, or 0 if causal"
    )
    exact_window: bool = Field(
        False,
        description="with window: every step sees exactly look_back window lengths back and look_ahead window lengths "
        "ahead, wherever it lies in its window",
    )
    positions: tuple[Position, ...] = Field(("rotary",), description="any of rotary, learned, sinusoidal; [] for none")
    position_std: float = Field(0.02, gt=0, description="initial standard deviation of learned positions")
    rotary_pairs: Pairs = Field(
        "interleaved",
        description="features of a head that are rotated together: neighbours (interleaved) or one from each half",
    )
    rotary_base: float = Field(10000.0, gt=1, description="the slowest pair rotates by about 1 / rotary_base per step")
    xpos: float | None = Field(
        None,
        gt=0,
        description="rotary positions whose scores also shrink with distance (xPos), with this base: 512 in the xPos "
        "paper, half a window in the SPT repository",
    )
    shared_qk: bool = Field(
        False,
        description="one map for queries and keys; keys have length 1, and a step attends to itself only if it sees "
        "nothing else (memory grows with the square of the length, or of the window)",
    )
    temperature: bool = Field(
        False, description="train the scaling factor of the scores, one per layer, as in the DLR repository"
    )
    attention_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate on the attention weights, in training only"
    )
    mask_padding: bool = Field(
        True,
        description="false: steps attend to padding, as in the published code, so that an output depends on the "
        "longest sequence of its batch (a causal model never sees padding)",
    )
    tied_projections: bool = Field(
        False,
        description="the query, key, value and output maps of a layer start as copies of one map, as in the published "
        "code; they are not tied in training",
    )

    def sides(self) -> tuple[int, int]:
        """Windows before and after a step's own."""
        return self.look_back, int(not self.causal) if self.look_ahead is None else self.look_ahead

    def own_reach(self) -> int | None:
        if self.window is None:
            return None
        return max(self.sides()) * self.window if self.exact_window else (max(self.sides()) + 1) * self.window - 1

    @field_validator("positions", mode="before", json_schema_input_type=Position | tuple[Position, ...])
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        width, rotary = self.d_head or self.d_model // self.n_heads, "rotary" in self.positions
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if rotary and width % 2:
            raise ValueError(
                f"rotary positions rotate pairs, but a head is {width} wide (d_model / n_heads, or d_head)"
            )
        if len(set(self.positions)) < len(self.positions):
            raise ValueError(f"positions names one kind twice; choose among {', '.join(get_args(Position))}")
        if self.window is None:
            self.refuse_changed(("look_back", "look_ahead", "exact_window"), "without a window; add window")
        if self.exact_window and max(self.sides()) == 0:
            raise ValueError(
                "exact_window without a window before or after lets a step see itself alone; raise look_back"
            )
        if "learned" not in self.positions:
            self.refuse_changed(("position_std",), "without learned positions; add learned to positions")
        if not rotary:
            names = ("rotary_pairs", "rotary_base", "xpos")
            self.refuse_changed(names, "without rotary positions; add rotary to positions")
        if self.causal and self.look_ahead:
            raise ValueError(f"a causal model sees no window ahead, but look_ahead is {self.look_ahead}")
        if self.xpos is not None and not self.causal:
            raise ValueError("xpos makes scores shrink with the distance back, so it needs causal: true")
        grouped = self.n_kv_heads not in (None, self.n_heads)
        if self.shared_qk and grouped:
            raise ValueError("shared_qk has one map for queries and keys, so n_kv_heads cannot differ from n_heads")
        if self.tied_projections and (grouped or self.shared_qk or width * self.n_heads != self.d_model):
            raise ValueError(
                "tied_projections copies one map to queries, keys, values and output, which n_kv_heads, d_head and "
                "shared_qk give different shapes; leave them out"
            )
        return self


def build(config: Config) -> Backbone:
    assert config.max_length is not None, "filled in from the task"
    length, absolute = config.max_length, tuple(kind for kind in config.positions if kind != "rotary")
    if config.xpos is not None and length / 2 / config.xpos * math.log(3.5) > 80:
        raise Unsupported(f"xpos {config.xpos:g} exceeds the range of float32 within {length:,} steps; raise it")
    window, (back, ahead) = config.window or chunk_within(config.reach), config.sides()
    band = None
    if window is not None:
        farthest = min(config.reach or length, length)
        if config.exact_window:
            band = (min(back * window, farthest), min(ahead * window, farthest))
        elif config.reach is not None:
            band = (farthest, farthest)
        window = min(window, length)  # a longer one would only cost time
        back, ahead = (min(side, -(-length // window)) for side in (back, ahead))

    def block() -> Sequence[Mixer]:
        attention = Attention(
            config.d_model,
            config.n_heads,
            length,
            rotary="rotary" in config.positions,
            dropout=config.attention_dropout,
            tied=config.tied_projections,
            window=window,
            back=back,
            ahead=ahead,
            band=band,
            pairs=config.rotary_pairs,
            base=config.rotary_base,
            **config.model_dump(include=SAME_NAMES),
        )
        return [attention]

    positions = Positions(config.d_model, length, absolute, config.position_std) if absolute else None
    return Backbone(config, block, positions, mask_padding=config.mask_padding)
