"""A report as files: for people, for papers, for programs."""

import json
from pathlib import Path

from spt import curves, drawing, figures, page, render
from spt.latex import latex
from spt.report import Report
from spt.run import write_text, writing

FIGURES = "figures"


def write(report: Report, folder: Path, with_figures: bool = False) -> tuple[Path, ...]:
    """Write report.html, .md, .tex, .csv and .json, seeds.csv, and the tables that have lines: items, searches, curves.

    With figures, or where the folder has figures of an earlier report: every figure of the page also as
    figures/NAME.svg, .png and .csv. Each file is replaced as a whole, and what an earlier report had more is removed.
    """
    old = [path for path in (folder / FIGURES).glob("*.*") if path.stem.startswith(figures.STEMS)]
    with_figures = with_figures or bool(old)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.drawings(report)
    texts = {
        "report.html": page.page(report, drawn),
        "report.md": render.markdown(report, [(one.name, one.title) for one in drawn] if with_figures else []),
        "report.tex": latex(report),
        "report.csv": render.rows_csv(report),
        "seeds.csv": render.seeds_csv(report),
        "items.csv": render.items_csv(report),
        "searches.csv": render.searches_csv(report),
        "curves.csv": curves.to_csv(report.curves),
        "report.json": json.dumps(render.to_json(report), indent=2, allow_nan=False) + "\n",
    }
    for name in ("items.csv", "searches.csv", "curves.csv"):
        if not texts[name]:
            del texts[name]
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)  # of an earlier report
    for name, text in texts.items():
        write_text(folder / name, text)
    paths = [folder / name for name in texts]
    if with_figures:
        paths += [path for one in drawn for path in drawing.save(one, folder / FIGURES)]
    for path in set(old) - set(paths):
        with writing(path):
            path.unlink(missing_ok=True)
    return tuple(paths)
