"""What the test answers are like, besides the compared score: other metrics, which classes are taken for which, how far
probabilities can be trusted, and how groups of rows fare.

Everything is of finished runs as they are; of differences, over the seeds that both arms have finished.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from spt.config.recipe import LOWER_IS_BETTER
from spt.report.arms import Comparison
from spt.report.verdict import paired
from spt.runs.plan import ARMS, ArmName, Record
from spt.runs.result import Calibration, GroupScore, ReliabilityBin, ReliabilityScores, Result

FEW = 20  # rows: a group of fewer says little
ScoredPair = tuple[Result, float, float]  # the run from scratch, its score and that of SPT


class MetricSeed(Record):
    """One metric at one seed, on one split of the data."""

    seed: int
    split: str | None = None  # where a study has several
    scratch: float | None
    spt: float | None


class MetricScores(Record):
    """A metric of the test rows, besides the compared one, in both arms."""

    label: str  # of the row
    metric: str
    higher_is_better: bool
    n: int  # seeds that both arms have finished; the means and the interval are over them
    scratch: float | None
    spt: float | None
    delta: float | None
    low: float | None  # paired t interval, of this metric alone
    high: float | None
    seeds: tuple[MetricSeed, ...]


class ConfusedClass(Record):
    """What the answers to one class were."""

    name: str
    counts: tuple[float, ...]  # answers, by the class that was said; mean over runs

    @property
    def rows(self) -> float:
        return sum(self.counts)


class Confusion(Record):
    """The confusion matrix of an arm, mean over its finished runs."""

    label: str
    arm: ArmName
    runs: int
    classes: tuple[ConfusedClass, ...]


class ArmCalibration(Record):
    """How far an arm's probabilities can be trusted, and what a temperature fitted on validation makes of them: means
    over its finished runs; of the bins, all answers of these runs together."""

    label: str
    arm: ArmName
    runs: int
    temperatures: tuple[float, ...]
    at_limit: int  # runs whose temperature lies at an end of its range
    log_loss: float
    log_loss_after: float
    brier: float
    brier_after: float
    ece: float
    ece_after: float
    bins: tuple[ReliabilityBin, ...]
    bins_after: tuple[ReliabilityBin, ...]


class GroupComparison(Record):
    """A group of test rows in the compared metric."""

    label: str
    metric: str
    higher_is_better: bool
    group: str
    rows: int
    few: bool  # rows: its scores say little
    n: int  # seeds at which both arms have a score; means and interval are over them
    scratch: float | None
    spt: float | None
    delta: float | None
    low: float | None  # paired t interval over seeds, of this group alone
    high: float | None
    worst: tuple[ArmName, ...] = ()  # arms in which no group that is not small scores worse


def metric_scores(comparisons: Sequence[Comparison]) -> tuple[MetricScores, ...]:
    return tuple(scores for comparison in comparisons for scores in _metrics(comparison))


def _metrics(comparison: Comparison) -> Iterator[MetricScores]:
    row, (scratch, spt) = comparison.row, (comparison.results(arm) for arm in ARMS)
    results = [*scratch.values(), *spt.values()]
    names = dict.fromkeys(name for result in results for name in result.test or {} if name != row.metric)
    for name in names:
        if name not in LOWER_IS_BETTER:
            continue
        seeds, pairs = list[MetricSeed](), list[ScoredPair]()
        for place in comparison.runs.places:
            run = scratch.get(place)
            before, after = _test(run, name), _test(spt.get(place), name)
            seeds.append(MetricSeed(**place._asdict(), scratch=before, spt=after))
            if run is not None and before is not None and after is not None:
                pairs.append((run, before, after))
        about = {"label": row.label, "metric": name, "higher_is_better": not LOWER_IS_BETTER[name]}
        compared = _compared(pairs)
        if row.only is not None:
            compared |= _of_one_arm(row.only.arm, comparison.results(row.only.arm).values(), name)
        yield MetricScores(**about, **compared, seeds=tuple(seeds))


def _test(result: Result | None, metric: str) -> float | None:
    return None if result is None else (result.test or {}).get(metric)


def _of_one_arm(arm: ArmName, runs: Iterable[Result], metric: str) -> dict[str, Any]:
    """n and the mean of an arm's own runs, where the other was not run."""
    known = [(run, score) for run in runs if (score := _test(run, metric)) is not None]
    return {"n": len(known), arm: paired(*zip(*known, strict=True)).mean} if known else {}


def _compared(pairs: Sequence[ScoredPair]) -> dict[str, Any]:
    """Of the scores of scratch and SPT: n, means, difference and its interval."""
    if not pairs:
        return {"n": 0, **dict.fromkeys(("scratch", "spt", "delta", "low", "high"))}
    runs, scratch, spt = zip(*pairs, strict=True)
    test = paired(runs, [b - a for a, b in zip(scratch, spt, strict=True)])
    means = {"scratch": paired(runs, scratch).mean, "spt": paired(runs, spt).mean}  # over splits, as their difference
    return {"n": len(pairs), **means, "delta": test.mean, "low": test.low, "high": test.high}


def confusions(comparisons: Sequence[Comparison]) -> tuple[Confusion, ...]:
    found = []
    for comparison in comparisons:
        for arm in ARMS:
            runs = [result for result in comparison.results(arm).values() if result.confusion]
            if not runs or len({(result.classes, len(result.confusion)) for result in runs}) > 1:
                continue
            names = runs[0].classes or tuple(map(str, range(len(runs[0].confusion))))
            classes = tuple(
                ConfusedClass(
                    name=name, counts=tuple(map(fmean, zip(*(result.confusion[k] for result in runs), strict=True)))
                )
                for k, name in enumerate(names)
            )
            found.append(Confusion(label=comparison.row.label, arm=arm, runs=len(runs), classes=classes))
    return tuple(found)


def calibrations(comparisons: Sequence[Comparison]) -> tuple[ArmCalibration, ...]:
    found = []
    for comparison in comparisons:
        for arm in ARMS:
            runs = [r.calibration for r in comparison.results(arm).values() if r.calibration and r.calibration.after]
            if runs:
                found.append(_calibration(comparison.row.label, arm, runs))
    return tuple(found)


def _calibration(label: str, arm: ArmName, runs: Sequence[Calibration]) -> ArmCalibration:
    before, after = ([each for run in runs if (each := getattr(run, end))] for end in ("before", "after"))
    means = {
        f"{name}{suffix}": fmean(getattr(scores, name) for scores in of)
        for name in ("log_loss", "brier", "ece")
        for suffix, of in (("", before), ("_after", after))
    }
    return ArmCalibration(
        label=label,
        arm=arm,
        runs=len(runs),
        temperatures=tuple(run.temperature for run in runs),
        at_limit=sum(run.at_limit for run in runs),
        bins=_pooled(before),
        bins_after=_pooled(after),
        **means,
    )


def _pooled(runs: Sequence[ReliabilityScores]) -> tuple[ReliabilityBin, ...]:
    """The answers of all runs in one set of bins."""
    pooled = []
    for bins in zip(*(run.bins for run in runs), strict=True):
        count = sum(each.count for each in bins)
        means = {
            name: sum(each.count * getattr(each, name) for each in bins) / count if count else 0.0
            for name in ("confidence", "accuracy")
        }
        pooled.append(ReliabilityBin(count=count, **means))
    return tuple(pooled)


def group_comparisons(comparisons: Sequence[Comparison]) -> tuple[GroupComparison, ...]:
    return tuple(group for comparison in comparisons for group in _groups(comparison))


def _groups(comparison: Comparison) -> list[GroupComparison]:
    row = comparison.row
    by_seed = [{group.name: group for group in result.groups} for pair in comparison.pairs for result in pair]
    alike = by_seed and all(groups.keys() == by_seed[0].keys() for groups in by_seed)
    if not alike and not comparison.runs.splits:  # each split may test other groups
        return []
    first_of: dict[str, GroupScore] = {}
    for groups_of_run in by_seed:
        for name, group in groups_of_run.items():
            first_of.setdefault(name, group)
    groups = []
    for name, first in first_of.items():
        scores = [groups[name].score if name in groups else None for groups in by_seed]
        both = zip((run for run, _ in comparison.pairs), scores[::2], scores[1::2], strict=True)
        pairs = [(run, scratch, spt) for run, scratch, spt in both if scratch is not None and spt is not None]
        about = {"label": row.label, "metric": row.metric, "higher_is_better": row.higher_is_better}
        about |= {"group": name, "rows": first.rows, "few": first.rows < FEW}
        groups.append(GroupComparison(**about, **_compared(pairs)))
    worst = {arm: _worst(groups, arm) for arm in ARMS}
    return [
        group.model_copy(update={"worst": tuple(arm for arm in ARMS if worst[arm] == group.group)}) for group in groups
    ]


def _worst(groups: Sequence[GroupComparison], arm: ArmName) -> str | None:
    """The group with the worst score in an arm, among those with enough rows; among all where none has."""
    scored = [group for group in groups if getattr(group, arm) is not None]
    usable = [group for group in scored if not group.few] or scored
    if len(usable) < 2:
        return None
    sign = 1 if usable[0].higher_is_better else -1
    return min(usable, key=lambda group: (sign * getattr(group, arm), group.group)).group


def metric_records(metrics: Sequence[MetricScores]) -> list[dict[str, Any]]:
    """One record per row, metric and seed."""
    return [
        {"label": each.label, "metric": each.metric, "higher_is_better": each.higher_is_better, **seed.model_dump()}
        for each in metrics
        for seed in each.seeds
    ]


def group_records(groups: Sequence[GroupComparison]) -> list[dict[str, Any]]:
    """One record per row and group."""
    return [group.model_dump(exclude={"worst"}) | {"worst": " ".join(group.worst)} for group in groups]
