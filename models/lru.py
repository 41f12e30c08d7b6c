"""LRU, the linear recurrent unit: a diagonal recurrence trained in discrete time (Orvieto et al. 2023).

Letters: B sequences, L steps, H features, N states, K directions. x_t = lambda x_{t-1} + gamma B u_t and
y_t = Re(C x_t) + D u_t, with lambda = exp(-exp(nu) + i exp(theta)) (section 3 of the paper).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Complex128, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import (
    Backbone,
    BackboneConfig,
    Context,
    Counts,
    Mixer,
    ParamGroup,
    ReferenceTensors,
    new_parameter,
)
from spt.models.ops import counts
from spt.models.ops.output import Output
from spt.models.ops.scan import enter, impulse_response, leave, scan
from spt.models.options import NormKind

PAPER = "Orvieto et al. 2023"
COST = "L D (N + D)"
PARAMETERS = 528_384


class Config(BackboneConfig):
    norm: NormKind = Field("batch", description="normalisation: batch or layer in the paper; rms, scalar, none")
    norm_unbiased: bool = Field(
        False, description="batch norm: running variance divided by n - 1 (torch), not n (flax)"
    )
    last_norm: bool | None = Field(False, description="a norm after the last block")
    tie_dropout: bool = Field(True, description="one dropout mask for all steps of a sequence")
    d_state: int = Field(128, ge=1, description="states N")
    r_min: float = Field(0.0, ge=0, lt=1, description="smallest initial modulus of an eigenvalue")
    r_max: float = Field(1.0, gt=0, le=1, description="largest initial modulus of an eigenvalue")
    max_phase: float = Field(6.28, gt=0, description="largest initial angle of an eigenvalue; 2 pi / 10 for Path-X")
    ssm_lr_factor: float = Field(
        0.5, gt=0, description="learning rate of nu, theta, gamma and B over the recipe's; these have no weight decay"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.r_min >= self.r_max:
            raise ValueError(f"r_min {self.r_min} is not below r_max {self.r_max}: the ring of eigenvalues is empty")
        return self


class System(NamedTuple):
    """x_t = a x_{t-1} + enter u_t, y_t = Re(leave x_t) + D u_t."""

    a: Complex128[Tensor, " N"]
    enter: Complex[Tensor, "N H"]
    leave: Complex[Tensor, "K H N"]


class State(NamedTuple):
    """State of the recurrent form."""

    system: System
    hidden: Complex[Tensor, "B N"]


class LRU(Mixer):
    """The recurrence, then GELU and GLU; without norm and skip.

    Parameters: nu, theta, gamma (N,), logarithms; B (N, H, 2); C (K, H, N, 2); D (H,). The paper's model is causal.
    Two-sided, a second C reads the same recurrence run backwards; both directions see the present, as in S5.
    """

    state_space = ("nu", "theta", "gamma", "B", "C")
    uncompiled = ("mix_sequence",)

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
        ssm = ParamGroup(lr_scale=config.ssm_lr_factor, weight_decay=False)
        self.param_groups = dict.fromkeys(("nu", "theta", "gamma", "B"), ssm)
        self.param_groups |= dict.fromkeys(("C", "D"), ParamGroup(weight_decay=True))

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.mix_sequence(x))

    def mix_sequence(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """y, before the activation."""
        y = self.D * u
        for x, c in zip(self.states(u), self._leave(), strict=True):
            y = y + leave(x, c)
        return y

    def states(self, u: Float[Tensor, "B L H"]) -> list[Complex[Tensor, "B L N"]]:
        """x_t of every direction."""
        system = self.system()
        v = enter(u, system.enter)
        return [scan(system.a, v, reverse=bool(k)) for k in range(len(self.C))]

    def system(self) -> System:
        """The recurrence; lambda in double precision, because powers of it are taken."""
        exponent = torch.complex(-torch.exp(self.nu.double()), torch.exp(self.theta.double()))
        enters = torch.exp(self.gamma)[:, None] * torch.view_as_complex(self.B)
        return System(torch.exp(exponent), enters, self._leave())

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K C M"]]:
        system = self.system()
        return impulse_response(system.a, system.enter, system.leave, length)

    def _leave(self) -> Complex[Tensor, "K H N"]:
        return torch.view_as_complex(self.C)

    def flops(self, length: int) -> Counts:
        """B u once; the scan and Re C x in each direction."""
        K, H, N, _ = self.C.shape
        complex_maps = counts.linear(length, H, 2 * N) + K * counts.linear(length, 2 * N, H)
        return complex_maps + K * counts.scan(length, N) + self.output.flops(length)

    def initial_state(self, batch: int) -> State:
        system = self.system()
        return State(system, torch.zeros(batch, len(system.a), dtype=system.enter.dtype, device=system.a.device))

    def step(self, x: Float[Tensor, "B H"], state: State) -> tuple[Float[Tensor, "B H"], State]:
        system = state.system
        hidden = system.a.to(state.hidden.dtype) * state.hidden + enter(x, system.enter)
        return self.output(self.D * x + leave(hidden, system.leave[0])), State(system, hidden)

    def import_reference(self, raw: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        """From nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im and D, alone or as `seq.*` beside `out1.*` and
        `out2.*`; a second direction, which the published code does not have, from C2_re and C2_im."""
        raw = ReferenceTensors({name.removeprefix("seq."): tensor for name, tensor in raw.items()})
        ours = {name: raw[f"{name}_log"] for name in ("nu", "theta", "gamma")}
        ours["B"] = torch.stack([raw["B_re"], raw["B_im"]], -1)
        names = ("C", "C2")[: len(self.C)]
        ours["C"] = torch.stack([torch.stack([raw[f"{name}_re"], raw[f"{name}_im"]], -1) for name in names])
        dense = {f"output.{name}": tensor for name, tensor in self.output.import_dense(raw).items()}
        return ours | {"D": raw["D"]} | dense

    def export_reference(self, **options: Any) -> dict[str, Tensor]:
        """`seq.*`, `out1.*` and `out2.*`, as in the unofficial repository minimal-LRU."""
        theirs = {f"{name}_log": getattr(self, name) for name in ("nu", "theta", "gamma")} | {"D": self.D}
        for name, tensor in (("B", self.B), *zip(("C", "C2"), self.C, strict=False)):
            theirs |= {f"{name}_re": tensor[..., 0], f"{name}_im": tensor[..., 1]}
        return {f"seq.{name}": tensor for name, tensor in theirs.items()} | self.output.export_dense()


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [LRU(config)], decay_all=True)
