"""With how many threads a stage computes on a CPU: a number that follows from the size of its work, never from a clock.

Sums that several threads share round in another order, so the number decides the last digits of a score. It is recorded
in the run, and a run that was interrupted goes on with it.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator

import torch

from spt.runs.folder import RunFolder
from spt.runtime.denormals import denormals_as_zero
from spt.runtime.distributed import Runtime
from spt.runtime.launch import usable_cores
from spt.training.budget import mean_flops
from spt.training.build import StageSetup

logger = logging.getLogger(__name__)

# Operations of an optimiser step. Below, a second thread gains a third at most on an idle machine. Where others compute
# too, threads that wait for each other after every small operation take many times as long as one alone.
SMALL_STEP = 2e9


def needs_one_thread(setup: StageSetup) -> bool:
    """Is a step so small that more threads would mostly wait for each other?"""
    return setup.train.batch_size * mean_flops(setup).total < SMALL_STEP


def thread_count(setup: StageSetup) -> int:
    """One for a small network, else torch's number (all cores, OMP_NUM_THREADS, or a launcher's share)."""
    return 1 if needs_one_thread(setup) else torch.get_num_threads()


@contextlib.contextmanager
def computing_threads(runtime: Runtime, choose: Callable[[], int]) -> Iterator[None]:
    """Within, this process computes with so many threads, unless it computes on a GPU and --threads is not given; and
    without numbers that are too small for full precision."""
    before = torch.get_num_threads()
    if runtime.settings.threads is not None or runtime.device.type == "cpu":
        torch.set_num_threads(runtime.on_main(choose))
    try:
        with denormals_as_zero():
            yield
    finally:
        torch.set_num_threads(before)


def stage_threads(
    setup: StageSetup, runtime: Runtime, run: RunFolder | None = None
) -> contextlib.AbstractContextManager[None]:
    """Within, this process computes with the threads of this stage; with those that `run` was begun with, if it is
    continued. --threads goes before both. A GPU's process is left as it is."""
    return computing_threads(runtime, lambda: _choose(setup, runtime.settings.threads, run))


def _choose(setup: StageSetup, asked: int | None, run: RunFolder | None) -> int:
    begun = None if run is None else _begun_with(run)
    if begun is None:
        return asked or thread_count(setup)
    if asked is not None and asked != begun:
        logger.info(
            f"note: {setup.job.name} was begun with threads={begun} and goes on with {asked}; last digits may differ"
        )
    elif begun > usable_cores():
        logger.info(
            f"note: {setup.job.name} was begun with threads={begun} and goes on so, on {usable_cores()} cores; "
            f"--threads {usable_cores()} is faster, but last digits may differ"
        )
    return asked or begun


def _begun_with(run: RunFolder) -> int | None:
    """The threads of a run on a CPU that has a checkpoint to continue from."""
    try:
        environment = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
        threads, device = environment["threads"], environment["device"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # damaged: training decides what can be continued
        return None
    known = device == "cpu" and type(threads) is int and threads > 0 and any(run.checkpoints.glob("step-*"))
    return threads if known else None
