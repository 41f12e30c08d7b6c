"""A finished run's weights once more: on its own task, or on one that was changed since."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spt.config.load import load
from spt.data.dataset import open_task
from spt.errors import CheckpointError, UsageError
from spt.models.base import Unsupported
from spt.runtime.distributed import Runtime
from spt.tasks.base import TaskData, Tokens, Values
from spt.training.checkpoint import read_meta
from spt.training.evaluate import evaluate
from spt.training.load_run import load_run
from spt.training.objectives import evaluation_draw


def reevaluate(
    path: Path, changes: Sequence[str], split: Literal["train", "val", "test"], runtime: Runtime
) -> dict[str, Any]:
    """Scores of a finetuning run's selected weights on a split of its task under these changes (`task.a=b`).

    Inputs are shown to the model as in training (its vocabulary, its mean and standard deviation); classes are those of
    the same number. Where the changed task's interval is another, the model is told (Backbone.rescale). Refused are
    data that are not those of the run any more, and validation or test rows that the run was trained on. Raises
    UsageError, DataError or CheckpointError, in words.
    """
    strange = [change for change in changes if not change.startswith("task.")]
    if strange:
        raise UsageError(f"{strange[0]} is no change to the task; only task.a=b changes what is evaluated")
    opened = load_run(path)
    if opened.result.stage != "finetune":
        raise CheckpointError(
            f"{path} is a pretraining run, which has no task; evaluate takes the folder of a finished finetuning run"
        )
    job, bound, path = opened.job, opened.bound, opened.path
    data, other = bound.data, bound.data
    if changes:
        other = open_task(load(str(path / "recipe.yaml"), changes).recipe.task)
        _check_alike(data, other)
        if split != "train":
            _refuse_trained_on(path, data, other, split)
    rate = other.interval / data.interval
    if rate != 1:
        try:
            bound.model.backbone.rescale(rate)
        except Unsupported as error:
            raise UsageError(
                f"model {job.loaded.recipe.model.name} cannot be told another step size: {error}"
            ) from error
    shown = replace(other, input=data.input)
    rows = other.splits[split]
    runtime.check_libraries()
    with runtime.kernels():
        model = bound.model.to(runtime.device)
        draw = evaluation_draw(job.train, job.seed, opened.result.best_step)
        arguments = (model, bound.objective, bound.output, rows, shown, runtime, job.train, draw)
        scores, _ = evaluate(*arguments, at_once=1)
    return {
        "run": path.name,
        "split": split,
        "rows": len(rows),
        "changes": list(changes),
        "rate": rate,
        "scores": scores,
        "notes": list(other.notes),
    }


def _refuse_trained_on(path: Path, data: TaskData, other: TaskData, split: str) -> None:
    """Raise UsageError when rows to be scored are training rows of the run, by their input or by their names."""
    rows = other.splits[split]
    _, trained = read_meta(path / "checkpoints" / "best")
    # Rows that the task itself has in both splits do not count, changed or not: data check tells them.
    again = np.setdiff1d(trained, data.splits[split].seen)
    seen = np.isin(rows.seen, again).reshape(len(rows), -1).any(axis=1)
    if not np.isin(data.splits[split].ids, data.train.ids).any():  # names tell rows apart
        seen |= np.isin(rows.ids.astype(str), data.train.ids.astype(str))
    if seen.any():
        raise UsageError(
            f"under these changes {int(seen.sum())} of the {len(rows)} {split} rows are rows that the run was trained "
            "on, so their scores would mean nothing; leave out what deals rows to splits anew"
        )


def _check_alike(data: TaskData, other: TaskData) -> None:
    """The changed task's examples are of the same kind."""
    mine, new = data.input, other.input
    if isinstance(mine, Tokens) and isinstance(new, Tokens):
        same = (mine.codes is None) == (new.codes is None) and (mine.codes is not None or mine.vocab >= new.vocab)
    else:
        same = isinstance(mine, Values) and isinstance(new, Values) and mine.channels == new.channels
    same = same and data.target == other.target and data.train.sequences == other.train.sequences
    if not same:
        raise UsageError(
            f"the changed task has other inputs or targets ({other.input} -> {other.target}) than those of the run "
            f"({data.input} -> {data.target})"
        )
    if other.length > data.length:
        raise UsageError(
            f"the changed task has sequences of {other.length:,} steps, but the model was built for {data.length:,}"
        )
