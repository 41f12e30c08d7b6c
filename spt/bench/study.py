"""`spt bench study`: the time of an optimiser step of a study's rows, beside the first one of its recipe and length."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from spt.bench.timing import Times, Timings, alternate, conditions
from spt.config.job import Job
from spt.config.recipe import ResolvedRecipe
from spt.config.yaml import is_file_name
from spt.errors import BackendError, UsageError, did_you_mean
from spt.execution.estimate import MeasuredCosts
from spt.report.published_numbers import published_pair
from spt.runs.plan import Factor, factors_text
from spt.runtime.distributed import Runtime
from spt.runtime.scratch import scratch_folder
from spt.runtime.settings import Settings
from spt.studies.grid import GridRow, expand
from spt.studies.schema import Models, Variants, as_listed, read
from spt.tasks.base import WHOLE
from spt.training.build import StageSetup, build_stage
from spt.training.loop import time_steps
from spt.training.threads import stage_threads

BATCHES = 2  # of rows that are made or read of each task
RELATIVE = ("relative_time", "relative_throughput")  # what papers print, as metrics


class Measured(NamedTuple):
    """A row of a study, and its training from scratch on a few rows of the task."""

    row: GridRow
    setup: StageSetup
    runtime: Runtime

    def step(self) -> Times:
        """The second of two steps, as training makes them; how long its parts take is not known."""
        with stage_threads(self.setup, self.runtime):
            return Times(time_steps(self.setup, self.runtime, 2)[1], 0.0)


def parse_study(
    source: str, recipes: Iterable[str] = (), *, batch: int | None = None, cpu: bool = False, quick: bool = False
) -> list[Measured]:
    """The rows of a study, or of some of its recipes, each at its own batch size or at `batch`."""
    study = read(source).study
    chosen = [as_listed(name, study) for name in recipes] or [*study.recipes]
    if unknown := [name for name in chosen if name not in study.recipes]:
        raise UsageError(f"{unknown[0]} is no recipe of {source}{did_you_mean(unknown[0], study.recipes)}")
    titles = {Path(name).stem if is_file_name(Path(name)) else name for name in chosen}
    # To make models equal, the training of each is built, whose batches have to fit.
    equal = isinstance(study, Models | Variants) and study.match != "none"
    few = {} if quick else {"task.max_rows": 1024 if equal else 16}
    study = study.model_copy(update={"set": {**study.set, **few}, "seeds": 1})
    runtime = Runtime(Settings(quiet=True, cpu=cpu))
    with scratch_folder() as folder:
        costs = MeasuredCosts(folder, runtime)
        rows = [row for row in expand(study, quick, costs).rows if row.resolved.name in titles]
        recipes_of_rows = [costs.identify_data(_on_few_rows(row.resolved, batch)) for row in rows]
    jobs = [Job(resolved, "finetune", 0) for resolved in recipes_of_rows]
    return [Measured(row, build_stage(job), runtime) for row, job in zip(rows, jobs, strict=True)]


def _on_few_rows(resolved: ResolvedRecipe, batch: int | None) -> ResolvedRecipe:
    """Training from scratch at this batch size, on some batches of the task."""
    train = resolved.recipe.train("scratch")
    train = train.model_copy(update={"batch_size": batch or train.batch_size})
    task = resolved.recipe.task.model_copy(update={**WHOLE, "max_rows": BATCHES * train.batch_size})
    resolved = resolved.with_train("scratch", train)
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"task": task}))


def bench_study(source: str, rows: Sequence[Measured], rounds: int) -> dict[str, Any]:
    """What `spt bench study` prints, as plain data. Rows of one recipe and length take turns; others follow."""
    groups: dict[tuple[str, int], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.row.resolved.name, row.setup.data.length), []).append(row)
    measured = [each for group in groups.values() for each in _measured(group, rounds)]
    if all(each["failed"] for each in measured):
        raise BackendError(measured[0]["failed"])
    return {"kind": "study", **conditions(rows[0].runtime.device, rounds), "study": source, "rows": measured}


def _measured(rows: Sequence[Measured], rounds: int) -> list[dict[str, Any]]:
    failed: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            row.step()
        except BackendError as error:  # a sequence alone does not fit
            failed[i] = str(error)
    fitting = [i for i in range(len(rows)) if i not in failed]
    timings = dict(zip(fitting, alternate([rows[i].step for i in fitting], rounds), strict=True))
    found = []
    for i, row in enumerate(rows):
        found.append({**_description(row), "failed": failed.get(i)})
        if i in timings:
            found[i] |= _times(timings[i], timings[fitting[0]], row.setup.train.batch_size)
    return found


def _description(row: Measured) -> dict[str, Any]:
    recipe, resolved = row.row.resolved.name, row.setup.job.resolved
    return {
        "recipe": recipe,
        "factors": dict(row.row.factors),
        "level": factors_text(row.row.factors).removeprefix("variant "),
        "model": resolved.recipe.model.name,
        "length": row.setup.data.length,
        "batch": row.setup.train.batch_size,
        "parameters": row.setup.model.parameter_counts()["total"],
        "published": {} if resolved.smoke else published_times(recipe, row.row.factors),
    }


def _times(own: Timings, first: Timings, batch: int) -> dict[str, Any]:
    seconds, ratio = own.median("step"), own.ratio(first, "step")
    return {
        "seconds_per_step": seconds,
        "step_quartiles": own.quartiles(),
        "steps": sum(map(len, own.rounds)),
        "examples_per_second": batch / seconds,
        "relative_time": ratio,
        "relative_throughput": None if ratio is None else 1 / ratio,
    }


def published_times(recipe: str, factors: Mapping[str, Factor]) -> dict[str, float]:
    """What papers print of the time or throughput of a study's row, relative to that of another row."""
    pairs = {metric: published_pair(recipe, factors, metric) for metric in RELATIVE}
    cells = {metric: pair.scratch for metric, pair in pairs.items() if pair and pair.scratch}
    return {metric: cell.value for metric, cell in cells.items() if cell.value is not None}
