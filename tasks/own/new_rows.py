"""Rows that a trained model has not seen: read as its training rows were, some thousand at a time.

No split is drawn, no class is numbered and no vocabulary or mean is computed: what the model knows about its training
rows says what a label, a word or a number stands for. Labels may be missing. Part of the rows of a table are in memory
at a time; all of them in the long layout, whose steps may come in any order, and for arrays in .npz.

n examples, L steps of a sequence, C channels.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED, Labels, Reals, Split, Target, TaskData, Tokens, Values, known_targets
from spt.tasks.own import arrays
from spt.tasks.own.discovery import ADVICE, regular
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import (
    HUGE,
    NameEncoder,
    SetEncoder,
    is_empty,
    list_names,
    parse_flags,
    parse_numbers,
    show,
    suggest,
)
from spt.tasks.own.recordings import FULL_SCALE, Recording
from spt.tasks.own.rows import REGULAR, Columns, Examples, FirstFile, Reader, place_of, scaled, split_words
from spt.tasks.own.static import StaticColumn, in_column, stacked
from spt.tasks.own.steps import Steps
from spt.tasks.own.tables import FORMATS, Batch, read_batches
from spt.tasks.own.transforms import TransformOptions, plan, read_label_lists, transform_rows

ROWS, STEPS = 2**12, 2**22  # read before they are answered
ARRAYS = (".npy", ".npz")


class NewOptions(Options):
    """How new rows are read: like training rows, except that labels may be absent."""

    def _check_labels(self, real: bool) -> None:
        if self.label_column is not None and self.label_columns:
            raise ValueError("label_column and label_columns are given; one of the two names the labels")

    def _check_several_labels(self) -> None:
        pass


@dataclass(frozen=True)
class Known:
    """What a model knows about the rows it was trained on."""

    input: Tokens | Values
    target: Target | None  # None: labels are of no interest
    interval: float = 1.0  # time between steps
    classes: tuple[str, ...] = ()  # label of each class
    words: tuple[str, ...] = ()  # of each token, where tokens are words
    codes: Mapping[str, int] = field(default_factory=dict)  # of all words of a task whose own rows are to be known
    columns: tuple[str, ...] = ()  # of one number each, in their order
    times: bool = False  # was it told the time between steps?
    kind: str | None = None  # of its files, as arrays.kind_of says; None: there were none
    rate: int | float | None = None  # samples a second of these
    signals: tuple[str, ...] = ()  # name and unit of their channels
    scale: tuple[float, float] = FULL_SCALE  # of stored numbers: what stands for zero, and full scale above it
    stored: tuple[np.dtype[Any], tuple[float, float]] | None = None  # type and scale of its files' numbers as read
    static: tuple[StaticColumn, ...] = ()  # what stands beside a sequence
    steps_a_second: float | None = None  # of recordings that are transformed, before that

    @property
    def gaps(self) -> bool:
        """May values be missing?"""
        return isinstance(self.input, Values) and self.input.missing

    def channels(self, options: TransformOptions) -> int:
        """Numbers per step as it is read."""
        shown = self.input.channels if isinstance(self.input, Values) else 1
        return shown // plan(options, self.steps_a_second, known=False).channels(1)


@dataclass
class Counts:
    """Counts of what a user should know, for the notes at the end."""

    rows: int = 0
    cut: int = 0
    tokens: int = 0
    unknown: int = 0  # tokens
    values: int = 0
    missing: int = 0  # values
    unseen: Counter[str] = field(default_factory=Counter)  # labels that are no class, and how often they come
    notes: list[str] = field(default_factory=list)

    def sentences(self, max_length: int | None) -> list[str]:
        notes = list(dict.fromkeys(self.notes))
        if self.cut:
            notes.append(f"{self.cut:,} of {self.rows:,} sequences were cut after {max_length} steps")
        if self.unknown:
            notes.append(
                f"{self.unknown:,} of {self.tokens:,} tokens ({self.unknown / self.tokens:.1%}) are not in the model's "
                "vocabulary and are shown to it as the unknown token"
            )
        if self.missing:
            notes.append(f"{self.missing:,} of {self.values:,} values ({self.missing / self.values:.2%}) are missing")
        if self.unseen:
            names = ", ".join(map(show, list(self.unseen)[:5])) + ", …" * (len(self.unseen) > 5)
            notes.append(
                f"{self.unseen.total():,} labels are none of the model's classes ({names}): predicted, but left out of "
                "the scores"
            )
        return notes


class NewReader(Reader):
    """Reads some rows at a time and forgets the previous ones."""

    advice = "the model was trained without missing values"

    def __init__(self, config: NewOptions, files: list[Path], known: Known, needed: Sequence[str]) -> None:
        super().__init__(config, files)
        self.known, self.needed, self.counts = known, {*needed}, Counts()
        self.rate, self.only_labelled = known.steps_a_second, False
        self.labelled: bool | None = None  # have the first rows labels?
        if isinstance(known.input, Values):
            self.channels = known.channels(config), "training"
        self.sample = None
        if known.kind is not None:
            ending = next(ending for ending in arrays.ENDINGS if arrays.kind_of(ending) == known.kind)
            self.sample = FirstFile(ending, known.rate, known.signals, "training")
        self.code_of = {}
        if known.words and isinstance(known.input, Tokens):
            self.code_of = dict(zip(known.words, known.input.codes or (), strict=True)) | dict(known.codes)
        self._start()

    def chunks(self) -> Iterator[Split]:
        """(n,) rows in order; without targets where there is not a single label."""
        for batches in self._tables():
            for batch in batches:
                self._add(batch)
                enough = len(self.values) >= STEPS or self._rows >= ROWS
                if enough and self.config.kind != "long":
                    yield self._take()
        if self._rows:
            yield self._take()
        elif not self.counts.rows:
            raise ValueError(f"{self.files[0].name} has no rows")

    def _tables(self) -> Iterator[Iterator[Batch]]:
        for path in self.files:
            if path.suffix.lower() in FORMATS:
                with read_batches(path, self._select) as batches:
                    yield batches
            elif self.config.static_columns:
                raise ValueError(
                    f"{path.name} has no table, but the model takes static features "
                    f"({', '.join(self.config.static_columns)}); give a table that names the files beside them"
                )
            else:  # files that no table names
                names = [path.name] if path.is_file() else list(arrays.files_in(path))
                folder = path.parent if path.is_file() else path
                column = str(self.config.file_column)
                yield iter([Batch(folder / folder.name, range(1, len(names) + 1), {column: names})] if names else [])

    # ---------------------------------------------------------------------------------------------------- some rows

    def _start(self) -> None:
        self._rows, self.table = 0, {}
        self.blocks.clear()
        self.storage, self.scale = self.known.stored or (self.config.storage, FULL_SCALE)
        self.values = Steps(self.storage)
        self.first_file, self.words = self.sample, {}
        missing = self.config.missing_labels
        self.label_sets = SetEncoder(self.config.label_separator, "ignore" if missing == "refuse" else missing)
        self.encoders |= {name: NameEncoder() for name in self.encoders if name != "split"}
        self.encoders["label"] = NameEncoder(names=self.known.classes)

    def _as_stored(self, recording: Recording) -> NDArray[Any]:
        """As training's files are, if they are known, so that what is cut from equal recordings has equal sources."""
        small = self.config.continuous and self.known.stored is not None and self.storage.kind in "iu"
        if not small or (recording.steps.dtype, recording.scale) == (self.storage, self.scale):
            return super()._as_stored(recording)
        limits, (zero, full) = np.iinfo(self.storage), self.scale
        steps = scaled(recording.steps, recording.scale) * np.float32(full) + np.float32(zero)
        return np.rint(steps).clip(limits.min, limits.max).astype(self.storage)

    def _add(self, batch: Batch) -> None:
        self._rows += len(batch.lines)
        inputs = self._read_steps(batch) if self.config.kind == "long" else self._read_sequences(batch)
        for name, column in (inputs | self._read_roles("train", batch)).items():
            self.blocks[name].append(column)

    def _take(self) -> Split:
        """The rows read so far."""
        examples, known = self.examples(), self.known
        self.counts.notes += [note for note in examples.notes if "were cut after" not in note or not self.n_cut]
        self.counts.cut, self.notes = self.n_cut, []
        rows = replace(examples.rows, values=self._as_in_training(examples.rows))
        rows = replace(rows, targets=self._targets(rows, examples))
        if known.static:
            rows = replace(rows, static=self._static_features(examples))
        if known.times and rows.steps is None:
            self.counts.notes.append("no times are given; steps are taken to be as far apart as is usual in training")
            rows = replace(rows, steps=np.ones(len(rows.values), np.float32))
        self._check_tokens(rows, examples.place)
        _count_missing(self.counts, rows.values, known)
        self.counts.rows += len(rows)
        self._start()
        return rows

    def _static_features(self, examples: Examples) -> NDArray[np.float32]:
        """As training's columns have them."""
        shown = []
        for column in self.known.static:
            names, codes = examples.static[column.name]
            shown.append(column.features(names, codes, in_column(lambda i: place_of(examples, i), column.name)))
            for code in np.unique(codes[codes != IGNORED]).tolist():
                if column.categories is not None and names[code] not in column.categories:
                    self.counts.notes.append(
                        f"static column {column.name!r}: {names[code]!r} is no category of the training rows; it is "
                        "shown as none of them"
                    )
        return stacked(shown)

    def _as_in_training(self, rows: Split) -> NDArray[Any]:
        """The values in the unit of those that the mean and the deviation were computed of."""
        if not self.config.continuous:
            return rows.values
        values = rows.values if self.scale == FULL_SCALE else scaled(rows.values, self.scale)
        return in_training_units(values, self.known)

    def _targets(self, rows: Split, examples: Examples) -> NDArray[Any] | None:
        """Classes or labels, IGNORED where there is none or an unknown one; or numbers, NaN where there are none."""
        known, labels, targets = self.known, examples.labels, np.asarray(rows.targets)
        scored = np.asarray(rows.whole.targets)  # of recordings, whose windows each have the label
        if known.target is None:
            return None
        if isinstance(known.target, Labels):
            if targets.ndim == 1:  # sets of labels
                for code, times in zip(*np.unique(scored[scored != IGNORED], return_counts=True), strict=True):
                    for name in examples.label_sets.names(int(code)) - set(known.classes):
                        self.counts.unseen[name] += int(times)
                targets = examples.label_sets.matrix(known.classes)[targets]
            return targets if known_targets(targets).any() else None
        if isinstance(known.target, Reals):
            return targets if np.isfinite(targets).any() else None
        count = len(known.classes)
        for code, times in zip(*np.unique(scored[scored >= count], return_counts=True), strict=True):
            self.counts.unseen[labels[int(code)]] += int(times)
        targets = np.where(targets < count, targets, IGNORED)
        return targets if (targets != IGNORED).any() else None

    def _check_tokens(self, rows: Split, place: Any) -> None:
        """Count unknown tokens. Raises ValueError for one that the model has no number for."""
        input = self.known.input
        if not isinstance(input, Tokens):
            return
        self.counts.tokens += len(rows.values)
        if input.codes is not None:
            self.counts.unknown += int((input.ids(rows.values) == input.unknown).sum())
        elif int(rows.values.max()) >= input.vocab:
            at = int(np.argmax(rows.values >= input.vocab))
            row = max(0, int(np.searchsorted(rows.starts, at, side="right")) - 1)
            where = place(at if rows.per_step else row)
            raise ValueError(
                f"{where}, step {at - int(rows.starts[row]) + 1}: the token id {int(rows.values[at]):,} is beyond the "
                f"model's vocabulary, which goes from 0 to {input.vocab - 1:,}"
            )

    # ------------------------------------------------------------------------------------------- what training does

    def _select(self, names: list[str], file: str) -> list[str]:
        config, columns = self.config, list(self.known.columns)
        self.inputs = config.inputs
        if config.value_prefix is not None:
            self.inputs = columns or [name for name in names if config.has_prefix(name)]
            if not self.inputs:
                raise ValueError(f"{file} has no column that begins with {config.value_prefix!r}{list_names(names)}")
            surplus = [name for name in names if config.has_prefix(name) and name not in self.inputs]
            if surplus:
                self.counts.notes.append(
                    f"columns that training did not have are not used: {', '.join(map(show, surplus[:12]))}"
                )
        for name in config.others:
            if name == config.id_column and name not in names:
                advice = "" if config.kind == "long" else " (id_column= reads rows without ids)"
                raise ValueError(f"{file} has no column {name!r}{suggest(name, names)}{advice}")
        labels = [name for name in config.labels if name in names or name in self.needed]
        if len(labels) < len(config.labels):
            labels = []
        if self.labelled is None:
            self.labelled = bool(labels)
        return [*self.inputs, *labels, *config.others]

    def _read_roles(self, split: str, batch: Batch) -> Columns:
        config, n = self.config, len(batch.lines)
        columns: Columns = {
            "line": np.asarray(batch.lines, np.int64),
            "source": np.full(n, self._source(batch), np.int32),
            "split": np.zeros(n, np.int32),
            **self._read_static(batch),
        }
        if config.id_column is not None:
            place = batch.place(config.id_column)
            columns["id"] = self.encoders["id"].encode(batch.columns[config.id_column], place)
        if config.group_column is not None:
            place = batch.place(config.group_column)
            columns["group"] = self.encoders["group"].encode(batch.columns[config.group_column], place)
        names = [name for name in config.labels if name in batch.columns]
        if self.known.target is not None and names and config.label_at is not None and not config.per_step:
            lists = [(batch.columns[name], batch.place(name)) for name in names]
            return columns | {"label": read_label_lists(config, lists, self.encoders["label"], gaps=True)}
        if isinstance(self.known.target, Reals):
            empty = np.full((n, self.known.target.size), np.nan)
            numbers = [parse_numbers(batch.columns[name], batch.place(name), is_empty) for name in names]
            if numbers and len(numbers) != self.known.target.size:
                raise ValueError(f"the model answers {self.known.target.size} numbers, but {len(numbers)} are named")
            label = np.stack(numbers, axis=1) if numbers else empty
            partly = np.flatnonzero(np.isnan(label).any(axis=1) & ~np.isnan(label).all(axis=1))
            if len(partly) and not self.known.target.missing:
                row = batch.place(names[0])(int(partly[0]))
                raise ValueError(f"{row}: a row has all of its label columns or none; some cells are empty")
            return columns | {"label": label}
        if isinstance(self.known.target, Labels) and names:
            return columns | {"label": self._several_labels(batch, names, self.known.target.count)}
        if self.known.target is None or not names:
            return columns | {"label": np.full(n, IGNORED, np.int32)}
        label = self.encoders["label"].encode(batch.columns[names[0]], batch.place(names[0]), gaps=True)
        return columns | {"label": label}

    def _several_labels(self, batch: Batch, names: list[str], count: int) -> NDArray[Any]:
        """(n,) sets of labels, of one column; (n, K) of a column for each."""
        if self.config.label_column is not None:
            return self.label_sets.encode(batch.columns[names[0]], batch.place(names[0]))
        if len(names) != count:
            raise ValueError(f"the model answers {count} labels, but {len(names)} columns are named")
        return np.stack([parse_flags(batch.columns[name], batch.place(name), gaps=True) for name in names], axis=1)

    def _source(self, batch: Batch) -> int:
        return self.files.index(batch.path) if batch.path in self.files else 0

    def _read_steps(self, batch: Batch) -> Columns:
        channels = self.known.channels(self.asked)
        if isinstance(self.known.input, Values) and len(self.inputs) != channels:
            raise ValueError(f"{len(self.inputs)} value columns are named, but a step had {channels} in training")
        return super()._read_steps(batch)

    def _tokens(self, text: str) -> NDArray[Any]:
        if self.config.tokens != "words":
            return super()._tokens(text)
        return np.array([self.code_of.get(word, self.no_code) for word in split_words(text)], np.int32)

    @cached_property
    def no_code(self) -> int:
        """A code that no word has."""
        assert isinstance(self.known.input, Tokens)
        return 1 + max((0, *(self.known.input.codes or ()), *self.known.codes.values()))

    def _find_interval(self) -> float:
        """Times as multiples of training's interval, where the model was told them."""
        if "time" not in self.table:
            return 1.0
        apart = np.diff(self.table["time"], prepend=self.table["time"][:1])
        inner = np.ones(len(apart), bool)
        inner[np.flatnonzero(np.diff(self.table["id"], prepend=-1))] = False
        usual = self.known.interval
        if self.known.times:
            apart[~inner] = usual
            self.table["steps"] = (apart / usual).astype(np.float32)
        elif inner.any():
            low, high = float(apart[inner].min()), float(apart[inner].max())
            irregular = max(abs(low - usual), abs(high - usual)) > REGULAR * usual
            if irregular and self.config.resample is not None:
                raise ValueError(
                    f"times between steps are {low:g} to {high:g}, but {usual:g} in training, which are resampled; "
                    "give "
                    "rows of that rate"
                )
            if irregular:
                self.notes.append(
                    f"times between steps are {low:g} to {high:g}, but {usual:g} in training; this model is not "
                    "told them"
                )
        return usual

    def _check_rows(self) -> None:
        """Of rows that are answered one by one, none depends on another."""


def _count_missing(counts: Counts, values: NDArray[Any], known: Known) -> None:
    if known.gaps:
        counts.values += values.size
        counts.missing += int(np.isnan(values).sum())


def in_training_units(values: NDArray[Any], known: Known) -> NDArray[Any]:
    """Of numbers whose full scale is 1, what training's files would hold for them."""
    if known.scale == FULL_SCALE:
        return values
    zero, full = known.scale
    return np.asarray(values * np.float32(full) + np.float32(zero))


# -------------------------------------------------------------------------------------------------------------- arrays


class ArrayReader:
    """Rows of one array, (n, L) or (n, L, C), in .npy or .npz."""

    def __init__(self, path: Path, config: NewOptions, known: Known) -> None:
        self.path, self.known, self.counts, self.labelled = regular(path), known, Counts(), False
        self.config, array = config, config.array
        if path.suffix.lower() == ".npz":
            with path.open("rb") as file:
                self.array = arrays.from_archive(file, path.stat().st_size, array, path.name)
        else:
            self.array = arrays.mapped(path)

    def chunks(self) -> Iterator[Split]:
        array, input, name = self.array, self.known.input, self.path.name
        if self.known.static:
            columns = ", ".join(column.name for column in self.known.static)
            raise ValueError(f"{name} holds no static features, which the model takes ({columns}); give a table")
        shape = " x ".join(f"{n:,}" for n in array.shape)
        if array.dtype.kind not in "iufb":
            raise ValueError(f"{name} holds {array.dtype}; numbers are expected")
        channels = self.known.channels(self.config)
        if array.ndim == 2 and channels == 1:
            array = array if isinstance(input, Tokens) else array[..., None]
        expected = 2 if isinstance(input, Tokens) else 3
        if array.ndim != expected or (expected == 3 and array.shape[2] != channels):
            wanted = "(rows, steps) of token ids" if expected == 2 else f"(rows, steps, {channels})"
            wanted = "(rows, steps)" if expected == 3 and channels == 1 else wanted
            raise ValueError(f"{name} holds an array of {shape or 'one number'}; {wanted} is expected")
        if not array.size:
            raise ValueError(f"{name} holds an array of {shape}, which has no steps")
        n, length, most = *array.shape[:2], self.config.max_length
        cut = most is not None and length > most and not self.config.transforms  # transforms cut after them
        if cut and not self.config.truncate:
            raise ValueError(self.config.too_long(f"{name}, row 1", length))
        if cut:
            array, length = array[:, :most], most
            self.counts.cut = n
        at_once = max(1, min(ROWS, STEPS // length))
        for first in range(0, n, at_once):
            rows = np.ascontiguousarray(array[first : first + at_once])
            yield self._split(rows.reshape(len(rows) * length, *rows.shape[2:]), first, length)

    def _split(self, values: NDArray[Any], first: int, length: int) -> Split:
        input, name = self.known.input, self.path.name
        n = len(values) // length
        if isinstance(input, Values):
            wrong = ~(np.abs(values.astype(np.float64)) < HUGE)
            what = "is not a finite number below 1e18"
            if self.known.gaps:
                wrong &= ~np.isnan(values)
            elif np.isnan(values).any():
                what += "; the model was trained without missing values"
            values = in_training_units(values.astype(np.float32), self.known)
        elif input.codes is None:
            wrong = (values != np.floor(values)) | (values < 0) | (values >= input.vocab)
            what = f"is no token id of the model's vocabulary, which goes from 0 to {input.vocab - 1:,}"
        else:
            wrong, what = (values != np.floor(values)) | (values < 0), "is no code of a token"
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            row, step = divmod(int(at[0]), length)
            raise ValueError(f"{name}, row {first + row + 1}, step {step + 1}: {values[at]} {what}")
        if isinstance(input, Tokens):
            values = values.astype(np.int64)
            self.counts.tokens += len(values)
            if input.codes is not None:
                self.counts.unknown += int((input.ids(values) == input.unknown).sum())
        _count_missing(self.counts, values, self.known)
        self.counts.rows += n
        starts = np.arange(n, dtype=np.int64) * length
        per_step = self.known.target is not None and self.known.target.per_step
        steps = np.ones(len(values), np.float32) if self.known.times else None
        ids = np.arange(first + 1, first + n + 1)
        rows = Split(values, starts, starts + length, None, ids, per_step=per_step, steps=steps)
        rows = transform_rows(self.config, rows, self.known.steps_a_second, [f"{name}, row {i}" for i in ids.tolist()])
        return rows if self.config.score == "recording" else replace(rows, recordings=None)


# --------------------------------------------------------------------------------------------------------------- files


def open_rows(config: NewOptions, known: Known, needed: Sequence[str] = ()) -> NewReader | ArrayReader:
    """A reader of config.path: a table, a folder of tables, an array, or, where files are rows, sounds and arrays.

    Label columns that are `needed` must be present. Raises OSError or ValueError, here or while rows are read.
    """
    path = config.path
    assert path is not None
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}")
    ending = path.suffix.lower()
    if not path.is_dir():
        if ending in ARRAYS:
            return ArrayReader(path, config, known)
        file = config.file_column is not None and ending in arrays.ENDINGS
        if ending not in FORMATS and not file:
            advice = ADVICE.get(ending, f"its name should end in one of {', '.join((*FORMATS, *ARRAYS))}")
            raise ValueError(f"{path} is not read: {advice}")
        return NewReader(config, [regular(path)], known, needed)
    inside = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    tables = [regular(file) for file in inside if file.suffix.lower() in FORMATS]
    if not tables and config.file_column is None:
        names = list_names([file.name for file in inside])
        raise ValueError(f"the folder {path} has no table{names} (formats: {', '.join(FORMATS)})")
    return NewReader(config, tables or [path], known, needed)


def read_unlabelled(
    config: Options,
    reading: Mapping[str, Any],
    codes: Mapping[str, int],
    stored: tuple[np.dtype[Any], tuple[float, float]],
    path: Path,
    data: TaskData,
) -> Split:
    """All rows of a file or folder, read as those of a task were, without labels and with their groups; `reading` is
    what the task says about its own rows, `codes` has its words, those of no training row included, and `stored` is the
    type and the scale of what its files hold. Raises OSError or ValueError."""
    left_out = {"path", "hub", "hub_config", "revision", "split_column"}
    left_out |= {"label_column", "label_columns", "label_at", "label_rate", "per_step"}
    if config.kind != "long":
        left_out.add("id_column")
    options = {key: value for key, value in config.model_dump().items() if key not in left_out}
    files = reading["files"]
    known = Known(
        input=data.input,
        target=None,
        interval=data.interval / float(plan(config, reading.get("rate")).apart),
        words=tuple(reading["words"]),
        codes=codes,
        columns=tuple(reading["inputs"]),
        times=reading["times"],
        kind=files["kind"],
        rate=files["rate"],
        signals=tuple(files["signals"]),
        scale=(files["scale"][0], files["scale"][1]),
        stored=stored,
        static=tuple(map(StaticColumn.of, reading.get("static", ()))),
        steps_a_second=reading.get("rate"),
    )
    new = NewOptions(**{**options, "path": path, "unlisted": "ignore" if config.file_column else "refuse"})
    return Split.joined(list(open_rows(new, known).chunks()))
