"""A report for the terminal, as Markdown, CSV and JSON. The same report always gives the same bytes.

People are shown fractions such as accuracy in percent, and their differences in points; CSV and JSON hold the
metric's own units.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spt.pairs import ArmName, factors_text
from spt.report import Report
from spt.rows import Cost, Row
from spt.searches import Searched
from spt.sheets import by_section, sheets
from spt.texts import Sheet, csv_text

FORMAT = 2  # of report.json; raised when a field changes its meaning
# Parts of a report, as they stand in it.
PARTS = ("levels", "contrasts", "best", "pooled", "matches", "searches", "spent", "precedents", "provenance")


class Said(NamedTuple):
    """What a report says in words about one of its parts."""

    label: str
    verdict: str
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    decided: ArmName | None = None  # the arm that is shown to be better, all comparisons considered


def conclusions(report: Report) -> list[Said]:
    """What follows from several rows together, and what was searched."""
    return [
        *(Said(f"{best.label}, share of the budget", f"{best.verdict}") for best in report.best),
        *(
            Said(f"{one.label}, " + ("gain from SPT" if one.what == "SPT - scratch" else one.what), one.verdict)
            for one in report.contrasts
        ),
        *(Said(f"several tasks / {one.label}", one.verdict) for one in report.pooled),
        *(Said(f"{one.label}, search", _search_text(one), one.warnings, one.notes) for one in report.searches),
    ]


def _search_text(search: Searched) -> str:
    parts = []
    for name, arm in (("scratch", search.scratch), ("SPT", search.spt)):
        trials = f"{arm.done + arm.lost} of {arm.trials} trials"
        parts.append(f"{name}: {trials}, " + (factors_text(arm.setting) if arm.setting else "nothing chosen yet"))
    return "; ".join(parts)


def terminal(report: Report) -> RenderableType:
    """For `rich.console.Console.print`: verdicts, then tables. Nothing is said by colour alone."""
    parts: list[RenderableType] = []
    for said in sayings(report):
        lines = [Text(said.verdict, style="bold")]
        lines += [Text(f"WARNING: {warning}", style="bold red") for warning in said.warnings]
        lines += [Text(remark, style="dim") for remark in said.remarks]
        parts += [Text(said.label, style="bold"), Padding(Group(*lines), (0, 0, 1, 2), expand=False)]
    for warning in report.warnings:
        parts += [Text(f"WARNING: {warning}", style="bold red"), Text()]
    for note in report.notes:
        parts += [Text(note, style="dim"), Text()]
    for sheet in sheets(report):
        every = tuple(range(len(sheet.header)))
        for number, columns in enumerate((every,) if sheet.narrow is None else sheet.narrow):
            parts += [Text(sheet.title + (", continued" if number else ""), style="bold"), _rich_table(sheet, columns)]
            parts.append(Text())
        if sheet.caption and sheet.narrow != ():
            parts[-1] = Text(sheet.caption, style="dim")
            parts.append(Text())
    if any(row.seeds for row in report.rows):  # the tables have moved what was said first out of sight
        parts += [Text.assemble((f"{row.label}: ", "dim"), (row.verdict, "bold")) for row in report.rows]
    return Group(*parts)


def sayings(report: Report) -> list[Said]:
    """Everything that a report says in words, row by row, then of rows together."""
    return [_said(row) for row in report.rows] + conclusions(report)


def _said(row: Row) -> Said:
    decided = cast(ArmName, row.decision) if row.decision in get_args(ArmName) else None
    return Said(row.label, row.verdict, row.warnings, tuple(_remarks(row)), decided)


def _rich_table(sheet: Sheet, columns: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(sheet.header), padding=(0, 1, 0, 0))
    for number in columns:
        words = number < sheet.words
        justify: Literal["left", "right"] = "left" if words else "right"
        table.add_column(Text(sheet.header[number]), justify=justify, no_wrap=not words, overflow="fold")
    for line in sheet.body:
        table.add_row(*(Text(line[number]) for number in columns))
    return table


def markdown(report: Report, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown; pictures are (name, title) of figures that lie beside it as figures/NAME.svg."""
    lines = ["# Self-pretraining against training from scratch", ""] if report.rows or report.searches else []
    for row in report.rows:
        lines += [f"**{_plain(row.label)}**: {_plain(row.verdict)}.", ""]
        lines += [f"- **WARNING: {_plain(said)}**" for said in row.warnings]
        lines += [f"- {_plain(said)}" for said in _remarks(row)]
        lines += [f"- recipe `{row.recipe}`" + (f", command `{row.command}`" if row.command else ""), ""]
    for one in conclusions(report):
        lines += [f"**{_plain(one.label)}**: {_plain(one.verdict)}.", ""]
        more = [f"- **WARNING: {_plain(said)}**" for said in one.warnings]
        more += [f"- {_plain(said)}" for said in one.remarks]
        lines += [*more, ""] if more else []
    lines += [line for said in report.warnings for line in (f"**WARNING: {_plain(said)}**", "")]
    lines += [line for said in report.notes for line in (_plain(said), "")]
    for section, found in by_section(report):
        for name, title in pictures:
            if name.startswith(section.figures):
                lines += [f"![{_plain(title)}](figures/{name}.svg)", ""]
        lines += [line for sheet in found for line in _markdown_table(sheet)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(sheet: Sheet) -> list[str]:
    lines = [f"## {sheet.title}", "", "| " + " | ".join(map(_plain, sheet.header)) + " |"]
    lines.append("|" + "|".join("---" if i < sheet.words else "---:" for i in range(len(sheet.header))) + "|")
    lines += ["| " + " | ".join(map(_plain, line)) + " |" for line in sheet.body]
    return [*lines, "", *([_plain(sheet.caption), ""] if sheet.caption else [])]


def to_json(report: Report) -> dict[str, Any]:
    """What `--json` prints and report.json holds."""
    records = report.model_dump(mode="json")
    return {
        "format": FORMAT,
        "kind": "report",
        "rows": records["rows"],
        "verdicts": [f"{said.label}: {said.verdict}" for said in sayings(report)],
        **{name: records[name] for name in PARTS},
        "failures": [{"label": label, **failure.model_dump(mode="json")} for label, failure in report.failures],
        "warnings": records["warnings"],
        "notes": records["notes"],
        "runs": records["folders"],
        "results": records["runs"],
    }


def rows_csv(report: Report) -> str:
    """One line per row of the report, with a column for each factor of its studies."""
    nested = {"factors", "total", "ratios", "scratch_arm", "spt_arm", "warnings", "notes", "seeds", "items", "failures"}
    factors = list(dict.fromkeys(name for row in report.rows for name in row.factors))
    lines = []
    for row in report.rows:
        line = row.model_dump(exclude=nested)
        line |= {f"factor_{name}": row.factors.get(name) for name in factors}
        line |= {
            "matched_axis": row.total.axis if row.total else None,
            "matched_total": row.total.amount if row.total else None,
        }
        for name, arm in (("scratch", row.scratch_arm), ("spt", row.spt_arm)):
            line[f"{name}_above_chance"] = arm.above_chance if arm else None
            line[f"{name}_chance_p"] = arm.chance_p if arm else None
            line[f"{name}_parameters"] = arm.parameters.get("total") if arm else None
            for part in ("total", "pretraining", "finetuning"):
                for axis in Cost.model_fields:
                    line[f"{name}_{part}_{axis}"] = getattr(getattr(arm, part), axis) if arm else None
        line |= {f"ratio_{axis}": ratio for axis, ratio in row.ratios.items()}
        lines.append({**line, "failures": len(row.failures), "warnings": "; ".join(row.warnings)})
    return csv_text(lines)


def seeds_csv(report: Report) -> str:
    """One line per row and seed."""
    return csv_text([{**_about(row), **seed.model_dump()} for row in report.rows for seed in row.seeds])


def items_csv(report: Report) -> str:
    """One line per row and seed whose test items were compared."""
    return csv_text([{**_about(row), **item.model_dump()} for row in report.rows for item in row.items])


def _about(row: Row) -> dict[str, Any]:
    names = ("label", "task", "model", "recipe", "source", "metric")
    return {name: getattr(row, name) for name in names}


def searches_csv(report: Report) -> str:
    """One line per trial, with a column for each setting that was searched."""
    keys = list(dict.fromkeys(key for search in report.searches for key in search.space))
    return csv_text(
        [
            {
                "study": search.study,
                "label": search.label,
                "recipe": search.recipe,
                "arm": trial.arm,
                "setting": trial.number,
                "chosen": trial.number == (search.spt if trial.arm == "spt" else search.scratch).chosen,
                "seed": trial.seed,
                **{f"space_{key}": trial.setting.get(key) for key in keys},
                "metric": search.metric,
                "validation": trial.value,
                "state": trial.state,
                "run": trial.run,
            }
            for search in report.searches
            for trial in search.trials
        ]
    )


def _remarks(row: Row) -> list[str]:
    return [said for said in (row.compute, *row.notes) if said]


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table or start a tag."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
