"""A recipe: one self-contained YAML file that names a task, a model and what to do with them.

Precedence, lowest first: the declared default, the file, `a.b=c` on the command line. There is no inheritance between
files. All problems of a recipe are reported at once, each with its dotted place. Importing this needs no torch;
loading a recipe does, because a component's own options are checked by the component.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from spt.runs.plan import Smoke

Metric = Literal[
    "auto",
    "loss",
    "accuracy",
    "f1_macro",
    "accuracy_macro",
    "balanced_accuracy",
    "f1",
    "f1_weighted",
    "f1_micro",
    "exact_match",
    "mcc",
    "auroc",
    "auprc",
    "log_loss",
    "mae",
    "mse",
    "r2",
    "mape",
    "spearman",
    "perplexity",
    "bits_per_byte",
]

LOWER_IS_BETTER = {
    **dict.fromkeys(("loss", "log_loss", "mae", "mse", "mape", "perplexity", "bits_per_byte"), True),
    **dict.fromkeys(("accuracy", "accuracy_macro", "balanced_accuracy", "exact_match", "mcc", "auroc", "auprc"), False),
    **dict.fromkeys(("f1", "f1_macro", "f1_weighted", "f1_micro", "r2", "spearman"), False),
}

Initial = Literal["torch", "flax"]  # defaults of a library
BUDGETS = ("epochs", "steps", "examples", "flops")
MOVED = ("encoder", "backbone")  # from a pretrained network into a new one; the head is always new
Section = Literal["pretrain", "finetune", "scratch"]  # of a recipe, with training settings of its own


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Part(BaseModel):
    """A component by name; its other keys are checked by the component's own Config."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str = Field(description="which one; the keys beside it are its options")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class EncoderConfig(StrictModel):
    """How an input becomes a vector."""

    init: Initial = Field(
        "torch",
        description="how maps start: as torch's, token embeddings from N(0, init_std²); or as flax's, LeCun normal and "
        "biases zero, where tokens are one-hot vectors through such a map (S5's published code)",
    )
    init_std: float = Field(1.0, gt=0, description="standard deviation of token embeddings at the start")
    hidden_std: float | None = Field(
        None,
        gt=0,
        description="standard deviation of the hidden vector at the start; null: that of token embeddings, or, of "
        "values, that of the mask flag's column and the bias together in the published code: sqrt(2 / (3 (C + 1))) for "
        "C channels, 0.58 for one (init flax: sqrt(1 / (C + 1)))",
    )
    positions: Literal["none", "circle"] = Field(
        "none",
        description="circle: cos and sin of 2 pi i / T of step i of T are two more inputs, as in the DLR paper's "
        "atomic tasks; hidden steps have them too",
    )
    step_times: Literal["model", "append"] = Field(
        "model",
        description="the time since the previous step, where a task has it: given to the model, or, as one input more, "
        "to the encoder's last map, so that the model takes all steps as equally long (S5-append in the S5 paper)",
    )
    frame_encoder: Literal["linear", "cnn"] = Field(
        "linear",
        description="a step that is a picture: one linear map, or two convolutions with pooling, as in the S5 paper "
        "(appendix G.3.8)",
    )
    frame_features: int = Field(30, ge=1, description="cnn: width of the layer between convolutions and d_model")

    @model_validator(mode="after")
    def _consistent(self) -> "EncoderConfig":
        if self.init == "flax" and self.init_std != 1.0:
            raise ValueError("init_std has no effect under init: flax, which has a spread of its own; leave one out")
        return self


class _AnyHeadConfig(StrictModel):
    init: Initial = Field("torch", description="how maps start: as torch's, or as flax's (S5's published code)")
    mlp: bool = Field(
        False,
        description="linear, ReLU, linear instead of one linear map; of pairs linear, GELU, linear, from 4 d_model "
        "numbers to d_model",
    )
    mlp_activation: Literal["relu", "gelu", "gelu_tanh", "tanh"] | None = Field(
        None, description="mlp: in place of that ReLU or GELU; gelu_tanh: GELU by its tanh formula, which is flax's"
    )

    @model_validator(mode="after")
    def _activation_has_effect(self) -> "_AnyHeadConfig":
        if self.mlp_activation is not None and not self.mlp:
            raise ValueError("mlp_activation has no effect on one linear map; add mlp: true")
        return self


class StepHeadConfig(_AnyHeadConfig):
    """How each step's vector becomes an answer."""

    identity: bool = Field(
        False,
        description="no head: the d_model numbers of the last norm are the scores, those beyond the tokens never "
        "right; the published code's Text and Retrieval pretraining does so, by a misspelt attribute",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "StepHeadConfig":
        if self.identity and self.mlp:
            raise ValueError("identity is no head at all, so mlp has nothing to shape; keep one of them")
        return self


class HeadConfig(_AnyHeadConfig):
    """How the vectors of a sequence become one answer."""

    pool: Literal["mean", "max", "last"] = Field(
        "mean",
        description="over the valid steps; of a task that asks at every step only last has a meaning: each is answered "
        "from the last step's vector and its own place alone, as in MAD's compression",
    )


class Train(StrictModel):
    """One stage of training. Exactly one of epochs, steps, examples, flops is its budget, which max_hours may cut."""

    epochs: float | None = Field(None, gt=0, description="budget: passes over the training rows in use")
    steps: int | None = Field(None, gt=0, description="budget: optimiser steps")
    examples: int | None = Field(
        None,
        gt=0,
        description="budget: training examples shown, repeats counted; a pair of sequences is one, in both stages",
    )
    flops: float | None = Field(None, gt=0, description="budget: analytic training operations")
    max_hours: float | None = Field(
        None,
        gt=0,
        description="a limit beside the budget, not a budget: hours of training after which the next step is the last; "
        "schedules keep the whole budget's horizon",
    )
    batch_size: int = Field(
        gt=0,
        description="examples per optimiser step, over all processes and micro-batches: sequences, or pairs of them",
    )
    learning_rate: float = Field(gt=0, description="the peak, after warm-up")
    drop_last: bool = Field(
        False,
        description="leave out an epoch's last batch when it is not full, as the published code does; other rows are "
        "left out in every epoch",
    )
    schedule: Literal["constant", "cosine", "plateau", "steps"] = Field(
        "constant",
        description="after warm-up; cosine falls to 0, plateau when validation stops improving, steps at milestones",
    )
    cosine_steps: int | None = Field(
        None,
        gt=0,
        description="cosine: the step at which the learning rate is 0, warm-up included; null: the stage's last; later "
        "than that, and the rate ends above 0, as in some published runs",
    )
    cosine_from: Literal["start"] | None = Field(
        None,
        description="cosine: where it begins; null: where the warm-up ends; start: at the first step, so that the rate "
        "is below its peak after the warm-up, and 0 for as many steps at the end (S5's published code)",
    )
    plateau_factor: float = Field(0.2, gt=0, lt=1, description="plateau: what the learning rate is multiplied by")
    plateau_patience: int = Field(
        10, ge=0, description="plateau: evaluations without improvement before the rate is lowered at the next one"
    )
    milestones: tuple[float, ...] = Field(
        (), description="steps: where the learning rate falls, as shares of all steps in (0, 1)"
    )
    step_factor: float = Field(0.5, gt=0, lt=1, description="steps: what the learning rate is multiplied by at each")
    warmup_steps: int = Field(0, ge=0, description="optimiser steps of linear warm-up")
    warmup_fraction: float | None = Field(None, ge=0, lt=1, description="the same as a share of all steps")
    sampling: Literal["balanced"] | None = Field(
        None,
        description="which rows make an epoch; null: every row once; balanced: as many draws as there are rows, each "
        "class, or each label and none of them, equally often, so that rows of rare ones repeat and of common ones are "
        "left out (never in pretraining, which knows no labels)",
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, decoupled")
    weight_decay_on: Literal["matrices", "all"] = Field(
        "matrices",
        description="what decays: weight matrices; or all, also encoder, head, norms and biases, but for those "
        "of a state space that never decay or have their own learning rate",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's")
    max_grad_norm: float | None = Field(1.0, gt=0, description="gradient clipping; null for none")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="of matrix products; weights, kernels of state spaces and scans are always float32. fp32: exact "
        "float32, on GPUs too; tf32: factors rounded to 11 bits by GPUs that can (on a CPU the same as fp32); bf16: "
        "factors, and results, in bfloat16",
    )
    evaluate_every: int | None = Field(None, gt=0, description="steps between evaluations; null: once an epoch")
    patience: int | None = Field(None, gt=0, description="evaluations without improvement before stopping; null: never")
    metric_average: Literal["exact", "per_batch"] = Field(
        "exact",
        description="exact: every metric from all rows of a split; per_batch: its mean over full batches of batch_size "
        "rows in the split's order, the last incomplete one left out, r2 by batch too, as in the published code",
    )
    validation_masks: Literal["fixed", "redrawn"] = Field(
        "fixed",
        description="what an objective hides of validation rows: the same at every evaluation, or, as in the published "
        "code, something new each time (drawn by seed and step, so that a resumed run draws the same)",
    )
    select_by: Metric = Field(
        "auto",
        description="validation metric that picks the checkpoint, ties by loss; auto: the objective's, else accuracy, "
        "mae (l1), mse (l2, gaussian) or bits_per_byte (language models)",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Train":
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            problem = "none is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"exactly one of {', '.join(BUDGETS)} is the budget, but {problem}")
        if self.warmup_steps and self.warmup_fraction is not None:
            raise ValueError("warmup_steps and warmup_fraction are both given; keep one")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must lie in [0, 1)")
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        for name, schedule in (
            ("cosine_steps", "cosine"),
            ("cosine_from", "cosine"),
            ("plateau_factor", "plateau"),
            ("plateau_patience", "plateau"),
            ("milestones", "steps"),
            ("step_factor", "steps"),
        ):
            if schedule != self.schedule and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect under schedule {self.schedule}; it belongs to {schedule}")
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule steps needs milestones, e.g. milestones: [0.5, 0.75]")
        if self.cosine_steps is not None and self.cosine_steps < (self.steps or 0):
            raise ValueError(
                f"cosine_steps {self.cosine_steps} is less than steps {self.steps}; the rest would be idle"
            )
        if self.cosine_steps is not None and self.warmup_steps >= self.cosine_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves none of cosine_steps {self.cosine_steps}")
        inside = all(0 < milestone < 1 for milestone in self.milestones)
        if not inside or list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones {list(self.milestones)} must rise and lie in (0, 1): shares of all steps")
        if self.schedule == "plateau" and self.patience is not None and self.patience <= self.plateau_patience + 1:
            raise ValueError(
                f"patience {self.patience} stops the run before a rate lowered after plateau_patience "
                f"{self.plateau_patience} evaluations is ever used; raise patience or lower plateau_patience"
            )


class Pretrain(StrictModel):
    """The first stage: an objective that needs no labels, on the training split's inputs."""

    objective: Part = Field(Part(name="masked"), description="what is asked of the network, without labels")
    head: StepHeadConfig = Field(StepHeadConfig(), description="how each step's vector becomes an answer")
    train: Train = Field(description="this stage's training; exactly one budget is needed")
    data: Path | None = Field(
        None,
        description="more rows without labels, for task custom: files like its own, which pretraining sees beside the "
        "training split; needs not_self_pretraining",
    )
    not_self_pretraining: bool = Field(
        False, description="says that pretraining sees more than the training split; every report repeats it"
    )
    shuffle_steps: bool = Field(
        False,
        description="a control: the steps of every input change places, each row in an order of its own, the same in "
        "every epoch; padding, times and what is hidden stay where they are",
    )

    @model_validator(mode="after")
    def _says_what_it_is(self) -> "Pretrain":
        if self.data is not None and not self.not_self_pretraining:
            raise ValueError(
                "data adds rows to the training split, which is no self-pretraining, so another question is answered; "
                "say not_self_pretraining: true"
            )
        if self.not_self_pretraining and self.data is None:
            raise ValueError("not_self_pretraining goes with data, which is not given")
        return self


class Finetune(StrictModel):
    """The second stage: the task itself."""

    objective: Part = Field(Part(name="supervised"), description="the task's own targets")
    head: HeadConfig = Field(HeadConfig(), description="how the vectors of a sequence become one answer")
    train: Train = Field(description="this stage's training; exactly one budget is needed")
    load: Literal["all"] | tuple[str, ...] = Field(
        "all",
        description="what is taken from the pretrained network: all of encoder and backbone, or a list of parts by "
        "name, e.g. [encoder, backbone.mixers.0]; the rest starts as from scratch, where this has no effect",
    )
    freeze: bool = Field(
        False,
        description="only the head is trained: encoder and backbone stay as they start, dropout in them off, the "
        "statistics of batch norms as they are",
    )
    joint: float = Field(
        0.0,
        ge=0,
        description="weight of pretraining's loss (its objective, head and masks) on the same batches, added to the "
        "task's own; 0: none",
    )

    @field_validator("load", mode="before")
    @classmethod
    def _one_part(cls, load: Any) -> Any:
        if isinstance(load, str):
            return load if load == "all" else (load,)
        return tuple(load) if isinstance(load, list) else load

    @model_validator(mode="after")
    def _consistent(self) -> "Finetune":
        if self.load != "all":
            if not self.load:
                raise ValueError("load names no part; without a pretrained network, train from scratch")
            if odd := [name for name in self.load if name.partition(".")[0] not in MOVED]:
                raise ValueError(f"load: {odd[0]} is no part of {' or '.join(MOVED)}; nothing else can be taken over")
            if len(set(self.load)) < len(self.load):
                raise ValueError("load names a part twice")
        if self.freeze and self.joint:
            raise ValueError("freeze and joint contradict each other: a frozen network learns nothing from a loss")
        return self


class Scratch(StrictModel):
    """Training settings of the baseline, where it deserves its own: everything else is finetune's."""

    train: Train = Field(description="the baseline's training; exactly one budget is needed")


class Recipe(StrictModel):
    """One experiment, complete."""

    task: Part = Field(description="the data: a task's name or a .py file, and its options")
    model: Part = Field(
        description="the network between encoder and head: a model's name or a .py file, and its options"
    )
    encoder: EncoderConfig = Field(EncoderConfig(), description="how an input becomes a vector")
    pretrain: Pretrain = Field(description="the first stage of SPT: no labels, the training split's inputs alone")
    finetune: Finetune = Field(description="the second stage of SPT, and the only one of scratch: the task itself")
    scratch: Scratch | None = Field(None, description="the baseline's own training; null: as finetune")

    def train(self, section: Section) -> Train:
        return (getattr(self, section) or self.finetune).train


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with all defaults filled in, and where each value came from."""

    name: str
    recipe: Recipe
    origins: Mapping[str, str]  # dotted key -> "recipe", "command line", "default", "smoke"
    identities: Mapping[str, str]  # what run keys call "task" and "model": a user's file by its content
    notes: tuple[str, ...] = ()  # what loading decided that a user should know
    smoke: Smoke = False
    data: str | None = None  # identity of the task's rows, attached when a job is made
    pretraining_data: str | None = None  # of pretraining's, where it sees more than these; likewise

    @property
    def task_name(self) -> str:
        return self.identities["task"].partition("@")[0]

    @property
    def model_name(self) -> str:
        return self.identities["model"].partition("@")[0]

    def with_train(self, section: Section, train: Train) -> "ResolvedRecipe":
        """The recipe with other training settings in a section."""
        part = Scratch(train=train) if section == "scratch" else getattr(self.recipe, section)
        update: dict[str, Any] = {section: part.model_copy(update={"train": train})}
        return replace(self, recipe=self.recipe.model_copy(update=update))

    def to_yaml(self) -> str:
        header = f"# {self.name}, resolved: every default filled in.\n"
        return header + yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False)
