"""Layers that are one gated diagonal recurrence, whose coefficients depend on the input, computed as a scan.

    h_t = a_t h_{t-1} + b_t,   a_t and b_t from the input of step t alone

If two-sided, a second recurrence with its own parameters runs backwards, and the output reads the states of both; both
see the present. Letters: B sequences, L steps, D width, P states, K directions, W steps of a short convolution.
"""

import math
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Inexact
from pydantic import Field
from torch import Tensor, nn

from spt.models.mixer import Context, Mixer, linear_flops
from spt.models.ops.convolution import short_convolve
from spt.models.ops.counts import Counts
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.ops.scan import scan
from spt.models.options import BackboneConfig

Candidate = Literal["positive", "linear"]


class Coefficients(NamedTuple):
    """For every step: what the state is multiplied by, and what is added to it."""

    a: Inexact[Tensor, "B *L P"]
    b: Inexact[Tensor, "B *L P"]


class GatedRecurrence(Mixer):
    """A subclass defines what the coefficients are and how the states are read, all step by step."""

    uncompiled = ("mix_states",)

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.recurrent = causal
        self.directions = 1 if causal else 2

    def coefficients(self, u: Float[Tensor, "B *L D"], direction: int) -> Coefficients:
        """Of the recurrence that runs forwards (0) or backwards (1)."""
        raise NotImplementedError(f"{type(self).__name__} has no coefficients")

    def read(self, u: Float[Tensor, "B *L D"], states: list[Tensor]) -> Float[Tensor, "B *L D"]:
        """The output, from the input and the states of every direction."""
        raise NotImplementedError(f"{type(self).__name__} does not read its states")

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.read(x, self.mix_states(x, context.valid if context.padded else None))

    def mix_states(self, u: Float[Tensor, "B L D"], valid: Bool[Tensor, "B L"] | None = None) -> list[Tensor]:
        """h_t of every direction. Backwards, padding comes first: nothing enters there."""
        return [run(self.coefficients(u, direction), direction, valid) for direction in range(self.directions)]

    def initial_state(self, batch: int) -> Any:
        return None

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        a, b = self.coefficients(x, 0)
        state = b if state is None else a * state + b
        return self.read(x, [state]), state


def run(coefficients: Coefficients, direction: int, valid: Bool[Tensor, "B L"] | None) -> Tensor:
    """The states of one direction, backwards (1) those after the padding."""
    a, b = coefficients
    if direction and valid is not None:
        b = torch.where(valid[..., None], b, 0.0)
    return scan(a, b, reverse=bool(direction))


class MinimalConfig(BackboneConfig):
    """Options of minGRU and minLSTM."""

    expansion: int = Field(1, ge=1, description="states per direction, as a multiple of d_model (the paper's alpha)")
    candidate: Candidate = Field(
        "positive", description="what enters the state: g(x), which is positive, or x itself (linear)"
    )


class MinimalRecurrence(GatedRecurrence):
    """What minGRU and minLSTM share. Parameters: for each direction one map D -> `maps` P, of gates and candidates; one
    map K P -> D."""

    maps: ClassVar[int]

    def __init__(self, config: MinimalConfig) -> None:
        super().__init__(config.causal)
        D, P = config.d_model, config.expansion * config.d_model
        self.candidate = config.candidate
        self.enter = nn.ModuleList(Linear(D, self.maps * P) for _ in range(self.directions))
        self.leave = Linear(self.directions * P, D)

    def split(self, u: Float[Tensor, "B *L D"], direction: int) -> tuple[Float[Tensor, "B *L P"], ...]:
        """The arguments of the gates, and what enters: g (Feng et al. 2024, appendix B.3) is above 0, and grows."""
        *gates, x = at_least_float32(self.enter[direction](u)).chunk(self.maps, dim=-1)
        return *gates, torch.where(x >= 0, x + 0.5, torch.sigmoid(x)) if self.candidate == "positive" else x

    def read(self, u: Float[Tensor, "B *L D"], states: list[Tensor]) -> Float[Tensor, "B *L D"]:
        return self.leave(torch.cat(states, dim=-1))

    def flops(self, length: int) -> Counts:
        maps = sum((linear_flops(layer, length) for layer in (*self.enter, self.leave)), Counts())
        return maps + real_scan(length, self.leave.in_features)


def real_scan(length: int, states: int) -> Counts:
    """A scan of real numbers: a multiply-add for each; backward the same in reverse, and h_{t-1} g_t for a."""
    return Counts.of("scan", 2.0 * length * states, 3.0 * length * states)


class ShortConvolution(nn.Module):
    """y_t = sum_j w_j u_{t-j} + c, j = 0, ..., W - 1, feature by feature; `reverse`: of the steps t + j.

    Parameters: weight (W, P), from N(0, std²); bias (P,), zero, if it has one.
    """

    def __init__(self, features: int, width: int, std: float, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.randn(width, features) * std)
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None

    def forward(self, u: Float[Tensor, "B L P"], reverse: bool = False) -> Float[Tensor, "B L P"]:
        """Values before the first step, or after the last, are zero."""
        y = short_convolve(u, self.weight, reverse=reverse)
        return y if self.bias is None else y + self.bias

    def initial_state(self, batch: int) -> Float[Tensor, "B J P"]:
        """The W - 1 steps before the first, the latest first."""
        return self.weight.new_zeros(batch, self.width - 1, self.weight.shape[1])

    def step(self, u: Float[Tensor, "B P"], before: Float[Tensor, "B J P"]) -> tuple[Tensor, Tensor]:
        steps = torch.cat([u[:, None], before], 1)
        y = (steps * self.weight).sum(1)
        return y if self.bias is None else y + self.bias, steps[:, :-1]

    def flops(self, length: int) -> Counts:
        return Counts.of("convolution", 2.0 * length * self.weight.numel())


class BlockLinear(nn.Module):
    """W x + b with N blocks on the diagonal of W. Parameters: weight (N, P/N, P/N), LeCun normal; bias (P,), zero."""

    def __init__(self, width: int, blocks: int, bias: bool = True) -> None:
        super().__init__()
        inner = width // blocks
        self.weight = nn.Parameter(torch.randn(blocks, inner, inner) / math.sqrt(inner))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Float[Tensor, "*B P"]) -> Float[Tensor, "*B P"]:
        y = torch.einsum("...ni,nij->...nj", x.unflatten(-1, (len(self.weight), -1)), self.weight).flatten(-2)
        return y if self.bias is None else y + self.bias

    def flops(self, length: int) -> Counts:
        return Counts.of("linear", 2.0 * length * self.weight.numel())
