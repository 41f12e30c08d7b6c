"""Recipes and studies as YAML: numbers as in YAML 1.2, no aliases, no duplicate keys."""

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from spt.errors import UsageError, one_line, visible

MAX_BYTES = 1_000_000  # a recipe is a page of text
DEEPEST = 32  # levels of sections and lists; a recipe has a handful


class RecipeLoader(yaml.SafeLoader):
    """YAML 1.2's idea of scalars: 1e-3 is a number; yes, no, on, off and dates are text. No aliases, no double keys."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not used in recipes", problem_mark=event.start_mark)
        self.level += 1
        if self.level > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels of sections and lists", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = dict[str, Any]()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key.start_mark)
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys (<<) are not used in recipes", problem_mark=key.start_mark
                )
            # As text, also of numbers: for Python 1, 1.0 and true are one key, and one of them would be lost.
            name = self.construct_object(key)
            name = name if isinstance(name, str) else json.dumps(name, default=str)
            if name in mapping:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice", problem_mark=key.start_mark)
            mapping[name] = self.construct_object(value, deep=True)
        return mapping


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)", "-+.0123456789"),
):
    RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


RecipeLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))  # 010 is ten, not eight


def is_file_name(source: str | Path) -> bool:
    """Does this name a user's file, rather than a recipe or study that comes with spt?"""
    return os.path.splitext(source)[1] in (".yaml", ".yml") or os.path.isfile(source)


def read_text(source: str | Path, kind: str) -> str:
    """The text of a recipe's or study's file. Raises UsageError for one that cannot be read."""
    path = Path(source)
    try:
        if not path.is_file():
            raise UsageError(f"{source} is not a file" if path.exists() else f"no {kind} file {source}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UsageError(f"{source} has {size:,} bytes; that is not a {kind}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from None


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{source}{where}: {error.problem or error}") from None
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise UsageError(f"{source} is not readable as YAML: {one_line(error)}") from None


def dump_yaml(values: dict[str, Any], width: int = 80) -> str:
    """As a file that reads back the same, in the order given. Characters that would act on a terminal are escaped."""
    text = str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=width))
    return text if visible(text) == text else str(yaml.safe_dump(values, sort_keys=False, width=width))
