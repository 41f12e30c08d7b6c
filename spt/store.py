"""A task's splits, kept through `datasets` as Arrow files: prepared once under a lock, then opened as memory maps.

    <cache>/tasks/<task>-<hash>/{train,val,test}.arrow, data.json

The hash covers the task's options and source, so an edited task is prepared anew. The folder is filled beside and
renamed, so its existence means that it is complete.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from spt.components import find, is_path
from spt.errors import CheckpointError, DataError, SptError
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
        targets = hashlib.sha256(np.ascontiguousarray(split.targets).tobytes()).hexdigest()[:16]
    return SplitRecord(rows=len(split), inputs=inputs, targets=targets)


def overlap(data: TaskData) -> dict[str, int]:
    """How many rows of validation and test have the same input as a training row."""
    return {
        name: int(np.isin(split.fingerprints, data.train.fingerprints).sum())
        for name, split in (("val", data.val), ("test", data.test))
    }


def training_rows(part: Part) -> NDArray[np.uint64]:
    """Fingerprints of the task's whole training split, whatever fraction of it is in use."""
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
    options = {key: value for key, value in config.model_dump(mode="json").items() if key not in shared}
    source = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    key = digest({"format": FORMAT, "options": options, "source": source})
    name = f"{identity.partition('@')[0].replace('/', '-')}-{key}"
    folder = cache_dir() / "tasks" / name
    if (folder / "data.json").is_file():
        return folder
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if not (folder / "data.json").is_file():
            _write(folder, _load(identity, module, config))
    return folder


def _load(identity: str, module: Any, config: TaskConfig) -> TaskData:
    try:
        data = module.load(config, data_dir())
        if not isinstance(data, TaskData):
            raise DataError(f"task {identity}: load returned {type(data).__name__}, not TaskData")
        data.check()
    except SptError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"task {identity}: {error}") from error
    except Exception as error:
        if is_path(str(module.__file__)) and module.__name__.startswith("spt.tasks."):
            raise  # a bug of ours
        raise DataError(f"task {identity}: loading fails with {type(error).__name__}: {error}") from error
    return data


def _write(folder: Path, data: TaskData) -> None:
    import pyarrow as pa

    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with writing(folder):
        beside.mkdir()
        try:
            for name, split in data.splits.items():
                channels = 1 if split.values.ndim == 1 else split.values.shape[1]
                assert split.targets is not None
                rows = [np.ascontiguousarray(split.row(i)) for i in range(len(split))]
                offsets = np.concatenate([[0], np.cumsum(split.lengths * channels)])
                flat = np.concatenate([row.reshape(-1) for row in rows])
                targets = np.asarray(split.targets)
                columns = {
                    "values": pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(flat)),
                    "target": pa.array(
                        targets.astype(np.int64) if targets.ndim == 1 else list(targets.astype(np.float64))
                    ),
                    "id": pa.array(split.ids),
                    "fingerprint": pa.array(np.array([_fingerprint(row) for row in rows], np.uint64)),
                }
                table = pa.table(columns)
                # One record batch, so that a column is one zero-copy array.
                with (
                    pa.OSFile(str(beside / f"{name}.arrow"), "wb") as file,
                    pa.ipc.new_stream(file, table.schema) as out,
                ):
                    out.write_batch(table.to_batches()[0])
            manifest = {"input": _spec(data.input), "target": _spec(data.target)}
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
        return TaskData(input, target, **splits)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the prepared data in {folder} are damaged ({type(error).__name__}); delete the folder, it is made again"
        ) from error


def _fingerprint(row: NDArray[Any]) -> int:
    text = hashlib.blake2b(row.tobytes(), digest_size=8, person=row.dtype.str.encode()[:16])
    return int.from_bytes(text.digest(), "little")


def _spec(part: Tokens | Values | Classes | Reals) -> dict[str, Any]:
    return {"kind": type(part).__name__, **asdict(part)}


def _from_spec(spec: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"Tokens": Tokens, "Values": Values, "Classes": Classes, "Reals": Reals}
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items() if key != "kind"}
    return kinds[spec["kind"]](**options)
