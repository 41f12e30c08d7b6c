"""The figures of `spt.analysis.errors`: confusion matrix, accuracy or error by group, and the hardest rows."""

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from spt.analysis.errors import ErrorAnalysis, ErrorTable, Floats, RunPredictions, Runs, as_picture, column_name
from spt.report.format import slug
from spt.report.plotting import DASHES, MARKS, Palette, Plot, new_figure, save
from spt.tasks.base import Values

MAX_CLASSES = 20  # of a matrix that is drawn with its numbers
BARS = 15  # confusions that are drawn if there are more classes
THUMBNAILS = 16
POINTS = 2000  # of a scatter plot, and steps of a line
TRACE_POINTS = 400
OUTPUTS = 4  # panels of predicted against true
MAX_OPACITY = 0.6  # of a full cell: its number stays legible
LICENCE = "These are samples of the data set, whose licence applies to them."


def draw_all(analysis: ErrorAnalysis, folder: Path) -> list[Path]:
    """Write every figure that the analysis has data for."""
    return [path for plot in error_figures(analysis) for path in save(plot, folder)]


def error_figures(analysis: ErrorAnalysis) -> list[Plot]:
    """Those that show rows of the data set only if the analysis allows it."""
    evaluation = analysis.evaluation
    plots: list[Plot | None] = [_confusion(analysis) if evaluation.classes else _predicted(analysis)]
    plots += [_by_group(analysis, table) for table in analysis.tables if table.groups]
    if analysis.shows_samples:
        plots.append(_hardest(analysis) if evaluation.step is None else _steps(analysis))
    where = f"{evaluation.task}, {evaluation.split_name} rows"
    return [plot._replace(caption=f"{where}: {plot.caption}") for plot in plots if plot is not None]


def _coloured(palette: Palette, runs: Runs) -> Iterator[tuple[int, RunPredictions, str]]:
    """Every run with its arm's own colour; two runs of one arm with the first two of the series."""
    arms = {"scratch": palette.scratch, "SPT": palette.spt}
    own = all(run.label in arms for run in runs)
    for number, run in enumerate(runs):
        yield number, run, arms[run.label] if own else palette.series[number]


def _labels(runs: Runs, single: str) -> list[str]:
    """What distinguishes the runs' panels or lines, or the text for a single run."""
    return [single] if len(runs) == 1 else [run.label for run in runs]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _label_groups(axes: Axes, names: Sequence[str], turned: bool) -> None:
    rotation, alignment = (45, "right") if turned else (0, "center")
    axes.set_xticks(range(len(names)), names, rotation=rotation, ha=alignment)


def _confusion(analysis: ErrorAnalysis) -> Plot | None:
    evaluation, runs, matrix = analysis.evaluation, analysis.runs, analysis.matrix
    if matrix is None or matrix.shape[1] > MAX_CLASSES:
        return _bars(analysis)
    count = matrix.shape[1]
    classes = evaluation.class_names(range(count))
    names = [_cut(name, 24) for name in classes]
    cells = max(0.34, 0.09 * len(f"{matrix.max():,}"))  # inches
    margin = 0.7 + 0.07 * max(map(len, names))
    shares = matrix / np.maximum(matrix.sum(2, keepdims=True), 1)
    right = np.eye(count, dtype=bool)
    # A diagonal cell is opaque by its share of the row, the others relative to the largest confusion.
    depths = MAX_OPACITY * np.where(right, shares, shares / max(float(shares[:, ~right].max()), 1e-9))

    def draw(palette: Palette) -> Figure:
        side = max(2.2, cells * count)
        figure = new_figure((side + margin) * len(runs), side + margin)
        for number, title in enumerate(_labels(runs, "Predictions by class")):
            axes = figure.add_subplot(1, len(runs), number + 1)
            for i, k in np.argwhere(matrix[number]).tolist():
                colour, weight = (palette.spt, "normal") if i == k else (palette.scratch, "bold")
                depth = float(depths[number, i, k])
                axes.add_patch(Rectangle((k - 0.5, i - 0.5), 1, 1, facecolor=colour, alpha=depth, lw=0))
                axes.text(k, i, f"{matrix[number, i, k]:,}", ha="center", va="center", fontsize=8, weight=weight)
            axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal")
            axes.set(xlabel="prediction", ylabel="truth", title=title)
            _label_groups(axes, names, turned=max(map(len, names)) > 3)
            axes.set_yticks(range(count), names)
            axes.grid(visible=False)
        return figure

    data = [
        {"run": runs[r].label, "truth": classes[i], "answer": classes[k], "count": int(matrix[r, i, k])}
        for r, i, k in np.ndindex(matrix.shape)
    ]
    caption = (
        "truth down, predictions across; the diagonal is shaded by its share of the row, "
        "the other cells relative to the largest confusion"
    )
    return Plot("figure-confusion", "Confusion matrix", caption, draw, data)


def _bars(analysis: ErrorAnalysis) -> Plot | None:
    """Only the largest confusions, if there are too many classes for a matrix."""
    runs = analysis.runs
    worst = analysis.confusions[:BARS]
    if not worst:
        return None

    def draw(palette: Palette) -> Figure:
        figure = new_figure(6.5, 0.8 + 0.3 * len(worst))
        axes = figure.add_subplot()
        height = 0.8 / len(runs)
        for number, run, colour in _coloured(palette, runs):
            places = np.arange(len(worst)) + (number - (len(runs) - 1) / 2) * height
            hatch = "//" if number else None
            counts = [line[column_name("count", run, runs)] for line in worst]
            axes.barh(places, counts, height, color=colour, label=run.label, hatch=hatch, edgecolor=palette.paper)
        names = [f"{_cut(line['truth'], 20)} predicted as {_cut(line['answer'], 20)}" for line in worst]
        axes.set_yticks(range(len(worst)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="items", title="Largest confusions")
        if len(runs) == 2:
            axes.legend()
        return figure

    return Plot("figure-confusion", "Largest confusions", "the most common", draw, worst)


def _by_group(analysis: ErrorAnalysis, table: ErrorTable) -> Plot:
    """A series for each run; of crossed attributes a panel for each run, with a series for each second group."""
    evaluation, runs, lines = analysis.evaluation, analysis.runs, table.lines
    score, title = evaluation.score, " and ".join(table.groups)
    (name, groups), *crossed = table.groups.items()
    labels = list(dict.fromkeys(sorted(groups, key=_rank)))
    ordered = any(_rank(label) for label in labels)  # between words, a line would have no meaning
    columns = [score, "low", "high"] if evaluation.classes else [score]
    data = [
        {attribute: values[i] for attribute, values in table.groups.items()}
        | {"run": run.label, "n": line["n"]}
        | {column: line[column_name(column, run, runs)] for column in columns}
        for i, line in enumerate(lines)
        for run in runs
    ]
    x = np.array([labels.index(group) for group in groups])
    scores = np.array([[line[column] for column in columns] for line in data]).reshape(len(lines), len(runs), -1)
    if crossed:
        ((second, values),) = crossed
        parts = {value: np.array(values) == value for value in dict.fromkeys(values)}
        panels = [[(label, x[part], own[part]) for label, part in parts.items()] for own in scores.swapaxes(0, 1)]
        titles, gap = _labels(runs, f"By {title}"), 0.08
    else:
        panels = [[(run.label, x, scores[:, number]) for number, run in enumerate(runs)]]
        titles, gap = [f"By {title}"], 0.1

    def draw(palette: Palette) -> Figure:
        colours = palette.series if crossed else [colour for _, _, colour in _coloured(palette, runs)]
        figure = new_figure(min(12.0, (2.0 + max(3.0, 0.42 * len(labels))) * len(panels)), 3.4)
        first: Axes | None = None
        for number, (heading, series) in enumerate(zip(titles, panels, strict=True)):
            axes = figure.add_subplot(1, len(panels), number + 1, sharey=first)
            first = first or axes
            for style, (label, places, values) in enumerate(series):
                at, (y, *bounds) = places + gap * (style - (len(series) - 1) / 2), values.T
                mark: dict[str, Any] = {"marker": MARKS[style], "linestyle": DASHES[style] if ordered else ""}
                mark |= {"color": colours[style % len(colours)], "label": label}
                if bounds:
                    errors = np.clip([y - bounds[0], bounds[1] - y], 0, None)
                    axes.errorbar(at, y, errors, elinewidth=0.8, **mark)
                else:
                    axes.plot(at, y, **mark)
            axes.set(title=heading, xlabel=name, ylabel="" if number else score)
            if crossed and number == len(panels) - 1:
                axes.legend(title=second, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            elif not crossed and len(runs) == 2:
                axes.legend()
            _label_groups(axes, labels, turned=max(map(len, labels)) * len(labels) > 45)
            if evaluation.classes:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            else:
                axes.set_ylim(bottom=0)
        return figure

    caption = f"{score} by {title}" + ("; bars: Wilson's 95 % interval" if evaluation.classes else "")
    return Plot(f"figure-by-{slug(title)}", f"{score[0].upper()}{score[1:]} by {title}", caption, draw, data)


def _rank(group: str) -> float:
    """Sorts ranges by their beginning and leaves words as they are."""
    head = group.partition("–")[0].partition(" to ")[0]
    try:
        return float(head)
    except ValueError:
        return 0.0


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
            for number, run, colour in _coloured(palette, runs):
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
    caption = "above, predictions against the truth (dashed: equal); below, prediction minus truth"
    return Plot("figure-predicted", "Predictions against the truth", caption, draw, data)


def _some(n: int, most: int) -> NDArray[np.int64]:
    """Up to `most` of n indices, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _hardest(analysis: ErrorAnalysis) -> Plot | None:
    """Pictures as thumbnails, signals as lines; none for tokens, which the table shows as text."""
    evaluation, runs = analysis.evaluation, analysis.runs
    rows = analysis.hardest[:THUMBNAILS].tolist()
    pictures = _pictures(analysis, rows)
    if pictures is None and not (isinstance(evaluation.input, Values) and evaluation.rows.cuts is None):
        return None
    width, height = (1.8, 1.5) if pictures else (2.4, 1.4)  # inches
    columns = min(4, len(rows))
    titles = [_answer_text(analysis, i) for i in rows]

    def draw(palette: Palette) -> Figure:
        lines = ceil(len(rows) / columns)
        figure = new_figure(width * columns, (height + 0.14 * (1 + len(runs))) * lines)
        for number, (i, title) in enumerate(zip(rows, titles, strict=True)):
            axes = figure.add_subplot(lines, columns, number + 1)
            if pictures:
                _show(axes, pictures[number])
            else:
                values = evaluation.rows.row(i)
                at = _some(len(values), POINTS)
                for k in range(min(OUTPUTS, values.shape[1])):
                    mark: dict[str, Any] = {"color": palette.series[k], "linestyle": DASHES[k], "linewidth": 0.7}
                    axes.plot(at, values[at, k].astype(float), **mark)
                axes.tick_params(labelsize=6)
            axes.set_title(title, fontsize=7, weight="normal", loc="center")
        return figure

    shown = [title.replace("\n", "; ") for title in titles]
    data = [{"id": name, "shown": text} for name, text in zip(evaluation.row_ids(rows), shown, strict=True)]
    caption = f"the rows with the largest errors, the worst first. {LICENCE}"
    return Plot("figure-hardest", "Hardest rows", caption, draw, data)


def _pictures(analysis: ErrorAnalysis, rows: Sequence[int]) -> list[Floats] | None:
    """Those of the rows, if all of them are pictures."""
    pictures = [picture for i in rows if (picture := as_picture(analysis.evaluation, i)) is not None]
    return pictures if len(pictures) == len(rows) else None


def _answer_text(analysis: ErrorAnalysis, i: int) -> str:
    evaluation, runs = analysis.evaluation, analysis.runs
    lines = [_cut(str(evaluation.rows.ids[i]), 24)]
    for run in runs:
        if evaluation.classes:
            pairs = [[_cut(name, 12) for name in evaluation.class_names((evaluation.truth[i], run.predicted[i]))]]
        else:
            numbers = np.stack([evaluation.truth[i, :2], run.predicted[i, :2]], 1)
            pairs = [[f"{number:.3g}" for number in pair] for pair in numbers.tolist()]
        label = f"{run.label}: " if len(runs) == 2 else ""
        lines.append(label + "; ".join(f"{truth}, predicted {predicted}" for truth, predicted in pairs))
    return "\n".join(lines)


def _show(axes: Axes, picture: Floats, nearest: bool = True) -> None:
    axes.imshow(picture, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest" if nearest else "antialiased")
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)


def _steps(analysis: ErrorAnalysis) -> Plot | None:
    """For predictions at every step: pictures of truth, prediction and errors, or lines of truth and prediction.

    Of the hardest rows, and of two with a median error.
    """
    evaluation, n = analysis.evaluation, len(analysis.evaluation.rows)
    order = np.argsort(evaluation.mean_by_row(evaluation.losses(analysis.runs[0])), kind="stable")
    middle = order[max(0, n // 2 - 1) : n // 2 + 1].tolist()
    typical = [i for i in middle if i not in analysis.hardest[:2]][: max(0, n - 2)]
    rows = [*analysis.hardest[: 4 - len(typical)].tolist(), *typical]
    if not evaluation.classes:
        return _traces(analysis, rows)
    pictures = _pictures(analysis, rows)
    scored = np.bincount(evaluation.row, minlength=n)
    whole = (scored == evaluation.rows.lengths)[rows].all()
    return _maps(analysis, rows, pictures) if pictures and whole else None


def _maps(analysis: ErrorAnalysis, rows: Sequence[int], pictures: Sequence[Floats]) -> Plot:
    evaluation, runs = analysis.evaluation, analysis.runs
    top = max(1, len(evaluation.names) - 1, int(evaluation.truth.max()), *(int(run.predicted.max()) for run in runs))
    suffixes = [f", {run.label}" for run in runs] if len(runs) == 2 else [""]
    heads = ["input", "truth", *(f"{kind}{suffix}" for suffix in suffixes for kind in ("prediction", "errors"))]
    ids = evaluation.row_ids(rows)
    shares = np.stack([evaluation.mean_by_row(evaluation.correct(run))[rows] for run in runs], 1).tolist()

    def panels(i: int, picture: Floats) -> list[Floats]:
        items, side = evaluation.items(i), picture.shape[:2]
        truth = evaluation.truth[items].reshape(side)
        shown = [picture, truth / top]
        for run in runs:
            predicted = run.predicted[items].reshape(side)
            shown += [predicted / top, (predicted != truth).astype(float)]
        return shown

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
                    axes.set_ylabel(f"{ids[line]}\n{right} correct", fontsize=8)
        return figure

    data = [
        {"id": name, "run": run.label, "accuracy": share}
        for name, own in zip(ids, shares, strict=True)
        for run, share in zip(runs, own, strict=True)
    ]
    caption = (
        f"the hardest rows, then typical ones. Classes from black to white: "
        f"{', '.join(evaluation.class_names(range(top + 1)))}. Errors are white. {LICENCE}"
    )
    return Plot("figure-rows", "Truth, prediction and errors", caption, draw, data)


def _traces(analysis: ErrorAnalysis, rows: Sequence[int]) -> Plot:
    evaluation, runs, step = analysis.evaluation, analysis.runs, analysis.evaluation.step
    assert step is not None
    items = zip(evaluation.row_ids(rows), map(evaluation.items, rows), strict=True)
    lines = [(name, at[_some(len(at), TRACE_POINTS)]) for name, at in items if len(at)]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(6.5, 1.5 * len(lines) + 0.5)
        first: Axes | None = None
        for number, (name, at) in enumerate(lines):
            axes = figure.add_subplot(len(lines), 1, number + 1, sharex=first)
            first = first or axes
            axes.plot(step[at], evaluation.truth[at, 0], color=palette.ink, linewidth=1.0, label="truth")
            for (style, run, colour), label in zip(_coloured(palette, runs), _labels(runs, "prediction"), strict=True):
                mark: dict[str, Any] = {"linestyle": DASHES[style + 1], "label": label}
                axes.plot(step[at], run.predicted[at, 0], color=colour, linewidth=1.0, **mark)
            axes.set_title(name)
            if number == 0:
                axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_xlabel("step")
        return figure

    data = [
        {"id": name, "step": int(step[k]), "truth": float(evaluation.truth[k, 0])}
        | {f"answer {run.label}": float(run.predicted[k, 0]) for run in runs}
        for name, at in lines
        for k in at.tolist()
    ]
    caption = f"the hardest rows, then typical ones; of several outputs the first. {LICENCE}"
    return Plot("figure-rows", "Truth and prediction", caption, draw, data)
