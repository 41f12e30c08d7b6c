"""What a model is: a stack of residual sub-layers between encoder and head, which are the same for all models.

A model file holds `class Config(BackboneConfig)` and `build(config) -> Backbone`; `spt list models` shows the first
line of its docstring. What such a file needs from mixer.py and options.py can be imported from here.

Letters: B sequences in a batch, L steps, D width (`d_model`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spt.models.feedforward import FeedForward, SwitchFeedForward
from spt.models.longconv import joint_kernels
from spt.models.mixer import (
    Context,
    Mixer,
    ParamGroup,
    PointwiseMixer,
    Unsupported,
    linear_flops,
    new_parameter,
)
from spt.models.ops.attention import AttentionWeights
from spt.models.ops.counts import Counts, as_counts
from spt.models.ops.dropout import Dropout
from spt.models.ops.norms import BatchNorm, ScalarNorm, ScaleNorm
from spt.models.options import FEED_FORWARD_OPTIONS, BackboneConfig, Initialisation
from spt.models.recurrence import joint_systems

__all__ = [
    "FEED_FORWARD_OPTIONS",
    "AttentionWeights",
    "Backbone",
    "BackboneConfig",
    "Context",
    "Counts",
    "Mixer",
    "ParamGroup",
    "PointwiseMixer",
    "Unsupported",
    "linear_flops",
    "new_parameter",
    "randomise",
]

RANDOM_STD = 0.1  # of every parameter that starts at random instead of by design (SPT paper, section 4.3)


class Backbone(nn.Module):
    """x <- x + dropout(mixer(norm(x))) over all sub-layers of all blocks, and a last norm; or, without `prenorm`,
    x <- norm(x + dropout(mixer(x))).

    `block` makes the sub-layers of one block; `positions` maps (B, L, D) to (B, L, D) once, below the first block.
    Without `mask_padding`, mixers see what the stream holds on padding instead of zeros. With `decay_all`, as in the
    published code of some models, weight decay applies to biases and norms too, unless `param_groups` say otherwise.

    With `recompute` (gradient checkpointing) only the stream between sub-layers is kept for the backward pass.
    """

    recompute: bool = False  # changes how it runs, not what it computes
    ignores_padding: bool = True  # are its answers independent of padding?
    length_multiple: int = 1  # the length of every sequence must be a multiple of this

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
            [mixer for _ in range(config.n_layers) for mixer in (*_make_block(block), *_make_feed_forward(config))]
        )
        self.norms = nn.ModuleList([make_norm(config) for _ in self.mixers])
        last = config.prenorm if config.last_norm is None else config.last_norm
        self.last_norm = make_norm(config) if last else nn.Identity()
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        self.param_groups = self._decay_all() if decay_all else {}
        self.initialise(config.initialisation)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        recompute = self.recompute and torch.is_grad_enabled()
        with contextlib.nullcontext() if recompute else _joint_parameters(self._layers, x, context):
            return self._stack(x, context, recompute)

    def _stack(self, x: Float[Tensor, "B L D"], context: Context, recompute: bool) -> Float[Tensor, "B L D"]:
        padding = ~context.valid[..., None] if context.padded and self.mask_padding else None
        if self.positions is not None:
            x = self.dropout(self.positions(x, context))
        for norm, mixer in zip(self.norms, self._layers, strict=True):
            if recompute:
                recomputation = _Recomputation()
                options: dict[str, Any] = {"use_reentrant": False, "context_fn": recomputation.contexts}
                arguments = (norm, mixer, x, context, padding)
                x = checkpoint(self._sublayer, *arguments, recomputation=recomputation, **options)
            else:
                x = self._sublayer(norm, mixer, x, context, padding)
        return _normalise(self.last_norm, x, context)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, like any module, except the kernels that are computed for all layers before the first."""
        if type(self).forward is Backbone.forward:
            self._stack = torch.compile(self._stack, *args, **kwargs)  # type: ignore[method-assign]
        else:
            super().compile(*args, **kwargs)

    def _sublayer(
        self,
        norm: nn.Module,
        mixer: Mixer,
        x: Tensor,
        context: Context,
        padding: Tensor | None,
        *,
        recomputation: "_Recomputation | None" = None,
    ) -> Float[Tensor, "B L D"]:
        update_statistics = recomputation is None or not recomputation.active
        h = _normalise(norm, x, context, update_statistics) if self.prenorm else x
        if padding is not None:
            h = h.masked_fill(padding, 0.0)
        x = mixer.update_stream(x, h, context, self.dropout)
        return x if self.prenorm else _normalise(norm, x, context, update_statistics)

    @property
    def _layers(self) -> list[Any]:
        """The mixers, as Any: to the type checker a ModuleList holds plain modules."""
        return list(self.mixers)

    @property
    def uses_step_times(self) -> bool:
        """Does it use the time between steps, where that varies (Context.steps)?"""
        return any(mixer.uses_step_times for mixer in self._layers)

    def rescale(self, rate: float) -> None:
        """From now on steps are `rate` times as far apart in time as in training: a signal sampled more coarsely (S4
        paper, section 3.1; S5 paper, section 6.2). Raises Unsupported if a sub-layer cannot do that."""
        if self.positions is not None:
            self.positions.rescale(rate)
        for mixer in self._layers:
            mixer.rescale(rate)

    @property
    def recurrent(self) -> bool:
        """Can it run step by step? Then repeated `step`s give what `forward` gives, in constant memory."""
        has_step = type(self).forward is Backbone.forward or type(self).step is not Backbone.step
        return has_step and self.causal and self.positions is None and all(mixer.recurrent for mixer in self._layers)

    def initial_state(self, batch: int) -> list[Any]:
        """The state before the first step of `batch` sequences. Parameters must not change while it is in use."""
        return [mixer.initial_state(batch) for mixer in self._layers]

    def step(self, x: Float[Tensor, "B D"], state: list[Any]) -> tuple[Float[Tensor, "B D"], list[Any]]:
        """The output of the next step and the state after it; in evaluation mode, for a model that is `recurrent`."""
        next_state = []
        for norm, mixer, layer_state in zip(self.norms, self._layers, state, strict=True):
            y, layer_state = mixer.step(norm(x) if self.prenorm else x, layer_state)
            x = x + y if self.prenorm else norm(x + y)
            next_state.append(layer_state)
        return self.last_norm(x), next_state

    def flops(self, length: int) -> Counts:
        """Operations on one sequence; norms, skips and dropout (a few operations per element) are left out."""
        mixers = [*self._layers, *([] if self.positions is None else [self.positions])]
        return sum((as_counts(mixer.flops(length)) for mixer in mixers), Counts())

    def shared_flops(self, length: int) -> Counts:
        """Operations on one batch that do not depend on its number of sequences."""
        return sum((as_counts(mixer.shared_flops(length)) for mixer in self._layers), Counts())

    def _decay_all(self) -> dict[str, ParamGroup]:
        modules = self.named_modules()
        declared = {f"{prefix}.{name}" for prefix, module in modules for name in getattr(module, "param_groups", {})}
        return {name: ParamGroup(weight_decay=True) for name, _ in self.named_parameters() if name not in declared}

    def initialise(self, method: Initialisation) -> None:
        """Set the initial parameters. A backbone that makes modules after `super().__init__` calls it once more."""
        if method == "random":
            randomise(self)
        elif method == "random_ssm":
            if not any(mixer.state_space for mixer in self._layers):
                raise ValueError("initialisation random_ssm: this model has no state-space parameters; use random")
            for mixer in self._layers:
                randomise(mixer, mixer.state_space)
        for module in self.modules():
            hook = getattr(module, "after_initialisation", None)
            if hook is not None:  # such as: measure the norm of the initial parameters
                hook()


@torch.no_grad()
def randomise(module: nn.Module, prefixes: tuple[str, ...] = ("",)) -> None:
    """Draw parameters whose names begin with one of `prefixes` from N(0, 0.1²), in their order."""
    for name, parameter in module.named_parameters():
        if name.startswith(prefixes):
            parameter.normal_(0.0, RANDOM_STD)


def sees_padding(network: nn.Module) -> bool:
    """Does an answer depend on how much padding stands behind its sequence?"""
    return any(getattr(module, "mask_padding", True) is False for module in network.modules())


def learns_from_padding(network: nn.Module) -> bool:
    """Does training depend on it: by what layers see, or by what batch norms average over?"""
    norms = any(isinstance(module, BatchNorm) and module.padding for module in network.modules())
    return norms or sees_padding(network)


def make_norm(config: BackboneConfig) -> nn.Module:
    width, eps = config.d_model, config.norm_eps
    if width == 1 and config.norm in ("layer", "scalar"):
        raise Unsupported(
            f"d_model 1 with norm: {config.norm}: of one feature, less its mean, nothing is left for a layer to see; "
            "choose a larger d_model or norm: none"
        )
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=1e-5 if eps is None else eps)
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=eps)
    if config.norm in ("batch", "batch_padded"):
        padding = config.norm == "batch_padded"
        return BatchNorm(width, 1e-5 if eps is None else eps, config.norm_momentum, config.norm_unbiased, padding)
    if config.norm == "scalar":
        return ScalarNorm(0.0 if eps is None else eps)
    if config.norm == "scale":
        return ScaleNorm(1e-5 if eps is None else eps)
    return nn.Identity()


def _make_block(block: Callable[[], Sequence[Mixer]]) -> Sequence[Mixer]:
    """The sub-layers of one block; a user's model file may have returned something else."""
    if not callable(block):
        raise TypeError("block has to be a function that makes the mixers of one block, e.g. lambda: [Mine(config)]")
    mixers = block()
    if not isinstance(mixers, list | tuple):
        raise TypeError(f"block has to return a list of mixers, not a {type(mixers).__name__}")
    for mixer in mixers:
        if not isinstance(mixer, Mixer):
            raise TypeError(f"{type(mixer).__name__} is not a Mixer (spt.models.base.Mixer)")
    return mixers


def _make_feed_forward(config: BackboneConfig) -> list[Mixer]:
    """The feed-forward sub-layer at the end of a block, if any."""
    if config.feed_forward == "none":
        return []
    width = config.d_ff or 4 * config.d_model
    inner: dict[str, Any] = {"activation": config.ff_activation, "dropout": config.ff_dropout}
    if config.feed_forward == "mlp":
        return [FeedForward(config.d_model, width, **inner)]
    if config.routing == "expert" and config.causal and not config.noncausal_routing:
        raise Unsupported(
            "routing: expert looks ahead, since whether an expert takes a step depends on later steps; choose "
            "routing: token or causal: false (or noncausal_routing: true, as in the DLR paper's language models)"
        )
    return [SwitchFeedForward(config.d_model, width, config.n_experts, routing=config.routing, **inner)]


class _Recomputation(contextlib.AbstractContextManager[None]):
    """In which a checkpointed sub-layer is recomputed for the backward pass."""

    active = False

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """The contexts of both passes."""
        return contextlib.nullcontext(), self

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *error: object) -> None:
        self.active = False


@contextlib.contextmanager
def _joint_parameters(mixers: Sequence[Mixer], x: Tensor, context: Context) -> Iterator[None]:
    """Inside the context, what depends on parameters alone has been computed for layers together that are alike."""
    equally_spaced = [mixer for mixer in mixers if context.steps is None or not mixer.uses_step_times]
    with joint_kernels(mixers, x.shape[1]), joint_systems(equally_spaced, x.shape[1]):
        yield


def _normalise(norm: nn.Module, x: Tensor, context: Context, update_statistics: bool = True) -> Tensor:
    if not isinstance(norm, BatchNorm):
        return norm(x)
    included = context.valid if context.padded and not norm.padding else None
    if context.real is not None:
        steps = torch.ones_like(context.valid) if included is None else included
        included = steps & context.real[:, None]
    return norm(x, included, update_statistics)
