"""What several rows of a report say together: the levels of one study compared, and averages across tasks."""

from collections.abc import Collection, Sequence
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from spt.report.across_tasks import TaskAverage, pooled
from spt.report.arms import Comparison, Row, comparison_runs
from spt.report.format import p_text, score_text
from spt.report.plain_average import PlainAverage, plain_averages
from spt.report.stats import FEWEST
from spt.report.verdict import Difference, PairedContrast, adjusted_fields, final_score
from spt.runs.plan import ARMS, ArmName, Factor, Place, Record, factors_text
from spt.runs.result import Result

What = Literal["scratch", "SPT", "SPT - scratch"]


class LevelResult(Record):
    """One level of what a study varies, and the change from the previous level over the seeds that both finished."""

    study: str
    label: str  # of the recipe
    factors: dict[str, Factor]
    metric: str
    n: int  # complete pairs, or runs of the only arm
    scratch: float | None  # means over these
    spt: float | None
    delta: float | None
    scratch_change: float | None  # None at the first level, and without a common seed
    spt_change: float | None


class Contrast(PairedContrast):
    """Two levels of a study, in one arm or in the difference of the arms; Holm over all of the study's of this kind."""

    study: str
    label: str  # of the recipe
    what: What


class BestShare(Record):
    """Which share of the budget gives SPT its best test score, and whether the seeds suffice to decide it."""

    study: str
    label: str  # of the recipe
    metric: str
    best: str = ""  # level with the best mean
    score: float | None = None  # its mean over the seeds finished at every level
    n: int
    decided: bool = False
    verdict: str = ""
    contrasts: tuple[Contrast, ...] = ()  # the best level against each other one


class StudyFindings(NamedTuple):
    levels: tuple[LevelResult, ...]
    contrasts: tuple[Contrast, ...]
    best: tuple[BestShare, ...]
    pooled: tuple[TaskAverage, ...]
    averages: tuple[PlainAverage, ...]
    notes: tuple[str, ...]


def study_findings(rows: Sequence[Comparison]) -> StudyFindings:
    levels: list[LevelResult] = []
    contrasts: list[Contrast] = []
    best: list[BestShare] = []
    for group in by_study(rows).values():
        kind = group[0].row.kind
        recipes = by_recipe(group)
        if len(recipes) < len(group):
            levels += [level for label, members in recipes for level in _levels(label, members)]
        if kind == "init":
            contrasts += level_contrasts(
                [
                    LevelPair(label, what, *levels)
                    for label, members in recipes
                    for levels in combinations(members, 2)
                    for what in get_args(What)
                ]
            )
        if kind == "compute":
            best += _shares(recipes)
    distinct = {
        comparison_runs(comparison.runs) or index: comparison for index, comparison in reversed(list(enumerate(rows)))
    }
    different = list(distinct.values())[::-1]
    task_averages, notes = pooled(different)
    averages = plain_averages(different)
    return StudyFindings(tuple(levels), tuple(contrasts), tuple(best), tuple(task_averages), averages, tuple(notes))


def by_study(rows: Sequence[Comparison]) -> dict[object, list[Comparison]]:
    """The rows with factors, study by study."""
    groups: dict[object, list[Comparison]] = {}
    for comparison in rows:
        if comparison.row.factors:
            groups.setdefault((comparison.runs.root, comparison.row.source, comparison.row.kind), []).append(comparison)
    return groups


def by_recipe(rows: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
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
        shared = {name: getattr(row, name) for name in ("factors", "metric", "scratch", "spt", "delta")}
        shared["n"] = row.averaged
        changes = {f"{arm}_change": _change(before, comparison, arm) for arm in ARMS}
        levels.append(LevelResult(study=row.source, label=label, **shared, **changes))
    return levels


def _change(before: Comparison | None, after: Comparison, arm: ArmName) -> float | None:
    if before is None or before.row.metric != after.row.metric:
        return None
    first, second = before.results(arm), after.results(arm)
    both = [final_score(second[seed]) - final_score(first[seed]) for seed in second if seed in first]
    return fmean(both) if both else None


def _level(row: Row) -> str:
    """`structured`, `share 0.2`: an initialisation needs no name."""
    return str(row.factors["initialisation"]) if list(row.factors) == ["initialisation"] else factors_text(row.factors)


class LevelPair(NamedTuple):
    """Two levels of a study to compare, of one recipe."""

    label: str
    what: What
    first: Comparison
    second: Comparison
    places: Collection[Place] | None = None  # None: all that both have finished

    def difference(self) -> Difference:
        first, second = (_signed(comparison, self.what) for comparison in (self.first, self.second))
        places = [place for place in first if place in second and (self.places is None or place in self.places)]
        row = next((each.row for each in (self.first, self.second) if each.row.metric), self.first.row)
        return Difference.of(
            [(first[place][0] + second[place][1], first[place][1] + second[place][0]) for place in places],
            metric=row.metric,
            higher_is_better=row.higher_is_better,
            planned=len(set(self.first.runs.places) & set(self.second.runs.places)),
            smoke=self.first.row.smoke or self.second.row.smoke,
            names=(_level(self.first.row), _level(self.second.row)),
            decisions=("first", "second"),
        )


def _signed(comparison: Comparison, what: What) -> dict[Place, tuple[tuple[Result, ...], tuple[Result, ...]]]:
    """The results whose scores add up, with these signs, to one arm's score or to the gain from SPT, by place."""
    scratch, spt = (comparison.results(arm) for arm in ARMS)
    if what == "SPT - scratch":
        return {place: ((spt[place],), (result,)) for place, result in scratch.items() if place in spt}
    return {place: ((result,), ()) for place, result in (spt if what == "SPT" else scratch).items()}


def level_contrasts(pairs: Sequence[LevelPair]) -> list[Contrast]:
    """The contrasts of one family, with verdicts that allow for their number."""
    differences = [pair.difference() for pair in pairs]
    updates = adjusted_fields(differences, "contrasts of this study")
    return [
        Contrast(
            study=pair.first.row.source,
            label=pair.label,
            what=pair.what,
            first=difference.names[0],
            second=difference.names[1],
            difference=difference.test.mean if difference.test else None,
            **difference.fields() | update,
        )
        for pair, difference, update in zip(pairs, differences, updates, strict=True)
    ]


def _shares(recipes: Sequence[tuple[str, list[Comparison]]]) -> list[BestShare]:
    """The best share of each recipe. Holm's family is every pair of shares of the study, not only those shown,
    since the best one was picked by the same scores."""
    recipes = [(label, [comparison for comparison in rows if _has_spt(comparison)]) for label, rows in recipes]
    pairs = [
        LevelPair(label, "SPT", *levels, _common(rows)) for label, rows in recipes for levels in combinations(rows, 2)
    ]
    contrasts = iter(level_contrasts(pairs))
    best = []
    for label, rows in recipes:
        family = dict(zip(combinations(range(len(rows)), 2), contrasts, strict=False))
        if len(rows) > 1 and not any(comparison.row.smoke for comparison in rows):
            best.append(_best(label, rows, family))
    return best


def _has_spt(comparison: Comparison) -> bool:
    return any(cell.arm == "spt" for cell in comparison.runs.cells)


def _common(rows: Sequence[Comparison]) -> list[Place]:
    """The seeds whose SPT run finished in every row."""
    arms = [comparison.results("spt") for comparison in rows]
    return [seed for seed in arms[0] if all(seed in arm for arm in arms)] if arms else []


def _best(label: str, rows: Sequence[Comparison], family: dict[tuple[int, int], Contrast]) -> BestShare:
    arms = [comparison.results("spt") for comparison in rows]
    common = _common(rows)
    row = next((comparison.row for comparison in rows if comparison.row.metric), rows[0].row)
    best = BestShare(study=row.source, label=label, metric=row.metric, n=len(common))
    if not common:
        waiting = [_level(comparison.row) for comparison, arm in zip(rows, arms, strict=True) if not arm]
        why = f"no finished SPT run at {', '.join(waiting)}" if waiting else "no seed is finished at every share"
        return best.model_copy(update={"verdict": f"the best share is not known: {why}"})
    means = [fmean(final_score(arm[seed]) for seed in common) for arm in arms]
    sign = 1 if row.higher_is_better else -1
    top = max(range(len(rows)), key=lambda index: sign * means[index])
    against = {pair: contrast for pair, contrast in family.items() if top in pair}
    lost = [
        (contrast.second if pair[0] == top else contrast.first)
        + ("" if contrast.holm is None else f" (Holm p {p_text(contrast.holm)})")
        for pair, contrast in against.items()
        if contrast.decision != ("first" if pair[0] == top else "second")
    ]
    name = _level(rows[top].row)
    scores_best = f"{name} has the best SPT score ({score_text(means[top], row.metric)})"
    if any(contrast.decision == "different data" for contrast in against.values()):
        sentence = "the best share is not known: the runs did not see the same data"
    elif len(common) < FEWEST:
        seeds = "1 seed" if len(common) == 1 else f"{len(common)} seeds"
        sentence = f"the best share cannot be decided with {seeds}: {scores_best}"
    elif lost:
        others = ", ".join(lost)
        sentence = f"the best share is not decided: {scores_best}, but it is not shown to be better than {others}"
    else:
        sentence = f"{scores_best} and beats every other share (n={len(common)}, Holm)"
    contrasts = tuple(against.values())
    update = {"best": name, "score": means[top], "decided": not lost, "verdict": sentence, "contrasts": contrasts}
    return best.model_copy(update=update)
