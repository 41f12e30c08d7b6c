"""The text format .ts of the UEA and UCR archives of time series, strictly.

A header of lines that begin with @, then one line per series: channels separated by ":", numbers separated by ",", and
the label at the end. "?" is a missing number. No library is used: aeon's and sktime's readers, the field's own, come
with dependencies that conflict with those of other packages here.
"""

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.limits import MAX_CHANNELS
from spt.tasks.own.parsing import parse_numbers, show

SERIES, LABEL = "series", "label"  # names of the two columns
YES = {"true": True, "false": False}
KNOWN = {  # of a header; other keys are refused, since what they mean for the data is not known
    *("problemname", "timestamps", "missing", "univariate", "dimension", "dimensions", "equallength", "serieslength"),
    *("classlabel", "targetlabel", "data"),
}
MISSING = {"?", "nan", "NaN"}


@dataclass
class Header:
    """What a file says about its series."""

    timestamps: bool = False
    missing: bool = True
    univariate: bool | None = None
    channels: int | None = None
    length: int | None = None
    equal: bool = False
    labels: set[str] | None = None  # that classes may have; empty: any
    target: bool = False  # is the label a number?
    said: set[str] = field(default_factory=set)

    @property
    def labelled(self) -> bool:
        return self.target or self.labels is not None

    def read(self, line: str, place: str) -> None:
        key, _, value = line[1:].strip().partition(" ")
        key, value = key.lower(), value.strip()
        if key not in KNOWN:
            raise ValueError(f"{place}: @{key} is not known in a .ts file")
        if key in self.said:
            raise ValueError(f"{place}: @{key} stands twice")
        self.said.add(key)
        if key in ("timestamps", "missing", "univariate", "equallength"):
            setattr(self, {"equallength": "equal"}.get(key, key), _flag(key, value, place))
        elif key in ("dimension", "dimensions"):
            self.channels = _count(key, value, place, MAX_CHANNELS)
        elif key == "serieslength":
            self.length = _count(key, value, place, 2**31)
        elif key == "targetlabel":
            self.target = _flag(key, value, place)
        elif key == "classlabel":
            flag, *labels = value.split() or [""]
            self.labels = {*labels} if _flag(key, flag, place) else None
        if self.timestamps:
            raise ValueError(
                f"{place}: series with timestamps are not read; write a table with a row for each step (layout: long)"
            )
        if self.target and self.labels is not None:
            raise ValueError(f"{place}: @classLabel and @targetLabel are both given; a series has one label")

    def finish(self, place: str) -> None:
        if not self.said & {"classlabel", "targetlabel"}:
            raise ValueError(
                f"{place}: before @data the header says neither @classLabel nor @targetLabel, true or false"
            )
        if self.univariate and self.channels not in (None, 1):
            raise ValueError(f"{place}: the header says @univariate true and {self.channels} dimensions")
        if self.univariate:
            self.channels = 1


def read_series(lines: Iterator[str], path: Path) -> Generator[tuple[int, list[str], list[Any]], None, None]:
    """Line, columns and cells of every series; a cell is (L,) or (L, C) numbers, NaN where one is missing."""
    header, begun, columns = Header(), False, [SERIES]
    for number, text in enumerate(lines, 1):
        line, place = text.strip(), f"{path.name}, line {number}"
        if not line or line.startswith("#"):
            continue
        if not begun:
            if not line.startswith("@"):
                raise ValueError(f"{place}: a header line begins with @, and @data comes before the series")
            header.read(line, place)
            if line[1:].strip().lower() == "data":
                header.finish(place)
                begun = True
                columns = [SERIES, LABEL] if header.labelled else [SERIES]
            continue
        *channels, label = line.split(":") if header.labelled else [*line.split(":"), ""]
        if not channels:
            raise ValueError(f"{place}: a label behind a last ':' is announced by the header, but there is none")
        if header.channels is None:
            header.channels = len(channels)
        series = _series(channels, header, place)
        yield number, columns, [series, _label(label.strip(), header, place)] if header.labelled else [series]
    if not begun:
        raise ValueError(f"{path.name} has no @data, behind which the series stand")


def _series(channels: Sequence[str], header: Header, place: str) -> NDArray[np.float64]:
    if len(channels) != header.channels:
        raise ValueError(f"{place}: the series has {len(channels)} dimensions, {header.channels} are expected")
    read = [_numbers(text, header, f"{place}, dimension {i}") for i, text in enumerate(channels, 1)]
    for i, channel in enumerate(read[1:], 2):
        if len(channel) != len(read[0]):
            raise ValueError(
                f"{place}, dimension {i}: {len(channel):,} steps, but {len(read[0]):,} in the first; dimensions of one "
                "series are equally long"
            )
    if header.equal and header.length is None:
        header.length = len(read[0])
    if header.equal and len(read[0]) != header.length:
        raise ValueError(f"{place}: the series has {len(read[0]):,} steps, the header says {header.length:,} for all")
    return read[0] if len(read) == 1 else np.stack(read, axis=1)


def _numbers(text: str, header: Header, place: str) -> NDArray[np.float64]:
    if "(" in text:
        raise ValueError(f"{place}: steps with timestamps, in brackets, are not read; write a table with a row a step")
    cells = [cell.strip() for cell in text.split(",")]
    if cells == [""]:
        raise ValueError(f"{place}: there are no steps")
    missing = np.array([cell in MISSING for cell in cells])
    if missing.any() and not header.missing:
        step = int(np.argmax(missing)) + 1
        raise ValueError(
            f"{place}, step {step}: {show(cells[step - 1])} stands here, but the header says @missing false"
        )
    numbers = np.full(len(cells), np.nan)
    there = np.flatnonzero(~missing)
    numbers[there] = parse_numbers([cells[i] for i in there], lambda i: f"{place}, step {there[i] + 1}")
    return numbers


def _label(text: str, header: Header, place: str) -> str | float:
    if not text:
        raise ValueError(f"{place}: the label behind the last ':' is empty")
    if header.target:
        return float(parse_numbers([text], lambda _: f"{place}, label")[0])
    if header.labels and text not in header.labels:
        raise ValueError(f"{place}: the label {show(text)} is none of those that the header names")
    return text


def _flag(key: str, value: str, place: str) -> bool:
    if value.lower() not in YES:
        raise ValueError(f"{place}: @{key} is {show(value)}; true or false is expected")
    return YES[value.lower()]


def _count(key: str, value: str, place: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value) or not 1 <= int(value) <= most:
        raise ValueError(f"{place}: @{key} is {show(value)}; a number from 1 to {most:,} is expected")
    return int(value)
