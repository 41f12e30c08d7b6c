"""Which part of a training step (kernel, convolution, scan, attention, …) takes how much of it."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from spt.bench.timing import PARTS, SCOPE
from spt.bench.training_step import Step

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
    with marked_kernels(step.model), profile(activities=activities) as recorded:
        began = step.clock()
        for _ in range(max(1, min(5, round(0.1 / seconds)))):
            step()
        wall = step.clock() - began
    events = [e for e in recorded.events() if e.device_type.name == "CPU" and not e.is_async]
    finder = _PartFinder(events)
    spent = dict.fromkeys(PARTS, 0.0)
    for event in events:
        spent[finder.part(event)] += (event.self_device_time_total if cuda else event.self_cpu_time_total) * 1e-6
    spent["other"] += max(0.0, wall - sum(spent.values()))
    total = sum(spent.values())
    return {part: value / total for part, value in spent.items()}


@contextlib.contextmanager
def marked_kernels(model: nn.Module) -> Iterator[None]:
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


class _PartFinder:
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
