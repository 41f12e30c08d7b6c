"""A report as one HTML page that needs nothing else: no remote script, font or picture; figures are SVG in the page.

It is readable on a phone, in dark mode and on paper; tables sort by their heads. The page's own content policy forbids
every request, and the numbers behind tables and figures can be saved from it.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from spt.report import machine, plotting, statements
from spt.report.collect import Report
from spt.report.format import ReportTable, csv_text, slug
from spt.report.plotting import Plot
from spt.report.tables import Section, by_section

HEAVY = 100_000  # characters; curves.csv and figures/ have longer ones
TITLE = "Self-pretraining against training from scratch"


class HtmlCell(NamedTuple):
    text: str
    key: float | None  # a number's place in the order of its column
    again: bool  # repeats the label of the line above


class HtmlTable(NamedTuple):
    """A table as the page has it."""

    name: str
    title: str
    header: tuple[str, ...]
    words: int
    lines: list[list[HtmlCell]]
    caption: str


class HtmlFigure(NamedTuple):
    name: str
    title: str
    svg: Markup
    caption: str
    saved: str  # its numbers, as the address of a file; empty where they are too many


class HtmlSection(NamedTuple):
    name: str
    title: str
    plots: list[HtmlFigure]
    tables: list[HtmlTable]


def page(report: Report, drawings: Sequence[Plot]) -> str:
    """The whole page, with the report's figures. The same report always gives the same bytes."""
    parts = [_part(section, sheets, drawings) for section, sheets in by_section(report)]
    return _template().render(
        title=TITLE,
        colours=Markup(plotting.css()),
        lead=[_verdict(said) for said in statements.statements(report)],
        warnings=report.warnings,
        notes=report.notes,
        parts=[part for part in parts if part.plots or part.tables],
        files=_files(report),
    )


def _verdict(said: statements.Statement) -> Mapping[str, Any]:
    return {**said._asdict(), "decided": said.decided}


def _part(section: Section, sheets: Sequence[ReportTable], drawings: Iterable[Plot]) -> HtmlSection:
    plots = [
        HtmlFigure(one.name, one.title, Markup(plotting.svg(one, inline=True)), one.caption, _saved(csv_text(one.data)))
        for one in drawings
        if one.name.startswith(section.figures)
    ]
    return HtmlSection(section.name, section.title, plots, [html_table(sheet) for sheet in sheets])


def html_table(sheet: ReportTable) -> HtmlTable:
    """Labels that a sheet leaves out where they repeat are filled in: a sorted line must stand by itself."""
    lines: list[list[HtmlCell]] = []
    for texts in sheet.body:
        line = []
        for column, text in enumerate(texts):
            above = lines[-1][column].text if lines else ""
            again = column == 0 and sheet.words > 0 and not text and bool(above) and bool(sheet.header[0])
            line.append(HtmlCell(above if again else text, None if column < sheet.words else number(text), again))
        lines.append(line)
    header = tuple(" ".join(text.split()) for text in sheet.header)
    return HtmlTable(slug(sheet.title), sheet.title, header, sheet.words, lines, sheet.caption)


UNITS = {"M": 1e6, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
NUMBER = re.compile(r"[<×]?\s*([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*(M|s|min|h|%|KiB|MiB|GiB)?\b")


def number(text: str) -> float | None:
    """The number that a cell begins with, by which its column is sorted; None where it begins with none."""
    found = NUMBER.match(text.replace("−", "-"))
    return float(found[1].replace(",", "")) * UNITS[found[2] or "s"] if found else None


def _files(report: Report) -> list[tuple[str, str]]:
    """What stands beside the page, to be saved from it."""
    texts = {"report.csv": machine.rows_csv(report), "seeds.csv": machine.seeds_csv(report)}
    return [(name, _saved(text)) for name, text in texts.items() if _saved(text)]


def _saved(text: str) -> str:
    """The address of a text that is part of the page; empty for one that would outweigh the rest of it."""
    return "" if len(text) > HEAVY else "data:text/plain;base64," + base64.b64encode(text.encode()).decode()


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files("spt.report") / "page.html").read_text(encoding="utf-8"))
