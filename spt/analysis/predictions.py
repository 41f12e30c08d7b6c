"""A finished run's predictions: for test rows those that it stored, otherwise computed again by its network."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spt.analysis.errors import Evaluation, RunPredictions
from spt.analysis.reevaluate import check_finetuned
from spt.data.source import call_hook, class_names, open_part
from spt.errors import DataError, UsageError
from spt.runs.predictions import FILE, NotComparable, read_columns
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.tasks.base import Labels, Split, TaskData, known_targets
from spt.training.load_run import FinishedRun, check_has_rows, load_run, read_finished_run
from spt.training.losses import answers
from spt.training.outputs import Computation, network_outputs
from spt.training.recordings import averaged


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
        check_finetuned(*read_finished_run(path)[:2])
    runs = [load_run(path) for path in paths]
    for run in runs:
        check_has_rows(run.path.name, run.setup.data, split, others=("val", "test"))
    results = [run.result for run in runs]
    if len(runs) == 2:
        _check_same_rows(runs, split)
    labels = _labels(results)
    evaluation = _evaluation(runs[0], split)
    predictions, notes = [], list(dict.fromkeys(note for result in results for note in result.notes))
    if lacking := len(runs[0].setup.data.splits[split].whole) - len(evaluation.rows):
        notes.append(f"{lacking} rows that lack some of their numbers are left out here")
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
    rows = _complete(data.splits[split].whole, split)  # of recordings the first windows stand for all
    if not rows.contiguous:
        rows = rows.packed()
    assert rows.targets is not None, "a finetuning run has labelled data"
    if isinstance(data.target, Labels):
        raise UsageError(
            f"{run.path.name} answers several labels a row, which have no confusions; {FILE} in its folder holds every "
            "answer"
        )
    part = open_part(run.job.resolved.recipe.task)
    module, config = part.component.module, part.config
    row, step, truth = _items(rows, data)

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
        names=data.classes or class_names(part, data.target),
        row_width=data.row_width,
        attributes=attributes,
        readable=reader("readable"),
        picture=reader("picture"),
    )


def _complete(rows: Split, split: str) -> Split:
    """The rows whose numbers are all known. Raises DataError without one."""
    if rows.per_step or rows.targets is None or rows.targets.ndim == 1:
        return rows
    known = _all_known(rows)
    if not known.any():
        raise DataError(f"no {split} row has all of its numbers, so there are no errors to compare")
    return rows if known.all() else rows.take(np.flatnonzero(known))


def _all_known(rows: Split) -> NDArray[np.bool_]:
    known = known_targets(np.asarray(rows.targets))
    return known if known.ndim == 1 else np.asarray(known.all(axis=1))


def _items(rows: Split, data: TaskData) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, NDArray[Any]]:
    """(m,) row, (m,) step and (m,) or (m, K) truth of every item; of steps, those that have a target."""
    truth = np.asarray(rows.targets)
    if not rows.per_step:
        return np.arange(len(rows), dtype=np.int32), None, truth
    places = np.flatnonzero(known_targets(truth).reshape(len(truth), -1).any(axis=1))
    row = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths)[places]
    return row, (places - rows.starts[row]).astype(np.int32), truth[places]


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
        try:
            stored = _stored(run, evaluation, label)
            return stored, _margin_note(stored)
        except NotComparable as error:
            notes.append(f"{error}: the network of {run.path.name} has computed them again")
    windows = run.data.splits[evaluation.split]
    together = windows.recordings is not None and evaluation.step is None
    predicted, margin = _recompute(run, windows if together else evaluation.rows, runtime)
    if together and len(predicted) > len(evaluation.rows):  # those of recordings that lack some of their numbers too
        kept = _all_known(windows.whole)
        predicted, margin = predicted[kept], None if margin is None else margin[kept]
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


def _stored(run: FinishedRun, evaluation: Evaluation, label: str) -> RunPredictions:
    """From the run's file. Raises NotComparable if they cannot be used."""
    columns, file = read_columns(run.path / FILE), f"{FILE} of {run.path.name}"
    if not np.array_equal(columns["id"].astype(str), evaluation.rows.ids.astype(str)):
        raise NotComparable(f"{file} is for other rows")
    suffixes = [""] if evaluation.classes else [f"_{k}" for k in range(evaluation.truth.shape[1])]
    kinds = ("label", "prediction", "margin") if evaluation.classes else ("target", "prediction")
    if missing := [f"{kind}{suffix}" for kind in kinds for suffix in suffixes if f"{kind}{suffix}" not in columns]:
        raise NotComparable(f"{file} has no {', '.join(missing)}")
    truth, predicted, *margin = (np.stack([columns[f"{kind}{suffix}"] for suffix in suffixes], -1) for kind in kinds)
    if evaluation.classes:
        if not np.array_equal(truth[:, 0], evaluation.truth):
            raise NotComparable(f"{file} has other labels")
        if predicted.dtype.kind not in "iu" or predicted.min() < 0:
            raise NotComparable(f"{file} has predictions that are not classes")
        return RunPredictions(
            label, run.path.name, predicted[:, 0].astype(np.int64), margin[0][:, 0].astype(np.float64)
        )
    if not np.array_equal(truth.astype(np.float32), evaluation.truth.astype(np.float32)):
        raise NotComparable(f"{file} has other targets")
    if not np.isfinite(predicted).all():
        raise NotComparable(f"{file} has predictions that are not finite")
    return RunPredictions(label, run.path.name, predicted)


def _recompute(run: FinishedRun, rows: Split, runtime: Runtime) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """The network's predictions: (n,) or (total,) classes and margins, or (n, K) or (total, K) numbers."""
    output = run.setup.output
    if rows.recordings is not None and not output.per_step:
        return _recompute_recordings(run, rows, rows.recordings, runtime)
    classes = output.loss == "cross_entropy"
    size = len(rows.values) if output.per_step else len(rows)
    predicted = np.zeros(size, np.int32) if classes else np.zeros((size, output.size), np.float32)
    margin = np.zeros(size, np.float32) if classes else None
    computation = Computation.of_stage(run.setup)
    for part in network_outputs(run.network, rows, run.data.input, computation, runtime):
        valid: Any = part.context.valid if output.per_step else slice(None)
        places = part.rows
        if output.per_step:
            places = np.concatenate(
                [np.arange(a, b) for a, b in zip(rows.starts[places], rows.stops[places], strict=True)]
            )
        predictions, logits = answers(output, part.values)[valid], part.values[valid]
        if margin is None:
            predicted[places] = predictions.numpy()
        else:
            predicted[places] = predictions[..., 0].numpy()
            best = logits.topk(2, dim=-1).values
            margin[places] = (best[..., 0] - best[..., 1]).numpy()
    return predicted, margin


def _recompute_recordings(
    run: FinishedRun, rows: Split, recordings: NDArray[np.int64], runtime: Runtime
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Likewise of recordings, by the mean answers to their windows."""
    output = run.setup.output
    logits = torch.zeros(len(rows), output.width)
    for part in network_outputs(run.network, rows, run.data.input, Computation.of_stage(run.setup), runtime):
        logits[torch.from_numpy(part.rows)] = part.values
    logits = averaged(output, logits, recordings)
    predicted = answers(output, logits).numpy()
    if output.loss != "cross_entropy":
        return predicted, None
    best = logits.topk(2, dim=-1).values
    return predicted[:, 0].astype(np.int32), (best[:, 0] - best[:, 1]).numpy()
