"""Arrays of NumPy, X and y, as a table that the task `custom` reads."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.errors import DataError
from spt.runs.files import writing
from spt.tasks.files import ZIP_ERRORS, read_npy
from spt.tasks.own.limits import MAX_FILE, MAX_RATIO, SMALL

ENDINGS = (".npy", ".npz")
INPUTS = ("x", "inputs", "input", "data", "values", "series")
LABELS = ("y", "labels", "label", "targets", "target", "classes")
GROUPS = ("groups", "group", "subjects", "subject", "patients", "patient")


def convert(path: Path, target: Path) -> None:
    """Write (n, L) or (n, L, C) inputs with their labels as Parquet, a row a sequence. Raises DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = _read(path)
    x = _one(arrays, INPUTS, path, "inputs, shaped (rows, steps) or (rows, steps, channels)")
    y = _one(arrays, LABELS, path, "labels, one a row")
    group = next((arrays[name] for name in arrays if name.lower() in GROUPS), None)
    if x.ndim in (2, 3) and not x.size:
        raise DataError(
            f"{path.name}: the inputs are empty, with the shape {x.shape}; (rows, steps) or (rows, steps, "
            "channels) is needed, with some of each"
        )
    if x.ndim not in (2, 3):
        raise DataError(
            f"{path.name}: the inputs have shape {x.shape}; (rows, steps) or (rows, steps, channels) is needed"
        )
    if x.dtype.kind not in "iufb":
        raise DataError(f"{path.name}: the inputs are of the type {x.dtype}, not real numbers")
    if x.dtype.kind == "f" and np.isinf(x).any():
        raise DataError(f"{path.name}: the inputs hold what is not a finite number; NaN stands for a missing one")
    for name, each in (("labels", y), ("groups", group)):
        if each is not None and (each.ndim != 1 or len(each) != len(x)):
            raise DataError(
                f"{path.name}: {len(x)} rows of inputs, but {name} of shape {each.shape}; one a row is needed"
            )
    steps = pa.array(x.astype(np.float32).reshape(-1))
    for width in reversed(x.shape[1:]):
        steps = pa.FixedSizeListArray.from_arrays(steps, width)
    columns = {"sequence": steps, "label": pa.array(y.tolist())}
    if group is not None:
        columns["group"] = pa.array(group.tolist())
    with writing(target):
        pq.write_table(pa.table(columns), target)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                read_npy(file, path.name)
            raise DataError(
                f"{path.name} holds one array, without labels; save both: np.savez('data.npz', X=inputs, y=labels)"
            )
        with zipfile.ZipFile(path) as archive:
            members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
            total = sum(member.file_size for member in members)
            if total > min(MAX_FILE, max(SMALL, MAX_RATIO * path.stat().st_size)):
                raise DataError(f"{path.name} unpacks to {total:,} bytes; it is not used")
            return {
                member.filename.removesuffix(".npy"): _numbers(archive.read(member), f"{path.name}, {member.filename}")
                for member in members
            }
    except ZIP_ERRORS as error:
        raise DataError(f"{path.name} cannot be read as an archive of arrays: {error}") from None
    except ValueError as error:
        advice = "; lists of different lengths go into .jsonl or .parquet" if "llow_pickle" in str(error) else ""
        raise DataError(f"{error}{advice}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _numbers(content: bytes, place: str) -> NDArray[Any]:
    return read_npy(io.BytesIO(content), place)


def _one(arrays: dict[str, NDArray[Any]], names: tuple[str, ...], path: Path, what: str) -> NDArray[Any]:
    found = [name for name in arrays if name.lower() in names]
    if len(found) != 1:
        problem = f"{' and '.join(found)} are" if found else f"none of {', '.join(arrays) or 'no arrays'} is"
        raise DataError(
            f"{path.name}: {problem} called as an array of {what} is; name one {names[0].upper()} or {names[0]}"
        )
    return arrays[found[0]]
