"""Networks against answers without one, on the same rows: which of them a network has beaten.

Each network is a row's two arms. Both are held against every baseline, seed by seed, and all these comparisons are one
family; of the two the one with the better mean is shown, which its p value allows for. A baseline without chance in it
is one number for all seeds.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from spt.report.arms import Comparison, Row, comparison_runs
from spt.report.format import (
    interval_text,
    is_percent,
    p_text,
    score_text,
    size_interval_text,
    size_text,
)
from spt.report.stats import CONFIDENCE, FEWEST
from spt.report.verdict import Difference, PairedContrast, adjusted_fields, final_score
from spt.runs.baseline import BaselineResult, baseline_outcome
from spt.runs.index import Failure
from spt.runs.plan import ARMS, ArmName, Ended, Factor, Place, PlannedBaseline, Record, factors_text

FAMILY = "comparisons with baselines of this report"
AFTER = {"spt": "after SPT", "scratch": "from scratch"}


class BaselineRun(Record):
    """A baseline with one seed, or without one. A missing score has its reason among the failures."""

    seed: int | None
    split: str | None = None  # where a study has several
    score: float | None
    state: Ended | Literal["done"]
    run: str


class BaselineScore(Record):
    """One baseline on one data set; means are over the runs that have finished."""

    baseline: str  # as studies have it
    title: str
    sees: str  # its features, in words
    metric: str
    score: float | None
    n: int  # runs
    planned: int
    one_number: bool  # without chance: it stands for every seed
    seconds: float | None
    fitted: int | None  # training rows, or steps, that it was fitted to
    settings: tuple[dict[str, Factor], ...]  # chosen on validation, by run
    notes: tuple[str, ...]
    runs: tuple[BaselineRun, ...]


class BaselineContrast(PairedContrast):
    """Network - baseline, seed by seed; Holm over all contrasts with baselines of the report."""

    label: str  # of the row
    network: str  # among those of its data set
    arm: ArmName
    shown: bool  # has this arm of the row the better mean?
    baseline: str
    score: float | None  # of the network, over the same seeds
    baseline_score: float | None


class BaselineComparison(Record):
    """The rows and baselines of one data set and metric."""

    label: str
    task: str
    metric: str
    higher_is_better: bool
    rows: tuple[str, ...]  # labels
    scores: tuple[BaselineScore, ...]  # best first
    contrasts: tuple[BaselineContrast, ...]
    beaten_by: dict[str, tuple[str, ...]]  # by baseline, the networks that are shown to beat it in their better arm
    verdict: str
    failures: tuple[Failure, ...]


class _Baseline(NamedTuple):
    """What became of a baseline's runs."""

    planned: Sequence[PlannedBaseline]
    outcomes: Sequence[BaselineResult | Failure]

    @property
    def results(self) -> list[BaselineResult]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, BaselineResult)]

    def at(self, place: Place) -> BaselineResult | None:
        """The result that the runs of this place are held against."""
        for planned, outcome in zip(self.planned, self.outcomes, strict=True):
            here = planned.split in (None, place.split) and planned.seed in (None, place.seed)
            if here and isinstance(outcome, BaselineResult):
                return outcome
        return None


class _Group(NamedTuple):
    """Rows of one data set, by the name of their network, and its baselines."""

    networks: dict[str, Comparison]
    baselines: dict[str, _Baseline]


class _Pair(NamedTuple):
    """An arm of a network, and a baseline."""

    group: int
    network: str
    arm: ArmName
    baseline: str
    difference: Difference
    scores: tuple[float | None, float | None]  # of both, over the seeds that the difference is made from
    identity: object  # what is compared, whatever it is called


def compare_baselines(rows: Sequence[Comparison]) -> tuple[BaselineComparison, ...]:
    """Every data set of the rows that has baselines; rows have their labels."""
    groups = _groups(rows)
    pairs = [pair for i, group in enumerate(groups) for pair in _pairs(i, group)]
    identities = [pair.identity for pair in pairs]
    first = [identities.index(identity) for identity in identities]
    updates = adjusted_fields([pair.difference for pair in pairs], FAMILY, first)
    contrasts: list[list[BaselineContrast]] = [[] for _ in groups]
    for pair, update in zip(pairs, updates, strict=True):
        difference, comparison = pair.difference, groups[pair.group].networks[pair.network]
        fields = {
            "first": difference.names[0],
            "second": difference.names[1],
            "difference": difference.test.mean if difference.test else None,
            "label": comparison.row.label,
            "network": pair.network,
            "arm": pair.arm,
            "shown": pair.arm == _better_arm(comparison),
            "baseline": pair.baseline,
            "score": pair.scores[0],
            "baseline_score": pair.scores[1],
        }
        contrasts[pair.group].append(BaselineContrast(**fields, **difference.fields() | update))
    labels = _labels(groups)
    return tuple(_comparison(*each) for each in zip(groups, labels, contrasts, strict=True))


def _groups(rows: Sequence[Comparison]) -> list[_Group]:
    """Rows that have the same baselines; rows of the same runs once."""
    members: dict[tuple[Path, frozenset[str]], dict[object, Comparison]] = {}
    for comparison in rows:
        runs = comparison.runs
        if runs.baselines:
            key = (runs.root.resolve(), frozenset(each.run for each in runs.baselines))
            members.setdefault(key, {}).setdefault(comparison_runs(runs), comparison)
    groups = []
    for (root, _), each in members.items():
        comparisons, planned = list(each.values()), dict[str, list[PlannedBaseline]]()
        for baseline in comparisons[0].runs.baselines:
            planned.setdefault(baseline.name, []).append(baseline)
        found = {name: _Baseline(runs, [_outcome(root, run) for run in runs]) for name, runs in planned.items()}
        groups.append(_Group(dict(zip(_network_names(comparisons), comparisons, strict=True)), found))
    return groups


def _outcome(root: Path, planned: PlannedBaseline) -> BaselineResult | Failure:
    outcome = baseline_outcome(root, planned.run)
    if isinstance(outcome, Failure):
        return outcome.model_copy(
            update={"arm": f"baseline {planned.name}", "seed": planned.seed, "split": planned.split}
        )
    return outcome


def _network_names(rows: Sequence[Comparison]) -> list[str]:
    """By model; where that is not enough, with the level of what a study varies, or as the row is called."""
    names = [each.row.model for each in rows]
    levels = [", ".join(filter(None, (each.row.model, factors_text(each.row.factors)))) for each in rows]
    names = [level if names.count(name) > 1 else name for name, level in zip(names, levels, strict=True)]
    return [each.row.label if names.count(name) > 1 else name for name, each in zip(names, rows, strict=True)]


def _labels(groups: Sequence[_Group]) -> list[str]:
    """The task; where that is not enough, with the level that all rows share, the recipe, the study, or a number."""
    rows = [[each.row for each in group.networks.values()] for group in groups]
    labels = [members[0].task for members in rows]
    details = [
        [factors_text(_shared(members)) for members in rows],
        [members[0].recipe for members in rows],
        [members[0].source for members in rows],
        [f"#{number}" for number in range(1, len(rows) + 1)],
    ]
    for detail in details:
        taken = Counter(labels)
        labels = [
            f"{label}, {more}" if more and taken[label] > 1 else label
            for label, more in zip(labels, detail, strict=True)
        ]
    return labels


def _shared(rows: Sequence[Row]) -> dict[str, Factor]:
    """The levels that all rows have."""
    return {
        name: value for name, value in rows[0].factors.items() if all(row.factors.get(name) == value for row in rows)
    }


def _pairs(number: int, group: _Group) -> list[_Pair]:
    pairs = []
    for network, comparison in group.networks.items():
        for arm in ARMS:
            results = comparison.results(arm)
            for name, baseline in group.baselines.items():
                terms = [((run,), (result,)) for place, run in results.items() if (result := baseline.at(place))]
                title = baseline.results[0].title if baseline.results else name
                difference = Difference.of(
                    terms,
                    metric=comparison.row.metric,
                    higher_is_better=comparison.row.higher_is_better,
                    planned=len(comparison.runs.places),
                    smoke=comparison.row.smoke or any(result.smoke for result in baseline.results),
                    names=(f"{network} {AFTER[arm]}", title),
                    decisions=("first", "second"),
                )
                score, baseline_score = (
                    fmean(final_score(each[side][0]) for each in terms) if terms else None for side in (0, 1)
                )
                runs = frozenset(run.key for term in terms for side in term for run in side)
                identity = runs or (number, network, arm, name)
                pairs.append(_Pair(number, network, arm, name, difference, (score, baseline_score), identity))
    return pairs


def _mean(comparison: Comparison, arm: ArmName) -> float | None:
    results = comparison.results(arm).values()
    return fmean(map(final_score, results)) if results else None


def _better_arm(comparison: Comparison) -> ArmName:
    """The arm with the better mean; SPT where they are equal."""
    scratch, spt = _mean(comparison, "scratch"), _mean(comparison, "spt")
    if scratch is None or spt is None:
        return "spt" if scratch is None else "scratch"
    return "scratch" if (scratch > spt if comparison.row.higher_is_better else scratch < spt) else "spt"


def _comparison(group: _Group, label: str, contrasts: Sequence[BaselineContrast]) -> BaselineComparison:
    rows = [each.row for each in group.networks.values()]
    known = next((row for row in rows if row.metric), None)
    results = [result for baseline in group.baselines.values() for result in baseline.results]
    metric = known.metric if known else results[0].metric if results else ""
    higher = known.higher_is_better if known else results[0].higher_is_better if results else True
    sign = -1 if higher else 1
    scores = [_score(name, baseline, metric) for name, baseline in group.baselines.items()]
    scores.sort(key=lambda each: (each.score is None, sign * (each.score or 0.0)))
    beaten_by = {
        each.baseline: tuple(
            dict.fromkeys(
                c.network for c in contrasts if c.shown and c.baseline == each.baseline and c.decision == "first"
            )
        )
        for each in scores
    }
    places = [each.baseline for each in scores]
    shown = sorted(
        (c for c in contrasts if c.shown),
        key=lambda c: (c.score is None, sign * (c.score or 0.0), places.index(c.baseline)),
    )
    comparison = BaselineComparison(
        label=label,
        task=rows[0].task,
        metric=metric,
        higher_is_better=higher,
        rows=tuple(row.label for row in rows),
        scores=tuple(scores),
        contrasts=(*shown, *(c for c in contrasts if not c.shown)),
        beaten_by=beaten_by,
        verdict="",
        failures=tuple(
            outcome
            for baseline in group.baselines.values()
            for outcome in baseline.outcomes
            if isinstance(outcome, Failure)
        ),
    )
    return comparison.model_copy(update={"verdict": _verdict(comparison)})


def _score(name: str, baseline: _Baseline, metric: str) -> BaselineScore:
    results = baseline.results
    one = results[0] if results else None
    return BaselineScore(
        baseline=name,
        title=one.title if one else name,
        sees=one.sees if one else "",
        metric=metric,
        score=fmean(map(final_score, results)) if results else None,
        n=len(results),
        planned=len(baseline.planned),
        one_number=all(each.seed is None for each in baseline.planned),
        seconds=fmean(result.seconds for result in results) if results else None,
        fitted=one.fitted if one else None,
        settings=tuple(result.settings for result in results),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        runs=tuple(
            BaselineRun(
                seed=planned.seed,
                split=planned.split,
                score=final_score(outcome) if isinstance(outcome, BaselineResult) else None,
                state="done" if isinstance(outcome, BaselineResult) else outcome.state,
                run=planned.run,
            )
            for planned, outcome in zip(baseline.planned, baseline.outcomes, strict=True)
        ),
    )


def _verdict(comparison: BaselineComparison) -> str:
    """Which networks have beaten all baselines; if none has, the best baseline that stands."""
    finished = [each for each in comparison.scores if each.score is not None]
    shown = [c for c in comparison.contrasts if c.shown and c.score is not None and c.baseline_score is not None]
    if not finished:
        return "no baseline has finished"
    metric, strongest = comparison.metric, finished[0]
    made = "" if len(finished) == len(comparison.scores) else " that was made"
    if not shown:
        return f"no network has finished; the best baseline is {_named(strongest)}"
    if doubt := next((c for c in shown if c.decision in ("smoke", "different data")), None):
        return doubt.verdict
    networks = list(dict.fromkeys(c.network for c in shown))  # the best first
    compared = [each for each in finished if any(c.baseline == each.baseline for c in shown)]  # at a seed of a network
    if all((c.splits or c.n) < FEWEST for c in shown):
        return f"cannot be decided with {_seeds(shown[0])}: {_distance(_best(shown, networks, compared[0]), metric)}"
    apart = [_named(each) for each in finished if each not in compared]
    unsaid = f"; not compared, without a seed in common: {', '.join(apart)}" if apart else ""
    winners = [n for n in networks if all(n in comparison.beaten_by[each.baseline] for each in compared)]
    if winners:
        count = f"{len(winners)} of {len(networks)} networks beat"
        if len(winners) == len(networks):
            count = f"each of the {len(networks)} networks beats" if len(networks) > 1 else f"{networks[0]} beats"
        nearest = _best(shown, winners, compared[0])
        return f"{count} every baseline{made}: {_distance(nearest, metric)}{_support(nearest)}{unsaid}"
    unbeaten = [each for each in compared if not comparison.beaten_by[each.baseline]]
    target = (unbeaten or compared)[0]
    against = [c for c in shown if c.baseline == target.baseline]
    ahead = any(c.difference and (c.difference > 0) == comparison.higher_is_better for c in against)
    said = f"no network here {'is shown to beat' if ahead else 'beats'} "
    said += _named(target) if unbeaten else f"every baseline{made}; the best of them is {_named(target)}"
    nearest = _best(shown, networks, target)
    return f"{said}: {_distance(nearest, metric, short=True)}{_support(nearest)}{unsaid}"


def _best(shown: Sequence[BaselineContrast], networks: Sequence[str], baseline: BaselineScore) -> BaselineContrast:
    """The contrast with this baseline of the first of these networks that shares a seed with it."""
    against = {c.network: c for c in shown if c.baseline == baseline.baseline}
    return next(against[network] for network in networks if network in against)


def _named(each: BaselineScore) -> str:
    return f"{each.title} ({score_text(each.score, each.metric)})"


def _distance(contrast: BaselineContrast, metric: str, short: bool = False) -> str:
    """`S4D after SPT is 0.80 points behind`"""
    assert contrast.difference is not None
    unit = " points" if is_percent(metric) else f" in {metric}"
    ahead = (contrast.difference > 0) == contrast.higher_is_better
    gap = f"{size_text(contrast.difference, metric)}{unit}"
    beside = f"{gap} {'ahead' if ahead else 'behind'}" if contrast.difference else "level"
    if short:
        return f"the best, {contrast.first}, is {beside}"
    relation = "with " if not contrast.difference else "of " if ahead else ""
    return f"{contrast.first} is {beside} {relation}the best of them, {contrast.second} " + (
        f"({score_text(contrast.baseline_score, metric)})"
    )


def _seeds(contrast: BaselineContrast) -> str:
    n, what = (contrast.n, "seed") if contrast.splits is None else (contrast.splits, "split")
    return f"1 {what}" if n == 1 else f"{n} {what}s"


def _support(contrast: BaselineContrast) -> str:
    """How sure a distance is."""
    metric, percent = contrast.metric, f"{100 * CONFIDENCE:.0f} % interval"
    number = f"n={contrast.n}" if contrast.splits is None else _seeds(contrast)
    if contrast.decision in ("first", "second"):
        return f" ({percent} {size_interval_text(contrast.low, contrast.high, metric)}, {number})"
    if contrast.decision == "open":
        interval = interval_text(contrast.low, contrast.high, metric)
        return f", which is not decided ({percent} {interval}, {number})"
    if contrast.decision in ("first alone", "second alone"):
        interval = size_interval_text(contrast.low, contrast.high, metric)
        return (
            f" ({percent} {interval}, {number}), but not decided among the {contrast.tests} {FAMILY} "
            f"(Holm p {p_text(contrast.holm)})"
        )
    if contrast.decision == "no spread":
        return f", with each of {_seeds(contrast)}, so that there is no spread to judge it by"
    return f", which cannot be decided with {_seeds(contrast)}"
