"""`spt bench gpu`: a list of commands that is carried out once, goes on where it was stopped, and keeps to its time."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from tiny import ROOT
from typer.testing import CliRunner

from spt.bench import gpu
from spt.bench.device import bench_device
from spt.bench.gpu import Command, bench_gpu
from spt.bench.gpu_summary import ON_PAPER
from spt.bench.tables import render
from spt.errors import BackendError, DataError, UsageError
from spt.runtime import signals
from spt_cli import app

COUNT = "import sys; open(sys.argv[1], 'a').write('x')"  # how often a command was carried out


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """The list, with other commands: name → program and limit. Returns the function that sets it."""

    def set_list(study="pass", **programs):
        def listing(state, folder):
            for name, (program, limit) in programs.items():
                yield Command(name, name, ("-c", program, str(tmp_path / f"{name}.count")), limit)

        def last(state, folder):
            return Command(gpu.STUDY, "study", ("-c", study, str(tmp_path / "study.count")), float("inf"))

        monkeypatch.setattr(gpu, "commands", listing)
        monkeypatch.setattr(gpu, "study", last)

    return set_list


def carry_out(tmp_path, minutes=60.0, **options):
    options = {"cpu": True, "quick": True, **options}
    return bench_gpu(tmp_path, minutes, ["quickstart"], tell=lambda _: None, **options)


def counts(tmp_path):
    return {path.stem: len(path.read_text()) for path in tmp_path.glob("*.count")}


def test_each_command_is_carried_out_once_and_failures_again(tmp_path, listed):
    listed(COUNT, one=(COUNT, 60.0), two=(COUNT + "; sys.exit('no kernel')", 60.0))
    state = carry_out(tmp_path)
    assert {name: record.status for name, record in state.commands.items()} == {
        "one": "done",
        "two": "failed",
        gpu.STUDY: "done",
    }
    assert "no kernel" in (tmp_path / "two.log").read_text()
    again = carry_out(tmp_path)
    assert counts(tmp_path) == {"one": 1, "two": 2, "study": 1} and again.seconds > state.seconds
    text = (tmp_path / gpu.SUMMARY).read_text()
    assert "| two | failed |" in text and "A rehearsal" in text


def test_a_command_that_hangs_takes_nothing_else_with_it(tmp_path, listed):
    """It is ended with what it started, at its own limit, and not tried again."""
    child = f"{COUNT}; import subprocess, time; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    listed(hangs=(child, 2.0), next=(COUNT, 60.0))
    state = carry_out(tmp_path)
    assert state.commands["hangs"].status == "cut off" and state.commands["next"].status == "done"
    assert carry_out(tmp_path).seconds == state.seconds and counts(tmp_path)["hangs"] == 1


def test_the_time_is_for_all_sittings(tmp_path, listed):
    """What had not enough of it is tried again when there is more."""
    listed(first=("import time; time.sleep(1.5)", 60.0), second=(COUNT, 60.0))
    state = carry_out(tmp_path, minutes=1 / 60)
    assert state.commands["first"].status == "cut off" and counts(tmp_path) == {}
    assert "first" in carry_out(tmp_path, minutes=1 / 60).commands
    more = carry_out(tmp_path)
    assert more.commands["first"].status == "done" and counts(tmp_path) == {"second": 1}


def test_the_study_has_what_remains_and_keeps_it(tmp_path, listed):
    listed("import time; time.sleep(2)", one=("pass", 60.0))
    state = carry_out(tmp_path, minutes=10.0, quick=False)
    given = state.study_seconds
    assert given == pytest.approx(gpu.RESERVE * (600 - state.commands["one"].seconds) / gpu.ARMS, rel=0.01)
    assert carry_out(tmp_path, minutes=30.0, quick=False).study_seconds == given, "its runs would have other names"
    short = tmp_path / "short"
    short.mkdir()
    assert gpu.STUDY not in carry_out(short, minutes=1.0, quick=False).commands


def test_another_folder_is_asked_for(tmp_path, listed):
    listed()
    carry_out(tmp_path)
    with pytest.raises(UsageError, match="begun with other quick"):
        carry_out(tmp_path, quick=False)
    path = tmp_path / gpu.FILE
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "environment": {**facts["environment"], "device": "NVIDIA A"}}))
    with pytest.raises(UsageError, match="begun on another device, NVIDIA A"):
        carry_out(tmp_path)
    path.write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        carry_out(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(tmp_path):
    with pytest.raises(BackendError, match="--cpu --quick rehearses"):
        carry_out(tmp_path, cpu=False)
    found = CliRunner().invoke(app, ["bench", "gpu", "--out", str(tmp_path / "out")])
    assert found.exit_code == BackendError.exit_code and not (tmp_path / "out").exists()


def test_the_commands_are_ours(tmp_path):
    """Every one of the full list is understood by the command line: what it names is there."""
    for quick in (False, True):
        state = gpu.State(quick=quick, cpu=False, recipes=gpu.RECIPES, environment={}, study_seconds=100.0)
        found = [*gpu.commands(state, tmp_path), gpu.study(state, tmp_path)]
        names = [command.name for command in found]
        assert len({*names}) == len(names) and "tests" in names
        for command in found:
            if command.arguments[1] == "spt_cli":
                asked = [*command.arguments[2:], "--help"]
                assert CliRunner().invoke(app, asked).exit_code == 0, asked
    assert ON_PAPER.keys() <= {f"step-{sizes.name}" for sizes in gpu.STEPS}


def test_what_the_device_reaches():
    found = bench_device(2, cpu=True, quick=True)
    assert set(found["flops_per_second"]) >= {"fp32", "bf16"} and found["bytes_per_second"] > 0
    assert render(found)


def test_a_stop_is_passed_on(tmp_path):
    """To the command that runs, which ends with what it had saved; the same command goes on."""
    program = f"""
import sys
from pathlib import Path
from spt.bench import gpu
from spt.runtime import signals
signals.install()
wait = "import signal, sys, time; signal.signal(15, lambda *_: (open(sys.argv[1], 'w').write('saved'), sys.exit())); "
wait += "open(sys.argv[1] + '.ready', 'w'); time.sleep(60)"
gpu.commands = lambda state, folder: [gpu.Command("one", "one", ("-c", wait, str(folder / "one.txt")), 60.0)]
gpu.bench_gpu(Path({str(tmp_path)!r}), 5.0, ["quickstart"], quick=True, cpu=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    )
    ready = tmp_path / "one.txt.ready"
    deadline = time.monotonic() + 100
    while not ready.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    while not (tmp_path / "one.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "one.txt").read_text() == "saved"
    assert json.loads((tmp_path / gpu.FILE).read_text())["commands"] == {}


@pytest.mark.slow
def test_a_rehearsal(tmp_path):
    """All of it, with tiny sizes on the CPU: every command is there, and the summary has what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "spt_cli", "bench", "gpu", "quickstart", "--quick", "--cpu", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / gpu.SUMMARY).read_text()
    for part in (
        "Matrix products: fp32",
        "| image-s4 |",
        "| vandermonde |",
        "1 of 1 models",
        "| digits / transformer |",
    ):
        assert part in text, part


def test_the_time_of_a_sitting_that_was_stopped_counts(tmp_path, listed, monkeypatch):
    listed(COUNT, one=(COUNT, 60.0))

    def stopped(*_):
        time.sleep(0.2)
        signals._cleanups[-1](None)  # as a signal does, behind which nothing else is run
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "_run", stopped)
    with pytest.raises(KeyboardInterrupt):
        carry_out(tmp_path)
    monkeypatch.undo()
    listed(COUNT, one=(COUNT, 60.0))
    assert carry_out(tmp_path).seconds > 0.2
