"""Many runs as job arrays of a Slurm cluster, through submitit.

One array holds what depends on nothing; its first elements are the pretrainings. The k-th finetunings of all
pretrainings are an array each, element by element behind the first. Each element is one run, whose processes can be on
several nodes, or a pack: families of runs, several runs at once. It saves its state and queues again when Slurm takes
its machine away. Here they are only watched: the runs' own files say how they ended. A node that fails is excluded.
"""

import atexit
import contextlib
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spt.config.job import Job
from spt.config.validation import validation_messages
from spt.errors import BackendError, Interrupted, OutputError, SptError, Stopped, UsageError, hide_assigned_secrets
from spt.execution.local import run_locally
from spt.execution.progress import StudyProgress
from spt.execution.queue import FailedRun, Failures, RunRequest, attempt_run, count_runs, unfinished_requests
from spt.runs.files import write_json, writing
from spt.runs.folder import RunFolder
from spt.runtime import launch, signals
from spt.runtime.distributed import Runtime, is_lost_peer
from spt.runtime.progress import forward_messages
from spt.runtime.settings import Settings
from spt.runtime.trackers import TrackedRun
from spt.tasks.files import unpickle

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

logger = logging.getLogger(__name__)

LARGEST = 1000  # elements of an array: Slurm's own default limit
LOOKS = 3  # times in a row that an element must be missing from the queue before it has ended: files travel slowly
REQUEUES = 1000  # times that an element may meet its time limit
NODE_FAILURES = 3  # jobs that a run may lose to failed nodes
LOST_PEER = "another process of its run ended"


class Slurm(BaseModel):
    """What a user may choose about the jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    partition: str | None = None
    time: int = 240  # minutes after which an element saves its state and queues again
    gpus: int = Field(0, ge=0)  # of a run, on each of its nodes; several make it a run of as many processes
    nodes: int = Field(1, ge=1)  # of a run; several make it a run of at least as many processes
    pack: int = Field(1, ge=1, le=256)  # runs that one job makes at once
    cpus: int | None = Field(None, ge=1)  # of each process of a run; None: the cluster's default
    memory: str | None = None  # of an element on each of its nodes, e.g. 16G
    exclude: str | None = None  # nodes that get no job, e.g. gpu[03-05],gpu11
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    parallel: int = Field(256, ge=1)  # elements of an array that run at once
    setup: tuple[str, ...] = ()  # shell commands before each element, e.g. module load cuda
    poll: float = Field(5.0, gt=0, lt=3600)  # seconds between two looks at the queue
    additional: dict[str, str] = {}  # any other option of sbatch

    @model_validator(mode="after")
    def _check(self) -> "Slurm":
        if self.pack > 1 and self.processes > 1:
            raise ValueError(
                f"pack={self.pack}: runs that share a job have one node and one GPU each at most; leave pack out, or "
                "nodes and gpus"
            )
        options = [("setup", line) for line in self.setup]
        options += [(f"additional.{name}", value) for name, value in self.additional.items()]
        for name, text in options:  # which stand in the scripts that submitit writes
            if (hidden := hide_assigned_secrets(text)) != text:
                raise ValueError(
                    f"{name}={hidden}: a secret would stand in the jobs' scripts; export it before this command, and "
                    "Slurm passes it on"
                )
        if self.time < 10:
            raise ValueError(
                f"time={self.time}: elements save their states 90 s before the end; choose at least 10 minutes"
            )
        return self

    @property
    def processes(self) -> int:
        """Of each run: one for each of its GPUs; on CPUs, one for each of its nodes."""
        return self.nodes * max(1, self.gpus)

    @classmethod
    def parse(cls, options: Sequence[str]) -> "Slurm":
        """From `partition=gpu`, `time=600`, `setup=module load cuda` (repeatable), `additional.reservation=x` …"""
        values: dict[str, Any] = {}
        for option in options:
            key, equals, value = option.partition("=")
            if not equals or not value:
                raise UsageError(f"Slurm option {option!r} is not of the form KEY=VALUE")
            section, _, name = key.partition(".")
            if section == "additional":
                if not name:
                    raise UsageError(f"unknown Slurm option {key}; did you mean additional.OPTION?")
                values.setdefault(section, {})[name] = value
            elif key == "setup":
                values.setdefault(key, []).append(value)
            elif key in values:
                raise UsageError(f"Slurm option {key} is given twice")
            elif any(part.partition("=")[0] in cls.model_fields for part in value.split(",")[1:]):
                each = option.replace(",", " --slurm ")
                raise UsageError(f"Slurm options are given one by one: --slurm {each}")
            else:
                values[key] = value
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            messages = validation_messages(cls, error)
            raise UsageError("; ".join(f"Slurm option {message}" for message in messages)) from None


class _Element(ABC):
    """What submitit calls on a machine of the cluster, pickled."""

    def __call__(self) -> Mapping[str, str]:
        with _SlurmSignals() as slurm_signals, signals.cleanup(lambda _: slurm_signals.hand_over()):
            try:
                with forward_messages(lambda text: sys.stderr.write(f"{text}\n")):  # the element's log file
                    return self.make_runs()
            except Stopped:
                slurm_signals.hand_over()
                if launch.rank() > 0:  # srun would kill the first process before it has queued the job again
                    return {}
                sys.exit(Stopped.exit_code)  # no exception: submitit would note a failure for good

    @abstractmethod
    def make_runs(self) -> Mapping[str, str]:
        """Returns why runs failed, by their names."""

    def checkpoint(self) -> "DelayedSubmission":
        """What submitit queues again: the folders of runs hold their states."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class ArrayElement(_Element):
    """One run, of all processes of the job. Raises, hence fails, if the run fails."""

    def __init__(self, job: Job, root: Path, settings: Settings, tracked: TrackedRun | None = None) -> None:
        self.job, self.root, self.settings, self.tracked = job, root, settings, tracked

    def make_runs(self) -> Mapping[str, str]:
        launch.join_slurm()
        try:
            reason = attempt_run(RunRequest(self.job, "", self.tracked), self.root, Runtime(self.settings))
            if reason is None:
                launch.leave_group()
        except Exception as error:
            if is_lost_peer(error):
                raise BackendError(LOST_PEER) from error
            raise
        if reason is not None:
            raise SptError(reason)
        if launch.world_size() > 1:
            atexit.register(launch.exit_process, 0)
        return {}


class Pack(_Element):
    """Families of runs, several runs at once by as many workers. A run that fails does not fail the job."""

    def __init__(self, requests: Sequence[RunRequest], root: Path, settings: Settings, runs: int, logs: Path) -> None:
        """`runs` at once; the workers' logs lie in a folder of the job's in `logs`."""
        self.requests, self.root, self.settings, self.runs, self.logs = tuple(requests), root, settings, runs, logs

    def make_runs(self) -> Mapping[str, str]:
        folder = self.logs / os.environ.get("SLURM_JOB_ID", "pack")
        try:
            failed = run_locally(self.requests, self.root, self.settings, self.runs, folder)
        finally:
            for empty in (folder / "workers", folder):
                with contextlib.suppress(OSError):
                    empty.rmdir()
        return {failure.job.name: failure.reason for failure in failed}


class _SlurmSignals:
    """Slurm's signals, and what they mean: save the state after this step, then leave the machine.

    SIGUSR2 comes before the time limit. SIGTERM comes with preemption, `scontrol requeue` and `scancel`; in the last
    two Slurm knows itself what is next.
    """

    def __init__(self) -> None:
        self.limit = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_SlurmSignals":
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._stop)
        self._before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.limit = True
        signal.raise_signal(signal.SIGTERM)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """While nothing trains: a training notes SIGTERM itself."""
        if launch.rank() > 0:  # with another code, srun would kill the first process before it has queued the job again
            os._exit(0)
        signals.end_process(Stopped("stopped; Slurm starts it again"))

    def hand_over(self) -> None:
        """With the state saved: have submitit queue this element again, if Slurm will not. Then it does not return."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the second of two signals must not disturb the first
        handler = self._before[signal.SIGUSR2]
        if launch.rank() > 0:  # of several processes the first does it
            return
        if callable(handler) and (self.limit or _still_running()):
            handler(signal.SIGUSR2, None)


def _still_running() -> bool:
    """Does Slurm mean this job to go on? Not so while it is being requeued or cancelled."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    job = os.environ.get("SLURM_JOB_ID", "")  # one element has its array's number, which squeue takes for all of them
    answer = _query("squeue", "-h", "-o", "%T", "-j", f"{array}_{task}" if array and task else job)
    return answer is not None and answer.strip() == "RUNNING"


class JobArray(NamedTuple):
    """One array to submit. With `behind`, element i depends on element i of that earlier array."""

    jobs: tuple[Job, ...]
    behind: int | None = None


def arrays(jobs: Sequence[Job], largest: int = LARGEST) -> list[JobArray]:
    """How to submit jobs, each of them once. A parent that is not among them is done."""
    names = {job.name for job in jobs}
    children: dict[str, list[Job]] = {}
    roots: list[Job] = []
    for job in jobs:
        if job.parent_name in names:
            children.setdefault(job.parent_name, []).append(job)
        else:
            roots.append(job)
    # Those with the most children first, so that the k-th children of a chunk belong to its first elements.
    roots.sort(key=lambda job: (-len(children.get(job.name, ())), job.stage != "pretrain"))
    batches: list[JobArray] = []
    for start in range(0, len(roots), largest):
        chunk, number = roots[start : start + largest], len(batches)
        batches.append(JobArray(tuple(chunk)))
        for siblings in itertools.zip_longest(*(children.get(job.name, ()) for job in chunk)):
            batches.append(JobArray(tuple(filter(None, siblings)), number))
    assert sum(len(batch.jobs) for batch in batches) == len(jobs), "a parent has no parent itself"
    return batches


def packs(jobs: Sequence[Job], runs: int) -> list[tuple[Job, ...]]:
    """Jobs by the job of Slurm that makes them: families, of a run and those that start from it, as many together as
    keep so many workers busy. The largest come first."""
    names = {job.name for job in jobs}
    families: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.parent_name in names):  # stable; parents before children
        families.setdefault(str(job.parent_name) if job.parent_name in names else job.name, []).append(job)
    packed: list[list[Job]] = []
    free = 0  # workers of the last pack
    for family in sorted(families.values(), key=len, reverse=True):
        if free <= 0:
            packed.append([])
            free = runs
        packed[-1] += family
        free -= max(1, len(family) - 1)  # of a family, all but the first at once
    return [tuple(pack) for pack in packed]


def run_on_slurm(
    requests: Sequence[RunRequest],
    root: Path,
    settings: Settings,
    slurm: Slurm,
    folder: Path,
    progress: StudyProgress | None = None,
) -> list[FailedRun]:
    """Carry out every run on the cluster and wait for all; returns the failures. Logs are in folder/slurm.

    Jobs that an earlier call has queued are waited for, not queued again: folder/slurm.json knows them. Raises Stopped
    on request: the jobs stay in the queue.
    """
    if launch.world_size() > 1:
        raise UsageError(f"a launcher has formed {launch.world_size()} processes, but Slurm starts the runs; run alone")
    for program in ("sbatch", "srun"):  # by which submitit queues a job, and starts what it runs
        if shutil.which(program) is None:
            raise BackendError(f"there is no {program} here; run this on a machine of the cluster, or without Slurm")
    watch = _JobWatch(root, settings, slurm, folder)
    queued = watch.queued()
    unfinished, failures = unfinished_requests(requests, root)
    watch.awaited = {job.name: queued[job.name] for job, *_ in unfinished if job.name in queued}
    new: list[Job] = []
    for request in unfinished:
        if request.job.name not in queued:
            if (reason := failures.of_parent(request.job)) is not None:
                failures.add(request, reason)
            else:
                new.append(request.job)
    with writing(folder):
        (folder / "slurm").mkdir(parents=True, exist_ok=True)
    if watch.awaited:
        logger.info(f"{len(watch.awaited)} jobs are in Slurm's queue already")
    try:
        with signals.StopSignals() as stop:
            watch.tracked = {request.job.name: request.tracked for request in unfinished}
            watch.submit(new, queued, stop)
            awaited, runs = list(watch.awaited), count_runs(requests, unfinished, root)
            jobs = [request.job for request in unfinished if request.job.name in awaited]
            with (progress or StudyProgress(root)).over(jobs, runs, failed=len(failures)) as shown:
                watch.wait(unfinished, failures, stop, shown)
    except (KeyboardInterrupt, Stopped) as error:
        number = signal.SIGTERM if isinstance(error, Stopped) and not isinstance(error, Interrupted) else signal.SIGINT
        left = " ".join(sorted({job.partition("_")[0] for job in watch.awaited.values()}))
        rest = f"; {len(watch.awaited)} jobs stay in Slurm's queue: the same command waits for them, scancel {left} "
        raise signals.stop_error(number, f"{rest}ends them") from None
    return list(failures.values())


class _JobWatch:
    """Submits jobs and waits for them. folder/slurm.json holds the Slurm job of each run, the latest one."""

    def __init__(self, root: Path, settings: Settings, slurm: Slurm, folder: Path) -> None:
        self.root, self.settings, self.slurm, self.folder = root, settings, slurm, folder
        self.ids: dict[str, str] = {}
        self.tracked: dict[str, TrackedRun | None] = {}
        self.awaited: dict[str, str] = {}  # those of `ids` that this call waits for
        self.failed_nodes: set[str] = set()
        self._nodes: dict[str, str] = {}  # where the job of each run was seen last, if it was at work
        self._lost: Counter[str] = Counter()  # jobs of each run that ended with a node
        self._register = folder / "slurm.json"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                jobs = json.loads(self._register.read_text(encoding="utf-8"))["jobs"]
                self.ids = {str(name): str(number) for name, number in jobs.items()}
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise OutputError(
                    f"{self._register} cannot be read ({type(error).__name__}), so it is not known which jobs are in "
                    "Slurm's queue; see squeue, and remove the file when they have ended"
                ) from error

    def queued(self) -> dict[str, str]:
        """The registered jobs that Slurm still has."""
        if not self.ids:
            return {}
        queue = queued_jobs(list(self.ids.values()))
        if queue is None:
            raise BackendError("Slurm does not answer, so it is not known which jobs are in its queue; try again later")
        return {name: number for name, number in self.ids.items() if number in queue}

    def submit(self, jobs: Sequence[Job], queued: Mapping[str, str], stop: signals.StopSignals) -> None:
        """Put jobs into the queue; those whose parents are in it already, each by itself."""
        if not jobs:
            return
        parent_queued = [job for job in jobs if job.parent_name in queued]
        free = [job for job in jobs if job not in parent_queued]
        if self.slurm.pack > 1:
            packed = packs(free, self.slurm.pack)
            for start in range(0, len(packed), LARGEST):
                self._send(packed[start : start + LARGEST], None, stop, self.slurm.pack)
        else:
            submitted: list[list[str]] = []
            for batch in arrays(free):
                dependency = None if batch.behind is None else after(submitted[batch.behind], len(batch.jobs))
                submitted.append(self._send([(job,) for job in batch.jobs], dependency, stop))
        for job in parent_queued:
            self._send([(job,)], f"afterok:{queued[str(job.parent_name)]}", stop)
        logger.info(f"{len(jobs)} jobs are in Slurm's queue; their logs are in {self.folder / 'slurm'}")

    def _send(
        self, groups: Sequence[Sequence[Job]], dependency: str | None, stop: signals.StopSignals, pack: int = 1
    ) -> list[str]:
        """An array whose elements make a group of jobs each: several at once, or the only one."""
        stop.check()
        exclude = ",".join(filter(None, [self.slurm.exclude, *sorted(self.failed_nodes)])) or None
        options = self.slurm.model_copy(update={"pack": pack, "exclude": exclude})
        executor = make_executor(self.folder / "slurm", options, dependency)
        try:
            with executor.batch():
                sent = [executor.submit(self._element(group, pack)) for group in groups]
            ids = [str(submission.job_id) for submission in sent]
        except Exception as error:  # submitit's own, with what sbatch said
            stop.check()  # a Ctrl-C reaches sbatch too
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = lines[-1].strip() if lines else type(error).__name__
            raise BackendError(f"Slurm does not take the jobs: {reason}") from error
        numbers = {job.name: number for group, number in zip(groups, ids, strict=True) for job in group}
        self.ids |= numbers
        self.awaited |= numbers
        write_json(self._register, {"jobs": self.ids})
        return ids

    def _element(self, jobs: Sequence[Job], pack: int) -> _Element:
        root = self.root.resolve()
        if pack == 1:
            (job,) = jobs
            return ArrayElement(job, root, self.settings, self.tracked.get(job.name))
        requests = [RunRequest(job, job.name, self.tracked.get(job.name)) for job in jobs]
        return Pack(requests, root, self.settings, pack, (self.folder / "slurm").resolve())

    def wait(
        self,
        requests: Sequence[RunRequest],
        failures: Failures,
        stop: signals.StopSignals,
        progress: StudyProgress,
    ) -> None:
        """Until every awaited run has ended."""
        missing: Counter[str] = Counter()  # looks in a row
        while self.awaited:
            queue = queued_jobs(list(self.awaited.values()))
            if queue is not None:
                self._follow(queue)
            ended: list[tuple[Job, bool]] = []
            lost: list[Job] = []
            for request in requests:
                job = request.job
                if job.name not in self.awaited:
                    continue
                number = self.awaited[job.name]
                missing[job.name] = 0 if queue is None or number in queue else missing[job.name] + 1
                if missing[job.name] == 0 or job.parent_name in self.awaited:
                    continue  # the parent's end explains its own
                finished = False
                with contextlib.suppress(OutputError):  # half there, on a file system that travels slowly
                    finished = RunFolder(self.root, job.name).result() is not None
                if not finished and missing[job.name] >= LOOKS and self._lost_to_node(request, number):
                    lost.append(job)
                    continue
                if finished or missing[job.name] >= LOOKS:
                    del self.awaited[job.name]
                    ended.append((job, not finished))
                if not finished and missing[job.name] >= LOOKS:
                    failures.add(request, failures.of_parent(job) or self._reason(job.name, number))
            if ended:
                progress.look([request.job for request in requests if request.job.name in self.awaited])
            for job, failed in ended:
                progress.end(job, failed)
            if lost:
                self._submit_again(lost, [request.job for request in requests], stop)
                missing.clear()
            if self.awaited:
                stop.wait(self.slurm.poll)

    def _follow(self, queue: Mapping[str, str]) -> None:
        """Notice when jobs leave nodes that have failed: Slurm has queued them again, or has ended them."""
        left: set[str] = set()
        for name, number in self.awaited.items():
            nodes = queue.get(number, "")
            if (before := self._nodes.get(name, "")) and nodes != before:
                left.add(before)
            self._nodes[name] = nodes
        if left:
            self._exclude(",".join(sorted(left)))

    def _exclude(self, nodes: str) -> None:
        """Send no job to those of these nodes that have failed, as long as there are others."""
        failed = {name for name, state in node_states(nodes=nodes).items() if is_down(state)} - self.failed_nodes
        if not failed:
            return
        names = ", ".join(sorted(failed))
        which, whose = (f"node {names}", "its") if len(failed) == 1 else (f"nodes {names}", "their")
        states = node_states(partition=self.slurm.partition)
        usable = {name for name, state in states.items() if not is_down(state) and not state.startswith("drain")}
        if not usable - self.failed_nodes:
            logger.warning(f"{which} failed; {whose} jobs wait until Slurm has another node")
            return
        self.failed_nodes |= failed
        exclude = ",".join(filter(None, [self.slurm.exclude, *sorted(self.failed_nodes)]))
        for array in sorted({number.partition("_")[0] for number in self.awaited.values()}):
            _query("scontrol", "update", f"JobId={array}", f"ExcNodeList={exclude}")  # of elements that still wait
        logger.warning(f"{which} failed; no job of this study is sent there any more")

    def _lost_to_node(self, request: RunRequest, number: str) -> bool:
        """Did Slurm end this job because a node failed, and may the run have another one?"""
        answer = _query("scontrol", "-o", "show", "job", number)
        values = dict(re.findall(r"(\w+)=(\S+)", answer or ""))
        if values.get("JobState") != "NODE_FAIL":
            return False
        nodes = values.get("NodeList", "(null)")
        self._exclude(nodes)
        self._lost[request.job.name] += 1
        if self._lost[request.job.name] > NODE_FAILURES:
            return False
        logger.warning(f"{request.label} is queued again: its Slurm job {number} ended when {nodes} failed")
        return True

    def _submit_again(self, lost: Sequence[Job], jobs: Sequence[Job], stop: signals.StopSignals) -> None:
        """Runs whose jobs have ended with a node, and what waits for them: Slurm has ended that, or is about to."""
        names = {job.name for job in lost}
        behind = [job for job in jobs if job.name in self.awaited and job.parent_name in names]
        if numbers := [self.awaited[job.name] for job in behind if job.name not in names]:
            _query("scancel", *numbers)
        self.submit([*lost, *(job for job in behind if job.name not in names)], {}, stop)

    def _reason(self, name: str, number: str) -> str:
        """Why a run whose job has left the queue is not done."""
        log = self.folder / "slurm" / f"{number}_0_log.err"
        reasons: list[str] = []
        for path in sorted(log.parent.glob(f"{number}_*_result.pkl")):  # of each process
            with contextlib.suppress(OSError, ValueError, TypeError):
                kind, value = unpickle(path.read_bytes(), path.name)  # plain values: no code of the file's runs
                if kind == "error":  # a traceback, which ends with the error itself
                    *_, own = re.split(r"^spt\.errors\.\w+: ", value.strip(), flags=re.M)
                    reasons.append(own if own != value.strip() else own.splitlines()[-1])
                elif name in (value or {}):
                    reasons.append(value[name])
        if reasons:
            own = next((reason for reason in reasons if reason != LOST_PEER), None)
            return own or f"{LOST_PEER}; see {log.with_name(f'{number}_*_log.err')}"
        if not log.exists():
            return f"its Slurm job {number} left the queue before it began"
        status = RunFolder(self.root, name).status() or {}
        if status.get("state") in ("failed", "diverged"):
            return str(status.get("reason"))
        return f"its Slurm job was killed; see {log}"


def after(ids: Sequence[str], count: int) -> str:
    """The dependency of `count` elements, each on its own of these. A lone job is no array, to Slurm."""
    return f"afterok:{ids[0]}" if count == 1 else f"aftercorr:{ids[0].partition('_')[0]}"


def make_executor(folder: Path, slurm: Slurm, dependency: str | None) -> Any:
    """submitit's executor for Slurm, by name: its automatic choice would take whatever it finds."""
    from submitit.slurm.slurm import SlurmExecutor

    executor = SlurmExecutor(folder=folder, max_num_timeout=REQUEUES)
    executor.update_parameters(**parameters(slurm, dependency, folder.parent.name))
    return executor


def parameters(slurm: Slurm, dependency: str | None, name: str) -> dict[str, Any]:
    """sbatch's options, under submitit's names."""
    exported = [f"export {key}={shlex.quote(value)}" for key, value in launch.import_environment().items()]
    exported = [line + "${PYTHONPATH:+:$PYTHONPATH}" if "PYTHONPATH" in line else line for line in exported]
    # Else every element would take all cores of its machine.
    share = slurm.pack * max(1, slurm.gpus)  # processes that share a node's cores
    cores = "${SLURM_CPUS_ON_NODE:-1}"
    if share > 1:
        cores = f"$(({cores} < {2 * share} ? 1 : {cores} / {share}))"
    threads = "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-" + cores + "}"
    cpus = slurm.cpus and slurm.cpus * slurm.pack
    srun_args = [f"--cpus-per-task={cpus}"] if cpus else []  # no longer passed on by itself
    if slurm.processes > 1:
        srun_args.append("--kill-on-bad-exit=1")  # who has lost a process would wait for it
    values: dict[str, Any] = {
        "job_name": f"spt-{name}",
        "time": slurm.time,
        "array_parallelism": slurm.parallel,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "mem": slurm.memory,
        "nodes": slurm.nodes if slurm.processes > 1 else None,
        "ntasks_per_node": max(1, slurm.gpus) if slurm.processes > 1 else None,
        "cpus_per_task": cpus,
        "gpus_per_node": slurm.gpus * slurm.pack or None,
        "dependency": dependency,
        "setup": [*slurm.setup, *exported, threads],
        "srun_args": srun_args or None,
        # Children of a failed pretraining end, instead of waiting for ever.
        "additional_parameters": {"kill-on-invalid-dep": "yes", "requeue": True, **slurm.additional},
    }
    return {key: value for key, value in values.items() if value is not None}


def queued_jobs(ids: Sequence[str]) -> dict[str, str] | None:
    """Which of these jobs (`12`, or `12_3` of an array) Slurm has still to finish, and on which nodes they are at work,
    "" of those that wait; None when it does not say."""
    numbers = sorted({number.partition("_")[0] for number in ids})
    answer = _query("squeue", "-h", "-r", "-o", "%i %N", "-j", ",".join(numbers))
    if answer is not None:
        return {number: nodes.strip() for number, _, nodes in (line.partition(" ") for line in answer.splitlines())}
    unfinished: dict[str, str] = {}
    for number in numbers:
        answer = _query("scontrol", "-o", "show", "job", number)
        if answer is None:
            return None
        unfinished |= unfinished_jobs(answer)
    return unfinished


def node_states(nodes: str | None = None, partition: str | None = None) -> dict[str, str]:
    """What Slurm says of nodes, e.g. idle, allocated, down*: these, or all of a partition; without it, all. Empty when
    it does not say."""
    where = ["-n", nodes] if nodes else ["-p", partition] if partition else []
    lines = (_query("sinfo", "-h", "-N", "-o", "%N %T", *where) or "").splitlines()
    return {name: state for name, _, state in (line.strip().partition(" ") for line in lines)}


def is_down(state: str) -> bool:
    """Has a node in this state failed? `*`: it does not answer. A drained one has not: it ends what it does."""
    return state.startswith(("down", "fail")) or state.endswith("*")


OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


def unfinished_jobs(answer: str) -> dict[str, str]:
    """The jobs in `scontrol -o show job` that have not ended, elements of arrays each by itself, and their nodes."""
    unfinished: dict[str, str] = {}
    for line in answer.splitlines():
        values = dict(re.findall(r"(\w+)=(\S+)", line))
        if values.get("JobState", "COMPLETED") in OVER:
            continue
        nodes = values.get("NodeList", "(null)").replace("(null)", "")
        if "ArrayTaskId" not in values:
            unfinished[values["JobId"]] = nodes
            continue
        for part in values["ArrayTaskId"].partition("%")[0].split(","):
            low, _, high = part.partition("-")
            unfinished |= {f"{values['ArrayJobId']}_{i}": nodes for i in range(int(low), int(high or low) + 1)}
    return unfinished


def _query(*command: str) -> str | None:
    """A Slurm program's answer, empty for jobs that it has forgotten; None when there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode and "Invalid job id" in done.stderr:
        return ""
    return None if done.returncode else done.stdout
