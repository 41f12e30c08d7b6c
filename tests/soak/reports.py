"""Reports of tens of thousands of run folders."""

import argparse
import csv
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from spt.execution.queue import with_ancestors
from tests.soak.folders import finish_study, plan_comparison, recipe_files, trained_pairs

ROOT = Path(__file__).resolve().parents[2]
PARTS = (1, 8, 4, 2)  # of the folders, that there are reports of
QUANTITIES = {"processor_seconds": "s of processor time", "seconds": "s", "memory_mb": "MB", "page_mb": "MB of HTML"}


@dataclass(frozen=True)
class Cost:
    """What a report took, in a process of its own."""

    kind: str  # "study", or "loose" where no study mentions the folders
    folders: int
    seconds: float
    processor_seconds: float
    memory_mb: float  # at most
    page_mb: float


def soak(options: argparse.Namespace) -> int:
    """Make run folders up, and report all, an eighth, a quarter and half of them; go on with what was begun.

    Loose folders are those of the first recipe: of one task and model every configuration from scratch is held against
    every one of SPT, so that those of several recipes would be many more comparisons than the study's.
    """
    out = options.out.resolve()
    recipes = recipe_files(out / "recipes", options.recipes)
    trained = trained_pairs(recipes[0], out / "trained")
    path = out / "reports.csv"
    costs = _read(path)
    for part in PARTS:
        seeds = -(-options.count // (3 * len(recipes) * part))  # a seed has three runs
        study = plan_comparison(recipes, seeds, out / "runs")
        runs = [run for job in study.grid.jobs for run in with_ancestors(job)]
        loose = [run.name for run in runs if run.resolved.name == runs[0].resolved.name]
        for kind, count in (("study", len(runs)), ("loose", len(loose))):
            if any((cost.kind, cost.folders) == (kind, count) for cost in costs):
                continue
            folder = finish_study(study, trained)
            costs.append(_cost(kind, count, folder if kind == "study" else _links(out, loose), out / "report"))
            _write(path, costs)
            print(costs[-1], flush=True)  # noqa: T201
    draw(costs).savefig(out / "reports.png", dpi=120)
    print("; ".join(slope_text(kind, costs) for kind in ("study", "loose")))  # noqa: T201
    return 0


def _links(out: Path, names: Sequence[str]) -> Path:
    """A folder that holds these runs, and no study."""
    folder = out / f"loose-{len(names)}"
    folder.mkdir(exist_ok=True)
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(out / "runs" / name)
    return folder


def _cost(kind: str, count: int, folder: Path, report: Path) -> Cost:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "spt", "report", str(folder), "--out", str(report)]
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=folder)
    memory, ended = 0.0, 0
    while not ended:
        memory = max(memory, _peak_mb(process.pid))
        time.sleep(0.1)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"spt report {folder} ended with {code}")
    return Cost(
        kind=kind,
        folders=count,
        seconds=round(time.monotonic() - start, 1),
        processor_seconds=round(usage.ru_utime + usage.ru_stime, 1),
        memory_mb=round(memory, 1),
        page_mb=round((report / "report.html").stat().st_size / 2**20, 2),
    )


def _peak_mb(pid: int) -> float:
    """Of its own: what wait4 tells begins at the peak of the process that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return int(found[1]) / 1024 if found else 0.0  # it has ended


def _read(path: Path) -> list[Cost]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [
        Cost(line["kind"], int(line["folders"]), *(float(line[field.name]) for field in fields(Cost)[2:]))
        for line in lines
    ]


def _write(path: Path, costs: Sequence[Cost]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Cost)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, costs))


def slope_text(kind: str, costs: Sequence[Cost]) -> str:
    """How a report grows with 1,000 folders: the slope of a straight line, by least squares."""
    chosen = sorted((cost for cost in costs if cost.kind == kind), key=attrgetter("folders"))
    folders = np.array([cost.folders for cost in chosen]) / 1000
    slopes = {name: np.polyfit(folders, [getattr(cost, name) for cost in chosen], 1)[0] for name in QUANTITIES}
    parts = [f"{slopes[name]:+.3g} {unit}" for name, unit in QUANTITIES.items()]
    return f"{kind}, per 1,000 folders: {', '.join(parts)}"


def draw(costs: Sequence[Cost]) -> Figure:
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots(len(QUANTITIES), 1, sharex=True)
    for place, (name, unit) in zip(axes, QUANTITIES.items(), strict=True):
        for kind in ("study", "loose"):
            chosen = sorted((cost for cost in costs if cost.kind == kind), key=attrgetter("folders"))
            place.plot([cost.folders for cost in chosen], [getattr(cost, name) for cost in chosen], "o-", label=kind)
        place.set_ylabel(unit)
        place.set_ylim(bottom=0)
    axes[0].legend()
    axes[-1].set_xlabel("run folders")
    return figure
