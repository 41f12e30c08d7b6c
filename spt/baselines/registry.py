"""The baselines by name, and which of them a task takes."""

from collections.abc import Sequence

import numpy as np

from spt.baselines import boosting, catch22, linear_probe, logistic, majority, tfidf
from spt.baselines.base import Baseline
from spt.baselines.scores import KNOWN, OF_POSITIVE, ComparedMetric
from spt.config.objectives import SupervisedOptions, usual_metric
from spt.config.recipe import ResolvedRecipe
from spt.config.validation import validate_values
from spt.tasks.base import Classes, Labels, Reals, TaskData

BASELINES: dict[str, Baseline] = {
    each.BASELINE.name: each.BASELINE for each in (majority, linear_probe, logistic, tfidf, catch22, boosting)
}


def compared_metric(resolved: ResolvedRecipe, data: TaskData) -> ComparedMetric:
    """The metric that a report compares both arms of this recipe in."""
    options = validate_values(SupervisedOptions, resolved.recipe.finetune.objective.options)
    if options.metric != "auto":
        of_one = options.metric in OF_POSITIVE and isinstance(data.target, Classes)
        return ComparedMetric(options.metric, _positive(options.positive, data.class_names) if of_one else None)
    kinds = {Classes: "cross_entropy", Labels: "binary_cross_entropy"}
    loss = kinds.get(type(data.target), options.loss)
    return ComparedMetric(usual_metric(loss, text=data.train.text_bytes is not None))


def _positive(label: str | None, names: Sequence[str]) -> int | None:
    """The number of the positive class, as networks have it; a label that is none of the task's these refuse."""
    if label is None:
        return 1 if len(names) == 2 else None
    return names.index(label) if label in names else None


def why_not(name: str, data: TaskData, metric: str) -> str | None:
    """Why a baseline cannot answer this task, in words that follow its name; None where it can."""
    if metric not in KNOWN:
        return f"it gives answers, which have no {metric}"
    if metric == "log_loss" and not BASELINES[name].probabilities:
        return "its scores of classes are no probabilities, of which log_loss is"
    if name != "majority" and (reason := _incomplete(data)) is not None:
        return reason
    return BASELINES[name].applies(data.labelled())


def _incomplete(data: TaskData) -> str | None:
    """Why only a constant can be fitted, where a row has several answers."""
    if isinstance(data.target, Reals) and data.target.missing:
        known = [np.isfinite(np.asarray(split.targets)) for split in data.labelled().splits.values()]
        if not all(each.all() for each in known):
            return "it needs all numbers of a row, and here some are missing"
    return None
