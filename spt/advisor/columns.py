"""What the user's columns are for: input, label, id, time, group; what is ambiguous is asked, never guessed.

The answer depends on names and contents of the columns, not on the order of rows.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from spt.advisor.table import Column, Table, known
from spt.errors import DataError, UsageError
from spt.tasks.files import SPLITS
from spt.tasks.own.parsing import YES_OR_NO
from spt.tasks.own.transforms import steps_a_label

DataKind = Literal["text", "list", "wide", "long", "files"]

# Names by how likely the role is, the likeliest first.
LABELS = (
    ("label", "labels"),
    ("class", "target", "y", "answer"),
    ("category", "outcome", "diagnosis", "sentiment", "condition", "disease", "activity", "event", "state", "status"),
    ("rating", "stars", "score", "gender", "sex", "genre", "topic", "language", "type", "kind", "pitch", "digit"),
)
GROUPS = (
    ("group", "groups", "subject", "patient", "speaker", "user", "person", "participant", "volunteer"),
    ("author", "customer", "animal", "donor", "client", "player", "driver", "family", "house", "machine", "device"),
)
IDS = (
    ("id", "ids", "sequence", "series", "recording", "record", "visit", "trial", "session", "sample", "window"),
    ("case", "stay", "run", "trip", "example", "segment", "episode", "unit"),
)
TIMES = (
    ("time", "timestamp", "datetime", "t", "date_time"),
    ("date", "day", "hour", "minute", "second", "seconds", "minutes", "hours", "ms", "millisecond", "month", "year"),
    ("step", "frame", "position", "index", "tick", "sample_index", "n"),
)
RATES = ("sampling_rate", "sample_rate", "sampling_frequency", "sfreq", "fs")
PARTS = ("split", "subset", "partition", "fold", "set", "part")
TEXTS = (
    (
        "text",
        "body",
        "review",
        "sentence",
        "content",
        "document",
        "sequence",
        "seq",
        "dna",
        "rna",
        "protein",
        "message",
    ),
)

FEWEST = 20  # sequences, of which training, validation and test are made
LONGEST = 4096  # steps; longer sequences are cut
FEW = 20  # values of a number that are classes
SEPARATORS = (";", "|", ",", "/", "+")  # between several labels of a row
SMALL = 500  # sequences; a fifth of them is validation, and a fifth test
NARROW = 4  # numeric columns that are a sequence


class AmbiguousError(UsageError):
    """A question that the data do not answer; `option` does, with one of the choices."""

    def __init__(self, question: str, option: str, choices: Sequence[tuple[str, str]]) -> None:
        self.question, self.option, self.choices = question, option, tuple(choices)
        said = "; ".join(f"{option} {_quoted(value)} ({about})" for value, about in choices[:12])
        super().__init__(f"{question}: {said}{'; …' if len(choices) > 12 else ''}")


@dataclass(frozen=True)
class ColumnRoles:
    """Roles that the command line settles; "none": there is no such column."""

    label: str | None = None  # several with commas between them
    group: str | None = None
    inputs: tuple[str, ...] = ()
    id: str | None = None
    time: str | None = None
    separator: str | None = None  # of several labels in a cell
    kind: DataKind | None = None
    static: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()  # signals of recordings


def data_kind(text: str) -> DataKind:
    kinds: dict[str, DataKind] = {kind: kind for kind in get_args(DataKind)}
    if text not in kinds:
        raise UsageError(f"--kind {text}: one of {', '.join(kinds)} is expected")
    return kinds[text]


@dataclass(frozen=True)
class Decisions:
    """Options of the task `custom`, and why."""

    kind: DataKind
    options: dict[str, Any]
    lines: tuple[str, ...]  # a decision each
    sequences: int
    classes: int | None  # None: real numbers
    units: int  # groups, or sequences: what is never split apart
    longest: int = 0  # steps of a sequence in a list; 0: not known before it is read
    label_period: "LabelPeriod | None" = None  # of labels in time, as far as it is known


class LabelPeriod(NamedTuple):
    """How labels in time lie in their recordings."""

    steps: int  # from one label to the next
    labels: int  # of all recordings
    shortest: int  # steps of a recording


def decide(table: Table, given: ColumnRoles) -> Decisions:
    """Raises AmbiguousError, UsageError for what is given wrongly, DataError for what cannot be compared."""
    return _Search(table, given).decide()


class _Search:
    def __init__(self, table: Table, given: ColumnRoles) -> None:
        self.table, self.given = table, given
        self.columns = table.columns
        self.taken: set[str] = set()
        self.options: dict[str, Any] = {}
        self.lines: list[str] = []
        several = [] if given.label in table.columns else [part.strip() for part in (given.label or "").split(",")]
        self.flags = [self._take(known(table, name, "--label"), "--label") for name in several if len(several) > 1]
        label = None if self.flags else given.label
        for option, name in (("--label", label), ("--group", given.group), ("--id", given.id)):
            if name not in (None, "none"):
                self._take(known(table, str(name), option), option)
        if given.time not in (None, "none"):
            self._take(known(table, str(given.time), "--time"), "--time")
        self.given_inputs = [self._take(known(table, name, "--inputs"), "--inputs") for name in given.inputs]
        self.static = [self._take(known(table, name, "--static"), "--static") for name in given.static]

    def decide(self) -> Decisions:
        self._find_split()
        long = self._find_long()
        if long is None and self.given.time not in (None, "none"):
            raise UsageError(
                f"--time {self.given.time}: a row here is a whole sequence, whose steps no column orders; leave --time "
                "out, or name the column that names the sequences, with --id COL"
            )
        kind: DataKind = "long" if long else self._find_whole_inputs()
        label = self._find_label(None if long is None else long)
        group = self._find_group(long)
        if kind == "list":
            self._find_rate()
        if kind in ("long", "wide"):
            self._find_numbers(long is not None)
        if self.given.channels and kind != "files":
            raise UsageError("--channels names signals of recordings (WFDB, EDF); these data are none")
        if long is None:
            self._find_row_names()
        self._use_static(long)
        unit = None if long is None else long.array
        sequences = self.table.rows if unit is None else int(unit.max()) + 1
        classes = self._describe_label(label, unit)
        self._check(label, unit, sequences, classes)
        self._draw_splits(sequences, classes, group)
        self._say_left_out()
        units = sequences if group is None else group.distinct
        inputs = [*self.options.get("list_columns", ()), self.options.get("list_column")]
        longest = max((max(self.columns[name].lengths, default=0) for name in inputs if name), default=0)
        period = self._label_period(label, inputs) if "label_at" in self.options else None
        return Decisions(kind, self.options, tuple(self.lines), sequences, classes, units, longest, period)

    # ------------------------------------------------------------------------------------------------------- roles

    def _take(self, column: Column, option: str) -> Column:
        if column.name in self.taken:
            raise UsageError(f"{option} {column.name}: this column has another role already")
        self.taken.add(column.name)
        return column

    def _free(self, *kinds: str) -> list[Column]:
        return [each for each in self.columns.values() if each.name not in self.taken and each.kind in kinds]

    def _set(self, option: str, column: Column, line: str) -> Column:
        self.taken.add(column.name)
        self.options[option] = column.name
        self.lines.append(line)
        return column

    def _find_split(self) -> None:
        if self.table.split_by_files:
            self.lines.append(f"splits: by the files' names ({_joined(dict(self.table.files))})")
            return
        for column in self._free("text"):
            if column.key in PARTS and {str(value).strip().lower() for value in column.values} <= SPLITS.keys():
                said = ", ".join(f"{name} {count:,}" for name, count in column.counts().items())
                self._set("split_column", column, f"splits: column {column.name!r} ({said})")
                return

    def _find_long(self) -> Column | None:
        """The column that names the sequences, if a row is one step."""
        given = self.given
        if given.kind not in (None, "long") or any(column.kind != "number" for column in self.given_inputs):
            return None
        if given.kind is None and not given.time and not given.id and self._whole():
            return None
        ids = self._ids()
        if not ids:
            if given.kind == "long":
                raise UsageError("one row a step needs a column that names the sequence; give it with --id COL")
            return None
        found: list[tuple[Column, Column | None]] = []
        for column in ids:
            time = self._time_of(column)
            steady = column.key in _flat(IDS) and self._rows_per(column) >= 4 and len(self._free("number")) <= 16
            if time is not None or given.kind == "long" or given.id == column.name or steady:
                found.append((column, time))
        if not found:
            return None
        # Two that name the same sequences are one; of several the finest, which has a time of its own for every row.
        best, time = max(found, key=lambda pair: (pair[1] is not None, pair[0].distinct, -_tier(pair[0], IDS)))
        self._set("id_column", best, f"kind: a row is one step, column {best.name!r} names the sequence")
        if time is None:
            self.options["layout"] = "long"
            self.lines.append("time: no column, so steps are in the order of the rows")
        else:
            self._set("time_column", time, f"time: column {time.name!r} orders the steps")
        return best

    def _ids(self) -> list[Column]:
        """Columns whose values name several rows each."""
        if self.given.id == "none":
            return []
        if self.given.id is not None:
            return [self.columns[self.given.id]]
        free = [column for column in self._free("number", "text") if not column.empty and column.whole]
        ids = [column for column in free if 1 < column.distinct and self._rows_per(column) >= 3]
        # Neither a label nor a measurement: its name says so, or it is text.
        return [each for each in ids if _tier(each, IDS) < 9 or _tier(each, GROUPS) < 9 or each.kind == "text"]

    def _rows_per(self, column: Column) -> float:
        return self.table.rows / max(1, column.distinct)

    def _time_of(self, unit: Column) -> Column | None:
        """The column that orders the rows of a unit: no two of these have the same time."""
        if self.given.time == "none":
            return None
        if self.given.time is not None:
            return self.columns[self.given.time]
        times = [each for each in self._free("number", "time") if _tier(each, TIMES) < 9 or each.kind == "time"]
        for column in sorted(times, key=lambda each: _tier(each, TIMES)):
            pairs = unit.array * (column.distinct + 1) + column.array
            if not column.empty and column is not unit and len(np.unique(pairs)) == len(pairs):
                return column
        return None

    def _whole(self) -> list[Column]:
        """Columns whose cells may be whole sequences."""
        texts = [
            each for each in self._free("text") if 2 * each.distinct > each.rows - each.empty and _mean(each) >= 12
        ]
        return [*self._free("list", "file"), *texts]

    def _find_whole_inputs(self) -> DataKind:
        given, kind = self.given_inputs, self.given.kind
        candidates = given or self._whole()
        lists = [column for column in candidates if column.kind == "list"]
        files = [column for column in candidates if column.kind == "file"]
        if lists and not given and kind is None:  # names of files that are not here tell where lists came from
            files = [column for column in files if self.table.names_files(column)]
        texts = [column for column in candidates if column.kind == "text"]
        named = [column for column in texts if _tier(column, TEXTS) < 9]
        texts = texts if given or len(named) != 1 else named
        if given and len({column.kind for column in given}) > 1:
            raise UsageError(
                f"--inputs {','.join(self.given.inputs)}: these columns are of different kinds "
                f"({', '.join(f'{column.name}: {column.kind}' for column in given)}); name columns of one kind"
            )
        if given and given[0].kind not in ("list", "file", "text", "number"):
            raise DataError(f"--inputs {given[0].name}: this column is {_kind_text(given[0])}, which is no input")
        if kind in ("wide", "long") or (given and given[0].kind == "number"):
            return "wide"
        choices = [*_by_lengths(lists), *([each] for each in files), *([each] for each in texts)]
        wanted = {"list": "list", "files": "file", "text": "text"}.get(kind or "")
        choices = [each for each in choices if wanted in (None, each[0].kind)]
        if not choices:
            if kind is not None:
                raise UsageError(f"--kind {kind}: no column is of that kind; there: {self._listed()}")
            if given and given[0].kind == "text":
                choices = [given]
            else:
                return "wide"
        if len(choices) > 1:
            if given:
                raise UsageError(
                    f"--inputs {','.join(self.given.inputs)}: these lists are not equally long in every row, so they "
                    "are not channels of one sequence; name those that are"
                )
            raise AmbiguousError(
                "several columns may be the input",
                "--inputs",
                [(",".join(column.name for column in each), _kind_text(each[0])) for each in choices],
            )
        return self._use_whole(choices[0])

    def _use_whole(self, columns: list[Column]) -> DataKind:
        first = columns[0]
        _check_varies(columns)
        if len(columns) > 1 and first.kind != "list":
            raise UsageError(f"--inputs: of {_kind_text(first)}s one column is the input; name one")
        if first.kind == "list":
            if len(columns) == 1:
                self._set("list_column", first, f"input: column {first.name!r}, {_kind_text(first)}")
            else:
                self.options["list_columns"] = [column.name for column in columns]
                self.taken |= {column.name for column in columns}
                self.lines.append(
                    f"input: columns {_names(columns)}, {len(columns)} channels, {_kind_text(first)} each"
                )
            return "list"
        if first.kind == "file":
            self._set("file_column", first, f"input: the files that column {first.name!r} names")
            if self.given.channels:
                self.options["channels"] = list(self.given.channels)
                self.lines.append(f"channels: the signals {', '.join(self.given.channels)}")
            return "files"
        self._set("text_column", first, f"input: column {first.name!r}, {_kind_text(first)}")
        if _mean(first) > 1000 and first.words > 20 * first.rows:
            self.options |= {"tokens": "words", "min_count": max(2, first.rows // 500)}
            self.lines.append("tokens: words, since the texts are long (tokens: characters in the recipe is possible)")
        else:
            self.lines.append("tokens: characters")
        return "text"

    def _find_numbers(self, long: bool) -> None:
        """The numeric columns that are channels of a step, or steps of a row."""
        columns = self.given_inputs
        if not columns:
            free = [
                each for each in self._free("number") if not _is_row_number(each) and each.key not in ("", "unnamed_0")
            ]
            columns = free if long else _numbered(free)
        if not columns or (not long and len(columns) < NARROW and not self.given_inputs):
            raise UsageError(
                "no column looks like a sequence (a text, a list, a file's name, or numbers in at least four columns): "
                f"name the input with --inputs COL,COL…; there: {self._listed()}"
            )
        for column in columns:
            if column.kind != "number":
                raise DataError(f"--inputs {column.name}: this column is {_kind_text(column)}, not numbers")
        _check_varies(columns)
        self.taken |= {column.name for column in columns}
        self.options["value_columns"] = [column.name for column in columns]
        if long:
            channels = "channel" if len(columns) == 1 else "channels"
            self.lines.append(f"input: {_count(columns)}, {len(columns)} {channels} of a step")
        else:
            self.lines.append(
                f"input: {_count(columns)}, a number each, as one sequence in the file's order (if their order means "
                "nothing, no sequence model is needed)"
            )

    def _find_label(self, unit: Column | None) -> Column:
        if self.given.label == "none":
            raise UsageError("--label none: a comparison needs a label; name its column")
        if self.flags:
            return self.flags[0]
        if self.given.label is not None:
            return self.columns[self.given.label]
        free = [
            column
            for column in self._free("number", "text", "time", "empty")
            if unit is None or column.kind == "empty" or _constant(column, unit) or _tier(column, LABELS) == 0
        ]
        named = sorted((each for each in free if _tier(each, LABELS) < 9), key=lambda each: _tier(each, LABELS))
        best = [each for each in named if _tier(each, LABELS) == _tier(named[0], LABELS)]
        if len(best) == 1:
            return self._take(best[0], "--label")
        rows = self.table.rows if unit is None else unit.distinct
        few = best or [
            each
            for each in free
            if 2 <= each.distinct <= min(FEW, rows // 3) and _tier(each, GROUPS) == 9 and each.kind != "time"
        ]
        if len(few) == 1:
            return self._take(few[0], "--label")
        if few:
            raise AmbiguousError(
                "several columns may be the label", "--label", [(each.name, _values_text(each)) for each in few]
            )
        raise UsageError(f"no column looks like a label; name it with --label COL; there: {self._listed()}")

    def _find_group(self, unit: Column | None) -> Column | None:
        if self.given.group == "none":
            return None
        if self.given.group is not None:
            group = self.columns[self.given.group]
            if group.empty:
                raise DataError(
                    f"--group {group.name}: {group.empty:,} cells are empty; a row without group has no split"
                )
        else:
            found = [
                each
                for each in self._free("number", "text")
                if _tier(each, GROUPS) < 9
                and not each.empty
                and 1 < each.distinct < (self.table.rows if unit is None else unit.distinct)
                and (unit is None or _constant(each, unit))
            ]
            best = [each for each in found if _tier(each, GROUPS) == min(_tier(one, GROUPS) for one in found)]
            if len(best) > 1:
                raise AmbiguousError(
                    "several columns may be the group, whose rows are never split apart",
                    "--group",
                    [*((each.name, f"{each.distinct:,} values") for each in best), ("none", "rows are independent")],
                )
            if not best:
                return None
            group = best[0]
        if self.table.crosses(group.name):
            self.taken.add(group.name)
            self.lines.append(
                f"warning: column {group.name!r} has the same values in training and other files, so rows of one "
                f"{group.key} are on both sides; scores may be too good for a new one"
            )
            return None
        few = group.distinct < 6
        self._set(
            "group_column",
            group,
            f"group: column {group.name!r} ({group.distinct:,} values); rows of one are never split apart"
            + (", but with so few, validation and test are one or two of them" if few else ""),
        )
        return group

    def _find_row_names(self) -> None:
        """A column that names every row, for predictions."""
        if self.given.id == "none":
            return
        if self.given.id is not None:
            name = self.given.id
        else:
            names = [each for each in self._free("number", "text") if each.key in ("id", "ids", "name", "key", "uid")]
            unique = [each.name for each in names if each.distinct == self.table.rows]
            unique = [each for each in unique if not self.table.crosses(each)]
            if not unique:
                return
            name = unique[0]
        self._set("id_column", self.columns[name], f"id: column {name!r} names the rows")

    def _use_static(self, unit: Column | None) -> None:
        """What --static names stands beside a sequence."""
        for column in self.static:
            if column.kind not in ("number", "text"):
                raise DataError(
                    f"--static {column.name}: this column is {_kind_text(column)}; a static feature is a number or word"
                )
            if unit is not None and not _constant(column, unit):
                raise DataError(
                    f"--static {column.name}: this column changes within a sequence; it may be one of --inputs"
                )
        if self.static:
            self.options["static_columns"] = [column.name for column in self.static]
            self.lines.append(f"beside the sequence: {_count(self.static)}")

    # ------------------------------------------------------------------------------------------------------ checks

    def _describe_label(self, label: Column, unit: NDArray[np.int64] | None) -> int | None:
        """How many classes; None of real numbers."""
        if self.flags:
            if self.given.separator is not None:
                raise UsageError("--separator is for one label column whose cells hold several labels; leave it out")
            return self._describe_flags(unit)
        separator = self._separator(label)
        if label.kind == "list" and unit is None and label.in_time and not label.empty:
            return self._describe_label_lists(label)
        if separator is not None or label.kind == "list":
            return self._describe_sets(label, separator)
        self.options["label_column"] = label.name
        if label.kind in ("list", "mixed"):
            raise DataError(f"--label {label.name}: this column is {_kind_text(label)}; a label is a word or a number")
        if label.empty == label.rows:
            raise DataError(f"the label column {label.name!r} has no value in any row; name another with --label COL")
        _refuse_words_for_nothing(label)
        if unit is not None and not _constant(label, self.columns[self.options["id_column"]]):
            self.options["per_step"] = True
            self.lines.append(f"label: every step has its own, since {label.name!r} changes within a sequence")
        elif label.empty:
            self._ignore_missing(label)
        first = slice(None) if unit is None or "per_step" in self.options else np.unique(unit, return_index=True)[1]
        counts = label.counts(first)
        if label.kind == "number" and (len(counts) > FEW or (not label.whole and len(counts) > FEW // 2)):
            low, high = (pick(value for value in label.values if isinstance(value, float)) for pick in (min, max))
            self.options["target"] = "real"
            self.lines.append(f"label: column {label.name!r} (real numbers, {low:g} to {high:g})")
            return None
        shown = [f"{name} {count:,}" for name, count in list(counts.items())[:6]]
        more = ", …" if len(counts) > len(shown) else ""
        self.lines.append(
            f"label: column {label.name!r} ({len(counts)} class{'es' if len(counts) > 1 else ''}: "
            f"{', '.join(shown)}{more})"
        )
        return len(counts)

    def _ignore_missing(self, *labels: Column) -> None:
        """Rows without a label are pretrained on. Raises DataError where hardly any row has one."""
        self.options["missing_labels"] = "ignore"
        for label in labels:
            left = label.rows - label.empty
            if left < FEWEST and "layout" not in self.options and "time_column" not in self.options:
                raise DataError(
                    f"the label column {label.name!r} is empty in {label.empty:,} of {label.rows:,} rows, which leaves "
                    f"{left}; at least {FEWEST} are needed, or name another with --label COL"
                )
            if label.empty:
                self.lines.append(
                    f"missing: {label.name!r} is empty in {label.empty:,} of {label.rows:,} rows; "
                    + ("it is not scored there" if len(labels) > 1 else "they are pretrained on, but not finetuned on")
                )

    def _describe_flags(self, unit: NDArray[np.int64] | None) -> int | None:
        """Several columns are the label: numbers, or whether each label holds. None of numbers."""
        columns = self.flags
        for column in columns:
            _refuse_words_for_nothing(column)
        self.options["label_columns"] = [column.name for column in columns]
        if unit is not None and not all(_constant(each, self.columns[self.options["id_column"]]) for each in columns):
            self.options["per_step"] = True
            self.lines.append("label: every step has its own, since they change within a sequence")
        elif any(column.empty for column in columns):
            self._ignore_missing(*columns)
        for column in columns:
            if not column.distinct:
                raise DataError(f"the label column {column.name!r} has no value in any row; leave it out of --label")
        flags = [{value.lower() for value in column.counts()} <= YES_OR_NO.keys() for column in columns]
        if all(flags):
            self.options["target"] = "labels"
            yes = [sum(n for value, n in column.counts().items() if YES_OR_NO[value.lower()]) for column in columns]
            said = ", ".join(f"{column.name} {n:,}" for column, n in zip(columns[:6], yes, strict=False))
            self.lines.append(
                f"label: {len(columns)} labels, each by its own column, and how often they hold ({said}"
                f"{', …' if len(columns) > 6 else ''})"
            )
            return len(columns)
        if all(column.kind == "number" for column in columns):
            self.options["target"] = "real"
            self.lines.append(f"label: {_count(columns)} (real numbers)")
            return None
        odd = columns[flags.index(False)]
        raise DataError(
            f"--label {self.given.label}: several columns are labels of 0 or 1, no or yes, false or true, or they are "
            f"numbers, but {odd.name!r} has {_values_text(odd)}"
        )

    def _separator(self, label: Column) -> str | None:
        """What stands between several labels in a cell. Raises AmbiguousError where the texts look as if something
        did, and nobody has said so."""
        if self.given.separator is not None:
            self._check_separator(self.given.separator, label)
            return None if self.given.separator == "none" else self.given.separator
        values = [value for value in label.values if isinstance(value, str)] if label.kind == "text" else []
        for separator in SEPARATORS:
            parts = [{part.strip() for part in value.split(separator)} - {""} for value in values]
            again = Counter(name for each in parts for name in each)
            if any(len(each) > 1 and all(again[name] > 1 for name in each) for each in parts):
                first = next(value for value, each in zip(values, parts, strict=True) if len(each) > 1)
                raise AmbiguousError(
                    f"column {label.name!r} may hold several labels a row, as in {first[:40]!r}",
                    "--separator",
                    [(separator, "several labels with it between them"), ("none", "each text is one class")],
                )
        return None

    def _check_separator(self, separator: str, label: Column) -> None:
        """Raise UsageError for one that stands in no cell."""
        if not separator:
            raise UsageError(
                "--separator: what stands between the labels of a cell is expected (none: each text is one class)"
            )
        cells = list(label.counts())
        if separator == "none" or any(separator in cell for cell in cells):
            return
        shown = ", ".join(map(repr, cells[:3])) + (", …" if len(cells) > 3 else "")
        there = f"its cells are {_kind_text(label)}" if label.kind == "list" else f"there: {shown or 'nothing'}"
        raise UsageError(
            f"--separator {_quoted(separator)}: no cell of column {label.name!r} has it; {there} (none: each text is "
            "one class)"
        )

    def _describe_sets(self, label: Column, separator: str | None) -> int:
        """A cell holds any number of labels; how many there are."""
        self.options |= {"label_column": label.name, "target": "labels"}
        how = "a list of labels a row"
        names: set[str] = set()
        if separator is not None:
            self.options["label_separator"] = separator
            parts = [part.strip() for value in label.counts() for part in value.split(separator)]
            names = {part for part in parts if part}
            how = f"{len(names)} labels, any number of them a row, with {separator!r} between them"
        self.lines.append(f"label: column {label.name!r} ({how})")
        if label.empty:
            self.options["missing_labels"] = "none"
            self.lines.append(
                f"missing: {label.name!r} is empty in {label.empty:,} of {label.rows:,} rows, which is taken to say "
                "that no label holds (missing_labels: ignore in the recipes if it is not known)"
            )
        return max(2, len(names))

    def _describe_label_lists(self, label: Column) -> int | None:
        """Labels in time, of which a window has those within it."""
        self.options["label_column"] = label.name
        low, high = min(label.lengths), max(label.lengths)
        shown = f"lists of {low:,}" if low == high else f"lists of {low:,} to {high:,}"
        few = 1 < len(label.entries) <= FEW
        if label.numeric and not few:
            self.options |= {"label_at": "mean", "target": "real"}
            self.lines.append(f"label: column {label.name!r} ({shown} real numbers)")
            return None
        self.options["label_at"] = "majority"
        self.lines.append(f"label: column {label.name!r} ({shown} labels, {len(label.entries)} different)")
        return len(label.entries)

    def _label_period(self, label: Column, inputs: Sequence[str | None]) -> LabelPeriod | None:
        """None where the input is no list, or labels and steps do not go together, which is said when they are read."""
        lengths = [self.columns[name].lengths for name in inputs if name]
        if not lengths or len(lengths[0]) != len(label.lengths):
            return None
        steps, odd = steps_a_label(label.lengths, lengths[0])
        return None if odd is not None else LabelPeriod(steps, sum(label.lengths), min(lengths[0]))

    def _find_rate(self) -> None:
        """A column that says how many steps a second there are, the same in every row."""
        for column in self._free("number"):
            if column.key in RATES and column.distinct == 1 and not column.empty:
                rate = float(next(iter(column.values)))
                if rate > 0:
                    self.taken.add(column.name)
                    self.options["rate"] = rate
                    self.lines.append(f"rate: column {column.name!r}, {rate:g} steps a second")
                return

    def _check(self, label: Column, unit: NDArray[np.int64] | None, sequences: int, classes: int | None) -> None:
        if sequences < FEWEST:
            raise DataError(
                f"there are {sequences} sequences; at least {FEWEST} are needed for training, validation and test"
            )
        if classes == 1 and self.options.get("target") != "labels":
            raise DataError(
                f"the label column {label.name!r} has one value in every training row; there is nothing to learn"
            )
        if classes is not None and self.options.get("target") != "labels" and 2 * classes > sequences:
            raise DataError(
                f"the label column {label.name!r} has {classes:,} values in {sequences:,} sequences, as an id has; "
                "name another with --label COL"
            )

    def _draw_splits(self, sequences: int, classes: int | None, group: Column | None) -> None:
        present = {split for split, _ in self.table.files} if self.table.split_by_files else set[str]()
        if "split_column" in self.options:
            column = self.columns[self.options["split_column"]]
            present = {SPLITS[str(value).strip().lower()] for value in column.values}
            if "train" not in present:
                raise DataError(f"column {column.name!r} says of no row that it is for training")
        missing = [split for split in ("validation", "test") if split not in present]
        if not missing:
            return
        units = sequences if group is None else group.distinct
        if sequences < SMALL or units < SMALL:
            self.options |= {f"{split}_fraction": 0.2 for split in missing}
        share = "a fifth" if sequences < SMALL or units < SMALL else "a tenth"
        if classes is not None:
            self.options["split"] = "stratified"
        each = " each" if missing[1:] else ""
        even = ", with equal shares of every class" if classes is not None else ""
        self.lines.append(
            f"splits: {' and '.join(missing)} {'are' if missing[1:] else 'is'} drawn from training rows, {share}{each}"
            f"{even}"
        )

    def _say_left_out(self) -> None:
        left = [name for name in self.columns if name not in self.taken]
        if left:
            shown = ", ".join(map(repr, left[:8])) + (", …" if len(left) > 8 else "")
            scalars = [each for each in left if self.columns[each].kind in ("number", "text")]
            hint = (
                f" (--static {_quoted(','.join(scalars[:3]))} would show them beside the sequence)" if scalars else ""
            )
            self.lines.append(f"left out: {'column' if len(left) == 1 else 'columns'} {shown}{hint}")
        for name in self.table.doubled:
            self.lines.append(f"left out: the columns {name!r}, which have one name")

    def _listed(self) -> str:
        shown = [f"{column.name} ({_kind_text(column)})" for column in list(self.columns.values())[:12]]
        listed = ", ".join(shown) + (", …" if len(self.columns) > 12 else "")
        if self.table.doubled:
            listed = f"{listed or 'none'}, beside several that are called {', '.join(map(repr, self.table.doubled))}"
        only = next(iter(self.columns), "") if len(self.columns) == 1 else ""
        if mark := next((mark for mark in ";|\t" if mark in only), ""):
            listed += f"; if its cells stand between {mark!r}, write it with commas, or as .tsv with tabs"
        return listed or "none with a name"


def _tier(column: Column, names: Sequence[Iterable[str]]) -> int:
    """How likely a column has the role of these names: 0 the most, 9 not at all."""
    for tier, words in enumerate(names):
        if {column.key, column.key.removesuffix("_id"), column.key.removesuffix("_name")} & set(words):
            return tier
    return 9


def _flat(names: Sequence[Sequence[str]]) -> set[str]:
    return {word for words in names for word in (*words, f"{words[0]}_id")}


def _constant(column: Column, unit: Column) -> bool:
    """Has the column one value for each value of the unit?"""
    pairs = np.unique(unit.array * (column.distinct + 2) + column.array + 1)
    return len(pairs) == len(np.unique(unit.array))


def _check_varies(columns: Sequence[Column]) -> None:
    if all(column.constant for column in columns):
        which = f"the input column {columns[0].name!r} is" if len(columns) == 1 else "the input columns are"
        raise DataError(f"{which} the same in every training row; there is nothing to learn")


def _is_row_number(column: Column) -> bool:
    return (
        column.whole and column.distinct == column.rows and (_tier(column, IDS) < 9 or column.key in ("index", "row"))
    )


def _numbered(columns: list[Column]) -> list[Column]:
    """Those whose names go on with numbers behind one prefix, if these are most of the columns; else all."""
    prefixes: dict[str, list[Column]] = {}
    for column in columns:
        if found := re.fullmatch(r"(.*?)[\d.]+", column.name):
            prefixes.setdefault(found[1], []).append(column)
    best = max(prefixes.values(), key=len, default=[])
    return best if len(best) >= NARROW and 2 * len(best) >= len(columns) else columns


def _by_lengths(lists: list[Column]) -> list[list[Column]]:
    """Lists that are equally long in every row, together."""
    groups: dict[bytes, list[Column]] = {}
    for column in lists:
        groups.setdefault(column.lengths.tobytes(), []).append(column)
    return list(groups.values())


def _mean(column: Column) -> float:
    return sum(column.lengths) / max(1, len(column.lengths))


def _kind_text(column: Column) -> str:
    if column.kind == "list":
        low, high = min(column.lengths), max(column.lengths)
        return f"lists of {low:,} numbers" if low == high else f"lists of {low:,} to {high:,} numbers"
    if column.kind == "text":
        return f"text, {_mean(column):,.0f} characters on average"
    words = {"number": "numbers", "file": "files' names", "time": "dates", "empty": "empty", "mixed": "of mixed types"}
    return words[column.kind]


def _values_text(column: Column) -> str:
    counts = list(column.counts())
    shown = ", ".join(counts[:3]) + (", …" if len(counts) > 3 else "")
    return f"{len(counts)} values: {shown}"


def _refuse_words_for_nothing(label: Column) -> None:
    """Raise DataError for a label with cells like nan, or of numbers and NA, which a task takes for one more class."""
    words, rows = [*label.gaps], label.gaps.total()
    if label.kind == "number":
        words, rows = [*words, *(value for value in label.values if isinstance(value, str))], rows + label.kinds["text"]
    if words:
        raise DataError(
            f"the label column {label.name!r} has {', '.join(map(repr, words[:3]))} in {rows:,} of {label.rows:,} "
            "rows; leave the cell empty where the label is not known"
        )


def _names(columns: Sequence[Column]) -> str:
    return ", ".join(repr(column.name) for column in columns)


def _count(columns: Sequence[Column]) -> str:
    if len(columns) == 1:
        return f"column {columns[0].name!r}"
    if len(columns) <= 4:
        return f"columns {_names(columns)}"
    return f"{len(columns)} columns, {columns[0].name!r} to {columns[-1].name!r}"


def _joined(files: dict[str, Any]) -> str:
    return ", ".join(files)


def _quoted(value: str) -> str:
    return f"'{value}'" if re.search(r"[^\w,.=-]", value) else value
