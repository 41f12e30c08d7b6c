"""SIGTERM and Ctrl-C during training: noted, and acted on between two steps."""

import contextlib
import signal
from types import FrameType
from typing import Any

from spt.errors import Interrupted, Stopped


class StopSignals:
    """While training: SIGTERM and Ctrl-C are noted, and acted on between two steps. A second Ctrl-C acts at once.

    Several processes: a launcher may pass on a Ctrl-C that the terminal has already sent, so there it is noted only.
    """

    def __init__(self, alone: bool = True) -> None:
        self.received = 0
        self._alone = alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        with contextlib.suppress(ValueError):  # not in the main thread: whoever owns it decides
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            # Of several processes one that has failed is stopped by its launcher soon; it is ending already.
            ending = kind is not None and not self._alone and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ending else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._alone and self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Of two signals, the first says why.
        self.received = self.received or number


def stopped(number: int, step: int) -> Stopped:
    """The error that ends a training after SIGTERM or SIGINT."""
    if number == signal.SIGINT:
        return Interrupted(f"interrupted after step {step:,}; the same command continues from there")
    return Stopped(f"stopped after step {step:,}; the same command continues from there")
