"""Fingerprints of rows: identity of splits, duplicates, and leaks between stages."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.config.job import digest
from spt.errors import CheckpointError
from spt.runs.result import SplitRecord
from spt.tasks.base import Split, TaskData
from spt.tasks.parallel import PageRelease


def split_record(split: Split) -> SplitRecord:
    """A split's identity, from its rows' fingerprints and its labels, in order."""
    inputs = np.ascontiguousarray(split.fingerprints).tobytes()
    if split.static is not None:
        inputs += np.ascontiguousarray(split.static, np.float32).tobytes()
    targets = None
    if split.targets is not None:
        kind = np.int64 if split.targets.dtype.kind in "iu" else np.float64
        labels = split.answers if split.per_step else np.ascontiguousarray(split.targets, kind)
        assert labels is not None, "prepared rows have fingerprints of their steps' targets"
        targets = hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()[:16]
    recordings = None if split.recordings is None else len(np.unique(split.recordings))
    prints = hashlib.sha256(inputs).hexdigest()[:16]
    return SplitRecord(rows=len(split), inputs=prints, targets=targets, recordings=recordings)


def overlap(data: TaskData) -> dict[str, int]:
    """How many rows of validation and test have the same input as a training row."""
    return {
        name: int(np.isin(split.fingerprints, data.train.fingerprints).sum())
        for name, split in (("val", data.val), ("test", data.test))
    }


def rows_hash(data: TaskData) -> str:
    """Of the rows and labels of all splits; of pairs, also of how they are drawn in pretraining."""
    records = {name: split_record(split).model_dump() for name, split in data.splits.items()}
    return digest(records if data.train.sequences == 1 else {**records, "pairs": "drawn together"})


def refuse_leak(pretrained_on: NDArray[np.uint64], training: NDArray[np.uint64], data: TaskData, source: str) -> None:
    """Raise CheckpointError when a pretraining row lies in this task's validation or test split.

    A row that the benchmark itself repeats in its training split does not count: both arms may see it anyway, and
    the data's own duplicates are reported elsewhere (`overlap`).
    """
    foreign = np.setdiff1d(pretrained_on, training)
    for name, split in (("validation", data.val), ("test", data.test)):
        each = len(split.seen) // max(1, len(split))  # of a pair two sequences, of a window itself and its recording
        leaked = np.isin(split.seen, foreign).reshape(len(split), max(1, each)).any(axis=1)
        if leaked.any():
            first = split.ids[int(np.flatnonzero(leaked)[0])]
            raise CheckpointError(
                f"{source} was pretrained on {int(leaked.sum())} of the {len(split)} {name} rows of this task (the "
                f"first is row {first}), so its score there would mean nothing; pretrain on this task's training split"
            )


def with_fingerprints(split: Split) -> Split:
    """With fingerprints of its inputs and, where they are those of steps, of its targets."""
    prints = fingerprints(split)
    if split.per_step:
        assert split.targets is not None
        split = replace(split, answers=_prints(split.targets, split.starts, split.stops))
    if split.cuts is None:
        return replace(split, fingerprints=prints)
    middle = split.starts + split.cuts
    starts, stops = np.stack([split.starts, middle], 1), np.stack([middle, split.stops], 1)
    alone = replace(split, starts=starts.reshape(-1), stops=stops.reshape(-1), cuts=None)
    return replace(split, fingerprints=prints, halves=fingerprints(alone).reshape(-1, 2))


def fingerprints(split: Split) -> NDArray[np.uint64]:
    """(n,) One number for each row's input: its bytes, their type, where a pair is cut, when its steps are. Not what
    stands beside a sequence: one that was seen was seen, whatever its static features."""
    prints = _prints(split.values, split.starts, split.stops)
    if split.steps is not None:
        prints ^= _prints(split.steps, split.starts, split.stops)
    return prints if split.cuts is None else prints ^ (split.cuts.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _prints(array: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    person = array.dtype.str.encode()[:16]
    prints, passing = np.empty(len(starts), np.uint64), PageRelease(array)
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        row = np.ascontiguousarray(array[start:stop]).reshape(-1)
        if row.dtype.kind == "f" and (missing := np.isnan(row)).any():
            row = np.where(missing, row.dtype.type(np.nan), row)  # NaN has many forms
        row = row.view(np.uint8)
        prints[i] = int.from_bytes(hashlib.blake2b(row.data, digest_size=8, person=person).digest(), "little")
        passing.visit(start, stop)
    return prints
