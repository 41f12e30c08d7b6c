"""Tables of costs, budgets and sizes."""

from collections.abc import Sequence

from spt.report.arms import Cost
from spt.report.collect import Report
from spt.report.cost import AXES, StageCost
from spt.report.format import ARM, ReportTable, count_text, flops_text, ratio_text, time_text
from spt.runs.result import Ledger


def matched_budget_table(report: Report) -> ReportTable:
    header = ("task / model", "matched", "target", "scratch", "SPT", "mismatch", *(_axis_name(axis) for axis in AXES))
    body = [
        (
            match.label,
            _axis_name(match.total.axis),
            _axis_text(match.total.axis, match.total.amount),
            _axis_text(match.total.axis, match.scratch),
            _axis_text(match.total.axis, match.spt),
            _percent(match.mismatch[match.total.axis]),
            *(_percent(match.mismatch[axis]) for axis in AXES),
        )
        for match in report.matches
    ]
    caption = (
        "Totals of training one model, pretraining included, means over the same seeds; mismatch and the other axes: "
        "SPT against scratch. Epochs are of the training split; time is device time, evaluation included."
    )
    return ReportTable("Matched budgets", header, body, 2, ((0, 1, 2, 3, 4, 5), (0, 6, 7, 8, 9, 10)), caption)


def _axis_name(axis: str) -> str:
    return "FLOPs" if axis == "flops" else axis


def _axis_text(axis: str, amount: float | None) -> str:
    if amount is None:
        return "-"
    if axis == "epochs":
        return f"{amount:.4g}"
    return flops_text(amount) if axis == "flops" else time_text(amount) if axis == "time" else count_text(amount)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.1f} %"


def cost_table(report: Report) -> ReportTable:
    body: list[tuple[str, ...]] = []
    for row in report.rows:
        if row.scratch_arm is None or row.spt_arm is None:
            continue
        body += [
            (row.label, "scratch", *cost_cells(row.scratch_arm.total)),
            ("", "pretraining", *cost_cells(row.spt_arm.pretraining)),
            ("", "+ finetuning", *cost_cells(row.spt_arm.finetuning)),
            ("", "= SPT", *cost_cells(row.spt_arm.total)),
            ("", "ratio", *(ratio_text(row.ratios[axis]) for axis in Cost.model_fields)),
        ]
    header = ("task / model", "arm", "steps", "examples", "FLOPs", "time", "memory")
    caption = (
        "To train one model, means over the same seeds; time includes evaluation; memory is the largest peak. "
        "Ratio: SPT to scratch."
    )
    return ReportTable("Cost", header, body, 2, None, caption)


def total_cost_table(report: Report) -> ReportTable:
    header = ("study", "arm", "runs", "steps", "examples", "positions", "FLOPs", "device time", "wall time")
    body: list[tuple[str, ...]] = []
    for (study, arm), parts in _by_arm(report).items():
        lines: list[tuple[str, StageCost]] = [(part.part, part) for part in parts]
        if len(parts) > 1:
            lines.append(("total", _sum(parts)))
        for number, (part, cost) in enumerate(lines):
            ledger = cost.ledger
            body.append(
                (
                    "" if number else study or "no study",
                    f"{ARM[arm]}, {part}",
                    str(cost.runs) + (f" + {cost.unknown} ?" if cost.unknown else ""),
                    count_text(ledger.steps),
                    count_text(ledger.examples),
                    count_text(ledger.positions),
                    flops_text(ledger.flops),
                    time_text(ledger.device_seconds),
                    time_text(ledger.seconds),
                )
            )
    caption = (
        "All runs of a study; a run that several rows share counts once. Not included: interrupted attempts that were "
        "not continued, and the cost of runs without a result (?)."
    )
    return ReportTable("Total cost", header, body, 2, ((0, 1, 2, 3, 6, 7, 8),), caption)


def _by_arm(report: Report) -> dict[tuple[str, str], list[StageCost]]:
    groups: dict[tuple[str, str], list[StageCost]] = {}
    for cost in report.spent:
        groups.setdefault((cost.study, cost.arm), []).append(cost)
    return groups


def _sum(parts: Sequence[StageCost]) -> StageCost:
    update = {
        "runs": sum(part.runs for part in parts),
        "unknown": sum(part.unknown for part in parts),
        "ledger": sum((part.ledger for part in parts), start=Ledger()),
    }
    return parts[0].model_copy(update=update)


def operation_table(report: Report) -> ReportTable:
    """Training operations by kind."""
    ledgers = {name: _sum(parts).ledger for name, parts in _by_arm(report).items()}
    kinds: dict[str, float] = {}
    for ledger in ledgers.values():
        for kind, flops in ledger.operations.items():
            kinds[kind] = kinds.get(kind, 0.0) + flops
    body: list[tuple[str, ...]] = []
    for (study, arm), ledger in ledgers.items():
        known = sum(ledger.operations.values())
        for number, kind in enumerate(sorted(kinds, key=lambda kind: (-kinds[kind], kind))):
            flops = ledger.operations.get(kind, 0.0)
            share = f"{100 * flops / known:.1f} %" if known else "-"
            body.append(("" if number else study or "no study", ARM[arm], kind, flops_text(flops), share))
    header = ("study", "arm", "kind", "FLOPs", "share")
    return ReportTable("Total FLOPs by kind", header, body, 3)


def parameter_table(report: Report) -> ReportTable:
    """Parameters of the finetuned model; a single line where the arms agree."""
    body: list[tuple[str, ...]] = []
    for row in report.rows:
        arms = {"scratch": row.scratch_arm, "SPT": row.spt_arm}
        sizes = {name: arm.parameters for name, arm in arms.items() if arm is not None and arm.parameters}
        if len(sizes) == 2 and sizes["scratch"] == sizes["SPT"]:
            sizes = {"both": sizes["SPT"]}
        for name, parts in sizes.items():
            cells = (f"{parts[part]:,}" if part in parts else "-" for part in ("total", "backbone", "encoder", "head"))
            body.append((row.label, name, *cells))
    header = ("task / model", "arm", "total", "backbone", "encoder", "head")
    return ReportTable("Parameters", header, body, 2)


def cost_cells(cost: Cost | Ledger) -> tuple[str, ...]:
    """One cell per field of `Cost`."""
    return (
        count_text(cost.steps),
        count_text(cost.examples),
        flops_text(cost.flops),
        time_text(cost.seconds),
        f"{cost.peak_bytes / 2**20:,.0f} MiB" if cost.peak_bytes else "-",
    )
