"""Torch's random numbers, drawn from an addressed stream."""

import contextlib
from collections.abc import Iterator

import torch

from spt.rng import stream


@contextlib.contextmanager
def seeded(seed: int, *address: object) -> Iterator[None]:
    """Draw torch's random numbers from this stream, and put its state back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, *address) & (2**63 - 1))
        yield


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the generators that a step draws from. torch.manual_seed writes down a stack trace for every kind of device
    that is not there, a millisecond in all."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
