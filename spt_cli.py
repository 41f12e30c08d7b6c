"""The command `spt`: parses, calls, prints. Results go to standard output, everything else to standard error.

Nothing heavy is imported before a command needs it, so help, lists and reports answer at once.
"""

import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spt import __version__, launch
from spt.command import (
    HOW,
    RAN,
    RUNS,
    DataOption,
    DebugOption,
    How,
    JsonOption,
    MicroOption,
    OutOption,
    Ran,
    RecipeArgument,
    RecipesArgument,
    ResumeOption,
    SeedOption,
    SmokeOption,
    Tell,
    WorkersOption,
    command,
    console,
    one_recipe,
    one_seed,
    put,
    put_table,
    runtime,
    say,
    seeds,
)
from spt.errors import FailedRuns, UsageError

if TYPE_CHECKING:
    from spt.plan import Job
    from spt.run import Result
    from spt.runtime import Runtime
    from spt.study import Opened

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
study_app = typer.Typer(
    help="Studies: what is varied, in both arms, over seeds; continued by the same command.", no_args_is_help=True
)
app.add_typer(study_app, name="study")


def main() -> None:
    """Entry point: typer's own complaints exit with 2, ours with the code of their kind."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a × must not end a run on a terminal that knows ASCII alone
    logging.getLogger("spt.tasks").addHandler(Tell(logging.INFO))
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
    loaded, number = one_recipe(arguments, smoke), one_seed(seed)
    from spt.plan import Job

    _train(Job(loaded, "pretrain", number), out, runtime(resume, how), as_json)


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
    loaded, number = one_recipe(arguments, smoke), one_seed(seed)
    from spt.plan import Job

    parent: Any = None
    if source is not None:
        from spt.stages import open_weights

        parent = open_weights(source)
    elif not scratch:
        parent = Job(loaded, "pretrain", number)
    _train(Job(loaded, "finetune", number, parent), out, runtime(resume, how), as_json)


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

    found = rescore(run, changes or [], split, runtime("auto", how))
    if as_json:
        put(found)
        return
    scores = ", ".join(f"{name} {value:.6g}" for name, value in found["scores"].items())
    print(f"{run.name}: {scores} on {found['rows']:,} {split} rows")
    if found["rate"] != 1:
        say(f"note: steps are {found['rate']:g} times as far apart as in training, and the model was told so")
    for note in found["notes"]:
        say(f"note: {note}")


FiguresOption = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Folder for the figure.", show_default="RUN/figures")
]


@command(app)
def kernels(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage.")],
    lags: Annotated[
        int | None, typer.Option("--lags", min=1, help="The first lags alone.", show_default="the longest sequence")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="The figure's values on a logarithmic axis.")] = False,
    out: FiguresOption = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Convolution kernels a run has learned, layer by layer: the largest value at each lag, before and after training.

    Written as kernels.svg, .png and .csv.
    """
    from spt import kernels as module
    from spt.drawing import save

    found = module.kernels(run, lags)
    files = save(module.drawing(found, log), out or found.opened.path / "figures")
    for note in found.notes:
        say(f"note: {note}")
    if as_json:
        put(module.to_json(found, files))
    else:
        console().print(module.table(found))
        say(f"figure: {files[0]}, .png, .csv")


@command(app)
def attention(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="So many first rows of the split.")] = 64,
    split: Annotated[Literal["test", "val", "train"], typer.Option("--split", help="Whose rows are shown.")] = "test",
    out: FiguresOption = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """How far each attention head of a run looks, in steps, before and after training.

    Written as attention.svg, .png and .csv.
    """
    from spt import distance
    from spt.drawing import save

    found = distance.distances(run, rows, split)
    files = save(distance.drawing(found), out or found.opened.path / "figures")
    if as_json:
        put(distance.to_json(found, files))
    else:
        console().print(distance.table(found))
        say(f"figure: {files[0]}, .png, .csv")


@command(app)
def compare(arguments: RecipesArgument, ran: Ran = RAN, how: How = HOW) -> None:
    """Train both arms, scratch and SPT, over seeds, and report the paired difference. Finished runs are reused."""
    _study("compare", arguments, {}, ran, how)


@command(app)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Comparison folders, run folders, or a folder of them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where its files go.", show_default="the study, if it is one"),
    ] = None,
    comparing: Annotated[
        bool, typer.Option("--compare", help="What changed between two reports: folders, or report.json files.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """The report of finished runs, from their files alone: HTML, Markdown, LaTeX, CSV, JSON, and every figure.

    Figures are SVG and PNG, with their numbers as CSV.
    """
    if out is not None and (comparing or not str(out).strip(".")):
        raise UsageError(
            "--compare writes no files, so --out has no place there" if comparing else "--out names no folder"
        )
    if comparing:
        _show_changes(folders, as_json)
        return
    _show_report(folders, as_json, out, figures=True)


@command(app)
def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or not.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another one; of the other stage, if you like.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Also keys that differ and that neither run was computed from.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What is different between two runs: recipe, data, code, machine, scores, costs; from their files alone.

    The exit code is 0 whether they differ or not.
    """
    from spt.differences import difference, render, to_json

    found = difference(first, second)
    put(to_json(found, everything)) if as_json else console().print(render(found, everything))


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
    loaded = one_recipe(arguments, smoke)
    from spt.show import overview, render

    found = overview(loaded, micro_batch)
    if as_json:
        put(found)
    else:
        console().print(render(found))


@command(app)
def errors(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished finetuning run.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="Another one over the same rows, set beside it.")
    ] = None,
    split: Annotated[Literal["test", "val"], typer.Option("--split", help="Which rows are looked at.")] = "test",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where it is written.", show_default="RUN/errors")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many of the hardest rows and confusions.")] = 16,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Show rows of the data set, whose licence applies to them.")
    ] = True,
    data_dir: DataOption = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Where a finished run is wrong: confusions, hardest rows, accuracy or error by length, position and the like.

    Written to RUN/errors: errors.json, a CSV of every table, figures. With RUN2, tables stand side by side.
    """
    from spt.answers import read
    from spt.mistake_figures import draw_all
    from spt.mistakes import analyse, terminal, to_json, write
    from spt.runtime import Runtime, Settings

    asked, given, notes = read([run, *([other] if other else [])], split, Runtime(Settings(quiet=True, cpu=cpu)))
    found = analyse(asked, given, top, samples=samples, notes=notes)
    folder = out or run / "errors"
    written = write(found, folder, draw_all)
    if as_json:
        put({**to_json(found), "folder": str(folder), "files": [path.name for path in written]})
    else:
        console().print(terminal(found))
    say(f"written: {folder}/errors.json, a CSV of every table, figures")
    if found.shows_samples:
        say("note: this holds samples of the data set, whose licence applies to them; --no-samples leaves them out")


# ------------------------------------------------------------------------------------------------------------ studies


def _study(kind: str, arguments: Sequence[str], options: dict[str, Any], ran: Ran, how: How) -> None:
    """A study from the command line."""
    from spt.recipe import parse_overrides, split_arguments
    from spt.study import Opened, anchored, check

    sources, overrides = split_arguments(arguments)
    if not sources:
        raise UsageError("no recipe is named; spt recipes list shows ours (a file with = in its name is ./a=b.yaml)")
    raw = {"kind": kind, "recipes": sources, "set": parse_overrides(overrides)}
    raw |= {key: value for key, value in options.items() if value is not None}
    study = anchored(check(raw, f"spt study {kind}" if kind != "compare" else "spt compare"), Path.cwd())
    _conduct(Opened(kind, study), ran, how)


def _conduct(opened: "Opened", ran: Ran, how: How) -> None:
    study = opened.study
    if ran.seeds is not None:
        study = study.model_copy(update={"seeds": tuple(seeds(ran.seeds))})
    if ran.save is not None:
        _save(ran.save, study, ran.as_json)
        return
    if ran.slurm and ran.jobs > 1:
        raise UsageError("--jobs and --slurm contradict each other: one runs here, the other on a cluster")
    if ran.jobs > 1 and launch.world() > 1:
        raise UsageError("--jobs and --num-processes contradict each other: runs at once have one process each")
    from spt.conduct import Place, conduct, folder_of
    from spt.estimate import Meter
    from spt.pairs import read_plan
    from spt.runtime import known_to_all
    from spt.slurm import Slurm
    from spt.studies import lay_out

    out, smoke = ran.out, ran.smoke
    if opened.folder is not None:  # goes on where it lies, as it was run
        out, smoke = opened.folder.parent, smoke or read_plan(opened.folder).smoke
    place = Place(ran.jobs, Slurm.parse(ran.slurm) if ran.slurm else None, _part(ran.shard) if ran.shard else None)
    here = runtime(ran.resume, how, wait=True)
    meter = Meter(out, here, say)
    layout = lay_out(study, smoke, meter)
    for note in layout.notes:
        say(note)
    if opened.folder not in (None, folder_of(layout, out).resolve()):
        say(
            f"note: its recipes or options are not those of {opened.folder.name}: {folder_of(layout, out).name} is made"
        )
    if ran.dry_run:
        from spt.preview import preview, render

        found = preview(layout, folder_of(layout, out), meter, place.part)
        put(found) if ran.as_json else console().print(render(found))
        return
    folder, failed = conduct(layout, out, place, here, say)
    if here.main:
        _show_report([folder], ran.as_json)
    if failed:
        error = FailedRuns(
            f"{failed} of the runs failed; the report lists them; the same command tries again what did not diverge"
        )
        raise known_to_all(error)


def _save(path: Path, study: Any, as_json: bool) -> None:
    from spt.run import write_text
    from spt.study import check_recipes, to_yaml

    check_recipes(study.recipes)
    target = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    if target.exists():
        raise UsageError(f"{target} exists; name another file")
    write_text(target, to_yaml(study, target.parent, f"spt study run {target.name}"))
    say(f"wrote {target}; run it with: spt study run {target}")
    if as_json:
        put({"file": str(target)})


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    whole = all(part.isascii() and part.isdigit() and len(part) < 6 for part in (index, count))
    if not (whole and 1 <= int(index) <= int(count)):
        raise UsageError(f"--shard {text}: the I-th of N parts is expected, such as 1/4, with I from 1 to N")
    return int(index), int(count)


def _show_changes(folders: list[Path], as_json: bool) -> None:
    from spt.changes import changes, render

    if len(folders) != 2:
        raise UsageError(f"--compare takes two reports, folders or report.json files, not {len(folders)}")
    found = changes(*folders)
    put(found.model_dump(mode="json")) if as_json else console().print(render(found))


def _show_report(folders: list[Path], as_json: bool, out: Path | None = None, figures: bool = False) -> None:
    from spt.pairs import PLAN
    from spt.render import terminal, to_json
    from spt.report import read

    found = read(folders)
    if out is None and len(folders) == 1 and (folders[0] / PLAN).is_file():
        out = folders[0]
    paths: tuple[Path, ...] = ()
    if out is not None:
        from spt.report_files import write

        paths = write(found, out, figures)
    if as_json:
        put(to_json(found))
    else:
        console().print(terminal(found))
    if out is not None:
        more = " and figures" if figures and any(path.parent != out for path in paths) else ""
        say(f"report: {out / 'report.html'}, .md, .tex, .csv, .json{more}")


def _list(text: str | None, option: str, kind: type = float) -> list[Any] | None:
    """`0.2,0.4` as numbers, or as words."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if parts:
            return [kind(part) for part in parts]
        raise ValueError
    except ValueError:
        raise UsageError(f"{option} {text}: numbers with commas between them are expected, such as 0.2,0.4") from None


def _assigned(text: str, option: str) -> dict[str, Any]:
    """`a=1,b=2` as a mapping."""
    from spt.recipe import parse_yaml

    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name or name in found:
            raise UsageError(f"{option} {text}: {part!r} is not name=value, or stands twice")
        found[name.strip()] = parse_yaml(value, f"{option} {text}")
    return found


@command(study_app, "compare")
def study_compare(arguments: RecipesArgument, ran: Ran = RAN, how: How = HOW) -> None:
    """Both arms of every recipe: the same as spt compare."""
    _study("compare", arguments, {}, ran, how)


@command(study_app, "compute")
def study_compute(
    arguments: RecipesArgument,
    shares: Annotated[
        str | None, typer.Option("--shares", help="Of the budget, to pretraining.", show_default="0,0.2,0.4,0.6")
    ] = None,
    match: Annotated[
        Literal["epochs", "examples", "flops", "time"] | None,
        typer.Option("--match", help="What is held equal.", show_default="the recipe's own unit"),
    ] = None,
    total: Annotated[
        float | None,
        typer.Option("--total", help="The whole budget, in that unit.", show_default="the recipe's two stages"),
    ] = None,
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """Shares of one budget to pretraining; scratch has all of it."""
    _study("compute", arguments, {"shares": _list(shares, "--shares"), "match": match, "total": total}, ran, how)


@command(study_app, "data")
def study_data(
    arguments: RecipesArgument,
    fractions: Annotated[
        str | None,
        typer.Option("--fractions", help="Of the training split.", show_default="0.005,0.01,0.05,0.1,0.5,1"),
    ] = None,
    stratified: Annotated[bool, typer.Option("--stratified", help="Each class in its share.")] = False,
    pretrain_on: Annotated[
        Literal["subset", "all"], typer.Option("--pretrain-on", help="The same subset, or all inputs without labels.")
    ] = "subset",
    hold: Annotated[
        Literal["steps", "epochs"], typer.Option("--hold", help="What smaller subsets keep of the budget.")
    ] = "steps",
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """Nested subsets of the training split, in both stages."""
    options = {"stratified": stratified, "pretrain_on": pretrain_on, "hold": hold}
    _study("data", arguments, {"fractions": _list(fractions, "--fractions"), **options}, ran, how)


@command(study_app, "size")
def study_size(
    arguments: RecipesArgument,
    size: Annotated[
        list[str],
        typer.Option("--size", metavar="NAME:a=1,b=2", help="A size and its changes (repeat): 1M:d_model=144"),
    ],
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """Model sizes, each a set of changes to the recipe."""
    sizes: dict[str, Any] = {}
    for text in size:
        name, _, changes = text.partition(":")
        if not changes or name in sizes:
            raise UsageError(f"--size {text}: NAME:option=value,… is expected, each name once")
        sizes[name] = _assigned(changes, "--size")
    _study("size", arguments, {"sizes": sizes}, ran, how)


@command(study_app, "init")
def study_init(
    arguments: RecipesArgument,
    initialisations: Annotated[
        str | None, typer.Option("--initialisations", help="Of the model.", show_default="structured,random")
    ] = None,
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """Structured and random initial parameters, crossed with both arms."""
    _study("init", arguments, {"initialisations": _list(initialisations, "--initialisations", str)}, ran, how)


@command(study_app, "objective")
def study_objective(
    arguments: RecipesArgument,
    objective: Annotated[
        list[str] | None,
        typer.Option("--objective", metavar="NAME[:a=1,b=2]", help="masked, masked:ratio=0.5,span=8, next (repeat)."),
    ] = None,
    ratios: Annotated[str | None, typer.Option("--ratios", help="Of hidden steps: masked with each of them.")] = None,
    spans: Annotated[str | None, typer.Option("--spans", help="Steps hidden together, with each ratio.")] = None,
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """What pretraining asks for: masked, with which ratio and span, or the next step."""
    objectives: list[dict[str, Any]] = []
    for text in objective or []:
        name, _, rest = text.partition(":")
        objectives.append({"name": name, **_assigned(rest, "--objective")})
    for ratio in _list(ratios, "--ratios") or ([None] if spans else []):
        for span in _list(spans, "--spans", int) or [None]:
            given = {"ratio": ratio, "span": span}
            objectives.append({"name": "masked", **{key: value for key, value in given.items() if value is not None}})
    if not objectives:
        raise UsageError("no objective is named; --objective masked --objective next, or --ratios 0.15,0.5")
    _study("objective", arguments, {"objectives": objectives}, ran, how)


@command(study_app, "tune")
def study_tune(
    arguments: RecipesArgument,
    space: Annotated[
        list[str],
        typer.Option(
            "--space",
            metavar="NAME=A,B,C",
            help="A setting of supervised training and its values, or A..B for a random search (repeat).",
        ),
    ],
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="A random search of so many settings; without it the grid.")
    ] = None,
    search_seed: Annotated[int, typer.Option("--search-seed", min=0, help="Which random settings.")] = 0,
    trial_seeds: Annotated[
        str | None, typer.Option("--trial-seeds", help="For every setting: how many, or which (0,).", show_default="0,")
    ] = None,
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """The same settings tried in both arms, chosen on validation; then both arms over seeds at what was chosen."""
    found = {}
    for text in space:
        name, equals, values = text.partition("=")
        if not equals or name in found:
            raise UsageError(f"--space {text}: NAME=A,B,C or NAME=A..B is expected, each name once")
        found[name] = _values(values, text)
    options = {"space": found, "trials": trials, "search_seed": search_seed}
    tried = seeds(trial_seeds, "--trial-seeds") if trial_seeds is not None else None
    _study("tune", arguments, {**options, "trial_seeds": tried}, ran, how)


def _values(text: str, given: str) -> Any:
    from spt.recipe import parse_yaml

    if ".." in text:
        low, _, high = text.partition("..")
        return {"low": parse_yaml(low, f"--space {given}"), "high": parse_yaml(high, f"--space {given}")}
    return [parse_yaml(part, f"--space {given}") for part in text.split(",") if part]


@command(study_app, "run")
def study_run(
    source: Annotated[
        str, typer.Argument(metavar="FILE|FOLDER|NAME", help="A study's file or folder, or one of ours.")
    ],
    ran: Ran = RAN,
    how: How = HOW,
) -> None:
    """Run a study's file, or go on with it: finished runs are taken as they are."""
    from spt.study import read

    _conduct(read(source), ran, how)


@command(study_app, "status")
def study_status(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A study, or a folder of runs.", show_default="--out")
    ] = None,
    out: OutOption = RUNS,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """How far studies are, from their files alone: runs done, running, failed, missing."""
    from spt.status import render, status

    found = status(folder or out)
    put(found) if as_json else console().print(render(found))


@command(study_app, "list")
def study_list(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """The studies that come with spt."""
    from spt.recipe import describe
    from spt.study import packaged

    rows = [{"name": name, "description": describe(text)} for name, text in packaged().items()]
    put_table(rows, ("name", "description"), as_json)


@command(study_app, "show")
def study_show(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A study of ours, or a file.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """A study's file, every default filled in."""
    from spt.study import read, to_yaml

    opened = read(source)
    if as_json:
        put({"name": opened.name, **opened.study.model_dump(mode="json")})
    else:
        print(to_yaml(opened.study), end="")


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
    put_table(rows, ("name", "description"), as_json)


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A packaged recipe, or a file.")]


@command(recipes_app, "show")
def recipes_show(name: NameArgument, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """A recipe's file as it is (spt show gives it with every default filled in)."""
    from spt.recipe import read

    found, text, _ = read(name)
    if as_json:
        put({"name": found, "text": text})
    else:
        print(text, end="")


@command(recipes_app, "copy")
def recipes_copy(
    name: NameArgument,
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

    shown = console()
    shown.print(line({key: key for key in facts}), style="bold", soft_wrap=True)
    for row, cell in zip(rows, cells, strict=True):
        shown.print(line(cell), highlight=False, markup=False, soft_wrap=True)
        shown.print(Padding(Text(row["description"], style="dim"), (0, 0, 0, widths["name"] + 2)))


@command(list_app, "tasks")
def list_tasks(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Tasks: ours and installed plug-ins; a recipe can also name a .py file."""
    from spt.components import listing

    rows = [{key: getattr(row, key) for key in ("name", "description", "source")} for row in listing("tasks")]
    put_table(rows, ("name", "description"), as_json)


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
    put(found) if as_json else console().print(render(found))


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
    put(found) if as_json else console().print(render(found))


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
    put(found) if as_json else console().print(render(found))


# ----------------------------------------------------------------------------------------------------------- helpers


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"spt {__version__}")
        raise typer.Exit(0)


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


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
