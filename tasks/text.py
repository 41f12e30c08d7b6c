"""Film reviews character by character (IMDb, LRA Text): is a review for the film or against it? Up to 4,096 steps.

Conventions are those of the S4 and SPT code: characters as they are, case and `<br />` included, at most
`max_length` - 1 of them, then `<eos>`; the vocabulary is `<pad>`, `<unk>`, `<eos>` and the characters that occur at
least 15 times in the training texts in use, after cutting, the commonest first. The data set has no validation split:
by default a tenth of the training reviews is drawn for it; `validation: test` is the published protocol. Duplicates
(96 within training, 199 within test, 123 texts in both) are left as they are. See `sources` for the files.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens, row_ids
from spt.tasks.characters import END, character_tokens, code_points
from spt.tasks.files import (
    Download,
    check_regular,
    class_numbers,
    data_folders,
    data_not_found,
    decode_text,
    download,
    find_file,
    parquet_files,
    parquet_pair,
    read_columns,
    read_members,
    verify,
)

ROWS = 25_000  # of train, and of test
ARCHIVE = Download(
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
    "sha256:c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
HUB = "stanfordnlp/imdb"
FOLDER = "aclImdb"
REVIEW = re.compile(rf"{FOLDER}/(train|test)/(neg|pos)/(\d+)_\d+\.txt")
KINDS = ("neg", "pos")  # label 0, label 1
SEED = 42  # of the validation split, and of the order


class Config(TaskConfig):
    max_length: int = Field(4096, ge=2, le=2**20, description="most steps, <eos> included; longer reviews are cut")
    min_count: int = Field(15, ge=1, description="characters seen less often in the training rows are <unk>")
    validation: Literal["carved", "test"] = Field(
        "carved", description="a tenth of the training reviews, drawn with seed 42; or the test reviews (as published)"
    )

    def smoke_sizes(self) -> dict[str, int]:
        return {"max_length": 128}


class Reviews(NamedTuple):
    """One official part."""

    texts: list[str]
    labels: NDArray[np.int64]


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, of the first kind found, in the data folder or its sub-folder imdb.

    aclImdb/ (by its four folders), aclImdb_v1.tar.gz; train.parquet and test.parquet (or the hub's
    train-00000-of-00001.parquet) with columns text and label (0 against, 1 for).
    """
    folders = data_folders(raw, "imdb")
    return _official(raw) or [path for split in ("train", "test") for path in parquet_files(folders, split)]


def fetch(config: Config, raw: Path) -> None:
    """Download the official archive, unless there already is something to read."""
    if not sources(config, raw):
        download(ARCHIVE, raw / "imdb")


def hub(config: Config) -> tuple[str, str]:
    """A copy on the Hugging Face hub, and the sub-folder that `sources` looks into."""
    return HUB, "imdb"


def load(config: Config, raw: Path) -> TaskData:
    train, test = _read(raw)
    order = _order(train.texts)
    held = len(order) // 10 if config.validation == "carved" else 0
    tested = _split(test, "test", _order(test.texts), config.max_length)
    carved = _split(train, "train", order[len(order) - held :], config.max_length) if held else None
    rows = _split(train, "train", order[: len(order) - held], config.max_length)
    notes = () if held else ("validation is the test split: scores of the selected checkpoint are optimistic",)
    data = TaskData(vocabulary(config, rows), Classes(2), rows, carved or tested, tested, notes=notes)
    if all(split.values.max() < 2**16 for split in data.splits.values()):  # half the memory; one type for all splits
        data = data.mapped(lambda split: replace(split, values=split.values.astype(np.uint16)))
    return data


def vocabulary(config: Config, train: Split) -> Tokens:
    """From the training rows in use, which may be a subset."""
    return character_tokens(train, config.min_count)


def class_names(config: Config) -> tuple[str, ...]:
    return ("negative", "positive")


def readable(config: Config, row: NDArray[Any]) -> str:
    return "".join(map(chr, row[row != END].tolist()))


# ----------------------------------------------------------------------------------------------------- texts


def _order(texts: list[str]) -> NDArray[np.int64]:
    """A seeded permutation of the texts, whatever order they came in: sources are sorted by label, in several ways."""
    by_content = np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)
    return by_content[np.random.Generator(np.random.PCG64(SEED)).permutation(len(texts))]


def _split(part: Reviews, name: str, rows: NDArray[np.int64], max_length: int) -> Split:
    coded = [encode(part.texts[row], max_length) for row in rows]
    return Split.from_rows(coded, part.labels[rows], ids=row_ids(name, rows))


def encode(text: str, max_length: int) -> NDArray[np.uint32]:
    """A text's first characters as code points, then END. NUL itself, which is no character, becomes U+FFFD."""
    return code_points(text[: max_length - 1].replace("\0", "\ufffd") + chr(END))


# ----------------------------------------------------------------------------------------------------- files


def _official(raw: Path) -> list[Path]:
    folders = data_folders(raw, "imdb")
    unpacked = find_file(folders, FOLDER)
    if unpacked is not None:
        return [unpacked / split / kind for split in ("train", "test") for kind in KINDS]
    archive = find_file(folders, ARCHIVE.name)
    return [] if archive is None else [archive]


def _read(raw: Path) -> tuple[Reviews, Reviews]:
    official = _official(raw)
    if official:
        return _read_official(official)
    train, test = parquet_pair(data_folders(raw, "imdb"))
    if not train:
        files = [f"{FOLDER}/", ARCHIVE.name, "imdb/train.parquet and test.parquet"]
        raise data_not_found("IMDb", raw, files, "spt data prepare text")
    return _read_parquet(train), _read_parquet(test)


def _read_parquet(paths: list[Path]) -> Reviews:
    table = read_columns(paths, ROWS, [("text",), ("label",)])
    where = ", ".join(map(str, paths))
    for i, text in enumerate(table["text"]):
        if not isinstance(text, str):
            raise ValueError(f"{where}, row {i}: the text is {text!r:.40}; text is expected")
    return Reviews(table["text"], class_numbers(table["label"], len(KINDS), where))


def _read_official(paths: list[Path]) -> tuple[Reviews, Reviews]:
    """One file a review, named <number>_<stars>.txt, in four folders or an archive; in the order of the numbers."""
    reviews = defaultdict[tuple[str, str], list[tuple[int, str]]](list)
    for name, where, content in _review_files(paths):
        split, kind, number = name.groups()
        reviews[split, kind].append((int(number), decode_text(content, where)))
    parts = []
    for split in ("train", "test"):
        for kind in KINDS:
            if len(reviews[split, kind]) != ROWS // 2:
                raise ValueError(
                    f"{paths[0] if len(paths) == 1 else paths[0].parent.parent}: {split}/{kind} holds "
                    f"{len(reviews[split, kind]):,} reviews; {ROWS // 2:,} are expected"
                )
        texts = [text for kind in KINDS for _, text in sorted(reviews[split, kind])]
        parts.append(Reviews(texts, np.repeat([0, 1], ROWS // 2)))
    return parts[0], parts[1]


def _review_files(paths: list[Path]) -> Iterator[tuple[re.Match[str], str, bytes]]:
    """Name, place for messages and content of each review's file."""
    if len(paths) == 1:
        verify(paths[0], ARCHIVE.checksum)
        for name, content in read_members(paths[0], lambda name: REVIEW.fullmatch(name) is not None):
            if match := REVIEW.fullmatch(name):
                yield match, f"{paths[0]}, member {name}", content
        return
    for folder in paths:
        if not folder.is_dir():
            raise FileNotFoundError(f"the folder {folder} is missing; unpack {ARCHIVE.name} again")
        for path in folder.iterdir():
            if match := REVIEW.fullmatch(f"{FOLDER}/{folder.parent.name}/{folder.name}/{path.name}"):
                check_regular(path)
                yield match, str(path), path.read_bytes()
