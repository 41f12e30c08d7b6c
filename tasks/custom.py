"""Your own data, no code: CSV, TSV, JSON lines, Parquet, array and sound files, or a data set on the hub.

A row is one example: a text, a list, one number a column, or an array in a file that the row names; or one step of an
example (long). A folder's splits are its files (train, validation, test); a single file is split by a column, or by a
hash of each row's id (without ids, of its input), so that appended rows move no others and rows of one id, or of the
same input, stay together; or with equal shares of every class. Complaints name file, line (in Parquet: row, from 1) and
column. How it is done: tasks/own.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import Split, TaskData, Tokens
from spt.tasks.files import Say
from spt.tasks.own import arrays, assembly, diagnostics, discovery
from spt.tasks.own import hub as hub_copies
from spt.tasks.own.examples import ExampleReader
from spt.tasks.own.long import LongReader
from spt.tasks.own.options import Options


class Config(Options):
    """The options are those of tasks/own/options.py."""


def sources(config: Config, raw: Path) -> list[Path]:
    """The tables and, where these name files, all array files in their folders."""
    if config.hub is not None and not discovery.hub_folder(config, raw).is_dir():
        return []
    tables = _tables(config, raw)
    if config.file_column is None:
        return tables
    roots = dict.fromkeys(path.parent for path in tables)
    return tables + [Path(os.path.join(root, name)) for root in roots for name in arrays.files_in(root)]


def fetch(config: Config, raw: Path, say: Say) -> None:
    """Copy a data set from the hub into the data folder; files of one's own are where they are."""
    if config.hub is not None:
        hub_copies.copy(config, raw, say)


def load(config: Config, raw: Path) -> TaskData:
    files = _tables(config, raw)
    reader = (LongReader if config.kind == "long" else ExampleReader)(config, files)
    for split, paths in discovery.find_tables(config, raw).items():
        for path in paths:
            reader.read(split, path)
    return assembly.assemble(config, files, reader.examples())


def vocabulary(config: Config, train: Split) -> Tokens:
    """The unknown token, then the characters or words that these rows hold often enough, or the most frequent."""
    return assembly.vocabulary(config, train)


def findings(config: Config, raw: Path) -> list[str]:
    """What a reader should know of the files, a sentence each: gaps, mixed types, unused columns, leaked labels."""
    return diagnostics.diagnose(config, _tables(config, raw))


def readable(config: Config, row: NDArray[Any]) -> str | None:
    """The text of a row whose tokens are characters or bytes; words are kept as hashes."""
    if config.text_column is None or config.tokens == "words":
        return None
    if config.tokens == "bytes":
        return row.astype(np.uint8).tobytes().decode("utf-8", "replace")
    return "".join(map(chr, row.tolist()))


def _tables(config: Config, raw: Path) -> list[Path]:
    return [path for paths in discovery.find_tables(config, raw).values() for path in paths]
