"""Predictions and embeddings as files, written piece by piece beside their place and renamed when they are complete."""

import contextlib
import csv
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spt.errors import OutputError, UsageError
from spt.report.format import csv_cell
from spt.runs.files import check_writable, replacing
from spt.runtime.signals import cleanup

TABLES = (".csv", ".jsonl", ".parquet")
EMBEDDINGS = (".npz", ".parquet")
Columns = dict[str, NDArray[Any]]


class Writer(Protocol):
    def write(self, columns: Columns) -> None:
        """The next rows; the columns are always the same."""

    def close(self) -> None:
        """When all are written."""


def check_out(out: Path, endings: tuple[str, ...], overwrite: bool, data: Path | None) -> None:
    """Raise UsageError or OutputError unless this file can be written, before anything is computed."""
    if out.suffix.lower() not in endings:
        raise UsageError(f"--out {out}: its name should end in one of {', '.join(endings)}, which says the format")
    if data is not None and out.exists() and data.exists() and out.samefile(data):
        raise UsageError(f"--out {out} is the file that is read; name another one")
    check_writable(out)
    if out.exists() and not overwrite:
        raise OutputError(f"{out} is there already; name another file, or say --overwrite")


@contextlib.contextmanager
def table_file(out: Path | None) -> Iterator[Writer]:
    """A writer of a table: .csv, .jsonl or .parquet; without a file, CSV on standard output once all is known."""
    if out is None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as file:
            writer = CsvWriter(file)
            yield writer
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout)
            return
    with _replaced(out) as beside:
        if out.suffix.lower() == ".parquet":
            table: Writer = ParquetWriter(beside)
            yield table
            table.close()
            return
        with beside.open("w", encoding="utf-8", newline="") as file:
            yield CsvWriter(file) if out.suffix.lower() == ".csv" else JsonWriter(file)


@contextlib.contextmanager
def embeddings_file(out: Path) -> Iterator[Writer]:
    """A writer of embeddings: .parquet (e0, e1, …) or .npz, whose arrays are named like the columns."""
    with _replaced(out) as beside:
        writer: Writer = ParquetWriter(beside) if out.suffix.lower() == ".parquet" else ArchiveWriter(beside)
        try:
            yield writer
            writer.close()
        finally:
            if isinstance(writer, ArchiveWriter):
                writer.numbers.close()


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    with replacing(out) as beside, cleanup(lambda _: beside.unlink(missing_ok=True)):
        yield beside


class CsvWriter:
    def __init__(self, file: IO[str]) -> None:
        self.table, self.begun = csv.writer(file, lineterminator="\n"), False

    def write(self, columns: Columns) -> None:
        if not self.begun:
            self.table.writerow(map(csv_cell, columns))
            self.begun = True
        rows = zip(*map(_texts, columns.values()), strict=True)
        self.table.writerows(map(csv_cell, row) for row in rows)

    def close(self) -> None:
        pass


class JsonWriter:
    """An object a line."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, columns: Columns) -> None:
        names = list(columns)
        for row in zip(*map(_numbers, columns.values()), strict=True):
            self.file.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")

    def close(self) -> None:
        pass


class ParquetWriter:
    """Embeddings, a column of (m, D) numbers named `embedding`, as D columns e0, e1, …"""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None  # type: Path, Any

    def write(self, columns: Columns) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        flat: dict[str, Any] = {}
        for name, column in columns.items():
            if column.ndim == 2:
                flat |= {f"e{k}": pa.array(column[:, k]) for k in range(column.shape[1])}
            elif column.dtype == object:
                named = "prediction" in columns and columns["prediction"].dtype == object  # by the classes' names
                flat[name] = pa.array(column.tolist(), pa.string() if named else pa.int64())
            else:
                flat[name] = pa.array(column.tolist() if column.dtype.kind == "U" else column)
        table = pa.table(flat)
        if self.file is None:
            self.file = pq.ParquetWriter(self.path, table.schema)
        self.file.write_table(table.cast(self.file.schema))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class ArchiveWriter:
    """Arrays in .npz. Embeddings wait on disk, since an array begins with its size; ids in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.others, self.width = path, dict[str, list[NDArray[Any]]](), 0
        self.numbers = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115

    def write(self, columns: Columns) -> None:
        for name, column in columns.items():
            if column.ndim == 2:
                self.width = column.shape[1]
                self.numbers.write(np.ascontiguousarray(column, np.float32).tobytes())
            else:
                self.others.setdefault(name, []).append(column)

    def close(self) -> None:
        with zipfile.ZipFile(self.path, "w") as archive:
            for name, parts in self.others.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.concatenate(parts), allow_pickle=False)
            rows = self.numbers.tell() // (4 * self.width)
            self.numbers.seek(0)
            with archive.open("embedding.npy", "w", force_zip64=True) as member:
                header = {"descr": "<f4", "fortran_order": False, "shape": (rows, self.width)}
                np.lib.format.write_array_header_1_0(member, header)
                shutil.copyfileobj(self.numbers, member)


def _texts(column: NDArray[Any]) -> list[Any]:
    """Cells of CSV: of a float32 its shortest form, nothing for what is not there."""
    if column.dtype == object:
        return ["" if cell is None else cell for cell in column]
    if column.dtype.kind == "f":
        return ["" if cell == "nan" else cell for cell in column.astype(str).tolist()]
    return column.tolist()


def _numbers(column: NDArray[Any]) -> list[Any]:
    """Cells of JSON."""
    if column.dtype.kind == "f":
        return [None if cell == "nan" else float(cell) for cell in column.astype(str).tolist()]
    return column.tolist()
