"""What is asked of the network: the same batch becomes what it is shown (Inputs) and what it is scored on (Targets).

Tasks know labels, never masking; models know neither. An objective is the recipe's options and two methods.

Letters: B sequences in a batch, L steps, C channels, S predicted quantities (per sequence, or per step).
"""

from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from spt.batch import Batch
from spt.errors import UsageError
from spt.models.base import Context
from spt.recipe import Train
from spt.seeding import Draw
from spt.tasks.base import Classes, TaskData, Tokens

Loss = Literal["cross_entropy", "l1", "l2"]


class Inputs(NamedTuple):
    """What the network is shown. Where `hidden`, x is zero and must not be read."""

    x: Int[Tensor, "B L"] | Float[Tensor, "B L C"]
    hidden: Bool[Tensor, "B L"] | None
    context: Context


class Targets(NamedTuple):
    """What the network is scored on; weight 0 where it is not."""

    values: Int[Tensor, "B *L S"] | Float[Tensor, "B *L S"]
    weight: Float[Tensor, " B *L"]


class Output(NamedTuple):
    """Decides the head and the loss."""

    loss: Loss
    per_step: bool  # one answer a step, or one a sequence
    size: int  # S quantities in an answer
    classes: int = 1  # of each quantity under cross-entropy; 1 otherwise
    shift: tuple[float, ...] = ()  # (S,) the network answers (quantity - shift) / scale; () for the quantity itself
    scale: tuple[float, ...] = ()  # (S,)

    @property
    def width(self) -> int:
        """Numbers the head puts out."""
        return self.size * self.classes


class Objective(BaseModel):
    """Base of all objectives; `labelled` ones see the task's targets, the others are given data without any."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    labelled: ClassVar[bool]
    hides: ClassVar[bool]  # does it blank inputs?
    causal: ClassVar[bool] = False  # would a model that looks ahead see the answers?

    def output(self, data: TaskData) -> Output:
        raise NotImplementedError

    def pose(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        """On the CPU, where batches are made; the question is what moves to the device."""
        raise NotImplementedError


class Supervised(Objective):
    """The task itself: cross-entropy for classes; squared (`l2`) or absolute (`l1`) error for real targets."""

    labelled: ClassVar[bool] = True
    hides: ClassVar[bool] = False

    loss: Literal["auto", "cross_entropy", "l1", "l2"] = Field("auto", description="auto: cross_entropy or l2")
    scale: Literal["none", "standard", "range", "reference"] = Field(
        "none",
        description="real targets y as the loss sees them, each scaled by its own training rows; predictions, mae, "
        "mse and r2 stay in the task's units. standard: mean 0, variance 1; range: 2 (y - lo) / (hi - lo) - 1 with "
        "lo = min y, hi = max y; reference: the same with lo = min |y|, hi = max |y|, as in the published code (BIDMC)",
    )

    def output(self, data: TaskData) -> Output:
        if isinstance(data.target, Classes):
            if self.loss not in ("auto", "cross_entropy"):
                raise UsageError(
                    f"objective supervised: loss {self.loss} is for real targets, but this task has classes"
                )
            if self.scale != "none":
                raise UsageError(
                    f"objective supervised: scale {self.scale} is for real targets, but this task has classes"
                )
            return Output("cross_entropy", per_step=False, size=1, classes=data.target.count)
        if self.loss == "cross_entropy":
            raise UsageError("objective supervised: loss cross_entropy is for classes, but this task has real targets")
        shift, scale = self._scaling(data)
        loss: Loss = "l2" if self.loss == "auto" else self.loss
        return Output(loss, per_step=False, size=data.target.size, shift=shift, scale=scale)

    def _scaling(self, data: TaskData) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(shift, scale) of each target, from the training rows in use."""
        if self.scale == "none":
            return (), ()
        assert data.train.targets is not None, "a labelled objective is given labelled data"
        y = np.asarray(data.train.targets, np.float32).astype(np.float64)  # (n, S), as batches show them
        of = np.abs(y) if self.scale == "reference" else y
        low, high = of.min(0), of.max(0)
        for k in np.flatnonzero(low == high):
            size = "the same size" if self.scale == "reference" else "the same value"
            raise UsageError(
                f"objective supervised: scale {self.scale} divides by the spread of a target, but target {k} has "
                f"{size} ({low[k]:g}) in all {len(y)} training rows in use; use scale none"
            )
        shift, scale = (y.mean(0), y.std(0)) if self.scale == "standard" else ((high + low) / 2, (high - low) / 2)
        return tuple(shift.tolist()), tuple(scale.tolist())

    def pose(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        assert batch.y is not None, "a labelled objective is given labelled data"
        values = batch.y if batch.y.ndim == 2 else batch.y[:, None]
        return Inputs(batch.x, None, batch.context), Targets(values, batch.real.float())


class Denoising(Objective):
    """Base of objectives that are scored on the inputs themselves, S = C quantities a step (tokens: one)."""

    labelled: ClassVar[bool] = False
    named: ClassVar[str]  # in a recipe

    loss: Literal["auto", "cross_entropy", "l1"] = Field(
        "auto",
        description="auto: cross_entropy on tokens, l1 on normalised values; cross_entropy on values needs levels",
    )

    def output(self, data: TaskData) -> Output:
        if isinstance(data.input, Tokens):
            if self.loss == "l1":
                raise UsageError(f"objective {self.named}: loss l1 is for continuous inputs, but this task has tokens")
            return Output("cross_entropy", per_step=True, size=1, classes=data.input.vocab)
        if self.loss != "cross_entropy":
            return Output("l1", per_step=True, size=data.input.channels)
        if data.input.levels is None:
            raise UsageError(
                f"objective {self.named}: loss cross_entropy needs inputs with a fixed number of levels; use l1"
            )
        return Output("cross_entropy", per_step=True, size=data.input.channels, classes=data.input.levels)

    def truth(self, batch: Batch) -> Int[Tensor, "B L S"] | Float[Tensor, "B L S"]:
        """What each step holds, as the loss wants it: tokens, levels, or normalised values."""
        if batch.x.ndim == 2:
            return batch.x[..., None]
        return batch.raw if self.loss == "cross_entropy" and batch.raw is not None else batch.x


class Masked(Denoising):
    """Masked denoising (SPT paper section 2; BERT without its 80/10/10 rule).

    Every valid position is hidden with probability `ratio`, independently; all its channels with it; hidden
    positions become one learned vector; only they are scored. Training masks follow from (seed, epoch, example,
    position); those of an evaluation from `evaluation_draw`.
    """

    hides: ClassVar[bool] = True
    named: ClassVar[str] = "masked"

    ratio: float = Field(0.15, gt=0, lt=1, description="probability that a position is hidden")

    def pose(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        uniform = draw.uniform(batch.rows.numpy(), batch.x.shape[1])
        hidden = torch.from_numpy(uniform < self.ratio) & batch.context.valid
        weight = (hidden & batch.real[:, None]).float()
        shown = batch.x.masked_fill(hidden if batch.x.ndim == 2 else hidden[..., None], 0)
        return Inputs(shown, hidden, batch.context), Targets(self.truth(batch), weight)


class Next(Denoising):
    """Causal denoising (SPT paper section 2): the answer at step t is scored on the input at t + 1.

    Nothing is hidden, so the model must not look ahead. The last valid step of a sequence has nothing to predict.
    """

    hides: ClassVar[bool] = False
    causal: ClassVar[bool] = True
    named: ClassVar[str] = "next"

    def output(self, data: TaskData) -> Output:
        if int(data.train.lengths.max()) < 2:
            raise UsageError("objective next: every training sequence is one step long, so there is no next step")
        return super().output(data)

    def pose(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        truth = self.truth(batch)
        follows = F.pad(batch.context.valid[:, 1:], (0, 1))  # does a valid step come after?
        weight = (follows & batch.real[:, None]).float()
        return Inputs(batch.x, None, batch.context), Targets(F.pad(truth[:, 1:], (0, 0, 0, 1)), weight)


OBJECTIVES: dict[str, type[Objective]] = {"masked": Masked, "next": Next, "supervised": Supervised}


def evaluation_draw(train: Train, seed: int, step: int) -> Draw:
    """Chance in the evaluation after `step` optimiser steps of a stage: the same at every one, or that step's own."""
    return Draw(0, "evaluation", 0) if train.validation_masks == "fixed" else Draw(seed, "evaluation", step)
