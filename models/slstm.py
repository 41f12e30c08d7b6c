"""sLSTM, a block of xLSTM whose gates see the state, and the feed-forward layer behind it (Beck et al. 2024).

    c_t = f_t c_{t-1} + i_t tanh(z_t),   n_t = f_t n_{t-1} + i_t,   h_t = sigmoid(o_t) c_t / n_t   (section 2.2)
    i_t = exp(W_i u_t + R_i h_{t-1}),   f_t = sigmoid or exp of W_f u_t + R_f h_{t-1} + b_f

z_t and o_t are such maps of the input x_t, with biases; u = silu(conv(x)). W and R have a block for each head. The
paper has a bias in i too, which cancels in c / n. Both of these are kept divided by exp(m_t), m_t = max(log f_t +
m_{t-1}, log i_t); h does not depend on m, which therefore needs no gradient. The block's output is h, normalised in
each head (appendix, figure 9). Gates that see h make this a loop over the steps: on one thread of a CPU, both
passes over 4 sequences of 1,024 steps at D = 64 take 0.24 s, those of an mLSTM block 0.07 s. If two-sided, a second one
runs backwards; the two are summed. Initial values are those of the authors' code. Letters: B sequences, L steps, D
width, H heads, P width of a head, G = 4 P.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.gated import BlockLinear
from spt.models.mixer import Context, Mixer, PointwiseMixer, linear_flops, turn
from spt.models.ops.counts import Counts
from spt.models.ops.precision import at_least_float32, without_autocast
from spt.models.ops.product import Linear
from spt.models.selective import short_convolution

ForgetGate = Literal["sigmoid", "exponential"]
EPS = 1e-5  # of the norm in each head


def log_forget(argument: Tensor, gate: ForgetGate) -> Tensor:
    return F.logsigmoid(argument) if gate == "sigmoid" else argument


def forget_bias(start: Tensor, gate: ForgetGate) -> Tensor:
    """With which gates start at sigmoid(start), whatever their activation."""
    return start if gate == "sigmoid" else F.logsigmoid(start)


def start_small(d_model: int, *layers: BlockLinear | Linear) -> None:
    for layer in layers:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (5 * d_model)))


class HeadNorm(nn.Module):
    """A layer norm of each head. Parameter: weight (S,), ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h: Float[Tensor, "*B H P"]) -> Float[Tensor, "*B S"]:
        return F.layer_norm(h, h.shape[-1:], eps=EPS).flatten(-2) * self.weight


class Memory(NamedTuple):
    """All of (H, B, P)."""

    c: Tensor
    n: Tensor
    m: Tensor
    h: Tensor


class Cell(nn.Module):
    """One direction. Parameters: those of the convolution, of the maps of z, i, f and o, and of the norm; R (H, P, G),
    zero. Forget gates start at sigmoid(5 - 12 x^(0.3 + 1.3 `place`)), x from 0 to 1 over the features of a head."""

    def __init__(self, d_model: int, heads: int, convolution: int, gate: ForgetGate, place: float) -> None:
        super().__init__()
        P = d_model // heads
        self.heads, self.gate = heads, gate
        self.convolution = short_convolution(d_model, convolution)
        self.z, self.f, self.o = (BlockLinear(d_model, heads) for _ in range(3))
        self.i = BlockLinear(d_model, heads, bias=False)
        start_small(d_model, self.z, self.i, self.f, self.o)
        start = 5.0 - 12.0 * torch.linspace(0.0, 1.0, P) ** (0.3 + 1.3 * place)
        self.f.bias = nn.Parameter(forget_bias(start, gate).repeat(heads))
        self.R = nn.Parameter(torch.zeros(heads, P, 4 * P))
        self.norm = HeadNorm(d_model)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        with without_autocast(x):
            x = at_least_float32(x)
            inputs = self.inputs(x, self.convolution(x)).permute(1, 2, 0, 3)
            memory, states = self.empty(len(x)), []
            for each in inputs.unbind(0):
                memory = self.advance(each, memory)
                states.append(memory.h)
            return self.norm(torch.stack(states).permute(2, 0, 1, 3))

    def inputs(self, x: Float[Tensor, "B *L D"], convolved: Float[Tensor, "B *L D"]) -> Float[Tensor, "B *L H G"]:
        """W and b of z, i, f and o, side by side in each head."""
        u = F.silu(convolved)
        return torch.cat(
            [
                layer(v).unflatten(-1, (self.heads, -1))
                for layer, v in ((self.z, x), (self.i, u), (self.f, u), (self.o, x))
            ],
            dim=-1,
        )

    def empty(self, batch: int) -> Memory:
        zero = self.R.new_zeros(self.heads, batch, self.R.shape[1])
        return Memory(zero, zero, torch.full_like(zero, -torch.inf), zero)

    def advance(self, inputs: Float[Tensor, "H B G"], memory: Memory) -> Memory:
        z, log_i, f, o = torch.baddbmm(inputs, memory.h, self.R).chunk(4, dim=-1)
        log_f = log_forget(f, self.gate)
        m = torch.maximum(log_f + memory.m, log_i).detach()
        kept, enters = torch.exp(log_f + memory.m - m), torch.exp(log_i - m)
        c = kept * memory.c + enters * torch.tanh(z)
        n = kept * memory.n + enters
        return Memory(c, n, m, torch.sigmoid(o) * c / n)

    def flops(self, length: int) -> Counts:
        maps = sum((layer.flops(length) for layer in (self.z, self.i, self.f, self.o)), Counts())
        return maps + self.convolution.flops(length) + Counts.of("linear", 2.0 * length * self.R.numel())


class SLSTM(Mixer):
    """`place`: of the block in the model, from 0, the first, to 1, the last. Parameters: those of each direction."""

    uncompiled = ("mix",)  # a loop over the steps

    def __init__(
        self, d_model: int, heads: int, convolution: int, gate: ForgetGate, place: float, *, causal: bool
    ) -> None:
        super().__init__()
        self.recurrent = causal
        self.cells = nn.ModuleList(Cell(d_model, heads, convolution, gate, place) for _ in range(1 if causal else 2))

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.mix(x, context)

    def mix(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        y = self.cells[0](x)
        return y if self.recurrent else y + turn(self.cells[1](turn(x, context)), context)

    def flops(self, length: int) -> Counts:
        return sum((cell.flops(length) for cell in self.cells if isinstance(cell, Cell)), Counts())

    def initial_state(self, batch: int) -> Any:
        cell: Any = self.cells[0]
        return cell.convolution.initial_state(batch), cell.empty(batch)

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        cell: Any = self.cells[0]
        before, memory = state
        with without_autocast(x):
            x = at_least_float32(x)
            u, before = cell.convolution.step(x, before)
            memory = cell.advance(cell.inputs(x, u).transpose(0, 1), memory)
            return cell.norm(memory.h.transpose(0, 1)), (before, memory)


class GatedFeedForward(PointwiseMixer):
    """W_down (gelu(W_g x) W_u x), 1.3 times as wide inside: the authors' code's width before it is rounded up to a
    multiple of 64. In the paper it is 4/3 (appendix, figure 9)."""

    def __init__(self, d_model: int, n_layers: int) -> None:
        super().__init__()
        width = -(-13 * d_model // 10)
        self.up, self.down = Linear(d_model, 2 * width, bias=False), Linear(width, d_model, bias=False)
        start_small(d_model, self.up)
        nn.init.normal_(self.down.weight, std=2 / (n_layers * math.sqrt(d_model)))

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * value)

    def flops(self, length: int) -> Counts:
        return linear_flops(self.up, length) + linear_flops(self.down, length)
