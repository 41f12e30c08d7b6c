"""Study files: what is varied over which recipes, and how. One class for each kind; no torch here.

A study comes from YAML or from the command line; `to_yaml` writes it out in full.
"""

import contextlib
import copy
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from spt.baselines.registry import BASELINES
from spt.config.load import KINDS as PARTS
from spt.config.load import anchor_paths, path_options
from spt.config.load import read as read_recipe
from spt.config.objectives import OBJECTIVE_OPTIONS
from spt.config.overrides import flatten
from spt.config.plugins import is_path
from spt.config.recipe import BUDGETS, StrictModel, Train
from spt.config.validation import validate_values, validation_messages
from spt.config.yaml import dump_yaml, is_file_name, parse_yaml, read_text
from spt.errors import RecipeError, UsageError, did_you_mean
from spt.runs.plan import ARMS, PLAN, Axis, SearchProtocol
from spt.studies.arms import absolute, canonical, renamed_arm

MOST_SEEDS = 1000
MOST_SPLITS = 1000
LONGEST_NAME = 200  # of a level
MOST_SETTINGS = 1000
Changes = dict[str, Any]  # dotted place in a recipe -> value
Value = bool | int | float | str | None
Match = Literal["parameters", "flops", "time", "none"]
Scale = Literal["width", "depth"]
_MATCH = (
    "what is made equal, to within 5 % of the first model: parameters, operations per example, seconds per example "
    "(measured here, once), or nothing"
)
_SCALE = "what is changed to match: d_model (with inner widths), or n_layers"


class Rule(StrictModel):
    """Changes to some rows of a study."""

    recipes: tuple[str, ...] | None = Field(None, min_length=1, description="for these recipes; null: for all")
    levels: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="at these variants, sizes, initialisations or reaches, by name; null: at all levels",
    )
    set: Changes = Field(min_length=1, description="values by dotted path; a mapping replaces a whole section")

    @field_validator("levels", mode="before")
    @classmethod
    def _as_keys(cls, levels: Any) -> Any:
        """Names that look like numbers, as text: as keys, where the levels are given, they are text too."""
        if not isinstance(levels, list):
            return levels
        return tuple(json.dumps(level) if isinstance(level, bool | int | float) else level for level in levels)


class _Study(StrictModel):
    """What all kinds have in common."""

    recipes: tuple[str, ...] = Field(min_length=1, description="names of packaged recipes, or YAML files")
    set: Changes = Field({}, description="values to change in every recipe, by dotted path")
    where: tuple[Rule, ...] = Field(
        (), description="further changes to some recipes or levels, applied after all others and in this order"
    )
    seeds: int | tuple[int, ...] = Field(5, description="how many (5: seeds 0 to 4), or which")
    baselines: Literal["auto"] | tuple[str, ...] = Field(
        (),
        description="non-neural baselines, on the same data, to compare rows with: "
        f"{', '.join(BASELINES)}; auto: all that suit a task",
    )

    @field_validator("baselines", mode="before")
    @classmethod
    def _known_baselines(cls, given: Any) -> Any:
        if given == "auto" or not isinstance(given, str | list | tuple):
            return given
        names = (given,) if isinstance(given, str) else tuple(given)
        if names == ("auto",):
            return "auto"
        for name in names:
            if not isinstance(name, str) or name not in BASELINES:
                hint = did_you_mean(str(name), [*BASELINES, "auto"])
                raise ValueError(f"{name!r} is no baseline{hint}")
        return names

    @model_validator(mode="after")
    def _check(self) -> "_Study":
        if (seeds := self.seeds) == () or (isinstance(seeds, int) and not 1 <= seeds <= MOST_SEEDS):
            raise ValueError(f"seeds is {seeds}; between 1 and {MOST_SEEDS} are needed")
        if isinstance(seeds, tuple) and min(seeds) < 0:
            raise ValueError(f"seeds {list(seeds)} must be different whole numbers from 0")
        for name, values in self:
            if isinstance(values, tuple) and (doubles := [i for i, v in enumerate(values) if v in values[:i]]):
                double = f"the rule where.{doubles[0]}" if name == "where" else values[doubles[0]]
                raise ValueError(f"{name}: {double} is listed twice")
        for i, rule in enumerate(self.where):
            self._check_rule(f"where.{i}", rule)
        return self

    def _check_rule(self, place: str, rule: Rule) -> None:
        if unknown := [name for name in rule.recipes or () if name not in self.recipes]:
            raise ValueError(f"{place}.recipes: {unknown[0]} is not one of the recipes")
        for varied in self.varied():
            if clash := [key for key in rule.set if f"{varied}.".startswith(f"{key}.")]:
                raise ValueError(f"{place}.set: {clash[0]} would change {varied}, which this study varies; take it out")
        if rule.levels is None:
            return
        known = dict.fromkeys(level for name in rule.recipes or self.recipes for level in self.levels(name))
        if not known:
            raise ValueError(f"{place}.levels: only the levels of variants, size, init and reach have names")
        if unknown := [level for level in rule.levels if level not in known]:
            raise ValueError(f"{place}.levels: {unknown[0]!r} is no level of these recipes; known: {', '.join(known)}")

    def varied(self) -> Sequence[str]:
        """Places that the levels are named after, so that no rule may change them."""
        return ()

    def levels(self, recipe: str) -> Mapping[str, Changes]:
        """The levels of a recipe that have names, and what each one changes."""
        return {}

    def rules(self, recipe: str, level: str | None = None) -> tuple[Changes, ...]:
        """The changes under `where` that hold for a recipe (at a level with a name), in order."""
        return tuple(
            rule.set
            for rule in self.where
            if (rule.recipes is None or recipe in rule.recipes) and (rule.levels is None or level in rule.levels)
        )

    def changes_of(self, recipe: str, level: str | None = None) -> tuple[Changes, ...]:
        """Everything that a row changes in its recipe, in the order in which it is applied."""
        own = {} if level is None else self.levels(recipe)[level]
        return tuple(filter(None, (self.set, own, *self.rules(recipe, level))))

    @property
    def seed_list(self) -> tuple[int, ...]:
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


class Splits(StrictModel):
    """Several splits of the data, on each of which every arm and seed is run: folds, or random splits."""

    folds: int | None = Field(None, ge=2, description="number of parts, each the test split once")
    repeats: int = Field(
        1, ge=1, description="folds: how many times they are drawn, with task.split_seed one higher each time"
    )
    random: int | None = Field(
        None, ge=2, description="number of random splits, from task.split_seed and the seeds after it"
    )

    @model_validator(mode="after")
    def _check(self) -> "Splits":
        if (self.folds is None) == (self.random is None):
            raise ValueError("give folds or random, exactly one of them: {folds: 5, repeats: 2} or {random: 10}")
        if self.repeats > 1 and self.random is not None:
            raise ValueError("repeats is for folds; of random splits there are as many as random says")
        if (count := self.random or self.repeats * (self.folds or 0)) > MOST_SPLITS:
            raise ValueError(f"{count:,} splits are asked for; at most {MOST_SPLITS:,} are possible")
        return self

    @property
    def first(self) -> Changes:
        """The task's options of the first split, whichever split_seed a recipe has."""
        return {"task.folds": self.folds, "task.fold": 0}

    def options(self, split_seed: int) -> dict[str, Changes]:
        """The task's options of every split, by its name."""
        if self.random is not None:
            return {f"split {i}": {"split_seed": split_seed + i, "folds": None, "fold": 0} for i in range(self.random)}
        assert self.folds is not None
        return {
            (f"repeat {repeat}, " if self.repeats > 1 else "") + f"fold {fold}": {
                "split_seed": split_seed + repeat,
                "folds": self.folds,
                "fold": fold,
            }
            for repeat in range(self.repeats)
            for fold in range(self.folds)
        }


class WithSplits(_Study):
    """A study whose rows may be run on several splits of the data."""

    splits: Splits | None = Field(
        None,
        description="splits of the data, on each of which every arm and seed is run; a number is a number of folds; "
        "null: the recipe's own split",
    )

    @field_validator("splits", mode="before")
    @classmethod
    def _number_of_folds(cls, given: Any) -> Any:
        if isinstance(given, int) and not isinstance(given, bool):
            return {"folds": given}
        return given


class _WithArms(WithSplits):
    """A study whose rows may have controls in addition to scratch and SPT."""

    arms: tuple[str, ...] = Field(
        ARMS,
        description="scratch and spt, which are compared, and controls: frozen, encoder (or parts=A+B), shuffled, "
        "other=RECIPE, joint=WEIGHT",
    )

    @field_validator("arms")
    @classmethod
    def _arms(cls, arms: tuple[str, ...]) -> tuple[str, ...]:
        written = tuple(canonical(arm) for arm in arms)
        if missing := [arm for arm in ARMS if arm not in written]:
            raise ValueError(
                f"{' and '.join(missing)} must be among the arms, since controls are read against both; add "
                f"{'them' if len(missing) > 1 else 'it'}: {','.join((*missing, *written))}"
            )
        return written

    @property
    def controls(self) -> tuple[str, ...]:
        """The arms other than scratch and SPT."""
        return tuple(arm for arm in self.arms if arm not in ARMS)


class Compare(_WithArms):
    """Both arms of every recipe, and controls if requested."""

    kind: Literal["compare"] = Field("compare", description="which kind of study this is")


class Models(_WithArms):
    """Both arms of several models of equal size: each after the first is scaled until it costs as much as the first."""

    kind: Literal["models"] = Field("models", description="which kind of study this is")
    match: Match = Field("parameters", description=_MATCH)
    scale: Scale = Field("width", description=_SCALE)
    scaled: dict[str, dict[str, int]] | None = Field(
        None, description="changes to each recipe's model that make it match; null: searched for"
    )

    @model_validator(mode="after")
    def _several(self) -> "Models":
        if len(self.recipes) < 2:
            raise ValueError("one recipe is no comparison of models; name at least two")
        _check_scale(self.match, self.scale)
        if self.scaled is not None and (odd := set(self.scaled) ^ set(self.recipes)):
            raise ValueError(f"scaled must hold every recipe; {min(odd)} is missing from it or from recipes")
        changed = [name for name, changes in (self.scaled or {}).items() if changes]
        if changed and self.match == "none":
            raise ValueError(f"match none changes no model, but scaled changes that of {changed[0]}; take scaled out")
        if self.recipes[0] in changed:
            raise ValueError(f"scaled changes {changed[0]}, but the first recipe is what the others are made equal to")
        return self


class Compute(_Study):
    """The share of one total budget that goes to pretraining; scratch has the whole budget (SPT paper, table 8)."""

    kind: Literal["compute"] = Field("compute", description="which kind of study this is")
    shares: tuple[float, ...] = Field(
        (0.0, 0.2, 0.4, 0.6), min_length=1, description="shares of the budget that go to pretraining"
    )
    match: Axis | None = Field(
        None,
        description="what is held equal: epochs, examples, flops or time (device seconds, measured here); null: the "
        "unit of the recipe's budgets, or examples where that is steps",
    )
    total: float | dict[str, float] | None = Field(
        None, description="the whole budget, in that unit, or one for each recipe; null: the sum of its two stages"
    )

    @field_validator("shares")
    @classmethod
    def _shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= share < 1 for share in shares) or not any(shares):
            raise ValueError("shares must be different numbers in [0, 1), one of them above 0")
        return tuple(sorted(shares))

    @model_validator(mode="after")
    def _totals(self) -> "Compute":
        given = self.total.values() if isinstance(self.total, dict) else [self.total]
        if not all(total is None or total > 0 for total in given):
            raise ValueError("total must be above 0")
        if isinstance(self.total, dict) and set(self.total) != set(self.recipes):
            odd = min(set(self.total) ^ set(self.recipes))
            raise ValueError(
                f"total must be one budget or one for each recipe; {odd} is missing from totals or recipes"
            )
        return self

    def total_of(self, recipe: str) -> float | None:
        return self.total[recipe] if isinstance(self.total, dict) else self.total


FRACTIONS = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0)  # of the training split (SPT paper, figure 3)


class Data(_Study):
    """How much of the training split is used: nested subsets of one permutation (SPT paper, figure 3)."""

    kind: Literal["data"] = Field("data", description="which kind of study this is")
    fractions: tuple[float, ...] | None = Field(
        None, description="fractions of the training split; null, without rows: 0.005, 0.01, 0.05, 0.1, 0.5, 1"
    )
    rows: tuple[int, ...] = Field((), description="numbers of training rows, instead of fractions")
    stratified: bool = Field(False, description="every subset has the class proportions of the whole split")
    pretrain_on: Literal["subset", "all"] = Field(
        "subset", description="subset: the rows of finetuning; all: every training input, without its label"
    )
    hold: Literal["steps", "epochs"] = Field(
        "steps", description="what subsets keep of the whole split's budget: optimiser steps, or epochs"
    )

    @field_validator("fractions")
    @classmethod
    def _fractions(cls, fractions: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if fractions is None:
            return None
        if not all(0 < fraction <= 1 for fraction in fractions) or len(set(fractions)) < max(1, len(fractions)):
            raise ValueError("fractions must be different numbers in (0, 1]")
        return tuple(sorted(fractions))

    @field_validator("rows")
    @classmethod
    def _rows(cls, rows: tuple[int, ...]) -> tuple[int, ...]:
        if not all(number >= 1 for number in rows) or len(set(rows)) < len(rows):
            raise ValueError("rows must be different whole numbers from 1 on")
        return tuple(sorted(rows))

    @model_validator(mode="after")
    def _one_scale(self) -> "Data":
        if self.rows and self.fractions:
            raise ValueError("fractions and rows are both given; keep one")
        return self

    @property
    def subsets(self) -> tuple[tuple[str, int | float], ...]:
        """(fraction or rows, how much) of every subset, the smallest first."""
        if self.rows:
            return tuple(("rows", number) for number in self.rows)
        return tuple(("fraction", fraction) for fraction in self.fractions or FRACTIONS)


class Size(_Study):
    """Model sizes, by name, each a set of changes; exact parameter counts are in the report (SPT paper, table 9)."""

    kind: Literal["size"] = Field("size", description="which kind of study this is")
    sizes: dict[str, dict[str, Any]] = Field(
        min_length=1, description="name: changes, e.g. {1M: {model.d_model: 144}}; or recipe: {name: changes}"
    )

    @model_validator(mode="after")
    def _sizes(self) -> "Size":
        _check_named_levels("size", self.sizes, self.recipes)
        for name in self.recipes:
            if empty := [label for label, changes in _of_recipe(self.sizes, name).items() if not changes]:
                raise ValueError(f"size {empty[0]} must be a mapping of dotted places to values, such as d_model: 64")
        return self

    def levels(self, recipe: str) -> dict[str, Changes]:
        """This recipe's sizes; a key without a dot is a model option."""
        return {
            label: {place if "." in place else f"model.{place}": value for place, value in changes.items()}
            for label, changes in _of_recipe(self.sizes, recipe).items()
            if isinstance(changes, dict)  # anything else is refused above
        }


class Variants(WithSplits):
    """Named variants, each a set of changes to the recipe, such as the rows of a paper's table or other models."""

    kind: Literal["variants"] = Field("variants", description="which kind of study this is")
    variants: dict[str, dict[str, Any]] = Field(
        min_length=1,
        description="name: changes by dotted path, e.g. {one layer: {model.n_layers: 1}}, {} for the recipe itself; a "
        "mapping replaces a whole section, e.g. {model: {name: dss, d_model: 64}}; or recipe: {name: changes}",
    )
    match: Match = Field("none", description=f"{_MATCH}; every variant of a recipe after the first is scaled to match")
    scale: Scale = Field("width", description=_SCALE)
    scaled: dict[str, dict[str, Any]] | None = Field(
        None,
        description="changes to each variant's model that make it match, or recipe: {name: changes}; null: searched "
        "for",
    )

    @model_validator(mode="after")
    def _variants(self) -> "Variants":
        _check_named_levels("variant", self.variants, self.recipes)
        _check_scale(self.match, self.scale)
        if self.scaled is None:
            return self
        if self.match == "none":
            raise ValueError("match none changes no model; take scaled out, or say what is matched")
        _check_named_levels("variant", self.scaled, self.recipes, "scaled's variants")
        for name in self.recipes:
            first, levels = next(iter(self.levels(name))), _of_recipe(self.scaled, name)
            if odd := set(levels) ^ set(self.levels(name)):
                raise ValueError(f"scaled must hold every variant; {min(odd)} is missing from it or from variants")
            if levels[first]:
                raise ValueError(f"scaled changes {first}, but the first variant is what the others are made equal to")
        return self

    def levels(self, recipe: str) -> dict[str, Changes]:
        return _of_recipe(self.variants, recipe)

    def found(self, recipe: str, level: str) -> dict[str, int] | None:
        """The changes under which this variant's model was found to be as large as the first one's."""
        return None if self.scaled is None else dict(_of_recipe(self.scaled, recipe)[level])


def _of_recipe(levels: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """A recipe's levels, which are those of all recipes or of each one."""
    return dict(levels.get(recipe, levels))


def _check_scale(match: Match, scale: Scale) -> None:
    if match == "none" and scale != "width":
        raise ValueError(
            f"scale is {scale}, but nothing is scaled while match is none; say what is made equal, such as match "
            "parameters, or leave scale out"
        )


def _check_named_levels(what: str, levels: Mapping[str, Any], recipes: Sequence[str], plural: str = "") -> None:
    by_recipe, plural = set(levels) & set(recipes), plural or f"{what}s"
    if by_recipe and (missing := [name for name in recipes if name not in levels]):
        raise ValueError(f"{plural} are given by recipe, but not for {missing[0]}")
    if by_recipe and (foreign := [name for name in levels if name not in recipes]):
        raise ValueError(f"{plural} are given by recipe, and {foreign[0]} is not one of the recipes")
    hint = f" (under the name of a recipe stand {what}s of its own)" if by_recipe else ""
    for name in recipes:
        own = _of_recipe(levels, name)
        if not own:
            raise ValueError(f"{name} has no {what}{hint}")
        for label, changes in own.items():
            _check_name(what, label)
            if not isinstance(changes, dict):
                raise ValueError(
                    f"{what} {label} must be a mapping of dotted places to values, such as d_model: 64{hint}"
                )


def _check_name(what: str, label: str) -> None:
    """A level's name stands in the lines of tables and in the terminal."""
    unfit = any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in label)
    if unfit or not label.strip() or len(label) > LONGEST_NAME:
        shown = ascii(label if len(label) <= 40 else f"{label[:40]}…")
        raise ValueError(f"a {what} is called {shown}; a name is one line of text, of at most {LONGEST_NAME} letters")


class Init(_Study):
    """Initial parameters, crossed with both arms (SPT paper, table 7)."""

    kind: Literal["init"] = Field("init", description="which kind of study this is")
    initialisations: tuple[Literal["structured", "random", "random_ssm"], ...] = Field(
        ("structured", "random"), min_length=1, description="values of model.initialisation"
    )

    def varied(self) -> Sequence[str]:
        return ("model.initialisation",)

    def levels(self, recipe: str) -> dict[str, Changes]:
        return {level: {"model.initialisation": level} for level in self.initialisations}


FULL = "full"


class Reach(_Study):
    """How far a layer sees: every kernel and attention is cut to a number of steps, and compared with `full`, uncut."""

    kind: Literal["reach"] = Field("reach", description="which kind of study this is")
    reaches: tuple[int | Literal["full"], ...] = Field(
        (1, 4, 16, 64, 256, 1024),
        min_length=1,
        validate_default=True,
        description="values of model.reach; full, the recipe without a cut, is always among them",
    )

    @field_validator("reaches")
    @classmethod
    def _reaches(cls, reaches: tuple[int | str, ...]) -> tuple[int | str, ...]:
        steps = [reach for reach in reaches if isinstance(reach, int)]
        if any(reach < 1 for reach in steps):
            raise ValueError("reaches must be different whole numbers from 1, or full")
        return (*sorted(steps), FULL)

    def varied(self) -> Sequence[str]:
        return ("model.reach",)

    def levels(self, recipe: str) -> dict[str, Changes]:
        return {str(reach): {"model.reach": None if reach == FULL else reach} for reach in self.reaches}


class Objective(_Study):
    """What pretraining asks for: masked or next, with which ratio and span."""

    kind: Literal["objective"] = Field("objective", description="which kind of study this is")
    objectives: tuple[dict[str, Any], ...] = Field(
        min_length=1, description="e.g. [{name: masked, ratio: 0.5, span: 8}, {name: next}]"
    )

    @field_validator("objectives")
    @classmethod
    def _named(cls, objectives: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not all(isinstance(objective.get("name"), str) for objective in objectives):
            raise ValueError("every objective needs a name: masked or next")
        return objectives

    def varied(self) -> Sequence[str]:
        return sorted({f"{OBJECTIVE}{option}" for objective in self.objectives for option in objective})


class Range(StrictModel):
    """Where a random search draws a setting from."""

    low: float = Field(description="the least value, in the setting's own unit")
    high: float = Field(description="the greatest value")
    scale: Literal["linear", "log"] = Field("log", description="drawn uniformly, or uniformly in the logarithm")

    @model_validator(mode="after")
    def _order(self) -> "Range":
        if not self.low < self.high or (self.scale == "log" and self.low <= 0):
            raise ValueError(f"low {self.low:g} must lie below high {self.high:g}, and above 0 on a log scale")
        return self


PRETRAIN, OBJECTIVE = "pretrain.", "pretrain.objective."  # how names of pretraining's settings begin
TUNABLE: dict[str, FieldInfo] = {  # of supervised training, in both arms
    name: Train.model_fields[name]
    for name in sorted(Train.model_fields)
    if name not in {*BUDGETS, "max_hours", "evaluate_every", "metric_average", "validation_masks", "select_by"}
}
PRETRAIN_TUNABLE: dict[str, FieldInfo] = {  # and of pretraining, which has a budget of its own
    **{PRETRAIN + name: field for name, field in TUNABLE.items()},
    **{PRETRAIN + name: Train.model_fields[name] for name in ("epochs", "steps", "examples")},
    **{
        OBJECTIVE + name: field
        for options in OBJECTIVE_OPTIONS.values()
        if not options.labelled
        for name, field in options.model_fields.items()
    },
}


class Tune(_Study):
    """Settings are tried in both arms and chosen on validation; then both arms are run over seeds.

    Settings of supervised training are those of finetuning in one arm and of training from scratch in the other; those
    of pretraining (`pretrain.learning_rate`) belong to SPT alone and are chosen by the score after finetuning. Without
    `trials`, all combinations of the lists are tried; with it, that many random ones, drawn with `search_seed`.
    """

    kind: Literal["tune"] = Field("tune", description="which kind of study this is")
    space: dict[str, tuple[Value, ...] | Range] = Field(
        "default",
        validate_default=True,
        min_length=1,
        description="a packaged space; or for each setting a list of values, where x0.3 is 0.3 times the recipe's own, "
        "or {low, high, scale}",
    )
    protocol: SearchProtocol = Field(
        "trials",
        description="what scratch, with no pretraining to tune, may try. trials: as many settings as SPT, or all that "
        "the space has for it; compute: settings until their operations reach those of SPT's trials and pretrainings",
    )
    trials: int | None = Field(
        None, ge=1, le=MOST_SETTINGS, description="random search: number of settings for SPT; null: grid search"
    )
    search_seed: int = Field(0, ge=0, description="random search: seed of the list of settings")
    trial_seeds: tuple[int, ...] = Field((0,), min_length=1, description="seeds that every setting is tried with")

    @field_validator("space", mode="before")
    @classmethod
    def _packaged(cls, space: Any) -> Any:
        named = packaged_space(space) if isinstance(space, str) else space
        if not isinstance(named, dict):
            return named
        # Behind a validator like this one, pydantic's strict mode takes no list for a tuple.
        return {name: tuple(values) if isinstance(values, list) else values for name, values in named.items()}

    @model_validator(mode="after")
    def _space(self) -> "Tune":
        for name, values in self.space.items():
            _check_tunable(name)
            if isinstance(values, Range):
                if self.trials is None:
                    raise ValueError(f"space.{name} is a range, so the number of trials is needed (trials: 20)")
            elif not values or len({(isinstance(value, bool), value) for value in values}) < len(values):
                raise ValueError(f"space.{name} must be a list of different values")
        if len(budgets := [name for name in self.space if name.removeprefix(PRETRAIN) in BUDGETS]) > 1:
            raise ValueError(f"{' and '.join(budgets)} are both pretraining's budget; keep one")
        if self.trials is None:
            count = math.prod(len(values) for values in self.space.values() if isinstance(values, tuple))
            if count > MOST_SETTINGS:
                raise ValueError(f"the grid has {count:,} settings; at most {MOST_SETTINGS:,}, or a random search")
        if min(self.trial_seeds) < 0:
            raise ValueError("trial_seeds must be different whole numbers from 0")
        return self


def _check_tunable(name: str) -> None:
    if name.startswith(PRETRAIN) and name not in PRETRAIN_TUNABLE:
        hint = did_you_mean(name, PRETRAIN_TUNABLE)
        raise ValueError(f"space.{name} is not a tunable setting of pretraining{hint}")
    if name not in {**TUNABLE, **PRETRAIN_TUNABLE}:
        hint = did_you_mean(name.rpartition(".")[2], TUNABLE)
        raise ValueError(f"space.{name} is not a tunable setting of supervised training{hint}")


def factor_of(value: Value) -> float | None:
    """0.3 for `x0.3`, which means 0.3 times the recipe's own value; None for any other value."""
    found = re.fullmatch(r"x((\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", value) if isinstance(value, str) else None
    return float(found[1]) if found else None


def packaged_spaces() -> dict[str, dict[str, Any]]:
    """The search spaces that come with spt: name -> its description and its space."""
    text = files("spt.studies").joinpath("spaces.yaml").read_text(encoding="utf-8")
    spaces: dict[str, dict[str, Any]] = parse_yaml(text, "spaces.yaml")
    return spaces


def packaged_space(name: str) -> dict[str, Any]:
    known = packaged_spaces()
    if name not in known:
        raise UsageError(
            f"space {name!r} is unknown; known: {', '.join(known)}; or give settings their values, as in "
            "learning_rate=0.01,0.1"
        )
    space: dict[str, Any] = known[name]["space"]
    return space


Study = Compare | Models | Variants | Compute | Data | Size | Init | Reach | Objective | Tune

KINDS: dict[str, type[Study]] = {kind.model_fields["kind"].default: kind for kind in get_args(Study)}


@dataclass(frozen=True)
class StudySource:
    """A study and where it came from; the paths of its recipes are absolute."""

    name: str
    study: Study
    folder: Path | None = None  # where it was run before, if it was named by its folder


def packaged() -> dict[str, str]:
    """The studies that come with spt: name -> text."""
    root = Path(str(files("spt.recipes"))) / "studies"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(root.glob("*.yaml"))}


def validate(raw: Any, source: str) -> Study:
    """The study. Raises RecipeError with everything that is wrong with it."""
    if not isinstance(raw, dict):
        raise UsageError(f"{source} is not a study: a mapping with kind and recipes is expected")
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        problem = "no kind is given" if kind is None else f"kind {kind!r} is unknown"
        hint = did_you_mean(str(kind), KINDS) if kind is not None else f"; known: {', '.join(KINDS)}"
        raise UsageError(f"{source} is not a study: {problem}{hint}")
    try:
        study: Study = validate_values(KINDS[kind], raw)
    except ValidationError as error:
        messages = validation_messages(KINDS[kind], error)
        # Of a value that may be a list or a mapping, keep the messages for the mapping.
        relevant = [message for message in messages if "a valid array, not {" not in message]
        raise RecipeError(source, relevant or messages) from None
    return study


def with_baselines(source: StudySource, names: Sequence[str]) -> StudySource:
    """The same study held against these baselines."""
    raw = {**source.study.model_dump(mode="json"), "baselines": list(names)}
    return replace(source, study=validate(raw, source.name))


def from_mapping(raw: Mapping[str, Any], source: str) -> StudySource:
    """A study given by its keys; its recipes' paths are relative to the current folder."""
    study = with_absolute_paths(validate(raw, source), Path.cwd())
    if isinstance(study, Reach) and study.reaches == (FULL,):  # a part of a study may: its other levels are elsewhere
        raise RecipeError(source, [f"reaches has {FULL} alone, which compares nothing; name steps too: 4,16,64"])
    return StudySource(study.kind, study)


def read(source: str) -> StudySource:
    """A packaged study, a YAML file, or the folder of a study that was run. Raises UsageError, RecipeError."""
    path, folder = Path(source), None
    if source.strip() and path.is_dir():
        folder = path.resolve() if (path / PLAN).is_file() else None  # else a folder with a study's file
        path = path / "study.yaml"
        if not path.is_file():
            raise UsageError(f"{source} holds no study.yaml; name a study file, a study folder or a packaged study")
    if is_file_name(path):
        study = validate(_mapping(read_text(path, "study"), source), source)
        return StudySource(path.stem, with_absolute_paths(study, path.resolve().parent), folder)
    known = packaged()
    if source in known:
        return StudySource(source, validate(_mapping(known[source], source), source))
    hint = did_you_mean(source, known)
    raise UsageError(f"unknown study {source!r}{hint} (your own study files must end in .yaml)")


SECTIONS = ("train", "head")  # of a stage; its objective is a component


def _mapping(text: str, source: str) -> Any:
    raw = parse_yaml(text, source)
    if isinstance(raw, dict) and "set" in raw and isinstance(raw["set"], dict):
        # A section is one change for each of its keys. With a dot in its name, only one of settings that stay: another
        # objective is replaced whole, as is an option that has keys.
        changes = [
            flatten(value, key) if "." not in key or key.rpartition(".")[2] in SECTIONS else {key: value}
            for key, value in raw["set"].items()
        ]
        raw = {**raw, "set": {key: value for each in changes for key, value in each.items()}}
    return raw


def part_of(source: StudySource, recipes: Sequence[str] = (), levels: Sequence[str] = ()) -> StudySource:
    """A study of some of its recipes, at some of its levels (of reaches, `full` beside them). Its runs are the whole
    study's; its folder is its own."""
    study = source.study
    recipes = [as_listed(name, study) for name in recipes]
    if unknown := [name for name in recipes if name not in study.recipes]:
        raise UsageError(f"{unknown[0]} is no recipe of {source.name}{did_you_mean(unknown[0], study.recipes)}")
    chosen = [name for name in study.recipes if not recipes or name in recipes]
    known = list(dict.fromkeys(level for name in chosen for level in study.levels(name)))
    if levels and not known:
        raise UsageError(f"{source.name} is a study of the kind {study.kind}, whose levels have no names to choose by")
    if unknown := [level for level in levels if level not in known]:
        hint = did_you_mean(unknown[0], known) or f"; known: {', '.join(known)}"
        raise UsageError(f"{unknown[0]!r} is no level of {source.name}{hint}")
    if not recipes and not levels:
        return source
    kept = [name for name in chosen if not levels or any(level in study.levels(name) for level in levels)]
    raw = {"kind": study.kind, **study.model_dump(mode="json"), "recipes": kept}
    rules: list[dict[str, Any]] | None = None
    if levels and isinstance(study, Variants) and study.match != "none":
        rules = _sizes_of_variants(study, kept, source.name)
    elif isinstance(study, Models) and study.match != "none" and study.recipes[0] not in kept:
        rules = _sizes_of_models(study, kept, source.name)
    if rules is not None:  # the first, to which the others were made equal, may not be among them
        raw |= {"match": "none", "scale": "width", "scaled": None, "where": [*raw["where"], *rules]}
    for field in ("sizes", "variants"):
        if field in raw:
            raw[field] = {name: _chosen(_of_recipe(raw[field], name), levels) for name in kept}
    for field in ("total", "scaled"):
        if isinstance(raw.get(field), dict):
            raw[field] = {name: raw[field].get(name, raw[field]) for name in kept}
    for field in ("initialisations", "reaches"):
        if field in raw and levels:
            raw[field] = [level for level in raw[field] if str(level) in levels]
    raw["where"] = list(filter(None, (_part_of_rule(rule, kept, levels) for rule in raw["where"])))
    return replace(source, study=validate(raw, source.name))


def as_listed(name: str, study: Study) -> str:
    """A recipe's file as the study has it, whose paths are absolute: named from here, or by its file's name alone."""
    if name in study.recipes or not is_file_name(Path(name)):
        return name
    here = absolute(name, Path.cwd())
    alike = [recipe for recipe in study.recipes if Path(recipe).name == name]
    return here if here in study.recipes else alike[0] if len(alike) == 1 else name


def _sizes_of_variants(study: Variants, recipes: Sequence[str], name: str) -> list[dict[str, Any]]:
    """Rules that make each variant as large as it was found to be."""
    if study.scaled is None:
        raise UsageError(
            f"{name}: its variants are made equal when the whole study runs; run that first, then parts of the "
            "study.yaml in its folder, which holds what was found"
        )
    places = [(recipe, level) for recipe in recipes for level in study.levels(recipe)]
    return [_size(recipe, [level], found) for recipe, level in places if (found := study.found(recipe, level))]


def _sizes_of_models(study: Models, recipes: Sequence[str], name: str) -> list[dict[str, Any]]:
    """Rules that make each model as large as it was found to be."""
    if study.scaled is None:
        raise UsageError(
            f"{name}: its models are made equal to {study.recipes[0]} when it runs; name that too, or run the whole "
            "study first, then parts of the study.yaml in its folder, which holds what was found"
        )
    return [_size(recipe, None, found) for recipe in recipes if (found := study.scaled[recipe])]


def _size(recipe: str, levels: list[str] | None, found: Mapping[str, int]) -> dict[str, Any]:
    return {"recipes": [recipe], "levels": levels, "set": {f"model.{name}": value for name, value in found.items()}}


def _chosen(levels: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {level: changes for level, changes in levels.items() if not names or level in names}


def _part_of_rule(rule: Mapping[str, Any], recipes: Sequence[str], levels: Sequence[str]) -> dict[str, Any] | None:
    """The rule for what is left of a study; None where it holds for nothing there."""
    part = dict(rule)
    for field, left in (("recipes", recipes), ("levels", levels)):
        if rule[field] is not None and left:
            part[field] = [name for name in rule[field] if name in left]
            if not part[field]:
                return None
    return part


def with_absolute_paths(study: Study, folder: Path) -> Study:
    """The same study with its recipes' paths absolute, so that it can be run from anywhere."""
    names = {name: absolute(name, folder) for name in study.recipes}
    if len(set(names.values())) < len(names):
        raise UsageError(f"a recipe is listed twice, under two names: {', '.join(names)}")
    values = _with_names(dict(study), names, lambda name: absolute(name, folder))
    anchored = partial(_anchored, folder=folder, recipes=values["recipes"])
    values["set"] = anchored(study.set)
    values["where"] = tuple(rule.model_copy(update={"set": anchored(rule.set)}) for rule in values["where"])
    if isinstance(study, Variants):
        nested = set(study.variants) & set(study.recipes)
        values["variants"] = {
            name: {label: anchored(each) for label, each in changes.items()} if nested else anchored(changes)
            for name, changes in values["variants"].items()
        }
    return study.model_copy(update=values)


def _anchored(changes: Changes, folder: Path, recipes: Iterable[str]) -> Changes:
    """Changes whose models, tasks and options in files are named from anywhere."""
    anchored = copy.deepcopy(changes)
    stage, data = anchored.get("pretrain"), anchored.get("pretrain.data")
    if isinstance(data, str):
        anchored["pretrain.data"] = str(folder / os.path.expanduser(data))
    if isinstance(stage, dict):
        anchor_paths(anchored, folder)
    for part, kind in PARTS.items():
        if isinstance(anchored.get(part), dict):
            anchor_paths(anchored, folder)
        name = anchored.get(f"{part}.name")
        if isinstance(name, str) and is_path(name):
            name = anchored[f"{part}.name"] = str(folder / os.path.expanduser(name))
        prefix = f"{part}."
        options = {key.removeprefix(prefix): value for key, value in anchored.items() if key.startswith(prefix)}
        if not any(isinstance(value, str) for option, value in options.items() if option != "name"):
            continue
        for component in [name] if isinstance(name, str) else _component_names(recipes, part):
            for option in path_options(kind, {**options, "name": component}):
                anchored[prefix + option] = str(folder / os.path.expanduser(options[option]))
    return anchored


def _component_names(recipes: Iterable[str], part: str) -> set[str]:
    """The tasks or the models that the recipes name, so far as they can be read; the others are told when they load."""
    names = set()
    for recipe in recipes:
        with contextlib.suppress(UsageError):
            _, text, folder = read_recipe(recipe)
            raw = parse_yaml(text, recipe)
            given = raw.get(part) if isinstance(raw, dict) else None
            name = given.get("name") if isinstance(given, dict) else None
            if isinstance(name, str):
                names.add(str(folder / os.path.expanduser(name)) if is_path(name) else name)
    return names


def to_yaml(study: Study, folder: Path | None = None, comment: str = "") -> str:
    """The study as YAML. With a folder, recipes are named relative to it."""
    values = study.model_dump(mode="json")
    if folder is not None:
        names = {name: _relative(name, folder) for name in study.recipes}
        values = _with_names(values, names, lambda name: _relative(name, folder))
    text = dump_yaml({"kind": values.pop("kind"), **values})
    return f"# {comment}\n{text}" if comment else text


def _relative(recipe: str, folder: Path) -> str:
    return os.path.relpath(recipe, folder.resolve()) if os.path.isabs(recipe) else recipe


def _with_names(values: dict[str, Any], names: Mapping[str, str], rename: Callable[[str], str]) -> dict[str, Any]:
    """A study's values with its recipes renamed, also where a field has a value for each, or an arm names one."""
    renamed = {**values, "recipes": tuple(names.values())}
    if "arms" in values:
        renamed["arms"] = tuple(renamed_arm(arm, rename) for arm in values["arms"])
    for field in ("sizes", "variants", "total", "scaled"):
        if isinstance(by_recipe := values.get(field), dict):
            renamed[field] = {names.get(name, name): value for name, value in by_recipe.items()}
    renamed["where"] = tuple(_renamed_rule(rule, names) for rule in values["where"])
    return renamed


def _renamed_rule(rule: Rule | dict[str, Any], names: Mapping[str, str]) -> Rule | dict[str, Any]:
    if isinstance(rule, Rule):
        return rule.model_copy(update={"recipes": rule.recipes and tuple(names[name] for name in rule.recipes)})
    return {**rule, "recipes": rule["recipes"] and [names[name] for name in rule["recipes"]]}


def recipe_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Changes as command-line overrides; values are JSON, which YAML reads."""
    return [f"{place}={json.dumps(value)}" for place, value in changes.items()]
