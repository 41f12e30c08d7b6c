"""A report as one self-contained HTML page: no remote script, font or picture; figures are inline SVG.

It is readable on a phone, in dark mode and on paper; tables sort by their headers. The page's content security policy
forbids every request, and the numbers behind tables and figures can be saved from it.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from spt.report import machine, plotting
from spt.report.collect import Report
from spt.report.format import ReportTable, csv_text, slug
from spt.report.plotting import Plot
from spt.report.statements import statements
from spt.report.tables import by_section

HEAVY = 100_000  # characters; curves.csv and figures/ have longer ones
TITLE = "Self-pretraining against training from scratch"


class HtmlCell(NamedTuple):
    text: str
    key: float | None  # a number, by which its column is sorted
    again: bool  # repeats the label of the line above


def page(report: Report, plots: Sequence[Plot], drawings: Mapping[str, str] | None = None) -> str:
    """The whole page, with the report's figures, whose SVG, by name, are drawn unless they have been. The same report
    always gives the same bytes."""
    drawings = {plot.name: plotting.svg(plot) for plot in plots} if drawings is None else drawings
    parts = [
        (section, [plot for plot in plots if plot.name.startswith(section.figures)], tables)
        for section, tables in by_section(report)
    ]
    return _template().render(
        title=TITLE,
        colours=Markup(plotting.css()),
        lead=statements(report),
        warnings=report.warnings,
        notes=report.notes,
        parts=[(section, figures, tables) for section, figures, tables in parts if figures or tables],
        drawings={name: Markup(plotting.inline(drawing)) for name, drawing in drawings.items()},
        files={"report.csv": machine.to_csv(report, "rows"), "seeds.csv": machine.to_csv(report, "seeds")},
    )


def lines(table: ReportTable) -> list[list[HtmlCell]]:
    """The table's cells. Repeated labels that the table leaves out are filled in, since lines may be sorted."""
    lines: list[list[HtmlCell]] = []
    for texts in table.body:
        line = []
        for column, text in enumerate(texts):
            above = lines[-1][column].text if lines else ""
            again = column == 0 and table.text_columns > 0 and not text and bool(above) and bool(table.header[0])
            key = None if column < table.text_columns else number(text)
            line.append(HtmlCell(above if again else text, key, again))
        lines.append(line)
    return lines


UNITS = {"M": 1e6, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
NUMBER = re.compile(r"[<×]?\s*([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*(M|s|min|h|%|KiB|MiB|GiB)?\b")


def number(text: str) -> float | None:
    """The number that a cell begins with, by which its column is sorted, if there is one."""
    match = NUMBER.match(text.replace("−", "-"))
    return float(match[1].replace(",", "")) * UNITS[match[2] or "s"] if match else None


def _saved(text: str) -> str:
    """A text as a data URL; empty for one that would make the page too heavy."""
    return "" if len(text) > HEAVY else "data:text/plain;base64," + base64.b64encode(text.encode()).decode()


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"csv_text": csv_text, "lines": lines, "saved": _saved, "slug": slug}
    return environment.from_string((files("spt.report") / "page.html").read_text(encoding="utf-8"))
