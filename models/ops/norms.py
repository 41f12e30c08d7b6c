"""Normalisation of the residual stream. Letters: B sequences, L steps, D width."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from spt.models.ops.precision import without_autocast


class ScalarNorm(nn.Module):
    """s (x - mean + m) / std over the features of a step, with two trained numbers instead of two per feature.

    The layer norm of the S4 repository in its transposed layout, hence of all published DLR and DSS runs: biased
    standard deviation, and no epsilon (a step with D equal numbers gives NaN there, and s m / tiny here).
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
    """Per feature over all steps of the batch (Ioffe and Szegedy 2015), without filler rows and, unless `padding`,
    without padding.

    Processes share their statistics, so that the result does not depend on how a batch is divided among them.
    Micro-batches, as everywhere, are normalised one by one. The running variance is divided by n - 1 (`unbiased`,
    torch) or n (flax); `momentum` is the weight of the new batch in both running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, width: int, eps: float = 1e-5, momentum: float = 0.1, unbiased: bool = True, padding: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.momentum, self.unbiased, self.padding = eps, momentum, unbiased, padding
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(
        self, x: Float[Tensor, "B *L D"], included: Bool[Tensor, " B *L"] | None = None, update_statistics: bool = True
    ) -> Float[Tensor, "B *L D"]:
        """`included`: the steps that enter the statistics; None: all."""
        with without_autocast(x):
            x = x.to(self.weight.dtype)
            if not self.training:
                scale = self.weight * torch.rsqrt(self.running_var + self.eps)
                return x * scale + (self.bias - self.running_mean * scale)
            rows = x.flatten(0, -2)
            single_process = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            if included is None and single_process and len(rows) > 1:
                # With momentum 1 torch leaves the statistics of this batch here, variance over n - 1.
                mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
                y = F.batch_norm(rows, mean, variance, self.weight, self.bias, True, 1.0, self.eps).view_as(x)
                if update_statistics:
                    n = rows.new_full((), len(rows))  # filled by the device, where new_tensor would wait for a copy
                    self._update_statistics(mean, variance * ((n - 1) / n), n)
                return y
            weight = torch.ones_like(rows[:, 0]) if included is None else included.flatten().to(x.dtype)
            n = _all_reduce(weight.sum()).clamp_min(1.0)
            mean = _all_reduce((rows * weight[:, None]).sum(0)) / n
            centred = rows - mean
            variance = _all_reduce((centred.square() * weight[:, None]).sum(0)) / n
            if update_statistics:
                self._update_statistics(mean.detach(), variance.detach(), n.detach())
            return (centred * (self.weight * torch.rsqrt(variance + self.eps)) + self.bias).view_as(x)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor, n: Tensor) -> None:
        if self.unbiased:
            variance = variance * (n / (n - 1).clamp_min(1.0))
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def _all_reduce(x: Tensor) -> Tensor:
    """The sum over all processes, with gradients."""
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
