"""A report for the terminal."""

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spt.report.collect import Report
from spt.report.format import ReportTable, abbreviate
from spt.report.statements import brief_verdicts, conclusions, statements
from spt.report.tables import by_section

REPEATED_AFTER = 10  # lines of tables, which may have moved the first verdicts out of sight
BRIEFLY = ("differences", "levels", "published", "failures", "runs")  # sections, of each table its first columns


def terminal(report: Report, full: bool = False) -> RenderableType:
    """For `rich.console.Console.print`: verdicts in brief, the scores, and behind long tables the verdicts again; with
    `full` whole verdicts, all remarks and tables. Nothing is conveyed by colour alone."""
    parts = _in_full(report) if full else _in_brief(report)
    for warning in report.warnings:
        parts += [Text(f"WARNING: {warning}", style="bold red"), Text()]
    for note in report.notes:
        parts += [Text(note, style="dim"), Text()]
    tables = [(section.name, table) for section, found in by_section(report) for table in found]
    for _, table in [each for each in tables if full or each[0] in BRIEFLY]:
        every = tuple(range(len(table.header)))
        groups = (every,) if table.narrow is None else table.narrow
        for number, columns in enumerate(groups if full else groups[:1]):
            parts += [Text(table.title + (", continued" if number else ""), style="bold"), _rich_table(table, columns)]
            parts.append(Text())
        if full and table.caption and table.narrow != ():
            parts[-1] = Text(table.caption, style="dim")
            parts.append(Text())
    between = sum(len(table.body) for name, table in tables if name in BRIEFLY)
    if full or between > REPEATED_AFTER:
        parts += _lines(brief_verdicts(report))
    if not full and (left_out := sum(name not in BRIEFLY and table.narrow != () for name, table in tables)):
        parts.append(Text(f"{left_out} more tables, all columns and remarks: --full", style="dim"))
    return Group(*parts)


def _in_full(report: Report) -> list[RenderableType]:
    """Each verdict with its warnings and remarks."""
    parts: list[RenderableType] = []
    for statement in statements(report):
        lines = [Text(statement.verdict, style="bold")]
        lines += [Text(f"WARNING: {warning}", style="bold red") for warning in statement.warnings]
        lines += [Text(remark, style="dim") for remark in statement.remarks]
        parts += [Text(statement.label, style="bold"), Padding(Group(*lines), (0, 0, 1, 2), expand=False)]
    return parts


def _in_brief(report: Report) -> list[RenderableType]:
    """A line for each verdict; then each warning, and each remark on unequal compute or a search, once, with the rows
    that it is about unless it is about all of them."""
    others = [(statement.label, statement.verdict) for statement in conclusions(report)]
    parts: list[RenderableType] = _lines([*brief_verdicts(report), *others])
    told: dict[tuple[str, str], list[str]] = {}
    for statement in statements(report):
        remarks = [(remark, "dim") for remark in statement.brief_remarks if not remark.startswith("compute matched")]
        for line in (*((f"WARNING: {warning}", "bold red") for warning in statement.warnings), *remarks):
            told.setdefault(line, []).append(statement.label)
    for (text, style), labels in told.items():
        whose = "" if len(labels) == len(report.rows) else f" ({abbreviate(labels, 2)})"
        parts.append(Text(text + whose, style=style))
    return [*parts, Text()]


def _lines(verdicts: Sequence[tuple[str, str]]) -> list[RenderableType]:
    return [Text.assemble((f"{label}: ", "dim"), (verdict, "bold")) for label, verdict in verdicts]


def _rich_table(table: ReportTable, columns: Sequence[int]) -> Table:
    rich_table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(table.header), padding=(0, 1, 0, 0))
    for number in columns:
        words = number < table.text_columns
        justify: Literal["left", "right"] = "left" if words else "right"
        rich_table.add_column(Text(table.header[number]), justify=justify, no_wrap=not words, overflow="fold")
    for line in table.body:
        rich_table.add_row(*(Text(line[number]) for number in columns))
    return rich_table
