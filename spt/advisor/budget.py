"""What fits into a budget of time: how many models, seeds and epochs, from a few timed steps of each model."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spt.advisor.recipes import PRETRAINING
from spt.errors import UsageError
from spt.report.stats import FEWEST

SEEDS = 5
MOST_SEEDS = (10, 7)  # where all models have all that their data are worth
SHARE = 0.85  # of the budget is planned with: machines are not always idle
START = 1.0  # seconds that a run takes beside its steps


class Shape(NamedTuple):
    """How much there is to do."""

    steps_per_epoch: int
    validation: int  # batches
    test: int
    evaluations: int  # of a stage


@dataclass(frozen=True)
class Timing:
    """Seconds that one model takes."""

    name: str
    pretraining: float  # of a step
    finetuning: float
    control: bool = False
    parameters: int = 0

    def seconds(self, epochs: float, shape: Shape) -> float:
        """Of both arms at one seed; a batch of an evaluation takes a third of a step."""
        steps = epochs * shape.steps_per_epoch
        training = PRETRAINING * steps * self.pretraining + (2 - PRETRAINING) * steps * self.finetuning
        validation = shape.evaluations * shape.validation / 3 * (self.pretraining + 2 * self.finetuning)
        return training + validation + 2 * shape.test / 3 * self.finetuning + 3 * START


@dataclass(frozen=True)
class Plan:
    """Models by name, the cheapest last to go; each in both arms."""

    models: tuple[str, ...]
    seeds: int
    epochs: float  # of scratch, and of both stages of SPT together
    seconds: float  # that this takes, as estimated
    dropped: tuple[str, ...] = ()
    splits: int = 1  # of the rows, each with so many seeds
    jobs: int = 1  # runs at once

    @property
    def runs(self) -> int:
        return 3 * len(self.models) * self.seeds * self.splits

    @property
    def work(self) -> float:
        """Seconds of one run after the other."""
        return self.seconds * _speedup(self.jobs)

    @property
    def repeats(self) -> int:
        """What intervals are made over: splits, or seeds on one."""
        return self.splits if self.splits > 1 else self.seeds


def _speedup(jobs: int) -> float:
    """Of so many runs at once over one after the other."""
    return 1.0 if jobs == 1 else 0.85 * jobs


def parse_budget(text: str) -> float:
    """Seconds of `30m`, `900s`, `2h`, `1h30m`. Raises UsageError."""
    amount = r"(?:(\d{1,6}(?:\.\d+)?)"
    found = re.fullmatch(f"{amount}h)?{amount}m)?{amount}s)?", text.strip().lower())
    parts = found.groups() if found else ()
    seconds = float(sum(float(part or 0) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False)))
    if not seconds:
        raise UsageError(f"--budget {text}: a time such as 30m, 900s, 2h or 1h30m is expected")
    return seconds


def budget_text(seconds: float) -> str:
    """As `--budget` takes it, rounded up."""
    if seconds <= 90:
        return f"{max(1, math.ceil(seconds / 5)) * 5}s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"


def plan(
    timings: Sequence[Timing],
    seconds: float,
    shape: Shape,
    *,
    least: float,
    most: float,
    jobs: int = 1,
    splits: int = 1,
) -> Plan:
    """The first that fits: all models; fewer, without the dearest, but at least two; fewer epochs down to `least`; at
    least three seeds; one model; fewer seeds. On several splits there are two seeds or one. Raises UsageError where one
    model with one seed does not fit.
    """
    most_seeds, usual, fewest = (MOST_SEEDS, SEEDS, FEWEST) if splits == 1 else ((2,), 1, 1)
    kept = list(timings)
    order = [kept]  # with ever fewer models
    while len(kept) > 1:
        out = max(kept, key=lambda each: (each.control, each.pretraining + 2 * each.finetuning))
        kept = [each for each in kept if each is not out]
        order.append(kept)

    def cost(models: Sequence[Timing], seeds: int, epochs: float) -> float:
        whole = [each.seconds(epochs, shape) for each in models]
        return max(splits * seeds * sum(whole) / _speedup(jobs), max(whole))

    def fitting(models: Sequence[Timing], seeds: int, least: float) -> Plan | None:
        """With as many epochs as fit, if these are enough."""
        low, high = cost(models, seeds, 0.0), cost(models, seeds, most)
        room = SHARE * seconds
        epochs = most if high <= room else most * (room - low) / (high - low)
        if epochs < least * (1 - 1e-9):
            return None
        names = tuple(each.name for each in models)
        dropped = tuple(each.name for each in timings if each.name not in names)
        epochs = round(epochs, 2) if epochs < 10 else float(round(epochs))
        return Plan(names, seeds, epochs, cost(models, seeds, epochs), dropped, splits, jobs)

    tries = [(order[0], seeds, most) for seeds in most_seeds]
    tries += [(models, usual, max(least, most / 2)) for models in order[:-1] or order]
    tries += [(order[-2] if order[1:] else order[-1], seeds, least) for seeds in range(usual, fewest - 1, -1)]
    tries += [(order[-1], seeds, least) for seeds in range(usual, 0, -1)]
    for models, seeds, enough in tries:
        if (found := fitting(models, seeds, enough)) is not None:
            return found
    left = f"{budget_text(seconds)} of the budget are left for training"
    needed = cost(order[-1], 1, least) / SHARE
    wanted = cost(order[-2] if order[1:] else order[-1], fewest, least) / SHARE
    if splits > 1:
        raise UsageError(
            f"{left}: one model ({order[-1][0].name}) on {splits} splits takes about {budget_text(needed)}, and "
            f"two models {budget_text(wanted)}; --budget {budget_text(wanted)}, or fewer --splits"
        )
    raise UsageError(
        f"{left}: one model with one seed ({order[-1][0].name}) takes about {budget_text(needed)}, and two models "
        f"with three seeds, which could decide something, {budget_text(wanted)}; --budget {budget_text(wanted)}"
    )
