"""From a study to its rows and cells: one function for each kind. No torch here.

A row is a recipe at one level of what the study varies; it has two arms over seeds. A `CostModel` converts budgets to
rows, operations or seconds, which takes data and networks.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from pydantic import ValidationError

from spt.config.budget import steps_per_epoch, total_steps
from spt.config.job import Arm, Cell, Job
from spt.config.load import load
from spt.config.objectives import OBJECTIVE_OPTIONS
from spt.config.recipe import BUDGETS, Loaded, Part, Scratch, Train
from spt.config.validation import validation_messages
from spt.errors import UsageError
from spt.runs.plan import Axis, Factor, Smoke, Total
from spt.studies.schema import (
    Changes,
    Compare,
    Compute,
    Data,
    Init,
    Objective,
    Range,
    Size,
    Study,
    Tune,
    Value,
    recipe_overrides,
)

MAX_RUNS = 1000  # repeated draws in a row after which a search space counts as exhausted
StageName = Literal["pretrain", "finetune", "scratch"]


@runtime_checkable
class CostModel(Protocol):
    """The cost of jobs in rows, operations and seconds; asked only where a study needs it."""

    def rows(self, loaded: Loaded) -> int:
        """Training rows in use."""

    def resampled(self, loaded: Loaded) -> bool:
        """Whether training rows are drawn again in every epoch."""

    def identify_data(self, loaded: Loaded) -> Loaded:
        """The recipe with the identity of its data set, which jobs need."""

    def same_input(self, first: Loaded, second: Loaded) -> bool:
        """Do both encode their inputs the same way, with the same vocabulary?"""

    def flops(self, job: Job) -> float:
        """Analytic operations of the job's whole training, its parent's not included."""

    def seconds_per_step(self, job: Job) -> float:
        """Device seconds of one optimiser step of the job, measured on this machine."""

    def steps(self, job: Job) -> int:
        """Optimiser steps of the job's budget."""


@dataclass(frozen=True)
class GridRow:
    """A recipe at one level of what the study varies."""

    loaded: Loaded
    factors: Mapping[str, Factor] = field(default_factory=dict)
    total: Total | None = None


class TrialSetting(NamedTuple):
    """One setting of a search, in both arms, with one seed."""

    number: int
    arm: Arm
    seed: int
    job: Job


class SearchGrid(NamedTuple):
    """What a tuning study tries for one of its rows."""

    row: int
    settings: Sequence[dict[str, Value]]
    trials: Sequence[TrialSetting]


@dataclass(frozen=True)
class StudyGrid:
    """Every run of a study."""

    study: Study
    seeds: tuple[int, ...]
    rows: Sequence[GridRow]
    cells: Sequence[Cell]
    searches: Sequence[SearchGrid] = ()
    notes: Sequence[str] = ()

    @property
    def jobs(self) -> list[Job]:
        """Every finetuning job of the study, trials first, each once."""
        jobs = [trial.job for search in self.searches for trial in search.trials] + [cell.job for cell in self.cells]
        return list({job.name: job for job in jobs}.values())


def expand(study: Study, smoke: Smoke, costs: CostModel) -> StudyGrid:
    """Rows and cells of a study. Raises UsageError and RecipeError for a study that cannot be run."""
    bases = [BaseRecipe(study, source, smoke, costs) for source in study.recipes]
    rows, owners, notes = [], [], [note for base in bases for note in base.loaded.notes]
    for base in bases:
        new_rows, new_notes = _ROWS[study.kind](study, base, costs)
        rows += new_rows
        owners += [base] * len(new_rows)
        notes += new_notes
    cells = cells_of([(row.loaded, row.loaded) for row in rows], study.seed_list)
    if isinstance(study, Data) and study.pretrain_on == "all":
        cells = _pretrained_on_all(cells, study, owners, costs)
        rows = [replace(row, factors={**row.factors, "pretrained on": "all inputs"}) for row in rows]
    if isinstance(study, Tune):
        return StudyGrid(
            study, study.seed_list, rows, (), [_search(study, i, row) for i, row in enumerate(rows)], notes
        )
    return StudyGrid(study, study.seed_list, rows, cells, notes=list(dict.fromkeys(notes)))


def cells_of(rows: Iterable[tuple[Loaded, Loaded]], seeds: Sequence[int]) -> list[Cell]:
    """Both arms of every row, a pair (scratch, SPT) of recipes; seed by seed, so that pairs are complete early."""
    cells = []
    for i, (scratch, spt) in enumerate(rows):
        for seed in seeds:
            cells += [Cell("spt", i, spt_job(spt, seed)), Cell("scratch", i, Job(scratch, "finetune", seed))]
    return cells


def spt_job(loaded: Loaded, seed: int) -> Job:
    return Job(loaded, "finetune", seed, parent=Job(loaded, "pretrain", seed))


class BaseRecipe:
    """A recipe of the study, loaded once, and its variants."""

    def __init__(self, study: Study, source: str, smoke: Smoke, costs: CostModel) -> None:
        self.source, self.smoke, self.costs = source, smoke, costs
        self.overrides = recipe_overrides(study.set)
        self.loaded = self._load(self.overrides)

    def _load(self, overrides: Sequence[str]) -> Loaded:
        return self.costs.identify_data(load(self.source, overrides, smoke=self.smoke))

    def with_task(self, **options: Any) -> Loaded:
        """The recipe over other rows of the same task."""
        recipe = self.loaded.recipe
        task = Part(**{**recipe.task.model_dump(), **options})
        return self.costs.identify_data(replace(self.loaded, recipe=recipe.model_copy(update={"task": task})))

    def variant(self, changes: Changes) -> Loaded:
        """The recipe with more changes; they override what is set in every recipe."""
        kept = [override for override in self.overrides if override.partition("=")[0] not in changes]
        return self._load([*kept, *recipe_overrides(changes)])


RowsAndNotes = tuple[list[GridRow], list[str]]


def _compare(study: Compare, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    return [GridRow(base.loaded)], []


def _tune(study: Tune, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    count = len(settings(study))
    note = f"{count} settings are tried: the space does not have {study.trials} different ones"
    return [GridRow(base.loaded)], [note] if count < (study.trials or 0) else []


def _init(study: Init, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    levels = study.initialisations
    return [GridRow(base.variant({"model.initialisation": level}), {"initialisation": level}) for level in levels], []


def _size(study: Size, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    sizes = study.of(base.source)
    return [GridRow(base.variant(changes), {"size": label}) for label, changes in sizes.items()], []


def _objective(study: Objective, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    """One row for each objective. Next-step prediction needs a causal model: there both arms are made causal."""
    rows, notes = [], []
    for options in study.objectives:
        name, rest = options["name"], {key: value for key, value in options.items() if key != "name"}
        changes: Changes = {"pretrain.objective.name": name}
        changes |= {f"pretrain.objective.{key}": value for key, value in rest.items()}
        if name == "next" and not base.loaded.recipe.model.options.get("causal"):
            changes["model.causal"] = True
            notes.append(f"{base.loaded.name}, objective {name}: the model is causal in both arms (model.causal=true)")
        loaded = base.variant(changes)
        rows.append(GridRow(loaded, {"objective": _objective_text(loaded, rest)}))
    return rows, notes


def _objective_text(loaded: Loaded, given: Mapping[str, Any]) -> str:
    """An objective with the options that were given and those that the recipe changes from their defaults."""
    part = loaded.recipe.pretrain.objective
    usual = OBJECTIVE_OPTIONS[part.name].model_fields
    shown = {key: value for key, value in part.options.items() if key in given or value != usual[key].default}
    return " ".join([part.name, *(f"{key}={value}" for key, value in shown.items())])


def _data(study: Data, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    """One row for each fraction, with the recipe's number of updates, or of passes, in every one."""
    rows = []
    if costs.resampled(base.loaded):
        raise UsageError(
            f"{base.loaded.name}: its task makes new rows in every epoch, so a fraction of them is no limit; "
            "set task.resample_each_epoch=false"
        )
    for fraction in study.fractions:
        if fraction == base.loaded.recipe.task.options["subset_fraction"] and not study.stratified:
            rows.append(GridRow(base.loaded, {"fraction": fraction}))  # the same run as in other studies
            continue
        # Not as an override: a smoke run resets subset_fraction to 1.
        loaded = base.with_task(subset_fraction=fraction, stratified=study.stratified)
        used = costs.rows(loaded)
        for stage in _stages(loaded):
            train = _fixed_budget(study, base, stage, costs)
            if base.smoke:
                train = train.model_copy(update={"batch_size": min(train.batch_size, used)})
            if train.batch_size > used:
                raise UsageError(
                    f"{loaded.name}: a fraction of {fraction:g} is {used} training rows, fewer than {stage}.train."
                    f"batch_size ({train.batch_size}); leave this fraction out, or set {stage}.train.batch_size={used}"
                )
            loaded = with_train(loaded, stage, train)
        rows.append(GridRow(loaded, {"fraction": fraction}))
    return rows, []


def _fixed_budget(study: Data, base: BaseRecipe, stage: StageName, costs: CostModel) -> Train:
    """The recipe's training of a stage, with a budget that means the same for any number of rows."""
    n, train = costs.rows(base.loaded), base.loaded.recipe.train(stage)
    if study.hold == "epochs":
        if train.epochs is not None:
            return train
        return _budget(train, epochs=_examples(train, n, f"{base.loaded.name}: {stage}") / n)
    # Evaluated as often as in the recipe: with few rows an epoch takes only a few steps.
    every = train.evaluate_every or steps_per_epoch(n, train.batch_size, train.drop_last)
    return _budget(train, steps=_steps(train, n, stage, base.loaded), evaluate_every=every)


def _pretrained_on_all(
    cells: Sequence[Cell], study: Data, owners: Sequence[BaseRecipe], costs: CostModel
) -> list[Cell]:
    """The same finetunings after pretraining on every training input: labels are scarce, inputs are not."""
    changed = []
    whole: dict[BaseRecipe, Loaded] = {}
    for cell in cells:
        if isinstance(cell.job.parent, Job):
            base = owners[cell.row]
            if base not in whole:
                loaded = base.with_task(subset_fraction=1.0)
                whole[base] = with_train(loaded, "pretrain", _fixed_budget(study, base, "pretrain", costs))
            if not costs.same_input(cell.job.loaded, whole[base]):
                raise UsageError(
                    f"{base.loaded.name}: this task's vocabulary depends on the rows in use, so weights pretrained on "
                    "all inputs do not fit a subset; use --pretrain-on subset"
                )
            cell = cell._replace(job=replace(cell.job, parent=Job(whole[base], "pretrain", cell.job.seed)))
        changed.append(cell)
    return changed


def _compute(study: Compute, base: BaseRecipe, costs: CostModel) -> RowsAndNotes:
    """Scratch has the whole budget; SPT gives a share of it to pretraining and the rest to finetuning."""
    loaded, notes = base.loaded, list[str]()
    axis = study.match or _own_axis(loaded)
    if base.smoke and axis == "epochs":
        axis = "examples"  # a smoke run's budgets are steps
    if base.smoke and study.match != axis:
        notes.append(f"{loaded.name}: a smoke run is matched on {axis}")
    worth = _BUDGET_AXES[axis](loaded, costs)
    total = study.total_of(base.source)
    if total is None or base.smoke:
        total = worth.of_recipe()
    matched = Total(axis=axis, amount=total)
    scratch = with_train(loaded, "scratch", worth.train("scratch", total))
    rows = []
    for share in filter(None, study.shares):  # 0 is scratch, the baseline of every row
        split = with_train(scratch, "pretrain", worth.train("pretrain", share * total))
        split = with_train(split, "finetune", worth.train("finetune", (1 - share) * total))
        rows.append(GridRow(split, {"share": share}, matched))
    return rows, notes


class _BudgetAxis(ABC):
    """Budgets on one axis. A stage's warm-up, evaluation and stopping stay as they are."""

    def __init__(self, loaded: Loaded, costs: CostModel) -> None:
        self.loaded, self.costs = loaded, costs

    def of_recipe(self) -> float:
        """The budget of both stages of the recipe's SPT arm."""
        return self.of("pretrain") + self.of("finetune")

    @abstractmethod
    def of(self, stage: StageName) -> float:
        """The recipe's budget of a stage on this axis."""

    @abstractmethod
    def train(self, stage: StageName, amount: float) -> Train:
        """A stage's training with this budget."""

    def job(self, stage: StageName) -> Job:
        """A job of this stage with its settings; finetuning without a parent is scratch."""
        if stage == "finetune":
            return spt_job(self.loaded, 0)
        return Job(self.loaded, "pretrain" if stage == "pretrain" else "finetune", 0)


class _EpochBudget(_BudgetAxis):
    def of(self, stage: StageName) -> float:
        epochs = self.loaded.recipe.train(stage).epochs
        if epochs is None:
            raise UsageError(
                f"{self.loaded.name}: {stage}'s budget is not given in epochs, so shares of epochs cannot be taken; "
                "use --match examples, flops or time, or name the total (--total) in epochs"
            )
        return epochs

    def train(self, stage: StageName, amount: float) -> Train:
        return _budget(self.loaded.recipe.train(stage), epochs=_tidy(amount))


class _ExampleBudget(_BudgetAxis):
    def of(self, stage: StageName) -> float:
        train = self.loaded.recipe.train(stage)
        return _examples(train, self.costs.rows(self.loaded), f"{self.loaded.name}: {stage}")

    def train(self, stage: StageName, amount: float) -> Train:
        return _budget(self.loaded.recipe.train(stage), examples=max(1, round(amount)))


class _FlopBudget(_BudgetAxis):
    def of(self, stage: StageName) -> float:
        return self.costs.flops(self.job(stage))

    def train(self, stage: StageName, amount: float) -> Train:
        return _budget(self.loaded.recipe.train(stage), flops=amount)


class _TimeBudget(_BudgetAxis):
    def of(self, stage: StageName) -> float:
        job = self.job(stage)
        return self.costs.steps(job) * self.costs.seconds_per_step(job)

    def train(self, stage: StageName, amount: float) -> Train:
        each = self.costs.seconds_per_step(self.job(stage))
        return _budget(self.loaded.recipe.train(stage), steps=max(1, round(amount / each)))


_BUDGET_AXES: dict[Axis, type[_BudgetAxis]] = {
    "epochs": _EpochBudget,
    "examples": _ExampleBudget,
    "flops": _FlopBudget,
    "time": _TimeBudget,
}


def _own_axis(loaded: Loaded) -> Axis:
    """The axis that both stages' budgets are given in; steps count as examples."""
    kinds = {_kind(loaded.recipe.train(stage)) for stage in ("pretrain", "finetune")}
    if len(kinds) > 1:
        raise UsageError(
            f"{loaded.name}: pretraining's budget is given in {_kind(loaded.recipe.pretrain.train)}, finetuning's in "
            f"{_kind(loaded.recipe.finetune.train)}, which do not add up; choose the axis to match on: "
            "--match examples, flops or time"
        )
    (kind,) = kinds
    return "epochs" if kind == "epochs" else "flops" if kind == "flops" else "examples"


def _kind(train: Train) -> str:
    return next(name for name in BUDGETS if getattr(train, name) is not None)


_ROWS: dict[str, Callable[[Any, BaseRecipe, CostModel], RowsAndNotes]] = {
    "compare": _compare,
    "compute": _compute,
    "data": _data,
    "size": _size,
    "init": _init,
    "objective": _objective,
    "tune": _tune,
}


def settings(study: Tune) -> list[dict[str, Value]]:
    """The settings to try: every combination of the lists, or different random draws."""
    lists = {name: values for name, values in study.space.items() if isinstance(values, tuple)}
    if study.trials is None:
        return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    rng = np.random.default_rng([study.search_seed, 0x5EA2C4])
    most = study.trials
    if len(lists) == len(study.space):
        most = min(most, int(np.prod([len(values) for values in lists.values()])))
    drawn_settings: dict[str, dict[str, Value]] = {}
    idle = 0
    while len(drawn_settings) < most and idle < MAX_RUNS:
        drawn = {name: _drawn(values, name, rng) for name, values in study.space.items()}
        idle = 0 if json.dumps(drawn) not in drawn_settings else idle + 1
        drawn_settings.setdefault(json.dumps(drawn), drawn)
    return list(drawn_settings.values())


def _drawn(values: tuple[Value, ...] | Range, name: str, rng: np.random.Generator) -> Value:
    if isinstance(values, tuple):
        return values[int(rng.integers(len(values)))]
    if values.scale == "log":
        drawn = float(np.exp(rng.uniform(np.log(values.low), np.log(values.high))))
    else:
        drawn = float(rng.uniform(values.low, values.high))
    whole = Train.model_fields[name].annotation in (int, int | None)
    return max(1, round(drawn)) if whole else float(f"{drawn:.4g}")


def _search(study: Tune, row: int, base: GridRow) -> SearchGrid:
    choices = settings(study)
    trials = []
    for seed in study.trial_seeds:
        for number, values in enumerate(choices):
            spt, scratch = with_settings(base.loaded, values, "spt"), with_settings(base.loaded, values, "scratch")
            trials += [
                TrialSetting(number, "spt", seed, spt_job(spt, seed)),
                TrialSetting(number, "scratch", seed, Job(scratch, "finetune", seed)),
            ]
    return SearchGrid(row, choices, trials)


def with_settings(loaded: Loaded, values: Mapping[str, Value], arm: Arm) -> Loaded:
    """The recipe with these settings in the supervised training of one arm.

    A budget in steps becomes one in examples, so that a larger batch means neither more training nor fewer evaluations
    to choose from.
    """
    stage: StageName = "finetune" if arm == "spt" else "scratch"
    train = loaded.recipe.train(stage)
    if "batch_size" in values and train.steps is not None:
        train = _budget(train, examples=train.steps * train.batch_size)
    changed = {**train.model_dump(mode="json"), **values}
    if "batch_size" in values and train.evaluate_every is not None:  # evaluated after as many examples
        changed["evaluate_every"] = max(1, round(train.evaluate_every * train.batch_size / changed["batch_size"]))
    if changed["warmup_steps"] and values.get("warmup_fraction") is not None:
        changed["warmup_steps"] = 0
    return with_train(loaded, stage, _checked(changed, f"{loaded.name}, {dict(values)}"))


def _stages(loaded: Loaded) -> Iterator[StageName]:
    yield from ("pretrain", "finetune")
    if loaded.recipe.scratch is not None:
        yield "scratch"


def with_train(loaded: Loaded, stage: StageName, train: Train) -> Loaded:
    """The recipe with another training section for a stage."""
    recipe = loaded.recipe
    update: dict[str, Any] = {"scratch": Scratch(train=train)}
    if stage != "scratch":
        update = {stage: getattr(recipe, stage).model_copy(update={"train": train})}
    return replace(loaded, recipe=recipe.model_copy(update=update))


def _budget(train: Train, evaluate_every: int | None = None, **budget: int | float) -> Train:
    """The same training with another budget."""
    changed = {**train.model_dump(mode="json"), **dict.fromkeys(BUDGETS), **budget}
    if evaluate_every is not None:
        changed["evaluate_every"] = evaluate_every
    if (steps := changed["steps"]) is not None and changed["warmup_steps"] > steps:
        raise UsageError(
            f"the budget is {steps} steps here, but warmup_steps is {changed['warmup_steps']}; use warmup_fraction"
        )
    return _checked(changed, "the study's training")


def _checked(values: Mapping[str, Any], place: str) -> Train:
    try:
        return Train.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UsageError(f"{place}: {'; '.join(validation_messages(Train, error))}") from None


def _steps(train: Train, n: int, stage: str, loaded: Loaded) -> int:
    if train.flops is not None:
        raise UsageError(
            f"{loaded.name}: {stage}'s budget is given in operations, not in updates; give it in steps or epochs"
        )
    return total_steps(train, n, 1.0)


def _examples(train: Train, n: int, place: str) -> float:
    """Sequences that the budget shows, repeats counted."""
    if train.examples is not None:
        return float(train.examples)
    if train.epochs is not None:
        return train.epochs * n
    if train.steps is not None:
        return float(train.steps * min(train.batch_size, n))
    raise UsageError(f"{place}'s budget is given in operations, not in examples; give it in epochs")


def _tidy(amount: float) -> float:
    """Without the rounding error that products of decimal fractions leave: 0.2 * 150 is 30."""
    return float(f"{amount:.12g}")
