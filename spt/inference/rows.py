"""Rows in memory, as arrays, lists or texts, as a split without labels."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spt.errors import DataError
from spt.tasks.base import MAX_CODE, Split, Tokens, Values

if TYPE_CHECKING:
    from spt.inference.trained_model import TrainedModel

LARGEST = 1e18  # float32 holds the square of what is below


def to_split(rows: Any, model: "TrainedModel") -> Split:
    """Sequences, each (L,) tokens or (L, C) values, texts, or pairs of either. Raises DataError."""
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
        return Split.from_rows(values, np.zeros(len(rows), np.int64)).unlabelled()
    pairs = []
    for i, row in enumerate(rows):
        if isinstance(row, str) or len(row) != 2:
            raise DataError(f"row {i}: this model answers pairs of sequences; give two of them")
        pairs.append((steps_of(row[0], model, f"row {i}, first"), steps_of(row[1], model, f"row {i}, second")))
    return Split.from_pairs(pairs, np.zeros(len(rows), np.int64)).unlabelled()


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
    return _tokens(steps, model.input, place) if isinstance(model.input, Tokens) else _values(steps, model.input, place)


def _values(steps: NDArray[Any], input: Values, place: str) -> NDArray[Any]:
    steps = steps[:, None] if steps.ndim == 1 and input.channels == 1 else steps
    if steps.ndim != 2 or steps.shape[1] != input.channels:
        raise DataError(f"{place}: it has the shape {steps.shape}; expected are steps of {input.channels} numbers")
    if not (np.abs(steps) < LARGEST).all():  # NaN is not either
        raise DataError(f"{place}: it holds a number that is not finite, or not below 1e18")
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
