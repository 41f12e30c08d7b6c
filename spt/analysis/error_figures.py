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

from spt.analysis.errors import Breakdown, ErrorAnalysis, EvaluationRows, RunAnswers, as_picture, confusions
from spt.report.format import slug
from spt.report.plotting import DASHES, MARKS, Palette, Plot, new_figure, save
from spt.tasks.base import Values

MOST = 20  # classes of a matrix that is drawn with its numbers
BARS = 15  # confusions that are drawn where there are more classes
THUMBNAILS = 16
POINTS = 2000  # of a scatter plot, and steps of a line
OUTPUTS = 4  # panels of predicted against true
DEEPEST = 0.6  # opacity of a full cell: its number stays legible


def draw_all(found: ErrorAnalysis, folder: Path) -> list[Path]:
    """Write every figure that there is something for."""
    return [path for drawing in error_figures(found) for path in save(drawing, folder)]


def error_figures(found: ErrorAnalysis) -> list[Plot]:
    """Those that show rows of the data set only with `found.samples`."""
    asked = found.asked
    made: list[Plot | None] = []
    if asked.classes:
        made.append(_confusion(found))
    else:
        made.append(_predicted(found))
    made += [_by_group(found, one) for one in found.breakdowns]
    if found.samples and len(found.hardest):
        made.append(_steps(found) if asked.step is not None else _hardest(found))
    return [drawing for drawing in made if drawing is not None]


def _colours(palette: Palette, runs: Sequence[RunAnswers]) -> list[str]:
    """Each arm's own; of two runs of one arm, the first two of the series."""
    arms = {"scratch": palette.scratch, "SPT": palette.spt}
    if all(one.label in arms for one in runs):
        return [arms[one.label] for one in runs]
    return list(palette.series[: len(runs)])


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _where(found: ErrorAnalysis) -> str:
    split = {"val": "validation"}.get(found.asked.split, found.asked.split)
    return f"{found.asked.task}, {split} rows"


def _confusion(found: ErrorAnalysis) -> Plot | None:
    if found.matrix is None or found.matrix.shape[1] > MOST:
        return _bars(found)
    asked, runs, matrix = found.asked, found.given, found.matrix
    count = matrix.shape[1]
    names = [_cut(asked.called(k), 24) for k in range(count)]
    cells = max(0.34, 0.09 * len(f"{matrix.max():,}"))  # inches
    margin = 0.7 + 0.07 * max(map(len, names))
    shares = matrix / np.maximum(matrix.sum(2, keepdims=True), 1)
    right = np.eye(count, dtype=bool)
    # Right answers are deep where all are right, wrong ones where they are the commonest mistake.
    depths = DEEPEST * np.where(right, shares, shares / max(float(shares[:, ~right].max()), 1e-9))

    def draw(palette: Palette) -> Figure:
        side = max(2.2, cells * count)
        made = new_figure((side + margin) * len(runs), side + margin)
        for number, (one, counts) in enumerate(zip(runs, matrix, strict=True)):
            axes = made.add_subplot(1, len(runs), number + 1)
            for i, k in np.ndindex(count, count):
                if not counts[i, k]:
                    continue
                colour, depth = palette.spt if i == k else palette.scratch, float(depths[number, i, k])
                axes.add_patch(Rectangle((k - 0.5, i - 0.5), 1, 1, facecolor=colour, alpha=depth, lw=0))
                weight = "normal" if i == k else "bold"
                axes.text(k, i, f"{counts[i, k]:,}", ha="center", va="center", fontsize=8, weight=weight)
            axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal", xlabel="answer")
            turned = max(map(len, names)) > 3
            axes.set_xticks(range(count), names, rotation=45 if turned else 0, ha="right" if turned else "center")
            axes.set_yticks(range(count), names)
            axes.set_ylabel("truth")
            axes.grid(visible=False)
            axes.set_title(one.label if len(runs) == 2 else "Answers to each class")
        return made

    data = [
        {"run": one.label, "truth": asked.called(i), "answer": asked.called(k), "count": int(counts[i, k])}
        for one, counts in zip(runs, matrix, strict=True)
        for i, k in np.ndindex(count, count)
    ]
    caption = (
        f"{_where(found)}: truth down, answers across; on the diagonal right ones, as deep as their share of the row; "
        "the others as deep as theirs beside the largest"
    )
    return Plot("figure-confusion", "Confusion matrix", caption, draw, data)


def _bars(found: ErrorAnalysis) -> Plot | None:
    """The largest confusions alone, where there are too many classes."""
    runs = found.given
    worst = confusions(found.asked, runs)[:BARS]
    if not worst:
        return None
    keys = ["count"] if len(runs) == 1 else [f"count {one.label}" for one in runs]

    def draw(palette: Palette) -> Figure:
        made = new_figure(6.5, 0.8 + 0.3 * len(worst))
        axes = made.add_subplot()
        height = 0.8 / len(runs)
        for number, (one, key, colour) in enumerate(zip(runs, keys, _colours(palette, runs), strict=True)):
            places = np.arange(len(worst)) + (number - (len(runs) - 1) / 2) * height
            hatch = "//" if number else None
            counts = [line[key] for line in worst]
            axes.barh(places, counts, height, color=colour, label=one.label, hatch=hatch, edgecolor=palette.paper)
        names = [f"{_cut(line['truth'], 20)} taken for {_cut(line['answer'], 20)}" for line in worst]
        axes.set_yticks(range(len(worst)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("answers")
        axes.set_title("Largest confusions")
        if len(runs) == 2:
            axes.legend()
        return made

    return Plot("figure-confusion", "Largest confusions", f"{_where(found)}: the commonest", draw, worst)


def _by_group(found: ErrorAnalysis, one: Breakdown) -> Plot:
    asked, runs = found.asked, found.given
    score = "accuracy" if asked.classes else "RMSE"
    words = f"{one.name} and {one.second}" if one.second else one.name
    labels = list(dict.fromkeys(line.group for line in sorted(one.lines, key=lambda line: _rank(line.group))))
    seconds = list(dict.fromkeys(line.second for line in one.lines))
    ordered = any(_rank(label) for label in labels)  # words in between have no meaning
    data = [
        {
            one.name: line.group,
            **({one.second: line.second} if one.second else {}),
            "run": given.label,
            "n": line.n,
            score: value,
            **({"low": low, "high": high} if asked.classes else {}),
        }
        for line in one.lines
        for given, (value, low, high) in zip(runs, line.values, strict=True)
    ]

    def series(axes: Axes, second: str, number: int, style: int, colour: str, label: str, shift: float) -> None:
        lines = [line for line in one.lines if line.second == second]
        x = np.array([labels.index(line.group) for line in lines]) + shift
        y = np.array([line.values[number][0] for line in lines])
        dash = DASHES[style] if ordered else ""
        mark = {"marker": MARKS[style], "linestyle": dash, "color": colour, "label": label}
        if not asked.classes:
            axes.plot(x, y, **mark)  # type: ignore[arg-type]
            return
        bounds = np.array([[y0 - (v[1] or 0.0), (v[2] or 0.0) - y0] for y0, v in _bounds(lines, number)])
        axes.errorbar(x, y, np.clip(bounds.T, 0, None), elinewidth=0.8, **mark)  # type: ignore[arg-type]

    def draw(palette: Palette) -> Figure:
        panels = len(runs) if one.second else 1
        made = new_figure(min(12.0, (2.0 + max(3.0, 0.42 * len(labels))) * panels), 3.4)
        first: Axes | None = None
        for panel in range(panels):
            axes = made.add_subplot(1, panels, panel + 1, sharey=first)
            first = first or axes
            if one.second:
                for style, second in enumerate(seconds):
                    shift = 0.08 * (style - (len(seconds) - 1) / 2)
                    series(axes, second, panel, style, palette.series[style % len(palette.series)], second, shift)
                axes.set_title(runs[panel].label if len(runs) == 2 else f"By {words}")
                if panel == panels - 1:
                    axes.legend(title=one.second, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            else:
                for number, (given, colour) in enumerate(zip(runs, _colours(palette, runs), strict=True)):
                    series(axes, "", number, number, colour, given.label, 0.1 * (number - (len(runs) - 1) / 2))
                axes.set_title(f"By {words}")
                if len(runs) == 2:
                    axes.legend()
            turned = max(map(len, labels)) * len(labels) > 45
            axes.set_xticks(
                range(len(labels)), labels, rotation=45 if turned else 0, ha="right" if turned else "center"
            )
            axes.set_xlabel(one.name)
            if panel == 0:
                axes.set_ylabel(score)
            if asked.classes:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            else:
                axes.set_ylim(bottom=0)
        return made

    bars = "; bars: Wilson's 95 % interval" if asked.classes else ""
    caption = f"{_where(found)}: {score} by {words}{bars}"
    return Plot(f"figure-by-{slug(words)}", f"{score[0].upper()}{score[1:]} by {words}", caption, draw, data)


def _rank(group: str) -> float:
    """Numbers in their order; words stay in theirs."""
    head = group.partition("–")[0].partition(" to ")[0]
    try:
        return float(head)
    except ValueError:
        return 0.0


def _bounds(lines: Iterable[Any], number: int) -> Iterable[tuple[float, tuple[float, float | None, float | None]]]:
    return ((line.values[number][0], line.values[number]) for line in lines)


def _predicted(found: ErrorAnalysis) -> Plot:
    """Answers against the truth, and below what is left."""
    asked, runs = found.asked, found.given
    shown = _some(len(asked.truth), POINTS)
    outputs = range(min(OUTPUTS, asked.truth.shape[1]))

    def draw(palette: Palette) -> Figure:
        made = new_figure(max(4.2, 2.9 * len(outputs)), 5.2)
        for k in outputs:
            above = made.add_subplot(2, len(outputs), k + 1)
            below = made.add_subplot(2, len(outputs), len(outputs) + k + 1, sharex=above)
            truth = asked.truth[shown, k].astype(float)
            for number, (one, colour) in enumerate(zip(runs, _colours(palette, runs), strict=True)):
                said = one.said[shown, k].astype(float)
                dots: dict[str, Any] = {"s": 9, "marker": MARKS[number], "color": colour, "alpha": 0.5, "lw": 0}
                above.scatter(truth, said, label=one.label, **dots)
                below.scatter(truth, said - truth, **dots)
            ends = [float(truth.min()), float(truth.max())]
            above.plot(ends, ends, color=palette.faint, linewidth=1.0, linestyle="--")
            below.axhline(0.0, color=palette.faint, linewidth=1.0, linestyle="--")
            above.set_title(f"Output {k}" if len(outputs) > 1 else "Answer against truth")
            above.tick_params(labelbottom=False)
            below.set_xlabel("truth")
            if k == 0:
                above.set_ylabel("answer")
                below.set_ylabel("answer - truth")
                if len(runs) == 2:
                    above.legend()
        return made

    data = [
        {"run": one.label, "output": k, "truth": float(asked.truth[i, k]), "answer": float(one.said[i, k])}
        for one in runs
        for k in outputs
        for i in shown.tolist()
    ]
    caption = f"{_where(found)}: above answers against the truth, on the dashed line where right; below the difference"
    return Plot("figure-predicted", "Answers against the truth", caption, draw, data)


def _some(n: int, most: int) -> NDArray[np.int64]:
    """Up to so many of n, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _hardest(found: ErrorAnalysis) -> Plot | None:
    """Pictures as thumbnails, signals as lines; nothing for tokens, which the table shows as text."""
    asked = found.asked
    rows = found.hardest[:THUMBNAILS].tolist()
    pictures = [as_picture(asked, i) for i in rows]
    if all(picture is not None for picture in pictures):
        return _grid(found, rows, 1.35, 1.5, lambda axes, _, at: _show(axes, pictures[at]))
    if isinstance(asked.input, Values) and asked.rows.cuts is None:
        return _grid(found, rows, 2.4, 1.4, lambda axes, palette, at: _wave(axes, palette, asked.rows.row(rows[at])))
    return None


def _grid(
    found: ErrorAnalysis,
    rows: Sequence[int],
    width: float,
    height: float,
    paint: Callable[[Axes, Palette, int], None],
) -> Plot:
    asked, columns = found.asked, min(4, len(rows))
    titles = [_answer_text(found, i) for i in rows]

    def draw(palette: Palette) -> Figure:
        lines = ceil(len(rows) / columns)
        made = new_figure(max(width, 1.8) * columns, (height + 0.14 * (1 + len(found.given))) * lines)
        for at, title in enumerate(titles):
            axes = made.add_subplot(lines, columns, at + 1)
            paint(axes, palette, at)
            axes.set_title(title, fontsize=7, weight="normal", loc="center")
        return made

    data = [
        {"id": str(asked.rows.ids[i]), "shown": title.replace("\n", "; ")}
        for i, title in zip(rows, titles, strict=True)
    ]
    caption = f"{_where(found)}: those that are wrong by the most, the worst first. {_LICENCE}"
    return Plot("figure-hardest", "Hardest rows", caption, draw, data)


_LICENCE = "These are samples of the data set, whose licence applies to them."


def _answer_text(found: ErrorAnalysis, i: int) -> str:
    asked, runs = found.asked, found.given
    head = _cut(str(asked.rows.ids[i]), 24)
    lines = [head]
    for one in runs:
        who = f"{one.label}: " if len(runs) == 2 else ""
        if asked.classes:
            truth, said = asked.called(int(asked.truth[i])), asked.called(int(one.said[i]))
            lines.append(f"{who}{_cut(truth, 12)}, answer {_cut(said, 12)}")
        else:
            numbers = zip(asked.truth[i, :2].tolist(), one.said[i, :2].tolist(), strict=True)
            lines.append(who + "; ".join(f"{truth:.3g}, answer {said:.3g}" for truth, said in numbers))
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


def _steps(found: ErrorAnalysis) -> Plot | None:
    """Of answers to every step: pictures of truth, answer and errors, or lines of truth and answer."""
    asked = found.asked
    typical = _typical(found)
    rows = [*found.hardest[: 4 - len(typical)].tolist(), *typical]
    if not asked.classes:
        return _traces(found, rows)
    pictures = [as_picture(asked, i) for i in rows]
    whole = all(len(_places(asked, i)) == asked.rows.lengths[i] for i in rows)
    if whole and all(picture is not None for picture in pictures):
        return _maps(found, rows, [picture for picture in pictures if picture is not None])
    return None


def _places(asked: EvaluationRows, i: int) -> NDArray[np.int64]:
    """The items of a row."""
    begin, end = np.searchsorted(asked.row, [i, i + 1])
    return np.arange(begin, end)


def _typical(found: ErrorAnalysis) -> list[int]:
    """Two rows of middling score, beside the hardest ones."""
    asked, one = found.asked, found.given[0]
    wrong = one.said != asked.truth
    errors = wrong.astype(float) if wrong.ndim == 1 else np.square(one.said - asked.truth).mean(1)
    n = len(asked.rows)
    mean = np.bincount(asked.row, errors, n) / np.maximum(np.bincount(asked.row, minlength=n), 1)
    order = np.argsort(mean, kind="stable")
    middle = order[max(0, n // 2 - 1) : n // 2 + 1]
    return [i for i in middle.tolist() if i not in found.hardest[:2]][: max(0, n - 2)]


def _maps(found: ErrorAnalysis, rows: Sequence[int], pictures: Sequence[NDArray[np.float64]]) -> Plot:
    asked, runs = found.asked, found.given
    top = max(1, len(asked.names) - 1, int(asked.truth.max()), *(int(one.said.max()) for one in runs))
    heads = ["input", "truth"]
    for one in runs:
        heads += ["answer", "errors"] if len(runs) == 1 else [f"answer, {one.label}", f"errors, {one.label}"]

    def panels(i: int, picture: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        side = picture.shape[:2]
        at = _places(asked, i)
        truth = asked.truth[at].reshape(side)
        found = [picture, truth / top]
        for one in runs:
            said = one.said[at].reshape(side)
            found += [said / top, (said != truth).astype(float)]
        return found

    shares = [
        [float(np.mean(one.said[_places(asked, i)] == asked.truth[_places(asked, i)])) for one in runs] for i in rows
    ]

    def draw(palette: Palette) -> Figure:
        made = new_figure(1.9 * len(heads), 2.05 * len(rows))
        for line, (i, picture) in enumerate(zip(rows, pictures, strict=True)):
            for column, (head, shown) in enumerate(zip(heads, panels(i, picture), strict=True)):
                axes = made.add_subplot(len(rows), len(heads), line * len(heads) + column + 1)
                _show(axes, shown, nearest=shown.shape[0] <= 64)
                if line == 0:
                    axes.set_title(head)
                if column == 0:
                    right = ", ".join(f"{100 * share:.1f} %" for share in shares[line])
                    axes.set_ylabel(f"{asked.rows.ids[i]}\n{right} right", fontsize=8)
        return made

    data = [
        {"id": str(asked.rows.ids[i]), "run": one.label, "accuracy": share}
        for i, line in zip(rows, shares, strict=True)
        for one, share in zip(runs, line, strict=True)
    ]
    greys = ", ".join(asked.called(k) for k in range(top + 1))
    caption = (
        f"{_where(found)}: the hardest, then typical ones. Classes from black to white: {greys}. Errors are white. "
        f"{_LICENCE}"
    )
    return Plot("figure-rows", "Truth, answer and errors", caption, draw, data)


def _traces(found: ErrorAnalysis, rows: Sequence[int]) -> Plot:
    asked, runs = found.asked, found.given
    lines = [(i, _places(asked, i)) for i in rows]
    lines = [(i, at[_some(len(at), 400)]) for i, at in lines if len(at)]

    def draw(palette: Palette) -> Figure:
        made = new_figure(6.5, 1.5 * len(lines) + 0.5)
        first: Axes | None = None
        for number, (i, at) in enumerate(lines):
            axes = made.add_subplot(len(lines), 1, number + 1, sharex=first)
            first = first or axes
            x = asked.step[at] if asked.step is not None else at
            axes.plot(x, asked.truth[at, 0], color=palette.ink, linewidth=1.0, label="truth")
            for style, (one, colour) in enumerate(zip(runs, _colours(palette, runs), strict=True), 1):
                name = one.label if len(runs) == 2 else "answer"
                axes.plot(x, one.said[at, 0], color=colour, linewidth=1.0, linestyle=DASHES[style], label=name)
            axes.set_title(str(asked.rows.ids[i]))
            if number == 0:
                axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_xlabel("step")
        return made

    data = [
        {"id": str(asked.rows.ids[i]), "step": int(asked.step[k]), "truth": float(asked.truth[k, 0])}
        | {f"answer {one.label}": float(one.said[k, 0]) for one in runs}
        for i, at in lines
        for k in at.tolist()
        if asked.step is not None
    ]
    caption = f"{_where(found)}: the hardest, then typical ones; of several outputs the first. {_LICENCE}"
    return Plot("figure-rows", "Truth and answer", caption, draw, data)
