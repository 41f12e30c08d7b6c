"""What came of it, in plain words: which model, which arm, by how much, how sure, and what would tell more.

The model is chosen on validation, where both arms of all models have scores, and its score is reported on test, which
played no part in that choice. One arm or model is called better than another only where the report's test, adjusted for
all comparisons, decides it; if it decides for the other arm of that model, test has chosen the arm.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from spt.report import stats
from spt.report.arms import MORE_DATA, Row
from spt.report.baselines import BaselineScore
from spt.report.collect import Report
from spt.report.format import (
    delta_text,
    interval_text,
    is_percent,
    score_interval_text,
    score_text,
    size_interval_text,
    size_text,
)
from spt.report.ranking import winner_loser
from spt.report.verdict import final_score, paired
from spt.runs.folder import RunFolder
from spt.runs.plan import ARMS
from spt.runs.result import Result

ARM = {"scratch": "trained from scratch", "spt": "with self-pretraining"}
MOST = 60  # seeds that anybody would run
COARSE = 0.02  # of the test rows is one row, where scores are coarse


@dataclass(frozen=True)
class Scored:
    """One arm of one model over its finished seeds."""

    model: str
    arm: str
    results: tuple[Result, ...]

    @property
    def metric(self) -> str:
        return self.results[0].metric

    @property
    def val(self) -> float:
        """Mean validation score, the larger the better."""
        scores = [result.val.get(result.metric, result.val.get(result.selected_by, 0.0)) for result in self.results]
        return fmean(scores) if self.results[0].higher_is_better else -fmean(scores)

    @property
    def test(self) -> stats.Paired:
        """Mean test score with its interval."""
        return paired(self.results, [final_score(result) for result in self.results])


@dataclass(frozen=True)
class Answer:
    words: str
    recommendation: dict[str, Any] | None  # None: whether self-pretraining helps is not decided
    leading: dict[str, Any] | None  # the best on validation, decided or not


def answer(report: Report, study: Path, folder: Path, planned_seeds: int, budget: str) -> Answer:
    """From the report of a study, and its folder. `folder` holds the recipes, for the commands that are named."""
    scored = _scored(report, study.parent)
    if not scored:
        return Answer("Not decided: no run has finished. The same command goes on.", None, None)
    enough = [each for each in scored if len(each.results) >= stats.FEWEST] or scored
    best = max(enough, key=lambda each: each.val)
    row = next(row for row in report.rows if row.model == best.model)
    arm = row.decision if row.decision in ARMS else None
    better = _models_beaten(report, best.model, arm or best.arm)
    others = [other.model for other in report.rows if other.model != best.model]
    chosen = next((each for each in scored if (each.model, each.arm) == (best.model, arm or best.arm)), best)
    simpler = _better_baseline(report)
    sentences = [
        *_without_network(simpler),
        *_verdict(row, chosen, arm, useful=simpler is None),
        *_of_others([other for other in report.rows if other is not row]),
        *_among_models(row, others, better),
        *(_against_baselines(report) if simpler is None else []),
        *_coarse(chosen),
        *_more(row, report, folder, planned_seeds, budget),
    ]
    leading = {"model": chosen.model, "arm": best.arm, **_interval(best)}
    recommendation = None
    if arm is not None:
        recommendation = {"model": best.model, "arm": arm, "model_decided": set(others) <= better, **_interval(chosen)}
        recommendation["better_baseline"] = simpler.baseline if simpler is not None else None
    return Answer(_called_right(" ".join(sentences), report), recommendation, leading)


def _called_right(words: str, report: Report) -> str:
    """Pretraining on more than the training split is not called self-pretraining."""
    if not any(row.not_self_pretraining for row in report.rows):
        return words
    words = words.replace("SPT - scratch", f"{MORE_DATA} - scratch")
    return words.replace("self-pretraining", MORE_DATA).replace("Self-pretraining", MORE_DATA.capitalize())


def _scored(report: Report, root: Path) -> list[Scored]:
    found = []
    for row in report.rows:
        for arm in ARMS:
            done = [seed for seed in row.seeds if getattr(seed, f"{arm}_state") == "done"]
            read = [(RunFolder(root, getattr(seed, f"{arm}_run")).result(), seed.split) for seed in done]
            results = [result.model_copy(update={"split": split}) for result, split in read if result is not None]
            if results:
                found.append(Scored(row.model, arm, tuple(results)))
    return found


def _interval(scored: Scored) -> dict[str, Any]:
    test = scored.test
    seeds = len({result.seed for result in scored.results}) if test.test_share else test.n
    splits = {"splits": test.n} if test.test_share else {}
    return {"metric": scored.metric, "test": test.mean, "low": test.low, "high": test.high, "seeds": seeds, **splits}


def _models_beaten(report: Report, model: str, arm: str) -> set[str]:
    pairs = [
        pair
        for comparison in report.models
        for contrast in comparison.contrasts
        if contrast.arm == arm and (pair := winner_loser(contrast))
    ]
    return {loser for winner, loser in pairs if winner == model}


def _better_baseline(report: Report) -> BaselineScore | None:
    """The best of the baselines that are shown to beat every network, in its better arm."""
    for comparison in report.baselines:
        shown = [contrast for contrast in comparison.contrasts if contrast.shown]
        for score in comparison.scores:  # the best first
            decisions = [contrast.decision for contrast in shown if contrast.baseline == score.baseline]
            if decisions and all(decision == "second" for decision in decisions):
                return score
    return None


def _without_network(simpler: BaselineScore | None) -> list[str]:
    if simpler is None:
        return []
    percent = " %" if is_percent(simpler.metric) else ""
    score = f"test {simpler.metric} {score_text(simpler.score, simpler.metric)}{percent}"
    return [
        f"Use no network trained like these: {simpler.title} ({simpler.sees}) has {score} without one, and beats each "
        "of them in the better of its arms, which is decided."
    ]


def _verdict(row: Row, chosen: Scored, arm: str | None, useful: bool) -> list[str]:
    """Does self-pretraining help the model that validation chose? `useful`: is that model better than none?"""
    metric, unit = row.metric, _unit(row.metric)
    score = f"{chosen.model}, {ARM[chosen.arm]}, has test {_metric_text(chosen)}"
    if arm is not None:
        better, worse = (ARM["spt"], "training from scratch") if arm == "spt" else (ARM[arm], "self-pretraining")
        use = f"Use {chosen.model} {better}" if useful else f"Of the networks, {chosen.model} is better {better}"
        return [
            f"{use}: it beats {worse} by {size_text(row.delta, metric)}{unit} (95 % interval "
            f"{size_interval_text(row.low, row.high, metric)}, {_count(row)}), which is decided.",
            f"{score}.",
        ]
    if _repeats(row) >= stats.FEWEST and all(seed.delta == 0 for seed in row.seeds if seed.delta is not None):
        return [
            f"Self-pretraining changes nothing for {chosen.model}: both arms score the same at each of {_count(row)}.",
            f"{score}.",
        ]
    if row.splits is not None and row.splits < stats.FEWEST:
        return [
            f"Not decided: there are {_count(row)}, and fewer than three splits decide nothing; {_seen(row)}.",
            f"{score}.",
        ]
    if row.decision == "too few seeds" or row.n < stats.FEWEST:
        seeds = f"{row.n} complete {'pair' if row.n == 1 else 'pairs'} of runs" if row.n else "no complete pair of runs"
        seen = f"; in {'it' if row.n == 1 else 'them'} {_seen(row)}" if row.delta is not None else ""
        return [f"Not decided: {chosen.model} has {seeds}, and fewer than three decide nothing{seen}.", f"{score}."]
    interval = interval_text(row.low, row.high, metric)
    alone = (
        " It would be decided by itself, but not among all comparisons made here." if "alone" in row.decision else ""
    )
    return [
        f"Whether self-pretraining helps {chosen.model} is not decided: {_seen(row)} (95 % interval {interval}, "
        f"{_count(row)}).{alone}",
        f"{score}.",
    ]


def _repeats(row: Row) -> int:
    """What the interval is made over."""
    return row.n if row.splits is None else row.splits


def _count(row: Row) -> str:
    if row.splits is None:
        return f"{row.n} seeds"
    seeds = len({seed.seed for seed in row.seeds})
    return f"{row.splits} splits of the rows, {seeds} {'seed' if seeds == 1 else 'seeds'} on each"


def _seen(row: Row) -> str:
    lower = "" if row.higher_is_better else ", where lower is better"
    return f"SPT - scratch is {delta_text(row.delta, row.metric)}{_unit(row.metric)}{lower}"


def _metric_text(scored: Scored) -> str:
    test = scored.test
    percent = " %" if is_percent(scored.metric) else ""
    interval = ""
    if test.low is not None and test.high is not None and test.deviation:
        interval = f", 95 % interval {score_interval_text(test.low, test.high, scored.metric)}"
    seeds = f"{test.n} {'split' if test.test_share else 'seed'}{'s' if test.n > 1 else ''}"
    return f"{scored.metric} {score_text(test.mean, scored.metric)}{percent} ({seeds}{interval})"


def _among_models(row: Row, others: Sequence[str], beaten: set[str]) -> list[str]:
    if not others:
        return []
    equal = [name for name in others if name not in beaten]
    if not equal:
        return [f"It is better than {_listed(sorted(beaten))}, which is decided too."]
    worse = f"it is better than {_listed(sorted(beaten))}, but " if beaten else ""
    return [
        f"Which model is best is not decided: {row.model} is chosen by its validation scores; {worse}"
        f"{_listed(equal)} {'is' if len(equal) == 1 else 'are'} not shown to be worse."
    ]


def _of_others(rows: Sequence[Row]) -> list[str]:
    """What is decided of self-pretraining the models that validation did not choose."""
    decided = [row for row in rows if row.decision in ARMS]
    effects = [
        f"{'helps' if row.decision == 'spt' else 'hurts'} {row.model} by {size_text(row.delta, row.metric)}"
        f"{_unit(row.metric)}"
        for row in decided
    ]
    return [f"Of the others, self-pretraining {_listed(effects)}, which is decided."] if effects else []


def _against_baselines(report: Report) -> list[str]:
    """Does any network beat what needs none?"""
    return [f"Without a network: {_closed(each.verdict)}" for each in report.baselines]


def _closed(sentence: str) -> str:
    return f"{sentence[0]}{sentence[1:]}" + "." * (not sentence.endswith("."))


def _coarse(chosen: Scored) -> list[str]:
    data = chosen.results[0].data
    rows = data["test"].rows if "test" in data else 0
    if not rows or not is_percent(chosen.metric) or 1 / rows < COARSE or chosen.test.test_share:
        return []
    return [
        f"The test split has {rows} rows, so one of them is {size_text(1 / rows, chosen.metric)} points: intervals are "
        "over seeds, and other rows could say something else."
    ]


def _more(row: Row, report: Report, folder: Path, planned_seeds: int, budget: str) -> list[str]:
    """What would tell more."""
    hints = []
    missing = sum(failure.state == "missing" for each in report.rows for failure in each.failures)
    failed = sum(failure.state != "missing" for _, failure in report.failures)
    if missing:
        runs = "run was" if missing == 1 else "runs were"
        hints.append(f"The budget ended before {missing} {runs} made; the same command makes them.")
    if failed:
        hints.append(f"{failed} {'run' if failed == 1 else 'runs'} failed; the report says why.")
    study, where = shlex.quote(str(folder / "study.yaml")), f"--out {shlex.quote(str(folder / 'runs'))}"
    needed = seeds_needed([seed.delta for seed in row.seeds if seed.delta is not None])
    if row.splits is not None:
        if row.decision == "open" and any(seed.delta for seed in row.seeds):
            hints.append(
                "More seeds or folds of the same rows would narrow this little, since they share what they train on; "
                "more rows would."
            )
    elif planned_seeds < stats.FEWEST:
        hints.append(f"Three seeds at least are needed: --budget {budget} with another --out has them.")
    elif row.decision not in ARMS and not missing and needed is not None and needed > row.n:
        hints.append(
            f"About {needed} seeds would show a difference of this size: spt study run {study} --seeds {needed} {where}"
        )
    elif row.decision == "open" and any(seed.delta for seed in row.seeds) and needed is None:
        hints.append("A difference as small as this one would take more seeds than are worth it.")
    perfect = row.higher_is_better and row.scratch == row.spt == 1.0
    arms = [arm for arm in (row.scratch_arm, row.spt_arm) if arm]
    if 2 * sum(arm.best_at_end for arm in arms) > sum(arm.runs for arm in arms) and not perfect:
        hints.append("Most runs were best at their last step, so longer training (a larger --budget) may change this.")
    recipe = shlex.quote(str(folder / f"{row.recipe}.yaml"))
    hints.append(
        f"Whether more data would help: spt study data {recipe} --fractions 0.25,0.5,1 --seeds {stats.FEWEST} {where}"
    )
    return hints


def seeds_needed(differences: Sequence[float]) -> int | None:
    """Pairs with which a true difference as large as the mean seen is found in four of five cases; None for too many,
    or where there is no spread to judge by."""
    if len(differences) < 2:
        return None
    test = stats.paired(differences)
    if not test.deviation:
        return None
    for n in range(stats.FEWEST, MOST + 1):
        smallest = stats.smallest_detectable(n, test.deviation)
        if smallest is not None and smallest <= abs(test.mean):
            return n
    return None


def _unit(metric: str) -> str:
    return " points" if is_percent(metric) else f" in {metric}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
