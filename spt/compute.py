"""What training costs: budgets in steps, operations, memory.

Operations are analytic: every mixer states those of its forward and its backward pass, by kind (models/ops/counts.py).
Counters in torch see neither fused attention on a CPU nor any FFT, and would give some models their work for free.
"""

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spt.batch import steps_per_epoch
from spt.recipe import Train


def total_steps(train: Train, n: int, flops_per_example: float) -> int:
    """Optimiser steps that the budget pays for, at least one; n training rows, operations per example, both passes."""
    if train.steps is not None:
        return train.steps
    per_epoch = steps_per_epoch(n, train.batch_size, train.drop_last)
    n = min(n, per_epoch * train.batch_size)  # rows an epoch shows
    if train.epochs is not None:
        return max(1, math.ceil(train.epochs * per_epoch - 1e-9))
    examples = train.examples or (train.flops or 0.0) / flops_per_example
    epochs, rest = divmod(examples, n)
    return max(1, int(epochs) * per_epoch + math.ceil(rest / train.batch_size - 1e-9))


def example_count(steps: int, n: int, batch_size: int, drop_last: bool = False) -> int:
    """Sequences shown in this many optimiser steps."""
    per_epoch = steps_per_epoch(n, batch_size, drop_last)
    n = min(n, per_epoch * batch_size)
    epochs, rest = divmod(steps, per_epoch)
    return epochs * n + min(rest * batch_size, n)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux: lets the process's high-water mark start again
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device since the last reset; on a CPU the resident memory of the process, libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def expected_longest(lengths: NDArray[Any], batch: int) -> float:
    """Mean of the longest of so many lengths (n,) drawn at random: all lie below the k-th with probability (k/n)^b."""
    below = np.linspace(0, 1, len(lengths) + 1) ** batch
    return float(np.sort(lengths) @ np.diff(below))
