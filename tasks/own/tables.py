"""Readers of tables: CSV, TSV, JSON lines, Parquet; row by row, or as columns of some rows at a time.

Complaints name file, line (in Parquet: row, from 1) and column. Little more than one row, or one batch, is in memory;
a line's length is limited before it is read.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.cells import Cells, nearest, show

DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (*DELIMITERS, ".jsonl", ".ndjson", ".parquet")
MAX_LINE = 2**25  # characters of a line, or of a cell of several lines: four million numbers
BATCH = 2**10  # rows of text: more live objects slow Python down
CELLS = 2**18  # of a batch
ARRAYS = 2**16  # rows of Parquet

Choose = Callable[[list[str], str], list[str]]  # (a file's columns, its name for a message) -> the columns wanted
Rows = Iterator[tuple[int, list[Any]]]  # (line or row number, the wanted cells)
Record = tuple[int, list[str]]


class Batch(NamedTuple):
    lines: Sequence[int]  # each row's number
    columns: list[Cells]  # the wanted ones


def where(path: Path, line: int) -> str:
    return f"{path.name}, {'row' if path.suffix.lower() == '.parquet' else 'line'} {line}"


def rows(path: Path, choose: Choose) -> Rows:
    """Every row of a file."""
    _check_size(path)
    ending = path.suffix.lower()
    if ending == ".parquet":
        return _parquet_rows(path, choose)
    return _delimited_rows(path, DELIMITERS[ending], choose) if ending in DELIMITERS else _json_lines(path, choose)


def batches(path: Path, choose: Choose) -> Iterator[Batch]:
    """The same, some thousand rows at a time."""
    _check_size(path)
    ending = path.suffix.lower()
    if ending == ".parquet":
        return (batch for _, batch in _parquet_batches(path, choose))
    return _delimited_batches(path, DELIMITERS[ending], choose) if ending in DELIMITERS else _json_batches(path, choose)


def header(path: Path) -> list[str]:
    """A file's columns; of JSON lines, those of the first row."""
    found: list[str] = []

    def all_of(names: list[str], file: str) -> list[str]:
        found[:] = found or names
        return []

    for _ in rows(path, all_of):
        break
    return found


def wanted(names: list[str], choose: Choose, file: str) -> list[str]:
    """The columns that are chosen, each of which stands there once."""
    chosen, times = choose(names, file), Counter(names)
    for name in chosen:
        if times[name] > 1:
            raise ValueError(f"{file} has {times[name]} columns named {name!r}")
        if not times[name]:
            raise ValueError(f"{file} has no column {name!r}{nearest(name, names)}")
    return chosen


def _check_size(path: Path) -> None:
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty")


# --------------------------------------------------------------------------------------------------------- CSV and TSV


def _delimited_rows(path: Path, delimiter: str, choose: Choose) -> Rows:
    records = _records(path, delimiter)
    _, names = next(records)
    picks = _picks(names, choose, path)
    for line, cells in records:
        yield line, [cells[i] for i in picks]


def _delimited_batches(path: Path, delimiter: str, choose: Choose) -> Iterator[Batch]:
    records = _records(path, delimiter)
    _, names = next(records)
    picks = _picks(names, choose, path)
    size = max(1, min(BATCH, CELLS // len(names)))
    lines: list[int] = []
    kept: list[list[str]] = []
    for line, cells in records:
        lines.append(line)
        kept.append(cells)
        if len(kept) == size:
            columns = list(zip(*kept, strict=True))
            yield Batch(lines, [columns[i] for i in picks])
            lines, kept = [], []
    if kept:
        columns = list(zip(*kept, strict=True))
        yield Batch(lines, [columns[i] for i in picks])


def _picks(names: list[str], choose: Choose, path: Path) -> list[int]:
    place = {name: i for i, name in enumerate(names)}
    return [place[name] for name in wanted(names, choose, path.name)]


def _records(path: Path, delimiter: str) -> Iterator[Record]:
    """The header and the rows, each with the line that it begins in; blank lines are left out."""
    before = csv.field_size_limit(MAX_LINE)
    width = 0
    start = 1  # the line that a row begins in
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_lines(file, path), delimiter=delimiter, strict=True)
            for cells in reader:
                line, start = start, reader.line_num + 1
                if not cells:
                    continue
                width = width or len(cells)
                if len(cells) != width:
                    raise ValueError(f"{where(path, line)} has {len(cells)} cells, the header {width}")
                yield line, cells
    except csv.Error as error:
        raise ValueError(
            f"{where(path, start)}: {error}; a cell with quotes, line breaks or {delimiter!r} stands in quotes, and "
            "quotes in it are doubled"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(_not_utf8(path)) from None
    finally:
        csv.field_size_limit(before)
    if not width:
        raise ValueError(f"{path.name} is empty")


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines, of limited length and without NUL."""
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), ""), 1):
        if "\0" in line:
            raise ValueError(f"{where(path, number)} has a NUL byte, so it is no UTF-8 text; save the file as UTF-8")
        if len(line) > MAX_LINE:
            raise ValueError(_endless(path, number))
        yield line


def _endless(path: Path, number: int) -> str:
    return (
        f"{where(path, number)} has more than {MAX_LINE:,} characters; cut such a sequence, or write one step a row "
        "(layout: long) or one file a sequence (file_column)"
    )


def _not_utf8(path: Path) -> str:
    """The sentence for the first line that is not."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{where(path, number)}: byte {line[error.start]:#04x} is not UTF-8; save the file as UTF-8"
    return f"{path.name} is not UTF-8; save it as UTF-8"


# ---------------------------------------------------------------------------------------------------------- JSON lines


def _json_lines(path: Path, choose: Choose) -> Rows:
    keys: set[str] | None = None
    names: list[str] = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise ValueError(_endless(path, number))
            if not line.strip():
                continue
            place = where(path, number)
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise ValueError(_not_utf8(path)) from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not an object in JSON ({str(error).partition(':')[0]})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place}: {show(row)} is not an object with a key for each column")
            if row.keys() != keys:
                keys = set(row)
                names = wanted(list(row), choose, place)
            yield number, [row[name] for name in names]
    if keys is None:
        raise ValueError(f"{path.name} is empty")


def _json_batches(path: Path, choose: Choose) -> Iterator[Batch]:
    found = _json_lines(path, choose)
    while True:
        kept = [row for _, row in zip(range(BATCH), found, strict=False)]
        if not kept:
            return
        yield Batch([line for line, _ in kept], list(zip(*(cells for _, cells in kept), strict=True)))


# ------------------------------------------------------------------------------------------------------------- Parquet


def _parquet_rows(path: Path, choose: Choose) -> Rows:
    for names, batch in _parquet_batches(path, choose, arrays=False):
        if not names:
            yield from ((line, []) for line in batch.lines)
            continue
        yield from ((line, list(row)) for line, row in zip(batch.lines, zip(*batch.columns, strict=True), strict=True))


def _parquet_batches(path: Path, choose: Choose, arrays: bool = True) -> Iterator[tuple[list[str], Batch]]:
    """With the names of the columns; as `arrays`, numbers of a column without gaps come as one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names, meta = wanted(file.schema_arrow.names, choose, path.name), file.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            most = ARRAYS if arrays else 4096
            count = max(1, min(most, 2**24 * meta.num_rows // max(1, size)))  # about 16 MB
            first = 1
            for batch in file.iter_batches(count, columns=names):
                columns = [_cells(batch.column(name), f"{path.name}, column {name}", arrays) for name in names]
                yield names, Batch(range(first, first + len(batch)), columns)
                first += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path.name} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from None


def _cells(column: Any, place: str, arrays: bool) -> Cells:
    """As Python objects; lists of numbers, and of equally long lists of numbers, as arrays."""
    import pyarrow as pa

    def numeric(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

    if arrays and numeric(column.type) and not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    outer = _unpacked(column)
    inner = _unpacked(outer[0]) if outer is not None else None
    numbers, width = outer[0] if outer is not None else column, 0
    if inner is not None and numbers.null_count == 0:
        sizes = np.diff(inner[1])
        if len(sizes) and (sizes == sizes[0]).all():
            numbers, width = inner[0].slice(inner[1][0], inner[1][-1] - inner[1][0]), int(sizes[0])
    if outer is None or not numeric(numbers.type):
        try:
            listed: list[Any] = column.to_pylist()
            return listed
        except (ValueError, OverflowError) as error:  # a text that is not UTF-8, a time beyond Python's
            raise ValueError(f"{place}: {error}") from None
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
