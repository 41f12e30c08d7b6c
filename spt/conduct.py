"""Have a study's runs made, from plan to report: trials first, then what they choose, then both arms over seeds."""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spt import pairs, tuning
from spt.errors import SptError
from spt.execute import Failed, Wanted, chain, here, shard
from spt.pairs import PLAN, Plan, Subject
from spt.plan import Cell, Job, digest
from spt.recipe import Loaded
from spt.run import Result, Run, write_json, write_text, writing
from spt.runtime import Runtime, command_line
from spt.slurm import Slurm, on_slurm
from spt.stages import bind
from spt.studies import Layout, cells_of, chosen
from spt.study import to_yaml
from spt.workers import local

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where runs are made: in this process, by so many workers on this machine, or by Slurm; all, or a part."""

    jobs: int = 1
    slurm: Slurm | None = None
    part: tuple[int, int] | None = None  # i of n


def folder_of(layout: Layout, root: Path) -> Path:
    """The study's folder: named by its runs, so that the same study is found again however it is asked for."""
    about = {
        "cells": [[cell.arm, cell.row, cell.job.name] for cell in layout.cells],
        "trials": [[s.row, t.number, t.arm, t.job.name] for s in layout.searches for t in s.trials],
        "rows": [dict(row.factors) for row in layout.rows],
        "seeds": list(layout.seeds),
    }
    return root / f"{layout.study.kind}-{digest(about)}"


def conduct(layout: Layout, root: Path, place: Place, runtime: Runtime, say: Say) -> tuple[Path, int]:
    """Have every run of the study; returns its folder and how many runs failed.

    Finished runs are taken as they are. One failure never stops the rest; a request to stop ends the study at once,
    and the same command goes on.
    """
    runtime.check_libraries()
    check(layout, root, runtime)
    folder = folder_of(layout, root)
    plan = plan_of(layout)
    runtime.once(lambda: _write(folder, layout, plan, say))
    anew = runtime.settings.resume == "never"
    if anew:  # once for the whole study: what its trials have just made, its other runs may need
        runtime = Runtime(replace(runtime.settings, resume="auto"))
        runtime.once(lambda: _aside(layout.jobs, root, say))
    before = {one.name for job in layout.jobs for one in chain(job)}
    failed = _carry_out(wanted_trials(layout), folder, place, runtime, say)
    if layout.searches:
        layout, plan, said = runtime.once(lambda: choose(layout, root))
        for text in said:
            say(text)
        runtime.once(lambda: _write(folder, layout, plan, say))
        if anew:
            later = [job for job in layout.jobs if job.name not in before]
            runtime.once(lambda: _aside(later, root, say, but=before))
        # A setting that diverged has had its try, once a choice is made.
        settled = {trial.run for search in plan.searches if search.chosen for trial in search.trials}
        failed = [one for one in failed if not (one.job.name in settled and _diverged(root, one.job))]
    failed += _carry_out(wanted_cells(layout), folder, place, runtime, say)
    return folder, len({one.job.name for one in failed})


def _diverged(root: Path, job: Job) -> bool:
    return (Run(root, job.name).status() or {}).get("state") == "diverged"


def check(layout: Layout, root: Path, runtime: Runtime) -> None:
    """What is wrong with a recipe is said before anything is written; one seed of each configuration shows it."""
    jobs = layout.jobs
    if runtime.once(lambda: all(isinstance(pairs.look(root, job.name), Result) for job in jobs)):
        return
    first: dict[str, Job] = {}
    for job in [one for wanted in jobs for one in chain(wanted)]:
        first.setdefault(digest({**job.settings(), "parent": None}), job)
    for job in first.values():
        runtime.alike(partial(bind, job))


def _aside(jobs: Sequence[Job], root: Path, say: Say, but: Container[str] = ()) -> None:
    """Make room for runs that are to be made anew; nothing is lost."""
    for job in {one.name: one for wanted in jobs for one in chain(wanted)}.values():
        run = Run(root, job.name)
        if job.name in but or not run.path.exists():
            continue
        with run.locked():
            if (aside := run.move_aside()) is not None:
                say(f"{run.name} was there already; the old one is now {aside.name}")


def _carry_out(wanted: Sequence[Wanted], folder: Path, place: Place, runtime: Runtime, say: Say) -> list[Failed]:
    if place.part is not None:
        wanted = shard(wanted, *place.part)
    root, settings = folder.parent, runtime.settings
    if place.slurm is not None:
        return on_slurm(wanted, root, settings, place.slurm, folder, say)
    if place.jobs > 1:
        return local(wanted, root, settings, place.jobs, say, folder)
    return here(wanted, root, runtime, say)


def wanted_trials(layout: Layout) -> list[Wanted]:
    trials = [(layout.rows[s.row], t) for s in layout.searches for t in s.trials]
    return [
        Wanted(t.job, f"[trial {i}/{len(trials)}] {row.loaded.name} setting {t.number} seed {t.seed} {t.arm}:")
        for i, (row, t) in enumerate(trials, 1)
    ]


def wanted_cells(layout: Layout) -> list[Wanted]:
    cells = layout.cells
    return [Wanted(cell.job, f"[{i}/{len(cells)}] {_label(layout, cell)}:") for i, cell in enumerate(cells, 1)]


def _label(layout: Layout, cell: Cell) -> str:
    factors = pairs.factors_text(layout.rows[cell.row].factors)
    return " ".join(filter(None, [cell.job.loaded.name, factors, f"seed {cell.job.seed}", cell.arm]))


def choose(layout: Layout, root: Path) -> tuple[Layout, Plan, list[str]]:
    """The study with the cells of those rows whose trials are all done, at the settings that validation chose; its
    plan; and what was chosen, in words. Reads files only."""
    plan = plan_of(layout)
    if not layout.searches:
        return layout, plan, []
    rows: dict[int, tuple[Loaded, Loaded]] = {}
    searches, said = [], []
    for search in plan.searches:
        found, base = tuning.choose(root, search), layout.rows[search.row].loaded
        if isinstance(found, str):
            said.append(f"{base.name}: nothing is chosen yet: {found}")
        else:
            scratch, spt = (chosen(base, search.settings[found[arm]], arm) for arm in pairs.ARMS)
            rows[search.row] = (scratch, spt)
            search = search.model_copy(update={"chosen": found})
            texts = [f"{pairs.arm_text(arm)} {pairs.factors_text(search.settings[n])}" for arm, n in found.items()]
            said.append(f"{base.name}: chosen on validation: {'; '.join(texts)}")
        searches.append(search)
    cells = [cell._replace(row=list(rows)[cell.row]) for cell in cells_of(rows.values(), layout.seeds)]
    layout = replace(layout, cells=cells)
    return layout, plan_of(layout).model_copy(update={"searches": tuple(searches)}), said


# -------------------------------------------------------------------------------------------------------------- plan


def plan_of(layout: Layout) -> Plan:
    """study.json: what the study consists of, so that a report can tell what is missing."""
    return Plan(
        kind=layout.study.kind,
        command=command_line(),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        smoke=any(row.loaded.smoke for row in layout.rows),
        seeds=layout.seeds,
        rows=tuple(
            Subject(
                name=row.loaded.name,
                task=_short(row.loaded, "task"),
                model=_short(row.loaded, "model"),
                factors=dict(row.factors),
                total=row.total,
            )
            for row in layout.rows
        ),
        cells=tuple(
            pairs.Cell(row=cell.row, arm=cell.arm, seed=cell.job.seed, run=cell.job.name, parent=_parent(cell.job))
            for cell in layout.cells
        ),
        searches=tuple(
            pairs.Search(
                row=search.row,
                space={
                    name: tuple(sorted({values[name] for values in search.settings}, key=_order))
                    for name in search.settings[0]
                },
                settings=tuple(dict(values) for values in search.settings),
                trials=tuple(
                    pairs.Trial(arm=t.arm, number=t.number, seed=t.seed, run=t.job.name, parent=_parent(t.job))
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


def _write(folder: Path, layout: Layout, plan: Plan, say: Say) -> None:
    """The plan, and the study's file. A plan that says the same is left as it is: when and how it was made stays."""
    path = folder / PLAN
    try:
        if path.is_file() and _same(pairs.read_plan(folder), plan):
            return
    except SptError:
        say(f"{path} was unreadable and is written anew")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(path, plan.model_dump(mode="json"))
    write_text(folder / "study.yaml", to_yaml(layout.study, comment=f"spt study run {folder.name} repeats this study"))


def _same(there: Plan, here: Plan) -> bool:
    """Trials that are not chosen from yet do not undo a choice that is written."""
    if there.searches and not here.cells:
        there = there.model_copy(
            update={"cells": (), "searches": tuple(s.model_copy(update={"chosen": {}}) for s in there.searches)}
        )
    about = {"command": "", "created": ""}
    return there.model_copy(update=about) == here.model_copy(update=about)
