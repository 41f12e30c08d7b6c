"""Your own data by recipe alone: layouts, splits, and what is said about files that are wrong."""

import csv
import io
import itertools
import json
import os
import subprocess
import sys
import wave
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny import RECIPE, changed, environment, load, recipe_file, run, spt, spt_job

from spt.config.load import schema
from spt.config.recipe import Part
from spt.data.dataset import data_identity, open_task
from spt.data.fingerprints import overlap
from spt.errors import DataError, RecipeError
from spt.tasks.base import Classes, Reals, Tokens, Values
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import sort_labels
from spt.tasks.own.splits import TRAIN, hash_key, missing_shares, split_by_hash

TEXT = {"text_column": "body", "label_column": "stars"}
LIST = {"list_column": "x", "label_column": "y"}
WIDE = {"value_prefix": "nm_", "label_column": "kind"}
HALF = {"validation_fraction": 0.25, "test_fraction": 0.25}  # of a few rows


def write(path, rows, delimiter=","):
    """Rows, as dicts, in the format that the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix in (".jsonl", ".ndjson"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def reviews(n, start=0):
    words = {0: ["bad", "poor", 'a "quoted" word', "naïve, 文"], 1: ["good", "fine", "line\nbreak", "nice"]}
    return [
        {"id": f"r{i}", "body": " ".join(words[i % 2][(i * k) % 4] for k in range(1, 4)) + f" {i}", "stars": i % 2}
        for i in range(start, start + n)
    ]


def spectra(n):
    rng = np.random.default_rng(0)
    numbers = rng.normal(5, 3, (n, 4)).astype(np.float32)
    return [
        {**{f"nm_{400 + 10 * j}": float(v) for j, v in enumerate(row)}, "kind": "ab"[i % 2]}
        for i, row in enumerate(numbers)
    ]


def opened(path, **options):
    return open_task(Part(name="custom", path=str(path), **options))


def by_id(data):
    return {str(name): split for split, part in data.splits.items() for name in part.ids}


def texts(data, split):
    return ["".join(map(chr, split.row(i))) for i in range(len(split))]


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "ndjson", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path, ending):
    one = opened(write(tmp_path / f"a.{ending}", reviews(80)), id_column="id", **TEXT)
    two = opened(write(tmp_path / "b.csv", reviews(80)), id_column="id", **TEXT)
    for name, split in one.splits.items():
        other = two.splits[name]
        assert np.array_equal(split.fingerprints, other.fingerprints) and np.array_equal(split.targets, other.targets)
        assert split.ids.tolist() == other.ids.tolist()
        assert texts(one, split) == [reviews(80)[int(i[1:])]["body"] for i in split.ids]
        assert split.targets.tolist() == [int(i[1:]) % 2 for i in split.ids]
    assert sum(map(len, one.splits.values())) == 80 and one.target == Classes(2)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), None])
def test_numbers_from_csv_and_parquet_have_one_data_hash(tmp_path, kind):
    """A list column, as a list in Parquet, as text in CSV; with channels, as JSON in CSV."""
    rng = np.random.default_rng(1)
    channels = kind is None
    lists = [rng.normal(size=(3 + i % 5, *([2] if channels else []))).astype(np.float32).tolist() for i in range(60)]
    y = [i % 3 for i in range(60)]
    columns = {"x": pa.array(lists, None if channels else pa.list_(kind)), "y": y}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=25)
    shown = [json.dumps(one) if channels else " ".join(map(str, one)) for one in lists]
    write(tmp_path / "a.csv", [{"x": x, "y": label} for x, label in zip(shown, y, strict=True)])
    write(tmp_path / "a.jsonl", [{"x": x, "y": label} for x, label in zip(lists, y, strict=True)])
    parts = [Part(name="custom", path=str(tmp_path / f"a.{e}"), **LIST) for e in ("parquet", "csv", "jsonl")]
    assert len({data_identity(part) for part in parts}) == 1
    data = open_task(parts[0])
    assert isinstance(data.input, Values) and data.input.channels == (2 if channels else 1)
    rows = {i: np.asarray(one, np.float32).reshape(len(one), -1) for i, one in enumerate(lists)}
    for split in data.splits.values():
        for i, row in enumerate(split.ids):
            assert np.array_equal(split.row(i), rows[row - 1])  # Parquet rows count from 1
    train = np.concatenate([data.train.row(i) for i in range(len(data.train))])
    assert np.allclose(data.input.mean, train.mean(0)) and np.allclose(data.input.std, train.std(0))


def test_fixed_size_lists_of_lists_in_parquet(tmp_path):
    x = np.arange(240, dtype=np.float32).reshape(20, 4, 3)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 3)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(inner, 4), "y": [i % 2 for i in range(20)]})
    pq.write_table(table, tmp_path / "a.parquet")
    data = opened(tmp_path / "a.parquet", normalise="none", **LIST, **HALF)
    assert data.input == Values(3)
    for split in data.splits.values():
        assert all(np.array_equal(split.row(i), x[row - 1]) for i, row in enumerate(split.ids))


def test_one_column_a_step(tmp_path):
    rows = spectra(40)
    data = opened(write(tmp_path / "s.csv", rows), **WIDE)
    assert data.length == 4 and isinstance(data.input, Values) and data.target == Classes(2)
    for split in data.splits.values():
        for i, line in enumerate(split.ids):  # the header is line 1
            assert np.allclose(split.row(i)[:, 0], list(rows[line - 2].values())[:4])
    picked = opened(tmp_path / "s.csv", value_columns=["nm_430", "nm_400"], label_column="kind")
    first = rows[int(picked.train.ids[0]) - 2]
    assert np.allclose(picked.train.row(0)[:, 0], [first["nm_430"], first["nm_400"]])


def test_a_prefix_means_the_first_files_columns_in_its_order(tmp_path):
    rows = spectra(30)
    write(tmp_path / "train.csv", rows)
    write(tmp_path / "val.jsonl", [dict(reversed(row.items())) for row in rows[:8]])
    write(tmp_path / "test.parquet", [{"other": 1, **dict(reversed(row.items()))} for row in rows[:8]])
    data = opened(tmp_path, **WIDE)
    for split in (data.val, data.test):
        assert all(np.array_equal(split.row(i), data.train.row(i)) for i in range(8))
    assert overlap(data) == {"val": 8, "test": 8}


def test_tokens_of_a_text(tmp_path):
    path = write(tmp_path / "r.jsonl", reviews(60))
    data = opened(path, **TEXT)
    assert isinstance(data.input, Tokens) and data.input.codes is not None and data.input.unknown == 0
    seen = {ord(c) for text in texts(data, data.train) for c in text}
    assert set(data.input.codes[1:]) == seen and data.input.vocab == len(seen) + 1
    assert data.input.codes[1] == ord(" "), "the most frequent comes first"

    whole = opened(path, tokens="bytes", **TEXT)
    assert whole.input == Tokens(256)
    assert whole.train.row(0).tobytes().decode() == texts(data, data.train)[0]

    words = opened(path, tokens="words", **TEXT)
    assert isinstance(words.input, Tokens) and words.input.codes is not None
    text = texts(data, data.train)[0]
    assert len(words.train.row(0)) == len(text.replace(",", " , ").replace('"', ' " ').split())
    assert [len(data.train), len(data.val), len(data.test)] == [len(words.train), len(words.val), len(words.test)]
    assert np.array_equal(data.train.ids, words.train.ids), "tokens do not decide the split"


def test_a_vocabulary_is_that_of_the_training_rows_in_use(tmp_path):
    rows = [{"body": chr(0x4E00 + i) * 3 + "ab", "stars": i % 2} for i in range(50)]
    path = write(tmp_path / "r.csv", rows)
    whole, few = opened(path, **TEXT), opened(path, subset_fraction=0.2, **TEXT)
    assert isinstance(whole.input, Tokens) and isinstance(few.input, Tokens)
    assert whole.input.vocab == len(whole.train) + 3 and few.input.vocab == len(few.train) + 3
    assert set(few.train.fingerprints) <= set(whole.train.fingerprints)
    assert (whole.input.ids(whole.test.row(0))[:3] == 0).all(), "unseen in training: unknown"
    often = opened(path, min_count=4, **TEXT)
    assert isinstance(often.input, Tokens) and often.input.codes == (-1, ord("a"), ord("b"))
    assert opened(path, min_count=10_000, **TEXT).input.vocab >= 2


def test_words_keep_their_codes_when_rows_come(tmp_path):
    path = tmp_path / "r.csv"
    before = opened(write(path, reviews(60)), tokens="words", id_column="id", **TEXT)
    after = opened(write(path, reviews(90)), tokens="words", id_column="id", **TEXT)
    assert set(before.train.fingerprints) < set(after.train.fingerprints)


def test_words_whose_hashes_meet_have_codes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("spt.tasks.own.assembly.WORD_CODES", 64)
    rows = [{"body": " ".join(f"w{(i + k) % 30}" for k in range(30)), "stars": i % 2} for i in range(60)]
    data = opened(write(tmp_path / "a.csv", rows), tokens="words", **TEXT, **HALF)
    assert data.input.vocab == 31 and all(len(set(data.train.row(i).tolist())) == 30 for i in range(len(data.train)))
    rows[0]["body"] += " and now three more"
    with pytest.raises(DataError, match=r"b.csv has 34 different words, more than 32; take tokens: characters"):
        opened(write(tmp_path / "b.csv", rows), tokens="words", **TEXT, **HALF)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, ending):
    path = write(tmp_path / f"a.{ending}", [{"body": row["body"], "stars": row["stars"]} for row in reviews(60)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert opened(path, **TEXT).target == Classes(2)


def test_whole_numbers_as_tokens(tmp_path):
    rows = [{"x": [i % 6, 7, i / 1], "y": i % 2} for i in range(40)]
    data = opened(write(tmp_path / "a.jsonl", rows), tokens="ids", **LIST, **HALF)
    assert data.input == Tokens(40)
    assert all(
        data.train.row(i).tolist() == [line % 6, 7, line] for i, line in enumerate((data.train.ids - 1).tolist())
    )
    wide = [{"a": i % 3, "b": i, "y": i % 2} for i in range(40)]
    data = opened(write(tmp_path / "w.csv", wide), tokens="ids", value_columns=["a", "b"], label_column="y")
    assert data.input == Tokens(40) and data.length == 2


def test_real_targets(tmp_path):
    rows = [{"x": [0.5, i], "y": i / 4, "z": -i} for i in range(40)]
    path = write(tmp_path / "a.parquet", rows)
    data = opened(path, target="real", list_column="x", label_columns=["y", "z"])
    assert data.target == Reals(2)
    assert all(
        data.train.targets[i].tolist() == [row[1, 0] / 4, -row[1, 0]]
        for i, row in enumerate(map(data.train.row, range(9)))
    )
    assert opened(path, target="real", **LIST).target == Reals(1)


def test_labels_are_numbered_in_sorted_order(tmp_path):
    for labels in (["10", "9", "2"], [10, 9, 2], [10.0, 9.0, 2.0]):
        rows = [{"x": [float(i)], "y": labels[i % 3]} for i in range(60)]
        data = opened(write(tmp_path / "a.jsonl", rows), **LIST)
        for split in data.splits.values():
            wanted = {0: 2, 1: 1, 2: 0}
            assert split.targets.tolist() == [wanted[int(split.row(i)[0, 0]) % 3] for i in range(len(split))]


def test_long_sequences_are_cut_on_request_only(tmp_path):
    path = write(tmp_path / "r.csv", reviews(60))
    with pytest.raises(DataError, match=r"r.csv, line 2, column body: the sequence has \d+ steps, max_length is 8;"):
        opened(path, max_length=8, **TEXT)
    data = opened(path, max_length=8, truncate=True, **TEXT)
    whole = opened(path, **TEXT)
    assert data.length == 8 and any("60 of 60 sequences were cut after 8 steps" in note for note in data.notes)
    assert np.array_equal(data.test.ids, whole.test.ids), "cutting does not decide the split"
    assert texts(data, data.train)[0] == texts(whole, whole.train)[0][:8]


def test_notes(tmp_path):
    rows = [{"x": [[1.0, i], [1.0, 2.0]], "y": i % 2 if i < 59 else "rare"} for i in range(60)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "val.jsonl", rows[:4])
    data = opened(tmp_path, **LIST, split_seed=next(s for s in range(99) if not drawn(tmp_path, s, rows[-1])))
    assert "1 of the 3 classes have one training row: 'rare'" in data.notes
    assert "channel 1 is constant in the training rows (1 of 2 channels are)" in data.notes
    assert f"{len(data.test)} test rows were drawn from the training rows by a hash of their input" in data.notes
    assert data.input.std[0] == 1.0


def drawn(folder, seed, row):
    shares = missing_shares(Options(path=folder, split_seed=seed, **LIST), {"train", "validation"})
    key = hash_key(np.asarray(row["x"], np.float32).tobytes(), seed)
    return split_by_hash(shares, np.array([key], np.uint64))[0] != TRAIN


# ------------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("ids", [{}, {"id_column": "id"}])
def test_appended_rows_move_no_others(tmp_path, ids):
    path = tmp_path / "r.csv"
    before = by_id(opened(write(path, reviews(200)), **TEXT, **ids))
    after = by_id(opened(write(path, reviews(300)), **TEXT, **ids))
    assert len(before) == 200 and len(after) == 300 and before.items() < after.items()
    counts = np.bincount([("train", "val", "test").index(split) for split in after.values()])
    assert all(15 <= count <= 50 for count in counts[1:]), counts
    other = by_id(opened(path, split_seed=1, **TEXT, **ids))
    assert other != after


def test_order_and_shape_of_the_file_do_not_decide_the_split(tmp_path):
    rows = reviews(100)
    one = opened(write(tmp_path / "a.csv", rows), id_column="id", **TEXT)
    two = opened(write(tmp_path / "b.parquet", rows[::-1]), id_column="id", test_fraction=0.1, **TEXT)
    assert by_id(one) == by_id(two)
    more = opened(tmp_path / "a.csv", id_column="id", validation_fraction=0.3, **TEXT)
    assert set(more.test.ids) == set(one.test.ids) and set(more.val.ids) > set(one.val.ids)


def test_rows_of_one_id_and_of_one_input_stay_together(tmp_path):
    rows = [{"id": i % 20, "x": [float(i)], "y": i % 2} for i in range(200)]
    data = opened(write(tmp_path / "a.parquet", rows), id_column="id", **LIST)
    ids = [set(split.ids.tolist()) for split in data.splits.values()]
    assert sum(map(len, ids)) == 20 and len(data.train) == 10 * len(ids[0])
    twins = [{"x": [float(i // 4)], "y": i % 2} for i in range(200)]
    assert overlap(opened(write(tmp_path / "b.csv", twins), **LIST)) == {"val": 0, "test": 0}


def test_a_folder_with_all_splits_by_their_usual_names(tmp_path):
    for k, names in enumerate([("train", "validation", "test"), ("Training", "my-dev", "eval_0")]):
        folder = tmp_path / str(k)
        folder.mkdir()
        for i, name in enumerate(names):
            write(folder / f"{name}.{('csv', 'jsonl', 'parquet')[i]}", reviews(6, 10 * i))
        (folder / "notes.txt").write_text("not data")
        (folder / "._train.csv").write_bytes(b"\0\xff")
        data = opened(folder, **TEXT)
        assert [len(split) for split in data.splits.values()] == [6, 6, 6] and data.notes == ()
        assert texts(data, data.test) == [row["body"] for row in reviews(6, 20)]
        assert data.test.ids.tolist() == [f"{names[2]}-{i}" for i in range(1, 7)]


def test_pieces_of_a_split_and_missing_splits(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", reviews(40))
    write(tmp_path / "train-00001-of-00002.parquet", reviews(40, 40))
    write(tmp_path / "test.parquet", reviews(5, 100))
    data = opened(tmp_path, id_column="id", **TEXT)
    assert len(data.test) == 5 and len(data.train) + len(data.val) == 80 and len(data.val) > 1
    assert len(data.notes) == 1 and "validation rows" in data.notes[0] and "column id" in data.notes[0]


def test_a_column_says_the_split(tmp_path):
    said = ["train", "Valid", "train", "test", "training"]
    rows = [{**row, "part": said[i % 5]} for i, row in enumerate(reviews(50))]
    data = opened(write(tmp_path / "r.csv", rows), split_column="part", id_column="id", **TEXT)
    assert [len(split) for split in data.splits.values()] == [30, 10, 10] and not data.notes
    assert all(int(i[1:]) % 5 == 3 for i in data.test.ids)
    two = [{**row, "part": "test" if i % 5 == 3 else "train"} for i, row in enumerate(reviews(50))]
    data = opened(write(tmp_path / "r.csv", two), split_column="part", id_column="id", **TEXT)
    assert len(data.test) == 10 and 0 < len(data.val) < 12 and "validation rows" in data.notes[0]


def test_an_edited_file_is_read_anew(tmp_path):
    path = write(tmp_path / "train.csv", reviews(60))
    part = Part(name="custom", path=str(tmp_path), **TEXT)
    one = data_identity(part)
    assert data_identity(part) == one
    write(path, [{**row, "stars": 1 - row["stars"]} for row in reviews(60)])
    two = data_identity(part)
    write(tmp_path / "test.csv", reviews(9, 90))
    assert len({one, two, data_identity(part)}) == 3 and len(open_task(part).test) == 9


def test_memory_stays_near_the_size_of_the_data(tmp_path):
    """40 MB of numbers as Parquet: a few copies at most, not millions of Python numbers."""
    x = np.random.default_rng(0).normal(size=(2000, 5000)).astype(np.float32)
    lists = pa.ListArray.from_arrays(np.arange(2001, dtype=np.int32) * 5000, x.reshape(-1))
    pq.write_table(pa.table({"x": lists, "y": np.arange(2000) % 2}), tmp_path / "a.parquet", row_group_size=200)
    program = (
        "from pathlib import Path\nimport pyarrow.parquet, torch\nfrom spt.tasks.custom import Config, load\n"
        "from spt.runtime.memory import peak_memory\n"
        "peak = lambda: peak_memory(torch.device('cpu')) / 1e6\n"
        "before = peak()\n"
        f"data = load(Config(path=Path({str(tmp_path / 'a.parquet')!r}), list_column='x', label_column='y'), None)\n"
        "print(peak() - before, len(data.train.values))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    grown, steps = map(float, done.stdout.split())
    assert steps > 7e6 and grown < 250, f"{grown:.0f} MB for 40 MB"


# -------------------------------------------------------------------------------------------------------- wrong files


def raw(text):
    return text.encode() if isinstance(text, str) else text


def npy(array=None):
    file = io.BytesIO()
    np.save(file, np.arange(5.0) if array is None else array)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def lzma_npz(**arrays):
    """Compressed as numpy never does, and damaged."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", npy(array))
    content = bytearray(file.getvalue())
    content[60:160] = bytes(100)
    return bytes(content)


def wav(seed=0, rate=8000, samples=400):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(np.random.default_rng(seed).integers(-999, 999, samples).astype("<i2").tobytes())
    return file.getvalue()


def sounds(*files):
    """A folder of array files and the table of their labels."""
    table = "f,y\n" + "".join(f"{name},{'ab'[i % 2]}\n" for i, (name, _) in enumerate(files))
    return {"d/labels.csv": table, **{f"d/{name}": content for name, content in files if content is not None}}


LONG = {"id_column": "p", "time_column": "t", "value_columns": ["v"], "label_column": "y"}
FILES = {"file_column": "f", "label_column": "y"}
GOOD = "x,y\n1 2,a\n3 4,b\n5 6,a\n7 8,b\n"
JSONL = '{"x": [1, 2], "y": "a"}\n{"x": [3, 4], "y": "b"}\n'
WRONG = {  # files or one file's content, options, what is said
    "empty": ({"d.csv": ""}, LIST, "d.csv is empty"),
    "blank lines only": ({"d.csv": "\n\n\n"}, LIST, "d.csv is empty"),
    "header only": ({"d.csv": "x,y\n"}, LIST, "d.csv has a header but no rows"),
    "no objects": ({"d.jsonl": "\n\n"}, LIST, "d.jsonl is empty"),
    "latin-1": (
        {"d.csv": b"body,stars\ngut,1\n" + "schön,0\n".encode("latin-1")},
        TEXT,
        "d.csv, line 3: byte 0xf6 is not UTF-8; save the file as UTF-8",
    ),
    "utf-16": ({"d.csv": "x,y\n1,2\n".encode("utf-16")}, LIST, "d.csv, line 1: byte 0xff is not UTF-8"),
    "latin-1 in json": ({"d.jsonl": JSONL.encode() + b'{"x": [1], "y": "\xe9"}\n'}, LIST, "d.jsonl, line 3: byte 0xe9"),
    "ragged": ({"d.csv": GOOD + "9 9\n"}, LIST, "d.csv, line 6 has 1 cells, the header 2"),
    "too many cells": ({"d.csv": "x,y\n1,2,a\n"}, LIST, "d.csv, line 2 has 3 cells, the header 2"),
    "open quote": ({"d.csv": GOOD + '"9 9,a\n1 1,b\n'}, LIST, "d.csv, line 6: unexpected end of data"),
    "loose quote": ({"d.csv": GOOD + '"9" 9,a\n'}, LIST, "d.csv, line 6: .*a cell with quotes"),
    "missing column": ({"d.csv": "X,y\n1,2\n"}, LIST, "d.csv has no column 'x'; did you mean 'X'?"),
    "missing label": (
        {"d.csv": "x,lable\n1,2\n"},
        {"list_column": "x", "label_column": "label"},
        "did you mean 'lable'?",
    ),
    "semicolons": ({"d.csv": "x;y\n1;2\n"}, LIST, "d.csv has no column 'x'; there: 'x;y'"),
    "column twice": ({"d.csv": "x,y,x\n1,2,3\n"}, LIST, "d.csv has 2 columns named 'x'"),
    "no such prefix": ({"d.csv": "a,kind\n1,2\n"}, WIDE, "no column that begins with 'nm_'; there: 'a', 'kind'"),
    "not a number": (
        {"d.csv": "nm_1,nm_2,kind\n1,2,a\n3,n/a,b\n"},
        WIDE,
        "d.csv, line 3, column nm_2: 'n/a' is not a number",
    ),
    "decimal comma": ({"d.csv": 'nm_1,kind\n"1,5",a\n'}, WIDE, "d.csv, line 2, column nm_1: '1,5' is not a number"),
    "empty cell": (
        {"d.csv": "nm_1,nm_2,kind\n1,2,a\n3,,b\n"},
        WIDE,
        "line 3, column nm_2: the cell is empty; a number",
    ),
    "nan": ({"d.csv": "nm_1,nm_2,kind\n1,nan,a\n"}, WIDE, "line 2, column nm_2: 'nan' is not a finite number"),
    "inf": ({"d.csv": "nm_1,nm_2,kind\n1,-inf,a\n"}, WIDE, "line 2, column nm_2: '-inf' is not a finite number"),
    "huge": ({"d.csv": "nm_1,nm_2,kind\n1,1e30,a\n"}, WIDE, "line 2, column nm_2: '1e30' is not a finite number below"),
    "huge whole number": (
        {"d.jsonl": '{"x": [1, 1' + "0" * 400 + '], "y": 1}\n'},
        LIST,
        "line 1, column x, step 2: 1000",
    ),
    "null": ({"d.jsonl": JSONL + '{"x": [1, null], "y": "a"}\n'}, LIST, "line 3, column x, step 2: the cell is empty"),
    "NaN in json": (
        {"d.jsonl": JSONL + '{"x": [1, NaN], "y": "a"}\n'},
        LIST,
        "line 3, column x, step 2: nan is not a finite",
    ),
    "no list": ({"d.jsonl": JSONL + '{"x": 3, "y": "a"}\n'}, LIST, "line 3, column x: 3 is not a list of numbers"),
    "text in a list": (
        {"d.jsonl": JSONL + '{"x": [1, "2"], "y": "a"}\n'},
        LIST,
        "line 3, column x, step 2: '2' is not a number",
    ),
    "too deep": (
        {"d.jsonl": JSONL + '{"x": [[[1]]], "y": "a"}\n'},
        LIST,
        r"line 3, column x, step 1: \[1\] is not a number",
    ),
    "steps without numbers": (
        {"d.jsonl": '{"x": [[], []], "y": "a"}\n'},
        LIST,
        "line 1, column x: not a list of numbers, nor of equally long lists of numbers",
    ),
    "empty list": ({"d.jsonl": JSONL + '{"x": [], "y": "a"}\n'}, LIST, "line 3, column x: the sequence has no steps"),
    "after a cell of two lines": (
        {"d.csv": 'body,stars\n"two\nlines",1\n\n,0\n'},
        TEXT,
        "line 5, column body: the sequence has no steps",
    ),
    "empty text": ({"d.csv": "body,stars\nyes,1\n,0\n"}, TEXT, "line 3, column body: the sequence has no steps; leave"),
    "no word": (
        {"d.csv": "body,stars\n   ,0\n"},
        {**TEXT, "tokens": "words"},
        "line 2, column body: the sequence has no steps",
    ),
    "null text": ({"d.jsonl": '{"body": null, "stars": 1}\n'}, TEXT, "line 1, column body: the cell is empty"),
    "number for a text": (
        {"d.jsonl": '{"body": "a", "stars": 1}\n{"body": 5, "stars": 1}\n'},
        TEXT,
        "line 2, column body: 5 is not text",
    ),
    "half a character": ({"d.jsonl": '{"body": "a\\ud800", "stars": 1}\n'}, TEXT, "line 1, column body: .*surrogate"),
    "not json": ({"d.jsonl": JSONL + "{'x': 1}\n"}, LIST, "d.jsonl, line 3: not an object in JSON"),
    "cut json": ({"d.jsonl": JSONL + '{"x": [1, 2'}, LIST, "d.jsonl, line 3: not an object in JSON"),
    "deep json": ({"d.jsonl": JSONL + "[" * 100_000 + "\n"}, LIST, "d.jsonl, line 3: not an object in JSON"),
    "json value": ({"d.jsonl": JSONL + "[1, 2]\n"}, LIST, r"d.jsonl, line 3: \[1, 2\] is not an object"),
    "key missing": ({"d.jsonl": JSONL + '{"x": [1, 2]}\n'}, LIST, "d.jsonl, line 3 has no column 'y'; there: 'x'"),
    "extra step": (
        {"d.jsonl": '{"nm_1": 1, "kind": 1}\n{"nm_1": 1, "nm_2": 1, "kind": 1}\n'},
        WIDE,
        "d.jsonl, line 2 has a column 'nm_2' that the rows before do not have",
    ),
    "bad list in csv": ({"d.csv": 'x,y\n"[1, 2",a\n'}, LIST, r"line 2, column x: '\[1, 2' is not a list in JSON"),
    "word in csv list": ({"d.csv": "x,y\n1 two,a\n"}, LIST, "line 2, column x, step 2: 'two' is not a number"),
    "channels": (
        {"d.jsonl": '{"x": [[1, 2]], "y": 1}\n{"x": [[1]], "y": 0}\n'},
        LIST,
        "d.jsonl, line 2, column x: a step has 1 numbers, but 2 in d.jsonl, line 1, column x",
    ),
    "ragged channels": (
        {"d.jsonl": '{"x": [[1, 2], [3]], "y": 1}\n'},
        LIST,
        "line 1, column x, step 2: a list of 1 stands here, a list of 2 in the first step",
    ),
    "number and list": ({"d.jsonl": '{"x": [1, [3]], "y": 1}\n'}, LIST, "step 2: a list of 1 stands here, a number in"),
    "fraction as a token": (
        {"d.csv": "x,y\n1 2.5,a\n"},
        {**LIST, "tokens": "ids"},
        "line 2, column x, step 2: 2.5 is no token",
    ),
    "negative token": (
        {"d.csv": "x,y\n1 -2,a\n"},
        {**LIST, "tokens": "ids"},
        "step 2: -2 is no token id; these go from 0",
    ),
    "endless vocabulary": (
        {"d.csv": "x,y\n9000000000,a\n"},
        {**LIST, "tokens": "ids"},
        "step 1: 9000000000 is no token id",
    ),
    "empty label": ({"d.csv": GOOD + "1 2,\n"}, LIST, "d.csv, line 6, column y: the cell is empty"),
    "list as label": (
        {"d.jsonl": '{"x": [1], "y": [1]}\n'},
        LIST,
        r"line 1, column y: \[1\] is neither text nor a number",
    ),
    "endless label": ({"d.csv": f"x,y\n1,{'a' * 500}\n"}, LIST, "line 2, column y: 500 characters are too many"),
    "no real label": ({"d.csv": GOOD}, {**LIST, "target": "real"}, "d.csv, line 2, column y: 'a' is not a number"),
    "one class": (
        {"d.csv": "x,y\n" + "".join(f"{i} 1,a\n" for i in range(50))},
        LIST,
        "d.csv, column y: every training row has the label 'a'; a classification needs two",
    ),
    "too few rows": ({"d.csv": "x,y\n1 2,a\n"}, LIST, "none of the 1 rows is in the"),
    "bad split": (
        {"d.csv": "x,y,s\n1,a,train\n2,b,tset\n"},
        {**LIST, "split_column": "s"},
        "d.csv, line 3, column s: 'tset' is no split; train, validation or test is expected",
    ),
    "one group": (
        {"d.csv": "g,x,y\n" + "".join(f"p,{i} {i},{'ab'[i % 2]}\n" for i in range(40))},
        {**LIST, "group_column": "g"},
        "rows of one value of column g are never split apart, but there is 1 for 3 splits; give validation rows",
    ),
    "one input": (
        {"d.csv": "x,y\n" + "1 2,a\n1 2,b\n" * 20},
        LIST,
        "rows of one value of the input are never split apart, but there is 1 for 3 splits; give",
    ),
    "hardly any label": (
        {"d.csv": "x,y\n1 1,a\n2 2,b\n" + "".join(f"{i} {i},\n" for i in range(3, 40))},
        {**LIST, "missing_labels": "ignore"},
        r"since only 2 have a label \(or belong with one that has\), and rows of one value of the input .* are 2",
    ),
    "a separator that stands nowhere": (
        {"d.csv": GOOD},
        {**LIST, "target": "labels", "label_separator": ";"},
        "d.csv, column y: no cell has the label_separator ';'; there: 'a', 'b'; name what stands between labels",
    ),
    "no label in training": (
        {"d/train.csv": "x,y\n1 1,\n2 2,\n", "d/dev.csv": "x,y\n3 3,a\n4 4,b\n"},
        {**LIST, "missing_labels": "ignore"},
        "d, column y: no training row has a label",
    ),
    "a label for each row": (
        {"d.csv": "x,y\n" + "".join(f"{i} {i},u{i}\n" for i in range(40))},
        {**LIST, "split": "stratified"},
        "the first row of each label stays in training, and none of column y has two; give validation rows of your own",
    ),
    "two rows of each label": (
        {"d.csv": "x,y\n" + "".join(f"{i} {i},u{i % 40}\n" for i in range(80))},
        {**LIST, "split": "stratified", "validation_fraction": 0.1, "test_fraction": 0.1},
        "rows of each label are shared out alike, and none of column y has more than 2; raise .*_fraction",
    ),
    "few rows by a hash": ({"d.csv": "x,y\n1 1,a\n2 2,b\n3 3,a\n"}, LIST, "; raise .*_fraction or give .* rows of"),
    "no training rows": (
        {"d.csv": "x,y,s\n1,a,test\n"},
        {**LIST, "split_column": "s"},
        "none of the 1 rows is in the train split",
    ),
    "split column of a folder": (
        {"d/train.csv": GOOD, "d/test.csv": GOOD},
        {**LIST, "split_column": "s"},
        "split_column is for a single file",
    ),
    "unseen label": (
        {"d/train.csv": GOOD, "d/val.csv": GOOD, "d/test.csv": GOOD + "1 1,B\n"},
        LIST,
        "test.csv, line 6, column y: the label 'B' of this test row is in no training row; did you mean 'b'?",
    ),
    "numbers as classes": (
        {"d/train.csv": "x,y\n1,0.5\n2,0.7\n", "d/val.csv": "x,y\n1,0.6\n", "d/test.csv": GOOD},
        LIST,
        "val.csv, line 2.*'0.6' of this validation row .*say target: real",
    ),
    "empty validation": ({"d/train.csv": GOOD, "d/dev.csv": "x,y\n"}, LIST, "dev.csv has a header but no rows"),
    "an id in two splits": (
        {"d/train.csv": "x,y,i\n1,a,p1\n2,b,p2\n", "d/val.csv": "x,y,i\n1,a,p3\n", "d/test.csv": "x,y,i\n3,a,p2\n"},
        {**LIST, "id_column": "i"},
        "test.csv, line 2, column i: the id 'p2' has another split than in train.csv, line 3",
    ),
    "other columns": (
        {"d/train.csv": "nm_1,kind\n1,a\n2,b\n", "d/val.csv": "nm_1,nm_2,kind\n1,1,a\n"},
        WIDE,
        "val.csv has a column 'nm_2' that the rows before do not have",
    ),
    "fewer columns": (
        {"d/train.csv": "nm_1,nm_2,kind\n1,2,a\n2,1,b\n", "d/val.csv": "nm_1,kind\n1,a\n"},
        WIDE,
        "val.csv has no column 'nm_2'",
    ),
    "no training file": (
        {"d/data.csv": GOOD, "d/test.csv": GOOD},
        LIST,
        "no training file such as train.csv; there: 'data.csv'",
    ),
    "sounds": ({"d/one.wav": "RIFF"}, LIST, "for a folder of arrays or sounds: file_column"),
    "an empty folder": ({"d/": ""}, LIST, "has no training file"),
    "two formats": (
        {"d/train.csv": GOOD, "d/train.jsonl": JSONL},
        LIST,
        "the train split is in .* as .csv and as .jsonl",
    ),
    "two splits": ({"d/train-test.csv": GOOD}, LIST, "train-test.csv says test and train"),
    "a folder as file": ({"d/train.csv/": "", "d/test.csv": GOOD}, LIST, "train.csv is not a regular file"),
    "zipped": ({"d.csv.gz": "x"}, LIST, "d.csv.gz is not read: unpack it first"),
    "json": ({"d.json": "{}"}, LIST, "write one object a line and call the file .jsonl"),
    "excel": ({"d.xlsx": "PK"}, LIST, "save the table as .csv"),
    "another ending": ({"d.dat": "x"}, LIST, "its name should end in one of .csv, .tsv"),
    "not parquet": ({"d.parquet": GOOD}, LIST, "d.parquet cannot be read as Parquet: "),
    "utf-16 without a mark": (
        {"d.csv": GOOD.encode("utf-16-le")},
        LIST,
        "d.csv, line 1 has a NUL byte, so it is no UTF",
    ),
    "a NUL byte": ({"d.csv": GOOD + "1 \0002,a\n"}, LIST, "d.csv, line 6 has a NUL byte, so it is no UTF-8; save"),
    "a line of 50 MB": (
        {"d.csv": GOOD.encode() + b"1 " * 25_000_000 + b",a\n"},
        LIST,
        "d.csv, line 6 has more than 33,554,432 characters; cut such a sequence, or write one step a row",
    ),
    "a cell of 50 MB": (
        {"d.csv": b'x,y\n"' + (b"1 " * 500_000 + b"\n") * 50 + b'",a\n'},
        LIST,
        "line 2: field larger than field",
    ),
    "an object of 50 MB": (
        {"d.jsonl": JSONL.encode() + b'{"x": [' + b"1," * 25_000_000 + b'1], "y": 1}\n'},
        LIST,
        "d.jsonl, line 3 has more than 33,554,432 characters",
    ),
    "mixed types": (
        {"d.jsonl": JSONL + '{"x": {"a": 1}, "y": "a"}\n'},
        LIST,
        "line 3, column x: {'a': 1} is not a list",
    ),
    "an id twice": (
        {"d.csv": "x,y,i,g\n1,a,p,1\n2,b,q,1\n3,b,p,2\n"},
        {**LIST, "id_column": "i", "group_column": "g"},
        "d.csv, line 4, column i: the id 'p' stands in d.csv, line 2 already",
    ),
    "a group in two splits": (
        {"d/train.csv": "x,y,g\n1,a,p\n2,b,q\n", "d/test.csv": "x,y,g\n1,a,q\n", "d/val.csv": "x,y,g\n1,a,r\n"},
        {**LIST, "group_column": "g"},
        "test.csv, line 2, column g: the group 'q' has another split than in train.csv, line 3",
    ),
    # One row a step.
    "time twice": (
        {"d.csv": "p,t,v,y\na,1,5,0\na,2,5,0\nb,1,5,1\na,1.0,5,0\n"},
        LONG,
        "d.csv, line 5, column t: the id 'a' has this time in d.csv, line 2 already; a step is one row",
    ),
    "label varies": (
        {"d.csv": "p,t,v,y\na,1,5,0\nb,1,5,1\na,2,5,1\n"},
        LONG,
        "d.csv, line 4, column y: the id 'a' has another label than in d.csv, line 2; a sequence has one; per",
    ),
    "group varies": (
        {"d.csv": "p,t,v,y,g\na,1,5,0,x\na,2,5,0,z\n"},
        {**LONG, "group_column": "g"},
        "d.csv, line 3, column g: the id 'a' has another group than in d.csv, line 2",
    ),
    "split varies": (
        {"d.csv": "p,t,v,y,s\na,1,5,0,train\na,2,5,0,dev\n"},
        {**LONG, "split_column": "s"},
        "d.csv, line 3, column s: the id 'a' has another split than in d.csv, line 2",
    ),
    "an id of two files": (
        {"d/train.csv": "p,t,v,y\na,1,5,0\nb,1,5,1\n", "d/test.csv": "p,t,v,y\na,2,5,0\n"},
        LONG,
        "test.csv, line 2, column p: the id 'a' has another split than in train.csv, line 2",
    ),
    "unknown split": (
        {"d.csv": "p,t,v,y,s\na,1,5,0,train\na,2,5,0,tarin\n"},
        {**LONG, "split_column": "s"},
        "d.csv, line 3, column s: 'tarin' is no split",
    ),
    "no time": ({"d.csv": "p,t,v,y\na,1,5,0\na,soon,5,0\n"}, LONG, "d.csv, line 3, column t: 'soon' is not a number"),
    "no date": (
        {"d.csv": "p,t,v,y\na,2026-01-01,5,0\na,yesterday,5,0\n"},
        LONG,
        "d.csv, line 3, column t: 'yesterday' is no date and time, which the rows before have",
    ),
    "gap": ({"d.csv": "p,t,v,y\na,1,5,0\na,2,,0\n"}, LONG, "d.csv, line 3, column v: the cell is empty; a number"),
    "NaN in a step": (
        {"d.csv": "p,t,v,y\na,1,5,0\na,2,NaN,0\n"},
        LONG,
        "line 3, column v: 'NaN' is not a finite number",
    ),
    "underscores": ({"d.csv": "p,t,v,y\na,1,5,0\na,2,1_0,0\n"}, LONG, "line 3, column v: '1_0' is not a number"),
    "no id": ({"d.csv": "p,t,v,y\na,1,5,0\n,2,5,0\n"}, LONG, "d.csv, line 3, column p: the cell is empty"),
    "list as id": (
        {"d.jsonl": '{"p": [1], "t": 1, "v": 5, "y": 0}\n'},
        LONG,
        r"line 1, column p: \[1\] is neither text",
    ),
    "no label": ({"d.csv": "p,t,v,y\na,1,5,0\nb,2,5,\n"}, LONG, "d.csv, line 3, column y: the cell is empty"),
    "too many steps": (
        {"d.csv": "p,t,v,y\na,1,5,0\na,2,5,0\na,3,5,0\n"},
        {**LONG, "max_length": 2},
        "d.csv, line 2, id 'a': the sequence has 3 steps, max_length is 2; raise it, or cut",
    ),
    "ragged steps": ({"d.csv": "p,t,v,y\na,1,5\n"}, LONG, "d.csv, line 2 has 3 cells, the header 4"),
    "a part of the targets": (
        {"d.csv": "p,t,v,y,z\na,1,5,0,1\na,2,5,,1\n"},
        {**{k: v for k, v in LONG.items() if k != "label_column"}, "label_columns": ["y", "z"], "per_step": True}
        | {"target": "real"},
        "d.csv, line 3, column y: a step has all of its label columns or none",
    ),
    # A file a sequence.
    "leads outside": (sounds(("../a.wav", wav())), FILES, "labels.csv, line 2, column f: '../a.wav' leads outside"),
    "leads to the root": (sounds(("/etc/a.wav", wav())), FILES, "'/etc/a.wav' leads outside the folder d; it is not"),
    "leads outside on Windows": (sounds(("..\\\\a.wav", wav())), FILES, "leads outside the folder d; it is not used"),
    "no such file": (sounds(("a.wav", None)), FILES, "labels.csv, line 2, column f: there is no file 'a.wav' in d"),
    "a folder as sound": ({**sounds(("a.wav", None)), "d/a.wav/": ""}, FILES, "'a.wav' is not a regular file"),
    "no file": (sounds(("", None)), FILES, "labels.csv, line 2, column f: the cell is empty; it names a file"),
    "an m4a": (sounds(("a.m4a", b"x")), FILES, "'a.m4a' is not read; files are .npy, .npz, .wav"),
    "a file twice": (
        sounds(("a.wav", wav()), ("./a.wav", wav())),
        FILES,
        "line 3, .*the file 'a.wav' stands in .* line 2",
    ),
    "a file without a label": (
        {**sounds(("a.wav", wav()), ("b.wav", wav(7))), "d/c.wav": wav(8)},
        FILES,
        "the folder d has 1 files that no row of labels.csv names; there: 'c.wav'; give them rows and labels",
    ),
    "two rates": (
        sounds(("a.wav", wav()), ("b.wav", wav(rate=16000))),
        FILES,
        "line 3, column f, b.wav: 16,000 samples a second, but 8,000 in labels.csv, line 2, column f; convert",
    ),
    "sounds and arrays": (sounds(("a.wav", wav()), ("b.npy", npy())), FILES, "a .npy file, but a .wav file in"),
    "cut wav": (sounds(("a.wav", wav()[:-4])), FILES, "line 2, column f, a.wav is cut short"),
    "compressed wav": (
        sounds(("a.wav", wav().replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0\2\0"))),
        FILES,
        "a.wav is compressed or coded .*; convert it to PCM",
    ),
    "no wav": (sounds(("a.wav", b"ID3" * 20)), FILES, "line 2, column f, a.wav is no WAV file"),
    "objects": (
        sounds(("a.npy", npy(np.array([1, "x", None], object)))),
        FILES,
        "a.npy cannot be read as an array: Object arrays",
    ),
    "texts": (sounds(("a.npy", npy(np.array(["a", "b"])))), FILES, "line 2, column f, a.npy holds <U1; numbers are"),
    "complex": (sounds(("a.npy", npy(np.ones(3, complex)))), FILES, "a.npy holds complex128; numbers are expected"),
    "cut npy": (
        sounds(("a.npy", npy()[:-1])),
        FILES,
        "a.npy cannot be read as an array: .*5",
    ),
    "10^8 numbers promised": (
        sounds(("a.npy", npy().replace(b"(5,), ", b"(100000000,), ").replace(b"        \n", b"\n"))),
        FILES,
        "a.npy cannot be read as an array: .*100000000",
    ),
    "a header of nonsense": (
        sounds(("a.npy", npy().replace(b"(5,)", b"[x],"))),
        FILES,
        "a.npy cannot be read as an array: Cannot parse header",
    ),
    "no npy": (sounds(("a.npy", b"PK")), FILES, "a.npy cannot be read as an array: EOF: reading magic string"),
    "three dimensions": (
        sounds(("a.npy", npy(np.ones((2, 2, 2))))),
        FILES,
        "a.npy: the array has 3 dimensions; .steps,",
    ),
    "no steps": (sounds(("a.npy", npy(np.ones(0)))), FILES, "a.npy: the sequence has no steps"),
    "NaN in npy": (sounds(("a.npy", npy(np.array([1, np.nan])))), FILES, "a.npy, step 2: nan is not a finite number"),
    "infinite npy": (
        sounds(("a.npy", npy(np.array([[1, -np.inf]])))),
        FILES,
        "a.npy, step 1: -inf is not a finite number",
    ),
    "other channels": (
        sounds(("a.npy", npy(np.ones((3, 2)))), ("b.npy", npy(np.ones((3, 1))))),
        FILES,
        "line 3, column f: a step has 1 numbers, but 2 in labels.csv, line 2, column f",
    ),
    "transposed": (sounds(("a.npy", npy(np.ones((2, 100_000), np.uint8)))), FILES, "2 x 100,000 numbers; .*transposed"),
    "cut npz": (
        sounds(("a.npz", npz(a=np.arange(999))[:500])),
        FILES,
        "a.npz cannot be read as an archive: File is not a zip file",
    ),
    "damaged LZMA npz": (
        sounds(("a.npz", lzma_npz(a=np.arange(999)))),
        FILES,
        "a.npz cannot be read as an archive: Corrupt input data",
    ),
    "zip bomb": (
        sounds(("a.npz", npz(a=np.zeros(2**23)))),
        FILES,
        "a.npz unpacks to 67,108,992 bytes from 65,.*, as no measurement does; it is not used",
    ),
    "npz that leads outside": (
        sounds(("a.npz", npz(**{"../../a": np.ones(3)}))),
        FILES,
        "has a member '../../a.npy' that",
    ),
    "several arrays": (
        sounds(("a.npz", npz(a=np.ones(3), b=np.ones(3)))),
        FILES,
        "holds 2 arrays; there: 'a', 'b'; say wh",
    ),
    "no such array": (
        sounds(("a.npz", npz(left=np.ones(3)))),
        {**FILES, "array": "lift"},
        "no array 'lift'; did you mean",
    ),
    "objects in npz": (
        sounds(("a.npz", npz(a=np.array([None])))),
        FILES,
        "a.npz cannot be read as an array: Object arrays",
    ),
    "sound by itself": ({"d.wav": wav()}, FILES, "d.wav is not read: name a table of such files and their labels"),
}


def planted(folder, files):
    for name, content in files.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(raw(content))
    return folder / next(iter(files)).partition("/")[0]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_told_in_one_sentence(tmp_path, name):
    files, options, words = WRONG[name]
    with pytest.raises(DataError, match=words) as caught:
        opened(planted(tmp_path, files), **options)
    said = str(caught.value)
    assert caught.value.exit_code == 3 and said.startswith("task custom: ") and "\n" not in said and len(said) < 500
    # An edit of the file helps: nothing of the failure is kept.
    assert not list(Path(os.environ["SPT_CACHE_DIR"]).glob("tasks/.*.tmp"))


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    os.mkfifo(tmp_path / "train.jsonl")
    for path, words in [
        (
            tmp_path / "nowhere.csv",
            "no file or folder .*nowhere.csv; a path in a recipe is relative to the recipe's folder",
        ),
        (tmp_path / "pipe.csv", "pipe.csv is not a regular file"),
        (tmp_path, "train.jsonl is not a regular file"),
        (Path("/dev/zero"), "/dev/zero is not read"),
    ]:
        with pytest.raises(DataError, match=words):
            opened(path, **LIST)


def test_files_that_may_not_be_read(tmp_path, monkeypatch):
    write(tmp_path / "d.csv", reviews(4))

    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(tmp_path / "d.csv"))

    monkeypatch.setattr("builtins.open", refused)  # whoever runs the tests may be root
    with pytest.raises(DataError, match=r"d.csv cannot be read: Permission denied"):
        opened(tmp_path / "d.csv", **TEXT)


PAIRS = pa.list_(pa.list_(pa.float32(), 2))
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32).tobytes()), pa.py_buffer(b"a\xff")]
)


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"x": pa.array([], pa.list_(pa.float32())), "y": pa.array([], pa.int64())}, LIST, "has a header but no rows"),
        (
            {"x": [[1.0, 2.0], [1.0, None]], "y": [0, 1]},
            LIST,
            "a.parquet, row 2, column x, step 2: nan is not a finite",
        ),
        ({"x": [[1.0, 2.0], None], "y": [0, 1]}, LIST, "a.parquet, row 2, column x: the cell is empty"),
        ({"x": [[1.0], []], "y": [0, 1]}, LIST, "a.parquet, row 2, column x: the sequence has no steps"),
        ({"x": [[[1, 2]], [[1, 2], [3]]], "y": [0, 1]}, LIST, "a.parquet, row 2, column x, step 2: a list of 1"),
        (
            {"x": [[[1, 2]], [[1, None]]], "y": [0, 1]},
            LIST,
            "a.parquet, row 2, column x, step 1: the cell is empty|nan",
        ),
        ({"x": pa.array([[[1, 2], None]] * 2, PAIRS), "y": [0, 1]}, LIST, "row 1, column x, step 2: the cell is empty"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, LIST, "a.parquet, row 1, column x, step 1: 'a' is not a number"),
        ({"x": [[1.0], [2.0]], "y": [0, None]}, LIST, "a.parquet, row 2, column y: the cell is empty"),
        ({"body": [b"a", b"b"], "stars": [0, 1]}, TEXT, "a.parquet, row 1, column body: b'a' is not text"),
        ({"x": [[1.0], [2.0]], "y": [[0], [1]]}, LIST, "a.parquet, row 1, column y: .* is neither text nor a number"),
        ({"body": NOT_UTF8, "stars": [0, 1]}, TEXT, "a.parquet, column body: .*utf-8.* can't decode byte 0xff"),
        ({"body": ["a", "b"], "star": [0, 1]}, TEXT, "a.parquet has no column 'stars'; did you mean 'star'?"),
    ],
)
def test_wrong_parquet(tmp_path, columns, options, words):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=words):
        opened(tmp_path / "a.parquet", **options)


def test_a_damaged_parquet_file(tmp_path):
    path = write(tmp_path / "a.parquet", reviews(500))
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet"):
        opened(path, **TEXT)


# ------------------------------------------------------------------------------------------------------ wrong options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_column": "y"}, "the input is exactly one of text_column, .*but none is given"),
        ({**LIST, **TEXT}, "text_column and list_column are given"),
        ({**LIST, "tokens": "words"}, "tokens words are made from text_column"),
        ({**TEXT, "tokens": "ids"}, "tokens ids are numbers, but text_column is given"),
        ({"list_columns": ["x", "y"], "label_column": "y"}, "the column 'y' is given twice"),
        ({**LIST, "list_columns": ["a", "b"]}, "list_column and list_columns are given"),
        (
            {"list_columns": ["a", "b"], "label_column": "y", "tokens": "ids"},
            "list_columns are channels; give list_column",
        ),
        ({**TEXT, "tokens": "syllables"}, "task.tokens: "),
        ({**LIST, "min_count": 3}, "min_count is for the characters or words"),
        ({**TEXT, "normalise": "none"}, "normalise is for values"),
        ({**TEXT, "truncate": True}, "truncate cuts at max_length"),
        ({"text_column": "body"}, "target classes needs label_column"),
        ({"text_column": "b", "label_columns": ["a"]}, "label_columns is for target: real"),
        ({**LIST, "target": "real", "label_columns": ["y"]}, "label_column or label_columns, one of the two"),
        ({**LIST, "validation_fraction": 0.6, "test_fraction": 0.4}, "together leave no training rows"),
        ({**LIST, "id_column": "y"}, "the column 'y' is given twice"),
        ({"value_columns": ["a", "a"], "label_column": "y"}, "the column 'a' is given twice"),
        ({**LIST, "hub": "owner/dataset"}, "give path, a file or folder, or hub, a data set's name: exactly one"),
        ({**LIST, "time_column": "t"}, "time_column is for one row a step"),
        ({**LIST, "path": "hf://datasets/x"}, "task.path: is an address; download the files"),
        ({**LIST, "path": "https://example.org/a.csv"}, "task.path: is an address"),
        ({**LIST, "path": ""}, "task.path: is empty"),
        ({**LIST, "path": 3}, "task.path: "),
        ({**LIST, "lable_column": "y"}, "task.lable_column: unknown key; did you mean label_column"),
    ],
)
def test_wrong_options_are_told_before_a_file_is_opened(tmp_path, options, words):
    with pytest.raises(RecipeError, match=words) as caught:
        load(str(recipe_file(tmp_path, task={"name": "custom", "path": "nowhere.csv", **options})))
    assert caught.value.exit_code == 2


def test_no_path_is_told(tmp_path):
    with pytest.raises(RecipeError, match=r"task: give path, a file or folder, or hub, a data set's name: exactly one"):
        load(str(recipe_file(tmp_path, task={"name": "custom", **LIST})))


# ---------------------------------------------------------------------------------------------------- the real command


def test_paths_are_relative_to_the_recipe_or_on_the_command_line_to_here(tmp_path, monkeypatch):
    (tmp_path / "there" / "data").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    write(tmp_path / "there" / "data" / "r.csv", reviews(60))
    write(tmp_path / "here" / "r.csv", reviews(70))
    recipe = recipe_file(tmp_path / "there", task={"name": "custom", "path": "data/r.csv", **TEXT})
    monkeypatch.chdir(tmp_path / "here")
    one, two = load(str(recipe)), load(str(recipe), ["task.path=r.csv"])
    assert one.recipe.task.options["path"] == str(tmp_path / "there" / "data" / "r.csv")
    assert two.recipe.task.options["path"] == str(tmp_path / "here" / "r.csv")
    again = tmp_path / "resolved.yaml"
    again.write_text(one.to_yaml())
    assert load(str(again)).data == one.data != two.data


@pytest.mark.parametrize("layout", ["words", "list"])  # the others: docs/own-data.md
def test_both_stages_run_on_each_layout(tmp_path, layout):
    if layout == "words":
        write(tmp_path / "d.csv", reviews(60))
        task = {"path": "d.csv", "id_column": "id", "tokens": "words", "min_count": 2, **TEXT}
    else:
        write(tmp_path / "d.parquet", [{"x": [[i, 1.0], [2, i]] * (1 + i % 3), "y": i / 7} for i in range(60)])
        task = {"path": "d.parquet", "target": "real", **LIST}
    one = load(str(recipe_file(tmp_path, task={"name": "custom", **task})), smoke=True)
    result = run(spt_job(one), tmp_path)
    assert result.task == "custom" and result.test is not None and result.own.steps == 4


def test_the_command_says_it_in_one_line(tmp_path, runs_dir):
    (tmp_path / "d.csv").write_text(GOOD + "1 x,a\n")
    recipe_file(tmp_path, task={"name": "custom", "path": "d.csv", **LIST})
    done = spt("compare", "tiny.yaml", "--smoke", cwd=tmp_path)
    assert done.returncode == 3 and not runs_dir.exists()
    assert done.stderr.strip() == "spt: task custom: d.csv, line 6, column x, step 2: 'x' is not a number"
    recipe_file(tmp_path, task={"name": "custom", "path": "d.csv"})
    done = spt("compare", "tiny.yaml", "--smoke", cwd=tmp_path)
    assert done.returncode == 2 and "the input is exactly one of" in done.stderr


def test_the_schema_knows_the_options(tmp_path):
    import jsonschema

    recipe = changed(RECIPE, task={"name": "custom", "path": "d.csv", "value_columns": ["a"], "label_column": "y"})
    jsonschema.validate(yaml.safe_load(yaml.safe_dump(recipe)), schema())


def test_labels_are_the_same_in_all_their_spellings(tmp_path):
    """1, 1.0 and 1. are one class, True and true another; 01 is a name of its own."""
    cells = ["1", "1.0", "1.", "01", "True", "true"] * 20
    rows = [{"body": f"text {i}", "stars": cell} for i, cell in enumerate(cells)]
    assert opened(write(tmp_path / "a.csv", rows), **TEXT).target.count == 3


def test_a_label_that_is_not_a_number_leaves_the_order_alone():
    orders = {tuple(sort_labels(list(labels))) for labels in itertools.permutations(["nan", "0", "1", "2"])}
    assert orders == {("0", "1", "2", "nan")}


@pytest.mark.parametrize("cell", ["1_000", "\u0663"])
def test_numbers_are_plain_numbers(tmp_path, cell):
    rows = [{"v1": f"{i}.5", "v2": "1", "y": str(i % 2)} for i in range(60)] + [{"v1": cell, "v2": "1", "y": "0"}]
    with pytest.raises(DataError, match="is not a number"):
        opened(write(tmp_path / "a.csv", rows), value_prefix="v", label_column="y")
