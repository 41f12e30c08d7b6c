"""One sequence a file: .npy and .npz as NumPy writes them, and .wav; named by a table beside them.

Nothing is unpickled, unpacked to disk or followed out of the folder. L steps, C channels.
"""

import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.tasks.files import MAX_HEADER, NPY_ERRORS, read_npy
from spt.tasks.own.parsing import HUGE, list_names, parse_text, show, suggest
from spt.tasks.waves import read_wav, unit

ENDINGS = (".npy", ".npz", ".wav")
MAX_FILE = 2**31  # bytes of a file, and of an array
MAX_STEPS = 2**26
MAX_CHANNELS = 2**16
SMALL = 2**24  # bytes: what unpacks to less harms nobody
MAX_RATIO = 200  # of unpacked to packed size; numbers that were measured come to 20 at most
MAX_MEMBERS = 10_000  # of an archive
MAX_LISTED = 5_000_000  # files of a folder
FULL_SCALE = (0.0, 1.0)  # the number that stands for zero, and the one above it for full scale


class Recording(NamedTuple):
    """What a file holds."""

    steps: NDArray[Any]  # (L,) or (L, C), in the file's own type (.wav of more than 16 bits: float32)
    rate: int | None = None  # samples a second, of .wav
    scale: tuple[float, float] = FULL_SCALE


def find(root: Path, cell: Any, place: str) -> Path:
    """The file below a folder that a cell names. Raises ValueError for a name that leads outside, or to no file."""
    name = parse_text(cell, place)
    if not name.strip():
        raise ValueError(f"{place}: the cell is empty; it names a file")
    if _leads_outside(name):
        raise ValueError(f"{place}: {show(name)} leads outside the folder {root.name}; it is not used")
    path = root / name
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{place}: {show(name)} is not read; files are {', '.join(ENDINGS)} (convert others)")
    real = os.path.realpath(path)
    if not real.startswith(os.path.realpath(root) + os.sep):
        raise ValueError(f"{place}: {show(name)} is a link that leads outside the folder {root.name}")
    try:
        regular = stat.S_ISREG(os.stat(real).st_mode)
    except (OSError, ValueError):
        raise ValueError(f"{place}: there is no file {show(name)} in {root.name}") from None
    if not regular:
        raise ValueError(f"{place}: {show(name)} is not a regular file")
    return path


def files_in(root: Path, endings: Sequence[str] = ENDINGS) -> Iterator[str]:
    """Names, from the folder on, of all array files; links to folders are not followed, hidden files left out."""

    def fail(error: OSError) -> None:
        raise error

    count = 0
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        names = [name for name in sorted(files) if os.path.splitext(name)[1].lower() in endings and name[0] != "."]
        count += len(names)
        if count > MAX_LISTED:
            raise ValueError(f"the folder {root} has more than {MAX_LISTED:,} files; give a folder of its own")
        below = os.path.relpath(folder, root)
        yield from (os.path.normpath(os.path.join(below, name)) for name in names)


def read(path: Path, array: str | None, place: str) -> Recording:
    """Raises ValueError, in one sentence, for anything but finite numbers in one or two dimensions."""
    place = f"{place}, {path.name}"
    size = path.stat().st_size
    if size > MAX_FILE:
        raise ValueError(f"{place}: {size:,} bytes are too many for one sequence; at most {MAX_FILE:,}")
    if path.suffix.lower() == ".wav":
        steps, rate = read_wav(path.read_bytes(), place, MAX_STEPS)
        if steps.dtype == np.uint8:
            return Recording(steps, rate, (128.0, 128.0))
        return Recording(steps, rate, (0.0, 32768.0)) if steps.dtype == np.int16 else Recording(unit(steps), rate)
    with path.open("rb") as file:
        steps = from_archive(file, size, array, place) if path.suffix.lower() == ".npz" else _array(file, place)
    return Recording(_checked(steps, place))


def _leads_outside(name: str) -> bool:
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


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


def _array(file: io.BufferedIOBase | IO[bytes], place: str) -> NDArray[Any]:
    numbers = read_npy(file, place)
    if numbers.dtype.kind not in "iufb":
        raise ValueError(f"{place} holds {numbers.dtype}; numbers are expected")
    return numbers.astype(numbers.dtype.newbyteorder("="), copy=False)


def from_archive(file: io.BufferedReader, size: int, array: str | None, place: str) -> NDArray[Any]:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(_member(archive, size, array, place)) as member:
            return _array(member, place)
    except (EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{place} cannot be read as an archive: {str(error) or type(error).__name__}") from error


def mapped(path: Path) -> NDArray[Any]:
    """The array of an .npy file, read as it is used. Raises ValueError where it is none."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False, max_header_size=MAX_HEADER)
    except NPY_ERRORS as error:
        reason = str(error).partition("\n")[0][:80] or type(error).__name__
        raise ValueError(f"{path.name} cannot be read as an array: {reason}") from error
    return array


def _member(archive: zipfile.ZipFile, size: int, array: str | None, place: str) -> zipfile.ZipInfo:
    """The member that holds the array of this name, or the only array."""
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"{place} has {len(members):,} members; it is not used")
    for member in members:
        if _leads_outside(member.filename):
            raise ValueError(f"{place} has a member {show(member.filename)} that leads outside; it is not used")
    arrays = {member.filename.removesuffix(".npy"): member for member in members if member.filename.endswith(".npy")}
    if array is None and len(arrays) != 1:
        raise ValueError(f"{place} holds {len(arrays)} arrays{list_names(list(arrays))}; say which with array: …")
    name = array if array is not None else next(iter(arrays))
    if name not in arrays:
        raise ValueError(f"{place} has no array {name!r}{suggest(name, list(arrays))}")
    unpacked, packed = arrays[name].file_size, min(size, arrays[name].compress_size)
    if unpacked > MAX_FILE or unpacked > max(SMALL, MAX_RATIO * packed):
        raise ValueError(
            f"{place} unpacks to {unpacked:,} bytes from {packed:,}, as no measurement does; it is not used"
        )
    return arrays[name]
