"""Several tasks at once: interquartile means over tasks, and the probability of improvement."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.report.arms import Comparison, Row
from spt.report.format import abbreviate
from spt.report.stats import CONFIDENCE, FEWEST, RESAMPLES
from spt.runs.plan import Factor, Kind, Record, factors_text
from spt.runs.result import Result

Scores = NDArray[np.float64]


# Why no average over tasks is made.
SPLITS = "their scores are of several splits of the data, which are not independent as seeds are"
REPEATED = (
    "recipe {} is there with several test splits, and splits of one data set are not independent as tasks are (give "
    "recipes of different data sets different names)"
)


class Estimate(Record):
    value: float
    low: float | None  # percentile bootstrap; None where one task has fewer than `FEWEST` pairs
    high: float | None


class TaskAggregate(NamedTuple):
    """Both arms over several tasks."""

    pairs: int  # of all tasks
    scratch: Estimate  # interquartile mean of normalised scores
    spt: Estimate
    difference: Estimate  # interquartile mean of SPT minus that of scratch, of the same resamples
    probability: Estimate  # that a run of SPT scores better than one of scratch, mean over tasks


def normalised(score: float | None, chance: float | None, higher_is_better: bool = True) -> float | None:
    """(score - chance) / (1 - chance): 0 at chance, 1 for perfect; below chance it is negative.

    For metrics that are fractions of 1 (accuracy, F1). None where there is no such scale: no chance, a metric of
    errors, a number outside 0 to 1.
    """
    if score is None or chance is None or not higher_is_better or not (0 <= score <= 1 and 0 <= chance < 1):
        return None
    return (score - chance) / (1 - chance)


def aggregate(
    tasks: Sequence[tuple[Sequence[float], Sequence[float]]],
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> TaskAggregate | None:
    """Interquartile means, their difference and the probability of improvement, with percentile intervals.

    Each task gives its normalised scores of scratch and SPT, in pairs of the same seed, more is better. A resample
    draws pairs within each task, for both means and their difference. The probability of improvement is the mean
    over tasks of P(X > Y) + P(X = Y)/2 over all seeds X of SPT and Y of scratch (Mann and Whitney 1947); its
    resamples draw each arm by itself, as Agarwal et al. do. Tasks without a pair do not count; None with fewer than
    two others.

    Few seeds make the intervals too narrow: in simulation, with normal scores of six tasks, 95 % intervals of the
    difference cover the truth in 85 % of cases with three seeds, 90 % with five and 93 % with ten.
    """
    given = [(np.asarray(scratch, np.float64), np.asarray(spt, np.float64)) for scratch, spt in tasks]
    if any(scratch.ndim != 1 or scratch.shape != spt.shape for scratch, spt in given):
        raise ValueError("each task needs as many scores of scratch as of SPT")
    pairs = [np.stack(task) for task in given if len(task[0])]  # (2, seeds): scratch, SPT
    if not all(np.isfinite(task).all() for task in pairs):
        raise ValueError("the scores must be finite numbers")
    if len(pairs) < 2:
        return None
    n, points = sum(task.shape[1] for task in pairs), [task[:, None] for task in pairs]
    values = _estimates(points, points)[:, 0].tolist()
    low = high = [None] * len(values)
    if min(task.shape[1] for task in pairs) >= FEWEST:
        generator = np.random.default_rng(seed)
        # Pairs drawn together meet more often than by chance, which would draw P(X > Y) towards that of the pairs:
        # with a correlation of 0.8 its intervals from five seeds of six tasks cover 61 %, with arms drawn apart 96 %.
        joint = [task[:, _drawn(generator, task, resamples)] for task in pairs]
        apart = [np.stack([arm[_drawn(generator, task, resamples)] for arm in task]) for task in pairs]
        ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
        low, high = np.quantile(_estimates(joint, apart), ends, axis=1).tolist()
    bounds = zip(values, low, high, strict=True)
    return TaskAggregate(n, *(Estimate(value=value, low=below, high=above) for value, below, above in bounds))


def _drawn(generator: np.random.Generator, task: Scores, resamples: int) -> NDArray[np.int64]:
    seeds = task.shape[1]
    return generator.integers(seeds, size=(resamples, seeds))


def _estimates(joint: Sequence[Scores], apart: Sequence[Scores]) -> Scores:
    """(4, R) of R resamples, (2, R, seeds) of each task: interquartile means of both arms and their difference, from
    pairs drawn together; probability of improvement, mean over tasks, from arms drawn apart."""
    scratch, spt = interquartile_mean(np.concatenate(joint, -1))
    improvement = []
    for before, after in ((arms[0][:, None], arms[1][:, :, None]) for arms in apart):
        improvement.append(((after > before) + 0.5 * (after == before)).mean((1, 2)))
    return np.stack([scratch, spt, spt - scratch, np.mean(improvement, 0)])


def interquartile_mean(scores: Scores) -> Scores:
    """(...,) means over the last axis, the runs of all tasks, without a quarter at each end.

    Of N runs floor(N/4) go at each end, as in scipy.stats.trim_mean. A task with more runs weighs more.
    """
    cut, n = scores.shape[-1] // 4, scores.shape[-1]
    return np.asarray(np.sort(scores, -1)[..., cut : n - cut].mean(-1))


class TaskAverage(Record):
    """Several tasks at one level with one model: interquartile means of scores from 0 (chance) to 1 (perfect)."""

    kind: Kind
    model: str
    factors: dict[str, Factor]
    label: str
    tasks: tuple[str, ...]
    pairs: int
    scratch: Estimate
    spt: Estimate
    difference: Estimate  # SPT - scratch
    probability: Estimate  # that a run of SPT scores better than one of scratch
    confidence: float
    left_out: tuple[str, ...]  # rows without such a scale, or incomplete
    verdict: str


def task_identity(comparison: Comparison) -> tuple[str, ...]:
    """What makes two rows rows of one task: its name and the test split's targets, since Pathfinder has several sizes,
    each with pictures of its own, while a text that is cut elsewhere is the same one."""
    results = [outcome for outcome in comparison.outcomes.values() if isinstance(outcome, Result)]
    test = results[0].data.get("test") if results else None
    return (comparison.row.task, test.targets or "" if test else "")


def same_test_rows(a: Comparison, b: Comparison) -> bool:
    """Have both the same targets in every test split that both have? So too where that cannot be known yet."""
    one, two = _tested(a), _tested(b)
    return all(one[split] == two[split] for split in one.keys() & two.keys())


def _tested(comparison: Comparison) -> dict[str | None, str | None]:
    """By split of the data, the targets of its test rows."""
    found = ((place.split, outcome) for (place, _), outcome in comparison.outcomes.items())
    return {
        split: outcome.data["test"].targets
        for split, outcome in found
        if isinstance(outcome, Result) and "test" in outcome.data
    }


def repeated_recipe(rows: Sequence[Row]) -> str | None:
    """Why several of these rows may be of one task although their test rows differ: they are of one recipe."""
    names = [(row.task, row.recipe) for row in rows]
    return next((REPEATED.format(recipe) for task, recipe in names if names.count((task, recipe)) > 1), None)


def task_names(rows: Sequence[Row]) -> tuple[str, ...]:
    """The rows' tasks, each with a name of its own: by recipe, where two are called the same, or by number."""
    names = [row.task for row in rows]
    names = [row.recipe if names.count(row.task) > 1 else row.task for row in rows]
    return tuple(
        f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)
    )


def pooled(comparisons: Sequence[Comparison]) -> tuple[list[TaskAverage], list[str]]:
    """Averages over the tasks that share model and level; rows of one task are never averaged."""
    groups: dict[tuple[Kind, str, str], list[Comparison]] = {}
    for each in comparisons:
        groups.setdefault((each.row.kind, each.row.model, factors_text(each.row.factors)), []).append(each)
    averages, notes = [], []
    for (kind, model, level), same in groups.items():
        members = [each.row for each in same]
        tested = [each for each in same if not each.row.smoke and task_identity(each)[1]]
        if len({row.task for row in members if not row.smoke}) < 2 and len(set(map(task_identity, tested))) < 2:
            continue
        label = model + (f", {level}" if level else "")
        if any(each.runs.splits for each in same):
            notes.append(f"not averaged over tasks with {label}: {SPLITS}")
            continue
        if problem := repeated_recipe([*{task_identity(each): each.row for each in tested}.values()]):
            notes.append(f"not averaged over tasks with {label}: {problem}")
            continue
        found = [(each, scores) for each in same if (scores := _normalised(each.row)) is not None]
        usable = [(each.row, scores) for each, scores in found]
        if len({task_identity(each) for each, _ in found}) < len(found):
            notes.append(f"not averaged over tasks with {label}: a task has several rows, which do not count as tasks")
            continue
        aggregated = aggregate([scores for _, scores in usable])
        if aggregated is None:
            if lacking := _lacking(members, [row for row, _ in usable]):
                notes.append(f"not averaged over tasks with {label}: runs of {abbreviate(lacking, 3)} are missing")
            continue
        names = task_names([row for row, _ in usable])
        kept = {row.label for row, _ in usable}
        averages.append(
            TaskAverage(
                kind=kind,
                model=model,
                factors=members[0].factors,
                label=label,
                tasks=names,
                **aggregated._asdict(),
                confidence=CONFIDENCE,
                left_out=tuple(row.label for row in members if row.label not in kept),
                verdict=_pooled_sentence(names, aggregated),
            )
        )
    return averages, notes


def _lacking(rows: Sequence[Row], usable: Sequence[Row]) -> list[str]:
    """Rows whose missing runs would make an average over tasks with those that are usable."""
    lacking = [
        row for row in rows if not row.smoke and row.n < row.planned and (row.chance is not None or not row.metric)
    ]
    return [row.label for row in lacking] if len({row.task for row in (*lacking, *usable)}) > 1 else []


def _normalised(row: Row) -> tuple[list[float], list[float]] | None:
    """Both arms' scores from chance to perfect; None where the metric has no such scale or a run is missing."""
    if not row.comparable or row.n < row.planned:
        return None
    arms = ([seed.scratch for seed in row.seeds], [seed.spt for seed in row.seeds])
    scaled = ([normalised(score, row.chance, row.higher_is_better) for score in scores] for scores in arms)
    scratch, spt = ([score for score in arm if score is not None] for arm in scaled)
    return (scratch, spt) if len(scratch) == len(spt) == row.n else None


def _pooled_sentence(tasks: Sequence[str], pooled: TaskAggregate) -> str:
    """A description; decisions are made in the rows."""
    difference, better = pooled.difference, pooled.probability

    def bounds(estimate: Estimate, sign: str) -> str:
        if estimate.low is None or estimate.high is None:
            return "no interval: too few seeds"
        return f"{100 * CONFIDENCE:.0f} % bootstrap interval {estimate.low:{sign}.3f} to {estimate.high:{sign}.3f}"

    return (
        f"over {len(tasks)} tasks ({', '.join(tasks)}) the interquartile mean of normalised scores is "
        f"{pooled.scratch.value:.3f} for scratch and {pooled.spt.value:.3f} for SPT: {difference.value:+.3f} "
        f"({bounds(difference, '+')}); an SPT run beats a scratch run with probability {better.value:.2f} "
        f"({bounds(better, '')})"
    )
