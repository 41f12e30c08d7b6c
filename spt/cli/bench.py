"""`spt bench`: time and memory on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from spt.cli.data import TaskArgument
from spt.cli.guard import command
from spt.cli.options import DataOption, DebugOption, JsonOption
from spt.cli.output import console, print_json
from spt.errors import FailedRuns

bench_app = typer.Typer(
    help="Measure time and memory of models, operations and data on this machine.", no_args_is_help=True
)

RoundsOption = Annotated[
    int | None, typer.Option("--rounds", min=1, help="How often everything is measured, in turn.", show_default="7")
]

QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes and 2 rounds, unless others are given.")]
CpuOption = Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is a GPU.")]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Also write to this file what --json prints.")
]


def _show(measure: Callable[[], dict[str, Any]], as_json: bool, save: Path | None) -> None:
    """Measure, then print and save. A file that cannot be written is an error before anything is measured."""
    from spt.bench.tables import render
    from spt.runs.files import check_writable, finite, write_json

    if save is not None:
        check_writable(save)
    measured = measure()
    if save is not None:
        write_json(save, finite(measured))
    print_json(measured) if as_json else console().print(render(measured))


@command(bench_app, "model")
def bench_model(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[key=value …] MODEL [key=value …] …",
            help="Models or your own .py files, each followed by its options; options before the first apply to all.",
        ),
    ],
    length: Annotated[str | None, typer.Option("--length", help="Sequence lengths: 1024, or 1024,4096.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="Batch sizes: 8, or 1,8.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Short for n_layers=…")] = None,
    width: Annotated[int | None, typer.Option("--width", min=1, help="Short for d_model=…")] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, tf32 (on GPUs), bf16, or several: fp32,bf16.")
    ] = "fp32",
    backend: Annotated[
        str, typer.Option("--backend", help="Back ends for kernels: some of auto, torch, triton, keops.")
    ] = "auto",
    attention: Annotated[
        str,
        typer.Option(
            "--attention",
            help="Back ends for attention: some of auto, sdpa, varlen (PyTorch's), flash (flash-attn), math.",
        ),
    ] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Measure everything a second time, under torch.compile.")
    ] = False,
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs", help="On a GPU: measure everything again, with kernels recorded as CUDA graphs."),
    ] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations: less memory, slower.")
    ] = False,
    match_parameters: Annotated[
        bool, typer.Option("--match-parameters", help="Scale d_model until all have as many parameters as the first.")
    ] = False,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a training step of models: forward, backward, optimiser, peak memory, and where the time goes."""
    from spt.bench.models import bench_models, parse_models

    variants = parse_models(
        arguments,
        length=length,
        batch=batch,
        layers=layers,
        width=width,
        precision=precision,
        backend=backend,
        attention=attention,
        compile=compile,
        cuda_graphs=cuda_graphs,
        recompute=gradient_checkpointing,
        cpu=cpu,
        quick=quick,
        match_parameters=match_parameters,
    )
    _show(lambda: bench_models(variants, rounds or (2 if quick else 7), separate_peaks=not quick), as_json, save)


@command(bench_app, "slopes")
def bench_slopes(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value …] [MODEL [key=value …] …]",
            help="As for bench model. Without a model: dlr, s4, s4d, s5, lru, and a transformer with window=512.",
        ),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            "--longest", min=1, help="Lengths are the powers of two from 1,024 to this.", show_default="262144"
        ),
    ] = None,
    limit: Annotated[
        float, typer.Option("--limit", min=1.0, help="Seconds allowed for a row; one that takes longer is left out.")
    ] = 600.0,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Short for n_layers=…")] = None,
    width: Annotated[int | None, typer.Option("--width", min=1, help="Short for d_model=…")] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="How often every step is measured.", show_default="3")
    ] = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fit how time and peak memory of a training step grow with length, on one sequence.

    Exponents are least-squares fits of logarithms, over the upper half of the lengths.
    """
    from spt.bench.slopes import bench_slopes as measure
    from spt.bench.slopes import parse_slopes

    models = parse_slopes(arguments or [], longest=longest, layers=layers, width=width, cpu=cpu, quick=quick)
    _show(lambda: measure(models, rounds or (2 if quick else 3), limit), as_json, save)


@command(bench_app, "study")
def bench_study(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A packaged study, a YAML file, or a study's folder.")],
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE …]", help="Only these of its recipes (default: all).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Batch size, in sequences.", show_default="each recipe's own")
    ] = None,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    data_dir: DataOption = None,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time an optimiser step of each of a study's rows, as in training, beside the times that papers print.

    Ratios are to the first row of the same recipe and length. A few rows of each task are generated or read.
    """
    from spt.bench.study import bench_study as measure
    from spt.bench.study import parse_study

    rows = parse_study(study, recipes or (), batch=batch, cpu=cpu, quick=quick)
    _show(lambda: measure(study, rows, rounds or (2 if quick else 7)), as_json, save)


@command(bench_app, "op")
def bench_op(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME …] [size=value …]", help="Operations (default: all), and their sizes."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="Some of plain (the equation as written), torch, triton, keops.")
    ] = "plain,torch",
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure single operations on each back end: time, memory, and error against double precision."""
    from spt.bench.operations import bench_operations, parse_operations

    cases = parse_operations(arguments or [], backend=backend, quick=quick, cpu=cpu)
    _show(lambda: bench_operations(cases, rounds or (2 if quick else 7)), as_json, save)


@command(bench_app, "device")
def bench_device(
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure the limits of this device, which no step can exceed: matrix products in each precision, and copies."""
    from spt.bench.device import bench_device as measure

    _show(lambda: measure(rounds or (2 if quick else 7), cpu, quick), as_json, save)


@command(bench_app, "gpu")
def bench_gpu(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE …]",
            help="Recipes to compare at the end, their data already prepared (spt data prepare). Default: LRA Image.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for all output.")] = Path("gpu"),
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            min=1,
            help="Minutes for everything, however often it is stopped and continued; the comparison gets what remains.",
        ),
    ] = 25,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that everything runs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU instead, without the tests that need a GPU.")] = False,
    debug: DebugOption = False,
) -> None:
    """Check a GPU on which this code has not run before: its tests, agreement of every model with the CPU, step times,
    operations, and a first comparison.

    The same command continues where it was stopped. It needs no network.
    """
    from spt.bench.gpu import RECIPES, SUMMARY
    from spt.bench.gpu import bench_gpu as carry_out
    from spt.cli.output import notify

    state = carry_out(out.resolve(), minutes, recipes or RECIPES, quick=quick, cpu=cpu, tell=notify)
    print(out / SUMMARY)
    failed = [name for name, record in state.commands.items() if record.status == "failed"]
    if failed:
        raise FailedRuns(f"{len(failed)} of the commands failed: {', '.join(failed)}; see NAME.log in {out}")


@command(bench_app, "task")
def bench_task(
    arguments: TaskArgument,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Batch size, in sequences.")] = 64,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    data_dir: DataOption = None,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time a task's data: opening prepared data, making batches, and generating rows that are not read from files."""
    from spt.bench.tasks import bench_task as measure
    from spt.data.prepare import task_from_arguments

    _show(lambda: measure(task_from_arguments(arguments), batch, rounds or (2 if quick else 7)), as_json, save)
