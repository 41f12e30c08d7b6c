"""RG-LRU, the recurrent block of Hawk and Griffin (De et al. 2024, sections 2.3 and 2.4).

    r_t = sigmoid(W_r u_t + b_r),   i_t = sigmoid(W_i u_t + b_i),   log a_t = -8 softplus(Lambda) r_t
    h_t = a_t h_{t-1} + sqrt(1 - a_t²) i_t u_t,   y_t = W_o (gelu(W_g x_t + b_g) h_t) + b_o

u is W_u x + b_u after a convolution of each feature over W steps. Both gates have block-diagonal matrices. The first
step has nothing to forget: there, the factor of the input is 1, as in the authors' code. In the paper, a gated
feed-forward layer of three times the width follows (here `feed_forward: mlp`). If two-sided, a second convolution and
recurrence run backwards; the states are added. Letters: L steps, D width, P states, K directions, N blocks.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, BackboneConfig, Counts, Mixer, ParamGroup, linear_flops, new_parameter
from spt.models.gated import BlockLinear, Coefficients, ShortConvolution, real_scan, run
from spt.models.mixer import Context
from spt.models.ops.precision import at_least_float32, without_autocast
from spt.models.ops.product import Linear
from spt.models.options import FeedForwardKind, NormKind

PAPER = "De et al. 2024"
COST = "L D P"
PARAMETERS = 855_104
SHARPNESS = 8.0  # the paper's c
R_MIN, R_MAX = 0.9, 0.999  # of exp(-softplus(Lambda)) at the start: the 8th root of a where the gate is open


class Config(BackboneConfig):
    inner_widths = ("d_ff", "d_hidden")

    norm: NormKind = Field("rms", description="normalisation: rms (as in the paper), layer, batch, scalar, scale, none")
    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    d_hidden: int | None = Field(
        None, ge=1, description="number of states P; default: 4/3 d_model, rounded to a multiple of blocks"
    )
    blocks: int = Field(
        8, ge=1, description="number of blocks in the gates' matrices; must divide d_hidden (16 in the paper)"
    )
    convolution: int = Field(4, ge=1, description="length of the short convolution, in steps")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_hidden is not None and self.d_hidden % self.blocks:
            raise ValueError(f"d_hidden {self.d_hidden} is not a multiple of blocks {self.blocks}")
        return self

    @property
    def states(self) -> int:
        unit = self.blocks
        return self.d_hidden or max(unit, unit * round(4 * self.d_model / 3 / unit))


class Direction(nn.Module):
    """One convolution and recurrence. Parameters: those of `recurrence_gate` (W_r), `input_gate` (W_i), `convolution`;
    Lambda (P,)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        P = config.states
        self.convolution = ShortConvolution(P, config.convolution, std=math.sqrt(0.01 / config.convolution))
        self.recurrence_gate, self.input_gate = BlockLinear(P, config.blocks), BlockLinear(P, config.blocks)
        # exp(-softplus(Lambda)) is uniform on the ring's area, as in the authors' code.
        a = torch.empty(P, dtype=torch.float64).uniform_(R_MIN**2, R_MAX**2).sqrt_()
        self.Lambda = new_parameter(torch.log(torch.expm1(-torch.log(a))))
        self.param_groups = {"Lambda": ParamGroup(weight_decay=False)}

    def coefficients(self, u: Float[Tensor, "*B P"], first: Bool[Tensor, "*B"] | bool) -> Coefficients:
        """`first` marks the step before which there is none."""
        with without_autocast(u):
            u = at_least_float32(u)
            log_a = -SHARPNESS * F.softplus(self.Lambda) * torch.sigmoid(self.recurrence_gate(u))
            # sqrt(1 - a²) has no finite slope at a = 1, where a gate may round to.
            factor = torch.sqrt(-torch.expm1(2 * log_a).clamp(max=-1e-12))
            if isinstance(first, Tensor):
                factor = torch.where(first[..., None], 1.0, factor)
            elif first:
                factor = torch.ones_like(factor)
            return Coefficients(torch.exp(log_a), factor * torch.sigmoid(self.input_gate(u)) * u)


class RGLRU(Mixer):
    """Parameters: the maps D -> P `gate` (W_g) and `enter` (W_u), P -> D `leave` (W_o), and those of each direction."""

    uncompiled = ("mix_states",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent = config.causal
        D, P = config.d_model, config.states
        self.gate, self.enter, self.leave = Linear(D, P), Linear(D, P), Linear(P, D)
        for layer, gain in ((self.gate, 1.0), (self.enter, 1.0), (self.leave, 2 / config.n_layers)):
            nn.init.normal_(layer.weight, std=math.sqrt(gain / layer.in_features))
            nn.init.zeros_(layer.bias)
        self.lru = nn.ModuleList(Direction(config) for _ in range(1 if config.causal else 2))

    @property
    def recurrences(self) -> list["Direction"]:
        return [each for each in self.lru if isinstance(each, Direction)]

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        u = at_least_float32(self.enter(x))
        if context.padded:  # where the map's bias stands
            u = torch.where(context.valid[..., None], u, 0.0)
        return self.read(x, self.mix_states(u, context.valid if context.padded else None))

    def mix_states(self, u: Float[Tensor, "B L P"], valid: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L P"]:
        """The sum of h_t over the directions."""
        B, L, _ = u.shape
        steps = torch.arange(L, device=u.device)
        last = L - 1 if valid is None else valid.sum(1, keepdim=True) - 1
        total = torch.zeros_like(u)
        for direction, lru in enumerate(self.recurrences):
            first = (steps == (last if direction else 0)).expand(B, L)
            v = lru.convolution(u, reverse=bool(direction))
            total = total + run(lru.coefficients(v, first), direction, valid)
        return total

    def read(self, x: Float[Tensor, "B *L D"], h: Float[Tensor, "B *L P"]) -> Float[Tensor, "B *L D"]:
        return self.leave(F.gelu(self.gate(x), approximate="tanh") * h)

    def flops(self, length: int) -> Counts:
        counts = sum((linear_flops(layer, length) for layer in (self.gate, self.enter, self.leave)), Counts())
        for lru in self.recurrences:
            counts += lru.convolution.flops(length) + real_scan(length, len(lru.Lambda))
            counts += lru.recurrence_gate.flops(length) + lru.input_gate.flops(length)
        return counts

    def initial_state(self, batch: int) -> Any:
        return self.recurrences[0].convolution.initial_state(batch), None

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        before, h = state
        u, before = self.recurrences[0].convolution.step(self.enter(x), before)
        a, b = self.recurrences[0].coefficients(u, first=h is None)
        h = b if h is None else a * h + b
        return self.read(x, h), (before, h)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [RGLRU(config)])
