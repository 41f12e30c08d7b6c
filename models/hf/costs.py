"""Operations of a model of transformers, as torch counts them on tensors without values.

Letters: L steps, D width, E inner width and N state size of a scan.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from spt.models.base import Context, Counts
from spt.models.hf.sizes import round_up

_ATEN = torch.ops.aten
_KINDS = {
    **dict.fromkeys((_ATEN.mm, _ATEN.addmm), "linear"),
    **dict.fromkeys((_ATEN.convolution, _ATEN._convolution, _ATEN.convolution_backward), "convolution"),
}


# By `HuggingFace.cache_key`: operations of a sequence as a polynomial in its length; None: no polynomial fits.
_POLYNOMIALS: dict[str, Callable[[int], Counts] | None] = {}
_COUNTS: dict[tuple[str, int], Counts] = {}  # of those, by length too


def flops(backbone: Any, length: int) -> Counts:
    """Counted with attention written out, plus what torch does not count of scans and Fourier transforms.

    Products with weights are of kind linear, batched products attention (or scan, if the model has one). Left out is
    what a model solves element by element, such as the triangular systems of gated delta rules. What its backward pass
    recomputes (reversible stacks) counts. If a backward pass needs values, it counts as twice the forward pass.
    """
    key, length = backbone.cache_key, backbone.padded_length(length)
    if key not in _POLYNOMIALS:
        _POLYNOMIALS[key] = _fit(backbone)
    polynomial = _POLYNOMIALS[key]
    if polynomial is not None:
        return polynomial(length)
    if (key, length) not in _COUNTS:
        _COUNTS[key, length] = count(backbone, length)
    return _COUNTS[key, length]


def _fit(backbone: Any) -> Callable[[int], Counts] | None:
    """A quadratic polynomial through three lengths, if it gives the count of a fourth; in multiples of 1, 64 or 256
    steps, for models that compute in chunks."""
    multiples = dict.fromkeys(math.lcm(backbone.pad_to_multiple_of, chunk) for chunk in (1, 64, 256))
    for multiple in () if backbone.fixed_length else multiples:
        unit = multiple * max(1, min(16 // multiple, backbone.length // (5 * multiple)))
        if 5 * unit > backbone.length:
            break
        x, y, z, w = (factor * unit for factor in (1, 2, 3, 5))
        at = {length: count(backbone, length) for length in (x, y, z, w)}
        first, second = (at[y] - at[x]) / (y - x), (at[z] - at[y]) / (z - y)
        c = (second - first) / (z - x)
        b = first - c * (x + y)
        polynomial = functools.partial(_polynomial, multiple, (at[x] - b * x - c * x**2, b, c))
        predicted = polynomial(w)
        pairs = ((predicted.forward, at[w].forward), (predicted.backward, at[w].backward))
        if all(math.isclose(fitted, counted, rel_tol=1e-6) for fitted, counted in pairs):
            return polynomial
    return None


def _polynomial(multiple: int, coefficients: tuple[Counts, Counts, Counts], length: int) -> Counts:
    """a + b L + c L², with the length rounded up to a multiple."""
    a, b, c = coefficients
    length = round_up(length, multiple)
    return a + b * length + c * length**2


def count(backbone: Any, length: int) -> Counts:
    """Operations on one sequence."""
    training, device, recompute = backbone.training, next(backbone.parameters()).device, backbone.recompute
    forward, backward = _Counter(), _Counter()
    with contextlib.ExitStack() as stack:
        stack.callback(_set_gradients, [(parameter, parameter.grad) for parameter in backbone.parameters()])
        _set_gradients((parameter, None) for parameter in backbone.parameters())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if device.type != "meta":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.callback(backbone.train, training)
        stack.callback(setattr, backbone, "recompute", recompute)
        backbone.train()  # some models read values in evaluation
        backbone.recompute = False  # does not change what is counted
        x = torch.empty(1, length, backbone.width, device=device, requires_grad=True)
        with forward:
            y = backbone(x, Context(torch.ones(1, length, dtype=torch.bool, device=device), padded=False))
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        forward_counts = forward.by_kind(backbone)
        try:
            with backward, WithoutValues():
                torch.autograd.grad(y, [x, *trained], torch.ones_like(y), allow_unused=True)
            backward_counts = backward.by_kind(backbone)
        except Exception:  # a model's own backward pass raises anything for want of values
            backward_counts = {kind: 2 * number for kind, number in forward_counts.items()}
    return Counts.from_kinds(forward_counts, backward_counts) + _uncounted(backbone, length)


def _set_gradients(gradients: Iterable[tuple[Any, Any]]) -> None:
    """The backward pass of a reversible stack adds to gradients, which are those of a training step in progress."""
    for parameter, gradient in gradients:
        parameter.grad = gradient


class _WholeModel(contextlib.nullcontext[None]):
    """In place of FlopCounterMode's tracker of modules, whose hooks fail where a module is called with a parameter."""

    parents = ("Global",)


class _Counter(FlopCounterMode):
    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={_ATEN.convolution_backward: _convolution_backward})
        self.mod_tracker = _WholeModel()  # type: ignore[assignment]

    def by_kind(self, backbone: Any) -> dict[str, float]:
        scans = any(hasattr(module, "A_log") for module in backbone.model.modules())
        numbers: dict[str, float] = {}
        for operation, number in self.get_flop_counts().get("Global", {}).items():
            kind = _KINDS.get(operation, "scan" if scans else "attention")
            numbers[kind] = numbers.get(kind, 0.0) + number
        return numbers


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **out: Any) -> float:
    """From shapes: as much as forward for each gradient that is asked for. Torch's own formula ignores groups, so that
    a depthwise convolution counts as many times too much as it has channels."""
    transposed, mask = rest[4], rest[7]
    return 2.0 * math.prod(x if transposed else grad) * math.prod(weight[1:]) * (mask[0] + mask[1])


class WithoutValues(TorchDispatchMode):
    """For tensors without values: whatever depends on a value is 0 (e.g. no step has global attention), and products
    of experts, in which each row meets one of the matrices, work in every type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._grouped_mm.default:
            a, b = args[:2]
            if b.ndim == 3:
                return torch.mm(a, b[0])
            return torch.mm(a, b).expand(len(args[2]), -1, -1)  # gradients of all matrices, each from its own rows
        if func is _ATEN._local_scalar_dense.default and args[0].device.type == "meta":
            return 0
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return 0


def _uncounted(backbone: Any, length: int) -> Counts:
    """Elementwise: a selective scan (exp(ΔA), ΔB u and h' = Ā h + B̄ u: 6 E N per step; backward twice that), and a
    Fourier transform, whose backward pass is another one."""
    attributes = [getattr(module, "A_log", None) for module in backbone.model.modules()]
    scans = Counts.of("scan", sum(6.0 * length * A.numel() for A in attributes if A is not None and A.ndim == 2))
    if backbone.model_type != "fnet":
        return scans
    size = length * backbone.width
    transforms = backbone.config.num_hidden_layers * 5.0 * size * math.log2(max(2, size))
    return scans + Counts.of("convolution", transforms, transforms)
