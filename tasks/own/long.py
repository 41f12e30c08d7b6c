"""A row of a table is one step (the long layout): rows of one id, in the order of their times, are a sequence.

n sequences, L steps of one, C channels, K target values.
"""

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.assembly import Examples
from spt.tasks.own.parsing import parse_numbers, parse_times, parse_token_ids
from spt.tasks.own.reading import Columns, TableReader
from spt.tasks.own.tables import Batch

REGULAR = 1e-3  # how far, of the median, times between steps may be apart and still be called regular


class LongReader(TableReader):
    def read_inputs(self, batch: Batch) -> Columns:
        config = self.config
        values = np.stack([parse_numbers(batch.columns[name], batch.place(name)) for name in self.inputs], axis=1)
        columns: Columns = {"values": values.astype(np.float32)}
        if config.tokens == "ids":
            if values.shape[1] != 1:
                raise ValueError(f"tokens: ids is one number a step, but there are {values.shape[1]} value columns")
            columns["values"] = parse_token_ids(values[:, 0], batch.place(self.inputs[0]))
        if config.time_column is not None:
            columns["time"] = parse_times(batch.columns[config.time_column], batch.place(config.time_column))
        return columns

    def examples(self) -> Examples:
        config = self.config
        table, notes = self._sorted(), list[str]()
        for what in ("split", "group"):
            self.check_same(table, "id", what, "a sequence has one")
        if not config.per_step:
            self.check_same(table, "id", "label", "a sequence has one; per_step: true gives every step its own")
        self.check_same(table, "group", "split", "a group belongs to one split")
        interval = self._interval(table, notes)
        table = self._cut(table, notes)
        starts = _starts(table["id"])
        labelled = slice(None) if config.per_step else starts
        labels = table["label"].astype(np.float32) if config.target == "real" else table["label"]
        unit = config.unit or "id"
        return Examples(
            table["values"],
            np.diff(starts, append=len(table["id"])),
            labels[labelled],
            table["source"][labelled],
            table["line"][labelled],
            table["split"][starts].astype(np.int64),
            self.keys(unit)[table[unit][starts]],
            np.array(self.names["id"].names)[table["id"][starts]],
            steps=table.get("steps"),
            labels=self.names["label"].names,
            notes=notes,
            interval=interval,
        )

    def _sorted(self) -> Columns:
        """The table by id, in the order in which these come first, then by time, or as the rows come."""
        table = self.table()
        order = np.lexsort((table["time"], table["id"])) if "time" in table else np.argsort(table["id"], kind="stable")
        for name in table:
            table[name] = table[name][order]
        if "time" in table:
            again = np.flatnonzero((np.diff(table["id"]) == 0) & (np.diff(table["time"]) == 0))
            if len(again):
                row = int(again[0])
                raise ValueError(
                    f"{self.place(table, row + 1)}, column {self.config.time_column}: the id "
                    f"{self.name(table, 'id', row)} has this time in {self.place(table, row)} already; "
                    "a step is one row"
                )
        return table

    def _interval(self, table: Columns, notes: list[str]) -> float:
        """The median time between steps. Irregular ones become a column, as multiples of it, 1 for a first step."""
        if "time" not in table:
            return 1.0
        apart = np.diff(table["time"], prepend=table["time"][:1])
        inner = np.ones(len(apart), bool)
        inner[_starts(table["id"])] = False
        between = apart[inner]
        if not len(between):
            return 1.0
        interval, low, high = float(np.median(between)), float(between.min()), float(between.max())
        if high - low <= REGULAR * interval:
            return interval
        if self.config.times == "steps":
            apart[~inner] = interval
            table["steps"] = (apart / interval).astype(np.float32)
        else:
            notes.append(
                f"times between steps are irregular ({low:g} to {high:g}, median {interval:g}) and ignored; times: "
                "steps gives them to models that take them"
            )
        return interval

    def _cut(self, table: Columns, notes: list[str]) -> Columns:
        """The table without the steps after max_length."""
        starts, most = _starts(table["id"]), self.config.max_length
        lengths = np.diff(starts, append=len(table["id"]))
        if most is None or lengths.max() <= most:
            return table
        too_long = np.flatnonzero(lengths > most)
        if not self.config.truncate:
            row, length = int(starts[too_long[0]]), int(lengths[too_long[0]])
            place = f"{self.place(table, row)}, id {self.name(table, 'id', row)}"
            raise ValueError(self.config.too_long(place, length))
        notes.append(f"{len(too_long)} of {len(lengths)} sequences were cut after {most} steps")
        kept = np.arange(len(table["id"])) - np.repeat(starts, lengths) < most
        return {name: column[kept] for name, column in table.items()}


def _starts(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """(n,) The first row of each sequence."""
    return np.flatnonzero(np.diff(ids, prepend=-1))
