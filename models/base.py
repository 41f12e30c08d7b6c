"""What a model is: a stack of residual sub-layers between the encoder and the head, which are the same for all models.

A model file holds `class Config(BackboneConfig)` and `build(config) -> Backbone`; its first docstring line is shown by
`spt list models`. `spt doctor --model FILE` runs the contract every model is held to. What a file of a model needs of
`mixer.py` is found here too.

Letters: B sequences in a batch, L steps, D width (`d_model`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spt.models.feedforward import Activation, FeedForward, FeedForwardKind, Routing, SwitchFeedForward
from spt.models.mixer import Context, Mixer, PointwiseMixer, Published, Rate, Seen, Unsupported, linear_flops
from spt.models.ops.counts import Counts, as_counts
from spt.models.ops.dropout import Dropout
from spt.models.ops.norms import BatchNorm, NormKind, make_norm

__all__ = [
    "Backbone",
    "BackboneConfig",
    "Context",
    "Counts",
    "Mixer",
    "PointwiseMixer",
    "Published",
    "Rate",
    "Seen",
    "Unsupported",
    "linear_flops",
    "randomise",
]

Initialisation = Literal["structured", "random", "random_ssm"]
FEED_FORWARD = {"feed_forward", "d_ff", "ff_activation", "ff_dropout", "n_experts", "routing", "route_ahead"}
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
        "trained numbers, as in the published DLR and DSS runs), scale (root mean square, one trained number), none",
    )
    norm_eps: float | None = Field(None, gt=0, description="added to the variance; by default the norm's usual number")
    norm_momentum: float = Field(0.1, gt=0, le=1, description="batch norm: share of the new batch in running numbers")
    norm_unbiased: bool = Field(True, description="batch norm: running variance divided by n - 1 (torch), not n (flax)")
    prenorm: bool = Field(True, description="x + layer(norm(x)); false: norm(x + layer(x))")
    last_norm: bool | None = Field(None, description="a norm after the last block; by default with prenorm alone")
    feed_forward: FeedForwardKind = Field(
        "none", description="a last sub-layer of every block: mlp, or switch (each step through one of several mlps)"
    )
    d_ff: int | None = Field(None, ge=1, description="inner width of the feed-forward layer; by default 4 d_model")
    ff_activation: Activation = Field("gelu", description="between the two maps of the feed-forward layer")
    ff_dropout: float = Field(0.0, ge=0, lt=1, description="within the feed-forward layer, behind its activation")
    n_experts: int = Field(16, ge=1, description="switch: how many mlps")
    routing: Routing = Field(
        "token",
        description="switch: every step goes to its best expert, or every expert takes its best steps of a sequence "
        "(as in the DLR paper; not causal)",
    )
    route_ahead: bool = Field(
        False,
        description="routing: expert in a causal model: a step's answer then depends on later steps, through which "
        "steps an expert takes, and a next-step objective is scored with that knowledge, as in the DLR paper's "
        "language models",
    )
    initialisation: Initialisation = Field(
        "structured",
        description="structured: as the model's paper has it; random: every parameter of the network, encoder and "
        "head too, from N(0, 0.1²); random_ssm: those of the state-space layers alone",
    )
    max_length: int | None = Field(None, ge=1, description="longest sequence, in steps; by default the task's")

    @model_validator(mode="after")
    def _feed_forward(self) -> "BackboneConfig":
        switch = {"n_experts", "routing", "route_ahead"}
        told = (FEED_FORWARD - {"feed_forward"}) & self.model_fields_set
        idle = sorted(name for name in told if getattr(self, name) != type(self).model_fields[name].default)
        if self.feed_forward == "none" and idle:
            raise ValueError(f"{idle[0]} has no effect without a feed-forward layer; add feed_forward: mlp or switch")
        if self.feed_forward == "mlp" and switch & set(idle):
            raise ValueError(f"{min(switch & set(idle))} has no effect with feed_forward: mlp; choose switch")
        if self.route_ahead and not (self.causal and self.routing == "expert"):
            raise ValueError("route_ahead has no effect unless the model is causal and routing is expert")
        return self


class Backbone(nn.Module):
    """x <- x + dropout(mixer(norm(x))) over all sub-layers of all blocks, and a last norm; or, without `prenorm`,
    x <- norm(x + dropout(mixer(x))).

    `block` makes the sub-layers of one block, `positions` maps (B, L, D) to (B, L, D) once at the bottom. Without
    `mask_padding`, mixers are handed what the stream holds on padding instead of zeros. `decay_all`: weight decay
    takes biases and norms too, as in the models' published code, where a mixer's `rates` say nothing else.

    With `recompute` (gradient checkpointing) only the stream between sub-layers is kept for the backward pass.
    """

    recompute: bool = False  # how it runs, not what it computes
    padding: bool = True  # can it leave padding out of account?
    multiple: int = 1  # of which every sequence's length has to be a multiple

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
        if config.feed_forward != "none" and type(self).forward is not Backbone.forward:
            raise Unsupported("feed_forward is a part of residual stacks, which this model is not; leave it out")
        self.causal, self.prenorm = config.causal, config.prenorm
        self.mask_padding = mask_padding
        self.positions = positions
        self.mixers = nn.ModuleList(
            [mixer for _ in range(config.n_layers) for mixer in (*_made(block), *_feed_forward(config))]
        )
        self.norms = nn.ModuleList([_norm(config) for _ in self.mixers])
        last = config.prenorm if config.last_norm is None else config.last_norm
        self.last_norm = _norm(config) if last else nn.Identity()
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.rates = self._all_decaying() if decay_all else {}
        self.initialise(config.initialisation)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        padding = ~context.valid[..., None] if context.padded and self.mask_padding else None
        if self.positions is not None:
            x = self.dropout(self.positions(x, context))
        recompute = self.recompute and torch.is_grad_enabled()
        for norm, mixer in zip(self.norms, self._layers, strict=True):
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
        mixer: Mixer,
        x: Tensor,
        context: Context,
        padding: Tensor | None,
        again: "_Again | None" = None,
    ) -> Float[Tensor, "B L D"]:
        keep = again is None or not again.now
        h = _normalised(norm, x, context, keep) if self.prenorm else x
        if padding is not None:
            h = h.masked_fill(padding, 0.0)
        x = mixer.join(x, h, context, self.dropout)
        return x if self.prenorm else _normalised(norm, x, context, keep)

    @property
    def _layers(self) -> list[Any]:
        """The mixers; a list of modules hands out plain modules to the type checker."""
        return list(self.mixers)

    @property
    def timed(self) -> bool:
        """Does it take account of the time between steps, where that varies (Context.steps)?"""
        return any(mixer.timed for mixer in self._layers)

    def rescale(self, rate: float) -> None:
        """From now on steps lie `rate` times as far apart in time as those it was trained on: a signal sampled more
        coarsely (S4 paper, section 3.1; S5 paper, section 6.2). Raises Unsupported where a sub-layer cannot."""
        if self.positions is not None:
            self.positions.rescale(rate)
        for mixer in self._layers:
            mixer.rescale(rate)

    @property
    def recurrent(self) -> bool:
        """Can it go step by step? Then `step` after `step` gives what `forward` gives, in constant memory."""
        stepping = type(self).forward is Backbone.forward or type(self).step is not Backbone.step
        plain = self.causal and self.positions is None
        return stepping and plain and all(mixer.recurrent for mixer in self._layers)

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

    def flops(self, length: int) -> Counts:
        """Operations on one sequence; norms, skips and dropout, a few per element, are left out."""
        mixers = [*self._layers, *([] if self.positions is None else [self.positions])]
        return sum((as_counts(mixer.flops(length)) for mixer in mixers), Counts())

    def shared_flops(self, length: int) -> Counts:
        """Operations on one batch that do not depend on how many sequences it has."""
        return sum((as_counts(mixer.shared_flops(length)) for mixer in self._layers), Counts())

    def _all_decaying(self) -> dict[str, Rate]:
        named = {f"{prefix}.{name}" for prefix, module in self.named_modules() for name in getattr(module, "rates", {})}
        return {name: Rate(decay=True) for name, _ in self.named_parameters() if name not in named}

    def initialise(self, how: Initialisation) -> None:
        """Put the prior in place. A backbone that makes modules after `super().__init__` calls it once more."""
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


def _made(block: Callable[[], Sequence[Mixer]]) -> Sequence[Mixer]:
    """One block's sub-layers, held against what a file of a user may have written instead."""
    if not callable(block):
        raise TypeError("block has to be a function that makes one block's mixers, such as lambda: [Mine(config)]")
    mixers = block()
    if not isinstance(mixers, list | tuple):
        raise TypeError(f"block has to return a list of mixers, not a {type(mixers).__name__}")
    for mixer in mixers:
        if not isinstance(mixer, Mixer):
            raise TypeError(f"{type(mixer).__name__} is not a Mixer (spt.models.base.Mixer)")
    return mixers


def _feed_forward(config: BackboneConfig) -> list[Mixer]:
    """The sub-layer that ends a block, if any."""
    if config.feed_forward == "none":
        return []
    width, inner = config.d_ff or 4 * config.d_model, (config.ff_activation, config.ff_dropout)
    if config.feed_forward == "mlp":
        return [FeedForward(config.d_model, width, *inner)]
    if config.routing == "expert" and config.causal and not config.route_ahead:
        raise Unsupported(
            "routing: expert looks ahead, since whether an expert takes a step depends on later ones; choose "
            "routing: token or causal: false (or route_ahead: true, as in the DLR paper's language models)"
        )
    return [SwitchFeedForward(config.d_model, width, config.n_experts, config.routing, *inner)]


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
