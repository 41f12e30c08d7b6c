"""`spt results`: what was really obtained, beside what the papers print."""

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from spt.cli.guard import command
from spt.cli.options import DebugOption, JsonOption
from spt.cli.output import console, notify, print_json
from spt.errors import UsageError

app = typer.Typer()


@command(app)
def results(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD…]", help="Only those that contain all of these words: pendulum s5."),
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option(
            "--add", metavar="RUNS", help="Add the finished runs of a study's folder, or of a folder of runs."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="A folder of results.",
            show_default="those that come with spt; results, for --add",
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help="With --add: the name of a table of your own, for runs that are not a paper's cells.",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show every cell of studies without a published number, not their names.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show published numbers beside those obtained: means over seeds, 95 % intervals, and whether runs are complete."""
    from spt.report.results import add_results, read_results, select_results
    from spt.studies.status import plain_table

    if table is not None and (add is None or not table.strip()):
        raise UsageError("--table names your own table of the results that --add takes")
    if add is not None and words:
        raise UsageError(f"{' '.join(words)}: --add takes results and shows them all; leave the words out")
    if add is not None:
        to = folder or Path("results")
        found = add_results(add, to, table)
        notify(f"wrote {len(found)} files in {to}; spt results --folder {to} shows them all")
        if any(run.commit is None or run.commit.endswith("+") for result in found for run in result.runs):
            notify(
                "note: some of these runs were not made from a clean commit of a clone, so that nobody can have their "
                "code again; a result for everybody needs one"
            )
    else:
        found = read_results(folder)
    shown = select_results(found, words or ())
    if words and found and not shown:
        raise UsageError(f"no result has {' and '.join(map(repr, words))} in its table, row, column or recipe")
    if as_json:
        print_json([result.summary() for result in shown])
    elif not shown:
        notify("no results are stored here yet; spt results --add RUNS takes those of finished runs")
    else:
        whole = full or bool(words) or add is not None
        by_source = sorted(shown, key=lambda result: result.source)
        cells = [(result.source, result.summary()) for result in by_source if whole or result.paper is not None]
        for source, rows in groupby(cells, key=lambda cell: cell[0]):
            console().print(source, style="bold", highlight=False, markup=False)
            console().print(_table([row for _, row in rows]))
        if names := [] if whole else [result.source for result in by_source if result.paper is None]:
            console().print("studies without published numbers", style="bold", highlight=False, markup=False)
            console().print(plain_table(("study", "cells"), [(name, str(n)) for name, n in Counter(names).items()]))
            notify("spt results NAME shows one of them, --full all")


def _table(rows: list[dict[str, Any]]) -> Any:
    """Of one source. No column for published numbers where nothing is published."""
    from rich.table import Table
    from rich.text import Text

    from spt.report.format import score_interval_text, score_text

    printed, several = any(row["published"] is not None for row in rows), len({row["metric"] for row in rows}) > 1
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("row and column", overflow="fold")
    if several:
        table.add_column("metric")
    for name in (*(["published"] if printed else []), "ours", "95 % interval", "runs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        metric = row["metric"]
        runs = [f"{row['n']} of {row['planned']}"]
        runs += [f"{row['failed']} failed"] * bool(row["failed"]) + ["shortened"] * row["shortened"]
        table.add_row(
            Text(f"{row['row']}: {row['column']}{'' if row['arm'] == 'scratch' else ', SPT'}"),
            *([metric] if several else []),
            *([score_text(row["published"], metric)] if printed else []),
            score_text(row["ours"], metric),
            score_interval_text(row["low"], row["high"], metric),
            ", ".join(runs),
        )
    return table
