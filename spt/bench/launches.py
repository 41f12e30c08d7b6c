"""Operations that a training step launches on a GPU, counted on torch's meta device, which computes nothing.

Each takes some microseconds of a host's time whatever its size, so that small steps take as long as their launches.
Counted are calls of torch's operations that compute something: not views, nor memory that is only reserved. Some of
them launch more than one kernel (transforms and sums over much, for example), so that a GPU's trace shows more.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spt.bench.training_step import Variant
from spt.config.recipe import Part, Train
from spt.models.base import Context
from spt.models.ops import backends
from spt.training.optimizer import AdamW, optimizer_groups

_NOTHING = {  # operations that compute nothing, or only on the host
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("detach", "alias", "lift_fresh", "promote_types", "_local_scalar_dense"),
}


class LaunchCounter(TorchDispatchMode):
    """Within the context, counts what is launched, by operation. A single number that is not on `device` is an
    argument."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        first = result[0] if isinstance(result, tuple | list) and result else result
        number = isinstance(first, Tensor) and first.device.type != self.device and first.ndim == 0
        if not func.is_view and name not in _NOTHING and not number:
            self.counts[name] += 1
        return result


def launches(variant: Variant) -> dict[str, int] | None:
    """Of the parts of one training step by torch's own forms: forward, backward, and clipping with the update. None
    where shapes alone do not tell: a model that reads values, another library (cuDNN's recurrent networks too), a
    compiled model."""
    from spt.training.build import build_backbone

    if variant.compiled or variant.backend not in ("auto", "torch"):
        return None
    counter, parts = LaunchCounter(), {}
    try:
        with torch.device("meta"):
            model = build_backbone(Part(name=variant.model, **variant.options), variant.length).train()
            x = torch.empty(variant.batch, variant.length, variant.options["d_model"])
            context = Context(torch.empty(x.shape[:2], dtype=torch.bool), padded=False)
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            return None
        with counter, backends.use("torch"):
            y = model(x, context)
            parts["forward"] = counter.counts.total()
            y.backward(torch.empty_like(y))
            parts["backward"] = counter.counts.total() - parts["forward"]
    except (NotImplementedError, RuntimeError):
        return None
    return {**parts, "optimiser": _of_optimiser(model)}


def _of_optimiser(model: nn.Module) -> int:
    """The update and the clipping as on a GPU, all parameters at once. Their number does not depend on sizes: one
    number stands for each parameter, since on the meta device torch takes them one by one."""
    train = Train(steps=1, batch_size=1, learning_rate=1e-3, weight_decay=0.01)
    groups = [
        [nn.Parameter(torch.ones(1, device="cpu")) for _ in group.parameters]
        for group in optimizer_groups(model, train)
    ]
    everything = [parameter for group in groups for parameter in group]
    optimizer = AdamW([{"params": group} for group in groups], fused=True)
    for parameter in everything:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes its state, which later steps have
    counter = LaunchCounter("cpu")
    with counter:
        nn.utils.clip_grad_norm_(everything, 1.0, foreach=True)
        optimizer.step()
    return counter.counts.total()
