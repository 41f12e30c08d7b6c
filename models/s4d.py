"""S4D: a diagonal state-space model per feature, in continuous time with a trained step.

Gu, Gupta, Goel, Ré 2022, "On the parameterization and initialization of diagonal state space models". Per feature

    x' = A x + B u,  y = 2 Re(C x) + D u,      K[l] = 2 Re sum_n C_n Bbar_n Abar_n^l

with N/2 complex modes n, one of each conjugate pair, and a step dt. Letters: H features, K directions, S copies of
(A, B) that the features take in turn (feature h the copy h mod S), z = dt A.

Parameters are those of the S4 repository: A = -exp(A_real) - i A_imag, and complex numbers as pairs. The minimal S4D
of the same repository writes A with + i A_imag and has no B; its C is the conjugate of ours.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Complex, Complex128, Float
from pydantic import Field, model_validator
from torch import Tensor

from spt.models.base import Backbone, Counts, ParamGroup, new_parameter
from spt.models.longconv import Kernel, LongConvolution
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
from spt.models.ops.output import Kind
from spt.models.ops.vandermonde import moments, softmax_vandermonde, vandermonde, vandermonde_flops
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
    n_ssm: int | None = Field(None, ge=1, description="independent copies of (A, B); divides d_model; default: d_model")
    is_real: bool = Field(False, description="N real modes instead of N/2 complex ones; needs A_init: real")
    dt_transform: Transform = Field("exp", description="from the trained number to dt")
    dt_tie: bool = Field(True, description="one dt per feature; false: one per mode")
    real_transform: Transform = Field("exp", description="from the trained number to -Re A")
    bandlimit: float | None = Field(
        None, gt=0, description="modes at or above this fraction of the Nyquist frequency are removed"
    )
    output: Kind = Field("glu", description="after the convolution and its GELU")
    pre_activation_dropout: bool = Field(False, description="dropout before the GELU too, as in the S4 repository")
    ssm_lr: float | None = Field(1e-3, gt=0, description="learning rate of dt, A and B; null: the recipe's")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.is_real and self.A_init != "real":
            raise ValueError(f"is_real needs real modes, but A_init is {self.A_init}; set A_init: real")
        return self


class System(NamedTuple):
    """x_t = A x_{t-1} + B u_t, y_t = 2 Re sum_n C_n x_t."""

    A: Complex[Tensor, "H M"]
    B: Complex[Tensor, "H M"]
    C: Complex[Tensor, "H M"]


class S4DKernel(Kernel):
    """Parameters, with M modes: inv_dt (H, 1) or (H, M); A_real, A_imag (S, M); B (S, M, 2); C (K, H, M, 2). A real
    model has no A_imag and no pairs."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        self.config = config
        self.limit = config.max_kernel_length
        self.normalised = min(config.max_length, self.limit or config.max_length)
        if config.disc == "dss":
            self.limit = self.normalised
        self.recurrent = self.continuous = config.disc != "dss"
        H, K, S = config.d_model, 1 if config.causal else 2, config.n_ssm or config.d_model
        # A real model has N modes, so its initial A is that of a complex model of twice the size.
        A, B = diagonal(config.A_init, config.d_state * (2 if config.is_real else 1), S)
        M = A.shape[1]
        dt = log_uniform(config.dt_min, config.dt_max, H, 1 if config.dt_tie else M)
        C = torch.randn(K, H, M, dtype=torch.complex64)  # E|C|² = 1
        self.inv_dt = new_parameter(parameter_for(dt, config.dt_transform))
        self.A_real = new_parameter(parameter_for(-A.real, config.real_transform))
        if config.is_real:
            self.register_parameter("A_imag", None)
            self.B, self.C = new_parameter(B.real), new_parameter(C.real)
        else:
            self.A_imag = new_parameter(-A.imag)
            self.B, self.C = new_parameter(torch.view_as_real(B)), new_parameter(torch.view_as_real(C))
        ssm = ParamGroup(lr=config.ssm_lr, weight_decay=False)
        self.param_groups = {
            "inv_dt": ssm if config.dt_uses_ssm_lr else ParamGroup(weight_decay=False),
            "A_real": ssm,
            **({} if config.is_real else {"A_imag": ssm}),
            "B": ssm,
            "C": ParamGroup(lr=config.c_lr, weight_decay=True),
        }

    @torch.no_grad()
    def after_initialisation(self) -> None:
        """With transform none, steps and decay rates that were drawn at random are made positive."""
        for parameter, transform in ((self.inv_dt, "dt_transform"), (self.A_real, "real_transform")):
            if getattr(self.config, transform) == "none":
                parameter.abs_()

    def forward(self, length: int, rate: float = 1.0) -> Float[Tensor, "K H M"]:
        """`rate`: as for a signal sampled that many times more coarsely, dt times `rate` (S4, section 3.1)."""
        rate *= self.rate
        limit = length if self.limit is None else round(self.limit / rate)
        length = min(length, limit)
        log_A, B, C = self._discrete(rate)
        W = C * B
        if self.config.disc == "dss":
            return softmax_vandermonde(W, log_A, self.normalised, length, self.C.dtype)
        return vandermonde(_pairs(2 * W, self.C.dtype), log_A.real, log_A.imag, length)

    def _discrete(
        self, rate: float = 1.0
    ) -> tuple[Complex128[Tensor, "H M"], Complex128[Tensor, "H M"], Complex128[Tensor, "K H M"]]:
        """log Abar, Bbar and C."""
        config = self.config
        dt = rate * positive(self.inv_dt.double(), config.dt_transform)
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
        return vandermonde_flops((K, H, M), min(length, self.limit or length), shared=False)

    def system(self) -> System:
        log_A, B, C = self._discrete(self.rate)
        dtype = self.C.dtype.to_complex()
        return System(*(x.to(dtype) for x in (log_A.exp(), B, C[0])))

    def initial_state(self, batch: int) -> Complex[Tensor, "B H M"]:
        _, H, M = self.C.shape[:3]
        return torch.zeros(batch, H, M, dtype=self.C.dtype.to_complex(), device=self.C.device)

    def step(
        self, u: Float[Tensor, "B H"], state: Tensor, system: System
    ) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H M"]]:
        state = system.A * state + system.B * u[..., None]
        return 2 * (system.C * state).sum(-1).real, state

    def response(self, state: Complex[Tensor, "B H M"], length: int) -> Float[Tensor, "B H L"]:
        """The contribution of the state before the first step to the outputs: 2 Re sum_n C_n Abar_n^(l+1) x_n."""
        log_A, _, C = self._discrete()
        return vandermonde(_pairs(2 * C[0] * log_A.exp() * state, self.C.dtype), log_A.real, log_A.imag, length)

    def state_after(
        self, u: Float[Tensor, "B H L"], state: Complex[Tensor, "B H M"] | None = None
    ) -> Complex[Tensor, "B H M"]:
        """The state after a whole input: Abar^L x + sum_l Abar^l Bbar u_(L-1-l)."""
        log_A, B, _ = self._discrete()
        after = B * moments(u.flip(-1), log_A.real, log_A.imag)
        if state is not None:
            after = after + torch.exp(u.shape[-1] * log_A) * state
        return after.to(self.C.dtype.to_complex())

    def import_reference(self, raw: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        """From the S4 repository's `SSMKernelDiag`, or its minimal S4D (log_dt, log_A_real, A_imag, C)."""
        if "log_dt" not in raw:
            return {**raw, "B": raw["B"].reshape(self.B.shape)}
        C = raw["C"][None] if raw["C"].dim() == 3 else raw["C"]
        return {
            "inv_dt": raw["log_dt"][:, None],
            "A_real": raw["log_A_real"],
            "A_imag": raw["A_imag"],
            "B": torch.stack([torch.ones_like(raw["A_imag"]), torch.zeros_like(raw["A_imag"])], dim=-1),
            "C": torch.stack([C[..., 0], -C[..., 1]], dim=-1),
        }

    def export_reference(self, **options: Any) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), "B": self.B[None]}


def _pairs(values: Complex128[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape 2"]:
    return torch.view_as_real(values).to(dtype)


def build(config: Config) -> Backbone:
    def block() -> list[LongConvolution]:
        return [
            LongConvolution(
                config, S4DKernel(config), output=config.output, pre_activation_dropout=config.pre_activation_dropout
            )
        ]

    return Backbone(config, block)
