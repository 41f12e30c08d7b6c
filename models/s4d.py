"""S4D: a diagonal state-space model per feature, in continuous time with a trained step size.

Gu, Gupta, Goel, Ré 2022, "On the parameterization and initialization of diagonal state space models". Per feature

    x' = A x + B u,  y = 2 Re(C x) + D u,      K[l] = 2 Re sum_n C_n Bbar_n Abar_n^l

with N/2 complex modes n, one of each conjugate pair, and a step size dt. Letters: H features, K directions, S copies of
(A, B) that the features take in turn (feature h takes copy h mod S), z = dt A.

Parameters are those of the S4 repository: A = -exp(A_real) - i A_imag, and complex numbers as pairs. The minimal S4D
of the same repository writes A with + i A_imag and has no B; its C is the conjugate of ours.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Complex128, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Counts
from spt.models.longconv import ConjugatePairKernel, DiagonalSystem, Kernel, LongConvolution
from spt.models.ops.discretise import (
    Transform,
    as_complex,
    bilinear,
    log_uniform,
    parameter_for,
    positive,
    softmax_scale,
    zoh,
)
from spt.models.ops.hippo import DiagonalInit, diagonal
from spt.models.ops.output import EarlyDropout, Kind
from spt.models.ops.vandermonde import softmax_vandermonde, vandermonde, vandermonde_flops
from spt.models.options import ConjugatePairConfig

PAPER = "Gu, Gupta, Goel, Ré 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 265_472


class Config(ConjugatePairConfig):
    A_init: DiagonalInit = Field(
        "legs", description="initial A: from HiPPO-LegS, -1/2 with spaced frequencies, or real"
    )
    disc: Literal["zoh", "bilinear", "dss"] = Field(
        "zoh", description="discretisation; dss: softmax over max_length as in DSS-SOFTMAX, without a recurrent form"
    )
    n_ssm: int | None = Field(
        None, ge=1, description="number of independent copies of (A, B); must divide d_model; default: d_model"
    )
    is_real: bool = Field(False, description="N real modes instead of N/2 complex ones; needs A_init: real")
    dt_transform: Transform = Field("exp", description="maps the trained number to dt")
    dt_tie: bool = Field(True, description="one dt per feature; false: one per mode")
    real_transform: Transform = Field("exp", description="maps the trained number to -Re A")
    bandlimit: float | None = Field(
        None, gt=0, description="modes at or above this fraction of the Nyquist frequency are removed"
    )
    output: Kind = Field("glu", description="what follows the convolution and its GELU")
    pre_activation_dropout: EarlyDropout = Field(
        False,
        description="dropout before the GELU too; untied, as in the S4 repository: with a separate mask for each step "
        "even under tie_dropout",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.is_real and self.A_init != "real":
            raise ValueError(f"is_real needs real modes, but A_init is {self.A_init}; set A_init: real")
        return self


class S4DKernel(ConjugatePairKernel):
    """Parameters, with M modes: inv_dt (H, 1) or (H, M); A_real, A_imag (S, M); B (S, M, 2); C (K, H, M, 2). A real
    model has no A_imag and no pairs."""

    A_real: nn.Parameter
    A_imag: nn.Parameter
    B: nn.Parameter

    def __init__(self, config: Config) -> None:
        assert config.max_length is not None, "filled in from the task"
        H, K, S = config.d_model, 1 if config.causal else 2, config.n_ssm or config.d_model
        # A real model has N modes, so its initial A is that of a complex model of twice the size.
        A, B = diagonal(config.A_init, config.d_state * (2 if config.is_real else 1), S)
        M = A.shape[1]
        dt = log_uniform(config.dt_min, config.dt_max, H, 1 if config.dt_tie else M)
        C = torch.randn(K, H, M, dtype=torch.complex64)  # E|C|² = 1
        super().__init__(
            config,
            inv_dt=parameter_for(dt, config.dt_transform),
            A_real=parameter_for(-A.real, config.real_transform),
            A_imag=None if config.is_real else -A.imag,
            B=B.real if config.is_real else torch.view_as_real(B),
            C=C.real if config.is_real else torch.view_as_real(C),
        )
        self.config = config
        self.normalised = min(config.max_length, self.limit or config.max_length)
        if config.disc == "dss":
            self.limit = self.normalised
        self.recurrent = self.continuous = config.disc != "dss"

    @torch.no_grad()
    def after_initialisation(self) -> None:
        """With transform none, steps and decay rates that were drawn at random are made positive."""
        for parameter, transform in ((self.inv_dt, "dt_transform"), (self.A_real, "real_transform")):
            if getattr(self.config, transform) == "none":
                parameter.abs_()

    def for_longer(self, trained: Kernel) -> None:
        assert isinstance(trained, S4DKernel)
        if self.config.disc == "dss":
            self.normalised, self.limit = trained.normalised, trained.limit

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        length = self.resampled_length(length)
        log_A, B, C = self._discrete()
        W = C * B
        if self.config.disc == "dss":
            return softmax_vandermonde(W, log_A, self.normalised, length, self.C.dtype)
        return vandermonde(torch.view_as_real(2 * W).to(self.C.dtype), log_A.real, log_A.imag, length)

    def _discrete(
        self,
    ) -> tuple[Complex128[Tensor, "H M"], Complex128[Tensor, "H M"], Complex128[Tensor, "K H M"]]:
        """log Abar, Bbar and C."""
        config = self.config
        dt = self.rate * positive(self.inv_dt.double(), config.dt_transform)
        real = -positive(self.A_real.double(), config.real_transform)
        A = torch.complex(real, torch.zeros_like(real) if config.is_real else -self.A_imag.double())
        B, C = (x.to(torch.complex128) if config.is_real else as_complex(x) for x in (self.B, self.C))
        A, B = (x.repeat(len(dt) // len(x), 1) for x in (A, B))
        if config.bandlimit is not None:
            C = C * ((dt * A.imag.abs() / math.pi) < config.bandlimit)
        if config.disc == "dss":
            return dt * A, B * softmax_scale(A, dt * A, self.normalised), C
        log_A, scale = (zoh if config.disc == "zoh" else bilinear)(A, dt)
        return log_A, B * scale, C

    def flops(self, length: int) -> Counts:
        K, H, M = self.C.shape[:3]
        return vandermonde_flops((K, H, M), self.resampled_length(length), shared=False)

    def system(self) -> DiagonalSystem:
        log_A, B, C = self._discrete()
        dtype = self.C.dtype.to_complex()
        return DiagonalSystem(*(x.to(dtype) for x in (log_A.exp(), B, 2 * C[0])))


def build(config: Config) -> Backbone:
    after: dict[str, Any] = {"output": config.output, "pre_activation_dropout": config.pre_activation_dropout}
    return Backbone(config, lambda: [LongConvolution(config, S4DKernel(config), **after)])
