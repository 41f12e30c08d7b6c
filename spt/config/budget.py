"""Budget arithmetic: what epochs, examples and operations are worth in optimiser steps. No torch here."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.config.recipe import BUDGETS, Train
from spt.errors import UsageError

MOST_STEPS = 10**12  # of a microsecond each they would take eleven days


def steps_per_epoch(n: int, batch_size: int, drop_last: bool = False) -> int:
    """Optimiser steps to show n examples once; the last batch may be smaller, or is left out."""
    return max(1, n // batch_size) if drop_last else -(-n // batch_size)


def total_steps(train: Train, n: int, flops_per_example: float) -> int:
    """Optimiser steps that the budget pays for, at least one; n training rows, operations per example, both passes.

    Raises UsageError for more than any machine can make.
    """
    try:
        steps = _steps(train, n, flops_per_example)
    except OverflowError:  # the product of such floats is infinite
        steps = MOST_STEPS + 1
    if steps > MOST_STEPS:
        budget = next(name for name in BUDGETS if getattr(train, name) is not None)
        raise UsageError(f"the budget of {budget} comes to more than {MOST_STEPS:,} steps; choose a smaller one")
    return steps


def _steps(train: Train, n: int, flops_per_example: float) -> int:
    if train.steps is not None:
        return train.steps
    per_epoch = steps_per_epoch(n, train.batch_size, train.drop_last)
    n = examples_per_epoch(n, train.batch_size, train.drop_last)
    if train.epochs is not None:
        return max(1, math.ceil(train.epochs * per_epoch - 1e-9))
    examples = train.examples or (train.flops or 0.0) / flops_per_example
    epochs, rest = divmod(examples, n)
    return max(1, int(epochs) * per_epoch + math.ceil(rest / train.batch_size - 1e-9))


def examples_per_epoch(n: int, batch_size: int, drop_last: bool = False) -> int:
    """Rows that an epoch shows; without its last, smaller batch fewer than n."""
    return min(n, steps_per_epoch(n, batch_size, drop_last) * batch_size)


def example_count(steps: int, n: int, batch_size: int, drop_last: bool = False) -> int:
    """Examples shown in this many optimiser steps."""
    per_epoch = steps_per_epoch(n, batch_size, drop_last)
    n = examples_per_epoch(n, batch_size, drop_last)
    epochs, rest = divmod(steps, per_epoch)
    return epochs * n + min(rest * batch_size, n)


def expected_longest(lengths: NDArray[Any], batch: int) -> float:
    """Mean of the longest of so many lengths (n,) drawn at random: all lie below the k-th with probability (k/n)^b."""
    below = np.linspace(0, 1, len(lengths) + 1) ** batch
    return float(np.sort(lengths) @ np.diff(below))


class Duration(NamedTuple):
    """How long a stage trains."""

    updates: int | float
    epochs: int | float

    def __str__(self) -> str:
        epochs = _amount(self.epochs)
        return f"{self.updates:,.0f} updates ({epochs} epoch{'' if epochs == '1' else 's'})"


def compare_budgets(scratch: Duration, pretraining: Duration, finetuning: Duration) -> str:
    """How long scratch trains, and how long both stages of SPT do, as a sentence."""
    updates = _times(pretraining.updates + finetuning.updates, scratch.updates)
    epochs = _times(pretraining.epochs + finetuning.epochs, scratch.epochs)
    return (
        f"scratch trains for {scratch}; SPT pretrains for {pretraining} and finetunes for {finetuning}, in all "
        f"{updates} updates and {epochs} epochs as scratch"
    )


def _times(ours: int | float, theirs: int | float) -> str:
    ratio = ours / theirs if theirs else math.inf
    return "as many" if abs(ratio - 1) < 0.005 else f"{_amount(ratio)} times as many"


def _amount(value: int | float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
