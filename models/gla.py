"""GLA, gated linear attention: a state that forgets each feature of the keys at its own rate (Yang et al. 2024,
"Gated linear attention transformers with hardware-efficient training", section 4).

    S_t = diag(a_t) S_{t-1} + k_t v_t^T,   a_t = sigmoid(W_2 W_1 x_t + b)^(1/16),   o_t = S_t^T q_t / sqrt(N)
    y_t = W_o (silu(W_g x_t + b_g) norm(o_t))

q, k and v are linear maps of x, q and k of half its width; W_1 has 16 rows. norm divides a head by its root mean square
and multiplies it by a trained vector (in the paper, it is a layer norm). The factor 1 / sqrt(N) is from the authors'
code. The paper's feed-forward layer is gated and has 8/3 of the width; here it is `feed_forward: mlp`, which has as
many parameters. If two-sided, a second recurrence with its own maps, gates and norm runs backwards, and the normalised
outputs are added. Letters: B sequences, L steps, D width, H heads, N width of keys, P of values, K directions.
"""

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from spt.models.base import Backbone, Counts, linear_flops
from spt.models.linear_attention import GatedHeads, HeadsConfig, start_as_xavier
from spt.models.ops.linear_attention import linear_attention_flops
from spt.models.ops.precision import at_least_float32
from spt.models.ops.product import Linear
from spt.models.options import NormKind

PAPER = "Yang et al. 2024"
COST = "L D P + L D²"
PARAMETERS = 947_072
TEMPERATURE = 16.0  # the larger, the slower a gate that is neither open nor shut forgets


class Config(HeadsConfig):
    norm: NormKind = Field("rms", description="normalisation: rms (as in the code), layer, batch, scalar, scale, none")
    gate_rank: int = Field(16, ge=1, description="rows of W_1, the rank of the map from the input to the gates a_t")


class GatedLinearAttention(GatedHeads):
    """Its maps start as in the authors' code of March 2024 to early 2025, its biases at zero; b_g is the paper's alone.
    More parameters: for each direction the gates' maps D -> rank -> H N, the second with a bias, and the norm's factors
    (P,)."""

    def __init__(self, config: Config) -> None:
        D, H = config.d_model, config.n_heads
        super().__init__(config, max(1, D // (2 * H)), D // H, gate_bias=True, eps=1e-5)
        K = len(self.enter)
        self.narrow = nn.ModuleList(Linear(D, config.gate_rank, bias=False) for _ in range(K))
        self.widen = nn.ModuleList(Linear(config.gate_rank, H * self.N) for _ in range(K))
        self.factors = nn.ParameterList(nn.Parameter(self.gate.weight.new_ones(self.P)) for _ in range(K))
        start_as_xavier(layer.weight for layer in (*self.narrow, *self.widen, self.leave))
        for layer in (self.gate, *self.widen):
            nn.init.zeros_(layer.bias)

    def log_decay(self, x: Float[Tensor, "B L D"], direction: int) -> Float[Tensor, "B L H N"]:
        gates = at_least_float32(self.widen[direction](self.narrow[direction](x)))
        return F.logsigmoid(gates).unflatten(-1, (self.heads, self.N)) / TEMPERATURE

    def norm(self, o: Float[Tensor, "B *L H P"], direction: int) -> Float[Tensor, "B *L H P"]:
        return super().norm(o, direction) * self.factors[direction]

    def flops(self, length: int) -> Counts:
        gates = (linear_flops(layer, length) for layer in (*self.narrow, *self.widen))
        return super().flops(length) + sum(gates, Counts())

    def _products(self, length: int) -> Counts:
        return linear_attention_flops(length, self.heads, self.N, self.P, per_feature=True)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [GatedLinearAttention(config)])
