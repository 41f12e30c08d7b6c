"""Commands whose output nobody reads, or cannot be written: what they do is done, and their code says what is true."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from tiny import ROOT, environment, recipe_file

SPT = f"{sys.executable} {ROOT / 'spt_cli.py'}"
TRAIN = "finetune tiny.yaml --scratch --cpu --out runs"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipe_file(tmp_path)
    return tmp_path


def shell(folder: Path, command: str, timeout: float = 120) -> tuple[int, str, str]:
    """A line of bash; `spt` stands for the command."""
    done = subprocess.run(
        ["bash", "-c", f'spt() {{ {SPT} "$@"; }}; {command}'],
        cwd=folder,
        env=environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def is_done(folder: Path) -> bool:
    return len(list(folder.glob("runs/*/result.json"))) == 1


def test_a_run_goes_on_when_nobody_hears_it_any_more(folder):
    """Not even the end of a log's reader is an end of the run, nor a success before its time."""
    assert shell(folder, f"(spt {TRAIN} 2>&1; echo $? > code) | true; sleep 0.1; cat code")[1] == "0\n"
    assert is_done(folder)


@needs_full
def test_a_run_goes_on_when_its_log_cannot_be_written(folder):
    assert shell(folder, f"spt {TRAIN} 2> /dev/full")[0] == 0
    assert is_done(folder)


@needs_full
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("spt show nope 2> /dev/full", 2),
        ("spt --version > /dev/full", 7),
        ("spt --help > /dev/full", 7),
        ("spt list tasks > /dev/full", 7),
        ("spt list tasks --json > /dev/full", 7),
    ],
)
def test_what_a_full_disk_does_to_output(folder, command, code):
    found, _, errors = shell(folder, command)
    assert found == code
    assert code == 2 or (errors.count("spt: ") == 1 and "No space left on device" in errors)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("spt --help | true; echo ${PIPESTATUS[0]}", 0),
        ("spt show --help | true; echo ${PIPESTATUS[0]}", 0),
        ("spt --version | true; echo ${PIPESTATUS[0]}", 0),
        ("spt list models | true; echo ${PIPESTATUS[0]}", 0),
        ("spt show nope | true; echo ${PIPESTATUS[0]}", 2),
        ("spt show quickstart >&-; echo $?", 0),
        ("spt show nope 2>&-; echo $?", 2),
        ("spt show quickstart <&- >&- 2>&-; echo $?", 0),
    ],
)
def test_streams_that_are_closed_or_left(folder, command, code):
    assert shell(folder, command)[1].split()[-1:] == [str(code)]


def test_a_terminal_has_no_line_that_it_would_break_within_a_word(tmp_path):
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (40, 80))
    command = [sys.executable, ROOT / "spt_cli.py", "env"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=there, stderr=there) as process:
        os.close(there)
        shown = b""
        with contextlib.suppress(OSError):
            while piece := os.read(here, 4096):
                shown += piece
    os.close(here)
    lines = shown.decode().splitlines()
    assert process.returncode == 0 and any(line.startswith("optional") for line in lines)
    assert [
        line for line in lines if len(line) > 80 and " " in line[20:]
    ] == []  # one word, such as a path, may be longer


def test_colours_are_for_terminals_alone(tmp_path):
    env = environment({"TERM": "xterm-256color", "COLUMNS": "80"})
    del env["NO_COLOR"]
    command = [sys.executable, ROOT / "spt_cli.py", "list", "models"]
    piped = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert piped.returncode == 0 and b"\x1b" not in piped.stdout + piped.stderr
    here, there = pty.openpty()
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=there, stderr=there) as process:
        os.close(there)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while piece := os.read(here, 4096):
                shown += piece
    os.close(here)
    assert process.returncode == 0 and b"\x1b[1m" in shown
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode()
    assert "transformer" in plain and max(map(len, plain.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "code"), [pytest.param("> /dev/full", 7, marks=needs_full), (">&-", 0), ("2>&-", 0), ("2>&1 | true", 0)]
)
def test_two_processes_end_in_order_whatever_happens_to_their_output(folder, where, code):
    began = time.monotonic()
    command = f"(spt {TRAIN} --num-processes 2; echo $? > code) {where}; sleep 0.1; cat code >&3"
    shell(folder, f"exec 3> said; {command}")
    assert (folder / "said").read_text() == f"{code}\n" and is_done(folder)
    assert time.monotonic() - began < 100  # no process waits for one that has gone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_end_changes_nothing(folder, number):
    """Python takes some time to take itself apart."""
    command = [sys.executable, "-m", "spt", "show", "quickstart"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment(), **pipes) as shown:
        assert shown.stdout is not None and shown.stderr is not None
        seen = b""
        while b"--all" not in seen[-300:] and (more := os.read(shown.stdout.fileno(), 65536)):
            seen += more
        time.sleep(0.01)
        os.kill(shown.pid, number)
        said = shown.stderr.read()
    assert shown.returncode == 0 and said == b"", said
