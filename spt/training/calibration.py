"""Probabilities that mean what they say: one temperature, fitted to validation answers, and how far off they are.

Guo et al., On Calibration of Modern Neural Networks (2017): logits are divided by T, which changes no answer. The
expected calibration error is theirs, of the answer given: in 15 bins of equal width over the probability of that
answer, the mean of |share of right answers - mean probability|, weighing by the answers in a bin.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spt.runs.result import BINS, Calibration, ReliabilityBin, ReliabilityScores
from spt.training.metrics import ScoredAnswers, probabilities

LEAST, MOST = 0.05, 20.0  # temperatures; where all validation answers are right, the best one would be 0


def fit_temperature(scored: ScoredAnswers) -> float:
    """The temperature with the least log loss of these answers; at an end of its range where it would lie beyond."""
    from scipy.optimize import minimize_scalar

    def loss(logarithm: float) -> float:
        logs = (scored.logits.double() / math.exp(logarithm)).log_softmax(-1).numpy()
        return -float(logs[np.arange(len(scored.truth)), scored.truth].mean())

    ends = math.log(LEAST), math.log(MOST)
    best = minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-6})
    chosen = min((float(best.x), *ends), key=loss)  # the search stops short of the ends
    return math.exp(chosen)


def calibrate(validation: ScoredAnswers, test: ScoredAnswers | None) -> Calibration:
    """A temperature by validation, and what it does to the probabilities of test answers."""
    temperature = fit_temperature(validation)
    before = after = None
    if test is not None and len(test.truth):
        before, after = (reliability(test.truth, probabilities(test.logits, t)) for t in (1.0, temperature))
    return Calibration(
        temperature=temperature,
        fitted=len(validation.truth),
        at_limit=not LEAST * 1.001 < temperature < MOST / 1.001,
        before=before,
        after=after,
    )


def reliability(truth: NDArray[np.int64], p: NDArray[np.float64]) -> ReliabilityScores:
    """Of answers (m,) with a probability of every class (m, C). The Brier score is the sum of squares over all classes,
    mean over answers: from 0 to 2."""
    from sklearn import metrics
    from sklearn.calibration import calibration_curve

    classes = p.shape[1]
    confidence, right = np.minimum(p.max(1), 1.0), p.argmax(1) == truth
    shares, means = calibration_curve(right, confidence, n_bins=BINS, strategy="uniform", pos_label=True)
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence), minlength=BINS)
    rest = iter(zip(means.tolist(), shares.tolist(), strict=True))  # of the bins that have answers
    bins = [ReliabilityBin(count=n, confidence=c, accuracy=a) for n in counts.tolist() if n for c, a in [next(rest)]]
    filled = iter(bins)
    return ReliabilityScores(
        log_loss=float(metrics.log_loss(truth, p, labels=np.arange(classes))),
        brier=classes * float(metrics.mean_squared_error(np.eye(classes)[truth], p)),
        ece=sum(each.count * abs(each.accuracy - each.confidence) for each in bins) / len(truth),
        bins=tuple(next(filled) if n else ReliabilityBin(count=0, confidence=0.0, accuracy=0.0) for n in counts),
    )


def calibrated(logits: Tensor, temperature: float | None) -> Tensor:
    """Logits whose softmax is calibrated; as they are without a temperature."""
    return logits if temperature is None else logits / temperature
