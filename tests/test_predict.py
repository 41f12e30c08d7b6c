"""From a run and a file to predictions and embeddings: what the run itself answered, whatever the file looks like."""

import csv
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_inputs import call
from test_custom import reviews, wav, write
from test_predictions import asking
from tiny import loaded, own_task, reseal, run

from spt.config.job import Job
from spt.errors import DataError, UsageError
from spt.inference.predict import Source, embed, predict
from spt.inference.trained_model import TrainedModel
from spt.runs.predictions import read_columns
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.load_run import load_run

CPU = Runtime(Settings(quiet=True, cpu=True))
SMALL = {
    "model": {"name": "transformer", "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8},
    "finetune": {"train": {"steps": 3, "batch_size": 8, "learning_rate": 0.02}},
    "pretrain": {
        "objective": {"name": "masked", "ratio": 0.5},
        "train": {"steps": 2, "batch_size": 8, "learning_rate": 0.02},
    },
}
S5 = {"model": {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1}}


def numbers(seed, n, width=2):
    rng = np.random.default_rng(seed)
    return [np.round(rng.normal(size=(3 + i % 5, width)), 3).tolist() for i in range(n)]


def channels(n, seed):
    return [
        {"a": [a for a, _ in x], "b": [b for _, b in x], "y": ["no", "yes"][i % 2]}
        for i, x in enumerate(numbers(seed, n))
    ]


def wide(n, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 4)).round(3).tolist()
    return [{"nm_2": r[0], "nm_1": r[1], "nm_3": r[2], "nm_0": r[3], "u": i / 7, "w": -i} for i, r in enumerate(rows)]


def long(n, seed):
    rows = [
        {"p": f"s{seed}-{i}", "t": t * (1 + t * (i % 3)), "v": v[0], "y": ["a", "b", ""][(i + t) % 3]}
        for i, x in enumerate(numbers(seed, n))
        for t, v in enumerate(x)
    ]
    return np.random.default_rng(seed).permutation(rows).tolist()


def texts(n, seed):
    return reviews(n, 1000 * seed)


TEXT = {"text_column": "body", "label_column": "stars", "id_column": "id"}
LONG = {"id_column": "p", "time_column": "t", "value_columns": ["v"], "label_column": "y", "per_step": True}
LAYOUTS = {  # name -> (rows, ending, options, other changes)
    "characters": (texts, "csv", {**TEXT, "min_count": 3}, {}),
    "words": (texts, "jsonl", {**TEXT, "tokens": "words"}, {}),
    "bytes": (texts, "csv", {**TEXT, "tokens": "bytes", "max_length": 12, "truncate": True}, {}),
    "channels": (channels, "parquet", {"list_columns": ["a", "b"], "label_column": "y"}, {}),
    "prefix": (wide, "csv", {"value_prefix": "nm_", "label_columns": ["u", "w"], "target": "real"}, {}),
    "steps": (long, "csv", LONG, {}),
    "times": (long, "parquet", {**LONG, "times": "steps"}, S5),
}


def folder_of(path, rows, ending, n=(24, 9, 13)):
    path.mkdir()
    for seed, (name, count) in enumerate(zip(("train", "validation", "test"), n, strict=True), 1):
        write(path / f"{name}.{ending}", rows(count, seed))
    return path / f"test.{ending}"


def trained(folder, stage="finetune", **changes):
    job = Job(loaded(folder, **{**SMALL, **changes}), stage, 0)
    run(job, folder)
    return folder / job.name


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, tmp_path_factory):
    """A run on each layout, and the file of its test rows."""
    rows, ending, options, changes = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    test = folder_of(folder / "d", rows, ending)
    return trained(folder, task={"name": "custom", "path": "d", **options}, **changes), test


def table(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_file_of_the_test_rows_is_answered_as_the_run_answered_them(layout, tmp_path):
    """The same scores, to the last digit, and the same answers as in predictions.parquet; so by --split test."""
    path, test = layout
    result, stored = load_run(path).result, read_columns(path / "predictions.parquet")
    summaries = [
        predict(path, Source(test), tmp_path / "file.parquet", CPU),
        predict(path, Source(), tmp_path / "split.parquet", CPU),
    ]
    for summary in summaries:
        assert summary.scores == pytest.approx(result.test, rel=1e-12) and summary.rows == 13
    one, two = table(tmp_path / "file.parquet"), table(tmp_path / "split.parquet")
    assert one == two or [row.pop("id") for row in one] == [int(row.pop("id").rpartition("-")[2]) for row in two]
    assert one == two
    classes = TrainedModel.open(path).classes
    if "step" in one[0]:
        right = [row["label"] == row["prediction"] for row in one if row["label"] is not None]
        assert len(right) == stored["steps"].sum() and sum(right) == stored["right"].sum()
    elif classes:
        assert [row["prediction"] for row in one] == [classes[k] for k in stored["prediction"]]
        assert [row["label"] for row in one] == [classes[k] for k in stored["label"]]
    else:
        assert [row["prediction_w"] for row in one] == stored["prediction_1"].tolist()
        assert [row["label_u"] for row in one] == pytest.approx(stored["target_0"].tolist())
    if classes:
        chances = np.array([[row[f"p_{label}"] for label in classes] for row in one])
        assert np.allclose(chances.sum(1), 1, atol=1e-6)
        assert [classes[k] for k in chances.argmax(1)] == [row["prediction"] for row in one]


def test_a_row_alone_is_answered_as_among_others(layout, tmp_path):
    """No vocabulary, mean or usual time between steps is that of the file."""
    path, test = layout
    predict(path, Source(test), tmp_path / "all.parquet", CPU)
    rows = table(test)
    last = [row for row in rows if row["p"] == rows[-1]["p"]] if "p" in rows[-1] else rows[-1:]
    predict(path, Source(write(tmp_path / f"one{test.suffix}", last)), tmp_path / "alone.parquet", CPU)
    found, whole = table(tmp_path / "alone.parquet"), table(tmp_path / "all.parquet")
    wanted = [row for row in whole if row["id"] == last[0]["p"]] if "p" in last[0] else whole[-1:]
    kept = [key for key in wanted[0] if key.startswith(("p_", "prediction_"))]
    assert len(found) == len(wanted) and kept
    for one, other in zip(found, wanted, strict=True):
        assert [one[key] for key in kept] == pytest.approx([other[key] for key in kept], abs=1e-6)


def test_files_without_labels_are_answered_alike(layout, tmp_path):
    path, test = layout
    whole = predict(path, Source(test), tmp_path / "a.csv", CPU)
    assert whole.scores
    for i, changes in enumerate((["label_column=", "label_columns="], [])):
        if i:  # the columns are not there
            labels = {"stars", "y", "u", "w"}
            bare = [{key: cell for key, cell in row.items() if key not in labels} for row in table(test)]
            test = write(tmp_path / f"bare{test.suffix}", bare)
        summary = predict(path, Source(test, changes), tmp_path / f"b{i}.csv", CPU)
        assert summary.scores is None and summary.scored == 0
        first, second = table(tmp_path / "a.csv"), table(tmp_path / f"b{i}.csv")
        labels = [key for key in first[0] if key.startswith("label")]
        assert labels and [{k: c for k, c in row.items() if k not in labels} for row in first] == second


def test_every_format_says_the_same(tmp_path):
    test = folder_of(tmp_path / "d", channels, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"})
    found = {}
    for ending in ("csv", "jsonl", "parquet"):
        predict(path, Source(test), tmp_path / f"out.{ending}", CPU)
        rows = table(tmp_path / f"out.{ending}")
        found[ending] = [
            {k: str(c) if k in ("id", "label", "prediction") else np.float32(c) for k, c in r.items()} for r in rows
        ]
    assert found["csv"] == found["jsonl"] == found["parquet"] and list(found["csv"][0]) == [
        *("id", "label", "prediction", "p_no", "p_yes")
    ]


# ------------------------------------------------------------------------------------------------ what training has not


def test_unseen_words_labels_and_gaps_are_told_and_left_out_of_the_scores(tmp_path):
    folder_of(tmp_path / "d", texts, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", **TEXT, "tokens": "words"})
    rows = [
        {"id": "a", "body": "fine zebra fine", "stars": 1},
        {"id": "b", "body": "bad yak", "stars": "maybe"},
        {"id": "c", "body": "fine", "stars": ""},
    ]
    summary = predict(path, Source(write(tmp_path / "new.csv", rows)), tmp_path / "out.csv", CPU)
    assert summary.rows == 3 and summary.scored == 1 and summary.scores["accuracy"] in (0, 1)
    assert summary.notes == [
        "2 of 6 tokens (33.3%) are not in the model's vocabulary and are shown to it as the unknown token",
        "1 labels are none of the model's classes ('maybe'): predicted, but left out of the scores",
    ]
    assert [row["label"] for row in table(tmp_path / "out.csv")] == ["1", "", ""]
    seen = write(tmp_path / "seen.csv", [{**rows[0], "body": "fine unicorn fine"}])
    predict(path, Source(seen), tmp_path / "seen-out.csv", CPU)
    first, second = (table(tmp_path / name)[0] for name in ("out.csv", "seen-out.csv"))
    assert float(first["p_0"]) == pytest.approx(float(second["p_0"])), "an unknown word is as good as another"


def test_longer_sequences_are_taken_cut_or_refused(tmp_path):
    folder_of(tmp_path / "d", channels, "csv")
    task = {"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"}
    rows = [{"a": [0.5] * n, "b": [1] * n} for n in (3, 20)]
    data = write(tmp_path / "new.jsonl", rows)
    path = trained(tmp_path, task=task)
    summary = predict(path, Source(data), tmp_path / "out.csv", CPU)
    assert summary.notes == [
        "1 of 2 sequences are longer (20 steps at most) than any that the model was trained on (7)"
    ]
    cut = predict(path, Source(data, ["max_length=7", "truncate=true"]), tmp_path / "cut.csv", CPU)
    assert cut.notes == ["1 of 2 sequences were cut after 7 steps"]
    with pytest.raises(DataError, match="line 2: the sequence has 20 steps, max_length is 7; raise it, or cut"):
        predict(path, Source(data, ["max_length=7"]), tmp_path / "no.csv", CPU)
    np.save(tmp_path / "new.npy", np.tile([0.5, 1.0], (1, 20, 1)))  # the second row alone
    arrays = predict(path, Source(tmp_path / "new.npy", ["max_length=7", "truncate=true"]), tmp_path / "a.csv", CPU)
    assert arrays.notes == ["1 of 1 sequences were cut after 7 steps"]
    answer, wanted = table(tmp_path / "a.csv")[0], table(tmp_path / "cut.csv")[1]
    assert [float(answer[name]) for name in ("p_no", "p_yes")] == pytest.approx(
        [float(wanted[name]) for name in ("p_no", "p_yes")], abs=1e-6
    )
    with pytest.raises(DataError, match=r"new.npy, row 1: the sequence has 20 steps, max_length is 7"):
        predict(path, Source(tmp_path / "new.npy", ["max_length=7"]), tmp_path / "no.csv", CPU)
    learned = {"name": "transformer", "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8, "positions": "learned"}
    path = trained(tmp_path, task=task, model=learned)
    with pytest.raises(DataError, match=r"20 steps, but model .* another shape; cut the sequences .max_length=7 tru"):
        predict(path, Source(data), tmp_path / "no.csv", CPU)
    assert not (tmp_path / "no.csv").exists()


def test_sounds_keep_their_scale_and_rate(tmp_path):
    """Training has 16 bits, whose statistics are of whole numbers; an array beside them is of full scale 1."""
    (tmp_path / "d").mkdir()
    for i in range(40):
        (tmp_path / "d" / f"{i}.wav").write_bytes(wav(i, samples=12))
    write(tmp_path / "d" / "labels.csv", [{"f": f"{i}.wav", "y": "ab"[i % 2]} for i in range(40)])
    path = trained(tmp_path, task={"name": "custom", "path": "d", "file_column": "f", "label_column": "y"})
    test = load_run(path).data.test
    new = tmp_path / "new"
    new.mkdir()
    for name in test.ids.tolist():
        (new / name).write_bytes((tmp_path / "d" / name).read_bytes())
    predict(path, Source(), tmp_path / "split.parquet", CPU)
    predict(path, Source(new), tmp_path / "folder.parquet", CPU)  # of files, no table
    wanted = {row["id"]: row["p_a"] for row in table(tmp_path / "split.parquet")}
    assert {row["id"]: row["p_a"] for row in table(tmp_path / "folder.parquet")} == pytest.approx(wanted, abs=1e-6)
    one = sorted(wanted)[0]
    predict(path, Source(new / one), tmp_path / "one.csv", CPU)
    assert float(table(tmp_path / "one.csv")[0]["p_a"]) == pytest.approx(wanted[one], abs=1e-6)
    row = test.row(test.ids.tolist().index(one))
    np.save(tmp_path / "rows.npy", row[None, :, 0] / np.float32(32768))
    predict(path, Source(tmp_path / "rows.npy"), tmp_path / "array.csv", CPU)
    assert float(table(tmp_path / "array.csv")[0]["p_a"]) == pytest.approx(wanted[one], abs=1e-6)
    (new / "slow.wav").write_bytes(wav(1, rate=4000, samples=12))
    with pytest.raises(DataError, match=r"slow.wav: 4,000 samples a second, but 8,000 in training"):
        predict(path, Source(new), tmp_path / "no.csv", CPU)


def test_other_columns_are_named_on_the_command_line(tmp_path):
    test = folder_of(tmp_path / "d", texts, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", **TEXT})
    renamed = [{"review": row["body"], "grade": row["stars"]} for row in table(test)]
    data = write(tmp_path / "new.jsonl", renamed)
    summary = predict(path, Source(data, ["text_column=review", "label_column=grade", "id_column="]), None, CPU)
    assert summary.scores == load_run(path).result.test
    predict(path, Source(data, ["text_column=review", "label_column=", "id_column="]), tmp_path / "o.csv", CPU)
    assert [row["id"] for row in table(tmp_path / "o.csv")] == [str(i + 1) for i in range(13)]


# ---------------------------------------------------------------------------------------------------------- other tasks


@pytest.mark.parametrize("kind", ["tokens", "numbers"])
def test_rows_of_any_task_come_as_lists_or_arrays(kind, tmp_path):
    one = own_task(tmp_path, task={"name": "./toy.py", "kind": kind}, **SMALL)
    job = Job(one, "finetune", 0)
    run(job, tmp_path)
    path, test = tmp_path / job.name, load_run(tmp_path / job.name).data.test
    predict(path, Source(), tmp_path / "split.parquet", CPU)
    wanted = [row["p_1"] for row in table(tmp_path / "split.parquet")]
    rows = [{"x": test.row(i).tolist(), "y": int(test.targets[i])} for i in range(len(test))]
    data = write(tmp_path / "rows.jsonl", rows)
    summary = predict(path, Source(data, ["list_column=x", "label_column=y"]), tmp_path / "o.parquet", CPU)
    assert summary.scores == load_run(path).result.test
    assert [row["p_1"] for row in table(tmp_path / "o.parquet")] == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(DataError, match=r"there is no file or folder .*nowhere.csv"):
        predict(path, Source(tmp_path / "nowhere.csv"), None, CPU)
    longest = test.lengths == test.lengths.max()
    array = np.stack([test.row(i) for i in np.flatnonzero(longest).tolist()])
    np.save(tmp_path / "rows.npy", array)
    np.savez(tmp_path / "rows.npz", x=array, other=array[:0])
    for source in (Source(tmp_path / "rows.npy"), Source(tmp_path / "rows.npz", ["array=x"])):
        predict(path, source, tmp_path / "a.parquet", CPU, overwrite=True)
        found = [row["p_1"] for row in table(tmp_path / "a.parquet")]
        assert found == pytest.approx(np.array(wanted)[longest], abs=1e-6)


@pytest.mark.parametrize("ask", ["tags", "numbers", "pairs", "times", "next"])
def test_a_split_of_any_task_has_the_scores_of_the_run(ask, tmp_path):
    """Of steps, pairs, rows with times and language models; averaged exactly or by batch."""
    causal = {"model": {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1, "causal": True}}
    for average in ("exact", "per_batch"):
        train = {**SMALL["finetune"]["train"], "metric_average": average}
        one = asking(tmp_path, ask, **{**SMALL, **causal, "finetune": {"train": train}})
        job = Job(one, "finetune", 0)
        result = run(job, tmp_path)
        summary = predict(tmp_path / job.name, Source(), tmp_path / f"{average}.jsonl", CPU)
        assert summary.scores == pytest.approx(result.test, rel=1e-12), average
        rows = table(tmp_path / f"{average}.jsonl")
        assert len(rows) == (24 if ask in ("pairs", "times") else load_run(tmp_path / job.name).data.test.lengths.sum())
    embed(tmp_path / job.name, Source(), tmp_path / "e.npz", CPU)
    with np.load(tmp_path / "e.npz") as found:
        assert found["embedding"].shape == (24, 16 if ask == "pairs" else 8) and found["id"][0] == 20_000
    if ask == "pairs":
        data = write(tmp_path / "pairs.jsonl", [{"x": [1, 2]}])
        with pytest.raises(UsageError, match="pairs of sequences, which are not read from files"):
            predict(tmp_path / job.name, Source(data, ["list_column=x"]), None, CPU)
        with pytest.raises(UsageError, match="choose --pool"):
            embed(tmp_path / job.name, Source(), tmp_path / "no.npz", CPU, how=None)


def test_columns_of_a_prefix_come_in_training_s_order(tmp_path):
    test = folder_of(tmp_path / "d", wide, "csv")
    task = {"name": "custom", "path": "d", "value_prefix": "nm_", "label_columns": ["u", "w"], "target": "real"}
    path = trained(tmp_path, task=task)
    rows = [dict(reversed([*row.items(), ("nm_extra", 1)])) for row in table(test)]
    predict(path, Source(test), tmp_path / "a.csv", CPU)
    summary = predict(path, Source(write(tmp_path / "b.csv", rows)), tmp_path / "b-out.csv", CPU)
    assert summary.notes == ["columns that training did not have are not used: 'nm_extra'"]
    assert table(tmp_path / "a.csv") == table(tmp_path / "b-out.csv")


def test_all_tables_of_a_folder_are_read(tmp_path):
    """Files of any names, one of them without labels; rows are named by file and line."""
    folder_of(tmp_path / "d", channels, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"})
    (tmp_path / "new").mkdir()
    for name, n in (("monday", 3), ("tuesday", 2)):
        rows = [{k: c for k, c in row.items() if k != "y" or name == "monday"} for row in channels(n, n)]
        write(tmp_path / "new" / f"{name}.jsonl", rows)
    (tmp_path / "new" / "notes.txt").write_text("not a table")
    summary = predict(path, Source(tmp_path / "new"), tmp_path / "out.jsonl", CPU)
    found = table(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == ["monday-1", "monday-2", "monday-3", "tuesday-1", "tuesday-2"]
    assert [row["label"] for row in found] == ["no", "yes", "no", None, None] and summary.scored == 3


# ------------------------------------------------------------------------------------------------------- piece by piece


def test_rows_come_and_go_in_pieces(tmp_path, monkeypatch):
    from spt.tasks.own import new_rows, tables

    test = folder_of(tmp_path / "d", channels, "jsonl")
    path = trained(tmp_path, task={"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"})
    whole = predict(path, Source(test), tmp_path / "whole.parquet", CPU)
    monkeypatch.setattr(new_rows, "ROWS", 4)
    monkeypatch.setattr(tables, "BATCH", 4)
    cut = predict(path, Source(test), tmp_path / "cut.parquet", CPU)
    first, second = table(tmp_path / "whole.parquet"), table(tmp_path / "cut.parquet")
    assert [row["p_no"] for row in second] == pytest.approx([row["p_no"] for row in first], abs=1e-6)
    assert cut.scores == pytest.approx(whole.scores) and cut.rows == whole.rows == 13
    assert pq.ParquetFile(tmp_path / "cut.parquet").num_row_groups == 4


# ----------------------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_embeddings_are_what_the_head_is_given(stage, tmp_path):
    test = folder_of(tmp_path / "d", channels, "csv")
    task = {"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"}
    path = trained(tmp_path, stage, task=task)
    model, split = TrainedModel.open(path), load_run(path).data.test
    features = model.embed(split, per_step=True, runtime=CPU)
    for how in ("mean", "last", "max"):
        embed(path, Source(test), tmp_path / f"{how}.npz", CPU, how=how)
        with np.load(tmp_path / f"{how}.npz") as found:
            steps = [torch.from_numpy(row)[None] for row in features]
            wanted = [x.mean(1) if how == "mean" else x[:, -1] if how == "last" else x.amax(1) for x in steps]
            assert np.allclose(found["embedding"], torch.cat(wanted).numpy(), atol=1e-6)
            assert found["id"].tolist() == list(range(2, 15)) and found["embedding"].shape == (13, 8)
    embed(path, Source(), tmp_path / "steps.npz", CPU, how=None)
    embed(path, Source(test), tmp_path / "steps.parquet", CPU, how=None)
    rows, width = table(tmp_path / "steps.parquet"), range(8)
    with np.load(tmp_path / "steps.npz") as found:
        assert np.array_equal(found["embedding"], np.concatenate(features))
        assert found["step"].tolist() == [row["step"] for row in rows]
        assert np.array_equal(found["embedding"], [[row[f"e{k}"] for k in width] for row in rows])


def test_a_head_that_pools_reads_its_answer_from_the_embedding(tmp_path):
    test = folder_of(tmp_path / "d", channels, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"})
    model = TrainedModel.open(path)
    embed(path, Source(test), tmp_path / "e.npz", CPU, how=model.network.head.pool)
    predict(path, Source(test), tmp_path / "p.parquet", CPU)
    with np.load(tmp_path / "e.npz") as found, torch.no_grad():
        logits = model.network.head.out(torch.from_numpy(found["embedding"]))
    wanted = [[row["p_no"], row["p_yes"]] for row in table(tmp_path / "p.parquet")]
    assert np.allclose(logits.softmax(-1).numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "code", "told"),
    [(math.nan, 6, "the weights encoder."), (3e38, 3, "no finite numbers for row ")],
)
@pytest.mark.parametrize("ask", ["predict", "embed"])
def test_what_is_no_finite_number_is_not_written(ask, value, code, told, tmp_path):
    """Of weights that are none, or whose products are none."""
    test = folder_of(tmp_path / "d", channels, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", "list_columns": ["a", "b"], "label_column": "y"})
    spoil_weights(path, value)
    ended, _, errors = call(tmp_path, ask, path, test, "--cpu", "--out", "out.npz" if ask == "embed" else "out.csv")
    assert ended == code and told in errors and not list(tmp_path.glob("out.*"))


def spoil_weights(path, value):
    """Other weights of the encoder."""
    best = path / "checkpoints" / "best"
    weights = load_file(best / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("encoder."):
            tensor.fill_(value)
    save_file(weights, best / "model.safetensors")
    reseal(best)


# --------------------------------------------------------------------------------------------------------- the commands


def test_the_commands(tmp_path):
    test = folder_of(tmp_path / "d", texts, "csv")
    path = trained(tmp_path, task={"name": "custom", "path": "d", **TEXT})
    accuracy = load_run(path).result.test["accuracy"]
    code, output, errors = call(tmp_path, "predict", path, test, "--cpu")
    rows = list(csv.DictReader(output.splitlines()))
    assert code == 0 and len(rows) == 13 and list(rows[0]) == ["id", "label", "prediction", "p_0", "p_1"]
    assert np.mean([row["label"] == row["prediction"] for row in rows]) == pytest.approx(accuracy)
    assert f"accuracy {accuracy:.6g}" in errors and "on 13 labels" in errors
    code, output, _ = call(tmp_path, "predict", path, "--split", "val", "--cpu", "--out", "v.jsonl", "--json")
    summary = json.loads(output)
    assert code == 0 and summary["rows"] == 9 and summary["out"] == "v.jsonl" and summary["scores"]["accuracy"] <= 1
    code, output, errors = call(tmp_path, "embed", path, test, "--cpu", "--out", "e.parquet", "--pool", "max")
    assert (code, output) == (0, "") and errors.endswith("written: e.parquet, 13 rows\n")
    assert len(table(tmp_path / "e.parquet")) == 13
    exported, _, errors = call(tmp_path, "export", path, "--out", "model")
    assert exported == 0, errors
    code, output, _ = call(tmp_path, "predict", "model", test, "--cpu")
    assert code == 0 and list(csv.DictReader(output.splitlines())) == rows
