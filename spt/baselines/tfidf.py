"""TF-IDF of token n-grams with logistic regression, of labels with one for each; of real targets with ridge regression.

Small vocabularies are characters, bytes, bases: all n-grams of 1 to 5 tokens. Large ones are words or pieces of words:
1 and 2. N-grams are hashed, so that memory does not grow with what is found; those of one training row alone are left
out. Term frequencies are 1 + ln(count), inverse document frequencies ln((1 + n) / (1 + df)) + 1, rows of length 1, as
in scikit-learn's TfidfVectorizer(sublinear_tf=True, min_df=2).

Letters: n training rows, m others, L steps, F features, K classes or target values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spt.baselines.base import (
    CHOOSING,
    Baseline,
    Examples,
    Fitted,
    Query,
    cap_note,
    drawn,
    only_rows,
    refuse_one_class,
    two_classes,
)
from spt.baselines.classifiers import UNFINISHED, Answers, fit_logistic
from spt.baselines.scores import ComparedMetric, is_better, score
from spt.data.features import CUT, joined_name, spans
from spt.rng import GOLDEN, mixed
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens

CHARACTERS = 1_024  # entries of a vocabulary up to which tokens are taken for characters
GRAMS = 2**27  # n-grams of training rows that are counted
WEIGHTS = 2**21  # of logistic regression, at most: its optimiser keeps twenty such arrays
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1_000.0)  # C of logistic regression, 1 / penalty of ridge regression


def applies(data: TaskData) -> str | None:
    if not isinstance(data.input, Tokens):
        return "it counts tokens, and here inputs are numbers"
    return only_rows(data) or two_classes(data)


def fit(data: TaskData, metric: ComparedMetric, seed: int) -> Fitted:
    """The strength with the best validation score; of equals the smallest."""
    counts = _Counts(data)
    train, val = _drawn(data, counts.longest), drawn(data.val, CHOOSING, "val")
    refuse_one_class(data.target, train)
    found = counts.of(train.asked)
    terms = _Terms(found)
    x, x_val = _beside(terms.of(found), train.asked), _beside(terms.of(counts.of(val.asked)), val.asked)
    best, chosen, decide, notes = None, STRENGTHS[0], None, list[str]()
    for strength in STRENGTHS:
        tried, finished = _fitted(data, x, train.targets, strength)
        reached = score(data.target, val.targets, tried(x_val), metric)
        if is_better(reached, best, metric):
            best, chosen, decide = reached, strength, tried
            notes = [] if finished else [UNFINISHED]
    assert decide is not None

    def answer(asked: Query) -> NDArray[np.float64]:
        return decide(_beside(terms.of(counts.of(asked)), asked))

    rows = len(train.asked.rows)
    name = joined_name(f"n-grams of 1 to {counts.longest} tokens, by TF-IDF", data.train)
    settings = {"1 / penalty" if isinstance(data.target, Reals) else "C": chosen}
    return Fitted(answer, name, rows, settings, len(STRENGTHS), (*cap_note(rows, data.train), *notes))


def _drawn(data: TaskData, longest: int) -> Examples:
    """As many training rows as have so many n-grams."""
    mean = float(np.minimum(data.train.lengths, CUT * data.train.sequences).mean())
    return drawn(data.train, max(1, int(GRAMS / (mean * longest))), "train")


class _Counts:
    """Counts of hashed n-grams."""

    def __init__(self, data: TaskData) -> None:
        assert isinstance(data.input, Tokens)
        self.input = data.input
        self.longest = 5 if data.input.vocab <= CHARACTERS else 2
        columns = data.target.count if isinstance(data.target, Classes) and data.target.count > 2 else 1
        each = WEIGHTS // (columns * (4 if data.train.sequences == 2 else 2))
        self.features = 2 ** max(10, each.bit_length() - 1)

    def of(self, asked: Query) -> list[Any]:
        """(m, F) of the sequences; of pairs one for the first ones, one for the second."""
        return [self._matrix(asked.split, *ends) for ends in spans(asked.split, asked.rows)]

    def _matrix(self, split: Split, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Any:
        from scipy.sparse import csr_matrix

        rows = [self._row(split, *ends) for ends in zip(starts.tolist(), stops.tolist(), strict=True)]
        places, counts = zip(*rows, strict=True)
        ends = np.concatenate([[0], np.cumsum([len(each) for each in places])])
        whole = (np.concatenate(counts), np.concatenate(places), ends)
        return csr_matrix(whole, shape=(len(rows), self.features))

    def _row(self, split: Split, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Features of a sequence, and how often each is there."""
        tokens = self.input.ids(np.asarray(split.values[start : min(stop, start + CUT)])).astype(np.uint64)
        with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
            letters = (tokens + np.uint64(1)) * GOLDEN
            grams, found = np.zeros(len(letters), np.uint64), []
            for length in range(min(self.longest, len(letters))):
                whole = len(letters) - length
                grams = mixed(grams[:whole] * np.uint64(31) + letters[length:])
                found.append(grams % np.uint64(self.features))
        places, counts = np.unique(np.concatenate(found), return_counts=True)
        return places.astype(np.int32), counts.astype(np.float32)


class _Terms:
    """TF-IDF, as training rows weigh it."""

    def __init__(self, training: list[Any]) -> None:
        from scipy.sparse import vstack
        from sklearn.feature_extraction.text import TfidfTransformer

        counts = vstack(training, format="csr")
        grams, rows = np.unique(counts.indices, return_counts=True)  # that have each of them
        self.kept = grams[rows >= min(2, rows.max())]
        self.weights = TfidfTransformer(sublinear_tf=True).fit(counts[:, self.kept])

    def of(self, sides: list[Any]) -> Any:
        """(m, F) of sequences; of pairs (m, 4 F): of both, their distances and their products."""
        from scipy.sparse import hstack

        found = [self.weights.transform(side[:, self.kept]) for side in sides]
        if len(found) == 1:
            return found[0]
        first, second = found
        return hstack([first, second, abs(first - second), first.multiply(second)], format="csr")


def _beside(x: Any, asked: Query) -> Any:
    """(m, F) With the static features of the rows."""
    from scipy.sparse import csr_matrix, hstack

    static = asked.split.static
    return x if static is None else hstack([x, csr_matrix(np.asarray(static[asked.rows], x.dtype))], format="csr")


def _fitted(data: TaskData, x: Any, targets: NDArray[Any], strength: float) -> tuple[Answers, bool]:
    """What gives (m, K) answers to (m, F) features, and whether its training came to an end."""
    from sklearn.linear_model import Ridge

    if isinstance(data.target, Reals):
        return _of_numbers(Ridge(alpha=1 / strength, solver="sparse_cg").fit(x, targets)), True
    return fit_logistic(data.target, x, targets, strength)


def _of_numbers(model: Any) -> Answers:
    def decide(rows: Any) -> NDArray[np.float64]:
        found: NDArray[np.float64] = model.predict(rows).reshape(rows.shape[0], -1).astype(np.float64)
        return found

    return decide


BASELINE = Baseline(
    "tfidf",
    "TF-IDF with logistic regression",
    "TF-IDF with ridge regression",
    2,
    chance=False,
    probabilities=True,
    applies=applies,
    fit=fit,
)
