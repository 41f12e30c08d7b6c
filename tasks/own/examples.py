"""A row of a table is one example: a text, a list of numbers, one number a column, or an array in a file of its own.

L steps of a sequence, C channels.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own import arrays
from spt.tasks.own.arrays import FULL_SCALE
from spt.tasks.own.assembly import Examples
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import NameEncoder, Place, list_names, parse_list, parse_numbers, parse_text, parse_token_ids
from spt.tasks.own.reading import Columns, TableReader
from spt.tasks.own.splits import hash_key
from spt.tasks.own.tables import Batch


class ExampleReader(TableReader):
    def __init__(self, config: Options, files: list[Path]) -> None:
        super().__init__(config, files)
        self.names["file"] = NameEncoder()
        self.words: dict[str, int] = {}  # numbered as they come
        self.values = bytearray()  # the steps of all rows, one buffer: memory stays near the size of the data
        self.storage, self.scale = config.storage, FULL_SCALE
        self.channels: tuple[int, str] | None = None  # of the first row, and where that is
        self.first_file: tuple[str, int | None, str] | None = None  # ending, samples a second, where
        self.n_cut = 0

    def read_inputs(self, batch: Batch) -> Columns:
        config = self.config
        place = batch.place(config.input_column)
        lengths, keys = [], []
        for i, (steps, identity) in enumerate(self._sequences(batch)):
            if not len(steps):
                raise ValueError(f"{place(i)}: the sequence has no steps; leave the row out")
            channels = steps.shape[1] if steps.ndim == 2 else 1
            self.channels = self.channels or (channels, place(i))
            if channels != self.channels[0]:
                raise ValueError(
                    f"{place(i)}: a step has {channels} numbers, but {self.channels[0]} in {self.channels[1]}"
                )
            if config.max_length is not None and len(steps) > config.max_length:
                if not config.truncate:
                    raise ValueError(config.too_long(place(i), len(steps)))
                self.n_cut += 1
                steps = steps[: config.max_length]
            self.values += steps.tobytes()
            lengths.append(len(steps))
            if config.unit is None:
                keys.append(hash_key(identity, config.split_seed))
        columns: Columns = {"length": np.array(lengths, np.int64), "key": np.array(keys, np.uint64)}
        if config.file_column is not None:
            names = map(os.path.normpath, batch.columns[config.file_column])
            columns["file"] = np.array([self.names["file"].add(name) for name in names], np.int32)
        return columns

    def _sequences(self, batch: Batch) -> Iterator[tuple[NDArray[Any], bytes]]:
        """Each row's steps as they are stored, and the bytes of its whole input."""
        config, place = self.config, batch.place(self.config.input_column)
        if config.text_column is not None:
            for i, cell in enumerate(batch.columns[config.text_column]):
                text = parse_text(cell, place(i))
                yield self._tokens(text), text.encode()
            return
        for i, numbers in enumerate(self._arrays(batch, place)):
            if config.tokens == "ids":
                numbers = parse_token_ids(numbers, place(i))
            steps = numbers.astype(self.storage, copy=False)
            yield steps, steps.tobytes()

    def _arrays(self, batch: Batch, place: Place) -> Iterator[NDArray[Any]]:
        config = self.config
        if config.list_column is not None:
            yield from (parse_list(cell, place(i)) for i, cell in enumerate(batch.columns[config.list_column]))
        elif config.file_column is not None:
            for i, cell in enumerate(batch.columns[config.file_column]):
                yield self._file(arrays.find(batch.path.parent, cell, place(i)), place(i))
        else:
            columns = [parse_numbers(batch.columns[name], batch.place(name)) for name in self.inputs]
            yield from np.stack(columns, axis=1)

    def _tokens(self, text: str) -> NDArray[Any]:
        if self.config.tokens == "bytes":
            return np.frombuffer(text.encode(), np.uint8)
        if self.config.tokens != "words":
            return np.frombuffer(text.encode("utf-32-le"), np.int32)  # code points
        words = re.findall(r"\w+|[^\w\s]", text)
        return np.array([self.words.setdefault(word, len(self.words)) for word in words], np.int32)

    def _file(self, path: Path, place: str) -> NDArray[Any]:
        """A file's array; small integers as they are, as long as all files have them."""
        recording = arrays.read(path, self.config.array, place)
        ending = path.suffix.lower()
        if self.first_file is None:
            self.first_file = ending, recording.rate, place
            if self.config.continuous and recording.steps.dtype in (np.uint8, np.int16):
                self.storage, self.scale = recording.steps.dtype, recording.scale
        first_ending, rate, first_place = self.first_file
        if recording.rate != rate and None not in (recording.rate, rate):
            raise ValueError(
                f"{place}, {path.name}: {recording.rate:,} samples a second, but {rate:,} in {first_place}; "
                "convert the files to one rate"
            )
        if (ending == ".wav") != (first_ending == ".wav"):
            raise ValueError(f"{place}: a {ending} file, but a {first_ending} file in {first_place}; give one kind")
        if not self.config.continuous or (recording.steps.dtype, recording.scale) == (self.storage, self.scale):
            return recording.steps
        if self.storage != np.float32:  # files of several types: all as float32 of full scale 1
            self.values = bytearray(_scaled(np.frombuffer(self.values, self.storage), self.scale).tobytes())
            self.storage, self.scale = np.dtype(np.float32), FULL_SCALE
        return _scaled(recording.steps, recording.scale)

    # --------------------------------------------------------------------------------------------- when all are read

    def examples(self) -> Examples:
        config, table = self.config, self.table()
        if config.unit is not None:
            alone = " (without id_column, every row is its own)" if config.unit == "id" else ""
            self.check_same(table, config.unit, "split", f"an id or a group belongs to one split{alone}")
        if config.unit == "group" and config.id_column is not None:
            self.check_once(table, "id")
        ids = None
        if config.file_column is not None:
            self.check_once(table, "file")
            self._check_listed()
            ids = np.array(self.names["file"].names)
        if config.id_column is not None:
            ids = np.array(self.names["id"].names)[table["id"]]
        n = len(table["length"])
        rate = self.first_file[1] if self.first_file is not None else None
        values = np.frombuffer(self.values, self.storage)
        assert self.channels is not None
        return Examples(
            values.reshape(-1, self.channels[0]) if config.continuous else values,
            table["length"],
            table["label"],
            table["source"],
            table["line"],
            table["split"].astype(np.int64),
            table["key"] if config.unit is None else self.keys(config.unit)[table[config.unit]],
            ids,
            labels=self.names["label"].names,
            words=list(self.words),
            notes=[f"{self.n_cut} of {n} sequences were cut after {config.max_length} steps"] if self.n_cut else [],
            scale=self.scale,
            interval=1.0 if rate is None else 1 / rate,
        )

    def _check_listed(self) -> None:
        """Raise ValueError when array files have no row, and so no label."""
        if self.config.unlisted == "ignore":
            return
        listed = self.names["file"].codes
        endings = sorted({os.path.splitext(name)[1].lower() for name in listed})
        for root in dict.fromkeys(path.parent for path in self.files):
            unlisted = [name for name in arrays.files_in(root, endings) if name not in listed]
            if unlisted:
                raise ValueError(
                    f"the folder {root.name} has {len(unlisted):,} files that no row of {self.files[0].name} "
                    f"names{list_names(unlisted)}; give them rows and labels, move them away, or say unlisted: ignore"
                )


def _scaled(steps: NDArray[Any], scale: tuple[float, float]) -> NDArray[np.float32]:
    zero, full = scale
    return np.asarray((steps.astype(np.float32) - np.float32(zero)) / np.float32(full))
