"""Figures of models side by side: from scratch to SPT, every pair's difference, ranks over tasks."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from spt.report.collect import Report
from spt.report.format import ARM, delta_text, is_percent
from spt.report.models_across_tasks import ModelsAcrossTasks
from spt.report.panels import (
    MOST,
    WIDTH,
    Line,
    by_metric,
    left_out,
    legend_entries,
    panels_figure,
    printable,
    scale_of,
    unit_of,
    wrapped,
)
from spt.report.plotting import Palette, Plot, new_figure
from spt.report.ranking import Arm, ModelComparison, winner_loser
from spt.report.verdict import LEVEL
from spt.runs.plan import ARMS, ArmName

ARMS_SHOWN: dict[Arm, str] = {"scratch": "from scratch", "spt": "after SPT", "difference": "gain (SPT − scratch)"}


def model_figures(report: Report) -> list[Plot]:
    """Every figure of models that has something to show."""
    compared = [comparison for comparison in report.models if any(contrast.n for contrast in comparison.contrasts)]
    return [
        *(_slopes(*group) for group in by_metric("models-slopes", compared)),
        *(_matrices(*group) for group in by_metric("models-pairs", compared)),
        *(
            _rank_diagram("models-ranks" if len(report.models_across_tasks) == 1 else f"models-ranks-{number}", across)
            for number, across in enumerate(report.models_across_tasks, 1)
        ),
    ]


def _slopes(name: str, metric: str, comparisons: Sequence[ModelComparison]) -> Plot:
    """Each model's mean score from scratch and after SPT, joined by a line."""
    shown = comparisons[:MOST]
    data: list[Line] = [
        {
            "label": comparison.label,
            "model": model.name,
            "arm": ARM[arm],
            "n": getattr(model, f"{arm}_n"),
            "mean": getattr(model, arm),
            "low": getattr(model, f"{arm}_low"),
            "high": getattr(model, f"{arm}_high"),
        }
        for comparison in shown
        for model in comparison.models
        for arm in ARMS
        if getattr(model, arm) is not None
    ]
    models = legend_entries(line["model"] for line in data)

    def panel(axes: Axes, label: str, palette: Palette) -> None:
        scale = scale_of(metric)
        for index, (model, entry) in enumerate(models.items()):
            lines = [line for line in data if (line["label"], line["model"]) == (label, model)]
            shift = min(0.05, 0.5 / len(models)) * (index - (len(models) - 1) / 2)
            x = [list(ARM.values()).index(line["arm"]) + shift for line in lines]
            style = palette.line(index)
            axes.plot(x, [scale * line["mean"] for line in lines], label=entry, **style)
            for place, line in zip(x, lines, strict=True):
                if line["low"] is not None:
                    axes.vlines([place], scale * line["low"], scale * line["high"], color=style["color"], linewidth=1)
        axes.set_xlim(-0.35, 1.35)
        axes.set_xticks([0, 1], ["scratch", "SPT"])
        axes.grid(visible=False, axis="x")
        if is_percent(metric):
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2), min(high, 102))

    caption = (
        f"Mean {unit_of(metric)} of each model with the 95 % t interval of the mean. Lines that cross or close up are "
        "models whose order training from scratch and self-pretraining see differently; whether that is decided is in "
        "the table of contrasts."
    ) + left_out(len(comparisons), "comparisons")
    labels = [(comparison.label if len(shown) > 1 else "", comparison.label) for comparison in shown]
    draw = panels_figure(panel, labels, height=2.6, y_label=unit_of(metric))
    return Plot(name, "From scratch to self-pretraining, model by model", caption, draw, data)


class _Matrix(NamedTuple):
    """The contrasts of one comparison in one arm."""

    comparison: ModelComparison
    arm: Arm


def _matrices(name: str, metric: str, comparisons: Sequence[ModelComparison]) -> Plot:
    """Row minus column for every two models, an arm a panel."""
    matrices = [_Matrix(comparison, arm) for comparison in comparisons for arm in ARMS_SHOWN][:MOST]
    fields = ("arm", "first", "second", "n", "difference", "low", "high", "holm", "decision")
    data: list[Line] = [
        {"label": matrix.comparison.label, **{field: getattr(contrast, field) for field in fields}}
        for matrix in matrices
        for contrast in matrix.comparison.contrasts
        if contrast.arm == matrix.arm
    ]
    largest = max((abs(line["difference"]) for line in data if line["difference"] is not None), default=0) or 1.0
    titles = [
        ARMS_SHOWN[matrix.arm] if len(comparisons) == 1 else f"{matrix.comparison.label}, {ARMS_SHOWN[matrix.arm]}"
        for matrix in matrices
    ]
    caption = (
        f"Row − column, mean over seeds, in {'points' if is_percent(metric) else metric}. * decided after Holm's "
        "adjustment; blue: the row's model is better or gains more, orange: the column's."
    ) + left_out(3 * len(comparisons), "panels")
    panel = partial(_matrix_panel, largest=largest)
    draw = panels_figure(panel, list(zip(titles, matrices, strict=True)), height=2.3, y_label="")
    return Plot(name, "Every two models", caption, draw, data)


def _matrix_panel(axes: Axes, matrix: _Matrix, palette: Palette, *, largest: float) -> None:
    names = [model.name for model in matrix.comparison.models]
    for contrast in matrix.comparison.contrasts:
        if contrast.arm == matrix.arm and contrast.difference is not None:
            a, b = names.index(contrast.first), names.index(contrast.second)
            for row, column, value in ((a, b, contrast.difference), (b, a, -contrast.difference)):
                better = palette.spt if (value > 0) == contrast.higher_is_better else palette.scratch
                strength = 0.6 * abs(value) / largest
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=better, alpha=strength, linewidth=0))
                text = delta_text(value, contrast.metric) + ("*" if winner_loser(contrast) else "")
                axes.annotate(text, (column, row), ha="center", va="center", fontsize=6.5, color=palette.ink)
    labels = [wrapped(name, 12) for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=7, rotation=90 if len(names) > 3 else 0)
    axes.set_yticks(range(len(names)), labels, fontsize=7)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False)


def _rank_diagram(name: str, across: ModelsAcrossTasks) -> Plot:
    """Mean ranks over tasks, a line under models that Wilcoxon's test after Holm does not tell apart (Demšar 2006)."""
    data: list[Line] = [
        {"label": across.label, "arm": ARM[each.arm], "model": each.model, "mean_rank": each.mean_rank}
        for each in across.averages
    ]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(WIDTH, 2 * (0.9 + 0.2 * len(across.models)))
        for axes, arm in zip(figure.subplots(2, 1, sharex=True), ARMS, strict=True):
            _rank_panel(axes, across, arm, palette)
            axes.set_title(ARMS_SHOWN[arm], fontsize=8)
        figure.supxlabel("mean rank (1 is best)", fontsize=9)
        return figure

    caption = f"Mean ranks over {len(across.tasks)} tasks. "
    if across.contrasts:
        caption += (
            "A bar joins models that Wilcoxon's signed-rank test over tasks does not tell apart after Holm's "
            "adjustment; with few tasks it can tell none apart."
        )
    else:
        why = "No two models share a seed in every task" if across.metric else "Scores in several metrics"
        caption += f"{why}, so there are no mean differences to test, and no bar joins any."
    return Plot(name, "Ranks over tasks", caption, draw, data)


def _rank_panel(axes: Axes, across: ModelsAcrossTasks, arm: ArmName, palette: Palette) -> None:
    ranked = sorted((each.mean_rank, each.model) for each in across.averages if each.arm == arm)
    cliques = _cliques([model for _, model in ranked], across, arm)
    ranks = dict(zip((model for _, model in ranked), (rank for rank, _ in ranked), strict=True))
    for height, (rank, model) in enumerate(ranked, 1):
        axes.plot([rank, rank], [0, -height], color=palette.faint, linewidth=0.8)
        axes.plot([rank], [0], "o", color=palette.spt if arm == "spt" else palette.scratch)
        axes.annotate(
            printable(f"{model} {rank:.2f}"), (rank, -height), xytext=(3, 0), textcoords="offset points",
            fontsize=7.5, va="center",
        )  # fmt: skip
    for number, clique in enumerate(cliques):
        ends = [ranks[clique[0]], ranks[clique[-1]]]
        axes.plot(ends, [0.5 + 0.4 * number] * 2, color=palette.ink, linewidth=3, solid_capstyle="butt")
    axes.set_xlim(0.8, len(ranked) + 0.8)
    axes.set_ylim(-len(ranked) - 0.7, 0.8 + 0.4 * len(cliques))
    axes.set_xticks(range(1, len(ranked) + 1))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)


def _cliques(names: Sequence[str], across: ModelsAcrossTasks, arm: ArmName) -> list[list[str]]:
    """The longest runs of models in the order of their ranks that the test does not tell apart."""
    if not across.contrasts:
        return []
    apart = {
        frozenset((each.first, each.second))
        for each in across.contrasts
        if each.arm == arm and each.wilcoxon_holm is not None and each.wilcoxon_holm <= LEVEL
    }
    runs: list[range] = []
    for start in range(len(names)):
        end = start + 1
        while end < len(names) and not any(frozenset((names[i], names[end])) in apart for i in range(start, end)):
            end += 1
        if end - start > 1 and not (runs and end <= runs[-1].stop):
            runs.append(range(start, end))
    return [[names[index] for index in run] for run in runs]
