"""LaTeX of a report: every sheet, and nothing in it that LaTeX could take for a command."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import compared, finish, plan, start

from spt.report import collect, latex
from spt.report.format import ReportTable
from spt.report.latex import MATHS, ROWS, SPECIAL, escape
from spt.report.statements import statements
from spt.report.tables import all_tables

NASTY = [*SPECIAL, *MATHS, "--", "---", "\\\\", "\n", "\x00", "\ud800", "中", "é", "Ż", "Δ", "ς", "$x_1$", "-1", " - "]
CELLS = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(NASTY), max_size=8).map("".join))


def tokens(text: str) -> list[str]:
    """Commands, escaped characters and plain ones, as TeX reads them."""
    return re.findall(r"\\[a-zA-Z]+|\\.|.", text, re.DOTALL)


def balanced(text: str) -> bool:
    depth = 0
    for token in tokens(text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def bare(text: str) -> set[str]:
    """Single characters outside of mathematics, which must be closed."""
    found, maths = set(), False
    for token in tokens(text):
        if token == "$":
            maths = not maths
        elif not maths and len(token) == 1:
            found.add(token)
    assert not maths, text
    return found


def check(text: str) -> None:
    """Environments and braces close in order, every line of a table has as many cells as the table has columns."""
    assert text.isascii()
    open_ones: list[str] = []
    columns = 0
    for line in text.splitlines():
        if line.startswith("%"):
            continue
        for what, name in re.findall(r"\\(begin|end)\{(table|tabular)\}", line):
            if what == "begin":
                open_ones.append(name)
            else:
                assert open_ones.pop() == name
        if found := re.match(r"\\begin\{tabular\}\{@\{\}(.*)@\{\}\}$", line):
            columns = len(re.sub(r"p\{[^}]*\}", "l", found[1]))
            assert set(re.sub(r"p\{[^}]*\}", "l", found[1])) <= {"l", "r"}
        if line.endswith(r" \\"):
            assert open_ones == ["table", "tabular"]
            assert tokens(line).count("&") == columns - 1
            assert balanced(line)
            assert not bare(line) & set('#_%^<>|"')
    assert open_ones == []
    assert balanced(re.sub(r"(?m)^%.*$", "", text).replace(r"{!}{%", "{!}{"))


def report_of(tmp_path: Path) -> collect.Report:
    compared(tmp_path, [0.70, 0.72, 0.74], [0.80, 0.81, 0.85])
    odd = {"task": "my_task & 50 %", "model": r"C:\x{1}", "recipe": "a<b>_$~^"}
    cells = [finish(tmp_path, "scratch", 0, 0.5, run="finetune-oddscratch", **odd)]
    start(tmp_path, "finetune-oddspt0", state="failed", reason="cannot read C:\\data_1\nline {2} at 100 %", exit_code=1)
    cells.append({"row": 0, "arm": "spt", "seed": 0, "run": "finetune-oddspt0", "parent": None})
    rows = [{"name": odd["recipe"], "task": odd["task"], "model": odd["model"]}]
    plan(tmp_path, cells, "compare-2", rows=rows)
    return collect.read_report([tmp_path])


def test_every_sheet_is_a_table_and_the_words_are_comments(tmp_path):
    made = report_of(tmp_path)
    text = latex.latex(made)
    check(text)
    shown = all_tables(made)
    assert len(shown) > 4
    assert text.count(r"\begin{table}") == text.count(r"\toprule") == text.count(r"\bottomrule") == len(shown)
    for sheet in shown:
        assert f"\\caption{{{escape(sheet.title)}" in text
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert len(set(labels)) == len(labels) and all(re.fullmatch(r"tab:[a-z0-9-]+", label) for label in labels)
    comments = [line for line in text.splitlines() if line.startswith("%")]
    assert r"\usepackage{booktabs,graphicx}" in comments[0]
    assert any("SPT beats scratch by" in line for line in comments)
    for each in statements(made):
        assert f"% {escape(each.label)}: {escape(each.verdict)}" in comments
        assert all(f"% {escape(each.label)}: {escape(remark)}" in comments for remark in each.remarks)
    assert r"my\_task \& 50 \% / C:\textbackslash{}x\{1\}" in text
    assert r"line \{2\} at 100 \%" in text
    assert latex.latex(made) == text


def test_a_run_alone_has_no_header_and_needs_no_graphicx(tmp_path):
    finish(tmp_path, "scratch", 0, 0.7)
    text = latex.latex(collect.read_report([tmp_path / "finetune-scratch0"]))
    check(text)
    assert r"\midrule" not in text and "graphicx" not in text and r"\usepackage{booktabs}" in text
    assert "\\caption{finetune-scratch0}\n\\label{tab:finetune-scratch0}" in text


def test_signs():
    assert escape("-0.26 to +2.42") == "$-$0.26 to +2.42"
    assert escape("SPT - scratch, finetune-12, 2026-01-01, --seeds 5") == (
        r"SPT $-$ scratch, finetune-12, 2026-01-01, -{}-seeds 5"
    )
    assert escape("×1.02 ≥ 3 – Δ µ") == r"$\times$1.02 $\ge$ 3 -- $\Delta$ $\mu$"
    assert escape("Ångström naïve") == r"\r{A}ngstr\"{o}m na\"{i}ve"
    assert escape("ΑΩαως λ中") == (r"$\mathrm{A}$$\Omega$$\alpha$$\omega$$\varsigma$ $\lambda$\texttt{U+4E2D}")


def test_missing_values_are_dashes_and_brackets_are_no_options():
    assert latex._cell("-") == "--"
    sheet = ReportTable("T", ("a", "b\n> c"), [("[1, 2]", "-"), ("*", "")], 1)
    text = "\n".join(latex._tables(sheet, set()))
    assert r"a & \shortstack[r]{b\\\textgreater{} c} \\" in text
    assert "{[}1, 2{]} & -- \\\\\n{*} &  \\\\" in text


def test_long_tables_are_cut_and_wide_ones_are_scaled():
    body = [(str(number), "word " * 20) for number in range(2 * ROWS + 1)]
    made = list(latex._tables(ReportTable("Many", ("n", "words"), body, 2, None, "All of them."), {"many"}))
    assert [part.count(r" \\") - 1 for part in made] == [ROWS, ROWS, 1]
    assert [re.findall(r"\\(?:caption|label)\{(.*?)\}", part) for part in made] == [
        ["Many. All of them.", "tab:many-2"],
        ["Many, continued", "tab:many-2-part2"],
        ["Many, continued", "tab:many-2-part3"],
    ]
    assert r"\begin{tabular}{@{}lp{0.45\linewidth}@{}}" in made[0]
    wide = list(latex._tables(ReportTable("Wide", tuple("abcdefghi"), [tuple("123456789")], 1), set()))
    assert r"\resizebox{\linewidth}{!}{%" in wide[0] and r"\end{tabular}}" in wide[0]
    eight = list(latex._tables(ReportTable("Wide", tuple("abcdefgh"), [tuple("12345678")], 1), set()))
    assert "resizebox" not in eight[0]
    for part in (*made, *wide, *eight):
        check(part)


@settings(max_examples=60)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=2), CELLS, CELLS)
def test_no_text_breaks_a_table(body, title, caption):
    sheet = ReportTable(title, ("a", f"{title}\n{title}", "c"), body, 2, None, caption)
    for part in latex._tables(sheet, set()):
        check(part)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_takes_it(tmp_path):
    letters = [chr(code) for code in (*range(0x20, 0x250), *range(0x370, 0x400))] + NASTY
    body = [(letter, f"x{letter}", letter * 2) for letter in letters]
    odd = "\n".join(
        latex._tables(ReportTable("All [letters] %", ("a [*]", "b\n> c", "d"), body, 2, None, "É \\ $"), set())
    )
    lines = [r"\documentclass{article}", r"\usepackage{booktabs,graphicx}", r"\extrafloats{100}", r"\begin{document}"]
    text = "\n".join([*lines, latex.latex(report_of(tmp_path / "runs")), odd, r"\end{document}"])
    (tmp_path / "a.tex").write_text(text, encoding="ascii")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
