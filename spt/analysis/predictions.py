"""A finished run's predictions: for test rows those that it stored, otherwise computed again by its network."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spt.analysis.errors import Evaluation, RunPredictions
from spt.data.batching import by_length, collate, packed, pieces
from spt.data.source import call_hook, open_part
from spt.errors import BackendError, CheckpointError, DataError, UsageError
from spt.models.longconv import cached_kernels
from spt.runs.predictions import FILE, NotComparable, read_columns
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.runtime.memory import free_memory, out_of_memory
from spt.tasks.base import IGNORED, Classes, Split, TaskData
from spt.training.evaluate import EVALUATION_POSITIONS
from spt.training.load_run import FinishedRun, load_run, read_finished_run
from spt.training.losses import answers
from spt.training.objectives import evaluation_draw

MAX_HALVINGS = 20  # of a batch that does not fit into memory


class LoadedPredictions(NamedTuple):
    """What runs were evaluated on, what they predicted, and notes for the reader."""

    evaluation: Evaluation
    runs: tuple[RunPredictions, ...]
    notes: tuple[str, ...]


def read_predictions(paths: Iterable[Path], split: Literal["test", "val"], runtime: Runtime) -> LoadedPredictions:
    """Predictions of one finetuning run for its test or validation rows, or of two runs over the same rows.

    Raises UsageError, DataError or CheckpointError if a run is not a finished finetuning run, if its data have changed,
    or if two runs have different rows.
    """
    paths = list(paths)
    for path in paths:
        where, result, _ = read_finished_run(path)
        if result.stage != "finetune":
            raise CheckpointError(f"{where} is a pretraining run, which has no task; name a finetuning run's folder")
    runs = [load_run(path) for path in paths]
    results = [run.result for run in runs]
    if len(runs) == 2:
        _check_same_rows(runs, split)
    labels = _labels(results)
    evaluation = _evaluation(runs[0], split)
    predictions, notes = [], list(dict.fromkeys(note for result in results for note in result.notes))
    for run, label in zip(runs, labels, strict=True):
        run_predictions, run_notes = _predictions(run, evaluation, label, runtime)
        predictions.append(run_predictions)
        notes += run_notes
    return LoadedPredictions(evaluation, tuple(predictions), tuple(notes))


def _labels(results: list[Result]) -> list[str]:
    """The first property that distinguishes two runs: arm, model, seed, key."""
    arms = ["scratch" if result.parent is None else "SPT" for result in results]
    if len(results) == 1:
        return arms
    candidates = (
        arms,
        [result.model.partition("@")[0] for result in results],
        [f"seed {result.seed}" for result in results],
        [result.key[:6] for result in results],
        [result.key for result in results],
    )
    return next(labels for labels in candidates if labels[0] != labels[1] or labels is candidates[-1])


def _check_same_rows(runs: list[FinishedRun], split: str) -> None:
    first, second = runs
    if first.path == second.path:
        raise UsageError(f"{first.path.name} is named twice; name another run to compare it with")
    if first.result.data[split] != second.result.data[split] or first.setup.data.target != second.setup.data.target:
        raise UsageError(
            f"{first.path.name} and {second.path.name} have different {split} rows or targets; compare two runs of one "
            "task"
        )


def _evaluation(run: FinishedRun, split: Literal["test", "val"]) -> Evaluation:
    data = run.setup.data
    rows = _contiguous(data.splits[split])
    assert rows.targets is not None, "a finetuning run has labelled data"
    part = open_part(run.job.loaded.recipe.task)
    module, config = part.component.module, part.config
    row, step, truth = _items(rows, data)
    names: tuple[str, ...] = ()
    if isinstance(data.target, Classes) and hasattr(module, "class_names"):
        class_names = tuple(map(str, call_hook(part.component, "class_names", config)))
        if len(class_names) == data.target.count:  # not when it predicts other classes, as subtrees' vocabulary
            names = class_names

    def reader(name: str) -> Any:
        return (lambda values: call_hook(part.component, name, config, values)) if hasattr(module, name) else None

    attributes = {}
    if hasattr(module, "breakdown"):
        values = call_hook(part.component, "breakdown", config, rows)
        attributes = {name: _at_items(name, values, rows, row, step) for name, values in values.items()}
    return Evaluation(
        task=run.result.task,
        split=split,
        input=data.input,
        target=data.target,
        rows=rows,
        row=row,
        step=step,
        truth=truth,
        names=names,
        row_width=data.row_width,
        attributes=attributes,
        readable=reader("readable"),
        picture=reader("picture"),
    )


def _contiguous(split: Split) -> Split:
    """The same rows without gaps between them; copied only if there are any."""
    if split.contiguous:
        return split
    places = np.concatenate([np.arange(a, b) for a, b in zip(split.starts.tolist(), split.stops.tolist(), strict=True)])
    stops = np.cumsum(split.lengths)

    def take(array: Any) -> Any:
        return None if array is None else array[places]

    return replace(
        split,
        values=take(split.values),
        starts=stops - split.lengths,
        stops=stops,
        targets=take(split.targets) if split.per_step else split.targets,
        steps=take(split.steps),
    )


def _items(rows: Split, data: TaskData) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, NDArray[Any]]:
    """(m,) row, (m,) step and (m,) or (m, K) truth of every item."""
    truth = np.asarray(rows.targets)
    if not rows.per_step:
        return np.arange(len(rows), dtype=np.int32), None, truth
    places = _scored(rows, data)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths)[places]
    return row, (places - rows.starts[row]).astype(np.int32), truth[places]


def _scored(rows: Split, data: TaskData) -> NDArray[np.int64]:
    """(m,) Positions of the steps with a target."""
    truth = np.asarray(rows.targets)
    return np.flatnonzero(truth != IGNORED if isinstance(data.target, Classes) else np.isfinite(truth[:, 0]))


def _at_items(
    name: str, values: Any, rows: Split, row: NDArray[np.int32], step: NDArray[np.int32] | None
) -> NDArray[Any]:
    """An attribute of rows, or of all their steps, for each item."""
    array = np.asarray(values)
    if array.shape == (len(rows),):
        return array[row]
    if step is not None and array.shape == (len(rows.values),):
        return array[rows.starts[row] + step]
    raise DataError(
        f"breakdown: {name} has the shape {array.shape}; expected is one value per row, ({len(rows)},), or, for "
        f"per-step targets, one per step, ({len(rows.values)},)"
    )


def _predictions(
    run: FinishedRun, evaluation: Evaluation, label: str, runtime: Runtime
) -> tuple[RunPredictions, list[str]]:
    """A run's predictions, and notes, such as why the stored ones cannot be used."""
    notes = []
    if evaluation.step is None and evaluation.split == "test":
        stored = _stored(run, evaluation, label)
        if isinstance(stored, RunPredictions):
            return stored, _margin_note(stored)
        notes.append(f"{stored}: the network of {run.path.name} has computed them again")
    predicted, margin = _recompute(run, evaluation.rows, runtime)
    if evaluation.step is not None:
        places = evaluation.rows.starts[evaluation.row] + evaluation.step
        predicted, margin = predicted[places], None if margin is None else margin[places]
    if not np.isfinite(predicted).all():
        raise DataError(f"some predictions of {run.path.name} are not finite")
    predictions = RunPredictions(label, run.path.name, predicted, margin)
    return predictions, notes + _margin_note(predictions)


def _margin_note(run: RunPredictions) -> list[str]:
    """A note about predicted classes whose scores are not finite: they are arbitrary, most often the first class."""
    count = 0 if run.margin is None else int(np.sum(~np.isfinite(run.margin)))
    return [f"{count:,} of {len(run.predicted):,} predictions of {run.name} have no finite margin"] if count else []


def _stored(run: FinishedRun, evaluation: Evaluation, label: str) -> RunPredictions | str:
    """From the run's file, or the reason why they cannot be used."""
    columns = read_columns(run.path / FILE)
    if isinstance(columns, NotComparable):
        return columns.reason
    name = run.path.name
    if not np.array_equal(columns["id"].astype(str), evaluation.rows.ids.astype(str)):
        return f"{FILE} of {name} is for other rows"
    needed = {"label", "prediction", "margin"}
    if evaluation.classes:
        if not needed <= columns.keys():
            return f"{FILE} of {name} has no {', '.join(sorted(needed - columns.keys()))}"
        if not np.array_equal(columns["label"], evaluation.truth):
            return f"{FILE} of {name} has other labels"
        predicted = columns["prediction"]
        if predicted.dtype.kind not in "iu" or predicted.min() < 0:
            return f"{FILE} of {name} has predictions that are not classes"
        return RunPredictions(label, name, predicted.astype(np.int64), columns["margin"].astype(np.float64))
    size = evaluation.truth.shape[1]
    if not all(f"{kind}_{k}" in columns for kind in ("target", "prediction") for k in range(size)):
        return f"{FILE} of {name} lacks columns"
    truth, predicted = (np.stack([columns[f"{kind}_{k}"] for k in range(size)], 1) for kind in ("target", "prediction"))
    if not np.array_equal(truth.astype(np.float32), evaluation.truth.astype(np.float32)):
        return f"{FILE} of {name} has other targets"
    return (
        RunPredictions(label, name, predicted)
        if np.isfinite(predicted).all()
        else f"{FILE} of {name} has predictions that are not finite"
    )


def _recompute(run: FinishedRun, rows: Split, runtime: Runtime) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """The network's predictions: (n,) or (total,) classes and margins, or (n, K) or (total, K) numbers."""
    at_once = EVALUATION_POSITIONS
    for _ in range(MAX_HALVINGS):
        try:
            return _pass(run, rows, runtime, at_once)
        except Exception as error:
            if not out_of_memory(error):
                raise
        at_once = max(1, at_once // 2)
        free_memory()
    raise BackendError("there is not enough memory to evaluate one sequence")


def _pass(
    run: FinishedRun, rows: Split, runtime: Runtime, at_once: int
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    setup, train = run.setup, run.job.train
    output, data = setup.output, setup.data
    classes = output.loss == "cross_entropy"
    size = len(rows.values) if output.per_step else len(rows)
    predicted = np.zeros(size, np.int32) if classes else np.zeros((size, output.size), np.float32)
    margin = np.zeros(size, np.float32) if classes else None
    order, extents = np.arange(len(rows)), rows.extents
    if train.metric_average == "per_batch":  # as published: rows of a batch share its padding
        groups = pieces(order, train.batch_size)
    else:
        groups = packed(by_length(order, extents), rows.sequences * extents, at_once, 1)
    draw = evaluation_draw(train, run.job.seed, run.result.best_step)
    with contextlib.ExitStack() as stack:
        stack.enter_context(runtime.kernels())
        model = setup.model.to(runtime.device)
        stack.enter_context(torch.no_grad())
        stack.enter_context(cached_kernels(model, int(extents.max())))
        for group in groups:
            inputs, _ = runtime.send(setup.objective.make_inputs(collate(rows, group, data.input, data.target), draw))
            with runtime.autocast(train.precision):
                logits = model(inputs)
            places: Any = group
            valid: Any = slice(None)
            if output.per_step:
                valid = inputs.context.valid.cpu()
                lengths = rows.lengths[group]
                before = np.repeat(rows.starts[group] - np.cumsum(lengths) + lengths, lengths)
                places = np.arange(int(lengths.sum())) + before
            logits, predictions = logits.float().cpu()[valid], answers(output, logits).cpu()[valid]
            if margin is None:
                predicted[places] = predictions.numpy()
                continue
            predicted[places] = predictions[..., 0].numpy()
            best = logits.topk(2, dim=-1).values
            margin[places] = (best[..., 0] - best[..., 1]).numpy()
    return predicted, margin
