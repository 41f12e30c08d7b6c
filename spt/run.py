"""What a run leaves behind: one directory, named by what it computes, that says all about itself.

runs/finetune-9f920d1b9d57/
  recipe.yaml          the resolved recipe
  job.json             stage, seed, parent: what the folder's key is the hash of
  env.json             versions, commit, device, command line
  metrics.jsonl        one object per line: training losses and evaluations, with the optimiser step
  status.json          running | done | failed | diverged | stopped, with the reason and the exit code
  checkpoints/         step-00000400/ (resumable), best-00000350/ (weights); finished: best/
  predictions.parquet  one row per test example (finetuning)
  result.json          written last: its presence means that the run is done
"""

import contextlib
import errno
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from spt.errors import OutputError

State = Literal["running", "done", "failed", "diverged", "stopped"]

SCHEMA = 1  # of result.json; raised when a field changes its meaning
LARGEST = 1e100  # no score or cost is larger: squares of float32 numbers are not, and squares of this still are floats
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, le=LARGEST)]


class Ledger(BaseModel):
    """What a computation cost. Ledgers add up, field by field; the peak is the larger one."""

    model_config = ConfigDict(frozen=True)

    steps: Count = 0  # optimiser steps
    examples: Count = 0  # training sequences shown, repeats counted
    positions: Count = 0  # valid (not padding) positions of those sequences
    flops: Amount = 0.0  # analytic training operations: forward plus backward, evaluation not included
    operations: dict[str, Amount] = {}  # the same by kind (linear, attention, …); empty where a result is older
    seconds: Amount = 0.0  # wall time of the run, evaluation included, interruptions not
    device_seconds: Amount = 0.0  # wall time times the number of devices
    peak_bytes: Count = 0  # device memory on an accelerator, resident memory of the process on a CPU

    def __add__(self, other: "Ledger") -> "Ledger":
        a, b = self.operations, other.operations
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in type(self).model_fields
            if name not in ("operations", "peak_bytes")
        }
        operations = {kind: a.get(kind, 0.0) + b.get(kind, 0.0) for kind in (*a, *b)}
        # Not validated: a sum may pass the limits of what a result may say.
        return Ledger.model_construct(**sums, operations=operations, peak_bytes=max(self.peak_bytes, other.peak_bytes))


class SplitRecord(BaseModel):
    """Identity of one split: hashes over its rows, in order."""

    model_config = ConfigDict(frozen=True)

    rows: Count
    inputs: str  # hash of every row's input
    targets: str | None = None  # hash of the labels; None where the stage was given none


class _Environment(BaseModel):
    """What readers take for granted of a result's environment, where it is there."""

    commit: str | None = None
    processes: int = 1
    threads: int | None = None
    packages: dict[str, str] = {}


class Result(BaseModel):
    """Everything a report needs of one finished run."""

    model_config = ConfigDict(frozen=True)

    format: int = SCHEMA
    key: str
    stage: Literal["pretrain", "finetune"]
    recipe: str  # the recipe's name, for people
    task: str
    model: str
    seed: int
    parent: str | None = None  # key of the pretraining run whose weights this one started from
    settings: str  # hash of everything but seed and parent: equal for the seeds of one configuration
    smoke: bool = False
    metric: str  # what is compared: accuracy, mse, bits_per_byte …
    selected_by: str  # the validation metric that picked the checkpoint
    higher_is_better: bool
    chance: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = (
        None  # score of the best constant answer on the test split, where defined
    )
    val: dict[str, float]  # of the selected checkpoint
    test: dict[str, float] | None  # of the selected checkpoint, evaluated once; None after pretraining
    best_step: Annotated[int, Field(gt=-(2**63), lt=2**63)]
    stop: Literal["budget", "patience"]
    own: Ledger
    total: Ledger  # own plus the parent's
    parameters: dict[str, Count]  # encoder, backbone, head, total
    data: dict[str, SplitRecord]
    notes: tuple[str, ...] = ()  # what a reader of the scores must know of the data and the conventions
    repeated: dict[str, Count] = {}  # rows of validation and test whose input also stands in training
    batch_size: Count
    precision: str
    environment: dict[str, Any]  # versions, device: the short form of env.json

    @field_validator("environment")
    @classmethod
    def _readable(cls, environment: dict[str, Any]) -> dict[str, Any]:
        _Environment.model_validate(environment)
        json.dumps(environment, allow_nan=False)
        return environment

    @model_validator(mode="after")
    def _total_holds_own(self) -> "Result":
        if any(
            getattr(self.total, name) < getattr(self.own, name) for name in ("steps", "examples", "flops", "seconds")
        ):
            raise ValueError("the total cost is below the run's own")
        return self


class Run:
    """A run's directory. Made, locked and written only after everything about the run has been checked."""

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
            raise OutputError(f"{path} has the form {result.format} of another version, not {SCHEMA}")
        if re.sub(r"\.old\d+$", "", self.name) != f"{result.stage}-{result.key}":
            raise OutputError(f"{path} is the result of another run, {result.stage}-{result.key}; move the folder away")
        return result

    @contextlib.contextmanager
    def locked(self, wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the run for this process; the operating system lets go when the process dies, however it dies.

        When another process holds it: OutputError, or with `wait`, which is called first, wait for it.
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
        """Is some process making this run now? Nothing is written to find out."""
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
        """Make room for a fresh start without losing what is there."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.name}.old{number}")).exists():
            number += 1
        with writing(self.path):
            self.path.rename(aside)
        return aside

    def log(self, kind: str, step: int, **numbers: Any) -> None:
        """Append one line to metrics.jsonl."""
        with writing(self.path), (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step, **numbers}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # a killed process's last may be half a line
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and not any(map(absurd, row.values())):
                    rows.append(row)
        return rows

    def forget_metrics_after(self, step: int) -> None:
        """Drop what an interrupted run logged beyond the step it is resumed from."""
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def set_status(self, state: State, reason: str = "", exit_code: int = 0) -> None:
        write_json(
            self.path / "status.json",
            {
                "state": state,
                "reason": reason,
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
        """The result, then what it makes superfluous, then the word that all is done: whoever is killed in between
        leaves a run that the next to come cleans."""
        write_text(self.path / "result.json", result.model_dump_json(indent=2) + "\n")
        clean()
        self.set_status("done")


def absurd(value: object) -> bool:
    """Is this a finite number that no computation of ours gives?"""
    return isinstance(value, int | float) and LARGEST < abs(value) < math.inf


def parse_json(text: str) -> Any:
    """As json.loads, but a number that is not finite, or that no computation of ours gives, is a ValueError too."""

    def number(written: str, kind: type[int] | type[float] = float) -> int | float:
        value = kind(written)
        if not abs(value) <= LARGEST:
            raise ValueError(f"{written[:20]} is no number to reckon with")
        return value

    return json.loads(text, parse_constant=number, parse_float=number, parse_int=lambda written: number(written, int))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the file system's refusals into one sentence."""
    try:
        yield
    except NotImplementedError as error:  # FileLock's word for a file system that cannot lock
        raise OutputError(
            f"the file system of {path.parent} has no locks, so two processes could spoil each other's work; choose "
            "another --out or SPT_CACHE_DIR"
        ) from error
    except OSError as error:
        raise output_error(path, error) from error


def output_error(path: Path, error: OSError) -> OutputError:
    reasons = {
        errno.ENOSPC: "the disk is full; free some space and repeat the command, it continues",
        errno.EDQUOT: "the disk quota is used up; free some space and repeat the command, it continues",
        errno.EFBIG: "the file is larger than this session allows (ulimit -f); raise the limit and repeat the command",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.EACCES: "permission denied; choose another folder",
        errno.ENOTDIR: "a part of this path is a file, not a folder; choose another folder",
        errno.EEXIST: "a file of this name stands where a folder is needed",
    }
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return OutputError(f"cannot write {path}: {reason}", hopeless=full)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
