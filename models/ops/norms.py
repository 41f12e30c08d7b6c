"""Normalisation of the residual stream. Letters: B sequences, L steps, D width."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

NormKind = Literal["layer", "rms", "batch", "scalar", "scale", "none"]


def make_norm(
    kind: NormKind, width: int, eps: float | None = None, momentum: float = 0.1, unbiased: bool = True
) -> nn.Module:
    """A norm by its name; `eps` None is the kind's usual one. `momentum` and `unbiased` are for batch norm alone."""
    if kind == "layer":
        return nn.LayerNorm(width, eps=1e-5 if eps is None else eps)
    if kind == "rms":
        return nn.RMSNorm(width, eps=eps)
    if kind == "batch":
        return BatchNorm(width, 1e-5 if eps is None else eps, momentum, unbiased)
    if kind == "scalar":
        return ScalarNorm(0.0 if eps is None else eps)
    if kind == "scale":
        return ScaleNorm(1e-5 if eps is None else eps)
    return nn.Identity()


class ScalarNorm(nn.Module):
    """s (x - mean + m) / std over the features of a step, with two trained numbers instead of two per feature.

    The layer norm of the S4 repository in its transposed layout, hence of all published DLR and DSS runs: biased
    standard deviation, and no epsilon (there, a step with D equal numbers is not a number; here it gives s m / tiny).
    """

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.m, self.s = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        tiny = torch.finfo(x.dtype).tiny
        return self.s * (x - mean + self.m) * torch.rsqrt((variance + self.eps).clamp_min(tiny))


class ScaleNorm(nn.Module):
    """g x / sqrt(mean x² + eps) over the features of a step, with one trained number (Mega's scalenorm).

    Nguyen and Salazar 2019 divide by the length instead; g is then sqrt(D) times as large.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return x * (self.g * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class BatchNorm(nn.Module):
    """Per feature over all valid steps of the batch (Ioffe and Szegedy 2015); padding and stand-in rows do not count.

    Several processes share their statistics, so that a batch is normalised alike however it is divided. Cut into
    micro-batches it is not: each is normalised by itself, as everywhere. The running variance is divided by n - 1
    (`unbiased`, torch) or n (flax); both are kept with `momentum` as the share of the new batch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.1, unbiased: bool = True) -> None:
        super().__init__()
        self.eps, self.momentum, self.unbiased = eps, momentum, unbiased
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(
        self, x: Float[Tensor, "B *L D"], counts: Bool[Tensor, " B *L"] | None = None, keep: bool = True
    ) -> Float[Tensor, "B *L D"]:
        """`counts`: the steps that count, None for all; `keep`: do running statistics follow?"""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.weight.dtype)
            if not self.training:
                scale = self.weight * torch.rsqrt(self.running_var + self.eps)
                return x * scale + (self.bias - self.running_mean * scale)
            rows = x.flatten(0, -2)
            alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            if counts is None and alone and len(rows) > 1:
                if keep:
                    variance, mean = torch.var_mean(rows.detach(), dim=0, correction=0)
                    self._follow(mean, variance, rows.new_tensor(len(rows)))
                return F.batch_norm(rows, None, None, self.weight, self.bias, True, 0.0, self.eps).view_as(x)
            share = torch.ones_like(rows[:, 0]) if counts is None else counts.flatten().to(x.dtype)
            n = _summed(share.sum()).clamp_min(1.0)
            mean = _summed((rows * share[:, None]).sum(0)) / n
            centred = rows - mean
            variance = _summed((centred.square() * share[:, None]).sum(0)) / n
            if keep:
                self._follow(mean.detach(), variance.detach(), n.detach())
            return (centred * (self.weight * torch.rsqrt(variance + self.eps)) + self.bias).view_as(x)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, n: Tensor) -> None:
        if self.unbiased:
            variance = variance * (n / (n - 1).clamp_min(1.0))
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def _summed(x: Tensor) -> Tensor:
    """Over all processes, with gradients."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        total: Tensor = _AllReduce.apply(x)
        return total
    return x


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
        return grad
