"""A report for the terminal, as Markdown, CSV and JSON. The same report always gives the same bytes.

People are shown fractions such as accuracy in percent, and their differences in points; CSV and JSON hold the
metric's own units.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spt.report import Cost, Report, Row, RunRecord
from spt.run import Ledger, write_text, writing
from spt.verdict import delta_text, interval_text, metric_text, ratio_text, score_text, size_text

FORMAT = 1  # of report.json; raised when a field changes its meaning


class Sheet(NamedTuple):
    """A table that is not laid out yet."""

    title: str
    header: tuple[str, ...]
    body: Sequence[tuple[str, ...]]
    words: int  # the first so many columns are text, the others numbers
    narrow: int | None = None  # the first so many columns fit into 80 characters; None: all
    caption: str = ""


def sheets(report: Report) -> list[Sheet]:
    """The tables of a report that have something in them."""
    made = [score_sheet(report), seed_sheet(report), cost_sheet(report), failure_sheet(report)]
    return [sheet for sheet in made if sheet.body] + [run_sheet(run) for run in report.runs]


def score_sheet(report: Report) -> Sheet:
    metrics = {metric_text(row.metric) for row in report.rows if row.metric}
    header = ("task / model", "n", "scratch", "SPT", "delta", "95 % interval", "p", "detectable", "chance")
    body = [
        (
            f"{row.label}: {metric_text(row.metric)}" if len(metrics) > 1 and row.metric else row.label,
            str(row.n) if row.n == row.planned else f"{row.n} of {row.planned}",
            score_text(row.scratch, row.metric),
            score_text(row.spt, row.metric),
            delta_text(row.delta, row.metric),
            interval_text(row.low, row.high, row.metric),
            "-" if row.p is None else f"{row.p:.3f}" if row.p >= 0.001 else "< 0.001",
            size_text(row.detectable, row.metric),
            score_text(row.chance, row.metric),
        )
        for row in report.rows
    ]
    title = f"Test {metrics.pop()}" if len(metrics) == 1 else "Test scores"
    caption = "Means over the n seeds at which both arms finished; delta is SPT - scratch."
    return Sheet(title, header, body, words=1, narrow=6, caption=caption)


def seed_sheet(report: Report) -> Sheet:
    header = ("task / model", "seed", "scratch", "SPT", "delta", "scratch run", "SPT run", "pretraining run")
    body = [
        (
            "" if number else row.label,
            str(seed.seed),
            seed.scratch_state if seed.scratch is None else score_text(seed.scratch, row.metric),
            seed.spt_state if seed.spt is None else score_text(seed.spt, row.metric),
            delta_text(seed.delta, row.metric),
            seed.scratch_run,
            seed.spt_run,
            seed.pretrain_run or "",
        )
        for row in report.rows
        for number, seed in enumerate(row.seeds)
    ]
    return Sheet("Seed by seed", header, body, words=1, narrow=5)


def cost_sheet(report: Report) -> Sheet:
    body: list[tuple[str, ...]] = []
    for row in report.rows:
        if row.scratch_arm is None or row.spt_arm is None:
            continue
        body += [
            (row.label, "scratch", *_cost_cells(row.scratch_arm.total)),
            ("", "pretraining", *_cost_cells(row.spt_arm.pretraining)),
            ("", "+ finetuning", *_cost_cells(row.spt_arm.finetuning)),
            ("", "= SPT", *_cost_cells(row.spt_arm.total)),
            ("", "ratio", *(ratio_text(row.ratios[axis]) for axis in Cost.model_fields)),
        ]
    header = ("task / model", "arm", "steps", "examples", "FLOPs", "time", "memory")
    caption = (
        "To train one model, means over the same seeds; time includes evaluation; of memory, the largest peak. "
        "Ratio: SPT to scratch."
    )
    return Sheet("Cost", header, body, words=2, caption=caption)


def failure_sheet(report: Report) -> Sheet:
    header = ("task / model", "arm", "seed", "state", "reason", "run")
    body = [
        (
            label or failure.run,
            "SPT" if failure.arm == "spt" else failure.arm or "",
            "" if failure.seed is None else str(failure.seed),
            failure.state,
            failure.reason,
            failure.run,
        )
        for label, failure in report.failures
    ]
    return Sheet("Runs without a score", header, body, words=6, narrow=5)


def run_sheet(run: RunRecord) -> Sheet:
    """One run by itself."""
    body = [("state", f"{run.state}: {run.reason}" if run.reason else run.state)]
    if (result := run.result) is not None:
        cost = dict(zip(Cost.model_fields, _cost_cells(result.total), strict=True))
        body += [
            ("recipe", f"{result.recipe} ({result.task} / {result.model})"),
            ("stage", f"{result.stage}, seed {result.seed}" + (", smoke run" if result.smoke else "")),
            ("best step", f"{result.best_step} of {result.own.steps}, by validation {result.selected_by}"),
            ("stopped by", result.stop),
        ]
        for split, scores in (("validation", result.val), ("test", result.test or {})):
            body += [(f"{split} {metric_text(name)}", score_text(score, name)) for name, score in scores.items()]
        body += [
            ("cost", f"{cost['steps']} steps, {cost['examples']} examples, {cost['flops']} FLOPs"),
            (
                "",
                f"{cost['seconds']}, {cost['peak_bytes']}" + (", pretraining included" if result.parent else ""),
            ),
            ("parameters", ", ".join(f"{part} {number:,}" for part, number in result.parameters.items())),
        ]
    return Sheet(run.name, ("", ""), body, words=2)


def terminal(report: Report) -> RenderableType:
    """For `rich.console.Console.print`: verdicts, then tables. Nothing is said by colour alone."""
    parts: list[RenderableType] = []
    for row in report.rows:
        lines = [Text(row.verdict, style="bold")]
        lines += [Text(f"WARNING: {said}", style="bold red") for said in row.warnings]
        lines += [Text(said, style="dim") for said in _remarks(row)]
        parts += [Text(row.label, style="bold"), Padding(Group(*lines), (0, 0, 1, 2), expand=False)]
    for said in report.warnings:
        parts += [Text(f"WARNING: {said}", style="bold red"), Text()]
    for sheet in sheets(report):
        parts += [Text(sheet.title, style="bold"), _rich_table(sheet)]
        parts += [Text(sheet.caption, style="dim"), Text()] if sheet.caption else [Text()]
    return Group(*parts)


def _rich_table(sheet: Sheet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(sheet.header), padding=(0, 1, 0, 0))
    for number, name in enumerate(sheet.header[: sheet.narrow]):
        words = number < sheet.words
        table.add_column(Text(name), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for line in sheet.body:
        table.add_row(*(Text(cell) for cell in line[: sheet.narrow]))
    return table


def markdown(report: Report) -> str:
    lines = ["# Self-pretraining against training from scratch", ""] if report.rows else []
    for row in report.rows:
        lines += [f"**{_plain(row.label)}**: {_plain(row.verdict)}.", ""]
        lines += [f"- **WARNING: {_plain(said)}**" for said in row.warnings]
        lines += [f"- {_plain(said)}" for said in _remarks(row)]
        lines += [f"- recipe `{row.recipe}`" + (f", command `{row.command}`" if row.command else ""), ""]
    lines += [line for said in report.warnings for line in (f"**WARNING: {_plain(said)}**", "")]
    for sheet in sheets(report):
        lines += [f"## {sheet.title}", ""]
        lines.append("| " + " | ".join(map(_plain, sheet.header)) + " |")
        lines.append("|" + "|".join("---" if i < sheet.words else "---:" for i in range(len(sheet.header))) + "|")
        lines += ["| " + " | ".join(map(_plain, line)) + " |" for line in sheet.body]
        lines += ["", *([sheet.caption, ""] if sheet.caption else [])]
    return "\n".join(lines).rstrip() + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """What `--json` prints and report.json holds."""
    return {
        "format": FORMAT,
        "kind": "report",
        "rows": [row.model_dump(mode="json") for row in report.rows],
        "verdicts": [f"{row.label}: {row.verdict}" for row in report.rows],
        "failures": [{"label": label, **failure.model_dump(mode="json")} for label, failure in report.failures],
        "warnings": list(report.warnings),
        "runs": list(report.folders),
        "results": [run.model_dump(mode="json") for run in report.runs],
    }


def rows_csv(report: Report) -> str:
    """One line per row of the report."""
    nested = {"ratios", "scratch_arm", "spt_arm", "warnings", "notes", "seeds", "failures"}
    lines = []
    for row in report.rows:
        line = row.model_dump(exclude=nested)
        for name, arm in (("scratch", row.scratch_arm), ("spt", row.spt_arm)):
            for part in ("total", "pretraining", "finetuning"):
                for axis in Cost.model_fields:
                    line[f"{name}_{part}_{axis}"] = getattr(getattr(arm, part), axis) if arm else None
        line |= {f"ratio_{axis}": ratio for axis, ratio in row.ratios.items()}
        lines.append({**line, "failures": len(row.failures), "warnings": "; ".join(row.warnings)})
    return _csv(lines)


def seeds_csv(report: Report) -> str:
    """One line per row and seed."""
    about = ("label", "task", "model", "recipe", "source", "metric")
    lines = [
        {**{name: getattr(row, name) for name in about}, **seed.model_dump()}
        for row in report.rows
        for seed in row.seeds
    ]
    return _csv(lines)


def write(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write report.md, report.csv, seeds.csv and report.json; each is replaced as a whole."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": markdown(report),
        "report.csv": rows_csv(report),
        "seeds.csv": seeds_csv(report),
        "report.json": json.dumps(to_json(report), indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return tuple(folder / name for name in texts)


def _remarks(row: Row) -> list[str]:
    return [said for said in (row.compute, *row.notes) if said]


def _cost_cells(cost: Cost | Ledger) -> tuple[str, ...]:
    """One cell per field of `Cost`."""
    return (
        _count_text(cost.steps),
        _count_text(cost.examples),
        _flops_text(cost.flops),
        _time_text(cost.seconds),
        f"{cost.peak_bytes / 2**20:,.0f} MiB" if cost.peak_bytes else "-",
    )


def _count_text(count: int | float) -> str:
    return f"{count:,.0f}" if count < 1e6 else f"{count / 1e6:,.1f}M"


def _flops_text(flops: float) -> str:
    mantissa, exponent = f"{flops:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _time_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table or start a tag."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    file = io.StringIO()
    if lines:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return file.getvalue()
