"""A report as Markdown."""

import re
from collections.abc import Sequence

from spt.report.collect import Report
from spt.report.format import ReportTable
from spt.report.statements import Statement, baseline_statements, conclusions, model_statements, remarks
from spt.report.tables import by_section


def markdown(report: Report, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown; pictures are (name, title) of figures saved beside it as figures/NAME.svg."""
    lines = ["# Self-pretraining against training from scratch", ""] if report.rows or report.searches else []
    lines += _statement_lines([*model_statements(report), *baseline_statements(report)])
    for row in report.rows:
        lines += [f"**{_plain(row.label)}**: {_plain(row.verdict)}.", ""]
        lines += [f"- **WARNING: {_plain(remark)}**" for remark in row.warnings]
        lines += [f"- {_plain(remark)}" for remark in remarks(row)]
        lines += [f"- recipe {_code(row.recipe)}" + (f", command {_code(row.command)}" if row.command else ""), ""]
    lines += _statement_lines(conclusions(report))
    lines += [line for remark in report.warnings for line in (f"**WARNING: {_plain(remark)}**", "")]
    lines += [line for remark in report.notes for line in (_plain(remark), "")]
    for section, tables in by_section(report):
        for name, title in pictures:
            if name.startswith(section.figures):
                lines += [f"![{_plain(title)}](figures/{name}.svg)", ""]
        lines += [line for table in tables for line in _markdown_table(table)]
    return "\n".join(lines).rstrip() + "\n"


def _statement_lines(statements: Sequence[Statement]) -> list[str]:
    lines = []
    for statement in statements:
        lines += [f"**{_plain(statement.label)}**: {_plain(statement.verdict)}.", ""]
        more = [f"- **WARNING: {_plain(remark)}**" for remark in statement.warnings]
        more += [f"- {_plain(remark)}" for remark in statement.remarks]
        lines += [*more, ""] if more else []
    return lines


def _markdown_table(table: ReportTable) -> list[str]:
    lines = [f"## {_plain(table.title)}", "", "| " + " | ".join(map(_plain, table.header)) + " |"]
    lines.append("|" + "|".join("---" if i < table.text_columns else "---:" for i in range(len(table.header))) + "|")
    lines += ["| " + " | ".join(map(_plain, line)) + " |" for line in table.body]
    return [*lines, "", *([_plain(table.caption), ""] if table.caption else [])]


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table, start a tag, or become a link or a picture."""
    return re.sub(r"[\\|`\[\]]", r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def _code(text: str) -> str:
    """Text as code, which a backtick in it would end."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
