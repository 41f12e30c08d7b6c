"""The reference page of the Python API: signatures and docstrings of what `import spt` offers and returns."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from reference_pages import _page, _prose

# What functions of the API return, and which of its public members users call or read.
RETURNED = ("FinishedRun", "TrainedModel")


def python_page() -> str:
    """Every name of the API, functions first, each with its signature and its docstring."""
    import spt

    objects = {name: getattr(spt, name) for name in spt.__all__}
    functions = {name: each for name, each in objects.items() if inspect.isfunction(each)}
    classes = {name: each for name, each in objects.items() if inspect.isclass(each)} | _returned()
    parts = [
        "The same with examples: [Python](../python.md). All of it is typed, and errors are subclasses of "
        "`spt.SptError`, each one sentence.",
        "## Functions",
        *(_function(f"spt.{name}", each, "###") for name, each in functions.items()),
        "## Classes",
        *(_class(f"spt.{name}" if name in objects else name, each) for name, each in classes.items()),
    ]
    return _page("Python API", *parts)


def _returned() -> dict[str, type]:
    from spt.inference.trained_model import TrainedModel
    from spt.training.load_run import FinishedRun

    found = {each.__name__: each for each in (FinishedRun, TrainedModel)}
    assert tuple(found) == RETURNED
    return found


def _function(name: str, function: Callable[..., Any], level: str) -> str:
    return "\n\n".join([f"{level} `{name}`", _signature(name, function), _prose(function.__doc__)])


def _signature(name: str, function: Callable[..., Any]) -> str:
    """As it is written, a parameter a line where it is long."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    node.args.args = [each for each in node.args.args if each.arg != "self"]
    returns = f" -> {ast.unparse(node.returns)}".replace("'", "") if node.returns else ""
    parameters = list(_parameters(node.args))
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in parameters) + f"){returns}"
    return f"```text\n{line}\n```"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """One text each; `*` stands before those that are given by name."""
    whole = ast.unparse(arguments)
    depth, start = 0, 0
    for at, letter in enumerate(whole):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield _spaced(whole[start:at].strip())
            start = at + 1
    yield _spaced(whole[start:].strip())


def _spaced(parameter: str) -> str:
    """`a: int=1`, as ast writes it, with blanks around the sign."""
    name, colon, rest = parameter.partition(":")
    annotation, sign, default = rest.rpartition("=")
    return f"{name}{colon}{annotation} = {default}" if sign else parameter


def _class(name: str, kind: type) -> str:
    parts = [f"### `{name}`"]
    fields = _fields(kind)
    if fields:
        parts.append("```text\n" + "\n".join(fields) + "\n```")
    elif "__init__" in vars(kind) and not issubclass(kind, Exception):
        parts.append(_signature(name, vars(kind)["__init__"]))
    members = "\n".join(_members(kind))
    return "\n\n".join([*parts, _prose(kind.__doc__), *([members] if members else [])])


def _fields(kind: type) -> list[str]:
    """The lines that declare a record's fields, with their comments."""
    source = textwrap.dedent(inspect.getsource(kind))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    lines = source.splitlines()
    declared = [each for each in node.body if isinstance(each, ast.AnnAssign) and not _is_private(each.target)]
    return [line[4:] for each in declared for line in lines[each.lineno - 1 : each.end_lineno]]


def _is_private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _members(kind: type) -> Iterator[str]:
    """Public methods and properties that a class defines itself and describes, a line each."""
    for member, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        call = "" if isinstance(value, property) else "(…)" if len(inspect.signature(function).parameters) > 1 else "()"
        text = textwrap.shorten(inspect.cleandoc(function.__doc__).split("\n\n")[0], 400, placeholder=" …")
        yield f"- `.{member}{call}`: {_prose(text)}"
