"""What follows the linear part of a layer: GELU, dropout, a linear map, a gate.

What is cheap to recompute is not kept for the backward pass: of y -> GLU(W drop(gelu(y)) + b) only y and the output
of the linear map are, neither GELU nor dropout nor gate. Letters: B sequences, L steps, H features.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.ops.counts import Counts, linear
from spt.models.ops.dropout import keep_mask
from spt.models.ops.precision import autocast_type, without_autocast

Kind = Literal["identity", "none", "linear", "glu", "half_glu1", "half_glu2"]
Gelu = Literal["exact", "tanh"]


class Output(nn.Module):
    """y (B, L, H) -> (B, L, H), with z = drop(gelu(y)) (the S4 repository's block; S5, appendix G.1):

        identity   y
        none       z
        linear     W z + b
        glu        (V z + c) * sigmoid(W z + b), one map to 2H: the first half is gated by the second; S5's full_glu
        half_glu1  z * sigmoid(W z + b)
        half_glu2  y * sigmoid(W z + b)

    `pre_activation_dropout`: dropout before the GELU as well, as in the S4 repository. `tied`: one mask for all steps.
    `identity`, as in SPADE and in the DLR paper's language models, has no dropout.
    """

    def __init__(
        self,
        width: int,
        kind: Kind,
        *,
        gelu: Gelu = "exact",
        dropout: float = 0.0,
        tied: bool = False,
        pre_activation_dropout: bool = False,
    ) -> None:
        super().__init__()
        if kind == "identity" and pre_activation_dropout:
            raise ValueError(
                "output: identity has no GELU, so pre_activation_dropout has no effect; leave one of them out"
            )
        self.kind, self.dropout, self.tied, self.pre_activation_dropout = kind, dropout, tied, pre_activation_dropout
        self.approximate = "none" if gelu == "exact" else "tanh"
        has_map = kind not in ("identity", "none")
        self.linear = nn.Linear(width, 2 * width if kind == "glu" else width) if has_map else None

    def forward(self, y: Float[Tensor, "B *L H"]) -> Float[Tensor, "B *L H"]:
        if self.kind == "identity":
            return y
        scale = 1.0 / (1.0 - self.dropout)
        drops = self.training and self.dropout > 0.0
        before = keep_mask(y, self.dropout, self.tied) if drops and self.pre_activation_dropout else None
        after = keep_mask(y, self.dropout, self.tied) if drops else None
        activation = (before, after, scale, self.approximate)
        if self.linear is None:
            z: Tensor = _Activated.apply(y, *activation)
            return z
        if self.kind == "half_glu1":
            gated: Tensor = _HalfGated.apply(y, self.linear.weight, self.linear.bias, *activation)
            return gated
        v: Tensor = _ActivatedLinear.apply(y, self.linear.weight, self.linear.bias, *activation)
        if self.kind == "linear":
            return v
        if self.kind == "glu":
            return F.glu(v, dim=-1)
        dropped = y if before is None else y * before * scale
        return dropped * torch.sigmoid(v)

    def flops(self, length: int) -> Counts:
        return Counts() if self.linear is None else linear(length, self.linear.in_features, self.linear.out_features)


def _activate(y: Tensor, before: Tensor | None, after: Tensor | None, scale: float, approximate: str) -> Tensor:
    if before is not None:
        y = (y * before).mul_(scale)
    z = F.gelu(y, approximate=approximate)
    return z if after is None else z.mul_(after).mul_(scale)


def _activate_backward(
    grad: Tensor, y: Tensor, before: Tensor | None, after: Tensor | None, scale: float, approximate: str
) -> Tensor:
    if after is not None:
        grad = (grad * after).mul_(scale)
    dropped = y if before is None else (y * before).mul_(scale)
    grad = torch.ops.aten.gelu_backward(grad.to(y.dtype), dropped, approximate=approximate)
    return grad if before is None else grad.mul_(before).mul_(scale)


class _Activated(torch.autograd.Function):
    """drop(gelu(drop(y))), kept as y and the masks."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, before: Tensor | None, after: Tensor | None, scale: float, approximate: str
    ) -> Tensor:
        ctx.save_for_backward(y, before, after)
        ctx.activation = (scale, approximate)
        return _activate(y, before, after, scale, approximate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, before, after = ctx.saved_tensors
        return _activate_backward(grad, y, before, after, *ctx.activation), None, None, None, None


class _ActivatedLinear(torch.autograd.Function):
    """W drop(gelu(drop(y))) + b. Under autocast the product is in its type, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        scale: float,
        approximate: str,
    ) -> Tensor:
        ctx.type = autocast_type(y) or weight.dtype
        ctx.save_for_backward(y, weight, before, after)
        ctx.activation = (scale, approximate)
        with without_autocast(y):
            z = _activate(y, before, after, scale, approximate).to(ctx.type)
            return F.linear(z, weight.to(ctx.type), bias.to(ctx.type))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, weight, before, after = ctx.saved_tensors
        grad = grad.to(ctx.type)
        flat = grad.reshape(-1, grad.shape[-1])
        dy = dw = db = None
        if ctx.needs_input_grad[1]:
            z = _activate(y, before, after, *ctx.activation).to(ctx.type)
            dw = (flat.T @ z.reshape(-1, z.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = flat.sum(0, dtype=weight.dtype)
        if ctx.needs_input_grad[0]:
            dy = _activate_backward(grad @ weight.to(ctx.type), y, before, after, *ctx.activation)
        return dy, dw, db, None, None, None, None


class _HalfGated(torch.autograd.Function):
    """z * sigmoid(W z + b) with z = drop(gelu(drop(y))), kept as y and v = W z + b; backward computes z once more."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        scale: float,
        approximate: str,
    ) -> Tensor:
        ctx.type = autocast_type(y) or weight.dtype
        ctx.activation = (scale, approximate)
        with without_autocast(y):
            z = _activate(y, before, after, scale, approximate)
            v = F.linear(z.to(ctx.type), weight.to(ctx.type), bias.to(ctx.type))
            ctx.save_for_backward(y, weight, v, before, after)
            return z * torch.sigmoid(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, weight, v, before, after = ctx.saved_tensors
        z = _activate(y, before, after, *ctx.activation)
        gate = torch.sigmoid(v)
        dv = (grad * z).mul_(gate).mul_(1 - gate).to(ctx.type)
        flat = dv.reshape(-1, dv.shape[-1])
        dy = dw = db = None
        if ctx.needs_input_grad[1]:
            dw = (flat.T @ z.reshape(-1, z.shape[-1]).to(ctx.type)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = flat.sum(0, dtype=weight.dtype)
        if ctx.needs_input_grad[0]:
            dz = grad * gate + dv @ weight.to(ctx.type)
            dy = _activate_backward(dz, y, before, after, *ctx.activation)
        return dy, dw, db, None, None, None, None
