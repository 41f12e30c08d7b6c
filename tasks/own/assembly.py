"""From examples to the task: splits are drawn, classes numbered, vocabulary and statistics computed, notes written."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED, Classes, Reals, Split, TaskData, Tokens, Values
from spt.tasks.own.arrays import FULL_SCALE
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import sort_labels, suggest
from spt.tasks.own.splits import NAMES, TEST, TRAIN, VALIDATION, Splitter
from spt.tasks.own.tables import locate

WORD_CODES = 2**22  # numbers that words are hashed to; half of them may be in use
CHUNK = 2**18  # steps worked on at once


@dataclass
class Examples:
    """What was read: n examples of `total` steps together; m is n, or `total` where every step has a label."""

    values: NDArray[Any]  # (total,) tokens or (total, C)
    lengths: NDArray[np.int64]  # (n,)
    targets: NDArray[Any]  # (m,) numbers of labels, or (m, K) reals
    files: NDArray[np.int32]  # (m,) the file that a target comes from, as a position in the list of files
    lines: NDArray[np.int64]  # (m,)
    splits: NDArray[np.int64]  # (n,) as the data say
    keys: NDArray[np.uint64]  # (n,) random numbers for the draw of splits, equal where examples stay together
    ids: NDArray[Any] | None  # (n,); None: made of file and line
    steps: NDArray[np.float32] | None = None  # (total,) times
    labels: Sequence[str] = ()
    words: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    scale: tuple[float, float] = FULL_SCALE  # of stored integers
    interval: float = 1.0


def assemble(config: Options, files: Sequence[Path], examples: Examples) -> TaskData:
    splits, drawn = _draw_splits(config, examples)
    counts, notes = dict(zip(NAMES, np.bincount(splits, minlength=len(NAMES)).tolist(), strict=True)), examples.notes
    for name, count in counts.items():
        if not count:
            advice = f"raise {name}_fraction or give {name} rows of your own" if name in drawn else "it needs some"
            raise ValueError(f"{config.title}: none of the {len(splits)} rows is in the {name} split; {advice}")
    if drawn:
        by = f"column {config.group_column or config.id_column}" if config.unit is not None else "their input"
        how = f"a hash of {by}" + ", with equal shares of every class" * (config.split == "stratified")
        rows = " and ".join(f"{counts[name]} {name} rows" for name in drawn)
        notes.insert(0, f"{rows} were drawn from the training rows by {how}")
    target: Classes | Reals
    if config.target == "real":
        target = Reals(len(config.labels), config.per_step)
    else:
        target = Classes(_number_classes(config, files, examples, splits), config.per_step)
    if config.tokens == "words":
        _number_words(config, examples)
    whole = _all_rows(config, files, examples)
    parts = [whole.take(np.flatnonzero(splits == split)) for split in range(len(NAMES))]
    val, test = (_end_to_end(parts[split], in_place=False) for split in (VALIDATION, TEST))
    train = _end_to_end(parts[TRAIN], in_place=True)  # the largest; last, since it overwrites the others
    input: Tokens | Values
    if config.continuous:
        input = _values(config, train, examples.scale, notes)
    elif config.coded:
        input = vocabulary(config, train)
    else:
        largest = max(int(split.values.max()) for split in (train, val, test))
        input = Tokens(256 if config.tokens == "bytes" else max(2, 1 + largest))
    return TaskData(input, target, train, val, test, notes=tuple(notes), interval=examples.interval)


def vocabulary(config: Options, train: Split) -> Tokens:
    """The unknown token, then the characters or words that these rows hold often enough, or the most frequent."""
    counts = train.counts()
    kept = np.flatnonzero(counts >= min(config.min_count, counts.max()))
    order = kept[np.argsort(-counts[kept], kind="stable")]
    return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0)


# -------------------------------------------------------------------------------------------------------------- splits


def _draw_splits(config: Options, examples: Examples) -> tuple[NDArray[np.int64], list[str]]:
    """(n,) Each example's split, and the names of those that were drawn from training."""
    splits = examples.splits.copy()
    splitter = Splitter(config, (NAMES[split] for split in np.unique(splits)))
    training = splits == TRAIN
    keys = examples.keys[training]
    if config.split == "hash":
        splits[training] = splitter.by_hash(keys)
        return splits, splitter.missing
    row = np.cumsum(training) - 1  # among the training rows
    scored = training
    if config.per_step:
        row, scored = np.repeat(row, examples.lengths), np.repeat(training, examples.lengths)
    scored = scored & (examples.targets != IGNORED)
    n_labels = len(examples.labels)
    cells, counts = np.unique(row[scored] * n_labels + examples.targets[scored], return_counts=True)
    splits[training] = splitter.stratified(keys, cells // n_labels, cells % n_labels, counts)
    return splits, splitter.missing


def _all_rows(config: Options, files: Sequence[Path], examples: Examples) -> Split:
    stops = np.cumsum(examples.lengths)
    targets, ids = examples.targets, examples.ids
    if config.per_step:  # beside every step: as small as may be
        small = np.float32 if config.target == "real" else np.int16 if targets.max(initial=0) < 2**15 else np.int32
        targets = targets.astype(small)
    if ids is None and len(files) == 1:
        ids = examples.lines
    elif ids is None:
        names = zip(examples.files, examples.lines, strict=True)
        ids = np.array([f"{files[file].stem}-{line}" for file, line in names])
    starts = stops - examples.lengths
    return Split(examples.values, starts, stops, targets, ids, per_step=config.per_step, steps=examples.steps)


def _end_to_end(part: Split, in_place: bool) -> Split:
    """The rows without gaps between them; in place, since memory need not hold all rows twice."""
    stops = np.cumsum(part.lengths)

    def moved(array: NDArray[Any]) -> NDArray[Any]:
        joined = array if in_place else np.empty((stops[-1], *array.shape[1:]), array.dtype)
        for start, stop, end in zip(part.starts.tolist(), part.stops.tolist(), stops.tolist(), strict=True):
            joined[end - (stop - start) : end] = array[start:stop]
        return joined[: stops[-1]]

    return replace(
        part,
        values=moved(part.values),
        starts=stops - part.lengths,
        stops=stops,
        targets=moved(part.targets) if part.per_step and part.targets is not None else part.targets,
        steps=None if part.steps is None else moved(part.steps),
    )


# --------------------------------------------------------------------------------------------------- input and target


def _number_classes(config: Options, files: Sequence[Path], examples: Examples, splits: NDArray[np.int64]) -> int:
    """Give the labels their classes: 0, 1, … in the order of the training rows' sorted labels."""
    labels, targets, column = examples.labels, examples.targets, config.label_column
    splits = np.repeat(splits, examples.lengths) if config.per_step else splits
    training = targets[(splits == TRAIN) & (targets != IGNORED)]
    counts = dict(zip(labels, np.bincount(training, minlength=len(labels)).tolist(), strict=True))
    known = sort_labels([label for label in labels if counts[label]])
    if not known:
        raise ValueError(f"{files[0].name}, column {column}: no training row has a label")
    if len(known) < 2:
        raise ValueError(
            f"{files[0].name}, column {column}: every training row has the label {known[0]!r}; "
            "a classification needs two classes"
        )
    numbers = {label: i for i, label in enumerate(known)}
    classes = np.array([*(numbers.get(label, -2) for label in labels), IGNORED])[targets]  # IGNORED is the last
    for split, name in enumerate(NAMES):
        unknown = np.flatnonzero((splits == split) & (classes == -2))
        if len(unknown):
            i = int(unknown[0])
            label, place = labels[int(targets[i])], locate(files[int(examples.files[i])], int(examples.lines[i]))
            fraction = re.fullmatch(r"[-+]?\d*\.\d+([eE][-+]?\d+)?", label)
            advice = "; if labels are numbers to predict, say target: real" if fraction else suggest(label, known)
            raise ValueError(
                f"{place}, column {column}: the label {label!r} of this {name} row is in no training row{advice}"
            )
        if (classes[splits == split] == IGNORED).all():
            raise ValueError(f"{config.title}, column {column}: no {name} row has a label")
    examples.targets = classes
    single = [label for label in known if counts[label] == 1]
    if single:
        shown = ", ".join(map(repr, single[:5])) + (", …" if len(single) > 5 else "")
        examples.notes.append(f"{len(single)} of the {len(known)} classes have one training row: {shown}")
    return len(known)


def _number_words(config: Options, examples: Examples) -> None:
    """Give the words their codes: a hash, or the next number that is free, so that few depend on other words."""
    words = examples.words
    if len(words) > WORD_CODES // 2:
        raise ValueError(
            f"{config.title} has {len(words):,} different words, more than {WORD_CODES // 2:,}; take tokens: characters"
        )
    codes: dict[str, int] = {}
    taken: set[int] = set()
    for word in sorted(words):
        code = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % WORD_CODES
        while code in taken:
            code = (code + 1) % WORD_CODES
        taken.add(code)
        codes[word] = code
    of_word = np.array([codes[word] for word in words], np.int32)
    np.take(of_word, examples.values, out=examples.values)


def _values(config: Options, train: Split, scale: tuple[float, float], notes: list[str]) -> Values:
    """Mean and deviation of each channel over the training steps; a constant channel is only shifted."""
    n, channels = train.values.shape
    constant = train.values.min(axis=0) == train.values.max(axis=0)
    if constant.any():
        which = f"channel {int(np.flatnonzero(constant)[0]) + 1}" if channels > 1 else "the input"
        notes.append(f"{which} is constant in the training rows ({int(constant.sum())} of {channels} channels are)")
    if config.normalise == "none":
        return Values(channels, (scale[0],) * channels, (scale[1],) * channels)

    def mean(of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
        pieces = (train.values[i : i + CHUNK].astype(np.float64) for i in range(0, n, CHUNK))  # no copy of everything
        return np.asarray(np.sum([of(piece).sum(axis=0) for piece in pieces], axis=0) / n)

    centre = mean(lambda piece: piece)
    std = np.sqrt(mean(lambda piece: (piece - centre) ** 2))
    return Values(channels, tuple(centre), tuple(np.where(constant, 1.0, std)))
