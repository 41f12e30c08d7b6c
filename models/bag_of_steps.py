"""No mixing at all: feed-forward layers see one step at a time, so that only the head's pooling sees several.

A control, not a competitor: what it achieves needs neither the order of steps nor any two of them together. Each block
is the Transformer's feed-forward layer (Vaswani et al. 2017, section 3.3):

    y_t = x_t + W_2 gelu(W_1 norm(x_t) + b_1) + b_2

Letters: L steps, D width, F inner width.
"""

from typing import Literal

from pydantic import Field

from spt.models.base import Backbone, BackboneConfig

PAPER = "Vaswani et al. 2017"
COST = "L D F"
PARAMETERS = 528_128


class Config(BackboneConfig):
    feed_forward: Literal["mlp", "switch"] = Field("mlp", description="what every block is: mlp or switch")


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [])
