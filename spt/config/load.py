"""From a name or a file to a checked recipe with every default filled in."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from spt.errors import RecipeError, UsageError, did_you_mean, one_line

if TYPE_CHECKING:
    from spt.config.plugins import Component
from spt.config.overrides import apply_overrides, flatten, parse_overrides
from spt.config.recipe import Loaded, Recipe
from spt.config.smoke import smoke_recipe
from spt.config.validation import to_json_text, validation_messages
from spt.config.yaml import MAX_BYTES, parse_yaml
from spt.runs.plan import Smoke


def packaged() -> dict[str, str]:
    """The recipes that come with spt: name -> text."""
    root = Path(str(files("spt.recipes")))
    paths = sorted(path for path in root.rglob("*.yaml") if path.parent.name != "studies")
    return {path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in paths}


def describe(text: str) -> str:
    """The first comment line of a recipe."""
    first = text.lstrip().partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def read(source: str) -> tuple[str, str, Path]:
    """(name, text, folder that relative paths start from) of a packaged recipe or a file."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or os.path.isfile(path):
        try:
            if not path.is_file():
                raise UsageError(f"no recipe file {source}" if not path.exists() else f"{source} is not a file")
            if path.stat().st_size > MAX_BYTES:
                raise UsageError(f"{source} has {path.stat().st_size:,} bytes; that is not a recipe")
            return path.stem, path.read_text(encoding="utf-8"), path.resolve().parent
        except UnicodeDecodeError:
            raise UsageError(f"{source} is not UTF-8 text") from None
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}") from None
    recipes = packaged()
    if source in recipes:
        return source, recipes[source], Path.cwd()
    hint = did_you_mean(source, recipes)
    raise UsageError(f"unknown recipe {source!r}{hint} (a file of yours ends in .yaml)")


def load(source: str, overrides: Sequence[str] = (), *, smoke: Smoke = False) -> Loaded:
    """Read, override, check and complete a recipe; its data are prepared if they are not yet.

    Raises RecipeError with every problem found, DataError for data that are missing or wrong.
    """
    name, text, folder = read(source)
    raw = parse_yaml(text, source)
    if raw is None:
        raise UsageError(f"{source} is empty")
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{source} is not a recipe: a mapping with task, model, pretrain and finetune is expected")
    given = set(flatten(raw))
    anchor_paths(raw, folder)
    changes = parse_overrides(overrides)
    notes = apply_overrides(raw, changes)
    anchor_paths(raw, Path.cwd())
    recipe, identities = resolve(raw, source)
    origins = {}
    values = flatten(recipe.model_dump(mode="json"))
    for key in values:
        changed = any(key == c or key.startswith(f"{c}.") for c in changes)
        origins[key] = "command line" if changed else "recipe" if key in given else "default"
    if smoke:
        recipe = smoke_recipe(recipe, smoke, {key for key, origin in origins.items() if origin == "command line"})
        small = flatten(recipe.model_dump(mode="json"))
        origins = {key: origins[key] if small[key] == values[key] else "smoke" for key in values}
    return Loaded(name, recipe, origins, identities, tuple(notes), smoke)


def resolve(raw: Mapping[str, Any], source: str) -> tuple[Recipe, dict[str, str]]:
    """A checked recipe, its components' defaults filled in, and the components' identities."""
    from spt.config.plugins import Kind, find_plugin

    problems: list[str] = []
    completed = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    identities: dict[str, str] = {}
    kinds: tuple[tuple[str, Kind], ...] = (("task", "tasks"), ("model", "models"))
    for place, kind in kinds:
        part = completed.get(place)
        if isinstance(part, dict) and isinstance(part.get("name"), str):
            try:
                component = find_plugin(kind, part["name"])
            except UsageError as error:
                problems.append(f"{place}.name: {error}")
                continue
            known = len(problems)
            completed[place] = _complete(component.module.Config, {**part, "name": component.name}, place, problems)
            identities[place] = component.identity
            if len(problems) == known:
                identities[place] += _content_hash(component, completed[place])
    for place in ("pretrain", "finetune"):
        stage = completed.get(place)
        if isinstance(stage, dict):
            completed[place] = _complete_objective(stage, place, problems)
    try:
        recipe = Recipe.model_validate_json(to_json_text(completed))
    except ValidationError as error:
        problems = validation_messages(Recipe, error) + problems
    if problems:
        raise RecipeError(source, problems)
    return recipe, identities


def schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors; each of our components' options under its name."""
    from spt.config.objectives import OBJECTIVE_OPTIONS
    from spt.config.plugins import find_plugin, listing

    def variants(options: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
        found = []
        for name, config in options.items():
            one = config.model_json_schema()
            one["properties"] = {"name": {"const": name}, **one.get("properties", {})}
            one["required"] = ["name", *one.get("required", [])]
            found.append(one)
        other = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"[./]"}}, "required": ["name"]}
        return {"anyOf": [*found, other]}

    root = Recipe.model_json_schema()
    root["properties"]["task"] = variants(
        {row.name: find_plugin("tasks", row.name).module.Config for row in listing("tasks")}
    )
    root["properties"]["model"] = variants(
        {row.name: find_plugin("models", row.name).module.Config for row in listing("models")}
    )
    for stage, labelled in (("Pretrain", False), ("Finetune", True)):
        known = {name: objective for name, objective in OBJECTIVE_OPTIONS.items() if objective.labelled == labelled}
        root["$defs"][stage]["properties"]["objective"] = variants(known)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root}


def _content_hash(component: "Component", part: Mapping[str, Any]) -> str:
    """What a component reads besides its own code, as a hash to go behind its name: a model's weights."""
    identity = getattr(component.module, "identity", None)
    if identity is None:
        return ""
    options = {key: value for key, value in part.items() if key != "name"}
    config = component.module.Config.model_validate_json(to_json_text(options))
    try:
        found = identity(config)
        return "@" + hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12] if found else ""
    except Exception as error:
        if component.module.__name__.startswith("spt.models."):
            raise
        raise UsageError(f"model {component.name}: identity fails with {one_line(error)}") from error


def _complete_objective(stage: dict[str, Any], place: str, problems: list[str]) -> dict[str, Any]:
    """A stage with its objective's defaults: one without labels in pretraining, one with labels in finetuning."""
    from spt.config.objectives import OBJECTIVE_OPTIONS

    labelled = place == "finetune"
    part = stage.get("objective", {})
    if isinstance(part, dict):
        part = {"name": "supervised" if labelled else "masked", **part}
    if not (isinstance(part, dict) and isinstance(part.get("name"), str)):
        return stage  # pydantic complains
    name = part["name"]
    known = {key: objective for key, objective in OBJECTIVE_OPTIONS.items() if objective.labelled == labelled}
    if name not in known:
        why = "is unknown"
        if name in OBJECTIVE_OPTIONS:
            why = "cannot train the task: it asks for no labels" if labelled else "needs labels; pretraining has none"
        problems.append(f"{place}.objective.name: {name!r} {why}; known here: {', '.join(known)}")
        return stage
    return {**stage, "objective": _complete(known[name], part, f"{place}.objective", problems)}


def _complete(config: type[BaseModel], part: dict[str, Any], place: str, problems: list[str]) -> dict[str, Any]:
    """A part with its component's defaults; the component's complaints go to `problems`."""
    options = {key: value for key, value in part.items() if key != "name"}
    try:
        checked = config.model_validate_json(to_json_text(options))
    except ValidationError as error:
        problems += validation_messages(config, error, place)
        return part
    return {"name": part["name"], **checked.model_dump(mode="json")}


def anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make a component's path, and its options that are paths, absolute: the saved recipe works from anywhere."""
    from spt.config.plugins import Kind, is_path

    kinds: tuple[tuple[str, Kind], ...] = (("task", "tasks"), ("model", "models"))
    for place, kind in kinds:
        part = raw.get(place)
        if isinstance(part, dict) and isinstance(part.get("name"), str):
            if is_path(part["name"]):
                part["name"] = str(folder / os.path.expanduser(part["name"]))
            for key in path_options(kind, part):
                part[key] = str(folder / os.path.expanduser(part[key]))


def path_options(kind: Literal["models", "tasks"], part: Mapping[str, Any]) -> set[str]:
    """The options of a component that name a place: those that its Config declares as a Path, or as a Path or a str
    and that begin like a path; none of a component that cannot be had."""
    from spt.config.plugins import find_plugin

    texts = {key: value for key, value in part.items() if key != "name" and value and isinstance(value, str)}
    if not texts:
        return set()
    try:
        fields = find_plugin(kind, part["name"]).module.Config.model_fields
    except UsageError:
        return set()  # told, with all other complaints, when the recipe is resolved
    kinds = {key: {fields[key].annotation, *get_args(fields[key].annotation)} for key in texts.keys() & fields.keys()}
    return {
        key
        for key, types in kinds.items()
        if Path in types and (str not in types or texts[key].startswith((".", "~", os.sep)))
    }
