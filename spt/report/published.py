"""The published numbers of the three papers beside the rows of a report, where the paper has that cell."""

from collections.abc import Sequence
from pathlib import Path

from spt.report.arms import Comparison
from spt.report.format import ReportTable, abbreviate, delta_text, metric_text, score_text
from spt.report.published_numbers import PublishedArms, PublishedCell, changed, published_arms
from spt.runs.plan import ARMS, Record


class PublishedComparison(Record):
    """What a paper prints for a row's recipe, at the row's level of what a study varies."""

    label: str  # of the row
    metric: str
    scratch: float | None  # ours, in the metric's own units
    spt: float | None
    published_scratch: float | None  # None where the paper has none, or says why not in the remarks
    published_spt: float | None
    source: str
    remarks: tuple[str, ...]
    differs: tuple[str, ...]  # settings in which the runs are not the packaged recipe's

    @property
    def delta(self) -> float | None:
        return _minus(self.spt, self.scratch)

    @property
    def published_delta(self) -> float | None:
        return _minus(self.published_spt, self.published_scratch)


def published_comparisons(rows: Sequence[Comparison]) -> tuple[PublishedComparison, ...]:
    """One for every row whose recipe, level and metric a paper has, but for smoke runs, which are no measurement.

    Recipes are resolved for these alone: it is slow.
    """
    measured = (one for one in rows if not one.row.smoke)
    found = ((one, published_arms(one.row.recipe, one.row.factors, one.row.metric)) for one in measured)
    return tuple(_published_comparison(one, cells) for one, cells in found if cells is not None)


def _published_comparison(one: Comparison, cells: PublishedArms) -> PublishedComparison:
    both = [cell for cell in cells if cell is not None]
    differs = dict.fromkeys(text for path in _runs(one) for text in changed(path, one.row.recipe))
    return PublishedComparison(
        label=one.row.label,
        metric=one.row.metric,
        scratch=one.row.scratch,
        spt=one.row.spt,
        published_scratch=cells.scratch.value if cells.scratch else None,
        published_spt=cells.spt.value if cells.spt else None,
        source="; ".join(dict.fromkeys(cell.source for cell in both)),
        remarks=tuple(dict.fromkeys(text for cell in both for text in _remarks(cell))),
        differs=tuple(differs),
    )


def _runs(one: Comparison) -> list[Path]:
    """The finished runs, from scratch first."""
    return [
        one.pairing.root / cell.run
        for arm in ARMS
        for cell in one.pairing.cells
        if cell.arm == arm and cell.seed in one.results(arm)
    ]


def _remarks(cell: PublishedCell) -> list[str]:
    arm = "SPT" if cell.arm == "spt" else "scratch"
    said = [f"{arm}: {cell.missing}"] if cell.missing else []
    said += [f"{arm}: quoted there from elsewhere"] if cell.quoted else []
    return [*said, *(text for text in (cell.note, cell.doubt) if text)]


def _minus(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def published_table(found: Sequence[PublishedComparison]) -> ReportTable:
    header = ("task / model", "source", "remarks", "scratch", "published", "SPT", "published", "delta", "published")
    body = [
        (
            f"{one.label}: {metric_text(one.metric)}",
            one.source,
            "; ".join((*one.remarks, *([f"our settings differ: {abbreviate(one.differs, 6)}"] if one.differs else [])))
            or "-",
            score_text(one.scratch, one.metric),
            score_text(one.published_scratch, one.metric),
            score_text(one.spt, one.metric),
            score_text(one.published_spt, one.metric),
            delta_text(one.delta, one.metric),
            delta_text(one.published_delta, one.metric),
        )
        for one in found
    ]
    caption = (
        "As printed, one run each unless the paper says otherwise, without intervals: a difference from ours is no "
        "test. Read the remarks before comparing."
    )
    return ReportTable("Beside the published numbers", header, body, 3, ((0, 3, 4, 5, 6, 7, 8),), caption)
