"""Layers of the delta rule, and what DeltaNet and Gated DeltaNet share: the rule's inputs and the use of its outputs.

If two-sided, a second rule with its own maps and convolution runs backwards, and the outputs of both are added; both
see the present. Letters: B sequences, L steps, D width, N heads of K keys and V values, W steps of the convolution.
"""

import math
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spt.models.gated import ShortConvolution
from spt.models.mixer import Context, Mixer, linear_flops
from spt.models.ops.counts import Counts
from spt.models.ops.delta_rule import delta_flops, delta_rule, delta_step
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.options import BackboneConfig, FeedForwardKind, NormKind


class Heads(NamedTuple):
    """The number of heads, and the features of each one's keys and values."""

    number: int
    keys: int
    values: int


class DeltaConfig(BackboneConfig):
    """Options of DeltaNet and Gated DeltaNet."""

    keys_ratio: ClassVar[float]  # features of all keys over d_model
    values_ratio: ClassVar[int]  # features of values over those of keys

    norm: NormKind = Field("rms", description="normalisation: rms (as in the paper), layer, batch, scalar, scale, none")
    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    d_head: int = Field(
        32,
        ge=1,
        description="about how many key features a head has: heads divide them evenly (128 and 256 in the papers)",
    )
    convolution: int = Field(4, ge=1, description="length of the short convolutions, in steps")
    negative_eigenvalues: bool = Field(
        False, description="beta in (0, 2), so that a step can reverse what its key reads (Grazzi et al. 2024)"
    )

    @property
    def heads(self) -> Heads:
        features = self.keys_ratio * self.d_model
        number = max(1, round(features / self.d_head))
        keys = max(1, round(features / number))
        return Heads(number, keys, self.values_ratio * keys)


class Rule(nn.Module):
    """What enters the rule of one direction. Parameters: a map D -> N (2 K + V) and a convolution after it, of queries,
    keys and values; a map D -> N of beta. No biases, so that nothing enters on padding. The convolution is drawn from
    N(0, 1/W), in the papers' code from N(0, 0.02²)."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        N, K, V = self.heads = config.heads
        self.largest_beta = 2.0 if config.negative_eigenvalues else 1.0
        features = N * (2 * K + V)
        self.enter, self.beta = new_map(config.d_model, features), new_map(config.d_model, N)
        self.convolution = ShortConvolution(features, config.convolution, 1 / math.sqrt(config.convolution), bias=False)

    @property
    def maps(self) -> list[Linear]:
        return [self.enter, self.beta]

    def log_alpha(self, x: Float[Tensor, "B *L D"]) -> Float[Tensor, "B *L N"] | None:
        """None: the state does not decay."""
        return None

    def inputs(
        self, x: Float[Tensor, "B *L D"], convolved: Float[Tensor, "B *L P"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The arguments of the delta rule, after the short convolution."""
        N, K, V = self.heads
        features = F.silu(at_least_float32(convolved)).unflatten(-1, (N, 2 * K + V))
        q, k, v = features.split((K, K, V), dim=-1)
        beta = self.largest_beta * torch.sigmoid(at_least_float32(self.beta(x)))
        return _normalise(q, 1 / math.sqrt(K)), _normalise(k), v, beta, self.log_alpha(x)

    def forward(self, x: Float[Tensor, "B L D"], reverse: bool) -> Float[Tensor, "B L N V"]:
        return delta_rule(*self.inputs(x, self.convolution(self.enter(x), reverse)), reverse=reverse)

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B N V"], Any]:
        before, S = state
        convolved, before = self.convolution.step(self.enter(x), before)
        o, S = delta_step(S, *self.inputs(x, convolved))
        return o, (before, S)

    def initial_state(self, batch: int) -> Any:
        return self.convolution.initial_state(batch), self.beta.weight.new_zeros(batch, *self.heads)

    def flops(self, length: int) -> Counts:
        maps = sum((linear_flops(layer, length) for layer in self.maps), Counts())
        return maps + self.convolution.flops(length) + delta_flops(length, *self.heads)


class DeltaMixer(Mixer):
    """Parameters: those of the rule of each direction; a norm of V features, for every head alike; a map N V -> D."""

    rule: ClassVar[type[Rule]] = Rule
    uncompiled = ("mix_states",)

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.recurrent = config.causal
        N, _, V = config.heads
        self.rules = nn.ModuleList(self.rule(config) for _ in range(1 if config.causal else 2))
        self.norm, self.leave = nn.RMSNorm(V, eps=1e-5), new_map(N * V, config.d_model)

    @property
    def directions(self) -> list[Rule]:
        return cast(list[Rule], list(self.rules))

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.read(x, self.mix_states(x))

    def mix_states(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L N V"]:
        """The sum of o_t over the directions. Padding, zeros, leaves a state of zeros as it is."""
        outputs = [rule(x, reverse=bool(direction)) for direction, rule in enumerate(self.directions)]
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def read(self, x: Float[Tensor, "B *L D"], o: Float[Tensor, "B *L N V"]) -> Float[Tensor, "B *L D"]:
        return self.leave(self.norm(o).flatten(-2))

    def flops(self, length: int) -> Counts:
        return sum((rule.flops(length) for rule in self.directions), linear_flops(self.leave, length))

    def initial_state(self, batch: int) -> Any:
        return self.directions[0].initial_state(batch)

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        o, state = self.directions[0].step(x, state)
        return self.read(x, o), state


def new_map(inputs: int, outputs: int) -> Linear:
    """Without a bias; from N(0, 1 / inputs): for the paper's width of 2,048 about the N(0, 0.02²) of its code."""
    layer = Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inputs))
    return layer


def _normalise(x: Float[Tensor, "*B K"], length: float = 1.0) -> Float[Tensor, "*B K"]:
    return x * (length * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6))
