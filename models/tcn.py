"""TCN: convolutions over a few steps, farther apart in every block (Bai, Kolter, Koltun 2018, section 3).

    y = drop(relu(conv(drop(relu(conv(x)))))),   both convolutions over W steps that lie 2^l apart in block l

A local model: block l adds (W - 1) 2^(l+1) steps to what it sees, all in the past if causal, else half on each side (as
in ByteNet's encoder, Kalchbrenner et al. 2016; W odd). After `cycle` blocks, the distance is 1 again. The residual sum
and the norm are the stack's, in place of the paper's weight normalisation. Letters: B sequences, L steps,
D width, W steps of a convolution, P inner width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Context, Counts, Mixer
from spt.models.ops.dropout import Dropout
from spt.models.options import LocalConfig

PAPER = "Bai, Kolter, Koltun 2018"
COST = "L D P W"
PARAMETERS = 395_520


class Config(LocalConfig):
    kernel_size: int = Field(3, ge=1, description="steps W per convolution; odd unless causal")
    cycle: int = Field(10, ge=1, description="number of blocks after which the dilation starts at 1 again")
    d_hidden: int | None = Field(None, ge=1, description="width P between the two convolutions; default: d_model")

    inner_widths = ("d_ff", "d_hidden")

    def distance(self, block: int) -> int:
        """Distance of a convolution's steps in this block, smaller if it would otherwise see beyond the reach."""
        own: int = 2 ** (block % self.cycle)
        return own if self.reach is None else min(own, self.reach // self._nearest())

    def _nearest(self) -> int:
        """How far the two convolutions of a block see over neighbouring steps."""
        return (self.kernel_size - 1) * (2 if self.causal else 1)

    def own_reach(self) -> int:
        return self._nearest() * 2 ** (min(self.cycle, self.n_layers) - 1)

    def seen(self) -> int:
        return sum(self._nearest() * self.distance(block) for block in range(self.n_layers))

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if not self.causal and self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {self.kernel_size} has no middle; a two-sided model needs an odd one")
        if self.reach is not None and self.reach < self._nearest():
            raise ValueError(f"reach {self.reach}: a block's two convolutions see at least {self._nearest()} steps")
        return self


class Convolution(nn.Module):
    """Over W steps, `distance` apart. Parameters: weight (P, D, W), from N(0, 2 / (D W)); bias (P,), zero."""

    def __init__(self, n_in: int, n_out: int, width: int, distance: int, causal: bool) -> None:
        super().__init__()
        self.distance = distance
        reach = (width - 1) * distance
        self.padding = (reach, 0) if causal else (reach // 2, reach // 2)
        self.weight = nn.Parameter(torch.randn(n_out, n_in, width) * (2 / (n_in * width)) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Float[Tensor, "B D L"]) -> Float[Tensor, "B P L"]:
        return F.conv1d(F.pad(x, self.padding), self.weight, self.bias, dilation=self.distance)

    def flops(self, length: int) -> Counts:
        return Counts.of("convolution", 2.0 * length * self.weight.numel())


class TCN(Mixer):
    def __init__(self, config: Config, block: int) -> None:
        super().__init__()
        D, P = config.d_model, config.d_hidden or config.d_model
        distance = config.distance(block)
        self.first = Convolution(D, P, config.kernel_size, distance, config.causal)
        self.second = Convolution(P, D, config.kernel_size, distance, config.causal)
        self.dropout = Dropout(config.dropout, config.tie_dropout)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        h = self.dropout(F.relu(self.first(x.transpose(1, 2)).transpose(1, 2)))
        if context.padded:  # the bias stands there
            h = torch.where(context.valid[..., None], h, 0.0)
        return F.relu(self.second(h.transpose(1, 2))).transpose(1, 2)  # the stack drops

    def flops(self, length: int) -> Counts:
        return self.first.flops(length) + self.second.flops(length)


def build(config: Config) -> Backbone:
    blocks = iter(range(config.n_layers))
    return Backbone(config, lambda: [TCN(config, next(blocks))])
