"""What a cell means: text, a name, a number, a list of numbers; and how a cell is shown when it means none of them.

Each takes a cell as its format gives it (text, a number, a list, None) and the place that a complaint names. L steps, C
channels.
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

MAX_ID = 1_000_000  # of token ids: an embedding has a row for each up to the largest
MAX_NAME = 200  # characters of a label or an id
HUGE = 1e18  # float32 holds the square of what is below

Cells = Sequence[Any] | NDArray[Any]  # of a column; an array: numbers without gaps


def text_of(cell: Any, where: str) -> str:
    if cell is None:
        raise ValueError(f"{where}: the cell is empty; leave the row out")
    if not isinstance(cell, str):
        raise ValueError(f"{where}: {show(cell)} is not text")
    try:
        cell.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the text holds half of a surrogate pair, which is no character") from None
    return cell


def name_of(cell: Any, where: str) -> str:
    """A label or an id as text, whatever the file's format: 3, "3", 3.0 and "3.0" are one; "03" is another."""
    if isinstance(cell, bytes | list | dict | np.ndarray):
        raise ValueError(f"{where}: {show(cell)} is neither text nor a number")
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    elif isinstance(cell, bool):
        cell = str(cell).lower()
    elif cell is None or cell != cell:
        cell = ""
    name = str(cell)
    if not name.strip():
        raise ValueError(f"{where}: the cell is empty")
    if re.fullmatch(r"-?(0|[1-9][0-9]*)\.0*", name):
        name = name.partition(".")[0]
    elif name in ("True", "TRUE", "False", "FALSE"):
        name = name.lower()
    if len(name) > MAX_NAME:
        raise ValueError(f"{where}: {len(name):,} characters are too many here; at most {MAX_NAME}")
    return text_of(name, where)


def sorted_labels(labels: list[str]) -> list[str]:
    """As numbers if all are, else as text."""
    try:
        numbers = {label: float(label) for label in labels}
    except ValueError:
        return sorted(labels)
    if not all(math.isfinite(number) for number in numbers.values()):  # nan has no place in an order
        return sorted(labels)
    return sorted(labels, key=lambda label: (numbers[label], label))


def fractional(label: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.\d*|\.?\d+(\.\d*)?[eE][-+]?\d+|\.\d+)", label) is not None


def number_of(cell: Any, where: str) -> float:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise ValueError(f"{where}: the cell is empty; a number is expected")
    try:
        if (isinstance(cell, str) and not cell.isascii()) or "_" in str(cell):
            raise ValueError  # Python would read 1_000 as 1000, and digits of other scripts
        number = float(cell)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {show(cell)} is not a number") from None
    except OverflowError:
        number = HUGE
    if not abs(number) < HUGE:
        raise ValueError(f"{where}: {show(cell)} is not a finite number below 1e18")
    return number


def quick(cells: Cells) -> NDArray[np.float64] | None:
    """(L,) numbers, if every cell is a plain one below 1e18; None where `number_of` has to look at each."""
    try:
        whole = "".join(cells)  # one look at all of them
        odd = "_" in whole or not whole.isascii()
    except TypeError:
        odd = any(isinstance(cell, str) and ("_" in cell or not cell.isascii()) for cell in cells)
    try:
        numbers = np.array([*map(float, cells)])
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if not odd and small(numbers) else None


def numbers_of(cells: Sequence[Any], columns: Sequence[str], where: str) -> NDArray[np.float64]:
    """(L,) One number of each of these columns."""
    numbers = quick(cells)
    if numbers is not None:
        return numbers
    return np.array([number_of(cell, f"{where}, column {name}") for cell, name in zip(cells, columns, strict=True)])


def numbers_down(cells: Cells, where: Callable[[int], str], gaps: bool = False) -> NDArray[np.float64]:
    """(n,) The numbers of a column; with `gaps`, NaN where a cell is empty. `where` names the i-th cell."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf" and small(cells):
        return cells.astype(np.float64)
    numbers = None if isinstance(cells, np.ndarray) else quick(cells)
    if numbers is not None:
        return numbers
    items = cells.tolist() if isinstance(cells, np.ndarray) else cells
    return np.array([math.nan if gaps and empty(cell) else number_of(cell, where(i)) for i, cell in enumerate(items)])


def times_down(cells: Cells, where: Callable[[int], str]) -> NDArray[np.float64]:
    """(n,) Times of a column: numbers as they are, dates and times (ISO 8601; without a zone, UTC) in seconds."""
    first = cells[0] if len(cells) else None
    if not (isinstance(first, date) or (isinstance(first, str) and _moment(first) is not None)):
        return numbers_down(cells, where)
    found = [_moment(cell) for cell in cells]
    for i, moment in enumerate(found):
        if moment is None:
            raise ValueError(f"{where(i)}: {show(cells[i])} is no date and time, which the rows before have")
    return np.array(found, np.float64)


def _moment(cell: Any) -> float | None:
    """Seconds since 1970 of a date and time."""
    try:
        moment = datetime.fromisoformat(cell.strip()) if isinstance(cell, str) and "-" in cell[1:] else cell
    except ValueError:
        return None
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day)
    if not isinstance(moment, datetime):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip()) or cell != cell


def list_of(cell: Any, where: str) -> NDArray[Any]:
    """(L,) or (L, C) numbers of a list, or of the text that stands for one."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise ValueError(f"{where}: the cell is empty; leave the row out")
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: {show(cell)} is not a list in JSON") from None
    elif isinstance(cell, str):
        words = cell.split()
        steps = quick(words)
        if steps is not None:
            return steps
        return np.array([number_of(word, f"{where}, step {i}") for i, word in enumerate(words, 1)])
    if not isinstance(cell, list | np.ndarray):
        raise ValueError(f"{where}: {show(cell)} is not a list of numbers")
    try:
        steps = np.asarray(cell) if len(cell) else np.empty(0)
        if steps.dtype.kind in "iuf" and steps.ndim in (1, 2) and small(steps):
            return steps
    except ValueError:
        pass  # lists of different lengths
    raise ValueError(f"{where}{_flaw(cell)}")


def _flaw(cell: Iterable[Any]) -> str:
    """What makes this list no sequence."""
    first: int | None = None
    for i, step in enumerate(cell, 1):
        channels = step if isinstance(step, list | np.ndarray) else [step]
        for number in channels:
            if isinstance(number, str | bool | list | np.ndarray):
                return f", step {i}: {show(number)} is not a number"
            try:
                number_of(number, f", step {i}")
            except ValueError as error:
                return str(error)
        found = len(channels) if channels is step else 0  # 0: a number by itself
        first = found if first is None else first
        if found != first:
            return f", step {i}: {_kind(found)} stands here, {_kind(first)} in the first step"
    return ": not a list of numbers, nor of equally long lists of numbers"


def _kind(channels: int) -> str:
    return f"a list of {channels}" if channels else "a number"


def token_ids(steps: NDArray[Any], where: str) -> NDArray[np.int32]:
    if steps.ndim != 1:
        raise ValueError(f"{where}: a token id is one number a step, not a list")
    wrong = np.flatnonzero((steps != np.floor(steps)) | (steps < 0) | (steps > MAX_ID))
    if len(wrong):
        step = int(wrong[0])
        raise ValueError(f"{where}, step {step + 1}: {steps[step]:.12g} is no token id; these go from 0 to {MAX_ID:,}")
    return steps.astype(np.int32)


def small(steps: NDArray[Any]) -> bool:
    """Finite, also as float32."""
    return not steps.size or float(np.abs(steps).max()) < HUGE


def show(cell: Any) -> str:
    text = repr(cell.item() if isinstance(cell, np.generic) else cell)
    return text if len(text) <= 40 else f"{text[:37]}..."


def nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [one for one in known if one.strip().lower() == name.strip().lower()]
    return f"; did you mean {near[0]!r}?" if near else listed(known)


def listed(known: Sequence[str]) -> str:
    return f"; there: {', '.join(map(show, known[:12]))}{', …' if len(known) > 12 else ''}"
