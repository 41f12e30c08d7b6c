"""The estimators: scikit-learn's interface around the pipeline's own stages. Nothing is trained here.

`fit` makes the runs that `spt.pretrain` and `spt.finetune` would make of the same rows, in a temporary folder or in one
that is kept. There are no rows but those given: some of them are for validation, none for testing.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import assert_all_finite, check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from spt.config.job import Job, digest
from spt.config.load import anchor_paths, resolve
from spt.config.plugins import find_plugin
from spt.config.recipe import ResolvedRecipe
from spt.config.validation import validate_values, validation_messages
from spt.data.cache import prepare_once
from spt.data.fingerprints import rows_hash, with_fingerprints
from spt.errors import DataError, Interrupted, Stopped, UsageError
from spt.estimators import state
from spt.estimators.encoding import Encoding
from spt.estimators.holdout import validation_rows
from spt.estimators.inputs import Rows, read_rows
from spt.inference.trained_model import TrainedModel
from spt.runs.result import Result
from spt.runtime import launch
from spt.runtime.distributed import Runtime
from spt.runtime.scratch import scratch_folder
from spt.runtime.settings import Settings
from spt.tasks.base import IGNORED, Classes, Labels, Reals, Split, Target, TaskData, describe, known_targets, row_ids
from spt.tasks.own.transforms import MIXING, TransformOptions
from spt.training.stage import run_stage

FILE = "estimator.json"
Fitted = TypeVar("Fitted", bound="SequenceEstimator")
TASK = "spt.tasks.own.prepared"
SMALL = {"d_model": 64, "n_layers": 2}  # of any model, where `model_options` say nothing else: data here are small
RATIO = 0.3  # hidden steps, where `objective` says no more than "masked"
EVALUATIONS = 20  # of a stage, at most about so many
TRANSFORMS = ("rate", "resample", "window", "stride", "patch", "spectrogram")  # options of the task custom
ENGINE = threading.RLock()  # torch's seeds and threads are the process's: one training at a time


class EstimatorError(UsageError, ValueError):
    """Parameters or data that an estimator cannot be fitted with."""


@cache
def runtime(cpu: bool, quiet: bool) -> Runtime:
    """One runtime for all fits and predictions of this process, since making one takes a tenth of a second."""
    return Runtime(Settings(cpu=cpu, quiet=quiet, wait=True))


@contextlib.contextmanager
def value_errors() -> Iterator[None]:
    """Turn the pipeline's complaints about parameters and data into the ValueError that scikit-learn's tools expect."""
    try:
        yield
    except (UsageError, DataError) as error:
        raise EstimatorError(str(error)) from error


class SequenceEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """What both estimators share; use one of them."""

    def __init__(
        self,
        model: str = "transformer",
        *,
        model_options: dict[str, Any] | None = None,
        self_pretrain: bool = True,
        objective: str | dict[str, Any] = "masked",
        tokens: str | None = None,
        max_length: int | None = None,
        missing: str = "refuse",
        static_columns: Sequence[str] | None = None,
        rate: float | None = None,
        resample: float | str | None = None,
        window: int | str | None = None,
        stride: int | str | None = None,
        patch: int | None = None,
        spectrogram: dict[str, Any] | None = None,
        pool: str = "mean",
        epochs: int | float = 50,
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        pretrain_epochs: int | float = 50,
        pretrain_learning_rate: float = 1e-3,
        pretrain_batch_size: int = 32,
        validation_fraction: float = 0.2,
        metric: str = "auto",
        random_state: Any = 0,
        device: str = "auto",
        runs_dir: str | Path | None = None,
        verbose: bool | int = False,
    ) -> None:
        self.model = model
        self.model_options = model_options
        self.self_pretrain = self_pretrain
        self.objective = objective
        self.tokens = tokens
        self.max_length = max_length
        self.missing = missing
        self.static_columns = static_columns
        self.rate = rate
        self.resample = resample
        self.window = window
        self.stride = stride
        self.patch = patch
        self.spectrogram = spectrogram
        self.pool = pool
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.pretrain_epochs = pretrain_epochs
        self.pretrain_learning_rate = pretrain_learning_rate
        self.pretrain_batch_size = pretrain_batch_size
        self.validation_fraction = validation_fraction
        self.metric = metric
        self.random_state = random_state
        self.device = device
        self.runs_dir = runs_dir
        self.verbose = verbose

    # -------------------------------------------------------------------------------------------------------- fitting

    def fit(self: Fitted, X: Any, y: Any, groups: Any = None, X_val: Any = None, y_val: Any = None) -> Fitted:
        """Train on X and select the weights on validation rows: X_val and y_val, or a part of X drawn by
        `random_state`, with equal shares of every class and whole `groups`.

        Raises ValueError for parameters and data that cannot be fitted, and what `spt.finetune` raises.
        """
        self._check_parameters()
        rows = self._read(X, reset=True)
        targets = self._learn_targets(y)
        check_consistent_length(rows.values, targets)
        seed = self._seed()
        train, val = np.arange(len(rows)), None
        if X_val is None and y_val is None:
            if groups is not None:
                check_consistent_length(rows.values, groups)
            held = validation_rows(rows, targets, groups, self.validation_fraction, seed)
            train, val = np.flatnonzero(~held), np.flatnonzero(held)
        elif X_val is None or y_val is None:
            raise ValueError("X_val and y_val go together; one of them is missing")
        gaps = self.missing == "hidden"
        self.encoding_ = Encoding.learn(rows.take(train), self.tokens, self.max_length, gaps, self._transforms())
        training = self.encoding_.split(rows.take(train), targets[train], train)
        if val is not None:
            validation = self.encoding_.split(rows.take(val), targets[val], val)
        else:
            apart, answers = self._read(X_val, reset=False), self._encode_targets(y_val)
            check_consistent_length(apart.values, answers)
            validation = self.encoding_.split(apart, answers, row_ids("val", len(apart)))
        self._train(self._task(training, validation), seed)
        return self

    def _task(self, train: Split, val: Split) -> TaskData:
        """The training's data, without test rows."""
        empty = replace(train.take(np.empty(0, np.int64)), values=train.values[:0])
        input, length = self.encoding_.input(train), self.max_length or 0
        gaps = not all(known_targets(np.asarray(split.targets)).all() for split in (train, val))
        data = TaskData(input, self._target(gaps), train, val, empty, length=length)
        if self.self_pretrain and data.length == 1:
            raise ValueError(
                "n_features=1: sequences of one step leave nothing to learn without labels; fit with "
                "self_pretrain=False"
            )
        data.check(tested=False)
        return data.mapped(with_fingerprints)

    def _train(self, data: TaskData, seed: int) -> None:
        """Make the runs, or find them, and keep the trained network."""
        if launch.world_size() > 1:
            raise EstimatorError("an estimator is fitted by one process; run a recipe on several (spt.finetune)")
        try:
            with ENGINE, value_errors(), contextlib.ExitStack() as stack:
                root = stack.enter_context(scratch_folder()) if self.runs_dir is None else Path(self.runs_dir).resolve()
                gpus = [] if self.device == "cpu" else range(torch.cuda.device_count())
                stack.enter_context(torch.random.fork_rng(gpus))  # the program's own random numbers go on as they were
                job = self._job(data, root, seed)
                self.result_: Result = run_stage(job, root, self._runtime())
                opened = TrainedModel.open(root / job.name)
                task = {**opened.task, **self.encoding_.transforms}  # what new rows go through
                self.model_ = replace(opened, network=opened.network.cpu(), classes=self._class_names(), task=task)
                self.run_ = None if self.runs_dir is None else root / job.name
        except Stopped as error:
            if not isinstance(error, Interrupted):
                signal.raise_signal(signal.SIGTERM)
            raise

    def _job(self, data: TaskData, root: Path, seed: int) -> Job:
        # Not the rows alone: how gaps are shown, and how long sequences may be, is part of what is trained.
        shape = {"input": describe(data.input), "target": describe(data.target), "length": data.length}
        identity = digest({"rows": rows_hash(data), **shape})
        folder = root / ".data" / identity
        prepare_once(folder, lambda: data)
        recipe, identities = self._recipe(folder, len(data.train), len(data.labelled().train))
        resolved = ResolvedRecipe(type(self).__name__, recipe, {}, identities, data=identity)
        return Job(resolved, "finetune", seed, Job(resolved, "pretrain", seed) if self.self_pretrain else None)

    def _recipe(self, folder: Path, rows: int, labelled: int) -> Any:
        def train(rows: int, epochs: int | float, learning_rate: float, batch_size: int) -> dict[str, Any]:
            batch = min(batch_size, rows)
            every = max(1, round(epochs * -(-rows // batch) / EVALUATIONS))
            options = {"schedule": "cosine", "warmup_fraction": 0.1, "evaluate_every": every}
            return {"epochs": epochs, "batch_size": batch, "learning_rate": learning_rate, **options}

        objective = self.objective
        if isinstance(objective, str):
            objective = {"name": objective, **({"ratio": RATIO} if objective == "masked" else {})}
        recipe = {
            "task": {"name": TASK, "path": str(folder)},
            "model": {"name": self.model, **(self.model_options or {})},
            "pretrain": {
                "objective": objective,
                "train": train(rows, self.pretrain_epochs, self.pretrain_learning_rate, self.pretrain_batch_size),
            },
            "finetune": {
                "objective": {**self._supervised(), "metric": self.metric},
                "head": {"pool": self.pool},
                "train": train(labelled, self.epochs, self.learning_rate, self.batch_size) | self._drawing(),
            },
        }
        anchor_paths(recipe, Path.cwd())
        known = find_plugin("models", self.model).module.Config.model_fields
        recipe["model"] = {key: value for key, value in SMALL.items() if key in known} | recipe["model"]
        return resolve(recipe, type(self).__name__)

    def _drawing(self) -> dict[str, Any]:
        """Of finetuning: how its rows are drawn."""
        return {}

    def _check_parameters(self) -> None:
        """What the recipe cannot tell, or would tell in other words."""
        if not isinstance(self.model, str):
            raise EstimatorError(f"model={self.model!r}: the name of a model is expected (spt list models)")
        if not 0 < self.validation_fraction < 1:
            raise EstimatorError(f"validation_fraction={self.validation_fraction}: a share in (0, 1) is expected")
        if self.max_length is not None and self.max_length < 1:
            raise EstimatorError(f"max_length={self.max_length}: at least one step is expected")
        if self.missing not in ("refuse", "hidden"):
            raise EstimatorError(f"missing={self.missing!r}: 'refuse' or 'hidden' is expected")
        if isinstance(self.static_columns, str):
            raise EstimatorError(f"static_columns={self.static_columns!r}: a list of columns is expected")
        if self.device not in ("auto", "cpu"):
            raise EstimatorError(f"device={self.device!r}: 'auto' or 'cpu' is expected")
        for name in ("epochs", "batch_size", "pretrain_epochs", "pretrain_batch_size"):
            if not getattr(self, name) > 0:
                raise EstimatorError(f"{name}={getattr(self, name)}: a positive number is expected")

    def _transforms(self) -> dict[str, Any]:
        """The options that are given; of one sequence's windows the answers are averaged."""
        given = {name: value for name in TRANSFORMS if (value := getattr(self, name)) is not None}
        if self.missing == "hidden" and (mixing := [name for name in MIXING if name in given]):
            raise EstimatorError(f"{mixing[0]} makes every step from several, in which values may be missing")
        try:
            return validate_values(TransformOptions, given).model_dump(mode="json", include=set(given))
        except ValidationError as error:
            raise EstimatorError("; ".join(validation_messages(TransformOptions, error))) from error

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            check_random_state(self.random_state)
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _runtime(self) -> Runtime:
        return runtime(self.device == "cpu", not self.verbose)

    # --------------------------------------------------------------------------------------------------------- inputs

    def _read(self, X: Any, *, reset: bool) -> Rows:
        """The rows of X, whose features are those of fit if it had any."""
        rows = read_rows(X, self, gaps=self.missing == "hidden", static=tuple(self.static_columns or ()))
        if reset:
            for name in ("n_features_in_", "feature_names_in_"):
                self.__dict__.pop(name, None)
        if rows.columns and (reset or hasattr(self, "n_features_in_")):
            validate_data(self, X, reset=reset, skip_check_array=True)  # remembers or compares the features
        return rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = self.missing == "hidden"
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _more_tags(self) -> dict[str, Any]:  # of scikit-learn 1.5
        kinds = {"requires_y": True, "X_types": ["2darray", "3darray"], "preserves_dtype": []}
        return {**kinds, "allow_nan": self.missing == "hidden"}

    # -------------------------------------------------------------------------------------------------------- answers

    def transform(self, X: Any) -> NDArray[np.float32]:
        """(n, D) The trained network's features of each sequence, pooled as for its head."""
        return self._answer("embed", X)

    @property
    def _n_features_out(self) -> int:
        return int(self.model_.architecture.model.options["d_model"])

    def _answer(self, method: Literal["embed", "logits", "predict"], X: Any) -> NDArray[Any]:
        """What a method of the trained model says of X, in its order."""
        check_is_fitted(self, "model_")
        split = self.encoding_.split(self._read(X, reset=False))
        with ENGINE, value_errors():
            answers: NDArray[Any] = getattr(self.model_, method)(split, runtime=self._runtime())
        return answers

    # ---------------------------------------------------------------------------------------------------- on the disk

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to a folder that does not exist yet: a model as `spt export` writes it, which
        `spt.load_model` opens too, and `estimator.json`. Neither runs nor data are needed to load it; nothing in it is
        pickled.

        Raises OutputError if it cannot be written, and UsageError for parameters that JSON cannot hold.
        """
        check_is_fitted(self, "model_")
        from spt.inference.export import write_model

        write_model(self.model_, Path(path), texts={FILE: state.to_text(self)})

    @classmethod
    def load(cls: type[Fitted], path: str | Path, *, trust_code: bool = False) -> Fitted:
        """Load the fitted estimator that `save` wrote; `trust_code` lets your own model file in the folder run.

        Raises UsageError if there is none or it is of another class, CheckpointError if it is damaged.
        """
        folder = Path(path)
        estimator: Any = cls()
        state.restore(estimator, folder / FILE)
        estimator.model_ = TrainedModel.open(folder, trust_code=trust_code)
        return estimator


def _check_known(known: NDArray[np.bool_]) -> None:
    """Raise ValueError for a column of y (n, [K]) that nobody knows anything of."""
    empty = np.flatnonzero(~known.reshape(len(known), -1).any(axis=0))
    if len(empty):
        where = f"column {empty[0]} of y" if known.ndim == 2 else "y"
        raise ValueError(f"{where} has no value: every entry is missing; leave it out")


class SequenceClassifier(ClassifierMixin, SequenceEstimator):  # type: ignore[misc]
    """Classify sequences: self-pretrain a network on the training inputs and finetune it on their labels or, with
    `self_pretrain=False`, train it from scratch.

        model = spt.SequenceClassifier(epochs=20).fit(X, y)
        model.predict(X_new), model.predict_proba(X_new), model.transform(X_new)

    X is an array (n, L) or (n, L, C), a list of arrays of any lengths, texts, or a data frame of numbers or of arrays.
    y holds one class per row, None or NaN if unknown; or, with shape (n, K), 1 or 0 for each of K labels, any number of
    which may hold. `class_weight` is "balanced" or {class: weight}, or for labels {column: weight where it holds}; it
    affects training only. `sampling="balanced"` draws training rows so that every class, or label, occurs equally
    often. `positive` is the positive class of the metrics f1, auroc and auprc; None: of two the second in sorted order.

    With missing="hidden", NaN is a missing value, which the network is shown as such; `static_columns` names columns of
    the data frame that stand beside the sequence (age, sex).

    Raises ValueError for parameters and data that cannot be fitted.
    """

    def __init__(
        self,
        model: str = "transformer",
        *,
        model_options: dict[str, Any] | None = None,
        self_pretrain: bool = True,
        objective: str | dict[str, Any] = "masked",
        tokens: str | None = None,
        max_length: int | None = None,
        missing: str = "refuse",
        static_columns: Sequence[str] | None = None,
        rate: float | None = None,
        resample: float | str | None = None,
        window: int | str | None = None,
        stride: int | str | None = None,
        patch: int | None = None,
        spectrogram: dict[str, Any] | None = None,
        pool: str = "mean",
        epochs: int | float = 50,
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        pretrain_epochs: int | float = 50,
        pretrain_learning_rate: float = 1e-3,
        pretrain_batch_size: int = 32,
        validation_fraction: float = 0.2,
        metric: str = "auto",
        class_weight: str | dict[Any, float] | None = None,
        sampling: str | None = None,
        positive: Any = None,
        random_state: Any = 0,
        device: str = "auto",
        runs_dir: str | Path | None = None,
        verbose: bool | int = False,
    ) -> None:
        super().__init__(
            model,
            model_options=model_options,
            self_pretrain=self_pretrain,
            objective=objective,
            tokens=tokens,
            max_length=max_length,
            missing=missing,
            static_columns=static_columns,
            rate=rate,
            resample=resample,
            window=window,
            stride=stride,
            patch=patch,
            spectrogram=spectrogram,
            pool=pool,
            epochs=epochs,
            learning_rate=learning_rate,
            batch_size=batch_size,
            pretrain_epochs=pretrain_epochs,
            pretrain_learning_rate=pretrain_learning_rate,
            pretrain_batch_size=pretrain_batch_size,
            validation_fraction=validation_fraction,
            metric=metric,
            random_state=random_state,
            device=device,
            runs_dir=runs_dir,
            verbose=verbose,
        )
        self.class_weight = class_weight
        self.sampling = sampling
        self.positive = positive

    def _learn_targets(self, y: Any) -> NDArray[np.int64]:
        labels, known = self._labels(y)
        self._several = labels.ndim == 2
        if self._several:
            _check_known(labels != IGNORED)
            self.classes_ = np.arange(labels.shape[1])
            return labels
        self.classes_, classes = np.unique(labels[known], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {_shown(self.classes_[0])}; a classification needs two")
        targets = np.full(len(labels), IGNORED, np.int64)
        targets[known] = classes
        return targets

    def _encode_targets(self, y: Any) -> NDArray[np.int64]:
        labels, known = self._labels(y)
        if self._several or labels.ndim == 2:
            if not self._several or labels.ndim != 2 or labels.shape[1] != len(self.classes_):
                raise ValueError(f"y_val has the shape {labels.shape}, unlike y")
            return labels
        unknown = np.setdiff1d(labels[known], self.classes_)
        if len(unknown):
            raise ValueError(f"y_val has the label {_shown(unknown[0])}, which y does not have")
        targets = np.full(len(labels), IGNORED, np.int64)
        targets[known] = np.searchsorted(self.classes_, labels[known])
        return targets

    def _labels(self, y: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """(n,) classes, or (n, K) labels of 1 and 0; and which of them, or which rows, are known."""
        _require(self, y)
        array = np.asarray(y.toarray() if hasattr(y, "toarray") else y)
        if array.ndim == 2 and array.shape[1] > 1:
            flags = check_array(array, input_name="y", estimator=self, ensure_all_finite="allow-nan")
            known = ~np.isnan(flags.astype(np.float64))
            filled = np.where(known, flags, 0)
            if type_of_target(filled) == "multilabel-indicator" and np.isin(filled, (0, 1)).all():
                return np.where(known, filled, IGNORED).astype(np.int64), known.any(axis=1)
            raise ValueError(
                f"y has the shape {flags.shape}: of several labels it holds 0 and 1, in a column for each; of one "
                "class a row it is (n,) (multiclass-multioutput is not supported)"
            )
        labels = column_or_1d(y, warn=True)
        known = ~_is_missing(labels)
        if not known.any():
            raise ValueError("y has no label: every entry is missing")
        assert_all_finite(labels[known], input_name="y")
        check_classification_targets(labels[known])
        if not known.all() and labels.dtype.kind == "O":  # as an array without gaps would be
            plain = np.array(labels[known].tolist())
            labels = np.full(len(labels), plain[0], plain.dtype)
            labels[known] = plain
        return labels, known

    def _target(self, gaps: bool) -> Target:
        count = len(self.classes_)
        return Labels(count) if self._several else Classes(count, missing=gaps)

    def _class_names(self) -> tuple[str, ...]:
        """As `spt predict` writes them."""
        return tuple(map(str, self.classes_))

    def _supervised(self) -> dict[str, Any]:
        weights, known = self.class_weight, self.classes_.tolist()
        objective: dict[str, Any] = {"name": "supervised"}
        if isinstance(weights, dict):
            if unknown := [label for label in weights if label not in known]:
                raise EstimatorError(f"class_weight names {unknown[0]!r}, which y does not have")
            objective["class_weights"] = {str(known.index(label)): weight for label, weight in weights.items()}
        elif weights == "balanced":
            objective["class_weights"] = weights
        elif weights is not None:
            raise EstimatorError(f"class_weight={weights!r}: None, 'balanced' or {{class: weight}} is expected")
        if self.positive is not None:
            if self._several:
                raise EstimatorError("positive is one of several classes, but y holds labels; leave it out")
            if self.positive not in known:
                raise EstimatorError(f"positive={self.positive!r} is no class of y")
            objective["positive"] = str(known.index(self.positive))
        return objective

    def _drawing(self) -> dict[str, Any]:
        if self.sampling not in (None, "balanced"):
            raise EstimatorError(f"sampling={self.sampling!r}: None or 'balanced' is expected")
        return {} if self.sampling is None else {"sampling": self.sampling}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.classifier_tags.multi_label = True
        return tags

    def predict_proba(self, X: Any, *, calibrated: bool = False) -> NDArray[np.float64]:
        """(n, number of classes) Probabilities, in the order of `classes_`; for labels, that each of them holds.
        `calibrated` applies the temperature fitted on the validation rows, which changes no answer."""
        scores = self._answer("logits", X).astype(np.float64)
        if calibrated:
            with value_errors():
                scores /= self.model_.fitted_temperature()
        if isinstance(self.model_.target, Labels):
            return 1 / (1 + np.exp(-scores))
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> NDArray[Any]:
        """(n,) The most likely class of each sequence; for labels, (n, K), 1 where one is more likely than not."""
        scores = self._answer("logits", X)
        if isinstance(self.model_.target, Labels):
            return (scores > 0).astype(np.int64)
        return self.classes_[scores.argmax(axis=1)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """scikit-learn's accuracy, over the rows whose label is, or whose labels all are, known in y."""
        check_is_fitted(self, "model_")
        labels, known = self._labels(y)
        known = (labels != IGNORED).all(axis=1) if labels.ndim == 2 else known
        if known.all():
            return float(super().score(X, y, sample_weight))
        if not known.any():
            raise ValueError("y has no row whose labels are all known, so there is nothing to score")
        weight = None if sample_weight is None else np.asarray(sample_weight)[known]
        return float(accuracy_score(labels[known], self.predict(X)[known], sample_weight=weight))


class SequenceRegressor(RegressorMixin, SequenceEstimator):  # type: ignore[misc]
    """Predict one number or several from sequences, as `SequenceClassifier` predicts labels.

        model = spt.SequenceRegressor(epochs=20).fit(X, y)
        model.predict(X_new), model.transform(X_new)

    y is (n,) or (n, targets), NaN where a number is unknown. Raises ValueError for parameters and data that cannot be
    fitted.
    """

    def _learn_targets(self, y: Any) -> NDArray[np.float64]:
        targets = self._numbers(y)
        _check_known(np.isfinite(targets))
        self.n_outputs_ = None if targets.ndim == 1 else targets.shape[1]
        return targets.reshape(len(targets), -1)

    def _encode_targets(self, y: Any) -> NDArray[np.float64]:
        targets = self._numbers(y)
        if targets.shape[1:] != (() if self.n_outputs_ is None else (self.n_outputs_,)):
            raise ValueError(f"y_val has the shape {targets.shape}, unlike y")
        return targets.reshape(len(targets), -1)

    def _numbers(self, y: Any) -> NDArray[np.float64]:
        _require(self, y)
        targets = check_array(y, ensure_2d=False, input_name="y", estimator=self, ensure_all_finite="allow-nan")
        if targets.ndim not in (1, 2):
            raise ValueError(f"y has the shape {targets.shape}; (n,) or (n, targets) is expected")
        return targets.astype(np.float64)

    def _target(self, gaps: bool) -> Reals:
        return Reals(self.n_outputs_ or 1, missing=gaps)

    def _class_names(self) -> tuple[str, ...]:
        return ()

    def _supervised(self) -> dict[str, Any]:
        return {"name": "supervised", "scale": "standard"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _more_tags(self) -> dict[str, Any]:
        return {**super()._more_tags(), "multioutput": True}

    def predict(self, X: Any) -> NDArray[np.float64]:
        """(n,) The predicted numbers or, for several targets, (n, targets)."""
        numbers = self._answer("predict", X).astype(np.float64)
        return numbers[:, 0] if self.n_outputs_ is None else numbers

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """scikit-learn's R2, the mean over targets, each over the rows where y has it."""
        check_is_fitted(self, "model_")
        targets = self._numbers(y)
        known = np.isfinite(targets).reshape(len(targets), -1)
        if known.all():
            return float(super().score(X, y, sample_weight))
        _check_known(known)
        targets, answers = (array.reshape(len(known), -1) for array in (targets, self.predict(X)))
        weight = None if sample_weight is None else np.asarray(sample_weight)
        scores = [
            r2_score(targets[there, k], answers[there, k], sample_weight=None if weight is None else weight[there])
            for k, there in enumerate(known.T)
        ]
        return float(np.mean(scores))


def _shown(label: Any) -> str:
    return repr(label.item() if isinstance(label, np.generic) else label)


def _is_missing(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) None and NaN, also pandas' own."""
    if labels.dtype.kind == "f":
        return np.isnan(labels)
    if labels.dtype.kind != "O":
        return np.zeros(len(labels), bool)
    return np.array([each is None or type(each).__name__ == "NAType" or each != each for each in labels.tolist()], bool)


def _require(estimator: BaseEstimator, y: Any) -> None:
    if y is None:
        raise ValueError(
            f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None."
        )
