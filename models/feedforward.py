"""The layer that treats every step alike: two linear maps with an activation between them, or several such experts.

A stack has one behind each block's other sub-layers if its `feed_forward` says so. Letters: B sequences, L steps, D
width, F inner width (`d_ff`), X experts.
"""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spt.models.mixer import Context, PointwiseMixer, linear_flops

FeedForwardKind = Literal["none", "mlp", "switch"]
Activation = Literal["gelu", "silu", "relu"]
Routing = Literal["token", "expert"]
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


class FeedForward(PointwiseMixer):
    """W2 drop(act(W1 x + b1)) + b2 (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.down(F.dropout(ACTIVATIONS[self.activation](self.up(x)), self.dropout, self.training))

    def flops(self, length: int) -> float:
        return linear_flops(self.up, length) + linear_flops(self.down, length)
