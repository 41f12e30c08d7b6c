"""Answers to the windows of a recording become one: the mean of their probabilities, or of their numbers.

n windows, m recordings, K numbers of an answer.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from spt.training.metrics import Sums, sums
from spt.training.objectives import Output, Targets

LEAST = 1e-45  # of probabilities and variances, whose logarithm is taken
TARGET = "target "  # before the names of targets' parts


def target_parts(targets: Targets) -> dict[str, Tensor]:
    """What is kept of every window's target beside its answer."""
    parts = {"values": targets.values, "weight": targets.weight, "known": targets.known}
    return {TARGET + name: part for name, part in parts.items() if part is not None}


def of_recordings(
    output: Output, logits: Float[Tensor, "n K"], whole: dict[str, Tensor], recordings: NDArray[np.int64]
) -> tuple[Float[Tensor, "m K"], Sums, Targets]:
    """The answers to recordings, what metrics need of these, and their targets, each that of the first window; `whole`
    holds the windows' `target_parts`."""
    first = torch.from_numpy(np.unique(recordings, return_index=True)[1])
    parts = {name.removeprefix(TARGET): part[first] for name, part in whole.items() if name.startswith(TARGET)}
    logits = averaged(output, logits, recordings)
    targets = Targets(**parts)
    return logits, sums(output, logits, targets), targets


def averaged(output: Output, logits: Float[Tensor, "n K"], recordings: NDArray[np.int64]) -> Float[Tensor, "m K"]:
    """What the head would have to give for the mean answer: logarithms of mean probabilities, mean numbers, of a
    gaussian mean and variance of the mixture; by the recordings' numbers. Sums are in float64, in the windows' order.
    """
    names, which = np.unique(recordings, return_inverse=True)
    windows = logits.double().cpu()
    if output.loss == "cross_entropy":
        windows = windows.unflatten(-1, (output.size, output.classes)).softmax(-1).flatten(1)
    elif output.loss == "binary_cross_entropy":
        windows = windows.sigmoid()
    elif output.loss == "gaussian":
        mean, raw = windows.split(output.size, dim=-1)
        windows = torch.cat([mean, F.elu(raw) + 1 + mean.square()], dim=-1)
    total = torch.zeros(len(names), windows.shape[1], dtype=torch.float64)
    total.index_add_(0, torch.from_numpy(which.reshape(-1)), windows)
    means = total / torch.from_numpy(np.bincount(which.reshape(-1)))[:, None]
    if output.loss == "cross_entropy":
        means = means.clamp_min(LEAST).log()
    elif output.loss == "binary_cross_entropy":
        means = means.logit(eps=1e-12)
    elif output.loss == "gaussian":
        mean, square = means.split(output.size, dim=-1)
        variance = (square - mean.square()).clamp_min(LEAST)
        means = torch.cat([mean, torch.where(variance > 1, variance - 1, variance.log())], dim=-1)
    return means.float()
