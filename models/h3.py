"""H3: a shift and a diagonal state space between the gates of linear attention (Fu et al. 2023, section 3).

    Q, K, V = W x + b,   y = W_o (Q SSM_diag(SSM_shift(K) V)) + b_o                                     (algorithm 1)

Each state space adds its input times a skip weight. Before training, the shift's state holds the last N inputs (B is
trained), and its kernel is short: sum_n B_n C_{n+l} for lags l < N. The diagonal state space is S4D-Lin with the
bilinear rule, one for each head of width d; in a head, it convolves each of the d × d numbers of the outer product
K V^T, and Q weighs the rows. In the authors' language models, a feed-forward layer follows (here
`feed_forward: mlp`), two layers have attention instead, and everything is causal; their GPT-2 initialisation is not
used here. The two-sided form is ours: both state spaces have a second C, whose kernel runs backwards from the next
step.

Letters: B sequences, L steps, D width, H heads, N state size. In kernels: B and C of a state space, K directions, M
kernel length.
"""

import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Complex128, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Context, Counts, Mixer, ParamGroup, linear_flops
from spt.models.longconv import ConjugatePairKernel, DiagonalSystem, Kernel, LongConvolution
from spt.models.ops.discretise import as_complex, bilinear, log_uniform
from spt.models.ops.hippo import diagonal
from spt.models.ops.product import Linear
from spt.models.ops.vandermonde import vandermonde, vandermonde_flops
from spt.models.options import ConjugatePairConfig, FeedForwardKind

PAPER = "Fu et al. 2023"
COST = "L D (N + log L + D)"
PARAMETERS = 1_024_256


class Config(ConjugatePairConfig):
    mixings: ClassVar[int] = 2  # the diagonal state space reads the shift

    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    head_dim: int = Field(1, ge=1, description="width d of a head; must divide d_model")

    def own_reach(self) -> int | None:
        """The shift before the state space sees d_state steps."""
        own = super().own_reach()
        return None if own is None else max(own, self.d_state - self.causal)

    @model_validator(mode="after")
    def _heads_fit(self) -> "Config":
        if self.d_model % self.head_dim:
            raise ValueError(f"d_model {self.d_model} is not a multiple of head_dim {self.head_dim}")
        return self


class ShiftSystem(NamedTuple):
    B: Float[Tensor, "D N"]
    C: Float[Tensor, "D N"]


class ShiftKernel(Kernel):
    """Parameters: B (D, N), initially one in the first place, else zero; C (K, D, N), drawn as torch's convolutions."""

    recurrent = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, N, K = config.d_model, config.d_state, 1 if config.causal else 2
        self.limit = N
        self.B = nn.Parameter(F.one_hot(torch.zeros(D, dtype=torch.long), N).to(torch.get_default_dtype()))
        self.C = nn.Parameter(torch.empty(K, D, N).uniform_(-1, 1) / math.sqrt(N))
        self.param_groups = {
            "B": ParamGroup(lr=config.ssm_lr, weight_decay=False),
            "C": ParamGroup(lr=config.c_lr, weight_decay=True),
        }

    def forward(self, length: int) -> Float[Tensor, "K D M"]:
        N = self.B.shape[1]
        later = F.pad(self.C, (0, min(length, N) - 1)).unfold(-1, N, 1)  # C_{n+l} at [l, n]
        return torch.einsum("dn,kdln->kdl", self.B, later)

    def flops(self, length: int) -> Counts:
        return Counts.of("kernel", 2.0 * self.C.numel() * min(length, self.B.shape[1]))

    def system(self) -> ShiftSystem:
        return ShiftSystem(self.B, self.C[0])

    def step(
        self, u: Float[Tensor, "B D"], state: Float[Tensor, "B D N"], system: ShiftSystem
    ) -> tuple[Tensor, Tensor]:
        state = F.pad(state[..., :-1], (1, 0)) + system.B * u[..., None]
        return (system.C * state).sum(-1), state


class DiagonalKernel(ConjugatePairKernel):
    """Parameters, as of S4D: inv_dt (H, 1); A_real, A_imag (H, N/2); B (H, N/2, 2); C (K, H, N/2, 2)."""

    A_real: nn.Parameter
    A_imag: nn.Parameter
    B: nn.Parameter

    def __init__(self, config: Config) -> None:
        H, K = config.d_model // config.head_dim, 1 if config.causal else 2
        A, B = diagonal("lin", config.d_state, H)
        C = torch.randn(K, *A.shape, dtype=torch.complex64)  # E|C|² = 1
        super().__init__(
            config,
            inv_dt=log_uniform(config.dt_min, config.dt_max, H, 1).log(),
            A_real=(-A.real).log(),
            A_imag=-A.imag,
            B=torch.view_as_real(B),
            C=torch.view_as_real(C),
        )

    def _discrete(self) -> tuple[Complex128[Tensor, "H M"], Complex128[Tensor, "H M"], Complex128[Tensor, "K H M"]]:
        """log Abar, Bbar and C."""
        A = torch.complex(-self.A_real.double().exp(), -self.A_imag.double())
        log_A, scale = bilinear(A, self.inv_dt.double().exp())
        return log_A, as_complex(self.B) * scale, as_complex(self.C)

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        log_A, B, C = self._discrete()
        W = torch.view_as_real(2 * C * B).to(self.C.dtype)
        return vandermonde(W, log_A.real, log_A.imag, min(length, self.limit or length))

    def flops(self, length: int) -> Counts:
        K, H, M, _ = self.C.shape
        return vandermonde_flops((K, H, M), min(length, self.limit or length), shared=False)

    def system(self) -> DiagonalSystem:
        log_A, B, C = self._discrete()
        dtype = self.C.dtype.to_complex()
        return DiagonalSystem(*(x.to(dtype) for x in (log_A.exp(), B, 2 * C[0])))


class H3(Mixer):
    """Parameters: one map D -> 3 D, of Q, K and V; the state spaces with their skip weights; one map D -> D."""

    state_space = ("shift.kernel.", "diagonal.kernel.")

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, self.head_dim = config.d_model, config.head_dim
        self.recurrent = config.causal and config.max_kernel_length is None and config.reach is None
        self.enter, self.leave = Linear(D, 3 * D), Linear(D, D)
        heads = config.model_copy(update={"d_model": D // config.head_dim})
        self.shift = LongConvolution(config, ShiftKernel(config), output="identity")
        self.diagonal = LongConvolution(heads, DiagonalKernel(config), output="identity")

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        u = self.enter(x)
        if context.padded:  # where the map's bias stands
            u = u.masked_fill(~context.valid[..., None], 0.0)
        q, k, v = u.chunk(3, dim=-1)
        return self.read(q, self.diagonal.mix_sequence(self.products(self.shift.mix_sequence(k), v)))

    def products(self, k: Float[Tensor, "B *L D"], v: Float[Tensor, "B *L D"]) -> Float[Tensor, "Bdd *L H"]:
        """K V^T of every head, its d × d numbers as if they were sequences."""
        return (self._heads(k)[:, :, None] * self._heads(v)[:, None]).flatten(0, 2)

    def read(self, q: Float[Tensor, "B *L D"], y: Float[Tensor, "Bdd *L H"]) -> Float[Tensor, "B *L D"]:
        y = y.unflatten(0, (-1, self.head_dim, self.head_dim))
        return self.leave((self._heads(q)[:, :, None] * y).sum(1).movedim(1, -1).flatten(-2))

    def _heads(self, x: Float[Tensor, "B *L D"]) -> Float[Tensor, "B d *L H"]:
        return x.unflatten(-1, (-1, self.head_dim)).movedim(-1, 1)

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K C M"]]:
        """Of the diagonal state space, whose features are heads."""
        return self.diagonal.convolution_kernel(length)

    def flops(self, length: int) -> Counts:
        """Heads of width one have gates, which are left out; wider ones have products of d numbers."""
        maps = linear_flops(self.enter, length) + linear_flops(self.leave, length)
        convolutions = self.shift.flops(length) + self.head_dim**2 * self.diagonal.flops(length)
        wide = length * self.leave.in_features * self.head_dim if self.head_dim > 1 else 0
        return maps + convolutions + Counts.of("other", 3.0 * wide, 7.0 * wide)

    def shared_flops(self, length: int) -> Counts:
        return self.shift.shared_flops(length) + self.diagonal.shared_flops(length)

    def initial_state(self, batch: int) -> Any:
        return self.shift.initial_state(batch), self.diagonal.initial_state(batch * self.head_dim**2)

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        before, remembered = state
        q, k, v = self.enter(x).chunk(3, dim=-1)
        k, before = self.shift.step(k, before)
        y, remembered = self.diagonal.step(self.products(k, v), remembered)
        return self.read(q, y), (before, remembered)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [H3(config)])
