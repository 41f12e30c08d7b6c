"""Many runs by several worker processes on this machine, each with a GPU of its own where there are any.

The scheduler and a worker exchange pickled messages over the worker's standard input and output; what a worker's
libraries print goes to a log file. To a worker: the folder of runs and the settings, then one run (a RunRequest) at a
time. From a worker, as (kind, value):

    ready                 it has a device and waits for runs
    log     text          a message of a logger
    step    Update        how far its run is
    done    str or None   its run has ended: why it failed, or None
    error   exception     what would fail every other run as well

A worker that dies takes one run with it, and another takes its place; workers that lose the scheduler save their state
and end.
"""

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import torch

from spt.errors import (
    BackendError,
    Interrupted,
    OutputError,
    SptError,
    Stopped,
    UsageError,
    hide_secrets,
    one_line,
)
from spt.execution.progress import StudyProgress
from spt.execution.queue import (
    FailedRun,
    Failures,
    RunRequest,
    attempt_run,
    count_runs,
    is_past,
    unfinished_requests,
)
from spt.runs.files import writing
from spt.runs.folder import RunFolder
from spt.runtime import launch, signals
from spt.runtime.distributed import Runtime
from spt.runtime.environment import command_line, work_for
from spt.runtime.progress import forward_messages, forward_progress
from spt.runtime.settings import Settings

logger = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds that workers asked to stop have for finishing their step and saving
ATTEMPTS = 3  # workers in a row that may die at their start


def run_locally(
    requests: Sequence[RunRequest],
    root: Path,
    settings: Settings,
    workers: int,
    folder: Path,
    progress: StudyProgress | None = None,
    deadline: float | None = None,
) -> list[FailedRun]:
    """Carry out every run by up to `workers` processes; returns the failures. Their logs are in folder/workers. None is
    started after the deadline, a moment of time.monotonic().

    Raises Stopped on request, after the workers have saved their states; OutputError where the disk would fail every
    other run as well; BackendError when workers cannot be started.
    """
    if launch.world_size() > 1:
        raise UsageError(
            f"a launcher has formed {launch.world_size()} processes, but workers are started by spt; run alone"
        )
    if workers < 1:
        raise UsageError(f"there cannot be {workers} workers; ask for at least 1")
    unfinished, failures = unfinished_requests(requests, root)
    if unfinished:
        logs = folder / "workers"
        with writing(logs):
            logs.mkdir(parents=True, exist_ok=True)
        # Resolved here, once: a relative folder means the same to every worker.
        setup = (root.resolve(), settings, command_line())
        waiting = {request.job.name: request for request in unfinished}
        count = min(workers, len(unfinished))
        if count > 1:
            logger.info(f"{len(unfinished)} runs to make, up to {count} at once")
        jobs, runs = [request.job for request in unfinished], count_runs(requests, unfinished, root)
        with (progress or StudyProgress(root)).over(jobs, runs, count, len(failures)) as shown:
            _Scheduler(waiting, failures, setup, count, logs, shown, deadline).run()
    return list(failures.values())


@dataclass(eq=False)
class _Worker:
    slot: int
    process: "subprocess.Popen[bytes]"
    log: Path
    ready: bool = False
    request: RunRequest | None = None  # the run it is making

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; its listener will say so
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            if self.process.returncode is None and hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()


class _StopWorkers(signals.StopSignals):
    """SIGTERM and Ctrl-C are noted, to be acted on between two messages. A second signal kills the workers."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__()
        self._kill = kill

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._kill()
        self.received = self.received or number


Message = tuple[str, Any]


@dataclass
class _Scheduler:
    unfinished: dict[str, RunRequest]  # by name, parents first
    failures: Failures
    setup: tuple[Path, Settings, str]  # what every worker is sent first: the folder of runs, settings, the command
    count: int  # of workers, at most
    logs: Path
    progress: StudyProgress = field(default_factory=lambda: StudyProgress(Path()))
    deadline: float | None = None  # no run is started after it
    workers: list[_Worker] = field(default_factory=list)
    failed_starts: int = 0  # in a row
    # What workers have sent; None when one has ended. A SimpleQueue, since a signal may come at any moment.
    events: "queue.SimpleQueue[tuple[_Worker, Message | None]]" = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        """Until every run has ended; no worker is left afterwards."""
        with _StopWorkers(self._kill) as stop:
            try:
                while self.unfinished:
                    if is_past(self.deadline) and not any(worker.request for worker in self.workers):
                        break
                    self._assign()
                    self._handle_event()
                    stop.check()
            finally:
                self._end()

    def _assign(self) -> None:
        """Give runs to idle workers, in order, and start workers for the rest."""
        startable = self._startable()
        for worker in self.workers:
            if startable and worker.ready and worker.request is None:
                worker.request = startable.pop(0)
                worker.send(worker.request)
        starting = sum(not worker.ready for worker in self.workers)
        for _ in range(min(self.count - len(self.workers), len(startable) - starting)):
            self._start()

    def _startable(self) -> list[RunRequest]:
        """The runs that nobody makes yet and that wait for no other, none after the deadline. Those whose parent has
        failed fail here."""
        for request in list(self.unfinished.values()):
            if (reason := self.failures.of_parent(request.job)) is not None:
                self._finish(request, reason)
        running = {worker.request.job.name for worker in self.workers if worker.request is not None}
        if is_past(self.deadline):
            return []
        return [
            request
            for name, request in self.unfinished.items()
            if name not in running and request.job.parent_name not in self.unfinished
        ]

    def _start(self) -> None:
        slot = min(set(range(self.count)) - {worker.slot for worker in self.workers})
        log = self.logs / f"{slot + 1}.log"
        environ = {**os.environ, **launch.import_environment(), **_visible_device(slot, self.setup[1].cpu)}
        environ.setdefault("OMP_NUM_THREADS", str(max(1, launch.usable_cores() // self.count)))
        with writing(log), log.open("ab") as output:
            try:
                # A session of its own: Ctrl-C on the terminal is the scheduler's to handle, and a worker is killed with
                # all that it has started.
                # Slurm announces a job's time limit to all of its processes; here the scheduler answers.
                with signals.withhold_usr2():
                    process = subprocess.Popen(
                        [sys.executable, "-m", "spt.execution.local"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        env=environ,
                        start_new_session=True,
                    )
            except OSError as error:
                raise BackendError(f"no worker could be started: {one_line(error)}") from error
        worker = _Worker(slot, process, log)
        self.workers.append(worker)
        worker.send(self.setup)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        try:
            with worker.process.stdout as messages, contextlib.suppress(EOFError):
                while True:
                    self.events.put((worker, pickle.load(messages)))
        except Exception:  # whatever unpickling raises: the last message of a worker that was killed is cut off, and
            worker.kill()  # one that sends what cannot be read cannot be worked with
        finally:
            worker.process.wait()
            self.events.put((worker, None))

    def _handle_event(self) -> None:
        try:
            worker, message = self.events.get(timeout=0.2)
        except queue.Empty:
            return
        if message is None:
            self._remove(worker)
            self.progress.remove(worker.slot)
            how = launch.exit_text(worker.process.returncode)
            if worker.request is not None:
                self._finish(worker.request, self._death(worker, how))
            elif not worker.ready:
                self.failed_starts += 1
                if self.failed_starts == ATTEMPTS:
                    raise BackendError(f"{ATTEMPTS} workers in a row ended at their start ({how}); see {worker.log}")
            return
        kind, value = message
        if kind == "step":
            if worker.request is not None:
                self.progress.show(worker.slot, worker.request.job, value)
        elif kind == "ready":
            worker.ready, self.failed_starts = True, 0
        elif kind == "log":
            logger.info(value)
        elif kind == "done":
            assert worker.request is not None
            self._finish(worker.request, value)
            worker.request = None
            self.progress.remove(worker.slot)
        elif kind == "error":
            raise value

    def _finish(self, request: RunRequest, reason: str | None) -> None:
        del self.unfinished[request.job.name]
        if reason is not None:
            self.failures.add(request, reason)
        self.progress.end(request.job, reason is not None)

    def _death(self, worker: _Worker, how: str) -> str:
        """Why the run of a dead worker failed; the run's status says so too: the worker itself could not."""
        if worker.process.returncode in (Stopped.exit_code, Interrupted.exit_code):
            return "its worker was stopped; the same command continues"
        memory = ", perhaps because memory ran out" if worker.process.returncode == -signal.SIGKILL else ""
        empty = not worker.log.is_file() or worker.log.stat().st_size == 0
        reason = f"worker was killed ({how}){memory}" + ("" if empty else f"; see {worker.log}")
        assert worker.request is not None
        run = RunFolder(self.setup[0], worker.request.job.name)
        with contextlib.suppress(OutputError), run.locked():
            if (run.status() or {}).get("state") == "running":
                run.set_status("failed", reason, BackendError.exit_code)
        return reason

    def _remove(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):
            worker.process.stdin.close()

    def _end(self) -> None:
        """End every worker; those at work save their state first."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.process.terminate()
        deadline = time.monotonic() + PATIENCE
        while self.workers:
            if time.monotonic() > deadline:
                self._kill()
            with contextlib.suppress(queue.Empty):
                worker, message = self.events.get(timeout=0.2)
                if message is None:
                    self._remove(worker)
                elif message[0] == "log":
                    with contextlib.suppress(OSError, ValueError):
                        logger.info(message[1])
        for log in self.logs.glob("*.log"):
            with contextlib.suppress(OSError):
                if log.stat().st_size == 0:
                    log.unlink()

    def _kill(self) -> None:
        for worker in list(self.workers):
            worker.kill()


def _visible_device(slot: int, cpu: bool) -> dict[str, str]:
    """The variable that gives a worker one of the GPUs that this process sees, in turn."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cpu:
        return {}
    devices = [str(i) for i in range(torch.cuda.device_count())]
    if visible is not None:
        devices = [name.strip() for name in visible.split(",") if name.strip()][: len(devices)]
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {}


def main() -> NoReturn:
    """A worker's whole life. The exit code is for people; the scheduler has been told why by then."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # what libraries print must not come between the messages
    os.dup2(2, 1)
    signals.install(silent=True)
    launch.sigterm_at_parent_exit()
    lock = threading.Lock()

    def send(kind: str, value: object = None) -> None:  # from any thread
        with lock, contextlib.suppress(OSError):  # the scheduler may have gone
            pickle.dump((kind, value), outbox)
            outbox.flush()

    try:
        _work(inbox, send)
    except Stopped as error:
        code = error.exit_code
    except SptError as error:
        hopeless = isinstance(error, OutputError)
        send("error", OutputError(str(error), hopeless=True) if hopeless else BackendError(str(error)))
        code = error.exit_code
    except Exception as error:
        send("log", hide_secrets(traceback.format_exc()))
        send("error", RuntimeError(one_line(error)))
        code = 1
    launch.exit_process(code)


def _work(inbox: BinaryIO, send: Callable[..., None]) -> NoReturn:
    """Make the runs that come, until a signal ends this process."""
    requests: queue.SimpleQueue[RunRequest] = queue.SimpleQueue()
    root, settings, command = pickle.load(inbox)
    work_for(command)
    threading.Thread(target=_receive, args=(inbox, requests), daemon=True).start()
    runtime = Runtime(settings)
    runtime.check_libraries()
    _ = runtime.device  # one that cannot be used is found now
    send("ready")
    with forward_messages(lambda text: send("log", text)), forward_progress(lambda update: send("step", update)):
        while True:
            send("done", attempt_run(requests.get(), root, runtime))


def _receive(inbox: BinaryIO, requests: "queue.SimpleQueue[RunRequest]") -> None:
    """In a thread: take runs from the scheduler; when it is gone, end this process with its state saved."""
    with contextlib.suppress(Exception):  # the end of the file, or a message that was cut off
        while True:
            requests.put(pickle.load(inbox))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(launch.PATIENCE)
    os._exit(Stopped.exit_code)


if __name__ == "__main__":
    main()
