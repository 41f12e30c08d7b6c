"""Benchmark results as tables for a terminal."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from spt.bench.timing import PARTS


def render(result: dict[str, Any]) -> Any:
    """A result of a function `bench_…`, for a terminal."""
    from rich.console import Group
    from rich.text import Text

    environment = result["environment"]
    device = environment["cpu"] if environment["device"] == "cpu" else environment["device"]
    threads = environment["threads"]
    facts = [f"{device}, {threads} thread{'s' * (threads != 1)}, torch {environment['packages']['torch']}"]
    if result["kind"] == "task":
        return Group(_task_table(result), Text(f"\n{facts[0]}", style="dim"))
    if result["kind"] == "device":
        return Group(_device_table(result), Text(f"\n{facts[0]}", style="dim"))
    if result["kind"] == "slopes":
        facts.append(f"one sequence, medians of {result['rounds']} steps or more, each row in a process of its own")
        time = _slopes_table(
            result, "a training step, milliseconds", "seconds", lambda row: _milliseconds(row["seconds"]["step"])
        )
        memory = _slopes_table(result, "\npeak memory of a training step, MiB", "peak_bytes", _mebibytes)
        return Group(time, memory, Text("\n" + "; ".join([*facts, *_left_out(result)]), style="dim"))
    first = "first row" + (" of the same recipe and length" if result["kind"] == "study" else "")
    facts.append(f"medians of {result['rounds']} rounds, ratios to the {first} of the same round")
    if result["kind"] == "study":
        return Group(_study_table(result), Text("\n" + "; ".join(facts), style="dim"))
    if result["kind"] == "model":
        facts.append("launches: operations of a step on a GPU, counted without one")
        return Group(_models_table(result), _shares_table(result), Text("\n" + "; ".join(facts), style="dim"))
    facts.append("errors against double precision, relative to the largest entry")
    return Group(*_operation_tables(result), Text("\n" + "; ".join(facts), style="dim"))


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i > 0)
    return table


def _device_table(result: dict[str, Any]) -> Any:
    table = _table(f"square matrices of {result['side']:,}", "", "a second")
    for precision, rate in result["flops_per_second"].items():
        table.add_row(f"products, {precision}", f"{rate / 1e9:,.0f} GFLOP")
    table.add_row("copies, read and written", f"{result['bytes_per_second'] / 1e9:,.1f} GB")
    return table


VARIED = {
    "length": "length",
    "batch": "batch",
    "precision": "precision",
    "backend": "back end",
    "attention": "attention",
    "compiled": "compiled",
    "cuda_graphs": "CUDA graphs",
}


def _models_table(result: dict[str, Any]) -> Any:
    rows, varied = result["rows"], _varied(result["rows"])
    same = ", ".join(f"{VARIED[key]} {_value_text(rows[0][key])}" for key in VARIED if key not in varied)
    times = ("forward", "backward", "optimiser", "step")
    table = _table(
        f"a training step, {same}: milliseconds, MiB", _heading(varied), *times, "ratio", "peak", "ratio", "launches"
    )
    for row in rows:
        if row["failed"]:
            table.add_row(_name(row, varied), row["failed"])
            continue
        milliseconds = [_milliseconds(row["seconds"][part]) for part in times]
        table.add_row(_name(row, varied), *milliseconds, _ratio(row["ratio"]["step"]), *_memory(row), _launches(row))
    return table


def _launches(row: dict[str, Any]) -> str:
    return "" if row["launches"] is None else f"{sum(row['launches'].values()):,}"


def _shares_table(result: dict[str, Any]) -> Any:
    rows = [row for row in result["rows"] if not row["failed"]]
    varied, parts = _varied(result["rows"]), [part for part in PARTS if any(row["shares"][part] > 0 for row in rows)]
    table = _table("\nshares of its parts, %", _heading(varied), *(SHORT.get(part, part) for part in parts))
    for row in rows:
        table.add_row(_name(row, varied), *(f"{100 * row['shares'][part]:.1f}" for part in parts))
    return table


def _study_table(result: dict[str, Any]) -> Any:
    rows = result["rows"]
    relative = {"relative_time": "time", "relative_throughput": "throughput"}  # the second only beside a published one
    relative = {
        key: name for key, name in relative.items() if name == "time" or any(key in r["published"] for r in rows)
    }
    columns = [title for name in relative.values() for title in (name, "published")]
    table = _table(
        f"{result['study']}: an optimiser step", "recipe, level", "length", "batch", "parameters", "ms", *columns
    )
    for row in rows:
        sizes = [f"{row[key]:,}" for key in ("length", "batch", "parameters")]
        shown = [row["failed"] or _milliseconds(row["seconds_per_step"])]
        for key in relative:
            ours, theirs = row.get(key), row["published"].get(key)
            shown += ["" if ours is None else _ratio(ours), "" if theirs is None else f"×{theirs:g}"]
        table.add_row(", ".join(filter(None, (row["recipe"], row["level"]))), *sizes, *shown)
    return table


SHORT = {"convolution": "conv", "attention": "attn"}  # so that all columns fit


def _slopes_table(result: dict[str, Any], title: str, key: str, text: Callable[[dict[str, Any]], str]) -> Any:
    """A line for every length, and the exponents."""
    fits = result["exponents"]
    table = _table(title, "length", *(_name(fit, []) for fit in fits))
    by_length: dict[int, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_length.setdefault(row["length"], []).append(row)
    for length, rows in by_length.items():
        table.add_row(f"{length:,}", *("–" if row["failed"] else text(row) for row in rows))
    table.add_row("exponent", *("–" if fit[key] is None else f"{fit[key]:.2f}" for fit in fits))
    return table


def _left_out(result: dict[str, Any]) -> list[str]:
    """What the exponents are fitted to, and what was not measured."""
    ranges = {f"{fit['lengths'][0]:,} to {fit['lengths'][-1]:,}" for fit in result["exponents"] if fit["lengths"]}
    lacking = [row for row in result["rows"] if row["failed"] not in (None, "not tried")]
    return [
        f"exponents over lengths {' or '.join(sorted(ranges))}",
        *(f"{_name(row, [])} left out from {row['length']:,} on: {row['failed']}" for row in lacking),
    ]


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """The settings in which the rows differ, besides the model."""
    return [key for key in VARIED if len({row[key] for row in rows}) > 1]


def _heading(varied: list[str]) -> str:
    return ", ".join(["model", *(VARIED[key] for key in varied)])


def _name(row: dict[str, Any], varied: list[str]) -> str:
    values = [
        f"{VARIED[key]}: {_value_text(row[key])}" if isinstance(row[key], bool) else _value_text(row[key])
        for key in varied
    ]
    return ", ".join([f"{Path(row['model']).stem} {row['given']}".strip(), *values])


def _value_text(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def _operation_tables(result: dict[str, Any]) -> list[Any]:
    tables: list[Any] = []
    for name, group in groupby(result["rows"], key=lambda row: row["operation"]):
        rows = list(group)
        sizes = " ".join(f"{letter}={size}" for letter, size in rows[0]["sizes"].items())
        columns = ("forward", "backward", "step", "ratio", "peak", "ratio", "error", "gradients'")
        table = _table(f"{name} {sizes}: milliseconds, MiB", "", *columns)
        for row in rows:
            milliseconds = [_milliseconds(row["seconds"][part]) for part in ("forward", "backward", "step")]
            errors = [f"{row[key]:.1e}" for key in ("error", "gradient_error")]
            table.add_row(row["backend"], *milliseconds, _ratio(row["ratio"]["step"]), *_memory(row), *errors)
        tables.append(table)
    return tables


def _task_table(result: dict[str, Any]) -> Any:
    rows = ", ".join(f"{name} {count:,}" for name, count in result["rows"].items())
    table = _table(
        f"{Path(result['task']).stem}: {rows} rows of up to {result['length']:,} steps",
        "",
        "ms",
        "examples/s",
        "positions/s",
    )
    titles = {"generate": "generate", "open": "open prepared data"}
    if result["generated"]:
        titles["generate"] = f"generate {result['generated']['rows']:,} rows, {result['generated']['workers']} at once"
        result["examples_per_second"]["generate"] = result["generated"]["rows_per_second"]
    titles |= {"batch": f"a batch of {result['batch']:,}", "masked": "the same, with 15 % masked"}
    titles |= {"resampled": "a batch of resampled rows"}
    for kind, title in titles.items():
        seconds = result["seconds"].get(kind)
        rates = [result[f"{of}_per_second"].get(kind) for of in ("examples", "positions")]
        if seconds is not None:
            table.add_row(title, _milliseconds(seconds), *(f"{rate:,.0f}" if rate else "" for rate in rates))
    return table


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _memory(row: dict[str, Any]) -> tuple[str, str]:
    ratio = row["peak_ratio"]
    return _mebibytes(row), "" if ratio is None else _ratio(ratio)


def _mebibytes(row: dict[str, Any]) -> str:
    peak = row["peak_bytes"]
    return "" if peak is None else f"{peak / 2**20:,.1f}"


def _ratio(value: float) -> str:
    return f"×{value:.2f}" if value >= 0.1 else f"×{value:.2g}"
