"""How far a layer has to see: a whole network against the same one cut to a reach, in each arm.

A reach is called too short where the whole is better after Holm's adjustment for all contrasts of the study, and
enough where neither it nor a longer one is shown to lose, even by its contrast alone. That is no proof, so the sentence
has the loss that the seeds leave possible.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, get_args

from spt.report.arms import Comparison
from spt.report.format import delta_text, interval_text, is_percent, size_text
from spt.report.levels import Contrast, LevelPair, by_recipe, by_study, level_contrasts
from spt.report.stats import FEWEST
from spt.runs.plan import ReceptiveField, Record

ArmText = Literal["scratch", "SPT"]
LEAD: dict[ArmText, str] = {"scratch": "from scratch", "SPT": "after self-pretraining"}


class NeededReach(Record):
    """How far a layer of one recipe has to see in one arm, in steps to each side (before it, if causal)."""

    study: str
    label: str  # of the recipe
    what: ArmText
    metric: str
    whole: int  # steps that a layer sees without a cut
    too_short: int | None  # the longest reach that is shown to lose
    enough: int | None  # the shortest from which on none is
    possible_loss: float | None  # there: the end of its interval, in the metric's own units
    verdict: str
    contrasts: tuple[Contrast, ...]  # the whole against each reach, from the shortest on


class Level(NamedTuple):
    seen: ReceptiveField
    comparison: Comparison


class Cut(NamedTuple):
    """The whole against one reach."""

    seen: ReceptiveField
    contrast: Contrast

    @property
    def loses(self) -> bool:
        """Is it shown to?"""
        return self.contrast.decision == "first"

    @property
    def may_be_enough(self) -> bool:
        equal = self.contrast.decision == "no spread" and not self.contrast.difference
        return equal or self.contrast.decision in ("open", "second", "second alone")

    @property
    def possible_loss(self) -> float | None:
        low, high = self.contrast.low, self.contrast.high
        return high if self.contrast.higher_is_better else None if low is None else -low


def needed_reaches(rows: Sequence[Comparison]) -> tuple[NeededReach, ...]:
    """Of every study of reach, recipe by recipe and arm by arm. Smoke runs say nothing."""
    studies = (study for study in by_study(rows).values() if study[0].row.kind == "reach" and not study[0].row.smoke)
    return tuple(needed for study in studies for needed in _of_study(study))


def _of_study(rows: Sequence[Comparison]) -> Iterator[NeededReach]:
    recipes = [(label, *_split(members)) for label, members in by_recipe(rows)]
    arms = [(label, what, whole, cuts) for label, whole, cuts in recipes if whole for what in get_args(ArmText)]
    contrasts = iter(
        level_contrasts(
            [
                LevelPair(label, what, whole.comparison, cut.comparison)
                for label, what, whole, cuts in arms
                for cut in cuts
            ]
        )
    )
    for label, what, whole, levels in arms:
        if cuts := [Cut(level.seen, next(contrasts)) for level in levels]:
            yield _needed(label, what, whole, cuts)


def _split(rows: Sequence[Comparison]) -> tuple[Level | None, list[Level]]:
    """The whole network, and those that are cut, from the shortest reach on."""
    levels = sorted(
        (Level(seen, row) for row in rows if (seen := row.runs.row.seen)), key=lambda level: level.seen.layer
    )
    whole = next((level for level in levels if level.comparison.row.factors["reach"] == "full"), None)
    return whole, [level for level in levels if level is not whole]


def _needed(label: str, what: ArmText, whole: Level, cuts: Sequence[Cut]) -> NeededReach:
    enough = next(reversed(list(takewhile(lambda cut: cut.may_be_enough, reversed(cuts)))), None)
    too_short = next((cut for cut in reversed(cuts) if cut.loses), None)
    metric = next((cut.contrast.metric for cut in cuts if cut.contrast.metric), "")
    return NeededReach(
        study=whole.comparison.row.source,
        label=label,
        what=what,
        metric=metric,
        whole=whole.seen.layer,
        too_short=too_short.seen.layer if too_short else None,
        enough=enough.seen.layer if enough else None,
        possible_loss=enough.possible_loss if enough else None,
        verdict=f"{LEAD[what]} {_unknown(cuts) or '; '.join(_findings(whole.seen.layer, cuts, enough, too_short))}",
        contrasts=tuple(cut.contrast for cut in cuts),
    )


def _unknown(cuts: Sequence[Cut]) -> str:
    """Why nothing can be said; empty where something can."""
    if any(cut.contrast.decision == "different data" for cut in cuts):
        return "how far a layer has to see is not known: the runs did not see the same data"
    if waiting := [f"{cut.seen.layer:,}" for cut in cuts if not cut.contrast.n]:
        return f"how far a layer has to see is not known: no pair of runs finished at reach {', '.join(waiting)}"
    if (n := min(cut.contrast.n for cut in cuts)) < FEWEST:
        seeds = "1 seed" if n == 1 else f"{n} seeds"
        return f"how far a layer has to see cannot be decided with {seeds}: {', '.join(map(_observed, cuts))}"
    return ""


def _findings(whole: int, cuts: Sequence[Cut], enough: Cut | None, too_short: Cut | None) -> Iterator[str]:
    last, of_whole = cuts[-1], f" of {whole:,} steps per layer"
    if enough:
        contrast = enough.contrast
        yield (
            f"{enough.seen.layer:,}{of_whole} {_is(enough)} enough as far as {contrast.n} seeds show "
            f"({_network(enough.seen)}): {_observed(enough)} "
            f"(95 % interval {interval_text(contrast.low, contrast.high, contrast.metric)}){_left_open(enough)}"
        )
    elif not last.loses:
        yield f"it is not decided whether {last.seen.layer:,}{of_whole} are enough: {last.contrast.verdict}"
    if too_short:
        of = "" if enough or not last.loses else of_whole
        yield f"{too_short.seen.layer:,}{of} {_is(too_short)} too few: {too_short.contrast.verdict}"
    first = (enough or last).seen.layer
    longest = too_short.seen.layer if too_short else 0
    if between := [f"{cut.seen.layer:,}" for cut in cuts if longest < cut.seen.layer < first]:
        yield f"whether {' or '.join(between)} are enough is not decided"


def _is(cut: Cut) -> str:
    return "is" if cut.seen.layer == 1 else "are"


def _observed(cut: Cut) -> str:
    contrast = cut.contrast
    unit = " points" if is_percent(contrast.metric) else f" in {contrast.metric}"
    return f"{contrast.first} - {contrast.second} is {delta_text(contrast.difference, contrast.metric)}{unit}"


def _left_open(cut: Cut) -> str:
    """The loss that is possible all the same."""
    if (loss := cut.possible_loss) is None or loss <= 0:
        return ""
    return f", so that up to {size_text(loss, cut.contrast.metric)} may be lost"


def _network(seen: ReceptiveField) -> str:
    return f"{seen.layers} layer{' sees' if seen.layers == 1 else 's see'} {seen.network:,}"
