"""Several processes: start them on this machine under torchrun, or notice that a launcher has started this one.

Joined are `torchrun -m spt_cli …`, `accelerate launch -m spt_cli …` and `srun … spt …`; `--num-processes` starts some.
Importing this needs no torch.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from spt.errors import BackendError, UsageError, brief

CODE_FILE = "SPT_EXIT_CODE_FILE"  # where process 0 leaves its exit code, which launchers turn into 1
PATIENCE = 300  # seconds that processes asked to stop have for finishing their step and saving
MOST = 256  # processes on one machine


def world(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher that started this one has formed; 1 without a launcher."""
    return int(environ.get("WORLD_SIZE") or 1)


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number among them. 0 writes and speaks."""
    return int(environ.get("RANK") or 0)


def launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Has a launcher started this process?"""
    return "WORLD_SIZE" in environ or CODE_FILE in environ


def join_slurm(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give the variables of a Slurm job step the names that torch reads; nothing outside `srun` with several tasks.

    SLURM_NTASKS alone says what a job may use, also in its batch script, which is one process: only a step has
    SLURM_STEP_NUM_TASKS.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if tasks < 2 or "WORLD_SIZE" in environ or "SLURM_PROCID" not in environ:
        return
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or 1)
    job = int(environ.get("SLURM_JOB_ID") or 0)
    step = environ.get("SLURM_STEP_ID", "0")
    found = {
        "WORLD_SIZE": str(tasks),
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": first_host(
            environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
        ),
        "MASTER_PORT": str(20000 + (job * 31 + (int(step) if step.isdigit() else 0)) % 20000),
    }
    for name, value in found.items():
        environ.setdefault(name, value)


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list: `gpu[03-05,9],login` gives gpu03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


def check(processes: int | None, config: Path | None) -> None:
    """Raise UsageError, in words, for a request that cannot be met."""
    if config is not None and not config.is_file():
        raise UsageError(f"no accelerate config file {config}; accelerate config writes one")
    if processes is not None and processes > MOST:
        raise UsageError(f"--num-processes {processes} is more than {MOST}; it starts processes on this machine alone")
    if launched() and processes is not None and processes != world():
        raise UsageError(f"--num-processes {processes}, but a launcher has formed {world()}; leave the option out")


def wanted(processes: int | None, config: Path | None) -> bool:
    """Is this the process that has to start others?"""
    return not launched() and (config is not None or (processes or 1) > 1)


def relaunch(processes: int | None, config: Path | None, arguments: Sequence[str]) -> int:
    """Run the same command as several processes; returns the exit code of process 0, as it meant it."""
    with tempfile.TemporaryDirectory(prefix="spt-") as folder:
        os.environ[CODE_FILE] = str(Path(folder) / "code")
        try:
            done = _accelerate(config, processes, arguments) if config else _torchrun(processes or 1, arguments)
        finally:
            path = os.environ.pop(CODE_FILE)
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text(encoding="utf-8"))
        if done in (75, 130):
            return done
        if done:
            raise BackendError(
                "one of the processes ended without a word, perhaps killed for want of memory; "
                "what was saved is kept and the same command continues"
            )
        return 0


def _torchrun(processes: int, arguments: Sequence[str]) -> int:
    # Quiet: its tracebacks about a process that ended with 75 or 130 would bury our one sentence.
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    options = ["--standalone", f"--nproc-per-node={processes}", f"--shutdown-timeout={PATIENCE}"]
    parsed = run.get_args_parser().parse_args([*options, "-m", "spt_cli", *arguments])
    try:
        run.run(parsed)
    except ChildFailedError:
        return 1
    except SignalException as error:
        return 130 if error.sigval == signal.SIGINT else 75
    except (OSError, RuntimeError, ValueError) as error:  # no port, no process, not enough devices
        raise BackendError(f"{processes} processes could not be started: {brief(error)}") from error
    return 0


def _accelerate(config: Path | None, processes: int | None, arguments: Sequence[str]) -> int:
    number = [f"--num_processes={processes}"] if processes else []
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={config}", *number]
    with subprocess.Popen([*command, "-m", "spt_cli", *arguments]) as child:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda number, _: child.send_signal(number))
        return child.wait()


def leave_code(code: int) -> None:
    """Process 0 tells the process that started it how it ended."""
    path = os.environ.get(CODE_FILE)
    if path and rank() == 0:
        with contextlib.suppress(OSError):
            Path(path).write_text(str(code), encoding="utf-8")


def end_with_parent() -> None:
    """A process that we started goes when the one that started it is killed: nobody would wait for its result."""
    if CODE_FILE in os.environ and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def part() -> None:
    """Leave the group in good order, when all is done.

    Process 0 is the first to be through with its messages and the last to leave: one that leaves early breaks the
    connection others may still be reading from, and process 0 may be the one that connects them all.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    store = distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        store.set("spt/over", "1")
        store.wait([f"spt/left/{other}" for other in range(1, world())])
    else:
        store.wait(["spt/over"])
        store.set(f"spt/left/{rank()}", "1")
    distributed.destroy_process_group()
