"""Scores of groups of test rows, such as patients, in the compared metric."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from spt.data.metrics import confusion_matrix, groups_of
from spt.errors import DataError
from spt.runs.result import GroupScore
from spt.tasks.base import Split
from spt.training.evaluate import Predictions
from spt.training.losses import answers
from spt.training.metrics import default_metric, metrics, of_all
from spt.training.objectives import Output, of_whole_split

MOST_GROUPS = 200  # whose scores are told


def group_scores(output: Output, split: Split, predictions: Predictions) -> Iterator[GroupScore]:
    """Each group's, in the order of names; nothing where the rows have no groups, or too many."""
    if split.groups is None or not 2 <= len(np.unique(split.groups)) <= MOST_GROUPS:
        return
    for name, rows in groups_of(split.groups):
        yield GroupScore(name=name, rows=len(rows), score=_score(output, predictions, rows))


def _score(output: Output, predictions: Predictions, rows: NDArray[np.int64]) -> float | None:
    """None where the metric is not defined for these rows, or cannot be told of some rows."""
    metric, sums, scored = default_metric(output), predictions.sums, predictions.scored
    if metric not in of_whole_split(output):
        assert sums is not None
        try:
            return metrics(output, {name: tensor[rows].sum(0) for name, tensor in sums.items()}).get(metric)
        except DataError:  # none of their steps is scored
            return None
    if scored is None:
        return None
    some = scored.of(np.flatnonzero(np.isin(scored.rows, rows)))
    if not len(some.truth):
        return None
    confusion = None
    if output.macro:
        confusion = confusion_matrix(some.truth, answers(output, some.logits)[:, 0].numpy(), output.classes)
    found = of_all(output, (metric,), some, confusion)
    undefined = metric in ("mcc", "auroc", "auprc", "spearman") and any("by definition" in note for note in found.notes)
    return None if undefined else found.scores.get(metric)
