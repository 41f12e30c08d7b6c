"""No mixing at all: every step through feed-forward layers of its own, so that only the head's pooling sees several.

A control, not a competitor: what it reaches needs no order of steps, nor any two of them together. Each block is the
Transformer's feed-forward layer (Vaswani et al. 2017, section 3.3). Letters: L steps, D width, F inner width.
"""

from spt.models.base import Backbone, BackboneConfig
from spt.models.feedforward import FeedForward

PAPER = "Vaswani et al. 2017"
COST = "L D F"
PARAMETERS = 528_128


class Config(BackboneConfig):
    pass


def build(config: Config) -> Backbone:
    D, F = config.d_model, config.d_ff or 4 * config.d_model
    return Backbone(config, lambda: [FeedForward(D, F, config.ff_activation, config.ff_dropout)])
