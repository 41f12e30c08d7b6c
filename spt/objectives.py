"""What is asked of the network: the same batch becomes what it is shown (Inputs) and what it is scored on (Targets).

Tasks know labels, never masking; models know neither. An objective is the recipe's options and two methods.

Letters: B sequences in a batch, L steps, C channels, S predicted quantities (per sequence, or per step).
"""

from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from spt.batch import Batch
from spt.errors import UsageError
from spt.models.base import Context
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

    @property
    def width(self) -> int:
        """Numbers the head puts out."""
        return self.size * self.classes


class Objective(BaseModel):
    """Base of all objectives; `labelled` ones see the task's targets, the others are given data without any."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    labelled: ClassVar[bool]
    hides: ClassVar[bool]  # does it blank inputs?

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

    def output(self, data: TaskData) -> Output:
        if isinstance(data.target, Classes):
            if self.loss not in ("auto", "cross_entropy"):
                raise UsageError(
                    f"objective supervised: loss {self.loss} is for real targets, but this task has classes"
                )
            return Output("cross_entropy", per_step=False, size=1, classes=data.target.count)
        if self.loss == "cross_entropy":
            raise UsageError("objective supervised: loss cross_entropy is for classes, but this task has real targets")
        return Output("l2" if self.loss == "auto" else self.loss, per_step=False, size=data.target.size)

    def pose(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        assert batch.y is not None, "a labelled objective is given labelled data"
        values = batch.y if batch.y.ndim == 2 else batch.y[:, None]
        return Inputs(batch.x, None, batch.context), Targets(values, batch.real.float())


class Masked(Objective):
    """Masked denoising (SPT paper section 2; BERT without its 80/10/10 rule).

    Every valid position is hidden with probability `ratio`, independently; all its channels with it; hidden
    positions become one learned vector; only they are scored. Training masks follow from (seed, epoch, example,
    position), validation masks are fixed.
    """

    labelled: ClassVar[bool] = False
    hides: ClassVar[bool] = True

    ratio: float = Field(0.15, gt=0, lt=1, description="probability that a position is hidden")
    loss: Literal["auto", "cross_entropy", "l1"] = Field(
        "auto",
        description="auto: cross_entropy on tokens, l1 on normalised values; cross_entropy on values needs levels",
    )

    def output(self, data: TaskData) -> Output:
        if isinstance(data.input, Tokens):
            if self.loss == "l1":
                raise UsageError("objective masked: loss l1 is for continuous inputs, but this task has tokens")
            return Output("cross_entropy", per_step=True, size=1, classes=data.input.vocab)
        if self.loss != "cross_entropy":
            return Output("l1", per_step=True, size=data.input.channels)
        if data.input.levels is None:
            raise UsageError("objective masked: loss cross_entropy needs inputs with a fixed number of levels; use l1")
        return Output("cross_entropy", per_step=True, size=data.input.channels, classes=data.input.levels)

    def pose(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        uniform = draw.uniform(batch.rows.numpy(), batch.x.shape[1])
        hidden = torch.from_numpy(uniform < self.ratio) & batch.context.valid
        weight = (hidden & batch.real[:, None]).float()
        if batch.x.ndim == 2:
            shown, values = batch.x.masked_fill(hidden, 0), batch.x[..., None]
        else:
            shown = batch.x.masked_fill(hidden[..., None], 0.0)
            values = batch.raw if self.loss == "cross_entropy" and batch.raw is not None else batch.x
        return Inputs(shown, hidden, batch.context), Targets(values, weight)


OBJECTIVES: dict[str, type[Objective]] = {"masked": Masked, "supervised": Supervised}
