"""A task's splits, kept through `datasets` as Arrow files: prepared once under a lock, then opened as memory maps.

    <cache>/tasks/<task>-<hash>/{train,val,test}.arrow, data.json

The hash covers the task's options and source, so an edited task is prepared anew. The folder is filled beside and
renamed, so its existence means that it is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from spt.components import find
from spt.errors import CheckpointError, DataError, SptError, brief
from spt.plan import digest
from spt.recipe import Part
from spt.run import SplitRecord, writing
from spt.seeding import generator
from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values

FORMAT = 1


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
    component = find("tasks", part.name)
    config = component.module.Config.model_validate_json(json.dumps(part.options))
    folder = _prepared(component.identity, component.module, config)
    data = _read(folder)
    keep = max(1, int(config.fraction * len(data.train)))
    if keep < len(data.train):
        rows = generator(config.subset_seed, "subset").permutation(len(data.train))[:keep]
        data = replace(data, train=data.train.take(rows))
    limit = config.limit
    return data if limit is None else data.mapped(lambda split: split.take(np.arange(min(limit, len(split)))))


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
    return digest({name: record(split).model_dump() for name, split in open_task(part).splits.items()})


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


def _prepared(identity: str, module: Any, config: TaskConfig) -> Path:
    shared = set(TaskConfig.model_fields)
    raw = data_dir().resolve()
    key = {
        "format": FORMAT,
        "options": {key: value for key, value in config.model_dump(mode="json").items() if key not in shared},
        "source": hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest(),
        "raw": str(raw),
        "files": _stamps(module.sources(config, raw)) if hasattr(module, "sources") else [],
    }
    name = identity.partition("@")[0].replace("/", "-")
    folder = cache_dir() / "tasks" / f"{name}-{digest(key)}"
    if os.path.isfile(folder / "data.json"):
        return folder
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not (folder / "data.json").is_file():
                _write(folder, _load(identity, module, config, raw))
    return folder


def _stamps(paths: Iterable[Path]) -> list[Any]:
    """Name, size and time of change of the files a task reads: an edited one is read again."""
    stats = [(path, path.stat()) for path in sorted(map(Path, paths)) if path.exists()]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _load(identity: str, module: Any, config: TaskConfig, raw: Path) -> TaskData:
    try:
        data = module.load(config, raw)
        if not isinstance(data, TaskData):
            raise DataError(f"task {identity}: load returned {type(data).__name__}, not TaskData")
        data.check()
    except SptError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"task {identity}: {error}") from error
    except (Exception, SystemExit) as error:
        if module.__name__.startswith("spt.tasks."):
            raise  # a bug of ours
        raise DataError(f"task {identity}: loading fails with {brief(error)}") from error
    return data


def _write(folder: Path, data: TaskData) -> None:
    import pyarrow as pa

    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with writing(folder):
        beside.mkdir()
        try:
            prints = {}
            for name, split in data.splits.items():
                channels = 1 if split.values.ndim == 1 else split.values.shape[1]
                assert split.targets is not None
                rows = [np.ascontiguousarray(split.row(i)) for i in range(len(split))]
                offsets = np.concatenate([[0], np.cumsum(split.lengths * channels)])
                flat = np.concatenate([row.reshape(-1) for row in rows])
                targets = np.asarray(split.targets)
                prints[name] = np.array([_fingerprint(row) for row in rows], np.uint64)
                columns = {
                    "values": pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(flat)),
                    "target": pa.array(
                        targets.astype(np.int64) if targets.ndim == 1 else list(targets.astype(np.float64))
                    ),
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
            manifest = {"input": _spec(data.input), "target": _spec(data.target), "rows": _check_sums(data, prints)}
            (beside / "data.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)  # a folder without its manifest
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


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
            targets = table.column("target").to_numpy()
            if isinstance(target, Reals):
                targets = np.stack(list(targets))
            ids, prints = table.column("id").to_numpy(), table.column("fingerprint").to_numpy()
            splits[name] = Split(values, offsets[:-1], offsets[1:], targets, ids, prints)
        data = TaskData(input, target, splits["train"], splits["val"], splits["test"])
        if manifest["rows"] != _check_sums(data, {name: split.fingerprints for name, split in splits.items()}):
            raise ValueError("other rows than were prepared")
        return data
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"the prepared data in {folder} are damaged ({type(error).__name__}); delete the folder, it is made again"
        ) from error


def _check_sums(data: TaskData, prints: Mapping[str, NDArray[np.uint64]]) -> dict[str, Any]:
    """What data.json remembers of the rows."""
    return {name: record(replace(split, fingerprints=prints[name])).model_dump() for name, split in data.splits.items()}


def _fingerprint(row: NDArray[Any]) -> int:
    text = hashlib.blake2b(row.tobytes(), digest_size=8, person=row.dtype.str.encode()[:16])
    return int.from_bytes(text.digest(), "little")


def _spec(part: Tokens | Values | Classes | Reals) -> dict[str, Any]:
    return {"kind": type(part).__name__, **asdict(part)}


def _from_spec(spec: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"Tokens": Tokens, "Values": Values, "Classes": Classes, "Reals": Reals}
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items() if key != "kind"}
    return kinds[spec["kind"]](**options)
