"""Hand-made runs and studies for the tests of reports."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spt.report import collect, terminal
from spt.report.arms import Row
from spt.report.collect import Report
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.result import Ledger, Result, SplitRecord

MIB = 2**20
PRETRAINING = Ledger(steps=60, examples=600, positions=38400, flops=6e9, seconds=6.0, peak_bytes=3 * MIB)
FINETUNING = Ledger(steps=40, examples=400, positions=25600, flops=4e9, seconds=4.0, peak_bytes=2 * MIB)
SCRATCH = Ledger(steps=100, examples=1000, positions=64000, flops=1e10, seconds=8.0, peak_bytes=2 * MIB)
ENVIRONMENT = {
    "spt": "0.1.0",
    "commit": "0123456789ab",
    "packages": {"torch": "2.13.0"},
    "cpu": "a processor",
    "cores": 2,
    "device": "cpu",
}
SPLITS = {
    "train": SplitRecord(rows=400, inputs="aa", targets="bb"),
    "test": SplitRecord(rows=360, inputs="cc", targets="dd"),
}
Cell = dict[str, Any]


def start(root: Path, name: str, **status: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    run = RunFolder(root, name)
    run.create("task: digits\n", {}, {})
    run.set_status(**status or {"state": "running"})


def finish(root: Path, arm: str, seed: int, score: float, run: str = "", **changes: Any) -> Cell:
    """A finished run of this arm, after its pretraining run where the arm is SPT."""
    metric = changes.get("metric", "accuracy")
    name = run or f"finetune-{arm}{seed}"
    parent = f"for-{name[9:]}" if arm == "spt" else None
    own = changes.get("own", FINETUNING if parent else SCRATCH)
    fields: dict[str, Any] = {
        "key": name.partition("-")[2],
        "stage": "finetune",
        "recipe": "quickstart",
        "task": "digits",
        "model": "transformer",
        "seed": seed,
        "parent": parent,
        "settings": "0123456789",
        "metric": metric,
        "selected_by": metric,
        "batch_size": 32,
        "precision": "fp32",
        "higher_is_better": True,
        "chance": 0.1,
        "val": {metric: 0.5},
        "test": {metric: score},
        "best_step": own.steps - 10,
        "stop": "budget",
        "own": own,
        "total": own + PRETRAINING if parent else own,
        "parameters": {"encoder": 10, "backbone": 100, "head": 5, "total": 115},
        "data": SPLITS,
        "environment": {"device": "cpu"},
    }
    fields |= changes
    root.mkdir(parents=True, exist_ok=True)
    if parent and fields["parent"]:
        before = {
            "key": fields["parent"],
            "stage": "pretrain",
            "parent": None,
            "test": None,
            "settings": "before",
            "own": PRETRAINING,
            "total": PRETRAINING,
        }
        RunFolder(root, f"pretrain-{fields['parent']}").path.mkdir(exist_ok=True)
        RunFolder(root, f"pretrain-{fields['parent']}").finish(Result(**{**fields, **before}))
    RunFolder(root, name).path.mkdir(exist_ok=True)
    RunFolder(root, name).finish(Result(**fields))
    return {
        "row": 0,
        "arm": arm,
        "seed": seed,
        "run": name,
        "parent": f"pretrain-{parent}" if parent else None,
    }


def plan(root: Path, planned: Sequence[Cell], name: str = "compare-1", **changes: Any) -> Path:
    """A comparison folder over these cells."""
    recipes = [{"name": "quickstart", "task": "digits", "model": "transformer"}]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    value = {
        "format": 2,
        "kind": "compare",
        "command": "spt compare quickstart --seeds 3",
        "created": "2026-01-01T00:00:00",
        "smoke": False,
        "seeds": sorted({cell["seed"] for cell in planned}),
        "rows": recipes,
        "cells": list(planned),
    }
    write_json(folder / "study.json", value | changes)
    return folder


def compared(root: Path, scratch: Sequence[float], spt: Sequence[float], **changes: Any) -> Path:
    """A comparison in which every run finished, with these test scores by seed."""
    cells = [finish(root, "scratch", seed, score, **changes) for seed, score in enumerate(scratch)]
    return plan(root, cells + [finish(root, "spt", seed, score, **changes) for seed, score in enumerate(spt)])


def study(root: Path, kind: str, rows: Sequence[dict[str, Any]], cells: Sequence[Cell], **changes: Any) -> Path:
    """A study's folder over these rows; each needs its name, task and model unless they are as ever."""
    subjects = [{"name": "quickstart", "task": "digits", "model": "transformer"} | row for row in rows]
    return plan(root, cells, f"{kind}-1", kind=kind, rows=subjects, **changes)


def arms(root: Path, row: int, name: str, scratch: Sequence[float], spt: Sequence[float], **changes: Any) -> list[Cell]:
    """The cells of one row, every run finished, with these test scores by seed."""
    cells = []
    for arm, scores in (("scratch", scratch), ("spt", spt)):
        for seed, score in enumerate(scores):
            cells.append(finish(root, arm, seed, score, run=f"finetune-{name}{arm}{seed}", **changes) | {"row": row})
    return cells


def row_of(folder: Path) -> Row:
    (row,) = collect.read_report([folder]).rows
    return row


def shown(made: Report, width: int = 80, full: bool = True) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(terminal.terminal(made, full))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
