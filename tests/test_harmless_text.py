"""Names and cells of other people's files do nothing where they are read: in a terminal, in a spreadsheet."""

import csv
import io
import os
import pty
import struct
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest
import records
from test_bad_inputs import call

from spt.cli import output
from spt.cli.output import wrapped
from spt.errors import visible
from spt.report import collect
from spt.report.format import csv_text
from spt.report.write import write_report

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
    assert visible(text) == shown


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


def test_half_a_surrogate_pair_in_a_runs_file_does_not_stop_a_report(tmp_path):
    folder = records.compared(tmp_path, [0.5, 0.6], [0.7, 0.8])
    (tmp_path / "finetune-scratch0/env.json").write_text('{"device": "\\ud800"}')
    records.start(tmp_path, "finetune-bad", state="failed", reason="\ud800", exit_code=3)
    cells = [{"row": 0, "arm": "spt", "seed": 2, "run": "finetune-bad", "parent": None}]
    write_report(collect.read_report([folder, records.plan(tmp_path, cells, "compare-2")]), tmp_path / "out")
    assert "\\ud800" in (tmp_path / "out/report.md").read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_named_in_utf_8_is_refused_before_training(tmp_path):
    code, _, errors = call(tmp_path, "compare", "quickstart", "--seeds", "1", "--out", "runs\udcff")
    assert code == 2 and "is not a name in UTF-8" in errors and list(tmp_path.iterdir()) == []


def test_a_message_is_broken_between_words_on_a_terminal_alone() -> None:
    text = f"splits: {'equal shares ' * 10}of /a/path/{'x' * 60}\n  a second line"
    ours, theirs = pty.openpty()
    try:
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        with os.fdopen(theirs, "w") as terminal:
            lines = wrapped(text, terminal).split("\n")
    finally:
        os.close(ours)
    assert " ".join(line.strip() for line in lines) == " ".join(text.split())
    assert max(len(line) for line in lines if "xx" not in line) <= 50 < len(text)
    assert lines[1].startswith("  equal") or lines[1].startswith("  shares")
    assert wrapped(text, io.StringIO()) == text and wrapped(text, None) == text
