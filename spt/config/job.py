"""What is computed: jobs, and the cells of a comparison that need them. No torch here.

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
from spt.config.recipe import (
    EncoderConfig,
    Finetune,
    HeadConfig,
    Part,
    Pretrain,
    ResolvedRecipe,
    Section,
    StepHeadConfig,
    Train,
)
from spt.tasks.base import TaskConfig

Stage = Literal["pretrain", "finetune"]
NEWER = ("max_hours", "cosine_steps", "cosine_from", "sampling")  # training settings that older runs do not have
WITH_REACH = (  # models whose layers can be cut to a reach
    *("transformer", "dlr_attention", "s4", "s4d", "spade", "dss", "dlr", "sgconv", "mega", "tcn"),
    *("liquid_s4", "h3", "hyena"),
)
# And options of models and tasks, at the value that stands for what there was.
NEWER_OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("custom", "list_columns", []),
    ("custom", "label_separator", None),
    ("custom", "missing_labels", "refuse"),
    ("custom", "missing", "refuse"),
    ("custom", "static_columns", []),
    ("custom", "folds", None),
    ("custom", "fold", 0),
    ("custom", "pool_splits", False),
    ("custom", "channels", []),
    *(("custom", option, None) for option in ("rate", "resample", "window", "stride", "label_at", "label_rate")),
    *(("custom", option, None) for option in ("patch", "spectrogram")),
    *(("custom", option, "drop") for option in ("last_window", "last_patch")),
    ("custom", "score", "window"),
    ("dlr", "mask_padding", True),
    ("hf", "bidirectional", False),
    *((model, "reach", None) for model in WITH_REACH),
)
NEWER_OF_TASKS = {"subset_rows": None, "subset_vocabulary": "subset"}  # likewise, of every task
NEWER_OBJECTIVE_OPTIONS = (("positive", None),)  # and options of objectives
FORMAT = 1  # raised when the same recipe would compute something else


@dataclass(frozen=True)
class PretrainedWeights:
    """A finished pretraining run that the user points at."""

    path: Path
    key: str


@dataclass(frozen=True)
class Job:
    """One run."""

    resolved: ResolvedRecipe
    stage: Stage
    seed: int
    parent: "Job | PretrainedWeights | None" = None

    def __post_init__(self) -> None:
        assert self.resolved.data is not None, "a job is made of a recipe whose data set has been identified"

    @property
    def settings_stage(self) -> Pretrain | Finetune:
        return self.resolved.recipe.pretrain if self.stage == "pretrain" else self.resolved.recipe.finetune

    @property
    def settings_name(self) -> Section:
        """The recipe's section of the training settings: the scratch arm may have its own."""
        scratch = self.stage == "finetune" and self.parent is None and self.resolved.recipe.scratch is not None
        return "scratch" if scratch else self.stage

    @property
    def train(self) -> Train:
        return self.resolved.recipe.train(self.settings_name)

    @property
    def from_other_task(self) -> bool:
        """Does it start from weights that were pretrained on the inputs of another task, as was planned?"""
        if not isinstance(self.parent, Job):
            return False
        here, there = (_without_rows(job.resolved) for job in (self, self.parent))
        return here != there

    @property
    def parent_name(self) -> str | None:
        """The folder of the run it starts from, if that is made too."""
        return self.parent.name if isinstance(self.parent, Job) else None

    @property
    def parent_key(self) -> str | None:
        return None if self.parent is None else self.parent.key

    def settings(self) -> dict[str, Any]:
        """What the seeds of one configuration have in common; of the parent, its own settings."""
        recipe, stage = self.resolved.recipe, self.settings_stage
        return {
            "format": FORMAT,
            "stage": self.stage,
            "data": self.resolved.data,
            "task": {"name": self.resolved.identities["task"], **without_paths("tasks", recipe.task)},
            "model": {"name": self.resolved.identities["model"], **without_paths("models", recipe.model)},
            "encoder": _without_defaults(recipe.encoder),
            "objective": _objective_settings(stage.objective),
            "head": _without_defaults(stage.head),
            "train": _train_settings(self.train),
            "parent": self.parent.settings() if isinstance(self.parent, Job) else self.parent_key,
            **self._options(),
        }

    def _options(self) -> dict[str, Any]:
        """Options of the stage that are not at their defaults, so that runs from before there were any keep their
        keys; without those that have no effect on this job."""
        recipe, stage = self.resolved.recipe, self.settings_stage
        if isinstance(stage, Pretrain):
            options: dict[str, Any] = {"shuffle_steps": True} if stage.shuffle_steps else {}
            return options | ({} if stage.data is None else {"more_data": self.resolved.pretraining_data})
        options = {"freeze": True} if stage.freeze else {}
        if self.parent is not None and stage.load != "all":
            options["load"] = sorted(stage.load)
        if stage.joint:
            pretrain = recipe.pretrain
            pretraining = {
                "objective": _objective_settings(pretrain.objective),
                "head": _without_defaults(pretrain.head),
            }
            options["joint"] = {"weight": stage.joint, **pretraining}
        return options

    @cached_property  # a study asks for it many times
    def key(self) -> str:
        return digest({**self.settings(), "seed": self.seed, "parent": self.parent_key})

    @cached_property  # likewise: of every run that is left, whenever one has ended
    def configuration(self) -> str:
        """Equal for the seeds of one configuration: what results have as `settings`."""
        return digest(self.settings())

    @property
    def name(self) -> str:
        """The run folder's name."""
        return f"{self.stage}-{self.key}"


def _without_defaults(config: EncoderConfig | HeadConfig | StepHeadConfig) -> dict[str, Any]:
    """Without later options at their defaults, so that runs from before there were any keep their keys."""
    later = {"init": "torch", "step_times": "model", "mlp_activation": None}
    values = config.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in later or value != later[name]}


def _objective_settings(part: Part) -> dict[str, Any]:
    """Likewise."""
    return {
        key: value for key, value in part.model_dump(mode="json").items() if (key, value) not in NEWER_OBJECTIVE_OPTIONS
    }


def _train_settings(train: Train) -> dict[str, Any]:
    """Settings that came later are left out where they are not set, so that older runs keep their keys."""
    return train.model_dump(mode="json", exclude={name for name in NEWER if getattr(train, name) is None})


def without_paths(kind: Literal["models", "tasks"], part: Part) -> dict[str, Any]:
    """A component's options but for where its files lie: the identities of the data and the model stand for those."""
    left_out = path_options(kind, {"name": part.name, **part.options})
    left_out |= {
        option for name, option, value in NEWER_OPTIONS if (part.name, part.options.get(option)) == (name, value)
    }
    if kind == "tasks":
        left_out |= {option for option, value in NEWER_OF_TASKS.items() if part.options.get(option) == value}
    return {key: value for key, value in part.options.items() if key not in left_out}


def _without_rows(resolved: ResolvedRecipe) -> dict[str, Any]:
    """Which task it is, whichever of its rows are in use."""
    options = without_paths("tasks", resolved.recipe.task)
    return {key: value for key, value in options.items() if key not in TaskConfig.model_fields} | {
        "name": resolved.identities["task"]
    }


class Cell(NamedTuple):
    """One entry of a study: an arm of one of its rows on one seed; of a search, an arm of one of its settings."""

    arm: str
    row: int  # of the study, or the number of the setting
    job: Job
    split: str | None = None  # of the data, where the study has several


def digest(value: Mapping[str, Any]) -> str:
    """12 hex digits of a hash that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
