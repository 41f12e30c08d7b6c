"""`spt recipes` and `spt list`: what comes with spt."""

from pathlib import Path
from typing import Annotated, Any

import typer

from spt.cli.guard import command
from spt.cli.options import DebugOption, JsonOption
from spt.cli.output import console, notify, print_groups, print_json, print_table
from spt.errors import UsageError

recipes_app = typer.Typer(help="List, print and copy the recipes that come with spt.", no_args_is_help=True)
list_app = typer.Typer(help="List the models and tasks that recipes can name.", no_args_is_help=True)


@command(recipes_app, "list")
def recipes_list(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD…]", help="Only those that contain all of these words: lra s4.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the recipes that come with spt, folder by folder. Their costs: docs/recipes.md."""
    from spt.config.load import describe, folders, packaged

    rows = [{"name": name, "description": describe(text)} for name, text in packaged().items()]
    wanted = [word.lower() for word in words or ()]
    rows = [row for row in rows if all(word in f"{row['name']} {row['description']}".lower() for word in wanted)]
    if not rows:
        missing = " and ".join(f"'{word}'" for word in words or ())
        raise UsageError(f"no recipe has {missing} in its name or first line; spt recipes list shows all of them")
    if as_json:
        print_json(rows)
        return
    groups = {title: [row for row in rows if row["name"].rpartition("/")[0] == name] for name, title in folders()}
    print_groups(groups)


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A packaged recipe, or a file.")]


@command(recipes_app, "show")
def recipes_show(name: NameArgument, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Print a recipe's file as it is (spt show fills in every default)."""
    from spt.config.load import read

    stem, text, _ = read(name)
    if as_json:
        print_json({"name": stem, "text": text})
    else:
        print(text, end="")


@command(recipes_app, "copy")
def recipes_copy(
    name: NameArgument,
    to: Annotated[
        Path | None, typer.Argument(help="A file or a folder. Default: a file of the same name here.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Copy a packaged recipe, to change it."""
    from spt.config.load import read
    from spt.runs.files import writing

    stem, text, _ = read(name)
    target = to or Path()
    if target.is_dir():
        target = target / f"{stem.rpartition('/')[2]}.yaml"
    if target.exists():
        raise UsageError(f"{target} exists; name another file")
    with writing(target):
        target.write_text(text, encoding="utf-8")
    notify(f"wrote {target}; run it with: spt compare {target}")


@command(recipes_app, "schema")
def recipes_schema(debug: DebugOption = False) -> None:
    """Print the JSON schema of recipes, for editors that check YAML."""
    from spt.config.load import schema

    print_json(schema())


@command(list_app, "models")
def list_models(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List models, built in and from installed plug-ins; a recipe can also name a .py file.

    Parameters are those of the backbone with its default options (d_model 128, n_layers 4, 1,024 steps); the cost
    is that of one block on one sequence, in leading terms: L steps, D width, N state size, c chunk.
    """
    from rich.padding import Padding
    from rich.text import Text

    from spt.config.plugins import listing

    rows = [row._asdict() for row in listing("models")]
    if as_json:
        print_json(rows)
        return
    facts = ("name", "parameters", "cost")
    cells = [{key: _cell(row[key]) for key in facts} for row in rows]
    widths = {key: max(len(key), *(len(cell[key]) for cell in cells)) for key in facts}

    def line(cell: dict[str, str]) -> str:
        return f"{cell['name']:{widths['name']}}  {cell['parameters']:>{widths['parameters']}}  {cell['cost']}".rstrip()

    shown = console()
    shown.print(line({key: key for key in facts}), style="bold", soft_wrap=True)
    for row, cell in zip(rows, cells, strict=True):
        shown.print(line(cell), highlight=False, soft_wrap=True)
        paper = str(row["paper"] or "")
        described = row["description"] + (f" {paper}." if paper[-4:] not in row["description"] else "")
        shown.print(Padding(Text(described, style="dim"), (0, 0, 0, widths["name"] + 2)))


@command(list_app, "tasks")
def list_tasks(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List tasks, built in and from installed plug-ins; a recipe can also name a .py file."""
    from spt.config.plugins import listing

    rows = [{key: getattr(row, key) for key in ("name", "description", "source")} for row in listing("tasks")]
    print_table(rows, ("name", "description"), as_json)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
