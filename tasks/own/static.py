"""Static features: what accompanies a whole sequence, such as an age or a device, as the network is shown it.

A number is standardised by the training rows. A category is 1 in the place of its name and 0 elsewhere, 0 throughout
where training has no such name. Where values may be missing, each column ends with a flag: it is 1, and the rest 0,
where the value is missing. So a new row's features follow from the training columns alone.

n rows, S columns, F features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED
from spt.tasks.own.parsing import (
    Cells,
    MissingValueError,
    NameEncoder,
    Place,
    is_empty,
    is_missing,
    parse_number,
    show,
    sort_labels,
)

MAX_CATEGORIES = 256

Codes = NDArray[np.int32]  # (n,) of the names of a column's cells; IGNORED where a value is missing


@dataclass(frozen=True)
class StaticColumn:
    """What the training rows say about a column."""

    name: str
    gaps: bool  # may values be missing?
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] | None = None  # None: numbers

    @staticmethod
    def of(values: Mapping[str, Any]) -> "StaticColumn":
        """From its fields, as JSON holds them."""
        categories = values["categories"]
        return StaticColumn(**{**values, "categories": None if categories is None else tuple(categories)})

    @property
    def width(self) -> int:
        return (1 if self.categories is None else len(self.categories)) + self.gaps

    def features(self, names: Sequence[str], codes: Codes, place: Place) -> NDArray[np.float32]:
        """(n, width) Raises ValueError for a text where training has numbers."""
        missing = codes == IGNORED
        if self.categories is None:
            numbers = np.array([_number(name) for name in names] + [self.mean])  # the last is a missing one's
            wrong = np.flatnonzero(~np.isfinite(numbers[codes]))
            if len(wrong):
                i = int(wrong[0])
                raise ValueError(f"{place(i)}: {show(names[codes[i]])} is not a number, as the training rows have")
            shown = (numbers[codes, None] - self.mean) / self.std
        else:
            number = {name: i for i, name in enumerate(self.categories)}
            found = np.array([*(number.get(name, -1) for name in names), -1])[codes]
            shown = found[:, None] == np.arange(len(self.categories))
        return np.hstack([shown, missing[:, None]] if self.gaps else [shown]).astype(np.float32)

    def unknown(self, names: Sequence[str], codes: Codes) -> int:
        """Rows with a category that training does not have."""
        if self.categories is None:
            return 0
        new = np.array([*(name not in self.categories for name in names), False])
        return int(new[codes].sum())


def encode(encoder: NameEncoder, cells: Cells, place: Place, gaps: bool) -> Codes:
    """The codes of a column's cells. Raises MissingValueError for an empty one, unless `gaps`."""
    cells = cells.tolist() if isinstance(cells, np.ndarray) else cells
    if not gaps:
        empty = [i for i, cell in enumerate(cells) if is_empty(cell) or (isinstance(cell, str) and is_nan(cell))]
        if empty:
            raise MissingValueError(f"{place(empty[0])}: the cell is empty; a static feature has a value in every row")
        return encoder.encode(cells, place)
    return encoder.encode([None if is_missing(cell) else cell for cell in cells], place, gaps=True)


def is_nan(text: str) -> bool:
    return text.strip().lower() == "nan"


def learn(name: str, names: Sequence[str], codes: Codes, gaps: bool, notes: list[str]) -> StaticColumn:
    """The column by the training rows: numbers, where all its values are. Raises ValueError for what is neither numbers
    nor some categories."""
    present = codes[codes != IGNORED]
    known = [names[code] for code in np.unique(present).tolist()]
    if not known:
        raise ValueError(f"static column {name!r} has no value in any training row; leave it out")
    numbers = np.array([_number(each) for each in names])
    if np.isfinite([_number(each) for each in known]).all():
        mean, std = float(numbers[present].mean()), float(numbers[present].std())
        constant = len(np.unique(numbers[present])) == 1  # however it is written
        if constant:
            notes.append(f"static column {name!r} is {known[0]} in every training row that has it")
        return StaticColumn(name, gaps, mean, 1.0 if constant else std)
    if len(known) > MAX_CATEGORIES:
        raise ValueError(
            f"static column {name!r} has {len(known):,} different texts in the training rows, more than "
            f"{MAX_CATEGORIES} categories; leave it out, or write numbers"
        )
    texts = [each for each in sort_labels(known) if not np.isfinite(_number(each))]
    if len(texts) < len(known):
        notes.append(
            f"static column {name!r} holds texts ({show(texts[0])}) beside numbers, so each of its {len(known)} values "
            "is a category"
        )
    return StaticColumn(name, gaps, categories=tuple(sort_labels(known)))


def in_column(row: Place, name: str) -> Place:
    """Where the cell of this column stands in the i-th row."""
    return lambda i: f"{row(i)}, column {name}"


def stacked(columns: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """(n, F)"""
    return np.ascontiguousarray(np.hstack(list(columns)))


def feature_names(columns: Iterable[StaticColumn]) -> list[str]:
    """(F,) What each feature is called."""
    names = []
    for column in columns:
        names += [column.name] if column.categories is None else [f"{column.name}={each}" for each in column.categories]
        names += [f"{column.name} missing"] * column.gaps
    return names


def _number(name: str) -> float:
    """NaN of what is no number."""
    try:
        return parse_number(name, "")
    except ValueError:
        return float("nan")
