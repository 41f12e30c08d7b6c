"""Functions compiled with numba where it is installed; the same functions, slower, where it is not."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def is_compiled() -> bool:
    """Whether functions under `jit` are machine code, which threads run side by side."""
    return _numba() is not None


def jit(function: F) -> F:
    """Compile at the first call.

    Without fast-math or parallel loops, so that the numbers are the same as uncompiled. Machine code is kept beside the
    file it comes from, until that file changes: compiled functions that call each other stand in one file.
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
