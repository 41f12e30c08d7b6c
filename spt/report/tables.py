"""The tables of a report as cells of text; the writers lay them out.

Fractions such as accuracy are shown in percent, their differences in points.
"""

from collections.abc import Callable
from typing import NamedTuple

from spt.report.across_tasks import Estimate
from spt.report.arms import Arm, Cost
from spt.report.collect import Report, RunRecord
from spt.report.cost_tables import (
    cost_cells,
    cost_table,
    matched_budget_table,
    operation_table,
    parameter_table,
    total_cost_table,
)
from spt.report.format import (
    ARM,
    ReportTable,
    abbreviate,
    delta_text,
    interval_text,
    metric_text,
    p_text,
    score_text,
    size_text,
)
from spt.report.provenance_tables import checklist_table, command_table, data_table, environment_table
from spt.report.search import SearchArm, SearchResult
from spt.runs.plan import factors_text, value_text


class Section(NamedTuple):
    """A part of a report: its figures and tables, in the order of a page."""

    name: str
    title: str
    figures: tuple[str, ...]  # prefixes of their names
    tables: tuple[Callable[[Report], ReportTable], ...]


def all_tables(report: Report) -> list[ReportTable]:
    """The tables of a report that are not empty."""
    return [table for _, tables in by_section(report) for table in tables]


def by_section(report: Report) -> list[tuple[Section, list[ReportTable]]]:
    """Every section with its tables that are not empty; single runs have a section of their own."""
    sections = [
        (section, [table for table in (build(report) for build in section.tables) if table.body])
        for section in SECTIONS
    ]
    return [*sections, (RUNS, [run_table(run) for run in report.runs])]


def score_table(report: Report) -> ReportTable:
    metrics = {metric_text(row.metric) for row in report.rows if row.metric}
    header = ("task / model", "n", "scratch", "SPT", "delta", "95 % interval", "p", "Holm p", "detectable", "chance")
    header_chance = ("scratch\n> chance", "SPT\n> chance")
    body = [
        (
            f"{row.label}: {metric_text(row.metric)}" if len(metrics) > 1 and row.metric else row.label,
            str(row.n) if row.n == row.planned else f"{row.n} of {row.planned}",
            score_text(row.scratch, row.metric),
            score_text(row.spt, row.metric),
            delta_text(row.delta, row.metric),
            interval_text(row.low, row.high, row.metric),
            p_text(row.p),
            p_text(row.holm),
            size_text(row.detectable, row.metric),
            score_text(row.chance, row.metric),
            _chance_text(row.scratch_arm),
            _chance_text(row.spt_arm),
        )
        for row in report.rows
    ]
    title = f"Test {metrics.pop()}" if len(metrics) == 1 else "Test scores"
    tests = max((row.tests for row in report.rows), default=0)
    family = (
        f", Holm p is adjusted for the {tests} comparison{'' if tests == 1 else 's'} of this report" if tests else ""
    )
    caption = (
        "Means over the n seeds at which both arms finished; delta is SPT - scratch; intervals and p are of each row "
        f"alone{family}. > chance: one-sided p over seeds, or (items) over the test rows of one run; not adjusted."
    )
    return ReportTable(
        title, (*header, *header_chance), body, 1, ((0, 1, 2, 3, 4, 5), (0, 6, 7, 8, 9, 10, 11)), caption
    )


def _chance_text(arm: Arm | None) -> str:
    if arm is None or arm.chance_p is None:
        return "-"
    return p_text(arm.chance_p) + (" (items)" if arm.chance_test == "binomial" else "")


def level_table(report: Report) -> ReportTable:
    header = ("task / model", "level", "n", "scratch", "change", "SPT", "change", "delta")
    body, last = [], ("", "")
    for level in report.levels:
        name = (level.study, level.label)
        body.append(
            (
                "" if name == last else f"{level.label}: {metric_text(level.metric)}" if level.metric else level.label,
                factors_text(level.factors),
                str(level.n),
                score_text(level.scratch, level.metric),
                delta_text(level.scratch_change, level.metric),
                score_text(level.spt, level.metric),
                delta_text(level.spt_change, level.metric),
                delta_text(level.delta, level.metric),
            )
        )
        last = name
    caption = "Change: from the level above, mean over the seeds that both have; not tested."
    return ReportTable("Scores by level", header, body, 2, ((0, 1, 3, 4, 5, 6, 7),), caption)


def contrast_table(report: Report) -> ReportTable:
    header = ("task / model", "arm", "contrast", "n", "difference", "95 % interval", "p", "Holm p")
    body = [
        (
            contrast.label,
            contrast.what,
            f"{contrast.first} - {contrast.second}",
            str(contrast.n) if contrast.n == contrast.planned else f"{contrast.n} of {contrast.planned}",
            delta_text(contrast.difference, contrast.metric),
            interval_text(contrast.low, contrast.high, contrast.metric),
            p_text(contrast.p),
            p_text(contrast.holm),
        )
        for contrast in (*report.contrasts, *(contrast for best in report.best for contrast in best.contrasts))
    ]
    caption = (
        "Paired by seed. Holm p is adjusted for all contrasts of the study; for shares, for every pair of them, also "
        "those not shown, since the best one was picked by these scores."
    )
    return ReportTable("Contrasts", header, body, 3, ((0, 1, 2, 4, 5, 7),), caption)


def across_tasks_table(report: Report) -> ReportTable:
    header = ("tasks", "model", "pairs", "scratch", "SPT", "difference", "P(SPT > scratch)")
    body = [
        (
            ", ".join(average.tasks),
            average.label,
            str(average.pairs),
            _estimate_text(average.scratch),
            _estimate_text(average.spt),
            _estimate_text(average.difference, "+"),
            _estimate_text(average.probability),
        )
        for average in report.pooled
    ]
    left_out = sorted({label for average in report.pooled for label in average.left_out})
    caption = (
        "Interquartile means over all runs of the tasks, scores scaled to 0 for chance and 1 for perfect; in brackets "
        "95 % intervals of a bootstrap that draws seeds within each task: they apply to other seeds, not other tasks, "
        "and are too narrow with few seeds (in simulation they cover 85 % with three seeds, 90 % with five)."
    )
    caption += f" Left out, since incomplete or without such a scale: {'; '.join(left_out)}." if left_out else ""
    return ReportTable("Across tasks", header, body, 2, ((0, 1, 5, 6),), caption)


def _estimate_text(estimate: Estimate, sign: str = "") -> str:
    value = f"{estimate.value:{sign}.3f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({estimate.low:{sign}.3f} to {estimate.high:{sign}.3f})"


def published_table(report: Report) -> ReportTable:
    header = ("task / model", "source", "remarks", "scratch", "published", "SPT", "published", "delta", "published")
    body = [
        (
            f"{comparison.label}: {metric_text(comparison.metric)}",
            comparison.source,
            "; ".join(
                (
                    *comparison.remarks,
                    *([f"our settings differ: {abbreviate(comparison.differs, 6)}"] if comparison.differs else []),
                )
            )
            or "-",
            score_text(comparison.scratch, comparison.metric),
            score_text(comparison.published_scratch, comparison.metric),
            score_text(comparison.spt, comparison.metric),
            score_text(comparison.published_spt, comparison.metric),
            delta_text(comparison.delta, comparison.metric),
            delta_text(comparison.published_delta, comparison.metric),
        )
        for comparison in report.precedents
    ]
    caption = (
        "As printed, one run each unless the paper says otherwise, without intervals: a difference from ours is not a "
        "test. Read the remarks before comparing."
    )
    return ReportTable("Comparison with published numbers", header, body, 3, ((0, 3, 4, 5, 6, 7, 8),), caption)


def seed_table(report: Report) -> ReportTable:
    header = ("task / model", "seed", "scratch", "SPT", "delta", "scratch run", "SPT run", "pretraining run")
    body = [
        (
            "" if number else row.label,
            str(seed.seed),
            seed.scratch_state if seed.scratch is None else score_text(seed.scratch, row.metric),
            seed.spt_state if seed.spt is None else score_text(seed.spt, row.metric),
            delta_text(seed.delta, row.metric),
            seed.scratch_run,
            seed.spt_run,
            seed.pretrain_run or "",
        )
        for row in report.rows
        for number, seed in enumerate(row.seeds)
    ]
    return ReportTable("Seed by seed", header, body, 1, ((0, 1, 2, 3, 4),))


def per_example_table(report: Report) -> ReportTable:
    header = ("task / model", "seed", "items", "delta", "95 % interval", "only scratch", "only SPT", "McNemar p")
    body = [
        (
            "" if number else f"{row.label}: {metric_text(item.metric)}",
            str(item.seed),
            f"{item.n:,}",
            delta_text(item.difference, item.metric),
            interval_text(item.low, item.high, item.metric),
            "-" if item.only_scratch is None else f"{item.only_scratch:,}",
            "-" if item.only_spt is None else f"{item.only_spt:,}",
            p_text(item.p),
        )
        for row in report.rows
        for number, item in enumerate(row.items)
    ]
    caption = (
        "Each line compares the two networks of one seed and generalises to other test items, not to networks of other "
        "seeds, so it cannot decide which arm is better. Only scratch, only SPT: items that only this network has "
        "right. Intervals by bootstrap over items; p by McNemar's exact test, not adjusted."
    )
    return ReportTable("Test items, seed by seed", header, body, 1, ((0, 1, 3, 4, 7),), caption)


def search_table(report: Report) -> ReportTable:
    header = ("task / model", "arm", "chosen setting", "trials", "failed", "validation", "at the edge")
    body: list[tuple[str, ...]] = []
    for search in report.searches:
        metric = f": {metric_text(search.metric)}" if search.metric else ""
        for name, arm in _search_arms(search):
            body.append(
                (
                    search.label + metric if name == "scratch" else "",
                    name,
                    "not chosen yet" if arm.setting is None else factors_text(arm.setting),
                    str(arm.trials) if arm.done == arm.trials else f"{arm.done} of {arm.trials}",
                    str(arm.lost),
                    score_text(arm.value, search.metric),
                    ", ".join(arm.edges) or ("-" if arm.setting is None else "no"),
                )
            )
    spaces = [
        f"{search.label}: "
        + "; ".join(f"{key} {', '.join(map(value_text, values))}" for key, values in search.space.items())
        for search in report.searches
    ]
    caption = (
        "Settings are chosen by the validation score of the selected checkpoint, mean over a setting's seeds; the "
        f"test split plays no part. Tried in both arms: {' | '.join(spaces)}."
    )
    return ReportTable("Search", header, body, 3, ((0, 1, 2, 3, 5, 6),), caption)


def _search_arms(search: SearchResult) -> tuple[tuple[str, SearchArm], tuple[str, SearchArm]]:
    return ("scratch", search.scratch), ("SPT", search.spt)


def expected_best_table(report: Report) -> ReportTable:
    """Expected best validation score by number of settings tried, both arms."""
    body: list[tuple[str, ...]] = []
    for search in report.searches:
        curves = [{one.settings: one.value for one in arm.expected} for _, arm in _search_arms(search)]
        for number, settings in enumerate(sorted({*curves[0], *curves[1]})):
            scores = (score_text(curve.get(settings), search.metric) for curve in curves)
            label = f"{search.label}: {metric_text(search.metric)}"
            body.append(("" if number else label, str(settings), *scores))
    caption = (
        "Expected best validation score of this many finished settings, drawn at random; a setting without a score "
        "counts as the worst of those that have one."
    )
    return ReportTable(
        "Expected best on validation", ("task / model", "settings", "scratch", "SPT"), body, 1, None, caption
    )


def trial_table(report: Report) -> ReportTable:
    header = ("task / model", "arm", "setting", "values", "seed", "validation", "run")
    body = [
        (
            search.label,
            ARM[trial.arm],
            str(trial.number),
            factors_text(trial.setting),
            str(trial.seed),
            trial.state if trial.value is None else score_text(trial.value, search.metric),
            trial.run,
        )
        for search in report.searches
        for trial in search.trials
    ]
    return ReportTable("Trials", header, body, 4, ())


def failure_table(report: Report) -> ReportTable:
    header = ("task / model", "arm", "seed", "state", "reason", "run")
    body = [
        (
            label or failure.run,
            ARM[failure.arm] if failure.arm else "",
            "" if failure.seed is None else str(failure.seed),
            failure.state,
            failure.reason,
            failure.run,
        )
        for label, failure in report.failures
    ]
    return ReportTable("Runs without a score", header, body, 6, ((0, 1, 2, 3, 4),))


def run_table(run: RunRecord) -> ReportTable:
    """A single run."""
    body = [("state", f"{run.state}: {run.reason}" if run.reason else run.state)]
    if (result := run.result) is not None:
        cost = dict(zip(Cost.model_fields, cost_cells(result.total), strict=True))
        body += [
            ("recipe", f"{result.recipe} ({result.task} / {result.model})"),
            ("stage", f"{result.stage}, seed {result.seed}" + (", smoke run" if result.smoke else "")),
            ("best step", f"{result.best_step} of {result.own.steps}, by validation {result.selected_by}"),
            ("stopped by", result.stop),
        ]
        for split, scores in (("validation", result.val), ("test", result.test or {})):
            body += [(f"{split} {metric_text(name)}", score_text(score, name)) for name, score in scores.items()]
        body += [
            ("cost", f"{cost['steps']} steps, {cost['examples']} examples, {cost['flops']} FLOPs"),
            (
                "",
                f"{cost['seconds']}, {cost['peak_bytes']}" + (", pretraining included" if result.parent else ""),
            ),
            ("parameters", ", ".join(f"{part} {number:,}" for part, number in result.parameters.items())),
        ]
    return ReportTable(run.name, ("", ""), body, 2)


SECTIONS = (
    Section("differences", "SPT against scratch", ("forest",), (score_table,)),
    Section("levels", "What the study varies", ("levels",), (level_table, contrast_table)),
    Section("published", "Published numbers", (), (published_table,)),
    Section("tasks", "Several tasks", (), (across_tasks_table,)),
    Section("seeds", "Seeds and test items", ("seeds",), (seed_table, per_example_table)),
    Section("training", "Training", ("learning", "pretraining"), ()),
    Section("settings", "Settings searched", ("expected",), (search_table, expected_best_table, trial_table)),
    Section(
        "cost",
        "What it cost",
        ("compute",),
        (matched_budget_table, cost_table, total_cost_table, operation_table, parameter_table),
    ),
    Section("failures", "Failures", (), (failure_table,)),
    Section("origin", "Where the numbers come from", (), (data_table, environment_table, command_table)),
    Section("checklist", "Checklist", (), (checklist_table,)),
)

RUNS = Section("runs", "Runs", (), ())
