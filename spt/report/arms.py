"""The rows of a report: SPT minus scratch, seed by seed, with what both arms cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from spt.config.budget import Duration, compare_budgets
from spt.report import stats, verdict
from spt.report.per_example import ItemTest, compare_examples
from spt.report.verdict import Decision, Difference, Pairs, adjusted_fields, final_score
from spt.runs.index import ComparisonRuns, Failure, Outcomes, outcomes
from spt.runs.plan import ARMS, ArmName, Ended, Factor, Kind, Place, PlannedCell, Record, Total, arm_text, factors_text
from spt.runs.predictions import NotComparable
from spt.runs.result import NOT_SELF_PRETRAINING, Ledger, Result

MORE_DATA = "pretraining on more data"  # what stands for SPT where pretraining is not self-pretraining


class Seed(Record):
    """Both arms at one seed, on one split of the data. A missing score has its reason among the row's failures."""

    seed: int
    split: str | None = None  # where a study has several
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
    stops: dict[str, int]  # how many runs ended by budget, patience, time
    best_at_end: int  # runs whose best checkpoint is the last one: more training might have helped
    above_chance: bool | None  # None where it cannot be tested
    chance_p: float | None  # one-sided, of a score no better than chance
    chance_test: Literal["t", "binomial"] | None  # over seeds, or over the test rows of one run
    parameters: dict[str, int]

    @property
    def runs(self) -> int:
        return sum(self.stops.values())


class OnlyArm(Record):
    """The one arm of a row that was run: no finetuning of the other was ever started."""

    arm: ArmName
    n: int  # runs with a score
    low: float | None  # t interval of their mean, which is the row's; over splits the corrected resampled one
    high: float | None


class Row(Record):
    """One recipe at one level of what a study varies. Means, costs and statistics are over the n complete pairs, or of
    the only arm over its own runs; over several splits of the data, differences are averaged within each split
    first."""

    label: str = ""  # unique within one report
    kind: Kind
    task: str
    model: str
    recipe: str
    factors: dict[str, Factor]
    seen: int | None = None  # steps to each side that a layer sees, where the study varies them
    total: Total | None
    source: str  # the study's folder, or the settings that were paired without one
    command: str
    smoke: bool
    not_self_pretraining: bool  # pretraining saw more rows than the training split
    metric: str
    higher_is_better: bool
    chance: float | None
    scratch: float | None
    spt: float | None
    delta: float | None  # SPT - scratch, in the metric's own units
    low: float | None  # paired t interval of delta; over splits the corrected resampled one
    high: float | None
    confidence: float
    p: float | None  # of this row alone
    holm: float | None = None  # p adjusted for all comparisons of the report; None where the row does not count as one
    tests: int = 0  # comparisons of the report that holm counts
    n: int  # complete pairs
    planned: int
    splits: int | None = None  # of the data, that delta is the mean over; None: all seeds have the same
    test_share: float | None = None  # of the rows, that a split tests
    favour_spt: int  # pairs, or splits, in which SPT scored better
    detectable: float | None  # smallest detectable difference, as `spt.report.stats` defines it
    decision: Decision
    verdict: str
    ratios: dict[str, float | None]  # SPT : scratch, by field of `Cost`, pretraining included
    compute: str  # the ratios as a sentence
    budgets: str = ""  # how long scratch and both stages of SPT trained, as a sentence
    scratch_arm: Arm | None
    spt_arm: Arm | None
    only: OnlyArm | None = None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    seeds: tuple[Seed, ...]
    items: tuple[ItemTest, ...]
    failures: tuple[Failure, ...]

    @property
    def comparable(self) -> bool:
        """Whether its scores may be tested against others."""
        return self.decision not in ("different data", "smoke", "no pair", "one arm")

    @property
    def averaged(self) -> int:
        """How many runs of each arm its means are over: the complete pairs, or the only arm's own."""
        return self.n if self.only is None else self.only.n

    @property
    def told_failures(self) -> tuple[Failure, ...]:
        """Without the runs of an arm that was never started: one sentence says so of all."""
        return tuple(each for each in self.failures if self.only is None or each.arm == self.only.arm)


class Comparison(NamedTuple):
    """A row, and the runs that it was made from."""

    runs: ComparisonRuns
    outcomes: Outcomes
    pairs: Pairs
    difference: Difference
    row: Row

    def results(self, arm: ArmName) -> dict[Place, Result]:
        """The finished runs of an arm, by seed and split."""
        outcomes = self.outcomes.items()
        return {place: result for (place, name), result in outcomes if name == arm and isinstance(result, Result)}


def compare_arms(runs: ComparisonRuns) -> Comparison:
    """One row's pairs, statistics, costs and verdict, before any adjustment for the other rows."""
    ended = outcomes(runs)
    results = [outcome for outcome in ended.values() if isinstance(outcome, Result)]
    both = [(ended[place, "scratch"], ended[place, "spt"]) for place in runs.places]
    pairs = [(a, b) for a, b in both if isinstance(a, Result) and isinstance(b, Result)]
    more = any(note.startswith(NOT_SELF_PRETRAINING) for result in results for note in result.notes)
    difference = Difference.of(
        [((spt,), (scratch,)) for scratch, spt in pairs],
        metric=results[0].metric if results else "",
        higher_is_better=results[0].higher_is_better if results else True,
        planned=len(runs.places),
        smoke=runs.smoke or any(result.smoke for result in results),
        names=(MORE_DATA if more else "SPT", "scratch"),
    )
    test, fields, only = difference.test, difference.fields(), None
    averaged = {arm: [pair[side] for pair in pairs] for side, arm in enumerate(ARMS)}
    if alone := _only_arm(runs, results):
        averaged[alone] = results
        mean = verdict.paired(results, [final_score(result) for result in results])
        only = OnlyArm(arm=alone, n=len(results), low=mean.low, high=mean.high)
        fields |= verdict.only_fields(arm_text(alone), results, mean, difference)
    scratch, spt = (summarise_arm(averaged[arm]) for arm in ARMS)
    ratios = cost_ratios(scratch, spt)
    names: dict[Place, dict[str, PlannedCell]] = {}
    for cell in runs.cells:
        names.setdefault(Place(cell.seed, cell.split), {})[cell.arm] = cell
    seeds = tuple(_seed(place, names.get(place, {}), ended) for place in runs.places)
    items, skipped = _items(runs, seeds, difference.metric)
    row = Row(
        kind=runs.kind,
        task=runs.row.task,
        model=runs.row.model,
        recipe=runs.row.name,
        factors=runs.row.factors,
        seen=runs.row.seen.layer if runs.row.seen else None,
        total=runs.row.total,
        source=runs.source,
        command=runs.command,
        smoke=difference.smoke,
        not_self_pretraining=more,
        chance=verdict.chance_of(results),
        scratch=scratch.score if scratch else None,
        spt=spt.score if spt else None,
        delta=test.mean if test else None,
        confidence=stats.CONFIDENCE,
        test_share=test.test_share or None if test else None,
        favour_spt=verdict.favour_spt(test, difference.higher_is_better) if test else 0,
        detectable=test.detectable if test else None,
        ratios=ratios,
        compute=verdict.compute(ratios) if pairs else "",
        budgets=_budgets(pairs),
        scratch_arm=scratch,
        spt_arm=spt,
        only=only,
        # Without pairs, each run is paired with itself: warnings about single runs still appear.
        warnings=tuple(verdict.warnings([(run, run) for run in results] if only else pairs)),
        notes=(*verdict.notes({arm_text(arm): members for arm, members in averaged.items() if members}), *skipped),
        seeds=seeds,
        items=items,
        failures=tuple(outcome for outcome in ended.values() if isinstance(outcome, Failure)),
        **fields,
    )
    return Comparison(runs, ended, pairs, difference, row)


def _only_arm(runs: ComparisonRuns, results: Sequence[Result]) -> ArmName | None:
    """The arm that has finished runs, if the other has no run folder at all, not even of a pretraining."""
    begun = {
        cell.arm for cell in runs.cells if any((runs.root / name).exists() for name in (cell.run, cell.parent) if name)
    }
    return next((arm for arm in ARMS if begun == {arm}), None) if results else None


def adjust_for_multiplicity(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[str]]:
    """The rows as one family, with distinct labels, Holm's p and verdicts that allow for it; and warnings.

    Rows made from the same runs count as one comparison, whatever they are called. Smoke rows, and those whose arms
    saw different data, do not count.
    """
    labels = _labels([comparison.row for comparison in comparisons])
    identities = [comparison_runs(comparison.runs) or index for index, comparison in enumerate(comparisons)]
    first = [identities.index(identity) for identity in identities]
    groups = [
        [label for label, index in zip(labels, first, strict=True) if index == start] for start in sorted({*first})
    ]
    warnings = [
        f"{' and '.join(same)} are the same runs; they count as one comparison" for same in groups if len(same) > 1
    ]
    updates = adjusted_fields(
        [comparison.difference for comparison in comparisons], "comparisons of this report", first
    )
    return [
        comparison._replace(row=comparison.row.model_copy(update={"label": label, **update}))
        for comparison, label, update in zip(comparisons, labels, updates, strict=True)
    ], warnings


def comparison_runs(runs: ComparisonRuns) -> frozenset[object]:
    """The identity of a row's runs, whatever the row is called."""
    root = runs.root.resolve()
    return frozenset((root, cell.arm, cell.seed, cell.run) for cell in runs.cells)


def _labels(rows: Sequence[Row]) -> list[str]:
    """Rows named by task, model and level; where that is not enough, by recipe, source and number."""
    labels = [f"{row.task} / {row.model}" + (f", {factors_text(row.factors)}" if row.factors else "") for row in rows]
    labels = [
        f"{label}, {NOT_SELF_PRETRAINING}" if row.not_self_pretraining else label
        for label, row in zip(labels, rows, strict=True)
    ]
    details = [
        [row.recipe for row in rows],
        [row.source for row in rows],
        [f"#{number}" for number in range(1, len(rows) + 1)],
    ]
    for detail in details:
        taken = Counter(labels)
        labels = [f"{label}, {more}" if taken[label] > 1 else label for label, more in zip(labels, detail, strict=True)]
    return labels


def _seed(place: Place, cells: Mapping[str, PlannedCell], ended: Outcomes) -> Seed:
    first, second = ended[place, "scratch"], ended[place, "spt"]
    scratch = final_score(first) if isinstance(first, Result) else None
    spt = final_score(second) if isinstance(second, Result) else None
    return Seed(
        **place._asdict(),
        scratch=scratch,
        spt=spt,
        delta=None if scratch is None or spt is None else spt - scratch,
        scratch_state=first.state if isinstance(first, Failure) else "done",
        spt_state=second.state if isinstance(second, Failure) else "done",
        scratch_run=cells["scratch"].run if "scratch" in cells else "",
        spt_run=cells["spt"].run if "spt" in cells else "",
        pretrain_run=cells["spt"].parent if "spt" in cells else None,
    )


def _items(runs: ComparisonRuns, seeds: Sequence[Seed], metric: str) -> tuple[tuple[ItemTest, ...], list[str]]:
    """The complete pairs, item by item, and a note on those that could not be compared."""
    tests: list[ItemTest] = []
    skipped: dict[Place, NotComparable] = {}
    for seed in seeds:
        if seed.delta is not None:
            try:
                test = compare_examples(runs.root / seed.scratch_run, runs.root / seed.spt_run, seed.seed, metric)
                tests.append(test.model_copy(update={"split": seed.split}))
            except NotComparable as error:
                skipped[Place(seed.seed, seed.split)] = error
    if not skipped:
        return tuple(tests), []
    first, reason = next(iter(skipped.items()))
    places = "; ".join(map(str, skipped)) if first.split is not None else ", ".join(map(str, skipped))
    which = f"seed {first}: {reason}" if len(skipped) == 1 else f"seeds {places} (seed {first}: {reason})"
    return tuple(tests), [f"test items not compared at {which}"]


def summarise_arm(results: Sequence[Result]) -> Arm | None:
    """What these runs of one arm scored and cost, and how they ended; None without any."""
    if not results:
        return None
    p, test = verdict.against_chance(results)
    scores, _ = verdict.by_split(results, [final_score(result) for result in results])
    return Arm(
        score=fmean(scores),
        total=_cost([result.total for result in results]),
        pretraining=_cost([_before(result) for result in results]),
        finetuning=_cost([result.own for result in results]),
        stops=dict(sorted(Counter(result.stop for result in results).items())),
        best_at_end=sum(map(verdict.best_at_end, results)),
        above_chance=None if p is None else p <= verdict.LEVEL,
        chance_p=p,
        chance_test=test,
        parameters=results[0].parameters,
    )


def _budgets(pairs: Pairs) -> str:
    """Means over the pairs; an epoch is one of the training split that was finetuned on."""
    if not pairs or not all("train" in result.data and result.data["train"].rows for pair in pairs for result in pair):
        return ""

    def duration(runs: Sequence[tuple[Result, Ledger]]) -> Duration:
        epochs = [ledger.examples / result.data["train"].rows for result, ledger in runs]
        return Duration(fmean(ledger.steps for _, ledger in runs), fmean(epochs))

    return compare_budgets(
        duration([(scratch, scratch.own) for scratch, _ in pairs]),
        duration([(spt, _before(spt)) for _, spt in pairs]),
        duration([(spt, spt.own) for _, spt in pairs]),
    )


AMOUNTS = ("steps", "examples", "flops", "seconds")  # of a cost


def _cost(ledgers: Sequence[Ledger]) -> Cost:
    means = {name: fmean(getattr(ledger, name) for ledger in ledgers) for name in AMOUNTS}
    return Cost(**means, peak_bytes=max(ledger.peak_bytes for ledger in ledgers) or None)


def _before(result: Result) -> Ledger:
    """What the run's pretraining cost. Its peak is known only where it is the larger one."""
    total, own = result.total, result.own
    amounts = {name: getattr(total, name) - getattr(own, name) for name in AMOUNTS}
    return Ledger(**amounts, peak_bytes=total.peak_bytes if total.peak_bytes > own.peak_bytes else 0)


def cost_ratios(scratch: Arm | None, spt: Arm | None) -> dict[str, float | None]:
    """SPT, or a control, : scratch by axis; None where scratch has no cost to compare with."""
    ratios: dict[str, float | None] = {}
    for axis in Cost.model_fields:
        below, above = (getattr(arm.total, axis) if arm else None for arm in (scratch, spt))
        ratios[axis] = above / below if below and above is not None else None
    return ratios
