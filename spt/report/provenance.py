"""Where the numbers of a report come from: splits and their hashes, environments, commands; and a checklist over them.

The checklist asks what reviewers ask (Pineau et al. 2020, The Machine Learning Reproducibility Checklist; Dodge et al.
2019 for the search of settings). Every answer is derived from the runs' own files, never assumed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spt.errors import OutputError
from spt.report.arms import Comparison, Row
from spt.report.format import abbreviate
from spt.report.search import SearchResult
from spt.report.stats import FEWEST
from spt.report.verdict import MATCHED
from spt.runs.folder import RunFolder
from spt.runs.plan import Record, StudyPlan
from spt.runs.result import Result

ChecklistAnswer = Literal["yes", "no", "partly", "not applicable"]


class DataUse(Record):
    """One split as the runs of one task saw it: each distinct version of it is a line."""

    task: str
    split: str
    rows: int
    inputs: str  # hash over every row's input, in order
    targets: str | None  # of the labels; None where no run was given any
    pretraining: int  # runs that had these inputs, by stage
    finetuning: int
    repeated: int  # rows whose input also stands in training


class EnvironmentUse(Record):
    """What runs were made with: each distinct one is a line."""

    runs: int
    spt: str
    commit: str | None  # `+`: files differed from it
    python: str
    system: str
    device: str
    processes: int
    threads: int | None
    packages: dict[str, str]


class StudyCommand(Record):
    """How to have a study again."""

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
    """What the checklist is asked of."""

    rows: Sequence[Row]
    results: Sequence[Result]  # every finished run, once
    strangers: Sequence[str]  # labels of rows whose pretraining had other training inputs than its finetuning
    unpaired: int  # runs without a result that no study mentions
    data: Sequence[DataUse]
    environments: Sequence[EnvironmentUse]
    commands: Sequence[StudyCommand]
    searches: Sequence[SearchResult]


def provenance(
    rows: Sequence[Comparison],
    studies: Sequence[tuple[Path, StudyPlan]],
    searches: Sequence[SearchResult],
    unpaired: int = 0,
) -> Provenance:
    if not rows:
        return Provenance()
    found = _results(rows)
    results = list(found.values())
    judged = ChecklistInput(
        [one.row for one in rows],
        results,
        [one.row.label for one in rows if _strange(one, found)],
        unpaired,
        _data(results),
        _environments(results),
        [StudyCommand(study=folder.name, command=plan.command, created=plan.created) for folder, plan in studies],
        searches,
    )
    checks = tuple(check for ask in CHECKS if (check := ask(judged)) is not None)
    if not results:
        nothing = {"answer": "not applicable", "evidence": "no run has finished"}
        checks = (checks[0], *(check.model_copy(update=nothing) for check in checks[1:]))
    return Provenance(
        data=tuple(judged.data),
        environments=tuple(judged.environments),
        commands=tuple(judged.commands),
        checklist=checks,
    )


def _results(rows: Sequence[Comparison]) -> dict[Path, Result]:
    """Every finished run behind the rows, pretraining included, once."""
    found: dict[Path, Result] = {}
    for one in rows:
        for cell in one.pairing.cells:
            for name in (cell.parent, cell.run):
                path = one.pairing.root / name if name else None
                if path is None or path in found:
                    continue
                try:
                    result = RunFolder(path.parent, path.name).result()
                except OutputError:  # among the failures, with its reason
                    continue
                if result is not None:
                    found[path] = result
    return found


def _strange(one: Comparison, found: dict[Path, Result]) -> bool:
    """Whether a pretraining run had other training inputs than what starts from it."""
    for cell in one.pairing.cells:
        root = one.pairing.root
        first, then = (found.get(root / name) if name else None for name in (cell.parent, cell.run))
        if first and then and _inputs(first) != _inputs(then):
            return True
    return False


def _inputs(result: Result) -> str | None:
    return result.data["train"].inputs if "train" in result.data else None


def _data(results: Iterable[Result]) -> list[DataUse]:
    """A line for every distinct version of a split; pretraining, which is given no labels, stands with the inputs."""
    made: dict[tuple[str, str, str, str | None], DataUse] = {}
    for result in sorted(results, key=lambda one: one.stage):  # finetuning first
        pretraining = result.stage == "pretrain"
        for split, held in result.data.items():
            key = (result.task, split, held.inputs, held.targets)
            if pretraining:
                key = next((old for old in made if old[:3] == key[:3]), key)
            old = made.get(key)
            made[key] = DataUse(
                task=result.task,
                split=split,
                rows=held.rows,
                inputs=held.inputs,
                targets=key[3],
                pretraining=(old.pretraining if old else 0) + pretraining,
                finetuning=(old.finetuning if old else 0) + (not pretraining),
                repeated=max(result.repeated.get(split, 0), old.repeated if old else 0),
            )
    order = ("train", "val", "test")

    def place(use: DataUse) -> tuple[str, int, str, str]:
        return use.task, order.index(use.split) if use.split in order else 3, use.inputs, use.targets or ""

    return sorted(made.values(), key=place)


def _environments(results: Iterable[Result]) -> list[EnvironmentUse]:
    counts: Counter[str] = Counter()
    for result in results:
        raw = result.environment
        one = EnvironmentUse(
            runs=0,
            spt=str(raw.get("spt", "")),
            commit=raw.get("commit"),
            python=str(raw.get("python", "")),
            system=str(raw.get("system", "")),
            device=str(raw.get("device", "")),
            processes=raw.get("processes", 1),
            threads=raw.get("threads"),
            packages=raw.get("packages", {}),
        )
        counts[one.model_dump_json()] += 1
    return [
        EnvironmentUse.model_validate_json(text).model_copy(update={"runs": runs})
        for text, runs in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _planned_runs(about: ChecklistInput) -> ChecklistItem:
    planned, lost = 2 * sum(row.planned for row in about.rows), sum(len(row.failures) for row in about.rows)
    others = sum(len(search.failures) for search in about.searches) + about.unpaired
    return _check(
        "Is every planned run accounted for?",
        "partly" if lost or others else "yes",
        f"{planned - lost} of {planned} runs of the rows have a score"
        + (f"; without one, beside them: {others}" if others else "")
        + ("; all without a score are listed with their reasons" if lost or others else ""),
    )


def _seeds(about: ChecklistInput) -> ChecklistItem:
    fewest = min(row.n for row in about.rows)
    return _check(
        "Are there enough seeds for an interval, and is every seed shown?",
        "yes" if fewest >= FEWEST else "no",
        f"{_span([row.n for row in about.rows])} complete pairs a row; with fewer than {FEWEST} nothing is decided",
    )


def _statistics(about: ChecklistInput) -> ChecklistItem:
    tests = max(row.tests for row in about.rows)
    decided = sum(row.decision in ("spt", "scratch") for row in about.rows)
    return _check(
        "Are intervals given, and are tests adjusted for their number?",
        "yes" if tests else "not applicable",
        f"paired t intervals over seeds; Holm over {tests} comparisons, {decided} decided"
        if tests
        else "no row could be tested",
    )


def _baseline(about: ChecklistInput) -> ChecklistItem:
    known = [row for row in about.rows if row.chance is not None]
    above = [row for row in known if row.scratch_arm and row.scratch_arm.above_chance]
    answer: ChecklistAnswer = "not applicable" if not known else "yes" if len(above) == len(about.rows) else "no"
    evidence = f"scratch is shown to beat chance in {len(above)} of {len(about.rows)} rows"
    return _check("Is the baseline better than a constant answer?", answer, evidence)


def _trained_out(about: ChecklistInput) -> ChecklistItem:
    arms = [(name, row, arm) for row in about.rows for name, arm in _arms(row)]
    open_ended = [f"{row.label} ({name})" for name, row, arm in arms if 2 * arm.best_at_end > row.n]
    return _check(
        "Was the last checkpoint passed by, so that more training would not obviously help?",
        "not applicable" if not arms else "partly" if open_ended else "yes",
        "in most runs of these the best checkpoint is the last: " + abbreviate(open_ended)
        if open_ended
        else "in no arm is the best checkpoint the last one in most runs",
    )


def _arms(row: Row) -> list[tuple[str, Any]]:
    return [(name, arm) for name, arm in (("scratch", row.scratch_arm), ("SPT", row.spt_arm)) if arm is not None]


def _compute(about: ChecklistInput) -> ChecklistItem:
    ratios = {row.label: [row.ratios.get(axis) for axis in ("steps", "examples", "flops")] for row in about.rows}
    off = [label for label, each in ratios.items() if not all(r is not None and abs(r - 1) <= MATCHED for r in each)]
    answer: ChecklistAnswer = "yes" if not off else "no" if len(off) == len(ratios) else "partly"
    return _check(
        "Did both arms have the same compute, pretraining included?",
        answer,
        f"steps, examples and FLOPs within {MATCHED:.0%} in {len(ratios) - len(off)} of {len(ratios)} rows"
        + (f"; not in {abbreviate(off)}" if off else ""),
    )


def _tuning(about: ChecklistInput) -> ChecklistItem:
    if not about.searches:
        return _check(
            "Were settings searched with equal budgets in both arms?",
            "not applicable",
            "no search is part of this report; how settings were found is for the recipes' headers to say",
        )
    unequal = [one.label for one in about.searches if _tried(one, "scratch") != _tried(one, "spt")]
    lost = [
        one.label for one in about.searches if one.scratch.done < one.scratch.trials or one.spt.done < one.spt.trials
    ]
    edges = [one.label for one in about.searches if one.scratch.edges or one.spt.edges]
    said = f"{sum(one.scratch.trials + one.spt.trials for one in about.searches)} trials, "
    said += f"other settings or seeds by arm in {abbreviate(unequal)}" if unequal else "the same list in both arms"
    return _check(
        "Were settings searched with equal budgets in both arms?",
        "no" if unequal else "partly" if edges or lost else "yes",
        said
        + (f"; trials without a score in {abbreviate(lost)}" if lost else "")
        + (f"; a choice lies on the edge of what was tried in {abbreviate(edges)}" if edges else ""),
    )


def _tried(search: SearchResult, arm: str) -> set[tuple[str, int]]:
    return {(str(sorted(trial.setting.items())), trial.seed) for trial in search.trials if trial.arm == arm}


def _selection(about: ChecklistInput) -> ChecklistItem:
    leaks = sorted({f"{one.task} / {one.model}" for one in about.results if _validated_on_test(one)})
    chosen = sorted({one.selected_by for one in about.results if one.stage == "finetune"})
    return _check(
        "Were checkpoints chosen on validation alone, and was test looked at once a run?",
        "no" if leaks else "yes",
        f"validation is the test split in {abbreviate(leaks)}"
        if leaks
        else f"chosen by validation {', '.join(chosen)}; test scored once, after the choice",
    )


def _validated_on_test(result: Result) -> bool:
    val, test = result.data.get("val"), result.data.get("test")
    return val is not None and test is not None and val.inputs == test.inputs


def _splits(about: ChecklistInput) -> ChecklistItem:
    again = [f"{use.repeated} rows of {use.task} {use.split}" for use in about.data if use.repeated]
    return _check(
        "Are the splits apart?",
        "partly" if again else "yes",
        f"inputs that also stand in training: {abbreviate(again)}"
        if again
        else "no row of validation or test has an input that also stands in training",
    )


def _same_data(about: ChecklistInput) -> ChecklistItem:
    question = "Did both arms, and both stages, see the same data?"
    if different := [row.label for row in about.rows if row.decision == "different data"]:
        return _check(question, "no", f"the arms' splits differ in {abbreviate(different)}")
    wanted = {row.label for row in about.rows if "pretrained on" in row.factors}
    if strange := [label for label in about.strangers if label not in wanted]:
        return _check(question, "no", f"pretraining had other training inputs than finetuning in {abbreviate(strange)}")
    if about.strangers:
        return _check(
            question, "partly", "pretraining had other training inputs, as the study asks for; the arms agree"
        )
    return _check(question, "yes", "the hashes of all splits agree, seed by seed, in both arms and stages")


def _code(about: ChecklistInput) -> ChecklistItem:
    commits = {one.commit for one in about.environments}
    edited = sorted(str(commit) for commit in commits if commit and commit.endswith("+"))
    if edited:
        return _check("Is the code named exactly?", "no", f"files differed from the commit: {abbreviate(edited)}")
    if None in commits:
        versions = ", ".join(sorted({one.spt for one in about.environments}))
        return _check("Is the code named exactly?", "partly", f"an installed copy, version {versions}")
    answer: ChecklistAnswer = "yes" if len(commits) == 1 else "partly"
    return _check("Is the code named exactly?", answer, f"commit {abbreviate(sorted(map(str, commits)))}")


def _environment(about: ChecklistInput) -> ChecklistItem:
    devices = sorted({one.device for one in about.environments})
    return _check(
        "Is the environment recorded, and the same for all runs?",
        "yes" if len(about.environments) == 1 else "partly",
        f"environments: {len(about.environments)}, on {abbreviate(devices)}; versions below",
    )


def _again(about: ChecklistInput) -> ChecklistItem:
    known = [one for one in about.commands if one.command]
    return _check(
        "Is the command recorded that makes the runs again?",
        "yes" if known and len(known) == len(about.commands) else "partly" if known else "no",
        "below; each run's folder holds its whole recipe" if known else "runs without a study: their recipes alone",
    )


def _smoke(about: ChecklistInput) -> ChecklistItem | None:
    smoke = sum(row.smoke for row in about.rows)
    if not smoke:
        return None
    return _check("Are the runs more than a trial of the machinery?", "no", f"{smoke} rows are smoke runs")


CHECKS: tuple[Callable[[ChecklistInput], ChecklistItem | None], ...] = (
    _planned_runs,
    _smoke,
    _seeds,
    _statistics,
    _baseline,
    _trained_out,
    _compute,
    _tuning,
    _selection,
    _splits,
    _same_data,
    _code,
    _environment,
    _again,
)


def _check(question: str, answer: ChecklistAnswer, evidence: str) -> ChecklistItem:
    return ChecklistItem(question=question, answer=answer, evidence=evidence)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
