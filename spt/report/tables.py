"""The tables of a report as cells of text; the writers lay them out.

Fractions such as accuracy are shown in percent, their differences in points.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from spt.report.across_tasks import Estimate
from spt.report.arms import Cost
from spt.report.collect import Report, RunRecord
from spt.report.cost_tables import COST_TABLES, cost_cells
from spt.report.format import (
    ARM,
    Group,
    ReportTable,
    TableSpec,
    abbreviate,
    count_text,
    flops_text,
    interval_text,
    metric_text,
    part_text,
    ratio_text,
    score_interval_text,
    score_text,
    time_text,
)
from spt.report.published import PublishedComparison
from spt.report.search import SearchResult
from spt.report.verdict import PairedContrast
from spt.runs.plan import Place, setting_text, value_text

MOST_LINES = 1_000  # of a table


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
        (section, [_readable(table) for table in (build(report) for build in section.tables) if table.body])
        for section in SECTIONS
    ]
    return [*sections, (RUNS, [run_table(run) for run in report.runs])]


def _readable(table: ReportTable) -> ReportTable:
    """The first lines of a table that nobody would read to its end, and that a browser would take long to lay out."""
    if len(table.body) <= MOST_LINES:
        return table
    note = f"The first {MOST_LINES:,} of {len(table.body):,} lines; report.json and the CSV files have the others."
    return table._replace(body=table.body[:MOST_LINES], caption=f"{table.caption} {note}".lstrip())


def _label(record: Any) -> str:
    return record.label + (f": {metric_text(record.metric)}" if record.metric else "")


def _short_label(record: Any, report: Report) -> str:
    """The metric is in the title of the scores, unless rows differ in it."""
    return _label(record) if len(_metrics(report)) > 1 else record.label


def _metrics(report: Report) -> set[str]:
    return {metric_text(row.metric) for row in report.rows if row.metric}


def _score_title(report: Report) -> str:
    metrics = _metrics(report)
    return f"Test {metrics.pop()}" if len(metrics) == 1 else "Test scores"


def _score_caption(report: Report) -> str:
    tests = max((row.tests for row in report.rows), default=0)
    family = (
        f", Holm p is adjusted for the {tests} comparison{'' if tests == 1 else 's'} of this report" if tests else ""
    )
    return (
        "Means over the n seeds at which both arms finished; delta is SPT - scratch; intervals and p are of each row "
        f"alone{family}. > chance: one-sided p over seeds, or (items) over the test rows of one run; not adjusted."
        + (
            " Where one arm alone was run, n counts its runs and the interval is that of its mean."
            if any(row.only for row in report.rows)
            else ""
        )
    ) + (f" {CORRECTED}" if _has_splits(report) else "")


CORRECTED = (
    "Where there are several splits of the data, n counts their pairs; scores are averaged within each split, and "
    "intervals and p are those of the corrected resampled t test over splits (Nadeau and Bengio), for other splits of "
    "the same data and other seeds."
)


def _score_of(arm: str) -> Callable[[Any, str], str]:
    """A row's mean; with its interval where this arm alone was run, so that no difference has one."""

    def text(row: Any, metric: str) -> str:
        score = score_text(getattr(row, arm), metric)
        if row.only is None or row.only.arm != arm or row.only.low is None:
            return score
        return f"{score} ({score_interval_text(row.only.low, row.only.high, metric)})"

    return text


SCORES = TableSpec(
    _score_title,
    "task / model | n | scratch | SPT: spt | delta | 95 % interval | p | Holm p: holm | detectable | chance | "
    "scratch\n> chance: scratch_arm | SPT\n> chance: spt_arm",
    lambda report: [Group(_short_label(row, report), [row]) for row in report.rows],
    cells={
        "n": lambda row, _: part_text(row.averaged, row.planned),
        "scratch": _score_of("scratch"),
        "SPT": _score_of("spt"),
    },
    narrow=((0, 1, 2, 3, 4, 5), (0, 6, 7, 8, 9, 10, 11)),
    caption=_score_caption,
)


MODELS = TableSpec(
    "Models",
    "task | model: name | scratch | scratch runs: scratch_n | SPT: spt | SPT runs: spt_n | parameters | "
    "FLOPs per example | s per step | peak memory: peak_bytes",
    lambda report: [
        Group(_short_label(comparison, report), comparison.models, comparison.metric) for comparison in report.models
    ],
    cells={
        "parameters": lambda model, _: "-" if model.parameters is None else count_text(model.parameters),
        "FLOPs per example": lambda model, _: (
            "-" if model.flops_per_example is None else flops_text(model.flops_per_example)
        ),
        "s per step": lambda model, _: "-" if model.seconds_per_step is None else f"{model.seconds_per_step:.3g}",
    },
    text_columns=2,
    narrow=((0, 1, 2, 4), (0, 1, 6, 7, 8, 9)),
    caption="Means over the seeds that an arm has finished. Costs are those of supervised training: operations "
    "analytic, forward and backward; seconds with evaluation.",
)


def _contrast_arm(contrast: Any, _: str) -> str:
    return "SPT - scratch" if contrast.arm == "difference" else ARM[contrast.arm]


def _ratio_cell(axis: str) -> Callable[[Any, str], str]:
    return lambda contrast, _: ratio_text(contrast.ratios[axis])


BETWEEN_MODELS = TableSpec(
    "Contrasts between models",
    "task | arm | contrast | n | difference | 95 % interval | p | Holm p: holm | detectable | over test rows: rows | "
    "parameters | FLOPs | time | memory",
    lambda report: [Group(_short_label(comparison, report), comparison.contrasts) for comparison in report.models],
    cells={
        "arm": _contrast_arm,
        "contrast": lambda contrast, _: f"{contrast.first} - {contrast.second}",
        "over test rows": lambda contrast, metric: (
            "-" if contrast.rows is None else interval_text(contrast.rows.low, contrast.rows.high, metric)
        ),
        "parameters": _ratio_cell("parameters"),
        "FLOPs": _ratio_cell("flops_per_example"),
        "time": _ratio_cell("seconds_per_step"),
        "memory": _ratio_cell("peak_bytes"),
    },
    text_columns=3,
    narrow=((0, 1, 2, 4, 5, 7), (1, 2, 3, 8, 9)),
    caption=lambda report: (
        "First - second, paired by seed; of SPT - scratch the difference of the gains. Holm p is adjusted for all "
        "pairs in both arms, and for all pairs of the gains. Over test rows: percentile interval for other test rows "
        "and these networks. Parameters, FLOPs per example, time per step and peak memory: first : second."
        + (f" {CORRECTED} They have no interval over test rows." if _has_splits(report) else "")
    ),
)


def _has_splits(report: Report) -> bool:
    return any(row.splits is not None for row in report.rows)


RANKINGS = TableSpec(
    "Ranking",
    "task | arm | from best to worst: order | without a score: unranked",
    lambda report: [Group(_short_label(comparison, report), comparison.rankings) for comparison in report.models],
    cells={
        "from best to worst": lambda ranking, _: " > ".join(", ".join(group) for group in ranking.order) or "-",
        "without a score": lambda ranking, _: ", ".join(ranking.unranked) or "-",
    },
    text_columns=4,
    narrow=((0, 1, 2),),
    caption="It splits (>) only where every model before is shown to beat every model after; models with a comma "
    "between them are not all told apart: the contrasts say which.",
)


MODELS_ACROSS_TASKS = TableSpec(
    "Models over several tasks",
    "tasks | model | arm | average | 95 % interval | mean rank",
    lambda report: [
        Group(", ".join(across.tasks), across.averages, across.metric) for across in report.models_across_tasks
    ],
    cells={
        "average": lambda average, metric: score_text(average.average, metric),
        "95 % interval": lambda average, metric: score_interval_text(average.low, average.high, metric),
        "mean rank": lambda average, _: f"{average.mean_rank:.2f}",
    },
    text_columns=3,
    narrow=((1, 2, 3, 4, 5),),
    caption="Average: the plain mean over tasks, as papers print it, with a t interval over seeds (Welch, "
    "Satterthwaite): it speaks of other seeds and of these tasks. Rank 1 is best.",
)

AVERAGE_CONTRASTS = TableSpec(
    "Contrasts of averages",
    "tasks | arm | contrast | difference | 95 % interval | p | Holm p: holm | Wilcoxon p: wilcoxon_p | "
    "Holm p: wilcoxon_holm",
    lambda report: [
        Group(", ".join(across.tasks), across.contrasts, across.metric) for across in report.models_across_tasks
    ],
    cells={"arm": _contrast_arm, "contrast": lambda contrast, _: f"{contrast.first} - {contrast.second}"},
    text_columns=3,
    narrow=((1, 2, 3, 4, 6, 8),),
    caption="First - second, paired by seed within each task. Holm p is adjusted for all pairs in both arms, and for "
    "all pairs of the gains. Wilcoxon's signed-rank test is over tasks.",
)


def _level_groups(report: Report) -> list[Group]:
    groups = groupby(report.levels, lambda level: (level.study, level.label))
    return [Group(_label(levels[0]), levels) for levels in (list(levels) for _, levels in groups)]


LEVELS = TableSpec(
    "Scores by level",
    "task / model | level: factors | n | scratch | change: scratch_change | SPT: spt | change: spt_change | delta",
    _level_groups,
    text_columns=2,
    narrow=((0, 1, 3, 4, 5, 6, 7),),
    caption="Change: from the level above, mean over the seeds that both have; not tested.",
)

CONTRASTS = TableSpec(
    "Contrasts",
    "task / model | arm: what | contrast | n | difference | 95 % interval | p | Holm p: holm",
    lambda report: [
        Group(contrast.label, [contrast])
        for contrast in chain(report.contrasts, *(each.contrasts for each in (*report.best, *report.reaches)))
    ],
    cells={"contrast": lambda contrast, _: f"{contrast.first} - {contrast.second}"},
    text_columns=3,
    narrow=((0, 1, 2, 4, 5, 7),),
    caption="Paired by seed. Holm p is adjusted for all contrasts of the study; for shares, for every pair of them, "
    "also those not shown, since the best one was picked by these scores.",
)


def _control_groups(report: Report) -> list[Group]:
    named = _label if len(_metrics(report)) > 1 else attrgetter("label")
    return [Group(label, list(controls)) for label, controls in groupby(report.controls, named)]


def _interval(contrast: PairedContrast, metric: str) -> str:
    return interval_text(contrast.low, contrast.high, metric)


CONTROLS = TableSpec(
    "Controls",
    "task / model | arm | n | score | FLOPs | control\n- scratch: over_scratch.difference | control - scratch\n"
    "95 % interval | p: over_scratch.p | Holm p: over_scratch.holm | SPT -\ncontrol: below_spt.difference | "
    "SPT - control\n95 % interval | p: below_spt.p | Holm p: below_spt.holm",
    _control_groups,
    cells={
        "score": lambda control, metric: score_text(control.score, metric),
        "FLOPs": lambda control, _: ratio_text(control.ratios["flops"]),
        "control - scratch\n95 % interval": lambda control, metric: _interval(control.over_scratch, metric),
        "SPT - control\n95 % interval": lambda control, metric: _interval(control.below_spt, metric),
    },
    text_columns=2,
    narrow=((0, 1, 2, 3, 4), (0, 1, 5, 6, 8), (0, 1, 9, 10, 12)),
    caption="Paired by seed, over the seeds at which scratch, SPT and the control have finished, so that the two "
    "differences of a control add up to SPT - scratch. FLOPs: of the control to scratch, its pretraining included. "
    "Holm p is adjusted for all contrasts with controls of this report.",
)


def _baselines_caption(report: Report) -> str:
    one = any(each.one_number for comparison in report.baselines for each in comparison.scores)
    on = ", on each split of the data the mean of which is shown" if _has_splits(report) else ""
    notes = dict.fromkeys(
        f"{each.title}: {note}" for comparison in report.baselines for each in comparison.scores for note in each.notes
    )
    return (
        "Fitted to the networks' training rows, settings chosen on their validation rows, scored on test once. "
        + (f"Runs -: no chance is in it, so that one number stands for all seeds{on}. " if one else "")
        + (f"{'; '.join(notes)}." if notes else "")
    ).rstrip()


BASELINES = TableSpec(
    "Baselines without a network",
    "task | baseline: title | what it sees: sees | score | runs | fitted to: fitted | time",
    lambda report: [Group(_label(comparison), comparison.scores) for comparison in report.baselines],
    cells={
        "what it sees": lambda each, _: each.sees or "-",
        "score": lambda each, metric: score_text(each.score, metric),
        "runs": lambda each, _: "-" if each.one_number and each.n else part_text(each.n, each.planned),
        "fitted to": lambda each, _: "-" if each.fitted is None else f"{each.fitted:,}",
        "time": lambda each, _: "-" if each.seconds is None else time_text(each.seconds),
    },
    text_columns=3,
    narrow=((0, 1, 3, 4, 6), (1, 2)),
    caption=_baselines_caption,
)

AGAINST_BASELINES = TableSpec(
    "Networks against baselines",
    "task | network: first | baseline: second | n | network\nscore: score | difference | 95 % interval | p | "
    "Holm p: holm",
    lambda report: [Group(each.label, [c for c in each.contrasts if c.shown]) for each in report.baselines],
    cells={"network\nscore": lambda contrast, metric: score_text(contrast.score, metric)},
    text_columns=3,
    narrow=((1, 2, 5, 6, 8),),
    caption=lambda report: (
        "Network - baseline, seed by seed, in the arm with the better mean. Holm p is adjusted for both arms of every "
        "network and all baselines of this report. Intervals are over "
        + ("splits of the data and seeds." if _has_splits(report) else "seeds, for these test rows.")
    ),
)


OTHER_METRICS = TableSpec(
    "Other metrics",
    "task / model | metric | n | scratch | SPT: spt | delta | 95 % interval",
    lambda report: [Group(label, list(scores)) for label, scores in groupby(report.metrics, key=attrgetter("label"))],
    cells={"metric": lambda scores, metric: metric_text(metric) + ("" if scores.higher_is_better else ", lower")},
    text_columns=2,
    narrow=(),
    caption="Of the test rows, over the n seeds at which both arms finished, or the one that was run. Intervals are of "
    "each line alone: they decide nothing here, where many are looked at. Lower: the lower the better.",
)


def _most_taken_for(line: SimpleNamespace, _: str) -> str:
    others = sorted((-rows, name) for name, rows in line.others if rows)
    return ", ".join(f"{name} ({-rows:.3g})" for rows, name in others[:3]) or "-"


def _confusion_lines(report: Report) -> list[Group]:
    groups = []
    for label, confusions in groupby(report.confusions, key=attrgetter("label")):
        lines = []
        for confusion in confusions:
            names = [each.name for each in confusion.classes]
            for k, each in enumerate(confusion.classes):
                others = [pair for pair in zip(names, each.counts, strict=True) if pair[0] != each.name]
                lines.append(
                    SimpleNamespace(
                        arm=confusion.arm, name=each.name, rows=each.rows, right=each.counts[k], others=others
                    )
                )
        groups.append(Group(label, lines))
    return groups


CONFUSIONS = TableSpec(
    "Right and wrong answers by class",
    "task / model | arm | true class: name | rows | right | taken for",
    _confusion_lines,
    cells={
        "rows": lambda line, _: f"{line.rows:.0f}",
        "right": lambda line, _: f"{line.right:.3g}" + (f" ({line.right / line.rows:.0%})" if line.rows else ""),
        "taken for": _most_taken_for,
    },
    text_columns=3,
    narrow=(),
    caption="Test answers, mean over an arm's finished runs; taken for: the three commonest of other classes. The "
    "whole matrix is in report.json.",
)


def _temperatures(values: Sequence[float]) -> str:
    texts = [f"{each:.3g}" for each in (sorted(values) if len(values) > 3 else values)]
    return f"{texts[0]} to {texts[-1]}" if len(texts) > 3 else ", ".join(texts)


CALIBRATIONS = TableSpec(
    "Probabilities before and after calibration",
    "task / model | arm | runs | temperature | log loss: log_loss | after: log_loss_after | Brier score: brier | "
    "after: brier_after | ECE (%): ece | after: ece_after",
    lambda report: [Group(label, list(arms)) for label, arms in groupby(report.calibrations, key=attrgetter("label"))],
    cells={
        "temperature": lambda arm, _: (
            _temperatures(arm.temperatures) + (f" ({arm.at_limit} at the end)" if arm.at_limit else "")
        ),
    },
    text_columns=2,
    narrow=((0, 1, 3, 4, 5, 8, 9),),
    caption="Of test answers, mean over an arm's finished runs. One temperature a run, chosen on validation by log "
    "loss, divides the logits: no answer changes; at the end: of the range that was searched. ECE: expected "
    "calibration error of the answer given, in 15 bins of equal width. Brier score: sum of squares over all classes, "
    "from 0 to 2.",
)


def _groups_caption(report: Report) -> str:
    few = any(group.few for group in report.groups)
    return (
        "Scores of each group of test rows, over the seeds at which both arms have one; intervals are over seeds and "
        "of each group alone, so that of twenty groups about one leaves out zero by chance. Worst: no other group "
        "scores worse in this arm."
        + (
            " Few: fewer than 20 rows, whose score says little; no worst is looked for among them where others have "
            "more."
            if few
            else ""
        )
        + " -: the metric is not defined for these rows, as an area where all have one class."
    )


GROUPS = TableSpec(
    "Groups of test rows",
    "task / model | group | rows | n | scratch | SPT: spt | delta | 95 % interval | worst",
    lambda report: [
        Group(_label(groups[0]), groups)
        for groups in (list(each) for _, each in groupby(report.groups, key=attrgetter("label")))
    ],
    cells={
        "rows": lambda group, _: f"{group.rows:,}" + (" (few)" if group.few else ""),
        "worst": lambda group, _: ", ".join(ARM[arm] for arm in group.worst) or "",
    },
    text_columns=2,
    narrow=((0, 1, 2, 4, 5, 6, 7), (1, 8)),
    caption=_groups_caption,
)


def _estimate_text(estimate: Estimate, sign: str = "") -> str:
    value = f"{estimate.value:{sign}.3f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({estimate.low:{sign}.3f} to {estimate.high:{sign}.3f})"


def _across_tasks_caption(report: Report) -> str:
    left_out = sorted({label for average in report.pooled for label in average.left_out})
    return (
        "Interquartile means over all runs of the tasks, scores scaled to 0 for chance and 1 for perfect; in brackets "
        "95 % intervals of a bootstrap that draws seeds within each task: they apply to other seeds, not other tasks, "
        "and are too narrow with few seeds (in simulation they cover 85 % with three seeds, 90 % with five)."
    ) + (f" Left out, since incomplete or without such a scale: {'; '.join(left_out)}." if left_out else "")


ACROSS_TASKS = TableSpec(
    "Across tasks",
    "tasks | model: label | pairs | scratch | SPT | difference | P(SPT > scratch)",
    lambda report: [Group(", ".join(average.tasks), [average]) for average in report.pooled],
    cells={
        "scratch": lambda average, _: _estimate_text(average.scratch),
        "SPT": lambda average, _: _estimate_text(average.spt),
        "difference": lambda average, _: _estimate_text(average.difference, "+"),
        "P(SPT > scratch)": lambda average, _: _estimate_text(average.probability),
    },
    text_columns=2,
    narrow=((0, 1, 5, 6),),
    caption=_across_tasks_caption,
)


def _plain_caption(report: Report) -> str:
    doubts = dict.fromkeys(text for average in report.averages for text in average.doubts)
    missing = dict.fromkeys(label for average in report.averages for label in average.incomplete)
    text = (
        "The plain mean over the tasks, as papers print it: a task that was not learned counts with its score, which "
        "is chance. The interval of the difference is over seeds (Welch, Satterthwaite) and speaks of these tasks "
        "alone. Published: where all tasks of a paper's average are here; others, as PathX-256, are then left out."
    )
    text += f" Doubtful among the published: {'; '.join(doubts)}." if doubts else ""
    return text + (f" Not counted, since runs are missing: {'; '.join(missing)}." if missing else "")


PLAIN_AVERAGES = TableSpec(
    "Plain averages",
    "tasks | model: label | source | scratch | published: published_scratch | SPT: spt | published: published_spt | "
    "difference | 95 % interval",
    lambda report: [
        Group(f"{', '.join(average.tasks)}: {metric_text(average.metric)}", [average], average.metric)
        for average in report.averages
    ],
    cells={"source": lambda average, _: average.source or "-"},
    text_columns=3,
    narrow=((0, 1, 3, 4, 5, 6, 7, 8),),
    caption=_plain_caption,
)


def _published_remarks(comparison: PublishedComparison, _: str) -> str:
    differs = [f"our settings differ: {abbreviate(comparison.differs, 6)}"] if comparison.differs else []
    return "; ".join((*comparison.remarks, *differs)) or "-"


PUBLISHED = TableSpec(
    "Comparison with published numbers",
    "task / model | source | remarks | scratch | published: published_scratch | SPT: spt | published: published_spt | "
    "delta | published: published_delta",
    lambda report: [Group(_label(comparison), [comparison]) for comparison in report.precedents],
    cells={"remarks": _published_remarks},
    text_columns=3,
    narrow=((0, 3, 4, 5, 6, 7, 8),),
    caption="As printed, one run each unless the paper says otherwise, without intervals: a difference from ours is "
    "not a test. Read the remarks before comparing.",
)


def _score_or_state(state: str, score: float | None, metric: str) -> str:
    return state if score is None else score_text(score, metric)


def _place(record: Any, _: str) -> str:
    """A seed and, where there are several, the split of the data."""
    return "" if record.seed is None else str(Place(record.seed, record.split))


SEEDS = TableSpec(
    "Seed by seed",
    "task / model | seed | scratch | SPT | delta | scratch run: scratch_run | SPT run: spt_run | pretraining run",
    lambda report: [Group(row.label, row.seeds, row.metric) for row in report.rows],
    cells={
        "seed": _place,
        "scratch": lambda seed, metric: _score_or_state(seed.scratch_state, seed.scratch, metric),
        "SPT": lambda seed, metric: _score_or_state(seed.spt_state, seed.spt, metric),
        "pretraining run": lambda seed, _: seed.pretrain_run or "",
    },
    narrow=((0, 1, 2, 3, 4),),
)

TEST_ITEMS = TableSpec(
    "Test items, seed by seed",
    "task / model | seed | items: n | delta: difference | 95 % interval | only scratch: only_scratch | "
    "only SPT: only_spt | McNemar p: p",
    lambda report: [
        Group(f"{row.label}: {metric_text(row.items[0].metric)}", row.items) for row in report.rows if row.items
    ],
    cells={"seed": _place},
    narrow=((0, 1, 3, 4, 7),),
    caption="Each line compares the two networks of one seed and generalises to other test items, not to networks of "
    "other seeds, so it cannot decide which arm is better. Only scratch, only SPT: items that only this network has "
    "right. Intervals by bootstrap over items; p by McNemar's exact test, not adjusted.",
)


def _search_arms(search: SearchResult) -> list[SimpleNamespace]:
    return [SimpleNamespace(arm=name, **dict(arm)) for name, arm in (("scratch", search.scratch), ("spt", search.spt))]


def _search_caption(report: Report) -> str:
    protocols = {"trials": "the same number of trials", "compute": "the same total compute (operations)"}
    tried = " | ".join(f"{search.label}: {protocols[search.protocol]}; {_tried(search)}" for search in report.searches)
    return (
        "Settings are chosen by the validation score of the selected checkpoint, mean over a setting's seeds; the "
        "test split plays no part. Cost: of all trials and of the pretrainings they start from, each counted once. "
        f"Protocol and values tried: {tried}."
    )


def _tried(search: SearchResult) -> str:
    """Values by setting; those that both arms tried once."""
    scratch, spt = search.scratch.space, search.spt.space
    both = {name: values for name, values in spt.items() if scratch.get(name) == values}
    spaces = {"both arms": both, "scratch": _without(scratch, both), "SPT": _without(spt, both)}
    return " / ".join(
        f"{arm}: " + "; ".join(f"{name} {', '.join(map(value_text, values))}" for name, values in space.items())
        for arm, space in spaces.items()
        if space
    )


def _without(space: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in space.items() if name not in other}


SEARCHES = TableSpec(
    "Search",
    "task / model | arm | chosen setting | at the edge | trials | failed: lost | FLOPs: spent.flops | "
    "time: spent.seconds | validation: value",
    lambda report: [Group(_label(search), _search_arms(search), search.metric) for search in report.searches],
    cells={
        "chosen setting": lambda arm, _: "not chosen yet" if arm.setting is None else setting_text(arm.setting),
        "trials": lambda arm, _: part_text(arm.done, arm.trials),
        "at the edge": lambda arm, _: ", ".join(arm.edges) or ("-" if arm.setting is None else "no"),
    },
    text_columns=4,
    narrow=((0, 1, 2, 4, 8), (0, 1, 3, 4, 5, 6, 7)),
    caption=_search_caption,
)


def _expected(search: SearchResult) -> Group:
    scratch, spt = ({best.settings: best.value for best in arm.expected} for arm in (search.scratch, search.spt))
    lines = [
        SimpleNamespace(settings=settings, scratch=scratch.get(settings), spt=spt.get(settings))
        for settings in sorted(scratch.keys() | spt.keys())
    ]
    return Group(f"{search.label}: {metric_text(search.metric)}", lines, search.metric)


EXPECTED_BEST = TableSpec(  # validation score by number of settings tried, both arms
    "Expected best on validation",
    "task / model | settings | scratch | SPT: spt",
    lambda report: map(_expected, report.searches),
    caption="Expected best validation score of this many finished settings, drawn at random; a setting without a score "
    "counts as the worst of those that have one.",
)

TRIALS = TableSpec(
    "Trials",
    "task / model | arm | setting: number | values: setting | seed | validation | run",
    lambda report: [
        Group(search.label, [trial], search.metric) for search in report.searches for trial in search.trials
    ],
    cells={"validation": lambda trial, metric: _score_or_state(trial.state, trial.value, metric)},
    text_columns=4,
    narrow=(),
)

FAILURES = TableSpec(
    "Runs without a score",
    "task / model | arm | seed | state | reason | run",
    lambda report: [Group(label or failure.run, [failure]) for label, failure in report.failures],
    cells={"seed": _place},
    text_columns=6,
    narrow=((0, 1, 2, 3, 4),),
)

SPLITS = TableSpec(
    "Splits",
    "task | split | hash of inputs: inputs | hash of labels: targets | rows | also in train: repeated | "
    "pretrainings: pretraining | finetunings: finetuning",
    lambda report: [Group(use.task, [use]) for use in report.provenance.data],
    text_columns=4,
    narrow=(),
    caption="Hashes over all rows in order; runs with the same hash saw the same rows. Also in train: rows whose input "
    "also occurs in training. Pretraining sees inputs only.",
)

ENVIRONMENTS = TableSpec(
    "Environment",
    "code | Python and packages | system | device | runs | processes | threads",
    lambda report: [
        Group(f"spt {use.spt}" + (f", commit {use.commit}" if use.commit else ""), [use])
        for use in report.provenance.environments
    ],
    cells={
        "Python and packages": lambda use, _: ", ".join(
            f"{name} {version}" for name, version in [("Python", use.python), *use.packages.items()]
        )
    },
    text_columns=4,
    narrow=(),
    caption="A + after a commit: with uncommitted changes. Each run's env.json has its own.",
)

COMMANDS = TableSpec(
    "Commands",
    "study | command | started: created",
    lambda report: [Group(study.study, [study]) for study in report.provenance.commands],
    text_columns=3,
    narrow=(),
    caption="The same command in the same folder reuses what is finished; elsewhere it repeats every run. On one CPU "
    "process of the same environment the numbers are the same, bit for bit.",
)

CHECKLIST = TableSpec(
    "Reproducibility checklist",
    "question | answer | evidence",
    lambda report: [Group(check.question, [check]) for check in report.provenance.checklist],
    text_columns=3,
    narrow=(),
    caption="Answered from the runs' own files. A no is not always a fault, but a reader should know of it.",
)


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
    Section(
        "models",
        "Which model is better",
        ("models",),
        (RANKINGS, BETWEEN_MODELS, MODELS, MODELS_ACROSS_TASKS, AVERAGE_CONTRASTS),
    ),
    Section("differences", "SPT against scratch", ("forest",), (SCORES,)),
    Section("levels", "What the study varies", ("levels",), (LEVELS, CONTRASTS)),
    Section("baselines", "Baselines without a network", (), (BASELINES, AGAINST_BASELINES)),
    Section("controls", "Controls", (), (CONTROLS,)),
    Section("published", "Published numbers", (), (PUBLISHED,)),
    Section("tasks", "Several tasks", (), (PLAIN_AVERAGES, ACROSS_TASKS)),
    Section("seeds", "Seeds and test items", ("splits", "seeds"), (SEEDS, TEST_ITEMS)),
    Section(
        "answers",
        "What the answers are like",
        ("confusion", "reliability"),
        (OTHER_METRICS, GROUPS, CONFUSIONS, CALIBRATIONS),
    ),
    Section("training", "Training", ("learning", "pretraining"), ()),
    Section("settings", "Settings searched", ("expected",), (SEARCHES, EXPECTED_BEST, TRIALS)),
    Section("cost", "What it cost", ("compute",), COST_TABLES),
    Section("failures", "Failures", (), (FAILURES,)),
    Section("origin", "Where the numbers come from", (), (SPLITS, ENVIRONMENTS, COMMANDS)),
    Section("checklist", "Checklist", (), (CHECKLIST,)),
)

RUNS = Section("runs", "Runs", (), ())
