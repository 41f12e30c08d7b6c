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
from spt.report.statements import baseline_statements, model_statements, statements
from spt.report.tables import all_tables


def terminal(report: Report) -> RenderableType:
    """For `rich.console.Console.print`: verdicts, then tables. Nothing is conveyed by colour alone."""
    parts: list[RenderableType] = []
    for statement in statements(report):
        lines = [Text(statement.verdict, style="bold")]
        lines += [Text(f"WARNING: {warning}", style="bold red") for warning in statement.warnings]
        lines += [Text(remark, style="dim") for remark in statement.remarks]
        parts += [Text(statement.label, style="bold"), Padding(Group(*lines), (0, 0, 1, 2), expand=False)]
    for warning in report.warnings:
        parts += [Text(f"WARNING: {warning}", style="bold red"), Text()]
    for note in report.notes:
        parts += [Text(note, style="dim"), Text()]
    for table in all_tables(report):
        every = tuple(range(len(table.header)))
        for number, columns in enumerate((every,) if table.narrow is None else table.narrow):
            parts += [Text(table.title + (", continued" if number else ""), style="bold"), _rich_table(table, columns)]
            parts.append(Text())
        if table.caption and table.narrow != ():
            parts[-1] = Text(table.caption, style="dim")
            parts.append(Text())
    if any(row.seeds for row in report.rows):  # the tables have scrolled the verdicts out of sight
        last = [(row.label, row.verdict) for row in report.rows]
        others = [*model_statements(report), *baseline_statements(report)]
        last += [(statement.label, statement.verdict) for statement in others]
        parts += [Text.assemble((f"{label}: ", "dim"), (verdict, "bold")) for label, verdict in last]
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
