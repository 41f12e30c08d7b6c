"""`result.json`: everything a report needs of one finished run."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCHEMA = 1  # of result.json; raised when a field changes its meaning
LARGEST = 1e100  # no score or cost is larger: squares of float32 numbers are not, and squares of this still are floats
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, le=LARGEST)]


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


class _Environment(BaseModel):
    """The fields of a result's environment that readers rely on."""

    commit: str | None = None
    processes: int = 1
    threads: int | None = None
    packages: dict[str, str] = {}


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
        None  # score of the best constant answer on the test split, where defined
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
    notes: tuple[str, ...] = ()  # what a reader of the scores must know about the data and the conventions
    repeated: dict[str, Count] = {}  # rows of validation and test whose input also occurs in training
    batch_size: Count
    precision: str
    environment: dict[str, Any]  # versions, device: the short form of env.json

    @field_validator("environment")
    @classmethod
    def _readable(cls, environment: dict[str, Any]) -> dict[str, Any]:
        _Environment.model_validate(environment)
        json.dumps(environment, allow_nan=False)
        return environment

    @model_validator(mode="after")
    def _total_holds_own(self) -> "Result":
        if any(
            getattr(self.total, name) < getattr(self.own, name) for name in ("steps", "examples", "flops", "seconds")
        ):
            raise ValueError("the total cost is below the run's own")
        return self
