"""What a user should know about a table before training, beyond errors: gaps, mixed types, columns that give the label
away, unused columns. Each is one sentence.

The files are read once more, some thousand rows at a time; what stays in memory is a number for each cell.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.options import Options
from spt.tasks.own.parsing import Place, is_empty, show
from spt.tasks.own.tables import read_batches

BLANK = {"na", "n/a", "nan", "null", "none", "-", "?", "missing"}  # what people write into empty cells
MAX_VALUES = 100_000  # of a column whose values are counted
MAX_NAMED = 8  # columns in a sentence
CERTAIN = 1 - 1e-9  # a correlation that is one
FEW = 8  # rows that prove nothing


@dataclass
class Column:
    """What is known about a column so far."""

    label_of: dict[Any, str] | None  # value -> label, while each has one
    numbers: "array[float]" = field(default_factory=lambda: array("d"))  # not finite: no number
    texts: int = 0
    example: str = ""  # the first text, and where it stands

    def pad(self, n: int) -> None:
        """Rows up to n do not have the column, as can be in JSON."""
        self.numbers.extend([math.nan] * (n - len(self.numbers)))

    def add(self, cells: Sequence[Any], labels: Sequence[str | None], place: Place) -> None:
        for i, (cell, label) in enumerate(zip(cells, labels, strict=True)):
            try:
                self.numbers.append(float(cell))
            except (TypeError, ValueError, OverflowError):
                self.numbers.append(math.nan)
                if not _is_blank(cell):
                    self.texts += 1
                    self.example = self.example or f"{show(cell)} in {place(i)}"
            if self.label_of is not None and label is not None and not _is_blank(cell):
                value = cell if isinstance(cell, str | int | float) else repr(cell)
                if self.label_of.setdefault(value, label) != label or len(self.label_of) > MAX_VALUES:
                    self.label_of = None


def diagnose(config: Options, files: Sequence[Path]) -> list[str]:
    """All findings, the most serious first."""
    columns: dict[str, Column] = {}
    labels: list[str | None] = []
    exempt = {*config.labels, *config.whole_columns, *config.others}  # may determine the label
    exempt -= {config.split_column, *config.static_columns}
    doubtful: Counter[str] = Counter()  # classes that may stand for no label
    in_time = config.label_at is not None and config.kind != "long"  # lists of labels, of which no value tells anything
    for path in files:
        with read_batches(path, _unique) as batches:
            for batch in batches:
                cells = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in batch.columns.items()}
                truth = [_label(cell) for cell in cells[config.labels[0]]]
                for name in cells:
                    compared = name not in exempt and config.target == "classes" and not in_time
                    column = columns.setdefault(name, Column({} if compared else None))
                    column.pad(len(labels))
                    column.add(cells[name], truth, batch.place(None))
                labels += truth
                if config.target == "classes":
                    doubtful.update(cell for cell in cells[config.labels[0]] if _is_blank(cell) and not is_empty(cell))
    for column in columns.values():
        column.pad(len(labels))
    inputs = {name for name in columns if name in config.inputs or config.has_prefix(name)}
    findings = []
    for name, column in columns.items():
        leak = _leak(config, column, columns, labels) if name not in exempt and not in_time else ""
        if leak:
            findings.append(f"the {'input column' if name in inputs else 'column'} {name!r} {leak}")
    numbers = {name: int(np.isfinite(np.frombuffer(column.numbers)).sum()) for name, column in columns.items()}
    for name, column in columns.items():
        missing = len(column.numbers) - numbers[name] - column.texts
        if name == config.labels[0]:
            missing -= doubtful.total()
            findings += [
                f"{text!r} in column {name!r} is a class (rows: {count:,}); if it means that no label is known, leave "
                "such rows out"
                for text, count in doubtful.items()
            ]
        if missing:
            share = missing / len(labels)
            findings.append(f"column {name!r}: {missing:,} of {len(labels):,} cells are empty ({share:.1%})")
    for name, column in columns.items():
        if numbers[name] and column.texts:
            findings.append(
                f"column {name!r} mixes types: {numbers[name]:,} numbers and {column.texts:,} texts, the first "
                f"{column.example}"
            )
    unused = [name for name in columns if name not in {*inputs, *config.inputs, *config.labels, *config.others}]
    if unused:
        named = ", ".join(map(repr, unused[:MAX_NAMED])) + ", …" * (len(unused) > MAX_NAMED)
        findings.append(
            f"{len(unused)} columns are not used: {named}" if len(unused) > 1 else f"not used: column {named}"
        )
    return findings


def _leak(config: Options, column: Column, columns: dict[str, Column], labels: Sequence[str | None]) -> str:
    """How a column gives the label away; empty if it does not."""
    numbers = np.frombuffer(column.numbers)
    if config.target != "classes":
        for name in config.labels:
            correlation = _correlation(numbers, np.frombuffer(columns[name].numbers))
            if abs(correlation) >= CERTAIN:
                return f"gives the label {name!r} away: their correlation is {round(correlation)}"
        return ""
    kinds = set(labels) - {None}
    finite = np.isfinite(numbers)
    if len(kinds) < 2 or finite.sum() + column.texts < FEW:
        return ""
    leak = f"gives the label {config.label_column!r} away"
    values = column.label_of or {}
    if 0 < 2 * len(values) <= finite.sum() + column.texts and set(values.values()) == kinds:
        same = all(_label(value) == label for value, label in values.items())
        return f"{leak}: " + ("it is the same" if same else f"each of its {len(values):,} values has one label")
    known = np.array([label is not None for label in labels]) & finite
    enough = not column.texts and finite.sum() >= 2 * FEW
    if enough and _ranges_apart(numbers[known], np.array(labels)[known], len(kinds)):
        return f"{leak}: each label has a range of its own in it"
    return ""


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    return float(np.corrcoef(x, y)[0, 1]) if len(x) >= FEW and np.ptp(x) > 0 and np.ptp(y) > 0 else 0.0


def _ranges_apart(numbers: NDArray[np.float64], labels: NDArray[Any], n_labels: int) -> bool:
    """Whether each of the labels has a range of numbers without any of another label."""
    order = np.argsort(numbers, kind="stable")
    numbers, labels = numbers[order], labels[order]
    borders = np.flatnonzero(labels[1:] != labels[:-1])
    return len(borders) == n_labels - 1 and bool((numbers[borders] < numbers[borders + 1]).all())


def _unique(names: list[str], file: str) -> list[str]:
    return [name for name, times in Counter(names).items() if times == 1]


def _is_blank(cell: Any) -> bool:
    if isinstance(cell, list | np.ndarray | dict):
        return False
    return bool(is_empty(cell)) or (isinstance(cell, str) and cell.strip().lower() in BLANK)


def _label(cell: Any) -> str | None:
    """As text; None for an empty one."""
    if _is_blank(cell):
        return None
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
