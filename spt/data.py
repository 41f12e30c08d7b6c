"""`spt data`: get a task's files and prepare its splits; look at what is there."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import ValidationError

from spt.components import Kind, find, is_path, listing
from spt.errors import DataError, RecipeError, SptError, UsageError, brief, did_you_mean
from spt.recipe import (
    Part,
    Recipe,
    anchor_paths,
    apply,
    complaints,
    packaged,
    parse_overrides,
    parse_yaml,
    read,
    split_arguments,
)
from spt.run import writing
from spt.store import cache_dir, data_dir, fingerprints, from_hub, open_part, open_task, prepared, rows_hash
from spt.tasks.base import Classes, Split, TaskData, Tokens, Values

Say = Callable[[str], None]


def chosen_task(arguments: Iterable[str]) -> Part:
    """The task a command line means: `images dataset=mnist`, or `recipe.yaml task.fraction=0.3`."""
    return chosen(arguments)[0]


def chosen(arguments: Iterable[str]) -> tuple[Part, Part | None]:
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
    apply(raw, changes)
    anchor_paths(raw, Path.cwd())
    if not (isinstance(raw["task"], dict) and isinstance(raw["task"].get("name"), str)):
        raise UsageError(f"{name} is not a recipe: it has no task with a name")
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        reads = hasattr(find("models", model["name"]).module, "fetch")
        return _checked("tasks", name, raw["task"], place), _checked("models", name, model, "model") if reads else None
    return _checked("tasks", name, raw["task"], place), None


def _checked(kind: Kind, source: str, part: Mapping[str, Any], place: str) -> Part:
    """The part with its options checked and completed."""
    component = find(kind, str(part["name"]))
    options = {key: value for key, value in part.items() if key != "name"}
    try:
        config = component.module.Config.model_validate_json(json.dumps(options, default=str))
    except ValidationError as error:
        raise RecipeError(source, complaints(component.module.Config, error, place)) from None
    return Part(name=component.name, **config.model_dump(mode="json"))


def fetch_weights(part: Part, say: Say) -> None:
    """Download what a model starts from, where that is missing."""
    module = find("models", part.name).module
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
        raise DataError(f"model {part.name}: fetch fails with {brief(error)}") from error


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
                raise DataError(f"task {part.name}: fetch fails with {brief(error)}") from error
    folder = prepared(opened)
    data = open_task(part)
    return {
        "task": part.name,
        "folder": str(folder),
        "rows": {name: len(split) for name, split in data.splits.items()},
        "notes": list(data.notes),
        "data": rows_hash(data),
    }


def check(part: Part) -> dict[str, Any]:
    """What the task's data are, from the prepared rows in use. Raises DataError when they are missing or damaged."""
    opened = open_part(part)
    folder, data = prepared(opened), open_task(part)
    files = opened.files
    data.check()
    for name, split in data.splits.items():
        if not np.array_equal(fingerprints(split), split.fingerprints):
            raise DataError(f"the prepared data in {folder} are damaged ({name}); delete the folder, it is made again")
    found: dict[str, Any] = {
        "task": part.name,
        "options": part.options,
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in files],
        "notes": list(data.notes),
        "rows": {name: len(split) for name, split in data.splits.items()},
        "lengths": {name: _spread(split.lengths) for name, split in data.splits.items()},
        "input": str(data.input),
        **_inputs(data),
        "target": str(data.target),
        "targets": {name: _targets(data, split) for name, split in data.splits.items()},
        "chance": data.chance(),
        "guesses": _guesses(data),
        "duplicates": _duplicates(data),
        "folder": str(folder),
        "data": rows_hash(data),
    }
    return found


def _spread(numbers: NDArray[Any]) -> dict[str, int | float]:
    return {"min": int(numbers.min()), "median": float(np.median(numbers)), "max": int(numbers.max())}


def _inputs(data: TaskData) -> dict[str, Any]:
    """Range of the values, or how much of the splits the vocabulary covers."""
    if not isinstance(data.input, Tokens):
        return {"values": {name: _range(split) for name, split in data.splits.items()}}
    if data.input.codes is None or data.input.unknown is None:
        return {"vocabulary": data.input.vocab}
    shares = {}
    for name, split in data.splits.items():
        counts = split.counts()
        tokens = data.input.ids(np.arange(len(counts)))
        shares[name] = float(counts[tokens == data.input.unknown].sum() / counts.sum())
    return {"vocabulary": data.input.vocab, "unknown": shares}


def _range(split: Split) -> dict[str, float]:
    ends = [(float(piece.min()), float(piece.max())) for piece in split.pieces()]
    return {"min": min(low for low, _ in ends), "max": max(high for _, high in ends)}


def _targets(data: TaskData, split: Split) -> list[int] | dict[str, list[float]]:
    """How many rows of each class; or each target's range."""
    targets = np.asarray(split.targets)
    if isinstance(data.target, Classes):
        return np.bincount(targets, minlength=data.target.count).tolist()
    return {"min": targets.min(axis=0).tolist(), "mean": targets.mean(axis=0).tolist(), "max": targets.max(0).tolist()}


def _guesses(data: TaskData) -> dict[str, float]:
    """Validation losses of answers that look at no context, which a denoiser has to beat.

    cross_entropy: nats, always answering with the training frequencies (one is added to every count); l1: standardised,
    always answering with the training median of the channel.
    """
    found: dict[str, float] = {}
    if isinstance(data.input, Tokens) or data.input.levels is not None:
        size = data.input.vocab if isinstance(data.input, Tokens) else data.input.levels or 0
        train, val = (_frequencies(data, split, size) for split in (data.train, data.val))
        guess = (train + 1) / (train + 1).sum()
        found["cross_entropy"] = float(-(val * np.log(guess)).sum() / val.sum())
    if isinstance(data.input, Values):
        median = np.median(np.concatenate(list(data.train.pieces())), axis=0)  # (C,)
        apart = sum(np.abs(piece - median).sum(axis=0) for piece in data.val.pieces())
        found["l1"] = float(np.mean(apart / int(data.val.lengths.sum()) / np.array(data.input.std)))
    return found


def _frequencies(data: TaskData, split: Split, size: int) -> NDArray[np.int64]:
    """How often each token or level occurs."""
    counts = split.counts()
    ids = data.input.ids(np.arange(len(counts))) if isinstance(data.input, Tokens) else np.arange(len(counts))
    return np.bincount(ids, weights=counts, minlength=size).astype(np.int64)


def _duplicates(data: TaskData) -> dict[str, int]:
    """Rows whose input stands before in the same split, and rows of one split whose input also stands in another."""
    splits = data.splits
    within = {name: len(split) - len(np.unique(split.fingerprints)) for name, split in splits.items()}
    between = {
        f"{one} also in {other}": int(np.isin(splits[one].fingerprints, splits[other].fingerprints).sum())
        for one, other in (("val", "train"), ("test", "train"), ("val", "test"))
    }
    return within | between


def render(found: Mapping[str, Any]) -> str:
    """The same as one page."""
    lines = [f"task      {found['task']}  " + ", ".join(f"{k}={json.dumps(v)}" for k, v in found["options"].items())]
    files = [f"{file['path']}  {file['bytes']:,} bytes" for file in found["files"]]
    lines += _labelled("files", files or ["none named by the task"])
    lines += _labelled("notes", found["notes"])
    lines += ["", f"          {'rows':>8}   {'length: min':>11} {'median':>9} {'max':>9}"]
    for name, rows in found["rows"].items():
        spread = found["lengths"][name]
        lines.append(f"{name:<9} {rows:>8,}   {spread['min']:>11,} {spread['median']:>9,.0f} {spread['max']:>9,}")
    lines += ["", f"input     {found['input']}"]
    for name, spread in found.get("values", {}).items():
        lines.append(f"          {name}: values {spread['min']:g} to {spread['max']:g}")
    for name, share in found.get("unknown", {}).items():
        lines.append(f"          {name}: {share:.3%} unknown")
    lines.append(f"target    {found['target']}")
    for name, targets in found["targets"].items():
        lines.append(f"          {name}: {_target_line(targets)}")
    if found["chance"] is not None:
        lines.append(f"chance    {found['chance']:.2%} of the test rows have the commonest training class")
    guesses = ", ".join(f"{name} {value:.4g}" for name, value in found["guesses"].items())
    lines.append(f"guesses   {guesses}: losses on validation inputs without a look at their neighbours")
    repeated = [f"{name} {count:,}" for name, count in found["duplicates"].items() if count]
    lines.append(f"repeated  {', '.join(repeated) or 'no input stands twice'}")
    lines += ["", f"prepared  {found['folder']}", f"data      {found['data']}"]
    return "\n".join(lines)


def _labelled(label: str, lines: list[str]) -> list[str]:
    return [f"{label if i == 0 else '':<9} {line}" for i, line in enumerate(lines)]


def _target_line(targets: list[int] | Mapping[str, list[float]]) -> str:
    if not isinstance(targets, Mapping):
        shown = [f"{count:,}" for count in targets[:20]]
        return f"rows a class {' '.join(shown)}{' …' if len(targets) > 20 else ''}"
    return ", ".join(f"{name} {' '.join(f'{v:.4g}' for v in values[:8])}" for name, values in targets.items())
