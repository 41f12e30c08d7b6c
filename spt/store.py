"""A task's splits, kept through `datasets` as Arrow files: prepared once under a lock, then opened as memory maps.

    <cache>/tasks/<task>-<hash>/{train,val,test}.arrow, data.json

The hash covers the task's options and source, so an edited task is prepared anew. The folder is filled beside and
renamed, so its existence means that it is complete.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from spt.components import Component, find
from spt.errors import CheckpointError, DataError, SptError, brief
from spt.plan import digest
from spt.recipe import Part
from spt.run import SplitRecord, writing
from spt.seeding import generator
from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values, describe

FORMAT = 1


class Opened(NamedTuple):
    """A task part's module with its checked options."""

    component: Component
    config: TaskConfig

    @property
    def files(self) -> list[Path]:
        """What the task reads, as far as it is there and the task says so."""
        module, raw = self.component.module, data_dir().resolve()
        if not hasattr(module, "sources"):
            return []
        named = _call(self.component, "sources", self.config, raw)
        return sorted(path for path in map(Path, named) if os.path.exists(path))


def cache_dir() -> Path:
    """`SPT_CACHE_DIR`, by default the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spt"
    return Path(os.environ.get("SPT_CACHE_DIR") or default)


def data_dir() -> Path:
    """`SPT_DATA_DIR`: raw sources, only ever read."""
    return Path(os.environ.get("SPT_DATA_DIR") or "data")


def open_task(part: Part) -> TaskData:
    """The task's data with fingerprints: the subset the recipe asks for, rows not copied.

    A fraction is a prefix of one permutation of the training split, so subsets are nested (SPT paper, appendix C.1.4).
    """
    opened = open_part(part)
    config, module = opened.config, opened.component.module
    data = _read(prepared(opened))
    keep = max(1, int(config.fraction * len(data.train)))
    whole = data.train
    if keep < len(data.train):
        rows = generator(config.subset_seed, "subset").permutation(len(data.train))[:keep]
        data = replace(data, train=data.train.take(rows))
    limit = config.limit
    if limit is not None:
        data = data.mapped(lambda split: split.take(np.arange(min(limit, len(split)))))
    coded = isinstance(data.input, Tokens) and data.input.codes is not None
    if coded and len(data.train) < len(whole) and hasattr(module, "vocabulary"):
        data = replace(data, input=_call(opened.component, "vocabulary", config, data.train))
    return data


def open_part(part: Part) -> Opened:
    component = find("tasks", part.name)
    return Opened(component, component.module.Config.model_validate_json(json.dumps(part.options)))


def record(split: Split) -> SplitRecord:
    """A split's identity, from its rows' fingerprints and its labels, in order."""
    inputs = hashlib.sha256(np.ascontiguousarray(split.fingerprints).tobytes()).hexdigest()[:16]
    targets = None
    if split.targets is not None:
        kind = np.int64 if split.targets.dtype.kind in "iu" else np.float64
        targets = hashlib.sha256(np.ascontiguousarray(split.targets, kind).tobytes()).hexdigest()[:16]
    return SplitRecord(rows=len(split), inputs=inputs, targets=targets)


def overlap(data: TaskData) -> dict[str, int]:
    """How many rows of validation and test have the same input as a training row."""
    return {
        name: int(np.isin(split.fingerprints, data.train.fingerprints).sum())
        for name, split in (("val", data.val), ("test", data.test))
    }


def identity(part: Part) -> str:
    """Hash of the rows a task option set gives, inputs and labels: runs on other data have other keys."""
    return rows_hash(open_task(part))


def rows_hash(data: TaskData) -> str:
    return digest({name: record(split).model_dump() for name, split in data.splits.items()})


def from_hub(name: str, folder: Path) -> None:
    """Copy a hub data set's train and test splits into a folder, as Parquet files. Raises DataError."""
    import datasets

    beside = folder.with_name(f".{folder.name}.part")
    with writing(folder):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            try:
                found = datasets.load_dataset(name)
                for split in ("train", "test"):
                    found[split].to_parquet(beside / f"{split}.parquet")
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (
                    errno.ENOSPC,
                    errno.EDQUOT,
                    errno.EACCES,
                    errno.EROFS,
                ):
                    raise
                raise DataError(f"{name} cannot be copied from the Hugging Face hub: {brief(error)}") from error
            folder.mkdir(exist_ok=True)
            for split in ("train", "test"):
                (beside / f"{split}.parquet").replace(folder / f"{split}.parquet")
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def training_fingerprints(part: Part) -> NDArray[np.uint64]:
    """Of the task's whole training split, whatever fraction of it is in use."""
    whole = {**part.model_dump(), "fraction": 1.0, "limit": None}
    return open_task(Part(**whole)).train.fingerprints


def refuse_leak(pretrained_on: NDArray[np.uint64], training: NDArray[np.uint64], data: TaskData, source: str) -> None:
    """Raise CheckpointError when a pretraining row lies in this task's validation or test split.

    A row that the benchmark itself repeats in its training split does not count: both arms may see it anyway, and
    the data's own duplicates are told elsewhere (`overlap`).
    """
    foreign = np.setdiff1d(pretrained_on, training)
    for name, split in (("validation", data.val), ("test", data.test)):
        leaked = np.isin(split.fingerprints, foreign)
        if leaked.any():
            first = split.ids[int(np.flatnonzero(leaked)[0])]
            raise CheckpointError(
                f"{source} was pretrained on {int(leaked.sum())} of the {len(split)} {name} rows of this task (the "
                f"first is row {first}), so its score there would mean nothing; pretrain on this task's training split"
            )


def prepared(opened: Opened) -> Path:
    """The folder with the task's splits, made now if it is not there."""
    component, config, raw = opened.component, opened.config, data_dir().resolve()
    shared = set(TaskConfig.model_fields)
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
                _write(folder, _load(component, config, raw))
    return folder


def _stats(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Size and time of change: an edited file is read again."""
    return [(path, path.stat()) for path in paths]


def _source(module: Any) -> str:
    """Hash of the code that reads: a task's file, and what our own tasks share."""
    paths = [Path(module.__file__)]
    if module.__name__.startswith("spt.tasks."):
        paths += [path for path in [paths[0].with_name("files.py")] if path.is_file()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


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


def _load(component: Component, config: TaskConfig, raw: Path) -> TaskData:
    data = _call(component, "load", config, raw)
    if not isinstance(data, TaskData):
        raise DataError(f"task {component.identity}: load returned {type(data).__name__}, not TaskData")
    try:
        data.check()
    except ValueError as error:
        raise DataError(f"task {component.identity}: {error}") from error
    return data


def _call(component: Component, function: str, *arguments: Any) -> Any:
    """What a task's function returns. Its complaints, and failures of code that is not ours, become DataError."""
    try:
        return getattr(component.module, function)(*arguments)
    except SptError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:  # the system's, not the task's own words
            reason = f"{error.filename} cannot be read: {error.strerror}"
        raise DataError(f"task {component.identity}: {reason}") from error
    except (Exception, SystemExit) as error:
        if component.module.__name__.startswith("spt.tasks."):
            raise  # a bug of ours
        raise DataError(f"task {component.identity}: {function} fails with {brief(error)}") from error


def _write(folder: Path, data: TaskData) -> None:
    import pyarrow as pa

    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with writing(folder):
        beside.mkdir()
        try:
            prints = {}
            for name, split in data.splits.items():
                assert split.targets is not None
                targets = np.asarray(split.targets)
                prints[name] = fingerprints(split)
                columns = {
                    "values": _lists(split),
                    "target": pa.array(targets.astype(np.int64)) if targets.ndim == 1 else _vectors(targets),
                    "id": pa.array(split.ids),
                    "fingerprint": pa.array(prints[name]),
                }
                table = pa.table(columns)
                # One record batch, so that a column is one zero-copy array.
                with (
                    pa.OSFile(str(beside / f"{name}.arrow"), "wb") as file,
                    pa.ipc.new_stream(file, table.schema) as out,
                ):
                    out.write_batch(table.to_batches()[0])
            manifest: dict[str, Any] = {
                "input": describe(data.input),
                "target": describe(data.target),
                "rows": _check_sums(data, prints),
            }
            if data.notes:
                manifest["notes"] = list(data.notes)
            (beside / "data.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)  # a folder without its manifest
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _lists(split: Split) -> Any:
    """Each row's numbers as one Arrow list; nothing is copied when the rows lie one behind the other."""
    import pyarrow as pa

    values, channels = split.values, 1 if split.values.ndim == 1 else split.values.shape[1]
    if not split.contiguous:
        values = np.empty((int(split.lengths.sum()), *values.shape[1:]), values.dtype)
        place = 0
        for i in range(len(split)):
            row = split.row(i)
            values[place : place + len(row)] = row
            place += len(row)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(split.lengths * channels)])
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(flat))


def _vectors(targets: NDArray[Any]) -> Any:
    import pyarrow as pa

    n, size = targets.shape
    return pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32) * size, targets.astype(np.float64).reshape(-1))


def _read(folder: Path) -> TaskData:
    import datasets

    try:
        manifest = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        input, target = _from_spec(manifest["input"]), _from_spec(manifest["target"])
        splits = {}
        for name in ("train", "val", "test"):
            table = datasets.Dataset.from_file(str(folder / f"{name}.arrow")).data.table
            column = table.column("values").chunk(0)
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=True)
            if isinstance(input, Values):
                values, offsets = values.reshape(-1, input.channels), offsets // input.channels
            targets = table.column("target").to_numpy() if isinstance(target, Classes) else None
            if isinstance(target, Reals):
                targets = table.column("target").chunk(0).flatten().to_numpy().reshape(-1, target.size)
            ids, prints = table.column("id").to_numpy(), table.column("fingerprint").to_numpy()
            ids = ids.astype(str) if ids.dtype == object else ids
            splits[name] = Split(values, offsets[:-1], offsets[1:], targets, ids, prints)
        notes = tuple(manifest.get("notes", ()))
        data = TaskData(input, target, splits["train"], splits["val"], splits["test"], notes=notes)
        if manifest["rows"] != _check_sums(data, {name: split.fingerprints for name, split in splits.items()}):
            raise ValueError("other rows than were prepared")
        return data
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(
            f"the prepared data in {folder} are damaged ({type(error).__name__}); delete the folder, it is made again"
        ) from error


def _check_sums(data: TaskData, prints: Mapping[str, NDArray[np.uint64]]) -> dict[str, Any]:
    """What data.json remembers of the rows."""
    return {name: record(replace(split, fingerprints=prints[name])).model_dump() for name, split in data.splits.items()}


def fingerprints(split: Split) -> NDArray[np.uint64]:
    """(n,) One number for each row's input, from its bytes and their type."""
    person = split.values.dtype.str.encode()[:16]
    found = np.empty(len(split), np.uint64)
    for i in range(len(split)):
        row = np.ascontiguousarray(split.row(i)).reshape(-1).view(np.uint8)
        found[i] = int.from_bytes(hashlib.blake2b(row.data, digest_size=8, person=person).digest(), "little")
    return found


def _from_spec(spec: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"Tokens": Tokens, "Values": Values, "Classes": Classes, "Reals": Reals}
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items() if key != "kind"}
    return kinds[spec["kind"]](**options)
