"""What changed from one report to another: rows, scores, verdicts, failures, costs.

Two reports that share runs are not independent experiments: no test is made and no p is formed between them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from spt.analysis.diff import (
    Change,
    NumberChange,
    compare,
    compare_numbers,
    cost_cells,
    read_json,
    side_by_side,
    warning_lines,
)
from spt.config.validation import validation_messages
from spt.errors import DataError, UsageError
from spt.report.arms import Row, Seed
from spt.report.collect import read_report
from spt.report.format import (
    ARM,
    abbreviate,
    delta_text,
    interval_text,
    is_percent,
    metric_text,
    p_text,
    score_text,
)
from spt.report.machine import FORMAT, to_json
from spt.report.verdict import Decision
from spt.runs.index import Failure
from spt.runs.plan import ARMS, PLAN, Place, Record

NOTABLE = 0.05  # relative change of a cost from which it is reported

DECISIONS: dict[Decision, str] = {
    "spt": "SPT beats scratch",
    "scratch": "scratch beats SPT",
    "spt alone": "SPT beats scratch, on its own",
    "scratch alone": "scratch beats SPT, on its own",
    "open": "not decided",
    "too few seeds": "too few seeds",
    "too few splits": "too few splits",
    "no spread": "not decided, no spread",
    "no pair": "no pair finished",
    "one arm": "one arm alone was run",
    "different data": "not comparable",
    "smoke": "smoke run",
}

MEANS = ("scratch", "spt", "delta")
COMPARED = (*MEANS, "low", "high", "n", "planned", "splits", "p", "holm", "tests", "decision")  # fields of a row
FROM_SEEDS = ("items", "notes", "scratch_arm", "spt_arm", "only")  # fields that differ wherever seeds do
# Fields that are compared, follow from others or have a comparison of their own, as an arm's score and costs do.
REPORTED: dict[str, Any] = {
    **dict.fromkeys((*COMPARED, "metric", "seeds", "failures", "warnings"), True),
    **dict.fromkeys(("label", "source", "command", "verdict", "compute", "ratios", "detectable", "favour_spt"), True),
    **{arm: {"score", "total", "pretraining", "finetuning"} for arm in ("scratch_arm", "spt_arm")},
}
MISSING = {"score": None, "state": "absent", "run": ""}  # where a report does not have a seed

Side = dict[str, Any]  # a row as one report has it: label, the fields compared, verdict, seeds of the complete pairs


class RowDiff(Record):
    label: str
    metric: str
    a: Side
    b: Side
    verdict_changed: bool  # the decision, not the numbers in its sentence
    changed: bool  # anything at all
    means: tuple[NumberChange, ...]  # changed or not
    seeds: tuple[Change, ...]  # by seed and arm: score, state and run
    costs: tuple[NumberChange, ...]  # by arm and field of `Cost`, means, pretraining included; notable ones
    failures: tuple[Change, ...]  # by seed and arm, that only one report has
    warnings: tuple[Change, ...]  # that only one report has
    others: tuple[Change, ...]  # further fields of the row


class ReportDiff(Record):
    sentence: str
    a: str  # where the reports were read from
    b: str
    changed: bool
    warnings: tuple[str, ...]
    rows: tuple[RowDiff, ...]  # in both; changed verdicts first
    only_a: tuple[Side, ...]
    only_b: tuple[Side, ...]
    statements: tuple[Change, ...]  # verdicts over several rows, and warnings, that only one report has


class LoadedReport(Record):
    """The parts of report.json that are compared."""

    source: str  # where it was read from
    rows: tuple[Row, ...]
    verdicts: tuple[str, ...]  # on models, rows, and several rows
    warnings: tuple[str, ...]

    @property
    def statements(self) -> dict[str, None]:
        """Verdicts over several rows, and warnings."""
        of_rows = {f"{row.label}: {row.verdict}" for row in self.rows}
        others = (text for text in self.verdicts if text not in of_rows)
        return dict.fromkeys((*others, *(f"WARNING: {text}" for text in self.warnings)))


def diff_reports(first: Path, second: Path) -> ReportDiff:
    """What changed from the first report to the second.

    Each is a report.json, or a folder that `spt report` takes, whose report is then computed now. Raises UsageError or
    DataError.
    """
    a, b = _load(first), _load(second)
    matched, only_a, only_b = _match(a.rows, b.rows)
    rows = sorted((_compare(x, y) for x, y in matched), key=lambda row: (not row.verdict_changed, not row.changed))
    statements = compare(a.statements, b.statements)
    changed = any(row.changed for row in rows) or bool(only_a or only_b or statements)
    return ReportDiff(
        sentence=_sentence(rows, len(only_a), len(only_b)) if changed else "nothing changed",
        a=a.source,
        b=b.source,
        changed=changed,
        warnings=tuple(_warnings(rows)),
        rows=tuple(rows),
        only_a=tuple(map(_side, only_a)),
        only_b=tuple(map(_side, only_b)),
        statements=statements,
    )


def _load(path: Path) -> LoadedReport:
    if (path / "report.json").is_file() and not (path / PLAN).is_file():  # written by `spt report --out`
        path = path / "report.json"
    if path.is_file():
        raw = read_json(path, "name a report.json, or the folder of a study or of runs")
    else:
        raw = to_json(read_report([path]))
    if not isinstance(raw, dict) or raw.get("kind") != "report" or not isinstance(raw.get("rows"), list):
        raise DataError(f"{path} is not a report.json of spt: name one, or the folder of a study or of runs")
    if raw.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {raw.get('format')} of another version of spt, not {FORMAT}; if its runs still exist, "
            "name their folder instead, and the report is computed again"
        )
    try:
        report = LoadedReport.model_validate(raw | {"source": path.as_posix()})
    except ValidationError as error:
        problem = validation_messages(LoadedReport, error)[0]
        raise DataError(f"{path} is not a report of this version of spt: {problem}") from error
    if not report.rows:
        raise UsageError(f"{path} has no rows to compare")
    return report


def _match(a: Sequence[Row], b: Sequence[Row]) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """Pairs of rows about the same subject, then the rows that only one report has.

    Of several rows about one subject, those of the same runs belong together, then those that share some, in a study of
    one name first, then those of the same study, then those that come first. A row without results has no metric yet.
    """
    pairs: list[tuple[int, int]] = []
    left, right = dict(enumerate(a)), dict(enumerate(b))

    def share_runs(x: Row, y: Row) -> bool:
        return x.metric == y.metric and bool(_runs(x) & _runs(y))

    def same_runs(x: Row, y: Row) -> bool:
        return share_runs(x, y) and _runs(x) == _runs(y)

    rules: tuple[Callable[[Row, Row], bool], ...] = (
        lambda x, y: same_runs(x, y) and x.source == y.source,
        lambda x, y: share_runs(x, y) and x.source == y.source,
        lambda x, y: same_runs(x, y),
        lambda x, y: share_runs(x, y),
        lambda x, y: x.metric == y.metric and x.source == y.source,
        lambda x, y: x.metric == y.metric,
        lambda x, y: not (x.metric and y.metric),
    )
    for same in rules:
        for i, x in list(left.items()):
            match = next((j for j, y in right.items() if _subject(x) == _subject(y) and same(x, y)), None)
            if match is not None:
                pairs.append((i, match))
                del left[i], right[match]
    return [(a[i], b[j]) for i, j in sorted(pairs)], list(left.values()), list(right.values())


def _runs(row: Row) -> set[str]:
    return {run for seed in row.seeds for run in (seed.scratch_run, seed.spt_run) if run}


def _subject(row: Row) -> tuple[object, ...]:
    return row.task, row.model, row.recipe, row.kind, json.dumps(row.factors, sort_keys=True)


def _side(row: Row) -> Side:
    pairs = [seed.seed if seed.split is None else _place(seed) for seed in row.seeds if seed.delta is not None]
    return {name: getattr(row, name) for name in ("label", *COMPARED, "verdict")} | {"pairs": pairs}


def _compare(a: Row, b: Row) -> RowDiff:
    seed_changes = compare(_seeds(a), _seeds(b), missing=MISSING)
    order = {_place(seed): (seed.seed, seed.split or "") for row in (a, b) for seed in row.seeds}
    seeds = tuple(sorted(seed_changes, key=lambda change: order[_seed_arm(change)[0]]))
    failures = compare(*({f"{_place(x)}.{x.arm}": x.model_dump() for x in row.told_failures} for row in (a, b)))
    others = compare(*(row.model_dump(exclude=REPORTED) for row in (a, b)))
    costs = compare_numbers(_costs(a), _costs(b))
    changes: dict[str, tuple[Any, ...]] = {
        "seeds": seeds,
        "costs": tuple(cost for cost in costs if cost.ratio is not None and abs(cost.ratio - 1) > NOTABLE),
        "failures": tuple(change for change in failures if change.there != "both"),
        "warnings": compare(dict.fromkeys(a.warnings), dict.fromkeys(b.warnings)),
        "others": tuple(change for change in others if not (seeds and change.key in FROM_SEEDS)),
    }
    return RowDiff(
        label=b.label,
        metric=b.metric or a.metric,
        a=_side(a),
        b=_side(b),
        verdict_changed=a.decision != b.decision,
        changed=any(getattr(a, name) != getattr(b, name) for name in COMPARED) or any(changes.values()),
        means=compare_numbers(*({name: getattr(row, name) for name in MEANS} for row in (a, b))),
        **changes,
    )


def _seeds(row: Row) -> dict[str, dict[str, Any]]:
    """What each arm gave at each seed."""
    return {
        f"{_place(seed)}.{arm}": {
            "score": getattr(seed, arm),
            "state": getattr(seed, f"{arm}_state"),
            "run": getattr(seed, f"{arm}_run"),
        }
        for seed in row.seeds
        for arm in ARMS
    }


def _place(seed: Seed | Failure) -> str:
    """A seed, with the split of the data where there are several."""
    return str(seed.seed) if seed.split is None else str(Place(seed.seed or 0, seed.split))


def _costs(row: Row) -> dict[str, float | None]:
    """Mean costs of both arms, pretraining included."""
    arms = {"scratch": row.scratch_arm, "spt": row.spt_arm}
    return {f"{name}.{axis}": amount for name, arm in arms.items() if arm for axis, amount in arm.total}


def _sentence(rows: Sequence[RowDiff], only_a: int, only_b: int) -> str:
    missing = ", ".join(f"{count} only in {name}" for name, count in (("A", only_a), ("B", only_b)) if count)
    if not rows:
        return f"the reports have no row in common: {missing}"
    changed = [row for row in rows if row.verdict_changed]
    nouns = "row keeps its verdict" if len(rows) == 1 else "rows keep their verdict"
    parts = [f"{len(rows) - len(changed)} of {len(rows)} {nouns}"]
    for row in changed[:3]:
        a, b = (DECISIONS[side["decision"]] for side in (row.a, row.b))
        parts.append(f"{row.label} changed from '{a}' to '{b}'")
    parts += [f"{len(changed) - 3} more changed"] if len(changed) > 3 else []
    if details := [row.label for row in rows if row.changed and not row.verdict_changed]:
        parts.append(f"details changed in {abbreviate(details)}")
    parts += [f"rows: {missing}"] if missing else []
    return "; ".join(parts)


def _warnings(rows: Sequence[RowDiff]) -> Iterator[str]:
    """A run has one score, in whichever report. A run that several rows share is named once."""
    named: set[str] = set()
    for row in rows:
        changes = []
        for seed in row.seeds:
            run, a, b = seed.a["run"], seed.a["score"], seed.b["score"]
            if _same_run(seed) and run not in named and None not in (a, b) and a != b:
                named.add(run)
                number, arm = _seed_arm(seed)
                scores = f"had {score_text(a, row.metric)}, now {score_text(b, row.metric)}"
                changes.append(f"{run} ({arm}, seed {number}) {scores}")
        if changes:
            yield (
                f"{row.label}: the same computation with a different score: {abbreviate(changes)}; results were "
                "edited, or they are not reproducible"
            )


def _seed_arm(change: Change) -> tuple[str, str]:
    """What the key of a change names, for people."""
    number, _, arm = change.key.rpartition(".")
    return number, ARM.get(arm, "run")


def _same_run(seed: Change) -> bool:
    return bool(seed.a["run"]) and seed.a["run"] == seed.b["run"]


def render(diff: ReportDiff) -> RenderableType:
    """For `rich.console.Console.print`: the sentence, then what changed, row by row; unchanged rows are named."""
    parts: list[RenderableType] = [Text(diff.sentence, style="bold"), Text()]
    parts += [Text(f"A  {diff.a}"), Text(f"B  {diff.b}"), Text()]
    for warning in warning_lines(diff.warnings):
        parts += [warning, Text()]
    for row in diff.rows:
        if row.changed:
            parts += _block(row.label + (", VERDICT CHANGED" if row.verdict_changed else ""), _row_parts(row))
    for title, texts in (
        ("Only in A", [f"{side['label']}: {side['verdict']}" for side in diff.only_a]),
        ("Only in B", [f"{side['label']}: {side['verdict']}" for side in diff.only_b]),
        ("Stated only in A", [statement.key for statement in diff.statements if statement.there == "a"]),
        ("Stated only in B", [statement.key for statement in diff.statements if statement.there == "b"]),
    ):
        parts += _block(title, map(Text, texts)) if texts else []
    if unchanged := [row.label for row in diff.rows if not row.changed]:
        parts += [Text(f"unchanged: {'; '.join(unchanged)}", style="dim"), Text()]
    if diff.changed:
        parts += [Text("Nothing here is tested: reports that share runs are not independent.", style="dim")]
    return Group(*parts)


def _block(title: str, lines: Iterable[RenderableType]) -> list[RenderableType]:
    return [Text(title, style="bold"), Padding(Group(*lines), (0, 0, 1, 2))]


def _row_parts(row: RowDiff) -> Iterator[RenderableType]:
    if row.verdict_changed:
        yield from (Text(f"A: {row.a['verdict']}"), Text(f"B: {row.b['verdict']}", style="bold"))
    yield side_by_side(("", "A", "B", "B - A"), _number_lines(row))
    yield from map(Text, _remarks(row))
    if row.seeds:
        yield side_by_side(("seed", "arm", "A", "B", "B - A", "run"), [_seed_cells(row, seed) for seed in row.seeds])
    if row.costs:
        costs = [cost_cells(f"{ARM[cost.key.partition('.')[0]]} {{}}", cost) for cost in row.costs]
        yield side_by_side(("mean cost", "A", "B", "B : A"), costs)


def _number_lines(row: RowDiff) -> list[tuple[str, ...]]:
    metric, unit = row.metric, "points" if is_percent(row.metric) else row.metric
    changes = {mean.key: "" if mean.change is None else delta_text(mean.change, metric) for mean in row.means}

    def line(name: str, text: Callable[[Side], str], mean: str = "") -> tuple[str, ...]:
        return name, text(row.a), text(row.b), changes.get(mean, "")

    return [
        line(f"scratch {metric_text(metric)}", lambda x: score_text(x["scratch"], metric), "scratch"),
        line(f"SPT {metric_text(metric)}", lambda x: score_text(x["spt"], metric), "spt"),
        line(f"delta, {unit}", lambda x: delta_text(x["delta"], metric), "delta"),
        line("95 % interval", lambda x: interval_text(x["low"], x["high"], metric)),
        line("pairs", lambda x: str(x["n"]) if x["n"] == x["planned"] else f"{x['n']} of {x['planned']}"),
        line("p", lambda x: p_text(x["p"])),
        line("Holm p", lambda x: p_text(x["holm"]) + (f" of {x['tests']}" if x["tests"] else "")),
        line("decision", lambda x: DECISIONS[x["decision"]]),
    ]


def _remarks(row: RowDiff) -> Iterator[str]:
    def seeds(choose: Callable[[Change], bool]) -> str:
        places = list(dict.fromkeys(_seed_arm(seed)[0] for seed in row.seeds if choose(seed)))
        return ("; " if any("," in place for place in places) else ", ").join(places)

    if added := seeds(lambda seed: seed.there == "b"):
        yield f"seeds added: {added}"
    if lost := seeds(lambda seed: seed.there == "a"):
        yield f"seeds lost: {lost}"
    a, b = row.a["pairs"], row.b["pairs"]
    if a != b and a and b:
        yield f"the means are not over the same seeds: {_list_text(a)} in A, {_list_text(b)} in B"
    if replaced := seeds(lambda seed: bool(seed.a["run"] and seed.b["run"]) and not _same_run(seed)):
        yield f"different runs, so different settings, data or pretraining: seeds {replaced}"
    for change in row.failures:
        number, arm = _seed_arm(change)
        where = "failed in A, not in B" if change.there == "a" else "failed in B, not in A"
        failure = change.a or change.b
        yield f"{where}: {arm}, seed {number} ({failure['state']}: {failure['reason']})"
    for change in row.warnings:
        yield f"{'warning gone' if change.there == 'a' else 'new warning'}: {change.key}"
    if row.others:
        yield f"also different: {', '.join(change.key for change in row.others)}"


def _list_text(numbers: Iterable[int | str]) -> str:
    return ", ".join(map(str, numbers))


def _seed_cells(row: RowDiff, seed: Change) -> tuple[str, ...]:
    scores = [side["score"] for side in (seed.a, seed.b)]
    texts = [
        side["state"] if side["score"] is None else score_text(side["score"], row.metric) for side in (seed.a, seed.b)
    ]
    change = "" if None in scores else delta_text(scores[1] - scores[0], row.metric)
    run = "same run" if _same_run(seed) else "other run" if seed.a["run"] and seed.b["run"] else ""
    return (*_seed_arm(seed), *texts, change, run)
