"""Temporary folders that do not outlive their command: removed at its end, at a signal, or, had it been killed, by the
next command that needs one."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from spt.runtime.signals import cleanup

PREFIX = "spt-"
OWNER = ".owner"  # a file, locked by the process whose folder it is, for as long as that lives


@contextlib.contextmanager
def scratch_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """A new, empty folder for temporary files; those that killed processes have left are removed first."""
    from filelock import FileLock, Timeout

    remove_abandoned()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
        with cleanup(partial(_remove, folder)):
            owner = FileLock(folder / OWNER)
            try:
                try:
                    owner.acquire(timeout=0)
                    lost = not (folder / OWNER).exists()
                except (OSError, NotImplementedError) as error:  # a file system without locks: nobody removes it
                    lost = isinstance(error, Timeout) or not folder.exists()
                if not lost:  # another process has not taken it for abandoned before it was locked
                    yield folder
                    return
            finally:
                owner.release()
                _remove(folder)


def _remove(folder: Path, number: int = 0) -> None:
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
                _remove(path.parent)
