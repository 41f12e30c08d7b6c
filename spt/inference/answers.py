"""A trained model's answers to rows: to every row, or to every step, in the rows' order, and how right they are.

n rows, m answers (one per row, or one per step), K numbers of an answer, D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from spt.data.batching import collate
from spt.errors import DataError, UsageError
from spt.inference.trained_model import TrainedModel
from spt.rng import Draw
from spt.runtime.distributed import Runtime
from spt.tasks.base import IGNORED, Classes, Labels, Reals, Split
from spt.training.build import lengthened
from spt.training.losses import answers
from spt.training.metrics import (
    MOST_SCORES,
    ScoredAnswers,
    Sums,
    answer_scores,
    batch_means,
    confusion_counts,
    default_metric,
    metrics,
    of_all,
    of_known,
    sums,
    text_scores,
    unasked,
)
from spt.training.network import pool
from spt.training.objectives import Supervised, Targets, of_whole_split
from spt.training.recordings import averaged, of_recordings, target_parts

MOST_COLUMNS = 1000  # of probabilities; of more classes only the answer's own is told
AT_ONCE = 2**18  # steps whose answers are in memory at once, where every step has one

Pool = Literal["mean", "last", "max"]
Columns = dict[str, NDArray[Any]]


class Answers(NamedTuple):
    logits: Float[Tensor, "m K"]
    sums: Sums | None  # (n, ...) what metrics need of each row; None where no row has a label


@dataclass
class Answering:
    """A model that answers the rows of one source, which come piece by piece."""

    model: TrainedModel
    runtime: Runtime
    rows: int = 0  # of windows whose answers are averaged, their recordings
    sequences: int = 0  # that the network is shown: rows, or windows
    longer: int = 0  # of these, longer than any of training
    longest: int = 0
    totals: Sums = field(default_factory=dict)
    labelled: int = 0  # rows, or steps, with a label
    known: list[ScoredAnswers] = field(default_factory=list)  # answers to rows with a label
    confusion: Tensor | None = None  # how often each class was taken for which

    def answer(self, rows: Split) -> Answers:
        """The answers to all of these rows, which lie one behind the other in memory if every step has an answer; the
        answers to recordings, if those to windows are averaged."""
        model = self._for(rows)
        per_step = model.output.per_step
        logits = torch.zeros(len(rows.values) if per_step else len(rows), model.output.width)
        found: Sums = {}
        recordings = None if per_step else rows.recordings
        for part in model.outputs(rows, runtime=self.runtime):
            places = torch.from_numpy(_places(rows, part.rows) if per_step else part.rows)
            logits[places] = part.values[part.context.valid] if per_step else part.values
            if rows.targets is None:
                continue
            assert model.target is not None
            _, targets = Supervised().make_inputs(collate(rows, part.rows, model.input, model.target), Draw(0, "", 0))
            if recordings is None:
                self._count_classes(part.values, targets._replace(scored=None))
            parts = {} if recordings is None else target_parts(targets)
            for name, tensor in (sums(model.output, part.values, targets._replace(scored=None)) | parts).items():
                if name not in found:
                    found[name] = tensor.new_zeros((len(rows), *tensor.shape[1:]))
                found[name][torch.from_numpy(part.rows)] = tensor
        if recordings is not None and found:
            logits, found, targets = of_recordings(model.output, logits, found, recordings)
            self._count_classes(logits, targets)
        elif recordings is not None:
            logits = averaged(model.output, logits, recordings)
        if found:
            self._count(found)
            self._keep(rows if per_step else rows.whole, logits)
        return Answers(logits, found or None)

    def embed(self, rows: Split, how: Pool | None) -> NDArray[np.float32]:
        """(n, D) The features that the head is given, pooled over valid steps; without `how`, (m, D), of every step.
        For pairs, (n, 2 D)."""
        model = self._for(rows)
        width = int(model.architecture.model.options["d_model"])
        if how is None:
            if model.sequences != 1:
                raise UsageError("this model takes pairs of sequences, whose steps have no one order; choose --pool")
            embedded = np.zeros((len(rows.values), width), np.float32)
        else:
            embedded = np.zeros((len(rows), model.sequences * width), np.float32)
        for part in model.outputs(rows, features=True, runtime=self.runtime):
            if how is None:
                embedded[_places(rows, part.rows)] = part.values[part.context.valid].numpy()
            else:
                pooled = pool(part.values, part.context, how).chunk(model.sequences)
                embedded[part.rows] = torch.cat(pooled, dim=-1).numpy()
        return embedded

    def scores(self) -> dict[str, float] | None:
        """Exact over all rows with a label; None without one."""
        if not self.totals or not float(self.totals["weight"]):
            return None
        return metrics(self.model.output, self.totals) | self.of_all()

    def of_all(self) -> dict[str, float]:
        """Metrics that need all answers at once, over those with a label."""
        output = self.model.output
        size = sum(each.logits.numel() for each in self.known)
        scored = None
        if self.known:
            truth, logits, rows = zip(*self.known, strict=True)
            scored = ScoredAnswers(np.concatenate(truth), torch.cat(logits), np.concatenate(rows))
        confusion = None if self.confusion is None else self.confusion.long().numpy()
        names = unasked(output, size) | ({default_metric(output)} & of_whole_split(output))
        return of_all(output, names, scored, confusion).scores

    def _keep(self, rows: Split, logits: Tensor) -> None:
        """The answers to rows or steps with a label; of more than memory should hold, none."""
        output = self.model.output
        if self.rows * (self.longest if output.per_step else 1) * output.width > MOST_SCORES:
            self.known.clear()
        elif unasked(output, 0):
            self.known.append(of_known(ScoredAnswers(np.asarray(rows.targets), logits, np.arange(len(logits)))))

    def _count_classes(self, logits: Tensor, targets: Targets) -> None:
        output = self.model.output
        if output.loss == "cross_entropy" and "mcc" in of_whole_split(output):
            counts = confusion_counts(output, answer_scores(output, logits, targets), targets)
            self.confusion = counts if self.confusion is None else self.confusion + counts

    def notes(self) -> list[str]:
        if not self.longer:
            return []
        return [
            f"{self.longer:,} of {self.sequences:,} sequences are longer ({self.longest:,} steps at most) than any "
            f"that the model was trained on ({self.model.length:,})"
        ]

    def _count(self, found: Sums) -> None:
        self.labelled += int((found["weight"]).sum())
        for name, tensor in found.items():
            total = tensor.sum(0)
            self.totals[name] = self.totals[name] + total if name in self.totals else total

    def _for(self, rows: Split) -> TrainedModel:
        """The model for rows of these lengths. Raises DataError where it cannot take them."""
        model, extents = self.model, rows.extents
        backbone, name = model.network.backbone, model.architecture.model.name
        longest = int(extents.max())
        odd = np.flatnonzero(extents % backbone.length_multiple != 0)
        if odd.size:
            raise DataError(
                f"row {rows.ids[odd[0]]} has {int(extents[odd[0]]):,} steps, but model {name} takes sequences whose "
                f"length is a multiple of {backbone.length_multiple}"
            )
        if not backbone.ignores_padding and len(np.unique(extents)) > 1:
            raise DataError(
                f"the rows have {int(extents.min()):,} to {longest:,} steps, but model {name} cannot leave padding out "
                "of account; give sequences of one length"
            )
        self.sequences += len(rows)
        self.rows += len(rows) if rows.recordings is None else len(np.unique(rows.recordings))
        self.longer += int((extents > model.length).sum())
        self.longest = max(self.longest, longest)
        if longest <= model.length:
            return model
        try:
            network = lengthened(model.network, model.architecture.model, model.length, longest)
        except UsageError as error:
            raise DataError(f"{error}; cut the sequences (max_length={model.length} truncate=true)") from error
        return replace(model, network=network, length=longest)


def pieces(rows: Split, model: TrainedModel, per_step: bool) -> Iterator[Split]:
    """Rows as an evaluation takes them, all at once; if every step has an answer or a vector, some at a time."""
    if not per_step:
        yield rows
        return
    together = model.computation.together or 1
    whole = max(1, AT_ONCE // int(rows.extents.max()) // together) * together
    for first in range(0, len(rows), whole):
        yield rows.take(np.arange(first, min(first + whole, len(rows)))).packed()


def scores_of_split(model: TrainedModel, rows: Split, found: Sums) -> dict[str, float]:
    """The scores as in the run's evaluation, from the sums of all rows of a split."""
    if model.computation.together is not None:
        scores = batch_means(model.output, found, model.computation.together)
    else:
        scores = metrics(model.output, {name: tensor.sum(0) for name, tensor in found.items()})
    if model.output.text and rows.text_bytes is not None:
        scores |= text_scores(scores["loss"], int(found["weight"].sum()), int(rows.text_bytes.sum()))
    return scores


def answer_columns(
    model: TrainedModel, rows: Split, found: Answers, labelled: bool, calibrated: bool = False
) -> Columns:
    """What is written about these rows: id, step, label, prediction, and a probability for each class."""
    target, output = model.target, model.output
    rows = rows if output.per_step else rows.whole
    columns = row_columns(rows, output.per_step)
    given = answers(output, found.logits).numpy()
    if isinstance(target, Reals):
        names = _target_names(model)
        truth = np.full(given.shape, np.nan) if rows.targets is None else np.asarray(rows.targets, np.float64)
        if labelled:
            columns |= {f"label{name}": truth[:, k] for k, name in enumerate(names)}
        return columns | {f"prediction{name}": given[:, k] for k, name in enumerate(names)}
    if isinstance(target, Labels):
        return columns | _label_columns(model, rows, found, given, labelled)
    assert isinstance(target, Classes)
    number, labels = given[:, 0], model.classes or tuple(map(str, range(target.count)))
    called = np.array([*labels, None], object) if model.classes else None
    if labelled:
        classes = np.full(len(number), IGNORED) if rows.targets is None else np.asarray(rows.targets, np.int64)
        known = called if called is not None else np.array([*range(target.count), None], object)
        columns["label"] = known[classes]  # IGNORED is the last
    columns["prediction"] = number if called is None else called[number]
    chances = (found.logits / (model.fitted_temperature() if calibrated else 1.0)).softmax(-1).numpy()
    if target.count > MOST_COLUMNS:
        return columns | {"p": chances[np.arange(len(number)), number]}
    return columns | {f"p_{label}": chances[:, k] for k, label in enumerate(labels)}


def _label_columns(model: TrainedModel, rows: Split, found: Answers, given: NDArray[Any], labelled: bool) -> Columns:
    """Of every label whether it holds, in truth (empty where nobody knows) and in the answer, and its probability."""
    columns, names = Columns(), model.classes or tuple(map(str, range(model.output.size)))
    if labelled:
        truth = np.full(given.shape, IGNORED) if rows.targets is None else np.asarray(rows.targets, np.int64)
        known = np.array([0, 1, None], object)  # IGNORED is the last
        columns |= {f"label_{name}": known[truth[:, k]] for k, name in enumerate(names)}
    chances = found.logits.sigmoid().numpy()
    columns |= {f"prediction_{name}": given[:, k] for k, name in enumerate(names)}
    return columns | {f"p_{name}": chances[:, k] for k, name in enumerate(names)}


def row_columns(rows: Split, per_step: bool) -> Columns:
    """The id of each row; or that of each step, and which step it is, from 1."""
    if not per_step:
        return {"id": rows.ids}
    steps = np.arange(len(rows.values)) - np.repeat(rows.starts, rows.lengths) + 1
    return {"id": np.repeat(rows.ids, rows.lengths), "step": steps}


def _target_names(model: TrainedModel) -> list[str]:
    """What follows `label` and `prediction` in the name of a column: nothing, where there is one."""
    assert isinstance(model.target, Reals)
    if model.target.size == 1:
        return [""]
    named = model.task.get("label_columns") or range(model.target.size)
    return [f"_{name}" for name in named]


def _places(rows: Split, some: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the steps of some rows stand among the values."""
    return np.concatenate([np.arange(rows.starts[i], rows.stops[i]) for i in some.tolist()])
