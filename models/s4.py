"""S4: a long convolution whose kernel is the response of a HiPPO-LegS state space, diagonal plus low rank.

Gu, Goel, Ré 2022, "Efficiently modeling long sequences with structured state spaces". Per feature

    x' = (A - P P*) x + B u,  y = 2 Re(C x) + D u,      K[l] = 2 Re sum_n C_n (Abar^l Bbar)_n

with N/2 stored modes n, one of each conjugate pair, discretised by the bilinear rule with a step dt. The convolution
y = K u + D u is followed by GELU and an output map. Both directions of a two-sided layer share everything but C.

C is trained. The published code trains C~ = C (1 - Abar^L) for the first length L it has seen, which it stores as
`l_kernel`; `import_reference` and `export_reference` convert. `ops/dplr.py` computes the kernel.

Letters: L steps, H features, K directions, N state size, M = N/2 modes, S copies of (A, P, B) that the features take in
turn (feature h the copy h mod S).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Complex, Complex128, Float
from pydantic import Field
from torch import Tensor

from spt.models.base import Backbone, Counts, ParamGroup, new_parameter
from spt.models.longconv import Kernel, LongConvolution
from spt.models.ops import dplr
from spt.models.ops.discretise import log_uniform, parameter_for
from spt.models.ops.hippo import nplr
from spt.models.ops.output import Kind
from spt.models.options import ConjugatePairConfig

PAPER = "Gu, Goel, Ré 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 200_704


class Config(ConjugatePairConfig):
    n_ssm: int = Field(1, ge=1, description="independent copies of (A, P, B); divides d_model")
    dt_transform: Literal["exp", "softplus"] = Field("exp", description="from the trained number to dt")
    ssm_lr: float | None = Field(1e-3, gt=0, description="learning rate of dt, A, P and B; null: the recipe's")
    output: Kind = Field("glu", description="after the convolution and its GELU; identity: neither GELU nor map")
    pre_activation_dropout: bool = Field(False, description="dropout before the GELU too, as in the S4 repository")


class S4Kernel(Kernel):
    """Parameters: inv_dt (H, 1); A_real, A_imag (S, M); P, B (S, M, 2); C (K, H, M, 2). A = -exp(A_real) - i A_imag.

    Initially all copies are HiPPO-LegS, with the imaginary part of B clipped at 2 as in the S4 repository; dt is
    log-uniform and C ~ CN(0, 1).
    """

    recurrent = True
    continuous = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.limit = config.max_kernel_length
        H, K, S, M = config.d_model, 1 if config.causal else 2, config.n_ssm, config.d_state // 2
        legs = nplr(config.d_state)
        dt = log_uniform(config.dt_min, config.dt_max, H, 1)
        C = torch.randn(K, H, M, dtype=torch.complex64)  # E|C|² = 1
        self.inv_dt = new_parameter(parameter_for(dt, config.dt_transform))
        self.A_real = new_parameter((-legs.w.real).log().repeat(S, 1))
        self.A_imag = new_parameter((-legs.w.imag).repeat(S, 1))
        self.P = new_parameter(torch.view_as_real(legs.P).repeat(S, 1, 1))
        self.B = new_parameter(torch.view_as_real(legs.B).repeat(S, 1, 1))
        self.C = new_parameter(torch.view_as_real(C))
        ssm = ParamGroup(lr=config.ssm_lr, weight_decay=False)
        self.param_groups = {
            "inv_dt": ssm if config.dt_uses_ssm_lr else ParamGroup(weight_decay=False),
            "A_real": ssm,
            "A_imag": ssm,
            "P": ssm,
            "B": ssm,
            "C": ParamGroup(lr=config.c_lr, weight_decay=True),
        }

    def state_space(self, rate: float = 1.0) -> dplr.StateSpace:
        return dplr.state_space(dict(self.named_parameters()), self.config.dt_transform, rate)

    def forward(self, length: int, rate: float = 1.0) -> Float[Tensor, "K H M"]:
        """`rate`: as for a signal sampled that many times more coarsely, dt times `rate` (S4, section 3.1)."""
        rate *= self.rate
        limit = length if self.limit is None else round(self.limit / rate)
        return dplr.dplr_kernel(self.state_space(rate), min(length, limit), self.C.dtype)

    def flops(self, length: int) -> Counts:
        K, H, M, _ = self.C.shape
        return dplr.dplr_flops(K, H, M, min(length, self.limit or length))

    def system(self) -> dplr.System:
        dtype = self.C.dtype.to_complex()
        return dplr.System(*(x.to(dtype) for x in dplr.discretise(self.state_space(self.rate))))

    def initial_state(self, batch: int) -> Complex[Tensor, "B H M"]:
        _, H, M, _ = self.C.shape
        return torch.zeros(batch, H, M, dtype=self.C.dtype.to_complex(), device=self.C.device)

    def step(
        self, u: Float[Tensor, "B H"], state: Tensor, system: dplr.System
    ) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H M"]]:
        return dplr.dplr_step(system, state, u)

    def import_reference(
        self, raw: Mapping[str, Tensor], *, length: int | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """From the S4 repository's `SSMKernelDPLR`. Its C is C~ of `length`, by default `raw["l_kernel"]`; 0 means that
        it is C itself, as before the first forward pass. Converted in float64; gradients pass through the solve.

        Raises `ValueError` if neither length is given.
        """
        if length is None:
            if "l_kernel" not in raw:
                raise ValueError("S4's published C belongs to a kernel length: give l_kernel, or length=")
            length = int(raw["l_kernel"])
        ours = {name: raw[name].reshape(parameter.shape) for name, parameter in self.named_parameters()}
        return {**ours, "C": self._convert(ours, length, dplr.untruncated)}

    def export_reference(self, *, length: int = 0, **options: Any) -> dict[str, Tensor]:
        """With C~ of `length`; by default with C, from which the published code makes C~ in its first forward pass."""
        ours = dict(self.named_parameters())
        C = self._convert(ours, length, dplr.truncated)
        return {**ours, "P": self.P[None], "B": self.B[None], "C": C, "l_kernel": torch.tensor(length)}

    def _convert(
        self,
        parameters: Mapping[str, Tensor],
        length: int,
        convert: Callable[[dplr.System, int], Complex128[Tensor, "K H M"]],
    ) -> Float[Tensor, "K H M 2"]:
        C = parameters["C"]
        if length == 0:
            return C
        system = dplr.discretise(dplr.state_space(parameters, self.config.dt_transform))
        return torch.view_as_real(convert(system, length)).to(C.dtype)


def build(config: Config) -> Backbone:
    def block() -> list[LongConvolution]:
        return [
            LongConvolution(
                config, S4Kernel(config), output=config.output, pre_activation_dropout=config.pre_activation_dropout
            )
        ]

    return Backbone(config, block)
