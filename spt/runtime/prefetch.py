"""What comes next is made by a thread, while the caller, or its device, works on what there is."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


def prefetched(make: Callable[[Item], Value], items: Iterable[Item]) -> Generator[Value]:
    """make(item) of all items, in their order. Close it, where not all values are taken."""
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[Value] | None = None
        for item in items:
            following = pool.submit(make, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
