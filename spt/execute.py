"""Have many runs carried out: in which order, which share of them, and one after the other in this process.

One failure never stops the rest. Worker processes and Slurm are in workers.py and slurm.py.
"""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

from spt.components import is_path
from spt.errors import OutputError, SptError, Stopped, UsageError, brief
from spt.plan import Job
from spt.run import Run
from spt.runtime import Runtime, Settings
from spt.stages import ensure, finished

Say = Callable[[str], None]
ORPHANED = "its pretraining failed:"


class Wanted(NamedTuple):
    """A run to be had; those it starts from are had before it."""

    job: Job
    label: str  # for people, e.g. "[3/12] quickstart seed 1 spt:"


class Failed(NamedTuple):
    """A run that could not be had."""

    job: Job
    reason: str  # one sentence


def ordered(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Every job once, parents before children; a parent has its first child's label. Order otherwise kept."""
    return _ordered(wanted, lambda job: True)


def outstanding(
    wanted: Sequence[Wanted], root: Path, settings: Settings, say: Say
) -> tuple[list[Wanted], list[Failed]]:
    """In order, what is left to make, and what cannot be since its result cannot be read.

    A pretraining is only made for a run that is left to make, or when it is wanted itself.
    """
    unreadable: list[Failed] = []
    done: dict[str, bool] = {}

    def left(job: Job) -> bool:
        if job.name not in done:
            try:
                done[job.name] = settings.resume != "never" and finished(Run(root, job.name), say) is not None
            except OutputError as error:
                if error.hopeless:
                    raise
                done[job.name] = True
                unreadable.append(Failed(job, str(error)))
        return not done[job.name]

    found = [one for one in _ordered(wanted, left) if left(one.job)]
    labels = {job.name: label for job, label in ordered(wanted)} if unreadable else {}
    for failure in unreadable:
        say(f"{labels[failure.job.name]} failed: {failure.reason}")
    return found, unreadable


def _ordered(wanted: Sequence[Wanted], left: Callable[[Job], bool]) -> list[Wanted]:
    """As `ordered`, without the parents of jobs that are not `left` to make."""
    found: dict[str, Wanted] = {}

    def add(job: Job, label: str) -> None:
        if job.name in found:
            return
        if isinstance(job.parent, Job) and left(job):
            add(job.parent, label)
        found[job.name] = Wanted(job, label)

    for job, label in wanted:
        add(job, label)
    return list(found.values())


def shard(wanted: Sequence[Wanted], index: int, count: int) -> list[Wanted]:
    """The index-th (from 1) of `count` parts of nearly equal numbers of runs; the same on every machine.

    Jobs that share a pretraining are in one part, so that no two parts make the same run.
    """
    if not 1 <= index <= count:
        raise UsageError(f"there is no shard {index} of {count}; shards count from 1")
    families: dict[str, set[str]] = {}  # by its first ancestor: the runs of a family
    family: list[str] = []
    for job, _ in wanted:
        line = chain(job)
        family.append(line[0].name)
        families.setdefault(line[0].name, set()).update(one.name for one in line)
    loads = [0] * count
    part: dict[str, int] = {}
    for name in sorted(families, key=lambda name: -len(families[name])):  # stable: of equal ones the first first
        part[name] = loads.index(min(loads))
        loads[part[name]] += len(families[name])
    return [one for one, name in zip(wanted, family, strict=True) if part[name] == index - 1]


def chain(job: Job) -> list[Job]:
    """A job and the jobs it starts from, the first ancestor first."""
    return [*(chain(job.parent) if isinstance(job.parent, Job) else []), job]


def here(wanted: Sequence[Wanted], root: Path, runtime: Runtime, say: Say) -> list[Failed]:
    """One run after the other, in this process (or these processes together); returns the failures.

    Raises Stopped on request, and OutputError where the disk would fail every other run as well.
    """
    found, unreadable = runtime.once(lambda: outstanding(wanted, root, runtime.settings, say))
    failed = {failure.job.name: failure for failure in unreadable}
    made: set[str] = set()  # also with --resume never, once each
    for job, label in found:
        reason = orphaned(job, failed)
        if reason is None:
            reason = attempt(job, root, runtime, say, label, made)
        if reason is None:
            made.add(job.name)
        else:
            failed[job.name] = Failed(job, reason)
            say(f"{label} failed: {reason}")
    return list(failed.values())


def orphaned(job: Job, failed: dict[str, Failed]) -> str | None:
    """Why a job cannot be, if the run it starts from has failed."""
    if not isinstance(job.parent, Job) or job.parent.name not in failed:
        return None
    reason = failed[job.parent.name].reason
    return reason if reason.startswith(ORPHANED) else f"{ORPHANED} {reason}"


def attempt(job: Job, root: Path, runtime: Runtime, say: Say, label: str, made: Container[str]) -> str | None:
    """Have one run; returns why it failed, or None. Raises what ends all of them."""
    try:
        ensure(job, root, runtime, say, label, made)
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
        hint = f"; spt doctor --model {model} may tell more" if is_path(model) else ""
        return f"{brief(error)} (traceback.txt in its run folder; --debug stops here){hint}"
    return None
