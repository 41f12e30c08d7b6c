"""The user's own data: one row a step, one file a sequence, stratified splits, a copy from the hub, findings."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_custom import npy, npz, sounds, wav, write

from spt.config.job import without_paths
from spt.config.recipe import Part
from spt.tasks import custom
from spt.tasks.base import IGNORED, Classes, Reals, Tokens
from spt.tasks.own.options import Options
from spt.tasks.own.splits import split_stratified

LONG = {"id_column": "p", "time_column": "t", "value_columns": ["v", "w"], "label_column": "y"}
HALF = {"validation_fraction": 0.25, "test_fraction": 0.25}


def config(path, **options):
    return custom.Config.model_validate_json(json.dumps({"path": path and str(path), **options}))


def opened(path, **options):
    data = custom.load(config(path, **options), Path("."))
    data.check()
    return data


def signals(n, irregular=False):
    """Rows of n sequences of 3 to 6 steps, in order."""
    return [
        {"p": f"p{i}", "t": 10 * i + (t * t if irregular else t) * 0.5, "v": i + t / 8, "w": -t, "y": "ab"[i % 2]}
        for i in range(n)
        for t in range(3 + i % 4)
    ]


def sequences(data):
    """By id: values, label."""
    return {
        str(name): (split.row(i).tolist(), int(split.targets[i]))
        for split in data.splits.values()
        for i, name in enumerate(split.ids)
    }


# ------------------------------------------------------------------------------------------------------ one row a step


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("order", ["as written", "reversed", "shuffled"])
def test_rows_in_any_order_and_format_are_the_same_sequences(tmp_path, ending, order):
    rows = signals(40)
    mixed = {
        "as written": rows,
        "reversed": rows[::-1],
        "shuffled": np.random.default_rng(0).permutation(rows).tolist(),
    }
    data = opened(write(tmp_path / f"a.{ending}", mixed[order]), normalise="none", **LONG)
    found = sequences(data)
    assert len(found) == 40 and data.interval == 0.5 and data.train.steps is None and data.input.channels == 2
    for i in range(40):
        assert found[f"p{i}"] == ([[i + t / 8, -t] for t in range(3 + i % 4)], i % 2)
    homes = {str(name): key for key, split in data.splits.items() for name in split.ids}
    wide = [{"p": f"p{i}", "v": 1, "w": 2, "y": i % 2} for i in range(40)]
    other = opened(write(tmp_path / "wide.csv", wide), id_column="p", value_columns=["v", "w"], label_column="y")
    assert homes == {str(name): key for key, split in other.splits.items() for name in split.ids}, "as in other layouts"


def test_dates_are_seconds_and_times_can_be_told(tmp_path):
    rows = signals(40, irregular=True)
    told = opened(write(tmp_path / "a.csv", rows), times="steps", **LONG)
    apart = [0.5 * (2 * t + 1) for i in range(40) for t in range(2 + i % 4)]
    assert told.interval == np.median(apart) and not any("irregular" in note for note in told.notes)
    for split in told.splits.values():
        for i in range(len(split)):
            found = split.steps[split.starts[i] : split.stops[i]]
            wanted = [1, *(0.5 * (2 * t + 1) / told.interval for t in range(len(found) - 1))]
            assert np.allclose(found, wanted)
    ignored = opened(tmp_path / "a.csv", **LONG)
    assert ignored.train.steps is None and any("times between steps are irregular (0.5 to" in n for n in ignored.notes)
    stamped = [{**row, "t": f"2026-03-01T00:{int(row['t']) // 60:02}:{row['t'] % 60:06.3f}Z"} for row in rows]
    dated = opened(write(tmp_path / "b.csv", stamped), times="steps", **LONG)
    assert dated.interval == told.interval and np.array_equal(dated.train.steps, told.train.steps)


def test_without_times_rows_come_in_the_files_order(tmp_path):
    rows = [{"p": i % 20, "v": i // 20, "y": i % 2} for i in range(100)]
    options = {"layout": "long", "id_column": "p", "value_columns": ["v"], "label_column": "y"}
    data = opened(write(tmp_path / "a.csv", rows), normalise="none", **options, **HALF)
    assert len(sequences(data)) == 20 and data.interval == 1
    assert all(
        split.row(i).ravel().tolist() == [0, 1, 2, 3, 4] for split in data.splits.values() for i in range(len(split))
    )
    tokens = opened(tmp_path / "a.csv", tokens="ids", **options, **HALF)
    assert tokens.input == Tokens(5) and tokens.train.row(0).tolist() == [0, 1, 2, 3, 4]


def test_labels_of_steps(tmp_path):
    rows = [{**row, "y": "" if row["w"] == 0 else "ab"[int(row["v"] - row["w"]) % 2]} for row in signals(40)]
    data = opened(write(tmp_path / "a.csv", rows[::-1]), per_step=True, normalise="none", **LONG)
    assert data.target == Classes(2, per_step=True)
    for split in data.splits.values():
        assert split.per_step and len(split.targets) == len(split.values) and split.targets.dtype.itemsize <= 2
        assert split.targets.tolist() == [IGNORED if w == 0 else int(v - w) % 2 for v, w in split.values.tolist()]
    cut = opened(tmp_path / "a.csv", per_step=True, max_length=2, truncate=True, **LONG)
    assert cut.length == 2 and (cut.train.targets.reshape(-1, 2)[:, 0] == IGNORED).all()
    assert (cut.train.targets.reshape(-1, 2)[:, 1] != IGNORED).all()
    real = [{**row, "y": "" if row["w"] == 0 else row["v"], "z": "" if row["w"] == 0 else 2} for row in signals(40)]
    options = {**LONG, "label_column": None, "label_columns": ["y", "z"], "target": "real"}
    data = opened(write(tmp_path / "b.csv", real), per_step=True, normalise="none", **options)
    assert data.target == Reals(2, per_step=True)
    unscored = data.train.values[:, 1] == 0
    assert np.isnan(data.train.targets[unscored]).all()
    assert np.array_equal(data.train.targets[~unscored, 0], data.train.values[~unscored, 0])


def test_sequences_of_one_patient_stay_together(tmp_path):
    rows = [{**row, "g": int(row["p"][1:]) // 4} for row in signals(80)]
    for split in ("hash", "stratified"):
        data = opened(write(tmp_path / "a.csv", rows), group_column="g", split=split, **HALF, **LONG)
        groups = [{int(str(name)[1:]) // 4 for name in part.ids} for part in data.splits.values()]
        assert sum(map(len, groups)) == 20 and all(groups) and sum(len(s) for s in data.splits.values()) == 80


def test_files_of_splits_and_a_split_column(tmp_path):
    rows = signals(30)
    for name, part in (("train", rows[:60]), ("val", rows[60:90]), ("test", rows[90:])):
        names = {row["p"] for row in part}
        write(tmp_path / f"{name}.csv", [row for row in rows if row["p"] in names and (row in part)])
    with pytest.raises(ValueError, match=r"has another split than in train.csv"):
        opened(tmp_path, **LONG)
    said = [{**row, "s": ("train", "dev", "test")[int(row["p"][1:]) % 3]} for row in rows]
    data = opened(write(tmp_path / "all.csv", said[::-1]), split_column="s", **LONG)
    assert {int(str(name)[1:]) % 3 for name in data.test.ids} == {2} and len(data.val) == 10 and not data.notes


# ------------------------------------------------------------------------------------------------------ one file a row


def test_arrays_in_files(tmp_path):
    rows = [np.arange(6.0).reshape(3, 2) + i for i in range(40)]
    write(tmp_path / "labels.csv", [{"f": f"{i % 2}/{i}.np{'yz'[i % 2]}", "y": i % 2} for i in range(40)])
    for i, row in enumerate(rows):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        if i % 2:
            (tmp_path / f"1/{i}.npz").write_bytes(npz(x=np.asfortranarray(row), y=np.ones(9)))
        else:
            (tmp_path / f"0/{i}.npy").write_bytes(npy(row.astype(">f4")))
    data = opened(tmp_path, file_column="f", label_column="y", array="x", normalise="none", **HALF)
    for split in data.splits.values():
        for i, name in enumerate(split.ids):
            assert np.array_equal(split.row(i), rows[int(str(name)[2:-4])]) and split.targets[i] == int(name[0])
    options = config(tmp_path, file_column="f", label_column="y")
    assert len(custom.sources(options, tmp_path)) == 41, "an edited file is read again"


@pytest.mark.parametrize("kind", ["<i2", "u1", "mixed"])
def test_sounds_in_files(tmp_path, kind):
    import wave

    rng, written = np.random.default_rng(0), {}
    for i in range(30):
        one = {"<i2": "<i2", "u1": "u1", "mixed": ("<i2", "u1")[i % 2]}[kind]
        whole = rng.integers(0, 256, (5 + i % 3, 2)).astype(one) if one == "u1" else rng.integers(-9999, 9999, (5, 2))
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as out:
            out.setparams((2, 1 if one == "u1" else 2, 4000, 0, "NONE", ""))
            out.writeframes(whole.astype(one).tobytes())
        written[f"{i}.wav"] = (whole.astype(float) - 128) / 128 if one == "u1" else whole / 32768
    write(tmp_path / "metadata.tsv", [{"f": name, "y": i % 3, "r": i / 4} for i, name in enumerate(written)])
    data = opened(tmp_path, file_column="f", label_column="y", normalise="none", **HALF)
    assert data.interval == 1 / 4000 and data.input.channels == 2 and data.target == Classes(3)
    assert data.train.values.dtype == {"<i2": np.int16, "u1": np.uint8, "mixed": np.float32}[kind]
    for split in data.splits.values():
        for i, name in enumerate(split.ids):
            shown = (split.row(i) - np.array(data.input.mean)) / np.array(data.input.std)
            assert np.allclose(shown, written[str(name)], atol=1e-6)
    scaled = opened(tmp_path, file_column="f", label_column="r", target="real", **HALF)
    shown = (scaled.train.values - np.array(scaled.input.mean)) / np.array(scaled.input.std)
    assert np.allclose(shown.mean(0), 0, atol=1e-5) and np.allclose(shown.std(0), 1, atol=1e-5)


def test_what_is_below_the_folder(tmp_path):
    for name, content in sounds(*((f"{i}.wav", wav(i)) for i in range(30))).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    folder, options = tmp_path / "d", {"file_column": "f", "label_column": "y", **HALF}
    assert sum(map(len, opened(folder, **options).splits.values())) == 30
    (folder / "more.wav").write_bytes(wav(99))
    with pytest.raises(ValueError, match=r"1 files that no row of labels.csv names; there: 'more.wav'"):
        opened(folder, **options)
    opened(folder, unlisted="ignore", **options)
    (folder / "more.wav").unlink()
    (tmp_path / "secret.wav").write_bytes(wav(5))
    (folder / "7.wav").unlink()
    (folder / "7.wav").symlink_to(tmp_path / "secret.wav")
    with pytest.raises(ValueError, match=r"'7.wav' is a link that leads outside the folder d"):
        opened(folder, **options)


# -------------------------------------------------------------------------------------------------- columns of channels


CHANNELS = {"list_columns": ["a", "b"], "label_column": "y"}


def channels(n):
    return [{"a": [i, i + 0.5] * (1 + i % 2), "b": [-i, 2] * (1 + i % 2), "y": i % 2} for i in range(n)]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_several_lists_are_the_channels_of_one_sequence(tmp_path, ending):
    """The rows, and so their draw and fingerprints, are those of one list of lists."""
    rows = channels(40)
    together = [{"x": [list(step) for step in zip(row["a"], row["b"], strict=True)], "y": row["y"]} for row in rows]
    one = opened(write(tmp_path / "one.jsonl", together), list_column="x", label_column="y", **HALF)
    data = opened(write(tmp_path / f"a.{ending}", rows), **CHANNELS, **HALF)
    assert data.input == one.input and data.input.channels == 2
    for split, other in zip(data.splits.values(), one.splits.values(), strict=True):
        assert np.array_equal(split.values, other.values) and np.array_equal(split.stops, other.stops)
        assert np.array_equal(split.targets, other.targets)
    swapped = opened(tmp_path / f"a.{ending}", **CHANNELS | {"list_columns": ["b", "a"]}, **HALF)
    steps = [
        sorted(step for split in each.splits.values() for step in split.values.tolist()) for each in (data, swapped)
    ]
    assert steps[1] == sorted(step[::-1] for step in steps[0])
    assert custom.findings(config(tmp_path / f"a.{ending}", **CHANNELS), tmp_path) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"a": [1, 2], "b": [1]}, "a.jsonl, (line 7), column b: the list has 1 steps, but 2 in column a; the channels"),
        ({"a": [1, 2], "b": [[1, 2], [3, 4]]}, "line 7, column b: a channel is a list of numbers, but lists stand in"),
        ({"a": [1, 2], "b": None}, "line 7, column b: the cell is empty"),
        ({"a": [1, "x"], "b": [1, 2]}, "line 7, column a, step 2: 'x' is not a number"),
        ({"a": [], "b": []}, "line 7: the sequence has no steps"),
        ({"a": [1, 2]}, "line 7 has no column 'b'"),
    ],
)
def test_lists_that_are_no_channels_are_told(tmp_path, row, words):
    path = write(tmp_path / "a.jsonl", [*channels(6), {**row, "y": 1}])
    with pytest.raises(ValueError, match=words):
        opened(path, **CHANNELS)


def test_runs_without_list_columns_keep_their_keys():
    options = {"list_column": "x", "label_column": "y"}
    part = Part(name="custom", **config("a.csv", **options).model_dump(mode="json"))
    assert "list_columns" in part.options and "list_columns" not in without_paths("tasks", part)
    part = Part(name="custom", **config("a.csv", **CHANNELS).model_dump(mode="json"))
    assert without_paths("tasks", part)["list_columns"] == ["a", "b"]


# -------------------------------------------------------------------------------------------------------------- splits


def test_stratified_shares_are_as_near_as_they_can_be(tmp_path):
    counts = {"a": 200, "b": 50, "c": 11, "d": 1}
    rows = [{"x": f"{i} {ord(k)}", "y": k} for k, n in counts.items() for i in range(n)]
    options = {"list_column": "x", "label_column": "y", "split": "stratified"}
    data = opened(write(tmp_path / "a.csv", rows), **options)
    found = {name: np.bincount(split.targets, minlength=4).tolist() for name, split in data.splits.items()}
    for k, n in enumerate(counts.values()):
        for name, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
            assert abs(found[name][k] - share * n) < 1.5, (k, name, found)
    assert found["train"][3] == 1 and "with equal shares of every class" in data.notes[0]
    again = opened(write(tmp_path / "b.csv", rows[::-1]), **options)
    for one, two in zip(data.splits.values(), again.splits.values(), strict=True):
        assert sorted(map(bytes, map(one.row, range(len(one))))) == sorted(map(bytes, map(two.row, range(len(two)))))
    other = opened(tmp_path / "a.csv", split_seed=1, **options)
    assert set(other.test.ids) != set(data.test.ids)


def test_stratified_groups_are_whole_and_balanced(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"p": p, "x": f"{p} {k}", "y": int(rng.random() < 0.1 + 0.8 * (p % 3 == 0))}
        for p in range(120)
        for k in range(1 + p % 7)
    ]
    options = {"list_column": "x", "label_column": "y", "id_column": "p", "split": "stratified"}
    data = opened(write(tmp_path / "a.csv", rows), **options)
    ids = [set(split.ids.tolist()) for split in data.splits.values()]
    assert sum(map(len, ids)) == 120
    whole = np.bincount([row["y"] for row in rows])
    for split, share in zip(data.splits.values(), (0.8, 0.1, 0.1), strict=True):
        assert np.abs(np.bincount(split.targets) / whole - share).max() < 0.03
    rows += [{"p": 999, "x": "1 1", "y": 0}]
    given = [{**row, "s": "test" if row["p"] < 20 else "train"} for row in rows]
    data = opened(write(tmp_path / "b.csv", given), split_column="s", **options)
    assert set(map(int, data.test.ids)) == set(range(20)) and 0 < len(data.val) < len(data.train) / 5


def test_a_class_of_one_goes_to_training_whatever_the_shares():
    n = 40
    keys, counts = np.arange(n, dtype=np.uint64), np.ones(n, np.int64)
    splits = split_stratified((0.2, 0.4, 0.4), keys, np.arange(n), np.arange(n), counts)
    assert (splits == 0).all()


# ------------------------------------------------------------------------------------------------------------- the hub


def test_a_data_set_of_the_hub_is_copied_by_prepare_alone(tmp_path, monkeypatch, messages):
    import datasets

    folder, raw = tmp_path / "owner" / "films", tmp_path / "data"
    folder.mkdir(parents=True)
    raw.mkdir()
    for name, n, start in (("train", 60, 0), ("test", 20, 100), ("unsupervised", 5, 200)):
        write(
            folder / f"{name}.jsonl",
            [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": i % 2} for i in range(start, start + n)],
        )
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train", "test", "unsupervised"))
        + "dataset_info:\n  features:\n  - name: text\n    dtype: string\n  - name: label\n    dtype:\n"
        "      class_label:\n        names:\n          '0': against\n          '1': for\n---\n"
    )
    options = {"hub": "owner/films", "text_column": "text", "label_column": "label"}
    chosen = config(None, **options)
    with pytest.raises(
        FileNotFoundError, match=r"owner/films is not in the data folder .*data: get it with `spt data prep"
    ):
        custom.load(chosen, raw)
    assert custom.sources(chosen, raw) == []
    monkeypatch.chdir(tmp_path)  # a folder of this name takes the hub's place
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    custom.fetch(chosen, raw)
    assert sorted(path.name for path in custom.sources(chosen, raw)) == ["test.parquet", "train.parquet"]
    assert any("not copied: unsupervised" in line for line in messages)
    assert pq.read_table(raw / "hub" / "owner--films" / "train.parquet")["label"].unique().to_pylist() == [
        "against",
        "for",
    ]
    data = custom.load(chosen, raw)
    assert len(data.test) == 20 and len(data.train) + len(data.val) == 60 and data.target == Classes(2)
    custom.fetch(chosen, raw)
    assert messages[-1].endswith("is there already")
    with pytest.raises(ValueError, match="owner/nothing cannot be copied from the Hugging Face hub: "):
        custom.fetch(config(None, **{**options, "hub": "owner/nothing"}), raw)
    assert [path.name for path in (raw / "hub").iterdir()] == ["owner--films"]


@pytest.mark.parametrize("name", ["films", "../films", "a/b/c", "owner/..", "/films"])
def test_names_that_are_no_data_sets(name):
    with pytest.raises(ValueError, match="is not the name of a data set on the hub; owner/name is expected"):
        Options(hub=name, text_column="x", label_column="y")


# ------------------------------------------------------------------------------------------------------------ findings


def test_findings_of_a_table(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {
            "v1": rng.normal(),
            "v2": rng.normal(),
            "y": "ab"[i % 2],
            "copy": "ab"[i % 2],
            "code": ("x", "z")[i % 2],
            "score": i % 2 + rng.random() * 0.9,
            "free": rng.normal(),
            "age": "" if i % 10 == 0 else "n/a" if i == 5 else "unknown" if i == 7 else i,
        }
        for i in range(60)
    ]
    found = custom.findings(config(write(tmp_path / "a.csv", rows), value_prefix="v", label_column="y"), tmp_path)
    assert "the column 'copy' gives the label 'y' away: it is the same" in found
    assert "the column 'code' gives the label 'y' away: each of its 2 values has one label" in found
    assert "the column 'score' gives the label 'y' away: each label has a range of its own in it" in found
    assert "column 'age': 7 of 60 cells are empty (11.7%)" in found
    assert "column 'age' mixes types: 52 numbers and 1 texts, the first 'unknown' in a.csv, line 9" in found
    assert "5 columns are not used: 'copy', 'code', 'score', 'free', 'age'" in found
    assert len(found) == 6, found


def test_findings_of_real_targets_and_inputs(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.normal(size=5000)
    table = {"v1": -2 * y + 3, "v2": y + 1e-3 * rng.normal(size=5000), "y": y, "w": y * 1e-6 + 1e6}
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=700)
    options = config(tmp_path / "a.parquet", value_prefix="v", label_column="y", target="real")
    found = custom.findings(options, tmp_path)
    assert found[0] == "the input column 'v1' gives the label 'y' away: their correlation is -1"
    assert not any("'v2'" in one for one in found) and found[-1] == "not used: column 'w'"


def test_a_class_that_may_be_no_label_is_told(tmp_path):
    rows = [{"v1": i * 7919 % 101, "v2": i * 31 % 17, "y": "?" if i in (3, 9) else "ab"[i % 2]} for i in range(60)]
    found = custom.findings(config(write(tmp_path / "a.csv", rows), value_prefix="v", label_column="y"), tmp_path)
    assert found == ["'?' in column 'y' is a class (rows: 2); if it means that no label is known, leave such rows out"]
    numbers = [{**row, "y": "n/a" if row["y"] == "?" else i * 37 % 11} for i, row in enumerate(rows)]
    options = config(write(tmp_path / "b.csv", numbers), value_prefix="v", label_column="y", target="real")
    assert custom.findings(options, tmp_path) == ["column 'y': 2 of 60 cells are empty (3.3%)"]


def test_findings_where_rows_have_other_columns(tmp_path):
    rows = [{"v1": i * 7919 % 101, "y": i % 2, **({"note": "x"} if i % 3 else {})} for i in range(60)]
    found = custom.findings(config(write(tmp_path / "a.jsonl", rows), value_prefix="v", label_column="y"), tmp_path)
    assert found == ["column 'note': 20 of 60 cells are empty (33.3%)", "not used: column 'note'"]


def test_stratified_sequences_without_a_label_go_somewhere(tmp_path):
    """Where steps have labels, all of a sequence's cells may be empty."""
    rows = [{**row, "y": "" if row["p"] in ("p3", "p17", "p39") else "ab"[int(-row["w"]) % 2]} for row in signals(40)]
    data = opened(write(tmp_path / "a.csv", rows), per_step=True, split="stratified", **HALF, **LONG)
    assert sum(map(len, data.splits.values())) == 40


def test_a_clean_table_has_no_findings(tmp_path):
    rows = signals(200)
    for i, row in enumerate(rows):
        row["v"] = (i * 7919) % 101
    assert custom.findings(config(write(tmp_path / "a.jsonl", rows), **LONG), tmp_path) == []
