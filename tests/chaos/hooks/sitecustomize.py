"""What the chaos program puts into every process of a command under test; the product knows nothing of it.

Python imports a module of this name when it starts, wherever PYTHONPATH leads to it; a forked command calls `install`.
The variable CHAOS holds a JSON object:

    roots     folders whose files are watched
    watch     [phase, count, file]: at the count-th event of this phase, leave the process's number in the file and stop
    events    a file that gets one line an event: how many there are is measured by an undisturbed command
    synced    a file that gets `inode size modified` of each file that is fsynced
    clock     seed of jumps of the wall clock
    plant     at a resume, drop the optimizer's state: a fault, which the program has to find

Time that trainings take is 0 here, so that reports of two days can be compared byte for byte.
"""

import json
import os
import random
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

ORDER = ("checkpoints", "result.json", "predictions.parquet", "study.json", "study.yaml", "report.", "seeds.csv")
PHASES = ("import", "data", "plan", "folder", "training", "evaluation", "checkpoint", "result", "report")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")

_seen: dict[str, int] = {}


def install() -> None:
    settings = json.loads(os.environ.get("CHAOS") or "{}")
    if not settings:
        return
    roots = tuple(settings.get("roots", ()))
    _patch_when_loaded(settings)
    if settings.get("synced"):
        _record_syncs(settings["synced"])
    if "clock" in settings:
        _make_clock_jump(random.Random(settings["clock"]))
    if settings.get("watch") or settings.get("events"):
        _watch(roots, settings)


def _watch(roots: tuple[str, ...], settings: dict[str, Any]) -> None:
    busy = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy:
            return
        if event == "import":
            phase: str | None = "import"
        elif event == "open":
            path, _, flags = arguments
            writes = flags & WRITES if isinstance(flags, int) else False
            phase = _phase(path, roots) if writes else None
        else:
            phase = _phase(arguments[0], roots) if event in CHANGES else None
        if phase is not None:
            busy = True
            try:
                reach(phase, settings)
            finally:
                busy = False

    sys.addaudithook(audit)


def _phase(path: object, roots: tuple[str, ...]) -> str | None:
    try:
        text = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
    except TypeError:  # a file descriptor
        return None
    if not text.startswith(roots):
        return None
    if "/cache/" in text:
        return "data"
    name = next((name for name in ORDER if name in text), "")
    known = {"checkpoints": "checkpoint", "result.json": "result", "predictions.parquet": "result"}
    return known.get(name) or {"study": "plan", "repor": "report", "seeds": "report"}.get(name[:5], "folder")


def reach(phase: str, settings: dict[str, Any]) -> None:
    """An event of this phase is about to happen."""
    _seen[phase] = _seen.get(phase, 0) + 1
    if settings.get("events"):
        _append(settings["events"], phase)
    watched = settings.get("watch")
    if watched and [phase, _seen[phase]] == watched[:2]:
        own = f"{watched[2]}.{os.getpid()}"
        _append(own, str(os.getpid()))
        try:
            os.link(own, watched[2])  # whole, and by the first process that comes here
        except FileExistsError:
            return
        if settings.get("stops", True):
            os.kill(os.getpid(), signal.SIGSTOP)


def _append(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def _record_syncs(path: str) -> None:
    real = os.fsync

    def fsync(file: Any) -> None:
        real(file)
        status = os.fstat(file if isinstance(file, int) else file.fileno())
        _append(path, f"{status.st_ino} {status.st_size} {status.st_mtime_ns}")

    os.fsync = fsync


def _make_clock_jump(chance: random.Random) -> None:
    """Every few readings the wall clock is put forward or back, by up to two days."""
    real, offset, left = time.time, 0.0, chance.randint(1, 20)

    def read() -> float:
        nonlocal offset, left
        left -= 1
        if left <= 0:
            offset, left = chance.uniform(-172_800, 172_800), chance.randint(1, 20)
        return real() + offset

    time.time = read
    time.time_ns = lambda: int(read() * 1e9)


def _patch_when_loaded(settings: dict[str, Any]) -> None:
    """Change modules of spt once they have been imported: when they have the last name in their file."""

    def loop(module: Any) -> None:
        module.time = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic)
        module.peak_memory = lambda device: 0
        _before(module, "evaluate", "evaluation", settings)
        _before(module.Learner, "step", "training", settings)
        if settings.get("plant"):
            _drop_optimizer_state(module)

    def study(module: Any) -> None:
        module.command_line = lambda: "spt"  # the same, however a study is carried out

    changes = {
        ("spt.training.loop", "time_steps"): loop,
        ("spt.training.stage", "_record_failure"): lambda module: _before(module, "evaluate", "evaluation", settings),
        ("spt.execution.run_study", "_same"): study,
    }

    def patch(*_: object) -> None:
        for (name, last), change in list(changes.items()):
            if hasattr(sys.modules.get(name), last) and changes.pop((name, last), None):
                change(sys.modules[name])

    sys.addaudithook(patch)
    patch()


def _before(owner: Any, name: str, phase: str, settings: dict[str, Any]) -> None:
    real = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        reach(phase, settings)
        return real(*arguments, **named)

    setattr(owner, name, wrapped)


def _drop_optimizer_state(loop: Any) -> None:
    real = loop.resume

    def resume(run: Any, runtime: Any) -> Any:
        state = real(run, runtime)
        for optimizer in runtime.accelerator._optimizers:
            optimizer.optimizer.state.clear()
        return state

    loop.resume = resume


install()
