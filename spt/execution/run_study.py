"""Have a study's runs made, from plan to report: trials first, then what they choose, then both arms over seeds."""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spt.config.job import Cell, Job, digest
from spt.config.recipe import Loaded
from spt.errors import SptError, UsageError
from spt.execution.local import run_locally
from spt.execution.queue import FailedRun, RunRequest, run_here, shard, with_ancestors
from spt.execution.slurm import Slurm, run_on_slurm
from spt.runs import index
from spt.runs.files import write_json, write_text, writing
from spt.runs.folder import RunFolder
from spt.runs.plan import (
    ARMS,
    PLAN,
    PlannedCell,
    PlannedSearch,
    PlannedTrial,
    StudyPlan,
    StudyRow,
    arm_text,
    factors_text,
    read_plan,
)
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.runtime.environment import command_line
from spt.studies import selection
from spt.studies.grid import StudyGrid, cells_of, with_settings
from spt.studies.schema import to_yaml
from spt.training.build import build_stage

Say = Callable[[str], None]


@dataclass(frozen=True)
class ExecutionTarget:
    """Where runs are made: in this process, by so many workers on this machine, or by Slurm; all, or a part."""

    jobs: int = 1
    slurm: Slurm | None = None
    part: tuple[int, int] | None = None  # i of n

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise UsageError(f"{self.jobs} jobs at once are asked for; at least 1 is needed")
        if self.slurm is not None and self.jobs > 1:
            raise UsageError("jobs and slurm contradict each other: one runs here, the other on a cluster")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise UsageError(f"shard {self.part[0]} of {self.part[1]} does not exist: shards count from 1")


def study_folder(layout: StudyGrid, root: Path) -> Path:
    """The study's folder: named by its runs, so that the same study is found again however it is asked for."""
    about = {
        "cells": [[cell.arm, cell.row, cell.job.name] for cell in layout.cells],
        "trials": [[s.row, t.number, t.arm, t.job.name] for s in layout.searches for t in s.trials],
        "rows": [dict(row.factors) for row in layout.rows],
        "seeds": list(layout.seeds),
    }
    return root / f"{layout.study.kind}-{digest(about)}"


def run_study(layout: StudyGrid, root: Path, place: ExecutionTarget, runtime: Runtime, say: Say) -> tuple[Path, int]:
    """Have every run of the study; returns its folder and how many runs failed.

    Finished runs are taken as they are. One failure never stops the rest; a request to stop ends the study at once,
    and the same command goes on.
    """
    runtime.check_libraries()
    check_recipes_build(layout, root, runtime)
    folder = study_folder(layout, root)
    plan = make_plan(layout)
    runtime.on_main(lambda: _write(folder, layout, plan, say))
    anew = runtime.settings.resume == "never"
    if anew:  # once for the whole study: what its trials have just made, its other runs may need
        runtime = Runtime(replace(runtime.settings, resume="auto"))
        runtime.on_main(lambda: _move_aside(layout.jobs, root, say))
    before = {one.name for job in layout.jobs for one in with_ancestors(job)}
    failed = _execute(trial_requests(layout), folder, place, runtime, say)
    if layout.searches:
        layout, plan, said = runtime.on_main(lambda: apply_selection(layout, root))
        for text in said:
            say(text)
        runtime.on_main(lambda: _write(folder, layout, plan, say))
        if anew:
            later = [job for job in layout.jobs if job.name not in before]
            runtime.on_main(lambda: _move_aside(later, root, say, but=before))
        # A diverged setting has used up its trial, once a choice is made.
        settled = {trial.run for search in plan.searches if search.chosen for trial in search.trials}
        failed = [one for one in failed if not (one.job.name in settled and _diverged(root, one.job))]
    failed += _execute(cell_requests(layout), folder, place, runtime, say)
    return folder, len({one.job.name for one in failed})


def _diverged(root: Path, job: Job) -> bool:
    return (RunFolder(root, job.name).status() or {}).get("state") == "diverged"


def check_recipes_build(layout: StudyGrid, root: Path, runtime: Runtime) -> None:
    """What is wrong with a recipe is said before anything is written; one seed of each configuration shows it."""
    jobs = layout.jobs
    if runtime.on_main(lambda: all(isinstance(index.run_outcome(root, job.name), Result) for job in jobs)):
        return
    first: dict[str, Job] = {}
    for job in [one for wanted in jobs for one in with_ancestors(wanted)]:
        first.setdefault(digest({**job.settings(), "parent": None}), job)
    for job in first.values():
        runtime.each_rank(partial(build_stage, job))


def _move_aside(jobs: Sequence[Job], root: Path, say: Say, but: Container[str] = ()) -> None:
    """Make room for runs that are to be repeated; nothing is lost."""
    for job in {one.name: one for wanted in jobs for one in with_ancestors(wanted)}.values():
        run = RunFolder(root, job.name)
        if job.name in but or not run.path.exists():
            continue
        with run.locked():
            if (aside := run.move_aside()) is not None:
                say(f"{run.name} was there already; the old one is now {aside.name}")


def _execute(
    wanted: Sequence[RunRequest], folder: Path, place: ExecutionTarget, runtime: Runtime, say: Say
) -> list[FailedRun]:
    if place.part is not None:
        wanted = shard(wanted, *place.part)
    root, settings = folder.parent, runtime.settings
    if place.slurm is not None:
        return run_on_slurm(wanted, root, settings, place.slurm, folder, say)
    if place.jobs > 1:
        return run_locally(wanted, root, settings, place.jobs, say, folder)
    return run_here(wanted, root, runtime, say)


def trial_requests(layout: StudyGrid) -> list[RunRequest]:
    trials = [(layout.rows[s.row], t) for s in layout.searches for t in s.trials]
    return [
        RunRequest(t.job, f"[trial {i}/{len(trials)}] {row.loaded.name} setting {t.number} seed {t.seed} {t.arm}:")
        for i, (row, t) in enumerate(trials, 1)
    ]


def cell_requests(layout: StudyGrid) -> list[RunRequest]:
    cells = layout.cells
    return [RunRequest(cell.job, f"[{i}/{len(cells)}] {_label(layout, cell)}:") for i, cell in enumerate(cells, 1)]


def _label(layout: StudyGrid, cell: Cell) -> str:
    factors = factors_text(layout.rows[cell.row].factors)
    return " ".join(filter(None, [cell.job.loaded.name, factors, f"seed {cell.job.seed}", cell.arm]))


def apply_selection(layout: StudyGrid, root: Path) -> tuple[StudyGrid, StudyPlan, list[str]]:
    """The study with the cells of those rows whose trials are all done, at the settings that validation chose; its
    plan; and what was chosen, in words. Reads files only."""
    plan = make_plan(layout)
    if not layout.searches:
        return layout, plan, []
    rows: dict[int, tuple[Loaded, Loaded]] = {}
    searches, said = [], []
    for search in plan.searches:
        found, base = selection.select_settings(root, search), layout.rows[search.row].loaded
        if isinstance(found, str):
            said.append(f"{base.name}: nothing is chosen yet: {found}")
        else:
            scratch, spt = (with_settings(base, search.settings[found[arm]], arm) for arm in ARMS)
            rows[search.row] = (scratch, spt)
            search = search.model_copy(update={"chosen": found})
            texts = [f"{arm_text(arm)} {factors_text(search.settings[n])}" for arm, n in found.items()]
            said.append(f"{base.name}: chosen on validation: {'; '.join(texts)}")
        searches.append(search)
    cells = [cell._replace(row=list(rows)[cell.row]) for cell in cells_of(rows.values(), layout.seeds)]
    layout = replace(layout, cells=cells)
    return layout, make_plan(layout).model_copy(update={"searches": tuple(searches)}), said


def make_plan(layout: StudyGrid) -> StudyPlan:
    """study.json: what the study consists of, so that a report can tell what is missing."""
    return StudyPlan(
        kind=layout.study.kind,
        command=command_line(),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        smoke=next((row.loaded.smoke for row in layout.rows), False),
        seeds=layout.seeds,
        rows=tuple(
            StudyRow(
                name=row.loaded.name,
                task=_short(row.loaded, "task"),
                model=_short(row.loaded, "model"),
                factors=dict(row.factors),
                total=row.total,
            )
            for row in layout.rows
        ),
        cells=tuple(
            PlannedCell(row=cell.row, arm=cell.arm, seed=cell.job.seed, run=cell.job.name, parent=_parent(cell.job))
            for cell in layout.cells
        ),
        searches=tuple(
            PlannedSearch(
                row=search.row,
                space={
                    name: tuple(sorted({values[name] for values in search.settings}, key=_order))
                    for name in search.settings[0]
                },
                settings=tuple(dict(values) for values in search.settings),
                trials=tuple(
                    PlannedTrial(arm=t.arm, number=t.number, seed=t.seed, run=t.job.name, parent=_parent(t.job))
                    for t in search.trials
                ),
            )
            for search in layout.searches
        ),
        notes=tuple(layout.notes),
    )


def _order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, before words."""
    number = isinstance(value, int | float)
    return (not number, float(value) if isinstance(value, int | float) else 0.0, str(value))


def _parent(job: Job) -> str | None:
    return job.parent.name if isinstance(job.parent, Job) else None


def _short(loaded: Loaded, place: str) -> str:
    return loaded.identities[place].partition("@")[0]


def _write(folder: Path, layout: StudyGrid, plan: StudyPlan, say: Say) -> None:
    """The plan, and the study's file. A plan that says the same is left as it is: when and how it was made stays."""
    path = folder / PLAN
    try:
        if path.is_file() and _same(read_plan(folder), plan):
            return
    except SptError:
        say(f"{path} was unreadable and has been rewritten")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(path, plan.model_dump(mode="json"))
    write_text(folder / "study.yaml", to_yaml(layout.study, comment=f"spt study run {folder.name} repeats this study"))


def _same(there: StudyPlan, here: StudyPlan) -> bool:
    """Trials that are not chosen from yet do not undo a choice that is written."""
    if there.searches and not here.cells:
        there = there.model_copy(
            update={"cells": (), "searches": tuple(s.model_copy(update={"chosen": {}}) for s in there.searches)}
        )
    about = {"command": "", "created": ""}
    return there.model_copy(update=about) == here.model_copy(update=about)
