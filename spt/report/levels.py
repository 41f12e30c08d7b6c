"""What several rows of a report say together: the levels of one study compared, and averages across tasks."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple

from spt.report import format, stats, verdict
from spt.report.across_tasks import TaskAverage, pooled
from spt.report.arms import Comparison, Row, comparison_runs
from spt.report.verdict import Adjusted, Difference, Judgement, final_score
from spt.runs.plan import ARMS, ArmName, Factor, Record, factors_text
from spt.runs.result import Result


class LevelResult(Record):
    """One level of what a study varies, and the change from the previous level over the seeds that both finished."""

    study: str
    label: str  # of the recipe
    factors: dict[str, Factor]
    metric: str
    n: int  # complete pairs
    scratch: float | None  # means over the complete pairs
    spt: float | None
    delta: float | None
    scratch_change: float | None  # None at the first level, and without a common seed
    spt_change: float | None


class Contrast(Record):
    """Two levels of a study, paired by seed, in one arm or in the difference of the arms."""

    study: str
    label: str  # of the recipe
    what: Literal["scratch", "SPT", "SPT - scratch"]
    first: str
    second: str
    metric: str
    higher_is_better: bool
    n: int
    planned: int
    difference: float | None  # first - second, in the metric's own units
    low: float | None  # paired t interval
    high: float | None
    p: float | None
    holm: float | None = None  # adjusted for all of the study's contrasts of this kind
    tests: int = 0
    decision: Judgement
    verdict: str


class BestShare(Record):
    """Which share of the budget gives SPT its best test score, and whether the seeds suffice to decide it."""

    study: str
    label: str  # of the recipe
    metric: str
    best: str  # level with the best mean
    score: float | None  # its mean over the seeds finished at every level
    n: int
    decided: bool
    verdict: str
    contrasts: tuple[Contrast, ...]  # the best level against each other one


class StudyFindings(NamedTuple):
    levels: tuple[LevelResult, ...]
    contrasts: tuple[Contrast, ...]
    best: tuple[BestShare, ...]
    pooled: tuple[TaskAverage, ...]
    notes: tuple[str, ...]


def study_findings(rows: Sequence[Comparison]) -> StudyFindings:
    levels: list[LevelResult] = []
    contrasts: list[Contrast] = []
    best: list[BestShare] = []
    for group in _studies(rows).values():
        kind = group[0].row.kind
        recipes = _recipes(group)
        if len(recipes) < len(group):
            levels += [level for label, members in recipes for level in _levels(label, members)]
        if kind == "init":
            contrasts += _holm([pair for label, members in recipes for pair in _initialisations(label, members)])
        if kind == "compute":
            best += _shares(recipes)
    distinct = {
        comparison_runs(comparison.runs) or index: comparison.row
        for index, comparison in reversed(list(enumerate(rows)))
    }
    task_averages, notes = pooled(list(distinct.values())[::-1])
    return StudyFindings(tuple(levels), tuple(contrasts), tuple(best), tuple(task_averages), tuple(notes))


def _studies(rows: Sequence[Comparison]) -> dict[object, list[Comparison]]:
    """The rows with factors, study by study."""
    groups: dict[object, list[Comparison]] = {}
    for comparison in rows:
        if comparison.row.factors:
            groups.setdefault((comparison.runs.root, comparison.row.source, comparison.row.kind), []).append(comparison)
    return groups


def _recipes(rows: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """One study's levels, recipe by recipe, with a distinct label for each recipe."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in rows:
        groups.setdefault((comparison.row.task, comparison.row.model, comparison.row.recipe), []).append(comparison)
    short = [(task, model) for task, model, _ in groups]
    return [
        (f"{task} / {model}" + (f", {recipe}" if short.count((task, model)) > 1 else ""), members)
        for (task, model, recipe), members in groups.items()
    ]


def _levels(label: str, rows: Sequence[Comparison]) -> list[LevelResult]:
    if len(rows) < 2:
        return []
    levels: list[LevelResult] = []
    for before, comparison in zip((None, *rows), rows, strict=False):
        row = comparison.row
        levels.append(
            LevelResult(
                study=row.source,
                label=label,
                factors=row.factors,
                metric=row.metric,
                n=row.n,
                scratch=row.scratch,
                spt=row.spt,
                delta=row.delta,
                scratch_change=_change(before, comparison, "scratch"),
                spt_change=_change(before, comparison, "spt"),
            )
        )
    return levels


def _change(before: Comparison | None, after: Comparison, arm: ArmName) -> float | None:
    if before is None or before.row.metric != after.row.metric:
        return None
    first, second = before.results(arm), after.results(arm)
    both = [final_score(second[seed]) - final_score(first[seed]) for seed in second if seed in first]
    return fmean(both) if both else None


def _initialisations(label: str, rows: Sequence[Comparison]) -> list[tuple[Contrast, Difference]]:
    """Every two initialisations, in each arm and in the gain from SPT."""
    contrasts = []
    for first, second in combinations(rows, 2):
        contrasts.append(_contrast(label, "scratch", first, second, _by_seed(first, second, "scratch")))
        contrasts.append(_contrast(label, "SPT", first, second, _by_seed(first, second, "spt")))
        contrasts.append(_contrast(label, "SPT - scratch", first, second, _gains(first, second)))
    return contrasts


def _level(row: Row) -> str:
    """`structured`, `share 0.2`: an initialisation needs no name."""
    return str(row.factors["initialisation"]) if list(row.factors) == ["initialisation"] else factors_text(row.factors)


SignedResults = list[tuple[tuple[Result, ...], tuple[Result, ...]]]  # of each seed: added, subtracted


def _by_seed(first: Comparison, second: Comparison, arm: ArmName) -> SignedResults:
    before = second.results(arm)
    return [((result,), (before[seed],)) for seed, result in first.results(arm).items() if seed in before]


def _gains(first: Comparison, second: Comparison) -> SignedResults:
    """(SPT - scratch at the first level) - (SPT - scratch at the second)."""
    arms = [comparison.results(arm) for comparison in (first, second) for arm in ARMS]
    a, b, c, d = arms
    return [((b[seed], c[seed]), (a[seed], d[seed])) for seed in a if all(seed in arm for arm in arms)]


def _contrast(
    label: str,
    what: Literal["scratch", "SPT", "SPT - scratch"],
    first: Comparison,
    second: Comparison,
    terms: SignedResults,
) -> tuple[Contrast, Difference]:
    row = next((comparison.row for comparison in (first, second) if comparison.row.metric), first.row)
    names = (_level(first.row), _level(second.row))
    differences = [sum(map(final_score, plus)) - sum(map(final_score, minus)) for plus, minus in terms]
    test = stats.paired(differences) if differences else None
    results = [result for plus, minus in terms for result in (*plus, *minus)]
    different_data = bool(verdict.different_splits([(a, b) for plus, minus in terms for a in plus for b in minus]))
    smoke = first.row.smoke or second.row.smoke or any(result.smoke for result in results)
    planned = len(set(first.runs.seeds) & set(second.runs.seeds))
    difference = Difference(test, row.metric, row.higher_is_better, planned, different_data, smoke, names)
    decision, sentence = verdict.judge(difference)
    return Contrast(
        study=row.source,
        label=label,
        what=what,
        first=names[0],
        second=names[1],
        metric=row.metric,
        higher_is_better=row.higher_is_better,
        n=len(differences),
        planned=planned,
        difference=test.mean if test else None,
        low=test.low if test else None,
        high=test.high if test else None,
        p=test.p if test else None,
        decision=decision,
        verdict=sentence,
    ), difference


def _holm(contrasts: Sequence[tuple[Contrast, Difference]]) -> list[Contrast]:
    """The contrasts of one family, with verdicts that allow for their number."""
    valid = [contrast.decision not in ("different data", "smoke", "no pair") for contrast, _ in contrasts]
    p = [contrast.p if usable else None for (contrast, _), usable in zip(contrasts, valid, strict=True)]
    tests = sum(value is not None for value in p)
    adjusted = []
    for (contrast, difference), holm, usable in zip(contrasts, stats.holm(p), valid, strict=True):
        update: dict[str, object] = {}
        if usable:
            decision, sentence = verdict.judge(difference, Adjusted(holm, tests, "contrasts of this study"))
            update = {"holm": holm, "tests": tests, "decision": decision, "verdict": sentence}
        adjusted.append(contrast.model_copy(update=update))
    return adjusted


def _shares(recipes: Sequence[tuple[str, list[Comparison]]]) -> list[BestShare]:
    """The best share of each recipe. Holm's family is every pair of shares of the study, not only those shown,
    since the best one was picked by the same scores."""
    recipes = [(label, [comparison for comparison in rows if _has_spt(comparison)]) for label, rows in recipes]
    pairs: dict[tuple[int, int, int], tuple[Contrast, Difference]] = {}
    for number, (label, rows) in enumerate(recipes):
        common = _common(rows)
        for (i, first), (j, second) in combinations(enumerate(rows), 2):
            arms = first.results("spt"), second.results("spt")
            terms: SignedResults = [((arms[0][seed],), (arms[1][seed],)) for seed in arms[0] if seed in common]
            pairs[number, i, j] = _contrast(label, "SPT", first, second, terms)
    adjusted = dict(zip(pairs, _holm(list(pairs.values())), strict=True))
    best = []
    for number, (label, rows) in enumerate(recipes):
        if len(rows) > 1 and not any(comparison.row.smoke for comparison in rows):
            family = {(i, j): comparison for (recipe, i, j), comparison in adjusted.items() if recipe == number}
            best.append(_best(label, rows, family))
    return best


def _has_spt(comparison: Comparison) -> bool:
    return any(cell.arm == "spt" for cell in comparison.runs.cells)


def _common(rows: Sequence[Comparison]) -> list[int]:
    """The seeds whose SPT run finished in every row."""
    arms = [comparison.results("spt") for comparison in rows]
    return [seed for seed in arms[0] if all(seed in arm for arm in arms)] if arms else []


def _best(label: str, rows: Sequence[Comparison], family: dict[tuple[int, int], Contrast]) -> BestShare:
    arms = [comparison.results("spt") for comparison in rows]
    common = _common(rows)
    row = next((comparison.row for comparison in rows if comparison.row.metric), rows[0].row)
    best = BestShare(
        study=row.source,
        label=label,
        metric=row.metric,
        best="",
        score=None,
        n=len(common),
        decided=False,
        verdict="",
        contrasts=(),
    )
    if not common:
        waiting = [_level(comparison.row) for comparison, arm in zip(rows, arms, strict=True) if not arm]
        why = f"no finished SPT run at {', '.join(waiting)}" if waiting else "no seed is finished at every share"
        return best.model_copy(update={"verdict": f"the best share is not known: {why}"})
    means = [fmean(final_score(arm[seed]) for seed in common) for arm in arms]
    sign = 1 if row.higher_is_better else -1
    top = max(range(len(rows)), key=lambda index: sign * means[index])
    against = tuple(comparison for key, comparison in family.items() if top in key)
    name, score = _level(rows[top].row), format.score_text(means[top], row.metric)
    lost = [comparison for key, comparison in family.items() if top in key and not _beats(comparison, key[0] == top)]
    seeds = "1 seed" if len(common) == 1 else f"{len(common)} seeds"
    scores_best = f"{name} has the best SPT score ({score})"
    if any(comparison.decision == "different data" for comparison in against):
        sentence = "the best share is not known: the runs did not see the same data"
    elif len(common) < stats.FEWEST:
        sentence = f"the best share cannot be decided with {seeds}: {scores_best}"
    elif lost:
        others = ", ".join(
            (comparison.second if comparison.first == name else comparison.first)
            + ("" if comparison.holm is None else f" (Holm p {format.p_text(comparison.holm)})")
            for comparison in lost
        )
        sentence = f"the best share is not decided: {scores_best}, but it is not shown to be better than {others}"
    else:
        sentence = f"{scores_best} and beats every other share (n={len(common)}, Holm)"
    update = {"best": name, "score": means[top], "decided": not lost, "verdict": sentence, "contrasts": against}
    return best.model_copy(update=update)


def _beats(contrast: Contrast, is_first: bool) -> bool:
    return contrast.decision == ("first" if is_first else "second")
