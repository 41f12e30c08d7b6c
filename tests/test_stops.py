"""A stop is no error: nothing that goes on after an error goes on after a stop."""

import ast
import pickle
from pathlib import Path

import pytest
from tiny import ROOT

from spt.errors import Interrupted, SptError, Stopped

# What may catch more than an `Exception` and yet go on, each with what it then does about a stop.
ENDINGS = {
    ("spt/cli/guard.py", "guarded"),  # says the sentence and ends with the code
    ("spt/execution/local.py", "main"),  # a worker's last line
    ("spt/execution/slurm.py", "__call__"),  # hands over to Slurm and exits
    ("spt/runtime/distributed.py", "all_ranks"),  # every process raises it
    ("spt/runtime/signals.py", "end_process"),  # the process ends whatever its cleanups raise
}
WIDER = {"BaseException", "KeyboardInterrupt", "Stopped", "Interrupted", "GeneratorExit"}


def names(node: ast.expr | None) -> set[str]:
    """The exceptions that a handler or `suppress` names; without any, all."""
    if node is None:
        return {"BaseException"}
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def goes_on(handler: ast.ExceptHandler) -> bool:
    """Can what this handler has caught be lost? Not if a raise ends it."""
    return not isinstance(handler.body[-1], ast.Raise)


def swallowers(path: Path) -> list[tuple[str, str]]:
    """File and function of each place that takes a stop and may go on."""
    places: list[tuple[str, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        caught: set[str] = set()
        if isinstance(node, ast.ExceptHandler) and goes_on(node):
            caught = names(node.type)
        elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func):
            caught = set().union(*map(names, node.args))
        if caught & WIDER:
            places.append((path.relative_to(ROOT).as_posix(), function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    text = path.read_text(encoding="utf-8")
    if any(word in text for word in (*WIDER, "except:")):  # few files; parsing all takes a second
        visit(ast.parse(text), "")
    return places


def test_a_stop_is_no_exception_that_handlers_of_errors_catch() -> None:
    assert not issubclass(Stopped, Exception) and not issubclass(Stopped, SptError)
    assert issubclass(Interrupted, KeyboardInterrupt)  # to a program that calls the API, a Ctrl-C like any other
    assert (Stopped.exit_code, Interrupted.exit_code) == (75, 130)
    error = pickle.loads(pickle.dumps(Interrupted("interrupted")))
    assert type(error) is Interrupted and str(error) == "interrupted"


def test_only_the_ends_of_a_process_catch_a_stop() -> None:
    rooms = [ROOT / room for room in ("spt", "models", "tasks")]
    files = [ROOT / "spt_cli.py", *(file for room in rooms for file in room.rglob("*.py"))]
    found = {place for file in files for place in swallowers(file)}
    assert found - ENDINGS == set() and ENDINGS - found == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("try: f()\nexcept: pass", 1),
        ("try: f()\nexcept BaseException as error: log(error)", 1),
        ("try: f()\nexcept (ValueError, KeyboardInterrupt): pass", 1),
        ("with suppress(BaseException): f()", 1),
        ("try: f()\nexcept BaseException:\n    undo()\n    raise", 0),
        ("try: f()\nexcept Exception: pass", 0),
    ],
)
def test_what_catches_a_stop_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, found: int) -> None:
    (tmp_path / "a.py").write_text(code)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(swallowers(tmp_path / "a.py")) == found
