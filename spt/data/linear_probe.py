"""A trivial answer to a task: a linear map of what each row holds, wherever it stands. It makes "at chance" visible.

Letters: n examples, L steps, C channels, V entries of a vocabulary, F features.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.rng import generator
from spt.tasks.base import IGNORED, Classes, Split, TaskData, Tokens, sequence_lengths

ROWS = 4_000  # of a split are looked at
STEPS = 10_000  # likewise, where every step has a target
TOKENS = 256  # of a larger vocabulary, the rest are one
WIDE = 2_048  # as many numbers are taken as they stand; of more, their moments. Of more tokens, the rest are one
CUT = 2**16  # steps of a row that are looked at


def linear_probe(data: TaskData) -> dict[str, Any] | None:
    """Test scores of ridge regression on standardised features of up to 4,000 training rows, and what these are.

    Classes: accuracy, of targets +1 and -1 (scikit-learn's RidgeClassifier); real targets: r2. None where the training
    rows looked at have one class, or no step has a target.
    """
    from sklearn.linear_model import RidgeClassifier, RidgeCV

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
    spread = ((y_test - y_test.mean(axis=0)) ** 2).sum(axis=0)
    r2 = 1 - ((answers - y_test) ** 2).sum(axis=0) / np.where(spread > 0, spread, np.inf)
    return {"features": name, "test": {"r2": float(r2.mean())}}


def _row_features(data: TaskData, split: Split, part: str) -> tuple[NDArray[np.float64], NDArray[Any], str]:
    """(n, F) of each row, (n,) or (n, K) targets, and a name."""
    assert split.targets is not None
    rows = np.sort(generator(0, "probe", part).permutation(len(split))[:ROWS])
    starts, stops, targets = split.starts[rows], split.stops[rows], np.asarray(split.targets)[rows]
    if split.cuts is None:
        x, name = _of_sequences(data, split, starts, stops)
        return x, targets, name
    a, name = _of_sequences(data, split, starts, starts + split.cuts[rows])
    b, _ = _of_sequences(data, split, starts + split.cuts[rows], stops)
    return np.concatenate([a, b, np.abs(a - b)], axis=1), targets, f"{name} of both sequences, and their distance"


def _of_sequences(
    data: TaskData, split: Split, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.float64], str]:
    if isinstance(data.input, Tokens):
        vocab = min(data.input.vocab, WIDE)
        shares = np.zeros((len(starts), vocab + 1))
        for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            ids = np.minimum(data.input.ids(np.asarray(split.values[start : min(stop, start + CUT)])), vocab - 1)
            shares[i, :-1] = np.bincount(ids, minlength=vocab) / len(ids)
            shares[i, -1] = np.log(stop - start)
        return shares, "how often each token stands in a row, and the row's length"
    rows = (np.asarray(split.values[a : min(b, a + CUT)], np.float64) for a, b in zip(starts, stops, strict=True))
    if data.train.steps is None and data.length * data.input.channels <= WIDE and _even(data):
        return np.stack([row.reshape(-1) for row in rows]), "all numbers of a row"
    return np.stack([_moments(row) for row in rows]), "moments and quantiles of each channel, and of its changes"


def _even(data: TaskData) -> bool:
    """Are all sequences of all splits equally long?"""
    return all(bool((sequence_lengths(split) == data.length).all()) for split in data.splits.values())


def _asked(split: Split) -> bool:
    """Has any step of these rows a target?"""
    assert split.targets is not None
    return any(_scored(piece).any() for piece in replace(split, values=split.targets).pieces())


def _scored(targets: NDArray[Any]) -> NDArray[np.bool_]:
    """(L,) Which steps have a target."""
    return targets != IGNORED if targets.ndim == 1 else np.isfinite(targets[:, 0])


def _moments(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L, C) -> (F,)"""
    changes = np.diff(row, axis=0) if len(row) > 1 else np.zeros_like(row)
    moments = [row.mean(0), row.std(0), *np.quantile(row, (0, 0.1, 0.5, 0.9, 1), axis=0), changes.std(0)]
    return np.concatenate([*moments, np.abs(changes).mean(0), [np.log(len(row))]])


def _step_features(data: TaskData, split: Split, part: str) -> tuple[NDArray[np.float64], NDArray[Any], str]:
    """The same of scored steps: each with the input there and at both neighbours, and its place."""
    assert split.targets is not None
    xs, ys, left = [], [], STEPS
    rows = generator(0, "probe", part).permutation(len(split))
    for start, stop in zip(split.starts[rows].tolist(), split.stops[rows].tolist(), strict=True):
        targets = np.asarray(split.targets[start:stop])
        places = np.flatnonzero(_scored(targets))
        places = places[:: max(1, -(-len(places) // 256))]  # of many rows rather than all steps of one
        if not len(places):
            continue
        near = np.clip(places[:, None] + (-1, 0, 1), 0, stop - start - 1)
        values = np.asarray(split.values[start:stop])[near]  # (S, 3) or (S, 3, C)
        if isinstance(data.input, Tokens):
            ids = np.minimum(data.input.ids(values), TOKENS - 1)
            x = (ids[..., None] == np.arange(min(data.input.vocab, TOKENS))).reshape(len(places), -1).astype(np.float64)
        else:
            x = values.reshape(len(places), -1).astype(np.float64)
        xs.append(np.column_stack([x, places / (stop - start)]))
        ys.append(targets[places])
        left -= len(places)
        if left <= 0:
            break
    return np.concatenate(xs), np.concatenate(ys), "the input at a step and its neighbours, and its place"
