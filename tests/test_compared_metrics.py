"""Metrics of a whole split in runs: they are compared and select, are the same by every way, or are refused."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from tiny import load, own_task, run, spt_job

from spt.analysis.reevaluate import evaluate_run
from spt.config.job import Job
from spt.data.metrics import FROM_PROBABILITIES, UNASKED, groups_of, of_confusion
from spt.errors import UsageError
from spt.inference.predict import Source, predict
from spt.inference.trained_model import TrainedModel
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks.base import IGNORED, Split
from spt.training.build import build_stage
from spt.training.evaluate import Predictions, evaluate, is_better
from spt.training.groups import MOST_GROUPS, group_scores
from spt.training.load_run import load_run
from spt.training.metrics import ScoredAnswers, metrics, of_known, unasked
from spt.training.objectives import Output, evaluation_draw

TRAIN = {"steps": 4, "batch_size": 16, "learning_rate": 0.01, "evaluate_every": 2}
STEPS = 6


def table(folder: Path, rows: int = 150) -> None:
    """Rows of a site each; three in ten are ill, whose values lie a little higher. Sites 0 and 1 are test."""
    rng = np.random.default_rng(0)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "part", "state", "size", *(f"x{i}" for i in range(STEPS))])
        for i in range(rows):
            ill = rng.uniform() < 0.3
            site = i % 5
            part = "test" if site < 2 else "validation" if site == 2 else "train"
            values = rng.normal(0.7 * ill, 1, STEPS)
            size = values.sum() + 10
            writer.writerow([f"s{site}", part, "ill" if ill else "well", size.round(3), *values.round(3)])


def recipe(folder: Path, objective: dict[str, object] | None = None, **changes: object) -> Path:
    import yaml

    task = {"name": "custom", "path": "rows.csv", "value_prefix": "x", "label_column": "state"}
    task |= {"group_column": "site", "split_column": "part", **changes}
    values = {
        "task": task,
        "model": {"name": "transformer", "d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 8},
        "pretrain": {"objective": {"name": "masked", "ratio": 0.5}, "train": {**TRAIN}},
        "finetune": {"objective": {"name": "supervised", **(objective or {})}, "train": {**TRAIN}},
    }
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run that is compared, and selected, by the area under the ROC curve of those who are ill."""
    folder = tmp_path_factory.mktemp("metrics")
    table(folder)
    job = Job(load(str(recipe(folder, {"metric": "auroc", "positive": "ill"}))), "finetune", 0)
    return folder / job.name, run(job, folder)


def test_every_score_is_scikit_learns_on_the_runs_own_probabilities(made):
    path, result = made
    test = load_run(path).data.test
    truth, p = np.asarray(test.targets), TrainedModel.open(path).predict_proba(test.unlabelled()).astype(np.float64)
    p /= p.sum(1, keepdims=True)  # to the last digit of a double
    said, ill = p.argmax(1), 0
    scores = result.test or {}
    assert result.classes == ("ill", "well") and (result.metric, result.selected_by) == ("auroc", "auroc")
    expected = {
        "accuracy": sk.accuracy_score(truth, said),
        "accuracy_macro": sk.balanced_accuracy_score(truth, said),
        "balanced_accuracy": sk.balanced_accuracy_score(truth, said),
        "f1": sk.f1_score(truth, said, pos_label=ill, zero_division=0.0),
        "f1_weighted": sk.f1_score(truth, said, average="weighted", zero_division=0.0),
        "f1_micro": sk.f1_score(truth, said, average="micro"),
        "mcc": sk.matthews_corrcoef(truth, said),
        "log_loss": sk.log_loss(truth, p),
        "auroc": sk.roc_auc_score(truth == ill, p[:, ill]),
        "auprc": sk.average_precision_score(truth == ill, p[:, ill]),
    }
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0.3 < scores["auroc"] != 0.5
    assert np.array_equal(result.confusion, sk.confusion_matrix(truth, said))


def test_validation_scores_hold_what_selected_and_no_other_metric_of_the_whole_split(made):
    _, result = made
    assert "auroc" in result.val and "mcc" not in result.val


def test_groups_of_test_rows_have_the_scores_of_their_rows(made):
    path, result = made
    test = load_run(path).data.test
    p = TrainedModel.open(path).predict_proba(test.unlabelled())
    expected = {
        name: (len(rows), sk.roc_auc_score(np.asarray(test.targets)[rows] == 0, p[rows, 0]))
        for name, rows in groups_of(test.groups)
    }
    assert {each.name: (each.rows, each.score) for each in result.groups} == {
        name: (rows, pytest.approx(score, abs=1e-6)) for name, (rows, score) in expected.items()
    }
    assert list(expected) == ["s0", "s1"]


def test_answers_that_are_known_in_part_count_in_that_part():
    truth = np.array([[1.0, np.nan], [np.nan, np.nan], [0.1, 2.0]])
    kept = of_known(ScoredAnswers(truth, torch.arange(6.0).reshape(3, 2), np.arange(3)))
    assert kept.rows.tolist() == [0, 2] and kept.logits.tolist() == [[0, 1], [4, 5]]
    assert kept.truth[1, 0] == np.float32(0.1), "as networks see them"
    columns = {"known": [2.0, 0.0], "right_by_label": [1.0, 0.0], "true": [1.0, 0.0], "predicted": [2.0, 0.0]}
    sums = {name: torch.tensor(each).double() for name, each in (columns | {"hits": [1.0, 0.0]}).items()}
    one = {name: torch.tensor(2.0).double() for name in ("weight", "loss", "right", "exact")}
    found = metrics(Output("binary_cross_entropy", False, 2), sums | one)
    assert found["accuracy"] == 0.5 and found["f1_macro"] == pytest.approx(2 / 3), "of the label that anybody knows"


def test_nobody_waits_for_metrics_that_were_not_asked_for():
    output = Output("cross_entropy", True, 1, 3, macro=True, supervised=True)
    few, many = unasked(output, UNASKED), unasked(output, UNASKED + 1)
    assert {"auroc", "log_loss", "mcc"} <= few and many == few - {*FROM_PROBABILITIES}


def of_groups(metric: str, groups: list[str], truth: list[int], chances: list[float]) -> dict[str, Any]:
    """(rows, score) of each group, of the probability of the second of two classes."""
    p = torch.tensor(chances).double()
    split = Split.from_rows(np.zeros((len(truth), 1), np.int64), np.array(truth))
    split = replace(split, groups=np.array(groups))
    known = np.flatnonzero(split.targets != IGNORED)
    logits = torch.stack([1 - p, p], 1).log()
    right = (p > 0.5).long().numpy() == split.targets
    weight = torch.from_numpy((split.targets != IGNORED).astype(float))
    sums = {"weight": weight, "loss": weight, "right": torch.from_numpy(right.astype(float)) * weight}
    output = Output("cross_entropy", False, 1, 2, metric=metric, macro=False, supervised=True, positive=1)
    output = output._replace(macro=metric != "accuracy")
    scored = ScoredAnswers(split.targets[known], logits[known], known)
    found = group_scores(output, split, Predictions(None, None, {}, scored=scored, sums=sums))
    return {each.name: (each.rows, each.score) for each in found}


def test_mcc_of_one_class_is_0_by_definition():
    alike, told = of_confusion(["mcc"], np.diag([4, 0]), 1), of_confusion(["mcc"], np.diag([4, 2]), 1)
    assert alike.scores == {"mcc": 0.0} and alike.notes == (
        "every row has the same class, so that mcc is 0 by definition",
    )
    assert told.scores == {"mcc": 1.0} and told.notes == ()
    assert of_confusion(["mcc"], np.array([[2, 2], [0, 0]]), 1).notes == alike.notes
    assert of_confusion(["mcc"], np.array([[2, 0], [2, 0]]), 1) == ({"mcc": 0.0}, ())


def test_groups_without_a_score_have_none():
    """Of one class, or without a known label; and single groups, or very many, are not told."""
    groups, truth = [*"cababd"], [IGNORED, 0, 1, 1, 1, IGNORED]
    chances = [0.5, 0.2, 0.6, 0.7, 0.4, 0.5]
    assert of_groups("auroc", groups, truth, chances) == {"a": (2, 1.0), "b": (2, None), "c": (1, None), "d": (1, None)}
    assert of_groups("accuracy", groups, truth, chances) == {"a": (2, 1), "b": (2, 0.5), "c": (1, None), "d": (1, None)}
    assert of_groups("auroc", ["a"] * 6, truth, chances) == {}
    assert of_groups("mcc", groups, truth, chances) == {"a": (2, 1.0), "b": (2, None), "c": (1, None), "d": (1, None)}
    many = [f"g{i}" for i in range(MOST_GROUPS)]
    several = [1] * MOST_GROUPS, [0.9] * MOST_GROUPS
    assert len(of_groups("accuracy", many, *several)) == MOST_GROUPS
    assert of_groups("accuracy", [*many, "another"], *([*each, each[0]] for each in several)) == {}


def test_the_temperature_is_kept_and_changes_no_answer(made):
    path, result = made
    assert result.calibration is not None and result.calibration.before is not None
    assert result.calibration.before.log_loss == pytest.approx((result.test or {})["log_loss"])
    model, rows = TrainedModel.open(path), load_run(path).data.test.unlabelled()
    plain, cooled = model.predict_proba(rows), model.predict_proba(rows, calibrated=True)
    assert (plain.argmax(1) == cooled.argmax(1)).all() and not np.allclose(plain, cooled)
    odds = np.log(plain[:, 0] / plain[:, 1])
    assert np.log(cooled[:, 0] / cooled[:, 1]) == pytest.approx(odds / result.calibration.temperature, abs=1e-4)


def test_evaluating_again_and_predicting_give_the_same_scores(made, tmp_path):
    path, result = made
    opened, runtime = load_run(path), Runtime(Settings(quiet=True, cpu=True))
    assert evaluate_run(opened, opened.data, opened.data.test, runtime) == pytest.approx(result.test)
    summary = predict(path, Source(split="test"), tmp_path / "p.csv", runtime, calibrated=True)
    assert summary.scores == pytest.approx(result.test)
    assert result.calibration is not None
    with (tmp_path / "p.csv").open() as file:
        chances = [float(line["p_ill"]) for line in csv.DictReader(file)]
    assert chances == pytest.approx(
        TrainedModel.open(path).predict_proba(opened.data.test.unlabelled(), calibrated=True)[:, 0].tolist(), abs=1e-6
    )


def test_an_exported_model_carries_the_temperature_and_an_older_one_has_none(made, tmp_path):
    from spt.inference.export import export

    path, result = made
    export(path, tmp_path / "out")
    assert result.calibration is not None
    assert TrainedModel.open(tmp_path / "out").temperature == result.calibration.temperature
    config = json.loads((tmp_path / "out/config.json").read_text())
    del config["temperature"]
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    older = TrainedModel.open(tmp_path / "out")
    with pytest.raises(UsageError, match="no temperature"):
        older.predict_proba(np.zeros((1, STEPS)), calibrated=True)


def test_results_from_before_there_was_a_temperature_are_read(made):
    _, result = made
    old = {k: v for k, v in result.model_dump().items() if k not in ("classes", "confusion", "calibration", "groups")}
    again = Result(**old)
    assert again.calibration is None and again.groups == () and again.confusion == ()


@pytest.mark.parametrize("positions", [1, 3, 7])
def test_they_do_not_depend_on_batches(made, positions, monkeypatch):
    path, result = made
    monkeypatch.setattr("spt.training.evaluate.EVALUATION_POSITIONS", positions * STEPS)
    opened, runtime = load_run(path), Runtime(Settings(quiet=True, cpu=True))
    draw = evaluation_draw(opened.job.train, 0, 0)
    scores, found = evaluate(opened.network, opened.setup, opened.data.test, runtime, draw, at_once=1, predict=True)
    assert scores == pytest.approx(result.test, abs=1e-6)
    assert found is not None and np.array_equal(found.confusion, result.confusion)
    monkeypatch.setattr("spt.training.metrics.UNASKED", 10)
    large, _ = evaluate(opened.network, opened.setup, opened.data.test, runtime, draw, at_once=1, predict=True)
    assert "auprc" not in large and large["auroc"] == scores["auroc"] and large["mcc"] == scores["mcc"]
    some, none = evaluate(opened.network, opened.setup, opened.data.test, runtime, draw, at_once=1, asked={"mcc"})
    assert none is None and some["mcc"] == pytest.approx((result.test or {})["mcc"]) and "auroc" not in some


LABELS_OF_STEPS = '''
"""Every step says whether it is above zero; some are not asked; or how large it is."""
import numpy as np
from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Values

class Config(TaskConfig):
    real: bool = False

def load(config, raw):
    rng = np.random.default_rng(0)
    def split(n):
        rows = [rng.normal(size=(length, 1)).astype(np.float32) for length in rng.integers(3, 9, n)]
        if config.real:
            targets = [np.where(row > -1.5, row + 3, np.nan) for row in rows]
        else:
            targets = [np.where(row[:, 0] > 1.5, -1, (row[:, 0] > 0).astype(np.int64)) for row in rows]
        return Split.from_rows(rows, targets, per_step=True)
    return TaskData(Values(1), Reals(1, True) if config.real else Classes(2, True), split(40), split(15), split(15))
'''


@pytest.mark.parametrize("real", [False, True])
def test_answers_of_steps(tmp_path, real, monkeypatch):
    """Of all scored steps at once; where these are too many to be kept, only what a confusion matrix decides."""
    (tmp_path / "steps.py").write_text(LABELS_OF_STEPS)
    metric = "spearman" if real else "auroc"
    changes = {"task": {"name": "./steps.py", "real": real}, "finetune__objective": {"name": "supervised"}}
    one = own_task(tmp_path, **changes | {"finetune__objective__metric": metric})
    job = Job(one, "finetune", 0)
    result = run(job, tmp_path)
    opened = load_run(tmp_path / job.name)
    test = opened.data.test
    truth, values = np.asarray(test.targets), np.concatenate(TrainedModel.open(opened.path).logits(test.unlabelled()))
    scores = result.test or {}
    if real:
        from scipy import stats

        known = np.isfinite(truth[:, 0])
        assert scores["spearman"] == pytest.approx(stats.spearmanr(truth[known, 0], values[known, 0]).statistic)
        assert scores["mape"] == pytest.approx(
            sk.mean_absolute_percentage_error(truth[known].astype(np.float32), values[known]), rel=1e-5
        )
        return
    known = truth >= 0
    assert 0 < known.sum() < len(known)
    assert scores["auroc"] == pytest.approx(sk.roc_auc_score(truth[known], (values[:, 1] - values[:, 0])[known]))
    assert scores["mcc"] == pytest.approx(sk.matthews_corrcoef(truth[known], values.argmax(1)[known]))
    assert sum(map(sum, result.confusion)) == known.sum() and result.calibration is not None
    for module in ("build", "evaluate", "metrics"):
        monkeypatch.setattr(f"spt.training.{module}.MOST_SCORES", 100)
    with pytest.raises(UsageError, match="metric auroc needs the answers to all steps"):
        build_stage(job)
    again = own_task(tmp_path, **changes | {"finetune__objective__metric": "mcc"})
    fewer = run(Job(again, "finetune", 1), tmp_path)
    assert "mcc" in (fewer.test or {}) and "auroc" not in (fewer.test or {}) and fewer.calibration is None


REFUSED = {
    "a metric of numbers for classes": ({"metric": "spearman"}, {}, "metric spearman is none of this task's"),
    "a metric that there is not": ({"metric": "auc"}, {}, "metric"),
    "a class that there is not": (
        {"positive": "dead"},
        {},
        "'dead' is no class of this task; its classes are ill, well",
    ),
    "a number for a label": ({"positive": "0"}, {}, "'0' is no class of this task"),
    "a label that YAML reads as a number": ({"positive": 7}, {}, "'7' is no class of this task"),
    "a positive class of numbers": (
        {"positive": "ill"},
        {"label_column": "size", "target": "real"},
        "'ill' is a class, which this task's answers are not",
    ),
    "f1 of no class in particular": ({"metric": "f1"}, {"label_column": "site", "group_column": None}, "metric f1"),
    "a metric of classes for numbers": (
        {"metric": "mcc"},
        {"label_column": "size", "target": "real"},
        "metric mcc is none of this task's: loss, mae, mape, mse, r2, spearman",
    ),
    "mape of a target that is 0": (
        {"metric": "mape"},
        {"label_column": "zero", "target": "real"},
        "metric mape divides by the target, which is 0 in 2 of the validation split's answers",
    ),
    "means over batches": ({"metric": "auroc"}, {"average": "per_batch"}, "auroc needs all answers of a split at once"),
    "selection by what is not there": ({}, {"select_by": "spearman"}, "spearman is no metric of this stage"),
    "selection over batches": (
        {},
        {"select_by": "mcc", "average": "per_batch"},
        "mcc needs all answers of a split at once; use exact",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_refused_in_a_sentence(tmp_path, case):
    objective, changes, said = REFUSED[case]
    table(tmp_path)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    zeros = ["zero", *(str(0 if i in (2, 7) else 1 + i) for i in range(len(lines) - 1))]
    (tmp_path / "rows.csv").write_text("\n".join(f"{a},{b}" for a, b in zip(lines, zeros, strict=True)) + "\n")
    task = {key: value for key, value in changes.items() if key not in ("average", "select_by")}
    if task.get("label_column") == "site":
        text = (tmp_path / "rows.csv").read_text().splitlines()
        text = [text[0].replace("part", "old"), *text[1:]]  # drawn by hash, so that every site is in training
        (tmp_path / "rows.csv").write_text("\n".join(text) + "\n")
        task["split_column"] = None
    train = {
        "finetune.train.metric_average": changes.get("average"),
        "finetune.train.select_by": changes.get("select_by"),
    }
    overrides = [f"{key}={value}" for key, value in train.items() if value]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=said):
        build_stage(Job(load(str(recipe(tmp_path, objective, **task)), overrides), "finetune", 0))
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in before} <= {"r.yaml"}


def test_what_is_no_number_is_never_better():
    good, nan, none = ({"loss": 1.0, "auroc": score} for score in (0.5, math.nan, 0.4))
    assert is_better(good, nan, "auroc") and not is_better(nan, good, "auroc") and is_better(good, none, "auroc")
    assert is_better(nan, {}, "auroc") and not is_better({"loss": 1.0}, good, "auroc")
    assert is_better({"loss": 1.0, "mape": 0.3}, {"loss": 0.9, "mape": 0.4}, "mape")


def test_a_recipe_without_a_positive_class_keeps_its_keys(tmp_path):
    table(tmp_path)
    plain = Job(load(str(recipe(tmp_path))), "finetune", 0)
    assert "positive" not in plain.settings()["objective"]
    assert Job(load(str(recipe(tmp_path, {"positive": None}))), "finetune", 0).key == plain.key
    named = [Job(load(str(recipe(tmp_path, {"positive": name}))), "finetune", 0).key for name in ("ill", "well")]
    assert len({plain.key, *named}) == 3
    assert (
        spt_job(load(str(recipe(tmp_path, {"positive": "ill"})))).parent_key
        == spt_job(load(str(recipe(tmp_path)))).parent_key
    ), "pretraining knows of no class"
