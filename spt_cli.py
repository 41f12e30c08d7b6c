"""The command `spt`: parses, calls, prints. Results go to standard output, everything else to standard error.

Nothing heavy is imported before a command needs it, so help, lists and reports answer at once.
"""

import contextlib
import inspect
import io
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

from spt import __version__, launch
from spt.errors import BackendError, FailedRuns, OutputError, SptError, Stopped, UsageError, brief

if TYPE_CHECKING:
    from spt.plan import Job
    from spt.recipe import Loaded
    from spt.run import Result
    from spt.runtime import Runtime

app = typer.Typer(
    help="Compare sequence models fairly: self-pretrain on the task's own training inputs, finetune, report the gain.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A recipe is a packaged name (spt recipes list) or a YAML file. Values are changed by a.b=c behind it.",
)
recipes_app = typer.Typer(help="The recipes that come with spt.", no_args_is_help=True)
list_app = typer.Typer(help="What recipes can name.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(list_app, name="list")
data_app = typer.Typer(help="The data of a recipe's task.", no_args_is_help=True)
app.add_typer(data_app, name="data")
bench_app = typer.Typer(help="Time and memory of models, operations and data on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

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


RUNS = Path("runs")
HOW = How()
_results: TextIO | None = None  # standard output, while it is kept for results


def main() -> None:
    """Entry point: typer's own complaints exit with 2, ours with the code of their kind."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a × must not end a run on a terminal that knows ASCII alone
    logging.getLogger("spt.tasks").addHandler(_Tell(logging.INFO))
    logging.getLogger("spt.tasks").setLevel(logging.INFO)
    try:
        launch.end_with_parent()
        launch.join_slurm()
        launch.check_group()
    except UsageError as error:
        print(f"spt: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if launch.rank() > 0:  # of several processes the first one speaks
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        app(prog_name="spt")
    except SystemExit as ended:
        if launch.world() > 1 and isinstance(ended.code, int | None):
            launch.leave(ended.code or 0)
        raise


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose errors are one sentence and an exit code; `--debug` shows the traceback instead.

    A parameter `how` stands for all options of `How`; such a command can run as several processes.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature, runs = _signature(function)

        @wraps(function)
        def guarded(**options: Any) -> None:
            debug = bool(options.get("debug")) or os.environ.get("SPT_DEBUG", "") not in ("", "0")
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, _stop)
            for option, variable in (("data_dir", "SPT_DATA_DIR"), ("workers", "SPT_WORKERS")):
                if options.get(option) is not None:
                    os.environ[variable] = str(options[option])
            if runs:
                options["how"] = How(**{field: options.pop(field) for field in How._fields})
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


def _signature(function: Callable[..., None]) -> tuple[inspect.Signature, bool]:
    """A command's signature with `how` written out, and whether it had one."""
    given = inspect.signature(function, eval_str=True)
    parameters = [p for p in given.parameters.values() if p.name != "how"]
    runs = len(parameters) < len(given.parameters)
    if runs:
        known = inspect.get_annotations(How, eval_str=True)
        parameters += [
            inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=known[field])
            for field, default in How._field_defaults.items()
        ]
    ordered = sorted(parameters, key=lambda p: p.kind)
    return given.replace(parameters=ordered), runs


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
            load(source, overrides, smoke=options["smoke"])
    code = launch.relaunch(how.num_processes, how.accelerate_config, sys.argv[1:])
    if code:
        raise typer.Exit(code)
    return True


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


class _Tell(logging.Handler):
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


# ------------------------------------------------------------------------------------------------- training commands


@command(app)
def pretrain(
    arguments: RecipeArgument,
    seed: SeedOption = "0",
    out: OutOption = RUNS,
    resume: ResumeOption = "auto",
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
    how: How = HOW,
) -> None:
    """Self-pretrain: the recipe's first stage, on the training split's inputs, without labels."""
    loaded, number = _one_recipe(arguments, smoke), _one_seed(seed)
    from spt.plan import Job

    _train(Job(loaded, "pretrain", number), out, _runtime(resume, how), as_json)


@command(app)
def finetune(
    arguments: RecipeArgument,
    scratch: Annotated[bool, typer.Option("--scratch", help="Start from random weights: the baseline.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Start from this finished pretraining run's folder.")
    ] = None,
    seed: SeedOption = "0",
    out: OutOption = RUNS,
    resume: ResumeOption = "auto",
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
    how: How = HOW,
) -> None:
    """Train the task itself; without --scratch or --from, after the recipe's own pretraining, made if missing."""
    if scratch and source is not None:
        raise UsageError("--scratch and --from contradict each other: one starts from random weights, one from a run's")
    loaded, number = _one_recipe(arguments, smoke), _one_seed(seed)
    from spt.plan import Job

    parent: Any = None
    if source is not None:
        from spt.stages import open_weights

        parent = open_weights(source)
    elif not scratch:
        parent = Job(loaded, "pretrain", number)
    _train(Job(loaded, "finetune", number, parent), out, _runtime(resume, how), as_json)


@command(app)
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished finetuning run.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[task.a=c …]", help="Changes to its task: other data, same weights.")
    ] = None,
    split: Annotated[
        Literal["test", "val", "train"], typer.Option("--split", help="Which rows of the task are answered.")
    ] = "test",
    as_json: JsonOption = False,
    how: How = HOW,
) -> None:
    """Score a finished run's weights once more, on its task or on a changed one, without training.

    Where steps of the changed task lie further apart in time (speech at half the sampling rate), models in continuous
    time are told so.
    """
    from spt.rescore import rescore

    found = rescore(run, changes or [], split, _runtime("auto", how))
    if as_json:
        put(found)
        return
    scores = ", ".join(f"{name} {value:.6g}" for name, value in found["scores"].items())
    print(f"{run.name}: {scores} on {found['rows']:,} {split} rows")
    if found["rate"] != 1:
        say(f"note: steps are {found['rate']:g} times as far apart as in training, and the model was told so")
    for note in found["notes"]:
        say(f"note: {note}")


@command(app)
def compare(
    arguments: RecipesArgument,
    seeds: Annotated[str, typer.Option("--seeds", help="How many (5: seeds 0 to 4), or which (0,1,2).")] = "5",
    out: OutOption = RUNS,
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option("--resume", help="Continue and reuse runs (auto), or make all anew (never)."),
    ] = "auto",
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
    how: How = HOW,
) -> None:
    """Train both arms, scratch and SPT, over seeds, and report the paired difference. Finished runs are reused."""
    numbers = _seeds(seeds)
    loaded = _recipes(arguments, smoke)
    from spt.execute import run_comparison
    from spt.runtime import known_to_all
    from spt.studies import compare as cells

    runtime = _runtime(resume, how, wait=True)
    folder, failed = run_comparison(loaded, numbers, cells(loaded, numbers), out, runtime, say)
    if runtime.main:
        _show_comparison(folder, as_json)
    if failed:
        error = FailedRuns(
            f"{failed} of the runs failed; they are listed in the report and tried again by the same command"
        )
        raise known_to_all(error)


def _show_comparison(folder: Path, as_json: bool) -> None:
    from spt.render import terminal, to_json, write
    from spt.report import read

    report = read([folder])
    write(report, folder)
    if as_json:
        put(to_json(report))
    else:
        _console().print(terminal(report))
    say(f"report: {folder}/report.md, .csv, .json")


@command(app)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Comparison folders, run folders, or a folder of them.")
    ],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """The report of finished runs, from their files alone; also written beside a comparison."""
    from spt.render import terminal, to_json, write
    from spt.report import read

    found = read(folders)
    if len(folders) == 1 and (folders[0] / "compare.json").is_file():
        write(found, folders[0])
    if as_json:
        put(to_json(found))
    else:
        _console().print(terminal(found))


@command(app)
def show(
    arguments: RecipeArgument,
    smoke: SmokeOption = False,
    micro_batch: MicroOption = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What a recipe would do: every value and its origin, parameters, steps, operations, memory. Trains nothing."""
    loaded = _one_recipe(arguments, smoke)
    from spt.show import overview, render

    found = overview(loaded, micro_batch)
    if as_json:
        put(found)
    else:
        _console().print(render(found))


# -------------------------------------------------------------------------------------------------------------- data

TaskArgument = Annotated[
    list[str], typer.Argument(metavar="RECIPE|TASK [a.b=c …]", help="A recipe or a task, and values to change.")
]


@command(data_app, "prepare")
def data_prepare(
    arguments: TaskArgument,
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Copy from the Hugging Face hub instead of the official address.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", envvar="SPT_DATA_DIR", help="Folder with raw data sets; filled here.")
    ] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Get a task's files if they are not there, and prepare its splits; of a recipe, get its model's weights too.

    No other command downloads anything.
    """
    from spt.data import chosen, fetch_weights, prepare

    task, model = chosen(arguments)
    if model is not None:
        fetch_weights(model, say)
    found = prepare(task, from_hub, say)
    if as_json:
        put(found)
        return
    for note in found["notes"]:
        say(f"note: {note}")
    rows = ", ".join(f"{name} {count:,}" for name, count in found["rows"].items())
    print(f"{found['task']}: {rows} rows in {found['folder']} (data {found['data']})")


@command(data_app, "check")
def data_check(
    arguments: TaskArgument,
    data_dir: DataOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What a task's data are: files, rows, classes, lengths, duplicates, trivial scores, and what is odd about them.

    Every prepared row is read.
    """
    from spt.data import check, chosen_task, render

    found = check(chosen_task(arguments))
    if as_json:
        put(found)
    else:
        print(render(found))


# ---------------------------------------------------------------------------------------------------------- listings


@command(recipes_app, "list")
def recipes_list(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """The recipes that come with spt."""
    from spt.recipe import describe, packaged

    rows = [{"name": name, "description": describe(text)} for name, text in packaged().items()]
    _listing(rows, ("name", "description"), as_json)


@command(recipes_app, "show")
def recipes_show(name: str, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """A recipe's file as it is (spt show gives it with every default filled in)."""
    from spt.recipe import read

    found, text, _ = read(name)
    if as_json:
        put({"name": found, "text": text})
    else:
        print(text, end="")


@command(recipes_app, "copy")
def recipes_copy(
    name: str,
    to: Annotated[
        Path | None, typer.Argument(help="A file or a folder; by default a file of the same name here.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Copy a packaged recipe, to change it."""
    from spt.recipe import read
    from spt.run import writing

    found, text, _ = read(name)
    target = to or Path()
    if target.is_dir():
        target = target / f"{found.rpartition('/')[2]}.yaml"
    if target.exists():
        raise UsageError(f"{target} exists; name another file")
    with writing(target):
        target.write_text(text, encoding="utf-8")
    say(f"wrote {target}; run it with: spt compare {target}")


@command(recipes_app, "schema")
def recipes_schema(debug: DebugOption = False) -> None:
    """JSON schema of a recipe, for editors that check YAML."""
    from spt.recipe import schema

    put(schema())


@command(list_app, "models")
def list_models(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Models: ours and installed plug-ins; a recipe can also name a .py file.

    Parameters are those of the backbone with its default options (d_model 128, n_layers 4, 1,024 steps); the cost is
    that of one block on one sequence, in leading terms: L steps, D width, N state size, c chunk.
    """
    from rich.padding import Padding
    from rich.text import Text

    from spt.components import listing

    rows = [row._asdict() for row in listing("models")]
    if as_json:
        put(rows)
        return
    facts = ("name", "parameters", "cost", "paper")
    cells = [{key: _cell(row[key]) for key in facts} for row in rows]
    widths = {key: max(len(key), *(len(cell[key]) for cell in cells)) for key in facts}

    def line(cell: dict[str, str]) -> str:
        name, parameters, *rest = (cell[key] for key in facts)
        left = f"{name:{widths['name']}}  {parameters:>{widths['parameters']}}"
        return "  ".join([left, *(f"{text:{widths[key]}}" for key, text in zip(facts[2:], rest, strict=True))]).rstrip()

    console = _console()
    console.print(line({key: key for key in facts}), style="bold", soft_wrap=True)
    for row, cell in zip(rows, cells, strict=True):
        console.print(line(cell), highlight=False, markup=False, soft_wrap=True)
        console.print(Padding(Text(row["description"], style="dim"), (0, 0, 0, widths["name"] + 2)))


@command(list_app, "tasks")
def list_tasks(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Tasks: ours and installed plug-ins; a recipe can also name a .py file."""
    from spt.components import listing

    rows = [{key: getattr(row, key) for key in ("name", "description", "source")} for row in listing("tasks")]
    _listing(rows, ("name", "description"), as_json)


@command(app)
def env(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """What runs depend on: versions, devices, folders. Made for pasting into an issue."""
    from spt.doctor import environment_report

    found = environment_report()
    if as_json:
        put(found)
    else:
        for key, value in found.items():
            print(f"{key:<16} {value}")


@command(app)
def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Hold this model, or a .py file of yours, to the contract."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check this installation, end to end on generated data, in about 20 seconds; or check a model of yours."""
    from spt.doctor import check_installation, check_model

    checks = check_installation() if model is None else check_model(model)
    if as_json:
        put([check._asdict() for check in checks])
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}{f': {check.detail}' if check.detail else ''}")
    failed = [check for check in checks if not check.ok]
    if failed:
        raise typer.Exit(max(check.exit_code for check in failed))


# ------------------------------------------------------------------------------------------------------------- bench

RoundsOption = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Times that everything is measured, in turn.", show_default="7")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes and 2 rounds, where none are given.")]
CpuOption = Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")]


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
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16, or both: fp32,bf16.")] = "fp32",
    backend: Annotated[str, typer.Option("--backend", help="Of kernels: torch, keops, or both.")] = "torch",
    attention: Annotated[
        str, typer.Option("--attention", help="Some of auto, sdpa (PyTorch's), flash (flash-attn), math.")
    ] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Everything a second time under torch.compile.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations again: less memory, slower.")
    ] = False,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """A training step of models: forward, backward, optimiser, peak memory, and what takes the time."""
    from spt.bench import bench_models, chosen_models, render

    variants = chosen_models(
        arguments,
        length=length,
        batch=batch,
        layers=layers,
        width=width,
        precision=precision,
        backend=backend,
        attention=attention,
        compile=compile,
        recompute=gradient_checkpointing,
        cpu=cpu,
        quick=quick,
    )
    found = bench_models(variants, rounds or (2 if quick else 7), say, apart=not quick)
    put(found) if as_json else _console().print(render(found))


@command(bench_app, "op")
def bench_op(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME …] [size=value …]", help="Operations (all, if none is named), and their sizes."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="Some of plain (the formula as it is written), torch, keops.")
    ] = "plain,torch",
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    cpu: CpuOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Single operations: time, memory, and error against double precision, one back end beside the other."""
    from spt.bench import bench_operations, chosen_operations, render

    cases = chosen_operations(arguments or [], backend=backend, quick=quick, cpu=cpu)
    found = bench_operations(cases, rounds or (2 if quick else 7), say)
    put(found) if as_json else _console().print(render(found))


@command(bench_app, "task")
def bench_task(
    arguments: TaskArgument,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in a batch.")] = 64,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """A task's data: opening what is prepared, making batches, and generating, where nothing is read."""
    from spt.bench import bench_task as measure
    from spt.bench import render
    from spt.data import chosen_task

    found = measure(chosen_task(arguments), batch, rounds or (2 if quick else 7))
    put(found) if as_json else _console().print(render(found))


# ----------------------------------------------------------------------------------------------------------- helpers


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"spt {__version__}")
        raise typer.Exit(0)


def _console() -> Any:
    """Standard output, never taken for narrower than 80 columns: tables would lose columns, not only look bad."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal(width=max(Console().width, 80))


def _runtime(resume: Literal["auto", "must", "never"], how: How, wait: bool = False) -> "Runtime":
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


def _recipes(arguments: Iterable[str], smoke: bool) -> list["Loaded"]:
    from spt.recipe import load, split_arguments

    sources, overrides = split_arguments(arguments)
    if not sources:
        raise UsageError("no recipe is named; spt recipes list shows ours (a file with = in its name is ./a=b.yaml)")
    loaded = [load(source, overrides, smoke=smoke) for source in sources]
    for one in loaded:
        for note in one.notes:
            say(f"{one.name}: {note}")
    return loaded


def _one_recipe(arguments: Iterable[str], smoke: bool) -> "Loaded":
    from spt.recipe import split_arguments

    arguments = list(arguments)
    sources, _ = split_arguments(arguments)
    if len(sources) > 1:
        raise UsageError(
            f"one recipe is expected, not {', '.join(sources)} (values are changed by a.b=c, without spaces)"
        )
    return _recipes(arguments, smoke)[0]


def _one_seed(text: str) -> int:
    numbers = _numbers(text, "--seed")
    if len(numbers) != 1:
        raise UsageError(f"--seed {text}: one seed is expected; spt compare takes several, as --seeds {text}")
    return numbers[0]


def _seeds(text: str) -> list[int]:
    """`5` is five seeds, 0 to 4; `0,1,2` (and `7,`) are these seeds."""
    numbers = _numbers(text, "--seeds")
    if "," not in text:
        if numbers[0] < 1:
            raise UsageError(f"--seeds {text}: at least one seed is needed")
        if numbers[0] > 1000:
            raise UsageError(f"--seeds {text} asks for {numbers[0]:,} seeds; to name one seed, write --seeds {text},")
        return list(range(numbers[0]))
    doubles = sorted({n for n in numbers if numbers.count(n) > 1})
    if doubles:
        raise UsageError(f"--seeds {text}: seed {doubles[0]} stands twice; a pair counts once")
    return numbers


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.rstrip(",").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise UsageError(f"{option} {text}: seeds are whole numbers from 0, such as 0 or 0,1,2")
    return [int(part) for part in parts]


def _train(job: "Job", out: Path, runtime: "Runtime", as_json: bool) -> None:
    from spt.stages import ensure

    result = ensure(job, out, runtime, say)
    folder = out / job.name
    if as_json:
        put({"run": str(folder), **result.model_dump(mode="json")})
    else:
        print(_summary(folder, result))


def _summary(folder: Path, result: "Result") -> str:
    scores = result.test if result.test is not None else result.val
    split = "test" if result.test is not None else "validation"
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
    cost = result.total
    return (
        f"{result.stage} {result.recipe} seed {result.seed}: {split} {numbers} (step {result.best_step:,})\n"
        f"cost {cost.steps:,} steps, {cost.examples:,} examples, {cost.flops:.3g} FLOPs, {cost.seconds:,.0f} s\n"
        f"run  {folder}"
    )


def _listing(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        put(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    _console().print(table)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
