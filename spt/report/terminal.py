"""A report for the terminal."""

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spt.report.collect import Report
from spt.report.format import ReportTable
from spt.report.statements import brief_verdicts, statements
from spt.report.tables import by_section

BRIEFLY = ("differences", "levels", "published", "failures", "runs")  # sections, of each table its first columns


def terminal(report: Report, full: bool = False) -> RenderableType:
    """For `rich.console.Console.print`: verdicts, the scores, and the verdicts in brief; with `full` all remarks and
    tables. Nothing is conveyed by colour alone."""
    parts: list[RenderableType] = []
    for statement in statements(report):
        lines = [Text(statement.verdict, style="bold")]
        lines += [Text(f"WARNING: {warning}", style="bold red") for warning in statement.warnings]
        lines += [Text(remark, style="dim") for remark in (statement.remarks if full else statement.remarks[:1])]
        parts += [Text(statement.label, style="bold"), Padding(Group(*lines), (0, 0, 1, 2), expand=False)]
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
    if any(row.seeds for row in report.rows):  # the tables have scrolled the verdicts out of sight
        parts += [Text.assemble((f"{label}: ", "dim"), (verdict, "bold")) for label, verdict in brief_verdicts(report)]
    if not full and (left_out := sum(name not in BRIEFLY and table.narrow != () for name, table in tables)):
        parts.append(Text(f"{left_out} more tables, all columns and remarks: --full", style="dim"))
    return Group(*parts)


def _rich_table(table: ReportTable, columns: Sequence[int]) -> Table:
    rich_table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(table.header), padding=(0, 1, 0, 0))
    for number in columns:
        words = number < table.text_columns
        justify: Literal["left", "right"] = "left" if words else "right"
        rich_table.add_column(Text(table.header[number]), justify=justify, no_wrap=not words, overflow="fold")
    for line in table.body:
        rich_table.add_row(*(Text(line[number]) for number in columns))
    return rich_table
