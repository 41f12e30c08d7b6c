"""`spt env`, `spt doctor` and `spt check`: the installation, and models held to their contract."""

from typing import TYPE_CHECKING, Annotated

import typer

from spt.cli.guard import command
from spt.cli.options import DebugOption, JsonOption
from spt.cli.output import print_json

if TYPE_CHECKING:
    from spt.checks.model_contract import CheckResult

app = typer.Typer()
check_app = typer.Typer(help="Checks of what you have written yourself.", no_args_is_help=True)


@command(app)
def env(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """What runs depend on: versions, devices, folders. Made for pasting into an issue."""
    from spt.checks.installation import environment_report

    facts = environment_report()
    if as_json:
        print_json(facts)
    else:
        for key, value in facts.items():
            print(f"{key:<16} {value}")


@command(app)
def doctor(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Check this installation, end to end on generated data, and say what is slow here, in about 20 seconds."""
    from spt.checks.installation import check_installation

    _show_checks(check_installation(), as_json)


@command(check_app, "model")
def check_model(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A model's name, or a .py file of yours.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Hold a model to the contract that every backbone keeps: shapes, padding, causality, gradients, operations."""
    from spt.checks.model_contract import check_contract
    from spt.config.plugins import find_plugin

    _show_checks(check_contract(find_plugin("models", model)), as_json)


def _show_checks(checks: "list[CheckResult]", as_json: bool) -> None:
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}{f': {check.detail}' if check.detail else ''}")
    failed = [check for check in checks if not check.ok]
    if failed:
        raise typer.Exit(max(check.exit_code for check in failed))
