"""What a model is: a stack of residual sub-layers between the encoder and the head, which are the same for all models.

A model file holds `class Config(BackboneConfig)` and `build(config) -> Backbone`; its first docstring line is shown by
`spt list models`. `spt doctor --model FILE` runs the contract every model is held to.

Letters: B sequences in a batch, L steps, D width (`d_model`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spt.models.ops.dropout import Dropout
from spt.models.ops.norms import BatchNorm, NormKind, make_norm

Initialisation = Literal["structured", "random", "random_ssm"]
RANDOM_STD = 0.1  # of every parameter that starts at random instead of by design (SPT paper, section 4.3)


class BackboneConfig(BaseModel):
    """Options that every model has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    d_model: int = Field(128, ge=1, description="width D of the residual stream")
    n_layers: int = Field(4, ge=1, description="blocks; what a block holds is the model's choice")
    causal: bool = Field(False, description="step t sees only steps up to t; the same in both stages")
    dropout: float = Field(0.0, ge=0, lt=1, description="on every sub-layer's output")
    tie_dropout: bool = Field(False, description="one dropout mask for all steps of a sequence")
    norm: NormKind = Field(
        "layer",
        description="normalisation: layer, rms, batch (valid steps of all processes), scalar (a layer norm with two "
        "trained numbers, as in the published DLR and DSS runs), none",
    )
    norm_eps: float | None = Field(None, gt=0, description="added to the variance; by default the norm's usual number")
    norm_momentum: float = Field(0.1, gt=0, le=1, description="batch norm: share of the new batch in running numbers")
    norm_unbiased: bool = Field(True, description="batch norm: running variance divided by n - 1 (torch), not n (flax)")
    prenorm: bool = Field(True, description="x + layer(norm(x)); false: norm(x + layer(x))")
    last_norm: bool | None = Field(None, description="a norm after the last block; by default with prenorm alone")
    initialisation: Initialisation = Field(
        "structured",
        description="structured: as the model's paper has it; random: every parameter of the network, encoder and "
        "head too, from N(0, 0.1²); random_ssm: those of the state-space layers alone",
    )
    max_length: int | None = Field(None, ge=1, description="longest sequence, in steps; by default the task's")


class Context(NamedTuple):
    """What every sub-layer may need to know about a batch."""

    valid: Bool[Tensor, "B L"]  # False on padding
    padded: bool  # is there any padding at all? lets a layer take its faster path
    steps: Float[Tensor, "B L"] | None = None  # time since the previous step, where sampling is irregular
    real: Bool[Tensor, " B"] | None = None  # False for a row that stands for no example; None: all are


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

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def flops(self, length: int) -> float:
        """Operations of the forward pass on one sequence of `length` steps; a multiply-add counts as two."""
        raise NotImplementedError(f"{type(self).__name__} does not state its operations")

    def shared_flops(self, length: int) -> float:
        """Operations that all sequences of a batch share, e.g. a convolution's kernel; not part of `flops`."""
        return 0.0

    def initial_state(self, batch: int) -> Any:
        """What `step` needs before the first step; holds what follows from the parameters, computed once."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        """One step of a causal mixer in evaluation mode, at a cost and memory that do not grow with the steps made."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent form")


class PointwiseMixer(Mixer):
    """A sub-layer that treats every step alike, so that its recurrent form is itself."""

    recurrent = True

    def initial_state(self, batch: int) -> None:
        return None

    def step(self, x: Float[Tensor, "B D"], state: None) -> tuple[Float[Tensor, "B D"], None]:
        every = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
        return self(x[:, None], Context(every, padded=False))[:, 0], None


class Backbone(nn.Module):
    """x <- x + dropout(mixer(norm(x))) over all sub-layers of all blocks, and a last norm; or, without `prenorm`,
    x <- norm(x + dropout(mixer(x))).

    `block` makes the sub-layers of one block, `positions` maps (B, L, D) to (B, L, D) once at the bottom. Without
    `mask_padding`, mixers are handed what the stream holds on padding instead of zeros. `decay_all`: weight decay
    takes biases and norms too, as in the models' published code, where a mixer's `rates` say nothing else.

    With `recompute` (gradient checkpointing) only the stream between sub-layers is kept for the backward pass.
    """

    recompute: bool = False  # how it runs, not what it computes

    def __init__(
        self,
        config: BackboneConfig,
        block: Callable[[], Sequence[Mixer]],
        positions: Mixer | None = None,
        *,
        mask_padding: bool = True,
        decay_all: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.prenorm = config.causal, config.prenorm
        self.mask_padding = mask_padding
        self.positions = positions
        self.mixers = nn.ModuleList([mixer for _ in range(config.n_layers) for mixer in block()])
        self.norms = nn.ModuleList([_norm(config) for _ in self.mixers])
        last = config.prenorm if config.last_norm is None else config.last_norm
        self.last_norm = _norm(config) if last else nn.Identity()
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.rates = self._all_decaying() if decay_all else {}
        self._initialise(config.initialisation)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        padding = ~context.valid[..., None] if context.padded and self.mask_padding else None
        if self.positions is not None:
            x = self.dropout(self.positions(x, context))
        recompute = self.recompute and torch.is_grad_enabled()
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            if recompute:
                again = _Again()
                x = checkpoint(
                    self._sublayer, norm, mixer, x, context, padding, again, use_reentrant=False, context_fn=again.both
                )
            else:
                x = self._sublayer(norm, mixer, x, context, padding)
        return _normalised(self.last_norm, x, context)

    def _sublayer(
        self,
        norm: nn.Module,
        mixer: nn.Module,
        x: Tensor,
        context: Context,
        padding: Tensor | None,
        again: "_Again | None" = None,
    ) -> Float[Tensor, "B L D"]:
        keep = again is None or not again.now
        h = _normalised(norm, x, context, keep) if self.prenorm else x
        if padding is not None:
            h = h.masked_fill(padding, 0.0)
        x = x + self.dropout(mixer(h, context))
        return x if self.prenorm else _normalised(norm, x, context, keep)

    @property
    def _layers(self) -> list[Any]:
        """The mixers; a list of modules hands out plain modules to the type checker."""
        return list(self.mixers)

    @property
    def recurrent(self) -> bool:
        """Can it go step by step? Then `step` after `step` gives what `forward` gives, in constant memory."""
        return self.causal and self.positions is None and all(mixer.recurrent for mixer in self._layers)

    def initial_state(self, batch: int) -> list[Any]:
        """The state before the first step of `batch` sequences. Parameters must not change while it is in use."""
        return [mixer.initial_state(batch) for mixer in self._layers]

    def step(self, x: Float[Tensor, "B D"], state: list[Any]) -> tuple[Float[Tensor, "B D"], list[Any]]:
        """The next step's answer and the state after it; in evaluation mode, for a model that is `recurrent`."""
        after = []
        for norm, mixer, before in zip(self.norms, self._layers, state, strict=True):
            y, following = mixer.step(norm(x) if self.prenorm else x, before)
            x = x + y if self.prenorm else norm(x + y)
            after.append(following)
        return self.last_norm(x), after

    def flops(self, length: int) -> float:
        """Forward operations of one sequence; norms, skips and dropout, a few per element, are left out."""
        mixers = [*self._layers, *([] if self.positions is None else [self.positions])]
        return float(sum(mixer.flops(length) for mixer in mixers))

    def shared_flops(self, length: int) -> float:
        """Forward operations of one batch that do not depend on how many sequences it has."""
        return float(sum(mixer.shared_flops(length) for mixer in self._layers))

    def _all_decaying(self) -> dict[str, Rate]:
        named = {f"{prefix}.{name}" for prefix, module in self.named_modules() for name in getattr(module, "rates", {})}
        return {name: Rate(decay=True) for name, _ in self.named_parameters() if name not in named}

    def _initialise(self, how: Initialisation) -> None:
        if how == "random":
            randomise(self)
        elif how == "random_ssm":
            if not any(mixer.state_space for mixer in self._layers):
                raise ValueError("initialisation random_ssm: this model has no state-space parameters; use random")
            for mixer in self._layers:
                randomise(mixer, mixer.state_space)
        for module in self.modules():
            after = getattr(module, "after_initialisation", None)
            if after is not None:  # what a module measures of its initial parameters
                after()


@torch.no_grad()
def randomise(module: nn.Module, prefixes: tuple[str, ...] = ("",)) -> None:
    """Parameters whose names begin so, from N(0, 0.1²), in their order, drawn from torch's generator."""
    for name, parameter in module.named_parameters():
        if name.startswith(prefixes):
            parameter.normal_(0.0, RANDOM_STD)


class Published(dict[str, Tensor]):
    """Tensors by their names in a published code; one that is missing is told in words."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"the published tensors have no {name}, only {', '.join(sorted(self)) or 'nothing'}")


def linear_flops(linear: nn.Linear, length: int) -> float:
    """Operations of a linear map applied at every step."""
    return 2.0 * length * linear.in_features * linear.out_features


class _Again:
    """Knows whether a sub-layer is being computed for the second time, in the backward pass."""

    def __init__(self) -> None:
        self.now = False

    def both(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), self._second()

    @contextlib.contextmanager
    def _second(self) -> Iterator[None]:
        self.now = True
        try:
            yield
        finally:
            self.now = False


def _norm(config: BackboneConfig) -> nn.Module:
    return make_norm(config.norm, config.d_model, config.norm_eps, config.norm_momentum, config.norm_unbiased)


def _normalised(norm: nn.Module, x: Tensor, context: Context, keep: bool = True) -> Tensor:
    if not isinstance(norm, BatchNorm):
        return norm(x)
    counts = context.valid if context.padded else None
    if context.real is not None:
        counts = context.valid & context.real[:, None]
    return norm(x, counts, keep)
