"""HGRN: a gated complex recurrence that forgets less the deeper the layer (Qin, Yang, Zhong 2023, section 3).

    Re c_t = silu(W_r x_t + b_r),   Im c_t = silu(W_i x_t + b_i),   mu_t = sigmoid(W_m x_t + b_m)
    lambda_t = gamma + (1 - gamma) mu_t,   h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) c_t
    y_t = W_o layer_norm(silu(W_g x_t + b_g) [Re h_t, Im h_t]) + b_o

gamma, the least share of the state that is kept, grows with depth: in layer k = 0, 1, ... it is
sum_{j<k} softmax(Gamma)_j, with the softmax over layers. theta is trained and starts as the frequencies of rotary
positions; the authors' code squares them and applies the norm before the gate. In the paper, a gated feed-forward layer
follows (here `feed_forward: mlp`). If two-sided, a second recurrence with its own maps runs backwards (the authors
share the maps and add the states). Letters: L steps, D width, P states (`expansion` D), K directions.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spt.models.base import Backbone, BackboneConfig, Counts, ParamGroup, linear_flops, new_parameter
from spt.models.gated import Coefficients, GatedRecurrence
from spt.models.ops import counts
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.options import FeedForwardKind

PAPER = "Qin et al. 2023"
COST = "L D P"
PARAMETERS = 1_458_432


class Config(BackboneConfig):
    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    expansion: int = Field(1, ge=1, description="complex states per direction, as a multiple of d_model")


class LowerBounds(nn.Module):
    """gamma of all layers. Parameter: Gamma (N layers, K, P), zero, so that layer k initially keeps at least k/N."""

    def __init__(self, layers: int, directions: int, states: int) -> None:
        super().__init__()
        self.Gamma = nn.Parameter(torch.zeros(layers, directions, states))
        self.param_groups = {"Gamma": ParamGroup(weight_decay=False)}

    def forward(self, layer: int, direction: int) -> Float[Tensor, " P"]:
        return torch.softmax(self.Gamma[:, direction], dim=0)[:layer].sum(0)


class HGRN(GatedRecurrence):
    """Parameters: for each direction one map D -> 3 P `enter` (W_r, W_i, W_m) and theta (P,); the
    output's gate D -> 2 K P, norm, and map."""

    def __init__(self, config: Config, layer: int, bounds: LowerBounds) -> None:
        super().__init__(config.causal)
        D, P, K = config.d_model, config.expansion * config.d_model, self.directions
        self.layer = layer
        if layer == 0:
            self.bounds = bounds
        self.shared = (bounds,)  # in a tuple, torch does not count its parameter once for every layer
        self.enter = nn.ModuleList(Linear(D, 3 * P) for _ in range(K))
        angles = 10_000.0 ** -(torch.arange(P, dtype=torch.float64) / P)
        self.theta = nn.ParameterList(new_parameter(angles) for _ in range(K))
        self.gate, self.norm, self.leave = Linear(D, 2 * K * P), nn.LayerNorm(2 * K * P), Linear(2 * K * P, D)
        self.param_groups = {f"theta.{k}": ParamGroup(weight_decay=False) for k in range(K)}

    def coefficients(self, u: Float[Tensor, "B *L D"], direction: int) -> Coefficients:
        real, imaginary, forget = at_least_float32(self.enter[direction](u)).chunk(3, dim=-1)
        bound = self.shared[0](self.layer, direction)
        kept = bound + (1 - bound) * torch.sigmoid(forget)
        enters = (1 - bound) * torch.sigmoid(-forget)  # 1 - lambda, without cancellation
        rotation = torch.polar(torch.ones_like(bound), self.theta[direction])
        return Coefficients(kept * rotation, enters * torch.complex(F.silu(real), F.silu(imaginary)))

    def read(self, u: Float[Tensor, "B *L D"], states: list[Tensor]) -> Float[Tensor, "B *L D"]:
        parts = torch.cat([part for h in states for part in (h.real, h.imag)], dim=-1)
        return self.leave(self.norm(F.silu(self.gate(u)) * parts))

    def flops(self, length: int) -> Counts:
        maps = sum((linear_flops(layer, length) for layer in (*self.enter, self.gate, self.leave)), Counts())
        return maps + counts.scan(length, self.leave.in_features // 2)


def build(config: Config) -> Backbone:
    bounds = LowerBounds(config.n_layers, 1 if config.causal else 2, config.expansion * config.d_model)
    layers = iter(range(config.n_layers))
    return Backbone(config, lambda: [HGRN(config, next(layers), bounds)])
