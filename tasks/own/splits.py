"""Which rows are for validation and test, where the data do not say: by a hash, or with equal shares of a class."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.options import Options
from spt.tasks.own.tables import where

NAMES = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)


class Draw:
    """Where training rows go; `given` are the splits that the data have."""

    def __init__(self, config: Options, given: Iterable[str]) -> None:
        self.seed = str(config.split_seed).encode()
        given = set(given)
        self.missing = [name for name in NAMES[1:] if name not in given]
        test = config.test_fraction if "test" in self.missing else 0.0
        validation = config.validation_fraction if "validation" in self.missing else 0.0
        self.borders = test, test + validation
        self.shares = 1 - test - validation, validation, test

    def key(self, identity: bytes) -> int:
        """A row's place in [0, 2^64): it follows from its id or input alone, whatever other rows there are."""
        return int.from_bytes(hashlib.blake2b(identity, digest_size=8, key=self.seed).digest(), "little")

    def home(self, identity: bytes) -> str:
        place = self.key(identity) / 2**64
        return "test" if place < self.borders[0] else "validation" if place < self.borders[1] else "train"

    def stratify(
        self, keys: NDArray[np.uint64], rows: NDArray[np.int64], classes: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """(n,) 0, 1, 2 for train, validation, test, so that each gets its share of each class, as near as it goes.

        keys: (n,), equal for rows that stay together. The k-th triple (rows, classes, counts) says how often a class
        occurs in a row. Units of one key are placed largest first, in the order of their keys, each where its classes
        are most wanted (Sainte-Laguë's rule); the first of a class goes to training. The order of rows plays no part.
        """
        unique, unit = np.unique(keys, return_inverse=True)
        kinds = int(classes.max(initial=0)) + 1
        cells, which = np.unique(unit[rows] * kinds + classes, return_inverse=True)
        amounts = np.bincount(which, weights=counts).astype(np.int64)
        units, classes = cells // kinds, cells % kinds  # sorted by unit
        starts = np.searchsorted(units, np.arange(len(unique) + 1))
        sizes = np.add.reduceat(amounts, starts[:-1]) if len(units) else np.zeros(0, np.int64)
        homes = np.zeros(len(unique), np.int64)
        if len(units) == len(unique) and (sizes == 1).all():  # one row, one class each: the same turns for every class
            order = np.argsort(classes, kind="stable")  # within a class by key
            ends = np.cumsum(np.bincount(classes, minlength=kinds))
            ranks = np.arange(len(order)) - (ends - np.diff(ends, prepend=0))[classes[order]]
            homes[order] = self._turns(int(ranks.max(initial=-1)) + 1)[ranks]
        else:
            self._place(homes, np.argsort(-sizes, kind="stable"), starts, classes, amounts)
        return homes[unit]

    def _turns(self, n: int) -> NDArray[np.int64]:
        """Homes of the first n single rows of a class."""
        homes = np.zeros(n, np.int64)
        self._place(homes, np.arange(n), np.arange(n + 1), np.zeros(n, np.int64), np.ones(n, np.int64))
        return homes

    def _place(
        self,
        homes: NDArray[np.int64],
        order: NDArray[np.int64],
        starts: NDArray[np.int64],
        classes: NDArray[np.int64],
        amounts: NDArray[np.int64],
    ) -> None:
        have = [[0] * (int(classes.max(initial=0)) + 1) for _ in NAMES]
        shares = [(home, share) for home, share in enumerate(self.shares) if share]
        kinds, counts, ends = classes.tolist(), amounts.tolist(), starts.tolist()
        for one in order.tolist():
            cells = range(ends[one], ends[one + 1])
            best, most = TRAIN, -1.0
            if all(have[TRAIN][kinds[i]] for i in cells):
                for home, share in shares:
                    wish = sum(counts[i] / (have[home][kinds[i]] + counts[i] / 2) for i in cells) * share
                    if wish > most + 1e-12:
                        best, most = home, wish
            for i in cells:
                have[best][kinds[i]] += counts[i]
            homes[one] = best


class Together:
    """Sees that rows of one name stay in one split."""

    def __init__(self, column: str | None, files: Sequence[Path]) -> None:
        self.column, self.files = column, files
        self.homes: dict[str, tuple[str, int, int]] = {}  # split, file and line of the first row

    def check(self, name: str, home: str, file: int, line: int) -> None:
        other, *first = self.homes.setdefault(name, (home, file, line))
        if other != home:
            raise ValueError(
                f"{where(self.files[file], line)}, column {self.column}: the id {name!r} is in the {home} split here "
                f"and in the {other} split in {where(self.files[first[0]], first[1])}; an id belongs to one split "
                "(without id_column, every row is its own)"
            )
