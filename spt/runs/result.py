"""`result.json`: everything a report needs of one finished run."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from spt.errors import displayable, one_line

SCHEMA = 1  # of result.json; raised when a field changes its meaning
LARGEST = 1e100  # no score or cost is larger: squares of float32 numbers are not, and squares of this still are floats
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, le=LARGEST)]
ROUNDING = 1e-6  # by which a computed score may pass its bounds
Share = Annotated[float, Field(ge=-ROUNDING, le=1 + ROUNDING)]
Loss = Annotated[float, Field(ge=-ROUNDING, le=LARGEST)]
BINS = 15  # of probabilities, in a reliability diagram


Stop = Literal["budget", "patience", "time"]  # what ended a training


class Ledger(BaseModel):
    """What a computation cost. Ledgers add up, field by field; the peak is the larger one."""

    model_config = ConfigDict(frozen=True)

    steps: Count = 0  # optimiser steps
    examples: Count = 0  # training examples shown, repeats counted; a pair is one
    positions: Count = 0  # valid (not padding) positions of those sequences
    flops: Amount = 0.0  # analytic training operations: forward plus backward, evaluation not included
    operations: dict[str, Amount] = {}  # the same by kind (linear, attention, …); empty where a result is older
    seconds: Amount = 0.0  # wall time of the run, evaluation included, interruptions not
    device_seconds: Amount = 0.0  # wall time times the number of devices
    peak_bytes: Count = 0  # device memory on an accelerator, resident memory of the process on a CPU

    def __add__(self, other: "Ledger") -> "Ledger":
        a, b = self.operations, other.operations
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in type(self).model_fields
            if name not in ("operations", "peak_bytes")
        }
        operations = {kind: a.get(kind, 0.0) + b.get(kind, 0.0) for kind in (*a, *b)}
        # Not validated: a sum may exceed the limits of a result's fields.
        return Ledger.model_construct(**sums, operations=operations, peak_bytes=max(self.peak_bytes, other.peak_bytes))


class SplitRecord(BaseModel):
    """Identity of one split: hashes over its rows, in order."""

    model_config = ConfigDict(frozen=True)

    rows: Count
    inputs: str  # hash of every row's input
    targets: str | None = None  # hash of the labels; None where the stage has none
    recordings: Count | None = None  # where rows are windows whose answers are averaged: how many are scored

    @property
    def scored(self) -> int:
        """How many answers a score is of."""
        return self.rows if self.recordings is None else self.recordings

    @model_serializer(mode="wrap")
    def _as_before(self, write: Callable[[Any], Any]) -> dict[str, Any]:
        """Without recordings where there are none, as records were before there could be."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "recordings" or value is not None}


class ReliabilityBin(BaseModel):
    """Answers whose probability lies in one part of [0, 1]; the means are 0 where there are none."""

    model_config = ConfigDict(frozen=True)

    count: Count
    confidence: Share  # mean probability of the answer given
    accuracy: Share  # of right ones


class ReliabilityScores(BaseModel):
    """How far probabilities are from what comes true."""

    model_config = ConfigDict(frozen=True)

    log_loss: Loss
    brier: Loss  # sum of squares over all classes, mean over answers
    ece: Share  # expected calibration error of the answer given
    bins: Annotated[tuple[ReliabilityBin, ...], Field(min_length=BINS, max_length=BINS)]  # of equal width


class Calibration(BaseModel):
    """A temperature that validation answers chose, and test probabilities before and after it."""

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(gt=0)]
    fitted: Count  # validation answers
    at_limit: bool = False  # does it lie at an end of its range, as where every validation answer is right?
    before: ReliabilityScores | None = None  # None without test rows
    after: ReliabilityScores | None = None


class GroupScore(BaseModel):
    """A group of test rows in the compared metric."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, AfterValidator(displayable)]
    rows: Count
    score: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None  # None: not defined, as areas of rows of one class


_BOUNDS = {  # of metrics: what no score of that name can be beyond
    **dict.fromkeys(("accuracy", "accuracy_macro", "balanced_accuracy", "exact_match", "auroc", "auprc"), (0.0, 1.0)),
    **dict.fromkeys(("f1", "f1_macro", "f1_weighted", "f1_micro"), (0.0, 1.0)),
    **dict.fromkeys(("mcc", "spearman"), (-1.0, 1.0)),
    **dict.fromkeys(("mae", "mse", "mape", "log_loss", "perplexity", "bits_per_byte"), (0.0, math.inf)),
    "r2": (-math.inf, 1.0),
}


def check_scores(scores: Mapping[str, float | None]) -> None:
    """Raise ValueError for a score that its metric cannot have."""
    for name, score in scores.items():
        low, high = _BOUNDS.get(name, (-math.inf, math.inf))
        if score is None:
            continue
        if not low - ROUNDING <= score <= high + ROUNDING or LARGEST < abs(score) < math.inf:
            raise ValueError(f"{name} is {score:g}, which no {name} can be")


def read_problem(error: Exception) -> str:
    """Why a file is no result, in a few words."""
    if not isinstance(error, ValidationError):
        return one_line(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"].removeprefix("Value error, ")


class _Environment(BaseModel):
    """The fields of a result's environment that readers rely on."""

    commit: str | None = None
    processes: int = 1
    threads: int | None = None
    packages: dict[str, str] = {}


NOT_SELF_PRETRAINING = "not self-pretraining"  # how the note begins that says so


class Result(BaseModel):
    """Everything a report needs of one finished run."""

    model_config = ConfigDict(frozen=True)

    format: int = SCHEMA
    key: str
    stage: Literal["pretrain", "finetune"]
    recipe: str  # the recipe's name, for people
    task: str
    model: str
    seed: int
    parent: str | None = None  # key of the pretraining run whose weights this one started from
    settings: str  # hash of everything but seed and parent: equal for the seeds of one configuration
    smoke: bool = False
    metric: str  # what is compared: accuracy, mse, bits_per_byte …
    selected_by: str  # the validation metric that picked the checkpoint
    higher_is_better: bool
    chance: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = (
        None  # test accuracy of always answering the commonest training class; None for other metrics
    )
    val: dict[str, float]  # of the selected checkpoint
    test: (
        dict[str, float] | None
    )  # of the selected checkpoint, scored once; None after pretraining and without test rows
    best_step: Annotated[int, Field(gt=-(2**63), lt=2**63)]
    stop: Stop
    parent_stop: Stop | None = None  # what ended the pretraining; None without one, and where a result is older
    own: Ledger
    total: Ledger  # own plus the parent's
    parameters: dict[str, Count]  # encoder, backbone, head, total
    data: dict[str, SplitRecord]
    classes: tuple[str, ...] = ()  # what they are called; () where the data do not say
    confusion: tuple[tuple[Count, ...], ...] = ()  # test answers by true class and by the one said, of up to 30 classes
    calibration: Calibration | None = None  # of a classifier; None where a result is older
    groups: tuple[GroupScore, ...] = ()  # of the test rows, where the data name some
    notes: tuple[str, ...] = ()  # what a reader of the scores must know about the data and the conventions
    repeated: dict[str, Count] = {}  # rows of validation and test whose input also occurs in training
    batch_size: Count
    precision: str
    environment: dict[str, Any]  # versions, device: the short form of env.json
    split: str | None = Field(None, exclude=True)  # of the study that it is read for; no part of the file

    @property
    def test_share(self) -> float:
        """Of the rows that are trained, selected or tested on, those of the test split."""
        return self.data["test"].rows / sum(part.rows for part in self.data.values())

    @field_validator("recipe", "task", "model", "metric", "selected_by", "classes", "notes")
    @classmethod
    def _displayable(cls, value: Any) -> Any:
        return tuple(map(displayable, value)) if isinstance(value, tuple) else displayable(value)

    @field_validator("environment")
    @classmethod
    def _readable(cls, environment: dict[str, Any]) -> dict[str, Any]:
        _Environment.model_validate(environment)
        json.dumps(environment, allow_nan=False)
        return environment

    @model_validator(mode="after")
    def _scores_are_possible(self) -> "Result":
        for scores in (self.val, self.test or {}, {self.metric: self.chance}):
            check_scores(scores)
        for group in self.groups:
            check_scores({self.metric: group.score})
        return self

    @model_validator(mode="after")
    def _total_holds_own(self) -> "Result":
        if any(
            getattr(self.total, name) < getattr(self.own, name) for name in ("steps", "examples", "flops", "seconds")
        ):
            raise ValueError("the total cost is below the run's own")
        return self
