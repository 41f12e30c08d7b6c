"""A finished run's answers: those to the test rows that it kept, else its network's, given once more."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spt.analysis.errors import EvaluationRows, RunAnswers
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

TRIALS = 20  # halvings of a batch that finds no memory


class RunPredictions(NamedTuple):
    """What runs were asked, what they answered, and what a reader must know of it."""

    asked: EvaluationRows
    given: tuple[RunAnswers, ...]
    notes: tuple[str, ...]


def read_predictions(paths: Iterable[Path], split: Literal["test", "val"], runtime: Runtime) -> RunPredictions:
    """One finetuning run's answers to its test or validation rows, or those of two runs over the same rows.

    Raises UsageError, DataError or CheckpointError, in words, where a run is no finished finetuning run, its data are
    other than they were, or two runs answered different rows.
    """
    paths = list(paths)
    for path in paths:
        where, result, _ = read_finished_run(path)
        if result.stage != "finetune":
            raise CheckpointError(f"{where} is a pretraining run, which has no task; name a finetuning run's folder")
    opened = [load_run(path) for path in paths]
    results = [one.result for one in opened]
    if len(opened) == 2:
        _check_alike(opened, split)
    labels = _labels(results)
    asked = _questions(opened[0], split)
    given, notes = [], list(dict.fromkeys(note for result in results for note in result.notes))
    for one, label in zip(opened, labels, strict=True):
        found, said = _predictions(one, asked, label, runtime)
        given.append(found)
        notes += said
    return RunPredictions(asked, tuple(given), tuple(notes))


def _labels(results: list[Result]) -> list[str]:
    """The first that tells two runs apart: arm, as reports name it, model, seed, key."""
    arms = ["scratch" if result.parent is None else "SPT" for result in results]
    if len(results) == 1:
        return arms
    ways = (
        arms,
        [result.model.partition("@")[0] for result in results],
        [f"seed {result.seed}" for result in results],
        [result.key[:6] for result in results],
        [result.key for result in results],
    )
    return next(way for way in ways if way[0] != way[1] or way is ways[-1])


def _check_alike(opened: list[FinishedRun], split: str) -> None:
    first, second = opened
    if first.path == second.path:
        raise UsageError(f"{first.path.name} is named twice; name another run to compare it with")
    if first.result.data[split] != second.result.data[split] or first.bound.data.target != second.bound.data.target:
        raise UsageError(
            f"{first.path.name} and {second.path.name} have different {split} rows or targets; compare two runs of one "
            "task"
        )


def _questions(opened: FinishedRun, split: Literal["test", "val"]) -> EvaluationRows:
    data = opened.bound.data
    rows = _in_line(data.splits[split])
    assert rows.targets is not None, "a finetuning run has labelled data"
    part = open_part(opened.job.loaded.recipe.task)
    module, config = part.component.module, part.config
    row, step, truth = _items(rows, data)
    names: tuple[str, ...] = ()
    if isinstance(data.target, Classes) and hasattr(module, "class_names"):
        told = tuple(map(str, call_hook(part.component, "class_names", config)))
        names = told if len(told) == data.target.count else ()  # of other classes, as with subtrees' vocabulary

    def reader(name: str) -> Any:
        return (lambda values: call_hook(part.component, name, config, values)) if hasattr(module, name) else None

    attributes = {}
    if hasattr(module, "breakdown"):
        found = call_hook(part.component, "breakdown", config, rows)
        attributes = {name: _of_items(name, values, rows, row, step) for name, values in found.items()}
    return EvaluationRows(
        task=opened.result.task,
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


def _in_line(split: Split) -> Split:
    """The rows one behind the other; copied only where they are not."""
    if split.contiguous:
        return split
    places = np.concatenate([np.arange(a, b) for a, b in zip(split.starts.tolist(), split.stops.tolist(), strict=True)])
    stops = np.cumsum(split.lengths)

    def taken(array: Any) -> Any:
        return None if array is None else array[places]

    return replace(
        split,
        values=taken(split.values),
        starts=stops - split.lengths,
        stops=stops,
        targets=taken(split.targets) if split.per_step else split.targets,
        steps=taken(split.steps),
    )


def _items(rows: Split, data: TaskData) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, NDArray[Any]]:
    """(m,) row, (m,) step and (m,) or (m, K) truth of every answer that is scored."""
    truth = np.asarray(rows.targets)
    if not rows.per_step:
        return np.arange(len(rows), dtype=np.int32), None, truth
    places = _scored(rows, data)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths)[places]
    return row, (places - rows.starts[row]).astype(np.int32), truth[places]


def _scored(rows: Split, data: TaskData) -> NDArray[np.int64]:
    """(m,) Places of the steps with a target."""
    truth = np.asarray(rows.targets)
    return np.flatnonzero(truth != IGNORED if isinstance(data.target, Classes) else np.isfinite(truth[:, 0]))


def _of_items(
    name: str, values: Any, rows: Split, row: NDArray[np.int32], step: NDArray[np.int32] | None
) -> NDArray[Any]:
    """An attribute of rows, or of all their steps, at each item."""
    found = np.asarray(values)
    if found.shape == (len(rows),):
        return found[row]
    if step is not None and found.shape == (len(rows.values),):
        return found[rows.starts[row] + step]
    raise DataError(
        f"breakdown: {name} has the shape {found.shape}; one value a row, ({len(rows)},), or of per-step targets one a "
        f"step, ({len(rows.values)},), is expected"
    )


def _predictions(
    opened: FinishedRun, asked: EvaluationRows, label: str, runtime: Runtime
) -> tuple[RunAnswers, list[str]]:
    """A run's answers, and a note where those that it kept are of no use."""
    notes = []
    if asked.step is None and asked.split == "test":
        kept = _stored(opened, asked, label)
        if isinstance(kept, RunAnswers):
            return kept, _ambiguity_note(kept)
        notes.append(f"{kept}: the network of {opened.path.name} has answered anew")
    said, margin = _recompute(opened, asked.rows, runtime)
    if asked.step is not None:
        places = asked.rows.starts[asked.row] + asked.step
        said, margin = said[places], None if margin is None else margin[places]
    if not np.isfinite(said).all():
        raise DataError(f"some answers of {opened.path.name} are not finite numbers")
    given = RunAnswers(label, opened.path.name, said, margin)
    return given, notes + _ambiguity_note(given)


def _ambiguity_note(given: RunAnswers) -> list[str]:
    """A note where answers are classes of which the scores are no numbers: the first class, most often."""
    count = 0 if given.margin is None else int(np.sum(~np.isfinite(given.margin)))
    return [f"{count:,} of {len(given.said):,} answers of {given.run} have no finite margin"] if count else []


def _stored(opened: FinishedRun, asked: EvaluationRows, label: str) -> RunAnswers | str:
    """From the run's file, if it is of these rows; else why not."""
    columns = read_columns(opened.path / FILE)
    if isinstance(columns, NotComparable):
        return columns.reason
    name = opened.path.name
    if not np.array_equal(columns["id"].astype(str), asked.rows.ids.astype(str)):
        return f"{FILE} of {name} has other rows"
    wanted = {"label", "prediction", "margin"}
    if asked.classes:
        if not wanted <= columns.keys():
            return f"{FILE} of {name} has no {', '.join(sorted(wanted - columns.keys()))}"
        if not np.array_equal(columns["label"], asked.truth):
            return f"{FILE} of {name} has other labels"
        said = columns["prediction"]
        if said.dtype.kind not in "iu" or said.min() < 0:
            return f"{FILE} of {name} has predictions that are no classes"
        return RunAnswers(label, name, said.astype(np.int64), columns["margin"].astype(np.float64))
    size = asked.truth.shape[1]
    if not all(f"{kind}_{k}" in columns for kind in ("target", "prediction") for k in range(size)):
        return f"{FILE} of {name} lacks columns"
    truth, said = (np.stack([columns[f"{kind}_{k}"] for k in range(size)], 1) for kind in ("target", "prediction"))
    if not np.array_equal(truth.astype(np.float32), asked.truth.astype(np.float32)):
        return f"{FILE} of {name} has other targets"
    return (
        RunAnswers(label, name, said)
        if np.isfinite(said).all()
        else f"{FILE} of {name} has answers that are not finite"
    )


def _recompute(opened: FinishedRun, rows: Split, runtime: Runtime) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """The network's answers: (n,) or (total,) classes and margins, or (n, K) or (total, K) numbers."""
    at_once = EVALUATION_POSITIONS
    for _ in range(TRIALS):
        try:
            return _pass(opened, rows, runtime, at_once)
        except Exception as error:
            if not out_of_memory(error):
                raise
        at_once = max(1, at_once // 2)
        free_memory()
    raise BackendError("there is no memory to evaluate one sequence")


def _pass(
    opened: FinishedRun, rows: Split, runtime: Runtime, at_once: int
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    bound, train = opened.bound, opened.job.train
    output, data = bound.output, bound.data
    classes = output.loss == "cross_entropy"
    size = len(rows.values) if output.per_step else len(rows)
    said = np.zeros(size, np.int32) if classes else np.zeros((size, output.size), np.float32)
    margin = np.zeros(size, np.float32) if classes else None
    everyone, extents = np.arange(len(rows)), rows.extents
    if train.evaluation == "batches":  # as published: whoever shares a batch shares its padding
        groups = pieces(everyone, train.batch_size)
    else:
        groups = packed(by_length(everyone, extents), rows.sequences * extents, at_once, 1)
    draw = evaluation_draw(train, opened.job.seed, opened.result.best_step)
    with contextlib.ExitStack() as stack:
        stack.enter_context(runtime.kernels())
        model = bound.model.to(runtime.device)
        stack.enter_context(torch.no_grad())
        stack.enter_context(cached_kernels(model, int(extents.max())))
        for group in groups:
            inputs, _ = runtime.send(bound.objective.make_inputs(collate(rows, group, data.input, data.target), draw))
            with runtime.autocast(train.precision):
                logits = model(inputs)
            places: Any = group
            asked: Any = slice(None)
            if output.per_step:
                asked = inputs.context.valid.cpu()
                lengths = rows.lengths[group]
                before = np.repeat(rows.starts[group] - np.cumsum(lengths) + lengths, lengths)
                places = np.arange(int(lengths.sum())) + before
            logits, found = logits.float().cpu()[asked], answers(output, logits).cpu()[asked]
            if margin is None:
                said[places] = found.numpy()
                continue
            said[places] = found[..., 0].numpy()
            best = logits.topk(2, dim=-1).values
            margin[places] = (best[..., 0] - best[..., 1]).numpy()
    return said, margin
