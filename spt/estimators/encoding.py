"""How rows become the network's steps: values, token ids, characters, words or bytes. Learned from training rows."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from spt.estimators.inputs import Rows, StaticCells
from spt.tasks.base import Split, Tokens, Values
from spt.tasks.own.parsing import parse_token_ids, same_nan
from spt.tasks.own.static import StaticColumn, learn, stacked
from spt.tasks.own.transforms import TransformOptions, transform_rows

Steps = Literal["values", "ids", "characters", "words", "bytes"]
OF_TEXTS = ("characters", "words", "bytes")
WORD = r"\w+|[^\w\s]"  # as of task custom


@dataclass(frozen=True)
class Encoding:
    """What the training rows determine about how rows are shown, besides the network's own Tokens or Values."""

    steps: Steps
    channels: int = 1
    words: tuple[str, ...] = ()  # of tokens 1, 2, …; token 0 is any other word
    length: int | None = None  # longer sequences are cut after so many steps
    gaps: bool = False  # may values be missing?
    static: tuple[StaticColumn, ...] = ()  # what stands beside a sequence
    transforms: dict[str, Any] = field(default_factory=dict)  # options: windows, patches, …

    @staticmethod
    def learn(
        rows: Rows,
        tokens: str | None,
        max_length: int | None,
        gaps: bool = False,
        transforms: dict[str, Any] | None = None,
    ) -> "Encoding":
        """Learn from these training rows; `transforms` has the form of the task's options. Raises ValueError if
        `tokens` does not fit the rows."""
        transforms = transforms or {}
        known = OF_TEXTS if rows.kind == "texts" else ("ids",)
        if tokens is not None and tokens not in known:
            what = "texts" if rows.kind == "texts" else "numbers"
            raise ValueError(f"tokens={tokens!r} is not for X that holds {what}; choose None or {' or '.join(known)}")
        if tokens == "ids" and rows.channels > 1:
            raise ValueError(f"tokens='ids' is one token a step, but X has {rows.channels} channels")
        steps = cast(Steps, tokens or ("characters" if rows.kind == "texts" else "values"))
        if steps != "values" and (names := TransformOptions.model_validate(transforms).of_values):
            raise ValueError(f"{names[0]} is for values, but X holds {'texts' if rows.kind == 'texts' else 'tokens'}")
        words: list[str] = []
        if steps == "words":
            counts = Counter(word for text in rows.values for word in re.findall(WORD, text))
            words = sorted(counts, key=lambda word: (-counts[word], word))
        static = tuple(learn(cells.name, cells.names, cells.codes, gaps, []) for cells in rows.static)
        gaps = gaps and steps == "values"
        return Encoding(steps, rows.channels, tuple(words), max_length, gaps, static, transforms)

    def split(self, rows: Rows, targets: NDArray[Any] | None = None, ids: NDArray[Any] | None = None) -> Split:
        """The rows, encoded. Raises ValueError if they are of another kind than those that this was learned from."""
        if (rows.kind == "texts") != (self.steps in OF_TEXTS):
            here, there = ("texts", "numbers") if rows.kind == "texts" else ("numbers", "texts")
            raise ValueError(f"X holds {here}, but the estimator was fitted on {there}")
        if rows.channels != self.channels:
            raise ValueError(f"X has {rows.channels} channels, but the estimator was fitted on {self.channels}")
        split = Split.from_rows(self._encode(rows), np.empty(0) if targets is None else targets, ids)
        if self.static:
            split = replace(split, static=stacked(map(_features, self.static, rows.static)))
        split = split.unlabelled() if targets is None else split
        if not self.transforms:
            return split
        options = TransformOptions.model_validate(self.transforms)
        changed = transform_rows(options, split, max_length=self.length)
        return changed if changed.contiguous else changed.trimmed()

    def _encode(self, rows: Rows) -> Any:
        """An array (n, L[, C]) or a list of arrays, cut to the length unless they are to be transformed."""
        length = None if self.transforms else self.length
        if rows.kind == "array" and self.steps == "values":
            return same_nan(rows.values.reshape(len(rows), -1, self.channels).astype(np.float32)[:, :length])
        return [self._row(rows[i], f"X, row {i}")[:length] for i in range(len(rows))]

    def _row(self, row: Any, place: str) -> NDArray[Any]:
        if self.steps == "values":
            return same_nan(row.reshape(-1, self.channels).astype(np.float32))
        if self.steps == "ids":
            return parse_token_ids(row.reshape(-1), place)
        steps = self._text(row, place)
        if not len(steps):
            raise ValueError(f"{place}: the text {row[:20]!r} has no {self.steps}; leave the row out")
        return steps

    def _text(self, text: str, place: str) -> NDArray[Any]:
        if self.steps == "words":
            return np.array([self._numbers.get(word, 0) for word in re.findall(WORD, text)], np.int32)
        try:
            data = text.encode("utf-32-le" if self.steps == "characters" else "utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{place}: the text holds half of a surrogate pair, which is no character") from None
        return np.frombuffer(data, np.int32 if self.steps == "characters" else np.uint8)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words, 1)}

    def input(self, train: Split) -> Tokens | Values:
        """What the network is told about its inputs, from the encoded training rows. What these do not hold is one
        unknown token."""
        static = sum(column.width for column in self.static)
        if self.steps == "values":
            return replace(self._values(train), static=static)
        if self.steps == "bytes":
            return Tokens(256, static=static)
        if self.steps == "words":
            return Tokens(1 + len(self.words), static=static)
        counts = train.counts()
        order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0, static=static)

    def _values(self, train: Split) -> Values:
        """By the values that are there."""
        values = train.values
        low, high = (np.fmin, np.fmax) if self.gaps else (np.minimum, np.maximum)
        least, most = low.reduce(values, axis=0), high.reduce(values, axis=0)
        if np.isnan(least).any():
            raise ValueError(
                f"X: channel {int(np.isnan(least).argmax())} has no value in any training row; leave it out"
            )
        average, deviation = (np.nanmean, np.nanstd) if self.gaps else (np.mean, np.std)
        mean = np.asarray(average(values, axis=0, dtype=np.float64))
        std = np.asarray(deviation(values, axis=0, dtype=np.float64))
        return Values(values.shape[1], tuple(mean), tuple(np.where(least == most, 1.0, std)), missing=self.gaps)


def _features(column: StaticColumn, cells: StaticCells) -> NDArray[np.float32]:
    return column.features(cells.names, cells.codes, lambda i: f"X, row {i}, column {column.name}")
