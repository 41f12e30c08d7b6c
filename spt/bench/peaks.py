"""Memory peaks, each found by a process of its own, so that nothing else is counted."""

import json
import os
import subprocess
import sys
from typing import Any


class KilledError(Exception):
    """The process that measured a peak was ended from outside, as a kernel short of memory does."""


def peaks_in_subprocess(jobs: list[dict[str, Any]]) -> list[int | None]:
    """The peaks of these jobs, found one after the other by a process of their own; None where it failed."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        "PYTHONSAFEPATH": "1",  # a numpy.py lying about here is not to be imported
    }
    command = [sys.executable, "-m", "spt.bench.measure_peaks"]
    done = subprocess.run(command, input=json.dumps(jobs), env=environ, capture_output=True, text=True)
    if done.returncode < 0:
        raise KilledError
    if done.returncode:  # the same will happen here, where it is told
        return [None for _ in jobs]
    peaks: list[int | None] = json.loads(done.stdout.splitlines()[-1])
    return peaks
