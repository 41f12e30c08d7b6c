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
from spt.report.statements import statements
from spt.report.tables import all_tables


def terminal(report: Report) -> RenderableType:
    """For `rich.console.Console.print`: verdicts, then tables. Nothing is said by colour alone."""
    parts: list[RenderableType] = []
    for said in statements(report):
        lines = [Text(said.verdict, style="bold")]
        lines += [Text(f"WARNING: {warning}", style="bold red") for warning in said.warnings]
        lines += [Text(remark, style="dim") for remark in said.remarks]
        parts += [Text(said.label, style="bold"), Padding(Group(*lines), (0, 0, 1, 2), expand=False)]
    for warning in report.warnings:
        parts += [Text(f"WARNING: {warning}", style="bold red"), Text()]
    for note in report.notes:
        parts += [Text(note, style="dim"), Text()]
    for sheet in all_tables(report):
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


def _rich_table(sheet: ReportTable, columns: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(sheet.header), padding=(0, 1, 0, 0))
    for number in columns:
        words = number < sheet.words
        justify: Literal["left", "right"] = "left" if words else "right"
        table.add_column(Text(sheet.header[number]), justify=justify, no_wrap=not words, overflow="fold")
    for line in sheet.body:
        table.add_row(*(Text(line[number]) for number in columns))
    return table
