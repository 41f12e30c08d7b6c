"""Initial values as flax draws them by default: those of S5's and LRU's published code."""

import math

import torch
from torch import Tensor, nn


def lecun_normal_(tensor: Tensor, fan_in: int) -> Tensor:
    """Normal, truncated at two standard deviations, with variance 1 / fan_in after truncation."""
    scale = 1 / (0.87962566103423978 * math.sqrt(fan_in))
    return nn.init.trunc_normal_(tensor, std=scale, a=-2 * scale, b=2 * scale)


@torch.no_grad()
def dense_(layer: nn.Linear | nn.Conv2d) -> None:
    """A linear map or a convolution: LeCun normal weights, biases of zero."""
    lecun_normal_(layer.weight, fan_in=layer.weight[0].numel())
    if layer.bias is not None:
        layer.bias.zero_()
