"""Checks of the installation. Each runs what it checks instead of only importing it."""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from spt.checks.model_contract import CheckResult
from spt.data.source import cache_dir, data_dir
from spt.errors import SptError, one_line
from spt.models.ops import backends
from spt.runtime.distributed import Runtime
from spt.runtime.environment import compiler_problem, environment, has_bf16_instructions
from spt.runtime.progress import forward_messages
from spt.runtime.scratch import scratch_folder
from spt.runtime.settings import Settings

OPTIONAL = {
    "flash_attn": "FlashAttention kernels",
    "triton": "Triton kernels",
    "pykeops": "KeOps kernels",
    "numba": "fast generators",
    "soundfile": "FLAC, Ogg and MP3 sounds",
    "wfdb": "WFDB recordings",
    "edfio": "EDF and BDF recordings",
}
VARIABLES = ("SPT_RUNS_DIR", "SPT_CACHE_DIR", "SPT_DATA_DIR", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")


def environment_report() -> dict[str, Any]:
    """The environment, to be pasted into an issue."""
    facts = environment()
    packages = facts.pop("packages")
    return {
        **facts,
        **packages,
        "optional": _optional({name: name for name in OPTIONAL}),
        "cache": str(cache_dir()),
        "data": str(data_dir()),
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def check_installation() -> list[CheckResult]:
    """From arithmetic to a whole comparison."""
    return [_timed(name, probe) for name, probe in PROBES.items()]


def _timed(name: str, probe: Callable[[], str]) -> CheckResult:
    start = time.perf_counter()
    try:
        detail = probe()
    except SptError as error:
        return CheckResult(name, False, str(error), error.exit_code)
    except Exception as error:
        return CheckResult(name, False, one_line(error), 4)
    return CheckResult(name, True, f"{detail} ({time.perf_counter() - start:.1f} s)")


def _torch() -> str:
    x = torch.randn(8, 8, requires_grad=True)
    (x @ x).sum().backward()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} on {device}"


def _attention() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(2, 2, 16, 8, device=device, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    if q.grad is None or not q.grad.isfinite().all():
        raise RuntimeError("its gradient is not finite")
    return f"{device}; {_backends('attention')}"


def _backends(choice: backends.Choice) -> str:
    return "; ".join(f"{name} {backends.probe(name, choice=choice) or 'works'}" for name in backends.NAMES[choice])


def _kernels() -> str:
    """On a GPU also what `auto` takes there, which is measured."""
    works = _backends("kernels")
    if not torch.cuda.is_available():
        return works
    device = f"cuda:{torch.cuda.current_device()}"
    takes = [name.replace("_", " ") for name in backends.TRITON if backends.prefers_triton(name, device)]
    return f"{works}; auto takes triton for {', '.join(takes) or 'nothing'}"


def _cache() -> str:
    from spt.config.recipe import Part
    from spt.data.dataset import open_task

    data = open_task(Part(name="digits"))
    return f"{len(data.train):,} digits in {cache_dir()}"


def _comparison() -> str:
    from spt.execution.estimate import MeasuredCosts
    from spt.execution.run_study import ExecutionTarget, run_study
    from spt.studies.grid import expand
    from spt.studies.schema import Compare

    problems: list[str] = []
    with (
        scratch_folder() as folder,
        forward_messages(problems.append),
    ):
        runtime = Runtime(Settings(quiet=True, debug=True))
        grid = expand(Compare(recipes=("quickstart",), seeds=2), True, MeasuredCosts(folder, runtime))
        _, failed = run_study(grid, folder, ExecutionTarget(), runtime)
        if failed:
            raise RuntimeError("; ".join(problems))
    return "recipe quickstart, smoke size, two seeds"


def _optional(labels: Mapping[str, str] = OPTIONAL) -> str:
    """Whether each optional package is installed, under these labels."""
    installed = {name: importlib.util.find_spec(name) is not None for name in labels}
    return ", ".join(f"{labels[name]} {'installed' if here else 'not installed'}" for name, here in installed.items())


def _slow() -> str:
    """What costs time here, and what it costs; none of it is an error."""
    found = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not has_bf16_instructions():
        found.append("this CPU has no bf16 instructions: precision: bf16 takes about twice as long as fp32")
    if (share := _share_of_processor()) < 0.85:
        found.append(
            f"other programs keep the processor busy: {share:.0%} of it is left, and training slows down alike"
        )
    if (problem := compiler_problem(device)) is not None:
        found.append(
            f"torch.compile cannot be used ({problem}): --compile has no effect, and where a C++ compiler is missing, "
            "--backend keops does not work either"
        )
    if importlib.util.find_spec("numba") is None:
        found.append(
            "numba is not installed: the rows of generated tasks (listops, pathfinder, …) take many times as long; "
            "pip install 'selfpretrain[generate]'"
        )
    return "; ".join(found) or "nothing"


def _share_of_processor(seconds: float = 0.2) -> float:
    """The share of the processor time that all threads of torch asked for, and got, while others ran as well."""
    x = torch.randn(768, 768)
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < 5 * seconds and best < 0.85:  # one slow moment, such as the first, is no load
        wall, cpu = time.perf_counter(), time.process_time()
        while (passed := time.perf_counter() - wall) < seconds:
            x @ x
        best = max(best, (time.process_time() - cpu) / passed / torch.get_num_threads())
    return min(best, 1.0)


PROBES: dict[str, Callable[[], str]] = {
    "torch computes": _torch,
    "fused attention, forward and backward": _attention,
    "kernels of state-space models, forward and backward": _kernels,
    "prepared data can be kept": _cache,
    "both arms, end to end": _comparison,
    "optional packages": _optional,
    "what is slow here": _slow,
}
