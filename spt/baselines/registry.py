"""The baselines by name, and which of them a task takes."""

from spt.baselines import boosting, catch22, linear_probe, majority, tfidf
from spt.baselines.base import Baseline
from spt.baselines.scores import KNOWN
from spt.config.objectives import SupervisedOptions, usual_metric
from spt.config.recipe import ResolvedRecipe
from spt.config.validation import validate_values
from spt.tasks.base import Classes, TaskData

BASELINES: dict[str, Baseline] = {
    each.BASELINE.name: each.BASELINE for each in (majority, linear_probe, tfidf, catch22, boosting)
}


def compared_metric(resolved: ResolvedRecipe, data: TaskData) -> str:
    """The metric that a report compares both arms of this recipe in."""
    options = validate_values(SupervisedOptions, resolved.recipe.finetune.objective.options)
    if options.metric != "auto":
        return options.metric
    loss = "cross_entropy" if isinstance(data.target, Classes) else options.loss
    return usual_metric(loss, text=data.train.text_bytes is not None)


def why_not(name: str, data: TaskData, metric: str) -> str | None:
    """Why a baseline cannot answer this task, in words that follow its name; None where it can."""
    if metric not in KNOWN:
        return f"it gives answers, which have no {metric}"
    return BASELINES[name].applies(data)
