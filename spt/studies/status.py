"""The progress of studies, read from their files alone: what is done, running, failed or missing. No torch here."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spt.errors import DataError, UsageError
from spt.runs.baseline import BaselineResult, baseline_outcome
from spt.runs.folder import RunFolder
from spt.runs.index import run_outcome, studies_in
from spt.runs.plan import PLAN, PROGRESS, StudyPlan, factors_text, read_plan, run_names
from spt.runs.result import Result
from spt.runtime.progress import about

STATES = ("done", "running", "stopped", "failed", "diverged", "missing")


def study_status(folder: Path) -> dict[str, Any]:
    """The status of one study, or of all studies in a folder of runs. Raises UsageError and DataError."""
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}; name a study's folder, or the folder of runs (--out)")
    if (folder / PLAN).is_file():
        folder = folder.resolve()
        return {"studies": [_study(folder, read_plan(folder))], "warnings": []}
    studies, warnings = studies_in(folder)
    if not studies:
        reason = f" ({warnings[0]})" if warnings else ""
        raise DataError(f"{folder} holds no study{reason}; create one with spt study or spt compare")
    return {"studies": [_study(*study) for study in studies], "warnings": warnings}


def run_state(root: Path, name: str) -> str:
    """The state of a run. One recorded as running that no process has locked was killed: it counts as stopped."""
    outcome = run_outcome(root, name)
    if isinstance(outcome, Result):
        return "done"
    if outcome.state == "running":
        return "running" if RunFolder(root, name).held() else "stopped"
    return outcome.state if outcome.state in STATES else "failed"


def needed_runs(root: Path, plan: StudyPlan) -> dict[str, str]:
    """The state of every run of a study, except deleted pretraining runs that no other run needs."""
    states = {name: run_state(root, name) for name in run_names(plan)}
    pairs = [(trial.parent, trial.run) for search in plan.searches for trial in search.trials]
    pairs += [(cell.parent, cell.run) for cell in plan.cells]
    awaited = {parent for parent, run in pairs if states[run] != "done"}
    parents = {parent for parent, _ in pairs}
    return {n: s for n, s in states.items() if s != "missing" or n not in parents or n in awaited}


def _study(folder: Path, plan: StudyPlan) -> dict[str, Any]:
    states = needed_runs(folder.parent, plan)
    rows = []
    for index, row in enumerate(plan.rows):
        cells = [cell for cell in plan.cells if cell.row == index]
        trials = [trial for search in plan.searches if search.row == index for trial in search.trials]
        for kind, parts in (("trials", trials), ("runs", cells)):
            names = dict.fromkeys(name for part in parts for name in (part.parent, part.run) if name in states)
            if names:
                counts = _counts([states[name] for name in names])
                rows.append({"recipe": row.name, "factors": dict(row.factors), "what": kind, **counts})
    return {
        "study": folder.name,
        "kind": plan.kind,
        "command": plan.command,
        "smoke": plan.smoke,
        "seeds": list(plan.seeds),
        "splits": list(plan.splits),
        "to_choose": [plan.rows[search.row].name for search in plan.searches if not search.chosen],
        **_counts(list(states.values())),
        "baselines": _counts([_baseline_state(folder.parent, each.run) for each in plan.baselines]),
        "left": _seconds_left(folder) if "running" in states.values() else None,
        "rows": rows,
        "runs": states,
    }


def _baseline_state(root: Path, name: str) -> str:
    outcome = baseline_outcome(root, name)
    if isinstance(outcome, BaselineResult):
        return "done"
    if outcome.state == "running" and not RunFolder(root, name).held():
        return "stopped"
    return outcome.state if outcome.state in STATES else "failed"


def _seconds_left(folder: Path) -> float | None:
    """What whoever carries out the study has estimated last, less the time since."""
    try:
        estimate = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        left = estimate["left"] - (time.time() - estimate["time"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return float(left) if left > 0 else None


def _counts(states: Sequence[str]) -> dict[str, int]:
    counts = Counter(states)
    return {"all": len(states), **{name: counts[name] for name in STATES}}


def row_text(row: Mapping[str, Any]) -> str:
    """A row of a study: its recipe, and what the study varies."""
    return " ".join(filter(None, [row["recipe"], factors_text(row["factors"])]))


def plain_table(header: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int = 1) -> Table:
    """A table without rules, for the terminal; the first columns are text, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(header):
        if i < text_columns:
            table.add_column(name, overflow="fold")  # a name is never cut
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def render(status: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    columns = ("all", *STATES)
    for study in status["studies"]:
        smoke = ", smoke" if study["smoke"] else ""
        done = f"{study['done']} of {study['all']} runs done"
        if (baselines := study["baselines"])["all"]:
            done += f", {baselines['done']} of {baselines['all']} baselines"
        if study["splits"]:
            done += f", {len(study['splits'])} splits of the data"
        if study["left"] is not None:
            done += f", {about(study['left'])} left"
        parts.append(Text(f"{study['study']} ({study['kind']}{smoke}): {done}", style="bold"))
        labels = [row_text(row) + (", trials" if row["what"] == "trials" else "") for row in study["rows"]]
        counts = [[str(row[name] or "-") for name in columns] for row in study["rows"]]
        parts.append(plain_table(("row", *columns), [(a, *b) for a, b in zip(labels, counts, strict=True)]))
        if study["to_choose"]:
            waiting = ", ".join(study["to_choose"])
            parts.append(Text(f"not chosen yet: {waiting}; both arms run over the seeds once they are"))
        parts.append(Text())
    parts += [Text(f"WARNING: {warning}") for warning in status["warnings"]]
    return Group(*parts)
