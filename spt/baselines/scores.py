"""The metrics of a report for answers without a network, as spt/training/metrics.py defines them; a test holds the two
against each other.

Letters: m rows or steps, K classes or target values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.config.recipe import LOWER_IS_BETTER
from spt.tasks.base import Classes, Reals

MANY = 256  # classes; of more, macro averages are not kept
KNOWN = ("accuracy", "f1_macro", "accuracy_macro", "mae", "mse", "r2")  # metrics that answers alone decide


def scores(target: Classes | Reals, truth: NDArray[Any], found: NDArray[Any]) -> dict[str, float]:
    """Of classes (m,), or of numbers (m, K)."""
    if isinstance(target, Classes):
        return _of_classes(truth, found, target.count)
    return _of_numbers(_as_networks_see(truth), np.asarray(found, np.float64))


def best_classes(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """(m, K) -> (m,)"""
    return scores.argmax(axis=1)


def score(target: Classes | Reals, truth: NDArray[Any], answers: NDArray[np.float64], metric: str) -> float:
    """In one metric, from a score of every class or from numbers (m, K)."""
    return scores(target, truth, best_classes(answers) if isinstance(target, Classes) else answers)[metric]


def is_better(score: float, best: float | None, metric: str) -> bool:
    return best is None or (score < best if LOWER_IS_BETTER[metric] else score > best)


def _as_networks_see(truth: NDArray[Any]) -> NDArray[np.float64]:
    """Targets have single precision in a batch."""
    return np.asarray(truth, np.float32).astype(np.float64)


def _of_classes(truth: NDArray[Any], found: NDArray[Any], count: int) -> dict[str, float]:
    right = truth == found
    totals = {"accuracy": float(right.mean())}
    if count > MANY:
        return totals
    true, said, hits = (np.bincount(of, minlength=count).astype(np.float64) for of in (truth, found, truth[right]))
    return totals | {"f1_macro": _mean(2 * hits, true + said), "accuracy_macro": _mean(hits, true)}


def _mean(of: NDArray[np.float64], by: NDArray[np.float64]) -> float:
    """Over the classes that have any."""
    return float((of[by > 0] / by[by > 0]).mean())


def _of_numbers(truth: NDArray[np.float64], found: NDArray[np.float64]) -> dict[str, float]:
    error = found - truth
    squared, centred = np.square(error).sum(0), truth - truth.mean(0)
    spread = np.square(centred).sum(0)
    constant = spread <= 1e-12 * np.square(truth).sum(0)
    r2 = np.where(constant, squared == 0, 1 - squared / np.where(constant, 1.0, spread))
    return {"mae": float(np.abs(error).mean()), "mse": float(np.square(error).mean()), "r2": float(r2.mean())}
