"""A task's module with its checked options, its hooks, and the folders it reads."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from spt.config.plugins import Component, find_plugin
from spt.config.recipe import Part
from spt.errors import DataError, SptError, one_line
from spt.tasks.base import Classes, Target, TaskConfig, Tokens, Values
from spt.tasks.parallel import temporary_files_in


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


@contextmanager
def hook_errors(
    owner: str, module: ModuleType, function: str, passing: tuple[type[Exception], ...] = (SptError,)
) -> Iterator[None]:
    """Turn complaints of a plug-in's function, and failures of code that is not ours, into DataError."""
    try:
        yield
    except passing:
        raise
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:  # the system's words, not the plug-in's
            reason = f"{error.filename} cannot be read: {error.strerror}"
        raise DataError(f"{owner}: {reason}") from error
    except MemoryError as error:
        raise DataError(f"{owner}: there is no memory for its rows ({one_line(error)})") from error
    except (Exception, SystemExit) as error:
        if module.__name__.startswith(("spt.tasks.", "spt.models.")):
            raise  # a bug of ours
        raise DataError(f"{owner}: {function} fails with {one_line(error)}") from error


def call_hook(component: Component, function: str, *arguments: Any) -> Any:
    """What a task's function returns. Raises DataError where it fails."""
    with hook_errors(f"task {component.identity}", component.module, function):
        return getattr(component.module, function)(*arguments)


def cache_dir() -> Path:
    """`SPT_CACHE_DIR`, by default the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spt"
    return Path(os.environ.get("SPT_CACHE_DIR") or default)


def data_dir() -> Path:
    """`SPT_DATA_DIR`: raw sources, only ever read."""
    return Path(os.environ.get("SPT_DATA_DIR") or "data")


@contextmanager
def temporary_files() -> Iterator[None]:
    """What is too large for memory while it is made lies beside the cache."""
    with temporary_files_in(cache_dir() / "tasks"):
        yield


def is_indexable(task: OpenTask) -> bool:
    """Does the task make only as many rows as are asked for?"""
    return getattr(task.component.module, "INDEXABLE", False) is True


def reading(task: OpenTask, input: Tokens | Values) -> dict[str, Any]:
    """What new rows are read by, for a JSON file, of a task that reads the user's own; {} of others."""
    if not hasattr(task.component.module, "reading"):
        return {}
    with temporary_files():
        read: dict[str, Any] = call_hook(task.component, "reading", task.config, data_dir().resolve(), input)
    return read


def class_names(task: OpenTask, target: Target) -> tuple[str, ...]:
    """What the task calls each class; () where it does not say."""
    if not (isinstance(target, Classes) and hasattr(task.component.module, "class_names")):
        return ()
    names = tuple(map(str, call_hook(task.component, "class_names", task.config)))
    return names if len(names) == target.count else ()  # it predicts other classes, as subtrees' vocabulary
