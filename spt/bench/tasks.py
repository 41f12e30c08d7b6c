"""`spt bench task`: opening, batching and generating a task's data."""

import statistics
import time
from itertools import islice
from typing import Any

import numpy as np
import torch

from spt.bench.timing import conditions
from spt.config.recipe import Part
from spt.data.batching import by_length, collate, training_rows
from spt.rng import Draw
from spt.tasks.base import Split, TaskData
from spt.training.objectives import OBJECTIVES


def bench_task(part: Part, batch: int, rounds: int) -> dict[str, Any]:
    """What `spt bench task` says, as plain data: seconds to open and (where nothing is read) to generate the data,
    and to make batches of the training split, in the order of training, on the CPU."""
    from spt.data.cache import prepared_folder
    from spt.data.dataset import open_task
    from spt.data.source import open_part

    opened = open_part(part)
    generated = _generation(opened, rounds)
    prepared_folder(opened)
    data = open_task(part)
    opening = []
    for _ in range(rounds):
        began = time.perf_counter()
        open_task(part)
        opening.append(time.perf_counter() - began)
    kinds: dict[str, TaskData] = {"batch": data, "masked": data.mapped(Split.unlabelled)}
    masked = OBJECTIVES["masked"]()
    extents, size = data.train.extents, min(batch, len(data.train))
    if data.resample is not None:
        kinds["resampled"] = data
    taken: dict[str, list[tuple[float, int, int]]] = {kind: [] for kind in kinds}  # seconds, examples, positions
    drawn = islice(training_rows(len(data.train), size, 0, 0), 20 * rounds)
    for i, (epoch, shuffled) in enumerate(drawn):
        for kind in kinds if i % 2 == 0 else reversed(kinds):
            of = kinds[kind]
            began = time.perf_counter()
            rows = by_length(shuffled, extents)
            split, here = of.train, rows
            if kind == "resampled":
                assert data.resample is not None
                split, here = data.resample(of.train.ids[rows], 1 + epoch), np.arange(len(rows))
            made = collate(split, here, of.input, of.target)
            if kind == "masked":
                masked.make_inputs(made, Draw(0, "corruption", epoch))
            taken[kind].append((time.perf_counter() - began, len(rows), int(split.lengths[here].sum())))
    return {
        "kind": "task",
        **conditions(torch.device("cpu"), rounds),
        "task": part.name,
        "options": part.options,
        "rows": {name: len(split) for name, split in data.splits.items()},
        "length": data.length,
        "batch": size,
        "seconds": {
            "generate": None if generated is None else generated["seconds"],
            "open": statistics.median(opening),
            **{kind: statistics.median(seconds for seconds, _, _ in steps) for kind, steps in taken.items()},
        },
        "generated": generated,
        "examples_per_second": {kind: statistics.median(n / t for t, n, _ in taken[kind]) for kind in kinds},
        "positions_per_second": {kind: statistics.median(n / t for t, _, n in taken[kind]) for kind in kinds},
    }


def _generation(opened: Any, rounds: int) -> dict[str, Any] | None:
    """Seconds to make the task's rows where nothing is read, and rows a second: the median over rounds, by as many
    workers as SPT_WORKERS says. Of a task whose rows are made one by one, the first 100 (or config.max_rows) of each
    split; the first round, which compiles, does not count."""
    from spt.data.source import data_dir
    from spt.tasks.parallel import worker_count

    module, config = opened.component.module, opened.config
    indexable = getattr(module, "INDEXABLE", False)
    if opened.files or not (indexable or not hasattr(module, "sources")):
        return None
    if indexable and config.max_rows is None:
        config = config.model_copy(update={"max_rows": 100})
    taken = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        data = module.load(config, data_dir().resolve())
        taken.append(time.perf_counter() - began)
    seconds, rows = statistics.median(taken[1:]), sum(map(len, data.splits.values()))
    return {"seconds": seconds, "rows": rows, "rows_per_second": rows / seconds, "workers": worker_count()}
