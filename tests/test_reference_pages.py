"""The pages that `make docs` makes: up to date, complete, and the same everywhere."""

import ast
import importlib.util
import inspect
import os
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import reference_pages
import typer
from reference_pages import VARIABLES, commands
from tiny import ROOT

from spt import errors
from spt.checks.installation import VARIABLES as SHOWN
from spt.config import plugins
from spt.config.load import schema
from spt.config.plugins import find_plugin, listing
from spt.config.recipe import Recipe
from spt.studies.schema import KINDS, Range
from spt.training.objectives import OBJECTIVES
from spt_cli import app

# Not `import build`: that is what packages are built with.
_spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs)
pages = docs.pages

SOURCES = [*(path for name in ("spt", "models", "tasks") for path in (ROOT / name).rglob("*.py")), ROOT / "spt_cli.py"]
CONSTANTS = {  # states of Slurm's jobs, an export, constants of Triton's kernels, what torch and the system are asked
    *("TORCHELASTIC_USE_AGENT_STORE", "SC_PAGE_SIZE", "SC_PHYS_PAGES"),
    *("BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY", "FEED_FORWARD_OPTIONS", "IS_COMPLEX", "PER_STEP"),
}


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", pages())
def test_a_page_is_what_the_code_says(name, monkeypatch):
    """At any width of the terminal, with any variables set and any plug-ins installed."""
    for variable in ("SPT_RUNS_DIR", "SPT_DATA_DIR", "SPT_CACHE_DIR"):
        monkeypatch.setenv(variable, "/elsewhere")
    monkeypatch.setenv("COLUMNS", "40")
    plug_in = EntryPoint("another", "somebody.another", "spt.models")._for(type("Dist", (), {"name": "somebody"}))
    monkeypatch.setattr(plugins, "_plugins", lambda kind: [plug_in])
    assert page(name) == pages()[name](), f"docs/{name} is not what the code says; run make docs"


def test_writing_changes_what_differs_alone(tmp_path):
    made = {"a/b.md": lambda: "one\n", "c.md": lambda: "two\n"}
    assert docs.write(tmp_path, made) == [tmp_path / "a" / "b.md", tmp_path / "c.md"]
    (tmp_path / "c.md").write_text("old\n")
    assert docs.write(tmp_path, made) == [tmp_path / "c.md"] and (tmp_path / "c.md").read_text() == "two\n"


@pytest.mark.parametrize("name", pages())
def test_a_page_says_where_it_is_from_and_nothing_of_this_machine(name):
    text = page(name)
    assert "make docs" in "\n".join(text.splitlines()[:4])
    for private in (str(ROOT), str(Path.home()) + os.sep, "PydanticUndefined", "<class", "typing.", " object at 0x"):
        assert private not in text, private


def models(kind, seen):
    """A pydantic model and those in its fields."""
    if kind in seen:
        return
    seen.add(kind)
    for field in kind.model_fields.values():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                models(inner, seen)


def test_every_key_has_a_description():
    seen = set()
    parts = [find_plugin(kind, row.name).module.Config for kind in ("models", "tasks") for row in listing(kind)]
    for kind in (Recipe, Range, *KINDS.values(), *OBJECTIVES.values(), *parts):
        models(kind, seen)
    bare = [f"{kind.__name__}.{name}" for kind in seen for name, f in kind.model_fields.items() if not f.description]
    assert len(seen) > 30 and not bare


def test_every_key_of_the_schema_is_on_its_page():
    """The schema of a recipe, which editors use, and the pages tell of the same keys."""
    text, found = page("reference/recipe.md"), schema()
    for name, part in found["$defs"].items():
        for key in part.get("properties", {}) if name != "Part" else ():
            assert re.search(rf"^\| `(\w+\.)*{key}` \|", text, re.M), (name, key)
    for place, name in (("model", "models"), ("task", "tasks")):
        sections = re.split(r"^## ", page(f"reference/{name}.md"), flags=re.M)
        every = sections[1]
        for one in found["properties"][place]["anyOf"][:-1]:
            keys = one["properties"].keys() - {"name"}
            (section,) = [s for s in sections if s.startswith(f"{one['properties']['name']['const']}\n")]
            assert not [key for key in keys if f"\n| `{key}` |" not in every + section]


def tree(command, words=()):
    for name, inner in getattr(command, "commands", {}).items():
        yield from tree(inner, (*words, name))
    if not hasattr(command, "commands"):
        yield " ".join(words), command


def test_commands_and_options_are_typers_own():
    """The page reads signatures; what typer makes of them has the same commands, options and defaults."""
    whole = dict(tree(typer.main.get_command(app)))
    assert whole.keys() == dict(commands()).keys()
    text = page("reference/commands.md")
    for name, callback in commands():
        shown = reference_pages._options(callback)
        assert [option.field for option in shown] == [parameter.name for parameter in whole[name].params]
        for option, parameter in zip(shown, whole[name].params, strict=True):
            flags = [*parameter.opts, *parameter.secondary_opts]
            if option.name.startswith("--"):
                assert option.name.split()[0].split("/") == flags, (name, option)
            assert (option.default == "required") == parameter.required, (name, option)
            plain = option.field in ("as_json", "debug")  # in the line behind the table
            shown_as = f"`{option.name}`" if plain else f"\n| {reference_pages._cell(f'`{option.name}`')} |"
            assert shown_as in text, (name, option)
            assert option.meaning, f"spt {name}: {option.name} says nothing"
        assert f"\n## spt {name}\n" in text


def test_exit_codes_are_those_of_the_errors():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if hasattr(kind, "exit_code")]
    text = page("reference/commands.md")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    assert listed == {kind.exit_code for kind in kinds} | {0}


def test_every_variable_is_listed():
    """Whatever the sources name like an environment variable; and nothing that they do not name."""
    constants = {
        node.value
        for path in SOURCES
        if path.name != "reference.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {one for one in constants if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|PYTHONPATH", one)} - CONSTANTS
    listed = [variable.name for variable in VARIABLES]
    assert named == set(listed) and len(listed) == len(set(listed))
    assert set(SHOWN) <= set(listed), "what spt env shows"


def test_variables_are_read_by_names_that_the_sources_hold():
    """So that the test above sees them: no name is put together."""
    for path in SOURCES:
        for found in re.finditer(r"(?:environ\.(?:get|setdefault|pop)|getenv)\((\w*)", path.read_text("utf-8")):
            assert found[1] in ("", "name", "CODE_FILE", "STEP_TASKS"), f"{path.name}: {found[0]}"


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        ("int | None", "whole number ≥ 1 and ≤ 1,000, or `null`"),
        ("tuple[float, ...]", "list: number"),
        ("dict[str, int]", "mapping"),
    ],
)
def test_values_in_words(annotation, values):
    from pydantic import Field

    bounds = {"ge": 1, "le": 1000} if "None" in annotation else {}
    kind = {"int | None": int | None, "tuple[float, ...]": tuple[float, ...], "dict[str, int]": dict[str, int]}
    field = Field(description="x", **bounds)
    assert reference_pages._values(kind[annotation], field.metadata) == values
