"""How and where a job runs: device, processes, precision, micro-batches, trackers. None of it decides the outcome.

With train.py and checkpoint.py the only place that knows Accelerate, and the only one that asks for a device.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, send_to_device
from torch import Tensor

from spt import __version__
from spt.errors import BackendError, Interrupted, SptError, Stopped, brief, did_you_mean

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "pydantic", "numpy")
Posed = TypeVar("Posed", bound=tuple[Any, ...])
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class Settings:
    """What a user may choose about how a job runs."""

    resume: Literal["auto", "must", "never"] = "auto"
    micro_batch_size: int | None = None  # sequences in memory at once, per process; None: the whole share
    save_every: float = 60.0  # seconds between resumable checkpoints
    cpu: bool = False  # even where there is a GPU
    tracker: str | None = None  # one of TRACKERS, through Accelerate
    quiet: bool = False  # no progress
    wait: bool = False  # for a run that another process is making, instead of refusing
    debug: bool = False  # let bugs through with their traceback


class Runtime:
    """The processes and the device of this program; one per program."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def accelerator(self) -> Accelerator:
        # Precision is ours (`autocast`): it belongs to a stage, Accelerate's belongs to the process.
        # So is accumulation: a launcher's setting must not divide our losses.
        return Accelerator(
            cpu=self.settings.cpu,
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            step_scheduler_with_optimizer=False,
        )

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

    def send(self, posed: Posed) -> Posed:
        """A question's tensors, on this process's device."""
        return send_to_device(posed, self.device, non_blocking=True)

    def total(self, numbers: list[float]) -> list[float]:
        """Sums over all processes, in float64 (float32 on devices without it)."""
        if self.world == 1:
            return numbers
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        summed = self.accelerator.reduce(torch.tensor(numbers, dtype=kind, device=self.device), "sum")
        return [float(number) for number in summed.tolist()]

    def gather(self, tensor: Tensor) -> Tensor:
        """Rows of all processes, on every process; all give equally many."""
        return tensor if self.world == 1 else self.accelerator.gather(tensor.to(self.device))

    def check_tracker(self) -> None:
        """Raise BackendError unless the tracker the user asked for, if any, is known and installed."""
        from accelerate.tracking import filter_trackers

        wanted = self.settings.tracker
        if wanted is None:
            return
        if wanted not in TRACKERS:
            raise BackendError(f"unknown tracker {wanted!r}{did_you_mean(wanted, TRACKERS)}")
        if self.accelerator.device and not filter_trackers([wanted], "."):  # wants Accelerate's state to exist
            raise BackendError(f"the tracker {wanted} is not installed; pip install {wanted}, or leave --tracker out")

    @contextlib.contextmanager
    def tracked(self, name: str, folder: Path, config: dict[str, Any]) -> Iterator[None]:
        """Send what is logged to the tracker the user asked for, if any."""
        wanted = self.settings.tracker
        if wanted is None:
            yield
            return
        from accelerate.tracking import filter_trackers

        try:
            # Accelerate fixes its trackers when it is made; ours come and go with the runs.
            self.accelerator.log_with = filter_trackers([wanted], folder)
            self.accelerator.project_configuration.set_directories(str(folder))
            self.accelerator.init_trackers(name, config=config)
        except SptError:
            raise
        except Exception as error:  # whatever a tracker's own library raises: no login, no network, a wrong setting
            raise BackendError(
                f"the tracker {wanted} cannot be used: {brief(error)}; or leave --tracker out"
            ) from error
        try:
            yield
        finally:
            self.accelerator.end_training()
            self.accelerator.log_with, self.accelerator.trackers = [], []

    def track(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        if self.settings.tracker is not None:
            self.accelerator.log({f"{kind}/{name}": number for name, number in numbers.items()}, step=step)


class StopSignals:
    """While training: SIGTERM and Ctrl-C are noted, and acted on between two steps. A second Ctrl-C acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        with contextlib.suppress(ValueError):  # not in the main thread: whoever owns it decides
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def error(self, step: int) -> Stopped:
        if self.received == signal.SIGINT:
            return Interrupted(f"interrupted after step {step:,}; the same command continues from there")
        return Stopped(f"stopped after step {step:,}; the same command continues from there")


def environment(device: torch.device | None = None, processes: int = 1) -> dict[str, Any]:
    """What a result depends on besides the recipe, as far as it can be named; by default for the best device here."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "spt": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": processes,
        "threads": torch.get_num_threads(),
    }


def command_line() -> str:
    return shlex.join(["spt", *sys.argv[1:]])


def _commit() -> str | None:
    """The checkout's commit, `+` when files differ from it; None for an installed copy."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        quiet = {
            "capture_output": True,
            "text": True,
            "timeout": 5,
            "check": True,
            "env": {**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        }
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], **quiet).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], **quiet).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}{'+' if changed else ''}"
