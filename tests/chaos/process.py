"""Commands as processes of their own: forked from this one, which has imported what they need, or from the start.

Whatever a command starts becomes this process's when the command dies (a Linux subreaper), so that nothing is lost
sight of: what is still there at the end is a fault.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from spt.report.published_numbers import load_published
from tests import warm
from tests.chaos.hooks import sitecustomize

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_ended: dict[int, int] = {}  # exit codes of processes that were waited for


def prepare() -> None:
    """Import what commands need, once. No thread may run in this process afterwards: it forks."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    warm.warm()
    load_published()
    gc.collect()
    gc.freeze()


class Command:
    """A command at work."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, cold: bool = False) -> None:
        self.words, self.log = tuple(words), log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.streams = [log.with_suffix(".out"), log.with_suffix(".err")]
        for stream in self.streams:
            stream.write_text("")
        self.pid = os.fork()
        if self.pid == 0:
            self._become(cwd, dict(env), cold)

    def _become(self, cwd: Path, env: dict[str, str], cold: bool) -> None:
        try:
            os.setsid()
            _ended.clear()
            if cold:
                for number, path in ((0, os.devnull), *enumerate(self.streams, start=1)):
                    os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
                os.chdir(cwd)
                os.execve(sys.executable, [sys.executable, "-m", "spt", *self.words], env)
            os.environ.update(env)
            sitecustomize.install()
            order = {"arguments": self.words, "env": env, "cwd": str(cwd), "streams": list(map(str, self.streams))}
            warm.become(order)
        finally:
            os._exit(99)

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it is at work."""
        reap()
        return _ended.get(self.pid)

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it was still at work after so long."""
        end = time.monotonic() + seconds
        while self.code() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self.code()

    def family(self) -> list[int]:
        """This process, if it is still there, and all that it has started."""
        return [*([] if self.code() is not None else [self.pid]), *descendants(self.pid)]

    def text(self) -> str:
        return "".join(stream.read_text(errors="replace") for stream in self.streams)


def reap() -> None:
    """Take note of what has ended, adopted processes included."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _ended[pid] = os.waitstatus_to_exitcode(status)


def descendants(pid: int) -> list[int]:
    """Every process that this one has started, and those have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        waiting += (theirs := children.get(waiting.pop(), []))
        found += theirs
    return found


def is_stopped(pid: int) -> bool:
    """Has this process been stopped by a signal, or is it gone?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(seconds: float) -> list[str]:
    """Wait until this process has no children; those left after so long are killed, and named."""
    end = time.monotonic() + seconds
    while (left := (reap(), descendants(os.getpid()))[1]) and time.monotonic() < end:
        time.sleep(0.02)
    names = []
    for pid in left:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            names.append(b" ".join(words[1:4]).decode(errors="replace"))
    send(left, signal.SIGKILL)
    while descendants(os.getpid()):
        reap()
        time.sleep(0.02)
    reap()
    return names
