"""Several processes: start them on this machine, or notice that a launcher has started this one.

Joined are `torchrun -m spt_cli …`, `accelerate launch -m spt_cli …` and `srun … spt …`; `--num-processes` starts some.
Importing this needs no torch.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from spt.errors import BackendError, Interrupted, Stopped, UsageError, one_line
from spt.runtime import signals
from spt.runtime.scratch import scratch_folder
from spt.runtime.signals import CODE_FILE, STEP_TASKS

PATIENCE = 300  # seconds that processes asked to stop have for finishing their step and saving
MAX_PROCESSES = 256  # processes on one machine


def usable_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher that started this one has formed; 1 without a launcher."""
    return _number(environ, "WORLD_SIZE", 1)


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number among them. 0 writes and speaks."""
    return _number(environ, "RANK", 0) if world_size(environ) > 1 else 0


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ.get(name) or default)
    except ValueError:
        raise UsageError(f"the variable {name} is {environ[name]!r}, not a number; unset it to run alone") from None


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Has a launcher started this process?"""
    return bool(environ.get("WORLD_SIZE")) or is_child(environ)


def is_child(environ: Mapping[str, str] = os.environ) -> bool:
    """Has this program itself started this process?"""
    return CODE_FILE in environ


def join_slurm(environ: MutableMapping[str, str] = os.environ, arguments: Sequence[str] = ()) -> None:
    """Give the variables of a Slurm job step the names that torch reads; nothing outside `srun` with several tasks, nor
    where each task makes a part of its own (`--shard auto`).

    SLURM_NTASKS alone says what a job may use, also in its batch script, which is one process: only a step has
    SLURM_STEP_NUM_TASKS.
    """
    if re.search(r"(^| )--shard[ =]auto\b", " ".join(arguments)):
        environ.pop(STEP_TASKS, None)  # so that nobody takes them for one group
    tasks = _number(environ, STEP_TASKS, 1)
    if tasks < 2 or environ.get("WORLD_SIZE") or "SLURM_PROCID" not in environ:
        return
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    job = _number(environ, "SLURM_JOB_ID", 0)
    step = environ.get("SLURM_STEP_ID", "0")
    variables = {
        "WORLD_SIZE": str(tasks),
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": _node_address(
            first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost")
        ),
        "MASTER_PORT": str(20000 + (job * 31 + (int(step) if step.isdigit() else 0)) % 20000),
    }
    for name, value in variables.items():
        environ[name] = environ.get(name) or value


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list: `gpu[03-05,9],login` gives gpu03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


def _node_address(name: str) -> str:
    """What a node of Slurm answers to: its name, unless only Slurm knows that."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(name, None)
        return name
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "-o", "show", "node", name]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL).stdout
        if (match := re.search(r"\bNodeAddr=(\S+)", answer)) is not None:
            return match[1]
    return name


def check_request(processes: int | None, config: Path | None) -> None:
    """Raise UsageError for a request that cannot be met."""
    if config is not None and not config.is_file():
        raise UsageError(f"no accelerate config file {config}; accelerate config writes one")
    if processes is not None and processes > MAX_PROCESSES:
        raise UsageError(
            f"--num-processes {processes} is more than {MAX_PROCESSES}; it starts processes on this machine alone"
        )
    if is_launched() and processes is not None and processes != world_size():
        raise UsageError(f"--num-processes {processes}, but a launcher has formed {world_size()}; leave the option out")


def check_group(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise UsageError when the variables announce a group that cannot come together."""
    if not environ.get("WORLD_SIZE"):  # left over from something else: torch would look for a group
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            environ.pop(name, None)
    if world_size(environ) > 1 and not environ.get("MASTER_ADDR"):
        raise UsageError(
            f"the variable WORLD_SIZE announces {world_size(environ)} processes, but MASTER_ADDR does not say where "
            "they meet; unset WORLD_SIZE to run alone"
        )
    if world_size(environ) > 1 and not 0 <= rank(environ) < world_size(environ):
        raise UsageError(
            f"the variable RANK is {rank(environ)} of WORLD_SIZE {world_size(environ)}; unset both to run alone"
        )


def needs_launch(processes: int | None, config: Path | None) -> bool:
    """Is this the process that has to start others?"""
    return not is_launched() and (config is not None or (processes or 1) > 1)


def relaunch(processes: int | None, config: Path | None, arguments: Sequence[str]) -> int:
    """Run the same command as several processes; returns the exit code of an error that one of them has told.

    Raises Stopped when they were asked to stop, and BackendError, which names it, when one of them died.
    """
    with scratch_folder() as folder:
        path = folder / "code"
        environ = {**os.environ, CODE_FILE: str(path), **import_environment()}
        if config is not None:
            return _accelerate(config, processes, arguments, environ, path)
        return _start_group(processes or 1, arguments, environ, path)


def import_environment() -> dict[str, str]:
    """The variables with which another Python imports this very copy of spt."""
    variables = {"PYTHONSAFEPATH": "1"}  # a numpy.py lying about here is not to be imported
    root = Path(__file__).resolve().parent.parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, which need not be installed
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables


def _start_group(count: int, arguments: Sequence[str], environ: Mapping[str, str], path: Path) -> int:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    group = {
        **environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # they meet in this process's store, which outlives each of them
    }
    group.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    commands: list[tuple[list[str], Mapping[str, str]]] = []
    try:
        store = TCPStore(group["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        for number in map(str, range(count)):
            ranked = {**group, "MASTER_PORT": str(store.port), "RANK": number, "LOCAL_RANK": number}
            commands.append(([sys.executable, "-m", "spt_cli", *arguments], ranked))
        codes, received = _Group(commands).wait()
    except (OSError, RuntimeError, ValueError) as error:  # no port, no process
        raise BackendError(f"{count} processes could not be started: {one_line(error)}") from error
    return _outcome(codes, count, received, path)


def _accelerate(
    config: Path, processes: int | None, arguments: Sequence[str], environ: Mapping[str, str], path: Path
) -> int:
    count = [f"--num_processes={processes}"] if processes else []
    launcher = [sys.executable, "-m", "spt.runtime.accelerate_launch", f"--config_file={config}", *count]
    codes, received = _Group([([*launcher, "-m", "spt_cli", *arguments], environ)]).wait()
    failure = read_failure(path.parent)
    if failure.error and not received and _left(path) is None:
        raise UsageError(
            f"accelerate launch cannot use {config}: {failure.error}; accelerate config writes such a file"
        )
    return _outcome(failure.codes or codes, failure.count, received, path)


class _Group:
    """Processes that are waited for together: a stop is passed on to all, and when one dies the others are ended."""

    def __init__(self, commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> None:
        self._commands = commands
        self._processes: list[subprocess.Popen[bytes]] = []

    def wait(self) -> tuple[dict[int, int], int]:
        """The exit codes of those that ended otherwise than with 0, the first to end first; and the signal received."""
        codes: dict[int, int] = {}
        deadline, forwarded = math.inf, 0
        # A second Ctrl-C ends this process at once, and these with it: what they have saved is whole.
        with signals.StopSignals() as stop, signals.cleanup(lambda _: self._send(signal.SIGKILL)):
            try:
                for command, environ in self._commands:
                    self._processes.append(subprocess.Popen(command, env=dict(environ)))
                while running := [process for process in self._processes if process.poll() is None]:
                    codes |= self._failed(codes)
                    number = stop.received or (signal.SIGTERM if codes else 0)
                    if number and not forwarded:
                        deadline, forwarded = time.monotonic() + PATIENCE, number
                        self._send(number)
                    if time.monotonic() > deadline:
                        self._send(signal.SIGKILL)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running[0].wait(0.05)
                codes |= self._failed(codes)
            finally:
                self._send(signal.SIGKILL)
            received, stop.received = stop.received, 0  # answered here
        return codes, received

    def _failed(self, known: Mapping[int, int]) -> dict[int, int]:
        """Those that have ended since."""
        ended = {n: p.returncode for n, p in enumerate(self._processes) if p.returncode and n not in known}
        return by_cause(ended.items())

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send_signal(number)


def by_cause(codes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Exit codes of processes that ended at about the same moment, with that of the one that died first: who has lost a
    partner, or was ended because of it, has a code of that."""
    return dict(sorted(codes, key=lambda item: (_is_orderly(item[1]), item[1] > 0)))


def _is_orderly(code: int) -> bool:
    """Is it the exit code of a process that was stopped, or that has lost another?"""
    return code in (Stopped.exit_code, Interrupted.exit_code, BackendError.exit_code)


def _outcome(codes: Mapping[int, int], count: int, received: int, path: Path) -> int:
    """What several processes have come to, by the exit codes of those that failed, the first of them first."""
    if not codes:
        return 0
    left = _left(path)
    stops = (Stopped.exit_code, Interrupted.exit_code)
    if left is not None and left[0] not in stops and left[0] in codes.values():
        return left[0]  # that process has said what happened
    number, code = next(iter(codes.items()))
    if not _is_orderly(code) and not (received and code in (-signal.SIGTERM, -signal.SIGINT)):
        memory = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        raise BackendError(
            f"process {number} of {count} was killed ({exit_text(code)}{memory}); what was saved is kept and the same "
            "command continues"
        )
    if left is not None and left[0] in stops:
        raise (Interrupted if left[0] == Interrupted.exit_code else Stopped)(left[1])
    if received or code in stops:  # before there was anything to save, so nobody has said anything
        raise signals.stop_error(received or (signal.SIGINT if code == Interrupted.exit_code else signal.SIGTERM))
    raise BackendError(f"process {number} of {count} has lost the others; the same command continues")


def _left(path: Path) -> tuple[int, str] | None:
    """The exit code that a process has left, and its sentence."""
    try:
        code, _, message = path.read_text(encoding="utf-8").partition("\n")
        return int(code), message
    except (OSError, ValueError):
        return None


def leave_code(code: int, message: str = "") -> bool:
    """Tell the process that started this one how it ended; False when another one has told before."""
    path = os.environ.get(CODE_FILE)
    if not path:
        return True
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(f"{code}\n{message}")
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


@dataclass(frozen=True)
class Failure:
    """What `accelerate launch` has come to: the exit codes of processes that failed, or its own error."""

    codes: dict[int, int] = field(default_factory=dict)
    count: int = 1
    error: str = ""

    def write(self, folder: Path) -> None:
        (folder / "failure").write_text(json.dumps([list(self.codes.items()), self.count, self.error]), "utf-8")


def read_failure(folder: Path) -> Failure:
    try:
        codes, count, error = json.loads((folder / "failure").read_text("utf-8"))
    except (OSError, ValueError):
        return Failure()
    return Failure({int(number): int(code) for number, code in codes}, int(count), str(error))


def dead_process() -> int | None:
    """The number of a process of this group that has died and left no exit code, or None."""
    path = os.environ.get(CODE_FILE)
    if not path or os.path.exists(path):
        return None
    for file in Path(path).parent.glob("process-*"):
        with contextlib.suppress(OSError, ValueError):
            if _has_ended(int(file.read_text(encoding="utf-8"))):
                return int(file.name.partition("-")[2])
    return None


def _has_ended(pid: int) -> bool:
    if os.name == "nt":  # signal 0 is Ctrl-C there
        return False
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:  # another user's by now, or no Linux
        return False


def wait_for_code(seconds: float) -> None:
    """Give the process that speaks time to say what happened: so many seconds; ten times that if it leaves a code."""
    path = os.environ.get(CODE_FILE)
    end = time.monotonic() + seconds * (10 if path else 1)
    while time.monotonic() < end and not (path and os.path.exists(path)) and dead_process() != 0:
        time.sleep(0.05)


def end_with_parent() -> None:
    """A process that we started goes when the one that started it is killed: nobody would wait for its result. Its
    partners can see from here on whether it lives."""
    if CODE_FILE not in os.environ:
        return
    folder = Path(os.environ[CODE_FILE]).parent
    sigterm_at_parent_exit()
    try:
        (folder / f"process-{rank()}").write_text(str(os.getpid()), encoding="utf-8")  # for `dead_process`
    except FileNotFoundError:  # it has already gone
        signal.raise_signal(signal.SIGTERM)
    except OSError:
        pass


def sigterm_at_parent_exit() -> None:
    """Where the system can (Linux): this process is sent SIGTERM when the one that started it ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def exit_text(code: int) -> str:
    """How a process ended, by its exit code: `exit code 1`, or the name of a signal."""
    with contextlib.suppress(ValueError):
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return f"signal {-code}"


def leave_group(patience: float | None = None) -> None:
    """Leave the group in good order, when all is done; or, with patience, when this process has to end: those that are
    through then end as well, and after so many seconds the others are left to find out.

    Process 0 is the first to be through with its messages and the last to leave: one that leaves early breaks the
    connection others may still be reading from, and process 0 may be the one that connects them all.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    store = distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        store.set("spt/over", "1")
        others = [f"spt/left/{other}" for other in range(1, world_size())]
        if patience is not None:
            with contextlib.suppress(RuntimeError):
                _await(store, others, patience)
            return
        _await(store, others, PATIENCE)  # they have nothing left to do
    else:
        _await(store, ["spt/over"])
        store.set(f"spt/left/{rank()}", "1")
    distributed.destroy_process_group()


def _await(store: Any, keys: list[str], seconds: float = math.inf) -> None:
    """Until the keys are there: in steps, since no signal reaches the store's own waiting."""
    end = time.monotonic() + seconds
    while keys and not store.check(keys) and time.monotonic() < end:
        time.sleep(0.02)


def exit_process(code: int) -> NoReturn:
    """End one of several processes when all is said: threads of the communication library have been seen to abort the
    process while Python tears itself down, which made a finished run a failed one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
