"""What comparing two runs and comparing two reports share: reading JSON, subtracting, costs and tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from rich import box
from rich.table import Table
from rich.text import Text

from spt.errors import DataError, one_line
from spt.report.format import count_text, flops_text, time_text
from spt.runs.files import parse_json

ABSENT = "-"


def read_json(path: Path, advice: str) -> Any:
    """Raises DataError, which ends with the advice, where the file is unreadable or not strict JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({one_line(error)}); {advice}") from error


def first_problem(error: ValidationError) -> str:
    """`field: what is wrong with it`."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def subtract(b: float | None, a: float | None) -> float | None:
    return None if a is None or b is None else b - a


def cost_name(axis: str) -> str:
    """A field of a cost record, as people read it."""
    return axis.replace("_", " ").replace("flops", "FLOPs").replace("peak bytes", "peak memory")


def cost_text(value: float | None, axis: str) -> str:
    if value is None:
        return ABSENT
    if axis == "flops":
        return flops_text(value)
    if axis.endswith("seconds"):
        return time_text(value)
    return f"{value / 2**20:,.0f} MiB" if axis == "peak_bytes" else count_text(value)


def side_by_side(header: Sequence[str], lines: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> Table:
    """A table whose numeric columns, given by name, are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        justify: Literal["left", "right"] = "right" if name in numeric else "left"
        table.add_column(Text(name), justify=justify, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table
