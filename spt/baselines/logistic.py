"""Logistic regression on every step by its place, where all rows are equally long and not long: of images on their
pixels. Tokens are seen as what they are, one of a vocabulary, and as numbers, since some are (grey levels).

Letters: m rows, n training rows, L steps, C channels, V entries of a vocabulary, F features, K classes or labels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    only_rows,
    refuse_one_class,
    two_classes,
)
from spt.baselines.classifiers import UNFINISHED, Answers, fit_logistic
from spt.baselines.scores import ComparedMetric, is_better, score
from spt.data.features import even, joined, joined_name, spans, stacked, with_flags, with_static
from spt.runs.plan import Factor
from spt.tasks.base import Reals, TaskData, Tokens, Values

WIDE = 4_096  # features of a sequence, at most
NUMBERS = 2**25  # of the training matrix, for ten classes: a few minutes of one core at most
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # C of scikit-learn; the smallest first, which wins ties


def applies(data: TaskData) -> str | None:
    if isinstance(data.target, Reals):
        return "it tells classes apart, and here targets are numbers (the linear probe has a map of them)"
    if (reason := only_rows(data)) is not None:
        return reason
    if not even(data):
        return "it has a weight for every step by its place, and here sequences are not equally long"
    width = data.length * (1 if isinstance(data.input, Tokens) else data.input.channels)
    if width > WIDE:
        return f"it has a weight for every step by its place, and {width:,} numbers a sequence are more than {WIDE:,}"
    return two_classes(data)


def fit(data: TaskData, metric: ComparedMetric, seed: int) -> Fitted:
    """The way to see tokens and the strength with the best validation score."""
    assert not isinstance(data.target, Reals)
    views = _views(data)
    wide = max(features(drawn(data.train, 1, "train").asked).shape[1] for features in views.values())
    most = max(1, NUMBERS // wide)
    train = drawn(data.train, min(ROWS, max(1, most // max(1, data.target.count // 10))), "train")
    refuse_one_class(data.target, train)
    val = drawn(data.val, min(CHOOSING, most), "val")
    best, chosen, decide, notes = None, dict[str, Factor](), None, list[str]()
    for view, features in views.items():
        x, x_val = answers(features, train.asked), answers(features, val.asked)
        for strength in STRENGTHS:
            tried, finished = fit_logistic(data.target, x, train.targets, strength)
            reached = score(data.target, val.targets, tried(x_val), metric)
            if is_better(reached, best, metric):
                best, decide = reached, _after(features, tried)
                chosen = {"C": strength, **({"tokens as": view} if isinstance(data.input, Tokens) else {})}
                notes = [] if finished else [UNFINISHED]
    assert decide is not None
    rows = len(train.asked.rows)
    sees = joined_name("every step by its place", data.train)
    return Fitted(decide, sees, rows, chosen, len(views) * len(STRENGTHS), (*cap_note(rows, data.train), *notes))


def _views(data: TaskData) -> dict[str, Answer]:
    """(m, F) of rows, by what tokens are taken for."""

    def view(of: Callable[[NDArray[Any]], NDArray[np.float64]]) -> Answer:
        def features(asked: Query) -> NDArray[np.float64]:
            parts = [of(stacked(asked.split, *ends)) for ends in spans(asked.split, asked.rows)]
            return with_static(joined(parts), asked.split, asked.rows)

        return features

    input = data.input
    if isinstance(input, Values):
        return {"numbers": view(lambda values: _standard(input, values))}
    asked = drawn(data.train, ROWS_AT_ONCE, "train").asked
    sample = np.concatenate([input.ids(stacked(asked.split, *ends)) for ends in spans(asked.split, asked.rows)])
    mean, std = sample.mean(), sample.std() or 1.0
    views = {"numbers": view(lambda values: (input.ids(values) - mean) / std)}
    if data.length * input.vocab <= WIDE:
        tokens = np.arange(input.vocab)
        views["names"] = view(lambda values: (input.ids(values)[..., None] == tokens).reshape(len(values), -1) * 1.0)
    return views


def _standard(input: Values, values: NDArray[Any]) -> NDArray[np.float64]:
    """(m, L, C) -> (m, F) As networks see them, with flags where values may be missing."""
    return with_flags(replace(input, mean=(), std=()), (values - input.mean) / input.std)


def _after(features: Answer, decide: Answers) -> Answer:
    return lambda asked: decide(features(asked))


BASELINE = Baseline(
    "logistic",
    "Logistic regression by place",
    "Logistic regression by place",
    1,
    chance=False,
    probabilities=True,
    applies=applies,
    fit=fit,
)
