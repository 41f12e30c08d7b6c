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

bench_app = typer.Typer(help="Time and memory of models, operations and data on this machine.", no_args_is_help=True)

RoundsOption = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Times that everything is measured, in turn.", show_default="7")
]

QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes and 2 rounds, where none are given.")]
CpuOption = Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Also write to this file what --json prints.")
]


def _show(measure: Callable[[], dict[str, Any]], as_json: bool, save: Path | None) -> None:
    """Measure, then print and save. A file that cannot be written is an error before anything is measured."""
    from spt.bench.tables import render
    from spt.runs.files import check_writable, write_json

    if save is not None:
        check_writable(save)
    measured = measure()
    if save is not None:
        write_json(save, measured)
    print_json(measured) if as_json else console().print(render(measured))


@command(bench_app, "model")
def bench_model(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[key=value …] MODEL [key=value …] …",
            help="Models or .py files of yours, each with options behind it; those before the first are for all.",
        ),
    ],
    length: Annotated[str | None, typer.Option("--length", help="Steps of a sequence: 1024, or 1024,4096.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="Sequences: 8, or 1,8.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Short for n_layers=…")] = None,
    width: Annotated[int | None, typer.Option("--width", min=1, help="Short for d_model=…")] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, tf32 (of GPUs), bf16, or several: fp32,bf16.")
    ] = "fp32",
    backend: Annotated[str, typer.Option("--backend", help="Of kernels: some of auto, torch, triton, keops.")] = "auto",
    attention: Annotated[
        str, typer.Option("--attention", help="Some of auto, sdpa, varlen (PyTorch's), flash (flash-attn), math.")
    ] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Everything a second time under torch.compile.")] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Everything a second time with kernels recorded, on a GPU.")
    ] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations again: less memory, slower.")
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
    """A training step of models: forward, backward, optimiser, peak memory, and what takes the time."""
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
            help="As of bench model; without a model: dlr, s4, s4d, s5, lru, and a transformer with window=512.",
        ),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option("--longest", min=1, help="Lengths are powers of two from 1,024 to this.", show_default="262144"),
    ] = None,
    limit: Annotated[
        float, typer.Option("--limit", min=1.0, help="Seconds for a row; one that takes more is left out.")
    ] = 600.0,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Short for n_layers=…")] = None,
    width: Annotated[int | None, typer.Option("--width", min=1, help="Short for d_model=…")] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Times that every step is measured.", show_default="3")
    ] = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """How time and peak memory of a training step grow with length, on one sequence: fitted exponents.

    Exponents are least squares of logarithms, over the upper half of the lengths.
    """
    from spt.bench.slopes import bench_slopes as measure
    from spt.bench.slopes import parse_slopes

    models = parse_slopes(arguments or [], longest=longest, layers=layers, width=width, cpu=cpu, quick=quick)
    _show(lambda: measure(models, rounds or (2 if quick else 3), limit), as_json, save)


@command(bench_app, "study")
def bench_study(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A packaged study, a YAML file, or a study's folder.")],
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE …]", help="Some of its recipes; default: all.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Sequences in a batch.", show_default="each recipe's own")
    ] = None,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    data_dir: DataOption = None,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """An optimiser step of a study's rows, as training makes it, beside what papers print of their times.

    Ratios are to the first row of the same recipe and length. A few rows of each task are made or read.
    """
    from spt.bench.study import bench_study as measure
    from spt.bench.study import parse_study

    rows = parse_study(study, recipes or (), batch=batch, cpu=cpu, quick=quick)
    _show(lambda: measure(study, rows, rounds or (2 if quick else 7)), as_json, save)


@command(bench_app, "op")
def bench_op(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME …] [size=value …]", help="Operations (all, if none is named), and their sizes."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="Some of plain (the formula as it is written), torch, triton, keops.")
    ] = "plain,torch",
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Single operations: time, memory, and error against double precision, one back end beside the other."""
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
    """What the device reaches, and no step can exceed: matrix products in each precision, and copies."""
    from spt.bench.device import bench_device as measure

    _show(lambda: measure(rounds or (2 if quick else 7), cpu, quick), as_json, save)


@command(bench_app, "gpu")
def bench_gpu(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE …]",
            help="Compared at the end, their data prepared (spt data prepare); default: LRA Image.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where all output goes.")] = Path("gpu"),
    minutes: Annotated[
        float, typer.Option("--minutes", min=1, help="For all sittings together; recipes get what remains.")
    ] = 25,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that everything runs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU instead, without the tests that need a GPU.")] = False,
    debug: DebugOption = False,
) -> None:
    """Everything to ask of a GPU that has not run this code before: its tests, agreement of every model with the CPU,
    step times, operations, and a first comparison. The same command goes on where it was stopped; no network."""
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
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in a batch.")] = 64,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    data_dir: DataOption = None,
    save: SaveOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """A task's data: opening what is prepared, making batches, and generating, where nothing is read."""
    from spt.bench.tasks import bench_task as measure
    from spt.data.prepare import task_from_arguments

    _show(lambda: measure(task_from_arguments(arguments), batch, rounds or (2 if quick else 7)), as_json, save)
