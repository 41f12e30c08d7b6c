"""A temperature fitted on validation: it makes probabilities mean what they say, and changes no answer."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from spt.runs.result import BINS
from spt.training.calibration import LEAST, calibrate, fit_temperature, reliability
from spt.training.metrics import ScoredAnswers, probabilities

RNG = np.random.default_rng(0)


def scored(n: int, classes: int, sharpness: float) -> ScoredAnswers:
    """Answers whose truth is drawn from the softmax of the logits, which are then multiplied."""
    logits = RNG.normal(0, 1.5, (n, classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    truth = np.array([RNG.choice(classes, p=row) for row in p])
    return ScoredAnswers(truth, torch.tensor(sharpness * logits), np.arange(n))


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_temperature_undoes_what_logits_were_multiplied_by(sharpness):
    assert fit_temperature(scored(3000, 4, sharpness)) == pytest.approx(sharpness, rel=0.12)


def test_log_loss_brier_and_calibration_error_fall_and_no_answer_changes():
    validation, test = scored(1500, 3, 3.0), scored(1500, 3, 3.0)
    made = calibrate(validation, test)
    assert made.before is not None and made.after is not None and not made.at_limit and made.fitted == 1500
    for name in ("log_loss", "brier", "ece"):
        assert getattr(made.after, name) < getattr(made.before, name)
    plain, cooled = (probabilities(test.logits, t) for t in (1.0, made.temperature))
    assert (plain.argmax(1) == cooled.argmax(1)).all()
    assert made.before.log_loss == pytest.approx(sk.log_loss(test.truth, plain))
    assert made.after.log_loss == pytest.approx(sk.log_loss(test.truth, cooled))


def test_the_best_temperature_is_the_one_that_a_fine_grid_finds():
    validation = scored(400, 3, 2.0)
    grid = np.exp(np.linspace(np.log(0.2), np.log(10), 2000))
    losses = [sk.log_loss(validation.truth, probabilities(validation.logits, t)) for t in grid]
    assert fit_temperature(validation) == pytest.approx(grid[int(np.argmin(losses))], rel=5e-3)


def test_where_every_validation_answer_is_right_the_temperature_is_at_its_limit():
    truth = np.arange(30) % 3
    made = calibrate(ScoredAnswers(truth, 2.0 * torch.eye(3)[torch.tensor(truth)], np.arange(30)), None)
    assert made.at_limit and made.temperature == pytest.approx(LEAST) and made.before is None


def test_the_brier_score_of_two_classes_is_twice_scikit_learns():
    truth, p1 = RNG.integers(0, 2, 60), RNG.uniform(size=60)
    p = np.stack([1 - p1, p1], 1)
    assert reliability(truth, p).brier == pytest.approx(2 * sk.brier_score_loss(truth, p1))


def test_the_expected_calibration_error_by_hand():
    """Ten answers of probability 0.9, seven right; five of 0.6 (on a bin's edge), all right."""
    p = np.array([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 5)
    truth = np.array([0] * 7 + [1] * 3 + [0] * 5)
    found = reliability(truth, p)
    assert found.ece == pytest.approx((10 * abs(0.7 - 0.9) + 5 * abs(1.0 - 0.6)) / 15)
    filled = [(k, bin.count, bin.accuracy) for k, bin in enumerate(found.bins) if bin.count]
    assert len(found.bins) == BINS and [count for _, count, _ in filled] == [5, 10]
    assert [accuracy for _, _, accuracy in filled] == pytest.approx([1.0, 0.7])


def test_certain_answers_have_a_bin():
    found = reliability(np.array([0, 1, 1]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    assert found.bins[-1].count == 3 and found.ece == pytest.approx(1 / 3)
