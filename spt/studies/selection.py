"""Which setting of a search is chosen: the best on validation, by the same rule in both arms. Reads files only."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from spt.config.recipe import LOWER_IS_BETTER
from spt.runs.index import Failure, run_outcome
from spt.runs.plan import ARMS, ArmName, PlannedSearch, PlannedTrial, arm_text
from spt.runs.result import Result

UNFINISHED = ("missing", "running", "stopped")  # to be run, or to be continued; the others used up their trial


class ScoredSetting(NamedTuple):
    """A setting in one arm. Without a score, some seed of it has ended without one or is not there yet."""

    number: int
    score: float | None  # mean over seeds of the validation metric that picks checkpoints
    loss: float | None  # and of the validation loss, which breaks ties
    done: int
    failed: int
    missing: int  # not run yet, running, or stopped: it may still come


def scored_settings(root: Path, search: PlannedSearch, arm: ArmName) -> list[ScoredSetting]:
    """Every setting of an arm, by number."""
    return [
        _tried(root, i, [t for t in search.trials if (t.arm, t.number) == (arm, i)])
        for i in range(len(search.settings))
    ]


def _tried(root: Path, number: int, trials: Sequence[PlannedTrial]) -> ScoredSetting:
    found = [trial_result(root, trial) for trial in trials]
    results = [one for one in found if isinstance(one, Result)]
    missing = sum(isinstance(one, Failure) and one.state in UNFINISHED for one in found)
    score, loss = None, None
    if results and len(results) == len(trials):
        score = fmean(result.val[result.selected_by] for result in results)
        loss = fmean(result.val["loss"] for result in results)
    return ScoredSetting(number, score, loss, len(results), len(trials) - len(results) - missing, missing)


def trial_result(root: Path, trial: PlannedTrial) -> Result | Failure:
    """A trial's result if it is the one that was planned and has a finite validation score."""
    found = run_outcome(root, trial.run, trial.parent)
    if isinstance(found, Failure):
        return found
    if (found.stage, found.seed) != ("finetune", trial.seed):
        reason = f"the folder holds a {found.stage} run with seed {found.seed}"
    elif validation_score(found, found.selected_by) is None:
        reason = f"its result has no finite validation {found.selected_by}"
    else:
        return found
    return Failure(run=trial.run, state="unusable", reason=reason)


def validation_score(result: Result, metric: str) -> float | None:
    """The validation score of the selected checkpoint, if it is a number."""
    value = result.val.get(metric)
    return value if value is not None and math.isfinite(value) else None


def search_metric(root: Path, search: PlannedSearch) -> str:
    """What the trials are judged by; nothing where none is finished."""
    for trial in search.trials:
        if isinstance(found := run_outcome(root, trial.run), Result):
            return found.selected_by
    return ""


def has_pending_trials(root: Path, search: PlannedSearch) -> bool:
    """Are there trials that may still come?"""
    return any(one.missing for arm in ARMS for one in scored_settings(root, search, arm))


def select_settings(root: Path, search: PlannedSearch) -> dict[ArmName, int] | str:
    """The best setting of each arm, or why there is none yet: every setting must have had its try."""
    lower, found = LOWER_IS_BETTER.get(search_metric(root, search), True), dict[ArmName, int]()
    for arm in ARMS:
        settings = scored_settings(root, search, arm)
        if missing := sum(one.missing for one in settings):
            return f"{missing} trials of {arm_text(arm)} are not done yet"
        scored = [one for one in settings if one.score is not None and one.loss is not None]
        if not scored:
            return f"no setting of {arm_text(arm)} has a score on validation"
        best = min(scored, key=lambda one: ((one.score if lower else -one.score), one.loss, one.number))  # type: ignore[operator]
        found[arm] = best.number
    return found
