"""What tasks that read files share: finding, downloading, archives, pickles of arrays, Parquet, the published split.

Whatever is wrong with a file becomes one sentence, as ValueError or FileNotFoundError. Nothing in a file is trusted:
archives are read by name and never unpacked, pickles may hold arrays and plain values only.
"""

import gzip
import hashlib
import io
import os
import pickle
import tarfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 2**31  # of a download or an unpacked archive, where a task says nothing else
CHUNK = 2**18
TIMEOUT = 60.0  # seconds without a byte

# The Long Range Arena's archive, a tar.gz in spite of its name; it has no published checksum.
LRA_ARCHIVE = "lra_release.gz"
LRA_ADDRESS = f"https://storage.googleapis.com/long-range-arena/{LRA_ARCHIVE}"
LRA_FOLDER = "lra_release/lra_release"  # in the archive; the outer lra_release has second copies of some sets
LRA_BYTES = 2**35  # that it may unpack to; it has 18.6e9

Say = Callable[[str], None]


# -------------------------------------------------------------------------------------------------- finding


def places(raw: Path, name: str) -> list[Path]:
    """Where a data set's files are looked for: the folder of its name in the data folder, and that folder itself."""
    try:
        os.scandir(raw).close()
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ValueError(f"the data folder {raw} is a file; set --data-dir or SPT_DATA_DIR to a folder") from None
    return [place for place in (raw / name, raw) if place.is_dir()]


def first(folders: Sequence[Path], name: str) -> Path | None:
    """The first folder's file or folder of this name."""
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def missing(what: str, raw: Path, wanted: Sequence[str], fetch: str) -> FileNotFoundError:
    """`fetch`: the command that downloads it."""
    there = "" if raw.is_dir() else ", which does not exist"
    return FileNotFoundError(
        f"{what} is not in the data folder {raw}{there}: get it with `{fetch}`, or put {' or '.join(wanted)} there "
        "(another folder: --data-dir or SPT_DATA_DIR)"
    )


def plain(path: Path) -> None:
    """Raise ValueError for what is there but no file: reading a pipe would wait for ever."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file; remove it")


def cut_short(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged or cut short ({type(error).__name__}); get it again")


# ---------------------------------------------------------------------------------------------- downloading


class Download(NamedTuple):
    """A published file: the same content at each of these addresses."""

    urls: tuple[str, ...]
    checksum: str  # "md5:…" or "sha256:…"
    limit: int | None = None  # not more bytes are received; MAX_BYTES

    @property
    def name(self) -> str:
        return self.urls[0].rpartition("/")[2]


def checksum(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def verify(path: Path, expected: str) -> None:
    """Raise ValueError unless the file has this checksum."""
    plain(path)
    kind = expected.partition(":")[0]
    found = checksum(path, kind)
    if found != expected:
        raise ValueError(
            f"{path} is not the published file: its {kind} is {found.partition(':')[2]}, expected is "
            f"{expected.partition(':')[2]}; remove it and get it again"
        )


def download(wanted: Download, folder: Path, say: Say) -> Path:
    """Get a file into a folder, checked, under its name only when complete; one that is there already is checked.

    Raises ValueError when no address gives it, OSError when it cannot be written.
    """
    path = folder / wanted.name
    if path.exists():
        verify(path, wanted.checksum)
        say(f"{path} is there already, and whole")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{wanted.name}.part"
    reasons = []
    try:
        for url in wanted.urls:
            try:
                _receive(url, beside, say, wanted.limit or MAX_BYTES)
                found = checksum(beside, wanted.checksum.partition(":")[0])
                if found != wanted.checksum:
                    raise _Failed(f"what arrives has {found}, expected is {wanted.checksum}")
            except _Failed as error:
                reasons.append(f"{url}: {error}")
                continue
            beside.replace(path)
            return path
    finally:
        beside.unlink(missing_ok=True)
    raise ValueError(
        f"{wanted.name} cannot be downloaded ({'; '.join(reasons)}); repeat later, or put it into {folder}"
    )


class _Failed(Exception):
    """The other side's fault, in words."""


def _receive(url: str, path: Path, say: Say, limit: int) -> None:
    with path.open("wb") as file:
        try:
            response = urlopen(Request(url, headers={"User-Agent": "spt"}), timeout=TIMEOUT)
        except (OSError, HTTPException) as error:  # URLError and HTTPError among them
            raise _Failed(str(getattr(error, "reason", None) or error)) from error
        with response:
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
            name = url.rpartition("/")[2]
            say(f"getting {url}" + (f", {total / 1e6:,.1f} MB" if total else ""))
            done, said = 0, time.monotonic()
            while True:
                try:
                    chunk = response.read(CHUNK)
                except (OSError, HTTPException) as error:
                    raise _Failed(f"the connection broke after {done:,} bytes ({type(error).__name__})") from error
                if not chunk:
                    break
                file.write(chunk)
                done += len(chunk)
                if done > limit:
                    raise _Failed(f"more than {limit:,} bytes arrive")
                if time.monotonic() - said > 10:
                    share = f" of {total / 1e6:,.1f} MB" if total else " MB"
                    say(f"{name}: {done / 1e6:,.1f}{share}")
                    said = time.monotonic()
        if total is not None and done < total:
            raise _Failed(f"the connection ended after {done:,} of {total:,} bytes")


# ------------------------------------------------------------------------------------------------- archives


def unzipped(path: Path, limit: int) -> bytes:
    """A file's content, of at most `limit` bytes, unpacked when its name ends in .gz."""
    plain(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytes(file.read(limit + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise cut_short(path, error) from error
    if len(content) > limit:
        raise ValueError(f"{path} holds more than the {limit:,} bytes that are expected")
    return content


def members(path: Path, wanted: Callable[[str], bool], limit: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Name and content of a tar archive's wanted plain files, in its order. Nothing is unpacked to disk."""
    with sound(path):
        for name, file, size in streams(path, wanted, limit):
            content = file.read()
            if len(content) != size:
                raise EOFError
            yield name, content


def streams(
    path: Path, wanted: Callable[[str], bool], limit: int | None = None
) -> Iterator[tuple[str, IO[bytes], int]]:
    """Name, open file and size of a tar archive's wanted plain files, for those too large for the memory.

    A file can be read until the next one is asked for, under `sound`. The archive may unpack to `limit` bytes, by
    default MAX_BYTES.
    """
    total, limit = 0, limit or MAX_BYTES
    plain(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    # Unpacked by gzip, which notices when a file ends early; tarfile takes that for the archive's end.
    with (
        gzip.open(path) if packed else path.open("rb") as content,
        sound(path),
        tarfile.open(fileobj=content, mode="r|" if packed else "r|*") as archive,
    ):
        for member in archive:  # a stream: each byte is unpacked once
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{path} has a member {member.name!r} that leads outside; it is not used")
            total += member.size
            if total > limit:
                raise ValueError(f"{path} unpacks to more than {limit:,} bytes; it is not used")
            archive.members = []  # type: ignore[attr-defined]  # it would remember all of a hundred thousand
            if not wanted(str(name)):
                continue
            held = archive.extractfile(member) if member.isfile() else None
            if held is None:
                raise ValueError(f"{path}: its member {name} is no plain file; it is not used")
            yield str(name), held, member.size
        while content.read(CHUNK):
            pass


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """What reading an archive raises when it is damaged becomes a ValueError, in words."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise cut_short(path, error) from error


# -------------------------------------------------------------------------------------------------- pickles


class _Array:
    """Stands for a NumPy array in a pickle: shape and bytes, nothing else."""

    def __init__(self, *ignored: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state  # (version, shape, dtype, is it in Fortran's order, bytes)


class _Buffer(_Array):
    """The same as NumPy writes it with pickle protocol 5: (bytes, dtype, shape, order)."""

    def __init__(self, raw: Any, dtype: Any, shape: Any, order: Any) -> None:
        self.state = (1, shape, dtype, order == "F", raw)


class _Type:
    def __init__(self, code: Any = "", *ignored: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    return str(text).encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
} | {
    (f"numpy.{core}.{module}", name): kind
    for core in ("core", "_core")
    for module, name, kind in (("multiarray", "_reconstruct", _Array), ("numeric", "_frombuffer", _Buffer))
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Forbidden(f"{module}.{name}")
        return _KNOWN[module, name]


class _Forbidden(pickle.UnpicklingError):
    pass


def unpickle(content: bytes, source: str) -> Any:
    """Plain values and byte arrays (as `bytes_of` takes them) of a pickle of Python 2 or 3; anything else is refused.

    No code of the pickle's choosing runs, and NumPy itself never sees it.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except _Forbidden as error:
        raise ValueError(f"{source} is not used: it is a pickle that asks for {error}, which no data need") from error
    except Exception as error:  # a pickle's opcodes can go wrong in any way
        raise ValueError(f"{source} is damaged: it is no pickle of arrays ({type(error).__name__})") from error


def bytes_of(value: Any, shape: tuple[int, ...], source: str) -> NDArray[np.uint8]:
    """An unpickled array as what it must be: unsigned bytes of this shape."""
    try:
        _, found, kind, fortran, raw = value.state
        sound = tuple(found) == shape and kind.code in ("u1", "uint8") and not fortran
        array = np.frombuffer(raw, np.uint8).reshape(shape) if sound else None
    except (AttributeError, TypeError, ValueError):
        found, array = "?", None
    if array is None:
        raise ValueError(f"{source}: an array of bytes of shape {shape} is expected; found is shape {found}")
    return array


# -------------------------------------------------------------------------------------------------- Parquet


def parquets(folders: Sequence[Path], split: str) -> list[Path]:
    """A split's Parquet files in the first folder that has any: train.parquet, or the hub's train-00000-of-00002."""
    for folder in folders:
        found = [folder / f"{split}.parquet"] if (folder / f"{split}.parquet").exists() else []
        found = found or sorted(folder.glob(f"{split}-*-of-*.parquet"))
        if found:
            return found
    return []


def columns(
    paths: Sequence[Path], rows: int, wanted: Sequence[Sequence[str]], optional: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Columns of Parquet files that together have this many rows.

    Each entry of `wanted` lists the names one column may have, and is called by the first of them in the answer.
    """
    counted = 0
    found: dict[str, list[Any]] = {name: [] for name in (*(names[0] for names in wanted), *optional)}
    for path in paths:
        with _parquet(path) as file:
            taken = _taken(path, file, wanted, optional)
            counted += file.metadata.num_rows
            if counted > rows:
                break
            table = file.read(columns=list(taken.values()))
        for name, column in taken.items():
            found[name] += table.column(column).to_pylist()
    if counted != rows:
        raise ValueError(f"{', '.join(map(str, paths))}: {counted:,} rows; {rows:,} are expected")
    return {name: values for name, values in found.items() if values or name not in optional}


def batches(
    paths: Sequence[Path],
    wanted: Sequence[Sequence[str]],
    optional: Collection[str] = (),
    numbers: int = 2**20,
    rows: int = 64,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Columns of Parquet files, as Arrow arrays of some rows at a time, with a name of their place for complaints.

    For columns of lists, which as Python objects would fill the memory. Names are as in `columns`. Raises ValueError
    when a file's row group has more than `numbers` numbers a row on average: lists are not read before that is known.
    """
    for path in paths:
        with _parquet(path) as file:
            taken = _taken(path, file, wanted, optional)
            about = file.metadata
            for group in map(about.row_group, range(about.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    if column.num_values > numbers * max(group.num_rows, 1):
                        raise ValueError(
                            f"{path}: column {column.path_in_schema} has absurdly long lists; it is not used"
                        )
            first = 0
            for batch in file.iter_batches(rows, columns=list(taken.values())):
                yield f"{path}, rows from {first}", {name: batch.column(column) for name, column in taken.items()}
                first += batch.num_rows


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain(path)
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError | IsADirectoryError):
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        raise ValueError(f"{path} is damaged or no Parquet file ({type(error).__name__}); get it again") from error


def _taken(path: Path, file: Any, wanted: Sequence[Sequence[str]], optional: Collection[str]) -> dict[str, str]:
    """The file's name of each column, by our own."""
    there = file.schema_arrow.names
    taken = {}
    for names in wanted:
        name = next((name for name in names if name in there), None)
        if name is None:
            raise ValueError(f"{path} has no column {' or '.join(names)}; it has {', '.join(there)}")
        taken[names[0]] = name
    return taken | {name: name for name in optional if name in there}


def classes(labels: Sequence[Any], count: int, source: str) -> NDArray[np.int64]:
    """Labels as whole numbers in [0, count)."""
    for i, label in enumerate(labels):
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < count:
            raise ValueError(f"{source}, row {i}: the label is {label!r}; 0 to {count - 1} are expected")
    return np.array(labels, np.int64)


# --------------------------------------------------------------------------------------------------- splits


def published_split(n: int, held: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows torch's random_split gives to parts of n - held and held rows: how published splits were drawn."""
    import torch  # here alone: NumPy draws other permutations

    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
    return order[: n - held], order[n - held :]


def published_thirds(
    n: int, classes: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """70, 15 and 15 % of n rows as the S4 code draws them with scikit-learn (seeds 0 and 1), by classes if given."""
    from sklearn.model_selection import train_test_split  # here alone: it takes a second

    train, rest = train_test_split(np.arange(n), train_size=0.7, random_state=0, stratify=classes)
    strata = None if classes is None else classes[rest]
    val, test = train_test_split(rest, train_size=0.5, random_state=1, stratify=strata)
    return train, val, test
