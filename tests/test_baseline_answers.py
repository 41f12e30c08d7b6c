"""Answers without a network: what each can and cannot learn, its scores, and that test labels decide nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import average_precision_score, f1_score, log_loss, r2_score, recall_score, roc_auc_score

from spt.baselines import boosting, catch22, classifiers, logistic, tfidf
from spt.baselines.base import Query, drawn
from spt.baselines.registry import BASELINES, why_not
from spt.baselines.ridge import fit_ridge
from spt.baselines.run import _scored
from spt.baselines.scores import MANY, ComparedMetric, scores
from spt.config.recipe import LOWER_IS_BETTER
from spt.data.fingerprints import with_fingerprints
from spt.errors import DataError
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens, Values
from spt.training import objectives
from spt.training.losses import Targets
from spt.training.metrics import metrics, sums
from spt.training.objectives import Output


def task(rows, targets, input, target, make=Split.from_rows, **extra) -> TaskData:
    """Half for training, a quarter each for validation and test."""
    n = len(rows)
    parts = [slice(0, n // 2), slice(n // 2, 3 * n // 4), slice(3 * n // 4, n)]
    made = [with_fingerprints(make(rows[c], targets[c], np.arange(n)[c], **extra)) for c in parts]
    return TaskData(input, target, *made)


def fitted(name, data, metric="accuracy", seed=0, positive=None):
    assert why_not(name, data, metric) is None
    return BASELINES[name].fit(replace(data, test=data.test.unlabelled()), ComparedMetric(metric, positive), seed)


def score_of(name, data, metric="accuracy", seed=0) -> float:
    return _scored(fitted(name, data, metric, seed), data, data.test)[0][metric]


RNG = np.random.default_rng(0)
N = 240


@pytest.fixture(autouse=True)
def same_rows(monkeypatch):
    """Whichever tests ran before."""
    monkeypatch.setattr(f"{__name__}.RNG", np.random.default_rng(0))


def counted() -> TaskData:
    """Is token 3 frequent? No order is needed."""
    rows = [RNG.integers(0, 5, int(length)).astype(np.uint8) for length in RNG.integers(20, 60, N)]
    return task(rows, np.array([int((row == 3).mean() > 0.2) for row in rows]), Tokens(5), Classes(2))


def ordered() -> TaskData:
    """Does 1 stand behind 2, or 2 behind 1? Every row has as many of each, so that counts say nothing."""
    rows, labels = [], []
    for i in range(N):
        pairs = [(1, 2), (0,), (0,)] if i % 2 else [(2, 1), (0,), (0,)]
        picked = [pairs[0] for _ in range(5)] + [(0,), (3,)] * 4
        tokens = [t for j in RNG.permutation(len(picked)) for t in (*picked[j], 0)]
        rows.append(np.array(tokens + [4] * int(RNG.integers(0, 9)), np.uint8))
        labels.append(i % 2)
    return task(rows, np.array(labels), Tokens(5), Classes(2))


def periods() -> TaskData:
    """Slow or fast waves at random phases, of any length, in noise: same values, other shapes."""
    rows, labels = [], RNG.integers(0, 2, N)
    for label in labels:
        t = np.arange(RNG.integers(60, 90))
        wave = np.sin(2 * np.pi * t / (20 if label else 5) + RNG.uniform(0, 7))
        rows.append(np.stack([wave + 0.2 * RNG.normal(size=len(t)), RNG.normal(size=len(t))], 1).astype(np.float32))
    return task(rows, labels, Values(2), Classes(2))


def test_majority_is_the_commonest_class_and_the_mean_of_numbers():
    data = counted()
    common = np.bincount(data.train.targets).argmax()
    assert score_of("majority", data) == pytest.approx(float((data.test.targets == common).mean()))
    rows = RNG.normal(size=(40, 8, 1)).astype(np.float32)
    numbers = task(rows, RNG.exponential(size=(40, 2)), Values(1), Reals(2))
    mean, median = np.mean(numbers.train.targets, 0), np.median(numbers.train.targets, 0)
    assert score_of("majority", numbers, "mse") == pytest.approx(np.square(numbers.test.targets - mean).mean())
    assert score_of("majority", numbers, "mae") == pytest.approx(np.abs(numbers.test.targets - median).mean())


@pytest.mark.parametrize(
    ("data", "solved", "unsolved"),
    [
        (counted, ("linear_probe", "boosting"), ("majority",)),
        (ordered, ("tfidf",), ("majority", "linear_probe", "boosting")),
        (periods, ("catch22", "boosting"), ("majority",)),
    ],
)
def test_each_learns_what_it_can_see(data, solved, unsolved):
    data = data()
    found = {name: score_of(name, data) for name in (*solved, *unsolved)}
    assert min(found[name] for name in solved) > 0.9 and max(found[name] for name in unsolved) < 0.75, found


def test_boosting_sees_places_where_all_rows_are_equally_long():
    rows = RNG.integers(0, 4, (N, 9)).astype(np.uint8)
    data = task(rows, (rows[:, 2] > rows[:, 6]).astype(np.int64), Tokens(4), Classes(2))
    assert score_of("boosting", data) > 0.9 and score_of("linear_probe", data) < 0.75
    assert fitted("boosting", data).sees.endswith("and every step by its place")
    longer = replace(data, val=replace(data.val, stops=data.val.stops - 1))
    assert "place" not in fitted("boosting", longer).sees


def places(label, vocab=4) -> TaskData:
    rows = RNG.integers(0, vocab, (N, 9)).astype(np.uint8)
    return task(rows, label(rows).astype(np.int64), Tokens(vocab), Classes(2))


def of_places() -> TaskData:
    return places(lambda rows: rows[:, 2] > 1)


def test_logistic_regression_has_a_weight_for_every_place():
    levels = places(lambda rows: rows[:, 2] + rows[:, 6] > 16, vocab=17)
    found = fitted("logistic", levels)
    assert found.sees == "every step by its place" and found.settings["tokens as"] == "numbers"
    assert score_of("logistic", levels) > 0.9 and score_of("linear_probe", levels) < 0.75
    names = places(lambda rows: np.isin(rows[:, 2], (1, 3)))
    assert fitted("logistic", names).settings["tokens as"] == "names" and score_of("logistic", names) > 0.95
    scales, levels = (1e-4, 1e3), (0.0, 5e4)  # a penalty asks for numbers that are as networks see them
    waves = RNG.normal(size=(N, 5, 2)) * scales + levels
    data = task(waves, (waves[:, 3, 0] > 0).astype(np.int64), Values(2, levels, scales), Classes(2))
    assert score_of("logistic", data) > 0.9 and "tokens as" not in fitted("logistic", data).settings


def test_logistic_regression_answers_with_probabilities_also_of_classes_it_never_saw():
    sums = np.array([0, 0, 2, 2, 3, 3, 4])  # of two tokens: its class, which is never 1
    data = replace(places(lambda rows: sums[rows[:, 2].astype(int) + rows[:, 6]]), target=Classes(5))
    answers = fitted("logistic", data).answer(Query(data.test.unlabelled(), np.arange(len(data.test))))
    assert answers.shape == (len(data.test), 5) and np.allclose(answers.sum(1), 1) and not answers[:, 1].any()
    assert score_of_log_loss("logistic", data) < 0.8 * score_of_log_loss("majority", data)


def test_logistic_regression_says_where_it_cannot_be(monkeypatch):
    data = of_places()
    longer = replace(data, val=replace(data.val, stops=data.val.stops - 1))
    numbers = replace(data, target=Reals(1))
    steps = replace(data, target=Classes(2, per_step=True))
    assert "not equally long" in why_not("logistic", longer, "accuracy")
    assert "targets are numbers" in why_not("logistic", numbers, "mse")
    assert "every step has a target" in why_not("logistic", steps, "accuracy")
    monkeypatch.setattr(logistic, "WIDE", 8)
    assert why_not("logistic", data, "accuracy").endswith("9 numbers a sequence are more than 8")
    monkeypatch.setattr(logistic, "WIDE", 9)  # too few for a vocabulary at every place
    assert score_of("logistic", data) > 0.9 and fitted("logistic", data).tried == len(logistic.STRENGTHS)
    monkeypatch.setattr(logistic, "NUMBERS", 900)
    assert fitted("logistic", data).notes == ("fitted to 100 of 120 training rows",)
    many = fitted("logistic", replace(data, target=Classes(40)))
    assert many.notes == ("fitted to 25 of 120 training rows",), "a weight for every class"
    monkeypatch.setattr(classifiers, "STEPS", 1)
    assert classifiers.UNFINISHED in fitted("logistic", data).notes


def test_numbers_are_answered_too():
    rows = [RNG.normal(scale=RNG.uniform(1, 3), size=(int(n), 1)).astype(np.float32) for n in RNG.integers(40, 60, N)]
    loud = np.array([[row.std(), -row.std()] for row in rows])
    data = task(rows, loud, Values(1), Reals(2))
    assert score_of("majority", data, "r2") < 0.01
    assert all(score_of(name, data, "r2") > 0.8 for name in ("linear_probe", "catch22", "boosting"))
    often = [RNG.integers(0, 4, 40).astype(np.uint8) for _ in range(N)]
    data = task(often, np.array([[float((row == 2).sum())] for row in often]), Tokens(4), Reals(1))
    assert score_of("tfidf", data, "r2") > 0.8
    assert score_of("boosting", data, "mae") < score_of("majority", data, "mae") / 2


def test_pairs_are_two_sequences():
    """Do both have as much of token 1? Neither alone says so."""
    shares = RNG.integers(0, 2, (N, 2))
    pairs = [
        tuple(
            RNG.choice(4, 30, p=[0.2, 0.5, 0.2, 0.1] if share else [0.5, 0.1, 0.2, 0.2]).astype(np.uint8)
            for share in two
        )
        for two in shares
    ]
    data = task(pairs, (shares[:, 0] == shares[:, 1]).astype(np.int64), Tokens(4), Classes(2), make=Split.from_pairs)
    for name in ("linear_probe", "tfidf", "boosting"):
        found = fitted(name, data)
        assert "both sequences" in found.sees and _scored(found, data, data.test)[0]["accuracy"] > 0.8, name
    first = RNG.integers(0, 4, (N, 9)).astype(np.uint8)
    second = np.where(np.arange(9) == 2, np.where(shares[:, :1] == 1, first, 3 - first), RNG.integers(0, 4, (N, 9)))
    same = list(zip(first, second.astype(np.uint8), strict=True))
    data = task(same, shares[:, 0], Tokens(4), Classes(2), make=Split.from_pairs)
    assert score_of("logistic", data) > 0.9 and "both sequences" in fitted("logistic", data).sees
    waves = [
        tuple(np.cumsum(RNG.normal(size=(20, 1)) if s else RNG.normal(size=(20, 1)) * 0, 0) for s in two)
        for two in shares
    ]
    data = task(waves, (shares[:, 0] == shares[:, 1]).astype(np.int64), Values(1), Classes(2), make=Split.from_pairs)
    assert score_of("catch22", data) > 0.9


def test_steps_are_answered_one_by_one():
    """Of tokens the class is the token before; of numbers the target the mean of three. Some steps are not asked."""
    rows = [RNG.integers(0, 3, 12) for _ in range(N)]
    tags = [np.where(np.arange(12) % 4 == 3, -1, np.concatenate([[0], row[:-1]])) for row in rows]
    data = task(rows, tags, Tokens(3), Classes(3, per_step=True), per_step=True)
    assert score_of("majority", data) < 0.6
    assert score_of("linear_probe", data) > 0.9 and score_of("boosting", data) > 0.9
    scores, columns = _scored(fitted("linear_probe", data), data, data.test)
    assert columns["steps"].tolist() == [9.0] * len(data.test)
    assert columns["right"].sum() / columns["steps"].sum() == pytest.approx(scores["accuracy"])
    for name in ("tfidf", "catch22"):
        assert why_not(name, data, "accuracy")
    waves = [RNG.normal(size=(10, 1)) for _ in range(N)]
    means = [np.convolve(np.pad(wave[:, 0], 1, "edge"), np.ones(3) / 3, "valid")[:, None] for wave in waves]
    means = [np.where(np.arange(10)[:, None] == 4, np.nan, mean) for mean in means]
    data = task(waves, means, Values(1), Reals(1, per_step=True), per_step=True)
    assert score_of("linear_probe", data, "r2") > 0.99 and score_of("majority", data, "r2") < 0.01
    assert why_not("catch22", data, "r2") == "it answers whole sequences, and here every step has a target"


def test_what_does_not_apply_is_said():
    data = counted()
    assert why_not("catch22", data, "accuracy") == "it describes numbers in time, and here inputs are tokens"
    assert why_not("tfidf", periods(), "accuracy") == "it counts tokens, and here inputs are numbers"
    assert why_not("majority", data, "loss") == "it gives answers, which have no loss"
    alike = replace(data, train=replace(data.train, targets=np.zeros(len(data.train), np.int64)))
    assert why_not("boosting", alike, "accuracy") == "all training rows have the same class"
    assert why_not("majority", alike, "accuracy") is None


@pytest.mark.parametrize("name", BASELINES)
def test_test_labels_and_test_rows_decide_nothing(name):
    """With other test labels the answers are the same, and the score is that of these answers."""
    data = {"catch22": periods, "logistic": of_places}.get(name, counted)()
    flipped = replace(data, test=replace(data.test, targets=1 - data.test.targets))
    (first, columns), (second, other) = (_scored(fitted(name, each), each, each.test) for each in (data, flipped))
    assert np.array_equal(columns["prediction"], other["prediction"])
    assert first["accuracy"] == pytest.approx(1 - second["accuracy"])
    shorter = replace(data, test=data.test.take(np.arange(3)))
    assert fitted(name, shorter).settings == fitted(name, data).settings
    assert np.array_equal(
        _scored(fitted(name, shorter), shorter, shorter.test)[1]["prediction"], columns["prediction"][:3]
    )


def test_validation_chooses():
    """With other validation targets another setting is best, although training is the same."""
    data = counted()
    turned = replace(data, val=replace(data.val, targets=1 - data.val.targets))
    for name in ("tfidf", "boosting"):
        assert fitted(name, data).settings != fitted(name, turned).settings, name
    rows = RNG.normal(size=(N, 6, 1)).astype(np.float32)
    line = task(rows, rows[:, :1, 0].astype(np.float64), Values(1), Reals(1))
    mixed = replace(line, val=replace(line.val, targets=RNG.permutation(line.val.targets)))
    assert fitted("linear_probe", line, "mse").settings["penalty"] < 1e-3
    assert fitted("linear_probe", mixed, "mse").settings["penalty"] == 10


def test_chance_follows_the_seed():
    data = counted()
    answers = [_scored(fitted("boosting", data, seed=seed), data, data.test)[1]["margin"] for seed in (0, 0, 1)]
    assert np.array_equal(answers[0], answers[1]) and not np.array_equal(answers[0], answers[2])
    assert [name for name, each in BASELINES.items() if each.chance] == ["boosting"]


# ------------------------------------------------------------------------------------------------- held to scikit-learn


@pytest.mark.parametrize("wide", [5, 90])
@pytest.mark.parametrize("classes", [2, 4])
def test_ridge_is_scikit_learns(wide, classes):
    rows = RNG.normal(size=(120, wide, 1)).astype(np.float32)
    labels = (rows[:, :classes, 0] + 0.3 * RNG.normal(size=(120, classes))).argmax(1)
    data = task(rows, labels, Values(1), Classes(classes))

    def matrix(asked):
        return np.stack([asked.split.row(i)[:, 0].astype(float) for i in asked.rows.tolist()])

    found = fit_ridge(data, ComparedMetric("accuracy"), matrix, "all")
    x, x_test = (matrix(Query(split, np.arange(len(split)))) for split in (data.train, data.test))
    mean, std = x.mean(0), x.std(0)
    theirs = RidgeClassifier(alpha=found.settings["penalty"] * len(x)).fit((x - mean) / std, data.train.targets)
    ours = found.answer(Query(data.test.unlabelled(), np.arange(len(data.test))))
    expected = theirs.decision_function((x_test - mean) / std)
    assert np.allclose(ours[:, 1] if classes == 2 else ours, expected, atol=1e-8)


def test_tfidf_is_scikit_learns():
    """The same inner products as of its vectorizer on characters; columns have another order."""
    data = counted()
    counts = tfidf._Counts(data)
    assert counts.longest == 5
    counts.longest = 3  # of so few n-grams no two share a column
    asked, test = drawn(data.train, 25, "train").asked, Query(data.test.unlabelled(), np.arange(len(data.test)))
    terms = tfidf._Terms(counts.of(asked))
    ours = [terms.of(counts.of(each)) for each in (asked, test)]
    texts = [["".join(map(str, each.split.row(i))) for i in each.rows.tolist()] for each in (asked, test)]
    theirs = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), sublinear_tf=True, min_df=2)
    expected = [theirs.fit_transform(texts[0]), theirs.transform(texts[1])]
    assert ours[0].shape == expected[0].shape
    for a, b in ((0, 0), (1, 0), (1, 1)):
        assert np.allclose((ours[a] @ ours[b].T).toarray(), (expected[a] @ expected[b].T).toarray(), atol=1e-5)


def test_scores_are_scikit_learns_and_those_of_networks():
    truth, found = RNG.integers(0, 4, 200), RNG.integers(0, 5, 200)
    of_classes = scores(Classes(6), truth, found)
    present = np.unique(np.concatenate([truth, found]))
    assert of_classes["f1_macro"] == pytest.approx(f1_score(truth, found, labels=present, average="macro"))
    assert of_classes["accuracy_macro"] == pytest.approx(recall_score(truth, found, labels=range(4), average="macro"))
    logits = torch.nn.functional.one_hot(torch.as_tensor(found), 6).float()
    output = Output("cross_entropy", per_step=False, size=1, classes=6, macro=True)
    theirs = networks(output, logits, torch.as_tensor(truth)[:, None])
    assert {name: of_classes[name] for name in theirs} == pytest.approx(theirs)
    numbers, said = RNG.normal(3, 2, (200, 2)), RNG.normal(3, 2, (200, 2))
    numbers[:, 1] = 0.5  # a constant target, not met
    of_numbers = scores(Reals(2), numbers, said)
    assert of_numbers["r2"] == pytest.approx(r2_score(numbers, said))
    output = Output("l2", per_step=False, size=2)
    theirs = networks(output, torch.as_tensor(said).float(), torch.as_tensor(numbers).float())
    assert {name: of_numbers[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)
    assert set(of_classes) | set(of_numbers) <= set(LOWER_IS_BETTER)
    assert MANY == objectives.MANY and set(scores(Classes(MANY + 1), truth, found)) == {"accuracy"}


@pytest.mark.parametrize("name", ["majority", "linear_probe", "tfidf", "boosting"])
def test_scores_of_a_class_and_of_probabilities_are_scikit_learns(name, monkeypatch):
    """By the positive class; log loss only of probabilities, which those of a ridge are not."""
    monkeypatch.setattr(boosting, "ROUNDS", 20)
    data = counted()
    refused = why_not(name, data, "log_loss")
    assert (refused is None) == BASELINES[name].probabilities == (name != "linear_probe")
    metrics = ("auroc", "auprc", "f1") + (("log_loss",) if refused is None else ())
    for positive in (0, 1):
        found = fitted(name, data, "f1", positive=positive)
        scores, columns = _scored(found, data, data.test, metrics, positive)
        answers = found.answer(Query(data.test.unlabelled(), np.arange(len(data.test))))
        truth = data.test.targets == positive
        assert scores["f1"] == pytest.approx(f1_score(truth, columns["prediction"] == positive, zero_division=0))
        assert scores["auroc"] == pytest.approx(roc_auc_score(truth, answers[:, positive]))
        assert scores["auprc"] == pytest.approx(average_precision_score(truth, answers[:, positive]))
        if refused is None:
            assert np.allclose(answers.sum(1), 1) and (answers >= 0).all()
            assert scores["log_loss"] == pytest.approx(log_loss(data.test.targets, answers))
    if name == "majority":
        assert np.allclose(answers, np.bincount(data.train.targets) / len(data.train)) and scores["auroc"] == 0.5
    else:
        assert scores["auroc"] > 0.75 and scores["f1"] > 0.7
    if name in ("tfidf", "boosting"):
        assert scores["log_loss"] < score_of_log_loss("majority", data)


def score_of_log_loss(name, data) -> float:
    return _scored(fitted(name, data, "log_loss"), data, data.test, ("log_loss",))[0]["log_loss"]


def test_the_compared_metric_chooses(monkeypatch):
    monkeypatch.setattr(boosting, "ROUNDS", 40)
    data = counted()
    chosen = {fitted("boosting", data, *each).settings["rounds"] for each in (("accuracy",), ("log_loss",))}
    assert len(chosen) == 2
    rows = RNG.normal(size=(N, 6, 1)).astype(np.float32)
    three = task(rows, RNG.integers(0, 3, N), Values(1), Classes(3))
    found = fitted("linear_probe", three, "auroc")
    scores, _ = _scored(found, three, three.test, ("auroc", "f1"))
    assert 0 < scores["auroc"] < 1 and "f1" not in scores, "of three classes none is the positive one"


def networks(output, logits, values) -> dict[str, float]:
    targets = Targets(values, torch.ones(len(values)))
    found = metrics(output, {name: tensor.sum(0) for name, tensor in sums(output, logits, targets).items()})
    return {name: value for name, value in found.items() if name != "loss"}


# ----------------------------------------------------------------------------------------------------- catch22 features


def test_features_of_the_same_rows_are_computed_once(monkeypatch):
    rng, computed, compute = np.random.default_rng(0), [], catch22.catch22
    rows = [rng.normal(size=(length, 2)) for length in (6, 9, 6, 4)]
    monkeypatch.setattr(catch22, "_remembered", {})
    monkeypatch.setattr(catch22, "catch22", lambda values: computed.append(values.shape) or compute(values))
    first = [catch22.cached_catch22(row) for row in rows]
    again = [catch22.cached_catch22(row.copy()) for row in reversed(rows)][::-1]
    assert len(computed) == 4 and all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(np.array_equal(a, compute(row)) for a, row in zip(first, rows, strict=True))
    catch22.cached_catch22(rows[0].reshape(4, 3))  # the same numbers, another sequence
    monkeypatch.setattr(catch22, "REMEMBERED", 5)
    catch22.cached_catch22(rows[1] + 1)
    assert len(computed) == 6 and len(catch22._remembered) == 1


def of(feature, *channels) -> list[float]:
    return feature(catch22.Series(np.stack(channels, 1).astype(np.float64))).tolist()


def test_features_of_series_with_known_answers():
    t = np.arange(400)
    slow, fast = np.sin(2 * np.pi * t / 40), np.sin(2 * np.pi * t / 8)
    noise = np.random.default_rng(1).normal(size=400)
    flat, ramp = np.ones(400), t / 400
    spiky = (t % 100 == 99) * 5.0
    assert of(catch22.acf_first_min, slow, fast) == [20, 4]
    assert of(catch22.acf_timescale, slow)[0] == pytest.approx(40 * math.acos(1 / math.e) / (2 * math.pi), rel=0.05)
    assert of(catch22.centroid_freq, slow, fast) == pytest.approx([2 * math.pi / 40, 2 * math.pi / 8], abs=0.02)
    assert of(catch22.low_freq_power, slow, noise) == pytest.approx([1.0, 0.2], abs=0.09)
    assert of(catch22.stretch_decreasing, slow, -ramp) == [20, 399]
    assert of(catch22.stretch_high, ramp)[0] == 200
    assert of(catch22.high_fluctuation, ramp, noise) == pytest.approx([0.0, 0.98], abs=0.02)
    assert of(catch22.trev, slow)[0] == pytest.approx(0, abs=0.01)
    assert of(catch22.outlier_timing_pos, ramp)[0] > 0.3 and of(catch22.outlier_timing_neg, ramp)[0] < -0.3
    assert of(catch22.forecast_error, noise)[0] == pytest.approx(math.sqrt(4 / 3), rel=0.1)
    assert of(catch22.entropy_pairs, noise, t % 2)[0] == pytest.approx(math.log(9), rel=0.02)
    eighths = (math.log(8 / 6) + math.log(8 / 9)) / 2  # of eight pairs of values, half have pq = 6/64, half 9/64
    assert of(catch22.ami2, fast)[0] == pytest.approx(eighths, abs=1e-3)
    assert of(catch22.ami2, noise, slow)[0] < 0.1 and of(catch22.ami2, noise, slow)[1] > 0.5
    low, high = spiky.min(), spiky.max()  # the lowest fifth is fullest
    middle = low + (high - low) / 10
    assert of(catch22.mode_5, spiky)[0] == pytest.approx((middle - spiky.mean()) / spiky.std())
    found = catch22.catch22(np.stack([flat, ramp], 1))
    assert np.isfinite(found).all() and len(found) == 2 * (len(catch22.FEATURES) + 2) + 1


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
def test_features_of_short_series_are_finite(length):
    values = np.random.default_rng(length).normal(size=(length, 3))
    values[:, 2] = 4.0
    assert np.isfinite(catch22.catch22(values)).all()


def test_features_do_not_depend_on_scale_but_for_mean_and_deviation():
    values = np.random.default_rng(0).normal(size=(50, 2))
    a, b = catch22.catch22(values), catch22.catch22(values * 1000 + 5)
    same = 2 * len(catch22.FEATURES)
    assert np.allclose(a[:same], b[:same]) and not np.allclose(a, b)


def test_labels_that_are_all_alike_in_what_is_fitted_end_after_a_round():
    """Rows are drawn where there are many; a label that is rare may hold in none of them."""
    x, targets = RNG.normal(size=(9, 2)), np.zeros((9, 3), np.int8)
    targets[:, 1] = 1
    models = classifiers.LabelClassifiers(lambda x, y: None, x, targets)
    (found,) = models.staged(x)
    assert np.array_equal(found, np.tile([0.0, 1.0, 0.0], (9, 1)))


@pytest.mark.parametrize(("module", "most"), [(boosting, "ROWS"), (logistic, "ROWS"), (tfidf, "GRAMS")])
def test_drawn_rows_of_one_class_are_told_in_a_sentence(module, most, monkeypatch):
    monkeypatch.setattr(module, most, 1)
    rows = [*RNG.integers(0, 5, (N, 20)).astype(np.uint8)]
    data = task(rows, np.array([int((row == 3).mean() > 0.2) for row in rows]), Tokens(5), Classes(2))
    with pytest.raises(DataError, match="the 1 training rows or steps that were drawn to fit to have one class"):
        module.fit(data, ComparedMetric("accuracy"), 0)
