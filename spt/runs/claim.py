"""Whose a run is: claims, which are renewed as long as their holders live, beside the operating system's lock.

runs/.locks/
  finetune-9f920d1b9d57.lock       locked by the operating system, which releases it however the process dies
  finetune-9f920d1b9d57.claim-1    who has the run, or had it; rewritten again and again while he has it
  finetune-9f920d1b9d57.claim-2    the next claim: the one with the highest number counts

Locks are not enough. Not every file system has locks, or shows them to other machines, and a process that is stopped
keeps its own. So a claim that has not changed for its lease, by the clock of whoever watches it, has lost its holder,
and so has one of this machine whose lock is free. Such a run is taken over by making the claim of the next number,
which a file system lets one process do. Whoever has lost a run this way notices before he writes again.
"""

import contextlib
import errno
import functools
import json
import os
import platform
import secrets
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

LEASE = 60.0  # seconds without a sign of life after which a run may be taken over
LONGEST = 86400.0
RENEWALS = 6  # in a lease; some may come late
SIZE = 512  # bytes of a claim: rewritten in place, it never is half the old one
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@functools.cache
def machine() -> str:
    """This machine since it was started: processes that read the same here see each other's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


class Holder(NamedTuple):
    """A claim as it is read from its file."""

    number: int
    content: bytes
    token: str = ""  # of this claim alone; empty where the file cannot be read
    machine: str = ""
    host: str = ""
    pid: int = 0
    lease: float = LEASE
    locked: bool = False  # does it have the operating system's lock too?
    free: bool = False  # given back

    def __str__(self) -> str:
        return f"{self.pid} on {self.host}" if self.host else ""


class Claims:
    """The claims on one run."""

    def __init__(self, path: Path) -> None:
        """`path`: all of their files without the number."""
        self._path = path

    def file(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}-{number}")

    def newest(self) -> Holder | None:
        """The one that counts."""
        number, content = 0, b""
        while (found := _read(self.file(number + 1))) is not None:
            number, content = number + 1, found
        return _holder(number, content) if number else None

    def take(self, number: int, content: bytes) -> bool:
        """Make the claim of this number; False where another process was first."""
        target, beside = self.file(number), self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            try:
                beside.write_bytes(content)
            except FileNotFoundError:  # somebody has removed the folder
                beside.parent.mkdir(parents=True, exist_ok=True)
                beside.write_bytes(content)
            try:
                os.link(beside, target)
            except OSError as error:
                if error.errno in NO_LINKS:
                    return self._create(target, content)
                return beside.stat().st_nlink == 2  # over a network the answer to a link that was made may get lost
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        return True

    def _create(self, target: Path, content: bytes) -> bool:
        try:
            with target.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def mark_taken(self, number: int, by: bytes) -> None:
        """So that its former holder finds another's name in his own file, which no cache hides from him."""
        _rewrite(self.file(number), by)


class Claim:
    """This process's claim on a run, renewed by a thread until it is released."""

    def __init__(self, claims: Claims, number: int, lease: float, locked: bool) -> None:
        self.number, self.lease, self._claims = number, lease, claims
        self._facts: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "machine": machine(),
            "host": platform.node(),
            "pid": os.getpid(),
            "lease": lease,
            "locked": locked,
            "free": False,
            "renewed": 0,
        }
        self._ended = threading.Event()
        self._writing = threading.RLock()  # a signal may end the process, and release this, at any moment

    @property
    def content(self) -> bytes:
        return json.dumps(self._facts).encode().ljust(SIZE)

    def take(self) -> bool:
        """False where another process was first."""
        if not self._claims.take(self.number, self.content):
            return False
        if self.number > 1:
            self._claims.mark_taken(self.number - 1, self.content)
        threading.Thread(target=self._renew, name=f"claim-{self.number}", daemon=True).start()
        return True

    def confirm_lock(self) -> None:
        """The operating system's lock has been obtained meanwhile."""
        self._write(locked=True)

    def taken_by(self) -> Holder | None:
        """Who has taken the run over, or None as long as it is this process's."""
        own = _read(self._claims.file(self.number))
        if own is not None and self._is_own(own) and not self._claims.file(self.number + 1).exists():
            return None
        newest = self._claims.newest()
        if newest is None:  # all claims were deleted
            with self._writing:
                self.number = 1
                self._facts["locked"] = False  # the lock's file may be gone too
                if self._claims.take(1, self.content):
                    return None
            newest = self._claims.newest()
        return newest or Holder(0, b"")

    def release(self) -> None:
        self._ended.set()
        self._write(free=True)

    def _renew(self) -> None:
        while not self._ended.wait(self.lease / RENEWALS):
            self._write(renewed=self._facts["renewed"] + 1)

    def _write(self, **facts: Any) -> None:
        with self._writing:
            if self._ended.is_set() and "free" not in facts:
                return
            self._facts |= facts
            path = self._claims.file(self.number)
            with contextlib.suppress(OSError):  # whoever writes next will learn of it
                own = _read(path)
                if own is not None and self._is_own(own):
                    _rewrite(path, self.content)

    def _is_own(self, content: bytes) -> bool:
        return _holder(self.number, content).token == self._facts["token"]


class _Sighting(NamedTuple):
    content: bytes
    quiet: float  # seconds that it has not changed
    last: float  # moment of time.monotonic() of the last look


_sightings: dict[Path, _Sighting] = {}  # of claims of other processes, by this one


def is_silent(claims: Claims, holder: Holder) -> bool:
    """Has this process watched the claim for its whole lease without a change? It has to look again and again: between
    two looks the watcher itself, or the file system, may have been stopped, so that little of a long gap counts."""
    path, now = claims.file(holder.number), time.monotonic()
    seen = _sightings.get(path)
    if seen is None or seen.content != holder.content:
        seen = _Sighting(holder.content, 0.0, now)
    else:
        seen = seen._replace(quiet=seen.quiet + min(now - seen.last, holder.lease / RENEWALS), last=now)
    _sightings[path] = seen
    return seen.quiet >= holder.lease


class SystemLock:
    """The operating system's lock on a file, where the file system has locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: BaseFileLock | None = None

    def acquire(self) -> bool | None:
        """True: it is this process's. False: it is another's. None: there are no locks here."""
        lock: BaseFileLock = FileLock(self.path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it makes do with something else than a lock
                lock.acquire(blocking=False)
        except Timeout:
            return False
        except NotImplementedError:
            return None
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            raise
        if isinstance(lock, SoftFileLock):  # a file that would outlive a killed process
            lock.release()
            return None
        self._lock = lock
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()  # the empty file stays: removing it would race with the next holder
            self._lock = None


def _holder(number: int, content: bytes) -> Holder:
    """A claim from its file; one that was cut off by a crash, or holds anything else, has nobody's name."""
    try:
        facts = json.loads(content)
        known = {name: kind(facts[name]) for name, kind in Holder.__annotations__.items() if name in facts}
        holder = Holder(number, content, **known)
        return holder if 0 < holder.lease <= LONGEST else holder._replace(lease=LEASE)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Holder(number, content)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        raise


def _rewrite(path: Path, content: bytes) -> None:
    """In place. A file that is gone is not made again, and a disk that takes nothing is for others to notice."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY)
        try:
            os.write(file, content)
        finally:
            os.close(file)
