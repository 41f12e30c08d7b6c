"""Job arrays: which, in which order, behind which; and on a real cluster, if there is one (tests/slurm/cluster.sh)."""

import contextlib
import json
import os
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
from spt.execution.queue import PARENT_FAILED, in_order, run_here
from spt.execution.slurm import (
    ArrayElement,
    JobArray,
    Slurm,
    after,
    arrays,
    packs,
    parameters,
    run_on_slurm,
    unfinished_jobs,
)
from spt.runs.folder import RunFolder
from spt.runtime import signals
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
        ("time=10,partition=gpu", "one by one: --slurm time=10 --slurm partition=gpu$"),
        ("time=4h", "Slurm option time: input should be a valid integer"),
        ("cpus=0", "Slurm option cpus: input should be greater than or equal to 1"),
        ("pack=0", "Slurm option pack: input should be greater than or equal to 1"),
        ("nodes=0", "Slurm option nodes: input should be greater than or equal to 1"),
        ("additional.export=ALL,HF_TOKEN=hf_secret", r"additional.export=ALL,HF_TOKEN=\*\*\*: a secret would stand"),
        ("poll=nan", "Slurm option poll: input should be a finite number"),
        ("additional.=3", "unknown Slurm option additional."),
        ("additional=3", "unknown Slurm option additional"),
    ],
)
def test_wrong_options_are_told(option, words):
    with pytest.raises(UsageError, match=words):
        Slurm.parse([option])


@pytest.mark.parametrize("option", ["nodes=2", "gpus=2"])
def test_runs_of_several_processes_are_not_packed(option):
    with pytest.raises(UsageError, match="pack=4: runs that share a job have one node and one GPU each at most"):
        Slurm.parse(["pack=4", option])
    assert Slurm.parse(["pack=4", "gpus=1"]).processes == 1


def test_a_value_may_hold_commas():
    assert Slurm.parse(["exclude=gpu[03-05],gpu11"]).exclude == "gpu[03-05],gpu11"


def test_an_option_is_given_once():
    with pytest.raises(UsageError, match="qos is given twice"):
        Slurm.parse(["qos=a", "qos=b"])


@pytest.mark.parametrize("missing", ["sbatch", "srun"])
def test_a_machine_without_slurm_is_refused(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/usr/bin/{name}")
    with pytest.raises(BackendError, match=f"there is no {missing} here"):
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


@pytest.mark.parametrize(
    ("options", "expected", "share"),
    [
        ({"pack": 4, "gpus": 1, "cpus": 2}, {"cpus_per_task": 8, "gpus_per_node": 4}, 4),
        ({"pack": 4}, {}, 4),
        ({"gpus": 2}, {"nodes": 1, "ntasks_per_node": 2, "gpus_per_node": 2}, 2),
        ({"nodes": 2, "gpus": 4, "cpus": 3},
         {"nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 3}, 4),
        ({"nodes": 2, "exclude": "n[1-2]"}, {"nodes": 2, "ntasks_per_node": 1, "exclude": "n[1-2]"}, 1),
        ({"gpus": 1}, {"gpus_per_node": 1}, 1),
    ],
)  # fmt: skip
def test_processes_and_packs_get_their_share_of_a_job(options, expected, share):
    found = parameters(Slurm(**options), None, "s")
    resources = {"nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "exclude"}
    assert {key: value for key, value in found.items() if key in resources} == expected
    assert ("--kill-on-bad-exit=1" in found.get("srun_args", [])) == (Slurm(**options).processes > 1)
    for cores, threads in ((16, 16 // share), (1, 1), (share, 1)):
        program = [*found["setup"][-1:], "echo $OMP_NUM_THREADS"]
        environ = {"SLURM_CPUS_ON_NODE": str(cores)}
        done = subprocess.run(["bash", "-c", "\n".join(program)], env=environ, capture_output=True, text=True)
        assert done.stdout.strip() == str(threads), done.stderr


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


@given(families, st.integers(0, 5), st.integers(2, 6), st.randoms())
def test_a_pack_holds_families_that_keep_its_workers_busy(numbers, alone, runs, chance):
    jobs = []
    for i, count in enumerate(numbers):
        parent = Named(f"p{i}", "pretrain")
        jobs += [parent, *(Named(f"p{i}c{k}", "finetune", parent) for k in range(count))]
    jobs += [Named(f"s{i}", "finetune") for i in range(alone)]
    chance.shuffle(jobs)
    packed = packs(jobs, runs)
    assert sorted(job.name for pack in packed for job in pack) == sorted(job.name for job in jobs)
    busy = []
    for pack in packed:
        names = [job.name for job in pack]
        assert all(job.parent_name is None or job.parent_name in names[: names.index(job.name)] for job in pack)
        busy.append(sum(max(1, sum(job.parent is root for job in pack)) for root in pack if root.parent is None))
    assert all(workers >= runs for workers in busy[:-1])


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
        self.lost_once = False
        self.folder = Path()
        monkeypatch.setattr(shutil, "which", lambda name: name)
        monkeypatch.setattr(slurm, "make_executor", self.executor)
        monkeypatch.setattr(slurm, "queued_jobs", self.look)

    def executor(self, folder: Path, options: Slurm, dependency: str | None) -> Any:
        cluster, self.folder, self.options = self, folder, options

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
            if (behind is not None and behind not in self.ok) or self._loses(element):
                break
            (self.folder / f"{number}_0_log.err").touch()
            try:
                failed = element()
                self.ok.add(number)
                (self.folder / f"{number}_0_result.pkl").write_bytes(pickle.dumps(("success", failed)))
            except Exception as error:
                import traceback

                told = "".join(traceback.format_exception(error))
                (self.folder / f"{number}_0_result.pkl").write_bytes(pickle.dumps(("error", told)))
            break
        return there

    def _loses(self, element: Any) -> bool:
        job = getattr(element, "job", None)
        if job is None or job.name != self.lose:
            return False
        if self.lost_once:
            self.lose = ""
        return True


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


def test_a_pack_tells_which_of_its_runs_failed(tmp_path, monkeypatch):
    def run_alone(requests: Any, root: Path, settings: Settings, workers: int, folder: Path) -> Any:
        assert workers == 3
        return run_here(requests, root, Runtime(settings))

    monkeypatch.setattr(slurm, "run_locally", run_alone)
    jobs = requests(Job(loaded(tmp_path), "finetune", 0), spt_job(diverging(tmp_path)))
    cluster = Cluster(monkeypatch)
    options = Slurm(poll=0.001, pack=3, cpus=2)
    failed = reasons(run_on_slurm(jobs, tmp_path / "runs", SETTINGS, options, tmp_path / "study"))
    assert [(dependency, len(elements)) for dependency, elements in cluster.arrays] == [(None, 1)]
    parent = jobs[1].job.parent
    assert list(failed) == [parent.name, jobs[1].job.name] and "not finite" in failed[parent.name]
    assert failed[jobs[1].job.name] == f"{PARENT_FAILED} {failed[parent.name]}"
    assert RunFolder(tmp_path / "runs", jobs[0].job.name).result() is not None
    assert (tmp_path / "study" / "slurm.json").is_file() and cluster.options.cpus == 2


class Nodes:
    """What Slurm's programs say of a cluster whose node n1 has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: str = "n2 idle\n") -> None:
        self.others, self.changes = others, list[tuple[str, ...]]()
        self.ended = "100"  # with the node
        monkeypatch.setattr(slurm, "_query", self.answer)

    def answer(self, *command: str) -> str:
        if command[0] == "sinfo":
            return "n1 down*\n" + ("" if "-n" in command else self.others)
        if command[1] == "-o":
            state = "NODE_FAIL" if command[-1] == self.ended else "COMPLETED"
            return f"JobId={command[-1]} JobState={state} NodeList=n1"
        self.changes.append(command)
        return ""


def test_a_job_that_ends_with_its_node_is_submitted_again_elsewhere(tmp_path, monkeypatch, messages):
    """And what waits for it, whose dependency can no longer be met."""
    job = spt_job(loaded(tmp_path))
    cluster, nodes = Cluster(monkeypatch, lose=job.parent.name), Nodes(monkeypatch)
    cluster.lost_once = True
    assert run_on_slurm(requests(job), tmp_path / "runs", SETTINGS, QUICK, tmp_path) == []
    assert [dependency for dependency, _ in cluster.arrays] == [None, "afterok:100", None, "afterok:102"]
    assert cluster.options.exclude == "n1" and ("scancel", "101") in nodes.changes
    assert "node n1 failed; no job of this study is sent there any more" in messages
    assert "[1] is queued again: its Slurm job 100 ended when n1 failed" in messages


def test_a_run_that_loses_every_job_to_a_node_fails(tmp_path, monkeypatch):
    job = Job(loaded(tmp_path), "finetune", 0)
    cluster = Cluster(monkeypatch, lose=job.name)
    monkeypatch.setattr(slurm, "_query", lambda *_: "JobId=1 JobState=NODE_FAIL NodeList=n1")
    failed = reasons(run_on_slurm(requests(job), tmp_path / "runs", SETTINGS, QUICK, tmp_path))
    assert len(cluster.arrays) == 1 + slurm.NODE_FAILURES and "left the queue" in failed[job.name]


@pytest.mark.parametrize(
    ("others", "excluded", "words"),
    [
        ("n2 idle\n", "n9,n1", "node n1 failed; no job of this study is sent there any more"),
        ("n2 drained\n", None, "node n1 failed; its jobs wait until Slurm has another node"),
    ],
)
def test_a_job_that_slurm_queues_again_is_kept_from_the_failed_node(
    tmp_path, monkeypatch, messages, others, excluded, words
):
    """Unless there is no other."""
    nodes = Nodes(monkeypatch, others)
    watch = slurm._JobWatch(tmp_path, SETTINGS, Slurm(exclude="n9"), tmp_path)
    watch.awaited = {"run-a": "7_0", "run-b": "7_1", "run-c": "8"}
    watch._follow({"7_0": "n1", "7_1": "n2", "8": ""})
    assert messages == []
    watch._follow({"7_0": "", "7_1": "n2", "8": ""})
    assert messages == [words]
    updates = [("scontrol", "update", f"JobId={array}", f"ExcNodeList={excluded}") for array in (7, 8)]
    assert nodes.changes == (updates if excluded else [])


def test_of_several_processes_the_one_that_failed_gives_the_reason(tmp_path):
    watch = slurm._JobWatch(tmp_path, SETTINGS, Slurm(nodes=2), tmp_path)
    (tmp_path / "slurm").mkdir()
    lost, own = "spt.errors.BackendError: another process of its run ended", "RuntimeError: no memory"
    for rank, text in enumerate((lost, own)):
        result = pickle.dumps(("error", f"Traceback\n{text}\n"))
        (tmp_path / "slurm" / f"5_{rank}_result.pkl").write_bytes(result)
    assert watch._reason("run", "5") == own
    (tmp_path / "slurm" / "5_1_result.pkl").unlink()
    assert watch._reason("run", "5") == f"another process of its run ended; see {tmp_path / 'slurm' / '5_*_log.err'}"


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


def test_the_signal_of_a_time_limit_ends_no_worker():
    """Slurm sends it to every process of a job; a pack's own process answers, and has its workers save."""
    with signals.withhold_usr2():
        child = subprocess.Popen(["sleep", "0.2"])
    child.send_signal(signal.SIGUSR2)
    assert child.wait() == 0 and signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_of_several_processes_the_first_queues_the_job_again(monkeypatch):
    got: list[int] = []
    before = [signal.signal(signal.SIGUSR2, lambda n, _: got.append(n)), signal.getsignal(signal.SIGTERM)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            with slurm._SlurmSignals() as found:
                found.limit = True
                found.hand_over()
            assert got == ([signal.SIGUSR2] if rank == "0" else [])
    finally:
        signal.signal(signal.SIGUSR2, before[0])
        signal.signal(signal.SIGTERM, before[1])


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
    again = [text for text in messages if re.search(rf"is queued again: .* ended when {failed_node[0]} failed$", text)]
    assert len(again) == (0 if requeued else 1)
    assert make_here(jobs, tmp_path / "here", SETTINGS, tmp_path) == []
    same_runs(tmp_path / "here", root)


@pytest.mark.slurm
def test_a_process_that_is_killed_ends_its_run(tmp_path, two_nodes):
    """Nobody waits for it, and what the run had saved is used by the next command."""
    jobs = requests(spt_job(own_task(tmp_path, **LONG)))
    root, study = tmp_path / "runs", tmp_path / "study"
    ids = submit(jobs, root, study, WIDE)
    run = RunFolder(root, jobs[0].job.parent.name)
    until(lambda: saved(run) > 20)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, variables = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if os.fsencode(study / "slurm") in words and b"SLURM_PROCID=1" in variables and b"srun" not in words:
                os.kill(int(path.name), signal.SIGKILL)
    failed = reasons(run_on_slurm(jobs, root, SETTINGS, WIDE, study))
    assert re.search(rf"(another process of its run ended|was killed); see .*{ids[run.name]}_", failed[run.name])
    assert failed[jobs[0].job.name] == f"{PARENT_FAILED} {failed[run.name]}", logs(study)
    step = saved(run)
    assert run_on_slurm(jobs, root, SETTINGS, WIDE, study) == [] and step > 20, logs(study)


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


@pytest.mark.parametrize(("array", "asked"), [({}, "7"), ({"JOB_ID": "7", "TASK_ID": "3"}, "7_3")])
def test_an_element_asks_for_itself_alone(array, asked, monkeypatch):
    """One element has its array's number, and squeue would answer for all of them."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("JOB_ID", "TASK_ID"):
        monkeypatch.delenv(f"SLURM_ARRAY_{name}", raising=False)
    for name, value in array.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
    monkeypatch.setattr(slurm, "_query", lambda *words: "RUNNING\n" if words[-1] == asked else "RUNNING\nRUNNING\n")
    assert slurm._still_running()
