"""What contrasts between models mean: rankings with ties, and verdicts that claim no more than the seeds support.

That self-pretraining changes a ranking is claimed only where the interaction's adjusted interval excludes zero and the
means stand in another order, never from one arm being decided and the other not.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

from spt.report.format import delta_text, interval_text, is_percent, ratio_text, size_interval_text, size_text
from spt.report.per_example import RowInterval
from spt.report.verdict import Judgement
from spt.runs.plan import ARMS, ArmName, Factor, Kind, Record

UNDECIDED = ("open", "first alone", "second alone")  # by an interval, which bounds the difference
MOST_PAIRS = 8  # that a sentence names
UNEQUAL = 1.1  # ratio of costs above which two models do not count as equally large

Arm = Literal["scratch", "spt", "difference"]
CONTRASTED: tuple[Arm, ...] = ("scratch", "spt", "difference")


class ModelScores(Record):
    """A model among those it is compared with: mean scores over the seeds an arm has finished, cost of supervised
    training."""

    name: str  # the model's, or the recipe's where two have the same model
    label: str  # of its row
    scratch: float | None
    scratch_low: float | None  # t interval of the mean
    scratch_high: float | None
    scratch_n: int
    spt: float | None
    spt_low: float | None
    spt_high: float | None
    spt_n: int
    parameters: int | None
    flops_per_example: float | None  # analytic, forward and backward
    seconds_per_step: float | None  # evaluation included
    peak_bytes: int | None


COSTS = {  # of `ModelScores`, as a sentence names them
    "parameters": "parameters",
    "flops_per_example": "operations per example",
    "seconds_per_step": "seconds per step",
    "peak_bytes": "peak memory",
}


class ModelContrast(Record):
    """Two models, paired by seed, in one arm or (the interaction) in what they gain from self-pretraining."""

    task: str
    factors: dict[str, Factor]
    arm: Arm
    first: str
    second: str
    metric: str
    higher_is_better: bool
    n: int  # seeds that both have finished, on each split of the data
    planned: int
    splits: int | None = None  # of the data, where there are several
    difference: float | None  # first - second, in the metric's own units
    low: float | None  # paired t interval; over splits the corrected resampled one
    high: float | None
    p: float | None
    holm: float | None = None  # over all pairs of models, in both arms; interactions are a family of their own
    tests: int = 0
    adjusted_low: float | None = None  # interval that holds for the whole family together (Bonferroni)
    adjusted_high: float | None = None
    detectable: float | None = None  # smallest difference that so many seeds find with a power of 80 %
    rows: RowInterval | None = None  # over test rows instead of seeds; None where rows have no score of their own
    ratios: dict[str, float | None]  # first : second, by field of `ModelScores`
    decision: Judgement
    verdict: str


class Ranking(Record):
    """Models from best to worst. It splits only where every model before is shown to beat every model after."""

    task: str
    factors: dict[str, Factor]
    arm: ArmName
    metric: str
    order: tuple[tuple[str, ...], ...]
    unranked: tuple[str, ...] = ()  # without a score


class ModelComparison(Record):
    """Several models on one task, at one level of what a study varies."""

    label: str  # unique within a report
    task: str
    kind: Kind
    factors: dict[str, Factor]
    metric: str
    higher_is_better: bool
    models: tuple[ModelScores, ...]
    contrasts: tuple[ModelContrast, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    verdict: str = ""
    warnings: tuple[str, ...] = ()


def rank(comparison: ModelComparison, arm: ArmName) -> Ranking:
    """Models by what they are shown to beat, then by mean score, with ties wherever not every model before beats every
    model after. Means may be of other seeds than contrasts, so they come second."""
    beats = {pair for contrast in comparison.contrasts if contrast.arm == arm and (pair := winner_loser(contrast))}
    sign = -1 if comparison.higher_is_better else 1
    scored = {model.name: sign * score for model in comparison.models if (score := getattr(model, arm)) is not None}
    lead = {name: sum(name == a for a, _ in beats) - sum(name == b for _, b in beats) for name in scored}
    names = sorted(scored, key=lambda name: (-lead[name], scored[name]))
    order: list[list[str]] = []
    for place, name in enumerate(names):
        if place and all((before, after) in beats for before in names[:place] for after in names[place:]):
            order.append([])
        order = order or [[]]
        order[-1].append(name)
    return Ranking(
        task=comparison.task,
        factors=comparison.factors,
        arm=arm,
        metric=comparison.metric,
        order=tuple(map(tuple, order)),
        unranked=tuple(model.name for model in comparison.models if model.name not in names),
    )


def winner_loser(contrast: ModelContrast, alone: bool = False) -> tuple[str, str] | None:
    """The model that is shown to be better, and the other one; None where that is not decided.

    With `alone` also where it is decided by this contrast's own interval, before adjustment.
    """
    decision = contrast.decision.removesuffix(" alone") if alone else contrast.decision
    if decision == "first":
        return contrast.first, contrast.second
    return (contrast.second, contrast.first) if decision == "second" else None


class Pair(NamedTuple):
    """The three contrasts of two models."""

    scratch: ModelContrast
    spt: ModelContrast
    interaction: ModelContrast


def pairs_of(comparison: ModelComparison) -> list[Pair]:
    contrasts = {(each.first, each.second, each.arm): each for each in comparison.contrasts}
    names = combinations([model.name for model in comparison.models], 2)
    return [Pair(*(contrasts[a, b, arm] for arm in CONTRASTED)) for a, b in names]


def interaction_fields(contrast: ModelContrast) -> dict[str, Any]:
    """Decision and sentence of an interaction, from the interval that holds for all of the report together."""
    low, high = contrast.adjusted_low, contrast.adjusted_high
    winner = winner_loser(contrast, alone=True)
    if winner is None or contrast.difference is None or low is None or high is None:
        return {}
    decision = contrast.decision.removesuffix(" alone")
    better, other = winner
    gain = (
        f"{better} gains {size_text(contrast.difference, contrast.metric)}{_unit(contrast)} more from self-pretraining "
    )
    if low <= 0 <= high:
        own = interval_text(contrast.low, contrast.high, contrast.metric)
        sentence = f"{gain}than {other} (95 % interval {own}, {_number(contrast)}) on its own; not decided among the "
        sentence += f"{contrast.tests} interactions of this report ({interval_text(low, high, contrast.metric)})"
        return {"decision": f"{decision} alone", "verdict": sentence}
    ends = size_interval_text(low, high, contrast.metric)
    family = f" for all {contrast.tests} interactions" if contrast.tests > 1 else ""
    return {"decision": decision, "verdict": f"{gain}than {other} (95 % interval{family} {ends}, {_number(contrast)})"}


def _number(contrast: ModelContrast) -> str:
    """How many pairs an interval is made from."""
    return f"n={contrast.n}" if contrast.splits is None else f"{contrast.splits} splits, {contrast.n} pairs"


def model_verdict(comparison: ModelComparison) -> str:
    """Who is better from scratch, who after self-pretraining, and whether the answer changes."""
    pairs, arms = pairs_of(comparison), _arms_run(comparison)
    if smoke := _of_smoke_runs(comparison):
        return smoke
    if len(pairs) == 1:
        sentences = [_arm_sentence(getattr(pairs[0], arm)) for arm in arms]
        changes = [_change_sentence(pairs[0])]
    else:
        sentences = [_ranking_sentence(comparison, arm) for arm in arms]
        changes = [*_change_sentences(pairs)]
    return ". ".join([*sentences, *(changes if len(arms) > 1 else []), *_cost_sentence(comparison)])


def _arms_run(comparison: ModelComparison) -> Sequence[ArmName]:
    """Both arms, unless no model has a score in one of them, of which then nothing is said."""
    return [arm for arm in ARMS if any(getattr(model, f"{arm}_n") for model in comparison.models)] or ARMS


def _of_smoke_runs(comparison: ModelComparison) -> str | None:
    """What is said in place of an order, which smoke runs do not have, also where some are missing."""
    return next((contrast.verdict for contrast in comparison.contrasts if contrast.decision == "smoke"), None)


def brief_ranking(comparison: ModelComparison) -> str:
    """Both rankings, and the pairs that are shown to change places."""
    pairs, arms = pairs_of(comparison), _arms_run(comparison)
    if smoke := _of_smoke_runs(comparison):
        return smoke
    orders = [f"{LEAD[each.arm].lower()} {_order(each)}" for each in comparison.rankings if each.arm in arms]
    if len(arms) == 1:
        return orders[0]
    changed = [f"{pair.scratch.first} and {pair.scratch.second}" for pair in pairs if changes_ranking(pair)]
    return "; ".join([*orders, f"order changes: {', '.join(changed)}" if changed else "no order is shown to change"])


LEAD = {"scratch": "From scratch", "spt": "After self-pretraining"}


def _order(ranking: Ranking) -> str:
    return " > ".join(map(", ".join, ranking.order)) or "no model has a score"


def _arm_sentence(contrast: ModelContrast) -> str:
    lead = LEAD[contrast.arm]
    if contrast.decision == "open":
        lost = contrast.planned - contrast.n
        return (
            f"{lead} they differ by at most {_at_most(contrast)}{_unit(contrast)} "
            f"({contrast.first} - {contrast.second} is {delta_text(contrast.difference, contrast.metric)}, "
            f"95 % interval {interval_text(contrast.low, contrast.high, contrast.metric)}, {_number(contrast)})"
        ) + (f"; {lost} of {contrast.planned} pairs incomplete" if lost else "")
    return f"{lead} {contrast.verdict}" if winner_loser(contrast, alone=True) else f"{lead}: {contrast.verdict}"


def _at_most(contrast: ModelContrast) -> str:
    """The largest difference that the interval does not exclude, of shares none larger than there is."""
    size = max(abs(end) for end in (contrast.low, contrast.high) if end is not None)
    if is_percent(contrast.metric):
        size = min(size, 2.0 if contrast.arm == "difference" else 1.0)
    return size_text(size, contrast.metric)


def _unit(contrast: ModelContrast) -> str:
    return " points" if is_percent(contrast.metric) else f" in {contrast.metric}"


def _change_sentence(pair: Pair) -> str:
    """What the interaction says of two models."""
    if winner_loser(pair.interaction) is not None:
        return f"{pair.interaction.verdict}: {_change(pair)}"
    one_sided = (winner_loser(pair.scratch) is None) != (winner_loser(pair.spt) is None)
    hint = "; that one arm is decided and the other is not does not show it" if one_sided else ""
    return f"Whether self-pretraining changes how they compare: {pair.interaction.verdict}{hint}"


def changes_ranking(pair: Pair) -> bool:
    """Is it shown that self-pretraining changes which of the two is better?"""
    before, after, gains = (winner_loser(contrast) for contrast in pair)
    if gains is None or before == after:
        return False
    if before and after:
        return True
    turned = _first_leads(pair.scratch) != _first_leads(pair.spt)
    return turned and gains == (after or (before and before[::-1]))


def _first_leads(contrast: ModelContrast) -> bool:
    """In these seeds, decided or not."""
    return ((contrast.difference or 0.0) > 0) == contrast.higher_is_better


def _change(pair: Pair) -> str:
    """What a decided interaction means for the ranking."""
    before, after, gains = (winner_loser(contrast) for contrast in pair)
    assert gains is not None
    if changes_ranking(pair):
        reversal = ", self-pretraining reverses it" if before and after else ""
        return f"training from scratch misjudges their ranking{reversal}"
    if before is None and after is None:
        return "in neither arm is one of them shown to be better"
    if before == after:
        return f"their ranking stays, the lead of {gains[0]} grows" if before == gains else "their ranking stays"
    if gains != (after or (before and before[::-1])):
        return f"their ranking {'from scratch' if before is None else 'after self-pretraining'} is not decided"
    sees = "overstates" if after is None else "understates"
    return f"training from scratch {sees} the lead of {(after or before or gains)[0]}; the order of their means stays"


def _ranking_sentence(comparison: ModelComparison, arm: ArmName) -> str:
    ranking = next(each for each in comparison.rankings if each.arm == arm)
    contrasts = [contrast for contrast in comparison.contrasts if contrast.arm == arm]
    best_first = ", best first" if ranking.order else ""
    sentence = f"{LEAD[arm]}{best_first}: {_order(ranking)}"
    if opened := [contrast for contrast in contrasts if contrast.decision in UNDECIDED]:
        largest = max(opened, key=lambda contrast: max(abs(contrast.low or 0), abs(contrast.high or 0)))
        possible = f"differences of up to {_at_most(largest)}{_unit(largest)} are possible"
        sentence += f" (models between commas are not told apart; {possible})"
    groups = {name: group for group in ranking.order for name in group}
    if inside := [pair for each in contrasts if (pair := winner_loser(each)) and groups[pair[0]] is groups[pair[1]]]:
        sentence += f"; {_within_ties(inside, contrasts)}"
    for what in ("seeds", "splits"):
        if few := sum(contrast.decision == f"too few {what}" for contrast in contrasts):
            sentence += f"; {few} of {len(contrasts)} pairs cannot be decided with fewer than three {what}"
    if flat := sum(contrast.decision == "no spread" for contrast in contrasts):
        sentence += f"; {flat} of {len(contrasts)} pairs differ by the same at every seed: no spread to judge them by"
    return sentence + (f"; without a score: {', '.join(ranking.unranked)}" if ranking.unranked else "")


def _within_ties(decided: Sequence[tuple[str, str]], contrasts: Sequence[ModelContrast]) -> str:
    """Winners and losers that stand between commas, by winner; of many pairs how many they are."""
    if len(decided) > MOST_PAIRS:
        return f"of the {len(contrasts)} pairs {len(decided)} are decided, as the contrasts below say"
    losers = {winner: [b for a, b in decided if a == winner] for winner, _ in decided}
    return "of these " + ", ".join(f"{winner} beats {' and '.join(beaten)}" for winner, beaten in losers.items())


def _change_sentences(pairs: Sequence[Pair]) -> Iterator[str]:
    """The pairs whose ranking is shown to change, and how many are open."""
    changed = [_gain_text(pair.interaction) for pair in pairs if changes_ranking(pair)]
    if changed:
        held = f"95 % intervals for all {pairs[0].interaction.tests} interactions"
        yield f"Training from scratch misjudges the ranking of {'; '.join(changed)} ({held})"
    else:
        yield "Self-pretraining is not shown to change the ranking of any two"
    opened = sum(winner_loser(pair.interaction) is None for pair in pairs)
    if opened:
        yield f"Which of two models gains more from self-pretraining is not decided for {opened} of {len(pairs)} pairs"


def _gain_text(contrast: ModelContrast) -> str:
    """A decided interaction, in few words."""
    better = (winner_loser(contrast) or ("",))[0]
    interval = size_interval_text(contrast.adjusted_low, contrast.adjusted_high, contrast.metric)
    size = f"{size_text(contrast.difference, contrast.metric)}{_unit(contrast)}"
    return f"{contrast.first} and {contrast.second} ({better} gains {size} more, {interval})"


def _cost_sentence(comparison: ModelComparison) -> list[str]:
    """Where models differ by more than a tenth in what they cost; nothing where they are equal."""
    parts = []
    for axis, what in COSTS.items():
        known = [(cost, model.name) for model in comparison.models if (cost := getattr(model, axis))]
        if known and (most := max(known))[0] > UNEQUAL * (least := min(known))[0]:
            parts.append(f"{what} {ratio_text(most[0] / least[0])} ({most[1]} : {least[1]})")
    return [f"They differ in size or cost: {', '.join(parts)}"] if parts else []
