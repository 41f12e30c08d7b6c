"""Rows in memory, as arrays, lists or texts, as a split without labels."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spt.errors import DataError
from spt.tasks.base import MAX_CODE, Split, Tokens, Values
from spt.tasks.own.parsing import NameEncoder
from spt.tasks.own.static import StaticColumn, encode, in_column, stacked

if TYPE_CHECKING:
    from spt.inference.trained_model import TrainedModel

LARGEST = 1e18  # float32 holds the square of what is below


def to_split(rows: Any, model: "TrainedModel", static: Any = None) -> Split:
    """Sequences, each (L,) tokens or (L, C) values, texts, or pairs of either; with what stands beside each, for a
    model that takes it. Raises DataError."""
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence | np.ndarray):
        raise DataError(f"rows are a list of sequences or an array of them, not a {type(rows).__name__}")
    if model.timed:
        raise DataError(
            "this model was trained with the times between steps, which plain sequences lack; give a Split with `steps`"
        )
    if not len(rows):
        raise DataError("there are no rows")
    if model.sequences == 1:
        values = [steps_of(row, model, f"row {i}") for i, row in enumerate(rows)]
        split = Split.from_rows(values, np.zeros(len(rows), np.int64)).unlabelled()
        return replace(split, static=static_features(static, model, len(rows)))
    pairs = []
    for i, row in enumerate(rows):
        single = isinstance(row, str | bytes) or not hasattr(row, "__len__") or getattr(row, "ndim", 1) == 0
        if single or len(row) != 2:
            raise DataError(f"row {i}: this model answers pairs of sequences; give two of them")
        pairs.append((steps_of(row[0], model, f"row {i}, first"), steps_of(row[1], model, f"row {i}, second")))
    return Split.from_pairs(pairs, np.zeros(len(rows), np.int64)).unlabelled()


def static_features(static: Any, model: "TrainedModel", n: int) -> NDArray[np.float32] | None:
    """(n, F) From the cells of a table: a data frame, a dict of columns, or a list of rows. Raises DataError."""
    columns = [StaticColumn.of(values) for values in model.reading.get("static", ())]
    if not model.input.static:
        if static is not None:
            raise DataError("this model was trained without static features; leave static out")
        return None
    if not columns:
        raise DataError("this model takes static features; give a Split with `static`")
    names = [column.name for column in columns]
    if static is None:
        raise DataError(f"this model takes static features, which are missing: static=… with {', '.join(names)}")
    try:
        by_name = hasattr(static, "columns") or isinstance(static, Mapping)
        cells = (
            {name: list(static[name]) for name in names}
            if by_name
            else dict(zip(names, zip(*static, strict=True), strict=True))
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(f"static: each row has {len(names)} cells, {', '.join(names)}") from None
    shown = []
    for column in columns:
        if len(cells[column.name]) != n:
            raise DataError(f"static: {len(cells[column.name])} rows, but there are {n} sequences")
        encoder, place = NameEncoder(), in_column(lambda i: f"static, row {i}", column.name)
        try:
            codes = encode(encoder, list(map(_plain, cells[column.name])), place, column.gaps)
            shown.append(column.features(encoder.names, codes, place))
        except ValueError as error:
            raise DataError(str(error)) from None
    return stacked(shown)


def _plain(cell: Any) -> Any:
    """A number of NumPy's as Python's; what pandas has for a missing one, as none."""
    if type(cell).__name__ in ("NAType", "NaTType"):
        return None
    return cell.item() if isinstance(cell, np.generic) else cell


def steps_of(row: Any, model: "TrainedModel", place: str) -> NDArray[Any]:
    """(L,) tokens or (L, C) values of a sequence as they are stored. Raises DataError."""
    if isinstance(row, str):
        steps = _tokens_of(row, model, place)
    else:
        try:
            steps = np.asarray(row)
        except ValueError:  # steps of different widths
            steps = np.empty(0, object)
    if steps.dtype.kind not in "iufb":
        raise DataError(f"{place}: numbers are expected, in steps that are alike")
    if not len(steps.shape) or not len(steps):
        raise DataError(f"{place}: the sequence has no steps")
    if isinstance(model.input, Tokens):
        return _tokens(steps, model.input, place)
    return _values(steps, model.input, model.channels_read, place)


def _values(steps: NDArray[Any], input: Values, channels: int, place: str) -> NDArray[Any]:
    steps = steps[:, None] if steps.ndim == 1 and channels == 1 else steps
    if steps.ndim != 2 or steps.shape[1] != channels:
        raise DataError(f"{place}: it has the shape {steps.shape}; expected are steps of {channels} numbers")
    gaps = np.isnan(steps)
    if not ((np.abs(steps) < LARGEST) | (gaps if input.missing else False)).all():  # NaN is not either
        why = "; the model was trained without missing values" if gaps.any() and not input.missing else ""
        raise DataError(f"{place}: it holds a number that is not finite, or not below 1e18{why}")
    if input.levels is None:
        return steps.astype(np.float32)
    if not ((steps >= 0) & (steps < input.levels) & (steps == steps.astype(np.int64))).all():
        raise DataError(f"{place}: whole numbers from 0 to {input.levels - 1} are expected")
    return steps.astype(np.int64)


def _tokens(steps: NDArray[Any], input: Tokens, place: str) -> NDArray[np.int64]:
    if steps.ndim != 1:
        raise DataError(f"{place}: it has the shape {steps.shape}; expected is one token a step")
    most = input.vocab if input.codes is None else MAX_CODE + 1
    if not ((steps >= 0) & (steps < most)).all() or not (steps == steps.astype(np.int64)).all():
        what = "tokens" if input.codes is None else "codes"
        raise DataError(f"{place}: {what} are whole numbers from 0 to {most - 1:,}")
    return steps.astype(np.int64)


def _tokens_of(text: str, model: "TrainedModel", place: str) -> NDArray[np.int64]:
    """The stored form of a text: codes of its characters or words, or its bytes."""
    if model.task.get("name") != "custom" or model.task.get("text_column") is None:
        raise DataError(f"{place}: this model was not trained on texts; give its tokens as numbers")
    kind = model.task.get("tokens") or "characters"
    if kind == "bytes":
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64)
    if kind == "characters":
        return np.array([*map(ord, text)], np.int64)
    assert isinstance(model.input, Tokens) and model.input.codes is not None
    codes = {word: code for word, code in zip(model.words, model.input.codes, strict=True) if code >= 0}
    return np.array([codes.get(word, MAX_CODE) for word in re.findall(r"\w+|[^\w\s]", text)], np.int64)
