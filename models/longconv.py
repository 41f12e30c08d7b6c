"""A layer that convolves with a long kernel: y = output(conv(u, kernel) + D u), as in S4, S4D, DSS, DLR and SGConv.

What kernel, is the model's affair: it gives a `Kernel`. Letters: B sequences, L steps, H features, K directions (1
causal, 2 two-sided), M kernel length.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float
from torch import Tensor, nn

from spt.models.base import BackboneConfig, Context, Counts, Mixer, Published, Rate, Unsupported
from spt.models.ops import counts
from spt.models.ops.convolution import convolve, spectrum, transform_length
from spt.models.ops.output import Gelu, Kind, Output


class Kernel(nn.Module):
    """From parameters to a convolution kernel (K, H, M).

    The second direction is the reverse kernel: its lag 0 meets the next input. A shorter kernel is the beginning of a
    longer one, so that neither padding nor the company in a batch changes an answer.
    """

    rates: Mapping[str, Rate] = {}  # by the parameter's name in this module
    recurrent: bool = False  # has it a `step`?
    limit: int | None = None  # the longest kernel it makes
    continuous: bool = False  # is it that of a system in continuous time, whose step can be another?
    rate: float = 1.0  # by how much it is

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        """For sequences of `length` steps: M is the length, or the kernel's own limit where that is less."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def flops(self, length: int) -> Counts | float:
        """Operations of one kernel, both passes (kind `kernel`); or as a number those of the forward pass, which
        backward then takes twice. A multiply-add counts as two."""
        raise NotImplementedError(f"{type(self).__name__} does not state its operations")

    def system(self) -> Any:
        """The discretised system that `step` follows, computed once for a sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def initial_state(self, batch: int) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def step(self, u: Float[Tensor, "B H"], state: Tensor, system: Any) -> tuple[Float[Tensor, "B H"], Tensor]:
        """The causal convolution's next value (without D u) and the state after it."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def import_reference(self, raw: Mapping[str, Tensor], **how: Any) -> dict[str, Tensor]:
        """Our parameters by name, from tensors as the published code stores them; gradients pass through."""
        return dict(raw)

    def export_reference(self, **how: Any) -> dict[str, Tensor]:
        """The other way."""
        return dict(self.named_parameters())


class Modes(NamedTuple):
    """x_t = A x_{t-1} + u_t, y_t = Re sum_n W_n x_t, for N complex modes; A may be shared by all features."""

    A: Complex[Tensor, "*H N"]
    W: Complex[Tensor, "H N"]


class ModesKernel(Kernel):
    """A kernel whose weights W (K, H, N) or, as pairs, (K, H, N, 2) stand for all but the modes themselves."""

    W: nn.Parameter

    def initial_state(self, batch: int) -> Complex[Tensor, "B H N"]:
        _, H, N = self.W.shape[:3]
        return torch.zeros(batch, H, N, dtype=self.W.dtype.to_complex(), device=self.W.device)

    def step(
        self, u: Float[Tensor, "B H"], state: Tensor, system: Modes
    ) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H N"]]:
        state = system.A * state + u[..., None]
        return (system.W * state).sum(-1).real, state


class State(NamedTuple):
    """Of the recurrent form."""

    system: Any
    hidden: Tensor


class LongConvolution(Mixer):
    """Kernel, skip weight D ~ N(0, 1) per feature, and `Output`.

    Kernel, spectrum and transforms are float32 (or the parameters' float64) also under autocast, where the input is
    rounded as a matrix product's would be and the answer has autocast's type.
    """

    state_space = ("kernel.",)
    uncompiled = ("contextualise",)

    def __init__(
        self,
        config: BackboneConfig,
        kernel: Kernel,
        *,
        output: Kind = "glu",
        gelu: Gelu = "exact",
        early_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.D = nn.Parameter(torch.randn(config.d_model))
        self.output = Output(
            config.d_model, output, gelu=gelu, dropout=config.dropout, tied=config.tie_dropout, early=early_dropout
        )
        self.two_sided = not config.causal
        self.recurrent = config.causal and kernel.recurrent and kernel.limit is None  # a recurrence has no end
        self.rates = {"D": Rate(decay=True)}
        self._held: _Held | None = None

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.contextualise(x))

    def rescale(self, rate: float) -> None:
        if not self.kernel.continuous:
            raise Unsupported(f"{type(self.kernel).__name__} has no step size that could be another")
        self.kernel.rate = rate

    def contextualise(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """conv(u, kernel) + D u."""
        device, length = u.device.type, u.shape[1]
        if torch.is_autocast_enabled(device):
            u = u.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            if self._held is not None:
                transformed, n = self._held.spectrum(length)
            else:
                transformed, n = self.spectrum(self.taps(length), length)
            return convolve(u, transformed, n)

    def taps(self, length: int) -> Float[Tensor, "K H M"]:
        """The kernel with D added to the weight of the present."""
        kernel: Tensor = self.kernel(length)
        here = torch.zeros_like(kernel[:1, :, :1]) + self.D[:, None]
        rest = torch.cat([kernel[:1, :, :1] + here, kernel[:1, :, 1:]], dim=2)
        return torch.cat([rest, kernel[1:]]) if len(kernel) > 1 else rest

    def spectrum(self, taps: Float[Tensor, "K H M"], length: int) -> tuple[Tensor, int]:
        n = self._transform(length)
        return spectrum(taps, n), n

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K H M"]]:
        """As a reverse kernel begins at the next step, its lags are one more than its places."""
        kernel: Tensor = self.kernel(length)
        if not self.two_sided:
            return (kernel,)
        return (torch.stack([F.pad(kernel[0], (0, 1)), F.pad(kernel[1], (1, 0))])[..., :length],)

    def flops(self, length: int) -> Counts:
        """Transforms and products of every feature, and the output."""
        return counts.convolution(self._transform(length), len(self.D)) + self.output.flops(length)

    def shared_flops(self, length: int) -> Counts:
        """The kernel and its transform, once a batch."""
        kernel = counts.as_counts(self.kernel.flops(length), "kernel")
        return kernel + counts.spectrum(self._transform(length), len(self.D))

    def _transform(self, length: int) -> int:
        return transform_length(length, min(length, self.kernel.limit or length), self.two_sided)

    def initial_state(self, batch: int) -> State:
        return State(self.kernel.system(), self.kernel.initial_state(batch))

    def step(self, x: Float[Tensor, "B H"], state: State) -> tuple[Float[Tensor, "B H"], State]:
        y, hidden = self.kernel.step(x, state.hidden, state.system)
        return self.output(y + self.D * x), State(state.system, hidden)

    def import_reference(self, raw: Mapping[str, Tensor], **how: Any) -> dict[str, Tensor]:
        """Our parameters from those of a whole published layer: `layer.D` or `D`, `layer.kernel.*` or `kernel.*`,
        `output_linear.*`. Shapes of one are put right; `how` goes to the kernel."""
        plain = Published({name.removeprefix("layer."): tensor for name, tensor in raw.items()})
        own = {name.removeprefix("kernel."): tensor for name, tensor in plain.items() if name.startswith("kernel")}
        kernel = Published(own)
        found = {f"kernel.{name}": tensor for name, tensor in self.kernel.import_reference(kernel, **how).items()}
        found["D"] = plain["D"].reshape(-1)
        for name, tensor in plain.items():
            if name.startswith("output_linear") and self.output.linear is not None:
                part = name.rpartition(".")[2]
                found[f"output.linear.{part}"] = tensor.reshape(getattr(self.output.linear, part).shape)
        return found

    def export_reference(self, **how: Any) -> dict[str, Tensor]:
        """`D` (1, H), `kernel.*` and `output_linear.weight`, `output_linear.bias`."""
        found = {f"kernel.{name}": tensor for name, tensor in self.kernel.export_reference(**how).items()}
        if self.output.linear is not None:
            found |= {f"output_linear.{name}": tensor for name, tensor in self.output.linear.named_parameters()}
        return {"D": self.D[None], **found}


@contextlib.contextmanager
def kernels_held(model: nn.Module, length: int) -> Iterator[Callable[[], None]]:
    """Within, every long convolution's kernel is computed once, for inputs of up to `length` steps.

    With gradients, those of the kernel are collected; the function that is given back has to be called before the last
    forward pass, whose backward pass then takes them on to the parameters, so that data parallelism sees every
    parameter's gradient come exactly there.
    """
    layers = [module for module in model.modules() if isinstance(module, LongConvolution)]

    def last() -> None:
        for layer in layers:
            if layer._held is not None:
                layer._held.last()

    try:
        for layer in layers:
            layer._held = _Held(layer, length)
        yield last
    finally:
        for layer in layers:
            layer._held = None


class _Held:
    """One layer's kernel and its spectrum for the latest length, while several forward passes use them."""

    def __init__(self, layer: LongConvolution, length: int) -> None:
        self.layer, self.length = layer, length
        with torch.autocast(layer.D.device.type, enabled=False):
            self.taps = layer.taps(length)
        self.leaf = self.taps.detach().requires_grad_(self.taps.requires_grad)
        self.latest: tuple[int, Tensor, Tensor, int] | None = None  # length, spectrum, the same as a leaf, transform
        self.ending = False

    def spectrum(self, length: int) -> tuple[Tensor, int]:
        if length > self.length:  # nothing is held for it
            return self.layer.spectrum(self.layer.taps(length), length)
        if self.ending:
            taps: Tensor = _Joined.apply(self.taps, self.leaf.grad)
            return self.layer.spectrum(taps[..., :length], length)
        if self.latest is None or self.latest[0] != length:
            self._flush()
            found, n = self.layer.spectrum(self.leaf[..., :length], length)
            self.latest = (length, found, found.detach().requires_grad_(found.requires_grad), n)
        return self.latest[2], self.latest[3]

    def last(self) -> None:
        self._flush()
        self.ending = True

    def _flush(self) -> None:
        """From the spectrum's gradient to the kernel's."""
        if self.latest is not None and self.latest[2].grad is not None:
            self.latest[1].backward(self.latest[2].grad)
        self.latest = None


class _Joined(torch.autograd.Function):
    """The kernel, whose gradient is joined by what earlier passes have collected."""

    @staticmethod
    def forward(ctx: Any, taps: Tensor, collected: Tensor | None) -> Tensor:
        ctx.collected = collected
        return taps.view_as(taps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.collected is None else grad + ctx.collected, None
