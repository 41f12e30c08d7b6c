"""`--smoke`: the same recipe in seconds."""

from collections.abc import Container
from typing import Any

from pydantic import BaseModel, ValidationError

from spt.config.plugins import Kind, find_plugin
from spt.config.recipe import BUDGETS, Part, Recipe, Scratch, Train
from spt.config.validation import validate_values
from spt.errors import UsageError, one_line
from spt.runs.plan import Smoke


def smoke_recipe(recipe: Recipe, smoke: Smoke, kept: Container[str] = ()) -> Recipe:
    """The smoke version: the same code path, a few steps on a few rows.

    The network is small and sequences are short, unless smoke is "full"; `kept` are dotted keys whose sizes stay.
    """

    def few(train: Train, steps: int) -> Train:
        small = {**dict.fromkeys(BUDGETS), "steps": steps, "batch_size": min(4, train.batch_size), "evaluate_every": 2}
        return train.model_copy(update={**small, "warmup_steps": 0, "warmup_fraction": None, "patience": None})

    task, model = recipe.task, recipe.model
    if smoke != "full":
        kept_sizes = {name for name in task.options if f"task.{name}" in kept}
        task = _small_part("tasks", task, kept_sizes)
        kept_sizes = {name for name in model.options if f"model.{name}" in kept}
        if recipe.pretrain.head.identity:  # the width is the number of scores
            kept_sizes.add("d_model")
        if any("." in part for part in recipe.finetune.load):  # a layer by its number
            kept_sizes.add("n_layers")
        model = _small_part("models", model, kept_sizes)
    update: dict[str, Any] = {
        "task": Part(**{**task.model_dump(), "max_rows": 16, "subset_fraction": 1.0, "subset_rows": None}),
        "model": model,
        "pretrain": recipe.pretrain.model_copy(update={"train": few(recipe.pretrain.train, 4)}),
        "finetune": recipe.finetune.model_copy(update={"train": few(recipe.finetune.train, 4)}),
    }
    if recipe.scratch is not None:
        update["scratch"] = Scratch(train=few(recipe.scratch.train, 8))
    return recipe.model_copy(update=update)


def _small_part(kind: Kind, part: Part, kept: Container[str]) -> Part:
    """A task or model at its smoke sizes, but for the options in `kept`."""
    component = find_plugin(kind, part.name)
    config = component.configure(part.options)
    try:
        for name, size in config.smoke_sizes().items():
            if name not in kept:
                config = _with_small(config, name, size)
    except Exception as error:
        if component.module.__name__.startswith(f"spt.{kind}."):
            raise
        raise UsageError(f"{part.name}: smoke_sizes fails with {one_line(error)}; use --smoke-full") from error
    return Part(name=part.name, **config.model_dump(mode="json"))


def _with_small(config: BaseModel, name: str, size: int) -> BaseModel:
    """The config with this option at the smallest value, from `size` on, that its other options allow.

    At most four times `size` is tried; where no smaller value is allowed, the present one stays. null counts as larger
    than any number.
    """
    value = getattr(config, name)
    limit = 4 * size + 1 if value is None else min(value, 4 * size + 1)
    for candidate in range(size, limit):
        try:
            return validate_values(type(config), {**config.model_dump(mode="json"), name: candidate})
        except ValidationError:
            continue
    return config
