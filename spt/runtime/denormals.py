"""Numbers below 1e-38, which float32 holds with less than its precision, and processors compute many times as slowly
with.

Attention that has become sure of a place has such weights for all others, and a training step took twice as long. Where
a processor cannot let them be zero, nothing changes.
"""

import contextlib
from collections.abc import Iterator
from functools import cache

import torch

A_THREAD = 2**16  # numbers, more than PyTorch leaves to one thread


@contextlib.contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Within, they become zero in this thread and in those that are started. Not for good: a program's own numbers, and
    libraries that look into them, may need them."""
    before = bool(torch.tensor(1e-30) * 1e-10 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@cache
def start_threads() -> None:
    """Start the threads that PyTorch computes with, before others do: they keep the mode in which they were started."""
    with denormals_as_zero():
        torch.ones(A_THREAD * torch.get_num_threads()).add_(1.0)
