"""New rows for a trained model, from files: read with its own task's options, which the command line may change."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from spt.config.overrides import parse_overrides
from spt.config.validation import validate_values, validation_messages
from spt.data.dataset import open_task
from spt.errors import DataError, UsageError, did_you_mean
from spt.inference.trained_model import TrainedModel
from spt.tasks.base import Labels, Reals, Split, TaskData, Tokens, Values
from spt.tasks.own.new_rows import ARRAYS, ArrayReader, Known, NewOptions, NewReader, open_rows
from spt.tasks.own.recordings import FULL_SCALE
from spt.tasks.own.static import StaticColumn
from spt.tasks.own.transforms import TransformOptions, plan
from spt.training.load_run import check_has_rows, read_finished_run

INPUTS = ("text_column", "list_column", "list_columns", "value_columns", "value_prefix", "file_column")
# What belongs to an input, and goes when another is named.
OF_INPUTS = ("layout", "array", "channels", "time_column", "times")
OF_TABLES = ("id_column", "static_columns", "missing")  # what no array has, or says by NaN
KEYS = (
    *INPUTS,
    "layout",
    "array",
    "channels",
    "time_column",
    "id_column",
    "label_column",
    "label_columns",
    "label_separator",
    "missing_labels",
    "max_length",
    "truncate",
)
OF_TRAINING = {  # options that have no meaning for rows which no split is drawn of
    *("name", "path", "hub", "hub_config", "revision", "unlisted", "min_count", "normalise", "group_column"),
    *("split_column", "split", "validation_fraction", "test_fraction", "split_seed"),
    *("subset_fraction", "subset_rows", "subset_vocabulary", "subset_seed", "stratified", "max_rows"),
}


@dataclass(frozen=True)
class NewData:
    """Rows to be answered, some thousand at a time; their notes are complete when all have been read."""

    reader: NewReader | ArrayReader
    options: NewOptions

    def chunks(self) -> Iterator[Split]:
        with reading_errors():
            yield from self.reader.chunks()

    @property
    def labelled(self) -> bool:
        """Has the file labels? Known when the first rows have been read."""
        return bool(self.reader.labelled)

    def notes(self) -> list[str]:
        return self.reader.counts.sentences(self.options.max_length)


def read_file(model: TrainedModel, data: Path, changes: Iterable[str], *, labels: bool) -> NewData:
    """The rows of a table, a folder of tables, or an array, for this model; `changes` are `option=value`.

    Raises UsageError for options that do not fit, DataError for what is in the files, at once or while they are read.
    """
    if model.sequences != 1:
        raise UsageError(
            "this model answers pairs of sequences, which are not read from files; --split answers its own"
        )
    given = _parse(changes)
    if not data.exists():
        raise DataError(f"there is no file or folder {data}")
    labels = labels and model.target is not None
    options = _options(model, data, given, labels)
    needed = [name for key in ("label_column", "label_columns") if given.get(key) for name in _names(given[key])]
    with reading_errors():
        return NewData(open_rows(options, _known(model, options, given, labels), needed), options)


def read_split(run: Path, split: Literal["train", "val", "test"]) -> tuple[Split, TaskData]:
    """The rows of a split that a finished run's own task has, labelled, and the whole task."""
    if not (run / "recipe.yaml").is_file():
        raise UsageError(f"--split is for a run's folder, whose data it names; {run} is none: give a file or folder")
    _, _, job = read_finished_run(run)
    data = open_task(job.resolved.recipe.task)
    check_has_rows(run.name, data, split)
    rows = data.splits[split]
    return rows if rows.contiguous or rows.shares_steps else rows.packed(), data


@contextlib.contextmanager
def reading_errors() -> Iterator[None]:
    """Turn complaints of a reader into DataError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            reason = f"{error.filename} cannot be read: {error.strerror}"
        raise DataError(reason) from error
    except MemoryError as error:
        raise DataError("there is no memory for its rows; give them in several files") from error


# ------------------------------------------------------------------------------------------------------------ options


def _parse(changes: Iterable[str]) -> dict[str, Any]:
    changes = list(changes)
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals:
            raise UsageError(f"{change}: one file or folder is expected, then option=value (text_column=body)")
        if key not in KEYS and key != "tokens":
            as_then = ", which are read as training's were; leave it out" if key in NewOptions.model_fields else ""
            raise UsageError(f"{key} is no option for new rows{as_then or did_you_mean(key, KEYS)}")
    return parse_overrides(changes)


def _options(model: TrainedModel, data: Path, given: Mapping[str, Any], labels: bool) -> NewOptions:
    """The options of training, without those of splits, under these changes."""
    of_training = {key: value for key, value in model.task.items() if key in NewOptions.model_fields and model.reading}
    values = {key: value for key, value in of_training.items() if key not in OF_TRAINING}
    if not model.reading:
        kinds = {Reals: "real", Labels: "labels"}
        values = {"target": kinds.get(type(model.target), "classes")}
        values |= {name: model.task[name] for name in TransformOptions.model_fields if name in model.task}
        values = {key: value for key, value in values.items() if key not in OF_TRAINING}
        if isinstance(model.input, Tokens):
            values["tokens"] = "ids"
        elif model.input.missing:
            values["missing"] = "hidden"
    is_array = data.suffix.lower() in ARRAYS and not data.is_dir()
    if is_array or any(given.get(name) for name in INPUTS):
        values = {key: value for key, value in values.items() if key not in (*INPUTS, *OF_INPUTS)}
    values |= given
    if is_array:  # whose rows no column holds
        labels, tokens = False, {"tokens": "ids"} if isinstance(model.input, Tokens) else {}
        values = {key: value for key, value in values.items() if key not in (*INPUTS, *OF_TABLES, "tokens")}
        values |= {"file_column": "rows", **tokens}
    values = {key: value for key, value in values.items() if value is not None}
    if not labels:
        values = {
            key: value for key, value in values.items() if key not in ("label_column", "label_columns", "per_step")
        }
    if not values.get("label_column") and not values.get("label_columns"):
        values = {key: value for key, value in values.items() if key not in ("label_at", "label_rate")}
    if values.get("file_column"):
        values["unlisted"] = "ignore"
    try:
        options = validate_values(NewOptions, {**values, "path": str(data)})
    except ValidationError as error:
        problem = "; ".join(validation_messages(NewOptions, error))
        if "the input is exactly one of" in problem and not any(values.get(name) for name in INPUTS):
            problem = f"say which column of {data.name} is the input: list_column=…, value_columns=[a, b], …"
        raise UsageError(problem) from None
    if not is_array:
        _check_kind(model, options)
    return options


def _check_kind(model: TrainedModel, options: NewOptions) -> None:
    """Raise UsageError unless the files hold what the model takes: texts, token ids or numbers."""
    input = model.input
    texts = bool(model.task.get("text_column")) and bool(model.reading)
    if options.text_column is not None and not texts:
        raise UsageError("text_column is for models that were trained on texts; this one takes numbers")
    if texts and options.text_column is None:
        raise UsageError("this model was trained on texts; name their column by text_column=…")
    if texts and options.tokens != model.task.get("tokens"):
        raise UsageError(f"this model's tokens are {model.task.get('tokens') or 'characters'}; leave out tokens")
    if isinstance(input, Values) and not options.continuous:
        raise UsageError(f"this model takes {input.channels} numbers a step, not tokens; leave out tokens")
    if isinstance(input, Tokens) and options.continuous:
        raise UsageError("this model takes tokens, not values; say tokens=ids")
    per_step = model.target is not None and model.target.per_step
    if per_step and options.labels and not options.per_step:
        raise UsageError("this model answers every step; of such rows labels are not read: say label_column=")


def _known(model: TrainedModel, options: NewOptions, given: Mapping[str, Any], labels: bool) -> Known:
    read, files = model.reading, model.reading.get("files", {})
    from_files = bool(read) and model.task.get("file_column") is not None
    return Known(
        input=model.input,
        target=model.target if labels else None,
        interval=model.interval / float(plan(options, read.get("rate")).apart),
        classes=_class_labels(model),
        words=model.words,
        columns=() if "value_prefix" in given else tuple(read.get("inputs", ())),
        times=model.timed,
        kind=_kind(files) if from_files else None,
        signals=tuple(files.get("signals", ())),
        rate=files.get("rate") if from_files else None,
        scale=(files["scale"][0], files["scale"][1]) if from_files else FULL_SCALE,
        static=tuple(map(StaticColumn.of, read.get("static", ()))),
        steps_a_second=read.get("rate"),
    )


def _kind(files: Mapping[str, Any]) -> str:
    """Of the files a model was trained on; `sound` stands in runs from before there were several kinds."""
    return str(files.get("kind") or ("sound" if files.get("sound") else "array"))


def _class_labels(model: TrainedModel) -> tuple[str, ...]:
    """What stands in a file for each class: its label, else its number."""
    count = getattr(model.target, "count", 0)
    return model.classes or tuple(map(str, range(count)))


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]
