"""Timing by alternation, memory growth, and options that all benchmarks share.

`torch.utils.benchmark` times one statement after another; here rows take turns, so that a change of the machine's load
meets all of them.
"""

import contextlib
import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from ctypes import CDLL
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import torch

from spt.errors import BackendError, UsageError, did_you_mean
from spt.models.ops import backends, graphs
from spt.runtime.environment import command_line, environment
from spt.runtime.memory import peak_memory, reset_peak_memory

logger = logging.getLogger(__name__)

Precision = Literal["fp32", "tf32", "bf16"]


class Times(NamedTuple):
    """Seconds of one step, part by part."""

    forward: float
    backward: float
    optimiser: float = 0.0

    @property
    def step(self) -> float:
        return sum(self)


TimedStep = Callable[[], Times]


class Timings(NamedTuple):
    """The times of one row: its steps in every round."""

    rounds: list[list[Times]]

    def median(self, part: str) -> float:
        return statistics.median(getattr(times, part) for steps in self.rounds for times in steps)

    def quartiles(self) -> tuple[float, float]:
        steps = [times.step for steps in self.rounds for times in steps]
        low, _, high = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else steps * 3
        return low, high

    def ratio(self, first: "Timings", part: str) -> float | None:
        """Median ratio to the first row within each round. None for a part that takes no time."""
        pairs = zip(self.rounds, first.rounds, strict=True)
        rounds = [(median_of(own, part), median_of(other, part)) for own, other in pairs]
        return statistics.median(a / b for a, b in rounds) if all(b > 0 for _, b in rounds) else None

    def seconds(self) -> dict[str, float]:
        return {part: self.median(part) for part in (*Times._fields, "step")}

    def ratios(self, first: "Timings") -> dict[str, float | None]:
        return {part: self.ratio(first, part) for part in (*Times._fields, "step")}


def median_of(steps: list[Times], part: str) -> float:
    return statistics.median(getattr(times, part) for times in steps)


def alternate(runs: Sequence[TimedStep], rounds: int, min_seconds: float = 0.05) -> list[Timings]:
    """All runs in turn, in reverse order every second round; a short one is repeated for `min_seconds`."""
    counts = []
    for run in runs:
        seconds = run().step  # includes what happens only once: loading libraries, compilation
        seconds = run().step if seconds < 1 else seconds
        counts.append(max(1, min(50, round(min_seconds / max(seconds, 1e-6)))))
    timings: list[Timings] = [Timings([]) for _ in runs]
    began = time.perf_counter()
    for i in range(rounds):
        order = range(len(runs)) if i % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            timings[index].rounds.append([runs[index]() for _ in range(counts[index])])
        elapsed = time.perf_counter() - began
        if i == 0 and elapsed * rounds > 20:
            logger.info(f"{rounds} rounds of about {elapsed:.0f} s each")
    return timings


class Clock:
    """Seconds, read when the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def memory_growth(device: torch.device, run: Callable[[], object]) -> int:
    """Peak memory of `run` in bytes, beyond what is in use now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        CDLL("libc.so.6").malloc_trim(0)  # reuse of freed memory that glibc keeps would not be seen
    reset_peak_memory(device)
    before = peak_memory(device)
    run()
    return max(0, peak_memory(device) - before)


def parse_counts(text: str, option: str) -> list[int]:
    """`1024` or `1024,4096`: whole numbers of at least 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part[:18]) and len(part) <= 18 for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers of at least 1, such as 1024 or 1024,4096")
    return [int(part) for part in parts]


def parse_choices(text: str, known: Sequence[str], option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise UsageError(f"{option} {text}: {part!r} is unknown{did_you_mean(part, known)}")
    return parts


def check_backends(names: Iterable[str], choice: backends.Choice, device: torch.device) -> None:
    for name in names:
        try:
            with backends.use(name, choice, device.type):
                pass
        except backends.Unavailable as error:
            raise BackendError(str(error)) from error


def check_graphs(wanted: bool, device: torch.device) -> None:
    try:
        graphs.use(wanted, device.type).close()
    except backends.Unavailable as error:
        raise BackendError(str(error)) from error


def conditions(device: torch.device, rounds: int) -> dict[str, Any]:
    """What the numbers of a result depend on, and can be traced by."""
    return {
        "rounds": rounds,
        "environment": environment(device),
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


PARTS = ("kernel", "convolution", "scan", "attention", "linear", "pointwise", "optimiser", "other")


SCOPE = "spt::"  # prefix of our marks in a recording
