"""What is to be computed without a network: a baseline on a task's data, with a seed where chance is in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spt.baselines.base import Baseline
from spt.baselines.registry import BASELINES, why_not
from spt.baselines.scores import ComparedMetric
from spt.config.job import digest, without_paths
from spt.config.recipe import ResolvedRecipe
from spt.runs.baseline import PREFIX
from spt.tasks.base import TaskData

FORMAT = 1  # raised when every baseline would compute something else


@dataclass(frozen=True)
class BaselineJob:
    """One baseline to make. Its key is the hash of all that decides its outcome."""

    name: str  # of the baseline
    resolved: ResolvedRecipe  # whose task it is; nothing of its model or training matters
    metric: ComparedMetric
    seed: int | None = None

    @property
    def baseline(self) -> Baseline:
        return BASELINES[self.name]

    def settings(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "baseline": self.name,
            "version": self.baseline.version,
            "seed": self.seed,
            **question(self.resolved, self.metric),
        }

    @cached_property
    def key(self) -> str:
        return digest(self.settings())

    @property
    def folder(self) -> str:
        return f"{PREFIX}{self.key}"


def question(resolved: ResolvedRecipe, metric: ComparedMetric) -> dict[str, Any]:
    """What rows have in common that the same baselines are held against: data, metric and the class that it is of."""
    task = {"name": resolved.identities["task"], **without_paths("tasks", resolved.recipe.task)}
    of_class = {} if metric.positive is None else {"positive": metric.positive}
    return {"data": resolved.data, "task": task, "metric": metric.name, **of_class}


def baseline_jobs(
    names: Sequence[str] | None, resolved: ResolvedRecipe, data: TaskData, metric: ComparedMetric, seeds: Sequence[int]
) -> tuple[list[BaselineJob], dict[str, str]]:
    """The baselines of these names (None: of all) that the task takes, each once or once for each seed; and of the
    others why it does not."""
    reasons = {name: why_not(name, data, metric.name) for name in (BASELINES if names is None else names)}
    jobs = [
        BaselineJob(name, resolved, metric, seed)
        for name, reason in reasons.items()
        if reason is None
        for seed in (seeds if BASELINES[name].chance else (None,))
    ]
    return jobs, {name: reason for name, reason in reasons.items() if reason is not None}
