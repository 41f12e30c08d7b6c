"""A layer that is one diagonal linear recurrence of all features, computed as a scan, as in S5 and LRU.

    x_t = a x_{t-1} + B u_t,   y_t = Re(C x_t) + D u_t,   then `Output`

If two-sided, a second C reads the same recurrence run backwards; both directions see the present. Letters: B
sequences, L steps, H features, P states, K directions.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Complex128, Float
from torch import Tensor, nn

from spt.models.mixer import Context, Mixer, State, alike
from spt.models.ops import counts, scan_products
from spt.models.ops.counts import Counts
from spt.models.ops.output import Output
from spt.models.ops.precision import without_autocast
from spt.models.ops.recurrence import recurrence
from spt.models.ops.scan import enter, entry_map, impulse_response, leave, scan
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
    """A subclass has the parameters C (K, H, P, 2), D (H,) and those of its `system`."""

    uncompiled = ("mix_sequence",)
    C: nn.Parameter
    D: nn.Parameter
    output: Output
    _joint: "_JointProducts | System | None" = None

    def system(self) -> System:
        raise NotImplementedError(f"{type(self).__name__} has no system")

    def output_matrix(self) -> Complex[Tensor, "K H P"]:
        """C."""
        return torch.view_as_complex(self.C)

    def forward(self, x: Float[Tensor, "B L H"], context: Context) -> Float[Tensor, "B L H"]:
        return self.output(self.mix_sequence(x))

    def mix_sequence(self, u: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """y, before the activation."""
        if isinstance(self._joint, _JointProducts):
            a, into, out, levels = self._joint
            return scan_products.recurrence_by_products(u, a, into, out, self.D, levels)
        return recurrence(u, *(self._joint or self.system()), self.D)

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


class _JointProducts(NamedTuple):
    """A layer's part of what several layers have had computed together, as `recurrence_by_products` takes it."""

    a: Complex128[Tensor, " P"]
    into: Float[Tensor, "R H"]
    out: Float[Tensor, "S H"]
    levels: scan_products.Powers


class _SystemOf(nn.Module):
    """A layer's system as a forward pass, which torch.func can be given other parameters for."""

    def __init__(self, layer: DiagonalRecurrence) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> System:
        return self.layer.system()


@contextlib.contextmanager
def joint_systems(mixers: Iterable[nn.Module], length: int) -> Iterator[None]:
    """Inside the context, recurrences that are alike have had their systems discretised together, and the powers of
    their coefficients computed for inputs of `length` steps, where products take them: on a GPU, for fewer and larger
    operations."""
    layers = [mixer for mixer in mixers if isinstance(mixer, DiagonalRecurrence) and scan_products.together(mixer.D)]
    try:
        for group in alike(layers, _form):
            if len(group) > 1:
                _join(group, length)
        yield
    finally:
        for layer in layers:
            layer._joint = None


def _form(layer: DiagonalRecurrence) -> tuple[Any, ...]:
    """What layers that differ in the values of their parameters alone have in common."""
    shapes = {name: (values.shape, values.dtype) for name, values in layer.named_parameters(recurse=False)}
    return type(layer), shapes, {name: value for name, value in vars(layer).items() if name[0] != "_"}


def _join(group: Sequence[DiagonalRecurrence], length: int) -> None:
    first = group[0]
    K, _, P, _ = first.C.shape

    def of_states(values: Tensor) -> Tensor:
        return values.expand(P, *values.shape[1:])  # a step size may be one number for all states

    parameters = {
        f"layer.{name}": torch.cat([layer.get_parameter(name) for layer in group], 2)
        if name == "C"
        else torch.cat([of_states(layer.get_parameter(name)) for layer in group])
        for name, _ in first.named_parameters(recurse=False)
        if name != "D"
    }
    with without_autocast(first.D):
        a, enters, leaves = torch.func.functional_call(_SystemOf(first), parameters, ())
        if not scan_products.preferred(first.D):
            for layer, *system in zip(group, a.split(P), enters.split(P), leaves.split(P, 2), strict=True):
                layer._joint = System(*system)
            return
        into, out = entry_map(enters), scan_products.exit_rows(leaves)
        levels = scan_products.powers(a, length, K, into.dtype)
    parts = zip(group, a.split(P), into.split(2 * P), out.split(2 * K * P), strict=True)
    for i, (layer, own_a, own_into, own_out) in enumerate(parts):
        states = slice(i * P, (i + 1) * P)
        layer._joint = _JointProducts(own_a, own_into, own_out, tuple(level.of_states(states) for level in levels))
