"""The numbers of the papers beside the rows of a report, where a paper has that cell."""

from collections.abc import Sequence
from pathlib import Path

from spt.report.arms import Comparison
from spt.report.published_numbers import PublishedArms, PublishedCell, changed, published_arms
from spt.runs.plan import ARMS, Record


class PublishedComparison(Record):
    """What a paper prints for a row's recipe and level."""

    label: str  # of the row
    metric: str
    scratch: float | None  # ours, in the metric's own units
    spt: float | None
    published_scratch: float | None  # None where the paper has none; the remarks may say why
    published_spt: float | None
    source: str
    remarks: tuple[str, ...]
    differs: tuple[str, ...]  # settings in which the runs differ from the packaged recipe

    @property
    def delta(self) -> float | None:
        return _minus(self.spt, self.scratch)

    @property
    def published_delta(self) -> float | None:
        return _minus(self.published_spt, self.published_scratch)


def published_comparisons(rows: Sequence[Comparison]) -> tuple[PublishedComparison, ...]:
    """One for every row whose recipe, level and metric a paper has, smoke runs excepted.

    Only for these are recipes resolved, which is slow.
    """
    published = []
    for comparison in rows:
        row = comparison.row
        if not row.smoke and (cells := published_arms(row.recipe, row.factors, row.metric)):
            published.append(_published_comparison(comparison, cells))
    return tuple(published)


def _published_comparison(comparison: Comparison, cells: PublishedArms) -> PublishedComparison:
    both = [cell for cell in cells if cell is not None]
    differs = dict.fromkeys(text for path in _runs(comparison) for text in changed(path, comparison.row.recipe))
    return PublishedComparison(
        label=comparison.row.label,
        metric=comparison.row.metric,
        scratch=comparison.row.scratch,
        spt=comparison.row.spt,
        published_scratch=cells.scratch.value if cells.scratch else None,
        published_spt=cells.spt.value if cells.spt else None,
        source="; ".join(dict.fromkeys(cell.source for cell in both)),
        remarks=tuple(dict.fromkeys(text for cell in both for text in _remarks(cell))),
        differs=tuple(differs),
    )


def _runs(comparison: Comparison) -> list[Path]:
    """The finished runs, from scratch first."""
    return [
        comparison.runs.root / cell.run
        for arm in ARMS
        for cell in comparison.runs.cells
        if cell.arm == arm and cell.seed in comparison.results(arm)
    ]


def _remarks(cell: PublishedCell) -> list[str]:
    arm = "SPT" if cell.arm == "spt" else "scratch"
    remarks = [f"{arm}: {cell.missing}"] if cell.missing else []
    remarks += [f"{arm}: quoted by the paper from elsewhere"] if cell.quoted else []
    return [*remarks, *(text for text in (cell.note, cell.doubt) if text)]


def _minus(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
