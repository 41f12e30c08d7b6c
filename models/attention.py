"""Attention and positions.

Letters: B sequences, L steps, D width, H heads, E = D / H width of a head, P = E / 2 pairs in it.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.mixer import Context, Mixer, Rate, linear_flops

Position = Literal["rotary", "learned", "sinusoidal"]


def sinusoids(length: int, width: int, base: float = 10000.0) -> Float[Tensor, "L E"]:
    """sin and cos of t * base^(-2i/width) in even and odd columns (Vaswani et al. 2017, section 3.5)."""
    angles = _angles(length, width, base)
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
    return table.float()


def rotary_table(length: int, width: int, base: float = 10000.0) -> Float[Tensor, "L P 2"]:
    """cos and sin of t * base^(-2i/width) for each pair (2i, 2i+1) of a head."""
    angles = _angles(length, width, base)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


def rotate(x: Float[Tensor, "*B L E"], table: Float[Tensor, "L P 2"]) -> Float[Tensor, "*B L E"]:
    """Rotary embedding, interleaved pairs over the full width: (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos).

    One complex product with a cached table (Su et al. 2021, eq. 34); in float32 whatever x is.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table)).flatten(-2).type_as(x)


def _angles(length: int, width: int, base: float) -> Float[Tensor, "L P"]:
    # In float64: at step 65,536 a float32 angle is off by 4e-3.
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequency)


class Positions(Mixer):
    """Adds absolute positions to the stream: fixed sinusoids, a learned table, or both."""

    rates: Mapping[str, Rate] = {"learned": Rate()}  # no weight decay

    fixed: Tensor | None

    def __init__(self, d_model: int, max_length: int, kinds: tuple[Position, ...], std: float) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(max_length, d_model) * std) if "learned" in kinds else None
        # A buffer that is not saved: it follows from the length, and a longer one has the same beginning.
        fixed = sinusoids(max_length, d_model) if "sinusoidal" in kinds else None
        self.register_buffer("fixed", fixed, persistent=False)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        for table in (self.fixed, self.learned):
            if table is not None:
                x = x + table[: x.shape[1]]
        return x

    def flops(self, length: int) -> float:
        return 0.0


class Attention(Mixer):
    """Multi-head softmax attention over the whole sequence, through PyTorch's fused kernels.

    `tied`: the four projections start as copies of one linear map. Without `mask_padding`, padded steps are looked at
    like any others.
    """

    table: Tensor  # (max_length, E/2, 2) for rotary positions

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        max_length: int,
        *,
        causal: bool,
        rotary: bool,
        dropout: float = 0.0,
        tied: bool = False,
        mask_padding: bool = True,
    ) -> None:
        super().__init__()
        self.n_heads, self.causal, self.rotary, self.dropout = n_heads, causal, rotary, dropout
        self.mask_padding = mask_padding
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        if tied:
            with torch.no_grad():
                self.qkv.weight.copy_(self.out.weight.repeat(3, 1))
                self.qkv.bias.copy_(self.out.bias.repeat(3))
        if rotary:
            self.register_buffer("table", rotary_table(max_length, d_model // n_heads), persistent=False)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, L, E)
        if self.rotary:
            q, k = rotate(q, self.table[:length]), rotate(k, self.table[:length])
        # Padding stands on the right, so a causal query never meets it; otherwise a mask hides it. A row without any
        # valid step (none is made by our batches) would have no key to look at, and gives zeros.
        masked = context.padded and self.mask_padding and not self.causal
        mask = context.valid[:, None, None, :] if masked else None
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def flops(self, length: int) -> float:
        """Projections, q k^T and the weighted sum of v. Causal attention is counted in full, as it is in the field."""
        return linear_flops(self.qkv, length) + linear_flops(self.out, length) + 4.0 * length**2 * self.out.in_features
