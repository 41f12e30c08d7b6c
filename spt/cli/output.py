"""Results go to standard output, as text or one JSON value; everything else goes to standard error."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spt.runtime import launch

if TYPE_CHECKING:
    pass


_results: TextIO | None = None  # standard output, while it is kept for results


@contextlib.contextmanager
def _results_only() -> Iterator[None]:
    """Keep standard output for `put`: whatever else prints, a user's model or a program it starts, goes to stderr."""
    global _results
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
        if sys.stdout.fileno() == 1:
            kept = os.dup(1)
            os.dup2(2, 1)
    _results = sys.stdout if kept is None else os.fdopen(kept, "w", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        _results.flush()
    finally:
        if kept is not None:
            os.dup2(kept, 1)
        _results = None


class Tell(logging.Handler):
    """What takes long in a task says how far it is."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say(text: str) -> None:
    """News for people; never on standard output."""
    if launch.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def put(value: Any) -> None:
    """A result, as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False), file=_results or sys.stdout)


def console() -> Any:
    """Standard output, never taken for narrower than 80 columns: tables would lose columns, not only look bad."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Terminal(width=max(Console().width, 80))


def put_table(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        put(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console().print(table)
