"""The figures of a report. The tables have the same numbers; figures show them at a glance.

Narrow enough to be read on a phone. Scores that are fractions are shown in percent, differences in points.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from spt.report.answer_figures import answer_figures
from spt.report.arms import Row
from spt.report.collect import Report
from spt.report.curves import Curve
from spt.report.format import ARM, flops_text, is_percent, metric_text, shorten
from spt.report.model_figures import model_figures
from spt.report.panels import (
    MOST,
    MOST_SEEDS,
    WIDTH,
    Line,
    by_metric,
    left_out,
    legend_entries,
    panels_figure,
    printable,
    scale_of,
    seeds_left_out,
    unit_of,
    wrapped,
)
from spt.report.plotting import DASHES, MARKS, Palette, Plot, new_figure
from spt.report.search import SearchResult
from spt.report.stats import paired
from spt.runs.plan import ARMS, ArmName, factors_text

STEMS = (
    "models-",
    "forest",
    "splits",
    "seeds",
    "levels-",
    "compute",
    "confusion",
    "reliability",
    "learning",
    "pretraining",
    "expected",
)  # of the figures' names


def all_figures(report: Report) -> list[Plot]:
    """Every figure that is not empty, in the order of a page."""
    rows = [row for row in report.rows if row.n]
    families = _families(rows)
    searches = [search for search in report.searches if search.scratch.expected or search.spt.expected]
    figures = [
        *model_figures(report),
        *(_forest(*group) for group in by_metric("forest", rows)),
        *(_split_points(*group) for group in by_metric("splits", [row for row in rows if row.splits])),
        *(_seed_lines(*group) for group in by_metric("seeds", [row for row in rows if not row.splits])),
        *(
            _levels(kind, *group)
            for kind in dict.fromkeys(family.kind for family in families)
            for group in by_metric(f"levels-{kind}", [family for family in families if family.kind == kind])
        ),
        *(
            _gains(kind, *group)
            for kind, name in (("data", "levels-gain"), ("rows", "levels-gain-rows"))
            for group in by_metric(name, [each for each in families if each.kind == kind])
        ),
        *(_compute(*group) for group in by_metric("compute", rows)),
        *answer_figures(report),
        *_learning(report),
        *(_expected(*group) for group in by_metric("expected", searches)),
    ]
    return [figure for figure in figures if figure.data]


def _arm_styles(palette: Palette) -> dict[str, dict[str, Any]]:
    return {
        ARM["scratch"]: {"color": palette.scratch, "marker": "o", "linestyle": "--"},
        ARM["spt"]: {"color": palette.spt, "marker": "s", "linestyle": "-"},
    }


def _forest(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    """SPT minus scratch with its interval, row under row."""
    columns = ("label", "n", "delta", "low", "high", "holm", "decision")
    data = [{column: getattr(row, column) for column in columns} for row in rows]

    def draw(palette: Palette) -> Figure:
        figure = new_figure(WIDTH, 0.75 + 0.46 * len(rows))
        axes = figure.subplots()
        scale = scale_of(metric)
        for place, row in enumerate(rows):
            assert row.delta is not None
            better = palette.spt if (row.delta > 0) == row.higher_is_better else palette.scratch
            colour = better if row.delta else palette.faint
            if row.low is not None and row.high is not None:
                axes.plot([scale * row.low, scale * row.high], [place, place], color=colour, solid_capstyle="butt")
            face = colour if row.decision in ARMS else palette.paper
            axes.plot([scale * row.delta], [place], marker="s", color=colour, markerfacecolor=face, markersize=6)
            axes.annotate(
                shorten(printable(row.label), 66) + ("" if row.low is not None else " (one seed)"),
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
        axes.set_xlabel(
            f"SPT − scratch, {'points' if is_percent(metric) else metric}"
            + ("" if rows[0].higher_is_better else " (below 0: SPT is better)")
        )
        return figure

    caption = (
        "Mean difference over seeds with its 95 % paired t interval, for each row alone. Filled: decided after Holm's "
        "adjustment for all rows of this report; hollow: not decided. Blue: SPT scored better; orange: scratch."
    )
    return Plot(name, "What self-pretraining gains", caption, draw, data)


def _seed_lines(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    """Both arms' score at every seed, a line a seed, a panel a row."""
    data = [
        {"label": row.label, "seed": seed.seed, "scratch": seed.scratch, "spt": seed.spt}
        for row in rows[:MOST]
        for seed in row.seeds
        if seed.scratch is not None or seed.spt is not None
    ]

    def panel(axes: Axes, row: Row, palette: Palette) -> None:
        scale = scale_of(metric)
        pairs = list(zip(*(_paired_scores(row, arm) for arm in ARMS), strict=True))[:MOST_SEEDS]
        x, y = [0, 1, math.nan] * len(pairs), [scale * score for pair in pairs for score in (*pair, math.nan)]
        axes.plot(x, y, color=palette.faint, linewidth=1)
        for place, (arm, style) in enumerate(zip(ARMS, _arm_styles(palette).values(), strict=True)):
            scores = [scale * score for seed in row.seeds if (score := getattr(seed, arm)) is not None][:MOST_SEEDS]
            axes.plot([place] * len(scores), scores, **style | {"linestyle": "None"})
        axes.set_xlim(-0.35, 1.35)
        axes.set_xticks([0, 1], ["scratch", "SPT"])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(5))

    caption = (
        f"{unit_of(metric).capitalize()} of every seed; a line joins the two runs that share a seed, that is initial "
        "weights, head and order of batches. Panels have scales of their own."
        + seeds_left_out(len(row.seeds) for row in rows[:MOST])
        + left_out(len(rows))
    )
    panels = [(row.label, row) for row in rows[:MOST]]
    draw = panels_figure(panel, panels, columns=3, height=1.75, y_label=unit_of(metric))
    return Plot(name, "Seed by seed", caption, draw, data)


def _split_points(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    """SPT minus scratch on every split of the data, a point a seed, a panel a row."""
    data = [
        {"label": row.label, "split": seed.split, "seed": seed.seed, "delta": seed.delta}
        for row in rows[:MOST]
        for seed in row.seeds
        if seed.delta is not None
    ]

    def panel(axes: Axes, row: Row, palette: Palette) -> None:
        scale = scale_of(metric)
        points = [(seed.split, scale * seed.delta) for seed in row.seeds if seed.delta is not None]
        splits = list(dict.fromkeys(seed.split for seed in row.seeds))
        if row.low is not None and row.high is not None:
            axes.axhspan(scale * row.low, scale * row.high, color=palette.spt, alpha=0.15, linewidth=0)
        axes.axhline(0, color=palette.ink, linewidth=1)
        x, y = [splits.index(split) for split, _ in points], [delta for _, delta in points]
        axes.plot(x, y, color=palette.spt, marker="s", linestyle="None", markersize=4, alpha=0.7)
        for place, split in enumerate(splits):
            if own := [delta for other, delta in points if other == split]:
                axes.plot([place - 0.3, place + 0.3], [fmean(own)] * 2, color=palette.spt, linewidth=2)
        axes.set_xlim(-0.6, len(splits) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(5))

    unit = "points" if is_percent(metric) else metric_text(metric)
    caption = (
        f"SPT - scratch in {unit} on every split of the data: a point a seed, a line the mean of a split. Band: the "
        "95 % interval of their mean, corrected for training sets that overlap (Nadeau and Bengio). Splits are "
        "numbered as the table of seeds lists them." + left_out(len(rows))
    )
    draw = panels_figure(
        panel, [(row.label, row) for row in rows[:MOST]], y_label=f"SPT − scratch, {unit}", x_label="split"
    )
    return Plot(name, "Split by split", caption, draw, data)


def _paired_scores(row: Row, arm: ArmName) -> list[float]:
    """An arm's scores at the seeds that both arms finished."""
    return [getattr(seed, arm) for seed in row.seeds if seed.delta is not None]


class Family(NamedTuple):
    """The levels of one recipe in one study."""

    label: str
    kind: str
    factor: str
    metric: str
    higher_is_better: bool
    numeric: bool  # levels are placed at their values, not side by side
    lines: list[Line]  # a line for each level and arm, by place


def _families(rows: Sequence[Row]) -> list[Family]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    copies: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        if row.factors:
            key = (row.source, row.kind, row.task, row.model, row.recipe, row.metric)
            latest = groups.get((*key, str(copies[key])), [])
            if not latest or row.factors in [each.factors for each in latest]:  # a level again: of another folder
                copies[key] += 1
            groups.setdefault((*key, str(copies[key])), []).append(row)
    families = []
    for (source, kind, task, model, recipe, metric, copy), members in groups.items():
        if len(members) < 2:
            continue
        alike = [key for key in groups if key[2:4] == (task, model)]
        label = f"{task} / {model}"
        label += f", {recipe}" if len({key[4] for key in alike}) > 1 else ""
        label += f", {source}" if len({key[0] for key in alike}) > 1 else ""
        label += f" ({copy})" if copy != "1" else ""
        places = [_place(row) for row in members]
        numeric = all(place > 0 for place in places) and len(set(places)) == len(members)
        factor = next(iter(members[0].factors))
        kind = factor if factor in LEVEL_AXIS else kind
        levels = zip(places if numeric else map(float, range(len(members))), members, strict=True)
        lines = [
            {
                "label": label,
                "factor": factor,
                "level": factors_text(row.factors).removeprefix(f"{next(iter(row.factors))} "),
                "place": place,
                "arm": ARM[arm],
                "n": row.n,
                **_mean(row, arm),
            }
            for place, row in sorted(levels, key=itemgetter(0))
            for arm in ARMS
        ]
        families.append(Family(label, kind, factor, metric, members[0].higher_is_better, numeric, lines))
    return families


def _place(row: Row) -> float:
    """Where a level lies on an axis: at its parameters, or at its number in percent; 0 where it has no place."""
    value = next(iter(row.factors.values()))
    if row.kind == "size":
        return float(row.spt_arm.parameters.get("total", 0)) if row.spt_arm else 0.0
    if row.kind == "reach":
        return float(row.seen or 0)
    if "rows" in row.factors and isinstance(value, int):
        return float(value)
    if row.kind in LEVEL_AXIS and isinstance(value, int | float) and not isinstance(value, bool):
        return 100 * float(value)
    return 0.0


def _mean(row: Row, arm: ArmName) -> dict[str, float | None]:
    """Mean of an arm's scores with its t interval, over the seeds (or splits) that both arms finished."""
    sample = _paired_scores(row, arm)
    if row.splits:
        splits = dict.fromkeys(seed.split for seed in row.seeds if seed.delta is not None)
        places = [(seed.split, getattr(seed, arm)) for seed in row.seeds if seed.delta is not None]
        sample = [fmean(score for other, score in places if other == split) for split in splits]
    interval = paired(sample, test_share=row.test_share or 0.0)
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


LEVEL_TITLES = {
    "compute": "One budget, shares of it to pretraining",
    "data": "With less data",
    "rows": "With fewer rows",
    "size": "By model size",
    "reach": "By reach",
}
LEVEL_AXIS = {  # of the kinds of study whose levels lie on an axis
    "compute": "share of the budget given to pretraining (%)",
    "data": "share of the training split (%)",
    "rows": "training rows",
    "size": "parameters",
    "reach": "steps to each side that a layer sees",
}


def _levels(kind: str, name: str, metric: str, families: Sequence[Family]) -> Plot:
    """Scores of both arms along what a study varies, with intervals: shares, fractions of data, sizes, reaches."""
    shown = families[:MOST]
    data = [line for family in shown for line in family.lines]
    caption = (
        f"Mean {unit_of(metric)} of the seeds that both arms finished, with the 95 % t interval of each mean. "
        "Intervals of means are wider than those of paired differences: whether arms differ is decided in the tables."
    ) + left_out(len(families))
    x_label = LEVEL_AXIS.get(kind, "") if all(family.numeric for family in shown) else families[0].factor
    draw = panels_figure(
        _level_panel, [(family.label, family) for family in shown], y_label=unit_of(metric), x_label=x_label
    )
    return Plot(name, LEVEL_TITLES.get(kind, f"By {families[0].factor}"), caption, draw, data)


def _level_panel(axes: Axes, family: Family, palette: Palette) -> None:
    scale = scale_of(family.metric)
    scratch = [line for line in family.lines if line["arm"] == ARM["scratch"]]
    for arm, style in _arm_styles(palette).items():
        lines = [line for line in family.lines if line["arm"] == arm]
        if family.kind == "compute" and family.numeric:  # a share of zero is training from scratch
            lines = [scratch[0] | {"place": 0}, *lines]
        x, y = [line["place"] for line in lines], [scale * line["mean"] for line in lines]
        low, high = (
            [scale * (line["mean"] if line[end] is None else line[end]) for line in lines] for end in ("low", "high")
        )
        axes.plot(x, y, label=arm, **style | ({} if family.numeric else {"linestyle": "-"}))
        if family.numeric:
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        else:
            axes.vlines(x, low, high, color=style["color"], linewidth=1.2)
    if not family.numeric:
        axes.set_xticks(range(len(scratch)), [wrapped(line["level"], 12) for line in scratch], fontsize=7)
        axes.tick_params(axis="x", rotation=90 if len(scratch) > 3 else 0)
        axes.margins(x=0.2)
    elif family.kind in ("data", "rows", "size", "reach"):
        axes.set_xscale("log", base=2 if family.kind == "reach" else 10)
        places = _apart([line["place"] for line in scratch])
        names = {line["place"]: line["level"] if family.kind == "reach" else _short(line["place"]) for line in scratch}
        axes.set_xticks(places, [names[place] for place in places], fontsize=7.5)
        axes.minorticks_off()
    if is_percent(family.metric):  # an interval may exceed the range of scores
        low_end, high_end = axes.get_ylim()
        axes.set_ylim(max(low_end, -2), min(high_end, 102))


def _gains(kind: str, name: str, metric: str, families: Sequence[Family]) -> Plot:
    """What SPT gains relative to scratch, over sizes of the training split (SPT, Figure 3, right); a line a recipe."""
    shown = [family for family in families if family.numeric][:MOST]
    data = [line for family in shown for line in _relative_gains(family)]
    caption = (
        "100 × improvement / |scratch|, of the means over the seeds that both arms finished, in percent of the score "
        f"from scratch; above 0 SPT is better. Test {metric}; no interval: the tables decide." + left_out(len(families))
    )

    def panel(axes: Axes, lines: Sequence[Line], palette: Palette) -> None:
        for i, (label, entry) in enumerate(legend_entries(line["label"] for line in lines).items()):
            mine = [line for line in lines if line["label"] == label]
            x, y = [line["place"] for line in mine], [line["gain"] for line in mine]
            axes.plot(x, y, label=entry, **palette.line(i))
        axes.axhline(0, color=palette.faint, linewidth=0.8)
        axes.set_xscale("log")
        places = _apart(sorted({line["place"] for line in lines}))
        axes.set_xticks(places, [_short(place) for place in places], fontsize=7.5)
        axes.minorticks_off()

    draw = panels_figure(
        panel, [("", data)], y_label="relative gain (%)", x_label=LEVEL_AXIS[kind], columns=1, height=2.4
    )
    return Plot(name, "Relative gain", caption, draw, data)


def _relative_gains(family: Family) -> Iterator[Line]:
    """A line a level; where scratch scores 0 there is no such gain."""
    sign = 1 if family.higher_is_better else -1
    for scratch, spt in zip(family.lines[::2], family.lines[1::2], strict=True):
        if before := scratch["mean"]:
            gain = sign * 100 * (spt["mean"] - before) / abs(before)
            shared = {name: scratch[name] for name in ("label", "factor", "level", "place", "n")}
            yield {**shared, "scratch": before, "spt": spt["mean"], "gain": gain}


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


def _compute(name: str, metric: str, rows: Sequence[Row]) -> Plot:
    """Scores against what training cost, both arms of every row; a panel a task."""
    names = _point_names(rows)
    data: list[Line] = [
        {
            "task": row.task,
            "label": row.label,
            "model": names[row.label],
            "arm": ARM[arm],
            "flops": cost.total.flops,
            **_mean(row, arm),
            "n": row.n,
        }
        for row in rows
        for arm, cost in zip(ARMS, (row.scratch_arm, row.spt_arm), strict=True)
        if cost is not None
    ]
    tasks = list(dict.fromkeys(row.task for row in rows))
    models = list(dict.fromkeys(names.values()))
    panels = [
        (task if len(tasks) > 1 else "", [line for line in data if line["task"] == task]) for task in tasks[:MOST]
    ]
    caption = (
        f"Mean {unit_of(metric)} with its 95 % t interval against the training operations of one run, pretraining "
        "included (forward and backward, analytic). Hollow: scratch; filled: SPT. "
        f"{'Up' if rows[0].higher_is_better else 'Down'} and to the left is better."
        + left_out(len(tasks), "tasks")
        + (" Marks repeat after eight models." if len(models) > len(MARKS) else "")
    )
    panel = partial(_compute_panel, models=models, metric=metric)
    draw = panels_figure(panel, panels, height=2.4, y_label=unit_of(metric), x_label="training FLOPs of one run")
    return Plot(name, "Score against compute", caption, draw, data)


def _point_names(rows: Sequence[Row]) -> dict[str, str]:
    """By label: the model or the variant, with its recipe where several recipes of a task have it."""
    names = {
        row.label: str(row.factors.get("variant", "") if row.kind == "variants" else "") or row.model for row in rows
    }
    recipes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        recipes.setdefault((row.task, names[row.label]), set()).add(row.recipe)
    return {
        row.label: f"{name} ({row.recipe})" if len(recipes[row.task, name]) > 1 else name
        for row in rows
        for name in (names[row.label],)
    }


def _compute_panel(axes: Axes, lines: Sequence[Line], palette: Palette, *, models: Sequence[str], metric: str) -> None:
    scale = scale_of(metric)
    entries = legend_entries(f"{model}, {arm}" for model in models for arm in ARM.values())
    colours = {ARM["scratch"]: palette.scratch, ARM["spt"]: palette.spt}
    points = dict.fromkeys(itemgetter("model", "arm", "flops", "mean", "low", "high")(line) for line in lines)
    for model, arm, flops, mean, low, high in sorted(points, key=lambda point: models.index(point[0])):
        if low is not None and high is not None:
            axes.vlines([flops], scale * low, scale * high, color=colours[arm], linewidth=1)
        axes.plot(
            [flops],
            [scale * mean],
            MARKS[models.index(model) % len(MARKS)],
            color=colours[arm],
            markerfacecolor=palette.spt if arm == ARM["spt"] else palette.paper,
            label=entries[f"{model}, {arm}"],
        )
    costs = [line["flops"] for line in lines]
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
    if is_percent(metric):  # an interval may exceed the range of scores
        low_end, high_end = axes.get_ylim()
        axes.set_ylim(max(low_end, -2), min(high_end, 102))


def _learning(report: Report) -> Iterator[Plot]:
    """Validation scores, and accuracy on training batches, by share of each stage's steps (SPT, Figure 5)."""
    labels: dict[str, list[Curve]] = {}
    for curve in report.curves:
        labels.setdefault(curve.label, []).append(curve)
    for stem, title, stages, what in (
        (
            "learning",
            "While training the task",
            ("finetuning", "scratch"),
            "finetuning after self-pretraining, and scratch",
        ),
        ("pretraining", "While pretraining", ("pretraining",), "the pretraining runs"),
    ):
        every = [(label, [curve for curve in labels[label] if curve.stage in stages]) for label in islice(labels, MOST)]
        panels = [(label, curves) for label, curves in every if curves]
        for name, metric, group in by_metric(stem, panels, lambda panel: panel[1][0].metric):
            training = any(curve.training for _, curves in group for curve in curves)
            data = [
                {
                    "label": label,
                    "stage": curve.stage,
                    "seed": curve.seed,
                    "split": curve.split,
                    "step": step,
                    "share": round(share, 4),
                    metric: value,
                    **({"training accuracy": curve.training.get(step)} if training else {}),
                }
                for label, curves in group
                for curve in curves
                for step, share, value in zip(curve.steps, curve.shares, curve.values, strict=True)
            ]
            unit = f"validation {metric_text(metric)}"
            caption = (
                f"{unit.capitalize()} of {what}, against the share of the stage's own steps, so lines that end "
                "together took different numbers of steps. Thick: mean over the seeds that have a value there; thin: "
                "every seed."
                + " Dotted: mean accuracy on the batches trained on since the point before, dropout on."
                * training
            )
            caption += seeds_left_out(
                max(Counter(curve.stage for curve in curves).values(), default=0) for _, curves in group
            ) + left_out(len(report.rows))
            draw = panels_figure(
                _learning_panel, group, height=2.0, y_label=unit, x_label="share of the stage's steps (%)"
            )
            yield Plot(name, title, caption, draw, data)


def _learning_panel(axes: Axes, curves: Sequence[Curve], palette: Palette) -> None:
    scale = scale_of(curves[0].metric)
    colours = {"scratch": palette.scratch, "finetuning": palette.spt, "pretraining": palette.pretrain}
    for stage, colour in colours.items():
        chosen = [curve for curve in curves if curve.stage == stage]
        for curve in chosen[:MOST_SEEDS]:
            x, y = [100 * share for share in curve.shares], [scale * value for value in curve.values]
            axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
        scored = [list(zip(curve.shares, curve.values, strict=True)) for curve in chosen]
        trained = [[(step / curve.planned, value) for step, value in curve.training.items()] for curve in chosen]
        for points, style, label in ((scored, DASHES[stage == "scratch"], stage), (trained, ":", f"{stage}, training")):
            if means := _mean_curve(points):
                x, y = [100 * share for share in means], [scale * value for value in means.values()]
                axes.plot(x, y, color=colour, linestyle=style, label=label)
    axes.set_xlim(0, 102)


def _mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> dict[float, float]:
    """Mean over runs, given as (share, value), at every share where most of them have a value."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for share, value in curve:
            at.setdefault(round(share, 6), []).append(value)
    return {share: fmean(values) for share, values in sorted(at.items()) if 2 * len(values) > len(curves)}


def _expected(name: str, metric: str, searches: Sequence[SearchResult]) -> Plot:
    """Expected best validation score by number of settings tried, both arms (Dodge et al. 2019, Tang et al. 2020)."""
    scale, shown = scale_of(metric), searches[:MOST]
    labels = Counter(search.label for search in shown)
    data: list[Line] = [
        {
            "label": search.label + (f", {search.study}" if labels[search.label] > 1 else ""),
            "arm": arm,
            "settings": best.settings,
            "value": best.value,
        }
        for search in shown
        for arm, result in ((ARM["scratch"], search.scratch), (ARM["spt"], search.spt))
        for best in result.expected
    ]

    def panel(axes: Axes, label: str, palette: Palette) -> None:
        for arm, style in _arm_styles(palette).items():
            lines = [line for line in data if (line["label"], line["arm"]) == (label, arm)]
            axes.plot(
                [line["settings"] for line in lines], [scale * line["value"] for line in lines], label=arm, **style
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    unit = f"validation {metric_text(metric)}"
    caption = f"Expected best {unit} of this many settings drawn at random from those that an arm tried."
    panels = [(label, label) for label in dict.fromkeys(line["label"] for line in data)]
    draw = panels_figure(panel, panels, y_label=unit, x_label="settings tried")
    return Plot(name, "What a search finds by its size", caption, draw, data)
