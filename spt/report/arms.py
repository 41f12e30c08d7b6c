"""The rows of a report: SPT minus scratch, seed by seed, with what both arms cost."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from spt.report import stats, verdict
from spt.report.per_example import compare_examples
from spt.report.verdict import Adjusted, Decision, Difference, Pairs, final_score
from spt.runs.index import ComparisonRuns, Failure, Outcomes, outcomes
from spt.runs.plan import ArmName, Ended, Factor, Kind, Record, Total, factors_text
from spt.runs.predictions import NotComparable
from spt.runs.result import Ledger, Result


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


class ItemTest(Record):
    """The two networks of one seed on the same test items. It generalises to other items, not to other seeds."""

    seed: int
    metric: str  # what an item is scored by
    higher_is_better: bool
    n: int  # items
    scratch: float
    spt: float
    difference: float  # SPT - scratch
    low: float | None  # percentile bootstrap over items
    high: float | None
    only_scratch: int | None  # items that scratch alone has right
    only_spt: int | None
    p: float | None  # McNemar's exact test, not adjusted


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
    above_chance: bool | None  # None where it cannot be tested
    chance_p: float | None  # one-sided, of a score no better than chance
    chance_test: Literal["t", "binomial"] | None  # over seeds, or over the test rows of one run
    parameters: dict[str, int]


class Row(Record):
    """One recipe at one level of what a study varies. Means, costs and statistics are over the n complete pairs."""

    label: str = ""  # unique within one report
    kind: Kind
    task: str
    model: str
    recipe: str
    factors: dict[str, Factor]
    total: Total | None
    source: str  # the study's folder, or the settings that were paired without one
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
    p: float | None  # of this row alone
    holm: float | None = None  # p adjusted for all comparisons of the report; None where the row does not count as one
    tests: int = 0  # comparisons of the report that holm counts
    n: int  # complete pairs
    planned: int
    favour_spt: int  # pairs in which SPT scored better
    detectable: float | None  # smallest detectable difference, as `spt.report.stats` defines it
    decision: Decision
    verdict: str
    ratios: dict[str, float | None]  # SPT : scratch, by field of `Cost`, pretraining included
    compute: str  # the ratios as a sentence
    scratch_arm: Arm | None
    spt_arm: Arm | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    seeds: tuple[Seed, ...]
    items: tuple[ItemTest, ...]
    failures: tuple[Failure, ...]

    @property
    def comparable(self) -> bool:
        """Whether its scores may be tested against others."""
        return self.decision not in ("different data", "smoke", "no pair")


class Comparison(NamedTuple):
    """A row, and the runs that it was made from."""

    runs: ComparisonRuns
    outcomes: Outcomes
    difference: Difference
    row: Row

    def results(self, arm: ArmName) -> dict[int, Result]:
        """The finished runs of an arm, by seed."""
        outcomes = self.outcomes.items()
        return {seed: result for (seed, name), result in outcomes if name == arm and isinstance(result, Result)}

    @property
    def pairs(self) -> Pairs:
        spt = self.results("spt")
        return [(result, spt[seed]) for seed, result in self.results("scratch").items() if seed in spt]


def compare_arms(runs: ComparisonRuns) -> Comparison:
    """One row's pairs, statistics, costs and verdict, before any adjustment for the other rows."""
    ended = outcomes(runs)
    results = [outcome for outcome in ended.values() if isinstance(outcome, Result)]
    both = [(ended[seed, "scratch"], ended[seed, "spt"]) for seed in runs.seeds]
    pairs = [(a, b) for a, b in both if isinstance(a, Result) and isinstance(b, Result)]
    test = stats.paired([final_score(spt) - final_score(scratch) for scratch, spt in pairs]) if pairs else None
    higher = results[0].higher_is_better if results else True
    metric = results[0].metric if results else ""
    smoke = runs.smoke or any(result.smoke for result in results)
    different_data = bool(verdict.different_splits(pairs))
    difference = Difference(test, metric, higher, len(runs.seeds), different_data, smoke)
    decision, sentence = verdict.verdict(difference)
    scratch, spt = _arm([pair[0] for pair in pairs]), _arm([pair[1] for pair in pairs])
    ratios = _ratios(scratch, spt)
    seeds = tuple(_seed(runs, seed, ended) for seed in runs.seeds)
    items, skipped = _items(runs, seeds, metric)
    row = Row(
        kind=runs.kind,
        task=runs.row.task,
        model=runs.row.model,
        recipe=runs.row.name,
        factors=runs.row.factors,
        total=runs.row.total,
        source=runs.source,
        command=runs.command,
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
        planned=len(runs.seeds),
        favour_spt=verdict.favour_spt(test, higher) if test else 0,
        detectable=test.detectable if test else None,
        decision=decision,
        verdict=sentence,
        ratios=ratios,
        compute=verdict.compute(ratios) if pairs else "",
        scratch_arm=scratch,
        spt_arm=spt,
        warnings=tuple(verdict.warnings(pairs)),
        notes=(*verdict.notes(pairs), *skipped),
        seeds=seeds,
        items=items,
        failures=tuple(outcome for outcome in ended.values() if isinstance(outcome, Failure)),
    )
    return Comparison(runs, ended, difference, row)


def adjust_for_multiplicity(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[str]]:
    """The rows as one family, with distinct labels, Holm's p and verdicts that allow for it; and warnings.

    Rows made from the same runs count as one comparison, whatever they are called. Smoke rows, and those whose arms
    saw different data, do not count.
    """
    labels = _labels([comparison.row for comparison in comparisons])
    members: dict[object, list[int]] = {}
    for index, comparison in enumerate(comparisons):
        members.setdefault(comparison_runs(comparison.runs) or index, []).append(index)
    warnings = [
        f"{' and '.join(labels[index] for index in same)} are the same runs; they count as one comparison"
        for same in members.values()
        if len(same) > 1
    ]
    rows = [comparisons[same[0]].row for same in members.values()]
    p = [row.p if row.comparable else None for row in rows]
    tests = sum(value is not None for value in p)
    adjusted = list(comparisons)
    for same, holm in zip(members.values(), stats.holm(p), strict=True):
        for index in same:
            adjusted[index] = _adjusted(comparisons[index], labels[index], Adjusted(holm, tests))
    return adjusted, warnings


def _adjusted(comparison: Comparison, label: str, adjusted: Adjusted) -> Comparison:
    row = comparison.row
    update: dict[str, object] = {"label": label}
    if row.comparable:
        decision, sentence = verdict.verdict(comparison.difference, adjusted)
        update |= {"holm": adjusted.p, "tests": adjusted.tests, "decision": decision, "verdict": sentence}
    return comparison._replace(row=row.model_copy(update=update))


def comparison_runs(runs: ComparisonRuns) -> frozenset[object]:
    """The identity of a row's runs, whatever the row is called."""
    return frozenset((runs.root.resolve(), cell.arm, cell.seed, cell.run) for cell in runs.cells)


def _labels(rows: Sequence[Row]) -> list[str]:
    """Rows named by task, model and level; where that is not enough, by recipe, source and number."""
    labels = [f"{row.task} / {row.model}" + (f", {factors_text(row.factors)}" if row.factors else "") for row in rows]
    details = [
        [row.recipe for row in rows],
        [row.source for row in rows],
        [f"#{number}" for number in range(1, len(rows) + 1)],
    ]
    for detail in details:
        taken = Counter(labels)
        labels = [f"{label}, {more}" if taken[label] > 1 else label for label, more in zip(labels, detail, strict=True)]
    return labels


def _seed(runs: ComparisonRuns, seed: int, ended: Outcomes) -> Seed:
    first, second = ended[seed, "scratch"], ended[seed, "spt"]
    scratch = final_score(first) if isinstance(first, Result) else None
    spt = final_score(second) if isinstance(second, Result) else None
    cells = {cell.arm: cell for cell in runs.cells if cell.seed == seed}
    return Seed(
        seed=seed,
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
    tests, skipped = [], []
    for seed in seeds:
        if seed.delta is None:
            continue
        compared = compare_examples(runs.root / seed.scratch_run, runs.root / seed.spt_run, seed.seed, metric)
        if isinstance(compared, NotComparable):
            skipped.append((seed.seed, compared.reason))
        else:
            values = {name: getattr(compared, name) for name in ItemTest.model_fields if name != "seed"}
            tests.append(ItemTest(seed=seed.seed, **values))
    if not skipped:
        return tuple(tests), []
    first, reason = skipped[0]
    if len(skipped) == 1:
        return tuple(tests), [f"test items not compared at seed {first}: {reason}"]
    which = ", ".join(str(seed) for seed, _ in skipped)
    return tuple(tests), [f"test items not compared at seeds {which} (seed {first}: {reason})"]


def _arm(results: Sequence[Result]) -> Arm | None:
    if not results:
        return None
    chance = verdict.against_chance(results)
    return Arm(
        score=fmean(final_score(result) for result in results),
        total=_cost([result.total for result in results]),
        pretraining=_cost([_before(result) for result in results]),
        finetuning=_cost([result.own for result in results]),
        stops=dict(sorted(Counter(result.stop for result in results).items())),
        best_at_end=sum(map(verdict.best_at_end, results)),
        above_chance=chance.above,
        chance_p=chance.p,
        chance_test=chance.test,
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
