"""Carry out many runs: in which order, which share of them, and one after the other in this process.

One failure never stops the rest. Worker processes and Slurm are in local.py and slurm.py.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from spt.config.job import Job
from spt.config.plugins import is_path
from spt.errors import OutputError, RunInUse, RunTakenOver, SptError, UsageError, one_line
from spt.execution.progress import StudyProgress
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.progress import forward_progress
from spt.runtime.trackers import TrackedRun
from spt.training.stage import finished_result, run_stage

logger = logging.getLogger(__name__)

PARENT_FAILED = "its pretraining failed:"


class RunRequest(NamedTuple):
    """A run to make; the runs it starts from are made first."""

    job: Job
    label: str  # for people, e.g. "[3/12] quickstart seed 1 spt:"
    tracked: TrackedRun | None = None  # how trackers call it, without the stage
    parent_tracked: TrackedRun | None = None  # and the run it starts from


class FailedRun(NamedTuple):
    job: Job
    reason: str  # one sentence


class Failures(dict[str, FailedRun]):
    """Failed runs by name, each logged when it is added."""

    def add(self, request: RunRequest, reason: str) -> None:
        self[request.job.name] = FailedRun(request.job, reason)
        logger.warning(f"{request.label} failed: {reason}")

    def of_parent(self, job: Job) -> str | None:
        """Why a job cannot be run, if the run it starts from has failed."""
        parent = job.parent_name
        if parent is None or parent not in self:
            return None
        reason = self[parent].reason
        return reason if reason.startswith(PARENT_FAILED) else f"{PARENT_FAILED} {reason}"


def in_order(
    requests: Sequence[RunRequest], is_needed: Callable[[RunRequest], bool] = lambda request: True
) -> list[RunRequest]:
    """Every job once, parents before children; a parent has its first child's label. Order otherwise kept.

    Parents are added for the requests that are needed.
    """
    ordered: dict[str, RunRequest] = {}

    def add(request: RunRequest) -> None:
        parent = request.job.parent
        if request.job.name in ordered:
            return
        if isinstance(parent, Job) and is_needed(request):
            add(request._replace(job=parent, tracked=request.parent_tracked or request.tracked))
        ordered[request.job.name] = request

    for request in requests:
        add(request)
    return list(ordered.values())


def unfinished_requests(requests: Sequence[RunRequest], root: Path) -> tuple[list[RunRequest], Failures]:
    """In order, the runs still to make, and those that cannot be made because their results cannot be read.

    A pretraining is made only for a run that is still to make, or when it is requested itself.
    """
    failures, finished = Failures(), dict[str, bool]()

    def is_needed(request: RunRequest) -> bool:
        name = request.job.name
        if name not in finished:
            try:
                finished[name] = finished_result(RunFolder(root, name)) is not None
            except OutputError as error:
                if error.hopeless:
                    raise
                finished[name] = True
                failures.add(request, str(error))
        return not finished[name]

    return [request for request in in_order(requests, is_needed) if is_needed(request)], failures


def count_runs(requests: Sequence[RunRequest], unfinished: Sequence[RunRequest], root: Path) -> int:
    """How many runs these are, with those that are done; without pretrainings that are gone and not needed again."""
    left = {request.job.name for request in unfinished}
    names = {run.name for request in requests for run in with_ancestors(request.job)}
    return len(left) + sum((root / name / "result.json").exists() for name in names - left)


def shard(requests: Sequence[RunRequest], index: int, count: int) -> list[RunRequest]:
    """The index-th (from 1) of `count` parts of nearly equal numbers of runs; the same on every machine.

    Jobs that share a pretraining are in one part, so that no two parts make the same run.
    """
    if not 1 <= index <= count:
        raise UsageError(f"there is no shard {index} of {count}; shards count from 1")
    families: dict[str, set[str]] = {}  # names of runs, by that of their first ancestor
    for request in requests:
        names = [run.name for run in with_ancestors(request.job)]
        families.setdefault(names[0], set()).update(names)
    loads = [0] * count
    part: dict[str, int] = {}
    for name in sorted(families, key=lambda name: -len(families[name])):  # stable: of equal sizes, the first first
        part[name] = loads.index(min(loads))
        loads[part[name]] += len(families[name])
    return [request for request in requests if part[with_ancestors(request.job)[0].name] == index - 1]


def numbered_task(environ: Mapping[str, str] = os.environ) -> tuple[int, int | None]:
    """This task's number, from 0, and how many there are if that is known, as schedulers say it in variables.

    Raises UsageError where none does.
    """
    if "JOB_COMPLETION_INDEX" in environ:  # of an indexed job of Kubernetes
        return _whole(environ, "JOB_COMPLETION_INDEX"), None
    if "SLURM_ARRAY_TASK_ID" in environ:
        number, first = _whole(environ, "SLURM_ARRAY_TASK_ID"), _whole(environ, "SLURM_ARRAY_TASK_MIN")
        last, count = _whole(environ, "SLURM_ARRAY_TASK_MAX"), _whole(environ, "SLURM_ARRAY_TASK_COUNT")
        step = max(1, _whole(environ, "SLURM_ARRAY_TASK_STEP"))
        if (last - first) // step + 1 != count:
            raise UsageError(
                f"the array has {count} tasks from {first} to {last}, with gaps, and does not say which part this is: "
                "submit one such as --array=1-8, or name the part, such as 1/4"
            )
        return (number - first) // step, count
    if "SLURM_PROCID" in environ:
        return _whole(environ, "SLURM_PROCID"), _whole(environ, "SLURM_NTASKS")
    raise UsageError(
        "no variable (JOB_COMPLETION_INDEX, SLURM_ARRAY_TASK_ID, SLURM_PROCID) says which part this is; name it, such "
        "as 1/4"
    )


def _whole(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"the variable {name} is {text!r}, not a whole number; name the part, such as 1/4")
    return int(text)


def with_ancestors(job: Job) -> list[Job]:
    """A job and the jobs it starts from, the first ancestor first."""
    return [*(with_ancestors(job.parent) if isinstance(job.parent, Job) else []), job]


def run_here(
    requests: Sequence[RunRequest],
    root: Path,
    runtime: Runtime,
    progress: StudyProgress | None = None,
    deadline: float | None = None,
) -> list[FailedRun]:
    """One run after the other, in this process (or these processes together); returns the failures. None is started
    after the deadline, a moment of time.monotonic().

    Raises Stopped on request, and OutputError where the disk would fail every other run as well.
    """
    unfinished, failures = runtime.on_main(lambda: unfinished_requests(requests, root))
    if progress is None or not runtime.main:  # one process speaks
        progress = StudyProgress(root)
    jobs = [request.job for request in unfinished]
    with progress.over(jobs, count_runs(requests, unfinished, root), failed=len(failures)):
        for request in unfinished:
            if runtime.on_main(lambda: is_past(deadline)):
                break
            with forward_progress(partial(progress.show, None, request.job)):
                reason = failures.of_parent(request.job) or attempt_run(request, root, runtime)
            if reason is not None:
                failures.add(request, reason)
            progress.remove(None)
            progress.end(request.job, reason is not None)
    return list(failures.values())


def is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def attempt_run(request: RunRequest, root: Path, runtime: Runtime) -> str | None:
    """Make one run; returns why it failed, or None. Raises what ends all of them, and RunInUse where it is not to wait
    for a run that another process has."""
    try:
        run_stage(request.job, root, runtime, request.label, request.tracked)
    except RunTakenOver as error:
        if not runtime.settings.wait:
            raise
        logger.info(str(error))
        return attempt_run(request, root, runtime)  # which waits for the other
    except RunInUse:
        raise
    except SptError as error:
        if isinstance(error, OutputError) and error.hopeless:
            raise  # a full disk fails every other run as well
        if runtime.world > 1 and not getattr(error, "known_to_all", False):
            raise  # the other processes are somewhere else by now
        return str(error)
    except Exception as error:
        if runtime.settings.debug or runtime.world > 1:
            raise
        model = request.job.resolved.recipe.model.name
        hint = f"; spt check model {model} tells more" if is_path(model) else ""
        return f"{one_line(error)} (traceback.txt in its run folder; --debug stops here){hint}"
    return None
