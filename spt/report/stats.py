"""Statistics of a few paired differences, and their limits.

The same seed gives both arms the same data in the same order, so they are compared seed by seed. With so few
pairs only the t interval keeps its coverage: in simulation, 95 % intervals from three pairs cover the
truth in 95.5 % of cases with t and in 75.5 % with the percentile bootstrap; and no rank or sign-flip test can
reach p < 0.05 with five pairs or fewer.

Scores over several splits of one data set are not independent: training sets overlap, so the usual error of a mean is
too small. There the variance is corrected for it (Nadeau & Bengio 2003), one difference a split.

There are thousands of test items, so within one seed the bootstrap and McNemar's exact test are valid. They
generalise to other items for these two trained networks, not to other seeds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95  # of every interval
POWER = 0.80  # probability of finding the smallest detectable difference
FEWEST = (
    3  # pairs, or splits, below which nothing is decided: with two, the interval reaches 13 standard errors each way
)
RESAMPLES = 2000  # of a bootstrap: the ends of a 95 % interval are then known to about 3 % of its width
DRAWS = 1 << 22  # items drawn at once, 64 MiB with what they index
EQUAL = 1e-9  # spread, relative to the largest difference, up to which differences count as all equal


@dataclass(frozen=True)
class Paired:
    """Mean of n paired differences, one arm subtracted from the other, with its t interval.

    Over splits of one data set n counts splits, and `test_share` is the share of the rows that each one tests.
    """

    n: int
    mean: float
    positive: int  # pairs with a difference above zero
    negative: int
    deviation: float | None = None  # standard deviation of the differences; None for one pair
    low: float | None = None  # of the mean; None for one pair, the mean itself where all differences are equal
    high: float | None = None
    p: float | None = None  # two-sided, of a mean of zero; None for one pair, and for equal differences other than 0
    detectable: float | None = None  # smallest detectable difference at this n and deviation; None without a spread
    confidence: float = CONFIDENCE
    test_share: float = 0.0  # 0: the differences are independent

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 for one pair."""
        return (self.deviation or 0.0) * _error_factor(self.n, self.test_share)

    @property
    def sign(self) -> Literal[-1, 0, 1]:
        """1 or -1 where the mean is decided to lie above or below zero, 0 where these pairs do not decide."""
        if self.n < FEWEST or not self.deviation or self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def _special() -> Any:
    from scipy import special  # in a function: a fifth of a second to import; scipy.stats would take one

    return special


def paired(differences: Sequence[float], confidence: float = CONFIDENCE, test_share: float = 0.0) -> Paired:
    """Paired t: mean ± t((1 + c)/2, n - 1) · e at confidence c; p = 2 P(T > |mean|/e) for T ~ t(n - 1).

    e is s/√n (Student 1908). Of n splits of one data set, each of which tests the share q of the rows, it is
    s √(1/n + q/(1 - q)): the corrected resampled t test (Nadeau & Bengio 2003), which holds for k folds with q = 1/k
    and for folds repeated with other draws (Bouckaert & Frank 2004). Equal differences have s = 0: the interval then
    has no width and says nothing about the next seed, so `sign` decides nothing from it. Of one arm's scores it is
    the t interval of their mean.
    """
    n = len(differences)
    if n == 0 or not all(math.isfinite(difference) for difference in differences):
        raise ValueError("the differences must be finite numbers, at least one")
    if not 0 <= test_share < 1:
        raise ValueError(f"test_share is {test_share}; the share of the rows that a split tests lies between 0 and 1")
    mean = statistics.fmean(differences)
    positive, negative = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    counts = Paired(n, mean, positive, negative, confidence=confidence, test_share=test_share)
    if n == 1:
        return counts
    deviation = statistics.stdev(differences)
    if deviation <= EQUAL * max(abs(difference) for difference in differences):
        return replace(counts, deviation=0.0, low=mean, high=mean, p=None if any(differences) else 1.0)
    test = replace(counts, deviation=deviation)
    margin = t_quantile((1 + confidence) / 2, n - 1) * test.error
    return replace(
        test,
        low=mean - margin,
        high=mean + margin,
        p=2 * float(_special().stdtr(n - 1, -abs(mean) / test.error)),
        detectable=smallest_detectable(n, deviation, confidence, test_share=test_share),
    )


def by_split(
    splits: Sequence[str | None], values: Sequence[float], shares: Sequence[float]
) -> tuple[list[float], float]:
    """Values, one of each run, as `paired` takes them, and the share of the rows that a split tests.

    Those of one split of the data are averaged: its seeds say how sure its own mean is, which is in the spread of the
    means. Runs on no split stay, and the share is 0.
    """
    of_split = dict[str, list[float]]()
    for split, value in zip(splits, values, strict=True):
        if split is not None:
            of_split.setdefault(split, []).append(value)
    if not of_split:
        return list(values), 0.0
    return [statistics.fmean(each) for each in of_split.values()], statistics.fmean(shares)


def _error_factor(n: int, test_share: float) -> float:
    """Of the standard error: √(1/n + q/(1 - q))."""
    return math.sqrt(1 + n * test_share / (1 - test_share)) / math.sqrt(n)


def corrected_interval(differences: ArrayLike, test_share: float, *, confidence: float = CONFIDENCE) -> Paired:
    """The mean of differences over splits of one data set, with the interval that allows for overlapping training sets.

    `differences` has one number a split: two models' scores subtracted, or one model's scores. `test_share` is the
    share of the rows that each split tests: 0.2 for five folds, repeated or not, and for random fifths.

        scores = cross_val_score(first, X, y, cv=5) - cross_val_score(second, X, y, cv=5)
        interval = spt.corrected_interval(scores, test_share=1 / 5)
        print(interval.mean, interval.low, interval.high, interval.p)

    Raises ValueError for a share that is not between 0 and 1, and for numbers that are not finite. One split has no
    interval, and with fewer than three `sign` decides nothing.
    """
    if not test_share > 0:
        raise ValueError(f"test_share is {test_share}; of five folds it is 1/5")
    values = np.asarray(differences, np.float64)
    if values.ndim != 1:
        raise ValueError(f"differences have {values.ndim} axes; one number a split is expected")
    return paired(values.tolist(), confidence, test_share)


def widened(test: Paired, tests: int) -> tuple[float | None, float | None]:
    """Ends of the interval of a mean that is one of so many: each at confidence 1 - (1 - c)/m, so that all m hold
    together at confidence c (Bonferroni). None for one pair; the mean itself where all differences are equal."""
    if not test.deviation:
        return test.low, test.high
    margin = t_quantile(1 - (1 - test.confidence) / (2 * max(tests, 1)), test.n - 1) * test.error
    return test.mean - margin, test.mean + margin


def smallest_detectable(
    n: int, deviation: float, confidence: float = CONFIDENCE, power: float = POWER, test_share: float = 0.0
) -> float | None:
    """True mean difference that a two-sided paired t test with n pairs finds with this power.

    The d solving P(T > t((1 + c)/2, n - 1)) = power for T ~ noncentral t(n - 1, d/e), e as in `paired`; Cohen 1988,
    ch. 2. Finds on the wrong side, rarer than one in a million, are left out. None for one pair.
    """
    if n < 2:
        return None
    critical = t_quantile((1 + confidence) / 2, n - 1)
    shift = float(_special().nctdtrinc(n - 1, 1 - power, critical))
    if not math.isfinite(shift):  # the usual approximation: 14 % too small for two pairs, 2 % for four
        shift = critical + t_quantile(power, n - 1)
    return shift * deviation * _error_factor(n, test_share)


def t_quantile(probability: float, degrees: int | float) -> float:
    return float(_special().stdtrit(degrees, probability))


@dataclass(frozen=True)
class Interval:
    """A mean, or another estimate, of n values with its two-sided interval."""

    n: int
    mean: float
    low: float | None  # None where n is too small to tell
    high: float | None
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Average:
    """A plain mean over tasks of each task's mean over seeds, for other seeds of the same tasks."""

    tasks: int
    mean: float
    low: float | None = None  # t interval by Welch and Satterthwaite; None where a task has too few seeds, or no spread
    high: float | None = None
    p: float | None = None  # two-sided, of a mean of zero
    error: float | None = None  # standard error
    degrees: float | None = None

    def interval(self, tests: int) -> tuple[float | None, float | None]:
        """Ends of one of so many intervals that hold together (Bonferroni)."""
        if self.error is None or self.degrees is None:
            return None, None
        margin = t_quantile(1 - (1 - CONFIDENCE) / (2 * max(tests, 1)), self.degrees) * self.error
        return self.mean - margin, self.mean + margin


def average(samples: Sequence[Sequence[float]]) -> Average:
    """Mean over tasks of mean over seeds, each task's seeds drawn by themselves.

    Standard error sqrt(sum s_t^2/n_t)/T, degrees of freedom (sum v_t)^2 / sum v_t^2/(n_t - 1) with v_t = s_t^2/n_t
    (Satterthwaite 1946, Welch 1947). Tasks are not drawn: nothing is said of tasks that are not there.
    """
    mean, tasks = statistics.fmean(map(statistics.fmean, samples)), len(samples)
    if min(map(len, samples)) < FEWEST:
        return Average(tasks, mean)
    shares = [float(statistics.variance(scores)) / len(scores) for scores in samples]
    total = sum(shares)
    if math.sqrt(total) <= EQUAL * max(abs(score) for scores in samples for score in scores):
        return Average(tasks, mean)
    degrees = total**2 / sum(share**2 / (len(scores) - 1) for share, scores in zip(shares, samples, strict=True))
    plain = Average(tasks, mean, error=math.sqrt(total) / tasks, degrees=degrees)
    low, high = plain.interval(1)
    p = 2 * float(_special().stdtr(degrees, -abs(mean) / math.sqrt(total) * tasks))
    return replace(plain, low=low, high=high, p=p)


def ranks(scores: Sequence[float]) -> list[float]:
    """1 for the highest score; tied ones share the mean of their ranks."""
    from scipy import stats as scipy_stats  # a second to import; only reports over several tasks need it

    ranked: list[float] = scipy_stats.rankdata(np.negative(scores)).tolist()
    return ranked


def friedman(scores: Sequence[Sequence[float]]) -> float | None:
    """p that models, a column each, rank alike over tasks, a line each (Friedman 1937, by its chi-square).

    Conservative with few tasks. None with fewer than three models or two tasks, and where all are tied.
    """
    from scipy import stats as scipy_stats

    table = np.asarray(scores, np.float64)
    if table.shape[0] < 2 or table.shape[1] < 3 or (table == table[:, :1]).all():
        return None
    return float(scipy_stats.friedmanchisquare(*table.T).pvalue)


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Two-sided p of Wilcoxon's signed-rank test (1945), one difference a task. None where all are zero.

    With n tasks it cannot fall below 2^(1 - n).
    """
    from scipy import stats as scipy_stats

    return float(scipy_stats.wilcoxon(differences).pvalue) if any(differences) else None


def above_chance(margins: Sequence[float], test_share: float = 0.0) -> float | None:
    """One-sided p of a mean of zero or less, of scores minus chance, more is better: P(T > mean/e), e as in `paired`.

    Equal margins of zero or less, as of runs that all give one constant answer, have p = 1. None for one score, and
    for equal ones above chance.
    """
    test = paired(margins, test_share=test_share)
    if not test.deviation:
        return None if test.deviation is None or test.mean > 0 else 1.0
    return float(_special().stdtr(test.n - 1, -test.mean / test.error))


def correct_above_chance(correct: int, n: int, chance: float) -> float:
    """Exact p of so many right answers or more out of n by chance: P(X ≥ correct) for X ~ binomial(n, chance).

    For one seed, where `above_chance` has no p. It counts the draw of the test items, not that of the seed.
    """
    if not 0 <= correct <= n or not 0 <= chance <= 1:
        raise ValueError(f"{correct} of {n} right answers at chance {chance} is not possible")
    if correct == 0:
        return 1.0
    return float(_special().bdtrc(correct - 1, n, chance))


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Adjusted p values: the i-th smallest of m times m - i + 1, at most 1 and never below an earlier one.

    Holm 1979. Holds the chance of any false find below the level, whatever the tests have in common. None, a test
    that could not be made, stays None and does not count.
    """
    known = sorted((value, index) for index, value in enumerate(p) if value is not None)
    if not all(0 <= value <= 1 for value, _ in known):
        raise ValueError("p values must lie between 0 and 1")
    adjusted: list[float | None] = [None] * len(p)
    largest = 0.0
    for rank, (value, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        adjusted[index] = largest
    return adjusted


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p that two classifiers are right equally often, from the items that only one has right.

    McNemar 1947: each discordant item falls to either side with probability 1/2. 1.0 without any.
    """
    if min(only_first, only_second) < 0:
        raise ValueError("counts of items cannot be negative")
    n = only_first + only_second
    return min(1.0, 2 * float(_special().bdtr(min(only_first, only_second), n, 0.5))) if n else 1.0


def bootstrap_examples(
    first: ArrayLike,
    second: ArrayLike,
    generator: np.random.Generator,
    weights: ArrayLike | None = None,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Mean difference second - first over test items, (n,) each, with the percentile interval of a paired bootstrap.

    Efron 1979: items are drawn with replacement, both arms' together. With weights (n,), positive, the mean is a
    weighted one, and a resample divides by the weights that it drew. One item has no interval.
    """
    before, after = np.asarray(first, np.float64), np.asarray(second, np.float64)
    weight = np.ones_like(before) if weights is None else np.asarray(weights, np.float64)
    if before.ndim != 1 or not len(before) or not before.shape == after.shape == weight.shape:
        raise ValueError("the arms need one score for each item, at least one")
    difference = after - before
    if not np.isfinite(difference).all() or not np.isfinite(weight).all() or not (weight > 0).all():
        raise ValueError("scores must be finite numbers, weights positive ones")
    n, weighted = len(difference), weight * difference
    mean = float(weighted.sum() / weight.sum())
    if n == 1:
        return Interval(n, mean, None, None, confidence)
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(_resampled(weighted, weight, generator, resamples), ends)
    return Interval(n, mean, float(low), float(high), confidence)


def _resampled(
    weighted: NDArray[np.float64], weight: NDArray[np.float64], generator: np.random.Generator, resamples: int
) -> NDArray[np.float64]:
    """(resamples,) weighted means of n items drawn with replacement from pairs of weighted value and weight."""
    n = len(weighted)
    kinds, counts = np.unique(np.stack([weighted, weight], 1), axis=0, return_counts=True)
    if 8 * len(kinds) <= n:  # right and wrong answers: how often each kind is drawn is all that matters
        drawn = generator.multinomial(n, counts / n, size=resamples)  # (resamples, kinds)
        sums = drawn @ kinds
        return sums[:, 0] / sums[:, 1]
    means = np.empty(resamples)
    rows = max(1, DRAWS // n)
    for start in range(0, resamples, rows):
        chosen = generator.integers(n, size=(min(rows, resamples - start), n))
        means[start : start + rows] = weighted[chosen].sum(1) / weight[chosen].sum(1)
    return means


def expected_best(values: Sequence[float | None], higher_is_better: bool) -> list[tuple[int, float]]:
    """(k, expected best validation score of k trials) for k = 1 to n, from the scores of n random trials.

    The mean over all subsets of k trials: sum over i of C(i - 1, k - 1)/C(n, k) · v(i), v sorted from the worst.
    Unbiased, unlike the estimator of Dodge et al. 2019 (Tang et al. 2020, arXiv 2004.13705). A trial without a finite
    score (diverged, failed) cost its share of the budget and counts as the worst of the finite ones; without any
    finite one the list is empty.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return []
    worst = min(finite) if higher_is_better else max(finite)
    n = len(values)
    best_first = sorted(finite + [worst] * (n - len(finite)), reverse=higher_is_better)
    curve = []
    for k in range(1, n + 1):
        share, terms = k / n, []  # of the subsets, those whose best is v(i); the binomials would overflow
        for i in range(n, k - 1, -1):
            terms.append(share * best_first[n - i])
            share *= (i - k) / max(i - 1, 1)
        curve.append((k, math.fsum(terms)))
    return curve
