"""What finished runs say about self-pretraining: SPT minus scratch, seed by seed, with what both arms cost.

Read from run folders alone; nothing is opened but small JSON files. Every run that was planned is accounted
for: it stands in a pair, or among the failures with its reason. `spt.render` turns a `Report` into tables.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from spt import stats, verdict
from spt.errors import DataError, UsageError
from spt.pairs import Cell, Ended, Failure, Outcomes, Pairing, Record, everything, look, outcomes, planned
from spt.run import Ledger, Result
from spt.verdict import Decision, final_score


class Seed(Record):
    """Both arms at one seed. A missing score has its reason among the row's failures."""

    seed: int
    scratch: float | None
    spt: float | None
    delta: float | None
    scratch_state: Ended | Literal["done"]
    spt_state: Ended | Literal["done"]
    scratch_run: str
    spt_run: str
    pretrain_run: str | None


class Cost(Record):
    """Mean over the complete pairs; of the memory peaks, the largest."""

    steps: float
    examples: float
    flops: float
    seconds: float
    peak_bytes: int | None  # None where it is not known for this part alone


class Arm(Record):
    """What one arm's runs cost and how they ended, over the complete pairs."""

    score: float
    total: Cost
    pretraining: Cost
    finetuning: Cost
    stops: dict[str, int]  # runs that ended by budget, runs that ended by patience
    best_at_end: int  # runs whose best checkpoint is the last one: more training might have helped
    above_chance: bool | None  # None where chance is not defined
    parameters: dict[str, int]


class Row(Record):
    """One recipe, that is task and model. Means, costs and statistics are over the n complete pairs."""

    label: str = ""  # tells the rows of one report apart
    task: str
    model: str
    recipe: str
    source: str  # the comparison's folder, or the settings that were paired without one
    command: str
    smoke: bool
    metric: str
    higher_is_better: bool
    chance: float | None
    scratch: float | None
    spt: float | None
    delta: float | None  # SPT - scratch, in the metric's own units
    low: float | None  # paired t interval of delta
    high: float | None
    confidence: float
    p: float | None
    n: int  # complete pairs
    planned: int
    favour_spt: int  # pairs in which SPT scored better
    detectable: float | None  # smallest detectable difference, as `spt.stats` defines it
    decision: Decision
    verdict: str
    ratios: dict[str, float | None]  # SPT : scratch, by field of `Cost`, pretraining included
    compute: str  # the ratios as a sentence
    scratch_arm: Arm | None
    spt_arm: Arm | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    seeds: tuple[Seed, ...]
    failures: tuple[Failure, ...]


class RunRecord(Record):
    """A single run, asked for by its folder."""

    name: str
    state: Ended | Literal["done"]
    reason: str
    result: Result | None


class Report(Record):
    rows: tuple[Row, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    unpaired: tuple[Failure, ...] = ()  # unfinished runs that no comparison mentions
    warnings: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # run folders that were read

    @property
    def failures(self) -> tuple[tuple[str, Failure], ...]:
        """Every failure, with the label of its row."""
        rows = [(row.label, failure) for row in self.rows for failure in row.failures]
        return (*rows, *(("", failure) for failure in self.unpaired))


def read(paths: Sequence[Path]) -> Report:
    """A report over comparisons, folders full of runs and single runs, in any mixture."""
    pairings: list[Pairing] = []
    runs: dict[str, RunRecord] = {}
    unpaired: dict[str, Failure] = {}
    warnings: list[str] = []
    for folder in {path.resolve(): _existing(path) for path in paths}.values():
        if (folder / "compare.json").is_file():
            pairings += planned(folder)
        elif any((folder / name).is_file() for name in ("result.json", "status.json", "job.json")):
            runs[folder.as_posix()] = _single(folder)
        else:
            found = everything(folder)
            if not found.pairings:
                said = f" ({found.complaints[0]})" if found.complaints else ""
                raise DataError(
                    f"{folder} holds no comparison and no finished finetuning run{said}; "
                    "name a folder that `spt compare` or `spt finetune` wrote to"
                )
            pairings += found.pairings
            warnings += found.complaints
            unpaired.update({(folder / failure.run).as_posix(): failure for failure in found.unpaired})
    unique = list(dict.fromkeys(pairings))
    paired = [pairing.root / name for pairing in unique for cell in pairing.cells for name in _folders(cell)]
    folders = {path.as_posix() for path in paired if path.is_dir()} | runs.keys() | unpaired.keys()
    return Report(
        rows=_labelled([row(pairing) for pairing in unique]),
        runs=tuple(runs.values()),
        unpaired=tuple(unpaired.values()),
        warnings=tuple(warnings),
        folders=tuple(sorted(folders)),
    )


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}; name a comparison, a run, or the folder that holds them")
    return folder if folder.name not in ("", "..") else folder.resolve()  # `.` does not name its parent


def _folders(cell: Cell) -> list[str]:
    return [cell.parent, cell.run] if cell.parent else [cell.run]


def _single(folder: Path) -> RunRecord:
    found = look(folder.parent, folder.name)
    if isinstance(found, Result):
        return RunRecord(name=folder.name, state="done", reason="", result=found)
    if found.state == "unreadable":
        raise DataError(found.reason)
    return RunRecord(name=folder.name, state=found.state, reason=found.reason, result=None)


def _labelled(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows named by task and model; where that is not enough, by recipe, source and number."""
    labels = [f"{row.task} / {row.model}" for row in rows]
    details = [
        [row.recipe for row in rows],
        [row.source for row in rows],
        [f"#{number}" for number in range(1, len(rows) + 1)],
    ]
    for detail in details:
        taken = Counter(labels)
        labels = [f"{label}, {more}" if taken[label] > 1 else label for label, more in zip(labels, detail, strict=True)]
    return tuple(row.model_copy(update={"label": label}) for row, label in zip(rows, labels, strict=True))


def row(pairing: Pairing) -> Row:
    """One recipe's pairs, statistics, costs and verdict."""
    found = outcomes(pairing)
    results = [outcome for outcome in found.values() if isinstance(outcome, Result)]
    both = [(found[seed, "scratch"], found[seed, "spt"]) for seed in pairing.seeds]
    pairs = [(a, b) for a, b in both if isinstance(a, Result) and isinstance(b, Result)]
    test = stats.paired([final_score(spt) - final_score(scratch) for scratch, spt in pairs]) if pairs else None
    higher = results[0].higher_is_better if results else True
    metric = results[0].metric if results else ""
    smoke = pairing.smoke or any(result.smoke for result in results)
    different = bool(verdict.different_splits(pairs))
    decision, sentence = verdict.verdict(test, metric, higher, len(pairing.seeds), different, smoke)
    scratch, spt = _arm([pair[0] for pair in pairs]), _arm([pair[1] for pair in pairs])
    ratios = _ratios(scratch, spt)
    return Row(
        task=pairing.subject.task,
        model=pairing.subject.model,
        recipe=pairing.subject.name,
        source=pairing.source,
        command=pairing.command,
        smoke=smoke,
        metric=metric,
        higher_is_better=higher,
        chance=results[0].chance if results else None,
        scratch=scratch.score if scratch else None,
        spt=spt.score if spt else None,
        delta=test.mean if test else None,
        low=test.low if test else None,
        high=test.high if test else None,
        confidence=stats.CONFIDENCE,
        p=test.p if test else None,
        n=len(pairs),
        planned=len(pairing.seeds),
        favour_spt=verdict.favour_spt(test, higher) if test else 0,
        detectable=test.detectable if test else None,
        decision=decision,
        verdict=sentence,
        ratios=ratios,
        compute=verdict.compute(ratios) if pairs else "",
        scratch_arm=scratch,
        spt_arm=spt,
        warnings=tuple(verdict.warnings(pairs)),
        notes=tuple(verdict.notes(pairs)),
        seeds=tuple(_seed(pairing, seed, found) for seed in pairing.seeds),
        failures=tuple(outcome for outcome in found.values() if isinstance(outcome, Failure)),
    )


def _seed(pairing: Pairing, seed: int, found: Outcomes) -> Seed:
    first, second = found[seed, "scratch"], found[seed, "spt"]
    scratch = final_score(first) if isinstance(first, Result) else None
    spt = final_score(second) if isinstance(second, Result) else None
    runs = {cell.arm: cell for cell in pairing.cells if cell.seed == seed}
    return Seed(
        seed=seed,
        scratch=scratch,
        spt=spt,
        delta=None if scratch is None or spt is None else spt - scratch,
        scratch_state=first.state if isinstance(first, Failure) else "done",
        spt_state=second.state if isinstance(second, Failure) else "done",
        scratch_run=runs["scratch"].run if "scratch" in runs else "",
        spt_run=runs["spt"].run if "spt" in runs else "",
        pretrain_run=runs["spt"].parent if "spt" in runs else None,
    )


def _arm(results: Sequence[Result]) -> Arm | None:
    if not results:
        return None
    return Arm(
        score=fmean(final_score(result) for result in results),
        total=_cost([result.total for result in results]),
        pretraining=_cost([_before(result) for result in results]),
        finetuning=_cost([result.own for result in results]),
        stops=dict(sorted(Counter(result.stop for result in results).items())),
        best_at_end=sum(map(verdict.best_at_end, results)),
        above_chance=verdict.above_chance(results),
        parameters=results[0].parameters,
    )


def _cost(ledgers: Sequence[Ledger]) -> Cost:
    return Cost(
        steps=fmean(ledger.steps for ledger in ledgers),
        examples=fmean(ledger.examples for ledger in ledgers),
        flops=fmean(ledger.flops for ledger in ledgers),
        seconds=fmean(ledger.seconds for ledger in ledgers),
        peak_bytes=max(ledger.peak_bytes for ledger in ledgers) or None,
    )


def _before(result: Result) -> Ledger:
    """What the run's pretraining cost. Its peak is known only where it is the larger one."""
    total, own = result.total, result.own
    return Ledger(
        steps=total.steps - own.steps,
        examples=total.examples - own.examples,
        flops=total.flops - own.flops,
        seconds=total.seconds - own.seconds,
        peak_bytes=total.peak_bytes if total.peak_bytes > own.peak_bytes else 0,
    )


def _ratios(scratch: Arm | None, spt: Arm | None) -> dict[str, float | None]:
    """SPT : scratch by axis; None where scratch has no cost to compare with."""
    ratios: dict[str, float | None] = {}
    for axis in Cost.model_fields:
        below, above = (getattr(arm.total, axis) if arm else None for arm in (scratch, spt))
        ratios[axis] = above / below if below and above is not None else None
    return ratios
