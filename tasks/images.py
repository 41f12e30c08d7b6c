"""Real images pixel by pixel: CIFAR-10 in grey (LRA Image) or colour (sCIFAR), MNIST in order or permuted.

Pixels are read row by row, 1,024 (CIFAR-10) or 784 (MNIST) steps; a pixel is one of 256 levels. Conventions are those
of the S4 and SPT code: grey by ITU-R 601 rounded as in Pillow, CIFAR-10 standardised by fixed published means and
standard deviations, MNIST divided by 255, a tenth of the training images drawn for validation by torch's random_split
with seed 42; MNIST is permuted by bit reversal. See `sources` for the files.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens, Values, row_ids
from spt.tasks.files import (
    Download,
    byte_array,
    class_numbers,
    data_folders,
    data_not_found,
    decode_image,
    download,
    find_file,
    parquet_files,
    parquet_pair,
    published_split,
    read_columns,
    read_members,
    read_unzipped,
    unpickle,
    verify,
)

Dataset = Literal["cifar10", "mnist"]


class Known(NamedTuple):
    """Published facts of a data set."""

    title: str
    side: int  # pixels
    channels: int
    rows: tuple[int, int]  # train, test
    downloads: tuple[Download, ...]
    hub: str


def _mnist(name: str, md5: str) -> Download:
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
    return Download(tuple(f"{mirror}/{name}.gz" for mirror in mirrors), f"md5:{md5}")


CIFAR = Download(("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",), "md5:c58f30108f718f92721af3b95e74349a")
KNOWN: dict[str, Known] = {
    "cifar10": Known("CIFAR-10", 32, 3, (50_000, 10_000), (CIFAR,), "uoft-cs/cifar10"),
    "mnist": Known(
        "MNIST",
        28,
        1,
        (60_000, 10_000),
        (
            _mnist("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            _mnist("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
            _mnist("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
            _mnist("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "ylecun/mnist",
    ),
}
IDX_SUMS = {  # md5 of the unpacked files: Fashion-MNIST and others have files of the same names and sizes
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FOLDER = "cifar-10-batches-py"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
SEED = 42  # of the published validation split


class Scale(NamedTuple):
    """Of raw bytes, a number for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


UNIT = Scale((0.0,), (255.0,))
GREY = Scale((122.6,), (61.0,))
COLOUR = Scale(tuple(255 * m for m in (0.4914, 0.4822, 0.4465)), tuple(255 * s for s in (0.247, 0.243, 0.261)))


class Config(TaskConfig):
    dataset: Dataset = Field("cifar10", description="32x32 photographs of 10 kinds, or 28x28 handwritten digits")
    grey: bool = Field(True, description="cifar10: one grey value per pixel, or red, green and blue")
    permuted: bool = Field(False, description="mnist: pixels in bit-reversed order (psMNIST)")
    pixels: Literal["values", "tokens"] = Field("values", description="a grey pixel is a number, or one of 256 tokens")
    size: int | None = Field(
        None, ge=2, description="pixels per side, averaged over boxes; null: all, as in published results"
    )
    validation: Literal["carved", "last", "test"] = Field(
        "carved",
        description="carved: a tenth of the training images, drawn with seed 42; last: the last tenth (LRA's code); "
        "test: the test images",
    )

    def smoke_sizes(self) -> dict[str, int]:
        return {"size": 8}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        known = KNOWN[self.dataset]
        if self.dataset == "mnist" and not self.grey:
            raise ValueError("grey: false is for cifar10; mnist has no colours")
        if self.dataset == "cifar10" and self.permuted:
            raise ValueError("permuted: true is for mnist")
        if self.pixels == "tokens" and not self.grey:
            raise ValueError("pixels: tokens needs grey: true; a token is one number a step, a colour is three")
        if self.size is not None and known.side % self.size:
            sides = ", ".join(str(k) for k in range(2, known.side + 1) if known.side % k == 0)
            raise ValueError(f"size {self.size} does not divide {known.side}; {self.dataset} can have {sides}")
        return self


class Images(NamedTuple):
    """One official part: (n, side, side, channels) bytes and (n,) labels, in the official order."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    lossy: bool = False


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, of the first kind found, in the data folder or its sub-folder cifar10 or mnist.

    CIFAR-10: cifar-10-batches-py/, cifar-10-python.tar.gz; MNIST: the four idx files, plain or .gz. Then, for both,
    train.parquet and test.parquet (or the hub's train-00000-of-00001.parquet), with columns image (or img: encoded
    image bytes, alone or as the hub's struct; raw bytes, row by row) and label, and perhaps index.
    """
    return _official(config.dataset, raw) or [path for paths in _parquet(config.dataset, raw) for path in paths]


def fetch(config: Config, raw: Path) -> None:
    """Download the official archives, unless there already is something to read."""
    known = KNOWN[config.dataset]
    if any(_parquet(config.dataset, raw)) or (config.dataset == "cifar10" and _official("cifar10", raw)):
        return
    there = {path.name.removesuffix(".gz") for path in _official(config.dataset, raw)}
    for file in known.downloads:
        if file.name.removesuffix(".gz") not in there:
            download(file, raw / config.dataset)


def hub(config: Config) -> tuple[str, str]:
    """A copy on the Hugging Face hub, and the sub-folder that `sources` looks into."""
    return KNOWN[config.dataset].hub, config.dataset


def load(config: Config, raw: Path) -> TaskData:
    known = KNOWN[config.dataset]
    train, test = _read(config.dataset, raw)
    n = len(train.labels)
    notes = []
    if train.lossy or test.lossy:
        notes.append(f"{known.title} from JPEG copies, which are lossy: not the original pixels")
    if config.validation == "carved":
        rows, held = published_split(n, n // 10, SEED)
    else:
        rows, held = np.split(np.arange(n), [n - n // 10])
    if config.validation == "test":
        rows = np.arange(n)
        notes.append("validation is the test split: scores of the selected checkpoint are optimistic")
    side = config.size or known.side
    if side != known.side:
        notes.append(f"images of {side}x{side} pixels, averaged: published numbers are for {known.side}x{known.side}")
    order = bit_reversal(side * side) if config.permuted else slice(None)

    def split(part: Images, name: str, chosen: NDArray[np.int64]) -> Split:
        pixels = part.pixels
        if known.channels == 3 and config.grey:
            pixels = grey(pixels)
        pixels = box_average(pixels, side)
        steps = pixels.reshape(len(pixels), side * side, -1)[chosen][:, order]
        ids = row_ids(name, chosen)
        return Split.from_rows(steps[..., 0] if config.pixels == "tokens" else steps, part.labels[chosen], ids=ids)

    every = np.arange(len(test.labels))
    scale = UNIT if config.dataset == "mnist" else GREY if config.grey else COLOUR
    tested = split(test, "test", every)
    return TaskData(
        input=Tokens(256) if config.pixels == "tokens" else Values(len(scale.mean), *scale, levels=256),
        target=Classes(10),
        train=split(train, "train", rows),
        val=tested if config.validation == "test" else split(train, "train", held),
        test=tested,
        notes=tuple(notes),
        row_width=None if config.permuted else side,
    )


def class_names(config: Config) -> tuple[str, ...]:
    if config.dataset == "mnist":
        return tuple("0123456789")
    return ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def picture(config: Config, row: NDArray[Any]) -> NDArray[Any]:
    """(side, side) or (side, side, 3) A row's pixels in their places."""
    pixels = row.reshape(len(row), -1)
    side = math.isqrt(len(row))
    placed = np.empty_like(pixels)
    placed[bit_reversal(len(row)) if config.permuted else slice(None)] = pixels
    return placed[:, 0].reshape(side, side) if pixels.shape[1] == 1 else placed.reshape(side, side, -1)


# ---------------------------------------------------------------------------------------------------- pixels


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, H, W, 3) -> (n, H, W, 1), luma of ITU-R 601 in 16 bits, as Pillow's conversion to mode L rounds it."""
    luma = np.empty((*pixels.shape[:-1], 1), np.uint8)
    for i in range(0, len(pixels), 1000):  # 32-bit numbers of all images at once would take four times the memory
        red, green, blue = np.moveaxis(pixels[i : i + 1000].astype(np.uint32), -1, 0)
        luma[i : i + 1000, ..., 0] = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16
    return luma


def box_average(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """(n, S, S, C) -> (n, side, side, C), means of square boxes, halves rounded up."""
    n, width, _, channels = pixels.shape
    box = width // side
    if box == 1:
        return pixels
    boxes = pixels.reshape(n, side, box, side, box, channels)
    sums = boxes.sum(axis=(2, 4), dtype=np.uint32)
    return ((sums + box * box // 2) // (box * box)).astype(np.uint8)


def bit_reversal(n: int) -> NDArray[np.int64]:
    """0 … n-1 in the order of the bit reversals of 0 … 2^k - 1 (the first power of two from n on), those < n kept."""
    bits = math.ceil(math.log2(n))
    numbers, reverse = np.arange(2**bits), np.zeros(2**bits, np.int64)
    for bit in range(bits):
        reverse |= ((numbers >> bit) & 1) << (bits - 1 - bit)
    return reverse[reverse < n]


# ----------------------------------------------------------------------------------------------------- files


def _official(dataset: Dataset, raw: Path) -> list[Path]:
    if dataset == "mnist":
        folders = [place for folder in data_folders(raw, dataset) for place in (folder, folder / "MNIST" / "raw")]
        paths = [find_file(folders, name) or find_file(folders, f"{name}.gz") for name in IDX_SUMS]
        return [path for path in paths if path is not None]
    folders = data_folders(raw, dataset)
    unpacked = find_file(folders, FOLDER)
    if unpacked is not None:
        return [unpacked / name for name in BATCHES]
    archive = find_file(folders, CIFAR.name)
    return [] if archive is None else [archive]


def _parquet(dataset: Dataset, raw: Path) -> tuple[list[Path], list[Path]]:
    folders = data_folders(raw, dataset)
    return parquet_files(folders, "train"), parquet_files(folders, "test")


def _read(dataset: Dataset, raw: Path) -> tuple[Images, Images]:
    known, official = KNOWN[dataset], _official(dataset, raw)
    if official:
        return _read_idx(official) if dataset == "mnist" else _read_batches(official)
    train, test = parquet_pair(data_folders(raw, dataset))
    if not train:
        names = {"cifar10": [f"{FOLDER}/", CIFAR.name], "mnist": ["the four files train-images-idx3-ubyte.gz …"]}
        files = [*names[dataset], f"{dataset}/train.parquet and test.parquet"]
        raise data_not_found(known.title, raw, files, f"spt data prepare images dataset={dataset}")
    return _decode(train, known, known.rows[0]), _decode(test, known, known.rows[1])


def _read_batches(paths: Sequence[Path]) -> tuple[Images, Images]:
    """CIFAR-10 as published: six pickles, in a folder or an archive."""
    known = KNOWN["cifar10"]
    if len(paths) == 1:
        archive = paths[0]
        verify(archive, CIFAR.checksum)
        members = {f"{FOLDER}/{name}": name for name in BATCHES}
        contents = {members[name]: content for name, content in read_members(archive, members.__contains__)}
        absent = [name for name in BATCHES if name not in contents]
        if absent:
            raise ValueError(f"{archive} has no member {FOLDER}/{absent[0]}; it is not the published archive")
        where = f"{archive}, member {FOLDER}/"
    else:
        lost = [path for path in paths if not path.is_file()]
        if lost:
            raise FileNotFoundError(f"{lost[0]} is missing; {FOLDER} has six batches: unpack {CIFAR.name} again")
        contents = {path.name: read_unzipped(path, 2**26) for path in paths}
        where = f"{paths[0].parent}/"
    rows = {**dict.fromkeys(BATCHES[:-1], known.rows[0] // 5), BATCHES[-1]: known.rows[1]}
    parts = [_batch(contents[name], f"{where}{name}", rows[name]) for name in BATCHES]
    train = Images(np.concatenate([part.pixels for part in parts[:-1]]), np.concatenate([p.labels for p in parts[:-1]]))
    return train, parts[-1]


def _batch(content: bytes, source: str, rows: int) -> Images:
    batch = unpickle(content, source)
    if not isinstance(batch, dict):
        raise ValueError(f"{source} holds a {type(batch).__name__}; a dictionary with data and labels is expected")
    data, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", "labels"))
    if data is None or not isinstance(labels, list):
        raise ValueError(f"{source} has no data and labels; it is no batch of CIFAR-10")
    planes = byte_array(data, (rows, 3072), source)
    if len(labels) != rows:
        raise ValueError(f"{source} has {len(labels):,} labels; {rows:,} are expected")
    return Images(planes.reshape(rows, 3, 32, 32).transpose(0, 2, 3, 1), class_numbers(labels, 10, source))


def _read_idx(paths: Sequence[Path]) -> tuple[Images, Images]:
    """MNIST as published: a header of big-endian numbers, then bytes."""
    known = KNOWN["mnist"]
    there = {path.name.removesuffix(".gz"): path for path in paths}
    absent = [name for name in IDX_SUMS if name not in there]
    if absent:
        raise FileNotFoundError(f"{paths[0].parent}/{absent[0]} is missing, plain or .gz; MNIST has four such files")
    shapes = [shape for n in known.rows for shape in ((n, known.side, known.side), (n,))]
    arrays = [_idx(there[name], name, shape) for name, shape in zip(IDX_SUMS, shapes, strict=True)]
    train, test = (
        Images(arrays[i][..., None], class_numbers(arrays[i + 1].tolist(), 10, str(there[list(IDX_SUMS)[i + 1]])))
        for i in (0, 2)
    )
    return train, test


def _idx(path: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    import hashlib

    head = bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()
    size = len(head) + math.prod(shape)
    content = read_unzipped(path, size)
    if len(content) != size or not content.startswith(head):
        raise ValueError(
            f"{path} is not the published file: {size:,} bytes with the shape {shape} are expected; found are "
            f"{len(content):,}, of shape {tuple(np.frombuffer(content[4 : len(head)], '>u4').tolist())}"
        )
    checksum = hashlib.md5(content).hexdigest()
    if checksum != IDX_SUMS[name]:
        raise ValueError(
            f"{path} is not the published file: its md5 (unpacked) is {checksum}, expected {IDX_SUMS[name]}"
        )
    return np.frombuffer(content, np.uint8, offset=len(head)).reshape(shape)


def _decode(paths: Sequence[Path], known: Known, rows: int) -> Images:
    """Images from Parquet files."""
    table = read_columns(paths, rows, [("image", "img"), ("label",)], optional=("index",))
    where = ", ".join(map(str, paths))
    labels = class_numbers(table["label"], 10, where)
    shape = (known.side, known.side, known.channels)
    pixels = np.empty((rows, *shape), np.uint8)
    lossy = False
    for i, cell in enumerate(table["image"]):
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(content, bytes):
            raise ValueError(f"{where}, row {i}: the image is no bytes but {type(content).__name__}")
        jpeg = content.startswith(b"\xff\xd8\xff")
        lossy |= jpeg
        if len(content) == math.prod(shape) and not jpeg and not content.startswith(b"\x89PNG"):
            pixels[i] = np.frombuffer(content, np.uint8).reshape(shape)
        else:
            pixels[i] = decode_image(content, shape, ("PNG", "JPEG"), f"{where}, row {i}")
    if "index" in table:  # the official order, which the published split refers to
        order = np.array(table["index"])
        if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(rows)):
            raise ValueError(f"{where}: column index does not hold each position from 0 to {rows - 1:,} once")
        places = np.argsort(order)
        pixels, labels = pixels[places], labels[places]
    return Images(pixels, labels, lossy)
