"""Make the baselines of a study, one after the other in this process: they are made in seconds, or a few minutes."""

import logging
from collections.abc import Sequence
from pathlib import Path

from spt.baselines.job import BaselineJob
from spt.baselines.registry import BASELINES
from spt.baselines.run import run_baseline
from spt.errors import OutputError, SptError, one_line
from spt.execution.queue import is_past
from spt.report.format import score_text, time_text
from spt.runs.baseline import BaselineResult, baseline_outcome
from spt.runs.folder import RunFolder

logger = logging.getLogger(__name__)


def make_baselines(
    jobs: Sequence[BaselineJob], root: Path, restart: bool = False, deadline: float | None = None
) -> dict[str, str]:
    """Every baseline that is missing; finished ones are taken as they are, with `restart` moved aside first. Returns
    why some failed, by folder: one failure never stops the rest.

    With a deadline, a moment of time.monotonic(), each is made for all seeds and splits before the next one, the
    cheapest first, and after it none is begun but that one.

    Raises OutputError where the disk would fail every other as well; a signal ends the process, and the same command
    goes on.
    """
    if restart:
        for job in jobs:
            run = RunFolder(root, job.folder)
            if run.path.exists():
                with run.locked():
                    run.move_aside()
    failed: dict[str, str] = {}
    left = [job for job in jobs if not isinstance(baseline_outcome(root, job.folder), BaselineResult)]
    if deadline is not None:
        left.sort(key=lambda job: list(BASELINES).index(job.name))  # which is from cheap to dear
    begun: set[str] = set()
    for number, job in enumerate(left, 1):
        if begun and job.name not in begun and is_past(deadline):
            names = dict.fromkeys(each.name for each in left if each.name not in begun)
            logger.info(f"left out, since the time is up: {', '.join(names)}; the same command makes what is missing")
            break
        begun.add(job.name)
        label = f"[baseline {number}/{len(left)}] {baseline_text(job)}:"
        if (reason := _attempt(job, root, label)) is not None:
            failed[job.folder] = reason
            logger.warning(f"{label} failed: {reason}")
    return failed


def baseline_text(job: BaselineJob) -> str:
    return f"{job.resolved.name} {job.name}" + ("" if job.seed is None else f" seed {job.seed}")


def _attempt(job: BaselineJob, root: Path, label: str) -> str | None:
    """Make one; returns why it failed, or None."""
    try:
        result = run_baseline(job, root)
    except SptError as error:
        if isinstance(error, OutputError) and error.hopeless:
            raise
        return str(error)
    except Exception as error:
        return f"{one_line(error)} (traceback.txt in its folder)"
    said = score_text(result.test[result.metric], result.metric)
    logger.info(f"{label} test {result.metric} {said}, {time_text(result.seconds)}")
    return None
