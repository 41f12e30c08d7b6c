"""Everything a report says in sentences, row by row and over rows together."""

from typing import NamedTuple, cast, get_args

from spt.report.arms import Row
from spt.report.collect import Report
from spt.report.search import SearchResult
from spt.runs.plan import ArmName, factors_text


class Statement(NamedTuple):
    """What a report says in words about one of its parts."""

    label: str
    verdict: str
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    decided: ArmName | None = None  # the arm that is shown to be better, all comparisons considered


def conclusions(report: Report) -> list[Statement]:
    """What follows from several rows together, and what was searched."""
    return [
        *(Statement(f"{best.label}, share of the budget", f"{best.verdict}") for best in report.best),
        *(
            Statement(f"{one.label}, " + ("gain from SPT" if one.what == "SPT - scratch" else one.what), one.verdict)
            for one in report.contrasts
        ),
        *(Statement(f"several tasks / {one.label}", one.verdict) for one in report.pooled),
        *(Statement(f"{one.label}, search", _search_text(one), one.warnings, one.notes) for one in report.searches),
    ]


def _search_text(search: SearchResult) -> str:
    parts = []
    for name, arm in (("scratch", search.scratch), ("SPT", search.spt)):
        trials = f"{arm.done + arm.lost} of {arm.trials} trials"
        parts.append(f"{name}: {trials}, " + (factors_text(arm.setting) if arm.setting else "nothing chosen yet"))
    return "; ".join(parts)


def statements(report: Report) -> list[Statement]:
    """Everything that a report says in words, row by row, then of rows together."""
    return [_row_statement(row) for row in report.rows] + conclusions(report)


def _row_statement(row: Row) -> Statement:
    decided = cast(ArmName, row.decision) if row.decision in get_args(ArmName) else None
    return Statement(row.label, row.verdict, row.warnings, tuple(remarks(row)), decided)


def remarks(row: Row) -> list[str]:
    return [said for said in (row.compute, *row.notes) if said]
