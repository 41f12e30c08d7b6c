"""Linear Transformer: attention whose weights are a product of features (Katharopoulos et al. 2020, section 3).

    y_t = W_o [sum_s phi(q_t) phi(k_s) v_s / (eps + sum_s phi(q_t) phi(k_s))],   phi(a) = elu(a) + 1

of every head, with q, k and v affine maps of the input, and eps = 1e-6. Both sums are products of phi(q_t) with a
matrix and a vector that do not depend on t: two-sided, with those of the whole sequence (eq. 5), causal, with running
ones (eqs. 9 to 12). A feed-forward layer follows, as in the Transformer (`feed_forward: mlp`), and so do its absolute
positions; rotary ones would make weights negative. Letters: L steps, D width, H heads, P = D / H.
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
