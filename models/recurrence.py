"""A layer that is one diagonal linear recurrence of all features, computed as a scan, as in S5 and LRU.

    x_t = a x_{t-1} + B u_t,   y_t = Re(C x_t) + D u_t,   then `Output`

Two-sided, a second C reads the same recurrence run backwards; both directions see the present. Letters: B sequences, L
steps, H features, P states, K directions.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Complex, Complex128, Float
from torch import Tensor, nn

from spt.models.mixer import Context, Mixer, State
from spt.models.ops import counts
from spt.models.ops.counts import Counts
from spt.models.ops.output import Output
from spt.models.ops.recurrence import recurrence
from spt.models.ops.scan import enter, impulse_response, leave, scan
from spt.models.options import BackboneConfig


class System(NamedTuple):
    """The discretised system; a is in double precision, because powers of it are taken."""

    a: Complex128[Tensor, " P"]
    enter: Complex[Tensor, "P H"]  # B
    leave: Complex[Tensor, "K H P"]  # C


def with_flax_norms(config: BackboneConfig) -> BackboneConfig:
    """With flax's epsilon where a layer norm has none of its own; that of a batch norm, 1e-5, is torch's too."""
    is_open = config.norm == "layer" and config.norm_eps is None
    return config.model_copy(update={"norm_eps": 1e-6}) if is_open else config


class DiagonalRecurrence(Mixer):
    """The subclass has the parameters C (K, H, P, 2), D (H,) and those of its `system`."""

    uncompiled = ("mix_sequence",)
    C: nn.Parameter
    D: nn.Parameter
    output: Output

    def system(self) -> System:
        raise NotImplementedError(f"{type(self).__name__} has no system")

    def output_matrix(self) -> Complex[Tensor, "K H P"]:
        """C."""
        return torch.view_as_complex(self.C)

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.mix_sequence(x))

    def mix_sequence(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """y, before the activation."""
        return recurrence(u, *self.system(), self.D)

    def states(self, u: Float[Tensor, "B L H"]) -> list[Complex[Tensor, "B L P"]]:
        """x_t of every direction."""
        system = self.system()
        v = enter(u, system.enter)
        return [scan(system.a, v, reverse=bool(k)) for k in range(len(self.C))]

    def read(self, u: Float[Tensor, "B L H"], states: list[Complex[Tensor, "B L P"]]) -> Float[Tensor, "B L H"]:
        """y, from the states of every direction."""
        y = self.D * u
        for x, c in zip(states, self.output_matrix(), strict=True):
            y = y + leave(x, c)
        return y

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K C M"]]:
        """Of equally spaced steps."""
        return impulse_response(*self.system(), length)

    def flops(self, length: int) -> Counts:
        """B u once; the scan and Re C x in each direction; the cost of irregular steps is left out."""
        K, H, P, _ = self.C.shape
        complex_maps = counts.linear(length, H, 2 * P) + K * counts.linear(length, 2 * P, H)
        return complex_maps + K * counts.scan(length, P) + self.output.flops(length)

    def initial_state(self, batch: int) -> State:
        system = self.system()
        return State(system, system.enter.new_zeros(batch, len(system.a)))

    def step(self, x: Float[Tensor, "B H"], state: State) -> tuple[Float[Tensor, "B H"], State]:
        system = state.system
        hidden = system.a.to(state.hidden.dtype) * state.hidden + enter(x, system.enter)
        return self.output(self.D * x + leave(hidden, system.leave[0])), State(system, hidden)
