"""S4: a long convolution whose kernel is the response of a HiPPO-LegS state space, diagonal plus low rank.

Gu, Goel, Ré 2022, "Efficiently modeling long sequences with structured state spaces". Per feature

    x' = (A - P P*) x + B u,  y = 2 Re(C x) + D u,      K[l] = 2 Re sum_n C_n (Abar^l Bbar)_n

with N/2 stored modes n, one of each conjugate pair, discretised by the bilinear rule with a step dt. The convolution
y = K u + D u is followed by GELU and an output map. Both directions of a two-sided layer share everything but C.

C is trained; the published code trains C~ = C (1 - Abar^L) for the first length L it has seen. `ops/dplr.py` computes
the kernel.

Letters: L steps, H features, K directions, N state size, M = N/2 modes, S copies of (A, P, B) that the features take in
turn (feature h the copy h mod S).
"""

from typing import Any

from jaxtyping import Complex, Float
from pydantic import Field
from torch import Tensor

from spt.models.base import Backbone, Counts
from spt.models.longconv import ConjugatePairKernel, LongConvolution
from spt.models.ops import dplr
from spt.models.ops.discretise import log_uniform, parameter_for
from spt.models.ops.output import EarlyDropout, Kind
from spt.models.options import S4Config

PAPER = "Gu, Goel, Ré 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 200_704


class Config(S4Config):
    output: Kind = Field("glu", description="after the convolution and its GELU; identity: neither GELU nor map")
    pre_activation_dropout: EarlyDropout = Field(
        False,
        description="dropout before the GELU too; untied, as in the S4 repository: with a mask for each step under "
        "tie_dropout as well",
    )


class S4Kernel(ConjugatePairKernel):
    """Parameters: inv_dt (H, 1); A_real, A_imag (S, M); P, B (S, M, 2); C (K, H, M, 2). A = -exp(A_real) - i A_imag."""

    def __init__(self, config: Config) -> None:
        H, K = config.d_model, 1 if config.causal else 2
        inv_dt = parameter_for(log_uniform(config.dt_min, config.dt_max, H, 1), config.dt_transform)
        super().__init__(config, inv_dt=inv_dt, **dplr.legs_parameters(config.d_state, H, K, config.n_ssm))
        self.dt_transform = config.dt_transform

    def state_space(self) -> dplr.StateSpace:
        return dplr.state_space(dict(self.named_parameters()), self.dt_transform, self.rate)

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        return dplr.dplr_kernel(self.state_space(), self.resampled_length(length), self.C.dtype)

    def flops(self, length: int) -> Counts:
        K, H, M, _ = self.C.shape
        return dplr.dplr_flops(K, H, M, min(length, self.limit or length))

    def system(self) -> dplr.System:
        dtype = self.C.dtype.to_complex()
        return dplr.System(*(x.to(dtype) for x in dplr.discretise(self.state_space())))

    def step(
        self, u: Float[Tensor, "B H"], state: Tensor, system: dplr.System
    ) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H M"]]:
        return dplr.dplr_step(system, state, u)


def build(config: Config) -> Backbone:
    after: dict[str, Any] = {"output": config.output, "pre_activation_dropout": config.pre_activation_dropout}
    return Backbone(config, lambda: [LongConvolution(config, S4Kernel(config), **after)])
