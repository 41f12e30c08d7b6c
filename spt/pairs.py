"""Which runs belong together, and what became of each.

A study says in its `study.json` which runs it planned. Finished runs that no study mentions are paired by task, model
and settings. Every run that should be there ends as a result or as a failure.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spt.errors import DataError, OutputError
from spt.run import LARGEST, Result, Run

ArmName = Literal["scratch", "spt"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)
Ended = Literal["running", "failed", "diverged", "stopped", "missing", "unreadable", "unusable"]
FolderName = Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")]  # beside the study: not a path
Factor = str | int | float | bool | None  # what a study varies, at one of its levels
Kind = Literal["compare", "compute", "data", "size", "init", "objective", "tune"]
Axis = Literal["epochs", "examples", "flops", "time"]
PLAN = "study.json"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Total(Record):
    """The budget that both arms of a compute-matched row share, pretraining included."""

    axis: Axis
    amount: float  # epochs, training sequences, operations, or device seconds


class Subject(Record):
    """A row of a study: what both of its arms share."""

    name: str  # of the recipe
    task: str
    model: str
    factors: dict[str, Factor] = {}  # what the study varies, at this row's level
    total: Total | None = None


class Cell(Record):
    """One arm of a row at one seed, and the folders that hold it."""

    row: int = 0  # index into the study's rows
    arm: ArmName
    seed: int
    run: FolderName  # finetuning
    parent: FolderName | None = None  # pretraining


class Trial(Record):
    """One setting tried by a search, in one arm, with one seed."""

    arm: ArmName
    number: int  # of the setting, from 0; the same settings in both arms
    seed: int
    run: FolderName
    parent: FolderName | None = None


class Search(Record):
    """What was tried for a row of a tuning study: the same settings in both arms, judged on validation only."""

    row: int
    space: dict[str, tuple[Factor, ...]]  # of each setting, the values that occur, in order
    settings: tuple[dict[str, Factor], ...]  # by number
    trials: tuple[Trial, ...]
    chosen: dict[ArmName, int] = {}  # number of the setting that is best on validation; empty until all are done


class Plan(Record):
    """`study.json`: every run that a study planned, finished or not."""

    format: Literal[2] = 2
    kind: Kind = "compare"
    command: str = ""
    created: str = ""
    smoke: bool = False
    seeds: tuple[int, ...]
    rows: tuple[Subject, ...]
    cells: tuple[Cell, ...]
    searches: tuple[Search, ...] = ()
    notes: tuple[str, ...] = ()  # what planning decided that a reader must know

    @model_validator(mode="after")
    def _rows_are_listed(self) -> "Plan":
        named = [cell.row for cell in self.cells] + [search.row for search in self.searches]
        if not all(0 <= row < len(self.rows) for row in named):
            raise ValueError("a cell names a row that is not listed")
        return self


class Pairing(NamedTuple):
    """The runs of one row of a report."""

    root: Path  # the folder that holds the run folders
    subject: Subject
    source: str  # the study's folder, or the settings that were paired
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    kind: Kind = "compare"
    command: str = ""
    smoke: bool = False


def read_plan(folder: Path) -> Plan:
    """The plan of the study in this folder. Raises DataError."""
    path = folder / PLAN
    try:
        return Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path} is not a study: {place + ': ' if place else ''}{first['msg']}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a study: it is not UTF-8 text") from error


def pairings(folder: Path, plan: Plan) -> list[Pairing]:
    """One pairing per row of the study in this folder; none for rows whose runs are not chosen yet."""
    cells: dict[int, list[Cell]] = defaultdict(list)
    for cell in plan.cells:
        cells[cell.row].append(cell)
    about = (plan.kind, plan.command, plan.smoke)
    return [
        Pairing(folder.parent, subject, folder.name, plan.seeds, tuple(cells[index]), *about)
        for index, subject in enumerate(plan.rows)
        if cells[index] or not plan.searches
    ]


def studies(root: Path) -> tuple[list[tuple[Path, Plan]], list[str]]:
    """The studies in a folder of runs, and complaints about plans that cannot be read."""
    found, complaints = [], []
    for path in sorted(root.glob(f"*/{PLAN}")):
        try:
            found.append((path.parent, read_plan(path.parent)))
        except DataError as error:
            complaints.append(str(error))
    return found, complaints


def factors_text(factors: Mapping[str, Factor]) -> str:
    """`share 0.2`, for people."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in factors.items())


def arm_text(arm: ArmName) -> str:
    return "SPT" if arm == "spt" else arm


def value_text(value: Factor) -> str:
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)


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

    studies: list[tuple[Path, Plan]]
    pairings: list[Pairing]  # of runs that no study mentions
    unpaired: list[Failure]  # runs without a result that no study mentions
    complaints: list[str]


def everything(root: Path) -> Found:
    """Every study in a folder of runs, then the finished runs that none of them mentions."""
    planned, complaints = studies(root)
    mentioned = {name for _, plan in planned for name in run_names(plan)}
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
    return Found(planned, more, unpaired, complaints + ambiguous)


def run_names(plan: Plan) -> list[str]:
    """Every run folder that a study needs, once, pretraining before what starts from it."""
    trials = [(trial.parent, trial.run) for search in plan.searches for trial in search.trials]
    pairs = trials + [(cell.parent, cell.run) for cell in plan.cells]
    return list(dict.fromkeys(name for pair in pairs for name in pair if name))


class Side(NamedTuple):
    """The finished runs of one arm in one configuration."""

    settings: str
    recipe: str
    cells: dict[int, Cell]  # by seed


def matched(root: Path, results: dict[str, Result], mentioned: set[str]) -> tuple[list[Pairing], list[str]]:
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
    elif score is None or not abs(score) <= LARGEST:
        reason = f"its result has no finite test {result.metric}"
    elif (result.parent is None) != (cell.arm == "scratch"):
        reason = f"the folder holds a run of the {arm_text('spt' if result.parent else 'scratch')} arm"
    elif cell.parent and cell.parent != f"pretrain-{result.parent}":
        reason = f"it started from pretrain-{result.parent}, not from {cell.parent}"
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
