"""`spt predict`, `spt embed` and `spt export`: a trained model answers rows, or goes out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spt.cli.guard import command
from spt.cli.options import DataOption, DebugOption, JsonOption
from spt.cli.output import notify, print_json
from spt.errors import UsageError

if TYPE_CHECKING:
    from spt.inference.predict import Source
    from spt.runtime.distributed import Runtime

app = typer.Typer()

RowsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[DATA [option=value …]]",
        help="A table, a folder of tables or an array, and how to read it where that differs from training.",
        show_default=False,
    ),
]

SplitOption = Annotated[
    Literal["test", "val", "train"] | None,
    typer.Option("--split", help="Rows of the run's own task, instead of DATA.", show_default=False),
]

OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]

TrustOption = Annotated[
    bool,
    typer.Option("--trust-code", help="Allow the model file in an exported folder to run: it is its author's code."),
]

CpuOption = Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is a GPU.")]


@command(app)
def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished finetuning run, or an exported folder.")
    ],
    rows: RowsArgument = None,
    split: SplitOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write: .csv, .jsonl or .parquet. Default: CSV on standard output.",
            show_default=False,
        ),
    ] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Calibrate probabilities, with the temperature fitted on validation.")
    ] = False,
    overwrite: OverwriteOption = False,
    trust_code: TrustOption = False,
    data_dir: DataOption = None,
    cpu: CpuOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict the rows of a file: a class and its probabilities, or numbers, for each row or step.

    DATA is read with the options of the run's own task; label_column= reads it without labels. If rows have labels,
    scores are printed.
    """
    if as_json and out is None:
        raise UsageError("--json prints the scores and notes; name a file for the predictions by --out")
    source = _source(rows, split)
    from spt.inference.predict import predict

    options = {"overwrite": overwrite, "trust_code": trust_code, "calibrated": calibrated}
    summary = predict(run, source, out, _runtime(cpu), **options)
    for note in summary.notes:
        notify(f"note: {note}")
    if as_json:
        print_json({name: value for name, value in summary.to_json().items() if name != "recordings"})
        return
    if summary.scores is not None:
        scores = ", ".join(f"{name} {value:.6g}" for name, value in summary.scores.items())
        notify(f"{summary.run}: {scores} on {summary.scored:,} labels")
    if out is not None:
        notify(f"written: {out}, {summary.amount}")


@command(app)
def embed(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage, or an exported folder.")
    ],
    rows: RowsArgument = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write: .npz or .parquet (required).", show_default=False),
    ] = None,
    split: SplitOption = None,
    pool: Annotated[
        Literal["mean", "last", "max"],
        typer.Option("--pool", help="How the steps of a row are pooled into one vector."),
    ] = "mean",
    per_step: Annotated[bool, typer.Option("--per-step", help="One vector for each step, without pooling.")] = False,
    overwrite: OverwriteOption = False,
    trust_code: TrustOption = False,
    data_dir: DataOption = None,
    cpu: CpuOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Embed the rows of a file: the features that the network's head receives, as one vector for each row or step."""
    if out is None:
        raise UsageError("--out FILE is needed: embeddings are written as .npz or .parquet")
    source = _source(rows, split)
    from spt.inference.predict import embed

    how = None if per_step else pool
    summary = embed(run, source, out, _runtime(cpu), how=how, overwrite=overwrite, trust_code=trust_code)
    for note in summary.notes:
        notify(f"note: {note}")
    if as_json:
        print_json({name: value for name, value in summary.to_json().items() if name not in ("scored", "scores")})
    else:
        notify(f"written: {out}, {summary.amount}")


@command(app)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="A folder that does not exist yet.", show_default="RUN/exported"),
    ] = None,
    program: Annotated[
        bool,
        typer.Option("--program", help="Also write the network as a torch.export program, if its outputs are equal."),
    ] = False,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Export a run's model as a folder of its own: weights, config and model card, which spt.load_model opens.

    It answers new rows without the training data, the run or the recipe. Before the folder appears, its answers are
    checked to equal the run's.
    """
    from spt.inference.export import export as export_run

    result = export_run(run, out or run / "exported", program)
    if as_json:
        print_json(result)
    else:
        notify(f"exported: {result['folder']} ({', '.join(result['files'])})")


def _source(rows: list[str] | None, split: Literal["test", "val", "train"] | None) -> "Source":
    from spt.config.overrides import split_arguments
    from spt.inference.predict import Source

    names, changes = split_arguments(rows or [])
    if split is not None:
        if names or changes:
            raise UsageError(f"--split {split} answers the run's own rows; leave out {' '.join([*names, *changes])}")
        return Source(split=split)
    if len(names) != 1:
        given = f"not {', '.join(names)}" if names else "or --split test, the run's own rows"
        raise UsageError(f"one file or folder of rows is expected, {given} (options are name=value, without spaces)")
    return Source(Path(names[0]), changes)


def _runtime(cpu: bool) -> "Runtime":
    from spt.runtime.distributed import Runtime
    from spt.runtime.settings import Settings

    return Runtime(Settings(quiet=True, cpu=cpu))
