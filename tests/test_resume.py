"""Bad days: killed, stopped, out of disk. The same command goes on, and the end is that of a day without trouble.

Real processes, through the command line. `compare` over two seeds makes six runs: its report, and every run's
weights, course and scores must come out bit for bit.
"""

import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny import RECIPE, TASK, changed, environment, loaded, run, spt_job, weights

from spt.execution import run_study
from spt.runs.plan import StudyPlan
from spt.studies.grid import StudyGrid

SAVING = ("--save-every", "0")  # a checkpoint after every step
COMPARE = ("compare", "small.yaml", "--seeds", "2", "--json")
SECONDS = {"seconds", "device_seconds", "peak_bytes"}  # what an interruption may change
SMALL = {
    "task": {"name": "./toy.py"},
    "model__dropout": 0.2,
    "pretrain__train": {"steps": 30, "batch_size": 7, "learning_rate": 0.01, "evaluate_every": 7},
    "finetune__train": {
        "epochs": 4,
        "batch_size": 7,
        "learning_rate": 0.01,
        "schedule": "plateau",
        "plateau_patience": 1,
        "evaluate_every": 3,
    },
}


@pytest.fixture(scope="module")
def quiet_day(tmp_path_factory) -> Path:
    """A folder with a recipe, and `whole`: a comparison that nothing disturbed."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "toy.py").write_text(TASK)
    (folder / "small.yaml").write_text(yaml.safe_dump(changed(RECIPE, **SMALL)))
    done = finish(folder, "whole")
    assert done.returncode == 0, done.stderr
    return folder


def start(folder: Path, out: str, *more: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "spt_cli", *COMPARE, "--micro-batch", "3", *more, "--out", out]
    env = environment({"OMP_NUM_THREADS": "1"})
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(folder: Path, out: str, *more: str, **options) -> subprocess.CompletedProcess[str]:
    process = start(folder, out, *more, **options)
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def steps_done(runs: Path) -> int:
    """Optimiser steps so far, as far as checkpoints and results tell."""
    saved = {path.parent.parent: int(path.name.partition("-")[2]) for path in sorted(runs.glob("*/checkpoints/step-*"))}
    total = sum(saved.values())
    for path in runs.glob("*/result.json"):
        if path.parent not in saved:
            total += json.loads(path.read_text())["own"]["steps"]
    return total


def same_day(one: Path, two: Path) -> None:
    """Every run's weights, course, scores, predictions and status, and the report, but for seconds and memory."""
    names = sorted(path.parent.name for path in one.glob("*/result.json"))
    assert names == sorted(path.parent.name for path in two.glob("*/result.json")) and len(names) == 6
    for name in names:
        a, b = (without_seconds(json.loads((root / name / "result.json").read_text())) for root in (one, two))
        assert a == b
        for kept in ("metrics.jsonl", "recipe.yaml", "job.json"):
            assert (one / name / kept).read_bytes() == (two / name / kept).read_bytes(), (name, kept)
        if name.startswith("finetune"):
            assert (one / name / "predictions.parquet").read_bytes() == (
                two / name / "predictions.parquet"
            ).read_bytes()
        assert [path.name for path in (two / name / "checkpoints").iterdir()] == ["best"]
        mine, theirs = (weights(root / name / "checkpoints/best") for root in (one, two))
        assert all((mine[key] == theirs[key]).all() for key in mine) and mine.keys() == theirs.keys()
        assert json.loads((two / name / "status.json").read_text())["state"] == "done"
    tables = [
        list(csv.DictReader(next(root.glob("compare-*/report.csv")).read_text().splitlines())) for root in (one, two)
    ]
    changing = ("command", "second", "peak")
    for mine, theirs in zip(*tables, strict=True):
        kept = [column for column in mine if not any(word in column for word in changing)]
        assert len(kept) > 30 and [mine[c] for c in kept] == [theirs[c] for c in kept]


def without_seconds(value):
    if isinstance(value, dict):
        return {key: without_seconds(inner) for key, inner in value.items() if key not in SECONDS}
    return value


def disturbed(folder: Path, out: str, moments: list[tuple[int, int]]) -> None:
    """Run until `steps` steps are done, deliver the signal, and so on; then to the end."""
    for steps, number in moments:
        process = start(folder, out, *SAVING)
        deadline = time.monotonic() + 300
        while steps_done(folder / out) < steps and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
        if process.returncode == 0:
            break  # it was quicker
        codes = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
        assert process.returncode == codes[number], errors
        assert output == "" and "Traceback" not in errors
    done = finish(folder, out)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["n"] == 2
    same_day(folder / "whole", folder / out)


@pytest.mark.slow
def test_a_disturbed_comparison_ends_as_a_quiet_one(quiet_day):
    """In the pretraining of the first seed, in a finetuning, in the second seed; 180 steps in all."""
    moments = [(11, signal.SIGKILL), (47, signal.SIGTERM), (100, signal.SIGINT), (150, signal.SIGKILL)]
    disturbed(quiet_day, "disturbed", moments)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [0, *(pytest.param(draw, marks=pytest.mark.chaos) for draw in (1, 2))])
def test_sixteen_disturbances_at_random_moments(quiet_day, draw):
    chance = random.Random(draw)
    moments = sorted(chance.sample(range(1, 170), 16))
    kinds = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT]
    disturbed(quiet_day, f"random{draw}", [(steps, chance.choice(kinds)) for steps in moments])


@pytest.mark.slow
def test_a_file_limit_ends_in_words_and_loses_nothing(quiet_day):
    """No file may grow beyond 12 kB: weights can be kept (checkpoints hold larger ones), a state cannot."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    done = finish(quiet_day, "limited", *SAVING, preexec_fn=limit)
    assert done.returncode == 7, done.stderr
    assert "spt: cannot write" in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    leftovers = [path for path in (quiet_day / "limited").rglob("*") if path.name.endswith(".tmp")]
    assert leftovers == []
    assert finish(quiet_day, "limited").returncode == 0
    same_day(quiet_day / "whole", quiet_day / "limited")


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [90, 200])
def test_a_full_disk_ends_in_words_and_loses_nothing(quiet_day, kilobytes, tmp_path):
    """A file system of its own, too small; where such a thing may be made."""
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {tmp_path}"
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*enter, mount], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    out = f"disk{kilobytes}"
    command = f"{sys.executable} -m spt_cli {' '.join(COMPARE)} --micro-batch 3 --save-every 0 --out {tmp_path}"
    script = f"{mount} && {command}; code=$?; cp -a {tmp_path} {quiet_day / out}; exit $code"
    env = environment({"OMP_NUM_THREADS": "1"})
    done = subprocess.run([*enter, script], cwd=quiet_day, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 7, done.stderr
    assert "the disk is full; free some space and repeat the command, it continues" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    again = finish(quiet_day, out)  # the same folder with room
    assert again.returncode == 0, again.stderr
    same_day(quiet_day / "whole", quiet_day / out)


def test_a_study_whose_file_is_missing_gets_it_again(tmp_path, monkeypatch):
    """A process may be killed between the plan and the study's file."""
    for name, value in (("to_yaml", lambda study, comment: "kind: compare\n"), ("_same", lambda one, two: True)):
        monkeypatch.setattr(run_study, name, value)
    monkeypatch.setattr(run_study, "read_plan", lambda folder: None)
    (tmp_path / "study.json").write_text("{}")
    grid = object.__new__(StudyGrid)
    object.__setattr__(grid, "study", None)
    run_study.write_plan(tmp_path, grid, StudyPlan.model_construct())
    assert (tmp_path / "study.yaml").is_file()


def test_a_finished_run_is_on_the_disk_whole(tmp_path, monkeypatch):
    """A power cut loses what was not synced; the file that says that the run is done must not outlive the others."""
    synced, real = set(), os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        status = os.fstat(descriptor)
        synced.add((status.st_ino, status.st_size, status.st_mtime_ns))

    monkeypatch.setattr(os, "fsync", fsync)
    run(spt_job(loaded(tmp_path)), tmp_path, save_every=0.0)
    files = [path for path in tmp_path.glob("*-*/**/*") if path.is_file()]
    states = {path.name: path.stat() for path in files}
    assert {"predictions.parquet", "metrics.jsonl", "model.safetensors", "result.json"} <= states.keys()
    lost = [name for name, s in states.items() if (s.st_ino, s.st_size, s.st_mtime_ns) not in synced]
    assert lost == []


@pytest.mark.slow
def test_an_orphaned_run_is_recognised(quiet_day):
    """Its lock went with the process; its status still says running, and what it was writing lies about."""
    process = start(quiet_day, "orphan", *SAVING)
    while steps_done(quiet_day / "orphan") < 5:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    (checkpoints,) = (quiet_day / "orphan").glob("*/checkpoints")
    (checkpoints / ".step-00000003.tmp").mkdir(exist_ok=True)
    (checkpoints / ".step-00000003.tmp/model.safetensors").write_bytes(b"half")
    (checkpoints.parent / ".status.json.1.tmp").write_text("{")
    done = finish(quiet_day, "orphan")
    assert [path for path in checkpoints.parent.rglob("*") if path.name.endswith(".tmp")] == []
    assert f"was left by process {process.pid} on {os.uname().nodename}, which was killed" in done.stderr
    same_day(quiet_day / "whole", quiet_day / "orphan")


@pytest.mark.slow
def test_the_plan_of_a_comparison_survives(quiet_day):
    (plan,) = (quiet_day / "whole").glob("compare-*/study.json")
    assert StudyPlan.model_validate_json(plan.read_text()).seeds == (0, 1)
