"""What tasks that read sound share: a strict reader of WAV files (PCM of 8, 16, 24, 32 bits, and 32-bit floats).

L frames (one sample of every channel), C channels. Layout: Microsoft's RIFF specification, "New Multimedia Data Types"
(1994), and its WAVEFORMATEXTENSIBLE. Every error is one sentence, a ValueError.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_CHANNELS = 256
MAX_RATE = 10_000_000  # frames a second
CODECS = {  # others that occur; names of the RIFF registry
    2: "Microsoft ADPCM",
    6: "A-law",
    7: "mu-law",
    17: "IMA ADPCM",
    49: "GSM 6.10",
    80: "MPEG",
    85: "MP3",
}
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
TAIL = bytes.fromhex("000000001000800000aa00389b71")  # of an extensible format's 16 bytes, after the codec's number


class OtherKindError(ValueError):
    """A WAV file may be whole, but is of a kind that is not read here."""


def read_wav(content: bytes, where: str, limit: int) -> tuple[NDArray[Any], int]:
    """Samples (L, C) of a WAV file's content, 1 <= L <= limit, and its sampling rate in frames a second.

    uint8 (128 is silence), int16, int32 or float32, as in the file; 24 bits are the upper ones of int32, so that full
    scale follows from the type (see `unit`). `where` names the file in errors, all ValueError.
    """
    if len(content) < 12:
        raise ValueError(f"{where} is no WAV file: it has {len(content)} bytes")
    if content[:4] in (b"RIFX", b"RF64", b"BW64"):
        raise OtherKindError(f"{where} is a {content[:4].decode()} file; convert it to plain WAV")
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError(f"{where} is no WAV file: it does not begin with RIFF and WAVE")
    form: tuple[int, int, int, int] | None = None  # codec, channels, rate, bits of a sample
    place = 12
    while place + 8 <= len(content):
        kind, size = content[place : place + 4], int.from_bytes(content[place + 4 : place + 8], "little")
        place += 8
        if kind == b"fmt " and place + size <= len(content):
            form = _format(content[place : place + size], where)
        elif kind == b"data":
            if form is None:
                raise ValueError(f"{where} is damaged: its samples come before their format")
            return _samples(content, place, size, form, where, limit), form[2]
        place += size + size % 2
    raise ValueError(f"{where} is damaged or cut short: it has no {'samples' if form else 'format'}")


def unit(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Samples of any of these types as float32 in [-1, 1): integers by full scale; floats as they are."""
    if samples.dtype == np.uint8:
        return ((samples - 128.0) / 128).astype(np.float32)
    if samples.dtype.kind == "i":
        return (samples / 2 ** (8 * samples.dtype.itemsize - 1)).astype(np.float32)
    return samples.astype(np.float32, copy=False)


def _format(chunk: bytes, where: str) -> tuple[int, int, int, int]:
    if len(chunk) < 16:
        raise ValueError(f"{where} is damaged: its format has {len(chunk)} bytes; 16 or more are expected")
    codec, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if codec == EXTENSIBLE and len(chunk) >= 40 and chunk[26:40] == TAIL:
        codec = int.from_bytes(chunk[24:26], "little")
    if codec not in (PCM, FLOAT):
        name = CODECS.get(codec, f"codec {codec}")
        raise OtherKindError(f"{where} is compressed or coded ({name}); convert it to PCM of 16 bits")
    if (codec, bits) not in ((PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32)):
        kind = "floats" if codec == FLOAT else "integers"
        raise OtherKindError(
            f"{where} holds {kind} of {bits} bits; PCM of 8, 16, 24 or 32 bits, or 32-bit floats, is read"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"{where} has {channels} channels; 1 to {MAX_CHANNELS} are expected")
    if not 1 <= rate <= MAX_RATE:
        raise ValueError(f"{where} has a sampling rate of {rate:,}; 1 to {MAX_RATE:,} are expected")
    if block != channels * bits // 8:
        raise ValueError(f"{where} is damaged: {channels} channels of {bits} bits are not {block} bytes")
    return codec, channels, rate, bits


def _samples(
    content: bytes, place: int, size: int, form: tuple[int, int, int, int], where: str, limit: int
) -> NDArray[Any]:
    codec, channels, _, bits = form
    block = channels * bits // 8
    if size == 0:
        raise ValueError(f"{where} has no samples")
    if size > len(content) - place:
        left = len(content) - place
        raise ValueError(f"{where} is cut short: {size:,} bytes of samples are announced, {left:,} follow")
    if size % block:
        raise ValueError(f"{where} is damaged: {size:,} bytes are no whole number of frames of {block} bytes")
    frames = size // block
    if frames > limit:
        raise ValueError(f"{where} has {frames:,} samples a channel; at most {limit:,} are expected")
    if bits == 24:
        wide = np.zeros((frames * channels, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8, size, place).reshape(-1, 3)
        return wide.view("<i4").astype(np.int32, copy=False).reshape(frames, channels)
    kind = {8: "u1", 16: "<i2", 32: "<f4" if codec == FLOAT else "<i4"}[bits]
    samples = np.frombuffer(content, kind, size // (bits // 8), place).reshape(frames, channels)
    if codec == FLOAT and not np.isfinite(samples).all():
        raise ValueError(f"{where} has a sample that is not a finite number")
    return samples.astype(samples.dtype.newbyteorder("="), copy=False)
