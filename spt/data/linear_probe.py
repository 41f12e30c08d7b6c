"""A trivial answer to a task: a linear map of what each row holds, wherever it stands. It makes "at chance" visible."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.data.features import OF_STEPS, Features, row_features, scored, scored_steps, step_features
from spt.rng import generator
from spt.tasks.base import Classes, Labels, Reals, Split, TaskData

ROWS = 4_000  # of a split are looked at
STEPS = 10_000  # likewise, where every step has a target


def linear_probe(data: TaskData) -> dict[str, Any] | None:
    """Test scores of ridge regression on standardised features of up to 4,000 training rows, and what these are.

    Classes: accuracy, of targets +1 and -1 (scikit-learn's RidgeClassifier); real targets: r2. None where the training
    rows looked at have one class, or no step has a target; and where some answers of several may be missing.
    """
    from sklearn.linear_model import RidgeClassifier, RidgeCV

    data = data.labelled()
    if isinstance(data.target, Labels) or not _complete(data):
        return None
    if data.target.per_step and not (_asked(data.train) and _asked(data.test)):
        return None
    features = _step_features if data.target.per_step else _row_features
    x, y, name = features(data, data.train, "train")
    x_test, y_test, _ = features(data, data.test, "test")
    if isinstance(data.target, Classes) and len(np.unique(y)) < 2:
        return None
    mean, std = x.mean(axis=0), x.std(axis=0)
    x, x_test = ((rows - mean) / np.where(std > 0, std, 1.0) for rows in (x, x_test))
    if isinstance(data.target, Classes):
        answers = RidgeClassifier(alpha=float(len(x)) ** 0.5).fit(x, y).predict(x_test)
        return {"features": name, "test": {"accuracy": float((answers == y_test).mean())}}
    answers = RidgeCV(np.logspace(-2, 5, 8)).fit(x, y).predict(x_test).reshape(y_test.shape)
    spread, squared = ((y_test - y_test.mean(axis=0)) ** 2).sum(axis=0), ((answers - y_test) ** 2).sum(axis=0)
    constant = spread <= 1e-12 * (y_test**2).sum(axis=0)  # as in the networks' metric
    r2 = np.where(constant, squared <= 1e-12 * (y_test**2).sum(axis=0), 1 - squared / np.where(constant, 1.0, spread))
    return {"features": name, "test": {"r2": float(r2.mean())}}


def _row_features(data: TaskData, split: Split, part: str) -> tuple[Features, NDArray[Any], str]:
    """(m, F) of each row looked at, (m,) or (m, K) targets, and a name."""
    rows = np.sort(generator(0, "probe", part).permutation(len(split))[:ROWS])
    x, name = row_features(data, split, rows)
    return x, np.asarray(split.targets)[rows], name


def _step_features(data: TaskData, split: Split, part: str) -> tuple[Features, NDArray[Any], str]:
    """The same of scored steps."""
    places = scored_steps(split, generator(0, "probe", part).permutation(len(split)), STEPS)
    return step_features(data, split, places), np.asarray(split.targets)[places.at], OF_STEPS


def _complete(data: TaskData) -> bool:
    """Is every number of every row that has a target known?"""
    if not isinstance(data.target, Reals) or not data.target.missing:
        return True
    return all(bool(np.isfinite(np.asarray(split.targets)).all()) for split in data.splits.values())


def _asked(split: Split) -> bool:
    """Has any step of these rows a target?"""
    assert split.targets is not None
    return any(scored(piece).any() for piece in replace(split, values=split.targets).pieces())
