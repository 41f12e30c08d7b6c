"""What finished runs say about self-pretraining: SPT minus scratch, seed by seed, with what both arms cost.

Only run folders are read: their small JSON files, and the predictions on the test split. Every planned run is
accounted for, in a pair or among the failures with its reason; that an arm was not run at all is said once. The writers
beside this file turn a `Report` into text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spt.errors import DataError, UsageError
from spt.report import levels
from spt.report.across_tasks import TaskAverage
from spt.report.answers import (
    ArmCalibration,
    Confusion,
    GroupComparison,
    MetricScores,
    calibrations,
    confusions,
    group_comparisons,
    group_records,
    metric_records,
    metric_scores,
)
from spt.report.arms import Row, adjust_for_multiplicity, compare_arms
from spt.report.baselines import BaselineComparison, compare_baselines
from spt.report.controls import Control, compare_controls
from spt.report.cost import BudgetMatch, StageCost, StudyRuns, budget_matches, study_costs
from spt.report.curves import Curve, curves
from spt.report.levels import BestShare, Contrast, LevelResult
from spt.report.models import compare_models, model_groups
from spt.report.models_across_tasks import ModelsAcrossTasks, models_across_tasks
from spt.report.plain_average import PlainAverage
from spt.report.provenance import Provenance, provenance
from spt.report.published import PublishedComparison, published_comparisons
from spt.report.ranking import ModelComparison
from spt.report.reach import NeededReach, needed_reaches
from spt.report.records import (
    baseline_records,
    contrast_records,
    curve_records,
    item_records,
    row_records,
    seed_records,
    trial_records,
)
from spt.report.search import SearchResult, search_results
from spt.runs.baseline import PREFIX as BASELINE
from spt.runs.folder import keeping_results
from spt.runs.index import ComparisonRuns, Failure, all_runs, comparisons_of, run_outcome
from spt.runs.plan import PLAN, Ended, Record, StudyPlan, read_plan, run_names
from spt.runs.result import Result

if TYPE_CHECKING:
    import pandas

Table = Literal["rows", "seeds", "items", "models", "baselines", "metrics", "groups", "searches", "curves"]


class RunRecord(Record):
    """A single run, named by its folder."""

    name: str
    state: Ended | Literal["done"] = "done"
    reason: str = ""
    result: Result | None = None


class Report(Record):
    """Everything that finished runs say.

        report = spt.read_report("runs")
        for row in report.rows:
            print(row.label, row.delta, row.low, row.high, row.verdict)

    Its records are also what report.json holds.
    """

    rows: tuple[Row, ...] = ()
    models: tuple[ModelComparison, ...] = ()  # of several models on one task
    models_across_tasks: tuple[ModelsAcrossTasks, ...] = ()
    levels: tuple[LevelResult, ...] = ()  # rows of a study, side by side
    contrasts: tuple[Contrast, ...] = ()  # between initialisations
    controls: tuple[Control, ...] = ()  # arms beside scratch and SPT
    baselines: tuple[BaselineComparison, ...] = ()  # answers without a network
    metrics: tuple[MetricScores, ...] = ()  # besides the compared one
    confusions: tuple[Confusion, ...] = ()  # of the classes, arm by arm
    calibrations: tuple[ArmCalibration, ...] = ()  # of classifiers, arm by arm
    groups: tuple[GroupComparison, ...] = ()  # of test rows, such as patients
    best: tuple[BestShare, ...] = ()  # share of a total budget
    reaches: tuple[NeededReach, ...] = ()  # how far layers have to see
    pooled: tuple[TaskAverage, ...] = ()  # over tasks
    averages: tuple[PlainAverage, ...] = ()  # over tasks, as papers print them
    matches: tuple[BudgetMatch, ...] = ()  # of total budgets
    searches: tuple[SearchResult, ...] = ()  # for settings
    spent: tuple[StageCost, ...] = ()
    precedents: tuple[PublishedComparison, ...] = ()  # published numbers
    curves: tuple[Curve, ...] = ()  # of learning, run by run
    provenance: Provenance = Provenance()
    runs: tuple[RunRecord, ...] = ()
    unpaired: tuple[Failure, ...] = ()  # unfinished runs that no study mentions
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # run folders that were read

    @property
    def failures(self) -> tuple[tuple[str, Failure], ...]:
        """Every failure, with the label of its row or search."""
        rows = [(row.label, failure) for row in self.rows for failure in row.told_failures]
        rows += [(control.label, failure) for control in self.controls for failure in control.failures]
        rows += [(each.label, failure) for each in self.baselines for failure in each.failures]
        trials = [(search.label, failure) for search in self.searches for failure in search.failures]
        return (*rows, *trials, *(("", failure) for failure in self.unpaired))

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain dicts, seeds and costs nested: what `rows` of report.json holds.

        [record["delta"] for record in spt.read_report("runs").records()]
        """
        records: list[dict[str, Any]] = self.model_dump(mode="json", include={"rows"})["rows"]
        return records

    def to_pandas(self, table: Table = "rows") -> "pandas.DataFrame":
        """A table of the report as a data frame, with the columns of its CSV file (`rows` are report.csv).

        spt.read_report("runs").to_pandas("seeds").groupby("label")["delta"].mean()
        """
        import pandas

        return pandas.DataFrame(self.table_records(table))

    def table_records(self, table: Table) -> list[dict[str, Any]]:
        """A table of the report as flat records, with the columns of its CSV file."""
        flatten: dict[Table, tuple[Callable[[Any], list[dict[str, Any]]], Any]] = {
            "rows": (row_records, self.rows),
            "seeds": (seed_records, self.rows),
            "items": (item_records, self.rows),
            "models": (contrast_records, self.models),
            "baselines": (baseline_records, self.baselines),
            "metrics": (metric_records, self.metrics),
            "groups": (group_records, self.groups),
            "searches": (trial_records, self.searches),
            "curves": (curve_records, self.curves),
        }
        records, part = flatten[table]
        return records(part)


@keeping_results()
def read_report(paths: Sequence[Path]) -> Report:
    """A report over any mixture of studies, folders of runs and single runs."""
    studies: dict[Path, tuple[Path, StudyPlan]] = {}
    paired: list[ComparisonRuns] = []
    spenders: list[StudyRuns] = []
    runs: dict[str, RunRecord] = {}
    unpaired: dict[str, Failure] = {}
    warnings: list[str] = []

    def add(folder: Path, plan: StudyPlan) -> None:
        if folder.resolve() not in studies:
            studies[folder.resolve()] = (folder, plan)
            paired.extend(comparisons_of(folder, plan))
            trials = [trial for search in plan.searches for trial in search.trials]
            spenders.append(StudyRuns(folder.name, folder.parent, plan.cells, trials))

    for folder in {path.resolve(): _existing(path) for path in paths}.values():
        if (folder / PLAN).is_file():
            add(folder, read_plan(folder))
        elif any((folder / name).is_file() for name in ("result.json", "status.json", "job.json")):
            runs[folder.as_posix()] = _single(folder)
        else:
            contents = all_runs(folder)
            if not contents.studies and not contents.pairings:
                reason = f" ({contents.warnings[0]})" if contents.warnings else ""
                raise DataError(
                    f"{folder} holds no study and no finished finetuning run{reason}; "
                    "name a folder that `spt compare`, `spt study` or `spt finetune` wrote to"
                )
            for study in contents.studies:
                add(*study)
            paired += contents.pairings
            if contents.pairings:
                spenders.append(StudyRuns("", folder, [cell for pair in contents.pairings for cell in pair.cells]))
            warnings += contents.warnings
            unpaired.update({(folder / failure.run).as_posix(): failure for failure in contents.unpaired})
    rows, same_runs = adjust_for_multiplicity([compare_arms(pairing) for pairing in paired])
    matches = budget_matches(rows)
    mismatches = {match.label: match.warnings for match in matches}
    findings = levels.study_findings(rows)
    groups, not_grouped = model_groups(rows)
    across, not_averaged = models_across_tasks(groups)
    notes = [f"{folder.name}: {note}" for folder, plan in studies.values() for note in plan.notes]
    searches = [search for folder, plan in studies.values() for search in search_results(folder, plan)]
    named = {pair.root / name for pair in paired for cell in pair.cells for name in (cell.parent, cell.run) if name}
    named |= {folder.parent / name for folder, plan in studies.values() for name in run_names(plan)}
    named |= {folder.parent / each.run for folder, plan in studies.values() for each in plan.baselines}
    folders = {path.as_posix() for path in named if path.is_dir()} | runs.keys() | unpaired.keys()
    controls, baselines = compare_controls(rows), compare_baselines(rows)
    others_lost = len(unpaired) + sum(len(each.failures) for each in controls)
    others_lost += sum(len(each.failures) for each in baselines)
    return Report(
        rows=tuple(
            row.model_copy(update={"warnings": (*row.warnings, *mismatches.get(row.label, ()))})
            for row in (comparison.row for comparison in rows)
        ),
        models=compare_models(groups),
        models_across_tasks=tuple(across),
        levels=findings.levels,
        contrasts=findings.contrasts,
        controls=controls,
        baselines=baselines,
        metrics=metric_scores(rows),
        confusions=confusions(rows),
        calibrations=calibrations(rows),
        groups=group_comparisons(rows),
        best=findings.best,
        reaches=needed_reaches(rows),
        pooled=findings.pooled,
        averages=findings.averages,
        matches=matches,
        searches=tuple(searches),
        spent=study_costs(spenders),
        precedents=published_comparisons(rows),
        curves=curves(rows),
        provenance=provenance(rows, list(studies.values()), searches, others_lost),
        runs=tuple(runs.values()),
        unpaired=tuple(unpaired.values()),
        warnings=(*warnings, *same_runs),
        notes=(*notes, *not_grouped, *not_averaged, *findings.notes),
        folders=tuple(sorted(folders)),
    )


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}; name a study, a run, or the folder that holds them")
    # Neither `.` nor a link names the folder that holds the study's runs.
    return folder.resolve() if folder.is_symlink() or folder.name in ("", "..") else folder


def _single(folder: Path) -> RunRecord:
    if folder.name.startswith(BASELINE):
        raise UsageError(f"{folder} is a baseline; name the study that is held against it, or the folder of both")
    outcome = run_outcome(folder.parent, folder.name)
    if isinstance(outcome, Result):
        return RunRecord(name=folder.name, result=outcome)
    if outcome.state == "unreadable":
        raise DataError(outcome.reason)
    return RunRecord(name=folder.name, state=outcome.state, reason=outcome.reason)
