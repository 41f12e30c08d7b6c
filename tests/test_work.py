"""Workers that share a study make together what one command makes, whoever of them dies, stops or fails."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import Block, blocks, parse
from test_claims import holder
from test_execute import same_runs
from test_study_runs import report
from tiny import environment, recipe_file, spt
from typer.testing import CliRunner

from spt.api import PlannedStudy, plan_study
from spt.errors import CheckpointError, DataError, FailedRuns, Interrupted, OutputError, Stopped, UsageError
from spt.execution import work
from spt.runs import claim, folder
from spt.runs.claim import Claim
from spt.runs.folder import RunFolder
from spt.runtime.settings import Settings
from spt.training import checkpoint
from spt_cli import app

STEPS = {"steps": 4, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 2}
SHORT = {"pretrain__train": STEPS, "finetune__train": dict(STEPS)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(work, "FIRST_POLL", 0.02)
    monkeypatch.setattr(folder, "POLL", 0.05)


def planned(root: Path, kind: str = "compare", settings: Settings | None = None, **keys: Any) -> PlannedStudy:
    """A study of the recipe beside its folder of runs."""
    study = {"kind": kind, "recipes": [str(root.parent / "tiny.yaml")], "seeds": 1, **keys}
    return plan_study(study, out=root, settings=settings or Settings(quiet=True, cpu=True))


STUDIES = {
    "compare": {"baselines": ["majority"]},
    "tune": {"space": {"learning_rate": [0.01, 0.001]}},
}


@pytest.mark.parametrize("kind", ["compare", pytest.param("tune", marks=pytest.mark.slow)])
def test_workers_in_turn_make_what_one_command_makes(tmp_path, monkeypatch, kind):
    """One run each, on two machines that do not see each other's locks."""
    recipe_file(tmp_path, **SHORT)
    alone, shared = (tmp_path / name for name in ("alone", "shared"))
    planned(alone, kind, **STUDIES[kind]).run()
    made = []
    for turn in range(30):
        name = f"machine {turn % 2}"
        for module in (claim, folder):
            monkeypatch.setattr(module, "machine", lambda name=name: name)
        done = planned(shared, kind, **STUDIES[kind]).work(most=1, wait=False)
        made.append(done.made)
        assert done.failed == 0
        if done.left == 0:
            break
    assert made[:-1] == [1] * (len(made) - 1) and sum(made) == len(list(shared.glob("*/checkpoints")))
    same_runs(alone, shared)
    assert report(alone) == report(shared)
    written = (done.folder / "report.json").stat().st_mtime_ns
    assert planned(shared, kind, **STUDIES[kind]).work() == (done.folder, 0, 0, 0)
    assert (done.folder / "report.json").stat().st_mtime_ns == written  # it says all there is


def test_a_run_that_others_have_is_left_to_them_until_they_are_gone(tmp_path, monkeypatch):
    recipe_file(tmp_path, **SHORT)
    study = planned(tmp_path / "runs")
    (job,) = (cell.job.parent for cell in study.grid.cells if cell.arm == "spt")
    study.folder.parent.mkdir()
    with holder(study.folder.parent, "there", job.name) as other:
        done = study.work(wait=False)
        assert (done.made, done.failed, done.left) == (1, 0, 2)  # scratch; pretraining and what starts from it are left
        assert not (done.folder / "report.json").exists()
        other.process.kill()
        other.process.join()
        done = study.work()  # waits for the lease of the dead one
    assert (done.made, done.failed, done.left) == (2, 0, 0) and (done.folder / "report.json").exists()


class Thief:
    """Takes over the first run that is about to call a method of its folder: to log something, if no other is named."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: str = "log") -> None:
        self.run: RunFolder | None = None
        method = getattr(RunFolder, before)

        def take_over_first(run: RunFolder, *arguments: Any, **numbers: Any) -> None:
            if self.run is None:
                self.take(run)
            method(run, *arguments, **numbers)

        monkeypatch.setattr(RunFolder, before, take_over_first)

    def take(self, run: RunFolder) -> None:
        self.run, number = run, run._claims.newest().number
        self.claim = Claim(run._claims, number + 1, 60.0, locked=False)
        assert self.claim.take()
        self.status = (run.path / "status.json").read_bytes()


def test_whoever_loses_a_run_leaves_it_as_it_is(tmp_path, monkeypatch, messages):
    """The next checkpoint, or line of metrics, is that of who has taken it over."""
    recipe_file(tmp_path, **SHORT)
    study, thief = planned(tmp_path / "runs"), Thief(monkeypatch)
    done = study.work(wait=False)
    assert done.failed == 0 and done.left >= 1
    path = thief.run.path
    assert (path / "status.json").read_bytes() == thief.status and not (path / "metrics.jsonl").read_text()
    assert not (path / "result.json").exists()
    assert any("was taken over by another process" in text for text in messages)
    thief.claim.release()
    assert study.work()[1:] == (3 - done.made, 0, 0)


def test_a_checkpoint_that_cannot_be_written_since_the_run_is_anothers_is_no_failure(tmp_path, monkeypatch, messages):
    """Whoever takes a run over removes what the other, stopped in the middle of saving, goes on writing."""
    recipe_file(tmp_path, **SHORT)
    study = planned(tmp_path / "runs", settings=Settings(quiet=True, cpu=True, save_every=0.0))
    swept = []

    class Sweeping(Thief):
        def take(self, run: RunFolder) -> None:
            super().take(run)
            swept.extend(run.checkpoints.glob(".step-*.tmp"))
            checkpoint._sweep(run)

    thief = Sweeping(monkeypatch, before="sync_metrics")
    done = study.work(wait=False)
    assert len(swept) == 1
    assert done.failed == 0 and done.left >= 1
    assert (thief.run.path / "status.json").read_bytes() == thief.status
    assert any("was taken over by another process" in text for text in messages)


def test_a_study_that_loses_a_run_waits_for_the_other(tmp_path, monkeypatch, messages):
    recipe_file(tmp_path, **SHORT)
    study, thief = planned(tmp_path / "runs"), Thief(monkeypatch)
    acquire = RunFolder._acquire

    def give_back(run: RunFolder, wait: Any, lease: float) -> None:
        def release() -> None:
            wait()
            thief.claim.release()

        acquire(run, release if thief.run is not None and run.name == thief.run.name else wait, lease)

    monkeypatch.setattr(RunFolder, "_acquire", give_back)
    assert study.run().failed == 0
    said = [text for text in messages if thief.run.name in text]
    assert "was taken over" in said[0] and "waiting for it" in said[1]


def test_a_run_that_fails_is_tried_once_by_those_who_see_it(tmp_path, monkeypatch, messages):
    """And once more by a command that begins afterwards."""
    recipe_file(tmp_path, **SHORT)
    study, attempts = planned(tmp_path / "runs"), []
    (broken,) = (cell.job.name for cell in study.grid.cells if cell.arm == "scratch")
    attempt, begun = work.attempt_run, []

    def failing(request, root, runtime):
        attempts.append(request.job.name)
        if request.job.name != broken:
            return attempt(request, root, runtime)
        run = RunFolder(root, broken)
        run.path.mkdir(exist_ok=True)
        with run.locked():
            run.set_status("failed", "it broke", 1)
        if not begun:  # another worker, which had begun when it failed
            begun.append(True)
            assert study.work(wait=False).failed == 1
        return "it broke"

    monkeypatch.setattr(work, "attempt_run", failing)
    done = study.work()
    assert done.failed == 1 and attempts.count(broken) == 2  # the second began after it had failed
    assert len(attempts) == len(set(attempts)) + 1
    assert study.work().failed == 1 and attempts.count(broken) == 3
    assert "it broke" in " ".join(messages)


def test_what_was_chosen_stands(tmp_path, monkeypatch):
    """A trial that failed is not tried again once others work with the choice."""
    recipe_file(tmp_path, **SHORT)
    study = planned(tmp_path / "runs", "tune", **STUDIES["tune"])
    failing = study.grid.searches[0].trials[0].job.name
    attempt = work.attempt_run
    tried = []

    def breaking(request, root, runtime):
        tried.append(request.job.name)
        if request.job.name == failing:
            (root / failing).mkdir(exist_ok=True)
            RunFolder(root, failing).set_status("failed", "no luck", 1)
            return "no luck"
        return attempt(request, root, runtime)

    monkeypatch.setattr(work, "attempt_run", breaking)
    assert study.work().failed == 1 and tried.count(failing) == 1
    done = study.work()
    assert (done.made, done.failed, done.left) == (0, 1, 0) and tried.count(failing) == 1


def test_who_does_not_wait_leaves_the_report_to_the_one_that_makes_it(tmp_path, messages):
    recipe_file(tmp_path, **SHORT)
    study = planned(tmp_path / "runs")
    (study.work().folder / "report.json").unlink()
    with holder(study.folder.parent, name=study.folder.name):
        done = study.work(wait=False)
    assert (done.made, done.left) == (0, 0) and not (done.folder / "report.json").exists()
    assert "another worker makes the report" in messages


def test_a_folder_that_is_removed_meanwhile_is_no_fault_of_the_command(tmp_path, monkeypatch):
    recipe_file(tmp_path, **SHORT)
    study = planned(tmp_path / "runs")
    attempt = work.attempt_run

    def remove(*arguments: Any) -> str | None:
        shutil.rmtree(study.folder, ignore_errors=True)
        return attempt(*arguments)

    monkeypatch.setattr(work, "attempt_run", remove)
    with pytest.raises(OutputError, match="was removed while it was worked on"):
        study.work()
    monkeypatch.undo()
    done = study.work()
    assert (done.made, done.left) == (0, 0) and (done.folder / "report.json").exists()


def test_the_command_says_what_it_made_and_what_is_left(tmp_path, monkeypatch):
    recipe_file(tmp_path, **SHORT)
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    command = ["study", "work", "study.yaml", "--cpu", "--out", "runs", "--max-runs", "1"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout).items() >= {"made": 1, "failed": 0}.items()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and re.search("1 runs made here; [34] are left in runs/compare-", done.stderr)
    refused = CliRunner().invoke(app, ["study", "work", "nonesuch"])
    assert refused.exit_code == 2 and refused.stderr.count("spt: ") == 1


def test_workers_never_start_over(tmp_path):
    recipe_file(tmp_path)
    with pytest.raises(UsageError, match="none of them starts over"):
        plan_study(
            {"kind": "compare", "recipes": [str(tmp_path / "tiny.yaml")]},
            out=tmp_path / "runs",
            settings=Settings(quiet=True, cpu=True, resume="never"),
        ).work()


def test_the_page_tells_schedulers_what_exit_codes_mean():
    """The example for Kubernetes is one of a job whose command exists and whose rules fit its codes."""
    (job,) = (raw for block in blocks("docs/schedulers.md") if (raw := cluster_job(block)))
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    actions = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    again, wrong = (Stopped, Interrupted), (UsageError, DataError, CheckpointError)
    assert actions == {
        **{error.exit_code: "Ignore" for error in again},
        **{error.exit_code: "FailJob" for error in wrong},
        FailedRuns.exit_code: "FailIndex",
    }
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"  # else podFailurePolicy is not allowed
    assert parse(tuple(container["command"][1:]))["source"] == "/shared/study.yaml"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def cluster_job(block: Block) -> dict[str, Any] | None:
    raw = yaml.safe_load(block.text) if block.language == "yaml" else {}
    return raw if "apiVersion" in raw else None


# ------------------------------------------------------------------------------------------------- several processes

STUDY = "kind: compare\nrecipes: [tiny.yaml]\nseeds: 2\n"
LONG = {"steps": 50, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 25}
ELSEWHERE = """
import sys
from spt.runs import claim, folder
claim.machine = folder.machine = lambda: "elsewhere"
import spt_cli
sys.argv[0] = "spt"
spt_cli.main()
"""


@contextlib.contextmanager
def worker(cwd: Path, *more: str, elsewhere: bool = False) -> Iterator["subprocess.Popen[str]"]:
    start = ["-c", ELSEWHERE] if elsewhere else ["-m", "spt_cli"]
    options = ["--cpu", "--out", "shared", "--save-every", "0", "--json", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, *start, "study", "work", "study.yaml", *options, *more],
        cwd=cwd,
        env=environment({"OMP_NUM_THREADS": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_of(cwd: Path, process: "subprocess.Popen[str]", end: float) -> Path:
    """The run that a worker trains, once it has saved a state."""
    while time.monotonic() < end and process.poll() is None:
        for path in (cwd / "shared").glob("*/status.json"):
            with contextlib.suppress(OSError, ValueError):
                status = json.loads(path.read_text())
                begun = (status["pid"], status["state"]) == (process.pid, "running")
                if begun and list(path.parent.glob("checkpoints/step-*")):
                    return path.parent
        time.sleep(0.02)
    raise AssertionError(process.communicate())


def holder_of(run: Path) -> int:
    return json.loads((run / "status.json").read_text())["pid"]


@pytest.mark.slow
def test_workers_take_over_from_those_that_are_killed_or_stopped(tmp_path):
    """One on another machine is killed, one here is stopped and goes on when its run is another's."""
    recipe_file(tmp_path, pretrain__train=LONG, finetune__train=dict(LONG))
    (tmp_path / "study.yaml").write_text(STUDY)
    alone = spt("study", "run", "study.yaml", "--cpu", "--threads", "1", "--out", "alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    lease, end = ["--lease", "3"], time.monotonic() + 500
    with (
        worker(tmp_path, *lease, elsewhere=True) as killed,
        worker(tmp_path, *lease) as stopped,
        worker(tmp_path, *lease) as going,
    ):
        run = run_of(tmp_path, stopped, end)
        stopped.send_signal(signal.SIGSTOP)
        other = run_of(tmp_path, killed, end)
        killed.kill()
        while holder_of(run) == stopped.pid or holder_of(other) == killed.pid:
            assert time.monotonic() < end and going.poll() is None
            time.sleep(0.05)
        stopped.send_signal(signal.SIGCONT)
        answers = [each.communicate(timeout=max(1, end - time.monotonic())) for each in (stopped, going)]
        for said in answers:
            sys.stdout.write("".join(said))
        assert [stopped.returncode, going.returncode] == [0, 0]
    assert f"{run.name} was taken over by another process" in answers[0][1]
    assert sum(json.loads(answer)["made"] for answer, _ in answers) == 6  # of which every one was made once
    shutil.rmtree(tmp_path / "shared/.locks")
    same_runs(tmp_path / "alone", tmp_path / "shared")
    assert report(tmp_path / "alone") == report(tmp_path / "shared")


@pytest.mark.slow
def test_a_worker_that_is_told_to_stop_says_so_and_gives_its_run_back(tmp_path):
    recipe_file(tmp_path, pretrain__train=LONG, finetune__train=dict(LONG))
    (tmp_path / "study.yaml").write_text(STUDY)
    with worker(tmp_path) as process:
        run = run_of(tmp_path, process, time.monotonic() + 120)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and errors.count("spt: stopped") == 1, errors
    assert RunFolder(run.parent, run.name).is_available() and os.listdir(run / "checkpoints")
