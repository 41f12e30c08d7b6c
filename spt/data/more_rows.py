"""Rows beyond the training split, which pretraining may see where a recipe says that this is no self-pretraining."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.config.job import digest
from spt.data.cache import prepare_once, read_prepared, source_hash
from spt.data.fingerprints import rows_hash, with_fingerprints
from spt.data.source import OpenTask, cache_dir, call_hook, data_dir
from spt.errors import DataError, UsageError
from spt.runs.result import NOT_SELF_PRETRAINING
from spt.tasks.base import Classes, Split, TaskData, describe

FORMAT = 3  # raised when other rows would be left out, or kept
UNLABELLED = Classes(2)  # what stands for a target where there is none


def with_more_rows(task: OpenTask, data: TaskData, path: Path) -> TaskData:
    """The task's data without labels, with the rows of these files behind its training rows; prepared once.

    Left out are rows with the input of a validation or test row, those of its group, and training rows. Raises
    UsageError for tasks that read no files, DataError for what is in them.
    """
    if not hasattr(task.component.module, "more_rows"):
        raise UsageError(
            f"pretrain.data: more rows are read as a task's own files are, and task {task.component.identity} reads "
            "none; it is for task custom"
        )
    files = sorted(file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    key = {
        "format": FORMAT,
        "rows": rows_hash(data),
        "input": describe(data.input),
        "options": task.config.model_dump(mode="json"),
        "source": source_hash(task.component.module),
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "path": str(path),
    }
    folder = cache_dir() / "tasks" / f"{path.stem}-more-{digest(key)}"
    prepare_once(folder, lambda: _joined(task, data, path))
    return replace(read_prepared(folder), target=data.target)


def _joined(task: OpenTask, data: TaskData, path: Path) -> TaskData:
    more = call_hook(task.component, "more_rows", task.config, data_dir().resolve(), path, data)
    if task.config.max_rows is not None:
        more = more.take(np.arange(min(task.config.max_rows, len(more)))).packed()
    more = with_fingerprints(_alike(more, data.train))
    held_out = _held_out(more, data)
    known = np.isin(more.fingerprints, data.train.seen) & ~held_out
    kept = more.take(np.flatnonzero(~held_out & ~known))
    if not len(kept):
        raise DataError(f"pretrain.data: {path.name} has no row that is not one of this task already")
    if int(kept.extents.max()) > data.length:
        i = int(np.argmax(kept.extents))
        raise DataError(
            f"pretrain.data: row {kept.ids[i]} of {path.name} has {int(kept.extents[i]):,} steps, but this task's "
            f"longest has {data.length:,}; cut both with task.max_length={data.length} task.truncate=true"
        )
    note = (
        f"{NOT_SELF_PRETRAINING}: {len(kept):,} rows of {path.name} were added to the {len(data.train):,} training rows"
    )
    if held_out.any():
        note += f"; {int(held_out.sum()):,} were left out, which are validation or test rows or of their groups"
    if known.any():
        note += f"; {int(known.sum()):,} were among them already"
    splits: dict[str, Any] = {name: _without_labels(split) for name, split in data.splits.items()}
    splits["train"] = Split.joined([splits["train"], _without_labels(kept)])
    return replace(data, **splits, target=UNLABELLED, notes=(*data.notes, note))


def _alike(more: Split, train: Split) -> Split:
    """The rows with numbers stored as training's are, so that equal inputs have equal fingerprints."""
    values = more.values
    if train.values.dtype.kind in "iu" and values.dtype.kind == "f":
        limits = np.iinfo(train.values.dtype)
        values = np.rint(values).clip(limits.min, limits.max)
    ids = np.char.add("more-", more.ids.astype(str))  # of other names than training's
    steps = more.steps if train.steps is not None else None
    return replace(more, values=values.astype(train.values.dtype, copy=False), ids=ids, steps=steps)


def _held_out(more: Split, data: TaskData) -> NDArray[np.bool_]:
    """(n,) Which rows have the input of a row that this task scores, or are of its recording or group."""
    found = np.zeros(len(more), bool)
    for split in (data.val, data.test):
        found |= np.isin(more.fingerprints, split.seen)
        if split.sources is not None and more.sources is not None:
            found |= np.isin(more.sources, split.sources)
        if split.groups is not None and more.groups is not None:
            found |= np.isin(more.groups, split.groups)
    return found


def _without_labels(split: Split) -> Split:
    """The rows one behind the other, with a target that means nothing."""
    return replace(split.unlabelled().packed(), targets=np.zeros(len(split), np.int64))
