"""Chance is addressed, not consumed: every draw follows from a seed, a purpose and an address, never from history.

So the batch size, the number of processes, and interruptions change nothing, and a new use disturbs no old one.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spt.tasks.generators.workers import generator, stream

__all__ = ["Draw", "generator", "order", "seeded", "stream"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: consecutive multiples spread evenly


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

        Rows do not depend on each other, and a shorter row is a prefix of a longer one. Two rounds of the finaliser
        of SplitMix64 (Steele, Lea, Flood 2014) over the address.
        """
        base = np.uint64(stream(self.seed, self.use, self.epoch))
        with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
            rows = _mix(base + np.asarray(index).astype(np.uint64) * _GOLDEN)  # (B,)
            steps = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN  # (L,)
            bits = _mix(rows[:, None] + steps)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
