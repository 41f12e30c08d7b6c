"""minGRU: a GRU whose gates do not see the state, so that it is a scan (Feng et al. 2024, section 3.1).

    z_t = sigmoid(W_z x_t + b_z),   h_t = (1 - z_t) h_{t-1} + z_t g(W_h x_t + b_h),   y_t = W_o h_t + b_o

g keeps states positive: x + 1/2 above 0, sigmoid(x) below, as in the paper's log-space form (appendix B.3, version 1);
the scan here needs no logarithms. `candidate: linear` is section 3.1 as written. If two-sided, a second recurrence
runs backwards. Letters: L steps, D width, P states (`expansion` D), K directions.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from spt.models.base import Backbone
from spt.models.gated import Coefficients, MinimalConfig, MinimalRecurrence

PAPER = "Feng et al. 2024"
COST = "L D P"
PARAMETERS = 397_056


class Config(MinimalConfig):
    pass


class MinGRU(MinimalRecurrence):
    """The map `enter` of each direction is (W_z, W_h), `leave` is W_o."""

    maps = 2

    def coefficients(self, u: Float[Tensor, "B *L D"], direction: int) -> Coefficients:
        gate, candidate = self.split(u, direction)
        return Coefficients(torch.sigmoid(-gate), torch.sigmoid(gate) * candidate)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [MinGRU(config)])
