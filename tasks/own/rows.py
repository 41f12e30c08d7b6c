"""A row of a table is one example: a text, a list of numbers, one number a column, or an array in a file of its own.

L steps of a sequence, C channels.
"""

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import TaskData
from spt.tasks.own import arrays
from spt.tasks.own.cells import list_of, listed, name_of, number_of, numbers_of, text_of, token_ids
from spt.tasks.own.options import Options
from spt.tasks.own.places import split_name
from spt.tasks.own.splits import NAMES, Draw, Together
from spt.tasks.own.tables import rows, where
from spt.tasks.own.whole import Gathered, assemble, stratified

PLAIN = (0.0, 1.0)  # the number that stands for zero, and the one above it for full scale


@dataclass
class Part:
    """A split as it grows: its rows end to end in one buffer, so that memory stays near the size of the data."""

    values: bytearray = field(default_factory=bytearray)
    lengths: "array[int]" = field(default_factory=lambda: array("q"))
    targets: "array[float]" = field(default_factory=lambda: array("d"))  # of classes: the number of the label
    ids: list[str] = field(default_factory=list)
    places: "array[int]" = field(default_factory=lambda: array("q"))  # which file, which line; alternating
    keys: "array[int]" = field(default_factory=lambda: array("Q"))  # of a stratified split

    def __len__(self) -> int:
        return len(self.lengths)


class Reading:
    """Takes the rows one after another, checks and converts them, and puts each into its split."""

    def __init__(self, config: Options, files: list[Path], given: set[str]) -> None:
        self.config, self.files, self.given = config, files, given
        self.draw = Draw(config, given)
        self.together = Together(config.group_column or config.id_column, files)
        self.parts = {name: Part() for name in NAMES}
        self.columns: list[str] = []  # of the input, in the first file's order
        self.labels: dict[str, int] = {}  # each label's number, until all are known
        self.words: dict[str, int] = {}  # likewise
        self.names: dict[str, tuple[int, int]] = {}  # ids that are unique, files: which file and line they stand in
        self.channels: tuple[int, str] | None = None  # of the first row, and where that is
        self.cut = 0  # sequences that were too long
        self.storage, self.scale = config.storage, PLAIN
        self.kind: tuple[str, int | None, str] | None = None  # of array files: ending, samples a second, where first
        self.folder = arrays.Folder(files[0].parent) if files else None

    @property
    def total(self) -> int:
        return sum(map(len, self.parts.values()))

    def read(self, split: str, path: Path) -> None:
        config, number, before = self.config, self.files.index(path), self.total
        extra = config.others
        at = {name: len(config.labels) + i for i, name in enumerate(extra)}
        named = config.group_column or config.id_column
        for line, cells in rows(path, lambda names, file: [*self.inputs(names, file), *config.labels, *extra]):
            place = where(path, line)
            n = len(self.columns)
            rest = cells[n:]
            steps, identity = self._sequence(cells[:n], place, number, line)
            targets = self._targets(rest, place)
            home, name = split, ""
            if config.split_column is not None:
                home = split_name(rest[at[config.split_column]], f"{place}, column {config.split_column}")
            if config.id_column is not None:
                name = name_of(rest[at[config.id_column]], f"{place}, column {config.id_column}")
                if config.group_column is not None:
                    self._once(name, f"{place}, column {config.id_column}: the id", number, line)
            elif config.file_column is not None:
                name = os.path.normpath(cells[0])
            if named is not None:
                group = name if named == config.id_column else name_of(rest[at[named]], f"{place}, column {named}")
                identity = group.encode()
            if home == "train" and config.split == "hash":
                home = self.draw.home(identity)
            part = self.parts[home]
            if named is not None:
                self.together.check(group, home, number, line)
            if name:
                part.ids.append(name)
            if config.split == "stratified":
                part.keys.append(self.draw.key(identity))
            part.values += steps.tobytes()
            part.lengths.append(len(steps))
            part.targets.extend(targets)
            part.places.extend((number, line))
        if self.total == before:
            raise ValueError(f"{path.name} has a header but no rows")

    def inputs(self, names: list[str], file: str) -> list[str]:
        """A file's input columns; with a prefix, those that the first file has."""
        self.columns = inputs(self.config, self.columns, names, file)
        return self.columns

    def _once(self, name: str, what: str, file: int, line: int) -> None:
        """Raise ValueError for a name that stands there before."""
        first = self.names.setdefault(name, (file, line))
        if first != (file, line):
            raise ValueError(f"{what} {name!r} stands in {where(self.files[first[0]], first[1])} already")

    # ------------------------------------------------------------------------------------------------------- sequences

    def _sequence(self, cells: list[Any], place: str, file: int, line: int) -> tuple[NDArray[Any], bytes]:
        """A row's steps as they are stored, and the bytes of its whole input."""
        config = self.config
        if config.text_column is not None:
            place = f"{place}, column {config.text_column}"
            text = text_of(cells[0], place)
            identity, steps = text.encode(), self._text_steps(text)
        else:
            if config.list_column is not None:
                place = f"{place}, column {config.list_column}"
                numbers = list_of(cells[0], place)
            elif config.file_column is not None:
                place = f"{place}, column {config.file_column}"
                numbers = self._file(cells[0], place, file, line)
            else:
                numbers = numbers_of(cells, self.columns, place)
            steps = token_ids(numbers, place) if config.tokens == "ids" else numbers.astype(self.storage, copy=False)
            identity = steps.tobytes()
        if not len(steps):
            raise ValueError(f"{place}: the sequence has no steps; leave the row out")
        found = steps.shape[1] if steps.ndim == 2 else 1
        self.channels = self.channels or (found, place)
        if found != self.channels[0]:
            raise ValueError(f"{place}: a step has {found} numbers, but {self.channels[0]} in {self.channels[1]}")
        if config.max_length is not None and len(steps) > config.max_length:
            if not config.truncate:
                raise ValueError(too_long(place, len(steps), config.max_length))
            self.cut += 1
            steps = steps[: config.max_length]
        return steps, identity

    def _text_steps(self, text: str) -> NDArray[Any]:
        if self.config.tokens == "bytes":
            return np.frombuffer(text.encode(), np.uint8)
        if self.config.tokens != "words":
            return np.frombuffer(text.encode("utf-32-le"), np.int32)  # code points
        words = re.findall(r"\w+|[^\w\s]", text)
        return np.array([self.words.setdefault(word, len(self.words)) for word in words], np.int32)

    def _file(self, cell: Any, place: str, file: int, line: int) -> NDArray[Any]:
        """The array in the file that a cell names."""
        root = self.files[file].parent
        if self.folder is None or self.folder.root != root:
            self.folder = arrays.Folder(root)
        path = self.folder.find(cell, place)
        self._once(os.path.normpath(cell), f"{place}: the file", file, line)
        steps, sound = arrays.read(path, self.config.array, place)
        kind = path.suffix.lower(), sound.rate, place
        self.kind = self.kind or kind
        if sound.rate != self.kind[1] and None not in (sound.rate, self.kind[1]):
            raise ValueError(
                f"{place}, {path.name}: {sound.rate:,} samples a second, but {self.kind[1]:,} in {self.kind[2]}; "
                "convert the files to one rate"
            )
        if (kind[0] == ".wav") != (self.kind[0] == ".wav"):
            raise ValueError(f"{place}: a {kind[0]} file, but a {self.kind[0]} file in {self.kind[2]}; give one kind")
        if not self.config.continuous:
            return steps
        if not self.total:  # small whole numbers are stored as such
            self.storage = steps.dtype if steps.dtype in (np.uint8, np.int16) else np.dtype(np.float32)
            self.scale = sound.scale if self.storage.kind != "f" else PLAIN
        if (steps.dtype, sound.scale) != (self.storage, self.scale):
            self._widen()
            zero, full = sound.scale
            steps = (steps.astype(np.float32) - np.float32(zero)) / np.float32(full)
        return steps

    def _widen(self) -> None:
        """Store all as float32, of full scale 1, since files of several types come."""
        zero, full = self.scale
        for part in self.parts.values():
            if self.storage != np.float32:
                found = np.frombuffer(part.values, self.storage).astype(np.float32)
                part.values = bytearray(((found - np.float32(zero)) / np.float32(full)).tobytes())
        self.storage, self.scale = np.dtype(np.float32), PLAIN

    def _targets(self, cells: Sequence[Any], place: str) -> Sequence[float]:
        config = self.config
        if config.target == "real":
            return [
                number_of(cell, f"{place}, column {name}") for cell, name in zip(cells, config.labels, strict=False)
            ]
        name = name_of(cells[0], f"{place}, column {config.label_column}")
        return [float(self.labels.setdefault(name, len(self.labels)))]

    # ------------------------------------------------------------------------------------------------------- the whole

    def task(self) -> TaskData:
        config = self.config
        if config.file_column is not None and config.unlisted == "refuse":
            self._check_listed()
        notes = []
        if self.cut:
            notes.append(f"{self.cut} of {self.total} sequences were cut after {config.max_length} steps")
        parts = {name: self._gathered(part) for name, part in self.parts.items()}
        if config.split == "stratified":
            keys = np.frombuffer(self.parts["train"].keys, np.uint64)
            parts = stratified(self.draw, keys, parts)
        rate = self.kind[1] if self.kind is not None else None
        return assemble(
            config,
            self.files,
            parts,
            list(self.labels),
            list(self.words),
            self.draw.missing,
            notes,
            scale=self.scale,
            interval=1.0 if rate is None else 1 / rate,
        )

    def _check_listed(self) -> None:
        """Raise ValueError when array files have no row, and so no label."""
        assert self.kind is not None
        kinds = {os.path.splitext(name)[1].lower() for name in self.names}
        for root in dict.fromkeys(path.parent for path in self.files):
            left = [name for name in arrays.files_in(root, sorted(kinds)) if name not in self.names]
            if left:
                raise ValueError(
                    f"the folder {root.name} has {len(left):,} files that no row of {self.files[0].name} "
                    f"names{listed(left)}; give them rows and labels, move them away, or say unlisted: ignore"
                )

    def _gathered(self, part: Part) -> Gathered:
        config = self.config
        values = np.frombuffer(part.values, self.storage)
        targets = np.frombuffer(part.targets, np.float64)
        files, lines = np.frombuffer(part.places, np.int64).reshape(-1, 2).T
        channels = self.channels[0] if self.channels is not None else 1
        return Gathered(
            values.reshape(-1, channels) if config.continuous else values,
            np.frombuffer(part.lengths, np.int64),
            targets.reshape(-1, len(config.labels)) if config.target == "real" else targets.astype(np.int64),
            files.astype(np.int32),
            lines,
            np.array(part.ids) if config.id_column is not None or config.file_column is not None else None,
        )


def inputs(config: Options, before: list[str], names: list[str], file: str) -> list[str]:
    """A file's input columns; with a prefix, those that the first file has, called `before`."""
    if config.value_prefix is None:
        return config.inputs
    others = {*config.labels, *config.others}
    found = [name for name in names if name.startswith(config.value_prefix) and name not in others]
    if not found:
        raise ValueError(f"{file} has no column that begins with {config.value_prefix!r}{listed(names)}")
    surplus = sorted(set(found) - set(before or found))
    if surplus:
        raise ValueError(f"{file} has a column {surplus[0]!r} that the rows before do not have")
    return before or found


def too_long(place: str, found: int, most: int) -> str:
    return f"{place}: the sequence has {found:,} steps, max_length is {most:,}; raise it, or cut with truncate: true"
