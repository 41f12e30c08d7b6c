"""Job arrays: which, in which order, behind which; and on a real cluster, if there is one (tests/slurm/cluster.sh)."""

import contextlib
import json
import pickle
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_execute import SETTINGS, diverging, family, make_here, reasons, requests, same_runs, state, tuned
from test_processes import same_outcome
from tiny import loaded, own_task, spt_job

from spt.config.job import Job
from spt.errors import BackendError, Interrupted, OutputError, Stopped, UsageError
from spt.execution import slurm
from spt.execution.queue import PARENT_FAILED, in_order
from spt.execution.slurm import (
    ArrayElement,
    JobArray,
    Slurm,
    after,
    arrays,
    parameters,
    run_on_slurm,
    unfinished_jobs,
)
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

# -------------------------------------------------------------------------------------------------------- options


def test_options_are_read():
    found = Slurm.parse(
        ["partition=gpu", "time=600", "gpus=1", "setup=module load cuda", "setup=a=b", "poll=0.5", "memory=16G",
         "additional.reservation=x=y", "additional.nice=5"]
    )  # fmt: skip
    assert found == Slurm(
        partition="gpu", time=600, gpus=1, memory="16G", setup=("module load cuda", "a=b"), poll=0.5,
        additional={"reservation": "x=y", "nice": "5"},
    )  # fmt: skip
    assert Slurm.parse([]) == Slurm()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("partion=x", "Slurm option partion: unknown key; did you mean partition?"),
        ("partition", "not of the form KEY=VALUE"),
        ("partition=", "not of the form KEY=VALUE"),
        ("time=9", "time=9: .* choose at least 10 minutes"),
        ("time=4h", "Slurm option time: input should be a valid integer"),
        ("cpus=0", "Slurm option cpus: input should be greater than or equal to 1"),
        ("pack=0", "Slurm option pack: input should be greater than or equal to 1"),
        ("nodes=0", "Slurm option nodes: input should be greater than or equal to 1"),
        ("poll=nan", "Slurm option poll: input should be a finite number"),
        ("additional.=3", "unknown Slurm option additional."),
        ("additional=3", "unknown Slurm option additional"),
    ],
)
def test_wrong_options_are_told(option, words):
    with pytest.raises(UsageError, match=words):
        Slurm.parse([option])


def test_an_option_is_given_once():
    with pytest.raises(UsageError, match="qos is given twice"):
        Slurm.parse(["qos=a", "qos=b"])


def test_a_machine_without_slurm_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendError, match="there is no sbatch here"):
        run_on_slurm([], tmp_path, SETTINGS, Slurm(), tmp_path)


def test_sbatch_gets_what_was_asked_for():
    options = {"partition": "gpu", "time": 600, "gpus": 1, "cpus": 4, "memory": "16G"}
    found = parameters(Slurm(**options, setup=("module load x",), additional={"nice": "5"}), "after:1", "s")
    assert (found["partition"], found["time"], found["gpus_per_node"], found["mem"]) == ("gpu", 600, 1, "16G")
    assert found["cpus_per_task"] == 4 and found["srun_args"] == ["--cpus-per-task=4"]
    assert found["setup"][0] == "module load x" and any("OMP_NUM_THREADS" in line for line in found["setup"])
    assert found["additional_parameters"] == {"kill-on-invalid-dep": "yes", "requeue": True, "nice": "5"}
    pytest.importorskip("submitit")
    from submitit.slurm.slurm import _make_sbatch_string

    text = _make_sbatch_string(command="x", folder="/f", map_count=3, **found)
    for line in ("--array=0-2%3", "--dependency=after:1", "--kill-on-invalid-dep=yes", "--requeue", "--nice=5"):
        assert f"#SBATCH {line}\n" in text


# ------------------------------------------------------------------------------------------------------- planning


class Named(Job):
    """As much of a job as planning needs."""

    name = ""

    def __init__(self, name: str, stage: str, parent: "Named | None" = None) -> None:
        self.__dict__ |= {"name": name, "resolved": name, "stage": stage, "seed": 0, "parent": parent}


families = st.lists(st.integers(0, 4), max_size=12)  # numbers of children


@given(families, st.integers(0, 5), st.integers(1, 6), st.randoms())
def test_every_element_stands_behind_its_own_pretraining(numbers, alone, largest, chance):
    blocks = []
    for i, count in enumerate(numbers):
        parent = Named(f"p{i}", "pretrain")
        blocks.append([parent, *(Named(f"p{i}c{k}", "finetune", parent) for k in range(count))])
    blocks += [[Named(f"s{i}", "finetune")] for i in range(alone)]
    chance.shuffle(blocks)
    jobs = [job for block in blocks for job in block]
    batches = arrays(jobs, largest)
    sent = [job.name for batch in batches for job in batch.jobs]
    assert sorted(sent) == sorted(job.name for job in jobs)
    for i, batch in enumerate(batches):
        assert 0 < len(batch.jobs) <= largest
        for k, job in enumerate(batch.jobs):
            if batch.behind is None:
                assert job.parent is None
            else:
                assert batch.behind < i and batches[batch.behind].jobs[k] is job.parent
    stages = [[job.stage for job in batch.jobs] for batch in batches if batch.behind is None]
    flat = [stage for stages in stages for stage in stages]
    assert flat == sorted(flat, reverse=True)  # pretrainings first


def test_a_parent_that_is_done_is_no_parent():
    child = Named("b", "finetune", Named("a", "pretrain"))
    assert arrays([child]) == [JobArray((child,))]


def test_dependencies_go_element_by_element():
    assert after(["7_0", "7_1"], 2) == "aftercorr:7"
    assert after(["7_0", "7_1"], 1) == "afterok:7_0"  # one element is no array
    assert after(["7"], 1) == "afterok:7"


def test_what_scontrol_lists():
    text = (
        "JobId=12 ArrayJobId=12 ArrayTaskId=3-5,8%2 JobName=x JobState=PENDING Reason=y NodeList=(null)\n"
        "JobId=13 ArrayJobId=12 ArrayTaskId=1 JobName=x JobState=RUNNING NodeList=node1\n"
        "JobId=14 ArrayJobId=12 ArrayTaskId=2 JobName=x JobState=COMPLETED\n"
        "JobId=20 JobName=z JobState=COMPLETING NodeList=node[1-2]\n"
    )
    waiting = {f"12_{i}": "" for i in (3, 4, 5, 8)}
    assert unfinished_jobs(text) == {**waiting, "12_1": "node1", "20": "node[1-2]"}


# ----------------------------------------------------------------------------------------------------- submission


class Cluster:
    """Slurm, as far as the caller sees it: takes arrays, runs an element at every look, keeps dependencies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lose: str = "") -> None:
        self.arrays: list[tuple[str | None, list[ArrayElement]]] = []
        self.waiting: dict[str, tuple[ArrayElement, str | None]] = {}
        self.ok: set[str] = set()
        self.lose = lose  # a run that vanishes
        self.folder = Path()
        monkeypatch.setattr(shutil, "which", lambda name: name)
        monkeypatch.setattr(slurm, "make_executor", self.executor)
        monkeypatch.setattr(slurm, "queued_jobs", self.look)

    def executor(self, folder: Path, options: Slurm, dependency: str | None) -> Any:
        cluster, self.folder = self, folder

        class Sent:
            job_id = ""

        class Executor:
            @contextlib.contextmanager
            def batch(self) -> Any:
                self.sent: list[tuple[Sent, ArrayElement]] = []
                yield
                number = str(len(cluster.arrays) + 100)
                cluster.arrays.append((dependency, [element for _, element in self.sent]))
                for i, (sent, element) in enumerate(self.sent):
                    sent.job_id = f"{number}_{i}" if len(self.sent) > 1 else number
                    behind = None
                    if dependency is not None:
                        kind, _, on = dependency.partition(":")
                        behind = f"{on}_{i}" if kind == "aftercorr" else on
                    cluster.waiting[sent.job_id] = (pickle.loads(pickle.dumps(element)), behind)

            def submit(self, element: ArrayElement) -> Sent:
                self.sent.append((Sent(), element))
                return self.sent[-1][0]

        return Executor()

    def look(self, ids: list[str]) -> dict[str, str]:
        there = {number: "" for number in self.waiting if number in ids}
        for number, (element, behind) in list(self.waiting.items()):
            if behind in self.waiting:
                continue
            del self.waiting[number]
            if (behind is not None and behind not in self.ok) or element.job.name == self.lose:
                break
            (self.folder / f"{number}_0_log.err").touch()
            try:
                element()
                self.ok.add(number)
            except Exception as error:
                import traceback

                told = "".join(traceback.format_exception(error))
                (self.folder / f"{number}_0_result.pkl").write_bytes(pickle.dumps(("error", told)))
            break
        return there


QUICK = Slurm(poll=0.001)


@pytest.mark.slow
def test_runs_are_made_in_arrays_and_failures_told(tmp_path, monkeypatch):
    """In the same words as in this process, and with the same outcome."""
    good, bad = own_task(tmp_path), diverging(tmp_path)
    broken = loaded(tmp_path, finetune__train__batch_size=1000)
    jobs = requests(spt_job(good), spt_job(bad), spt_job(tuned(good, 0.5)), Job(broken, "finetune", 0))
    cluster = Cluster(monkeypatch)
    failed = run_on_slurm(jobs, tmp_path / "slurm", SETTINGS, QUICK, tmp_path / "study")
    behind = [dependency for dependency, _ in cluster.arrays]
    assert behind == [None, "aftercorr:100", "afterok:100_0"]
    assert [len(elements) for _, elements in cluster.arrays] == [3, 2, 1]
    here = make_here(jobs, tmp_path / "here", SETTINGS, tmp_path)
    assert reasons(failed) == reasons(here) and len(failed) == 3
    same_runs(tmp_path / "here", tmp_path / "slurm")
    # What is done is not submitted again, what failed is.
    cluster.arrays.clear()
    run_on_slurm(jobs, tmp_path / "slurm", SETTINGS, QUICK, tmp_path / "study")
    assert sorted(element.job.name for _, found in cluster.arrays for element in found) == sorted(reasons(failed))


def test_an_element_that_vanishes_is_told(tmp_path, monkeypatch):
    job = spt_job(loaded(tmp_path))
    Cluster(monkeypatch, lose=job.parent.name)
    found = reasons(run_on_slurm(requests(job), tmp_path / "runs", SETTINGS, QUICK, tmp_path))
    lost = "its Slurm job 100 left the queue before it began"
    assert found == {job.parent.name: lost, job.name: f"{PARENT_FAILED} {lost}"}


def test_a_stop_leaves_the_queue_and_the_same_call_waits(tmp_path, monkeypatch, messages):
    """Also a new child of a pretraining that is queued goes behind it."""
    one = loaded(tmp_path)
    jobs, runs = requests(*family(one)), tmp_path / "runs"
    cluster = Cluster(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(slurm._JobWatch, "wait", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match=r"3 jobs stay in Slurm's queue: .* scancel 100 101 ends them"):
            run_on_slurm(jobs, runs, SETTINGS, QUICK, tmp_path)
    book = json.loads((tmp_path / "slurm.json").read_text())["jobs"]
    assert len(cluster.arrays) == 2 and set(book) == {job.name for job, *_ in in_order(jobs)}
    more = [*jobs, *requests(spt_job(tuned(one, 0.5)))]
    assert run_on_slurm(more, runs, SETTINGS, QUICK, tmp_path) == []
    assert [dependency for dependency, _ in cluster.arrays[2:]] == [f"afterok:{book[jobs[1].job.parent.name]}"]
    assert any("jobs are in Slurm's queue already" in text for text in messages)
    assert len(list(runs.glob("*/result.json"))) == 4


def test_a_book_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    Cluster(monkeypatch)
    (tmp_path / "slurm.json").write_text("[]")
    with pytest.raises(OutputError, match="it is not known which jobs"):
        run_on_slurm([], tmp_path, SETTINGS, QUICK, tmp_path)


def test_slurm_refuses_in_words(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("sbatch: error: a\n\nsbatch: error: Batch job submission failed: Invalid partition\n")

    cluster = Cluster(monkeypatch)
    executor = cluster.executor(tmp_path, QUICK, None)
    executor.submit = refuse
    monkeypatch.setattr(slurm, "make_executor", lambda *_: executor)
    with pytest.raises(BackendError, match=r"Slurm does not take the jobs: .*Invalid partition$"):
        run_on_slurm(requests(*family(loaded(tmp_path))), tmp_path / "runs", SETTINGS, QUICK, tmp_path)


# -------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "slurm_says", "handed_over"),
    [(signal.SIGUSR2, None, True), (signal.SIGTERM, "RUNNING\n", True), (signal.SIGTERM, "COMPLETING\n", False),
     (signal.SIGTERM, None, False)],
)  # fmt: skip
def test_signals_save_the_state_and_then_mean_what_slurm_means(tmp_path, monkeypatch, number, slurm_says, handed_over):
    """submitit queues an element again unless Slurm is requeueing or cancelling it."""
    got: list[int] = []
    before = [signal.signal(signal.SIGUSR2, lambda n, _: got.append(n)), signal.getsignal(signal.SIGTERM)]
    monkeypatch.setattr(slurm, "_query", lambda *_: slurm_says)
    job = Job(loaded(tmp_path), "finetune", 0)

    class Signalled(Runtime):
        def highest(self, numbers: list[float]) -> list[float]:  # asked after every step
            if (tmp_path / "runs" / job.name / "checkpoints").is_dir():
                signal.raise_signal(number)
                numbers = [float(signal.SIGTERM), 0.0, 0.0]
            return super().highest(numbers)

    monkeypatch.setattr(slurm, "Runtime", Signalled)
    try:
        with pytest.raises(SystemExit) as ended:
            ArrayElement(job, tmp_path / "runs", SETTINGS)()
        assert ended.value.code == Stopped.exit_code
        assert got == [signal.SIGUSR2] * handed_over
        assert state(tmp_path / "runs", job) == "stopped"
        assert list((tmp_path / "runs" / job.name / "checkpoints").glob("step-*"))
        assert signal.getsignal(signal.SIGTERM) is before[1]
    finally:
        signal.signal(signal.SIGUSR2, before[0])


# ---------------------------------------------------------------------------------------------------- real clusters

REAL = Slurm(time=10, poll=0.5)
LONG = {
    "task": {"name": "./toy.py"},
    "pretrain__train": {"steps": 600, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 200},
}


@pytest.fixture
def cluster() -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("no Slurm here; tests/slurm/cluster.sh makes one")


def until(met: Callable[[], Any], seconds: float = 200.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def submit(jobs: list[Any], root: Path, folder: Path, options: Slurm = REAL) -> dict[str, str]:
    """Into the queue, without waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm._JobWatch, "wait", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            run_on_slurm(jobs, root, Settings(quiet=True, cpu=True, save_every=0.0), options, folder)
    return json.loads((folder / "slurm.json").read_text())["jobs"]


def steps(run: RunFolder) -> set[int]:
    return {int(path.name[5:]) for path in run.checkpoints.glob("step-*")}


def saved(run: RunFolder) -> int:
    return max(steps(run), default=0)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "slurm").glob("*.err")))


@pytest.fixture
def two_nodes(cluster) -> None:
    if len(slurm.node_states()) < 2:
        pytest.skip("a cluster of one node; tests/slurm/cluster.sh makes one of two")


PACKED = REAL.model_copy(update={"pack": 2})
WIDE = REAL.model_copy(update={"nodes": 2, "cpus": 1})


@pytest.mark.slurm
@pytest.mark.parametrize("options", [REAL, PACKED], ids=["run by run", "packed"])
def test_a_cluster_does_what_one_process_does(tmp_path, cluster, options):
    good, bad = own_task(tmp_path), diverging(tmp_path)
    jobs = requests(*family(good), spt_job(bad), spt_job(good, 1), spt_job(tuned(good, 0.5), 1))
    failed = run_on_slurm(jobs, tmp_path / "slurm", SETTINGS, options, tmp_path / "study")
    here = make_here(jobs, tmp_path / "here", SETTINGS, tmp_path)
    assert reasons(failed) == reasons(here), logs(tmp_path / "study")
    assert len(failed) == 2
    same_runs(tmp_path / "here", tmp_path / "slurm")


@pytest.mark.slurm
@pytest.mark.parametrize("options", [REAL, PACKED, WIDE], ids=["run by run", "packed", "on two nodes"])
@pytest.mark.parametrize("how", ["scancel --signal=USR2", "scontrol requeue"])
def test_an_element_that_is_requeued_goes_on_at_the_saved_step(tmp_path, cluster, how, options, request):
    """What depends on it waits; the end is that of a run without trouble."""
    if options.nodes > 1:
        request.getfixturevalue("two_nodes")
    one = own_task(tmp_path, **LONG)
    jobs = requests(*family(one), spt_job(one, 1))
    ids = submit(jobs, tmp_path / "runs", tmp_path / "study", options)
    run = RunFolder(tmp_path / "runs", jobs[1].job.parent.name)
    until(lambda: saved(run) > 20)
    with subprocess.Popen([*how.split(), ids[run.name]]) as asking:  # goes on asking while the element ends
        until(lambda: (run.status() or {}).get("state") == "stopped")
        asking.kill()
    there, step = steps(run), saved(run)
    assert 20 < step < 600
    assert min(until(lambda: steps(run) - there)) > step
    failed = run_on_slurm(jobs, tmp_path / "runs", SETTINGS, options, tmp_path / "study")
    assert failed == [], logs(tmp_path / "study")
    assert make_here(jobs, tmp_path / "here", SETTINGS, tmp_path) == []
    if options.nodes > 1:
        same_outcome(tmp_path / "here", tmp_path / "runs")
    else:
        same_runs(tmp_path / "here", tmp_path / "runs")


@pytest.mark.slurm
@pytest.mark.parametrize("requeued", [True, False], ids=["requeued by Slurm", "ended by Slurm"])
def test_a_node_that_fails_gets_no_more_jobs(tmp_path, two_nodes, messages, requeued):
    one = own_task(tmp_path, **LONG)
    jobs = requests(*family(one))
    root, study = tmp_path / "runs", tmp_path / "study"
    run = RunFolder(root, jobs[1].job.parent.name)
    failed_node: list[str] = []

    def fail() -> None:
        until(lambda: saved(run) > 20)
        number = json.loads((study / "slurm.json").read_text())["jobs"][run.name]
        if not requeued:
            subprocess.run(["scontrol", "update", f"JobId={number}", "Requeue=0"], check=True)
        (node,) = slurm.queued_jobs([number])[number].split()
        failed_node.append(node)
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)

    failing = threading.Thread(target=fail)
    failing.start()
    try:
        settings = Settings(quiet=True, cpu=True, save_every=0.0)
        assert run_on_slurm(jobs, root, settings, REAL, study) == [], logs(study)
    finally:
        failing.join()
        subprocess.run(["scontrol", "update", f"NodeName={failed_node[0]}", "State=RESUME"], check=True)
    assert f"node {failed_node[0]} failed; no job of this study is sent there any more" in messages
    again = f"[2] is queued again: its Slurm job {'.*'} ended when {failed_node[0]} failed"
    assert any(re.fullmatch(again, text) for text in messages) != requeued
    assert make_here(jobs, tmp_path / "here", SETTINGS, tmp_path) == []
    same_runs(tmp_path / "here", root)


@pytest.mark.slurm
def test_a_cancelled_element_stays_cancelled(tmp_path, cluster):
    """Its state is saved all the same, and what depends on it ends too."""
    one = own_task(tmp_path, **LONG)
    jobs = requests(*family(one), spt_job(one, 1))
    ids = submit(jobs, tmp_path / "runs", tmp_path / "study")
    run = RunFolder(tmp_path / "runs", jobs[1].job.parent.name)
    until(lambda: saved(run) > 20)
    subprocess.run(["scancel", ids[run.name]], check=True, timeout=60)
    found = reasons(run_on_slurm(jobs, tmp_path / "runs", SETTINGS, REAL, tmp_path / "study"))
    assert list(found) == [run.name, jobs[1].job.name], logs(tmp_path / "study")
    assert "was killed" in found[run.name]
    assert state(tmp_path / "runs", jobs[1].job.parent) == "stopped" and 20 < saved(run) < 600
