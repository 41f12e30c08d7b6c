"""Prepared splits as Arrow files: written once under a lock, then opened as memory maps."""

import ast
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from spt import rng
from spt.config.job import digest
from spt.config.plugins import Component
from spt.data.fingerprints import split_record, with_fingerprints
from spt.data.source import OpenTask, cache_dir, call_hook, data_dir, is_indexable, temporary_files
from spt.errors import DataError
from spt.runs.files import sync, writing
from spt.runtime.signals import cleanup
from spt.tasks import __path__ as TASKS
from spt.tasks.base import Classes, Labels, Reals, Split, Target, TaskConfig, TaskData, Tokens, Values, describe
from spt.tasks.parallel import AT_ONCE, release

logger = logging.getLogger(__name__)

FORMAT = 4
LARGE = 250_000_000  # bytes of a task's data, whose place is told
COLUMNS = [field.name for field in fields(Split) if field.name not in ("starts", "stops", "per_step")]  # as Arrow
OF_DATA = ("notes", "length", "interval", "future", "row_width", "classes")  # fields of the data


def prepared_folder(task: OpenTask) -> Path:
    """The folder with the task's splits, made now if it is not there."""
    component, config, raw = task.component, task.config, data_dir().resolve()
    if hasattr(component.module, "prepared"):
        return Path(call_hook(component, "prepared", config))
    shared = set(TaskConfig.model_fields)
    if is_indexable(task):
        shared -= {"max_rows"}
    else:
        config = config.model_copy(update={"max_rows": None})
    stats = [(path, path.stat()) for path in task.files]  # an edited file is read again
    key = {
        "format": FORMAT,
        "options": config.model_dump(mode="json", exclude=shared),
        "source": source_hash(component.module),
        "raw": str(raw),
        "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
    }
    name = component.identity.partition("@")[0].replace("/", "-")
    folder = cache_dir() / "tasks" / f"{name}-{digest(key)}"
    prepare_once(folder, lambda: load_from_task(component, config, raw))
    return folder


def prepare_once(folder: Path, load: Callable[[], TaskData]) -> None:
    """Write the splits that `load` makes into a folder, unless they are there."""
    if os.path.isfile(folder / "data.json"):
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent, folder.name):
            if not (folder / "data.json").is_file():
                _sweep(folder)
                with temporary_files():
                    _write(folder, load())
                if (size := sum(file.stat().st_size for file in folder.iterdir())) >= LARGE:
                    what = folder.name.partition("-")[0]
                    logger.info(f"the data of {what}, {size / 1e9:.1f} GB, are kept in {folder}")


def source_hash(module: Any) -> str:
    """Hash of the code that reads or generates: a task's file, what it imports of spt.tasks, and the random numbers."""
    files = dict.fromkeys([Path(module.__file__), Path(rng.__file__), *_imported(Path(module.__file__))])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _imported(path: Path) -> list[Path]:
    """The files of spt.tasks that a file imports, and those that these import; sorted."""
    root, imported, waiting = Path(TASKS[0]), set[Path](), [path]
    while waiting:
        file = waiting.pop()
        for names in _imports(file, file.stat().st_mtime_ns, file.stat().st_size):
            near = root.joinpath(*names).with_suffix(".py")
            if near not in imported and near.is_file():
                imported.add(near)
                waiting.append(near)
    return sorted(imported)


@cache
def _imports(file: Path, changed: int, size: int) -> tuple[tuple[str, ...], ...]:
    """What a file may import of spt.tasks, as paths; read once for each state of the file."""
    imported: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("spt.tasks"):
            names = tuple(str(node.module).split(".")[2:])
            imported += [names, *((*names, alias.name) for alias in node.names)]
    return tuple(names for names in imported if names)


def _lock(folder: Path, name: str) -> FileLock:
    return FileLock(folder / f".{name}.lock")


def _sweep(folder: Path) -> None:
    """Remove what killed preparations left: of this folder, whose lock we hold, and of others that nobody is making."""
    for left in folder.parent.glob(".*.tmp"):
        name = left.name[1:].removesuffix(".tmp").rpartition(".")[0]
        if name == folder.name:
            shutil.rmtree(left, ignore_errors=True)
            continue
        try:
            with _lock(folder.parent, name).acquire(blocking=False):
                shutil.rmtree(left, ignore_errors=True)
        except Timeout:
            pass


def load_from_task(component: Component, config: TaskConfig, raw: Path) -> TaskData:
    data = call_hook(component, "load", config, raw)
    if not isinstance(data, TaskData):
        raise DataError(f"task {component.identity}: load returned {type(data).__name__}, not TaskData")
    try:
        data.check()
    except ValueError as error:
        raise DataError(f"task {component.identity}: {error}") from error
    return data


def _write(folder: Path, data: TaskData) -> None:
    import pyarrow as pa

    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")

    def remove(_: object = None) -> None:
        shutil.rmtree(beside, ignore_errors=True)

    with writing(folder), cleanup(remove):
        beside.mkdir()
        try:
            data = data.mapped(with_fingerprints)
            for name, split in data.splits.items():
                # One record batch, so that a column is one zero-copy array.
                batch = pa.record_batch(_columns(split, data.target))
                with (
                    (beside / f"{name}.arrow").open("wb") as raw,
                    pa.PythonFile(_Pieces(raw, split.values), "w") as file,
                    pa.ipc.new_stream(file, batch.schema) as out,
                ):
                    out.write_batch(batch)
            manifest: dict[str, Any] = {
                "input": describe(data.input),
                "target": describe(data.target),
                "rows": {name: split_record(split).model_dump() for name, split in data.splits.items()},
                **{name: getattr(data, name) for name in OF_DATA},
            }
            (beside / "data.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            sync(beside)
            if folder.exists():
                shutil.rmtree(folder)  # a folder without its manifest
            beside.rename(folder)
        finally:
            remove()


class _Pieces:
    """A file that is given columns whole, and writes those that lie in a file themselves piece by piece."""

    closed = False

    def __init__(self, file: BinaryIO, values: NDArray[Any]) -> None:
        self.file, self.values = file, values

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for first in range(0, len(view), AT_ONCE):
            self.file.write(view[first : first + AT_ONCE])
            if len(view) > AT_ONCE:
                release(self.values)
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Whoever opened the file closes it."""


def _columns(split: Split, target: Target) -> dict[str, Any]:
    """A split as Arrow columns, without what it does not have; rows one behind the other are not copied, and steps that
    rows share are stored once, as views."""
    import pyarrow as pa

    shared = not split.contiguous and split.shares_steps
    split = split if split.contiguous else split.trimmed() if shared else split.packed()
    of_steps = ("values", "steps", "targets") if split.per_step else ("values", "steps")
    columns = {}
    for name in COLUMNS:
        array = getattr(split, name)
        if name == "targets" and not split.per_step:
            array = array.astype(np.float64 if isinstance(target, Reals) else np.int64)
        if name in of_steps and array is not None:
            columns[name] = _views(array, split) if shared else _lists(array, split.lengths)
        elif array is not None:
            columns[name] = pa.array(array) if array.ndim == 1 else _lists(array, np.ones(len(split), np.int64))
    return columns


def _lists(array: NDArray[Any], lengths: NDArray[np.int64]) -> Any:
    """Rows of these lengths, one behind the other, as one Arrow list a row, not copied."""
    import pyarrow as pa

    flat = np.ascontiguousarray(array).reshape(-1)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths * (flat.size // max(len(array), 1)))])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _views(array: NDArray[Any], split: Split) -> Any:
    """Rows that share steps as one Arrow list view a row, not copied."""
    import pyarrow as pa

    flat = np.ascontiguousarray(array).reshape(-1)
    width = flat.size // max(len(array), 1)
    return pa.LargeListViewArray.from_arrays(
        pa.array(split.starts * width), pa.array(split.lengths * width), pa.array(flat)
    )


def read_prepared(folder: Path) -> TaskData:
    import pyarrow as pa

    try:
        manifest = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        input, target = from_spec(manifest["input"]), from_spec(manifest["target"])
        splits: dict[str, Any] = {}
        for name in ("train", "val", "test"):
            table = pa.ipc.open_stream(pa.memory_map(str(folder / f"{name}.arrow"))).read_all()
            splits[name] = _from_columns(table, input, target)
            if manifest["rows"][name] != split_record(splits[name]).model_dump():
                raise ValueError("other rows than were prepared")
        data: dict[str, Any] = {name: manifest[name] for name in OF_DATA if name in manifest}
        data |= {name: tuple(data[name]) for name in ("notes", "classes") if name in data}
        return TaskData(input, target, **splits, **data)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the prepared data in {folder} are damaged ({type(error).__name__}); delete the folder, it is made again"
        ) from error


def _from_columns(table: Any, input: Tokens | Values, target: Target) -> Split:
    """A split whose arrays of steps are views on an Arrow table."""
    from pyarrow.types import is_floating, is_integer

    arrays: dict[str, NDArray[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        (chunk,) = column.chunks
        rows = chunk.values if hasattr(chunk, "offsets") else chunk
        is_number = is_integer(rows.type) or is_floating(rows.type)
        arrays[name] = _view(rows) if is_number else np.array(rows.to_pylist())
    channels = getattr(input, "channels", None)
    size = target.count if isinstance(target, Labels) else getattr(target, "size", None)
    for name, width in (("values", channels), ("targets", size), ("halves", 2), ("static", input.static or None)):
        if width is not None and name in arrays:
            arrays[name] = arrays[name].reshape(-1, width)
    rows = table.column("values").chunk(0)
    ends = _view(rows.offsets).astype(np.int64, copy=False) // (channels or 1)
    if hasattr(rows, "sizes"):  # views
        stops = ends + _view(rows.sizes) // (channels or 1)
        return Split(starts=ends, stops=stops, per_step=target.per_step, **arrays)
    return Split(starts=ends[:-1], stops=ends[1:], per_step=target.per_step, **arrays)


def _view(array: Any) -> NDArray[Any]:
    """The numbers of an Arrow array, not copied. Its own `to_numpy` imports pandas, a third of a second."""
    values = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def from_spec(spec: dict[str, Any]) -> Any:
    """An input or a target from its description. Raises KeyError, TypeError or ValueError."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (Tokens, Values, Classes, Reals, Labels)}
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items() if key != "kind"}
    return kinds[spec["kind"]](**options)
