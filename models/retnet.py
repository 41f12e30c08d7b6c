"""RetNet: retention, a linear recurrence whose heads forget at fixed rates (Sun et al. 2023, section 2).

    S_t = gamma S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(N),   gamma_h = 1 - 2^(-5-h),   h = 0, ..., H - 1
    y_t = W_o (silu(W_g x_t) norm(o_t))

q and k are rotated by their position, as with rotary positions (the paper's exp(i n theta)); no map has a bias. norm
divides a head by its root mean square, as in the authors' code (in the paper, it is a GroupNorm). Of the factors that
section 2.2 applies to the scores, only 1 / sqrt(N) is used here: the others are one positive number per step and head,
which the norm cancels except for its epsilon. A feed-forward layer of twice the width follows (`feed_forward: mlp`; it
is gated in the authors' code, but not in the paper). If two-sided, a second retention with its own maps runs backwards,
and the normalised outputs are added. Letters: L steps, D width, H heads, N width of keys, P of values (`expansion` N).
"""

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone
from spt.models.linear_attention import GatedHeads, HeadsConfig
from spt.models.ops.attention import rotate
from spt.models.options import NormKind

PAPER = "Sun et al. 2023"
COST = "L D P + L D²"
PARAMETERS = 1_051_264


class Config(HeadsConfig):
    norm: NormKind = Field("rms", description="normalisation: rms (as in the code), layer, batch, scalar, scale, none")
    d_ff: int | None = Field(None, ge=1, description="inner width of the feed-forward layer; default: 2 d_model")
    expansion: int = Field(2, ge=1, description="width of values, as a multiple of that of queries and keys")

    @model_validator(mode="after")
    def _heads_are_pairs(self) -> "Config":
        if self.d_model // self.n_heads % 2:
            raise ValueError(
                f"positions rotate pairs, but a head is {self.d_model // self.n_heads} wide (d_model / n_heads)"
            )
        return self


class Retention(GatedHeads):
    """Its maps start as in the authors' code."""

    def __init__(self, config: Config) -> None:
        N = config.d_model // config.n_heads
        super().__init__(config, N, config.expansion * N, gate_bias=False, eps=1e-6)
        nn.init.xavier_uniform_(self.leave.weight, gain=0.5)

    def log_decay(self, x: Float[Tensor, "B L D"], direction: int) -> Float[Tensor, " H"]:
        powers = 2.0 ** (-5.0 - torch.arange(self.heads, device=x.device, dtype=torch.float64))
        return torch.log1p(-powers)

    def place(self, q: Float[Tensor, "B L H N"], k: Float[Tensor, "B L H N"], first: int) -> tuple[Tensor, Tensor]:
        """In the code, the frequencies of N / 2 pairs go from 1 down to 1 / 10,000."""
        steps = torch.arange(first, first + q.shape[1], device=q.device, dtype=torch.float64)
        angles = torch.outer(steps, 10_000.0 ** -torch.linspace(0, 1, self.N // 2, device=q.device, dtype=steps.dtype))
        table = torch.stack([angles.cos(), angles.sin()], -1).to(q.dtype)
        return rotate(q.transpose(1, 2), table).transpose(1, 2), rotate(k.transpose(1, 2), table).transpose(1, 2)


def build(config: Config) -> Backbone:
    if config.feed_forward != "none" and config.d_ff is None:
        config = config.model_copy(update={"d_ff": 2 * config.d_model})
    return Backbone(config, lambda: [Retention(config)])
