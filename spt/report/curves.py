"""Learning curves: what every run's validation split said while it was trained, pretraining, finetuning and scratch.

Read from the runs' metrics.jsonl. Where a stage is in its training is told as a share of its optimiser steps, so that
stages of different lengths can be held against each other (SPT, Figure 5).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from spt.errors import OutputError
from spt.report.arms import Comparison
from spt.runs.folder import RunFolder
from spt.runs.plan import PlannedCell, Record
from spt.runs.result import LARGEST, Result

Stage = Literal["pretraining", "finetuning", "scratch"]
STAGES: tuple[Stage, ...] = ("pretraining", "finetuning", "scratch")


class Curve(Record):
    """One run. Of a run that has not finished, as far as it came."""

    label: str  # of the row
    stage: Stage
    seed: int
    run: str
    metric: str  # of validation: what the run's checkpoint is chosen by
    planned: int  # optimiser steps of the stage; of an unfinished run, those of the row's longest
    steps: tuple[int, ...]
    values: tuple[float, ...]
    losses: tuple[tuple[int, float], ...]  # step, and the mean training loss since the line before

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(step / self.planned for step in self.steps)


def curves(rows: Sequence[Comparison]) -> tuple[Curve, ...]:
    """Of every run of every row that has logged a validation score, row by row, stage by stage."""
    return tuple(curve for one in rows for stage in STAGES for curve in _stage(one, stage))


def _stage(one: Comparison, stage: Stage) -> Iterator[Curve]:
    logged: dict[tuple[int, str], list[dict[str, Any]]] = {}
    results: dict[str, Result] = {}
    for cell in sorted(one.pairing.cells, key=lambda cell: cell.seed):
        if (name := _run(cell, stage)) is None:
            continue
        run = RunFolder(one.pairing.root, name)
        logged[cell.seed, name] = run.metrics()
        if (result := _result(one, cell, run, stage)) is not None:
            results[name] = result
    metric = next((result.selected_by for result in results.values()), "")
    finite = {key: [line for line in lines if _is_number(line.get(metric))] for key, lines in logged.items()}
    last = max((line["step"] for lines in finite.values() for line in lines), default=0)
    longest = max([last, *(result.own.steps for result in results.values())])
    for (seed, name), lines in finite.items():
        found = results.get(name)
        if lines and (found is None or found.selected_by == metric):
            yield Curve(
                label=one.row.label,
                stage=stage,
                seed=seed,
                run=name,
                metric=metric,
                planned=(found.own.steps if found else longest) or 1,
                steps=tuple(line["step"] for line in lines),
                values=tuple(line[metric] for line in lines),
                losses=tuple(
                    (line["step"], line["loss"])
                    for line in logged[seed, name]
                    if line.get("kind") == "train" and _is_number(line.get("loss"))
                ),
            )


def _run(cell: PlannedCell, stage: Stage) -> str | None:
    if stage == "pretraining":
        return cell.parent if cell.arm == "spt" else None
    return cell.run if (cell.arm == "scratch") == (stage == "scratch") else None


def _result(one: Comparison, cell: PlannedCell, run: RunFolder, stage: Stage) -> Result | None:
    if stage != "pretraining":
        return one.results(cell.arm).get(cell.seed)
    try:
        return run.result()
    except OutputError:  # a row whose pretraining cannot be read says so where its runs are listed
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= LARGEST
