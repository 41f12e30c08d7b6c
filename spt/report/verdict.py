"""What the numbers of a comparison mean, in sentences that claim no more than the seeds support."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from spt.report.format import WHOLE, delta_text, interval_text, is_percent, p_text, ratio_text, score_text, size_text
from spt.report.stats import CONFIDENCE, FEWEST, Paired, above_chance, correct_above_chance
from spt.runs.result import Result

Doubt = Literal["open", "too few seeds", "no spread", "no pair", "different data", "smoke"]

# "alone": decided by the interval of this comparison, but not after Holm's adjustment.
Decision = Literal["spt", "scratch", "spt alone", "scratch alone"] | Doubt
Judgement = Literal["first", "second", "first alone", "second alone"] | Doubt
Pairs = Sequence[tuple[Result, Result]]  # scratch and SPT of the same seed, both finished
LEVEL = round(1 - CONFIDENCE, 12)  # of significance
MATCHED = 0.05  # relative difference up to which steps, examples and FLOPs of the arms count as equal


class Difference(NamedTuple):
    """The paired differences first - second, and what limits their interpretation."""

    test: Paired | None  # None without a complete pair
    metric: str
    higher_is_better: bool
    planned: int  # pairs
    different_data: bool
    smoke: bool
    names: tuple[str, str] = ("SPT", "scratch")


class Adjusted(NamedTuple):
    """A p value adjusted for the family of tests that it belongs to."""

    p: float | None  # Holm's; None where the test could not be made
    tests: int
    family: str = "comparisons of this report"


def favour_spt(test: Paired, higher_is_better: bool) -> int:
    return test.positive if higher_is_better else test.negative


def verdict(difference: Difference, adjusted: Adjusted | None = None) -> tuple[Decision, str]:
    """Which arm is better, or why that is not known."""
    judgement, sentence = judge(difference, adjusted)
    if judgement == "first" or judgement == "second":
        return ("spt" if judgement == "first" else "scratch"), sentence
    if judgement == "first alone" or judgement == "second alone":
        return ("spt alone" if judgement == "first alone" else "scratch alone"), sentence
    return judgement, sentence


def judge(difference: Difference, adjusted: Adjusted | None = None) -> tuple[Judgement, str]:
    """Which of two is better, from their paired differences, or why that is not known."""
    test, metric, higher_is_better, planned, different_data, smoke, names = difference
    if test is None:
        return "no pair", f"no pair of runs finished (0 of {planned})"
    if different_data:
        whose = "arms" if names == ("SPT", "scratch") else "runs"
        return "different data", f"not comparable: the {whose} did not see the same data"
    if smoke:
        return "smoke", "smoke run: it shows that everything runs; its scores mean nothing"
    n, unit = test.n, " points" if is_percent(metric) else f" in {metric}"
    seeds = "1 seed" if n == 1 else f"{n} seeds"
    lost = f"; {planned - n} of {planned} pairs incomplete" if n < planned else ""
    observed = f"{names[0]} - {names[1]} is {delta_text(test.mean, metric)}{unit}"
    if n < FEWEST:
        return "too few seeds", f"cannot be decided with {seeds}: {observed}{lost}"
    if not test.deviation:
        return "no spread", f"not decided: {observed} with each of {seeds}, no spread to judge it by{lost}"
    direction = "" if higher_is_better else "lower is better, "
    favour = favour_spt(test, higher_is_better)
    support = f", {favour} of {n} seeds favour {names[0]}" if 0 < favour < n else ""
    if test.sign == 0:
        interval = interval_text(test.low, test.high, metric)
        return "open", (
            f"not decided: {observed} ({direction}{100 * test.confidence:.0f} % interval {interval}, "
            f"n={n}{support}); {seeds} could only have shown a difference of about "
            f"{size_text(test.detectable, metric)}{unit} or more{lost}"
        )
    wins = (test.sign > 0) == higher_is_better
    first, second = names if wins else names[::-1]
    ends = sorted(abs(end) for end in (test.low, test.high) if end is not None)
    interval = " to ".join(size_text(end, metric) for end in ends)
    sentence = (
        f"{first} beats {second} by {size_text(test.mean, metric)}{unit} "
        f"({direction}{100 * test.confidence:.0f} % interval {interval}, n={n}{support})"
    )
    if adjusted is None or (adjusted.p is not None and adjusted.p <= LEVEL):
        return ("first" if wins else "second"), sentence + lost
    holm = "" if adjusted.p is None else f" (Holm p {p_text(adjusted.p)})"
    return ("first alone" if wins else "second alone"), (
        f"{sentence} on its own; not decided among the {adjusted.tests} {adjusted.family}{holm}{lost}"
    )


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
        problems.append(f"the arms have different data in the {split} split ({_seeds(seeds)})")
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


def different_splits(pairs: Pairs) -> dict[str, list[int]]:
    """Seeds at which the arms differ in a split's rows, by split."""
    seeds: dict[str, list[int]] = {}
    for scratch, spt in pairs:
        for split in sorted(scratch.data.keys() | spt.data.keys()):
            if scratch.data.get(split) != spt.data.get(split):
                seeds.setdefault(split, []).append(scratch.seed)
    return seeds


def notes(pairs: Pairs) -> list[str]:
    """How the runs ended, and whether they learned anything."""
    if not pairs:
        return []
    arms = {"scratch": [scratch for scratch, _ in pairs], "SPT": [spt for _, spt in pairs]}
    sentences = []
    patience = {arm: sum(result.stop == "patience" for result in results) for arm, results in arms.items()}
    if any(patience.values()):
        sentences.append(f"stopped early by patience: {_counts(patience, len(pairs))}")
    else:
        sentences.append("every run used its whole budget")
    last = {arm: sum(map(best_at_end, results)) for arm, results in arms.items()}
    if any(last.values()):
        sentences.append(f"best at the last step, more training might help: {_counts(last, len(pairs))}")
    for arm, results in arms.items():
        chance_test = against_chance(results)
        if chance_test.above is False:
            chance = score_text(results[0].chance, results[0].metric)
            sentences.append(f"{arm} is not shown to be above chance ({chance}; one-sided p {p_text(chance_test.p)})")
    return sentences


def best_at_end(result: Result) -> bool:
    return result.best_step >= result.own.steps


class Chance(NamedTuple):
    """Whether an arm is better than the best constant answer."""

    above: bool | None  # p at most `LEVEL`; None where that cannot be tested
    p: float | None  # one-sided
    test: Literal["t", "binomial"] | None


def against_chance(results: Sequence[Result]) -> Chance:
    """One-sided t test over seeds; where they have no spread, the exact binomial test of one run's test rows."""
    margins = []
    for result in results:
        if result.chance is None:
            return Chance(None, None, None)
        margin = final_score(result) - result.chance
        margins.append(margin if result.higher_is_better else -margin)
    if not margins:
        return Chance(None, None, None)
    p = above_chance(margins).p
    if p is not None:
        return Chance(p <= LEVEL, p, "t")
    p = _binomial(results[0])
    return Chance(None if p is None else p <= LEVEL, p, None if p is None else "binomial")


def _binomial(result: Result) -> float | None:
    """Of a run whose accuracy counts whole test rows; one over steps is no multiple of 1/rows."""
    rows = result.data["test"].rows if "test" in result.data else 0
    chance, score = result.chance, final_score(result)
    if result.metric != "accuracy" or not rows or chance is None or not (0 <= chance <= 1 and 0 <= score <= 1):
        return None
    correct = round(score * rows)
    return correct_above_chance(correct, rows, chance) if abs(score * rows - correct) <= WHOLE * rows else None


def final_score(result: Result) -> float:
    return (result.test or {})[result.metric]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _counts(counts: Mapping[str, int], n: int) -> str:
    return " and ".join(f"{count} of {n} {arm} runs" for arm, count in counts.items())
