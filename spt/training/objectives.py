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
from spt.data.metrics import FROM_ANSWERS, FROM_NUMBERS, FROM_PROBABILITIES
from spt.errors import UsageError
from spt.models.base import Context
from spt.rng import Draw
from spt.tasks.base import (
    IGNORED,
    Classes,
    Labels,
    Reals,
    Split,
    TaskData,
    Tokens,
    class_counts,
    known_targets,
    label_counts,
    target_pieces,
)

Loss = Literal["cross_entropy", "binary_cross_entropy", "l1", "l2", "gaussian"]
MANY = 256  # classes; of more, macro averages are not kept


class Inputs(NamedTuple):
    """What the network is shown. Where `hidden`, x is zero and must not be read; a missing value is NaN."""

    x: Int[Tensor, "B L"] | Float[Tensor, "B L C"]
    hidden: Bool[Tensor, "B L"] | None
    context: Context
    static: Float[Tensor, "b F"] | None = None


class Targets(NamedTuple):
    """What the network is scored on; weight 0 where it is not.

    Where quantities of an answer may be unknown, every batch of the task has `known`: which of them count. Weight is 0
    where none does, and values are finite all the same.
    """

    values: Int[Tensor, "b *L S"] | Float[Tensor, "b *L S"]
    weight: Float[Tensor, " b *L"]
    scored: Int[Tensor, " N"] | None = None  # steps that need an answer, as indices into b x L; None: all of them
    known: Bool[Tensor, "b *L S"] | None = None  # None: every quantity of a scored answer counts


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
    weights: tuple[float, ...] = ()  # in training, of each class, or of each label where it holds; (): all alike
    text: bool = False  # is it a language model, whose loss is also told by byte?
    supervised: bool = False  # are metrics of all answers at once told too?
    positive: int | None = None  # the class that some of them are of

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

    def scored_steps(self, split: Split, gaps: bool = False) -> float:
        """Steps of an example that are scored, on average, where values may be missing if `gaps`; of use only where
        answers are those of steps."""
        raise NotImplementedError

    def weighed(
        self, output: Output, parts: Sequence[Targets], total: Callable[[list[float]], list[float]]
    ) -> list[Targets]:
        """The targets of all parts of a global batch, with the weights that training gives them; `total` sums over
        processes."""
        return list(parts)


class Supervised(SupervisedOptions, Objective):
    """The task itself, of sequences or of their steps: cross-entropy for classes, binary cross-entropy for labels; for
    real targets the squared (`l2`) or absolute (`l1`) error, or the likelihood under a normal law whose mean and
    variance are answered (`gaussian`)."""

    def output(self, data: TaskData) -> Output:
        output = self._output(data)._replace(per_step=data.target.per_step, sequences=data.train.sequences)
        text = data.train.text_bytes is not None
        output = output._replace(text=text, balanced=self.class_weights == "batch")
        output = output._replace(macro=output.loss == "cross_entropy" and not text and output.classes <= MANY)
        output = output._replace(supervised=True, positive=self._positive(output, data.classes))
        if output.balanced and not output.macro:
            raise UsageError(
                "objective supervised: class_weights batch is for classes, at most 256 and not those of a language "
                "model; use class_weights none"
            )
        if self.class_weights not in ("none", "batch"):
            output = output._replace(weights=self._weights(data))
        allowed = known_metrics(output)
        if self.metric != "auto" and self.metric not in allowed:
            which = " (of several classes f1 needs `positive`)" if self.metric == "f1" else ""
            named = ", ".join(sorted(allowed))
            raise UsageError(f"objective supervised: metric {self.metric} is none of this task's{which}: {named}")
        return output._replace(metric="" if self.metric == "auto" else self.metric)

    def _positive(self, output: Output, names: Sequence[str]) -> int | None:
        """The number of the class that f1, auroc and auprc are of; None: there is none."""
        if self.positive is None:
            return 1 if output.classes == 2 else None
        if not output.macro:
            raise UsageError(
                f"objective supervised: positive {self.positive!r} is a class, which this task's answers are not, or "
                "of which it has more than 256; leave it out"
            )
        known = names or [str(k) for k in range(output.classes)]
        if self.positive not in known:
            shown = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
            raise UsageError(
                f"objective supervised: positive {self.positive!r} is no class of this task; its classes are {shown}"
            )
        return list(known).index(self.positive)

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
        if isinstance(data.target, Labels):
            if self.loss != "auto" or self.scale != "none":
                raise UsageError(
                    "objective supervised: this task has labels, whose loss is binary cross-entropy; leave out loss "
                    "and scale"
                )
            return Output("binary_cross_entropy", per_step=False, size=data.target.count)
        if self.loss == "cross_entropy":
            raise UsageError("objective supervised: loss cross_entropy is for classes, but this task has real targets")
        shift, scale = self._scaling(data)
        loss: Loss = "l2" if self.loss == "auto" else self.loss
        return Output(loss, per_step=False, size=data.target.size, shift=shift, scale=scale)

    def _weights(self, data: TaskData) -> tuple[float, ...]:
        """Of each class n / (classes * its count) in the training rows in use, as scikit-learn has them; of a label,
        where it holds, how often it does not for each time that it does. Or as the recipe says them."""
        target = data.target
        if isinstance(target, Reals):
            raise UsageError("objective supervised: class_weights are for classes and labels; use class_weights none")
        if isinstance(self.class_weights, dict):
            names = data.class_names
            if unknown := [name for name in self.class_weights if name not in names]:
                raise UsageError(
                    f"objective supervised: class_weights name {unknown[0]!r}, but the labels are "
                    f"{', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
                )
            weights = np.array([self.class_weights.get(name, 1.0) for name in names])
        elif isinstance(target, Labels):
            lacking, holding = label_counts(data.train, target.count)
            weights = np.where((lacking > 0) & (holding > 0), lacking / np.maximum(holding, 1), 1.0)
        else:
            counts = class_counts(data.train, target.count)
            weights = np.where(counts > 0, counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)
        if isinstance(target, Classes):  # of a weighted mean ratios alone count; at least 1, so that sums are too
            weights = weights / weights.min()
        return tuple(weights.tolist())

    def _scaling(self, data: TaskData) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(shift, scale) of each target, from the training rows in use."""
        if self.scale == "none":
            return (), ()
        targets, unit = np.concatenate([*target_pieces(data.train)]), "rows"
        y = targets.astype(np.float32).astype(np.float64)  # (n, S), as batches show them
        if data.train.per_step:
            y, unit = y[np.isfinite(y).any(1)], "steps"
        extent = np.abs(y) if self.scale == "reference" else y
        lowest, highest, mean, spread = np.min, np.max, np.mean, np.std
        if np.isnan(y).any():  # some are missing, each target by itself
            lowest, highest, mean, spread = np.nanmin, np.nanmax, np.nanmean, np.nanstd
        low, high = lowest(extent, axis=0), highest(extent, axis=0)
        for k in np.flatnonzero(low == high):
            size = "the same size" if self.scale == "reference" else "the same value"
            raise UsageError(
                f"objective supervised: scale {self.scale} divides by the spread of a target, but target {k} has "
                f"{size} ({low[k]:g}) in all {len(y)} training {unit} in use; use scale none"
            )
        shift, scale = (high + low) / 2, (high - low) / 2
        if self.scale == "standard":
            shift, scale = mean(y, axis=0), spread(y, axis=0)
        return tuple(shift.tolist()), tuple(scale.tolist())

    def make_inputs(self, batch: Batch, draw: Draw) -> tuple[Inputs, Targets]:
        y = batch.y
        assert y is not None, "a labelled objective is given labelled data"
        if y.dtype == torch.int64:
            scored, values = y != IGNORED, y.clamp_min(0)[..., None]
        else:
            known = torch.isfinite(y)
            scored, values = known.any(-1), torch.where(known, y, 0.0)
        real = batch.real.reshape(-1, *[1] * (scored.ndim - 1))
        targets = _targets(values, scored & real)
        inputs = Inputs(batch.x, None, batch.context, batch.static)
        return inputs, targets._replace(known=known) if batch.partly else targets

    def scored_steps(self, split: Split, gaps: bool = False) -> float:
        each = known_targets(np.asarray(split.targets))
        known = np.asarray(each.reshape(len(each), -1).any(1))
        if not split.per_step or split.contiguous:
            return float(known.sum()) / len(split)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])  # windows count what they share each
        return float((before[split.stops] - before[split.starts]).sum()) / len(split)

    def weighed(
        self, output: Output, parts: Sequence[Targets], total: Callable[[list[float]], list[float]]
    ) -> list[Targets]:
        if output.weights and output.loss == "cross_entropy":
            return [_by_class(targets, torch.tensor(output.weights)) for targets in parts]
        if self.class_weights != "batch":
            return list(parts)
        classes = [targets.values[..., 0][targets.weight > 0] for targets in parts]
        counts = torch.tensor(total(torch.bincount(torch.cat(classes), minlength=MANY).double().tolist()))
        weight_of = torch.where(counts > 0, 1 / counts, 0.0).float()
        return [_by_class(targets, weight_of) for targets in parts]


class Denoising(DenoisingOptions, Objective):
    """Base of objectives that are scored on the inputs themselves, S = C quantities a step (tokens: one). A missing
    value is never a target: a step's loss is the mean over its observed channels, and one without any is not scored."""

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

    def targets(self, batch: Batch, values: Tensor, scored: Bool[Tensor, "B L"]) -> Targets:
        """Values that the scored steps are to be answered with, without the missing ones among them."""
        scored = scored & _real(batch)
        if not batch.gaps:
            return _targets(values, scored)
        known = ~values.isnan()
        return _targets(values.masked_fill(~known, 0), scored & known.any(-1))._replace(known=known)


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
        return Inputs(shown, hidden, batch.context, batch.static), self.targets(batch, self.truth(batch), hidden)

    def scored_steps(self, split: Split, gaps: bool = False) -> float:
        return self.ratio * (float(split.lengths.mean()) - (_blank_steps(split) if gaps else 0.0))

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
        return Inputs(batch.x, None, batch.context, batch.static), self.targets(batch, values, follows)

    def scored_steps(self, split: Split, gaps: bool = False) -> float:
        return float(split.lengths.mean()) - split.sequences - (_blank_steps(split, first=1) if gaps else 0.0)


def _blank_steps(split: Split, first: int = 0) -> float:
    """Steps of a row without any value, on average; without the first so many."""
    rows = (split.values[a + first : b] for a, b in zip(split.starts.tolist(), split.stops.tolist(), strict=True))
    return float(sum(np.isnan(row).all(axis=1).sum() for row in rows)) / len(split)


def _real(batch: Batch) -> Bool[Tensor, "B 1"]:
    return (batch.addresses != NOBODY)[:, None]


def _targets(values: Tensor, scored: Bool[Tensor, " B *L"]) -> Targets:
    """Weight 1 where `scored`. The steps are looked up here, on the CPU, so that no device has to be waited for."""
    partly = scored.ndim == 2 and not bool(scored.all())
    return Targets(values, scored.float(), scored.flatten().nonzero()[:, 0] if partly else None)


def _by_class(targets: Targets, weight_of: Float[Tensor, " classes"]) -> Targets:
    """With the weight of its class for every scored answer."""
    weight = torch.where(targets.weight > 0, weight_of[targets.values[..., 0]], 0.0)
    return targets._replace(weight=weight)


def known_metrics(output: Output) -> set[str]:
    """What an evaluation of such answers tells."""
    if output.loss == "binary_cross_entropy":
        return {"loss", "accuracy", "exact_match", "f1_macro", "f1_micro", *of_whole_split(output)}
    if output.loss != "cross_entropy":
        return {"loss", "mae", "mse", "r2", *of_whole_split(output)}
    names = {"loss", "accuracy"} | ({"f1_macro", "accuracy_macro"} if output.macro else set())
    return names | ({"perplexity", "bits_per_byte"} if output.text else set()) | of_whole_split(output)


def of_whole_split(output: Output) -> set[str]:
    """Those of them that need all answers of a split at once."""
    if not output.supervised:
        return set()
    if output.loss == "binary_cross_entropy":
        return {"mcc", "auroc", "auprc"}
    if output.loss != "cross_entropy":
        return set(FROM_NUMBERS)
    names = {*FROM_ANSWERS, *FROM_PROBABILITIES} if output.macro and output.size == 1 else set()
    return names if output.positive is not None else names - {"f1"}


OBJECTIVES: dict[str, type[Objective]] = {"masked": Masked, "next": Next, "supervised": Supervised}


def evaluation_draw(train: Train, seed: int, step: int) -> Draw:
    """Chance in the evaluation after `step` optimiser steps of a stage: the same at every one, or that step's own."""
    return Draw(0, "evaluation", 0) if train.validation_masks == "fixed" else Draw(seed, "evaluation", step)
