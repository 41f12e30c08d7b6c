"""Heart rate, breathing rate or blood oxygen from 32 s of pulse wave and ECG (BIDMC): 4,000 steps.

Windows of `length` samples at 125 Hz with two channels (ppg, ecg lead II) start every `stride` seconds in each of 53
recordings of 8 minutes; windows overlap, and the samples they share are stored once. The target is the mean of the
monitor's numerics, one per second, at the seconds t with start <= t < start + length / 125; `missing` says what happens
to windows where some were not measured. The default split is by patient: the 53 recordings are of 46 people, and
overlapping windows are never in two splits. The published numbers refer to an archive of such windows (7,949, split at
random: overlapping windows are in both training and test, so errors are tiny): `split: windows` does the same to our
windows, and `source: archive` reads the archive's files themselves.

Sources: Pimentel et al., IEEE TBME 64(8), 2016 (physionet.org/content/bidmc/1.0.0, ODC-BY); Tan et al., "Time series
extrinsic regression", DMKD 2021 (zenodo.org, records 4001463, 4001456, 4001464). Letters: L steps, C = 2 channels.
See `sources` for the files.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import generator
from spt.tasks.base import Reals, Split, TaskConfig, TaskData, Values
from spt.tasks.files import (
    data_folders,
    data_not_found,
    find_file,
    published_thirds,
    read_batches,
    read_unzipped,
)
from spt.tasks.parallel import allocate

RATE = 125  # samples a second
CHANNELS = ("ppg", "ecg")
RECORDINGS = 53
SAMPLES, SECONDS = 60_001, 481  # of a recording: both ends of its 480 s are there
MAX_SECONDS = 10**5  # of a recording
WINDOW = 4_000  # samples of the archive's
PHYSIONET = "https://physionet.org/content/bidmc/1.0.0/"
ARCHIVED = {"rr": ("BIDMC32RR", 4001463), "hr": ("BIDMC32HR", 4001456), "spo2": ("BIDMC32SpO2", 4001464)}
ONE_PATIENT = ((6, 7, 8, 9), (20, 21, 22, 23), (38, 39))  # recordings; every other one is of a patient of its own
COLUMNS = {"ppg": "PLETH", "ecg": "II", "hr": "HR", "rr": "RESP", "spo2": "SpO2"}  # of PhysioNet's csv files
SHARE = 0.15  # of the recordings, for validation and for test
MAX_FILE = 2**30  # bytes of an archive's file, unpacked: the published ones have some 5e8
MAX_LINE = 2**22


class Config(TaskConfig):
    target: Literal["hr", "rr", "spo2"] = Field(
        "hr", description="heart rate or breaths per minute; oxygen saturation in per cent"
    )
    source: Literal["raw", "archive"] = Field(
        "raw", description="windows cut from the recordings, or those of the published archive (BIDMC32…_TRAIN.ts)"
    )
    split: Literal["subjects", "windows"] = Field(
        "subjects",
        description="subjects: 15 % of the recordings for validation, 15 % for test, no patient in two splits; "
        "windows: 70/15/15 % of the windows, which overlap, at random as published (seeds 0 and 1)",
    )
    split_seed: int = Field(42, ge=0, description="raw, by subjects: seed of the draw of patients")
    length: int = Field(WINDOW, ge=RATE, le=SAMPLES - 1, multiple_of=RATE, description="raw: samples in a window")
    stride: int = Field(3, ge=1, le=SECONDS, description="raw: seconds from one window's start to the next one's")
    missing: Literal["any", "all"] = Field(
        "any",
        description="raw: any leaves out a window if one of its numerics was not measured; all only if none was, and "
        "takes the mean over those that were",
    )
    scaling: Literal["unit", "standard", "none"] = Field(
        "unit",
        description="unit: a channel whose training values leave [-1, 1] is mapped onto it (both do: a few artefacts "
        "of ppg reach 4, its usual range is 0 to 1); standard: every channel to mean 0 and standard deviation 1; none: "
        "as it is (as published)",
    )

    def smoke_sizes(self) -> dict[str, int]:
        return {"length": 250} if self.source == "raw" else {}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.source == "archive" and self.split == "subjects":
            raise ValueError("source: archive says nothing of patients; use split: windows with it")
        return self


class Recording(NamedTuple):
    number: int
    patient: int  # the number of the first recording of the same patient
    signals: NDArray[np.float32]  # (samples, C)
    numerics: NDArray[np.float32]  # (seconds,), NaN where not measured


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, in the data folder or its sub-folder bidmc.

    Raw: bidmc_csv/ as on PhysioNet (or in bidmc-ppg-and-respiration-dataset-1.0.0/), with bidmc_01_Signals.csv,
    bidmc_01_Numerics.csv and so on; or recordings.parquet with columns record, subject, ppg, ecg, and hr, rr or spo2.
    Archive: BIDMC32HR_TRAIN.ts and BIDMC32HR_TEST.ts (RR, SpO2), also .gz.
    """
    folders = data_folders(raw, "bidmc")
    if config.source == "archive":
        return _archive(config, folders)
    folder = _folder(folders)
    if folder is not None:
        return [path for number in _numbers(folder) for path in _pair(folder, number)]
    parquet = find_file(folders, "recordings.parquet")
    return [] if parquet is None else [parquet]


def fetch(config: Config, raw: Path) -> None:
    """Nothing is downloaded, as no checksums are published: without the files, an error says where to get them."""
    if sources(config, raw):
        return
    if config.source == "archive":
        name, _ = ARCHIVED[config.target]
        what = f"{name}_TRAIN.ts and {name}_TEST.ts from {_origin(config)}"
    else:
        what = f"the folder bidmc_csv from {PHYSIONET}"
    raise ValueError(f"BIDMC is not downloaded, as no checksum is known: put {what} into {raw / 'bidmc'}")


def _origin(config: Config) -> str:
    return f"https://zenodo.org/records/{ARCHIVED[config.target][1]}"


def load(config: Config, raw: Path) -> TaskData:
    folders = data_folders(raw, "bidmc")
    if config.source == "archive":
        paths = _archive(config, folders)
        name = ARCHIVED[config.target][0]
        if len(paths) < 2:
            files = [f"bidmc/{name}_TRAIN.ts and {name}_TEST.ts"]
            raise data_not_found("BIDMC's archive", raw, files, origin=_origin(config))
        splits, notes = _drawn(_read_archive(paths)), [LEAK]
    else:
        recordings = _read(config, folders, raw)
        notes = []
        if len(recordings) != RECORDINGS:
            notes.append(f"{len(recordings)} recordings, not the {RECORDINGS} published")
        if config.split == "subjects":
            splits = _by_patient(recordings, config)
            notes.append("split by patient: published numbers refer to windows drawn at random, which overlap")
        else:
            splits = _drawn(_cut(recordings, config))
            notes += [LEAK, "windows cut from the recordings, not those of the archive that published numbers refer to"]
    train, val, test = (splits[part] for part in ("train", "val", "test"))
    return TaskData(_scale(train, config.scaling), Reals(1), train, val, test, interval=1 / RATE, notes=tuple(notes))


LEAK = "windows of validation and test overlap with windows of training (as published): scores are far too good"


def _by_patient(recordings: list[Recording], config: Config) -> dict[str, Split]:
    splits = {}
    for part, chosen in _patients(recordings, config.split_seed).items():
        windows = _cut(chosen, config)
        order = generator(config.split_seed, "bidmc", part).permutation(len(windows))
        splits[part] = windows.take(order)  # shuffled: the first rows are not all of one patient
    return splits


def _drawn(windows: Split) -> dict[str, Split]:
    if len(windows) < 7:
        raise ValueError(f"{len(windows)} windows cannot be split 70/15/15")
    parts = zip(("train", "val", "test"), published_thirds(len(windows)), strict=True)
    return {part: windows.take(rows) for part, rows in parts}


def _scale(train: Split, kind: Literal["unit", "standard", "none"]) -> Values:
    """Statistics of the steps in training windows, each counted once."""
    if kind == "none":
        return Values(len(CHANNELS))
    changes = np.zeros(len(train.values) + 1, np.int64)  # in how many windows overlap
    np.add.at(changes, train.starts, 1)
    np.add.at(changes, train.stops, -1)
    steps = train.values[np.cumsum(changes)[:-1] > 0].astype(np.float64)
    if kind == "standard":
        mean, std = steps.mean(0), steps.std(0)
    else:
        low, high = steps.min(0), steps.max(0)
        outside = (low < -1) | (high > 1)
        mean, std = np.where(outside, (low + high) / 2, 0.0), np.where(outside, (high - low) / 2, 1.0)
    if not (std > 0).all():
        raise ValueError(f"{CHANNELS[int(np.argmin(std))]} is constant in all training windows")
    return Values(len(CHANNELS), tuple(mean.tolist()), tuple(std.tolist()))


# ---------------------------------------------------------------------------------------------------- windows


def _cut(recordings: Sequence[Recording], config: Config) -> Split:
    """All windows of some recordings, whose signals are stored end to end; they share steps."""
    total = sum(len(recording.signals) for recording in recordings)
    values = allocate((total, len(CHANNELS)), np.float32)
    starts, targets, ids = list[int](), list[float](), list[str]()
    place = 0
    for recording in recordings:
        values[place : place + len(recording.signals)] = recording.signals
        last = (len(recording.signals) - config.length) // RATE
        for second in range(0, last + 1, config.stride):
            numerics = recording.numerics[second : second + config.length // RATE].astype(np.float64)
            measured = np.isfinite(numerics)
            if measured.all() or (config.missing == "all" and measured.any()):
                starts.append(place + second * RATE)
                targets.append(numerics[measured].mean())
                ids.append(f"{recording.number:02d}-{second}")
        place += len(recording.signals)
    if not starts:
        numbers = ", ".join(str(recording.number) for recording in recordings)
        raise ValueError(f"no window of {config.length:,} samples with {config.target} lies in recordings {numbers}")
    begins = np.array(starts)
    return Split(values, begins, begins + config.length, np.array(targets)[:, None], np.array(ids))


def _patients(recordings: Sequence[Recording], seed: int) -> dict[str, list[Recording]]:
    """By split: patients, in a seeded order, go to test if they fit, else to validation, else to training."""
    patients = sorted({recording.patient for recording in recordings})
    if len(patients) < 3:
        raise ValueError(f"{len(patients)} patients cannot be split; three or more are needed")
    space = {part: max(1, round(SHARE * len(recordings))) for part in ("test", "val")}
    splits: dict[str, list[Recording]] = {"train": [], "val": [], "test": []}
    for patient in generator(seed, "bidmc", "patients").permutation(np.array(patients)).tolist():
        theirs = [recording for recording in recordings if recording.patient == patient]
        part = next((part for part, left in space.items() if len(theirs) <= left), "train")
        if part != "train":
            space[part] -= len(theirs)
        splits[part] += theirs
    if not all(splits.values()):
        raise ValueError("the patients have too many recordings each to be split 70/15/15")
    return {part: sorted(theirs, key=lambda recording: recording.number) for part, theirs in splits.items()}


# ------------------------------------------------------------------------------------------------- recordings


def _read(config: Config, folders: Sequence[Path], raw: Path) -> list[Recording]:
    folder, parquet = _folder(folders), find_file(folders, "recordings.parquet")
    if folder is not None:
        recordings = [_from_csv(folder, number, config.target) for number in _numbers(folder)]
    elif parquet is not None:
        recordings = list(_from_parquet(parquet, config.target))
    else:
        files = ["bidmc/bidmc_csv/", "bidmc/recordings.parquet"]
        raise data_not_found("BIDMC", raw, files, origin=PHYSIONET)
    where = folder or parquet
    if len({recording.number for recording in recordings}) < len(recordings):
        raise ValueError(f"{where} has a recording twice")
    for recording in recordings:
        if len(recording.signals) != RATE * (len(recording.numerics) - 1) + 1:
            raise ValueError(
                f"{where}: recording {recording.number} has {len(recording.signals):,} samples at {RATE} Hz and "
                f"{len(recording.numerics)} numerics, one a second; {SAMPLES:,} and {SECONDS} are expected"
            )
        if not np.isfinite(recording.signals).all():
            raise ValueError(f"{where}: recording {recording.number} has samples that are not finite numbers")
        if np.isinf(recording.numerics).any():
            raise ValueError(f"{where}: recording {recording.number} has an infinite {config.target}")
    return sorted(recordings)


def _folder(parents: Sequence[Path]) -> Path | None:
    names = ("bidmc_csv", "bidmc-ppg-and-respiration-dataset-1.0.0/bidmc_csv")
    folders = [place / name for place in parents for name in names] + list(parents)
    return next((folder for folder in folders if folder.is_dir() and _numbers(folder)), None)


def _numbers(folder: Path) -> list[int]:
    matches = (re.fullmatch(r"bidmc_(\d\d)_Signals\.csv", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _pair(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"bidmc_{number:02d}_Signals.csv", folder / f"bidmc_{number:02d}_Numerics.csv"


def _from_csv(folder: Path, number: int, target: str) -> Recording:
    """Columns are found by name, as their order differs from file to file. Empty fields were not measured."""
    signals, numerics = _pair(folder, number)
    if not numerics.is_file():
        raise FileNotFoundError(f"{numerics} is missing; {signals.name} is there")
    patient = next((group[0] for group in ONE_PATIENT if number in group), number)
    return Recording(
        number,
        patient,
        _table(signals, [COLUMNS[channel] for channel in CHANNELS], RATE),
        _table(numerics, [COLUMNS[target]], 1)[:, 0],
    )


def _lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line that is not empty."""
    rows = csv.reader(io.StringIO(text))
    try:
        yield from ((rows.line_num, row) for row in rows if row)
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from None


def _table(path: Path, names: Sequence[str], rate: int) -> NDArray[np.float32]:
    """(rows, names) numbers of a csv file with a header and rows at equal times; NaN where a field is empty or NaN."""
    text = read_unzipped(path, 2**27).decode("utf-8", "replace")
    rows = _lines(path, text)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    absent = [name for name in ("Time [s]", *names) if header.count(name) != 1]
    if absent:
        raise ValueError(f"{path} has no column {absent[0]!r}, or more than one; it has {', '.join(header) or 'none'}")
    places = [header.index(name) for name in ("Time [s]", *names)]
    table = np.empty((text.count("\n") + 1, len(names)), np.float32)
    count = 0
    for line, row in rows:
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} fields")
            time, *numbers = (float(row[place].strip() or "nan") for place in places)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}; {len(header)} numbers are expected") from None
        if abs(time * rate - count) > 0.5:  # times are rounded
            raise ValueError(f"{path}, line {line}: the time is {time} s; {count / rate} s is expected")
        table[count] = numbers
        count += 1
    return table[:count]


def _from_parquet(path: Path, target: str) -> Iterator[Recording]:
    names = [("record",), ("subject",), *((channel,) for channel in CHANNELS), (target,)]
    patients: dict[Any, int] = {}
    for where, table in read_batches([path], names, numbers=RATE * MAX_SECONDS, rows=8):
        numbers, subjects = table["record"].to_pylist(), table["subject"].to_pylist()
        columns = [_lists(table[name], f"{where}, column {name}") for name in (*CHANNELS, target)]
        for number, subject, ppg, ecg, numerics in zip(numbers, subjects, *columns, strict=True):
            if not isinstance(number, int) or subject is None:
                raise ValueError(f"{where}: a recording has the number {number!r} and the subject {subject!r}")
            if len(ppg) != len(ecg):
                raise ValueError(f"{where}: recording {number} has {len(ppg):,} samples of ppg, {len(ecg):,} of ecg")
            patient = patients.setdefault(subject, number)
            yield Recording(number, patient, np.stack([ppg, ecg], 1), numerics)


def _lists(column: Any, where: str) -> list[NDArray[np.float32]]:
    """Rows of an Arrow column of lists of numbers; a missing number is NaN."""
    import pyarrow as pa

    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or column.null_count:
        raise ValueError(f"{where} is {kind}, or has rows that are missing; lists of numbers are expected")
    flat = column.flatten()
    if not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
        raise ValueError(f"{where} holds lists of {flat.type}; numbers are expected")
    numbers = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    return np.split(numbers, np.cumsum(column.value_lengths().to_numpy())[:-1])


# ---------------------------------------------------------------------------------------------------- archive


def _archive(config: Config, folders: Sequence[Path]) -> list[Path]:
    name = ARCHIVED[config.target][0]
    files = [f"{name}_{part}.ts" for part in ("TRAIN", "TEST")]
    paths = [find_file(folders, file) or find_file(folders, f"{file}.gz") for file in files]
    return [path for path in paths if path is not None]


def _read_archive(paths: Sequence[Path]) -> Split:
    """All windows of both files, those of training first."""
    contents = [read_unzipped(path, MAX_FILE) for path in paths]
    counts = [sum(1 for _ in _cases(content, path)) for content, path in zip(contents, paths, strict=True)]
    values = allocate((sum(counts), WINDOW, len(CHANNELS)), np.float32)
    targets = np.empty((sum(counts), 1))
    row = 0
    for path, content in zip(paths, contents, strict=True):
        for number, line in _cases(content, path):
            where = f"{path}, line {number:,}"
            *dimensions, target = line.split(b":")
            if len(dimensions) != len(CHANNELS):
                raise ValueError(f"{where} has {len(dimensions)} dimensions; {len(CHANNELS)} are expected")
            for c, dimension in enumerate(dimensions):
                values[row, :, c] = _numbers_of(dimension.split(b","), WINDOW, where)
            targets[row] = _numbers_of([target], 1, where)
            row += 1
    starts = np.arange(row) * WINDOW
    names = [f"{path.name.partition('.')[0]}-{i}" for path, n in zip(paths, counts, strict=True) for i in range(n)]
    return Split(values.reshape(-1, len(CHANNELS)), starts, starts + WINDOW, targets, np.array(names))


def _cases(content: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered data lines of a .ts file, whose header has to be as expected."""
    expected = {"timestamps": "false", "missing": "false", "univariate": "false", "equallength": "true"}
    expected |= {"dimensions": str(len(CHANNELS)), "serieslength": str(WINDOW), "targetlabel": "true"}
    begun = False
    for number, line in enumerate(io.BytesIO(content), 1):
        if len(line) > MAX_LINE:
            raise ValueError(f"{path}, line {number:,} has more than {MAX_LINE:,} bytes; it is not used")
        line = line.strip()
        if not line or (line.startswith(b"#") and not begun):
            continue
        if begun:
            yield number, line
        elif not line.startswith(b"@"):
            raise ValueError(f"{path}, line {number:,}: data come before the line @data")
        else:
            key, _, value = line[1:].decode("utf-8", "replace").lower().partition(" ")
            begun = key == "data"
            if value.strip() != expected.get(key, value.strip()):
                raise ValueError(f"{path}: @{key} is {value.strip()!r:.40}; {expected[key]} is expected")
    if not begun:
        raise ValueError(f"{path} is damaged or no .ts file: it has no line @data")


def _numbers_of(fields: Sequence[bytes], count: int, where: str) -> NDArray[np.float64]:
    if len(fields) != count:
        raise ValueError(f"{where} has a series of {len(fields):,} numbers; {count:,} are expected")
    try:
        numbers = np.array([float(field) for field in fields])
    except ValueError:
        raise ValueError(f"{where} has a field that is no number") from None
    if not np.isfinite(numbers).all():
        raise ValueError(f"{where} has a number that is missing or not finite")
    return numbers
