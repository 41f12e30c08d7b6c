"""DeltaNet: linear attention that writes only what its state does not yet return for a key (Yang et al. 2024,
"Parallelizing linear transformers with the delta rule over sequence length").

    [q_t, k_t, v_t] = silu(convolution of W_qkv x)_t,   beta_t = sigmoid(W_b x_t)
    q_t <- q_t / (|q_t| sqrt(K)),   k_t <- k_t / |k_t|
    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t,   y_t = W_o rms_norm(o_t)

The layer of section 3.3: a short convolution of each feature, then the rule of section 2.2 in each head. The state here
is the transpose of the paper's, and q is scaled as in the authors' code. In the paper, a gated feed-forward layer
follows (here `feed_forward: mlp`). If two-sided, a second rule with its own parameters runs backwards; the two outputs
are added before the norm. Letters: L steps, D width, K features of a head's keys and values.
"""

from spt.models.base import Backbone
from spt.models.delta import DeltaConfig, DeltaMixer

PAPER = "Yang et al. 2024"
COST = "L D² + L D K"
PARAMETERS = 1_003_264


class Config(DeltaConfig):
    keys_ratio = 1.0
    values_ratio = 1


class DeltaNet(DeltaMixer):
    pass


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [DeltaNet(config)])
