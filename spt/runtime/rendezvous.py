"""The rendezvous of a group: its processes come together.

torch would wait for those that are missing in code that no signal reaches, and for as long as one process may work
while the others wait, which is a day here. So they are counted first.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, TCPStore, is_initialized  # type: ignore[attr-defined]

from spt.errors import BackendError, UsageError, one_line
from spt.runtime import launch

logger = logging.getLogger(__name__)

LIMIT = 600.0  # seconds between the first and the last to come: nodes boot, and load libraries over slow networks
NOTICE = 15.0  # seconds of silence
ANSWER = 30.0  # seconds for an answer to one question


@contextlib.contextmanager
def rendezvous() -> Iterator[None]:
    """Begins when every process of this group has come; within it they can be connected.

    Raises BackendError where some have not come in `LIMIT` seconds.
    """
    if launch.world_size() == 1 or is_initialized():
        yield
        return
    number, count = launch.rank(), launch.world_size()
    host, port = os.environ["MASTER_ADDR"], _port()
    place = f"{host}:{port}"
    patience = _Patience()
    serves = number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does, or we have
    while not serves and (problem := _connection_problem(host, port)) is not None:
        patience.wait(f"process 0 does not answer at {place} ({problem})")
    try:
        timeout = timedelta(seconds=ANSWER)
        store = TCPStore(host, port, count, serves, timeout, wait_for_workers=False, multi_tenant=True)
        here = [f"spt/here/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{n}" for n in range(count)]
        store.set(here[number], "1")
        while not store.check(here):
            missing = [str(n) for n, key in enumerate(here) if not store.check([key])]
            who = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
            if missing:
                patience.wait(f"{who} of {count} did not come to {place}")
    except DistError as error:
        raise BackendError(
            f"process {number} of {count} cannot meet the others at {place}: {one_line(error)}; if another program has "
            "this port, set MASTER_PORT to a free one"
        ) from error
    yield  # the store stays, since process 0 may be the one that serves it


class _Patience:
    """Waits, says after a while what for, and ends."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._said = False

    def wait(self, why: str) -> None:
        waited = time.monotonic() - self._began
        if waited > LIMIT:
            raise BackendError(
                f"{why} within {waited:.0f} s; start all of them, or unset WORLD_SIZE (in a step of Slurm, "
                "SLURM_STEP_NUM_TASKS) to run alone"
            )
        if waited > NOTICE and not self._said:
            self._said = True
            logger.info(f"{why} yet; waiting up to {LIMIT:.0f} s")
        time.sleep(0.05)


def _port() -> int:
    text = os.environ.setdefault("MASTER_PORT", "29500")  # torch's own, which Accelerate takes too
    try:
        if 0 < int(text) < 65536:
            return int(text)
    except ValueError:
        pass
    raise UsageError(f"the variable MASTER_PORT is {text!r}, not a port")


def _connection_problem(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
