"""What a study would do: every run, its state and what it will cost. Runs nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spt.execution.estimate import MeasuredCosts, RuntimeForecast
from spt.execution.queue import RunRequest, in_order, shard
from spt.execution.run_study import apply_selection, cell_requests, trial_requests
from spt.report.format import flops_text, time_text
from spt.runs.plan import factors_text
from spt.studies import selection
from spt.studies.grid import StudyGrid
from spt.studies.status import needed_runs


def dry_run(
    layout: StudyGrid, folder: Path, meter: MeasuredCosts, part: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Every run in the order in which they are made, its state and cost; costs are of whole budgets."""
    root = folder.parent
    layout, plan, said = apply_selection(layout, root)
    states = needed_runs(root, plan)
    pace = RuntimeForecast(root)
    runs = []
    for what, wanted in (("trial", trial_requests(layout)), ("run", cell_requests(layout))):
        runs += [_run(one, what, states, meter, pace) for one in _part(wanted, part) if one.job.name in states]
    left = [run for run in runs if run["state"] not in ("done", "diverged")]
    seconds = [run["seconds"] for run in left]
    return {
        "study": folder.name,
        "folder": str(folder),
        "kind": layout.study.kind,
        "seeds": list(layout.seeds),
        "rows": [
            {
                "recipe": row.loaded.name,
                "factors": dict(row.factors),
                "parameters": meter.estimate(_first(layout, i)).parameters,
                "total": row.total.model_dump(mode="json") if row.total else None,
            }
            for i, row in enumerate(layout.rows)
        ],
        "runs": runs,
        "later": sum(2 * len(layout.seeds) for search in plan.searches if selection.has_pending_trials(root, search)),
        "left": {
            "runs": len(left),
            "steps": sum(run["steps"] for run in left),
            "examples": sum(run["examples"] for run in left),
            "flops": sum(run["flops"] for run in left),
            "seconds": sum(seconds) if None not in seconds else None,
        },
        "notes": [*layout.notes, *said],
    }


def _part(wanted: Sequence[RunRequest], part: tuple[int, int] | None) -> list[RunRequest]:
    return shard(in_order(wanted), *part) if part else in_order(wanted)


def _first(layout: StudyGrid, row: int) -> Any:
    jobs = [cell.job for cell in layout.cells if cell.row == row and cell.arm == "spt"]
    jobs += [t.job for search in layout.searches if search.row == row for t in search.trials]
    return jobs[0]


def _run(
    one: RunRequest, what: str, states: Mapping[str, str], meter: MeasuredCosts, pace: RuntimeForecast
) -> dict[str, Any]:
    job, cost = one.job, meter.estimate(one.job)
    return {
        "run": job.name,
        "label": one.label.partition("] ")[2].rstrip(":"),
        "what": what,
        "stage": job.stage,
        "seed": job.seed,
        "state": states[job.name],
        "steps": cost.steps,
        "examples": cost.examples,
        "flops": cost.flops,
        "seconds": pace.seconds(job, cost.flops),
    }


def render(found: dict[str, Any]) -> RenderableType:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("row", "parameters", "total"):
        rows.add_column(name, justify="left" if name == "row" else "right")
    for row in found["rows"]:
        total = row["total"]
        rows.add_row(
            Text(" ".join(filter(None, [row["recipe"], factors_text(row["factors"])]))),
            f"{row['parameters']:,}",
            f"{total['amount']:.4g} {total['axis']}" if total else "-",
        )
    runs = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("run", "stage", "state", "steps", "FLOPs", "time"):
        runs.add_column(name, justify="right" if name in ("steps", "FLOPs", "time") else "left", no_wrap=name != "run")
    for run in found["runs"]:
        runs.add_row(
            Text(run["label"]),
            run["stage"],
            run["state"],
            f"{run['steps']:,}",
            flops_text(run["flops"]),
            "-" if run["seconds"] is None else time_text(run["seconds"]),
        )
    left = found["left"]
    known = "" if left["seconds"] is None else f", about {time_text(left['seconds'])} one after the other"
    lines = [
        Text(f"left: {left['runs']} of {len(found['runs'])} runs, {flops_text(left['flops'])} FLOPs{known}"),
        Text("costs are of whole budgets; a time is judged by runs like it that are done in this folder"),
    ]
    lines += [Text(note) for note in found["notes"]]
    if found["later"]:
        lines.insert(1, Text(f"then {found['later']} finetunings at the settings that validation chooses"))
    return Group(Text(found["folder"], style="bold"), rows, Text(), runs, Text(), *lines)
