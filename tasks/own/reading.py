"""What both layouts read in a table: the labels, ids, groups and splits of its rows, as columns of numbers."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.assembly import Examples
from spt.tasks.own.discovery import parse_split
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import NameEncoder, list_names, parse_numbers
from spt.tasks.own.splits import NAMES, hash_key
from spt.tasks.own.tables import Batch, locate, read_batches

Columns = dict[str, NDArray[Any]]  # of equal length, a row each


class TableReader:
    """Reads, checks and converts the tables' rows, some at a time. A layout adds how inputs are read."""

    def __init__(self, config: Options, files: list[Path]) -> None:
        self.config, self.files = config, files
        self.inputs: list[str] = []  # columns, in the first file's order
        self.names = {
            "id": NameEncoder(),
            "group": NameEncoder(),
            "label": NameEncoder(),
            "split": NameEncoder(parse_split),
        }
        for name in NAMES:
            self.names["split"].add(name)
        self._read: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)

    def read(self, split: str, path: Path) -> None:
        rows = 0
        for batch in read_batches(path, self._select):
            rows += len(batch.lines)
            for name, column in {**self.read_inputs(batch), **self._read_roles(split, batch)}.items():
                self._read[name].append(column)
        if not rows:
            raise ValueError(f"{path.name} has a header but no rows")

    def read_inputs(self, batch: Batch) -> Columns:
        raise NotImplementedError

    def examples(self) -> Examples:
        raise NotImplementedError

    def _select(self, names: list[str], file: str) -> list[str]:
        self.inputs = self._select_inputs(names, file)
        return [*self.inputs, *self.config.labels, *self.config.others]

    def _select_inputs(self, names: list[str], file: str) -> list[str]:
        """A file's input columns; with a prefix, those that the first file has."""
        config = self.config
        if config.value_prefix is None:
            return config.inputs
        prefixed = [name for name in names if config.has_prefix(name)]
        if not prefixed:
            raise ValueError(f"{file} has no column that begins with {config.value_prefix!r}{list_names(names)}")
        surplus = sorted(set(prefixed) - set(self.inputs or prefixed))
        if surplus:
            raise ValueError(f"{file} has a column {surplus[0]!r} that the rows before do not have")
        return self.inputs or prefixed

    def _read_roles(self, split: str, batch: Batch) -> Columns:
        config, n = self.config, len(batch.lines)
        columns: Columns = {
            "line": np.asarray(batch.lines, np.int64),
            "source": np.full(n, self.files.index(batch.path), np.int32),
        }
        for name in ("id", "group", "split"):
            column = self.column_of(name)
            if column is not None:
                columns[name] = self.names[name].encode(batch.columns[column], batch.place(column))
        if config.split_column is None:
            columns["split"] = np.full(n, NAMES.index(split), np.int32)
        labels = [(batch.columns[name], batch.place(name), config.per_step) for name in config.labels]
        if config.target == "real":
            columns["label"] = np.stack([parse_numbers(*column) for column in labels], axis=1)
            gaps = np.isnan(columns["label"])
            partly = np.flatnonzero(gaps.any(axis=1) & ~gaps.all(axis=1))
            if len(partly):
                place = batch.place(config.labels[0])(int(partly[0]))
                raise ValueError(f"{place}: a step has all of its label columns or none; some cells are empty")
        else:
            columns["label"] = self.names["label"].encode(*labels[0])
        return columns

    def column_of(self, name: str) -> str | None:
        config = self.config
        columns = {"id": config.id_column, "group": config.group_column, "split": config.split_column}
        return {**columns, "label": config.labels[0], "file": config.file_column}[name]

    # --------------------------------------------------------------------------------------------- when all are read

    def table(self) -> Columns:
        """All rows. What was read is given up."""
        return {name: np.concatenate(self._read.pop(name)) for name in list(self._read)}

    def place(self, table: Columns, row: int) -> str:
        return locate(self.files[int(table["source"][row])], int(table["line"][row]))

    def name(self, table: Columns, kind: str, row: int) -> str:
        """A row's id, group or file, quoted."""
        return repr(self.names[kind].names[table[kind][row]])

    def keys(self, name: str) -> NDArray[np.uint64]:
        """Of each id or group, for the draw of splits."""
        names = self.names[name].names
        return np.array([hash_key(unit.encode(), self.config.split_seed) for unit in names], np.uint64)

    def check_once(self, table: Columns, name: str) -> None:
        """Raise ValueError when an id, or a file, stands in two rows."""
        first = _first_rows(table[name])
        again = np.flatnonzero(first != np.arange(len(first)))
        if len(again):
            row = int(again[0])
            raise ValueError(
                f"{self.place(table, row)}, column {self.column_of(name)}: the {name} {self.name(table, name, row)} "
                f"stands in {self.place(table, int(first[row]))} already"
            )

    def check_same(self, table: Columns, unit: str, what: str, advice: str) -> None:
        """Raise ValueError when rows of one id or group differ in their split, group or label."""
        if unit not in table or what not in table:
            return
        first = _first_rows(table[unit])
        differ = table[what] != table[what][first]
        rows = np.flatnonzero(differ if differ.ndim == 1 else differ.any(axis=1))
        if len(rows):
            row = int(rows[0])
            column = self.column_of(what) or self.column_of(unit)
            raise ValueError(
                f"{self.place(table, row)}, column {column}: the {unit} {self.name(table, unit, row)} "
                f"has another {what} than in {self.place(table, int(first[row]))}; {advice}"
            )


def _first_rows(codes: NDArray[np.int32]) -> NDArray[np.int64]:
    """(n,) The first row that has each row's code."""
    first = np.empty(int(codes.max()) + 1, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last one written stays
    return first[codes]
