"""`spt show`, `spt inspect` and `spt diff`: a look inside recipes and finished runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from spt.cli.guard import command
from spt.cli.options import (
    DataOption,
    DebugOption,
    JsonOption,
    MicroOption,
    RecipeArgument,
    SmokeFullOption,
    SmokeOption,
    one_recipe,
    smoke_size,
)
from spt.cli.output import console, notify, print_json
from spt.errors import UsageError

app = typer.Typer()
inspect_app = typer.Typer(help="Look inside finished runs: kernels, attention, errors.", no_args_is_help=True)


@command(app)
def show(
    arguments: RecipeArgument,
    smoke: SmokeOption = False,
    smoke_full: SmokeFullOption = False,
    micro_batch: MicroOption = None,
    data_dir: DataOption = None,
    no_data: Annotated[
        bool,
        typer.Option(
            "--no-data",
            help="Only what needs no data, for a paper's recipe: values, parameters, how long each arm trains.",
        ),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also show defaults, operations by kind, and the optimiser's parameter groups."),
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a recipe would do: its values and where they come from, parameters, steps, operations, memory. Trains
    nothing.
    """
    recipe = one_recipe(arguments, smoke_size(smoke, smoke_full), data=not no_data)
    from spt.analysis.resolved import overview_without_data, render, resolve_overview

    result = overview_without_data(recipe) if no_data else resolve_overview(recipe, micro_batch)
    if as_json:
        print_json(result)
    else:
        console().print(render(result, everything))


FiguresOption = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Folder for the figure.", show_default="RUN/figures")
]


@command(inspect_app)
def kernels(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage.")],
    lags: Annotated[
        int | None, typer.Option("--lags", min=1, help="Only the first lags.", show_default="the longest sequence")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Plot values on a logarithmic axis.")] = False,
    out: FiguresOption = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plot the convolution kernels a run has learned, layer by layer: the largest value at each lag, before and after
    training.

    Writes kernels.svg, .png and .csv.
    """
    from spt.analysis import kernels as module
    from spt.report.plotting import save

    result = module.layer_kernels(run, lags)
    files = save(module.kernel_figure(result, log), out or result.run.path / "figures")
    for note in result.notes:
        notify(f"note: {note}")
    if as_json:
        print_json(module.to_json(result, files))
    else:
        console().print(module.kernel_table(result))
        notify(f"figure: {files[0]}, .png, .csv")


@command(inspect_app)
def attention(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many rows, the first of the split.")] = 64,
    split: Annotated[
        Literal["test", "val", "train"], typer.Option("--split", help="The split whose rows are shown.")
    ] = "test",
    out: FiguresOption = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plot how far each attention head of a run looks, in steps, before and after training.

    Writes attention.svg, .png and .csv.
    """
    from spt.analysis import attention
    from spt.report.plotting import save

    result = attention.attention_distances(run, rows, split)
    files = save(attention.attention_figure(result), out or result.run.path / "figures")
    if as_json:
        print_json(attention.to_json(result, files))
    else:
        console().print(attention.attention_table(result))
        notify(f"figure: {files[0]}, .png, .csv")


@command(inspect_app)
def errors(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished finetuning run.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="Another run on the same rows, shown beside it.")
    ] = None,
    split: Annotated[Literal["test", "val"], typer.Option("--split", help="The split that is examined.")] = "test",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder to write to.", show_default="RUN/errors")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many of the hardest rows and confusions to show.")] = 16,
    samples: Annotated[
        bool,
        typer.Option("--samples/--no-samples", help="Also show rows of the data set; its licence applies to them."),
    ] = True,
    data_dir: DataOption = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is a GPU.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show where a finished run is wrong: confusions, hardest rows, accuracy or error by length, position and the like.

    Writes to RUN/errors: errors.json, a CSV of every table, figures. With RUN2, tables stand side by side.
    """
    from spt.analysis.error_figures import draw_all
    from spt.analysis.errors import analyse_errors, render, to_json, write_analysis
    from spt.analysis.predictions import read_predictions
    from spt.runtime.distributed import Runtime
    from spt.runtime.settings import Settings

    paths = [run, other] if other else [run]
    evaluation, predictions, notes = read_predictions(paths, split, Runtime(Settings(quiet=True, cpu=cpu)))
    analysis = analyse_errors(evaluation, predictions, top, samples=samples, notes=notes)
    folder = out or run / "errors"
    written = write_analysis(analysis, folder, draw_all)
    if as_json:
        print_json({**to_json(analysis), "folder": str(folder), "files": [path.name for path in written]})
    else:
        console().print(render(analysis))
    notify(f"written: {folder}/errors.json, a CSV of every table, figures")
    if analysis.shows_samples:
        notify("note: this holds samples of the data set, whose licence applies to them; --no-samples leaves them out")


@command(app)
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, a report's folder, or a report.json.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same kind.")],
    everything: Annotated[
        bool, typer.Option("--all", help="For runs: also keys that differ but that neither run was computed from.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what differs between two runs (recipe, data, code, machine, scores, costs) or two reports, from their files.

    The exit code is 0 whether they differ or not.
    """
    if is_report(first) and is_report(second):
        from spt.analysis import diff_reports

        if everything:
            raise UsageError("--all is for two runs; these are reports")
        report_diff = diff_reports.diff_reports(first, second)
        values, rendered = report_diff.model_dump(mode="json"), diff_reports.render(report_diff)
    else:
        from spt.analysis import diff_runs

        run_diff = diff_runs.diff_runs(first, second, everything)
        values, rendered = run_diff.model_dump(mode="json"), diff_runs.render(run_diff)
    print_json(values) if as_json else console().print(rendered)


def is_report(path: Path) -> bool:
    """A report.json, or a folder that no run has written."""
    return path.is_file() or (path.is_dir() and not any((path / name).exists() for name in ("job.json", "status.json")))
