"""Pathfinder, Path-X (128 pixels) and PathX-256: are two discs at the two ends of one dashed path?

Pixels are read row by row, 1,024, 4,096, 16,384 or 65,536 steps of 256 grey levels. Pictures are made by the published
rules (see tasks/generators/pathfinder.py), each row from the seed, its split and its number alone; or they come from
the Long Range Arena's archive, or from a folder that the official script has written. See `sources` for the files.

Models of the S4 family (S4, S5, DLR, SPT) see (grey / 255 - 0.5) / 0.5, those of the Long Range Arena see tokens
0 … 255; both mean "hard" (paths of 14 dashes) by Pathfinder.
"""

import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens, Values, row_ids
from spt.tasks.files import (
    LRA_ADDRESS,
    LRA_ARCHIVE,
    LRA_BYTES,
    LRA_FOLDER,
    check_regular,
    data_folders,
    data_not_found,
    decode_image,
    find_file,
    published_split,
    read_members,
    read_npy,
)
from spt.tasks.generators.pathfinder import generate, pathfinder
from spt.tasks.parallel import allocate, map_chunks

logger = logging.getLogger(__name__)

INDEXABLE = True
FOLDERS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
ARCHIVES = (LRA_ARCHIVE, "lra_release.tar.gz")
ROWS = 200_000  # of an archive: what is published
LISTING = 2**29  # bytes of a metadata file
PICTURE = 2**20  # bytes of a picture file; the largest published ones have some 20,000
FIELDS = 11  # of a metadata line: folder, name, number, label, and what the picture was made with
SEED = 42  # of the S4 family's random split
GENERATING = ("seed", "distractors", "train_size", "val_size", "test_size")  # of no use for released pictures


class Config(TaskConfig):
    resolution: Literal[32, 64, 128, 256] = Field(32, description="pixels per side; 128: Path-X, 256: PathX-256")
    difficulty: Literal["easy", "intermediate", "hard"] = Field(
        "hard", description="paths of 6, 9 or 14 dashes; published numbers are for hard"
    )
    source: Literal["auto", "generated", "released"] = Field(
        "auto",
        description="generated: pictures made here by the published rules; released: those of the Long Range Arena's "
        "archive, or of a folder of the official script; auto: released ones if found, else generated",
    )
    seed: int = Field(0, ge=0, description="generated: seed of all pictures")
    distractors: int | None = Field(
        None,
        ge=0,
        le=100,
        description="generated: short paths tried; null: 20, 22, 35 or 30 (by resolution) divided by their number of "
        "dashes, which for hard gives 5, 5, 8, 7. A public remark has 17 for the released Path-X",
    )
    train_size: int = Field(160_000, ge=1, description="generated: training rows")
    val_size: int = Field(20_000, ge=1, description="generated: validation rows")
    test_size: int = Field(20_000, ge=1, description="generated: test rows")
    split: Literal["s4", "lra"] = Field(
        "s4",
        description="released: s4: 80, 10 and 10 % at random with seed 42 (S4, S5, DLR, SPT); lra: the first 80, next "
        "10 and last 10 % (Long Range Arena). Their test rows are not the same",
    )
    pixels: Literal["values", "tokens"] = Field("values", description="a pixel is a number, or one of 256 tokens")

    def smoke_sizes(self) -> dict[str, int]:
        return {} if self.source == "released" else {"resolution": 32}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.source == "released" and (unused := self.changed(GENERATING)):
            raise ValueError(f"{unused[0]} is for generated pictures; leave it out (max_rows takes fewer rows)")
        if self.source == "generated" and self.changed(("split",)):
            raise ValueError("split is for released pictures, generated ones have splits of their own; leave it out")
        return self

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those that are not at their default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The archive, or the metadata files of a folder; none where pictures are generated.

    Looked for in the data folder and its sub-folder pathfinder: lra_release/lra_release/pathfinder32/, pathfinder32/,
    lra_release/pathfinder32/ (each with curv_contour_length_14/{imgs,metadata}, or the folder of another difficulty),
    then lra_release.gz or lra_release.tar.gz.
    """
    if config.source == "generated":
        return []
    folder = _folder(config, raw)
    if folder is not None:
        return _listings(folder)
    archive = _archive(config, raw)
    return [] if archive is None else [archive]


def fetch(config: Config, raw: Path) -> None:
    """Nothing is downloaded: no checksum of the archive is published. Raises FileNotFoundError if it is needed."""
    if config.source == "generated" or (config.source == "auto" and not sources(config, raw)):
        logger.info("pathfinder is generated; nothing to download")
    elif not sources(config, raw):
        raise _absent(config, raw)


def load(config: Config, raw: Path) -> TaskData:
    """Raises FileNotFoundError when released pictures are not there, ValueError when they are damaged."""
    if config.source == "generated" or not sources(config, raw):
        if config.source == "released":
            raise _absent(config, raw)
        return _generated(config)
    return _released(config, raw)


def class_names(config: Config) -> tuple[str, ...]:
    return ("apart", "joined")


def _data(config: Config, splits: Iterable[Split], notes: tuple[str, ...]) -> TaskData:
    train, val, test = splits
    grey = Values(1, (127.5,), (127.5,), levels=256)
    return TaskData(
        input=Tokens(256) if config.pixels == "tokens" else grey,
        target=Classes(2),
        train=train,
        val=val,
        test=test,
        length=config.resolution**2,
        notes=notes,
        row_width=config.resolution,
    )


# -------------------------------------------------------------------------------------------------- generated


def _generated(config: Config) -> TaskData:
    law = pathfinder(config.resolution, config.difficulty, config.distractors)
    splits = []
    for name, size in (("train", config.train_size), ("val", config.val_size), ("test", config.test_size)):
        rows = generate(law, config.seed, name, min(size, config.max_rows or size), f"pathfinder {law.side}")
        splits.append(_split(config, rows.pixels, rows.labels, row_ids(name, len(rows.labels))))
    notes = [f"pictures generated here by the published law, seed {config.seed}: not those of the released archive"]
    if config.changed(("split",)):
        notes.append("no released pictures were found, so split: lra has no effect")
    return _data(config, splits, tuple(notes))


def _split(config: Config, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], ids: Iterable[str]) -> Split:
    rows = pixels if config.pixels == "tokens" else pixels[..., None]
    return Split.from_rows(rows, labels, ids=ids)


# --------------------------------------------------------------------------------------------------- released


class Entry(NamedTuple):
    """A line of metadata."""

    picture: str  # folder/name, from the folder of the difficulty
    label: int


def _folder(config: Config, raw: Path) -> Path | None:
    """The folder with metadata/ and imgs/."""
    name = f"pathfinder{config.resolution}"
    for place in data_folders(raw, "pathfinder"):
        for base in (place / LRA_FOLDER, place, place / "lra_release"):
            folder = base / name / FOLDERS[config.difficulty]
            if (folder / "metadata").is_dir():
                return folder
    return None


def _archive(config: Config, raw: Path) -> Path | None:
    folders = [*data_folders(raw, "lra"), *data_folders(raw, "pathfinder")]
    return next((path for name in ARCHIVES if (path := find_file(folders, name))), None)


def _absent(config: Config, raw: Path) -> FileNotFoundError:
    name = f"pathfinder{config.resolution}/{FOLDERS[config.difficulty]}/ with imgs/ and metadata/"
    sentence = data_not_found(
        "the released Pathfinder", raw, [f"{ARCHIVES[0]} (8.2 GB)", name], f"curl -LO {LRA_ADDRESS}"
    )
    return FileNotFoundError(f"{sentence}; source: generated makes pictures of the same law")


def _listings(folder: Path) -> list[Path]:
    """Metadata files by number."""
    paths = [path for path in (folder / "metadata").glob("*.npy") if path.stem.isdigit()]
    return sorted(paths, key=lambda path: (int(path.stem), path.name))


def entries(content: bytes, source: str) -> list[Entry]:
    """The lines of a metadata file: text as released, or an array of strings (n, 11) as NumPy saves it."""
    table: list[list[str]]
    if content.startswith(b"\x93NUMPY"):
        table = _strings(content, source)
    else:
        try:
            lines = content.decode("utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{source} is neither text nor an array of NumPy; it is no metadata") from None
        table = [line.split() for line in lines if line.strip()]
    listed = []
    for i, fields in enumerate(table):
        if len(fields) != FIELDS:
            raise ValueError(f"{source}, line {i + 1}: {len(fields)} fields; metadata have {FIELDS}")
        folder, name, _, label = fields[:4]
        parts = [*folder.split("/"), name]
        if "/" in name or "\\" in name or not all(parts) or {".", ".."} & set(parts):
            raise ValueError(f"{source}, line {i + 1}: {folder}/{name} leads outside the folder of the pictures")
        if label not in ("0", "1"):
            raise ValueError(f"{source}, line {i + 1}: the label is {label!r}; 0 or 1 is expected")
        listed.append(Entry(f"{folder}/{name}", int(label)))
    return listed


def _strings(content: bytes, source: str) -> list[list[str]]:
    """An array of strings in NumPy's format."""
    table = read_npy(io.BytesIO(content), source)
    if table.ndim != 2 or table.dtype.kind not in "US":
        raise ValueError(f"{source}: {table.dtype} of shape {table.shape} is no table of strings")
    try:
        return [[str(field) for field in row] for row in table.astype(np.str_).tolist()]
    except (UnicodeDecodeError, ValueError):
        raise ValueError(f"{source} holds bytes that are no text") from None


def divided(n: int, split: Literal["s4", "lra"]) -> list[NDArray[np.int64]]:
    """Rows of train, val and test: about a tenth for each of the latter two, with s4 rounded down."""
    tenth = int(0.1 * n)
    if split == "s4":
        rows, held = published_split(n, 2 * tenth, SEED)
        return [rows, held[:tenth], held[tenth:]]
    cuts = [int(0.8 * n), int(0.9 * n)]
    return np.split(np.arange(n), cuts)


def _released(config: Config, raw: Path) -> TaskData:
    if config.distractors is not None:
        raise ValueError(
            "distractors is for generated pictures, and released ones are there; leave it out, or say source: generated"
        )
    folder = _folder(config, raw)
    archive = None if folder is not None else _archive(config, raw)
    if folder is not None:
        listed, pixels, order, empty = _read_folder(config, folder)
    else:
        assert archive is not None
        listed, pixels, order, empty = _read_archive(config, archive)
    length = config.resolution**2
    labels = np.array([entry.label for entry in listed], np.uint8)
    names = np.array([entry.picture.removeprefix("imgs/").removesuffix(".png") for entry in listed])
    values = pixels.reshape(-1) if config.pixels == "tokens" else pixels.reshape(-1, 1)
    splits = []
    for rows in divided(len(listed), config.split):
        rows = rows[: config.max_rows]
        starts = order[rows] * length
        splits.append(Split(values, starts, starts + length, labels[rows], names[rows]))
    notes = [f"{empty} picture file(s) empty and left out"] if empty else []
    if len(listed) + empty != ROWS:
        notes.append(f"{len(listed) + empty:,} pictures, where {ROWS:,} are published")
    if unused := config.changed(GENERATING):
        notes.append(f"released pictures were found, so {' and '.join(unused)} had no effect")
    return _data(config, splits, tuple(notes))


Read = tuple[list[Entry], NDArray[np.uint8], NDArray[np.int64], int]
"""Entries in order, stored pictures (m, W, W), which of them is each entry's, how many files are empty."""


def _read_folder(config: Config, folder: Path) -> Read:
    paths = _listings(folder)
    listed: list[Entry] = []
    for path in paths:
        check_regular(path)
        if path.stat().st_size > LISTING:
            raise ValueError(f"{path} has more than {LISTING:,} bytes; it is no metadata")
        listed += entries(path.read_bytes(), str(path))
    full = []
    for entry in listed:
        path = folder / entry.picture
        check_regular(path)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{path} is missing; {folder}/metadata names it") from None
        if size > PICTURE:
            raise ValueError(f"{path} has {size:,} bytes; it is none of the pictures")
        if size:
            full.append(entry)
    _enough(full, str(folder))
    needed = np.unique(np.concatenate([rows[: config.max_rows] for rows in divided(len(full), config.split)]))
    pixels = allocate((len(needed), config.resolution, config.resolution), np.uint8)

    def read(start: int, stop: int) -> None:
        for i in range(start, stop):
            path = folder / full[needed[i]].picture
            pixels[i] = decode_image(path.read_bytes(), pixels.shape[1:], ("PNG",), str(path))

    for _ in map_chunks(read, len(needed), 1000, f"pathfinder {config.resolution}, files"):
        pass
    order = np.zeros(len(full), np.int64)
    order[needed] = np.arange(len(needed))
    return full, pixels, order, len(listed) - len(full)


def _read_archive(config: Config, archive: Path) -> Read:
    """In one pass, in the archive's order; nothing is unpacked to disk."""
    prefix = "/".join((LRA_FOLDER, f"pathfinder{config.resolution}", FOLDERS[config.difficulty], ""))
    check_regular(archive)

    def select(name: str) -> bool:
        inside = name.removeprefix(prefix)
        kind = inside.partition("/")[0]
        ending = {"imgs": ".png", "metadata": ".npy"}.get(kind)
        return inside != name and ending is not None and inside.endswith(ending)

    pixels = allocate((ROWS, config.resolution, config.resolution), np.uint8)
    where: dict[str, int] = {}
    empty: set[str] = set()
    listings: dict[int, list[Entry]] = {}
    for name, content in read_members(archive, select, LRA_BYTES):
        if len(content) > (LISTING if name.endswith(".npy") else PICTURE):
            raise ValueError(f"{archive}: its member {name} has {len(content):,} bytes, more than such a file has")
        inside = name.removeprefix(prefix)
        if inside.endswith(".npy"):
            stem = Path(inside).stem
            if stem.isdigit():
                listings[int(stem)] = entries(content, f"{archive}, member {name}")
        elif not content:
            empty.add(inside)
        else:
            if len(where) == ROWS:
                raise ValueError(
                    f"{archive} has more than {ROWS:,} pictures under {prefix}; it is not the published one"
                )
            pixels[len(where)] = decode_image(content, pixels.shape[1:], ("PNG",), f"{archive}, member {name}")
            where[inside] = len(where)
    listed = [entry for number in sorted(listings) for entry in listings[number]]
    full = [entry for entry in listed if entry.picture not in empty]
    lost = next((entry for entry in full if entry.picture not in where), None)
    if lost is not None:
        raise ValueError(f"{archive} has no member {prefix}{lost.picture}, which its metadata name")
    _enough(full, f"{archive}, {prefix}")
    order = np.array([where[entry.picture] for entry in full])
    return full, pixels[: len(where)], order, len(listed) - len(full)


def _enough(full: list[Entry], source: str) -> None:
    if len(full) < 10:
        raise ValueError(f"{source} lists {len(full)} pictures; three splits need at least 10")
    if len({entry.picture for entry in full}) < len(full):
        raise ValueError(f"{source}: its metadata name a picture twice")
