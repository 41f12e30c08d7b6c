"""Commands on inputs changed at random (tests/fuzz): a few of each kind, and that what must not happen is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, environment

sys.path.insert(0, str(ROOT))  # tests.fuzz is a program, run from the root of a checkout

from tests.fuzz.guards import Guard
from tests.fuzz.judge import harm, problems_of
from tests.fuzz.mutations import FORMULA, HTML, LATEX
from tests.fuzz.process import Ended

QUICK = ("recipes", "overrides", "studies", "data")
SLOW = ("runs", "checkpoints", "reports")


def fuzz(*commands: list[str]) -> tuple[list[str], list[int]]:
    """What the program prints last, and how it ends, for each of the commands: one process, since imports take long."""
    code = f"from tests.fuzz.__main__ import main\nfor words in {commands!r}:\n    print('code', main(words))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)  # which cases failed and why, where a test fails
    lines = done.stdout.splitlines()
    ends = [index for index, line in enumerate(lines) if line.startswith("code ")]
    assert len(ends) == len(commands), done.stdout
    return [lines[index - 1] for index in ends], [int(lines[index].split()[1]) for index in ends]


def targets(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ("--target", name)]


def test_changed_inputs_end_in_results_or_sentences_and_planted_faults_are_found(tmp_path):
    state = ["--state", str(tmp_path), "--target", "studies"]
    lines, codes = fuzz(
        [*targets(QUICK), "--count", "3", "--seed", "1", "--state", str(tmp_path)],
        [*state, "--count", "4", "--plant"],
        [*state, "--count", "3", "--seed", "1"],  # all of them done above: nothing is run
    )
    assert lines == ["12 cases, 0 failures", "4 cases, 4 failures", "3 cases, 0 failures"] and codes == [0, 1, 0]
    planted = [json.loads(line) for line in (tmp_path / "studies-0-plant.jsonl").read_text().splitlines()]
    for case, words in zip(planted, ("ZeroDivisionError", "unpickles", "outside its folders", "network"), strict=True):
        assert words in " ".join(case["problems"]).replace("connects to", "network"), case
        assert (tmp_path / f"failures/studies-0-{case['number']}/work/fuzz.yaml").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", SLOW)
def test_changed_runs_checkpoints_and_reports_end_in_results_or_sentences(target):
    assert fuzz(["--target", target, "--count", "20"]) == (["20 cases, 0 failures"], [0])


UNCHANGED = """
import pathlib, sys
from tests.fuzz.__main__ import judge, mutations, process, targets
state = pathlib.Path(sys.argv[1])
process.prepare(state / "home")
targets.run_base(state / "base")
work = state / "base/work"
run, scratch = str(targets.spt_run(work)), str(targets.scratch_run(work))
(study,) = (str(path.relative_to(work)) for path in (work / "runs").glob("compare-*"))
for words, *writes in targets.readers(run, run, scratch, study, str(targets.parent(work))):
    ended = process.run(process.Step(words, *writes), state / "base", 60)
    if words[1] != "kernels":  # which this model has none of
        assert ended.code == 0 and not judge.problems_of(ended, [], []), (words, ended)
"""


@pytest.mark.slow
def test_on_unchanged_inputs_every_command_succeeds_under_the_guard(tmp_path):
    """Else the guard itself would be what cases end with."""
    command = [sys.executable, "-c", UNCHANGED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "err", "problem"),
    [
        (0, "", None),
        (2, "spt: a key is unknown\n", None),
        (2, "Usage: spt …\nError: no such option\n", None),
        (1, "spt: a bug in spt: KeyError: 'x'\n", "exit code 1"),
        (None, "", "hangs"),
        (-9, "", "killed by signal 9"),
        (3, "Traceback (most recent call last):\nKeyError\n", "traceback"),
        (3, "", "0 sentences"),
        (3, "spt: a\nspt: b\n", "2 sentences"),
        (3, "spt: a\x1b[2J\n", "U+001B"),
        (3, f"spt: {'a' * 20_000}\n", "a long message"),
    ],
)
def test_what_an_end_is_judged(code, err, problem):
    found = problems_of(Ended(code, "", err, (), "", 1.0), [], [])
    assert (problem is None and not found) or (problem is not None and problem in found[0])


@pytest.mark.parametrize(
    ("name", "content", "harmful"),
    [
        ("a.html", HTML, True),
        ("a.html", HTML.replace("<", "&lt;"), False),
        ("a.tex", LATEX, True),
        ("a.csv", f"a,{FORMULA}\n", True),
        ("a.csv", f"a,'{FORMULA}\n", False),
        (".a.json.tmp", "", True),
    ],
)
def test_what_harms_where_it_is_read(tmp_path, name, content, harmful):
    (tmp_path / name).write_text(content)
    assert bool(harm(tmp_path / name)) == harmful


def test_writing_elsewhere_and_asking_the_network_are_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guard = Guard(tmp_path, [tmp_path / "out"], report=-1)
    write = os.O_WRONLY | os.O_CREAT
    for event, args in (
        ("open", (str(tmp_path / "in"), "w", write)),
        ("open", (str(tmp_path / "out/../in"), None, write)),
        ("os.mkdir", ("in", 0o777, -1)),
        ("os.rename", (str(tmp_path / "out/a"), str(tmp_path / "b"), -1, -1)),
        ("socket.connect", (None, ("127.0.0.1", 80))),
        ("socket.getaddrinfo", ("example.org", 80)),
        ("pickle.find_class", ("os", "system")),
        ("subprocess.Popen", ("/bin/sh", ["sh"], None, None)),
        ("exec", (compile("1", str(tmp_path / "model.py"), "exec"),)),
    ):
        assert guard.judge(event, args), event
    for event, args in (
        ("open", (str(tmp_path / "in"), "r", os.O_RDONLY)),
        ("open", (str(tmp_path / "out/a"), "w", write)),
        ("os.mkdir", ("out/a", 0o777, -1)),
        ("open", (str(Path("/dev/null")), "w", write)),
        ("socket.connect", (None, "/run/socket")),
        ("exec", (compile("1", "<string>", "exec"),)),
    ):
        assert guard.judge(event, args) is None, event
