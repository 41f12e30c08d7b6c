"""A task's splits, kept through `datasets` as Arrow files: prepared once under a lock, then opened as memory maps.

    <cache>/tasks/<task>-<hash>/{train,val,test}.arrow, data.json

The hash covers the task's options and source, so an edited task is prepared anew. The folder is filled beside and
renamed, so its existence means that it is complete.
"""

import ast
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
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
from spt.tasks import __path__ as TASKS
from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values, describe
from spt.tasks.generators.workers import room

FORMAT = 3


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
        named = call(self.component, "sources", self.config, raw)
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

    A limit takes the first rows of every split. A fraction is a prefix of one permutation of the training split, so
    subsets are nested (SPT paper, appendix C.1.4); stratified, of one in which every class comes as often as in the
    whole split, early and late.
    """
    opened = open_part(part)
    config, module = opened.config, opened.component.module
    data = _read(prepared(opened))
    whole, limit = len(data.train), config.limit
    if limit is not None:
        data = data.mapped(lambda split: split.take(np.arange(min(limit, len(split)))))
    keep = max(1, int(config.fraction * len(data.train)))
    if keep < len(data.train):
        rows = generator(config.subset_seed, "subset").permutation(len(data.train))
        if config.stratified:
            rows = rows[_spread(_classes(data, opened.component)[rows])]
        data = replace(data, train=data.train.take(rows[:keep]))
    coded = isinstance(data.input, Tokens) and data.input.codes is not None
    if coded and len(data.train) < whole and hasattr(module, "vocabulary"):
        data = replace(data, input=call(opened.component, "vocabulary", config, data.train))
    if hasattr(module, "sample") and getattr(config, "fresh", True):
        if data.train.cuts is not None:
            raise DataError(f"task {opened.component.identity}: rows of pairs cannot be made anew; leave out sample")
        data = replace(data, fresh=partial(_fresh, opened.component, config, data))
    return data


def _classes(data: TaskData, component: Component) -> NDArray[np.int64]:
    """(n,) The class of every training row. Raises DataError where rows have none."""
    if not isinstance(data.target, Classes) or data.train.per_step:
        raise DataError(f"task {component.identity}: stratified needs one class for every sequence; leave it out")
    return np.asarray(data.train.targets)


def _spread(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order in which every class is spread evenly: the j-th of its n rows comes at about (j + 1/2) / n."""
    order = np.argsort(classes, kind="stable")
    _, first, counts = np.unique(classes[order], return_index=True, return_counts=True)
    rank = np.empty(len(classes))
    rank[order] = (np.arange(len(classes)) - np.repeat(first, counts) + 0.5) / np.repeat(counts, counts)
    return np.argsort(rank, kind="stable")


def _fresh(component: Component, config: TaskConfig, data: TaskData, ids: NDArray[np.int64], epoch: int) -> Split:
    """Training rows of a later epoch, as the task makes them, once they are known to be of the kind asked for."""
    made = call(component, "sample", config, ids, epoch)
    place = f"task {component.identity}: sample"
    if not isinstance(made, Split):
        raise DataError(f"{place} returned {type(made).__name__}, not a Split")
    if not np.array_equal(made.ids, ids):
        raise DataError(f"{place} returned {len(made)} rows that do not have the {len(ids)} ids asked for")
    if made.values.dtype != data.train.values.dtype or (made.steps is None) != (data.train.steps is None):
        raise DataError(f"{place} returned {made.values.dtype} values, or times, unlike load's")
    try:
        replace(data, train=made, val=made, test=made).check()
    except ValueError as error:
        raise DataError(f"{place}: {str(error).replace('the train split', 'what it returned')}") from error
    if int(made.extents.max()) > data.length:
        raise DataError(
            f"{place} returned a row of {int(made.extents.max()):,} steps, but the task's longest has {data.length:,}; "
            "say TaskData(length=…)"
        )
    return made


def open_part(part: Part) -> Opened:
    component = find("tasks", part.name)
    return Opened(component, component.module.Config.model_validate_json(json.dumps(part.options)))


def record(split: Split) -> SplitRecord:
    """A split's identity, from its rows' fingerprints and its labels, in order."""
    inputs = hashlib.sha256(np.ascontiguousarray(split.fingerprints).tobytes()).hexdigest()[:16]
    targets = None
    if split.targets is not None:
        kind = np.int64 if split.targets.dtype.kind in "iu" else np.float64
        told = split.answers if split.per_step else np.ascontiguousarray(split.targets, kind)
        assert told is not None, "prepared rows have fingerprints of their steps' targets"
        targets = hashlib.sha256(np.ascontiguousarray(told).tobytes()).hexdigest()[:16]
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
    """Copy a hub data set's splits, train among them, into a folder, as Parquet files. Raises DataError."""
    import datasets

    beside = folder.with_name(f".{folder.name}.part")
    with writing(folder):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            try:
                found = datasets.load_dataset(name)
                splits = [split for split in ("train", "validation", "test") if split == "train" or split in found]
                for split in splits:
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
            for split in splits:
                (beside / f"{split}.parquet").replace(folder / f"{split}.parquet")
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def training_fingerprints(part: Part) -> NDArray[np.uint64]:
    """Of the sequences of the task's whole training split, whatever fraction of it is in use.

    A generated task is not made whole for this: a row of it cannot be one of other splits.
    """
    limit = {} if _addressed(open_part(part)) else {"limit": None}
    return open_task(Part(**{**part.model_dump(), "fraction": 1.0, **limit})).train.seen


def refuse_leak(pretrained_on: NDArray[np.uint64], training: NDArray[np.uint64], data: TaskData, source: str) -> None:
    """Raise CheckpointError when a pretraining row lies in this task's validation or test split.

    A row that the benchmark itself repeats in its training split does not count: both arms may see it anyway, and
    the data's own duplicates are told elsewhere (`overlap`).
    """
    foreign = np.setdiff1d(pretrained_on, training)
    for name, split in (("validation", data.val), ("test", data.test)):
        leaked = np.isin(split.seen, foreign).reshape(len(split), -1).any(axis=1)
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
    if _addressed(opened):
        shared -= {"limit"}
    if not _addressed(opened):
        config = config.model_copy(update={"limit": None})
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


def _addressed(opened: Opened) -> bool:
    """Does the task make only as many rows as are asked for?"""
    return getattr(opened.component.module, "ADDRESSED", False) is True


def _stats(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Size and time of change: an edited file is read again."""
    return [(path, path.stat()) for path in paths]


def _source(module: Any) -> str:
    """Hash of the code that reads: a task's file, and what it imports of ours."""
    files = {Path(module.__file__): None} | dict.fromkeys(_imported(Path(module.__file__)))
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


def _load(component: Component, config: TaskConfig, raw: Path) -> TaskData:
    data = call(component, "load", config, raw)
    if not isinstance(data, TaskData):
        raise DataError(f"task {component.identity}: load returned {type(data).__name__}, not TaskData")
    try:
        data.check()
    except ValueError as error:
        raise DataError(f"task {component.identity}: {error}") from error
    return data


def call(component: Component, function: str, *arguments: Any) -> Any:
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
    except MemoryError as error:
        raise DataError(f"task {component.identity}: there is no memory for its rows ({brief(error)})") from error
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
            data = data.mapped(_printed)
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
                "rows": {name: record(split).model_dump() for name, split in data.splits.items()},
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
            shutil.rmtree(beside, ignore_errors=True)


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
        joined, place = room((int(split.lengths.sum()), *array.shape[1:]), array.dtype), 0
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


def _read(folder: Path) -> TaskData:
    import datasets

    try:
        manifest = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        input, target = _from_spec(manifest["input"]), _from_spec(manifest["target"])
        splits = {}
        for name in ("train", "val", "test"):
            table = datasets.Dataset.from_file(str(folder / f"{name}.arrow")).data.table
            splits[name] = _from_columns(table, input, target)
            if manifest["rows"][name] != record(splits[name]).model_dump():
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


def _printed(split: Split) -> Split:
    """With fingerprints of its inputs and, where they are those of steps, of its targets."""
    prints = fingerprints(split)
    if split.per_step:
        assert split.targets is not None
        split = replace(split, answers=_prints(split.targets, split.starts, split.stops))
    if split.cuts is None:
        return replace(split, fingerprints=prints)
    bare = split.unlabelled()
    return replace(split, fingerprints=prints, halves=fingerprints(bare).reshape(-1, 2))


def fingerprints(split: Split) -> NDArray[np.uint64]:
    """(n,) One number for each row's input: its bytes, their type, where a pair is cut, when its steps are."""
    found = _prints(split.values, split.starts, split.stops)
    if split.steps is not None:
        found ^= _prints(split.steps, split.starts, split.stops)
    return found if split.cuts is None else found ^ (split.cuts.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _prints(array: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    person = array.dtype.str.encode()[:16]
    found = np.empty(len(starts), np.uint64)
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        row = np.ascontiguousarray(array[start:stop]).reshape(-1).view(np.uint8)
        found[i] = int.from_bytes(hashlib.blake2b(row.data, digest_size=8, person=person).digest(), "little")
    return found


def _from_spec(spec: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"Tokens": Tokens, "Values": Values, "Classes": Classes, "Reals": Reals}
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items() if key != "kind"}
    return kinds[spec["kind"]](**options)
