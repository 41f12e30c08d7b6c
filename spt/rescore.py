"""A finished run's weights once more: on its own task, or on one that was changed since."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from spt.checkpoint import load_weights
from spt.errors import CheckpointError, UsageError
from spt.evaluate import evaluate
from spt.models.base import Unsupported
from spt.objectives import evaluation_draw
from spt.plan import Job, Weights
from spt.recipe import load
from spt.run import Run
from spt.runtime import Runtime
from spt.stages import bind
from spt.store import open_task
from spt.tasks.base import Tokens


def rescore(
    path: Path, changes: Sequence[str], split: Literal["train", "val", "test"], runtime: Runtime
) -> dict[str, Any]:
    """Scores of a finetuning run's selected weights on a split of its task under these changes (`task.a=b`).

    Inputs are shown to the model as in training (its vocabulary, its mean and standard deviation). Where the changed
    task's interval is another, the model is told (Backbone.rescale). Raises UsageError or CheckpointError, in words.
    """
    strange = [change for change in changes if not change.startswith("task.")]
    if strange:
        raise UsageError(f"{strange[0]} is no change to the task; only task.a=b changes what is evaluated")
    result = Run(path.parent, path.name).result()
    if result is None or result.stage != "finetune":
        what = "a pretraining run, which has no task" if result else "no finished run"
        raise CheckpointError(f"{path} is {what}; evaluate takes the folder of a finished finetuning run")
    recipe = str(path / "recipe.yaml")
    parent = None if result.parent is None else Weights(path, result.parent)
    job = Job(load(recipe, []), "finetune", result.seed, parent)
    bound = bind(job)
    data, other = bound.data, bound.data
    if changes:
        other = open_task(load(recipe, changes).recipe.task)
        _check_alike(data, other)
    load_weights(path / "checkpoints" / "best", bound.model)
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
        draw = evaluation_draw(job.train, job.seed, result.best_step)
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


def _check_alike(data: Any, other: Any) -> None:
    """The changed task's examples are of the same kind."""
    same = type(data.input) is type(other.input) and data.target == other.target
    if same and isinstance(data.input, Tokens):
        same = (data.input.codes is None) == (other.input.codes is None) and (
            data.input.codes is not None or data.input.vocab >= other.input.vocab
        )
    elif same:
        same = data.input.channels == other.input.channels
    same = same and data.train.sequences == other.train.sequences
    if not same:
        raise UsageError(
            f"the changed task has other inputs or targets ({other.input} -> {other.target}) than those of the run "
            f"({data.input} -> {data.target})"
        )
    if other.length > data.length:
        raise UsageError(
            f"the changed task has sequences of {other.length:,} steps, but the model was built for {data.length:,}"
        )
