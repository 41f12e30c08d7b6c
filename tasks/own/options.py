"""What a recipe may say about the user's own data, and which options do not go together."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from spt.tasks.own.transforms import TransformOptions, check_transforms

Layout = Literal["text", "list", "wide", "files", "long"]
HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
PLAIN_NAME = r"^[\w+/-]+(\.[\w+/-]+)*$"  # part of a folder's name: never ..


class Options(TransformOptions):
    path: Path | None = Field(
        None,
        description="a .csv, .tsv, .jsonl, .ndjson, .parquet or .ts file (columns series, label), or a folder of such "
        "files named train, validation, test",
    )
    hub: str | None = Field(
        None,
        description="instead of path: a data set on the Hugging Face hub, owner/name; `spt data prepare` copies it "
        "into the data folder as Parquet files; nothing else downloads",
    )
    hub_config: str | None = Field(
        None, pattern=PLAIN_NAME, description="hub: which of the data set's configurations (null: its only one)"
    )
    revision: str | None = Field(
        None, pattern=PLAIN_NAME, description="hub: a commit, tag or branch (null: the newest at the first copy)"
    )
    layout: Layout | None = Field(
        None,
        description="null: as the columns below say; long: a row is one step of the sequence that id_column names, and "
        "its value columns are channels (with time_column, null means this too)",
    )
    text_column: str | None = Field(None, description="the input is the text in this column")
    list_column: str | None = Field(
        None, description="the input is the list in this column: of numbers, or of equally long lists (channels)"
    )
    list_columns: tuple[str, ...] = Field(
        (),
        strict=False,
        description="the input is the lists of numbers in these columns, equally long within a row: its channels, in "
        "this order",
    )
    value_columns: tuple[str, ...] = Field(
        (), strict=False, description="the input is one number per column, in this order; long: the channels of a step"
    )
    value_prefix: str | None = Field(
        None,
        description="the input is one number per column: all columns whose names begin with this and that have no "
        "other role, in the first file's order",
    )
    file_column: str | None = Field(
        None,
        description="the input is the array in the .npy or .npz file that this column names, relative to the table's "
        "folder, (steps,) or (steps, channels); or a sound (.wav, .flac, .ogg, .mp3) or recording (WFDB, .edf, .bdf)",
    )
    array: str | None = Field(None, description="file_column: which array to read from .npz files that hold several")
    channels: tuple[str, ...] = Field(
        (),
        strict=False,
        description="file_column: which signals of WFDB and EDF files are read, by name, in this order (none: all)",
    )
    unlisted: Literal["refuse", "ignore"] = Field(
        "refuse", description="file_column: what to do when the folder has array files that no row names"
    )
    time_column: str | None = Field(
        None, description="long: time of a step, a number or a date and time (ISO 8601); rows are sorted by it"
    )
    times: Literal["ignore", "steps"] = Field(
        "ignore", description="time_column: only sorts; steps: models that take it get the time since the previous step"
    )
    tokens: Literal["characters", "words", "bytes", "ids"] | None = Field(
        None, description="what the tokens of a text are (null: characters); ids: numbers are tokens (null: values)"
    )
    min_count: int = Field(1, ge=1, description="characters or words seen less often in training are one unknown token")
    max_length: int | None = Field(None, ge=1, description="longest sequence allowed, in steps; null: any")
    truncate: bool = Field(False, description="cut longer sequences after max_length steps instead of refusing them")
    normalise: Literal["standard", "none"] = Field(
        "standard",
        description="values: zero mean and unit variance per channel, over the training rows; none: as they are (for "
        "sounds, full scale is 1)",
    )
    missing: Literal["refuse", "hidden"] = Field(
        "refuse",
        description="empty cells, NaN and null among values and static features: refused, or shown to the model as "
        "missing, in both arms and stages, and never a target of pretraining",
    )
    static_columns: tuple[str, ...] = Field(
        (),
        strict=False,
        description="one number or category per sequence (age, sex), shown to the model with it; long: the same in all "
        "rows of a sequence",
    )
    target: Literal["classes", "real", "labels"] = Field(
        "classes",
        description="what a label is: one of several classes, or a number; labels: any number of labels, even none",
    )
    label_column: str | None = Field(
        None, description="the label; target labels: all that hold, as a list, or as text with label_separator"
    )
    label_columns: tuple[str, ...] = Field(
        (),
        strict=False,
        description="instead of label_column; target real: several numbers; target labels: a column for each label "
        "with 0 or 1, false or true, no or yes",
    )
    label_separator: str | None = Field(
        None, description="target labels: what separates labels in label_column, as in AF;LBBB"
    )
    missing_labels: Literal["refuse", "ignore", "none"] = Field(
        "refuse",
        description="what an empty label cell means: refuse: an error; ignore: not known, such rows are pretrained on, "
        "but neither finetuned on nor scored, and of several numbers or labels each may be missing by itself; none "
        "(label_column with target labels): no label holds",
    )
    per_step: bool = Field(
        False, description="long: every step has a label, or none where the cell is empty (such steps are not scored)"
    )
    id_column: str | None = Field(None, description="names rows in predictions; rows of one id are never split apart")
    group_column: str | None = Field(
        None, description="rows of one group, such as a patient, are never split apart; ids are then unique"
    )
    split_column: str | None = Field(None, description="a single file: train, validation or test, for each row")
    split: Literal["hash", "stratified"] = Field(
        "hash",
        description="how missing splits are drawn from the training rows: each row by a hash of its group, id or "
        "input, so that added rows move no others; or with equal shares of every class, where added rows may move "
        "others",
    )
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="share of the training rows that become validation where the data have none"
    )
    test_fraction: float = Field(
        0.1, gt=0, lt=1, description="share of the training rows that become test where the data have none"
    )
    split_seed: int = Field(0, ge=0, description="seed of the draw of these rows")
    folds: int | None = Field(
        None,
        ge=2,
        description="k-fold splits: number of parts of equal size that the training rows are divided into, by whole "
        "groups (and, with split: stratified, with equal shares of every class); one is the test split, and validation "
        "is drawn from the rest",
    )
    fold: int = Field(0, ge=0, description="folds: which part is the test split, counted from 0")
    pool_splits: bool = Field(
        False, description="ignore the splits that the data name, and draw new ones from all rows"
    )

    @field_validator("path", mode="before")  # after it pydantic's strictness takes no list for a tuple: strict=False
    @classmethod
    def _local(cls, path: Any) -> Any:
        if path == "":
            raise ValueError("is empty; name a file or a folder")
        if isinstance(path, str | Path) and re.search(r"(^|[/\\])[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
            raise ValueError("is an address; download the files and give their folder, or give hub: owner/name")
        return path  # of another type: pydantic refuses it

    @field_validator("label_separator")
    @classmethod
    def _some_text(cls, separator: str | None) -> str | None:
        if separator == "":  # as YAML reads a bare |
            raise ValueError("is empty; in YAML a mark such as | stands in quotes: '|'")
        return separator

    @field_validator("hub")
    @classmethod
    def _hub_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(HUB_NAME, name):
            raise ValueError(f"{name!r} is not the name of a data set on the hub; owner/name is expected")
        return name

    def smoke_sizes(self) -> dict[str, int]:
        return {"max_length": 128} if self.truncate else {}  # windows stay: their labels may be those of seconds

    @model_validator(mode="after")
    def _consistent(self) -> "Options":
        inputs = ("text_column", "list_column", "list_columns", "value_columns", "value_prefix", "file_column")
        given = [name for name in inputs if getattr(self, name) not in (None, ())]
        long, real = self.kind == "long", self.target == "real"
        if (self.path is None) == (self.hub is None):
            raise ValueError("give path, a file or folder, or hub, a data set's name: exactly one of them")
        if self.hub is None and (self.hub_config or self.revision):
            raise ValueError("hub_config and revision are for hub, which is not given")
        if len(given) != 1:
            problem = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"the input is exactly one of {', '.join(inputs)}, but {problem}")
        if self.layout not in (None, self.kind):
            raise ValueError(f"with {given[0]}{' and time_column' * long} the layout is {self.kind}")
        if self.time_column is not None and not long:
            raise ValueError("time_column is for one row a step (long): value_columns or value_prefix")
        if long and self.id_column is None:
            raise ValueError("the long layout needs id_column, which says whose step a row is")
        if self.times == "steps" and self.time_column is None:
            raise ValueError("times: steps needs time_column")
        if self.per_step and not long:
            raise ValueError("per_step is for one row a step (long)")
        if self.file_column is None and (self.array is not None or self.channels or self.unlisted != "refuse"):
            raise ValueError("array, channels and unlisted are for file_column, which is not given")
        if len({*self.channels}) < len(self.channels):
            raise ValueError("channels names a signal twice")
        if self.text_column is not None and self.tokens == "ids":
            raise ValueError("tokens ids are numbers, but text_column is given; list_column holds lists of numbers")
        if self.text_column is None and self.tokens not in (None, "ids"):
            raise ValueError(f"tokens {self.tokens} are made from text_column; else ids or null is possible")
        if self.tokens == "ids" and self.list_columns:
            raise ValueError("tokens: ids is one number a step, but list_columns are channels; give list_column")
        if self.min_count != 1 and not self.coded:
            raise ValueError("min_count is for the characters or words of text_column; it has no effect here")
        if self.normalise == "none" and not self.continuous:
            raise ValueError("normalise is for values; it has no effect on tokens")
        if self.missing == "hidden" and not (self.continuous or self.static_columns):
            raise ValueError("missing: hidden is for values and static features; a token cannot be missing")
        if self.truncate and self.max_length is None:
            raise ValueError("truncate cuts at max_length, which is not given")
        self._check_labels(real)
        self._check_several_labels()
        if real and self.split == "stratified":
            raise ValueError("split: stratified is by class, but the target is real; split: hash is possible")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction and test_fraction together leave no training rows")
        if self.fold >= (self.folds or 1):
            known = "folds is not given" if self.folds is None else f"{self.folds} folds count from 0"
            raise ValueError(f"fold is {self.fold}, but {known}")
        check_transforms(self)
        for column, roles in Counter([*self.inputs, *self.labels, *self.others]).items():
            if roles > 1:
                raise ValueError(f"the column {column!r} is given twice; a column has one role")
        return self

    def _check_labels(self, real: bool) -> None:
        if self.target == "classes" and (self.label_column is None or self.label_columns):
            raise ValueError("target classes needs label_column; label_columns is for target: real and target: labels")
        if self.target != "classes" and (self.label_column is None) == (not self.label_columns):
            raise ValueError(f"target {self.target} needs label_column or label_columns, one of the two")

    def _check_several_labels(self) -> None:
        one = self.target == "labels" and not self.label_columns  # column of several labels
        if self.label_separator is not None and not one:
            raise ValueError("label_separator is for target: labels with label_column; it has no effect here")
        if self.missing_labels == "none" and not one:
            raise ValueError(
                "missing_labels: none is for target: labels with label_column; refuse or ignore is possible"
            )
        if self.missing_labels == "ignore" and self.per_step:
            raise ValueError("per_step: steps without a label are never scored; leave out missing_labels")

    @property
    def kind(self) -> Layout:
        if self.text_column is not None:
            return "text"
        if self.list_column is not None or self.list_columns:
            return "list"
        if self.file_column is not None:
            return "files"
        return "long" if self.layout == "long" or self.time_column is not None else "wide"

    @property
    def input_column(self) -> str | None:
        """The column that holds a whole sequence, if one does."""
        return self.text_column or self.list_column or self.file_column

    @property
    def inputs(self) -> list[str]:
        """Input columns by name; those of a prefix are found in the file."""
        return [*self.value_columns, *self.whole_columns]

    @property
    def whole_columns(self) -> list[str]:
        """Input columns whose cells are whole sequences, or whole channels of one."""
        return [*self.list_columns, *([self.input_column] if self.input_column is not None else [])]

    def has_prefix(self, name: str) -> bool:
        """Whether value_prefix makes this column an input."""
        prefix = self.value_prefix
        return prefix is not None and name.startswith(prefix) and name not in {*self.labels, *self.others}

    @property
    def label_gaps(self) -> bool:
        """May a cell of a label be empty?"""
        return self.per_step or self.missing_labels != "refuse"

    @property
    def labels(self) -> list[str]:
        return list(self.label_columns) or ([self.label_column] if self.label_column is not None else [])

    @property
    def others(self) -> list[str]:
        """Columns that are neither input nor label."""
        names = (self.id_column, self.group_column, self.time_column, self.split_column, *self.static_columns)
        return [name for name in names if name is not None]

    @property
    def unit(self) -> Literal["group", "id"] | None:
        """What is never split apart; None: rows with the same input."""
        return "group" if self.group_column is not None else "id" if self.id_column is not None else None

    @property
    def continuous(self) -> bool:
        return self.text_column is None and self.tokens is None

    @property
    def gaps(self) -> bool:
        """May values be missing?"""
        return self.missing == "hidden" and self.continuous

    @property
    def coded(self) -> bool:
        """Whether stored tokens are codes, whose vocabulary is that of the training rows in use."""
        return self.text_column is not None and self.tokens != "bytes"

    @property
    def storage(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.continuous else np.uint8 if self.tokens == "bytes" else np.int32)

    @property
    def title(self) -> str:
        """The data's name, for a message."""
        return self.path.name if self.path is not None else str(self.hub)

    def too_long(self, place: str, length: int) -> str:
        return (
            f"{place}: the sequence has {length:,} steps, max_length is {self.max_length:,}; raise it, or cut with "
            "truncate: true"
        )
