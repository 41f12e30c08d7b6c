"""`spt export`: a trained model goes out."""

from pathlib import Path
from typing import Annotated

import typer

from spt.cli.guard import command
from spt.cli.options import DataOption, DebugOption, JsonOption
from spt.cli.output import notify, print_json

app = typer.Typer()


@command(app)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of either stage.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="A folder that is not there yet.", show_default="RUN/exported"),
    ] = None,
    program: Annotated[
        bool, typer.Option("--program", help="Also the network as a torch.export program, where its outputs are equal.")
    ] = False,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """A run's model as a folder of its own: weights, config and model card, which spt.load_model opens.

    It answers new rows without the training data, the run and the recipe. That it does so as the run does is checked
    before the folder is there.
    """
    from spt.inference.export import export as export_run

    result = export_run(run, out or run / "exported", program)
    if as_json:
        print_json(result)
    else:
        notify(f"exported: {result['folder']} ({', '.join(result['files'])})")
