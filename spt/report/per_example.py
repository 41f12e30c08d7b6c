"""Two runs of one seed, compared test example by test example.

Both arms answer the same test split, so their answers are compared in pairs. The result is about these two
trained networks; `spt.report.stats.paired` covers other seeds.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.report.stats import bootstrap_examples, mcnemar
from spt.runs.plan import Record
from spt.runs.predictions import FILE, NotComparable, read_columns

Metric = Literal["accuracy", "mse", "mae"]  # what an example is scored by


class ItemTest(Record):
    """The two networks of one seed on the same n test items, those without a scored step left out.

    It generalises to other items, not to other seeds.
    """

    seed: int
    split: str | None = None  # where a study has several
    metric: Metric
    higher_is_better: bool
    n: int
    scratch: float
    spt: float
    difference: float  # SPT - scratch
    low: float | None  # percentile bootstrap over items; None for one item
    high: float | None
    only_scratch: int | None = None  # items that scratch alone has right; None unless right or wrong as a whole
    only_spt: int | None = None
    p: float | None = None  # McNemar's exact test, not adjusted; None without such counts


class ExampleScores(NamedTuple):
    """Every example of a run, (n,) each."""

    ids: NDArray[Any]
    columns: frozenset[str]
    metric: Metric
    score: NDArray[np.float64]
    weight: NDArray[np.float64] | None  # scored steps, where every step has an answer
    truth: NDArray[np.float64]  # (n, k) what runs that are compared must agree on

    def in_order_of(self, other: "ExampleScores") -> "ExampleScores":
        """The same examples as another run's, row by row. Raises `NotComparable`."""
        if self.columns != other.columns:
            different = ", ".join(sorted(self.columns ^ other.columns))
            raise NotComparable(f"the runs have different columns: {different}")
        scores = self
        if not np.array_equal(other.ids, self.ids):
            order = _matched(other.ids, self.ids)
            weight = None if self.weight is None else self.weight[order]
            scores = self._replace(ids=other.ids, score=self.score[order], weight=weight, truth=self.truth[order])
        if not np.array_equal(scores.truth, other.truth):
            raise NotComparable("the runs were scored against different targets")
        if not (np.isfinite(scores.score).all() and np.isfinite(other.score).all()):
            raise NotComparable("some answers are not finite numbers")
        return scores


class RowInterval(Record):
    """A mean difference over the test rows, their scores averaged over seeds, with its percentile interval.

    It holds for other rows and these trained networks, as a paired t interval does for other seeds and these rows.
    """

    n: int
    low: float | None  # None for one row
    high: float | None


def compare_examples(scratch: Path, spt: Path, seed: int, metric: str = "") -> ItemTest:
    """Compare the `predictions.parquet` of two run folders; the seed is that of the bootstrap.

    Classes are right or wrong; quantities have a squared error, or an absolute one if the metric is mae; of examples
    with an answer at every step, the scored steps are counted. Rows are matched by id. Any file that cannot be used
    raises `NotComparable`, never another error.
    """
    first, second = example_scores(scratch, metric), example_scores(spt, metric)
    before, after = first, second.in_order_of(first)
    old, new, weight = _kept(before.score, after.score, before.weight)
    interval = bootstrap_examples(old, new, np.random.default_rng(seed), weight)
    test = ItemTest(
        seed=seed,
        metric=before.metric,
        higher_is_better=before.metric == "accuracy",
        n=interval.n,
        scratch=float(np.average(old, weights=weight)),
        spt=float(np.average(new, weights=weight)),
        difference=interval.mean,
        low=interval.low,
        high=interval.high,
    )
    if before.metric != "accuracy" or weight is not None:
        return test
    only_scratch, only_spt = int(np.sum(old > new)), int(np.sum(new > old))
    p = mcnemar(only_scratch, only_spt)
    return test.model_copy(update={"only_scratch": only_scratch, "only_spt": only_spt, "p": p})


def row_interval(terms: Sequence[tuple[Sequence[ExampleScores], Sequence[ExampleScores]]]) -> RowInterval:
    """Over test rows: the difference of each row's scores, added and subtracted, mean over terms (one a seed).

    Where steps are scored one by one, rows weigh by their number of them. Raises `NotComparable`.
    """
    first = terms[0][0][0]
    sums = []
    for added, subtracted in terms:
        sums.append([np.sum([run.in_order_of(first).score for run in side], axis=0) for side in (subtracted, added)])
    low, high = np.asarray(sums).mean(0)
    before, after, weight = _kept(low, high, first.weight)
    interval = bootstrap_examples(before, after, np.random.default_rng(0), weight)
    return RowInterval(n=interval.n, low=interval.low, high=interval.high)


def _kept(
    before: NDArray[np.float64], after: NDArray[np.float64], weight: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None]:
    """The scores of examples with at least one scored step, and their weights."""
    if weight is None:
        return before, after, None
    kept = weight > 0
    if not kept.any():
        raise NotComparable("no step of any example is scored")
    return before[kept], after[kept], weight[kept]


def _matched(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.int64]:
    """(n,) rows of the second run in the order of the first."""
    rows = {name: row for row, name in enumerate(second.tolist())}
    names = first.tolist()
    if missing := len(set(names) ^ rows.keys()):
        raise NotComparable(f"the runs were tested on different examples: {missing} ids are in one file only")
    if len(rows) < len(second) or len(rows) < len(first):
        raise NotComparable("the runs have their examples in different orders, and ids that repeat cannot be matched")
    return np.array([rows[name] for name in names])


def example_scores(folder: Path, metric: str = "") -> ExampleScores:
    """Every test example of a run, as `compare_examples` scores it. Raises `NotComparable`."""
    columns = read_columns(folder / FILE)
    scores = partial(ExampleScores, columns["id"], frozenset(columns))
    if {"label", "prediction"} <= columns.keys():
        label = columns["label"]
        return scores("accuracy", (columns["prediction"] == label).astype(np.float64), None, _stacked(label))
    if "steps" in columns and ("right" in columns or "squared_error" in columns):
        steps, right = columns["steps"].astype(np.float64), "right" in columns
        total = columns["right" if right else "squared_error"].astype(np.float64)
        mean = np.divide(total, steps, out=np.zeros_like(total), where=steps > 0)
        return scores("accuracy" if right else "mse", mean, steps, _stacked(steps))
    if "label_0" in columns:  # several labels: the share of right answers, by the labels that are known
        count = sum(name.startswith("label_") for name in columns)
        truth, answer = (_stacked(*(columns[f"{kind}_{k}"] for k in range(count))) for kind in ("label", "prediction"))
        known = (truth >= 0).sum(1).astype(np.float64)
        right = ((truth == answer) & (truth >= 0)).sum(1)
        share = np.divide(right, known, out=np.zeros_like(known), where=known > 0)
        return scores("accuracy", share, known, truth)
    size = next(k for k in range(len(columns) + 1) if not {f"target_{k}", f"prediction_{k}"} <= columns.keys())
    if not size:
        raise NotComparable(f"{FILE} has no answers: its columns are {', '.join(columns)}")
    truth = _stacked(*(columns[f"target_{k}"] for k in range(size)))
    error = _stacked(*(columns[f"prediction_{k}"] for k in range(size))) - truth
    score = np.abs(error) if metric == "mae" else np.square(error)
    known = np.isfinite(truth)
    mean = np.where(known, score, 0.0).sum(1) / known.sum(1)
    return scores("mae" if metric == "mae" else "mse", mean, None, np.nan_to_num(truth, nan=np.inf))


def _stacked(*columns: NDArray[Any]) -> NDArray[np.float64]:
    return np.stack([column.astype(np.float64) for column in columns], 1)
