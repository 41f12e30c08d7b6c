"""Which rows are for validation and test where the data do not say: by a hash, or with equal shares of every class."""

import hashlib
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.options import Options

NAMES = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)

Shares = tuple[float, float, float]  # of the training rows: what stays, goes to validation and goes to test


def hash_key(identity: bytes, seed: int) -> int:
    """A row's place in [0, 2^64): it follows from its id or input alone, whatever other rows there are."""
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8, key=str(seed).encode()).digest(), "little")


def missing_shares(config: Options, present: Collection[str]) -> Shares:
    """What the splits that the data lack get of the training rows; `present` are those that the data have."""
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
    """(n,) 0, 1, 2 for train, validation, test, so that each gets its share of each class, as near as it goes.

    keys: (n,), equal for rows that stay together. The k-th triple (rows, classes, counts) says how often a class
    occurs in a row. Units of one key are placed largest first, in the order of their keys, each where its classes
    are most lacking (Sainte-Laguë's rule); the first of a class goes to training. The order of rows plays no part.
    """
    unique, unit = np.unique(keys, return_inverse=True)
    n_classes = int(classes.max(initial=0)) + 1
    cells, which = np.unique(unit[rows] * n_classes + classes, return_inverse=True)  # unit and class
    amounts = np.bincount(which, weights=counts)
    sizes = np.bincount(cells // n_classes, weights=amounts, minlength=len(unique))
    ends = np.searchsorted(cells // n_classes, np.arange(len(unique) + 1)).tolist()
    contents = list(zip((cells % n_classes).tolist(), amounts.tolist(), strict=True))
    placed = [[0] * n_classes for _ in NAMES]
    splits = np.zeros(len(unique), np.int64)
    for i in np.argsort(-sizes, kind="stable").tolist():
        content = contents[ends[i] : ends[i + 1]]
        best, most = TRAIN, -1.0
        if all(placed[TRAIN][kind] for kind, _ in content):
            for split, share in enumerate(shares):
                need = sum(count / (placed[split][kind] + count / 2) for kind, count in content) * share
                if share and need > most + 1e-12:
                    best, most = split, need
        for kind, count in content:
            placed[best][kind] += count
        splits[i] = best
    return splits[unit]
