"""The figures of a report. The tables have the same numbers; figures show them at a glance.

Narrow enough to be read on a phone. Scores that are fractions are shown in percent, differences in points.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from spt.report.arms import Row
from spt.report.collect import Report
from spt.report.curves import Curve
from spt.report.format import ARM, flops_text, is_percent, metric_text, shorten, slug
from spt.report.plotting import DASHES, MARKS, Palette, Plot, new_figure
from spt.report.stats import mean_interval
from spt.runs.plan import ARMS, factors_text

WIDTH = 4.7  # inches: about 450 pixels
STEMS = ("forest", "seeds", "levels-", "compute", "learning", "pretraining", "expected")  # of the figures' names
MOST = 12  # panels of one figure; the tables have the rest
NUMERIC = {"compute", "data", "size"}  # kinds of study whose levels lie on an axis


def all_figures(report: Report) -> list[Plot]:
    """Every figure that is not empty, in the order of a page."""
    figures = [
        *forests(report),
        *seed_lines(report),
        *levels(report),
        *score_by_compute(report),
        *learning(report),
        *expected(report),
    ]
    return [figure for figure in figures if figure.data]


def _scale(metric: str) -> float:
    return 100.0 if is_percent(metric) else 1.0


def _unit(metric: str) -> str:
    return f"test {metric_text(metric)}"


def _difference(metric: str, higher_is_better: bool) -> str:
    label = f"SPT − scratch, {'points' if is_percent(metric) else metric}"
    return label + ("" if higher_is_better else " (below 0: SPT is better)")


def _by_metric(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.n:
            groups.setdefault(row.metric, []).append(row)
    return groups


def _names(stem: str, metrics: Sequence[str], metric: str) -> str:
    return stem if len(metrics) == 1 else f"{stem}-{slug(metric)}"


def _wrapped(text: str, most: int) -> str:
    """A row's label, in up to three lines that fit above a panel."""
    return "\n".join(textwrap.wrap(_clean(text), most, max_lines=3, placeholder=" …", break_long_words=True)) or " "


def _clean(text: str) -> str:
    """Without control characters, which an SVG cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def forests(report: Report) -> list[Plot]:
    """SPT minus scratch with its interval, row under row; a figure for each metric."""
    groups = _by_metric(report.rows)
    return [_forest(_names("forest", list(groups), metric), metric, rows) for metric, rows in groups.items()]


def _forest(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    data = [
        {
            "label": row.label,
            "n": row.n,
            "delta": row.delta,
            "low": row.low,
            "high": row.high,
            "holm": row.holm,
            "decision": row.decision,
        }
        for row in rows
    ]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(WIDTH, 0.75 + 0.46 * len(rows))
        axes = figure.subplots()
        scale = _scale(metric)
        for place, row in enumerate(rows):
            assert row.delta is not None
            decided = row.decision in ("spt", "scratch")
            better = palette.spt if (row.delta > 0) == row.higher_is_better else palette.scratch
            colour = better if row.delta else palette.faint
            if row.low is not None and row.high is not None:
                axes.plot([scale * row.low, scale * row.high], [place, place], color=colour, solid_capstyle="butt")
            face = colour if decided else palette.paper
            axes.plot([scale * row.delta], [place], marker="s", color=colour, markerfacecolor=face, markersize=6)
            axes.annotate(
                shorten(_clean(row.label), 66) + ("" if row.low is not None else " (one seed)"),
                (0, place),
                xycoords=("axes fraction", "data"),
                xytext=(2, 7),
                textcoords="offset points",
                fontsize=8,
                bbox={"facecolor": palette.paper, "edgecolor": "none", "pad": 1},
            )
        axes.axvline(0, color=palette.ink, linewidth=1)
        axes.set_ylim(len(rows) - 0.5, -0.75)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(_difference(metric, rows[0].higher_is_better))
        return figure

    caption = (
        "Mean difference over seeds with its 95 % paired t interval, for each row alone. Filled: decided after Holm's "
        "adjustment for all rows of this report; hollow: not decided. Blue: SPT scored better; orange: scratch."
    )
    return Plot(name, "What self-pretraining gains", caption, draw, data)


def seed_lines(report: Report) -> list[Plot]:
    """Both arms' score at every seed, a line a seed, a panel a row."""
    groups = _by_metric(report.rows)
    return [_seed_lines(_names("seeds", list(groups), metric), metric, rows) for metric, rows in groups.items()]


def _seed_lines(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    shown = rows[:MOST]
    data = [
        {"label": row.label, "seed": seed.seed, "scratch": seed.scratch, "spt": seed.spt}
        for row in shown
        for seed in row.seeds
        if seed.scratch is not None or seed.spt is not None
    ]

    def panel(axes: Axes, row: Row, palette: Palette) -> None:
        scale = _scale(metric)
        pairs = [(seed.scratch, seed.spt) for seed in row.seeds if seed.scratch is not None and seed.spt is not None]
        x, y = [0, 1, math.nan] * len(pairs), [scale * score for pair in pairs for score in (*pair, math.nan)]
        axes.plot(x, y, color=palette.faint, linewidth=1)
        scratch = [scale * seed.scratch for seed in row.seeds if seed.scratch is not None]
        axes.plot([0] * len(scratch), scratch, "o", color=palette.scratch)
        spt = [scale * seed.spt for seed in row.seeds if seed.spt is not None]
        axes.plot([1] * len(spt), spt, "s", color=palette.spt)
        axes.set_title(_wrapped(row.label, 20), fontsize=7.5)
        axes.set_xlim(-0.35, 1.35)
        axes.set_xticks([0, 1], ["scratch", "SPT"])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(5))

    caption = (
        f"{_unit(metric).capitalize()} of every seed; a line joins the two runs that share a seed, that is initial "
        "weights, head and order of batches. Panels have scales of their own." + _left_out(len(rows))
    )
    return Plot(name, "Seed by seed", caption, _panels(shown, panel, 3, 1.75, _unit(metric)), data)


def _left_out(rows: int) -> str:
    return f" The first {MOST} of {rows} rows." if rows > MOST else ""


def _panels(
    items: Sequence[Any],
    panel: Callable[[Axes, Any, Palette], None],
    columns: int,
    height: float,
    y_label: str,
    legend: bool = False,
    x_label: str = "",
) -> Callable[[Palette], Figure]:
    """One panel per item, in a grid with this many columns."""
    columns = min(columns, len(items)) or 1
    lines = math.ceil(len(items) / columns)

    def draw(palette: Palette) -> Figure:
        width = WIDTH if columns > 1 else 0.75 * WIDTH
        figure = new_figure(width, height * lines + 0.1)
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, item in zip(grid.flat, items, strict=False):
            panel(axes, item, palette)
        for axes in islice(grid.flat, len(items), None):
            axes.remove()
        figure.supylabel(y_label, fontsize=9)
        if x_label:
            figure.supxlabel(x_label, fontsize=9)
        if legend:
            handles = {
                label: handle
                for axes in figure.axes
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            across = 3 if max(map(len, handles)) < 16 else 2
            figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(handles) / across))
            figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=across, fontsize=8)
        return figure

    return draw


class PlottedLevel(NamedTuple):
    place: float
    name: str
    scratch: tuple[float, ...]
    spt: tuple[float, ...]


class PlottedFamily(NamedTuple):
    """The levels of one recipe in one study."""

    label: str
    kind: str
    factor: str
    metric: str
    numeric: bool  # levels are placed at their values, not side by side
    levels: list[PlottedLevel]


def levels(report: Report) -> list[Plot]:
    """Scores of both arms along what a study varies, with intervals: shares of a budget, fractions of data, sizes."""
    families = _families(report.rows)
    figures = []
    for kind in dict.fromkeys(family.kind for family in families):
        for metric in dict.fromkeys(family.metric for family in families if family.kind == kind):
            chosen = [family for family in families if (family.kind, family.metric) == (kind, metric)]
            several = len({family.metric for family in families if family.kind == kind}) > 1
            figures.append(_levels(f"levels-{kind}" + (f"-{slug(metric)}" if several else ""), kind, metric, chosen))
    return figures


def _families(rows: Sequence[Row]) -> list[PlottedFamily]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.factors and row.n:
            groups.setdefault((row.source, row.kind, row.task, row.model, row.recipe, row.metric), []).append(row)
    families = []
    for (source, kind, task, model, recipe, metric), members in groups.items():
        if len(members) < 2:
            continue
        label = f"{task} / {model}"
        alike = [key for key in groups if key[2:4] == (task, model)]
        label += f", {recipe}" if len({key[4] for key in alike}) > 1 else ""
        label += f", {source}" if len({key[0] for key in alike}) > 1 else ""
        places = [_place(kind, row) for row in members]
        known = [place for place in places if place is not None and place > 0]
        numeric = len(set(known)) == len(members)
        family_levels = [_level(known[turn] if numeric else float(turn), row) for turn, row in enumerate(members)]
        ordered = sorted(family_levels, key=lambda level: level.place)
        families.append(PlottedFamily(label, kind, next(iter(members[0].factors)), metric, numeric, ordered))
    return families


def _place(kind: str, row: Row) -> float | None:
    """Where a level lies on an axis: at its parameters, or at its number in percent."""
    value = next(iter(row.factors.values()))
    if kind == "size":
        return float(row.spt_arm.parameters.get("total", 0)) if row.spt_arm else None
    if kind in NUMERIC and isinstance(value, int | float) and not isinstance(value, bool):
        return 100 * float(value)
    return None


def _level(place: float, row: Row) -> PlottedLevel:
    name = factors_text(row.factors).removeprefix(f"{next(iter(row.factors))} ")
    pairs = [(seed.scratch, seed.spt) for seed in row.seeds if seed.scratch is not None and seed.spt is not None]
    return PlottedLevel(place, name, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


LEVEL_AXIS = {
    "compute": "share of the budget given to pretraining (%)",
    "data": "share of the training split (%)",
    "size": "parameters",
}


def _levels(name: str, kind: str, metric: str, families: Sequence[PlottedFamily]) -> Plot:
    scale, shown = _scale(metric), families[:MOST]
    data: list[dict[str, Any]] = []
    for family in shown:
        for level in family.levels:
            for arm, scores in (("scratch", level.scratch), ("SPT", level.spt)):
                interval = mean_interval(scores)
                data.append(
                    {
                        "label": family.label,
                        "factor": family.factor,
                        "level": level.name,
                        "place": level.place,
                        "arm": arm,
                        "n": interval.n,
                        "mean": interval.mean,
                        "low": interval.low,
                        "high": interval.high,
                    }
                )
    logarithmic = kind in ("data", "size")

    def panel(axes: Axes, family: PlottedFamily, palette: Palette) -> None:
        for arm, colour, mark, dash in (("scratch", palette.scratch, "o", "--"), ("SPT", palette.spt, "s", "-")):
            lines = [line for line in data if line["label"] == family.label and line["arm"] == arm]
            x = [float(line["place"]) for line in lines]
            y = [scale * line["mean"] for line in lines]
            low, high = ([scale * _or(line[end], line["mean"]) for line in lines] for end in ("low", "high"))
            if kind == "compute" and family.numeric:  # a share of zero is training from scratch
                start = next(line for line in data if line["label"] == family.label and line["arm"] == "scratch")
                x, y = [0, *x], [scale * start["mean"], *y]
                low, high = (
                    [scale * _or(start[end], start["mean"]), *each] for end, each in (("low", low), ("high", high))
                )
            axes.plot(x, y, dash if family.numeric else "", marker=mark, color=colour, label=arm)
            if family.numeric:
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            else:
                axes.vlines(x, low, high, color=colour, linewidth=1.2)
        names = [level.name for level in family.levels]
        if not family.numeric:
            axes.set_xticks(range(len(names)), [_wrapped(name, 12) for name in names], fontsize=7)
            axes.tick_params(axis="x", rotation=90 if len(names) > 3 else 0)
            axes.margins(x=0.2)
        elif logarithmic:
            axes.set_xscale("log")
            places = _apart([level.place for level in family.levels])
            axes.set_xticks(places, [_short(place) for place in places], fontsize=7.5)
            axes.minorticks_off()
        if is_percent(metric):  # an interval may exceed the range of scores
            low_end, high_end = axes.get_ylim()
            axes.set_ylim(max(low_end, -2), min(high_end, 102))
        axes.set_title(_wrapped(family.label, 26), fontsize=8)

    caption = (
        f"Mean {_unit(metric)} of the seeds that both arms finished, with the 95 % t interval of each mean. Intervals "
        "of means are wider than those of paired differences: whether arms differ is decided in the tables."
    ) + _left_out(len(families))
    x_label = LEVEL_AXIS.get(kind, "") if all(family.numeric for family in shown) else families[0].factor
    draw = _panels(shown, panel, 2, 2.1, _unit(metric), legend=True, x_label=x_label)
    titles = {"compute": "One budget, shares of it to pretraining", "data": "With less data", "size": "By model size"}
    return Plot(name, titles.get(kind, f"By {families[0].factor}"), caption, draw, data)


def _or(bound: float | None, mean: float) -> float:
    return mean if bound is None else bound


def _apart(places: Sequence[float]) -> list[float]:
    """The places, in rising order, whose labels do not touch on a logarithmic axis."""
    span = math.log(places[-1] / places[0])
    kept = [places[-1]]
    for place in reversed(places[:-1]):
        if math.log(kept[-1] / place) > 0.12 * span:
            kept.append(place)
    return kept[::-1]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def score_by_compute(report: Report) -> list[Plot]:
    """Scores against what training cost, both arms of every row; a panel a task."""
    groups = _by_metric([row for row in report.rows if row.scratch_arm and row.spt_arm])
    return [_compute(_names("compute", list(groups), metric), metric, rows) for metric, rows in groups.items()]


def _compute(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    data: list[dict[str, Any]] = []
    for row in rows:
        for arm in ARMS:
            scores = [getattr(seed, arm) for seed in row.seeds if seed.delta is not None]
            interval = mean_interval(scores)
            cost = row.scratch_arm if arm == "scratch" else row.spt_arm
            assert cost is not None
            data.append(
                {
                    "task": row.task,
                    "label": row.label,
                    "model": row.model,
                    "arm": ARM[arm],
                    "flops": cost.total.flops,
                    "mean": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                    "n": interval.n,
                }
            )
    scale = _scale(metric)
    every = list(dict.fromkeys(row.task for row in rows))
    tasks = every[:MOST]
    models = list(dict.fromkeys(row.model for row in rows))

    def panel(axes: Axes, task: str, palette: Palette) -> None:
        for number, model in enumerate(models):
            lines = [line for line in data if (line["task"], line["model"]) == (task, model)]
            points = list(
                dict.fromkeys((line["arm"], line["flops"], line["mean"], line["low"], line["high"]) for line in lines)
            )
            mark = MARKS[number % len(MARKS)]
            for arm, flops, mean, low, high in points:
                colour = palette.spt if arm == "SPT" else palette.scratch
                if low is not None and high is not None:
                    axes.vlines([flops], scale * low, scale * high, color=colour, linewidth=1)
                axes.plot(
                    [flops],
                    [scale * mean],
                    mark,
                    color=colour,
                    markerfacecolor=colour if arm == "SPT" else palette.paper,
                    label=_entry(f"{model}, {arm}"),
                )
        costs = [line["flops"] for line in data if line["task"] == task]
        low, high = min(costs), max(costs)
        if high > 10 * low > 0:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.margins(x=0.15)
        else:
            room = max(0.2 * (high - low), 0.1 * high)  # equal costs should look equal
            axes.set_xlim(low - room, high + room)
            axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: flops_text(value)))
        if len(tasks) > 1:
            axes.set_title(_wrapped(task, 26), fontsize=8)

    caption = (
        f"Mean {_unit(metric)} with its 95 % t interval against the training operations of one run, pretraining "
        "included (forward and backward, analytic). Hollow: scratch; filled: SPT. "
        f"{'Up' if rows[0].higher_is_better else 'Down'} and to the left is better."
        + (f" The first {MOST} of {len(every)} tasks." if len(every) > MOST else "")
        + (" Marks repeat after eight models." if len(models) > len(MARKS) else "")
    )
    draw = _panels(tasks, panel, 2, 2.4, _unit(metric), legend=True, x_label="training FLOPs of one run")
    return Plot(name, "Score against compute", caption, draw, data)


def _entry(text: str) -> str:
    """A legend entry; matplotlib omits those that begin with an underscore."""
    text = shorten(_clean(text), 30)
    return f" {text}" if text.startswith("_") else text


def learning(report: Report) -> list[Plot]:
    """Validation scores while training, by share of each stage's steps (SPT, Figure 5)."""
    labels = [row.label for row in report.rows if any(curve.label == row.label for curve in report.curves)][:MOST]
    supervised = _by_label([curve for curve in report.curves if curve.stage != "pretraining"], labels)
    before = _by_label([curve for curve in report.curves if curve.stage == "pretraining"], labels)
    figures = []
    for name, title, groups, what in (
        ("learning", "While training the task", supervised, "finetuning after self-pretraining, and scratch"),
        ("pretraining", "While pretraining", before, "the pretraining runs"),
    ):
        metrics = list(dict.fromkeys(curves[0].metric for curves in groups.values()))
        for metric in metrics:
            chosen = {label: curves for label, curves in groups.items() if curves[0].metric == metric}
            figures.append(_learning(_names(name, metrics, metric), title, what, metric, chosen, len(report.rows)))
    return figures


def _by_label(curves: Sequence[Curve], labels: Sequence[str]) -> dict[str, list[Curve]]:
    groups = {label: [curve for curve in curves if curve.label == label] for label in labels}
    return {label: found for label, found in groups.items() if found}


def _learning(name: str, title: str, what: str, metric: str, groups: dict[str, list[Curve]], rows: int) -> Plot:
    scale = _scale(metric)
    data = [
        {
            "label": label,
            "stage": curve.stage,
            "seed": curve.seed,
            "step": step,
            "share": round(share, 4),
            metric: value,
        }
        for label, curves in groups.items()
        for curve in curves
        for step, share, value in zip(curve.steps, curve.shares, curve.values, strict=True)
    ]

    def panel(axes: Axes, label: str, palette: Palette) -> None:
        looks = {"scratch": palette.scratch, "finetuning": palette.spt, "pretraining": palette.pretrain}
        for stage, colour in looks.items():
            curves = [curve for curve in groups[label] if curve.stage == stage]
            for curve in curves:
                x, y = [100 * share for share in curve.shares], [scale * value for value in curve.values]
                axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
            dash = DASHES[1] if stage == "scratch" else DASHES[0]
            x, y = _mean_curve(curves)
            if x:
                axes.plot(
                    [100 * value for value in x],
                    [scale * value for value in y],
                    color=colour,
                    linestyle=dash,
                    label=stage,
                )
        axes.set_title(_wrapped(label, 26), fontsize=8)
        axes.set_xlim(0, 102)

    unit = f"validation {metric_text(metric)}"
    caption = (
        f"{unit.capitalize()} of {what}, against the share of the stage's own steps, so lines that end together took "
        "different numbers of steps. Thick: mean over the seeds that have a value there; thin: every seed."
    ) + _left_out(rows)
    draw = _panels(list(groups), panel, 2, 2.0, unit, legend=True, x_label="share of the stage's steps (%)")
    return Plot(name, title, caption, draw, data)


def _mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Mean over runs at every share where most of them have a value."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for share, value in zip(curve.shares, curve.values, strict=True):
            at.setdefault(round(share, 6), []).append(value)
    shares = sorted(share for share, values in at.items() if 2 * len(values) > len(curves))
    return shares, [fmean(at[share]) for share in shares]


def expected(report: Report) -> list[Plot]:
    """Expected best validation score by number of settings tried, both arms (Dodge et al. 2019, Tang et al. 2020)."""
    figures = []
    searches = [search for search in report.searches if search.scratch.expected or search.spt.expected]
    metrics = list(dict.fromkeys(search.metric for search in searches))
    for metric in metrics:
        chosen = [search for search in searches if search.metric == metric][:MOST]
        labels = Counter(search.label for search in chosen)
        curves = {
            (search.label + (f", {search.study}" if labels[search.label] > 1 else ""), arm): [
                (search.settings, search.value) for search in result.expected
            ]
            for search in chosen
            for arm, result in (("scratch", search.scratch), ("SPT", search.spt))
        }
        data = [
            {"label": label, "arm": arm, "settings": settings, "value": value}
            for (label, arm), points in curves.items()
            for settings, value in points
        ]
        figures.append(
            _expected(
                _names("expected", metrics, metric), metric, list(dict.fromkeys(k[0] for k in curves)), curves, data
            )
        )
    return figures


def _expected(
    name: str,
    metric: str,
    labels: Sequence[str],
    curves: dict[tuple[str, str], list[tuple[int, float]]],
    data: Sequence[dict[str, Any]],
) -> Plot:
    scale = _scale(metric)

    def panel(axes: Axes, label: str, palette: Palette) -> None:
        for arm, colour, mark, dash in (("scratch", palette.scratch, "o", "--"), ("SPT", palette.spt, "s", "-")):
            points = curves[label, arm]
            axes.plot(
                [n for n, _ in points], [scale * y for _, y in points], dash, marker=mark, color=colour, label=arm
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(_wrapped(label, 26), fontsize=8)

    unit = f"validation {metric_text(metric)}"
    caption = f"Expected best {unit} of this many settings drawn at random from those that an arm tried."
    draw = _panels(labels, panel, 2, 2.1, unit, legend=True, x_label="settings tried")
    return Plot(name, "What a search finds by its size", caption, draw, data)
