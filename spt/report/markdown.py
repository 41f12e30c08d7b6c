"""A report as Markdown."""

from collections.abc import Sequence

from spt.report.collect import Report
from spt.report.format import ReportTable
from spt.report.statements import conclusions, remarks
from spt.report.tables import by_section


def markdown(report: Report, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown; pictures are (name, title) of figures that lie beside it as figures/NAME.svg."""
    lines = ["# Self-pretraining against training from scratch", ""] if report.rows or report.searches else []
    for row in report.rows:
        lines += [f"**{_plain(row.label)}**: {_plain(row.verdict)}.", ""]
        lines += [f"- **WARNING: {_plain(said)}**" for said in row.warnings]
        lines += [f"- {_plain(said)}" for said in remarks(row)]
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


def _markdown_table(sheet: ReportTable) -> list[str]:
    lines = [f"## {sheet.title}", "", "| " + " | ".join(map(_plain, sheet.header)) + " |"]
    lines.append("|" + "|".join("---" if i < sheet.words else "---:" for i in range(len(sheet.header))) + "|")
    lines += ["| " + " | ".join(map(_plain, line)) + " |" for line in sheet.body]
    return [*lines, "", *([_plain(sheet.caption), ""] if sheet.caption else [])]


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table or start a tag."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
