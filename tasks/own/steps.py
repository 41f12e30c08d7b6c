"""The steps of all rows that are read, end to end: in memory while they are few, else in a temporary file."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from spt.tasks import parallel
from spt.tasks.parallel import Reel

PIECE = 2**24  # bytes that are written, or converted, at once


class Steps:
    """Memory holds no more than `parallel.IN_MEMORY` bytes of them, however many there are."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._memory = bytearray()  # all of them, or those that are not in the file yet
        self._reel: Reel | None = None
        self._bytes = 0

    def __len__(self) -> int:
        """Numbers, one for every channel of a step."""
        return self._bytes // self.dtype.itemsize

    def add(self, steps: NDArray[Any]) -> None:
        """(L,) or (L, C) of the type that is stored. Raises ValueError where the disk is full."""
        self._memory += steps.tobytes()
        self._bytes += steps.nbytes
        if len(self._memory) > (parallel.IN_MEMORY if self._reel is None else PIECE):
            self._write()

    def array(self) -> NDArray[Any]:
        """All of them, in one dimension, to be changed in place; nothing is added afterwards."""
        if self._reel is None:
            return np.frombuffer(self._memory, self.dtype)
        self._write()
        return self._reel.whole("r+").view(self.dtype)

    def converted(self, dtype: DTypeLike, convert: Callable[[NDArray[Any]], NDArray[Any]]) -> "Steps":
        """The same in another type, number by number."""
        other, all_, size = Steps(dtype), self.array() if self._bytes else np.empty(0, self.dtype), PIECE
        for first in range(0, len(all_), size):
            other.add(convert(all_[first : first + size]))
            parallel.release(all_)
        return other

    def _write(self) -> None:
        if self._reel is None:
            self._reel = Reel(np.uint8)
        if self._memory:
            self._reel.add(np.frombuffer(self._memory, np.uint8))
        self._memory = bytearray()
