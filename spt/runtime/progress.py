"""Progress for people: a bar on a terminal, a plain line now and then elsewhere, always on standard error; and where
the messages of the `spt` loggers go.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

EVERY = 15.0  # seconds between plain lines


class _Forwarder(logging.Handler):
    def __init__(self, send: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(record.getMessage())


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


class Bar:
    """One stage's progress. `update` is called after every optimiser step and costs next to nothing."""

    def __init__(self, label: str, total: int, start: int = 0, *, quiet: bool = False) -> None:
        self.label, self.total, self.start, self.quiet = label, total, start, quiet
        self.console = Console(stderr=True)
        self.facts = ""
        self._began = self._shown = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "Bar":
        if not self.quiet and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(),
                       TextColumn("{task.fields[facts]}"))  # fmt: skip
            self._bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.start, facts="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, facts: str) -> None:
        """The latest numbers worth seeing, e.g. `val accuracy .81`."""
        self.facts = facts

    def update(self, step: int, examples: int) -> None:
        """`examples` were shown since this bar began."""
        if self.quiet:
            return
        now = time.monotonic()
        if self._bar is None and now - self._shown < EVERY:
            return
        if self._bar is not None and now - self._shown < 0.2:
            return
        self._shown = now
        speed = examples / max(now - self._began, 1e-9)
        facts = f"{speed:,.0f} examples/s  {self.facts}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
            return
        left = (self.total - step) * (now - self._began) / max(step - self.start, 1)
        print(
            f"{self.label}: step {step:,} of {self.total:,}, {left:,.0f} s left, {facts}", file=sys.stderr, flush=True
        )
