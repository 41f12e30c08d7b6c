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
    """What `spt bench task` prints, as plain data.

    Seconds to open the data, to generate them (if they are not read from files), and to make batches of the training
    split on the CPU, in the order of training.
    """
    from spt.data.cache import prepared_folder
    from spt.data.dataset import open_task
    from spt.data.source import open_part

    task = open_part(part)
    generated = _generation(task, rounds)
    prepared_folder(task)
    data = open_task(part)
    open_seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        open_task(part)
        open_seconds.append(time.perf_counter() - began)
    sources: dict[str, TaskData] = {"batch": data, "masked": data.mapped(Split.unlabelled)}
    masked = OBJECTIVES["masked"]()
    extents, size = data.train.extents, min(batch, len(data.train))
    if data.resample is not None:
        sources["resampled"] = data
    timings: dict[str, list[tuple[float, int, int]]] = {kind: [] for kind in sources}  # seconds, examples, positions
    batches = islice(training_rows(len(data.train), size, 0, 0), 20 * rounds)
    for i, (epoch, shuffled) in enumerate(batches):
        for kind in sources if i % 2 == 0 else reversed(sources):
            source = sources[kind]
            began = time.perf_counter()
            rows = by_length(shuffled, extents)
            split, indices = source.train, rows
            if kind == "resampled":
                assert data.resample is not None
                split, indices = data.resample(source.train.ids[rows], 1 + epoch), np.arange(len(rows))
            collated = collate(split, indices, source.input, source.target)
            if kind == "masked":
                masked.make_inputs(collated, Draw(0, "corruption", epoch))
            timings[kind].append((time.perf_counter() - began, len(rows), int(split.lengths[indices].sum())))
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
            "open": statistics.median(open_seconds),
            **{kind: statistics.median(seconds for seconds, _, _ in steps) for kind, steps in timings.items()},
        },
        "generated": generated,
        "examples_per_second": {kind: statistics.median(n / t for t, n, _ in timings[kind]) for kind in sources},
        "positions_per_second": {kind: statistics.median(n / t for t, _, n in timings[kind]) for kind in sources},
    }


def _generation(task: Any, rounds: int) -> dict[str, Any] | None:
    """Median seconds to generate the task's rows, and rows per second; None for data that are read from files.

    SPT_WORKERS sets the number of workers. Of an indexable task, the first 100 (or config.max_rows) rows of each split
    are generated. The first round, which compiles, does not count.
    """
    from spt.data.source import data_dir
    from spt.tasks.parallel import worker_count

    module, config = task.component.module, task.config
    indexable = getattr(module, "INDEXABLE", False)
    if task.files or not (indexable or not hasattr(module, "sources")):
        return None
    if indexable and config.max_rows is None:
        config = config.model_copy(update={"max_rows": 100})
    timings = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        data = module.load(config, data_dir().resolve())
        timings.append(time.perf_counter() - began)
    seconds, rows = statistics.median(timings[1:]), sum(map(len, data.splits.values()))
    return {"seconds": seconds, "rows": rows, "rows_per_second": rows / seconds, "workers": worker_count()}
