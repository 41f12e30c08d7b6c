"""What a search for settings tried in each arm, and what it chose, by validation scores alone."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Literal

from spt.config.recipe import LOWER_IS_BETTER
from spt.report.cost import StudyRuns, study_costs
from spt.report.stats import expected_best
from spt.report.verdict import MATCHED
from spt.runs.index import Failure
from spt.runs.plan import (
    ARMS,
    ArmName,
    Ended,
    Factor,
    PlannedSearch,
    PlannedTrial,
    Record,
    SearchProtocol,
    StudyPlan,
    StudyRow,
    arm_text,
    factors_text,
)
from spt.runs.result import Ledger, Result
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
    space: dict[str, tuple[Factor, ...]]  # of each setting, the values that were tried
    spent: Ledger  # on all trials, and on the pretrainings they start from, each counted once
    unknown: int  # runs among these that were started and have no result, whose cost is not counted
    chosen: int | None
    setting: Setting | None
    value: float | None  # the chosen setting's validation score, mean over its seeds
    edges: tuple[str, ...]  # numeric settings whose chosen value is the smallest or largest tried
    expected: tuple[ExpectedBest, ...]  # of 1, 2, 4, … and all finished settings


class SearchResult(Record):
    """A search of a tuning study."""

    study: str
    label: str
    task: str
    model: str
    recipe: str
    metric: str  # on validation
    higher_is_better: bool
    protocol: SearchProtocol
    equal: bool  # does it keep what its protocol promises?
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
    results = [outcome for outcome in outcomes.values() if isinstance(outcome, Result)]
    metrics = list(dict.fromkeys(result.selected_by for result in results))
    higher_is_better = _higher_is_better(results[0]) if results else True
    trials = tuple(
        TrialResult(
            arm=trial.arm,
            number=trial.number,
            seed=trial.seed,
            setting=_setting(search, trial.arm, trial.number) or {},
            value=validation_score(outcome, metrics[0]) if isinstance(outcome, Result) else None,
            state=outcome.state if isinstance(outcome, Failure) else "done",
            run=trial.run,
        )
        for trial, outcome in outcomes.items()
    )
    arms = {arm: _search_arm(folder.parent, search, arm, trials, higher_is_better) for arm in ARMS}
    inequality = _inequality(folder.parent, search, trials, arms)
    failures = [
        outcome.model_copy(
            update={
                "arm": trial.arm,
                "seed": trial.seed,
                "reason": f"trial of setting {trial.number}: {outcome.reason}",
            }
        )
        for trial, outcome in outcomes.items()
        if isinstance(outcome, Failure)
    ]
    return SearchResult(
        study=folder.name,
        label=label,
        task=row.task,
        model=row.model,
        recipe=row.name,
        metric=metrics[0] if metrics else "",
        higher_is_better=higher_is_better,
        protocol=search.protocol,
        equal=not inequality,
        space=search.space(*ARMS),
        scratch=arms["scratch"],
        spt=arms["spt"],
        trials=trials,
        failures=tuple(failures),
        warnings=(*inequality, *_warnings(trials, arms, higher_is_better, sorted(metrics))),
        notes=tuple(_notes(arms)),
    )


def _higher_is_better(result: Result) -> bool:
    if result.selected_by == result.metric:
        return result.higher_is_better
    return not LOWER_IS_BETTER.get(result.selected_by, True)


def _setting(search: PlannedSearch, arm: ArmName, number: int | None) -> Setting | None:
    settings = search.settings[arm]
    return settings[number] if number is not None and 0 <= number < len(settings) else None


def _by_setting(trials: Iterable[TrialResult], arm: ArmName) -> dict[int, list[TrialResult]]:
    of_arm = sorted((trial for trial in trials if trial.arm == arm), key=lambda trial: trial.number)
    return {number: list(group) for number, group in groupby(of_arm, key=lambda trial: trial.number)}


def _means(trials: Iterable[TrialResult], arm: ArmName) -> dict[int, float | None]:
    """Mean validation score over seeds of each setting that has ended; None where a seed has no score."""
    means: dict[int, float | None] = {}
    for number, group in _by_setting(trials, arm).items():
        if not any(trial.state in UNFINISHED for trial in group):
            scores = [trial.value for trial in group if trial.value is not None]
            means[number] = fmean(scores) if len(scores) == len(group) else None
    return means


def _search_arm(
    root: Path, search: PlannedSearch, arm: ArmName, trials: Sequence[TrialResult], higher_is_better: bool
) -> SearchArm:
    states = [trial.state for trial in trials if trial.arm == arm]
    means = _means(trials, arm)
    chosen = search.chosen.get(arm)
    setting = _setting(search, arm, chosen)
    spent, unknown = _spent(root, [trial for trial in search.trials if trial.arm == arm])
    curve = expected_best(list(means.values()), higher_is_better)
    return SearchArm(
        settings=len(_by_setting(trials, arm)),
        trials=len(states),
        done=states.count("done"),
        lost=sum(state not in ("done", *UNFINISHED) for state in states),
        space=search.space(arm),
        spent=spent,
        unknown=unknown,
        chosen=chosen,
        setting=setting,
        value=None if chosen is None else means.get(chosen),
        edges=_edges(search.space(arm), setting),
        expected=tuple(
            ExpectedBest(settings=k, value=value) for k, value in curve if k == len(curve) or k & (k - 1) == 0
        ),
    )


def _edges(space: Mapping[str, tuple[Factor, ...]], setting: Setting | None) -> tuple[str, ...]:
    edges = []
    for name, values in space.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(set(numbers)) >= 2 and setting is not None and setting.get(name) in (min(numbers), max(numbers)):
            edges.append(name)
    return tuple(edges)


def _spent(root: Path, trials: Sequence[PlannedTrial]) -> tuple[Ledger, int]:
    """The cost of one arm's trials, shared pretrainings counted once; how many started runs have no result."""
    parts = study_costs([StudyRuns("", root, (), trials)])
    return sum((part.ledger for part in parts), start=Ledger()), sum(part.unknown for part in parts)


def _inequality(
    root: Path, search: PlannedSearch, trials: Sequence[TrialResult], arms: Mapping[ArmName, SearchArm]
) -> list[str]:
    """How the arms' trials fall short of what the protocol promises, as at most one sentence."""
    scratch, spt = arms["scratch"], arms["spt"]
    if search.protocol == "compute":
        return _unequal_compute(root, search, scratch, spt)
    if (scratch.settings, scratch.trials) != (spt.settings, spt.trials):
        return [
            f"the arms were not tuned equally: scratch has {scratch.settings} settings in {scratch.trials} trials, "
            f"SPT {spt.settings} in {spt.trials}"
        ]
    # What both arms have, but for settings that are each arm's own, scratch has tried wherever SPT has.
    common = (scratch.space.keys() & spt.space.keys()) - set(search.relative)
    tried = {
        arm: {(str([(name, trial.setting.get(name)) for name in sorted(common)]), trial.seed) for trial in group}
        for arm, group in ((arm, [trial for trial in trials if trial.arm == arm]) for arm in ARMS)
    }
    if tried["spt"] <= tried["scratch"]:
        return []
    return ["the arms were not tuned equally: they tried different settings"]


def _unequal_compute(root: Path, search: PlannedSearch, scratch: SearchArm, spt: SearchArm) -> list[str]:
    """Told once every trial has its cost. Scratch may have one setting more than SPT's operations pay for."""
    if any(arm.done < arm.trials or arm.unknown for arm in (scratch, spt)):
        return []
    numbers = {trial.number for trial in search.trials if trial.arm == "scratch"}
    settings = [[t for t in search.trials if (t.arm, t.number) == ("scratch", number)] for number in numbers]
    dearest = max((_spent(root, trials)[0].flops for trials in settings), default=0.0)
    if abs(scratch.spent.flops - spt.spent.flops) <= dearest * (1 + MATCHED):
        return []
    return [
        f"the arms were not tuned at the same total compute: scratch's trials took {scratch.spent.flops:.3g} "
        f"operations, SPT's {spt.spent.flops:.3g}"
    ]


def _warnings(
    trials: Sequence[TrialResult], arms: Mapping[ArmName, SearchArm], higher_is_better: bool, metrics: Sequence[str]
) -> list[str]:
    warnings = []
    if len(metrics) > 1:
        return [f"the trials were scored by different metrics: {', '.join(metrics)}"]
    for arm, chosen in ((arm, arms[arm].chosen) for arm in ARMS):
        if chosen is None:
            continue
        means = {number: mean for number, mean in _means(trials, arm).items() if mean is not None}
        if chosen not in means:
            warnings.append(f"the setting chosen for {arm_text(arm)} has no validation score")
        elif (best := (max if higher_is_better else min)(means.values())) != means[chosen]:
            scores = f"{means[chosen]:.6g}; best {best:.6g}"
            warnings.append(f"the setting chosen for {arm_text(arm)} is not the best on validation ({scores})")
    return warnings


def _notes(arms: Mapping[ArmName, SearchArm]) -> list[str]:
    notes = []
    for name, arm in arms.items():
        text = arm_text(name)
        if waiting := arm.trials - arm.done - arm.lost:
            notes.append(f"{text}: {waiting} of {arm.trials} trials are not finished")
        if arm.unknown:
            notes.append(f"{text}: the cost of {arm.unknown} runs without a result is not counted")
        if arm.lost:
            notes.append(f"{text}: {arm.lost} of {arm.trials} trials have no score; they still count as trials")
        if arm.edges:
            values = factors_text({edge: (arm.setting or {})[edge] for edge in arm.edges})
            verb = "is" if len(arm.edges) == 1 else "are"
            notes.append(f"{text}: the chosen {values} {verb} at the edge of the search space; widen it there")
    return notes
