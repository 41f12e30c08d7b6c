"""Liquid-S4: S4 with terms for products of inputs (Hasani et al. 2022, "Liquid structural state-space models").

    x_t = (Abar + Bbar 1^T u_t) x_{t-1} + Bbar u_t,   y_t = C x_t + D u_t                          (section 3, discrete)

In y_t, a product of p inputs, the last of them a steps ago, has the factor C Abar^a Bbar, times one 1^T Abar^m Bbar for
each gap of m steps between inputs; for neighbours this is s = 1^T Bbar. This model has S4's own terms, p = 1, and those
without a power of Abar, which are products of p neighbouring inputs that end at the present, up to degree P:

    y = K * u + D u + sum_p <C, Bbar> s^{p-1} u_t u_{t-1} ... u_{t-p+1},   p = 2, ..., P

This is the paper's PB kernel (Abar replaced by 1), read with B^p = B (1^T B)^{p-1}, as its code does for p = 2. The
published code is another model: its factors come from the initial, untrained A, B, C and dt, without the low-rank part
of A, with C conjugated and with s^(2^{p-1} - 1) in place of s^{p-1}; the products are added in reverse time order, by
default those of sets of p steps near the end of the sequence. It is not causal, as its authors say (issue 17 of its
repository). Here, if two-sided, S4's second kernel has its own products, which begin at the next step.

Letters: B sequences, L steps, H features, K directions, P degree, J = P - 1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from spt.models.base import Backbone
from spt.models.longconv import LongConvolution
from spt.models.mixer import State
from spt.models.ops import dplr
from spt.models.ops.output import EarlyDropout, Kind
from spt.models.options import S4Config
from spt.models.s4_kernel import S4Kernel

PAPER = "Hasani et al. 2022"
COST = "L D (N + log L + P + D)"
PARAMETERS = 200_704


class Config(S4Config):
    degree: int = Field(2, ge=2, description="largest number P of inputs in a product (2 to 6 in the paper)")
    output: Kind = Field("glu", description="what follows the convolution and its GELU; identity: neither GELU nor map")
    pre_activation_dropout: EarlyDropout = Field(
        False,
        description="dropout before the GELU too; untied, as in the S4 repository: with a separate mask for each step "
        "even under tie_dropout",
    )

    def own_reach(self) -> int | None:
        """Products of `degree` inputs see as far, however short the kernel is."""
        own = super().own_reach()
        return None if own is None else max(own, self.degree - self.causal)

    @model_validator(mode="after")
    def _products_are_within_reach(self) -> "Config":
        farthest = self.degree - self.causal  # the second kernel's begin at the next step
        if self.reach is not None and self.reach < farthest:
            raise ValueError(f"reach {self.reach}: products of {self.degree} inputs see {farthest} steps; lower degree")
        return self


class LiquidS4(LongConvolution):
    """Parameters: those of S4."""

    kernel: S4Kernel

    def __init__(self, config: Config) -> None:
        early = config.pre_activation_dropout
        super().__init__(config, S4Kernel(config), output=config.output, pre_activation_dropout=early)
        self.degree = config.degree

    def liquid_kernel(self) -> Float[Tensor, "K J H"]:
        """<C, Bbar> s^{p-1} for p = 2, ..., P."""
        system = dplr.discretise(self.kernel.state_space())
        present, s = 2 * (system.C * system.B).real.sum(-1), 2 * system.B.real.sum(-1)
        powers = torch.stack([s**p for p in range(1, self.degree)])
        return (present[:, None] * powers).to(self.D.dtype)

    def mix_sequence(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        y = super().mix_sequence(u)
        product, total = u, torch.zeros_like(y)
        for p, weights in enumerate(self.liquid_kernel().unbind(1), start=2):
            product = u * F.pad(product[:, :-1], (0, 0, 1, 0))
            total = total + weights[0] * product
            if self.two_sided:  # of the p steps that follow
                total = total + weights[1] * F.pad(product[:, p:], (0, 0, 0, min(p, u.shape[1])))
        return y + total.to(y.dtype)

    def initial_state(self, batch: int) -> Any:
        """S4's; the liquid kernel; the products of 1, ..., P - 1 inputs up to the step before."""
        weights = self.liquid_kernel()[0]
        return super().initial_state(batch), weights, self.D.new_zeros(batch, self.degree - 1, len(self.D))

    def step(self, x: Float[Tensor, "B H"], state: Any) -> tuple[Float[Tensor, "B H"], Any]:
        s4, weights, before = state
        y, hidden = self.kernel.step(x, s4.hidden, s4.system)
        products = x[:, None] * before
        y = y + self.D * x + (weights * products).sum(1)
        before = torch.cat([x[:, None], products[:, :-1]], 1)
        return self.output(y), (State(s4.system, hidden), weights, before)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [LiquidS4(config)])
