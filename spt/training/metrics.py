"""Metrics that are exact over a split however it was batched."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from spt.config.objectives import usual_metric
from spt.data.metrics import (
    FROM_ANSWERS,
    UNASKED,
    UNKNOWN,
    MetricValues,
    of_confusion,
    of_labels,
    of_numbers,
    of_probabilities,
)
from spt.errors import DataError, UsageError
from spt.tasks.base import IGNORED, Split
from spt.training.losses import among_all, answers, known_of_scored, mean_of_known, of_scored, per_answer
from spt.training.objectives import Output, Targets, of_whole_split

OF_LABELS = ("known", "right_by_label", "true", "predicted", "hits")  # sums of labels, one each
OF_NUMBERS = ("absolute", "squared", "truth", "truth_squared")  # sums of real quantities, one each
MOST_SCORES = 2**24  # numbers of all answers that are kept, where every step has one
Sums = dict[str, Tensor]  # name -> (B,) or (B, S), float64: one row an example


class NothingScored(DataError):
    """No row or step of a split was asked about."""


class Scores(NamedTuple):
    """Answers and their losses: all that metrics need which only the device knows."""

    answers: Int[Tensor, "B *L S"] | Float[Tensor, "B *L S"]
    losses: Float[Tensor, " B *L"]


def answer_scores(output: Output, logits: Float[Tensor, "B *L K"], targets: Targets) -> Scores:
    """Of the logits, where they are; those of the scored steps (N, K) where the targets name them."""
    losses = per_answer(output, logits, of_scored(targets.values, targets), known_of_scored(targets))
    return Scores(answers(output, logits), losses)


def sums(output: Output, logits: Float[Tensor, "B *L K"], targets: Targets) -> Sums:
    """What the metrics need of each example, so that any gathering of examples gives the exact metric. The logits are
    those of the scored steps (N, K) where the targets name them."""
    return sums_of_scores(output, answer_scores(output, logits, targets), targets)


def sums_of_scores(output: Output, scores: Scores, targets: Targets) -> Sums:
    """The same from what has come back from the device. All on the CPU: some devices have no float64."""
    weight = targets.weight.double().reshape(len(targets.weight), -1)  # (B, T)
    loss = among_all(scores.losses, targets).double().reshape(weight.shape)
    totals = {"weight": weight.sum(1), "loss": (weight * loss).sum(1)}
    said = among_all(scores.answers, targets)
    if output.loss == "cross_entropy":
        truth = targets.values
        right = mean_of_known((said == truth).float(), targets.known).double().reshape(weight.shape)
        totals |= {"right": (weight * right).sum(1)}
        if output.macro:
            predicted, truth = (classes[..., 0].reshape(weight.shape) for classes in (said, truth))
            entries = {"true": (truth, weight), "predicted": (predicted, weight), "hits": (truth, weight * right)}
            if output.balanced:
                entries |= {"class_loss": (truth, weight * loss)}
            nothing = torch.zeros(len(weight), output.classes, dtype=torch.float64)
            totals |= {name: nothing.scatter_add(1, at, entry) for name, (at, entry) in entries.items()}
        return totals
    if output.loss == "binary_cross_entropy":
        return totals | _sums_of_labels(output, said, targets, weight)
    truth = targets.values.double().reshape(*weight.shape, output.size)  # (B, T, S)
    error = said.double().reshape(truth.shape) - truth
    weigh = weight[..., None]
    if targets.known is not None:
        weigh = weigh * targets.known.double().reshape(truth.shape)
        totals |= {"known": weigh.sum(1)}
    if output.shift:  # of no account to a variance, and a large mean would swallow it
        truth = truth - torch.tensor(output.shift, dtype=torch.float64)
    return totals | {
        "absolute": (weigh * error.abs()).sum(1),
        "squared": (weigh * error.square()).sum(1),
        "truth": (weigh * truth).sum(1),
        "truth_squared": (weigh * truth.square()).sum(1),
    }


def _sums_of_labels(
    output: Output, said: Int[Tensor, "B *L S"], targets: Targets, weight: Float[Tensor, "B T"]
) -> Sums:
    """Of every label how often it is known, answered rightly, holds, is said to hold, and both; of every example how
    much of its answers is right, and how many are right in every known label."""
    shape = (*weight.shape, output.size)  # (B, T, K)
    truth, said = (each.double().reshape(shape) for each in (targets.values, said))
    known = torch.ones_like(truth) if targets.known is None else targets.known.double().reshape(shape)
    weigh, right = weight[..., None] * known, (said == truth).double()
    share = mean_of_known(right, known > 0)
    return {
        "right": (weight * share).sum(1),
        "exact": (weight * (share == 1)).sum(1),
        "known": weigh.sum(1),
        "right_by_label": (weigh * right).sum(1),
        "true": (weigh * truth).sum(1),
        "predicted": (weigh * said).sum(1),
        "hits": (weigh * truth * said).sum(1),
    }


def metrics(output: Output, totals: Mapping[str, Tensor]) -> dict[str, float]:
    """loss, and accuracy or (mae, mse, r2), from sums over all examples.

    r2 = 1 - squared error / variance of the truth, per quantity, then the mean; where the truth is constant it is 1
    for a perfect answer and else 0, as in scikit-learn. Where some are unknown, mae, mse and r2 are means over
    quantities, each over the answers in which it is known. Raises NothingScored.
    """
    weight = float(totals["weight"])
    if weight == 0:
        raise NothingScored(
            "no position of this split is scored: it is too small for the masking ratio, or its sequences have one step"
        )
    scores = {"loss": float(totals["loss"]) / weight}
    if output.loss == "binary_cross_entropy":
        return scores | _of_labels(totals, weight)
    if output.loss == "cross_entropy":
        scores["accuracy"] = float(totals["right"]) / weight
        return scores | {name: float(value) for name, value in _by_class(output, totals).items()}
    if "known" in totals:
        kept = totals["known"] > 0
        count = totals["known"][kept]
        absolute, squared, truth, truth_squared = (totals[name][kept] for name in OF_NUMBERS)
    else:
        count = totals["weight"]
        absolute, squared, truth, truth_squared = (totals[name] for name in OF_NUMBERS)
    spread = truth_squared - truth.square() / count
    r2 = torch.where(spread > 1e-12 * truth_squared, 1 - squared / spread, (squared == 0).double())
    return scores | {
        "mae": float((absolute / count).mean()),
        "mse": float((squared / count).mean()),
        "r2": float(r2.mean()),
    }


def _of_labels(totals: Mapping[str, Tensor], weight: float) -> dict[str, float]:
    """accuracy: the mean over labels of the share of right answers, each over the answers in which it is known;
    exact_match: the share of answers that are right in all known labels; f1_micro; and f1_macro, the mean over the
    labels that hold or are said to hold anywhere (scikit-learn's with zero_division=nan), 0 without one."""
    known, right, true, predicted, hits = (totals[name] for name in OF_LABELS)
    asked, either = known > 0, true + predicted
    counted = either > 0
    return {
        "accuracy": float((right[asked] / known[asked]).mean()),
        "exact_match": float(totals["exact"]) / weight,
        "f1_macro": float((2 * hits[counted] / either[counted]).mean()) if counted.any() else 0.0,
        "f1_micro": float(2 * hits.sum() / either.sum()) if counted.any() else 0.0,
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


class ScoredAnswers(NamedTuple):
    """All scored answers to a split, in its order."""

    truth: NDArray[Any]  # (m,) classes or (m, S) numbers
    logits: Float[Tensor, "m K"]
    rows: NDArray[np.int64]  # (m,) whose they are

    def of(self, some: NDArray[Any]) -> "ScoredAnswers":
        return ScoredAnswers(self.truth[some], self.logits[torch.from_numpy(some)], self.rows[some])


def of_known(answered: ScoredAnswers) -> ScoredAnswers:
    """Those whose truth is known; numbers as networks see them, in single precision."""
    truth = answered.truth
    if truth.ndim == 2:
        truth = truth.astype(np.float32).astype(np.float64)
    known = truth != IGNORED if truth.ndim == 1 else np.isfinite(truth).any(1)
    whole = answered._replace(truth=truth)
    return whole if known.all() else whole.of(np.flatnonzero(known))


def probabilities(logits: Float[Tensor, "m K"], temperature: float = 1.0) -> NDArray[np.float64]:
    values: NDArray[np.float64] = (logits.double() / temperature).softmax(-1).numpy()
    return values


def confusion_counts(output: Output, scores: Scores, targets: Targets) -> Float[Tensor, "C C"]:
    """How many scored answers have true class i and are said to be j."""
    said, truth = among_all(scores.answers, targets)[..., 0], targets.values[..., 0]
    kept = targets.weight > 0
    pairs = truth[kept] * output.classes + said[kept]
    return torch.bincount(pairs, minlength=output.classes**2).double().unflatten(0, (output.classes, output.classes))


def of_all(
    output: Output, names: Collection[str], scored: ScoredAnswers | None, confusion: NDArray[np.int64] | None
) -> MetricValues:
    """Metrics by these names that need all answers of a split at once, of what there is: all scored answers, or how
    often each class was taken for which."""
    found = MetricValues({})
    if output.loss == "binary_cross_entropy":
        return _averaged(names, scored) if scored is not None else found
    if output.loss != "cross_entropy":
        return of_numbers(names, scored.truth, answers(output, scored.logits).double().numpy()) if scored else found
    if confusion is not None:
        found += of_confusion(names, confusion, output.positive)
    if scored is not None and not {*names} <= {*FROM_ANSWERS}:
        found += of_probabilities(names, scored.truth, probabilities(scored.logits), output.positive)
    return found


def _averaged(names: Collection[str], scored: ScoredAnswers) -> MetricValues:
    """Of labels, NaN where nobody knows: means over labels."""
    truth = np.nan_to_num(scored.truth, nan=UNKNOWN).astype(np.int64)
    found = of_labels(
        truth, scored.logits.double().sigmoid().numpy(), names=[f"{name}_macro" for name in sorted(names)]
    )
    notes = tuple(note.replace("_macro", "") for note in found.notes)
    return MetricValues({name.removesuffix("_macro"): score for name, score in found.scores.items()}, notes)


def scores_of_steps(output: Output, split: Split) -> int:
    """How many numbers all answers to the steps of a split are, padding included."""
    return len(split) * int(split.extents.max(initial=0)) * output.width


def unasked(output: Output, size: int) -> set[str]:
    """Metrics of all answers that are told of a split with so many numbers in its answers, whether or not anybody
    asked: those that take no time to speak of."""
    names = of_whole_split(output)
    return names if size <= UNASKED else names & {*FROM_ANSWERS}


def text_scores(loss: float, answers: int, text_bytes: int) -> dict[str, float]:
    """Of a language model whose mean loss over so many tokens is this, in nats. No score is larger than 1e100."""
    return {"perplexity": math.exp(min(loss, 230.0)), "bits_per_byte": loss * answers / (text_bytes * math.log(2))}


def batch_means(output: Output, whole: Mapping[str, Tensor], size: int) -> dict[str, float]:
    """The metrics as the published code has them: means over full batches of `size` examples, the rest left out.

    `whole` holds the sums of every example, in the order of the split. r2 of a batch is 1 - mse / max(v, 1e-5), with
    v the variance of all its true numbers together. A batch without a scored position is left out. Raises DataError
    when none is left.
    """
    if "known" in whole:
        raise UsageError(
            "metric_average per_batch is not for labels, nor for targets that may be missing; use metric_average exact"
        )
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
