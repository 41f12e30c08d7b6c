"""`spt data`: get a task's files and prepare its splits; look at what is there."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from spt.config.load import anchor_paths, complete_part, packaged, read
from spt.config.overrides import apply_overrides, parse_overrides, split_arguments
from spt.config.plugins import find_plugin, is_path, listing
from spt.config.recipe import Part, Recipe
from spt.config.yaml import parse_yaml
from spt.data.cache import prepared_folder
from spt.data.dataset import open_task
from spt.data.fingerprints import rows_hash
from spt.data.source import cache_dir, data_dir, hook_errors, open_part
from spt.errors import SptError, UsageError, did_you_mean
from spt.runs.files import writing
from spt.runtime.signals import cleanup
from spt.tasks.files import copy_from_hub, part_of

logger = logging.getLogger(__name__)


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
    task, model = complete_part("tasks", name, raw["task"], place), raw.get("model")
    if not (isinstance(model, dict) and isinstance(model.get("name"), str)):
        return task, None
    if hasattr(find_plugin("models", model["name"]).module, "fetch"):
        return task, complete_part("models", name, model, "model")
    return task, None


def fetch_weights(part: Part) -> None:
    """Download what a model starts from, where that is missing."""
    module = find_plugin("models", part.name).module
    config = module.Config.model_validate_json(json.dumps(part.options))
    with hook_errors(f"model {part.name}", module, "fetch"):
        module.fetch(config)


def prepare(part: Part, hub: bool) -> dict[str, Any]:
    """Download what is missing, where the task knows how, and prepare the splits."""
    task, raw = open_part(part), data_dir().resolve()
    module, owner = task.component.module, f"task {part.name}"
    if hub and not hasattr(module, "hub"):
        raise UsageError(f"task {part.name} has no copy on the Hugging Face hub that we know of")
    lock = cache_dir() / "tasks" / f".fetch-{hashlib.sha256(str(raw).encode()).hexdigest()[:12]}.lock"
    with writing(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
    if hub:
        files = task.files
        if files:
            logger.info(f"{files[0]} is there already; nothing is copied from the hub")
        else:
            name, subfolder = module.hub(task.config)
            target = raw / subfolder
            unfinished = cleanup(lambda _: shutil.rmtree(part_of(target), ignore_errors=True))
            with FileLock(lock), writing(target), unfinished, hook_errors(owner, module, "hub", (SptError, OSError)):
                copy_from_hub(name, target)
    elif hasattr(module, "fetch"):
        with FileLock(lock), writing(raw), hook_errors(owner, module, "fetch", (SptError, OSError)):
            module.fetch(task.config, raw)
    folder = prepared_folder(task)
    data = open_task(part)
    return {
        "task": part.name,
        "folder": str(folder),
        "rows": {name: len(split) for name, split in data.splits.items()},
        "notes": list(data.notes),
        "data": rows_hash(data),
    }
