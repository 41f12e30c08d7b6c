"""From a name or a file to a checked recipe with every default filled in."""

import ast
import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from spt.config.objectives import OBJECTIVE_OPTIONS, ObjectiveOptions
from spt.config.overrides import apply_overrides, flatten, parse_overrides
from spt.config.plugins import Component, Kind, find_plugin, is_path, listing
from spt.config.recipe import Part, Recipe, ResolvedRecipe
from spt.config.smoke import smoke_recipe
from spt.config.validation import validate_values, validation_messages
from spt.config.yaml import is_file_name, parse_yaml, read_text
from spt.errors import RecipeError, UsageError, did_you_mean, one_line
from spt.runs.plan import Smoke

LONG = 180  # characters of a description
KINDS: dict[str, Kind] = {"task": "tasks", "model": "models"}  # of the components that a recipe names


def packaged() -> dict[str, str]:
    """The recipes that come with spt: name -> text."""
    root = Path(str(files("spt.recipes")))
    paths = sorted(path for path in root.rglob("*.yaml") if path.parent.name != "studies")
    return {path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in paths}


def folders() -> list[tuple[str, str]]:
    """Folders of packaged recipes, the outermost ("") first, and what their packages say that they hold."""
    root = Path(str(files("spt.recipes")))
    titles = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(root.glob("*/__init__.py"))}
    named = [(name, f"{name}: {_docstring(text)}") for name, text in titles.items() if name != "studies"]
    return [("", "To begin with"), *named]


def _docstring(text: str) -> str:
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")


def describe(text: str) -> str:
    """The first comment of a recipe or study, to the end of the sentence in which its first line ends; without that
    sentence, if it is long."""
    lines = [line.lstrip("# ").rstrip() for line in itertools.takewhile(_is_comment, text.lstrip().splitlines())]
    if not lines:
        return ""
    comment = " ".join(lines)
    ends = [found.end() for found in re.finditer(r"[.?!](?=\s|$)", comment)] or [len(comment)]
    whole = next((end for end in ends if end >= len(lines[0])), len(comment))
    before = max((end for end in ends if end < whole), default=0)
    return comment[: before if before and whole > LONG else whole]


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def read(source: str) -> tuple[str, str, Path]:
    """(name, text, folder that relative paths start from) of a packaged recipe or a file."""
    if is_file_name(source):
        path = Path(source)
        return path.stem, read_text(path, "recipe"), path.resolve().parent
    recipes = packaged()
    if source in recipes:
        return source, recipes[source], Path.cwd()
    hint = did_you_mean(source, recipes)
    raise UsageError(f"unknown recipe {source!r}{hint} (a file of yours ends in .yaml)")


def load(
    source: str, overrides: Sequence[str] = (), *, smoke: Smoke = False, changes: Sequence[Mapping[str, Any]] = ()
) -> ResolvedRecipe:
    """Read, override, check and complete a recipe; its data are prepared if they are not yet.

    `changes` are a study's, by dotted place, applied one after the other behind the overrides; a smoke run shrinks
    them too. Raises RecipeError with every problem found, DataError for data that are missing or wrong.
    """
    name, text, folder = read(source)
    raw = parse_yaml(text, source)
    if raw is None:
        raise UsageError(f"{source} is empty")
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{source} is not a recipe: a mapping with task, model, pretrain and finetune is expected")
    given = set(flatten(raw))
    anchor_paths(raw, folder)
    commanded = parse_overrides(overrides)
    notes = apply_overrides(raw, commanded)
    for more in changes:
        notes += apply_overrides(raw, copy.deepcopy(more))
    anchor_paths(raw, Path.cwd())
    recipe, identities = resolve(raw, source)
    values = flatten(recipe.model_dump(mode="json"))
    origins = {key: "recipe" if key in given else "default" for key in values}
    for source_of_values, places in (
        ("command line", commanded),
        ("study", [place for one in changes for place in one]),
    ):
        for key in values:
            if any(key == place or key.startswith(f"{place}.") for place in places):
                origins[key] = source_of_values
    if smoke:
        recipe = smoke_recipe(recipe, smoke, {key for key, origin in origins.items() if origin == "command line"})
        small = flatten(recipe.model_dump(mode="json"))
        origins = {key: origins[key] if small[key] == values[key] else "smoke" for key in values}
    return ResolvedRecipe(name, recipe, origins, identities, tuple(notes), smoke)


def load_recorded(run: Path) -> ResolvedRecipe:
    """The recipe of a run folder, of which spt writes every path absolute.

    A folder from elsewhere brings no code: raises UsageError, before anything is imported, for a model or task file
    that lies in the run folder or is named by a relative path. Else as `load`.
    """
    path = run / "recipe.yaml"
    raw = parse_yaml(read_text(path, "recipe"), str(path))
    for place, part in _components(raw if isinstance(raw, dict) else {}):
        code = Path(part["name"])
        if is_path(part["name"]) and (not code.is_absolute() or code.resolve().is_relative_to(run.resolve())):
            raise UsageError(
                f"its {place} is the file {code}, which no run records: code that comes with a run folder is not run"
            )
    return load(str(path))


def resolve(raw: Mapping[str, Any], source: str) -> tuple[Recipe, dict[str, str]]:
    """A checked recipe, its components' defaults filled in, and the components' identities."""
    problems: list[str] = []
    completed, identities = dict(raw), dict[str, str]()
    for place, part in _components(raw):
        try:
            component = find_plugin(KINDS[place], part["name"])
        except UsageError as error:
            problems.append(f"{place}.name: {error}")
            continue
        identities[place] = component.identity
        try:
            config = component.configure(_options(part))
        except ValidationError as error:
            problems += validation_messages(component.module.Config, error, place)
            continue
        completed[place] = {"name": component.name, **config.model_dump(mode="json")}
        identities[place] += _content_hash(component, config)
    for place in ("pretrain", "finetune"):
        if isinstance(stage := raw.get(place), dict):
            completed[place] = _complete_objective(stage, place, problems)
    try:
        recipe = validate_values(Recipe, completed)
    except ValidationError as error:
        problems = validation_messages(Recipe, error) + problems
    if problems:
        raise RecipeError(source, problems)
    return recipe, identities


def _components(raw: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The task and the model of a recipe, so far as they have a name."""
    for place in KINDS:
        part = raw.get(place)
        if isinstance(part, dict) and isinstance(part.get("name"), str):
            yield place, part


def _options(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "name"}


def complete_part(kind: Kind, source: str, part: Mapping[str, Any], place: str = "") -> Part:
    """A component with all its options. Raises RecipeError with every problem found."""
    component = find_plugin(kind, str(part["name"]))
    try:
        config = component.configure(_options(part))
    except ValidationError as error:
        raise RecipeError(source, validation_messages(component.module.Config, error, place)) from None
    return Part(name=component.name, **config.model_dump(mode="json"))


def _objectives(labelled: bool) -> dict[str, type[ObjectiveOptions]]:
    return {name: options for name, options in OBJECTIVE_OPTIONS.items() if options.labelled == labelled}


def schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors; each of our components' options under its name."""

    def variants(configs: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
        options = []
        for name, config in configs.items():
            own = config.model_json_schema()
            own["properties"] = {"name": {"const": name}, **own.get("properties", {})}
            own["required"] = ["name", *own.get("required", [])]
            options.append(own)
        other = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"[./]"}}, "required": ["name"]}
        return {"anyOf": [*options, other]}

    root = Recipe.model_json_schema()
    for place, kind in KINDS.items():
        configs = {row.name: find_plugin(kind, row.name).module.Config for row in listing(kind)}
        root["properties"][place] = variants(configs)
    for stage, labelled in (("Pretrain", False), ("Finetune", True)):
        root["$defs"][stage]["properties"]["objective"] = variants(_objectives(labelled))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root}


def _content_hash(component: Component, config: BaseModel) -> str:
    """What a component reads besides its own code, as a hash to go behind its name: a model's weights."""
    if not hasattr(component.module, "identity"):
        return ""
    try:
        contents = component.module.identity(config)
        text = json.dumps(contents, sort_keys=True)
    except Exception as error:
        if component.module.__name__.startswith("spt.models."):
            raise
        raise UsageError(f"model {component.name}: identity fails with {one_line(error)}") from error
    return "@" + hashlib.sha256(text.encode()).hexdigest()[:12] if contents else ""


def _complete_objective(stage: dict[str, Any], place: str, problems: list[str]) -> dict[str, Any]:
    """A stage with its objective's defaults: one without labels in pretraining, one with labels in finetuning."""
    labelled = place == "finetune"
    part = stage.get("objective", {})
    if not (isinstance(part, dict) and isinstance(part.get("name", ""), str)):
        return stage  # pydantic complains
    name, known = part.get("name", "supervised" if labelled else "masked"), _objectives(labelled)
    if name not in known:
        reason = "is unknown"
        if name in OBJECTIVE_OPTIONS:
            reason = (
                "cannot train the task: it asks for no labels" if labelled else "needs labels; pretraining has none"
            )
        problems.append(f"{place}.objective.name: {name!r} {reason}; known here: {', '.join(known)}")
        return stage
    try:
        config = validate_values(known[name], _options(part))
    except ValidationError as error:
        problems += validation_messages(known[name], error, f"{place}.objective")
        return {**stage, "objective": {"name": name}}
    return {**stage, "objective": {"name": name, **config.model_dump(mode="json")}}


def anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make a component's path, and its options that are paths, absolute: the saved recipe works from anywhere."""
    for place, part in _components(raw):
        if is_path(part["name"]):
            part["name"] = str(folder / os.path.expanduser(part["name"]))
        for key in path_options(KINDS[place], part):
            part[key] = str(folder / os.path.expanduser(part[key]))
    stage = raw.get("pretrain")
    if isinstance(stage, dict) and isinstance(stage.get("data"), str):
        stage["data"] = str(folder / os.path.expanduser(stage["data"]))


def path_options(kind: Kind, part: Mapping[str, Any]) -> set[str]:
    """The options of a component that name a place: those that its Config declares as a Path, or as a Path or a str
    and that begin like a path; none of a component that cannot be found."""
    texts = {key: value for key, value in _options(part).items() if value and isinstance(value, str)}
    if not texts:
        return set()
    try:
        fields = find_plugin(kind, part["name"]).module.Config.model_fields
    except UsageError:
        return set()  # reported with all other problems when the recipe is resolved
    kinds = {key: {fields[key].annotation, *get_args(fields[key].annotation)} for key in texts.keys() & fields.keys()}
    return {
        key
        for key, types in kinds.items()
        if Path in types and (str not in types or texts[key].startswith((".", "~", os.sep)))
    }
