"""Learning curves: the validation scores of every run while it trained, and its accuracy on the training batches, in
pretraining, finetuning and scratch.

Read from the runs' metrics.jsonl. Progress is a share of the stage's optimiser steps, so that stages of different
lengths can be compared (SPT, Figure 5).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from spt.errors import OutputError
from spt.report.arms import Comparison
from spt.runs.folder import RunFolder
from spt.runs.plan import ArmName, Place, Record
from spt.runs.result import LARGEST, Result

Stage = Literal["pretraining", "finetuning", "scratch"]
STAGES: tuple[Stage, ...] = ("pretraining", "finetuning", "scratch")


class Curve(Record):
    """The curve of one run; of an unfinished run, as far as it got."""

    label: str  # of the row
    stage: Stage
    seed: int
    split: str | None = None  # of the data, where a study has several
    run: str
    metric: str  # of validation: the one that selects the checkpoint
    planned: int  # optimiser steps of the stage; of an unfinished run, those of the row's longest
    steps: tuple[int, ...]
    values: tuple[float, ...]
    losses: tuple[tuple[int, float], ...]  # step, and the mean training loss since the line before
    accuracies: tuple[tuple[int, float], ...] = ()  # step, and the accuracy on the training batches since then

    @property
    def training(self) -> dict[int, float]:
        """Step -> the metric's value on training batches, where it was logged."""
        return dict(self.accuracies) if self.metric == "accuracy" else {}

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(step / self.planned for step in self.steps)


def curves(rows: Sequence[Comparison]) -> tuple[Curve, ...]:
    """The curves of every run that has logged a validation score, row by row, stage by stage."""
    return tuple(curve for comparison in rows for stage in STAGES for curve in _stage(comparison, stage))


def _stage(comparison: Comparison, stage: Stage) -> Iterator[Curve]:
    arm: ArmName = "scratch" if stage == "scratch" else "spt"
    finished = comparison.results(arm)
    logged: dict[tuple[Place, str], list[dict[str, Any]]] = {}
    results: dict[str, Result] = {}
    for cell in sorted(comparison.runs.cells, key=lambda cell: cell.seed):
        name = cell.parent if stage == "pretraining" else cell.run
        if cell.arm != arm or name is None:
            continue
        run = RunFolder(comparison.runs.root, name)
        place = Place(cell.seed, cell.split)
        logged[place, name] = run.metrics()
        with contextlib.suppress(OutputError):  # reported among the failures of the row
            result = run.result() if stage == "pretraining" else finished.get(place)
            if result is not None:
                results[name] = result
    metric = next((result.selected_by for result in results.values()), "")
    finite = {
        key: [line for line in lines if line.get("kind") == "val" and _is_number(line.get(metric))]
        for key, lines in logged.items()
    }
    last = max((line["step"] for lines in finite.values() for line in lines), default=0)
    longest = max([last, *(result.own.steps for result in results.values())])
    for (place, name), lines in finite.items():
        result = results.get(name)
        if lines and (result is None or result.selected_by == metric):
            yield Curve(
                label=comparison.row.label,
                stage=stage,
                **place._asdict(),
                run=name,
                metric=metric,
                planned=(result.own.steps if result else longest) or 1,
                steps=tuple(line["step"] for line in lines),
                values=tuple(line[metric] for line in lines),
                losses=_training(logged[place, name], "loss"),
                accuracies=_training(logged[place, name], "accuracy"),
            )


def _training(lines: Sequence[dict[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    """What was logged of the training batches, by step."""
    return tuple(
        (line["step"], line[name]) for line in lines if line.get("kind") == "train" and _is_number(line.get(name))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= LARGEST
