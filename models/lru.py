"""LRU, the linear recurrent unit: a diagonal recurrence trained in discrete time (Orvieto et al. 2023).

The output maps and the norms are initialised as in flax, in which the public code (minimal-LRU) is written.

Section 3 of the paper:

    x_t = lambda x_{t-1} + gamma B u_t,   y_t = Re(C x_t) + D u_t,   lambda = exp(-exp(nu) + i exp(theta))

Letters: B sequences, L steps, H features, N states, K directions.
"""

import math

import torch
from pydantic import Field, model_validator
from torch import nn

from spt.models.base import Backbone, BackboneConfig, ParamGroup, new_parameter
from spt.models.ops.flax import dense_
from spt.models.ops.output import Output
from spt.models.options import NormKind
from spt.models.recurrence import DiagonalRecurrence, System, with_flax_norms

PAPER = "Orvieto et al. 2023"
COST = "L D (N + D)"
PARAMETERS = 528_384


class Config(BackboneConfig):
    norm: NormKind = Field("batch", description="normalisation: batch or layer (as in the paper), rms, scalar, none")
    norm_momentum: float = Field(
        0.01, gt=0, le=1, description="batch norm: weight of the new batch (1 - flax's momentum)"
    )
    norm_unbiased: bool = Field(
        False, description="batch norm: divide the running variance by n - 1 (torch), not n (flax)"
    )
    last_norm: bool | None = Field(False, description="a norm after the last block")
    tie_dropout: bool = Field(True, description="one dropout mask for all steps of a sequence")
    d_state: int = Field(128, ge=1, description="number of states N")
    r_min: float = Field(0.0, ge=0, lt=1, description="smallest initial modulus of an eigenvalue")
    r_max: float = Field(1.0, gt=0, le=1, description="largest initial modulus of an eigenvalue")
    max_phase: float = Field(6.28, gt=0, description="largest initial angle of an eigenvalue; 2 pi / 10 for Path-X")
    ssm_lr_factor: float = Field(
        0.5,
        gt=0,
        description="learning rate of nu, theta, gamma and B, relative to the recipe's; these have no weight decay",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.r_min >= self.r_max:
            raise ValueError(f"r_min {self.r_min} is not below r_max {self.r_max}: the ring of eigenvalues is empty")
        return self


class LRU(DiagonalRecurrence):
    """The recurrence, then GELU and GLU, without norm and skip connection.

    Parameters: nu, theta, gamma (N,), logarithms; B (N, H, 2); C (K, H, N, 2); D (H,). The paper's model is causal; the
    two-sided form is S5's.
    """

    state_space = ("nu", "theta", "gamma", "B", "C")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent = config.causal
        H, N, K = config.d_model, config.d_state, 1 if config.causal else 2
        u = torch.rand(N, dtype=torch.float64).clamp_min(1e-12)  # uniform on the ring's area (lemma 3.2)
        nu = torch.log(-0.5 * torch.log(u * (config.r_max**2 - config.r_min**2) + config.r_min**2))
        theta = torch.log(config.max_phase * torch.rand(N, dtype=torch.float64).clamp_min(1e-12))
        gamma = 0.5 * torch.log(-torch.expm1(-2 * torch.exp(nu)))  # sqrt(1 - |lambda|^2): states of variance one
        self.nu, self.theta, self.gamma = new_parameter(nu), new_parameter(theta), new_parameter(gamma)
        self.B = nn.Parameter(torch.randn(N, H, 2) / math.sqrt(2 * H))
        self.C = nn.Parameter(torch.randn(K, H, N, 2) / math.sqrt(N))
        self.D = nn.Parameter(torch.randn(H))
        self.output = Output(H, "glu", gelu="tanh", dropout=config.dropout, tied=config.tie_dropout)
        assert self.output.linear is not None
        dense_(self.output.linear)
        ssm = ParamGroup(lr_scale=config.ssm_lr_factor, weight_decay=False)
        self.param_groups = dict.fromkeys(("nu", "theta", "gamma", "B"), ssm)
        self.param_groups |= dict.fromkeys(("C", "D"), ParamGroup(weight_decay=True))

    def system(self) -> System:
        exponent = torch.complex(-torch.exp(self.nu.double()), torch.exp(self.theta.double()))
        enters = torch.exp(self.gamma)[:, None] * torch.view_as_complex(self.B)
        return System(torch.exp(exponent), enters, self.output_matrix())


def build(config: Config) -> Backbone:
    return Backbone(with_flax_norms(config), lambda: [LRU(config)], decay_all=True)
