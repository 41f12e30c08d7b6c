"""Standard output and standard error as a command finds them: closed, full, or without a reader.

What is told on standard error may get lost; a run does not end because of that. Results on standard output may not,
unless their reader has seen enough and left.
"""

import contextlib
import errno
import io
import os
import select
import sys

from spt.errors import OutputError


class _Forgiving(io.FileIO):
    """Takes everything: what cannot be written is lost."""

    def write(self, content: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(content)
        except OSError:
            return len(content)


def prepare() -> None:
    """Before anything is said. A × must not end a run on a terminal that knows ASCII alone."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would be taken for it
            with contextlib.suppress(OSError):
                os.dup2(null := os.open(os.devnull, os.O_RDWR), number)
                os.set_inheritable(number, True)
                if null > 2:
                    os.close(null)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None or isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding if sys.stderr is not None else "utf-8"
        raw = io.BufferedWriter(_Forgiving(2, "w", closefd=False))  # type: ignore[type-var]
        sys.stderr = io.TextIOWrapper(raw, encoding, errors="replace", line_buffering=True)


def reader_has_left() -> bool:
    """Is standard output a pipe that nobody reads any more, as of `spt … | head`?"""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard() -> None:
    """From here on standard output goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def finish(code: object) -> object:
    """Write what standard output still holds; returns the exit code that results from it."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        discard()
        return _code(error, code)
    return code


def problem(error: OSError) -> object:
    """The exit code where output cannot be written; says why."""
    discard()
    return _code(error, 0)


def _code(error: OSError | ValueError, code: object) -> object:
    if code or not isinstance(error, OSError) or error.errno == errno.EPIPE:
        return code
    print(f"spt: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return OutputError.exit_code
