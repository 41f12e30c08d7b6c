"""Carry out a study, from plan to report: trials first, then both arms over seeds at the settings they select."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from spt.config.job import Cell, Job, digest
from spt.errors import SptError, UsageError
from spt.execution.baselines import make_baselines
from spt.execution.estimate import estimate_cost
from spt.execution.local import run_locally
from spt.execution.progress import StudyProgress
from spt.execution.queue import FailedRun, RunRequest, in_order, run_here, shard, with_ancestors
from spt.execution.slurm import Slurm, run_on_slurm
from spt.runs import index
from spt.runs.files import write_json, write_text, writing
from spt.runs.folder import RunFolder
from spt.runs.plan import (
    ARMS,
    PLAN,
    Factor,
    PlannedBaseline,
    PlannedCell,
    PlannedSearch,
    PlannedTrial,
    StudyPlan,
    StudyRow,
    arm_text,
    factors_text,
    read_plan,
    setting_text,
)
from spt.runs.result import Result
from spt.runtime import launch
from spt.runtime.distributed import Runtime
from spt.runtime.environment import command_line
from spt.runtime.settings import Settings
from spt.runtime.trackers import TrackedRun
from spt.studies import selection
from spt.studies.arms import Arm, main_arms
from spt.studies.grid import StudyGrid, cells_of
from spt.studies.schema import to_yaml
from spt.training.build import build_stage
from spt.training.threads import needs_one_thread

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutionTarget:
    """Where runs are made: in this process, by several workers on this machine, or by Slurm; all, or a part."""

    jobs: int | Literal["auto"] = 1  # at once
    slurm: Slurm | None = None
    part: tuple[int, int] | None = None  # i of n
    arm: str | None = None  # only its runs, and those they start from
    deadline: float | None = None  # of time.monotonic(): no run is started after it; those at work end

    def __post_init__(self) -> None:
        if self.jobs != "auto" and self.jobs < 1:
            raise UsageError(f"{self.jobs} jobs at once are asked for; a whole number from 1, or auto, is expected")
        if self.slurm is not None and self.jobs not in (1, "auto"):
            raise UsageError("jobs and slurm contradict each other: one runs here, the other on a cluster")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise UsageError(f"shard {self.part[0]} of {self.part[1]} does not exist: shards count from 1")


def study_folder(grid: StudyGrid, root: Path) -> Path:
    """The study's folder: named by its runs, so that the same study is found again however it is asked for."""
    contents: dict[str, Any] = {
        "cells": [[cell.arm, cell.row, cell.job.name] for cell in grid.cells],
        "trials": [[search.row, t.row, t.arm, t.job.name] for search in grid.searches for t in search.trials],
        "rows": [dict(row.factors) for row in grid.rows],
        "seeds": list(grid.seeds),
    }
    if grid.baselines:
        contents["baselines"] = [[each.job.folder, list(each.rows)] for each in grid.baselines]
    if grid.splits:
        contents["splits"] = list(grid.splits)
    return root / f"{grid.study.kind}-{digest(contents)}"


def run_study(grid: StudyGrid, root: Path, target: ExecutionTarget, runtime: Runtime) -> tuple[Path, int]:
    """Carry out every run of the study; returns its folder and how many runs failed.

    Finished runs are taken as they are; baselines are made last, in this process. One failure never stops the rest; a
    request to stop ends the study at once, and the same command goes on.
    """
    runtime.check_libraries()
    check_arm(grid, target.arm)
    built = check_recipes_build(grid, root, runtime, target.arm)
    if target.jobs == "auto" and not _may_share_cores(grid, target, runtime.settings):
        target = replace(target, jobs=1)
    folder = study_folder(grid, root)
    plan = make_plan(grid)
    runtime.on_main(lambda: write_plan(folder, grid, plan))
    restart = runtime.settings.resume == "never"
    if restart:  # once for all that is asked for: what its trials have just made, its other runs may need
        runtime = Runtime(replace(runtime.settings, resume="auto"))
        runtime.on_main(lambda: _move_aside(_asked_runs(grid, target).values(), root))
    before = _all_runs(grid.jobs)
    alone = target.part is None  # else other parts would write the same file
    progress = StudyProgress(root, partial(_flops, built), folder if alone else None, runtime.settings.quiet)
    progress.what = "runs of the search"
    failed = _execute(trial_requests(grid), folder, target, runtime, built, progress)
    if grid.searches:
        grid, plan, messages = runtime.on_main(lambda: apply_selection(grid, root))
        for message in messages:
            logger.info(message)
        runtime.on_main(lambda: write_plan(folder, grid, plan))
        if restart:
            later = [job for name, job in _asked_runs(grid, target).items() if name not in before]
            runtime.on_main(lambda: _move_aside(later, root))
        failed = without_settled(failed, plan, root)
    progress.what = "runs"
    failed += _execute(cell_requests(grid, target.arm), folder, target, runtime, built, progress)
    without = 0
    if grid.baselines and (target.part is None or target.part[0] == 1):  # of several parts one makes them
        jobs = [each.job for each in grid.baselines]
        without = runtime.on_main(lambda: len(make_baselines(jobs, root, restart, target.deadline)))
    return folder, len({run.job.name for run in failed}) + without


def check_arm(grid: StudyGrid, arm: str | None) -> None:
    """Raise UsageError where a study cannot be asked for the runs of this arm alone."""
    if arm is not None and grid.searches:
        raise UsageError(f"--arm {arm}: a search tries its settings in both arms; leave --arm out")
    arms = dict.fromkeys(cell.arm for cell in grid.cells)
    if arm is not None and arm not in arms:
        raise UsageError(f"--arm {arm}: this study has {', '.join(arms)}")


def without_settled(failed: Iterable[FailedRun], plan: StudyPlan, root: Path) -> list[FailedRun]:
    """A diverged setting has used up its trial, once a choice is made."""
    settled = {trial.run for search in plan.searches if search.chosen for trial in search.trials}

    def has_diverged(name: str) -> bool:
        return (RunFolder(root, name).status() or {}).get("state") == "diverged"

    return [run for run in failed if not (run.job.name in settled and has_diverged(run.job.name))]


def _all_runs(jobs: Iterable[Job]) -> dict[str, Job]:
    """Jobs and those they start from, by name."""
    return {run.name: run for job in jobs for run in with_ancestors(job)}


def _part(requests: Sequence[RunRequest], target: ExecutionTarget) -> Sequence[RunRequest]:
    return requests if target.part is None else shard(requests, *target.part)


def _asked_runs(grid: StudyGrid, target: ExecutionTarget) -> dict[str, Job]:
    """Those of this part and arm, and those they start from; other parts, and the other arm, are left alone."""
    requests = (*_part(trial_requests(grid), target), *_part(cell_requests(grid, target.arm), target))
    return _all_runs(request.job for request in requests)


class Built(NamedTuple):
    """What is known of a configuration once it has been built."""

    small: bool  # one thread is enough
    flops: float  # of its whole budget

    @classmethod
    def of(cls, job: Job) -> "Built":
        setup = build_stage(job)
        return cls(needs_one_thread(setup), estimate_cost(setup).flops)


def check_recipes_build(grid: StudyGrid, root: Path, runtime: Runtime, arm: str | None = None) -> dict[str, Built]:
    """Raise what is wrong with a recipe before anything is written, by building one seed of each configuration that
    this arm, or any, needs.

    Returns what was found; where all is finished, none is built.
    """
    jobs = [request.job for request in (*trial_requests(grid), *cell_requests(grid, arm))]
    if runtime.on_main(lambda: all(isinstance(index.run_outcome(root, job.name), Result) for job in jobs)):
        return {}
    first: dict[str, Job] = {}
    for job in _all_runs(jobs).values():
        first.setdefault(_configuration(job), job)

    def build(job: Job) -> Built:
        with grid.telling_row(job):
            return Built.of(job)

    return {key: runtime.each_rank(partial(build, job)) for key, job in first.items()}


def _flops(built: dict[str, Built], job: Job) -> float | None:
    """Operations of a job's whole budget."""
    found = _known(built, job)
    return None if found is None else found.flops


def _known(built: dict[str, Built], job: Job) -> Built | None:
    """Settings that a search has just chosen are built here; what cannot be built says so as a run."""
    if (key := _configuration(job)) not in built:
        try:
            built[key] = Built.of(job)
        except SptError:
            return None
    return built[key]


def _configuration(job: Job) -> str:
    """What jobs that differ in their seeds alone, or in a pretraining on the same task, have in common."""
    other = job.parent.resolved.data if isinstance(job.parent, Job) and job.from_other_task else None
    return digest({**job.settings(), "parent": other})


def _may_share_cores(grid: StudyGrid, target: ExecutionTarget, settings: Settings) -> bool:
    """Are runs of one thread made at once without being asked for? Not where something else has the cores or the GPU
    dealt out, and not for a few steps, which are over before another process has started."""
    elsewhere = target.slurm is not None or launch.is_launched()
    on_gpu = not settings.cpu and torch.accelerator.is_available()
    smoke = any(row.resolved.smoke for row in grid.rows)
    return not (elsewhere or on_gpu or smoke) and settings.threads in (None, 1)


def _move_aside(jobs: Iterable[Job], root: Path) -> None:
    """Make room for runs that are to be repeated; nothing is lost."""
    for job in jobs:
        run = RunFolder(root, job.name)
        if run.path.exists():
            with run.locked():
                if (aside := run.move_aside()) is not None:
                    logger.info(f"{run.name} was there already; the old one is now {aside.name}")


def _execute(
    requests: Sequence[RunRequest],
    folder: Path,
    target: ExecutionTarget,
    runtime: Runtime,
    built: dict[str, Built],
    progress: StudyProgress,
) -> list[FailedRun]:
    requests = [in_group(request, folder.name) for request in _part(requests, target)]
    root, settings = folder.parent, runtime.settings
    if target.slurm is not None:
        return run_on_slurm(requests, root, settings, target.slurm, folder, progress)
    jobs = _jobs_at_once(requests, root, built) if target.jobs == "auto" else target.jobs
    if jobs > 1:
        return run_locally(requests, root, settings, jobs, folder, progress, target.deadline)
    return run_here(requests, root, runtime, progress, target.deadline)


def _jobs_at_once(requests: Sequence[RunRequest], root: Path, built: dict[str, Built]) -> int:
    """Of runs still to be made, if one thread is enough for each, as many as there are cores; else one.

    `built` says so by configuration; what it lacks is built and added.
    """

    def is_needed(request: RunRequest) -> bool:
        return not isinstance(index.run_outcome(root, request.job.name), Result)

    left = [request.job for request in in_order(requests, is_needed) if is_needed(request)]
    found = [_known(built, job) for job in left]
    return min(launch.usable_cores(), len(left)) if all(each is not None and each.small for each in found) else 1


def in_group(request: RunRequest, group: str) -> RunRequest:
    tracked, parent = (run and run._replace(group=group) for run in (request.tracked, request.parent_tracked))
    return request._replace(tracked=tracked, parent_tracked=parent)


def trial_requests(grid: StudyGrid) -> list[RunRequest]:
    trials = []
    for search in grid.searches:
        settings = {str(arm): tried for arm, tried in search.settings.items()}
        trials += [(grid.rows[search.row].resolved.name, t, settings[t.arm][t.row]) for t in search.trials]
    shared = _shared_levels([(t.job, setting) for _, t, setting in trials])
    requests = []
    for i, (name, t, _) in enumerate(trials, 1):
        label = f"[trial {i}/{len(trials)}] {name} setting {t.row} seed {t.job.seed} {t.arm}:"
        requests.append(_request(t, label, f"{name}, trial", shared))
    return requests


def cell_requests(grid: StudyGrid, arm: str | None = None) -> list[RunRequest]:
    """The runs of all arms, or of one."""
    shared = _shared_levels([(cell.job, grid.rows[cell.row].factors) for cell in grid.cells])
    cells = [cell for cell in grid.cells if arm in (None, cell.arm)]
    requests = []
    for i, cell in enumerate(cells, 1):
        factors, name = factors_text(grid.rows[cell.row].factors), cell.job.resolved.name
        words = " ".join(filter(None, [name, factors, f"seed {cell.job.seed}", cell.split, cell.arm]))
        requests.append(_request(cell, f"[{i}/{len(cells)}] {words}:", name, shared))
    return requests


Levels = Mapping[str, Factor]


def _shared_levels(runs: Iterable[tuple[Job, Levels]]) -> dict[str, Levels]:
    """By name, a run's levels as far as all rows (or settings) agree that have it: a baseline belongs to none alone."""
    shared: dict[str, Levels] = {}
    for job, levels in runs:
        for run in with_ancestors(job):
            known = shared.get(run.name, levels)
            shared[run.name] = {name: value for name, value in known.items() if levels.get(name, ...) == value}
    return shared


def _request(cell: Cell, label: str, what: str, shared: Mapping[str, Levels]) -> RunRequest:
    """The run of a cell; trackers call it, and the run it starts from, by what it is, its levels, seed and arm."""

    def tracked(run: str) -> TrackedRun:
        parts = (what, factors_text(shared[run]), f"seed {cell.job.seed}", cell.split, cell.arm)
        return TrackedRun(", ".join(filter(None, parts)))

    parent = cell.job.parent_name
    return RunRequest(cell.job, label, tracked(cell.job.name), tracked(parent) if parent else None)


def apply_selection(grid: StudyGrid, root: Path) -> tuple[StudyGrid, StudyPlan, list[str]]:
    """The study with the cells of those rows whose trials are all done, at the settings that validation chose; its
    plan; and what was chosen, as sentences. Reads files only."""
    plan = make_plan(grid)
    if not grid.searches:
        return grid, plan, []
    arms: dict[int, list[Arm]] = {}
    searches, messages = [], []
    for searched, search in zip(grid.searches, plan.searches, strict=True):
        choice, base = selection.select_settings(root, search), grid.rows[search.row].resolved
        if isinstance(choice, str):
            messages.append(f"{base.name}: nothing is chosen yet: {choice}")
        else:
            tried = {(trial.arm, trial.row): trial.job.resolved for trial in searched.trials}
            arms[search.row] = main_arms(tried["scratch", choice["scratch"]], tried["spt", choice["spt"]], None)
            search = search.model_copy(update={"chosen": choice})
            texts = [f"{arm_text(arm)} {setting_text(search.settings[arm][n])}" for arm, n in choice.items()]
            messages.append(f"{base.name}: chosen on validation: {'; '.join(texts)}")
        searches.append(search)
    cells = [
        cell._replace(row=list(arms)[cell.row])
        for cell in cells_of([{None: each} for each in arms.values()], grid.seeds)
    ]
    grid = replace(grid, cells=cells)
    return grid, make_plan(grid).model_copy(update={"searches": tuple(searches)}), messages


def make_plan(grid: StudyGrid) -> StudyPlan:
    """study.json: what the study consists of, so that a report can tell what is missing."""

    def planned(cell: Cell) -> dict[str, Any]:
        return {"arm": cell.arm, "seed": cell.job.seed, "run": cell.job.name, "parent": cell.job.parent_name}

    return StudyPlan(
        kind=grid.study.kind,
        command=command_line(),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        smoke=next((row.resolved.smoke for row in grid.rows), False),
        seeds=grid.seeds,
        splits=grid.splits,
        rows=tuple(
            StudyRow(
                name=row.resolved.name,
                task=row.resolved.task_name,
                model=row.resolved.model_name,
                factors=dict(row.factors),
                total=row.total,
                changes=dict(row.changes),
                seen=row.seen,
            )
            for row in grid.rows
        ),
        arms=tuple(dict.fromkeys([*ARMS, *(arm.name for row in grid.rows for arm in row.controls)])),
        cells=tuple(PlannedCell(row=cell.row, split=cell.split, **planned(cell)) for cell in grid.cells),
        searches=tuple(
            PlannedSearch(
                row=search.row,
                protocol=search.protocol,
                settings={arm: tuple(search.settings[arm]) for arm in ARMS},
                relative=tuple(search.relative),
                trials=tuple(PlannedTrial(number=trial.row, **planned(trial)) for trial in search.trials),
            )
            for search in grid.searches
        ),
        baselines=tuple(
            PlannedBaseline(name=job.name, rows=tuple(rows), seed=job.seed, split=split, run=job.folder)
            for job, rows, split in grid.baselines
        ),
        notes=tuple(grid.notes),
    )


def write_plan(folder: Path, grid: StudyGrid, plan: StudyPlan) -> None:
    """The plan, and the study's file. A plan that says the same is left as it is: when and how it was made stays."""
    path, file = folder / PLAN, folder / "study.yaml"
    try:
        if path.is_file() and file.is_file() and _same(read_plan(folder), plan):
            return
    except SptError:
        logger.info(f"{path} was unreadable and has been rewritten")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # The plan last: a process killed in between leaves nothing that looks whole.
    write_text(file, to_yaml(grid.study, comment=f"spt study run {folder.name} repeats this study"))
    write_json(path, plan.model_dump(mode="json"))


def _same(written: StudyPlan, plan: StudyPlan) -> bool:
    """Trials that are not chosen from yet do not undo a choice that is written."""
    if written.searches and not plan.cells:
        searches = tuple(search.model_copy(update={"chosen": {}}) for search in written.searches)
        written = written.model_copy(update={"cells": (), "searches": searches})
    return written == plan.model_copy(update={"command": written.command, "created": written.created})
