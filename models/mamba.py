"""Mamba: a state space whose step sizes, inputs and outputs depend on the input (Gu, Dao 2023, sections 3.2 to 3.6).

    u, z = W_in x,   u' = silu(convolution(u)),   p_t, B_t, C_t = W_x u'_t,   dt_t = softplus(W_dt p_t + b_dt)
    h_t = exp(dt_t A) h_{t-1} + dt_t u'_t B_t,   y_t = h_t C_t + D u'_t,   out = W_out (y silu(z))

for each feature of u, with N states each; A = -exp(A_log). The block has no feed-forward layer. The two-sided form is
Vision Mamba's (Zhu et al. 2024, section 3.3): W_in and W_out are shared, and a second set of everything between them
(convolution, W_x, W_dt, A, D) runs backwards; the two y are added. Both directions see the present.

Initial values are those of the authors' code: A = -1, ..., -N; dt log-uniform in [dt_min, dt_max]; W_out divided by
sqrt(number of layers). A, D and b_dt have no weight decay. Letters: B sequences, L steps, D width, E features
(`expansion` D), N states, R width of p, K directions.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from spt.models.base import Backbone, Context, Counts, Mixer, ParamGroup, linear_flops, new_parameter
from spt.models.ops.discretise import log_uniform, parameter_for
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.ops.selective_scan import selective_scan, selective_scan_flops
from spt.models.selective import SelectiveConfig, short_convolution

PAPER = "Gu, Dao 2023"
COST = "L E (D + N)"
PARAMETERS = 539_264


class Config(SelectiveConfig):
    inner_widths = ("d_ff", "dt_rank")

    d_state: int = Field(16, ge=1, description="number of states N per feature")
    dt_rank: int | None = Field(
        None, ge=1, description="width R of p, which step sizes are computed from; default: D / 16, rounded up"
    )


class Selection(NamedTuple):
    """What depends on the input, besides the input itself."""

    dt: Float[Tensor, "B *L E"]
    B: Float[Tensor, "B *L N"]
    C: Float[Tensor, "B *L N"]


class Direction(nn.Module):
    """Parameters: those of the convolution; the maps `select` E -> R + 2 N (W_x), without bias, and `dt` R -> E;
    A_log (E, N); D (E,), ones."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        E, N = config.expansion * config.d_model, config.d_state
        R = config.dt_rank or math.ceil(config.d_model / 16)
        self.convolution = short_convolution(E, config.convolution)
        self.select, self.dt = Linear(E, R + 2 * N, bias=False), Linear(R, E)
        nn.init.uniform_(self.dt.weight, -(R**-0.5), R**-0.5)
        self.dt.bias = new_parameter(parameter_for(log_uniform(config.dt_min, config.dt_max, E), "softplus"))
        self.A_log = new_parameter(torch.arange(1, N + 1).log().repeat(E, 1))
        self.D = nn.Parameter(torch.ones(E))
        self.param_groups = dict.fromkeys(("dt.bias", "A_log", "D"), ParamGroup(weight_decay=False))

    @property
    def A(self) -> Float[Tensor, "E N"]:
        return -torch.exp(at_least_float32(self.A_log))

    def selection(self, u: Float[Tensor, "B *L E"]) -> Selection:
        N = self.A_log.shape[1]
        p, B, C = self.select(u).split([self.dt.in_features, N, N], dim=-1)
        dt = at_least_float32(F.linear(p, self.dt.weight)) + self.dt.bias  # in bfloat16 the sum would lose small steps
        return Selection(F.softplus(dt), at_least_float32(B), at_least_float32(C))

    def forward(self, u: Float[Tensor, "B L E"], valid: Bool[Tensor, "B L"] | None, reverse: bool) -> Tensor:
        """y (B, L, E). Backwards, padding comes first: nothing enters there."""
        u = F.silu(self.convolution(u, reverse=reverse))
        if reverse and valid is not None:
            u = torch.where(valid[..., None], u, 0.0)
        dt, B, C = self.selection(u)
        return torch.addcmul(selective_scan(u, dt, self.A, B, C, reverse=reverse), u, self.D)


class Mamba(Mixer):
    """Parameters: the maps D -> 2 E `enter` (W_in) and E -> D `leave` (W_out), without bias, and those of each
    direction."""

    uncompiled = ("mix_states",)
    state_space = ("ssm.",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent = config.causal
        E = config.expansion * config.d_model
        self.enter, self.leave = Linear(config.d_model, 2 * E, bias=False), Linear(E, config.d_model, bias=False)
        self.leave.weight.data /= math.sqrt(config.n_layers)
        self.ssm = nn.ModuleList(Direction(config) for _ in range(1 if config.causal else 2))

    @property
    def directions(self) -> list[Direction]:
        return [each for each in self.ssm if isinstance(each, Direction)]

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        u, z = at_least_float32(self.enter(x)).chunk(2, dim=-1)
        return self.leave(self.mix_states(u, context.valid if context.padded else None) * F.silu(z))

    def mix_states(self, u: Float[Tensor, "B L E"], valid: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L E"]:
        """The sum of y over the directions."""
        first, *backwards = self.directions
        return sum((each(u, valid, True) for each in backwards), first(u, valid, False))

    def flops(self, length: int) -> Counts:
        counts = linear_flops(self.enter, length) + linear_flops(self.leave, length)
        for ssm in self.directions:
            counts += ssm.convolution.flops(length) + linear_flops(ssm.select, length) + linear_flops(ssm.dt, length)
            counts += selective_scan_flops(length, *ssm.A_log.shape)
        return counts

    def initial_state(self, batch: int) -> Any:
        ssm = self.directions[0]
        return ssm.convolution.initial_state(batch), ssm.A_log.new_zeros(batch, *ssm.A_log.shape)

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        before, h = state
        ssm = self.directions[0]
        u, z = at_least_float32(self.enter(x)).chunk(2, dim=-1)
        u, before = ssm.convolution.step(u, before)
        u = F.silu(u)
        dt, B, C = ssm.selection(u)
        h = torch.exp(dt[..., None] * ssm.A) * h + (dt * u)[..., None] * B[:, None]
        y = (h @ C[..., None]).squeeze(-1) + ssm.D * u
        return self.leave(y * F.silu(z)), (before, h)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [Mamba(config)])
