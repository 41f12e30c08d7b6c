"""What scikit-learn's classifiers answer: of classes, or one of them for each of several labels, fitted to the rows in
which the label is known.

Letters: m rows or steps, F features, K classes or labels.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import Classes, Labels, known_targets

STEPS = 300  # of the optimiser of logistic regression
UNFINISHED = f"the optimiser was ended after {STEPS} steps"

Answers = Callable[[Any], NDArray[np.float64]]  # (m, F) -> (m, K)


def fit_logistic(target: Classes | Labels, x: Any, targets: NDArray[Any], strength: float) -> tuple[Answers, bool]:
    """Logistic regression of (n, F) features, dense or sparse; and whether its training came to an end."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    def fit(x: Any, targets: NDArray[Any]) -> Any:
        return LogisticRegression(C=strength, max_iter=STEPS).fit(x, targets)

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ConvergenceWarning)
        if isinstance(target, Classes):
            return _answers_of_classes(fit(x, targets), target.count), not raised
        return LabelClassifiers(fit, x, targets).answers, not raised


def _answers_of_classes(model: Any, count: int) -> Answers:
    """(m, F) -> (m, K) probabilities, with a column for classes that training does not have."""

    def decide(rows: Any) -> NDArray[np.float64]:
        found = model.predict_proba(rows).astype(np.float64)
        whole = np.zeros((len(found), count))
        whole[:, model.classes_] = found / found.sum(axis=1, keepdims=True)  # which single precision leaves near 1
        return whole

    return decide


class LabelClassifiers:
    """Scikit-learn's classifiers by label; a label that is the same in all rows needs none."""

    def __init__(self, fit: Callable[[Any, NDArray[Any]], Any], x: Any, targets: NDArray[Any]) -> None:
        self.models: list[Any] = []  # of a label that is alike its probability, 0 or 1
        for known, truth in zip(known_targets(targets).T, targets.T, strict=True):
            rows = np.flatnonzero(known)
            alike = len(np.unique(truth[rows])) < 2
            self.models.append(float(truth[rows].any()) if alike else fit(x[rows], truth[rows]))

    def answers(self, x: Any) -> NDArray[np.float64]:
        """(m, F) -> (m, K) probabilities."""
        columns = [
            np.full(x.shape[0], model) if isinstance(model, float) else model.predict_proba(x)[:, 1]
            for model in self.models
        ]
        return np.stack(columns, axis=1).astype(np.float64)

    def staged(self, x: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
        """The same after every round of boosting; once, where every label is alike in these rows."""
        if all(isinstance(model, float) for model in self.models):
            yield self.answers(x)
            return
        columns = [
            itertools.repeat(np.full((len(x), 2), model)) if isinstance(model, float) else model.staged_predict_proba(x)
            for model in self.models
        ]
        for found in zip(*columns, strict=False):  # a constant goes on for ever
            yield np.stack([each[:, 1] for each in found], axis=1)
