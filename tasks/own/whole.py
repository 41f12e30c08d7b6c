"""The task, once all rows are read: classes numbered, vocabulary and statistics made, notes written."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED, Classes, Reals, Split, TaskData, Tokens, Values
from spt.tasks.own.cells import fractional, nearest, sorted_labels
from spt.tasks.own.options import Options
from spt.tasks.own.splits import NAMES, Draw
from spt.tasks.own.tables import where

WORD_CODES = 2**22  # numbers that words are hashed to; half of them may be in use


@dataclass
class Gathered:
    """A split's rows: n examples of `total` steps together; m is n, or `total` where every step has a label."""

    values: NDArray[Any]  # (total,) tokens or (total, C)
    lengths: NDArray[np.int64]  # (n,)
    targets: NDArray[Any]  # (m,) numbers of labels, or (m, K) reals
    files: NDArray[np.int32]  # (m,) the file that a target comes from, as a position in the list of files
    lines: NDArray[np.int64]  # (m,)
    ids: NDArray[Any] | None  # (n,); None: made of file and line
    steps: NDArray[np.float32] | None = None  # (total,) times

    def __len__(self) -> int:
        return len(self.lengths)

    def where(self, mask: NDArray[np.bool_]) -> "Gathered":
        """These of the examples."""
        steps = np.repeat(mask, self.lengths)
        of_targets = mask if len(self.targets) == len(mask) else steps
        return Gathered(
            self.values[steps],
            self.lengths[mask],
            self.targets[of_targets],
            self.files[of_targets],
            self.lines[of_targets],
            None if self.ids is None else self.ids[mask],
            None if self.steps is None else self.steps[steps],
        )


def stratified(draw: Draw, keys: NDArray[np.uint64], parts: dict[str, Gathered]) -> dict[str, Gathered]:
    """The parts, where those that are missing have been drawn from training with equal shares of every class."""
    whole = parts["train"]
    owner = np.arange(len(whole))
    if len(whole.targets) != len(whole):
        owner = np.repeat(owner, whole.lengths)
    scored = whole.targets != IGNORED
    kinds = int(whole.targets.max(initial=0)) + 1
    cells, counts = np.unique(owner[scored] * kinds + whole.targets[scored], return_counts=True)
    homes = draw.stratify(keys, cells // kinds, cells % kinds, counts)
    return {
        name: whole.where(homes == home) if name == "train" or name in draw.missing else parts[name]
        for home, name in enumerate(NAMES)
    }


def assemble(
    config: Options,
    files: Sequence[Path],
    parts: dict[str, Gathered],
    labels: list[str],
    words: list[str],
    drawn: Sequence[str],
    notes: list[str],
    scale: tuple[float, float] = (0.0, 1.0),
    interval: float = 1.0,
) -> TaskData:
    """`drawn`: the splits that were taken from training; scale: a channel's zero and full scale, of stored integers."""
    total = sum(map(len, parts.values()))
    for name, part in parts.items():
        if not len(part):
            advice = "it needs some"
            if name in drawn:
                advice = f"raise {name}_fraction or give {name} rows of your own"
            raise ValueError(f"{config.title}: none of the {total} rows is in the {name} split; {advice}")
    if drawn:
        column = config.group_column or config.id_column
        by = f"column {column}" if column is not None else "their input"
        how = f"a hash of {by}" + ", with equal shares of every class" * (config.split == "stratified")
        counts = " and ".join(f"{len(parts[name])} {name} rows" for name in drawn)
        notes.insert(0, f"{counts} were drawn from the training rows by {how}")
    target: Classes | Reals
    if config.target == "real":
        target = Reals(len(config.labels), config.per_step)
    else:
        target = Classes(_number_classes(config, files, parts, labels, notes), config.per_step)
    if config.tokens == "words":
        _number_words(config, parts, words)
    train, val, test = (_split(config, files, part) for part in parts.values())
    input: Tokens | Values
    if config.continuous:
        input = _values(config, train, scale, notes)
    elif config.coded:
        input = vocabulary(config, train)
    else:
        largest = max(int(split.values.max()) for split in (train, val, test))
        input = Tokens(256 if config.tokens == "bytes" else max(2, 1 + largest))
    return TaskData(input, target, train, val, test, notes=tuple(notes), interval=interval)


def vocabulary(config: Options, train: Split) -> Tokens:
    """The unknown token, then the characters or words that these rows hold often enough, or the most frequent."""
    counts = train.counts()
    kept = np.flatnonzero(counts >= min(config.min_count, counts.max()))
    order = kept[np.argsort(-counts[kept], kind="stable")]
    return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0)


def _split(config: Options, files: Sequence[Path], part: Gathered) -> Split:
    stops = np.cumsum(part.lengths)
    ids = part.ids
    if ids is None and len(files) == 1:
        ids = part.lines.copy()
    elif ids is None:
        ids = np.array([f"{files[file].stem}-{line}" for file, line in zip(part.files, part.lines, strict=True)])
    targets = part.targets
    if config.per_step:  # beside every step: as small as may be
        small = np.float32 if config.target == "real" else np.int16 if targets.max(initial=0) < 2**15 else np.int32
        targets = targets.astype(small)
    return Split(part.values, stops - part.lengths, stops, targets, ids, per_step=config.per_step, steps=part.steps)


def _number_classes(
    config: Options, files: Sequence[Path], parts: dict[str, Gathered], labels: list[str], notes: list[str]
) -> int:
    """Give the labels their classes: 0, 1, … in the order of the training rows' sorted labels."""
    column, asked = config.label_column, parts["train"].targets
    counts = np.bincount(asked[asked != IGNORED], minlength=len(labels))
    known = sorted_labels([label for label, count in zip(labels, counts, strict=True) if count])
    if not known:
        raise ValueError(f"{files[0].name}, column {column}: no training row has a label")
    if len(known) < 2:
        raise ValueError(
            f"{files[0].name}, column {column}: every training row has the label {known[0]!r}; "
            "a classification needs two classes"
        )
    classes = {label: i for i, label in enumerate(known)}
    number = np.array([*(classes.get(label, -2) for label in labels), IGNORED])  # the last is for IGNORED itself
    for split, part in parts.items():
        found = number[part.targets]
        if (found == -2).any():
            first = int(np.flatnonzero(found == -2)[0])
            label, place = (
                labels[int(part.targets[first])],
                where(files[int(part.files[first])], int(part.lines[first])),
            )
            real = "; if labels are numbers to predict, say target: real"
            raise ValueError(
                f"{place}, column {column}: the label {label!r} of this {split} row is in no training row"
                f"{real if fractional(label) else nearest(label, known)}"
            )
        if (found == IGNORED).all():
            raise ValueError(f"{config.title}, column {column}: no {split} row has a label")
        part.targets = found
    code = {label: i for i, label in enumerate(labels)}
    single = [label for label in known if counts[code[label]] == 1]
    if single:
        shown = ", ".join(map(repr, single[:5])) + (", …" if len(single) > 5 else "")
        notes.append(f"{len(single)} of the {len(known)} classes have one training row: {shown}")
    return len(known)


def _number_words(config: Options, parts: dict[str, Gathered], words: Sequence[str]) -> None:
    """Give the words their codes: a hash, or the next number that is free, so that few depend on other words."""
    if len(words) > WORD_CODES // 2:
        raise ValueError(
            f"{config.title} has {len(words):,} different words, more than {WORD_CODES // 2:,}; take tokens: characters"
        )
    number = {word: i for i, word in enumerate(words)}
    codes = np.empty(len(words), np.int32)
    taken: set[int] = set()
    for word in sorted(words):
        text = hashlib.blake2b(word.encode(), digest_size=8).digest()
        code = int.from_bytes(text, "little") % WORD_CODES
        while code in taken:
            code = (code + 1) % WORD_CODES
        taken.add(code)
        codes[number[word]] = code
    for part in parts.values():
        np.take(codes, part.values, out=part.values)


def _values(config: Options, train: Split, scale: tuple[float, float], notes: list[str]) -> Values:
    """Mean and deviation of each channel over the training steps; a constant channel is only shifted."""
    n, channels = train.values.shape
    low, high = train.values.min(axis=0), train.values.max(axis=0)
    constant = low == high
    if constant.any():
        which = f"channel {int(np.flatnonzero(constant)[0]) + 1}" if channels > 1 else "the input"
        notes.append(f"{which} is constant in the training rows ({int(constant.sum())} of {channels} channels are)")
    if config.normalise == "none":
        return Values(channels, (scale[0],) * channels, (scale[1],) * channels)

    def sums(of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
        pieces = (train.values[i : i + 2**18].astype(np.float64) for i in range(0, n, 2**18))  # no copy of everything
        return np.sum([of(piece).sum(axis=0) for piece in pieces], axis=0)

    mean = sums(lambda piece: piece) / n
    std = np.sqrt(sums(lambda piece: (piece - mean) ** 2) / n)
    return Values(channels, tuple(mean), tuple(np.where(constant, 1.0, std)))
