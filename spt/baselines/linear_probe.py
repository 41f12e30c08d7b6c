"""A linear map of what a row holds wherever it stands, or of a step and its neighbours, as in `spt data check`."""

import numpy as np
from numpy.typing import NDArray

from spt.baselines.base import Baseline, Fitted, Query, drawn, two_classes
from spt.baselines.ridge import fit_ridge
from spt.baselines.scores import ComparedMetric
from spt.data.features import OF_STEPS, row_features, step_features
from spt.tasks.base import TaskData


def fit(data: TaskData, metric: ComparedMetric, seed: int) -> Fitted:
    def features(asked: Query) -> NDArray[np.float64]:
        if asked.at is not None:
            return step_features(data, asked.split, asked.places)
        return row_features(data, asked.split, asked.rows)[0]

    asked = drawn(data.train, 1, "train").asked
    sees = OF_STEPS if asked.at is not None else row_features(data, asked.split, asked.rows)[1]
    return fit_ridge(data, metric, features, sees)


BASELINE = Baseline(
    "linear_probe",
    "Linear probe",
    "Linear probe",
    1,
    chance=False,
    probabilities=False,
    applies=two_classes,
    fit=fit,
)
