"""Whether the arms' budgets match, and the total cost of a study."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from spt.report.arms import Comparison
from spt.report.verdict import MATCHED
from spt.runs.index import run_outcome
from spt.runs.plan import ARMS, PlannedCell, PlannedTrial, Record, Total
from spt.runs.result import Ledger, Result

Part = Literal["pretraining", "finetuning", "tuning"]
MatchedAxis = Literal["epochs", "examples", "flops", "time", "steps"]
AXES: tuple[MatchedAxis, ...] = ("epochs", "steps", "examples", "flops", "time")


class BudgetMatch(Record):
    """A row whose arms share one total budget. Amounts are means over the complete pairs, or of the only arm over its
    own runs, pretraining included."""

    label: str
    total: Total
    scratch: float | None  # on the matched axis; None where no pair finished or it was not recorded
    spt: float | None
    mismatch: dict[MatchedAxis, float | None]  # SPT / scratch - 1, on every axis
    warnings: tuple[str, ...]


class StageCost(Record):
    """All runs of one stage in one arm of a study, each counted once however many rows share it."""

    study: str  # its folder; empty for runs that no study planned
    arm: str
    part: Part
    runs: int
    unknown: int  # started runs without a result, whose cost is not counted
    ledger: Ledger


def budget_matches(rows: Sequence[Comparison]) -> tuple[BudgetMatch, ...]:
    return tuple(_match(comparison, comparison.row.total) for comparison in rows if comparison.row.total is not None)


def _match(comparison: Comparison, total: Total) -> BudgetMatch:
    arms = [[pair[side] for pair in comparison.pairs] for side in (0, 1)]
    if comparison.row.only is not None:
        arms = [[*comparison.results(arm).values()] for arm in ARMS]
    amounts = {axis: [_mean([_amount(result, axis) for result in side]) for side in arms] for axis in AXES}
    mismatch = {
        axis: spt / scratch - 1 if scratch and spt is not None else None for axis, (scratch, spt) in amounts.items()
    }
    scratch, spt = amounts[total.axis]
    warnings = []
    for name, amount in (("scratch", scratch), ("SPT", spt)):
        if amount is not None and total.amount and abs(amount / total.amount - 1) > MATCHED:
            warnings.append(f"{name} has {amount / total.amount - 1:+.1%} {total.axis} of the intended total")
    if (residual := mismatch[total.axis]) is not None and abs(residual) > MATCHED:
        warnings.append(f"the arms are not matched: SPT has {residual:+.1%} {total.axis} against scratch")
    return BudgetMatch(
        label=comparison.row.label, total=total, scratch=scratch, spt=spt, mismatch=mismatch, warnings=tuple(warnings)
    )


def _amount(result: Result, axis: MatchedAxis) -> float | None:
    """What the run used, pretraining included; None where it was not recorded."""
    if axis == "epochs":  # of the training split that it was finetuned on
        rows = result.data["train"].rows if "train" in result.data else 0
        return result.total.examples / rows if rows else None
    amounts = {"steps": "steps", "examples": "examples", "flops": "flops", "time": "device_seconds"}
    return float(getattr(result.total, amounts[axis])) or None


def _mean(amounts: Sequence[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return fmean(known) if known and len(known) == len(amounts) else None


class StudyRuns(NamedTuple):
    """A study's runs, to sum up their cost."""

    study: str
    root: Path
    cells: Sequence[PlannedCell]
    trials: Sequence[PlannedTrial] = ()


class CostGroup(NamedTuple):
    root: Path
    study: str
    arm: str


def study_costs(spenders: Sequence[StudyRuns]) -> tuple[StageCost, ...]:
    """What each study cost, arm by arm. A final run that was a trial before counts as tuning, and what several arms
    share with the first of them: a control's pretraining may be that of SPT."""
    stages: dict[CostGroup, dict[str, Part]] = {}  # of each run by name
    owners: dict[tuple[Path, str, str], str] = {}  # the arm of each run of a study
    for spender in spenders:
        root = spender.root.resolve()
        tuning: list[tuple[Part, PlannedCell | PlannedTrial]] = [("tuning", trial) for trial in spender.trials]
        for part, planned in (*tuning, *(("finetuning", cell) for cell in spender.cells)):
            counted = stages.setdefault(CostGroup(root, spender.study, planned.arm), {})
            finished = (root / planned.run / "result.json").is_file()  # a deleted pretraining has its cost too
            runs: tuple[tuple[Part, str | None], ...] = (("pretraining", planned.parent), (part, planned.run))
            for stage, name in runs:
                if not name or not (finished or (root / name).is_dir()):
                    continue
                if owners.setdefault((root, spender.study, name), planned.arm) == planned.arm:
                    counted.setdefault(name, stage)
    order = list(dict.fromkeys((group.root, group.study) for group in stages))
    arms = list(dict.fromkeys((*ARMS, *(group.arm for group in stages))))
    groups = sorted(stages, key=lambda group: (order.index((group.root, group.study)), arms.index(group.arm)))
    return tuple(
        _spent(group, part, names)
        for group in groups
        for part in get_args(Part)
        if (names := [name for name, stage in stages[group].items() if stage == part])
    )


def _spent(group: CostGroup, part: Part, names: Sequence[str]) -> StageCost:
    runs = [run_outcome(group.root, name) for name in sorted(names)]  # floats add up in order
    ledgers = [run.own for run in runs if isinstance(run, Result)]
    return StageCost(
        study=group.study,
        arm=group.arm,
        part=part,
        runs=len(ledgers),
        unknown=len(runs) - len(ledgers),
        ledger=sum(ledgers, start=Ledger()),
    )
