"""What a model is: a stack of residual sub-layers between the encoder and the head, which are the same for all models.

A model file holds `class Config(BackboneConfig)` and `build(config) -> Backbone`; its first docstring line is shown by
`spt list models`. `spt doctor --model FILE` runs the contract every model is held to.

Letters: B sequences in a batch, L steps, D width (`d_model`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class BackboneConfig(BaseModel):
    """Options that every model has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    d_model: int = Field(128, ge=1, description="width D of the residual stream")
    n_layers: int = Field(4, ge=1, description="blocks; what a block holds is the model's choice")
    causal: bool = Field(False, description="step t sees only steps up to t; the same in both stages")
    dropout: float = Field(0.0, ge=0, lt=1, description="on every sub-layer's output")
    norm: Literal["layer", "rms"] = Field("layer", description="normalisation before every sub-layer and at the end")
    max_length: int | None = Field(None, ge=1, description="longest sequence, in steps; by default the task's")


class Context(NamedTuple):
    """What every sub-layer may need to know about a batch."""

    valid: Bool[Tensor, "B L"]  # False on padding
    padded: bool  # is there any padding at all? lets a layer take its faster path


class Rate(NamedTuple):
    """How one parameter is trained, where that differs from the rest."""

    lr: float | None = None  # a learning rate of its own
    scale: float = 1.0  # or a multiple of the recipe's
    decay: bool = False  # does weight decay apply?


class Mixer(nn.Module):
    """One sub-layer of the residual stack: (B, L, D) -> (B, L, D).

    Padding arrives as zeros; what a mixer puts there is ignored. A mixer that looks across steps must not let step t
    depend on padding, nor, when the config says causal, on any step after t.
    """

    rates: ClassVar[Mapping[str, Rate]] = {}  # by the parameter's name in this module

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def flops(self, length: int) -> float:
        """Operations of the forward pass on one sequence of `length` steps; a multiply-add counts as two."""
        raise NotImplementedError(f"{type(self).__name__} does not state its operations")


class Backbone(nn.Module):
    """x <- x + dropout(mixer(norm(x))), over all sub-layers of all blocks, and a last norm: a pre-norm stack.

    `block` makes the sub-layers of one block, `positions` maps (B, L, D) to (B, L, D) once at the bottom. Without
    `mask_padding`, mixers are handed what the stream holds on padding instead of zeros.

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
    ) -> None:
        super().__init__()
        self.causal = config.causal
        self.mask_padding = mask_padding
        self.positions = positions
        self.mixers = nn.ModuleList([mixer for _ in range(config.n_layers) for mixer in block()])
        self.norms = nn.ModuleList([_norm(config) for _ in self.mixers])
        self.last_norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        padding = ~context.valid[..., None] if context.padded and self.mask_padding else None
        if self.positions is not None:
            x = self.dropout(self.positions(x, context))
        recompute = self.recompute and torch.is_grad_enabled()
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            if recompute:
                x = checkpoint(self._sublayer, norm, mixer, x, context, padding, use_reentrant=False)
            else:
                x = self._sublayer(norm, mixer, x, context, padding)
        return self.last_norm(x)

    def _sublayer(
        self, norm: nn.Module, mixer: nn.Module, x: Tensor, context: Context, padding: Tensor | None
    ) -> Float[Tensor, "B L D"]:
        h = norm(x)
        if padding is not None:
            h = h.masked_fill(padding, 0.0)
        return x + self.dropout(mixer(h, context))

    def flops(self, length: int) -> float:
        """Forward operations of one sequence; norms, skips and dropout, a few per element, are left out."""
        mixers: list[Any] = [*self.mixers, *([] if self.positions is None else [self.positions])]
        return float(sum(mixer.flops(length) for mixer in mixers))


def linear_flops(linear: nn.Linear, length: int) -> float:
    """Operations of a linear map applied at every step."""
    return 2.0 * length * linear.in_features * linear.out_features


def _norm(config: BackboneConfig) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[config.norm](config.d_model)
