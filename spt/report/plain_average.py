"""The plain average over tasks that papers print ("Avg."), of both arms and of their difference.

A task counts with the score that its runs have: one that was not learned counts as chance, as in the papers. Tasks
weigh the same, whatever their number of seeds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from spt.report import stats
from spt.report.across_tasks import repeated_recipe, task_identity, task_names
from spt.report.arms import Comparison, Row
from spt.report.published_numbers import PublishedCell, published_average
from spt.runs.plan import Factor, Kind, Record, factors_text


class PlainAverage(Record):
    """Both arms' means over several tasks at one level with one model, in the metric's own units."""

    kind: Kind
    model: str
    factors: dict[str, Factor]
    label: str
    metric: str
    tasks: tuple[str, ...]
    left_out: tuple[str, ...]  # tasks that the published average does not count
    incomplete: tuple[str, ...]  # rows of which runs are missing
    scratch: float
    spt: float
    difference: float  # SPT - scratch
    low: float | None  # t interval of the difference over seeds, of these tasks
    high: float | None
    published_scratch: float | None  # of a table whose tasks are all here
    published_spt: float | None
    source: str  # of these; empty where there is no such table
    doubts: tuple[str, ...]  # about the published averages


class _Group(NamedTuple):
    kind: Kind
    model: str
    level: str
    metric: str  # empty where no run has a result


def plain_averages(comparisons: Sequence[Comparison]) -> tuple[PlainAverage, ...]:
    """Averages over the tasks that share model, level and metric; of rows of one task none."""
    groups: dict[_Group, list[Comparison]] = {}
    incomplete: dict[_Group, list[str]] = {}
    for each in comparisons:
        row = each.row
        group = _Group(row.kind, row.model, factors_text(row.factors), row.metric)
        if row.n < row.planned and not row.smoke:
            incomplete.setdefault(group, []).append(row.label)
        elif row.comparable and not each.runs.splits:  # `pooled` says so
            groups.setdefault(group, []).append(each)
    return tuple(
        _average(
            group,
            [each.row for each in members],
            [*incomplete.get(group, []), *incomplete.get(group._replace(metric=""), [])],
        )
        for group, members in groups.items()
        if len(set(map(task_identity, members))) == len(members) > 1
        and repeated_recipe([each.row for each in members]) is None
    )


def _average(group: _Group, members: Sequence[Row], incomplete: Sequence[str]) -> PlainAverage:
    published, rows = None, members
    cells: tuple[PublishedCell, ...] = ()
    if found := published_average([(row.recipe, row.factors) for row in members], group.metric):
        published, chosen = found
        rows, cells = [members[index] for index in chosen], published.cells
    names = dict(zip((row.label for row in members), task_names(members), strict=True))
    scores = [[(seed.scratch, seed.spt) for seed in row.seeds] for row in rows]
    pairs = [[(a, b) for a, b in task if a is not None and b is not None] for task in scores]
    difference = stats.average([[spt - scratch for scratch, spt in task] for task in pairs])
    return PlainAverage(
        kind=group.kind,
        model=group.model,
        factors=rows[0].factors,
        label=group.model + (f", {group.level}" if group.level else ""),
        metric=group.metric,
        tasks=tuple(names[row.label] for row in rows),
        left_out=tuple(name for label, name in names.items() if label not in {row.label for row in rows}),
        incomplete=tuple(incomplete),
        scratch=stats.average([[scratch for scratch, _ in task] for task in pairs]).mean,
        spt=stats.average([[spt for _, spt in task] for task in pairs]).mean,
        difference=difference.mean,
        low=difference.low,
        high=difference.high,
        published_scratch=published.scratch.value if published and published.scratch else None,
        published_spt=published.spt.value if published and published.spt else None,
        source="; ".join(dict.fromkeys(cell.source for cell in cells)),
        doubts=tuple(dict.fromkeys(f"{cell.printed}: {cell.doubt}" for cell in cells if cell.doubt)),
    )
