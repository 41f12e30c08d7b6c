"""The best answer that looks at no input: the commonest training class, or the mean of the training targets."""

import numpy as np

from spt.baselines.base import Baseline, Fitted, Query, every
from spt.baselines.scores import ComparedMetric
from spt.tasks.base import Classes, Labels, TaskData, class_counts, label_counts


def fit(data: TaskData, metric: ComparedMetric, seed: int) -> Fitted:
    if isinstance(data.target, Classes):
        counts = class_counts(data.train, data.target.count)
        constant, said, rows = counts / counts.sum(), "the commonest training class", int(counts.sum())
    elif isinstance(data.target, Labels):
        lacking, holding = label_counts(data.train, data.target.count)
        constant, rows = holding / np.maximum(lacking + holding, 1), len(data.train)
        said = "each label, if it holds in most training rows"
    else:
        targets = np.concatenate([examples.targets for examples in every(data.train)]).astype(np.float64)
        name, centre = (
            ("median", np.nanmedian) if metric.name == "mae" else ("mean", np.nanmean)
        )  # what the metric asks for
        constant, said, rows = centre(targets, axis=0), f"the {name} of the training targets", len(targets)

    def answer(asked: Query) -> np.ndarray:
        return np.broadcast_to(constant, (len(asked.rows), len(constant)))

    return Fitted(answer, f"no input: {said}", rows)


def applies(data: TaskData) -> str | None:
    return None


BASELINE = Baseline(
    "majority",
    "Majority class",
    "Constant answer",
    1,
    chance=False,
    probabilities=True,
    applies=applies,
    fit=fit,
)
