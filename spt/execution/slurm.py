"""Many runs as job arrays of a Slurm cluster, through submitit.

One array holds what depends on nothing; its first elements are the pretrainings. The k-th finetunings of all
pretrainings are an array each, element by element behind the first. Each element is one run, which saves its state and
queues again when Slurm takes its machine away. The conductor only watches: the runs' own files say how they ended.
"""

import contextlib
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from spt.config.job import Job
from spt.errors import BackendError, Interrupted, OutputError, SptError, Stopped, UsageError, did_you_mean
from spt.execution.queue import FailedRun, RunRequest, Say, attempt_run, outstanding_jobs, parent_failure
from spt.runs.files import write_json, writing
from spt.runs.folder import RunFolder
from spt.runtime import launch, signals
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


LARGEST = 1000  # elements of an array: Slurm's own default limit
LOOKS = 3  # an element must be missing from the queue so often before it counts as ended: files travel slowly
REQUEUES = 1000  # how often an element may meet its time limit
WORDS = ("partition", "account", "qos", "constraint", "memory")
NUMBERS = {"time": 10, "gpus": 0, "cpus": 1, "parallel": 1}  # the smallest allowed


@dataclass(frozen=True)
class Slurm:
    """What a user may choose about the jobs."""

    partition: str | None = None
    time: int = 240  # minutes after which an element saves its state and queues again
    gpus: int = 0
    cpus: int | None = None  # None: the cluster's default
    memory: str | None = None  # of an element, e.g. 16G
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    parallel: int = 256  # elements of an array that run at once
    setup: tuple[str, ...] = ()  # shell commands before each element, e.g. module load cuda
    poll: float = 5.0  # seconds between two looks at the queue
    additional: Mapping[str, str] = field(default_factory=dict)  # any other option of sbatch

    @classmethod
    def parse(cls, options: Sequence[str]) -> "Slurm":
        """From `partition=gpu`, `time=600`, `setup=module load cuda` (repeatable), `additional.reservation=x` …"""
        found: dict[str, Any] = {}
        for option in options:
            key, equals, value = option.partition("=")
            known = [one.name for one in fields(cls) if one.name != "additional"]
            if not equals or not value:
                raise UsageError(f"Slurm option {option!r} is not of the form KEY=VALUE")
            if key.startswith("additional.") and key != "additional.":
                found.setdefault("additional", {})[key.partition(".")[2]] = value
            elif key not in known:
                near = did_you_mean(key, [*known, "additional.OPTION"])
                raise UsageError(f"unknown Slurm option {key}{near}")
            elif key == "setup":
                found["setup"] = (*found.get("setup", ()), value)
            elif key in found:
                raise UsageError(f"Slurm option {key} stands twice")
            elif key in NUMBERS:
                if not re.fullmatch(r"\d{1,9}", value) or int(value) < NUMBERS[key]:
                    what = "minutes" if key == "time" else key
                    raise UsageError(f"Slurm option {key}={value} is not a number of {what} from {NUMBERS[key]}")
                found[key] = int(value)
            elif key == "poll":
                try:
                    found[key] = float(value)
                except ValueError:
                    found[key] = 0.0
                if not 0 < found[key] < 3600:
                    raise UsageError(f"Slurm option poll={value} is not a number of seconds up to 3600")
            else:
                found[key] = value
        return cls(**found)

    def check(self) -> None:
        """Raise UsageError for what cannot be had."""
        if self.gpus > 1:
            raise UsageError(f"Slurm option gpus={self.gpus}: a run on Slurm uses one GPU at most; choose 0 or 1")
        if self.time < NUMBERS["time"]:
            raise UsageError(
                f"Slurm option time={self.time}: elements save their states 90 s before the end; choose at least 10"
            )


class ArrayElement:
    """One run, as submitit calls it on a machine of the cluster. Pickled; raises, hence fails, if the run fails."""

    def __init__(self, job: Job, root: Path, settings: Settings) -> None:
        self.job, self.root, self.settings = job, root, settings

    def __call__(self) -> None:
        with _SlurmSignals() as slurm_signals, signals.cleanup(lambda _: slurm_signals.hand_over()):
            try:
                say = _Log().say
                reason = attempt_run(self.job, self.root, Runtime(self.settings), say, "", ())
            except Stopped:
                slurm_signals.hand_over()
                sys.exit(Stopped.exit_code)  # no exception: submitit would note a failure for good
        if reason is not None:
            raise SptError(reason)

    def checkpoint(self) -> "DelayedSubmission":
        """What submitit queues again: the run's folder holds its state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class _Log:
    """Standard error, which is the element's log file."""

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


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
        signals.end_process(Stopped("stopped; Slurm starts it again"))

    def hand_over(self) -> None:
        """With the state saved: have submitit queue this element again, if Slurm will not. Then it does not return."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the second of two signals must not disturb the first
        handler = self._before[signal.SIGUSR2]
        if callable(handler) and (self.limit or _still_running()):
            handler(signal.SIGUSR2, None)


def _still_running() -> bool:
    """Does Slurm mean this job to go on? Not so while it is being requeued or cancelled."""
    answer = _query("squeue", "-h", "-o", "%T", "-j", os.environ.get("SLURM_JOB_ID", ""))
    return answer is not None and answer.strip() == "RUNNING"


class JobArray(NamedTuple):
    """One array to submit. With `behind`, element i depends on element i of that earlier array."""

    jobs: tuple[Job, ...]
    behind: int | None = None


class SingleJob(NamedTuple):
    """A job by itself, behind another job that is queued already or will be."""

    job: Job
    behind: str  # that job's name


def arrays(jobs: Sequence[Job], largest: int = LARGEST) -> tuple[list[JobArray], list[SingleJob]]:
    """How to submit jobs, each to be made once, parents first. A parent that is not among them is done, or queued."""
    among = {job.name for job in jobs}
    children: dict[str, list[Job]] = {}
    roots: list[Job] = []
    late: list[Job] = []  # whose parent is itself behind something
    for job in jobs:
        parent = job.parent.name if isinstance(job.parent, Job) else None
        if parent is None or parent not in among:
            roots.append(job)
        else:
            children.setdefault(parent, []).append(job)
    parents = sorted((job for job in roots if job.name in children), key=lambda job: -len(children[job.name]))
    alone = [job for job in roots if job.name not in children]
    pretrainings = [job for job in alone if job.stage == "pretrain"]
    first = [*parents, *pretrainings, *(job for job in alone if job.stage != "pretrain")]
    batches: list[JobArray] = []
    for start in range(0, len(first), largest):
        chunk = tuple(first[start : start + largest])
        number = len(batches)
        batches.append(JobArray(chunk))
        families = [children[job.name] for job in chunk if job.name in children]
        for k in range(max(map(len, families), default=0)):
            batches.append(JobArray(tuple(family[k] for family in families if k < len(family)), number))
        late += [one for family in families for one in family if one.name in children]
    lone: list[SingleJob] = []
    while late:
        ahead = late.pop(0)
        for job in children[ahead.name]:
            lone.append(SingleJob(job, ahead.name))
            if job.name in children:
                late.append(job)
    return batches, lone


def run_on_slurm(
    wanted: Sequence[RunRequest], root: Path, settings: Settings, slurm: Slurm, folder: Path, say: Say
) -> list[FailedRun]:
    """Have every run made by the cluster and wait for all; returns the failures. Logs are in folder/slurm.

    Jobs that an earlier call has queued are waited for, not queued again: folder/slurm.json knows them. Raises Stopped
    on request: the jobs stay in the queue.
    """
    slurm.check()
    if launch.world_size() > 1:
        raise UsageError(f"a launcher has formed {launch.world_size()} processes, but Slurm starts the runs; run alone")
    if shutil.which("sbatch") is None:
        raise BackendError("there is no sbatch here; run this on a machine of the cluster, or without Slurm")
    book = _JobRegister(folder / "slurm.json")
    queued = book.queued()
    # What is in the queue is not repeated a second time, also with --resume never.
    anew = settings.resume == "never"
    asked = [one for one in wanted if not (anew and one.job.name in queued)]
    found, unreadable = outstanding_jobs(asked, root, settings, say)
    if anew:
        found += [one for one in wanted if one.job.name in queued]
    failed = {failure.job.name: failure for failure in unreadable}
    new = [one.job for one in found if one.job.name not in queued]
    if anew:
        for job in new:  # here, so that an element that is started again goes on
            run = RunFolder(root, job.name)
            with run.locked():
                run.move_aside()
        settings = replace(settings, resume="auto")
    with writing(folder):
        (folder / "slurm").mkdir(parents=True, exist_ok=True)
    for job in list(new):
        if (lost := parent_failure(job, failed)) is not None:
            new.remove(job)
            failed[job.name] = FailedRun(job, lost)
    if waiting := sum(one.job.name in queued for one in found):
        say(f"{waiting} jobs are in Slurm's queue already")
    ids: dict[str, str] = {}
    try:
        with signals.StopSignals() as stop:
            try:
                if new:
                    _submit(new, root, settings, slurm, folder, book, queued, stop, say)
            finally:
                names = [one.job.name for one in found]
                ids |= {name: book.ids[name] for name in names if name in book.ids and name not in failed}
            _watch(found, ids, root, slurm, folder, failed, stop, say)
    except (KeyboardInterrupt, Stopped) as error:
        number = signal.SIGTERM if isinstance(error, Stopped) and not isinstance(error, Interrupted) else signal.SIGINT
        left = " ".join(sorted({job.partition("_")[0] for job in ids.values()}))
        rest = f"; {len(ids)} jobs stay in Slurm's queue: the same command waits for them, scancel {left} ends them"
        raise signals.stop_error(number, rest) from None
    return list(failed.values())


class _JobRegister:
    """folder/slurm.json: the Slurm job of each run, the latest one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ids: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                read = json.loads(path.read_text(encoding="utf-8"))
                self.ids = {str(name): str(number) for name, number in read["jobs"].items()}
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise OutputError(
                    f"{path} cannot be read ({type(error).__name__}), so it is not known which jobs are in Slurm's "
                    "queue; see squeue, and remove the file when they are over"
                ) from error

    def enter(self, names: Sequence[str], ids: Sequence[str]) -> None:
        self.ids |= dict(zip(names, ids, strict=True))
        write_json(self._path, {"jobs": self.ids})

    def queued(self) -> dict[str, str]:
        """Those that Slurm still has."""
        if not self.ids:
            return {}
        there = queued_jobs(list(self.ids.values()))
        if there is None:
            raise BackendError("Slurm does not answer, so it is not known which jobs are in its queue; try again later")
        return {name: number for name, number in self.ids.items() if number in there}


def _submit(
    new: Sequence[Job],
    root: Path,
    settings: Settings,
    slurm: Slurm,
    folder: Path,
    book: _JobRegister,
    queued: Mapping[str, str],
    stop: signals.StopSignals,
    say: Say,
) -> None:
    behind_queued = [job for job in new if isinstance(job.parent, Job) and job.parent.name in queued]
    lone = [SingleJob(job, job.parent.name) for job in behind_queued if isinstance(job.parent, Job)]
    batches, more = arrays([job for job in new if job not in behind_queued])
    submitted: list[list[str]] = []

    def send(jobs: Sequence[Job], dependency: str | None) -> list[str]:
        stop.check()
        executor = make_executor(folder / "slurm", slurm, dependency)
        elements = [ArrayElement(job, root.resolve(), settings) for job in jobs]
        try:
            with executor.batch():
                sent = [executor.submit(element) for element in elements]
            ids = [str(one.job_id) for one in sent]
        except Exception as error:  # submitit's own, with what sbatch said
            stop.check()  # a Ctrl-C reaches sbatch too
            said = [line for line in str(error).splitlines() if line.strip()]
            told = said[-1].strip() if said else type(error).__name__
            raise BackendError(f"Slurm does not take the jobs: {told}") from error
        book.enter([job.name for job in jobs], ids)
        return ids

    for batch in batches:
        dependency = None if batch.behind is None else after(submitted[batch.behind], len(batch.jobs))
        submitted.append(send(batch.jobs, dependency))
    for job, parent in [*lone, *more]:
        send([job], f"afterok:{book.ids[parent]}")
    say(f"{len(new)} jobs are in Slurm's queue; their logs are in {folder / 'slurm'}")


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
    threads = "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_ON_NODE:-1}}"
    found: dict[str, Any] = {
        "job_name": f"spt-{name}",
        "time": slurm.time,
        "array_parallelism": slurm.parallel,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "mem": slurm.memory,
        "cpus_per_task": slurm.cpus,
        "gpus_per_node": slurm.gpus or None,
        "dependency": dependency,
        "setup": [*slurm.setup, *exported, threads],
        "srun_args": [f"--cpus-per-task={slurm.cpus}"] if slurm.cpus else None,  # no longer passed on by itself
        # Children of a failed pretraining end, instead of waiting for ever.
        "additional_parameters": {"kill-on-invalid-dep": "yes", "requeue": True, **slurm.additional},
    }
    return {key: value for key, value in found.items() if value is not None}


def _watch(
    found: Sequence[RunRequest],
    ids: dict[str, str],
    root: Path,
    slurm: Slurm,
    folder: Path,
    failed: dict[str, FailedRun],
    stop: signals.StopSignals,
    say: Say,
) -> None:
    """Until every run has ended; those that have leave `ids`."""
    missing = dict.fromkeys(ids, 0)
    while ids:
        there = queued_jobs(list(ids.values()))
        for job, label in found:
            if job.name not in ids:
                continue
            missing[job.name] = 0 if there is None or ids[job.name] in there else missing[job.name] + 1
            if missing[job.name] == 0 or (isinstance(job.parent, Job) and job.parent.name in ids):
                continue  # the parent's end explains its own
            done = False
            with contextlib.suppress(OutputError):  # half there, on a file system that travels slowly
                done = RunFolder(root, job.name).result() is not None
            if done:
                del ids[job.name]
            elif missing[job.name] >= LOOKS:
                reason = parent_failure(job, failed) or _reason(RunFolder(root, job.name), ids.pop(job.name), folder)
                ids.pop(job.name, None)
                failed[job.name] = FailedRun(job, reason)
                say(f"{label} failed: {reason}")
        if ids:
            stop.wait(slurm.poll)


def _reason(run: RunFolder, number: str, folder: Path) -> str:
    """Why a run whose job has left the queue is not done."""
    log = folder / "slurm" / f"{number}_0_log.err"
    with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
        kind, told = pickle.loads(log.with_name(f"{number}_0_result.pkl").read_bytes())
        if kind == "error":  # a traceback, which ends with the error itself
            *_, own = re.split(r"^spt\.errors\.\w+: ", told.strip(), flags=re.M)
            return own if own != told.strip() else own.splitlines()[-1]
    if not log.exists():
        return f"its Slurm job {number} left the queue before it began"
    status = run.status() or {}
    if status.get("state") in ("failed", "diverged"):
        return str(status.get("reason"))
    return f"its Slurm job was killed; see {log}"


def queued_jobs(ids: Sequence[str]) -> set[str] | None:
    """Which of these jobs (`12`, or `12_3` of an array) Slurm has still to finish; None when it does not say."""
    numbers = sorted({number.partition("_")[0] for number in ids})
    answer = _query("squeue", "-h", "-r", "-o", "%i", "-j", ",".join(numbers))
    if answer is not None:
        return set(answer.split())
    there: set[str] = set()
    for number in numbers:
        answer = _query("scontrol", "-o", "show", "job", number)
        if answer is None:
            return None
        there |= unfinished_jobs(answer)
    return there


OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


def unfinished_jobs(answer: str) -> set[str]:
    """The jobs in `scontrol -o show job` that are not over, elements of arrays one by one."""
    there: set[str] = set()
    for line in answer.splitlines():
        values = dict(re.findall(r"(\w+)=(\S+)", line))
        if values.get("JobState", "COMPLETED") in OVER:
            continue
        if "ArrayTaskId" not in values:
            there.add(values["JobId"])
            continue
        for part in values["ArrayTaskId"].partition("%")[0].split(","):
            low, _, high = part.partition("-")
            there |= {f"{values['ArrayJobId']}_{i}" for i in range(int(low), int(high or low) + 1)}
    return there


def _query(*command: str) -> str | None:
    """A Slurm program's answer, empty for jobs that it has forgotten; None when there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode and "Invalid job id" in done.stderr:
        return ""
    return None if done.returncode else done.stdout
