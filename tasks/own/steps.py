"""A row of a table is one step (the long layout): rows of one id, in the order of their times, are a sequence.

n sequences, L steps of one, C channels, K target values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED, TaskData
from spt.tasks.own.cells import Cells, empty, name_of, numbers_down, times_down, token_ids
from spt.tasks.own.options import Options
from spt.tasks.own.places import split_name
from spt.tasks.own.rows import inputs, too_long
from spt.tasks.own.splits import NAMES, Draw
from spt.tasks.own.tables import Batch, batches, where
from spt.tasks.own.whole import Gathered, assemble, stratified

REGULAR = 1e-3  # how far, of the median, times between steps may be apart and still be called regular


class Codes:
    """Numbers for names, in the order in which they come."""

    def __init__(self, meaning: Callable[[Any, str], str] = name_of) -> None:
        self.meaning = meaning
        self.names: dict[str, int] = {}
        self.cells: dict[Any, int] = {}  # as they stand in files: 3, "3" and "3.0" are one name

    def __call__(self, cells: Cells, place: Callable[[int], str], gaps: bool = False) -> NDArray[np.int32]:
        """(n,) The numbers of a column; with `gaps`, IGNORED where a cell is empty."""
        if isinstance(cells, np.ndarray):
            cells = cells.tolist()
        if bool in set(map(type, cells)):  # True is 1, for a dictionary
            cells = [str(cell).lower() if isinstance(cell, bool) else cell for cell in cells]
        try:
            found = [*map(self.cells.get, cells)]
        except TypeError:  # a list
            found = [None] * len(cells)
        if None in found:
            for i, code in enumerate(found):
                if code is None:
                    found[i] = self._number(cells[i], place, i, gaps)
        return np.array(found, np.int32)

    def _number(self, cell: Any, place: Callable[[int], str], i: int, gaps: bool) -> int:
        if gaps and empty(cell):
            return IGNORED
        if isinstance(cell, list | dict | np.ndarray) or cell not in self.cells:
            name = self.meaning(cell, place(i))
            self.cells[cell] = self.names.setdefault(name, len(self.names))
        return self.cells[cell]


class Reading:
    """Takes batches of rows, checks and converts them; sorts and cuts them into sequences when all are there."""

    def __init__(self, config: Options, files: list[Path], given: set[str]) -> None:
        self.config, self.files = config, files
        self.draw = Draw(config, given)
        self.columns: list[str] = []  # of the input, in the first file's order
        self.ids, self.labels, self.groups, self.homes = Codes(), Codes(), Codes(), Codes(split_name)
        self.kept: dict[str, list[NDArray[Any]]] = {}

    def read(self, split: str, path: Path) -> None:
        number, rows = self.files.index(path), 0
        for batch in batches(path, self._choose):
            rows += len(batch.lines)
            self._take(split, number, batch)
        if not rows:
            raise ValueError(f"{path.name} has a header but no rows")

    def _choose(self, names: list[str], file: str) -> list[str]:
        self.columns = inputs(self.config, self.columns, names, file)
        return [*self.columns, *self.config.labels, *self.config.others]

    def _take(self, split: str, file: int, batch: Batch) -> None:
        config, path = self.config, self.files[file]
        names = [*self.columns, *config.labels, *config.others]
        cells = dict(zip(names, batch.columns, strict=True))

        def place(column: str | None) -> Callable[[int], str]:
            return lambda i: f"{where(path, batch.lines[i])}, column {column}"

        found: dict[str, NDArray[Any]] = {
            "line": np.asarray(batch.lines, np.int64),
            "file": np.full(len(batch.lines), file, np.int32),
            "id": self.ids(cells[str(config.id_column)], place(config.id_column)),
        }
        values = np.stack([numbers_down(cells[name], place(name)) for name in self.columns], axis=1)
        if config.tokens == "ids":
            if values.shape[1] != 1:
                raise ValueError(f"tokens: ids is one number a step, but there are {values.shape[1]} value columns")
            found["values"] = _ids(values[:, 0], place(self.columns[0]))
        else:
            found["values"] = values.astype(np.float32)
        gaps = config.per_step
        if config.target == "real":
            reals = [numbers_down(cells[name], place(name), gaps) for name in config.labels]
            found["target"] = _all_or_none(np.stack(reals, axis=1), place(config.labels[0]))
        else:
            found["target"] = self.labels(cells[config.labels[0]], place(config.labels[0]), gaps)
        if config.group_column is not None:
            found["group"] = self.groups(cells[config.group_column], place(config.group_column))
        if config.time_column is not None:
            found["time"] = times_down(cells[config.time_column], place(config.time_column))
        if config.split_column is not None:
            found["home"] = self.homes(cells[config.split_column], place(config.split_column))
        else:
            found["home"] = np.full(
                len(batch.lines), self.homes.names.setdefault(split, len(self.homes.names)), np.int32
            )
        for name, column in found.items():
            self.kept.setdefault(name, []).append(column)

    # ------------------------------------------------------------------------------------------------------- the whole

    def task(self) -> TaskData:
        config = self.config
        table = {name: np.concatenate(self.kept.pop(name)) for name in list(self.kept)}
        table = self._sorted(table)
        ids = table["id"]
        starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(ids)) + 1])
        lengths = np.diff(starts, append=len(ids))
        own = np.repeat(np.arange(len(starts)), lengths)  # which sequence a row belongs to
        names = list(self.ids.names)
        self._check_constant(table, starts, own)
        steps, interval, notes = self._times(table, starts)
        lengths, keep = self._cut(table, starts, lengths, own, notes)
        homes = table["home"][starts]
        splits = [*self.homes.names]  # the names behind the codes of homes
        identities = names if config.group_column is None else list(self.groups.names)
        which = ids[starts] if config.group_column is None else table["group"][starts]
        training = np.array([NAMES.index(name) for name in splits])[homes]
        if config.split == "hash":
            drawn = np.array([NAMES.index(self.draw.home(name.encode())) for name in identities])[which]
            final = np.where(training == 0, drawn, training)
        else:
            final = training
        self._check_together(identities, which, final, table, starts)
        first = slice(None) if config.per_step else starts
        whole = Gathered(
            table["values"] if keep is None else table["values"][keep],
            lengths,
            table["target"][first] if keep is None or not config.per_step else table["target"][keep],
            table["file"][first] if keep is None or not config.per_step else table["file"][keep],
            table["line"][first] if keep is None or not config.per_step else table["line"][keep],
            np.array(names)[ids[starts]],
            steps if keep is None or steps is None else steps[keep],
        )
        del table
        parts = {name: whole.where(final == home) for home, name in enumerate(NAMES)}
        if config.split == "stratified":
            keys = np.array([self.draw.key(name.encode()) for name in identities], np.uint64)[which[final == 0]]
            parts = stratified(self.draw, keys, parts)
        return assemble(
            config, self.files, parts, list(self.labels.names), [], self.draw.missing, notes, interval=interval
        )

    def _sorted(self, table: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """By id, in the order in which these come first, then by time, or as they come."""
        ids, times = table["id"], table.get("time")
        same = ids[1:] == ids[:-1]
        ordered = ids[1:] > ids[:-1]
        ordered |= same if times is None else same & (times[1:] > times[:-1])
        if not ordered.all():
            order = np.argsort(ids, kind="stable") if times is None else np.lexsort((times, ids))
            for name in table:
                table[name] = table[name][order]
        if times is not None:
            ids, times = table["id"], table["time"]
            twice = np.flatnonzero((ids[1:] == ids[:-1]) & (times[1:] == times[:-1]))
            if len(twice):
                one, two = sorted((int(table["file"][i]), int(table["line"][i])) for i in (twice[0], twice[0] + 1))
                raise ValueError(
                    f"{where(self.files[two[0]], two[1])}, column {self.config.time_column}: the id "
                    f"{list(self.ids.names)[ids[twice[0]]]!r} has this time in {where(self.files[one[0]], one[1])} "
                    "already; a step is one row"
                )
        return table

    def _check_constant(
        self, table: dict[str, NDArray[Any]], starts: NDArray[np.int64], own: NDArray[np.int64]
    ) -> None:
        """Raise ValueError when label, split or group change within an id."""
        config = self.config
        kinds: list[tuple[str, str | None, str]] = [
            ("home", config.split_column, "split"),
            ("group", config.group_column, "group"),
        ]
        if not config.per_step:
            kinds.append(("target", config.labels[0], "label"))
        for name, column, what in kinds:
            if name not in table:
                continue
            found = table[name]
            apart = found != found[starts][own]
            apart = apart if apart.ndim == 1 else apart.any(axis=1)
            if apart.any():
                i = int(np.flatnonzero(apart)[0])
                j = int(starts[own[i]])
                here, there = (where(self.files[int(table["file"][k])], int(table["line"][k])) for k in (i, j))
                per_step = "; per_step: true gives every step its own" if what == "label" else ""
                at = f", column {column}" if column is not None else ""
                raise ValueError(
                    f"{here}{at}: the id {list(self.ids.names)[table['id'][i]]!r} has another {what} than in {there}; "
                    f"a sequence has one{per_step}"
                )

    def _check_together(
        self,
        names: list[str],
        which: NDArray[np.int32],
        homes: NDArray[np.int64],
        table: dict[str, NDArray[Any]],
        starts: NDArray[np.int64],
    ) -> None:
        """Raise ValueError when sequences of one group stand in two splits."""
        _, first, back = np.unique(which, return_index=True, return_inverse=True)
        apart = np.flatnonzero(homes != homes[first][back])
        if len(apart):
            i = int(apart[0])
            j = int(first[back[i]])
            here, there = (
                where(self.files[int(table["file"][starts[k]])], int(table["line"][starts[k]])) for k in (i, j)
            )
            raise ValueError(
                f"{here}, column {self.config.group_column}: the group {names[which[i]]!r} is in the {NAMES[homes[i]]} "
                f"split here and in the {NAMES[homes[j]]} split in {there}; a group belongs to one split"
            )

    def _times(
        self, table: dict[str, NDArray[Any]], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32] | None, float, list[str]]:
        """Time since the step before in units of the interval (1 for a first step), the interval, notes."""
        times = table.get("time")
        if times is None:
            return None, 1.0, []
        apart = np.diff(times, prepend=times[:1])
        inner = np.ones(len(times), bool)
        inner[starts] = False
        between = apart[inner]
        if not len(between):
            return None, 1.0, []
        interval = float(np.median(between))
        low, high = float(between.min()), float(between.max())
        if high - low <= REGULAR * interval:
            return None, interval, []
        told = self.config.times == "steps"
        notes = (
            []
            if told
            else [
                f"times between steps are irregular ({low:g} to {high:g}, median {interval:g}) and ignored; times: "
                "steps tells them to models that take them"
            ]
        )
        apart[~inner] = interval
        return (apart / interval).astype(np.float32) if told else None, interval, notes

    def _cut(
        self,
        table: dict[str, NDArray[Any]],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        own: NDArray[np.int64],
        notes: list[str],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Lengths, and which rows to keep (None: all), where sequences are longer than they may be."""
        most = self.config.max_length
        long = np.flatnonzero(lengths > most) if most is not None else np.zeros(0, np.int64)
        if most is None or not len(long):
            return lengths, None
        if not self.config.truncate:
            i = int(starts[long[0]])
            place = where(self.files[int(table["file"][i])], int(table["line"][i]))
            name = list(self.ids.names)[table["id"][i]]
            raise ValueError(too_long(f"{place}, id {name!r}", int(lengths[long[0]]), most))
        notes.append(f"{len(long)} of {len(lengths)} sequences were cut after {most} steps")
        return np.minimum(lengths, most), np.arange(len(own)) - starts[own] < most


def _ids(values: NDArray[np.float64], place: Callable[[int], str]) -> NDArray[np.int32]:
    try:
        return token_ids(values, "")
    except ValueError:
        for i, value in enumerate(values):
            token_ids(np.array([value]), place(i))
        raise


def _all_or_none(reals: NDArray[np.float64], place: Callable[[int], str]) -> NDArray[np.float32]:
    """(n, K) target values, of which a step has all or none."""
    gaps = np.isnan(reals)
    partly = np.flatnonzero(gaps.any(axis=1) & ~gaps.all(axis=1))
    if len(partly):
        raise ValueError(f"{place(int(partly[0]))}: a step has all of its label columns or none; some cells are empty")
    return reals.astype(np.float32)
