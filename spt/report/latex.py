"""The tables of a report as LaTeX, for a paper: booktabs, one `table` environment each. Pure ASCII, for any engine and
input encoding. The same report always gives the same bytes.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import count

from spt.report.collect import Report
from spt.report.format import ReportTable, slug
from spt.report.statements import statements
from spt.report.tables import all_tables

ROWS = 40  # of one table: more do not fit on a page, and a float does not break
MANY = 8  # columns; more are scaled to the line
WIDE = 70  # characters of a line of the table; more are scaled to the line
LONG = 48  # characters of a text cell; longer ones are broken into lines

COMMANDS = (  # of the letters in `SPECIAL`, in their order
    r"textbackslash textasciitilde textasciicircum textless textgreater textbar ldots "
    "ss ae AE oe OE o O l L i S pounds copyright"
)

SPECIAL = {
    **{letter: f"\\{letter}" for letter in "{}$&#_%"},
    **{letter: f"\\{name}{{}}" for letter, name in zip("\\~^<>|…ßæÆœŒøØłŁı§£©", COMMANDS.split(), strict=True)},
    **{letter: f"{{{letter}}}" for letter in "[]*"},  # behind the \\ of the line above they would be its options
    **{'"': "''", "`": r"\`{}", "'": "'", "\u2018": "`{}", "\u2019": "'", "\u201c": "``{}", "\u201d": "''"},
    **{"\u2013": "--", "\u2014": "---", "\u2009": r"\,", "\u202f": r"\,", "\u00a0": "~"},
}

# Of the letters in `MATHS`, in their order.
OPERATORS = "times div pm cdot bullet ge le ne approx infty to leftarrow surd sum in mu varsigma"

MATHS = {
    **{letter: f"\\{name}" for letter, name in zip("×÷±·•≥≤≠≈∞→←√∑∈µς", OPERATORS.split(), strict=True)},
    **{"−": "-", "°": r"^\circ", "¹": "^1", "²": "^2", "³": "^3"},
}

GREEK = ["gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega"]  # both cases

LATIN = {  # Greek capitals that look Latin have no command
    **{"alpha": "A", "beta": "B", "epsilon": "E", "zeta": "Z", "eta": "H", "iota": "I", "kappa": "K", "mu": "M"},
    **{"nu": "N", "omicron": "O", "rho": "P", "tau": "T", "chi": "X"},
}

ACCENTS = dict(
    zip(
        "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0323\u0327\u0331",
        "`'^~=u.\"rHvdcb",
        strict=True,
    )
)


def latex(report: Report) -> str:
    """Every table of a report, to be included in a document by `\\input`; verdicts, warnings and notes are comments."""
    shown = all_tables(report)
    tables: list[str] = []
    labels: set[str] = set()
    for table in shown:
        tables += _tables(table, labels)
    packages = ["booktabs", *(["graphicx"] if any(r"\resizebox" in table for table in tables) else [])]
    lines = [f"% Tables of spt report. In the preamble: \\usepackage{{{','.join(packages)}}}"]
    for each in statements(report):
        lines.append(f"% {escape(each.label)}: {escape(each.verdict)}")
        lines += [f"% WARNING, {escape(each.label)}: {escape(warning)}" for warning in each.warnings]
        lines += [f"% {escape(each.label)}: {escape(remark)}" for remark in each.remarks]
    lines += [f"% WARNING: {escape(warning)}" for warning in report.warnings]
    lines += [f"% Note: {escape(note)}" for note in report.notes]
    return "\n\n".join(["\n".join(lines), *tables]) + "\n"


def escape(text: str) -> str:
    """Text as LaTeX, on one line: with every special character escaped, and minus signs distinguished from hyphens."""
    marked = re.sub(r"(?<![\w)\-])-(?=\d)|(?<= )-(?= )", "\u2212", " ".join(text.split()))
    parts = re.split("-(?=-)", marked)  # two hyphens would be a dash
    return "-{}".join("".join(map(_letter, part)) for part in parts)


def _letter(letter: str) -> str:
    if letter in SPECIAL:
        return SPECIAL[letter]
    if letter in MATHS:
        return f"${MATHS[letter]}$"
    if " " <= letter <= "~":
        return letter
    if maths := _greek(letter):
        return f"${maths}$"
    base, accent = (parts := unicodedata.normalize("NFD", letter))[:1], parts[1:]
    if base.isascii() and base.isalpha() and accent in ACCENTS:
        return f"\\{ACCENTS[accent]}{{{base}}}"
    return f"\\texttt{{U+{ord(letter):04X}}}"  # not in pdflatex's fonts


def _greek(letter: str) -> str:
    match = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(letter, ""))
    case, name = (match[1], match[2].lower().replace("lamda", "lambda")) if match else ("", "")
    if name in LATIN and (case == "CAPITAL" or name == "omicron"):
        return f"\\mathrm{{{LATIN[name]}}}" if case == "CAPITAL" else "o"
    if name not in GREEK and name not in LATIN:
        return ""
    return f"\\{name.title() if case == 'CAPITAL' else name}"


def _tables(table: ReportTable, labels: set[str]) -> Iterator[str]:
    """A table, split where it has more than `ROWS` lines."""
    name = _label(table.title, labels)
    parts = [table.body[start : start + ROWS] for start in range(0, len(table.body), ROWS)]
    for number, body in enumerate(parts):
        title = table.title + (", continued" if number else "")
        caption = f"{title}. {table.caption}" if table.caption and not number else title
        yield _table(table, body, caption, f"{name}-part{number + 1}" if number else name)


def _table(table: ReportTable, body: Sequence[tuple[str, ...]], caption: str, label: str) -> str:
    widths = [
        max(len(part) for line in (table.header, *table.body) for part in line[column].split("\n"))
        for column in range(len(table.header))
    ]
    kinds = [_column(number < table.text_columns, width) for number, width in enumerate(widths)]
    drawn = sum(min(width, LONG) + 2 for width in widths)
    scaled = len(widths) > MANY or drawn > WIDE
    lines = [r"\begin{table}[tbp]", r"\centering", f"\\caption{{{escape(caption)}}}", f"\\label{{tab:{label}}}"]
    lines += [r"\resizebox{\linewidth}{!}{%"] if scaled else []
    lines += [f"\\begin{{tabular}}{{@{{}}{''.join(kinds)}@{{}}}}", r"\toprule"]
    if any(table.header):
        heads = [_head(name, number < table.text_columns) for number, name in enumerate(table.header)]
        lines += [" & ".join(heads) + r" \\", r"\midrule"]
    lines += [" & ".join(map(_cell, line)) + r" \\" for line in body]
    lines += [r"\bottomrule", r"\end{tabular}" + ("}" if scaled else ""), r"\end{table}"]
    return "\n".join(lines)


def _column(words: bool, width: int) -> str:
    if not words:
        return "r"
    return "l" if width <= LONG else r"p{0.45\linewidth}"


def _head(name: str, words: bool) -> str:
    parts = [escape(part) for part in name.split("\n")]
    lines = r"\\".join(parts)
    return lines if len(parts) == 1 else f"\\shortstack[{'l' if words else 'r'}]{{{lines}}}"


def _cell(text: str) -> str:
    return "--" if text == "-" else escape(text)


def _label(title: str, taken: set[str]) -> str:
    """A label made from the title, unique among the tables."""
    plain = slug(title)
    label = next(name for number in count(1) if (name := plain if number == 1 else f"{plain}-{number}") not in taken)
    taken.add(label)
    return label
