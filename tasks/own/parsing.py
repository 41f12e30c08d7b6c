"""Parse cells as text, names, numbers, times and lists of numbers; errors name the place and show the cell.

A cell comes as its format gives it: text, a number, a list, None. L steps, C channels.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED

MAX_ID = 1_000_000  # of token ids: an embedding has a row for each up to the largest
MAX_NAME = 200  # characters of a label or an id
HUGE = 1e18  # float32 holds the square of what is below
MISSING = {"", "nan", "na", "n/a", "null", "none", "<na>"}  # what stands in a cell whose value is missing, in any case

Cells = Sequence[Any] | NDArray[Any]  # of a column; an array: numbers without gaps
Place = Callable[[int], str]  # where the i-th cell of a column stands


class MissingValueError(ValueError):
    """A value is missing where the task takes none; missing: hidden would take it."""


# ---------------------------------------------------------------------------------------------------- text and names


def parse_text(cell: Any, place: str) -> str:
    if cell is None:
        raise ValueError(f"{place}: the cell is empty; leave the row out")
    if not isinstance(cell, str):
        raise ValueError(f"{place}: {show(cell)} is not text")
    try:
        cell.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: the text holds half of a surrogate pair, which is no character") from None
    return cell


def parse_name(cell: Any, place: str) -> str:
    """A label or an id as text, whatever the file's format: 3, "3", 3.0 and "3.0" are the same; "03" is not."""
    if isinstance(cell, bytes | list | dict | np.ndarray):
        raise ValueError(f"{place}: {show(cell)} is neither text nor a number")
    if is_empty(cell):
        raise ValueError(f"{place}: the cell is empty")
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    name = str(cell)
    if re.fullmatch(r"-?(0|[1-9][0-9]*)\.0*", name):
        name = name.partition(".")[0]
    elif name in ("True", "TRUE", "False", "FALSE"):
        name = name.lower()
    if len(name) > MAX_NAME:
        raise ValueError(f"{place}: {len(name):,} characters are too many here; at most {MAX_NAME}")
    return parse_text(name, place)


class NameEncoder:
    """Integer codes for names, in order of first appearance."""

    def __init__(self, parse: Callable[[Any, str], str] = parse_name, names: Iterable[str] = ()) -> None:
        self.parse = parse
        self.codes = {name: code for code, name in enumerate(names)}
        self._known: dict[Any, int] = {}  # by cell, as it stands in a file: 3, "3" and "3.0" are one name

    @property
    def names(self) -> list[str]:
        return list(self.codes)

    def encode(self, cells: Cells, place: Place, gaps: bool = False) -> NDArray[np.int32]:
        """(n,) The codes of a column; with `gaps`, IGNORED where a cell is empty."""
        cells = cells.tolist() if isinstance(cells, np.ndarray) else cells
        if not {*map(type, cells)} <= {str, int, float}:  # True is 1, for a dictionary; a list is no key of one
            return np.array([self._code(cell, place(i), gaps) for i, cell in enumerate(cells)], np.int32)
        for i, cell in enumerate(cells):
            if cell not in self._known:
                self._known[cell] = self._code(cell, place(i), gaps)
        return np.array([*map(self._known.__getitem__, cells)], np.int32)

    def _code(self, cell: Any, place: str, gaps: bool) -> int:
        return IGNORED if gaps and is_empty(cell) else self.add(self.parse(cell, place))

    def add(self, name: str) -> int:
        return self.codes.setdefault(name, len(self.codes))


YES_OR_NO = {"0": 0, "false": 0, "no": 0, "1": 1, "true": 1, "yes": 1}


def parse_flags(cells: Cells, place: Place, gaps: bool = False) -> NDArray[np.int8]:
    """(n,) 1 where a label holds, 0 where not; with `gaps`, IGNORED where a cell is empty."""
    cells = cells.tolist() if isinstance(cells, np.ndarray) else cells
    flags = np.empty(len(cells), np.int8)
    for i, cell in enumerate(cells):
        if isinstance(cell, list | dict):
            raise ValueError(f"{place(i)}: {show(cell)} is neither 0 or 1, false or true, nor no or yes")
        if is_empty(cell):
            if not gaps:
                raise ValueError(
                    f"{place(i)}: the cell is empty; 0 or 1 is expected (missing_labels: ignore, where it is not known)"
                )
            flags[i] = IGNORED
            continue
        flag = YES_OR_NO.get(parse_name(cell, place(i)).strip().lower())
        if flag is None:
            raise ValueError(f"{place(i)}: {show(cell)} is neither 0 or 1, false or true, nor no or yes")
        flags[i] = flag
    return flags


class SetEncoder:
    """Integer codes for sets of labels, in order of first appearance."""

    def __init__(self, separator: str | None, missing: str) -> None:
        self.separator, self.missing = separator, missing
        self.sets: dict[frozenset[str], int] = {}
        self.separates = False  # does the separator stand in a cell?
        self.whole: list[str] = []  # some texts in which it does not
        self._known: dict[str, int] = {}  # by cell, of texts

    def encode(self, cells: Cells, place: Place) -> NDArray[np.int32]:
        """(n,) The codes of a column; IGNORED where a cell is empty and this means that nothing is known."""
        codes = np.empty(len(cells), np.int32)
        for i, cell in enumerate(cells):
            if isinstance(cell, str):
                if cell not in self._known:
                    self._known[cell] = self._code(cell, place(i))
                codes[i] = self._known[cell]
            else:
                codes[i] = self._code(cell, place(i))
        return codes

    def names(self, code: int) -> frozenset[str]:
        """The labels of a set."""
        return list(self.sets)[code]

    def matrix(self, names: Sequence[str]) -> NDArray[np.int8]:
        """(sets + 1, K) Which of these labels each set holds; the last row, all IGNORED, is for none known."""
        number = {name: k for k, name in enumerate(names)}
        flags = np.zeros((len(self.sets) + 1, len(names)), np.int8)
        for labels, code in self.sets.items():
            flags[code, [number[name] for name in labels if name in number]] = 1
        flags[-1] = IGNORED
        return flags

    def _code(self, cell: Any, place: str) -> int:
        cell = cell.tolist() if isinstance(cell, np.ndarray) else cell
        if not isinstance(cell, list) and is_empty(cell):
            if self.missing == "ignore":
                return IGNORED
            if self.missing == "refuse":
                raise ValueError(
                    f"{place}: the cell is empty; say missing_labels: none where that means that no label holds, or "
                    "missing_labels: ignore where it is not known"
                )
            cell = []
        return self.sets.setdefault(frozenset(self._labels(cell, place)), len(self.sets))

    def _labels(self, cell: Any, place: str) -> list[str]:
        if isinstance(cell, str) and cell.lstrip().startswith("["):
            try:
                cell = json.loads(cell)
            except (ValueError, RecursionError):
                raise ValueError(f"{place}: {show(cell)} is not a list in JSON") from None
        elif self.separator is not None and not isinstance(cell, list):
            text = parse_name(cell, place)
            parts = (part.strip() for part in text.split(self.separator))
            cell = [part for part in parts if part]
            self.separates = self.separates or self.separator in text
            if not self.separates and len(self.whole) < 3:
                self.whole.append(text)
        if not isinstance(cell, list):
            raise ValueError(
                f"{place}: {show(cell)} is not a list of labels; say what stands between them (label_separator), or "
                "target: classes where a row has one"
            )
        return [parse_name(name, place).strip() for name in cell]


def sort_labels(labels: list[str]) -> list[str]:
    """As numbers if all are, else as text."""
    try:
        numbers = {label: float(label) for label in labels}
    except ValueError:
        return sorted(labels)
    if not all(math.isfinite(number) for number in numbers.values()):  # nan has no place in an order
        return sorted(labels)
    return sorted(labels, key=lambda label: (numbers[label], label))


# ------------------------------------------------------------------------------------------------- numbers and times


def parse_number(cell: Any, place: str) -> float:
    """A cell's number. Raises MissingValueError for a cell without a value, ValueError for anything but a number."""
    error = MissingValueError if is_missing(cell) else ValueError
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise error(f"{place}: the cell is empty; a number is expected")
    try:
        if _reads_oddly(str(cell)):
            raise ValueError
        number = float(cell)
    except (TypeError, ValueError):
        raise error(f"{place}: {show(cell)} is not a number") from None
    except OverflowError:
        number = HUGE
    if not abs(number) < HUGE:
        raise error(f"{place}: {show(cell)} is not a finite number below 1e18")
    return number


def parse_numbers(cells: Cells, place: Place, missing: Callable[[Any], bool] | None = None) -> NDArray[np.float64]:
    """(n,) The numbers of a column, NaN in cells that hold no value according to `missing`; None: every cell must hold
    one."""
    small = is_small if missing is None else is_small_or_nan
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf" and small(cells):
        return cells.astype(np.float64)
    gaps = [] if missing is None else [i for i, cell in enumerate(cells) if missing(cell)]
    if gaps:
        cells = list(cells)
        for i in gaps:
            cells[i] = 0.0
    try:
        numbers = np.array([*map(float, cells)])
        if not is_small(numbers) or _reads_oddly("".join(cell for cell in cells if isinstance(cell, str))):
            raise ValueError
    except (TypeError, ValueError, OverflowError):  # the first cell that is no number is named
        numbers = np.array([parse_number(cell, place(i)) for i, cell in enumerate(cells)])
    numbers[gaps] = np.nan
    return numbers


def is_missing(cell: Any) -> bool:
    """Does the cell hold no value? More texts say so than `is_empty` knows, since one of them may be a label."""
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    return cell is None or (isinstance(cell, float | np.floating) and bool(cell != cell))


def _reads_oddly(text: str) -> bool:
    """Python would read 1_000 as 1000, and digits of other scripts."""
    return "_" in text or not text.isascii()


def parse_times(cells: Cells, place: Place) -> NDArray[np.float64]:
    """(n,) Times of a column: numbers as they are, dates and times (ISO 8601; without a zone, UTC) in seconds."""
    if not len(cells) or isinstance(cells, np.ndarray) or _timestamp(cells[0]) is None:
        return parse_numbers(cells, place)
    times = [_timestamp(cell) for cell in cells]
    if None in times:
        i = times.index(None)
        raise ValueError(f"{place(i)}: {show(cells[i])} is no date and time, which the rows before have")
    return np.array(times, np.float64)


def _timestamp(cell: Any) -> float | None:
    """Seconds since 1970 of a date and time; None for another cell."""
    try:
        moment = datetime.fromisoformat(cell.strip()) if isinstance(cell, str) and "-" in cell[1:] else cell
    except ValueError:
        return None
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day)
    if not isinstance(moment, datetime):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip()) or cell != cell


def is_small(numbers: NDArray[Any]) -> bool:
    """Finite, also as float32."""
    return not numbers.size or float(np.abs(numbers).max()) < HUGE


def is_small_or_nan(numbers: NDArray[Any]) -> bool:
    return not bool((np.abs(numbers) >= HUGE).any())


def same_nan(numbers: NDArray[Any]) -> NDArray[Any]:
    """The numbers with the same bits in every NaN, so that equal rows are equal bytes."""
    if numbers.dtype.kind != "f" or not (gaps := np.isnan(numbers)).any():
        return numbers
    return np.where(gaps, numbers.dtype.type(np.nan), numbers)


# --------------------------------------------------------------------------------------------------------- sequences


def parse_list(cell: Any, place: str, gaps: bool = False) -> NDArray[Any]:
    """(L,) or (L, C) numbers of a list, or of the text that stands for one; with `gaps`, NaN where one is missing."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise ValueError(f"{place}: the cell is empty; leave the row out")
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            raise ValueError(f"{place}: {show(cell)} is not a list in JSON") from None
    elif isinstance(cell, str):
        return parse_numbers(cell.split(), lambda i: f"{place}, step {i + 1}", is_missing if gaps else None)
    if not isinstance(cell, list | np.ndarray):
        raise ValueError(f"{place}: {show(cell)} is not a list of numbers")
    try:
        steps = _with_gaps(cell) if gaps else np.asarray(cell) if len(cell) else np.empty(0)
        small = is_small_or_nan if gaps else is_small
        if steps.dtype.kind in "iuf" and (steps.ndim == 1 or (steps.ndim == 2 and steps.size)) and small(steps):
            return steps
    except (ValueError, OverflowError):
        pass  # lists of different lengths, a number that no float holds
    raise _flaw(cell, place, gaps)


def _with_gaps(cell: list[Any] | NDArray[Any]) -> NDArray[Any]:
    """The numbers of a list, NaN where one is missing; a step of several numbers may be missing as a whole. Raises
    ValueError for a list of other things."""
    if isinstance(cell, list):
        width = next((len(step) for step in cell if isinstance(step, list | np.ndarray)), 0)
        cell = [[math.nan] * width if width and is_missing(step) else step for step in cell]
    steps = np.asarray(cell) if len(cell) else np.empty(0)
    if steps.dtype.kind != "O":
        return steps
    if not {*map(type, steps.reshape(-1).tolist())} <= {int, float, type(None)}:
        raise ValueError
    return steps.astype(np.float64)


def parse_lists(cells: Sequence[Any], columns: Sequence[str], place: str, gaps: bool = False) -> NDArray[Any]:
    """(L, C) numbers of a row whose C columns each hold a list; with `gaps`, a list may be missing."""
    there = [cell for cell in cells if not (gaps and is_missing(cell))]
    if len(there) < len(cells) and there:
        absent = np.full(len(parse_list(there[0], place, gaps)), np.nan)
        cells = [absent if is_missing(cell) else cell for cell in cells]
    channels = [parse_list(cell, f"{place}, column {name}", gaps) for cell, name in zip(cells, columns, strict=True)]
    for name, channel in zip(columns, channels, strict=True):
        if channel.ndim != 1:
            raise ValueError(f"{place}, column {name}: a channel is a list of numbers, but lists stand in this one")
        if len(channel) != len(channels[0]):
            raise ValueError(
                f"{place}, column {name}: the list has {len(channel):,} steps, but {len(channels[0]):,} in column "
                f"{columns[0]}; the channels of a sequence are equally long"
            )
    return np.stack(channels, axis=1)


def _flaw(cell: Iterable[Any], place: str, gaps: bool) -> ValueError:
    """What makes this list no sequence."""
    first: int | None = None
    for i, step in enumerate(cell, 1):
        if gaps and step is None:
            continue
        channels = step if isinstance(step, list | np.ndarray) else [step]
        for number in channels:
            if gaps and is_missing(number) and not isinstance(number, str):
                continue
            if isinstance(number, str | bool | list | np.ndarray):
                return ValueError(f"{place}, step {i}: {show(number)} is not a number")
            try:
                parse_number(number, f"{place}, step {i}")
            except ValueError as error:
                return error
        size = len(channels) if channels is step else 0  # 0: a number by itself
        first = size if first is None else first
        if size != first:
            here, there = (f"a list of {n}" if n else "a number" for n in (size, first))
            return ValueError(f"{place}, step {i}: {here} stands here, {there} in the first step")
    return ValueError(f"{place}: not a list of numbers, nor of equally long lists of numbers")


def parse_token_ids(steps: NDArray[Any], place: str | Place) -> NDArray[np.int32]:
    """(L,) Token ids; `place` names the sequence, or each of its steps."""
    if steps.ndim != 1:
        raise ValueError(f"{place}: a token id is one number a step, not a list")
    wrong = np.flatnonzero((steps != np.floor(steps)) | (steps < 0) | (steps > MAX_ID))
    if len(wrong):
        i = int(wrong[0])
        step = f"{place}, step {i + 1}" if isinstance(place, str) else place(i)
        raise ValueError(f"{step}: {steps[i]:.12g} is no token id; these go from 0 to {MAX_ID:,}")
    return steps.astype(np.int32)


# ------------------------------------------------------------------------------------------------------ for messages


def show(cell: Any) -> str:
    text = repr(cell.item() if isinstance(cell, np.generic) else cell)
    return text if len(text) <= 40 else f"{text[:37]}..."


def suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [other for other in known if other.strip().lower() == name.strip().lower()]
    return f"; did you mean {near[0]!r}?" if near else list_names(known)


def list_names(known: Sequence[str]) -> str:
    return f"; there: {', '.join(map(show, known[:12]))}{', …' if len(known) > 12 else ''}"
