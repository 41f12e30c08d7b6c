"""From the rows of tables to examples.

A row is an example (a text, a list of numbers, one number per column, or an array in a file of its own) or one step of
an example (the long layout), whose steps are the rows of one id in the order of their times.

n examples, L steps of a sequence, C channels, K target values.
"""

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import Split
from spt.tasks.own import arrays, static
from spt.tasks.own.discovery import parse_split
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import (
    MissingValueError,
    NameEncoder,
    SetEncoder,
    is_empty,
    is_missing,
    list_names,
    parse_flags,
    parse_list,
    parse_lists,
    parse_numbers,
    parse_text,
    parse_times,
    parse_token_ids,
    same_nan,
    sort_labels,
)
from spt.tasks.own.recordings import FULL_SCALE, Recording
from spt.tasks.own.splits import NAMES, hash_key
from spt.tasks.own.steps import Steps
from spt.tasks.own.tables import Batch, locate, read_batches
from spt.tasks.own.transforms import as_read, read_label_lists, transform_examples
from spt.tasks.parallel import AT_ONCE, allocate, release

REGULAR = 1e-3  # how far, of the median, times between steps may be apart and still be called regular

STATIC = "static "  # begins the name of a static column

Columns = dict[str, NDArray[Any]]  # of equal length, a row each


@dataclass
class Examples:
    """What was read; m is n, or the total number of steps where every step has a label."""

    rows: Split  # of all splits; classes are numbers of `labels`, of several labels sets of them
    place: Callable[[int], str]  # where the i-th of the m targets stands
    splits: NDArray[np.int64]  # (n,) as the data say
    keys: NDArray[np.uint64]  # (n,) random numbers for the draw of splits, equal where examples stay together
    labels: list[str]
    label_sets: SetEncoder
    words: list[str]
    notes: list[str]
    scale: tuple[float, float]  # of stored integers
    interval: float
    static: dict[str, tuple[list[str], static.Codes]]  # of each static column the names, and the examples' codes


def place_of(examples: Examples, row: int) -> str:
    """Where an example stands, or its first step."""
    return examples.place(int(examples.rows.starts[row]) if examples.rows.per_step else row)


class FirstFile(NamedTuple):
    """What the files of all rows have in common."""

    ending: str
    rate: int | float | None  # samples a second
    signals: tuple[str, ...]  # name and unit of each channel
    place: str


class Reader:
    """Reads, checks and converts the tables' rows, some at a time."""

    advice = "missing: hidden shows the model such cells as missing"

    def __init__(self, config: Options, files: list[Path]) -> None:
        self.asked, self.config, self.files = config, as_read(config), files
        self.inputs: list[str] = []  # columns, in the first file's order
        self.column_of = {
            "id": config.id_column,
            "group": config.group_column,
            "split": config.split_column,
            "label": next(iter(config.labels), None),
            "file": config.file_column,
        }
        self.column_of |= {_static(name): name for name in config.static_columns}
        self.encoders = {name: NameEncoder() for name in self.column_of} | {"split": NameEncoder(parse_split, NAMES)}
        self.label_sets = SetEncoder(config.label_separator, "ignore" if config.per_step else config.missing_labels)
        self.blocks: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)  # of each column
        self.words: dict[str, int] = {}  # numbered as they come
        self.storage, self.scale = config.storage, FULL_SCALE
        self.values = Steps(self.storage)  # of all rows
        self.channels: tuple[int, str] | None = None  # of the first row, and where that is
        self.first_file: FirstFile | None = None
        self.n_cut = 0
        self.rate = None if config.rate is None else float(config.rate)  # steps a second, if that is known
        self.only_labelled = True  # are windows without a label left out?
        self.table: Columns = {}  # all rows, when they are read
        self.notes: list[str] = []

    def read(self, split: str, path: Path) -> None:
        rows = 0
        with read_batches(path, self._select) as batches:
            for batch in batches:
                rows += len(batch.lines)
                inputs = self._read_steps(batch) if self.config.kind == "long" else self._read_sequences(batch)
                for name, column in (inputs | self._read_roles(split, batch)).items():
                    self.blocks[name].append(column)
        if not rows:
            raise ValueError(f"{path.name} has a header but no rows")

    def _select(self, names: list[str], file: str) -> list[str]:
        """A file's columns to read; of input columns with a prefix, those that the first file has."""
        config = self.config
        if config.value_prefix is None:
            self.inputs = config.inputs
        else:
            prefixed = [name for name in names if config.has_prefix(name)]
            if not prefixed:
                raise ValueError(f"{file} has no column that begins with {config.value_prefix!r}{list_names(names)}")
            self.inputs = self.inputs or prefixed
            surplus = sorted(set(prefixed) - set(self.inputs))
            if surplus:
                raise ValueError(f"{file} has a column {surplus[0]!r} that the rows before do not have")
        return [*self.inputs, *config.labels, *config.others]

    # ---------------------------------------------------------------------------------------------------- some rows

    def _read_roles(self, split: str, batch: Batch) -> Columns:
        """The rows' places, ids, groups, splits and labels."""
        config, n = self.config, len(batch.lines)
        columns: Columns = {
            "line": np.asarray(batch.lines, np.int64),
            "source": np.full(n, self.files.index(batch.path), np.int32),
            "split": np.full(n, NAMES.index(split), np.int32),
        }
        for name in ("id", "group", "split"):
            column = self.column_of[name]
            if column is not None:
                columns[name] = self.encoders[name].encode(batch.columns[column], batch.place(column))
        columns |= self._read_static(batch)
        if config.label_at is not None and not config.per_step:
            lists = [(batch.columns[name], batch.place(name)) for name in config.labels]
            return columns | {"label": read_label_lists(config, lists, self.encoders["label"], config.label_gaps)}
        labels = [(batch.columns[name], batch.place(name), config.label_gaps) for name in config.labels]
        if config.target == "classes":
            return columns | {"label": self.encoders["label"].encode(*labels[0])}
        if config.target == "labels":
            if config.label_column is not None:
                return columns | {"label": self.label_sets.encode(*labels[0][:2])}
            return columns | {"label": np.stack([parse_flags(*column) for column in labels], axis=1)}
        missing = is_empty if config.label_gaps else None
        numbers = np.stack([parse_numbers(cells, place, missing) for cells, place, _ in labels], axis=1)
        gaps = np.isnan(numbers)
        partly = np.flatnonzero(gaps.any(axis=1) & ~gaps.all(axis=1))
        if len(partly) and config.missing_labels == "refuse":
            place = batch.place(config.labels[0])(int(partly[0]))
            raise ValueError(f"{place}: a step has all of its label columns or none; some cells are empty")
        return columns | {"label": numbers}

    def _read_static(self, batch: Batch) -> Columns:
        """Codes of the static columns' cells."""
        gaps = self.config.missing == "hidden"
        with self._advised():
            return {
                _static(name): static.encode(self.encoders[_static(name)], batch.columns[name], batch.place(name), gaps)
                for name in self.config.static_columns
            }

    @contextlib.contextmanager
    def _advised(self) -> Iterator[None]:
        """Say of a missing value what can be done."""
        try:
            yield
        except MissingValueError as error:
            raise MissingValueError(f"{error}; {self.advice}") from None

    def _read_numbers(self, batch: Batch) -> NDArray[np.float64]:
        missing = is_missing if self.config.gaps else None
        with self._advised():
            columns = [parse_numbers(batch.columns[name], batch.place(name), missing) for name in self.inputs]
            return np.stack(columns, axis=1)

    def _read_steps(self, batch: Batch) -> Columns:
        """Of the long layout: each step's number and time; the (n, C) values, or (n,) tokens, go to `values`."""
        config = self.config
        values: NDArray[Any] = self._read_numbers(batch)
        begun = len(self.values) // values.shape[1]
        columns: Columns = {"step": np.arange(begun, begun + len(values))}
        if config.tokens == "ids":
            if values.shape[1] != 1:
                raise ValueError(f"tokens: ids is one number a step, but there are {values.shape[1]} value columns")
            values = parse_token_ids(values[:, 0], batch.place(self.inputs[0]))
        self.values.add(same_nan(values.astype(self.storage, copy=False)))
        if config.time_column is not None:
            columns["time"] = parse_times(batch.columns[config.time_column], batch.place(config.time_column))
        return columns

    def _read_sequences(self, batch: Batch) -> Columns:
        """Of the other layouts: lengths and keys; the steps go to `values` as they are stored."""
        config, name = self.config, self.config.input_column
        place = batch.place(name)
        lengths, keys = [], []
        for i, cell in enumerate(self._cells(batch)):
            steps, whole = self._parse(cell, batch.path.parent, place(i))
            if not len(steps):
                raise ValueError(f"{place(i)}: the sequence has no steps; leave the row out")
            channels = steps.shape[1] if steps.ndim == 2 else 1
            self.channels = self.channels or (channels, place(i))
            if channels != self.channels[0]:
                raise ValueError(
                    f"{place(i)}: a step has {channels} numbers, but {self.channels[0]} in {self.channels[1]}"
                )
            if config.max_length is not None and len(steps) > config.max_length:
                if not config.truncate:
                    raise ValueError(config.too_long(place(i), len(steps)))
                self.n_cut += 1
                steps = steps[: config.max_length]
            self.values.add(steps)
            lengths.append(len(steps))
            if config.unit is None:
                keys.append(hash_key(whole, config.split_seed))
        columns: Columns = {"length": np.array(lengths, np.int64), "key": np.array(keys, np.uint64)}
        if config.file_column is not None:
            names = (arrays.with_ending(batch.path.parent, name) for name in batch.columns[config.file_column])
            columns["file"] = np.array([self.encoders["file"].add(name) for name in names], np.int32)
        return columns

    def _cells(self, batch: Batch) -> Iterable[Any]:
        """Of every row what its input is made of: a cell, the numbers of its columns, or the cells of its lists."""
        config = self.config
        if config.list_columns:
            return zip(*(batch.columns[name] for name in self.inputs), strict=True)
        return self._read_numbers(batch) if config.input_column is None else batch.columns[config.input_column]

    def _parse(self, cell: Any, folder: Path, place: str) -> tuple[NDArray[Any], bytes]:
        """A row's steps as they are stored, and the bytes of its whole input."""
        kind = self.config.kind
        if kind == "text":
            text = parse_text(cell, place)
            return self._tokens(text), text.encode()
        steps: NDArray[Any] = cell
        with self._advised():
            if self.config.list_columns:
                steps = parse_lists(cell, self.inputs, place, self.config.gaps)
            elif kind == "list":
                steps = parse_list(cell, place, self.config.gaps)
            elif kind == "files":
                steps = self._open(arrays.find(folder, cell, place), place)
        if self.config.tokens == "ids":
            steps = parse_token_ids(steps, place)
        steps = same_nan(steps.astype(self.storage, copy=False))
        return steps, steps.tobytes()

    def _tokens(self, text: str) -> NDArray[Any]:
        if self.config.tokens == "bytes":
            return np.frombuffer(text.encode(), np.uint8)
        if self.config.tokens != "words":
            return np.frombuffer(text.encode("utf-32-le"), np.int32)  # code points
        return np.array([self.words.setdefault(word, len(self.words)) for word in split_words(text)], np.int32)

    def _open(self, path: Path, place: str) -> NDArray[Any]:
        """A file's array; small integers as they are, as long as all files have them."""
        recording = arrays.read(path, self.config.array, place, self.config.gaps, self.config.channels)
        ending = path.suffix.lower()
        if self.first_file is None:
            self.first_file = FirstFile(ending, recording.rate, recording.signals, place)
            if self.config.continuous and recording.steps.dtype in (np.uint8, np.int16):
                self.storage, self.scale = recording.steps.dtype, recording.scale
                self.values = Steps(self.storage)
        self._check_like_first(recording, path, place)
        return self._as_stored(recording)

    def _as_stored(self, recording: Recording) -> NDArray[Any]:
        if not self.config.continuous or (recording.steps.dtype, recording.scale) == (self.storage, self.scale):
            return recording.steps
        if self.storage != np.float32:  # files of several types: all as float32 of full scale 1
            scale, self.storage, self.scale = self.scale, np.dtype(np.float32), FULL_SCALE
            self.values = self.values.converted(self.storage, lambda steps: scaled(steps, scale))
        return scaled(recording.steps, recording.scale)

    def _check_like_first(self, recording: Recording, path: Path, place: str) -> None:
        first, ending = self.first_file, path.suffix.lower()
        assert first is not None
        if arrays.kind_of(ending) != arrays.kind_of(first.ending):
            raise ValueError(f"{place}: a {ending} file, but a {first.ending} file in {first.place}; give one kind")
        if recording.rate != first.rate and None not in (recording.rate, first.rate):
            raise ValueError(
                f"{place}, {path.name}: {recording.rate:,} samples a second, but {first.rate:,} in {first.place}; "
                "convert the files to one rate"
            )
        if recording.signals != first.signals and first.signals:
            here, there = (", ".join(signals) for signals in (recording.signals, first.signals))
            raise ValueError(
                f"{place}, {path.name}: its signals are {here}, but {there} in {first.place}; name those that all "
                "files have, in one unit: channels"
            )

    # --------------------------------------------------------------------------------------------- when all are read

    def examples(self) -> Examples:
        config = self.config
        self.table = {name: np.concatenate(self.blocks.pop(name)) for name in list(self.blocks)}
        first: slice | NDArray[np.int64] = slice(None)  # row of each example
        interval = 1.0
        if config.kind == "long":
            self._sort_steps()
            interval = self._find_interval()
            self._cut()
            first = _starts(self.table["id"])
            lengths, values = np.diff(first, append=len(self.table["id"])), self._sorted_values()
        else:
            self._check_rows()
            lengths, values = self.table["length"], self.values.array()
            if config.continuous:
                assert self.channels is not None
                values = values.reshape(-1, self.channels[0])
            if self.n_cut:
                self.notes.append(f"{self.n_cut} of {len(lengths)} sequences were cut after {config.max_length} steps")
            if self.first_file is not None and self.first_file.rate is not None:
                interval = 1 / self.first_file.rate
                if self.rate not in (None, self.first_file.rate):
                    raise ValueError(
                        f"rate is {self.rate:g}, but the files have {self.first_file.rate:,} samples a second"
                    )
                self.rate = float(self.first_file.rate)
        if config.rate is not None:
            interval = 1 / config.rate
        labelled = slice(None) if config.per_step else first
        targets, files, lines = (self.table[name][labelled] for name in ("label", "source", "line"))
        if config.kind == "long" and config.target == "real":
            targets = targets.astype(np.float32)
        stops = np.cumsum(lengths)
        ids, steps, unit, paths = self._ids(first), self.table.get("steps"), config.unit, self.files
        groups = None
        if "group" in self.table:
            groups = np.array(self.encoders["group"].names)[self.table["group"][first]]
        options: dict[str, Any] = {"per_step": config.per_step, "steps": steps, "groups": groups}
        examples = Examples(
            rows=Split(values, stops - lengths, stops, targets, ids, **options),
            place=lambda i: locate(paths[int(files[i])], int(lines[i])),
            splits=self.table["split"][first].astype(np.int64),
            keys=self.table["key"] if unit is None else self._keys(unit)[self.table[unit][first]],
            labels=self._label_names(),
            label_sets=self.label_sets,
            words=list(self.words),
            notes=self.notes,
            scale=self.scale,
            interval=interval,
            static={
                name: (self.encoders[_static(name)].names, self.table[_static(name)][first])
                for name in config.static_columns
            },
        )
        self.table = {}  # which would stay in memory beside them
        changed = transform_examples(self.asked, examples, self.rate, self.only_labelled)
        self.scale = changed.scale
        return changed

    def _label_names(self) -> list[str]:
        if self.config.target != "labels":
            return self.encoders["label"].names
        return list(self.config.label_columns) or sort_labels(sorted(set().union(*self.label_sets.sets)))

    def _ids(self, first: slice | NDArray[np.int64]) -> NDArray[Any]:
        """(n,) Each example's id, else its file, else its place."""
        for name in ("id", "file"):
            if name in self.table:
                return np.array(self.encoders[name].names)[self.table[name][first]]
        if len(self.files) == 1:
            return self.table["line"]
        places = zip(self.table["source"], self.table["line"], strict=True)
        return np.array([f"{self.files[source].stem}-{line}" for source, line in places])

    def _keys(self, name: str) -> NDArray[np.uint64]:
        """Of each id or group, for the draw of splits."""
        names = self.encoders[name].names
        return np.array([hash_key(unit.encode(), self.config.split_seed) for unit in names], np.uint64)

    # ----------------------------------------------------------------------------------------------- a row is a step

    def _sort_steps(self) -> None:
        """By id, in the order in which these come first, then by time, or as the rows come."""
        ids, times = self.table["id"], self.table.get("time")
        order = np.argsort(ids, kind="stable") if times is None else np.lexsort((times, ids))
        for name in self.table:  # one after the other: memory need not hold all of them twice
            self.table[name] = self.table[name][order]
        if times is not None:
            again = np.flatnonzero((np.diff(ids[order]) == 0) & (np.diff(times[order]) == 0))
            if len(again):
                row = int(again[0])
                raise ValueError(
                    f"{self._place(row + 1)}, column {self.config.time_column}: the id {self._name('id', row)} "
                    f"has this time in {self._place(row)} already; a step is one row"
                )
        for what in ("split", "group"):
            self._check_same("id", what, "a sequence has one")
        for name in self.config.static_columns:
            self._check_same("id", _static(name), "a static feature is the same in all rows of a sequence")
        if not self.config.per_step:
            self._check_same("id", "label", "a sequence has one; per_step: true gives every step its own")
        if not self.config.pool_splits:  # else files and the split column say nothing
            self._check_same("group", "split", "a group belongs to one split")

    def _sorted_values(self) -> NDArray[Any]:
        """The steps' values, which came in the order of the rows, in that of the table."""
        order, values = self.table.pop("step"), self.values.array()
        values = values.reshape(-1, len(self.inputs)) if self.config.continuous else values
        if len(order) == len(values) and (np.diff(order) == 1).all():
            return values
        moved, size = allocate((len(order), *values.shape[1:]), values.dtype), max(1, AT_ONCE // values[:1].nbytes)
        for i in range(0, len(order), size):
            moved[i : i + size] = values[order[i : i + size]]
            release(values)
            release(moved)
        return moved

    def _find_interval(self) -> float:
        """The median time between steps. Irregular ones become a column, as multiples of it, 1 for a first step."""
        if "time" not in self.table:
            return 1.0
        apart = np.diff(self.table["time"], prepend=self.table["time"][:1])
        inner = np.ones(len(apart), bool)
        inner[_starts(self.table["id"])] = False
        between = apart[inner]
        if not len(between):
            return 1.0
        interval, low, high = float(np.median(between)), float(between.min()), float(between.max())
        if high - low <= REGULAR * interval:
            self.rate = 1 / interval
            return interval
        if self.config.resample is not None:
            raise ValueError(
                f"resample needs steps at equal times, but they are {low:g} to {high:g} apart (median {interval:g})"
            )
        if self.config.times == "steps":
            apart[~inner] = interval
            self.table["steps"] = (apart / interval).astype(np.float32)
        else:
            self.notes.append(
                f"times between steps are irregular ({low:g} to {high:g}, median {interval:g}) and ignored; times: "
                "steps gives them to models that take them"
            )
        return interval

    def _cut(self) -> None:
        """Leave the steps after max_length out."""
        starts, most = _starts(self.table["id"]), self.config.max_length
        lengths = np.diff(starts, append=len(self.table["id"]))
        if most is None or lengths.max() <= most:
            return
        too_long = np.flatnonzero(lengths > most)
        if not self.config.truncate:
            row, length = int(starts[too_long[0]]), int(lengths[too_long[0]])
            raise ValueError(self.config.too_long(f"{self._place(row)}, id {self._name('id', row)}", length))
        self.notes.append(f"{len(too_long)} of {len(lengths)} sequences were cut after {most} steps")
        kept = np.arange(len(self.table["id"])) - np.repeat(starts, lengths) < most
        self.table = {name: column[kept] for name, column in self.table.items()}

    # -------------------------------------------------------------------------------------------------------- checks

    def _place(self, row: int) -> str:
        return locate(self.files[int(self.table["source"][row])], int(self.table["line"][row]))

    def _name(self, kind: str, row: int) -> str:
        """A row's id, group or file, quoted."""
        return repr(self.encoders[kind].names[self.table[kind][row]])

    def _check_rows(self) -> None:
        """Raise ValueError when examples share what is one example's own, or files have no row, and so no label."""
        unit = self.config.unit
        if unit is not None and not self.config.pool_splits:
            alone = " (without id_column, every row is its own)" if unit == "id" else ""
            self._check_same(unit, "split", f"an id or a group belongs to one split{alone}")
        if unit == "group":
            self._check_unique("id")
        self._check_unique("file")
        if self.config.file_column is None or self.config.unlisted == "ignore":
            return
        listed = self.encoders["file"].codes
        endings = sorted({os.path.splitext(name)[1].lower() for name in listed})
        for root in dict.fromkeys(path.parent for path in self.files):
            unlisted = [name for name in arrays.files_in(root, endings) if name not in listed]
            if unlisted:
                raise ValueError(
                    f"the folder {root.name} has {len(unlisted):,} files that no row of {self.files[0].name} "
                    f"names{list_names(unlisted)}; give them rows and labels, move them away, or say unlisted: ignore"
                )

    def _check_unique(self, name: str) -> None:
        """Raise ValueError when an id, or a file, stands in two rows."""
        rows = self._differing(name, np.arange(len(self.table["line"])))
        if rows is not None:
            raise ValueError(
                f"{self._place(rows[0])}, column {self.column_of[name]}: the {name} {self._name(name, rows[0])} "
                f"stands in {self._place(rows[1])} already"
            )

    def _check_same(self, unit: str, what: str, advice: str) -> None:
        """Raise ValueError when rows of one id or group differ in their split, group or label."""
        rows = self._differing(unit, self.table.get(what))
        if rows is not None:
            column = self.column_of[what] or self.column_of[unit]
            raise ValueError(
                f"{self._place(rows[0])}, column {column}: the {unit} {self._name(unit, rows[0])} has another "
                f"{what.removeprefix(STATIC)} than in {self._place(rows[1])}; {advice}"
            )

    def _differing(self, unit: str, column: NDArray[Any] | None) -> tuple[int, int] | None:
        """The first row that differs from the first row of its unit, and that row."""
        if unit not in self.table or column is None:
            return None
        if column.dtype.kind == "f":  # what is missing is the same as what is missing
            column = np.nan_to_num(column, nan=np.inf)
        codes = self.table[unit]
        first = np.empty(int(codes.max()) + 1, np.int64)  # row of each code
        first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last one written stays
        rows = np.flatnonzero((column != column[first[codes]]).reshape(len(column), -1).any(axis=1))
        return (int(rows[0]), int(first[codes[rows[0]]])) if len(rows) else None


def _static(name: str) -> str:
    """What a static column is called among the others of the reader."""
    return STATIC + name


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _starts(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """(n,) The first row of each sequence."""
    return np.flatnonzero(np.diff(ids, prepend=-1))


def scaled(steps: NDArray[Any], scale: tuple[float, float]) -> NDArray[np.float32]:
    zero, full = scale
    return np.asarray((steps.astype(np.float32) - np.float32(zero)) / np.float32(full))
