"""Work on a study beside others: any number of processes, on any machines that share the folder of runs.

Nobody deals the runs out. Every worker takes the next one that nobody has (spt/runs/claim.py), and waits while others
make what is left, since the runs of one that dies become free. Nothing but the folder is shared: what a search chooses
follows from its files, whoever reads them.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spt.baselines.job import BaselineJob
from spt.errors import OutputError, RunInUse, RunTakenOver, SptError, UsageError
from spt.execution.baselines import make_baselines
from spt.execution.queue import FailedRun, Failures, RunRequest, attempt_run, count_runs, unfinished_requests
from spt.execution.run_study import (
    apply_selection,
    cell_requests,
    check_recipes_build,
    in_group,
    make_plan,
    study_folder,
    trial_requests,
    without_settled,
    write_plan,
)
from spt.report.collect import read_report
from spt.report.write import write_report
from spt.runs.baseline import BaselineResult, baseline_outcome
from spt.runs.claim import RENEWALS
from spt.runs.folder import RunFolder
from spt.runs.plan import PLAN, StudyPlan, read_plan, run_names
from spt.runtime.distributed import Runtime
from spt.studies.grid import StudyGrid
from spt.training.stage import finished_result

logger = logging.getLogger(__name__)

FIRST_POLL, LAST_POLL = 0.2, 5.0  # seconds between two looks at the runs that others have: at first, and in the end


@dataclass(frozen=True)
class WorkLimits:
    """How much a worker does."""

    most: int | None = None  # runs that it makes; None: as long as there are any
    wait: bool = True  # for runs that others have: they may fail to end them

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise UsageError(f"{self.most} runs are asked for; a worker makes at least 1")


class WorkDone(NamedTuple):
    """What one worker did, and how the study stands since."""

    folder: Path
    made: int  # runs, by this worker
    failed: int  # of all
    left: int  # not made yet; the report is written where there are none


def work_on_study(grid: StudyGrid, root: Path, options: WorkLimits, runtime: Runtime) -> WorkDone:
    """Make runs that nobody else makes, until none is left; then one worker makes the baselines and the report.

    A run that failed before is tried again, by one worker. Raises Stopped on request; other workers go on.
    """
    if runtime.settings.resume == "never":
        raise UsageError("workers share what they make, so none of them starts over; spt study run --resume never does")
    runtime = Runtime(replace(runtime.settings, wait=False))
    runtime.check_libraries()
    check_recipes_build(grid, root, runtime)
    folder, plan = study_folder(grid, root), make_plan(grid)
    settled = runtime.on_main(lambda: _is_settled(folder))
    runtime.on_main(lambda: write_plan(folder, grid, plan))
    baselines = runtime.on_main(lambda: {each.job.folder: _status(root, each.job.folder) for each in grid.baselines})
    worker = _Worker(root, folder.name, runtime, options)
    # What was chosen stands: no trial that failed is tried again behind the backs of those who work with the choice.
    left, failed = worker.work(trial_requests(grid), "runs of the search", retry=not settled)
    if left == 0 and grid.searches:
        grid, plan, messages = runtime.on_main(lambda: apply_selection(grid, root))
        for message in messages:
            logger.info(message)
        runtime.on_main(lambda: write_plan(folder, grid, plan))
        failed = without_settled(failed, plan, root)
    if left == 0:
        left, failed_cells = worker.work(cell_requests(grid), "runs", retry=True)
        failed += failed_cells
    count = len({run.job.name for run in failed})
    if left == 0:
        count += runtime.on_main(lambda: _finish(grid, plan, folder, baselines, runtime.settings.lease, options.wait))
    return WorkDone(folder, worker.made, count, left)


def _is_settled(folder: Path) -> bool:
    """Has every search of the study been decided, by any worker?"""
    try:
        searches = read_plan(folder).searches
    except (SptError, OSError):
        return False
    return bool(searches) and all(search.chosen for search in searches)


def _status(root: Path, name: str) -> dict[str, Any]:
    return RunFolder(root, name).status() or {}


def _finish(
    grid: StudyGrid, plan: StudyPlan, folder: Path, before: dict[str, dict[str, Any]], lease: float, wait: bool
) -> int:
    """Baselines, then the report, by the first worker that has nothing left to do. `before`: the statuses of baselines
    when this worker began. Returns how many failed."""
    root = folder.parent

    def may_succeed(job: BaselineJob) -> bool:
        status = _status(root, job.folder)
        return status.get("state") != "failed" or status == before[job.folder]

    waiting = partial(logger.info, "another worker makes the report; waiting for it")
    try:
        with RunFolder(root, folder.name).locked(waiting if wait else None, lease):
            if not (folder / PLAN).exists():
                raise OutputError(
                    f"{folder} was removed while it was worked on; the same command makes what is missing"
                )
            make_baselines([each.job for each in grid.baselines if may_succeed(each.job)], root)
            if not _is_current(folder, plan):
                write_report(read_report([folder]), folder)
    except RunInUse:
        logger.info("another worker makes the report")
    return sum(not isinstance(baseline_outcome(root, name), BaselineResult) for name in before)


def _is_current(folder: Path, plan: StudyPlan) -> bool:
    """Is the report younger than everything it tells of? All times are the file server's."""
    try:
        written = (folder / "report.json").stat().st_mtime_ns
    except FileNotFoundError:
        return False
    parts = [*run_names(plan), *(each.run for each in plan.baselines)]
    paths = [folder / PLAN, *(folder.parent / name / "status.json" for name in parts)]
    return all(path.stat().st_mtime_ns < written for path in paths if path.exists())


@dataclass
class _Worker:
    root: Path
    study: str
    runtime: Runtime
    options: WorkLimits
    made: int = 0
    failures: Failures = field(default_factory=Failures)
    _before: dict[str, dict[str, Any]] = field(default_factory=dict)  # statuses at first: who failed then may try again
    _tried: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # here: why it failed, its status then

    def work(self, requests: Sequence[RunRequest], what: str, retry: bool) -> tuple[int, list[FailedRun]]:
        """Until no run is left that this worker can make or wait for. Returns how many are, and the failures."""
        requests = [in_group(request, self.study) for request in requests]
        unfinished, self.failures = self.runtime.on_main(lambda: unfinished_requests(requests, self.root))
        names = [request.job.name for request in unfinished]
        self._before = {name: _status(self.root, name) for name in names} if retry else {}
        total = self.runtime.on_main(lambda: count_runs(requests, unfinished, self.root))
        first = secrets.randbelow(max(1, len(unfinished)))  # workers that begin together part
        left = unfinished[first:] + unfinished[:first]
        request: RunRequest | None = None
        while True:
            request, left = self.runtime.on_main(partial(self._next, left))
            if request is None:
                return len(left), self.runtime.on_main(lambda: list(self.failures.values()))
            if self._make(request):
                logger.info(f"{what}: {self.made} made here, at most {len(left) - 1} of {total} left")

    def _next(self, left: list[RunRequest]) -> tuple[RunRequest | None, list[RunRequest]]:
        """A run to make, if there is one, and all that are left, as far as it was necessary to look."""
        pause, limit = FIRST_POLL, min(LAST_POLL, self.runtime.settings.lease / RENEWALS)
        enough = self.made == self.options.most
        waiting = {request.job.name: request for request in left}
        while waiting:
            before = len(waiting)
            for request in list(waiting.values()):
                if request.job.parent_name in waiting:
                    continue
                if self._has_ended(request):
                    del waiting[request.job.name]
                elif not enough and RunFolder(self.root, request.job.name).is_available():
                    return request, list(waiting.values())
            if len(waiting) < before:
                continue  # what starts from those
            if enough or not self.options.wait:
                break
            if pause == FIRST_POLL:
                logger.info(f"{before} runs are left, and others make them or what they start from; waiting")
            time.sleep(min(pause, limit))
            pause *= 1.5
        return None, list(waiting.values())

    def _has_ended(self, request: RunRequest) -> bool:
        """Is the run done, or failed since this worker began, whoever made it?"""
        name = request.job.name
        run, known = RunFolder(self.root, name), self.failures.pop(name, None)
        try:
            status = run.status() or {}
            if finished_result(run) is not None:
                return True
            reason = self.failures.of_parent(request.job) or self._failure(name, status)
        except OutputError as error:
            if error.hopeless:
                raise
            reason = str(error)
        if reason is not None:
            if known is None:
                self.failures.add(request, reason)
            else:
                self.failures[name] = known
        return reason is not None

    def _failure(self, name: str, status: dict[str, Any]) -> str | None:
        reason, then = self._tried.get(name, ("", None))
        if status == then:
            return reason
        ended = status.get("state") == "diverged" or (
            status.get("state") == "failed" and status != self._before.get(name)
        )
        return str(status.get("reason") or "no reason was recorded") if ended else None

    def _make(self, request: RunRequest) -> bool:
        """False where another process was quicker, or has taken the run over."""
        name = request.job.name
        try:
            reason = attempt_run(request, self.root, self.runtime)
        except RunInUse as error:
            if isinstance(error, RunTakenOver):
                logger.info(str(error))
            return False
        self.made += 1
        if reason is not None:
            self._tried[name] = reason, _status(self.root, name)
        return True
