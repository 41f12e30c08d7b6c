"""Have many runs carried out: in which order, which share of them, and one after the other in this process.

One failure never stops the rest. Worker processes and Slurm are in workers.py and slurm.py.
"""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

from spt.config.job import Job
from spt.config.plugins import is_path
from spt.errors import OutputError, SptError, Stopped, UsageError, one_line
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.stage import finished_result, run_stage

Say = Callable[[str], None]
PARENT_FAILED = "its pretraining failed:"


class RunRequest(NamedTuple):
    """A run to be had; those it starts from are had before it."""

    job: Job
    label: str  # for people, e.g. "[3/12] quickstart seed 1 spt:"


class FailedRun(NamedTuple):
    """A run that could not be had."""

    job: Job
    reason: str  # one sentence


def in_order(wanted: Sequence[RunRequest]) -> list[RunRequest]:
    """Every job once, parents before children; a parent has its first child's label. Order otherwise kept."""
    return _in_order(wanted, lambda job: True)


def outstanding_jobs(
    wanted: Sequence[RunRequest], root: Path, settings: Settings, say: Say
) -> tuple[list[RunRequest], list[FailedRun]]:
    """In order, what is left to make, and what cannot be since its result cannot be read.

    A pretraining is only made for a run that is left to make, or when it is wanted itself.
    """
    unreadable: list[FailedRun] = []
    done: dict[str, bool] = {}

    def left(job: Job) -> bool:
        if job.name not in done:
            try:
                done[job.name] = (
                    settings.resume != "never" and finished_result(RunFolder(root, job.name), say) is not None
                )
            except OutputError as error:
                if error.hopeless:
                    raise
                done[job.name] = True
                unreadable.append(FailedRun(job, str(error)))
        return not done[job.name]

    found = [one for one in _in_order(wanted, left) if left(one.job)]
    labels = {job.name: label for job, label in in_order(wanted)} if unreadable else {}
    for failure in unreadable:
        say(f"{labels[failure.job.name]} failed: {failure.reason}")
    return found, unreadable


def _in_order(wanted: Sequence[RunRequest], left: Callable[[Job], bool]) -> list[RunRequest]:
    """As `ordered`, without the parents of jobs that are not `left` to make."""
    found: dict[str, RunRequest] = {}

    def add(job: Job, label: str) -> None:
        if job.name in found:
            return
        if isinstance(job.parent, Job) and left(job):
            add(job.parent, label)
        found[job.name] = RunRequest(job, label)

    for job, label in wanted:
        add(job, label)
    return list(found.values())


def shard(wanted: Sequence[RunRequest], index: int, count: int) -> list[RunRequest]:
    """The index-th (from 1) of `count` parts of nearly equal numbers of runs; the same on every machine.

    Jobs that share a pretraining are in one part, so that no two parts make the same run.
    """
    if not 1 <= index <= count:
        raise UsageError(f"there is no shard {index} of {count}; shards count from 1")
    families: dict[str, set[str]] = {}  # by its first ancestor: the runs of a family
    family: list[str] = []
    for job, _ in wanted:
        line = with_ancestors(job)
        family.append(line[0].name)
        families.setdefault(line[0].name, set()).update(one.name for one in line)
    loads = [0] * count
    part: dict[str, int] = {}
    for name in sorted(families, key=lambda name: -len(families[name])):  # stable: of equal ones the first first
        part[name] = loads.index(min(loads))
        loads[part[name]] += len(families[name])
    return [one for one, name in zip(wanted, family, strict=True) if part[name] == index - 1]


def with_ancestors(job: Job) -> list[Job]:
    """A job and the jobs it starts from, the first ancestor first."""
    return [*(with_ancestors(job.parent) if isinstance(job.parent, Job) else []), job]


def run_here(wanted: Sequence[RunRequest], root: Path, runtime: Runtime, say: Say) -> list[FailedRun]:
    """One run after the other, in this process (or these processes together); returns the failures.

    Raises Stopped on request, and OutputError where the disk would fail every other run as well.
    """
    found, unreadable = runtime.on_main(lambda: outstanding_jobs(wanted, root, runtime.settings, say))
    failed = {failure.job.name: failure for failure in unreadable}
    made: set[str] = set()  # also with --resume never, once each
    for job, label in found:
        reason = parent_failure(job, failed)
        if reason is None:
            reason = attempt_run(job, root, runtime, say, label, made)
        if reason is None:
            made.add(job.name)
        else:
            failed[job.name] = FailedRun(job, reason)
            say(f"{label} failed: {reason}")
    return list(failed.values())


def parent_failure(job: Job, failed: dict[str, FailedRun]) -> str | None:
    """Why a job cannot be, if the run it starts from has failed."""
    if not isinstance(job.parent, Job) or job.parent.name not in failed:
        return None
    reason = failed[job.parent.name].reason
    return reason if reason.startswith(PARENT_FAILED) else f"{PARENT_FAILED} {reason}"


def attempt_run(job: Job, root: Path, runtime: Runtime, say: Say, label: str, made: Container[str]) -> str | None:
    """Have one run; returns why it failed, or None. Raises what ends all of them."""
    try:
        run_stage(job, root, runtime, say, label, made)
    except Stopped:
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
        model = job.loaded.recipe.model.name
        hint = f"; spt check model {model} may tell more" if is_path(model) else ""
        return f"{one_line(error)} (traceback.txt in its run folder; --debug stops here){hint}"
    return None
