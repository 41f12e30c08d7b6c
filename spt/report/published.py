"""The numbers of the papers beside the rows of a report, where a paper has that cell."""

from collections.abc import Sequence
from pathlib import Path

from spt.report.arms import Comparison
from spt.report.published_numbers import PublishedCell, PublishedPair, changed, published_pair
from spt.report.results import results_of
from spt.runs.plan import ARMS, Place, Record, arm_text


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
    pairs = [(each, published_pair(each.row.recipe, each.row.factors, each.row.metric)) for each in rows]
    return tuple(_published_comparison(each, pair) for each, pair in pairs if pair and not each.row.smoke)


def _published_comparison(comparison: Comparison, pair: PublishedPair) -> PublishedComparison:
    row, cells = comparison.row, pair.cells
    return PublishedComparison(
        label=row.label,
        metric=row.metric,
        scratch=row.scratch,
        spt=row.spt,
        published_scratch=pair.scratch.value if pair.scratch else None,
        published_spt=pair.spt.value if pair.spt else None,
        source="; ".join(dict.fromkeys(cell.source for cell in cells)),
        remarks=tuple(dict.fromkeys(text for cell in cells for text in _remarks(cell))),
        differs=tuple(dict.fromkeys(text for path in _runs(comparison) for text in changed(path, pair))),
    )


def _runs(comparison: Comparison) -> list[Path]:
    """The finished runs, from scratch first."""
    return [
        comparison.runs.root / cell.run
        for arm in ARMS
        for cell in comparison.runs.cells
        if cell.arm == arm and Place(cell.seed, cell.split) in comparison.results(arm)
    ]


def _remarks(cell: PublishedCell) -> list[str]:
    arm = arm_text(cell.arm)
    remarks = [f"{arm}: {cell.missing}"] if cell.missing else []
    remarks += [f"{arm}: quoted by the paper from elsewhere"] if cell.quoted else []
    remarks += [text for text in (cell.note, cell.doubt) if text]
    return [*remarks, *(result.sentence() for result in results_of(cell))]


def _minus(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
