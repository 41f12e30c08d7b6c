"""minGRU: a GRU whose gates do not see the state, so that it is a scan (Feng et al. 2024, section 3.1).

    z_t = sigmoid(W_z x_t + b_z),   h_t = (1 - z_t) h_{t-1} + z_t g(W_h x_t + b_h),   y_t = W_o h_t + b_o

g keeps states positive: x + 1/2 above 0, sigmoid(x) below, as in the paper's log-space form (appendix B.3); the scan
here needs no logarithms. `candidate: linear` is section 3.1 as it stands. Two-sided, a second recurrence
runs backwards. Letters: L steps, D width, P states (`expansion` D), K directions.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.base import Backbone, Counts, linear_flops
from spt.models.gated import Coefficients, GatedRecurrence, MinimalConfig, entering, real_scan
from spt.models.ops.product import Linear

PAPER = "Feng et al. 2024"
COST = "L D P"
PARAMETERS = 397_056


class Config(MinimalConfig):
    pass


class MinGRU(GatedRecurrence):
    """Parameters: for each direction one map D -> 2 P, of gates and candidates; one map K P -> D."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.causal)
        D, P = config.d_model, config.expansion * config.d_model
        self.candidate = config.candidate
        self.enter = nn.ModuleList(Linear(D, 2 * P) for _ in range(self.directions))
        self.leave = Linear(self.directions * P, D)

    def coefficients(self, u: Float[Tensor, "B *L D"], direction: int) -> Coefficients:
        gate, candidate = self.enter[direction](u).float().chunk(2, dim=-1)
        return Coefficients(torch.sigmoid(-gate), torch.sigmoid(gate) * entering(candidate, self.candidate))

    def read(self, u: Float[Tensor, "B *L D"], states: list[Tensor]) -> Float[Tensor, "B *L D"]:
        return self.leave(torch.cat(states, dim=-1))

    def flops(self, length: int) -> Counts:
        maps = sum((linear_flops(layer, length) for layer in (*self.enter, self.leave)), Counts())
        return maps + real_scan(length, self.leave.in_features)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [MinGRU(config)])
