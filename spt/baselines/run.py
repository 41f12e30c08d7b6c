"""Make a baseline: read it if it is there, else fit, choose on validation, score on test once, write."""

import contextlib
import logging
import os
import platform
import time
import traceback
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt import __version__
from spt.baselines.base import Fitted, Query, every
from spt.baselines.base import answers as answer_all
from spt.baselines.job import BaselineJob
from spt.baselines.scores import HOLDS, MANY, OF_ANSWERS, OF_SCORES, best_classes, scores
from spt.config.recipe import LOWER_IS_BETTER
from spt.data.dataset import open_task
from spt.data.fingerprints import split_record
from spt.data.metrics import UNASKED
from spt.errors import DataError, SptError, Stopped, hide_secrets, one_line
from spt.runs.baseline import BaselineResult, read_baseline
from spt.runs.files import replacing, write_json, write_text, writing
from spt.runs.folder import RunFolder
from spt.runs.predictions import FILE
from spt.runtime.signals import cleanup
from spt.tasks.base import Classes, Labels, Reals, Split, TaskData, Tokens, known_targets

logger = logging.getLogger(__name__)

THREADED = 2**22  # numbers in training rows from which threads help
PACKAGES = ("numpy", "scipy", "scikit-learn")


def run_baseline(job: BaselineJob, root: Path) -> BaselineResult:
    """Its result: read if it is there, else computed, by one process at a time. Raises an SptError otherwise."""
    if (result := read_baseline(root, job.folder)) is not None:
        return result
    run = RunFolder(root, job.folder)

    def waiting() -> None:
        logger.info(f"{run.name} is being made by another process; waiting for it")

    with run.locked(waiting):
        if (result := read_baseline(root, job.folder)) is not None:
            return result
        with writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.path / "job.json", job.settings())
        run.set_status("running")
        try:
            with cleanup(lambda error: run.set_status("stopped", str(error), error.exit_code)):
                result = _compute(job, run)
        except BaseException as error:
            _record(run, error)
            raise
        run.check()
        write_text(run.path / "result.json", result.model_dump_json(indent=2) + "\n")
        run.set_status("done")
        return result


def _record(run: RunFolder, error: BaseException) -> None:
    """status.json says what happened; an error not of ours leaves its traceback too."""
    try:
        if isinstance(error, SptError):
            run.set_status("failed", str(error), error.exit_code)
        elif isinstance(error, Stopped):
            run.set_status("stopped", str(error), error.exit_code)
        elif isinstance(error, Exception):
            run.set_status("failed", one_line(error), 1)
            trace = hide_secrets("".join(traceback.format_exception(error)))
            (run.path / "traceback.txt").write_text(trace, encoding="utf-8")
        else:
            run.set_status("stopped", "interrupted", 130)
    except (SptError, OSError):
        pass  # the disk is full: the error itself is what the user must see


def _compute(job: BaselineJob, run: RunFolder) -> BaselineResult:
    data, begin = open_task(job.resolved.recipe.task).labelled(), time.monotonic()
    try:
        with _threads(data):
            fitted = job.baseline.fit(replace(data, test=data.test.unlabelled()), job.metric, job.seed or 0)
            val, _ = _scored(fitted, data, data.val, _names(job, data, data.val), job.metric.positive)
            test, columns = _scored(fitted, data, data.test, _names(job, data, data.test), job.metric.positive)
    except MemoryError as error:
        raise DataError(f"there is no memory for baseline {job.name} on these data ({one_line(error)})") from error
    seconds = time.monotonic() - begin
    _write_predictions(run, columns)
    return BaselineResult(
        key=job.key,
        baseline=job.name,
        title=job.baseline.title if isinstance(data.target, Classes) else job.baseline.of_numbers,
        version=job.baseline.version,
        task=job.resolved.task_name,
        seed=job.seed,
        smoke=bool(job.resolved.smoke),
        metric=job.metric.name,
        higher_is_better=not LOWER_IS_BETTER[job.metric.name],
        val=val,
        test=test,
        sees=fitted.sees,
        settings=dict(fitted.settings),
        tried=fitted.tried,
        fitted=fitted.rows,
        seconds=seconds,
        data={name: split_record(split) for name, split in data.splits.items()},
        notes=(*fitted.notes, *_notes(job, data)),
        environment=environment(),
    )


def _threads(data: TaskData) -> contextlib.AbstractContextManager[Any]:
    """One thread for few numbers: several would wait for each other most of the time."""
    from threadpoolctl import threadpool_limits

    numbers = int(data.train.lengths.sum()) * (1 if isinstance(data.input, Tokens) else data.input.channels)
    return contextlib.nullcontext() if numbers > THREADED else threadpool_limits(1)


def _notes(job: BaselineJob, data: TaskData) -> tuple[str, ...]:
    notes = {
        "times between steps are not seen": data.train.steps is not None and job.name != "majority",
        "fitted to the rows of the first epoch, where networks see new ones in each": data.resample is not None,
    }
    return tuple(note for note, holds in notes.items() if holds)


def environment() -> dict[str, Any]:
    """What a result depends on besides the data and the seed."""
    return {
        "spt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "packages": {name: version(name) for name in PACKAGES},
    }


Columns = dict[str, NDArray[Any]]


def _names(job: BaselineJob, data: TaskData, split: Split) -> set[str]:
    """Of metrics that are not of answers alone, the compared one and those that take no time to speak of."""
    names = {*OF_ANSWERS, job.metric.name}
    answers = int(split.lengths.sum()) if split.per_step else len(split)
    if isinstance(data.target, Reals) or answers * data.target.count > UNASKED:
        return names
    return names | {name for name in OF_SCORES if name != "log_loss" or job.baseline.probabilities}


def _scored(
    fitted: Fitted, data: TaskData, split: Split, names: Collection[str] = OF_ANSWERS, positive: int | None = None
) -> tuple[dict[str, float], Columns]:
    """Scores over all rows of a split, or all recordings, and what predictions.parquet holds of them."""
    if split.recordings is not None:
        return _scored_recordings(fitted, data, split, split.recordings, names, positive)
    kept = isinstance(data.target, Classes) and data.target.count <= MANY and bool({*names} & {*OF_SCORES})
    of_classes = list[Any]()
    found, truth, margins, rows = list[Any](), list[Any](), list[Any](), list[Any]()
    for asked, targets in every(split):
        for part in asked.parts():
            answered = fitted.answer(part)
            if isinstance(data.target, Classes):
                top = np.partition(answered, -2, axis=1)[:, -2:]
                margins.append(top[:, 1] - top[:, 0])
                of_classes += [answered] if kept else []
            found.append(best_classes(answered) if isinstance(data.target, Classes) else answered)
            rows.append(part.rows)
        truth.append(targets)
    answers, targets, owners = np.concatenate(found), np.concatenate(truth), np.concatenate(rows)
    if not np.isfinite(answers).all():
        raise DataError("some answers are not finite numbers: training rows or targets are too large for this baseline")
    if split.per_step:
        columns = {"id": split.ids, **_of_steps(data, answers, targets, owners, len(split))}
    else:
        columns = _of_rows(data, split.ids, targets, answers, margins)
    given = np.concatenate(of_classes) if kept else answers
    return scores(data.target, targets, given, names, positive), columns


def _scored_recordings(
    fitted: Fitted,
    data: TaskData,
    split: Split,
    recordings: NDArray[np.int64],
    names: Collection[str],
    positive: int | None,
) -> tuple[dict[str, float], Columns]:
    """As networks are scored: by the mean of the scores, or numbers, of a recording's windows."""
    answered = answer_all(fitted.answer, Query(split.unlabelled(), np.arange(len(split))))
    _, which, counts = np.unique(recordings, return_inverse=True, return_counts=True)
    means = np.zeros((len(counts), answered.shape[1]))
    np.add.at(means, which.reshape(-1), answered)
    means /= counts[:, None]
    if not np.isfinite(means).all():
        raise DataError("some answers are not finite numbers: training rows or targets are too large for this baseline")
    rows, margins = split.whole, list[Any]()
    answers: NDArray[Any] = means
    if isinstance(data.target, Classes):
        top = np.partition(means, -2, axis=1)[:, -2:]
        answers, margins = best_classes(means), [top[:, 1] - top[:, 0]]
    targets = np.asarray(rows.targets)
    found = scores(data.target, targets, means, names, positive)
    return found, _of_rows(data, rows.ids, targets, answers, margins)


def _of_rows(
    data: TaskData, ids: NDArray[Any], targets: NDArray[Any], answers: NDArray[Any], margins: list[Any]
) -> Columns:
    if isinstance(data.target, Classes):
        return {"id": ids, "label": targets, "prediction": answers, "margin": np.concatenate(margins)}
    columns: Columns = {"id": ids}
    if isinstance(data.target, Labels):
        for k in range(data.target.count):
            columns |= {f"label_{k}": targets[:, k], f"prediction_{k}": (answers[:, k] > HOLDS).astype(np.int64)}
        return columns
    for k in range(data.target.size):
        columns |= {f"target_{k}": targets[:, k], f"prediction_{k}": answers[:, k]}
    return columns


def _of_steps(data: TaskData, answers: NDArray[Any], targets: NDArray[Any], owners: NDArray[Any], n: int) -> Columns:
    """Of every row its scored steps, and how many of them are right, or their squared error."""

    def summed(weights: NDArray[Any] | None = None) -> NDArray[np.float64]:
        return np.bincount(owners, weights, minlength=n).astype(np.float64)

    if isinstance(data.target, Classes):
        return {"steps": summed(), "right": summed((answers == targets).astype(np.float64))}
    known = known_targets(targets)
    if isinstance(data.target, Labels):
        right = ((answers > HOLDS) == (targets == 1)) & known
        return {"steps": summed(), "right": summed(right.sum(axis=1) / known.sum(axis=1))}
    squared = np.where(known, np.square(answers - targets), 0.0).sum(axis=1) / known.sum(axis=1)
    return {"steps": summed(), "squared_error": summed(squared)}


def _write_predictions(run: RunFolder, columns: Columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(run.path / FILE) as beside:
        pq.write_table(pa.table(columns), beside)
