"""LinOSS: forced harmonic oscillators, read by a GLU (Rusch, Rus 2024, "Oscillatory state-space models").

    y'' = -A y + B u,   x = Re(C y) + D u                                                           (equation 1)
    z_t = z_{t-1} + dt (-A y_* + B u_t),   y_t = y_{t-1} + dt z_t                                         (section 2)

A is diagonal and non-negative. `disc: im` takes y_* = y_t, which damps; `imex` takes y_{t-1}, which conserves energy:
its eigenvalues lie on the unit circle while dt² A < 4. Each oscillator is a second-order recurrence in y alone,

    y_t = trace M y_{t-1} - det M y_{t-2} + S dt² B u_t,   M = [[S, -S dt A], [S dt, 1 - S dt² A]],

with S = 1 / (1 + dt² A) for im and 1 for imex. The paper's model is causal; the two-sided form is S5's: a second C
reads the same oscillators run backwards, and both see the present. The authors' batch norm has no trained scale and
shift and uses running statistics in training too; ours has both and uses the batch's statistics. A slow oscillator (A
near 0) sums its input over hundreds of steps, rounding errors included: in bfloat16, outputs are off by a tenth or
more. Letters: B sequences, L steps, H features, P oscillators, K directions.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Float64
from pydantic import Field
from torch import Tensor, nn

from spt.models.base import Backbone, BackboneConfig, Context, Counts, Mixer, ParamGroup
from spt.models.ops import counts
from spt.models.ops.output import Output
from spt.models.ops.scan import enter, leave
from spt.models.ops.second_order import second_order_flops, second_order_scan
from spt.models.options import NormKind

PAPER = "Rusch, Rus 2024"
COST = "L D (P + D)"
PARAMETERS = 330_752


class Config(BackboneConfig):
    norm: NormKind = Field("batch", description="normalisation: batch (as in the paper), layer, rms, scalar, none")
    norm_momentum: float = Field(
        0.01, gt=0, le=1, description="batch norm: weight of the new batch (1 - equinox's momentum)"
    )
    norm_unbiased: bool = Field(
        False, description="batch norm: divide the running variance by n - 1 (torch), not n (equinox)"
    )
    last_norm: bool | None = Field(False, description="a norm after the last block")
    d_state: int = Field(64, ge=1, description="number of oscillators P")
    disc: Literal["im", "imex"] = Field(
        "im", description="discretisation: implicit (im, damped) or implicit-explicit (imex)"
    )


class Oscillators(NamedTuple):
    """In double precision in `forward`, because powers of the roots are taken."""

    A: Float64[Tensor, " P"]
    dt: Float64[Tensor, " P"]
    S: Float64[Tensor, " P"]


class LinOSS(Mixer):
    """Parameters: A_diag and steps (P,), where A = relu(A_diag) and dt = sigmoid(steps); B (P, H, 2); C (K, H, P, 2);
    D (H,)."""

    state_space = ("A_diag", "steps", "B", "C")
    uncompiled = ("mix_sequence",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent, self.implicit, self.rate = config.causal, config.disc == "im", 1.0
        H, P, K = config.d_model, config.d_state, 1 if config.causal else 2
        self.A_diag, self.steps = nn.Parameter(torch.rand(P)), nn.Parameter(torch.rand(P))
        self.B = nn.Parameter(torch.empty(P, H, 2).uniform_(-1, 1) / math.sqrt(H))
        self.C = nn.Parameter(torch.empty(K, H, P, 2).uniform_(-1, 1) / math.sqrt(P))
        self.D = nn.Parameter(torch.randn(H))
        self.output = Output(H, "glu", gelu="tanh", dropout=config.dropout, tied=config.tie_dropout)
        self.param_groups = dict.fromkeys(("A_diag", "steps", "B"), ParamGroup(weight_decay=False))
        self.param_groups |= dict.fromkeys(("C", "D"), ParamGroup(weight_decay=True))

    def rescale(self, rate: float) -> None:
        self.rate = rate

    def oscillators(self) -> Oscillators:
        A, dt = torch.relu(self.A_diag.double()), self.rate * torch.sigmoid(self.steps.double())
        return Oscillators(A, dt, 1 / (1 + dt * dt * A) if self.implicit else torch.ones_like(dt))

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.mix_sequence(x))

    def mix_sequence(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """Re(C y) + D u."""
        A, dt, S = self.oscillators()
        b = enter(u, (S * dt * dt).to(self.B.dtype)[:, None] * torch.view_as_complex(self.B))
        trace, determinant = 1 + S - S * dt * dt * A, S
        x = self.D * u
        for k, C in enumerate(torch.view_as_complex(self.C)):
            x = x + leave(second_order_scan(trace, determinant, b, reverse=bool(k)), C)
        return x

    def flops(self, length: int) -> Counts:
        """B u once; the oscillators and Re C y in each direction."""
        K, H, P, _ = self.C.shape
        maps = counts.linear(length, H, 2 * P) + K * counts.linear(length, 2 * P, H)
        return maps + K * second_order_flops(length, P) + self.output.flops(length)

    def initial_state(self, batch: int) -> Any:
        system = Oscillators(*(each.to(self.D.dtype) for each in self.oscillators()))
        zero = torch.view_as_complex(self.B).new_zeros(batch, len(self.B))
        return system, zero, zero

    def step(self, x: Float[Tensor, "B H"], state: Any) -> tuple[Float[Tensor, "B H"], Any]:
        (A, dt, S), z, y = state
        z = S * (z + dt * (enter(x, torch.view_as_complex(self.B)) - A * y))
        y = y + dt * z
        return self.output(self.D * x + leave(y, torch.view_as_complex(self.C)[0])), (state[0], z, y)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [LinOSS(config)])
