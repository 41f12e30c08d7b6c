"""What follows the linear part of a layer: GELU, dropout, a linear map, a gate.

What is cheap to recompute is not kept for the backward pass: of y -> GLU(W drop(gelu(y)) + b) only y and the output
of the linear map are, neither GELU nor dropout nor gate. Letters: B sequences, L steps, H features.
"""

import itertools
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spt.models.ops.counts import Counts, linear
from spt.models.ops.dropout import keep_mask
from spt.models.ops.precision import autocast_type, without_autocast
from spt.models.ops.product import product

_NUMBERS = 2**19  # of a tensor, at a time on a CPU: a thousand steps of width 512

Part = tuple[slice, slice]  # of the sequences, and of their steps
Kind = Literal["identity", "none", "linear", "glu", "half_glu1", "half_glu2"]
Gelu = Literal["exact", "tanh"]
EarlyDropout = bool | Literal["untied"]


class Output(nn.Module):
    """y (B, L, H) -> (B, L, H), with z = drop(gelu(y)) (the S4 repository's block; S5, appendix G.1):

        identity   y
        none       z
        linear     W z + b
        glu        (V z + c) * sigmoid(W z + b), one map to 2H: the first half is gated by the second; S5's full_glu
        half_glu1  z * sigmoid(W z + b)
        half_glu2  y * sigmoid(W z + b)

    `tied`: one mask for all steps. `pre_activation_dropout`: dropout before the GELU as well; `untied`, as in the S4
    repository, with a mask for each step even where the other is tied.
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
        pre_activation_dropout: EarlyDropout = False,
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
        tied = self.tied and self.pre_activation_dropout != "untied"
        before = keep_mask(y, self.dropout, tied) if drops and self.pre_activation_dropout else None
        after = keep_mask(y, self.dropout, self.tied) if drops else None
        if self.linear is None:
            z: Tensor = _Activated.apply(y, before, after, scale, self.approximate)
            return z
        kind = "linear" if self.kind == "half_glu2" else self.kind
        parameters = self.linear.weight, self.linear.bias
        v: Tensor = _Mapped.apply(y, *parameters, before, after, kind, scale, self.approximate)
        if self.kind != "half_glu2":
            return v
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


class _Mapped(torch.autograd.Function):
    """With z = drop(gelu(drop(y))) and v = W z + b: v itself, GLU(v), or z * sigmoid(v) (half_glu1).

    Under autocast products are in its type, forward and backward. Some steps at a time, so that z and its gradient
    stay in a CPU's cache; the backward pass of GLU puts the gradient of v into v's own place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        kind: Kind,
        scale: float,
        approximate: str,
    ) -> Tensor:
        ctx.type = autocast_type(y) or weight.dtype
        ctx.kind, ctx.activation = kind, (scale, approximate)
        with without_autocast(y):
            w, b = weight.to(ctx.type), bias.to(ctx.type)

            def one(part: Part) -> tuple[Tensor, Tensor | None]:
                """The map's output and what a gate makes of it."""
                z = _activate(y[part], _of(before, part), _of(after, part), scale, approximate)
                v = product(z.flatten(0, -2).to(ctx.type), w, b)
                v = torch.ops.aten._unsafe_view(v, [*z.shape[:-1], len(w)])  # what is returned may be changed in place
                if kind == "linear":
                    return v, None
                return v, F.glu(v) if kind == "glu" else z * torch.sigmoid(v)

            parts = list(itertools.product(*blocks(y)))
            if len(parts) == 1:
                v, gated = one(parts[0])
            else:
                v = y.new_empty(*y.shape[:-1], len(weight), dtype=ctx.type)
                gated = None if kind == "linear" else y.new_empty(y.shape, dtype=ctx.type if kind == "glu" else y.dtype)
                for part in parts:
                    mapped, through = one(part)
                    v[part] = mapped
                    if gated is not None and through is not None:
                        gated[part] = through
        ctx.save_for_backward(y, weight, None if gated is None else v, before, after)
        return v if gated is None else gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, weight, v, before, after = ctx.saved_tensors
        w = weight.to(ctx.type)
        needs_y, needs_w, needs_b = ctx.needs_input_grad[:3]

        def one(part: Part) -> tuple[Any, Any, Any]:
            """Gradients of y, of the weight, transposed, and of the bias."""
            masks = (_of(before, part), _of(after, part))
            z = _activate(y[part], *masks, *ctx.activation)
            dz = None
            if ctx.kind == "linear":
                dv = grad[part].to(ctx.type)
            elif ctx.kind == "glu":
                dv = _glu_backward_(v[part], grad[part])
            else:
                gate = torch.sigmoid(v[part])
                dv = _sigmoid_backward(grad[part] * z, gate).to(ctx.type)
                dz = grad[part] * gate
            flat = dv.reshape(-1, dv.shape[-1])
            dw = product(z.reshape(-1, z.shape[-1]).to(ctx.type).T, flat.T) if needs_w else None
            db = flat.sum(0, dtype=weight.dtype) if needs_b else None
            if not needs_y:
                return None, dw, db
            through = product(flat, w.T).view_as(z)
            dz = through if dz is None else dz.add_(through)
            return _activate_backward(dz, y[part], *masks, *ctx.activation), dw, db

        parts = list(itertools.product(*blocks(y)))
        if len(parts) == 1:
            dy, dw, db = one(parts[0])
            dw = None if dw is None else dw.to(weight.dtype)
        else:
            dy = torch.empty_like(y) if needs_y else None
            dw = torch.zeros_like(weight.T, memory_format=torch.contiguous_format) if needs_w else None
            db = weight.new_zeros(len(weight)) if needs_b else None
            for part in parts:
                dy_part, dw_part, db_part = one(part)
                if dy is not None:
                    dy[part] = dy_part
                if dw is not None:
                    dw += dw_part
                if db is not None:
                    db += db_part
        return dy, None if dw is None else dw.T, db, None, None, None, None, None


def blocks(y: Float[Tensor, "B *L H"]) -> tuple[list[slice], list[slice]]:
    """Of sequences and of steps, of what fits a cache on a CPU; all at once elsewhere, and in an exported program."""
    if y.device.type != "cpu" or torch.compiler.is_exporting():
        return [slice(None)], [slice(None)]
    count, steps, rows = len(y), math.prod(y.shape[1:-1]), max(1, _NUMBERS // y.shape[-1])
    sequences = _slices(count, max(1, rows // max(1, steps)))
    return sequences, _slices(steps, rows) if y.ndim == 3 else [slice(None)]


def _slices(count: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, count, size)]


def _of(mask: Tensor | None, part: Part) -> Tensor | None:
    """Masks may have one row for all steps."""
    return None if mask is None else mask[part[0]] if mask.shape[1] == 1 else mask[part]


def _glu_backward_(v: Tensor, grad: Tensor) -> Tensor:
    """The gradient of v for GLU(v) = a * sigmoid(b) with v = [a, b]: [grad s, grad a s (1 - s)] with s = sigmoid(b). In
    v's place, if v is not in half precision."""
    dv = v.float() if v.dtype in (torch.bfloat16, torch.float16) else v
    a, b = dv.chunk(2, dim=-1)
    through = grad.to(dv.dtype) * b.sigmoid_()
    torch.ops.aten.sigmoid_backward.grad_input(a.mul_(grad), b, grad_input=b)
    a.copy_(through)
    return dv.to(v.dtype)


def _sigmoid_backward(grad: Tensor, sigmoid: Tensor) -> Tensor:
    """grad s (1 - s)."""
    result: Tensor = torch.ops.aten.sigmoid_backward(grad, sigmoid)
    return result
