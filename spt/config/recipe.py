"""A recipe: one self-contained YAML file that names a task, a model and what to do with them.

Precedence, lowest first: the declared default, the file, `a.b=c` on the command line. There is no inheritance between
files. All problems of a recipe are reported at once, each with its dotted path. Importing this module does not need
torch; loading a recipe does, because a component's own options are checked by the component.
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
        description="initialisation of linear maps: as in torch, with token embeddings from N(0, init_std²); or as in "
        "flax, LeCun normal with zero biases, tokens being one-hot inputs of such a map (S5's published code)",
    )
    init_std: float = Field(1.0, gt=0, description="initial standard deviation of token embeddings")
    hidden_std: float | None = Field(
        None,
        gt=0,
        description="initial standard deviation of the vector that replaces masked steps; null: that of token "
        "embeddings, or, for values, that of the mask flag's column and the bias together in the published code: "
        "sqrt(2 / (3 (C + 1))) for C channels, 0.58 for one (init flax: sqrt(1 / (C + 1)))",
    )
    positions: Literal["none", "circle"] = Field(
        "none",
        description="circle: two more inputs at step i of T, cos and sin of 2 pi i / T, as in the DLR paper's atomic "
        "tasks; masked steps have them too",
    )
    step_times: Literal["model", "append"] = Field(
        "model",
        description="where a task has the time since the previous step, what receives it: the model; or the encoder's "
        "last map, as one more input, so that to the model all steps are equally long (S5-append in the S5 paper)",
    )
    frame_encoder: Literal["linear", "cnn"] = Field(
        "linear",
        description="for steps that are pictures: one linear map, or two convolutions with pooling, as in the S5 paper "
        "(appendix G.3.8)",
    )
    frame_features: int = Field(30, ge=1, description="cnn: width of the layer between the convolutions and d_model")

    @model_validator(mode="after")
    def _consistent(self) -> "EncoderConfig":
        if self.init == "flax" and self.init_std != 1.0:
            raise ValueError("init_std has no effect under init: flax, which has a spread of its own; leave one out")
        if self.frame_encoder == "linear" and self.frame_features != type(self).model_fields["frame_features"].default:
            raise ValueError("frame_features has no effect on one linear map; add frame_encoder: cnn")
        return self


class _AnyHeadConfig(StrictModel):
    init: Initial = Field(
        "torch", description="initialisation of linear maps: as in torch, or as in flax (S5's published code)"
    )
    mlp: bool = Field(
        False,
        description="linear, ReLU, linear instead of one linear map; for pairs linear, GELU, linear, where the first "
        "maps 4 d_model numbers to d_model",
    )
    mlp_activation: Literal["relu", "gelu", "gelu_tanh", "tanh"] | None = Field(
        None, description="mlp: replaces that ReLU or GELU; gelu_tanh: GELU by its tanh formula, as in flax"
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
        description="no head: the d_model outputs of the last norm are the logits, and those beyond the vocabulary are "
        "never right; Text and Retrieval pretraining in the published code does this, because of a misspelt attribute",
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
        description="pooling over the valid steps; in a task with an answer at every step, only last has a meaning: "
        "each step is answered from the last step's vector and its own position alone, as in MAD's compression",
    )


class Train(StrictModel):
    """One stage of training. Its budget is exactly one of epochs, steps, examples and flops; max_hours may cut it."""

    epochs: float | None = Field(None, gt=0, description="budget: passes over the training rows in use")
    steps: int | None = Field(None, gt=0, description="budget: optimiser steps")
    examples: int | None = Field(
        None,
        gt=0,
        description="budget: training examples shown, repeats counted; a pair of sequences is one example, in both "
        "stages",
    )
    flops: float | None = Field(None, gt=0, description="budget: training operations (FLOPs), counted analytically")
    max_hours: float | None = Field(
        None,
        gt=0,
        description="a limit in addition to the budget, not a budget: hours of training after which the next optimiser "
        "step is the last; schedules keep the horizon of the whole budget",
    )
    batch_size: int = Field(
        gt=0,
        description="examples per optimiser step, over all processes and micro-batches: sequences, or pairs of them",
    )
    learning_rate: float = Field(gt=0, description="the peak learning rate, after warm-up")
    drop_last: bool = Field(
        False,
        description="leave out an epoch's last batch when it is not full, as the published code does; different rows "
        "are left out in every epoch",
    )
    schedule: Literal["constant", "cosine", "plateau", "steps"] = Field(
        "constant",
        description="of the learning rate after warm-up: cosine falls to 0, plateau falls when validation stops "
        "improving, steps falls at milestones",
    )
    cosine_steps: int | None = Field(
        None,
        gt=0,
        description="cosine: the optimiser step, warm-up included, at which the learning rate reaches 0; null: the "
        "stage's last; if later, the rate ends above 0, as in some published runs",
    )
    cosine_from: Literal["start"] | None = Field(
        None,
        description="cosine: where it begins; null: at the end of the warm-up; start: at the first step, so that the "
        "rate is below its peak after the warm-up and 0 for as many steps at the end (S5's published code)",
    )
    plateau_factor: float = Field(0.2, gt=0, lt=1, description="plateau: what the learning rate is multiplied by")
    plateau_patience: int = Field(
        10, ge=0, description="plateau: evaluations without improvement to allow; one more lowers the learning rate"
    )
    milestones: tuple[float, ...] = Field(
        (), description="steps: where the learning rate falls, as shares, in (0, 1), of all optimiser steps"
    )
    step_factor: float = Field(
        0.5, gt=0, lt=1, description="steps: what the learning rate is multiplied by at each milestone"
    )
    warmup_steps: int = Field(0, ge=0, description="optimiser steps of linear warm-up")
    warmup_fraction: float | None = Field(None, ge=0, lt=1, description="the same, as a share of all optimiser steps")
    sampling: Literal["balanced"] | None = Field(
        None,
        description="which rows make up an epoch; null: every row once; balanced: as many draws as there are rows, "
        "each class (of labels: each label, and no label) equally often, so that rows of rare classes repeat and some "
        "of common classes are left out (never in pretraining, which knows no labels)",
    )
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, decoupled")
    weight_decay_on: Literal["matrices", "all"] = Field(
        "matrices",
        description="what decays: weight matrices; or all parameters, also encoder, head, norms and biases, except "
        "those of a state space that never decay or have their own learning rate",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="of AdamW")
    max_grad_norm: float | None = Field(1.0, gt=0, description="gradient clipping; null for none")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="of matrix products; weights, state-space kernels and scans are always float32. fp32: exact "
        "float32, on GPUs too; tf32: factors rounded to 11 bits on GPUs that can (on a CPU the same as fp32); bf16: "
        "factors and results in bfloat16",
    )
    evaluate_every: int | None = Field(
        None, gt=0, description="optimiser steps between evaluations; null: once per epoch"
    )
    patience: int | None = Field(None, gt=0, description="evaluations without improvement before stopping; null: never")
    metric_average: Literal["exact", "per_batch"] = Field(
        "exact",
        description="exact: every metric over all rows of a split; per_batch: the mean of its values on full batches "
        "of batch_size rows in the split's order, without an incomplete last one, r2 too, as in the published code",
    )
    validation_masks: Literal["fixed", "redrawn"] = Field(
        "fixed",
        description="what an objective masks in validation rows: the same at every evaluation, or, as in the published "
        "code, something new each time (drawn from seed and training step, so that a resumed run draws the same)",
    )
    select_by: Metric = Field(
        "auto",
        description="validation metric that selects the checkpoint, ties broken by loss; auto: the objective's, else "
        "accuracy, f1_macro (labels), mae (l1), mse (l2, gaussian) or bits_per_byte (language models)",
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
        description="more rows without labels, for task custom: files like its own, which pretraining sees in addition "
        "to the training split; needs not_self_pretraining",
    )
    not_self_pretraining: bool = Field(
        False, description="declares that pretraining sees more than the training split; every report repeats this"
    )
    shuffle_steps: bool = Field(
        False,
        description="a control: the steps of every input are permuted, each row in an order of its own, the same in "
        "every epoch; padding, times and masked positions stay where they are",
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
        "name, e.g. [encoder, backbone.mixers.0]; the rest starts as from scratch; no effect in the scratch arm",
    )
    freeze: bool = Field(
        False,
        description="train only the head: encoder and backbone stay as they start, without dropout, and the statistics "
        "of their batch norms do not change",
    )
    joint: float = Field(
        0.0,
        ge=0,
        description="weight of the pretraining loss (with its objective, head and masks) on the same batches, which is "
        "added to the task's loss; 0: none",
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
    """Training settings of the baseline, where it has its own; everything else is as in finetune."""

    train: Train = Field(description="the baseline's training; exactly one budget is needed")


class Recipe(StrictModel):
    """One complete experiment."""

    task: Part = Field(description="the data: a task's name or a .py file, and its options")
    model: Part = Field(
        description="the network between encoder and head: a model's name or a .py file, and its options"
    )
    encoder: EncoderConfig = Field(EncoderConfig(), description="how an input becomes a vector")
    pretrain: Pretrain = Field(description="the first stage of SPT: no labels, only the training split's inputs")
    finetune: Finetune = Field(description="the second stage of SPT, and the only one of scratch: the task itself")
    scratch: Scratch | None = Field(None, description="the baseline's own training; null: as in finetune")

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
