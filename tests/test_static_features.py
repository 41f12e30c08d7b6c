"""Static features beside a sequence: how they are read, shown, told to baselines, and taken with new rows."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_custom import reviews, write
from test_missing_values import CPU, TINY, opened
from tiny import loaded, run, spt_job

import spt
from spt.baselines import boosting, catch22, linear_probe, logistic, tfidf
from spt.baselines.base import Query
from spt.baselines.scores import ComparedMetric
from spt.config.recipe import EncoderConfig
from spt.data.batching import collate
from spt.data.fingerprints import overlap, rows_hash, with_fingerprints
from spt.errors import DataError, UsageError
from spt.inference.export import export
from spt.inference.predict import Source, predict
from spt.inference.program import make_program
from spt.inference.rows import _plain
from spt.inference.trained_model import TrainedModel
from spt.tasks import custom
from spt.tasks.base import Classes, Split, TaskData, Tokens, Values
from spt.tasks.own.parsing import MissingValueError
from spt.tasks.own.static import learn
from spt.training.network import Encoder

LIST = {"list_column": "x", "label_column": "y", "split_column": "part", "static_columns": ["age", "sex"]}
LONG = {
    "id_column": "p",
    "value_columns": ["v"],
    "label_column": "y",
    "layout": "long",
    "static_columns": ["age", "sex"],
}


def people(n=40, length=4, **changes):
    """A list of noise, and beside it what tells the label: the sex."""
    rng = np.random.default_rng(0)
    parts = ["train"] * 6 + ["validation"] * 2 + ["test"] * 2
    rows = []
    for i in range(n):
        x = rng.normal(size=length).round(3).tolist()
        row = {"x": x, "y": i % 2, "age": 20 + i % 7, "sex": "FM"[i % 2], "part": parts[i // 2 % 10]}
        rows.append({**row, **{name: change(i, row) for name, change in changes.items()}})
    return rows


def steps(rows):
    """The same with a row a step."""
    return [{**row, "p": f"p{i}", "v": v} for i, row in enumerate(rows) for v in row["x"]]


def by_split(data):
    return {name: np.asarray(split.static) for name, split in data.splits.items()}


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("layout", ["list", "long"])
def test_numbers_are_standardised_and_categories_are_columns(tmp_path, ending, layout):
    rows = people()
    if layout == "list":
        written = [{**row, "x": json.dumps(row["x"])} for row in rows] if ending == "csv" else rows
        data = opened(write(tmp_path / f"a.{ending}", written), **LIST)
    else:
        long = [{key: value for key, value in row.items() if key != "x"} for row in steps(rows)]
        data = opened(write(tmp_path / f"a.{ending}", long), **LONG, split_column="part")
    train = [row for row in rows if row["part"] == "train"]
    ages = np.array([row["age"] for row in train], float)
    shown = [[(row["age"] - ages.mean()) / ages.std(), row["sex"] == "F", row["sex"] == "M"] for row in train]
    np.testing.assert_allclose(data.train.static, shown, rtol=1e-5)
    assert data.input.static == 3 and data.train.static.dtype == np.float32
    assert "static features: age, sex=F, sex=M" in data.notes


def test_what_training_has_not_is_none_of_the_categories(tmp_path):
    rows = people(sex=lambda i, row: "X" if row["part"] == "test" and i % 4 == 0 else row["sex"])
    data = opened(write(tmp_path / "a.jsonl", rows), **LIST)
    odd = np.array([row["sex"] == "X" for row in rows if row["part"] == "test"])
    assert not data.test.static[odd, 1:].any() and data.test.static[~odd, 1:].any(axis=1).all()
    assert f"static column 'sex': {odd.sum()} test rows have a category that training has not" in data.notes


def test_missing_features_are_flags_where_they_are_allowed(tmp_path):
    rows = people(
        age=lambda i, row: None if i % 5 == 0 else row["age"], sex=lambda i, row: None if i % 3 == 0 else row["sex"]
    )
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(MissingValueError, match=r"line 1, column age: the cell is empty; .*; missing: hidden"):
        opened(path, **LIST)
    data = opened(path, **LIST, missing="hidden")
    train = [row for row in rows if row["part"] == "train"]
    gone = np.array([[row["age"] is None, row["sex"] is None] for row in train])
    assert np.array_equal(data.train.static[:, [1, 4]], gone)
    assert not data.train.static[gone[:, 0], 0].any() and not data.train.static[gone[:, 1], 2:4].any()
    ages = [row["age"] for row in train if row["age"] is not None]
    np.testing.assert_allclose(
        data.train.static[~gone[:, 0], 0], (np.array(ages) - np.mean(ages)) / np.std(ages), rtol=1e-5
    )
    assert any("static column 'age' is missing in" in note for note in data.notes)


def test_numbers_beside_a_text_are_categories_and_told(tmp_path):
    data = opened(write(tmp_path / "a.jsonl", people(age=lambda i, row: "90+" if i == 0 else row["age"])), **LIST)
    assert data.input.static == 8 + 2
    assert any(
        "static column 'age' holds texts ('90+') beside numbers, so each of its 8 values" in n for n in data.notes
    )


def test_texts_may_have_them_too(tmp_path):
    rows = [{**row, "age": i % 9} for i, row in enumerate(reviews(40))]
    options = {"text_column": "body", "label_column": "stars", "static_columns": ["age"], "split": "stratified"}
    data = opened(write(tmp_path / "a.csv", rows), **options)
    assert isinstance(data.input, Tokens) and data.input.static == 1
    assert data.train.take(np.arange(3)).static.shape == (3, 1)


BAD = {  # name -> (rows, options, words)
    "no such column": (people(), {"static_columns": ["agee"]}, "no column 'agee'; did you mean 'age'"),
    "two roles": (people(), {"static_columns": ["y"]}, "the column 'y' is given twice; a column has one role"),
    "twice": (people(), {"static_columns": ["age", "age"]}, "the column 'age' is given twice"),
    "empty": (people(age=lambda i, row: "" if i == 2 else row["age"]), {}, "line 3, column age: the cell is empty"),
    "nan": (people(age=lambda i, row: "NaN" if i == 2 else row["age"]), {}, "line 3, column age: the cell is empty"),
    "a list": (people(age=lambda i, row: [1]), {}, r"column age: \[1\] is neither text nor a number"),
    "no value": (
        people(age=lambda i, row: None),
        {"missing": "hidden"},
        "'age' has no value in any training row; leave it",
    ),
    "names": (
        people(600, sex=lambda i, row: f"n{i}"),
        {},
        "has 360 different texts in the training rows, more than 256",
    ),
    "a text in test": (
        people(age=lambda i, row: "old" if row["part"] == "test" else i),
        {},
        r"line \d+, column age: 'old' is not a number, as the training rows have",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_told_in_one_sentence(tmp_path, name):
    rows, options, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        opened(write(tmp_path / "a.jsonl", rows), **{**LIST, **options})


def test_a_feature_is_the_same_in_all_rows_of_a_sequence(tmp_path):
    rows = steps(people())
    rows[5] = {**rows[5], "age": 99}
    words = r"line 6, column age: the id 'p1' has another age than in .*line 5; a static feature is the same"
    with pytest.raises(ValueError, match=words):
        opened(write(tmp_path / "a.jsonl", rows), **LONG)


def test_other_features_are_other_data_but_a_sequence_that_was_seen_was_seen(tmp_path):
    one, two = (
        opened(write(tmp_path / f"{k}.jsonl", people(age=lambda i, row, k=k: i * i + k * (i == 1))), **LIST).mapped(
            with_fingerprints
        )
        for k in range(2)
    )
    assert rows_hash(one) != rows_hash(two)
    assert np.array_equal(one.train.fingerprints, two.train.fingerprints)
    both = TaskData(one.input, one.target, one.train, two.train, one.test)
    assert overlap(both)["val"] == len(one.train)


# ------------------------------------------------------------------------------------------------------------- network


def example(n=12):
    rng = np.random.default_rng(0)
    values, static = rng.normal(size=(n, 4, 2)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32)
    split = with_fingerprints(Split.from_rows(values, np.arange(n) % 2))
    split = Split(**{**split.__dict__, "static": static})
    return TaskData(Values(2, static=3), Classes(2), split, split, split)


def test_every_step_of_a_sequence_knows_what_stands_beside_it():
    data = example()
    data.check()
    encoder = Encoder(data.input, 8, EncoderConfig())
    batch = collate(data.train, np.array([3, 1]), data.input, data.target)
    assert np.array_equal(batch.static, data.train.static[[3, 1]])
    hidden = torch.zeros(2, 4, dtype=torch.bool)
    hidden[0, 1] = True
    alone = encoder(batch.x, hidden, batch.context, batch.static)
    assert torch.equal(alone, Encoder.forward(encoder, batch.x, hidden, batch.context, torch.zeros(2, 3))), (
        "S starts at 0"
    )
    torch.nn.init.normal_(encoder.static.weight)
    with_it = encoder(batch.x, hidden, batch.context, batch.static)
    expected = (batch.static @ encoder.static.weight.T)[:, None].expand_as(with_it)
    torch.testing.assert_close(with_it - alone, expected)
    plain = Encoder(Values(2), 8, EncoderConfig())
    assert encoder.flops(10).total - plain.flops(10).total == 2 * 2 * 3 * 8  # once a sequence


def test_splits_and_inputs_that_disagree_are_told():
    data = example()
    with pytest.raises(ValueError, match="of which the input says nothing"):
        TaskData(Values(2), Classes(2), data.train, data.val, data.test).check()
    with pytest.raises(ValueError, match=r"have shape \(12, 3\), not \(12, 2\)"):
        TaskData(Values(2, static=2), Classes(2), data.train, data.val, data.test).check()
    pairs = Split.from_pairs([(np.ones((2, 2)), np.ones((3, 2)))] * 2, [0, 1])
    pairs = Split(**{**pairs.__dict__, "static": np.zeros((2, 3), np.float32)})
    with pytest.raises(ValueError, match="pairs, which take no static features"):
        TaskData(data.input, Classes(2), pairs, pairs, pairs).check()


def test_baselines_see_them(tmp_path):
    data = opened(write(tmp_path / "a.jsonl", people(120)), **LIST)
    text = [{**row, "body": "ab"[i % 3 // 2] * 5, "stars": i % 2} for i, row in enumerate(people(120))]
    options = {**LIST, "list_column": None, "text_column": "body", "label_column": "stars"}
    texts = opened(write(tmp_path / "b.jsonl", text), **{k: v for k, v in options.items() if v})
    of_numbers, of_text = (linear_probe, logistic, catch22, boosting), (logistic, tfidf, boosting)
    for baseline, task in (*((each, data) for each in of_numbers), *((each, texts) for each in of_text)):
        fitted = baseline.BASELINE.fit(task, ComparedMetric("accuracy"), 0)
        test = task.test.unlabelled()
        found = fitted.answer(Query(test, np.arange(len(test)))).argmax(1)
        assert (found == task.test.targets).all(), baseline.__name__
        assert "what stands beside a row" in fitted.sees


# ----------------------------------------------------------------------------------------------------------- both arms


def test_both_arms_predictions_and_exports_take_them(tmp_path):
    path = write(tmp_path / "a.jsonl", people())
    one = loaded(tmp_path, **{"task": {"name": "custom", "path": str(path), **LIST}, **TINY})
    job = spt_job(one)
    run(job.parent, tmp_path / "runs")
    run(job, tmp_path / "runs")
    folder = tmp_path / "runs" / job.name
    model = TrainedModel.open(folder)
    assert model.network.encoder.static.weight.abs().max() > 0, "S learns"
    rows = people(9)
    x, beside = [row["x"] for row in rows], [[row["age"], row["sex"]] for row in rows]
    frame = pd.DataFrame({"sex": [row["sex"] for row in rows], "age": [row["age"] for row in rows]})
    chances = model.predict_proba(x, static=beside)
    assert np.array_equal(chances, model.predict_proba(x, static=frame))
    assert not np.allclose(
        chances, model.predict_proba(x, static=[[row["age"], "MF"[i % 2]] for i, row in enumerate(rows)])
    )
    # A file of new rows, and one with a category that training has not.
    new = [{key: row[key] for key in ("x", "age", "sex")} for row in rows]
    predict(folder, Source(write(tmp_path / "new.jsonl", new)), tmp_path / "out.jsonl", CPU)
    found = [json.loads(line)["p_0"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(found, chances[:, 0], atol=1e-6)
    odd = write(tmp_path / "odd.jsonl", [{**row, "sex": "X"} for row in new])
    assert any("'X' is no category" in note for note in predict(folder, Source(odd), tmp_path / "o.csv", CPU).notes)
    # An exported folder, and step by step.
    export(folder, tmp_path / "model")
    again = TrainedModel.open(tmp_path / "model")
    assert np.array_equal(again.predict_proba(x, static=beside), chances)
    assert "Beside each sequence it takes age, sex." in (tmp_path / "model" / "README.md").read_text()
    stream = again.stream(static=beside[:1])
    for step in x[0]:
        answer = stream([step])
    np.testing.assert_allclose(answer, again.logits(x[:1], static=beside[:1])[0], atol=1e-5)
    # Rows that do not fit are refused.
    np.save(tmp_path / "new.npy", np.array(x))
    cases = {
        "which are missing: static=… with age, sex": lambda: model.predict(x),
        "each row has 2 cells, age, sex": lambda: model.predict(x, static=[[1]] * 9),
        "3 rows, but there are 9 sequences": lambda: model.predict(x, static=beside[:3]),
        "static, row 0, column age: 'old' is not a number": lambda: model.predict(x, static=[["old", "F"]] * 9),
        "static, row 0, column age: the cell is empty": lambda: model.predict(x, static=[[None, "F"]] * 9),
        "has no column 'age'": lambda: predict(
            folder, Source(write(tmp_path / "b.jsonl", [{"x": [1]}])), tmp_path / "b.csv", CPU
        ),
        "new.npy holds no static features": lambda: predict(
            folder, Source(tmp_path / "new.npy"), tmp_path / "b.csv", CPU
        ),
    }
    for words, call in cases.items():
        with pytest.raises(DataError, match=words):
            call()
    with pytest.raises(UsageError, match="takes static features, which a program of sequences does not"):
        make_program(model)


# ---------------------------------------------------------------------------------------------------------- estimators

SMALL = {
    "model_options": {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8},
    "epochs": 1,
    "pretrain_epochs": 1,
    "batch_size": 8,
    "pretrain_batch_size": 8,
    "device": "cpu",
}


def test_estimators_take_missing_values_and_columns_beside(tmp_path):
    rows = people(24)
    gappy = [np.where(np.arange(4) == i % 5, np.nan, row["x"]) for i, row in enumerate(rows)]
    frame = pd.DataFrame({"x": gappy, "age": [row["age"] for row in rows], "sex": [row["sex"] for row in rows]})
    y = [row["y"] for row in rows]
    model = spt.SequenceClassifier(**SMALL, missing="hidden", static_columns=["age", "sex"]).fit(frame, y)
    chances = model.predict_proba(frame)
    assert np.isfinite(chances).all() and model.encoding_.static[1].categories == ("F", "M")
    assert not np.array_equal(chances, model.predict_proba(frame.assign(sex="M")))
    model.save(tmp_path / "saved")
    assert np.array_equal(spt.SequenceClassifier.load(tmp_path / "saved").predict_proba(frame), chances)
    assert model.score(frame, y) >= 0
    for other, words in (
        (frame.drop(columns="age"), "X has no columns named 'age'"),
        (np.zeros((3, 4)), "X is no data frame"),
        (frame.assign(age="old"), "X, row 0, column age: 'old' is not a number"),
    ):
        with pytest.raises(ValueError, match=words):
            model.predict(other)


def test_nan_is_refused_unless_it_is_asked_for_and_infinity_always():
    x = np.random.default_rng(0).normal(size=(24, 4))
    y = np.arange(24) % 2
    gappy = np.where(x > 1, np.nan, x)
    plain, hidden = (
        spt.SequenceRegressor(**SMALL),
        spt.SequenceRegressor(**SMALL, missing="hidden", self_pretrain=False),
    )
    assert not plain.__sklearn_tags__().input_tags.allow_nan and hidden.__sklearn_tags__().input_tags.allow_nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        plain.fit(gappy, y)
    assert np.isfinite(hidden.fit(gappy, y).predict(gappy)).all()
    for bad in (np.where(x > 1, np.inf, x), [np.array([1.0, np.inf]), np.array([1.0])]):
        with pytest.raises(ValueError, match="contains infinity"):
            hidden.fit(bad, y[: len(bad)])
    with pytest.raises(ValueError, match="channel 1 has no value in any training row"):
        hidden.fit(np.stack([x, np.full_like(x, np.nan)], axis=2), y)
    for options, words in (
        ({"missing": "drop"}, "'refuse' or 'hidden'"),
        ({"static_columns": "age"}, "a list of columns"),
    ):
        with pytest.raises(ValueError, match=words):
            spt.SequenceRegressor(**SMALL, **options).fit(x, y)


def test_a_column_beside_that_gives_the_label_away_is_found(tmp_path):
    config = custom.Config(path=write(tmp_path / "a.jsonl", people()), **LIST)
    findings = custom.findings(config, Path("."))
    assert any("the column 'sex' gives the label 'y' away" in finding for finding in findings)
    assert not any("age" in finding for finding in findings)


def test_a_constant_is_one_however_it_is_written():
    notes: list[str] = []
    column = learn("age", ["1.5", "1.50", "2"], np.array([0, 1, 0, 1], np.int32), False, notes)
    assert (column.mean, column.std) == (1.5, 1.0) and "is 1.5 in every training row" in notes[0]


def test_what_pandas_has_for_a_missing_number_is_none():
    assert _plain(pd.NA) is None and _plain(pd.NaT) is None and _plain(np.float32(0.5)) == 0.5
