"""A run's folder: one directory, named by what it computes, that holds everything about the run.

runs/finetune-9f920d1b9d57/
  recipe.yaml          the resolved recipe
  job.json             stage, seed, parent: what the folder's key is the hash of
  env.json             versions, commit, device, command line
  metrics.jsonl        one object per line: training losses and evaluations, with the optimiser step
  clock.json           where training has a time limit: the step at which it ended, and why
  status.json          running | done | failed | diverged | stopped, with the reason and the exit code
  checkpoints/         step-00000400/ (resumable), best-00000350/ (weights); finished: best/
  predictions.parquet  one row per test example (finetuning)
  result.json          written last: its presence means that the run is done
"""

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from filelock import FileLock, Timeout

from spt.errors import (
    OutputError,
    hide_secrets,
)
from spt.runs.files import (
    is_out_of_range,
    sync,
    write_json,
    write_text,
    writing,
)
from spt.runs.result import SCHEMA, Result, Stop

CLOCK = "clock.json"
State = Literal["running", "done", "failed", "diverged", "stopped"]


class TrainingEnd(NamedTuple):
    """The last step of a training that has a time limit, and what made it the last."""

    step: int
    stop: Stop

    @classmethod
    def read(cls, text: str) -> "TrainingEnd":
        values = json.loads(text)
        step, stop = values["step"], values["stop"]
        if not isinstance(step, int) or step < 1 or stop not in get_args(Stop):
            raise ValueError(f"step {step!r}, stop {stop!r}")
        return cls(step, stop)


class RunFolder:
    """A run's directory. It is created, locked and written only after everything about the run has been checked."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.path = root / name
        self._lock = FileLock(root / ".locks" / f"{name}.lock")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def result(self) -> Result | None:
        """The result, if the run is done."""
        path = self.path / "result.json"
        if not os.path.exists(path):
            return None
        try:
            result = Result.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise OutputError(
                f"{path} cannot be read as a result ({type(error).__name__}); move the folder away to run it again"
            ) from error
        if result.format != SCHEMA:
            raise OutputError(f"{path} has format {result.format} of another version of spt, not {SCHEMA}")
        if re.sub(r"\.old\d+$", "", self.name) != f"{result.stage}-{result.key}":
            raise OutputError(f"{path} is the result of another run, {result.stage}-{result.key}; move the folder away")
        return result

    @contextlib.contextmanager
    def locked(self, wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Lock the run for this process; the operating system releases the lock however the process dies.

        When another process holds it, raise OutputError; with `wait`, call it and then wait for the lock.
        """
        with writing(self.path):
            Path(self._lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                if wait is None:
                    raise OutputError(
                        f"{self.path} is being written by another process{self._holder()}; wait for it or choose "
                        "another --out"
                    ) from None
                wait()
                self._lock.acquire(poll_interval=0.5)
        try:
            yield
        finally:
            self._lock.release()  # the empty file stays: removing it would race with the next holder

    def held(self) -> bool:
        """Is a process running this now? Finding out writes nothing."""
        path = Path(self._lock.lock_file)
        if not path.is_file():
            return False
        try:
            self._lock.acquire(blocking=False)
        except (Timeout, OSError, NotImplementedError):
            return True
        self._lock.release()
        return False

    def _holder(self) -> str:
        status = self.status() or {}
        return f" ({status['pid']} on {status.get('host')})" if status.get("state") == "running" else ""

    def create(self, recipe_yaml: str, job: dict[str, Any], environment: dict[str, Any]) -> None:
        with writing(self.path):
            self.path.mkdir(exist_ok=True)
        write_text(self.path / "recipe.yaml", recipe_yaml)
        write_json(self.path / "job.json", job)
        write_json(self.path / "env.json", environment)

    def move_aside(self) -> Path | None:
        """Rename the folder, to make room for a fresh start without losing anything."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.name}.old{number}")).exists():
            number += 1
        with writing(self.path):
            self.path.rename(aside)
        return aside

    def record_end(self, end: TrainingEnd) -> None:
        """The step at which a training with a time limit ends, for whoever goes on with this run or repeats it."""
        write_json(self.path / CLOCK, end._asdict())

    def recorded_end(self) -> TrainingEnd | None:
        """Of this run; else of the newest run moved aside that has recorded one."""
        for path in (self.path, *self._moved_aside()):
            if (path / CLOCK).is_file():
                try:
                    return TrainingEnd.read((path / CLOCK).read_text(encoding="utf-8"))
                except (ValueError, KeyError, TypeError, OSError) as error:
                    raise OutputError(
                        f"{path / CLOCK} cannot be read ({type(error).__name__}), so it is not known at which step the "
                        "run ended; remove it, and the clock decides again"
                    ) from error
        return None

    def _moved_aside(self) -> list[Path]:
        """Earlier runs of this name, the newest first."""
        numbered = {
            int(match[1]): path
            for path in self.path.parent.glob(f"{self.name}.old*")
            if (match := re.fullmatch(r"\.old(\d+)", path.name.removeprefix(self.name)))
        }
        return [numbered[number] for number in sorted(numbered, reverse=True)]

    def log(self, kind: str, step: int, **numbers: Any) -> None:
        """Append one line to metrics.jsonl."""
        with writing(self.path), (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step, **numbers}) + "\n")

    def sync_metrics(self) -> None:
        """Have what was logged on the disk, before something is written that relies on it."""
        if (path := self.path / "metrics.jsonl").is_file():
            with writing(path):
                sync(path)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # the last line of a killed process may be incomplete
                row = json.loads(line)
                if (
                    isinstance(row, dict)
                    and isinstance(row.get("step"), int)
                    and not any(map(is_out_of_range, row.values()))
                ):
                    rows.append(row)
        return rows

    def forget_metrics_after(self, step: int) -> None:
        """Drop what an interrupted run logged after the step it resumes from."""
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def set_status(self, state: State, reason: str = "", exit_code: int = 0) -> None:
        write_json(
            self.path / "status.json",
            {
                "state": state,
                "reason": hide_secrets(reason),
                "exit_code": exit_code,
                "pid": os.getpid(),
                "host": platform.node(),
                "time": time.time(),
            },
        )

    def status(self) -> dict[str, Any] | None:
        path = self.path / "status.json"
        if not path.is_file():
            return None
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None
        return status if isinstance(status, dict) else None

    def finish(self, result: Result, clean: Callable[[], None] = lambda: None) -> None:
        """Write the result, clean up, then set the status to done: a process killed in between leaves a finished run,
        which the next process cleans up."""
        self.sync_metrics()
        write_text(self.path / "result.json", result.model_dump_json(indent=2) + "\n")
        clean()
        self.set_status("done")
