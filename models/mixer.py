"""A sub-layer of the residual stack, what it knows about a batch, and how its parameters are trained.

Letters: B sequences in a batch, L steps, D width (`d_model`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from spt.models.ops.attention import AttentionWeights
from spt.models.ops.counts import Counts, linear

Layer = TypeVar("Layer", bound=nn.Module)


class Unsupported(ValueError):
    """A model cannot do what a recipe asks of it; one sentence says what, and what to choose instead."""


class Context(NamedTuple):
    """What a sub-layer may need to know about a batch."""

    valid: Bool[Tensor, "B L"]  # False on padding
    padded: bool  # is there any padding at all? lets a layer take its faster path
    steps: Float[Tensor, "B L"] | None = None  # time since the previous step, where sampling is irregular
    real: Bool[Tensor, " B"] | None = None  # False for a row that only fills up a batch; None: all are examples


def turn(x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
    """Reverse the steps of each sequence; padding stays behind them."""
    if not context.padded:
        return x.flip(1)
    steps, lengths = torch.arange(x.shape[1], device=x.device), context.valid.sum(1, keepdim=True)
    order = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return torch.take_along_dim(x, order[..., None], 1)


class ParamGroup(NamedTuple):
    """How one parameter is trained, where that differs from the others."""

    lr: float | None = None  # a learning rate of its own
    lr_scale: float = 1.0  # or a multiple of the recipe's
    weight_decay: bool | None = None  # None: only if the recipe decays all parameters and the learning rate is its own


class State(NamedTuple):
    """The state of a recurrence: its discretised system, computed once for a sequence, and what it remembers."""

    system: Any
    hidden: Tensor


class Mixer(nn.Module):
    """One sub-layer of the residual stack: (B, L, D) -> (B, L, D).

    Padding arrives as zeros; what a mixer writes there is ignored. A mixer that looks across steps must not let step t
    depend on padding, nor, when the config says causal, on any step after t.
    """

    param_groups: Mapping[str, ParamGroup] = {}  # by the parameter's name in this module
    state_space: ClassVar[tuple[str, ...]] = ()  # prefixes of the parameters that initialisation random_ssm resets
    uncompiled: ClassVar[tuple[str, ...]] = ()  # methods that torch.compile must not trace
    recurrent: bool = False  # does it have a `step`?
    uses_step_times: bool = False  # does it use the time between steps, where that varies?

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def rescale(self, rate: float) -> None:
        """From now on steps are `rate` times as far apart in time as in training. Raises Unsupported."""
        raise Unsupported(f"{type(self).__name__} does not know the time between steps, only their number")

    def update_stream(
        self, x: Float[Tensor, "B L D"], h: Float[Tensor, "B L D"], context: Context, dropout: nn.Module
    ) -> Float[Tensor, "B L D"]:
        """The residual stream after this sub-layer, from the stream x before it and the sub-layer's input h."""
        y = self(h, context)
        if not isinstance(y, Tensor):
            raise TypeError(f"{type(self).__name__} returned a {type(y).__name__}, not a tensor")
        if y.shape != x.shape:
            raise ValueError(f"{type(self).__name__} returned {tuple(y.shape)} for an input of {tuple(x.shape)}")
        return x + dropout(y)

    def flops(self, length: int) -> Counts | float:
        """Operations on one sequence of `length` steps, in both passes and by kind; a plain number is the forward pass,
        and the backward pass then counts twice as much. A multiply-add counts as two."""
        raise NotImplementedError(f"{type(self).__name__} does not state its operations")

    def shared_flops(self, length: int) -> Counts | float:
        """Operations that all sequences of a batch share, e.g. computing a convolution kernel; not part of `flops`."""
        return Counts()

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K C M"]]:
        """For inspection: the weights of up to `length` lags, in pieces of consecutive lags. [0, c, l] is
        the weight of the step l before; [1, c, l], if two-sided, that of the step l after, zero at l = 0; without the
        skip weight. C: features, or pairs of an output and an input. Empty if the layer does not convolve."""
        return ()

    def attention_weights(self, x: Float[Tensor, "B L D"], context: Context) -> Iterable[AttentionWeights]:
        """For inspection: the weights that `forward` uses in evaluation mode, some queries at a time.
        Empty if the layer has no softmax attention."""
        return ()

    def initial_state(self, batch: int) -> Any:
        """The state before the first step, together with what `step` computes only once from the parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        """One step of a causal mixer in evaluation mode; time and memory do not grow with the number of steps."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")


class PointwiseMixer(Mixer):
    """A sub-layer that treats every step alike, so that its recurrent form is its forward pass."""

    recurrent = True

    def rescale(self, rate: float) -> None:
        pass  # it sees only one step

    def initial_state(self, batch: int) -> None:
        return None

    def step(self, x: Float[Tensor, "B D"], state: None) -> tuple[Float[Tensor, "B D"], None]:
        valid = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
        return self(x[:, None], Context(valid, padded=False))[:, 0], None


def alike(layers: Iterable[Layer], form: Callable[[Layer], Any]) -> list[list[Layer]]:
    """Group layers of the same form, in their order."""
    groups: list[tuple[Any, list[Layer]]] = []
    for layer in layers:
        own = form(layer)
        group = next((group for other, group in groups if other == own), None)
        if group is None:
            groups.append((own, [layer]))
        else:
            group.append(layer)
    return [group for _, group in groups]


def new_parameter(values: Tensor) -> nn.Parameter:
    """A parameter with these initial values, in torch's default type."""
    return nn.Parameter(values.to(torch.get_default_dtype(), copy=True, memory_format=torch.contiguous_format))


def linear_flops(layer: nn.Linear, length: int) -> Counts:
    """Operations of a linear map applied at every step."""
    return linear(length, layer.in_features, layer.out_features)
