"""A report as files: for people, for papers, for programs."""

import json
from pathlib import Path

from spt.report import figures, html, machine, markdown, plotting
from spt.report.collect import Report, Table
from spt.report.latex import latex
from spt.runs.files import remove_leftovers, write_text, writing

FIGURES = "figures"
OPTIONAL: dict[Table, str] = {
    "items": "items.csv",
    "models": "models.csv",
    "baselines": "baselines.csv",
    "metrics": "metrics.csv",
    "groups": "groups.csv",
    "searches": "searches.csv",
    "curves": "curves.csv",
}


def write_report(report: Report, folder: Path, with_figures: bool = False) -> tuple[Path, ...]:
    """Write report.html, .md, .tex, .csv, .json, seeds.csv, and a CSV file of each of `OPTIONAL` that has lines.

    With figures, or where the folder has figures of an earlier report: every figure of the page also as
    figures/NAME.svg, .png and .csv. Files are replaced atomically, and files left from an earlier report are removed;
    where there was none, nothing is, for then they are the user's own.
    """
    earlier = (folder / "report.json").is_file()
    drawn = [path for path in (folder / FIGURES).glob("*.svg") if path.stem.startswith(figures.STEMS) and earlier]
    each = [[path.with_suffix(suffix) for suffix in (".svg", ".png", ".csv")] for path in drawn]
    old = [path for files in each if all(file.is_file() for file in files) for path in files]
    with_figures = with_figures or bool(drawn)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    plots = figures.all_figures(report)
    drawings = {plot.name: plotting.svg(plot) for plot in plots}
    texts = {
        "report.html": html.page(report, plots, drawings),
        "report.md": markdown.markdown(report, [(plot.name, plot.title) for plot in plots] if with_figures else []),
        "report.tex": latex(report),
        "report.csv": machine.to_csv(report, "rows"),
        "seeds.csv": machine.to_csv(report, "seeds"),
        **{f"{table}.csv": text for table in OPTIONAL if (text := machine.to_csv(report, table))},
        "report.json": json.dumps(machine.to_json(report), indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    paths = [folder / name for name in texts]
    if with_figures:
        paths += [path for plot in plots for path in plotting.save(plot, folder / FIGURES, drawings[plot.name])]
    tables = [folder / f"{table}.csv" for table in OPTIONAL] if earlier else []
    for path in {*old, *tables} - set(paths):
        with writing(path):
            path.unlink(missing_ok=True)
    return tuple(paths)
