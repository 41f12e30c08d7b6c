"""`spt bench slopes`: how time and memory of a training step grow with the length of a sequence."""

import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from spt.bench.models import label, parse_models, peak_of_step, reported
from spt.bench.peaks import KilledError, TooSlowError, peaks_in_subprocess
from spt.bench.timing import alternate, conditions
from spt.bench.training_step import Step, Variant
from spt.config.overrides import split_arguments
from spt.errors import BackendError, UsageError
from spt.runtime.distributed import Runtime
from spt.runtime.memory import out_of_memory
from spt.runtime.settings import Settings

logger = logging.getLogger(__name__)

MODELS = ("dlr", "s4", "s4d", "s5", "lru", "transformer", "window=512")  # the last is local attention
RANGE, QUICK_RANGE = (2**10, 2**18), (2**5, 2**8)  # lengths
OUT_OF_MEMORY = "out of memory"


def parse_slopes(
    arguments: Iterable[str],
    *,
    longest: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    cpu: bool = False,
    quick: bool = False,
) -> list[list[Variant]]:
    """The rows of a command line, a list for each model: one sequence of every power of two up to the longest."""
    given = list(arguments)
    names, _ = split_arguments(given)
    first, default = QUICK_RANGE if quick else RANGE
    longest = longest or default
    if longest < 2 * first:
        raise UsageError(f"--longest {longest}: a slope needs two lengths, {first:,} and {2 * first:,} at least")
    lengths = [first << i for i in range((longest // first).bit_length())]
    rows = parse_models(
        given if names else [*given, *MODELS],
        length=",".join(map(str, lengths)),
        batch="1",
        layers=layers,
        width=width,
        cpu=cpu,
        quick=quick,
    )
    return [rows[i : i + len(lengths)] for i in range(0, len(rows), len(lengths))]


def bench_slopes(models: Sequence[Sequence[Variant]], rounds: int, limit: float) -> dict[str, Any]:
    """What `spt bench slopes` prints, as plain data.

    Each row is measured in a process of its own, which may lack memory or take more than `limit` seconds; then it is
    left out, and so are longer sequences of its model.
    """
    device = Runtime(Settings(quiet=True, cpu=models[0][0].cpu)).device
    rows: list[dict[str, Any]] = []
    exponents = []
    for variants in models:
        own: list[dict[str, Any]] = []
        for variant in variants:
            measured = {"failed": "not tried"} if own and own[-1]["failed"] else _measure(variant, rounds, limit)
            own.append({**asdict(variant), **measured})
        rows += own
        exponents.append({"model": variants[0].model, "given": variants[0].given, **fit(own)})
    if all(row["failed"] for row in rows):
        raise BackendError(f"{label(models[0][0])}: {rows[0]['failed']}; nothing could be measured")
    return {"kind": "slopes", **conditions(device, rounds), "limit": limit, "rows": rows, "exponents": exponents}


def _measure(variant: Variant, rounds: int, limit: float) -> dict[str, Any]:
    try:
        (measured,) = peaks_in_subprocess([{"variant": asdict(variant), "rounds": rounds}], limit)
    except TooSlowError:
        measured = {"failed": f"more than {limit:g} s"}
    except KilledError:
        measured = {"failed": f"{OUT_OF_MEMORY} (its process was killed)"}
    if measured is None:
        with reported(variant):  # the same error is raised here
            Step(variant)()
        measured = {"failed": "its process failed"}
    if measured["failed"]:
        logger.info(f"{label(variant)}: {measured['failed']}; longer sequences are not tried")
    return measured


def time_and_peak(variant: Variant, rounds: int) -> dict[str, Any]:
    """One row, measured in this process."""
    try:
        step = Step(variant)
        peak = peak_of_step(step)
        (timings,) = alternate([step], rounds)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return {"failed": OUT_OF_MEMORY}
    return {
        "failed": None,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "seconds": timings.seconds(),
        "step_quartiles": timings.quartiles(),
        "steps": sum(map(len, timings.rounds)),
        "peak_bytes": peak,
    }


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Exponents of time and memory in the length: least squares of logarithms, over the upper half of the lengths that
    were measured. Below, what does not grow with length (starting operations, weights) weighs too much."""
    measured = [row for row in rows if not row["failed"]]
    upper = measured[-max(2, math.ceil(len(measured) / 2)) :]

    def exponent(values: list[float]) -> float | None:
        if len(values) < 2 or min(values) <= 0:
            return None
        lengths = [math.log(row["length"]) for row in upper]
        return statistics.linear_regression(lengths, [math.log(value) for value in values]).slope

    return {
        "lengths": [row["length"] for row in upper],
        "seconds": exponent([row["seconds"]["step"] for row in upper]),
        "peak_bytes": exponent([float(row["peak_bytes"]) for row in upper]),
    }
