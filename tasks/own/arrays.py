"""One sequence a file: .npy and .npz as NumPy writes them, and .wav; named by a table beside them.

Nothing is unpickled, unpacked to disk or followed out of the folder; what a header promises is compared with what the
file can hold before memory is taken. L steps, C channels.
"""

import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from spt.tasks.own.cells import HUGE, listed, nearest, show, text_of
from spt.tasks.waves import read_wav

KINDS = (".npy", ".npz", ".wav")
MAX_FILE = 2**31  # bytes of a file, and of an array
MAX_STEPS = 2**26
MAX_CHANNELS = 2**16
SMALL = 2**24  # bytes: what unpacks to less harms nobody
MAX_RATIO = 200  # of unpacked to packed size; numbers that were measured come to 20 at most
MAX_MEMBERS = 10_000  # of an archive
MAX_LISTED = 5_000_000  # files of a folder
HEADER = 10_000  # characters of an array's description


class Sound(NamedTuple):
    """What a file's array is, beside its numbers."""

    rate: int | None  # samples a second, of .wav
    scale: tuple[float, float]  # the number that stands for zero, and the one above it for full scale


class Folder:
    """Array files below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real = os.path.realpath(root)

    def find(self, cell: Any, place: str) -> Path:
        """The file that a cell names. Raises ValueError for a name that leads outside, or to no file."""
        name = text_of(cell, place)
        if not name.strip():
            raise ValueError(f"{place}: the cell is empty; it names a file")
        for kind in (PurePosixPath(name), PureWindowsPath(name)):
            if kind.anchor or ".." in kind.parts:
                raise ValueError(f"{place}: {show(name)} leads outside the folder {self.root.name}; it is not used")
        path = self.root / name
        if path.suffix.lower() not in KINDS:
            raise ValueError(f"{place}: {show(name)} is not read; files are {', '.join(KINDS)} (convert others)")
        real = os.path.realpath(path)
        if not real.startswith(self.real + os.sep):
            raise ValueError(f"{place}: {show(name)} is a link that leads outside the folder {self.root.name}")
        try:
            regular = stat.S_ISREG(os.stat(real).st_mode)
        except (OSError, ValueError):
            raise ValueError(f"{place}: there is no file {show(name)} in {self.root.name}") from None
        if not regular:
            raise ValueError(f"{place}: {show(name)} is not a regular file")
        return path


def files_in(root: Path, kinds: Sequence[str] = KINDS) -> Iterator[str]:
    """Names, from the folder on, of all array files; links to folders are not followed, hidden files left out."""
    found = 0
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(root / below) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                elif os.path.splitext(name)[1].lower() in kinds:
                    found += 1
                    if found > MAX_LISTED:
                        raise ValueError(
                            f"the folder {root} has more than {MAX_LISTED:,} files; give a folder of its own"
                        )
                    yield name


def read(path: Path, array: str | None, place: str) -> tuple[NDArray[Any], Sound]:
    """A file's steps, (L,) or (L, C), in the file's own type (.wav of more than 16 bits: float32), and what they are.

    Raises ValueError, in words, for anything but finite numbers in one or two dimensions.
    """
    place = f"{place}, {path.name}"
    size = path.stat().st_size
    if size > MAX_FILE:
        raise ValueError(f"{place}: {size:,} bytes are too many for one sequence; at most {MAX_FILE:,}")
    if path.suffix.lower() == ".wav":
        steps, rate = read_wav(path.read_bytes(), place, MAX_STEPS)
        return _sound(steps, rate)
    try:
        with path.open("rb") as file:
            steps = _archive(file, size, array, place) if path.suffix.lower() == ".npz" else _array(file, size, place)
    except (EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{place} is damaged or cut short ({type(error).__name__})") from error
    return _checked(steps, place), Sound(None, (0.0, 1.0))


def _sound(steps: NDArray[Any], rate: int) -> tuple[NDArray[Any], Sound]:
    if steps.dtype == np.uint8:
        return steps, Sound(rate, (128.0, 128.0))
    if steps.dtype == np.int16:
        return steps, Sound(rate, (0.0, 32768.0))
    if steps.dtype == np.int32:
        return steps.astype(np.float32) / np.float32(2**31), Sound(rate, (0.0, 1.0))
    return steps.astype(np.float32, copy=False), Sound(rate, (0.0, 1.0))


def _checked(steps: NDArray[Any], place: str) -> NDArray[Any]:
    if steps.ndim not in (1, 2):
        raise ValueError(f"{place}: the array has {steps.ndim} dimensions; (steps,) or (steps, channels) is expected")
    if not steps.size:
        raise ValueError(f"{place}: the sequence has no steps; leave the row out")
    if len(steps) > MAX_STEPS or steps.size // len(steps) > MAX_CHANNELS:
        raise ValueError(
            f"{place}: {' x '.join(f'{n:,}' for n in steps.shape)} numbers; at most {MAX_STEPS:,} steps of "
            f"{MAX_CHANNELS:,} channels are read (is the array transposed?)"
        )
    if not (-HUGE < float(steps.min()) and float(steps.max()) < HUGE):  # NaN is neither
        first = np.argwhere(~(np.abs(steps.astype(np.float64)) < HUGE))[0]
        raise ValueError(f"{place}, step {first[0] + 1}: {steps[tuple(first)]} is not a finite number below 1e18")
    if steps.dtype.kind == "b":
        steps = steps.astype(np.uint8)
    return np.ascontiguousarray(steps)


# ----------------------------------------------------------------------------------------------------------------- .npy


def _array(file: IO[bytes] | zipfile.ZipExtFile, size: int, place: str) -> NDArray[Any]:
    """An array whose file, or member of an archive, has this many bytes."""
    try:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format")
        head = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = head(file, max_header_size=HEADER)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].partition(":")[0]
        raise ValueError(f"{place} is no array in NumPy's format ({reason[:80]})") from error
    if dtype.hasobject:
        raise ValueError(f"{place} holds Python objects (a pickle), which are never opened; save an array of numbers")
    if dtype.kind not in "iufb":
        raise ValueError(f"{place} holds {dtype}; numbers are expected")
    count = math.prod(shape)
    if any(n < 0 for n in shape) or count * dtype.itemsize > size - file.tell():
        shown = " x ".join(f"{n:,}" for n in shape) or "1"
        raise ValueError(f"{place} promises {shown} numbers, but has {size:,} bytes; it is damaged or cut short")
    content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise EOFError
    numbers = np.frombuffer(content, dtype, count)
    numbers = numbers.reshape(shape[::-1]).T if fortran else numbers.reshape(shape)
    return numbers.astype(dtype.newbyteorder("="), copy=False)


# ----------------------------------------------------------------------------------------------------------------- .npz


def _archive(file: IO[bytes], size: int, array: str | None, place: str) -> NDArray[Any]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise ValueError(f"{place} has {len(members):,} members; it is not used")
        for member in members:
            for kind in (PurePosixPath(member.filename), PureWindowsPath(member.filename)):
                if kind.anchor or ".." in kind.parts:
                    raise ValueError(f"{place} has a member {show(member.filename)} that leads outside; it is not used")
        names = {member.filename.removesuffix(".npy"): member for member in members if member.filename.endswith(".npy")}
        if array is None and len(names) != 1:
            raise ValueError(f"{place} holds {len(names)} arrays{listed(list(names))}; say which with array: …")
        chosen = array if array is not None else next(iter(names))
        if chosen not in names:
            raise ValueError(f"{place} has no array {chosen!r}{nearest(chosen, list(names))}")
        member = names[chosen]
        if member.flag_bits & 1:
            raise ValueError(f"{place} is encrypted; it is not used")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{place} is packed in another way than NumPy packs; save it again")
        if member.file_size > MAX_FILE or member.file_size > max(SMALL, MAX_RATIO * min(size, member.compress_size)):
            raise ValueError(
                f"{place} unpacks to {member.file_size:,} bytes from {min(size, member.compress_size):,}, as no "
                "measurement does; it is not used"
            )
        with archive.open(member) as unpacked:
            return _array(unpacked, member.file_size, place)
