"""What a search for settings tried in each arm, and what it chose, by validation scores alone."""

from pathlib import Path
from statistics import fmean
from typing import Literal

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
    """Mean best validation score of so many of the settings, drawn without replacement."""

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
    edges: tuple[str, ...]  # numeric settings whose chosen value is the smallest or largest that was tried
    expected: tuple[ExpectedBest, ...]  # of 1, 2, 4, … and all settings that ended


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
    subjects = [plan.rows[search.row] for search in plan.searches]
    short = [f"{subject.task} / {subject.model}" for subject in subjects]
    made = []
    for search, subject, name in zip(plan.searches, subjects, short, strict=True):
        label = f"{name}, {subject.name}" if short.count(name) > 1 else name
        made.append(_searched(folder, plan, search, label))
    return made


def _searched(folder: Path, plan: StudyPlan, search: PlannedSearch, label: str) -> SearchResult:
    subject = plan.rows[search.row]
    found = {trial: trial_result(folder.parent, trial) for trial in search.trials}
    results = [one for one in found.values() if isinstance(one, Result)]
    metric = results[0].selected_by if results else ""
    higher = _higher_is_better(results[0]) if results else True
    values = {trial: validation_score(one, metric) for trial, one in found.items() if isinstance(one, Result)}
    arms = {arm: _arm(search, arm, found, values, higher) for arm in ARMS}
    failures = []
    for trial, one in found.items():
        if isinstance(one, Failure):
            reason = f"trial of setting {trial.number}: {one.reason}"
            update = {"arm": trial.arm, "seed": trial.seed, "reason": reason}
            failures.append(one.model_copy(update=update))
    return SearchResult(
        study=folder.name,
        label=label,
        task=subject.task,
        model=subject.model,
        recipe=subject.name,
        metric=metric,
        higher_is_better=higher,
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
                state=one.state if isinstance(one, Failure) else "done",
                run=trial.run,
            )
            for trial, one in found.items()
        ),
        failures=tuple(failures),
        warnings=tuple(_warnings(search, arms, found, values, higher, {result.selected_by for result in results})),
        notes=tuple(_notes(arms)),
    )


def _higher_is_better(result: Result) -> bool:
    if result.selected_by == result.metric:
        return result.higher_is_better
    return not LOWER_IS_BETTER.get(result.selected_by, True)


def _setting(search: PlannedSearch, number: int | None) -> Setting | None:
    return search.settings[number] if number is not None and 0 <= number < len(search.settings) else None


Found = dict[PlannedTrial, Result | Failure]
Values = dict[PlannedTrial, float | None]


def _by_setting(search: PlannedSearch, arm: ArmName) -> dict[int, list[PlannedTrial]]:
    trials: dict[int, list[PlannedTrial]] = {}
    for trial in search.trials:
        if trial.arm == arm:
            trials.setdefault(trial.number, []).append(trial)
    return dict(sorted(trials.items()))


def _means(search: PlannedSearch, arm: ArmName, found: Found, values: Values) -> dict[int, float | None]:
    """The validation score of each setting that ended, mean over its seeds; None where a seed gave none."""
    means: dict[int, float | None] = {}
    for number, trials in _by_setting(search, arm).items():
        ended = [found[trial] for trial in trials]
        if any(isinstance(one, Failure) and one.state in UNFINISHED for one in ended):
            continue
        scores = [values.get(trial) for trial in trials]
        known = [score for score in scores if score is not None]
        means[number] = fmean(known) if len(known) == len(scores) else None
    return means


def _arm(search: PlannedSearch, arm: ArmName, found: Found, values: Values, higher: bool) -> SearchArm:
    trials = [trial for trial in search.trials if trial.arm == arm]
    states = [one.state if isinstance(one, Failure) else "done" for one in (found[trial] for trial in trials)]
    means = _means(search, arm, found, values)
    chosen = search.chosen.get(arm)
    setting = _setting(search, chosen)
    curve = expected_best(list(means.values()), higher)
    return SearchArm(
        settings=len(_by_setting(search, arm)),
        trials=len(trials),
        done=states.count("done"),
        lost=sum(state not in ("done", *UNFINISHED) for state in states),
        chosen=chosen,
        setting=setting,
        value=None if chosen is None else means.get(chosen),
        edges=_edges(search, setting),
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


def _warnings(
    search: PlannedSearch,
    arms: dict[ArmName, SearchArm],
    found: Found,
    values: Values,
    higher: bool,
    metrics: set[str],
) -> list[str]:
    said = []
    scratch, spt = arms["scratch"], arms["spt"]
    if (scratch.settings, scratch.trials) != (spt.settings, spt.trials):
        said.append(
            f"the arms were not tuned alike: scratch has {scratch.settings} settings in {scratch.trials} trials, "
            f"SPT {spt.settings} in {spt.trials}"
        )
    elif _by_setting(search, "scratch").keys() != _by_setting(search, "spt").keys():
        said.append("the arms were not tuned alike: they tried different settings")
    if len(metrics) > 1:
        said.append(f"the trials were judged by different metrics: {', '.join(sorted(metrics))}")
    for arm in ARMS:
        chosen = search.chosen.get(arm)
        if chosen is None or len(metrics) > 1:
            continue
        means = {number: mean for number, mean in _means(search, arm, found, values).items() if mean is not None}
        if chosen not in means:
            said.append(f"the setting chosen for {arm_text(arm)} has no validation score")
        elif (best := (max if higher else min)(means.values())) != means[chosen]:
            scores = f"{means[chosen]:.6g}; best {best:.6g}"
            said.append(f"the setting chosen for {arm_text(arm)} is not the best on validation ({scores})")
    return said


def _notes(arms: dict[ArmName, SearchArm]) -> list[str]:
    said = []
    for arm, one in arms.items():
        if waiting := one.trials - one.done - one.lost:
            said.append(f"{arm_text(arm)}: {waiting} of {one.trials} trials are not finished")
        if one.lost:
            said.append(f"{arm_text(arm)}: {one.lost} of {one.trials} trials gave no score; they count as trials")
        for name in one.edges:
            value = factors_text({name: (one.setting or {})[name]})
            said.append(
                f"{arm_text(arm)}: the chosen {value} lies on the edge of what was tried; widen the space there"
            )
    return said
