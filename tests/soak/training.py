"""Thousands of tiny runs in one study."""

import argparse
import os
import sys
from pathlib import Path

from matplotlib.figure import Figure

from tests.soak.folders import recipe_files
from tests.soak.samples import QUANTITIES, Recorder, Sample, slope_text

ROOT = Path(__file__).resolve().parents[2]


def soak(options: argparse.Namespace) -> int:
    """Train a study of at least so many runs, sampling it; go on with one that was begun. Returns its exit code."""
    out = options.out.resolve()
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    recipes = recipe_files(out / "recipes", options.recipes)
    seeds = -(-options.count // (3 * len(recipes)))  # a seed has three runs
    environment = {"TMPDIR": str(out / "tmp"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "spt", "compare", *map(str, recipes), "--seeds", str(seeds), "--out", str(runs)]
    recorder = Recorder(out / "runs.csv")
    code = recorder.watch(
        [*command, "--cpu", "--jobs", str(options.jobs)], lambda: begun(runs), environment, options.every, out
    )
    draw(recorder.samples).savefig(out / "runs.png", dpi=120)
    last = recorder.samples[-1] if recorder.samples else None
    spent = f"{last.runs} runs in {last.seconds:.0f} s of the last session" if last else "no run was sampled"
    print(f"{spent}; {slope_text(recorder.samples)}")  # noqa: T201
    return code


def begun(runs: Path) -> int:
    return sum(1 for entry in os.scandir(runs) if entry.name.startswith(("finetune-", "pretrain-")))


def draw(samples: list[Sample]) -> Figure:
    figure = Figure(figsize=(7, 8), layout="constrained")
    axes = figure.subplots(len(QUANTITIES), 1, sharex=True)
    for place, (name, unit) in zip(axes, QUANTITIES.items(), strict=True):
        for session in sorted({sample.session for sample in samples}):
            chosen = [sample for sample in samples if sample.session == session]
            place.plot([sample.runs for sample in chosen], [getattr(sample, name) for sample in chosen])
        place.set_ylabel(unit)
        place.set_ylim(bottom=0)
    axes[-1].set_xlabel("runs")
    return figure
