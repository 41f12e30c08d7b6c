"""The kernel of S4 (Gu, Goel, Ré 2022), which Liquid-S4 shares.

Letters: H features, K directions, N state size, M = N/2 modes, S copies of (A, P, B) that the features take in turn
(feature h takes copy h mod S).
"""

from jaxtyping import Complex, Float
from torch import Tensor

from spt.models.longconv import ConjugatePairKernel
from spt.models.ops import dplr
from spt.models.ops.counts import Counts
from spt.models.ops.discretise import log_uniform, parameter_for
from spt.models.options import S4Config


class S4Kernel(ConjugatePairKernel):
    """Parameters: inv_dt (H, 1); A_real, A_imag (S, M); P, B (S, M, 2); C (K, H, M, 2). A = -exp(A_real) - i A_imag."""

    def __init__(self, config: S4Config) -> None:
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
        return dplr.dplr_flops(K, H, M, self.resampled_length(length))

    def system(self) -> dplr.System:
        dtype = self.C.dtype.to_complex()
        return dplr.System(*(x.to(dtype) for x in dplr.discretise(self.state_space())))

    def step(
        self, u: Float[Tensor, "B H"], state: Tensor, system: dplr.System
    ) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H M"]]:
        return dplr.dplr_step(system, state, u)
