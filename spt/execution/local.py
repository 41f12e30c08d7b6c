"""Many runs by several worker processes on this machine, each with a GPU of its own where there are any.

The conductor hands a worker one run at a time, over the worker's standard input, and hears of it over its standard
output, in lines of JSON. What a worker's libraries print goes to a log file. A worker that dies takes one run with it,
and another takes its place; workers that lose the conductor save their state and end.
"""

import contextlib
import ctypes
import heapq
import json
import logging
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from spt.config.job import Job
from spt.errors import BackendError, Interrupted, OutputError, SptError, Stopped, UsageError, one_line
from spt.execution.queue import FailedRun, RunRequest, Say, attempt_run, outstanding_jobs, parent_failure
from spt.runs.files import writing
from spt.runs.folder import RunFolder
from spt.runtime import launch, signals
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

PATIENCE = 60.0  # seconds that workers asked to stop have for finishing their step and saving
ATTEMPTS = 3  # workers in a row that may die at their start


class _WorkerSettings(NamedTuple):
    """What every worker is started with."""

    jobs: tuple[Job, ...]
    labels: tuple[str, ...]
    root: Path
    settings: Settings
    conductor: int  # its process id


def run_locally(
    wanted: Sequence[RunRequest], root: Path, settings: Settings, workers: int, say: Say, folder: Path
) -> list[FailedRun]:
    """Have every run made by up to `workers` processes; returns the failures. Their logs are in folder/workers.

    Raises Stopped on request, after the workers have saved their states; OutputError where the disk would fail every
    other run as well; BackendError when workers cannot be started.
    """
    if launch.world_size() > 1:
        raise UsageError(
            f"a launcher has formed {launch.world_size()} processes, but workers are started by spt; run alone"
        )
    if workers < 1:
        raise UsageError(f"there cannot be {workers} workers; ask for at least 1")
    found, unreadable = outstanding_jobs(wanted, root, settings, say)
    failed = {failure.job.name: failure for failure in unreadable}
    if not found:
        return list(failed.values())
    with (
        tempfile.TemporaryDirectory(prefix="spt-") as place,
        signals.cleanup(lambda _: shutil.rmtree(place, ignore_errors=True)),
    ):
        orders = Path(place) / "orders.pkl"
        jobs, labels = zip(*found, strict=True)
        # Resolved here, once: a relative folder means the same to every worker.
        spec = _WorkerSettings(jobs, labels, root.resolve(), replace(settings, quiet=True), os.getpid())
        orders.write_bytes(pickle.dumps(spec))
        with _Scheduler(found, root, settings, min(workers, len(found)), say, folder / "workers", orders) as conductor:
            return conductor.conduct(failed)


@dataclass
class _Worker:
    process: "subprocess.Popen[bytes]"
    log: Path
    slot: int
    ready: bool = False
    task: int | None = None  # the run it is making


@dataclass
class _Scheduler:
    found: Sequence[RunRequest]
    root: Path
    settings: Settings
    most: int  # workers
    say: Say
    logs: Path
    orders: Path
    workers: dict[int, _Worker] = field(default_factory=dict)  # by their slots
    received: int = 0  # the signal that asks to stop
    # What has happened: (slot, message), None for a worker that has ended; (-1, None) wakes up. A SimpleQueue, since
    # signal handlers put into it.
    events: "queue.SimpleQueue[tuple[int, dict[str, Any] | None]]" = field(default_factory=queue.SimpleQueue)
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> "_Scheduler":
        with writing(self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ValueError):  # not in the main thread: whoever owns it decides
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._end(at_work=error is not None)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            if self.received and error is None:  # too late for us; not for what comes next
                signal.raise_signal(self.received)
            for log in self.logs.glob("*.log"):
                with contextlib.suppress(OSError):
                    if log.stat().st_size == 0:
                        log.unlink()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._kill()  # asked for a second time: at once
        self.received = self.received or number
        self.events.put((-1, None))

    def conduct(self, failed: dict[str, FailedRun]) -> list[FailedRun]:
        names = [job.name for job, _ in self.found]
        index = {name: i for i, name in enumerate(names)}
        children: dict[int, list[int]] = {}
        ready: list[int] = []  # a heap: the first in order comes first
        for i, (job, _) in enumerate(self.found):
            parent = index.get(job.parent.name) if isinstance(job.parent, Job) else None
            if parent is None:
                ready.append(i)
            else:
                children.setdefault(parent, []).append(i)
        deaths = 0

        def over(i: int, reason: str | None) -> None:
            job, label = self.found[i]
            if reason is not None:
                failed[job.name] = FailedRun(job, reason)
                self.say(f"{label} failed: {reason}")
            for child in children.pop(i, []):
                lost = parent_failure(self.found[child].job, failed)
                if lost is None:
                    heapq.heappush(ready, child)
                else:
                    over(child, lost)

        for i in list(ready):
            if (lost := parent_failure(self.found[i].job, failed)) is not None:  # its parent's result cannot be read
                ready.remove(i)
                over(i, lost)
        heapq.heapify(ready)
        while ready or any(worker.task is not None for worker in self.workers.values()):
            for worker in self.workers.values():
                if ready and worker.ready and worker.task is None:
                    worker.task = heapq.heappop(ready)
                    self._tell(worker, {"make": worker.task})
            starting = sum(not worker.ready for worker in self.workers.values())
            for _ in range(min(self.most - len(self.workers), len(ready) - starting)):
                self._start()
            slot, message = self._next()
            if self.received:
                break
            if slot < 0:
                continue
            worker = self.workers[slot] if message is not None else self._gone(slot)
            if message is None:
                how = self._how(worker)
                if worker.task is not None:
                    over(worker.task, self._bury(worker, how))
                elif not worker.ready:
                    deaths += 1
                    if deaths == ATTEMPTS:
                        raise BackendError(f"{deaths} workers in a row ended at their start ({how}); see {worker.log}")
            elif "ready" in message:
                worker.ready, deaths = True, 0
            elif "say" in message:
                self.say(message["say"])
            elif "done" in message:
                worker.task = None
                over(message["done"], message["reason"])
            elif "unable" in message:
                raise BackendError(message["unable"])
            elif "full" in message:
                raise OutputError(message["full"], hopeless=True)
            elif "bug" in message:
                self.say(message["traceback"])
                raise RuntimeError(message["bug"])
        if self.received:
            self._end(at_work=True)
            raise signals.stop_error(self.received)
        return list(failed.values())

    def _next(self) -> tuple[int, dict[str, Any] | None]:
        while True:
            # Not for ever: on some systems a signal is only looked at between two calls.
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=1.0)

    def _start(self) -> None:
        slot = next(i for i in range(self.most) if i not in self.workers)
        log = self.logs / f"{slot + 1}.log"
        environ = {**os.environ, **launch.import_environment(), **_slot(slot, self.settings.cpu)}
        environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self.most)))
        with writing(log), log.open("ab") as words:
            try:
                # A session of its own: Ctrl-C on the terminal is the conductor's to hear, and a worker goes with all
                # that it has started.
                process = subprocess.Popen(
                    [sys.executable, "-m", "spt.execution.local", str(self.orders)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    env=environ,
                    start_new_session=True,
                )
            except OSError as error:
                raise BackendError(f"no worker could be started: {one_line(error)}") from error
        self.workers[slot] = worker = _Worker(process, log, slot)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # the last words of one that was killed
                continue
            self.events.put((worker.slot, message))
        worker.process.stdout.close()
        worker.process.wait()
        self.events.put((worker.slot, None))

    def _gone(self, slot: int) -> _Worker:
        worker = self.workers.pop(slot)
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):
            worker.process.stdin.close()
        return worker

    def _tell(self, worker: _Worker, message: dict[str, Any]) -> None:
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; its listener will say so
            worker.process.stdin.write(json.dumps(message).encode() + b"\n")
            worker.process.stdin.flush()

    @staticmethod
    def _how(worker: _Worker) -> str:
        code = worker.process.returncode
        return f"exit code {code}" if code >= 0 else _signal_name(-code)

    def _bury(self, worker: _Worker, how: str) -> str:
        """Why its run failed, which the run's status says too: the worker itself could not."""
        if worker.process.returncode in (Stopped.exit_code, Interrupted.exit_code):
            return "its worker was stopped; the same command continues"
        memory = ", perhaps because memory ran out" if worker.process.returncode == -signal.SIGKILL else ""
        empty = not worker.log.is_file() or worker.log.stat().st_size == 0
        reason = f"worker was killed ({how}){memory}" + ("" if empty else f"; see {worker.log}")
        assert worker.task is not None
        run = RunFolder(self.root, self.found[worker.task].job.name)
        with contextlib.suppress(OutputError), run.locked():
            if (run.status() or {}).get("state") == "running":
                run.set_status("failed", reason, BackendError.exit_code)
        return reason

    def _end(self, at_work: bool) -> None:
        """Nobody is left afterwards. Those at work save their state first; those that are not need no word."""
        for worker in self.workers.values():
            if at_work:
                with contextlib.suppress(OSError):
                    worker.process.terminate()
            else:
                self._tell(worker, {"end": True})
        deadline = time.monotonic() + PATIENCE
        while self.workers:
            try:
                slot, message = self.events.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() > deadline:
                    self._kill()
                continue
            if slot >= 0 and message is None:
                self._gone(slot)
            elif message is not None and "say" in message:
                with contextlib.suppress(OSError, ValueError):
                    self.say(message["say"])

    def _kill(self) -> None:
        for worker in list(self.workers.values()):
            with contextlib.suppress(OSError):
                if worker.process.returncode is None and hasattr(os, "killpg"):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cores() -> int:
    """That this process may use."""
    with contextlib.suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _slot(slot: int, cpu: bool) -> dict[str, str]:
    """The variable that gives a worker one of the GPUs that this process sees, in turn."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cpu:
        return {}
    devices = [str(i) for i in range(torch.cuda.device_count())]
    if visible is not None:
        devices = [name.strip() for name in visible.split(",") if name.strip()][: len(devices)]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {}


def main() -> NoReturn:
    """A worker's whole life. The exit code is for people; the conductor has heard by then."""
    inbox, outbox = os.dup(0), os.dup(1)  # ours; what others print must not come between
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    signals.install(silent=True)
    orders: _WorkerSettings = pickle.loads(Path(sys.argv[1]).read_bytes())
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
    wire = _Connection(outbox)
    tasks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inbox, tasks), daemon=True).start()
    code = 0
    try:
        _work(orders, wire, tasks)
    except Stopped as error:
        code = error.exit_code
    except OutputError as error:
        wire.send({"full": str(error)})
        code = error.exit_code
    except SptError as error:
        wire.send({"unable": str(error)})
        code = error.exit_code
    except Exception as error:
        wire.send({"bug": one_line(error), "traceback": traceback.format_exc()})
        code = 1
    launch.exit_process(code)


def _work(orders: _WorkerSettings, wire: "_Connection", tasks: "queue.SimpleQueue[int | None]") -> None:
    logger = logging.getLogger("spt.tasks")
    logger.addHandler(_Tell(wire))
    logger.setLevel(logging.INFO)
    runtime = Runtime(orders.settings)
    runtime.check_libraries()
    _ = runtime.device  # one that cannot be used is found now
    wire.send({"ready": True})
    while (task := tasks.get()) is not None:
        job = orders.jobs[task]
        # The conductor has had its parent made, in this very call.
        made = {job.parent.name} if isinstance(job.parent, Job) else set()
        reason = attempt_run(job, orders.root, runtime, wire.say, orders.labels[task], made)
        wire.send({"done": task, "reason": reason})


def _receive(inbox: int, tasks: "queue.SimpleQueue[int | None]") -> None:
    """In a thread: take the conductor's messages; when it is gone, so are we, with our state saved."""
    with os.fdopen(inbox, "rb") as lines:
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                tasks.put(None)
                return
            tasks.put(message["make"])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(launch.PATIENCE)
    os._exit(Stopped.exit_code)


class _Connection:
    """To the conductor, a line at a time, from any thread. One that has gone hears nothing more."""

    def __init__(self, number: int) -> None:
        self._number, self._lock = number, threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        rest = json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._number, rest) :]

    def say(self, text: str) -> None:
        self.send({"say": text})


class _Tell(logging.Handler):
    """What takes long in a task says how far it is."""

    def __init__(self, wire: _Connection) -> None:
        super().__init__(logging.INFO)
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        self._wire.say(record.getMessage())


if __name__ == "__main__":
    main()
