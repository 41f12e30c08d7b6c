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
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from spt.errors import OutputError, RunInUse, RunTakenOver, hide_secrets
from spt.runs.claim import LEASE, Claim, Claims, Holder, SystemLock, is_silent, machine
from spt.runs.files import check_regular, is_out_of_range, sync, write_json, write_text, writing
from spt.runs.result import SCHEMA, Result, Stop, read_problem

logger = logging.getLogger(__name__)

CLOCK = "clock.json"
POLL = 0.5  # seconds between two looks at a run that another process has
GLANCES = 5  # times that a lock without a claim may be that of a process which only looks
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


class _Busy(NamedTuple):
    """Why a run cannot be had now."""

    holder: Holder | None
    may_be_dead: bool  # its lock is free, or cannot be seen from here


_kept_results: ContextVar[dict[str, Result] | None] = ContextVar("kept_results", default=None)


@contextlib.contextmanager
def keeping_results() -> Iterator[None]:
    """Within this a result is read from its file once: a report asks for most of them several times."""
    token = _kept_results.set({})
    try:
        yield
    finally:
        _kept_results.reset(token)


class RunFolder:
    """A run's directory. It is created, locked and written only after everything about the run has been checked.

    Whoever has locked it writes as long as nobody has taken it over: else every method that writes raises RunTakenOver.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.path = root / name
        self._lock = SystemLock(root / ".locks" / f"{name}.lock")
        self._claims = Claims(root / ".locks" / f"{name}.claim")
        self._claim: Claim | None = None  # while this process has the run

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def result(self) -> Result | None:
        """The result, if the run is done."""
        kept = _kept_results.get()
        if kept is None:
            return self._read_result()
        place = os.path.abspath(self.path)
        if place not in kept:
            result = self._read_result()
            if result is None:
                return None
            kept[place] = result
        return kept[place]

    def _read_result(self) -> Result | None:
        path = self.path / "result.json"
        if not os.path.exists(path):
            return None
        check_regular(path)
        try:
            result = Result.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise OutputError(
                f"{path} cannot be read as a result ({read_problem(error)}); move the folder away to run it again"
            ) from error
        if result.format != SCHEMA:
            raise OutputError(f"{path} has format {result.format} of another version of spt, not {SCHEMA}")
        if re.sub(r"\.old\d+$", "", self.name) != f"{result.stage}-{result.key}":
            raise OutputError(f"{path} is the result of another run, {result.stage}-{result.key}; move the folder away")
        return result

    @contextlib.contextmanager
    def locked(self, wait: Callable[[], None] | None = None, lease: float = LEASE) -> Iterator[None]:
        """Have the run for this process alone. It is free again when the process ends, however it ends; on a machine
        of which the locks are not seen here, or for a process that is stopped, once its lease is over.

        When another process has it, raise RunInUse; with `wait`, call it and then wait for the run.
        """
        folder = self._lock.path.parent
        try:
            with writing(folder):
                self._acquire(wait, lease)
        except OutputError as error:
            place = folder if os.path.lexists(folder) else folder.parent
            error.hopeless |= not (place.is_dir() and os.access(place, os.W_OK | os.X_OK))  # no run can be had here
            raise
        try:
            yield
        finally:
            self.release()

    def _acquire(self, wait: Callable[[], None] | None, lease: float) -> None:
        self._lock.path.parent.mkdir(parents=True, exist_ok=True)
        first: _Busy | None = None
        looks = 0
        while (busy := self._try(lease)) is not None:
            looks += 1
            changed = first is not None and busy.holder != first.holder
            glanced_at = looks <= GLANCES and (busy.holder is None or busy.holder.free)  # by `held`, say
            if wait is None and not glanced_at and (changed or not busy.may_be_dead):
                raise RunInUse(
                    f"{self.path} is being written by another process{self._name(busy.holder)}; wait for it or choose "
                    "another --out"
                )
            if first is None and not glanced_at:
                first = busy
                if wait is not None:
                    wait()
                else:
                    logger.info(
                        f"{self.name} may be in the hands of another process{self._name(busy.holder)}; waiting for a "
                        "sign of life"
                    )
            time.sleep(0.02 if glanced_at else POLL)

    def _try(self, lease: float) -> "_Busy | None":
        """Take the run; if that cannot be done now, who has it."""
        lock = self._lock.acquire()
        holder = self._claims.newest()
        held = holder is not None and not holder.free
        if lock and holder is not None and held and holder.locked and holder.machine == machine():
            # Its lock is free, so it is dead; unless the lock just obtained is that of a file which was removed.
            self._lock.release()
            lock = self._lock.acquire()
            held = not (lock and self._claims.newest() == holder)
        may_be_dead = held and lock is not False
        if holder is not None and held and is_silent(self._claims, holder):
            held = False
        elif lock is False:
            held = True
        claim = Claim(self._claims, 1 if holder is None else holder.number + 1, lease, locked=lock is True)
        try:
            if not held and claim.take():
                self._claim = claim
        finally:
            if self._claim is None:
                self._lock.release()
        if self._claim is None:
            return _Busy(holder, may_be_dead)
        if lock is False:  # of a process that is stopped, or was on a machine that is gone: its file makes room
            self._lock.path.unlink(missing_ok=True)
            if self._lock.acquire():
                claim.confirm_lock()
        return None

    def release(self) -> None:
        """Give the run back; nothing if it is not this process's."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None
            self._lock.release()

    def check(self) -> None:
        """Raise RunTakenOver if this process had the run, and another has taken it over."""
        if self._claim is None:
            return
        with writing(self._lock.path.parent):
            holder = self._claim.taken_by()
        if holder is not None:
            raise RunTakenOver(
                f"{self.path} was taken over by another process{self._name(holder)}, since this one had given no sign "
                f"of life for {self._claim.lease:g} s; nothing more is written here"
            )

    def is_available(self) -> bool:
        """Can this process have the run, as far as is known without trying? Whoever waits for it asks repeatedly."""
        holder = self._claims.newest()
        if holder is not None and not holder.free:
            if is_silent(self._claims, holder):
                return True
            if not (holder.locked and holder.machine == machine()):
                return False
        if not self._lock.path.is_file():
            return holder is None or holder.free
        lock = self._lock.acquire()
        self._lock.release()
        return lock is not False

    def held(self) -> bool:
        """Does a process have the run now? Finding out writes nothing."""
        try:
            holder = self._claims.newest()
            if not self._lock.path.is_file() and holder is None:
                return False
            lock = self._lock.acquire()
        except OSError:
            return True
        self._lock.release()
        if lock is False or holder is None or holder.free:
            return lock is False
        if lock and holder.locked and holder.machine == machine():
            return False
        with contextlib.suppress(OSError):  # by the clocks of two machines, which is good enough to look at
            return time.time() - self._claims.file(holder.number).stat().st_mtime < holder.lease
        return False

    def _name(self, holder: Holder | None) -> str:
        """` (7 on host)`, of whoever has the run, where that is known."""
        if holder is not None and not holder.free and str(holder):
            return f" ({holder})"
        status = self.status() or {}
        return f" ({status['pid']} on {status.get('host')})" if status.get("state") == "running" else ""

    def create(self, recipe_yaml: str, job: dict[str, Any], environment: dict[str, Any]) -> None:
        self.check()
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
        self.check()
        write_json(self.path / CLOCK, end._asdict())

    def recorded_end(self) -> TrainingEnd | None:
        """Of this run; else of the newest run moved aside that has recorded one."""
        for path in (self.path, *self._moved_aside()):
            if (path / CLOCK).is_file():
                try:
                    return TrainingEnd.read((path / CLOCK).read_text(encoding="utf-8"))
                except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
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
        self.check()
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
        self.check()
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def set_status(self, state: State, reason: str = "", exit_code: int = 0) -> None:
        self.check()
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
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
            return None  # it is no run, or another command has moved it away
        return status if isinstance(status, dict) else None

    def finish(self, result: Result, clean: Callable[[], None] = lambda: None) -> None:
        """Write the result, clean up, then set the status to done: a process killed in between leaves a finished run,
        which the next process cleans up."""
        self.check()
        self.sync_metrics()
        write_text(self.path / "result.json", result.model_dump_json(indent=2) + "\n")
        clean()
        self.set_status("done")
