"""What a task is: arrays for three splits and what they mean. No torch here, no masking, no batching.

A task file holds `class Config(TaskConfig)` and `load(config, raw) -> TaskData`; its first docstring line is shown by
`spt list tasks`. Everything else (caching, subsets, fingerprints, padding, objectives) is written once, elsewhere.

Optional hooks of a task file: `sources(config, raw)` names the files it reads, so that edited ones are read again;
`fetch(config, raw)` downloads them, for `spt data prepare` alone; `hub(config)` names a copy on the Hugging Face
hub; `vocabulary(config, train)` makes the Tokens of the training rows in use, perhaps a subset, where the stored values
are codes; `prepared(config)` names a folder that already holds the prepared splits. For generated tasks:
`INDEXABLE = True` says that a row is determined by its number alone, so that `load` makes config.max_rows rows of each
split and no more; `resample(config, ids, epoch)` makes the training rows of a later epoch, so that no row is shown
twice (unless config.resample_each_epoch is false).

Letters: n examples in a split, L steps of a sequence, C channels, K target values.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from spt.tasks.parallel import PageRelease, allocate, release


class TaskConfig(BaseModel):
    """Options of every task. They select among a task's rows, so `load` can ignore them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    subset_fraction: float = Field(1.0, gt=0, le=1, description="share of the training split in use, in both stages")
    subset_rows: int | None = Field(
        None,
        ge=1,
        description="number of rows of the training split in use, in both stages, or of recordings where rows are "
        "windows of them; instead of a fraction",
    )
    subset_vocabulary: Literal["subset", "whole"] = Field(
        "subset",
        description="where training rows determine the vocabulary: those in use, or the whole split, as for a network "
        "that was pretrained on all inputs",
    )
    subset_seed: int = Field(
        42, ge=0, description="seed of the permutation of the training split of which a subset is a prefix"
    )
    stratified: bool = Field(False, description="a subset has the class proportions of the whole split")
    max_rows: int | None = Field(None, ge=1, description="at most this many rows of every split (smoke runs)")

    @model_validator(mode="after")
    def _one_subset(self) -> "TaskConfig":
        if self.subset_rows is not None and self.subset_fraction != 1:
            raise ValueError("subset_fraction and subset_rows are both given; keep one")
        return self

    def smoke_sizes(self) -> dict[str, int]:
        """Options that keep the sequences of a smoke run short: each gets its number or, where other options forbid
        that, the next one they allow. An option that is already smaller stays."""
        return {}


WHOLE: dict[str, Any] = {"subset_fraction": 1.0, "subset_rows": None}  # options that leave the training split whole

NUMBERS = 2**22  # worked on at once
MAX_CODE = 2**24  # a table of 64 MiB
IGNORED = -1  # the class of a step, or sequence, that is not scored; a real target is NaN there


@dataclass(frozen=True)
class Tokens:
    """One integer in [0, vocab) a step.

    With `codes`, a step is stored as a code that does not depend on the vocabulary, such as a character's code point:
    codes[t] is what token t stands for, -1 for a token that stands for none (padding), and any other code is the token
    `unknown`. `static` is how many numbers accompany a sequence (Split.static).
    """

    vocab: int
    codes: tuple[int, ...] | None = field(default=None, repr=False)
    unknown: int | None = field(default=None, repr=False)
    static: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        _whole(self, "vocab")
        _check(self.vocab >= 2, f"Tokens.vocab is {self.vocab}; a vocabulary has at least 2 entries")
        if self.codes is None or self.unknown is None:
            alone = self.codes is not None or self.unknown is not None
            _check(not alone, "Tokens.codes and Tokens.unknown go together; one is missing")
            return
        object.__setattr__(self, "codes", tuple(operator.index(code) for code in self.codes))
        _whole(self, "unknown")
        meant = [code for code in self.codes if code != -1]
        _check(len(self.codes) == self.vocab, f"Tokens.codes has {len(self.codes)} entries for {self.vocab} tokens")
        _check(len(set(meant)) == len(meant), "Tokens.codes has a code twice; a code stands for one token")
        _check(
            all(0 <= code < MAX_CODE for code in meant),
            f"Tokens.codes has entries outside [0, {MAX_CODE:,}), and not -1",
        )
        _check(0 <= self.unknown < self.vocab, f"Tokens.unknown is {self.unknown}, which is no token of {self.vocab}")

    @cached_property
    def _table(self) -> NDArray[np.int32]:
        """Token of each code; the last entry is for all codes beyond."""
        assert self.codes is not None and self.unknown is not None
        table = np.full(max(self.codes) + 2, self.unknown, np.int32)
        for token, code in enumerate(self.codes):
            if code >= 0:
                table[code] = token
        return table

    def ids(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """The tokens of stored values, of the same shape."""
        if self.codes is None:
            return values.astype(np.int64)
        return self._table.take(values.astype(np.int64), mode="clip").astype(np.int64)


@dataclass(frozen=True)
class Values:
    """C numbers a step, shown to a model as (value - mean) / std.

    `levels` is the number of distinct values when they are integers in [0, levels) (256 for bytes); cross-entropy on
    continuous inputs needs it. `frame`: a step's channels are a picture, row by row, with this height and width.
    `missing`: values may be missing and are then stored as NaN; mean and deviation are those of the others. `static` is
    how many numbers accompany a sequence (Split.static).
    """

    channels: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    levels: int | None = None
    frame: tuple[int, int] | None = None
    missing: bool = field(default=False, repr=False)
    static: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        _whole(self, "channels")
        if self.levels is not None:
            _whole(self, "levels")
            _check(not self.missing, "Values.levels are of whole numbers, none of which can be missing")
        _check(self.channels >= 1, f"Values.channels is {self.channels}; at least one is needed")
        for name, numbers, neutral in (("mean", self.mean, 0.0), ("std", self.std, 1.0)):
            numbers = numbers or (neutral,) * self.channels
            object.__setattr__(self, name, tuple(float(number) for number in numbers))
            _check(
                len(numbers) == self.channels, f"Values.{name} has {len(numbers)} entries for {self.channels} channels"
            )
        _check(all(np.isfinite(m) for m in self.mean), f"Values.mean is {self.mean}; every entry must be finite")
        _check(
            all(s > 0 and np.isfinite(s) for s in self.std), f"Values.std is {self.std}; every entry must be positive"
        )
        if self.frame is not None:
            sides = tuple(operator.index(side) for side in self.frame)
            object.__setattr__(self, "frame", sides)
            fits = len(sides) == 2 and min(sides) > 0 and math.prod(sides) == self.channels
            _check(fits, f"Values.frame is {sides}, but a step has {self.channels} channels")


@dataclass(frozen=True)
class Classes:
    """One of `count` classes; of every step, with IGNORED where it is not scored, or of the sequence.

    With `missing`, a sequence may have no class either; it is then IGNORED.
    """

    count: int
    per_step: bool = False
    missing: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        _whole(self, "count")
        _check(self.count >= 2, f"Classes.count is {self.count}; a classification has at least 2 classes")


@dataclass(frozen=True)
class Reals:
    """`size` real numbers; of every step, with NaN where it is not scored, or of the sequence.

    With `missing`, each of them may be missing, also for a sequence; it is then NaN.
    """

    size: int = 1
    per_step: bool = False
    missing: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        _whole(self, "size")
        _check(self.size >= 1, f"Reals.size is {self.size}; at least one target is needed")


@dataclass(frozen=True)
class Labels:
    """`count` labels, of which any number may hold: 1 where one does, 0 where not, IGNORED where unknown; of every
    step, or of the sequence."""

    count: int
    per_step: bool = False

    def __post_init__(self) -> None:
        _whole(self, "count")
        _check(self.count >= 1, f"Labels.count is {self.count}; at least one label is needed")

    @property
    def missing(self) -> bool:
        return True


Target = Classes | Reals | Labels


def describe(part: Tokens | Values | Target) -> dict[str, Any]:
    """Its kind and fields, for a JSON file, without optional fields that are not set."""
    fields = asdict(part)
    for name, default in (("codes", None), ("unknown", None), ("frame", None), ("per_step", False)):
        if name in fields and fields[name] is default:
            del fields[name]
    for name in ("missing", "static"):
        if not fields.get(name):
            fields.pop(name, None)
    return {"kind": type(part).__name__, **fields}


@dataclass(frozen=True)
class Split:
    """n examples in one long array; example i is values[starts[i]:stops[i]]. Arrays may be memory maps.

    An example is a sequence, or a pair of sequences one after the other. Per-step arrays (targets, times) have the
    length and order of `values`. Rows that are windows of one recording may share steps.
    """

    values: NDArray[Any]  # (total,) tokens (or codes) or (total, C) values, in storage type (uint8, int16, float32)
    starts: NDArray[np.int64]  # (n,)
    stops: NDArray[np.int64]  # (n,)
    targets: NDArray[Any] | None  # (n,) classes, (n, K) reals or labels, per step (total, …); None: taken away
    ids: NDArray[Any]  # (n,) the task's own name or number of each example
    fingerprints: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))  # (n,) of the inputs
    per_step: bool = False  # are the targets those of steps?
    cuts: NDArray[np.int64] | None = None  # (n,) steps of the first of a pair, in (0, length)
    steps: NDArray[np.float32] | None = None  # (total,) time since the previous step, where sampling is irregular
    text_bytes: NDArray[np.int64] | None = None  # (n,) language models: UTF-8 bytes that a row's targets stand for
    halves: NDArray[np.uint64] | None = None  # (n, 2) pairs: fingerprints of the two sequences
    answers: NDArray[np.uint64] | None = None  # (n,) fingerprints of a row's targets, where they are those of steps
    groups: NDArray[Any] | None = None  # (n,) names of what rows belong to, such as a patient, whose scores are told
    static: NDArray[np.float32] | None = None  # (n, F) numbers beside a sequence, as the network is shown them
    recordings: NDArray[np.int64] | None = None  # (n,) rows are windows whose answers are averaged: of which recording
    sources: NDArray[np.uint64] | None = None  # (n,) fingerprints of what the rows were made of, such as recordings

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) steps of each example, of both sequences of a pair."""
        return self.stops - self.starts

    @property
    def extents(self) -> NDArray[np.int64]:
        """(n,) steps of each example's longest sequence, which determine what a batch is padded to."""
        return self.lengths if self.cuts is None else np.maximum(self.cuts, self.lengths - self.cuts)

    @property
    def sequences(self) -> int:
        """Sequences of an example."""
        return 1 if self.cuts is None else 2

    @property
    def seen(self) -> NDArray[np.uint64]:
        """A fingerprint of every sequence: (n,), for pairs (2n,); for windows (2n,), of each and of its recording."""
        if self.sources is not None:
            return np.stack([self.fingerprints, self.sources], axis=1).reshape(-1)
        return self.fingerprints if self.halves is None else self.halves.reshape(-1)

    @property
    def contiguous(self) -> bool:
        """Whether the rows follow each other without a gap, from the first value to the last."""
        ends = np.concatenate([np.zeros(1, np.int64), self.stops])
        return bool((ends[:-1] == self.starts).all()) and int(ends[-1]) == len(self.values)

    @property
    def spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the values that rows cover begin and end, in order; each value lies in one span."""
        order = np.argsort(self.starts, kind="stable")
        starts, ends = self.starts[order], np.maximum.accumulate(self.stops[order])
        first = np.flatnonzero(np.concatenate([np.ones(min(1, len(starts)), bool), starts[1:] > ends[:-1]]))
        return starts[first], ends[np.append(first[1:], len(ends))[: len(first)] - 1]

    @property
    def shares_steps(self) -> bool:
        """Whether a step lies in several rows."""
        starts, stops = self.spans
        return int(self.lengths.sum()) > int((stops - starts).sum())

    @property
    def whole(self) -> "Split":
        """What is scored: the rows, or, for windows whose answers are averaged, each recording's first, by its id."""
        if self.recordings is None:
            return self
        _, first = np.unique(self.recordings, return_index=True)
        rows = replace(self.take(first), recordings=None)
        return replace(rows, ids=np.array([str(name).rpartition("@")[0] for name in rows.ids.tolist()]))

    def row(self, i: int) -> NDArray[Any]:
        return self.values[self.starts[i] : self.stops[i]]

    def counts(self) -> NDArray[np.int64]:
        """How often each token, code or level 0, 1, 2, … occurs in these rows."""
        total = np.zeros(0, np.int64)
        for piece in self.pieces():
            numbers = np.bincount(piece.reshape(-1))
            total = np.pad(total, (0, max(0, len(numbers) - len(total))))
            total[: len(numbers)] += numbers
        return total

    def pieces(self, steps: int = 2**20) -> Iterator[NDArray[Any]]:
        """The rows' values in order, in chunks of about this many steps, or fewer where channels are many; steps that
        windows of a recording share come once."""
        width = self.values.size // max(1, len(self.values))
        steps = max(1, min(steps, NUMBERS // max(1, width)))
        if self.contiguous:
            for i in range(0, len(self.values), steps):
                yield self.values[i : i + steps]
                release(self.values)
            return
        if self.sources is not None and self.shares_steps:
            for start, stop in zip(*self.spans, strict=True):
                yield from (self.values[i : min(i + steps, stop)] for i in range(start, stop, steps))
            return
        ends = np.cumsum(self.lengths)
        cuts = np.searchsorted(ends, np.arange(steps, int(ends.max(initial=0)), steps))
        for rows in np.split(np.arange(len(self)), np.unique(cuts)):
            if len(rows):
                yield np.concatenate([self.row(i) for i in rows.tolist()])
                release(self.values)

    def take(self, rows: NDArray[np.int64]) -> "Split":
        """These rows, in this order; the values and other per-step arrays are not copied."""

        names = {"starts", "stops", "targets", "ids", "fingerprints", "cuts", "text_bytes", "halves", "answers"}
        names |= {"groups", "static", "recordings", "sources"}
        arrays = {name: getattr(self, name) for name in names - ({"targets"} if self.per_step else set())}
        given = {name: array[rows] for name, array in arrays.items() if array is not None and len(array)}
        return replace(self, **given)

    def packed(self, *, in_place: bool = False) -> "Split":
        """The rows copied end to end. In place, where memory may not hold two copies, they have to be in order and
        overwrite the values."""
        stops = np.cumsum(self.lengths)
        return self._moved(self.starts, self.stops, stops - self.lengths, in_place)

    def trimmed(self, *, in_place: bool = False) -> "Split":
        """The rows without the values that none of them covers, copied as by `packed`; shared steps stay shared. Rows
        in order that share nothing are packed."""
        starts, stops = self.spans
        moves = starts - (np.cumsum(stops - starts) - (stops - starts))  # of each span, to the left
        places = self.starts - moves[np.searchsorted(starts, self.starts, side="right") - 1]
        return self._moved(starts, stops, places, in_place)

    def _moved(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64], in_place: bool
    ) -> "Split":
        """Copies of these pieces of the values, one behind the other; rows then begin at `places`."""
        ends = np.cumsum(stops - starts)

        def copied(array: NDArray[Any]) -> NDArray[Any]:
            joined = array if in_place else allocate((int(ends[-1]), *array.shape[1:]), array.dtype)
            passing = PageRelease(array, joined)
            for start, stop, end in zip(starts.tolist(), stops.tolist(), ends.tolist(), strict=True):
                joined[end - (stop - start) : end] = array[start:stop]
                passing.visit(start, stop)
            return joined[: ends[-1]]

        return replace(
            self,
            values=copied(self.values),
            starts=places,
            stops=places + self.lengths,
            targets=copied(self.targets) if self.per_step and self.targets is not None else self.targets,
            steps=None if self.steps is None else copied(self.steps),
        )

    def unlabelled(self) -> "Split":
        """The inputs alone, for pretraining, which no label can reach. A pair stays one example, of two sequences that
        are drawn together."""
        return replace(self, targets=None, per_step=False, text_bytes=None, answers=None)

    @staticmethod
    def joined(parts: Sequence["Split"]) -> "Split":
        """The rows of several splits, copied end to end. A field that one of the splits lacks is left out."""
        parts = [part if part.contiguous else part.packed() for part in parts]
        before = np.cumsum([0, *(len(part.values) for part in parts[:-1])])
        arrays: dict[str, Any] = {}
        for name in (each.name for each in fields(Split) if each.name != "per_step"):
            columns = [getattr(part, name) for part in parts]
            arrays[name] = None if any(column is None for column in columns) else np.concatenate(columns)
        for name in ("starts", "stops"):
            arrays[name] = np.concatenate([getattr(part, name) + at for part, at in zip(parts, before, strict=True)])
        if arrays["recordings"] is not None:  # numbered part by part
            ends = np.cumsum([0, *(part.recordings.max() + 1 for part in parts[:-1] if part.recordings is not None)])
            numbered = zip(parts, ends.tolist(), strict=True)
            arrays["recordings"] = np.concatenate([part.recordings + at for part, at in numbered])
        if not all(len(part.fingerprints) == len(part) for part in parts):
            del arrays["fingerprints"]
        return Split(**arrays, per_step=parts[0].per_step)

    @staticmethod
    def from_rows(
        rows: Iterable[Any],
        targets: Any,
        ids: Iterable[Any] | None = None,
        *,
        per_step: bool = False,
        steps: Any = None,
    ) -> "Split":
        """From sequences of any lengths: each (L,) tokens or (L, C) values; one array (n, L[, C]) is not copied.

        With per_step, `targets` are given like the rows: (L,) classes, (L, K) reals or labels for each; so are `steps`,
        (L,).
        """
        values, lengths = _joined(rows)
        if per_step:
            targets, others = _joined(targets)
            _check(np.array_equal(lengths, others), "targets of steps have other lengths than their rows")
        if steps is not None:
            steps, others = _joined(steps)
            _check(np.array_equal(lengths, others), "times of steps have other lengths than their rows")
            steps = steps.astype(np.float32)
        stops = np.cumsum(lengths)
        names = np.arange(len(lengths)) if ids is None else np.asarray(list(ids))
        return Split(values, stops - lengths, stops, np.asarray(targets), names, per_step=per_step, steps=steps)

    @staticmethod
    def from_pairs(pairs: Iterable[tuple[Any, Any]], targets: Any, ids: Iterable[Any] | None = None) -> "Split":
        """From pairs of sequences, each (L,) tokens or (L, C) values of any length."""
        parts = [np.asarray(part) for pair in pairs for part in pair]
        values, lengths = _joined(parts)
        stops, cuts = np.cumsum(lengths)[1::2], lengths[::2]
        starts = stops - cuts - lengths[1::2]
        names = np.arange(len(starts)) if ids is None else np.asarray(list(ids))
        return Split(values, starts, stops, np.asarray(targets), names, cuts=cuts)


def row_ids(split: str, rows: int | NDArray[np.int64]) -> NDArray[Any]:
    """train-0, train-1, …: for this number of rows, or for the rows with these numbers."""
    numbers = np.arange(rows) if isinstance(rows, int) else rows
    return np.char.add(f"{split}-", numbers.astype(str))


def _joined(rows: Iterable[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Sequences end to end, and their lengths; one array (n, L[, C]) is not copied."""
    if isinstance(rows, np.ndarray) and rows.ndim in (2, 3) and rows.size:
        n, length = rows.shape[:2]
        return rows.reshape(n * length, *rows.shape[2:]), np.full(n, length, np.int64)
    arrays = [np.asarray(row) for row in rows]
    _check(len(arrays) > 0, "a split has no rows")
    return np.concatenate(arrays), np.array([len(array) for array in arrays], np.int64)


@dataclass(frozen=True)
class TaskData:
    """A task's three splits. Validation is carved from training where a benchmark has none of its own."""

    input: Tokens | Values
    target: Target
    train: Split
    val: Split
    test: Split
    length: int = 0  # longest sequence of the whole task, in steps; a subset of its rows keeps it. 0: found out
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know of the data
    interval: float = 1.0  # time between steps, in a unit of the task's own, such as seconds
    future: bool = False  # targets are inputs of later steps, which a non-causal model would see
    resample: Callable[[NDArray[np.int64], int], Split] | None = None  # training rows by (ids, epoch), if none repeats
    row_width: int | None = None  # steps of a row of pixels, where a sequence is a picture read row by row
    classes: tuple[str, ...] = ()  # what each class or label is called, where the data say

    def __post_init__(self) -> None:
        if not self.length:
            longest = [int(split.extents.max()) for split in self.splits.values() if len(split)]
            object.__setattr__(self, "length", max(longest, default=0))

    @property
    def splits(self) -> dict[str, Split]:
        return {"train": self.train, "val": self.val, "test": self.test}

    def mapped(self, change: Callable[[Split], Split]) -> "TaskData":
        """The same task with a function applied to every split."""
        return replace(self, train=change(self.train), val=change(self.val), test=change(self.test))

    @property
    def class_names(self) -> tuple[str, ...]:
        """What each class or label is called; its number, where the data do not say."""
        count = 0 if isinstance(self.target, Reals) else self.target.count
        return self.classes or tuple(map(str, range(count)))

    def labelled(self) -> "TaskData":
        """The same task without rows that have no target, where it may have such rows."""
        if not self.target.missing or self.target.per_step:
            return self
        return self.mapped(lambda split: split if (kept := has_target(split)).all() else split.take(kept.nonzero()[0]))

    def chance(self) -> float | None:
        """Test accuracy of always answering the commonest class of the training split; None for other targets, and
        where there are no test rows."""
        if not isinstance(self.target, Classes) or self.train.targets is None or self.test.targets is None:
            return None
        if not len(self.test):
            return None
        train, test = (class_counts(split.whole, self.target.count) for split in (self.train, self.test))
        return float(test[train.argmax()] / test.sum())

    def check(self, *, tested: bool = True) -> None:
        """Raise ValueError unless the arrays are what `input` and `target` say; if not `tested`, there are no test
        rows."""
        for name, split in self.splits.items():
            if name == "test" and not tested:
                _check(len(split) == 0, "there are test rows, which nobody asked for")
                continue
            _check(len(split) > 0, f"the {name} split has no rows")
            inside = (split.starts >= 0).all() and (split.stops <= len(split.values)).all()
            _check(bool(inside), f"the {name} split has starts or stops outside its values")
            _check(bool((split.lengths > 0).all()), f"the {name} split has an empty sequence")
            if split.cuts is not None:
                halved = (split.cuts > 0).all() and (split.cuts < split.lengths).all()
                _check(bool(halved), f"the {name} split has a pair with an empty sequence")
            if split.steps is not None:
                timed = split.steps.shape == (len(split.values),) and bool((split.steps > 0).all())
                _check(timed and _fits(split.steps), f"the {name} split's steps are not one positive time a step")
            _check(split.per_step == self.target.per_step, f"the {name} split's per_step is not the target's")
            _check(split.sequences == self.train.sequences, f"the {name} split's examples are not like train's")
            whole = not (split.per_step and split.cuts is not None)
            _check(whole, f"the {name} split has pairs, whose targets cannot be those of steps")
            _check(split.targets is not None, f"the {name} split has no targets")
            _check(
                split.ids.dtype.kind in "iuU",
                f"the {name} split's ids are {split.ids.dtype}; use whole numbers or text",
            )
            _check(len(split.ids) == len(split), f"the {name} split has {len(split.ids)} ids for {len(split)} rows")
            self._check_inputs(name, split)
            self._check_static(name, split)
            self._check_targets(name, np.asarray(split.targets), len(split.values) if split.per_step else len(split))
        _check(bool(0 < self.interval < np.inf), f"the interval is {self.interval}; it is positive")
        if self.row_width is not None:
            _whole(self, "row_width")
            _check(self.row_width >= 1, f"row_width is {self.row_width}; a row of pixels has at least one step")

    def _check_inputs(self, name: str, split: Split) -> None:
        top: int | None
        values = split.values
        if isinstance(self.input, Tokens):
            _check(
                values.ndim == 1, f"the {name} split's tokens have shape {values.shape}; one number a step is expected"
            )
            _check(values.dtype.kind in "iu", f"the {name} split's tokens are {values.dtype}; integers are expected")
            top = self.input.vocab if self.input.codes is None else MAX_CODE
        else:
            expected = (len(values), self.input.channels)
            _check(values.shape == expected, f"the {name} split's values have shape {values.shape}, not {expected}")
            _check(values.dtype.kind in "iuf", f"the {name} split's values are {values.dtype}; numbers are expected")
            missing = self.input.missing
            absent = missing and all(_all_missing(piece) for piece in split.pieces())
            _check(not absent, f"the {name} split has no value: all are missing")
            finite = all(_fits(piece, missing) or (missing and _all_missing(piece)) for piece in split.pieces())
            _check(finite, f"the {name} split has values that are not finite in float32")
            top = self.input.levels
            _check(
                top is None or values.dtype.kind in "iu",
                f"the {name} split has levels but its values are {values.dtype}",
            )
        if top is not None:
            low, high = extremes(split)
            _check(0 <= low and high < top, f"the {name} split's inputs reach from {low} to {high}, outside [0, {top})")

    def _check_static(self, name: str, split: Split) -> None:
        expected, shape = self.input.static, None if split.static is None else split.static.shape
        if not expected:
            _check(split.static is None, f"the {name} split has static features, of which the input says nothing")
            return
        _check(split.cuts is None, f"the {name} split has pairs, which take no static features")
        _check(
            split.static is not None and shape == (len(split), expected),
            f"the {name} split's static features have shape {shape}, not {(len(split), expected)}",
        )
        _check(_fits(np.asarray(split.static)), f"the {name} split has static features that are not finite in float32")

    def _check_targets(self, name: str, targets: NDArray[Any], n: int) -> None:
        unit = "step" if self.target.per_step else "row"
        if isinstance(self.target, Classes):
            _check(targets.shape == (n,), f"the {name} split's labels have shape {targets.shape}, not {(n,)}")
            _check(targets.dtype.kind in "iu", f"the {name} split's labels are {targets.dtype}; integers are expected")
            low, high, top = int(targets.min()), int(targets.max()), self.target.count
            least = IGNORED if self.target.per_step or self.target.missing else 0
            _check(
                least <= low and high < top, f"the {name} split's labels reach from {low} to {high}, outside [0, {top})"
            )
            _check(high >= 0, f"the {name} split has no {unit} with a label")
        elif isinstance(self.target, Labels):
            expected = (n, self.target.count)
            _check(targets.shape == expected, f"the {name} split's labels have shape {targets.shape}, not {expected}")
            _check(targets.dtype.kind in "iu", f"the {name} split's labels are {targets.dtype}; 0 and 1 are expected")
            low, high = int(targets.min()), int(targets.max())
            _check(
                IGNORED <= low and high <= 1,
                f"the {name} split's labels reach from {low} to {high}; 1, 0 and {IGNORED} for unknown are expected",
            )
            _check(high >= 0, f"the {name} split has no {unit} with a known label")
        else:
            expected = (n, self.target.size)
            _check(targets.shape == expected, f"the {name} split's targets have shape {targets.shape}, not {expected}")
            _check(targets.dtype.kind in "iuf", f"the {name} split's targets are {targets.dtype}; numbers are expected")
            if self.target.per_step or self.target.missing:
                scored = np.isfinite(targets)
                whole = self.target.missing or bool((scored == scored[:, :1]).all())
                valid = not np.isinf(targets).any() and whole
                _check(valid, f"the {name} split has targets that are infinite, or NaN in a part of a step")
                _check(bool(scored.any()), f"the {name} split has no {unit} with a target")
                targets = targets[scored]
            _check(_fits(targets), f"the {name} split has targets that are not finite in float32")


def extremes(split: Split) -> tuple[int, int]:
    """The least and the largest of whole numbers."""
    ends = [(int(piece.min()), int(piece.max())) for piece in split.pieces()]
    return min(low for low, _ in ends), max(high for _, high in ends)


def sequence_lengths(split: Split) -> NDArray[np.int64]:
    """Of every sequence; a pair has two."""
    return split.lengths if split.cuts is None else np.concatenate([split.cuts, split.lengths - split.cuts])


def class_counts(split: Split, count: int) -> NDArray[np.int64]:
    """(count,) How many examples, or scored steps, of these rows have each class."""
    assert split.targets is not None
    if not split.per_step:
        return np.bincount(split.targets.astype(np.int64) - IGNORED, minlength=count + 1)[1:]
    total = np.zeros(count + 1, np.int64)
    for piece in target_pieces(split):
        total += np.bincount(piece.astype(np.int64) - IGNORED, minlength=count + 1)
    return total[1:]


def target_pieces(split: Split) -> Iterator[NDArray[Any]]:
    """The targets of these rows, in chunks: of rows (m, ...), or of all their steps (m, ...)."""
    assert split.targets is not None
    yield from replace(split, values=split.targets).pieces() if split.per_step else [split.targets]


def label_counts(split: Split, count: int) -> NDArray[np.int64]:
    """(2, count) In how many examples, or steps, of these rows each label is known not to hold, and known to hold."""
    total = np.zeros((2, count), np.int64)
    for piece in target_pieces(split):
        total += [(piece == answer).sum(axis=0) for answer in (0, 1)]
    return total


def known_targets(targets: NDArray[Any]) -> NDArray[np.bool_]:
    """Which targets are known, of the same shape."""
    return np.asarray(np.isfinite(targets) if targets.dtype.kind == "f" else targets != IGNORED)


def has_target(split: Split) -> NDArray[np.bool_]:
    """(n,) Which rows have a target; of several numbers or labels, at least one. Not for per-step targets."""
    assert split.targets is not None and not split.per_step
    known = known_targets(np.asarray(split.targets))
    return known if known.ndim == 1 else np.asarray(known.any(axis=1))


def _fits(values: NDArray[Any], missing: bool = False) -> bool:
    """Finite, also as float32, with room for a square; with `missing`, NaN is left out of account. Without a copy: the
    array may fill the memory."""
    low, high = (np.fmin, np.fmax) if missing else (np.minimum, np.maximum)  # NaN where any value is, without f
    return -1e18 < float(low.reduce(values, axis=None)) and float(high.reduce(values, axis=None)) < 1e18


def _all_missing(values: NDArray[Any]) -> bool:
    return bool(np.isnan(np.fmin.reduce(values, axis=None)))


def _whole(owner: object, name: str) -> None:
    """Make a count a plain int (it may be NumPy's)."""
    value = getattr(owner, name)
    try:
        object.__setattr__(owner, name, operator.index(value))
    except TypeError:
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; a whole number is expected") from None


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
