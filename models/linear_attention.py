"""Layers that are linear attention: heads of queries, keys and values, and a state of one matrix for each head.

`KernelAttention` is attention whose weights are a product of features, phi(q_t) phi(k_s), divided by their sum; in both
directions at once where it is two-sided. `GatedHeads` has no such sum: what it reads is normalised and gated.

Letters: B sequences, L steps, D width, H heads, N width of keys and M of features, P width of values.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from spt.models.attention import Positions
from spt.models.mixer import Context, Mixer, linear_flops
from spt.models.ops.counts import Counts
from spt.models.ops.linear_attention import (
    linear_attention,
    linear_attention_flops,
    linear_attention_step,
    two_sided_attention,
    two_sided_attention_flops,
)
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.options import BackboneConfig, FeedForwardKind

AbsolutePosition = Literal["learned", "sinusoidal"]
INITIAL_GAIN = 2**-2.5  # of Xavier's maps into the heads, in the code of RetNet and of GLA


class HeadsConfig(BackboneConfig):
    """Options of heads that divide the width."""

    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    n_heads: int = Field(4, ge=1, description="number of heads; must divide d_model")

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "HeadsConfig":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        return self


# ---------------------------------------------------------------------------------------------- weights that are normed


class KernelAttentionConfig(HeadsConfig):
    """Options of attention whose positions are added to the stream."""

    positions: tuple[AbsolutePosition, ...] = Field(
        ("sinusoidal",), description="absolute positions: any of learned, sinusoidal; [] for none"
    )
    position_std: float = Field(0.02, gt=0, description="initial standard deviation of learned positions")

    @field_validator("positions", mode="before", json_schema_input_type=AbsolutePosition | tuple[AbsolutePosition, ...])
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _positions_fit(self) -> "KernelAttentionConfig":
        if len(set(self.positions)) < len(self.positions):
            raise ValueError("positions names one kind twice; choose among learned, sinusoidal")
        if "learned" not in self.positions:
            self.refuse_changed(("position_std",), "without learned positions; add learned to positions")
        return self


def make_positions(config: KernelAttentionConfig) -> Positions | None:
    assert config.max_length is not None, "filled in from the task"
    if not config.positions:
        return None
    return Positions(config.d_model, config.max_length, config.positions, config.position_std)


class Features(NamedTuple):
    """The features of queries and keys. In a causal Performer, the keys of step t are scaled by exp(-c_t); where c
    grows, log_decay = c_{t-1} - c_t brings the sums so far to the new scale, and log_scale is the last c."""

    queries: Float[Tensor, "B L H M"]
    keys: Float[Tensor, "B L H M"]
    log_decay: Float[Tensor, "B L H"] | None = None
    log_scale: Float[Tensor, "B H"] | None = None


class KernelAttention(Mixer):
    """y_t = W_o sum_s phi(q_t) phi(k_s) v_s / (eps + sum_s phi(q_t) phi(k_s)); a subclass defines phi.

    If two-sided, s runs over all steps; if causal, over those up to t. Parameters: the map D -> 3 D, the map D -> D of
    the output.
    """

    uncompiled = ("attend",)
    eps: ClassVar[float]

    def __init__(self, config: HeadsConfig, features: int, bias: bool) -> None:
        super().__init__()
        D = config.d_model
        self.causal = self.recurrent = config.causal
        self.heads, self.n_features = config.n_heads, features
        self.qkv, self.out = Linear(D, 3 * D, bias=bias), Linear(D, D, bias=bias)

    def features(
        self,
        q: Float[Tensor, "B L H N"],
        k: Float[Tensor, "B L H N"],
        valid: Bool[Tensor, "B L"] | None,
        log_scale: Float[Tensor, "B H"] | None = None,
    ) -> Features:
        """`log_scale` is that of the keys before the first step, if any."""
        raise NotImplementedError(f"{type(self).__name__} has no features")

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        q, k, v = self._project(x)
        valid = context.valid if context.padded else None
        return self._read(self.attend(self.features(q, k, valid), v, valid))

    def attend(
        self, features: Features, v: Float[Tensor, "B L H P"], valid: Bool[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B L H P"]:
        """The sums of weighted values and, as the last, of weights."""
        if self.causal:
            return linear_attention(features.queries, features.keys, v, features.log_decay)
        return two_sided_attention(features.queries, features.keys, v, valid)

    def _project(self, x: Float[Tensor, "B L D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, and values with a one behind, in single precision."""
        q, k, v = at_least_float32(self.qkv(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return q, k, F.pad(v, (0, 1), value=1.0)

    def _read(self, sums: Float[Tensor, "B *L H P"]) -> Float[Tensor, "B *L D"]:
        return self.out((sums[..., :-1] / (sums[..., -1:] + self.eps)).flatten(-2))

    def flops(self, length: int) -> Counts:
        sizes = length, self.heads, self.n_features, self.out.in_features // self.heads + 1
        products = linear_attention_flops(*sizes) if self.causal else two_sided_attention_flops(*sizes)
        return linear_flops(self.qkv, length) + linear_flops(self.out, length) + products

    def initial_state(self, batch: int) -> Any:
        return None, None

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        sums, log_scale = state
        q, k, v = self._project(x[:, None])
        features = self.features(q, k, None, log_scale)
        log_decay = None if features.log_decay is None else features.log_decay[:, 0]
        o, sums = linear_attention_step(features.queries[:, 0], features.keys[:, 0], v[:, 0], log_decay, sums)
        return self._read(o), (sums, features.log_scale)


# --------------------------------------------------------------------------------------- outputs that are normed, gated


class Heads(NamedTuple):
    """For every step: queries, keys, values, and the log decays of the state before it."""

    q: Float[Tensor, "B L H N"]
    k: Float[Tensor, "B L H N"]
    v: Float[Tensor, "B L H P"]
    log_decay: Float[Tensor, "..."]


class GatedHeads(Mixer):
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(N), y_t = W_o (silu(W_g x_t + b_g) norm(o_t)).

    norm divides each head by its root mean square; if two-sided, both directions' normalised outputs are added before
    the gate. A subclass defines the decay. Parameters: for each direction one map D -> H (2 N + P) without bias, so
    that nothing enters on padding, which backwards comes first; the gate's map D -> H P; the output's H P -> D.
    """

    uncompiled = ("mix_states",)

    def __init__(self, config: HeadsConfig, N: int, P: int, *, gate_bias: bool, eps: float) -> None:
        super().__init__()
        D, H = config.d_model, config.n_heads
        self.recurrent = config.causal
        self.heads, self.N, self.P, self.eps = H, N, P, eps
        enter = [Linear(D, H * (2 * N + P), bias=False) for _ in range(1 if config.causal else 2)]
        self.enter = nn.ModuleList(enter)
        self.gate, self.leave = Linear(D, H * P, bias=gate_bias), Linear(H * P, D, bias=False)
        widths = [H * N, H * N, H * P]
        start_as_xavier([part for layer in enter for part in layer.weight.split(widths)] + [self.gate.weight])

    def log_decay(self, x: Float[Tensor, "B L D"], direction: int) -> Float[Tensor, "..."]:
        raise NotImplementedError(f"{type(self).__name__} has no decay")

    def place(self, q: Float[Tensor, "B L H N"], k: Float[Tensor, "B L H N"], first: int) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions, counted from `first`."""
        return q, k

    def norm(self, o: Float[Tensor, "B *L H P"], direction: int) -> Float[Tensor, "B *L H P"]:
        return F.rms_norm(o, (self.P,), eps=self.eps)

    def project(self, x: Float[Tensor, "B L D"], direction: int, first: int = 0) -> Heads:
        widths = [self.heads * self.N] * 2 + [self.heads * self.P]
        heads = at_least_float32(self.enter[direction](x)).split(widths, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in heads)
        return Heads(*self.place(q * self.N**-0.5, k, first), v, self.log_decay(x, direction))

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.read(x, self.mix_states([self.project(x, direction) for direction in range(len(self.enter))]))

    def mix_states(self, directions: list[Heads]) -> list[Float[Tensor, "B L H P"]]:
        """o_t of every direction."""
        return [linear_attention(*heads, reverse=bool(direction)) for direction, heads in enumerate(directions)]

    def read(self, x: Float[Tensor, "B *L D"], outputs: Iterable[Tensor]) -> Float[Tensor, "B *L D"]:
        o = sum(self.norm(o, direction) for direction, o in enumerate(outputs))
        assert isinstance(o, Tensor)
        return self.leave(F.silu(self.gate(x)) * o.flatten(-2))

    def flops(self, length: int) -> Counts:
        maps = sum((linear_flops(layer, length) for layer in (*self.enter, self.gate, self.leave)), Counts())
        return maps + len(self.enter) * self._products(length)

    def _products(self, length: int) -> Counts:
        return linear_attention_flops(length, self.heads, self.N, self.P)

    def initial_state(self, batch: int) -> Any:
        return 0, None

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        first, matrix = state
        q, k, v, log_decay = self.project(x[:, None], 0, first)
        decay = log_decay[:, 0] if log_decay.ndim > 1 else log_decay
        o, matrix = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], decay, matrix)
        return self.read(x, [o]), (first + 1, matrix)


@torch.no_grad()
def start_as_xavier(weights: Iterable[Tensor]) -> None:
    """Initialise maps into the heads as in the published code; those of one layer are drawn as if separate."""
    for weight in weights:
        nn.init.xavier_uniform_(weight, gain=INITIAL_GAIN)
