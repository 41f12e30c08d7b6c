"""Several processes: start them on this machine under torchrun, or notice that a launcher has started this one.

Joined are `torchrun -m spt_cli …`, `accelerate launch -m spt_cli …` and `srun … spt …`; `--num-processes` starts some.
Importing this needs no torch.
"""

import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from spt.errors import BackendError, Interrupted, Stopped, UsageError, one_line
from spt.runtime import signals
from spt.runtime.signals import CODE_FILE

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
    return "WORLD_SIZE" in environ or is_child(environ)


def is_child(environ: Mapping[str, str] = os.environ) -> bool:
    """Has this program itself started this process?"""
    return CODE_FILE in environ


def join_slurm(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give the variables of a Slurm job step the names that torch reads; nothing outside `srun` with several tasks.

    SLURM_NTASKS alone says what a job may use, also in its batch script, which is one process: only a step has
    SLURM_STEP_NUM_TASKS.
    """
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if tasks < 2 or "WORLD_SIZE" in environ or "SLURM_PROCID" not in environ:
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
        environ.setdefault(name, value)


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
    if "WORLD_SIZE" not in environ:  # left over from something else: torch would look for a group
        for name in ("RANK", "LOCAL_RANK"):
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
    """Run the same command as several processes; returns the exit code that the first to fail meant."""
    with (
        tempfile.TemporaryDirectory(prefix="spt-") as folder,
        signals.cleanup(lambda _: shutil.rmtree(folder, ignore_errors=True)),
    ):
        path = Path(folder) / "code"
        environ = {CODE_FILE: str(path), **import_environment()}
        before = {name: os.environ.get(name) for name in environ}
        os.environ.update(environ)
        try:
            if config is not None:
                return _accelerate(config, processes, arguments, path)
            return _torchrun(processes or 1, arguments, path)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def import_environment() -> dict[str, str]:
    """The variables with which another Python imports this very copy of spt."""
    variables = {"PYTHONSAFEPATH": "1"}  # a numpy.py lying about here is not to be imported
    root = Path(__file__).resolve().parent.parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, which need not be installed
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables


def _torchrun(processes: int, arguments: Sequence[str], path: Path) -> int:
    # Quiet: its words about a process that ended with 75 or 130 would bury our one sentence.
    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    options = ["--standalone", f"--nproc-per-node={processes}", f"--shutdown-timeout={PATIENCE}"]
    parsed = run.get_args_parser().parse_args([*options, "-m", "spt_cli", *arguments])
    try:
        run.run(parsed)
    except ChildFailedError as error:
        code = _code(path)
        if code is not None and any(failure.exitcode == code for failure in error.failures.values()):
            return code
        if {failure.exitcode for failure in error.failures.values()} <= {Stopped.exit_code, Interrupted.exit_code}:
            raise signals.stop_error(signal.SIGTERM) from None  # stopped from outside, before it began to train
        # Who lost a partner ends with the code of that, often within the same second; it is not what happened first.
        number, failure = min(
            error.failures.items(),
            key=lambda item: (item[1].exitcode == BackendError.exit_code, item[1].timestamp),
        )
        memory = ", perhaps because memory ran out" if failure.exitcode == -signal.SIGKILL else ""
        raise BackendError(
            f"process {number} of {processes} was killed ({exit_text(failure.exitcode)}{memory}); what was saved is "
            "kept and the same command continues"
        ) from None
    except SignalException as error:  # the processes have had their time to save
        if (code := _code(path)) is not None:
            return code
        raise signals.stop_error(error.sigval) from None  # nothing was to be saved, so nobody has said anything
    except (OSError, RuntimeError, ValueError) as error:  # no port, no process
        raise BackendError(f"{processes} processes could not be started: {one_line(error)}") from error
    finally:
        signals.install()  # torchrun has installed handlers of its own
    return 0


def _accelerate(config: Path, processes: int | None, arguments: Sequence[str], path: Path) -> int:
    count = [f"--num_processes={processes}"] if processes else []
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={config}", *count]
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, forward)
    try:
        with subprocess.Popen([*command, "-m", "spt_cli", *arguments]) as child:
            for number in received[:1]:  # it came before there was anybody to pass it on to
                child.send_signal(number)
            done = child.wait()
    finally:
        signals.install()
    if done and _code(path) is None:
        if received:
            raise signals.stop_error(received[0])
        raise BackendError(f"accelerate launch with {config} ended with code {done} before spt could say anything")
    return _code(path) or 0


def _code(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def leave_code(code: int) -> bool:
    """Tell the process that started this one how it ended; False when another one has told before."""
    path = os.environ.get(CODE_FILE)
    if not path:
        return True
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(str(code))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def wait_for_code(seconds: float) -> None:
    """Give the process that speaks time to say what happened: so many seconds; ten times that if it leaves a code."""
    path = os.environ.get(CODE_FILE)
    end = time.monotonic() + seconds * (10 if path else 1)
    while time.monotonic() < end and not (path and os.path.exists(path)):
        time.sleep(0.05)


def end_with_parent() -> None:
    """A process that we started goes when the one that started it is killed: nobody would wait for its result."""
    if CODE_FILE in os.environ and sys.platform == "linux":
        sigterm_at_parent_exit()
        if not Path(os.environ[CODE_FILE]).parent.is_dir():  # it has already gone
            signal.raise_signal(signal.SIGTERM)


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
            with contextlib.suppress(RuntimeError):  # also of time that is up
                store.wait(others, timedelta(seconds=patience))
            return
        store.wait(others)
    else:
        store.wait(["spt/over"])
        store.set(f"spt/left/{rank()}", "1")
    distributed.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """End one of several processes when all is said: threads of the communication library have been seen to abort the
    process while Python tears itself down, which made a finished run a failed one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
