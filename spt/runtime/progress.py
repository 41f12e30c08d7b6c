"""Progress for people: a bar on a terminal, a plain line now and then elsewhere, always on standard error; and where
the messages of the `spt` loggers go.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from spt.errors import displayable, hide_secrets

EVERY = 15.0  # seconds between plain lines
OFTEN = 0.25  # seconds between two looks at a bar


def about(seconds: float) -> str:
    """An estimated time, as precise as an estimate is."""
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            amount = seconds / length
            return f"about {amount:.1f} {unit}" if amount < 10 and length > 60 else f"about {amount:.0f} {unit}"
    return f"about {max(seconds, 1):.0f} s"


class _Forwarder(logging.Handler):
    def __init__(self, send: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(hide_secrets(record.getMessage()))


@contextlib.contextmanager
def forward_messages(send: Callable[[str], object]) -> Iterator[None]:
    """Meanwhile `send`, and no forwarding begun before, gets the text of every message that a logger of spt, its tasks
    or its models is given."""
    logger = logging.getLogger("spt")
    level, handlers, propagate = logger.level, logger.handlers, logger.propagate
    logger.handlers = [*(handler for handler in handlers if not isinstance(handler, _Forwarder)), _Forwarder(send)]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library may have given the root logger a handler, which would repeat them
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


class Update(NamedTuple):
    """How far a stage is."""

    label: str
    step: int
    total: int
    left: float  # seconds
    facts: str  # numbers worth seeing


_forward: Callable[[Update], object] | None = None


@contextlib.contextmanager
def forward_progress(send: Callable[[Update], object]) -> Iterator[None]:
    """Meanwhile `send` gets what bars would show."""
    global _forward
    before, _forward = _forward, send
    try:
        yield
    finally:
        _forward = before


class _Facts(TextColumn):
    """One line; on a narrow terminal it is this column that is cut."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class _TimeLeft(TimeRemainingColumn):
    """Nothing for the bar of all runs: those behind differ from those before, so that its speed says little."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields.get("timed", True) else Text()


class Board:
    """Shows how far stages are: each in a bar of its own on a terminal, in a plain line now and then elsewhere."""

    def __init__(self, quiet: bool = False, runs: int = 1, done: int = 0, what: str = "runs") -> None:
        """Of several `runs`, it shows how many are done; `done` are so already."""
        console = Console(stderr=True)
        self._quiet, self._runs, self._done, self._what = quiet, runs, done, what
        self._bars: Progress | None = None
        if not quiet and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), _TimeLeft(),
                       _Facts("{task.fields[facts]}", table_column=Column(no_wrap=False)))  # fmt: skip
            self._bars = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._tasks: dict[object, TaskID] = {}
        self._shown: dict[object, float] = {}  # when a line was last printed

    def __enter__(self) -> "Board":
        if self._bars is not None:
            self._bars.start()
            if self._runs > 1:
                self._tasks["runs"] = self._bars.add_task(
                    self._what, total=self._runs, completed=self._done, facts="", timed=False
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, who: object, update: Update) -> None:
        """The progress of whoever is at work on a stage."""
        if self._bars is not None:
            if who not in self._tasks:
                self._tasks[who] = self._bars.add_task(
                    update.label, total=update.total, completed=update.step, facts=""
                )
            self._bars.update(self._tasks[who], completed=update.step, facts=update.facts)
        elif not self._quiet:
            now = time.monotonic()
            if now - self._shown.setdefault(who, now) < EVERY * len(self._shown):
                return
            self._shown[who] = now
            where = f"step {update.step:,} of {update.total:,}, {update.left:,.0f} s left"
            print(displayable(f"{update.label}: {where}, {update.facts}"), file=sys.stderr, flush=True)

    def remove(self, who: object) -> None:
        """A stage has ended."""
        self._shown.pop(who, None)
        if self._bars is not None and who in self._tasks:
            self._bars.remove_task(self._tasks.pop(who))

    def count_run(self, facts: str = "") -> None:
        """One of the runs has ended. Elsewhere than on a terminal, this is a line."""
        self._done += 1
        if self._bars is None and not self._quiet and self._runs > 1:
            print(", ".join(filter(None, [f"{self._what}: {self._done} of {self._runs} done", facts])),
                  file=sys.stderr, flush=True)  # fmt: skip
        self.note_runs(facts)

    def note_runs(self, facts: str) -> None:
        """What is worth knowing of all runs, beside their bar."""
        if self._bars is not None and "runs" in self._tasks:
            self._bars.update(self._tasks["runs"], completed=self._done, facts=facts)

    @property
    def has_bars(self) -> bool:
        return self._bars is not None


class Bar:
    """One stage's progress. `update` is called after every optimiser step and costs next to nothing."""

    def __init__(self, label: str, total: int, start: int = 0, *, quiet: bool = False, most: float = math.inf) -> None:
        """It ends after `most` seconds, wherever it is then."""
        self._most = most
        self.label, self.total, self.start, self.quiet = label, total, start, quiet
        self.facts = ""
        self._began = self._looked = time.monotonic()
        self._board = Board(quiet or _forward is not None)

    def __enter__(self) -> "Bar":
        self._board.__enter__()
        self._show(Update(self.label, self.start, self.total, 0.0, ""))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.__exit__(kind, error, trace)

    def note(self, facts: str) -> None:
        """The latest numbers worth seeing, e.g. `val accuracy .81`."""
        self.facts = facts

    def update(self, step: int, examples: int) -> None:
        """`examples` were shown since this bar began."""
        now = time.monotonic()
        if self.quiet or now - self._looked < OFTEN:
            return
        self._looked = now
        speed = examples / max(now - self._began, 1e-9)
        left = (self.total - step) * (now - self._began) / max(step - self.start, 1)
        left = max(0.0, min(left, self._most - (now - self._began)))
        self._show(Update(self.label, step, self.total, left, f"{speed:,.0f} examples/s  {self.facts}"))

    def _show(self, update: Update) -> None:
        if self.quiet:
            return
        if _forward is not None:
            _forward(update)
        else:
            self._board.show(None, update)
