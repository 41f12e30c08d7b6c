"""What a handful of paired differences can say, and what they cannot.

The same seed gives both arms the same data in the same order, so they are compared seed by seed. For so few
pairs the t interval is the one that keeps its word: in simulation, 95 % intervals from three pairs cover the
truth in 95.5 % of cases with t and in 75.5 % with the percentile bootstrap; and no rank or sign-flip test can
reach p < 0.05 with five pairs or fewer.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import special  # scipy.stats would take a second to import

CONFIDENCE = 0.95  # of every interval
POWER = 0.80  # probability of finding the smallest detectable difference
FEWEST = 3  # pairs below which nothing is decided: with two, the interval reaches 13 standard errors each way

EQUAL = 1e-9  # spread, relative to the largest difference, up to which differences count as all equal


@dataclass(frozen=True)
class Paired:
    """Mean of n paired differences, one arm subtracted from the other, with its t interval."""

    n: int
    mean: float
    deviation: float | None  # standard deviation of the differences; None for one pair
    low: float | None  # of the mean; None for one pair, the mean itself where all differences are equal
    high: float | None
    p: float | None  # two-sided, of a mean of zero; None for one pair, and for equal differences other than 0
    detectable: float | None  # smallest detectable difference at this n and deviation; None without a spread
    positive: int  # pairs with a difference above zero
    negative: int
    confidence: float = CONFIDENCE

    @property
    def sign(self) -> Literal[-1, 0, 1]:
        """1 or -1 where the mean is decided to lie above or below zero, 0 where these pairs do not decide."""
        if self.n < FEWEST or not self.deviation or self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def paired(differences: Sequence[float], confidence: float = CONFIDENCE) -> Paired:
    """Paired t: mean ± t((1 + c)/2, n - 1) · s/√n at confidence c; p = 2 P(T > |mean| √n/s) for T ~ t(n - 1).

    Student 1908. Equal differences have s = 0: the interval then has no width and says nothing about the next
    seed, so `sign` decides nothing from it.
    """
    n = len(differences)
    if n == 0 or not all(math.isfinite(difference) for difference in differences):
        raise ValueError("the differences must be finite numbers, at least one")
    mean = statistics.fmean(differences)
    counts = {"positive": sum(d > 0 for d in differences), "negative": sum(d < 0 for d in differences)}
    if n == 1:
        return Paired(n, mean, None, None, None, None, None, **counts, confidence=confidence)
    deviation = statistics.stdev(differences)
    if deviation <= EQUAL * max(abs(difference) for difference in differences):
        p = None if any(differences) else 1.0
        return Paired(n, mean, 0.0, mean, mean, p, None, **counts, confidence=confidence)
    error = deviation / math.sqrt(n)
    margin = t_quantile((1 + confidence) / 2, n - 1) * error
    p = 2 * float(special.stdtr(n - 1, -abs(mean) / error))
    detectable = smallest_detectable(n, deviation, confidence)
    return Paired(n, mean, deviation, mean - margin, mean + margin, p, detectable, **counts, confidence=confidence)


def smallest_detectable(n: int, deviation: float, confidence: float = CONFIDENCE, power: float = POWER) -> float | None:
    """True mean difference that a two-sided paired t test with n pairs finds with this power.

    The d solving P(T > t((1 + c)/2, n - 1)) = power for T ~ noncentral t(n - 1, d √n/s); Cohen 1988, ch. 2.
    Finds on the wrong side, rarer than one in a million, are left out. None for one pair.
    """
    if n < 2:
        return None
    critical = t_quantile((1 + confidence) / 2, n - 1)
    shift = float(special.nctdtrinc(n - 1, 1 - power, critical))
    if not math.isfinite(shift):  # the usual approximation: 14 % too small for two pairs, 2 % for four
        shift = critical + t_quantile(power, n - 1)
    return shift * deviation / math.sqrt(n)


def t_quantile(probability: float, degrees: int) -> float:
    return float(special.stdtrit(degrees, probability))
