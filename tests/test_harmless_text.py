"""Names and cells of other people's files do nothing where they are read: in a terminal, in a spreadsheet."""

import csv
import io

import pytest
from test_bad_inputs import call

from spt.cli import output
from spt.errors import printable
from spt.report.format import csv_text

ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand é — 漢", "two\nlines\tand é — 漢"),
        (ESCAPE, "\\x1b]0;owned\\x07"),
        ("\x9b31m\x7f\r", "\\x9b31m\\x7f\\r"),
        ("fdp\u202eexe", "fdp\\u202eexe"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert printable(text) == shown


def test_errors_and_tables_hold_no_control_characters(tmp_path, capsys):
    code, _, errors = call(tmp_path, "show", "quickstart", f"model.{ESCAPE}x=1", f"model.name={ESCAPE}")
    assert code == 2 and "\x1b" not in errors and "\\x1b" in errors
    output.print_table([{"name": f"a{ESCAPE}"}], ("name",), as_json=False)
    output.show(ESCAPE)
    output.notify(ESCAPE)
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and shown.out.count("\\x1b") == 2 and "owned" in shown.err


def test_a_spreadsheet_takes_no_text_of_a_report_for_a_formula():
    texts = ["=cmd()", "+1+cmd()", "@sum", "-2+3+cmd()", "\tx", "-", "-0.5", "+4.17", "-1e-5", "a=b", -0.5, None]
    cells = [row["a"] for row in csv.DictReader(io.StringIO(csv_text([{"a": text, "b": 0} for text in texts])))]
    assert cells == ["'=cmd()", "'+1+cmd()", "'@sum", "'-2+3+cmd()", "'\tx", *texts[5:10], "-0.5", ""]
