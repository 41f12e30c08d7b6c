"""CUDA graphs of what a training step computes from parameters and a length alone, such as the kernels of S4.

A kernel takes hundreds of small operations, and a step of a small network on a GPU lasts as long as the host needs to
launch them. Recorded once by `torch.cuda.make_graphed_callables`, each of the two passes is a single launch. The
choice applies to the process. It is off unless asked for: no GPU has run it yet.

A recording computes in memory of its own, again and again the same. Hence
- what comes out of it is copied before anyone keeps it (an optimiser keeps gradients), and
- while its backward pass is still to come, it computes nothing else: another forward pass is then computed plainly.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spt.models.ops.backends import Unavailable

logger = logging.getLogger(__name__)

Function = Callable[..., Tensor]

MOST = 4  # recordings of one module: each keeps its tables, where plain passes share the memory
_TOLERANCE = 1e-4  # of the largest number; the same kernels run, so that results are equal but for their order

_enabled = False


def use(enabled: bool, device: str) -> contextlib.ExitStack:
    """Record from now on, or as a context manager until its end. Raises `Unavailable` if the device has no graphs."""
    global _enabled
    if enabled and device != "cuda":
        raise Unavailable(f"CUDA graphs need an NVIDIA GPU, and this runs on {device}; leave --cuda-graphs out")
    restore = contextlib.ExitStack()
    restore.callback(_restore, _enabled)
    _enabled = enabled
    return restore


def _restore(enabled: bool) -> None:
    global _enabled
    _enabled = enabled


class Recordings:
    """What a module has recorded. A copy of the module begins with none."""

    def __init__(self) -> None:
        self._found: dict[Hashable, _Recording | None] = {}

    def __reduce__(self) -> tuple[type["Recordings"], tuple[()]]:
        return Recordings, ()

    def compute(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """function(*inputs), replayed where that was asked for and can be done.

        `key` stands for all that the function depends on besides its inputs. The function must neither wait for the
        device nor draw random numbers.
        """
        if not (_enabled and torch.is_grad_enabled() and all(map(_has_graphs, inputs))):
            return function(*inputs)
        key = key, *((each.shape, each.dtype, each.device, each.requires_grad) for each in inputs)
        if key not in self._found and len(self._found) < MOST:
            self._found[key] = _record(function, inputs)
        recording = self._found.get(key)
        return function(*inputs) if recording is None or recording.busy else recording(*inputs)


def _has_graphs(x: Tensor) -> bool:
    """Not while something else records or traces."""
    return x.is_cuda and not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()


class _Use:
    """One forward pass, alive until its backward pass has run or its graph is given up."""


class _Recording:
    def __init__(self, replay: Function) -> None:
        self.replay = replay
        self.latest: Callable[[], _Use | None] = lambda: None

    @property
    def busy(self) -> bool:
        return self.latest() is not None

    def __call__(self, *inputs: Tensor) -> Tensor:
        use = _Use()
        self.latest = weakref.ref(use)
        result: Tensor = _Result.apply(self.replay(*_Inputs.apply(*inputs)), use)
        return result


class _Inputs(torch.autograd.Function):
    """The inputs; their gradients are copied out of the recording's memory."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.clone() for grad in grads)


class _Result(torch.autograd.Function):
    """The result, which lies in the recording's memory: `use` ends when nothing of it is needed any more."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, use: _Use) -> Tensor:
        ctx.use = use
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx.use  # what read the result has had its turn, and the recording's own backward pass is next
        return grad, None


def _record(function: Function, inputs: Sequence[Tensor]) -> _Recording | None:
    """A recording that agrees with the function for these inputs, or None, with a warning that says why."""
    samples = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in inputs)
    try:
        expected = _passes(function, samples)  # also tries whatever is only chosen at a first call
        replay = cast(Function, torch.cuda.make_graphed_callables(function, samples, allow_unused_input=True))
        found = _passes(replay, [each.detach().clone().requires_grad_(each.requires_grad) for each in samples])
    except RuntimeError as error:
        logger.warning(f"--cuda-graphs: {str(error).splitlines()[0]}; continuing without")
        return None
    if not all(map(_agree, expected, found)):
        logger.warning("--cuda-graphs: a recording does not compute what it should; continuing without")
        return None
    return _Recording(replay)


def _passes(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients of the inputs for a gradient of ones."""
    result = function(*inputs)
    asked = [each for each in inputs if each.requires_grad]
    gradients = torch.autograd.grad(result, asked, torch.ones_like(result), materialize_grads=True)
    return [result.detach().clone(), *(each.clone() for each in gradients)]


def _agree(expected: Tensor, found: Tensor) -> bool:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, found, rtol=0.0, atol=_TOLERANCE * scale)
