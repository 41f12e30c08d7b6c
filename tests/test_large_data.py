"""Data larger than memory: what preparing takes does not grow with them, and the rows are the same."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recordings import config, label_files, make
from tiny import ROOT, environment

from spt.data import cache
from spt.data.fingerprints import rows_hash, with_fingerprints
from spt.tasks import custom, parallel
from spt.tasks.own import steps
from spt.tasks.own.steps import Steps

MB = 10**6


def prepared(options, folder):
    cache.prepare_once(folder, lambda: custom.load(options, Path(".")))
    return cache.read_prepared(folder)


def small_limits(monkeypatch):
    monkeypatch.setattr(parallel, "IN_MEMORY", 100)
    monkeypatch.setattr(parallel, "AT_ONCE", 64)
    monkeypatch.setattr("spt.tasks.own.rows.AT_ONCE", 64)
    monkeypatch.setattr("spt.data.cache.AT_ONCE", 64)
    monkeypatch.setattr(steps, "PIECE", 96)


def long_table(folder):
    rng = np.random.default_rng(0)
    n = 40 * 7
    order = rng.permutation(n)
    columns = {"id": np.arange(n)[order] // 7, "t": np.arange(n)[order] % 7}
    columns |= {"a": rng.normal(size=n)[order], "b": np.arange(n)[order]} | {"y": columns["id"] % 2}
    pq.write_table(pa.table(columns), folder / "long.parquet")
    named = {"id_column": "id", "time_column": "t", "value_columns": ["a", "b"], "label_column": "y"}
    return config(folder / "long.parquet", **named, split="stratified", max_length=5, truncate=True)


@pytest.mark.parametrize("kind", ["parquet", "wav", "npy", "flac", "ts", "long"])
def test_rows_in_a_file_are_the_same_as_in_memory(kind, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    options = long_table(tmp_path / "a") if kind == "long" else make(kind, tmp_path / "a")[1]
    usual = prepared(options, tmp_path / "usual")
    small_limits(monkeypatch)
    loaded = custom.load(options, Path("."))
    assert isinstance(loaded.train.values, np.memmap), "they lie in a file"
    found = prepared(options, tmp_path / "bounded")
    assert rows_hash(found) == rows_hash(usual) == rows_hash(loaded.mapped(with_fingerprints))
    assert found.input == usual.input and found.notes == usual.notes
    for name, split in found.splits.items():
        assert np.array_equal(split.values, usual.splits[name].values)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "a",
        "bounded",
        "usual",
    ]


def test_words_in_a_file_are_the_same_as_in_memory(tmp_path, monkeypatch):
    table = {"x": [f"word{i} and word{i % 7} again" for i in range(60)], "y": ["ab"[i % 2] for i in range(60)]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    options = config(tmp_path / "a.parquet", text_column="x", label_column="y", tokens="words")
    usual = prepared(options, tmp_path / "usual")
    small_limits(monkeypatch)
    found = prepared(options, tmp_path / "bounded")
    assert rows_hash(found) == rows_hash(usual) and found.input == usual.input


def test_steps_of_several_types(monkeypatch):
    small_limits(monkeypatch)
    steps, rng = Steps(np.int16), np.random.default_rng(0)
    rows = [rng.integers(-999, 999, n).astype(np.int16) for n in (3, 60, 1, 200, 7)]
    for row in rows:
        steps.add(row)
    other = steps.converted(np.float32, lambda piece: piece.astype(np.float32) / 2)
    other.add(np.ones(5, np.float32))
    assert len(other) == 276 and np.array_equal(other.array()[:-5], np.concatenate(rows) / 2)
    assert len(Steps(np.int16).converted(np.float32, lambda piece: piece.astype(np.float32))) == 0


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    options = make("npy", tmp_path / "a")[1]
    small_limits(monkeypatch)
    monkeypatch.delenv("TMPDIR", raising=False)

    class Full:
        def __init__(self, **kept):
            self.kept = kept

        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **kept: Full(**kept))
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(
        ValueError, match=r"does not fit into .*cache/tasks \(No space left on device\); let TMPDIR name"
    ):
        prepared(options, tmp_path / "bounded")
    assert not (tmp_path / "bounded").exists() and not list((tmp_path / "cache" / "tasks").iterdir())


def measured(options):
    command = [sys.executable, "tests/measured_preparing.py", options.model_dump_json()]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["lists", "one row group", "texts", "arrays", "csv"])
def test_memory_does_not_grow_with_the_data(layout, tmp_path):
    """200 MB take at most 100 MB more than 60, which fill every batch already; all of it in memory would be 140. On an
    idle machine it is less than 64; a busy one gives pages back later."""

    def options(megabytes):
        folder, rng = tmp_path / str(megabytes), np.random.default_rng(0)
        folder.mkdir()
        n = megabytes * MB // 16384
        kept = {"label_column": "y", "split": "stratified"}
        if layout == "arrays":
            label_files(folder, [f"{i}.npy" for i in range(n)])
            for i in range(n):
                np.save(folder / f"{i}.npy", rng.standard_normal(4096, np.float32))
            path = folder / "labels.csv"
            path.write_text(path.read_text())
            return config(folder, file_column="file", **kept)
        if layout == "csv":
            with (folder / "a.csv").open("w") as file:
                file.write("x,y\n")
                for i in range(n):
                    file.write(f"{'%.4f ' * 2048 % tuple(rng.standard_normal(2048))},{i % 2}\n")
            return config(folder / "a.csv", list_column="x", **kept)
        y = pa.array(np.arange(n) % 2)
        if layout == "texts":
            x = pa.array([rng.integers(97, 123, 4096, np.uint8).tobytes().decode() for _ in range(n)])
        else:
            x = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(4096 * n, np.float32)), 4096)
        pq.write_table(pa.table({"x": x, "y": y}), folder / "a.parquet", row_group_size=n if "one" in layout else 1000)
        return config(folder / "a.parquet", **{"text_column" if layout == "texts" else "list_column": "x"}, **kept)

    small, large = measured(options(60)), measured(options(200))
    assert sum(large["rows"].values()) > 3 * sum(small["rows"].values())
    assert large["bytes"] - small["bytes"] < 100 * MB, (small, large)
