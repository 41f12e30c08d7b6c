"""minLSTM: an LSTM whose gates do not see the state, so that it is a scan (Feng et al. 2024, section 3.2).

    f_t = sigmoid(F_t),   i_t = sigmoid(I_t),   F_t = W_f x_t + b_f,   I_t = W_i x_t + b_i
    f' = f / (f + i),   i' = i / (f + i)
    h_t = f'_t h_{t-1} + i'_t g(W_h x_t + b_h),   y_t = W_o h_t + b_o

The gates are divided by their sum, so that the scale of the state does not depend on the length. g is as in minGRU. The
two gates are computed without a division, as sigmoid(d) and sigmoid(-d) with d = softplus(-I) - softplus(-F). If
two-sided, a second recurrence runs backwards. Letters: L steps, D width, P states (`expansion` D), K directions.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from spt.models.base import Backbone
from spt.models.gated import Coefficients, MinimalConfig, MinimalRecurrence
from spt.models.ops.product import Linear

PAPER = "Feng et al. 2024"
COST = "L D P"
PARAMETERS = 529_152


class Config(MinimalConfig):
    forget_bias: float = Field(0.0, description="added to the initial b_f; larger values remember for longer")


class MinLSTM(MinimalRecurrence):
    """The map `enter` of each direction is (W_f, W_i, W_h), `leave` is W_o."""

    maps = 3

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for layer in self.enter:
            assert isinstance(layer, Linear)
            layer.bias.data[: config.expansion * config.d_model] += config.forget_bias

    def coefficients(self, u: Float[Tensor, "B *L D"], direction: int) -> Coefficients:
        forget, enter, candidate = self.split(u, direction)
        excess = F.softplus(-enter) - F.softplus(-forget)
        return Coefficients(torch.sigmoid(excess), torch.sigmoid(-excess) * candidate)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [MinLSTM(config)])
