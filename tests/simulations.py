"""How often the statistics of models err when the truth is known.

`python tests/simulations.py` prints the table of docs/statistics.md; the suite repeats it with fewer draws.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from records import FINETUNING, SPLITS

from spt.report.arms import Comparison, compare_arms
from spt.report.models import compare_models
from spt.report.per_example import ExampleScores, row_interval
from spt.report.ranking import ModelComparison, changes_ranking, pairs_of, winner_loser
from spt.report.stats import average, friedman, holm, wilcoxon
from spt.runs.index import ComparisonRuns
from spt.runs.plan import ARMS, Place, StudyRow
from spt.runs.result import Result

SPREAD = 0.02  # of scores over seeds
MODELS = ("a", "b", "c")


class Simulation(NamedTuple):
    """Something that a report claims, and how often the claim is wrong."""

    name: str
    nominal: str
    rate: Callable[[int, int], float]  # of n seeds (or tasks) and this many draws


def comparison(model: str, scratch: Sequence[float], spt: Sequence[float]) -> Comparison:
    """A row of a report with these scores by seed, made without files."""
    seeds = tuple(range(len(scratch)))
    runs = ComparisonRuns(Path("simulated"), StudyRow(name=model, task="t", model=model), "s", seeds, ())
    base = compare_arms(runs)
    outcomes = {
        (Place(seed), arm): _result(model, arm, seed, score)
        for arm, scores in zip(ARMS, (scratch, spt), strict=True)
        for seed, score in enumerate(scores)
    }
    row = base.row.model_copy(update={"metric": "accuracy", "higher_is_better": True, "label": model})
    return base._replace(outcomes=outcomes, row=row)


def _result(model: str, arm: str, seed: int, score: float) -> Result:
    return Result.model_construct(
        key=f"{model}{arm}{seed}", seed=seed, metric="accuracy", higher_is_better=True, test={"accuracy": score},
        parameters={"total": 1}, own=FINETUNING, data=SPLITS,
    )  # fmt: skip


def reports(n: int, draws: int, means: dict[str, tuple[float, float]]) -> list[ModelComparison]:
    """Comparisons of models with these true means of scratch and SPT; seeds shift all of a seed's runs together."""
    rng = np.random.default_rng([n, draws])
    made = []
    for _ in range(draws):
        shared = rng.normal(0, SPREAD, n)
        scores = {
            model: [np.asarray(mean) + shared + rng.normal(0, SPREAD, n) for mean in both]
            for model, both in means.items()
        }
        made += compare_models(
            [{model: comparison(model, *(runs.tolist() for runs in both)) for model, both in scores.items()}]
        )
    return made


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def any_false_contrast(n: int, draws: int) -> float:
    """Three equal models: any of the six contrasts within arms is decided."""
    every = reports(n, draws, dict.fromkeys(MODELS, (0.8, 0.9)))
    return _share([any(c.arm != "difference" and winner_loser(c) for c in one.contrasts) for one in every])


def false_split(n: int, draws: int) -> float:
    """Three equal models: the ranking of either arm splits."""
    every = reports(n, draws, dict.fromkeys(MODELS, (0.8, 0.9)))
    return _share([any(len(ranking.order) > 1 for ranking in one.rankings) for one in every])


def false_interaction(n: int, draws: int) -> float:
    """Three models of different scores that gain the same: any interaction is decided."""
    every = reports(n, draws, {"a": (0.85, 0.9), "b": (0.8, 0.85), "c": (0.75, 0.8)})
    return _share([any(winner_loser(pair.interaction) for pair in pairs_of(one)) for one in every])


# a leads by 4.5 points in both arms: nothing changes.
STEADY = {"a": (0.845, 0.845), "b": (0.8, 0.8)}


def false_change(n: int, draws: int) -> float:
    """One model leads by the same in both arms: that self-pretraining changes the ranking is claimed."""
    return _share([any(map(changes_ranking, pairs_of(one))) for one in reports(n, draws, STEADY)])


# The lead of a shrinks from 5 points to 1.
SHRINKING = {"a": (0.85, 0.81), "b": (0.8, 0.8)}


def shrinking_change(n: int, draws: int) -> float:
    """The lead shrinks to a fifth: that self-pretraining changes the ranking is claimed."""
    return _share([any(map(changes_ranking, pairs_of(one))) for one in reports(n, draws, SHRINKING)])


def naive_change(n: int, draws: int) -> float:
    """The same truth, by the rule that is not used: one arm is decided and the other is not."""
    every = [[one.contrasts[0], one.contrasts[1]] for one in reports(n, draws, STEADY)]
    return _share([len({bool(winner_loser(contrast)) for contrast in arms}) > 1 for arms in every])


def intervals_missed(n: int, draws: int) -> float:
    """Adjusted intervals of three interactions do not all hold their truths."""
    means = {"a": (0.85, 0.9), "b": (0.8, 0.87), "c": (0.75, 0.9)}
    gains = {model: spt - scratch for model, (scratch, spt) in means.items()}

    def held(one: ModelComparison) -> bool:
        contrasts = [pair.interaction for pair in pairs_of(one)]
        return all(
            c.adjusted_low is not None and c.adjusted_high is not None
            and c.adjusted_low <= gains[c.first] - gains[c.second] <= c.adjusted_high
            for c in contrasts
        )  # fmt: skip

    return 1 - _share([held(one) for one in reports(n, draws, means)])


def average_missed(n: int, draws: int) -> float:
    """The interval of a task average, six tasks of unequal spread, does not hold the truth."""
    rng = np.random.default_rng([n, draws, 6])
    spreads = SPREAD * np.array([0.2, 0.5, 1, 1, 2, 4])
    missed = []
    for _ in range(draws):
        one = average([rng.normal(0.8, spread, n).tolist() for spread in spreads])
        assert one.low is not None and one.high is not None
        missed.append(not one.low <= 0.8 <= one.high)
    return _share(missed)


def false_friedman(n: int, draws: int) -> float:
    """Four equal models over n tasks: Friedman's p is at most 0.05."""
    tables = np.random.default_rng([n, draws, 4]).normal(size=(draws, n, 4)).tolist()
    return _share([(friedman(table) or 1) <= 0.05 for table in tables])


def false_wilcoxon(n: int, draws: int) -> float:
    """Four equal models over n tasks: any of six pairs differs by Wilcoxon's test after Holm."""
    tables = np.random.default_rng([n, draws, 5]).normal(size=(draws, n, 4))

    def any_decided(table: NDArray[np.float64]) -> bool:
        p = [wilcoxon((table[:, i] - table[:, j]).tolist()) for i, j in combinations(range(4), 2)]
        return any(value is not None and value <= 0.05 for value in holm(p))

    return _share([any_decided(table) for table in tables])


def rows_missed(n: int, draws: int) -> float:
    """The interval over 300 test rows of a difference, mean over n seeds, does not hold that of all rows."""
    rng = np.random.default_rng([n, draws, 300])
    missed = []
    for _ in range(draws):
        right = rng.random((2, n, 300)) < np.array([0.7, 0.8])[:, None, None]
        first, second = ([_examples(run) for run in model] for model in right)
        interval = row_interval([((b,), (a,)) for a, b in zip(first, second, strict=True)])
        assert interval.low is not None and interval.high is not None
        missed.append(not interval.low <= 0.1 <= interval.high)
    return _share(missed)


def _examples(right: NDArray[Any]) -> ExampleScores:
    ids = np.arange(len(right))
    return ExampleScores(ids, frozenset(), "accuracy", right.astype(float), None, np.zeros((len(right), 1)))


SIMULATIONS = (
    Simulation("any contrast decided within arms, three equal models", "at most 5 %", any_false_contrast),
    Simulation("a ranking splits, three equal models", "at most 5 %", false_split),
    Simulation("any interaction decided, three models that gain the same", "at most 5 %", false_interaction),
    Simulation("a change of ranking claimed, the lead is the same in both arms", "at most 5 %", false_change),
    Simulation("… the lead shrinks from 5 points to 1 (spread 2 points)", "-", shrinking_change),
    Simulation("… by 'one arm decided, the other not' (not used), same lead", "-", naive_change),
    Simulation("adjusted intervals of three interactions miss a truth", "at most 5 %", intervals_missed),
    Simulation("interval of a task average misses the truth, six unequal tasks", "5 %", average_missed),
    Simulation("interval over 300 test rows misses the truth", "5 %", rows_missed),
    Simulation("Friedman p ≤ 0.05, four equal models, n tasks", "at most 5 %", false_friedman),
    Simulation("any pair by Wilcoxon after Holm, four equal models, n tasks", "at most 5 %", false_wilcoxon),
)


def table(draws: int) -> str:
    """The table of docs/statistics.md."""
    lines = ["| claim | should be | n = 3 | n = 5 | n = 10 |", "|---|---|---:|---:|---:|"]
    for simulation in SIMULATIONS:
        rates = [f"{100 * simulation.rate(n, draws):.1f} %" for n in (3, 5, 10)]
        lines.append(f"| {simulation.name} | {simulation.nominal} | {' | '.join(rates)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(2000) + "\n")
