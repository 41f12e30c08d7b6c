"""The figures of test answers: the confusion matrix and the reliability of probabilities, a panel for each arm."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from spt.report.answers import ArmCalibration, Confusion
from spt.report.collect import Report
from spt.report.format import ARM, shorten
from spt.report.panels import MOST, left_out, panels_figure, printable
from spt.report.plotting import Palette, Plot

NUMBERED = 10  # classes whose counts fit into their cells
MOST_CELLS = 4_000  # of all panels
MAX_OPACITY = 0.75


def answer_figures(report: Report) -> Iterator[Plot]:
    cells = accumulate(len(each.classes) ** 2 for each in report.confusions)
    light = sum(total <= MOST_CELLS for total in cells)  # a page holds them all as shapes
    yield _confusion(report.confusions[: min(MOST, max(light, 2))], len(report.confusions))
    yield _reliability(report.calibrations[:MOST], len(report.calibrations))


def _panel_title(label: str, arm: str) -> str:
    return f"{ARM[arm]}: {label}"


def _confusion(shown: tuple[Confusion, ...], count: int) -> Plot:
    data = [
        {"label": each.label, "arm": ARM[each.arm], "truth": true.name, "answer": said.name, "rows": rows}
        for each in shown
        for true in each.classes
        for said, rows in zip(each.classes, true.counts, strict=True)
    ]

    def panel(axes: Axes, each: Confusion, palette: Palette) -> None:
        classes = each.classes
        wrong = max((n for i, true in enumerate(classes) for k, n in enumerate(true.counts) if i != k), default=0)
        for i, true in enumerate(classes):
            for k, rows in enumerate(true.counts):
                if not rows:
                    continue
                colour, share = (palette.spt, rows / true.rows) if i == k else (palette.scratch, rows / wrong)
                axes.add_patch(
                    Rectangle((k - 0.5, i - 0.5), 1, 1, facecolor=colour, alpha=MAX_OPACITY * share, linewidth=0)
                )
                if len(classes) <= NUMBERED:
                    axes.text(k, i, f"{rows:.3g}", ha="center", va="center", fontsize=7)
        names = [shorten(printable(true.name), 11) for true in classes]
        few = len(classes) <= NUMBERED
        axes.set(xlim=(-0.5, len(classes) - 0.5), ylim=(len(classes) - 0.5, -0.5), aspect="equal")
        axes.set_xticks(range(len(classes)), names if few else [], fontsize=7, rotation=90)
        axes.set_yticks(range(len(classes)), names, fontsize=7 if few else 5)
        axes.grid(visible=False)

    caption = (
        "True class down, answer across: test rows, mean over an arm's runs. Blue: right, shaded by their share of "
        "the true class; orange: taken for another class, shaded relative to the commonest such mistake."
        + (f" The first {len(shown)} of {count} panels." if len(shown) < count else "")
    )
    panels: list[tuple[str, Any]] = [(_panel_title(each.label, each.arm), each) for each in shown]
    draw = panels_figure(panel, panels, height=2.6, y_label="true class", x_label="answer")
    return Plot("confusion", "Which classes are taken for which", caption, draw, data)


def _reliability(shown: tuple[ArmCalibration, ...], count: int) -> Plot:
    data = [
        {
            "label": each.label,
            "arm": ARM[each.arm],
            "probabilities": what,
            "bin": number,
            "answers": bin.count,
            "probability": bin.confidence if bin.count else None,
            "right": bin.accuracy if bin.count else None,
        }
        for each in shown
        for what, bins in (("as trained", each.bins), ("with temperature", each.bins_after))
        for number, bin in enumerate(bins, 1)
    ]

    def panel(axes: Axes, each: ArmCalibration, palette: Palette) -> None:
        colour = palette.spt if each.arm == "spt" else palette.scratch
        axes.plot([0, 100], [0, 100], color=palette.faint, linewidth=0.8)
        both = (("as trained", each.bins, False), ("with temperature", each.bins_after, True))
        for what, bins, after in both:
            filled = [bin for bin in bins if bin.count]
            axes.plot(
                [100 * bin.confidence for bin in filled],
                [100 * bin.accuracy for bin in filled],
                marker="s" if after else "o",
                linestyle="-" if after else "--",
                color=colour if after else palette.faint,
                markerfacecolor=colour if after else palette.paper,
                label=what,
            )
        for place, bin in zip(_places(each.bins_after), each.bins_after, strict=True):
            if bin.count:
                axes.text(place, -13, f"{bin.count:,}", ha="center", va="center", fontsize=5, rotation=90)
        axes.set(xlim=(-3, 103), ylim=(-22, 103))
        axes.set_xticks([0, 50, 100])
        axes.set_yticks([0, 50, 100])

    caption = (
        "Share of right test answers against the mean probability of the answer given, in 15 bins of equal width, all "
        "runs of an arm together; on the diagonal probabilities mean what they say. With temperature: divided by the "
        "one number that validation chose. Below: test answers in each bin, with temperature."
        + left_out(count, "panels")
    )
    panels: list[tuple[str, Any]] = [(_panel_title(each.label, each.arm), each) for each in shown]
    draw = panels_figure(
        panel, panels, height=2.4, y_label="right answers (%)", x_label="probability of the answer given (%)"
    )
    return Plot("reliability", "How far probabilities can be trusted", caption, draw, data)


def _places(bins: Any) -> list[float]:
    return [100 * (number + 0.5) / len(bins) for number in range(len(bins))]
