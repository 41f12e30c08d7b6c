"""The estimators: scikit-learn's checks, every kind of X, and what an estimator has in common with a recipe's runs."""

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import spt
from spt.analysis.attention import attention_distances
from spt.analysis.predictions import read_predictions
from spt.analysis.reevaluate import reevaluate
from spt.errors import CheckpointError, OutputError, UsageError
from spt.estimators.encoding import Encoding
from spt.estimators.estimator import SequenceEstimator
from spt.estimators.holdout import validation_rows
from spt.estimators.inputs import read_rows
from spt.inference.predict import Source, embed, predict
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks.base import Values

TINY: dict[str, Any] = {
    "model_options": {"d_model": 8, "n_layers": 1, "n_heads": 1},
    "objective": {"name": "masked", "ratio": 0.5},
    "epochs": 1,
    "pretrain_epochs": 1,
    "batch_size": 16,
    "pretrain_batch_size": 32,
    "device": "cpu",
}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)), np.array(["no", "yes"] * 12)


class SequenceClassifier(spt.SequenceClassifier):  # type: ignore[misc,name-defined]
    """Trained for one epoch, it owes the checks no good score."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True
        return tags


class SequenceRegressor(spt.SequenceRegressor):  # type: ignore[misc,name-defined]
    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


@pytest.mark.slow
@pytest.mark.timeout(1800)
@parametrize_with_checks(
    [SequenceClassifier(**TINY), SequenceRegressor(**TINY), SequenceClassifier(**TINY, missing="hidden")]
)
def test_scikit_learns_checks(estimator: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them; none is excepted. Arguments of any type are stored, and refused by `fit`: the suite's own check of
    types, which no user has, is in the way of that."""
    for owner in (SequenceEstimator, spt.SequenceClassifier):
        monkeypatch.setattr(owner, "__init__", inspect.unwrap(owner.__init__))
    check(estimator)


QUICK = (
    *("check_estimator_cloneable", "check_no_attributes_set_in_init", "check_estimators_unfitted", "check_fit1d"),
    *("check_complex_data", "check_estimators_empty_data_messages"),
    *("check_fit2d_1sample", "check_mixin_order", "check_supervised_y_no_nan"),
)


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_scikit_learns_checks(name: str) -> None:
    """Each raises where it finds a fault."""
    from sklearn.utils import estimator_checks

    for estimator in (SequenceClassifier(**TINY), SequenceRegressor(**TINY)):
        getattr(estimator_checks, name)(type(estimator).__name__, estimator)


def fitted(x: Any = X, y: Any = Y, **changes: Any) -> Any:
    return spt.SequenceClassifier(**{**TINY, **changes}).fit(x, y)


# ------------------------------------------------------------------------------------------------------------- inputs

RAGGED = [RNG.normal(size=4 + i % 3) for i in range(24)]
WORDS = [("good fun " if label == "yes" else "bad dull ") + "film " * (1 + i) for i, label in enumerate(Y)]


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (RNG.normal(size=(24, 5, 2)), {}),
        (RAGGED, {}),
        ([np.stack([row, row], 1) for row in RAGGED], {}),
        (pd.DataFrame(X, columns=[f"s{k}" for k in range(6)]), {}),
        (pd.DataFrame({"signal": RAGGED}), {}),
        (pd.DataFrame({"a": RAGGED, "b": [row.tolist() for row in RAGGED]}), {}),
        (pd.Series(RAGGED), {}),
        (WORDS, {}),
        (np.array(WORDS), {"tokens": "bytes"}),
        (pd.DataFrame({"text": WORDS}), {"tokens": "words"}),
        ([RNG.integers(0, 9, 5 + i % 2) for i in range(24)], {"tokens": "ids"}),
        (torch.randn(24, 4), {}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_kind_of_x(x: Any, options: dict[str, Any]) -> None:
    model = fitted(x, self_pretrain=False, **options)
    probabilities = model.predict_proba(x)
    assert probabilities.shape == (24, 2)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert set(model.predict(x)) <= {"no", "yes"}
    assert model.transform(x).shape == (24, 8)


def test_channels_of_a_frame_are_those_of_arrays() -> None:
    frame = read_rows(pd.DataFrame({"a": RAGGED, "b": RAGGED}), None)
    arrays = read_rows([np.stack([row, row], 1) for row in RAGGED], None)
    assert all(np.array_equal(a, b) for a, b in zip(frame.values, arrays.values, strict=True))


def test_words_and_ids_that_training_did_not_have_are_unknown() -> None:
    words = fitted(WORDS, self_pretrain=False, tokens="words")
    assert "good" in words.encoding_.words
    np.testing.assert_allclose(words.predict_proba(["never seen"]), words.predict_proba(["not there"]))
    ids = fitted([RNG.integers(0, 5, 4) for _ in range(24)], self_pretrain=False, tokens="ids")
    np.testing.assert_allclose(ids.predict_proba([np.array([77, 77])]), ids.predict_proba([np.array([9, 500])]))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([np.zeros(3), np.zeros((3, 2))], "row 1 has 2 channels"),
        ([np.zeros(3), np.zeros(0)], "row 1.*at least one step"),
        ([np.zeros(3), np.array([1, np.nan])], "Input X contains NaN: row 1"),
        ([np.zeros(3), np.array(["a", "b"])], "row 1: .* where numbers"),
        (["text", np.zeros(3)], "mixes texts"),
        (np.zeros((2, 3, 4, 5)), "4 dimensions"),
        (np.zeros((2, 3, 0)), "no steps or no channels"),
        (np.full((2, 3), 1e20), "too large"),
        (pd.DataFrame({"a": [np.zeros(3), np.zeros(4)], "b": [np.zeros(3), np.zeros(3)]}), "row 1: column b"),
        (pd.DataFrame({"a": [np.zeros(3), np.zeros(4)], "b": [1, 2]}), "column 'b' holds other things"),
    ],
    ids=lambda x: None if not isinstance(x, str) else x[:20],
)
def test_what_holds_no_sequences_is_told_in_words(x: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_rows(x, spt.SequenceClassifier())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "transfromer"}, "did you mean transformer"),
        ({"model_options": {"d_modell": 8}}, "d_modell"),
        ({"objective": "maskd"}, "maskd"),
        ({"objective": "next"}, "model.causal"),
        ({"tokens": "words"}, "tokens='words' is not for X that holds numbers"),
        ({"validation_fraction": 1.5}, "a share in"),
        ({"max_length": 0}, "at least one step"),
        ({"epochs": 0}, "epochs=0"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"device": "tpu"}, "'auto' or 'cpu'"),
    ],
)
def test_wrong_parameters_are_told_in_words_at_fit(changes: dict[str, Any], words: str) -> None:
    model = spt.SequenceClassifier(**{**TINY, **changes})
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y)
    with pytest.raises(NotFittedError):
        model.predict(X)


# --------------------------------------------------------------------------------------------------- validation rows


def test_validation_has_whole_groups_and_every_class_its_share() -> None:
    rows, classes = read_rows(RNG.normal(size=(100, 3)), None), np.arange(100) % 2
    held = validation_rows(rows, classes, None, 0.2, 0)
    assert held.sum() == 20 and classes[held].sum() == 10
    groups = np.arange(100) // 4
    held = validation_rows(rows, classes, groups, 0.2, 0)
    assert not set(groups[held]) & set(groups[~held]) and 16 <= held.sum() <= 24
    twice = rows.take(np.tile(np.arange(50), 2))
    held = validation_rows(twice, classes, None, 0.2, 0)
    assert (held[:50] == held[50:]).all(), "the same input stands on one side"


def test_the_seed_draws_the_validation_rows() -> None:
    rows, classes = read_rows(RNG.normal(size=(100, 3)), None), np.arange(100) % 2
    first, again, other = (validation_rows(rows, classes, None, 0.2, seed) for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).any()


def test_of_few_rows_the_smallest_group_is_held_out() -> None:
    rows, groups = read_rows(RNG.normal(size=(9, 3)), None), list("aaaabbbcc")
    for seed in range(8):
        held = validation_rows(rows, np.zeros(9, np.int64), groups, 0.01, seed)
        assert np.flatnonzero(held).tolist() == [7, 8]


def test_frequent_words_come_first_and_a_constant_is_not_scaled() -> None:
    texts = read_rows(["b a b", "c b c"], None)
    assert Encoding.learn(texts, "words", None).words == ("b", "c", "a")
    rows = read_rows(np.array([[2.0, 2.0], [2.0, 2.0]]), None)
    encoding = Encoding.learn(rows, None, None)
    shown = encoding.input(encoding.split(rows))
    assert isinstance(shown, Values) and (shown.mean, shown.std) == ((2.0,), (1.0,))


def test_few_rows_leave_every_class_a_training_row() -> None:
    rows = read_rows(RNG.normal(size=(3, 3)), None)
    held = validation_rows(rows, np.array([0, 1, 0]), None, 0.1, 0)
    assert held.sum() == 1 and not held[1]
    with pytest.raises(ValueError, match=r"n_samples=2.*too few"):
        validation_rows(rows.take(np.arange(2)), np.array([0, 1]), None, 0.1, 0)
    with pytest.raises(ValueError, match="3 rows in 1 groups"):
        validation_rows(rows, np.array([0, 1, 0]), ["a"] * 3, 0.1, 0)


def test_validation_rows_of_ones_own_are_used_and_nothing_is_tested() -> None:
    model = fitted()
    assert model.result_.test is None and model.result_.data["test"].rows == 0
    own = spt.SequenceClassifier(**TINY).fit(X, Y, X_val=X[:5] + 1, y_val=Y[:5])
    assert own.result_.data["train"].rows == 24 and own.result_.data["val"].rows == 5
    with pytest.raises(ValueError, match="label 'maybe'"):
        spt.SequenceClassifier(**TINY).fit(X, Y, X_val=X[:1], y_val=["maybe"])
    with pytest.raises(ValueError, match="go together"):
        spt.SequenceClassifier(**TINY).fit(X, Y, X_val=X)


# --------------------------------------------------------------------------------------------------- runs and answers


def test_kept_runs_are_those_of_the_pipeline_and_are_used_again(tmp_path: Path) -> None:
    model = fitted(runs_dir=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert [name.partition("-")[0] for name in names] == ["finetune", "pretrain"]
    assert model.run_.name == names[0]
    result = RunFolder(tmp_path, names[0]).result()
    assert result == model.result_ and result.parent in names[1]
    before = (model.run_ / "result.json").stat().st_mtime_ns
    again = fitted(runs_dir=tmp_path)
    assert (model.run_ / "result.json").stat().st_mtime_ns == before
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    scratch = fitted(runs_dir=tmp_path, self_pretrain=False)
    assert scratch.result_.parent is None and scratch.result_.data == model.result_.data
    run = spt.load_run(model.run_)
    assert len(run.data.test) == 0
    told = "has no test rows; name another with --split val"  # or train, where that can be asked for
    runtime = Runtime(Settings(quiet=True, cpu=True))
    for examine in (
        lambda: reevaluate(model.run_, (), "test", runtime),
        lambda: attention_distances(model.run_),
        lambda: read_predictions([model.run_], "test", runtime),
        lambda: predict(model.run_, Source(), None, runtime),
        lambda: embed(model.run_, Source(), tmp_path / "e.parquet", runtime),
    ):
        with pytest.raises(UsageError, match=told):
            examine()


@pytest.mark.parametrize("other", [{"missing": "hidden"}, {"max_length": 20}])
def test_kept_runs_are_not_those_of_other_inputs(tmp_path: Path, other: dict[str, Any]) -> None:
    first, second = fitted(runs_dir=tmp_path), fitted(runs_dir=tmp_path, **other)
    assert first.run_ != second.run_
    assert len(second.predict(X)) == len(X)
    if "missing" in other:
        gaps = X.copy()
        gaps[0, 2] = np.nan
        assert len(second.predict(gaps)) == len(X)


@pytest.mark.parametrize("number", [int, np.int64])
def test_weights_of_classes_that_are_numbers_are_saved(tmp_path: Path, number: type) -> None:
    y = np.arange(24) % 2
    model = spt.SequenceClassifier(**TINY, class_weight={number(0): 1.0, number(1): 5.0}).fit(X, y)
    model.save(tmp_path / "saved")
    loaded = spt.SequenceClassifier.load(tmp_path / "saved")
    assert loaded.class_weight == {0: 1.0, 1: 5.0}
    loaded.fit(X, y)


def test_nothing_is_left_behind_without_a_folder_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = torch.random.get_rng_state()
    fitted()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.random.get_rng_state(), state), "the program's own random numbers go on as they were"


def test_a_saved_estimator_answers_alike_without_runs_and_data(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("abcdef"))
    for model in (fitted(frame), spt.SequenceRegressor(**{**TINY, "random_state": 3}).fit(frame, X[:, :2])):
        folder = tmp_path / type(model).__name__
        model.save(folder)
        loaded = type(model).load(folder)
        assert np.array_equal(loaded.predict(frame), model.predict(frame))
        assert np.array_equal(loaded.transform(frame), model.transform(frame))
        assert loaded.get_params() == model.get_params() and loaded.result_ == model.result_
        with pytest.raises(ValueError, match="feature names"):
            loaded.predict(frame.rename(columns={"a": "z"}))
        with pytest.raises(OutputError, match="exists already"):
            model.save(folder)
    opened = spt.load_model(tmp_path / "SequenceClassifier")
    assert list(opened.predict(list(X))) == list(fitted(frame).predict(frame))
    with pytest.raises(UsageError, match="holds a SequenceClassifier"):
        spt.SequenceRegressor.load(tmp_path / "SequenceClassifier")
    with pytest.raises(UsageError, match="not a saved estimator"):
        spt.SequenceClassifier.load(tmp_path)
    state = tmp_path / "SequenceClassifier" / "estimator.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 0}))
    with pytest.raises(CheckpointError, match=r"format 0 of spt .*, this version reads"):
        spt.SequenceClassifier.load(tmp_path / "SequenceClassifier")
    state.write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        spt.SequenceClassifier.load(tmp_path / "SequenceClassifier")


def test_pickles_and_clones() -> None:
    model = fitted(RAGGED)
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.predict_proba(RAGGED), model.predict_proba(RAGGED))
    assert clone(model).get_params() == model.get_params()


@pytest.mark.slow
def test_searches_pipelines_and_cross_validation() -> None:
    from sklearn.preprocessing import StandardScaler

    model = spt.SequenceClassifier(**TINY)
    search = GridSearchCV(model, {"self_pretrain": [False, True]}, cv=2, error_score="raise").fit(RAGGED, Y)
    assert len(search.cv_results_["mean_test_score"]) == 2
    scores = cross_val_score(make_pipeline(StandardScaler(), model), X, Y, cv=2, error_score="raise")
    assert len(scores) == 2


def test_longer_sequences_are_cut_where_that_was_asked_for() -> None:
    model = fitted(RAGGED, max_length=5)
    cut = model.predict_proba([np.arange(9.0)])
    np.testing.assert_allclose(cut, model.predict_proba([np.arange(5.0)]))
    assert fitted(RAGGED).predict_proba([np.arange(9.0)]).shape == (1, 2), "the weights take longer ones"


def test_an_interrupted_fit_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from spt.errors import Interrupted
    from spt.estimators import estimator

    def interrupted(*_: Any) -> None:
        raise Interrupted("interrupted")

    monkeypatch.setattr(estimator, "run_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted()


def test_a_regressor_predicts_in_the_targets_units() -> None:
    y = 1000 + 10 * X[:, 0]
    model = spt.SequenceRegressor(**{**TINY, "epochs": 5}).fit(X, y)
    assert model.predict(X).shape == (24,) and abs(model.predict(X).mean() - 1000) < 20
    assert spt.SequenceRegressor(**TINY).fit(X, y[:, None]).predict(X).shape == (24, 1)


def test_a_metric_selects_and_score_stays_scikit_learns() -> None:
    model = spt.SequenceClassifier(**TINY, metric="auroc").fit(X, Y)
    assert (model.result_.metric, model.result_.selected_by) == ("auroc", "auroc") and "auroc" in model.result_.val
    assert model.score(X, Y) == np.mean(model.predict(X) == Y)
    other = spt.SequenceRegressor(**TINY, metric="spearman", self_pretrain=False).fit(X, X[:, 0])
    assert other.result_.selected_by == "spearman"
    with pytest.raises(ValueError, match="metric mcc is none of this task's"):
        spt.SequenceRegressor(**TINY, metric="mcc", self_pretrain=False).fit(X, X[:, 0])


def test_probabilities_are_calibrated_where_that_is_asked_for(tmp_path: Path) -> None:
    model = spt.SequenceClassifier(**TINY, self_pretrain=False).fit(X, Y)
    plain, calibrated = model.predict_proba(X), model.predict_proba(X, calibrated=True)
    assert model.result_.calibration is not None
    odds = np.log(plain[:, 0] / plain[:, 1]) / model.result_.calibration.temperature
    assert np.log(calibrated[:, 0] / calibrated[:, 1]) == pytest.approx(odds, rel=1e-6)
    model.save(tmp_path / "saved")
    again = spt.SequenceClassifier.load(tmp_path / "saved")
    assert np.allclose(again.predict_proba(X, calibrated=True), calibrated)


@pytest.mark.parametrize("kind", [spt.SequenceClassifier, spt.SequenceRegressor])
def test_a_column_of_y_without_a_value_is_refused(kind):
    y = np.stack([np.arange(20) % 2, np.full(20, np.nan)], axis=1)
    with pytest.raises(ValueError, match="column 1 of y has no value"):
        kind(epochs=1).fit(np.zeros((20, 4)), y)
