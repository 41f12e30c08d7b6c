"""A fitted estimator as JSON: its parameters, and what it learned besides the network."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from spt import __version__
from spt.errors import CheckpointError, UsageError, one_line
from spt.estimators.encoding import Encoding
from spt.runs.result import Result

FORMAT = 1
PLACES = ("runs_dir", "random_state")  # parameters of the machine, or that may be generators


class Labels(BaseModel):
    """An array of labels or names: their type and values."""

    model_config = ConfigDict(extra="forbid")

    dtype: str
    values: list[bool] | list[int] | list[float] | list[str]

    @staticmethod
    def of(array: NDArray[Any]) -> "Labels":
        if array.dtype.kind not in "biufUO" or (array.dtype.kind == "O" and not all(isinstance(v, str) for v in array)):
            raise UsageError(f"labels of type {array.dtype} cannot be saved; give numbers or texts, or pickle it")
        return Labels(dtype=array.dtype.str, values=array.tolist())

    def array(self) -> NDArray[Any]:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biufUO":
            raise ValueError(f"labels of type {dtype}")
        return np.array(self.values, dtype)


class State(BaseModel):
    """The file's content."""

    model_config = ConfigDict(extra="forbid")

    format: int
    spt: str
    estimator: str
    parameters: dict[str, Any]
    encoding: Encoding
    result: Result
    classes: Labels | None = None
    outputs: int | None = None
    features: int | None = None
    feature_names: Labels | None = None


def to_text(estimator: Any) -> str:
    """Raises UsageError for what JSON cannot hold."""
    parameters = {name: value for name, value in estimator.get_params().items() if name not in PLACES}
    if isinstance(parameters.get("class_weight"), Mapping):  # JSON's keys are text, classes may be numbers
        parameters["class_weight"] = [[*pair] for pair in parameters["class_weight"].items()]
    if isinstance(estimator.random_state, int):
        parameters["random_state"] = estimator.random_state
    classes, names = getattr(estimator, "classes_", None), getattr(estimator, "feature_names_in_", None)
    values = {
        "format": FORMAT,
        "spt": __version__,
        "estimator": type(estimator).__name__,
        "parameters": parameters,
        "encoding": asdict(estimator.encoding_),
        "result": estimator.result_.model_dump(mode="json"),
        "classes": None if classes is None else Labels.of(classes).model_dump(),
        "outputs": getattr(estimator, "n_outputs_", None),
        "features": getattr(estimator, "n_features_in_", None),
        "feature_names": None if names is None else Labels.of(names).model_dump(),
    }
    try:
        return json.dumps(values, indent=2, default=_number) + "\n"
    except TypeError as error:
        raise UsageError(f"a parameter cannot be saved: {one_line(error)}; pickle the estimator instead") from error


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is no number, text, list or dict")


def restore(estimator: Any, path: Path) -> None:
    """Set parameters and fitted attributes from the file. Raises UsageError or CheckpointError."""
    if not path.is_file():
        raise UsageError(f"{path.parent} is not a saved estimator: it has no {path.name}")
    try:
        state = State.model_validate_json(path.read_text(encoding="utf-8"))
        if state.format != FORMAT:
            raise ValueError(f"format {state.format} of spt {state.spt}, this version reads {FORMAT}")
        if state.estimator != type(estimator).__name__:
            raise UsageError(f"{path.parent} holds a {state.estimator}, not a {type(estimator).__name__}")
        weights = state.parameters.get("class_weight")
        restored = {"class_weight": dict(weights)} if isinstance(weights, list) else {}
        estimator.set_params(**state.parameters | restored)
        names = {
            "classes_": None if state.classes is None else state.classes.array(),
            "n_features_in_": state.features,
            "feature_names_in_": None if state.feature_names is None else state.feature_names.array(),
        }
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{path} is damaged: {one_line(error)}") from error
    estimator.encoding_, estimator.result_, estimator.run_ = state.encoding, state.result, None
    if state.classes is None:
        estimator.n_outputs_ = state.outputs
    for name, value in names.items():
        if value is not None:
            setattr(estimator, name, value)
