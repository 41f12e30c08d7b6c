"""Mega: exponential moving averages, single-head attention over them, and a gate in place of the skip connection.

Ma, Zhou, Kong, He, Gui, Neubig, May, Zettlemoyer 2023, "Mega: moving average equipped gated attention". With the stream
X and its normalised form x (X itself if the norm comes after the block), a block is, as in section 3 of the paper,

    m = drop silu(conv(x, k) + omega x)           k[l] = n^-1/2 sum_j p_j beta_j gamma_j q_j^l
                                                  p = sigmoid(delta), q = 1 - p sigmoid(alpha)
    v = silu(W_v x),  [u z r h] = W_m m           widths E; D, Z, E, D; then u <- sigmoid(u), z <- silu(z), r <- silu(r)
    a_t = z_t gamma_0 + beta_0,  b_t = z_t gamma_1 + beta_1       queries and keys, with a gamma and beta of their own
    S = f(a b^T / tau + bias)                     one head, bias by distance alone
    X <- X + u (drop silu(h + W_h (r S v)) - X)

followed by a feed-forward layer. If two-sided, each direction has a kernel, and both see the present. f is one of

    softmax    tau = sqrt(Z)
    laplace    (1 + erf((s - mu) / (sigma sqrt 2))) / 2;  tau is the number of keys that a query sees
    relu2      max(s, 0)²;  tau as for laplace

Mega-chunk: attention within chunks of c steps, at a cost linear in L; the moving average still spans all steps.

Letters: B sequences, L steps, D width, K directions, N averages per feature (n above), E hidden width, Z width of
queries and keys, C = c chunk length or L, G chunks of all sequences, R queries at a time, M kernel length.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spt.models.base import Backbone, Context, Counts, Mixer, linear_flops
from spt.models.longconv import DiagonalSystem, Kernel, LongConvolution
from spt.models.ops import counts
from spt.models.ops.dropout import Dropout, keep_mask
from spt.models.ops.output import Output
from spt.models.ops.precision import without_autocast
from spt.models.ops.product import Linear
from spt.models.options import Activation, FeedForwardKind, Initialisation, LongConvolutionConfig

PAPER = "Ma et al. 2023"
COST = "L D (N + log L + E) + L c E"
PARAMETERS = 902_140

AttentionKind = Literal["softmax", "laplace", "relu2"]

STD = 0.02  # initial standard deviation of maps, queries, keys and biases
MU, SIGMA = 0.707107, 0.282095  # of laplace: sqrt(1 / 2) and sqrt(1 / (4 pi)), as rounded in the published code
_IN_CACHE, _ON_GPU = 1 << 18, 1 << 25  # attention weights computed at a time


class Config(LongConvolutionConfig):
    mixings: ClassVar[int] = 2  # attention reads the moving average
    inner_widths: ClassVar[tuple[str, ...]] = ("d_ff", "d_attention", "d_hidden")

    d_state: int = Field(16, ge=1, description="number of moving averages per feature, each with its own decay rate")
    d_attention: int = Field(64, ge=1, description="width of queries and keys")
    d_hidden: int | None = Field(None, ge=1, description="width of the values; default: 2 d_model")
    attention: AttentionKind = Field(
        "softmax",
        description="maps scores to weights: softmax (the paper's text tasks), laplace (its image tasks), relu2",
    )
    relative_bias: Literal["simple", "rotary"] = Field(
        "simple",
        description="bias by distance: a table (simple), or two rotated vectors (rotary; any length, needs an even "
        "d_attention)",
    )
    chunk: int | None = Field(
        None, ge=1, description="attention within chunks of this many steps; default: over all steps"
    )
    max_kernel_length: int | None = Field(
        None, ge=1, description="longest reach of the moving average, in steps (published: 1024 or 4096)"
    )
    attention_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate on the attention weights, in training only"
    )
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate on the values")
    feed_forward: FeedForwardKind = Field(
        "mlp", description="last sub-layer of every block: none, mlp, or switch (a mixture of mlps)"
    )
    d_ff: int | None = Field(None, ge=1, description="inner width of the feed-forward layer; default: d_hidden")
    ff_activation: Activation = Field("silu", description="activation of the feed-forward layer")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.relative_bias == "rotary" and self.d_attention % 2:
            raise ValueError(f"relative_bias rotary rotates pairs, but d_attention is {self.d_attention}")
        return self

    def own_reach(self) -> int | None:
        kernel, chunk = self.max_kernel_length, self.chunk
        return None if kernel is None or chunk is None else max(kernel, chunk) - 1

    @property
    def hidden(self) -> int:
        """Width E."""
        return self.d_hidden or 2 * self.d_model


# -------------------------------------------------------------------------------------------------- moving average


def exponentials(W: Float[Tensor, "K D N"], log_q: Float64[Tensor, "K D N"], length: int) -> Float[Tensor, "K D M"]:
    """sum_n W_n q_n^l for l = 0, ..., length - 1, in the type of W, without a table of N x length powers.

    Two levels, l = aT + b with 0 <= b < T: N (M/T + T) powers, from logarithms in float64, and a product of inner size
    N. The backward pass keeps no more than these.
    """
    A, T = _blocks(length)
    steps = torch.arange(max(T, A), dtype=torch.float64, device=W.device)
    inner = torch.exp(log_q[..., None] * steps[:T]).to(W.dtype)
    outer = torch.exp(log_q[..., None, :] * (T * steps[:A, None])).to(W.dtype)
    return ((W[..., None, :] * outer) @ inner).flatten(-2)[..., :length]


def _blocks(length: int) -> tuple[int, int]:
    """Number of blocks, and positions per block."""
    T = 1 << max(0, round(math.log2(length) / 2))
    return -(-length // T), T


class EMAKernel(Kernel):
    """Parameters delta, alpha, beta, gamma (K, D, N)."""

    recurrent = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (1 if config.causal else 2, config.d_model, config.d_state)
        self.limit = config.max_kernel_length
        signs = 1.0 - 2.0 * (torch.arange(config.d_state) % 2)
        self.delta = nn.Parameter(0.2 * torch.randn(shape))
        self.alpha = nn.Parameter(0.2 * torch.randn(shape))
        self.beta = nn.Parameter(0.02 * torch.randn(shape) + signs)
        self.gamma = nn.Parameter(torch.randn(shape))

    def forward(self, length: int) -> Float[Tensor, "K D M"]:
        """Two-sided: the second direction's weight of the present is added to the first, so that the reverse kernel
        begins at the next step, as everywhere here."""
        length = min(length, self.limit or length)
        W, log_q = self.weights()
        if len(W) == 1:
            return exponentials(W, log_q, length)
        present = W[1].sum(-1, keepdim=True)
        kernel = exponentials(torch.stack([W[0], W[1] * log_q[1].exp().to(W.dtype)]), log_q, length)
        ahead, back = kernel[0] + F.pad(present, (0, length - 1)), kernel[1]
        if length == self.limit:  # the reverse kernel has one lag fewer
            back = F.pad(back[:, :-1], (0, 1))
        return torch.stack([ahead, back])

    def weights(self) -> tuple[Float[Tensor, "K D N"], Float64[Tensor, "K D N"]]:
        """n^-1/2 p beta gamma and log q, the latter in float64 by log1p: at long lags every digit counts."""
        p = torch.sigmoid(self.delta.double())
        log_q = torch.log1p(-p * torch.sigmoid(self.alpha.double()))
        return p.to(self.beta.dtype) * self.beta * self.gamma * self.beta.shape[-1] ** -0.5, log_q

    def flops(self, length: int) -> Counts:
        """Two per average and step, of whole blocks; the exponentials of the tables are left out."""
        A, T = _blocks(min(length, self.limit or length))
        return Counts.of("kernel", 2.0 * self.beta.numel() * A * T)

    def system(self) -> DiagonalSystem:
        p = torch.sigmoid(self.delta[0])
        q = self.weights()[1][0].exp().to(p.dtype)
        return DiagonalSystem(q, p * self.beta[0], self.gamma[0] * self.gamma.shape[-1] ** -0.5)


class _Silu(Output):
    """SiLU after the moving average, where other long convolutions have GELU and a gate."""

    def forward(self, y: Float[Tensor, "B *L D"]) -> Float[Tensor, "B *L D"]:
        return F.silu(y)


class EMA(LongConvolution):
    """silu(conv(x, k) + omega x), with omega as the skip weight `D`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, EMAKernel(config), output="none")
        self.output = _Silu(config.d_model, "none")


# ------------------------------------------------------------------------------------------------------- attention


class SimpleBias(nn.Module):
    """One trained number per distance, key minus query: `weight` (2 longest - 1,)."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(STD * torch.randn(2 * longest - 1))

    def by_distance(self, length: int) -> Float[Tensor, " lags"]:
        """For the distances 1 - length, ..., length - 1."""
        longest = len(self.weight) // 2 + 1
        if length > longest:
            raise ValueError(
                f"attention over {length} steps, but there are biases for {longest}; set chunk or max_length"
            )
        return self.weight[longest - length : longest + length - 1]


class RotaryBias(nn.Module):
    """<R(i) alpha, R(j) beta> for query i and key j; R(t) rotates the pair (m, m + Z/2) by t 10000^(-2m/Z).

    It depends only on the distance: <alpha, R(j - i) beta>.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(STD * torch.randn(width))
        self.beta = nn.Parameter(STD * torch.randn(width))

    def by_distance(self, length: int) -> Float[Tensor, " lags"]:
        """For the distances 1 - length, ..., length - 1; angles in float64."""
        steps = torch.arange(length, dtype=torch.float64, device=self.alpha.device)
        half = len(self.alpha) // 2
        angles = torch.outer(steps, 10000.0 ** (-torch.arange(half, dtype=steps.dtype, device=steps.device) / half))
        cos, sin = angles.cos().to(self.alpha.dtype), angles.sin().to(self.alpha.dtype)
        a, a_, b, b_ = *self.alpha.chunk(2), *self.beta.chunk(2)
        even, odd = cos @ (a * b + a_ * b_), sin @ (a_ * b - a * b_)
        return torch.cat([(even - odd)[1:].flip(0), even + odd])


def attention_weights(
    scores: Float[Tensor, "*G M"], masked: Bool[Tensor, "*#G M"] | None, kind: AttentionKind, slope: bool = False
) -> tuple[Float[Tensor, "*G M"], Float[Tensor, "*G M"] | None]:
    """Attention weights, zero where `masked`, and with `slope` their derivative (None for softmax).

    A query that sees no key gets equal weights (softmax) or zeros. `scores` may be overwritten.
    """
    derivative = None
    if kind == "softmax":
        if masked is not None:
            scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
        return scores.softmax(-1), None
    if kind == "laplace":
        scores.sub_(MU).mul_(1 / (SIGMA * math.sqrt(2)))
        if slope:
            derivative = scores.square().neg_().exp_().mul_(1 / (SIGMA * math.sqrt(2 * math.pi)))
        weights = scores.erf_().add_(1).mul_(0.5)
    else:
        positive = scores.relu_()
        derivative = 2 * positive if slope else None
        weights = positive.square()
    if masked is not None:
        weights = weights.masked_fill_(masked, 0.0)
        derivative = None if derivative is None else derivative.masked_fill_(masked, 0.0)
    return weights, derivative


class _Attend(torch.autograd.Function):
    """drop(f(q k^T + bias)) v within each of G chunks: q, k (G, C, Z); v (G, C, E); bias (2 C - 1,) by distance; valid
    (G, C) or None.

    Some queries at a time, and the backward pass recomputes the weights: nothing of size C² is kept but the dropout
    mask. Scores and weights have the type of q, the sum over values that of v.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        valid: Tensor | None,
        kind: AttentionKind,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias, valid)
        ctx.kind, ctx.causal, ctx.dropout, ctx.keep = kind, causal, dropout, []
        y = v.new_empty(v.shape)
        for part in _blocks_of_queries(q, causal):
            weights, _ = attention_weights(part.scores(q, k, bias), part.masked(q, valid, causal), kind)
            if dropout > 0.0:
                ctx.keep.append(keep_mask(weights, dropout, tied=False))
                weights = weights.mul_(ctx.keep[-1]).mul_(1 / (1 - dropout))
            y[part.g, part.i] = torch.bmm(weights.to(v.dtype), v[part.g, : part.keys])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, valid = ctx.saved_tensors
        dq, dk, dv, dbias = (torch.zeros_like(x, dtype=q.dtype) for x in (q, k, v, bias))
        with without_autocast(q):
            for number, part in enumerate(_blocks_of_queries(q, ctx.causal)):
                scores, masked = part.scores(q, k, bias), part.masked(q, valid, ctx.causal)
                weights, slope = attention_weights(scores, masked, ctx.kind, slope=True)
                keys, dy = (part.g, slice(0, part.keys)), grad[part.g, part.i].to(v.dtype)
                dscores = torch.bmm(dy, v[keys].mT).to(q.dtype)
                dropped = weights
                if ctx.dropout > 0.0:
                    keep, scale = ctx.keep[number], 1 / (1 - ctx.dropout)
                    dscores, dropped = dscores.mul_(keep).mul_(scale), (weights * keep).mul_(scale)
                dv[keys] += torch.bmm(dropped.to(v.dtype).mT, dy)
                if slope is None:
                    dscores.sub_((dscores * weights).sum(-1, keepdim=True))
                    slope = weights
                dscores.mul_(slope)
                dq[part.g, part.i] = torch.bmm(dscores, k[keys])
                dk[keys] += torch.bmm(dscores.mT, q[part.g, part.i])
                part.add_bias_gradient(dscores.sum(0), dbias)
        return dq, dk, dv.to(v.dtype), dbias, None, None, None, None


class _QueryBlock(NamedTuple):
    """Some chunks, some of their queries, and the number of keys that these may see."""

    g: slice
    i: slice
    keys: int

    def scores(self, q: Tensor, k: Tensor, bias: Tensor) -> Float[Tensor, "G R M"]:
        return torch.baddbmm(self.bias_matrix(bias), q[self.g, self.i], k[self.g, : self.keys].mT)

    def masked(self, q: Tensor, valid: Tensor | None, causal: bool) -> Tensor | None:
        """Which keys a query does not see; broadcasts against the scores."""
        padding = None if valid is None else ~valid[self.g, None, : self.keys]
        if not causal:
            return padding
        shape = (self.i.stop - self.i.start, self.keys)
        later = torch.ones(shape, dtype=torch.bool, device=q.device).triu_(self.i.start + 1)
        return later if padding is None else padding | later

    def bias_matrix(self, bias: Tensor) -> Float[Tensor, "R M"]:
        return bias[self.lags(bias)].unfold(0, self.keys, 1).flip(0)

    def lags(self, bias: Tensor) -> slice:
        """Distances from the last query and the first key to the first query and the last key."""
        zero = len(bias) // 2
        return slice(zero + 1 - self.i.stop, zero + self.keys - self.i.start)

    def add_bias_gradient(self, dscores: Float[Tensor, "R M"], dbias: Tensor) -> None:
        """Sums along the diagonals; padding and reshaping shifts every row by one more place."""
        rows = len(dscores)
        skewed = F.pad(dscores.flip(0), (0, rows)).flatten()[:-rows]
        dbias[self.lags(dbias)] += skewed.view(rows, -1).sum(0)


def _blocks_of_queries(q: Tensor, causal: bool) -> Iterator[_QueryBlock]:
    G, C, _ = q.shape
    weights = _IN_CACHE if q.device.type == "cpu" else _ON_GPU
    chunks, rows = max(1, weights // C**2), min(C, max(16, weights // C))
    for g in range(0, G, chunks):
        for i in range(0, C, rows):
            stop = min(i + rows, C)
            yield _QueryBlock(slice(g, min(g + chunks, G)), slice(i, stop), stop if causal else C)


# ----------------------------------------------------------------------------------------------------------- layer


class GatedAttention(Mixer):
    """A block without its feed-forward layer. It interpolates between the stream and a candidate, by the gate u.

    Maps `value` (D -> E), `base` (D -> D + Z + E + D) and `out` (E -> D); gamma, beta (2, Z) for queries and keys.
    """

    state_space = ("ema.kernel.",)
    uncompiled = ("attend",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        D, Z, E = config.d_model, config.d_attention, config.hidden
        self.widths = (D, Z, E, D)
        self.kind, self.causal = config.attention, config.causal
        chunks = [config.chunk, config.reach and config.reach + 1]
        self.chunk = min((size for size in chunks if size), default=None)
        self.attention_dropout = config.attention_dropout
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.hidden_dropout = Dropout(config.hidden_dropout, config.tie_dropout)
        self.ema = EMA(config)
        self.value, self.base, self.out = Linear(D, E), Linear(D, sum(self.widths)), Linear(E, D)
        for linear in (self.value, self.base, self.out):
            _initialise(linear)
        self.gamma, self.beta = nn.Parameter(STD * torch.randn(2, Z)), nn.Parameter(torch.zeros(2, Z))
        longest = min(config.chunk or config.max_length, config.max_length)
        self.bias = SimpleBias(longest) if config.relative_bias == "simple" else RotaryBias(Z)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        """What is added to the stream if there is no norm before the layer."""
        gate, candidate = self.candidate(x, context)
        return gate * (candidate - x)

    def update_stream(
        self, x: Float[Tensor, "B L D"], h: Float[Tensor, "B L D"], context: Context, dropout: nn.Module
    ) -> Float[Tensor, "B L D"]:
        """The gate interpolates between the stream itself and the candidate, which already has dropout."""
        gate, candidate = self.candidate(h, context)
        return x + gate * (candidate - x)

    def candidate(
        self, x: Float[Tensor, "B L D"], context: Context
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """The gate u, and the candidate that replaces the stream where u is 1."""
        v = F.silu(self.value(x))
        u, z, r, h = self.base(self.dropout(self.ema(x, context))).split(self.widths, dim=-1)
        q, k = (F.silu(z)[..., None, :] * self.gamma + self.beta).unbind(-2)
        y = self.attend(q, k, self.hidden_dropout(v), context)
        return torch.sigmoid(u), self.dropout(F.silu(h + self.out(F.silu(r) * y)))

    def attend(
        self, q: Float[Tensor, "B L Z"], k: Float[Tensor, "B L Z"], v: Float[Tensor, "B L E"], context: Context
    ) -> Float[Tensor, "B L E"]:
        """S v. The last chunk of a sequence may be shorter; it is computed separately, as a sequence of that length."""
        B, L, _ = q.shape
        C = min(self.chunk or L, L)
        complete, outputs = L // C * C, []
        for first, last, width in ((0, complete, C), (complete, L, L - complete)):
            if first < last:
                qs, ks, vs = (x[:, first:last].reshape(-1, width, x.shape[-1]) for x in (q, k, v))
                valid = context.valid[:, first:last].reshape(-1, width) if context.padded else None
                outputs.append(self._attend_in_chunks(qs, ks, vs, valid).view(B, last - first, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_in_chunks(
        self,
        q: Float[Tensor, "G C Z"],
        k: Float[Tensor, "G C Z"],
        v: Float[Tensor, "G C E"],
        valid: Bool[Tensor, "G C"] | None,
    ) -> Float[Tensor, "G C E"]:
        with without_autocast(q):
            bias = self.bias.by_distance(q.shape[1])
            q = q * q.shape[-1] ** -0.5 if self.kind == "softmax" else q / self._visible_keys(q, valid)
            dropout = self.attention_dropout if self.training else 0.0
            y: Tensor = _Attend.apply(q, k, v, bias, valid, self.kind, self.causal, dropout)
        return y

    def _visible_keys(self, q: Float[Tensor, "G C Z"], valid: Bool[Tensor, "G C"] | None) -> Tensor:
        """The number of keys that a query sees, at least 1; broadcasts against q."""
        keys = torch.ones(1, q.shape[1], device=q.device) if valid is None else valid.to(q.dtype)
        count = keys.cumsum(1) if self.causal else keys.sum(1, keepdim=True)
        return count.clamp_min(1.0)[..., None].to(q.dtype)

    def flops(self, length: int) -> Counts:
        """The maps, the moving average, q k^T and S v. Causal attention counts in full, as is usual."""
        _, Z, E, _ = self.widths
        C = min(self.chunk or length, length)
        pairs = length // C * C**2 + (length % C) ** 2
        maps = sum((linear_flops(linear, length) for linear in (self.value, self.base, self.out)), Counts())
        return maps + self.ema.flops(length) + counts.attention(pairs, Z, E)

    def shared_flops(self, length: int) -> Counts:
        return self.ema.shared_flops(length)


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    """Linear maps as in the published code; those of experts are stacked."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, STD)
        else:
            parameter.zero_()


class Mega(Backbone):
    """The stack, with the published initialisation of feed-forward layers."""

    def initialise(self, method: Initialisation) -> None:
        for mixer in self.mixers:
            if not isinstance(mixer, GatedAttention):
                _initialise(mixer)
        super().initialise(method)


def build(config: Config) -> Backbone:
    config = config.model_copy(update={"d_ff": config.d_ff or config.hidden})
    return Mega(config, lambda: [GatedAttention(config)], decay_all=True)
