"""Evaluate a finished run's weights again: on its own task, or under changes to it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spt.config.load import load
from spt.data.dataset import open_task
from spt.errors import CheckpointError, UsageError
from spt.models.base import Unsupported
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.tasks.base import Split, TaskData, Tokens, Values
from spt.training.build import lengthened
from spt.training.checkpoint import read_meta
from spt.training.evaluate import evaluate
from spt.training.load_run import FinishedRun, check_has_rows, load_run
from spt.training.objectives import evaluation_draw
from spt.training.threads import stage_threads

OTHER_FILES = ("task.path", "task.hub", "task.hub_config", "task.revision")


def reevaluate(
    path: Path, changes: Sequence[str], split: Literal["train", "val", "test"], runtime: Runtime
) -> dict[str, Any]:
    """Scores of a finetuning run's selected weights on a split of its task under these changes (`task.a=b`).

    Inputs are encoded as in training (its vocabulary, its mean and standard deviation); classes are matched by number.
    If the changed task's interval differs, the model is rescaled (Backbone.rescale); if its sequences are longer, the
    weights are put into a network for them. Data that have changed since the
    run, and validation or test rows that it was trained on, are refused. Raises UsageError, DataError or
    CheckpointError.
    """
    other_keys = [change for change in changes if not change.startswith("task.")]
    if other_keys:
        raise UsageError(f"{other_keys[0]} does not change the task; only task.a=b changes what is evaluated")
    run = load_run(path)
    check_finetuned(run.path, run.result)
    other_files = [change for change in changes if change.partition("=")[0] in OTHER_FILES]
    if other_files and run.job.resolved.recipe.task.name == "custom":
        raise UsageError(
            f"{other_files[0].partition('=')[0]} names other files, whose rows have to be encoded as training's were: "
            f"spt predict {run.path.name} FILE answers and scores them"
        )
    setup, path = run.setup, run.path
    data, other = setup.data, setup.data
    if changes:
        other = open_task(load(str(path / "recipe.yaml"), changes).recipe.task)
        _check_same_kind(data, other)
        if split != "train":
            _refuse_trained_on(path, data, other, split)
    if other.length > data.length:
        model = lengthened(run.network, run.job.resolved.recipe.model, data.length, other.length)
        setup = replace(setup, model=model)
        run = replace(run, setup=setup)
    rate = other.interval / data.interval
    if rate != 1:
        try:
            setup.model.backbone.rescale(rate)
        except Unsupported as error:
            raise UsageError(
                f"model {run.job.resolved.recipe.model.name} cannot rescale its step size: {error}"
            ) from error
    check_has_rows(path.name, other, split)
    rows = other.splits[split]
    runtime.check_libraries()
    scores = evaluate_run(run, replace(other, input=data.input), rows, runtime)
    return {
        "run": path.name,
        "split": split,
        "rows": len(rows.whole),
        "changes": list(changes),
        "rate": rate,
        "scores": scores,
        "notes": list(other.notes),
    }


def check_finetuned(path: Path, result: Result) -> None:
    """Raise CheckpointError if the result is that of a pretraining run."""
    if result.stage != "finetune":
        raise CheckpointError(f"{path} is a pretraining run, which has no task; name the folder of a finetuning run")


def evaluate_run(run: FinishedRun, data: TaskData, rows: Split, runtime: Runtime) -> dict[str, float]:
    """Scores of a finetuning run's network on these rows of its own or of similar data."""
    job, setup = run.job, replace(run.setup, data=data)
    draw = evaluation_draw(job.train, job.seed, run.result.best_step)
    with stage_threads(run.setup, runtime), runtime.kernels(), runtime.products(job.train.precision):
        model = setup.model.to(runtime.device)
        scores, _ = evaluate(model, setup, rows, runtime, draw, at_once=1, predict=True)
    return scores


def _refuse_trained_on(path: Path, data: TaskData, other: TaskData, split: str) -> None:
    """Raise UsageError if rows to be scored are training rows of the run, by their inputs or by their ids."""
    rows = other.splits[split]
    _, trained = read_meta(path / "checkpoints" / "best")
    # Rows that the unchanged task has in both splits do not count: `spt data check` reports them.
    trained_elsewhere = np.setdiff1d(trained, data.splits[split].seen)
    seen = np.isin(rows.seen, trained_elsewhere).reshape(len(rows), -1).any(axis=1)
    if not np.isin(data.splits[split].ids, data.train.ids).any():  # ids are unique across splits
        seen |= np.isin(rows.ids.astype(str), data.train.ids.astype(str))
    if seen.any():
        raise UsageError(
            f"under these changes {int(seen.sum())} of the {len(rows)} {split} rows are rows that the run was trained "
            "on, so their scores would mean nothing; leave out the change that assigns rows to splits differently"
        )


def _check_same_kind(data: TaskData, other: TaskData) -> None:
    """Raise UsageError unless the changed task's examples are of the same kind."""
    own, changed = data.input, other.input
    if isinstance(own, Tokens) and isinstance(changed, Tokens):
        same = (own.codes is None) == (changed.codes is None) and (own.codes is not None or own.vocab >= changed.vocab)
    else:
        same = isinstance(own, Values) and isinstance(changed, Values) and own.channels == changed.channels
    same = same and data.target == other.target and data.train.sequences == other.train.sequences
    if not same:
        raise UsageError(
            f"the changed task has other inputs or targets ({other.input} -> {other.target}) than those of the run "
            f"({data.input} -> {data.target})"
        )
