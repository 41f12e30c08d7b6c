"""Chance is addressed, not consumed: every draw follows from a seed, a purpose and an address, never from history.

So the batch size, the number of processes, and interruptions change nothing, and a new use disturbs no old one.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spt.tasks.generators.chance import keys, uniforms
from spt.tasks.generators.workers import generator, stream

__all__ = ["Draw", "generator", "order", "seeded", "stream"]


def order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of n examples in one epoch; the same in both arms of a comparison."""
    return generator(seed, "order", epoch).permutation(n)


@contextlib.contextmanager
def seeded(seed: int, *address: object) -> Iterator[None]:
    """Draw torch's random numbers from this stream, and put its state back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, *address) & (2**63 - 1))
        yield


class Draw(NamedTuple):
    """Counter-based uniforms, addressed by (seed, use, epoch, example, position)."""

    seed: int
    use: str
    epoch: int

    def uniform(self, index: NDArray[np.int64], length: int) -> NDArray[np.float64]:
        """Uniforms in [0, 1), one row for each example in `index`, (B, length).

        Rows do not depend on each other, and a shorter row is a prefix of a longer one.
        """
        return uniforms(keys(self.seed, self.use, self.epoch, rows=index), length)
