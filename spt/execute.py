"""Carry out the cells of a comparison, one after the other, in this process. One failure never stops the rest."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from spt import pairs
from spt.components import is_path
from spt.errors import OutputError, SptError, Stopped, brief
from spt.pairs import Comparison, Subject
from spt.plan import Cell, Job, digest
from spt.recipe import Loaded
from spt.run import Run, write_json, writing
from spt.runtime import Runtime, command_line
from spt.stages import bind, ensure


def run_comparison(
    recipes: Sequence[Loaded],
    seeds: Sequence[int],
    cells: Sequence[Cell],
    root: Path,
    runtime: Runtime,
    say: Callable[[str], None],
) -> tuple[Path, int]:
    """Have every cell's run; returns the comparison's folder and how many runs failed.

    Finished runs are taken as they are. A request to stop ends the comparison at once; the same command goes on.
    """
    runtime.check_libraries()
    if not runtime.once(lambda: all(_finished(Run(root, cell.job.name)) for cell in cells)):
        # What is wrong with a recipe is said before anything is written; one seed of each arm shows it.
        for first in {(cell.recipe, cell.arm): cell.job for cell in reversed(cells)}.values():
            for job in _chain(first):
                runtime.alike(partial(bind, job))
    folder = root / f"compare-{digest({'cells': [[c.arm, c.recipe, c.job.name] for c in cells]})}"
    runtime.once(lambda: _write_plan(folder, recipes, seeds, cells, say))
    failed = 0
    for i, cell in enumerate(cells, 1):
        label = f"[{i}/{len(cells)}] {cell.job.loaded.name} seed {cell.job.seed} {cell.arm}:"
        try:
            ensure(cell.job, root, runtime, say, label)
        except Stopped:
            raise
        except SptError as error:
            if isinstance(error, OutputError) and error.hopeless:
                raise  # a full disk fails every other run as well
            if runtime.world > 1 and not getattr(error, "known_to_all", False):
                raise  # the other processes are somewhere else by now
            failed += 1
            say(f"{label} failed: {error}")
        except Exception as error:
            if runtime.settings.debug or runtime.world > 1:
                raise
            failed += 1
            model = cell.job.loaded.recipe.model.name
            hint = f"; spt doctor --model {model} may tell more" if is_path(model) else ""
            say(f"{label} failed: {brief(error)} (traceback.txt in its run folder; --debug stops here){hint}")
    return folder, failed


def _finished(run: Run) -> bool:
    try:
        return run.result() is not None
    except OutputError:  # unreadable: its cell will say so
        return False


def _chain(job: Job) -> list[Job]:
    return [*(_chain(job.parent) if isinstance(job.parent, Job) else []), job]


def _write_plan(
    folder: Path, recipes: Sequence[Loaded], seeds: Sequence[int], cells: Sequence[Cell], say: Callable[[str], None]
) -> None:
    """compare.json: what the comparison consists of, so that a report can tell what is missing."""
    path = folder / "compare.json"
    try:
        if path.is_file() and pairs.planned(folder):
            return
    except SptError:
        say(f"{path} was unreadable and is written anew")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    plan = Comparison(
        command=command_line(),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        smoke=any(loaded.smoke for loaded in recipes),
        seeds=tuple(seeds),
        recipes=tuple(Subject(name=r.name, task=_short(r, "task"), model=_short(r, "model")) for r in recipes),
        cells=tuple(_planned(cell) for cell in cells),
    )
    write_json(path, plan.model_dump(mode="json"))


def _planned(cell: Cell) -> pairs.Cell:
    parent = cell.job.parent.name if isinstance(cell.job.parent, Job) else None
    return pairs.Cell(recipe=cell.recipe, arm=cell.arm, seed=cell.job.seed, run=cell.job.name, parent=parent)


def _short(loaded: Loaded, place: str) -> str:
    return loaded.identities[place].partition("@")[0]
