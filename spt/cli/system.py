"""`spt env`, `spt doctor` and `spt check`: the installation, and models held to their contract."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spt.cli.guard import command
from spt.cli.options import DebugOption, JsonOption
from spt.cli.output import print_json, show

if TYPE_CHECKING:
    from spt.checks.model_contract import CheckResult

app = typer.Typer()
check_app = typer.Typer(help="Check models, your own included.", no_args_is_help=True)


@command(app)
def env(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show what runs depend on: versions, devices, folders. Made for pasting into an issue."""
    from spt.checks.installation import environment_report

    facts = environment_report()
    if as_json:
        print_json(facts)
    else:
        for key, value in facts.items():
            show(f"{key:<16} {value}")


@command(app)
def doctor(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Check this installation end to end on generated data, and say what is slow here, in about 20 seconds."""
    from spt.checks.installation import check_installation

    _show_checks(check_installation(), as_json)


@command(check_app, "model")
def check_model(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A model's name, or your own .py file.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check that a model keeps the contract of every backbone: shapes, padding, causality, gradients, operations."""
    from spt.checks.model_contract import check_contract
    from spt.config.plugins import find_plugin

    _show_checks(check_contract(find_plugin("models", model)), as_json)


@command(check_app, "rounding")
def check_rounding(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL …]", help="Names of models, or your own .py files. Default: all built-in models."
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", min=1, help="Length of the two sequences, in steps.")] = 1024,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is a GPU.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Also write to this file what --json prints.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure what models lose to rounding on this device: float32 and bfloat16 against the same model in float64 on
    the CPU.

    Relative errors of outputs and gradients, and of a recurrent model's steps against the whole sequence.
    """
    from spt.checks.rounding import check_rounding as measure
    from spt.cli.output import console, notify
    from spt.runs.files import check_writable, finite, write_json
    from spt.runtime.distributed import Runtime
    from spt.runtime.settings import Settings

    if save is not None:
        check_writable(save)
    device = Runtime(Settings(quiet=True, cpu=cpu)).device
    measured = measure(models or (), device, length, notify)
    if save is not None:
        write_json(save, finite(measured))
    if as_json:
        print_json(measured)
    else:
        console().print(_rounding_table(measured))
        for name, row in measured["rows"].items():
            if "failed" in row:
                print(f"{name} failed: {row['failed']}")
    if all("failed" in row for row in measured["rows"].values()):
        raise typer.Exit(4)


def _rounding_table(measured: dict[str, Any]) -> Any:
    from rich.table import Table

    columns = ("float32 output", "float32 gradients", "bfloat16 output", "bfloat16 gradients", "steps")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("model")
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in measured["rows"].items():
        if "failed" not in row:
            table.add_row(name, *("" if row[key] is None else f"{row[key]:.1e}" for key in columns))
    return table


def _show_checks(checks: "list[CheckResult]", as_json: bool) -> None:
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}{f': {check.detail}' if check.detail else ''}")
    failed = [check for check in checks if not check.ok]
    if failed:
        raise typer.Exit(max(check.exit_code for check in failed))
