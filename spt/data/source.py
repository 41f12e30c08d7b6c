"""A task's module with its checked options, its hooks, and the folders it reads."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from spt.config.plugins import Component, find_plugin
from spt.config.recipe import Part
from spt.errors import DataError, SptError, one_line
from spt.runs.files import writing
from spt.runtime.signals import cleanup
from spt.tasks.base import TaskConfig


class OpenTask(NamedTuple):
    """A task part's module with its checked options."""

    component: Component
    config: TaskConfig

    @property
    def files(self) -> list[Path]:
        """What the task reads, as far as it is there and the task says so."""
        module, raw = self.component.module, data_dir().resolve()
        if not hasattr(module, "sources"):
            return []
        named = call_hook(self.component, "sources", self.config, raw)
        return sorted(path for path in map(Path, named) if os.path.exists(path))


def open_part(part: Part) -> OpenTask:
    component = find_plugin("tasks", part.name)
    return OpenTask(component, component.module.Config.model_validate_json(json.dumps(part.options)))


def from_hub(name: str, folder: Path) -> None:
    """Copy a hub data set's splits, train among them, into a folder, as Parquet files. Raises DataError."""
    import datasets

    beside = folder.with_name(f".{folder.name}.part")
    with writing(folder), cleanup(lambda _: shutil.rmtree(beside, ignore_errors=True)):
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
                raise DataError(f"{name} cannot be copied from the Hugging Face hub: {one_line(error)}") from error
            folder.mkdir(exist_ok=True)
            for split in splits:
                (beside / f"{split}.parquet").replace(folder / f"{split}.parquet")
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def call_hook(component: Component, function: str, *arguments: Any) -> Any:
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
        raise DataError(f"task {component.identity}: there is no memory for its rows ({one_line(error)})") from error
    except (Exception, SystemExit) as error:
        if component.module.__name__.startswith("spt.tasks."):
            raise  # a bug of ours
        raise DataError(f"task {component.identity}: {function} fails with {one_line(error)}") from error


def cache_dir() -> Path:
    """`SPT_CACHE_DIR`, by default the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spt"
    return Path(os.environ.get("SPT_CACHE_DIR") or default)


def data_dir() -> Path:
    """`SPT_DATA_DIR`: raw sources, only ever read."""
    return Path(os.environ.get("SPT_DATA_DIR") or "data")


def is_indexable(opened: OpenTask) -> bool:
    """Does the task make only as many rows as are asked for?"""
    return getattr(opened.component.module, "INDEXABLE", False) is True
