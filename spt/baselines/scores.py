"""The metrics of a report for answers without a network, as spt/training/metrics.py defines them; tests hold the two
against each other.

Letters: m rows or steps, K classes or target values.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.config.recipe import LOWER_IS_BETTER
from spt.data.metrics import FROM_NUMBERS, confusion_matrix, of_confusion, of_labels, of_numbers, of_probabilities
from spt.errors import DataError
from spt.tasks.base import IGNORED, Classes, Labels, Target

MANY = 256  # classes; of more, macro averages are not kept
OF_CLASSES = ("balanced_accuracy", "f1", "f1_weighted", "f1_micro", "mcc")  # from spt/data/metrics.py
AREAS = ("auroc", "auprc")  # likewise, of scores
OF_POSITIVE = ("f1", *AREAS)  # of one class, where there is a positive one
OF_SCORES = (*AREAS, "log_loss")
OF_ANSWERS = ("accuracy", "f1_macro", "accuracy_macro", *OF_CLASSES, "exact_match", "mae", "mse", "r2", *FROM_NUMBERS)
KNOWN = (*OF_ANSWERS, *OF_SCORES)
HOLDS = 0.5  # above it a label is said to hold


class ComparedMetric(NamedTuple):
    """What a baseline is held against networks in."""

    name: str
    positive: int | None = None  # the class that f1, auroc and auprc are of; None: there is none


def scores(
    target: Target,
    truth: NDArray[Any],
    found: NDArray[Any],
    names: Collection[str] = (*OF_ANSWERS, *AREAS),
    positive: int | None = None,
) -> dict[str, float]:
    """Of classes (m,) or a score of each (m, K), of labels (m, K), each said to hold where a number is above 1/2, or
    of numbers (m, K): what answers alone decide, and of the rest what is among the names."""
    if isinstance(target, Labels):
        return _of_labels(truth, found, names)
    if isinstance(target, Classes):
        return _of_classes(truth, found, target.count, names, positive)
    return _of_numbers(_as_networks_see(truth), np.asarray(found, np.float64))


def best_classes(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """(m, K) -> (m,)"""
    return scores.argmax(axis=1)


def score(target: Target, truth: NDArray[Any], answers: NDArray[np.float64], metric: ComparedMetric) -> float:
    """In one metric, from a score of every class, or label, or from numbers (m, K)."""
    found = scores(target, truth, answers, (metric.name,), metric.positive)
    if metric.name not in found:  # of the known ones that may only be so of mape
        raise DataError(f"{metric.name} divides by the target, which is 0 in some validation rows; choose mae or mse")
    return found[metric.name]


def is_better(score: float, best: float | None, metric: ComparedMetric) -> bool:
    return best is None or (score < best if LOWER_IS_BETTER[metric.name] else score > best)


def _as_networks_see(truth: NDArray[Any]) -> NDArray[np.float64]:
    """Targets have single precision in a batch."""
    return np.asarray(truth, np.float32).astype(np.float64)


def _of_classes(
    truth: NDArray[Any], found: NDArray[Any], count: int, names: Collection[str], positive: int | None
) -> dict[str, float]:
    said = best_classes(found) if found.ndim == 2 else found
    right = truth == said
    totals = {"accuracy": float(right.mean())}
    if count > MANY:
        return totals
    true, each, hits = (np.bincount(of, minlength=count).astype(np.float64) for of in (truth, said, truth[right]))
    totals |= {"f1_macro": _mean(2 * hits, true + each), "accuracy_macro": _mean(hits, true)}
    if {*names} & {*OF_CLASSES}:
        totals |= of_confusion(names, confusion_matrix(truth, said, count), positive).scores
    if found.ndim == 2 and {*names} & {*OF_SCORES}:
        totals |= of_probabilities(names, truth, found, positive).scores
    return totals


def _of_labels(truth: NDArray[Any], found: NDArray[np.float64], names: Collection[str]) -> dict[str, float]:
    said, known, holds = found > HOLDS, truth != IGNORED, truth == 1
    right = (said == holds) & known
    asked, hits, either = known.any(0), (holds & said).sum(0), (holds.astype(int) + (said & known)).sum(0)
    totals = {
        "accuracy": float((right.sum(0)[asked] / known.sum(0)[asked]).mean()),
        "exact_match": float((right == known).all(1).mean()),
        "f1_macro": _mean(2.0 * hits, either.astype(np.float64)) if either.any() else 0.0,
        "f1_micro": float(2 * hits.sum() / either.sum()) if either.any() else 0.0,
    }
    for name in {*names} & {"mcc", *AREAS}:
        answers = said.astype(np.float64) if name == "mcc" else found
        totals[name] = of_labels(truth, answers, names=[f"{name}_macro"]).scores[f"{name}_macro"]
    return totals


def _mean(of: NDArray[np.float64], by: NDArray[np.float64]) -> float:
    """Over the classes that have any."""
    return float((of[by > 0] / by[by > 0]).mean())


def _of_numbers(truth: NDArray[np.float64], found: NDArray[np.float64]) -> dict[str, float]:
    if not np.isfinite(truth).all():  # some are missing: each number by itself, and the mean of all
        columns = [(y, z, np.isfinite(y)) for y, z in zip(truth.T, found.T, strict=True)]
        each = [_of_numbers(y[known, None], z[known, None]) for y, z, known in columns if known.any()]
        return {name: float(np.mean([scores[name] for scores in each])) for name in each[0]}
    error = found - truth
    squared, centred = np.square(error).sum(0), truth - truth.mean(0)
    spread = np.square(centred).sum(0)
    constant = spread <= 1e-12 * np.square(truth).sum(0)
    r2 = np.where(constant, squared == 0, 1 - squared / np.where(constant, 1.0, spread))
    totals = {"mae": float(np.abs(error).mean()), "mse": float(np.square(error).mean()), "r2": float(r2.mean())}
    return totals | of_numbers(FROM_NUMBERS, truth, found).scores
