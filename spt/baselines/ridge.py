"""Ridge regression on standardised features, its penalty chosen on validation; of classes on targets of +1 and -1, of
labels on 1 and 0, each over the rows in which it is known.

Letters: n training rows, m others, F features, K classes or target values.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.baselines.base import CHOOSING, ROWS, Fitted, Query, answers, cap_note, drawn
from spt.baselines.scores import ComparedMetric, is_better, score
from spt.tasks.base import Classes, Labels, Target, TaskData, known_targets

Features = Callable[[Query], NDArray[np.float64]]  # (m, F)
PENALTIES = tuple(10.0**k for k in range(1, -7, -1))  # for each row; the largest first, which wins ties
NUMBERS = 2**26  # of the training matrix: 512 MiB


class _LinearMap(NamedTuple):
    """(m, F) -> (m, K)"""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    weights: NDArray[np.float64]
    offset: NDArray[np.float64]
    one_for_two: bool  # is one column there for two classes?

    def __call__(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        found = (x - self.mean) / self.std @ self.weights + self.offset
        return np.hstack([-found, found]) if self.one_for_two else found


def fit_ridge(data: TaskData, metric: ComparedMetric, features: Features, sees: str) -> Fitted:
    """The map whose penalty has the best validation score."""
    wide = features(drawn(data.train, 1, "train").asked).shape[1]
    train = drawn(data.train, max(1, min(ROWS, NUMBERS // max(wide, 1))), "train")
    val = drawn(data.val, CHOOSING, "val")
    x, x_val = answers(features, train.asked), answers(features, val.asked)
    mean, std = x.mean(axis=0), x.std(axis=0)
    std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)
    x -= mean
    x /= std
    y, two = _columns(data.target, train.targets), isinstance(data.target, Classes) and data.target.count == 2
    known = known_targets(train.targets) if isinstance(data.target, Labels) else np.ones(y.shape, bool)
    offset = np.where(known, y, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    best, chosen, line = None, PENALTIES[0], None
    for penalty, weights in _solutions_of_known(x, y - offset, known):
        tried = _LinearMap(mean, std, weights, offset, two)
        found = score(data.target, val.targets, tried(x_val), metric)
        if is_better(found, best, metric):
            best, chosen, line = found, penalty, tried
    assert line is not None

    def answer(asked: Query) -> NDArray[np.float64]:
        return line(features(asked))

    rows = len(train.asked.rows)
    return Fitted(answer, sees, rows, {"penalty": chosen}, len(PENALTIES), cap_note(rows, data.train))


def _columns(target: Target, targets: NDArray[Any]) -> NDArray[np.float64]:
    """(n, K) of numbers; of classes +1 and -1, of two of them in one column."""
    if not isinstance(target, Classes):
        return targets.astype(np.float64)
    if target.count == 2:
        return np.where(targets == 1, 1.0, -1.0)[:, None]
    return np.where(targets[:, None] == np.arange(target.count), 1.0, -1.0)


def _solutions_of_known(
    x: NDArray[np.float64], y: NDArray[np.float64], known: NDArray[np.bool_]
) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """(F, K) weights at every penalty, each column's from the rows in which it is known."""
    if known.all():
        yield from _solutions(x, y)
        return
    found = {penalty: np.zeros((x.shape[1], y.shape[1])) for penalty in PENALTIES}
    patterns, pattern_of = np.unique(known, axis=1, return_inverse=True)
    for i, rows in enumerate(patterns.T):
        columns = np.flatnonzero(pattern_of.reshape(-1) == i)
        if rows.any():
            for penalty, weights in _solutions(x[rows], y[np.ix_(rows, columns)]):
                found[penalty][:, columns] = weights
    yield from found.items()


def _solutions(x: NDArray[np.float64], y: NDArray[np.float64]) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """(F, K) weights at every penalty, from the smaller of the two Gram matrices."""
    from scipy.linalg import LinAlgWarning, solve

    n, wide = x.shape
    gram, right = (x.T @ x, x.T @ y) if wide <= n else (x @ x.T, y)
    for penalty in PENALTIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LinAlgWarning)  # what a bad solution spoils, validation does not choose
            found = solve(gram + penalty * n * np.eye(len(gram)), right, assume_a="pos")
        yield penalty, found if wide <= n else x.T @ found
