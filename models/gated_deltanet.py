"""Gated DeltaNet: the delta rule with a state that also decays, at a rate set by the input (Yang et al. 2024).

    [q_t, k_t, v_t] = silu(convolution of W_qkv x)_t,   beta_t = sigmoid(W_b x_t)
    q_t <- q_t / (|q_t| sqrt(K)),   k_t <- k_t / |k_t|
    log alpha_t = -exp(A_log) softplus(W_a x_t + dt_bias)
    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t
    y_t = W_o (rms_norm(o_t) silu(W_g x_t))

Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", sections 3.1 and 3.4, in each
head; the decay is Mamba2's. The state here is the transpose of the paper's, and q is scaled as in the authors' code.
Keys have 3/4 D features in all, values twice as many, so that a layer has 6 D² parameters. In the paper, a gated
feed-forward layer follows (here `feed_forward: mlp`). If two-sided, a second rule with its own parameters runs
backwards; the two outputs are added before the norm. Letters: L steps, D width, K features of a head's keys.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from spt.models.base import Backbone, Counts, ParamGroup, linear_flops, new_parameter
from spt.models.delta import DeltaConfig, DeltaMixer, Rule, new_map
from spt.models.ops.discretise import log_uniform, parameter_for
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear

PAPER = "Yang, Kautz, Hatamizadeh 2024"
COST = "L D² + L D K"
PARAMETERS = 1_136_560
LARGEST_A = 16.0  # of exp(A_log), uniform, at the start
DT_MIN, DT_MAX = 1e-3, 0.1  # of softplus(dt_bias), at the start


class Config(DeltaConfig):
    keys_ratio = 0.75
    values_ratio = 2


class GatedRule(Rule):
    """Parameters besides those of the rule: a map D -> N of the decay; A_log (N,) and dt_bias (N,)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        N = self.heads.number
        self.decay = new_map(config.d_model, N)
        self.A_log = new_parameter(torch.empty(N).uniform_(1e-4, LARGEST_A).log())
        self.dt_bias = new_parameter(parameter_for(log_uniform(DT_MIN, DT_MAX, N), "softplus"))
        self.param_groups = {name: ParamGroup(weight_decay=False) for name in ("A_log", "dt_bias")}

    @property
    def maps(self) -> list[Linear]:
        return [*super().maps, self.decay]

    def log_alpha(self, x: Float[Tensor, "B *L D"]) -> Float[Tensor, "B *L N"]:
        return -torch.exp(self.A_log) * F.softplus(at_least_float32(self.decay(x)) + self.dt_bias)


class GatedDeltaNet(DeltaMixer):
    """One parameter besides those of the delta rules, norm and output map: the map D -> N V of the output's gate."""

    rule = GatedRule

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate = new_map(config.d_model, self.leave.in_features)

    def read(self, x: Float[Tensor, "B *L D"], o: Float[Tensor, "B *L N V"]) -> Float[Tensor, "B *L D"]:
        return self.leave(self.norm(o).flatten(-2) * F.silu(self.gate(x)))

    def flops(self, length: int) -> Counts:
        return super().flops(length) + linear_flops(self.gate, length)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [GatedDeltaNet(config)])
