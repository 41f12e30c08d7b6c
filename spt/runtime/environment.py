"""What a result depends on besides its recipe: versions, commit, device."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from spt import __version__
from spt.errors import hide_assigned_secrets, one_line

INSTRUCTIONS = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "neon", "sve", "bf16", "sve_bf16")  # that decide speed
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "pydantic", "numpy")


@cache
def compiler_problem(device: str) -> str | None:
    """Why torch.compile cannot be used here, found out by using it, forward and backward; None where it can."""
    try:
        x = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda y: (y.sin() * y).sum())(x).backward()
    except Exception as error:  # whatever is raised by a compiler that is missing, broken or too old
        return one_line(error)
    return None


def _capabilities() -> Mapping[str, Any]:
    """What torch can tell of this CPU; nothing before torch.cpu.get_capabilities was there."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def has_bf16_instructions(capabilities: Mapping[str, Any] | None = None) -> bool:
    """Does this CPU multiply bfloat16 itself? Without, every product is converted to float32 and back, and bf16 is
    slower than fp32. Where torch cannot tell, it is taken to."""
    found = _capabilities() if capabilities is None else capabilities
    return not found or any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def environment(device: torch.device | None = None, processes: int = 1) -> dict[str, Any]:
    """What a result depends on besides the recipe, as far as it can be named; by default for the best device here."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cpu = _capabilities()
    return {
        "spt": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": _packages(),
        "cpu": cpu.get("cpu_name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "instructions": " ".join(name for name in INSTRUCTIONS if cpu.get(name)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": processes,
        "threads": torch.get_num_threads(),
    }


@cache
def _packages() -> dict[str, str]:
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


_asked_by: str | None = None  # in a worker, the command that started it


def work_for(command: str) -> None:
    """This process makes runs that another command asked for: they are recorded as that one's."""
    global _asked_by
    _asked_by = command


def command_line() -> str:
    """The command, or the program that used the Python API, without secrets; nothing for an interactive session."""
    if _asked_by is not None:
        return _asked_by
    program, arguments = Path(sys.argv[0]).name, [hide_assigned_secrets(each) for each in sys.argv[1:]]
    if program in ("spt", "spt.exe", "spt_cli.py", "__main__.py"):
        return shlex.join(["spt", *arguments])
    return shlex.join(["python", program, *arguments]) if program.endswith(".py") else ""


@cache
def _commit() -> str | None:
    """The checkout's commit, `+` when files differ from it; None for an installed copy. As it was when first asked:
    this process's code is what it was then."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        quiet = {
            "capture_output": True,
            "text": True,
            "timeout": 5,
            "check": True,
            "env": {**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        }
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], **quiet).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], **quiet).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}{'+' if changed else ''}"
