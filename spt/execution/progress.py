"""How far the runs of a study are: all of them in one line, which also estimates the time that is left.

The estimate comes from the runs that have ended since the command began: how long they took for the operations that
were planned for them, which covers stopping early too. Runs that were there before say nothing about this machine, now.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spt.config.job import Job
from spt.errors import OutputError
from spt.execution.estimate import RuntimeForecast
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.plan import PROGRESS
from spt.runtime.progress import Board, Update, about


class StudyProgress:
    """Of one study, or of a part of it that is carried out at once (`over`)."""

    def __init__(
        self,
        root: Path,
        flops: Callable[[Job], float | None] = lambda job: None,
        folder: Path | None = None,
        quiet: bool = True,
    ) -> None:
        """`flops` of a job, planned; in `folder` the estimate is kept for others to read."""
        self.what = "runs"
        self._root, self._planned_flops, self._folder, self._quiet = root, flops, folder, quiet
        self._forecast = RuntimeForecast()
        self._observed = [0.0, 0.0]  # seconds and planned operations of all runs that have ended
        self._left: dict[str, Job] = {}
        self._flops: dict[str, float | None] = {}
        self._seconds: dict[str, float | None] = {}  # of each run that is left, as a whole
        self._shares: dict[str, float] = {}  # of runs at work: how much of each is done
        self._most: dict[str, float] = {}  # seconds that runs at work can still take
        self._failed = 0
        self._workers = 1
        self._board = Board(quiet=True)

    @contextlib.contextmanager
    def over(
        self, unfinished: Sequence[Job], runs: int, workers: int = 1, failed: int = 0
    ) -> Iterator["StudyProgress"]:
        """While `unfinished` are made, so many at once, of so many runs; some of those may have failed already."""
        self._left = {job.name: job for job in unfinished}
        several = runs > 1 and bool(unfinished)
        self._flops = {name: self._planned_flops(job) if several else None for name, job in self._left.items()}
        self._shares, self._most, self._failed, self._workers = {}, {}, failed, workers
        self._forget_estimate()
        self._estimate()
        with Board(self._quiet, runs, runs - len(self._left), self.what) as self._board:
            yield self
        if not self._left:
            self._forget_estimate()

    def show(self, who: object, job: Job, update: Update) -> None:
        """The progress of whoever is at work on a run."""
        self._shares[job.name] = update.step / update.total if update.total else 0.0
        if update.left > 0:  # a time limit may end it before its budget
            self._most[job.name] = update.left
        self._board.show(who, update)
        if self._board.has_bars:
            self._board.note_runs(self._facts(self.seconds_left()))

    def remove(self, who: object) -> None:
        self._board.remove(who)

    def end(self, job: Job, failed: bool = False) -> None:
        """A run has ended."""
        self._left.pop(job.name, None)
        self._failed += failed
        if not failed:
            self._observe(job)
        self._estimate()
        left = self.seconds_left()
        self._board.count_run(self._facts(left))
        self._keep_estimate(left)

    def look(self, jobs: Sequence[Job]) -> None:
        """Runs that others make: their files tell how many are at work and how far those are."""
        running = 0
        for job in jobs:
            run = RunFolder(self._root, job.name)
            running += (run.status() or {}).get("state") == "running"
            self._shares[job.name] = _share(run, self._flops.get(job.name))
        self._workers = max(1, running)

    def seconds_left(self) -> float | None:
        """Until all runs have ended; None while nothing is known. No run is divided among workers."""
        rest: dict[str, float] = {}
        for name in self._left:
            if (seconds := self._seconds.get(name)) is None:
                return None
            rest[name] = min(seconds * (1 - min(self._shares.get(name, 0.0), 1.0)), self._most.get(name, math.inf))
        if not rest:
            return None
        behind = {name: rest[name] + rest.get(str(job.parent_name), 0.0) for name, job in self._left.items()}
        return max(sum(rest.values()) / self._workers, *behind.values())

    def _observe(self, job: Job) -> None:
        flops = self._flops.get(job.name)
        with contextlib.suppress(OutputError):
            result = RunFolder(self._root, job.name).result()
            if result is not None and flops:
                self._forecast.observe(result, flops)
                self._observed[0] += result.own.seconds
                self._observed[1] += flops

    def _estimate(self) -> None:
        """Of every run that is left: as runs like it, or at the mean speed of all."""
        seconds, operations = self._observed
        self._seconds = {}
        if operations:
            known: dict[tuple[str, float], float | None] = {}  # of a configuration: its seeds are alike
            for name, job in self._left.items():
                flops = self._flops[name]
                if flops is not None:
                    key = (job.configuration, flops)
                    if key not in known:
                        known[key] = self._forecast.seconds(job, flops)
                    estimate = known[key]
                    self._seconds[name] = seconds / operations * flops if estimate is None else estimate

    def _facts(self, left: float | None) -> str:
        failed = f"{self._failed} of them failed" if self._failed else ""
        return ", ".join(filter(None, [failed, "" if left is None else f"{about(left)} left"]))

    def _keep_estimate(self, left: float | None) -> None:
        if self._folder is not None:
            with contextlib.suppress(OutputError):  # the runs themselves will say that the disk is full
                write_json(self._folder / PROGRESS, {"time": time.time(), "left": left})

    def _forget_estimate(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / PROGRESS).unlink(missing_ok=True)


def _share(run: RunFolder, flops: float | None) -> float:
    """How much of its planned operations a run has logged."""
    last: Mapping[str, object] = next((row for row in reversed(run.metrics()) if row.get("kind") == "train"), {})
    done = last.get("flops")
    return float(done) / flops if flops and isinstance(done, int | float) else 0.0
