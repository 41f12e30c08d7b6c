"""S4: a long convolution whose kernel is the response of a HiPPO-LegS state space, diagonal plus low rank.

Gu, Goel, Ré 2022, "Efficiently modeling long sequences with structured state spaces". Per feature

    x' = (A - P P*) x + B u,  y = 2 Re(C x) + D u,      K[l] = 2 Re sum_n C_n (Abar^l Bbar)_n

with N/2 stored modes n, one of each conjugate pair, discretised by the bilinear rule with step size dt. The convolution
y = K u + D u is followed by GELU and an output map. Both directions of a two-sided layer share everything but C.

C is trained; the published code trains C~ = C (1 - Abar^L) for the first length L it has seen. `s4_kernel.py` has the
parameters, and `ops/dplr.py` computes the kernel. Letters: L steps, N state size.
"""

from typing import Any

from pydantic import Field

from spt.models.base import Backbone
from spt.models.longconv import LongConvolution
from spt.models.ops.output import EarlyDropout, Kind
from spt.models.options import S4Config
from spt.models.s4_kernel import S4Kernel

PAPER = "Gu, Goel, Ré 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 200_704


class Config(S4Config):
    output: Kind = Field("glu", description="what follows the convolution and its GELU; identity: neither GELU nor map")
    pre_activation_dropout: EarlyDropout = Field(
        False,
        description="dropout before the GELU too; untied, as in the S4 repository: with a separate mask for each step "
        "even under tie_dropout",
    )


def build(config: Config) -> Backbone:
    after: dict[str, Any] = {"output": config.output, "pre_activation_dropout": config.pre_activation_dropout}
    return Backbone(config, lambda: [LongConvolution(config, S4Kernel(config), **after)])
