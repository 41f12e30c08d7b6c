"""Rare classes and the positive one, as options of the command line: what they say to the recipes, and where they do
not fit the label."""

from dataclasses import dataclass
from typing import Any

from spt.errors import UsageError
from spt.tasks.base import Classes, TaskData


@dataclass(frozen=True)
class ClassOptions:
    """What the command line says of classes and labels; None: nothing."""

    positive: str | None = None  # the class that f1, auroc and auprc are of
    weights: str | dict[str, float] | None = None  # in the training loss: balanced, or of labels by name
    sampling: str | None = None  # balanced, or every row once an epoch

    @property
    def given(self) -> dict[str, Any]:
        """What was given, by its option's name."""
        values = {"positive": self.positive, "class-weights": self.weights, "balanced-sampling": self.sampling}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def objective(self) -> dict[str, Any]:
        """Options of the objective `supervised`."""
        values = {"positive": self.positive, "class_weights": self.weights}
        return {name: value for name, value in values.items() if value is not None}

    def check_label(self, numbers: bool, per_step: bool) -> None:
        """Raise UsageError where the label is none of classes, or where every step has one and rows cannot be drawn
        by it."""
        if self.given and numbers:
            raise UsageError(f"--{next(iter(self.given))} is for classes and labels, but here numbers are predicted")
        if self.sampling is not None and per_step:
            raise UsageError(
                "--balanced-sampling needs a class for every sequence, but here every step has one; --class-weights is "
                "possible"
            )

    def check_names(self, data: TaskData) -> None:
        """Raise UsageError for names of no class or label."""
        if self.positive is not None and not isinstance(data.target, Classes):
            raise UsageError("--positive is one of several classes, but here any number of labels may hold")
        named = {"positive": [self.positive] if self.positive is not None else []}
        named["class-weights"] = list(self.weights) if isinstance(self.weights, dict) else []
        for option, names in named.items():
            if unknown := [name for name in names if name not in data.class_names]:
                known = ", ".join(data.class_names[:12]) + ", …" * (len(data.class_names) > 12)
                raise UsageError(f"--{option}: there is no label {unknown[0]!r} in the training rows; there: {known}")


def given_weights(text: str | None) -> str | dict[str, float] | None:
    """Weights as the command line has them. Raises UsageError."""
    if text is None or text.strip() == "balanced":
        return None if text is None else "balanced"
    weights = dict[str, float]()
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        try:
            weights[name.strip()] = float(number)
        except ValueError:
            name = ""
        if not name.strip() or not 0 < weights[name.strip()] < float("inf"):
            raise UsageError(
                f"--class-weights {text}: balanced is expected, or a number above 0 for one label or several, as in "
                "rare=5,usual=1"
            )
    return weights
