"""Metrics that need all answers to a split at once: scikit-learn's and SciPy's, with a value for every split.

What is undefined there (one class in a split, constant answers) has a value here, and a note that says so; nothing is
NaN. Networks and baselines share them.

Letters: m answers (rows or steps), C classes, K target values or labels.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1  # of several labels, one that a row does not tell


class MetricValues(NamedTuple):
    """Scores by name, and what a reader must know of them."""

    scores: dict[str, float]
    notes: tuple[str, ...] = ()

    def __add__(self, other: "MetricValues") -> "MetricValues":  # type: ignore[override]
        return MetricValues(self.scores | other.scores, (*self.notes, *other.notes))


FROM_ANSWERS = ("balanced_accuracy", "f1", "f1_weighted", "f1_micro", "mcc")  # a confusion matrix decides them
FROM_PROBABILITIES = ("log_loss", "auroc", "auprc")
FROM_NUMBERS = ("mape", "spearman")
UNASKED = 2**22  # numbers of all answers that are sorted though nobody asked: seconds


# ------------------------------------------------------------------------------------------------- one class of several


def confusion_matrix(truth: NDArray[Any], found: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """(C, C) How many answers have true class i (row) and are said to be j (column)."""
    from sklearn import metrics

    matrix: NDArray[np.int64] = metrics.confusion_matrix(truth, found, labels=np.arange(classes))
    return matrix


def of_confusion(names: Collection[str], confusion: NDArray[Any], positive: int | None) -> MetricValues:
    """From a confusion matrix: balanced accuracy (the mean recall of the classes that occur), F-scores and Matthews'
    correlation. `f1` is that of the positive class; a class that is neither true nor said has an F-score of 0."""
    from sklearn import metrics

    truth, found = np.nonzero(confusion)  # every pair once, weighing as often as it comes
    weighed: dict[str, Any] = {"sample_weight": confusion[truth, found]}
    scores: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    if "balanced_accuracy" in names:
        occur = np.unique(truth)
        scores["balanced_accuracy"] = metrics.recall_score(truth, found, labels=occur, average="macro", **weighed)
    if "f1" in names and positive is not None:
        of_class = metrics.f1_score(truth, found, labels=[positive], average=None, zero_division=0.0, **weighed)
        scores["f1"] = of_class[0]
    for average in ("weighted", "micro"):
        if f"f1_{average}" in names:
            scores[f"f1_{average}"] = metrics.f1_score(truth, found, average=average, zero_division=0.0, **weighed)
    if "mcc" in names:
        constant = len(np.unique(truth)) < 2  # scikit-learn would warn where answers are alike, too
        scores["mcc"] = 0.0 if constant else metrics.matthews_corrcoef(truth, found, **weighed)
        notes = ("every row has the same class, so that mcc is 0 by definition",) if constant else ()
    return MetricValues({name: float(score) for name, score in scores.items()}, notes)


def of_probabilities(
    names: Collection[str], truth: NDArray[Any], probabilities: NDArray[np.float64], positive: int | None
) -> MetricValues:
    """From a probability of every class, (m, C): log loss, and the areas under the ROC and the precision-recall curve
    (the average precision).

    The areas are those of the positive class; without one, means over classes, each against the rest, of those that
    some answers have and others have not.
    """
    from sklearn import metrics

    classes, scores, notes = probabilities.shape[1], dict[str, float](), list[str]()
    if "log_loss" in names:
        scores["log_loss"] = metrics.log_loss(truth, probabilities, labels=np.arange(classes))
    asked = [name for name in ("auroc", "auprc") if name in names]
    if asked:
        wanted = range(classes) if positive is None else (positive,)
        counts = np.bincount(truth, minlength=classes)
        usable = [k for k in wanted if 0 < counts[k] < len(truth)]
        area = {"auroc": metrics.roc_auc_score, "auprc": metrics.average_precision_score}
        for name in asked:
            each = [area[name](truth == k, probabilities[:, k]) for k in usable]
            # No order to judge: that of chance, and the precision that any order has.
            alone = 0.5 if name == "auroc" else float(counts[list(wanted)].max() == len(truth))
            scores[name] = np.mean(each) if each else alone
        if not usable:
            what = "has the same class" if positive is None or counts[positive] else "is of another class"
            told = " and ".join(f"{name} is {scores[name]:g}" for name in asked)
            notes.append(f"every row {what}, so that {told} by definition")
        elif positive is None and len(usable) < classes:
            notes.append(f"{classes - len(usable)} of {classes} classes have no row and are left out of {_and(asked)}")
    return MetricValues({name: float(score) for name, score in scores.items()}, tuple(notes))


# ------------------------------------------------------------------------------------------------------------- numbers


def of_numbers(names: Collection[str], truth: NDArray[Any], found: NDArray[Any]) -> MetricValues:
    """Of numbers (m, K), NaN where the truth is not known: the mean over the K of Spearman's rank correlation and of
    the mean absolute percentage error, as a share. Constant answers, or a constant truth, correlate 0; where a target
    is 0 there is no percentage error."""
    from scipy import stats
    from sklearn import metrics

    scores, notes = dict[str, float](), list[str]()
    columns = [(truth[known, k], found[known, k]) for k, known in enumerate(np.isfinite(truth).T) if known.any()]
    if "mape" in names:
        if zeros := sum(int((true == 0).sum()) for true, _ in columns):
            notes.append(f"mape is left out, since it divides by the target, which is 0 in {zeros} of the answers")
        else:
            scores["mape"] = float(np.mean([metrics.mean_absolute_percentage_error(*column) for column in columns]))
    if "spearman" in names:
        constant = [bool(np.ptp(true) == 0 or np.ptp(said) == 0) for true, said in columns]
        ranks = [
            0.0 if flat else float(stats.spearmanr(*column).statistic)
            for flat, column in zip(constant, columns, strict=True)
        ]
        scores["spearman"] = float(np.mean(ranks))
        if any(constant):
            notes.append("answers or targets are constant, so that spearman is 0 by definition")
    return MetricValues(scores, tuple(notes))


# ------------------------------------------------------------------------------------------------- several labels a row


def of_labels(
    truth: NDArray[Any],
    probabilities: NDArray[np.float64],
    threshold: float = 0.5,
    names: Collection[str] | None = None,
) -> MetricValues:
    """Of K labels a row, each there (1), not there (0) or unknown (-1), and a probability of each: `macro`, the mean
    over labels, and `micro`, over all known entries at once. A label that no row has, or all have, is left out of the
    macro averages of auroc and auprc, and one that is never known out of all."""
    areas = ("auroc", "auprc")
    wanted = names or [f"{name}_{how}" for name in ("accuracy", "f1", "mcc", *areas) for how in ("macro", "micro")]
    known = truth != UNKNOWN
    scores, notes = dict[str, float](), list[str]()
    labels = [k for k in range(truth.shape[1]) if known[:, k].any()]
    entries = [(truth[known[:, k], k], probabilities[known[:, k], k]) for k in labels]
    flat = truth[known], probabilities[known]
    for name in wanted:
        base, _, how = name.rpartition("_")
        asked = entries if how == "macro" else [flat]
        each = [_of_label(base, true, p, threshold) for true, p in asked]
        defined = [score for score in each if score is not None]
        if defined:
            scores[name] = float(np.mean(defined))
        else:  # as of classes: no order to judge
            always = [float(true.all()) for true, _ in asked if base == "auprc" and len(true)]
            scores[name] = 0.5 if base == "auroc" else float(np.mean(always or [0.0]))
        if base in areas and len(defined) < len(each):
            alike = f"{len(each) - len(defined)} of {len(each)} labels are alike in all rows"
            what = f"left out of {name}" if defined else f"{name} is {scores[name]:g} by definition"
            notes.append(f"{alike}: {what}")
    return MetricValues(scores, tuple(notes))


def _of_label(name: str, truth: NDArray[Any], p: NDArray[np.float64], threshold: float) -> float | None:
    """None where it is not defined."""
    from sklearn import metrics

    said = (p >= threshold).astype(np.int64)
    if name in ("auroc", "auprc"):
        if len(np.unique(truth)) < 2:
            return None
        return float((metrics.roc_auc_score if name == "auroc" else metrics.average_precision_score)(truth, p))
    if name == "f1":
        return float(metrics.f1_score(truth, said, zero_division=0.0))
    if name == "mcc":
        return float(of_confusion(("mcc",), confusion_matrix(truth, said, 2), 1).scores["mcc"])
    return float(metrics.accuracy_score(truth, said))


# ------------------------------------------------------------------------------------------------------------ by groups


def groups_of(groups: NDArray[Any]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Each value, and the rows that have it, in the order of values."""
    values, inverse = np.unique(groups, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    ends = np.cumsum(np.bincount(inverse, minlength=len(values)))
    for value, rows in zip(values, np.split(order, ends[:-1]), strict=True):
        yield str(value), rows


def _and(names: Collection[str]) -> str:
    return " and ".join(names)
