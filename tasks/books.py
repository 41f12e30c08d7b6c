"""Whole books, as one stream of bytes or T5 tokens: which comes next? PG-19 language modelling in chunks of 4,096.

The texts of a split are joined in order and cut into chunks. A step's target is the next token; for the last step of a
chunk, that is the first token of the next chunk. The rest at the end is dropped. The model has to be causal. Bits per
byte count the UTF-8 bytes of the texts, so that models with different tokens can be compared.
See `sources` for the files.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens, row_ids
from spt.tasks.files import (
    check_regular,
    data_folders,
    data_not_found,
    decode_text,
    parquet_files,
    read_batches,
    read_unzipped,
)
from spt.tasks.parallel import Reel

SPLITS = {"train": ("train",), "val": ("validation", "val"), "test": ("test",)}  # and their folders' names
OFFICIAL = {"train": 28_602, "val": 50, "test": 100}  # books
HUB = "emozilla/pg19"
BUCKET = "https://console.cloud.google.com/storage/browser/deepmind-gutenberg"
MAX_BOOK = 2**28  # bytes
MAX_TOKENIZER = 2**27  # bytes
SLICE = 2**22  # tokens
BATCH = 2**23  # characters that are tokenised at once
SENTINELS = 100  # T5's <extra_id_…>, after the pieces
END = 256  # after the bytes
logger = logging.getLogger(__name__)


class Config(TaskConfig):
    chunk: int = Field(4096, ge=2, le=2**24, description="steps in a row")
    tokens: Literal["bytes", "t5"] = Field("bytes", description="UTF-8 bytes, or the tokens of a T5 tokenizer's file")
    tokenizer: str | None = Field(
        None, description="t5: its tokenizer.json or spiece.model; a relative path is relative to the data folder"
    )
    end_of_text: bool = Field(False, description="an end token after every book: 256, or the tokenizer's </s>")
    path: str | None = Field(
        None,
        description="folder with the splits; a relative path is relative to the data folder; null: books or pg19 there",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.tokens == "t5" and self.tokenizer is None:
            raise ValueError("tokens: t5 needs tokenizer: the path of T5's tokenizer.json or spiece.model")
        if self.tokens == "bytes" and self.tokenizer is not None:
            raise ValueError("tokenizer is for tokens: t5")
        return self


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, in the sub-folder books or pg19 of the data folder, or in the folder `path`.

    {train,validation,test}/*.txt, as PG-19 is published (any names; numbers in their order); or Parquet files
    train.parquet, validation.parquet and test.parquet (or the hub's train-00000-of-00023.parquet) with a column text;
    and the tokenizer's file.
    """
    texts = [path for files in _files(config, raw).values() for path in files]
    return texts + ([_tokenizer_path(config, raw)] if texts and config.tokens == "t5" else [])


def hub(config: Config) -> tuple[str, str]:
    """A copy on the Hugging Face hub (11 GB), and the sub-folder that `sources` looks into."""
    return HUB, "pg19"


def load(config: Config, raw: Path) -> TaskData:
    files = _files(config, raw)
    if not any(files.values()):
        place = config.path or "books/ or pg19/"
        raise data_not_found(
            "PG-19, or other books,",
            raw,
            [f"{place} with train/, validation/ and test/ of .txt files ({BUCKET})", "train.parquet and so on"],
            "spt data prepare books --hub",
        )
    for name, texts in files.items():
        if not texts:
            raise FileNotFoundError(f"{next(iter(filter(None, files.values())))[0].parent}: there are no {name} texts")
    coder = Bytes(config.end_of_text) if config.tokens == "bytes" else Pieces(_tokenizer_path(config, raw), config)
    streams = {name: _stream(texts, coder, config.chunk) for name, texts in files.items()}
    train, val, test = (_split(stream, config.chunk, name) for name, stream in streams.items())
    notes = []
    if any(stream.books != OFFICIAL[name] for name, stream in streams.items()):
        books = ", ".join(f"{stream.books:,} {name}" for name, stream in streams.items())
        notes.append(f"PG-19-like books, not PG-19: {books}")
    if config.tokens == "t5":
        notes.append("T5's tokens leave out line breaks and repeated blanks, which bits per byte count all the same")
    width = streams["test"].size / max(streams["test"].words, 1)
    notes.append(f"the test texts have {width:.4f} bytes a word, which perplexities by word need")
    return TaskData(
        Tokens(coder.vocab),
        Classes(coder.vocab, per_step=True),
        train,
        val,
        test,
        notes=tuple(notes),
        future=True,
    )


# ------------------------------------------------------------------------------------------------------ tokens


Coded = tuple[NDArray[Any], NDArray[Any]]  # tokens of a text, and how many of its bytes each stands for


class Bytes:
    def __init__(self, end: bool) -> None:
        self.end = end
        self.vocab = END + end
        self.type = np.uint16 if end else np.uint8

    def encode(self, texts: list[str]) -> Iterator[Coded]:
        for text in texts:
            tokens = np.frombuffer(text.encode("utf-8"), np.uint8)
            widths = np.ones(len(tokens) + self.end, np.uint8)
            if self.end:
                tokens = np.append(tokens.astype(self.type), self.type(END))
                widths[-1] = 0
            yield tokens, widths


class Pieces:
    """Tokens of a file of the tokenizers library, or of a SentencePiece model as T5 uses it."""

    def __init__(self, path: Path, config: Config) -> None:
        self.tokenizer = _tokenizer(path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # a book that says </s> means these characters
        self.vocab = max(self.tokenizer.get_vocab().values()) + 1
        self.type = np.uint16 if self.vocab <= 2**16 else np.int32
        self.end = self.tokenizer.token_to_id("</s>") if config.end_of_text else None
        if config.end_of_text and self.end is None:
            raise ValueError(f"{path} has no token </s> to end a text with; set end_of_text: false")

    def encode(self, texts: list[str]) -> Iterator[Coded]:
        for text, encoding in zip(texts, self.tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = list(encoding.ids) + ([] if self.end is None else [self.end])
            characters = np.frombuffer(text.encode("utf-32-le"), "<u4")
            sizes = 1 + (characters >= 0x80) + (characters >= 0x800) + (characters >= 0x10000)
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
            # Bytes between two tokens, and after the last, belong to the token before: none is lost.
            starts = np.array([start for start, _ in encoding.offsets], np.int64)
            ends = before[np.append(np.maximum.accumulate(starts)[1:], len(characters))] if len(starts) else before[:0]
            widths = np.diff(ends, prepend=0)
            yield np.array(ids, self.type), np.append(widths, np.zeros(len(ids) - len(widths), np.int64))


def _tokenizer_path(config: Config, raw: Path) -> Path:
    path = raw / Path(str(config.tokenizer)).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer {path}; put tokenizer.json or spiece.model of a T5 model there "
            "(huggingface.co/google-t5/t5-base), or set tokens: bytes"
        )
    return path


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    content = read_unzipped(path, MAX_TOKENIZER)
    if path.suffix == ".json":
        try:
            return Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises this class itself
            raise ValueError(f"{path} is no file of the tokenizers library ({error!s:.80})") from error
    if path.suffix != ".model":
        raise ValueError(f"{path} is neither a tokenizer.json nor a spiece.model, by its name")
    try:
        return _sentencepiece(content)
    except _Unusable as error:
        raise ValueError(f"{path} is not used: {error}; give a tokenizer.json instead") from None
    except Exception as error:  # bytes of any other file
        raise ValueError(f"{path} is no SentencePiece model ({type(error).__name__})") from error


class _Unusable(Exception):
    pass


def _sentencepiece(content: bytes) -> Any:
    """A SentencePiece model (sentencepiece_model.proto) with T5's conventions for blanks: one before each word."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    pieces: list[tuple[str, float]] = []
    unknown, kind, normal = 0, 1, b""
    for field, value in _fields(content):
        if field == 1:  # a piece: 1 text, 2 score (float), 3 type (2: unknown)
            parts = dict(_fields(value))
            if parts.get(3) == 2:
                unknown = len(pieces)
            pieces.append((parts[1].decode("utf-8"), float(np.frombuffer(parts.get(2, bytes(4)), "<f4")[0])))
        elif field == 2:  # how it was trained: 3 type of model (1: unigram)
            kind = dict(_fields(value)).get(3, 1)
        elif field == 3:  # how texts are normalised: 2 table of characters
            normal = dict(_fields(value)).get(2, b"")
    if kind != 1:
        raise _Unusable("it is not a unigram model, as T5's is")
    if not pieces:
        raise ValueError("no pieces")
    pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(SENTINELS))]
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, False))
    if normal:
        tokenizer.normalizer = normalizers.Precompiled(normal)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    return tokenizer


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields: whole numbers, or bytes."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("number without end")

    while place < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            if key & 7 != 2:
                raise ValueError("unknown kind of field")
            size = number()
        if place + size > len(message):
            raise ValueError("cut short")
        yield key >> 3, message[place : place + size]
        place += size


# -------------------------------------------------------------------------------------------------------- rows


class Stream(NamedTuple):
    """A split's texts end to end, in a temporary file: PG-19 has 11 GB."""

    tokens: NDArray[Any]  # (N,)
    bytes: NDArray[np.int64]  # (rows,) of the targets of each row
    books: int
    size: int  # bytes
    words: int  # parted by white space


def _stream(files: list[Path], coder: Bytes | Pieces, chunk: int) -> Stream:
    reel, sums = Reel(coder.type), np.zeros(0, np.int64)
    size = words = 0
    logged = time.monotonic()
    for texts in _batches(files):
        for text, (tokens, widths) in zip(texts, coder.encode(texts), strict=True):
            for i in range(0, len(tokens), SLICE):
                sums = _added(sums, widths[i : i + SLICE], reel.ends[-1] + i, chunk)
            reel.add(tokens)
            size += int(widths.sum(dtype=np.int64))
            words += sum(len(line.split()) for line in text.splitlines())
        if time.monotonic() - logged > 10:
            logger.info("books: %s texts, %s MB", f"{len(reel.ends) - 1:,}", f"{size / 1e6:,.0f}")
            logged = time.monotonic()
    total, books = reel.ends[-1], len(reel.ends) - 1
    if total <= chunk:
        raise ValueError(
            f"{files[0].parent}: {total:,} tokens in {books:,} texts ({files[0].name} …); a row of {chunk:,} steps "
            "and its last target need more; set a smaller chunk"
        )
    return Stream(reel.whole(), sums[: (total - 1) // chunk], books, size, words)


def _added(sums: NDArray[np.int64], widths: NDArray[Any], first: int, chunk: int) -> NDArray[np.int64]:
    """Bytes of each row's targets, some more tokens included. Token i > 0 is a target of row (i - 1) // chunk."""
    if first == 0:
        widths, first = widths[1:], 1
    begin = (first - 1) // chunk
    added = np.bincount((first - 1 + np.arange(len(widths))) // chunk - begin, widths).astype(np.int64)
    sums = np.pad(sums, (0, max(0, begin + len(added) - len(sums))))
    sums[begin : begin + len(added)] += added
    return sums


def _split(stream: Stream, chunk: int, name: str) -> Split:
    rows = (len(stream.tokens) - 1) // chunk
    used = rows * chunk
    stops = np.arange(1, rows + 1) * chunk
    return Split(
        stream.tokens[:used],
        stops - chunk,
        stops,
        stream.tokens[1 : used + 1],
        row_ids(name, rows),
        per_step=True,
        text_bytes=stream.bytes,
    )


# ------------------------------------------------------------------------------------------------------- files


def _files(config: Config, raw: Path) -> dict[str, list[Path]]:
    """By split; empty lists where there are none."""
    if config.path is not None:
        folders = [raw / Path(config.path).expanduser()]
    else:
        folders = [place for name in ("books", "pg19") for place in data_folders(raw, name)[:-1]]
    for folder in folders:
        splits = {name: _texts(folder, names) for name, names in SPLITS.items()}
        if any(splits.values()):
            return splits
        splits = {name: [p for each in names for p in parquet_files([folder], each)] for name, names in SPLITS.items()}
        if any(splits.values()):
            return splits
    return {name: [] for name in SPLITS}


def _texts(folder: Path, names: tuple[str, ...]) -> list[Path]:
    paths = [path for name in names for path in (folder / name).glob("*.txt")]
    return sorted(paths, key=lambda path: (path.stem.isdecimal() and int(path.stem), path.stem))


def _batches(files: list[Path]) -> Iterator[list[str]]:
    """Texts in order, some megabytes at a time."""
    batch: list[str] = []
    size = 0
    for path in files:
        for text in _parquet(path) if path.suffix == ".parquet" else [_text(path)]:
            batch.append(text)
            size += len(text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _text(path: Path) -> str:
    check_regular(path)
    if path.stat().st_size > MAX_BOOK:
        raise ValueError(f"{path} has more than {MAX_BOOK:,} bytes; it is no book")
    return decode_text(path.read_bytes(), str(path))


def _parquet(path: Path) -> Iterator[str]:
    row = 0
    try:
        for _, columns in read_batches([path], [("text",)], rows=16):
            for text in columns["text"].to_pylist():
                if not isinstance(text, str):
                    raise ValueError(f"{path}, row {row}: the text is {text!r:.40}; text is expected")
                yield text
                row += 1
    except UnicodeDecodeError:
        raise ValueError(f"{path}, rows from {row} on: there is a text that is not UTF-8") from None
