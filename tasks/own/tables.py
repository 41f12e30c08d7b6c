"""Readers of tables: CSV, TSV, JSON lines, Parquet, and series in .ts; as columns of some rows at a time.

Errors name file, line (in Parquet: row, from 1) and column. Little more than one batch is in memory; a line's length is
limited before it is read. Text is not read by pyarrow, whose rows of CSV have no line numbers and whose columns of JSON
have one type.
"""

import contextlib
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spt.tasks.own.limits import SMALL
from spt.tasks.own.parsing import Cells, Place, show, suggest
from spt.tasks.own.series import read_series

DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (*DELIMITERS, ".jsonl", ".ndjson", ".parquet", ".ts")
MAX_LINE = 2**25  # characters of a line, or of a cell of several lines: four million numbers
BATCH = 2**10  # rows of text: more live objects slow Python down
BATCH_SIZE = 2**21  # characters and cells of a batch
PARQUET_BATCH = 2**16  # rows
PARQUET_BYTES = 2**24  # of a batch, about
PARQUET_RATIO = 1000  # of a file, at most: bytes that a byte unpacks to, and cells that it stands for
PARQUET_BUFFER = 2**20  # bytes of a column that are read at once, however large a row group is
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of such bytes

Select = Callable[[list[str], str], list[str]]  # (a file's columns, its name for a message) -> the columns to read
Record = tuple[int, list[str], list[Any], int]  # line, columns, cells, characters or so


class Batch(NamedTuple):
    """Some rows of a table."""

    path: Path
    lines: Sequence[int]  # each row's number
    columns: dict[str, Cells]

    def place(self, column: str | None) -> Place:
        """Where the i-th row, or its cell in this column, is."""
        kind, tail = _row_kind(self.path), f", column {column}" if column is not None else ""
        return lambda i: f"{kind} {self.lines[i]}{tail}"


def locate(path: Path, line: int) -> str:
    return f"{_row_kind(path)} {line}"


def _row_kind(path: Path) -> str:
    return f"{path.name}, {'row' if path.suffix.lower() == '.parquet' else 'line'}"


@contextlib.contextmanager
def read_batches(path: Path, select: Select) -> Iterator[Iterator[Batch]]:
    """The selected columns of a file, some rows at a time; the file is open within."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty")
    ending = path.suffix.lower()
    if ending == ".parquet":
        with contextlib.closing(_parquet_batches(path, select)) as batches:
            yield batches
        return
    if ending in DELIMITERS:
        read = _delimited(path, DELIMITERS[ending], select)
    else:
        read = _series(path, select) if ending == ".ts" else _json_lines(path, select)
    with contextlib.closing(read) as records:
        yield _batches(path, records)


def _batches(path: Path, records: Iterator[Record]) -> Iterator[Batch]:
    """Consecutive records of the same columns together."""
    lines: list[int] = []
    rows: list[list[Any]] = []
    names: list[str] = []
    size = 0
    for line, columns, cells, length in records:
        if rows and (len(rows) == BATCH or size > BATCH_SIZE or columns is not names):
            yield Batch(path, lines, dict(zip(names, zip(*rows, strict=True), strict=True)))
            lines, rows, size = [], [], 0
        names = columns
        lines.append(line)
        rows.append(cells)
        size += length
    if rows:
        yield Batch(path, lines, dict(zip(names, zip(*rows, strict=True), strict=True)))


def _select(names: list[str], select: Select, file: str) -> list[str]:
    """The columns to read, each of which the file has once."""
    chosen, times = select(names, file), Counter(names)
    for name in chosen:
        if times[name] > 1:
            raise ValueError(f"{file} has {times[name]} columns named {name!r}")
        if not times[name]:
            raise ValueError(f"{file} has no column {name!r}{suggest(name, names)}")
    return chosen


# ---------------------------------------------------------------------------------------------------------------- text


def _delimited(path: Path, delimiter: str, select: Select) -> Generator[Record, None, None]:
    """The rows of CSV or TSV, each with the line that it begins in; blank lines are left out."""
    header: list[str] = []
    names: list[str] = []
    line, end = 1, 0  # the lines that a row begins and ends in
    limit = csv.field_size_limit(MAX_LINE)
    lines = _lines(path, "")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            line, end = end + 1, reader.line_num
            if not cells:
                continue
            if not header:
                header, names = cells, _select(cells, select, path.name)
                picks = [header.index(name) for name in names]
            else:
                if len(cells) != len(header):
                    raise ValueError(f"{locate(path, line)} has {len(cells)} cells, the header {len(header)}")
                yield line, names, [cells[i] for i in picks], sum(map(len, cells), len(cells))
    except csv.Error as error:
        raise ValueError(
            f"{locate(path, end + 1)}: {error}; a cell with quotes, line breaks or {delimiter!r} stands in quotes, and "
            "quotes in it are doubled"
        ) from None
    finally:
        csv.field_size_limit(limit)
        lines.close()  # not whenever the error that ended this is forgotten
    if not header:
        raise ValueError(f"{path.name} is empty")


def _json_lines(path: Path, select: Select) -> Generator[Record, None, None]:
    keys: set[str] | None = None
    names: list[str] = []
    with contextlib.closing(_lines(path, "\n")) as lines:
        for line, text in enumerate(lines, 1):
            if not text.strip():
                continue
            place = locate(path, line)
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not an object in JSON ({str(error).partition(':')[0]})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place}: {show(row)} is not an object with a key for each column")
            if row.keys() != keys:
                keys, names = set(row), _select(list(row), select, place)
            yield line, names, [row[name] for name in names], len(text)
    if keys is None:
        raise ValueError(f"{path.name} is empty")


def _series(path: Path, select: Select) -> Generator[Record, None, None]:
    names: list[str] | None = None
    with contextlib.closing(_lines(path, "\n")) as lines:
        for line, columns, cells in read_series(lines, path):
            if names is None:
                names = _select(columns, select, path.name)
                picks = [columns.index(name) for name in names]
            yield line, names, [cells[i] for i in picks], cells[0].size
    if names is None:
        raise ValueError(f"{path.name} has no series behind @data")


def _lines(path: Path, newline: str) -> Generator[str, None, None]:
    """The lines of a text, of limited length; what is not UTF-8 is refused."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), ""), 1):
            if len(line) > MAX_LINE:
                raise ValueError(
                    f"{locate(path, number)} has more than {MAX_LINE:,} characters; cut such a sequence, or write one "
                    "step a row (layout: long) or one file a sequence (file_column)"
                )
            foreign = None if line.isascii() else NOT_UTF8.search(line)
            if foreign is not None:
                byte = ord(foreign[0]) - 0xDC00
                raise ValueError(f"{locate(path, number)}: byte {byte:#04x} is not UTF-8; save the file as UTF-8")
            if "\0" in line:
                raise ValueError(f"{locate(path, number)} has a NUL byte, so it is no UTF-8; save the file as UTF-8")
            yield line


# ------------------------------------------------------------------------------------------------------------- Parquet


def _parquet_batches(path: Path, select: Select) -> Generator[Batch, None, None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=PARQUET_BUFFER) as file:
            names, meta = _select(file.schema_arrow.names, select, path.name), file.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            _check_unpacked(path, max(size, _cell_count(meta)))
            count = max(1, min(PARQUET_BATCH, PARQUET_BYTES * meta.num_rows // max(1, size)))
            first = 1
            for batch in file.iter_batches(count, columns=names):
                columns = {name: _cells(batch.column(name), f"{path.name}, column {name}") for name in names}
                yield Batch(path, range(first, first + len(batch)), columns)
                first += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path.name} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from None


def _cell_count(meta: Any) -> int:
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    return sum(group.column(i).num_values for group in groups for i in range(group.num_columns))


def _check_unpacked(path: Path, unpacked: int) -> None:
    """Raise ValueError for a file that is small because it repeats itself without end, so would fill the memory."""
    packed = path.stat().st_size
    if unpacked > max(SMALL, PARQUET_RATIO * packed):
        raise ValueError(f"{path.name} unpacks to {unpacked:,} bytes or cells from {packed:,} bytes; it is not used")


def _cells(column: Any, place: str) -> Cells:
    """Numbers without gaps as an array, a list of numbers or of equally long lists of numbers as one, else objects."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def is_number(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

    def is_list(kind: Any) -> bool:
        return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))

    if is_number(column.type) and not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if is_list(column.type):
        items, width = column.flatten(), 0
        if is_list(items.type) and not items.null_count:
            widths = pc.list_value_length(items).unique().to_pylist()
            if len(widths) == 1 and widths[0]:
                items, width = items.flatten(), widths[0]
        if is_number(items.type):
            lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            steps = items.to_numpy(zero_copy_only=False)
            rows = np.split(steps.reshape(-1, width) if width else steps, np.cumsum(lengths)[:-1])
            return [row if there else None for row, there in zip(rows, column.is_valid().to_pylist(), strict=False)]
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError) as error:  # a text that is not UTF-8, a time beyond Python's
        raise ValueError(f"{place}: {error}") from None
