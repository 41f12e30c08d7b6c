"""What is to be computed: jobs, and the cells of a comparison that need them. No torch here.

A job's key is the hash of everything that decides its outcome: task, model, stage, seed, and the key of the run it
starts from. How it is run (device, processes, micro-batches, trackers) stays out.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spt.config.load import path_options
from spt.config.recipe import Finetune, Loaded, Part, Pretrain, Train

Stage = Literal["pretrain", "finetune"]
Arm = Literal["scratch", "spt"]
FORMAT = 1  # raised when the same recipe would compute something else


@dataclass(frozen=True)
class PretrainedWeights:
    """A finished pretraining run that the user points at."""

    path: Path
    key: str


@dataclass(frozen=True)
class Job:
    """One run to be had."""

    loaded: Loaded
    stage: Stage
    seed: int
    parent: "Job | PretrainedWeights | None" = None

    def __post_init__(self) -> None:
        assert self.loaded.data is not None, "a job is made of a recipe whose data set has been identified"

    @property
    def settings_stage(self) -> Pretrain | Finetune:
        return self.loaded.recipe.pretrain if self.stage == "pretrain" else self.loaded.recipe.finetune

    @property
    def settings_name(self) -> Literal["pretrain", "finetune", "scratch"]:
        """The recipe's section of the training settings: the scratch arm may have its own."""
        scratch = self.stage == "finetune" and self.parent is None and self.loaded.recipe.scratch is not None
        return "scratch" if scratch else self.stage

    @property
    def train(self) -> Train:
        return self.loaded.recipe.train(self.settings_name)

    @property
    def parent_key(self) -> str | None:
        if self.parent is None:
            return None
        return self.parent.key if isinstance(self.parent, PretrainedWeights) else self.parent.key()

    def settings(self) -> dict[str, Any]:
        """What the seeds of one configuration have in common; of the parent, its own settings."""
        recipe, stage = self.loaded.recipe, self.settings_stage
        parent: Any = None
        if isinstance(self.parent, Job):
            parent = self.parent.settings()
        elif self.parent is not None:
            parent = self.parent.key
        return {
            "format": FORMAT,
            "stage": self.stage,
            "data": self.loaded.data,
            "task": {"name": self.loaded.identities["task"], **without_paths("tasks", recipe.task)},
            "model": {"name": self.loaded.identities["model"], **without_paths("models", recipe.model)},
            "encoder": recipe.encoder.model_dump(mode="json"),
            "objective": stage.objective.model_dump(mode="json"),
            "head": stage.head.model_dump(mode="json"),
            "train": self.train.model_dump(mode="json"),
            "parent": parent,
        }

    def key(self) -> str:
        return self._key

    @cached_property
    def _key(self) -> str:  # kept: a study asks for it many times
        return digest({**self.settings(), "seed": self.seed, "parent": self.parent_key})

    @property
    def name(self) -> str:
        """The run folder's name."""
        return f"{self.stage}-{self.key()}"


def without_paths(kind: Literal["models", "tasks"], part: Part) -> dict[str, Any]:
    """A component's options but for where its files lie: a task's `data`, a model's name, stand for what is in them."""
    paths = path_options(kind, {"name": part.name, **part.options})
    return {key: value for key, value in part.options.items() if key not in paths}


class Cell(NamedTuple):
    """One entry of a study: an arm of one of its rows, on one seed."""

    arm: Arm
    row: int
    job: Job


def digest(value: Mapping[str, Any]) -> str:
    """12 hex digits of a hash that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
