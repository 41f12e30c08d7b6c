"""The style of every figure, and how it is saved: SVG (for pages and papers), PNG, and its numbers as CSV.

Figures are matplotlib's, made without pyplot. In an SVG text stays text, and colours are CSS variables, so a figure in
a page follows the page's light or dark scheme, and a file follows its viewer's. The same figure always gives the same
bytes.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.style import context

from spt.errors import UsageError
from spt.report.format import csv_text
from spt.runs.files import write_bytes, write_text, writing

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")  # for series: nothing is conveyed by colour alone
FONT = "'DejaVu Sans', sans-serif"
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)))


class Palette(NamedTuple):
    """Colours by purpose. Each has a contrast of at least 3 with its paper, ink and faint of at least 4.5."""

    ink: str  # text
    faint: str  # axes, notes
    grid: str
    paper: str
    scratch: str  # the two arms and the first stage, the same everywhere
    spt: str
    pretrain: str
    series: tuple[str, ...]  # everything else that is distinguished

    def line(self, number: int) -> dict[str, Any]:
        """Colour, mark and dash of a series. Colours return after eight, with another mark and dash."""
        round_, place = divmod(number, len(self.series))
        mark, dash = MARKS[(place + round_) % len(MARKS)], DASHES[(place + 3 * round_) % len(DASHES)]
        return {"color": self.series[place], "marker": mark, "linestyle": dash}


LIGHT = Palette(
    ink="#1b1f24",
    faint="#59636e",
    grid="#dfe3e8",
    paper="#ffffff",
    scratch="#b4541a",
    spt="#1a64b4",
    pretrain="#4f7a1f",
    series=("#1a64b4", "#b4541a", "#4f7a1f", "#8a4fa8", "#a8434f", "#1a7a82", "#6b5a2a", "#59636e"),
)

DARK = Palette(
    ink="#e6e9ee",
    faint="#9aa4b1",
    grid="#343b45",
    paper="#14181d",
    scratch="#f0975a",
    spt="#6cb0f5",
    pretrain="#a3cc6a",
    series=("#6cb0f5", "#f0975a", "#a3cc6a", "#c99be0", "#ee8a94", "#62c4cb", "#d2bd80", "#9aa4b1"),
)

# Colours that no figure uses: in an SVG each is replaced by the variable that it stands for.
_STAND_IN = Palette._make(
    [
        *(f"#0101{number:02x}" for number in range(len(Palette._fields) - 1)),
        tuple(f"#0102{number:02x}" for number in range(len(LIGHT.series))),
    ]
)


def names() -> dict[str, tuple[str, str, str]]:
    """Stand-in, light and dark value of every colour, by its CSS variable."""
    single = {name: (getattr(_STAND_IN, name), getattr(LIGHT, name), getattr(DARK, name)) for name in Palette._fields}
    series = single.pop("series")
    return single | {f"series-{number}": trio for number, trio in enumerate(zip(*series, strict=True))}


class Plot(NamedTuple):
    """A figure and what is in it."""

    name: str  # of its files: lower case, digits, hyphens
    title: str
    caption: str  # describes the figure, also for readers who cannot see it
    draw: Callable[[Palette], Figure]  # called inside the style of all figures
    data: Sequence[Mapping[str, Any]]  # every number that is drawn, one mapping a line; all have the same keys


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def svg(plot: Plot) -> str:
    """The figure as SVG with a title and a description."""
    file = io.StringIO()
    with _styled(_STAND_IN):
        plot.draw(_STAND_IN).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, count=1, flags=re.S)
    text = re.sub(r"<[^>]+>", lambda tag: _own(tag[0], plot.name), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    title, described = f"{plot.name}-title", f"{plot.name}-desc"
    description = (
        f'<title id="{title}">{escape(plot.title)}</title><desc id="{described}">{escape(plot.caption)}</desc>'
        + _style()
    )
    opening = f'<svg role="img" aria-labelledby="{title} {described}" '
    return re.sub(r"<svg ([^>]*)>", lambda match: f"{opening}{match[1]}>{description}", text, count=1)


def inline(drawing: str) -> str:
    """What `svg` has drawn, for a page, which has the variables of `css`."""
    return drawing.replace(_style(), "", 1)


def _style() -> str:
    return f"<style>{css()}text{{font-family:{FONT}}}</style>"


def _own(tag: str, name: str) -> str:
    """A tag with variables for colours, visible decimals only, and ids unique to its figure: a page has several."""
    for variable, (stand_in, _, _) in names().items():
        tag = tag.replace(stand_in, f"var(--{variable})")
    tag = re.sub(r' (?:d|x|y|points|transform)="[^"]*"', lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0]), tag)
    tag = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", tag)
    return tag.replace(f"font-family: {FONT}; ", "")


def css() -> str:
    """The colours as CSS variables, light and dark; on paper always light."""
    light, dark = ("".join(f"--{name}:{trio[shade]};" for name, trio in names().items()) for shade in (1, 2))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def png(plot: Plot, dpi: int = 144) -> bytes:
    """The figure as PNG, on white."""
    file = io.BytesIO()
    with _styled(LIGHT):
        plot.draw(LIGHT).savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def save(plot: Plot, folder: Path, drawing: str = "") -> tuple[Path, ...]:
    """Write NAME.svg, NAME.png and NAME.csv; each is replaced as a whole. The SVG is drawn unless it has been."""
    if not re.fullmatch(r"[a-z0-9-]+", plot.name):
        raise UsageError(f"{plot.name!r} cannot name the files of a figure")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"{plot.name}{suffix}" for suffix in (".svg", ".png", ".csv"))
    write_text(paths[0], drawing or svg(plot))
    write_bytes(paths[1], png(plot))
    write_text(paths[2], csv_text(plot.data))
    return paths


@contextmanager
def _styled(palette: Palette) -> Iterator[None]:
    """The project's style, whatever the user's matplotlibrc says. Glyphs missing from the font stay text in an SVG."""
    style = {
        "text.parse_math": False,  # a name may contain a $
        "svg.fonttype": "none",
        "svg.hashsalt": "spt",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "text.color": palette.ink,
        "axes.edgecolor": palette.faint,
        "axes.labelcolor": palette.ink,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.facecolor": palette.paper,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": palette.grid,
        "grid.linewidth": 0.8,
        "xtick.color": palette.faint,
        "ytick.color": palette.faint,
        "xtick.labelcolor": palette.ink,
        "ytick.labelcolor": palette.ink,
        "figure.facecolor": palette.paper,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "errorbar.capsize": 2.5,
    }
    with context(style, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        yield
