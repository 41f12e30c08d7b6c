"""What figures share: panels in a grid under one legend, and texts that fit."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from operator import attrgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spt.report.format import is_percent, metric_text, shorten, slug
from spt.report.plotting import Palette, new_figure

WIDTH = 4.7  # inches: about 450 pixels
MOST = 12  # panels of one figure; the tables have the rest
MOST_SEEDS = 100  # drawn in a panel one by one; the figure's CSV file has the rest
Line = dict[str, Any]  # of a figure's CSV file


def by_metric(
    stem: str, items: Sequence[Any], metric_of: Callable[[Any], str] = attrgetter("metric")
) -> Iterator[tuple[str, str, list[Any]]]:
    """The name of a figure, its metric and its items, for each metric."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(metric_of(item), []).append(item)
    for metric, members in groups.items():
        yield (stem if len(groups) == 1 else f"{stem}-{slug(metric)}"), metric, members


def scale_of(metric: str) -> float:
    return 100.0 if is_percent(metric) else 1.0


def unit_of(metric: str) -> str:
    return f"test {metric_text(metric)}"


def wrapped(text: str, most: int) -> str:
    """A row's label, in up to three lines that fit above a panel."""
    return "\n".join(textwrap.wrap(printable(text), most, max_lines=3, placeholder=" …", break_long_words=True)) or " "


def printable(text: str) -> str:
    """Without control characters, which an SVG cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def left_out(count: int, what: str = "rows") -> str:
    return f" The first {MOST} of {count} {what}." if count > MOST else ""


def seeds_left_out(counts: Iterable[int]) -> str:
    """Of panels with so many seeds each."""
    most = max(counts, default=0)
    return f" Of up to {most:,} seeds a panel the first {MOST_SEEDS} are drawn." if most > MOST_SEEDS else ""


def panels_figure(
    draw_panel: Callable[[Axes, Any, Palette], None],
    panels: Sequence[tuple[str, Any]],
    *,
    y_label: str,
    x_label: str = "",
    columns: int = 2,
    height: float = 2.1,
) -> Callable[[Palette], Figure]:
    """One panel per title and item, in a grid, under one legend of everything that has a label."""
    title_width, title_size = (26, 8.0) if columns == 2 else (20, 7.5)
    columns = min(columns, len(panels)) or 1
    lines = math.ceil(len(panels) / columns)

    def draw(palette: Palette) -> Figure:
        figure = new_figure(WIDTH if columns > 1 else 0.75 * WIDTH, height * lines + 0.1)
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, (title, item) in zip(grid.flat, panels, strict=False):
            draw_panel(axes, item, palette)
            if title:
                axes.set_title(wrapped(title, title_width), fontsize=title_size)
        for axes in islice(grid.flat, len(panels), None):
            axes.remove()
        figure.supylabel(y_label, fontsize=9)
        if x_label:
            figure.supxlabel(x_label, fontsize=9)
        entries = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
        if handles := {label: handle for panel in entries for handle, label in panel}:
            across = 3 if max(map(len, handles)) < 16 else 2
            figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(handles) / across))
            figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=across, fontsize=8)
        return figure

    return draw


def legend_entries(texts: Iterable[str]) -> dict[str, str]:
    """One legend entry for each text; those that are alike once shortened are numbered."""
    texts_of: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        short = shorten(printable(text), 30)
        short = f" {short}" if short.startswith("_") else short  # matplotlib omits what begins with an underscore
        numbered = (f"{short} ({i})" for i in count(2))
        texts_of[next(entry for entry in chain([short], numbered) if entry not in texts_of)] = text
    return {text: entry for entry, text in texts_of.items()}
