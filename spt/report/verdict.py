"""What the numbers of a comparison mean, in sentences that claim no more than the seeds support."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

from spt.report import stats
from spt.report.format import (
    WHOLE,
    delta_text,
    interval_text,
    is_percent,
    p_text,
    ratio_text,
    score_interval_text,
    score_text,
    size_interval_text,
    size_text,
)
from spt.runs.baseline import BaselineResult
from spt.runs.plan import Record
from spt.runs.result import Result

Doubt = Literal["open", "too few seeds", "too few splits", "no spread", "no pair", "one arm", "different data", "smoke"]

# "alone": decided by the interval of this comparison, but not after Holm's adjustment.
Decision = Literal["spt", "scratch", "spt alone", "scratch alone"] | Doubt
Judgement = Literal["first", "second", "first alone", "second alone"] | Doubt
Pairs = Sequence[tuple[Result, Result]]  # scratch and SPT of the same seed, both finished
Scored = Result | BaselineResult
SignedResults = Sequence[tuple[tuple[Scored, ...], tuple[Scored, ...]]]  # of each seed: added, subtracted
LEVEL = round(1 - stats.CONFIDENCE, 12)  # of significance
MATCHED = 0.05  # relative difference up to which steps, examples and FLOPs of the arms count as equal
SMOKE = "smoke run: it shows that everything runs; its scores mean nothing"


class Adjusted(NamedTuple):
    """A p value adjusted for the family of tests that it belongs to."""

    p: float | None  # Holm's; None where the test could not be made
    tests: int
    family: str


class PairedContrast(Record):
    """Two things compared seed by seed, as reports keep it; `Difference.fields` has all but the first three."""

    first: str
    second: str
    difference: float | None  # first - second, in the metric's own units
    metric: str
    higher_is_better: bool
    n: int
    planned: int
    splits: int | None = None  # of the data, that the difference is the mean over; None: all seeds have the same
    low: float | None  # paired t interval; over splits the corrected resampled one
    high: float | None
    p: float | None
    holm: float | None = None  # adjusted for the family that the contrast belongs to
    tests: int = 0
    decision: Judgement
    verdict: str


class Difference(NamedTuple):
    """The paired differences first - second, and what limits their interpretation."""

    test: stats.Paired | None  # None without a complete pair
    metric: str
    higher_is_better: bool
    planned: int  # pairs
    different_data: bool
    smoke: bool
    names: tuple[str, str] = ("SPT", "scratch")
    decisions: tuple[str, str] = ("spt", "scratch")  # for either
    pairs: int = 0  # that are complete

    @classmethod
    def of(cls, terms: SignedResults, **about: Any) -> "Difference":
        """From the final scores of each seed; `about` are the other fields."""
        scores = [sum(map(final_score, plus)) - sum(map(final_score, minus)) for plus, minus in terms]
        different = different_splits([(a, b) for plus, minus in terms for a in plus for b in minus])
        runs = [next(run for run in (*plus, *minus) if isinstance(run, Result)) for plus, minus in terms]
        test = paired(runs, scores) if scores else None
        return cls(test, different_data=bool(different), pairs=len(scores), **about)

    @property
    def comparable(self) -> bool:
        """Whether it may be tested, and counts among the comparisons of its family."""
        return self.test is not None and not self.different_data and not self.smoke

    def fields(self, adjusted: Adjusted | None = None) -> dict[str, Any]:
        """What every record of a comparison holds."""
        decision, sentence = judge(self, adjusted)
        return {
            **{name: getattr(self, name) for name in ("metric", "higher_is_better", "planned")},
            **{name: getattr(self.test, name, None) for name in ("low", "high", "p")},
            "n": self.pairs,
            "splits": self.test.n if self.test and self.test.test_share else None,
            "holm": adjusted.p if adjusted else None,
            "tests": adjusted.tests if adjusted else 0,
            "decision": decision,
            "verdict": sentence,
        }


def adjusted_fields(
    differences: Sequence[Difference], family: str, same: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The fields of each comparison's record with Holm's adjustment; none of those that are not comparable.

    `same` has for each comparison the index of the first one that is made from the same runs: they count once.
    """
    first = range(len(differences)) if same is None else same
    p = [
        each.test.p if each.test and each.comparable and first[index] == index else None
        for index, each in enumerate(differences)
    ]
    holm, tests = stats.holm(p), sum(value is not None for value in p)
    return [
        difference.fields(Adjusted(holm[index], tests, family)) if difference.comparable else {}
        for difference, index in zip(differences, first, strict=True)
    ]


def paired(runs: Sequence[Result], values: Sequence[float]) -> stats.Paired:
    """The mean of values, one of each run or pair of runs, with its t interval."""
    sample, share = by_split(runs, values)
    return stats.paired(sample, test_share=share)


def by_split(runs: Sequence[Result], values: Sequence[float]) -> tuple[list[float], float]:
    """Values, one of each run, as statistics take them, and the share of the rows that a split tests
    (`stats.by_split`)."""
    shares = [0.0 if run.split is None else run.test_share for run in runs]
    return stats.by_split([run.split for run in runs], values, shares)


def favour_spt(test: stats.Paired, higher_is_better: bool) -> int:
    return test.positive if higher_is_better else test.negative


def judge(difference: Difference, adjusted: Adjusted | None = None) -> tuple[str, str]:
    """Which of two is better, from their paired differences, or why that is not known."""
    test, metric, higher_is_better, planned, different_data, smoke, names, decisions, pairs = difference
    if test is None:
        return "no pair", f"no pair of runs finished (0 of {planned})"
    if different_data:
        whose = "arms" if names == ("SPT", "scratch") else "runs"
        return "different data", f"not comparable: the {whose} did not see the same data"
    if smoke:
        return "smoke", SMOKE
    n, unit = test.n, " points" if is_percent(metric) else f" in {metric}"
    what = "split" if test.test_share else "seed"
    seeds = f"1 {what}" if n == 1 else f"{n} {what}s"
    lost = f"; {planned - pairs} of {planned} pairs incomplete" if pairs < planned else ""
    observed = f"{names[0]} - {names[1]} is {delta_text(test.mean, metric)}{unit}"
    if n < stats.FEWEST:
        return f"too few {what}s", f"cannot be decided with {seeds}: {observed}{lost}"
    if not test.deviation:
        return "no spread", f"not decided: {observed} with each of {seeds}, no spread to judge it by{lost}"
    direction = "" if higher_is_better else "lower is better, "
    favour = favour_spt(test, higher_is_better)
    support = f", {favour} of {n} {what}s favour {names[0]}" if 0 < favour < n else ""
    number, scope = f"n={n}", ""
    if test.test_share:
        number, scope = f"{n} splits, {pairs} pairs", " for other splits of these data and other seeds"
    if test.sign == 0:
        interval = interval_text(test.low, test.high, metric)
        return "open", (
            f"not decided: {observed} ({direction}{100 * test.confidence:.0f} % interval {interval}{scope}, "
            f"{number}{support}); {seeds} could only have shown a difference of about "
            f"{size_text(test.detectable, metric)}{unit} or more{lost}"
        )
    wins = (test.sign > 0) == higher_is_better
    first, second = names if wins else names[::-1]
    decision = decisions[0 if wins else 1]
    interval = size_interval_text(test.low, test.high, metric)
    sentence = (
        f"{first} beats {second} by {size_text(test.mean, metric)}{unit} "
        f"({direction}{100 * test.confidence:.0f} % interval {interval}{scope}, {number}{support})"
    )
    if adjusted is None or (adjusted.p is not None and adjusted.p <= LEVEL):
        return decision, sentence + lost
    holm = "" if adjusted.p is None else f" (Holm p {p_text(adjusted.p)})"
    return f"{decision} alone", (
        f"{sentence} on its own; not decided among the {adjusted.tests} {adjusted.family}{holm}{lost}"
    )


def only_fields(arm: str, results: Sequence[Result], mean: stats.Paired, difference: Difference) -> dict[str, Any]:
    """What the record of a comparison holds where one arm alone was run: the mean of its scores."""
    metric, n, planned = difference.metric, len(results), difference.planned
    about = [] if difference.higher_is_better else ["lower is better"]
    if mean.low is not None and mean.high is not None and mean.low < mean.high:
        about.append(f"{100 * mean.confidence:.0f} % interval {score_interval_text(mean.low, mean.high, metric)}")
    runs = "1 run" if n == 1 else f"{n} runs"
    about.append(f"{mean.n} splits, {runs}" if mean.test_share else runs if n == 1 else f"n={n}")
    unit = " %" if is_percent(metric) else ""
    lost = f"; {planned - n} of {planned} runs have no score" if n < planned else ""
    sentence = f"only {arm} was run: {metric} {score_text(mean.mean, metric)}{unit} ({', '.join(about)}){lost}"
    splits = {"splits": mean.n if mean.test_share else None}
    if difference.smoke:
        return {"decision": "smoke", "verdict": SMOKE} | splits
    return {"decision": "one arm", "verdict": sentence} | splits


def compute(ratios: Mapping[str, float | None]) -> str:
    """Whether the arms had the same compute to train with."""
    known = {axis: ratio for axis in ("steps", "examples", "flops") if (ratio := ratios[axis]) is not None}
    listed = ", ".join(f"{axis} {ratio_text(ratio)}" for axis, ratio in known.items())
    listed = listed.replace("flops", "FLOPs")
    if not known:
        return "compute was not recorded"
    if all(abs(ratio - 1) <= MATCHED for ratio in known.values()):
        return f"compute matched: {listed}"
    flops = known.get("flops", 1.0)
    if abs(flops - 1) <= MATCHED:
        return f"compute not matched on every axis: {listed}"
    more, less, times = ("SPT", "scratch", flops) if flops > 1 else ("scratch", "SPT", 1 / flops)
    return (
        f"{more} used {ratio_text(times)} the training FLOPs of {less}: "
        f"part of the difference may be compute ({listed})"
    )


def warnings(pairs: Pairs) -> list[str]:
    """What the arms of a pair should have in common but do not."""
    problems = []
    for split, seeds in different_splits(pairs).items():
        problems.append(f"the arms have different data in the {split} split ({seeds_text(seeds)})")
    for split in ("val", "test"):
        if count := max((result.repeated.get(split, 0) for pair in pairs for result in pair), default=0):
            name = "validation" if split == "val" else split
            problems.append(
                f"{count} {name} rows have the same input as a training row: scores may reflect memorisation"
            )
    problems += dict.fromkeys(note for pair in pairs for result in pair for note in result.notes)
    for name, what in (("batch_size", "batch sizes"), ("precision", "precisions")):
        if any(getattr(scratch, name) != getattr(spt, name) for scratch, spt in pairs):
            problems.append(f"the arms were trained with different {what}")
    codes = {str([result.environment.get(key) for key in ("spt", "commit")]) for pair in pairs for result in pair}
    if len(codes) > 1:
        problems.append("the runs were made by different versions of spt")
    if any(scratch.parameters != spt.parameters for scratch, spt in pairs):
        problems.append("the arms have different numbers of parameters")
    if len({str(result.environment.get("device")) for pair in pairs for result in pair}) > 1:
        problems.append("the runs were made on different devices: wall times and memory cannot be compared")
    return problems


def different_splits(pairs: Sequence[tuple[Scored, Scored]]) -> dict[str, list[int]]:
    """Seeds at which two things differ in a split's rows, by split."""
    seeds: dict[str, list[int]] = {}
    for scratch, spt in pairs:
        for split in sorted(scratch.data.keys() | spt.data.keys()):
            if scratch.data.get(split) != spt.data.get(split):
                seeds.setdefault(split, []).append(scratch.seed or 0)
    return {split: list(dict.fromkeys(found)) for split, found in seeds.items()}


def notes(arms: Mapping[str, Sequence[Result]]) -> list[str]:
    """How the runs of each arm ended, and whether they learned anything."""
    n = max(map(len, arms.values()), default=0)
    if not n:
        return []
    sentences = []
    patience = {arm: sum(result.stop == "patience" for result in results) for arm, results in arms.items()}
    if any(patience.values()):
        sentences.append(f"stopped early by patience: {_counts(patience, n)}")
    if clock := ended_by_clock(arms):
        sentences.append(clock)
    if not any(patience.values()) and not clock:
        sentences.append("every run used its whole budget")
    last = {arm: sum(map(best_at_end, results)) for arm, results in arms.items()}
    if any(last.values()):
        sentences.append(f"best at the last step, more training might help: {_counts(last, n)}")
    for arm, results in arms.items():
        p, _ = against_chance(results)
        if p is not None and p > LEVEL:
            chance = score_text(chance_of(results), results[0].metric)
            sentences.append(f"{arm} is not shown to be above chance ({chance}; one-sided p {p_text(p)})")
    return sentences


def ended_by_clock(arms: Mapping[str, Sequence[Result]]) -> str:
    """How many runs of each arm, and of its pretraining, met their time limit, and where; empty for none."""
    parts = []
    for arm, results in arms.items():
        before = [result.total.steps - result.own.steps for result in results if result.parent_stop == "time"]
        own = [result.own.steps for result in results if result.stop == "time"]
        for steps, what in ((before, f"pretrainings of {arm}"), (own, f"{arm} runs")):
            if steps:
                places = " and ".join(filter(None, [", ".join(f"{s:,}" for s in steps[:-1]), f"{steps[-1]:,}"]))
                parts.append(f"{len(steps)} of {len(results)} {what}, at step{'s' if len(steps) > 1 else ''} {places}")
    return f"ended by the clock: {'; '.join(parts)}" if parts else ""


def best_at_end(result: Result) -> bool:
    return result.best_step >= result.own.steps


def chance_of(results: Sequence[Result]) -> float | None:
    """The score of the best constant answer, mean over runs, which differ in it where they have other test rows."""
    known = [result.chance for result in results if result.chance is not None]
    if len(known) < len(results) or not known:
        return None
    return known[0] if len({*known}) == 1 else fmean(known)


def against_chance(results: Sequence[Result]) -> tuple[float | None, Literal["t", "binomial"] | None]:
    """One-sided p that an arm is no better than the best constant answer, and by which test; None if untestable.

    A t test over seeds, or a corrected one over splits of the data; where they have no spread, the exact binomial test
    of one run's test rows.
    """
    if not results or any(result.chance is None for result in results):
        return None, None
    margins = [final_score(result) - (result.chance or 0) for result in results]
    sample, share = by_split(results, [m if results[0].higher_is_better else -m for m in margins])
    p = stats.above_chance(sample, share)
    if p is not None:
        return p, "t"
    p = _binomial(results[0])
    return p, None if p is None else "binomial"


def _binomial(result: Result) -> float | None:
    """Of a run whose accuracy counts whole test rows; one over steps is no multiple of 1/rows."""
    rows = result.data["test"].scored if "test" in result.data else 0
    chance, score = result.chance, final_score(result)
    if result.metric != "accuracy" or not rows or chance is None or not (0 <= chance <= 1 and 0 <= score <= 1):
        return None
    correct = round(score * rows)
    return stats.correct_above_chance(correct, rows, chance) if abs(score * rows - correct) <= WHOLE * rows else None


def final_score(result: Scored) -> float:
    return (result.test or {})[result.metric]


def seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _counts(counts: Mapping[str, int], n: int) -> str:
    return " and ".join(f"{count} of {n} {arm} runs" for arm, count in counts.items())
