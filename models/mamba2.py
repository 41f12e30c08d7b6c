"""Mamba-2: Mamba with one decay for each head, so that the scan is linear attention (Dao, Gu 2024, sections 5 to 7).

    z, u = W_in x,   B_t, C_t, p_t = W_s x_t,   u', B', C' = silu(convolution([u, B, C])),   dt_t = softplus(p_t + b_dt)
    S_t = exp(dt_t A) S_{t-1} + B'_t (dt_t u'_t)^T,   y_t = S_t^T C'_t + D u'_t,   out = W_out rms_norm(y silu(z))

in each head, which has P of the E features of u, one number A = -exp(A_log) and a step size; all heads share B and C.
In chunks (section 6), most of it is matrix products, with C as queries, B as keys and dt u as values. W_in and W_s are
one matrix in the paper. If two-sided, W_in and W_out are shared, and a second set of everything between them (W_s,
convolution, A, D) runs backwards; the two y are added, and both directions see the present.

Initial values are those of the authors' code: A uniform in [1, 16]; the rest as in Mamba. A, D and b_dt have no weight
decay. Letters: B sequences, L steps, D width, E = H P features (about `expansion` D), H heads, P features of a head, N
states of a feature, K directions.
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
from spt.models.ops.linear_attention import linear_attention, linear_attention_flops, linear_attention_step
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.selective import SelectiveConfig, short_convolution

PAPER = "Dao, Gu 2024"
COST = "L E (D + N)"
PARAMETERS = 681_696
HEAD, HEADS = 64, 4  # features of a head, and fewest heads, by default
CHUNK = 64  # steps; shorter ones have more states between them, of N P numbers a head


class Config(SelectiveConfig):
    d_state: int = Field(128, ge=1, description="number of states N per feature")
    d_head: int | None = Field(
        None,
        ge=1,
        description="features P per head; default: about 64, but fewer if that would give fewer than 4 heads",
    )

    @property
    def heads(self) -> tuple[int, int]:
        """H and P, whose product is as near to `expansion` d_model as they allow."""
        E = self.expansion * self.d_model
        heads = max(1, round(E / self.d_head)) if self.d_head else max(min(HEADS, E), round(E / HEAD))
        return heads, self.d_head or round(E / heads)


class System(NamedTuple):
    """u, and linear attention's inputs: C_t, B_t, dt_t u_t and dt_t A."""

    u: Float[Tensor, "B *L H P"]
    queries: Float[Tensor, "B *L 1 N"]
    keys: Float[Tensor, "B *L 1 N"]
    values: Float[Tensor, "B *L H P"]
    log_decay: Float[Tensor, "B *L H"]


class Direction(nn.Module):
    """Parameters: the map `select` D -> 2 N + H, without bias; those of the convolution of E + 2 N features; dt_bias,
    A_log and D (H,), the last ones."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        (H, P), N = config.heads, config.d_state
        self.states = N
        self.select = Linear(config.d_model, 2 * N + H, bias=False)
        self.convolution = short_convolution(H * P + 2 * N, config.convolution)
        self.dt_bias = new_parameter(parameter_for(log_uniform(config.dt_min, config.dt_max, H), "softplus"))
        self.A_log = new_parameter(torch.empty(H).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(H))
        self.param_groups = dict.fromkeys(("dt_bias", "A_log", "D"), ParamGroup(weight_decay=False))

    def project(self, x: Tensor, u: Tensor) -> tuple[Float[Tensor, "B *L F"], Float[Tensor, "B *L H"]]:
        """u, B and C side by side, and the step sizes."""
        H = len(self.D)
        selected = at_least_float32(self.select(x))
        return torch.cat([u, selected[..., :-H]], dim=-1), F.softplus(selected[..., -H:] + self.dt_bias)

    def system(self, v: Float[Tensor, "B *L F"], dt: Float[Tensor, "B *L H"]) -> System:
        """From what left the convolution."""
        H, N = len(self.D), self.states
        u, B, C = F.silu(v).split([v.shape[-1] - 2 * N, N, N], dim=-1)
        u = u.unflatten(-1, (H, -1))
        decay = torch.exp(at_least_float32(self.A_log))
        return System(u, C.unsqueeze(-2), B.unsqueeze(-2), dt[..., None] * u, -dt * decay)

    def forward(self, x: Tensor, u: Tensor, valid: Bool[Tensor, "B L"] | None, reverse: bool) -> Tensor:
        """y (B, L, H, P). Backwards, padding comes first: nothing enters there."""
        v, dt = self.project(x, u)
        u, q, k, values, log_decay = self.system(self.convolution(v, reverse=reverse), dt)
        if reverse and valid is not None:
            values = torch.where(valid[..., None, None], values, 0.0)
        return linear_attention(q, k, values, log_decay, reverse=reverse, chunk=CHUNK) + self.D[:, None] * u


class Mamba2(Mixer):
    """Parameters: the maps D -> 2 E and E -> D, without bias; the norm's weight (E,); those of each direction."""

    uncompiled = ("mix_states",)
    state_space = ("ssm.",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent = config.causal
        self.heads, self.states = config.heads, config.d_state
        E = math.prod(self.heads)
        self.enter, self.leave = Linear(config.d_model, 2 * E, bias=False), Linear(E, config.d_model, bias=False)
        self.leave.weight.data /= math.sqrt(config.n_layers)
        self.norm = nn.RMSNorm(E, eps=1e-5)
        self.ssm = nn.ModuleList(Direction(config) for _ in range(1 if config.causal else 2))

    @property
    def directions(self) -> list[Direction]:
        return [each for each in self.ssm if isinstance(each, Direction)]

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        z, u = at_least_float32(self.enter(x)).chunk(2, dim=-1)
        return self.read(self.mix_states(x, u, context.valid if context.padded else None), z)

    def mix_states(self, x: Tensor, u: Tensor, valid: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L H P"]:
        """The sum of y over the directions."""
        first, *backwards = self.directions
        return sum((each(x, u, valid, True) for each in backwards), first(x, u, valid, False))

    def read(self, y: Float[Tensor, "B *L H P"], z: Float[Tensor, "B *L E"]) -> Float[Tensor, "B *L D"]:
        return self.leave(self.norm(y.flatten(-2) * F.silu(z)))

    def flops(self, length: int) -> Counts:
        counts = linear_flops(self.enter, length) + linear_flops(self.leave, length)
        for ssm in self.directions:
            counts += linear_flops(ssm.select, length) + ssm.convolution.flops(length)
            H, P = self.heads
            counts += linear_attention_flops(length, H, self.states, P, groups=1, chunk=CHUNK)
        return counts

    def initial_state(self, batch: int) -> Any:
        return self.directions[0].convolution.initial_state(batch), None

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        before, S = state
        ssm = self.directions[0]
        z, u = at_least_float32(self.enter(x)).chunk(2, dim=-1)
        v, dt = ssm.project(x, u)
        v, before = ssm.convolution.step(v, before)
        u, q, k, values, log_decay = ssm.system(v, dt)
        y, S = linear_attention_step(q, k, values, log_decay, S)
        return self.read(y + ssm.D[:, None] * u, z), (before, S)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [Mamba2(config)])
