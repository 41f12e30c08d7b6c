"""What changed from one report to another: rows, scores, verdicts, failures, costs.

Two reports that share runs are no experiment: nothing here is tested, no p is formed, and a change of delta is a
change of a number.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spt.errors import DataError, UsageError, one_line
from spt.report.arms import Cost, Row
from spt.report.collect import read_report
from spt.report.format import (
    count_text,
    delta_text,
    flops_text,
    interval_text,
    is_percent,
    metric_text,
    p_text,
    ratio_text,
    score_text,
    time_text,
)
from spt.report.machine import FORMAT, to_json
from spt.report.verdict import Decision
from spt.runs.files import parse_json
from spt.runs.plan import PLAN, ArmName, Record, arm_text

NOTABLE = 0.05  # relative change from which on a cost is told

DECIDED: dict[Decision, str] = {
    "spt": "SPT beats scratch",
    "scratch": "scratch beats SPT",
    "spt alone": "SPT beats scratch, taken alone",
    "scratch alone": "scratch beats SPT, taken alone",
    "open": "not decided",
    "too few seeds": "too few seeds",
    "no spread": "not decided, no spread",
    "no pair": "no pair finished",
    "different data": "not comparable",
    "smoke": "smoke run",
}

# Of a row: what is compared by name, and what follows from it, from its label or from where it lies.
COMPARED = ("scratch", "spt", "delta", "low", "high", "n", "planned", "p", "holm", "tests", "decision")

FOLLOWS = {
    *("label", "source", "command", "verdict", "compute", "ratios", "warnings", "failures", "seeds", "detectable"),
    *("scratch_arm", "spt_arm", "items", "notes", "favour_spt"),
}


class SeedChange(Record):
    """One arm at one seed, where something is not the same."""

    seed: int
    arm: ArmName
    a: float | None
    b: float | None
    change: float | None
    a_state: str  # `absent`: the report has no such seed
    b_state: str
    a_run: str
    b_run: str

    @property
    def same_run(self) -> bool:
        return bool(self.a_run) and self.a_run == self.b_run


class CostChange(Record):
    arm: ArmName
    axis: str  # a field of `Cost`, pretraining included
    a: float
    b: float
    ratio: float  # b : a


class FailureChange(Record):
    run: str
    arm: ArmName | None
    seed: int | None
    state: str
    reason: str


class Side(Record):
    """What one report says of a row."""

    label: str
    scratch: float | None
    spt: float | None
    delta: float | None
    low: float | None
    high: float | None
    n: int
    planned: int
    p: float | None
    holm: float | None
    tests: int
    decision: Decision
    verdict: str


class RowChange(Record):
    label: str
    metric: str
    a: Side
    b: Side
    verdict_changed: bool  # the decision, not the numbers in its sentence
    changed: bool  # anything at all
    scratch_change: float | None  # b - a
    spt_change: float | None
    delta_change: float | None
    seeds_added: tuple[int, ...]
    seeds_lost: tuple[int, ...]
    pairs_a: tuple[int, ...]  # seeds that the means are over
    pairs_b: tuple[int, ...]
    seeds: tuple[SeedChange, ...]
    costs: tuple[CostChange, ...]
    failures_gone: tuple[FailureChange, ...]
    failures_new: tuple[FailureChange, ...]
    warnings_gone: tuple[str, ...]
    warnings_new: tuple[str, ...]
    others: tuple[str, ...]  # further fields of the row that are not the same


class ReportDiff(Record):
    sentence: str
    a: str  # where the reports were read from
    b: str
    changed: bool
    warnings: tuple[str, ...]
    rows: tuple[RowChange, ...]  # in both; changed verdicts first
    only_a: tuple[Side, ...]
    only_b: tuple[Side, ...]
    said_a: tuple[str, ...]  # verdicts over several rows, and warnings, that the other report has not
    said_b: tuple[str, ...]


class LoadedReport(NamedTuple):
    """A report, from a file or made now."""

    source: str
    rows: tuple[Row, ...]
    said: tuple[str, ...]  # verdicts and warnings beyond the rows


def diff_reports(first: Path, second: Path) -> ReportDiff:
    """What changed from the first report to the second.

    Each is a report.json, or a folder that `spt report` takes, of which a report is made now. Raises UsageError or
    DataError.
    """
    a, b = _held(first), _held(second)
    matched, only_a, only_b = _matched(a.rows, b.rows)
    rows = sorted((_row(x, y) for x, y in matched), key=lambda row: (not row.verdict_changed, not row.changed))
    said_a, said_b = _less(a.said, b.said), _less(b.said, a.said)
    changed = any(row.changed for row in rows) or bool(only_a or only_b or said_a or said_b)
    return ReportDiff(
        sentence=_sentence(rows, len(only_a), len(only_b), changed),
        a=a.source,
        b=b.source,
        changed=changed,
        warnings=tuple(_warnings(rows)),
        rows=tuple(rows),
        only_a=tuple(map(_side, only_a)),
        only_b=tuple(map(_side, only_b)),
        said_a=said_a,
        said_b=said_b,
    )


def _held(path: Path) -> LoadedReport:
    if path.is_file():
        return _file(path)
    if (path / "report.json").is_file() and not (path / PLAN).is_file():  # what `spt report --out` wrote
        return _file(path / "report.json")
    found = read_report([path])
    if not found.rows:
        raise UsageError(f"{path}: its report has no rows to compare")
    return LoadedReport(path.as_posix(), found.rows, _beyond(to_json(found)))


def _file(path: Path) -> LoadedReport:
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a report.json ({one_line(error)})") from error
    if not isinstance(raw, dict) or raw.get("kind") != "report" or not isinstance(raw.get("rows"), list):
        raise DataError(f"{path} is no report.json of spt: name one, or the folder of a study or of runs")
    if raw.get("format") != FORMAT:
        raise DataError(
            f"{path} has the form {raw.get('format')} of another version of spt, not {FORMAT}; where its runs are "
            "still there, name their folder: its report is then made anew"
        )
    try:
        rows = tuple(Row.model_validate(row) for row in raw["rows"])
        said = _beyond(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path} is not a report of this version of spt: in a row, {place}: {first['msg']}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not a report of this version of spt ({one_line(error)})") from error
    if not rows:
        raise UsageError(f"{path} has no rows to compare")
    return LoadedReport(path.as_posix(), rows, said)


def _beyond(raw: dict[str, Any]) -> tuple[str, ...]:
    verdicts = [str(said) for said in raw["verdicts"][len(raw["rows"]) :]]
    return (*verdicts, *(f"WARNING: {said}" for said in raw["warnings"]))


def _matched(a: Sequence[Row], b: Sequence[Row]) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """Rows about the same, by ever weaker signs; then what is left of both reports.

    Of several rows about the same, those of the same study belong together, then those that come first. A row without
    any result has no metric yet.
    """
    pairs: list[tuple[int, int]] = []
    left, right = dict(enumerate(a)), dict(enumerate(b))

    def take(same: Any) -> None:
        for i, x in list(left.items()):
            found = next((j for j, y in right.items() if _subject(x) == _subject(y) and same(x, y)), None)
            if found is not None:
                pairs.append((i, found))
                del left[i], right[found]

    take(lambda x, y: x.metric == y.metric and x.source == y.source)
    take(lambda x, y: x.metric == y.metric)
    take(lambda x, y: not (x.metric and y.metric))
    return [(a[i], b[j]) for i, j in sorted(pairs)], list(left.values()), list(right.values())


def _subject(row: Row) -> tuple[object, ...]:
    return row.task, row.model, row.recipe, row.kind, json.dumps(row.factors, sort_keys=True)


def _less(mine: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple((Counter(mine) - Counter(others)).elements())


def _row(a: Row, b: Row) -> RowChange:
    numbers = {seed.seed for seed in a.seeds}, {seed.seed for seed in b.seeds}
    fields = {
        "seeds_added": tuple(sorted(numbers[1] - numbers[0])),
        "seeds_lost": tuple(sorted(numbers[0] - numbers[1])),
        "seeds": tuple(_seeds(a, b)),
        "costs": tuple(_costs(a, b)),
        "failures_gone": _failures(a, b),
        "failures_new": _failures(b, a),
        "warnings_gone": _less(a.warnings, b.warnings),
        "warnings_new": _less(b.warnings, a.warnings),
        "others": tuple(_others(a, b)),
    }
    same = all(getattr(a, name) == getattr(b, name) for name in COMPARED)
    return RowChange(
        label=b.label,
        metric=b.metric or a.metric,
        a=_side(a),
        b=_side(b),
        verdict_changed=a.decision != b.decision,
        changed=not same or any(fields.values()),
        scratch_change=_minus(b.scratch, a.scratch),
        spt_change=_minus(b.spt, a.spt),
        delta_change=_minus(b.delta, a.delta),
        pairs_a=_pairs(a),
        pairs_b=_pairs(b),
        **fields,
    )


def _pairs(row: Row) -> tuple[int, ...]:
    return tuple(seed.seed for seed in row.seeds if seed.delta is not None)


def _side(row: Row) -> Side:
    return Side(**{name: getattr(row, name) for name in Side.model_fields})


def _others(a: Row, b: Row) -> Iterator[str]:
    """Fields of a row that nothing else here speaks of, so that no change goes unsaid."""
    told = {*COMPARED, *FOLLOWS, "metric"}
    for name in Row.model_fields:
        if name not in told and getattr(a, name) != getattr(b, name):
            yield name
    for name in ("items", "notes"):
        if getattr(a, name) != getattr(b, name) and a.seeds == b.seeds:
            yield name
    for arm in ("scratch_arm", "spt_arm"):
        x, y = getattr(a, arm), getattr(b, arm)
        if x and y and a.seeds == b.seeds and x.model_dump(exclude=_LEDGERS) != y.model_dump(exclude=_LEDGERS):
            yield arm


_LEDGERS = {"score", "total", "pretraining", "finetuning"}


def _seeds(a: Row, b: Row) -> Iterator[SeedChange]:
    """Every arm at every seed of either report whose score, state or run is not the same."""
    mine, theirs = ({seed.seed: seed for seed in row.seeds} for row in (a, b))
    arms: tuple[ArmName, ...] = ("scratch", "spt")
    for number in sorted(mine.keys() | theirs.keys()):
        for arm in arms:
            values = []
            for seed in (mine.get(number), theirs.get(number)):
                score = None if seed is None else getattr(seed, arm)
                state, run = ("absent", "") if seed is None else (getattr(seed, f"{arm}_{x}") for x in ("state", "run"))
                values.append((score, state, run))
            if values[0] != values[1]:
                (x, x_state, x_run), (y, y_state, y_run) = values
                yield SeedChange(
                    seed=number,
                    arm=arm,
                    a=x,
                    b=y,
                    change=_minus(y, x),
                    a_state=x_state,
                    b_state=y_state,
                    a_run=x_run,
                    b_run=y_run,
                )


def _costs(a: Row, b: Row) -> Iterator[CostChange]:
    """Mean costs of an arm, pretraining included, that are notably larger or smaller."""
    for arm, x, y in (("scratch", a.scratch_arm, b.scratch_arm), ("spt", a.spt_arm, b.spt_arm)):
        if x is None or y is None:
            continue
        for axis in Cost.model_fields:
            mine, theirs = getattr(x.total, axis), getattr(y.total, axis)
            if mine and theirs is not None and abs(theirs / mine - 1) > NOTABLE:
                yield CostChange(arm=arm, axis=axis, a=mine, b=theirs, ratio=theirs / mine)


def _failures(row: Row, other: Row) -> tuple[FailureChange, ...]:
    """Failures of a row that the other report has not: by arm and seed, since a run of other settings replaces one."""
    known = {(one.arm, one.seed) for one in other.failures}
    fields = list(FailureChange.model_fields)
    return tuple(
        FailureChange(**{name: getattr(one, name) for name in fields})
        for one in row.failures
        if (one.arm, one.seed) not in known
    )


def _minus(b: float | None, a: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _sentence(rows: Sequence[RowChange], only_a: int, only_b: int, changed: bool) -> str:
    if not changed:
        return "nothing changed"
    alone = [f"{count} only in {name}" for name, count in (("A", only_a), ("B", only_b)) if count]
    if not rows:
        return f"the reports have no row in common: {', '.join(alone)}"
    turned = [row for row in rows if row.verdict_changed]
    verb = "says" if len(rows) == 1 else "say"
    parts = [f"{len(rows) - len(turned)} of {len(rows)} row{'' if len(rows) == 1 else 's'} {verb} the same"]
    parts += [
        f"{row.label} changed from '{DECIDED[row.a.decision]}' to '{DECIDED[row.b.decision]}'" for row in turned[:3]
    ]
    parts += [f"{len(turned) - 3} more changed"] if len(turned) > 3 else []
    quiet = [row.label for row in rows if row.changed and not row.verdict_changed]
    if quiet:
        more = f" and {len(quiet) - 3} more" if len(quiet) > 3 else ""
        parts.append(f"details changed in {' and in '.join(quiet[:3])}{more}")
    parts += [f"rows: {', '.join(alone)}"] if alone else []
    return "; ".join(parts)


def _warnings(rows: Sequence[RowChange]) -> Iterator[str]:
    """One run gives one score, whoever reads it. A run that several rows share is told once."""
    told: set[str] = set()
    for row in rows:
        found = [one for one in row.seeds if one.same_run and one.change and one.a_run not in told]
        told |= {one.a_run for one in found}
        said = [
            f"{one.a_run} ({arm_text(one.arm)}, seed {one.seed}) had {score_text(one.a, row.metric)}, now "
            f"{score_text(one.b, row.metric)}"
            for one in found
        ]
        if said:
            more = f" and {len(said) - 3} more" if len(said) > 3 else ""
            yield (
                f"{row.label}: the same computation with another score: {', '.join(said[:3])}{more}; results were "
                "edited, or they are not reproducible"
            )


def render(found: ReportDiff) -> RenderableType:
    """For `rich.console.Console.print`: the sentence, then what changed, row by row; rows that did not are named."""
    parts: list[RenderableType] = [Text(found.sentence, style="bold"), Text()]
    parts += [Text(f"A  {found.a}"), Text(f"B  {found.b}"), Text()]
    for said in found.warnings:
        parts += [Text(f"WARNING: {said}", style="bold red"), Text()]
    for row in found.rows:
        if row.changed:
            parts += _row_parts(row)
    for name, sides in (("A", found.only_a), ("B", found.only_b)):
        if sides:
            lines = [Text(f"{side.label}: {side.verdict}") for side in sides]
            parts += [Text(f"Only in {name}", style="bold"), Padding(Group(*lines), (0, 0, 1, 2))]
    for name, said_there in (("A", found.said_a), ("B", found.said_b)):
        if said_there:
            parts += [Text(f"Said in {name} alone", style="bold")]
            parts += [Padding(Group(*map(Text, said_there)), (0, 0, 1, 2))]
    same = [row.label for row in found.rows if not row.changed]
    if same:
        parts += [Text(f"not changed: {'; '.join(same)}", style="dim"), Text()]
    if found.changed:
        parts += [Text("Nothing here is tested: reports that share runs are no two experiments.", style="dim")]
    return Group(*parts)


def _row_parts(row: RowChange) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if row.verdict_changed:
        lines += [Text(f"A: {row.a.verdict}"), Text(f"B: {row.b.verdict}", style="bold")]
    lines.append(_table(("", "A", "B", "B - A"), _numbers(row), 1))
    lines += [Text(said) for said in _remarks(row)]
    if row.seeds:
        lines.append(_table(("seed", "arm", "A", "B", "B - A", "run"), _seed_lines(row), 2))
    if row.costs:
        body = [(f"{arm_text(one.arm)} {_axis(one.axis)}", *_cost_cells(one)) for one in row.costs]
        lines.append(_table(("cost, mean", "A", "B", "B : A"), body, 1))
    heading = row.label + (", VERDICT CHANGED" if row.verdict_changed else "")
    return [Text(heading, style="bold"), Padding(Group(*lines), (0, 0, 1, 2))]


def _numbers(row: RowChange) -> list[tuple[str, ...]]:
    metric, sides = row.metric, (row.a, row.b)
    unit = "points" if is_percent(metric) else metric

    def line(name: str, texts: Iterable[str], change: float | None = None) -> tuple[str, ...]:
        return name, *texts, "" if change is None else delta_text(change, metric)

    return [
        line(f"scratch {metric_text(metric)}", (score_text(x.scratch, metric) for x in sides), row.scratch_change),
        line(f"SPT {metric_text(metric)}", (score_text(x.spt, metric) for x in sides), row.spt_change),
        line(f"delta, {unit}", (delta_text(x.delta, metric) for x in sides), row.delta_change),
        line("95 % interval", (interval_text(x.low, x.high, metric) for x in sides)),
        line("pairs", (str(x.n) if x.n == x.planned else f"{x.n} of {x.planned}" for x in sides)),
        line("p", (p_text(x.p) for x in sides)),
        line("Holm p", (p_text(x.holm) + (f" of {x.tests}" if x.tests else "") for x in sides)),
        line("decision", (DECIDED[x.decision] for x in sides)),
    ]


def _remarks(row: RowChange) -> Iterator[str]:
    for name, seeds in (("added", row.seeds_added), ("lost", row.seeds_lost)):
        if seeds:
            yield f"seeds {name}: {', '.join(map(str, seeds))}"
    if row.pairs_a != row.pairs_b and row.pairs_a and row.pairs_b:
        a, b = (", ".join(map(str, pairs)) for pairs in (row.pairs_a, row.pairs_b))
        yield f"the means are not over the same seeds: {a} in A, {b} in B"
    other = sorted({one.seed for one in row.seeds if one.a_run and one.b_run and not one.same_run})
    if other:
        yield f"other runs than before, so other settings, data or pretraining: seeds {', '.join(map(str, other))}"
    for what, failures in (("failed in A, not in B", row.failures_gone), ("failed in B, not in A", row.failures_new)):
        for one in failures:
            arm = arm_text(one.arm) if one.arm else "run"
            yield f"{what}: {arm}, seed {one.seed} ({one.state}: {one.reason})"
    for what, said in (("warning gone", row.warnings_gone), ("new warning", row.warnings_new)):
        yield from (f"{what}: {one}" for one in said)
    if row.others:
        yield f"also not the same: {', '.join(row.others)}"


def _seed_lines(row: RowChange) -> list[tuple[str, ...]]:
    lines = []
    for one in row.seeds:
        texts = [
            score_text(score, row.metric) if score is not None else state
            for score, state in ((one.a, one.a_state), (one.b, one.b_state))
        ]
        change = "" if one.change is None else delta_text(one.change, row.metric)
        run = "same run" if one.same_run else "other run" if one.a_run and one.b_run else ""
        lines.append((str(one.seed), arm_text(one.arm), *texts, change, run))
    return lines


def _axis(axis: str) -> str:
    return {"flops": "FLOPs", "peak_bytes": "peak memory"}.get(axis, axis)


def _cost_cells(one: CostChange) -> tuple[str, str, str]:
    def text(value: float) -> str:
        if one.axis == "flops":
            return flops_text(value)
        if one.axis == "seconds":
            return time_text(value)
        return f"{value / 2**20:,.0f} MiB" if one.axis == "peak_bytes" else count_text(value)

    return text(one.a), text(one.b), ratio_text(one.ratio)


def _table(header: Sequence[str], body: Sequence[Sequence[str]], words: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(header):
        justify: Literal["left", "right"] = "left" if number < words or name == "run" else "right"
        table.add_column(Text(name), justify=justify, overflow="fold")
    for line in body:
        table.add_row(*map(Text, line))
    return table
