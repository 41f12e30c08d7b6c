"""Models made equal: the width or depth at which one recipe's network costs as much as another's. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from spt.config.job import Job
from spt.config.load import complete_part
from spt.config.overrides import apply_overrides
from spt.config.plugins import find_plugin
from spt.config.recipe import Recipe, ResolvedRecipe
from spt.errors import RecipeError, UsageError
from spt.models.options import BackboneConfig
from spt.runs.plan import factors_text
from spt.studies.costs import CostModel
from spt.studies.equal_size import TOLERANCE, nearest_scales
from spt.studies.schema import Models, Variants

_MATCHED = {"parameters": "parameters", "flops": "operations per example", "time": "seconds per example"}


class Candidate(NamedTuple):
    """A recipe that is made equal to another, and what it is called in messages."""

    label: str
    resolved: ResolvedRecipe

    def with_model(self, changes: Mapping[str, int]) -> ResolvedRecipe:
        """The recipe with other options of its model, those of `hf` by dotted place. Raises RecipeError."""
        recipe = self.resolved.recipe
        tree = {"model": recipe.model.model_dump(mode="json")}
        apply_overrides(tree, {f"model.{name}": value for name, value in changes.items()})
        model = complete_part("models", self.label, tree["model"], "model")
        return replace(self.resolved, recipe=recipe.model_copy(update={"model": model}))

    def model_config(self) -> BackboneConfig:
        """The model's options, as the model has declared them."""
        part = self.resolved.recipe.model
        config: BackboneConfig = find_plugin("models", part.name).module.Config.model_validate_json(
            json.dumps(part.options)
        )
        return config


def check_same_question(one: Candidate, first: Candidate) -> None:
    """Two recipes have the same data and are scored by the same metric."""
    mine, yours = _question(one.resolved.recipe), _question(first.resolved.recipe)
    if mine["task.name"] != yours["task.name"]:
        raise UsageError(
            f"{one.label} is on the task {mine['task.name']}, {first.label} on {yours['task.name']}, but models are "
            "compared on the same data; name recipes of one task"
        )
    if differing := sorted(key for key in mine.keys() & yours.keys() if mine[key] != yours[key]):
        values = [f"{key} ({mine[key]}, {yours[key]})" for key in differing]
        hint = " and ".join(f"{key}=…" for key in differing)
        raise UsageError(
            f"{one.label} and {first.label} differ in {' and '.join(values)}, but models are compared on the same "
            f"data, by the same metric; set {hint} for both"
        )


def _question(recipe: Recipe) -> dict[str, Any]:
    """What a recipe asks of its model: the task, and the score that is compared."""
    objective = recipe.finetune.objective.options
    metric = objective["metric"]
    asked = {"auto": ["metric", "loss"], "loss": ["metric", "loss", "class_weights"]}  # a metric that follows from them
    return {
        **{f"task.{name}": value for name, value in recipe.task.model_dump().items()},
        **{f"finetune.objective.{name}": objective[name] for name in asked.get(metric, ["metric"])},
        "finetune.train.metric_average": recipe.train("finetune").metric_average,
        "scratch.train.metric_average": recipe.train("scratch").metric_average,
    }


def equal_changes(
    study: Models | Variants, one: Candidate, first: Candidate, costs: CostModel, found: Mapping[str, int] | None
) -> Mapping[str, int]:
    """Options of a recipe's model that make it cost as much as the first one's: those `found` before, or searched for.
    Raises UsageError where no scale does."""
    if study.match == "none":
        return {}
    if found is not None:
        _check_found(study, found, one, first, costs)
        return found
    option: Literal["d_model", "n_layers"] = "d_model" if study.scale == "width" else "n_layers"
    config, given = one.model_config(), one.resolved.recipe.model.options[option]

    def options(value: int) -> dict[str, int]:
        return {} if value == given else config.at_scale(option, value)

    def accepts(value: int) -> bool:
        try:
            one.with_model(options(value))
        except RecipeError:
            return False
        return True

    def cost(value: int) -> float | None:
        try:
            return _network_cost(study, one.with_model(options(value)), costs)
        except UsageError:
            return None

    target, own = (_network_cost(study, each.resolved, costs) for each in (first, one))
    if abs(own / target - 1) <= TOLERANCE:
        return {}
    try:
        config.at_scale(option, given)
    except ValueError as error:  # it has one size
        raise UsageError(f"{one.label}: {error}; name this recipe first, which is never changed") from error
    nearest = nearest_scales(cost, given, target, accepts=accepts, enough=TOLERANCE if study.match == "time" else 0.0)
    if abs(nearest.best.cost / target - 1) > TOLERANCE:
        near = [scale for scale in (nearest.below, nearest.above) if scale]
        sizes = " and ".join(f"{_amount(study, scale.cost)} at {option}={scale.value}" for scale in near)
        raise UsageError(
            f"{one.label}: no {study.scale} makes its {_MATCHED[study.match]} equal to those of {first.label} "
            f"({_amount(study, target)}) within {100 * TOLERANCE:.0f} %; the nearest {'are' if near[1:] else 'is'} "
            f"{sizes}; change another option of either model, name this recipe first, or use "
            f"--scale {'depth' if study.scale == 'width' else 'width'} or --match none"
        )
    return options(nearest.best.value)


def _amount(study: Models | Variants, cost: float) -> str:
    return f"{cost:,.0f}" if study.match == "parameters" else f"{cost:.4g}"


def _check_found(
    study: Models | Variants, found: Mapping[str, int], one: Candidate, first: Candidate, costs: CostModel
) -> None:
    """What was found before changes the size alone, and still makes the model as large as the first; times are another
    machine's to find."""
    option: Literal["d_model", "n_layers"] = "d_model" if study.scale == "width" else "n_layers"
    try:
        sizes = one.model_config().at_scale(option, one.resolved.recipe.model.options[option])
    except ValueError:  # it has one size
        sizes = {}
    if foreign := sorted(set(found) - set(sizes)):
        known = f"only {' and '.join(sizes)}" if sizes else "nothing"
        raise UsageError(
            f"{one.label}: the study's file has {foreign[0]} under scaled, where scale {study.scale} changes {known}; "
            "take scaled out of the file, so that it is found for the recipes as they are now"
        )
    if study.match == "time":
        return
    cost, target = (_network_cost(study, recipe, costs) for recipe in (one.with_model(found), first.resolved))
    if abs(cost / target - 1) > TOLERANCE:
        raise UsageError(
            f"{one.label}: with what the study's file has under scaled ({factors_text(found) or 'no change'}) it "
            f"has {_amount(study, cost)} {_MATCHED[study.match]}, {first.label} {_amount(study, target)}; take scaled "
            "out of the file, so that it is found for the recipes as they are now"
        )


def _network_cost(study: Models | Variants, recipe: ResolvedRecipe, costs: CostModel) -> float:
    """What models are matched on, of the network that is trained on the task."""
    job = Job(recipe, "finetune", 0)
    if study.match == "time":
        return costs.seconds_per_step(job) / job.train.batch_size
    estimate = costs.estimate(job)
    return float(estimate.parameters) if study.match == "parameters" else estimate.flops / estimate.examples
