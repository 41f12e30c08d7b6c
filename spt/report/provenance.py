"""Where the numbers of a report come from: splits and their hashes, environments, commands, and a checklist.

The checklist asks what reviewers ask (Pineau et al. 2020, The Machine Learning Reproducibility Checklist; Dodge et al.
2019 for the search of settings). Every answer is derived from the runs' own files, never assumed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spt.report.arms import Comparison, Row
from spt.report.format import abbreviate
from spt.report.search import SearchResult
from spt.report.stats import FEWEST
from spt.report.verdict import MATCHED
from spt.runs.index import run_outcome
from spt.runs.plan import Record, StudyPlan
from spt.runs.result import Result

ChecklistAnswer = Literal["yes", "no", "partly", "not applicable"]


class DataUse(Record):
    """One version of a split, as the runs of one task saw it."""

    task: str
    split: str
    rows: int
    inputs: str  # hash over every row's input, in order
    targets: str | None  # of the labels; None where no run was given labels
    pretraining: int  # runs that used these inputs, by stage
    finetuning: int
    repeated: int  # rows whose input also occurs in training


class EnvironmentUse(Record):
    """One distinct software and hardware environment."""

    runs: int
    spt: str
    commit: str | None  # `+`: with uncommitted changes
    python: str
    system: str
    device: str
    processes: int
    threads: int | None
    packages: dict[str, str]


class StudyCommand(Record):
    """The command that reproduces a study."""

    study: str
    command: str
    created: str


class ChecklistItem(Record):
    """One line of the checklist."""

    question: str
    answer: ChecklistAnswer
    evidence: str


class Provenance(Record):
    data: tuple[DataUse, ...] = ()
    environments: tuple[EnvironmentUse, ...] = ()
    commands: tuple[StudyCommand, ...] = ()
    checklist: tuple[ChecklistItem, ...] = ()


class ChecklistInput(NamedTuple):
    """What the answers of the checklist are derived from."""

    rows: Sequence[Row]
    results: Sequence[Result]  # every finished run, once
    other_inputs: Sequence[str]  # labels of rows whose pretraining had other training inputs than its finetuning
    others_lost: int  # runs without a score of controls, baselines and those that no study mentions
    origin: Provenance  # without a checklist
    searches: Sequence[SearchResult]


def provenance(
    comparisons: Sequence[Comparison],
    studies: Sequence[tuple[Path, StudyPlan]],
    searches: Sequence[SearchResult],
    others_lost: int = 0,
) -> Provenance:
    if not comparisons:
        return Provenance()
    results = _results(comparisons)
    origin = Provenance(
        data=tuple(_data(results.values())),
        environments=tuple(_environments(results.values())),
        commands=tuple(
            StudyCommand(study=folder.name, command=plan.command, created=plan.created) for folder, plan in studies
        ),
    )
    other_inputs = [each.row.label for each in comparisons if _has_other_inputs(each, results)]
    rows = [comparison.row for comparison in comparisons]
    facts = ChecklistInput(rows, list(results.values()), other_inputs, others_lost, origin, searches)
    checklist = [
        ChecklistItem(question=question, answer=answer[0], evidence=answer[1])
        for question, check in CHECKS.items()
        if (answer := check(facts)) is not None
    ]
    if not results:
        unknown = {"answer": "not applicable", "evidence": "no run has finished"}
        checklist[1:] = [item.model_copy(update=unknown) for item in checklist[1:]]
    return origin.model_copy(update={"checklist": tuple(checklist)})


def _results(comparisons: Sequence[Comparison]) -> dict[Path, Result]:
    """Every finished run behind the rows, pretraining included, once."""
    runs = dict.fromkeys(
        (comparison.runs.root, name)
        for comparison in comparisons
        for cell in (*comparison.runs.cells, *comparison.runs.controls)
        for name in (cell.parent, cell.run)
        if name
    )
    outcomes = {root / name: run_outcome(root, name) for root, name in runs}
    return {path: outcome for path, outcome in outcomes.items() if isinstance(outcome, Result)}


def _has_other_inputs(comparison: Comparison, results: dict[Path, Result]) -> bool:
    """Whether a pretraining run had other training inputs than the run that starts from it."""
    root = comparison.runs.root
    stages = [
        (results.get(root / cell.parent), results.get(root / cell.run)) for cell in comparison.runs.cells if cell.parent
    ]
    return any(first and then and _inputs(first) != _inputs(then) for first, then in stages)


def _inputs(result: Result) -> str | None:
    return result.data["train"].inputs if "train" in result.data else None


def _data(results: Iterable[Result]) -> list[DataUse]:
    """One entry per distinct version of a split. Pretraining, which has no labels, counts with the same inputs."""
    users: dict[tuple[str, str, str, str | None], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.stage):  # finetuning first
        for split, record in result.data.items():
            key = (result.task, split, record.inputs, record.targets)
            if result.stage == "pretrain":
                key = next((known for known in users if known[:3] == key[:3]), key)
            users.setdefault(key, []).append(result)
    uses = [
        DataUse(
            task=task,
            split=split,
            rows=runs[-1].data[split].scored,
            inputs=inputs,
            targets=targets,
            pretraining=sum(run.stage == "pretrain" for run in runs),
            finetuning=sum(run.stage != "pretrain" for run in runs),
            repeated=max(run.repeated.get(split, 0) for run in runs),
        )
        for (task, split, inputs, targets), runs in users.items()
    ]
    order = {"train": 0, "val": 1, "test": 2}
    return sorted(uses, key=lambda use: (use.task, order.get(use.split, 3), use.inputs, use.targets or ""))


def _environments(results: Iterable[Result]) -> list[EnvironmentUse]:
    defaults: dict[str, Any] = {"spt": "", "commit": None, "python": "", "system": "", "device": "", "processes": 1}
    defaults |= {"threads": None, "packages": {}}
    counts: Counter[str] = Counter()
    for result in results:
        values = {name: result.environment.get(name, default) for name, default in defaults.items()}
        values |= {name: str(values[name]) for name in ("spt", "python", "system", "device")}
        counts[EnvironmentUse(runs=0, **values).model_dump_json()] += 1
    return [
        EnvironmentUse.model_validate_json(text).model_copy(update={"runs": runs})
        for text, runs in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


Answer = tuple[ChecklistAnswer, str]  # with its evidence
ONE_ARM = "one arm alone was run"


def _of_both_arms(facts: ChecklistInput) -> list[Row]:
    return [row for row in facts.rows if row.only is None]


def _planned_runs(facts: ChecklistInput) -> Answer:
    alone = sum(row.only is not None for row in facts.rows)
    planned = sum(row.planned * (2 if row.only is None else 1) for row in facts.rows)
    lost = sum(len(row.told_failures) for row in facts.rows)
    others = sum(len(search.failures) for search in facts.searches) + facts.others_lost
    evidence = f"{planned - lost} of {planned} runs of the rows have a score"
    evidence += f"; other runs without one: {others}" if others else ""
    evidence += "; all without a score are listed with their reasons" if lost or others else ""
    evidence += f"; of {alone} row{'s' if alone > 1 else ''} only one arm was run" if alone else ""
    return "partly" if lost or others or alone else "yes", evidence


def _smoke(facts: ChecklistInput) -> Answer | None:
    smoke = sum(row.smoke for row in facts.rows)
    return ("no", f"{smoke} rows are smoke runs") if smoke else None


def _seeds(facts: ChecklistInput) -> Answer:
    numbers = [row.averaged if row.splits is None else row.splits for row in facts.rows]
    low, high = min(numbers), max(numbers)
    span = str(low) if low == high else f"{low} to {high}"
    what = "runs a row" if all(row.only for row in facts.rows) else "complete pairs a row"
    what = "splits of the data a row" if all(row.splits for row in facts.rows) else what
    evidence = f"{span} {what}; with fewer than {FEWEST} nothing is decided"
    return "yes" if low >= FEWEST else "no", evidence


def _statistics(facts: ChecklistInput) -> Answer:
    tests = max(row.tests for row in facts.rows)
    if not tests:
        return "not applicable", "no row could be tested"
    decided = sum(row.decision in ("spt", "scratch") for row in facts.rows)
    over = "seeds"
    if any(row.splits for row in facts.rows):
        over = "splits of the data, corrected for overlapping training sets (Nadeau and Bengio)"
    return "yes", f"paired t intervals over {over}; Holm over {tests} comparisons, {decided} decided"


def _baseline(facts: ChecklistInput) -> Answer:
    rows = [row for row in facts.rows if row.only is None or row.only.arm == "scratch"]
    known = [row for row in rows if row.chance is not None or not row.metric]  # the latter have no results yet
    if not known:
        return "not applicable", "no row's metric has a chance level"
    above = [row for row in known if row.scratch_arm and row.scratch_arm.above_chance]
    answer: ChecklistAnswer = "yes" if len(above) == len(known) else "no"
    others = f" that have a chance ({len(rows) - len(known)} have none)" if len(known) < len(rows) else ""
    return answer, f"scratch is shown to beat chance in {len(above)} of {len(known)} rows{others}"


def _converged(facts: ChecklistInput) -> Answer:
    arms = [
        (f"{row.label} ({name})", 2 * arm.best_at_end > arm.runs)
        for row in facts.rows
        for name, arm in (("scratch", row.scratch_arm), ("SPT", row.spt_arm))
        if arm is not None
    ]
    if unfinished := [label for label, mostly_last in arms if mostly_last]:
        return "partly", "in most runs of these the best checkpoint is the last: " + abbreviate(unfinished)
    return "yes" if arms else "not applicable", "in no arm is the best checkpoint the last one in most runs"


def _compute(facts: ChecklistInput) -> Answer:
    rows = _of_both_arms(facts)
    if not rows:
        return "not applicable", ONE_ARM
    ratios = {row.label: [row.ratios.get(axis) for axis in ("steps", "examples", "flops")] for row in rows}
    off = [label for label, each in ratios.items() if not all(r is not None and abs(r - 1) <= MATCHED for r in each)]
    matched = f"{len(ratios) - len(off)} of {len(ratios)} rows" + (f"; not in {abbreviate(off)}" if off else "")
    answer: ChecklistAnswer = "yes" if not off else "no" if len(off) == len(ratios) else "partly"
    return answer, f"steps, examples and FLOPs within {MATCHED:.0%} in {matched}"


def _tuning(facts: ChecklistInput) -> Answer:
    searches = facts.searches
    if not searches:
        return "not applicable", "this report has no search; the recipes' headers say how settings were chosen"
    unequal = [search.label for search in searches if not search.equal or _other_number(search, searches)]
    lost = [search.label for search in searches if any(arm.done < arm.trials for arm in (search.scratch, search.spt))]
    edges = [search.label for search in searches if search.scratch.edges or search.spt.edges]
    evidence = f"{sum(search.scratch.trials + search.spt.trials for search in searches)} trials, "
    equal = {"trials": "as many in both arms", "compute": "the same total compute in both arms"}
    protocols = " and ".join(dict.fromkeys(equal[search.protocol] for search in searches))
    evidence += f"unequal by arm or model in {abbreviate(unequal)}" if unequal else protocols
    evidence += f"; trials without a score in {abbreviate(lost)}" if lost else ""
    evidence += f"; a chosen value is at the edge of the search space in {abbreviate(edges)}" if edges else ""
    return "no" if unequal else "partly" if edges or lost else "yes", evidence


def _other_number(search: SearchResult, searches: Sequence[SearchResult]) -> bool:
    """Has another model of its study more trials? SPT's are compared; what scratch gets is its protocol's."""
    return any(other.study == search.study and other.spt.trials > search.spt.trials for other in searches)


def _selection(facts: ChecklistInput) -> Answer:
    if leaks := sorted({f"{run.task} / {run.model}" for run in facts.results if _validated_on_test(run)}):
        return "no", f"validation is the test split in {abbreviate(leaks)}"
    metrics = sorted({run.selected_by for run in facts.results if run.stage == "finetune"})
    return "yes", f"chosen by validation {', '.join(metrics)}; test scored once, after the choice"


def _validated_on_test(result: Result) -> bool:
    val, test = result.data.get("val"), result.data.get("test")
    return val is not None and test is not None and val.inputs == test.inputs


def _splits(facts: ChecklistInput) -> Answer:
    if repeated := [f"{use.repeated} rows of {use.task} {use.split}" for use in facts.origin.data if use.repeated]:
        return "partly", f"inputs that also occur in training: {abbreviate(repeated)}"
    return "yes", "no row of validation or test has an input that also occurs in training"


def _same_data(facts: ChecklistInput) -> Answer:
    if different := [row.label for row in facts.rows if row.decision == "different data"]:
        return "no", f"the arms' splits differ in {abbreviate(different)}"
    intended = {row.label for row in facts.rows if "pretrained on" in row.factors}
    if odd := [label for label in facts.other_inputs if label not in intended]:
        return "no", f"pretraining had other training inputs than finetuning in {abbreviate(odd)}"
    if facts.other_inputs:
        return "partly", "pretraining had other training inputs, as the study asks for; the arms agree"
    if not _of_both_arms(facts):
        return "not applicable", ONE_ARM
    return "yes", "the hashes of all splits agree, seed by seed, in both arms and stages"


def _code(facts: ChecklistInput) -> Answer:
    commits = {environment.commit for environment in facts.origin.environments}
    if edited := sorted(commit for commit in commits if commit and commit.endswith("+")):
        return "no", f"uncommitted changes on top of: {abbreviate(edited)}"
    if None in commits:
        versions = ", ".join(sorted({environment.spt for environment in facts.origin.environments}))
        return "partly", f"an installed copy, version {versions}"
    return "yes" if len(commits) == 1 else "partly", f"commit {abbreviate(sorted(map(str, commits)))}"


def _environment(facts: ChecklistInput) -> Answer:
    devices = sorted({environment.device for environment in facts.origin.environments})
    evidence = f"environments: {len(facts.origin.environments)}, on {abbreviate(devices)}; versions below"
    return "yes" if len(facts.origin.environments) == 1 else "partly", evidence


def _command(facts: ChecklistInput) -> Answer:
    known = [study for study in facts.origin.commands if study.command]
    if not known:
        return "no", "runs without a study: only their recipes are recorded"
    complete = len(known) == len(facts.origin.commands)
    return "yes" if complete else "partly", "below; each run's folder holds its whole recipe"


CHECKS: dict[str, Callable[[ChecklistInput], Answer | None]] = {  # None: the question does not arise
    "Is every planned run accounted for?": _planned_runs,
    "Are these full runs rather than smoke runs?": _smoke,
    "Are there enough seeds for an interval, and is every seed shown?": _seeds,
    "Are intervals given, and are tests adjusted for their number?": _statistics,
    "Is the baseline better than a constant answer?": _baseline,
    "Did validation peak before the last checkpoint, so that more training is unlikely to help?": _converged,
    "Did both arms have the same compute, pretraining included?": _compute,
    "Were settings searched with equal budgets in both arms?": _tuning,
    "Were checkpoints chosen on validation alone, and was the test split scored once per run?": _selection,
    "Are the splits disjoint?": _splits,
    "Did both arms, and both stages, see the same data?": _same_data,
    "Is the exact version of the code recorded?": _code,
    "Is the environment recorded, and the same for all runs?": _environment,
    "Is the command that reproduces the runs recorded?": _command,
}
