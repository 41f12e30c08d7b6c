"""Memory peaks, measured in a separate process so that nothing else is counted."""

import json
import os
import subprocess
import sys
from typing import Any

from spt.runtime.signals import cleanup


class KilledError(Exception):
    """The process that measured a peak was killed, as the system does when memory runs out."""


def peaks_in_subprocess(jobs: list[dict[str, Any]]) -> list[int | None]:
    """The peaks of these jobs, measured one after the other in one separate process; all None if it fails."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        "PYTHONSAFEPATH": "1",  # do not import a numpy.py from the working directory
    }
    command = [sys.executable, "-m", "spt.bench.measure_peaks"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, text=True)
    with child, cleanup(lambda _: child.kill()):
        output, _ = child.communicate(json.dumps(jobs))
    if child.returncode < 0:
        raise KilledError
    if child.returncode:  # the same error will be raised, and reported, here
        return [None for _ in jobs]
    peaks: list[int | None] = json.loads(output.splitlines()[-1])
    return peaks
