"""S4: a long convolution whose kernel is the response of a HiPPO-LegS state space, diagonal plus low rank.

Gu, Goel, Ré 2022, "Efficiently modeling long sequences with structured state spaces". The kernel is that of
`s4kernel.py`; GELU and an output map follow. Letters: L steps, D width, N state size.
"""

from pydantic import Field

from spt.models.base import Backbone
from spt.models.longconv import LongConvolution
from spt.models.ops.output import Kind
from spt.models.s4kernel import S4Kernel, S4Options

PAPER = "Gu, Goel, Ré 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 200_704


class Config(S4Options):
    output: Kind = Field("glu", description="after the convolution and its GELU; identity: neither GELU nor map")
    early_dropout: bool = Field(False, description="dropout before the GELU too, as in the S4 repository")


def build(config: Config) -> Backbone:
    def block() -> list[LongConvolution]:
        return [LongConvolution(config, S4Kernel(config), output=config.output, early_dropout=config.early_dropout)]

    return Backbone(config, block)
