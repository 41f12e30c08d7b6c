"""`spt try`: from a file to an answer."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spt.cli.guard import command
from spt.cli.options import DataOption, DebugOption, JsonOption, jobs
from spt.cli.output import notify, print_json
from spt.errors import FailedRuns, UsageError

if TYPE_CHECKING:
    from spt.advisor.advise import Advice, Request
    from spt.advisor.columns import AmbiguousError

app = typer.Typer()


@command(app, "try")
def try_data(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A table, a folder of tables or sounds, an .npz of X and y, or owner/name of a hub data set.",
        ),
    ],
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="COL,…", help="Column of the label. Several: labels of a row, or numbers."),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option("--separator", metavar="TEXT|none", help="What separates several labels in a cell: ';'."),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="COL,…", help="Columns of the input. Several: channels.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="COL|none", help="Column, such as patient: rows with the same value stay in one split."
        ),
    ] = None,
    ids: Annotated[
        str | None, typer.Option("--id", metavar="COL|none", help="Column that names the sequence a row is a step of.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--time", metavar="COL|none", help="Column that orders the steps of a sequence.")
    ] = None,
    static: Annotated[
        str | None,
        typer.Option("--static", metavar="COL,…", help="Columns of numbers or categories beside a sequence: age,sex."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="text, list, wide, long (one row per step) or files.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Metric to compare, such as auroc, mcc, f1_macro, spearman.",
            show_default=False,
        ),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option("--positive", metavar="LABEL", help="Positive class of f1, auroc and auprc."),
    ] = None,
    class_weights: Annotated[
        str | None,
        typer.Option(
            "--class-weights",
            metavar="LABEL=W,…",
            help="Class weights in training: rare=5, or balanced.",
        ),
    ] = None,
    balanced_sampling: Annotated[
        bool, typer.Option("--balanced-sampling", help="Sample every class equally often in finetuning.")
    ] = False,
    channels: Annotated[
        str | None,
        typer.Option("--channels", metavar="NAME,…", help="Signals to read from WFDB and EDF files."),
    ] = None,
    unlabelled: Annotated[
        Path | None,
        typer.Option(
            "--unlabelled",
            metavar="DATA",
            help="More unlabelled rows for pretraining, which is then no longer self-pretraining.",
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Time for everything: 20m, 2h, 900s.")
    ] = "30m",
    splits: Annotated[
        int | None,
        typer.Option(
            "--splits",
            metavar="K",
            min=1,
            max=100,
            help="K folds of the rows, each the test split once. 1: a single split.",
            show_default="5 of few rows, if the budget has them",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder for recipes and runs.", show_default="NAME-try"),
    ] = None,
    jobs_: Annotated[
        str, typer.Option("--jobs", metavar="N|auto", envvar="SPT_JOBS", help="Runs at once; auto as in spt compare.")
    ] = "auto",
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is a GPU.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what was found, the plan and its times; write and train nothing.")
    ] = False,
    window: Annotated[
        str | None, typer.Option("--window", metavar="STEPS|32s", help="Cut recordings into windows of this length.")
    ] = None,
    stride: Annotated[
        str | None,
        typer.Option("--stride", metavar="STEPS|8s", help="Distance from one window's start to the next one's."),
    ] = None,
    resample: Annotated[
        str | None,
        typer.Option("--resample", metavar="HZ|1/4", help="Resample to this rate, or by this ratio, without aliasing."),
    ] = None,
    patch: Annotated[int | None, typer.Option("--patch", metavar="K", help="Join this many steps into one.")] = None,
    spectrogram: Annotated[
        str | None, typer.Option("--spectrogram", metavar="STEPS,HOP", help="Use frames of log power as steps.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="HZ", help="Steps per second, if the data do not say.")
    ] = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Does self-pretraining help on these data, and which model?

    Finds the columns, plans within a time budget, trains a few models in both arms and says what came of it. The
    recipes are kept, to run and to edit.
    """
    from spt.advisor.classes import ClassOptions, given_weights
    from spt.advisor.recordings import given_transforms

    classes = ClassOptions(positive, given_weights(class_weights), "balanced" if balanced_sampling else None)
    changes = given_transforms(window, stride, resample, patch, spectrogram, rate)  # before anything is waited for
    from spt.advisor.advise import Request, carry_out
    from spt.advisor.columns import ColumnRoles, data_kind
    from spt.runtime.settings import Settings

    columns, beside = _column_names("--inputs", inputs), _column_names("--static", static)
    signals = _column_names("--channels", channels)
    given = ColumnRoles(label, group, columns, ids, at, separator, data_kind(kind) if kind else None, beside, signals)
    settings = Settings(cpu=cpu, quiet=as_json, debug=debug)
    if unlabelled is not None and not unlabelled.exists():
        raise UsageError(f"--unlabelled {unlabelled}: no such file or folder")
    request = Request(data, given, budget, jobs(jobs_), out, settings, metric, splits, changes, unlabelled, classes)
    request, advice = _ask_until_clear(request, as_json)
    if dry_run:
        if as_json:
            print_json(_plan_record(advice, request))
        return
    outcome = carry_out(advice, request, notify)
    page = outcome.study / "report.html"
    if as_json:
        from spt.report.machine import to_json

        said = outcome.answer
        print_json(
            {
                "answer": said.words,
                "recommendation": said.recommendation,
                "leading": said.leading,
                "rows": to_json(outcome.report)["rows"],
                **_plan_record(advice, request),
                "seconds": outcome.seconds,
                "report": str(page),
            }
        )
    else:
        import textwrap

        print("\n".join(textwrap.wrap(outcome.answer.words, 80, break_long_words=False, break_on_hyphens=False)))
    notify(f"recipes: {request.folder}     report: {page}")
    if outcome.failed:
        raise FailedRuns(f"{outcome.failed} of the runs failed; the report lists them with their reasons")


def _column_names(option: str, given: str | None) -> tuple[str, ...]:
    names = tuple(part.strip() for part in (given or "").split(",") if part.strip())
    if given is not None and not names:
        raise UsageError(f"{option} {given!r}: names of columns with commas between them are expected")
    return names


def _plan_record(advice: "Advice", request: "Request") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "decisions": [*advice.decisions],
        "findings": [*advice.findings],
        "plan": {**asdict(advice.plan), "runs": advice.plan.runs, "jobs": advice.jobs, "budget": request.budget},
        "timings": [asdict(timing) for timing in advice.timings],
        "folder": str(request.folder),
    }


def _ask_until_clear(request: "Request", as_json: bool) -> tuple["Request", "Advice"]:
    """The plan; on a terminal, what is ambiguous is asked."""
    from spt.advisor.advise import advise
    from spt.advisor.columns import AmbiguousError

    lines: list[str] = []  # told once, though the table is read again after a question

    def tell(line: str) -> None:
        if line not in lines:
            lines.append(line)
            notify(line)

    while True:
        try:
            return request, advise(request, tell)
        except AmbiguousError as error:
            if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            value = _ask(error)
            field = error.option.removeprefix("--")
            chosen: dict[str, Any] = {field: tuple(value.split(",")) if field == "inputs" else value}
            request = replace(request, given=replace(request.given, **chosen), answered=(*request.answered, field))


def _ask(error: "AmbiguousError") -> str:
    notify(f"{error.question[0].upper()}{error.question[1:]}:")
    for number, (value, about) in enumerate(error.choices, 1):
        notify(f"  {number}  {value} ({about})")
    numbers = [str(number) for number in range(1, len(error.choices) + 1)]
    while (given := str(typer.prompt("Which", err=True)).strip()) not in numbers:
        notify(f"a number from 1 to {len(numbers)} is expected")
    return error.choices[int(given) - 1][0]
