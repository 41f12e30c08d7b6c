"""The library that computes the large sums of state-space kernels, and the one that computes attention.

Kernels: `torch` is always available and the reference of the tests: blocked products, a few tables of memory. `triton`
computes each operation of `TRITON` in float32 by fused kernels, on a GPU. `auto`, the default, is `torch` on a CPU; on
a GPU it takes Triton's form of an operation once that has agreed with torch's there and was faster, which each process
tries when it first needs the operation. `keops` (the extra `keops`) compiles a kernel that stores only its result; on a
CPU it is far slower.

Attention: `sdpa` is PyTorch's scaled_dot_product_attention, in a form that its fused kernels for GPUs take; `varlen` is
PyTorch's varlen_attn, for CUDA and half precision, which skips padding and has sliding windows, but no dropout and no
bias (there, `sdpa` computes); `auto`, the default, is `varlen` where it works and there is padding or a sliding window,
and `sdpa` elsewhere; `flash` is the package flash-attn (the extra `flash`), which does what `varlen` does, with
dropout; `math` is the formula as written.

A backend counts as usable once something small has run on the device in question, forward and backward: KeOps can be
imported and still fail there (state-spaces/s4 issue 17), and so can flash-attn, which is built for one torch and some
GPUs. The choice applies to the process: it changes how a model runs, not what it computes.
"""

import contextlib
import functools
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spt.models.ops.precision import has_values

Choice = Literal["kernels", "attention"]
NAMES: dict[Choice, tuple[str, ...]] = {  # the first is the default
    "kernels": ("auto", "torch", "triton", "keops"),
    "attention": ("auto", "sdpa", "varlen", "flash", "math"),
}
_chosen: dict[Choice, str] = {choice: names[0] for choice, names in NAMES.items()}

Trial = Callable[[], tuple[Tensor, ...]]  # results and gradients of one operation, by the back end chosen at the call

# Operations that Triton can compute, and the function that makes a trial of each: of a device, and whether it is small.
TRITON = {
    "vandermonde": "spt.models.ops.triton_vandermonde:trial_of_separate_modes",
    "vandermonde_shared": "spt.models.ops.triton_vandermonde:trial_of_shared_modes",
    "cauchy": "spt.models.ops.triton_cauchy:trial",
    "scan": "spt.models.ops.triton_scan:trial_of_fixed",
    "scan_varying": "spt.models.ops.triton_scan:trial_of_varying",
}


class Unavailable(RuntimeError):
    """A backend that does not exist or does not run here; the message says which and why."""


def current(choice: Choice = "kernels") -> str:
    """The backend in use."""
    return _chosen[choice]


def use(name: str, choice: Choice = "kernels", device: str | None = None) -> contextlib.ExitStack:
    """Use a backend from now on, or as a context manager until its end.

    Raises `Unavailable` if it does not work (on this device; see `probe`), without changing the choice.
    """
    names, kind = NAMES[choice], f"{choice.removesuffix('s')} backend"
    if name not in names:
        raise Unavailable(f"there is no {kind} {name!r}; choose among {', '.join(names)}")
    if problem := probe(name, device, choice):
        raise Unavailable(f"the {kind} {name} does not work here: {problem}")
    restore = contextlib.ExitStack()
    restore.callback(_chosen.__setitem__, choice, _chosen[choice])
    _chosen[choice] = name
    return restore


def probe(name: str, device: str | None = None, choice: Choice = "kernels") -> str | None:
    """Why a backend does not work on a device (default: the GPU, if there is one), or None if it does.

    The first probe of `keops` or `triton` compiles, which takes up to a minute; later ones use the compiled code.
    """
    if name not in NAMES[choice]:
        return f"there is no such backend; choose among {', '.join(NAMES[choice])}"
    test = _PROBES.get(name)
    return None if test is None else test(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def uses_triton(operation: str, x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether Triton computes this operation of `TRITON`: chosen, or by `auto`; for x with values, on a GPU, and in
    float32 or complex64 (`dtype`, or x's type). On a CPU in Triton's interpreter, if chosen. Else the plain form does.
    """
    name, dtype = current(), dtype or x.dtype
    if name not in ("auto", "triton") or dtype not in (torch.float32, torch.complex64) or not has_values(x):
        return False
    if name == "triton":
        return x.is_cuda or _interpreted()
    if not x.is_cuda or torch.compiler.is_compiling():
        return False  # `auto` cannot try anything while code is traced; before launches are recorded it has tried
    return prefers_triton(operation, str(x.device))


@functools.cache
def prefers_triton(operation: str, device: str) -> bool:
    """Whether `auto` takes Triton for an operation: if it works on this device, agrees with torch, and was faster."""
    if _probe_operation(operation, device) is not None:
        return False
    try:
        seconds = _seconds(operation, device)
    except Exception:  # drivers and kernels raise anything, such as too little memory for the trial
        return False
    return seconds["triton"] < seconds["torch"]


def keops() -> Any:
    """The module `pykeops.torch`, without its messages on standard output.

    Raises `ImportError` if it is not installed.
    """
    for name in ("PYKEOPS_VERBOSE", "KEOPS_VERBOSE"):
        os.environ.setdefault(name, "0")
    return importlib.import_module("pykeops.torch")


def flash() -> Any:
    """flash_attn_varlen_func of the package flash-attn. Raises `ImportError` if it is missing or built for another
    torch."""
    return importlib.import_module("flash_attn").flash_attn_varlen_func


def varlen() -> Callable[..., torch.Tensor]:
    """PyTorch's own attention by segments, with the arguments of flash_attn_varlen_func."""
    attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def by_segments(
        q: torch.Tensor,
        *rest: Any,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        dropout_p: float = 0.0,
        deterministic: bool = False,  # which torch knows by itself
    ) -> torch.Tensor:
        assert dropout_p == 0.0, "it has no dropout"
        window = (window_size[0], 0) if causal else window_size
        y: torch.Tensor = attention(
            q, *rest, scale=softmax_scale, window_size=window, enable_gqa=q.shape[1] != rest[0].shape[1]
        )
        return y

    return by_segments


@functools.cache
def _probe_keops(device: str) -> str | None:
    try:
        module = keops()
    except Exception as error:
        return f"pykeops cannot be imported ({_one_line(error)}); pip install 'selfpretrain[keops]'"
    try:
        x, y = (torch.linspace(0, 1, n, device=device).requires_grad_() for n in (3, 4))
        sums = (module.LazyTensor(x[:, None, None]) * module.LazyTensor(y[None, :, None])).exp().sum(dim=1)
        sums.sum().backward()
        expected = torch.exp(x * y[:, None]).sum(0)
        gradient = (y[:, None] * torch.exp(x * y[:, None])).sum(0)
        if not (torch.allclose(sums[:, 0], expected) and torch.allclose(x.grad, gradient)):  # type: ignore[arg-type]
            return f"a small sum on {device} gave a wrong result"
    except Exception as error:  # compilers and drivers raise anything
        return f"a small sum on {device} failed ({_one_line(error)}); KeOps needs a C++ compiler, and nvcc for a GPU"
    return None


@functools.cache
def _probe_triton(device: str) -> str | None:
    if not (device.startswith("cuda") or _interpreted()):
        return f"Triton's kernels need a GPU, and computation here is on the {device}"
    try:
        importlib.import_module("triton")
    except Exception as error:
        return f"triton cannot be imported ({_one_line(error)}); on Linux, torch for CUDA brings it"
    return next(filter(None, (_probe_operation(operation, device) for operation in TRITON)), None)


@functools.cache
def _probe_operation(operation: str, device: str) -> str | None:
    """Something small by Triton and by torch: results and gradients."""
    kind = operation.replace("_", " ")
    try:
        ours, expected = (_run(name, _trial(operation, device, small=True)) for name in ("triton", "torch"))
        for a, b in zip(ours, expected, strict=True):
            if not bool((a - b).abs().max() <= 1e-4 * b.abs().max()):  # neither if one is NaN
                return f"a trial of {kind} on {device} gave a wrong result"
    except Exception as error:  # compilers and drivers raise anything
        return f"a trial of {kind} on {device} failed ({_one_line(error)})"
    return None


def _seconds(operation: str, device: str, rounds: int = 5) -> dict[str, float]:
    """Medians of both forms at a size that models have, one after the other in each round."""
    trial = _trial(operation, device, small=False)
    times: dict[str, list[float]] = {"torch": [], "triton": []}
    for repetition in range(rounds + 2):  # the first two compile, and find the memory
        for name, found in times.items():
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            _run(name, trial)
            torch.cuda.synchronize(device)
            if repetition >= 2:
                found.append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def _trial(operation: str, device: str, small: bool) -> Trial:
    module, function = TRITON[operation].split(":")
    made: Trial = getattr(importlib.import_module(module), function)(device, small)
    return made


def _run(name: str, trial: Trial) -> tuple[Tensor, ...]:
    """A trial by one back end, also from within an evaluation or under autocast."""
    before, kind = _chosen["kernels"], "cuda" if torch.cuda.is_available() else "cpu"
    _chosen["kernels"] = name
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
            return trial()
    finally:
        _chosen["kernels"] = before


def _interpreted() -> bool:
    """Whether Triton computes on the CPU by its interpreter, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _probe_varlen(device: str) -> str | None:
    if not device.startswith("cuda"):
        return f"torch's varlen_attn needs a CUDA GPU, and computation here is on the {device}"
    try:
        attention = varlen()
    except Exception as error:  # a torch without it, or with another name for it
        return f"torch has no varlen_attn ({_one_line(error)}); use a newer torch"
    return _try_flash(attention, device)


@functools.cache
def _probe_flash(device: str) -> str | None:
    if not device.startswith("cuda"):
        return f"flash-attn needs a CUDA GPU, and computation here is on the {device}"
    try:
        attention = flash()
    except Exception as error:  # an extension that was built for another torch raises anything
        return f"flash-attn cannot be imported ({_one_line(error)}); pip install 'selfpretrain[flash]'"
    return _try_flash(attention, device)


@torch.inference_mode(False)  # the first to ask may be an evaluation
@torch.enable_grad()
def _try_flash(attention: Any, device: str) -> str | None:
    """Sequences of 2, no and 3 steps and two rows behind them, four heads that share two of keys, causal and with a
    sliding window, in bfloat16: values and gradients."""
    try:
        values = torch.linspace(0, 30, 7 * 8 * 16, device=device).sin().view(7, 8, 16).to(torch.bfloat16)
        ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
        steps = torch.arange(5, device=device)
        own = (steps[:, None] < 2) == (steps < 2)
        for causal, window in ((True, (-1, -1)), (False, (1, 0)), (True, (1, 1))):
            qkv, same = values.clone().requires_grad_(), values.clone().requires_grad_()
            y = attention(*qkv.split([4, 2, 2], dim=1), ends, ends, 3, 3, causal=causal, window_size=window)[:5]
            distance = steps[:, None] - steps
            seen = own & (distance >= 0) & ((distance <= 1) | (window[0] < 0))
            q, k, v = (x[None, :5].transpose(1, 2) for x in same.split([4, 2, 2], dim=1))
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0].transpose(0, 1)
            outputs = ((y, qkv), (expected, same))
            gradients = [torch.autograd.grad(y.float().square().sum(), x)[0][:5] for y, x in outputs]
            if not all(torch.allclose(a.float(), b.float(), atol=0.1) for a, b in ((y, expected), gradients)):
                return f"a small attention on {device} gave a wrong result"
    except Exception as error:  # drivers and kernels raise anything
        return f"a small attention on {device} failed ({_one_line(error)})"
    return None


_PROBES: dict[str, Callable[[str], str | None]] = {
    "triton": _probe_triton,
    "keops": _probe_keops,
    "varlen": _probe_varlen,
    "flash": _probe_flash,
}


def _one_line(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
