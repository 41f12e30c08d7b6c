"""What is shared by tasks whose rows are generated, each from seed, split, epoch and number alone.

The training split of such a task is virtual: `train_size` rows per epoch, new ones in every epoch or the same, as
`resample_each_epoch` says. Validation and test are fixed, so that scores can be compared. Targets are per step.

Letters: B rows, T steps of a row.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from spt.rng import uniforms
from spt.tasks.base import IGNORED, Split, TaskConfig, row_ids
from spt.tasks.parallel import allocate, fill

CHUNK = 2**21  # numbers made at once by one worker

Made = tuple[NDArray[Any], NDArray[Any]]  # inputs (B, T[, C]) and targets (B, T[, K])
Make = Callable[[Any, str, NDArray[np.int64], int], Made]  # config, split, numbers of the rows, epoch


def made_splits(config: TaskConfig, make: Make, train: int, held: int, what: str) -> tuple[Split, Split, Split]:
    """Training rows of epoch 0, and `held` rows each of validation and test. `what` names the work in the log."""
    most = config.max_rows or max(train, held)
    return (
        _split(config, make, "train", min(train, most), what),
        _split(config, make, "val", min(held, most), what),
        _split(config, make, "test", min(held, most), what),
    )


def _split(config: TaskConfig, make: Make, name: str, n: int, what: str) -> Split:
    like = make(config, name, np.arange(1), 0)
    values, targets = (allocate((n, *array.shape[1:]), array.dtype) for array in like)
    at_once = max(1, CHUNK // sum(array.size for array in like))
    fill((values, targets), functools.partial(_part, config, make, name), n, at_once, f"{what}, {name}")
    ids = np.arange(n) if name == "train" else row_ids(name, n)
    return Split.from_rows(values, targets, ids=ids, per_step=True)


def _part(config: TaskConfig, make: Make, name: str, first: int, last: int) -> Made:
    return make(config, name, np.arange(first, last), 0)


def resampled(config: TaskConfig, make: Make, train: int, ids: NDArray[np.int64], epoch: int) -> Split:
    """Training rows of an epoch, with any B numbers in [0, train); those of epoch 0 are `made_splits`'. Raises
    ValueError."""
    numbers = np.asarray(ids)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or not len(numbers):
        raise ValueError(
            f"rows are given as {numbers.dtype} of shape {numbers.shape}; a list of row numbers is expected"
        )
    if numbers.min() < 0 or numbers.max() >= train:
        raise ValueError(f"rows {numbers.min()} to {numbers.max()} do not exist; an epoch has {train:,}")
    if epoch < 0:
        raise ValueError(f"the epoch is {epoch}; epochs count from 0")
    inputs, targets = make(config, "train", numbers, epoch)
    return Split.from_rows(inputs, targets, ids=numbers, per_step=True)


# ------------------------------------------------------------------------------------------------------ tokens


def stored(tokens: NDArray[np.int64], targets: NDArray[np.int64], vocab: int) -> Made:
    """Both in the smallest type that holds them."""
    small: DTypeLike = np.uint8 if vocab <= 2**8 else np.int16 if vocab <= 2**15 else np.int32
    signed: DTypeLike = np.int8 if vocab <= 2**7 else np.int16 if vocab <= 2**15 else np.int32
    return tokens.astype(small), targets.astype(signed)


def asked_of_next(whole: NDArray[np.int64], asked: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(B, T + 1) rows to (B, T) inputs and targets: at each step the next token, where it is `asked` for."""
    return whole[:, :-1], np.where(asked, whole, IGNORED)[:, 1:]


# ----------------------------------------------------------------------------------------------------- choices


def subsets(key: NDArray[np.uint64], size: int, n: int) -> NDArray[np.int64]:
    """(B, size) distinct numbers of 0 … n-1 in ascending order, all subsets equally likely (Floyd's algorithm)."""
    chosen = np.empty((len(key), size), np.int64)
    draws = uniforms(key, size)
    for k in range(size):
        top = n - size + k
        drawn = (draws[:, k] * (top + 1)).astype(np.int64)
        taken = (chosen[:, :k] == drawn[:, None]).any(axis=1)
        chosen[:, k] = np.where(taken, top, drawn)
    chosen.sort(axis=1)
    return chosen


def shuffled(key: NDArray[np.uint64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B, n) each row's values in a random order."""
    order = np.argsort(uniforms(key, values.shape[1]), axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1)


def first_of_each(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(B, n) Is it the first of its value in the row?"""
    order = np.argsort(values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    new = np.ones(values.shape, np.bool_)
    new[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    first = np.empty_like(new)
    np.put_along_axis(first, order, new, axis=1)
    return first
