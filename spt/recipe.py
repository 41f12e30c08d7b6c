"""A recipe: one self-contained YAML file that names a task, a model and what to do with them.

Precedence, lowest first: the declared default, the file, `a.b=c` on the command line. There is no inheritance between
files. Every complaint about a recipe comes at once, each with its dotted place. Importing this needs no torch;
loading a recipe does, because a component's own options are checked by the component.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spt.errors import RecipeError, UsageError, brief, did_you_mean

if TYPE_CHECKING:
    from spt.components import Component

MAX_BYTES = 1_000_000  # a recipe is a page of text
Metric = Literal[
    "auto",
    "loss",
    "accuracy",
    "f1_macro",
    "accuracy_macro",
    "mae",
    "mse",
    "r2",
    "perplexity",
    "bits_per_byte",
]
LOWER_IS_BETTER = {
    **dict.fromkeys(("loss", "mae", "mse", "perplexity", "bits_per_byte"), True),
    **dict.fromkeys(("accuracy", "f1_macro", "accuracy_macro", "r2"), False),
}
BUDGETS = ("epochs", "steps", "examples", "flops")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Part(BaseModel):
    """A component by name; its other keys are checked by the component's own Config."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str = Field(description="which one; the keys beside it are its options")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class EncoderConfig(_Strict):
    """How an input becomes a vector."""

    std: float = Field(
        1.0, gt=0, description="standard deviation of token embeddings and the hidden vector at the start"
    )
    positions: Literal["none", "circle"] = Field(
        "none",
        description="circle: cos and sin of 2 pi i / T of step i of T are two more inputs, as in the DLR paper's "
        "atomic tasks; hidden steps have them too",
    )
    frames: Literal["linear", "cnn"] = Field(
        "linear",
        description="a step that is a picture: one linear map, or two convolutions with pooling, as in the S5 paper "
        "(appendix G.3.8)",
    )
    frame_features: int = Field(30, ge=1, description="cnn: width of the layer between convolutions and d_model")


class _AnyHeadConfig(_Strict):
    mlp: bool = Field(
        False,
        description="linear, ReLU, linear instead of one linear map; of pairs linear, GELU, linear, from 4 d_model "
        "numbers to d_model",
    )


class StepHeadConfig(_AnyHeadConfig):
    """How each step's vector becomes an answer."""

    identity: bool = Field(
        False,
        description="no head: the d_model numbers of the last norm are the scores, those beyond the tokens never "
        "right; the published code's Text and Retrieval pretraining does so, by a misspelt attribute",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "StepHeadConfig":
        if self.identity and self.mlp:
            raise ValueError("identity is no head at all, so mlp has nothing to shape; keep one of them")
        return self


class HeadConfig(_AnyHeadConfig):
    """How the vectors of a sequence become one answer."""

    pool: Literal["mean", "max", "last"] = Field(
        "mean", description="over the valid steps; no part of a task that asks at every step"
    )


class Train(_Strict):
    """One stage of training. Exactly one of epochs, steps, examples, flops is its budget."""

    epochs: float | None = Field(None, gt=0, description="budget: passes over the training rows in use")
    steps: int | None = Field(None, gt=0, description="budget: optimiser steps")
    examples: int | None = Field(None, gt=0, description="budget: training sequences shown, repeats counted")
    flops: float | None = Field(None, gt=0, description="budget: analytic training operations")
    batch_size: int = Field(gt=0, description="sequences per optimiser step, over all processes and micro-batches")
    learning_rate: float = Field(gt=0, description="the peak, after warm-up")
    drop_last: bool = Field(
        False,
        description="leave out an epoch's last batch when it is not full, as the published code does; other rows are "
        "left out in every epoch",
    )
    schedule: Literal["constant", "cosine", "plateau", "steps"] = Field(
        "constant",
        description="after warm-up; cosine falls to 0, plateau when validation stops improving, steps at milestones",
    )
    plateau_factor: float = Field(0.2, gt=0, lt=1, description="plateau: what the learning rate is multiplied by")
    plateau_patience: int = Field(
        10, ge=0, description="plateau: evaluations without improvement that are borne; at one more the rate falls"
    )
    milestones: tuple[float, ...] = Field(
        (), description="steps: where the learning rate falls, as shares of all steps in (0, 1)"
    )
    step_factor: float = Field(0.5, gt=0, lt=1, description="steps: what the learning rate is multiplied by at each")
    warmup_steps: int = Field(0, ge=0, description="optimiser steps of linear warm-up")
    warmup_fraction: float | None = Field(None, ge=0, lt=1, description="the same as a share of all steps")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, decoupled")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="what decays: weight matrices, or every parameter"
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's")
    max_grad_norm: float | None = Field(1.0, gt=0, description="gradient clipping; null for none")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: matrix products in bfloat16, weights in fp32")
    evaluate_every: int | None = Field(None, gt=0, description="steps between evaluations; null: once an epoch")
    patience: int | None = Field(None, gt=0, description="evaluations without improvement before stopping; null: never")
    evaluation: Literal["exact", "batches"] = Field(
        "exact",
        description="exact: every metric from all rows of a split; batches: its mean over full batches of batch_size "
        "rows in the split's order, the last incomplete one left out, r2 by batch too, as in the published code",
    )
    validation_masks: Literal["fixed", "redrawn"] = Field(
        "fixed",
        description="what an objective hides of validation rows: the same at every evaluation, or, as in the published "
        "code, something new each time (drawn by seed and step, so that a resumed run draws the same)",
    )
    select: Metric = Field(
        "auto",
        description="validation metric that picks the checkpoint, ties by loss; auto: the objective's, else accuracy, "
        "mae (l1), mse (l2, gaussian) or bits_per_byte (language models)",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Train":
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"exactly one of {', '.join(BUDGETS)} is the budget, but {found}")
        if self.warmup_steps and self.warmup_fraction is not None:
            raise ValueError("warmup_steps and warmup_fraction are both given; keep one")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must lie in [0, 1)")
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        for name, schedule in (
            ("plateau_factor", "plateau"),
            ("plateau_patience", "plateau"),
            ("milestones", "steps"),
            ("step_factor", "steps"),
        ):
            if schedule != self.schedule and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect under schedule {self.schedule}; it belongs to {schedule}")
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule steps needs milestones, e.g. milestones: [0.5, 0.75]")
        inside = all(0 < milestone < 1 for milestone in self.milestones)
        if not inside or list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones {list(self.milestones)} must rise and lie in (0, 1): shares of all steps")
        if self.schedule == "plateau" and self.patience is not None and self.patience <= self.plateau_patience + 1:
            raise ValueError(
                f"patience {self.patience} stops the run before a rate lowered after plateau_patience "
                f"{self.plateau_patience} evaluations is ever used; raise patience or lower plateau_patience"
            )


class Pretrain(_Strict):
    """The first stage: an objective that needs no labels, on the training split's inputs."""

    objective: Part = Field(Part(name="masked"), description="what is asked of the network, without labels")
    head: StepHeadConfig = Field(StepHeadConfig(), description="how each step's vector becomes an answer")
    train: Train = Field(description="this stage's training; exactly one budget is needed")


class Finetune(_Strict):
    """The second stage: the task itself."""

    objective: Part = Field(Part(name="supervised"), description="the task's own targets")
    head: HeadConfig = Field(HeadConfig(), description="how the vectors of a sequence become one answer")
    train: Train = Field(description="this stage's training; exactly one budget is needed")


class Scratch(_Strict):
    """Training settings of the baseline, where it deserves its own: everything else is finetune's."""

    train: Train = Field(description="the baseline's training; exactly one budget is needed")


class Recipe(_Strict):
    """One experiment, complete."""

    task: Part = Field(description="the data: a task's name or a .py file, and its options")
    model: Part = Field(
        description="the network between encoder and head: a model's name or a .py file, and its options"
    )
    encoder: EncoderConfig = Field(EncoderConfig(), description="how an input becomes a vector")
    pretrain: Pretrain = Field(description="the first stage of SPT: no labels, the training split's inputs alone")
    finetune: Finetune = Field(description="the second stage of SPT, and the only one of scratch: the task itself")
    scratch: Scratch | None = Field(None, description="the baseline's own training; null: as finetune")

    def train(self, stage: Literal["pretrain", "finetune", "scratch"]) -> Train:
        if stage == "scratch":
            return (self.scratch or self.finetune).train
        return getattr(self, stage).train


@dataclass(frozen=True)
class Loaded:
    """A recipe with all defaults filled in, and where each value came from."""

    name: str
    recipe: Recipe
    origins: Mapping[str, str]  # dotted key -> "recipe", "command line", "default"
    identities: Mapping[str, str]  # what keys call "task" and "model" (a user's file by its content), and "data"
    notes: tuple[str, ...] = ()  # what loading decided that a user should know
    smoke: bool = False

    def to_yaml(self) -> str:
        header = f"# {self.name}, resolved: every default filled in.\n"
        return header + yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False)


# ---------------------------------------------------------------------------------------------- finding and reading


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


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of scalars: 1e-3 is a number; yes, no, on, off and dates are text. No aliases, no double keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not used in recipes", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key.start_mark)
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys (<<) are not used in recipes", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=True)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))  # 010 is ten, not eight


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{source}{where}: {error.problem or error}") from None
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise UsageError(f"{source} is not readable as YAML: {brief(error)}") from None


_OVERRIDE = re.compile(r"^[A-Za-z_]\w*(\.\w+)*=")


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """(recipes, overrides): an argument that begins with `a.b=` is an override."""
    found: tuple[list[str], list[str]] = ([], [])
    for argument in arguments:
        found[bool(_OVERRIDE.match(argument))].append(argument)
    return found


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key in values:
            raise UsageError(f"{key} is given twice on the command line")
        values[key] = parse_yaml(text, f"the value of {key}")
    return values


# ------------------------------------------------------------------------------------------------------- resolving


def load(source: str, overrides: Sequence[str] = (), *, smoke: bool = False) -> Loaded:
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
    notes = apply(raw, changes)
    anchor_paths(raw, Path.cwd())
    recipe, identities = resolve(raw, source)
    if smoke:
        recipe = shrink(recipe)
    from spt.store import identity

    identities["data"] = identity(recipe.task)
    origins = {}
    for key in flatten(recipe.model_dump(mode="json")):
        changed = any(key == c or key.startswith(f"{c}.") for c in changes)
        origins[key] = "command line" if changed else "recipe" if key in given else "default"
    return Loaded(name, recipe, origins, identities, tuple(notes), smoke)


def resolve(raw: Mapping[str, Any], source: str) -> tuple[Recipe, dict[str, str]]:
    """A checked recipe, its components' defaults filled in, and the components' identities."""
    from spt.components import Kind, find

    problems: list[str] = []
    completed = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    identities: dict[str, str] = {}
    kinds: tuple[tuple[str, Kind], ...] = (("task", "tasks"), ("model", "models"))
    for place, kind in kinds:
        part = completed.get(place)
        if isinstance(part, dict) and isinstance(part.get("name"), str):
            try:
                component = find(kind, part["name"])
            except UsageError as error:
                problems.append(f"{place}.name: {error}")
                continue
            known = len(problems)
            completed[place] = _complete(component.module.Config, {**part, "name": component.name}, place, problems)
            identities[place] = component.identity
            if len(problems) == known:
                identities[place] += _contents(component, completed[place])
    for place in ("pretrain", "finetune"):
        stage = completed.get(place)
        if isinstance(stage, dict):
            completed[place] = _complete_objective(stage, place, problems)
    try:
        recipe = Recipe.model_validate_json(_to_json(completed))
    except ValidationError as error:
        problems = complaints(Recipe, error) + problems
    if problems:
        raise RecipeError(source, problems)
    return recipe, identities


def shrink(recipe: Recipe) -> Recipe:
    """The smoke version: the same code path, a few steps on a few rows."""
    task = Part(**{**recipe.task.model_dump(), "limit": 16, "fraction": 1.0})

    def few(train: Train, steps: int) -> Train:
        small = {**dict.fromkeys(BUDGETS), "steps": steps, "batch_size": min(4, train.batch_size), "evaluate_every": 2}
        return train.model_copy(update={**small, "warmup_steps": 0, "warmup_fraction": None, "patience": None})

    update: dict[str, Any] = {
        "task": task,
        "pretrain": recipe.pretrain.model_copy(update={"train": few(recipe.pretrain.train, 4)}),
        "finetune": recipe.finetune.model_copy(update={"train": few(recipe.finetune.train, 4)}),
    }
    if recipe.scratch is not None:
        update["scratch"] = Scratch(train=few(recipe.scratch.train, 8))
    return recipe.model_copy(update=update)


def schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors; each of our components' options under its name."""
    from spt.components import find, listing
    from spt.objectives import OBJECTIVES

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
    root["properties"]["task"] = variants({row.name: find("tasks", row.name).module.Config for row in listing("tasks")})
    root["properties"]["model"] = variants(
        {row.name: find("models", row.name).module.Config for row in listing("models")}
    )
    for stage, labelled in (("Pretrain", False), ("Finetune", True)):
        known = {name: objective for name, objective in OBJECTIVES.items() if objective.labelled == labelled}
        root["$defs"][stage]["properties"]["objective"] = variants(known)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root}


def complaints(model: type[BaseModel], error: ValidationError, place: str = "") -> list[str]:
    """Every problem pydantic found, in our words, with its dotted place."""
    found = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"] if "[" not in str(part)]  # not which branch of a union
        dotted = ".".join([place, *location] if place else location)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"unknown key{did_you_mean(location[-1], _fields(model, location[:-1]))}"
        elif problem["type"] == "missing":
            message = "missing"
        elif problem["type"] not in ("value_error", "json_invalid"):
            shown = json.dumps(problem["input"], default=str)
            message = f"{message[0].lower()}{message[1:]}, not {shown[:60]}"
        found.append(f"{dotted}: {message}" if dotted else message)
    return found


def _contents(component: "Component", part: Mapping[str, Any]) -> str:
    """What a component reads besides its own code, as a hash to go behind its name: a model's weights."""
    identity = getattr(component.module, "identity", None)
    if identity is None:
        return ""
    options = {key: value for key, value in part.items() if key != "name"}
    config = component.module.Config.model_validate_json(_to_json(options))
    try:
        found = identity(config)
        return "@" + hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12] if found else ""
    except Exception as error:
        if component.module.__name__.startswith("spt.models."):
            raise
        raise UsageError(f"model {component.name}: identity fails with {brief(error)}") from error


def _complete_objective(stage: dict[str, Any], place: str, problems: list[str]) -> dict[str, Any]:
    """A stage with its objective's defaults: one without labels in pretraining, one with labels in finetuning."""
    from spt.objectives import OBJECTIVES

    labelled = place == "finetune"
    part = stage.get("objective", {})
    if isinstance(part, dict):
        part = {"name": "supervised" if labelled else "masked", **part}
    if not (isinstance(part, dict) and isinstance(part.get("name"), str)):
        return stage  # pydantic complains
    name = part["name"]
    known = {key: objective for key, objective in OBJECTIVES.items() if objective.labelled == labelled}
    if name not in known:
        why = "is unknown"
        if name in OBJECTIVES:
            why = "cannot train the task: it asks for no labels" if labelled else "needs labels; pretraining has none"
        problems.append(f"{place}.objective.name: {name!r} {why}; known here: {', '.join(known)}")
        return stage
    return {**stage, "objective": _complete(known[name], part, f"{place}.objective", problems)}


def _complete(config: type[BaseModel], part: dict[str, Any], place: str, problems: list[str]) -> dict[str, Any]:
    """A part with its component's defaults; the component's complaints go to `problems`."""
    options = {key: value for key, value in part.items() if key != "name"}
    try:
        checked = config.model_validate_json(_to_json(options))
    except ValidationError as error:
        problems += complaints(config, error, place)
        return part
    return {"name": part["name"], **checked.model_dump(mode="json")}


def _to_json(value: Any) -> str:
    # Through JSON, because pydantic's strict mode there still takes a list for a tuple.
    return json.dumps(value, default=str)


def _fields(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The known keys at a place inside a nested model."""
    for step in location:
        known = model.model_fields.get(step)
        candidates = [known.annotation, *getattr(known.annotation, "__args__", ())] if known else []
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def apply(raw: dict[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Put command-line values into the tree; returns what that dropped, in words."""
    notes = []
    for key, value in changes.items():
        *path, last = key.split(".")
        node = raw
        for step in path:
            if node.get(step) is None:
                node[step] = {}
            node = node[step]
            if not isinstance(node, dict):
                raise UsageError(f"{key}={value}: {step} is a value in this recipe, not a section")
        if last == "name" and path and node.get("name") != value:
            dropped = _drop_options(path[-1], node, value, changes, ".".join(path))
            if dropped:
                notes.append(f"{key}={value} drops the old options {', '.join(dropped)}")
        for group in (BUDGETS, ("warmup_steps", "warmup_fraction")):
            if last in group and value is not None:
                for other in group:
                    if other != last and node.get(other) is not None and ".".join([*path, other]) not in changes:
                        notes.append(f"{key}={value} replaces {other}={node.pop(other)}")
        node[last] = value
    return notes


def _drop_options(place: str, node: dict[str, Any], name: Any, changes: Mapping[str, Any], path: str) -> list[str]:
    """When a component is replaced, keep only the options that all of its kind share (a block's feed-forward layer is
    part of what a model is)."""
    from spt.models.base import FEED_FORWARD, BackboneConfig
    from spt.tasks.base import TaskConfig

    shared = {"model": BackboneConfig.model_fields.keys() - FEED_FORWARD, "task": set(TaskConfig.model_fields)}.get(
        place, set()
    )
    dropped = [key for key in node if key not in shared | {"name"} and f"{path}.{key}" not in changes]
    for key in dropped:
        del node[key]
    return dropped


def anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make a component's path, and its options that are paths, absolute: the saved recipe works from anywhere."""
    from spt.components import Kind, is_path

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
    from spt.components import find

    texts = {key: value for key, value in part.items() if key != "name" and value and isinstance(value, str)}
    if not texts:
        return set()
    try:
        fields = find(kind, part["name"]).module.Config.model_fields
    except UsageError:
        return set()  # told, with all other complaints, when the recipe is resolved
    kinds = {key: {fields[key].annotation, *get_args(fields[key].annotation)} for key in texts.keys() & fields.keys()}
    return {
        key
        for key, types in kinds.items()
        if Path in types and (str not in types or texts[key].startswith((".", "~", os.sep)))
    }


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {} if value or not prefix else {prefix: value}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat
