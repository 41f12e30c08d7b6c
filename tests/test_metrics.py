"""Every metric against scikit-learn or SciPy called directly; what they leave undefined has a value and a note."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from spt.data.metrics import (
    FROM_ANSWERS,
    FROM_PROBABILITIES,
    confusion_matrix,
    groups_of,
    of_confusion,
    of_labels,
    of_numbers,
    of_probabilities,
)

RNG = np.random.default_rng(0)


def answered(n: int, classes: int, *, absent: int | None = None):
    truth = RNG.integers(0, classes, n)
    if absent is not None:
        truth[truth == absent] = (absent + 1) % classes
    logits = RNG.normal(size=(n, classes)) + 1.5 * np.eye(classes)[truth]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return truth, p


@pytest.mark.parametrize("positive", [0, 1])
def test_of_two_classes(positive):
    truth, p = answered(200, 2)
    said = p.argmax(1)
    matrix = confusion_matrix(truth, said, 2)
    found = of_confusion(FROM_ANSWERS, matrix, positive) + of_probabilities(FROM_PROBABILITIES, truth, p, positive)
    assert found.notes == ()
    assert found.scores == pytest.approx(
        {
            "balanced_accuracy": sk.balanced_accuracy_score(truth, said),
            "f1": sk.f1_score(truth, said, pos_label=positive),
            "f1_weighted": sk.f1_score(truth, said, average="weighted"),
            "f1_micro": sk.f1_score(truth, said, average="micro"),
            "mcc": sk.matthews_corrcoef(truth, said),
            "log_loss": sk.log_loss(truth, p),
            "auroc": sk.roc_auc_score(truth == positive, p[:, positive]),
            "auprc": sk.average_precision_score(truth == positive, p[:, positive]),
        }
    )


def test_of_several_classes():
    truth, p = answered(300, 5)
    said = p.argmax(1)
    matrix = confusion_matrix(truth, said, 5)
    found = of_confusion(FROM_ANSWERS, matrix, None) + of_probabilities(FROM_PROBABILITIES, truth, p, None)
    assert found.scores == pytest.approx(
        {
            "balanced_accuracy": sk.balanced_accuracy_score(truth, said),
            "f1_weighted": sk.f1_score(truth, said, average="weighted"),
            "f1_micro": sk.f1_score(truth, said, average="micro"),
            "mcc": sk.matthews_corrcoef(truth, said),
            "log_loss": sk.log_loss(truth, p),
            "auroc": sk.roc_auc_score(truth, p, multi_class="ovr", average="macro"),
            "auprc": sk.average_precision_score(np.eye(5)[truth], p, average="macro"),
        }
    )


def test_one_class_of_several_against_the_rest():
    truth, p = answered(300, 4)
    found = of_probabilities(("auroc", "auprc"), truth, p, 2).scores
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(truth == 2, p[:, 2]))
    assert found["auprc"] == pytest.approx(sk.average_precision_score(truth == 2, p[:, 2]))
    matrix = confusion_matrix(truth, p.argmax(1), 4)
    of_class = of_confusion(("f1",), matrix, 2).scores["f1"]
    assert of_class == pytest.approx(sk.f1_score(truth == 2, p.argmax(1) == 2))


def test_a_class_without_rows_is_left_out_with_a_note():
    truth, p = answered(300, 4, absent=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = of_probabilities(("auroc", "auprc", "log_loss"), truth, p, None)
        scores = of_confusion(FROM_ANSWERS, confusion_matrix(truth, p.argmax(1), 4), None).scores
    assert found.scores["auroc"] == pytest.approx(np.mean([sk.roc_auc_score(truth == k, p[:, k]) for k in range(3)]))
    assert found.notes == ("1 of 4 classes have no row and are left out of auroc and auprc",)
    assert scores["balanced_accuracy"] == pytest.approx(
        np.mean([(p.argmax(1)[truth == k] == k).mean() for k in range(3)])
    )


@pytest.mark.parametrize(
    ("truth", "positive", "auprc", "said"),
    [(0, 0, 1.0, "has the same class"), (0, 1, 0.0, "is of another class"), (2, None, 1.0, "has the same class")],
)
def test_a_split_of_one_class_has_scores_and_a_note(truth, positive, auprc, said):
    _, p = answered(20, 3)
    found = of_probabilities(("auroc", "auprc", "log_loss"), np.full(20, truth), p, positive)
    assert (found.scores["auroc"], found.scores["auprc"]) == (0.5, auprc)
    assert all(map(math.isfinite, found.scores.values()))
    assert len(found.notes) == 1 and said in found.notes[0]
    for said in (truth, 1):
        matrix = confusion_matrix(np.full(20, truth), np.full(20, said), 3)
        scores = of_confusion(FROM_ANSWERS, matrix, positive).scores
        assert all(map(math.isfinite, scores.values())) and scores["mcc"] == 0


def test_of_numbers_and_of_targets_that_are_not_known():
    truth = RNG.normal(3, 0.5, (80, 2))
    said = truth + RNG.normal(0, 0.5, (80, 2))
    found = of_numbers(("mape", "spearman"), truth, said).scores
    assert found["mape"] == pytest.approx(sk.mean_absolute_percentage_error(truth, said))
    assert found["spearman"] == pytest.approx(
        np.mean([stats.spearmanr(truth[:, k], said[:, k]).statistic for k in (0, 1)])
    )
    truth[:30, 1] = np.nan
    found = of_numbers(("mape", "spearman"), truth, said).scores
    assert found["spearman"] == pytest.approx(
        np.mean(
            [stats.spearmanr(truth[:, 0], said[:, 0]).statistic, stats.spearmanr(truth[30:, 1], said[30:, 1]).statistic]
        )
    )
    assert found["mape"] == pytest.approx(
        np.mean([sk.mean_absolute_percentage_error(truth[i:, k], said[i:, k]) for k, i in ((0, 0), (1, 30))])
    )


@pytest.mark.parametrize("constant", ["truth", "said"])
def test_constant_numbers_correlate_0_with_a_note(constant):
    numbers = {"truth": RNG.normal(size=(9, 1)), "said": RNG.normal(size=(9, 1))} | {constant: np.ones((9, 1))}
    found = of_numbers(("spearman",), **{"truth": numbers["truth"], "found": numbers["said"]})
    assert found.scores == {"spearman": 0.0}
    assert "constant" in found.notes[0]


def test_a_target_of_0_has_no_percentage_error():
    found = of_numbers(("mape",), np.array([[0.0], [1.0]]), np.ones((2, 1)))
    assert found.scores == {} and "which is 0 in 1 of the answers" in found.notes[0]


def test_of_several_labels_with_unknown_entries():
    truth = RNG.integers(0, 2, (120, 3))
    p = np.clip(0.3 * truth + RNG.uniform(0, 0.8, truth.shape), 0, 1)
    truth[RNG.uniform(size=truth.shape) < 0.3] = -1
    found, known = of_labels(truth, p).scores, truth >= 0
    flat, said = truth[known], p[known] >= 0.5
    each = [(truth[known[:, k], k], p[known[:, k], k]) for k in range(3)]
    assert found["auroc_micro"] == pytest.approx(sk.roc_auc_score(flat, p[known]))
    assert found["auprc_micro"] == pytest.approx(sk.average_precision_score(flat, p[known]))
    assert found["f1_micro"] == pytest.approx(sk.f1_score(flat, said))
    assert found["accuracy_micro"] == pytest.approx(sk.accuracy_score(flat, said))
    assert found["auroc_macro"] == pytest.approx(np.mean([sk.roc_auc_score(*entries) for entries in each]))
    assert found["auprc_macro"] == pytest.approx(np.mean([sk.average_precision_score(*entries) for entries in each]))
    assert found["f1_macro"] == pytest.approx(np.mean([sk.f1_score(true, q >= 0.5) for true, q in each]))
    assert found["mcc_macro"] == pytest.approx(np.mean([sk.matthews_corrcoef(true, q >= 0.5) for true, q in each]))


def test_labels_that_are_alike_or_never_known_are_left_out():
    truth = np.array([[0, 1, -1], [0, 0, -1], [0, 1, -1]])
    found = of_labels(truth, RNG.uniform(size=(3, 3)))
    assert all(map(math.isfinite, found.scores.values()))
    assert any("1 of 2 labels are alike in all rows: left out of auroc_macro" in note for note in found.notes)


@pytest.mark.parametrize("held", [[1], [0], [1, 0], [1, 1]])
def test_labels_that_are_all_alike_have_the_precision_that_any_order_has(held):
    """Scikit-learn's average precision of a label that always holds is 1, of one that never does 0; that of classes."""
    truth, p = np.tile(held, (4, 1)), RNG.uniform(size=(4, len(held)))
    found = of_labels(truth, p, names=["auroc_macro", "auprc_macro"])
    assert found.scores == {"auroc_macro": 0.5, "auprc_macro": np.mean(held)}
    assert all("by definition" in note for note in found.notes) and len(found.notes) == 2
    if len(held) == 1:
        of_class = of_probabilities(("auroc", "auprc"), truth[:, 0], np.hstack([1 - p, p]), 1)
        assert of_class.scores == {name.removesuffix("_macro"): score for name, score in found.scores.items()}
    nobody = of_labels(np.full((2, 1), -1), RNG.uniform(size=(2, 1)), names=["auroc_macro", "auprc_macro", "f1_macro"])
    assert nobody.scores == {"auroc_macro": 0.5, "auprc_macro": 0.0, "f1_macro": 0.0}


def test_groups_have_their_rows_in_order():
    groups = np.array(["b", "a", "b", "a", "c"])
    assert [(name, rows.tolist()) for name, rows in groups_of(groups)] == [("a", [1, 3]), ("b", [0, 2]), ("c", [4])]
