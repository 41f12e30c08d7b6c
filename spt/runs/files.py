"""Atomic file writes, and one-sentence messages for errors of the file system."""

import contextlib
import errno
import json
import math
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spt.errors import OutputError
from spt.runs.result import LARGEST


def is_out_of_range(value: object) -> bool:
    """Is this a finite number larger than any score or cost can be?"""
    return isinstance(value, int | float) and LARGEST < abs(value) < math.inf


def parse_json(text: str) -> Any:
    """As json.loads, but a number that is not finite or is out of range is a ValueError too, and so is what is nested
    too deeply."""

    def number(written: str, kind: type[int] | type[float] = float) -> int | float:
        value = kind(written)
        if not abs(value) <= LARGEST:
            raise ValueError(f"{written[:20]} is out of range")
        return value

    try:
        return json.loads(
            text, parse_constant=number, parse_float=number, parse_int=lambda written: number(written, int)
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one-sentence messages."""
    try:
        yield
    except NotImplementedError as error:  # raised by FileLock on a file system without locks
        raise OutputError(
            f"the file system of {path.parent} has no locks, so two processes could overwrite each other's work; "
            "choose another SPT_CACHE_DIR"
        ) from error
    except OSError as error:
        raise output_error(path, error) from error


def output_error(path: Path, error: OSError) -> OutputError:
    reasons = {
        errno.ENOSPC: "the disk is full; free some space and repeat the command, it continues",
        errno.EDQUOT: "the disk quota is used up; free some space and repeat the command, it continues",
        errno.EFBIG: "the file is larger than this session allows (ulimit -f); raise the limit and repeat the command",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.EACCES: "permission denied; choose another folder",
        errno.ENOTDIR: "a part of this path is a file, not a folder; choose another folder",
        errno.EEXIST: "a file of this name is where a folder is needed",
    }
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return OutputError(f"cannot write {path}: {reason}", hopeless=full)


def check_regular(path: Path) -> None:
    """Raise OutputError for what stands where a file is expected, and would be waited for: a pipe, a device."""
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is not a file; remove it")


def check_writable(path: Path) -> None:
    """Raise OutputError unless a file can be written there, before hours are spent on what it is to hold."""
    with writing(path):
        if path.is_dir():
            raise OutputError(f"cannot write {path}: it is a folder; name a file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside this one, which takes its place at the end: a reader sees the old file or the new one.

    That holds after a power cut too: content is on the disk before it has its name.
    """
    # Of several machines, or containers, two processes can have the same number.
    beside = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with writing(path):
        try:
            yield beside
            sync(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file's content, or that of every file in a folder, on the disk: a rename alone says nothing of content."""
    mode = "rb+" if os.name == "nt" else "rb"  # elsewhere a file that may only be read can be synced too
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open(mode) as opened:
                os.fsync(opened.fileno())


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this machine were writing into a folder when they were killed."""
    left_by = re.compile(rf"\..+\.{re.escape(platform.node())}-(\d+)-[0-9a-f]+\.tmp")
    for path in folder.glob(".*.tmp"):
        match = left_by.fullmatch(path.name)
        if match and not _is_at_work(int(match[1])):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_at_work(process: int) -> bool:
    if os.name == "nt":  # signal 0 is Ctrl-C there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite, which JSON for other programs cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
