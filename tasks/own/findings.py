"""What a reader should know of a table before training, beyond what stops it: gaps, mixed types, columns that give the
label away, columns without a use. Each is one sentence. K label columns.

The files are read once more, some thousand rows at a time.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.cells import Cells, empty, show
from spt.tasks.own.options import Options
from spt.tasks.own.tables import batches, where

BLANK = {"na", "n/a", "nan", "null", "none", "-", "?", "missing"}  # what people write into empty cells
MAX_VALUES = 100_000  # of a column whose values are counted
MAX_NAMED = 8  # columns in a sentence
CERTAIN = 1 - 1e-9  # a correlation that is one
FEW = 8  # rows that prove nothing


@dataclass
class Column:
    """What is seen of one."""

    name: str
    missing: int = 0
    numbers: int = 0
    texts: int = 0
    example: str = ""  # the first text, and where it stands
    label_of: dict[Any, str] | None = field(default_factory=dict)  # value -> label, while each has one
    reach: dict[str, tuple[float, float]] = field(default_factory=dict)  # label -> the range of the numbers
    moments: "list[Moments]" = field(default_factory=list)  # with each real label


@dataclass
class Moments:
    """Sums for a correlation, about the means so far."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        n = len(x)
        if not n:
            return
        mx, my, total = float(x.mean()), float(y.mean()), self.n + n
        dx, dy, weight = mx - self.x, my - self.y, self.n * n / total
        self.xx += float(((x - mx) ** 2).sum()) + dx * dx * weight
        self.yy += float(((y - my) ** 2).sum()) + dy * dy * weight
        self.xy += float(((x - mx) * (y - my)).sum()) + dx * dy * weight
        self.x, self.y, self.n = self.x + dx * n / total, self.y + dy * n / total, total

    @property
    def correlation(self) -> float:
        return self.xy / math.sqrt(self.xx * self.yy) if self.xx > 0 and self.yy > 0 else 0.0


def look(config: Options, files: Sequence[Path]) -> list[str]:
    """All findings, the gravest first."""
    columns: dict[str, Column] = {}
    rows = 0
    labels: Counter[str] = Counter()
    for path in files:
        names: list[str] = []

        def all_of(there: list[str], file: str, names: list[str] = names) -> list[str]:
            names[:] = [name for name in there if there.count(name) == 1] if len(set(there)) < len(there) else there
            return list(names)

        for batch in batches(path, all_of):
            cells = dict(zip(names, batch.columns, strict=True))
            rows += len(batch.lines)
            truth = [_shown(cell) for cell in _plain(cells[config.labels[0]])]
            labels.update(one for one in truth if one is not None)
            reals = [_numbers(_plain(cells[name]))[0] for name in config.labels] if config.target == "real" else []
            for name in names:
                column = columns.setdefault(name, Column(name))
                _look_at(column, _plain(cells[name]), path, batch.lines)
                if name not in {*config.labels, *_silent(config)}:
                    _compare(column, _plain(cells[name]), truth, reals, config)
    return _sentences(config, columns, rows, labels)


def _silent(config: Options) -> set[str]:
    """Columns whose agreement with the label says nothing: rows of one id have one label by right."""
    own = {*config.others, config.text_column, config.list_column, config.file_column} - {None, config.split_column}
    return {str(name) for name in own}


def _plain(cells: Cells) -> Sequence[Any]:
    return cells.tolist() if isinstance(cells, np.ndarray) else cells


def _blank(cell: Any) -> bool:
    if isinstance(cell, list | np.ndarray | dict):
        return False
    return bool(empty(cell)) or (isinstance(cell, str) and cell.strip().lower() in BLANK)


def _shown(cell: Any) -> str | None:
    """A label as text; None for an empty one."""
    if _blank(cell):
        return None
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _numbers(cells: Sequence[Any]) -> tuple[NDArray[np.float64], list[int]]:
    """(n,) the cells that are numbers, NaN where one is none; and which ones are other things."""
    try:
        found = np.array([*map(float, cells)])
        return np.where(np.isfinite(found), found, np.nan), []
    except (TypeError, ValueError, OverflowError):
        pass
    found, others = np.full(len(cells), np.nan), []
    for i, cell in enumerate(cells):
        if _blank(cell):
            continue
        try:
            number = float(cell)
        except (TypeError, ValueError, OverflowError):
            others.append(i)
        else:
            found[i] = number if math.isfinite(number) else math.nan
    return found, others


def _look_at(column: Column, cells: Sequence[Any], path: Path, lines: Sequence[int]) -> None:
    numbers, others = _numbers(cells)
    given = int(np.isfinite(numbers).sum())
    column.numbers += given
    column.missing += len(cells) - given - len(others)
    column.texts += len(others)
    if others and not column.example:
        column.example = f"{show(cells[others[0]])} in {where(path, lines[others[0]])}"


def _compare(
    column: Column,
    cells: Sequence[Any],
    truth: Sequence[str | None],
    reals: Sequence[NDArray[np.float64]],
    config: Options,
) -> None:
    """Note how a column goes with the label."""
    numbers, _ = _numbers(cells)
    if config.target == "real":
        column.moments = column.moments or [Moments() for _ in reals]
        for moments, label in zip(column.moments, reals, strict=True):
            both = np.isfinite(numbers) & np.isfinite(label)
            moments.add(numbers[both], label[both])
        return
    known = np.array([answer or "" for answer in truth])
    finite = np.isfinite(numbers)
    for name in {answer for answer in truth if answer is not None} if finite.any() else set():
        among = numbers[finite & (known == name)]
        if len(among):
            low, high = column.reach.get(name, (math.inf, -math.inf))
            column.reach[name] = min(low, float(among.min())), max(high, float(among.max()))
    if column.label_of is None:
        return
    for cell, answer in zip(cells, truth, strict=True):
        if answer is None or _blank(cell):
            continue
        key = cell if isinstance(cell, str | int | float) else repr(cell)
        if column.label_of.setdefault(key, answer) != answer or len(column.label_of) > MAX_VALUES:
            column.label_of = None
            return


def _sentences(config: Options, columns: dict[str, Column], rows: int, labels: Counter[str]) -> list[str]:
    found = []
    for column in columns.values():
        if column.name in {*config.labels, *_silent(config)}:
            continue
        used = "input column" if column.name in config.inputs or _prefixed(config, column.name) else "column"
        told = _gives_away(config, column, rows, labels)
        if told:
            found.append(f"the {used} {column.name!r} {told}")
    for column in columns.values():
        if column.missing:
            share = column.missing / max(1, rows)
            found.append(f"column {column.name!r}: {column.missing:,} of {rows:,} cells are empty ({share:.1%})")
    for column in columns.values():
        if column.numbers and column.texts:
            found.append(
                f"column {column.name!r} mixes types: {column.numbers:,} numbers and {column.texts:,} texts, the first "
                f"{column.example}"
            )
    roles = {*config.inputs, *config.labels, *config.others}
    unused = [name for name in columns if name not in roles and not _prefixed(config, name)]
    if unused:
        named = ", ".join(map(repr, unused[:MAX_NAMED])) + ", …" * (len(unused) > MAX_NAMED)
        found.append(f"{len(unused)} columns are not used: {named}" if len(unused) > 1 else f"not used: column {named}")
    return found


def _prefixed(config: Options, name: str) -> bool:
    return (
        config.value_prefix is not None
        and name.startswith(config.value_prefix)
        and name not in {*config.labels, *config.others}
    )


def _gives_away(config: Options, column: Column, rows: int, labels: Counter[str]) -> str:
    """How a column tells the label, in words; nothing if it does not."""
    for name, moments in zip(config.labels, column.moments, strict=False):
        if moments.n >= FEW and abs(moments.correlation) >= CERTAIN:
            return f"gives the label {name!r} away: their correlation is {round(moments.correlation)}"
    label = repr(config.label_column)
    seen = column.numbers + column.texts
    if config.target == "real" or len(labels) < 2 or seen < FEW:
        return ""
    if column.label_of and 2 * len(column.label_of) <= seen and len(set(column.label_of.values())) == len(labels):
        same = all(_shown(value) == answer for value, answer in column.label_of.items())
        how = "it is the same" if same else f"each of its {len(column.label_of):,} values has one label"
        return f"gives the label {label} away: {how}"
    ranges = sorted(column.reach.values())
    parted = all(one[1] < two[0] for one, two in itertools.pairwise(ranges))
    if not column.texts and len(ranges) == len(labels) and parted and column.numbers >= 2 * FEW:
        return f"gives the label {label} away: each label has a range of its own in it"
    return ""
