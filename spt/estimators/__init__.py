"""Self-pretraining and training from scratch as scikit-learn estimators, for arrays, lists, data frames and texts."""

from spt.estimators.estimator import SequenceClassifier, SequenceRegressor

__all__ = ["SequenceClassifier", "SequenceRegressor"]
