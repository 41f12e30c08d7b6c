"""The contract over every task in tasks/, and the store that keeps their data."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tiny import TASK, environment

from spt.config.plugins import find_plugin, listing
from spt.config.recipe import Part
from spt.data.dataset import open_task
from spt.data.fingerprints import fingerprints, split_record
from spt.data.source import cache_dir
from spt.errors import DataError
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens, Values

TASKS = [row.name for row in listing("tasks")]
REAL = {  # read from the optional folder of real data
    "images": {"dataset": "mnist"},
    "text": {},
    "bidmc": {},
    "books": {"chunk": 65536},
    "speech": {"words": ["bed", "cat", "happy"]},
}
GENERATED = {"max_rows": 6}


@pytest.mark.parametrize("name", TASKS)
def test_contract(name, tmp_path, request):
    component = find_plugin("tasks", name)
    generated = GENERATED if getattr(component.module, "INDEXABLE", False) else {}
    options, raw = REAL.get(name, generated), tmp_path
    if name in REAL:
        raw = request.getfixturevalue("data_dir")
    if name == "retrieval":
        for k, part in enumerate(("train", "eval", "test")):
            lines = [f"{i % 2}.0\ta{i}\tb{i}\ttext {k} {i}\tother {i * k}" for i in range(6)]
            (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n")
    if name == "custom":
        path = tmp_path / "rows.csv"
        path.write_text("text,label\n" + "".join(f"{'ab' * i} {i},{i % 2}\n" for i in range(1, 80)))
        options = {"path": str(path), "text_column": "text", "label_column": "label"}
    config = component.module.Config.model_validate_json(json.dumps(options))
    one, two = (component.module.load(config, raw) for _ in range(2))
    one.check()
    for split, other in zip(one.splits.values(), two.splits.values(), strict=True):
        assert np.array_equal(split.values, other.values) and len(split) <= options.get("max_rows", len(split))
        assert np.array_equal(split.targets, other.targets, equal_nan=split.targets.dtype.kind == "f")
    ids = [set(split.ids.tolist()) for split in one.splits.values()]
    assert sum(map(len, ids)) == len(set.union(*ids)), "a row lies in two splits"
    assert all(len(split) == len(i) for split, i in zip(one.splits.values(), ids, strict=True))


def test_digits_are_the_real_ones():
    bunch = load_digits()
    data = open_task(Part(name="digits"))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1000, "val": 297, "test": 500}
    assert data.length == 64 and data.input == Tokens(17) and data.target == Classes(10)
    for split in data.splits.values():
        for i in (0, 100, len(split) - 1):
            assert np.array_equal(split.row(i), bunch.data[split.ids[i]])
            assert split.targets[i] == bunch.target[split.ids[i]]


def test_digits_as_values_are_standardised():
    data = open_task(Part(name="digits", pixels="values"))
    assert isinstance(data.input, Values) and data.input.levels == 17
    train = (np.concatenate([data.train.row(i) for i in range(1000)]) - data.input.mean) / data.input.std
    assert abs(train.mean()) < 1e-6 and abs(train.std() - 1) < 1e-6


def test_another_split_seed_is_another_split():
    one, two = open_task(Part(name="digits")), open_task(Part(name="digits", split_seed=1))
    assert set(one.test.ids.tolist()) != set(two.test.ids.tolist())


def test_fractions_are_nested_and_leave_the_other_splits_alone():
    parts = [open_task(Part(name="digits", subset_fraction=f)) for f in (0.005, 0.05, 0.3, 1.0)]
    assert [len(part.train) for part in parts] == [5, 50, 300, 1000]
    for small, large in itertools.pairwise(parts[:3]):
        assert np.array_equal(small.train.ids, large.train.ids[: len(small.train)])
    assert set(parts[2].train.ids.tolist()) < set(parts[3].train.ids.tolist())
    assert len({split_record(part.test).inputs for part in parts}) == 1
    other = open_task(Part(name="digits", subset_fraction=0.05, subset_seed=1))
    assert set(other.train.ids.tolist()) != set(parts[1].train.ids.tolist())


def test_the_store_gives_back_what_the_task_gave(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path))
    path = tmp_path / "toy.py"
    path.write_text(TASK)
    for options in ({}, {"kind": "values", "target": "reals"}, {"kind": "bytes"}):
        component = find_plugin("tasks", str(path))
        given = component.module.load(component.module.Config(**options), tmp_path)
        kept = open_task(Part(name=str(path), **options))
        assert kept.input == given.input and kept.target == given.target and kept.length == given.length
        for name, split in given.splits.items():
            stored = kept.splits[name]
            assert np.allclose(stored.targets, split.targets) and np.array_equal(stored.ids, split.ids)
            assert all(np.array_equal(stored.row(i), split.row(i)) for i in range(len(split)))
            assert stored.values.dtype == split.values.dtype
            assert not stored.values.flags.writeable  # a view on the file
            assert len(set(stored.fingerprints.tolist())) == len({split.row(i).tobytes() for i in range(len(split))})


def test_prepared_once_and_anew_when_the_task_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "toy.py"
    path.write_text(TASK + "\nimport pathlib\nCALLS = pathlib.Path(__file__).with_name('calls')\n_load = load\n"
                    "def load(config, raw):\n    CALLS.write_text(CALLS.read_text() + 'x' if CALLS.exists() else 'x')\n"
                    "    return _load(config, raw)\n")  # fmt: skip
    for _ in range(2):
        open_task(Part(name=str(path)))
        open_task(Part(name=str(path), max_rows=3))
    assert (tmp_path / "calls").read_text() == "x"
    open_task(Part(name=str(path), shift=1))
    path.write_text(path.read_text() + "# edited\n")
    open_task(Part(name=str(path)))
    assert (tmp_path / "calls").read_text() == "xxx"


def test_damaged_prepared_data_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path))
    open_task(Part(name="digits"))
    (folder,) = (tmp_path / "tasks").glob("digits-*")
    (folder / "train.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="damaged"):
        open_task(Part(name="digits"))


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("SPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert cache_dir() == tmp_path / "there" / "spt"


SMALL = Split.from_rows([[0, 1], [2]], np.array([0, 1]))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (lambda: TaskData(Tokens(2), Classes(2), SMALL, SMALL, SMALL), "outside"),
        (lambda: TaskData(Tokens(3), Classes(2), SMALL, SMALL, Split.from_rows([[0]], np.array([2]))), "labels reach"),
        (lambda: TaskData(Tokens(3), Classes(2), SMALL, SMALL, Split.from_rows([[0.5]], np.array([1]))), "integers"),
        (lambda: TaskData(Tokens(3), Classes(2), SMALL, SMALL, Split.from_rows([[0]], np.array([1.0]))), "integers"),
        (lambda: TaskData(Tokens(3), Reals(1), SMALL, SMALL, SMALL), "shape"),
        (lambda: TaskData(Values(1), Classes(2), SMALL, SMALL, SMALL), "shape"),
        (
            lambda: TaskData(Tokens(3), Classes(2), Split.from_rows([[0], []], np.array([0, 1])), SMALL, SMALL),
            "empty|integers",
        ),
        (lambda: Split.from_rows([], np.array([])), "no rows"),
        (lambda: TaskData(Tokens(3), Classes(2), SMALL, SMALL, SMALL.unlabelled()), "no targets"),
        (
            lambda: TaskData(Tokens(3), Classes(2), SMALL, SMALL, replace(SMALL, stops=SMALL.stops + 9)),
            "outside its values",
        ),
        (
            lambda: TaskData(Tokens(3), Classes(2), SMALL, SMALL, replace(SMALL, ids=np.array([(1,), "a"], object))),
            "ids",
        ),
        (lambda: TaskData(Values(1), Classes(2), *[Split.from_rows([[[1e30]]], np.array([1]))] * 3), "not finite"),
        (lambda: TaskData(Values(1, (float("nan"),)), Classes(2), SMALL, SMALL, SMALL), "finite"),
        (lambda: TaskData(Tokens(1), Classes(2), SMALL, SMALL, SMALL), "vocabulary"),
        (lambda: TaskData(Values(2, (1.0,)), Classes(2), SMALL, SMALL, SMALL), "entries"),
        (lambda: TaskData(Values(1, (0.0,), (0.0,)), Classes(2), SMALL, SMALL, SMALL), "positive"),
    ],
)
def test_wrong_arrays_are_refused_in_words(data, complaint):
    with pytest.raises(ValueError, match=complaint):
        data().check()


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (("return TaskData(", "return list("), "not TaskData|fails with"),
        (("rng = ", "raise FileNotFoundError('where is it?')\n    rng = "), "where is it"),
        (("rng = ", "1 / 0\n    rng = "), "ZeroDivisionError"),
        (("rng = ", "raise SystemExit(0)\n    rng = "), "SystemExit"),
        (("rng = ", "raise RuntimeError('boom\\nsecond line')\n    rng = "), "boom$"),
        (("Tokens(9)", "Tokens(5)"), "outside"),
    ],
)
def test_a_users_task_that_fails_is_a_data_error(tmp_path, edit, complaint):
    path = tmp_path / "toy.py"
    path.write_text(TASK.replace(*edit, 1))
    with pytest.raises(DataError, match=complaint):
        open_task(Part(name=str(path)))
    assert not [name for name in os.listdir(cache_dir() / "tasks") if name.endswith(".tmp")]


def test_numpys_counts_are_counts(tmp_path):
    """In a process of its own, without the type checks of the tests."""
    program = (
        "import numpy as np\nfrom spt.tasks.base import Tokens\n"
        "assert Tokens(np.int64(3)) == Tokens(3) and type(Tokens(np.int64(3)).vocab) is int\nTokens(3.5)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert "ValueError: Tokens.vocab is 3.5; a whole number is expected" in done.stderr


def test_swapped_files_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path))
    open_task(Part(name="digits"))
    (folder,) = (tmp_path / "tasks").glob("digits-*")
    (folder / "train.arrow").write_bytes((folder / "test.arrow").read_bytes())
    with pytest.raises(DataError, match="damaged"):
        open_task(Part(name="digits"))


def test_manifest_is_json(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path))
    open_task(Part(name="digits"))
    (manifest,) = (tmp_path / "tasks").glob("digits-*/data.json")
    assert json.loads(manifest.read_text())["input"] == {"kind": "Tokens", "vocab": 17}


@pytest.mark.parametrize(
    "name", [name for name in TASKS if getattr(find_plugin("tasks", name).module, "INDEXABLE", False)]
)
def test_rows_that_are_made_do_not_depend_on_how_many_or_by_whom(name, tmp_path, monkeypatch):
    """A shorter split is the beginning of a longer one, whatever the number of workers."""
    component = find_plugin("tasks", name)

    def made(max_rows, workers):
        monkeypatch.setenv("SPT_WORKERS", str(workers))
        return component.module.load(component.module.Config(max_rows=max_rows), tmp_path)

    few, more = made(3, 1), made(7, 2)
    for split, longer in zip(few.splits.values(), more.splits.values(), strict=True):
        assert len(split) == 3 and len(longer) == 7
        assert split.ids.tolist() == longer.ids[:3].tolist()
        for i in range(3):
            assert np.array_equal(split.row(i), longer.row(i))
            one, two = (
                s.targets[s.starts[i] : s.stops[i]] if s.per_step else s.targets[i : i + 1] for s in (split, longer)
            )
            assert np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    prints = [set(fingerprints(split).tolist()) for split in more.splits.values()]
    assert sum(map(len, prints)) == len(set.union(*prints)) == 21
