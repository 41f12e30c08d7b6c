"""Where a finished run is wrong: what is taken for what, the hardest rows, and accuracy or error group by group.

An item is an answer: one a row, or one a scored step. Groups are sequence lengths, positions, and whatever a task's own
`breakdown` names. Of two runs over the same rows the tables stand side by side. Nothing here needs torch.

Letters: n rows, m items, K numbers of an answer, R runs (1 or 2), G groups.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from spt.report.format import csv_text, shorten, slug
from spt.report.stats import CONFIDENCE, mcnemar
from spt.runs.files import write_text, writing
from spt.tasks.base import Classes, Reals, Split, Tokens, Values

FILE = "errors.json"
FORMAT = 1  # of errors.json; raised when a field changes its meaning
FEW = 20  # different whole numbers that are a group each; of more, bins are made
BINS = 10
LINES = 8  # groups of a second attribute that the first is crossed with
MANY = 256  # classes; of more there is no matrix
LONGEST = 160  # characters of a row's text that are shown
SHOWN = 24  # lines of a table in a terminal
WIDE = 10  # classes of a matrix in a terminal
SPARE = {"precision", "low", "high"}
FRACTIONS = {"accuracy", "low", "high", "recall", "precision", "F1", "IoU", "share"}
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EvaluationRows:
    """What the runs were asked: the rows of a split, one behind the other, and what their task tells of them."""

    task: str
    split: str
    input: Tokens | Values
    target: Classes | Reals
    rows: Split  # contiguous
    row: NDArray[np.int32]  # (m,) of each item
    step: NDArray[np.int32] | None  # (m,) in its row; None: one answer a row
    truth: NDArray[Any]  # (m,) classes or (m, K) numbers
    names: tuple[str, ...] = ()  # of the classes, where the task tells them
    row_width: int | None = None  # pixels, where a row is a picture
    attributes: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # (m,) each: numbers, or byte strings
    readable: Callable[[NDArray[Any]], str | None] | None = None  # a row's tokens as text
    picture: Callable[[NDArray[Any]], NDArray[Any] | None] | None = None  # a row's values as (H, W) or (H, W, 3)

    @property
    def classes(self) -> bool:
        return isinstance(self.target, Classes)

    def called(self, number: int) -> str:
        """A class's name, else its number."""
        return self.names[number] if number < len(self.names) else str(number)


@dataclass(frozen=True)
class RunAnswers:
    """One run's answers to all items."""

    label: str  # tells two runs apart
    run: str
    said: NDArray[Any]  # (m,) classes or (m, K) numbers
    margin: NDArray[np.floating[Any]] | None = None  # (m,) score of the best class minus that of the second


@dataclass(frozen=True)
class ErrorTable:
    name: str  # of its CSV file
    title: str
    lines: Sequence[Mapping[str, Any]]  # all have the same keys
    caption: str = ""

    @property
    def columns(self) -> list[str]:
        return list(self.lines[0]) if self.lines else []


class Groups(NamedTuple):
    labels: list[str]
    of: NDArray[np.int64]  # (m,) into the labels


class GroupScore(NamedTuple):
    """One group of a figure: what it is called, its items, and of each run the value with its bounds."""

    group: str
    second: str  # of a crossed attribute, else empty
    n: int
    values: tuple[tuple[float, float | None, float | None], ...]  # (R,) value, low, high


@dataclass(frozen=True)
class Breakdown:
    """Items by a named attribute, perhaps crossed with a second one: accuracy, of numbers the RMSE."""

    name: str
    second: str
    lines: tuple[GroupScore, ...]


@dataclass(frozen=True)
class ErrorAnalysis:
    """All that is known of where the runs are wrong."""

    asked: EvaluationRows
    given: tuple[RunAnswers, ...]
    sentence: str
    tables: tuple[ErrorTable, ...]
    breakdowns: tuple[Breakdown, ...]
    matrix: NDArray[np.int64] | None  # (R, C, C) truth by answer
    hardest: NDArray[np.int64]  # rows, the worst first
    scores: tuple[dict[str, float], ...]
    notes: tuple[str, ...] = ()
    samples: bool = True  # may rows of the data set be shown?

    @property
    def shows_samples(self) -> bool:
        """Whether rows of the data set are in what is written; its licence then applies to them."""
        return self.samples and len(self.hardest) > 0


def analyse_errors(
    asked: EvaluationRows,
    given: Sequence[RunAnswers],
    top: int = 16,
    *,
    samples: bool = True,
    notes: Sequence[str] = (),
) -> ErrorAnalysis:
    """Every table that the targets allow; `top` is how many rows and confusions are named."""
    runs = tuple(given)
    told = _attributes(asked)
    breakdowns = tuple(_breakdowns(asked, runs, told))
    tables: list[ErrorTable] = []
    matrix = None
    if asked.classes:
        matrix = _matrix(asked, runs)
        worst = confusions(asked, runs)
        if matrix is not None:
            tables += [class_table(asked, runs, matrix)]
        tables += [ErrorTable("confusions", "Largest confusions", worst[:top])] if worst else []
        if matrix is not None:
            tables += [matrix_table(asked, runs, matrix)]
        sentence = _class_sentence(asked, runs, worst)
    else:
        tables += [output_table(asked, runs)]
        sentence = _real_sentence(asked, runs)
    tables += [_breakdown_table(asked, runs, one) for one in breakdowns]
    hardest = hardest_rows(asked, runs[0])[:top]
    if len(hardest):
        tables.append(_hardest_table(asked, runs, hardest, samples))
    if len(runs) == 2:
        tables += _between(asked, runs)
    scores = tuple(_scores(asked, one) for one in runs)
    return ErrorAnalysis(
        asked, runs, sentence, tuple(tables), breakdowns, matrix, hardest, scores, tuple(notes), samples
    )


def _scores(asked: EvaluationRows, one: RunAnswers) -> dict[str, float]:
    if asked.classes:
        return {"accuracy": float(np.mean(one.said == asked.truth))}
    error = _error(asked, one)
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(np.mean(np.abs(error))),
        "bias": float(error.mean()),
    }


def _error(asked: EvaluationRows, one: RunAnswers) -> Floats:
    """(m, K)"""
    return one.said.astype(np.float64) - asked.truth.astype(np.float64)


def _unit(asked: EvaluationRows) -> str:
    rows = f"{len(asked.rows):,} {_split_name(asked)} rows"
    return rows if asked.step is None else f"{len(asked.truth):,} scored steps in {rows}"


def _split_name(asked: EvaluationRows) -> str:
    return {"val": "validation"}.get(asked.split, asked.split)


def _class_sentence(asked: EvaluationRows, runs: Sequence[RunAnswers], worst: Sequence[Mapping[str, Any]]) -> str:
    right = [int(np.sum(one.said == asked.truth)) for one in runs]
    m = len(asked.truth)
    if len(runs) == 2:
        first, second = (one.said == asked.truth for one in runs)
        shares = ", ".join(f"{one.label} {_percent(n, m)}" for one, n in zip(runs, right, strict=True))
        only = [int(np.sum(first & ~second)), int(np.sum(second & ~first))]
        each = ", ".join(f"{n:,} in {one.label} alone" for one, n in zip(runs, only, strict=True))
        return f"{shares} of {_unit(asked)} right; {each}."
    if right[0] == m:
        return f"All of {_unit(asked)} right."
    top = worst[0]
    count, support = top["count"], top["of"]
    confused = f"the commonest confusion is {top['truth']} taken for {top['answer']}, {count:,} of {support:,}"
    return f"{_percent(right[0], m)} of {_unit(asked)} right; {confused}."


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _real_sentence(asked: EvaluationRows, runs: Sequence[RunAnswers]) -> str:
    told = []
    for one in runs:
        error = _error(asked, one)
        worst = int(np.argmax(np.square(error).mean(1)))
        name = f"{one.label}: " if len(runs) == 2 else ""
        told.append(
            f"{name}RMSE {np.sqrt(np.square(error).mean()):.4g}, the largest error {np.abs(error[worst]).max():.4g} in "
            f"row {asked.rows.ids[asked.row[worst]]}"
        )
    return f"{'; '.join(told)}; over {_unit(asked)}."


def confusion(truth: ArrayLike, said: ArrayLike, count: int) -> NDArray[np.int64]:
    """(count, count) How many items of each class got each answer."""
    pairs = np.asarray(truth, np.int64) * count + np.asarray(said, np.int64)
    return np.bincount(pairs, minlength=count * count).reshape(count, count)


def _matrix(asked: EvaluationRows, runs: Sequence[RunAnswers]) -> NDArray[np.int64] | None:
    assert isinstance(asked.target, Classes)
    # A head without a layer of its own may answer classes beyond those that there are.
    count = max(asked.target.count, *(int(one.said.max()) + 1 for one in runs))
    return None if count > MANY else np.stack([confusion(asked.truth, one.said, count) for one in runs])


def class_table(asked: EvaluationRows, runs: Sequence[RunAnswers], matrix: NDArray[np.int64]) -> ErrorTable:
    """Support, recall, precision and F1 of every class, of pixels also intersection over union."""
    pictures = asked.step is not None and as_picture(asked, 0) is not None
    lines = []
    for k in range(matrix.shape[1]):
        line: dict[str, Any] = {"class": asked.called(k), "support": int(matrix[0, k].sum())}
        for one, found in zip(runs, matrix, strict=True):
            hits, true, said = (int(n) for n in (found[k, k], found[k].sum(), found[:, k].sum()))
            scores = {
                "recall": _ratio(hits, true),
                "precision": _ratio(hits, said),
                "F1": _ratio(2 * hits, true + said),
            }
            if pictures:
                scores["IoU"] = _ratio(hits, true + said - hits)
            line |= {_of(name, one, runs): value for name, value in scores.items()}
        lines.append(line)
    return ErrorTable(
        "classes", "By class", lines, _undefined(lines, "- where a class does not occur, or is never answered")
    )


def _undefined(lines: Sequence[Mapping[str, Any]], what: str) -> str:
    return what if any(value is None for line in lines for value in line.values()) else ""


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _of(name: str, one: RunAnswers, runs: Sequence[RunAnswers]) -> str:
    """A column's name: with the run's label where there are two."""
    return name if len(runs) == 1 else f"{name} {one.label}"


def confusions(asked: EvaluationRows, runs: Sequence[RunAnswers]) -> list[dict[str, Any]]:
    """Every pair of a class and another answer to it that occurs, the commonest of both runs together first."""
    top = int(max(asked.truth.max(), *(one.said.max() for one in runs))) + 1
    support = np.bincount(asked.truth, minlength=top)
    counted: dict[tuple[int, int], list[int]] = {}
    for number, one in enumerate(runs):
        wrong = one.said != asked.truth
        pairs, counts = np.unique(asked.truth[wrong].astype(np.int64) * top + one.said[wrong], return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            counted.setdefault(divmod(pair, top), [0] * len(runs))[number] = count
    lines = []
    for (truth, said), found in sorted(counted.items(), key=lambda pair: (-sum(pair[1]), pair[0])):
        line: dict[str, Any] = {"truth": asked.called(truth), "answer": asked.called(said)}
        line |= {_of("count", one, runs): count for one, count in zip(runs, found, strict=True)}
        line["of"] = int(support[truth])
        line |= {_of("share", one, runs): count / int(support[truth]) for one, count in zip(runs, found, strict=True)}
        lines.append(line)
    return lines


def matrix_table(asked: EvaluationRows, runs: Sequence[RunAnswers], matrix: NDArray[np.int64]) -> ErrorTable:
    """Truth down, answers across."""
    names = [asked.called(k) for k in range(matrix.shape[1])]
    lines = []
    for one, found in zip(runs, matrix, strict=True):
        for name, counts in zip(names, found.tolist(), strict=True):
            run = {"run": one.label} if len(runs) == 2 else {}
            lines.append({**run, "truth": name, **{f"as {said}": n for said, n in zip(names, counts, strict=True)}})
    return ErrorTable("confusion", "Confusion matrix: truth down, answers across", lines)


def output_table(asked: EvaluationRows, runs: Sequence[RunAnswers]) -> ErrorTable:
    """Bias, RMSE, MAE and R² of every number of an answer.

    R² = 1 - squared error / squared deviation of the truth from its mean; - where the truth is constant.
    """
    lines = []
    for k in range(asked.truth.shape[1]):
        truth = asked.truth[:, k].astype(np.float64)
        line: dict[str, Any] = {"output": str(k), "n": len(truth), "mean": float(truth.mean())}
        spread = float(np.square(truth - truth.mean()).sum())
        for one in runs:
            error = one.said[:, k].astype(np.float64) - truth
            squared = float(np.square(error).sum())
            found = {
                "bias": float(error.mean()),
                "RMSE": (squared / len(truth)) ** 0.5,
                "MAE": float(np.abs(error).mean()),
                "R²": 1 - squared / spread if spread > 1e-12 * float(np.square(truth).sum()) else None,
            }
            line |= {_of(name, one, runs): value for name, value in found.items()}
        lines.append(line)
    return ErrorTable(
        "outputs", "Errors by output: answer minus truth", lines, _undefined(lines, "- where the truth is constant")
    )


def _attributes(asked: EvaluationRows) -> dict[str, NDArray[Any]]:
    """(m,) The attributes that items are grouped by: the task's own, then what every task has."""
    found = dict(asked.attributes)
    found.setdefault("length", asked.rows.lengths[asked.row])
    if asked.step is not None:
        found.setdefault("position", asked.step)
    return found


def groups(values: NDArray[Any]) -> Groups:
    """Words and few whole numbers are a group each; of more numbers, bins of about equally many items."""
    if values.dtype.kind not in "iuf" or (values.dtype.kind in "iu" and len(np.unique(values)) <= FEW):
        known, index = np.unique(values, return_inverse=True)
        return Groups([_word(value) for value in known.tolist()], index.reshape(-1))
    method: Any = "inverted_cdf"  # edges are values that occur
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1), method=method))
    starts = edges[:-1] if len(edges) > 1 else edges
    index = np.clip(np.searchsorted(starts, values, side="right") - 1, 0, None)
    used = np.unique(index)
    whole = values.dtype.kind in "iu"
    labels = []
    for i in used.tolist():
        inside = values[index == i]
        low, high = inside.min(), inside.max()
        labels.append(_range(low, high, whole))
    return Groups(labels, np.searchsorted(used, index))


def _word(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _range(low: Any, high: Any, whole: bool) -> str:
    if whole:
        return f"{low}" if low == high else f"{low}–{high}"
    return f"{low:.3g} to {high:.3g}"


def _breakdowns(
    asked: EvaluationRows, runs: Sequence[RunAnswers], told: Mapping[str, NDArray[Any]]
) -> Iterable[Breakdown]:
    grouped = {name: groups(values) for name, values in told.items()}
    for name, found in grouped.items():
        if len(found.labels) > 1:
            yield Breakdown(name, "", tuple(_lines(asked, runs, found)))
    own = [name for name in list(asked.attributes)[:2] if name in grouped and len(grouped[name].labels) > 1]
    if len(own) == 2 and len(grouped[own[1]].labels) <= LINES:
        yield Breakdown(own[0], own[1], tuple(_lines(asked, runs, grouped[own[0]], grouped[own[1]])))


def _lines(
    asked: EvaluationRows, runs: Sequence[RunAnswers], first: Groups, second: Groups | None = None
) -> Iterable[GroupScore]:
    """The groups that have items: of classes accuracy and its Wilson interval, of numbers the RMSE."""
    others = 1 if second is None else len(second.labels)
    index = first.of if second is None else first.of * others + second.of
    size = len(first.labels) * others
    n = np.bincount(index, minlength=size)
    if asked.classes:
        sums = [np.bincount(index, one.said == asked.truth, size) for one in runs]
    else:
        sums = [np.bincount(index, np.square(_error(asked, one)).mean(1), size) for one in runs]
    for i in np.flatnonzero(n).tolist():
        a, b = divmod(i, others)
        values = []
        for total in sums:
            low, high = wilson(round(total[i]), int(n[i])) if asked.classes else (None, None)
            mean = float(total[i] / n[i])
            values.append((mean if asked.classes else mean**0.5, low, high))
        yield GroupScore(first.labels[a], "" if second is None else second.labels[b], int(n[i]), tuple(values))


def wilson(right: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share: right of n independent answers."""
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(right, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def _breakdown_table(asked: EvaluationRows, runs: Sequence[RunAnswers], one: Breakdown) -> ErrorTable:
    score = "accuracy" if asked.classes else "RMSE"
    lines = []
    for line in one.lines:
        cells: dict[str, Any] = {one.name: line.group, **({one.second: line.second} if one.second else {}), "n": line.n}
        for given, (value, low, high) in zip(runs, line.values, strict=True):
            cells[_of(score, given, runs)] = value
            if asked.classes:
                cells |= {_of("low", given, runs): low, _of("high", given, runs): high}
        if len(runs) == 2:
            cells["difference" if asked.classes else "RMSE difference"] = line.values[1][0] - line.values[0][0]
        lines.append(cells)
    words = f"{one.name} and {one.second}" if one.second else one.name
    caption = ""
    if asked.classes:
        caption = "low and high: Wilson's 95 % interval" + (" (in the CSV)" if len(runs) == 2 else "")
        caption += ", as if steps were independent" if asked.step is not None else ""
    title = f"{'Accuracy' if asked.classes else 'Error'} by {words}"
    return ErrorTable(f"by-{slug(words)}", title, lines, caption)


def hardest_rows(asked: EvaluationRows, one: RunAnswers) -> NDArray[np.int64]:
    """Rows with a mistake, the worst first.

    One class a row: the wrong answer that was surest, by its margin over the next one. Classes of steps: the most wrong
    steps, then the larger share. Numbers: the largest mean squared error.
    """
    n = len(asked.rows)
    if not asked.classes:
        squared = np.square(_error(asked, one)).mean(1)
        mean = np.bincount(asked.row, squared, n) / np.maximum(np.bincount(asked.row, minlength=n), 1)
        order = np.argsort(-mean, kind="stable")
        return order[mean[order] > 0]
    wrong = one.said != asked.truth
    if asked.step is None:
        worst = np.flatnonzero(wrong)
        return worst if one.margin is None else worst[np.argsort(-one.margin[worst], kind="stable")]
    count, steps = np.bincount(asked.row, wrong, n), np.bincount(asked.row, minlength=n)
    order = np.lexsort((-count / np.maximum(steps, 1), -count))
    return order[count[order] > 0]


def _hardest_table(
    asked: EvaluationRows, runs: Sequence[RunAnswers], rows: NDArray[np.int64], samples: bool
) -> ErrorTable:
    as_text = samples and isinstance(asked.input, Tokens) and as_picture(asked, int(rows[0])) is None
    lines = []
    for i in rows.tolist():
        line: dict[str, Any] = {"id": str(asked.rows.ids[i])}
        line |= _row_line(asked, runs, i)
        if as_text:
            line["row"] = readable(asked, i)
        lines.append(line)
    caption = ""
    if asked.classes and asked.step is None:
        caption = "margin: score of the answer minus that of the next best"
    if len(runs) == 2:
        caption = "; ".join(filter(None, [f"the worst of {runs[0].label}", caption]))
    return ErrorTable("hardest", "Hardest rows", lines, caption)


def _row_line(asked: EvaluationRows, runs: Sequence[RunAnswers], i: int) -> dict[str, Any]:
    if asked.step is not None:
        begin, end = np.searchsorted(asked.row, [i, i + 1]).tolist()
        line: dict[str, Any] = {"steps": end - begin}
        for one in runs:
            if asked.classes:
                line[_of("wrong", one, runs)] = int(np.sum(one.said[begin:end] != asked.truth[begin:end]))
            else:
                error = one.said[begin:end].astype(np.float64) - asked.truth[begin:end]
                line[_of("RMSE", one, runs)] = float(np.sqrt(np.square(error).mean()))
        return line
    if asked.classes:
        line = {"label": asked.called(int(asked.truth[i]))}
        for one in runs:
            line[_of("answer", one, runs)] = asked.called(int(one.said[i]))
            if one.margin is not None:
                margin = float(one.margin[i])
                line[_of("margin", one, runs)] = margin if math.isfinite(margin) else None
        return line
    line = {}
    for k in range(asked.truth.shape[1]):
        number = str(k) if asked.truth.shape[1] > 1 else ""
        line[f"target{number}"] = float(asked.truth[i, k])
        line |= {_of(f"answer{number}", one, runs): float(one.said[i, k]) for one in runs}
    return line


def readable(asked: EvaluationRows, i: int, longest: int = LONGEST) -> str:
    """A row's tokens as text on one line: beginning and end, where it is long."""
    row, cuts = asked.rows.row(i), asked.rows.cuts
    if cuts is not None:
        parts = [row[: cuts[i]], row[cuts[i] :]]
        return " | ".join(shorten(_text(asked, part), longest // 2) for part in parts)
    return shorten(_text(asked, row), longest)


def _text(asked: EvaluationRows, row: NDArray[Any]) -> str:
    told = asked.readable(row) if asked.readable is not None else None
    found = told if told is not None else " ".join(map(str, row.tolist()))
    # What a terminal would take for a command is shown as a sign.
    return "".join(c if c.isprintable() else "�" for c in " ".join(found.split()))


def as_picture(asked: EvaluationRows, i: int) -> NDArray[np.float64] | None:
    """(H, W) or (H, W, 3) in [0, 1]: a row whose steps are pixels, or pictures themselves.

    Of pictures, up to six are set side by side. None where the row is no picture.
    """
    row = asked.rows.row(i)
    if asked.picture is not None:
        found = asked.picture(row)
        return None if found is None else _unit_range(found, asked.input)
    if isinstance(asked.input, Values) and asked.input.frame is not None:
        chosen = np.unique(np.linspace(0, len(row) - 1, min(6, len(row))).astype(int))
        return _unit_range(np.concatenate([row[t].reshape(asked.input.frame) for t in chosen], axis=1), asked.input)
    width = asked.row_width
    if width is None or len(row) % width or asked.rows.cuts is not None:
        return None
    pixels = row.reshape(-1, width, row[0].size)
    if pixels.shape[-1] == 1:
        return _unit_range(pixels[..., 0], asked.input)
    return _unit_range(pixels, asked.input) if pixels.shape[-1] == 3 else None


def _unit_range(pixels: NDArray[Any], kind: Tokens | Values) -> NDArray[np.float64]:
    found = np.asarray(pixels, np.float64)
    top = kind.vocab if isinstance(kind, Tokens) else kind.levels
    if top is not None:
        return np.clip(found / (top - 1), 0, 1)
    low, high = float(found.min()), float(found.max())
    return (found - low) / (high - low) if high > low else np.zeros_like(found)


def _between(asked: EvaluationRows, runs: Sequence[RunAnswers]) -> list[ErrorTable]:
    """Which items one run alone has right; of numbers, which run is closer."""
    first, second = runs
    if not asked.classes:
        a, b = (np.square(_error(asked, one)).mean(1) for one in runs)
        lines = [
            {"items": f"{first.label} closer", "n": int(np.sum(a < b))},
            {"items": f"{second.label} closer", "n": int(np.sum(b < a))},
            {"items": "equally close", "n": int(np.sum(a == b))},
        ]
        return [ErrorTable("between", "Which run is closer to the truth", lines)]
    a, b = (one.said == asked.truth for one in runs)
    lines = [
        {"right": "both", "n": int(np.sum(a & b))},
        {"right": f"only {first.label}", "n": int(np.sum(a & ~b))},
        {"right": f"only {second.label}", "n": int(np.sum(b & ~a))},
        {"right": "neither", "n": int(np.sum(~a & ~b))},
    ]
    if asked.step is not None:
        return [ErrorTable("between", "Steps that each run has right", lines)]
    p = mcnemar(int(np.sum(a & ~b)), int(np.sum(b & ~a)))
    found = [ErrorTable("between", "Rows that each run has right", lines, f"McNemar's exact test: p = {p:.3g}")]
    if (a != b).any():
        alone = [
            {
                "id": str(asked.rows.ids[i]),
                "right": (first if a[i] else second).label,
                "label": asked.called(int(asked.truth[i])),
                **{f"answer {one.label}": asked.called(int(one.said[i])) for one in runs},
            }
            for i in np.flatnonzero(a != b).tolist()
        ]
        found.append(ErrorTable("only", "Rows that one run alone has right", alone))
    return found


def render(found: ErrorAnalysis) -> RenderableType:
    """For `rich.console.Console.print`: a sentence, then the tables, the beginning of each."""
    parts: list[RenderableType] = [Text(found.sentence, style="bold")]
    parts += [Text(note, style="dim") for note in found.notes]
    for table in found.tables:
        if table.name == "confusion" and found.matrix is not None and found.matrix.shape[1] > WIDE:
            continue
        parts += [Text(), Text(table.title, style="bold"), _rich_table(table, found.given)]
        if len(table.lines) > SHOWN:
            parts.append(Text(f"{len(table.lines) - SHOWN:,} more in {table.name}.csv", style="dim"))
        if table.caption:
            parts.append(Text(table.caption, style="dim"))
    return Group(*parts)


def _rich_table(table: ErrorTable, runs: Sequence[RunAnswers]) -> RichTable:
    """Of two runs without the columns that a terminal has no room for; the CSV has them."""
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown = [name for name in table.columns if len(runs) == 1 or name.partition(" ")[0] not in SPARE]
    for name in shown:
        words = any(isinstance(line[name], str) for line in table.lines)
        head = next(
            (f"{name.removesuffix(one.label).rstrip()}\n{one.label}" for one in runs if _is_of(name, one)), name
        )
        made.add_column(Text(head), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for line in table.lines[:SHOWN]:
        made.add_row(*(Text(_cell(name, line[name])) for name in shown))
    return made


def _is_of(name: str, one: RunAnswers) -> bool:
    return name.endswith(f" {one.label}")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if name == "difference":
        return f"{100 * value:+.1f}"
    return f"{100 * value:.1f} %" if name.partition(" ")[0] in FRACTIONS else f"{value:.4g}"


def to_json(found: ErrorAnalysis) -> dict[str, Any]:
    """What `--json` prints and errors.json holds."""
    asked = found.asked
    return {
        "format": FORMAT,
        "kind": "errors",
        "task": asked.task,
        "split": asked.split,
        "rows": len(asked.rows),
        "items": len(asked.truth),
        "item": "row" if asked.step is None else "step",
        "runs": [
            {"run": one.run, "label": one.label, **scores}
            for one, scores in zip(found.given, found.scores, strict=True)
        ],
        "sentence": found.sentence,
        "samples": found.shows_samples,
        "notes": list(found.notes),
        "tables": {
            table.name: {"title": table.title, "caption": table.caption, "lines": [dict(line) for line in table.lines]}
            for table in found.tables
        },
    }


def write_analysis(
    found: ErrorAnalysis, folder: Path, draw: Callable[[ErrorAnalysis, Path], Sequence[Path]]
) -> tuple[Path, ...]:
    """NAME.csv of every table, the figures, errors.json; what an earlier call left there is replaced or removed."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in _left(folder):
            (folder / name).unlink(missing_ok=True)
    made = []
    for table in found.tables:
        made.append(folder / f"{table.name}.csv")
        write_text(made[-1], csv_text(table.lines))
    made += draw(found, folder)
    told = {**to_json(found), "files": [path.name for path in made]}
    write_text(folder / FILE, json.dumps(told, indent=2, allow_nan=False) + "\n")
    return (folder / FILE, *made)


def _left(folder: Path) -> list[str]:
    """The files that an earlier errors.json names: a picture of it must not stand beside other numbers."""
    try:
        names = json.loads((folder / FILE).read_text(encoding="utf-8"))["files"]
        return [name for name in names if re.fullmatch(r"[a-z0-9-]+\.(csv|svg|png)", name)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
