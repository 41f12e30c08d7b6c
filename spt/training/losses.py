"""Losses with weights, and metrics that are exact over a split whatever the batches were.

A metric is computed from sums over examples (`Sums`), never from means of batches. Letters as in objectives.py.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spt.training.objectives import Output, Targets


def per_answer(
    output: Output,
    logits: Float[Tensor, "B *L K"],
    values: Int[Tensor, "B *L S"] | Float[Tensor, "B *L S"],
    known: Bool[Tensor, "B *L S"] | None = None,
    weights: tuple[float, ...] = (),
) -> Float[Tensor, " B *L"]:
    """The loss of every answer, in float32: the mean over its S quantities, or over the known ones. A label that holds
    counts with its weight."""
    logits = logits.float()
    if output.loss == "binary_cross_entropy":
        weight = _constants(weights, logits) if weights else None
        losses = F.binary_cross_entropy_with_logits(logits, values, reduction="none", pos_weight=weight)
        return mean_of_known(losses, known)
    if output.loss == "cross_entropy":
        scores = logits.reshape(-1, output.classes)  # classes last: a strided softmax takes twice as long
        losses = F.cross_entropy(scores, values.flatten(), reduction="none").view(values.shape)
        return mean_of_known(losses, known)
    if output.loss == "gaussian":
        mean, raw = logits.split(output.size, dim=-1)
        variance = F.elu(raw) + 1 + LEAST_VARIANCE
        surprise = (mean - _scaled(output, values)).square() / variance + variance.log() + math.log(2 * math.pi)
        return mean_of_known(surprise, known) / 2
    error = logits - _scaled(output, values)
    return mean_of_known(error.abs() if output.loss == "l1" else error.square(), known)


def mean_of_known(x: Float[Tensor, "*B S"], known: Bool[Tensor, "*B S"] | None) -> Float[Tensor, "*B"]:
    """The mean over the quantities of an answer that are known; 0 where none is."""
    if known is None:
        return x.mean(-1)
    return torch.where(known, x, 0.0).sum(-1) / known.sum(-1).clamp_min(1)


def _scaled(output: Output, values: Float[Tensor, "*B S"]) -> Float[Tensor, "*B S"]:
    """Real targets as the network is to answer them."""
    if not output.scale:
        return values
    return (values - _constants(output.shift, values)) / _constants(output.scale, values)


def _constants(numbers: tuple[float, ...], like: Tensor) -> Float[Tensor, " S"]:
    """Numbers beside those of `like`. Of pinned memory, so that nobody waits until a GPU has copied them."""
    constants = torch.tensor(numbers, dtype=like.dtype)
    return (constants.pin_memory() if like.is_cuda else constants).to(like.device, non_blocking=True)


def answers(output: Output, logits: Float[Tensor, "B *L K"]) -> Int[Tensor, "B *L S"] | Float[Tensor, "B *L S"]:
    """What the network answers: the likeliest classes, the labels that are likelier than not, or numbers in the units
    of the targets."""
    if output.loss == "binary_cross_entropy":
        return (logits > 0).long()
    if output.loss == "cross_entropy":
        return logits.unflatten(-1, (output.size, output.classes)).argmax(-1)
    logits = logits.float()[..., : output.size]  # of a gaussian, its mean
    if not output.scale:
        return logits
    return logits * _constants(output.scale, logits) + _constants(output.shift, logits)


def weighted_sum(output: Output, logits: Float[Tensor, "B *L K"], targets: Targets) -> Float[Tensor, ""]:
    """Sum of weight times loss; divide by the sum of weights over the whole global batch. The logits are those of the
    scored steps (N, K) where the targets name them."""
    values, known = of_scored(targets.values, targets), known_of_scored(targets)
    losses = per_answer(output, logits, values, known, () if output.loss == "cross_entropy" else output.weights)
    return (losses * of_scored(targets.weight, targets)).sum()


def right_answers(output: Output, logits: Float[Tensor, "B *L K"], targets: Targets) -> Float[Tensor, ""]:
    """How many scored answers are right, every one counted alike; each is the mean over its quantities."""
    equal = (answers(output, logits) == of_scored(targets.values, targets)).float()
    right = mean_of_known(equal, known_of_scored(targets))
    return (right * (of_scored(targets.weight, targets) > 0)).sum()


def of_scored(x: Tensor, targets: Targets) -> Tensor:
    """Of x (b, L, ...), what belongs to the scored steps (N, ...)."""
    return x if targets.scored is None else x.flatten(0, 1)[targets.scored]


def known_of_scored(targets: Targets) -> Bool[Tensor, "N *L S"] | None:
    """Which quantities of the scored answers count; None: all."""
    return None if targets.known is None else of_scored(targets.known, targets)


def among_all(x: Tensor, targets: Targets) -> Tensor:
    """What belongs to the scored steps (N, ...), in its place among all (b, L, ...); elsewhere zero."""
    if targets.scored is None:
        return x
    shape = targets.weight.shape
    whole = x.new_zeros(shape.numel(), *x.shape[1:])
    return whole.index_copy_(0, targets.scored, x).unflatten(0, shape)


LEAST_VARIANCE = 1e-6  # of a gaussian answer
