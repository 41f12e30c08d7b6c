"""What comparing two runs and comparing two reports share: reading JSON, comparing key by key, and tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spt.errors import DataError, one_line
from spt.report.format import count_text, flops_text, ratio_text, time_text
from spt.runs.files import parse_json
from spt.runs.plan import Record

Value = Any  # of a recipe, an environment or a report: JSON
ABSENT = "-"


class Change(Record):
    """A key whose values differ, or that only one side has."""

    key: str  # dotted
    a: Value = None
    b: Value = None
    there: Literal["both", "a", "b"] = "both"  # which sides have the key


class NumberChange(Change):
    """A number of both sides, equal or not."""

    change: float | None  # b - a
    ratio: float | None  # b : a


def read_json(path: Path, advice: str) -> Any:
    """Raises DataError, which ends with the advice, where the file is unreadable or not strict JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({one_line(error)}); {advice}") from error


def equal(a: Value, b: Value) -> bool:
    """As recipes see it: 1 and 1.0 are one number, 1 and true are not equal."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def compare(a: Mapping[str, Value], b: Mapping[str, Value], missing: Value = None) -> tuple[Change, ...]:
    """Keys whose values differ; `missing` is the value of a side without the key. A list is one value."""
    keys = dict.fromkeys((*a, *b))
    return tuple(_change(key, a, b, missing) for key in keys if not (key in a and key in b and equal(a[key], b[key])))


def compare_numbers(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> tuple[NumberChange, ...]:
    """Every key of either side."""
    changes = []
    for key in dict.fromkeys((*a, *b)):
        x, y = a.get(key), b.get(key)
        difference = ratio = None
        if x is not None and y is not None:
            difference, ratio = y - x, y / x if x else None
        changes.append(NumberChange(**dict(_change(key, a, b)), change=difference, ratio=ratio))
    return tuple(changes)


def _change(key: str, a: Mapping[str, Value], b: Mapping[str, Value], missing: Value = None) -> Change:
    there: Literal["both", "a", "b"] = "both" if key in a and key in b else "a" if key in a else "b"
    return Change(key=key, a=a.get(key, missing), b=b.get(key, missing), there=there)


def cost_cells(label: str, cost: NumberChange) -> tuple[str, str, str, str]:
    """A line of a table. `{}` in the label stands for the cost's name, which the last part of its key gives."""
    axis = cost.key.rpartition(".")[2]
    name = axis.replace("_", " ").replace("flops", "FLOPs").replace("peak bytes", "peak memory")
    return label.format(name), _cost_text(cost.a, axis), _cost_text(cost.b, axis), ratio_text(cost.ratio)


def _cost_text(value: float | None, axis: str) -> str:
    if value is None:
        return ABSENT
    if axis == "flops":
        return flops_text(value)
    if axis.endswith("seconds"):
        return time_text(value)
    return f"{value / 2**20:,.0f} MiB" if axis == "peak_bytes" else count_text(value)


def value_text(value: Value) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def warning_lines(warnings: Iterable[str]) -> list[RenderableType]:
    return [Text(f"WARNING: {warning}", style="bold red") for warning in warnings]


def side_by_side(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table. Where a column is the difference or ratio of A and B, these are numbers, aligned to the right."""
    numeric = {"A", "B", "B - A", "B : A"} if {"B - A", "B : A"} & set(header) else set()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(
            Text(name), justify="right" if name in numeric else "left", no_wrap=name == "key", overflow="fold"
        )
    for line in lines:
        table.add_row(*map(Text, line))
    return table
