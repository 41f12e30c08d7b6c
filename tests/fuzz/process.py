"""A command in a process of its own, forked from one that has imported what commands need, watched and limited."""

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.guards import Guard, plant
from tests.warm import run_to_exit

ROOM = 3 * 2**30  # bytes of addresses that a command may ask for beyond what it begins with
PRIVATE = ("cache", "home", "tmp")  # folders beside the inputs that every command may write to
FOLDERS = {"SPT_CACHE_DIR": "cache", "HOME": "home", "TMPDIR": "tmp"}
FOLDERS |= {"TORCHINDUCTOR_CACHE_DIR": "cache", "TRITON_CACHE_DIR": "cache"}  # which a process that compiled passes on


class Step(NamedTuple):
    """A command, and the folders below the case's own that it may write to."""

    arguments: tuple[str, ...]
    writes: tuple[str, ...] = ()


class Ended(NamedTuple):
    code: int | None  # None: it was still running at the limit
    out: str
    err: str
    forbidden: tuple[str, ...]
    trace: str  # of an error that is no sentence
    seconds: float


def prepare(home: Path) -> None:
    """Once, before the first fork: import, and settle what imports read."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", MPLBACKEND="agg", NO_COLOR="1", COLUMNS="120")
    os.environ.update(OMP_NUM_THREADS="1", MPLCONFIGDIR=str(home), HF_HOME=str(home / "hf"), WANDB_MODE="disabled")
    os.environ.update(NUMBA_DISABLE_JIT="1")  # it keeps what it compiles beside the code, as pickles
    os.environ.update(SPT_JOBS="1", SPT_WORKERS="1", TERM="dumb")
    for name in ("SPT_RUNS_DIR", "SPT_DEBUG", "SPT_DATA_DIR"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    import warm

    warm.warm()
    import matplotlib.pyplot  # noqa: F401
    import torch

    import spt.analysis.attention
    import spt.execution.dry_run
    import spt.inference.predict
    import spt.models.s4d
    import spt.report.figures
    import spt.tasks.custom  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run(step: Step, case: Path, limit: float, fault: str | None = None, watched: bool = True) -> Ended:
    """Run a command with `case`/work as its folder."""
    notes = case / "notes"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir(parents=True)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _become(step, case, fault, watched)
        finally:
            os._exit(99)
    watch = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    late = not poll.poll(limit * 1000)
    os.close(watch)
    if late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it has left running
    text = {name: _read(notes / name) for name in ("out", "err", "forbidden", "trace")}
    code = None if late else os.waitstatus_to_exitcode(status)
    forbidden = tuple(dict.fromkeys(text["forbidden"].splitlines()))
    return Ended(code, text["out"], text["err"], forbidden, text["trace"], time.monotonic() - began)


def _read(path: Path) -> str:
    return path.read_bytes()[:5_000_000].decode(errors="replace") if path.exists() else ""


def _become(step: Step, case: Path, fault: str | None, watched: bool) -> None:
    os.setpgid(0, 0)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the process that forked
    notes, work = case / "notes", case / "work"
    for name in (*PRIVATE, *step.writes):
        (work / name).mkdir(exist_ok=True)
    os.environ.update({name: str(work / folder) for name, folder in FOLDERS.items()})
    import tempfile

    tempfile.tempdir = None
    os.chdir(work)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(notes / name, os.O_RDWR | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, encoding="utf-8") for number in (1, 2))  # noqa: SIM115
    sys.argv = ["spt", *step.arguments]
    sys.path[0] = str(work)
    forbidden = os.open(notes / "forbidden", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import spt.cli.guard as module
    import spt_cli

    real = module._fail

    def fail(message: str, code: int, *args: Any, **options: Any) -> Any:
        if code == 1:
            _note(notes / "trace", guard)
        return real(message, code, *args, **options)

    module._fail = fail  # type: ignore[assignment]
    guard = Guard(case, [work / name for name in (*PRIVATE, *step.writes)], forbidden)
    if fault is not None:
        plant(fault)
    if watched:
        guard.install()
    run_to_exit(spt_cli.main, lambda: _note(notes / "trace", guard))


def _note(path: Path, guard: Guard) -> None:
    active, guard.active = guard.active, False
    path.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
    guard.active = active


def snapshot(work: Path, but: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Size and time of every file, except below these folders: libraries that are not Python write past audit hooks."""
    found = {}
    for folder, folders, files in os.walk(work):
        inside = os.path.relpath(folder, work)
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(inside, name)) not in but]
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            kept = (status.st_size, status.st_mtime_ns) if name in files else (0, 0)
            found[os.path.normpath(os.path.join(inside, name))] = kept
    return found


def json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True)
