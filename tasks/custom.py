"""Your own data, no code: CSV, TSV, JSON lines, Parquet, array and sound files, or a data set on the hub.

A row is one example: a text, a list, one number per column, or an array in a file that the row names; or one step of an
example (long). In a folder the files are the splits (train, validation, test); a single file is split by a column, by a
hash of each row's id (without ids, of its input), so that appended rows move no others and rows with the same id, or
the same input, stay together, or with equal shares of every class. Errors name file, line (in Parquet: row, from 1) and
column. The code is in tasks/own.
"""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import Split, TaskData, Tokens, Values
from spt.tasks.files import copy_from_hub
from spt.tasks.own import arrays, assembly, diagnostics, discovery, new_rows
from spt.tasks.own.assembly import assemble
from spt.tasks.own.assembly import vocabulary as vocabulary  # a hook
from spt.tasks.own.options import Options
from spt.tasks.own.rows import Reader

logger = logging.getLogger(__name__)


class Config(Options):
    """The options are those of tasks/own/options.py."""


def sources(config: Config, raw: Path) -> list[Path]:
    """The tables and, where these name files, all such files in their folders, with those beside WFDB headers."""
    if config.hub is not None and not discovery.hub_folder(config, raw).is_dir():
        return []
    tables = _tables(config, raw)
    if config.file_column is None:
        return tables
    roots = dict.fromkeys(path.parent for path in tables)
    for root in roots:
        names = list(arrays.files_in(root))
        tables += [Path(os.path.join(root, name)) for name in names] + arrays.companions(root, names)
    return list(dict.fromkeys(tables))


def fetch(config: Config, raw: Path) -> None:
    """Copy a data set from the hub into the data folder; your own files stay where they are."""
    if config.hub is None:
        return
    folder = discovery.hub_folder(config, raw)
    if folder.is_dir():
        logger.info(f"{folder} is there already")
    else:
        copy_from_hub(config.hub, folder, config=config.hub_config, revision=config.revision, own_data=True)


def load(config: Config, raw: Path) -> TaskData:
    reader = _read(config, raw)
    return assemble(config, reader.files, reader.examples())


def reading(config: Config, raw: Path, input: Tokens | Values) -> dict[str, Any]:
    """What is needed to read new rows, so that a model that was trained on these files sees them in the same way: the
    label of each class, the word of each token, the columns, the scale of stored numbers."""
    return assembly.reading(config, _read(config, raw), input)


def more_rows(config: Config, raw: Path, path: Path, data: TaskData) -> Split:
    """Rows of other files, read as these were, without labels. Raises OSError and ValueError."""
    reader = _read(config, raw)
    stored = (reader.storage, reader.scale)
    codes = assembly.codes_of_words(config, reader)
    return new_rows.read_unlabelled(config, assembly.reading(config, reader, data.input), codes, stored, path, data)


def findings(config: Config, raw: Path) -> list[str]:
    """What a reader should know about the files, a sentence each: gaps, mixed types, unused columns, leaked labels."""
    return diagnostics.diagnose(config, _tables(config, raw))


def readable(config: Config, row: NDArray[Any]) -> str | None:
    """The text of a row whose tokens are characters or bytes; words are kept as hashes."""
    if config.text_column is None or config.tokens == "words":
        return None
    if config.tokens == "bytes":
        return row.astype(np.uint8).tobytes().decode("utf-8", "replace")
    return "".join(map(chr, row.tolist()))


def _read(config: Config, raw: Path) -> Reader:
    tables = discovery.find_tables(config, raw)
    reader = Reader(config, [path for _, path in tables])
    for split, path in tables:
        reader.read(split, path)
    return reader


def _tables(config: Config, raw: Path) -> list[Path]:
    return [path for _, path in discovery.find_tables(config, raw)]
