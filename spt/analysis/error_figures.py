"""The figures of `spt.analysis.errors`: confusion matrix, accuracy or error by group, and the hardest rows."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from spt.analysis.errors import Breakdown, ErrorAnalysis, Evaluation, RunPredictions, as_picture, confusions
from spt.report.format import slug
from spt.report.plotting import DASHES, MARKS, Palette, Plot, new_figure, save
from spt.tasks.base import Values

MAX_CLASSES = 20  # of a matrix that is drawn with its numbers
BARS = 15  # confusions that are drawn if there are more classes
THUMBNAILS = 16
POINTS = 2000  # of a scatter plot, and steps of a line
OUTPUTS = 4  # panels of predicted against true
MAX_OPACITY = 0.6  # of a full cell: its number stays legible


def draw_all(analysis: ErrorAnalysis, folder: Path) -> list[Path]:
    """Write every figure that the analysis has data for."""
    return [path for plot in error_figures(analysis) for path in save(plot, folder)]


def error_figures(analysis: ErrorAnalysis) -> list[Plot]:
    """Those that show rows of the data set only if the analysis allows it."""
    evaluation = analysis.evaluation
    plots: list[Plot | None] = []
    if evaluation.classes:
        plots.append(_confusion(analysis))
    else:
        plots.append(_predicted(analysis))
    plots += [_by_group(analysis, breakdown) for breakdown in analysis.breakdowns]
    if analysis.samples and len(analysis.hardest):
        plots.append(_steps(analysis) if evaluation.step is not None else _hardest(analysis))
    return [plot for plot in plots if plot is not None]


def _colours(palette: Palette, runs: Sequence[RunPredictions]) -> list[str]:
    """Each arm's own colour; for two runs of one arm, the first two of the series."""
    arms = {"scratch": palette.scratch, "SPT": palette.spt}
    if all(run.label in arms for run in runs):
        return [arms[run.label] for run in runs]
    return list(palette.series[: len(runs)])


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _where(analysis: ErrorAnalysis) -> str:
    return f"{analysis.evaluation.task}, {analysis.evaluation.split_name} rows"


def _confusion(analysis: ErrorAnalysis) -> Plot | None:
    if analysis.matrix is None or analysis.matrix.shape[1] > MAX_CLASSES:
        return _bars(analysis)
    evaluation, runs, matrix = analysis.evaluation, analysis.runs, analysis.matrix
    count = matrix.shape[1]
    names = [_cut(evaluation.class_name(k), 24) for k in range(count)]
    cells = max(0.34, 0.09 * len(f"{matrix.max():,}"))  # inches
    margin = 0.7 + 0.07 * max(map(len, names))
    shares = matrix / np.maximum(matrix.sum(2, keepdims=True), 1)
    right = np.eye(count, dtype=bool)
    # A diagonal cell is opaque by its share of the row, the others relative to the largest confusion.
    depths = MAX_OPACITY * np.where(right, shares, shares / max(float(shares[:, ~right].max()), 1e-9))

    def draw(palette: Palette) -> Figure:
        side = max(2.2, cells * count)
        figure = new_figure((side + margin) * len(runs), side + margin)
        for number, (run, counts) in enumerate(zip(runs, matrix, strict=True)):
            axes = figure.add_subplot(1, len(runs), number + 1)
            for i, k in np.ndindex(count, count):
                if not counts[i, k]:
                    continue
                colour, depth = palette.spt if i == k else palette.scratch, float(depths[number, i, k])
                axes.add_patch(Rectangle((k - 0.5, i - 0.5), 1, 1, facecolor=colour, alpha=depth, lw=0))
                weight = "normal" if i == k else "bold"
                axes.text(k, i, f"{counts[i, k]:,}", ha="center", va="center", fontsize=8, weight=weight)
            axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal", xlabel="prediction")
            turned = max(map(len, names)) > 3
            axes.set_xticks(range(count), names, rotation=45 if turned else 0, ha="right" if turned else "center")
            axes.set_yticks(range(count), names)
            axes.set_ylabel("truth")
            axes.grid(visible=False)
            axes.set_title(run.label if len(runs) == 2 else "Predictions by class")
        return figure

    data = [
        {
            "run": run.label,
            "truth": evaluation.class_name(i),
            "answer": evaluation.class_name(k),
            "count": int(counts[i, k]),
        }
        for run, counts in zip(runs, matrix, strict=True)
        for i, k in np.ndindex(count, count)
    ]
    caption = (
        f"{_where(analysis)}: truth down, predictions across; the diagonal is shaded by its share of the row, "
        "the other cells relative to the largest confusion"
    )
    return Plot("figure-confusion", "Confusion matrix", caption, draw, data)


def _bars(analysis: ErrorAnalysis) -> Plot | None:
    """Only the largest confusions, if there are too many classes for a matrix."""
    runs = analysis.runs
    worst = confusions(analysis.evaluation, runs)[:BARS]
    if not worst:
        return None
    keys = ["count"] if len(runs) == 1 else [f"count {run.label}" for run in runs]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(6.5, 0.8 + 0.3 * len(worst))
        axes = figure.add_subplot()
        height = 0.8 / len(runs)
        for number, (run, key, colour) in enumerate(zip(runs, keys, _colours(palette, runs), strict=True)):
            places = np.arange(len(worst)) + (number - (len(runs) - 1) / 2) * height
            hatch = "//" if number else None
            counts = [line[key] for line in worst]
            axes.barh(places, counts, height, color=colour, label=run.label, hatch=hatch, edgecolor=palette.paper)
        names = [f"{_cut(line['truth'], 20)} predicted as {_cut(line['answer'], 20)}" for line in worst]
        axes.set_yticks(range(len(worst)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("items")
        axes.set_title("Largest confusions")
        if len(runs) == 2:
            axes.legend()
        return figure

    return Plot("figure-confusion", "Largest confusions", f"{_where(analysis)}: the most common", draw, worst)


def _by_group(analysis: ErrorAnalysis, breakdown: Breakdown) -> Plot:
    evaluation, runs = analysis.evaluation, analysis.runs
    score = "accuracy" if evaluation.classes else "RMSE"
    words = f"{breakdown.name} and {breakdown.second}" if breakdown.second else breakdown.name
    labels = list(dict.fromkeys(line.group for line in sorted(breakdown.lines, key=lambda line: _rank(line.group))))
    seconds = list(dict.fromkeys(line.second for line in breakdown.lines))
    ordered = any(_rank(label) for label in labels)  # between words, a line would have no meaning
    data = [
        {
            breakdown.name: line.group,
            **({breakdown.second: line.second} if breakdown.second else {}),
            "run": run.label,
            "n": line.n,
            score: value,
            **({"low": low, "high": high} if evaluation.classes else {}),
        }
        for line in breakdown.lines
        for run, (value, low, high) in zip(runs, line.values, strict=True)
    ]

    def series(axes: Axes, second: str, number: int, style: int, colour: str, label: str, shift: float) -> None:
        lines = [line for line in breakdown.lines if line.second == second]
        x = np.array([labels.index(line.group) for line in lines]) + shift
        y = np.array([line.values[number][0] for line in lines])
        dash = DASHES[style] if ordered else ""
        mark = {"marker": MARKS[style], "linestyle": dash, "color": colour, "label": label}
        if not evaluation.classes:
            axes.plot(x, y, **mark)  # type: ignore[arg-type]
            return
        bounds = np.array([[y0 - (v[1] or 0.0), (v[2] or 0.0) - y0] for y0, v in _bounds(lines, number)])
        axes.errorbar(x, y, np.clip(bounds.T, 0, None), elinewidth=0.8, **mark)  # type: ignore[arg-type]

    def draw(palette: Palette) -> Figure:
        panels = len(runs) if breakdown.second else 1
        figure = new_figure(min(12.0, (2.0 + max(3.0, 0.42 * len(labels))) * panels), 3.4)
        first: Axes | None = None
        for panel in range(panels):
            axes = figure.add_subplot(1, panels, panel + 1, sharey=first)
            first = first or axes
            if breakdown.second:
                for style, second in enumerate(seconds):
                    shift = 0.08 * (style - (len(seconds) - 1) / 2)
                    series(axes, second, panel, style, palette.series[style % len(palette.series)], second, shift)
                axes.set_title(runs[panel].label if len(runs) == 2 else f"By {words}")
                if panel == panels - 1:
                    axes.legend(title=breakdown.second, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            else:
                for number, (run, colour) in enumerate(zip(runs, _colours(palette, runs), strict=True)):
                    series(axes, "", number, number, colour, run.label, 0.1 * (number - (len(runs) - 1) / 2))
                axes.set_title(f"By {words}")
                if len(runs) == 2:
                    axes.legend()
            turned = max(map(len, labels)) * len(labels) > 45
            axes.set_xticks(
                range(len(labels)), labels, rotation=45 if turned else 0, ha="right" if turned else "center"
            )
            axes.set_xlabel(breakdown.name)
            if panel == 0:
                axes.set_ylabel(score)
            if evaluation.classes:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            else:
                axes.set_ylim(bottom=0)
        return figure

    bars = "; bars: Wilson's 95 % interval" if evaluation.classes else ""
    caption = f"{_where(analysis)}: {score} by {words}{bars}"
    return Plot(f"figure-by-{slug(words)}", f"{score[0].upper()}{score[1:]} by {words}", caption, draw, data)


def _rank(group: str) -> float:
    """Sorts ranges by their beginning and leaves words as they are."""
    head = group.partition("–")[0].partition(" to ")[0]
    try:
        return float(head)
    except ValueError:
        return 0.0


def _bounds(lines: Iterable[Any], number: int) -> Iterable[tuple[float, tuple[float, float | None, float | None]]]:
    return ((line.values[number][0], line.values[number]) for line in lines)


def _predicted(analysis: ErrorAnalysis) -> Plot:
    """Predictions against the truth, and the residuals below."""
    evaluation, runs = analysis.evaluation, analysis.runs
    shown = _some(len(evaluation.truth), POINTS)
    outputs = range(min(OUTPUTS, evaluation.truth.shape[1]))

    def draw(palette: Palette) -> Figure:
        figure = new_figure(max(4.2, 2.9 * len(outputs)), 5.2)
        for k in outputs:
            above = figure.add_subplot(2, len(outputs), k + 1)
            below = figure.add_subplot(2, len(outputs), len(outputs) + k + 1, sharex=above)
            truth = evaluation.truth[shown, k].astype(float)
            for number, (run, colour) in enumerate(zip(runs, _colours(palette, runs), strict=True)):
                predicted = run.predicted[shown, k].astype(float)
                dots: dict[str, Any] = {"s": 9, "marker": MARKS[number], "color": colour, "alpha": 0.5, "lw": 0}
                above.scatter(truth, predicted, label=run.label, **dots)
                below.scatter(truth, predicted - truth, **dots)
            ends = [float(truth.min()), float(truth.max())]
            above.plot(ends, ends, color=palette.faint, linewidth=1.0, linestyle="--")
            below.axhline(0.0, color=palette.faint, linewidth=1.0, linestyle="--")
            above.set_title(f"Output {k}" if len(outputs) > 1 else "Prediction against truth")
            above.tick_params(labelbottom=False)
            below.set_xlabel("truth")
            if k == 0:
                above.set_ylabel("prediction")
                below.set_ylabel("residual")
                if len(runs) == 2:
                    above.legend()
        return figure

    data = [
        {"run": run.label, "output": k, "truth": float(evaluation.truth[i, k]), "answer": float(run.predicted[i, k])}
        for run in runs
        for k in outputs
        for i in shown.tolist()
    ]
    caption = f"{_where(analysis)}: above, predictions against the truth (dashed: equal); below, prediction minus truth"
    return Plot("figure-predicted", "Predictions against the truth", caption, draw, data)


def _some(n: int, most: int) -> NDArray[np.int64]:
    """Up to `most` of n indices, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _hardest(analysis: ErrorAnalysis) -> Plot | None:
    """Pictures as thumbnails, signals as lines; none for tokens, which the table shows as text."""
    evaluation = analysis.evaluation
    rows = analysis.hardest[:THUMBNAILS].tolist()
    pictures = [as_picture(evaluation, i) for i in rows]
    if all(picture is not None for picture in pictures):
        return _grid(analysis, rows, 1.35, 1.5, lambda axes, _, at: _show(axes, pictures[at]))
    if isinstance(evaluation.input, Values) and evaluation.rows.cuts is None:
        return _grid(
            analysis, rows, 2.4, 1.4, lambda axes, palette, at: _wave(axes, palette, evaluation.rows.row(rows[at]))
        )
    return None


def _grid(
    analysis: ErrorAnalysis,
    rows: Sequence[int],
    width: float,
    height: float,
    paint: Callable[[Axes, Palette, int], None],
) -> Plot:
    evaluation, columns = analysis.evaluation, min(4, len(rows))
    titles = [_answer_text(analysis, i) for i in rows]

    def draw(palette: Palette) -> Figure:
        lines = ceil(len(rows) / columns)
        figure = new_figure(max(width, 1.8) * columns, (height + 0.14 * (1 + len(analysis.runs))) * lines)
        for at, title in enumerate(titles):
            axes = figure.add_subplot(lines, columns, at + 1)
            paint(axes, palette, at)
            axes.set_title(title, fontsize=7, weight="normal", loc="center")
        return figure

    data = [
        {"id": str(evaluation.rows.ids[i]), "shown": title.replace("\n", "; ")}
        for i, title in zip(rows, titles, strict=True)
    ]
    caption = f"{_where(analysis)}: the rows with the largest errors, the worst first. {_LICENCE}"
    return Plot("figure-hardest", "Hardest rows", caption, draw, data)


_LICENCE = "These are samples of the data set, whose licence applies to them."


def _answer_text(analysis: ErrorAnalysis, i: int) -> str:
    evaluation, runs = analysis.evaluation, analysis.runs
    head = _cut(str(evaluation.rows.ids[i]), 24)
    lines = [head]
    for run in runs:
        who = f"{run.label}: " if len(runs) == 2 else ""
        if evaluation.classes:
            truth, predicted = (
                evaluation.class_name(int(evaluation.truth[i])),
                evaluation.class_name(int(run.predicted[i])),
            )
            lines.append(f"{who}{_cut(truth, 12)}, predicted {_cut(predicted, 12)}")
        else:
            numbers = zip(evaluation.truth[i, :2].tolist(), run.predicted[i, :2].tolist(), strict=True)
            lines.append(who + "; ".join(f"{truth:.3g}, predicted {predicted:.3g}" for truth, predicted in numbers))
    return "\n".join(lines)


def _show(axes: Axes, picture: NDArray[np.float64] | None, nearest: bool = True) -> None:
    assert picture is not None
    axes.imshow(picture, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest" if nearest else "antialiased")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def _wave(axes: Axes, palette: Palette, row: NDArray[Any]) -> None:
    shown = _some(len(row), POINTS)
    for k in range(min(OUTPUTS, row.shape[1])):
        axes.plot(shown, row[shown, k].astype(float), color=palette.series[k], linestyle=DASHES[k], linewidth=0.7)
    axes.tick_params(labelsize=6)


def _steps(analysis: ErrorAnalysis) -> Plot | None:
    """For predictions at every step: pictures of truth, prediction and errors, or lines of truth and prediction."""
    evaluation = analysis.evaluation
    typical = _typical(analysis)
    rows = [*analysis.hardest[: 4 - len(typical)].tolist(), *typical]
    if not evaluation.classes:
        return _traces(analysis, rows)
    pictures = [as_picture(evaluation, i) for i in rows]
    whole = all(len(_places(evaluation, i)) == evaluation.rows.lengths[i] for i in rows)
    if whole and all(picture is not None for picture in pictures):
        return _maps(analysis, rows, [picture for picture in pictures if picture is not None])
    return None


def _places(evaluation: Evaluation, i: int) -> NDArray[np.int64]:
    """The items of a row."""
    begin, end = np.searchsorted(evaluation.row, [i, i + 1])
    return np.arange(begin, end)


def _typical(analysis: ErrorAnalysis) -> list[int]:
    """Two rows with a median error, to show beside the hardest ones."""
    evaluation, run = analysis.evaluation, analysis.runs[0]
    wrong = run.predicted != evaluation.truth
    errors = wrong.astype(float) if wrong.ndim == 1 else np.square(run.predicted - evaluation.truth).mean(1)
    n = len(evaluation.rows)
    mean = np.bincount(evaluation.row, errors, n) / np.maximum(np.bincount(evaluation.row, minlength=n), 1)
    order = np.argsort(mean, kind="stable")
    middle = order[max(0, n // 2 - 1) : n // 2 + 1]
    return [i for i in middle.tolist() if i not in analysis.hardest[:2]][: max(0, n - 2)]


def _maps(analysis: ErrorAnalysis, rows: Sequence[int], pictures: Sequence[NDArray[np.float64]]) -> Plot:
    evaluation, runs = analysis.evaluation, analysis.runs
    top = max(1, len(evaluation.names) - 1, int(evaluation.truth.max()), *(int(run.predicted.max()) for run in runs))
    heads = ["input", "truth"]
    for run in runs:
        heads += ["prediction", "errors"] if len(runs) == 1 else [f"prediction, {run.label}", f"errors, {run.label}"]

    def panels(i: int, picture: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        side = picture.shape[:2]
        at = _places(evaluation, i)
        truth = evaluation.truth[at].reshape(side)
        analysis = [picture, truth / top]
        for run in runs:
            predicted = run.predicted[at].reshape(side)
            analysis += [predicted / top, (predicted != truth).astype(float)]
        return analysis

    shares = [
        [
            float(np.mean(run.predicted[_places(evaluation, i)] == evaluation.truth[_places(evaluation, i)]))
            for run in runs
        ]
        for i in rows
    ]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(1.9 * len(heads), 2.05 * len(rows))
        for line, (i, picture) in enumerate(zip(rows, pictures, strict=True)):
            for column, (head, shown) in enumerate(zip(heads, panels(i, picture), strict=True)):
                axes = figure.add_subplot(len(rows), len(heads), line * len(heads) + column + 1)
                _show(axes, shown, nearest=shown.shape[0] <= 64)
                if line == 0:
                    axes.set_title(head)
                if column == 0:
                    right = ", ".join(f"{100 * share:.1f} %" for share in shares[line])
                    axes.set_ylabel(f"{evaluation.rows.ids[i]}\n{right} correct", fontsize=8)
        return figure

    data = [
        {"id": str(evaluation.rows.ids[i]), "run": run.label, "accuracy": share}
        for i, line in zip(rows, shares, strict=True)
        for run, share in zip(runs, line, strict=True)
    ]
    greys = ", ".join(evaluation.class_name(k) for k in range(top + 1))
    caption = (
        f"{_where(analysis)}: the hardest rows, then typical ones. Classes from black to white: {greys}. "
        f"Errors are white. {_LICENCE}"
    )
    return Plot("figure-rows", "Truth, prediction and errors", caption, draw, data)


def _traces(analysis: ErrorAnalysis, rows: Sequence[int]) -> Plot:
    evaluation, runs = analysis.evaluation, analysis.runs
    lines = [(i, _places(evaluation, i)) for i in rows]
    lines = [(i, at[_some(len(at), 400)]) for i, at in lines if len(at)]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(6.5, 1.5 * len(lines) + 0.5)
        first: Axes | None = None
        for number, (i, at) in enumerate(lines):
            axes = figure.add_subplot(len(lines), 1, number + 1, sharex=first)
            first = first or axes
            x = evaluation.step[at] if evaluation.step is not None else at
            axes.plot(x, evaluation.truth[at, 0], color=palette.ink, linewidth=1.0, label="truth")
            for style, (run, colour) in enumerate(zip(runs, _colours(palette, runs), strict=True), 1):
                name = run.label if len(runs) == 2 else "prediction"
                axes.plot(x, run.predicted[at, 0], color=colour, linewidth=1.0, linestyle=DASHES[style], label=name)
            axes.set_title(str(evaluation.rows.ids[i]))
            if number == 0:
                axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_xlabel("step")
        return figure

    data = [
        {"id": str(evaluation.rows.ids[i]), "step": int(evaluation.step[k]), "truth": float(evaluation.truth[k, 0])}
        | {f"answer {run.label}": float(run.predicted[k, 0]) for run in runs}
        for i, at in lines
        for k in at.tolist()
        if evaluation.step is not None
    ]
    caption = f"{_where(analysis)}: the hardest rows, then typical ones; of several outputs the first. {_LICENCE}"
    return Plot("figure-rows", "Truth and prediction", caption, draw, data)
