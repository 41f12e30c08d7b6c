"""Which of the rows that were handed over are for validation: whole groups, and a share of every class."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.estimators.inputs import Rows
from spt.tasks.own.splits import VALIDATION, hash_key, split_stratified


def validation_rows(
    rows: Rows, classes: NDArray[np.int64], groups: Any, fraction: float, seed: int
) -> NDArray[np.bool_]:
    """(n,) Which rows are held out. Rows of one group, or without groups of the same input, stay together, and every
    class keeps a row for training. The order of rows plays no part.

    Raises ValueError where nothing can be held out.
    """
    n = len(rows)
    identities = [rows.identity(i) for i in range(n)] if groups is None else [_name(group) for group in groups]
    keys = np.array([hash_key(identity, seed) for identity in identities], np.uint64)
    shares = (1 - fraction, fraction, 0.0)
    held = split_stratified(shares, keys, np.arange(n), classes, np.ones(n, np.int64)) == VALIDATION
    return held if held.any() else _smallest_unit(keys, classes, groups is not None)


def _name(group: Any) -> bytes:
    return repr(group.item() if isinstance(group, np.generic) else group).encode()


def _smallest_unit(keys: NDArray[np.uint64], classes: NDArray[np.int64], grouped: bool) -> NDArray[np.bool_]:
    """Of few rows: the smallest group whose classes training keeps; among equals, the first by its key."""
    counts = np.bincount(classes)
    units, unit, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    for i in np.lexsort((units, sizes)).tolist():
        held = unit == i
        if not ((counts > 0) & (counts == np.bincount(classes[held], minlength=len(counts)))).any():
            return held
    n = len(keys)
    what = f"n_samples={n}: " + (f"{n} rows in {len(units)} groups" if grouped else f"{len(units)} different rows")
    raise ValueError(
        f"{what} are too few to hold some out for validation and keep every class for training; give more, or X_val "
        "and y_val"
    )
