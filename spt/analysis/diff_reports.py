"""What changed from one report to another: rows, scores, verdicts, failures, costs.

Two reports that share runs are not independent experiments: no test is made and no p is formed between them.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from spt.analysis.diff import cost_name, cost_text, first_problem, read_json, side_by_side, subtract
from spt.errors import DataError, UsageError, one_line
from spt.report.arms import Cost, Row
from spt.report.collect import read_report
from spt.report.format import (
    abbreviate,
    delta_text,
    interval_text,
    is_percent,
    metric_text,
    p_text,
    ratio_text,
    score_text,
)
from spt.report.machine import FORMAT, to_json
from spt.report.verdict import Decision
from spt.runs.plan import ARMS, PLAN, ArmName, Record, arm_text

NOTABLE = 0.05  # relative change of a cost from which it is reported
NUMERIC = ("A", "B", "B - A", "B : A")

DECISIONS: dict[Decision, str] = {
    "spt": "SPT beats scratch",
    "scratch": "scratch beats SPT",
    "spt alone": "SPT beats scratch, on its own",
    "scratch alone": "scratch beats SPT, on its own",
    "open": "not decided",
    "too few seeds": "too few seeds",
    "no spread": "not decided, no spread",
    "no pair": "no pair finished",
    "different data": "not comparable",
    "smoke": "smoke run",
}

# Fields of a row that are compared directly; fields that follow from others or have a comparison of their own.
COMPARED = ("scratch", "spt", "delta", "low", "high", "n", "planned", "p", "holm", "tests", "decision")
DERIVED = {
    *("label", "source", "command", "verdict", "compute", "ratios", "warnings", "failures", "seeds", "detectable"),
    *("scratch_arm", "spt_arm", "items", "notes", "favour_spt"),
}
LEDGERS = {"score", "total", "pretraining", "finetuning"}  # of an arm: its score and costs


class SeedChange(Record):
    """One arm at one seed whose score, state or run changed."""

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
    """A row as one report has it."""

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
    others: tuple[str, ...]  # further fields of the row that changed


class ReportDiff(Record):
    sentence: str
    a: str  # where the reports were read from
    b: str
    changed: bool
    warnings: tuple[str, ...]
    rows: tuple[RowChange, ...]  # in both; changed verdicts first
    only_a: tuple[Side, ...]
    only_b: tuple[Side, ...]
    said_a: tuple[str, ...]  # verdicts over several rows, and warnings, that the other report lacks
    said_b: tuple[str, ...]


class LoadedReport(NamedTuple):
    """A report, from a file or computed now."""

    source: str
    rows: tuple[Row, ...]
    statements: tuple[str, ...]  # verdicts over several rows, and warnings


def diff_reports(first: Path, second: Path) -> ReportDiff:
    """What changed from the first report to the second.

    Each is a report.json, or a folder that `spt report` takes, whose report is then computed now. Raises UsageError or
    DataError.
    """
    a, b = _load(first), _load(second)
    matched, only_a, only_b = _match(a.rows, b.rows)
    rows = sorted((_compare(x, y) for x, y in matched), key=lambda row: (not row.verdict_changed, not row.changed))
    said_a, said_b = _without(a.statements, b.statements), _without(b.statements, a.statements)
    changed = any(row.changed for row in rows) or bool(only_a or only_b or said_a or said_b)
    return ReportDiff(
        sentence=_sentence(rows, len(only_a), len(only_b)) if changed else "nothing changed",
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


def _load(path: Path) -> LoadedReport:
    if path.is_file():
        return _load_file(path)
    if (path / "report.json").is_file() and not (path / PLAN).is_file():  # written by `spt report --out`
        return _load_file(path / "report.json")
    report = read_report([path])
    if not report.rows:
        raise UsageError(f"{path}: its report has no rows to compare")
    return LoadedReport(path.as_posix(), report.rows, _statements(to_json(report)))


def _load_file(path: Path) -> LoadedReport:
    raw = read_json(path, "name a report.json, or the folder of a study or of runs")
    if not isinstance(raw, dict) or raw.get("kind") != "report" or not isinstance(raw.get("rows"), list):
        raise DataError(f"{path} is not a report.json of spt: name one, or the folder of a study or of runs")
    if raw.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {raw.get('format')} of another version of spt, not {FORMAT}; if its runs still exist, "
            "name their folder instead, and the report is computed again"
        )
    try:
        rows = tuple(Row.model_validate(row) for row in raw["rows"])
        statements = _statements(raw)
    except ValidationError as error:
        problem = first_problem(error)
        raise DataError(f"{path} is not a report of this version of spt: in a row, {problem}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not a report of this version of spt ({one_line(error)})") from error
    if not rows:
        raise UsageError(f"{path} has no rows to compare")
    return LoadedReport(path.as_posix(), rows, statements)


def _statements(raw: dict[str, Any]) -> tuple[str, ...]:
    verdicts = map(str, raw["verdicts"][len(raw["rows"]) :])
    return (*verdicts, *(f"WARNING: {warning}" for warning in raw["warnings"]))


def _match(a: Sequence[Row], b: Sequence[Row]) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """Pairs of rows about the same subject, then the rows that only one report has.

    Of several rows about one subject, those of the same study belong together, then those that come first. A row
    without any result has no metric yet.
    """
    pairs: list[tuple[int, int]] = []
    left, right = dict(enumerate(a)), dict(enumerate(b))

    def take(same: Callable[[Row, Row], bool]) -> None:
        for i, x in list(left.items()):
            match = next((j for j, y in right.items() if _subject(x) == _subject(y) and same(x, y)), None)
            if match is not None:
                pairs.append((i, match))
                del left[i], right[match]

    take(lambda x, y: x.metric == y.metric and x.source == y.source)
    take(lambda x, y: x.metric == y.metric)
    take(lambda x, y: not (x.metric and y.metric))
    return [(a[i], b[j]) for i, j in sorted(pairs)], list(left.values()), list(right.values())


def _subject(row: Row) -> tuple[object, ...]:
    return row.task, row.model, row.recipe, row.kind, json.dumps(row.factors, sort_keys=True)


def _without(texts: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple((Counter(texts) - Counter(others)).elements())


def _compare(a: Row, b: Row) -> RowChange:
    numbers_a, numbers_b = ({seed.seed for seed in row.seeds} for row in (a, b))
    fields = {
        "seeds_added": tuple(sorted(numbers_b - numbers_a)),
        "seeds_lost": tuple(sorted(numbers_a - numbers_b)),
        "seeds": tuple(_seeds(a, b)),
        "costs": tuple(_costs(a, b)),
        "failures_gone": _failures(a, b),
        "failures_new": _failures(b, a),
        "warnings_gone": _without(a.warnings, b.warnings),
        "warnings_new": _without(b.warnings, a.warnings),
        "others": tuple(_other_fields(a, b)),
    }
    return RowChange(
        label=b.label,
        metric=b.metric or a.metric,
        a=_side(a),
        b=_side(b),
        verdict_changed=a.decision != b.decision,
        changed=any(getattr(a, name) != getattr(b, name) for name in COMPARED) or any(fields.values()),
        scratch_change=subtract(b.scratch, a.scratch),
        spt_change=subtract(b.spt, a.spt),
        delta_change=subtract(b.delta, a.delta),
        pairs_a=tuple(seed.seed for seed in a.seeds if seed.delta is not None),
        pairs_b=tuple(seed.seed for seed in b.seeds if seed.delta is not None),
        **fields,
    )


def _side(row: Row) -> Side:
    return Side.model_validate(row, from_attributes=True)


def _other_fields(a: Row, b: Row) -> Iterator[str]:
    """Changed fields that nothing else reports, so that no change goes unmentioned."""
    for name in Row.model_fields:
        if name not in {*COMPARED, *DERIVED, "metric"} and getattr(a, name) != getattr(b, name):
            yield name
    if a.seeds != b.seeds:  # what follows differs with the seeds
        return
    for name in ("items", "notes"):
        if getattr(a, name) != getattr(b, name):
            yield name
    for name in ("scratch_arm", "spt_arm"):
        x, y = getattr(a, name), getattr(b, name)
        if x and y and x.model_dump(exclude=LEDGERS) != y.model_dump(exclude=LEDGERS):
            yield name


def _seeds(a: Row, b: Row) -> Iterator[SeedChange]:
    """Every arm at every seed of either report whose score, state or run changed."""
    by_number_a, by_number_b = ({seed.seed: seed for seed in row.seeds} for row in (a, b))
    for number in sorted(by_number_a.keys() | by_number_b.keys()):
        for arm in ARMS:
            (score_a, state_a, run_a), (score_b, state_b, run_b) = (
                (None, "absent", "")
                if seed is None
                else (getattr(seed, arm), getattr(seed, f"{arm}_state"), getattr(seed, f"{arm}_run"))
                for seed in (by_number_a.get(number), by_number_b.get(number))
            )
            if (score_a, state_a, run_a) != (score_b, state_b, run_b):
                yield SeedChange(
                    seed=number,
                    arm=arm,
                    a=score_a,
                    b=score_b,
                    change=subtract(score_b, score_a),
                    a_state=state_a,
                    b_state=state_b,
                    a_run=run_a,
                    b_run=run_b,
                )


def _costs(a: Row, b: Row) -> Iterator[CostChange]:
    """Mean costs of an arm, pretraining included, that are notably larger or smaller."""
    for arm in ARMS:
        arm_a, arm_b = getattr(a, f"{arm}_arm"), getattr(b, f"{arm}_arm")
        if arm_a is None or arm_b is None:
            continue
        for axis in Cost.model_fields:
            x, y = getattr(arm_a.total, axis), getattr(arm_b.total, axis)
            if x and y is not None and abs(y / x - 1) > NOTABLE:
                yield CostChange(arm=arm, axis=axis, a=x, b=y, ratio=y / x)


def _failures(row: Row, other: Row) -> tuple[FailureChange, ...]:
    """Failures that the other report lacks: by arm and seed, since a run of other settings replaces another."""
    known = {(failure.arm, failure.seed) for failure in other.failures}
    return tuple(
        FailureChange.model_validate(failure, from_attributes=True)
        for failure in row.failures
        if (failure.arm, failure.seed) not in known
    )


def _sentence(rows: Sequence[RowChange], only_a: int, only_b: int) -> str:
    missing = ", ".join(f"{count} only in {name}" for name, count in (("A", only_a), ("B", only_b)) if count)
    if not rows:
        return f"the reports have no row in common: {missing}"
    changed = [row for row in rows if row.verdict_changed]
    nouns = "row keeps its verdict" if len(rows) == 1 else "rows keep their verdict"
    parts = [f"{len(rows) - len(changed)} of {len(rows)} {nouns}"]
    parts += [
        f"{row.label} changed from '{DECISIONS[row.a.decision]}' to '{DECISIONS[row.b.decision]}'"
        for row in changed[:3]
    ]
    parts += [f"{len(changed) - 3} more changed"] if len(changed) > 3 else []
    if details := [row.label for row in rows if row.changed and not row.verdict_changed]:
        parts.append(f"details changed in {abbreviate(details)}")
    parts += [f"rows: {missing}"] if missing else []
    return "; ".join(parts)


def _warnings(rows: Sequence[RowChange]) -> Iterator[str]:
    """A run has one score, in whichever report. A run that several rows share is named once."""
    named: set[str] = set()
    for row in rows:
        seeds = [seed for seed in row.seeds if seed.same_run and seed.change and seed.a_run not in named]
        named |= {seed.a_run for seed in seeds}
        if seeds:
            changes = [
                f"{seed.a_run} ({arm_text(seed.arm)}, seed {seed.seed}) had {score_text(seed.a, row.metric)}, now "
                f"{score_text(seed.b, row.metric)}"
                for seed in seeds
            ]
            yield (
                f"{row.label}: the same computation with a different score: {abbreviate(changes)}; results were "
                "edited, or they are not reproducible"
            )


def render(diff: ReportDiff) -> RenderableType:
    """For `rich.console.Console.print`: the sentence, then what changed, row by row; unchanged rows are named."""
    parts: list[RenderableType] = [Text(diff.sentence, style="bold"), Text()]
    parts += [Text(f"A  {diff.a}"), Text(f"B  {diff.b}"), Text()]
    for warning in diff.warnings:
        parts += [Text(f"WARNING: {warning}", style="bold red"), Text()]
    for row in diff.rows:
        if row.changed:
            parts += _render_row(row)
    for title, texts in (
        ("Only in A", [f"{side.label}: {side.verdict}" for side in diff.only_a]),
        ("Only in B", [f"{side.label}: {side.verdict}" for side in diff.only_b]),
        ("Stated only in A", diff.said_a),
        ("Stated only in B", diff.said_b),
    ):
        if texts:
            parts += _block(title, map(Text, texts))
    if unchanged := [row.label for row in diff.rows if not row.changed]:
        parts += [Text(f"unchanged: {'; '.join(unchanged)}", style="dim"), Text()]
    if diff.changed:
        parts += [Text("Nothing here is tested: reports that share runs are not independent.", style="dim")]
    return Group(*parts)


def _block(title: str, lines: Iterable[RenderableType]) -> list[RenderableType]:
    return [Text(title, style="bold"), Padding(Group(*lines), (0, 0, 1, 2))]


def _render_row(row: RowChange) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if row.verdict_changed:
        lines += [Text(f"A: {row.a.verdict}"), Text(f"B: {row.b.verdict}", style="bold")]
    lines.append(side_by_side(("", "A", "B", "B - A"), _number_lines(row), NUMERIC))
    lines += map(Text, _remarks(row))
    if row.seeds:
        header = ("seed", "arm", "A", "B", "B - A", "run")
        lines.append(side_by_side(header, [_seed_line(row, seed) for seed in row.seeds], NUMERIC))
    if row.costs:
        costs = [
            (
                f"{arm_text(cost.arm)} {cost_name(cost.axis)}",
                cost_text(cost.a, cost.axis),
                cost_text(cost.b, cost.axis),
                ratio_text(cost.ratio),
            )
            for cost in row.costs
        ]
        lines.append(side_by_side(("mean cost", "A", "B", "B : A"), costs, NUMERIC))
    return _block(row.label + (", VERDICT CHANGED" if row.verdict_changed else ""), lines)


def _number_lines(row: RowChange) -> list[tuple[str, ...]]:
    metric, sides = row.metric, (row.a, row.b)

    def line(name: str, texts: Iterable[str], change: float | None = None) -> tuple[str, ...]:
        return name, *texts, "" if change is None else delta_text(change, metric)

    unit = "points" if is_percent(metric) else metric
    return [
        line(f"scratch {metric_text(metric)}", (score_text(x.scratch, metric) for x in sides), row.scratch_change),
        line(f"SPT {metric_text(metric)}", (score_text(x.spt, metric) for x in sides), row.spt_change),
        line(f"delta, {unit}", (delta_text(x.delta, metric) for x in sides), row.delta_change),
        line("95 % interval", (interval_text(x.low, x.high, metric) for x in sides)),
        line("pairs", (str(x.n) if x.n == x.planned else f"{x.n} of {x.planned}" for x in sides)),
        line("p", (p_text(x.p) for x in sides)),
        line("Holm p", (p_text(x.holm) + (f" of {x.tests}" if x.tests else "") for x in sides)),
        line("decision", (DECISIONS[x.decision] for x in sides)),
    ]


def _remarks(row: RowChange) -> Iterator[str]:
    for name, seeds in (("added", row.seeds_added), ("lost", row.seeds_lost)):
        if seeds:
            yield f"seeds {name}: {_listed(seeds)}"
    if row.pairs_a != row.pairs_b and row.pairs_a and row.pairs_b:
        yield f"the means are not over the same seeds: {_listed(row.pairs_a)} in A, {_listed(row.pairs_b)} in B"
    if replaced := sorted({seed.seed for seed in row.seeds if seed.a_run and seed.b_run and not seed.same_run}):
        yield f"different runs, so different settings, data or pretraining: seeds {_listed(replaced)}"
    for title, failures in (("failed in A, not in B", row.failures_gone), ("failed in B, not in A", row.failures_new)):
        for failure in failures:
            arm = arm_text(failure.arm) if failure.arm else "run"
            yield f"{title}: {arm}, seed {failure.seed} ({failure.state}: {failure.reason})"
    yield from (f"warning gone: {warning}" for warning in row.warnings_gone)
    yield from (f"new warning: {warning}" for warning in row.warnings_new)
    if row.others:
        yield f"also different: {', '.join(row.others)}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _seed_line(row: RowChange, seed: SeedChange) -> tuple[str, ...]:
    a = seed.a_state if seed.a is None else score_text(seed.a, row.metric)
    b = seed.b_state if seed.b is None else score_text(seed.b, row.metric)
    change = "" if seed.change is None else delta_text(seed.change, row.metric)
    run = "same run" if seed.same_run else "other run" if seed.a_run and seed.b_run else ""
    return str(seed.seed), arm_text(seed.arm), a, b, change, run
