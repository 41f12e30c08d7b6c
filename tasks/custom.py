"""Your own data, no code: CSV, TSV, JSON lines or Parquet; texts, lists of numbers, or one column a step.

A row is one example. A folder's splits are its files (train, validation, test); a single file is split by a column, or
by a hash of each row's id (without ids, of its input), so that appended rows move no others and rows of one id, or of
the same input, stay together. Complaints name file, line (in Parquet: row, from 1) and column.
"""

import csv
import difflib
import hashlib
import json
import math
import os
import re
import stat
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (*DELIMITERS, ".jsonl", ".ndjson", ".parquet")
LATER = {
    "hub": "data sets on the hub are not read; download the files and give path",
    "time_column": "long format, one row a step, is not read; write one row a sequence (list_column)",
}
MAX_ID = 1_000_000  # of token ids: an embedding has a row for each up to the largest
MAX_NAME = 200  # characters of a label or an id
HUGE = 1e18  # float32 holds the square of what is below
WORD_CODES = 2**22  # numbers that words are hashed to; half of them may be in use

Choose = Callable[[list[str], str], list[str]]  # (a file's columns, its name for a message) -> the columns wanted
Rows = Iterator[tuple[int, list[Any]]]  # (line or row number, the wanted cells)


class Config(TaskConfig):
    path: Path = Field(
        description="a .csv, .tsv, .jsonl, .ndjson or .parquet file, or a folder of them named train, validation, test"
    )
    text_column: str | None = Field(None, description="the input is the text in this column")
    list_column: str | None = Field(
        None, description="the input is the list in this column: of numbers, or of equally long lists (channels)"
    )
    value_columns: tuple[str, ...] = Field(
        (), strict=False, description="the input is one number a column, in this order"
    )
    value_prefix: str | None = Field(
        None,
        description="the input is one number a column: all whose name begins so and that have no other role, in the "
        "first file's order",
    )
    tokens: Literal["characters", "words", "bytes", "ids"] | None = Field(
        None, description="what a token of a text is (null: characters); ids: the numbers are tokens (null: values)"
    )
    min_count: int = Field(1, ge=1, description="characters or words seen less often in training are one unknown token")
    max_length: int | None = Field(None, ge=1, description="longest sequence allowed, in steps; null: any")
    truncate: bool = Field(False, description="cut longer sequences after max_length steps instead of refusing them")
    normalise: Literal["standard", "none"] = Field(
        "standard", description="values: zero mean, unit variance a channel, by the training rows; none: as they are"
    )
    target: Literal["classes", "real"] = Field("classes", description="what a label is: one of some, or a number")
    label_column: str | None = Field(None, description="the label")
    label_columns: tuple[str, ...] = Field(
        (), strict=False, description="target real: several numbers, instead of label_column"
    )
    id_column: str | None = Field(None, description="names rows in predictions; rows of one id are never split apart")
    split_column: str | None = Field(None, description="a single file: train, validation or test, for each row")
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="share of the training rows that becomes validation where the data have none"
    )
    test_fraction: float = Field(
        0.1, gt=0, lt=1, description="share of the training rows that becomes test where the data have none"
    )
    split_seed: int = Field(0, ge=0, description="which rows those are")

    @model_validator(mode="before")  # after it pydantic's strictness takes no list for a tuple: hence strict=False
    @classmethod
    def _not_yet(cls, given: Any) -> Any:
        for key in LATER if isinstance(given, dict) else ():
            if key in given:
                raise ValueError(f"{key}: {LATER[key]}")
        return given

    @field_validator("path", mode="before")
    @classmethod
    def _local(cls, path: Any) -> Any:
        text = os.fspath(path) if isinstance(path, str | Path) else "a type that pydantic refuses"
        if not text:
            raise ValueError("is empty; name a file or a folder")
        if re.search(r"(^|[/\\])[A-Za-z][A-Za-z0-9+.-]+:/", text):
            raise ValueError("is an address; download the files and give their folder")
        return path

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        layouts = ("text_column", "list_column", "value_columns", "value_prefix")
        given = [name for name in layouts if getattr(self, name) not in (None, ())]
        if len(given) != 1:
            found = "none is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"the input is exactly one of {', '.join(layouts)}, but {found}")
        if self.text_column is not None and self.tokens == "ids":
            raise ValueError("tokens ids are numbers, but text_column is given; list_column holds lists of numbers")
        if self.text_column is None and self.tokens not in (None, "ids"):
            raise ValueError(
                f"tokens {self.tokens} are made from text_column; with {given[0]}, ids or null is possible"
            )
        if self.min_count != 1 and not self.coded:
            raise ValueError("min_count is for the characters or words of text_column; it has no effect here")
        if self.normalise == "none" and not self.continuous:
            raise ValueError("normalise is for values; it has no effect on tokens")
        if self.truncate and self.max_length is None:
            raise ValueError("truncate cuts at max_length, which is not given")
        if self.target == "classes" and (self.label_column is None or self.label_columns):
            raise ValueError("target classes needs label_column; label_columns is for target: real")
        if self.target == "real" and (self.label_column is None) == (not self.label_columns):
            raise ValueError("target real needs label_column or label_columns, one of the two")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction and test_fraction together leave no training rows")
        roles = [*self.inputs, *self.labels, *filter(None, (self.id_column, self.split_column))]
        twice = [name for name, times in Counter(roles).items() if times > 1]
        if twice:
            raise ValueError(f"the column {twice[0]!r} is given twice; a column has one role")
        return self

    @property
    def inputs(self) -> list[str]:
        """Input columns by name; those of a prefix are found in the file."""
        return [*self.value_columns, *(name for name in (self.text_column, self.list_column) if name is not None)]

    @property
    def labels(self) -> list[str]:
        return list(self.label_columns) or [str(self.label_column)]

    @property
    def continuous(self) -> bool:
        return self.text_column is None and self.tokens is None

    @property
    def coded(self) -> bool:
        """Whether stored tokens are codes, whose vocabulary is that of the training rows in use."""
        return self.text_column is not None and self.tokens != "bytes"

    @property
    def storage(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.continuous else np.uint8 if self.tokens == "bytes" else np.int32)


def sources(config: Config, raw: Path) -> list[Path]:
    return [path for paths in _files(config).values() for path in paths]


def load(config: Config, raw: Path) -> TaskData:
    files = _files(config)
    given = set(files) if config.split_column is None else _splits_of_column(config, files["train"][0])
    reading = _Reading(config, sources(config, raw), given)
    for split, paths in files.items():
        for path in paths:
            reading.read(split, path)
    return reading.task()


def vocabulary(config: Config, train: Split) -> Tokens:
    """The unknown token, then the characters or words that these rows hold often enough, or the most frequent."""
    counts = train.counts()
    kept = np.flatnonzero(counts >= min(config.min_count, counts.max()))
    order = kept[np.argsort(-counts[kept], kind="stable")]
    return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0)


# ---------------------------------------------------------------------------------------------------------- assembling


@dataclass
class _Part:
    """A split as it grows: its rows end to end in one buffer, so that memory stays near the size of the data."""

    values: bytearray = field(default_factory=bytearray)
    lengths: "array[int]" = field(default_factory=lambda: array("q"))
    targets: "array[float]" = field(default_factory=lambda: array("d"))  # of classes: the number of the label
    ids: list[str] = field(default_factory=list)
    places: "array[int]" = field(default_factory=lambda: array("q"))  # which file, which line; alternating

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, i: int) -> tuple[int, int]:
        return self.places[2 * i], self.places[2 * i + 1]


class _Reading:
    """Takes the rows one after another, checks and converts them, and puts each into its split."""

    def __init__(self, config: Config, files: list[Path], given: set[str]) -> None:
        self.config, self.files, self.given = config, files, given
        self.parts = {name: _Part() for name in ("train", "validation", "test")}
        self.columns: list[str] = []  # of the input, in the first file's order
        self.labels: dict[str, int] = {}  # each label's number, until all are known
        self.words: dict[str, int] = {}  # likewise
        self.homes: dict[str, tuple[str, int, int]] = {}  # id -> split, file and line of its first row
        self.channels: tuple[int, str] | None = None  # of the first row, and where that is
        self.cut = 0  # sequences that were too long
        low = 0.0 if "test" in given else config.test_fraction
        self.borders = low, low if "validation" in given else low + config.validation_fraction

    @property
    def total(self) -> int:
        return sum(map(len, self.parts.values()))

    def read(self, split: str, path: Path) -> None:
        config, number, before = self.config, self.files.index(path), self.total
        extra = [name for name in (config.id_column, config.split_column) if name is not None]
        for line, cells in _rows(path, lambda names, file: [*self._inputs(names, file), *config.labels, *extra]):
            where = _where(path, line)
            n, m = len(self.columns), len(self.columns) + len(config.labels)
            steps, identity = self._sequence(cells[:n], where)
            targets = self._targets(cells[n:m], where)
            home, name = split, ""
            if config.split_column is not None:
                home = _split_name(cells[-1], f"{where}, column {config.split_column}")
            if config.id_column is not None:
                name = _name(cells[m], f"{where}, column {config.id_column}")
                identity = name.encode()
            if home == "train":
                home = self._drawn(identity)
            part = self.parts[home]
            if config.id_column is not None:
                self._keep_together(name, home, number, line)
                part.ids.append(name)
            part.values += steps.tobytes()
            part.lengths.append(len(steps))
            part.targets.extend(targets)
            part.places.extend((number, line))
        if self.total == before:
            raise ValueError(f"{path.name} has a header but no rows")

    def _inputs(self, names: list[str], file: str) -> list[str]:
        """A file's input columns; with a prefix, those that the first file has."""
        config = self.config
        if config.value_prefix is None:
            self.columns = config.inputs
            return self.columns
        others = {*config.labels, config.id_column, config.split_column}
        found = [name for name in names if name.startswith(config.value_prefix) and name not in others]
        if not found:
            raise ValueError(f"{file} has no column that begins with {config.value_prefix!r}{_listed_names(names)}")
        self.columns = self.columns or found
        surplus = sorted(set(found) - set(self.columns))
        if surplus:
            raise ValueError(f"{file} has a column {surplus[0]!r} that the rows before do not have")
        return self.columns

    def _sequence(self, cells: list[Any], where: str) -> tuple[NDArray[Any], bytes]:
        """A row's steps as they are stored, and the bytes of its whole input."""
        config = self.config
        if config.text_column is not None:
            where = f"{where}, column {config.text_column}"
            text = _text(cells[0], where)
            identity, steps = text.encode(), self._text_steps(text)
        else:
            if config.list_column is not None:
                where = f"{where}, column {config.list_column}"
                numbers = _list(cells[0], where)
            else:
                numbers = _wide(cells, self.columns, where)
            steps = _token_ids(numbers, where) if config.tokens == "ids" else numbers.astype(np.float32)
            identity = steps.tobytes()
        if not len(steps):
            raise ValueError(f"{where}: the sequence has no steps; leave the row out")
        found = steps.shape[1] if steps.ndim == 2 else 1
        self.channels = self.channels or (found, where)
        if found != self.channels[0]:
            raise ValueError(f"{where}: a step has {found} numbers, but {self.channels[0]} in {self.channels[1]}")
        if config.max_length is not None and len(steps) > config.max_length:
            if not config.truncate:
                raise ValueError(
                    f"{where}: the sequence has {len(steps):,} steps, max_length is {config.max_length:,}; raise it, "
                    "or cut with truncate: true"
                )
            self.cut += 1
            steps = steps[: config.max_length]
        return steps, identity

    def _text_steps(self, text: str) -> NDArray[Any]:
        if self.config.tokens == "bytes":
            return np.frombuffer(text.encode(), np.uint8)
        if self.config.tokens != "words":
            return np.frombuffer(text.encode("utf-32-le"), np.int32)  # code points
        words = re.findall(r"\w+|[^\w\s]", text)
        return np.array([self.words.setdefault(word, len(self.words)) for word in words], np.int32)

    def _targets(self, cells: list[Any], where: str) -> Sequence[float]:
        places = [f"{where}, column {name}" for name in self.config.labels]
        if self.config.target == "real":
            return [_number(cell, place) for cell, place in zip(cells, places, strict=True)]
        return [float(self.labels.setdefault(_name(cells[0], places[0]), len(self.labels)))]

    def _drawn(self, identity: bytes) -> str:
        """The split of a training row: it follows from its id or input alone, whatever other rows there are."""
        text = hashlib.blake2b(identity, digest_size=8, key=str(self.config.split_seed).encode()).digest()
        place = int.from_bytes(text, "little") / 2**64
        return "test" if place < self.borders[0] else "validation" if place < self.borders[1] else "train"

    def _keep_together(self, name: str, home: str, file: int, line: int) -> None:
        other, *first = self.homes.setdefault(name, (home, file, line))
        if other != home:
            raise ValueError(
                f"{_where(self.files[file], line)}, column {self.config.id_column}: the id {name!r} is in the {home} "
                f"split here and in the {other} split in {_where(self.files[first[0]], first[1])}; an id belongs to "
                "one split (without id_column, every row is its own)"
            )

    def task(self) -> TaskData:
        config = self.config
        for name, part in self.parts.items():
            if not part:
                drawn = name != "train" and name not in self.given
                advice = f"raise {name}_fraction or give {name} rows of your own" if drawn else "it needs some"
                raise ValueError(f"{config.path.name}: none of the {self.total} rows is in the {name} split; {advice}")
        notes = self._notes()
        target = Reals(len(config.labels)) if config.target == "real" else Classes(self._number_classes(notes))
        if config.tokens == "words":
            self._number_words()
        train, val, test = (self._split(part) for part in self.parts.values())
        input: Tokens | Values
        if config.continuous:
            input = _values(config, train, notes)
        elif config.coded:
            input = vocabulary(config, train)
        else:
            largest = max(int(split.values.max()) for split in (train, val, test))
            input = Tokens(256 if config.tokens == "bytes" else max(2, 1 + largest))
        return TaskData(input, target, train, val, test, notes=tuple(notes))

    def _split(self, part: _Part) -> Split:
        config = self.config
        values = np.frombuffer(part.values, config.storage)
        lengths = np.frombuffer(part.lengths, np.int64)
        stops = np.cumsum(lengths)
        targets = np.frombuffer(part.targets, np.float64)
        files, lines = np.frombuffer(part.places, np.int64).reshape(-1, 2).T
        if config.id_column is not None:
            ids = np.array(part.ids)
        elif len(self.files) == 1:
            ids = lines.copy()
        else:
            ids = np.array([f"{self.files[file].stem}-{line}" for file, line in zip(files, lines, strict=True)])
        assert self.channels is not None
        return Split(
            values.reshape(-1, self.channels[0]) if config.continuous else values,
            stops - lengths,
            stops,
            targets.reshape(-1, len(config.labels)) if config.target == "real" else targets.astype(np.int64),
            ids,
        )

    def _notes(self) -> list[str]:
        notes = []
        drawn = [name for name in ("validation", "test") if name not in self.given]
        if drawn:
            by = f"column {self.config.id_column}" if self.config.id_column else "their input"
            counts = " and ".join(f"{len(self.parts[name])} {name} rows" for name in drawn)
            notes.append(f"{counts} were drawn from the training rows by a hash of {by}")
        if self.cut:
            notes.append(f"{self.cut} of {self.total} sequences were cut after {self.config.max_length} steps")
        return notes

    def _number_classes(self, notes: list[str]) -> int:
        """Give the labels their classes: 0, 1, … in the order of the training rows' sorted labels."""
        column, labels = self.config.label_column, list(self.labels)
        counts = np.bincount(np.array(self.parts["train"].targets, np.int64), minlength=len(labels))
        known = _sorted_labels([label for label, count in zip(labels, counts, strict=True) if count])
        if len(known) < 2:
            raise ValueError(
                f"{self.files[0].name}, column {column}: every training row has the label {known[0]!r}; "
                "a classification needs two classes"
            )
        classes = {label: i for i, label in enumerate(known)}
        number = np.array([classes.get(label, -1) for label in labels])
        for split, part in self.parts.items():
            found = number[np.array(part.targets, np.int64)]
            if (found < 0).any():
                first = int(np.flatnonzero(found < 0)[0])
                label, (file, line) = labels[int(part.targets[first])], part.place(first)
                real = "; if labels are numbers to predict, say target: real"
                raise ValueError(
                    f"{_where(self.files[file], line)}, column {column}: the label {label!r} of this {split} row is in "
                    f"no training row{real if _fractional(label) else _nearest(label, known)}"
                )
            part.targets = array("d", found.tolist())
        single = [label for label in known if counts[self.labels[label]] == 1]
        if single:
            shown = ", ".join(map(repr, single[:5])) + (", …" if len(single) > 5 else "")
            notes.append(f"{len(single)} of the {len(known)} classes have one training row: {shown}")
        return len(known)

    def _number_words(self) -> None:
        """Give the words their codes: a hash, or the next number that is free, so that few depend on other words."""
        if len(self.words) > WORD_CODES // 2:
            raise ValueError(
                f"{self.config.path.name} has {len(self.words):,} different words, more than {WORD_CODES // 2:,}; take "
                "tokens: characters"
            )
        codes = np.empty(len(self.words), np.int32)
        taken: set[int] = set()
        for word in sorted(self.words):
            text = hashlib.blake2b(word.encode(), digest_size=8).digest()
            code = int.from_bytes(text, "little") % WORD_CODES
            while code in taken:
                code = (code + 1) % WORD_CODES
            taken.add(code)
            codes[self.words[word]] = code
        for part in self.parts.values():
            values = np.frombuffer(part.values, np.int32)
            np.take(codes, values, out=values)


def _values(config: Config, train: Split, notes: list[str]) -> Values:
    """Mean and deviation of each channel over the training steps; a constant channel is only shifted."""
    n, channels = train.values.shape
    if config.normalise == "none":
        return Values(channels)

    def sums(of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
        pieces = (train.values[i : i + 2**18].astype(np.float64) for i in range(0, n, 2**18))  # no copy of everything
        return np.sum([of(piece).sum(axis=0) for piece in pieces], axis=0)

    mean = sums(lambda piece: piece) / n
    std = np.sqrt(sums(lambda piece: (piece - mean) ** 2) / n)
    constant = np.ptp(train.values, axis=0) == 0
    if constant.any():
        which = f"channel {int(np.flatnonzero(constant)[0]) + 1}" if channels > 1 else "the input"
        notes.append(f"{which} is constant in the training rows ({int(constant.sum())} of {channels} channels are)")
    return Values(channels, tuple(mean), tuple(np.where(constant, 1.0, std)))


# ---------------------------------------------------------------------------------------------------------------- cells


def _where(path: Path, line: int) -> str:
    return f"{path.name}, {'row' if path.suffix.lower() == '.parquet' else 'line'} {line}"


def _text(cell: Any, where: str) -> str:
    if cell is None:
        raise ValueError(f"{where}: the cell is empty; leave the row out")
    if not isinstance(cell, str):
        raise ValueError(f"{where}: {_show(cell)} is not text")
    try:
        cell.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the text holds half of a surrogate pair, which is no character") from None
    return cell


def _name(cell: Any, where: str) -> str:
    """A label or an id as text, whatever the file's format: 3, "3", 3.0 and "3.0" are one; "03" is another."""
    if isinstance(cell, bytes | list | dict | np.ndarray):
        raise ValueError(f"{where}: {_show(cell)} is neither text nor a number")
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    elif isinstance(cell, bool):
        cell = str(cell).lower()
    elif cell is None or cell != cell:
        cell = ""
    name = str(cell)
    if not name.strip():
        raise ValueError(f"{where}: the cell is empty")
    if re.fullmatch(r"-?(0|[1-9][0-9]*)\.0*", name):
        name = name.partition(".")[0]
    elif name in ("True", "TRUE", "False", "FALSE"):
        name = name.lower()
    if len(name) > MAX_NAME:
        raise ValueError(f"{where}: {len(name):,} characters are too many here; at most {MAX_NAME}")
    return _text(name, where)


def _split_name(cell: Any, where: str) -> str:
    name = _name(cell, where)
    if name.strip().lower() not in SPLITS:
        raise ValueError(f"{where}: {name!r} is no split; train, validation or test is expected")
    return SPLITS[name.strip().lower()]


def _sorted_labels(labels: list[str]) -> list[str]:
    """As numbers if all are, else as text."""
    try:
        numbers = {label: float(label) for label in labels}
    except ValueError:
        return sorted(labels)
    if not all(math.isfinite(number) for number in numbers.values()):  # nan has no place in an order
        return sorted(labels)
    return sorted(labels, key=lambda label: (numbers[label], label))


def _fractional(label: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.\d*|\.?\d+(\.\d*)?[eE][-+]?\d+|\.\d+)", label) is not None


def _number(cell: Any, where: str) -> float:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise ValueError(f"{where}: the cell is empty; a number is expected")
    try:
        if (isinstance(cell, str) and not cell.isascii()) or "_" in str(cell):
            raise ValueError  # Python would read 1_000 as 1000, and digits of other scripts
        number = float(cell)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {_show(cell)} is not a number") from None
    except OverflowError:
        number = HUGE
    if not abs(number) < HUGE:
        raise ValueError(f"{where}: {_show(cell)} is not a finite number below 1e18")
    return number


def _wide(cells: list[Any], columns: list[str], where: str) -> NDArray[np.float64]:
    odd = any(isinstance(cell, str) and ("_" in cell or not cell.isascii()) for cell in cells)
    try:
        steps = np.array([*map(float, cells)])
        if not odd and _small(steps):
            return steps
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_number(cell, f"{where}, column {name}") for cell, name in zip(cells, columns, strict=True)])


def _list(cell: Any, where: str) -> NDArray[Any]:
    """(L,) or (L, C) numbers of a list, or of the text that stands for one."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise ValueError(f"{where}: the cell is empty; leave the row out")
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: {_show(cell)} is not a list in JSON") from None
    elif isinstance(cell, str):
        return np.array([_number(word, f"{where}, step {i}") for i, word in enumerate(cell.split(), 1)])
    if not isinstance(cell, list | np.ndarray):
        raise ValueError(f"{where}: {_show(cell)} is not a list of numbers")
    try:
        steps = np.asarray(cell) if len(cell) else np.empty(0)
        if steps.dtype.kind in "iuf" and steps.ndim in (1, 2) and _small(steps):
            return steps
    except ValueError:
        pass  # lists of different lengths
    raise ValueError(f"{where}{_flaw(cell)}")


def _flaw(cell: Iterable[Any]) -> str:
    """What makes this list no sequence."""
    first: int | None = None
    for i, step in enumerate(cell, 1):
        channels = step if isinstance(step, list | np.ndarray) else [step]
        for number in channels:
            if isinstance(number, str | bool | list | np.ndarray):
                return f", step {i}: {_show(number)} is not a number"
            try:
                _number(number, f", step {i}")
            except ValueError as error:
                return str(error)
        found = len(channels) if channels is step else 0  # 0: a number by itself
        first = found if first is None else first
        if found != first:
            return f", step {i}: {_kind(found)} stands here, {_kind(first)} in the first step"
    return ": not a list of numbers, nor of equally long lists of numbers"


def _kind(channels: int) -> str:
    return f"a list of {channels}" if channels else "a number"


def _token_ids(steps: NDArray[Any], where: str) -> NDArray[np.int32]:
    if steps.ndim != 1:
        raise ValueError(f"{where}: a token id is one number a step, not a list")
    wrong = np.flatnonzero((steps != np.floor(steps)) | (steps < 0) | (steps > MAX_ID))
    if len(wrong):
        step = int(wrong[0])
        raise ValueError(f"{where}, step {step + 1}: {steps[step]:.12g} is no token id; these go from 0 to {MAX_ID:,}")
    return steps.astype(np.int32)


def _small(steps: NDArray[Any]) -> bool:
    """Finite, also as float32."""
    return not steps.size or float(np.abs(steps).max()) < HUGE


def _show(cell: Any) -> str:
    text = repr(cell.item() if isinstance(cell, np.generic) else cell)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [one for one in known if one.strip().lower() == name.strip().lower()]
    return f"; did you mean {near[0]!r}?" if near else _listed_names(known)


def _listed_names(known: Sequence[str]) -> str:
    return f"; there: {', '.join(map(_show, known[:12]))}{', …' if len(known) > 12 else ''}"


# ---------------------------------------------------------------------------------------------------------------- files


def _files(config: Config) -> dict[str, list[Path]]:
    """The files to read, training first. Raises for what is no file, and for a folder without training files."""
    path = config.path
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}; a path in a recipe is relative to the recipe's folder")
    if not path.is_dir():
        if path.suffix.lower() not in FORMATS:
            raise ValueError(f"{path} is not read: {_unreadable(path.suffix.lower())}")
        _check_regular(path)
        return {"train": [path]}
    if config.split_column is not None:
        raise ValueError(f"split_column is for a single file; in the folder {path} the files' names say the split")
    found: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    there = sorted(path.iterdir())
    for one in there:
        if one.suffix.lower() in FORMATS and not one.name.startswith("."):
            splits = {SPLITS[word] for word in re.split(r"[^a-z]+", one.stem.lower()) if word in SPLITS}
            if len(splits) > 1:
                raise ValueError(f"the name of {one} says {' and '.join(sorted(splits))}; a file is one split's")
            for split in splits:
                _check_regular(one)
                found[split].append(one)
    if not found["train"]:
        sound = any(one.suffix.lower() in (".wav", ".flac", ".mp3") for one in there)
        more = "folders of sound files are not read" if sound else f"formats: {', '.join(FORMATS)}"
        names = _listed_names([one.name for one in there])
        raise ValueError(f"the folder {path} has no training file such as train.csv{names} ({more})")
    for split, paths in found.items():
        endings = sorted({one.suffix.lower() for one in paths})
        if len(endings) > 1:
            raise ValueError(f"the {split} split is in {path} as {' and as '.join(endings)}; keep one of them")
    return {split: paths for split, paths in found.items() if paths}


def _unreadable(ending: str) -> str:
    """What to do with the usual other formats."""
    if ending in (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz"):
        return "unpack it first"
    if ending == ".json":
        return "write one object a line and call the file .jsonl"
    if ending in (".xlsx", ".xls", ".ods"):
        return "save the table as .csv"
    return f"its name should end in one of {', '.join(FORMATS)}"


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
        raise ValueError(f"{path} is not a regular file")


def _splits_of_column(config: Config, path: Path) -> set[str]:
    column = str(config.split_column)
    rows = _rows(path, lambda names, file: [column])
    return {_split_name(cells[0], f"{_where(path, line)}, column {column}") for line, cells in rows}


# -------------------------------------------------------------------------------------------------------------- readers


def _rows(path: Path, choose: Choose) -> Rows:
    """Every row of a file, of which little more than one is in memory at a time."""
    ending = path.suffix.lower()
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty")
    if ending == ".parquet":
        return _parquet(path, choose)
    return _delimited(path, DELIMITERS[ending], choose) if ending in DELIMITERS else _json_lines(path, choose)


def _wanted(names: list[str], choose: Choose, file: str) -> list[str]:
    wanted, times = choose(names, file), Counter(names)
    for name in wanted:
        if times[name] > 1:
            raise ValueError(f"{file} has {times[name]} columns named {name!r}")
        if not times[name]:
            raise ValueError(f"{file} has no column {name!r}{_nearest(name, names)}")
    return wanted


def _delimited(path: Path, delimiter: str, choose: Choose) -> Rows:
    before = csv.field_size_limit(sys.maxsize)  # a long sequence is one cell
    header: list[str] | None = None
    picks: list[int] = []
    start = 1  # the line that a row begins in
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for cells in reader:
                line, start = start, reader.line_num + 1
                if not cells:
                    continue  # a blank line
                if header is None:
                    header = cells
                    place = {name: i for i, name in enumerate(header)}
                    picks = [place[name] for name in _wanted(header, choose, path.name)]
                elif len(cells) != len(header):
                    raise ValueError(f"{_where(path, line)} has {len(cells)} cells, the header {len(header)}")
                else:
                    yield line, [cells[i] for i in picks]
    except csv.Error as error:
        raise ValueError(
            f"{_where(path, start)}: {error}; a cell with quotes, line breaks or {delimiter!r} stands in quotes, and "
            "quotes in it are doubled"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(_not_utf8(path)) from None
    finally:
        csv.field_size_limit(before)
    if header is None:
        raise ValueError(f"{path.name} is empty")


def _not_utf8(path: Path) -> str:
    """The sentence for the first line that is not."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{_where(path, number)}: byte {line[error.start]:#04x} is not UTF-8; save the file as UTF-8"
    return f"{path.name} is not UTF-8; save it as UTF-8"


def _json_lines(path: Path, choose: Choose) -> Rows:
    keys: set[str] | None = None
    wanted: list[str] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = _where(path, number)
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise ValueError(_not_utf8(path)) from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not an object in JSON ({str(error).partition(':')[0]})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: {_show(row)} is not an object with a key for each column")
            if row.keys() != keys:
                keys = set(row)
                wanted = _wanted(list(row), choose, where)
            yield number, [row[name] for name in wanted]
    if keys is None:
        raise ValueError(f"{path.name} is empty")


def _parquet(path: Path, choose: Choose) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            wanted, meta = _wanted(file.schema_arrow.names, choose, path.name), file.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            rows = max(1, min(4096, 2**24 * meta.num_rows // max(1, size)))  # about 16 MB
            first = 1
            for batch in file.iter_batches(rows, columns=wanted):
                cells = [_cells(batch.column(name), f"{path.name}, column {name}") for name in wanted]
                yield from ((first + i, list(row)) for i, row in enumerate(zip(*cells, strict=True)))
                first += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path.name} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from None


def _cells(column: Any, where: str) -> list[Any]:
    """As Python objects; lists of numbers, and of equally long lists of numbers, as arrays."""
    import pyarrow as pa

    outer = _unpacked(column)
    inner = _unpacked(outer[0]) if outer is not None else None
    numbers, width = outer[0] if outer is not None else column, 0
    if inner is not None and numbers.null_count == 0:
        sizes = np.diff(inner[1])
        if len(sizes) and (sizes == sizes[0]).all():
            numbers, width = inner[0].slice(inner[1][0], inner[1][-1] - inner[1][0]), int(sizes[0])
    if outer is None or not (pa.types.is_integer(numbers.type) or pa.types.is_floating(numbers.type)):
        try:
            return column.to_pylist()
        except (ValueError, OverflowError) as error:  # a text that is not UTF-8, a time beyond Python's
            raise ValueError(f"{where}: {error}") from None
    flat = numbers.to_numpy(zero_copy_only=False)
    flat = flat.reshape(-1, width) if width else flat
    ends, valid = outer[1], column.is_valid().to_pylist()
    return [flat[a:b] if there else None for a, b, there in zip(ends[:-1], ends[1:], valid, strict=True)]


def _unpacked(column: Any) -> tuple[Any, NDArray[Any]] | None:
    """The items of an Arrow list column and where each row's begin and end; None for another column."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return column.values, column.offsets.to_numpy()
    return None
