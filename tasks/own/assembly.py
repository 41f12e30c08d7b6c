"""From examples to the task: splits are drawn, classes numbered, vocabulary and statistics computed, notes written."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import (
    IGNORED,
    Classes,
    Labels,
    Reals,
    Split,
    Target,
    TaskData,
    Tokens,
    Values,
    extremes,
    known_targets,
)
from spt.tasks.own import arrays
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import show, sort_labels, suggest
from spt.tasks.own.rows import Examples, Reader, place_of
from spt.tasks.own.splits import (
    NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    Contents,
    draw_folds,
    missing_shares,
    split_by_hash,
    split_stratified,
)
from spt.tasks.own.static import StaticColumn, feature_names, in_column, learn, stacked
from spt.tasks.parallel import release

WORD_CODES = 2**22  # numbers that words are hashed to; half of them may be in use
CHUNK = 2**18  # steps worked on at once
MAX_NAMED = 8  # channels in a note


def assemble(config: Options, files: Sequence[Path], examples: Examples) -> TaskData:
    sets = examples.label_sets
    if sets.whole and not sets.separates:
        raise ValueError(
            f"{config.title}, column {config.label_column}: no cell has the label_separator "
            f"{config.label_separator!r}; there: {', '.join(map(show, sets.whole))}; name what stands between labels, "
            "or say target: classes where a row has one"
        )
    splits, drawn = _draw_splits(config, examples)
    counts, notes = dict(zip(NAMES, np.bincount(splits, minlength=len(NAMES)).tolist(), strict=True)), examples.notes
    for name, count in counts.items():
        if not count:
            why = _why_empty(config, examples, name, 1 + len(drawn)) if name in drawn else "; it needs some"
            raise ValueError(f"{config.title}: none of the {len(splits)} rows is in the {name} split{why}")
    if drawn:
        by = f"column {config.group_column or config.id_column}" if config.unit is not None else "their input"
        how = f"a hash of {by}" + ", with equal shares of every class" * (config.split == "stratified")
        rows = " and ".join(f"{counts[name]} {name} rows" for name in drawn)
        if config.folds is not None:  # in the same words for every fold
            rows = f"test rows, one of {config.folds} folds," + " and validation rows" * ("validation" in drawn)
        notes.insert(0, f"{rows} were drawn from the training rows by {how}")
    whole, names = examples.rows, tuple[str, ...]()
    if config.target != "real":
        number = _number_classes if config.target == "classes" else _number_labels
        targets, names = number(config, files[0].name, examples, splits)
        whole = replace(whole, targets=targets)
    gaps = config.missing_labels == "ignore" and not config.per_step
    target: Target = Reals(len(config.labels), config.per_step, gaps)
    if config.target == "classes":
        target = Classes(len(names), config.per_step, gaps)
    elif config.target == "labels":
        target = Labels(len(names), config.per_step)
    if gaps:
        _count_labelled(config, np.asarray(whole.targets), splits, notes)
    if config.tokens == "words":
        codes, values = _word_codes(config, examples.words), examples.rows.values
        table = np.array([codes[word] for word in examples.words], np.int32)
        for first in range(0, len(values), CHUNK):
            values[first : first + CHUNK] = table[values[first : first + CHUNK]]
            release(values)
    if config.static_columns:
        whole = replace(whole, static=_static_features(config, examples, splits))
    parts = [whole.take(np.flatnonzero(splits == split)) for split in range(len(NAMES))]
    val, test = (parts[split].trimmed() for split in (VALIDATION, TEST))
    train = parts[TRAIN].trimmed(in_place=True)  # the largest; last, since it overwrites the others
    input: Tokens | Values
    if config.continuous:
        input = _values(config, train, examples.scale, notes)
        if config.gaps:
            notes += _missing_notes(config, input, dict(zip(NAMES, (train, val, test), strict=True)))
    elif config.coded:
        input = vocabulary(config, train)
    else:
        largest = max(extremes(split)[1] for split in (train, val, test))
        input = Tokens(256 if config.tokens == "bytes" else max(2, 1 + largest))
    if train.static is not None:
        input = replace(input, static=train.static.shape[1])
    about: dict[str, Any] = {"notes": tuple(notes), "interval": examples.interval, "classes": names}
    return TaskData(input, target, train, val, test, **about)


def reading(config: Options, reader: Reader, input: Tokens | Values) -> dict[str, Any]:
    """What is needed to read new rows as these were read, in a form that JSON can hold."""
    examples, labels, words = reader.examples(), list[str](), list[str]()
    if config.target != "real":
        splits, _ = _draw_splits(config, examples)
        splits = _of_steps(splits, examples.rows) if config.per_step else splits
        number = _training_labels if config.target == "classes" else _training_sets
        labels = list(number(config, examples, splits))
    if config.tokens == "words" and isinstance(input, Tokens):
        word_of = {code: word for word, code in _word_codes(config, examples.words).items()}
        words = [word_of.get(code, "") for code in input.codes or ()]
    file = reader.first_file
    static = _learn_static(config, examples, _draw_splits(config, examples)[0], []) if config.static_columns else []
    return {
        "classes": labels,  # of each class
        "words": words,  # of each token
        "inputs": reader.inputs,  # columns, in their order
        "files": {
            "kind": None if file is None else arrays.kind_of(file.ending),
            "rate": None if file is None else file.rate,
            "scale": list(examples.scale),
            "signals": [] if file is None else list(file.signals),
        },
        "times": examples.rows.steps is not None,
        **({"static": [asdict(column) for column in static]} if static else {}),
        **({"rate": reader.rate} if config.transforms else {}),  # before they are resampled
    }


def codes_of_words(config: Options, reader: Reader) -> dict[str, int]:
    """The code of every word that was read, of all splits; none where tokens are not words."""
    return _word_codes(config, list(reader.words)) if config.tokens == "words" else {}


def vocabulary(config: Options, train: Split) -> Tokens:
    """The unknown token, then the characters or words that are frequent enough in these rows, or the most frequent."""
    counts = train.counts()
    kept = np.flatnonzero(counts >= min(config.min_count, counts.max()))
    order = kept[np.argsort(-counts[kept], kind="stable")]
    static = 0 if train.static is None else train.static.shape[1]
    return Tokens(1 + len(order), codes=(-1, *order.tolist()), unknown=0, static=static)


def _draw_splits(config: Options, examples: Examples) -> tuple[NDArray[np.int64], list[str]]:
    """(n,) Each example's split, and the names of those that were drawn from training."""
    splits = _given_splits(config, examples)
    present = {NAMES[split] for split in np.unique(splits)}
    shares = missing_shares(config, present)
    drawn = [name for name, share in zip(NAMES[1:], shares[1:], strict=True) if share]
    if config.folds is not None:
        if "test" in present:
            raise ValueError(
                f"{config.title} has test rows of its own, so folds are not drawn; to draw them from all rows, say "
                "pool_splits: true, or take folds out"
            )
        training = _to_draw_from(config, examples, splits)
        try:
            folds = draw_folds(config.folds, examples.keys[training], *_contents(config, examples, training))
        except ValueError as error:
            raise ValueError(f"{config.title}: {error}") from None
        splits[training[folds == config.fold]] = TEST
        shares = (1 - shares[VALIDATION], shares[VALIDATION], 0.0)
        if not shares[VALIDATION]:
            return splits, drawn
    training = _to_draw_from(config, examples, splits)
    keys = examples.keys[training]
    if config.split == "hash" and config.folds is None:
        splits[training] = split_by_hash(shares, keys)
    else:
        splits[training] = split_stratified(shares, keys, *_contents(config, examples, training))
    return splits, drawn


def _given_splits(config: Options, examples: Examples) -> NDArray[np.int64]:
    """(n,) Each example's split before any is drawn."""
    return np.full_like(examples.splits, TRAIN) if config.pool_splits else examples.splits.copy()


def _why_empty(config: Options, examples: Examples, name: str, parts: int) -> str:
    """What left a drawn split empty, of so many `parts` that share the rows, and what helps."""
    splits = _given_splits(config, examples)
    chosen = _to_draw_from(config, examples, splits)
    units, reasons, drawn = len(np.unique(examples.keys[chosen])), list[str](), False
    if len(chosen) < (splits == TRAIN).sum():
        reasons.append(f"only {len(chosen)} have a label (or belong with one that has)")
    if units < parts:
        of = f"of column {config.group_column or config.id_column}" if config.unit is not None else "of the input"
        count = "is 1" if units == 1 else f"are {units}"
        reasons.append(f"rows of one value {of} are never split apart, but there {count} for {parts} splits")
    elif config.split == "stratified" and np.bincount(_contents(config, examples, chosen)[1]).max(initial=0) == 1:
        reasons.append(f"the first row of each label stays in training, and none of column {config.labels[0]} has two")
    else:
        drawn = True
        if config.split == "stratified":
            most = np.bincount(_contents(config, examples, chosen)[1]).max(initial=0)
            reasons.append(
                f"rows of each label are shared out alike, and none of column {config.labels[0]} has more than {most}"
            )
    why = f", since {', and '.join(reasons)}" if reasons else ""
    return f"{why}; {f'raise {name}_fraction or ' if drawn else ''}give {name} rows of your own"


def _to_draw_from(config: Options, examples: Examples, splits: NDArray[np.int64]) -> NDArray[np.int64]:
    """The training rows of which others are drawn: what nobody can score is of use in pretraining alone."""
    targets, training = np.asarray(examples.rows.targets), splits == TRAIN
    known = np.asarray(known_targets(targets).reshape(len(targets), -1).any(axis=1))
    if not known.any():
        raise ValueError(f"{config.title}, column {config.labels[0]}: no training row has a label")
    if config.missing_labels == "ignore" and not config.per_step:
        training &= np.isin(examples.keys, examples.keys[training & known])
        if not training.any():
            raise ValueError(f"{config.title}, column {config.labels[0]}: no training row has a label")
    return np.flatnonzero(training)


def _contents(config: Options, examples: Examples, chosen: NDArray[np.int64]) -> Contents:
    """What is to be shared out evenly: the classes of the chosen rows, each label and that none holds, or the rows
    themselves."""
    if config.split == "hash":
        n = len(chosen)
        return np.arange(n), np.zeros(n, np.int64), np.ones(n, np.int64)
    targets, n_labels = np.asarray(examples.rows.targets), len(examples.labels)
    row, scored = np.full(len(examples.splits), -1), np.zeros(len(examples.splits), bool)
    row[chosen], scored[chosen] = np.arange(len(chosen)), True  # among the chosen
    if config.per_step:
        row, scored = _of_steps(row, examples.rows), _of_steps(scored.astype(np.int64), examples.rows) == 1
    if config.target == "labels":
        flags = _flags(config, examples, examples.labels)
        held = np.column_stack([flags == 1, ~(flags == 1).any(axis=1) & (flags == 0).any(axis=1)])
        where, targets = np.nonzero(held & scored[:, None])
        row, n_labels = row[where], n_labels + 1
    else:
        scored = scored & (targets != IGNORED)
        row, targets = row[scored], targets[scored]
    cells, counts = np.unique(row * n_labels + targets, return_counts=True)
    return cells // n_labels, cells % n_labels, counts


def _of_steps(column: NDArray[np.int64], rows: Split) -> NDArray[np.int64]:
    """What belongs to rows, for every step; -1 for one that lies in no row."""
    if rows.contiguous:
        return np.repeat(column, rows.lengths)
    steps = np.full(len(rows.values), -1, np.int64)
    for value, start, stop in zip(column.tolist(), rows.starts.tolist(), rows.stops.tolist(), strict=True):
        steps[start:stop] = value  # windows that share a step are of one recording
    return steps


# --------------------------------------------------------------------------------------------------- input and target


def _training_labels(config: Options, examples: Examples, splits: NDArray[np.int64]) -> dict[str, int]:
    """The labels of the training rows in the order in which they are numbered, and how many rows have each; `splits`
    are those of the targets."""
    targets = np.asarray(examples.rows.targets)
    counts = np.bincount(targets[(splits == TRAIN) & (targets != IGNORED)], minlength=len(examples.labels))
    count_of = {label: int(count) for label, count in zip(examples.labels, counts, strict=True) if count}
    return {label: count_of[label] for label in sort_labels(list(count_of))}


def _flags(config: Options, examples: Examples, names: Sequence[str]) -> NDArray[np.int8]:
    """(m, K) Which of these labels hold, IGNORED where nobody knows."""
    targets = np.asarray(examples.rows.targets)
    return targets if config.label_column is None else examples.label_sets.matrix(names)[targets]


def _training_sets(config: Options, examples: Examples, splits: NDArray[np.int64]) -> dict[str, int]:
    """Of several labels, those that hold in a training row, or have a column, and in how many training rows they do."""
    counts = (_flags(config, examples, examples.labels)[splits == TRAIN] == 1).sum(axis=0).tolist()
    named = zip(examples.labels, counts, strict=True)
    return {label: count for label, count in named if count or config.label_columns}


def _number_labels(
    config: Options, file: str, examples: Examples, splits: NDArray[np.int64]
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """(m, K) Which labels hold, and their names: those of columns, or those of training rows, sorted."""
    splits = _of_steps(splits, examples.rows) if config.per_step else splits
    counts = _training_sets(config, examples, splits)
    names = tuple(counts)
    if not names:
        raise ValueError(f"{file}, column {config.label_column}: no training row has a label")
    if unseen := [label for label in examples.labels if label not in counts]:
        examples.notes.append(
            f"{len(unseen)} labels stand in no training row and are left out: {', '.join(map(repr, unseen[:5]))}"
            + ", …" * (len(unseen) > 5)
        )
    flags = _flags(config, examples, names)
    for split, name in enumerate(NAMES):
        if not (flags[splits == split] != IGNORED).any():
            raise ValueError(f"{config.title}: no {name} row has a known label")
    known = (flags[splits == TRAIN] != IGNORED).sum(axis=0)
    for words, found in (
        ("hold in no training row, so that nothing can be learned of them", [n for n in names if not counts[n]]),
        (
            "hold in every training row in which they are known",
            [n for n, k in zip(names, known.tolist(), strict=True) if counts[n] == k > 0],
        ),
        ("hold in one training row", [n for n in names if counts[n] == 1]),
    ):
        if found:
            shown = ", ".join(map(repr, found[:5])) + ", …" * (len(found) > 5)
            examples.notes.append(f"{len(found)} of the {len(names)} labels {words}: {shown}")
    return flags, names


def _count_labelled(config: Options, targets: NDArray[Any], splits: NDArray[np.int64], notes: list[str]) -> None:
    """Tell how many rows have a label, where some have none. Raises ValueError where a split has no row with one."""
    known = known_targets(targets).reshape(len(targets), -1)
    for split, name in enumerate(NAMES):
        empty = np.flatnonzero(~known[splits == split].any(axis=0))
        if len(empty) and (name == "train" or len(empty) == known.shape[1]):
            column = config.labels[int(empty[0])] if len(config.labels) > int(empty[0]) else config.label_column
            raise ValueError(f"{config.title}, column {column}: no {name} row has a label")
    if known.all():
        return
    each = [
        f"{known[splits == split].any(axis=1).sum():,} of {(splits == split).sum():,} {name} rows"
        for split, name in enumerate(NAMES)
    ]
    partly = int((known.any(axis=1) & ~known.all(axis=1)).sum())
    some = f" ({partly:,} of them in a part of the columns)" if partly else ""
    notes.append(f"{', '.join(each[:-1])} and {each[-1]} have a label{some}; the others are only pretrained on")


def _number_classes(
    config: Options, file: str, examples: Examples, splits: NDArray[np.int64]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """(m,) Classes 0, 1, … in the order of the training rows' sorted labels, IGNORED without a label; their labels."""
    labels, targets, column = examples.labels, np.asarray(examples.rows.targets), config.label_column
    splits = _of_steps(splits, examples.rows) if config.per_step else splits
    counts = _training_labels(config, examples, splits)
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
            if config.folds is not None:
                advice = "; with folds a label has to occur in two rows, or groups, at least, so that one is trained on"
                advice += "; split: stratified spreads labels over folds" * (config.split == "hash")
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
    if config.per_step:  # beside every step: as small as may be
        classes = classes.astype(np.int16 if len(known) <= 2**15 else np.int32)
    return classes, tuple(known)


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


def _static_features(config: Options, examples: Examples, splits: NDArray[np.int64]) -> NDArray[np.float32]:
    """(n, F) Of all rows."""
    columns = _learn_static(config, examples, splits, examples.notes)
    shown = []
    for column in columns:
        names, codes = examples.static[column.name]
        place_in = in_column(lambda i: place_of(examples, i), column.name)
        shown.append(column.features(names, codes, place_in))
        for split, place in enumerate(NAMES):
            if unknown := column.unknown(names, codes[splits == split]):
                examples.notes.append(
                    f"static column {column.name!r}: {unknown} {place} rows have a category that training has not"
                )
            gone = int((codes[splits == split] == IGNORED).sum())
            if gone:
                examples.notes.append(f"static column {column.name!r} is missing in {gone} {place} rows")
    examples.notes.append(f"static features: {', '.join(feature_names(columns)[:12])}")
    return stacked(shown)


def _learn_static(
    config: Options, examples: Examples, splits: NDArray[np.int64], notes: list[str]
) -> list[StaticColumn]:
    gaps = config.missing == "hidden"
    return [learn(name, names, codes[splits == TRAIN], gaps, notes) for name, (names, codes) in examples.static.items()]


def _values(config: Options, train: Split, scale: tuple[float, float], notes: list[str]) -> Values:
    """Mean and deviation of each channel over the training steps that have a value, each of which counts once, also
    where windows share it; a constant channel is only shifted."""
    n, channels = train.values.shape
    low, high = (np.fmin, np.fmax) if config.gaps else (np.minimum, np.maximum)
    ends = [(low.reduce(piece, axis=0), high.reduce(piece, axis=0)) for piece in train.pieces(CHUNK)]
    least, most = low.reduce([end[0] for end in ends], axis=0), high.reduce([end[1] for end in ends], axis=0)
    constant, absent = least == most, np.isnan(least)
    if absent.any():
        which = f"{channel_name(config, int(np.flatnonzero(absent)[0]), channels)}"
        raise ValueError(f"{config.title}: {which} has no value in any training row; leave it out")
    if constant.any():
        which = f"channel {int(np.flatnonzero(constant)[0]) + 1}" if channels > 1 else "the input"
        notes.append(f"{which} is constant in the training rows ({int(constant.sum())} of {channels} channels are)")
    if config.normalise == "none":
        return Values(channels, (scale[0],) * channels, (scale[1],) * channels, missing=config.gaps)
    count = n - missing_cells(train) if config.gaps else n
    add = np.nansum if config.gaps else np.sum

    def mean(of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
        pieces = (piece.astype(np.float64) for piece in train.pieces(CHUNK))  # no copy of everything
        return np.asarray(np.sum([add(of(piece), axis=0) for piece in pieces], axis=0) / count)

    centre = mean(lambda piece: piece)
    std = np.sqrt(mean(lambda piece: (piece - centre) ** 2))
    return Values(channels, tuple(centre), tuple(np.where(constant, 1.0, std)), missing=config.gaps)


def missing_cells(split: Split) -> NDArray[np.int64]:
    """(C,) How many values of each channel are missing."""
    return np.sum([np.isnan(piece).sum(axis=0) for piece in split.pieces(CHUNK)], axis=0, dtype=np.int64)


def channel_name(config: Options, channel: int, channels: int) -> str:
    """What a channel is called in a message."""
    names = config.list_columns or (config.value_columns if config.kind == "long" else ())
    if len(names) == channels:  # patches and spectrograms have channels of their own
        return f"column {names[channel]}"
    return f"channel {channel + 1}" if channels > 1 else "the input"


def _missing_notes(config: Options, input: Values, splits: dict[str, Split]) -> list[str]:
    """How much of each channel is missing, the most first, and sequences without any value."""
    shares = {name: missing_cells(split) / len(split.values) for name, split in splits.items()}
    most = np.max(list(shares.values()), axis=0)
    if not most.any():
        return ["no value is missing"]
    order = [channel for channel in np.argsort(-most, kind="stable").tolist() if most[channel]]
    texts = [
        f"{channel_name(config, channel, input.channels)} "
        + ", ".join(f"{share[channel]:.2%} of {name}" for name, share in shares.items())
        for channel in order[:MAX_NAMED]
    ]
    more = f"; and {len(order) - MAX_NAMED} more channels" * (len(order) > MAX_NAMED)
    notes = [f"values are missing, and shown as such: {'; '.join(texts)}{more}"]
    for name, split in splits.items():
        blank = sum(bool(np.isnan(split.row(i)).all()) for i in range(len(split)))
        if blank:
            notes.append(f"{blank} of {len(split)} {name} sequences have no value at all")
    return notes
