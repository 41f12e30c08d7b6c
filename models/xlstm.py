"""xLSTM: blocks of mLSTM, whose memory is a matrix, and optionally of sLSTM (Beck et al. 2024, section 2).

    [u, z] = W_up x,   a = silu(conv(u)),   q = W_q a,   k = W_k a / sqrt(P),   v = W_v u   (appendix, figure 10)
    C_t = f_t C_{t-1} + i_t v_t k_t^T,   n_t = f_t n_{t-1} + i_t k_t,   h_t = C_t q_t / max(|n_t^T q_t|, 1)
    i_t = exp(w_i^T g_t + b_i),   f_t = sigmoid or exp of w_f^T g_t + b_f,   for every head   (section 2.3)
    y = W_down (silu(z) (norm(h) + skip a))

W_q, W_k and W_v are block-diagonal, in blocks of four features. g = [W_q a, W_k a, W_v u], of all heads, as in the
authors' code; norm acts on each head. Initial values are those of that code, too.

C and n are stored divided by exp(m_t), m_t = max(log f_t + m_{t-1}, log i_t, 0), and so 1 becomes exp(-m_t). h does not
depend on m, which therefore needs no gradient. (The paper's m has no 0; exp(-m) could overflow.) As m is known before
C, this is linear attention whose inputs and decays are at most 1, with n^T q as one more value. If two-sided, a second
branch from u to norm(h) + skip a runs backwards, with its own parameters; the two are summed. sLSTM is in slstm.py.
Letters: B sequences, L steps, D width, S inner width (`expansion` D), H heads, P width of a head, Q = P + 1.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, BackboneConfig, Context, Counts, Mixer, linear_flops
from spt.models.gated import BlockLinear
from spt.models.mixer import turn
from spt.models.ops.linear_attention import linear_attention, linear_attention_flops, linear_attention_step
from spt.models.ops.precision import at_least_float32, without_autocast
from spt.models.ops.product import Linear
from spt.models.selective import short_convolution
from spt.models.slstm import SLSTM, ForgetGate, GatedFeedForward, HeadNorm, forget_bias, log_forget, start_small

PAPER = "Beck et al. 2024"
COST = "L S (P + D)"
PARAMETERS = 482_624
BLOCK = 4  # features in a block of the maps of queries, keys and values
LEAST = 1e-12  # of exp(-m), so that the normaliser is never zero


class Config(BackboneConfig):
    n_heads: int = Field(4, ge=1, description="number of heads, each with its own memory and gates")
    expansion: int = Field(2, ge=1, description="inner width, as a multiple of d_model")
    convolution: int = Field(4, ge=1, description="length of the short convolution, in steps")
    forget_gate: ForgetGate = Field("sigmoid", description="activation of the forget gate")
    slstm_every: int | None = Field(
        None,
        ge=1,
        description="one in so many blocks is an sLSTM: 8 is the paper's xLSTM[7:1]; default: none, xLSTM[1:0]",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.slstm_every is not None and self.slstm_every > self.n_layers:
            raise ValueError(f"slstm_every {self.slstm_every} has no effect on {self.n_layers} blocks")
        if self.slstm_every is not None and self.d_model % self.n_heads:
            raise ValueError(f"blocks of sLSTM have heads, but d_model {self.d_model} is no multiple of {self.n_heads}")
        if self.inner == self.n_heads or (self.slstm_every is not None and self.d_model == self.n_heads):
            raise ValueError(
                f"n_heads {self.n_heads} leaves heads of one feature, of which their layer norm leaves nothing; choose "
                "fewer heads or a larger d_model"
            )
        return self

    @property
    def inner(self) -> int:
        unit = math.lcm(self.n_heads, BLOCK)
        return max(unit, unit * round(self.expansion * self.d_model / unit))


def mlstm(
    q: Float[Tensor, "B L H P"],
    k: Float[Tensor, "B L H P"],
    v: Float[Tensor, "B L H P"],
    log_i: Float[Tensor, "B L H"],
    log_f: Float[Tensor, "B L H"],
) -> Float[Tensor, "B L H P"]:
    """h_t of every step."""
    with torch.no_grad():  # m_t is the largest max(log i_s, 0) + log f_{s+1} + ... + log f_t, of m_0 = 0 too
        sums = log_f.double().cumsum(1)
        m = sums + (log_i.clamp(min=0) - sums).cummax(1).values.clamp(min=0)
        before = F.pad(m[:, :-1], (0, 0, 1, 0))
    o = linear_attention(q, k, with_ones(v, log_i - m), log_f + before - m)
    return normalised(o, m)


def with_ones(v: Float[Tensor, "*B H P"], log_input: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H Q"]:
    return F.pad(v, (0, 1), value=1.0) * torch.exp(log_input).to(v.dtype)[..., None]


def normalised(o: Float[Tensor, "*B H Q"], m: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H P"]:
    floor = torch.exp(-m).clamp(min=LEAST).to(o.dtype)[..., None]
    return o[..., :-1] / torch.maximum(o[..., -1:].abs(), floor)


class MLSTM(nn.Module):
    """The branch from u, in one direction. Parameters: those of the convolution, of the maps and of the norm; skip
    (S,), ones. Gates start without weights: log i from N(0, 0.1²), f between sigmoid(3) and sigmoid(6), by head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        S, H = config.inner, config.n_heads
        self.heads, self.forget_gate = H, config.forget_gate
        self.convolution = short_convolution(S, config.convolution)
        self.q, self.k, self.v = (BlockLinear(S, S // BLOCK, bias=False) for _ in range(3))
        start_small(config.d_model, self.q, self.k, self.v)
        self.gates = nn.Linear(3 * S, 2 * H)
        with torch.no_grad():
            self.gates.weight.zero_()
            start = forget_bias(torch.linspace(3.0, 6.0, H), config.forget_gate)
            self.gates.bias.copy_(torch.cat([0.1 * torch.randn(H), start]))
        self.norm = HeadNorm(S)
        self.skip = nn.Parameter(torch.ones(S))

    def forward(self, u: Float[Tensor, "B L S"]) -> Float[Tensor, "B L S"]:
        with without_autocast(u):
            u = at_least_float32(u)
            a = F.silu(self.convolution(u))
            return self.norm(mlstm(*self.inputs(u, a))) + self.skip * a

    def inputs(self, u: Float[Tensor, "B *L S"], a: Float[Tensor, "B *L S"]) -> tuple[Tensor, ...]:
        """q, k and v (B, L, H, P), log i and log f (B, L, H), as above."""
        maps = self.q(a), self.k(a), self.v(u)
        log_i, f = self.gates(torch.cat(maps, -1)).chunk(2, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in maps)
        return q, k * k.shape[-1] ** -0.5, v, log_i, log_forget(f, self.forget_gate)

    def initial_state(self, batch: int) -> Any:
        return self.convolution.initial_state(batch), None, self.skip.new_zeros(batch, self.heads)

    def step(self, u: Float[Tensor, "B S"], state: Any) -> tuple[Float[Tensor, "B S"], Any]:
        before, memory, m = state
        with without_autocast(u):
            u = at_least_float32(u)
            convolved, before = self.convolution.step(u, before)
            a = F.silu(convolved)
            q, k, v, log_i, log_f = self.inputs(u, a)
            kept = log_f + m
            m = torch.maximum(kept, log_i).clamp(min=0)
            o, memory = linear_attention_step(q, k, with_ones(v, log_i - m), kept - m, memory)
            return self.norm(normalised(o, m)) + self.skip * a, (before, memory, m)

    def flops(self, length: int) -> Counts:
        S, H = len(self.skip), self.heads
        maps = sum((layer.flops(length) for layer in (self.q, self.k, self.v)), linear_flops(self.gates, length))
        return maps + self.convolution.flops(length) + linear_attention_flops(length, H, S // H, S // H + 1)


class MLSTMBlock(Mixer):
    """Parameters: maps D -> 2 S, of u and z, and S -> D; those of each direction."""

    uncompiled = ("mix",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, S = config.d_model, config.inner
        self.recurrent = config.causal
        self.up, self.down = Linear(D, 2 * S, bias=False), Linear(S, D, bias=False)
        start_small(D, self.up)
        nn.init.normal_(self.down.weight, std=2 / (config.n_layers * math.sqrt(D)))
        self.branches = nn.ModuleList(MLSTM(config) for _ in range(1 if config.causal else 2))

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        u, z = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(z) * self.mix(u, context))

    def mix(self, u: Float[Tensor, "B L S"], context: Context) -> Float[Tensor, "B L S"]:
        y = self.branches[0](u)
        return y if self.recurrent else y + turn(self.branches[1](turn(u, context)), context)

    def flops(self, length: int) -> Counts:
        maps = linear_flops(self.up, length) + linear_flops(self.down, length)
        return sum((branch.flops(length) for branch in self.branches if isinstance(branch, MLSTM)), maps)

    def initial_state(self, batch: int) -> Any:
        branch: Any = self.branches[0]
        return branch.initial_state(batch)

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        branch: Any = self.branches[0]
        u, z = self.up(x).chunk(2, dim=-1)
        y, state = branch.step(u, state)
        return self.down(F.silu(z) * y), state


def build(config: Config) -> Backbone:
    numbers = iter(range(1, config.n_layers + 1))

    def block() -> list[Mixer]:
        number, every = next(numbers), config.slstm_every
        if every is None or number % every:
            return [MLSTMBlock(config)]
        place = (number - 1) / max(1, config.n_layers - 1)
        cell = (config.d_model, config.n_heads, config.convolution, config.forget_gate, place)
        return [SLSTM(*cell, causal=config.causal), GatedFeedForward(config.d_model, config.n_layers)]

    return Backbone(config, block)
