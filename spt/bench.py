"""`spt bench`: what a training step, a single operation or a task's data cost on this machine.

What is compared is measured in one process, in turn, round after round, so that whatever else the machine does strikes
all alike. Figures are medians; a ratio is the median of the rounds' own ratios to the first row. Nothing is judged.

A *step* is that of training, of the backbone alone: forward pass in training mode, backward pass from a fixed random
gradient, clipping and AdamW with the groups that the model declares. Learning rates are 0, so that the weights stay as
they are and every step does the same work.

*Peak memory* is what two steps need beyond the weights and one batch. CPU: growth of resident memory, found in a
process of its own for each row, after one short sequence has loaded what is loaded once. GPU: the allocator's count.

*Shares* come from further steps under torch.profiler: every operation's own time goes to one part (`PARTS`), that of
the innermost thing around it that says what it is. Backward operations follow the forward operation that asked for
them. What lies between operations (Python, the autograd engine, the recording itself, fused code of torch.compile) is
`other`; the shares of a model whose step takes a few milliseconds tell of little else.
"""

import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import CDLL
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from spt.batch import by_length, collate, training_rows
from spt.compute import peak_memory, reset_peak_memory
from spt.errors import BackendError, RecipeError, SptError, UsageError, brief, did_you_mean
from spt.models.base import Context
from spt.models.longconv import kernels_held
from spt.models.ops import backends
from spt.models.ops.counts import as_counts
from spt.objectives import OBJECTIVES
from spt.operations import OPERATIONS
from spt.optim import adamw
from spt.recipe import Part, Train, complaints, parse_overrides, split_arguments
from spt.runtime import Runtime, Settings, compiler_problem, environment, out_of_memory
from spt.seeding import Draw, seeded
from spt.tasks.base import Split, TaskData

Say = Callable[[str], None]
Precision = Literal["fp32", "bf16"]
PARTS = ("kernel", "convolution", "scan", "attention", "linear", "pointwise", "optimiser", "other")


# ------------------------------------------------------------------------------------------------------- measuring


class Times(NamedTuple):
    """Seconds of one step, part by part."""

    forward: float
    backward: float
    optimiser: float = 0.0

    @property
    def step(self) -> float:
        return sum(self)


Run = Callable[[], Times]


class Measured(NamedTuple):
    """Of one row: its steps in every round."""

    rounds: list[list[Times]]

    def median(self, part: str) -> float:
        return statistics.median(getattr(times, part) for steps in self.rounds for times in steps)

    def quartiles(self) -> tuple[float, float]:
        steps = [times.step for steps in self.rounds for times in steps]
        low, _, high = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else steps * 3
        return low, high

    def ratio(self, first: "Measured", part: str) -> float | None:
        """To the first row; each round is compared with itself. None for a part that takes no time."""
        pairs = zip(self.rounds, first.rounds, strict=True)
        rounds = [(_median(mine, part), _median(theirs, part)) for mine, theirs in pairs]
        return statistics.median(a / b for a, b in rounds) if all(b > 0 for _, b in rounds) else None

    def seconds(self) -> dict[str, float]:
        return {part: self.median(part) for part in (*Times._fields, "step")}

    def ratios(self, first: "Measured") -> dict[str, float | None]:
        return {part: self.ratio(first, part) for part in (*Times._fields, "step")}


def _median(steps: list[Times], part: str) -> float:
    return statistics.median(getattr(times, part) for times in steps)


def alternate(runs: Sequence[Run], rounds: int, say: Say, least: float = 0.05) -> list[Measured]:
    """Every run in turn, the other way round in every second round; a short one several times, for `least` seconds."""
    counts = []
    for run in runs:
        seconds = run().step  # with what is done once: libraries, plans, compilation
        seconds = run().step if seconds < 1 else seconds
        counts.append(max(1, min(50, round(least / max(seconds, 1e-6)))))
    found: list[Measured] = [Measured([]) for _ in runs]
    began = time.perf_counter()
    for i in range(rounds):
        order = range(len(runs)) if i % 2 == 0 else reversed(range(len(runs)))
        for which in order:
            found[which].rounds.append([runs[which]() for _ in range(counts[which])])
        spent = time.perf_counter() - began
        if i == 0 and spent * rounds > 20:
            say(f"{rounds} rounds of about {spent:.0f} s each")
    return found


class Clock:
    """Seconds, once the device has done what it was asked to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _growth(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that `run` needs at most beyond those in use now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        CDLL("libc.so.6").malloc_trim(0)  # freed memory that glibc keeps would not be seen to be used again
    reset_peak_memory(device)
    before = peak_memory(device)
    run()
    return max(0, peak_memory(device) - before)


class _Killed(Exception):
    """The process that measured a peak was ended from outside, as a kernel short of memory does."""


def _elsewhere(jobs: list[dict[str, Any]]) -> list[int | None]:
    """The peaks of these jobs, found one after the other by a process of their own; None where it failed."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        "PYTHONSAFEPATH": "1",  # a numpy.py lying about here is not to be imported
    }
    command = [sys.executable, "-m", "spt.bench"]
    done = subprocess.run(command, input=json.dumps(jobs), env=environ, capture_output=True, text=True)
    if done.returncode < 0:
        raise _Killed
    if done.returncode:  # the same will happen here, where it is told
        return [None for _ in jobs]
    peaks: list[int | None] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def _answer() -> None:
    """The process of `_elsewhere`."""
    jobs = json.load(sys.stdin)
    peaks = [peak_of_step(Variant(**job)) if "model" in job else peak_of_operation(Case(**job)) for job in jobs]
    sys.stdout.write(f"\n{json.dumps(peaks)}\n")


# ----------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Variant:
    """A row of `spt bench model`."""

    model: str
    options: dict[str, Any]  # complete
    length: int
    batch: int
    precision: str = "fp32"
    backend: str = "torch"
    attention: str = "auto"
    compiled: bool = False
    recompute: bool = False
    cpu: bool = False
    given: str = ""  # what the command line said of this model alone


class Step:
    """One training step of a variant; returns what its parts took."""

    def __init__(self, variant: Variant, say: Say = lambda text: None) -> None:
        from spt.stages import build_backbone

        self.variant = variant
        self.runtime = Runtime(Settings(quiet=True, cpu=variant.cpu, recompute=variant.recompute))
        device = self.runtime.device
        with seeded(0, "bench"):
            self.model = build_backbone(Part(name=variant.model, **variant.options), variant.length)
            shape = (variant.batch, variant.length, variant.options["d_model"])
            self.x, self.gradient = torch.randn(shape).to(device), torch.randn(shape).to(device)
        self.model.to(device).train().recompute = variant.recompute
        train = Train(steps=1, batch_size=variant.batch, learning_rate=1e-3, weight_decay=0.01)
        self.optimizer = adamw(self.model, train, device)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if variant.compiled:
            self.runtime.compile(self.model, say)
        self.clock = Clock(device)

    def __call__(self, length: int | None = None, batch: int | None = None, optimise: bool = True) -> Times:
        """On the beginning of the batch, if so asked; the optimiser's part can be left out."""
        x, gradient = self.x[:batch, :length], self.gradient[:batch, :length]
        context = Context(torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), padded=False)
        held = kernels_held(self.model, x.shape[1]) if self.variant.recompute else contextlib.nullcontext(lambda: None)
        device = self.clock.device.type
        with (
            backends.use(self.variant.backend, "kernels", device),
            backends.use(self.variant.attention, "attention", device),
        ):
            began = self.clock()
            with held as last:
                last()
                with self.runtime.autocast(self.variant.precision):
                    y = self.model(x, context)
                forward = self.clock()
                y.backward(gradient.to(y.dtype))
            backward = self.clock()
            if optimise:
                with record_function(f"{SCOPE}optimiser"):
                    nn.utils.clip_grad_norm_(self.parameters, 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
            else:
                self.model.zero_grad(set_to_none=True)
            return Times(forward - began, backward - forward, self.clock() - backward)

    def operations(self) -> float:
        """Analytic, of one step, as runs count them."""
        length = self.variant.length
        own, shared = as_counts(self.model.flops(length)), as_counts(self.model.shared_flops(length))
        return (self.variant.batch * own + shared).total


def peak_of_step(variant: Variant) -> int:
    step = Step(variant)

    def twice() -> None:  # the second step has AdamW's state beside the activations
        step()
        step()

    if variant.compiled:
        step(optimise=False)
    else:
        step(length=16, batch=1, optimise=False)  # libraries, threads
    return _growth(step.clock.device, twice)


# ----------------------------------------------------------------------------------------------------------- shares

SCOPE = "spt::"  # our marks in a recording
FUNCTIONS = {  # autograd functions, by the module of spt.models.ops that defines them
    "convolution": "convolution",
    "vandermonde": "kernel",
    "dplr": "kernel",
    "scan": "scan",
    "attention": "attention",
}
NAMED = {  # operations, by name
    "convolution": re.compile(r"aten::.*(fft|conv(olution|\d?d)\b|_conv|conv_)"),
    "attention": re.compile(r".*(scaled_dot_product|atten[dt]|flash_attn)", re.I),
    "scan": re.compile(r"aten::(_?\w*(gru|lstm|rnn)\w*|cum(sum|prod))\b"),
}
LINEAR = {
    f"aten::{name}" for name in ("linear", "matmul", "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addmv")
}
WHOLE = {"kernel", "convolution", "scan", "attention"}  # with all that is done within them
NODE = "autograd::engine::evaluate_function"


def shares(step: Step, seconds: float) -> dict[str, float]:
    """The parts' shares of a step that takes about `seconds`; they sum to 1."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its beginning and end
    cuda = step.clock.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with _kernels_marked(step.model), profile(activities=activities) as recorded:
        began = step.clock()
        for _ in range(max(1, min(5, round(0.1 / seconds)))):
            step()
        wall = step.clock() - began
    events = [e for e in recorded.events() if e.device_type.name == "CPU" and not e.is_async]
    finder = _Finder(events)
    spent = dict.fromkeys(PARTS, 0.0)
    for event in events:
        spent[finder.part(event)] += (event.self_device_time_total if cuda else event.self_cpu_time_total) * 1e-6
    spent["other"] += max(0.0, wall - sum(spent.values()))
    total = sum(spent.values())
    return {part: value / total for part, value in spent.items()}


@contextlib.contextmanager
def _kernels_marked(model: nn.Module) -> Iterator[None]:
    """Within, whatever a sub-module named `kernel` does stands under one mark."""
    marks: list[Any] = []

    def enter(*_: Any) -> None:
        marks.append(record_function(f"{SCOPE}kernel"))
        marks[-1].__enter__()

    def leave(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    handles: list[Any] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "kernel":
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Finder:
    """Which part an event of a recording belongs to."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.functions = _functions()
        self.makers: dict[int, Any] = {}  # of a backward node, by autograd's number: the forward operation
        for event in sorted(events, key=lambda event: event.time_range.start):  # that was the last to bear it
            if event.sequence_nr >= 0 and "Backward" not in event.name and not event.name.startswith(NODE):
                self.makers[event.sequence_nr] = event

    def part(self, event: Any) -> str:
        named: str | None = None
        linear, node = False, event
        while node is not None:
            if node.name.startswith(SCOPE):
                return str(node.name.removeprefix(SCOPE))
            if found := self.functions.get(re.sub(r"Backward\d*$", "", node.name)):
                return found
            maker = self.makers.get(node.sequence_nr) if node.name.startswith(NODE) else None
            if maker is not None and (followed := self.part(maker)) in WHOLE:
                return followed
            if named is None:
                named = next((part for part, pattern in NAMED.items() if pattern.match(node.name)), None)
            linear = linear or node.name in LINEAR
            node = node.cpu_parent
        if named is not None:
            return named
        return "linear" if linear else "pointwise" if event.name.startswith("aten::") else "other"


def _functions() -> dict[str, str]:
    """The part of each autograd function that says so by its module; KeOps computes kernels."""
    found, waiting = {}, [torch.autograd.Function]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            home = "vandermonde" if kind.__module__.startswith("pykeops") else kind.__module__
            if part := FUNCTIONS.get(home.removeprefix("spt.models.ops.")):
                found[kind.__name__] = part
    return found


# ------------------------------------------------------------------------------------------------- the model command


def chosen_models(
    arguments: Iterable[str],
    *,
    length: str | None = None,
    batch: str | None = None,
    layers: int | None = None,
    width: int | None = None,
    precision: str = "fp32",
    backend: str = "torch",
    attention: str = "auto",
    compile: bool = False,
    recompute: bool = False,
    cpu: bool = False,
    quick: bool = False,
) -> list[Variant]:
    """The rows a command line means: every model at every length, batch, precision, back end and way of attention.

    `key=value` before the first model is for all of them, behind a model for that one.
    """
    shared: list[str] = []
    models: list[tuple[str, list[str]]] = []
    for argument in arguments:
        names, changes = split_arguments([argument])
        models += [(name, []) for name in names]
        (models[-1][1] if models else shared).extend(changes)
    if not models:
        raise UsageError("no model is named; spt list models shows ours (a file of yours ends in .py)")
    sizes = {"n_layers": layers or (1 if quick else None), "d_model": width or (16 if quick else None)}
    base = {key: value for key, value in sizes.items() if value is not None} | parse_overrides(shared)
    rows = []
    for name, changes in models:
        part = _complete(name, base | parse_overrides(changes))
        rows += [
            Variant(
                part.name, part.options, steps, size, kind, library, how, compiled, recompute, cpu, " ".join(changes)
            )
            for steps, size, kind, library, how, compiled in product(
                counts(("32" if quick else "1024") if length is None else length, "--length"),
                counts(("2" if quick else "8") if batch is None else batch, "--batch"),
                _among(precision, get_args(Precision), "--precision"),
                _among(backend, backends.NAMES["kernels"], "--backend"),
                _among(attention, backends.NAMES["attention"], "--attention"),
                (False, True) if compile else (False,),
            )
        ]
    return rows


def _complete(name: str, options: dict[str, Any]) -> Part:
    from spt.components import find

    component = find("models", name)
    config = component.module.Config
    try:
        checked = config.model_validate_json(json.dumps(options, default=str))
    except ValidationError as error:
        raise RecipeError(name, complaints(config, error)) from None
    return Part(name=component.name, **checked.model_dump(mode="json"))


def counts(text: str, option: str) -> list[int]:
    """`1024` or `1024,4096`: whole numbers from 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part[:18]) and len(part) <= 18 for part in parts):
        raise UsageError(f"{option} {text}: whole numbers from 1 are expected, such as 1024 or 1024,4096")
    return [int(part) for part in parts]


def _among(text: str, known: Sequence[str], option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise UsageError(f"{option} {text}: {part!r} is unknown{did_you_mean(part, known)}")
    return parts


def bench_models(variants: Sequence[Variant], rounds: int, say: Say, apart: bool = True) -> dict[str, Any]:
    """What `spt bench model` says, as plain data. Not `apart`: peaks are found by one process, which is quicker."""
    device = Runtime(Settings(quiet=True, cpu=variants[0].cpu)).device
    _check_backends({variant.backend for variant in variants}, "kernels", device)
    _check_backends({variant.attention for variant in variants}, "attention", device)
    if any(variant.compiled for variant in variants) and (problem := compiler_problem(device.type)) is not None:
        say(f"--compile: torch.compile cannot be used here ({problem}); continuing without it")
        variants = [variant for variant in variants if not variant.compiled]
    steps: dict[int, Step] = {}
    peaks: dict[int, int | None] = {}
    failed: dict[int, str] = {}
    elsewhere = device.type == "cpu"
    together: list[int | None] | None = None
    if elsewhere and not apart:
        with contextlib.suppress(_Killed):  # then one by one, to see by which
            together = _elsewhere([asdict(variant) for variant in variants])
    for i, variant in enumerate(variants):
        try:
            step = Step(variant, say)
            if together is not None:
                peaks[i] = together[i]
            else:
                peaks[i] = _elsewhere([asdict(variant)])[0] if elsewhere else peak_of_step(variant)
            step()
            steps[i] = step
        except SptError:
            raise
        except backends.Unavailable as error:
            raise BackendError(f"{_label(variant)}: {error}") from error
        except _Killed:
            failed[i] = "killed, as happens where memory is short"
        except Exception as error:
            if not out_of_memory(error):
                raise UsageError(
                    f"model {variant.model} fails on a batch: {brief(error)}; spt doctor --model {variant.model} may "
                    "tell more"
                ) from error
            failed[i] = "no memory"
        if i in failed:
            say(f"{_label(variant)}: {failed[i]}")
    if not steps:
        raise BackendError(f"{_label(variants[0])}: {failed[0]}; a smaller batch or shorter sequences need less")
    measured = dict(zip(steps, alternate(list(steps.values()), rounds, say), strict=True))
    first = next(iter(steps))
    rows = []
    for i, variant in enumerate(variants):
        row: dict[str, Any] = {**asdict(variant), "failed": failed.get(i)}
        if i in steps:
            step, seconds, peak, base = steps[i], measured[i].seconds(), peaks[i], peaks[first]
            row |= {
                "parameters": sum(p.numel() for p in step.model.parameters()),
                "seconds": seconds,
                "step_quartiles": measured[i].quartiles(),
                "steps": sum(map(len, measured[i].rounds)),
                "ratio": measured[i].ratios(measured[first]),
                "positions_per_second": variant.batch * variant.length / seconds["step"],
                "flops_per_second": step.operations() / seconds["step"],
                "peak_bytes": peak,
                "peak_ratio": peak / base if peak is not None and base else None,
                "shares": shares(step, seconds["step"]),
            }
        rows.append(row)
    return {"kind": "model", **_circumstances(device, rounds), "rows": rows}


def _label(variant: Variant) -> str:
    return f"{variant.model} at length {variant.length:,}, batch {variant.batch:,}, {variant.precision}"


def _check_backends(names: Iterable[str], choice: backends.Choice, device: torch.device) -> None:
    for name in names:
        try:
            with backends.use(name, choice, device.type):
                pass
        except backends.Unavailable as error:
            raise BackendError(str(error)) from error


def _circumstances(device: torch.device, rounds: int) -> dict[str, Any]:
    return {"rounds": rounds, "environment": environment(device)}


# ------------------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Case:
    """A row of `spt bench op`; the back end `plain` is the formula as it is written."""

    operation: str
    sizes: dict[str, int]
    backend: str
    cpu: bool = False


class Trial:
    """Forward and backward pass of one operation, from a fixed random gradient."""

    def __init__(self, case: Case, double: bool = False) -> None:
        self.case, self.operation = case, OPERATIONS[case.operation]
        device = Runtime(Settings(quiet=True, cpu=case.cpu)).device
        with seeded(0, "bench", case.operation):
            drawn = self.operation.inputs(case.sizes)
        kinds = (torch.float64, torch.complex128) if double else (torch.float32, torch.complex64)
        self.inputs = tuple(x.to(device, kinds[x.is_complex()]).requires_grad_() for x in drawn)
        self.gradient: Tensor | None = None
        self.clock = Clock(device)

    def answers(self) -> tuple[Tensor, ...]:
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
    Trial(replace(case, sizes=OPERATIONS[case.operation].small))()  # libraries, threads
    trial = Trial(case)
    return _growth(trial.clock.device, trial)


def chosen_operations(
    arguments: Iterable[str], *, backend: str = "plain,torch", quick: bool = False, cpu: bool = False
) -> list[Case]:
    """The rows a command line means: each operation (all, where none is named) by each back end it has."""
    names, changes = split_arguments(arguments)
    for name in names:
        if name not in OPERATIONS:
            raise UsageError(f"unknown operation {name!r}{did_you_mean(name, OPERATIONS)}")
    chosen = names or list(OPERATIONS)
    sizes = {key: _size(key, value) for key, value in parse_overrides(changes).items()}
    known = {letter for name in chosen for letter in OPERATIONS[name].sizes}
    for key in sizes:
        if key not in known:
            raise UsageError(f"{key} is no size of {', '.join(chosen)}{did_you_mean(key, known)}")
    kinds = _among(backend, ("plain", *backends.NAMES["kernels"]), "--backend")
    rows = []
    for name in chosen:
        operation = OPERATIONS[name]
        own = {key: sizes.get(key, size) for key, size in (operation.small if quick else operation.sizes).items()}
        rows += [Case(name, own, kind, cpu) for kind in kinds if kind != "keops" or operation.keops]
    if not rows:
        raise UsageError(f"--backend {backend}: {', '.join(chosen)} cannot be computed that way")
    return rows


def _size(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{key}={value}: a whole number from 1 is expected")
    return value


def bench_operations(cases: Sequence[Case], rounds: int, say: Say) -> dict[str, Any]:
    """What `spt bench op` says, as plain data. Ratios are to an operation's first back end."""
    device = Runtime(Settings(quiet=True, cpu=cases[0].cpu)).device
    _check_backends({case.backend for case in cases} - {"plain"}, "kernels", device)
    try:
        if device.type == "cpu":
            peaks = _elsewhere([asdict(case) for case in cases])
        else:
            peaks = [peak_of_operation(case) for case in cases]
        rows: list[dict[str, Any]] = []
        for name in dict.fromkeys(case.operation for case in cases):
            places = [i for i, case in enumerate(cases) if case.operation == name]
            trials = [Trial(cases[i]) for i in places]
            exact = Trial(cases[places[0]], double=True).answers()
            errors = [_errors(trial.answers(), exact) for trial in trials]
            measured = alternate(trials, rounds, say)
            for i, error, found in zip(places, errors, measured, strict=True):
                peak, base = peaks[i], peaks[places[0]]
                rows.append(
                    {
                        **asdict(cases[i]),
                        "seconds": found.seconds(),
                        "step_quartiles": found.quartiles(),
                        "steps": sum(map(len, found.rounds)),
                        "ratio": found.ratios(measured[0]),
                        "peak_bytes": peak,
                        "peak_ratio": peak / base if peak is not None and base else None,
                        "error": error[0],
                        "gradient_error": error[1],
                    }
                )
    except Exception as error:
        if isinstance(error, _Killed) or out_of_memory(error):
            raise BackendError("there is no memory for operations of these sizes; smaller ones need less") from error
        raise
    return {"kind": "op", **_circumstances(device, rounds), "rows": rows}


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Of the result and of the worst gradient, each relative to the largest entry."""
    off = [
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-30))
        for a, b in zip(found, exact, strict=True)
    ]
    return off[0], max(off[1:])


# ------------------------------------------------------------------------------------------------------------ tasks


def bench_task(part: Part, batch: int, rounds: int) -> dict[str, Any]:
    """What `spt bench task` says, as plain data: seconds to open and (where nothing is read) to generate the data,
    and to make batches of the training split, in the order of training, on the CPU."""
    from spt.store import open_part, open_task, prepared

    opened = open_part(part)
    generated = _generation(opened, rounds)
    prepared(opened)
    data = open_task(part)
    opening = []
    for _ in range(rounds):
        began = time.perf_counter()
        open_task(part)
        opening.append(time.perf_counter() - began)
    kinds: dict[str, TaskData] = {"batch": data, "masked": data.mapped(Split.unlabelled)}
    masked = OBJECTIVES["masked"]()
    extents, size = data.train.extents, min(batch, len(data.train))
    if data.fresh is not None:
        kinds["fresh"] = data
    taken: dict[str, list[tuple[float, int, int]]] = {kind: [] for kind in kinds}  # seconds, examples, positions
    drawn = islice(training_rows(len(data.train), size, 0, 0), 20 * rounds)
    for i, (epoch, shuffled) in enumerate(drawn):
        for kind in kinds if i % 2 == 0 else reversed(kinds):
            of = kinds[kind]
            began = time.perf_counter()
            rows = by_length(shuffled, extents)
            split, here = of.train, rows
            if kind == "fresh":
                assert data.fresh is not None
                split, here = data.fresh(of.train.ids[rows], 1 + epoch), np.arange(len(rows))
            made = collate(split, here, of.input, of.target)
            if kind == "masked":
                masked.pose(made, Draw(0, "corruption", epoch))
            taken[kind].append((time.perf_counter() - began, len(rows), int(split.lengths[here].sum())))
    return {
        "kind": "task",
        **_circumstances(torch.device("cpu"), rounds),
        "task": part.name,
        "options": part.options,
        "rows": {name: len(split) for name, split in data.splits.items()},
        "length": data.length,
        "batch": size,
        "seconds": {
            "generate": None if generated is None else generated["seconds"],
            "open": statistics.median(opening),
            **{kind: statistics.median(seconds for seconds, _, _ in steps) for kind, steps in taken.items()},
        },
        "generated": generated,
        "examples_per_second": {kind: statistics.median(n / t for t, n, _ in taken[kind]) for kind in kinds},
        "positions_per_second": {kind: statistics.median(n / t for t, _, n in taken[kind]) for kind in kinds},
    }


def _generation(opened: Any, rounds: int) -> dict[str, Any] | None:
    """Seconds to make the task's rows where nothing is read, and rows a second: the median over rounds, by as many
    workers as SPT_WORKERS says. Of a task whose rows are made one by one, the first 100 (or config.limit) of each
    split; the first round, which compiles, does not count."""
    from spt.store import data_dir
    from spt.tasks.generators.workers import workers

    module, config = opened.component.module, opened.config
    addressed = getattr(module, "ADDRESSED", False)
    if opened.files or not (addressed or not hasattr(module, "sources")):
        return None
    if addressed and config.limit is None:
        config = config.model_copy(update={"limit": 100})
    taken = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        data = module.load(config, data_dir().resolve())
        taken.append(time.perf_counter() - began)
    seconds, rows = statistics.median(taken[1:]), sum(map(len, data.splits.values()))
    return {"seconds": seconds, "rows": rows, "rows_per_second": rows / seconds, "workers": workers()}


# ---------------------------------------------------------------------------------------------------------- printing


def render(found: dict[str, Any]) -> Any:
    """The same for a terminal."""
    from rich.console import Group
    from rich.text import Text

    where = found["environment"]
    facts = [f"{where['device']}, {where['threads']} threads, torch {where['packages']['torch']}"]
    if found["kind"] == "task":
        return Group(_task_table(found), Text(f"\n{facts[0]}", style="dim"))
    facts.append(f"medians of {found['rounds']} rounds, ratios to the first row of the same round")
    if found["kind"] == "model":
        return Group(_models_table(found), _shares_table(found), Text("\n" + "; ".join(facts), style="dim"))
    facts.append("errors against double precision, relative to the largest entry")
    return Group(*_operation_tables(found), Text("\n" + "; ".join(facts), style="dim"))


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=i > 0)
    return made


VARIED = {
    "length": "length",
    "batch": "batch",
    "precision": "precision",
    "backend": "back end",
    "attention": "attention",
    "compiled": "compiled",
}


def _models_table(found: dict[str, Any]) -> Any:
    rows, varied = found["rows"], _varied(found["rows"])
    same = ", ".join(f"{VARIED[key]} {_plain(rows[0][key])}" for key in VARIED if key not in varied)
    times = ("forward", "backward", "optimiser", "step")
    made = _table(f"a training step, {same}: milliseconds, MiB", _heading(varied), *times, "ratio", "peak", "ratio")
    for row in rows:
        if row["failed"]:
            made.add_row(_name(row, varied), row["failed"])
            continue
        milliseconds = [_milliseconds(row["seconds"][part]) for part in times]
        made.add_row(_name(row, varied), *milliseconds, _ratio(row["ratio"]["step"]), *_memory(row))
    return made


def _shares_table(found: dict[str, Any]) -> Any:
    rows = [row for row in found["rows"] if not row["failed"]]
    varied, parts = _varied(found["rows"]), [part for part in PARTS if any(row["shares"][part] > 0 for row in rows)]
    made = _table("\nits parts, %", _heading(varied), *(SHORT.get(part, part) for part in parts))
    for row in rows:
        made.add_row(_name(row, varied), *(f"{100 * row['shares'][part]:.1f}" for part in parts))
    return made


SHORT = {"convolution": "conv", "attention": "attn"}  # so that they stand side by side


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """What the rows differ in, besides the model."""
    return [key for key in VARIED if len({row[key] for row in rows}) > 1]


def _heading(varied: list[str]) -> str:
    return ", ".join(["model", *(VARIED[key] for key in varied)])


def _name(row: dict[str, Any], varied: list[str]) -> str:
    values = [f"compiled: {_plain(row[key])}" if key == "compiled" else _plain(row[key]) for key in varied]
    return ", ".join([f"{Path(row['model']).stem} {row['given']}".strip(), *values])


def _plain(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def _operation_tables(found: dict[str, Any]) -> list[Any]:
    tables: list[Any] = []
    for name, group in groupby(found["rows"], key=lambda row: row["operation"]):
        rows = list(group)
        sizes = " ".join(f"{letter}={size}" for letter, size in rows[0]["sizes"].items())
        columns = ("forward", "backward", "step", "ratio", "peak", "ratio", "error", "gradients'")
        made = _table(f"{name} {sizes}: milliseconds, MiB", "", *columns)
        for row in rows:
            milliseconds = [_milliseconds(row["seconds"][part]) for part in ("forward", "backward", "step")]
            errors = [f"{row[key]:.1e}" for key in ("error", "gradient_error")]
            made.add_row(row["backend"], *milliseconds, _ratio(row["ratio"]["step"]), *_memory(row), *errors)
        tables.append(made)
    return tables


def _task_table(found: dict[str, Any]) -> Any:
    rows = ", ".join(f"{name} {count:,}" for name, count in found["rows"].items())
    made = _table(
        f"{Path(found['task']).stem}: {rows} rows of up to {found['length']:,} steps",
        "",
        "ms",
        "examples/s",
        "positions/s",
    )
    titles = {"generate": "generate", "open": "open prepared data"}
    if found["generated"]:
        titles["generate"] = f"generate {found['generated']['rows']:,} rows, {found['generated']['workers']} at once"
        found["examples_per_second"]["generate"] = found["generated"]["rows_per_second"]
    titles |= {"batch": f"a batch of {found['batch']:,}", "masked": "the same, and hide 15 % of it"}
    titles |= {"fresh": "a batch of rows made anew"}
    for kind, title in titles.items():
        seconds = found["seconds"].get(kind)
        rates = [found[f"{of}_per_second"].get(kind) for of in ("examples", "positions")]
        if seconds is not None:
            made.add_row(title, _milliseconds(seconds), *(f"{rate:,.0f}" if rate else "" for rate in rates))
    return made


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _memory(row: dict[str, Any]) -> tuple[str, str]:
    peak, ratio = row["peak_bytes"], row["peak_ratio"]
    shown = "" if peak is None else f"{peak / 2**20:,.1f}"
    return shown, "" if ratio is None else _ratio(ratio)


def _ratio(value: float) -> str:
    return f"×{value:.2f}" if value >= 0.1 else f"×{value:.2g}"


if __name__ == "__main__":
    _answer()
