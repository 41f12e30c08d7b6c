"""Many runs: in order, in shards, in this process and by workers, who may die or be stopped at any moment."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import environment, loaded, own_task, spt_job, weights

from spt.cli.study import _part
from spt.config.job import Job, PretrainedWeights
from spt.config.recipe import ResolvedRecipe
from spt.errors import BackendError, Interrupted, OutputError, Stopped, UsageError
from spt.execution import local
from spt.execution import queue as run_queue
from spt.execution.local import run_locally
from spt.execution.queue import PARENT_FAILED, FailedRun, Failures, RunRequest, in_order, run_here, shard
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.environment import command_line
from spt.runtime.settings import Settings

SETTINGS = Settings(quiet=True, cpu=True)


def requests(*jobs: Job) -> list[RunRequest]:
    return [RunRequest(job, f"[{i}]") for i, job in enumerate(jobs, 1)]


def family(one: ResolvedRecipe, seed: int = 0) -> list[Job]:
    """From scratch, and pretrained."""
    return [Job(one, "finetune", seed), spt_job(one, seed)]


def tuned(one: ResolvedRecipe, rate: float) -> ResolvedRecipe:
    """Another recipe with the same pretraining."""
    finetune = one.recipe.finetune
    train = finetune.train.model_copy(update={"learning_rate": rate})
    recipe = one.recipe.model_copy(update={"finetune": finetune.model_copy(update={"train": train})})
    return replace(one, recipe=recipe)


def diverging(tmp_path: Path) -> ResolvedRecipe:
    """In the pretraining; from scratch it learns well."""
    return loaded(tmp_path, pretrain__train__learning_rate=1e30, pretrain__train__max_grad_norm=None)


def reasons(failed: list[FailedRun]) -> dict[str, str]:
    return {failure.job.name: failure.reason for failure in failed}


def state(root: Path, job: Job) -> str:
    return (RunFolder(root, job.name).status() or {}).get("state", "nothing")


def same_runs(one: Path, two: Path) -> None:
    names, others = (sorted(path.parent.name for path in root.glob("*/result.json")) for root in (one, two))
    assert names and names == others
    for name in names:
        if name.startswith("baseline-"):
            continue
        mine, theirs = (weights(root / name / "checkpoints/best") for root in (one, two))
        assert mine.keys() == theirs.keys() and all((mine[key] == theirs[key]).all() for key in mine)
        assert (one / name / "metrics.jsonl").read_bytes() == (two / name / "metrics.jsonl").read_bytes()


# ------------------------------------------------------------------------------------------------- order and shards


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> ResolvedRecipe:
    return loaded(tmp_path_factory.mktemp("one"))


def test_every_job_once_and_parents_first(one):
    scratch, spt = family(one)
    again, pretraining = spt_job(one), spt.parent
    other = spt_job(tuned(one, 0.5))
    weighted = Job(one, "finetune", 3, PretrainedWeights(Path("x"), "abc"))
    found = in_order(requests(scratch, spt, again, other, pretraining, weighted))
    assert [job.name for job, *_ in found] == [j.name for j in (scratch, pretraining, spt, other, weighted)]
    assert [label for _, label, *_ in found] == ["[1]", "[2]", "[2]", "[4]", "[6]"]
    assert in_order(found) == found


@pytest.fixture(scope="module")
def jobs(one) -> dict[tuple[str, int], Job]:
    found = {}
    for seed in range(5):
        scratch, spt = family(one, seed)
        found |= {("scratch", seed): scratch, ("spt", seed): spt, ("pretrain", seed): spt.parent}
        found["tuned", seed] = Job(tuned(one, 0.5), "finetune", seed, spt.parent)
    return found


@given(data=st.data(), count=st.integers(1, 5))
def test_shards_are_disjoint_complete_and_hold_whole_families(jobs, data, count):
    everything = requests(*data.draw(st.lists(st.sampled_from(list(jobs.values())), max_size=20)))
    parts = [shard(everything, index, count) for index in range(1, count + 1)]
    assert sorted(one.label for part in parts for one in part) == sorted(one.label for one in everything)
    names = [{job.name for job, *_ in in_order(part)} for part in parts]  # with the pretrainings
    assert sum(map(len, names)) == len(set().union(*names))
    labels = [[one.label for one in part] for part in parts]
    assert all([one.label for one in everything if one.label in part] == part for part in labels)  # in the same order
    sizes = [len(part) for part in names]
    assert max(sizes) - min(sizes) <= 3  # the largest family: a pretraining and two finetunings


@pytest.mark.parametrize("index", [0, 4])
def test_there_is_no_such_shard(one, index):
    with pytest.raises(UsageError, match=f"no shard {index} of 3"):
        shard(requests(*family(one)), index, 3)


ARRAY = {f"SLURM_ARRAY_TASK_{name}": n for name, n in (("ID", "14"), ("MIN", "10"), ("MAX", "18"), ("STEP", "2"))}


@pytest.mark.parametrize(
    ("environ", "text", "part"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "auto/8", (1, 8)),
        ({"JOB_COMPLETION_INDEX": "7"}, "auto/8", (8, 8)),
        ({**ARRAY, "SLURM_ARRAY_TASK_COUNT": "5"}, "auto", (3, 5)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, "auto", (4, 4)),
        ({}, "2/3", (2, 3)),
        ({"JOB_COMPLETION_INDEX": "0"}, "auto", "write auto/N"),
        ({"JOB_COMPLETION_INDEX": "8"}, "auto/8", "is 9/8 here"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "auto/8", "JOB_COMPLETION_INDEX is '-1'"),
        (ARRAY, "auto", "SLURM_ARRAY_TASK_COUNT is ''"),
        ({**ARRAY, "SLURM_ARRAY_TASK_COUNT": "4"}, "auto", "4 tasks from 10 to 18, with gaps"),  # --array=10,12,14,18
        ({}, "auto", "no variable"),
        ({}, "0/3", "with I from 1 to N"),
    ],
)
def test_the_number_of_a_part_may_be_the_schedulers(monkeypatch, environ, text, part):
    for name in ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if isinstance(part, tuple):
        assert _part(text) == part
    else:
        with pytest.raises(UsageError, match=part):
            _part(text)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_no_run_is_started_after_the_deadline(one, tmp_path, monkeypatch, workers):
    """Those at work end; the same call makes the rest."""
    root, seeds = tmp_path / "runs", [Job(one, "finetune", seed) for seed in range(4)]

    def done() -> int:
        return len(list(root.glob("*/result.json")))

    def make(**limit: float) -> list[FailedRun]:
        if workers:
            return run_locally(requests(*seeds), root, SETTINGS, workers, tmp_path / "study", **limit)
        return run_here(requests(*seeds), root, Runtime(SETTINGS), **limit)

    monkeypatch.setattr(run_queue, "time", SimpleNamespace(monotonic=lambda: 100.0 if done() >= 2 else 0.0))
    assert make(deadline=50.0) == []
    assert done() == 2 or (workers and done() == 3)  # that one was at work
    assert make() == [] and done() == 4


# -------------------------------------------------------------------------------------------------- in this process


def test_a_failed_pretraining_fails_its_children_alone(tmp_path, messages):
    """Also twice in a row: what diverged is not tried again, and says so."""
    bad, good = diverging(tmp_path), loaded(tmp_path)
    jobs = [*family(bad), spt_job(tuned(bad, 0.5)), spt_job(good, 1)]
    for words in ("finite", "diverged before"):
        failed = run_here(requests(*jobs), tmp_path / "runs", Runtime(SETTINGS))
        found = reasons(failed)
        assert list(found) == [jobs[1].parent.name, jobs[1].name, jobs[2].name]
        first, *children = found.values()
        assert children == [f"{PARENT_FAILED} {first}"] * 2
        assert words in first
        assert state(tmp_path / "runs", jobs[1].parent) == "diverged"
    assert state(tmp_path / "runs", jobs[0]) == state(tmp_path / "runs", jobs[3]) == "done"
    assert "[2] failed: " in " ".join(messages)


def test_a_finished_run_does_not_need_its_pretraining(tmp_path):
    job = spt_job(loaded(tmp_path))
    runs = tmp_path / "runs"
    assert run_here(requests(job), runs, Runtime(SETTINGS)) == []
    (runs / job.parent.name).rename(tmp_path / "elsewhere")
    assert run_here(requests(job), runs, Runtime(SETTINGS)) == []
    assert not (runs / job.parent.name).exists()
    (runs / job.name / "result.json").write_text("{")
    (failure,) = run_here(requests(job), runs, Runtime(SETTINGS))
    assert "cannot be read as a result" in failure.reason
    (failure,) = run_locally(requests(job), runs, SETTINGS, 1, tmp_path)
    assert "cannot be read as a result" in failure.reason


def make_here(jobs, runs, settings, folder):
    return run_here(jobs, runs, Runtime(settings))


def test_a_full_disk_ends_everything(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OutputError("full", hopeless=True)

    monkeypatch.setattr("spt.execution.queue.run_stage", full)
    with pytest.raises(OutputError):
        run_here(requests(*family(loaded(tmp_path))), tmp_path / "runs", Runtime(SETTINGS))


# ------------------------------------------------------------------------------------------------------- by workers


@pytest.fixture
def threads(monkeypatch) -> None:
    """Workers with as many threads as this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


@pytest.mark.slow
def test_workers_do_what_one_process_does(tmp_path, threads, messages):
    """Bit for bit; a failing run among them fails in the same words; what they say comes as whole lines."""
    one = own_task(tmp_path, model__dropout=0.2)
    bad = diverging(tmp_path)
    jobs = requests(*family(one), spt_job(bad), spt_job(one, 1))
    found = reasons(run_locally(jobs, tmp_path / "two", SETTINGS, 2, tmp_path / "study"))
    texts = list(messages)
    failed = reasons(run_here(jobs, tmp_path / "one", Runtime(SETTINGS)))
    assert found == failed and len(found) == 2
    same_runs(tmp_path / "one", tmp_path / "two")
    assert len(list((tmp_path / "two").glob("*/result.json"))) == 5
    for path in (tmp_path / "two").glob("*/env.json"):
        assert json.loads(path.read_text())["command"] == command_line(), "the study's, not the worker's"
    assert sum("weights from pretrain-" in text for text in texts) == 2
    assert [text for text in texts if text.startswith("[3] failed: ")]
    assert run_locally(requests(*family(one)), tmp_path / "two", SETTINGS, 2, tmp_path / "study") == []


@pytest.mark.parametrize("attempts", [1, 3])
def test_workers_that_cannot_start_end_it(tmp_path, monkeypatch, attempts):
    monkeypatch.setattr(local, "ATTEMPTS", attempts)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match=f"{attempts} workers in a row ended at their start .exit code 1."):
        run_locally(requests(*family(loaded(tmp_path))), tmp_path / "runs", SETTINGS, 2, tmp_path)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(BackendError, match="no worker could be started"):
        run_locally(requests(*family(loaded(tmp_path))), tmp_path / "runs", SETTINGS, 2, tmp_path)


def test_what_a_worker_cannot_do_is_said_in_its_words(tmp_path):
    settings = Settings(quiet=True, cpu=True, tracker="nonesuch")
    with pytest.raises(BackendError, match="unknown tracker 'nonesuch'"):
        run_locally(requests(*family(loaded(tmp_path))), tmp_path / "runs", settings, 1, tmp_path)


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [(None, 0, [None, None]), (None, 2, ["0", "1", "0"]), ("3, 1", 2, ["3", "1", "3"]), ("", 0, [None]),
     ("GPU-abc", 1, ["GPU-abc", "GPU-abc"])],
)  # fmt: skip
def test_each_worker_has_one_gpu_in_turn(monkeypatch, visible, count, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [local._visible_device(i, cpu=False).get("CUDA_VISIBLE_DEVICES") for i in range(len(expected))] == expected
    assert local._visible_device(0, cpu=True) == {}


def test_a_launcher_and_workers_do_not_go_together(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="workers are started by spt"):
        run_locally([], tmp_path, SETTINGS, 2, tmp_path)


SCHEDULER = """
import os, pickle, signal, sys
from pathlib import Path
from spt.errors import SptError, Stopped
from spt.runtime.settings import Settings
from spt.execution.local import run_locally

def stop(number, frame):
    raise Stopped("stopped")

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.default_int_handler)
Path("pid").write_text(str(os.getpid()))
jobs, settings, workers = pickle.loads(Path("jobs.pkl").read_bytes())
try:
    failed = run_locally(jobs, Path("runs"), settings, workers, Path("study"))
except (SptError, Stopped) as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
for failure in failed:
    print(failure.job.name, failure.reason, flush=True)
"""

LONG = {
    "pretrain__train": {"steps": 4000, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 2000},
    "finetune__train": {"steps": 40, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 20},
}


@contextlib.contextmanager
def scheduler(folder: Path, jobs: list[RunRequest], count: int, pipe: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that has runs made by workers with as many threads as this one has; a checkpoint after every step."""
    settings = Settings(quiet=True, cpu=True, save_every=0.0)
    (folder / "jobs.pkl").write_bytes(pickle.dumps((jobs, settings, count)))
    (folder / "scheduler.py").write_text(SCHEDULER)
    command = f"exec {sys.executable} scheduler.py {pipe}"
    process = subprocess.Popen(
        ["sh", "-c", command],
        cwd=folder,
        env=environment({"OMP_NUM_THREADS": str(torch.get_num_threads())}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in alive(folder):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def alive(folder: Path) -> list[int]:
    """Workers of the scheduler in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and b"spt.execution.local" in (entry / "cmdline").read_bytes()
                and os.readlink(entry / "cwd") == str(folder)
            ):
                found.append(int(entry.name))
    return found


def until(met, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def training(folder: Path, job: Job):
    """Is a step of this run saved while it is still under way?"""
    return lambda: any((folder / "runs" / job.name / "checkpoints").glob("step-*"))


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc")


@needs_proc
@pytest.mark.parametrize(
    ("number", "words", "then"),
    [
        (signal.SIGKILL, "worker was killed (SIGKILL), perhaps because memory ran out", "failed"),
        pytest.param(signal.SIGTERM, "its worker was stopped", "stopped", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped"],
)
def test_a_worker_that_ends_takes_one_run_with_it(tmp_path, number, words, then):
    """Another makes the rest; the state is kept for the next call."""
    slow, quick = loaded(tmp_path, **LONG), loaded(tmp_path)
    jobs = requests(spt_job(slow), *family(quick))
    with scheduler(tmp_path, jobs, 1) as process:
        until(training(tmp_path, jobs[0].job.parent))
        os.kill(alive(tmp_path)[0], number)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    pretraining = jobs[0].job.parent
    assert f"{pretraining.name} {words}" in output and f"{jobs[0].job.name} {PARENT_FAILED} {words}" in output
    runs = tmp_path / "runs"
    assert [state(runs, job) for job, *_ in jobs[1:]] == ["done", "done"]
    assert state(runs, pretraining) == then and training(tmp_path, pretraining)()


def finish(folder: Path, jobs: list[RunRequest]) -> None:
    with scheduler(folder, jobs, 2) as process:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output


SHORT = {
    "task": {"name": "./toy.py"},
    "pretrain__train": {"steps": 600, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 100},
    "finetune__train": {"steps": 40, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 20},
}


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stop_loses_nothing_and_leaves_nobody(tmp_path, number):
    """Signals to the scheduler alone. A pipe it wrote to ends; the same call goes on and ends as if undisturbed."""
    one = own_task(tmp_path, **SHORT)
    jobs = requests(*family(one), *family(one, 1))
    with scheduler(tmp_path, jobs, 2, "2>&1 | cat") as process:
        until(training(tmp_path, jobs[1].job.parent))
        os.kill(int((tmp_path / "pid").read_text()), number)
        output, _ = process.communicate(timeout=300)
        until(lambda: not alive(tmp_path))
    assert "Traceback" not in output
    states = {json.loads(path.read_text())["state"] for path in (tmp_path / "runs").glob("*/status.json")}
    assert "stopped" in states and states <= {"stopped", "done"}, output
    finish(tmp_path, jobs)
    assert run_here(jobs, tmp_path / "whole", Runtime(SETTINGS)) == []
    same_runs(tmp_path / "whole", tmp_path / "runs")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Stopped), (signal.SIGINT, Interrupted)])
def test_a_stop_at_the_start_is_orderly_too(tmp_path, number, error, messages):
    """In this very process, as soon as the first worker is there."""
    folder = tmp_path / "study"
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]

    def start(scheduler: local._Scheduler) -> None:
        real(scheduler)
        signal.raise_signal(number)

    real = local._Scheduler._start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local._Scheduler, "_start", start)
        with pytest.raises(error):
            run_locally(requests(*family(loaded(tmp_path))), tmp_path / "runs", SETTINGS, 1, folder)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert not list((tmp_path / "runs").glob("*/result.json"))


def test_a_worker_that_sends_what_cannot_be_read_is_killed(tmp_path):
    """It may go on for ever: nothing more would be heard of it."""
    program = "import sys, time; print('garbage', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        worker = local._Worker(0, process, tmp_path / "1.log")
        scheduler = local._Scheduler({}, Failures(), (tmp_path, SETTINGS, ""), 1, tmp_path)
        scheduler._listen(worker)
        assert process.returncode == -signal.SIGKILL
        assert scheduler.events.get_nowait() == (worker, None)
