"""Real data sets: official files and copies, what is refused, `spt data`, and the store under load."""

import gzip
import hashlib
import http.server
import io
import itertools
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny import ROOT, environment, load, own_task, recipe_file, run, spt, spt_job
from typer.testing import CliRunner

import spt_cli
from spt.config.job import Job
from spt.config.recipe import Part
from spt.data import cache, fingerprints
from spt.data.batching import collate
from spt.data.dataset import open_task
from spt.data.fingerprints import overlap, rows_hash
from spt.data.source import cache_dir
from spt.errors import CheckpointError, SptError
from spt.tasks import files, images, text
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens, Values, describe
from spt.tasks.files import Download
from spt.training.checkpoint import spec

CIFAR_ROWS, MNIST_ROWS, REVIEWS = (50, 20), (40, 10), 20


# ------------------------------------------------------------------------------ small files in the official formats


def photographs(n: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, n).tolist()


TRAIN, TEST = photographs(CIFAR_ROWS[0]), photographs(CIFAR_ROWS[1], 1)


def planes(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), 3072)


def python2(data: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes Python 2.7 and its NumPy wrote: byte strings everywhere."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    rows, columns = (b"J" + struct.pack("<i", side) for side in data.shape)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff" * 1
    kind += b"J\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01" + rows + columns + b"\x86" + kind + b"\x89" + text(data.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + state + text(b"labels") + numbers + b"u."


def python3(protocol: int) -> Callable[[np.ndarray, list[int]], bytes]:
    return lambda data, labels: pickle.dumps({"data": data, "labels": labels, "filenames": ["x.png"]}, protocol)


def batches(write: Callable[[np.ndarray, list[int]], bytes] = python2) -> dict[str, bytes]:
    each = CIFAR_ROWS[0] // 5
    parts = [(TRAIN[0][i : i + each], TRAIN[1][i : i + each]) for i in range(0, CIFAR_ROWS[0], each)]
    return {
        name: write(planes(pixels), labels)
        for name, (pixels, labels) in zip(images.BATCHES, [*parts, TEST], strict=True)
    }


def tar(members: dict[str, bytes], link: str | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
    return file.getvalue()


def cifar_members() -> dict[str, bytes]:
    return {f"{images.FOLDER}/batches.meta": b"names", **{f"{images.FOLDER}/{k}": v for k, v in batches().items()}}


def cifar_folder(raw: Path, write: Callable[[np.ndarray, list[int]], bytes] = python2) -> Path:
    folder = raw / images.FOLDER
    folder.mkdir(parents=True)
    for name, content in batches(write).items():
        (folder / name).write_bytes(content)
    return folder


def image_bytes(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, kind)
    return file.getvalue()


def write_parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def cifar_parquet(raw: Path, kind: str = "PNG", **changes: Any) -> Path:
    """train.parquet and test.parquet in raw/cifar10; changes replace columns of train."""
    for name, (pixels, labels) in (("train", TRAIN), ("test", TEST)):
        columns = {"image": [image_bytes(p, kind) for p in pixels], "label": labels}
        if name == "train":
            columns = {key: value for key, value in {**columns, **changes}.items() if value is not None}
        write_parquet(raw / "cifar10" / f"{name}.parquet", **columns)
    return raw / "cifar10"


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist_files() -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    arrays = []
    for n in MNIST_ROWS:
        arrays += [rng.integers(0, 256, (n, 28, 28)).astype(np.uint8), rng.integers(0, 10, n).astype(np.uint8)]
    return {name: idx(array) for name, array in zip(images.IDX_SUMS, arrays, strict=True)}


def review(split: str, kind: str, i: int) -> str:
    return f"{'A' if kind == 'pos' else 'B'} film, {split} number {i}.<br />" + "çé\u4e2d"[i % 3] * i


def imdb_members() -> dict[str, bytes]:
    found = {"aclImdb/README": b"about", "aclImdb/train/unsup/0_0.txt": b"no label"}
    for split, kind in itertools.product(("train", "test"), text.KINDS):
        for i in reversed(range(REVIEWS // 2)):
            found[f"aclImdb/{split}/{kind}/{i}_{7 if kind == 'pos' else 2}.txt"] = review(split, kind, i).encode()
    return found


def imdb_folder(raw: Path) -> Path:
    for name, content in imdb_members().items():
        path = raw / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return raw / "aclImdb"


def imdb_parquet(raw: Path, order: Any = slice(None), **changes: Any) -> Path:
    for split in ("train", "test"):
        texts = np.array([review(split, kind, i) for kind in text.KINDS for i in range(REVIEWS // 2)], object)
        columns = {"text": texts[order].tolist(), "label": np.repeat([0, 1], REVIEWS // 2)[order]}
        if split == "train":
            columns = {key: value for key, value in {**columns, **changes}.items() if value is not None}
        write_parquet(raw / "imdb" / f"{split}.parquet", **columns)
    return raw / "imdb"


PATCH = f"""
import hashlib
from spt.tasks import images, text
from spt.tasks.files import Download
images.KNOWN["cifar10"] = images.KNOWN["cifar10"]._replace(rows={CIFAR_ROWS})
images.KNOWN["mnist"] = images.KNOWN["mnist"]._replace(rows={MNIST_ROWS})
text.ROWS = {REVIEWS}
"""


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, in use; data sets are as small as the files above."""
    folder = tmp_path / "raw"
    folder.mkdir()
    monkeypatch.setenv("SPT_DATA_DIR", str(folder))
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    known = dict(images.KNOWN)
    known["cifar10"] = known["cifar10"]._replace(rows=CIFAR_ROWS)
    known["mnist"] = known["mnist"]._replace(rows=MNIST_ROWS)
    monkeypatch.setattr(images, "KNOWN", known)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in mnist_files().items()}
    monkeypatch.setattr(images, "IDX_SUMS", sums)
    monkeypatch.setattr(text, "ROWS", REVIEWS)
    return folder


def publish(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, content: bytes, *urls: str) -> None:
    """Make this content the published archive of a module."""
    old: Download = getattr(module, name)
    new = Download(urls or old.urls, f"sha256:{hashlib.sha256(content).hexdigest()}")
    monkeypatch.setattr(module, name, new)
    if module is images:
        monkeypatch.setitem(images.KNOWN, "cifar10", images.KNOWN["cifar10"]._replace(downloads=(new,)))


def cli(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of the command, in this process."""
    done = CliRunner().invoke(spt_cli.app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def by_id(split: Split) -> dict[str, bytes]:
    return {str(split.ids[i]): split.row(i).tobytes() for i in range(len(split))}


def rows(data: TaskData) -> dict[str, bytes]:
    return by_id(data.train) | by_id(data.val) | by_id(data.test)


# ------------------------------------------------------------------------------------------------------- CIFAR-10


@pytest.mark.parametrize("write", [python2, python3(2), python3(4), python3(5)], ids=["py2", "p2", "p4", "p5"])
def test_cifar_batches_of_any_python(raw: Path, write: Callable[[np.ndarray, list[int]], bytes]) -> None:
    cifar_folder(raw, write)
    data = open_task(Part(name="images", grey=False))
    assert data.notes == () and data.length == 1024 and data.target == Classes(10)
    assert data.input == Values(3, images.COLOUR.mean, images.COLOUR.std, levels=256)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 45, "val": 5, "test": 20}
    found = rows(data)
    for name, (pixels, labels) in (("train", TRAIN), ("test", TEST)):
        assert all(found[f"{name}-{i}"] == pixels[i].tobytes() for i in range(len(labels)))
    for split, labels in ((data.train, TRAIN[1]), (data.val, TRAIN[1]), (data.test, TEST[1])):
        assert [labels[int(name.partition("-")[2])] for name in split.ids.tolist()] == split.targets.tolist()


def test_every_source_gives_the_same_rows(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar(cifar_members())
    publish(monkeypatch, images, "CIFAR", archive)
    hashes = {}
    for name in ("folder", "archive", "parquet", "shuffled", "hub"):
        place = tmp_path / name
        place.mkdir()
        monkeypatch.setenv("SPT_DATA_DIR", str(place))
        if name == "folder":
            cifar_folder(place / "cifar10")
        elif name == "archive":
            (place / images.CIFAR.name).write_bytes(archive)
        elif name == "parquet":
            cifar_parquet(place)
        elif name == "shuffled":  # the column index gives the official order
            order = np.random.default_rng(0).permutation(CIFAR_ROWS[0])
            encoded = [image_bytes(TRAIN[0][i]) for i in order]
            cifar_parquet(place, image=encoded, label=[TRAIN[1][i] for i in order], index=order)
        else:
            folder = cifar_parquet(place)
            for split, (pixels, labels) in (("train", TRAIN), ("test", TEST)):
                (folder / f"{split}.parquet").unlink()
                cells = [{"bytes": image_bytes(p), "path": None} for p in pixels]
                for k, part in enumerate((slice(0, 7), slice(7, None))):
                    write_parquet(folder / f"{split}-0000{k}-of-00002.parquet", img=cells[part], label=labels[part])
        hashes[name] = rows_hash(open_task(Part(name="images")))
    assert len(set(hashes.values())) == 1, hashes


def test_official_files_come_before_copies(raw: Path) -> None:
    cifar_parquet(raw, "JPEG")
    lossy = open_task(Part(name="images"))
    assert lossy.notes == ("CIFAR-10 from JPEG copies, which are lossy: not the original pixels",)
    cifar_folder(raw)
    exact = open_task(Part(name="images"))
    assert exact.notes == () and rows_hash(exact) != rows_hash(lossy)


def test_grey_colour_tokens_and_sizes(raw: Path) -> None:
    cifar_folder(raw)
    grey = open_task(Part(name="images"))
    assert grey.input == Values(1, (122.6,), (61.0,), levels=256)
    expected = np.asarray(Image.fromarray(TRAIN[0][7]).convert("L"))
    assert rows(grey)["train-7"] == expected.tobytes()
    tokens = open_task(Part(name="images", pixels="tokens"))
    assert tokens.input == Tokens(256) and rows(tokens) == rows(grey)
    small = open_task(Part(name="images", size=8, grey=False))
    assert small.length == 64 and "8x8" in small.notes[0] and "published" in small.notes[0]
    mean = TRAIN[0][7].reshape(8, 4, 8, 4, 3).mean(axis=(1, 3))
    assert rows(small)["train-7"] == np.floor(mean + 0.5).astype(np.uint8).tobytes()


def test_validation_by_the_published_seed_the_last_tenth_or_the_test_split(raw: Path) -> None:
    cifar_folder(raw)
    parts = torch.utils.data.random_split(range(50), [45, 5], generator=torch.Generator().manual_seed(42))
    carved = open_task(Part(name="images"))
    for split, part in zip((carved.train, carved.val), parts, strict=True):
        assert split.ids.tolist() == [f"train-{i}" for i in part.indices]
    last = open_task(Part(name="images", validation="last"))
    assert last.val.ids.tolist() == [f"train-{i}" for i in range(45, 50)] and len(last.train) == 45
    test = open_task(Part(name="images", validation="test"))
    assert test.val.ids.tolist() == test.test.ids.tolist() and len(test.train) == 50
    assert any("validation is the test split" in note for note in test.notes)


# ---------------------------------------------------------------------------------------------------------- MNIST


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_files(raw: Path, zipped: bool) -> None:
    for name, content in mnist_files().items():
        place = raw / "MNIST" / "raw" if zipped else raw / "mnist"
        place.mkdir(parents=True, exist_ok=True)
        (place / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    data = open_task(Part(name="images", dataset="mnist"))
    assert data.input == Values(1, (0.0,), (255.0,), levels=256) and data.length == 784 and data.notes == ()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 36, "val": 4, "test": 10}
    pixels = np.frombuffer(mnist_files()["t10k-images-idx3-ubyte"], np.uint8, offset=16).reshape(10, 784)
    assert all(by_id(data.test)[f"test-{i}"] == pixels[i].tobytes() for i in range(10))
    permuted = open_task(Part(name="images", dataset="mnist", permuted=True))
    order = [int(f"{i:010b}"[::-1], 2) for i in range(1024)]
    order = [i for i in order if i < 784]
    assert by_id(permuted.test)["test-3"] == pixels[3][order].tobytes()


@pytest.mark.parametrize("n", [1, 4, 196, 784, 1024])
def test_bit_reversal_is_a_permutation(n: int) -> None:
    assert sorted(images.bit_reversal(n).tolist()) == list(range(n))


# ----------------------------------------------------------------------------------------------------------- text


def decoded(data: TaskData, split: Split, i: int) -> str:
    codes = split.row(i)
    assert codes[-1] == text.END
    return "".join(map(chr, codes[:-1]))


def test_reviews_of_every_source(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their splits do not depend on the order they came in."""
    archive = tar(imdb_members())
    publish(monkeypatch, text, "ARCHIVE", archive)
    contents = []
    for name in ("folder", "archive", "parquet", "other order"):
        place = tmp_path / name
        place.mkdir()
        monkeypatch.setenv("SPT_DATA_DIR", str(place))
        if name == "folder":
            imdb_folder(place)
        elif name == "archive":
            (place / "imdb").mkdir()
            (place / "imdb" / text.ARCHIVE.name).write_bytes(archive)
        else:
            imdb_parquet(place, np.random.default_rng(0).permutation(REVIEWS) if name != "parquet" else slice(None))
        data = open_task(Part(name="text", min_count=2))
        contents.append(
            {part: [decoded(data, split, i) for i in range(len(split))] for part, split in data.splits.items()}
        )
        if name != "other order":
            assert len(data.train) == 18 and len(data.val) == 2
            for split in data.splits.values():
                for i, row in enumerate(split.ids.tolist()):
                    part, number = row.split("-")
                    kind, k = divmod(int(number), REVIEWS // 2)
                    assert decoded(data, split, i) == review(part, text.KINDS[kind], k) and split.targets[i] == kind
    assert all(one == contents[0] for one in contents[1:])


def test_reviews_are_cut_and_ended(raw: Path) -> None:
    imdb_folder(raw)
    data = open_task(Part(name="text", max_length=6, min_count=1))
    assert data.length == 6 and set(data.train.lengths.tolist()) == {6}
    assert {decoded(data, data.train, i) for i in range(18)} == {"A fil", "B fil"}
    assert data.train.values.dtype == np.uint16


def test_the_vocabulary_is_of_the_training_rows_in_use(raw: Path) -> None:
    imdb_folder(raw)
    whole = open_task(Part(name="text", min_count=2))
    part = open_task(Part(name="text", min_count=2, subset_fraction=0.2))
    few = open_task(Part(name="text", min_count=2, max_rows=4))
    for data in (whole, part, few):
        counted: dict[str, int] = {}
        for i in range(len(data.train)):
            for letter in decoded(data, data.train, i):
                counted[letter] = counted.get(letter, 0) + 1
        ranked = sorted((-n, letter) for letter, n in counted.items() if n >= 2)
        assert isinstance(data.input, Tokens)
        assert data.input.codes == (-1, -1, 0, *(ord(letter) for _, letter in ranked))
        assert data.input.vocab == 3 + len(ranked) and data.input.unknown == 1
    assert len({data.input for data in (whole, part, few)}) == 3
    assert set(part.train.fingerprints.tolist()) < set(whole.train.fingerprints.tolist())
    assert len(list((cache_dir() / "tasks").glob("text-*"))) == 1  # one preparation serves them all


def test_batches_hold_tokens_of_the_vocabulary() -> None:
    tokens = Tokens(5, (-1, -1, 0, ord("b"), ord("a")), unknown=1)
    split = Split.from_rows([text.encode("abz", 9), text.encode("b\u4e2d", 9), text.encode("", 9)], np.array([0, 1, 0]))
    batch = collate(split, np.arange(3), tokens, Classes(2))
    assert batch.x.tolist() == [[4, 3, 1, 2], [3, 1, 2, 0], [2, 0, 0, 0]]
    assert text.encode("a\0b", 9).tolist() == [97, 0xFFFD, 98, 0]


def test_limits_hold_both_classes(raw: Path) -> None:
    imdb_folder(raw)
    data = open_task(Part(name="text", min_count=1, max_rows=8))
    assert all(len(set(split.targets.tolist())) == 2 for split in (data.train, data.test))


def test_the_published_protocol_validates_on_the_test_split(raw: Path) -> None:
    imdb_folder(raw)
    data = open_task(Part(name="text", min_count=1, validation="test"))
    assert len(data.train) == 20 and data.val.ids.tolist() == data.test.ids.tolist()
    assert data.notes == ("validation is the test split: scores of the selected checkpoint are optimistic",)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Tokens(3, (-1, 5, 5), 0), "twice"),
        (lambda: Tokens(3, (-1, 5), 0), "2 entries for 3"),
        (lambda: Tokens(2, (-1, 2**24), 0), "outside"),
        (lambda: Tokens(2, (-2, 4), 0), "outside"),
        (lambda: Tokens(2, (3, 4)), "go together"),
        (lambda: Tokens(2, None, 1), "go together"),
        (lambda: Tokens(2, (3, 4), 2), "no token"),
    ],
)
def test_wrong_codes_are_refused(make: Callable[[], Tokens], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_plain_tokens_are_described_as_before() -> None:
    assert describe(Tokens(17)) == spec(Tokens(17)) == {"kind": "Tokens", "vocab": 17}
    coded = Tokens(3, (-1, 0, 7), unknown=0)
    assert spec(coded) == {"kind": "Tokens", "vocab": 3, "codes": [-1, 0, 7], "unknown": 0}
    assert Tokens(3) != coded and str(coded) == "Tokens(vocab=3)"
    assert coded.ids(np.array([7, 0, 3, 999], np.uint16)).tolist() == [2, 1, 0, 0]
    for kind in (np.uint8, np.uint16):  # the largest number of the storage type can be a code
        top = np.iinfo(kind).max
        assert Tokens(2, (-1, int(top)), 0).ids(np.array([top, top - 1], kind)).tolist() == [1, 0]


def test_text_and_images_train_in_both_stages(raw: Path, tmp_path: Path, runs_dir: Path) -> None:
    imdb_folder(raw)
    cifar_folder(raw)
    objective = {"name": "masked", "ratio": 0.5, "loss": "cross_entropy"}
    for task in ({"name": "text", "min_count": 2, "max_length": 20}, {"name": "images", "size": 4}):
        result = run(spt_job(load(str(recipe_file(tmp_path, task=task, pretrain__objective=objective)))), runs_dir)
        assert result.test is not None and 0 <= result.test["accuracy"] <= 1


def test_weights_of_another_vocabulary_are_refused_in_short(raw: Path, tmp_path: Path, runs_dir: Path) -> None:
    imdb_folder(raw)
    task = {"name": "text", "min_count": 3, "max_length": 40}
    one = load(str(recipe_file(tmp_path, task=task)))
    other = load(str(recipe_file(tmp_path, task={**task, "subset_fraction": 0.5})))
    assert open_task(one.recipe.task).input != open_task(other.recipe.task).input
    job = spt_job(one)
    run(job, runs_dir)
    with pytest.raises(CheckpointError, match="another vocabulary") as refused:
        run(Job(other, "finetune", 0, job.parent), runs_dir)
    assert len(str(refused.value)) < 500


# --------------------------------------------------------------------------------------------- the real data sets


def test_grey_is_pillows_to_the_bit(data_dir: Path) -> None:
    table = pq.read_table(data_dir / "cifar10" / "exact_test.parquet")
    pictures = [Image.open(io.BytesIO(cell)).convert("RGB") for cell in table["image"].to_pylist()]
    expected = np.stack([np.asarray(picture.convert("L")) for picture in pictures])
    assert np.array_equal(images.grey(np.stack([np.asarray(p) for p in pictures]))[..., 0], expected)


@pytest.mark.slow
def test_real_cifar(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPT_DATA_DIR", str(data_dir))
    data = open_task(Part(name="images"))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 45_000, "val": 5_000, "test": 10_000}
    assert np.bincount(np.concatenate([data.train.targets, data.val.targets])).tolist() == [5000] * 10
    assert np.bincount(data.test.targets).tolist() == [1000] * 10
    order = torch.randperm(50_000, generator=torch.Generator().manual_seed(42)).tolist()
    assert [*data.train.ids.tolist(), *data.val.ids.tolist()] == [f"train-{i}" for i in order]
    first = pq.read_table(data_dir / "cifar10" / "test.parquet").slice(0, 1).to_pylist()[0]
    picture = Image.open(io.BytesIO(first["image"])).convert("RGB").convert("L")
    assert data.test.row(0).tobytes() == picture.tobytes() and data.test.targets[0] == first["label"]
    pixels = data.train.values.astype(np.float32)
    assert abs(pixels.mean() - 122.6) < 1.5 and abs(pixels.std() - 61.0) < 2.0
    assert data.notes == ("CIFAR-10 from JPEG copies, which are lossy: not the original pixels",)
    exact = pq.read_table(data_dir / "cifar10" / "exact_test.parquet")
    row = exact["index"][0].as_py()
    original = np.asarray(Image.open(io.BytesIO(exact["image"][0].as_py())).convert("L"), np.float64)
    assert np.abs(original.reshape(-1) - data.test.row(row)[:, 0]).mean() < 12


def test_real_mnist_is_the_official_one(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as idx files, the Parquet copy has the published checksums, and gives the same rows."""
    monkeypatch.setenv("SPT_DATA_DIR", str(data_dir))
    data = open_task(Part(name="images", dataset="mnist"))
    assert np.bincount(np.concatenate([data.train.targets, data.val.targets])).tolist() == [
        *(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    ]
    for name, file in (("train", "train"), ("test", "t10k")):
        table = pq.read_table(data_dir / "mnist" / f"{name}.parquet")
        pixels = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(-1, 28, 28)
        (tmp_path / f"{file}-images-idx3-ubyte").write_bytes(idx(pixels))
        (tmp_path / f"{file}-labels-idx1-ubyte").write_bytes(idx(table["label"].to_numpy().astype(np.uint8)))
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path))
    assert rows_hash(open_task(Part(name="images", dataset="mnist"))) == rows_hash(data)


def test_real_reviews(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPT_DATA_DIR", str(data_dir))
    data = open_task(Part(name="text", validation="test"))
    assert isinstance(data.input, Tokens) and data.input.vocab == 134 and data.length == 4096
    assert [len(split) for split in data.splits.values()] == [25_000] * 3
    assert np.bincount(data.train.targets).tolist() == np.bincount(data.test.targets).tolist() == [12_500] * 2
    first = pq.read_table(data_dir / "imdb" / "train.parquet").slice(12_500, 1).to_pylist()[0]
    assert first["text"].startswith("Bromwell High is a cartoon comedy")
    place = data.train.ids.tolist().index("train-12500")
    assert decoded(data, data.train, place) == first["text"] and data.train.targets[place] == 1
    assert data.input.codes is not None and data.input.codes[3:6] == tuple(map(ord, " et"))
    code, out, _ = cli("data", "check", "text", "validation=test", "--json")
    found = json.loads(out)
    assert code == 0 and found["vocabulary"] == 134 and found["chance"] == 0.5
    assert found["duplicates"]["train"] == 96 and found["duplicates"]["test"] == 199
    assert max(found["unknown"].values()) < 0.001


@pytest.mark.slow
def test_real_reviews_carved(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPT_DATA_DIR", str(data_dir))
    data = open_task(Part(name="text", max_rows=200))
    assert all(60 < np.bincount(split.targets)[0] < 140 for split in data.splits.values())
    whole = open_task(Part(name="text"))
    assert (len(whole.train), len(whole.val)) == (22_500, 2_500) and overlap(whole)["val"] > 0  # its own duplicates
    assert not set(whole.train.ids.tolist()) & set(whole.val.ids.tolist())


# -------------------------------------------------------------------------------------------------- what is refused


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/spt-was-here",)


def evil(data: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({"data": data, "labels": labels, "extra": Evil()}, 2)


def big_label(data: np.ndarray, labels: list[int]) -> bytes:
    return python2(data, [*labels[:-1], 10])


def archived(raw: Path, content: bytes, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    if monkeypatch:
        publish(monkeypatch, images, "CIFAR", content)
    (raw / images.CIFAR.name).write_bytes(content)


def mnist_folder(raw: Path, without: str = "", **changes: Callable[[bytes], bytes]) -> None:
    for name, content in mnist_files().items():
        change = changes.get(name.split("-")[1])
        if name != without:
            (raw / name).write_bytes(change(content) if change else content)


def unpacked(raw: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    cifar_folder(raw)
    edit(raw / images.FOLDER / name, change)


IMAGES, MNIST, TEXT = ({"name": "images"}, {"name": "images", "dataset": "mnist"}, {"name": "text", "min_count": 1})
SHORT = python2(planes(TRAIN[0][:9]), TRAIN[1][:9])
BAD: dict[str, tuple[dict[str, Any], Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "nothing there": (
        IMAGES,
        lambda raw, m: None,
        r"CIFAR-10 is not in the data folder .*raw: get it with `spt data pre",
    ),
    "no mnist": (MNIST, lambda raw, m: None, "MNIST is not in .*dataset=mnist"),
    "no reviews": (TEXT, lambda raw, m: None, r"IMDb is not in .*aclImdb_v1.tar.gz or imdb/train.parquet"),
    "no folder": (IMAGES, lambda raw, m: raw.rmdir(), "which does not exist"),
    "the folder is a file": (IMAGES, lambda raw, m: (raw.rmdir(), raw.write_text("x")), "is a file; set --data-dir"),
    "a batch is missing": (
        IMAGES,
        lambda raw, m: (cifar_folder(raw) / "data_batch_3").unlink(),
        "data_batch_3 is missing; cifar-10-batches-py has six batches",
    ),
    "a batch of other size": (
        IMAGES,
        lambda raw, m: unpacked(raw, "data_batch_2", lambda _: SHORT),
        r"data_batch_2: an array of bytes of shape \(10, 3072\) is expected; found is shape \[?\(?9, 3072",
    ),
    "a batch cut short": (
        IMAGES,
        lambda raw, m: unpacked(raw, "test_batch", lambda old: old[: len(old) // 2]),
        "test_batch is damaged: it is no pickle of arrays",
    ),
    "a batch of other things": (
        IMAGES,
        lambda raw, m: unpacked(raw, "test_batch", lambda _: pickle.dumps([1, 2])),
        "test_batch holds a list; a dictionary",
    ),
    "a batch without data": (
        IMAGES,
        lambda raw, m: unpacked(raw, "test_batch", lambda _: pickle.dumps({"labels": [1]})),
        "test_batch has no data and labels",
    ),
    "a batch of floats": (
        IMAGES,
        lambda raw, m: unpacked(raw, "test_batch", lambda _: python3(2)(planes(TEST[0]).astype(np.float32), TEST[1])),
        "an array of bytes of shape",
    ),
    "a malicious batch": (
        IMAGES,
        lambda raw, m: cifar_folder(raw, evil),
        "it is a pickle that asks for (posix|nt).system, which no data need",
    ),
    "a label out of range": (
        IMAGES,
        lambda raw, m: cifar_folder(raw, big_label),
        "data_batch_1, row 9: the label is 10; 0 to 9 are expected",
    ),
    "another archive": (
        IMAGES,
        lambda raw, m: archived(raw, tar(cifar_members())),
        "cifar-10-python.tar.gz is not the published file: its md5 is .*, expected is c58f30108f718f92721af3b95e74349a",
    ),
    "an archive cut short": (
        IMAGES,
        lambda raw, m: archived(raw, tar(cifar_members())[:90_000], m),
        "cifar-10-python.tar.gz is damaged or cut short",
    ),
    "an archive that leads outside": (
        IMAGES,
        lambda raw, m: archived(raw, tar({"../../evil": b"x", **cifar_members()}), m),
        "has a member '../../evil' that leads outside",
    ),
    "an archive with an absolute path": (
        IMAGES,
        lambda raw, m: archived(raw, tar({"/tmp/evil": b"x", **cifar_members()}), m),
        "member '/tmp/evil' that leads outside",
    ),
    "an archive with a link": (
        IMAGES,
        lambda raw, m: archived(raw, tar({}, link=f"{images.FOLDER}/test_batch"), m),
        "test_batch is not a regular file",
    ),
    "an archive of other things": (
        IMAGES,
        lambda raw, m: archived(raw, tar({"x": b"y"}), m),
        "has no member .*batch_1",
    ),
    "an archive that never ends": (
        IMAGES,
        lambda raw, m: (m.setattr(files, "MAX_BYTES", 10_000), archived(raw, tar(cifar_members()), m)),
        "unpacks to more than 10,000 bytes",
    ),
    "no test rows": (
        IMAGES,
        lambda raw, m: (cifar_parquet(raw) / "test.parquet").unlink(),
        "train.parquet is there, but no test.parquet",
    ),
    "too few rows": (IMAGES, lambda raw, m: cifar_parquet(raw, image=[b""] * 3, label=[0] * 3), "3 rows; 50 are expec"),
    "no rows": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, image=pa.array([], pa.binary()), label=pa.array([], pa.int8())),
        "train.parquet: 0 rows; 50 are expected",
    ),
    "no such column": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, image=None, picture=[b""] * 50),
        "has no column image or img; it has label, picture",
    ),
    "no Parquet": (
        IMAGES,
        lambda raw, m: edit(cifar_parquet(raw) / "train.parquet", lambda _: b"PAR1nonsense"),
        "train.parquet is damaged or no Parquet file",
    ),
    "Parquet cut short": (
        IMAGES,
        lambda raw, m: edit(cifar_parquet(raw) / "train.parquet", lambda old: old[:-50]),
        "train.parquet is damaged or no Parquet file",
    ),
    "an image that is none": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, image=[image_bytes(p) for p in TRAIN[0][:49]] + [b"\x89PNG nonsense"]),
        "train.parquet, row 49: the image cannot be decoded",
    ),
    "an image of other size": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, image=[image_bytes(TRAIN[0][0][:16])] * 50),
        "row 0: the image has 32x16 pixels; 32x32 are expected",
    ),
    "an image that is null": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, image=pa.array([None] * 50, pa.binary())),
        "row 0: the image is no bytes but NoneType",
    ),
    "a label that is null": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, label=pa.array([None] * 50, pa.int8())),
        "row 0: the label is None",
    ),
    "an index that repeats": (
        IMAGES,
        lambda raw, m: cifar_parquet(raw, index=[0] * 50),
        "index does not hold each position",
    ),
    "an idx file of other size": (
        MNIST,
        lambda raw, m: mnist_folder(raw, images=lambda old: old[:-784]),
        r"train-images-idx3-ubyte is not the published file: 31,376 bytes .* found are 30,592",
    ),
    "an idx file with more": (
        MNIST,
        lambda raw, m: mnist_folder(raw, labels=lambda old: old + b"x"),
        "more than the 48",
    ),
    "another data set of that name": (
        MNIST,
        lambda raw, m: mnist_folder(raw, images=lambda old: old[:-1] + bytes([old[-1] ^ 1])),
        r"its md5 \(unpacked\) is",
    ),
    "an idx file is missing": (
        MNIST,
        lambda raw, m: mnist_folder(raw, "t10k-labels-idx1-ubyte"),
        "t10k-labels-idx1-ubyte is missing, plain or .gz",
    ),
    "a gz file cut short": (
        MNIST,
        lambda raw, m: (
            mnist_folder(raw, "train-images-idx3-ubyte"),
            (raw / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"x" * 10_000)[:40]),
        ),
        "train-images-idx3-ubyte.gz is damaged or cut short",
    ),
    "a pipe for an idx file": (
        MNIST,
        lambda raw, m: (mnist_folder(raw, "train-images-idx3-ubyte"), os.mkfifo(raw / "train-images-idx3-ubyte")),
        "train-images-idx3-ubyte is not a regular file; remove it",
    ),
    "a pipe for an archive": (IMAGES, lambda raw, m: os.mkfifo(raw / images.CIFAR.name), "is not a regular file"),
    "a pipe for a Parquet file": (
        IMAGES,
        lambda raw, m: (
            (cifar_parquet(raw) / "test.parquet").unlink(),
            os.mkfifo(raw / "cifar10" / "test.parquet"),
        ),
        "test.parquet is not a regular file",
    ),
    "a pipe for a review": (
        TEXT,
        lambda raw, m: (
            (imdb_folder(raw) / "train/pos/3_7.txt").unlink(),
            os.mkfifo(raw / "aclImdb/train/pos/3_7.txt"),
        ),
        "3_7.txt is not a regular file",
    ),
    "a review is missing": (
        TEXT,
        lambda raw, m: (imdb_folder(raw) / "train/pos/3_7.txt").unlink(),
        "aclImdb: train/pos holds 9 reviews; 10 are expected",
    ),
    "a folder of reviews is missing": (
        TEXT,
        lambda raw, m: (imdb_folder(raw) / "test/neg").rename(raw / "elsewhere"),
        "test/neg is missing; unpack",
    ),
    "a review in Latin-1": (
        TEXT,
        lambda raw, m: (imdb_folder(raw) / "train/pos/3_7.txt").write_bytes("café".encode("latin1")),
        r"3_7.txt is not UTF-8 text \(byte 3\)",
    ),
    "a review that is a number": (TEXT, lambda raw, m: imdb_parquet(raw, text=list(range(20))), "row 0: the text is 0"),
    "a third class": (TEXT, lambda raw, m: imdb_parquet(raw, label=[2] * 20), "row 0: the label is 2; 0 to 1"),
    "another archive of reviews": (
        TEXT,
        lambda raw, m: (raw / text.ARCHIVE.name).write_bytes(b"x"),
        "aclImdb_v1.tar.gz is not the published file: its sha256",
    ),
    "no character is frequent": (
        {"name": "text", "min_count": 10**6},
        lambda raw, m: imdb_folder(raw),
        "lower min_count",
    ),
    "none in the subset": (
        {"name": "text", "min_count": 40, "subset_fraction": 0.05},
        lambda raw, m: imdb_folder(raw),
        "no character occurs 40 times in the 1? ?training rows in use|no character occurs 40 times in the 1 training",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_sentence(name: str, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, make, complaint = BAD[name]
    make(raw, monkeypatch)
    arguments = [f"{key}={value}" for key, value in task.items() if key != "name"]
    code, out, err = cli("data", "check", task["name"], *arguments)
    assert (code, out) == (3, ""), err
    (line,) = err.splitlines()
    assert line.startswith(f"spt: task {task['name']}: ")
    assert re.search(complaint, line), line
    assert not os.path.exists("/tmp/spt-was-here")
    left = [path for path in (cache_dir() / "tasks").glob("*") if path.is_dir()]
    assert not left or task.get("subset_fraction")  # nothing is prepared, unless only a subset is wrong
    assert not (raw.parent / "evil").exists() and not Path("/tmp/evil").exists()


def test_an_unreadable_folder_is_told(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:  # not pytest's, which are closed to others than root
        place, cache = Path(name), Path(name) / "cache"
        monkeypatch.setenv("SPT_DATA_DIR", name)
        monkeypatch.setenv("SPT_CACHE_DIR", str(cache))
        assert cli("data", "check", "digits")[0] == 0  # loads what is needed, and may be closed to others
        folder = cifar_folder(place)
        for open_ in (place, cache, cache / "tasks"):
            open_.chmod(0o777)
        for closed in (folder, folder / "data_batch_2", place):
            mode = closed.stat().st_mode
            closed.chmod(0)
            try:
                if root:
                    os.seteuid(65534)
                code, _, err = cli("data", "check", "images")
            finally:
                if root:
                    os.seteuid(0)
                closed.chmod(mode)
            assert code == 3 and "cannot be read: Permission denied" in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["images", "dataset=cifar100"], "dataset: input should be 'cifar10' or 'mnist', not \"cifar100\""),
        (["images", "size=5"], "size 5 does not divide 32; cifar10 can have 2, 4, 8, 16, 32"),
        (["images", "dataset=mnist", "size=8"], "can have 2, 4, 7, 14, 28"),
        (["images", "size=1"], "size: input should be greater than or equal to 2"),
        (["images", "dataset=mnist", "grey=false"], "mnist has no colours"),
        (["images", "permuted=true"], "permuted: true is for mnist"),
        (["images", "grey=false", "pixels=tokens"], "pixels: tokens needs grey: true"),
        (["images", "dateset=mnist"], "dateset: unknown key; did you mean dataset?"),
        (["text", "max_length=1"], "max_length: input should be greater than or equal to 2"),
        (["text", "min_count=0"], "min_count: input should be greater"),
        (["text", "validation=half"], "'carved' or 'test'"),
        (["txet"], "unknown recipe or task 'txet'; did you mean text?"),
        (["text", "images"], "one recipe or task is expected, not text, images"),
        (["nothing.yaml"], "no recipe file nothing.yaml"),
        (["nothing.py"], "no file .*nothing.py"),
        (["quickstart", "tsak.subset_fraction=0.1"], "tsak.subset_fraction: unknown key; did you mean task?"),
        (
            ["quickstart", "task.subset_fraction=2"],
            "quickstart: task.subset_fraction: input should be less than or equal to 1",
        ),
        (["no.such.module"], "unknown task 'no.such.module'"),
    ],
)
def test_wrong_usage_is_one_sentence(raw: Path, arguments: list[str], complaint: str) -> None:
    for command in ("check", "prepare"):
        code, out, err = cli("data", command, *arguments)
        assert (code, out) == (2, "") and "Traceback" not in err
        assert re.search(complaint, err), err


# ---------------------------------------------------------------------------------------------------- spt data


def test_check_is_one_page(raw: Path, tmp_path: Path) -> None:
    imdb_folder(raw)
    (imdb_folder(tmp_path / "x") / "train/pos/3_7.txt").rename(raw / "aclImdb/test/neg/4_2.txt")  # now in both
    code, out, err = cli("data", "check", "text", "min_count=3", "validation=test", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["rows"] == {"train": 20, "val": 20, "test": 20} and found["targets"]["train"] == [10, 10]
    assert found["duplicates"]["test also in train"] == 1 and found["duplicates"]["train"] == 0
    assert found["chance"] == 0.5 and len(found["files"]) == 4 and "test split" in found["notes"][0]
    data = open_task(Part(name="text", min_count=3, validation="test"))
    assert isinstance(data.input, Tokens) and found["vocabulary"] == data.input.vocab
    unknown = sum((data.input.ids(data.test.row(i)) == 1).sum() for i in range(20)) / data.test.lengths.sum()
    assert found["unknown"]["test"] == pytest.approx(unknown) and unknown > 0
    assert found["lengths"]["train"]["max"] == data.train.lengths.max() and found["data"] == rows_hash(data)
    _, page, _ = cli("data", "check", "text", "min_count=3", "validation=test")
    for piece in (
        found["folder"],
        found["data"],
        "test also in train 1",
        "chance    50.00%",
        "notes     validation is",
    ):
        assert piece in page


def test_check_of_values_real_targets_and_recipes(raw: Path, tmp_path: Path) -> None:
    own_task(tmp_path, task__kind="values", task__target="reals")
    code, out, err = cli("data", "check", str(tmp_path / "tiny.yaml"), "task.kind=values", "model.n_heads=1", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["chance"] is None and found["targets"]["train"]["max"][0] <= 1.2
    data = open_task(Part(name=str(tmp_path / "toy.py"), kind="values", target="reals"))
    assert found["values"]["val"]["max"] == pytest.approx(max(data.val.row(i).max() for i in range(17)))
    assert cli("data", "check", str(tmp_path / "toy.py"), "kind=bytes")[0] == 0


def test_check_finds_a_flipped_bit_in_prepared_values(raw: Path) -> None:
    cifar_folder(raw)
    data = open_task(Part(name="images"))
    (folder,) = (cache_dir() / "tasks").glob("images-*/")
    path, row = folder / "test.arrow", data.test.row(5).tobytes()
    content = path.read_bytes()
    place = content.index(row)
    del data
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    code, _, err = cli("data", "check", "images")
    assert code == 3 and "are damaged (test); delete the folder" in err


def test_an_edited_source_is_read_again(raw: Path) -> None:
    folder = imdb_folder(raw)
    one = open_task(Part(name="text", min_count=1))
    (folder / "train/pos/3_7.txt").unlink()
    (folder / "train/pos/3_9.txt").write_text("another")
    assert rows_hash(open_task(Part(name="text", min_count=1))) != rows_hash(one)


# ------------------------------------------------------------------------------------------------------ downloads


class Server(http.server.BaseHTTPRequestHandler):
    """/whole serves CONTENT; other paths misbehave as they are called."""

    content = b""
    asked: ClassVar[list[str]] = []
    stall = threading.Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind = self.path.split("/")[1]
        if kind == "missing":
            self.send_error(404)
            return
        body = self.content if kind != "other" else b"x" * len(self.content)
        self.send_response(200)
        if kind != "unsized":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind in ("short", "stalled"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if kind == "stalled":
                self.stall.wait(60)
        else:
            self.wfile.write(body)

    def log_message(self, *ignored: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Server.asked, Server.stall = [], threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_address[1]}"
        finally:
            Server.stall.set()
            found.shutdown()
            thread.join()


@pytest.mark.parametrize("kind", ["whole", "unsized"])
def test_prepare_downloads_once(raw: Path, server: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    Server.content = tar(cifar_members())
    publish(monkeypatch, images, "CIFAR", Server.content, f"{server}/{kind}/cifar-10-python.tar.gz")
    assert open_fails(Part(name="images")).startswith("task images: CIFAR-10 is not in the data folder")
    assert Server.asked == []  # opening never downloads
    code, out, err = cli("data", "prepare", "images", "--json")
    assert code == 0 and json.loads(out)["rows"] == {"train": 45, "val": 5, "test": 20}, err
    assert "getting http" in err and os.listdir(raw / "cifar10") == ["cifar-10-python.tar.gz"]
    code, out, _ = cli("data", "prepare", "images", "grey=false")
    assert code == 0 and "train 45, val 5, test 20 rows" in out and len(Server.asked) == 1


def open_fails(part: Part) -> str:
    with pytest.raises(SptError) as refused:
        open_task(part)
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("missing", "Not Found"),
        ("other", "what arrives has sha256:"),
        ("short", "the connection (ended|broke) after"),
        ("refused", "refused"),
    ],
)
def test_a_failed_download_leaves_nothing(
    raw: Path, server: str, monkeypatch: pytest.MonkeyPatch, kind: str, complaint: str
) -> None:
    Server.content = tar(imdb_members())
    url = f"{server}/{kind}/aclImdb_v1.tar.gz" if kind != "refused" else "http://127.0.0.1:9/aclImdb_v1.tar.gz"
    publish(monkeypatch, text, "ARCHIVE", Server.content, url)
    code, out, err = cli("data", "prepare", "text", "min_count=1")
    assert (code, out) == (3, "") and err.splitlines()[-1].startswith("spt: task text: aclImdb_v1.tar.gz cannot be dow")
    assert re.search(complaint, err), err
    assert os.listdir(raw / "imdb") == []
    # The next address is tried when one fails.
    publish(monkeypatch, text, "ARCHIVE", Server.content, url, f"{server}/whole/aclImdb_v1.tar.gz")
    assert cli("data", "prepare", "text", "min_count=1")[0] == 0


def test_only_missing_parts_are_downloaded(raw: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist_folder(raw, "t10k-labels-idx1-ubyte")
    Server.content = gzip.compress(mnist_files()["t10k-labels-idx1-ubyte"])
    sums = f"md5:{hashlib.md5(Server.content).hexdigest()}"
    wanted = tuple(Download((f"{server}/whole/{name}.gz",), sums) for name in images.IDX_SUMS)
    monkeypatch.setitem(images.KNOWN, "mnist", images.KNOWN["mnist"]._replace(downloads=wanted))
    assert cli("data", "prepare", "images", "dataset=mnist")[0] == 0
    assert Server.asked == ["/whole/t10k-labels-idx1-ubyte.gz"]


def test_a_wrong_file_in_the_place_is_not_overwritten(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = raw / "theirs"
    place.mkdir()
    wanted = Download(("http://127.0.0.1:9/a.gz",), f"md5:{hashlib.md5(b'right').hexdigest()}")
    (place / "a.gz").write_bytes(b"wrong")
    with pytest.raises(ValueError, match="is not the published file"):
        files.download(wanted, place)
    assert (place / "a.gz").read_bytes() == b"wrong"
    (place / "a.gz").write_bytes(b"right")
    assert files.download(wanted, place) == place / "a.gz"


def test_an_endless_download_is_cut(raw: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Server.content = b"x" * 300_000
    monkeypatch.setattr(files, "MAX_BYTES", 100_000)
    with pytest.raises(ValueError, match="more than 100,000 bytes arrive"):
        files.download(Download((f"{server}/unsized/a",), "md5:0"), raw)
    assert os.listdir(raw) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_killed_while_downloading(
    raw: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    Server.content = tar(imdb_members())
    checksum = hashlib.sha256(Server.content).hexdigest()

    def program(kind: str) -> list[str]:
        archive = f"text.ARCHIVE = Download(('{server}/{kind}/{text.ARCHIVE.name}',), 'sha256:{checksum}')\n"
        return [sys.executable, "-c", f"{PATCH}{archive}import spt_cli\nspt_cli.main()", "data", "prepare", "text",
                "min_count=1"]  # fmt: skip

    started = subprocess.Popen(program("stalled"), env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not list(raw.glob("imdb/.*.part")) or not Server.asked:
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        started.send_signal(how)
        Server.stall.set()
        _, err = started.communicate(timeout=300)
    finally:
        started.kill()
    assert "Traceback" not in err and started.returncode == (75 if how == signal.SIGTERM else -9)
    assert not (raw / "imdb" / text.ARCHIVE.name).exists()
    publish(monkeypatch, text, "ARCHIVE", Server.content, f"{server}/whole/{text.ARCHIVE.name}")
    assert cli("data", "prepare", "text", "min_count=1")[0] == 0
    assert os.listdir(raw / "imdb") == [text.ARCHIVE.name]  # and what the first one left is gone


def test_a_data_folder_that_cannot_be_written(raw: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Server.content = tar(imdb_members())
    publish(monkeypatch, text, "ARCHIVE", Server.content, f"{server}/whole/aclImdb_v1.tar.gz")
    (raw / "imdb").write_text("a file where the folder would be")
    code, _, err = cli("data", "prepare", "text", "min_count=1")
    assert code == 7 and err.startswith(f"spt: cannot write {raw}") and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_full_disk_while_downloading(raw: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Server.content = tar(imdb_members())
    checksum = hashlib.sha256(Server.content).hexdigest()
    program = (
        f"{PATCH}text.ARCHIVE = Download(('{server}/whole/{text.ARCHIVE.name}',), 'sha256:{checksum}')\n"
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\nimport spt_cli\nspt_cli.main()"
    )
    command = [sys.executable, "-B", "-c", program, "data", "prepare", "text", "min_count=1"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7 and done.stderr.splitlines()[-1].startswith(f"spt: cannot write {raw}"), done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(raw / "imdb") == []


def test_from_the_hub(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imdb_parquet(tmp_path / "hub")
    monkeypatch.setattr(text, "HUB", str(tmp_path / "hub" / "imdb"))
    code, out, err = cli("data", "prepare", "text", "min_count=1", "--from-hub")
    assert code == 0 and "train 18, val 2, test 20" in out, err
    assert sorted(os.listdir(raw / "imdb")) == ["test.parquet", "train.parquet"]
    assert "is there already" in cli("data", "prepare", "text", "min_count=1", "--from-hub")[2]


def test_the_hub_that_cannot_be_reached(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "HUB", "nobody/nothing")
    code, _, err = cli("data", "prepare", "text", "--from-hub")
    assert code == 3 and "nobody/nothing cannot be copied from the Hugging Face hub" in err and os.listdir(raw) == []
    code, _, err = cli("data", "prepare", "digits", "--from-hub")
    assert code == 2 and "no copy on the Hugging Face hub" in err


def test_the_data_folder_is_an_option(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar_folder(tmp_path / "elsewhere")
    monkeypatch.setenv("SPT_DATA_DIR", str(raw))  # put back afterwards
    assert cli("data", "check", "images")[0] == 3
    assert cli("data", "check", "images", "--data-dir", str(tmp_path / "elsewhere"))[0] == 0


def test_the_real_command(tmp_path: Path) -> None:
    env = {"SPT_CACHE_DIR": str(tmp_path / "cache"), "SPT_DATA_DIR": str(tmp_path)}
    done = spt("data", "check", "images", "--data-dir", tmp_path / "none", cwd=tmp_path, env=env)
    assert done.returncode == 3 and done.stdout == "" and f"{tmp_path}/none, which does not exist" in done.stderr


def test_a_recipes_task_is_prepared() -> None:
    code, out, err = cli("data", "prepare", "quickstart")
    assert code == 0 and out.startswith("digits: train 300, val 297, test 500 rows in"), err


# ---------------------------------------------------------------------------------------------------------- store


def large(n: int, length: int) -> TaskData:
    pixels = np.random.default_rng(0).integers(0, 256, (n, length, 1), dtype=np.uint8)
    split = Split.from_rows(pixels, np.zeros(n, np.int64))
    few = Split.from_rows(pixels[:4].copy(), np.zeros(4, np.int64), ids=np.arange(n, n + 4))
    return TaskData(Values(1, levels=256), Classes(2), split, few, few)


def test_preparing_copies_no_values(tmp_path: Path) -> None:
    """Checking and writing 80 MB takes a few MB more, whatever the number of rows."""
    import tracemalloc

    cache._write(tmp_path / "warm", large(4, 8))
    data = large(10_000, 8192)
    assert data.train.contiguous
    tracemalloc.start()
    data.check()
    cache._write(tmp_path / "cold", data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < data.train.values.nbytes / 8
    assert pa.total_allocated_bytes() < data.train.values.nbytes / 8
    kept = cache.read_prepared(tmp_path / "cold")
    assert np.array_equal(kept.train.values, data.train.values)


def test_rows_in_any_order_are_kept_in_theirs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = Split.from_rows([rng.normal(size=(k, 2)).astype(np.float32) for k in (3, 1, 4, 2)], rng.normal(size=(4, 3)))
    parts = [whole.take(np.array(rows)) for rows in ([3, 1], [0], [2])]
    assert not any(part.contiguous for part in parts) and whole.contiguous
    data = TaskData(Values(2), Reals(3), *parts, notes=("one", "two"))
    data.check()
    cache._write(tmp_path / "kept", data)
    kept = cache.read_prepared(tmp_path / "kept")
    assert kept.notes == data.notes and kept.length == 4
    for name, split in data.splits.items():
        stored = kept.splits[name]
        assert np.array_equal(stored.targets, split.targets) and stored.contiguous
        assert all(np.array_equal(stored.row(i), split.row(i)) for i in range(len(split)))
        assert np.array_equal(stored.fingerprints, fingerprints.fingerprints(split))


@pytest.mark.parametrize("order", [None, [2, 0], [1, 1, 1]])
def test_counts(order: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split.from_rows(
        [np.array([1, 5, 1], np.uint16), np.array([0], np.uint16), np.array([5, 5], np.uint16)], [0] * 3
    )
    split = split if order is None else split.take(np.array(order))
    every = np.concatenate([split.row(i) for i in range(len(split))])
    assert split.counts().tolist() == np.bincount(every).tolist()
    pieces = list(split.pieces(2))
    assert np.array_equal(np.concatenate(pieces), every) and len(pieces) > 1


def test_what_killed_preparations_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path))
    tasks = tmp_path / "tasks"
    dead, busy = tasks / ".digits-0123.99999999.tmp", tasks / ".toy-4567.1.tmp"
    for folder in (dead, busy):
        folder.mkdir(parents=True)
        (folder / "train.arrow").write_bytes(b"half")
    with cache._lock(tasks, "toy-4567"):
        open_task(Part(name="digits"))
        assert not dead.exists() and busy.exists()
    open_task(Part(name="digits", split_seed=1))
    assert not busy.exists()


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_killed_while_preparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import numpy as np\nfrom spt.tasks.base import *\n"
        "class Config(TaskConfig):\n    pass\n"
        "def load(config, raw):\n    s = Split.from_rows(np.ones((9, 4), np.uint8), np.arange(9) % 2)\n"
        "    return TaskData(Tokens(2), Classes(2), s, s, s)\n"
    )
    cache = tmp_path / "cache"
    program = (
        "import time, spt_cli\nfrom spt.data import cache\n"
        "def wait(split):\n    time.sleep(600)\ncache.with_fingerprints = wait\nspt_cli.main()"
    )
    env = environment({"SPT_CACHE_DIR": str(cache)})
    command = [sys.executable, "-c", program, "data", "prepare", str(slow)]
    started = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not list(cache.glob("tasks/.slow-*.tmp")):
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        started.send_signal(how)
        _, err = started.communicate(timeout=300)
    finally:
        started.kill()
    assert "Traceback" not in err and started.returncode == (75 if how == signal.SIGTERM else -9)
    assert not list(cache.glob("tasks/slow-*"))
    assert bool(list(cache.glob("tasks/.slow-*.tmp"))) == (how == signal.SIGKILL)
    monkeypatch.setenv("SPT_CACHE_DIR", str(cache))
    code, out, err = cli("data", "prepare", str(slow))
    assert code == 0 and "train 9" in out, err
    assert not list(cache.glob("tasks/.*.tmp"))


def test_a_full_disk_while_preparing(raw: Path, tmp_path: Path) -> None:
    cifar_folder(raw)
    program = (
        f"{PATCH}import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "import spt_cli\nspt_cli.main()"
    )
    command = [sys.executable, "-B", "-c", program, "data", "prepare", "images"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7 and done.stderr.startswith("spt: cannot write"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [path for path in (cache_dir() / "tasks").iterdir() if path.is_dir()]


def test_a_users_hooks_fail_in_words(tmp_path: Path, raw: Path) -> None:
    body = (
        "import numpy as np\nfrom spt.tasks.base import *\nclass Config(TaskConfig):\n    pass\n"
        "def load(config, raw):\n    s = Split.from_rows(np.ones((9, 4), np.uint8), np.arange(9) % 2)\n"
        "    return TaskData(Tokens(2, (0, 1), 0), Classes(2), s, s, s)\n"
    )
    for hook, complaint in (
        ("def sources(config, raw):\n    return 1 / 0\n", "sources fails with ZeroDivisionError"),
        ("def vocabulary(config, train):\n    raise ValueError('none left')\n", "none left"),
        ("def fetch(config, raw):\n    return {}['x']\n", "fetch fails with KeyError"),
        ("def fetch(config, raw):\n    raise ValueError('no such address')\n", "no such address"),
    ):
        path = tmp_path / "mine.py"
        path.write_text(body + hook)
        code, _, err = cli("data", "prepare", str(path), "subset_fraction=0.5")
        assert code == 3 and complaint in err and len(err.splitlines()) == 1, (hook, err)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("wanted", ["all", "first"])
def test_an_archive_that_ends_early_is_never_taken_for_a_whole_one(keep, wanted, tmp_path):
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        for i in range(12):
            member = tarfile.TarInfo(f"part/{i}")
            content = rng.integers(0, 256, 3000, np.uint8).tobytes()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed = (tmp_path / "whole.tar.gz").read_bytes()
    path = tmp_path / "cut.tar.gz"
    path.write_bytes(packed[: int(keep * len(packed))])
    with pytest.raises(ValueError, match="damaged or cut short"):
        list(files.read_members(path, lambda name: wanted == "all" or name == "part/0"))
    assert len(list(files.read_members(tmp_path / "whole.tar.gz", lambda name: True))) == 12
