"""`spt data`: get a task's files and prepare its splits; look at what is there."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import ValidationError

from spt.config.load import anchor_paths, packaged, read
from spt.config.overrides import apply_overrides, parse_overrides, split_arguments
from spt.config.plugins import Kind, find_plugin, is_path, listing
from spt.config.recipe import Part, Recipe
from spt.config.validation import validation_messages
from spt.config.yaml import parse_yaml
from spt.data.cache import prepared_folder
from spt.data.dataset import open_task
from spt.data.fingerprints import rows_hash
from spt.data.source import cache_dir, data_dir, from_hub, open_part
from spt.errors import DataError, RecipeError, SptError, UsageError, did_you_mean, one_line
from spt.runs.files import writing

Say = Callable[[str], None]


def task_from_arguments(arguments: Iterable[str]) -> Part:
    """The task a command line means: `images dataset=mnist`, or `recipe.yaml task.subset_fraction=0.3`."""
    return parts_from_arguments(arguments)[0]


def parts_from_arguments(arguments: Iterable[str]) -> tuple[Part, Part | None]:
    """The same, and the recipe's model if it is one that reads weights."""
    names, overrides = split_arguments(arguments)
    if len(names) != 1:
        raise UsageError(f"one recipe or task is expected, not {', '.join(names) or 'none'} (spt list tasks)")
    name, changes = names[0], parse_overrides(overrides)
    recipes, tasks = packaged(), {row.name for row in listing("tasks")}
    raw: dict[str, Any]
    if name in recipes or name.endswith((".yaml", ".yml")):
        strange = [key for key in changes if key.partition(".")[0] not in Recipe.model_fields]
        if strange:
            raise UsageError(
                f"{strange[0]}: unknown key{did_you_mean(strange[0].partition('.')[0], Recipe.model_fields)}"
            )
        _, text, folder = read(name)
        whole = parse_yaml(text, name)
        raw = {part: whole.get(part) for part in ("task", "model")} if isinstance(whole, dict) else {"task": None}
        changes = {key: value for key, value in changes.items() if key.partition(".")[0] in raw}
        place = "task"
    elif name in tasks or is_path(name) or ("." in name and not os.path.exists(name)):
        raw = {"task": {"name": name}}
        place, folder = "", Path.cwd()
        changes = {f"task.{key.removeprefix('task.')}": value for key, value in changes.items()}
    else:
        hint = did_you_mean(name, set(recipes) | tasks)
        raise UsageError(f"unknown recipe or task {name!r}{hint} (a recipe of yours ends in .yaml, a task in .py)")
    anchor_paths(raw, folder)
    apply_overrides(raw, changes)
    anchor_paths(raw, Path.cwd())
    if not (isinstance(raw["task"], dict) and isinstance(raw["task"].get("name"), str)):
        raise UsageError(f"{name} is not a recipe: it has no task with a name")
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        reads = hasattr(find_plugin("models", model["name"]).module, "fetch")
        return _checked("tasks", name, raw["task"], place), _checked("models", name, model, "model") if reads else None
    return _checked("tasks", name, raw["task"], place), None


def _checked(kind: Kind, source: str, part: Mapping[str, Any], place: str) -> Part:
    """The part with its options checked and completed."""
    component = find_plugin(kind, str(part["name"]))
    options = {key: value for key, value in part.items() if key != "name"}
    try:
        config = component.module.Config.model_validate_json(json.dumps(options, default=str))
    except ValidationError as error:
        raise RecipeError(source, validation_messages(component.module.Config, error, place)) from None
    return Part(name=component.name, **config.model_dump(mode="json"))


def fetch_weights(part: Part, say: Say) -> None:
    """Download what a model starts from, where that is missing."""
    module = find_plugin("models", part.name).module
    config = module.Config.model_validate_json(json.dumps(part.options))
    try:
        module.fetch(config, say)
    except SptError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"model {part.name}: {error}") from error
    except Exception as error:
        if module.__name__.startswith("spt.models."):
            raise
        raise DataError(f"model {part.name}: fetch fails with {one_line(error)}") from error


def prepare(part: Part, hub: bool, say: Say) -> dict[str, Any]:
    """Download what is missing, where the task knows how, and prepare the splits."""
    opened, raw = open_part(part), data_dir().resolve()
    module = opened.component.module
    if hub and not hasattr(module, "hub"):
        raise UsageError(f"task {part.name} has no copy on the Hugging Face hub that we know of")
    lock = cache_dir() / "tasks" / f".fetch-{hashlib.sha256(str(raw).encode()).hexdigest()[:12]}.lock"
    with writing(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
    if hub:
        there = opened.files
        if there:
            say(f"{there[0]} is there already; nothing is copied from the hub")
        else:
            name, folder = module.hub(opened.config)
            with FileLock(lock):
                from_hub(name, raw / folder)
    elif hasattr(module, "fetch"):
        with FileLock(lock), writing(raw):
            try:
                module.fetch(opened.config, raw, say)
            except (OSError, SptError):
                raise
            except ValueError as error:
                raise DataError(f"task {part.name}: {error}") from error
            except Exception as error:
                if module.__name__.startswith("spt.tasks."):
                    raise
                raise DataError(f"task {part.name}: fetch fails with {one_line(error)}") from error
    folder = prepared_folder(opened)
    data = open_task(part)
    return {
        "task": part.name,
        "folder": str(folder),
        "rows": {name: len(split) for name, split in data.splits.items()},
        "notes": list(data.notes),
        "data": rows_hash(data),
    }
