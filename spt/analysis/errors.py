"""Where a finished run is wrong: confusions, the hardest rows, and accuracy or error group by group.

An item is one prediction: one per row, or one per scored step. Groups are sequence lengths, positions, and whatever a
task's own `breakdown` names. Two runs over the same rows stand side by side. Nothing here needs torch.

Letters: n rows, m items, K numbers of a prediction, R runs (1 or 2), C classes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    def score(self) -> Literal["accuracy", "RMSE"]:
        """Of a group of items."""
        return "accuracy" if self.classes else "RMSE"

    @property
    def split_name(self) -> str:
        return SPLIT_NAMES.get(self.split, self.split)

    @property
    def size_text(self) -> str:
        rows = f"{len(self.rows):,} {self.split_name} rows"
        return rows if self.step is None else f"{len(self.truth):,} scored steps in {rows}"

    def class_names(self, numbers: Iterable[Any]) -> list[str]:
        return [self.names[k] if k < len(self.names) else str(k) for k in numbers]

    def row_ids(self, rows: Iterable[Any]) -> list[str]:
        return [str(self.rows.ids[i]) for i in rows]

    def items(self, i: int) -> NDArray[np.int64]:
        """Indices of row i's."""
        return np.arange(*np.searchsorted(self.row, [i, i + 1]))

    def correct(self, run: RunPredictions) -> NDArray[np.bool_]:
        """(m,)"""
        correct: NDArray[np.bool_] = run.predicted == self.truth
        return correct

    def errors(self, run: RunPredictions) -> Floats:
        """(m, K)"""
        return run.predicted.astype(np.float64) - self.truth.astype(np.float64)

    def losses(self, run: RunPredictions) -> Floats:
        """(m,) Of a class 0 if it is correct, else 1; of numbers the mean of their squared errors."""
        if self.classes:
            return (~self.correct(run)).astype(np.float64)
        squared: Floats = np.square(self.errors(run)).mean(1)
        return squared

    def mean_by_row(self, values: NDArray[Any]) -> Floats:
        """(n,) Mean over each row's items; 0 for a row without any."""
        n = len(self.rows)
        means: Floats = np.bincount(self.row, values, n) / np.maximum(np.bincount(self.row, minlength=n), 1)
        return means


Runs = Sequence[RunPredictions]
Groups = tuple[list[str], NDArray[np.int64]]  # labels, and (m,) the index of each item's label


@dataclass(frozen=True)
class ErrorTable:
    name: str  # of its CSV file
    title: str
    lines: Sequence[Line]  # all with the same keys
    caption: str = ""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of a breakdown: attribute, each line's group


@dataclass(frozen=True)
class ErrorAnalysis:
    """Everything known about where the runs are wrong."""

    evaluation: Evaluation
    runs: tuple[RunPredictions, ...]
    sentence: str
    tables: tuple[ErrorTable, ...]
    confusions: Sequence[Line]  # all of them, the most common first
    matrix: NDArray[np.int64] | None  # (R, C, C) truth by prediction
    hardest: NDArray[np.int64]  # rows, the worst first
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
    confusions: list[Line] = []
    matrix = None
    if evaluation.classes:
        confusions, matrix = _confusions(evaluation, runs), _matrix(evaluation, runs)
        sentence = _class_sentence(evaluation, runs, confusions)
        tables = [ErrorTable("confusions", "Largest confusions", confusions[:top])]
        if matrix is not None:
            tables = [_class_table(evaluation, runs, matrix), *tables, _matrix_table(evaluation, runs, matrix)]
    else:
        sentence = _number_sentence(evaluation, runs)
        tables = [_output_table(evaluation, runs)]
    tables += _breakdowns(evaluation, runs)
    hardest = hardest_rows(evaluation, runs[0])[:top]
    if len(hardest):
        tables.append(_hardest_table(evaluation, runs, hardest, samples))
    if len(runs) == 2:
        tables += _agreement_tables(evaluation, *runs)
    return ErrorAnalysis(
        evaluation,
        tuple(runs),
        sentence,
        tables=tuple(table for table in tables if table.lines),
        confusions=confusions,
        matrix=matrix,
        hardest=hardest,
        notes=tuple(notes),
        samples=samples,
    )


def lines_of(columns: Mapping[str, Any]) -> list[Line]:
    """A table's lines from its columns, with None for NaN."""
    from pandas import DataFrame  # slow to import

    frame = DataFrame(columns)
    lines: list[Line] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return lines


def column_name(name: str, run: RunPredictions, runs: Runs) -> str:
    """With the run's label if there are two."""
    return name if len(runs) == 1 else f"{name} {run.label}"


def _side_by_side(runs: Runs, columns: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """(R,) runs' columns as those of one table."""
    pairs = zip(runs, columns, strict=True)
    return {column_name(name, run, runs): values for run, own in pairs for name, values in own.items()}


def rmse(errors: Floats) -> float:
    return float(np.sqrt(np.square(errors).mean()))


def _class_sentence(evaluation: Evaluation, runs: Runs, confusions: Sequence[Line]) -> str:
    correct = np.stack([evaluation.correct(run) for run in runs])  # (R, m)
    shares = [f"{100 * int(each.sum()) / len(each):.1f} %" for each in correct]
    if len(runs) == 2:
        alone = (correct & ~correct[::-1]).sum(1)
        by_run = ", ".join(f"{run.label} {share}" for run, share in zip(runs, shares, strict=True))
        alone_text = ", ".join(f"{count:,} by {run.label} alone" for run, count in zip(runs, alone, strict=True))
        return f"{by_run} of {evaluation.size_text} correct; {alone_text}."
    if not confusions:
        return f"All {evaluation.size_text} correct."
    top = confusions[0]
    return (
        f"{shares[0]} of {evaluation.size_text} correct; the most common confusion is {top['truth']} predicted as "
        f"{top['answer']}, {top['count']:,} of {top['of']:,}."
    )


def _number_sentence(evaluation: Evaluation, runs: Runs) -> str:
    clauses = []
    for run in runs:
        error, worst = evaluation.errors(run), int(np.argmax(evaluation.losses(run)))
        label = f"{run.label}: " if len(runs) == 2 else ""
        clauses.append(
            f"{label}RMSE {rmse(error):.4g}, the largest error {np.abs(error[worst]).max():.4g} in row "
            f"{evaluation.rows.ids[evaluation.row[worst]]}"
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


def _class_table(evaluation: Evaluation, runs: Runs, matrix: NDArray[np.int64]) -> ErrorTable:
    """Support, recall, precision and F1 of every class; of pixels also intersection over union."""
    from pandas import Series

    pixels = evaluation.step is not None and as_picture(evaluation, 0) is not None

    def scores(counts: NDArray[np.int64]) -> dict[str, Any]:  # 0/0 is NaN
        hits, true, predicted = map(Series, (counts.diagonal(), counts.sum(1), counts.sum(0)))
        scores = {"recall": hits / true, "precision": hits / predicted, "F1": 2 * hits / (true + predicted)}
        return scores | ({"IoU": hits / (true + predicted - hits)} if pixels else {})

    names, support = evaluation.class_names(range(matrix.shape[1])), matrix[0].sum(1)
    lines = lines_of({"class": names, "support": support, **_side_by_side(runs, map(scores, matrix))})
    caption = _undefined(lines, "- if a class does not occur or is never predicted")
    return ErrorTable("classes", "By class", lines, caption)


def _undefined(lines: Sequence[Line], caption: str) -> str:
    return caption if any(value is None for line in lines for value in line.values()) else ""


def _confusions(evaluation: Evaluation, runs: Runs) -> list[Line]:
    """Every pair of a class and a wrong prediction that occurs, the most common in both runs together first."""
    from pandas import DataFrame, concat

    pairs = (DataFrame({"truth": evaluation.truth, "answer": run.predicted}) for run in runs)
    wrong = [each[each["truth"] != each["answer"]].value_counts() for each in pairs]
    counts = concat(wrong, axis=1).fillna(0).astype(int).sort_index()
    counts = counts.loc[counts.sum(axis=1).sort_values(ascending=False, kind="stable").index]
    truth, answer = counts.index.get_level_values("truth"), counts.index.get_level_values("answer")
    support = np.bincount(evaluation.truth)[truth]
    by_run = counts.to_numpy().T
    return lines_of(
        {
            "truth": evaluation.class_names(truth),
            "answer": evaluation.class_names(answer),
            **_side_by_side(runs, ({"count": times} for times in by_run)),
            "of": support,
            **_side_by_side(runs, ({"share": times / support} for times in by_run)),
        }
    )


def _matrix_table(evaluation: Evaluation, runs: Runs, matrix: NDArray[np.int64]) -> ErrorTable:
    names = evaluation.class_names(range(matrix.shape[1]))
    lines = []
    for run, counts in zip(runs, matrix, strict=True):
        head = {"run": run.label} if len(runs) == 2 else {}
        predicted = {f"as {name}": column for name, column in zip(names, counts.T, strict=True)}
        lines += lines_of({**head, "truth": names, **predicted})
    return ErrorTable("confusion", "Confusion matrix: truth down, predictions across", lines)


def _output_table(evaluation: Evaluation, runs: Runs) -> ErrorTable:
    """Bias, RMSE, MAE and R² of every number of a prediction.

    R² = 1 - squared error / squared deviation of the truth from its mean; undefined if the truth is constant.
    """
    truth = np.ascontiguousarray(evaluation.truth.T, np.float64)  # (K, m)
    outputs, n = truth.shape
    spread = np.square(truth - truth.mean(1, keepdims=True)).sum(1)
    spread[spread <= 1e-12 * np.square(truth).sum(1)] = np.nan

    def scores(run: RunPredictions) -> dict[str, Any]:
        error = np.ascontiguousarray(evaluation.errors(run).T)
        squared = np.square(error).sum(1)
        return {
            "bias": error.mean(1),
            "RMSE": [mean**0.5 for mean in (squared / n).tolist()],
            "MAE": np.abs(error).mean(1),
            "R²": 1 - squared / spread,
        }

    columns = {"output": list(map(str, range(outputs))), "n": n, "mean": truth.mean(1)}
    lines = lines_of(columns | _side_by_side(runs, map(scores, runs)))
    caption = _undefined(lines, "- if the truth is constant")
    return ErrorTable("outputs", "Errors by output: prediction minus truth", lines, caption)


def groups(values: NDArray[Any]) -> Groups:
    """Words and few whole numbers are a group each; more numbers are binned, with about equally many items a bin."""
    whole = values.dtype.kind in "iu"
    if values.dtype.kind not in "iuf" or (whole and len(np.unique(values)) <= MAX_LEVELS):
        levels, index = np.unique(values, return_inverse=True)
        labels = [x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in levels.tolist()]
        return labels, index.reshape(-1)
    method: Any = "inverted_cdf"  # edges are values that occur, so no bin is empty
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1), method=method))
    index = np.searchsorted(edges[1:-1], values, side="right")
    bins = [values[index == i] for i in range(index.max() + 1)]
    bounds = [(inside.min(), inside.max()) for inside in bins]
    if whole:
        return [f"{low}" if low == high else f"{low}–{high}" for low, high in bounds], index
    return [f"{low:.3g} to {high:.3g}" for low, high in bounds], index


def _breakdowns(evaluation: Evaluation, runs: Runs) -> list[ErrorTable]:
    """By the task's own attributes and by those that every task has; then by the first two of its own, crossed."""
    attributes = dict(evaluation.attributes)
    attributes.setdefault("length", evaluation.rows.lengths[evaluation.row])
    if evaluation.step is not None:
        attributes.setdefault("position", evaluation.step)
    grouped = {name: groups(values) for name, values in attributes.items()}
    grouped = {name: (labels, index) for name, (labels, index) in grouped.items() if len(labels) > 1}
    tables = [_breakdown(evaluation, runs, {name: grouped[name]}) for name in grouped]
    crossed = [name for name in list(evaluation.attributes)[:2] if name in grouped]
    if len(crossed) == 2 and len(grouped[crossed[1]][0]) <= MAX_CROSSED:
        tables.append(_breakdown(evaluation, runs, {name: grouped[name] for name in crossed}))
    return tables


def _breakdown(evaluation: Evaluation, runs: Runs, grouped: Mapping[str, Groups]) -> ErrorTable:
    """The groups that have items: of classes accuracy and its Wilson interval (1927), of numbers the RMSE."""
    from scipy.stats import binomtest  # slow to import

    shape = [len(labels) for labels, _ in grouped.values()]
    index = np.ravel_multi_index([index for _, index in grouped.values()], shape)
    used, n = np.unique(index, return_counts=True)

    def scores(run: RunPredictions) -> dict[str, Any]:
        loss = np.bincount(index, evaluation.losses(run))[used]
        if not evaluation.classes:
            return {"RMSE": np.array([mean**0.5 for mean in (loss / n).tolist()])}
        correct = n - loss.astype(np.int64)
        tests = map(binomtest, correct.tolist(), n.tolist())
        low, high = zip(*(test.proportion_ci(CONFIDENCE, method="wilson") for test in tests), strict=True)
        return {"accuracy": correct / n, "low": low, "high": high}

    places = zip(grouped.items(), np.unravel_index(used, shape), strict=True)
    own_groups = {name: [labels[k] for k in own] for (name, (labels, _)), own in places}
    by_run = [scores(run) for run in runs]
    columns = {**own_groups, "n": n, **_side_by_side(runs, by_run)}
    if len(runs) == 2:
        first, second = (scores[evaluation.score] for scores in by_run)
        columns["difference" if evaluation.classes else "RMSE difference"] = second - first
    caption = ""
    if evaluation.classes:
        caption = "low and high: Wilson's 95 % interval" + (" (in the CSV)" if len(runs) == 2 else "")
        caption += ", as if steps were independent" if evaluation.step is not None else ""
    title = " and ".join(grouped)
    heading = f"{'Accuracy' if evaluation.classes else 'Error'} by {title}"
    return ErrorTable(f"by-{slug(title)}", heading, lines_of(columns), caption, own_groups)


def hardest_rows(evaluation: Evaluation, run: RunPredictions) -> NDArray[np.int64]:
    """Rows with an error, the worst first.

    One class a row: the wrong predictions by their margin over the next class, the largest first. Classes of steps: the
    most wrong steps, then the larger share. Numbers: the largest mean squared error.
    """
    losses = evaluation.losses(run)
    if evaluation.classes and evaluation.step is None:
        rows = np.flatnonzero(losses)
        return rows if run.margin is None else rows[np.argsort(-run.margin[rows], kind="stable")]
    mean = evaluation.mean_by_row(losses)
    total = np.bincount(evaluation.row, losses, len(mean))
    order = np.lexsort((-mean, -total)) if evaluation.classes else np.argsort(-mean, kind="stable")
    return order[mean[order] > 0]


def _hardest_table(evaluation: Evaluation, runs: Runs, rows: NDArray[np.int64], samples: bool) -> ErrorTable:
    truth = evaluation.truth
    columns: dict[str, Any] = {"id": evaluation.row_ids(rows)}
    captions = [f"the worst of {runs[0].label}"] if len(runs) == 2 else []
    if evaluation.step is not None:
        items = [evaluation.items(i) for i in rows.tolist()]
        columns["steps"] = list(map(len, items))
        name, summary = ("wrong", np.count_nonzero) if evaluation.classes else ("RMSE", rmse)
        by_run = map(evaluation.errors, runs)
        columns |= _side_by_side(runs, ({name: [summary(errors[each]) for each in items]} for errors in by_run))
    elif evaluation.classes:
        columns["label"] = evaluation.class_names(truth[rows])
        for run in runs:
            columns[column_name("answer", run, runs)] = evaluation.class_names(run.predicted[rows])
            if run.margin is not None:
                columns[column_name("margin", run, runs)] = np.where(np.isfinite(run.margin), run.margin, np.nan)[rows]
        captions.append("margin: score of the prediction minus that of the next best")
    else:
        for k in range(truth.shape[1]):
            number = str(k) if truth.shape[1] > 1 else ""
            columns[f"target{number}"] = truth[rows, k]
            columns |= _side_by_side(runs, ({f"answer{number}": run.predicted[rows, k]} for run in runs))
    if samples and isinstance(evaluation.input, Tokens) and as_picture(evaluation, int(rows[0])) is None:
        columns["row"] = [readable(evaluation, i) for i in rows.tolist()]
    return ErrorTable("hardest", "Hardest rows", lines_of(columns), "; ".join(captions))


def readable(evaluation: Evaluation, i: int, longest: int = ROW_TEXT) -> str:
    """A row's tokens as text on one line; a long row without its middle."""
    row, cuts = evaluation.rows.row(i), evaluation.rows.cuts
    parts = [row] if cuts is None else [row[: cuts[i]], row[cuts[i] :]]
    return " | ".join(shorten(_text(evaluation, part), longest // len(parts)) for part in parts)


def _text(evaluation: Evaluation, row: NDArray[Any]) -> str:
    text = evaluation.readable(row) if evaluation.readable is not None else None
    words = (" ".join(map(str, row.tolist())) if text is None else text).split()
    # Control characters, which a terminal would obey, are shown as a replacement character.
    return "".join(c if c.isprintable() else "�" for c in " ".join(words))


def as_picture(evaluation: Evaluation, i: int) -> Floats | None:
    """(H, W) or (H, W, 3) in [0, 1]: a row whose steps are pixels, or up to six of its frames side by side.

    None if the row is not a picture.
    """
    row, kind, width = evaluation.rows.row(i), evaluation.input, evaluation.row_width
    pixels: NDArray[Any] | None = None
    if evaluation.picture is not None:
        pixels = evaluation.picture(row)
    elif isinstance(kind, Values) and kind.frame is not None:
        steps = np.unique(np.linspace(0, len(row) - 1, min(6, len(row))).astype(int))
        pixels = np.concatenate([row[t].reshape(kind.frame) for t in steps], axis=1)
    elif width is not None and len(row) % width == 0 and evaluation.rows.cuts is None and row[0].size in (1, 3):
        pixels = row.reshape((-1, width) if row[0].size == 1 else (-1, width, 3))
    if pixels is None:
        return None
    values = np.asarray(pixels, np.float64)
    levels = kind.vocab if isinstance(kind, Tokens) else kind.levels
    if levels is not None:
        return np.clip(values / (levels - 1), 0, 1)
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _agreement_tables(evaluation: Evaluation, first: RunPredictions, second: RunPredictions) -> list[ErrorTable]:
    """Which items only one run predicts correctly; of numbers, which run is closer."""
    if not evaluation.classes:
        a, b = evaluation.losses(first), evaluation.losses(second)
        names = [f"{first.label} closer", f"{second.label} closer", "equally close"]
        lines = lines_of({"items": names, "n": [int(each.sum()) for each in (a < b, b < a, a == b)]})
        return [ErrorTable("between", "Which run is closer to the truth", lines)]
    x, y = evaluation.correct(first), evaluation.correct(second)
    names = ["both", f"only {first.label}", f"only {second.label}", "neither"]
    counts = [int(each.sum()) for each in (x & y, x & ~y, y & ~x, ~x & ~y)]
    lines = lines_of({"right": names, "n": counts})
    if evaluation.step is not None:
        return [ErrorTable("between", "Steps that each run predicts correctly", lines)]
    test = f"McNemar's exact test: p = {mcnemar(counts[1], counts[2]):.3g}"
    rows = np.flatnonzero(x != y)
    answers = ({"answer": evaluation.class_names(run.predicted[rows])} for run in (first, second))
    disputed = {
        "id": evaluation.row_ids(rows),
        "right": np.where(x[rows], first.label, second.label),
        "label": evaluation.class_names(evaluation.truth[rows]),
        **_side_by_side((first, second), answers),
    }
    return [
        ErrorTable("between", "Rows that each run predicts correctly", lines, test),
        ErrorTable("only", "Rows that only one run predicts correctly", lines_of(disputed)),
    ]


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
    columns = [name for name in table.lines[0] if len(runs) == 1 or name.partition(" ")[0] not in CSV_ONLY]
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


def _scores(evaluation: Evaluation, run: RunPredictions) -> dict[str, float]:
    if evaluation.classes:
        return {"accuracy": float(np.mean(evaluation.correct(run)))}
    error = evaluation.errors(run)
    return {"rmse": rmse(error), "mae": float(np.mean(np.abs(error))), "bias": float(error.mean())}


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
        "runs": [{"run": run.name, "label": run.label, **_scores(evaluation, run)} for run in analysis.runs],
        "sentence": analysis.sentence,
        "samples": analysis.shows_samples,
        "notes": list(analysis.notes),
        "tables": {
            table.name: {"title": table.title, "caption": table.caption, "lines": table.lines}
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
    paths = [folder / f"{table.name}.csv" for table in analysis.tables]
    for path, table in zip(paths, analysis.tables, strict=True):
        write_text(path, csv_text(table.lines))
    paths += draw(analysis, folder)
    content = {**to_json(analysis), "files": [path.name for path in paths]}
    write_text(folder / FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return (folder / FILE, *paths)


def _earlier_files(folder: Path) -> list[str]:
    """The files that an earlier errors.json names: an old figure must not stand beside new numbers."""
    try:
        names = json.loads((folder / FILE).read_text(encoding="utf-8"))["files"]
        return [name for name in names if re.fullmatch(r"[a-z0-9-]+\.(csv|svg|png)", name)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
