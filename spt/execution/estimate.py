"""What jobs will cost, before they are run: rows, steps, operations, and seconds measured on this machine."""

import bisect
import contextlib
import json
import logging
import os
import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from spt.config.budget import example_count
from spt.config.job import Job, digest
from spt.config.recipe import BUDGETS, ResolvedRecipe
from spt.data.dataset import identify_data, open_task
from spt.errors import OutputError
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.studies.costs import Estimate
from spt.tasks.base import TaskData
from spt.training.budget import mean_flops, plan_steps
from spt.training.build import StageSetup, build_stage
from spt.training.loop import time_steps
from spt.training.threads import stage_threads

logger = logging.getLogger(__name__)

WARM, TIMED = 3, 9  # steps of a measurement: the first ones allocate memory and fill caches


class MeasuredCosts:
    """A `CostModel`. Measured seconds are kept below `root` and used again."""

    def __init__(self, root: Path, runtime: Runtime) -> None:
        self.root, self.runtime = root, runtime
        self._estimates: dict[str, Estimate] = {}

    def identify_data(self, recipe: ResolvedRecipe) -> ResolvedRecipe:
        return identify_data(recipe)

    def open_task(self, recipe: ResolvedRecipe) -> TaskData:
        return open_task(recipe.recipe.task)

    def estimate(self, job: Job) -> Estimate:
        """Computed once for all seeds of a configuration."""
        key = digest({**job.settings(), "parent": None})
        if key not in self._estimates:
            self._estimates[key] = estimate_cost(build_stage(job))
        return self._estimates[key]

    def seconds_per_step(self, job: Job) -> float:
        """Median of a few steps, on the device that will train; the same number for the same job ever after.

        The same study gets the same budgets when it is continued, and so finds its runs again.
        """
        settings = job.settings() | {"parent": None, "device": self._device, "world": self.runtime.world}
        settings["train"] = {key: value for key, value in settings["train"].items() if key not in BUDGETS}
        path = self.root / ".measured" / f"{digest(settings)}.json"
        lock = RunFolder(path.parent, path.stem)
        with self.runtime.entered_on_main(lambda: lock.locked(lambda: None)):  # parts of one study measure once
            known = self.runtime.on_main(lambda: _read(path))
            if known is not None:
                return known
            seconds = self._measure(job)

            def keep() -> float:
                write_json(path, {"seconds_per_step": seconds, **settings})
                return seconds

            return self.runtime.on_main(keep)  # process 0's, for all

    def _measure(self, job: Job) -> float:
        model = job.resolved.recipe.model.options
        size = f"{model['n_layers']} layers of width {model['d_model']}"
        logger.info(f"{job.resolved.name}: measuring the time of a step of {job.settings_name}, {size}")
        setup = build_stage(job)
        with stage_threads(setup, self.runtime):
            return statistics.median(time_steps(setup, self.runtime, WARM + TIMED)[WARM:])

    @cached_property
    def _device(self) -> str:
        device = self.runtime.device
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"{device.type}, {os.cpu_count()} cores"


def estimate_cost(setup: StageSetup) -> Estimate:
    """What a stage costs if it uses its whole budget."""
    steps, train = plan_steps(setup), setup.train
    examples = example_count(steps, len(setup.data.train), train.batch_size, train.drop_last)
    return Estimate(steps, examples, examples * mean_flops(setup).total, setup.model.parameter_counts()["total"])


def _read(path: Path) -> float | None:
    try:
        seconds = float(json.loads(path.read_text(encoding="utf-8"))["seconds_per_step"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return seconds if 0 < seconds < float("inf") else None


class RuntimeForecast:
    """Seconds that jobs will take, estimated from finished runs like them."""

    def __init__(self, root: Path | None = None) -> None:
        """From all in this folder, if one is named, and from those that it is told of."""
        self._seconds_per_flop: dict[tuple[str, ...], list[float]] = {}  # in order of size
        for path in [] if root is None else root.glob("*/result.json"):
            with contextlib.suppress(OutputError):
                result = RunFolder(path.parent.parent, path.parent.name).result()
                if result is not None and result.own.steps:
                    self.observe(result, result.own.flops)

    def observe(self, result: Result, flops: float) -> None:
        """A run that took its seconds for so many operations."""
        if flops > 0:
            for key in ((result.settings,), (result.stage, result.task, result.model)):
                bisect.insort(self._seconds_per_flop.setdefault(key, []), result.own.seconds / flops)

    def seconds(self, job: Job, flops: float) -> float | None:
        """None where nothing like it has been run here."""
        for key in ((job.configuration,), (job.stage, job.resolved.task_name, job.resolved.model_name)):
            if key in self._seconds_per_flop:
                seconds = _median(self._seconds_per_flop[key]) * flops
                return seconds if job.train.max_hours is None else min(seconds, job.train.max_hours * 3600)
        return None


def _median(ordered: Sequence[float]) -> float:
    """Of numbers in order of size: asked for after every run, it must not sort those of thousands."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
