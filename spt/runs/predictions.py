"""`predictions.parquet`: a finished run's answers to its test rows."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from spt.errors import DataError, one_line

if TYPE_CHECKING:
    import pyarrow

FILE = "predictions.parquet"
RUN = b"spt_run"  # of the file's metadata: the name of the run's folder
Columns = Mapping[str, NDArray[Any]]


class NotComparable(DataError):
    """Why two runs cannot be compared example by example."""


def mark_run(table: "pyarrow.Table", run: str) -> "pyarrow.Table":
    """The table with the name of the run whose answers it holds."""
    return table.replace_schema_metadata({RUN: run})


def read_columns(path: Path) -> Columns:
    """The columns of a run's file of predictions, at least one row of them and none with an empty cell.

    Raises NotComparable.
    """
    import pyarrow as pa  # slower to import than all else here
    import pyarrow.parquet as pq

    where = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise NotComparable(f"{where} is {'not a file' if path.exists() else 'missing'}")
    try:
        with pq.ParquetFile(path) as file:  # read_table would take a folder named `lr=0.1` for a column
            table = file.read()
        owner = (table.schema.metadata or {}).get(RUN, b"").decode(errors="replace")
        if owner and owner != re.sub(r"\.old\d+$", "", path.parent.resolve().name):
            raise NotComparable(
                f"{where} holds the answers of another run, {owner}; remove it, or put the run's own back"
            )
        if any(column.null_count for column in table.columns):
            raise NotComparable(f"{where} has empty cells")
        columns = {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, ValueError, MemoryError, pa.lib.ArrowException) as error:
        raise NotComparable(f"{where} cannot be read ({one_line(error)})") from error
    kind = table.schema.field("id").type if "id" in columns else pa.null()
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise NotComparable(f"{where} has no ids")
    if not table.num_rows:
        raise NotComparable(f"{where} has no rows")
    if any(column.dtype.kind not in "biuf" for name, column in columns.items() if name != "id"):
        raise NotComparable(f"{where} has answers that are not numbers")
    return columns
