"""Metrics that are exact over a split however it was batched."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from spt.config.objectives import usual_metric
from spt.errors import DataError
from spt.training.losses import among_all, answers, of_scored, per_answer
from spt.training.objectives import Output, Targets

Sums = dict[str, Tensor]  # name -> (B,) or (B, S), float64: one row an example


def sums(output: Output, logits: Float[Tensor, "B *L K"], targets: Targets) -> Sums:
    """What the metrics need of each example, so that any gathering of examples gives the exact metric. The logits are
    those of the scored steps (N, K) where the targets name them."""
    # Small tensors go to the CPU before they become float64, which some devices do not have.
    weight = targets.weight.cpu().double().reshape(len(targets.weight), -1)  # (B, T)
    losses = per_answer(output, logits, of_scored(targets.values, targets))
    loss = among_all(losses, targets).cpu().double().reshape(weight.shape)
    totals = {"weight": weight.sum(1), "loss": (weight * loss).sum(1)}
    if output.loss == "cross_entropy":
        predicted, truth = among_all(answers(output, logits), targets), targets.values
        right = (predicted == truth).float().mean(-1).cpu().double().reshape(weight.shape)
        totals |= {"right": (weight * right).sum(1)}
        if output.macro:
            predicted, truth = (classes[..., 0].cpu().reshape(weight.shape) for classes in (predicted, truth))
            entries = {"true": (truth, weight), "predicted": (predicted, weight), "hits": (truth, weight * right)}
            if output.balanced:
                entries |= {"class_loss": (truth, weight * loss)}
            nothing = torch.zeros(len(weight), output.classes, dtype=torch.float64)
            totals |= {name: nothing.scatter_add(1, at, entry) for name, (at, entry) in entries.items()}
        return totals
    truth = targets.values.cpu().double().reshape(*weight.shape, output.size)  # (B, T, S)
    error = among_all(answers(output, logits), targets).cpu().double().reshape(truth.shape) - truth
    weigh = weight[..., None]
    if output.shift:  # of no account to a variance, and a large mean would swallow it
        truth = truth - torch.tensor(output.shift, dtype=torch.float64)
    return totals | {
        "absolute": (weigh * error.abs()).sum(1),
        "squared": (weigh * error.square()).sum(1),
        "truth": (weigh * truth).sum(1),
        "truth_squared": (weigh * truth.square()).sum(1),
    }


def metrics(output: Output, totals: Mapping[str, Tensor]) -> dict[str, float]:
    """loss, and accuracy or (mae, mse, r2), from sums over all examples.

    r2 = 1 - squared error / variance of the truth, per quantity, then the mean; where the truth is constant it is 1
    for a perfect answer and else 0, as in scikit-learn. Raises DataError when nothing was scored.
    """
    weight = float(totals["weight"])
    if weight == 0:
        raise DataError(
            "no position of this split is scored: it is too small for the masking ratio, or its sequences have one step"
        )
    scores = {"loss": float(totals["loss"]) / weight}
    if output.loss == "cross_entropy":
        scores["accuracy"] = float(totals["right"]) / weight
        return scores | {name: float(value) for name, value in _by_class(output, totals).items()}
    spread = totals["truth_squared"] - totals["truth"].square() / weight
    perfect = (totals["squared"] == 0).double()
    r2 = torch.where(spread > 1e-12 * totals["truth_squared"], 1 - totals["squared"] / spread, perfect)
    return scores | {
        "mae": float(totals["absolute"].mean()) / weight,
        "mse": float(totals["squared"].mean()) / weight,
        "r2": float(r2.mean()),
    }


def _by_class(output: Output, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What counts every class alike, from sums (..., C): the mean recall of the classes that occur, and the mean F1 of
    those that occur or are answered, as scikit-learn has them; and the loss where it does so too."""
    if not output.macro:
        return {}
    true, predicted, hits = totals["true"], totals["predicted"], totals["hits"]

    def mean(of: Tensor, by: Tensor) -> Tensor:
        return torch.where(by > 0, of / by.clamp_min(1e-300), 0.0).sum(-1) / (by > 0).sum(-1)

    scores = {"f1_macro": mean(2 * hits, true + predicted), "accuracy_macro": mean(hits, true)}
    return scores | ({"loss": mean(totals["class_loss"], true)} if output.balanced else {})


def text_scores(loss: float, answers: int, text_bytes: int) -> dict[str, float]:
    """Of a language model whose mean loss over so many tokens is this, in nats."""
    return {"perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": loss * answers / (text_bytes * math.log(2))}


def batch_means(output: Output, whole: Mapping[str, Tensor], size: int) -> dict[str, float]:
    """The metrics as the published code has them: means over full batches of `size` examples, the rest left out.

    `whole` holds the sums of every example, in the order of the split. r2 of a batch is 1 - mse / max(v, 1e-5), with
    v the variance of all its true numbers together. A batch without a scored position is left out. Raises DataError
    when none is left.
    """
    n = len(whole["weight"]) // size
    if n == 0:
        raise DataError(
            f"metric_average per_batch: this split has {len(whole['weight'])} rows, not one batch of {size}; "
            "use a smaller batch_size, or metric_average exact"
        )
    by_batch = {name: tensor[: n * size].unflatten(0, (n, size)).sum(1) for name, tensor in whole.items()}
    scored = by_batch["weight"] > 0
    if not scored.any():
        return metrics(output, {name: tensor.sum(0) for name, tensor in by_batch.items()})  # raises
    by_batch = {name: tensor[scored] for name, tensor in by_batch.items()}
    weight = by_batch["weight"]

    def mean(name: str) -> Tensor:
        """(n,) of each batch, over its scored positions and their quantities."""
        return by_batch[name].reshape(len(weight), -1).mean(1) / weight

    means = {"loss": mean("loss")}
    if output.loss == "cross_entropy":
        means["accuracy"] = mean("right")
        means |= _by_class(output, by_batch)
    else:
        # `sums` leaves each target's shift out; the variance of all numbers together needs them in.
        shift = torch.tensor(output.shift or (0.0,) * output.size, dtype=torch.float64)
        truth = by_batch["truth"] / weight[:, None]
        squared = by_batch["truth_squared"] / weight[:, None] + 2 * shift * truth + shift.square()
        variance = squared.mean(1) - (truth + shift).mean(1).square()
        r2 = 1 - mean("squared") / variance.clamp_min(1e-5)
        means |= {"mae": mean("absolute"), "mse": mean("squared"), "r2": r2}
    return {name: float(values.mean()) for name, values in means.items()}


def default_metric(output: Output) -> str:
    """What selects the checkpoint and is compared: the objective's choice, else what is usual of its loss."""
    return output.metric or usual_metric(output.loss, output.text)
