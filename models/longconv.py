"""A layer that convolves with a long kernel: y = output(conv(u, kernel) + D u), as in S4, S4D, DSS, DLR and SGConv.

Each model brings its own `Kernel`. Letters: B sequences, L steps, H features, K directions (1 causal, 2 two-sided), M
kernel length.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Inexact
from torch import Tensor, nn

from spt.models.mixer import Context, Mixer, ParamGroup, State, Unsupported, alike, new_parameter
from spt.models.ops import counts, graphs
from spt.models.ops.convolution import convolve, spectrum, transform_length
from spt.models.ops.counts import Counts
from spt.models.ops.output import EarlyDropout, Gelu, Kind, Output
from spt.models.ops.precision import autocast_type, in_ieee, without_autocast
from spt.models.options import BackboneConfig, ConjugatePairConfig

_FEW_TAPS = 1 << 17  # weights of all kernels together, in one direction


class Kernel(nn.Module):
    """From parameters to a convolution kernel (K, H, M).

    The second direction is the reverse kernel: its lag 0 meets the next input. A shorter kernel is the beginning of a
    longer one, so that an output depends neither on padding nor on the other sequences of a batch.
    """

    param_groups: Mapping[str, ParamGroup] = {}  # by the parameter's name in this module
    recurrent: bool = False  # does it have a `step`?
    limit: int | None = None  # the longest kernel it makes
    continuous: bool = False  # is it that of a system in continuous time, whose step size can be changed?
    rate: float = 1.0  # step size now over step size in training

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        """For sequences of `length` steps: M is the length, or the kernel's own limit where that is less."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def resampled_length(self, length: int) -> int:
        """The kernel's length for sequences of `length` steps; its limit is a time, counted in steps of training."""
        return length if self.limit is None else min(length, max(1, round(self.limit / self.rate)))

    def for_longer(self, trained: "Kernel") -> None:
        """Compute what `trained` does, in a network that was built for longer sequences: whatever else than the
        parameters depends on the length is taken from it."""

    def joined(self, kernels: Sequence["Kernel"]) -> dict[str, Tensor] | None:
        """The parameters with which `forward` gives what `kernels`, which are like this one, give one by one: (K, H M,
        length) with the features of each behind those of the one before. None where there is no such form."""
        return None

    def flops(self, length: int) -> Counts | float:
        """Operations of one kernel, both passes (kind `kernel`); a plain number is the forward pass, and backward then
        counts twice as much. A multiply-add counts as two."""
        raise NotImplementedError(f"{type(self).__name__} does not state its operations")

    def system(self) -> Any:
        """The discretised system that `step` uses, computed once for a sequence. One that is not a `DiagonalSystem`
        brings its own `step`, and has outputs `C` of the state's shape as well."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def initial_state(self, batch: int, system: Any) -> Inexact[Tensor, "B H N"]:
        C = system.C
        return torch.zeros(batch, *C.shape[-2:], dtype=C.dtype, device=C.device)

    def step(
        self, u: Float[Tensor, "B H"], state: Inexact[Tensor, "B H N"], system: Any
    ) -> tuple[Float[Tensor, "B H"], Inexact[Tensor, "B H N"]]:
        """The next output of the causal convolution (without D u) and the state after it."""
        state = system.A * state + system.B * u[..., None]
        return (system.C * state).sum(-1).real, state


class DiagonalSystem(NamedTuple):
    """x_t = A x_{t-1} + B u_t, y_t = Re sum_n C_n x_t, for N real or complex modes of every feature."""

    A: Inexact[Tensor, "*#H N"]
    B: Inexact[Tensor, "*#H #N"]
    C: Inexact[Tensor, "H N"]


class ConjugatePairKernel(Kernel):
    """The kernel of a system in continuous time with conjugate pairs of modes, one of each stored, as in S4 and S4D.

    Parameters: those given, among them inv_dt, which encodes the steps, and C. All but C train at `ssm_lr`.
    """

    recurrent = True
    continuous = True
    inv_dt: nn.Parameter
    C: nn.Parameter

    def __init__(self, config: ConjugatePairConfig, **parameters: Tensor | None) -> None:
        super().__init__()
        self.limit = config.max_kernel_length
        for name, values in parameters.items():
            self.register_parameter(name, None if values is None else new_parameter(values))
        ssm = ParamGroup(lr=config.ssm_lr, weight_decay=False)
        self.param_groups = {name: ssm for name, values in parameters.items() if values is not None}
        self.param_groups["C"] = ParamGroup(lr=config.c_lr, weight_decay=True)
        if not config.dt_uses_ssm_lr:
            self.param_groups["inv_dt"] = ParamGroup(weight_decay=False)

    def joined(self, kernels: Sequence[Kernel]) -> dict[str, Tensor]:
        features = self.C.shape[1]

        def of_features(name: str) -> Tensor:
            values: list[Tensor] = [kernel.get_parameter(name) for kernel in kernels]
            if name in ("inv_dt", "C"):
                return torch.cat(values, int(name == "C"))
            copies = torch.stack(values)  # (layers, copies of the system, …), which features take in turn
            return copies.repeat(1, features // copies.shape[1], *[1] * (copies.ndim - 2)).flatten(0, 1)

        return {name: of_features(name) for name, _ in self.named_parameters()}


class LongConvolution(Mixer):
    """Kernel, skip weight D ~ N(0, 1) per feature, and `Output`.

    Kernel, spectrum and transforms are float32 (or float64 like the parameters) under autocast too; the input is
    rounded to autocast's type, as for a matrix product, and the output has that type.
    """

    state_space = ("kernel.",)
    uncompiled = ("mix_sequence",)

    def __init__(
        self,
        config: BackboneConfig,
        kernel: Kernel,
        *,
        output: Kind = "glu",
        gelu: Gelu = "exact",
        pre_activation_dropout: EarlyDropout = False,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.D = nn.Parameter(torch.randn(config.d_model))
        self.output = Output(
            config.d_model,
            output,
            gelu=gelu,
            dropout=config.dropout,
            tied=config.tie_dropout,
            pre_activation_dropout=pre_activation_dropout,
        )
        self.two_sided = not config.causal
        self.reach: int | None = getattr(config, "reach", None)
        endless = kernel.limit is None and self.reach is None
        self.recurrent = config.causal and kernel.recurrent and endless  # a recurrence has no end
        self.param_groups = {"D": ParamGroup(weight_decay=True)}
        self._cached_kernel: _CachedKernel | None = None
        self._joint_spectrum: tuple[Tensor, int] | None = None
        self._recordings = graphs.Recordings()  # of what layers alike this one compute together

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.mix_sequence(x))

    def rescale(self, rate: float) -> None:
        if not self.kernel.continuous:
            raise Unsupported(f"{type(self.kernel).__name__} has no step size to change")
        self.kernel.rate = rate

    def mix_sequence(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """conv(u, kernel) + D u."""
        u = u.to(autocast_type(u) or u.dtype)
        with without_autocast(u):
            return convolve(u, *self.transformed(u.shape[1]))

    def transformed(self, length: int) -> tuple[Tensor, int]:
        """The spectrum of kernel and D for sequences of `length` steps, and the transforms' length."""
        if self._cached_kernel is not None:
            return self._cached_kernel.spectrum(length)
        return self._joint_spectrum or self.spectrum(self.taps(length), length)

    def taps(self, length: int) -> Float[Tensor, "K H M"]:
        """The kernel with D added to the weight of the present."""
        return _with_skip(self._kernel(length), self.D)

    def _kernel(self, length: int) -> Float[Tensor, "K H M"]:
        """Within reach, for sequences of `length` steps."""
        return self.within_reach(in_ieee(lambda: self.kernel(self.lags(length)), self.kernel.parameters()))

    @property
    def farthest(self) -> int | None:
        """The reach in steps of now: like a kernel's limit it is a time, counted in steps of training."""
        return None if self.reach is None else round(self.reach / self.kernel.rate)

    def lags(self, length: int) -> int:
        """How many lags of the kernel are needed for sequences of `length` steps, the present among them."""
        return length if self.farthest is None else min(length, self.farthest + 1)

    def within_reach(self, kernel: Float[Tensor, "K H M"]) -> Float[Tensor, "K H M"]:
        """The reverse kernel begins at the next step, so that its last lag may lie one step too far ahead."""
        if not self.two_sided or kernel.shape[2] - 1 != self.farthest:
            return kernel
        return torch.stack([kernel[0], F.pad(kernel[1, :, :-1], (0, 1))])

    def spectrum(self, taps: Float[Tensor, "K H M"], length: int) -> tuple[Tensor, int]:
        n = self._transform(length)
        return spectrum(taps, n), n

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K H M"]]:
        """The reverse kernel begins at the next step: its entry l belongs to lag l + 1."""
        kernel = self._kernel(length)
        if not self.two_sided:
            return (kernel,)
        return (torch.stack([F.pad(kernel[0], (0, 1)), F.pad(kernel[1], (1, 0))])[..., :length],)

    def flops(self, length: int) -> Counts:
        """Transforms and products of every feature, and the output map."""
        return counts.convolution(self._transform(length), len(self.D)) + self.output.flops(length)

    def shared_flops(self, length: int) -> Counts:
        """The kernel and its transform, once a batch."""
        kernel = counts.as_counts(self.kernel.flops(self.lags(length)), "kernel")
        return kernel + counts.spectrum(self._transform(length), len(self.D))

    def _transform(self, length: int) -> int:
        return transform_length(length, self.kernel.resampled_length(self.lags(length)), self.two_sided)

    def initial_state(self, batch: int) -> State:
        system = self.kernel.system()
        return State(system, self.kernel.initial_state(batch, system))

    def step(self, x: Float[Tensor, "B H"], state: State) -> tuple[Float[Tensor, "B H"], State]:
        y, hidden = self.kernel.step(x, state.hidden, state.system)
        return self.output(y + self.D * x), State(state.system, hidden)


def _with_skip(kernel: Float[Tensor, "K H M"], D: Float[Tensor, " H"]) -> Float[Tensor, "K H M"]:
    present = F.pad(D[None, :, None], (0, kernel.shape[2] - 1, 0, 0, 0, len(kernel) - 1))
    return kernel + present


@contextlib.contextmanager
def joint_kernels(mixers: Iterable[nn.Module], length: int) -> Iterator[None]:
    """Inside the context, long convolutions that are alike have had their kernels computed together, for inputs of
    `length` steps: fewer and larger operations. On a CPU only where kernels are so small that this is what counts."""
    layers = [layer for layer in mixers if isinstance(layer, LongConvolution) and layer._cached_kernel is None]
    try:
        for group in alike(layers, _form):
            _join(group, length)
        yield
    finally:
        for layer in layers:
            layer._joint_spectrum = None


def _form(layer: LongConvolution) -> tuple[Any, ...]:
    """What layers that differ in the values of their parameters alone have in common."""
    kernel = layer.kernel
    shapes = {name: (values.shape, values.dtype) for name, values in kernel.named_parameters()}
    plain = {name: value for name, value in vars(kernel).items() if name[0] != "_"}
    return len(layer.D), layer.reach, type(kernel), shapes, plain


def _join(group: Sequence[LongConvolution], length: int) -> None:
    first, features = group[0], len(group[0].D)
    few = first.D.device.type != "cpu" or len(group) * features * length <= _FEW_TAPS
    parameters = first.kernel.joined([layer.kernel for layer in group]) if len(group) > 1 and few else None
    if parameters is None:
        return

    def joint_spectrum(D: Tensor, *values: Tensor) -> Tensor:
        joined = dict(zip(parameters, values, strict=True))
        kernel = in_ieee(lambda: torch.func.functional_call(first.kernel, joined, (first.lags(length),)), values)
        return first.spectrum(_with_skip(first.within_reach(kernel), D), length)[0]

    with without_autocast(first.D):
        inputs = (torch.cat([layer.D for layer in group]), *parameters.values())
        spectrum = first._recordings.compute((length, first.kernel.rate), joint_spectrum, inputs)
    for layer, part in zip(group, spectrum.split(features), strict=True):
        layer._joint_spectrum = part, first._transform(length)


@contextlib.contextmanager
def cached_kernels(model: nn.Module, length: int) -> Iterator[Callable[[], None]]:
    """Inside the context, every long convolution computes its kernel once, for inputs of up to `length` steps.

    Gradients of the kernel are accumulated. Call the function that the context yields before the last forward pass:
    the backward pass of that one then carries the sum on to the parameters, so that data parallelism sees every
    parameter's gradient arrive exactly there.
    """
    layers = [module for module in model.modules() if isinstance(module, LongConvolution)]

    def announce_last_pass() -> None:
        for layer in layers:
            if layer._cached_kernel is not None:
                layer._cached_kernel.announce_last_pass()

    try:
        for layer in layers:
            layer._cached_kernel = _CachedKernel(layer, length)
        yield announce_last_pass
    finally:
        for layer in layers:
            layer._cached_kernel = None


class _CachedKernel:
    """The kernel of a layer, and its spectrum for the latest length, shared by several forward passes."""

    def __init__(self, layer: LongConvolution, length: int) -> None:
        self.layer, self.length = layer, length
        with without_autocast(layer.D):
            self.taps = layer.taps(length)
        self.leaf = self.taps.detach().requires_grad_(self.taps.requires_grad)
        self.latest: tuple[int, Tensor, Tensor, int] | None = None  # length, spectrum, the same as a leaf, transform
        self.last_pass = False

    def spectrum(self, length: int) -> tuple[Tensor, int]:
        if length > self.length:  # longer than the cached kernel
            return self.layer.spectrum(self.layer.taps(length), length)
        if self.last_pass:
            taps: Tensor = _AddGradient.apply(self.taps, self.leaf.grad)
            return self.layer.spectrum(taps[..., :length], length)
        if self.latest is None or self.latest[0] != length:
            self._accumulate()
            spectrum, n = self.layer.spectrum(self.leaf[..., :length], length)
            self.latest = (length, spectrum, spectrum.detach().requires_grad_(spectrum.requires_grad), n)
        return self.latest[2], self.latest[3]

    def announce_last_pass(self) -> None:
        self._accumulate()
        self.last_pass = True

    def _accumulate(self) -> None:
        """Add the gradient of the latest spectrum to that of the kernel."""
        if self.latest is not None and self.latest[2].grad is not None:
            self.latest[1].backward(self.latest[2].grad)
        self.latest = None


class _AddGradient(torch.autograd.Function):
    """The kernel itself; backward adds the gradient that earlier passes have accumulated."""

    @staticmethod
    def forward(ctx: Any, taps: Tensor, accumulated: Tensor | None) -> Tensor:
        ctx.accumulated = accumulated
        return taps.view_as(taps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.accumulated is None else grad + ctx.accumulated, None
