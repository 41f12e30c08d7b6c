"""Operations of a forward and a backward pass, by kind, counted analytically.

A multiply-add counts as two, a product of complex numbers as six (eight with a sum), and a real transform of length n
as 5/2 n log2 n. Counted are matrix products, transforms, scans, and elementwise products of complex numbers (and the
interpolation of SGConv, whose kernel consists of nothing else). Left out, for every model alike: a few operations per
element (norms, activations, gates, dropout, positions, sums), exponentials, and what depends only on parameters and not
on the length, such as a discretisation.

A backward pass counts what its formula needs: for a linear map the two products for input and weight, for attention
twice the forward pass. Convolutions and kernels count what our own backward passes compute, including recomputation.
Not counted is what depends on how a run is executed: attention scores that a backend recomputes, gradient
checkpointing, the sums of KeOps, modes skipped because they have decayed to nothing. Causal attention counts in full,
as is usual, and a scan as one multiply-add per state and step; a selective scan, whose states are never held all at
once, counts what enters and leaves them too, and again what its backward pass recomputes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("linear", "attention", "convolution", "kernel", "scan", "other")

Number = int | float

COMPLEX_PRODUCT, COMPLEX_MULTIPLY_ADD = 6.0, 8.0
_NONE = (0.0,) * len(KINDS)


@dataclass(frozen=True)
class Counts:
    """Operations of both passes, of every kind in the order of `KINDS`. A plain number that is added to it is converted
    by `as_counts`."""

    forwards: tuple[float, ...] = _NONE
    backwards: tuple[float, ...] = _NONE

    @classmethod
    def of(cls, kind: str, forward: Number, backward: Number | None = None) -> "Counts":
        """Of one kind; backward is twice forward by default."""
        return cls.from_kinds({kind: forward}, {kind: 2.0 * forward if backward is None else backward})

    @classmethod
    def from_kinds(cls, forward: Mapping[str, Number], backward: Mapping[str, Number]) -> "Counts":
        unknown = [kind for kind in (*forward, *backward) if kind not in KINDS]
        if unknown:
            raise ValueError(f"kinds of operations are {', '.join(KINDS)}, not {unknown[0]}")
        return cls(*(tuple(float(each.get(kind, 0.0)) for kind in KINDS) for each in (forward, backward)))

    @property
    def forward(self) -> float:
        return sum(self.forwards)

    @property
    def backward(self) -> float:
        return sum(self.backwards)

    @property
    def total(self) -> float:
        """Of a training step: both passes."""
        return self.forward + self.backward

    def without_backward(self) -> "Counts":
        """Of a forward pass alone."""
        return Counts(self.forwards)

    def by_kind(self) -> dict[str, float]:
        """Both passes together, for every kind that occurs."""
        return {kind: passes["forward"] + passes["backward"] for kind, passes in self.by_pass().items()}

    def by_pass(self) -> dict[str, dict[str, float]]:
        """Forward and backward of every kind that occurs."""
        return {
            kind: {"forward": forward, "backward": backward}
            for kind, forward, backward in zip(KINDS, self.forwards, self.backwards, strict=True)
            if forward or backward
        }

    def __add__(self, other: "Counts | Number") -> "Counts":
        other = as_counts(other)
        return Counts(_sums(self.forwards, other.forwards), _sums(self.backwards, other.backwards))

    __radd__ = __add__

    def __sub__(self, other: "Counts") -> "Counts":
        return self + -1.0 * other

    def __mul__(self, factor: Number) -> "Counts":
        return Counts(tuple(n * factor for n in self.forwards), tuple(n * factor for n in self.backwards))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Number) -> "Counts":
        return Counts(tuple(n / divisor for n in self.forwards), tuple(n / divisor for n in self.backwards))

    def __float__(self) -> float:
        """The forward pass."""
        return self.forward


def _sums(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def as_counts(stated: Counts | Number, kind: str = "other") -> Counts:
    """From what a model states: counts, or the forward pass as a number, with backward twice that."""
    if isinstance(stated, Counts):
        return stated
    if isinstance(stated, str | bool) or not hasattr(stated, "__float__"):
        raise TypeError(f"operations are a number or Counts, not {stated!r}")
    return Counts.of(kind, float(stated))


def linear(steps: Number, n_in: int, n_out: int, *, data: bool = False) -> Counts:
    """A linear map at `steps` steps; for `data`, which needs no gradient, backward is only the weight's product."""
    forward = 2.0 * steps * n_in * n_out
    return Counts.of("linear", forward, forward if data else None)


def attention(pairs: Number, scored: int, summed: int) -> Counts:
    """Scores of `pairs` pairs of a query and a key of width `scored`, and weighted sums of values of width `summed`,
    all heads together; backward has the products for both factors of both."""
    return Counts.of("attention", 2.0 * pairs * (scored + summed))


def transform(n: int) -> float:
    """A real transform of length n."""
    return 2.5 * n * math.log2(n)


def convolution(n: int, features: int) -> Counts:
    """One sequence with a given spectrum, by transforms of length n. Forward: a transform and its inverse. Backward:
    transforms of the gradient and, again, of the input; products for the gradients of spectrum (summed) and input; and
    an inverse transform."""
    bins = n // 2 + 1
    forward = 2 * transform(n) + COMPLEX_PRODUCT * bins
    backward = 3 * transform(n) + (COMPLEX_MULTIPLY_ADD + COMPLEX_PRODUCT) * bins
    return Counts.of("convolution", features * forward, features * backward)


def spectrum(n: int, features: int) -> Counts:
    """The spectrum of kernels: one transform in each pass."""
    return Counts.of("convolution", features * transform(n), features * transform(n))


def scan(length: int, states: int) -> Counts:
    """x_t = a x_{t-1} + b_t, complex. Backward: the same in reverse, and sum_t conj(x_{t-1}) g_t for a."""
    forward = COMPLEX_MULTIPLY_ADD * length * states
    return Counts.of("scan", forward, 2 * forward)
