"""Benchmark results as tables for a terminal."""

from itertools import groupby
from pathlib import Path
from typing import Any

from spt.bench.timing import PARTS


def render(found: dict[str, Any]) -> Any:
    """The same for a terminal."""
    from rich.console import Group
    from rich.text import Text

    where = found["environment"]
    facts = [f"{where['device']}, {where['threads']} threads, torch {where['packages']['torch']}"]
    if found["kind"] == "task":
        return Group(_task_table(found), Text(f"\n{facts[0]}", style="dim"))
    facts.append(f"medians of {found['rounds']} rounds, ratios to the first row of the same round")
    if found["kind"] == "model":
        return Group(_models_table(found), _shares_table(found), Text("\n" + "; ".join(facts), style="dim"))
    facts.append("errors against double precision, relative to the largest entry")
    return Group(*_operation_tables(found), Text("\n" + "; ".join(facts), style="dim"))


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=i > 0)
    return made


VARIED = {
    "length": "length",
    "batch": "batch",
    "precision": "precision",
    "backend": "back end",
    "attention": "attention",
    "compiled": "compiled",
}


def _models_table(found: dict[str, Any]) -> Any:
    rows, varied = found["rows"], _varied(found["rows"])
    same = ", ".join(f"{VARIED[key]} {_plain(rows[0][key])}" for key in VARIED if key not in varied)
    times = ("forward", "backward", "optimiser", "step")
    made = _table(f"a training step, {same}: milliseconds, MiB", _heading(varied), *times, "ratio", "peak", "ratio")
    for row in rows:
        if row["failed"]:
            made.add_row(_name(row, varied), row["failed"])
            continue
        milliseconds = [_milliseconds(row["seconds"][part]) for part in times]
        made.add_row(_name(row, varied), *milliseconds, _ratio(row["ratio"]["step"]), *_memory(row))
    return made


def _shares_table(found: dict[str, Any]) -> Any:
    rows = [row for row in found["rows"] if not row["failed"]]
    varied, parts = _varied(found["rows"]), [part for part in PARTS if any(row["shares"][part] > 0 for row in rows)]
    made = _table("\nits parts, %", _heading(varied), *(SHORT.get(part, part) for part in parts))
    for row in rows:
        made.add_row(_name(row, varied), *(f"{100 * row['shares'][part]:.1f}" for part in parts))
    return made


SHORT = {"convolution": "conv", "attention": "attn"}  # so that they stand side by side


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """What the rows differ in, besides the model."""
    return [key for key in VARIED if len({row[key] for row in rows}) > 1]


def _heading(varied: list[str]) -> str:
    return ", ".join(["model", *(VARIED[key] for key in varied)])


def _name(row: dict[str, Any], varied: list[str]) -> str:
    values = [f"compiled: {_plain(row[key])}" if key == "compiled" else _plain(row[key]) for key in varied]
    return ", ".join([f"{Path(row['model']).stem} {row['given']}".strip(), *values])


def _plain(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def _operation_tables(found: dict[str, Any]) -> list[Any]:
    tables: list[Any] = []
    for name, group in groupby(found["rows"], key=lambda row: row["operation"]):
        rows = list(group)
        sizes = " ".join(f"{letter}={size}" for letter, size in rows[0]["sizes"].items())
        columns = ("forward", "backward", "step", "ratio", "peak", "ratio", "error", "gradients'")
        made = _table(f"{name} {sizes}: milliseconds, MiB", "", *columns)
        for row in rows:
            milliseconds = [_milliseconds(row["seconds"][part]) for part in ("forward", "backward", "step")]
            errors = [f"{row[key]:.1e}" for key in ("error", "gradient_error")]
            made.add_row(row["backend"], *milliseconds, _ratio(row["ratio"]["step"]), *_memory(row), *errors)
        tables.append(made)
    return tables


def _task_table(found: dict[str, Any]) -> Any:
    rows = ", ".join(f"{name} {count:,}" for name, count in found["rows"].items())
    made = _table(
        f"{Path(found['task']).stem}: {rows} rows of up to {found['length']:,} steps",
        "",
        "ms",
        "examples/s",
        "positions/s",
    )
    titles = {"generate": "generate", "open": "open prepared data"}
    if found["generated"]:
        titles["generate"] = f"generate {found['generated']['rows']:,} rows, {found['generated']['workers']} at once"
        found["examples_per_second"]["generate"] = found["generated"]["rows_per_second"]
    titles |= {"batch": f"a batch of {found['batch']:,}", "masked": "the same, and hide 15 % of it"}
    titles |= {"resampled": "a batch of resampled rows"}
    for kind, title in titles.items():
        seconds = found["seconds"].get(kind)
        rates = [found[f"{of}_per_second"].get(kind) for of in ("examples", "positions")]
        if seconds is not None:
            made.add_row(title, _milliseconds(seconds), *(f"{rate:,.0f}" if rate else "" for rate in rates))
    return made


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _memory(row: dict[str, Any]) -> tuple[str, str]:
    peak, ratio = row["peak_bytes"], row["peak_ratio"]
    shown = "" if peak is None else f"{peak / 2**20:,.1f}"
    return shown, "" if ratio is None else _ratio(ratio)


def _ratio(value: float) -> str:
    return f"×{value:.2f}" if value >= 0.1 else f"×{value:.2g}"
