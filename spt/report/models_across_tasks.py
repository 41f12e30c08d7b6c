"""Several models over several tasks: the plain average that papers print, mean ranks, and which models change places.

Averages are tested over seeds and speak of these tasks alone; ranks are tested over tasks (Friedman, Wilcoxon), which
takes more tasks than most studies have.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from spt.report import stats
from spt.report.across_tasks import SPLITS, repeated_recipe, task_identity, task_names
from spt.report.format import abbreviate, is_percent, p_text, score_text, size_interval_text, size_text
from spt.report.models import ModelGroup, ModelPair, model_pairs, model_warnings, shared_factors
from spt.report.ranking import LEAD, Arm
from spt.report.verdict import LEVEL, final_score
from spt.runs.plan import ARMS, ArmName, Factor, Kind, Record, factors_text


class ModelAverage(Record):
    """One model in one arm over all tasks."""

    model: str
    arm: ArmName
    average: float | None  # plain mean over tasks; None where tasks are scored in different metrics
    low: float | None  # t interval over seeds, for these tasks
    high: float | None
    mean_rank: float  # over tasks; 1 is best, ties share their ranks


class AverageContrast(Record):
    """Two models in one arm, or in what they gain from self-pretraining, over all tasks."""

    arm: Arm
    first: str
    second: str
    difference: float  # of the averages, first - second
    low: float | None
    high: float | None
    p: float | None
    holm: float | None = None  # over all pairs in both arms; interactions are a family of their own
    tests: int = 0
    adjusted_low: float | None = None  # interval that holds for the whole family together
    adjusted_high: float | None = None
    wilcoxon_p: float | None = None  # over tasks
    wilcoxon_holm: float | None = None
    better: str = ""  # the model that the adjusted interval shows to be better, or to gain more


class ModelsAcrossTasks(Record):
    """Models that share several tasks, at one level of what a study varies."""

    label: str
    kind: Kind
    factors: dict[str, Factor]
    metric: str  # empty where tasks are scored in different metrics
    higher_is_better: bool
    tasks: tuple[str, ...]
    models: tuple[str, ...]
    left_out: tuple[str, ...]  # models without a score in every arm of every task
    averages: tuple[ModelAverage, ...]
    friedman: dict[ArmName, float | None]
    contrasts: tuple[AverageContrast, ...]
    changed: tuple[tuple[str, str], ...]  # pairs whose order by mean rank differs between the arms
    verdict: str = ""
    warnings: tuple[str, ...] = ()


class _Tasks(NamedTuple):
    """The groups of several tasks, by task, and the models that all of them have."""

    groups: dict[str, ModelGroup]
    models: list[str]
    left_out: list[str]


def models_across_tasks(groups: Sequence[ModelGroup]) -> tuple[list[ModelsAcrossTasks], list[str]]:
    """Every set of groups that differ in their task alone. Notes say what had to be left out."""
    levels: dict[tuple[Kind, str], list[ModelGroup]] = {}
    for group in groups:
        row = next(iter(group.values())).row
        if not row.smoke:
            levels.setdefault((row.kind, factors_text(shared_factors(row))), []).append(group)
    found, notes = [], []
    for (_, level), members in levels.items():
        one_each = [next(iter(group.values())) for group in members]
        by_task = dict(zip(task_names([each.row for each in one_each]), members, strict=True))
        if any(each.runs.splits for each in one_each):
            if len(members) > 1:
                notes.append(f"models are not compared over {len(members)} tasks: {SPLITS}")
        elif len(set(map(task_identity, one_each))) < len(members):
            notes.append(
                "models are not compared over tasks: a task has several groups of models, which do not count as tasks"
            )
        elif problem := repeated_recipe(
            [row for group in members for row in {each.row.recipe: each.row for each in group.values()}.values()]
        ):
            notes.append(f"models are not compared over {len(members)} tasks: {problem}")
        elif len(by_task) > 1:
            tasks = _complete(by_task)
            if different := [task for task, group in by_task.items() if _saw_different_data(group)]:
                why = f"of {different[0]} they did not see the same data"
                notes.append(f"models are not compared over {len(by_task)} tasks: {why}")
            elif len(tasks.models) > 1:
                found.append(_across(tasks, level))
            else:
                few = "fewer than two have scores of both arms in each"
                notes.append(f"models are not compared over {len(by_task)} tasks: {few}")
    return found, notes


def _saw_different_data(group: ModelGroup) -> bool:
    return any(pair.difference().different_data for pair in model_pairs(group))


def _complete(groups: dict[str, ModelGroup]) -> _Tasks:
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    kept = [
        name
        for name in names
        if all(name in group and all(group[name].results(arm) for arm in ARMS) for group in groups.values())
    ]
    return _Tasks(groups, kept, [name for name in names if name not in kept])


def _across(tasks: _Tasks, level: str) -> ModelsAcrossTasks:
    rows = [group[tasks.models[0]].row for group in tasks.groups.values()]
    metric = rows[0].metric if len({(row.metric, row.higher_is_better) for row in rows}) == 1 else ""
    scores = {arm: _task_scores(tasks, arm) for arm in ARMS}
    directions = [1 if row.higher_is_better else -1 for row in rows]
    oriented = {
        arm: [[sign * fmean(cell) for cell in line] for sign, line in zip(directions, table, strict=True)]
        for arm, table in scores.items()
    }
    ranks = {
        arm: [fmean(column) for column in zip(*map(stats.ranks, table), strict=True)] for arm, table in oriented.items()
    }
    averages = [
        _average(model, arm, [line[index] for line in scores[arm]] if metric else None, ranks[arm][index])
        for arm in ARMS
        for index, model in enumerate(tasks.models)
    ]
    changed = [
        (a, b)
        for (i, a), (j, b) in combinations(enumerate(tasks.models), 2)
        if (ranks["scratch"][i] - ranks["scratch"][j]) * (ranks["spt"][i] - ranks["spt"][j]) < 0
    ]
    across = ModelsAcrossTasks(
        label=f"{len(rows)} tasks" + (f", {level}" if level else ""),
        kind=rows[0].kind,
        factors=shared_factors(rows[0]),
        metric=metric,
        higher_is_better=rows[0].higher_is_better,
        tasks=tuple(tasks.groups),
        models=tuple(tasks.models),
        left_out=tuple(tasks.left_out),
        averages=tuple(averages),
        friedman={arm: stats.friedman(oriented[arm]) for arm in ARMS},
        contrasts=tuple(_contrasts(tasks, rows[0].higher_is_better)) if metric else (),
        changed=tuple(changed),
        warnings=tuple(f"{task}: {text}" for task, group in tasks.groups.items() for text in model_warnings(group)),
    )
    return across.model_copy(update={"verdict": ". ".join(_sentences(across))})


def _task_scores(tasks: _Tasks, arm: ArmName) -> list[list[list[float]]]:
    """The scores of every seed, task by task and model by model."""
    return [
        [[final_score(result) for result in group[model].results(arm).values()] for model in tasks.models]
        for group in tasks.groups.values()
    ]


def _average(model: str, arm: ArmName, samples: list[list[float]] | None, rank: float) -> ModelAverage:
    average = stats.average(samples) if samples else None
    ends = (
        {"average": average.mean, "low": average.low, "high": average.high}
        if average
        else dict.fromkeys(("average", "low", "high"))
    )
    return ModelAverage(model=model, arm=arm, mean_rank=rank, **ends)


def _contrasts(tasks: _Tasks, higher_is_better: bool) -> Iterator[AverageContrast]:
    """Every two models: averages of paired differences, Holm and Bonferroni within the arms and within interactions."""
    pairs = list(combinations(tasks.models, 2))
    families: tuple[tuple[Arm, ...], ...] = (ARMS, ("difference",))
    for family in families:
        every = [(arm, pair, _paired_samples(tasks, arm, pair)) for pair in pairs for arm in family]
        kept = [(arm, pair, samples) for arm, pair, samples in every if all(samples)]
        averages = [stats.average(samples) for _, _, samples in kept]
        holm = stats.holm([average.p for average in averages])
        over_tasks = [stats.wilcoxon([fmean(sample) for sample in samples]) for _, _, samples in kept]
        adjusted = stats.holm(over_tasks)
        tests = sum(average.p is not None for average in averages)
        for index, (arm, (first, second), _) in enumerate(kept):
            average = averages[index]
            low, high = average.interval(tests)
            better = ""
            if low is not None and high is not None and not low <= 0 <= high:
                better = first if (low > 0) == higher_is_better else second
            yield AverageContrast(
                arm=arm,
                first=first,
                second=second,
                difference=average.mean,
                low=average.low,
                high=average.high,
                p=average.p,
                holm=holm[index],
                tests=tests,
                adjusted_low=low,
                adjusted_high=high,
                wilcoxon_p=over_tasks[index],
                wilcoxon_holm=adjusted[index],
                better=better,
            )


def _paired_samples(tasks: _Tasks, arm: Arm, names: tuple[str, str]) -> list[list[float]]:
    """Of each task, first - second at every seed that both have finished."""
    samples = []
    for group in tasks.groups.values():
        terms = ModelPair(arm, names, *(group[name] for name in names)).terms().values()
        samples.append([sum(map(final_score, plus)) - sum(map(final_score, minus)) for plus, minus in terms])
    return samples


def _sentences(across: ModelsAcrossTasks) -> Iterator[str]:
    for arm in ARMS:
        yield _rank_sentence(across, arm)
    if across.changed:
        places = abbreviate([f"{a} and {b}" for a, b in across.changed], 6)
        yield f"By mean rank {places} change places; ranks of {len(across.tasks)} tasks are a description, not a test"
    else:
        yield "By mean rank no two models change places"
    if across.metric:
        yield from _average_sentences(across)
    else:
        yield "No averages: the tasks are scored in different metrics"
    yield from _limits(across)


def _rank_sentence(across: ModelsAcrossTasks, arm: ArmName) -> str:
    ordered = sorted((each for each in across.averages if each.arm == arm), key=lambda each: each.mean_rank)
    listed = ", ".join(
        f"{each.model} {each.mean_rank:.2f}"
        + ("" if each.average is None else f" (average {score_text(each.average, across.metric)})")
        for each in ordered
    )
    p = across.friedman[arm]
    return f"{LEAD[arm]} mean ranks are {listed}" + ("" if p is None else f" (Friedman p {p_text(p)})")


def _average_sentences(across: ModelsAcrossTasks) -> Iterator[str]:
    """Differences of averages that are decided among all pairs."""
    unit = " points" if is_percent(across.metric) else f" in {across.metric}"

    def text(contrast: AverageContrast) -> str:
        other = contrast.second if contrast.better == contrast.first else contrast.first
        interval = size_interval_text(contrast.adjusted_low, contrast.adjusted_high, across.metric)
        size = f"{size_text(contrast.difference, across.metric)}{unit}"
        if contrast.arm == "difference":
            return f"{contrast.better} gains {size} more than {other} ({interval})"
        return f"{contrast.better} beats {other} by {size} ({interval})"

    for arm, lead in (*LEAD.items(), ("difference", "By self-pretraining")):
        decided = [text(contrast) for contrast in across.contrasts if contrast.arm == arm and contrast.better]
        if decided:
            yield f"{lead}, averaged over these tasks, {'; '.join(decided)}"
        elif arm == "difference":
            yield "No model is shown to gain more from self-pretraining than another, on average"


def _limits(across: ModelsAcrossTasks) -> Iterator[str]:
    """What so few tasks or seeds cannot show."""
    tasks, pairs = len(across.tasks), len(across.models) * (len(across.models) - 1) // 2
    least = 2.0 ** (1 - tasks) * 2 * pairs  # the smallest p after Holm for all pairs in both arms
    if least > LEVEL:
        smallest = p_text(min(1.0, least))
        yield f"{tasks} tasks are too few for Wilcoxon's test to tell any two models apart (smallest Holm p {smallest})"
    if any(each.average is not None and each.low is None for each in across.averages):
        yield f"An average has no interval where a task has fewer than {stats.FEWEST} seeds, or where no score varies"
    if across.left_out:
        yield f"Left out, since a task or an arm is missing: {', '.join(across.left_out)}"
