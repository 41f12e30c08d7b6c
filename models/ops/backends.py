"""Which library computes the large sums of state-space kernels: torch, or KeOps.

`torch` is always there, is the default and is what the tests trust: blocked products, a few tables of memory. `keops`
(the extra `keops`) compiles a kernel that holds nothing but its answer; on a CPU it is far slower. A backend counts as
usable once a small sum has run on the device in question, forward and backward: KeOps can be imported and still fail
there (state-spaces/s4 issue 17).

The choice is the process's: it says how a model runs, not what it computes.
"""

import functools
import importlib
import os
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import torch

Name = Literal["torch", "keops"]
NAMES: tuple[Name, ...] = get_args(Name)
_chosen: Name = "torch"


class Unavailable(RuntimeError):
    """A backend that does not exist or does not run here; one sentence says which and why."""


class Row(NamedTuple):
    """A backend in a report."""

    name: str
    chosen: bool
    problem: str | None  # None: it works


def current() -> Name:
    """The backend in use."""
    return _chosen


class use:
    """Take a backend from now on; as a context manager, until its end.

    Raises `Unavailable` where it does not work, and leaves the choice as it was.
    """

    def __init__(self, name: str) -> None:
        global _chosen
        found = next((known for known in NAMES if known == name), None)
        if found is None:
            raise Unavailable(f"there is no kernel backend {name!r}; choose among {', '.join(NAMES)}")
        if problem := probe(found):
            raise Unavailable(f"the kernel backend {name} does not work here: {problem}")
        self._before = _chosen
        _chosen = found

    def __enter__(self) -> "use":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _chosen
        _chosen = self._before


def probe(name: str, device: str | None = None) -> str | None:
    """Why a backend does not work on a device (by default the GPU, where there is one), or None where it does.

    The first probe of `keops` compiles, which takes up to a minute; later ones find the result.
    """
    if name not in NAMES:
        return f"there is no such backend; choose among {', '.join(NAMES)}"
    return None if name == "torch" else _probe_keops(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def report(device: str | None = None) -> list[Row]:
    """Every backend, probed: for `spt doctor`."""
    return [Row(name, name == _chosen, probe(name, device)) for name in NAMES]


def keops() -> Any:
    """The module `pykeops.torch`, without what it says on standard output.

    Raises `ImportError` where it is absent.
    """
    for name in ("PYKEOPS_VERBOSE", "KEOPS_VERBOSE"):
        os.environ.setdefault(name, "0")
    return importlib.import_module("pykeops.torch")


@functools.cache
def _probe_keops(device: str) -> str | None:
    try:
        module = keops()
    except Exception as error:
        return f"pykeops cannot be imported ({_brief(error)}); pip install 'selfpretrain[keops]'"
    try:
        x, y = (torch.linspace(0, 1, n, device=device).requires_grad_() for n in (3, 4))
        found = (module.LazyTensor(x[:, None, None]) * module.LazyTensor(y[None, :, None])).exp().sum(dim=1)
        found.sum().backward()
        wanted = torch.exp(x * y[:, None]).sum(0)
        slope = (y[:, None] * torch.exp(x * y[:, None])).sum(0)
        if not (torch.allclose(found[:, 0], wanted) and torch.allclose(x.grad, slope)):  # type: ignore[arg-type]
            return f"its answer to a small sum on {device} is wrong"
    except Exception as error:  # whatever a compiler or a driver may say
        return f"a small sum on {device} failed ({_brief(error)}); KeOps needs a C++ compiler, and nvcc for a GPU"
    return None


def _brief(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
