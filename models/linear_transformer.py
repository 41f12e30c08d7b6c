"""Linear Transformer: attention whose weights are a product of features (Katharopoulos et al. 2020, section 3).

    y_t = W_o [sum_s phi(q_t) phi(k_s) v_s / (eps + sum_s phi(q_t) phi(k_s))],   phi(a) = elu(a) + 1

in every head, where q, k and v are affine maps of the input and eps = 1e-6. Both sums are products of phi(q_t) with a
matrix and a vector: if two-sided, sums over the whole sequence, which do not depend on t (eq. 5); if causal, running
sums (eqs. 9 to 12). The feed-forward layer that follows (`feed_forward: mlp`) and the absolute positions are the
Transformer's; rotary positions would make weights negative. Letters: L steps, D width, H heads, P = D / H.
"""

import torch.nn.functional as F
from torch import Tensor

from spt.models.base import Backbone
from spt.models.linear_attention import Features, KernelAttention, KernelAttentionConfig, make_positions

PAPER = "Katharopoulos et al. 2020"
COST = "L D P + L D²"
PARAMETERS = 793_344


class Config(KernelAttentionConfig):
    pass


class LinearAttention(KernelAttention):
    """Its maps start as torch's, as in the authors' code."""

    eps = 1e-6  # as in the authors' code

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.d_model // config.n_heads, bias=True)

    def features(self, q: Tensor, k: Tensor, valid: Tensor | None, log_scale: Tensor | None = None) -> Features:
        return Features(F.elu(q) + 1, F.elu(k) + 1)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [LinearAttention(config)], make_positions(config))
