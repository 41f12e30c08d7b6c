"""Self-pretraining and training from scratch as scikit-learn estimators, for arrays, lists, data frames and texts."""
