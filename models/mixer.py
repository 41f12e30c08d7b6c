"""A sub-layer of the residual stack, what it is told of a batch, and how its parameters are trained.

Letters: B sequences in a batch, L steps, D width (`d_model`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from spt.models.ops.counts import Counts, linear


class Unsupported(ValueError):
    """A model is asked for what it says it cannot do; one sentence says what, and what to choose instead."""


class Context(NamedTuple):
    """What every sub-layer may need to know about a batch."""

    valid: Bool[Tensor, "B L"]  # False on padding
    padded: bool  # is there any padding at all? lets a layer take its faster path
    steps: Float[Tensor, "B L"] | None = None  # time since the previous step, where sampling is irregular
    real: Bool[Tensor, " B"] | None = None  # False for a row that stands for no example; None: all are


class Seen(NamedTuple):
    """Attention weights of R neighbouring queries on M neighbouring keys, which are all that they may look at."""

    first_query: int
    first_key: int
    weights: Float[Tensor, "B H R M"]  # sum to 1 over keys, or to 0 where a query may look at nothing
    visible: Bool[Tensor, "#B 1 R M"]  # may this query look at this key?


class Rate(NamedTuple):
    """How one parameter is trained, where that differs from the rest."""

    lr: float | None = None  # a learning rate of its own
    scale: float = 1.0  # or a multiple of the recipe's
    decay: bool | None = None  # does weight decay apply? None: only if the recipe says all, and the rate is its own


class Mixer(nn.Module):
    """One sub-layer of the residual stack: (B, L, D) -> (B, L, D).

    Padding arrives as zeros; what a mixer puts there is ignored. A mixer that looks across steps must not let step t
    depend on padding, nor, when the config says causal, on any step after t.
    """

    rates: Mapping[str, Rate] = {}  # by the parameter's name in this module
    state_space: ClassVar[tuple[str, ...]] = ()  # beginnings of the names that initialisation random_ssm resets
    uncompiled: ClassVar[tuple[str, ...]] = ()  # methods that torch.compile has to leave as they are
    recurrent: bool = False  # has it a `step`?
    timed: bool = False  # does it take account of the time between steps, where that varies?

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def rescale(self, rate: float) -> None:
        """From now on steps lie `rate` times as far apart in time as those it was trained on. Raises Unsupported."""
        raise Unsupported(f"{type(self).__name__} knows steps only by their number, not by the time between them")

    def join(
        self, x: Float[Tensor, "B L D"], h: Float[Tensor, "B L D"], context: Context, dropout: nn.Module
    ) -> Float[Tensor, "B L D"]:
        """The stream behind this sub-layer: x is the stream before it, h what it is handed of it."""
        y = self(h, context)
        if not isinstance(y, Tensor):
            raise TypeError(f"{type(self).__name__} answered with a {type(y).__name__}, not a tensor")
        if y.shape != x.shape:
            raise ValueError(f"{type(self).__name__} answered {tuple(y.shape)} to {tuple(x.shape)}")
        return x + dropout(y)

    def flops(self, length: int) -> Counts | float:
        """Operations on one sequence of `length` steps, both passes by kind; or as a number those of the forward pass,
        which backward then takes twice. A multiply-add counts as two."""
        raise NotImplementedError(f"{type(self).__name__} does not state its operations")

    def shared_flops(self, length: int) -> Counts | float:
        """Operations that all sequences of a batch share, e.g. a convolution's kernel; not part of `flops`."""
        return Counts()

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K C M"]]:
        """The weights of up to `length` lags, in pieces of consecutive ones, for whoever looks at them: [0, c, l] that
        of the step l before, [1, c, l] (two-sided) that of the step l after, zero at l = 0; a skip weight is left out.
        C: features, or pairs of an answer's and an input's. Nothing where a layer does not convolve."""
        return ()

    def attention_weights(self, x: Float[Tensor, "B L D"], context: Context) -> Iterable[Seen]:
        """The weights with which `forward`, in evaluation mode, sums values, some queries at a time, for whoever looks
        at them. Nothing where a layer has no softmax attention."""
        return ()

    def initial_state(self, batch: int) -> Any:
        """What `step` needs before the first step; holds what follows from the parameters, computed once."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        """One step of a causal mixer in evaluation mode, at a cost and memory that do not grow with the steps made."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")


class PointwiseMixer(Mixer):
    """A sub-layer that treats every step alike, so that its recurrent form is itself."""

    recurrent = True

    def rescale(self, rate: float) -> None:
        pass  # it looks at one step only

    def initial_state(self, batch: int) -> None:
        return None

    def step(self, x: Float[Tensor, "B D"], state: None) -> tuple[Float[Tensor, "B D"], None]:
        every = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
        return self(x[:, None], Context(every, padded=False))[:, 0], None


def linear_flops(layer: nn.Linear, length: int) -> Counts:
    """Operations of a linear map applied at every step."""
    return linear(length, layer.in_features, layer.out_features)


class Published(dict[str, Tensor]):
    """Tensors by their names in a published code; one that is missing is told in words."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"the published tensors have no {name}, only {', '.join(sorted(self)) or 'nothing'}")
