"""A few paired differences: the right formula, the right coverage, and no claim that they cannot carry."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.stats import Paired, paired, smallest_detectable

DIFFERENCES = st.lists(st.integers(-1000, 1000).map(lambda k: k / 1000), min_size=2, max_size=12)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 30])
def test_interval_and_p_are_those_of_the_paired_t_test(n: int) -> None:
    from scipy import stats

    for seed in range(5):
        scratch, spt = np.random.default_rng([n, seed]).normal([[0.76], [0.80]], 0.03, (2, n))
        reference = stats.ttest_rel(spt, scratch)
        interval = reference.confidence_interval(0.95)
        got = paired((spt - scratch).tolist())
        assert got.n == n
        assert got.mean == pytest.approx((spt - scratch).mean(), rel=1e-12)
        assert got.deviation == pytest.approx((spt - scratch).std(ddof=1), rel=1e-12)
        assert (got.low, got.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert got.p == pytest.approx(reference.pvalue, rel=1e-9)


def test_other_confidence() -> None:
    from scipy import stats

    values = [0.02, 0.05, 0.01, 0.04]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.8)
    got = paired(values, confidence=0.8)
    assert (got.low, got.high, got.confidence) == pytest.approx((low, high, 0.8))


@pytest.mark.parametrize("n", [3, 5])
def test_95_percent_intervals_cover_the_truth_95_percent_of_the_time(n: int) -> None:
    """The tolerance is three standard errors of 2,000 draws. A normal quantile would give 81 % at n = 3."""
    draws = np.random.default_rng(n).normal(0.04, 0.02, (2000, n)).tolist()
    intervals = [paired(draw) for draw in draws]
    covered = sum(one.low <= 0.04 <= one.high for one in intervals if one.low is not None and one.high is not None)
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("n", [3, 5, 10, 40])
def test_smallest_detectable_difference_is_found_80_percent_of_the_time(n: int) -> None:
    from scipy import stats

    difference = smallest_detectable(n, deviation=0.02)
    assert difference is not None
    critical, shift = stats.t.ppf(0.975, n - 1), difference * math.sqrt(n) / 0.02
    found = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert found == pytest.approx(0.8, abs=1e-5)


def test_smallest_detectable_difference_by_simulation() -> None:
    difference = smallest_detectable(5, deviation=1.0)
    assert difference is not None
    draws = np.random.default_rng(1).normal(difference, 1.0, (2000, 5)).tolist()
    found = sum(paired(draw).sign == 1 for draw in draws)
    assert found / 2000 == pytest.approx(0.8, abs=0.03)


def test_smallest_detectable_difference_without_the_noncentral_t(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = smallest_detectable(5, deviation=1.0)
    monkeypatch.setattr("spt.stats.special.nctdtrinc", lambda *_: math.nan)
    assert smallest_detectable(5, deviation=1.0) == pytest.approx(exact, rel=0.02)


def test_one_pair_has_a_difference_and_nothing_else() -> None:
    assert paired([0.03]) == Paired(1, 0.03, None, None, None, None, None, positive=1, negative=0)
    assert paired([0.03]).sign == 0
    assert smallest_detectable(1, deviation=1.0) is None


def test_two_pairs_have_an_interval_but_decide_nothing() -> None:
    got = paired([0.0400, 0.0401])
    assert got.low is not None and got.low > 0  # the interval alone would decide
    assert got.sign == 0


@pytest.mark.parametrize(
    ("differences", "sign"),
    [([0.02, 0.03, 0.04], 1), ([-0.02, -0.03, -0.04], -1), ([-0.01, 0.02, 0.04], 0), ([0.01, 0.2, 0.4], 0)],
)
def test_decided_only_when_the_interval_excludes_zero(differences: list[float], sign: int) -> None:
    assert paired(differences).sign == sign


@pytest.mark.parametrize("value", [0.0, 0.02, -0.3])
def test_equal_differences_decide_nothing(value: float) -> None:
    got = paired([value] * 5)
    assert (got.mean, got.low, got.high, got.deviation) == (value, value, value, 0.0)
    assert got.p == (1.0 if value == 0 else None)
    assert (got.sign, got.detectable) == (0, None)


def test_differences_equal_up_to_rounding_decide_nothing() -> None:
    differences = [0.3 - 0.1, 0.7 - 0.5, 0.9 - 0.7]
    assert len(set(differences)) > 1
    assert paired(differences).sign == 0


def test_ties_count_for_neither_side() -> None:
    got = paired([0.0, 0.0, 0.01, 0.02, -0.01])
    assert (got.positive, got.negative) == (2, 1)


@pytest.mark.parametrize("differences", [[], [0.1, math.nan], [math.inf, 0.1]])
def test_nothing_and_not_a_number_are_refused(differences: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        paired(differences)


@settings(max_examples=100)
@given(DIFFERENCES)
def test_exchanging_the_arms_mirrors_everything(differences: list[float]) -> None:
    one, other = paired(differences), paired([-difference for difference in differences])
    assert one.low is not None and one.high is not None and other.low is not None and other.high is not None
    assert (other.mean, other.low, other.high) == pytest.approx((-one.mean, -one.high, -one.low), abs=1e-12)
    assert (other.p, other.detectable) == (one.p, one.detectable)
    assert (other.positive, other.negative, other.sign) == (one.negative, one.positive, -one.sign)


@settings(max_examples=100)
@given(DIFFERENCES, st.integers(-3, 3))
def test_a_shift_moves_the_interval_and_nothing_else(differences: list[float], shift: int) -> None:
    one, moved = paired(differences), paired([difference + shift for difference in differences])
    assert one.low is not None and one.high is not None
    assert (moved.mean, moved.low, moved.high) == pytest.approx(
        (one.mean + shift, one.low + shift, one.high + shift), abs=1e-9
    )
    assert moved.deviation == pytest.approx(one.deviation, abs=1e-9)


@settings(max_examples=100)
@given(DIFFERENCES)
def test_every_number_is_finite_and_in_order(differences: list[float]) -> None:
    got = paired(differences)
    assert got.low is not None and got.high is not None
    assert -math.inf < got.low <= got.mean <= got.high < math.inf
    assert got.p is None or 0 <= got.p <= 1
    assert got.detectable is None or 0 < got.detectable < math.inf
    if got.p is not None and abs(got.p - 0.05) > 1e-6 and len(differences) > 2:
        assert (got.p < 0.05) == (got.sign != 0)


def test_import_is_light() -> None:
    code = "import sys, spt.stats; print(*(sys.modules.keys() & {'scipy.stats', 'pandas', 'torch'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
