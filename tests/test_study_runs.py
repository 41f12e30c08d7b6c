"""Studies from beginning to end, as real processes: killed and continued, here and by two workers, the same results."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import environment, spt, weights

pytestmark = pytest.mark.slow

SMALL = ["task.length=32", "task.resample_each_epoch=false", "model.d_model=16", "model.n_layers=1", "model.d_state=16"]
RECIPES = {"digits": ["quickstart-dlr"], "generated": ["skills/reverse-dlr", *SMALL]}
STUDIES = {
    "compute": ["--shares", "0,0.5", "--match", "examples"],
    "data": ["--fractions", "0.3,1"],
    "init": [],
    "compare": ["--arms", "scratch,spt,frozen,encoder,shuffled,joint=0.5"],
    "tune": ["--space", "learning_rate=0.001,0.01"],
}


def command(kind, task, out, *more):
    recipe, *changes = RECIPES[task]
    return ["study", kind, recipe, *changes, *STUDIES[kind], "--seeds", "2", "--smoke", "--cpu", "--out", out, *more]


def report(folder: Path) -> dict:
    """The report's JSON without what differs between two times and places of running."""
    (path,) = folder.glob("*/report.json")
    found = json.loads(path.read_text())

    def still(value):
        if isinstance(value, dict):
            return {k: still(v) for k, v in value.items() if not any(word in k for word in MOVING)}
        if isinstance(value, list):
            return [still(one) for one in value]
        return Path(value).name if isinstance(value, str) and "/" in value and Path(value).is_absolute() else value

    return still(found)


MOVING = ("seconds", "time", "peak", "command", "runs", "memory", "compute", "notes", "matches", "warnings")


def equal(one: Path, other: Path) -> None:
    """The same runs, bit for bit, and the same report."""
    names = sorted(path.parent.name for path in one.glob("*/result.json"))
    assert names == sorted(path.parent.name for path in other.glob("*/result.json")) and len(names) >= 6
    for name in names:
        first, second = (json.loads((root / name / "result.json").read_text()) for root in (one, other))
        assert (first["val"], first["test"], first["best_step"]) == (second["val"], second["test"], second["best_step"])
        here, there = weights(one / name / "checkpoints/best"), weights(other / name / "checkpoints/best")
        assert here.keys() == there.keys() and all(np.array_equal(here[key], there[key]) for key in here), name
    assert report(one) == report(other)


def killed_in_the_middle(arguments, cwd, done: int) -> None:
    """Run until so many runs are done, then SIGKILL the whole group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spt_cli", *map(str, arguments)],
        cwd=cwd,
        env=environment({"OMP_NUM_THREADS": "1"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    out = Path(arguments[arguments.index("--out") + 1])
    try:
        end = time.monotonic() + 200
        while process.poll() is None and len(list(out.glob("*/result.json"))) < done and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        pytest.param(kind, task, marks=[pytest.mark.chaos] if task == "generated" and kind != "data" else [])
        for kind in STUDIES
        for task in RECIPES
    ],
)
def test_killed_and_continued_here_and_by_workers(kind, task, tmp_path):
    once = {"OMP_NUM_THREADS": "1"}
    whole = spt(*command(kind, task, tmp_path / "whole"), cwd=tmp_path, env=once)
    assert whole.returncode == 0, whole.stderr
    for place, more in (("here", []), ("workers", ["--jobs", "2"])):
        out = tmp_path / place
        killed_in_the_middle(command(kind, task, out, *more), tmp_path, done=3)
        left = len(list(out.glob("*/result.json")))
        continued = spt(*command(kind, task, out, *more), cwd=tmp_path, env=once)
        assert continued.returncode == 0, continued.stderr
        equal(tmp_path / "whole", out)
        assert 3 <= left < len(list(out.glob("*/result.json"))), "it was killed in the middle"
        shutil.rmtree(out)
