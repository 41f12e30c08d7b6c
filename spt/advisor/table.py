"""What each column of the user's tables holds: its kind, how many values, how long; whatever the order of rows."""

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spt.errors import DataError, UsageError
from spt.tasks.own import arrays, discovery
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import MISSING, is_missing
from spt.tasks.own.tables import FORMATS, read_batches

Kind = Literal["number", "text", "list", "file", "time", "empty", "mixed"]
PLAIN: set[str] = {"number", "text", "time", "file"}  # cells that stand side by side in a column of text
DATE = re.compile(r"\d{4}-\d\d-\d\d")
MANY, LOOKED_AT = 64, 10_000  # different entries of lists, and entries of one that are looked at
NUMBERS = re.compile(r"([-+.\d]\S*|na\S*)\s+([-+.\d]|na)", re.I)  # how a list begins that is written with blanks


@dataclass
class Column:
    """Of the training rows, or of all where no split is named."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)  # texts that are no finite number, counted as empty: nan
    values: dict[Any, int] = field(default_factory=dict)  # number or text -> code
    codes: "array[int]" = field(default_factory=lambda: array("i"))  # of every row; -1: empty
    lengths: "array[int]" = field(default_factory=lambda: array("q"))  # of lists, and of texts in characters
    whole: bool = True  # are all numbers integers?
    words: int = 0
    contents: set[str | bytes] = field(default_factory=set)  # of lists, the first two that differ
    entries: set[Any] = field(default_factory=set)  # of lists, different ones, up to MANY and a list more
    numeric: bool | None = None  # are all entries seen numbers? None: none was seen, or they are lists
    repeats: bool = False  # does a list have an entry twice?

    def pad(self, n: int) -> None:
        """Rows up to n do not have the column, as can be in JSON."""
        missing = n - len(self.codes)
        self.codes.extend([-1] * missing)
        self.kinds["empty"] += missing

    def add(self, cells: Sequence[Any], records: Set[str] = frozenset()) -> None:
        for cell in cells:
            kind, value = _read(cell)
            if records and str(cell).strip() in records:
                kind, value = "file", str(cell)
            self.kinds[kind] += 1
            if kind == "empty" and value is not None:
                self.gaps[value] += 1
            if kind == "list":
                self.lengths.append(value)
                self.codes.append(-1)
                if len(self.entries) <= MANY:
                    self._look_into(cell)
                if len(self.contents) < 2:
                    self.contents.add(cell.tobytes() if isinstance(cell, np.ndarray) else str(cell))
                continue
            if kind == "number":
                self.whole = self.whole and float(value).is_integer()
            elif kind == "text":
                self.lengths.append(len(value))
                self.words += value.count(" ") + 1
                value = value if len(value) <= 200 else hash(value)
            self.codes.append(-1 if kind == "empty" else self.values.setdefault(value, len(self.values)))

    def _look_into(self, cell: Any) -> None:
        """Note what a list holds."""
        steps = cell.tolist() if isinstance(cell, np.ndarray) else cell
        if isinstance(steps, str):
            steps = json.loads(steps) if steps.lstrip().startswith("[") else steps.split()
        known = [step for step in steps if isinstance(step, int | float | str) and step == step and step != ""]
        if known:
            self.numeric = self.numeric is not False and all(_read(step)[0] == "number" for step in known[:MANY])
            self.entries.update(known[:LOOKED_AT])
            self.repeats = self.repeats or len(set(known[:LOOKED_AT])) < len(known[:LOOKED_AT])

    @property
    def in_time(self) -> bool:
        """Are the lists' entries measured one after the other, not a set of names?"""
        if self.repeats or not self.numeric:
            return self.repeats
        return len(self.entries) > MANY or not all(float(entry).is_integer() for entry in self.entries)

    @cached_property
    def kind(self) -> Kind:
        kinds = {kind for kind, count in self.kinds.items() if count and kind != "empty"}
        if not kinds:
            return "empty"
        if len(kinds) == 1:
            return kinds.pop()  # type: ignore[return-value]
        if kinds == {"number", "text"} and not self._texts - MISSING:
            return "number"
        return "text" if kinds <= PLAIN else "mixed"

    @cached_property
    def _texts(self) -> set[str]:
        """Its texts as `MISSING` has them."""
        return {str(value).strip().lower() for value in self.values if not isinstance(value, float)}

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def empty(self) -> int:
        """Cells without a value; of numbers, also those with a text that says so."""
        return self.kinds["empty"] + (self.kinds["text"] if self.kind == "number" else 0)

    @property
    def constant(self) -> bool:
        return self.rows > 1 and not self.empty and len(self.values) + len(self.contents) == 1

    @property
    def distinct(self) -> int:
        return len(self.values)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        return np.frombuffer(self.codes, np.int32).astype(np.int64)

    @cached_property
    def key(self) -> str:
        """The name as it is compared: lower case, words joined by underscores."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name.strip())
        return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")

    def counts(self, rows: "NDArray[np.int64] | slice" = slice(None)) -> dict[str, int]:
        """How often each value occurs, the most frequent first."""
        codes = self.array[rows]
        counts = np.bincount(codes[codes >= 0], minlength=len(self.values)).tolist()
        named = [(_show(value), counts[code]) for value, code in self.values.items() if counts[code]]
        return dict(sorted(named, key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class Table:
    """The columns of the user's rows."""

    columns: dict[str, Column]
    rows: int
    doubled: tuple[str, ...] = ()  # names that stand twice
    split_by_files: bool = False  # are there files of several splits?
    files: tuple[tuple[str, Path], ...] = ()  # with their splits

    def crosses(self, name: str) -> bool:
        """Do values of this column stand in files of two splits?"""
        seen: dict[Any, str] = {}
        for split, path in self.files if self.split_by_files else ():
            column = _profile([path], only=name).columns.get(name)
            for value in column.values if column else ():
                if seen.setdefault(value, split) != split:
                    return True
        return False

    def names_files(self, column: Column) -> bool:
        """Is the first file that this column names there?"""
        first = str(next(iter(column.values), ""))
        folders = {path.parent for _, path in self.files}
        return any((folder / arrays.with_ending(folder, first)).is_file() for folder in folders)


def find_files(path: Path) -> list[tuple[str, Path]]:
    """The tables that DATA names, with their splits. Raises DataError."""
    try:
        tables = single_table(path)
        try:
            return discovery.find_tables(Options(path=tables or path, text_column="a", label_column="b"), path)
        except ValueError:
            if not path.is_dir():
                raise
            return discovery.find_tables(Options(path=path, file_column="a", label_column="b"), path)
    except ValueError as error:
        text = str(error)
        if path.is_dir() and any(next(path.rglob(f"*{ending}"), None) for ending in arrays.ENDINGS):
            text += (
                "; a folder of sounds or arrays needs a table labels.csv with a file's name and its label in each row"
            )
        raise DataError(text) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def single_table(path: Path) -> Path | None:
    """The only table of a folder, whatever its name is."""
    if not path.is_dir():
        return None
    found = [file for file in path.iterdir() if file.suffix.lower() in FORMATS and file.is_file()]
    return found[0] if len(found) == 1 and found[0].stem.lower() not in ("train", *discovery.LABELS) else None


def read_table(path: Path) -> Table:
    """What the training files hold, or the only file. Raises DataError for what cannot be read."""
    files = find_files(path)
    table = _profile([file for split, file in files if split == "train"])
    if not table.rows:
        raise DataError(f"{path.name} has a header but no rows")
    several = len({split for split, _ in files}) > 1
    return Table(table.columns, table.rows, table.doubled, several, tuple(files))


def _profile(files: Sequence[Path], only: str | None = None) -> Table:
    columns: dict[str, Column] = {}
    doubled: set[str] = set()

    def select(names: list[str], file: str) -> list[str]:
        times = Counter(names)
        doubled.update(name for name in times if times[name] > 1)
        return [name for name in times if times[name] == 1 and only in (None, name)]

    rows = 0
    for file in files:
        records = {path.stem for path in file.parent.glob(f"*{arrays.RECORD}")}  # WFDB names them without an ending
        try:
            with read_batches(file, select) as batches:
                for batch in batches:
                    for name, cells in batch.columns.items():
                        column = columns.setdefault(name, Column(name))
                        column.pad(rows)
                        column.add(cells.tolist() if isinstance(cells, np.ndarray) else cells, records)
                    rows += len(batch.lines)
        except ValueError as error:
            raise DataError(str(error)) from None
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    for column in columns.values():
        column.pad(rows)
    return Table(columns, rows, tuple(sorted(doubled)))


def known(table: Table, name: str, option: str) -> Column:
    """The column of this name. Raises UsageError."""
    if name in table.doubled:
        raise UsageError(f"{option} {name}: two columns have this name; rename one")
    if name not in table.columns:
        raise UsageError(f"{option} {name}: there is no such column; there: {', '.join(list(table.columns)[:20])}")
    return table.columns[name]


def _read(cell: Any) -> tuple[str, Any]:
    """A cell's kind, and its value: of lists, the length; of an empty one, the text that says so."""
    if isinstance(cell, list | np.ndarray):
        return "list", len(cell)
    if isinstance(cell, bool):
        return "text", str(cell).lower()
    if isinstance(cell, int | float):
        return ("empty", None) if cell != cell else ("number", float(cell))
    if isinstance(cell, date | datetime):
        return "time", str(cell)
    if isinstance(cell, str):
        return _read_text(cell)
    return ("empty", None) if cell is None else ("mixed", repr(cell)[:200])


def _read_text(cell: str) -> tuple[str, Any]:
    text = cell.strip()
    if not text:
        return "empty", None
    if text[0] in "[-+.0123456789nNiI":
        if text[0] == "[":
            try:
                return "list", len(json.loads(text))
            except (ValueError, RecursionError, TypeError):
                return "text", cell
        try:
            number = float(text)
            return ("number", number) if math.isfinite(number) else ("empty", text)
        except ValueError:
            pass
        if NUMBERS.match(text):
            try:
                steps = [float("nan") if is_missing(step) else float(step) for step in text.split()]
                if not all(map(math.isnan, steps)):
                    return "list", len(steps)
            except ValueError:
                pass
        if DATE.match(text):
            try:
                return "time", str(datetime.fromisoformat(text))
            except ValueError:
                pass
    return ("file" if text.lower().endswith(arrays.ENDINGS) else "text"), cell


def _show(value: Any) -> str:
    """Two values never look alike: they are keys."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else str(value)
