"""`spt bench study`: the time of a training step of a study's rows, beside the first one of its recipe and length."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spt.bench.models import bench_models
from spt.bench.timing import conditions
from spt.bench.training_step import Variant
from spt.config.recipe import ResolvedRecipe
from spt.data.dataset import open_task
from spt.errors import BackendError, UsageError, did_you_mean
from spt.execution.estimate import MeasuredCosts
from spt.report.published_numbers import published_pair
from spt.runs.plan import Factor, factors_text
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.grid import GridRow, expand
from spt.studies.schema import read

FEW = 16  # rows of each split: they only say how long a sequence is
RELATIVE = ("relative_time", "relative_throughput")  # what papers print, as metrics


def parse_study(
    source: str, recipes: Iterable[str] = (), *, batch: int | None = None, cpu: bool = False, quick: bool = False
) -> list[tuple[GridRow, Variant]]:
    """The rows of a study, or of some of its recipes, and what of each is measured: its model, at its batch."""
    study = read(source).study
    chosen = list(recipes) or list(study.recipes)
    for name in chosen:
        if name not in study.recipes:
            raise UsageError(f"{name} is no recipe of {source}{did_you_mean(name, study.recipes)}")
    few = {} if quick else {"task.max_rows": FEW}
    study = study.model_copy(update={"set": {**study.set, **few}, "seeds": 1})
    with tempfile.TemporaryDirectory() as folder:
        grid = expand(study, quick, MeasuredCosts(Path(folder), Runtime(Settings(quiet=True, cpu=cpu))))
    rows = [row for row in grid.rows if row.resolved.name in chosen]
    return [(row, _variant(row, batch, cpu)) for row in rows]


def _variant(row: GridRow, batch: int | None, cpu: bool) -> Variant:
    recipe = row.resolved.recipe
    size, level = batch or recipe.train("scratch").batch_size, factors_text(row.factors)
    return Variant(recipe.model.name, recipe.model.options, _length(row.resolved), size, cpu=cpu, given=level)


def _length(resolved: ResolvedRecipe) -> int:
    """Steps of the longest sequence: the task's limit, where it has one, since a few rows may all be shorter."""
    task = resolved.recipe.task
    limit = task.options.get("max_length")
    return limit if isinstance(limit, int) else open_task(task).length


def bench_study(source: str, rows: Iterable[tuple[GridRow, Variant]], rounds: int) -> dict[str, Any]:
    """What `spt bench study` prints, as plain data. Rows of one recipe and length take turns; others follow."""

    groups: dict[tuple[str, int], list[tuple[GridRow, Variant]]] = {}
    for row, variant in rows:
        groups.setdefault((row.resolved.name, variant.length), []).append((row, variant))
    measured = [each for group in groups.values() for each in _measured(group, rounds)]
    if all(row["failed"] for row in measured):
        raise BackendError(measured[0]["failed"])
    device = Runtime(Settings(quiet=True, cpu=any(v.cpu for group in groups.values() for _, v in group))).device
    return {"kind": "study", **conditions(device, rounds), "study": source, "rows": measured}


def _measured(pairs: list[tuple[GridRow, Variant]], rounds: int) -> Iterator[dict[str, Any]]:
    try:
        results = bench_models([variant for _, variant in pairs], rounds, separate_peaks=False)["rows"]
    except BackendError as error:  # none of them fits
        results = [{**asdict(variant), "failed": str(error)} for _, variant in pairs]
    for (row, _), result in zip(pairs, results, strict=True):
        recipe = row.resolved.name
        published = {} if row.resolved.smoke else _published(recipe, row.factors)
        yield {"recipe": recipe, "factors": dict(row.factors), **result, "published": published}


def _published(recipe: str, factors: Mapping[str, Factor]) -> dict[str, float]:
    """What papers print of the row's time or throughput, relative to that of another row."""
    pairs = {metric: published_pair(recipe, factors, metric) for metric in RELATIVE}
    cells = {metric: pair.scratch for metric, pair in pairs.items() if pair and pair.scratch}
    return {metric: cell.value for metric, cell in cells.items() if cell.value is not None}
