"""Pathfinder and its segmentation: the law against its rules, against pictures of the official generator, and files."""

import importlib.util
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from spt.tasks import pathfinder, segmentation
from spt.tasks.base import IGNORED
from spt.tasks.generators import compiled
from spt.tasks.generators.pathfinder import PATHFINDER, SEGMENTATION, Law, Painter, pictures, tables
from spt.tasks.generators.pathfinder import pathfinder as law_of

COUNTS = {32: 200, 64: 30, 128: 60, 256: 60}
LAWS = {**{f"{side}": law for side, law in PATHFINDER.items()}, **{f"s{s}": law for s, law in SEGMENTATION.items()}}
SMALL = [name for name in LAWS if name != "s512"]  # its tables take seconds


class Picture(NamedTuple):
    """What was drawn, and how. The first and last dashes of paths 0 and 1 begin at the paths' outer tips."""

    pixels: NDArray[np.uint8]
    label: int
    classes: NDArray[np.uint8]
    margin: int
    dashes: NDArray[np.int64]  # (n, 4)
    angles: NDArray[np.float64]  # (n,) the direction it is drawn in
    discs: NDArray[np.int64]
    marked: int


def draw(painter: Painter, seed: int) -> Picture:
    law = painter.law
    pixels, classes = np.empty((2, law.side, law.side), np.uint8)
    label, which, dashes, discs, marked = painter.draw(seed, pixels, classes if law.segmentation else None)
    t = tables(law, law.margins[which])  # a first dash is drawn from its tail, others from their end to the pivot
    angles = np.concatenate([np.arange(-180, 180) * np.pi / 180, np.arctan2(-t.ends[:, 0], -t.ends[:, 1])])
    chosen = angles[dashes[:, 3]]
    return Picture(pixels, label, classes, law.margins[which], dashes.copy(), chosen, discs.copy(), marked)


@pytest.fixture(scope="module")
def drawn() -> Callable[[Law, int], list[Picture]]:
    known: dict[Law, list[Picture]] = {}

    def some(law: Law, n: int) -> list[Picture]:
        if len(known.get(law, [])) < n:
            painter = Painter(law)
            known[law] = [draw(painter, 1000 + i) for i in range(n)]
        return known[law][:n]

    return some


def official(data_dir: Path, name: str, column: str = "image") -> NDArray[np.uint8]:
    table = pq.read_table(data_dir / "pathfinder_reference" / f"{name}.parquet")
    return np.array([np.asarray(Image.open(io.BytesIO(cell))) for cell in table[column].to_pylist()])


def direction(angle: float) -> NDArray[np.float64]:
    return np.array([np.sin(angle), np.cos(angle)])


# ------------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "32" else n for n in SMALL])
def test_every_picture_is_built_by_the_rules(name: str, drawn: Any) -> None:
    law = LAWS[name]
    for picture in drawn(law, 8):
        length, margin, reach = law.length, picture.margin, law.length + picture.margin
        paths = [np.nonzero(picture.dashes[:, 0] == k)[0] for k in range(picture.dashes[-1, 0] + 1)]
        assert [len(rows) for rows in paths[:2]] == [law.contour] * 2
        assert len(paths) - 2 <= law.distractors and all(len(rows) == law.distractor for rows in paths[2:])
        starts = [picture.dashes[rows[0], 1:3] for rows in paths]
        assert abs(np.hypot(*(starts[0] - starts[1])) - law.apart) < 0.75
        low, high = 2 * law.apart, law.side - 2 * law.apart
        assert ((starts[0] >= low - reach - 1) & (starts[0] < high + reach)).all()
        pivots = []
        for rows in paths:
            dash, angle = picture.dashes[rows[0]], picture.angles[rows[0]]
            assert np.isclose(np.degrees(angle), np.rint(np.degrees(angle)))
            back = angle + np.pi if angle < 0 else angle - np.pi
            pivot = np.ceil(np.ceil(dash[1:3] + length * direction(angle)) + reach * direction(back))
            pivots.append(pivot)
            for row in rows[1:]:
                end = picture.dashes[row, 1:3]
                pivot = np.ceil(pivot + (length + 2 * margin) * direction(angle))
                arm = end - pivot
                assert reach - 1.5 < np.hypot(*arm) < reach + 1.5
                turned = np.arctan2(*arm) - angle
                assert np.cos(turned) > np.cos(np.pi / 2 / law.continuity) - 1e-9
                assert np.allclose(direction(picture.angles[row]), -arm / np.hypot(*arm))  # drawn back to the pivot
                assert ((end >= law.padding + margin) & (end < law.side - law.padding - margin)).all()
                angle = np.arctan2(*arm)
        ends = [picture.dashes[rows[-1], 1:3] for rows in paths]
        other = picture.marked if picture.label else 1 - picture.marked
        assert picture.discs[0].tolist() == starts[picture.marked].tolist()
        assert picture.discs[1].tolist() == ends[other].tolist()
        wanted = pivots[2:] if law.segmentation else []
        assert picture.discs[2:].tolist() == [pivot.astype(int).tolist() for pivot in wanted]


@pytest.mark.parametrize("name", ["64", "128", "256", "s256"])
def test_dashes_do_not_cross_but_where_the_published_mask_lags(name: str, drawn: Any) -> None:
    law = LAWS[name]
    compared = 0
    for picture in drawn(law, 8):
        steps = np.linspace(0, law.length, 12)[:, None]
        lines = [
            dash[1:3] + steps * direction(angle) for dash, angle in zip(picture.dashes, picture.angles, strict=True)
        ]
        long = 2 * law.contour
        for i in range(2, len(lines)):
            for k in range(i):
                unseen = i < long and i - k <= 2  # each path's last dash is not yet in the mask
                unseen |= k == long - 2  # and that of the first path never is
                unseen |= i >= long and picture.dashes[i, 0] == picture.dashes[k, 0]
                if not unseen and (i < long or i % law.distractor != long % law.distractor):
                    between = np.hypot(*(lines[i][:, None] - lines[k][None]).transpose(2, 0, 1)).min()
                    assert between > picture.margin
                    compared += 1
    assert compared > 1000


@pytest.mark.parametrize("name", SMALL)
def test_a_picture_shows_its_dashes_and_discs(name: str, drawn: Any) -> None:
    law = LAWS[name]
    for picture in drawn(law, 5):
        assert picture.pixels.min() == 0 and picture.pixels.max() == 255
        middles = [d[1:3] + law.length / 2 * direction(a) for d, a in zip(picture.dashes, picture.angles, strict=True)]
        bright = ndimage.maximum_filter(picture.pixels, 3)
        lit = [bright[tuple(np.rint(middle).astype(int))] for middle in middles]
        assert min(lit) > 50
        assert all(picture.pixels[y, x] >= 100 for y, x in picture.discs)
        radius = law.radius + law.length + 2 * law.thickness + 2  # nothing is far from what was laid
        empty = np.ones_like(picture.pixels, bool)
        rows, columns = np.ogrid[: law.side, : law.side]
        for y, x in [*np.rint(middles).astype(int), *picture.discs]:
            empty &= (rows - y) ** 2 + (columns - x) ** 2 > radius**2
        assert not picture.pixels[empty].any()


def test_a_label_can_be_traced_in_the_picture_alone(drawn: Any, data_dir: Path) -> None:
    """An eye that knows nothing of the construction: finds the discs, then follows dashes from one of them."""
    for side in (128, 256):
        law = PATHFINDER[side]
        ours = [(picture.pixels, picture.label, picture.margin) for picture in drawn(law, 30)]
        table = pq.read_table(data_dir / "pathfinder_reference" / f"pathfinder{side}.parquet")
        rest = (table[column].to_pylist() for column in ("label", "paddle_margin"))
        theirs = list(zip(official(data_dir, f"pathfinder{side}"), *rest, strict=True))[:40]
        for rows in (ours, theirs):
            for wanted, least in ((0, 0.85), (1, 0.6)):  # a path lost on the way is taken for a negative
                found = [traced(image, law, margin) == label for image, label, margin in rows if label == wanted]
                assert len(found) > 8 and np.mean(found) > least


def traced(image: NDArray[np.uint8], law: Law, margin: int) -> int:
    radius, gap = int(law.radius) - 1, 2 * margin
    ball = np.hypot(*np.mgrid[-radius : radius + 1, -radius : radius + 1]) <= radius
    blobs, n = ndimage.label(ndimage.binary_erosion(image >= 150, ball), np.ones((3, 3)))
    assert n == 2
    discs = np.array(ndimage.center_of_mass(blobs > 0, blobs, [1, 2]))
    rows, columns = np.indices(image.shape)
    lit = image >= 100
    for y, x in discs:
        lit &= np.hypot(rows - y, columns - x) > law.radius + 1.5
    dashes, _ = ndimage.label(lit, np.ones((3, 3)))
    tips, out = [], []  # two a dash: where, and which way it points
    for k, box in enumerate(ndimage.find_objects(dashes), 1):
        pixels = np.argwhere(dashes[box] == k) + [float(side.start) for side in box]
        if len(pixels) >= 3:
            centre = pixels.mean(0)
            y, x = (pixels - centre).T
            axis = direction(np.arctan2(2 * (x @ y), x @ x - y @ y) / 2)
            along = (pixels - centre) @ axis
            tips += [centre + along.max() * axis, centre + along.min() * axis]
            out += [axis, -axis]
    place, way = np.array(tips), np.array(out)
    apart = place[None] - place[:, None]
    distance = np.hypot(*apart.transpose(2, 0, 1)) + 1e-9
    ahead = np.arccos(np.clip((apart / distance[..., None] * way[:, None]).sum(-1), -1, 1))
    turn = np.arccos(np.clip(-way @ way.T, -1, 1))
    cost = ahead + ahead.T + turn + 0.15 * abs(distance - gap)
    own = np.arange(len(place)) // 2
    cost[(distance > gap + 5) | (own[:, None] == own)] = np.inf
    linked = np.full(len(place), -1)
    for pair in np.argsort(cost, axis=None):
        a, b = divmod(int(pair), len(place))
        if cost[a, b] > 3:
            break
        if linked[a] < 0 and linked[b] < 0:
            linked[a], linked[b] = b, a

    def nearest(disc: NDArray[np.float64]) -> int:
        towards = disc - place
        far = np.hypot(*towards.T)
        miss = np.arccos(np.clip((towards / far[:, None] * way).sum(1), -1, 1)) + 0.1 * far
        return int(np.argmin(np.where(far > law.radius + law.length + 2 * gap, 9, miss) + 0.6 * (linked >= 0)))

    here, goal = nearest(discs[0]), nearest(discs[1])
    for _ in range(40):
        if goal in (here, here ^ 1):
            return 1
        here = linked[here ^ 1]
        if here < 0:
            return 0
    return 0


# -------------------------------------------------------------------------------------- the official pictures


def unlike(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> list[str]:
    """What of two sets of pictures differs by more than chance: brightness, share of lit pixels, levels."""
    measures: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
        "mean": lambda x: x.mean((1, 2)),
        **{f"from {k}": lambda x, k=k: (x >= k).mean((1, 2)) for k in (1, 16, 64, 128, 192, 240)},
        "faint": lambda x: ((x > 0) & (x < 8)).mean((1, 2)),
    }
    found = []
    for name, measure in measures.items():
        a, b = measure(ours), measure(theirs)
        chance = np.sqrt(a.var() / len(a) + b.var() / len(b))
        if abs(a.mean() - b.mean()) > 4.5 * chance + 1e-5:
            found.append(name)
    a, b = (np.histogram(x[x >= 16], 15, (16, 256))[0] / (x >= 16).sum() for x in (ours, theirs))
    return [*found, *(["levels"] if abs(a - b).sum() / 2 > 0.06 else [])]


@pytest.mark.parametrize("side", COUNTS)
def test_grey_levels_are_the_official_ones(side: int, drawn: Any, data_dir: Path) -> None:
    ours = np.array([picture.pixels for picture in drawn(PATHFINDER[side], COUNTS[side])])
    assert unlike(ours, official(data_dir, f"pathfinder{side}")) == []


@pytest.mark.parametrize(
    "wrong",
    [{"contrast": 1.0}, {"thickness": 2.0}, {"distractors": 17}, {"radius": 4.0}, {"length": 6}, {"contour": 11}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_other_parameters_would_be_noticed(wrong: dict[str, Any], data_dir: Path) -> None:
    painter = Painter(PATHFINDER[128]._replace(**wrong))
    ours = np.array([draw(painter, i).pixels for i in range(40)])
    assert unlike(ours, official(data_dir, "pathfinder128"))


@pytest.mark.parametrize("side", [128, 256])
def test_segmentation_is_the_official_one(side: int, drawn: Any, data_dir: Path) -> None:
    found = drawn(SEGMENTATION[side], 30)
    assert unlike(np.array([p.pixels for p in found]), official(data_dir, f"segmentation{side}")) == []
    ours, theirs = np.array([p.classes for p in found]), official(data_dir, f"segmentation{side}", "mask")
    images = np.array([p.pixels for p in found]), official(data_dir, f"segmentation{side}")
    assert abs((ours > 0).mean() - (theirs > 0).mean()) < 0.004
    faint = [(image[mask > 0] < 13).mean() for image, mask in zip(images, (ours, theirs), strict=True)]
    assert abs(faint[0] - faint[1]) < 0.02


def test_classes_of_pixels_follow_the_paths(drawn: Any) -> None:
    law = SEGMENTATION[128]
    for picture in drawn(law, 10):
        assert (picture.classes == 2).any() == (picture.label == 1)
        for (path, y, x, _), angle in zip(picture.dashes, picture.angles, strict=True):
            middle = tuple(np.rint([y, x] + law.length / 2 * direction(angle)).astype(int))
            wanted = 0 if path > 1 else 2 if picture.label and path == picture.marked else 1
            near = picture.classes[middle[0] - 1 : middle[0] + 2, middle[1] - 1 : middle[1] + 2]
            assert wanted in near if path > 1 else picture.classes[middle] >= wanted
        assert (picture.pixels[picture.classes > 0] > 0).all()


def test_labels_are_balanced_and_both_margins_occur() -> None:
    law = PATHFINDER[32]
    _, labels, _ = pictures(law, 0, "train", 0, 600)
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(600)
    margins = [draw(Painter(PATHFINDER[128]), i).margin for i in range(40)]
    assert 8 < margins.count(2) < 32 and set(margins) == {2, 3}


def test_short_paths_at_32_are_few_as_published(drawn: Any) -> None:
    """1.19 a picture when the official code was run: most orientations of a first dash find no place there."""
    counts = [(len(p.dashes) - 28) / 4 for p in drawn(PATHFINDER[32], 200)]
    assert abs(np.mean(counts) - 1.19) < 4.5 * np.sqrt(1.0 / 200 + 1.0 / 100)
    angles = np.array([np.degrees(p.angles[0]) for p in drawn(PATHFINDER[32], 200)])
    assert angles.min() > -180 and angles.max() < -90


# ------------------------------------------------------------------------------------------------------- rows


def test_a_row_follows_from_seed_split_and_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = pathfinder.Config(train_size=50, val_size=10, test_size=12)
    monkeypatch.setenv("SPT_WORKERS", "1")
    one = pathfinder.load(config, tmp_path)
    monkeypatch.setenv("SPT_WORKERS", "2")
    two = pathfinder.load(config, tmp_path)
    few = pathfinder.load(pathfinder.Config(train_size=50, val_size=10, test_size=12, max_rows=7), tmp_path)
    other = pathfinder.load(pathfinder.Config(train_size=10, val_size=10, test_size=10, seed=1), tmp_path)
    for name, split in one.splits.items():
        same, prefix = two.splits[name], few.splits[name]
        assert np.array_equal(split.values, same.values) and np.array_equal(split.targets, same.targets)
        assert len(prefix) == 7 and np.array_equal(split.values[: 7 * 1024], prefix.values)
        assert split.ids[:7].tolist() == prefix.ids.tolist()
        assert not np.array_equal(split.row(0), other.splits[name].row(0))
    rows = [split.row(i).tobytes() for split in one.splits.values() for i in range(len(split))]
    assert len(set(rows)) == len(rows) == 72
    one.check()
    assert one.length == 1024 and one.input.mean == (127.5,) and "seed 0" in one.notes[0]


def test_tokens_are_the_same_pixels(tmp_path: Path) -> None:
    sizes: Any = {"train_size": 3, "val_size": 1, "test_size": 1}
    values, tokens = (pathfinder.load(pathfinder.Config(pixels=p, **sizes), tmp_path) for p in ("values", "tokens"))
    assert tokens.input.vocab == 256 and np.array_equal(values.train.values[:, 0], tokens.train.values)
    tokens.check()


def test_segmentation_rows(tmp_path: Path) -> None:
    data = segmentation.load(segmentation.Config(train_size=6, val_size=2, test_size=2), tmp_path)
    data.check()
    assert data.target.per_step and data.train.targets.shape == (6 * 128**2,)
    assert data.train.targets.min() == 0 > IGNORED
    few = segmentation.load(segmentation.Config(max_rows=1), tmp_path)
    assert np.array_equal(few.train.values, data.train.values[: 128**2])
    assert np.array_equal(few.train.targets, data.train.targets[: 128**2])


def test_difficulties_and_counts() -> None:
    assert [law_of(side).distractors for side in (32, 64, 128, 256)] == [5, 5, 8, 7]
    for side, law in PATHFINDER.items():
        assert law_of(side) == law
    easy = law_of(32, "easy")
    assert (easy.contour, easy.distractor) == (6, 2) and law_of(128, distractors=17).distractors == 17
    picture = draw(Painter(easy), 0)
    assert (picture.dashes[:, 0] < 2).sum() == 12


def test_without_a_compiler_the_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_numba", lambda: None)
    source = Path(sys.modules[Painter.__module__].__file__ or "")
    spec = importlib.util.spec_from_file_location("plain_pathfinder", source)
    assert spec is not None and spec.loader is not None
    plain = ModuleType(spec.name)
    monkeypatch.setitem(sys.modules, spec.name, plain)
    spec.loader.exec_module(plain)
    for law, n in ((PATHFINDER[32], 3), (PATHFINDER[256], 1)):
        ours, theirs = pictures(law, 5, "train", 0, n), plain.pictures(law, 5, "train", 0, n)
        assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])


# ------------------------------------------------------------------------------------------------------ files


def png(image: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def files() -> tuple[dict[str, bytes], NDArray[np.uint8], NDArray[np.uint8]]:
    """A folder of 30 pictures in three batches, the last one's metadata a NumPy array; one file is empty."""
    pixels, labels, _ = pictures(PATHFINDER[32], 3, "train", 0, 30)
    found: dict[str, bytes] = {}
    for batch in range(3):
        rows = []
        for i in range(10):
            row = 10 * batch + i
            found[f"imgs/{batch}/sample_{i}.png"] = png(pixels[row].reshape(32, 32))
            rows.append([f"imgs/{batch}", f"sample_{i}.png", i, int(labels[row]), 1.0, 14, 4, 2, 0.5, 1, 1])
        text = "".join(" ".join(map(str, row)) + "\n" for row in rows).encode()
        if batch == 2:
            stream = io.BytesIO()
            np.save(stream, np.array([[str(field) for field in row] for row in rows]))
            text = stream.getvalue()
        found[f"metadata/{(batch + 9)}.npy"] = text  # 9, 10, 11: by number, not by name
    found["imgs/0/sample_4.png"] = b""
    keep = np.arange(30) != 4
    return found, pixels[keep], labels[keep]


def folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = tmp_path / "pathfinder32" / "curv_contour_length_14" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def archive(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """The inner folder's pictures, and others beside them."""
    with tarfile.open(tmp_path / "lra_release.gz", "w:gz") as tar:
        for inner, of in (("lra_release/lra_release", files), ("lra_release", dict.fromkeys(files, b"?"))):
            for name, content in of.items():
                info = tarfile.TarInfo(f"{inner}/pathfinder32/curv_contour_length_14/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return tmp_path


RELEASED = pathfinder.Config(source="released")


@pytest.mark.parametrize("place", [folder, archive])
def test_released_pictures(place: Any, tmp_path: Path, files: Any) -> None:
    import torch

    contents, pixels, labels = files
    raw = place(tmp_path, contents)
    data = pathfinder.load(pathfinder.Config(), raw)  # auto: what is there
    data.check()
    order = torch.randperm(29, generator=torch.Generator().manual_seed(42)).numpy()
    for split, rows in zip(data.splits.values(), np.split(order, [25, 27]), strict=True):
        assert np.array_equal(np.array([split.row(i)[:, 0] for i in range(len(split))]), pixels[rows])
        assert np.array_equal(split.targets, labels[rows])
    assert "1 picture" in data.notes[0] and "30 pictures" in data.notes[1]
    lra = pathfinder.load(pathfinder.Config(split="lra", pixels="tokens", max_rows=3), raw)
    assert np.array_equal(lra.train.row(2), pixels[2]) and np.array_equal(lra.test.row(0), pixels[26])
    assert lra.test.ids[0] == "2/sample_7" and len(lra.train) == 3
    with pytest.raises(ValueError, match="released ones are there; leave it out, or say source: generated"):
        pathfinder.load(pathfinder.Config(distractors=17), raw)
    unused = pathfinder.load(pathfinder.Config(seed=1, train_size=9), raw).notes[-1]
    assert unused == "released pictures were found, so seed and train_size had no effect"


def test_sources_tell_what_is_read(tmp_path: Path, files: Any) -> None:
    assert pathfinder.sources(pathfinder.Config(), tmp_path) == []
    archive(tmp_path, files[0])
    assert [path.name for path in pathfinder.sources(pathfinder.Config(), tmp_path)] == ["lra_release.gz"]
    folder(tmp_path, files[0])
    names = [path.name for path in pathfinder.sources(pathfinder.Config(), tmp_path)]
    assert names == ["9.npy", "10.npy", "11.npy"]
    assert pathfinder.sources(pathfinder.Config(source="generated"), tmp_path) == []


def test_what_is_not_there(tmp_path: Path, messages) -> None:
    with pytest.raises(FileNotFoundError, match="lra_release"):
        pathfinder.load(RELEASED, tmp_path)
    with pytest.raises(FileNotFoundError, match="source: generated"):
        pathfinder.fetch(RELEASED, tmp_path)
    pathfinder.fetch(pathfinder.Config(), tmp_path)
    assert "nothing to download" in messages[0]
    with pytest.raises(ValueError, match="distractors"):
        pathfinder.Config(source="released", distractors=3)
    with pytest.raises(ValueError, match="val_size is for generated pictures; leave it out"):
        pathfinder.Config(source="released", val_size=5)
    with pytest.raises(ValueError, match="split is for released pictures"):
        pathfinder.Config(source="generated", split="lra")
    small = pathfinder.Config(split="lra", train_size=2, val_size=1, test_size=1)
    assert pathfinder.load(small, tmp_path).notes[-1].endswith("so split: lra has no effect")


def saved(array: NDArray[Any], **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


LINE = b"imgs/0 sample_0.png 0 1 1.0 14 4 2 0.5 1 1\n"
SPOILT: dict[str, tuple[str, bytes, str]] = {
    "objects": ("metadata/9.npy", saved(np.array([["a", 1]], object), allow_pickle=True), "Object arrays"),
    "numbers": ("metadata/9.npy", saved(np.zeros((3, 11))), "no table of strings"),
    "cut": ("metadata/11.npy", saved(np.full((5, 11), "1"))[:-8], "cannot be read as an array"),
    "huge": (
        "metadata/9.npy",
        saved(np.full((1, 11), "1")).replace(b"(1, 11)", b"(9999999999, 11)"),
        "cannot be read as an array",
    ),
    "header": ("metadata/9.npy", b"\x93NUMPY\x01\x00\x04\x00{'a'", "cannot be read as an array"),
    "binary": ("metadata/9.npy", b"\xff\xfe\x00\x01", "neither text"),
    "fields": ("metadata/9.npy", b"imgs/0 sample_0.png 0 1\n", "line 1: 4 fields"),
    "label": ("metadata/9.npy", LINE.replace(b" 0 1 1.0", b" 0 7 1.0"), "label is '7'"),
    "outside": ("metadata/9.npy", LINE.replace(b"imgs/0", b"../../imgs"), "outside"),
    "absolute": ("metadata/9.npy", LINE.replace(b"imgs/0", b"/etc"), "outside"),
    "twice": ("metadata/9.npy", LINE * 2, "twice"),
    "lost": ("metadata/9.npy", LINE.replace(b"sample_0", b"sample_99"), "sample_99"),
    "size": ("imgs/1/sample_1.png", png(np.zeros((64, 64), np.uint8)), "64x64"),
    "format": ("imgs/1/sample_1.png", b"GIF89a" + bytes(40), "cannot be decoded"),
    "half": ("imgs/1/sample_1.png", png(np.zeros((32, 32), np.uint8))[:50], "cannot be decoded"),
    "large": ("imgs/1/sample_1.png", bytes(2**20 + 1), "bytes"),
}


@pytest.mark.parametrize("place", [folder, archive])
@pytest.mark.parametrize("name", SPOILT)
def test_damaged_files_are_refused_in_words(name: str, place: Any, tmp_path: Path, files: Any) -> None:
    path, content, words = SPOILT[name]
    raw = place(tmp_path, {**files[0], path: content})
    with pytest.raises(ValueError, match=words) as caught:
        pathfinder.load(RELEASED, raw)
    assert str(tmp_path) in str(caught.value)


def test_damaged_archives_are_refused_in_words(tmp_path: Path, files: Any) -> None:
    raw = archive(tmp_path, files[0])
    path = raw / "lra_release.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut short|at least 10|no member"):
        pathfinder.load(RELEASED, raw)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="damaged"):
        pathfinder.load(RELEASED, raw)
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../lra_release/lra_release/pathfinder32/x.png"))
    with pytest.raises(ValueError, match="outside"):
        pathfinder.load(RELEASED, raw)
    few = {name: content for name, content in files[0].items() if "/0/" in name or name == "metadata/9.npy"}
    archive(tmp_path, few)
    with pytest.raises(ValueError, match="at least 10"):
        pathfinder.load(RELEASED, raw)


def test_classes_have_names(tmp_path: Path) -> None:
    from tiny import load, recipe_file

    from spt.config.job import Job
    from spt.training.build import build_stage

    sizes = {"train_size": 8, "val_size": 8, "test_size": 8, "source": "generated"}
    named = {"name": "supervised", "metric": "f1", "positive": "joined", "class_weights": {"joined": 2.0, "apart": 1.0}}
    path = recipe_file(tmp_path, task={"name": "pathfinder", **sizes}, finetune__objective=named)
    setup = build_stage(Job(load(str(path)), "finetune", 0))
    assert setup.data.classes == ("apart", "joined") and setup.output.positive == 1
