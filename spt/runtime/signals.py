"""SIGTERM and Ctrl-C, from the first line of a command to its last.

What a handler raises comes up at any instruction, also inside a library: torch swallows an exception that strikes
while it imports numpy, and goes on with half of it. So the handlers here raise nothing. A signal ends the process at
once, after the functions registered with `cleanup`; inside `StopSignals` it is noted and acted on at the next safe
point. This module is loaded before anything that takes time to import, so it imports next to nothing itself.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from spt.errors import Interrupted, Stopped

CODE_FILE = "SPT_EXIT_CODE_FILE"  # set in processes that spt starts: where the first that ends leaves its exit code
STEP_TASKS = "SLURM_STEP_NUM_TASKS"  # set in a step of Slurm: its tasks are the processes of one run

Cleanup = Callable[[Stopped], object]

_cleanups: list[Cleanup] = []
_owner = 0  # the process that installed the handlers; its forks have nothing to clean up
_silent = False


def install(*, silent: bool = False) -> None:
    """From here on SIGTERM and Ctrl-C end this process at once, with one sentence (unless `silent`) and its code."""
    global _owner, _silent
    _owner, _silent = os.getpid(), silent
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background jobs of a shell
        signal.signal(signal.SIGINT, _end)


def installed() -> bool:
    """Is this process spt's own, and not a program that uses it?"""
    return os.getpid() == _owner


@contextlib.contextmanager
def cleanup(function: Cleanup) -> Iterator[None]:
    """While this is open, a signal that ends the process calls `function` first: no `finally` will run."""
    _cleanups.append(function)
    try:
        yield
    finally:
        _cleanups.remove(function)


@contextlib.contextmanager
def withhold_usr2() -> Iterator[None]:
    """SIGUSR2 waits until this is over, and processes started within never get it: it would end them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_error(number: int, rest: str = "; the same command continues") -> Stopped:
    """The error that stands for SIGTERM or SIGINT."""
    return Interrupted(f"interrupted{rest}") if number == signal.SIGINT else Stopped(f"stopped{rest}")


def _end(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _owner:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    end_process(stop_error(number))


def end_process(error: Stopped) -> NoReturn:
    """End this process now: clean up, say why, and exit without returning to whatever was interrupted."""
    # A launcher may pass on a Ctrl-C that the terminal has already sent. Alone, a second one does not wait for us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN if _has_launcher() else _end_at_once)
    try:
        for function in reversed(_cleanups):
            with contextlib.suppress(BaseException):
                function(error)
        _end_pools()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        _say(error)
    finally:
        os._exit(error.exit_code)


def ignore() -> None:
    """The command has ended, and its code stands: what Python still takes apart is not worth a signal's answer."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_IGN)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    error = stop_error(number)
    try:
        _say(error)
    finally:
        os._exit(error.exit_code)


def _say(error: Stopped) -> None:
    if not _silent and _speaks():
        clear = "\r\x1b[K\x1b[?25h" if os.isatty(2) and os.environ.get("TERM") != "dumb" else ""  # a progress bar
        os.write(2, f"{clear}spt: {error}\n".encode())


def _end_pools() -> None:
    """End the processes of pools, which would wait for work for ever, and free the semaphores they share."""
    with contextlib.suppress(Exception):
        if (process := sys.modules.get("multiprocessing.process")) is not None:
            for child in process.active_children():
                child.terminate()
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util._run_finalizers(0)  # as at a normal exit; else a warning about them follows our sentence


def _has_launcher() -> bool:
    return any(name in os.environ for name in (CODE_FILE, "RANK", STEP_TASKS))


def _speaks() -> bool:
    """Of several processes the first one speaks; for those that spt has started, the process that started them."""
    rank = os.environ.get("RANK") or (os.environ.get("SLURM_PROCID") if STEP_TASKS in os.environ else None) or "0"
    return CODE_FILE not in os.environ and rank == "0"


class StopSignals:
    """Inside, SIGTERM and Ctrl-C are noted, to be acted on between two steps. A second Ctrl-C acts at once.

    Several processes: a launcher may pass on a Ctrl-C that the terminal has already sent, so there it is noted only.
    """

    def __init__(self, alone: bool = True) -> None:
        self.received = 0
        self._alone = alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        with contextlib.suppress(ValueError):  # not in the main thread: whoever owns it decides
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # Of several processes, one that stops, or that alone has failed, ends; its launcher is going to stop it too.
        ends = isinstance(error, Stopped) or not getattr(error, "known_to_all", False)
        ending = error is not None and not self._alone and ends
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ending else handler)
        if self.received and not ending and not isinstance(error, Stopped | KeyboardInterrupt):
            signal.raise_signal(self.received)  # it came after the last safe point

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.received:
            raise stop_error(self.received)

    def wait(self, seconds: float) -> None:
        """Sleep; raise Stopped soon after a signal."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))  # a handler that returns does not end a sleep
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._alone and self.received == signal.SIGINT and number == signal.SIGINT:
            before = self._before[number]
            signal.signal(number, before)
            signal.raise_signal(number)
        # Of two signals, the first says why.
        self.received = self.received or number
