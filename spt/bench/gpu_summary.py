"""summary.md of `spt bench gpu`: what its commands found, as tables."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOSE = 1e-4  # relative error of float32 gradients from which on a model is named
# Milliseconds of a step in bfloat16 by what a device of 790 TFLOP/s and 4.3 TB/s would need for its products and its
# memory traffic, pointwise operations and transforms not fused: computed on paper before any GPU had run this code.
ON_PAPER = {
    **dict.fromkeys((f"step-image-{name}" for name in ("s4", "s4d", "dss", "dlr", "s5", "lru")), "10"),
    **dict.fromkeys((f"step-pathx-{name}" for name in ("s4", "s5", "dlr")), "47 to 60"),
    "step-image-transformer": "2 to 3",
    "step-pathx-transformer": "130 to 200",
}


def summary(state: Mapping[str, Any], folder: Path, study: str) -> str:
    """Of gpu.json and the results beside it, as far as they are there."""
    facts = state["environment"]
    device = facts["cpu"] if facts["device"] == "cpu" else facts["device"]
    packages = facts["packages"]
    commit = f", commit {facts['commit']}" if facts.get("commit") else ""
    lines = [
        f"# {device}",
        "",
        f"torch {packages['torch']}, transformers {packages['transformers']}, spt {facts['spt']}{commit}; "
        f"{state['seconds'] / 60:.1f} minutes so far.",
        *(["", "**A rehearsal with tiny sizes: its numbers mean nothing.**"] if state["quick"] else []),
        "",
        *_table(
            ("command", "", "seconds", "output"),
            [
                (record["title"], record["status"], f"{record['seconds']:.0f}", f"[{name}.log]({name}.log)")
                for name, record in state["commands"].items()
            ],
        ),
    ]
    results = {name: found for name in state["commands"] if (found := _result(folder / f"{name}.json")) is not None}
    for title, section in (
        ("What the device reaches", _device(results.get("device"))),
        ("Training steps", _steps(results, state["quick"])),
        ("Operations", _operations(results)),
        ("Rounding", _rounding(results.get("rounding"))),
        ("Both arms", _study(folder, study)),
    ):
        if body := list(section):
            lines += ["", f"## {title}", "", *body]
    return "\n".join(lines) + "\n"


def _result(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return None


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    rule = " | ".join(["---", *("---:" for _ in columns[1:])])
    return [f"| {' | '.join(columns)} |", f"| {rule} |", *(f"| {' | '.join(row)} |" for row in rows)]


def _device(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is not None:
        rates = (f"{name} {rate / 1e12:,.1f} TFLOP/s" for name, rate in found["flops_per_second"].items())
        yield f"Matrix products: {', '.join(rates)}. Copies: {found['bytes_per_second'] / 1e12:.2f} TB/s."


def _steps(results: Mapping[str, Mapping[str, Any]], quick: bool) -> Iterator[str]:
    """With the share of what the device's matrix products reach in the same precision."""
    reached = results["device"]["flops_per_second"] if "device" in results else {}
    rows = []
    for name, found in results.items():
        for row in found["rows"] if name.startswith("step-") else ():
            graphs = f" {row['model']}{', recorded' if row['cuda_graphs'] else ''}" if name == "step-graphs" else ""
            sizes = (f"{name.removeprefix('step-')}{graphs}", f"{row['length']:,}", f"{row['batch']}", row["precision"])
            if row["failed"]:
                rows.append((*sizes, row["failed"], "", "", "", ""))
                continue
            rate, most = row["flops_per_second"], reached.get(row["precision"])
            share = "" if most is None else f"{rate / most:.0%}"
            paper = ON_PAPER.get(name, "") if row["precision"] == "bf16" and not quick else ""
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
            times = (f"{1e3 * row['seconds']['step']:.1f}", paper, f"{rate / 1e12:.2f}", share, peak)
            rows.append((*sizes, *times))
    columns = ("model", "steps", "batch", "precision", "ms", "on paper, ms", "TFLOP/s", "of products", "peak, GiB")
    yield from _table(columns, rows)


def _operations(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for name, found in results.items():
        for row in found["rows"] if name.startswith("op-") else ():
            sizes = " ".join(f"{key}={size}" for key, size in row["sizes"].items())
            if row.get("failed"):
                rows.append((row["operation"], sizes, row["backend"], row["failed"], "", ""))
                continue
            times, errors = f"{1e3 * row['seconds']['step']:.3f}", (row["error"], row["gradient_error"])
            shown = ("" if error is None else f"{error:.0e}" for error in errors)
            rows.append((row["operation"], sizes, row["backend"], times, *shown))
    yield from _table(("operation", "sizes", "back end", "ms", "error", "of gradients"), rows)


def _rounding(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    rows = found["rows"]
    fine = [name for name, row in rows.items() if "failed" not in row and row["float32 gradients"] <= LOOSE]
    yield f"{len(fine)} of {len(rows)} models: gradients in float32 within {LOOSE:g} of float64 on the CPU."
    failed = [(name, row["failed"], "", "") for name, row in rows.items() if "failed" in row]
    loose = [
        (name, *(f"{row[key]:.0e}" for key in ("float32 output", "float32 gradients", "bfloat16 gradients")))
        for name, row in rows.items()
        if "failed" not in row and name not in fine
    ]
    if table := _table(("model", "float32 output", "gradients", "bfloat16 gradients"), [*failed, *loose]):
        yield ""
        yield from table


def _study(folder: Path, study: str) -> Iterator[str]:
    """The scores of its report, which says what they are worth."""
    for path in sorted((folder / study).glob("*/report.json")):
        if (report := _result(path)) is None:
            continue
        rows = [
            (
                f"{row['task']} / {row['model']}",
                *(_score(row[key]) for key in ("scratch", "spt", "delta")),
                f"{row['n']}",
            )
            for row in report["rows"]
        ]
        yield from _table(("task / model", "scratch", "SPT", "delta", "n"), rows)
        yield ""
        yield f"[The whole report]({path.with_name('report.md').relative_to(folder).as_posix()})"


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
