"""A few paired differences: the right formula, the right coverage, and no claim that they cannot carry."""

import math
import statistics
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.report.stats import (
    Interval,
    Paired,
    above_chance,
    bootstrap_examples,
    correct_above_chance,
    expected_best,
    holm,
    mcnemar,
    paired,
    smallest_detectable,
)

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


@pytest.mark.parametrize("n", [3, 5, 10])
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
    monkeypatch.setattr("scipy.special.nctdtrinc", lambda *_: math.nan)
    assert smallest_detectable(5, deviation=1.0) == pytest.approx(exact, rel=0.02)


def test_one_pair_has_a_difference_and_nothing_else() -> None:
    assert paired([0.03]) == Paired(1, 0.03, positive=1, negative=0)
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


def test_interval_of_one_arm() -> None:
    from scipy import stats

    scores = [0.71, 0.74, 0.69, 0.75]
    low, high = stats.ttest_1samp(scores, 0).confidence_interval(0.95)
    got = paired(scores)
    assert (got.n, got.mean, got.low, got.high) == pytest.approx((4, 0.7225, low, high))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_above_chance_is_the_one_sided_t_test(n: int) -> None:
    from scipy import stats

    for seed in range(5):
        margins = np.random.default_rng([n, seed]).normal(0.02, 0.03, n)
        reference = stats.ttest_1samp(margins, 0, alternative="greater")
        assert above_chance(margins.tolist()) == pytest.approx(reference.pvalue, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_runs_at_chance_pass_for_better_5_percent_of_the_time(n: int) -> None:
    """A two-sided interval would let 2.5 % pass. The tolerance is three standard errors of 2,000 draws."""
    found = [above_chance(draw) for draw in np.random.default_rng(n).normal(0, 0.02, (2000, n)).tolist()]
    assert np.mean([p < 0.05 for p in found]) == pytest.approx(0.05, abs=0.015)


def test_above_chance_without_a_spread() -> None:
    assert above_chance([0.3]) is None
    assert above_chance([0.0, 0.0, 0.0]) == 1.0  # one constant answer in every run
    assert above_chance([-0.1, -0.1]) == 1.0
    assert above_chance([0.4, 0.4]) is None
    with pytest.raises(ValueError, match="finite"):
        above_chance([0.1, math.nan])


@pytest.mark.parametrize(("correct", "n", "chance"), [(0, 10, 0.1), (1, 10, 0.1), (6, 10, 0.5), (10, 10, 0.5)])
def test_correct_answers_above_chance(correct: int, n: int, chance: float) -> None:
    from scipy import stats

    expected = stats.binomtest(correct, n, chance, alternative="greater").pvalue
    assert correct_above_chance(correct, n, chance) == pytest.approx(expected, rel=1e-9)


def test_correct_answers_of_a_large_test_split() -> None:
    from scipy import stats

    for correct in (2500, 2550, 2700, 10_000, 25_000):
        expected = stats.binom.sf(correct - 1, 25_000, 0.1)
        assert correct_above_chance(correct, 25_000, 0.1) == pytest.approx(expected, rel=1e-6, abs=1e-300)


def test_impossible_counts_are_refused() -> None:
    assert correct_above_chance(0, 0, 0.5) == 1.0
    for correct, n, chance in [(3, 2, 0.5), (-1, 2, 0.5), (1, 2, 1.5), (1, 2, math.nan)]:
        with pytest.raises(ValueError, match="not possible"):
            correct_above_chance(correct, n, chance)
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 3)


def test_holm_by_hand() -> None:
    # 4 · 0.005, 3 · 0.01, 2 · 0.03, then 0.04 raised to the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_a_test_that_was_not_made_does_not_count() -> None:
    assert holm([None, 0.02, None, 0.03]) == [None, pytest.approx(0.04), None, pytest.approx(0.04)]
    assert holm([None]) == [None]


def test_equal_p_values_are_adjusted_alike() -> None:
    assert holm([0.01, 0.01, 0.01]) == pytest.approx([0.03] * 3)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_no_p_value(value: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.5, value])


@settings(max_examples=100)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8), st.randoms())
def test_holm_keeps_the_order_and_lies_between_one_test_and_bonferroni(p: list[float | None], random: object) -> None:
    adjusted, known = holm(p), [value for value in p if value is not None]
    both = [(a, b) for a, b in zip(p, adjusted, strict=True) if a is not None and b is not None]
    assert [a is None for a in p] == [b is None for b in adjusted]
    assert all(a <= b <= min(1.0, len(known) * a) for a, b in both)
    assert [b for _, b in sorted(both)] == sorted(b for _, b in both)
    shuffled = list(range(len(p)))
    random.shuffle(shuffled)
    assert holm([p[i] for i in shuffled]) == [adjusted[i] for i in shuffled]


def test_mcnemar_is_the_binomial_test_of_the_discordant_items() -> None:
    from scipy import stats

    for first, second in [(0, 1), (0, 6), (1, 9), (5, 5), (12, 30), (700, 820)]:
        expected = stats.binomtest(first, first + second, 0.5).pvalue
        assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(4, 4) == 1.0


def test_mcnemar_finds_no_more_than_5_percent_where_there_is_nothing_and_most_where_there_is() -> None:
    random = np.random.default_rng(0)
    for shares, least, most in [((0.1, 0.1), 0.02, 0.06), ((0.05, 0.15), 0.85, 0.92)]:
        counts = random.multinomial(200, [*shares, 0.8], size=2000)
        found = float(np.mean([mcnemar(int(first), int(second)) < 0.05 for first, second, _ in counts]))
        assert least < found < most


@pytest.mark.parametrize("kind", ["classes", "reals"])
def test_bootstrap_intervals_over_items_cover_the_truth(kind: str) -> None:
    """200 items: the percentile bootstrap is nearly exact; tolerance, three standard errors of 500 draws and 1 %."""
    random, covered = np.random.default_rng(3), 0
    for _ in range(500):
        if kind == "classes":
            first, second = (random.random((1, 200)) + [[0.0], [0.05]] * np.ones((2, 200)) > 0.4).astype(float)
        else:
            first = random.normal(0, 1, 200)  # what the arms share drops out
            second = first + random.normal(0.05, 0.3, 200)
        got = bootstrap_examples(first, second, random, resamples=400)
        assert got.low is not None and got.high is not None
        covered += got.low <= 0.05 <= got.high
    assert covered / 500 == pytest.approx(0.945, abs=0.035)


def test_bootstrap_has_the_width_of_the_normal_interval() -> None:
    from scipy import stats

    random = np.random.default_rng(5)
    first, second = random.normal(0, 1, 3000), random.normal(0.1, 1, 3000)
    classes = (first > 0).astype(float), (second > 0).astype(float)
    for one, other in [(first, second), classes]:
        error = float(stats.sem(other - one))
        got = bootstrap_examples(one, other, np.random.default_rng(0))
        assert got.mean == pytest.approx((other - one).mean())
        assert got.low is not None and got.high is not None
        assert (got.low - got.mean, got.high - got.mean) == pytest.approx((-1.96 * error, 1.96 * error), rel=0.1)


def test_kinds_of_items_are_drawn_as_items_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong answers take a shorter way than reals do; a shift too small to see sends them the longer one."""
    random = np.random.default_rng(6)
    first, second = (random.random((2, 400)) > 0.5).astype(float)
    short = bootstrap_examples(first, second, np.random.default_rng(0))
    monkeypatch.setattr("spt.report.stats.DRAWS", 5000)  # and in several pieces
    long = bootstrap_examples(first, second + 1e-12 * np.arange(400), np.random.default_rng(0))
    assert short.low is not None and short.high is not None
    assert (long.mean, long.low, long.high) == pytest.approx((short.mean, short.low, short.high), abs=0.012)
    assert (long.low, long.high) != (short.low, short.high)


def test_weights_count_an_item_as_often() -> None:
    first, second, weights = np.array([0.0, 1.0, 0.5]), np.array([1.0, 1.0, 0.0]), np.array([1.0, 2.0, 5.0])
    got = bootstrap_examples(first, second, np.random.default_rng(0), weights)
    assert got.mean == pytest.approx((1 * 1 - 5 * 0.5) / 8)
    assert got.low is not None and got.high is not None
    assert -0.5 <= got.low < got.mean < got.high <= 1.0  # never beyond the extreme items
    many = np.tile(weights, 40)
    equal = bootstrap_examples(
        np.zeros(120), np.ones(120), np.random.default_rng(0), many
    )  # whichever weights are drawn
    assert (equal.mean, equal.low, equal.high) == pytest.approx((1.0, 1.0, 1.0))


def test_bootstrap_is_repeatable_and_takes_equal_and_single_items() -> None:
    first, second = np.random.default_rng(7).normal(size=(2, 50))
    one, same, other = (bootstrap_examples(first, second, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert bootstrap_examples([0.0] * 20, [1.0] * 20, np.random.default_rng(0)) == Interval(20, 1.0, 1.0, 1.0)
    assert bootstrap_examples([0.0], [1.0], np.random.default_rng(0)) == Interval(1, 1.0, None, None)


@pytest.mark.parametrize(
    ("first", "second", "weights"),
    [([], [], None), ([1.0], [1.0, 2.0], None), ([math.nan], [1.0], None), ([1.0], [1.0], [0.0]), ([1.0], [1.0], [])],
)
def test_items_that_cannot_be_compared(first: list[float], second: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"score for each item|finite"):
        bootstrap_examples(first, second, np.random.default_rng(0), weights)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.none(), st.floats(-10, 10), st.sampled_from([math.nan, math.inf])), max_size=7))
def test_expected_best_is_the_mean_over_all_subsets(values: list[float | None]) -> None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    for higher, best, worst in [(True, max, min), (False, min, max)]:
        got = expected_best(values, higher)
        if not finite:
            assert got == []
            continue
        scores = [value if value in finite else worst(finite) for value in values]
        for k, (trials, expected) in enumerate(got, start=1):
            assert trials == k
            assert expected == pytest.approx(statistics.fmean(map(best, combinations(scores, k))), abs=1e-9)
        assert len(got) == len(values)


def test_expected_best_of_many_trials() -> None:
    """The binomials have 150 digits; the scores are uniform, whose best of k is k/(k + 1)."""
    got = expected_best([(i + 0.5) / 500 for i in range(500)], higher_is_better=True)
    assert [trials for trials, _ in got] == list(range(1, 501))
    assert all(expected == pytest.approx(k / (k + 1), abs=2e-3) for k, expected in got)
    assert got[-1][1] == pytest.approx(499.5 / 500)
    assert expected_best([0.5] * 4, True) == [(k, 0.5) for k in (1, 2, 3, 4)]


def test_import_is_light() -> None:
    code = "import sys, spt.report.stats; print(*(sys.modules.keys() & {'scipy.stats', 'pandas', 'torch'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
