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
from spt.tasks.own import arrays, places, rows, steps, whole
from spt.tasks.own import findings as found
from spt.tasks.own import hub as copies
from spt.tasks.own.options import Options


class Config(Options):
    """The options are those of tasks/own/options.py."""


def sources(config: Config, raw: Path) -> list[Path]:
    """The tables and, where these name files, all array files in their folders."""
    if config.hub is not None and not places.hub_folder(config, raw).is_dir():
        return []
    tables = [path for paths in places.tables(config, raw).values() for path in paths]
    if config.file_column is None:
        return tables
    roots = dict.fromkeys(path.parent for path in tables)
    return tables + [Path(os.path.join(root, name)) for root in roots for name in arrays.files_in(root)]


def fetch(config: Config, raw: Path, say: Say) -> None:
    """Copy a data set from the hub into the data folder; files of one's own are where they are."""
    if config.hub is not None:
        copies.copy(config, raw, say)


def load(config: Config, raw: Path) -> TaskData:
    tables = places.tables(config, raw)
    given = set(tables)
    if config.split_column is not None:
        given = places.splits_of_column(config, tables["train"][0])
    files = [path for paths in tables.values() for path in paths]
    reading = (steps if config.kind == "long" else rows).Reading(config, files, given)
    for split, paths in tables.items():
        for path in paths:
            reading.read(split, path)
    return reading.task()


def vocabulary(config: Config, train: Split) -> Tokens:
    """The unknown token, then the characters or words that these rows hold often enough, or the most frequent."""
    return whole.vocabulary(config, train)


def findings(config: Config, raw: Path) -> list[str]:
    """What a reader should know of the files, a sentence each: gaps, mixed types, unused columns, leaked labels."""
    return found.look(config, [path for paths in places.tables(config, raw).values() for path in paths])


def readable(config: Config, row: NDArray[Any]) -> str | None:
    """The text of a row whose tokens are characters or bytes; words are kept as hashes."""
    if config.text_column is None or config.tokens == "words":
        return None
    if config.tokens == "bytes":
        return row.astype(np.uint8).tobytes().decode("utf-8", "replace")
    return "".join(map(chr, row.tolist()))
