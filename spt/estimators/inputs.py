"""What users pass as X, turned into rows: arrays, lists of arrays, data frames and texts.

Complaints are ValueErrors, in scikit-learn's words where it has any. Letters: n rows, L steps, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_array

from spt.tasks.own.parsing import HUGE, NameEncoder, is_small_or_nan
from spt.tasks.own.static import Codes, encode, in_column

Kind = Literal["array", "sequences", "texts"]


@dataclass(frozen=True)
class StaticCells:
    """A column beside the sequences: the name of each cell, by codes."""

    name: str
    names: tuple[str, ...]
    codes: Codes

    def take(self, places: NDArray[np.int64]) -> "StaticCells":
        return replace(self, codes=self.codes[places])


@dataclass(frozen=True)
class Rows:
    """n rows as they were passed, checked: an array (n, L) or (n, L, C), arrays (L,) or (L, C), or texts."""

    kind: Kind
    values: Any  # an array, a list of arrays, or a list of str
    columns: bool = False  # has X columns, or features, that predictions must have too?
    static: tuple[StaticCells, ...] = ()  # columns that stand beside the sequences

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        return self.values[i]

    def take(self, places: NDArray[np.int64]) -> "Rows":
        values = self.values[places] if self.kind == "array" else [self.values[i] for i in places.tolist()]
        return Rows(self.kind, values, self.columns, tuple(cells.take(places) for cells in self.static))

    @property
    def channels(self) -> int:
        """Of numbers; of texts 1."""
        first = self.values[0]
        return first.shape[1] if self.kind != "texts" and first.ndim == 2 else 1

    def identity(self, i: int) -> bytes:
        """Equal for rows of the same input."""
        row = self.values[i]
        return row.encode("utf-8", "surrogatepass") if isinstance(row, str) else np.ascontiguousarray(row).tobytes()


def read_rows(X: Any, owner: Any, *, gaps: bool = False, static: Sequence[str] = ()) -> Rows:
    """The rows of X; with `gaps`, NaN stands for a missing value; `static` are the columns of a frame that stand beside
    the sequences. Raises ValueError (TypeError where scikit-learn does) for what has no sequences."""
    if static:
        return _beside(X, owner, gaps, static)
    if hasattr(X, "columns") and hasattr(X, "iloc"):
        return _from_frame(X, owner, gaps)
    if hasattr(X, "iloc"):  # a series: of texts or arrays
        X = list(X)
    if isinstance(X, np.ndarray) and X.ndim == 1 and X.dtype.kind in "OUT":
        X = X.tolist() if X.dtype.kind != "O" else list(X)
    if isinstance(X, list | tuple):
        return _from_list(list(X), owner, gaps)
    return _from_array(X, owner, gaps)


def _beside(X: Any, owner: Any, gaps: bool, static: Sequence[str]) -> Rows:
    """A frame without its static columns, and these."""
    if not (hasattr(X, "columns") and hasattr(X, "iloc")):
        raise ValueError(f"static_columns={list(static)}: X is no data frame, whose columns these are")
    for name in static:
        if list(X.columns).count(name) != 1:
            raise ValueError(f"static_columns: X has {list(X.columns).count(name) or 'no'} columns named {name!r}")
    names = [name for name in X.columns if name not in static]
    if not names:
        raise ValueError("X has static columns alone; a sequence is needed beside them")
    rows = _from_frame(X[names], owner, gaps)
    cells = []
    for name in static:
        encoder = NameEncoder()
        values = [cell.item() if isinstance(cell, np.generic) else cell for cell in X[name]]
        codes = encode(encoder, values, in_column(lambda i: f"X, row {i}", name), gaps)
        cells.append(StaticCells(name, tuple(encoder.names), codes))
    return replace(rows, columns=True, static=tuple(cells))


def _from_array(X: Any, owner: Any, gaps: bool) -> Rows:
    finite = "allow-nan" if gaps else True
    array = check_array(X, allow_nd=True, input_name="X", estimator=owner, ensure_all_finite=finite)
    if array.ndim > 3:
        raise ValueError(f"X has {array.ndim} dimensions; (n, L) or (n, L, C) is expected: rows, steps, channels")
    if 0 in array.shape:
        raise ValueError(f"X has the shape {array.shape}: there are no steps or no channels")
    _refuse_huge(array, "X")
    return Rows("array", array, columns=True)


def _from_list(items: list[Any], owner: Any, gaps: bool) -> Rows:
    """A list of texts, of sequences, or of rows that are plain lists of equally many numbers."""
    texts = [isinstance(item, str) for item in items]
    if items and all(texts):
        return Rows("texts", [str(item) for item in items])
    if any(texts):
        i = texts.index(not texts[0])
        raise ValueError(f"X mixes texts with other things: row {i} is of type {type(items[i]).__name__}")
    ragged = any(isinstance(item, np.ndarray) and item.ndim for item in items)
    if not ragged:
        lengths = {len(item) for item in items if hasattr(item, "__len__")}
        ragged = len(lengths) > 1 or any(hasattr(item, "iloc") for item in items)
    if not ragged:
        return _from_array(items, owner, gaps)
    return Rows("sequences", _same_channels([_sequence(item, f"row {i}", gaps) for i, item in enumerate(items)]))


def _from_frame(X: Any, owner: Any, gaps: bool) -> Rows:
    """Numeric columns: a row's steps. Columns of arrays: its channels. One column of texts: a text a row."""
    cells = [list(X[name]) for name in X.columns] if X.columns.is_unique else []
    nested = [bool(column) and all(_is_nested(cell) for cell in column) for column in cells]
    if cells and len(X) and all(nested):
        return Rows("sequences", _stacked(cells, [str(name) for name in X.columns], gaps), columns=True)
    if any(nested):
        name = X.columns[nested.index(False)]
        raise ValueError(f"X has columns of sequences, but column {name!r} holds other things; leave it out")
    if len(cells) == 1 and cells[0] and all(isinstance(cell, str) for cell in cells[0]):
        return Rows("texts", [str(cell) for cell in cells[0]], columns=True)
    return _from_array(X, owner, gaps)


def _is_nested(cell: Any) -> bool:
    return isinstance(cell, list | tuple) or (isinstance(cell, np.ndarray) and cell.ndim > 0) or hasattr(cell, "iloc")


def _stacked(columns: list[list[Any]], names: list[str], gaps: bool) -> list[NDArray[Any]]:
    """Of every row, the sequences of its columns as channels, which are equally long."""
    rows = []
    for i, cells in enumerate(zip(*columns, strict=True)):
        parts = [_sequence(cell, f"row {i}, column {name}", gaps) for name, cell in zip(names, cells, strict=True)]
        if len(parts) == 1:
            rows.append(parts[0])
            continue
        for name, part in zip(names, parts, strict=True):
            if part.ndim != 1 or len(part) != len(parts[0]):
                raise ValueError(
                    f"row {i}: column {name} has the shape {part.shape}, column {names[0]} {parts[0].shape}; columns "
                    "that are channels hold one number a step, for equally many steps"
                )
        rows.append(np.stack(parts, axis=1))
    return _same_channels(rows)


def _sequence(item: Any, place: str, gaps: bool) -> NDArray[Any]:
    """(L,) or (L, C) numbers."""
    try:
        row = np.asarray(item)
        if row.dtype.kind == "O":
            row = row.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"X, {place}: not a sequence of numbers ({error})") from error
    if row.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: X, {place}")
    if row.dtype.kind not in "biuf":
        raise ValueError(f"X, {place}: {row.dtype} where numbers are expected")
    if row.ndim not in (1, 2) or 0 in row.shape:
        raise ValueError(f"X, {place}: the shape is {row.shape}; a sequence is (L,) or (L, C) with at least one step")
    if row.dtype.kind == "f" and not (np.isfinite(row) | (np.isnan(row) & gaps)).all():
        what = "NaN" if np.isnan(row).any() and not gaps else "infinity"
        raise ValueError(f"Input X contains {what}: {place}")
    _refuse_huge(row, f"X, {place}")
    return row


def _same_channels(rows: list[NDArray[Any]]) -> list[NDArray[Any]]:
    shapes = [row.shape[1:] for row in rows]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            here, first = (f"{s[0]} channels" if s else "one number a step" for s in (shape, shapes[0]))
            raise ValueError(f"X: row {i} has {here}, row 0 {first}; all sequences have the same channels")
    return rows


def _refuse_huge(array: NDArray[Any], place: str) -> None:
    if not is_small_or_nan(array):
        raise ValueError(f"{place}: a number is too large; below {HUGE:g} is expected")
