"""Memory peaks, measured in a separate process so that nothing else is counted, and that may be ended."""

import json
import os
import subprocess
import sys
from typing import Any

from spt.runtime.signals import cleanup


class KilledError(Exception):
    """The process that measured a peak was killed, as the system does when memory runs out."""


class TooSlowError(Exception):
    """The process that measured was ended, because it took longer than allowed."""


def peaks_in_subprocess(jobs: list[dict[str, Any]], limit: float | None = None) -> list[Any]:
    """The peaks of these jobs (of slopes, all that is measured), one after the other in one separate process; all None
    if it fails. It may take `limit` seconds."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        "PYTHONSAFEPATH": "1",  # do not import a numpy.py from the working directory
    }
    command = [sys.executable, "-m", "spt.bench.measure_peaks"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, text=True)
    with child, cleanup(lambda _: child.kill()):
        try:
            output, _ = child.communicate(json.dumps(jobs), limit)
        except subprocess.TimeoutExpired as error:
            child.kill()
            raise TooSlowError from error
    if child.returncode < 0:
        raise KilledError
    if child.returncode:  # the same error will be raised, and reported, here
        return [None for _ in jobs]
    peaks: list[Any] = json.loads(output.splitlines()[-1])
    return peaks
