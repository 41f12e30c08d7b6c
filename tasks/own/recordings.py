"""Recordings read by the libraries of their fields, each an extra: sounds (soundfile), WFDB (wfdb), EDF (edfio).

What a header promises is checked against the file before memory is taken for it, and nothing outside the folder is
opened.
L steps, C channels.
"""

import contextlib
import importlib
import io
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.tasks.own.limits import MAX_CHANNELS, MAX_FILE, MAX_RATIO, MAX_STEPS, SMALL
from spt.tasks.own.parsing import show, suggest

SOUNDS = (".flac", ".ogg", ".mp3")
SIGNALS = (".hea", ".edf", ".bdf")
ENDINGS = (*SOUNDS, *SIGNALS)
EXTRAS = {"soundfile": "audio", "wfdb": "wfdb", "edfio": "edf"}  # package -> extra of this project
FULL_SCALE = (0.0, 1.0)  # the number that stands for zero, and the one above it for full scale
FRAMES = 2**18  # of a sound, decoded at once


class Recording(NamedTuple):
    """What a file holds."""

    steps: NDArray[Any]  # (L,) or (L, C), in the file's own type (.wav of more than 16 bits: float32)
    rate: int | float | None = None  # samples a second, where the file says so
    scale: tuple[float, float] = FULL_SCALE
    signals: tuple[str, ...] = ()  # name and unit of each channel, where the file says so


def read_sound(path: Path, place: str) -> Recording:
    """A sound of any kind that libsndfile reads. Raises ValueError."""
    soundfile = _package("soundfile", path, place)
    pieces: list[NDArray[Any]] = []
    size = count = 0
    with _errors(place, "a sound"), soundfile.SoundFile(io.BytesIO(path.read_bytes())) as sound:
        rate, channels, promised = sound.samplerate, sound.channels, sound.frames
        dtype = "int16" if sound.subtype.partition("_")[2] in ("16", "S8", "U8") else "float32"  # of PCM
        at_once = max(1, FRAMES // channels)  # a false header has no memory reserved for it
        while len(piece := sound.read(at_once, dtype, always_2d=True)):
            pieces.append(piece)
            size, count = size + piece.nbytes, count + len(piece)
            if size > MAX_FILE or count > MAX_STEPS:
                break
    if not pieces:
        raise ValueError(f"{place} has no samples")
    if size > MAX_FILE or count > MAX_STEPS:
        raise ValueError(
            f"{place} has more than {MAX_STEPS:,} samples a channel, or {MAX_FILE:,} bytes of them; cut it"
        )
    if count < promised and path.suffix.lower() != ".mp3":  # whose length is an estimate
        raise ValueError(f"{place} is cut short: {promised:,} samples are announced, {count:,} follow")
    scale = (0.0, 32768.0) if dtype == "int16" else FULL_SCALE
    return Recording(np.concatenate(pieces), int(rate), scale)


class _Signal(NamedTuple):
    """A channel as a header describes it."""

    name: str
    unit: str
    rate: int | float


def read_wfdb(path: Path, channels: Sequence[str], place: str) -> Recording:
    """The record of a header (.hea) in physical units. Raises ValueError."""
    wfdb = _package("wfdb", path, place)
    if "::" in str(path):  # which fsspec, in between, takes for an address
        raise ValueError(f"{place}: '::' in the path of a WFDB record is not read; rename it")
    record_name = str(path.with_suffix(""))
    with _errors(place, "a WFDB header"):
        header = wfdb.rdheader(record_name)
        if not isinstance(header, wfdb.Record):
            raise ValueError("it is in several segments; write it as one (wfdb.rdrecord and wfdb.wrsamp do)")
        if not header.n_sig or header.n_sig != len(header.sig_name or ()):
            raise ValueError(f"{header.n_sig or 'no'} signals are announced, {len(header.sig_name or ())} described")
        if not header.fs or not 0 < header.fs < 1e9:
            raise ValueError(f"its sampling frequency is {header.fs}")
        per_frame = [int(n or 1) for n in header.samps_per_frame]
        _check_signal_files(header, path.parent, per_frame)
        described = [
            _Signal(_printable(name), _printable(unit), _whole(header.fs * n))
            for name, unit, n in zip(header.sig_name, header.units, per_frame, strict=True)
        ]
    picks = _chosen(described, channels, place)
    with _errors(place, "a WFDB record"):
        record = wfdb.rdrecord(record_name, channels=picks, smooth_frames=False, return_res=32)
        steps = np.stack([np.asarray(signal, np.float32) for signal in record.e_p_signal], axis=1)
    return _recording(steps, [described[i] for i in picks])


def _check_signal_files(header: Any, folder: Path, per_frame: Sequence[int]) -> None:
    """Raise ValueError unless the files that a header names lie in its folder and are as long as it says."""
    from wfdb.io._signal import BYTES_PER_SAMPLE

    frames = int(header.sig_len) if header.sig_len else 0
    if frames > MAX_STEPS or frames * sum(per_frame) * 4 > MAX_FILE or len(per_frame) > MAX_CHANNELS:
        raise ValueError(f"{frames:,} steps of {sum(per_frame):,} numbers are announced, which is too long for one row")
    for name in dict.fromkeys(header.file_name):
        file = folder / str(name)
        if os.path.basename(str(name)) != name or not _is_inside(file, folder):
            raise ValueError(
                f"its signal file {show(str(name))} leads outside the folder {folder.name}; it is not used"
            )
        if not file.exists():
            raise ValueError(f"its signal file {name} is not in {folder.name}")
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"its signal file {name} is not a regular file")
        mine = [i for i, other in enumerate(header.file_name) if other == name]
        formats = {str(header.fmt[i]) for i in mine}
        if len(formats) > 1 or not formats <= BYTES_PER_SAMPLE.keys():
            raise ValueError(f"the format of {name} is {' and '.join(sorted(formats))}, which is not read")
        each, size = BYTES_PER_SAMPLE[formats.pop()], file.stat().st_size
        offset = int(header.byte_offset[mine[0]] or 0)
        samples = frames * sum(per_frame[i] for i in mine)
        if each and size < offset + int(samples * each):
            raise ValueError(
                f"{name} is cut short: {int(samples * each):,} bytes are announced, {size - offset:,} follow"
            )
        if not each and 4 * samples > max(SMALL, MAX_RATIO * size):
            raise ValueError(f"{name} unpacks to {samples:,} samples from {size:,} bytes; it is not used")


def _is_inside(file: Path, folder: Path) -> bool:
    return os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep)


def read_edf(path: Path, channels: Sequence[str], place: str) -> Recording:
    """EDF, EDF+ and BDF in physical units. Raises ValueError."""
    edfio = _package("edfio", path, place)
    with _errors(place, "EDF or BDF"):
        header = _head(path)
        signals, records = int(header[252:256]), int(header[236:244])
        most = path.stat().st_size // 256
        if not 0 < signals < most:
            raise ValueError(f"{signals:,} signals are announced in a file of {path.stat().st_size:,} bytes")
        if records < 0:
            raise ValueError("it says -1 data records, so its recording was never finished")
        if header[192:197] in (b"EDF+D", b"BDF+D"):
            raise ValueError("its recording has gaps (EDF+D); write the parts as files of their own")
        edf = edfio.read_bdf(path) if path.suffix.lower() == ".bdf" else edfio.read_edf(path)
        if not 0 < edf.data_record_duration < 1e9:
            raise ValueError(f"its data records last {edf.data_record_duration:g} seconds")
        described = [
            _Signal(_printable(each.label), _printable(each.physical_dimension), _whole(each.sampling_frequency))
            for each in edf.signals
        ]
    picks = _chosen(described, channels, place)
    with _errors(place, "EDF or BDF"):
        steps = np.stack([edf.signals[i].data.astype(np.float32) for i in picks], axis=1)
    return _recording(steps, [described[i] for i in picks])


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(256)
    if len(head) < 256:
        raise ValueError(f"it has {len(head)} bytes")
    return head


def _chosen(described: Sequence[_Signal], channels: Sequence[str], place: str) -> list[int]:
    """The signals to read. Raises ValueError for names that are not there once, and for several rates."""
    names = [signal.name for signal in described]
    for name in channels:
        if names.count(name) != 1:
            problem = f"{names.count(name)} signals are called {name!r}" if name in names else f"no signal {name!r}"
            raise ValueError(f"{place}: {problem}{suggest(name, names) if name not in names else ''}")
    picks = [names.index(name) for name in channels] or list(range(len(names)))
    if not picks:
        raise ValueError(f"{place}: it has no signals")
    rates = {described[i].rate for i in picks}
    if len(rates) > 1:
        told = ", ".join(f"{described[i].name} {described[i].rate:g}" for i in picks[:8]) + ", …" * (len(picks) > 8)
        raise ValueError(
            f"{place}: its signals have several sampling rates ({told} a second); name those of one rate: channels"
        )
    return picks


def _recording(steps: NDArray[np.float32], signals: Sequence[_Signal]) -> Recording:
    return Recording(steps, signals[0].rate, signals=tuple(f"{name} [{unit}]" for name, unit, _ in signals))


def _printable(name: Any) -> str:
    """A name or unit on one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(name or ""))


def _whole(rate: int | float) -> int | float:
    return int(rate) if float(rate).is_integer() else float(rate)


def _package(name: str, path: Path, place: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a system library that it needs
        raise ValueError(
            f"{place}: {path.suffix.lower()} files are read with the package {name}, which cannot be imported "
            f"({error}): pip install 'selfpretrain[{EXTRAS[name]}]'"
        ) from None


@contextlib.contextmanager
def _errors(place: str, what: str) -> Iterator[None]:
    """Turn whatever a library makes of a damaged file, its warnings included, into ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    except MemoryError:
        raise
    except Exception as error:  # of any class: these libraries do not promise one
        reason = " ".join(str(getattr(error, "error_string", error)).split())[:160] or type(error).__name__
        raise ValueError(f"{place} cannot be read as {what}: {reason.rstrip('.')}") from error
