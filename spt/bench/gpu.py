"""`spt bench gpu`: what is asked of a GPU that has not run this code before, as one command that can be stopped and
goes on.

It is a list of commands, each in a process of its own with a limit, so that one that fails or hangs takes nothing else
with it; the last, the comparison on LRA Image, gets what remains of the time. All output lies in one folder: a log and
a JSON file for each command, gpu.json (what is done) and summary.md.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spt.bench.gpu_summary import summary
from spt.errors import BackendError, DataError, UsageError
from spt.runs.files import write_json, write_text
from spt.runtime.distributed import Runtime
from spt.runtime.environment import environment
from spt.runtime.settings import Settings
from spt.runtime.signals import cleanup

FILE, SUMMARY, STUDY = "gpu.json", "summary.md", "lra-image"
RECIPES = ("lra/image-transformer", "lra/image-s4")
ARMS = 2  # scratch, and half of the budget to pretraining
RESERVE = 0.75  # of the time that remains, what the study's runs train for; the rest is starting and evaluation
PATIENCE = 20.0  # seconds that a command has to save what it did, once its time is over
LEAST = 60.0  # seconds of training that a run of the study is worth starting for
ROOT = Path(__file__).resolve().parents[2]  # of a checkout, which has the tests

Status = str  # done, failed, cut off


class Command(NamedTuple):
    """One of the list; its log is NAME.log, its result NAME.json."""

    name: str
    title: str
    arguments: tuple[str, ...]  # of python
    limit: float  # seconds


class Record(BaseModel):
    """What became of a command."""

    model_config = ConfigDict(extra="forbid")
    title: str
    arguments: tuple[str, ...] = Field(strict=False)
    status: Status
    exit_code: int | None
    seconds: float


class State(BaseModel):
    """gpu.json. `seconds` is all the time that was spent, in every sitting."""

    model_config = ConfigDict(extra="forbid")
    quick: bool
    cpu: bool
    recipes: tuple[str, ...] = Field(strict=False)
    environment: dict[str, Any]
    seconds: float = 0.0
    study_seconds: float | None = None  # that each run of the study trains for
    commands: dict[str, Record] = Field(default_factory=dict)


class Sizes(NamedTuple):
    """Of a row of step times."""

    name: str
    arguments: tuple[str, ...]


# The sizes of the published recipes: sequential CIFAR-10, Pathfinder-X.
IMAGE = ("--layers", "6", "--width", "512", "--length", "1024", "--batch", "50")
PATHX = ("--layers", "6", "--width", "256", "--length", "16384", "--batch", "32")
STEPS = (
    *(Sizes(f"image-{name}", (name, *IMAGE)) for name in ("s4", "s4d", "dss", "dlr", "s5", "lru", "mega", "mamba")),
    Sizes(
        "image-transformer",
        ("transformer", "n_heads=4", "--layers", "3", "--width", "64", "--length", "1024", "--batch", "50"),
    ),
    *(Sizes(f"pathx-{name}", (name, *PATHX)) for name in ("s4", "s5", "dlr")),
    Sizes(
        "pathx-transformer",
        ("transformer", "n_heads=4", "window=4096", *("--layers", "4", "--width", "128", *PATHX[4:])),
    ),
)
RECORDED = ("s4", "s4d", "dss", "dlr")  # also with their kernels as CUDA graphs
OPERATIONS = (
    Sizes("kernels", ("vandermonde", "vandermonde_shared", "dplr_krylov", "dplr_cauchy", "H=512")),
    Sizes("scan", ("scan", "scan_varying", "B=16", "P=192")),
    Sizes("attention", ("attention", "local_attention", "rotary")),
    Sizes("convolution", ("convolution", "B=50", "H=512")),
)

BY_TRITON = Sizes(  # a command of its own, since all of its rows are refused where Triton does not work
    "triton",
    (
        *("vandermonde", "vandermonde_shared", "dplr_cauchy", "scan", "scan_varying"),
        *("H=512", "B=16", "P=192", "--backend", "torch,triton"),
    ),
)


def commands(state: State, folder: Path) -> Iterator[Command]:
    """All but the study, in the order in which their answers are wanted."""

    def spt(name: str, title: str, limit: float, *arguments: str, save: bool = True) -> Command:
        saved = ("--save", str(folder / f"{name}.json")) if save else ()
        return Command(name, title, ("-m", "spt_cli", *arguments, *saved), limit)

    cpu, quick = (("--cpu",) if state.cpu else ()), (("--quick",) if state.quick else ())
    yield spt("doctor", "the installation", 180.0, "doctor", save=False)
    yield spt("device", "what the device reaches", 60.0, "bench", "device", *cpu, *quick)
    if not state.cpu and (ROOT / "tests" / "conftest.py").is_file():
        marked = ("-m", "pytest", str(ROOT / "tests"), "-m", "gpu or flash", "--quiet", "-p", "no:cacheprovider")
        yield Command("tests", "tests that need a GPU", (*marked, f"--junitxml={folder / 'tests.xml'}"), 420.0)
    models = ("mingru", "--length", "32") if state.quick else ()
    yield spt("rounding", "every model against its own float64", 240.0, "check", "rounding", *models, *cpu)
    for sizes in STEPS[:2] if state.quick else STEPS:
        arguments = (sizes.arguments[0], *quick) if state.quick else sizes.arguments
        precision = ("--precision", "fp32,bf16" if state.cpu else "fp32,tf32,bf16")
        title = f"training steps: {sizes.name}"
        yield spt(f"step-{sizes.name}", title, 90.0, "bench", "model", *arguments, *precision, *cpu)
    if not state.cpu:
        arguments = (*RECORDED, *(("--quick",) if state.quick else IMAGE), "--cuda-graphs")
        yield spt("step-graphs", "training steps: kernels as CUDA graphs", 120.0, "bench", "model", *arguments)
    for sizes in OPERATIONS[:1] if state.quick else OPERATIONS if state.cpu else (*OPERATIONS, BY_TRITON):
        arguments = (sizes.arguments[0], *quick) if state.quick else sizes.arguments
        yield spt(f"op-{sizes.name}", f"operations: {sizes.name}", 90.0, "bench", "op", *arguments, *cpu)


def study(state: State, folder: Path) -> Command:
    """Both arms of the recipes, matched on the time that they train."""
    assert state.study_seconds is not None
    asked = ("-m", "spt_cli", "study", "compute", *state.recipes, "--seeds", "1", "--shares", "0,0.5", "--jobs", "1")
    size = ("--smoke",) if state.quick else ("--match", "time", "--total", f"{state.study_seconds:.0f}")
    cpu = ("--cpu",) if state.cpu else ()
    title = f"both arms of {', '.join(state.recipes)}"
    return Command(STUDY, title, (*asked, *size, *cpu, "--out", str(folder / STUDY)), float("inf"))


def bench_gpu(
    folder: Path,
    minutes: float,
    recipes: Sequence[str],
    *,
    quick: bool = False,
    cpu: bool = False,
    tell: Callable[[str], object] = print,
) -> State:
    """Carry out what is not done yet in `folder`, and write its summary after every command.

    `minutes` are for all sittings together. Raises BackendError where there is no GPU (unless `cpu`), UsageError for a
    folder of other settings, DataError for one that is damaged.
    """
    device = Runtime(Settings(quiet=True, cpu=cpu)).device
    if device.type != "cuda" and not cpu:
        raise BackendError("no CUDA GPU is here; --cpu measures the CPU instead, --cpu --quick rehearses in a minute")
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(folder, State(quick=quick, cpu=cpu, recipes=tuple(recipes), environment=environment(device)))

    def left() -> float:
        return minutes * 60 - state.seconds

    _save(state, folder)
    for command in commands(state, folder):
        if _is_done(state, command):
            continue
        if left() < 1:
            break
        _carry_out(command, state, folder, min(command.limit, left()), tell)
    else:
        if state.study_seconds is None:
            state.study_seconds = RESERVE * left() / (ARMS * len(recipes))
        if state.study_seconds < LEAST and not quick:
            tell(f"{STUDY}: {state.study_seconds:.0f} s for a run are too few; give more --minutes")
            state.study_seconds = None
        elif not _is_done(state, command := study(state, folder)) and left() > 1:
            _carry_out(command, state, folder, left(), tell)
    _save(state, folder)
    return state


def _state(folder: Path, new: State) -> State:
    """What earlier sittings did, or the new one."""
    path = folder / FILE
    if not path.is_file():
        return new
    try:
        old = State.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, ValueError) as error:
        raise DataError(f"{path} is damaged; name another folder, or delete it to start over") from error
    for name in ("quick", "cpu", "recipes"):
        if getattr(old, name) != getattr(new, name):
            raise UsageError(f"{folder} was begun with other {name}: {getattr(old, name)}; name another folder (--out)")
    if old.environment["device"] != new.environment["device"]:
        raise UsageError(
            f"{folder} was begun on another device, {old.environment['device']}; name another folder (--out)"
        )
    return old


def _is_done(state: State, command: Command) -> bool:
    """A command that failed is tried again in another sitting; one that was cut off at its own limit is not."""
    record = state.commands.get(command.name)
    return record is not None and (record.status == "done" or (record.status == "cut off" and record.exit_code is None))


def _carry_out(command: Command, state: State, folder: Path, limit: float, tell: Callable[[str], object]) -> None:
    tell(f"{command.title} …")
    began = time.perf_counter()

    def stopped(_: object) -> None:  # its time was used all the same
        state.seconds += time.perf_counter() - began
        _save(state, folder)

    with (folder / f"{command.name}.log").open("wb") as log, cleanup(stopped):
        code = _run(command.arguments, log, limit)
    seconds = time.perf_counter() - began
    status = "cut off" if code is None else "failed" if code else "done"
    own = code is None and limit >= command.limit  # else the time was over, and another sitting may have more
    if code is None and not own:
        code = -signal.SIGKILL
    state.seconds += seconds
    record = Record(title=command.title, arguments=command.arguments, status=status, exit_code=code, seconds=seconds)
    state.commands[command.name] = record
    _save(state, folder)
    tell(f"  {status}, {seconds:.0f} s")


def _run(arguments: Sequence[str], log: Any, limit: float) -> int | None:
    """The exit code; None where the limit ended it, with all processes that it had started."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )

    def send(number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

    with cleanup(lambda _: send(signal.SIGTERM)):  # a study keeps what it has
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            send(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            send(signal.SIGKILL)
            process.wait()
            return None


def _save(state: State, folder: Path) -> None:
    write_json(folder / FILE, state.model_dump(mode="json"))
    write_text(folder / SUMMARY, summary(json.loads(state.model_dump_json()), folder, STUDY))
