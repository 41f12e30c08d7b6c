"""What a study would do: every run, its state and what it will cost. Runs nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spt.execution.baselines import baseline_text
from spt.execution.estimate import MeasuredCosts, RuntimeForecast
from spt.execution.queue import in_order, shard
from spt.execution.run_study import apply_selection, cell_requests, check_arm, trial_requests
from spt.report.format import flops_text, time_text
from spt.runs.baseline import BaselineResult, baseline_outcome
from spt.runs.plan import factors_text
from spt.studies import selection
from spt.studies.grid import StudyGrid
from spt.studies.status import needed_runs, plain_table, row_text


def dry_run(
    grid: StudyGrid, folder: Path, costs: MeasuredCosts, part: tuple[int, int] | None = None, arm: str | None = None
) -> dict[str, Any]:
    """Every run in the order in which they are made, its state and cost; costs are of whole budgets."""
    root = folder.parent
    check_arm(grid, arm)
    grid, plan, messages = apply_selection(grid, root)
    states = needed_runs(root, plan)
    forecast = RuntimeForecast(root)
    runs = []
    for kind, requests in (("trial", in_order(trial_requests(grid))), ("run", in_order(cell_requests(grid, arm)))):
        for job, label, *_ in shard(requests, *part) if part else requests:
            if job.name in states:
                with grid.telling_row(job):
                    cost = costs.estimate(job)
                runs.append(
                    {
                        "run": job.name,
                        "label": label.partition("] ")[2].rstrip(":"),
                        "what": kind,
                        "stage": job.stage,
                        "seed": job.seed,
                        "state": states[job.name],
                        "steps": cost.steps,
                        "examples": cost.examples,
                        "flops": cost.flops,
                        "seconds": forecast.seconds(job, cost.flops),
                    }
                )
    left = [run for run in runs if run["state"] not in ("done", "diverged")]
    seconds = [run["seconds"] for run in left]
    jobs = {cell.row: cell.job for cell in grid.cells if cell.arm == "spt"}
    jobs |= {search.row: search.trials[0].job for search in grid.searches}
    return {
        "study": folder.name,
        "folder": str(folder),
        "kind": grid.study.kind,
        "seeds": list(grid.seeds),
        "splits": list(grid.splits),
        "rows": [
            {
                "recipe": row.resolved.name,
                "factors": dict(row.factors),
                "changes": dict(row.changes),
                "parameters": (cost := costs.estimate(jobs[i])).parameters,
                "flops_per_example": cost.flops / cost.examples,
                "total": row.total.model_dump(mode="json") if row.total else None,
            }
            for i, row in enumerate(grid.rows)
        ],
        "runs": runs,
        "baselines": [
            {
                "run": job.folder,
                "label": baseline_text(job) + ("" if split is None else f" {split}"),
                "seed": job.seed,
                "split": split,
                "rows": list(rows),
                "state": "done" if isinstance(baseline_outcome(root, job.folder), BaselineResult) else "missing",
            }
            for job, rows, split in grid.baselines
        ],
        "later": sum(2 * len(grid.seeds) for search in plan.searches if selection.has_pending_trials(root, search)),
        "left": {
            "runs": len(left),
            **{name: sum(run[name] for run in left) for name in ("steps", "examples", "flops")},
            "seconds": sum(seconds) if None not in seconds else None,
        },
        "notes": [*grid.notes, *messages],
    }


def render(plan: dict[str, Any], full: bool = False) -> RenderableType:
    """For a terminal: runs that differ in nothing but their seed are one line, or have one each."""
    rows = [
        (
            row_text(row),
            factors_text(row["changes"]) or "-",
            f"{row['parameters']:,}",
            flops_text(row["flops_per_example"]),
            "{amount:.4g} {axis}".format(**row["total"]) if row["total"] else "-",
        )
        for row in plan["rows"]
    ]
    baselines = [{**each, "stage": "baseline", "steps": None} for each in plan["baselines"]]
    groups = _alike([*plan["runs"], *baselines], full)
    left = plan["left"]
    known = "" if left["seconds"] is None else f", about {time_text(left['seconds'])} one after the other"
    lines = [f"left: {left['runs']} of {len(plan['runs'])} runs, {flops_text(left['flops'])} FLOPs{known}"]
    if missing := [each for each in plan["baselines"] if each["state"] != "done"]:
        lines.append(f"and {len(missing)} of {len(plan['baselines'])} baselines, on the CPU, after the runs")
    if plan["later"]:
        lines.append(f"then {plan['later']} finetunings at the settings that validation chooses")
    lines.append("costs are of whole budgets; a time is estimated from runs like it that are done in this folder")
    return Group(
        Text(plan["folder"], style="bold"),
        _without_empty(("row", "changed", "parameters", "FLOPs/example", "total"), rows, text_columns=2),
        Text(),
        plain_table(("what", "stage", "state", "runs", "steps each", "FLOPs", "time"), groups, text_columns=3),
        Text(),
        *map(Text, [*lines, *plan["notes"]]),
    )


def _without_empty(header: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int) -> Table:
    """A plain table of the columns that say something of a line, so that names have room."""
    kept = [i for i in range(len(header)) if any(line[i] != "-" for line in lines)]
    texts = sum(i < text_columns for i in kept)
    return plain_table([header[i] for i in kept], [[line[i] for i in kept] for line in lines], texts)


def _alike(runs: Sequence[dict[str, Any]], full: bool) -> list[tuple[str, ...]]:
    """Lines of runs whose label but for the seed, stage, state and steps are the same; costs are of all of them."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        label = str(run["label"]).replace(f"seed {run['seed']}", "seeds {}", 1)
        groups.setdefault((label, run["stage"], run["state"], run["steps"], number if full else 0), []).append(run)
    lines: list[tuple[str, ...]] = []
    for (label, stage, state, steps, _), members in groups.items():
        seeds = _seeds_text([run["seed"] for run in members])
        cost = ("-", "-", "-")
        if steps is not None:
            seconds = [run["seconds"] for run in members]
            known = "-" if None in seconds else time_text(sum(seconds))
            cost = (f"{steps:,}", flops_text(sum(run["flops"] for run in members)), known)
        lines.append((label.replace("seeds {}", seeds), stage, state, str(len(members)), *cost))
    return lines


def _seeds_text(seeds: Sequence[int | None]) -> str:
    """`seed 3`, `seeds 0 to 19`, `seeds 1, 4`."""
    known = sorted({seed for seed in seeds if seed is not None})
    if len(known) < 2:
        return "".join(f"seed {seed}" for seed in known)
    if known == list(range(known[0], known[-1] + 1)):
        return f"seeds {known[0]} to {known[-1]}"
    return f"seeds {', '.join(map(str, known))}"
