"""From a split to batches: which examples, in which order, padded to the longest of the batch.

Letters: b examples in a batch, B sequences (of pairs 2 b, else b), L steps, C channels, K target values, n examples in
a split.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from spt.config.budget import steps_per_epoch
from spt.models.base import Context
from spt.rng import Draw, generator, order
from spt.tasks.base import IGNORED, Classes, Labels, Reals, Split, Target, Tokens, Values

NOBODY = -1  # an index that stands for no example: evens out the processes' shares, and weighs nothing


class Batch(NamedTuple):
    """Some examples of a split, their sequences on the right padded with zeros. Of pairs, all first sequences come
    first, then all second ones: B = 2 b."""

    x: Int[Tensor, "B L"] | Float[Tensor, "B L C"]  # tokens, or normalised values, NaN where one is missing
    raw: Int[Tensor, "B L C"] | None  # the values before normalisation, when they are levels
    context: Context
    # Of every example, or of every step, IGNORED or NaN where none is scored; None where labels were taken away. Labels
    # are 1, 0, or NaN.
    y: Int[Tensor, " b *L"] | Float[Tensor, "b *L K"] | None
    rows: Int[Tensor, " b"]  # row of the split: the address of chance; NOBODY counts for nothing
    partly: bool = False  # may a part of an answer be unknown?
    static: Float[Tensor, "b F"] | None = None  # what stands beside each sequence
    gaps: bool = False  # may values of this task be missing? (not: is one of this batch)

    @property
    def addresses(self) -> Int[Tensor, " B"]:
        """Of every sequence, for what chance decides in it: its row; of row r of pairs 2 r, then 2 r + 1."""
        if len(self.x) == len(self.rows):
            return self.rows
        return torch.cat([torch.where(self.real, 2 * self.rows + k, NOBODY) for k in range(2)])

    @property
    def real(self) -> Bool[Tensor, " b"]:
        return self.rows != NOBODY


def collate(split: Split, index: NDArray[np.int64], input: Tokens | Values, target: Target, least: int = 0) -> Batch:
    """These rows of a split as one batch, padded to the longest of them, or to `least` steps if that is more; NOBODY
    repeats the first of them, or row 0."""
    rows = np.where(index == NOBODY, next(iter(index[index != NOBODY]), 0), index)
    starts, lengths, cuts = split.starts[rows], split.lengths[rows], split.cuts
    if cuts is not None:
        starts = np.concatenate([starts, starts + cuts[rows]])
        lengths = np.concatenate([cuts[rows], lengths - cuts[rows]])
    longest = max(least, int(lengths.max()))
    steps = np.arange(longest)
    valid = steps < lengths[:, None]  # (B, L)
    padded = not bool(valid.all())
    places = np.where(valid, starts[:, None] + steps, starts[:, None]) if padded else starts[:, None] + steps
    values = np.asarray(split.values[places])  # (B, L) or (B, L, C)

    raw = None
    if isinstance(input, Tokens):
        x = torch.from_numpy(input.ids(values))
    else:
        if input.levels is not None:
            raw = torch.from_numpy(values.astype(np.int64))
        mean, std = np.array(input.mean, np.float32), np.array(input.std, np.float32)
        x = torch.from_numpy((values.astype(np.float32) - mean) / std)
    mask = torch.from_numpy(valid)
    if padded:
        x = x.masked_fill(~mask if x.ndim == 2 else ~mask[..., None], 0)

    y = None
    if split.targets is not None:
        kind = np.int64 if isinstance(target, Classes) else np.float32
        targets = np.array(split.targets[places if split.per_step else rows], dtype=kind, order="C")
        if split.per_step and padded:
            targets[~valid] = IGNORED if isinstance(target, Classes) else np.nan
        if isinstance(target, Labels):
            targets[targets == IGNORED] = np.nan
        y = torch.from_numpy(targets)
    times = None
    if split.steps is not None:
        times = torch.from_numpy(np.where(valid, split.steps[places], np.float32(1)))
    real = None if (index != NOBODY).all() else torch.from_numpy(np.tile(index != NOBODY, split.sequences))
    context = Context(mask, padded, times, real)
    partly = isinstance(target, Labels) or (isinstance(target, Reals) and target.missing)
    gaps = isinstance(input, Values) and input.missing
    static = None if split.static is None else torch.from_numpy(np.asarray(split.static[rows], np.float32))
    return Batch(x, raw, context, y, torch.from_numpy(np.asarray(index, np.int64)), partly, static, gaps)


def shuffled(batch: Batch, draw: Draw) -> Batch:
    """The batch with the steps of each sequence in another order: padding stays behind, times stay where they are, so
    that a sequence is as long as before and sampled at the same moments.

    A row's order follows from the draw's seed and use and from the row alone: it is the same in every epoch, as the
    rows themselves are.
    """
    valid = batch.context.valid.numpy()
    length = valid.shape[1]
    keys = Draw(draw.seed, f"{draw.use}, order of steps", 0).uniform(batch.addresses.numpy(), length)
    places = torch.from_numpy(np.argsort(np.where(valid, keys, 1 + np.arange(length)), axis=1, kind="stable"))

    def moved(values: Tensor) -> Tensor:
        return values.gather(1, places if values.ndim == 2 else places[..., None].expand_as(values))

    return batch._replace(x=moved(batch.x), raw=None if batch.raw is None else moved(batch.raw))


def training_rows(
    n: int,
    batch_size: int,
    seed: int,
    start: int,
    drop_last: bool = False,
    kinds: Sequence[NDArray[np.int64]] | None = None,
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, rows of the global batch) for optimiser steps start, start + 1, … without end. With the rows of `kinds`,
    such as classes, an epoch is n draws, in which each kind comes equally often.

    The position in the data follows from the step alone, which is what makes resuming exact.
    """
    per_epoch = steps_per_epoch(n, batch_size, drop_last)
    step = start
    while True:
        epoch, first = divmod(step, per_epoch)
        rows = order(n, seed, epoch) if kinds is None else _balanced_order(kinds, n, seed, epoch)
        for k in range(first, per_epoch):
            yield epoch, rows[k * batch_size : (k + 1) * batch_size]
            step += 1


def rows_by_kind(split: Split, target: Target) -> list[NDArray[np.int64]]:
    """The rows of each class; those in which each label holds, and those in which none does."""
    targets = np.asarray(split.targets)
    if isinstance(target, Labels):
        found = [*(targets == 1).T, ~(targets == 1).any(axis=1)]
    else:
        found = [targets == k for k in range(target.count)] if isinstance(target, Classes) else []
    return [rows for rows in map(np.flatnonzero, found) if len(rows)]


def _balanced_order(kinds: Sequence[NDArray[np.int64]], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """(n,) rows of one epoch, as many of each kind, but for one; none of them again before all of its kind have
    come."""
    chance = generator(seed, "balanced order", epoch)
    fewest, left = divmod(n, len(kinds))
    first = chance.permutation(len(kinds))[:left]  # have one more
    drawn = []
    for kind, rows in enumerate(kinds):
        count = fewest + int(kind in first)
        again = [chance.permutation(rows) for _ in range(-(-count // len(rows)))]
        drawn += again and [np.concatenate(again)[:count]]
    return chance.permutation(np.concatenate(drawn))


def by_length(rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows with the longest first, so that neighbours need little padding and memory peaks at once."""
    return rows[np.argsort(-lengths[rows], kind="stable")]


def share(rows: NDArray[np.int64], rank: int, world: int) -> NDArray[np.int64]:
    """This process's part of a global batch: every world-th row, so that long rows are dealt out evenly.

    All parts are equally long, filled up with NOBODY.
    """
    mine = rows[rank::world]
    padded = np.full(-(-len(rows) // world), NOBODY, np.int64)
    padded[: len(mine)] = mine
    return padded


def pieces(rows: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Cut into micro-batches of at most `size` rows."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def packed(rows: NDArray[np.int64], lengths: NDArray[np.int64], positions: int, least: int) -> list[NDArray[np.int64]]:
    """Cut rows that go from long to short: at most `positions` steps a piece, padding included, or `least` rows."""
    cut, first = [], 0
    while first < len(rows):
        size = max(least, positions // int(lengths[rows[first]]))
        cut.append(rows[first : first + size])
        first += size
    return cut
