"""What every command of `spt` shares: its options, and how it ends.

Errors are one sentence and an exit code; results go to standard output, everything else to standard error.
"""

import contextlib
import inspect
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TextIO

import typer

from spt import launch
from spt.errors import BackendError, OutputError, SptError, Stopped, UsageError, brief

if TYPE_CHECKING:
    from spt.recipe import Loaded
    from spt.runtime import Runtime

RecipeArgument = Annotated[
    list[str], typer.Argument(metavar="RECIPE [a.b=c …]", help="A recipe, and values to change.")
]
RecipesArgument = Annotated[
    list[str], typer.Argument(metavar="RECIPE… [a.b=c …]", help="Recipes, and values to change.")
]
SeedOption = Annotated[str, typer.Option("--seed", help="One seed: initialisation, order, masks follow from it.")]
OutOption = Annotated[
    Path, typer.Option("--out", envvar="SPT_RUNS_DIR", help="Folder for run folders.", show_default=True)
]
ResumeOption = Annotated[
    Literal["auto", "must", "never"],
    typer.Option(
        "--resume",
        help="An interrupted run: continue it (auto), insist on one (must), or make everything anew (never).",
    ),
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="The same code path in seconds; the scores mean nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on standard output, nothing else there.")]
MicroOption = Annotated[
    int | None, typer.Option("--micro-batch", min=1, help="Sequences in memory at once; the batch size stays as it is.")
]
DataOption = Annotated[
    Path | None, typer.Option("--data-dir", envvar="SPT_DATA_DIR", help="Folder with raw data sets; only ever read.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, envvar="SPT_WORKERS", help="Generating rows: how many work at once (all cores)."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of whatever goes wrong.")]


class How(NamedTuple):
    """The options of every training command that say how it runs; none of them changes what is computed."""

    micro_batch: MicroOption = None
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Keep fewer activations, compute them again: less memory, slower."
        ),
    ] = False
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile, where there is a compiler.")] = False
    backend: Annotated[
        Literal["torch", "keops"], typer.Option("--backend", help="What computes the kernels of state-space models.")
    ] = "torch"
    attention: Annotated[
        Literal["auto", "sdpa", "flash", "math"],
        typer.Option("--attention", help="What computes attention: PyTorch (auto, sdpa), flash-attn, or the formula."),
    ] = "auto"
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", min=1, help="Run as so many processes on this machine (torchrun).")
    ] = None
    accelerate_config: Annotated[
        Path | None,
        typer.Option("--accelerate-config", metavar="FILE", help="Run under accelerate launch with this file."),
    ] = None
    data_dir: DataOption = None
    save_every: Annotated[
        float, typer.Option("--save-every", min=0.0, help="Seconds between resumable checkpoints.")
    ] = 60.0
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")] = False
    tracker: Annotated[
        str | None,
        typer.Option("--tracker", help="Also log to tensorboard, wandb, trackio or mlflow, through Accelerate."),
    ] = None
    debug: DebugOption = False


class Ran(NamedTuple):
    """The options of every command that has many runs made: which of them, where, and what is done beforehand."""

    seeds: Annotated[str | None, typer.Option("--seeds", help="How many (5: seeds 0 to 4), or which (0,1,2).")] = None
    out: OutOption = Path("runs")
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option("--resume", help="Continue and reuse runs (auto), or make all anew (never)."),
    ] = "auto"
    smoke: SmokeOption = False
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=1, max=256, help="Runs at once, each in a process of its own with a GPU if any."),
    ] = 1
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="KEY=VALUE", help="Run on Slurm: partition=gpu, time=600, gpus=1 … (repeat)."),
    ] = None
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Only the I-th of N parts; any scheduler can run them.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show every run, its cost and its state; run nothing.")] = (
        False
    )
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the study as a file to run later; run nothing.")
    ] = None
    as_json: JsonOption = False


RUNS = Path("runs")
HOW = How()
RAN = Ran()
_results: TextIO | None = None  # standard output, while it is kept for results


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose errors are one sentence and an exit code; `--debug` shows the traceback instead.

    A parameter whose annotation is a NamedTuple of options stands for all of them; with `How`, the command can run as
    several processes.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature, groups = _signature(function)
        runs = How in groups.values()

        @wraps(function)
        def guarded(**options: Any) -> None:
            debug = bool(options.get("debug")) or os.environ.get("SPT_DEBUG", "") not in ("", "0")
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, _stop)
            for option, variable in (("data_dir", "SPT_DATA_DIR"), ("workers", "SPT_WORKERS")):
                if options.get(option) is not None:
                    os.environ[variable] = str(options[option])
            for name, group in groups.items():
                options[name] = group(**{field: options.pop(field) for field in group._fields})
            try:
                if runs and _hand_over(options):
                    return
                with _results_only() if options.get("as_json") else contextlib.nullcontext():
                    function(**options)
                launch.part()
            except SptError as error:
                _fail(str(error), error.exit_code, debug, alone=not getattr(error, "known_to_all", False))
            except KeyboardInterrupt:
                _fail("interrupted; the same command continues", 130, debug)
            except BrokenPipeError:  # the reader of our output has left, e.g. `spt … | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                launch.part(patience=10)
                raise typer.Exit(0) from None
            except (typer.Exit, typer.Abort):
                raise
            except OSError as error:
                where = f" {error.filename}" if error.filename else ""
                _fail(f"cannot use{where or ' a file'}: {error.strerror or error}", OutputError.exit_code, debug)
            except SystemExit as error:
                _fail(f"the code of a task or a model called sys.exit({error.code!r})", UsageError.exit_code, debug)
            except Exception as error:
                if lost_partner(error):
                    _fail(
                        "another process of this run has ended", BackendError.exit_code, debug, quiet=launch.started()
                    )
                who = f" (process {launch.rank()} of {launch.world()})" if launch.world() > 1 else ""
                text = f"a bug in spt{who}: {brief(error)} (repeat with --debug for the traceback)"
                _fail(text, 1, debug, alone=True)

        guarded.__signature__ = signature  # type: ignore[attr-defined]
        guarded.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return group.command(name)(guarded)

    return decorate


def _signature(function: Callable[..., None]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A command's signature with its groups of options written out, and the groups by parameter."""
    given = inspect.signature(function, eval_str=True)
    groups = {name: p.annotation for name, p in given.parameters.items() if hasattr(p.annotation, "_field_defaults")}
    parameters = [p for p in given.parameters.values() if p.name not in groups]
    for group in groups.values():
        known = inspect.get_annotations(group, eval_str=True)
        parameters += [
            inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=known[field])
            for field, default in group._field_defaults.items()
        ]
    ordered = sorted(parameters, key=lambda p: p.kind)
    return given.replace(parameters=ordered), groups


def _hand_over(options: dict[str, Any]) -> bool:
    """Where several processes are asked for and none was started: start them, and end as process 0 does."""
    how: How = options["how"]
    launch.check(how.num_processes, how.accelerate_config)
    if not launch.wanted(how.num_processes, how.accelerate_config):
        return False
    from spt.recipe import load, split_arguments

    sources, overrides = split_arguments(options.get("arguments", []))
    with contextlib.redirect_stdout(sys.stderr):
        for source in sources:  # what is wrong with them is said once; data are prepared while nobody waits
            load(source, overrides, smoke=bool(_option(options, "smoke")))
    code = launch.relaunch(how.num_processes, how.accelerate_config, sys.argv[1:])
    if code:
        raise typer.Exit(code)
    return True


def _option(options: dict[str, Any], name: str) -> Any:
    """An option's value, whether it stands alone or in a group."""
    return next((getattr(value, name) for value in options.values() if hasattr(value, name)), options.get(name))


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped("stopped; the same command continues")


def lost_partner(error: BaseException) -> bool:
    runtime = sys.modules.get("spt.runtime")  # without it, no process has met another
    return runtime is not None and bool(runtime.lost(error))


def _fail(message: str, code: int, debug: bool = False, alone: bool = False, quiet: bool = False) -> NoReturn:
    """End with a sentence and a code.

    Of several processes the first one speaks; where something has happened to one `alone`, that one does, and the
    others, which notice that it is gone, keep quiet.
    """
    several = launch.world() > 1
    if several:
        # The launcher stops all processes as soon as one of them has failed; this one is ending as it should.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = not quiet and launch.leave_code(code) if alone or launch.rank() == 0 else False
    if debug:
        traceback.print_exc()
    if first:
        print(f"spt: {message}", file=sys.stderr, flush=True)
    if several and launch.rank() > 0:
        time.sleep(1)  # let the first one write what happened
    raise typer.Exit(code)


@contextlib.contextmanager
def _results_only() -> Iterator[None]:
    """Keep standard output for `put`: whatever else prints, a user's model or a program it starts, goes to stderr."""
    global _results
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
        if sys.stdout.fileno() == 1:
            kept = os.dup(1)
            os.dup2(2, 1)
    _results = sys.stdout if kept is None else os.fdopen(kept, "w", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        _results.flush()
    finally:
        if kept is not None:
            os.dup2(kept, 1)
        _results = None


class Tell(logging.Handler):
    """What takes long in a task says how far it is."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say(text: str) -> None:
    """News for people; never on standard output."""
    if launch.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def put(value: Any) -> None:
    """A result, as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False), file=_results or sys.stdout)


def console() -> Any:
    """Standard output, never taken for narrower than 80 columns: tables would lose columns, not only look bad."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal(width=max(Console().width, 80))


def runtime(resume: Literal["auto", "must", "never"], how: How, wait: bool = False) -> "Runtime":
    from spt.runtime import Runtime, Settings

    settings = Settings(
        resume=resume,
        micro_batch_size=how.micro_batch,
        recompute=how.gradient_checkpointing,
        compile=how.compile,
        backend=how.backend,
        attention=how.attention,
        save_every=how.save_every,
        cpu=how.cpu,
        tracker=how.tracker,
        wait=wait,
        debug=how.debug,
    )
    runtime = Runtime(settings)
    if launch.world() > 1:
        say(runtime.formation())
        if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
            say("note: the launcher's mixed precision is not used; precision is the recipe's")
        if runtime.steps_in_backward:
            say("note: spt has not been run with DeepSpeed yet; hold this run against one without it")
    elif (idle := runtime.idle_devices()) > 0:
        say(f"note: one of {idle + 1} devices is used; --num-processes {idle + 1} uses all, with the same results")
    return runtime


def recipes(arguments: Iterable[str], smoke: bool) -> list["Loaded"]:
    from spt.recipe import load, split_arguments

    sources, overrides = split_arguments(arguments)
    if not sources:
        raise UsageError("no recipe is named; spt recipes list shows ours (a file with = in its name is ./a=b.yaml)")
    loaded = [load(source, overrides, smoke=smoke) for source in sources]
    for one in loaded:
        for note in one.notes:
            say(f"{one.name}: {note}")
    return loaded


def one_recipe(arguments: Iterable[str], smoke: bool) -> "Loaded":
    from spt.recipe import split_arguments

    arguments = list(arguments)
    sources, _ = split_arguments(arguments)
    if len(sources) > 1:
        raise UsageError(
            f"one recipe is expected, not {', '.join(sources)} (values are changed by a.b=c, without spaces)"
        )
    return recipes(arguments, smoke)[0]


def one_seed(text: str) -> int:
    found = numbers(text, "--seed")
    if len(found) != 1:
        raise UsageError(f"--seed {text}: one seed is expected; spt compare takes several, as --seeds {text}")
    return found[0]


def seeds(text: str, option: str = "--seeds") -> list[int]:
    """`5` is five seeds, 0 to 4; `0,1,2` (and `7,`) are these seeds."""
    found = numbers(text, option)
    if "," not in text:
        if found[0] < 1:
            raise UsageError(f"{option} {text}: at least one seed is needed")
        if found[0] > 1000:
            raise UsageError(f"{option} {text} asks for {found[0]:,} seeds; to name one seed, write {option} {text},")
        return list(range(found[0]))
    doubles = sorted({n for n in found if found.count(n) > 1})
    if doubles:
        raise UsageError(f"{option} {text}: seed {doubles[0]} stands twice; a pair counts once")
    return found


def numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.rstrip(",").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise UsageError(f"{option} {text}: seeds are whole numbers from 0, such as 0 or 0,1,2")
    return [int(part) for part in parts]


def put_table(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        put(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console().print(table)
