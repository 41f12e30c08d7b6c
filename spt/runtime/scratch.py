"""Temporary folders that do not outlive their command: removed at its end, at a signal, or, had it been killed, by the
next command that needs one."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spt.runtime.signals import cleanup

PREFIX = "spt-"
OWNER = ".owner"  # a file, locked by the process whose folder it is, for as long as that lives


@contextlib.contextmanager
def scratch_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """A new, empty folder for temporary files; those that killed processes have left are removed first."""
    from filelock import FileLock

    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    with cleanup(lambda _: shutil.rmtree(folder, ignore_errors=True)):
        owner = FileLock(folder / OWNER)
        try:
            with contextlib.suppress(
                OSError, NotImplementedError
            ):  # a file system without locks: nobody else removes it
                owner.acquire(timeout=0)
            yield folder
        finally:
            owner.release()
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove this user's folders whose owners are no more."""
    from filelock import FileLock, Timeout

    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            status = path.parent.lstat()
            if path.parent.is_symlink() or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
                continue
            with FileLock(path).acquire(timeout=0):
                shutil.rmtree(path.parent, ignore_errors=True)
