"""Which rows are for validation and test where the data do not say: chosen by a hash, with equal shares of every class,
or in folds."""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.options import Options

NAMES = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)

Contents = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # rows, classes, counts: see split_stratified
Shares = tuple[float, float, float]  # of the training rows: what stays, goes to validation and goes to test


def hash_key(identity: bytes, seed: int) -> int:
    """A row's place in [0, 2^64), determined by its id or input alone, whatever other rows there are."""
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8, key=str(seed).encode()).digest(), "little")


def missing_shares(config: Options, present: Collection[str]) -> Shares:
    """The shares of the training rows that go to splits that the data lack; `present` are those that they have."""
    validation = 0.0 if "validation" in present else config.validation_fraction
    test = 0.0 if "test" in present else config.test_fraction
    return 1 - test - validation, validation, test


def split_by_hash(shares: Shares, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """(n,) 0, 1, 2 for train, validation, test, each row by its own key."""
    _, validation, test = shares
    places = keys / 2.0**64
    return np.select([places < test, places < test + validation], [TEST, VALIDATION], TRAIN)


def split_stratified(
    shares: Shares,
    keys: NDArray[np.uint64],
    rows: NDArray[np.int64],
    classes: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """(n,) 0, 1, 2 for train, validation, test, so that each gets its share of each class, as closely as possible.

    keys: (n,), equal for rows that stay together. The k-th triple (rows, classes, counts) says how often a class
    occurs in a row. The first of a class goes to training. The order of rows does not matter.
    """
    return _place(shares, keys, (rows, classes, counts), first=TRAIN)


def draw_folds(
    folds: int,
    keys: NDArray[np.uint64],
    rows: NDArray[np.int64],
    classes: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """(n,) Each row's fold, with each class spread over the folds as evenly as possible; arguments and guarantees are
    those of `split_stratified`.

    Not scikit-learn's: its GroupKFold orders groups of one size by an unstable sort, which differs from machine to
    machine, StratifiedKFold keeps no rows together, and what StratifiedGroupKFold draws depends on its version; a run's
    rows must not.
    """
    units = len(np.unique(keys))
    if units < folds:
        raise ValueError(f"{folds} folds need as many groups of rows that stay together, but there are {units}")
    return _place((1 / folds,) * folds, keys, (rows, classes, counts))


def _place(
    shares: Sequence[float], keys: NDArray[np.uint64], contents: Contents, first: int | None = None
) -> NDArray[np.int64]:
    """(n,) The part of each row. Units of one key are placed largest first, in the order of their keys, each where its
    classes are most lacking (Sainte-Laguë's rule): `first` gets the first of a class, or else the emptiest of
    those that lack as much."""
    rows, classes, counts = contents
    unique, unit = np.unique(keys, return_inverse=True)
    n_classes = int(classes.max(initial=0)) + 1
    cells, which = np.unique(unit[rows] * n_classes + classes, return_inverse=True)  # unit and class
    amounts = np.bincount(which, weights=counts)
    sizes = np.bincount(cells // n_classes, weights=amounts, minlength=len(unique))
    ends = np.searchsorted(cells // n_classes, np.arange(len(unique) + 1)).tolist()
    held = list(zip((cells % n_classes).tolist(), amounts.tolist(), strict=True))
    placed = [[0] * n_classes for _ in shares]
    filled = [0.0] * len(shares)
    parts = np.zeros(len(unique), np.int64)
    for i in np.argsort(-sizes, kind="stable").tolist():
        content = held[ends[i] : ends[i + 1]]
        best, most = first or 0, -1.0
        if first is None or all(placed[first][kind] for kind, _ in content):
            for part, share in enumerate(shares):
                need = sum(count / (placed[part][kind] + count / 2) for kind, count in content) * share
                lacking = need > most + 1e-12 or (first is None and need > most - 1e-12 and filled[part] < filled[best])
                if share and lacking:
                    best, most = part, need
        for kind, count in content:
            placed[best][kind] += count
            filled[best] += count
        parts[i] = best
    return parts[unit]
