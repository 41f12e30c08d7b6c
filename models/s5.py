"""S5: one diagonal state space for all features, computed as a scan (Smith, Warrington, Linderman 2023).

In its eigenbasis, the system of section 3.1 and its discrete form (zero-order hold):

    x' = Lambda x + B u,   y = Re(C x) + D u
    x_t = exp(Lambda Delta) x_{t-1} + Lambda^-1 (exp(Lambda Delta) - 1) B u_t

with a step size Delta for every state.

Letters: B sequences, L steps, H features, P state size, P' states that are stored (P / 2 where each represents a
conjugate pair), J blocks of the initial state matrix, K directions.
"""

import math
from typing import Literal

import torch
from jaxtyping import Complex, Complex128, Float, Float64
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, BackboneConfig, Context, ParamGroup, Unsupported, new_parameter
from spt.models.mixer import State
from spt.models.ops import hippo
from spt.models.ops.flax import dense_, lecun_normal_
from spt.models.ops.output import Kind, Output
from spt.models.ops.scan import Discretisation, discretise, discretise_steps, enter, leave, scan
from spt.models.options import NormKind
from spt.models.recurrence import DiagonalRecurrence, System, with_flax_norms

StateMatrix = Literal["hippo_n", "gaussian", "antisymmetric", "s4d_lin", "s4d_inv"]
Activation = Literal["gelu", "full_glu", "half_glu1", "half_glu2"]

MAX_REAL = -1e-4  # of an eigenvalue, with clip_eigs
OUTPUTS: dict[Activation, Kind] = {
    "gelu": "none",
    "full_glu": "glu",
    "half_glu1": "half_glu1",
    "half_glu2": "half_glu2",
}

PAPER = "Smith, Warrington, Linderman 2023"
COST = "L D (N + D)"
PARAMETERS = 462_336


class Config(BackboneConfig):
    norm: NormKind = Field("batch", description="normalisation: batch or layer (as in the paper), rms, scalar, none")
    norm_momentum: float = Field(
        0.05, gt=0, le=1, description="batch norm: weight of the new batch (1 - flax's momentum)"
    )
    norm_unbiased: bool = Field(
        False, description="batch norm: divide the running variance by n - 1 (torch), not n (flax)"
    )
    last_norm: bool | None = Field(False, description="a norm after the last block")
    tie_dropout: bool = Field(True, description="one dropout mask for all steps of a sequence")
    d_state: int = Field(256, ge=1, description="state size P, shared by all features")
    blocks: int = Field(
        8, ge=1, description="number of equal blocks J in the initial state matrix; must divide d_state"
    )
    conj_sym: bool = Field(True, description="store one state of each conjugate pair")
    disc: Discretisation = Field("zoh", description="discretisation: zero-order hold or bilinear")
    c_init: Literal["trunc_standard_normal", "lecun_normal", "complex_normal"] = Field(
        "trunc_standard_normal",
        description="initial output matrix: variance 1/P or 1/(H P) before the change to the eigenbasis, or 1/2 in it",
    )
    dt_min: float = Field(0.001, gt=0, description="smallest initial step size")
    dt_max: float = Field(0.1, gt=0, description="largest initial step size")
    shared_dt: bool = Field(False, description="one step size for all states instead of one each (ablation)")
    step_rescale: float = Field(
        1.0, gt=0, description="factor applied to step sizes: 2 for data at half the sampling rate"
    )
    clip_eigs: bool = Field(False, description="clip the real parts of the eigenvalues at -1e-4")
    activation: Activation = Field("half_glu1", description="what follows the state space: gelu, or one of three gates")
    state_matrix: StateMatrix = Field(
        "hippo_n", description="initial state matrix: HiPPO-N or, for ablations, a random one or one of S4D's"
    )
    parameterisation: Literal["continuous", "discrete"] = Field(
        "continuous", description="discrete: train the discretised system, without step sizes (ablation)"
    )
    ssm_lr: float | None = Field(
        1e-3, gt=0, description="learning rate of the state space, which has no weight decay; null: the recipe's"
    )
    opt_config: Literal["standard", "BandCdecay", "BfastandCdecay", "noBCdecay"] = Field(
        "standard",
        description="standard: eigenvalues, B and step sizes train at ssm_lr; BandCdecay: B also with weight decay; "
        "BfastandCdecay: B at the recipe's learning rate; noBCdecay: C and D at ssm_lr too",
    )
    dt_global: bool = Field(False, description="train step sizes at the recipe's learning rate, with weight decay")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.d_state % self.blocks:
            raise ValueError(f"d_state {self.d_state} is not a multiple of blocks {self.blocks}")
        size = self.d_state // self.blocks
        if size % 2 and (self.conj_sym or self.state_matrix.startswith("s4d")):
            option = "conj_sym" if self.conj_sym else f"state_matrix {self.state_matrix}"
            raise ValueError(f"{option} takes eigenvalues in pairs, but a block has {size} of them (d_state / blocks)")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is above dt_max {self.dt_max}")
        if self.parameterisation == "discrete":
            for name in ("clip_eigs", "dt_global"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for continuous time, but parameterisation is discrete")
            if self.step_rescale != 1.0:
                raise ValueError("step_rescale is for continuous time, but parameterisation is discrete")
        return self


Gaps = tuple[Float[Tensor, "B L"], Float[Tensor, "B L"]]  # the time from each step to the one before and the one after


class S5(DiagonalRecurrence):
    """The S5 layer without norm and skip connection: state space, then GELU or gate.

    Parameters: Lambda_re, Lambda_im (P',); B (P', H, 2); C (K, H, P', 2); D (H,); log_step (P',), or (1,) if shared. In
    discrete time, Lambda and B are those of the recurrence. Both directions share Lambda and B and see the present.
    """

    state_space = ("Lambda", "B", "C", "log_step")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.recurrent = config.causal
        H, P, K = config.d_model, config.d_state, 1 if config.causal else 2
        Lambda, V, inverse = initial_eigenbasis(config.state_matrix, P, config.blocks, config.conj_sym)
        B = inverse @ _lecun((P, H), fan_in=P).to(V.dtype)
        steps = 1 if config.shared_dt else len(Lambda)
        log_step = torch.empty(steps, dtype=torch.float64).uniform_(math.log(config.dt_min), math.log(config.dt_max))
        if config.c_init == "complex_normal":
            C = torch.randn(K, H, len(Lambda), 2, dtype=torch.float64) * math.sqrt(0.5)
        else:
            fan_in = P if config.c_init == "trunc_standard_normal" else H * P
            C = torch.view_as_real(torch.view_as_complex(_lecun((K, H, P, 2), fan_in)) @ V)
        if config.parameterisation == "discrete":
            Lambda, f = discretise(Lambda, torch.exp(log_step), config.disc)
            B = f[:, None] * B
        self.Lambda_re, self.Lambda_im = new_parameter(Lambda.real), new_parameter(Lambda.imag)
        self.B, self.C = new_parameter(torch.view_as_real(B)), new_parameter(C)
        self.D = nn.Parameter(torch.randn(H))
        self.log_step = new_parameter(log_step) if config.parameterisation == "continuous" else None
        self.uses_step_times = self.log_step is not None
        self.rate = 1.0  # time between steps now over that in training
        kind = OUTPUTS[config.activation]
        dropout = 0.0 if kind == "none" else config.dropout  # without a gate the stack's dropout is the only one
        self.output = Output(H, kind, gelu="tanh", dropout=dropout, tied=config.tie_dropout)
        if self.output.linear is not None:
            dense_(self.output.linear)
        self.param_groups = self._param_groups()

    def _param_groups(self) -> dict[str, ParamGroup]:
        """The S5 repository's `opt_config`; parameters without an entry have the recipe's rate and weight decay."""
        config = self.config
        ssm, default = ParamGroup(lr=config.ssm_lr, weight_decay=False), ParamGroup(weight_decay=True)
        groups = {"Lambda_re": ssm, "Lambda_im": ssm, "B": ssm, "C": default, "D": default}
        if self.log_step is not None:
            groups["log_step"] = default if config.dt_global else ssm
        if config.opt_config == "BandCdecay":
            groups["B"] = ParamGroup(lr=config.ssm_lr, weight_decay=True)
        elif config.opt_config == "BfastandCdecay":
            groups["B"] = default
        elif config.opt_config == "noBCdecay":
            groups |= {"C": ssm, "D": ssm}
        return groups

    @torch.no_grad()
    def after_initialisation(self) -> None:
        """Mirror the growing modes of a random initialisation: they decay at the same rate instead."""
        if self.log_step is not None:
            self.Lambda_re.copy_(-self.Lambda_re.abs())

    def rescale(self, rate: float) -> None:
        if self.log_step is None:
            raise Unsupported("parameterisation discrete has no step size to change")
        self.rate = rate

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.mix_sequence(x, None if context.steps is None else gaps_around(context)))

    def mix_sequence(self, u: Float[Tensor, "B L H"], gaps: Gaps | None = None) -> Float[Tensor, "B L H"]:
        return super().mix_sequence(u) if gaps is None else self.read(u, self.states(u, gaps))

    def states(self, u: Float[Tensor, "B L H"], gaps: Gaps | None = None) -> list[Complex[Tensor, "B L P"]]:
        if gaps is None:
            return super().states(u)
        if self.log_step is None:
            raise ValueError("irregular steps need a step size, but parameterisation is discrete")
        v = enter(u, torch.view_as_complex(self.B))
        states = []
        for k in range(len(self.C)):
            a, b = discretise_steps(self.Lambda, self.Delta, gaps[k].to(self.D.dtype), v, self.config.disc)
            states.append(scan(a, b, reverse=bool(k)))
        return states

    @property
    def Lambda(self) -> Complex128[Tensor, " P"]:
        """Eigenvalues, clipped if asked for."""
        real = self.Lambda_re.clamp(max=MAX_REAL) if self.config.clip_eigs else self.Lambda_re
        return torch.complex(real.double(), self.Lambda_im.double())

    @property
    def Delta(self) -> Float64[Tensor, " P"]:
        assert self.log_step is not None, "continuous time"
        return self.rate * self.config.step_rescale * torch.exp(self.log_step.double())

    def system(self) -> System:
        B = torch.view_as_complex(self.B)
        if self.log_step is None:
            return System(self.Lambda, B, self.output_matrix())
        a, f = discretise(self.Lambda, self.Delta, self.config.disc)
        return System(a, f.to(B.dtype)[:, None] * B, self.output_matrix())

    def output_matrix(self) -> Complex[Tensor, "K H P"]:
        """C, doubled where a state represents a pair."""
        return torch.view_as_complex(self.C) * (2 if self.config.conj_sym else 1)

    def step(
        self, x: Float[Tensor, "B H"], state: State, gap: Float[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "B H"], State]:
        """`gap`: the time since the previous step, where it is not 1; 1 at the first step."""
        if gap is None:
            return super().step(x, state)
        v = enter(x, torch.view_as_complex(self.B))[:, None]
        a, b = discretise_steps(self.Lambda, self.Delta, gap[:, None], v, self.config.disc)
        hidden = a[:, 0] * state.hidden + b[:, 0]
        return self.output(self.D * x + leave(hidden, state.system.leave[0])), State(state.system, hidden)


def gaps_around(context: Context) -> Gaps:
    """The time from each step to the one before it and to the one after it; 1 where there is none in the sequence.

    Forward states use the first, backward states the second (S5, appendix on irregular sampling); neither depends on
    the values at padding.
    """
    assert context.steps is not None
    valid, steps = context.valid, context.steps
    ones = torch.ones_like(steps[:, :1])
    before = torch.where(valid[:, 1:] & valid[:, :-1], steps[:, 1:], 1.0)
    return torch.cat([ones, before], 1), torch.cat([before, ones], 1)


def initial_eigenbasis(
    kind: StateMatrix, P: int, J: int, conj_sym: bool
) -> tuple[Complex128[Tensor, " M"], Complex128[Tensor, "P M"], Complex128[Tensor, "M P"]]:
    """Eigenvalues Lambda, eigenvectors V (columns) and the rows of V^-1 of J blocks on the diagonal; with `conj_sym`
    only the M = P / 2 of negative imaginary part, else M = P.

    HiPPO-N is repeated (section 4.3). The paper's ablations (appendix E.2, E.3) name the others without a formula.
    Here: `gaussian` has entries N(0, J / P), its growing modes mirrored into decaying ones; with `conj_sym` half of its
    real eigenvalues stand for all, as one of a pair does. `antisymmetric` is (G - G^T) / sqrt 2 of such a G. Each block
    draws its own. S4D's replace only the eigenvalues.
    """
    size = P // J
    M = size // 2 if conj_sym else size
    random = kind in ("gaussian", "antisymmetric")
    blocks = [_block(kind, size) for _ in range(J)] if random else [_block(kind, size)] * J
    Lambda = torch.cat([w[:M] for w, _, _ in blocks])
    V = torch.block_diag(*[V[:, :M] for _, V, _ in blocks])
    return Lambda, V, torch.block_diag(*[inverse[:M] for _, _, inverse in blocks])


def _block(kind: StateMatrix, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues in the order of their imaginary parts, eigenvectors, and the inverse of these."""
    if kind in ("gaussian", "antisymmetric"):
        G = torch.randn(size, size, dtype=torch.float64) / math.sqrt(size)
        if kind == "antisymmetric":
            w, V = torch.linalg.eigh(-1j * (G - G.T) / math.sqrt(2))
            return 1j * w, V, V.mH
        w, V = torch.linalg.eig(G)
        order = torch.argsort(w.imag)
        w, V = torch.complex(-w.real.abs(), w.imag)[order], V[:, order]
        return w, V, torch.linalg.inv(V)
    w, V = hippo.normal_part(size)
    if kind in ("s4d_lin", "s4d_inv"):
        half = hippo.diagonal("lin" if kind == "s4d_lin" else "inv", size)[0][0]
        w = torch.cat([half, half.conj().flip(0)])  # the basis' columns are in the order of imaginary parts
    return w, V, V.mH


def _lecun(shape: tuple[int, ...], fan_in: int) -> Float64[Tensor, "*shape"]:
    return lecun_normal_(torch.empty(shape, dtype=torch.float64), fan_in)


def build(config: Config) -> Backbone:
    return Backbone(with_flax_norms(config), lambda: [S5(config)], decay_all=True)
