"""The network: encoder, backbone, head. It has one shape in both stages; only the head is new after pretraining.

Letters: b examples in a batch, B sequences (of pairs 2 b, else b), L steps, C channels, D width, K numbers of an
answer.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spt.config.recipe import EncoderConfig, HeadConfig, StepHeadConfig
from spt.errors import UsageError
from spt.models.base import Backbone, Context, Counts, ParamGroup, linear_flops
from spt.models.ops.attention import sinusoids
from spt.models.ops.counts import as_counts, linear
from spt.models.ops.flax import dense_, lecun_normal_
from spt.models.ops.precision import without_autocast
from spt.tasks.base import Tokens, Values
from spt.training.objectives import Inputs, Output


class Encoder(nn.Module):
    """Tokens through a table, values through a linear map; a hidden step becomes one learned vector.

    The published code adds a mask flag as an input channel instead, cut off again for finetuning: the same function,
    since a linear map of [x (1 - m), m] is a linear map of x (1 - m) plus m times a vector, but with two shapes.

    Where values may be missing (NaN in x), with m (B, L, C) the flags of those that are, a step becomes

        y = W (x with 0 where m) + b + M m,

    which is what flags as further channels would compute: W stands for the channels, M for their flags. M starts at
    zero (in flax too), so that a missing value starts as the channel's mean, and all else as without it.

    Static features s (B, F) add S s to the vector of every step, hidden ones too: what stands beside a sequence is
    known at each of its steps, in pretraining as in finetuning. S starts at zero.
    """

    def __init__(self, input: Tokens | Values, d_model: int, config: EncoderConfig) -> None:
        super().__init__()
        _check_encoder(input, config)
        self.map: nn.Embedding | OneHot | nn.Linear | Frames
        if isinstance(input, Tokens) and config.init == "flax":
            self.map = OneHot(input.vocab, d_model)
        elif isinstance(input, Tokens):
            self.map = nn.Embedding(input.vocab, d_model)
            nn.init.normal_(self.map.weight, std=config.init_std)
        elif config.frame_encoder == "cnn":
            self.map = Frames(input, d_model, config.frame_features)
        else:
            self.map = nn.Linear(input.channels, d_model)
        if config.init == "flax":
            _start_as_flax(self.map)
        self.hidden = nn.Parameter(torch.randn(d_model) * _hidden_std(input, self.map, config))
        self.circle = nn.Linear(2, d_model, bias=False) if config.positions == "circle" else None
        self.times = _new_times(self.map, d_model, config) if config.step_times == "append" else None
        channels = input.channels if isinstance(input, Values) and input.missing else 0
        self.missing = _started_at_zero(channels, d_model) if channels else None
        self.static = _started_at_zero(input.static, d_model) if input.static else None
        no_decay = ["hidden", *(["map.weight"] if isinstance(self.map, nn.Embedding) else [])]
        self.param_groups = dict.fromkeys(no_decay, ParamGroup())

    def forward(
        self,
        x: Int[Tensor, "B L"] | Float[Tensor, "B L C"],
        hidden: Bool[Tensor, "B L"] | None,
        context: Context,
        static: Float[Tensor, "B F"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        if self.missing is None:
            y = self.map(x).float()  # the residual stream is float32 whatever the precision of products
        else:
            gaps = x.isnan()
            y = self.map(x.masked_fill(gaps, 0)).float() + self.missing(gaps.to(x.dtype)).float()
        y = y if hidden is None else torch.where(hidden[..., None], self.hidden, y)
        y = y if self.circle is None else y + self.circle(_circle(context)).float()
        if self.static is not None:
            assert static is not None, "rows have what the input says stands beside them"
            y = y + self.static(static)[:, None].float()
        if self.times is None:
            return y
        assert context.steps is not None  # see build.py
        return y + self.times(context.steps[..., None]).float()

    def for_backbone(self, context: Context) -> Context:
        """What the backbone is told of a batch: not the times that the encoder has taken."""
        return context if self.times is None else context._replace(steps=None)

    def flops(self, length: int) -> Counts:
        """Data get no gradient, so that backward is as much as forward. A table of tokens costs nothing."""
        counts = Counts()
        if isinstance(self.map, nn.Linear):
            counts += linear(length, self.map.in_features, self.map.out_features, data=True)
        elif isinstance(self.map, Frames):
            counts += self.map.flops(length)
        if self.circle is not None:
            counts += linear(length, self.circle.in_features, self.circle.out_features, data=True)
        if self.times is not None:
            counts += linear(length, 1, self.times.out_features, data=True)
        if self.missing is not None:
            counts += linear(length, self.missing.in_features, self.missing.out_features, data=True)
        if self.static is not None:
            counts += linear(1, self.static.in_features, self.static.out_features, data=True)
        return counts


def _check_encoder(input: Tokens | Values, config: EncoderConfig) -> None:
    if isinstance(input, Tokens) and config.frame_encoder == "cnn":
        raise UsageError("encoder.frame_encoder: cnn is for steps that are pictures, but this task has tokens")
    if isinstance(input, Values) and input.missing and config.frame_encoder == "cnn":
        raise UsageError(
            "encoder.frame_encoder: cnn takes whole pictures, but values of this task may be missing; use linear"
        )
    if isinstance(input, Values) and config.init_std != 1.0:
        raise UsageError(
            "encoder.init_std is the spread of token embeddings, but this task has values; leave it out (the spread of "
            "the hidden vector is encoder.hidden_std)"
        )


def _started_at_zero(inputs: int, d_model: int) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, inputs, d_model, bias=False)  # draws nothing
    assert isinstance(layer, nn.Linear)
    nn.init.zeros_(layer.weight)
    return layer


def _hidden_std(input: Tokens | Values, map: nn.Module, config: EncoderConfig) -> float:
    """Of values, that of the mask flag's column plus the bias in a linear map from one input more."""
    if config.hidden_std is not None:
        return config.hidden_std
    if isinstance(input, Tokens):
        return config.init_std if config.init == "torch" else 1 / math.sqrt(_inputs(map))
    return math.sqrt((2 / 3 if config.init == "torch" else 1) / (_inputs(map) + 1))


def _inputs(map: nn.Module) -> int:
    """Of an encoder's last map; of tokens as one-hot vectors."""
    if isinstance(map, nn.Embedding | OneHot):
        return len(map.weight)
    inputs = (map.out if isinstance(map, Frames) else map).in_features
    assert isinstance(inputs, int)
    return inputs


def _new_times(map: nn.Module, d_model: int, config: EncoderConfig) -> nn.Linear:
    """The column of one input more, which starts as such a column does."""
    layer = nn.Linear(1, d_model, bias=False)
    if config.init == "flax":
        lecun_normal_(layer.weight, fan_in=_inputs(map) + 1)
    else:
        nn.init.uniform_(layer.weight, -1, 1)
        with torch.no_grad():
            layer.weight /= math.sqrt(_inputs(map) + 1)
    return layer


def _start_as_flax(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            dense_(layer)


class OneHot(nn.Module):
    """A linear map of one-hot vectors, W[token] + b, as flax starts it (S5's published code)."""

    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(lecun_normal_(torch.empty(vocab, d_model), fan_in=vocab))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return F.embedding(x, self.weight) + self.bias


def _circle(context: Context) -> Float[Tensor, "B L 2"]:
    """cos and sin of 2 pi i / T at step i of a sequence of T steps."""
    valid = context.valid
    steps = torch.arange(valid.shape[1], device=valid.device)
    angle = 2 * math.pi * steps / valid.sum(1, keepdim=True)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


class Frames(nn.Module):
    """A step that is a picture, through two convolutions, each with ReLU and pooling by 2 (S5 paper, appendix G.3.8):
    12 features of 5x5, then 12 of 3x3 at every second pixel; a dense layer with ReLU, and a linear map to D."""

    FEATURES = 12
    PART = 2**16  # pixels; on a CPU the features of so many stay in its caches, those of a batch of sequences do not

    def __init__(self, input: Values, d_model: int, features: int) -> None:
        super().__init__()
        if input.frame is None or min(input.frame) < 8:
            had = "whose steps are none" if input.frame is None else f"whose pictures have {input.frame} pixels"
            raise UsageError(
                f"encoder.frame_encoder: cnn is for pictures of at least 8x8 pixels, but this is a task {had}"
            )
        self.frame = input.frame
        self.first = nn.Conv2d(1, self.FEATURES, 5, padding=2)
        self.second = nn.Conv2d(self.FEATURES, self.FEATURES, 3, stride=2, padding=1)
        height, width = (-(-(side // 2) // 2) // 2 for side in self.frame)
        self.dense = nn.Linear(self.FEATURES * height * width, features)
        self.out = nn.Linear(features, d_model)

    def forward(self, x: Float[Tensor, "B L C"]) -> Float[Tensor, "B L D"]:
        frames = x.reshape(-1, 1, *self.frame)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            parts = frames.split(max(1, self.PART // math.prod(self.frame)))
            y = torch.cat([self._features(part) for part in parts])
        else:
            y = self._features(frames)
        return self.out(F.relu(self.dense(y))).unflatten(0, x.shape[:2])

    def _features(self, y: Float[Tensor, "N 1 H W"]) -> Float[Tensor, "N F"]:
        for layer in (self.first, self.second):
            weight = layer.weight.to(memory_format=torch.channels_last)  # a fifth faster than channels first
            y = F.conv2d(y, weight, layer.bias, layer.stride, layer.padding)
            y = F.relu(F.max_pool2d(y, 2))  # bit for bit ReLU, then pooling, on a quarter of the numbers
        return y.flatten(1)

    def flops(self, length: int) -> Counts:
        """A convolution of pixels is a linear map at every one of them; the first one's input are data."""
        height, width = self.frame
        halved = -(-(height // 2) // 2) * -(-(width // 2) // 2)
        first = linear(length * height * width, 1, self.first.weight.numel(), data=True)
        second = linear(length * halved, 1, self.second.weight.numel())
        return first + second + linear_flops(self.dense, length) + linear_flops(self.out, length)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
}


class Head(nn.Module):
    """One answer a step, or one an example from the pooled valid steps; of a pair, whose pooled vectors are u and v,
    from [u, v, u - v, u v] (Long Range Arena's Retrieval, as in the S4 code). With `only_last` the answer of a step is
    that to `last_and_place`, not to the step's own vector."""

    def __init__(self, d_model: int, output: Output, config: StepHeadConfig | HeadConfig) -> None:
        super().__init__()
        kind = config.pool if isinstance(config, HeadConfig) else "mean"
        self.pool = None if output.per_step else kind
        self.only_last = output.per_step and kind == "last"
        self.pairs = output.sequences == 2
        width = 4 * d_model if self.pairs else d_model
        self.inner = nn.Linear(width, d_model) if config.mlp else None
        self.activation = config.mlp_activation or ("gelu" if self.pairs else "relu")
        inward = d_model if config.mlp else width
        # A gaussian's variance has layers of its own.
        size = output.size if output.loss == "gaussian" else output.width
        self.out = nn.Identity() if _is_identity(config) else nn.Linear(inward, size)
        spread = output.loss == "gaussian"
        self.spread_inner = nn.Linear(width, d_model) if spread and config.mlp else None
        self.spread = nn.Linear(inward, size) if spread else None
        if config.init == "flax":
            _start_as_flax(self)

    def forward(self, x: Float[Tensor, "B *L D"], context: Context) -> Float[Tensor, "b *answers K"]:
        """x may hold just the steps that need an answer (N, D), where every step has one."""
        x = x if self.pool is None else pool(x, context, self.pool)
        if self.pairs:
            u, v = x.chunk(2)
            x = torch.cat([u, v, u - v, u * v], dim=-1)
        return self.answer(x)

    def answer(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B K"]:
        """The answer to each vector, which nothing is to be pooled with any more."""
        answer = self.out(self._bent(self.inner, x))
        if self.spread is None:
            return answer
        return torch.cat([answer, self.spread(self._bent(self.spread_inner, x))], dim=-1)

    def _bent(self, inner: nn.Linear | None, x: Tensor) -> Tensor:
        return x if inner is None else ACTIVATIONS[self.activation](inner(x))

    def flops(self, length: int, data: bool = False) -> Counts:
        """Of one sequence: half of those of a pair. Of `data`, such as features that are not trained, the first layers
        need no gradient."""
        answers = length if self.pool is None else 0.5 if self.pairs else 1
        counts = Counts()
        for first, second in ((self.inner, self.out), (self.spread_inner, self.spread)):
            layers = [layer for layer in (first, second) if isinstance(layer, nn.Linear)]
            for i, layer in enumerate(layers):
                counts += linear(answers, layer.in_features, layer.out_features, data=data and i == 0)
        return counts


def output_of_head(output: Output, d_model: int, config: StepHeadConfig | HeadConfig) -> Output:
    """The output as this head gives it: without a layer of its own it has d_model classes, the real ones first."""
    if not _is_identity(config):
        return output
    if output.loss != "cross_entropy" or output.size > 1:
        raise UsageError(
            "pretrain.head.identity: the last norm's numbers can stand for the scores of one token a step, but this "
            f"objective asks for {output.size} x {output.loss}; use identity=false"
        )
    if d_model < output.classes:
        raise UsageError(
            f"pretrain.head.identity: the last norm has d_model = {d_model} numbers, fewer than the {output.classes} "
            "classes they stand for; use a wider model, or identity=false"
        )
    return output._replace(classes=d_model)


def _is_identity(config: StepHeadConfig | HeadConfig) -> bool:
    return isinstance(config, StepHeadConfig) and config.identity


def pool(x: Float[Tensor, "B L D"], context: Context, how: Literal["mean", "max", "last"]) -> Float[Tensor, "B D"]:
    """Over the valid steps of each sequence."""
    if how == "last":
        return x[torch.arange(x.shape[0], device=x.device), context.valid.sum(1) - 1]
    if not context.padded:
        return x.mean(1) if how == "mean" else x.amax(1)
    padding = ~context.valid[..., None]
    if how == "max":
        return x.masked_fill(padding, -torch.inf).amax(1)
    return x.masked_fill(padding, 0.0).sum(1) / context.valid.sum(1, keepdim=True)


def last_and_place(x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
    """At every step the vector of the sequence's last one, plus sines and cosines of the step's place: what a row was
    has to be held by one vector (MAD's compression)."""
    return pool(x, context, "last")[:, None] + sinusoids(x.shape[1], x.shape[2]).to(x)


class _Steps(torch.autograd.Function):
    """Some steps of (B, L, D) as (N, D). No step is named twice, so that backward copies where torch would add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Tensor) -> Tensor:
        ctx.save_for_backward(steps)
        ctx.shape = x.shape
        return x.flatten(0, 1).index_select(0, steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (steps,) = ctx.saved_tensors
        B, L, D = ctx.shape
        return grad.new_zeros(B * L, D).index_copy_(0, steps, grad).view(B, L, D), None


class SequenceModel(nn.Module):
    """Encoder, backbone, head. `parts` names them, in the order in which data flow.

    With a `denoiser`, a second head, it is asked two things of one batch, in two passes. A `frozen` one trains its
    head alone: the features that the head is given are computed as in an evaluation, without gradients.
    """

    parts: tuple[str, ...] = ("encoder", "backbone", "head")

    def __init__(
        self, encoder: Encoder, backbone: Backbone, head: Head, denoiser: Head | None = None, frozen: bool = False
    ) -> None:
        super().__init__()
        self.encoder, self.backbone, self.head = encoder, backbone, head
        self.denoiser, self.frozen = denoiser, frozen
        if denoiser is not None:
            self.parts = (*self.parts, "denoiser")
        if frozen:
            encoder.requires_grad_(False)
            backbone.requires_grad_(False)
            self.train()
        self._counts: dict[int, tuple[Counts, Counts]] = {}  # by length: of a sequence, and of what a batch shares

    def train(self, mode: bool = True) -> "SequenceModel":
        super().train(mode)
        if self.frozen:  # no dropout, and batch norms keep their statistics
            self.encoder.eval()
            self.backbone.eval()
        return self

    def hides_steps(self, hides: bool) -> None:
        """Train the vector of hidden steps, or leave it: data parallelism cannot wait for a gradient that never
        comes."""
        self.encoder.hidden.requires_grad_(hides and not self.frozen)

    def features(self, inputs: Inputs) -> Float[Tensor, "B L D"]:
        """What the head is given: a vector a step."""
        with torch.no_grad() if self.frozen else contextlib.nullcontext():
            x = self.encoder(inputs.x, inputs.hidden, inputs.context, inputs.static)
            return self.backbone(x, self.encoder.for_backbone(inputs.context))

    def forward(
        self, inputs: Inputs, scored: Int[Tensor, " N"] | None = None, denoising: bool = False
    ) -> Float[Tensor, "b *L K"]:
        """Answers; with one a step, only those of the steps `scored` (indices into b x L), as (N, K). Of the second
        head, if `denoising`."""
        x = self.features(inputs)
        if self.head.only_last and not denoising:
            x = last_and_place(x, inputs.context)
        if scored is not None:
            picked: Tensor = _Steps.apply(x, scored)  # type: ignore[no-untyped-call]
            x = picked
        with without_autocast(x):  # answers and losses in float32
            if not denoising:
                return self.head(x.float(), inputs.context)
            assert self.denoiser is not None
            # The other head has a gradient too, of zero: data parallelism waits for every parameter's.
            other = sum(parameter.sum() for parameter in self.head.parameters())
            return self.denoiser(x.float(), inputs.context) + 0.0 * other

    def flops(self, length: int) -> Counts:
        """Operations on one sequence of `length` steps."""
        features = self.encoder.flops(length) + as_counts(self.backbone.flops(length))
        if self.frozen:
            return features.without_backward() + self.head.flops(length, data=True)
        return features + self.head.flops(length)

    def batch_flops(self, rows: int, length: int, scored: float | None = None) -> Counts:
        """Operations on a batch padded to `length` steps: what its sequences share is computed once. Of answers a step,
        `scored` are computed; default: all."""
        sequence, shared = self._counted(length)
        counts = rows * sequence + shared
        if scored is not None and self.head.pool is None:
            counts += (scored - rows * length) * self.head.flops(1, data=self.frozen)
        return counts

    def denoising_flops(self, rows: int, length: int, scored: float) -> Counts:
        """Operations of the second pass over a batch, which has what its sequences share already."""
        assert self.denoiser is not None
        sequence, _ = self._counted(length)
        return rows * (sequence - self.head.flops(length)) + scored * self.denoiser.flops(1)

    def _counted(self, length: int) -> tuple[Counts, Counts]:
        if length not in self._counts:
            shared = as_counts(self.backbone.shared_flops(length))
            self._counts[length] = self.flops(length), shared.without_backward() if self.frozen else shared
        return self._counts[length]

    def parameter_counts(self) -> dict[str, int]:
        counts = {part: sum(p.numel() for p in getattr(self, part).parameters()) for part in self.parts}
        return counts | {"total": sum(counts.values())}


def published_count(model: SequenceModel) -> int:
    """Parameters as the papers count them: their finetuned networks have no vector of hidden steps. (Their mask flag is
    a column of the encoder, which they cut off after pretraining.)"""
    return model.parameter_counts()["total"] - model.encoder.hidden.numel()


@contextlib.contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """Within, the running statistics of batch norms stay as they are, whatever passes through them."""
    kept = {name: buffer.clone() for name, buffer in batch_statistics(model).items()}
    try:
        yield
    finally:
        for name, buffer in batch_statistics(model).items():
            buffer.copy_(kept[name])


def batch_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of batch norms, by name."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(names)}
