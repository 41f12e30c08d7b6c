"""What the rows of a report say together: levels of one study held against each other, and several tasks at once."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple

from spt.report import format, stats, verdict
from spt.report.across_tasks import TaskAverage, pooled
from spt.report.arms import Comparison, Row, comparison_runs
from spt.report.verdict import Adjusted, Judgement, final_score
from spt.runs.plan import ARMS, ArmName, Factor, Record, factors_text
from spt.runs.result import Result


class LevelResult(Record):
    """One level of what a study varies, and the change since the level before, seed by seed, where both finished."""

    study: str
    label: str  # of the recipe
    factors: dict[str, Factor]
    metric: str
    n: int  # complete pairs
    scratch: float | None  # means over the complete pairs
    spt: float | None
    delta: float | None
    scratch_change: float | None  # None at the first level, and where the two share no seed
    spt_change: float | None


class Contrast(Record):
    """Two levels of a study, paired by seed, in one arm or in what the arms differ by."""

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
    """Which share of the budget gives SPT its best test score, and whether the seeds can tell."""

    study: str
    label: str  # of the recipe
    metric: str
    best: str  # level with the best mean
    score: float | None  # its mean over the seeds that are finished at every level
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
            contrasts += _holm([one for label, members in recipes for one in _initialisations(label, members)])
        if kind == "compute":
            best += _shares(recipes)
    once = {comparison_runs(one.pairing) or index: one.row for index, one in reversed(list(enumerate(rows)))}
    task_averages, notes = pooled(list(once.values())[::-1])
    return StudyFindings(tuple(levels), tuple(contrasts), tuple(best), tuple(task_averages), tuple(notes))


def _studies(rows: Sequence[Comparison]) -> dict[object, list[Comparison]]:
    """The rows with factors, study by study."""
    groups: dict[object, list[Comparison]] = {}
    for one in rows:
        if one.row.factors:
            groups.setdefault((one.pairing.root, one.row.source, one.row.kind), []).append(one)
    return groups


def _recipes(rows: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """One study's levels, recipe by recipe, with a label that tells the recipes apart."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for one in rows:
        groups.setdefault((one.row.task, one.row.model, one.row.recipe), []).append(one)
    short = [(task, model) for task, model, _ in groups]
    return [
        (f"{task} / {model}" + (f", {recipe}" if short.count((task, model)) > 1 else ""), members)
        for (task, model, recipe), members in groups.items()
    ]


def _levels(label: str, rows: Sequence[Comparison]) -> list[LevelResult]:
    if len(rows) < 2:
        return []
    made: list[LevelResult] = []
    for before, one in zip((None, *rows), rows, strict=False):
        row = one.row
        made.append(
            LevelResult(
                study=row.source,
                label=label,
                factors=row.factors,
                metric=row.metric,
                n=row.n,
                scratch=row.scratch,
                spt=row.spt,
                delta=row.delta,
                scratch_change=_change(before, one, "scratch"),
                spt_change=_change(before, one, "spt"),
            )
        )
    return made


def _change(before: Comparison | None, after: Comparison, arm: ArmName) -> float | None:
    if before is None or before.row.metric != after.row.metric:
        return None
    first, second = before.results(arm), after.results(arm)
    both = [final_score(second[seed]) - final_score(first[seed]) for seed in second if seed in first]
    return fmean(both) if both else None


def _initialisations(label: str, rows: Sequence[Comparison]) -> list[tuple[Contrast, stats.Paired | None]]:
    """Every two initialisations: in each arm, then what SPT gains with one and with the other."""
    made = []
    for first, second in combinations(rows, 2):
        names = (_level(first.row), _level(second.row))
        made.append(_contrast(label, "scratch", names, first, second, _by_seed(first, second, "scratch")))
        made.append(_contrast(label, "SPT", names, first, second, _by_seed(first, second, "spt")))
        made.append(_contrast(label, "SPT - scratch", names, first, second, _gains(first, second)))
    return made


def _level(row: Row) -> str:
    """`structured`, `share 0.2`: an initialisation speaks for itself."""
    return str(row.factors["initialisation"]) if list(row.factors) == ["initialisation"] else factors_text(row.factors)


Sides = list[tuple[tuple[Result, ...], tuple[Result, ...]]]  # of each seed: what is added, what is subtracted


def _by_seed(first: Comparison, second: Comparison, arm: ArmName) -> Sides:
    before = second.results(arm)
    return [((result,), (before[seed],)) for seed, result in first.results(arm).items() if seed in before]


def _gains(first: Comparison, second: Comparison) -> Sides:
    """(SPT - scratch at the first level) - (SPT - scratch at the second)."""
    arms = [one.results(arm) for one in (first, second) for arm in ARMS]
    a, b, c, d = arms
    return [((b[seed], c[seed]), (a[seed], d[seed])) for seed in a if all(seed in arm for arm in arms)]


def _contrast(
    label: str,
    what: Literal["scratch", "SPT", "SPT - scratch"],
    names: tuple[str, str],
    first: Comparison,
    second: Comparison,
    sides: Sides,
) -> tuple[Contrast, stats.Paired | None]:
    row = next((one.row for one in (first, second) if one.row.metric), first.row)
    differences = [sum(map(final_score, plus)) - sum(map(final_score, minus)) for plus, minus in sides]
    test = stats.paired(differences) if differences else None
    every = [result for plus, minus in sides for result in (*plus, *minus)]
    different = bool(verdict.different_splits([(a, b) for plus, minus in sides for a in plus for b in minus]))
    smoke = first.row.smoke or second.row.smoke or any(result.smoke for result in every)
    planned = len(set(first.pairing.seeds) & set(second.pairing.seeds))
    decision, sentence = verdict.judge(test, row.metric, row.higher_is_better, planned, different, smoke, names)
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
    ), test


def _holm(made: Sequence[tuple[Contrast, stats.Paired | None]]) -> list[Contrast]:
    """The contrasts of one family, with verdicts that allow for their number."""
    real = [one.decision not in ("different data", "smoke", "no pair") for one, _ in made]
    p = [one.p if fine else None for (one, _), fine in zip(made, real, strict=True)]
    tests = sum(value is not None for value in p)
    done = []
    for (one, test), holm, fine in zip(made, stats.holm(p), real, strict=True):
        if fine:
            decision, sentence = verdict.judge(
                test,
                one.metric,
                one.higher_is_better,
                one.planned,
                False,
                False,
                (one.first, one.second),
                Adjusted(holm, tests),
                "contrasts of this study",
            )
            one = one.model_copy(update={"holm": holm, "tests": tests, "decision": decision, "verdict": sentence})
        done.append(one)
    return done


def _shares(recipes: Sequence[tuple[str, list[Comparison]]]) -> list[BestShare]:
    """The best share of each recipe. Holm's family is every two shares of the study, not only those shown: the best
    one was picked by the same scores."""
    recipes = [(label, [one for one in rows if _has_spt(one)]) for label, rows in recipes]
    pairs: dict[tuple[int, int, int], tuple[Contrast, stats.Paired | None]] = {}
    for number, (label, rows) in enumerate(recipes):
        common = _common(rows)
        for (i, first), (j, second) in combinations(enumerate(rows), 2):
            names = (_level(first.row), _level(second.row))
            arms = first.results("spt"), second.results("spt")
            sides: Sides = [((arms[0][seed],), (arms[1][seed],)) for seed in arms[0] if seed in common]
            pairs[number, i, j] = _contrast(label, "SPT", names, first, second, sides)
    adjusted = dict(zip(pairs, _holm(list(pairs.values())), strict=True))
    made = []
    for number, (label, rows) in enumerate(recipes):
        if len(rows) > 1 and not any(one.row.smoke for one in rows):
            family = {(i, j): one for (recipe, i, j), one in adjusted.items() if recipe == number}
            made.append(_best(label, rows, family))
    return made


def _has_spt(one: Comparison) -> bool:
    return any(cell.arm == "spt" for cell in one.pairing.cells)


def _common(rows: Sequence[Comparison]) -> list[int]:
    """The seeds whose SPT run is finished in every row."""
    arms = [one.results("spt") for one in rows]
    return [seed for seed in arms[0] if all(seed in arm for arm in arms)] if arms else []


def _best(label: str, rows: Sequence[Comparison], family: dict[tuple[int, int], Contrast]) -> BestShare:
    arms = [one.results("spt") for one in rows]
    common = _common(rows)
    row = next((one.row for one in rows if one.row.metric), rows[0].row)
    made = BestShare(
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
        waiting = [_level(one.row) for one, arm in zip(rows, arms, strict=True) if not arm]
        why = f"no finished SPT run at {', '.join(waiting)}" if waiting else "no seed is finished at every share"
        return made.model_copy(update={"verdict": f"the best share is not known: {why}"})
    means = [fmean(final_score(arm[seed]) for seed in common) for arm in arms]
    sign = 1 if row.higher_is_better else -1
    top = max(range(len(rows)), key=lambda index: sign * means[index])
    against = tuple(one for key, one in family.items() if top in key)
    name, score = _level(rows[top].row), format.score_text(means[top], row.metric)
    lost = [one for key, one in family.items() if top in key and not _beats(one, key[0] == top)]
    seeds = "1 seed" if len(common) == 1 else f"{len(common)} seeds"
    scores_best = f"{name} has the best SPT score ({score})"
    if any(one.decision == "different data" for one in against):
        said = "the best share is not known: the runs did not see the same data"
    elif len(common) < stats.FEWEST:
        said = f"the best share cannot be decided with {seeds}: {scores_best}"
    elif lost:
        others = ", ".join(
            (one.second if one.first == name else one.first)
            + ("" if one.holm is None else f" (Holm p {format.p_text(one.holm)})")
            for one in lost
        )
        said = f"the best share is not decided: {scores_best}, but it is not shown to be better than {others}"
    else:
        said = f"{scores_best} and beats every other share (n={len(common)}, Holm)"
    update = {"best": name, "score": means[top], "decided": not lost, "verdict": said, "contrasts": against}
    return made.model_copy(update=update)


def _beats(contrast: Contrast, is_first: bool) -> bool:
    return contrast.decision == ("first" if is_first else "second")
