"""How often intervals over several splits of one data set hold the truth, by simulation.

`python docs/measure_splits.py` prints the table of docs/splits.md, in minutes; the suite repeats a part of it.

200 rows of 20 numbers are generated, 2,000 times, and two ridge regressions are compared on them, one of which sees
half of the columns. Each seed hides some columns of either. All splits are made of these rows, as in a study. The truth
is the difference that models trained on so many rows have on average, on new rows; it follows from the weights, without
test rows. One problem asks for a number (mean squared error), one for the sign (accuracy).
"""

import sys
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.report.stats import paired

Array = NDArray[np.float64]
Problem = Literal["number", "sign"]
PROBLEMS: tuple[Problem, ...] = ("number", "sign")
ROWS, COLUMNS = 200, 20
PENALTY = 5.0
SEEN = np.stack([np.ones(COLUMNS), np.arange(COLUMNS) < COLUMNS // 2])  # columns of either model
KEPT = 0.95  # probability that a seed keeps a column
NOISE = 2.0
BATCH = 200  # data sets at once


class Design(NamedTuple):
    """How the rows are split, and how many seeds each split has."""

    name: str
    folds: int = 0  # else random splits
    repeats: int = 1  # of the folds, or random splits
    seeds: int = 1

    @property
    def tested(self) -> float:
        return 1 / (self.folds or 5)

    @property
    def splits(self) -> int:
        return self.repeats * (self.folds or 1)

    def test_rows(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        for _ in range(self.repeats):
            order = rng.permutation(ROWS)
            yield from np.array_split(order, self.folds) if self.folds else [order[: round(self.tested * ROWS)]]


DESIGNS = (
    Design("3 random splits", repeats=3),
    Design("5 random splits", repeats=5),
    Design("10 random splits", repeats=10),
    Design("3 folds", folds=3),
    Design("5 folds", folds=5),
    Design("10 folds", folds=10),
    Design("5 folds, drawn twice", folds=5, repeats=2),
    Design("3 random splits, 3 seeds", repeats=3, seeds=3),
    Design("5 folds, 3 seeds", folds=5, seeds=3),
    Design("10 folds, 3 seeds", folds=10, seeds=3),
)
TRUE_WEIGHTS = np.random.default_rng(7).normal(size=COLUMNS) / np.sqrt(COLUMNS)


def _data(rng: np.random.Generator, sets: int, rows: int, problem: Problem) -> tuple[Array, Array]:
    """(sets, rows, COLUMNS) inputs and (sets, rows) targets."""
    x = rng.normal(size=(sets, rows, COLUMNS))
    y = x @ TRUE_WEIGHTS + NOISE * rng.normal(size=(sets, rows))
    return x, np.sign(y) if problem == "sign" else y


def _fits(x: Array, y: Array, seeds: int, rng: np.random.Generator) -> Iterator[tuple[Array, Array]]:
    """Of each seed both models' weights, (sets, COLUMNS) each: of a ridge regression on the columns that it sees."""
    transposed = x.transpose(0, 2, 1)
    products, moments = transposed @ x, (transposed @ y[..., None])[..., 0]

    def fit(kept: Array) -> Array:
        gram = products * kept[:, :, None] * kept[:, None, :] + PENALTY * np.eye(COLUMNS)
        return np.asarray(np.linalg.solve(gram, (moments * kept)[..., None])[..., 0])

    for _ in range(seeds):
        kept = rng.random((len(x), COLUMNS)) < KEPT
        yield fit(kept * SEEN[0]), fit(kept * SEEN[1])


def _scores(x: Array, y: Array, weights: Array, problem: Problem) -> Array:
    """(sets,) mean squared error, or accuracy, over these rows."""
    answers = (x @ weights[..., None])[..., 0]
    return ((answers > 0) == (y > 0)).mean(1) if problem == "sign" else np.square(answers - y).mean(1)


def _expected(weights: Array, problem: Problem) -> Array:
    """(sets,) The same over all rows that there could be."""
    if problem == "number":
        return np.square(weights - TRUE_WEIGHTS).sum(1) + NOISE**2
    agreement = weights @ TRUE_WEIGHTS / np.linalg.norm(weights, axis=1)
    return 1 - np.arccos(agreement / np.hypot(np.linalg.norm(TRUE_WEIGHTS), NOISE)) / np.pi


@cache
def truth(rows: int, problem: Problem, draws: int = 40_000) -> float:
    """The expected difference of the two models when they are trained on so many rows."""
    rng = np.random.default_rng([rows, draws, PROBLEMS.index(problem)])
    total = 0.0
    for _ in range(draws // 1000):
        x, y = _data(rng, 1000, rows, problem)
        whole, half = next(_fits(x, y, 1, rng))
        total += float((_expected(whole, problem) - _expected(half, problem)).sum())
    return total / draws


def differences(design: Design, problem: Problem, sets: int) -> Array:
    """(sets, splits, seeds) Differences of the two models' scores on each split's test rows."""
    rng = np.random.default_rng([sets, DESIGNS.index(design), PROBLEMS.index(problem)])
    batches = []
    for _ in range(0, sets, BATCH):
        x, y = _data(rng, BATCH, ROWS, problem)
        table = np.empty((BATCH, design.splits, design.seeds))
        for split, tested in enumerate(design.test_rows(rng)):
            trained = np.setdiff1d(np.arange(ROWS), tested)
            for seed, fits in enumerate(_fits(x[:, trained], y[:, trained], design.seeds, rng)):
                whole, half = (_scores(x[:, tested], y[:, tested], weights, problem) for weights in fits)
                table[:, split, seed] = whole - half
        batches.append(table)
    return np.concatenate(batches)[:sets]


class Coverage(NamedTuple):
    """Of 95 % intervals, how many hold the truth."""

    corrected: float
    uncorrected: float  # of the splits, as if they were independent
    pairs: float  # of all pairs of split and seed, likewise


def coverage(design: Design, problem: Problem, sets: int) -> Coverage:
    true = truth(ROWS - round(design.tested * ROWS), problem)
    table = differences(design, problem, sets)
    held = []
    for each in table:
        means, every = each.mean(1).tolist(), each.ravel().tolist()
        intervals = (paired(means, test_share=design.tested), paired(means), paired(every))
        held.append([one.low is not None and one.high is not None and one.low <= true <= one.high for one in intervals])
    return Coverage(*np.mean(held, 0).tolist())


def table(sets: int) -> str:
    """The table of docs/splits.md."""
    lines = [
        "| splits of 200 rows | squared error: corrected | uncorrected | all pairs | accuracy: corrected | "
        "uncorrected | all pairs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for design in DESIGNS:
        rates = [rate for problem in PROBLEMS for rate in coverage(design, problem, sets)]
        lines.append(f"| {design.name} | {' | '.join(f'{100 * rate:.1f} %' for rate in rates)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(2000) + "\n")
