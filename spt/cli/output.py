"""Results go to standard output, as text or one JSON value; everything else goes to standard error."""

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from spt.errors import displayable, visible
from spt.runtime import launch

_results: TextIO | None = None  # standard output, while it is kept for results


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """Keep standard output for `print_json`: a user's model, or a program it starts, prints to stderr."""
    global _results
    sys.stdout.flush()
    stdout = None
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
        if sys.stdout.fileno() == 1:
            stdout = os.dup(1)
            os.dup2(2, 1)
    _results = sys.stdout if stdout is None else os.fdopen(stdout, "w", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        _results.flush()
    finally:
        if stdout is not None:
            os.dup2(stdout, 1)
        _results = None


def notify(text: str) -> None:
    """A message for people, on standard error; of several processes the first alone shows it."""
    if launch.rank() == 0:
        print(wrapped(displayable(text), sys.stderr), file=sys.stderr, flush=True)


def wrapped(text: str, stream: Any) -> str:
    """Broken between words where a terminal would break within them; a pipe or a file gets lines as they are."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):  # no terminal, or no stream
        width = 0
    if width < 40:
        return text
    return "\n".join(line if len(line) <= width else _folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,  # a path that is too long stays one to copy
        break_on_hyphens=False,
    )


def show(text: str) -> None:
    """A result, as text."""
    print(wrapped(visible(text), sys.stdout))


def print_json(value: Any) -> None:
    """A result, as JSON, which has no numbers that are not finite: null."""
    from spt.runs.files import finite

    print(json.dumps(finite(value), indent=2, allow_nan=False), file=_results or sys.stdout)


def console() -> Any:
    """Standard output, never taken for narrower than 80 columns: tables would lose columns, not only look bad."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Whatever is printed: nothing that a name or a cell holds acts on the terminal."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return Terminal(width=max(Console().width, 80), markup=False, emoji=False)


def print_table(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console().print(table)


def print_groups(groups: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Names with their descriptions, one line each under the heading of its group; a terminal cuts long lines, other
    programs get them whole."""
    from rich.text import Text

    shown = console()
    width = max(len(row["name"]) for rows in groups.values() for row in rows)
    cut = {"no_wrap": True, "overflow": "ellipsis"} if shown.is_terminal else {"soft_wrap": True}
    filled = [(heading, rows) for heading, rows in groups.items() if rows]
    for i, (heading, rows) in enumerate(filled):
        if heading:
            shown.print(Text("\n" * (i > 0) + heading, style="bold"), **cut)
        for row in rows:
            shown.print(Text(f"{row['name']:{width}}  {row['description']}"), **cut)
