"""`spt data check`: what a task's data hold, from the prepared rows in use."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.config.recipe import Part
from spt.data.cache import prepared_folder
from spt.data.dataset import open_task
from spt.data.fingerprints import fingerprints, rows_hash
from spt.data.linear_probe import linear_probe
from spt.data.source import OpenTask, call_hook, data_dir, open_part
from spt.errors import DataError
from spt.tasks.base import (
    Classes,
    Labels,
    Split,
    TaskData,
    Tokens,
    Values,
    class_counts,
    has_target,
    known_targets,
    label_counts,
    sequence_lengths,
    target_pieces,
)


def summarise(part: Part, scored: bool = True) -> dict[str, Any]:
    """What the task's data are, from the prepared rows in use; without trivial scores on test unless `scored`. Raises
    DataError when they are missing or damaged."""
    task = open_part(part)
    folder, data = prepared_folder(task), open_task(part)
    data.check()
    for name, split in data.splits.items():
        if not np.array_equal(fingerprints(split), split.fingerprints):
            raise DataError(f"the prepared data in {folder} are damaged ({name}); delete the folder, it is made again")
    return {
        "task": part.name,
        "options": part.options,
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in task.files],
        "notes": list(data.notes),
        "rows": {name: len(split) for name, split in data.splits.items()},
        "lengths": {name: _spread(split) for name, split in data.splits.items()},
        "examples": "pairs of sequences" if data.train.sequences == 2 else "sequences",
        "interval": data.interval,
        "resampled": data.resample is not None,
        "times": None if data.train.steps is None else {n: _times(split) for n, split in data.splits.items()},
        "input": str(data.input),
        **_inputs(data),
        "static": data.input.static,
        "target": str(data.target),
        "targets": {name: _targets(data, split) for name, split in data.splits.items()},
        **_named(data),
        **_labelled_rows(data),
        "chance": data.chance() if scored else None,
        "probe": linear_probe(data) if scored else None,
        "guesses": _guesses(data),
        "duplicates": _duplicates(data),
        "findings": [*_findings(data), *_of_files(task)],
        "folder": str(folder),
        "data": rows_hash(data),
    }


FILES = 8  # are named on the page
BINS = 12  # of the histogram of lengths


def _spread(split: Split) -> dict[str, Any]:
    """Of the sequences' lengths."""
    lengths = sequence_lengths(split)
    counts, edges = np.histogram(lengths, BINS if lengths.min() < lengths.max() else 1)
    ends = {"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())}
    return ends | {"histogram": counts.tolist(), "edges": edges.tolist()}


def _times(split: Split) -> dict[str, float]:
    assert split.steps is not None
    pieces = list(replace(split, values=split.steps).pieces())
    total = sum(float(piece.sum(dtype=np.float64)) for piece in pieces) / sum(map(len, pieces))
    return {"min": min(float(p.min()) for p in pieces), "mean": total, "max": max(float(p.max()) for p in pieces)}


def _findings(data: TaskData) -> list[str]:
    """What is odd about the rows themselves, a sentence each."""
    findings = []
    if isinstance(data.input, Values):
        ends = [_ends(piece) for piece in data.train.pieces()]
        low, high = np.fmin.reduce([low for low, _ in ends]), np.fmax.reduce([high for _, high in ends])
        flat = np.flatnonzero(low == high)
        if len(flat):
            which = ", ".join(f"{k} ({low[k]:g})" for k in flat[:5].tolist()) + (", …" if len(flat) > 5 else "")
            findings.append(f"{len(flat)} of {data.input.channels} channels are constant in the training rows: {which}")
    if isinstance(data.target, Labels):
        _, holding = label_counts(data.train, data.target.count)
        if few := [name for name, n in zip(data.class_names, holding.tolist(), strict=True) if n < 2]:
            named = ", ".join(few[:5]) + ", …" * (len(few) > 5)
            findings.append(f"{len(few)} of {data.target.count} labels hold in fewer than two training rows: {named}")
    if isinstance(data.target, Classes):
        counts = class_counts(data.train, data.target.count)
        rare = int((counts < 2).sum())
        if rare and not data.target.per_step:
            findings.append(f"{rare} of {data.target.count} classes have fewer than two training rows")
        if counts.max() >= 0.9 * counts.sum():
            findings.append(
                f"{counts.max() / counts.sum():.1%} of the training answers are class {int(counts.argmax())}: look at "
                "f1_macro or accuracy_macro (finetune.objective.metric) beside accuracy"
            )
    conflicts = _conflicts(data.train)
    if conflicts:
        findings.append(f"{conflicts:,} training rows have the input of an earlier row, but another target")
    return findings


def _ends(piece: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(C,) The least and the largest value of each channel, missing ones left out."""
    return np.fmin.reduce(piece, axis=0), np.fmax.reduce(piece, axis=0)


def _conflicts(split: Split) -> int:
    """Rows whose input stands before with another target."""
    if split.per_step or split.targets is None:
        return 0
    _, first, which = np.unique(split.fingerprints, return_index=True, return_inverse=True)
    here = np.asarray(split.targets)
    there = here[first[which]]
    other = (here != there) & known_targets(here) & known_targets(there)
    return int(other.reshape(len(split), -1).any(axis=1).sum())


def _of_files(task: OpenTask) -> list[str]:
    """What the task itself says of its files, where it looks into them."""
    if not hasattr(task.component.module, "findings"):
        return []
    return [str(text) for text in call_hook(task.component, "findings", task.config, data_dir().resolve())]


def _inputs(data: TaskData) -> dict[str, Any]:
    """Range of the values, or how much of the splits the vocabulary covers."""
    if not isinstance(data.input, Tokens):
        values = {name: _range(split) for name, split in data.splits.items()}
        return {"values": values, **({"missing": _missing(data)} if data.input.missing else {})}
    if data.input.codes is None or data.input.unknown is None:
        return {"vocabulary": data.input.vocab}
    shares = {}
    for name, split in data.splits.items():
        counts = split.counts()
        tokens = data.input.ids(np.arange(len(counts)))
        shares[name] = float(counts[tokens == data.input.unknown].sum() / counts.sum())
    return {"vocabulary": data.input.vocab, "unknown": shares}


def _range(split: Split) -> dict[str, float]:
    low, high = zip(*map(_ends, split.pieces()), strict=True)
    return {"min": float(np.fmin.reduce(low, axis=None)), "max": float(np.fmax.reduce(high, axis=None))}


def _missing(data: TaskData) -> dict[str, list[float]]:
    """Of each channel of every split, the share of values that is missing."""
    return {
        name: (sum(np.isnan(piece).sum(axis=0) for piece in split.pieces()) / sum(map(len, split.pieces()))).tolist()
        for name, split in data.splits.items()
    }


def _named(data: TaskData) -> dict[str, Any]:
    """What classes or labels are called, where the task says so."""
    return {"names": [*data.classes]} if data.classes else {}


def _labelled_rows(data: TaskData) -> dict[str, Any]:
    """How many rows of each split have a target, where some have none."""
    if not data.target.missing or data.target.per_step:
        return {}
    counts = {name: int(has_target(split).sum()) for name, split in data.splits.items()}
    return {} if all(counts[name] == len(split) for name, split in data.splits.items()) else {"labelled": counts}


def _targets(data: TaskData, split: Split) -> list[int] | dict[str, list[float]]:
    """How many rows of each class; in how many each label holds, and in how many not; or each target's range."""
    if isinstance(data.target, Labels):
        lacking, holding = label_counts(split, data.target.count)
        unknown = sum(map(len, target_pieces(split))) - lacking - holding
        return {"holds": holding.tolist(), "holds not": lacking.tolist(), "unknown": unknown.tolist()}
    if isinstance(data.target, Classes):
        return class_counts(split, data.target.count).tolist()
    known = np.ma.masked_invalid(np.concatenate([*target_pieces(split)]))
    low, mean, high = known.min(axis=0), known.mean(axis=0), known.max(axis=0)
    return {"min": low.tolist(), "mean": mean.tolist(), "max": high.tolist()}


def _guesses(data: TaskData) -> dict[str, float]:
    """Validation losses of answers that look at no context, which a denoiser has to beat.

    cross_entropy: nats, always answering with the training frequencies (one is added to every count); l1: standardised,
    always answering with the training median of the channel.
    """
    losses: dict[str, float] = {}
    if isinstance(data.input, Tokens) or data.input.levels is not None:
        size = data.input.vocab if isinstance(data.input, Tokens) else data.input.levels or 0
        train, val = (_frequencies(data, split, size) for split in (data.train, data.val))
        guess = (train + 1) / (train + 1).sum()
        losses["cross_entropy"] = float(-(val * np.log(guess)).sum() / val.sum())
    if isinstance(data.input, Values):
        median = _median(data.train)  # (C,)
        if data.input.missing:
            losses["l1"] = _l1_of_observed(data, median)
        else:
            pieces = [(np.abs(piece - median).sum(axis=0), len(piece)) for piece in data.val.pieces()]
            apart, steps = sum(piece for piece, _ in pieces), sum(size for _, size in pieces)
            losses["l1"] = float(np.mean(apart / steps / np.array(data.input.std)))
    return losses


def _l1_of_observed(data: TaskData, median: NDArray[np.float64]) -> float:
    """As pretraining has it: the mean over steps with a value of the mean over their channels that have one."""
    assert isinstance(data.input, Values)
    total, steps = 0.0, 0
    for piece in data.val.pieces():
        apart = np.abs(piece - median) / np.array(data.input.std)
        apart = apart[~np.isnan(apart).all(axis=1)]
        total, steps = total + float(np.nanmean(apart, axis=1).sum()), steps + len(apart)
    return total / max(steps, 1)


def _median(split: Split) -> NDArray[np.float64]:
    """(C,) Of each channel; of more than 2^24 numbers, of an evenly spread part of the rows."""
    rows = split.take(np.arange(0, len(split), max(1, -(-int(split.lengths.sum()) * split.values.shape[1] // 2**24))))
    most = 2**24 // split.values.shape[1]
    pieces, taken = [], 0
    for piece in rows.pieces():
        pieces.append(np.array(piece[: most - taken]))
        taken += len(pieces[-1])
        if taken >= most:
            break
    found = np.concatenate(pieces)
    if not np.isnan(found).any():
        return np.median(found, axis=0).astype(np.float64)
    known = [channel[~np.isnan(channel)] for channel in found.T]
    return np.array([np.median(channel) if len(channel) else 0.0 for channel in known], np.float64)


def _frequencies(data: TaskData, split: Split, size: int) -> NDArray[np.int64]:
    """How often each token or level occurs."""
    counts = split.counts()
    ids = data.input.ids(np.arange(len(counts))) if isinstance(data.input, Tokens) else np.arange(len(counts))
    return np.bincount(ids, weights=counts, minlength=size).astype(np.int64)


def _duplicates(data: TaskData) -> dict[str, int]:
    """Rows whose input stands before in the same split, and rows of one split whose input also stands in another."""
    splits = data.splits
    within = {name: len(split) - len(np.unique(split.fingerprints)) for name, split in splits.items()}
    between = {
        f"{name} also in {other}": int(np.isin(splits[name].fingerprints, splits[other].fingerprints).sum())
        for name, other in (("val", "train"), ("test", "train"), ("val", "test"))
    }
    return within | between


def render(summary: Mapping[str, Any]) -> str:
    """The same as one page."""
    return "\n".join(f"{label:<9} {text}" if label or text else "" for label, text in _lines(summary))


def _lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and text of each line."""
    yield "task", f"{summary['task']}  " + ", ".join(f"{k}={json.dumps(v)}" for k, v in summary["options"].items())
    files = [f"{file['path']}  {file['bytes']:,} bytes" for file in summary["files"][:FILES]]
    if len(summary["files"]) > FILES:
        rest = sum(file["bytes"] for file in summary["files"][FILES:])
        files.append(f"and {len(summary['files']) - FILES:,} more, {rest:,} bytes")
    yield from _labelled("files", files or ["none named by the task"])
    yield from _labelled("notes", summary["notes"])
    yield "", ""
    yield "", f"{'rows':>8}   {'length: min':>11} {'median':>9} {'max':>9}   from min to max"
    for name, rows in summary["rows"].items():
        lengths = summary["lengths"][name]
        spread = f"{lengths['min']:>11,} {lengths['median']:>9,.0f} {lengths['max']:>9,}"
        yield name, f"{rows:>8,}   {spread}   {_bars(lengths['histogram'])}"
    if summary["resampled"]:
        yield "", "training rows are drawn again for every epoch; these are the first epoch's"
    if summary["examples"] != "sequences":
        yield "", f"a row is one of {summary['examples']}, whose lengths these are"
    yield "", ""
    yield "input", summary["input"]
    for name, times in (summary["times"] or {}).items():
        yield "", f"{name}: {times['min']:g} to {times['max']:g} from step to step, mean {times['mean']:.4g}"
    if summary["interval"] != 1:
        yield "", f"one step stands for {summary['interval']:g} (of the task's unit of time)"
    for name, values in summary.get("values", {}).items():
        yield "", f"{name}: values {values['min']:g} to {values['max']:g}"
    for name, shares in summary.get("missing", {}).items():
        shown = ", ".join(f"{share:.2%}" for share in shares[:8]) + (", …" if len(shares) > 8 else "")
        yield "", f"{name}: {shown} of {'each channel' if len(shares) > 1 else 'the values'} missing"
    for name, share in summary.get("unknown", {}).items():
        yield "", f"{name}: {share:.3%} unknown"
    if summary["static"]:
        yield "static", f"{summary['static']} numbers beside a sequence"
    yield "target", summary["target"]
    for name, targets in summary["targets"].items():
        yield "", f"{name}: {_target_line(targets)}"
    if "names" in summary:
        shown = ", ".join(summary["names"][:20])
        yield "", f"in the order {shown}{', …' if len(summary['names']) > 20 else ''}"
    for name, count in summary.get("labelled", {}).items():
        yield "", f"{name}: {count:,} of {summary['rows'][name]:,} rows have a target"
    if summary["chance"] is not None:
        yield "chance", f"{summary['chance']:.2%} of the test answers are the commonest training class"
    if summary["probe"]:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in summary["probe"]["test"].items())
        yield "probe", f"{scores} on test, by a linear map of {summary['probe']['features']}"
    guesses = ", ".join(f"{name} {value:.4g}" for name, value in summary["guesses"].items())
    yield "guesses", f"{guesses}: losses on validation inputs without a look at their neighbours"
    repeated = [f"{name} {count:,}" for name, count in summary["duplicates"].items() if count]
    yield "repeated", ", ".join(repeated) or "no input occurs twice"
    yield from _labelled("findings", summary["findings"])
    yield "", ""
    yield "prepared", summary["folder"]
    yield "data", summary["data"]


def _bars(counts: list[int]) -> str:
    """A histogram in a line; what is not empty shows."""
    top = max(counts)
    return "".join("▁▂▃▄▅▆▇█"[-(-7 * count // top)] if count else " " for count in counts)


def _labelled(label: str, texts: list[str]) -> Iterator[tuple[str, str]]:
    return zip([label, *[""] * len(texts)], texts, strict=False)


def _target_line(targets: list[int] | Mapping[str, list[float | None]]) -> str:
    """None: no row has this number."""
    if not isinstance(targets, Mapping):
        counts = [f"{count:,}" for count in targets[:20]]
        return f"rows a class {' '.join(counts)}{' …' if len(targets) > 20 else ''}"
    shown = {name: ["-" if v is None else f"{v:.4g}" for v in values[:8]] for name, values in targets.items()}
    return ", ".join(f"{name} {' '.join(values)}" for name, values in shown.items())
