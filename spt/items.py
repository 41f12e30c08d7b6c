"""Two runs of one seed, compared test example by test example.

Both arms answer the same test split, so their answers are compared in pairs. What comes out speaks of these two
trained networks; what another seed would have given is the business of `spt.stats.paired`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.errors import brief
from spt.stats import CONFIDENCE, bootstrap_items, mcnemar

FILE = "predictions.parquet"
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Items:
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


@dataclass(frozen=True)
class NoItems:
    """Why two runs cannot be compared example by example."""

    reason: str


class Scored(NamedTuple):
    """Every example of a run, (n,) each."""

    metric: Literal["accuracy", "mse", "mae"]
    score: NDArray[np.float64]
    weight: NDArray[np.float64] | None  # scored steps, where every step has an answer
    truth: NDArray[np.float64]  # (n, k) what both runs must agree on


def compare_items(scratch: Path, spt: Path, seed: int, metric: str = "") -> Items | NoItems:
    """Compare the `predictions.parquet` of two run folders; the seed is that of the bootstrap.

    Classes are right or wrong; quantities have a squared error, or an absolute one if the metric is mae; of examples
    with an answer at every step, the scored steps are counted. Rows are matched by id. Any file that cannot be used
    gives a `NoItems`, never an error.
    """
    tables = []
    for folder in (scratch, spt):
        table = read_columns(folder / FILE)
        if isinstance(table, NoItems):
            return table
        tables.append(table)
    first, second = tables
    if first.keys() != second.keys():
        return NoItems(f"the runs have different columns: {', '.join(sorted(first.keys() ^ second.keys()))}")
    order = _matched(first["id"], second["id"])
    if isinstance(order, NoItems):
        return order
    before, after = _scored(first, metric), _scored({name: second[name][order] for name in second}, metric)
    if before is None or after is None:
        return NoItems(f"{FILE} has no answers: its columns are {', '.join(first)}")
    if not np.array_equal(before.truth, after.truth):
        return NoItems("the runs were scored against different targets")
    if not (np.isfinite(before.score).all() and np.isfinite(after.score).all()):
        return NoItems("some answers are not finite numbers")
    return _compared(before, after, seed)


def _compared(before: Scored, after: Scored, seed: int) -> Items | NoItems:
    first, second, weight = before.score, after.score, before.weight
    if weight is not None:
        kept = weight > 0
        first, second, weight = first[kept], second[kept], weight[kept]
        if not len(first):
            return NoItems("no step of any example is scored")
    found = bootstrap_items(first, second, np.random.default_rng(seed), weight)
    counts: tuple[int, int] | None = None
    if before.metric == "accuracy" and weight is None:
        counts = int(np.sum(first > second)), int(np.sum(second > first))
    return Items(
        metric=before.metric,
        n=found.n,
        scratch=float(np.average(first, weights=weight)),
        spt=float(np.average(second, weights=weight)),
        difference=found.mean,
        low=found.low,
        high=found.high,
        only_scratch=counts[0] if counts else None,
        only_spt=counts[1] if counts else None,
        p=mcnemar(*counts) if counts else None,
    )


def read_columns(path: Path) -> Columns | NoItems:
    """The columns of a file of predictions, at least one row of them and none with an empty cell."""
    import pyarrow as pa  # slower to import than all else here
    import pyarrow.parquet as pq

    where = f"{path.parent.name}/{path.name}"
    if not path.exists():
        return NoItems(f"{where} is missing")
    try:
        with pq.ParquetFile(path) as file:  # read_table would take a folder named `lr=0.1` for a column
            table = file.read()
        if any(column.null_count for column in table.columns):
            return NoItems(f"{where} has empty cells")
        columns = {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, ValueError, MemoryError, pa.lib.ArrowException) as error:
        return NoItems(f"{where} cannot be read ({brief(error)})")
    kind = table.schema.field("id").type if "id" in columns else pa.null()
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return NoItems(f"{where} has no ids")
    if not table.num_rows:
        return NoItems(f"{where} has no rows")
    if any(column.dtype.kind not in "biuf" for name, column in columns.items() if name != "id"):
        return NoItems(f"{where} has answers that are not numbers")
    return columns


def _matched(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.int64] | NoItems:
    """(n,) rows of the second run in the order of the first."""
    if np.array_equal(first, second):
        return np.arange(len(first))
    rows = {name: row for row, name in enumerate(second.tolist())}
    names = first.tolist()
    if missing := len(set(names) ^ rows.keys()):
        return NoItems(f"the runs were tested on different examples: {missing} ids are in one file only")
    if len(rows) < len(second) or len(rows) < len(first):
        return NoItems("the runs have their examples in different orders, and ids that repeat cannot be matched")
    return np.array([rows[name] for name in names])


def _scored(columns: Columns, metric: str) -> Scored | None:
    """What each example is worth, and the truth it is held against; None without the columns for it."""
    if {"label", "prediction"} <= columns.keys():
        label = columns["label"]
        return Scored("accuracy", (columns["prediction"] == label).astype(np.float64), None, _stacked(label))
    if "steps" in columns and ("right" in columns or "squared_error" in columns):
        steps, right = columns["steps"].astype(np.float64), "right" in columns
        total = columns["right" if right else "squared_error"].astype(np.float64)
        mean = np.divide(total, steps, out=np.zeros_like(total), where=steps > 0)
        return Scored("accuracy" if right else "mse", mean, steps, _stacked(steps))
    size = next(k for k in range(len(columns) + 1) if not {f"target_{k}", f"prediction_{k}"} <= columns.keys())
    if not size:
        return None
    truth = _stacked(*(columns[f"target_{k}"] for k in range(size)))
    error = _stacked(*(columns[f"prediction_{k}"] for k in range(size))) - truth
    score = np.abs(error) if metric == "mae" else np.square(error)
    return Scored("mae" if metric == "mae" else "mse", score.mean(1), None, truth)


def _stacked(*columns: NDArray[Any]) -> NDArray[np.float64]:
    return np.stack([column.astype(np.float64) for column in columns], 1)
