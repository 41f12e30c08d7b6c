"""`a.b=c` on the command line: parsed, and put into a recipe."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from spt.config.recipe import BUDGETS
from spt.config.yaml import DEEPEST, parse_yaml
from spt.errors import UsageError

_OVERRIDE = re.compile(r"^[A-Za-z_]\w*(\.\w+)*=")
_MARKS = re.compile(r"[^\w\s'\"\[\]{}~]+")  # of which YAML would begin a block, a tag or a comment


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """(recipes, overrides): an argument that begins with `a.b=` is an override."""
    recipes, overrides = list[str](), list[str]()
    for argument in arguments:
        (overrides if _OVERRIDE.match(argument) else recipes).append(argument)
    return recipes, overrides


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key.count(".") >= DEEPEST:
            raise UsageError(f"{key} has more than {DEEPEST} levels of sections, which no recipe has")
        if key in values:
            raise UsageError(f"{key} is given twice on the command line")
        marks = _MARKS.fullmatch(text.strip())
        values[key] = marks[0] if marks else parse_yaml(text, f"the value of {key}")
    return values


def apply_overrides(raw: dict[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Put command-line values into the tree; returns notes on what that dropped."""
    notes = []
    # Names first, the outer before the inner: what they drop is not what another change has set.
    # One within a section that is set as a whole has its turn: what comes later counts.
    names = [key for key in changes if key.rpartition(".")[2] == "name" and not _within_another(key, changes)]
    names.sort(key=lambda key: key.count("."))
    for key in dict.fromkeys([*names, *changes]):
        value = changes[key]
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
        if last == "norm" and path[-1:] == ["model"]:
            notes += [
                f"{key}={value} drops {option}" for option in _drop_norm_options(node, value, changes, ".".join(path))
            ]
        for group in (BUDGETS, ("warmup_steps", "warmup_fraction")):
            if last in group and value is not None and path[-1:] == ["train"]:
                for other in group:
                    if other != last and node.get(other) is not None and ".".join([*path, other]) not in changes:
                        notes.append(f"{key}={value} replaces {other}={node.pop(other)}")
        node[last] = value
    return notes


def _within_another(key: str, changes: Mapping[str, Any]) -> bool:
    return any(key.startswith(f"{other}.") for other in changes)


def _drop_options(place: str, node: dict[str, Any], name: Any, changes: Mapping[str, Any], path: str) -> list[str]:
    """When a component is replaced, keep only the options that all of its kind share (a block's feed-forward layer is
    part of what a model is)."""
    from spt.models.options import FEED_FORWARD_OPTIONS, BackboneConfig
    from spt.tasks.base import TaskConfig

    shared = {
        "model": BackboneConfig.model_fields.keys() - FEED_FORWARD_OPTIONS,
        "task": set(TaskConfig.model_fields),
    }.get(place, set())
    dropped = [key for key in node if key not in shared | {"name"} and f"{path}.{key}" not in changes]
    for key in dropped:
        del node[key]
    return dropped


def _drop_norm_options(node: dict[str, Any], norm: Any, changes: Mapping[str, Any], path: str) -> list[str]:
    """What the former norm alone had a use for."""
    from spt.models.options import BATCH_NORM_OPTIONS, BATCH_NORMS

    old = () if norm in BATCH_NORMS else [option for option in BATCH_NORM_OPTIONS if option in node]
    return [f"{option}={node.pop(option)}" for option in old if f"{path}.{option}" not in changes]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {} if value or not prefix else {prefix: value}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat
