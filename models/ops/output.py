"""From a layer's linear answer to its output: GELU, dropout, a linear map, a gate.

What is cheap to compute again is not kept for the backward pass: of y -> GLU(W drop(gelu(y)) + b) only y and the
map's answer are, neither GELU nor dropout nor gate. Letters: B sequences, L steps, H features.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.ops.counts import Counts, linear
from spt.models.ops.dropout import keep_mask

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

    `early`: dropout before the GELU as well, as the S4 repository has it. `tied`: one mask for all steps. There is
    neither in `identity`, as in SPADE and in the DLR paper's language models.
    """

    def __init__(
        self,
        width: int,
        kind: Kind,
        *,
        gelu: Gelu = "exact",
        dropout: float = 0.0,
        tied: bool = False,
        early: bool = False,
    ) -> None:
        super().__init__()
        if kind == "identity" and early:
            raise ValueError(
                "output: identity has no GELU before which early_dropout could stand; leave one of them out"
            )
        self.kind, self.dropout, self.tied, self.early = kind, dropout, tied, early
        self.approximate = "none" if gelu == "exact" else "tanh"
        mapless = kind in ("identity", "none")
        self.linear = None if mapless else nn.Linear(width, 2 * width if kind == "glu" else width)

    def forward(self, y: Float[Tensor, "B *L H"]) -> Float[Tensor, "B *L H"]:
        if self.kind == "identity":
            return y
        scale = 1.0 / (1.0 - self.dropout)
        drops = self.training and self.dropout > 0.0
        early = keep_mask(y, self.dropout, self.tied) if drops and self.early else None
        late = keep_mask(y, self.dropout, self.tied) if drops else None
        activation = (early, late, scale, self.approximate)
        if self.linear is None:
            z: Tensor = _Activated.apply(y, *activation)
            return z
        v: Tensor = _ActivatedLinear.apply(y, self.linear.weight, self.linear.bias, *activation)
        if self.kind == "linear":
            return v
        if self.kind == "glu":
            return F.glu(v, dim=-1)
        if self.kind == "half_glu1":
            gated: Tensor = _GatedActivation.apply(y, v, *activation)
            return gated
        dropped = y if early is None else y * early * scale
        return dropped * torch.sigmoid(v)

    def import_dense(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our map from flax's dense layers: out1 is gated by out2 (S5 and LRU repositories), or out2 alone."""
        names = ["out1", "out2"] if self.kind == "glu" else ["out2"]
        if self.linear is None or f"{names[0]}.kernel" not in raw:
            return {}
        weight = torch.cat([raw[f"{name}.kernel"].T for name in names])
        return {"linear.weight": weight, "linear.bias": torch.cat([raw[f"{name}.bias"] for name in names])}

    def export_dense(self) -> dict[str, Tensor]:
        """The other way."""
        if self.linear is None:
            return {}
        names = ["out1", "out2"] if self.kind == "glu" else ["out2"]
        width = self.linear.in_features
        found = {f"{n}.kernel": weight.T for n, weight in zip(names, self.linear.weight.split(width), strict=True)}
        return found | {f"{n}.bias": bias for n, bias in zip(names, self.linear.bias.split(width), strict=True)}

    def flops(self, length: int) -> Counts:
        return Counts() if self.linear is None else linear(length, self.linear.in_features, self.linear.out_features)


def _activate(y: Tensor, early: Tensor | None, late: Tensor | None, scale: float, approximate: str) -> Tensor:
    if early is not None:
        y = (y * early).mul_(scale)
    z = F.gelu(y, approximate=approximate)
    return z if late is None else z.mul_(late).mul_(scale)


def _activate_backward(
    grad: Tensor, y: Tensor, early: Tensor | None, late: Tensor | None, scale: float, approximate: str
) -> Tensor:
    if late is not None:
        grad = (grad * late).mul_(scale)
    seen = y if early is None else (y * early).mul_(scale)
    grad = torch.ops.aten.gelu_backward(grad.to(y.dtype), seen, approximate=approximate)
    return grad if early is None else grad.mul_(early).mul_(scale)


class _Activated(torch.autograd.Function):
    """drop(gelu(drop(y))), kept as y and the masks."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, early: Tensor | None, late: Tensor | None, scale: float, approximate: str
    ) -> Tensor:
        ctx.save_for_backward(y, early, late)
        ctx.how = (scale, approximate)
        return _activate(y, early, late, scale, approximate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, early, late = ctx.saved_tensors
        return _activate_backward(grad, y, early, late, *ctx.how), None, None, None, None


class _ActivatedLinear(torch.autograd.Function):
    """W drop(gelu(drop(y))) + b. Under autocast the product is in its type, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        early: Tensor | None,
        late: Tensor | None,
        scale: float,
        approximate: str,
    ) -> Tensor:
        device = y.device.type
        ctx.type = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.save_for_backward(y, weight, early, late)
        ctx.how = (scale, approximate)
        with torch.autocast(device, enabled=False):
            z = _activate(y, early, late, scale, approximate).to(ctx.type)
            return F.linear(z, weight.to(ctx.type), bias.to(ctx.type))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, weight, early, late = ctx.saved_tensors
        grad = grad.to(ctx.type)
        flat = grad.reshape(-1, grad.shape[-1])
        dy = dw = db = None
        if ctx.needs_input_grad[1]:
            z = _activate(y, early, late, *ctx.how).to(ctx.type)
            dw = (flat.T @ z.reshape(-1, z.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = flat.sum(0, dtype=weight.dtype)
        if ctx.needs_input_grad[0]:
            dy = _activate_backward(grad @ weight.to(ctx.type), y, early, late, *ctx.how)
        return dy, dw, db, None, None, None, None


class _GatedActivation(torch.autograd.Function):
    """z * sigmoid(v) with z = drop(gelu(drop(y))), kept as y and v."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, v: Tensor, early: Tensor | None, late: Tensor | None, scale: float, approximate: str
    ) -> Tensor:
        ctx.save_for_backward(y, v, early, late)
        ctx.how = (scale, approximate)
        return _activate(y, early, late, scale, approximate) * torch.sigmoid(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, v, early, late = ctx.saved_tensors
        gate = torch.sigmoid(v)
        z = _activate(y, early, late, *ctx.how)
        dv = (grad * z * gate * (1 - gate)).to(v.dtype)
        return _activate_backward(grad * gate, y, early, late, *ctx.how), dv, None, None, None, None
