"""Normalisation of the residual stream. Letters: B sequences, L steps, D width."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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

    Processes share their statistics, so that the result does not depend on how a batch is divided among them; they
    exchange numbers once in each pass.
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
            if included is None and _world() == 1 and len(rows) > 1:
                # With momentum 1 torch leaves the statistics of this batch here, variance over n - 1.
                mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
                y = F.batch_norm(rows, mean, variance, self.weight, self.bias, True, 1.0, self.eps).view_as(x)
                if update_statistics:
                    n = rows.new_full((), len(rows))  # filled by the device, where new_tensor would wait for a copy
                    self._update_statistics(mean, variance * ((n - 1) / n), n)
                return y
            y, n, mean, variance = _Normalise.apply(
                rows, None if included is None else included.flatten(), self.weight, self.bias, self.eps
            )
            if update_statistics:
                self._update_statistics(mean, variance, n)
            return y.view_as(x)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor, n: Tensor) -> None:
        if self.unbiased:
            variance = variance * (n / (n - 1).clamp_min(1.0))
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) weight + bias over the included rows of all processes; with their number, mean
    and variance, which have no gradients.

    Each process sends its number, mean and squared deviations, which are joined as in Chan, Golub, LeVeque 1983: a sum
    of squares would lose digits. Backward, with z = (x - mean) / sqrt(variance + eps) and g = dy weight, summed over
    the rows of all processes: dx = (g - included (sum g + z sum g z) / n) / sqrt(variance + eps).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "N D"],
        included: Bool[Tensor, " N"] | None,
        weight: Float[Tensor, " D"],
        bias: Float[Tensor, " D"],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        share = None if included is None else included[:, None].to(x.dtype)
        n = x.new_full((1,), len(x)) if share is None else share.sum(0)
        mean = (x if share is None else x * share).sum(0) / n.clamp_min(1.0)
        z = x - mean
        squares = (z.square() if share is None else z.square().mul_(share)).sum(0)
        if _world() > 1:
            counts, means, sums = _all_gather(torch.cat([n, mean, squares])).split([1, *[x.shape[1]] * 2], dim=1)
            own, n = mean, counts.sum(0)
            mean = (counts * means).sum(0) / n.clamp_min(1.0)
            squares = (sums + counts * (means - mean).square()).sum(0)
            z.add_(own - mean)
        n = n.clamp_min(1.0)
        variance = squares / n
        scale = torch.rsqrt(variance + eps)
        z.mul_(scale)
        ctx.save_for_backward(z, share, weight, scale, n)
        ctx.mark_non_differentiable(n, mean, variance)
        return torch.addcmul(bias, z, weight), n, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        z, share, weight, scale, n = ctx.saved_tensors
        own = torch.stack([grad.sum(0), (grad * z).sum(0)])
        sums = own
        if _world() > 1:
            sums = own.clone()
            torch.distributed.all_reduce(sums)
        common = torch.addcmul(sums[0], z, sums[1]).div_(n)
        dx = (grad - (common if share is None else common.mul_(share))).mul_(weight * scale)
        return dx, None, own[1], own[0], None


def _world() -> int:
    """How many processes share a batch."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def _all_gather(x: Float[Tensor, " D"]) -> Float[Tensor, "P D"]:
    """Of all P processes."""
    everything = x.new_empty(_world(), len(x))
    torch.distributed.all_gather_into_tensor(everything.view(-1), x)
    return everything
