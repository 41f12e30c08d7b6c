"""Performer: attention through random features of the softmax kernel, FAVOR+ (Choromanski et al. 2021, section 2).

    y_t = W_o [sum_s phi(q_t) phi(k_s) v_s / sum_s phi(q_t) phi(k_s)],   u = a / N^(1/4)
    phi(a) = M^(-1/2) [exp(w_m u - |u|² / 2 - c) + eps],   m = 1, ..., M

in every head, where q, k and v are linear maps of the input. Without c and eps, phi(q) phi(k) averages to
exp(q k / sqrt(N)) over the w_m. The w_m are orthogonal within blocks of N and as long as Gaussian vectors (section
2.4). They are drawn when the model is built, one set per layer, and stored with it; they are not redrawn in training. c
keeps the exponentials at or below 1 and cancels, except for eps: for queries it is the largest w_m u of the step, for
keys that of the sequence, as in the authors' code. If causal, that of the keys is the largest so far, so that nothing
looks ahead; where it grows, the sums over earlier keys shrink. `kernel: relu` is generalised attention, phi(a) =
relu(M^(-1/2) w_m a) + eps and, with `features: null`, relu(a) + eps, as in LRA's code. The absolute positions and the
feed-forward layer (`feed_forward: mlp`) are the Transformer's. Letters: L steps, D width, H heads, N = D / H.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spt.models.base import Backbone, Counts
from spt.models.linear_attention import Features, KernelAttention, KernelAttentionConfig, make_positions
from spt.models.ops.precision import without_autocast
from spt.models.ops.product import linear

PAPER = "Choromanski et al. 2021"
COST = "L D M + L D²"
PARAMETERS = 791_296
EPS = {"softmax": 1e-6, "relu": 1e-3}  # as in the authors' code


class Config(KernelAttentionConfig):
    kernel: Literal["softmax", "relu"] = Field("softmax", description="kernel that the features stand for")
    features: int | None = Field(
        256, ge=1, description="number of random features per head; null: the relu of queries and keys themselves"
    )

    def smoke_sizes(self) -> dict[str, int]:
        return super().smoke_sizes() | ({} if self.features is None else {"features": 16})

    @model_validator(mode="after")
    def _softmax_needs_features(self) -> "Config":
        if self.features is None and self.kernel == "softmax":
            raise ValueError("kernel softmax is made of random features; set features, or choose kernel: relu")
        return self


class FavorAttention(KernelAttention):
    """Buffer: W (M, N), the w_m. Its maps have no bias and start as Xavier's."""

    eps = 1e-30  # only for a row without valid steps; other sums are at least 1e-12, by the features' eps
    W: Tensor | None

    def __init__(self, config: Config) -> None:
        N = config.d_model // config.n_heads
        super().__init__(config, config.features or N, bias=False)
        self.kernel, self.offset = config.kernel, EPS[config.kernel]
        for part in (*self.qkv.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(part)
        self.register_buffer("W", None if config.features is None else orthogonal_vectors(config.features, N))

    def features(
        self,
        q: Float[Tensor, "B L H N"],
        k: Float[Tensor, "B L H N"],
        valid: Bool[Tensor, "B L"] | None,
        log_scale: Float[Tensor, "B H"] | None = None,
    ) -> Features:
        """With the softmax kernel, the logarithm of the keys' scale is their c."""
        with without_autocast(q):
            if self.kernel == "relu":
                return Features(self._relu(q), self._relu(k))
            assert self.W is not None
            scaled = (self.W * self.W.shape[1] ** -0.25).to(q.dtype)  # w_m u is x times this
            with torch.no_grad():
                of_queries, of_keys = linear(q, scaled), linear(k, scaled)
                largest = of_keys.amax(-1)  # of each step and head
                before = largest[:, 0] if log_scale is None else log_scale
                if self.causal:
                    c = torch.maximum(largest.cummax(1).values, before[:, None])
                    log_decay = torch.cat([before[:, None], c[:, :-1]], 1) - c
                else:
                    of_valid = largest if valid is None else largest.masked_fill(~valid[..., None], -torch.inf)
                    c, log_decay = torch.maximum(of_valid.amax(1, keepdim=True), largest), None  # on padding its own
            queries = _Exponentials.apply(q, scaled, of_queries, of_queries.amax(-1), self.offset)
            keys = _Exponentials.apply(k, scaled, of_keys, c, self.offset)
            return Features(queries, keys, log_decay, c[:, -1])

    def _relu(self, x: Float[Tensor, "B L H N"]) -> Float[Tensor, "B L H M"]:
        if self.W is not None:
            x = self.n_features**-0.5 * linear(x, self.W.to(x.dtype))
        return F.relu(x) + self.offset

    def flops(self, length: int) -> Counts:
        """With the projections of queries and keys on W, which has no gradient."""
        if self.W is None:
            return super().flops(length)
        projections = 4.0 * length * self.heads * self.W.numel()
        return super().flops(length) + Counts.of("linear", projections, projections)


class _Exponentials(torch.autograd.Function):
    """phi(x) from its projections on W, of which nothing is kept but phi; c has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, projections: Tensor, c: Tensor, eps: float) -> Tensor:
        M, N = W.shape
        ctx.offset = M**-0.5 * eps
        shift = c + x.square().sum(-1) / (2 * math.sqrt(N))
        phi = (projections - shift[..., None]).exp_().mul_(M**-0.5).add_(ctx.offset)
        ctx.save_for_backward(x, W, phi)
        return phi

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dphi: Tensor) -> tuple[Tensor, None, None, None, None]:
        with without_autocast(dphi):
            return _Exponentials.gradients(ctx, dphi)

    @staticmethod
    def gradients(ctx: Any, dphi: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, W, phi = ctx.saved_tensors
        d = (phi - ctx.offset).mul_(dphi)
        return linear(d, W.T) - d.sum(-1, keepdim=True) / math.sqrt(W.shape[1]) * x, None, None, None, None


def orthogonal_vectors(count: int, width: int) -> Float[Tensor, "M N"]:
    """Orthogonal within each `width` of them, and each of the length of a Gaussian vector."""
    Q, R = torch.linalg.qr(torch.randn(-(-count // width), width, width))
    Q = Q * torch.where(R.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)[:, None]  # else some directions are likelier
    return Q.flatten(0, 1)[:count] * torch.randn(count, width).norm(dim=1, keepdim=True)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [FavorAttention(config)], make_positions(config))
