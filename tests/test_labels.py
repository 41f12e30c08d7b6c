"""What real labels are like: several a row, rare ones, and rows without any."""

import csv
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from tiny import RECIPE, changed, loaded, run, spt_job

import spt
from spt.advisor.columns import AmbiguousError, ColumnRoles, decide
from spt.advisor.table import read_table
from spt.analysis.predictions import read_predictions
from spt.baselines import boosting
from spt.baselines.base import Query
from spt.baselines.registry import BASELINES, compared_metric, why_not
from spt.baselines.run import _scored
from spt.baselines.scores import ComparedMetric
from spt.config.job import Job, _train_settings, without_paths
from spt.config.objectives import SupervisedOptions
from spt.config.recipe import Part
from spt.config.validation import validate_values, validation_messages
from spt.data.batching import collate, rows_by_kind, training_rows
from spt.data.cache import from_spec
from spt.data.dataset import open_task
from spt.data.summary import render, summarise
from spt.errors import DataError, RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.inference.export import export
from spt.inference.predict import Source, predict
from spt.report.per_example import example_scores
from spt.rng import Draw
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.grid import expand
from spt.studies.schema import validate
from spt.tasks.base import IGNORED, Classes, Labels, Reals, Split, TaskData, Tokens, Values, describe
from spt.training.build import build_stage
from spt.training.losses import weighted_sum
from spt.training.metrics import metrics, sums
from spt.training.objectives import Output, Supervised, Targets

SEVERAL = {"list_column": "x", "id_column": "id", "target": "labels", "label_columns": ["af", "lbbb", "pvc"]}
SETS = {"list_column": "x", "id_column": "id", "target": "labels", "label_column": "found", "label_separator": ";"}
NAMES = ("af", "lbbb", "pvc")


def signals(n: int = 60) -> list[dict[str, Any]]:
    """Rows with three labels, the last of them rare, in a column each and in one; a class; and two numbers."""
    rng = np.random.default_rng(0)
    rows = []
    for i, x in enumerate(rng.normal(size=(n, 8)).round(3)):
        holds = [int(x[0] > 0), int(x[1] > 0.5), int(i % 9 == 0)]
        rows.append(
            {"id": f"r{i}", "x": " ".join(map(str, x)), **dict(zip(NAMES, holds, strict=True))}
            | {"found": ";".join(name for name, each in zip(NAMES, holds, strict=True) if each)}
            | {"kind": "rare" if i % 5 == 0 else "common", "mean": float(x.mean()), "first": float(x[0])}
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def opened(path: Path, **options: Any) -> TaskData:
    return open_task(Part(name="custom", path=str(path), **options))


def emptied(rows: list[dict[str, Any]], column: str, every: int) -> list[dict[str, Any]]:
    return [row | ({column: ""} if i % every == 0 else {}) for i, row in enumerate(rows)]


def in_memory(target: Any, targets: Any, classes: tuple[str, ...] = ()) -> TaskData:
    rows = np.random.default_rng(1).normal(size=(12, 5, 1)).astype(np.float32)
    split = Split.from_rows(rows, np.asarray(targets))
    return TaskData(Values(1), target, split, split, split, classes=classes)


# ------------------------------------------------------------------------------------------------- what a target is


@pytest.mark.parametrize(
    ("target", "targets", "words"),
    [
        (Labels(2), [[0, 2]] * 12, "reach from 0 to 2; 1, 0 and -1 for unknown"),
        (Labels(2), [[0, -2]] * 12, "reach from -2 to 0"),
        (Labels(2), [[0, 1, 1]] * 12, "shape"),
        (Labels(2), [[0.0, 1.0]] * 12, "0 and 1 are expected"),
        (Labels(2), [[-1, -1]] * 12, "no row with a known label"),
        (Classes(2), [0, 1, -1] * 4, "outside"),
        (Classes(2, missing=True), [-1] * 12, "no row with a label"),
        (Classes(2, missing=True), [0, -2] * 6, "outside"),
        (Reals(2), [[0.0, np.nan]] * 12, "not finite"),
        (Reals(2, missing=True), [[np.nan, np.nan]] * 12, "no row with a target"),
        (Reals(2, missing=True), [[0.0, np.inf]] * 12, "infinite"),
    ],
)
def test_a_target_of_another_kind_is_told_in_words(target, targets, words):
    with pytest.raises(ValueError, match=words):
        in_memory(target, targets).check()


def test_labels_are_at_least_one():
    with pytest.raises(ValueError, match="at least one label"):
        Labels(0)


def test_targets_are_described_as_before_and_read_again():
    assert describe(Classes(3)) == {"kind": "Classes", "count": 3}
    for target in (Labels(2), Labels(3, True), Classes(2, missing=True), Reals(2, missing=True)):
        assert from_spec(json.loads(json.dumps(describe(target)))) == target


def test_rows_without_a_target_are_left_out_where_labels_are_needed():
    some = in_memory(Classes(2, missing=True), [0, -1, 1, 0, 1, -1] * 2)
    some.check()
    assert len(some.labelled().train) == 8 and (some.labelled().train.targets >= 0).all()
    parts = in_memory(Reals(2, missing=True), [[np.nan, 1.0], [np.nan, np.nan], [2.0, 3.0]] * 4).labelled()
    assert len(parts.train) == 8
    whole = in_memory(Classes(2), [0, 1] * 6)
    assert whole.labelled() is whole


# -------------------------------------------------------------------------------------------------- losses and scores


def test_scores_of_labels_are_scikit_learns_and_the_baselines():
    """Over the known answers alone, whatever the batches were."""
    rng = np.random.default_rng(2)
    truth = rng.integers(0, 2, (40, 4))
    truth[rng.random((40, 4)) < 0.3] = IGNORED
    truth[:3], truth[:, 3] = IGNORED, np.where(truth[:, 3] == 1, 0, truth[:, 3])  # a label that never holds
    logits = rng.normal(size=(40, 4)).astype(np.float32)
    logits[:, 3] = -5
    data = in_memory(Labels(4), truth[3:15])
    output = Output("binary_cross_entropy", False, 4)
    totals: dict[str, Any] = {}
    split = Split.from_rows(np.zeros((40, 2, 1), np.float32), truth)
    for rows in (np.arange(13), np.arange(13, 40)):
        _, targets = Supervised().make_inputs(collate(split, rows, data.input, data.target), Draw(0, "", 0))
        for name, tensor in sums(output, torch.from_numpy(logits[rows]), targets).items():
            totals[name] = totals.get(name, 0) + tensor.sum(0)
    scores, known, said = metrics(output, totals), truth != IGNORED, logits > 0
    of_label = [f1_score(truth[k, j], said[k, j], zero_division=np.nan) for j, k in enumerate(known.T)]
    assert scores["f1_macro"] == pytest.approx(np.nanmean(of_label))
    assert scores["f1_micro"] == pytest.approx(f1_score(truth[known], said[known]))
    right = said == truth
    assert scores["accuracy"] == pytest.approx(np.mean([right[k, j].mean() for j, k in enumerate(known.T)]))
    assert scores["exact_match"] == pytest.approx((right | ~known)[known.any(1)].all(1).mean())
    losses = F.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(truth).float().clamp(0), reduction="none"
    ).numpy()
    rows = [losses[i, k].mean() for i, k in enumerate(known) if k.any()]
    assert scores["loss"] == pytest.approx(np.mean(rows), rel=1e-6)
    some = known.any(1)
    from spt.baselines.scores import scores as of_baseline

    found = of_baseline(Labels(4), truth[some], 1 / (1 + np.exp(-logits[some].astype(np.float64))), ())
    assert found == pytest.approx({name: scores[name] for name in found})


def test_weights_of_a_label_count_in_training_alone():
    output = Output("binary_cross_entropy", False, 2, weights=(3.0, 1.0))
    logits, truth = torch.tensor([[0.3, -1.0], [2.0, 0.1]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    targets = Targets(truth, torch.ones(2))
    expected = F.binary_cross_entropy_with_logits(logits, truth, pos_weight=torch.tensor([3.0, 1.0]))
    assert float(weighted_sum(output, logits, targets)) / 2 == pytest.approx(float(expected))
    plain = F.binary_cross_entropy_with_logits(logits, truth)
    assert float(sums(output, logits, targets)["loss"].sum()) / 2 == pytest.approx(float(plain))


def test_balanced_weights_are_scikit_learns():
    """Up to a factor, of which a weighted mean takes no account."""
    y = np.array([0] * 7 + [1] * 3 + [2] * 2)
    data = in_memory(Classes(3), y)
    output = Supervised(class_weights="balanced").output(data)
    usual = compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(output.weights, usual / usual.min())
    objective = Supervised(class_weights="balanced")
    _, targets = objective.make_inputs(collate(data.train, np.arange(12), data.input, data.target), Draw(0, "", 0))
    (weighed,) = objective.weighed(output, [targets], lambda numbers: numbers)
    logits = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    mean = weighted_sum(output, logits, weighed) / weighed.weight.sum()
    expected = F.cross_entropy(logits, torch.from_numpy(y), weight=torch.from_numpy(usual).float())
    torch.testing.assert_close(mean, expected)
    assert not output.balanced  # evaluations count all answers alike


@pytest.mark.parametrize("weights", ["odd", 3, None, {}, {"a": 0}, {"a": "x"}, {"a": True}, ["a"]])
def test_what_is_no_weighting_is_told_in_one_sentence(weights):
    with pytest.raises(ValidationError) as error:
        validate_values(SupervisedOptions, {"class_weights": weights})
    (message,) = validation_messages(SupervisedOptions, error.value)
    assert message.startswith(f"class_weights: {weights!r} are no weights; balanced is possible")


def test_weights_are_said_by_label():
    named = in_memory(Classes(2), [0, 1] * 6, ("common", "1"))
    assert Supervised(class_weights={1: 4}).output(named).weights == (1.0, 4.0)
    several = in_memory(Labels(2), [[0, 1], [0, 0], [1, 0], [0, -1]] * 3, ("a", "b"))
    assert Supervised(class_weights="balanced").output(several).weights == (3.0, 2.0)
    assert Supervised(class_weights={"b": 0.5}).output(several).weights == (1.0, 0.5)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (in_memory(Reals(1), [[0.0], [1.0]] * 6), {"class_weights": "balanced"}, "for classes and labels"),
        (in_memory(Classes(2), [0, 1] * 6, ("a", "b")), {"class_weights": {"c": 2.0}}, "name 'c'.*a, b"),
        (in_memory(Labels(1), [[0], [1]] * 6), {"class_weights": "batch"}, "batch is for classes"),
        (in_memory(Labels(1), [[0], [1]] * 6), {"loss": "l2"}, "binary cross-entropy; leave out loss"),
        (in_memory(Labels(1), [[0], [1]] * 6), {"scale": "standard"}, "leave out loss and scale"),
        (in_memory(Labels(1), [[0], [1]] * 6), {"metric": "accuracy_macro"}, "none of this task's"),
        (in_memory(Classes(2), [0, 1] * 6), {"metric": "exact_match"}, "none of this task's"),
    ],
)
def test_objectives_that_do_not_fit_the_targets(data, options, words):
    with pytest.raises(UsageError, match=words):
        Supervised(**options).output(data)


def test_missing_numbers_take_no_part_in_a_scale():
    y = [[0.0, np.nan], [2.0, 10.0], [np.nan, 30.0]] * 4
    output = Supervised(scale="standard").output(in_memory(Reals(2, missing=True), y))
    assert output.shift == (1.0, 20.0) and output.scale == (1.0, 10.0)


# ----------------------------------------------------------------------------------------------------------- sampling


def test_balanced_epochs_have_every_class_equally_often_and_resume_exactly():
    y = np.array([0] * 20 + [1] * 3 + [2] * 1)
    kinds = rows_by_kind(Split.from_rows(np.zeros((24, 2, 1), np.float32), y), Classes(3))
    whole = list(islice(training_rows(24, 5, 3, 0, kinds=kinds), 15))
    for epoch in range(3):
        rows = np.concatenate([rows for e, rows in whole if e == epoch])
        assert len(rows) == 24 and np.bincount(y[rows]).tolist() == [8, 8, 8]
        assert len(np.unique(rows[y[rows] == 0])) == 8  # none again before all have come
        assert np.bincount(rows, minlength=24)[20:23].min() >= 2
    later = list(islice(training_rows(24, 5, 3, 7, kinds=kinds), 8))
    assert [(e, rows.tolist()) for e, rows in whole[7:]] == [(e, rows.tolist()) for e, rows in later]
    assert whole[0][1].tolist() != whole[5][1].tolist()


def test_balanced_draws_of_labels_are_by_label_and_by_none():
    flags = np.array([[1, 0], [1, 1], [0, 0], [0, -1]] + [[0, 0]] * 8)
    kinds = rows_by_kind(Split.from_rows(np.zeros((12, 2, 1), np.float32), flags), Labels(2))
    assert [kind.tolist() for kind in kinds] == [[0, 1], [1], list(range(2, 12))]


@pytest.mark.parametrize(
    ("place", "task", "words"),
    [
        ("pretrain", {"label_column": "kind"}, "pretraining knows none"),
        ("finetune", {"label_column": "mean", "target": "real"}, "targets are numbers"),
    ],
)
def test_sampling_by_class_needs_classes(place, task, words, tmp_path):
    resolved = recipe_over(tmp_path, signals(), changes={f"{place}__train__sampling": "balanced"}, **task)
    with pytest.raises(UsageError, match=words):
        build_stage(Job(resolved, place, 0))


def test_older_recipes_keep_their_keys(tmp_path):
    resolved = loaded(
        tmp_path,
        task={**SETS, "name": "custom", "path": str(write(tmp_path / "rows.csv", signals())), "missing_labels": "none"},
    )
    assert "sampling" not in _train_settings(resolved.recipe.finetune.train)
    plain = Part(name="custom", label_separator=None, missing_labels="refuse", label_column="y")
    assert without_paths("tasks", plain) == {"label_column": "y"}


# ----------------------------------------------------------------------------------------------------------- own data


def test_several_labels_from_columns_and_from_one_column_are_the_same(tmp_path):
    path = write(tmp_path / "rows.csv", signals())
    columns, sets = opened(path, **SEVERAL), opened(path, **SETS, missing_labels="none")
    assert columns.target == sets.target == Labels(3) and columns.classes == sets.classes == NAMES
    for name, split in columns.splits.items():
        np.testing.assert_array_equal(split.targets, sets.splits[name].targets)
    lists = [{**row, "found": json.dumps([name for name in NAMES if row[name]])} for row in signals()]
    without = {key: value for key, value in SETS.items() if key != "label_separator"}
    again = opened(write(tmp_path / "lists.csv", lists), **without)
    np.testing.assert_array_equal(again.train.targets, columns.train.targets)
    words = [row | {name: ("no", "Yes")[row[name]] for name in NAMES} for row in signals()]
    np.testing.assert_array_equal(
        opened(write(tmp_path / "words.csv", words), **SEVERAL).train.targets, columns.train.targets
    )


def test_a_stratified_split_shares_out_every_label(tmp_path):
    rows = emptied(signals(200), "lbbb", 10)
    data = opened(
        write(tmp_path / "rows.csv", rows),
        **SEVERAL,
        missing_labels="ignore",
        split="stratified",
        validation_fraction=0.2,
        test_fraction=0.2,
    )
    counts = np.array([(split.targets == 1).sum(0) for split in data.splits.values()])
    assert (abs(counts[1:] / counts.sum(0) - 0.2) < 0.06).all()


def test_labels_that_no_training_row_has_are_left_out_and_told(tmp_path):
    rows = [row | {"part": ("train", "validation", "test")[i % 3]} for i, row in enumerate(signals())]
    rows[2]["found"], rows[3]["found"] = "odd;af", "single"
    data = opened(write(tmp_path / "rows.csv", rows), **SETS, missing_labels="none", split_column="part")
    assert data.classes == ("af", "lbbb", "pvc", "single")
    assert "1 labels stand in no training row and are left out: 'odd'" in data.notes
    assert "1 of the 4 labels hold in one training row: 'single'" in data.notes
    assert data.test.targets[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("split", ["hash", "stratified"])
def test_rows_without_a_label_are_training_rows(split, tmp_path):
    rows = emptied(signals(), "kind", 3)
    options = {"list_column": "x", "label_column": "kind", "missing_labels": "ignore", "split": split}
    data = opened(write(tmp_path / "rows.csv", rows), **options)
    assert data.target == Classes(2, missing=True) and data.classes == ("common", "rare")
    assert (data.train.targets == IGNORED).sum() == 20
    for part in (data.val, data.test):
        assert (part.targets != IGNORED).all()
    assert any("of 20 " not in note and "have a label" in note for note in data.notes)
    text = render(summarise(Part(name="custom", path=str(tmp_path / "rows.csv"), **options)))
    assert f"train: {len(data.train) - 20} of {len(data.train)} rows have a target" in text


def test_a_group_with_a_labelled_row_elsewhere_keeps_its_unlabelled_rows_with_it(tmp_path):
    rows = [row | {"who": f"p{i // 4}", "kind": row["kind"] if i % 4 == 0 else ""} for i, row in enumerate(signals())]
    data = opened(
        write(tmp_path / "rows.csv", rows),
        list_column="x",
        id_column="id",
        label_column="kind",
        group_column="who",
        missing_labels="ignore",
        validation_fraction=0.25,
        test_fraction=0.25,
    )
    groups = {name: {int(each[1:]) // 4 for each in split.ids.tolist()} for name, split in data.splits.items()}
    assert not groups["train"] & groups["test"] and len(data.test) == 4 * len(groups["test"])


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (SEVERAL, {"lbbb": "maybe"}, "rows.csv, line 5, column lbbb: 'maybe' is neither 0 or 1"),
        (SEVERAL, {"lbbb": "2"}, "line 5, column lbbb: '2' is neither"),
        (SEVERAL, {"af": ""}, "line 5, column af: the cell is empty; 0 or 1 is expected"),
        (SETS, {"found": ""}, "column found: the cell is empty; say missing_labels: none"),
        ({**SETS, "missing_labels": "none"}, {"found": "[1, "}, "line 5, column found: '\\[1, ' is not a list in JSON"),
        (
            {k: v for k, v in SETS.items() if k != "label_separator"} | {"missing_labels": "none"},
            {"found": "af"},
            "is not a list of labels; say what stands between them",
        ),
        ({**SETS, "missing_labels": "none"}, {"found": "a" * 300}, "300 characters are too many"),
        ({"list_column": "x", "label_column": "kind"}, {"kind": ""}, "column kind: the cell is empty"),
        ({"list_column": "x", "target": "real", "label_columns": ["mean", "first"]}, {"mean": ""}, "cell is empty"),
        (
            {"list_column": "x", "target": "real", "label_columns": ["mean", "first"], "missing_labels": "ignore"},
            {"mean": "much"},
            "'much' is not a number",
        ),
    ],
)
def test_labels_that_cannot_be_read_are_told_with_their_place(options, change, words, tmp_path):
    rows = signals()
    if "missing" in words or "column kind" in words:
        rows = [row | {"found": row["found"] or "none"} for row in rows]
    rows[3] |= change
    with pytest.raises(DataError, match=words):
        opened(write(tmp_path / "rows.csv", rows), **options)


@pytest.mark.parametrize("column", ["kind", "mean", "af"])
def test_a_column_without_any_label_is_told(column, tmp_path):
    options = {
        "kind": {"label_column": "kind"},
        "mean": {"target": "real", "label_columns": ["first", "mean"]},
        "af": {"target": "labels", "label_columns": ["lbbb", "af"]},
    }[column]
    path = write(tmp_path / "rows.csv", emptied(signals(), column, 1))
    with pytest.raises(DataError, match=f"{column}: no (training|train) row has a label"):
        opened(path, list_column="x", missing_labels="ignore", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "labels"}, "target labels needs label_column or label_columns"),
        ({"target": "labels", "label_column": "a", "label_columns": ["b"]}, "one of the two"),
        ({"label_columns": ["a", "b"]}, "target classes needs label_column"),
        ({"label_column": "a", "label_separator": ";"}, "label_separator is for target: labels"),
        ({"target": "labels", "label_columns": ["a"], "label_separator": ";"}, "no effect here"),
        ({"target": "labels", "label_column": "a", "label_separator": ""}, "stands in quotes"),
        ({"label_column": "a", "missing_labels": "none"}, "missing_labels: none is for target: labels"),
        ({"label_column": "a", "missing_labels": "drop"}, "missing_labels"),
        ({"target": "labels", "label_columns": ["a", "a"]}, "given twice"),
    ],
)
def test_options_that_contradict_each_other(options, words, tmp_path):
    with pytest.raises(RecipeError, match=words):
        loaded(tmp_path, task={"name": "custom", "path": "rows.csv", "list_column": "x", **options})


def test_steps_have_several_labels_too(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"id": f"s{i}", "t": t, "v": round(v, 3), "a": int(v > 0), "b": "" if t == 2 else int(t > 3)}
        for i in range(20)
        for t, v in enumerate(rng.normal(size=6).tolist())
    ]
    labels = {"target": "labels", "label_columns": ["a", "b"], "per_step": True, "split": "stratified"}
    data = opened(
        write(tmp_path / "rows.csv", rows),
        value_columns=["v"],
        id_column="id",
        time_column="t",
        **labels,
    )
    assert data.target == Labels(2, True) and data.classes == ("a", "b")
    assert data.train.targets.shape == (len(data.train.values), 2) and (data.train.targets[2::6, 1] == IGNORED).all()
    task = {"name": "custom", "path": str(tmp_path / "rows.csv"), "value_columns": ["v"], "id_column": "id"}
    resolved = loaded(tmp_path, task={**task, "time_column": "t", **labels})
    result = run(Job(resolved, "finetune", 0), tmp_path / "runs")
    assert result.test is not None and 0 <= result.test["exact_match"] <= result.test["accuracy"] <= 1


# ------------------------------------------------------------------------------------------------- from data to answers


def recipe_over(folder: Path, rows: list[dict[str, Any]], changes: Any = None, **task: Any) -> Any:
    path = write(folder / "rows.csv", rows)
    task = {"name": "custom", "path": str(path), "list_column": "x", "id_column": "id", **task}
    return loaded(folder, task=task, **(changes or {}))


def test_both_arms_learn_several_labels_and_new_rows_are_answered(tmp_path):
    rows = emptied(emptied(signals(), "lbbb", 4), "af", 8)
    resolved = recipe_over(
        tmp_path,
        rows,
        **{k: v for k, v in SEVERAL.items() if "column" not in k or "label" in k},
        missing_labels="ignore",
    )
    for job in (spt_job(resolved), Job(resolved, "finetune", 0)):
        result = run(job, tmp_path / "runs")
        assert (
            result.metric == "f1_macro"
            and {"accuracy", "exact_match", "f1_micro", "auroc", "mcc"} <= (result.test or {}).keys()
        )
    folder = tmp_path / "runs" / job.name
    stored = pq.read_table(folder / "predictions.parquet").to_pydict()
    assert {"label_0", "prediction_2"} <= stored.keys()
    items = example_scores(folder)
    assert items.metric == "accuracy" and np.average(items.score, weights=items.weight) <= 1
    with pytest.raises(UsageError, match="several labels a row"):
        read_predictions([folder], "test", Runtime(Settings(quiet=True)))
    assert stored["label_1"] == open_task(resolved.recipe.task).labelled().test.targets[:, 1].tolist()
    runtime = Runtime(Settings(quiet=True))
    export(folder, tmp_path / "model")
    for model in (folder, tmp_path / "model"):
        done = predict(model, Source(tmp_path / "rows.csv"), tmp_path / f"{model.name}.csv", runtime)
        assert done.scores is not None and done.rows == len(rows)
    table = (tmp_path / "model.csv").read_text().splitlines()
    assert table == (tmp_path / f"{folder.name}.csv").read_text().splitlines()
    assert table[0] == "id," + ",".join(f"{what}_{name}" for what in ("label", "prediction", "p") for name in NAMES)
    assert table[1].startswith("r0,,,1,") and all(
        ("1" == c[5]) == (float(c[8]) > 0.5) for c in (r.split(",") for r in table[1:])
    )


def test_missing_labels_are_pretrained_on_but_not_scored(tmp_path):
    resolved = recipe_over(tmp_path, emptied(signals(), "kind", 2), label_column="kind", missing_labels="ignore")
    whole = run(spt_job(resolved), tmp_path / "runs")
    pieces = run(spt_job(resolved), tmp_path / "pieces", micro_batch_size=3)
    pretrain = run(spt_job(resolved).parent, tmp_path / "runs")  # type: ignore[arg-type]
    assert pretrain.data["train"].rows == whole.data["train"].rows + 30
    assert whole.own.examples <= whole.own.steps * 8 and np.isfinite(whole.test["loss"])  # type: ignore[index]
    assert pieces.test == pytest.approx(whole.test, rel=1e-4)
    assert any("only pretrained on" in note for note in whole.notes)


def test_epochs_over_rows_with_and_without_labels_match_no_budget(tmp_path):
    train = {"epochs": 2, "batch_size": 4, "learning_rate": 0.01}
    changes = {"pretrain__train": train, "finetune__train": {**train}}
    recipe_over(tmp_path, emptied(signals(), "kind", 2), changes, label_column="kind", missing_labels="ignore")
    costs = MeasuredCosts(tmp_path / "runs", Runtime(Settings(quiet=True, cpu=True)))
    studies = [
        validate({"kind": "compute", "recipes": [str(tmp_path / "tiny.yaml")], "seeds": 1, "match": axis}, "here")
        for axis in ("examples", "epochs")
    ]
    assert expand(studies[0], False, costs)
    with pytest.raises(UsageError, match="training rows have labels, so an epoch of pretraining is more than one"):
        expand(studies[1], False, costs)


def test_numbers_may_be_missing_one_by_one(tmp_path):
    rows = emptied(emptied(signals(), "mean", 3), "first", 2)
    resolved = recipe_over(tmp_path, rows, target="real", label_columns=["mean", "first"], missing_labels="ignore")
    result = run(Job(resolved, "finetune", 0), tmp_path / "runs")
    assert np.isfinite(list((result.test or {}).values())).all()
    data = open_task(resolved.recipe.task)
    assert result.data["train"].rows == int(np.isfinite(data.train.targets).any(1).sum()) < len(data.train)
    folder, runtime = tmp_path / "runs" / Job(resolved, "finetune", 0).name, Runtime(Settings(quiet=True))
    done = predict(folder, Source(tmp_path / "rows.csv"), tmp_path / "out.csv", runtime)
    assert done.scores is not None and np.isfinite(done.scores["mse"])
    loaded_predictions = read_predictions([folder], "test", runtime)
    assert np.isfinite(loaded_predictions.evaluation.truth).all()
    assert any("lack some of their numbers" in note for note in loaded_predictions.notes)
    items = example_scores(folder)
    assert np.isfinite(items.score).all() and len(items.score) == len(data.labelled().test)


def test_class_weights_and_balanced_draws_are_told_and_change_the_training(tmp_path):
    rows = signals()
    plain = run(Job(recipe_over(tmp_path, rows, label_column="kind"), "finetune", 0), tmp_path / "runs")
    for changes, words in (
        ({"objective": {"name": "supervised", "class_weights": {"rare": 9}}}, "weigh more in the training loss"),
        ({"train": {**RECIPE["finetune"]["train"], "sampling": "balanced"}}, "drawn with every class"),
    ):
        base = changed(RECIPE, finetune=changed(RECIPE["finetune"], **changes))
        task = {"name": "custom", "path": str(tmp_path / "rows.csv"), "list_column": "x", "id_column": "id"}
        resolved = loaded(tmp_path, finetune=base["finetune"], task={**task, "label_column": "kind"})
        result = run(Job(resolved, "finetune", 0), tmp_path / "runs")
        assert result.key != plain.key and result.val["loss"] != plain.val["loss"]
        assert any(words in note for note in result.notes) and not any(words in note for note in plain.notes)


def test_baselines_answer_several_labels_each_from_the_rows_in_which_it_is_known(tmp_path):
    resolved = recipe_over(tmp_path, signals(), target="labels", label_columns=list(NAMES))
    data = open_task(resolved.recipe.task)
    metric = compared_metric(resolved, data)
    assert metric.name == "f1_macro" and why_not("majority", data, metric.name) is None
    scores, columns = _scored(BASELINES["majority"].fit(data, metric, 0), data, data.test)
    usual = (data.train.targets == 1).mean(0) > 0.5
    assert scores["accuracy"] == pytest.approx(((data.test.targets == 1) == usual).mean())
    assert columns["prediction_0"].tolist() == [int(usual[0])] * len(data.test)
    unknown = np.where(np.arange(len(data.train))[:, None] % 3 == np.arange(3), IGNORED, data.train.targets)
    unknown[:, 2] = np.where(unknown[:, 2] == 0, IGNORED, unknown[:, 2])  # a label that is alike where it is known
    gaps = replace(data, train=replace(data.train, targets=unknown))
    for name in ("linear_probe", "logistic", "catch22", "boosting"):
        found = BASELINES[name].fit(gaps, metric, 0)
        scores, columns = _scored(found, gaps, gaps.test, {"auroc", "mcc"})
        answers = found.answer(Query(gaps.test.unlabelled(), np.arange(len(gaps.test))))
        assert set(columns["prediction_2"].tolist()) == {1}, "nothing else is known"
        if name in ("linear_probe", "logistic"):  # the others know no places, or ask for more rows
            assert scores["f1_macro"] > 0.5 and 0 < scores["mcc"] <= 1, name
        areas = [roc_auc_score(gaps.test.targets[:, k], answers[:, k]) for k in range(3)]
        assert scores["auroc"] == pytest.approx(np.mean(areas))
        assert ((answers > 0.5) == np.stack([columns[f"prediction_{k}"] for k in range(3)], 1)).all()
    alike = replace(data, train=replace(data.train, targets=np.ones_like(data.train.targets)))
    assert why_not("boosting", alike, metric.name) == "every label is the same in all training rows"
    assert why_not("majority", alike, metric.name) is None


def test_texts_and_steps_of_several_labels_have_baselines(monkeypatch):
    """Does a token occur? At a step: is it token 1, and is the one before token 3?"""
    monkeypatch.setattr(boosting, "ROUNDS", 20)
    rng = np.random.default_rng(0)
    rows = [rng.choice(6, 15, p=[0.5, 0.02, 0.08, 0.2, 0.1, 0.1]) for _ in range(240)]
    held = np.array([[1 in row, 2 in row, 3 in row] for row in rows]).astype(np.int64)
    held[::5, 0] = IGNORED
    parts = [slice(0, 120), slice(120, 180), slice(180, 240)]
    splits = [Split.from_rows(rows[part], held[part]) for part in parts]
    data = TaskData(Tokens(6), Labels(3), *splits)
    for name in ("tfidf", "boosting", "linear_probe", "logistic"):
        found = BASELINES[name].fit(data, ComparedMetric("accuracy"), 0)
        assert _scored(found, data, data.test)[0]["accuracy"] > 0.85, name
    tags = [np.stack([row == 1, np.concatenate([[0], row[:-1]]) == 3], 1).astype(np.int64) for row in rows]
    splits = [Split.from_rows(rows[part], tags[part], per_step=True) for part in parts]
    data = TaskData(Tokens(6), Labels(2, per_step=True), *splits)
    for name in ("boosting", "linear_probe"):
        scores, columns = _scored(BASELINES[name].fit(data, ComparedMetric("f1_macro"), 0), data, data.test)
        assert scores["f1_macro"] > 0.9 and columns["right"].sum() / columns["steps"].sum() > 0.9, name


# ----------------------------------------------------------------------------------------------- spt try, estimators


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (
            {"label": "af,lbbb,pvc"},
            {"target": "labels", "label_columns": [*NAMES], "missing_labels": "ignore"},
            "3 labels",
        ),
        ({"label": "mean,first"}, {"target": "real", "label_columns": ["mean", "first"]}, "real numbers"),
        (
            {"label": "found", "separator": ";"},
            {"target": "labels", "label_separator": ";", "missing_labels": "none"},
            "taken to say",
        ),
        ({"label": "kind"}, {"label_column": "kind", "missing_labels": "ignore"}, "'kind' is empty in 9 of 60 rows"),
    ],
)
def test_spt_try_finds_such_labels(given, options, words, tmp_path):
    table = read_table(write(tmp_path / "rows.csv", emptied(emptied(signals(), "kind", 7), "lbbb", 10)))
    found = decide(table, ColumnRoles(**given))
    assert {name: found.options.get(name) for name in options} == options
    assert any(words in line for line in found.lines)


def test_spt_try_asks_whether_a_text_is_several_labels(tmp_path):
    table = read_table(write(tmp_path / "rows.csv", signals()))
    with pytest.raises(AmbiguousError, match="several labels a row") as error:
        decide(table, ColumnRoles(label="found"))
    assert error.value.option == "--separator" and [value for value, _ in error.value.choices] == [";", "none"]
    with pytest.raises(DataError, match="several columns are labels of 0 or 1"):
        decide(table, ColumnRoles(label="af,kind"))
    with pytest.raises(UsageError, match="no such column"):
        decide(table, ColumnRoles(label="af,lbb"))


X = np.random.default_rng(0).normal(size=(40, 6))
TINY: dict[str, Any] = {"model_options": {"d_model": 8, "n_layers": 1, "n_heads": 1}, "epochs": 1, "pretrain_epochs": 1}


def test_an_estimator_learns_several_labels(tmp_path):
    y = (X[:, :3] > 0).astype(int)
    model = spt.SequenceClassifier(**TINY, class_weight="balanced", metric="auroc", device="cpu").fit(X, y)
    answers, chances = model.predict(X), model.predict_proba(X)
    assert answers.shape == chances.shape == (40, 3) and answers.dtype.kind == "i"
    np.testing.assert_array_equal(answers, chances > 0.5)
    assert model.score(X, y) == (answers == y).all(1).mean()  # scikit-learn's accuracy of several labels
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(spt.SequenceClassifier.load(tmp_path / "model").predict(X), answers)
    with pytest.raises(ValueError, match="unlike y"):
        spt.SequenceClassifier(**TINY, device="cpu").fit(X, y, X_val=X[:5], y_val=y[:5, 0])


def test_an_estimator_takes_rows_without_a_label(tmp_path):
    classes = np.array(["a", "b"], object)[(X[:, 0] > 0).astype(int)]
    classes[:12] = None
    model = spt.SequenceClassifier(**TINY, class_weight={"b": 2.0}, device="cpu").fit(X, classes)
    assert model.classes_.tolist() == ["a", "b"]
    assert model.result_.data["train"].rows + model.result_.data["val"].rows == 28
    numbers = X[:, :2].copy()
    numbers[:6], numbers[8, 1] = np.nan, np.nan
    fitted = spt.SequenceRegressor(**TINY, device="cpu").fit(X, numbers)
    assert fitted.predict(X).shape == (40, 2) and np.isfinite(fitted.predict(X)).all()
    assert fitted.result_.data["train"].rows + fitted.result_.data["val"].rows == 34


def test_an_estimator_draws_by_class_and_knows_the_positive_one(tmp_path):
    y = np.where(X[:, 0] > 0.8, "rare", "usual")
    given = {"metric": "f1", "sampling": "balanced", "positive": "rare", "device": "cpu", "runs_dir": tmp_path / "runs"}
    model = spt.SequenceClassifier(**TINY, **given).fit(X, y)
    job = spt.load_run(model.run_).job
    assert job.train.sampling == "balanced"
    assert job.settings_stage.objective.options["positive"] == "0"  # of the sorted classes
    usual = spt.SequenceClassifier(**TINY, **given | {"positive": "usual"}).fit(X, y)
    assert usual.result_.val["f1"] != model.result_.val["f1"]
    model.save(tmp_path / "model")
    assert spt.SequenceClassifier.load(tmp_path / "model").get_params()["positive"] == "rare"


def test_rows_without_a_label_are_not_scored():
    """Accuracy of the known ones; of several labels, rows of which all are known; of numbers, each over its own."""
    classes = np.array(["a", "b"], object)[(X[:, 0] > 0).astype(int)]
    model = spt.SequenceClassifier(**TINY, self_pretrain=False, device="cpu").fit(X, classes)
    gappy, weight = classes.copy(), np.arange(40) + 1.0
    gappy[:12] = None
    right = model.predict(X)[12:] == classes[12:]
    assert model.score(X, gappy) == pytest.approx(right.mean())
    assert model.score(X, gappy, weight) == pytest.approx(np.average(right, weights=weight[12:]))
    flags = (X[:, :2] > 0).astype(float)
    several = spt.SequenceClassifier(**TINY, self_pretrain=False, device="cpu").fit(X, flags)
    flags[:3], flags[5, 1] = np.nan, np.nan
    known = np.isfinite(flags).all(axis=1)
    assert several.score(X, flags) == pytest.approx((several.predict(X) == flags).all(axis=1)[known].mean())
    flags[:, 1] = np.nan
    with pytest.raises(ValueError, match="no row whose labels are all known"):
        several.score(X, flags)
    numbers = X[:, :2].copy()
    regressor = spt.SequenceRegressor(**TINY, self_pretrain=False, device="cpu").fit(X, numbers)
    numbers[:6, 0], numbers[8, 1] = np.nan, np.nan
    answers = regressor.predict(X)
    each = [r2_score(numbers[there, k], answers[there, k]) for k, there in enumerate(np.isfinite(numbers).T)]
    assert regressor.score(X, numbers) == pytest.approx(np.mean(each))


@pytest.mark.parametrize(
    ("y", "changes", "words"),
    [
        (np.arange(40) % 2, {"sampling": "even"}, "sampling='even': None or 'balanced'"),
        (np.arange(40) % 2, {"positive": 7}, "positive=7 is no class of y"),
        ((X[:, :2] > 0).astype(int), {"positive": 1}, "y holds labels"),
        (np.full(40, np.nan), {}, "every entry is missing"),
        (np.stack([np.arange(40) % 3] * 2, 1), {}, "holds 0 and 1, in a column for each"),
        (np.arange(40) % 2, {"class_weight": "even"}, "None, 'balanced' or"),
        (np.arange(40) % 2, {"class_weight": {5: 1.0}}, "names 5"),
        (np.arange(40) % 2, {"class_weight": {0: -1.0}}, "number above 0"),
    ],
)
def test_labels_that_no_estimator_can_learn(y, changes, words):
    with pytest.raises(ValueError, match=words):
        spt.SequenceClassifier(**TINY, **changes, device="cpu").fit(X, y)
