"""Tables of costs, budgets and sizes."""

from collections.abc import Callable, Sequence

from spt.report.arms import Cost
from spt.report.collect import Report
from spt.report.cost import AXES, StageCost
from spt.report.format import TEXTS, Group, ReportTable, TableSpec, count_text, flops_text, ratio_text, time_text
from spt.runs.plan import arm_text
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
    texts: dict[str, Callable[[float], str]] = {"epochs": "{:.4g}".format, "flops": flops_text, "time": time_text}
    return "-" if amount is None else texts.get(axis, count_text)(amount)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.1f} %"


def cost_table(report: Report) -> ReportTable:
    body: list[tuple[str, ...]] = []
    for row in report.rows:
        lines: list[tuple[str, ...]] = []
        if row.scratch_arm is not None:
            lines.append(("scratch", *cost_cells(row.scratch_arm.total)))
        if row.spt_arm is not None:
            lines.append(("pretraining", *cost_cells(row.spt_arm.pretraining)))
            lines.append(("+ finetuning", *cost_cells(row.spt_arm.finetuning)))
            lines.append(("= SPT", *cost_cells(row.spt_arm.total)))
        if row.scratch_arm is not None and row.spt_arm is not None:
            lines.append(("ratio", *(ratio_text(row.ratios[axis]) for axis in Cost.model_fields)))
        body += [("" if number else row.label, *line) for number, line in enumerate(lines)]
    header = ("task / model", "arm", "steps", "examples", "FLOPs", "time", "memory")
    caption = (
        "To train one model, means over the same seeds; time includes evaluation; memory is the largest peak. "
        "Ratio: SPT to scratch."
    )
    return ReportTable("Cost", header, body, 2, None, caption)


TOTAL_COST = TableSpec(
    "Total cost",
    "study | arm | runs | steps: ledger.steps | examples: ledger.examples | positions: ledger.positions | "
    "FLOPs: ledger.flops | device time: ledger.device_seconds | wall time: ledger.seconds",
    lambda report: [
        Group(study or "no study", [*parts, *([_sum(parts)] if len(parts) > 1 else [])])
        for (study, _), parts in _by_arm(report).items()
    ],
    cells={
        "arm": lambda cost, _: f"{arm_text(cost.arm)}, {cost.part}",
        "runs": lambda cost, _: str(cost.runs) + (f" + {cost.unknown} ?" if cost.unknown else ""),
    },
    text_columns=2,
    narrow=((0, 1, 2, 3, 6, 8),),
    caption="All runs of a study; a run that several rows or arms share counts once. Not included: interrupted "
    "attempts that were not continued, and the cost of runs without a result (?).",
)


def _by_arm(report: Report) -> dict[tuple[str, str], list[StageCost]]:
    groups: dict[tuple[str, str], list[StageCost]] = {}
    for cost in report.spent:
        groups.setdefault((cost.study, cost.arm), []).append(cost)
    return groups


def _sum(parts: Sequence[StageCost]) -> StageCost:
    update = {
        "part": "total",
        "runs": sum(part.runs for part in parts),
        "unknown": sum(part.unknown for part in parts),
        "ledger": sum((part.ledger for part in parts), start=Ledger()),
    }
    return parts[0].model_copy(update=update)


def operation_table(report: Report) -> ReportTable:
    """Training operations by kind."""
    ledgers = {name: _sum(parts).ledger for name, parts in _by_arm(report).items()}
    kinds = sum(ledgers.values(), start=Ledger()).operations
    body = []
    for (study, arm), ledger in ledgers.items():
        known = sum(ledger.operations.values())
        for number, kind in enumerate(sorted(kinds, key=lambda kind: (-kinds[kind], kind))):
            flops = ledger.operations.get(kind, 0.0)
            share = f"{100 * flops / known:.1f} %" if known else "-"
            body.append(("" if number else study or "no study", arm_text(arm), kind, flops_text(flops), share))
    return ReportTable("Total FLOPs by kind", ("study", "arm", "kind", "FLOPs", "share"), body, 3)


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
    return tuple(TEXTS[axis](getattr(cost, axis), "") for axis in Cost.model_fields)


COST_TABLES = (matched_budget_table, cost_table, TOTAL_COST, operation_table, parameter_table)
