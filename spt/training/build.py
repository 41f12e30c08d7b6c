"""A job's data, objective and network, built and checked before anything is written."""

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.config.recipe import EncoderConfig, Finetune, HeadConfig, Part, Pretrain, StepHeadConfig, Train
from spt.data.batching import NOBODY, Batch, collate, pieces, shuffled
from spt.data.dataset import open_stage
from spt.data.metrics import FROM_ANSWERS
from spt.errors import DataError, SptError, UsageError, one_line
from spt.models.base import Backbone, Unsupported, randomise
from spt.models.longconv import Kernel
from spt.rng import Draw
from spt.runtime.memory import machine_memory
from spt.tasks.base import Reals, Split, TaskData, Tokens, Values, describe, sequence_lengths, target_pieces
from spt.training.budget import plan_steps
from spt.training.metrics import MOST_SCORES, scores_of_steps
from spt.training.network import Encoder, Head, SequenceModel, output_of_head
from spt.training.objectives import (
    OBJECTIVES,
    Inputs,
    Objective,
    Output,
    Targets,
    evaluation_draw,
    known_metrics,
    of_whole_split,
)
from spt.training.optimizer import optimizer_groups
from spt.training.seeding import seeded
from spt.training.transfer import misfits, selected_tensors, unlike


class JointLoss(NamedTuple):
    """A second question that is asked of every batch in supervised training: what pretraining asks."""

    weight: float
    data: TaskData  # without labels, as in pretraining
    objective: Objective
    output: Output

    def make_inputs(
        self, rows: NDArray[np.int64], draw: Draw, split: Split | None = None, least: int = 0
    ) -> tuple[Inputs, Targets]:
        """What pretraining would make of these rows of the training split, or of `split`, which holds them alone;
        padded to `least` steps at least."""
        if split is None:
            batch = collate(self.data.train, rows, self.data.input, self.data.target, least)
        else:
            places = np.where(rows == NOBODY, NOBODY, np.arange(len(rows)))
            batch = collate(split.unlabelled(), places, self.data.input, self.data.target, least)
            batch = batch._replace(rows=torch.from_numpy(rows))
        return self.objective.make_inputs(batch, draw)


@dataclass(frozen=True)
class StageSetup:
    """A job with its data and its network. Pretraining data carry no labels: they are taken away here."""

    job: Job
    data: TaskData
    objective: Objective
    output: Output
    model: SequenceModel
    joint: JointLoss | None = None

    @property
    def train(self) -> Train:
        return self.job.train

    @property
    def hides(self) -> bool:
        """Are steps hidden in training?"""
        return self.objective.hides or (self.joint is not None and self.joint.objective.hides)

    def output_of(self, denoising: bool) -> Output:
        """Of the answers to the task, or to a joint loss."""
        return self.joint.output if denoising and self.joint is not None else self.output

    def make_inputs(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        """What the objective makes of a batch, its steps shuffled first where the job says so."""
        stage = self.job.settings_stage
        if isinstance(stage, Pretrain) and stage.shuffle_steps:
            batch = shuffled(batch, draw)
        return self.objective.make_inputs(batch, draw)


def build_stage(job: Job) -> StageSetup:
    """Everything that can be wrong with a job is found here, before its directory exists."""
    recipe, stage = job.resolved.recipe, job.settings_stage
    data = open_stage(recipe, job.stage)
    objective = _objective(job, stage, data)
    in_use = len(data.train)
    data = data.labelled() if objective.labelled else data.mapped(Split.unlabelled)
    if not len(data.train):
        raise DataError(f"none of the {in_use:,} training rows in use has a target; use more of them")
    width = model_width(recipe.model)
    output = output_of_head(objective.output(data), width, stage.head)
    _check_train(job, objective, output, data)
    joint = _joint_loss(job, stage, data, width) if isinstance(stage, Finetune) and stage.joint else None
    with _within_memory():
        model = build_network(
            Architecture(model=recipe.model, encoder=recipe.encoder, head=stage.head, seed=job.seed),
            data.input,
            output,
            data.length,
            joint=None if joint is None else (joint.output, recipe.pretrain.head),
            frozen=isinstance(stage, Finetune) and stage.freeze,
        )
    setup = StageSetup(job, data, objective, output, model, joint)
    if isinstance(stage, Finetune) and job.parent is not None:
        selected_tensors(model, stage.load)
    if job.from_other_task:
        _check_other_task(setup)
    _check_abilities(setup)
    _check_costs(setup)
    _check_scored(setup)
    return setup


class Architecture(BaseModel):
    """What a network is built from, but for what the task's data decide."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Part
    encoder: EncoderConfig
    head: HeadConfig | StepHeadConfig
    seed: int  # of the weights that it starts with


def build_network(
    parts: Architecture,
    input: Tokens | Values,
    output: Output,
    length: int,
    *,
    joint: tuple[Output, StepHeadConfig] | None = None,
    frozen: bool = False,
) -> SequenceModel:
    """The network before any training, for sequences of up to `length` steps; with `joint`, it has a second head."""
    width, seed = model_width(parts.model), parts.seed
    # Streams of their own: the head is the same in both arms, and the scratch arm starts where pretraining started.
    try:
        with seeded(seed, "encoder"):
            encoder = Encoder(input, width, parts.encoder)
        with seeded(seed, "backbone"):
            backbone = build_backbone(parts.model, length)
        with seeded(seed, "head"):
            head = Head(width, output, parts.head)
        with seeded(seed, "head"):  # as pretraining's starts
            denoiser = None if joint is None else Head(width, *joint)
        if parts.model.options.get("initialisation") == "random":  # the whole network, as the SPT paper has it
            for name, part in (("encoder", encoder), ("head", head), ("head", denoiser)):
                with seeded(seed, f"random {name}"):
                    if part is not None:
                        randomise(part)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # sizes that no machine can hold
        if not re.search("memory|alloc|overflow|too large|numel|storage", str(error), re.I):
            raise
        asked = re.search(r"allocate (\d+) bytes", str(error))
        reason = f"one tensor takes {int(asked[1]) / 1e9:,.1f} GB" if asked else "its tensors have too many numbers"
        raise _too_large(reason) from error
    return SequenceModel(encoder, backbone, head, denoiser, frozen)


def _too_large(reason: str) -> UsageError:
    return UsageError(
        f"the network is too large to build here: {reason}; take a smaller width (model.d_model), fewer layers or "
        "shorter sequences"
    )


@contextlib.contextmanager
def _within_memory() -> Iterator[None]:
    """Within, a network is refused as soon as its weights, their gradients and AdamW's state are more than this
    machine's memory holds, before that memory is used up."""
    most, size = machine_memory(), 0

    def add(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal size
        if tensor is not None and not tensor.is_meta:
            size += tensor.numel() * tensor.element_size() * (4 if isinstance(tensor, nn.Parameter) else 1)
        if size > most:
            raise _too_large(
                f"weights, gradients and AdamW's state take more than the {most / 1e9:,.1f} GB of this machine"
            )

    hooks = [register_module_parameter_registration_hook(add), register_module_buffer_registration_hook(add)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def lengthened(network: SequenceModel, part: Part, length: int, longer: int) -> SequenceModel:
    """The weights, built for sequences of `length` steps, in a network for longer ones; in evaluation mode. Raises
    UsageError where their shapes depend on it."""
    backbone = build_backbone(part, longer)
    weights = network.backbone.state_dict()
    other = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    if odd := [name for name, tensor in weights.items() if other.get(name) != tensor.shape]:
        raise UsageError(
            f"there are sequences of {longer:,} steps, but model {part.name} was built for {length:,}: {odd[0]} would "
            "have another shape"
        )
    backbone.load_state_dict(weights)
    for trained, built in zip(network.backbone.modules(), backbone.modules(), strict=True):
        if isinstance(trained, Kernel) and isinstance(built, Kernel):
            built.for_longer(trained)
    return SequenceModel(network.encoder, backbone, network.head, network.denoiser, network.frozen).eval()


def _objective(job: Job, stage: Pretrain | Finetune, data: TaskData) -> Objective:
    """The objective of a stage, if this task and this model can be asked for it."""
    name, section = stage.objective.name, "pretrain" if isinstance(stage, Pretrain) else "finetune"
    objective = OBJECTIVES[name].model_validate_json(json.dumps(stage.objective.options))
    span = stage.objective.options.get("span", 1)
    if span > data.length and job.resolved.smoke:  # whose sequences may be shorter
        objective = objective.model_copy(update={"span": data.length})
    elif span > data.length:
        raise UsageError(
            f"{section}.objective.span is {span}, but this task's sequences have at most {data.length:,} steps"
        )
    if objective.causal and not job.resolved.recipe.model.options["causal"]:
        raise UsageError(
            f"objective {name} predicts step t + 1 from the steps up to t, but this model looks ahead; "
            "set model.causal=true"
        )
    return objective


def _joint_loss(job: Job, stage: Finetune, data: TaskData, width: int) -> JointLoss:
    pretraining = job.resolved.recipe.pretrain
    objective, bare = _objective(job, pretraining, data), data.mapped(Split.unlabelled)
    output = output_of_head(objective.output(bare), width, pretraining.head)
    return JointLoss(stage.joint, bare, objective, output)


def _check_other_task(setup: StageSetup) -> None:
    """The weights that another task's inputs will give fit this network; found before they are made."""
    assert isinstance(setup.job.parent, Job)
    there, here = setup.job.parent.resolved, setup.job.resolved
    what = f"weights pretrained on the inputs of {there.task_name} do not fit {here.task_name}"
    other = build_stage(setup.job.parent)
    if problem := unlike(describe(other.data.input), describe(setup.data.input)):
        raise UsageError(f"{what}: {problem}; choose a task with inputs of the same kind")
    if wrong := misfits(other.model, setup.model):
        raise UsageError(
            f"{what}: {wrong[0]} has another shape, since sequences there have {other.data.length:,} steps and here "
            f"{setup.data.length:,}; choose a task with sequences that are no longer"
        )


def _check_abilities(setup: StageSetup) -> None:
    """The model can take sequences of this task's lengths, as it says itself."""
    backbone, name = setup.model.backbone, setup.job.resolved.recipe.model.name
    data = setup.data
    lengths = np.unique(np.concatenate([np.unique(sequence_lengths(split)) for split in data.splits.values()]))
    odd = lengths[lengths % backbone.length_multiple != 0]
    if odd.size:
        raise UsageError(
            f"model {name} takes sequences whose length is a multiple of {backbone.length_multiple}, but this task has "
            f"some of {odd[0]:,} steps; choose another model, or cut the sequences to such a length"
        )
    if not backbone.ignores_padding and lengths.size > 1:
        raise UsageError(
            f"model {name} cannot leave padding out of account, but this task's sequences have {lengths[0]:,} to "
            f"{lengths[-1]:,} steps; choose another model, or sequences of one length"
        )
    has_times, appended = data.train.steps is not None, setup.model.encoder.times is not None
    if has_times and not appended and not backbone.uses_step_times:
        raise UsageError(
            f"model {name} takes no account of the time between steps, which this task's sequences have; choose s5, "
            "give it to the encoder by encoder.step_times=append, or leave times out by the task's option"
        )
    if appended and not has_times:
        raise UsageError(
            "encoder.step_times: append is for tasks with times between their steps, which this one does not have; "
            "leave it out"
        )
    if data.future and setup.objective.labelled and not setup.job.resolved.recipe.model.options["causal"]:
        raise UsageError(
            "this task's targets are later inputs, which a model that looks ahead sees; set model.causal=true"
        )


def _check_scored(setup: StageSetup) -> None:
    """Something of the validation split is scored; usually its first rows show it."""
    split, data = setup.data.val, setup.data
    draw = evaluation_draw(setup.job.train, setup.job.seed, 0)
    for rows in pieces(np.arange(len(split)), 64):
        _, targets = setup.make_inputs(collate(split, rows, data.input, data.target), draw)
        if targets.weight.any():
            return
    why = "it is too small for the masking ratio, or its sequences have one step, or no value"
    if setup.objective.labelled:
        why = "none of its steps has a target"
    raise DataError(
        f"objective {setup.job.settings_stage.objective.name}: no step of the validation split is scored; {why}"
    )


def _check_train(job: Job, objective: Objective, output: Output, data: TaskData) -> None:
    """What training settings cannot know of the task."""
    place, train, rows = f"{job.settings_name}.train", job.train, len(data.train)
    if train.metric_average == "per_batch" and objective.labelled and data.target.missing:
        raise UsageError(
            f"{place}.metric_average: per_batch is not for labels, nor for targets that may be missing; use exact"
        )
    if train.batch_size > rows:
        raise UsageError(
            f"{place}.batch_size is {train.batch_size}, but {rows} training rows are in use; choose at most {rows}"
        )
    if train.sampling == "balanced":
        _check_sampling(place, objective, data)
    allowed = {"auto", *known_metrics(output)}
    if train.select_by not in allowed:
        raise UsageError(
            f"{place}.select_by: {train.select_by} is no metric of this stage; choose among "
            f"{', '.join(sorted(allowed))}"
        )
    for metric in sorted({train.select_by, output.metric} & of_whole_split(output)):
        _check_metric(metric, place, train, output, data)
    if train.validation_masks == "redrawn" and not objective.hides:
        raise UsageError(
            f"{place}.validation_masks: redrawn has no effect, since this objective hides nothing; leave it out"
        )
    if output.per_step and objective.labelled and job.resolved.recipe.finetune.head.pool == "max":
        raise UsageError("finetune.head.pool: max has no effect, since this task asks at every step; leave it out")
    if train.metric_average == "per_batch" and not objective.labelled and getattr(data.input, "missing", False):
        raise UsageError(
            f"{place}.metric_average: per_batch cannot leave missing values out, which this task may have; use exact"
        )
    if train.metric_average == "per_batch" and data.train.recordings is not None and objective.labelled:
        raise UsageError(
            f"{place}.metric_average: per_batch is of batches of rows, but this task's score is of recordings; use "
            "exact"
        )
    scored = {"validation": data.val, **({"test": data.test} if objective.labelled and len(data.test) else {})}
    for name, split in scored.items() if train.metric_average == "per_batch" else ():
        if len(split) < train.batch_size:
            raise UsageError(
                f"{place}.metric_average: per_batch needs a full batch of {train.batch_size}, but the {name} split has "
                f"{len(split)} rows; use exact"
            )


def _check_metric(metric: str, place: str, train: Train, output: Output, data: TaskData) -> None:
    """A metric that needs all answers to a split at once can be had of this task."""
    if train.metric_average == "per_batch":
        raise UsageError(
            f"{place}.metric_average: per_batch is the mean over batches, but {metric} needs all answers of a split at "
            "once; use exact"
        )
    for name, split in (("validation", data.val), ("test", data.test)):
        if not len(split):
            continue
        numbers = scores_of_steps(output, split)
        counted = metric in FROM_ANSWERS and output.macro  # in a confusion matrix
        if output.per_step and not counted and numbers > MOST_SCORES:
            raise UsageError(
                f"metric {metric} needs the answers to all steps of a split at once, and the {numbers:,} numbers of "
                f"the {name} split are more than the {MOST_SCORES:,} that are kept; choose another metric, such as "
                "mcc of classes or mae of numbers"
            )
        if metric == "mape" and (zeros := sum(int((piece == 0).sum()) for piece in target_pieces(split))):
            raise UsageError(
                f"metric mape divides by the target, which is 0 in {zeros:,} of the {name} split's answers; choose mae "
                "or mse"
            )


def _check_sampling(place: str, objective: Objective, data: TaskData) -> None:
    """Raise UsageError unless every training row has a class or labels of its own to be drawn by."""
    problem = ""
    if not objective.labelled:
        problem = "is by class, and pretraining knows none; leave it out there"
    elif isinstance(data.target, Reals):
        problem = "is by class, but this task's targets are numbers; leave it out"
    elif data.target.per_step:
        problem = "needs a class for every sequence, but here every step has one; objective.class_weights is possible"
    elif data.resample is not None:
        problem = "draws rows again, but this task makes new ones for every epoch; leave it out"
    if problem:
        raise UsageError(f"{place}.sampling: balanced {problem}")


def _check_costs(setup: StageSetup) -> None:
    """The model states what it costs, names only parameters it has, and the budget reaches beyond the warm-up."""
    model, train, length = setup.model, setup.job.train, setup.data.length
    try:
        flops, own = float(model.flops(length)), float(model.backbone.flops(length))
    except Exception as error:
        raise UsageError(f"model {setup.job.resolved.recipe.model.name}: flops fails with {one_line(error)}") from error
    if not (math.isfinite(flops) and flops > 0 and own >= 0):
        raise UsageError(f"model {setup.job.resolved.recipe.model.name}: flops({length}) is {own}")
    optimizer_groups(model, train)
    steps = plan_steps(setup)
    if train.warmup_steps > steps:
        raise UsageError(
            f"{setup.job.settings_name}.train.warmup_steps is {train.warmup_steps}, but the budget is {steps} steps"
        )


def model_width(part: Part) -> int:
    return int(part.options["d_model"])


def build_backbone(part: Part, length: int) -> Backbone:
    """The backbone for sequences of up to `length` steps; `max_length` is the task's unless the recipe says more."""
    component = find_plugin("models", part.name)
    config = component.module.Config.model_validate_json(json.dumps(part.options))
    if config.max_length is not None and config.max_length < length:
        raise UsageError(f"model.max_length is {config.max_length}, but this task has sequences of {length} steps")
    if config.max_length is None:
        config = config.model_copy(update={"max_length": length})
    try:
        backbone = component.module.build(config)
    except SptError:
        raise
    except Unsupported as error:
        raise UsageError(f"model {part.name}: {error}") from error
    except (Exception, SystemExit) as error:
        if component.module.__name__.startswith("spt.models."):
            if isinstance(error, ValueError):  # options that contradict each other only once the layers are known
                raise UsageError(f"model {part.name}: {error}") from error
            raise
        raise UsageError(f"model {part.name}: build fails with {one_line(error)}") from error
    if not isinstance(backbone, Backbone):
        raise UsageError(f"model {part.name}: build returned {type(backbone).__name__}, not a Backbone")
    if type(backbone.length_multiple) is not int or backbone.length_multiple < 1:
        raise UsageError(
            f"model {part.name}: its length_multiple is {backbone.length_multiple!r}, not a number of steps"
        )
    names: dict[int, str] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise UsageError(
                f"model {part.name}: {first} and {name} are one parameter under two names, which no checkpoint can "
                "hold; register a shared module once and hand it to the others in a tuple, where torch does not see it"
            )
    return backbone
