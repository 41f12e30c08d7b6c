"""The picture of the architecture, as SVG: boxes and arrows at fixed places, readable in light and dark."""

from html import escape
from typing import NamedTuple


class Box(NamedTuple):
    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...] = ()
    file: bool = False  # something on the disk

    @property
    def height(self) -> int:
        return 34 + 17 * len(self.lines)


BOXES = {
    "recipe": Box(20, 20, 170, "recipe", ("recipes/*.yaml: a task,", "a model, two stages"), file=True),
    "study": Box(20, 130, 170, "study", ("recipes, arms, seeds,", "what is varied"), file=True),
    "config": Box(240, 20, 150, "config", ("schema, overrides,", "jobs and their keys")),
    "studies": Box(240, 130, 150, "studies", ("from a study", "to its runs")),
    "execution": Box(440, 130, 160, "execution", ("here, workers, Slurm,", "any scheduler")),
    "tasks": Box(20, 262, 170, "tasks", ("tasks/*.py:", "rows as arrays"), file=True),
    "models": Box(20, 362, 170, "models", ("models/*.py:", "one paper a file"), file=True),
    "data": Box(240, 262, 150, "data", ("prepared splits,", "fingerprints, batches")),
    "training": Box(440, 262, 160, "training", ("stage → loop → step;", "network, objectives,", "checkpoints")),
    "runs": Box(650, 262, 170, "run folders", ("recipe, metrics,", "checkpoints, predictions,", "result"), file=True),
    "report": Box(650, 130, 170, "report", ("pairs, statistics, verdicts;", "files alone, no PyTorch")),
    "pages": Box(650, 20, 170, "page, tables, JSON", ("HTML, Markdown, LaTeX,", "CSV, figures"), file=True),
    "inference": Box(650, 372, 170, "analysis, inference", ("kernels, attention, errors;", "predict, embed, export")),
}
ARROWS = (
    ("recipe", "config"), ("study", "studies"), ("config", "studies"), ("studies", "execution"),
    ("execution", "training"), ("tasks", "data"), ("data", "training"), ("models", "training"),
    ("training", "runs"), ("runs", "report"), ("report", "pages"), ("runs", "inference"),
)  # fmt: skip
STYLE = """
  svg { color: #24292f; background: #ffffff }
  @media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }
  rect { fill: none; stroke: currentColor; stroke-width: 1.2 }
  .file rect { stroke-dasharray: 5 3 }
  text { font: 12px system-ui, sans-serif; fill: currentColor }
  .title { font-weight: 600; font-size: 14px }
  path { fill: none; stroke: currentColor; stroke-width: 1.2; marker-end: url(#head) }
  marker path { fill: currentColor; stroke: none; marker-end: none }
"""


def architecture_figure() -> str:
    parts = [_box(box) for box in BOXES.values()] + [_arrow(BOXES[start], BOXES[end]) for start, end in ARROWS]
    marker = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker>'
    )
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 460" role="img" '
        'aria-label="From recipes, tasks and models through the rooms of spt to run folders and reports">\n'
        "<!-- Made by make docs; edit docs/architecture_figure.py. -->\n"
        f"<style>{STYLE}</style>\n<defs>{marker}</defs>\n{body}\n"
        '<text x="20" y="450">dashed: files; solid: a folder of spt/</text>\n</svg>\n'
    )


def _box(box: Box) -> str:
    kind = ' class="file"' if box.file else ""
    lines = "".join(
        f'<text x="{box.x + 12}" y="{box.y + 42 + 17 * i}">{escape(line)}</text>' for i, line in enumerate(box.lines)
    )
    return (
        f'<g{kind}><rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
        f'<text class="title" x="{box.x + 12}" y="{box.y + 22}">{box.title}</text>{lines}</g>'
    )


def _arrow(start: Box, end: Box) -> str:
    """Straight, from the side that faces the other box: sideways where there is room between them, else up or down."""
    if end.x > start.x + start.width:
        x1, y1, x2 = start.x + start.width, start.y + start.height // 2, end.x
        y2 = min(max(y1, end.y + 15), end.y + end.height - 15)
    elif end.y > start.y:
        x1, y1, x2, y2 = start.x + start.width // 2, start.y + start.height, end.x + end.width // 2, end.y
    else:
        x1, y1, x2, y2 = start.x + start.width // 2, start.y, end.x + end.width // 2, end.y + end.height
    return f'<path d="M{x1} {y1} L{x2} {y2}"/>'
