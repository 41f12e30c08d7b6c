"""Everything a report says in sentences, row by row and over rows together."""

from typing import NamedTuple

from spt.report.arms import Row
from spt.report.collect import Report
from spt.report.format import abbreviate, delta_text, interval_text, is_percent
from spt.report.levels import Contrast
from spt.report.ranking import brief_ranking
from spt.report.search import SearchResult
from spt.runs.plan import ARMS, setting_text


class Statement(NamedTuple):
    """The verdict on one part of a report, with warnings and remarks."""

    label: str
    verdict: str
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    brief_remarks: tuple[str, ...] = ()  # those remarks that the short form shows, too
    decided: str = ""  # the arm shown to be better after adjustment


def conclusions(report: Report) -> list[Statement]:
    """Statements about several rows together, and about searches."""
    return [
        *(Statement(f"{each.label}, control {each.arm}", each.verdict) for each in report.controls),
        *(Statement(f"{best.label}, share of the budget", best.verdict) for best in report.best),
        *(Statement(f"{each.label}, reach", each.verdict) for each in report.reaches),
        *(Statement(f"{each.label}, {_contrast_name(each)}", each.verdict) for each in report.contrasts),
        *(Statement(f"several tasks / {average.label}", average.verdict) for average in report.pooled),
        *(
            Statement(f"{each.label}, search", _search_text(each), each.warnings, each.notes, each.notes)
            for each in report.searches
        ),
    ]


def _contrast_name(contrast: Contrast) -> str:
    return "gain from SPT" if contrast.what == "SPT - scratch" else contrast.what


def _search_text(search: SearchResult) -> str:
    parts = []
    for name, arm in (("scratch", search.scratch), ("SPT", search.spt)):
        trials = f"{arm.done + arm.lost} of {arm.trials} trials"
        parts.append(
            f"{name}: {trials}, " + ("nothing chosen yet" if arm.setting is None else setting_text(arm.setting))
        )
    return "; ".join(parts)


def statements(report: Report) -> list[Statement]:
    """Every statement of a report: which model is better, whether it beats baselines, then row by row, then about rows
    together."""
    return [
        *model_statements(report),
        *baseline_statements(report),
        *(_row_statement(row) for row in report.rows),
        *conclusions(report),
    ]


def model_statements(report: Report) -> list[Statement]:
    """Which model is better in each arm, and whether self-pretraining changes that."""
    over_tasks = [
        Statement(f"{across.label}: {abbreviate(across.models, 4)}", across.verdict, across.warnings)
        for across in report.models_across_tasks
    ]
    return over_tasks + [
        Statement(
            f"{comparison.label}: {abbreviate([model.name for model in comparison.models], 4)}",
            comparison.verdict,
            comparison.warnings,
        )
        for comparison in report.models
    ]


def brief_verdicts(report: Report) -> list[tuple[str, str]]:
    """Of the models of each task and of several, baselines, and each row: label and verdict."""
    return [
        *((comparison.label, brief_ranking(comparison)) for comparison in report.models),
        *((across.label, across.verdict) for across in report.models_across_tasks),
        *((each.label, each.verdict) for each in baseline_statements(report)),
        *((row.label, _brief(row)) for row in report.rows),
    ]


DECIDED = {"spt": "SPT is better", "scratch": "scratch is better", "open": "not decided"}


def _brief(row: Row) -> str:
    """The difference, its interval, and what that decides."""
    decided = DECIDED.get(row.decision.removesuffix(" alone"))
    if decided is None or row.delta is None:
        return row.verdict
    if row.decision.endswith("alone"):
        decided += f" on its own, not among {row.tests} comparisons"
    unit = " points" if is_percent(row.metric) else f" in {row.metric}"
    interval = interval_text(row.low, row.high, row.metric)
    return f"{delta_text(row.delta, row.metric)}{unit} ({interval}): {decided}"


def baseline_statements(report: Report) -> list[Statement]:
    """Whether a network beats what has none."""
    return [Statement(f"{each.label}, baselines", each.verdict) for each in report.baselines]


def _row_statement(row: Row) -> Statement:
    decided = row.decision if row.decision in ARMS else ""
    return Statement(
        row.label, row.verdict, row.warnings, tuple(remarks(row)), (row.compute,) if row.compute else (), decided
    )


def remarks(row: Row) -> list[str]:
    return [remark for remark in (row.compute, row.budgets, *row.notes) if remark]
