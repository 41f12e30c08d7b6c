"""`spt compare` and `spt study`: many runs, from one recipe or study file."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spt.cli.guard import command
from spt.cli.options import (
    RUNS,
    RUNTIME,
    STUDY,
    WORK,
    DebugOption,
    JsonOption,
    OutOption,
    RecipesArgument,
    RuntimeOptions,
    StudyOptions,
    WorkOptions,
    jobs,
    seeds,
    settings,
    smoke_size,
)
from spt.cli.output import console, notify, print_groups, print_json
from spt.cli.report import notify_written, show_report
from spt.errors import FailedRuns, UsageError

if TYPE_CHECKING:
    from spt.studies.schema import StudySource

compare_app = typer.Typer()
study_app = typer.Typer(
    help="Studies: vary one thing, in both arms, over seeds. The same command continues a study.", no_args_is_help=True
)


ArmsOption = Annotated[
    str | None,
    typer.Option(
        "--arms",
        metavar="ARM,…",
        help="scratch,spt, which are always needed, and controls: frozen, encoder, parts=A+B, shuffled, other=RECIPE, "
        "joint=WEIGHT.",
        show_default="scratch,spt",
    ),
]


SplitsOption = Annotated[
    str | None,
    typer.Option(
        "--splits",
        metavar="K|folds=K,repeats=R|random=N",
        help="Splits of your own data, with every arm and seed on each: K folds, repeated folds, or N random splits.",
        show_default="the recipe's one",
    ),
]


@command(compare_app)
def compare(
    arguments: RecipesArgument,
    arms: ArmsOption = None,
    splits: SplitsOption = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Train both arms, scratch and SPT, over seeds, and report the paired difference. Finished runs are reused."""
    _study("compare", arguments, {"arms": _list(arms, "--arms", str), "splits": _splits(splits)}, study, runtime)


def _splits(text: str | None) -> int | dict[str, Any] | None:
    """`5`, `folds=5,repeats=2` or `random=10`."""
    if text is None or text.strip().isdecimal():
        return None if text is None else int(text)
    return _assigned(text, "--splits")


def _study(
    kind: str, arguments: Sequence[str], options: dict[str, Any], study: StudyOptions, runtime: RuntimeOptions
) -> None:
    """A study from the command line."""
    from spt.config.overrides import parse_overrides, split_arguments
    from spt.studies.schema import from_mapping

    sources, overrides = split_arguments(arguments)
    if not sources:
        raise UsageError("no recipe is named; spt recipes list shows ours (a file with = in its name is ./a=b.yaml)")
    raw = {"kind": kind, "recipes": sources, "set": parse_overrides(overrides)}
    raw |= {key: value for key, value in options.items() if value is not None}
    _run(from_mapping(raw, f"spt study {kind}" if kind != "compare" else "spt compare"), study, runtime)


def _run(source: "StudySource", study: StudyOptions, runtime: RuntimeOptions) -> None:
    from spt.studies.schema import with_baselines

    if study.seeds is not None:
        source = replace(source, study=source.study.model_copy(update={"seeds": tuple(seeds(study.seeds))}))
    if (names := _list(study.baselines, "--baselines", str)) is not None:
        source = with_baselines(source, names)
    if study.save is not None:
        if size := smoke_size(study.smoke, study.smoke_full):
            option = "--smoke-full" if size == "full" else "--smoke"
            raise UsageError(f"a saved study has no size of its own: leave out {option}, and give it to spt study run")
        _save(study.save, source.study, study.as_json)
        return
    from spt.api import plan_study

    planned = plan_study(
        source,
        smoke=smoke_size(study.smoke, study.smoke_full),
        out=study.out,
        jobs=jobs(study.jobs),
        slurm=study.slurm or (),
        shard=_part(study.shard) if study.shard is not None else None,
        arm=study.arm,
        settings=settings(study.resume, runtime),
    )
    if study.dry_run:
        from spt.execution.dry_run import dry_run, render

        preview = dry_run(planned.grid, planned.folder, planned.costs, planned.target.part, planned.target.arm)
        print_json(preview) if study.as_json else console().print(render(preview, study.full))
        return
    finished = planned.run()
    if planned.runtime.main:
        show_report(finished.report, study.as_json, study.full)
        notify_written(finished.path)
    if finished.failed:
        raise _failed_runs(finished.failed)


def _failed_runs(count: int) -> BaseException:
    from spt.runtime.distributed import mark_shared

    text = f"{count} of the runs failed; the report lists them; the same command tries again what did not diverge"
    return mark_shared(FailedRuns(text))


def _save(path: Path, study: Any, as_json: bool) -> None:
    from spt.config.load import read as read_recipe
    from spt.runs.files import write_text
    from spt.studies.schema import to_yaml

    for name in study.recipes:  # raises for one that does not exist
        read_recipe(name)
    target = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    if target.exists():
        raise UsageError(f"{target} exists; name another file")
    write_text(target, to_yaml(study, target.parent, f"spt study run {target.name}"))
    notify(f"wrote {target}; run it with: spt study run {target}")
    if as_json:
        print_json({"file": str(target)})


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if index == "auto":
        from spt.execution.queue import numbered_task

        found, all_tasks = numbered_task()
        index, count = str(found + 1), count or ("" if all_tasks is None else str(all_tasks))
        if not count:
            raise UsageError(f"--shard {text}: the scheduler does not say how many parts there are; write auto/N")
    whole = all(part.isascii() and part.isdigit() and len(part) < 6 for part in (index, count))
    if not (whole and 1 <= int(index) <= int(count)):
        which = "" if index == text.partition("/")[0] else f" is {index}/{count} here"
        raise UsageError(f"--shard {text}{which}: the I-th of N parts is expected, such as 1/4, with I from 1 to N")
    return int(index), int(count)


def _list(text: str | None, option: str, kind: Callable[[str], Any] = float) -> list[Any] | None:
    """`0.2,0.4` as numbers, or as words."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if parts:
            return [kind(part) for part in parts]
        raise ValueError
    except ValueError:
        what = "words" if kind is str else "numbers" if kind is float else "whole numbers"
        such = "" if kind is str else ", such as 0.2,0.4" if kind is float else ", such as 1,4"
        raise UsageError(f"{option} {text}: {what} with commas between them are expected{such}") from None


def _assigned(text: str, option: str) -> dict[str, Any]:
    """`a=1,b=[2,3]` as a mapping."""
    from spt.config.yaml import parse_yaml

    values: dict[str, Any] = {}
    for part in filter(None, _split_at_commas(text)):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name or name in values:
            raise UsageError(f"{option} {text}: {part!r} is not name=value, or is given twice")
        values[name] = parse_yaml(value, f"{option} {text}")
    return values


def _split_at_commas(text: str) -> list[str]:
    """The parts between commas, except those inside brackets or braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


@command(study_app, "compare")
def study_compare(
    arguments: RecipesArgument,
    arms: ArmsOption = None,
    splits: SplitsOption = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Both arms of every recipe: the same as spt compare."""
    _study("compare", arguments, {"arms": _list(arms, "--arms", str), "splits": _splits(splits)}, study, runtime)


MatchOption = Annotated[
    Literal["parameters", "flops", "time", "none"],
    typer.Option("--match", help="What to make equal: parameters, FLOPs or seconds per example, or nothing."),
]
ScaleOption = Annotated[
    Literal["width", "depth"], typer.Option("--scale", help="What to scale for that: d_model or n_layers.")
]


@command(study_app, "models")
def study_models(
    arguments: RecipesArgument,
    match: MatchOption = "parameters",
    scale: ScaleOption = "width",
    arms: ArmsOption = None,
    splits: SplitsOption = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Compare several models in both arms, each after the first scaled until it costs as much."""
    options = {"match": match, "scale": scale, "arms": _list(arms, "--arms", str), "splits": _splits(splits)}
    _study("models", arguments, options, study, runtime)


@command(study_app, "compute")
def study_compute(
    arguments: RecipesArgument,
    shares: Annotated[
        str | None, typer.Option("--shares", help="Shares of the budget for pretraining.", show_default="0,0.2,0.4,0.6")
    ] = None,
    match: Annotated[
        Literal["epochs", "examples", "flops", "time"] | None,
        typer.Option(
            "--match", help="The unit in which all shares have the same budget.", show_default="the recipe's own unit"
        ),
    ] = None,
    total: Annotated[
        float | None,
        typer.Option(
            "--total", help="The whole budget, in the unit of --match.", show_default="the recipe's two stages"
        ),
    ] = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Vary the share of one budget that goes to pretraining; scratch gets the whole budget."""
    _study("compute", arguments, {"shares": _list(shares, "--shares"), "match": match, "total": total}, study, runtime)


@command(study_app, "data")
def study_data(
    arguments: RecipesArgument,
    fractions: Annotated[
        str | None,
        typer.Option("--fractions", help="Fractions of the training split.", show_default="0.005,0.01,0.05,0.1,0.5,1"),
    ] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Numbers of rows, instead of fractions.")] = None,
    stratified: Annotated[bool, typer.Option("--stratified", help="Keep the proportions of classes.")] = False,
    pretrain_on: Annotated[
        Literal["subset", "all"],
        typer.Option("--pretrain-on", help="Pretrain on the same subset, or on all inputs, without labels."),
    ] = "subset",
    hold: Annotated[
        Literal["steps", "epochs"],
        typer.Option("--hold", help="What smaller subsets keep: steps or epochs."),
    ] = "steps",
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Vary the amount of data: nested subsets of the training split, in both stages."""
    options = {"stratified": stratified, "pretrain_on": pretrain_on, "hold": hold}
    sizes = {"fractions": _list(fractions, "--fractions"), "rows": _list(rows, "--rows", int)}
    _study("data", arguments, {**sizes, **options}, study, runtime)


@command(study_app, "size")
def study_size(
    arguments: RecipesArgument,
    size: Annotated[
        list[str],
        typer.Option("--size", metavar="NAME:a=1,b=2", help="A size and its changes (repeatable): 1M:d_model=144"),
    ],
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Vary the model's size; each size is a set of changes to the recipe."""
    _study("size", arguments, {"sizes": _levels(size, "--size")}, study, runtime)


def _levels(texts: Sequence[str], option: str) -> dict[str, dict[str, Any]]:
    """`NAME:a=1,b=2`, each name once."""
    levels: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, changes = text.partition(":")
        if not name or name in levels or (option == "--size" and not changes):
            raise UsageError(f"{option} {text}: NAME:option=value,… is expected, each name once")
        levels[name] = _assigned(changes, option)
    return levels


@command(study_app, "variants")
def study_variants(
    arguments: RecipesArgument,
    variant: Annotated[
        list[str],
        typer.Option(
            "--variant",
            metavar="NAME:a.b=1,c=2",
            help="A variant and its changes (repeatable), none for the recipe itself: DSS:model.name=dss",
        ),
    ],
    match: MatchOption = "none",
    scale: ScaleOption = "width",
    splits: SplitsOption = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Compare named variants of a recipe with each other; each is a set of changes."""
    options = {"variants": _levels(variant, "--variant"), "match": match, "scale": scale, "splits": _splits(splits)}
    _study("variants", arguments, options, study, runtime)


@command(study_app, "init")
def study_init(
    arguments: RecipesArgument,
    initialisations: Annotated[
        str | None,
        typer.Option("--initialisations", help="Initialisations of the model.", show_default="structured,random"),
    ] = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Compare structured with random initial parameters, in both arms."""
    _study("init", arguments, {"initialisations": _list(initialisations, "--initialisations", str)}, study, runtime)


@command(study_app, "reach")
def study_reach(
    arguments: RecipesArgument,
    reaches: Annotated[
        str | None,
        typer.Option(
            "--reaches", help="Steps that a layer sees; full is always included.", show_default="1,4,16,64,256,1024"
        ),
    ] = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Cut kernels and attention to a number of steps: how much of a sequence does a task need?"""
    _study("reach", arguments, {"reaches": _list(reaches, "--reaches", _steps_or_full)}, study, runtime)


def _steps_or_full(text: str) -> int | str:
    return text if text == "full" else int(text)


@command(study_app, "objective")
def study_objective(
    arguments: RecipesArgument,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            "--objective",
            metavar="NAME[:a=1,b=2]",
            help="An objective (repeatable): masked, masked:ratio=0.5,span=8, next.",
        ),
    ] = None,
    ratios: Annotated[str | None, typer.Option("--ratios", help="Ratios of masked steps, each an objective.")] = None,
    spans: Annotated[str | None, typer.Option("--spans", help="Spans: steps masked together, with each ratio.")] = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Vary the pretraining objective: masked, with which ratio and span, or next-step prediction."""
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
    _study("objective", arguments, {"objectives": objectives}, study, runtime)


@command(study_app, "tune")
def study_tune(
    arguments: RecipesArgument,
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space",
            metavar="NAME=A,B,C",
            help="A setting and its values (x3: three times the recipe's own), or A..B for a random search; "
            "pretraining's are pretrain.NAME; or a packaged space (repeatable).",
            show_default="default",
        ),
    ] = None,
    protocol: Annotated[
        Literal["trials", "compute"],
        typer.Option(
            "--protocol", help="Give both arms as many trials as each other, or as much compute, pretraining included."
        ),
    ] = "trials",
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Search this many random settings; without it, the whole grid."),
    ] = None,
    search_seed: Annotated[int, typer.Option("--search-seed", min=0, help="Seed of the random search.")] = 0,
    trial_seeds: Annotated[
        str | None,
        typer.Option("--trial-seeds", help="Seeds of every trial: how many, or which (0,).", show_default="0,"),
    ] = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Tune both arms equally, on validation; then run both over seeds with the settings chosen."""
    options = {"space": _space(space) if space else None, "protocol": protocol, "trials": trials}
    tried = seeds(trial_seeds, "--trial-seeds") if trial_seeds is not None else None
    _study("tune", arguments, {**options, "search_seed": search_seed, "trial_seeds": tried}, study, runtime)


def _space(texts: Sequence[str]) -> dict[str, Any]:
    """Packaged spaces, and settings with values, which stand above those."""
    from spt.studies.schema import packaged_space

    packaged: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            packaged |= packaged_space(name)
        elif name and name not in given:
            given[name] = _values(values, text)
        else:
            raise UsageError(f"--space {text}: NAME=A,B,C or NAME=A..B is expected, each name once")
    return packaged | given


def _values(text: str, given: str) -> Any:
    from spt.config.yaml import parse_yaml

    if ".." in text:
        low, _, high = text.partition("..")
        return {"low": parse_yaml(low, f"--space {given}"), "high": parse_yaml(high, f"--space {given}")}
    return [parse_yaml(part, f"--space {given}") for part in text.split(",") if part]


SourceArgument = Annotated[
    str, typer.Argument(metavar="FILE|FOLDER|NAME", help="A study's file or folder, or a packaged study.")
]
PartArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[RECIPE…]", help="Only these of its recipes.", show_default=False)
]
LevelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--level", help="Only these variants, sizes, initialisations or reaches (repeatable).", show_default="all"
    ),
]


@command(study_app, "run")
def study_run(
    source: SourceArgument,
    recipes: PartArgument = None,
    level: LevelOption = None,
    study: StudyOptions = STUDY,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Run a study's file, or a part of it, or continue it: finished runs are reused."""
    from spt.studies.schema import part_of, read

    _run(part_of(read(source), recipes or (), level or ()), study, runtime)


@command(study_app, "work")
def study_work(
    source: SourceArgument,
    recipes: PartArgument = None,
    level: LevelOption = None,
    work: WorkOptions = WORK,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Make those runs of a study that no other worker is making, until none is left. Start any number of workers, on
    any machines that share the folder of runs.
    """
    from spt.api import plan_study
    from spt.studies.schema import part_of, read

    planned = plan_study(
        part_of(read(source), recipes or (), level or ()),
        seeds=None if work.seeds is None else seeds(work.seeds),
        smoke=smoke_size(work.smoke, work.smoke_full),
        out=work.out,
        settings=replace(settings("auto", runtime), lease=work.lease),
    )
    done = planned.work(work.max_runs, work.wait)
    if planned.runtime.main:
        if work.as_json:
            print_json({**done._asdict(), "folder": str(done.folder)})
        elif done.left:
            notify(f"{done.made} runs made here; {done.left} are left in {done.folder}")
        else:
            notify(f"{done.made} runs made here; none is left, and the report is {done.folder / 'report.html'}")
    if done.failed:
        raise _failed_runs(done.failed)


@command(study_app, "status")
def study_status(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A study, or a folder of runs.", show_default="--out")
    ] = None,
    out: OutOption = RUNS,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show how far studies are, from their files alone: runs done, running, failed, missing."""
    from spt.studies.status import render, study_status

    status = study_status(folder or out)
    print_json(status) if as_json else console().print(render(status))


@command(study_app, "list")
def study_list(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the studies that come with spt. Their costs: spt study run NAME --dry-run, or docs/recipes.md."""
    from spt.config.load import describe
    from spt.studies.schema import packaged

    rows = [{"name": name, "description": describe(text)} for name, text in packaged().items()]
    print_json(rows) if as_json else print_groups({"": rows})


@command(study_app, "show")
def study_show(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A packaged study, or a file.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print a study's file with every default filled in."""
    from spt.studies.schema import read, to_yaml

    opened = read(source)
    if as_json:
        print_json({"name": opened.name, **opened.study.model_dump(mode="json")})
    else:
        print(to_yaml(opened.study), end="")
