"""Gradient boosting (scikit-learn's histogram trees) on what summarises a row: shares of tokens; moments, quantiles and
catch22 features of each channel; where all rows are equally long and not long, each step by its place too. Of single
steps: the input there and beside it.

Letters: m rows or steps, F features, K classes or target values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.baselines import catch22
from spt.baselines.base import (
    CHOOSING,
    ROWS,
    ROWS_AT_ONCE,
    Answer,
    Baseline,
    Fitted,
    Query,
    answers,
    cap_note,
    drawn,
    refuse_one_class,
    two_classes,
)
from spt.baselines.classifiers import LabelClassifiers
from spt.baselines.scores import ComparedMetric, is_better, score
from spt.data.features import (
    OF_STEPS,
    OF_TOKENS,
    even,
    joined,
    joined_name,
    spans,
    stacked,
    step_features,
    summaries,
    token_shares,
    with_static,
)
from spt.tasks.base import Classes, Labels, TaskData, Tokens

BY_PLACE = 1_024  # numbers of a row up to which each is a feature
MOST_TOKENS = 256  # of a larger vocabulary, the commonest in training
TREES = 1_000  # in all, of each setting, at most
WORK = 4 * 10**9  # numbers that these may look at: what bounds the time, to a few minutes of one core
ROUNDS = 200  # of boosting, each with a tree for every class
RATE = 0.1
LEAVES = (7, 31)  # of a tree


def fit(data: TaskData, metric: ComparedMetric, seed: int) -> Fitted:
    """The size of trees and the number of rounds with the best validation score; of equals the smaller."""
    features, sees = _features(data)
    train, val = drawn(data.train, ROWS, "train"), drawn(data.val, CHOOSING, "val")
    refuse_one_class(data.target, train)
    x, x_val = answers(features, train.asked), answers(features, val.asked)
    each = _trees_a_round(data)
    rounds = max(5, min(ROUNDS, TREES // each, WORK // (x.size * each)))
    best, leaves, chosen = None, LEAVES[0], 1
    for size in LEAVES:
        tried = _Trees(data, metric, seed, size, rounds).fit(x, train.targets)
        for number, found in enumerate(tried.staged(x_val), 1):
            reached = score(data.target, val.targets, found, metric)
            if is_better(reached, best, metric):
                best, leaves, chosen = reached, size, number
    trees = _Trees(data, metric, seed, leaves, chosen).fit(x, train.targets)
    rows, settings = len(x), {"leaves": leaves, "rounds": chosen}

    def answer(asked: Query) -> NDArray[np.float64]:
        return trees.answers(features(asked))

    return Fitted(answer, sees, rows, settings, len(LEAVES) * rounds, cap_note(rows, data.train))


def _trees_a_round(data: TaskData) -> int:
    if isinstance(data.target, Classes):
        return 1 if data.target.count == 2 else data.target.count
    return data.target.count if isinstance(data.target, Labels) else data.target.size


class _Trees:
    """Boosted trees for classes, or for each of K labels or numbers."""

    def __init__(self, data: TaskData, metric: ComparedMetric, seed: int, leaves: int, rounds: int) -> None:
        self.target, self.metric = data.target, metric.name
        self.options: dict[str, Any] = {
            "learning_rate": RATE,
            "max_iter": rounds,
            "max_leaf_nodes": leaves,
            "max_features": 0.5,  # of a split: what chance decides
            "early_stopping": False,
            "random_state": seed,
        }

    def fit(self, x: NDArray[np.float64], targets: NDArray[Any]) -> "_Trees":
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        if isinstance(self.target, Classes):
            self.models = [HistGradientBoostingClassifier(**self.options).fit(x, targets)]
        elif isinstance(self.target, Labels):
            self.labels = LabelClassifiers(
                lambda x, y: HistGradientBoostingClassifier(**self.options).fit(x, y), x, targets
            )
        else:
            loss = "absolute_error" if self.metric == "mae" else "squared_error"
            self.models = [
                HistGradientBoostingRegressor(loss=loss, **self.options).fit(x, y)
                for y in np.asarray(targets, np.float64).T
            ]
        return self

    def answers(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """(m, K)"""
        if isinstance(self.target, Classes):
            return self._of_classes(self.models[0].predict_proba(x))
        if isinstance(self.target, Labels):
            return self.labels.answers(x)
        return np.stack([model.predict(x) for model in self.models], axis=1)

    def staged(self, x: NDArray[np.float64]) -> Any:
        """(m, K) after every round."""
        if isinstance(self.target, Classes):
            yield from map(self._of_classes, self.models[0].staged_predict_proba(x))
        elif isinstance(self.target, Labels):
            yield from self.labels.staged(x)
        else:
            for found in zip(*(model.staged_predict(x) for model in self.models), strict=True):
                yield np.stack(found, axis=1)

    def _of_classes(self, found: NDArray[np.float64]) -> NDArray[np.float64]:
        """With a column for classes that training does not have."""
        assert isinstance(self.target, Classes)
        whole = np.zeros((len(found), self.target.count))
        whole[:, self.models[0].classes_] = found
        return whole


def _features(data: TaskData) -> tuple[Answer, str]:
    """What gives the features of rows or steps, and what they are."""
    if data.target.per_step:
        return lambda asked: step_features(data, asked.split, asked.places), OF_STEPS
    name, summarised = _summarised(data)
    if data.length * (1 if isinstance(data.input, Tokens) else data.input.channels) > BY_PLACE or not even(data):
        return lambda asked: with_static(summarised(asked), asked.split, asked.rows), joined_name(name, data.train)

    def with_places(asked: Query) -> NDArray[np.float64]:
        x = np.hstack([summarised(asked), _by_place(data, asked)])  # NaN where a value is missing, which trees take
        return with_static(x, asked.split, asked.rows)

    return with_places, joined_name(f"{name}, and every step by its place", data.train)


def _summarised(data: TaskData) -> tuple[str, Answer]:
    """What summarises a row, by name."""
    if not isinstance(data.input, Tokens):
        name = "moments, quantiles and catch22 features of each channel"
        return name, lambda asked: np.hstack([_summaries(data, asked), catch22.features(data.input, asked)])
    input, common = data.input, _common(data)

    def shares(asked: Query) -> NDArray[np.float64]:
        ends = spans(asked.split, asked.rows)
        return joined([token_shares(input, asked.split, *each)[:, common] for each in ends])

    return OF_TOKENS, shares


def _by_place(data: TaskData, asked: Query) -> NDArray[np.float64]:
    """(m, F) All tokens or numbers of the sequences, which are equally long."""
    parts = []
    for starts, stops in spans(asked.split, asked.rows):
        values = stacked(asked.split, starts, stops)
        values = data.input.ids(values) if isinstance(data.input, Tokens) else values
        parts.append(values.reshape(len(values), -1).astype(np.float64))
    return joined(parts)


def _common(data: TaskData) -> NDArray[np.int64]:
    """Columns of the tokens that are commonest in training, and of the length."""
    asked = drawn(data.train, ROWS_AT_ONCE, "train").asked
    (starts, stops), *_ = spans(asked.split, asked.rows)
    assert isinstance(data.input, Tokens)
    shares = token_shares(data.input, asked.split, starts, stops).mean(axis=0)
    tokens = np.sort(np.argsort(-shares[:-1], kind="stable")[:MOST_TOKENS])
    return np.append(tokens, len(shares) - 1)


def _summaries(data: TaskData, asked: Query) -> NDArray[np.float64]:
    return joined([summaries(data.input, asked.split, *ends) for ends in spans(asked.split, asked.rows)])


BASELINE = Baseline(
    "boosting",
    "Gradient boosting",
    "Gradient boosting",
    1,
    chance=True,
    probabilities=True,
    applies=two_classes,
    fit=fit,
)
