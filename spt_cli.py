"""The command `spt`, assembled from the groups in spt/cli.

Nothing heavy is imported before a command needs it, so help, lists and reports answer at once.
"""

from spt.runtime import signals

if __name__ == "__main__":
    signals.install()  # here, since already the imports take a moment

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spt import __version__
from spt.cli import (
    baselines,
    bench,
    data,
    inference,
    inspect,
    recipes,
    report,
    results,
    streams,
    study,
    system,
    train,
    try_data,
)
from spt.errors import UsageError, displayable
from spt.runtime import launch


class Commands(TyperGroup):
    """The commands; complaints about arguments repeat them as they can be shown."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _displayable_complaints():
            return super().make_context(*arguments, **options)

    def invoke(self, context: Any) -> Any:
        with _displayable_complaints():
            return super().invoke(context)


@contextlib.contextmanager
def _displayable_complaints() -> Iterator[None]:
    try:
        yield
    except (SystemExit, BrokenPipeError):  # rich's, of help whose reader has left; guard catches all others
        streams.discard()
        raise typer.Exit(0) from None
    except Exception as error:  # a class of typer's that only newer versions export
        if isinstance(message := getattr(error, "message", None), str):
            error.message = displayable(message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="spt",
    cls=Commands,
    help="Compare sequence models fairly: self-pretrain on the task's own training inputs, finetune, report the gain.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A recipe is a packaged name (spt recipes list) or a YAML file; a.b=c after it changes a value.",
)
for group in (
    train.app,
    try_data.app,
    study.compare_app,
    baselines.app,
    report.app,
    results.app,
    inspect.app,
    inference.app,
    system.app,
):
    app.add_typer(group)
app.add_typer(recipes.recipes_app, name="recipes")
app.add_typer(recipes.list_app, name="list")
app.add_typer(data.data_app, name="data")
app.add_typer(bench.bench_app, name="bench")
app.add_typer(study.study_app, name="study")
app.add_typer(inspect.inspect_app, name="inspect")
app.add_typer(system.check_app, name="check")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"spt {__version__}")
        raise typer.Exit(0)


def main() -> None:
    """Entry point: typer's own complaints exit with 2, ours with the code of their kind."""
    signals.install()
    streams.prepare()
    try:
        launch.end_with_parent()
        launch.join_slurm(arguments=sys.argv[1:])
        launch.check_group()
    except UsageError as error:
        print(f"spt: {displayable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    if launch.rank() > 0:  # of several processes the first one speaks
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code: object = 0
    try:
        app(prog_name="spt")
    except SystemExit as ended:
        code = ended.code
    except OSError as error:  # of help, which is printed before a command begins
        code = streams.problem(error)
    code = streams.finish(code)
    signals.ignore()
    if launch.world_size() > 1 and isinstance(code, int | None):
        launch.exit_process(code or 0)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
