"""Prepared splits as Arrow files: written once under a lock, then opened as memory maps."""

import ast
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from spt import rng
from spt.config.job import digest
from spt.config.plugins import Component
from spt.data.fingerprints import split_record, with_fingerprints
from spt.data.source import OpenTask, cache_dir, call_hook, data_dir, is_indexable
from spt.errors import DataError
from spt.runs.files import writing
from spt.runtime.signals import cleanup
from spt.tasks import __path__ as TASKS
from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values, describe
from spt.tasks.parallel import allocate

FORMAT = 3


def prepared_folder(opened: OpenTask) -> Path:
    """The folder with the task's splits, made now if it is not there."""
    component, config, raw = opened.component, opened.config, data_dir().resolve()
    shared = set(TaskConfig.model_fields)
    if is_indexable(opened):
        shared -= {"max_rows"}
    if not is_indexable(opened):
        config = config.model_copy(update={"max_rows": None})
    key = {
        "format": FORMAT,
        "options": {key: value for key, value in config.model_dump(mode="json").items() if key not in shared},
        "source": _source(component.module),
        "raw": str(raw),
        "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in _stats(opened.files)],
    }
    name = component.identity.partition("@")[0].replace("/", "-")
    folder = cache_dir() / "tasks" / f"{name}-{digest(key)}"
    if os.path.isfile(folder / "data.json"):
        return folder
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent, folder.name):
            if not (folder / "data.json").is_file():
                _sweep(folder)
                _write(folder, load_from_task(component, config, raw))
    return folder


def _stats(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Size and time of change: an edited file is read again."""
    return [(path, path.stat()) for path in paths]


def _source(module: Any) -> str:
    """Hash of the code that reads or generates: a task's file, what it imports of spt.tasks, and the random numbers."""
    files = dict.fromkeys([Path(module.__file__), Path(rng.__file__), *_imported(Path(module.__file__))])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _imported(path: Path) -> list[Path]:
    """The files of spt.tasks that a file imports, and those that these import; sorted."""
    root, found, waiting = Path(TASKS[0]), set[Path](), [path]
    while waiting:
        file = waiting.pop()
        for names in _imports(file, file.stat().st_mtime_ns, file.stat().st_size):
            near = root.joinpath(*names).with_suffix(".py")
            if near not in found and near.is_file():
                found.add(near)
                waiting.append(near)
    return sorted(found)


@cache
def _imports(file: Path, changed: int, size: int) -> tuple[tuple[str, ...], ...]:
    """What a file may import of spt.tasks, as paths; read once for each state of the file."""
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("spt.tasks"):
            names = tuple(str(node.module).split(".")[2:])
            found += [names, *((*names, alias.name) for alias in node.names)]
    return tuple(names for names in found if names)


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
                table = pa.table(_columns(split))
                # One record batch, so that a column is one zero-copy array.
                with (
                    pa.OSFile(str(beside / f"{name}.arrow"), "wb") as file,
                    pa.ipc.new_stream(file, table.schema) as out,
                ):
                    out.write_batch(table.to_batches()[0])
            manifest: dict[str, Any] = {
                "input": describe(data.input),
                "target": describe(data.target),
                "rows": {name: split_record(split).model_dump() for name, split in data.splits.items()},
                "notes": list(data.notes),
                "length": data.length,
                "interval": data.interval,
                "future": data.future,
                "row_width": data.row_width,
            }
            (beside / "data.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)  # a folder without its manifest
            beside.rename(folder)
        finally:
            remove()


def _columns(split: Split) -> dict[str, Any]:
    """A split as Arrow columns; what it has not, is not among them."""
    import pyarrow as pa

    assert split.targets is not None
    targets = np.asarray(split.targets)
    if split.per_step:
        labels = _lists(split, targets)
    else:
        labels = pa.array(targets.astype(np.int64)) if targets.ndim == 1 else _vectors(targets.astype(np.float64))
    found = {"values": _lists(split, split.values), "target": labels, "id": pa.array(split.ids)}
    if split.steps is not None:
        found["steps"] = _lists(split, split.steps)
    plain = {"fingerprint": split.fingerprints, "cut": split.cuts, "text_bytes": split.text_bytes}
    found |= {name: pa.array(array) for name, array in (plain | {"answer": split.answers}).items() if array is not None}
    return found if split.halves is None else {**found, "halves": _vectors(split.halves)}


def _lists(split: Split, array: NDArray[Any]) -> Any:
    """What belongs to each row's steps as one Arrow list; not copied when the rows lie one behind the other."""
    import pyarrow as pa

    width = 1 if array.ndim == 1 else array.shape[1]
    if not split.contiguous:
        joined, place = allocate((int(split.lengths.sum()), *array.shape[1:]), array.dtype), 0
        for start, stop in zip(split.starts.tolist(), split.stops.tolist(), strict=True):
            joined[place : place + stop - start] = array[start:stop]
            place += stop - start
        array = joined
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(split.lengths * width)])
    flat = np.ascontiguousarray(array).reshape(-1)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(flat))


def _vectors(rows: NDArray[Any]) -> Any:
    import pyarrow as pa

    n, size = rows.shape
    return pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32) * size, rows.reshape(-1))


def read_prepared(folder: Path) -> TaskData:
    import datasets

    try:
        manifest = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        input, target = _from_spec(manifest["input"]), _from_spec(manifest["target"])
        splits = {}
        for name in ("train", "val", "test"):
            table = datasets.Dataset.from_file(str(folder / f"{name}.arrow")).data.table
            splits[name] = _from_columns(table, input, target)
            if manifest["rows"][name] != split_record(splits[name]).model_dump():
                raise ValueError("other rows than were prepared")
        extra = {key: manifest[key] for key in ("length", "interval", "future")} | {"notes": tuple(manifest["notes"])}
        extra["row_width"] = manifest.get("row_width")  # not known of what was prepared before there was one
        return TaskData(input, target, splits["train"], splits["val"], splits["test"], **extra)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(
            f"the prepared data in {folder} are damaged ({type(error).__name__}); delete the folder, it is made again"
        ) from error


def _from_columns(table: Any, input: Tokens | Values, target: Classes | Reals) -> Split:
    """A split whose arrays are views on an Arrow table."""

    def lists(name: str, width: int | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        column = table.column(name).chunk(0)
        flat, ends = column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy().astype(np.int64, copy=False)
        return (flat, ends) if width is None else (flat.reshape(-1, width), ends // width)

    def plain(name: str) -> NDArray[Any] | None:
        return table.column(name).to_numpy() if name in table.column_names else None

    size = target.size if isinstance(target, Reals) else None
    values, ends = lists("values", input.channels if isinstance(input, Values) else None)
    if target.per_step or size is not None:
        targets, _ = lists("target", size)
    else:
        targets = table.column("target").to_numpy()
    ids = table.column("id").to_numpy()
    return Split(
        values,
        ends[:-1],
        ends[1:],
        targets,
        ids.astype(str) if ids.dtype == object else ids,
        table.column("fingerprint").to_numpy(),
        per_step=target.per_step,
        cuts=plain("cut"),
        steps=lists("steps", None)[0] if "steps" in table.column_names else None,
        text_bytes=plain("text_bytes"),
        halves=lists("halves", 2)[0] if "halves" in table.column_names else None,
        answers=plain("answer"),
    )


def _from_spec(spec: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"Tokens": Tokens, "Values": Values, "Classes": Classes, "Reals": Reals}
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items() if key != "kind"}
    return kinds[spec["kind"]](**options)
