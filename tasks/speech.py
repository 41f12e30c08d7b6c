"""Spoken words as raw sound: Speech Commands (35 words, 10, or yours) or ten digits; 16,000 steps.

Conventions of the S4 and SPT code are options. By default, the official lists of validation and test clips are used,
which keep each speaker in one split; clips shorter than a second get zeros at their end, which are data like the rest;
samples are stored as they are (16 bits) and standardised by one mean and standard deviation of all training clips, over
every word in use and including the added zeros. `scaling: per_step` is what was published: a sample is divided by 2^15
twice, then scaled to (x - m_t) / (s_t + 1e-5) with mean and standard deviation (of n - 1) at each time t over the
training clips; since s_t is about 2e-6, the result has a spread of 0.1 to 0.2.

`dropped` removes a share of every clip's samples: they are zero after scaling, whose statistics are those of the
remaining samples, and a second channel is 0 there and 1 elsewhere. As published (for ten words), one torch generator
with seed 56789 draws them clip by clip; the order of clips is ours, since the published one is that of the directory. A
masked objective asks for both channels.

`decimate: 2` keeps every second sample, without a filter, as in the published test at 8 kHz: statistics are still those
of full-rate training clips, and the interval between steps, in seconds, is doubled. Classes are in the order of the S4
code. Sources: Warden, "Speech Commands" (arXiv 1804.03209), also for the hash rule; Jakobovski's Free Spoken Digit
Dataset (8 kHz; recordings 0 to 4 of every speaker and digit are for test; 5 to 9 are for validation here, where no rule
is published). See `sources` for the files.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import generator
from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Values
from spt.tasks.files import (
    Download,
    data_folders,
    data_not_found,
    download,
    find_file,
    open_members,
    parquet_files,
    published_thirds,
    read_batches,
    read_unzipped,
    reading_archive,
    torch_permutations,
    verify,
)
from spt.tasks.parallel import Reel, allocate
from spt.tasks.waves import read_wav

# fmt: off
WORDS = [
    "bed", "cat", "down", "five", "forward", "go", "house", "left", "marvin", "no", "on", "right", "sheila", "tree",
    "up", "visual", "yes", "backward", "bird", "dog", "eight", "follow", "four", "happy", "learn", "nine", "off", "one",
    "seven", "six", "stop", "three", "two", "wow", "zero",
]
TEN = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# fmt: on
FSDD = "https://github.com/Jakobovski/free-spoken-digit-dataset"
ARCHIVE = Download(
    ("https://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",),
    "sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
    max_bytes=2_428_923_189,
)
OLDER = Download(
    ("https://download.tensorflow.org/data/speech_commands_v0.01.tar.gz",),
    "sha256:743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
)
UNPACKED = 2**33  # bytes of the archive; the published one has some 3.4e9
PUBLISHED = (84_843, 9_981, 11_005)  # clips of the three splits, all words
LISTS = {"validation_list.txt": "val", "testing_list.txt": "test"}
CLIP = re.compile(r"[0-9a-z]+_nohash_\d+\.wav")
DIGIT = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
SECOND = 16_000  # samples of a clip of Speech Commands
MAX_SAMPLES = 2**20  # of a clip
MAX_FILE = 2 * MAX_SAMPLES + 2**16  # bytes
HASHED = 2**27 - 1  # the published rule's largest number
FULL_SCALE = 2**15
SEED = 42  # of the order of rows
DROPPING = 56789  # published seed of the samples that are removed
PARTS = ("train", "val", "test")
Rows = dict[str, NDArray[np.int64]]  # by split


class Known(NamedTuple):
    """Published facts of a data set."""

    title: str
    rate: int  # samples a second
    words: Sequence[str]  # classes, in order
    folder: str  # of the data folder
    length: int | None  # samples of a clip; None: they differ


KNOWN = {
    "commands": Known("Speech Commands", 16_000, WORDS, "speech_commands", SECOND),
    "digits": Known("the Free Spoken Digit Dataset", 8_000, DIGITS, "fsdd", None),
}


class Config(TaskConfig):
    dataset: Literal["commands", "digits"] = Field(
        "commands", description="Speech Commands at 16 kHz, or the Free Spoken Digit Dataset at 8 kHz"
    )
    words: Literal["all", "ten"] | tuple[str, ...] = Field(
        "all",
        description="all that are found, in the order of the S4 code (35 when complete; digits: 10); the ten of SC10; "
        "or a list of words, which are classes 0, 1, … in this order",
    )
    split: Literal["official", "hash", "random"] = Field(
        "official",
        description="official: the published lists (or files) of validation and test clips; hash: the published rule, "
        "by a hash of the speaker; random: 70/15/15 % of the clips of every class at random, speakers shared "
        "(published for ten words)",
    )
    short: Literal["pad", "drop", "keep"] | None = Field(
        None,
        description="clips of another length: pad: zeros at the end (longer ones are cut); drop: left out (published "
        "for ten words); keep: their own length, padding masked; null: pad for commands, keep for digits",
    )
    length: int | None = Field(
        None,
        ge=16,
        le=MAX_SAMPLES,
        description="samples of a clip before decimation; null: 16,000 for commands, the longest clip's for digits",
    )
    scaling: Literal["global", "per_step", "none"] = Field(
        "global",
        description="global: one mean and standard deviation of the training clips; per_step: those of every time "
        "step, after division by 2^30 (as published); none: samples in [-1, 1)",
    )
    decimate: int = Field(
        1, ge=1, le=64, description="keep every k-th sample, without a filter; the interval is multiplied by k"
    )
    dropped: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of samples removed at random from every clip, the same ones in every epoch; a second "
        "channel says which remain",
    )

    def smoke_sizes(self) -> dict[str, int]:
        return {} if self.uneven == "drop" else {"length": 1024}  # drop: clips of this length alone

    @property
    def uneven(self) -> Literal["pad", "drop", "keep"]:
        """`short`, or its default for the data set."""
        return self.short or ("pad" if self.dataset == "commands" else "keep")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        known = KNOWN[self.dataset].words
        if isinstance(self.words, tuple):
            for word in self.words:
                if word not in known:
                    raise ValueError(f"words has {word!r}, which is none of {', '.join(known)}")
            if len(set(self.words)) != len(self.words) or len(self.words) < 2:
                raise ValueError("words is a list of two or more different words")
        if self.dataset == "digits" and self.words == "ten":
            raise ValueError("words: ten is for commands; all ten digits are words: all")
        if self.dataset == "digits" and self.split == "hash":
            raise ValueError("split: hash is for commands; names of the digits' files are not hashed")
        if self.scaling == "per_step" and self.uneven == "keep":
            raise ValueError("scaling: per_step needs clips of one length: short: pad or drop")
        if self.uneven == "drop" and self.length is None and self.dataset == "digits":
            raise ValueError("short: drop needs a length: clips of digits have no common one")
        return self


class Clip(NamedTuple):
    name: str  # unique
    word: str
    part: str | None  # None: not known


class Clips(NamedTuple):
    """The clips of chosen words, in the order of their classes and names, and their samples, (L,) int16 each."""

    words: list[str]
    about: list[Clip]
    samples: list[NDArray[np.int16]]

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.array([self.words.index(clip.word) for clip in self.about], np.int64)


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, of the first kind found, in the data folder or a sub-folder of it.

    Commands, sub-folder speech_commands: the unpacked archive (or speech_commands_v0.02/, or v0.01/) with a folder per
    word and two lists; speech_commands_v0.02.tar.gz (or v0.01), which is not unpacked. Digits, sub-folder fsdd:
    recordings/ (or free-spoken-digit-dataset/recordings/). Then Parquet files (also in speech_commands_3 and the like):
    train, validation and test, with columns audio (lists of 16-bit samples, or WAV files as bytes, alone or as the
    hub's struct), word, perhaps file (<word>/<name>.wav, which the hash needs) and sampling_rate; or, for digits, train
    and test with audio, label, speaker, index. Preparing all words takes 7 GB in the folder for temporary files.
    """
    folder = _folder(config, raw)
    if folder is not None:
        if config.dataset == "digits":
            return [folder]
        lists = [folder / name for name in LISTS if (folder / name).exists()]
        return [*lists, *(folder / word for word in _words(config) if (folder / word).exists())]
    archive = _archive(config, raw)
    return [archive] if archive else [path for paths in _parquet(config, raw).values() for path in paths]


def fetch(config: Config, raw: Path) -> None:
    """Download the official archive, unless there already is something to read."""
    if sources(config, raw):
        return
    if config.dataset == "digits":
        raise ValueError(
            f"the spoken digits have no archive of a known checksum: put a copy of {FSDD} into "
            f"{raw / KNOWN['digits'].folder}"
        )
    download(ARCHIVE, raw / KNOWN["commands"].folder)


def load(config: Config, raw: Path) -> TaskData:
    known = KNOWN[config.dataset]
    clips, notes = _read(config, raw)
    length = config.length or known.length or max(map(len, clips.samples))
    if config.uneven == "drop":
        kept = [i for i, samples in enumerate(clips.samples) if len(samples) == length]
        clips = Clips(clips.words, [clips.about[i] for i in kept], [clips.samples[i] for i in kept])
    rows = _parted(clips, config.split)
    for part, chosen in rows.items():
        if not len(chosen):
            raise ValueError(f"{known.title}: no clips are left for the {part} split")
    there = _remaining(clips, length, config) if config.dropped else None
    scale = _scale(clips, rows["train"], length, there, config)
    train, val, test = (_split(clips, rows[part], length, there, scale, config) for part in PARTS)
    return TaskData(
        scale.input,
        Classes(len(clips.words)),
        train,
        val,
        test,
        interval=config.decimate / known.rate,
        notes=(*notes, *_notes(config, clips, rows)),
        classes=tuple(clips.words),
    )


def class_names(config: Config) -> list[str]:
    return _words(config)


def _notes(config: Config, clips: Clips, rows: Rows) -> Iterator[str]:
    sizes = tuple(len(rows[part]) for part in PARTS)
    if config.dataset == "digits":
        yield "spoken digits (FSDD), not Speech Commands: no published number refers to them"
        yield "the speakers of validation and test speak in training too"
    elif clips.words not in (WORDS, TEN):
        words = ", ".join(clips.words) if len(clips.words) <= 10 else f"{len(clips.words)} words"
        yield f"{words}, not the 35 or 10 words of Speech Commands that published numbers refer to"
    elif clips.words == WORDS and config.split != "random" and config.uneven != "drop" and sizes != PUBLISHED:
        counts = ", ".join(f"{n:,}" for n in sizes)
        yield f"{counts} clips, not the {', '.join(f'{n:,}' for n in PUBLISHED)} of version 0.02"
    if config.dataset == "commands" and config.split == "random":
        yield "clips are split at random, so speakers of validation and test speak in training too"
    if config.decimate > 1:
        yield f"one sample in {config.decimate} is kept, without a filter"
    if config.dropped:
        yield f"{100 * config.dropped:g} % of the samples of every clip are removed at random"


# ----------------------------------------------------------------------------------------------------- splits


def hashed_part(name: str) -> str:
    """The split of a clip <speaker>_nohash_<number>.wav by the published rule: a tenth is val, a tenth is test."""
    speaker = name.rpartition("/")[2].partition("_nohash_")[0]
    number = int(hashlib.sha1(speaker.encode()).hexdigest(), 16) % (HASHED + 1)
    percent = number * (100.0 / HASHED)
    return "val" if percent < 10 else "test" if percent < 20 else "train"


def _parted(clips: Clips, rule: str) -> Rows:
    """Rows of each split, in a seeded order: by class they would be in the data set's."""
    if rule == "random":
        if not clips.about or np.bincount(clips.labels, minlength=len(clips.words)).min() < 7:
            raise ValueError("split: random needs seven clips or more of every word")
        return dict(zip(PARTS, published_thirds(len(clips.about), clips.labels), strict=True))
    parts = np.array([hashed_part(c.name) if rule == "hash" else c.part for c in clips.about])
    members = {part: np.flatnonzero(parts == part) for part in PARTS}
    return {part: rows[generator(SEED, "speech", part).permutation(len(rows))] for part, rows in members.items()}


# ---------------------------------------------------------------------------------------------------- samples


class Scale(NamedTuple):
    """How samples are stored and shown."""

    input: Values
    change: Callable[[NDArray[np.int16]], NDArray[Any]] = np.asarray  # of a whole clip, before decimation
    dtype: Any = np.int16


Remaining = NDArray[np.bool_] | None  # (clips, longest): which samples are left; None: all


def _shown(clip: NDArray[np.int16], length: int, config: Config) -> int:
    """Samples of a clip before decimation, zeros at its end included."""
    return min(len(clip), length) if config.uneven == "keep" else length


def _remaining(clips: Clips, length: int, config: Config) -> NDArray[np.bool_]:
    permutation = torch_permutations(DROPPING)
    there = allocate((len(clips.samples), length), np.bool_)
    there[:] = True
    for row, clip in zip(there, clips.samples, strict=True):
        n = _shown(clip, length, config)
        row[permutation(n)[: math.floor(n * config.dropped + 1e-9)]] = False
    return there


def _scale(clips: Clips, train: NDArray[np.int64], length: int, there: Remaining, config: Config) -> Scale:
    """From whole training clips, or what is left of them; sums are exact."""
    if config.scaling == "none":
        return _stored((0.0,), (float(FULL_SCALE),), config)
    sums, squares, counts = (np.zeros(length, np.int64) for _ in range(3))  # of each time step
    for i in train.tolist():
        wide = clips.samples[i][:length].astype(np.int64)
        if there is not None:
            wide *= there[i, : len(wide)]
        sums[: len(wide)] += wide
        squares[: len(wide)] += wide * wide
        n = _shown(clips.samples[i], length, config)
        counts[:n] += 1 if there is None else there[i, :n]
    if config.scaling == "global":
        total, square, count = (sum(each.tolist()) for each in (sums, squares, counts))
        variance = (square * count - total * total) / max(1, count * count)
        if variance <= 0:
            raise ValueError("the training clips are silent: all samples are equal")
        return _stored((total / count,), (variance**0.5,), config)
    if counts.min() < 2:
        left = ", each step's sample left in two" if there is not None else ""
        raise ValueError(f"scaling: per_step needs two training clips or more{left}")
    unit = float(FULL_SCALE) ** 2
    means = sums / counts
    deviations = np.sqrt(np.maximum(squares - sums * means, 0) / (counts - 1)) / unit

    def standardised(clip: NDArray[np.int16]) -> NDArray[np.float32]:
        return ((clip / unit - means / unit) / (deviations + 1e-5)).astype(np.float32)

    return Scale(Values(2 if config.dropped else 1), standardised, np.float32)


def _stored(mean: tuple[float], std: tuple[float], config: Config) -> Scale:
    """Samples as they are, and scaled when they are shown; beside removed ones, which are zero then, scaled at once."""
    if not config.dropped:
        return Scale(Values(1, mean, std))
    return Scale(Values(2), lambda clip: ((clip - mean[0]) / std[0]).astype(np.float32), np.float32)


def _split(clips: Clips, rows: NDArray[np.int64], length: int, there: Remaining, scale: Scale, config: Config) -> Split:
    every = config.decimate
    lengths = np.array([-(-_shown(clips.samples[i], length, config) // every) for i in rows])
    stops = np.cumsum(lengths)
    starts = stops - lengths
    values = allocate((int(stops[-1]), scale.input.channels), scale.dtype)
    for i, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        clip, n = clips.samples[i][:length], _shown(clips.samples[i], length, config)
        if len(clip) < n:
            clip = np.pad(clip, (0, n - len(clip)))
        values[start:stop, 0] = scale.change(clip)[::every]
        if there is not None:
            left = there[i, :n:every]
            values[start:stop, 0] *= left
            values[start:stop, 1] = left
    return Split(values, starts, stops, clips.labels[rows], np.array([clips.about[i].name for i in rows]))


# ------------------------------------------------------------------------------------------------------ files


def _words(config: Config) -> list[str]:
    if isinstance(config.words, tuple):
        return list(config.words)
    return list(TEN if config.words == "ten" else KNOWN[config.dataset].words)


def _folder(config: Config, raw: Path) -> Path | None:
    """Of the unpacked official files. In the data folder itself, a folder `house` or `recordings` may be anything."""
    folders = data_folders(raw, KNOWN[config.dataset].folder)
    if config.dataset == "digits":
        inside = [place / "free-spoken-digit-dataset/recordings" for place in folders]
        inside += [place / "recordings" for place in folders if place.name in ("fsdd", "free-spoken-digit-dataset")]
        return next((folder for folder in inside if folder.is_dir()), None)
    names = ("speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02", "speech_commands_v0.01", "")
    for folder in (place / name for place in folders for name in names):
        marks = LISTS if folder == raw else (*LISTS, *WORDS)
        if any((folder / mark).exists() for mark in marks):
            return folder
    return None


def _archive(config: Config, raw: Path) -> Path | None:
    if config.dataset == "digits":
        return None
    folders = data_folders(raw, KNOWN["commands"].folder)
    return find_file(folders, ARCHIVE.name) or find_file(folders, OLDER.name)


def _parquet(config: Config, raw: Path) -> dict[str, list[Path]]:
    folders = data_folders(raw, KNOWN[config.dataset].folder)
    if config.dataset == "commands" and folders:  # a part of the words, such as speech_commands_3
        folders = [*folders[:-1], *sorted(path for path in raw.glob("speech_commands_*") if path.is_dir()), raw]
    folder = next((place for place in folders if parquet_files([place], "train")), None)
    if folder is None:
        return {}
    names = {"train": "train", "val": "validation", "test": "test"}
    return {part: parquet_files([folder], name) for part, name in names.items() if parquet_files([folder], name)}


Sounds = Iterator[tuple[Clip, NDArray[np.int16]]]


def _read(config: Config, raw: Path) -> tuple[Clips, list[str]]:
    """The chosen words' clips, and notes about them."""
    chosen, notes = _words(config), list[str]()
    folder, archive, parquet = _folder(config, raw), _archive(config, raw), _parquet(config, raw)
    lists = dict[str, bytes]()  # of validation and test clips; an archive may have them after the clips
    if folder is not None:
        where = str(folder)
        sounds = _digit_files(folder) if config.dataset == "digits" else _word_files(_unpacked(config, folder), lists)
    elif archive is not None:
        where, older = str(archive), archive.name == OLDER.name
        verify(archive, (OLDER if older else ARCHIVE).checksum)
        if older:
            notes.append("Speech Commands version 0.01: published numbers are for version 0.02")
        sounds = _word_files(_archived(config, archive), lists)
    elif parquet:
        where = str(next(iter(parquet.values()))[0].parent)
        sounds = _parquet_rows(config, parquet)
    elif config.dataset == "digits":
        files = ["fsdd/recordings/", "fsdd/train.parquet and test.parquet"]
        raise data_not_found("FSDD", raw, files, origin=FSDD)
    else:
        files = ["speech_commands/ with a folder a word", ARCHIVE.name, "speech_commands/train.parquet, …"]
        raise data_not_found("Speech Commands", raw, files, "spt data prepare speech")
    about, reel = list[Clip](), Reel(np.int16)
    for clip, samples in sounds:
        if clip.word in chosen:
            about.append(clip)
            reel.add(samples)
    present = {clip.word for clip in about}
    if config.split == "official" and config.dataset == "commands" and (folder or archive):
        unpacked = {word for word in chosen if folder and (folder / word).is_dir()}
        about = _with_parts(about, lists, present | unpacked, where)
    absent = [word for word in chosen if word not in present]
    if absent and config.words != "all":
        raise ValueError(f"{where} has no clips of {', '.join(absent)}")
    words = [word for word in chosen if word in present]
    if len(words) < 2:
        raise ValueError(f"{where} has clips of {' and '.join(words) or 'no known word'}; two words or more are needed")
    order = sorted(range(len(about)), key=lambda i: (words.index(about[i].word), about[i].name))
    for i, j in itertools.pairwise(order):
        if about[i].name == about[j].name:
            raise ValueError(f"{where}: clip {about[i].name} occurs twice")
    if config.split == "hash" and not all(CLIP.fullmatch(f"{c.name}.wav".rpartition("/")[2]) for c in about):
        raise ValueError(
            f"{where}: split: hash needs names <speaker>_nohash_<number>.wav, in column file of a Parquet copy"
        )
    clips = reel.pieces()
    return Clips(words, [about[i] for i in order], [clips[i] for i in order]), notes


def _unpacked(config: Config, folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, place for messages and content of the lists of splits and of the chosen words' clips."""
    for name in LISTS if config.split == "official" else ():
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: get it, or use split: hash (the same rule)")
        yield name, str(folder / name), read_unzipped(folder / name, 2**24)
    for word in sorted(word for word in _words(config) if (folder / word).is_dir()):
        for path in sorted((folder / word).iterdir()):
            if CLIP.fullmatch(path.name):
                yield f"{word}/{path.name}", str(path), read_unzipped(path, MAX_FILE)


def _archived(config: Config, archive: Path) -> Iterator[tuple[str, str, bytes]]:
    """The same from an archive, as a stream."""
    words = set(_words(config))

    def select(name: str) -> bool:
        word, _, clip = name.partition("/")
        return name in LISTS or (word in words and CLIP.fullmatch(clip) is not None)

    with reading_archive(archive):
        for name, file, size in open_members(archive, select, UNPACKED):
            if size > (2**24 if name in LISTS else MAX_FILE):
                raise ValueError(f"{archive}: its member {name} has {size:,} bytes, more than such a file can have")
            content = file.read()
            if len(content) != size:
                raise EOFError
            yield name, f"{archive}, member {name}", content


def _word_files(files: Iterable[tuple[str, str, bytes]], lists: dict[str, bytes]) -> Sounds:
    """Clips, whose splits are not known yet; what is no clip goes into `lists`."""
    for name, where, content in files:
        if name in LISTS:
            lists[name] = content
        else:
            clip = Clip(name.removesuffix(".wav"), name.partition("/")[0], None)
            yield clip, _clip(content, where, KNOWN["commands"])


def _with_parts(about: list[Clip], lists: dict[str, bytes], words: set[str], where: str) -> list[Clip]:
    """The clips with the splits that the lists say.

    Raises ValueError where a list is missing or odd, or has a clip of these words that is missing.
    """
    listed = dict[str, str]()
    for name, part in LISTS.items():
        if name not in lists:
            raise ValueError(f"{where} has no member {name}")
        for number, line in enumerate(lists[name].decode("utf-8", "replace").splitlines(), 1):
            word, _, clip = line.strip().partition("/")
            if not CLIP.fullmatch(clip):
                raise ValueError(f"{where}: {name}, line {number} is {line!r:.60}; <word>/<name>.wav is expected")
            if f"{word}/{clip}" in listed:
                raise ValueError(f"{where}: {word}/{clip} is listed twice")
            listed[f"{word}/{clip}"] = part
    parted = [clip._replace(part=listed.pop(f"{clip.name}.wav", "train")) for clip in about]
    left = [name for name in listed if name.partition("/")[0] in words]
    if left:
        raise ValueError(f"{where}: {len(left):,} listed clips are not there, such as {left[0]}; get it again")
    return parted


def _digit_files(folder: Path) -> Sounds:
    for path in sorted(folder.iterdir()):
        if match := DIGIT.fullmatch(path.name):
            clip = _digit(int(match[1]), match[2], int(match[3]))
            yield clip, _clip(read_unzipped(path, MAX_FILE), str(path), KNOWN["digits"])


def _digit(digit: int, speaker: str, index: int) -> Clip:
    part = "test" if index < 5 else "val" if index < 10 else "train"
    return Clip(f"{digit}_{speaker}_{index}", DIGITS[digit], part)


def _parquet_rows(config: Config, files: dict[str, list[Path]]) -> Sounds:
    known, digits = KNOWN[config.dataset], config.dataset == "digits"
    if not digits and config.split == "official" and len(files) < len(PARTS):
        raise FileNotFoundError(
            f"{files['train'][0]} is there, but not validation.parquet and test.parquet beside it; split: hash or "
            "random needs train.parquet alone"
        )
    columns = [(name,) for name in ("audio", *(("label", "speaker", "index") if digits else ("word",)))]
    for part, paths in files.items():
        row = 0
        for where, table in read_batches(paths, columns, ("file", "sampling_rate"), numbers=MAX_SAMPLES):
            clips = _sounds(table.pop("audio"), where, known)
            rows = zip(*(column.to_pylist() for column in table.values()), strict=True)
            for values, samples in zip(rows, clips, strict=True):
                cells = dict(zip(table, values, strict=True))
                if cells.get("sampling_rate", known.rate) != known.rate:
                    raise ValueError(
                        f"{where}: the sampling rate is {cells['sampling_rate']}; {known.rate:,} is expected"
                    )
                yield (_digit_row(cells, where) if digits else _word_row(cells, where, part, row)), samples
                row += 1


def _digit_row(cells: dict[str, Any], where: str) -> Clip:
    label, index = cells["label"], cells["index"]
    if not (isinstance(label, int) and 0 <= label < 10 and isinstance(index, int) and index >= 0):
        raise ValueError(
            f"{where}: the label is {label!r} and the index {index!r}; 0 to 9, and 0 or more, are expected"
        )
    return _digit(label, str(cells["speaker"]), index)


def _word_row(cells: dict[str, Any], where: str, part: str, row: int) -> Clip:
    word, file = cells["word"], cells.get("file")
    if word not in WORDS:
        raise ValueError(f"{where}: the word is {word!r:.40}, which is none of the 35 of Speech Commands")
    if file is not None and not (isinstance(file, str) and file.endswith(".wav")):
        raise ValueError(f"{where}: the file is {file!r:.60}; <word>/<name>.wav is expected")
    name = file.rpartition("/")[2].removesuffix(".wav") if file else f"{part}-{row}"
    return Clip(f"{word}/{name}", word, part)


def _sounds(column: Any, where: str, known: Known) -> list[NDArray[np.int16]]:
    """Clips of an Arrow column: lists of numbers, or WAV files as bytes, alone or in a struct."""
    import pyarrow as pa

    if column.null_count:
        raise ValueError(f"{where}: a clip is missing")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        flat = column.flatten()
        if not pa.types.is_integer(flat.type) or flat.null_count:
            raise ValueError(f"{where}: audio holds {flat.type}; 16-bit samples without gaps are expected")
        numbers = flat.to_numpy(zero_copy_only=False)
        if len(numbers) and not -FULL_SCALE <= int(numbers.min()) <= int(numbers.max()) < FULL_SCALE:
            raise ValueError(f"{where}: audio has samples beyond 16 bits")
        clips = np.split(numbers.astype(np.int16), np.cumsum(column.value_lengths().to_numpy())[:-1])
    else:
        clips = []
        for cell in column.to_pylist():
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if not isinstance(content, bytes):
                raise ValueError(
                    f"{where}: audio is {column.type}; lists of 16-bit samples, or WAV files as bytes, are expected"
                )
            clips.append(_clip(content, where, known))
    if not all(map(len, clips)):
        raise ValueError(f"{where}: a clip has no samples")
    return clips


def _clip(content: bytes, where: str, known: Known) -> NDArray[np.int16]:
    samples, rate = read_wav(content, where, MAX_SAMPLES)
    if samples.dtype != np.int16 or samples.shape[1] != 1 or rate != known.rate:
        raise ValueError(
            f"{where} has {samples.shape[1]} channels of {samples.dtype} at {rate:,} samples a second; one of int16 at "
            f"{known.rate:,} is expected"
        )
    return samples[:, 0]
