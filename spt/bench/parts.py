"""How much of a training step each of its parts (kernel, convolution, scan, attention, …) takes."""

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
    **dict.fromkeys(("scan", "second_order", "selective_scan", "recurrence"), "scan"),
    **dict.fromkeys(("attention", "linear_attention", "delta_rule"), "attention"),
}

NAMED = {  # operations, by name
    "convolution": re.compile(r"aten::.*(fft|conv(olution|\d?d)\b|_conv|conv_)"),
    "attention": re.compile(r".*(scaled_dot_product|atten[dt]|flash_attn)", re.I),
    "scan": re.compile(r"aten::(_?\w*(gru|lstm|rnn)\w*|cum(sum|prod))\b"),
}

LINEAR = {
    "mkldnn::_linear_pointwise",  # oneDNN's
    *(f"aten::{name}" for name in ("linear", "matmul", "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addmv")),
}

OWNERS = {"kernel", "convolution", "scan", "attention"}  # these own everything that runs within them
NODE = "autograd::engine::evaluate_function"


def shares(step: Step, seconds: float) -> dict[str, float]:
    """Each part's share of a step that takes about `seconds`; they sum to 1."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its start and stop messages
    cuda = step.clock.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with marked_kernels(step.model), profile(activities=activities) as recording:
        began = step.clock()
        for _ in range(max(1, min(5, round(0.1 / seconds)))):
            step()
        wall = step.clock() - began
    events = [e for e in recording.events() if e.device_type.name == "CPU" and not e.is_async]
    finder = _PartFinder(events)
    seconds_by_part = dict.fromkeys(PARTS, 0.0)
    for event in events:
        seconds_by_part[finder.part(event)] += (
            event.self_device_time_total if cuda else event.self_cpu_time_total
        ) * 1e-6
    seconds_by_part["other"] += max(0.0, wall - sum(seconds_by_part.values()))
    total = sum(seconds_by_part.values())
    return {part: value / total for part, value in seconds_by_part.items()}


@contextlib.contextmanager
def marked_kernels(model: nn.Module) -> Iterator[None]:
    """Within the context, everything in a submodule named `kernel` is recorded under one mark."""
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
    """Assigns the events of a recording to parts."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.functions = _functions()
        self.forward: dict[int, Any] = {}  # by autograd's sequence number: the last forward operation that has it
        for event in sorted(events, key=lambda event: event.time_range.start):
            if event.sequence_nr >= 0 and "Backward" not in event.name and not event.name.startswith(NODE):
                self.forward[event.sequence_nr] = event

    def part(self, event: Any) -> str:
        named: str | None = None
        linear, node = False, event
        while node is not None:
            if node.name.startswith(SCOPE):
                return str(node.name.removeprefix(SCOPE))
            if part := self.functions.get(re.sub(r"Backward\d*$", "", node.name)):
                return part
            maker = self.forward.get(node.sequence_nr) if node.name.startswith(NODE) else None
            if maker is not None and (forward_part := self.part(maker)) in OWNERS:
                return forward_part
            if named is None:
                named = next((part for part, pattern in NAMED.items() if pattern.match(node.name)), None)
            linear = linear or node.name in LINEAR
            node = node.cpu_parent
        if named is not None:
            return named
        return "linear" if linear else "pointwise" if event.name.startswith("aten::") else "other"


def _functions() -> dict[str, str]:
    """The part of each autograd function, known by the module that defines it; those of KeOps compute kernels."""
    parts, pending = {}, [torch.autograd.Function]
    while pending:
        for function in pending.pop().__subclasses__():
            pending.append(function)
            module = "vandermonde" if function.__module__.startswith("pykeops") else function.__module__
            if part := FUNCTIONS.get(module.removeprefix("spt.models.ops.")):
                parts[function.__name__] = part
    return parts
