"""One sequence per file: arrays (.npy, .npz), sounds, WFDB, EDF and BDF recordings, named by a table beside them.

Nothing is unpickled or unpacked to disk; paths and links that lead out of the folder are refused. L steps, C channels.
"""

import io
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from spt.tasks.files import MAX_HEADER, NPY_ERRORS, ZIP_ERRORS, read_npy
from spt.tasks.own import recordings
from spt.tasks.own.limits import MAX_CHANNELS, MAX_FILE, MAX_RATIO, MAX_STEPS, SMALL
from spt.tasks.own.parsing import (
    HUGE,
    MissingValueError,
    is_small_or_nan,
    list_names,
    parse_text,
    same_nan,
    show,
    suggest,
)
from spt.tasks.own.recordings import SIGNALS, SOUNDS, Recording, read_edf, read_sound, read_wfdb
from spt.tasks.waves import OtherKindError, read_wav, unit

ENDINGS = (".npy", ".npz", ".wav", *recordings.ENDINGS)
RECORD = ".hea"  # of a WFDB record, which is named with or without
MAX_MEMBERS = 10_000  # of an archive
MAX_LISTED = 5_000_000  # files of a folder


def kind_of(ending: str) -> str:
    """What a file is, whatever its format: files of two kinds do not go together."""
    kinds = {".wav": "sound", ".hea": "WFDB", ".edf": "EDF", ".bdf": "EDF"} | dict.fromkeys(SOUNDS, "sound")
    return kinds.get(ending, "array")


def find(root: Path, cell: Any, place: str) -> Path:
    """The file in a folder that a cell names. Raises ValueError for a name that leads outside, or to no file."""
    name = parse_text(cell, place)
    if not name.strip():
        raise ValueError(f"{place}: the cell is empty; it names a file")
    if _leads_outside(name):
        raise ValueError(f"{place}: {show(name)} leads outside the folder {root.name}; it is not used")
    path = root / with_ending(root, name)
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


def with_ending(root: Path, name: str) -> str:
    """A file's name relative to the folder; a WFDB record, which may be named without one, gets its header's ending."""
    name = os.path.normpath(name)
    known = os.path.splitext(name)[1].lower() in ENDINGS
    return name if known or not os.path.lexists(f"{root / name}{RECORD}") else f"{name}{RECORD}"


def files_in(root: Path, endings: Sequence[str] = ENDINGS) -> Iterator[str]:
    """Names, relative to the folder, of all array files; links to folders are not followed, hidden files left out."""

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


def companions(root: Path, names: Sequence[str]) -> list[Path]:
    """The files beside WFDB headers, which say what these mean; an edited file is read again."""
    folders = dict.fromkeys(os.path.dirname(name) for name in names if name.lower().endswith(RECORD))
    files = [file for folder in folders for file in sorted((root / folder).iterdir()) if file.is_file()]
    return [file for file in files if file.suffix.lower() not in ENDINGS and not file.name.startswith(".")]


def read(path: Path, array: str | None, place: str, gaps: bool = False, channels: Sequence[str] = ()) -> Recording:
    """Read a file; anything but finite numbers in one or two dimensions raises a ValueError of one sentence. With
    `gaps`, NaN stands for a missing number."""
    place = f"{place}, {path.name}"
    size = path.stat().st_size
    if size > MAX_FILE:
        raise ValueError(f"{place}: {size:,} bytes are too many for one sequence; at most {MAX_FILE:,}")
    ending = path.suffix.lower()
    if channels and ending not in SIGNALS:
        raise ValueError(f"{place}: channels names signals of {', '.join(SIGNALS)} files; {ending} files have no names")
    if ending in recordings.ENDINGS:
        return _read_recording(path, place, gaps, channels)
    if ending == ".wav":
        try:
            steps, rate = read_wav(path.read_bytes(), place, MAX_STEPS)
        except OtherKindError as error:
            return _read_other_wav(path, place, error)
        if steps.dtype == np.uint8:
            return Recording(steps, rate, (128.0, 128.0))
        return Recording(steps, rate, (0.0, 32768.0)) if steps.dtype == np.int16 else Recording(unit(steps), rate)
    with path.open("rb") as file:
        steps = from_archive(file, size, array, place) if ending == ".npz" else _array(file, place)
    return Recording(_checked(steps, place, gaps))


def _read_recording(path: Path, place: str, gaps: bool, channels: Sequence[str]) -> Recording:
    ending = path.suffix.lower()
    if ending in SOUNDS:
        found = read_sound(path, place)
    else:
        found = read_wfdb(path, channels, place) if ending == RECORD else read_edf(path, channels, place)
    return found._replace(steps=_checked(found.steps, place, gaps))


def _read_other_wav(path: Path, place: str, refused: OtherKindError) -> Recording:
    """A WAV file of a kind that needs soundfile: compressed, of 64 bits, or larger than RIFF allows."""
    try:
        found = read_sound(path, place)
    except ValueError as error:
        raise ValueError(f"{refused}, or install what reads it ({error})") from None
    return found._replace(steps=_checked(found.steps, place, gaps=False))


def _leads_outside(name: str) -> bool:
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


def _checked(steps: NDArray[Any], place: str, gaps: bool) -> NDArray[Any]:
    if steps.ndim not in (1, 2):
        raise ValueError(f"{place}: the array has {steps.ndim} dimensions; (steps,) or (steps, channels) is expected")
    if not steps.size:
        raise ValueError(f"{place}: the sequence has no steps; leave the row out")
    if len(steps) > MAX_STEPS or steps.size // len(steps) > MAX_CHANNELS:
        raise ValueError(
            f"{place}: {' x '.join(f'{n:,}' for n in steps.shape)} numbers; at most {MAX_STEPS:,} steps of "
            f"{MAX_CHANNELS:,} channels are read (is the array transposed?)"
        )
    if gaps and steps.dtype.kind == "f" and is_small_or_nan(steps):
        steps = same_nan(steps)
    elif not (-HUGE < float(steps.min()) and float(steps.max()) < HUGE):  # NaN is neither
        right = np.abs(steps.astype(np.float64)) < HUGE
        first = np.argwhere(~(right | np.isnan(steps) if gaps else right))[0]
        error = MissingValueError if np.isnan(steps[tuple(first)]) else ValueError
        raise error(f"{place}, step {first[0] + 1}: {steps[tuple(first)]} is not a finite number below 1e18")
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
    except (OSError, *ZIP_ERRORS) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{place} cannot be read as an archive: {reason}") from error


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
