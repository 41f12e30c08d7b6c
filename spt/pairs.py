"""Which runs belong together, and what became of each.

A comparison says in its `compare.json` which runs it planned. Finished runs that no comparison mentions are
paired by task, model and settings. Every run that should be there ends as a result or as a failure.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spt.errors import DataError, OutputError
from spt.run import Result, Run

ArmName = Literal["scratch", "spt"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)
Ended = Literal["running", "failed", "diverged", "stopped", "missing", "unreadable", "unusable"]
FolderName = Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")]  # beside the comparison: not a path


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Subject(Record):
    """What both arms of a comparison share."""

    name: str  # of the recipe
    task: str
    model: str


class Cell(Record):
    """One arm at one seed, and the folders that hold it."""

    recipe: int = 0  # index into the comparison's recipes
    arm: ArmName
    seed: int
    run: FolderName  # finetuning
    parent: FolderName | None = None  # pretraining


class Comparison(Record):
    """`compare.json`: every run that a comparison planned, finished or not."""

    format: Literal[1] = 1
    kind: Literal["compare"] = "compare"
    command: str = ""
    created: str = ""
    smoke: bool = False
    seeds: tuple[int, ...]
    recipes: tuple[Subject, ...]
    cells: tuple[Cell, ...]

    @model_validator(mode="after")
    def _recipes_are_listed(self) -> "Comparison":
        if any(not 0 <= cell.recipe < len(self.recipes) for cell in self.cells):
            raise ValueError("a cell names a recipe that is not listed")
        return self


class Pairing(NamedTuple):
    """The runs of one row of a report."""

    root: Path  # the folder that holds the run folders
    subject: Subject
    source: str  # the comparison's folder, or the settings that were paired
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    command: str = ""
    smoke: bool = False


def planned(folder: Path) -> list[Pairing]:
    """One pairing per recipe of the comparison in this folder."""
    path = folder / "compare.json"
    try:
        plan = Comparison.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path} is not a comparison: {place + ': ' if place else ''}{first['msg']}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a comparison: it is not UTF-8 text") from error
    cells: dict[int, list[Cell]] = defaultdict(list)
    for cell in plan.cells:
        cells[cell.recipe].append(cell)
    return [
        Pairing(folder.parent, subject, folder.name, plan.seeds, tuple(cells[index]), plan.command, plan.smoke)
        for index, subject in enumerate(plan.recipes)
    ]


class Failure(Record):
    """A run that gives no score, and why."""

    run: str  # folder name; empty where none was planned
    arm: ArmName | None = None
    seed: int | None = None
    state: Ended
    reason: str
    exit_code: int | None = None


class Found(NamedTuple):
    """What a folder of runs holds. A run is in one list only."""

    pairings: list[Pairing]
    unpaired: list[Failure]  # runs without a result that no comparison mentions
    complaints: list[str]


def everything(root: Path) -> Found:
    """Every comparison in a folder of runs, then the finished runs that none of them mentions."""
    pairings: list[Pairing] = []
    complaints: list[str] = []
    for path in sorted(root.glob("compare-*/compare.json")):
        try:
            pairings += planned(path.parent)
        except DataError as error:
            complaints.append(str(error))
    mentioned = {name for pairing in pairings for cell in pairing.cells for name in (cell.run, cell.parent)}
    finished: dict[str, Result] = {}
    unpaired: list[Failure] = []
    for name in sorted(path.name for path in root.iterdir() if path.is_dir()):
        if not name.startswith(("finetune-", "pretrain-")) or "." in name:  # `.old1`: moved aside
            continue
        found = look(root, name)
        if isinstance(found, Result):
            finished[name] = found
        elif name not in mentioned:
            unpaired.append(found)
    more, ambiguous = matched(root, finished, mentioned)
    return Found(pairings + more, unpaired, complaints + ambiguous)


class Side(NamedTuple):
    """The finished runs of one arm in one configuration."""

    settings: str
    recipe: str
    cells: dict[int, Cell]  # by seed


def matched(root: Path, results: dict[str, Result], mentioned: set[str | None]) -> tuple[list[Pairing], list[str]]:
    """Pair finished runs that have task, model, metric and a seed in common.

    Where an arm was run in several configurations, each of its pairs is a row of its own. Of two runs with
    the same settings and seed (from different pretraining runs), the second is left out with a complaint.
    """
    parents = {result.key: (name, result) for name, result in results.items() if result.stage == "pretrain"}
    sides: dict[tuple[str, str, str, bool], dict[ArmName, dict[str, Side]]] = {}
    complaints: list[str] = []
    for name, result in results.items():
        if result.stage != "finetune" or name in mentioned:
            continue
        arm: ArmName = "spt" if result.parent else "scratch"
        parent, pretraining = parents.get(result.parent or "", (None, None))
        settings = result.settings[:8] + (f"+{pretraining.settings[:8]}" if pretraining else "")
        arms = sides.setdefault((result.task, result.model, result.metric, result.smoke), {"scratch": {}, "spt": {}})
        side = arms[arm].setdefault(settings, Side(settings, result.recipe, {}))
        if result.seed in side.cells:
            other = side.cells[result.seed].run
            complaints.append(f"{name} is left out: it has the settings and the seed of {other}")
        else:
            side.cells[result.seed] = Cell(arm=arm, seed=result.seed, run=name, parent=parent)
    return [
        Pairing(
            root,
            Subject(name=side[-1].recipe, task=task, model=model),
            " / ".join(f"{next(iter(part.cells.values())).arm} {part.settings}" for part in side),
            tuple(sorted({seed for part in side for seed in part.cells})),
            tuple(cell for part in side for cell in part.cells.values()),
            smoke=smoke,
        )
        for (task, model, _, smoke), arms in sides.items()
        for side in _sides(list(arms["scratch"].values()), list(arms["spt"].values()))
    ], complaints


def _sides(scratch: list[Side], spt: list[Side]) -> Iterator[tuple[Side, ...]]:
    """Every two sides that share a seed; then those that share one with no other, alone."""
    pairs = [(a, b) for a, b in product(scratch, spt) if a.cells.keys() & b.cells.keys()]
    yield from pairs
    yield from ((side,) for side in (*scratch, *spt) if not any(side is part for pair in pairs for part in pair))


Outcomes = dict[tuple[int, ArmName], Result | Failure]  # by seed and arm


def outcomes(pairing: Pairing) -> Outcomes:
    """Both arms at every seed: a result, or why there is none. The results share one metric."""
    cells = {(cell.seed, cell.arm): cell for cell in pairing.cells}
    found: Outcomes = {}
    metric = ""
    for seed in pairing.seeds:
        for arm in ARMS:
            if (seed, arm) in cells:
                outcome = _outcome(pairing.root, cells[seed, arm], metric)
            else:
                outcome = Failure(run="", state="missing", reason="there is no such run")
            if isinstance(outcome, Result):
                metric = outcome.metric
            else:
                outcome = outcome.model_copy(update={"arm": arm, "seed": seed})
            found[seed, arm] = outcome
    return found


def _outcome(root: Path, cell: Cell, metric: str) -> Result | Failure:
    """The result of a finetuning run if it is the one that was planned and has a score in this metric."""
    result = look(root, cell.run, cell.parent)
    if isinstance(result, Failure):
        return result
    score = (result.test or {}).get(result.metric)
    if (result.stage, result.seed) != ("finetune", cell.seed):
        reason = f"the folder holds a {result.stage} run with seed {result.seed}"
    elif metric not in ("", result.metric):
        reason = f"scored in {result.metric}, the others in {metric}"
    elif score is None or not math.isfinite(score):
        reason = f"its result has no finite test {result.metric}"
    else:
        return result
    return Failure(run=cell.run, state="unusable", reason=reason)


def look(root: Path, name: str, parent: str | None = None) -> Result | Failure:
    """A run's result, or what the run, or the pretraining run it waits for, says about the lack of it."""
    run, before = Run(root, name), ""
    try:
        if (result := run.result()) is not None:
            return result
    except OutputError as error:
        return Failure(run=name, state="unreadable", reason=str(error))
    status = run.status()
    if status is None and parent:
        waiting = Run(root, parent).status()
        if waiting and waiting.get("state") != "done":
            before, status = f"pretraining ({parent}): ", waiting
    if status is None:
        return Failure(run=name, state="missing", reason="not run yet")
    state, code = status.get("state"), status.get("exit_code")
    if state not in ("running", "failed", "diverged", "stopped"):
        return Failure(run=name, state="missing", reason=f"{before}its status is {state}, but there is no result")
    without = "started, not finished" if state == "running" else "no reason was written down"
    reason = before + str(status.get("reason") or without)
    return Failure(run=name, state=state, reason=reason, exit_code=code if isinstance(code, int) else None)
