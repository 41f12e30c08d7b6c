"""What is asked of the network: the same batch becomes what it is shown (Inputs) and what it is scored on (Targets).

Tasks know labels, never masking; models know neither. An objective is the recipe's options and two methods.

Letters: b examples in a batch, B sequences (of pairs 2 b, else b), L steps, C channels, S predicted quantities (per
example, or per step).
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from spt.config.objectives import DenoisingOptions, MaskedOptions, NextOptions, ObjectiveOptions, SupervisedOptions
from spt.config.recipe import Train
from spt.data.batching import NOBODY, Batch
from spt.errors import UsageError
from spt.models.base import Context
from spt.rng import Draw
from spt.tasks.base import IGNORED, Classes, Split, TaskData, Tokens

Loss = Literal["cross_entropy", "l1", "l2", "gaussian"]
MANY = 256  # classes; of more, macro averages are not kept


class Inputs(NamedTuple):
    """What the network is shown. Where `hidden`, x is zero and must not be read."""

    x: Int[Tensor, "B L"] | Float[Tensor, "B L C"]
    hidden: Bool[Tensor, "B L"] | None
    context: Context


class Targets(NamedTuple):
    """What the network is scored on; weight 0 where it is not."""

    values: Int[Tensor, "b *L S"] | Float[Tensor, "b *L S"]
    weight: Float[Tensor, " b *L"]
    scored: Int[Tensor, " N"] | None = None  # steps that need an answer, as indices into b x L; None: all of them


class Output(NamedTuple):
    """Decides the head and the loss."""

    loss: Loss
    per_step: bool  # one answer a step, or one a sequence
    size: int  # S quantities in an answer
    classes: int = 1  # of each quantity under cross-entropy; 1 otherwise
    shift: tuple[float, ...] = ()  # (S,) the network answers (quantity - shift) / scale; () for the quantity itself
    scale: tuple[float, ...] = ()  # (S,)
    sequences: int = 1  # of an example: 2 for pairs
    metric: str = ""  # what is compared, where that is not the loss's own
    macro: bool = False  # are metrics kept that count every class alike?
    balanced: bool = False  # does the loss count every class alike?
    text: bool = False  # is it a language model, whose loss is also told by byte?

    @property
    def width(self) -> int:
        """Numbers the head puts out."""
        return self.size * (2 if self.loss == "gaussian" else self.classes)


class Objective(ObjectiveOptions):
    """Base of all objectives: options, and what they mean for a batch."""

    def output(self, data: TaskData) -> Output:
        raise NotImplementedError

    def make_inputs(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        """On the CPU, where batches are made; the question is what moves to the device."""
        raise NotImplementedError

    def scored_steps(self, split: Split) -> float:
        """Steps of an example that are scored, on average; of use only where answers are those of steps."""
        raise NotImplementedError

    def weighed(self, parts: Sequence[Targets], total: Callable[[list[float]], list[float]]) -> list[Targets]:
        """The targets of all parts of a global batch, with weights that depend on the whole; `total` sums over
        processes."""
        return list(parts)


class Supervised(SupervisedOptions, Objective):
    """The task itself, of sequences or of their steps: cross-entropy for classes; for real targets the squared (`l2`)
    or absolute (`l1`) error, or the likelihood under a normal law whose mean and variance are answered (`gaussian`)."""

    def output(self, data: TaskData) -> Output:
        output = self._output(data)._replace(per_step=data.target.per_step, sequences=data.train.sequences)
        text = data.train.text_bytes is not None
        output = output._replace(text=text, balanced=self.class_weights == "batch")
        output = output._replace(macro=output.loss == "cross_entropy" and not text and output.classes <= MANY)
        if output.balanced and not output.macro:
            raise UsageError(
                "objective supervised: class_weights batch is for classes, at most 256 and not those of a language "
                "model; use class_weights none"
            )
        allowed = known_metrics(output)
        if self.metric != "auto" and self.metric not in allowed:
            raise UsageError(
                f"objective supervised: metric {self.metric} is none of this task's: {', '.join(sorted(allowed))}"
            )
        return output._replace(metric="" if self.metric == "auto" else self.metric)

    def _output(self, data: TaskData) -> Output:
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
        y, unit = np.asarray(data.train.targets, np.float32).astype(np.float64), "rows"  # (n, S), as batches show them
        if data.train.per_step:
            y, unit = y[np.isfinite(y[:, 0])], "steps"
        extent = np.abs(y) if self.scale == "reference" else y
        low, high = extent.min(0), extent.max(0)
        for k in np.flatnonzero(low == high):
            size = "the same size" if self.scale == "reference" else "the same value"
            raise UsageError(
                f"objective supervised: scale {self.scale} divides by the spread of a target, but target {k} has "
                f"{size} ({low[k]:g}) in all {len(y)} training {unit} in use; use scale none"
            )
        shift, scale = (y.mean(0), y.std(0)) if self.scale == "standard" else ((high + low) / 2, (high - low) / 2)
        return tuple(shift.tolist()), tuple(scale.tolist())

    def make_inputs(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        y = batch.y
        assert y is not None, "a labelled objective is given labelled data"
        if y.dtype == torch.int64:
            scored, values = y != IGNORED, y.clamp_min(0)[..., None]
        else:
            scored = torch.isfinite(y[..., 0])
            values = torch.where(scored[..., None], y, 0.0)
        real = batch.real.reshape(-1, *[1] * (scored.ndim - 1))
        return Inputs(batch.x, None, batch.context), _targets(values, scored & real)

    def scored_steps(self, split: Split) -> float:
        targets = np.asarray(split.targets)
        known = np.isfinite(targets[:, 0]) if targets.ndim == 2 else targets != IGNORED
        return float(known.sum()) / len(split)

    def weighed(self, parts: Sequence[Targets], total: Callable[[list[float]], list[float]]) -> list[Targets]:
        if self.class_weights == "none":
            return list(parts)
        classes = [targets.values[..., 0][targets.weight > 0] for targets in parts]
        counts = torch.tensor(total(torch.bincount(torch.cat(classes), minlength=MANY).double().tolist()))
        weight_of = torch.where(counts > 0, 1 / counts, 0.0).float()
        return [t._replace(weight=torch.where(t.weight > 0, weight_of[t.values[..., 0]], 0.0)) for t in parts]


class Denoising(DenoisingOptions, Objective):
    """Base of objectives that are scored on the inputs themselves, S = C quantities a step (tokens: one)."""

    named: ClassVar[str]  # in a recipe

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


class Masked(MaskedOptions, Denoising):
    """Masked denoising (SPT paper section 2; BERT without its 80/10/10 rule).

    Every valid position is hidden with probability `ratio`, independently or in spans; all its channels with it;
    hidden positions become one learned vector; only they are scored. Training masks follow from (seed, epoch, example,
    position); those of an evaluation from `evaluation_draw`.
    """

    named: ClassVar[str] = "masked"

    def make_inputs(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        hidden = torch.from_numpy(self.hidden(draw, batch.addresses.numpy(), batch.x.shape[1])) & batch.context.valid
        shown = batch.x.masked_fill(hidden if batch.x.ndim == 2 else hidden[..., None], 0)
        return Inputs(shown, hidden, batch.context), _targets(self.truth(batch), hidden & _real(batch))

    def scored_steps(self, split: Split) -> float:
        return self.ratio * float(split.lengths.mean())

    def hidden(self, draw: Draw, rows: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
        """(B, length) A span begins at a step with probability 1 - (1 - ratio)^(1/span), and hides `span` steps.

        Spans may begin before the first step, so every step is hidden with probability `ratio`.
        """
        if self.span == 1:
            return draw.uniform(rows, length) < self.ratio
        begins = draw.uniform(rows, length + self.span - 1) < 1 - (1 - self.ratio) ** (1 / self.span)
        before = np.cumsum(np.pad(begins, ((0, 0), (1, 0))), axis=1, dtype=np.int32)
        return before[:, self.span :] > before[:, : -self.span]


class Next(NextOptions, Denoising):
    """Causal denoising (SPT paper section 2): the answer at step t is scored on the input at t + 1.

    Nothing is hidden, so the model must not look ahead. The last valid step of a sequence has nothing to predict.
    """

    named: ClassVar[str] = "next"

    def output(self, data: TaskData) -> Output:
        if int(data.train.extents.max()) < 2:
            raise UsageError("objective next: every training sequence is one step long, so there is no next step")
        return super().output(data)

    def make_inputs(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        truth = self.truth(batch)
        follows = F.pad(batch.context.valid[:, 1:], (0, 1))  # does a valid step come after?
        values = F.pad(truth[:, 1:], (0, 0, 0, 1))
        return Inputs(batch.x, None, batch.context), _targets(values, follows & _real(batch))

    def scored_steps(self, split: Split) -> float:
        return float(split.lengths.mean()) - split.sequences


def _real(batch: Batch) -> Bool[Tensor, "B 1"]:
    return (batch.addresses != NOBODY)[:, None]


def _targets(values: Tensor, scored: Bool[Tensor, " B *L"]) -> Targets:
    """Weight 1 where `scored`. The steps are looked up here, on the CPU, so that no device has to be waited for."""
    partly = scored.ndim == 2 and not bool(scored.all())
    return Targets(values, scored.float(), scored.flatten().nonzero()[:, 0] if partly else None)


def known_metrics(output: Output) -> set[str]:
    """What an evaluation of such answers tells."""
    if output.loss != "cross_entropy":
        return {"loss", "mae", "mse", "r2"}
    names = {"loss", "accuracy"} | ({"f1_macro", "accuracy_macro"} if output.macro else set())
    return names | ({"perplexity", "bits_per_byte"} if output.text else set())


OBJECTIVES: dict[str, type[Objective]] = {"masked": Masked, "next": Next, "supervised": Supervised}


def evaluation_draw(train: Train, seed: int, step: int) -> Draw:
    """Chance in the evaluation after `step` optimiser steps of a stage: the same at every one, or that step's own."""
    return Draw(0, "evaluation", 0) if train.validation_masks == "fixed" else Draw(seed, "evaluation", step)
