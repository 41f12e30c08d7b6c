"""A training step as `spt bench model` measures it, part by part."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from spt.bench.timing import (
    SCOPE,
    Clock,
    Times,
)
from spt.config.recipe import Part, Train
from spt.models.base import Context
from spt.models.longconv import cached_kernels
from spt.models.ops import backends, graphs
from spt.models.ops.counts import as_counts
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.optimizer import adamw
from spt.training.seeding import seeded


@dataclass(frozen=True)
class Variant:
    """A row of `spt bench model`."""

    model: str
    options: dict[str, Any]  # with defaults filled in
    length: int
    batch: int
    precision: str = "fp32"
    backend: str = "auto"
    attention: str = "auto"
    compiled: bool = False
    cuda_graphs: bool = False
    recompute: bool = False
    cpu: bool = False
    given: str = ""  # the command line's options for this model alone


class Step:
    """One training step of a variant; calling it returns the times of its parts."""

    def __init__(self, variant: Variant) -> None:
        from spt.training.build import build_backbone

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
            self.runtime.compile(self.model)
        self.clock = Clock(device)

    def __call__(self, length: int | None = None, batch: int | None = None, optimise: bool = True) -> Times:
        """On the first `length` steps of the first `batch` sequences (default: all); the optimiser step is optional."""
        x, gradient = self.x[:batch, :length], self.gradient[:batch, :length]
        context = Context(torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), padded=False)
        kernels = (
            cached_kernels(self.model, x.shape[1]) if self.variant.recompute else contextlib.nullcontext(lambda: None)
        )
        device = self.clock.device.type
        with (
            backends.use(self.variant.backend, "kernels", device),
            backends.use(self.variant.attention, "attention", device),
            graphs.use(self.variant.cuda_graphs, device),
            self.runtime.products(self.variant.precision),
        ):
            began = self.clock()
            with kernels as last:
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
        """FLOPs of one step by formula, as runs count them."""
        length = self.variant.length
        own, shared = as_counts(self.model.flops(length)), as_counts(self.model.shared_flops(length))
        return (self.variant.batch * own + shared).total
