"""What a search for settings tried in each arm, and what it chose, by validation scores alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from spt.config.recipe import LOWER_IS_BETTER
from spt.report.stats import expected_best
from spt.runs.index import Failure
from spt.runs.plan import (
    ARMS,
    ArmName,
    Ended,
    Factor,
    PlannedSearch,
    PlannedTrial,
    Record,
    StudyPlan,
    StudyRow,
    arm_text,
    factors_text,
)
from spt.runs.result import Result
from spt.studies.selection import UNFINISHED, trial_result, validation_score

Setting = dict[str, Factor]


class TrialResult(Record):
    """One trial: a setting in one arm with one seed."""

    arm: ArmName
    number: int  # of the setting
    seed: int
    setting: Setting
    value: float | None  # the validation score of its selected checkpoint
    state: Ended | Literal["done"]
    run: str


class ExpectedBest(Record):
    """Expected best validation score of this many settings, drawn without replacement."""

    settings: int
    value: float


class SearchArm(Record):
    settings: int  # planned
    trials: int  # planned: settings times seeds
    done: int  # trials with a result
    lost: int  # trials that ended without one: diverged, failed; they count as trials
    chosen: int | None
    setting: Setting | None
    value: float | None  # the chosen setting's validation score, mean over its seeds
    edges: tuple[str, ...]  # numeric settings whose chosen value is the smallest or largest tried
    expected: tuple[ExpectedBest, ...]  # of 1, 2, 4, … and all finished settings


class SearchResult(Record):
    """A search of a tuning study: the same settings in both arms."""

    study: str
    label: str
    task: str
    model: str
    recipe: str
    metric: str  # on validation
    higher_is_better: bool
    space: dict[str, tuple[Factor, ...]]
    scratch: SearchArm
    spt: SearchArm
    trials: tuple[TrialResult, ...]
    failures: tuple[Failure, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def search_results(folder: Path, plan: StudyPlan) -> list[SearchResult]:
    rows = [plan.rows[search.row] for search in plan.searches]
    labels = [f"{row.task} / {row.model}" for row in rows]
    return [
        _search_result(folder, search, row, f"{label}, {row.name}" if labels.count(label) > 1 else label)
        for search, row, label in zip(plan.searches, rows, labels, strict=True)
    ]


def _search_result(folder: Path, search: PlannedSearch, row: StudyRow, label: str) -> SearchResult:
    outcomes = {trial: trial_result(folder.parent, trial) for trial in search.trials}
    results = {trial: outcome for trial, outcome in outcomes.items() if isinstance(outcome, Result)}
    first = next(iter(results.values()), None)
    metric = first.selected_by if first else ""
    values = {trial: validation_score(result, metric) for trial, result in results.items()}
    trials = SearchTrials(search, outcomes, values, _higher_is_better(first) if first else True)
    arms = {arm: trials.arm(arm) for arm in ARMS}
    return SearchResult(
        study=folder.name,
        label=label,
        task=row.task,
        model=row.model,
        recipe=row.name,
        metric=metric,
        higher_is_better=trials.higher_is_better,
        space=search.space,
        scratch=arms["scratch"],
        spt=arms["spt"],
        trials=tuple(
            TrialResult(
                arm=trial.arm,
                number=trial.number,
                seed=trial.seed,
                setting=_setting(search, trial.number) or {},
                value=values.get(trial),
                state=_state(outcome),
                run=trial.run,
            )
            for trial, outcome in outcomes.items()
        ),
        failures=tuple(
            outcome.model_copy(
                update={
                    "arm": trial.arm,
                    "seed": trial.seed,
                    "reason": f"trial of setting {trial.number}: {outcome.reason}",
                }
            )
            for trial, outcome in outcomes.items()
            if isinstance(outcome, Failure)
        ),
        warnings=tuple(_warnings(trials, arms, sorted({result.selected_by for result in results.values()}))),
        notes=tuple(_notes(arms)),
    )


def _higher_is_better(result: Result) -> bool:
    if result.selected_by == result.metric:
        return result.higher_is_better
    return not LOWER_IS_BETTER.get(result.selected_by, True)


def _state(outcome: Result | Failure) -> Ended | Literal["done"]:
    return outcome.state if isinstance(outcome, Failure) else "done"


def _setting(search: PlannedSearch, number: int | None) -> Setting | None:
    return search.settings[number] if number is not None and 0 <= number < len(search.settings) else None


class SearchTrials(NamedTuple):
    """The trials of one search and how they ended."""

    search: PlannedSearch
    outcomes: Mapping[PlannedTrial, Result | Failure]
    values: Mapping[PlannedTrial, float | None]  # validation scores of the finished trials
    higher_is_better: bool

    def by_setting(self, arm: ArmName) -> dict[int, list[PlannedTrial]]:
        settings: dict[int, list[PlannedTrial]] = {}
        for trial in self.search.trials:
            if trial.arm == arm:
                settings.setdefault(trial.number, []).append(trial)
        return dict(sorted(settings.items()))

    def means(self, arm: ArmName) -> dict[int, float | None]:
        """Mean validation score over seeds of each setting that has ended; None where a seed has no score."""
        means: dict[int, float | None] = {}
        for number, trials in self.by_setting(arm).items():
            if any(_state(self.outcomes[trial]) in UNFINISHED for trial in trials):
                continue
            scores = [score for trial in trials if (score := self.values.get(trial)) is not None]
            means[number] = fmean(scores) if len(scores) == len(trials) else None
        return means

    def arm(self, arm: ArmName) -> SearchArm:
        states = [_state(self.outcomes[trial]) for trial in self.search.trials if trial.arm == arm]
        means = self.means(arm)
        chosen = self.search.chosen.get(arm)
        setting = _setting(self.search, chosen)
        curve = expected_best(list(means.values()), self.higher_is_better)
        return SearchArm(
            settings=len(self.by_setting(arm)),
            trials=len(states),
            done=states.count("done"),
            lost=sum(state not in ("done", *UNFINISHED) for state in states),
            chosen=chosen,
            setting=setting,
            value=None if chosen is None else means.get(chosen),
            edges=_edges(self.search, setting),
            expected=tuple(
                ExpectedBest(settings=k, value=value) for k, value in curve if k == len(curve) or k & (k - 1) == 0
            ),
        )


def _edges(search: PlannedSearch, setting: Setting | None) -> tuple[str, ...]:
    edges = []
    for name, values in search.space.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(set(numbers)) >= 2 and setting is not None and setting.get(name) in (min(numbers), max(numbers)):
            edges.append(name)
    return tuple(edges)


def _warnings(trials: SearchTrials, arms: Mapping[ArmName, SearchArm], metrics: Sequence[str]) -> list[str]:
    warnings = []
    scratch, spt = arms["scratch"], arms["spt"]
    if (scratch.settings, scratch.trials) != (spt.settings, spt.trials):
        warnings.append(
            f"the arms were not tuned equally: scratch has {scratch.settings} settings in {scratch.trials} trials, "
            f"SPT {spt.settings} in {spt.trials}"
        )
    elif trials.by_setting("scratch").keys() != trials.by_setting("spt").keys():
        warnings.append("the arms were not tuned equally: they tried different settings")
    if len(metrics) > 1:
        return [*warnings, f"the trials were scored by different metrics: {', '.join(metrics)}"]
    for arm, chosen in ((arm, arms[arm].chosen) for arm in ARMS):
        if chosen is None:
            continue
        means = {number: mean for number, mean in trials.means(arm).items() if mean is not None}
        if chosen not in means:
            warnings.append(f"the setting chosen for {arm_text(arm)} has no validation score")
        elif (best := (max if trials.higher_is_better else min)(means.values())) != means[chosen]:
            scores = f"{means[chosen]:.6g}; best {best:.6g}"
            warnings.append(f"the setting chosen for {arm_text(arm)} is not the best on validation ({scores})")
    return warnings


def _notes(arms: Mapping[ArmName, SearchArm]) -> list[str]:
    notes = []
    for name, arm in arms.items():
        text = arm_text(name)
        if waiting := arm.trials - arm.done - arm.lost:
            notes.append(f"{text}: {waiting} of {arm.trials} trials are not finished")
        if arm.lost:
            notes.append(f"{text}: {arm.lost} of {arm.trials} trials have no score; they still count as trials")
        for edge in arm.edges:
            value = factors_text({edge: (arm.setting or {})[edge]})
            notes.append(f"{text}: the chosen {value} is at the edge of the search space; widen it there")
    return notes
