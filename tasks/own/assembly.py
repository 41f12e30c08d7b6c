"""From examples to the task: splits are drawn, classes numbered, vocabulary and statistics computed, notes written."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import IGNORED, Classes, Reals, Split, TaskData, Tokens, Values
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import sort_labels, suggest
from spt.tasks.own.rows import Examples, Reader
from spt.tasks.own.splits import NAMES, TEST, TRAIN, VALIDATION, missing_shares, split_by_hash, split_stratified

WORD_CODES = 2**22  # numbers that words are hashed to; half of them may be in use
CHUNK = 2**18  # steps worked on at once


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
    whole = examples.rows
    target: Classes | Reals = Reals(len(config.labels), config.per_step)
    if config.target == "classes":
        classes, count = _number_classes(config, files[0].name, examples, splits)
        if config.per_step:  # beside every step: as small as may be
            classes = classes.astype(np.int16 if count <= 2**15 else np.int32)
        target, whole = Classes(count, config.per_step), replace(whole, targets=classes)
    if config.tokens == "words":
        codes, values = _word_codes(config, examples.words), examples.rows.values
        np.take(np.array([codes[word] for word in examples.words], np.int32), values, out=values)
    parts = [whole.take(np.flatnonzero(splits == split)) for split in range(len(NAMES))]
    val, test = (parts[split].packed() for split in (VALIDATION, TEST))
    train = parts[TRAIN].packed(in_place=True)  # the largest; last, since it overwrites the others
    input: Tokens | Values
    if config.continuous:
        input = _values(config, train, examples.scale, notes)
    elif config.coded:
        input = vocabulary(config, train)
    else:
        largest = max(int(split.values.max()) for split in (train, val, test))
        input = Tokens(256 if config.tokens == "bytes" else max(2, 1 + largest))
    return TaskData(input, target, train, val, test, notes=tuple(notes), interval=examples.interval)


def reading(config: Options, reader: Reader, input: Tokens | Values) -> dict[str, Any]:
    """What new rows are read by, so that they are read as these were; JSON holds it."""
    examples, labels, words = reader.examples(), list[str](), list[str]()
    if config.target == "classes":
        splits, _ = _draw_splits(config, examples)
        splits = np.repeat(splits, examples.rows.lengths) if config.per_step else splits
        labels = list(_training_labels(examples, splits))
    if config.tokens == "words" and isinstance(input, Tokens):
        word_of = {code: word for word, code in _word_codes(config, examples.words).items()}
        words = [word_of.get(code, "") for code in input.codes or ()]
    ending, rate, _ = reader.first_file or (None, None, "")
    return {
        "classes": labels,  # of each class
        "words": words,  # of each token
        "inputs": reader.inputs,  # columns, in their order
        "files": {"sound": ending == ".wav", "rate": rate, "scale": list(examples.scale)},
        "times": examples.rows.steps is not None,
    }


def vocabulary(config: Options, train: Split) -> Tokens:
    """The unknown token, then the characters or words that these rows hold often enough, or the most frequent."""
    counts = train.counts()
    kept = np.flatnonzero(counts >= min(config.min_count, counts.max()))
    order = kept[np.argsort(-counts[kept], kind="stable")]
    return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0)


def _draw_splits(config: Options, examples: Examples) -> tuple[NDArray[np.int64], list[str]]:
    """(n,) Each example's split, and the names of those that were drawn from training."""
    splits = examples.splits.copy()
    shares = missing_shares(config, {NAMES[split] for split in np.unique(splits)})
    drawn = [name for name, share in zip(NAMES[1:], shares[1:], strict=True) if share]
    training = splits == TRAIN
    keys = examples.keys[training]
    if config.split == "hash":
        splits[training] = split_by_hash(shares, keys)
        return splits, drawn
    targets, n_labels = np.asarray(examples.rows.targets), len(examples.labels)
    row, scored = np.cumsum(training) - 1, training  # among the training rows
    if config.per_step:
        row, scored = np.repeat(row, examples.rows.lengths), np.repeat(training, examples.rows.lengths)
    scored = scored & (targets != IGNORED)
    cells, counts = np.unique(row[scored] * n_labels + targets[scored], return_counts=True)
    splits[training] = split_stratified(shares, keys, cells // n_labels, cells % n_labels, counts)
    return splits, drawn


# --------------------------------------------------------------------------------------------------- input and target


def _training_labels(examples: Examples, splits: NDArray[np.int64]) -> dict[str, int]:
    """The labels of the training rows in the order in which they are numbered, and how many rows have each; `splits`
    are those of the targets."""
    targets = np.asarray(examples.rows.targets)
    counts = np.bincount(targets[(splits == TRAIN) & (targets != IGNORED)], minlength=len(examples.labels))
    count_of = {label: int(count) for label, count in zip(examples.labels, counts, strict=True) if count}
    return {label: count_of[label] for label in sort_labels(list(count_of))}


def _number_classes(
    config: Options, file: str, examples: Examples, splits: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """(m,) Classes 0, 1, … in the order of the training rows' sorted labels, IGNORED without a label; their number."""
    labels, targets, column = examples.labels, np.asarray(examples.rows.targets), config.label_column
    splits = np.repeat(splits, examples.rows.lengths) if config.per_step else splits
    counts = _training_labels(examples, splits)
    known = list(counts)
    if not known:
        raise ValueError(f"{file}, column {column}: no training row has a label")
    if len(known) < 2:
        raise ValueError(
            f"{file}, column {column}: every training row has the label {known[0]!r}; "
            "a classification needs two classes"
        )
    numbers = {label: i for i, label in enumerate(known)}
    classes = np.array([*(numbers.get(label, -2) for label in labels), IGNORED])[targets]  # IGNORED is the last
    for split, name in enumerate(NAMES):
        unknown = np.flatnonzero((splits == split) & (classes == -2))
        if len(unknown):
            i = int(unknown[0])
            label = labels[int(targets[i])]
            fraction = re.fullmatch(r"[-+]?\d*\.\d+([eE][-+]?\d+)?", label)
            advice = "; if labels are numbers to predict, say target: real" if fraction else suggest(label, known)
            raise ValueError(
                f"{examples.place(i)}, column {column}: the label {label!r} of this {name} row is in no training row"
                f"{advice}"
            )
        if (classes[splits == split] == IGNORED).all():
            raise ValueError(f"{config.title}, column {column}: no {name} row has a label")
    single = [label for label in known if counts[label] == 1]
    if single:
        shown = ", ".join(map(repr, single[:5])) + (", …" if len(single) > 5 else "")
        examples.notes.append(f"{len(single)} of the {len(known)} classes have one training row: {shown}")
    return classes, len(known)


def _word_codes(config: Options, words: Sequence[str]) -> dict[str, int]:
    """The code of each word: a hash, or the next number that is free, so that few depend on other words."""
    if len(words) > WORD_CODES // 2:
        raise ValueError(
            f"{config.title} has {len(words):,} different words, more than {WORD_CODES // 2:,}; take tokens: characters"
        )
    codes: dict[int, str] = {}
    for word in sorted(words):
        code = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % WORD_CODES
        while code in codes:
            code = (code + 1) % WORD_CODES
        codes[code] = word
    return {word: code for code, word in codes.items()}


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
        pieces = (piece.astype(np.float64) for piece in train.pieces(CHUNK))  # no copy of everything
        return np.asarray(np.sum([of(piece).sum(axis=0) for piece in pieces], axis=0) / n)

    centre = mean(lambda piece: piece)
    std = np.sqrt(mean(lambda piece: (piece - centre) ** 2))
    return Values(channels, tuple(centre), tuple(np.where(constant, 1.0, std)))
