"""What tasks that read files share: finding, downloading, archives, pickles of arrays, Parquet, published splits.

Every error is one sentence, a ValueError or FileNotFoundError. Nothing in a file is trusted: archives are read by name
and never unpacked, and pickles may hold only arrays and plain values.
"""

import errno
import gzip
import hashlib
import io
import logging
import os
import pickle
import shutil
import tarfile
import time
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

try:
    from lzma import LZMAError
except ImportError:  # a Python that was built without it, which reads no such archive
    LZMAError = zlib.error  # type: ignore[misc,assignment]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 2**31  # of a download or an unpacked archive, where a task says nothing else
CHUNK = 2**18
TIMEOUT = 60.0  # seconds without a byte
MAX_NOTE = 2**20  # bytes of a long name, or of another note about a member of a tar archive
# what reading damaged archives raises; tarfile recurses over notes about notes
DAMAGES = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError)
NPY_ERRORS = (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError, tokenize.TokenError)
# and damaged archives of arrays; OSError is also that of a file that cannot be read
ZIP_ERRORS = (zipfile.BadZipFile, EOFError, zlib.error, LZMAError, NotImplementedError, RuntimeError)
MAX_HEADER = 10_000  # characters of an array's description
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

# The Long Range Arena's archive, a tar.gz in spite of its name; it has no published checksum.
LRA_ARCHIVE = "lra_release.gz"
LRA_ADDRESS = f"https://storage.googleapis.com/long-range-arena/{LRA_ARCHIVE}"
LRA_FOLDER = "lra_release/lra_release"  # in the archive; the outer lra_release has second copies of some sets
LRA_BYTES = 2**35  # that it may unpack to; it has 18.6e9

SPLITS = {  # by the usual names of files and of the hub's splits
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


# -------------------------------------------------------------------------------------------------- finding


def data_folders(raw: Path, name: str) -> list[Path]:
    """Where to look for a data set's files: the folder of its name in the data folder, then the data folder itself."""
    try:
        os.scandir(raw).close()
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ValueError(f"the data folder {raw} is a file; set --data-dir or SPT_DATA_DIR to a folder") from None
    return [folder for folder in (raw / name, raw) if folder.is_dir()]


def find_file(folders: Sequence[Path], name: str) -> Path | None:
    """The first folder's file or folder of this name."""
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def data_not_found(
    what: str, raw: Path, files: Sequence[str], fetch: str | None = None, origin: str = ""
) -> FileNotFoundError:
    """`fetch`: the command that downloads it; where none does, `origin` is the address to take it from."""
    there = "" if raw.is_dir() else ", which does not exist"
    how = f"get it with `{fetch}`, or put" if fetch else f"take it from {origin}, and put"
    return FileNotFoundError(
        f"{what} is not in the data folder {raw}{there}: {how} {' or '.join(files)} there "
        "(another folder: --data-dir or SPT_DATA_DIR)"
    )


def check_regular(path: Path) -> None:
    """Raise ValueError for a path that exists but is not a file: reading a pipe would never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; remove it")


def decode_text(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start:,})") from None


# ---------------------------------------------------------------------------------------------- downloading


class Download(NamedTuple):
    """A published file: the same content at each of these addresses."""

    urls: tuple[str, ...]
    checksum: str  # "md5:…" or "sha256:…"
    max_bytes: int | None = None  # to receive; None: MAX_BYTES

    @property
    def name(self) -> str:
        return self.urls[0].rpartition("/")[2]


def checksum(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def verify(path: Path, expected: str) -> None:
    """Raise ValueError unless the file has this checksum."""
    check_regular(path)
    kind = expected.partition(":")[0]
    actual = checksum(path, kind)
    if actual != expected:
        raise ValueError(
            f"{path} is not the published file: its {kind} is {actual.partition(':')[2]}, expected is "
            f"{expected.partition(':')[2]}; remove it and get it again"
        )


def download(file: Download, folder: Path) -> Path:
    """Download into a folder and verify; the file gets its name when it is complete. An existing one is verified.

    Raises ValueError when no address provides it, OSError when it cannot be written.
    """
    path = folder / file.name
    if path.exists():
        verify(path, file.checksum)
        logger.info(f"{path} is there already, and whole")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{file.name}.part"
    reasons = []
    try:
        for url in file.urls:
            try:
                _receive(url, beside, file.max_bytes or MAX_BYTES)
                actual = checksum(beside, file.checksum.partition(":")[0])
                if actual != file.checksum:
                    raise _DownloadError(f"what arrives has {actual}, expected is {file.checksum}")
            except _DownloadError as error:
                reasons.append(f"{url}: {error}")
                continue
            beside.replace(path)
            return path
    finally:
        beside.unlink(missing_ok=True)
    raise ValueError(
        f"{file.name} cannot be downloaded ({'; '.join(reasons)}); try again later, or put it into {folder}"
    )


class _DownloadError(Exception):
    """The server's or the network's fault."""


def _receive(url: str, path: Path, max_bytes: int) -> None:
    with path.open("wb") as file:
        try:
            response = urlopen(Request(url, headers={"User-Agent": "spt"}), timeout=TIMEOUT)
        except (OSError, HTTPException) as error:  # URLError and HTTPError among them
            raise _DownloadError(str(getattr(error, "reason", None) or error)) from error
        with response:
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
            name = url.rpartition("/")[2]
            logger.info(f"getting {url}" + (f", {total / 1e6:,.1f} MB" if total else ""))
            done, logged = 0, time.monotonic()
            while True:
                try:
                    chunk = response.read(CHUNK)
                except (OSError, HTTPException) as error:
                    raise _DownloadError(
                        f"the connection broke after {done:,} bytes ({type(error).__name__})"
                    ) from error
                if not chunk:
                    break
                file.write(chunk)
                done += len(chunk)
                if done > max_bytes:
                    raise _DownloadError(f"more than {max_bytes:,} bytes arrive")
                if time.monotonic() - logged > 10:
                    share = f" of {total / 1e6:,.1f} MB" if total else " MB"
                    logger.info(f"{name}: {done / 1e6:,.1f}{share}")
                    logged = time.monotonic()
        if total is not None and done < total:
            raise _DownloadError(f"the connection ended after {done:,} of {total:,} bytes")


def part_of(folder: Path) -> Path:
    """Where the copy of a hub data set is made, before it is moved to this folder."""
    return folder.with_name(f".{folder.name}.part")


def copy_from_hub(
    name: str, folder: Path, *, config: str | None = None, revision: str | None = None, own_data: bool = False
) -> None:
    """Copy a Hugging Face data set: one Parquet file for each split called train, validation, test or similar.

    With `own_data`, for data of the user's choice, a single split may have any name and counts as training rows, and
    numbers that have names (the hub's ClassLabel) become these names. Raises ValueError when the data set cannot be
    loaded, OSError when it cannot be written.
    """
    import datasets

    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        logger.info(f"getting {name} from the Hugging Face hub")
        try:
            data_set = datasets.load_dataset(name, config, revision=revision)
            splits = {str(split): SPLITS.get(str(split).lower()) for split in data_set}
            if own_data and len(splits) == 1:
                splits = {split: known or "train" for split, known in splits.items()}
            for split, known in splits.items():
                if known is not None and [*splits.values()].count(known) > 1:
                    raise ValueError(f"{' and '.join(s for s in splits if splits[s] == known)} are both {known} rows")
                if known is not None:
                    rows = _with_label_names(data_set[split]) if own_data else data_set[split]
                    rows.to_parquet(str(part / f"{known}.parquet"))
                    logger.info(f"{known}: {len(rows):,} rows")
        except Exception as error:  # of a library, a network and other people's files
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{name} cannot be copied from the Hugging Face hub: {reason}") from error
        left = sorted(split for split, known in splits.items() if known is None)
        if left:
            logger.info(f"not copied: {', '.join(left)}, which are no training, validation or test rows")
        if "train" not in splits.values():
            raise ValueError(f"{name} has no training split; it has {', '.join(splits)}")
        if folder.exists():  # with other files
            for path in part.iterdir():
                path.replace(folder / path.name)
        else:
            part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _with_label_names(rows: "datasets.Dataset") -> "datasets.Dataset":  # type: ignore[name-defined]  # noqa: F821
    import datasets

    for name, kind in list(rows.features.items()):
        if isinstance(kind, datasets.ClassLabel):
            labels = [None if label is None or label < 0 else kind.int2str(label) for label in rows[name]]
            rows = rows.remove_columns(name).add_column(name, labels)
    return rows


# ------------------------------------------------------------------------------------------------- archives


def read_unzipped(path: Path, limit: int) -> bytes:
    """A file's content, of at most `limit` bytes, unpacked when its name ends in .gz."""
    check_regular(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytes(file.read(limit + 1))
    except DAMAGES as error:
        raise _damaged(path, error) from error
    if len(content) > limit:
        raise ValueError(f"{path} holds more than the {limit:,} bytes that are expected")
    return content


def read_members(path: Path, select: Callable[[str], bool], limit: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Name and content of a tar archive's selected files, in its order. Nothing is unpacked to disk."""
    with reading_archive(path):
        for name, file, size in open_members(path, select, limit):
            content = file.read()
            if len(content) != size:
                raise EOFError
            yield name, content


def read_all_members(
    path: Path, names: Sequence[str], read: Callable[[str, Callable[[int], bytes]], T], limit: int | None = None
) -> list[T]:
    """What `read` makes of each of these members, from its name and its file's readline, until all have come."""
    parts: dict[str, T] = {}
    with reading_archive(path):
        for name, file, _ in open_members(path, names.__contains__, limit):
            parts[name] = read(name, file.readline)
            if len(parts) == len(names):
                break
    for name in names:
        if name not in parts:
            raise ValueError(f"{path} has no member {name}; it is not the published archive")
    return [parts[name] for name in names]


def open_members(
    path: Path, select: Callable[[str], bool], limit: int | None = None
) -> Iterator[tuple[str, IO[bytes], int]]:
    """Name, open file and size of a tar archive's selected files, for files too large for memory.

    A file can be read until the next one is asked for, under `reading_archive`; all of them have at most `limit` bytes,
    by default MAX_BYTES.
    """
    total, limit = 0, limit or MAX_BYTES
    check_regular(path)
    with path.open("rb") as head:
        packed = head.read(2) == b"\x1f\x8b"
    # Unpacked by gzip, which notices when a file ends early; tarfile takes that for the archive's end.
    with (
        gzip.open(path) if packed else path.open("rb") as unpacked,
        reading_archive(path),
        _Bounded(unpacked, path, limit) as content,
        tarfile.open(fileobj=content, mode="r|", tarinfo=_Member) as archive,
    ):
        for member in archive:  # a stream: each byte is unpacked once
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{path} has a member {member.name!r} that leads outside; it is not used")
            total += member.size
            if total > limit:
                raise ValueError(f"{path} unpacks to more than {limit:,} bytes; it is not used")
            archive.members = []  # type: ignore[attr-defined]  # it would remember all of a hundred thousand
            if not select(str(name)):
                continue
            file = archive.extractfile(member) if member.isfile() else None
            if file is None:
                raise ValueError(f"{path}: its member {name} is not a regular file; it is not used")
            yield str(name), file, member.size
        while content.read(CHUNK):
            pass


class _Bounded(io.RawIOBase):
    """An archive's unpacked bytes, its headers and what lies behind its end too, up to twice the limit of its files."""

    def __init__(self, content: Any, path: Path, limit: int) -> None:
        self._content, self._path, self._limit, self._left = content, path, limit, 2 * limit + CHUNK

    def read(self, size: int = -1) -> bytes:
        content: bytes = self._content.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"{self._path} unpacks to more than {self._limit:,} bytes; it is not used")
        return content


class _Member(tarfile.TarInfo):
    """Refuses notes of megabytes, which tarfile would read into the memory at once."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        notes = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
        if self.type in (*notes, tarfile.SOLARIS_XHDTYPE) and self.size > MAX_NOTE:
            raise tarfile.ReadError(f"a note of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


@contextmanager
def reading_archive(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged archive into a ValueError of one sentence."""
    try:
        yield
    except DAMAGES as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged or cut short ({type(error).__name__}); get it again")


# --------------------------------------------------------------------------------------------------- arrays


def read_npy(file: io.BufferedIOBase | IO[bytes], source: str) -> NDArray[Any]:
    """An array in NumPy's format, not pickled. Memory that a false header asks for is reserved, but not used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of headers as Python 2 wrote them, which are read
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False, max_header_size=MAX_HEADER)
    except (*DAMAGES, *NPY_ERRORS) as error:
        reason = str(error).partition("\n")[0][:80] or type(error).__name__
        raise ValueError(f"{source} cannot be read as an array: {reason}") from error
    return array


def decode_image(content: bytes, shape: tuple[int, ...], formats: tuple[str, ...], where: str) -> NDArray[np.uint8]:
    """An encoded image of (height, width) grey pixels, or (height, width, 3) colours."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=formats) as image:
            size = image.size
            if size == (shape[1], shape[0]):  # not decoded before its size is known
                return np.asarray(image.convert("RGB" if shape[2:] == (3,) else "L")).reshape(shape)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where}: the image cannot be decoded ({type(error).__name__})") from error
    raise ValueError(f"{where}: the image has {size[0]}x{size[1]} pixels; {shape[1]}x{shape[0]} are expected")


# -------------------------------------------------------------------------------------------------- pickles


class _Stub:
    """Stands in for a NumPy array or type in a pickle: what it is made from, nothing else."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state  # of an array: (version, shape, dtype, is it in Fortran's order, bytes)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    return str(text).encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Stub,
    ("numpy", "dtype"): _Stub,
    ("_codecs", "encode"): _encode,
} | {
    (f"numpy.{core}.{module}", name): _Stub
    for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer"))
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Forbidden(f"{module}.{name}")
        return _KNOWN[module, name]


class _Forbidden(pickle.UnpicklingError):
    pass


def unpickle(content: bytes, source: str) -> Any:
    """Plain values and byte arrays (as `byte_array` takes them) from a Python 2 or 3 pickle; anything else is refused.

    No code of the pickle's choosing runs, and NumPy itself never sees it.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except _Forbidden as error:
        raise ValueError(f"{source} is not used: it is a pickle that asks for {error}, which no data need") from error
    except Exception as error:  # a pickle's opcodes can go wrong in any way
        raise ValueError(f"{source} is damaged: it is no pickle of arrays ({type(error).__name__})") from error


def byte_array(value: Any, shape: tuple[int, ...], source: str) -> NDArray[np.uint8]:
    """An unpickled array, which must be of unsigned bytes and have this shape."""
    try:
        if value.state is None:  # as NumPy writes it with pickle protocol 5
            raw, kind, actual, order = value.arguments
        else:
            _, actual, kind, order, raw = value.state
        valid = tuple(actual) == shape and kind.arguments[0] in ("u1", "uint8", b"u1") and order in ("C", False)
        array = np.frombuffer(raw, np.uint8).reshape(shape) if valid else None
    except (AttributeError, IndexError, TypeError, ValueError):
        actual, array = "?", None
    if array is None:
        raise ValueError(f"{source}: an array of bytes of shape {shape} is expected; found is shape {actual}")
    return array


# -------------------------------------------------------------------------------------------------- Parquet


def parquet_files(folders: Sequence[Path], split: str) -> list[Path]:
    """A split's Parquet files in the first folder that has any: train.parquet, or the hub's train-00000-of-00002."""
    for folder in folders:
        paths = [folder / f"{split}.parquet"] if (folder / f"{split}.parquet").exists() else []
        paths = paths or sorted(folder.glob(f"{split}-*-of-*.parquet"))
        if paths:
            return paths
    return []


def parquet_pair(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The Parquet files of train and test; none of either, or FileNotFoundError where only one is missing."""
    train, test = (parquet_files(folders, split) for split in ("train", "test"))
    if bool(train) != bool(test):
        there = (train or test)[0]
        raise FileNotFoundError(f"{there} is there, but no {'test' if train else 'train'}.parquet beside it")
    return train, test


def read_columns(
    paths: Sequence[Path], rows: int, names: Sequence[Sequence[str]], optional: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Columns of Parquet files that together have this many rows.

    Each entry of `names` lists the names that one column may have; the first of them is its name in the result.
    """
    count = 0
    result: dict[str, list[Any]] = {name: [] for name in (*(either[0] for either in names), *optional)}
    for path in paths:
        with _open_parquet(path, names, optional) as (file, columns):
            count += file.metadata.num_rows
            if count > rows:
                break
            table = file.read(columns=list(columns.values()))
        for name, column in columns.items():
            result[name] += table.column(column).to_pylist()
    if count != rows:
        raise ValueError(f"{', '.join(map(str, paths))}: {count:,} rows; {rows:,} are expected")
    return {name: values for name, values in result.items() if values or name not in optional}


def read_batches(
    paths: Sequence[Path],
    names: Sequence[Sequence[str]],
    optional: Collection[str] = (),
    *,
    numbers: int = 2**20,
    rows: int = 64,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Columns of Parquet files, as Arrow arrays of some rows at a time, each with its place for messages.

    For columns of lists, which would fill memory as Python objects. Names are as in `read_columns`. Raises ValueError
    when a file's row group has more than `numbers` numbers per row on average, before lists are read.
    """
    for path in paths:
        with _open_parquet(path, names, optional) as (file, columns):
            for group in map(file.metadata.row_group, range(file.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    if column.num_values > numbers * max(group.num_rows, 1):
                        raise ValueError(f"{path}: the lists of column {column.path_in_schema} are too long")
            first = 0
            for batch in file.iter_batches(rows, columns=list(columns.values())):
                yield f"{path}, rows from {first}", {name: batch.column(column) for name, column in columns.items()}
                first += batch.num_rows


@contextmanager
def _open_parquet(
    path: Path, names: Sequence[Sequence[str]], optional: Collection[str]
) -> Iterator[tuple[Any, dict[str, str]]]:
    """The file, and each column's name in it by the first of its possible names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_regular(path)
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            columns = {name: name for name in optional if name in present}
            for either in names:
                name = next((name for name in either if name in present), None)
                if name is None:
                    raise ValueError(f"{path} has no column {' or '.join(either)}; it has {', '.join(present)}")
                columns[either[0]] = name
            yield file, columns
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError | IsADirectoryError):
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        raise ValueError(f"{path} is damaged or no Parquet file ({type(error).__name__}); get it again") from error


def class_numbers(labels: Sequence[Any], count: int, source: str) -> NDArray[np.int64]:
    """Labels as whole numbers in [0, count)."""
    for i, label in enumerate(labels):
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < count:
            raise ValueError(f"{source}, row {i}: the label is {label!r}; 0 to {count - 1} are expected")
    return np.array(labels, np.int64)


# --------------------------------------------------------------------------------------------------- splits


def torch_permutations(seed: int) -> Callable[[int], NDArray[np.int64]]:
    """Permutations drawn one after the other from one torch generator, as in the published code."""
    import torch  # its permutations are not NumPy's

    generator = torch.Generator().manual_seed(seed)
    return lambda n: torch.randperm(n, generator=generator).numpy()


def published_split(n: int, held: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """n - held and held rows, as torch's random_split draws them for the published splits."""
    order = torch_permutations(seed)(n)
    return order[: n - held], order[n - held :]


def published_thirds(
    n: int, classes: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """70, 15 and 15 % of n rows as the S4 code draws them with scikit-learn (seeds 0 and 1), by classes if given."""
    from sklearn.model_selection import train_test_split  # in the function: importing it takes a second

    train, rest = train_test_split(np.arange(n), train_size=0.7, random_state=0, stratify=classes)
    strata = None if classes is None else classes[rest]
    val, test = train_test_split(rest, train_size=0.5, random_state=1, stratify=strata)
    return train, val, test
