"""Rows made by several workers: what a row is follows from a seed and its address alone, never from who makes it.

`SPT_WORKERS` says how many work at once; by default as many as there are processors for us.
"""

import functools
import hashlib
import inspect
import logging
import math
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

IN_MEMORY = 2**30  # bytes of an array; larger ones lie in a file
LOG = logging.getLogger("spt.tasks")


def stream(seed: int, *address: object) -> int:
    """A 64-bit seed for one purpose, e.g. stream(0, "order", epoch)."""
    text = "/".join(str(part) for part in (seed, *address))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *address: object) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream(seed, *address)))


def workers() -> int:
    """How many work at once. Raises ValueError when SPT_WORKERS is no whole number above 0."""
    said = os.environ.get("SPT_WORKERS", "").strip()
    if not said:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not said.isdigit() or int(said) < 1:
        raise ValueError(f"SPT_WORKERS is {said!r}; give the number of workers, 1 or more")
    return int(said)


def compiled() -> bool:
    """Is numba there? Functions under `jit` are then machine code, which threads run side by side."""
    return _numba() is not None


def jit(function: F) -> F:
    """Compile with numba at the first call, where that is installed; else the same function, slower.

    Without fast-math or parallel loops, so that both give the same numbers. Machine code is kept beside the file it
    comes from, until that file changes: compiled functions that call each other stand in one file.
    """
    numba = _numba()
    if numba is None:
        return function
    bare = inspect.unwrap(function)  # out of what a test run puts around it to check types
    try:
        return cast(F, numba.njit(bare, nogil=True, cache=True))
    except RuntimeError:  # neither beside the file nor in the user's cache folder can anything be written
        return cast(F, numba.njit(bare, nogil=True))


@functools.cache
def _numba() -> Any:
    try:
        import numba
    except ImportError:
        return None
    return numba


def chunks(
    make: Callable[[int, int], T], n: int, size: int, what: str, by: Literal["threads", "processes"] = "threads"
) -> Iterator[T]:
    """make(0, size), make(size, 2 size), … make(…, n), in this order, by several workers.

    `what` names the work in the log. With processes, `make` has to be picklable: a function of a module, or a
    functools.partial of one.
    """
    parts = [(first, min(first + size, n)) for first in range(0, n, size)]
    count = min(workers(), len(parts))
    begun = said = time.monotonic()
    done = 0
    for (first, last), found in zip(parts, _mapped(make, parts, count, by), strict=True):
        done += last - first
        now = time.monotonic()
        if now - said > 10:
            LOG.info("%s: %s of %s rows, %.0f a second", what, f"{done:,}", f"{n:,}", done / (now - begun))
            said = now
        yield found


def _mapped(
    make: Callable[[int, int], T], parts: list[tuple[int, int]], count: int, by: Literal["threads", "processes"]
) -> Iterator[T]:
    if count < 2:
        yield from (make(*part) for part in parts)
        return
    pool: Executor
    if by == "threads":
        pool = ThreadPoolExecutor(count)
    else:
        pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    with pool:
        waiting: deque[Future[T]] = deque()
        try:
            for part in parts:  # not all at once: what is made ahead of its turn waits in memory
                waiting.append(pool.submit(make, *part))
                if len(waiting) >= 4 * count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def room(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array to be filled; one of more than a GiB lies in a temporary file, gone with the array.

    Raises ValueError where there is no room for it: writing beyond the end of a disk would end the process.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= IN_MEMORY:
        return np.empty(shape, dtype)
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=shape)
    except OSError as error:
        raise ValueError(
            f"{shape[0]:,} rows take {size / 1e9:,.1f} GB, for which {folder} has no room ({error.strerror}); ask for "
            "fewer or shorter rows, or let TMPDIR name a folder with more"
        ) from error
