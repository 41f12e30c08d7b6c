"""Numbers that describe a row without its order, or a step without its surroundings: what trivial answers start from.

Letters: m rows or steps, L steps of a sequence, C channels, V entries of a vocabulary, F features.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import Split, TaskData, Tokens, Values, known_targets, sequence_lengths

TOKENS = 256  # of a larger vocabulary, the rest are one
WIDE = 2_048  # as many numbers are taken as they stand; of more, their moments. Of more tokens, the rest are one
CUT = 2**16  # steps of a row that are looked at
OF_A_ROW = 256  # steps of a row that are drawn, where every step has a target
OF_TOKENS = "how often each token stands in a row, and the row's length"
OF_STEPS = "the input at a step and its neighbours, and its place"

Features = NDArray[np.float64]  # (m, F)


class Places(NamedTuple):
    """Steps of a split, each with the row that it belongs to."""

    rows: NDArray[np.int64]  # (m,)
    at: NDArray[np.int64]  # (m,) where its input stands in the split's values


def spans(split: Split, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Where the sequences of these rows begin and end: one pair of arrays (m,), of pairs of sequences two."""
    starts, stops = split.starts[rows], split.stops[rows]
    if split.cuts is None:
        return [(starts, stops)]
    middle = starts + split.cuts[rows]
    return [(starts, middle), (middle, stops)]


def stacked(split: Split, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
    """(m, L) or (m, L, C) What equally long sequences hold."""
    return np.stack([np.asarray(split.values[a:b]) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])


def joined(parts: Sequence[Features]) -> Features:
    """Features of a sequence as they are; of a pair those of both, and how far they are from each other."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return np.concatenate([first, second, np.abs(first - second)], axis=1)


def joined_name(name: str, split: Split) -> str:
    name = name if split.cuts is None else f"{name} of both sequences, and their distance"
    return name if split.static is None else f"{name}; and what stands beside a row"


def row_features(data: TaskData, split: Split, rows: NDArray[np.int64]) -> tuple[Features, str]:
    """(m, F) of these rows, and what they are."""
    parts, names = zip(*(_of_sequences(data, split, *ends) for ends in spans(split, rows)), strict=True)
    return with_static(joined(parts), split, rows), joined_name(names[0], split)


def with_static(x: Features, split: Split, rows: NDArray[np.int64]) -> Features:
    """With what stands beside the sequences of these rows."""
    return x if split.static is None else np.hstack([x, np.asarray(split.static[rows], np.float64)])


def has_gaps(input: Tokens | Values) -> bool:
    """May values be missing?"""
    return isinstance(input, Values) and input.missing


def with_flags(input: Tokens | Values, values: NDArray[Any]) -> Features:
    """(m, ..., C) numbers as (m, F); where values may be missing, the training mean in their place, and flags."""
    x = values.astype(np.float64)
    if not has_gaps(input):
        return x.reshape(len(x), -1)
    gaps = np.isnan(x)
    x = np.where(gaps, np.array(getattr(input, "mean", 0.0)), x)
    return np.hstack([x.reshape(len(x), -1), gaps.reshape(len(x), -1)])


def filled(input: Tokens | Values, row: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L, C) without gaps: each on the line between the values beside it, or at the end the nearest one; the training
    mean, where a channel has none."""
    gaps = np.isnan(row)
    if not gaps.any():
        return row
    assert isinstance(input, Values)
    places, whole = np.arange(len(row)), row.copy()
    for channel in np.flatnonzero(gaps.any(axis=0)).tolist():
        there = ~gaps[:, channel]
        known = row[there, channel] if there.any() else np.array([input.mean[channel]])
        whole[:, channel] = np.interp(places, places[there] if there.any() else [0], known)
    return whole


def of_series(
    input: Tokens | Values,
    describe: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    split: Split,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> Features:
    """(m, F) What describes the numbers of each sequence; where values may be missing, gaps filled, with the share of
    each channel that is missing."""
    rows = (np.asarray(split.values[a : min(b, a + CUT)], np.float64) for a, b in zip(starts, stops, strict=True))
    if not has_gaps(input):
        return np.stack([describe(row) for row in rows])
    return np.stack([np.concatenate([describe(filled(input, row)), np.isnan(row).mean(axis=0)]) for row in rows])


def _of_sequences(
    data: TaskData, split: Split, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[Features, str]:
    if isinstance(data.input, Tokens):
        return token_shares(
            data.input, split, starts, stops
        ), "how often each token stands in a row, and the row's length"
    if data.train.steps is None and data.length * data.input.channels <= WIDE and even(data):
        return with_flags(data.input, stacked(split, starts, stops)), "all numbers of a row"
    return summaries(data.input, split, starts, stops), "moments and quantiles of each channel, and of its changes"


def token_shares(input: Tokens, split: Split, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Features:
    """(m, V + 1) How often each token stands in a sequence, and the logarithm of its length."""
    vocab = min(input.vocab, WIDE)
    shares = np.zeros((len(starts), vocab + 1))
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        ids = np.minimum(input.ids(np.asarray(split.values[start : min(stop, start + CUT)])), vocab - 1)
        shares[i, :-1] = np.bincount(ids, minlength=vocab) / len(ids)
        shares[i, -1] = np.log(stop - start)
    return shares


def summaries(input: Tokens | Values, split: Split, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Features:
    """(m, 9 C + 1) Moments and quantiles of each channel and of its changes, and the logarithm of the length."""
    return of_series(input, _moments, split, starts, stops)


def _moments(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L, C) -> (F,)"""
    changes = np.diff(row, axis=0) if len(row) > 1 else np.zeros_like(row)
    moments = [row.mean(0), row.std(0), *np.quantile(row, (0, 0.1, 0.5, 0.9, 1), axis=0), changes.std(0)]
    return np.concatenate([*moments, np.abs(changes).mean(0), [np.log(len(row))]])


def even(data: TaskData) -> bool:
    """Are all sequences of all splits equally long?"""
    return all(bool((sequence_lengths(split) == data.length).all()) for split in data.splits.values())


def step_features(data: TaskData, split: Split, places: Places) -> Features:
    """(m, F) of these steps: each with the input there and at both neighbours, and its place in the sequence."""
    starts, stops = split.starts[places.rows], split.stops[places.rows]
    near = np.clip(places.at[:, None] + (-1, 0, 1), starts[:, None], stops[:, None] - 1)
    values = np.asarray(split.values[near])  # (m, 3) or (m, 3, C)
    if isinstance(data.input, Tokens):
        ids = np.minimum(data.input.ids(values), TOKENS - 1)
        x = (ids[..., None] == np.arange(min(data.input.vocab, TOKENS))).reshape(len(ids), -1).astype(np.float64)
    else:
        x = with_flags(data.input, values)
    return with_static(np.column_stack([x, (places.at - starts) / (stops - starts)]), split, places.rows)


def scored_steps(split: Split, rows: NDArray[np.int64], most: int | None = None) -> Places:
    """The steps of these rows that have a target; with `most`, about so many: those of the first rows, at most 256 of
    each, evenly spread, rather than all of one."""
    assert split.targets is not None and split.per_step
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    left = most
    for row in rows.tolist():
        start, stop = int(split.starts[row]), int(split.stops[row])
        at = np.flatnonzero(scored(np.asarray(split.targets[start:stop]))) + start
        if left is not None:
            at = at[:: max(1, -(-len(at) // OF_A_ROW))]
            left -= len(at)
        found.append((np.full(len(at), row, np.int64), at))
        if left is not None and left <= 0:
            break
    owners, places = zip(*found, strict=True)
    return Places(np.concatenate(owners), np.concatenate(places))


def scored(targets: NDArray[np.generic]) -> NDArray[np.bool_]:
    """(L,) Which steps have a target."""
    return np.asarray(known_targets(targets).reshape(len(targets), -1).any(axis=1))
