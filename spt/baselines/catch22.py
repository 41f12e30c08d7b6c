"""Features of time series after catch22 (Lubba et al. 2019, "catch22: CAnonical Time-series CHaracteristics"), with
ridge regression.

18 of the 22, by the names of its documentation, of each channel standardised by itself; with its mean and deviation and
the length. Left out are periodicity, dfa, rs_range and embedding_dist, which fit curves. Thresholds of outlier timing
rise by 0.1 instead of 0.01. Written from the definitions, so that numbers are near those of the authors' code, not the
same.

Letters: m rows, L steps, C channels, F features.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spt.baselines.base import Baseline, Fitted, Query, only_rows, two_classes
from spt.baselines.ridge import fit_ridge
from spt.baselines.scores import ComparedMetric
from spt.data.features import joined, joined_name, of_series, spans, with_static
from spt.tasks.base import TaskData, Tokens, Values

Floats = NDArray[np.float64]
LONGEST_LAG = 40  # of ami_timescale
REMEMBERED = 100_000  # sequences, about 0.5 KB for each and channel


class Series:
    """A sequence (L, C), each channel with mean 0 and variance 1 (constant ones: 0), and its autocorrelation."""

    def __init__(self, values: Floats) -> None:
        deviation = values.std(axis=0)
        flat = deviation <= 1e-12 * np.abs(values).max(axis=0, initial=0.0)
        self.z = np.where(flat, 0.0, (values - values.mean(axis=0)) / np.where(flat, 1.0, deviation))
        self.autocorrelation = _autocorrelation(self.z)

    @property
    def length(self) -> int:
        return len(self.z)


def _autocorrelation(z: Floats) -> Floats:
    """(L, C) at every lag, 1 at lag 0; zero throughout of a constant channel."""
    spectrum = np.fft.rfft(z, 2 * len(z), axis=0)
    found = np.fft.irfft(np.abs(spectrum) ** 2, axis=0)[: len(z)]
    return found / np.where(found[0] > 0, found[0], 1.0)


def _first(where: NDArray[np.bool_], otherwise: int) -> Floats:
    """(C,) The first lag (L, C) at which something holds."""
    return np.where(where.any(axis=0), where.argmax(axis=0), otherwise).astype(np.float64)


def _histogram_mode(series: Series, bins: int) -> Floats:
    low, high = series.z.min(axis=0), series.z.max(axis=0)
    width = np.where(high > low, (high - low) / bins, 1.0)
    counts = _counts(np.minimum((series.z - low) // width, bins - 1), bins)
    fullest = counts == counts.max(axis=1, keepdims=True)  # of several, their mean
    return low + width * ((fullest * (np.arange(bins) + 0.5)).sum(axis=1) / fullest.sum(axis=1))


def _counts(symbols: NDArray[np.number], size: int) -> NDArray[np.int64]:
    """(C, size) How often each symbol (L, C) occurs in each channel."""
    channels = symbols.shape[1]
    places = symbols.astype(np.int64) + size * np.arange(channels)
    return np.bincount(places.reshape(-1), minlength=size * channels).reshape(channels, size)


def mode_5(series: Series) -> Floats:
    """DN_HistogramMode_5: the middle of the fullest of five bins."""
    return _histogram_mode(series, 5)


def mode_10(series: Series) -> Floats:
    """DN_HistogramMode_10: of ten bins."""
    return _histogram_mode(series, 10)


def acf_timescale(series: Series) -> Floats:
    """CO_f1ecac: the lag at which the autocorrelation falls below 1/e, between two lags on the line."""
    r, level = series.autocorrelation, 1 / np.e
    lag = _first(r < level, series.length).astype(np.int64)
    inside = np.clip(lag, 1, max(series.length - 1, 1))
    if series.length < 2:
        return lag.astype(np.float64)
    below, above = np.take_along_axis(r, inside[None], 0)[0], np.take_along_axis(r, inside[None] - 1, 0)[0]
    drop = np.where(above > below, above - below, 1.0)
    return np.where((lag > 0) & (lag < series.length), inside - 1 + (above - level) / drop, lag)


def acf_first_min(series: Series) -> Floats:
    """CO_FirstMin_ac: the lag of the autocorrelation's first minimum."""
    r = series.autocorrelation
    if len(r) < 3:
        return np.full(r.shape[1], float(len(r)))
    dips = (r[1:-1] < r[:-2]) & (r[1:-1] < r[2:])
    return np.where(dips.any(axis=0), dips.argmax(axis=0) + 1, len(r)).astype(np.float64)


def first_zero(r: Floats) -> Floats:
    """(C,) The first lag at which an autocorrelation (L, C) is not above zero."""
    return _first(r <= 0, len(r))


def ami2(series: Series) -> Floats:
    """CO_HistogramAMI_even_2_5: mutual information, in nats, of values two steps apart, in five bins each."""
    z = series.z
    if len(z) < 3:
        return np.zeros(z.shape[1])
    low, high = z.min(axis=0) - 0.1, z.max(axis=0) + 0.1
    bins = np.clip((z - low) * 5 // (high - low), 0, 4)
    joint = _counts(bins[:-2] * 5 + bins[2:], 25).reshape(-1, 5, 5) / (len(z) - 2)
    apart = joint.sum(axis=2, keepdims=True) * joint.sum(axis=1, keepdims=True)
    ratio = np.where(joint > 0, joint / np.where(apart > 0, apart, 1.0), 1.0)
    return (joint * np.log(ratio)).sum(axis=(1, 2))


def trev(series: Series) -> Floats:
    """CO_trev_1_num: time-reversal asymmetry, the mean cubed change."""
    return _mean(np.diff(series.z, axis=0) ** 3)


def high_fluctuation(series: Series) -> Floats:
    """MD_hrv_classic_pnn40: the share of changes above 0.04 standard deviations."""
    return _mean((np.abs(np.diff(series.z, axis=0)) > 0.04).astype(np.float64))


def _mean(x: Floats) -> Floats:
    return x.mean(axis=0) if len(x) else np.zeros(x.shape[1])


def _longest_stretch(holds: NDArray[np.bool_]) -> Floats:
    """(C,) The most steps (L, C) in a row."""
    if not len(holds):
        return np.zeros(holds.shape[1])
    steps = np.arange(1, len(holds) + 1)[:, None]
    broken = np.maximum.accumulate(np.where(holds, 0, steps), axis=0)  # the last step at which it did not hold
    return (steps - broken).max(axis=0).astype(np.float64)


def stretch_high(series: Series) -> Floats:
    """SB_BinaryStats_mean_longstretch1: the longest stretch above the mean."""
    return _longest_stretch(series.z > 0)


def stretch_decreasing(series: Series) -> Floats:
    """SB_BinaryStats_diff_longstretch0: the longest stretch that falls."""
    return _longest_stretch(np.diff(series.z, axis=0) < 0)


def _outlier_timing(z: Floats) -> Floats:
    """(C,) Where, from -1 at the start to 1 at the end, the highest values stand: the median over thresholds of the
    median place of what lies above them, of thresholds that at least 2 % of all steps exceed."""
    length, timing = len(z), np.zeros(z.shape[1])
    for channel, values in enumerate(z.T):
        order = np.argsort(-values, kind="stable")
        levels = np.arange(0, values.max() + 0.1, 0.1)
        above = np.searchsorted(-values[order], -levels, "right").tolist()
        places = [np.median(order[:count]) for count in above if count >= max(1, 0.02 * length)]
        if places:
            timing[channel] = np.median(places) / max(length - 1, 1) * 2 - 1
    return timing


def outlier_timing_pos(series: Series) -> Floats:
    """DN_OutlierInclude_p_001_mdrmd: where high values stand."""
    return _outlier_timing(series.z)


def outlier_timing_neg(series: Series) -> Floats:
    """DN_OutlierInclude_n_001_mdrmd: where low values stand."""
    return _outlier_timing(-series.z)


def _power(series: Series) -> Floats:
    """(frequencies, C) Shares of the power at each frequency, from 0 to pi."""
    power = np.abs(np.fft.rfft(series.z, axis=0)) ** 2
    total = power.sum(axis=0)
    return power / np.where(total > 0, total, 1.0)


def centroid_freq(series: Series) -> Floats:
    """SP_Summaries_welch_rect_centroid: the frequency below which half of the power lies."""
    power = _power(series)
    return _first(np.cumsum(power, axis=0) >= 0.5, 0) / max(len(power) - 1, 1) * np.pi


def low_freq_power(series: Series) -> Floats:
    """SP_Summaries_welch_rect_area_5_1: the share of power in the lowest fifth of all frequencies."""
    power = _power(series)
    return power[: -(-len(power) // 5)].sum(axis=0)


def forecast_error(series: Series) -> Floats:
    """FC_LocalSimple_mean3_stderr: deviation of what is left after predicting the mean of the three steps before."""
    z = series.z
    if len(z) < 5:
        return np.ones(z.shape[1])
    return (z[3:] - (z[2:-1] + z[1:-2] + z[:-3]) / 3).std(axis=0)


def whiten_timescale(series: Series) -> Floats:
    """FC_LocalSimple_mean1_tauresrat: the first zero of the changes' autocorrelation to that of the series itself."""
    changes = np.diff(series.z, axis=0)
    if len(changes) < 2:
        return np.ones(series.z.shape[1])
    of_changes = first_zero(_autocorrelation(changes - changes.mean(axis=0)))
    return of_changes / np.maximum(first_zero(series.autocorrelation), 1)


def ami_timescale(series: Series) -> Floats:
    """IN_AutoMutualInfoStats_40_gaussian_fmmi: the first minimum, up to lag 40, of -ln(1 - r²) / 2."""
    lags = min(LONGEST_LAG, -(-series.length // 2))
    information = -np.log(1 - np.minimum(series.autocorrelation[1 : lags + 1] ** 2, 1 - 1e-12)) / 2
    if len(information) < 3:
        return np.full(series.z.shape[1], float(lags))
    dips = (information[1:-1] < information[:-2]) & (information[1:-1] < information[2:])
    return np.where(dips.any(axis=0), dips.argmax(axis=0) + 1, lags).astype(np.float64)


def _thirds(z: Floats) -> NDArray[np.int64]:
    """(L, C) 0, 1, 2: the lowest, middle and highest third of a channel's values."""
    low, high = np.quantile(z, (1 / 3, 2 / 3), axis=0)
    return (z > low).astype(np.int64) + (z > high)


def entropy_pairs(series: Series) -> Floats:
    """SB_MotifThree_quantile_hh: entropy of two successive thirds, in nats."""
    if series.length < 2:
        return np.zeros(series.z.shape[1])
    thirds = _thirds(series.z)
    p = _counts(thirds[:-1] * 3 + thirds[1:], 9) / (series.length - 1)
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=1)


def transition_variance(series: Series) -> Floats:
    """SB_TransitionMatrix_3ac_sumdiagcov: variances of the columns of the transitions between thirds, added up; of the
    series at every tau-th step, tau the first zero of its autocorrelation."""
    found = np.zeros(series.z.shape[1])
    for channel, tau in enumerate(first_zero(series.autocorrelation).astype(np.int64).tolist()):
        z = series.z[:: max(tau, 1), channel : channel + 1]
        if len(z) > 2:
            thirds = _thirds(z)
            transitions = _counts(thirds[:-1] * 3 + thirds[1:], 9).reshape(3, 3) / (len(z) - 1)
            found[channel] = transitions.var(axis=0, ddof=1).sum()
    return found


FEATURES: tuple[Callable[[Series], Floats], ...] = (
    *(mode_5, mode_10, acf_timescale, acf_first_min, ami2, trev, high_fluctuation, stretch_high, stretch_decreasing),
    *(outlier_timing_pos, outlier_timing_neg, centroid_freq, low_freq_power, forecast_error, whiten_timescale),
    *(ami_timescale, entropy_pairs, transition_variance),
)


def catch22(values: Floats) -> Floats:
    """(L, C) -> (20 C + 1,)"""
    series = Series(values)
    parts = [feature(series) for feature in FEATURES]
    return np.concatenate([*parts, values.mean(axis=0), values.std(axis=0), [np.log(len(values))]])


_remembered: dict[tuple[tuple[int, ...], bytes], Floats] = {}


def cached_catch22(values: Floats) -> Floats:
    """As `catch22`, computed once for each sequence: folds of the same rows ask again, and so do other baselines."""
    key = values.shape, hashlib.blake2b(values.tobytes(), digest_size=16).digest()
    if key not in _remembered:
        if len(_remembered) >= REMEMBERED:
            _remembered.clear()
        _remembered[key] = catch22(values)
    return _remembered[key]


def features(input: Tokens | Values, asked: Query) -> Floats:
    """(m, F) Of pairs, of both sequences, with their distance."""
    return joined([of_series(input, cached_catch22, asked.split, *ends) for ends in spans(asked.split, asked.rows)])


def applies(data: TaskData) -> str | None:
    if isinstance(data.input, Tokens):
        return "it describes numbers in time, and here inputs are tokens"
    return only_rows(data) or two_classes(data)


def fit(data: TaskData, metric: ComparedMetric, seed: int) -> Fitted:
    name = f"{len(FEATURES)} features of catch22, mean and deviation of each channel"

    def described(asked: Query) -> Floats:
        return with_static(features(data.input, asked), asked.split, asked.rows)

    return fit_ridge(data, metric, described, joined_name(name, data.train))


BASELINE = Baseline(
    "catch22",
    "catch22 features with ridge regression",
    "catch22 features with ridge regression",
    1,
    chance=False,
    probabilities=False,
    applies=applies,
    fit=fit,
)
