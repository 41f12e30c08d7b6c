"""Which of the given rows are for validation: whole groups, and a share of every class."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.estimators.inputs import Rows
from spt.tasks.base import known_targets
from spt.tasks.own.splits import VALIDATION, hash_key, split_stratified


def validation_rows(rows: Rows, targets: NDArray[Any], groups: Any, fraction: float, seed: int) -> NDArray[np.bool_]:
    """(n,) Which rows are held out. Rows of one group or, without groups, of the same input stay together, and every
    class keeps a row for training, where rows without a target stay too. The order of rows has no effect.

    Raises ValueError if nothing can be held out.
    """
    n = len(rows)
    identities = [rows.identity(i) for i in range(n)] if groups is None else [_name(group) for group in groups]
    keys = np.array([hash_key(identity, seed) for identity in identities], np.uint64)
    shares = (1 - fraction, fraction, 0.0)
    places, kinds = _kinds(targets)
    held = split_stratified(shares, keys, places, kinds, np.ones(len(places), np.int64)) == VALIDATION
    return held if held.any() else _smallest_unit(keys, places, kinds, groups is not None)


def _kinds(targets: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows with a target, and what is to be shared out evenly of each: its class; every label that holds, or that none
    does; of numbers nothing."""
    known = known_targets(targets).reshape(len(targets), -1).any(axis=1)
    if targets.ndim == 1:
        return np.flatnonzero(known), targets[known]
    if targets.dtype.kind == "f":
        return np.flatnonzero(known), np.zeros(int(known.sum()), np.int64)
    holds = targets == 1
    where, kinds = np.nonzero(np.column_stack([holds, known & ~holds.any(axis=1)]))
    return where, kinds


def _name(group: Any) -> bytes:
    return repr(group.item() if isinstance(group, np.generic) else group).encode()


def _smallest_unit(
    keys: NDArray[np.uint64], places: NDArray[np.int64], kinds: NDArray[np.int64], grouped: bool
) -> NDArray[np.bool_]:
    """Of few rows: the smallest group whose classes training keeps; among equals, the first by its key."""
    counts = np.bincount(kinds)
    units, unit, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    for i in np.lexsort((units, sizes)).tolist():
        held = unit == i
        inside = np.bincount(kinds[held[places]], minlength=len(counts))
        if inside.any() and not ((counts > 0) & (counts == inside)).any():
            return held
    n = len(keys)
    what = f"n_samples={n}: " + (f"{n} rows in {len(units)} groups" if grouped else f"{len(units)} different rows")
    raise ValueError(
        f"{what} are too few to hold some out for validation and keep every class for training; give more, or X_val "
        "and y_val"
    )
