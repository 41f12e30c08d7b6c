"""What a baseline is, and what it is shown: rows, or steps of rows, of which it never holds a test label.

Letters: m rows or steps, n training rows, K classes or target values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.baselines.scores import ComparedMetric
from spt.data.features import Places, scored_steps
from spt.errors import DataError
from spt.rng import generator
from spt.runs.plan import Factor
from spt.tasks.base import Classes, Labels, Split, Target, TaskData, label_counts

ROWS_AT_ONCE = 1_024  # are answered, so that memory does not grow with a split
STEPS_AT_ONCE = 2**14
ROWS = 20_000  # of the training split, or steps of it, are fitted to
CHOOSING = 10_000  # of validation, by which settings are chosen


class Query(NamedTuple):
    """Rows of a split, or single steps of them. The split is without labels."""

    split: Split
    rows: NDArray[np.int64]  # (m,)
    at: NDArray[np.int64] | None = None  # (m,) of steps: where each stands in the split's values

    @property
    def places(self) -> Places:
        assert self.at is not None
        return Places(self.rows, self.at)

    def parts(self) -> Iterator["Query"]:
        """The same a few at once."""
        size = ROWS_AT_ONCE if self.at is None else STEPS_AT_ONCE
        for i in range(0, len(self.rows), size):
            yield Query(self.split, self.rows[i : i + size], None if self.at is None else self.at[i : i + size])


class Examples(NamedTuple):
    """What is asked, and the right answers."""

    asked: Query
    targets: NDArray[Any]  # (m,) classes or (m, K) numbers or labels


Answer = Callable[[Query], NDArray[np.float64]]  # (m, K): a score of every class or label, or the numbers


class Fitted(NamedTuple):
    """A baseline after training."""

    answer: Answer
    sees: str  # in words
    rows: int  # of training, or steps, that it was fitted to
    settings: Mapping[str, Factor] = MappingProxyType({})  # chosen on validation
    tried: int = 1  # how many settings were
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """One way to answer a task without a network."""

    name: str  # as studies have it
    title: str  # as reports do
    of_numbers: str  # the same, where targets are real
    version: int  # raised when it computes something else
    chance: bool  # does it depend on a seed?
    probabilities: bool  # are its scores of classes probabilities?
    applies: Callable[[TaskData], str | None]  # why it cannot be used; None where it can
    fit: Callable[[TaskData, ComparedMetric, int], Fitted]  # on data whose test rows have no labels, with a seed


def drawn(split: Split, most: int, part: str) -> Examples:
    """At most so many rows, or about so many scored steps of them; all where there are no more."""
    order = generator(0, "baselines", part).permutation(len(split))
    if split.per_step:
        places = scored_steps(split, order, most)
        return Examples(Query(split.unlabelled(), *places), np.asarray(split.targets)[places.at])
    rows = np.sort(order[:most])
    return Examples(Query(split.unlabelled(), rows), np.asarray(split.targets)[rows])


def every(split: Split) -> Iterator[Examples]:
    """All rows, or all scored steps of them, in order, a few at once."""
    bare = split.unlabelled()
    for i in range(0, len(split), ROWS_AT_ONCE):
        rows = np.arange(i, min(i + ROWS_AT_ONCE, len(split)))
        if not split.per_step:
            yield Examples(Query(bare, rows), np.asarray(split.targets)[rows])
        elif len((places := scored_steps(split, rows)).at):
            yield Examples(Query(bare, *places), np.asarray(split.targets)[places.at])


def answers(answer: Answer, asked: Query) -> NDArray[np.float64]:
    """(m, K)"""
    return np.concatenate([answer(part) for part in asked.parts()])


def only_rows(data: TaskData) -> str | None:
    return "it answers whole sequences, and here every step has a target" if data.target.per_step else None


def two_classes(data: TaskData) -> str | None:
    """Why nothing can be fitted, where all training rows agree."""
    if isinstance(data.target, Labels):
        alike = (label_counts(data.train, data.target.count) == 0).any(axis=0)
        return "every label is the same in all training rows" if alike.all() else None
    if not isinstance(data.target, Classes):
        return None
    seen = {int(label) for examples in every(data.train) for label in np.unique(examples.targets)}
    return "all training rows have the same class" if len(seen) < 2 else None


def refuse_one_class(target: Target, fitted: "Examples") -> None:
    """Raise DataError where the rows or steps that were drawn to fit to have one class; `two_classes` asks all rows."""
    if isinstance(target, Classes) and len(np.unique(fitted.targets)) < 2:
        raise DataError(f"the {len(fitted.targets):,} training rows or steps that were drawn to fit to have one class")


def cap_note(fitted: int, split: Split) -> tuple[str, ...]:
    """What is to be said where not all training rows are fitted to."""
    if split.per_step:
        return (f"fitted to {fitted:,} steps of the training rows",)
    return (f"fitted to {fitted:,} of {len(split):,} training rows",) if fitted < len(split) else ()
