"""Which runs belong together, and how each ended.

A study lists the runs it planned in `study.json`. Finished runs that no study mentions are paired by task, model and
settings. Every planned run becomes a result or a failure.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from spt.errors import DataError, OutputError
from spt.runs.folder import RunFolder
from spt.runs.plan import (
    ARMS,
    PLAN,
    ArmName,
    Ended,
    Kind,
    Place,
    PlannedBaseline,
    PlannedCell,
    Record,
    StudyPlan,
    StudyRow,
    arm_text,
    read_plan,
    run_names,
    starts_at_random,
)
from spt.runs.result import LARGEST, Result


class ComparisonRuns(NamedTuple):
    """The runs of one row of a report."""

    root: Path  # the folder that holds the run folders
    row: StudyRow
    source: str  # the study's folder, or the settings that were paired
    seeds: tuple[int, ...]
    cells: tuple[PlannedCell, ...]  # of scratch and SPT
    kind: Kind = "compare"
    command: str = ""
    smoke: bool = False
    controls: tuple[PlannedCell, ...] = ()  # cells of other arms
    baselines: tuple[PlannedBaseline, ...] = ()  # that it is held against
    splits: tuple[str, ...] = ()  # of the data, where the study has several

    @property
    def places(self) -> list[Place]:
        """Every seed on every split."""
        return [Place(seed, split) for seed in self.seeds for split in self.splits or (None,)]


def comparisons_of(folder: Path, plan: StudyPlan) -> list[ComparisonRuns]:
    """The runs of every row of the study in this folder, except rows whose settings are not chosen yet."""
    cells: dict[int, list[PlannedCell]] = defaultdict(list)
    for cell in plan.cells:
        cells[cell.row].append(cell)
    common = (plan.kind, plan.command, bool(plan.smoke))

    def of(index: int, main: bool) -> tuple[PlannedCell, ...]:
        return tuple(cell for cell in cells[index] if (cell.arm in ARMS) == main)

    def baselines(index: int) -> tuple[PlannedBaseline, ...]:
        return tuple(baseline for baseline in plan.baselines if index in baseline.rows)

    def runs(index: int, row: StudyRow) -> ComparisonRuns:
        beside = (of(index, False), baselines(index), plan.splits)
        return ComparisonRuns(folder.parent, row, folder.name, plan.seeds, of(index, True), *common, *beside)

    return [runs(index, row) for index, row in enumerate(plan.rows) if cells[index] or not plan.searches]


def studies_in(root: Path) -> tuple[list[tuple[Path, StudyPlan]], list[str]]:
    """The studies in a folder of runs, and warnings about plans that cannot be read."""
    studies, warnings = [], []
    for path in sorted(root.glob(f"*/{PLAN}")):
        try:
            studies.append((path.parent, read_plan(path.parent)))
        except DataError as error:
            warnings.append(str(error))
    return studies, warnings


class Failure(Record):
    """A run without a score, and why."""

    run: str  # folder name; empty where none was planned
    arm: str | None = None
    seed: int | None = None
    split: str | None = None
    state: Ended
    reason: str
    exit_code: int | None = None


class RunsFound(NamedTuple):
    """The contents of a folder of runs. A run is in one list only."""

    studies: list[tuple[Path, StudyPlan]]
    pairings: list[ComparisonRuns]  # of runs that no study mentions
    unpaired: list[Failure]  # runs without a result that no study mentions
    warnings: list[str]


def all_runs(root: Path) -> RunsFound:
    """Every study in a folder of runs, then the finished runs that none of them mentions."""
    planned, warnings = studies_in(root)
    mentioned = {name for _, plan in planned for name in run_names(plan)}
    finished: dict[str, Result] = {}
    unpaired: list[Failure] = []
    for name in sorted(path.name for path in root.iterdir() if path.is_dir()):
        if not name.startswith(("finetune-", "pretrain-")) or "." in name:  # `.old1`: moved aside
            continue
        outcome = run_outcome(root, name)
        if isinstance(outcome, Result):
            finished[name] = outcome
        elif name not in mentioned:
            unpaired.append(outcome)
    pairs, ambiguous = pair_by_seed(root, finished, mentioned)
    return RunsFound(planned, pairs, unpaired, warnings + ambiguous)


class ArmRuns(NamedTuple):
    """The finished runs of one arm in one configuration."""

    arm: ArmName
    settings: str
    recipe: str
    cells: dict[int, PlannedCell]  # by seed
    tested: dict[int, str]  # by seed: the rows of its test split, by their hash


def pair_by_seed(root: Path, results: dict[str, Result], mentioned: set[str]) -> tuple[list[ComparisonRuns], list[str]]:
    """Pair finished runs that have task, model, metric and a seed in common.

    Where an arm was run in several configurations, each of its pairs is a row of its own. Of two runs with
    the same settings and seed (from different pretraining runs), the second is left out with a warning.
    """
    parents = {result.key: (name, result) for name, result in results.items() if result.stage == "pretrain"}
    groups: dict[tuple[str, str, str, bool], dict[tuple[ArmName, str], ArmRuns]] = {}
    warnings: list[str] = []
    for name, result in results.items():
        if result.stage != "finetune" or name in mentioned:
            continue
        arm: ArmName = "spt" if result.parent else "scratch"
        parent, pretraining = parents.get(result.parent or "", (None, None))
        settings = result.settings[:8] + (f"+{pretraining.settings[:8]}" if pretraining else "")
        group = groups.setdefault((result.task, result.model, result.metric, result.smoke), {})
        runs = group.setdefault((arm, settings), ArmRuns(arm, settings, result.recipe, {}, {}))
        if result.seed in runs.cells:
            other = runs.cells[result.seed].run
            warnings.append(f"{name} is left out: it has the same settings and seed as {other}")
        else:
            runs.cells[result.seed] = PlannedCell(arm=arm, seed=result.seed, run=name, parent=parent)
            test = result.data.get("test")
            runs.tested[result.seed] = test.inputs if test else ""
    return [
        ComparisonRuns(
            root,
            StudyRow(name=row[-1].recipe, task=task, model=model),
            " / ".join(f"{runs.arm} {runs.settings}" for runs in row),
            tuple(sorted({seed for runs in row for seed in runs.cells})),
            tuple(cell for runs in row for cell in runs.cells.values()),
            smoke=smoke,
        )
        for (task, model, _, smoke), group in groups.items()
        for row in _match_arms(list(group.values()))
    ], warnings


def _match_arms(configurations: list[ArmRuns]) -> list[tuple[ArmRuns, ...]]:
    """Every two configurations that share a seed and its test rows, or, of those that share no test rows with any, a
    seed; then each one that shares no seed with any other."""
    scratch, spt = ([runs for runs in configurations if runs.arm == arm] for arm in ARMS)
    pairs = [(a, b) for a, b in product(scratch, spt) if a.cells.keys() & b.cells.keys()]
    alike = [(a, b) for a, b in pairs if a.tested.items() & b.tested.items()]  # of other folds the rows are others
    settled = [runs for pair in alike for runs in pair]
    pairs = [pair for pair in pairs if pair in alike or not any(runs in settled for runs in pair)]
    paired = [(runs.arm, runs.settings) for pair in pairs for runs in pair]
    return [*pairs, *((runs,) for runs in (*scratch, *spt) if (runs.arm, runs.settings) not in paired)]


Outcomes = dict[tuple[Place, str], Result | Failure]  # by place and arm


def outcomes(pairing: ComparisonRuns) -> Outcomes:
    """Both arms at every seed, on every split: a result, or why there is none. All results share one metric."""
    return _outcomes(pairing, pairing.cells, ARMS, "")


def control_outcomes(pairing: ComparisonRuns, metric: str) -> Outcomes:
    """The same for every control, whose results share the metric of scratch and SPT."""
    arms = tuple(dict.fromkeys(cell.arm for cell in pairing.controls))
    return _outcomes(pairing, pairing.controls, arms, metric)


def _outcomes(pairing: ComparisonRuns, planned: Sequence[PlannedCell], arms: Sequence[str], metric: str) -> Outcomes:
    cells = {(Place(cell.seed, cell.split), cell.arm): cell for cell in planned}
    ended: Outcomes = {}
    for place, arm in product(pairing.places, arms):
        outcome: Result | Failure = Failure(run="", state="missing", reason="there is no such run")
        if cell := cells.get((place, arm)):
            outcome = _outcome(pairing.root, cell, metric)
        if isinstance(outcome, Result):
            metric = outcome.metric
            if place.split is not None:
                outcome = outcome.model_copy(update={"split": place.split})
        else:
            outcome = outcome.model_copy(update={"arm": arm, **place._asdict()})
        ended[place, arm] = outcome
    return ended


def _outcome(root: Path, cell: PlannedCell, metric: str) -> Result | Failure:
    """The result of a finetuning run, if it is the planned one and has a score in this metric."""
    result = run_outcome(root, cell.run, cell.parent)
    if isinstance(result, Failure):
        return result
    score = (result.test or {}).get(result.metric)
    if (result.stage, result.seed) != ("finetune", cell.seed):
        reason = f"the folder holds a {result.stage} run with seed {result.seed}"
    elif metric not in ("", result.metric):
        reason = f"scored in {result.metric}, the others in {metric}"
    elif score is None or not abs(score) <= LARGEST:
        reason = f"its result has no finite test {result.metric}"
    elif (result.parent is None) != starts_at_random(cell.arm):
        reason = f"the folder holds a run of the {arm_text('spt' if result.parent else 'scratch')} arm"
    elif cell.parent and cell.parent != f"pretrain-{result.parent}":
        reason = f"it started from pretrain-{result.parent}, not from {cell.parent}"
    else:
        return result
    return Failure(run=cell.run, state="unusable", reason=reason)


def run_outcome(root: Path, name: str, parent: str | None = None) -> Result | Failure:
    """A run's result, or why there is none, by its own status or that of the pretraining run it waits for."""
    run, before = RunFolder(root, name), ""
    try:
        if (result := run.result()) is not None:
            return result
    except OutputError as error:
        return Failure(run=name, state="unreadable", reason=str(error))
    status = run.status()
    if status is None and parent:
        waiting = RunFolder(root, parent).status()
        if waiting and waiting.get("state") != "done":
            before, status = f"pretraining ({parent}): ", waiting
    if status is None:
        return Failure(run=name, state="missing", reason="not run yet")
    state, code = status.get("state"), status.get("exit_code")
    if state not in ("running", "failed", "diverged", "stopped"):
        return Failure(run=name, state="missing", reason=f"{before}its status is {state}, but there is no result")
    without = "started, not finished" if state == "running" else "no reason was recorded"
    reason = before + str(status.get("reason") or without)
    return Failure(run=name, state=state, reason=reason, exit_code=code if isinstance(code, int) else None)
