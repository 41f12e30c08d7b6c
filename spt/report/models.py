"""Which model is better, in each arm, and whether self-pretraining changes that: models paired by seed.

Two models are compared where they share a task, a metric and a level of what a study varies; variants of recipes are
compared with each other where they answer the same test rows. Within an arm the contrast
is score - score; in the difference of the arms it is gain - gain, the interaction of model and self-pretraining.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from spt.report.across_tasks import same_test_rows, task_identity
from spt.report.arms import Comparison, Row, comparison_runs
from spt.report.format import abbreviate
from spt.report.per_example import ExampleScores, RowInterval, example_scores, row_interval
from spt.report.ranking import (
    CONTRASTED,
    COSTS,
    Arm,
    ModelComparison,
    ModelContrast,
    ModelScores,
    interaction_fields,
    model_verdict,
    rank,
)
from spt.report.stats import widened
from spt.report.verdict import Difference, adjusted_fields, final_score, paired, seeds_text
from spt.runs.plan import ARMS, Factor, Place, arm_text, factors_text
from spt.runs.predictions import NotComparable
from spt.runs.result import Result

ReadScores = Callable[[Path, str], ExampleScores]  # of a run, in a metric

ModelGroup = dict[str, Comparison]  # rows that differ in their model alone, by the model's name


def compare_models(groups: Sequence[ModelGroup]) -> tuple[ModelComparison, ...]:
    """Every two models that share a task, with Holm's adjustment over the pairs of the whole report."""
    pairs = [model_pairs(group) for group in groups]
    every = [pair for group in pairs for pair in group]
    families = (
        [pair for pair in every if pair.arm != "difference"],
        [pair for pair in every if pair.arm == "difference"],
    )
    names = ("contrasts between models", "interactions of this report")
    read = cache(_scores_of_run)
    contrasts = {
        id(pair): contrast
        for family, name in zip(families, names, strict=True)
        for pair, contrast in zip(family, _contrasts(family, name, read), strict=True)
    }
    labels = _labels(groups)
    return tuple(
        _comparison(group, label, tuple(contrasts[id(pair)] for pair in members))
        for group, label, members in zip(groups, labels, pairs, strict=True)
    )


def model_groups(rows: Sequence[Comparison]) -> tuple[list[ModelGroup], list[str]]:
    """The rows of each study that share task and level; then what is left, whatever study it is from."""
    notes: list[str] = []
    of_studies = _by_level(rows, notes, within_study=True)
    left = [row for members in of_studies if len(_model_keys(members)) < 2 for row in members]
    across = _by_level(
        list({comparison_runs(row.runs) or id(row): row for row in left}.values()), notes, within_study=False
    )
    groups = [_named(members, notes) for members in (*of_studies, *across) if len(_model_keys(members)) > 1]
    single = not groups and all(row.row.kind == "compare" and not row.row.smoke for row in rows)
    if single and len(models := {row.row.model for row in rows}) == 1:
        notes.append(f"one model, {models.pop()}: a second recipe beside it would show which model is better")
    return [group for group in groups if len(group) > 1], list(dict.fromkeys(notes))


def _by_level(rows: Sequence[Comparison], notes: list[str], within_study: bool) -> list[list[Comparison]]:
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    targets = {_recipe_of_study(each): found for each in rows if (found := task_identity(each)[1])}
    for comparison in rows:
        row = comparison.row
        study = (comparison.runs.root, row.source) if within_study else ()
        shared = factors_text(row.factors)
        if _variant(row):  # of the recipes of a study, which may share a task; without any results each has its own
            shared = task_identity(comparison)[1] or targets.get(_recipe_of_study(comparison), row.recipe)
        groups.setdefault((row.kind, row.task, shared, row.smoke, *study), []).append(comparison)
    return [group for members in groups.values() for group in _by_test_rows(members, notes)]


def _by_test_rows(members: Sequence[Comparison], notes: list[str]) -> list[list[Comparison]]:
    """One task may read several data sets, as `custom` and `images` do: the models of each are a group."""
    groups: list[list[Comparison]] = []
    for each in (each for each in members if task_identity(each)[1]):
        fitting = (group for group in groups if all(same_test_rows(each, other) for other in group))
        if (group := next(fitting, None)) is None:
            groups.append(group := [])
        group.append(each)
    if len(groups) < 2:  # with those that have no results yet
        return [list(members)]
    if len(_model_keys(members)) > 1:
        recipes = "; ".join(abbreviate(list(dict.fromkeys(each.row.recipe for each in group)), 4) for group in groups)
        notes.append(
            f"rows of {members[0].row.task} are tested on several sets of rows, and models are compared within each: "
            f"{recipes}"
        )
    return groups


def _variant(row: Row) -> str:
    """Which variant of its recipe a row is; empty where a study varies something else."""
    return str(row.factors.get("variant", "")) if row.kind == "variants" else ""


def _recipe_of_study(comparison: Comparison) -> tuple[object, ...]:
    return comparison.runs.root, comparison.row.source, comparison.row.recipe


def shared_factors(row: Row) -> dict[str, Factor]:
    """The levels that all rows of a comparison have."""
    return {} if _variant(row) else row.factors


def _model_keys(rows: Sequence[Comparison]) -> set[tuple[str, str]]:
    return {(_variant(comparison.row) or comparison.row.model, comparison.row.recipe) for comparison in rows}


def _named(rows: Sequence[Comparison], notes: list[str]) -> ModelGroup:
    """Named by model or variant, or by recipe where a model is there twice. What cannot be compared is left out, with
    a note."""
    keys = [(_variant(comparison.row) or comparison.row.model, comparison.row.recipe) for comparison in rows]
    models = [model for model, _ in sorted(set(keys))]
    group: ModelGroup = {}
    metric, direction = next(((r.row.metric, r.row.higher_is_better) for r in rows if r.row.metric), ("", True))
    for key, comparison in zip(keys, rows, strict=True):
        row = comparison.row
        name = key[0] if models.count(key[0]) == 1 else f"{key[0]} ({row.recipe})"
        if keys.count(key) > 1:
            notes.append(f"{row.label} is not compared with other models: several rows of {row.task} are {name}")
        elif row.metric not in ("", metric):
            notes.append(
                f"{row.label} is not compared with other models: it is scored in {row.metric}, the others in {metric}"
            )
        elif row.metric and row.higher_is_better != direction:
            notes.append(f"{row.label} is not compared with other models: for it {metric} has the opposite direction")
        else:
            group[name] = comparison
    return group


def _labels(groups: Sequence[ModelGroup]) -> list[str]:
    """Task and level; where that is not enough, the study, the recipes, and a number."""
    rows = [next(iter(group.values())).row for group in groups]
    recipes = [list(dict.fromkeys(each.row.recipe for each in group.values())) for group in groups]
    levels = [
        f"variants of {' and '.join(each) if len(each) < 3 else f'{len(each)} recipes'}"
        if _variant(row)
        else factors_text(row.factors)
        for row, each in zip(rows, recipes, strict=True)
    ]
    labels = [", ".join(filter(None, (row.task, level))) for row, level in zip(rows, levels, strict=True)]
    numbers = [f"#{number}" for number in range(1, len(rows) + 1)]
    for detail in ([row.source for row in rows], [abbreviate(each, 2) for each in recipes], numbers):
        taken = Counter(labels)
        told = Counter(label for label, _ in {*zip(labels, detail, strict=True)})  # does it tell any two apart?
        labels = [
            f"{label}, {more}" if taken[label] > 1 and told[label] > 1 else label
            for label, more in zip(labels, detail, strict=True)
        ]
    return labels


class ModelPair(NamedTuple):
    """Two models to compare in one arm."""

    arm: Arm
    names: tuple[str, str]
    first: Comparison
    second: Comparison

    def terms(self) -> dict[Place, tuple[tuple[Result, ...], tuple[Result, ...]]]:
        """Of each seed and split that both have finished, the results whose scores are added, and subtracted."""
        if self.arm == "difference":
            gains = [(each.results("spt"), each.results("scratch")) for each in (self.first, self.second)]
            (a_spt, a_scratch), (b_spt, b_scratch) = gains
            seeds = [seed for seed in a_spt if all(seed in runs for runs in (a_scratch, b_spt, b_scratch))]
            return {seed: ((a_spt[seed], b_scratch[seed]), (a_scratch[seed], b_spt[seed])) for seed in seeds}
        a, b = self.first.results(self.arm), self.second.results(self.arm)
        return {seed: ((a[seed],), (b[seed],)) for seed in a if seed in b}

    def difference(self) -> Difference:
        row = next((each.row for each in (self.first, self.second) if each.row.metric), self.first.row)
        return Difference.of(
            list(self.terms().values()),
            metric=row.metric,
            higher_is_better=row.higher_is_better,
            planned=len({*self.first.runs.places} & {*self.second.runs.places}),
            smoke=self.first.row.smoke or self.second.row.smoke,
            names=tuple(f"gain of {name}" for name in self.names) if self.arm == "difference" else self.names,
            decisions=("first", "second"),
        )

    def runs(self) -> frozenset[object]:
        """The identity of what is compared, whatever its rows are called and whichever comes first."""
        terms = self.terms().values()
        sides = [frozenset(run.key for both in terms for run in both[side]) for side in (0, 1)]
        return frozenset(sides) if any(sides) else frozenset()

    def rows(self, read: ReadScores, metric: str) -> RowInterval | None:
        """Over test rows, if each of them has a score of its own in this metric and all runs are tested on the same."""
        terms = self.terms().values()
        if metric not in ("accuracy", "mse", "mae") or not terms or self.first.runs.splits:
            return None
        roots = {
            result.key: each.runs.root
            for each in (self.first, self.second)
            for arm in ARMS
            for result in each.results(arm).values()
        }

        def scores(side: Sequence[Result]) -> list[ExampleScores]:
            return [read(roots[result.key] / f"finetune-{result.key}", metric) for result in side]

        try:
            return row_interval([(scores(added), scores(subtracted)) for added, subtracted in terms])
        except NotComparable:
            return None


def _scores_of_run(run: Path, metric: str) -> ExampleScores:
    scores = example_scores(run, metric)
    if scores.metric != metric:
        raise NotComparable(f"{run.name}: its rows have no {metric}")
    return scores


def model_pairs(group: ModelGroup) -> list[ModelPair]:
    """Every two models of a group, in every arm."""
    couples = combinations(group.items(), 2)
    return [ModelPair(arm, (a, b), first, second) for (a, first), (b, second) in couples for arm in CONTRASTED]


def _contrasts(pairs: Sequence[ModelPair], family: str, read: ReadScores) -> list[ModelContrast]:
    """One family of contrasts. Those of the same runs, as of scratch at every share of a budget, count once."""
    differences = [pair.difference() for pair in pairs]
    identities = [pair.runs() or index for index, pair in enumerate(pairs)]
    updates = adjusted_fields(differences, family, [identities.index(identity) for identity in identities])
    return [
        _contrast(pair, difference, update, pair.rows(read, difference.metric) if difference.comparable else None)
        for pair, difference, update in zip(pairs, differences, updates, strict=True)
    ]


def _contrast(
    pair: ModelPair, difference: Difference, adjusted: dict[str, Any], rows: RowInterval | None
) -> ModelContrast:
    row, test = pair.first.row, difference.test
    contrast = ModelContrast.model_validate(
        {
            "task": row.task,
            "factors": shared_factors(row),
            "arm": pair.arm,
            "first": pair.names[0],
            "second": pair.names[1],
            "difference": test.mean if test else None,
            "detectable": test.detectable if test else None,
            "rows": rows,
            "ratios": _ratios(*(_scores(*each) for each in zip(pair.names, (pair.first, pair.second), strict=True))),
            **difference.fields(),
            **adjusted,
        }
    )
    if test is not None:
        low, high = widened(test, contrast.tests)
        contrast = contrast.model_copy(update={"adjusted_low": low, "adjusted_high": high})
    if pair.arm == "difference":
        contrast = contrast.model_copy(update=interaction_fields(contrast))
    return contrast


def _scores(name: str, comparison: Comparison) -> ModelScores:
    """Scores of both arms, and what its supervised training costs."""
    arms = {arm: list(comparison.results(arm).values()) for arm in ARMS}
    results = [result for arm in arms.values() for result in arm]
    scores: dict[str, Any] = {}
    for arm, runs in arms.items():
        mean = paired(runs, [final_score(run) for run in runs]) if runs else None
        ends = {arm: "mean", f"{arm}_low": "low", f"{arm}_high": "high"}
        scores |= {name: getattr(mean, end, None) for name, end in ends.items()} | {f"{arm}_n": len(runs)}
    timed = [result for result in results if result.own.steps and result.own.examples]
    return ModelScores(
        name=name,
        label=comparison.row.label,
        **scores,
        parameters=results[0].parameters.get("total") if results else None,
        flops_per_example=fmean(run.own.flops / run.own.examples for run in timed) if timed else None,
        seconds_per_step=fmean(run.own.seconds / run.own.steps for run in timed) if timed else None,
        peak_bytes=max((run.own.peak_bytes for run in results), default=0) or None,
    )


def _ratios(first: ModelScores, second: ModelScores) -> dict[str, float | None]:
    ratios: dict[str, float | None] = {}
    for axis in COSTS:
        above, below = getattr(first, axis), getattr(second, axis)
        ratios[axis] = above / below if above and below else None
    return ratios


def _comparison(group: ModelGroup, label: str, contrasts: tuple[ModelContrast, ...]) -> ModelComparison:
    rows = list(group.values())
    row = next((each.row for each in rows if each.row.metric), rows[0].row)
    models = tuple(_scores(name, each) for name, each in group.items())
    comparison = ModelComparison(
        label=label,
        task=row.task,
        kind=row.kind,
        factors=shared_factors(row),
        metric=row.metric,
        higher_is_better=row.higher_is_better,
        models=models,
        contrasts=contrasts,
        warnings=tuple(model_warnings(group)),
    )
    rankings = tuple(rank(comparison, arm) for arm in ARMS)
    comparison = comparison.model_copy(update={"rankings": rankings})
    return comparison.model_copy(update={"verdict": model_verdict(comparison)})


def model_warnings(group: ModelGroup) -> Iterator[str]:
    """What the models of a comparison should have in common but do not."""
    seeds = {name: each.runs.seeds for name, each in group.items()}
    if len({each.runs.splits for each in group.values()}) > 1:
        yield "the models have different splits of the data; they are compared at those that two of them share"
    if len(set(seeds.values())) > 1:
        listed = "; ".join(f"{name} {seeds_text(own)}" for name, own in seeds.items())
        yield f"the models have different seeds ({listed}); they are compared at those that two of them share"
    for name, each in group.items():
        for arm in ARMS:
            failures = [failure for failure in each.row.failures if failure.arm == arm]
            lost = list(dict.fromkeys(failure.seed for failure in failures if failure.seed is not None))
            diverged = any(f.state == "diverged" for f in each.row.failures if f.arm == arm)
            if lost and diverged:
                yield (
                    f"{name} diverged or has no score in the {arm_text(arm)} arm at {seeds_text(lost)}: "
                    "its mean is of the other seeds, so it may look better than it is"
                )
