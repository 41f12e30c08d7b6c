"""The choice of a search: the best setting on validation, by the same rule in both arms. Reads files only."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from spt.config.recipe import LOWER_IS_BETTER
from spt.runs.index import Failure, run_outcome
from spt.runs.plan import ARMS, ArmName, PlannedSearch, PlannedTrial, arm_text
from spt.runs.result import Result

UNFINISHED = ("missing", "running", "stopped")  # to be run or continued; every other state uses up the trial


class ScoredSetting(NamedTuple):
    """A setting in one arm. It has no score unless every seed has one."""

    number: int
    score: float | None  # mean over seeds of the validation metric that picks checkpoints
    loss: float | None  # and of the validation loss, which breaks ties
    done: int
    failed: int
    missing: int  # not run yet, running or stopped: may still finish


def scored_settings(root: Path, search: PlannedSearch, arm: ArmName) -> list[ScoredSetting]:
    """Every setting of an arm, by number."""
    return [
        _tried(root, i, [t for t in search.trials if (t.arm, t.number) == (arm, i)])
        for i in range(len(search.settings[arm]))
    ]


def _tried(root: Path, number: int, trials: Sequence[PlannedTrial]) -> ScoredSetting:
    outcomes = [trial_result(root, trial) for trial in trials]
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    missing = sum(isinstance(outcome, Failure) and outcome.state in UNFINISHED for outcome in outcomes)
    score, loss = None, None
    if results and len(results) == len(trials):
        score = fmean(result.val[result.selected_by] for result in results)
        loss = fmean(result.val["loss"] for result in results)
    return ScoredSetting(number, score, loss, len(results), len(trials) - len(results) - missing, missing)


def trial_result(root: Path, trial: PlannedTrial) -> Result | Failure:
    """A trial's result, if it is the planned one and has a finite validation score."""
    outcome = run_outcome(root, trial.run, trial.parent)
    if isinstance(outcome, Failure):
        return outcome
    if (outcome.stage, outcome.seed) != ("finetune", trial.seed):
        reason = f"the folder holds a {outcome.stage} run with seed {outcome.seed}"
    elif validation_score(outcome, outcome.selected_by) is None:
        reason = f"its result has no finite validation {outcome.selected_by}"
    else:
        return outcome
    return Failure(run=trial.run, state="unusable", reason=reason)


def validation_score(result: Result, metric: str) -> float | None:
    """The validation score of the selected checkpoint, if it is finite."""
    value = result.val.get(metric)
    return value if value is not None and math.isfinite(value) else None


def search_metric(root: Path, search: PlannedSearch) -> str:
    """The metric that trials are chosen by; empty where none has finished."""
    for trial in search.trials:
        if isinstance(outcome := run_outcome(root, trial.run), Result):
            return outcome.selected_by
    return ""


def has_pending_trials(root: Path, search: PlannedSearch) -> bool:
    """Are there trials that may still finish?"""
    return any(setting.missing for arm in ARMS for setting in scored_settings(root, search, arm))


def select_settings(root: Path, search: PlannedSearch) -> dict[ArmName, int] | str:
    """The best setting of each arm, or why there is none yet: every trial must have ended."""
    lower, chosen = LOWER_IS_BETTER.get(search_metric(root, search), True), dict[ArmName, int]()
    for arm in ARMS:
        settings = scored_settings(root, search, arm)
        if missing := sum(setting.missing for setting in settings):
            return f"{missing} trials of {arm_text(arm)} are not finished"
        scored = [setting for setting in settings if setting.score is not None and setting.loss is not None]
        if not scored:
            return f"no setting of {arm_text(arm)} has a validation score"
        best = min(scored, key=lambda each: ((each.score if lower else -each.score), each.loss, each.number))  # type: ignore[operator]
        chosen[arm] = best.number
    return chosen
