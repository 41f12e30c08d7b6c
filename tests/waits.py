"""Waits for a device that is not there: the CPU in its place, and what a program asks of it counted.

On a GPU operations are queued, and a program waits for them where it wants a number, or a size that depends on numbers,
or copies what is not in pinned memory. Here the device's tensors are those that `Runtime.send` gave, the network's and
the optimiser's, those made with an explicit device, and all that is computed from any of them.
"""

import collections
import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spt.runtime.distributed import Runtime

# Operations that look at numbers: for one of them, or for the size of the result.
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount", "_linalg_check_errors")
READS += ("unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave")
METHODS = ("tolist", "cpu", "numpy", "__array__")  # which torch does not dispatch for a tensor on the CPU
FROM_PYTHON = ("new_tensor", "tensor", "as_tensor")  # copies from memory that is not pinned
ELSEWHERE = re.compile(r"[/\\\\](torch|jaxtyping|beartype)[/\\\\]|[/\\\\]waits\.py$|^<")  # not whose line is meant


class Device:
    """The tensors that are on it, by their storages, and the waits so far."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}  # kept, so that none takes the place of another
        self.waits: collections.Counter[str] = collections.Counter()
        self.events: list[str] = []  # send, and read where a copy that was begun before is waited for

    def put(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self.storages

    def has_any(self, tensors: Any) -> bool:
        return any(map(self.has, tree_leaves(tensors)))

    def copies(self, tensors: Any) -> Any:
        """On the CPU."""
        copies = tree_map_only(Tensor, Tensor.clone, tensors)
        for tensor in tree_leaves(copies):
            if isinstance(tensor, Tensor):
                self.storages.pop(tensor.untyped_storage()._cdata, None)
        return copies

    def wait(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if not ELSEWHERE.search(frame.filename)]
        where = "/".join(Path(frames[-1].filename).parts[-2:])
        self.waits[f"{what} in {where}, line {frames[-1].lineno}"] += 1


class _Operations(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device, name = kwargs or {}, self.device, func._schema.name.split("::")[-1]
        on = device.has_any((args, kwargs))
        if on and name in READS and kwargs.get("output_size") is None:
            device.wait(name)
        if on and name.startswith(("index", "_index_put")) and isinstance(args[1], list | tuple):
            chosen = [each for each in args[1] if isinstance(each, Tensor)]
            if any(each.dtype == torch.bool for each in chosen) and not (name != "index" and args[2].ndim == 0):
                device.wait(f"{name} by a mask")
            elif any(each.ndim and not device.has(each) for each in chosen):
                device.wait(f"{name} by what is on the CPU")
        if name in ("copy_", "_copy_from") and device.has(args[0]) != device.has(args[1]) and args[1].ndim:
            device.wait("a copy")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if on:
            device.put(result)
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device, name = kwargs or {}, self.device, getattr(func, "__name__", "")
        if name == "backward":  # which torch would run without this mode
            with self:
                ones = (torch.ones_like(args[0]),)
                return _engine_run_backward(
                    args[:1], ones, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        on = device.has_any((args, kwargs))
        explicit = kwargs.get("device") is not None
        if (on and name in METHODS) or (on and name == "to" and "cpu" in args[1:]):
            device.wait(name)
            result = func(*args, **kwargs)
            return device.copies(result) if isinstance(result, Tensor) else result
        if name in FROM_PYTHON and (explicit or on):
            device.wait(name)
        result = func(*args, **kwargs)
        if explicit and isinstance(result, Tensor):
            device.put(result)
        return result


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, network: nn.Module | None = None) -> Iterator[Device]:
    """Within, there is a device that works through a queue, and the network is on it."""
    device = Device()

    def send(runtime: Runtime, tensors: Any) -> Any:
        device.events.append("send")
        copies = tree_map_only(Tensor, Tensor.clone, tensors)
        device.put(copies)
        return copies

    def fetch(runtime: Runtime, tensors: Any) -> Any:
        copies = device.copies(tensors)

        def read() -> Any:
            device.events.append("read")
            return copies

        return read

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "send", send)
        patch.setattr(Runtime, "fetch", fetch)
        patch.setattr(Runtime, "queues", True)
        device.put([*network.parameters(), *network.buffers()] if network is not None else [])
        with _Methods(device), _Operations(device):
            yield device
