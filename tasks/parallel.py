"""Rows made by several workers, and arrays that may be larger than memory.

A row is determined by a seed and its address alone, never by the worker that makes it. `SPT_WORKERS` says how many work
at once; by default as many as this process has processors.
"""

import itertools
import logging
import math
import mmap
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

T = TypeVar("T")

IN_MEMORY = 2**28  # bytes of an array; larger ones lie in a file
AT_ONCE = 2**25  # bytes of such a file that are worked on before they are released
logger = logging.getLogger(__name__)


def worker_count() -> int:
    """How many work at once. Raises ValueError when SPT_WORKERS is no whole number above 0."""
    setting = os.environ.get("SPT_WORKERS", "").strip()
    if not setting:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not setting.isdigit() or int(setting) < 1:
        raise ValueError(f"SPT_WORKERS is {setting!r}; give the number of workers, 1 or more")
    return int(setting)


def map_chunks(
    make: Callable[[int, int], T], n: int, size: int, what: str, by: Literal["threads", "processes"] = "threads"
) -> Iterator[T]:
    """make(0, size), make(size, 2 size), … make(…, n), in this order, by several workers.

    `what` names the work in the log. With processes, `make` has to be picklable: a function of a module, or a
    functools.partial of one; that of a script needs the script's `if __name__ == "__main__"`.
    """
    chunks = [(first, min(first + size, n)) for first in range(0, n, size)]
    count = min(worker_count(), len(chunks))
    begun = logged = time.monotonic()
    for (_, last), result in zip(chunks, _mapped(make, chunks, count, by), strict=True):
        now = time.monotonic()
        if now - logged > 10:
            logger.info("%s: %s of %s rows, %.0f a second", what, f"{last:,}", f"{n:,}", last / (now - begun))
            logged = now
        yield result


def fill(
    arrays: Sequence[NDArray[Any] | None],
    make: Callable[[int, int], Sequence[NDArray[Any] | None]],
    n: int,
    size: int,
    what: str,
    by: Literal["threads", "processes"] = "threads",
) -> None:
    """Fill arrays of n rows with those that make(first, last) gives, as `map_chunks` divides the work."""
    for first, parts in zip(range(0, n, size), map_chunks(make, n, size, what, by), strict=True):
        for array, part in zip(arrays, parts, strict=True):
            if array is not None and part is not None:
                array[first : first + size] = part


def _mapped(
    make: Callable[[int, int], T], chunks: list[tuple[int, int]], count: int, by: Literal["threads", "processes"]
) -> Iterator[T]:
    if count < 2:
        yield from (make(*chunk) for chunk in chunks)
        return
    pool: Executor
    if by == "threads":
        pool = ThreadPoolExecutor(count)
    else:
        # Ctrl-C is for the process that asked: it ends the others.
        ignore = (signal.signal, (signal.SIGINT, signal.SIG_IGN))
        function: Callable[..., Any] = make
        given: list[Any] = []
        while isinstance(function, partial):
            given += [*function.args, *function.keywords.values()]
            function = function.func
        parts = (function, *given, *map(type, given))
        of_script = any(getattr(part, "__module__", "") == "__main__" for part in parts)
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn") if of_script else _Spawn(), *ignore)
    with pool:
        waiting: deque[Future[T]] = deque()
        try:
            for chunk in chunks:  # not all at once: what is made ahead of its turn waits in memory
                waiting.append(pool.submit(make, *chunk))
                if len(waiting) >= 4 * count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Process(multiprocessing.context.SpawnProcess):
    """One that does not import the caller's script, as Python's own do: without `if __name__ == "__main__"` that would
    run once more in each, and what it waits for may be the caller's to make."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
        main.__spec__ = None
        try:
            super().start()
        finally:
            vars(main).update(hidden)


class _Spawn(multiprocessing.context.SpawnContext):
    Process = _Process


_FOLDER: ContextVar[Path | None] = ContextVar("folder of temporary files", default=None)


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Arrays too large for memory lie on this folder's disk, unless TMPDIR names another: /tmp may be memory."""
    before = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(before)


def _folder() -> str:
    folder = None if os.environ.get("TMPDIR") else _FOLDER.get()
    if folder is None:
        return tempfile.gettempdir()
    folder.mkdir(parents=True, exist_ok=True)  # not before it is needed: most that is read is small
    return str(folder)


def release(array: NDArray[Any]) -> None:
    """Free the memory of what was read or written of an array in a file; it is read again when it is used."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)  # of a shared map: changes are in the file's pages


class PageRelease:
    """Releases arrays in files while their rows are visited: pages near a row come with it, so what counts is how far
    the visit has come, not how much was used."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self.arrays = arrays
        self._place = self._passed = 0

    def visit(self, start: int, stop: int) -> None:
        """Steps of the first array."""
        self._passed += (abs(start - self._place) + stop - start) * self.arrays[0][:1].nbytes
        self._place = stop
        if self._passed > AT_ONCE:
            self._passed = 0
            for array in self.arrays:
                release(array)


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array to be filled; one of more than IN_MEMORY bytes is in a temporary file, which is deleted with it.

    Raises ValueError where the disk is too full for it: writing beyond its end would kill the process.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= IN_MEMORY:
        return np.empty(shape, dtype)
    folder = _folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=shape)
    except OSError as error:
        raise ValueError(
            f"{shape[0]:,} rows take {size / 1e9:,.1f} GB, for which {folder} has no room ({error.strerror}); ask for "
            "fewer or shorter rows, or let TMPDIR name a folder with more"
        ) from error


class Reel:
    """Pieces of text or sound end to end, in a temporary file: they may be more than memory holds."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.ends = [0]
        self._folder = _folder()
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def add(self, piece: NDArray[Any]) -> None:
        """(L,) numbers of the reel's type. Raises ValueError where the disk is full."""
        try:
            self._file.write(np.ascontiguousarray(piece, self.dtype).data)
        except OSError as error:
            raise ValueError(
                f"what is read does not fit into {self._folder} ({error.strerror}); let TMPDIR name a folder with more "
                "room"
            ) from error
        self.ends.append(self.ends[-1] + len(piece))

    def whole(self, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
        """All that was added, at least one step; a map of the file, which lives as long as a view of it."""
        self._file.flush()
        return np.memmap(self._file, self.dtype, mode, shape=(self.ends[-1],))

    def pieces(self) -> list[NDArray[Any]]:
        """The same, piece by piece as added."""
        # As a plain array, which is cut up ten times as fast as a memmap.
        whole = np.asarray(self.whole()) if self.ends[-1] else np.empty(0, self.dtype)
        return [whole[first:last] for first, last in itertools.pairwise(self.ends)]
