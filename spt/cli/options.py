"""Options that commands share, and what they mean: recipes, seeds, the runtime."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from spt.cli.output import notify
from spt.errors import UsageError

if TYPE_CHECKING:
    from spt.config.recipe import ResolvedRecipe
    from spt.runs.plan import Smoke
    from spt.runtime.settings import Settings


RecipeArgument = Annotated[
    list[str], typer.Argument(metavar="RECIPE [a.b=c …]", help="A recipe, and values to change in it.")
]

RecipesArgument = Annotated[
    list[str], typer.Argument(metavar="RECIPE… [a.b=c …]", help="Recipes, and values to change in them.")
]

SeedOption = Annotated[
    str, typer.Option("--seed", help="Seed of the initialisation, the order of the data and the masks.")
]

OutOption = Annotated[
    Path, typer.Option("--out", envvar="SPT_RUNS_DIR", help="Folder that holds the run folders.", show_default=True)
]

ResumeOption = Annotated[
    Literal["auto", "must", "never"],
    typer.Option(
        "--resume",
        help="Continue an interrupted run if there is one (auto), insist on one (must), or start everything over "
        "(never).",
    ),
]

SmokeOption = Annotated[
    bool,
    typer.Option(
        "--smoke", help="A few steps of a small network on short sequences, in seconds; the scores mean nothing."
    ),
]

SmokeFullOption = Annotated[
    bool, typer.Option("--smoke-full", help="A few steps of the recipe's own sizes; the scores mean nothing.")
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON value on standard output, and nothing else there.")
]

FullOption = Annotated[bool, typer.Option("--full", help="Show every table, column and run, not the short form.")]

MicroOption = Annotated[
    int | None, typer.Option("--micro-batch", min=1, help="Sequences in memory at once; the batch size is unchanged.")
]

DataOption = Annotated[
    Path | None, typer.Option("--data-dir", envvar="SPT_DATA_DIR", help="Folder with raw data sets; it is only read.")
]

WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        envvar="SPT_WORKERS",
        help="Workers that make rows at once (default: one per core).",
    ),
]

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class RuntimeOptions(NamedTuple):
    """The options of every training command that say how it runs; none of them changes what is computed."""

    micro_batch: MicroOption = None
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Keep fewer activations and recompute them: less memory, slower."
        ),
    ] = False
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile, if there is a compiler.")] = False
    backend: Annotated[
        Literal["auto", "torch", "triton", "keops"],
        typer.Option(
            "--backend",
            help="Back end for the kernels of state-space models. auto: torch, or Triton on a GPU where it is faster.",
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs",
            help="On a GPU, record the kernels of state-space models once, as CUDA graphs: fewer launches per step.",
        ),
    ] = False
    attention: Annotated[
        Literal["auto", "sdpa", "varlen", "flash", "math"],
        typer.Option(
            "--attention",
            help="Back end for attention: PyTorch (auto, sdpa, varlen), flash-attn (flash), or the equation itself "
            "(math).",
        ),
    ] = "auto"
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", min=1, help="Run as this many processes on this machine.")
    ] = None
    accelerate_config: Annotated[
        Path | None,
        typer.Option("--accelerate-config", metavar="FILE", help="Run under accelerate launch with this config file."),
    ] = None
    data_dir: DataOption = None
    save_every: Annotated[
        float, typer.Option("--save-every", min=0.0, help="Seconds between resumable checkpoints.")
    ] = 60.0
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is a GPU.")] = False
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=1024,
            help="Threads of each process. Default on a CPU: 1 for a small network, else torch's number.",
            show_default=False,
        ),
    ] = None
    tracker: Annotated[
        str | None,
        typer.Option("--tracker", help="Also log to tensorboard, wandb, trackio or mlflow, through Accelerate."),
    ] = None
    debug: DebugOption = False


class StudyOptions(NamedTuple):
    """The options of every command that has many runs made: which of them, where, and what is done beforehand."""

    seeds: Annotated[str | None, typer.Option("--seeds", help="How many seeds (5: 0 to 4), or which (0,1,2).")] = None
    baselines: Annotated[
        str | None,
        typer.Option(
            "--baselines",
            metavar="auto|NAME,…",
            help="Non-neural baselines to compare with: all that fit (auto), or majority, linear_probe, logistic, "
            "tfidf, catch22, boosting.",
            show_default="none",
        ),
    ] = None
    out: OutOption = Path("runs")
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option("--resume", help="Continue and reuse runs (auto), or start all of them over (never)."),
    ] = "auto"
    smoke: SmokeOption = False
    smoke_full: SmokeFullOption = False
    jobs: Annotated[
        str,
        typer.Option(
            "--jobs",
            metavar="N|auto",
            envvar="SPT_JOBS",
            help="Runs at once, each in a process of its own. They take the GPUs in turn, and share them if "
            "there are fewer. auto: on a CPU one per core, if one thread is enough for each; else 1.",
        ),
    ] = "auto"
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm", metavar="KEY=VALUE", help="Run on Slurm: partition=gpu, time=600, gpus=1, pack=4 … (repeatable)."
        ),
    ] = None
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N|auto[/N]",
            help="Only the I-th of N parts. auto: the part of this indexed Kubernetes job, Slurm array task or Slurm "
            "step.",
        ),
    ] = None
    arm: Annotated[
        str | None,
        typer.Option(
            "--arm",
            metavar="ARM",
            help="Only the runs of this arm (scratch, if a paper has no pretraining).",
        ),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the runs, their costs and states (one by one with --full); run nothing."),
    ] = False
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the study to a file, to run later; run nothing."),
    ] = None
    full: FullOption = False
    as_json: JsonOption = False


class WorkOptions(NamedTuple):
    """The options of a worker: which study it works on, and how much it does."""

    seeds: Annotated[
        str | None, typer.Option("--seeds", help="As in the command that began the study, if given there.")
    ] = None
    out: OutOption = Path("runs")
    smoke: SmokeOption = False
    smoke_full: SmokeFullOption = False
    lease: Annotated[
        float,
        typer.Option(
            "--lease",
            min=1.0,
            max=86400.0,
            help="Seconds without a sign of life after which other workers take over this worker's run.",
        ),
    ] = 60.0
    max_runs: Annotated[
        int | None,
        typer.Option("--max-runs", min=1, help="Stop after this many runs.", show_default="until none is left"),
    ] = None
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="While other workers make the last runs: wait in case one fails, or end."
        ),
    ] = True
    as_json: JsonOption = False


RUNS = Path("runs")
RUNTIME = RuntimeOptions()
STUDY = StudyOptions()
WORK = WorkOptions()


def settings(resume: Literal["auto", "must", "never"], runtime: RuntimeOptions) -> "Settings":
    from spt.runtime.settings import Settings

    return Settings(
        resume=resume,
        micro_batch_size=runtime.micro_batch,
        recompute=runtime.gradient_checkpointing,
        compile=runtime.compile,
        backend=runtime.backend,
        cuda_graphs=runtime.cuda_graphs,
        attention=runtime.attention,
        save_every=runtime.save_every,
        cpu=runtime.cpu,
        threads=runtime.threads,
        tracker=runtime.tracker,
        debug=runtime.debug,
    )


def smoke_size(smoke: bool, full: bool) -> "Smoke":
    """What --smoke and --smoke-full ask for; the latter, where both are given."""
    return "full" if full else smoke


def recipes(arguments: Iterable[str], smoke: "Smoke", *, data: bool = True) -> list["ResolvedRecipe"]:
    """The recipes, their data prepared unless they are not needed."""
    from spt.api import load_recipe
    from spt.config.load import load
    from spt.config.overrides import split_arguments

    sources, overrides = split_arguments(arguments)
    if not sources:
        raise UsageError("no recipe is named; spt recipes list shows ours (a file with = in its name is ./a=b.yaml)")
    read = load_recipe if data else load
    resolved = [read(source, overrides, smoke=smoke) for source in sources]
    for recipe in resolved:
        for note in recipe.notes:
            notify(f"{recipe.name}: {note}")
    return resolved


def one_recipe(arguments: Iterable[str], smoke: "Smoke", *, data: bool = True) -> "ResolvedRecipe":
    from spt.config.overrides import split_arguments

    arguments = list(arguments)
    sources, _ = split_arguments(arguments)
    if len(sources) > 1:
        raise UsageError(
            f"one recipe is expected, not {', '.join(sources)} (values are changed by a.b=c, without spaces)"
        )
    return recipes(arguments, smoke, data=data)[0]


def one_seed(text: str) -> int:
    given = numbers(text, "--seed")
    if len(given) != 1:
        raise UsageError(f"--seed {text}: one seed is expected; spt compare takes several, as --seeds {text}")
    return given[0]


def seeds(text: str, option: str = "--seeds") -> list[int]:
    """`5` is five seeds, 0 to 4; `0,1,2` (and `7,`) are these seeds."""
    given = numbers(text, option)
    if "," not in text:
        if given[0] < 1:
            raise UsageError(f"{option} {text}: at least one seed is needed; to name seed 0, write {option} 0,")
        if given[0] > 1000:
            raise UsageError(f"{option} {text} asks for {given[0]:,} seeds; to name one seed, write {option} {text},")
        return list(range(given[0]))
    doubles = sorted({n for n in given if given.count(n) > 1})
    if doubles:
        raise UsageError(f"{option} {text}: seed {doubles[0]} is given twice; a pair counts once")
    return given


def jobs(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= 256):
        raise UsageError(f"--jobs {text}: a number of runs at once from 1 to 256, or auto, is expected")
    return int(text)


def numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.rstrip(",").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise UsageError(f"{option} {text}: seeds are whole numbers from 0, such as 0 or 0,1,2")
    return [int(part) for part in parts]
