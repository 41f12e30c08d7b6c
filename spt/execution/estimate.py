"""What jobs will cost, before they are run: rows, steps, operations, and seconds measured on this machine."""

import contextlib
import json
import os
import statistics
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from spt.config.budget import example_count
from spt.config.job import Job, digest
from spt.config.recipe import BUDGETS, Loaded
from spt.data.dataset import identify_data, open_task
from spt.errors import OutputError
from spt.runs.files import write_json, writing
from spt.runs.folder import RunFolder
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.training.budget import mean_flops, plan_steps
from spt.training.build import build_stage
from spt.training.loop import time_steps
from spt.training.stage import Say

WARM, TIMED = 3, 9  # steps of a measurement: the first ones allocate memory and fill caches


class Estimate(NamedTuple):
    """Of one job alone, if it uses its whole budget."""

    steps: int
    examples: int
    flops: float
    parameters: int


class MeasuredCosts:
    """What budgets are worth (`studies.Meter`). Measured seconds are kept below `root` and used again."""

    def __init__(self, root: Path, runtime: Runtime, say: Say) -> None:
        self.root, self.runtime, self.say = root, runtime, say
        self._estimates: dict[str, Estimate] = {}

    def rows(self, loaded: Loaded) -> int:
        return len(open_task(loaded.recipe.task).train)

    def resampled(self, loaded: Loaded) -> bool:
        return open_task(loaded.recipe.task).resample is not None

    def identify_data(self, loaded: Loaded) -> Loaded:
        return identify_data(loaded)

    def same_input(self, one: Loaded, other: Loaded) -> bool:
        return open_task(one.recipe.task).input == open_task(other.recipe.task).input

    def estimate(self, job: Job) -> Estimate:
        """One for all seeds of a configuration."""
        key = digest({**job.settings(), "parent": None})
        if key not in self._estimates:
            setup = build_stage(job)
            steps = plan_steps(setup.model, setup.data, job.train)
            examples = example_count(steps, len(setup.data.train), job.train.batch_size, job.train.drop_last)
            flops = examples * mean_flops(setup.model, setup.data, job.train).total
            self._estimates[key] = Estimate(steps, examples, flops, setup.model.parameter_counts()["total"])
        return self._estimates[key]

    def flops(self, job: Job) -> float:
        return self.estimate(job).flops

    def steps(self, job: Job) -> int:
        return self.estimate(job).steps

    def seconds_per_step(self, job: Job) -> float:
        """Median of a few steps, on the device that will train; the same number for the same job ever after.

        The same study gets the same budgets when it is continued, and so finds its runs again.
        """
        about = _without_budget(job) | {"device": self._device, "world": self.runtime.world}
        path = self.root / ".measured" / f"{digest(about)}.json"
        with self.runtime.entered_on_main(lambda: self._alone(path)):  # parts of one study measure once
            known = self.runtime.on_main(lambda: _read(path))
            return known if known is not None else self._measured(job, path, about)

    @contextlib.contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_suffix(".lock"))
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _measured(self, job: Job, path: Path, about: dict[str, object]) -> float:
        self.say(f"{job.loaded.name}: measuring the time of a step of {job.settings_name}")
        setup = build_stage(job)
        arguments = (setup.model, setup.objective, setup.output, setup.data, job.train, self.runtime)
        seconds = statistics.median(time_steps(*arguments, WARM + TIMED)[WARM:])

        def keep() -> float:
            write_json(path, {"seconds_per_step": seconds, **about})
            return seconds

        return self.runtime.on_main(keep)

    @cached_property
    def _device(self) -> str:
        device = self.runtime.device
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"{device.type}, {os.cpu_count()} cores"


def _without_budget(job: Job) -> dict[str, object]:
    """What decides how long a step takes."""
    settings = job.settings() | {"parent": None}
    settings["train"] = {key: value for key, value in settings["train"].items() if key not in BUDGETS}
    return settings


def _read(path: Path) -> float | None:
    try:
        seconds = float(json.loads(path.read_text(encoding="utf-8"))["seconds_per_step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return seconds if 0 < seconds < float("inf") else None


class RuntimeForecast:
    """Seconds that jobs will take, judged by finished runs in the same folder."""

    def __init__(self, root: Path) -> None:
        self._by: dict[tuple[str, str, str], list[float]] = {}
        for path in root.glob("*/result.json"):
            try:
                result = RunFolder(root, path.parent.name).result()
            except OutputError:
                continue
            if result is not None and result.own.steps and result.own.flops:
                self._note(result)

    def _note(self, result: Result) -> None:
        speed = result.own.seconds / result.own.flops
        for key in ((result.settings, "", ""), (result.stage, result.task, result.model)):
            self._by.setdefault(key, []).append(speed)

    def seconds(self, job: Job, flops: float) -> float | None:
        """None where nothing like it has been run here."""
        names = [job.loaded.identities[place].partition("@")[0] for place in ("task", "model")]
        for key in ((digest(job.settings()), "", ""), (job.stage, *names)):
            if key in self._by:
                return statistics.median(self._by[key]) * flops
        return None
