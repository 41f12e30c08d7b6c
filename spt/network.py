"""The network: encoder, backbone, head. It has one shape in both stages; only the head is new after pretraining.

Letters: B sequences in a batch, L steps, C channels, D width, K numbers of an answer.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spt.errors import UsageError
from spt.models.base import Backbone, Context, Rate, linear_flops
from spt.objectives import Inputs, Output
from spt.recipe import EncoderConfig, HeadConfig, StepHeadConfig
from spt.tasks.base import Tokens, Values


class Encoder(nn.Module):
    """Tokens through a table, values through a linear map; a hidden step becomes one learned vector.

    The published code adds a mask flag as an input channel instead, cut off again for finetuning: the same function,
    since a linear map of [x (1 - m), m] is a linear map of x (1 - m) plus m times a vector, but with two shapes.
    """

    def __init__(self, input: Tokens | Values, d_model: int, config: EncoderConfig) -> None:
        super().__init__()
        self.map: nn.Embedding | nn.Linear
        if isinstance(input, Tokens):
            self.map = nn.Embedding(input.vocab, d_model)
            nn.init.normal_(self.map.weight, std=config.std)
        else:
            self.map = nn.Linear(input.channels, d_model)
        self.hidden = nn.Parameter(torch.randn(d_model) * config.std)
        self.rates = {"hidden": Rate()} | ({"map.weight": Rate()} if isinstance(input, Tokens) else {})

    def forward(
        self, x: Int[Tensor, "B L"] | Float[Tensor, "B L C"], hidden: Bool[Tensor, "B L"] | None
    ) -> Float[Tensor, "B L D"]:
        y = self.map(x).float()  # the residual stream is float32 whatever the precision of products
        return y if hidden is None else torch.where(hidden[..., None], self.hidden, y)

    def flops(self, length: int) -> float:
        return linear_flops(self.map, length) if isinstance(self.map, nn.Linear) else 0.0


class Head(nn.Module):
    """One answer a step, or one a sequence from the pooled valid steps."""

    def __init__(self, d_model: int, output: Output, config: StepHeadConfig | HeadConfig) -> None:
        super().__init__()
        self.pool = None if output.per_step else config.pool if isinstance(config, HeadConfig) else "mean"
        self.inner = nn.Linear(d_model, d_model) if config.mlp else None
        self.out = nn.Identity() if _is_identity(config) else nn.Linear(d_model, output.width)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B *L K"]:
        x = x if self.pool is None else pool(x, context, self.pool)
        return self.out(x if self.inner is None else F.relu(self.inner(x)))

    def flops(self, length: int) -> float:
        answers = length if self.pool is None else 1
        layers = [part for part in (self.inner, self.out) if isinstance(part, nn.Linear)]
        return sum((linear_flops(layer, answers) for layer in layers), 0.0)


def headed(output: Output, d_model: int, config: StepHeadConfig | HeadConfig) -> Output:
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
        return x[torch.arange(len(x), device=x.device), context.valid.sum(1) - 1]
    if not context.padded:
        return x.mean(1) if how == "mean" else x.amax(1)
    padding = ~context.valid[..., None]
    if how == "max":
        return x.masked_fill(padding, -torch.inf).amax(1)
    return x.masked_fill(padding, 0.0).sum(1) / context.valid.sum(1, keepdim=True)


class SequenceModel(nn.Module):
    """Encoder, backbone, head. `parts` names them, in the order in which data flow."""

    parts = ("encoder", "backbone", "head")

    def __init__(self, encoder: Encoder, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.encoder, self.backbone, self.head = encoder, backbone, head

    def forward(self, inputs: Inputs) -> Float[Tensor, "B *L K"]:
        x = self.encoder(inputs.x, inputs.hidden)
        x = self.backbone(x, inputs.context)
        with torch.autocast(x.device.type, enabled=False):  # answers and losses in float32
            return self.head(x.float(), inputs.context)

    def flops(self, length: int) -> float:
        """Forward operations on one sequence of `length` steps."""
        return self.encoder.flops(length) + self.backbone.flops(length) + self.head.flops(length)

    def batch_flops(self, rows: int, length: int) -> float:
        """Forward operations on a batch padded to `length` steps: what its sequences share is computed once."""
        return rows * self.flops(length) + self.backbone.shared_flops(length)

    def parameter_counts(self) -> dict[str, int]:
        counts = {part: sum(p.numel() for p in getattr(self, part).parameters()) for part in self.parts}
        return counts | {"total": sum(counts.values())}
