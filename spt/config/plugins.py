"""From a name in a recipe to the module behind it. Nothing is registered: the name is the name of a file.

A name is, in this order: a path that ends in .py; one of ours; an installed plug-in (entry points `spt.models`,
`spt.tasks`); a dotted module path.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, NamedTuple

from spt.config.validation import validate_values
from spt.errors import SptError, UsageError, did_you_mean, one_line

Kind = Literal["models", "tasks"]
CONTRACT: dict[str, str] = {"models": "build", "tasks": "load"}  # the function beside `class Config`


class Component(NamedTuple):
    name: str  # as it stands in the resolved recipe: a path is absolute
    module: ModuleType
    identity: str  # what keys and result names call it: a path gives its stem and the hash of its content

    def configure(self, options: Mapping[str, Any]) -> Any:
        """Its Config with these options. Raises ValidationError."""
        return validate_values(self.module.Config, options)


class Listing(NamedTuple):
    name: str
    description: str  # the first sentence of the module's docstring
    source: str
    parameters: int | None = None  # of a model's backbone with its default options, for 1,024 steps
    cost: str | None = None  # operations of one of its blocks on one sequence, leading terms
    paper: str | None = None


def is_path(name: str) -> bool:
    return name.endswith(".py")


def find_plugin(kind: Kind, name: str) -> Component:
    """Raises UsageError for a name that leads nowhere or a module that lacks a piece of the contract."""
    if is_path(name):
        return _from_path(kind, Path(name))
    module = _from_package(kind, name)
    _check_contract(kind, name, module)
    if module.__name__.startswith(f"spt.{kind}."):
        return Component(name, module, name)  # its code is the code of this version
    return Component(name, module, f"{name}@{_digest(Path(str(module.__file__)))[:12]}")


def listing(kind: Kind) -> list[Listing]:
    """Ours and the installed plug-ins. Files are parsed, not imported, so this is quick and needs no torch."""
    plugins = [Listing(e.name, f"plug-in {e.value}", e.dist.name if e.dist else e.value) for e in _plugins(kind)]
    return _ours(kind) + plugins


def _ours(kind: Kind) -> list[Listing]:
    folder = _folder(kind)
    paths = (*folder.glob("*.py"), *folder.glob("*/__init__.py"))
    return sorted(filter(None, (_described(kind, path) for path in paths)))


def _is_ours(kind: Kind, name: str) -> bool:
    files = (_folder(kind) / f"{name}.py", _folder(kind) / name / "__init__.py") if name.isidentifier() else ()
    return any(os.path.isfile(path) and _described(kind, path) for path in files)  # false for a name too long


def _folder(kind: Kind) -> Path:
    return Path(importlib.import_module(f"spt.{kind}").__path__[0])


def _described(kind: Kind, path: Path) -> Listing | None:
    state = path.stat()
    return _describe(kind, path, state.st_mtime_ns, state.st_size)


def _plugins(kind: Kind) -> list["importlib.metadata.EntryPoint"]:
    return sorted(entry_points(group=f"spt.{kind}"), key=lambda e: e.name)


@cache
def _describe(kind: Kind, path: Path, changed: int, size: int) -> Listing | None:
    """What a component's file, or the __init__.py of its package, says about it; None for other files (base.py).

    Parsed once for each state of the file. A model's PARAMETERS, COST and PAPER are plain values.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    if not {"Config", CONTRACT[kind]} <= names:
        return None
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    known: list[Any] = [constants.get(name) for name in ("PARAMETERS", "COST", "PAPER")]
    name = path.parent.name if path.stem == "__init__" else path.stem
    return Listing(name, _first_sentence(ast.get_docstring(tree) or ""), "spt", *known)


def _first_sentence(text: str) -> str:
    """A docstring's first line, or what goes on behind it to the sentence's end; without the titles of papers."""
    line, _, _ = text.partition("\n")
    if line.endswith(".") and not line.endswith("et al."):
        return line
    paragraph = re.sub(r"\s+", " ", text.partition("\n\n")[0])
    paragraph = re.sub(r',? "[^"]+"(, [^()]*)?(?=\))', "", paragraph)
    return re.split(r"(?<=\.)(?<!et al\.) (?=[A-Z])", paragraph, maxsplit=1)[0]


def _from_package(kind: Kind, name: str) -> ModuleType:
    if _is_ours(kind, name):  # before looking for plug-ins, which takes long
        return importlib.import_module(f"spt.{kind}.{name}")
    plugins = {entry.name: entry for entry in _plugins(kind)}
    if name in plugins:
        plugin = f"the plug-in {plugins[name].value}"
        with _import_errors(plugin):
            module = plugins[name].load()
        if isinstance(module, ModuleType):
            return module
        raise UsageError(f"{plugin} is not a module; its entry point must name a module")
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        try:
            with _import_errors(name, passing=(SptError, ModuleNotFoundError)):
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise UsageError(f"{name} cannot be imported: {error}") from error
            if error.name != name.split(".")[0]:
                raise UsageError(f"there is no module {error.name}, though {name.split('.')[0]} exists") from error
    what = kind.removesuffix("s")
    hint = did_you_mean(name, {row.name for row in _ours(kind)} | set(plugins))
    raise UsageError(f"unknown {what} {name!r}{hint or f' (spt list {kind} shows them; a file of yours ends in .py)'}")


@contextmanager
def _import_errors(
    name: str, path: Path | None = None, passing: tuple[type[Exception], ...] = (SptError,)
) -> Iterator[None]:
    """Whatever a user's module raises when imported is its author's to see, in one sentence."""
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        line = line_in(path, error) if path else ""
        raise UsageError(f"{name}{line} fails when imported: {one_line(error)}") from error


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


class _SourceLoader(SourceFileLoader):
    """Compiles what the file holds now: bytecode kept from before an edit within the same second is taken for it."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@cache
def _import_file(path: Path, digest: str) -> ModuleType:
    name = f"spt_user_{path.stem}_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pydantic look their module up
    try:
        with _import_errors(str(path), path):
            spec.loader.exec_module(module)
    except SptError:
        del sys.modules[name]
        raise
    return module


def line_in(path: Path, error: BaseException) -> str:
    """`:12` for the innermost line of this file that the error passed through."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""


def _from_path(kind: Kind, path: Path) -> Component:
    if not os.path.isfile(path):  # unlike Path.is_file, false where a folder may not be entered
        raise UsageError(f"no file {path}; a path in a recipe is relative to the recipe, on the command line to here")
    path = path.resolve()
    digest = _digest(path)
    module = _import_file(path, digest)
    _check_contract(kind, str(path), module)
    return Component(str(path), module, f"{path.stem}@{digest[:12]}")


def _check_contract(kind: Kind, name: str, module: ModuleType) -> None:
    base_name = {"models": "BackboneConfig", "tasks": "TaskConfig"}[kind]
    function = CONTRACT[kind]
    what = kind.removesuffix("s")
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{name} has no function {function}; a {what} file holds `class Config` and `{function}`")
    config = getattr(module, "Config", None)
    base = getattr(importlib.import_module(f"spt.{kind}.base"), base_name)
    if not (isinstance(config, type) and issubclass(config, base)):
        raise UsageError(f"{name} has no class Config that derives from spt.{kind}.base.{base_name}")
