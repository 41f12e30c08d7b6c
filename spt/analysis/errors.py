"""Where a finished run is wrong: confusions, the hardest rows, and accuracy or error group by group.

An item is one prediction: one per row, or one per scored step. Groups are sequence lengths, positions, and whatever a
task's own `breakdown` names. Two runs over the same rows stand side by side. Nothing here needs torch.

Letters: n rows, m items, K numbers of a prediction, R runs (1 or 2), C classes.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
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
MAX_LEVELS = 20  # distinct whole numbers that are a group each; more are binned
BINS = 10
MAX_CROSSED = 8  # groups of a second attribute that the first is crossed with
MAX_CLASSES = 256  # with more there is no matrix
ROW_TEXT = 160  # characters of a row's text that are shown
TERMINAL_LINES = 24  # of a table
TERMINAL_CLASSES = 10  # of a matrix
CSV_ONLY = {"precision", "low", "high"}  # columns that a terminal has no room for beside a second run
FRACTIONS = {"accuracy", "low", "high", "recall", "precision", "F1", "IoU", "share"}
SPLIT_NAMES = {"val": "validation"}
Floats = NDArray[np.float64]
Line = dict[str, Any]


@dataclass(frozen=True)
class RunPredictions:
    """One run's predictions for all items."""

    label: str  # distinguishes two runs
    name: str  # of the run's folder
    predicted: NDArray[Any]  # (m,) classes or (m, K) numbers
    margin: NDArray[np.floating[Any]] | None = None  # (m,) score of the best class minus that of the second


@dataclass(frozen=True)
class Evaluation:
    """The rows of a split that runs are evaluated on, their targets, and what the task says about them."""

    task: str
    split: str
    input: Tokens | Values
    target: Classes | Reals
    rows: Split  # contiguous
    row: NDArray[np.int32]  # (m,) of each item
    step: NDArray[np.int32] | None  # (m,) in its row; None: one prediction per row
    truth: NDArray[Any]  # (m,) classes or (m, K) numbers
    names: tuple[str, ...] = ()  # of the classes, if the task has them
    row_width: int | None = None  # pixels, if a row is a picture
    attributes: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # (m,) each: numbers, or byte strings
    readable: Callable[[NDArray[Any]], str | None] | None = None  # a row's tokens as text
    picture: Callable[[NDArray[Any]], NDArray[Any] | None] | None = None  # a row's values as (H, W) or (H, W, 3)

    @property
    def classes(self) -> bool:
        return isinstance(self.target, Classes)

    @property
    def split_name(self) -> str:
        return SPLIT_NAMES.get(self.split, self.split)

    @property
    def size_text(self) -> str:
        rows = f"{len(self.rows):,} {self.split_name} rows"
        return rows if self.step is None else f"{len(self.truth):,} scored steps in {rows}"

    def class_name(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else str(number)

    def items(self, i: int) -> slice:
        """Those of row i."""
        return slice(*np.searchsorted(self.row, [i, i + 1]).tolist())

    def correct(self, run: RunPredictions) -> NDArray[np.bool_]:
        """(m,)"""
        correct: NDArray[np.bool_] = run.predicted == self.truth
        return correct

    def errors(self, run: RunPredictions) -> Floats:
        """(m, K)"""
        return run.predicted.astype(np.float64) - self.truth.astype(np.float64)

    def squared_errors(self, run: RunPredictions) -> Floats:
        """(m,) Mean over the numbers of a prediction."""
        squared: Floats = np.square(self.errors(run)).mean(1)
        return squared

    def mean_by_row(self, values: NDArray[Any]) -> Floats:
        """(n,) Mean over each row's items; 0 for a row without any."""
        n = len(self.rows)
        means: Floats = np.bincount(self.row, values, n) / np.maximum(np.bincount(self.row, minlength=n), 1)
        return means


Runs = Sequence[RunPredictions]


@dataclass(frozen=True)
class ErrorTable:
    name: str  # of its CSV file
    title: str
    lines: Sequence[Mapping[str, Any]]  # all with the same keys
    caption: str = ""

    @property
    def columns(self) -> list[str]:
        return list(self.lines[0]) if self.lines else []


class Groups(NamedTuple):
    labels: list[str]
    of: NDArray[np.int64]  # (m,) index of each item's label


class GroupScore(NamedTuple):
    """The items of one group, and each run's score with its bounds."""

    group: str
    second: str  # of a crossed attribute, else empty
    n: int
    values: tuple[tuple[float, float | None, float | None], ...]  # (R,) value, low, high


@dataclass(frozen=True)
class Breakdown:
    """Accuracy (of numbers, the RMSE) by a named attribute, perhaps crossed with a second one."""

    name: str
    second: str
    lines: tuple[GroupScore, ...]

    @property
    def title(self) -> str:
        return f"{self.name} and {self.second}" if self.second else self.name


@dataclass(frozen=True)
class ErrorAnalysis:
    """Everything known about where the runs are wrong."""

    evaluation: Evaluation
    runs: tuple[RunPredictions, ...]
    sentence: str
    tables: tuple[ErrorTable, ...]
    breakdowns: tuple[Breakdown, ...]
    matrix: NDArray[np.int64] | None  # (R, C, C) truth by prediction
    hardest: NDArray[np.int64]  # rows, the worst first
    scores: tuple[dict[str, float], ...]
    notes: tuple[str, ...] = ()
    samples: bool = True  # may rows of the data set be shown?

    @property
    def shows_samples(self) -> bool:
        """Whether what is written contains rows of the data set, whose licence then applies."""
        return self.samples and len(self.hardest) > 0


def analyse_errors(
    evaluation: Evaluation, runs: Runs, top: int = 16, *, samples: bool = True, notes: Sequence[str] = ()
) -> ErrorAnalysis:
    """Every table that the targets allow; `top` is how many rows and confusions are listed."""
    breakdowns = tuple(_breakdowns(evaluation, runs))
    tables: list[ErrorTable] = []
    matrix = None
    if evaluation.classes:
        matrix = _matrix(evaluation, runs)
        largest = confusions(evaluation, runs)
        if matrix is not None:
            tables.append(class_table(evaluation, runs, matrix))
        if largest:
            tables.append(ErrorTable("confusions", "Largest confusions", largest[:top]))
        if matrix is not None:
            tables.append(matrix_table(evaluation, runs, matrix))
        sentence = _class_sentence(evaluation, runs, largest)
    else:
        tables.append(output_table(evaluation, runs))
        sentence = _number_sentence(evaluation, runs)
    tables += [_breakdown_table(evaluation, runs, breakdown) for breakdown in breakdowns]
    hardest = hardest_rows(evaluation, runs[0])[:top]
    if len(hardest):
        tables.append(_hardest_table(evaluation, runs, hardest, samples))
    if len(runs) == 2:
        tables += _agreement_tables(evaluation, *runs)
    return ErrorAnalysis(
        evaluation,
        tuple(runs),
        sentence,
        tuple(tables),
        breakdowns,
        matrix,
        hardest,
        scores=tuple(_scores(evaluation, run) for run in runs),
        notes=tuple(notes),
        samples=samples,
    )


def _scores(evaluation: Evaluation, run: RunPredictions) -> dict[str, float]:
    if evaluation.classes:
        return {"accuracy": float(np.mean(evaluation.correct(run)))}
    error = evaluation.errors(run)
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(np.mean(np.abs(error))),
        "bias": float(error.mean()),
    }


def _class_sentence(evaluation: Evaluation, runs: Runs, largest: Sequence[Mapping[str, Any]]) -> str:
    correct = [evaluation.correct(run) for run in runs]
    shares = [f"{100 * int(each.sum()) / len(each):.1f} %" for each in correct]
    if len(runs) == 2:
        first, second = correct
        alone = (int(np.sum(first & ~second)), int(np.sum(second & ~first)))
        by_run = ", ".join(f"{run.label} {share}" for run, share in zip(runs, shares, strict=True))
        alone_text = ", ".join(f"{count:,} by {run.label} alone" for run, count in zip(runs, alone, strict=True))
        return f"{by_run} of {evaluation.size_text} correct; {alone_text}."
    if correct[0].all():
        return f"All {evaluation.size_text} correct."
    top = largest[0]
    return (
        f"{shares[0]} of {evaluation.size_text} correct; the most common confusion is {top['truth']} predicted as "
        f"{top['answer']}, {top['count']:,} of {top['of']:,}."
    )


def _number_sentence(evaluation: Evaluation, runs: Runs) -> str:
    clauses = []
    for run in runs:
        error = evaluation.errors(run)
        worst = int(np.argmax(np.square(error).mean(1)))
        label = f"{run.label}: " if len(runs) == 2 else ""
        clauses.append(
            f"{label}RMSE {np.sqrt(np.square(error).mean()):.4g}, the largest error {np.abs(error[worst]).max():.4g} "
            f"in row {evaluation.rows.ids[evaluation.row[worst]]}"
        )
    return f"{'; '.join(clauses)}; over {evaluation.size_text}."


def _matrix(evaluation: Evaluation, runs: Runs) -> NDArray[np.int64] | None:
    """(R, C, C) How many items of each class were predicted as each class."""
    from sklearn.metrics import confusion_matrix  # slow to import

    assert isinstance(evaluation.target, Classes)
    # A head without a layer of its own may predict classes beyond those that exist.
    count = max(evaluation.target.count, *(int(run.predicted.max()) + 1 for run in runs))
    if count > MAX_CLASSES:
        return None
    labels = range(count)
    return np.stack([confusion_matrix(evaluation.truth, run.predicted, labels=labels) for run in runs])


def class_table(evaluation: Evaluation, runs: Runs, matrix: NDArray[np.int64]) -> ErrorTable:
    """Support, recall, precision and F1 of every class; of pixels also intersection over union."""
    columns: dict[str, Sequence[Any]] = {
        "class": [evaluation.class_name(k) for k in range(matrix.shape[1])],
        "support": matrix[0].sum(1).tolist(),
    }
    for run, counts in zip(runs, matrix, strict=True):
        hits, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        scores = {
            "recall": (hits, true),
            "precision": (hits, predicted),
            "F1": (2 * hits, true + predicted),
        }
        if evaluation.step is not None and as_picture(evaluation, 0) is not None:
            scores["IoU"] = (hits, true + predicted - hits)
        for name, (part, whole) in scores.items():
            ratios = zip(part.tolist(), whole.tolist(), strict=True)
            columns[_column(name, run, runs)] = [a / b if b else None for a, b in ratios]
    lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    caption = _undefined(lines, "- if a class does not occur or is never predicted")
    return ErrorTable("classes", "By class", lines, caption)


def _undefined(lines: Sequence[Mapping[str, Any]], caption: str) -> str:
    return caption if any(value is None for line in lines for value in line.values()) else ""


def _column(name: str, run: RunPredictions, runs: Runs) -> str:
    """A column's name: with the run's label if there are two."""
    return name if len(runs) == 1 else f"{name} {run.label}"


def confusions(evaluation: Evaluation, runs: Runs) -> list[Line]:
    """Every pair of a class and a wrong prediction that occurs, the most common in both runs together first."""
    truth = evaluation.truth.astype(np.int64)
    count = int(max(truth.max(), *(run.predicted.max() for run in runs))) + 1
    support = np.bincount(truth, minlength=count).tolist()
    occurrences: dict[tuple[int, int], list[int]] = {}
    for number, run in enumerate(runs):
        wrong = ~evaluation.correct(run)
        pairs, counts = np.unique(truth[wrong] * count + run.predicted[wrong], return_counts=True)
        for pair, times in zip(pairs.tolist(), counts.tolist(), strict=True):
            occurrences.setdefault(divmod(pair, count), [0] * len(runs))[number] = times
    lines = []
    for (true, predicted), by_run in sorted(occurrences.items(), key=lambda item: (-sum(item[1]), item[0])):
        line: Line = {"truth": evaluation.class_name(true), "answer": evaluation.class_name(predicted)}
        line |= {_column("count", run, runs): times for run, times in zip(runs, by_run, strict=True)}
        line["of"] = support[true]
        line |= {_column("share", run, runs): times / support[true] for run, times in zip(runs, by_run, strict=True)}
        lines.append(line)
    return lines


def matrix_table(evaluation: Evaluation, runs: Runs, matrix: NDArray[np.int64]) -> ErrorTable:
    names = [evaluation.class_name(k) for k in range(matrix.shape[1])]
    lines = [
        {
            **({"run": run.label} if len(runs) == 2 else {}),
            "truth": name,
            **{f"as {predicted}": count for predicted, count in zip(names, row, strict=True)},
        }
        for run, counts in zip(runs, matrix, strict=True)
        for name, row in zip(names, counts.tolist(), strict=True)
    ]
    return ErrorTable("confusion", "Confusion matrix: truth down, predictions across", lines)


def output_table(evaluation: Evaluation, runs: Runs) -> ErrorTable:
    """Bias, RMSE, MAE and R² of every number of a prediction.

    R² = 1 - squared error / squared deviation of the truth from its mean; undefined if the truth is constant.
    """
    lines = []
    for k in range(evaluation.truth.shape[1]):
        truth = evaluation.truth[:, k].astype(np.float64)
        line: Line = {"output": str(k), "n": len(truth), "mean": float(truth.mean())}
        spread = float(np.square(truth - truth.mean()).sum())
        for run in runs:
            error = run.predicted[:, k].astype(np.float64) - truth
            squared = float(np.square(error).sum())
            scores = {
                "bias": float(error.mean()),
                "RMSE": (squared / len(truth)) ** 0.5,
                "MAE": float(np.abs(error).mean()),
                "R²": 1 - squared / spread if spread > 1e-12 * float(np.square(truth).sum()) else None,
            }
            line |= {_column(name, run, runs): value for name, value in scores.items()}
        lines.append(line)
    caption = _undefined(lines, "- if the truth is constant")
    return ErrorTable("outputs", "Errors by output: prediction minus truth", lines, caption)


def groups(values: NDArray[Any]) -> Groups:
    """Words and few whole numbers are a group each; more numbers are binned, with about equally many items a bin."""
    whole = values.dtype.kind in "iu"
    if values.dtype.kind not in "iuf" or (whole and len(np.unique(values)) <= MAX_LEVELS):
        levels, index = np.unique(values, return_inverse=True)
        labels = [x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in levels.tolist()]
        return Groups(labels, index.reshape(-1))
    method: Any = "inverted_cdf"  # edges are values that occur
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1), method=method))
    starts = edges[:-1] if len(edges) > 1 else edges
    bins = np.clip(np.searchsorted(starts, values, side="right") - 1, 0, None)
    used, index = np.unique(bins, return_inverse=True)
    ranges = ((inside.min(), inside.max()) for inside in (values[bins == i] for i in used))
    return Groups([_range_text(low, high, whole) for low, high in ranges], index.reshape(-1))


def _range_text(low: Any, high: Any, whole: bool) -> str:
    if whole:
        return f"{low}" if low == high else f"{low}–{high}"
    return f"{low:.3g} to {high:.3g}"


def _breakdowns(evaluation: Evaluation, runs: Runs) -> Iterable[Breakdown]:
    """By the task's own attributes and by those that every task has; then by the first two of its own, crossed."""
    attributes = dict(evaluation.attributes)
    attributes.setdefault("length", evaluation.rows.lengths[evaluation.row])
    if evaluation.step is not None:
        attributes.setdefault("position", evaluation.step)
    grouped = {name: groups(values) for name, values in attributes.items()}
    for name, by in grouped.items():
        if len(by.labels) > 1:
            yield Breakdown(name, "", tuple(_group_scores(evaluation, runs, by)))
    own = [name for name in list(evaluation.attributes)[:2] if len(grouped[name].labels) > 1]
    if len(own) == 2 and len(grouped[own[1]].labels) <= MAX_CROSSED:
        crossed = _group_scores(evaluation, runs, grouped[own[0]], grouped[own[1]])
        yield Breakdown(own[0], own[1], tuple(crossed))


def _group_scores(
    evaluation: Evaluation, runs: Runs, first: Groups, second: Groups | None = None
) -> Iterable[GroupScore]:
    """The groups that have items: of classes accuracy and its Wilson interval, of numbers the RMSE."""
    count = 1 if second is None else len(second.labels)
    index = first.of if second is None else first.of * count + second.of
    size = len(first.labels) * count
    n = np.bincount(index, minlength=size)
    scores = [evaluation.correct(run) if evaluation.classes else evaluation.squared_errors(run) for run in runs]
    sums = [np.bincount(index, score, size) for score in scores]
    for i in np.flatnonzero(n).tolist():
        values = []
        for total in sums:
            low, high = wilson(round(total[i]), int(n[i])) if evaluation.classes else (None, None)
            mean = float(total[i] / n[i])
            values.append((mean if evaluation.classes else mean**0.5, low, high))
        group, other = divmod(i, count)
        yield GroupScore(first.labels[group], "" if second is None else second.labels[other], int(n[i]), tuple(values))


def wilson(correct: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share: correct of n independent predictions."""
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(correct, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def _breakdown_table(evaluation: Evaluation, runs: Runs, breakdown: Breakdown) -> ErrorTable:
    score = "accuracy" if evaluation.classes else "RMSE"
    lines = []
    for group in breakdown.lines:
        line: Line = {breakdown.name: group.group}
        line |= {breakdown.second: group.second} if breakdown.second else {}
        line["n"] = group.n
        for run, (value, low, high) in zip(runs, group.values, strict=True):
            line[_column(score, run, runs)] = value
            if evaluation.classes:
                line |= {_column("low", run, runs): low, _column("high", run, runs): high}
        if len(runs) == 2:
            name = "difference" if evaluation.classes else "RMSE difference"
            line[name] = group.values[1][0] - group.values[0][0]
        lines.append(line)
    caption = ""
    if evaluation.classes:
        caption = "low and high: Wilson's 95 % interval" + (" (in the CSV)" if len(runs) == 2 else "")
        caption += ", as if steps were independent" if evaluation.step is not None else ""
    title = f"{'Accuracy' if evaluation.classes else 'Error'} by {breakdown.title}"
    return ErrorTable(f"by-{slug(breakdown.title)}", title, lines, caption)


def hardest_rows(evaluation: Evaluation, run: RunPredictions) -> NDArray[np.int64]:
    """Rows with an error, the worst first.

    One class a row: the wrong predictions by their margin over the next class, the largest first. Classes of steps: the
    most wrong steps, then the larger share. Numbers: the largest mean squared error.
    """
    if not evaluation.classes:
        mean = evaluation.mean_by_row(evaluation.squared_errors(run))
        order = np.argsort(-mean, kind="stable")
        return order[mean[order] > 0]
    wrong = ~evaluation.correct(run)
    if evaluation.step is None:
        rows = np.flatnonzero(wrong)
        return rows if run.margin is None else rows[np.argsort(-run.margin[rows], kind="stable")]
    count = np.bincount(evaluation.row, wrong, len(evaluation.rows))
    order = np.lexsort((-evaluation.mean_by_row(wrong), -count))
    return order[count[order] > 0]


def _hardest_table(evaluation: Evaluation, runs: Runs, rows: NDArray[np.int64], samples: bool) -> ErrorTable:
    as_text = samples and isinstance(evaluation.input, Tokens) and as_picture(evaluation, int(rows[0])) is None
    lines = []
    for i in rows.tolist():
        line: Line = {"id": str(evaluation.rows.ids[i]), **_row_line(evaluation, runs, i)}
        if as_text:
            line["row"] = readable(evaluation, i)
        lines.append(line)
    captions = [f"the worst of {runs[0].label}"] if len(runs) == 2 else []
    if evaluation.classes and evaluation.step is None:
        captions.append("margin: score of the prediction minus that of the next best")
    return ErrorTable("hardest", "Hardest rows", lines, "; ".join(captions))


def _row_line(evaluation: Evaluation, runs: Runs, i: int) -> Line:
    if evaluation.step is not None:
        items = evaluation.items(i)
        line: Line = {"steps": items.stop - items.start}
        for run in runs:
            if evaluation.classes:
                line[_column("wrong", run, runs)] = int(np.sum(run.predicted[items] != evaluation.truth[items]))
            else:
                error = run.predicted[items].astype(np.float64) - evaluation.truth[items]
                line[_column("RMSE", run, runs)] = float(np.sqrt(np.square(error).mean()))
        return line
    if evaluation.classes:
        line = {"label": evaluation.class_name(int(evaluation.truth[i]))}
        for run in runs:
            line[_column("answer", run, runs)] = evaluation.class_name(int(run.predicted[i]))
            if run.margin is not None:
                margin = float(run.margin[i])
                line[_column("margin", run, runs)] = margin if math.isfinite(margin) else None
        return line
    line = {}
    for k in range(evaluation.truth.shape[1]):
        number = str(k) if evaluation.truth.shape[1] > 1 else ""
        line[f"target{number}"] = float(evaluation.truth[i, k])
        line |= {_column(f"answer{number}", run, runs): float(run.predicted[i, k]) for run in runs}
    return line


def readable(evaluation: Evaluation, i: int, longest: int = ROW_TEXT) -> str:
    """A row's tokens as text on one line; a long row without its middle."""
    row, cuts = evaluation.rows.row(i), evaluation.rows.cuts
    if cuts is not None:
        parts = [row[: cuts[i]], row[cuts[i] :]]
        return " | ".join(shorten(_text(evaluation, part), longest // 2) for part in parts)
    return shorten(_text(evaluation, row), longest)


def _text(evaluation: Evaluation, row: NDArray[Any]) -> str:
    text = evaluation.readable(row) if evaluation.readable is not None else None
    words = (" ".join(map(str, row.tolist())) if text is None else text).split()
    # Control characters, which a terminal would obey, are shown as a replacement character.
    return "".join(c if c.isprintable() else "�" for c in " ".join(words))


def as_picture(evaluation: Evaluation, i: int) -> Floats | None:
    """(H, W) or (H, W, 3) in [0, 1]: a row whose steps are pixels, or up to six of its frames side by side.

    None if the row is not a picture.
    """
    row, kind = evaluation.rows.row(i), evaluation.input
    if evaluation.picture is not None:
        picture = evaluation.picture(row)
        return None if picture is None else _unit_range(picture, kind)
    if isinstance(kind, Values) and kind.frame is not None:
        steps = np.unique(np.linspace(0, len(row) - 1, min(6, len(row))).astype(int))
        return _unit_range(np.concatenate([row[t].reshape(kind.frame) for t in steps], axis=1), kind)
    width = evaluation.row_width
    if width is None or len(row) % width or evaluation.rows.cuts is not None:
        return None
    pixels = row.reshape(-1, width, row[0].size)
    if pixels.shape[-1] == 1:
        return _unit_range(pixels[..., 0], kind)
    return _unit_range(pixels, kind) if pixels.shape[-1] == 3 else None


def _unit_range(pixels: NDArray[Any], kind: Tokens | Values) -> Floats:
    values = np.asarray(pixels, np.float64)
    levels = kind.vocab if isinstance(kind, Tokens) else kind.levels
    if levels is not None:
        return np.clip(values / (levels - 1), 0, 1)
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _agreement_tables(evaluation: Evaluation, first: RunPredictions, second: RunPredictions) -> list[ErrorTable]:
    """Which items only one run predicts correctly; of numbers, which run is closer."""
    if not evaluation.classes:
        a, b = (evaluation.squared_errors(run) for run in (first, second))
        lines: list[Line] = [
            {"items": f"{first.label} closer", "n": int(np.sum(a < b))},
            {"items": f"{second.label} closer", "n": int(np.sum(b < a))},
            {"items": "equally close", "n": int(np.sum(a == b))},
        ]
        return [ErrorTable("between", "Which run is closer to the truth", lines)]
    x, y = evaluation.correct(first), evaluation.correct(second)
    only_first, only_second = int(np.sum(x & ~y)), int(np.sum(y & ~x))
    lines = [
        {"right": "both", "n": int(np.sum(x & y))},
        {"right": f"only {first.label}", "n": only_first},
        {"right": f"only {second.label}", "n": only_second},
        {"right": "neither", "n": int(np.sum(~x & ~y))},
    ]
    if evaluation.step is not None:
        return [ErrorTable("between", "Steps that each run predicts correctly", lines)]
    test = f"McNemar's exact test: p = {mcnemar(only_first, only_second):.3g}"
    tables = [ErrorTable("between", "Rows that each run predicts correctly", lines, test)]
    if (x != y).any():
        disputed = [
            {
                "id": str(evaluation.rows.ids[i]),
                "right": (first if x[i] else second).label,
                "label": evaluation.class_name(int(evaluation.truth[i])),
                **{f"answer {run.label}": evaluation.class_name(int(run.predicted[i])) for run in (first, second)},
            }
            for i in np.flatnonzero(x != y).tolist()
        ]
        tables.append(ErrorTable("only", "Rows that only one run predicts correctly", disputed))
    return tables


def render(analysis: ErrorAnalysis) -> RenderableType:
    """For `rich.console.Console.print`: a sentence, then the beginning of each table."""
    parts: list[RenderableType] = [Text(analysis.sentence, style="bold")]
    parts += [Text(note, style="dim") for note in analysis.notes]
    for table in analysis.tables:
        if table.name == "confusion" and analysis.matrix is not None and analysis.matrix.shape[1] > TERMINAL_CLASSES:
            continue
        parts += [Text(), Text(table.title, style="bold"), _rich_table(table, analysis.runs)]
        if len(table.lines) > TERMINAL_LINES:
            parts.append(Text(f"{len(table.lines) - TERMINAL_LINES:,} more in {table.name}.csv", style="dim"))
        if table.caption:
            parts.append(Text(table.caption, style="dim"))
    return Group(*parts)


def _rich_table(table: ErrorTable, runs: Runs) -> RichTable:
    columns = [name for name in table.columns if len(runs) == 1 or name.partition(" ")[0] not in CSV_ONLY]
    rendered = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        text = any(isinstance(line[name], str) for line in table.lines)
        label = next((run.label for run in runs if name.endswith(f" {run.label}")), None)
        heading = name if label is None else f"{name.removesuffix(label).rstrip()}\n{label}"
        rendered.add_column(Text(heading), justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for line in table.lines[:TERMINAL_LINES]:
        rendered.add_row(*(Text(_cell(name, line[name])) for name in columns))
    return rendered


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


def to_json(analysis: ErrorAnalysis) -> dict[str, Any]:
    """What `--json` prints and errors.json holds."""
    evaluation = analysis.evaluation
    return {
        "format": FORMAT,
        "kind": "errors",
        "task": evaluation.task,
        "split": evaluation.split,
        "rows": len(evaluation.rows),
        "items": len(evaluation.truth),
        "item": "row" if evaluation.step is None else "step",
        "runs": [
            {"run": run.name, "label": run.label, **scores}
            for run, scores in zip(analysis.runs, analysis.scores, strict=True)
        ],
        "sentence": analysis.sentence,
        "samples": analysis.shows_samples,
        "notes": list(analysis.notes),
        "tables": {
            table.name: {"title": table.title, "caption": table.caption, "lines": [dict(line) for line in table.lines]}
            for table in analysis.tables
        },
    }


def write_analysis(
    analysis: ErrorAnalysis, folder: Path, draw: Callable[[ErrorAnalysis, Path], Sequence[Path]]
) -> tuple[Path, ...]:
    """NAME.csv of every table, the figures, errors.json; files of an earlier call are replaced or removed."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in _earlier_files(folder):
            (folder / name).unlink(missing_ok=True)
    paths = []
    for table in analysis.tables:
        paths.append(folder / f"{table.name}.csv")
        write_text(paths[-1], csv_text(table.lines))
    paths += draw(analysis, folder)
    content = {**to_json(analysis), "files": [path.name for path in paths]}
    write_text(folder / FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return (folder / FILE, *paths)


def _earlier_files(folder: Path) -> list[str]:
    """The files that an earlier errors.json names: an old figure must not stand beside new numbers."""
    try:
        names = json.loads((folder / FILE).read_text(encoding="utf-8"))["files"]
        return [name for name in names if re.fullmatch(r"[a-z0-9-]+\.(csv|svg|png)", name)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
