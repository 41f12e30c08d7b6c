"""An MLP over time: two linear maps over each feature's steps (Tolstikhin et al. 2021, MLP-Mixer, section 2).

    y_d = W2 gelu(W1 x_d + b1) + b2 for every feature d, x_d its L steps;   then a feed-forward layer over features

Each position has its own weights, so the model knows positions and takes sequences of up to `max_length` steps only.
Two-sided by nature: a causal version would need triangular maps, which is another model. Letters: B sequences, L steps,
M longest sequence, D width, T inner width over time.
"""

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from spt.models.base import Backbone, BackboneConfig, Context, Counts, Mixer, Unsupported
from spt.models.ops.counts import linear
from spt.models.ops.product import Linear
from spt.models.options import FeedForwardKind

PAPER = "Tolstikhin et al. 2021"
COST = "L D (T + D)"
PARAMETERS = 2_631_424


class Config(BackboneConfig):
    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    d_time: int = Field(256, ge=1, description="inner width T of the map over time; half of d_model in the paper")


class TimeMixer(Mixer):
    """Parameters: maps M -> T and T -> M."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        self.width = config.d_model
        self.mix, self.spread = Linear(config.max_length, config.d_time), Linear(config.d_time, config.max_length)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        """Steps beyond the end of a sequence count as zero, like padding, which arrives as zeros."""
        L, M = x.shape[1], self.mix.in_features
        mixed = F.gelu(self.mix(F.pad(x.transpose(1, 2), (0, M - L))))
        return self.spread(mixed)[..., :L].transpose(1, 2)

    def flops(self, length: int) -> Counts:
        """Those of the longest sequence, whatever the length: shorter ones are padded to it."""
        return 2 * linear(self.width, self.mix.in_features, self.mix.out_features)


def build(config: Config) -> Backbone:
    if config.causal:
        raise Unsupported(
            "time_mixer has weights between all pairs of steps, so it cannot be causal; use causal: false"
        )
    return Backbone(config, lambda: [TimeMixer(config)])
