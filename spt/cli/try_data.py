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
        typer.Argument(metavar="DATA", help="A table, a folder of tables or sounds, an .npz of X and y, owner/name."),
    ],
    label: Annotated[str | None, typer.Option("--label", metavar="COL", help="The label's column.")] = None,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="COL,…", help="The columns of the input; several are channels.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="COL|none", help="Rows of one value, such as a patient, are not split apart."),
    ] = None,
    ids: Annotated[
        str | None, typer.Option("--id", metavar="COL|none", help="Names the sequence of which a row is a step.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--time", metavar="COL|none", help="Orders the steps of a sequence.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="text, list, wide, long (a row a step) or files.")
    ] = None,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="For all of it: 20m, 2h, 900s.")] = "30m",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where recipes and runs go.", show_default="NAME-try")
    ] = None,
    jobs_: Annotated[
        str, typer.Option("--jobs", metavar="N|auto", envvar="SPT_JOBS", help="Runs at once; auto as in spt compare.")
    ] = "auto",
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what was found, the plan and its times; write and train nothing.")
    ] = False,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Does self-pretraining help on these data, and which model? Finds the columns, plans within a time budget, trains
    a few models in both arms and says what came of it. The recipes remain, to run and to edit."""
    from spt.advisor.advise import Request, carry_out
    from spt.advisor.columns import ColumnRoles, data_kind
    from spt.runtime.settings import Settings

    columns = tuple(part.strip() for part in (inputs or "").split(",") if part.strip())
    if inputs is not None and not columns:
        raise UsageError(f"--inputs {inputs!r}: names of columns with commas between them are expected")
    given = ColumnRoles(label, group, columns, ids, at, data_kind(kind) if kind else None)
    request = Request(data, given, budget, jobs(jobs_), out, Settings(cpu=cpu, quiet=as_json, debug=debug))
    request, advice = _ask_until_clear(request, as_json)
    if dry_run:
        if as_json:
            print_json(_told(advice, request))
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
                **_told(advice, request),
                "seconds": outcome.seconds,
                "report": str(page),
            }
        )
    else:
        import textwrap

        print("\n".join(textwrap.wrap(outcome.answer.words, 100, break_long_words=False, break_on_hyphens=False)))
    notify(f"recipes: {request.folder}     report: {page}")
    if outcome.failed:
        raise FailedRuns(f"{outcome.failed} of the runs failed; the report lists them with their reasons")


def _told(advice: "Advice", request: "Request") -> dict[str, Any]:
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
            request = replace(request, given=replace(request.given, **chosen))


def _ask(error: "AmbiguousError") -> str:
    notify(f"{error.question[0].upper()}{error.question[1:]}:")
    for number, (value, about) in enumerate(error.choices, 1):
        notify(f"  {number}  {value} ({about})")
    numbers = [str(number) for number in range(1, len(error.choices) + 1)]
    while (given := str(typer.prompt("Which", err=True)).strip()) not in numbers:
        notify(f"a number from 1 to {len(numbers)} is expected")
    return error.choices[int(given) - 1][0]
