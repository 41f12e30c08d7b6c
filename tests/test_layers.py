"""Who may import whom, read from the sources: a wrong direction is found before others follow it."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"spt": "spt", "spt.models": "models", "spt.tasks": "tasks", "spt.recipes": "recipes"}
FILES = {  # dotted name -> file
    ".".join((package, *path.relative_to(ROOT / place).with_suffix("").parts)).removesuffix(".__init__"): path
    for package, place in FOLDERS.items()
    for path in sorted((ROOT / place).rglob("*.py"))
} | {path.stem: path for path in ROOT.glob("spt_cli.py")}

HEAVY = {"torch", "transformers", "datasets", "accelerate"}
OPTIONAL = {
    *("flash_attn", "numba", "pykeops", "submitit", "tensorboard", "trackio", "triton", "wandb", "soundfile", "wfdb"),
    "edfio",
}
KNOWN_TO = {  # a library, and the only modules that know it
    "accelerate": {
        *("spt.runtime.distributed", "spt.runtime.memory", "spt.training.loop", "spt.training.step"),
        *("spt.training.checkpoint", "spt.runtime.accelerate_launch"),
    },
    "submitit": {"spt.execution.slurm"},
    "transformers": {"spt.models.hf.backbone", "spt.models.hf.config", "spt.models.hf.weights"},
    "datasets": {"spt.data.cache", "spt.tasks.files"},
}
SHARED = {  # what the files of a folder may share, and what the pipeline may name
    "spt.models": {"base", "options", "mixer", "feedforward", "ops", "longconv", "recurrence", "gated", "attention"}
    | {"s4_kernel", "slstm", "delta", "selective", "linear_attention"},
    "spt.tasks": {"base", "characters", "files", "parallel", "rows", "waves", "generators", "own"},
}
# Rooms that may load torch; the others are imported by commands that answer at once.
WORK = ("advisor", "analysis", "bench", "checks", "data", "estimators", "execution", "inference", "runtime", "training")
LIGHT = {  # modules of these rooms that do not
    *("spt.runtime.launch", "spt.runtime.progress", "spt.runtime.settings", "spt.runtime.signals"),
    *("spt.data.fingerprints", "spt.data.source"),
    *("spt.analysis.diff_reports", "spt.analysis.diff_runs", "spt.analysis.errors", "spt.analysis.error_figures"),
}


class Import(NamedTuple):
    name: str  # dotted; of ours, the module itself
    line: int
    at_once: bool  # runs when the file is imported: not in a function, nor for the type checker alone

    @property
    def library(self) -> str:
        return self.name.split(".")[0]


def imports(source: str) -> Iterator[Import]:
    def walk(nodes: Iterable[ast.AST], at_once: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, at_once) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]  # from spt.models import base
                names = {"." if node.level else name if name in FILES else str(node.module) for name in whole}
                yield from (Import(name, node.lineno, at_once) for name in sorted(names))
            elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from walk(node.body, False)
                yield from walk(node.orelse, at_once)
            else:
                inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(ast.iter_child_nodes(node), at_once and not inside)

    return walk([ast.parse(source)], True)


IMPORTS = {module: list(imports(path.read_text(encoding="utf-8"))) for module, path in FILES.items()}
AT_ONCE = {module: {i.name for i in found if i.at_once} for module, found in IMPORTS.items()}


def folder(module: str) -> str:
    """The package that holds one of our modules; nothing for a library's."""
    if module != "spt_cli" and module.split(".")[0] != "spt":
        return ""
    return next((package for package in SHARED if f"{module}.".startswith(f"{package}.")), "spt")


def plug_in(name: str) -> str:
    """The model or task that a module belongs to, which may be a package; nothing for what these share."""
    package = folder(name)
    first = name.removeprefix(f"{package}.").split(".")[0]
    return first if package in SHARED and name != package and first not in SHARED[package] else ""


def by_triton(name: str) -> bool:
    """Triton compiles functions of a file that imports it at once; such a file is imported where it is used."""
    return name.startswith("spt.models.ops.triton_")


RULES: dict[str, Callable[[str, Import], bool]] = {  # True where an import is wrong
    "a model or task imports nothing of ours but what its folder shares": lambda module, i: (
        folder(module) in SHARED
        and folder(i.name) != ""
        and i.name not in ("spt.rng", "spt.errors")
        and (folder(i.name) != folder(module) or plug_in(i.name) not in ("", plug_in(module)))
    ),
    "the mathematics of layers knows no layer": lambda module, i: (
        module.startswith("spt.models.ops") and folder(i.name) != "" and not i.name.startswith("spt.models.ops")
    ),
    "tasks do without torch": lambda module, i: (  # but for a published split that was drawn with it
        folder(module) == "spt.tasks" and i.library == "torch" and (i.at_once or module != "spt.tasks.files")
    ),
    "the pipeline names no plug-in": lambda module, i: folder(module) == "spt" and plug_in(i.name) != "",
    "a heavy library is known to few": lambda module, i: i.library in KNOWN_TO and module not in KNOWN_TO[i.library],
    "an optional library is asked for where it is used": lambda module, i: (
        i.at_once and (i.library in OPTIONAL or by_triton(i.name)) and not (by_triton(module) and i.library == "triton")
    ),
    "imports go through the package": lambda module, i: i.library in {"", "models", "tasks", "recipes", "tests"},
}


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule: str) -> None:
    wrong = [(module, i) for module, found in IMPORTS.items() for i in found if RULES[rule](module, i)]
    assert [f"{FILES[module].relative_to(ROOT)}:{i.line} imports {i.name}" for module, i in wrong] == []


def may_wait(module: str) -> bool:
    """May importing it load torch?"""
    return module.startswith(tuple(f"spt.{room}." for room in WORK)) and module not in LIGHT


def chains(start: str) -> Iterator[list[str]]:
    """Each module that importing `start` imports, with one way to it."""
    seen, waiting = {start}, [[start]]
    while waiting:
        chain = waiting.pop()
        yield chain
        for name in (AT_ONCE[chain[-1]] & set(FILES)) - seen:
            seen.add(name)
            waiting.append([*chain, name])


@pytest.mark.parametrize("module", [name for name in FILES if folder(name) == "spt" and not may_wait(name)])
def test_plans_records_and_commands_do_not_wait_for_torch(module: str) -> None:
    for chain in chains(module):
        heavy = {name.split(".")[0] for name in AT_ONCE[chain[-1]]} & HEAVY
        assert not heavy, f"{' -> '.join(chain)} imports {', '.join(sorted(heavy))}"


def test_no_cycles() -> None:
    circles = [[*chain, module] for module in FILES for chain in chains(module) if module in AT_ONCE[chain[-1]]]
    assert circles == []


def test_the_reader_sees_nested_and_deferred_imports() -> None:
    source = """
import a.b, c
from . import j
from spt.models import base
if TYPE_CHECKING: import d
try: import e
except ImportError: pass
class K:
    import f
    def g(self): from h import i
"""
    found = {i.name: i.at_once for i in imports(source)}
    assert found == {
        "a.b": True,
        "c": True,
        ".": True,
        "spt.models.base": True,
        "d": False,
        "e": True,
        "f": True,
        "h": False,
    }


@pytest.mark.parametrize(
    "command", ["--help", "list models --json", "list tasks --json", "recipes list --json"], ids=str
)
def test_help_and_lists_load_no_torch(command: str) -> None:
    program = (
        "import sys, spt_cli\n"
        f"sys.argv = ['spt', *{command.split()!r}]\n"
        "try: spt_cli.main()\n"
        "except SystemExit as exit: assert not exit.code, exit.code\n"
        f"loaded = {HEAVY!r} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
