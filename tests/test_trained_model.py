"""A trained network that answers rows in memory: the same answers as the run itself gave."""

import csv

import numpy as np
import pytest
import torch
from test_predictions import TASK as ASK
from tiny import loaded, own_task, run, spt_job

from spt.analysis.predictions import read_predictions
from spt.config.job import Job
from spt.data.batching import collate
from spt.errors import CheckpointError, DataError, UsageError
from spt.inference.trained_model import TrainedModel
from spt.runs.predictions import read_columns
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.load_run import load_run
from spt.training.objectives import Inputs

CPU = Runtime(Settings(quiet=True, cpu=True))
SIZES = {"d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 8}
TINY = {"model": {"name": "transformer", **SIZES}}


def finished(job, root):
    run(job, root)
    return root / job.name


def trained(folder, kind="tokens", target="class", **changes):
    one = own_task(folder, task={"name": "./toy.py", "kind": kind, "target": target}, **{**TINY, **changes})
    return finished(Job(one, "finetune", 0), folder)


def asked(folder, ask, **changes):
    (folder / "ask.py").write_text(ASK)
    return finished(
        Job(loaded(folder, task={"name": "./ask.py", "ask": ask}, **{**TINY, **changes}), "finetune", 0), folder
    )


def rows_of(split):
    return [np.array(split.row(i)) for i in range(len(split))]


def logits_by_hand(path, split):
    """Row by row, from the run's own network."""
    run = load_run(path)
    found = []
    for i in range(len(split)):
        batch = collate(split.unlabelled(), np.array([i]), run.data.input, run.data.target)
        with torch.no_grad():
            found.append(run.network(Inputs(batch.x, None, batch.context))[0].numpy())
    return found


@pytest.mark.parametrize("kind", ["tokens", "bytes", "numbers"])
@pytest.mark.parametrize("target", ["class", "real"])
def test_rows_in_memory_are_answered_as_the_run_answered_them(kind, target, tmp_path):
    path = trained(tmp_path, kind, target)
    model, test = TrainedModel.open(path), load_run(path).data.test
    stored = read_columns(path / "predictions.parquet")
    predicted = model.predict(rows_of(test), runtime=CPU)
    assert np.array_equal(predicted, model.predict(test, runtime=CPU))
    if target == "class":
        assert np.array_equal(predicted, stored["prediction"])
        assert np.allclose(model.predict_proba(test, runtime=CPU).sum(1), 1, atol=1e-6)
    else:
        assert np.array_equal(predicted, np.stack([stored["prediction_0"], stored["prediction_1"]], 1))
        with pytest.raises(UsageError, match="no probabilities"):
            model.predict_proba(test, runtime=CPU)
    assert np.allclose(model.logits(test, runtime=CPU), logits_by_hand(path, test), atol=1e-5)


def test_answers_of_steps_come_row_by_row(tmp_path):
    path = asked(tmp_path, "tags")
    model, test = TrainedModel.open(path), load_run(path).data.test
    logits = model.logits(rows_of(test), runtime=CPU)
    assert [len(row) for row in logits] == test.lengths.tolist()
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(logits, logits_by_hand(path, test), strict=True))
    predicted = np.concatenate(model.predict(test, runtime=CPU))
    evaluation, (again,), _ = read_predictions([path], "test", CPU)
    places = evaluation.rows.starts[evaluation.row] + evaluation.step
    assert np.array_equal(predicted[places], again.predicted)


def test_pairs_are_answered_and_embedded(tmp_path):
    path = asked(tmp_path, "pairs")
    model, test = TrainedModel.open(path), load_run(path).data.test
    pairs = [(test.row(i)[: test.cuts[i]], test.row(i)[test.cuts[i] :]) for i in range(len(test))]
    assert np.array_equal(model.predict(pairs, runtime=CPU), read_columns(path / "predictions.parquet")["prediction"])
    embedded = model.embed(pairs, runtime=CPU)
    assert embedded.shape == (len(test), 16)
    steps = model.embed(test, per_step=True, runtime=CPU)
    cut = int(test.cuts[3])
    means = np.concatenate([steps[3][:cut].mean(0), steps[3][cut:].mean(0)])
    assert np.allclose(embedded[3], means, atol=1e-5)
    short = [torch.as_tensor(np.stack([first[:1], second[:1]])) for first, second in pairs]  # also as tensors
    lists = [(row[0].tolist(), row[1].tolist()) for row in short]
    assert np.array_equal(model.predict(short, runtime=CPU), model.predict(lists, runtime=CPU))
    with pytest.raises(DataError, match="row 0: this model answers pairs"):
        model.predict([[1, 2, 3]], runtime=CPU)


def test_a_pretraining_run_embeds_and_does_not_predict(tmp_path):
    job = spt_job(own_task(tmp_path, **TINY))
    path = finished(job.parent, tmp_path)
    model, test = TrainedModel.open(path), load_run(path).data.test
    assert model.target is None and model.classes == ()
    steps = model.embed(test, per_step=True, runtime=CPU)
    assert np.allclose(model.embed(test, runtime=CPU), [row.mean(0) for row in steps], atol=1e-5)
    with pytest.raises(UsageError, match="comes from pretraining"):
        model.predict(test, runtime=CPU)


@pytest.mark.parametrize("pool", ["mean", "max", "last"])
def test_features_are_what_the_head_is_given(pool, tmp_path):
    path = trained(tmp_path, finetune__head={"pool": pool})
    model, test = TrainedModel.open(path), load_run(path).data.test
    with torch.no_grad():
        logits = model.network.head.out(torch.from_numpy(model.embed(test, runtime=CPU)))
    assert np.allclose(logits.numpy(), model.logits(test, runtime=CPU), atol=1e-5)


def test_times_are_asked_for(tmp_path):
    path = asked(tmp_path, "times", model={"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1})
    model, test = TrainedModel.open(path), load_run(path).data.test
    assert np.array_equal(model.predict(test, runtime=CPU), read_columns(path / "predictions.parquet")["prediction"])
    with pytest.raises(DataError, match="times between steps"):
        model.predict(rows_of(test), runtime=CPU)


def test_longer_rows_are_answered_where_the_weights_allow_it(tmp_path):
    long = [np.arange(40) % 9]
    s4d = trained(tmp_path, model={"name": "s4d", "d_model": 8, "n_layers": 1, "d_state": 8})
    assert TrainedModel.open(s4d).predict(long, runtime=CPU).shape == (1,)
    for kind in ({"name": "dss"}, {"name": "s4d", "disc": "dss"}):  # normalised over the length of training
        model = TrainedModel.open(trained(tmp_path, model={**kind, "d_model": 8, "n_layers": 1, "d_state": 8}))
        alone = model.predict_proba([long[0][:5]], runtime=CPU)
        beside = model.predict_proba([long[0][:5], *long], runtime=CPU)
        assert np.allclose(beside[0], alone[0], atol=1e-6)
    learned = trained(tmp_path, model={"name": "transformer", **SIZES, "positions": "learned"})
    with pytest.raises(UsageError, match=r"40 steps, but model transformer was built for 12: .*another shape"):
        TrainedModel.open(learned).predict(long, runtime=CPU)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text", "rows are a list"),
        (3, "rows are a list"),
        ([], "there are no rows"),
        ([[1, 2], []], "row 1: the sequence has no steps"),
        ([[1, 2], 3], "row 1: the sequence has no steps"),
        ([[1, 9]], "row 0: tokens are whole numbers from 0 to 8"),
        ([[1, -1]], "row 0: tokens are whole numbers"),
        ([[1, 0.5]], "row 0: tokens are whole numbers"),
        ([[1, float("nan")]], "row 0: tokens are whole numbers"),
        ([[[1, 2]]], "one token a step"),
        ([[1, "a"]], "row 0: numbers are expected"),
        ([[[1], [1, 2]]], "row 0: numbers are expected"),
        (["abc"], "not trained on texts"),
    ],
)
def test_other_rows_than_those_of_training_are_refused(rows, message, tmp_path_factory):
    model = _tokens_model(tmp_path_factory)
    with pytest.raises(DataError, match=message):
        model.predict(rows, runtime=CPU)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[[1.0, 2.0, 3.0]]], "steps of 2 numbers"),
        ([[1.0, 2.0]], "steps of 2 numbers"),
        ([[[1.0, float("nan")]]], "not finite"),
        ([[[1.0, 1e19]]], "not finite, or not below 1e18"),
    ],
)
def test_other_values_than_those_of_training_are_refused(rows, message, tmp_path_factory):
    model = _tokens_model(tmp_path_factory, "numbers")
    with pytest.raises(DataError, match=message):
        model.predict(rows, runtime=CPU)


KEPT: dict[str, TrainedModel] = {}


def _tokens_model(factory, kind="tokens"):
    if kind not in KEPT:
        KEPT[kind] = TrainedModel.open(trained(factory.mktemp("run"), kind))
    return KEPT[kind]


def table(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["body", "stars"], *rows])


def test_texts_and_labels_are_those_of_the_users_file(tmp_path):
    rows = [("so good" + "!" * (i % 7), "good") if i % 2 else ("bad" + "." * (i % 5), "awful") for i in range(60)]
    table(tmp_path / "reviews.csv", [(f"{text} {i}", label) for i, (text, label) in enumerate(rows)])
    one = loaded(
        tmp_path,
        task={"name": "custom", "path": "reviews.csv", "text_column": "body", "label_column": "stars"},
        **TINY,
    )
    model = TrainedModel.open(finished(Job(one, "finetune", 0), tmp_path))
    assert model.task["path"] == "reviews.csv", "no folder of this machine"
    assert np.array_equal(
        model.logits(["so good!", "ünknown"], runtime=CPU),
        model.logits([[*map(ord, "so good!")], [*map(ord, "ünknown")]], runtime=CPU),
    )
    if model.classes:
        assert model.classes == ("awful", "good")
        assert set(model.predict(["so good!", "bad."], runtime=CPU)) <= {"good", "awful"}


def test_what_is_no_finished_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        TrainedModel.open(tmp_path / "no")
    with pytest.raises(UsageError, match="neither the folder of a run"):
        TrainedModel.open(tmp_path)
    (tmp_path / "status.json").write_text('{"state": "running"}')
    with pytest.raises(CheckpointError, match="is not finished"):
        TrainedModel.open(tmp_path)


def test_rows_that_are_no_pairs_are_told(tmp_path):
    path = asked(tmp_path, "pairs")
    for rows in ([3, 1, 2], np.arange(3), [np.int64(1)]):
        with pytest.raises(DataError, match="row 0: this model answers pairs of sequences; give two of them"):
            TrainedModel.open(path).predict(rows, runtime=CPU)
