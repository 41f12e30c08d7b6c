"""The estimators: scikit-learn's interface around the pipeline's own stages. Nothing is trained here.

`fit` makes the runs that `spt.pretrain` and `spt.finetune` would make of the same rows, in a temporary folder or in one
that is kept. The rows handed over are all there are: a part of them is for validation, none is for test.
"""

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import assert_all_finite, check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from spt.config.job import Job
from spt.config.load import anchor_paths, resolve
from spt.config.plugins import find_plugin
from spt.config.recipe import ResolvedRecipe
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
from spt.runtime.settings import Settings
from spt.tasks.base import Classes, Reals, Split, TaskData, row_ids
from spt.training.stage import run_stage

FILE = "estimator.json"
Fitted = TypeVar("Fitted", bound="SequenceEstimator")
TASK = "spt.tasks.own.prepared"
SMALL = {"d_model": 64, "n_layers": 2}  # of any model, where `model_options` say nothing else: data here are small
RATIO = 0.3  # hidden steps, where `objective` says no more than "masked"
EVALUATIONS = 20  # of a stage, at most about so many
ENGINE = threading.RLock()  # torch's seeds and threads are the process's: one training at a time


class EstimatorError(UsageError, ValueError):
    """Parameters or data that an estimator cannot be fitted with."""


@cache
def runtime(cpu: bool, quiet: bool) -> Runtime:
    """One for all fits and predictions of this process: making one takes a tenth of a second."""
    return Runtime(Settings(cpu=cpu, quiet=quiet, wait=True))


@contextlib.contextmanager
def value_errors() -> Iterator[None]:
    """What the pipeline says of parameters and data, as the ValueError that scikit-learn's tools expect."""
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
        pool: str = "mean",
        epochs: int | float = 50,
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        pretrain_epochs: int | float = 50,
        pretrain_learning_rate: float = 1e-3,
        pretrain_batch_size: int = 32,
        validation_fraction: float = 0.2,
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
        self.pool = pool
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.pretrain_epochs = pretrain_epochs
        self.pretrain_learning_rate = pretrain_learning_rate
        self.pretrain_batch_size = pretrain_batch_size
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.runs_dir = runs_dir
        self.verbose = verbose

    # -------------------------------------------------------------------------------------------------------- fitting

    def fit(self: Fitted, X: Any, y: Any, groups: Any = None, X_val: Any = None, y_val: Any = None) -> Fitted:
        """Train on X, select on validation rows: X_val and y_val, or a part of X that is drawn by `random_state`, with
        equal shares of every class and whole `groups`.

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
            strata = targets if targets.ndim == 1 else np.zeros(len(rows), np.int64)
            held = validation_rows(rows, strata, groups, self.validation_fraction, seed)
            train, val = np.flatnonzero(~held), np.flatnonzero(held)
        elif X_val is None or y_val is None:
            raise ValueError("X_val and y_val go together; one of them is missing")
        self.encoding_ = Encoding.learn(rows.take(train), self.tokens, self.max_length)
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
        data = TaskData(input, self._target(), train, val, empty, length=length)
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
                if self.runs_dir is None:
                    temporary = tempfile.TemporaryDirectory(prefix="spt-", ignore_cleanup_errors=True)
                    root = Path(stack.enter_context(temporary))
                else:
                    root = Path(self.runs_dir).resolve()
                gpus = [] if self.device == "cpu" else range(torch.cuda.device_count())
                stack.enter_context(torch.random.fork_rng(gpus))  # the program's own random numbers go on as they were
                job = self._job(data, root, seed)
                self.result_: Result = run_stage(job, root, self._runtime())
                opened = TrainedModel.open(root / job.name)
                self.model_ = replace(opened, network=opened.network.cpu(), classes=self._class_names())
                self.run_ = None if self.runs_dir is None else root / job.name
        except Interrupted as error:  # which a search, that goes on after errors, must not take for one
            raise KeyboardInterrupt from error
        except Stopped:
            signal.raise_signal(signal.SIGTERM)
            raise

    def _job(self, data: TaskData, root: Path, seed: int) -> Job:
        folder = root / ".data" / rows_hash(data)
        prepare_once(folder, lambda: data)
        recipe, identities = self._recipe(folder, len(data.train))
        resolved = ResolvedRecipe(type(self).__name__, recipe, {}, identities, data=rows_hash(data))
        return Job(resolved, "finetune", seed, Job(resolved, "pretrain", seed) if self.self_pretrain else None)

    def _recipe(self, folder: Path, rows: int) -> Any:
        def train(epochs: int | float, learning_rate: float, batch_size: int) -> dict[str, Any]:
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
                "train": train(self.pretrain_epochs, self.pretrain_learning_rate, self.pretrain_batch_size),
            },
            "finetune": {
                "objective": self._supervised(),
                "head": {"pool": self.pool},
                "train": train(self.epochs, self.learning_rate, self.batch_size),
            },
        }
        anchor_paths(recipe, Path.cwd())
        known = find_plugin("models", self.model).module.Config.model_fields
        recipe["model"] = {key: value for key, value in SMALL.items() if key in known} | recipe["model"]
        return resolve(recipe, type(self).__name__)

    def _check_parameters(self) -> None:
        """What the recipe cannot tell, or would tell in other words."""
        if not isinstance(self.model, str):
            raise EstimatorError(f"model={self.model!r}: the name of a model is expected (spt list models)")
        if not 0 < self.validation_fraction < 1:
            raise EstimatorError(f"validation_fraction={self.validation_fraction}: a share in (0, 1) is expected")
        if self.max_length is not None and self.max_length < 1:
            raise EstimatorError(f"max_length={self.max_length}: at least one step is expected")
        if self.device not in ("auto", "cpu"):
            raise EstimatorError(f"device={self.device!r}: 'auto' or 'cpu' is expected")
        for name in ("epochs", "batch_size", "pretrain_epochs", "pretrain_batch_size"):
            if not getattr(self, name) > 0:
                raise EstimatorError(f"{name}={getattr(self, name)}: a positive number is expected")

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
        rows = read_rows(X, self)
        if reset:
            for name in ("n_features_in_", "feature_names_in_"):
                self.__dict__.pop(name, None)
        if rows.columns and (reset or hasattr(self, "n_features_in_")):
            _check_features(self, X, reset)
        return rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _more_tags(self) -> dict[str, Any]:  # of scikit-learn 1.5
        return {"requires_y": True, "X_types": ["2darray", "3darray"], "preserves_dtype": []}

    # -------------------------------------------------------------------------------------------------------- answers

    def transform(self, X: Any) -> NDArray[np.float32]:
        """(n, D) The trained network's features of every sequence, pooled as its head is given them."""
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

        Raises OutputError where it cannot be written, and UsageError for parameters that JSON cannot hold.
        """
        check_is_fitted(self, "model_")
        from spt.inference.export import write_model

        write_model(self.model_, Path(path), texts={FILE: state.to_text(self)})

    @classmethod
    def load(cls: type[Fitted], path: str | Path, *, trust_code: bool = False) -> Fitted:
        """The fitted estimator that `save` wrote; `trust_code` lets a model file of one's own in the folder run.

        Raises UsageError where there is none or it is one of another class, CheckpointError where it is damaged.
        """
        folder = Path(path)
        estimator: Any = cls()
        state.restore(estimator, folder / FILE)
        estimator.model_ = TrainedModel.open(folder, trust_code=trust_code)
        return estimator


class SequenceClassifier(ClassifierMixin, SequenceEstimator):  # type: ignore[misc]
    """Classify sequences: self-pretrain a network on the training inputs, finetune it on their labels; or, with
    `self_pretrain=False`, train it from scratch.

        model = spt.SequenceClassifier(epochs=20).fit(X, y)
        model.predict(X_new), model.predict_proba(X_new), model.transform(X_new)

    X is an array (n, L) or (n, L, C), a list of arrays of any lengths, texts, or a data frame of numbers or of arrays.
    Raises ValueError for parameters and data that cannot be fitted.
    """

    def _learn_targets(self, y: Any) -> NDArray[np.int64]:
        labels = self._labels(y)
        self.classes_, classes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {_shown(self.classes_[0])}; a classification needs two")
        return classes.astype(np.int64)

    def _encode_targets(self, y: Any) -> NDArray[np.int64]:
        labels = self._labels(y)
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(f"y_val has the label {_shown(unknown[0])}, which y does not have")
        return np.searchsorted(self.classes_, labels).astype(np.int64)

    def _labels(self, y: Any) -> NDArray[Any]:
        _require(self, y)
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
        return labels

    def _target(self) -> Classes:
        return Classes(len(self.classes_))

    def _class_names(self) -> tuple[str, ...]:
        """As `spt predict` writes them."""
        return tuple(map(str, self.classes_))

    def _supervised(self) -> dict[str, Any]:
        return {"name": "supervised"}

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """(n, number of classes) Probabilities, in the order of `classes_`."""
        scores = self._answer("logits", X).astype(np.float64)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> NDArray[Any]:
        """(n,) The likeliest class of every sequence."""
        scores = self._answer("logits", X)
        return self.classes_[scores.argmax(axis=1)]


class SequenceRegressor(RegressorMixin, SequenceEstimator):  # type: ignore[misc]
    """Predict one number or several from sequences, as `SequenceClassifier` predicts labels.

        model = spt.SequenceRegressor(epochs=20).fit(X, y)
        model.predict(X_new), model.transform(X_new)

    Raises ValueError for parameters and data that cannot be fitted.
    """

    def _learn_targets(self, y: Any) -> NDArray[np.float64]:
        targets = self._numbers(y)
        self.n_outputs_ = None if targets.ndim == 1 else targets.shape[1]
        return targets.reshape(len(targets), -1)

    def _encode_targets(self, y: Any) -> NDArray[np.float64]:
        targets = self._numbers(y)
        if targets.shape[1:] != (() if self.n_outputs_ is None else (self.n_outputs_,)):
            raise ValueError(f"y_val has the shape {targets.shape}, unlike y")
        return targets.reshape(len(targets), -1)

    def _numbers(self, y: Any) -> NDArray[np.float64]:
        _require(self, y)
        targets = check_array(y, ensure_2d=False, input_name="y", estimator=self)
        if targets.ndim not in (1, 2):
            raise ValueError(f"y has the shape {targets.shape}; (n,) or (n, targets) is expected")
        return targets.astype(np.float64)

    def _target(self) -> Reals:
        return Reals(self.n_outputs_ or 1)

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
        """(n,) or, of several targets, (n, targets)."""
        numbers = self._answer("predict", X).astype(np.float64)
        return numbers[:, 0] if self.n_outputs_ is None else numbers


def _shown(label: Any) -> str:
    return repr(label.item() if isinstance(label, np.generic) else label)


def _require(estimator: BaseEstimator, y: Any) -> None:
    if y is None:
        raise ValueError(
            f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None."
        )


def _check_features(estimator: Any, X: Any, reset: bool) -> None:
    """Remember number and names of the features, or compare them."""
    try:
        from sklearn.utils.validation import validate_data
    except ImportError:  # scikit-learn 1.5
        estimator._check_feature_names(X, reset=reset)
        estimator._check_n_features(X, reset=reset)
    else:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
