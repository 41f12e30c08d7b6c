"""`spt report`: what finished runs say, from their files alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spt.cli.guard import command
from spt.cli.options import DebugOption, FullOption, JsonOption
from spt.cli.output import console, notify, print_json
from spt.errors import UsageError

if TYPE_CHECKING:
    from spt.api import Report

app = typer.Typer()


@command(app)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Comparison folders, run folders, or a folder of them.")
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Folder for the report's files.", show_default="the study, if it is one"
        ),
    ] = None,
    full: FullOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the report of finished runs, from their files alone: HTML, Markdown, LaTeX, CSV, JSON, and every figure.

    Figures are SVG and PNG, with their numbers as CSV.
    """
    if out is not None and not out.strip():
        raise UsageError("--out names no folder")
    from spt.api import read_report
    from spt.runs.plan import PLAN

    built = read_report(*folders)
    folder = None if out is None else Path(out)
    if folder is None and len(folders) == 1 and (folders[0] / PLAN).is_file():
        folder = folders[0]
    paths: tuple[Path, ...] = ()
    if folder is not None:
        from spt.report.write import write_report

        paths = write_report(built, folder, with_figures=True)
    show_report(built, as_json, full)
    if folder is not None:
        notify_written(folder, figures=any(path.parent != folder for path in paths))


def show_report(report: "Report", as_json: bool, full: bool) -> None:
    from spt.report.machine import to_json
    from spt.report.terminal import terminal

    if as_json:
        print_json(to_json(report))
    else:
        console().print(terminal(report, full))


def notify_written(folder: Path, figures: bool = False) -> None:
    notify(f"report: {folder / 'report.html'}, .md, .tex, .csv, .json{' and figures' if figures else ''}")
