"""`spt bench op`: single operations, back end by back end."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spt.bench.cases import OPERATIONS
from spt.bench.peaks import KilledError, peaks_in_subprocess
from spt.bench.timing import (
    Clock,
    Times,
    alternate,
    check_backends,
    conditions,
    memory_growth,
    parse_choices,
)
from spt.config.overrides import parse_overrides, split_arguments
from spt.errors import BackendError, UsageError, did_you_mean
from spt.models.ops import backends
from spt.runtime.distributed import Runtime
from spt.runtime.memory import out_of_memory
from spt.runtime.settings import Settings
from spt.training.seeding import seeded


@dataclass(frozen=True)
class Case:
    """A row of `spt bench op`; the back end `plain` is the formula as written."""

    operation: str
    sizes: dict[str, int]
    backend: str
    cpu: bool = False


class Trial:
    """Forward and backward pass of one operation, with a fixed random output gradient."""

    def __init__(self, case: Case, double: bool = False) -> None:
        self.case, self.operation = case, OPERATIONS[case.operation]
        device = Runtime(Settings(quiet=True, cpu=case.cpu)).device
        with seeded(0, "bench", case.operation):
            drawn = self.operation.inputs(case.sizes)
        kinds = (torch.float64, torch.complex128) if double else (torch.float32, torch.complex64)
        self.inputs = tuple(x.to(device, kinds[x.is_complex()]).requires_grad_() for x in drawn)
        self.gradient: Tensor | None = None
        self.clock = Clock(device)

    def results(self) -> tuple[Tensor, ...]:
        """The result and the gradients of the inputs."""
        with backends.use("torch" if self.case.backend == "plain" else self.case.backend):
            y = self._forward()
            return (y, *torch.autograd.grad(y, self.inputs, self._gradient_of(y)))

    def __call__(self) -> Times:
        with backends.use("torch" if self.case.backend == "plain" else self.case.backend):
            began = self.clock()
            y = self._forward()
            forward = self.clock()
            torch.autograd.grad(y, self.inputs, self._gradient_of(y))
            return Times(forward - began, self.clock() - forward)

    def _forward(self) -> Tensor:
        how = self.operation.plain if self.case.backend == "plain" else self.operation.ours
        return how(self.case.sizes, self.inputs)

    def _gradient_of(self, y: Tensor) -> Tensor:
        if self.gradient is None:
            with seeded(0, "bench", "gradient"):
                self.gradient = torch.randn(y.shape, dtype=torch.complex64 if y.is_complex() else torch.float32).to(y)
        return self.gradient


def peak_of_operation(case: Case) -> int:
    Trial(replace(case, sizes=OPERATIONS[case.operation].small))()  # loads libraries, starts threads
    trial = Trial(case)
    return memory_growth(trial.clock.device, trial)


def parse_operations(
    arguments: Iterable[str], *, backend: str = "plain,torch", quick: bool = False, cpu: bool = False
) -> list[Case]:
    """The rows of a command line: each operation (all, if none is named) with each of its back ends."""
    names, changes = split_arguments(arguments)
    for name in names:
        if name not in OPERATIONS:
            raise UsageError(f"unknown operation {name!r}{did_you_mean(name, OPERATIONS)}")
    chosen = names or list(OPERATIONS)
    sizes = {key: _size(key, value) for key, value in parse_overrides(changes).items()}
    known = {letter for name in chosen for letter in OPERATIONS[name].sizes}
    for key in sizes:
        if key not in known:
            raise UsageError(f"{key} is not a size of {', '.join(chosen)}{did_you_mean(key, known)}")
    backend_names = parse_choices(backend, ("plain", *backends.NAMES["kernels"]), "--backend")
    rows = []
    for name in chosen:
        operation = OPERATIONS[name]
        chosen_sizes = {
            key: sizes.get(key, size) for key, size in (operation.small if quick else operation.sizes).items()
        }
        rows += [
            Case(name, chosen_sizes, backend_name, cpu)
            for backend_name in backend_names
            if backend_name in ("plain", "auto", "torch", *operation.libraries)
        ]
    if not rows:
        raise UsageError(f"--backend {backend}: cannot compute {', '.join(chosen)}")
    return rows


def _size(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{key}={value}: expected a whole number of at least 1")
    return value


def bench_operations(cases: Sequence[Case], rounds: int) -> dict[str, Any]:
    """What `spt bench op` prints, as plain data. Ratios are to an operation's first back end."""
    device = Runtime(Settings(quiet=True, cpu=cases[0].cpu)).device
    check_backends({case.backend for case in cases} - {"plain"}, "kernels", device)
    try:
        if device.type == "cpu":
            peaks = peaks_in_subprocess([asdict(case) for case in cases])
        else:
            peaks = [peak_of_operation(case) for case in cases]
        rows: list[dict[str, Any]] = []
        for name in dict.fromkeys(case.operation for case in cases):
            indices = [i for i, case in enumerate(cases) if case.operation == name]
            trials = [Trial(cases[i]) for i in indices]
            exact = Trial(cases[indices[0]], double=True).results()
            errors = [_errors(trial.results(), exact) for trial in trials]
            timings = alternate(trials, rounds)
            for i, error, timing in zip(indices, errors, timings, strict=True):
                peak, base = peaks[i], peaks[indices[0]]
                rows.append(
                    {
                        **asdict(cases[i]),
                        "seconds": timing.seconds(),
                        "step_quartiles": timing.quartiles(),
                        "steps": sum(map(len, timing.rounds)),
                        "ratio": timing.ratios(timings[0]),
                        "peak_bytes": peak,
                        "peak_ratio": peak / base if peak is not None and base else None,
                        "error": error[0],
                        "gradient_error": error[1],
                    }
                )
    except Exception as error:
        if isinstance(error, KilledError) or out_of_memory(error):
            raise BackendError("operations of these sizes do not fit into memory; use smaller ones") from error
        raise
    return {"kind": "op", **conditions(device, rounds), "rows": rows}


def _errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Largest error of the result and of any gradient, each relative to the largest entry."""
    errors = [
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-30))
        for a, b in zip(results, exact, strict=True)
    ]
    return errors[0], max(errors[1:])
