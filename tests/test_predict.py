"""From a run and a file to predictions and embeddings: what the run itself answered, whatever the file looks like."""

import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_custom import reviews, write
from tiny import loaded, run

from spt.config.job import Job
from spt.inference.predict import Source, predict
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


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path):
    """A run on each layout, and the file of its test rows."""
    rows, ending, options, changes = LAYOUTS[request.param]
    test = folder_of(tmp_path / "d", rows, ending)
    return trained(tmp_path, task={"name": "custom", "path": "d", **options}, **changes), test


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
