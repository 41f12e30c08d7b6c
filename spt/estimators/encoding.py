"""How rows become the network's steps: values, token ids, characters, words or bytes. Learned from training rows."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from spt.estimators.inputs import Rows
from spt.tasks.base import Split, Tokens, Values
from spt.tasks.own.parsing import parse_token_ids

Steps = Literal["values", "ids", "characters", "words", "bytes"]
OF_TEXTS = ("characters", "words", "bytes")
WORD = r"\w+|[^\w\s]"  # as of task custom


@dataclass(frozen=True)
class Encoding:
    """What the training rows decide of how rows are shown, but for the network's own Tokens or Values."""

    steps: Steps
    channels: int = 1
    words: tuple[str, ...] = ()  # of tokens 1, 2, …; token 0 is any other word
    length: int | None = None  # longer sequences are cut after so many steps

    @staticmethod
    def learn(rows: Rows, tokens: str | None, max_length: int | None) -> "Encoding":
        """Of these training rows. Raises ValueError where `tokens` does not fit them."""
        known = OF_TEXTS if rows.kind == "texts" else ("ids",)
        if tokens is not None and tokens not in known:
            what = "texts" if rows.kind == "texts" else "numbers"
            raise ValueError(f"tokens={tokens!r} is not for X that holds {what}; choose None or {' or '.join(known)}")
        if tokens == "ids" and rows.channels > 1:
            raise ValueError(f"tokens='ids' is one token a step, but X has {rows.channels} channels")
        steps = cast(Steps, tokens or ("characters" if rows.kind == "texts" else "values"))
        words: list[str] = []
        if steps == "words":
            counts = Counter(word for text in rows.values for word in re.findall(WORD, text))
            words = sorted(counts, key=lambda word: (-counts[word], word))
        return Encoding(steps, rows.channels, tuple(words), max_length)

    def split(self, rows: Rows, targets: NDArray[Any] | None = None, ids: NDArray[Any] | None = None) -> Split:
        """The rows, encoded. Raises ValueError for rows of another kind than those that this was learned from."""
        if (rows.kind == "texts") != (self.steps in OF_TEXTS):
            here, there = ("texts", "numbers") if rows.kind == "texts" else ("numbers", "texts")
            raise ValueError(f"X holds {here}, but the estimator was fitted on {there}")
        if rows.channels != self.channels:
            raise ValueError(f"X has {rows.channels} channels, but the estimator was fitted on {self.channels}")
        split = Split.from_rows(self._encode(rows), np.empty(0) if targets is None else targets, ids)
        return split.unlabelled() if targets is None else split

    def _encode(self, rows: Rows) -> Any:
        """An array (n, L[, C]) or a list of arrays, cut to the length."""
        if rows.kind == "array" and self.steps == "values":
            return rows.values.reshape(len(rows), -1, self.channels).astype(np.float32)[:, : self.length]
        return [self._row(rows[i], f"X, row {i}")[: self.length] for i in range(len(rows))]

    def _row(self, row: Any, place: str) -> NDArray[Any]:
        if self.steps == "values":
            return row.reshape(-1, self.channels).astype(np.float32)
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
        """What the network is told of its inputs, by the encoded training rows. What these do not hold is one unknown
        token."""
        if self.steps == "values":
            constant = train.values.min(axis=0) == train.values.max(axis=0)
            mean, std = train.values.mean(axis=0, dtype=np.float64), train.values.std(axis=0, dtype=np.float64)
            return Values(self.channels, tuple(mean), tuple(np.where(constant, 1.0, std)))
        if self.steps == "bytes":
            return Tokens(256)
        if self.steps == "words":
            return Tokens(1 + len(self.words))
        counts = train.counts()
        order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0)
