"""`spt data`: the data of a recipe's task."""

from pathlib import Path
from typing import Annotated

import typer

from spt.cli.guard import command
from spt.cli.options import DataOption, DebugOption, JsonOption, WorkersOption
from spt.cli.output import notify, print_json, show

data_app = typer.Typer(help="Prepare and check the data of a recipe's task.", no_args_is_help=True)

TaskArgument = Annotated[
    list[str], typer.Argument(metavar="RECIPE|TASK [a.b=c …]", help="A recipe or a task, and values to change.")
]


@command(data_app, "prepare")
def data_prepare(
    arguments: TaskArgument,
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Download from the Hugging Face hub instead of the official address.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="SPT_DATA_DIR", help="Folder for raw data sets; downloads go here."),
    ] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Download a task's files if they are missing, and prepare its splits; for a recipe, download its model's weights
    too.

    No other command downloads anything.
    """
    from spt.data.prepare import fetch_weights, parts_from_arguments, prepare

    task, model = parts_from_arguments(arguments)
    if model is not None:
        fetch_weights(model)
    summary = prepare(task, from_hub)
    if as_json:
        print_json(summary)
        return
    for note in summary["notes"]:
        notify(f"note: {note}")
    rows = ", ".join(f"{name} {count:,}" for name, count in summary["rows"].items())
    show(f"{summary['task']}: {rows} rows in {summary['folder']} (data {summary['data']})")


@command(data_app, "check")
def data_check(
    arguments: TaskArgument,
    data_dir: DataOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a task's data: files, rows, classes, lengths, duplicates, trivial scores, and anything odd.

    Reads every prepared row.
    """
    from spt.data.prepare import task_from_arguments
    from spt.data.summary import render, summarise

    summary = summarise(task_from_arguments(arguments))
    if as_json:
        print_json(summary)
    else:
        show(render(summary))
