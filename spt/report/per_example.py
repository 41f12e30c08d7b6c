"""Two runs of one seed, compared test example by test example.

Both arms answer the same test split, so their answers are compared in pairs. The result is about these two
trained networks; `spt.report.stats.paired` covers other seeds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.report.stats import CONFIDENCE, bootstrap_examples, mcnemar
from spt.runs.predictions import FILE, Columns, NotComparable, read_columns


@dataclass(frozen=True)
class ExampleComparison:
    """SPT and scratch on the same n test examples, those without a scored step left out."""

    metric: Literal["accuracy", "mse", "mae"]  # what an example is scored by
    n: int
    scratch: float
    spt: float
    difference: float  # SPT - scratch
    low: float | None  # percentile bootstrap over examples; None for one example
    high: float | None
    only_scratch: int | None  # right in scratch alone; None unless an answer is right or wrong as a whole
    only_spt: int | None
    p: float | None  # McNemar's exact test; None where there are no such counts
    confidence: float = CONFIDENCE

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"


class ExampleScores(NamedTuple):
    """Every example of a run, (n,) each."""

    metric: Literal["accuracy", "mse", "mae"]
    score: NDArray[np.float64]
    weight: NDArray[np.float64] | None  # scored steps, where every step has an answer
    truth: NDArray[np.float64]  # (n, k) what both runs must agree on


def compare_examples(scratch: Path, spt: Path, seed: int, metric: str = "") -> ExampleComparison | NotComparable:
    """Compare the `predictions.parquet` of two run folders; the seed is that of the bootstrap.

    Classes are right or wrong; quantities have a squared error, or an absolute one if the metric is mae; of examples
    with an answer at every step, the scored steps are counted. Rows are matched by id. Any file that cannot be used
    gives a `NotComparable`, never an error.
    """
    tables = []
    for folder in (scratch, spt):
        table = read_columns(folder / FILE)
        if isinstance(table, NotComparable):
            return table
        tables.append(table)
    first, second = tables
    if first.keys() != second.keys():
        return NotComparable(f"the runs have different columns: {', '.join(sorted(first.keys() ^ second.keys()))}")
    order = _matched(first["id"], second["id"])
    if isinstance(order, NotComparable):
        return order
    before, after = _scored(first, metric), _scored({name: second[name][order] for name in second}, metric)
    if before is None or after is None:
        return NotComparable(f"{FILE} has no answers: its columns are {', '.join(first)}")
    if not np.array_equal(before.truth, after.truth):
        return NotComparable("the runs were scored against different targets")
    if not (np.isfinite(before.score).all() and np.isfinite(after.score).all()):
        return NotComparable("some answers are not finite numbers")
    return _compared(before, after, seed)


def _compared(before: ExampleScores, after: ExampleScores, seed: int) -> ExampleComparison | NotComparable:
    first, second, weight = before.score, after.score, before.weight
    if weight is not None:
        kept = weight > 0
        first, second, weight = first[kept], second[kept], weight[kept]
        if not len(first):
            return NotComparable("no step of any example is scored")
    interval = bootstrap_examples(first, second, np.random.default_rng(seed), weight)
    counts: tuple[int, int] | None = None
    if before.metric == "accuracy" and weight is None:
        counts = int(np.sum(first > second)), int(np.sum(second > first))
    return ExampleComparison(
        metric=before.metric,
        n=interval.n,
        scratch=float(np.average(first, weights=weight)),
        spt=float(np.average(second, weights=weight)),
        difference=interval.mean,
        low=interval.low,
        high=interval.high,
        only_scratch=counts[0] if counts else None,
        only_spt=counts[1] if counts else None,
        p=mcnemar(*counts) if counts else None,
    )


def _matched(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.int64] | NotComparable:
    """(n,) rows of the second run in the order of the first."""
    if np.array_equal(first, second):
        return np.arange(len(first))
    rows = {name: row for row, name in enumerate(second.tolist())}
    names = first.tolist()
    if missing := len(set(names) ^ rows.keys()):
        return NotComparable(f"the runs were tested on different examples: {missing} ids are in one file only")
    if len(rows) < len(second) or len(rows) < len(first):
        return NotComparable("the runs have their examples in different orders, and ids that repeat cannot be matched")
    return np.array([rows[name] for name in names])


def _scored(columns: Columns, metric: str) -> ExampleScores | None:
    """The score and the truth of each example; None without the columns for it."""
    if {"label", "prediction"} <= columns.keys():
        label = columns["label"]
        return ExampleScores("accuracy", (columns["prediction"] == label).astype(np.float64), None, _stacked(label))
    if "steps" in columns and ("right" in columns or "squared_error" in columns):
        steps, right = columns["steps"].astype(np.float64), "right" in columns
        total = columns["right" if right else "squared_error"].astype(np.float64)
        mean = np.divide(total, steps, out=np.zeros_like(total), where=steps > 0)
        return ExampleScores("accuracy" if right else "mse", mean, steps, _stacked(steps))
    size = next(k for k in range(len(columns) + 1) if not {f"target_{k}", f"prediction_{k}"} <= columns.keys())
    if not size:
        return None
    truth = _stacked(*(columns[f"target_{k}"] for k in range(size)))
    error = _stacked(*(columns[f"prediction_{k}"] for k in range(size))) - truth
    score = np.abs(error) if metric == "mae" else np.square(error)
    return ExampleScores("mae" if metric == "mae" else "mse", score.mean(1), None, truth)


def _stacked(*columns: NDArray[Any]) -> NDArray[np.float64]:
    return np.stack([column.astype(np.float64) for column in columns], 1)
