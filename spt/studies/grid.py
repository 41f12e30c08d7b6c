"""From a study to its rows and cells: one function for each kind. No torch here.

A row is a recipe at one level of what the study varies; it has two arms over seeds. A `CostModel` converts budgets to
rows, operations or seconds, which takes data and networks.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from spt.baselines.job import BaselineJob, baseline_jobs, question
from spt.baselines.registry import compared_metric
from spt.baselines.scores import ComparedMetric
from spt.config.budget import example_count, examples_per_epoch, steps_per_epoch, total_steps
from spt.config.job import WITH_REACH, Cell, Job, digest
from spt.config.load import load
from spt.config.objectives import OBJECTIVE_OPTIONS
from spt.config.recipe import BUDGETS, Part, ResolvedRecipe, Section, Train
from spt.config.validation import validate_values, validation_messages
from spt.errors import RecipeError, SptError, UsageError
from spt.models.options import LocalConfig
from spt.runs.plan import ARMS, ArmName, Axis, Factor, ReceptiveField, SearchProtocol, Smoke, Total, factors_text
from spt.studies.arms import Arm, control, main_arms, with_task_of
from spt.studies.costs import CostModel
from spt.studies.matching import Candidate, check_same_question, equal_changes
from spt.studies.schema import (
    FULL,
    MOST_SETTINGS,
    OBJECTIVE,
    PRETRAIN,
    Changes,
    Compare,
    Compute,
    Data,
    Init,
    Models,
    Objective,
    Reach,
    Size,
    Splits,
    Study,
    Tune,
    Value,
    Variants,
    WithSplits,
    recipe_overrides,
)
from spt.studies.space import Setting, arm_space, has_factors, settings, supervised_section
from spt.tasks.base import WHOLE, Tokens


@dataclass(frozen=True)
class GridRow:
    """A recipe at one level of what the study varies."""

    resolved: ResolvedRecipe
    factors: Mapping[str, Factor] = field(default_factory=dict)
    total: Total | None = None
    pretraining: ResolvedRecipe | None = None  # None: the same recipe's
    changes: Mapping[str, int] = field(default_factory=dict)  # that make the model as large as the others
    controls: Sequence[Arm] = ()  # beside scratch and SPT
    seen: ReceptiveField | None = None  # where that is what the study varies
    splits: Mapping[str, Sequence[Arm]] = field(default_factory=dict)  # the arms on each, where there are several

    @property
    def arms(self) -> list[Arm]:
        return [*main_arms(self.resolved, self.resolved, self.pretraining), *self.controls]

    @property
    def by_split(self) -> "SplitArms":
        """The arms on every split of the data; None is the recipe's own."""
        return self.splits or {None: self.arms}


SplitArms = Mapping[str, Sequence[Arm]] | Mapping[None, Sequence[Arm]]


class SearchGrid(NamedTuple):
    """What a tuning study tries for one of its rows."""

    row: int
    protocol: SearchProtocol
    settings: Mapping[ArmName, Sequence[Setting]]
    relative: Sequence[str]  # settings that are given as multiples of the arm's own value
    trials: Sequence[Cell]  # the row of each is the number of its setting


class GridBaseline(NamedTuple):
    """A baseline to make, and the rows that are held against it."""

    job: BaselineJob
    rows: Sequence[int]
    split: str | None = None


@dataclass(frozen=True)
class StudyGrid:
    """Every run of a study."""

    study: Study
    seeds: tuple[int, ...]
    rows: Sequence[GridRow]
    cells: Sequence[Cell] = ()
    searches: Sequence[SearchGrid] = ()
    notes: Sequence[str] = ()
    baselines: Sequence[GridBaseline] = ()

    @property
    def jobs(self) -> list[Job]:
        """Every finetuning job of the study, trials first, each once."""
        cells = [*(trial for search in self.searches for trial in search.trials), *self.cells]
        return list({cell.job.name: cell.job for cell in cells}.values())

    @property
    def splits(self) -> tuple[str, ...]:
        """Of the data, where the study has several."""
        return tuple(dict.fromkeys(split for row in self.rows for split in row.splits))

    @contextlib.contextmanager
    def telling_row(self, job: Job) -> Iterator[None]:
        """What is wrong with a job is told with the first row that needs it, where there are several."""
        try:
            yield
        except SptError as error:
            runs = ((cell.row, run) for cell in self.cells for run in (cell.job, cell.job.parent))
            needed_by = [row for row, run in runs if isinstance(run, Job) and run.name == job.name]
            if needed_by and len(self.rows) > 1:
                row = self.rows[needed_by[0]]
                place = " ".join(filter(None, [row.resolved.name, factors_text(row.factors)]))
                error.args = (f"{place}: {error}",)
            raise


def expand(study: Study, smoke: Smoke, costs: CostModel) -> StudyGrid:
    """Rows and cells of a study. Raises UsageError and RecipeError for a study that cannot be run."""
    bases = [BaseRecipe(study, source, smoke, costs) for source in study.recipes]
    if isinstance(study, Models):
        rows = _equal_models(study, bases)
    else:
        rows = [_with_controls(row, study, base) for base in bases for row in _ROWS[study.kind](study, base)]
    if (splits := _splits(study)) is not None:
        rows = [_on_splits(row, splits, costs) for row in rows]
    searches = [_search(study, i, base) for i, base in enumerate(bases)] if isinstance(study, Tune) else []
    study = _with_scales(study, rows, smoke)
    baselines, left_out = _baselines(study, rows, costs)
    notes = [note for base in bases for note in base.resolved.notes] + [note for base in bases for note in base.notes]
    notes = list(dict.fromkeys([*notes, *left_out]))
    grid = StudyGrid(study, study.seed_list, rows, searches=searches, notes=notes, baselines=baselines)
    if searches:
        return grid
    return replace(grid, cells=cells_of([row.by_split for row in rows], grid.seeds))


def cells_of(rows: Iterable[SplitArms], seeds: Sequence[int]) -> list[Cell]:
    """The arms of every row, seed by seed and split by split, so that pairs are complete early."""

    def job(arm: Arm, seed: int) -> Job:
        parent = None if arm.pretraining is None else Job(arm.pretraining, "pretrain", seed)
        return Job(arm.finetuning, "finetune", seed, parent)

    return [
        Cell(arm.name, i, job(arm, seed), split)
        for i, splits in enumerate(rows)
        for seed in seeds
        for split, arms in splits.items()
        for arm in arms
    ]


def _splits(study: Study) -> Splits | None:
    return study.splits if isinstance(study, WithSplits) else None


def _on_splits(row: GridRow, splits: Splits, costs: CostModel) -> GridRow:
    """The row with its arms on every split. A pretraining on this task has the rows of the split, too."""
    task = row.resolved.recipe.task

    def moved(recipe: ResolvedRecipe, options: Changes) -> ResolvedRecipe:
        part = recipe.recipe.task
        if part != task:  # another task's
            return recipe
        part = Part(**{**part.model_dump(), **options})
        return costs.identify_data(replace(recipe, recipe=recipe.recipe.model_copy(update={"task": part})))

    arms = {
        name: [
            Arm(arm.name, moved(arm.finetuning, options), arm.pretraining and moved(arm.pretraining, options))
            for arm in row.arms
        ]
        for name, options in splits.options(task.options["split_seed"]).items()
    }
    first, second, *_ = (costs.open_task(each[0].finetuning).test.fingerprints for each in arms.values())
    if np.array_equal(first, second):
        raise UsageError(
            f"{row.resolved.name}: its data have test rows of their own, which every split would have; to draw splits "
            "from all rows, set task.pool_splits=true"
        )
    return replace(row, splits=arms)


def _baselines(study: Study, rows: Sequence[GridRow], costs: CostModel) -> tuple[list[GridBaseline], list[str]]:
    """The baselines of every data set of the study, and notes on those that were named but do not fit one."""
    names = None if study.baselines == "auto" else study.baselines
    if names == ():
        return [], []
    asked: dict[tuple[str, str | None], list[int]] = {}  # rows by what they share, split by split
    recipes: dict[tuple[str, str | None], tuple[ResolvedRecipe, ComparedMetric]] = {}
    for i, row in enumerate(rows):
        metric = compared_metric(row.resolved, costs.open_task(row.resolved))
        for split, arms in row.by_split.items():
            recipe = row.resolved if split is None else arms[0].finetuning
            key = (digest(question(recipe, metric)), split)
            asked.setdefault(key, []).append(i)
            recipes.setdefault(key, (recipe, metric))
    planned: list[GridBaseline] = []
    reasons: dict[str, str] = {}
    for key, members in asked.items():
        recipe, metric = recipes[key]
        jobs, refused = baseline_jobs(names, recipe, costs.open_task(recipe), metric, study.seed_list)
        planned += [GridBaseline(job, members, key[1]) for job in jobs]
        reasons |= {f"{recipe.name}: no baseline {name}: {reason}": name for name, reason in refused.items()}
    if names is None:
        return planned, []
    for note, name in reasons.items():
        if name not in {each.job.name for each in planned}:
            raise UsageError(f"{note}; leave it out, or use auto, which takes those that fit")
    return planned, list(reasons)


def _with_controls(row: GridRow, study: Study, base: "BaseRecipe") -> GridRow:
    """The row with the controls that the study asks for."""
    names = study.controls if isinstance(study, Compare | Models) else ()
    controls = [control(name, row.resolved, row.pretraining, base.with_inputs_of) for name in names]
    if doubles := [arm.name for i, arm in enumerate(controls) if arm.name in [each.name for each in controls[:i]]]:
        raise UsageError(f"two arms are called {doubles[0]}: their recipes have the same name; rename a file")
    return replace(row, controls=controls)


class BaseRecipe:
    """A recipe of the study, loaded once, and its variants; with notes on what the study makes of it."""

    def __init__(self, study: Study, source: str, smoke: Smoke, costs: CostModel) -> None:
        self.study, self.source, self.smoke, self.costs = study, source, smoke, costs
        self.overrides = recipe_overrides(study.set)
        self.resolved = self._load(self.overrides, study.rules(source))
        self.notes: list[str] = []

    def _load(self, overrides: Sequence[str], changes: Sequence[Changes], level: str | None = None) -> ResolvedRecipe:
        if (splits := _splits(self.study)) is not None:  # few rows may fall into folds, but not at random
            self._check_task(overrides, changes)
            changes = [*changes, splits.first]
        try:
            return self.costs.identify_data(load(self.source, overrides, smoke=self.smoke, changes=changes))
        except RecipeError as error:
            if level is None:
                raise
            raise RecipeError(f"{self.source}, level {level!r}", error.problems) from None

    def _check_task(self, overrides: Sequence[str], changes: Sequence[Changes]) -> None:
        recipe = load(self.source, overrides, smoke=self.smoke, changes=changes)
        if not {"folds", "fold", "split_seed"} <= recipe.recipe.task.options.keys():
            raise UsageError(
                f"{recipe.name}: splits are drawn of data of your own (task custom); those of {recipe.task_name} are "
                "given"
            )

    def with_task(self, **options: Any) -> ResolvedRecipe:
        """The recipe over other rows of the same task."""
        recipe = self.resolved.recipe
        task = Part(**{**recipe.task.model_dump(), **options})
        return self.costs.identify_data(replace(self.resolved, recipe=recipe.model_copy(update={"task": task})))

    def with_inputs_of(self, pretraining: ResolvedRecipe, source: str) -> ResolvedRecipe:
        """A pretraining on the inputs of the task that another recipe names, as it stands there."""
        other = self.costs.identify_data(load(source, smoke=self.smoke))
        here, there = (self.costs.open_task(recipe) for recipe in (pretraining, other))
        shorter = there.length < here.length and pretraining.recipe.model.options["max_length"] is None
        recipe = with_task_of(pretraining, other, here.length if shorter else None)
        before, now = (len(data.train) for data in (here, there))
        train = recipe.recipe.pretrain.train
        if before == now or train.flops is not None:
            return recipe
        # As many updates, and evaluations to choose from, as on this task's rows.
        every = train.evaluate_every or steps_per_epoch(before, train.batch_size, train.drop_last)
        steps = total_steps(train, before, 1.0)
        return recipe.with_train("pretrain", _with_budget(train, steps=steps, evaluate_every=every))

    def variant(self, changes: Changes, level: str | None = None) -> ResolvedRecipe:
        """The recipe with more changes; they override what is set in every recipe. A smoke run keeps their sizes."""
        kept = [override for override in self.overrides if override.partition("=")[0] not in changes]
        return self._load([*kept, *recipe_overrides(changes)], self.study.rules(self.source, level), level)

    def at_level(self, level: str) -> ResolvedRecipe:
        """The recipe with a level's own changes."""
        changes = self.study.levels(self.source)[level]
        return self._load(self.overrides, [changes, *self.study.rules(self.source, level)], level)


def _equal_models(study: Models, bases: Sequence["BaseRecipe"]) -> list[GridRow]:
    """One row for each model, every one after the first at the scale where it costs as much."""
    first = Candidate(bases[0].source, bases[0].resolved)
    for base in bases[1:]:
        check_same_question(Candidate(base.source, base.resolved), first)
    rows = []
    for base in bases:
        found = None if study.scaled is None else study.scaled[base.source]
        row = _equal_row(study, base, Candidate(base.source, base.resolved), first, found)
        rows.append(_with_controls(row, study, base))
    return rows


def _equal_row(
    study: Models | Variants,
    base: "BaseRecipe",
    one: Candidate,
    first: Candidate,
    found: Mapping[str, int] | None,
) -> GridRow:
    """The recipe at the scale where it costs as much as the first."""
    if base.smoke and study.match != "none":
        base.notes.append("models of a smoke run are small, whatever they are matched on")
    if one == first or base.smoke:
        return GridRow(one.resolved)
    changes = equal_changes(study, one, first, base.costs, found)
    return GridRow(one.with_model(changes), changes=changes)


def _with_scales(study: Study, rows: Sequence[GridRow], smoke: Smoke) -> Study:
    """The study with what was found, for its file: a machine that is slower then makes the same runs."""
    changes = ({**row.changes} for row in rows)
    if isinstance(study, Models) and not smoke:
        return study.model_copy(update={"scaled": dict(zip(study.recipes, changes, strict=True))})
    if isinstance(study, Variants) and not smoke and study.match != "none":
        scaled = {name: {level: next(changes) for level in study.levels(name)} for name in study.recipes}
        return study.model_copy(update={"scaled": scaled})
    return study


def _compare(study: Compare | Tune, base: BaseRecipe) -> Iterator[GridRow]:
    yield GridRow(base.resolved)


def _init(study: Init, base: BaseRecipe) -> Iterator[GridRow]:
    for level, changes in study.levels(base.source).items():
        yield GridRow(base.variant(changes, level), {"initialisation": level})


def _reach(study: Reach, base: BaseRecipe) -> Iterator[GridRow]:
    """One row for each reach that cuts something, and one for the whole."""
    length, name = base.costs.open_task(base.resolved).length, base.resolved.name
    own = _local_config(base.resolved).own_reach()
    whole = length - 1 if own is None else min(length - 1, own)
    steps = [reach for reach in study.reaches if isinstance(reach, int)]
    if too_long := [f"{reach:,}" for reach in steps if reach >= whole]:
        nothing = f"{name}: a layer sees {whole:,} steps as it is, so a reach of {' and '.join(too_long)} cuts nothing"
        if len(too_long) == len(steps) and not base.smoke:
            raise UsageError(f"{nothing}; name smaller ones")
        base.notes.append(f"{nothing} and is left out")
    for level, changes in study.levels(base.source).items():
        if (reach := changes["model.reach"]) is None or reach < whole:
            recipe = base.variant(changes, level)
            config = _local_config(recipe)
            network = length - 1 if (all_layers := config.seen()) is None else min(length - 1, all_layers)
            seen = ReceptiveField(layer=reach or whole, layers=config.n_layers, network=network)
            yield GridRow(recipe, {"reach": reach or FULL}, seen=seen)


def _local_config(recipe: ResolvedRecipe) -> LocalConfig:
    config = Candidate(recipe.name, recipe).model_config()
    if isinstance(config, LocalConfig):
        return config
    raise UsageError(
        f"{recipe.name}: {recipe.model_name} cannot be cut to a reach; models that can are {', '.join(WITH_REACH)}"
    )


def _size(study: Size, base: BaseRecipe) -> Iterator[GridRow]:
    for label, changes in study.levels(base.source).items():
        yield GridRow(base.variant(changes, label), {"size": label})


def _variants(study: Variants, base: BaseRecipe) -> Iterator[GridRow]:
    """One row for each variant; with `match`, every one after the first at the scale where it costs as much."""
    candidates = [
        Candidate(f"{base.source}, variant {label}", base.at_level(label)) for label in study.levels(base.source)
    ]
    for label, one in zip(study.levels(base.source), candidates, strict=True):
        row = GridRow(one.resolved)
        if study.match != "none":
            check_same_question(one, candidates[0])
            row = _equal_row(study, base, one, candidates[0], study.found(base.source, label))
        yield replace(row, factors={"variant": label})


def _objective(study: Objective, base: BaseRecipe) -> Iterator[GridRow]:
    """One row for each objective. Next-step prediction needs a causal model: there both arms are made causal."""
    for options in study.objectives:
        name = options["name"]
        changes: Changes = {f"pretrain.objective.{key}": value for key, value in options.items()}
        if name == "next" and not base.resolved.recipe.model.options.get("causal"):
            changes["model.causal"] = True
            base.notes.append(
                f"{base.resolved.name}, objective {name}: the model is causal in both arms (model.causal=true)"
            )
        recipe = base.variant(changes)
        yield GridRow(recipe, {"objective": _objective_text(recipe, options)})


def _objective_text(resolved: ResolvedRecipe, given: Mapping[str, Any]) -> str:
    """An objective with the options that were given and those that the recipe changes from their defaults."""
    part = resolved.recipe.pretrain.objective
    fields = OBJECTIVE_OPTIONS[part.name].model_fields
    shown = {key: value for key, value in part.options.items() if key in given or value != fields[key].default}
    return " ".join([part.name, *(f"{key}={value}" for key, value in shown.items())])


def _data(study: Data, base: BaseRecipe) -> Iterator[GridRow]:
    """One row for each size of the subset, with the recipe's number of updates, or of passes, in every one."""
    costs, name = base.costs, base.resolved.name
    if costs.open_task(base.resolved).resample is not None:
        raise UsageError(
            f"{name}: its task makes new rows in every epoch, so a fraction of them is no limit; "
            "set task.resample_each_epoch=false"
        )
    pretraining, factors = None, dict[str, Factor]()
    if study.pretrain_on == "all":  # labels are scarce, inputs are not
        budget = _fixed_budget(study, base, "pretrain")
        pretraining = base.with_task(**WHOLE).with_train("pretrain", budget)
        factors = {"pretrained on": "all inputs"}
    for factor, level in study.subsets:
        subset = _subset(study, base, factor, level)
        if pretraining and costs.open_task(subset).input != costs.open_task(pretraining).input:
            raise UsageError(
                f"{name}: what this task's inputs are depends on the rows in use, so weights pretrained on all inputs "
                "do not fit a subset; use --pretrain-on subset"
            )
        whole = subset is base.resolved and WHOLE.items() <= subset.recipe.task.options.items()
        yield GridRow(subset, {factor: level, **factors}, pretraining=None if whole else pretraining)


def _subset(study: Data, base: BaseRecipe, factor: str, level: int | float) -> ResolvedRecipe:
    """The recipe on a fraction of the training rows, or on a number of them."""
    options = base.resolved.recipe.task.options
    size = {**WHOLE, f"subset_{factor}": level}
    if size.items() <= options.items() and not study.stratified:
        return base.resolved  # the same run as in other studies
    # Not as overrides: a smoke run resets them.
    # A network that was pretrained on all inputs knows all of their tokens.
    tokens = {"subset_vocabulary": "whole"} if study.pretrain_on == "all" and _numbers_tokens(base) else {}
    recipe = base.with_task(**size, **tokens, stratified=study.stratified)
    used = len(base.costs.open_task(recipe).train)
    sections: list[Section] = ["pretrain", "finetune"]
    if recipe.recipe.scratch is not None:
        sections.append("scratch")
    for section in sections:
        train = _fixed_budget(study, base, section)
        if base.smoke:
            train = train.model_copy(update={"batch_size": min(train.batch_size, used)})
        if train.batch_size > used:
            raise UsageError(
                f"{recipe.name}: {factor} {level:g} is {used} training rows, fewer than {section}.train."
                f"batch_size ({train.batch_size}); leave it out, or set {section}.train.batch_size={used}"
            )
        recipe = recipe.with_train(section, train)
    return recipe


def _numbers_tokens(base: BaseRecipe) -> bool:
    """Does the task number its tokens by the training rows in use?"""
    input = base.costs.open_task(base.resolved).input
    return isinstance(input, Tokens) and input.codes is not None


def _rows_of(section: Section, resolved: ResolvedRecipe, costs: CostModel) -> int:
    """Training rows that a section trains on: pretraining on all, the others on those with a target. Raises UsageError
    where passes over them are not passes over what pretraining sees."""
    data, pretrain = costs.open_task(resolved), resolved.recipe.pretrain
    if section != "pretrain":
        return len(data.labelled().train)
    if pretrain.data is not None and pretrain.train.epochs is not None:
        raise UsageError(
            f"{resolved.name}: pretrain.data adds rows, so this study cannot tell what an epoch of pretraining is; "
            "give pretrain.train a budget in steps or examples"
        )
    return len(data.train)


def _fixed_budget(study: Data, base: BaseRecipe, section: Section) -> Train:
    """The recipe's training settings of a section, with a budget that means the same for any number of rows."""
    train, where = base.resolved.recipe.train(section), f"{base.resolved.name}: {section}"
    n = _rows_of(section, base.resolved, base.costs)
    if study.hold == "epochs":
        return train if train.epochs is not None else _with_budget(train, epochs=_epochs(train, n, where))
    if train.flops is not None:
        raise UsageError(f"{where}'s budget is given in operations, not in updates; give it in steps or epochs")
    # Evaluated as often as in the recipe: with few rows an epoch takes only a few steps.
    every = train.evaluate_every or steps_per_epoch(n, train.batch_size, train.drop_last)
    return _with_budget(train, steps=total_steps(train, n, 1.0), evaluate_every=every)


def _compute(study: Compute, base: BaseRecipe) -> Iterator[GridRow]:
    """Scratch has the whole budget; SPT gives a share of it to pretraining and the rest to finetuning."""
    recipe = base.resolved
    _refuse_time_limits(recipe, "the totals of a compute study are matched")
    axis = study.match or _own_axis(recipe)
    if base.smoke and axis == "epochs":
        axis = "examples"  # a smoke run's budgets are steps
    if base.smoke and study.match != axis:
        base.notes.append(f"{recipe.name}: a smoke run is matched on {axis}")
    if axis == "epochs":
        _refuse_unlike_epochs(recipe, base.costs)
    budgets = _AxisBudgets(axis, recipe, base.costs)
    total = study.total_of(base.source)
    if total is None or base.smoke:
        total = budgets.amount("pretrain") + budgets.amount("finetune")
    scratch = recipe.with_train("scratch", budgets.train("scratch", total))
    for share in filter(None, study.shares):  # 0 is scratch, the baseline of every row
        split = scratch.with_train("pretrain", budgets.train("pretrain", share * total))
        split = split.with_train("finetune", budgets.train("finetune", (1 - share) * total))
        yield GridRow(split, {"share": share}, Total(axis=axis, amount=total))


def _refuse_unlike_epochs(recipe: ResolvedRecipe, costs: CostModel) -> None:
    """Raise UsageError where an epoch of pretraining is more than one of finetuning."""
    more = "so an epoch of pretraining is more than one of finetuning; match on examples, flops or time (--match)"
    if recipe.recipe.pretrain.data is not None:
        raise UsageError(
            f"{recipe.name}: pretrain.data adds rows, {more}, with the budget of pretrain.train in steps or examples"
        )
    seen, labelled = (_rows_of(section, recipe, costs) for section in ("pretrain", "finetune"))
    if labelled < seen:
        raise UsageError(f"{recipe.name}: {labelled:,} of {seen:,} training rows have labels, {more}")


def _refuse_time_limits(resolved: ResolvedRecipe, why: str) -> None:
    sections: tuple[Section, ...] = ("pretrain", "finetune", *(("scratch",) if resolved.recipe.scratch else ()))
    for section in sections:
        if resolved.recipe.train(section).max_hours is not None:
            raise UsageError(
                f"{resolved.name}: {section}.train.max_hours ends a run wherever it is by then, but {why}; "
                f"set {section}.train.max_hours=null"
            )


class _AxisBudgets(NamedTuple):
    """Budgets of a recipe on one axis. A stage's warm-up, evaluation and stopping stay as they are."""

    axis: Axis
    resolved: ResolvedRecipe
    costs: CostModel

    def amount(self, section: Section) -> float:
        """The recipe's own budget of a section."""
        train, where = self.resolved.recipe.train(section), f"{self.resolved.name}: {section}"
        if self.axis == "epochs":
            if train.epochs is None:
                raise UsageError(
                    f"{where}'s budget is not given in epochs, so shares of epochs cannot be taken; "
                    "use --match examples, flops or time, or name the total (--total) in epochs"
                )
            return train.epochs
        if self.axis == "examples":
            return _examples(train, _rows_of(section, self.resolved, self.costs), where)
        job = self._job(section)
        estimate = self.costs.estimate(job)
        return estimate.flops if self.axis == "flops" else estimate.steps * self.costs.seconds_per_step(job)

    def train(self, section: Section, amount: float) -> Train:
        """A section's training settings with this budget."""
        train = self.resolved.recipe.train(section)
        if self.axis == "epochs":
            # Without the rounding error that products of decimal fractions leave: 0.2 * 150 is 30.
            return _with_budget(train, epochs=float(f"{amount:.12g}"))
        if self.axis == "examples":
            return _with_budget(train, examples=max(1, round(amount)))
        if self.axis == "flops":
            return _with_budget(train, flops=amount)
        return _with_budget(train, steps=max(1, round(amount / self.costs.seconds_per_step(self._job(section)))))

    def _job(self, section: Section) -> Job:
        """A job of this section with its settings; finetuning without a parent is scratch."""
        if section == "scratch":
            return Job(self.resolved, "finetune", 0)
        pretraining = Job(self.resolved, "pretrain", 0)
        return pretraining if section == "pretrain" else Job(self.resolved, "finetune", 0, pretraining)


def _own_axis(resolved: ResolvedRecipe) -> Axis:
    """The axis that both stages' budgets are given in; steps count as examples."""
    pretrain, finetune = (
        next(name for name in BUDGETS if getattr(stage.train, name) is not None)
        for stage in (resolved.recipe.pretrain, resolved.recipe.finetune)
    )
    if pretrain != finetune:
        raise UsageError(
            f"{resolved.name}: pretraining's budget is given in {pretrain}, finetuning's in {finetune}, which do not "
            "add up; choose the axis to match on: --match examples, flops or time"
        )
    return "epochs" if pretrain == "epochs" else "flops" if pretrain == "flops" else "examples"


_ROWS: dict[str, Callable[[Any, BaseRecipe], Iterator[GridRow]]] = {
    "compare": _compare,
    "variants": _variants,
    "compute": _compute,
    "data": _data,
    "size": _size,
    "init": _init,
    "reach": _reach,
    "objective": _objective,
    "tune": _compare,
}


def _search(study: Tune, row: int, base: BaseRecipe) -> SearchGrid:
    spaces = {arm: arm_space(study, base.resolved, arm) for arm in ARMS}
    spt = list(itertools.islice(settings(study, spaces["spt"], "spt"), study.trials))
    if len(spt) < (study.trials or 0):
        base.notes.append(f"{len(spt)} settings are tried: the space does not have {study.trials} different ones")
    candidates = settings(study, spaces["scratch"], "scratch")
    if study.protocol == "compute":
        _refuse_time_limits(base.resolved, "--protocol compute gives both arms as much")
        scratch = _as_costly(study, base, candidates, spt)
    elif len(scratch := list(itertools.islice(candidates, len(spt)))) < len(spt):
        count = len(scratch)
        base.notes.append(
            f"{base.resolved.name}: scratch tries {count} settings, all that the space has for it, SPT {len(spt)}; "
            f"--trials {count} gives both as many"
        )
    choices: dict[ArmName, list[Setting]] = {"scratch": scratch, "spt": spt}
    relative = [name for name, values in study.space.items() if has_factors(values)]
    return SearchGrid(row, study.protocol, choices, relative, _trials(study, base, choices))


def _as_costly(study: Tune, base: BaseRecipe, candidates: Iterable[Setting], spt: Sequence[Setting]) -> list[Setting]:
    """Settings of scratch until their operations reach those of SPT's trials: by less than one setting more, so that
    what is left over is the baseline's."""
    recipe, costs = base.resolved, base.costs
    total = _flops(costs, [trial.job for trial in _trials(study, base, {"spt": spt, "scratch": []})])
    if study.trials is None:  # in an order that prefers no corner of the grid
        grid = list(candidates)
        rng = np.random.default_rng([study.search_seed, 0x5EA2C4])
        candidates = [grid[i] for i in rng.permutation(len(grid))]
    chosen, spent = list[Setting](), 0.0
    for setting in itertools.islice(candidates, MOST_SETTINGS):
        if spent >= total * (1 - 1e-9):
            break
        chosen.append(setting)
        job = Job(_with_settings(base, setting, "scratch"), "finetune", 0)
        spent += _flops(costs, [job]) * len(study.trial_seeds)
    all_of_them = "as many as a search may have" if len(chosen) == MOST_SETTINGS else "all that the space has for it"
    same, short = ("the same", "") if spent >= total * (1 - 1e-9) else ("not the same", f", {all_of_them}")
    base.notes.append(
        f"{recipe.name}: {same} total compute: SPT tries {len(spt)} settings for {total:.3g} operations, scratch "
        f"{len(chosen)} for {spent:.3g}{short}"
    )
    return chosen


def _flops(costs: CostModel, jobs: Iterable[Job]) -> float:
    """Operations of these jobs and of those they start from, each counted once."""
    runs = {run.name: run for job in jobs for run in (job, job.parent) if isinstance(run, Job)}
    return sum(costs.estimate(run).flops for run in runs.values())


def _trials(study: Tune, base: BaseRecipe, choices: Mapping[ArmName, Sequence[Setting]]) -> list[Cell]:
    """Every setting of every arm, seed by seed, the arms in turn."""
    recipes = {arm: [_with_settings(base, values, arm) for values in choices[arm]] for arm in ARMS}
    cells = []
    for seed, number in itertools.product(study.trial_seeds, range(max(map(len, recipes.values())))):
        for arm in reversed(ARMS):
            if number < len(recipes[arm]):
                recipe = recipes[arm][number]
                parent = Job(recipe, "pretrain", seed) if arm == "spt" else None
                cells.append(Cell(arm, number, Job(recipe, "finetune", seed, parent)))
    return cells


def _with_settings(base: BaseRecipe, values: Mapping[str, Value], arm: ArmName) -> ResolvedRecipe:
    """The recipe with these settings in the supervised training of one arm, and in pretraining where they are its."""
    resolved = base.resolved
    place = f"{resolved.name}, {dict(values)}"
    parts: dict[str, Setting] = {OBJECTIVE: {}, PRETRAIN: {}, "": {}}
    for name, value in values.items():
        prefix = next(prefix for prefix in parts if name.startswith(prefix))
        parts[prefix][name.removeprefix(prefix)] = value
    resolved = _with_train_settings(resolved, supervised_section(arm), parts[""], place, base.costs)
    if parts[PRETRAIN]:
        resolved = _with_train_settings(resolved, "pretrain", parts[PRETRAIN], place, base.costs)
    if parts[OBJECTIVE]:
        resolved = _with_objective(resolved, parts[OBJECTIVE], place)
    return resolved


def _with_train_settings(
    resolved: ResolvedRecipe, section: Section, values: Mapping[str, Value], place: str, costs: CostModel
) -> ResolvedRecipe:
    """A budget in steps becomes one in examples, so that a larger batch means neither more training nor fewer
    evaluations to choose from."""
    train = resolved.recipe.train(section)
    if budget := {name: value for name, value in values.items() if name in BUDGETS}:
        other = _validated({**train.model_dump(mode="json"), **dict.fromkeys(BUDGETS), **budget}, place)
        train = _smoke_budget(other, train) if resolved.smoke else other
        values = {name: value for name, value in values.items() if name not in budget}
    if "batch_size" in values and train.steps is not None:
        examples = train.steps * train.batch_size
        if section != "pretrain" or resolved.recipe.pretrain.data is None:  # else an epoch's rows are not known
            examples = example_count(train.steps, _rows_of(section, resolved, costs), train.batch_size, train.drop_last)
        train = _with_budget(train, examples=examples)
    changed = {**train.model_dump(mode="json"), **values}
    if changed["warmup_steps"] and values.get("warmup_fraction") is not None:
        changed["warmup_steps"] = 0
    tuned = _validated(changed, place)
    if "batch_size" in values:
        tuned = _with_batch(tuned, train, resolved)
    return resolved.with_train(section, tuned)


def _with_batch(tuned: Train, train: Train, resolved: ResolvedRecipe) -> Train:
    """Evaluated after as many examples as before; in a smoke run, no batch is larger than its rows."""
    rows = resolved.recipe.task.options["max_rows"]
    size = min(tuned.batch_size, rows) if resolved.smoke else tuned.batch_size
    every = train.evaluate_every and max(1, round(train.evaluate_every * train.batch_size / size))
    return tuned.model_copy(update={"batch_size": size, "evaluate_every": every})


def _smoke_budget(train: Train, smoke: Train) -> Train:
    """A smoke run stays one: at most its own steps, or one pass over its rows."""
    steps = smoke.steps or 1
    most = {"epochs": 1.0, "steps": steps, "examples": steps * smoke.batch_size}
    return train.model_copy(
        update={name: min(value, most[name]) for name in most if (value := getattr(train, name)) is not None}
    )


def _with_objective(resolved: ResolvedRecipe, values: Mapping[str, Value], place: str) -> ResolvedRecipe:
    """The recipe with other options of what pretraining asks for."""
    part = resolved.recipe.pretrain.objective
    config = OBJECTIVE_OPTIONS[part.name]
    try:
        options = validate_values(config, {**part.options, **values})
    except ValidationError as error:
        problems = validation_messages(config, error, OBJECTIVE.rstrip("."))
        raise UsageError(f"{place}: {'; '.join(problems)} (its objective is {part.name})") from None
    objective = Part(name=part.name, **options.model_dump(mode="json"))
    pretrain = resolved.recipe.pretrain.model_copy(update={"objective": objective})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"pretrain": pretrain}))


def _with_budget(train: Train, **budget: int | float) -> Train:
    """The same training settings with another budget (and, if given, `evaluate_every`)."""
    changed = {**train.model_dump(mode="json"), **dict.fromkeys(BUDGETS), **budget}
    if (steps := changed["steps"]) is not None and changed["warmup_steps"] > steps:
        raise UsageError(
            f"the budget is {steps} steps here, but warmup_steps is {changed['warmup_steps']}; use warmup_fraction"
        )
    return _validated(changed, "the study's training")


def _validated(values: Mapping[str, Any], place: str) -> Train:
    try:
        return validate_values(Train, values)
    except ValidationError as error:
        raise UsageError(f"{place}: {'; '.join(validation_messages(Train, error))}") from None


def _examples(train: Train, n: int, place: str) -> float:
    """Sequences that the budget shows, repeats counted."""
    if train.examples is not None:
        return float(train.examples)
    if train.epochs is not None:
        return train.epochs * examples_per_epoch(n, train.batch_size, train.drop_last)
    if train.steps is not None:
        return float(example_count(train.steps, n, train.batch_size, train.drop_last))
    raise UsageError(f"{place}'s budget is given in operations, not in examples; give it in epochs")


def _epochs(train: Train, n: int, place: str) -> float:
    """Passes over the rows that a budget in steps or examples pays for."""
    if train.steps is not None:
        return train.steps / steps_per_epoch(n, train.batch_size, train.drop_last)
    return _examples(train, n, place) / examples_per_epoch(n, train.batch_size, train.drop_last)
