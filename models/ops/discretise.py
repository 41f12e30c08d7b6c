"""Discretisation of diagonal systems x' = A x + B u, as in S4D and DSS, and the parameters of positive numbers.

Modes are complex128: what a kernel raises to the power l must be right to the last digit. Letters: A a mode, dt a step,
z = dt A, L the length of a softmax.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Complex128, Float, Float64
from torch import Tensor

Transform = Literal["exp", "relu", "none", "softplus", "sigmoid"]
_FLOOR = 1e-4  # smallest initial value of a positive number; and what relu adds
_TRANSFORMS: dict[Transform, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # and their inverses
    "exp": (torch.exp, torch.log),
    "relu": (lambda parameter: parameter.relu() + _FLOOR, lambda value: value - _FLOOR),
    "none": (lambda parameter: parameter, lambda value: value),
    "softplus": (torch.nn.functional.softplus, lambda value: value.expm1().log()),
    "sigmoid": (torch.sigmoid, lambda value: value.clamp_max(1 - _FLOOR).logit()),
}


def log_uniform(low: float, high: float, *shape: int) -> Float64[Tensor, "..."]:
    """Random numbers from low to high whose logarithms are uniform."""
    return torch.empty(*shape, dtype=torch.float64).uniform_(math.log(low), math.log(high)).exp_()


def positive(parameter: Float[Tensor, "*shape"], transform: Transform) -> Float[Tensor, "*shape"]:
    """The positive number that a parameter encodes (S4D, section 3.4)."""
    return _TRANSFORMS[transform][0](parameter)


def parameter_for(value: Float[Tensor, "*shape"], transform: Transform) -> Float[Tensor, "*shape"]:
    """The parameter that encodes a positive number, clipped to at least 1e-4 (and, for sigmoid, to less than 1)."""
    return _TRANSFORMS[transform][1](value.clamp_min(_FLOOR))


def as_complex(pair: Float[Tensor, "*shape 2"]) -> Complex128[Tensor, "*shape"]:
    return torch.view_as_complex(pair.double().contiguous())


def expm1(z: Complex128[Tensor, "*shape"]) -> Complex128[Tensor, "*shape"]:
    """e^z - 1, accurate for small z too: expm1(x) cos y - 2 sin²(y/2), e^x sin y."""
    x, y = z.real, z.imag
    return torch.complex(torch.expm1(x) * torch.cos(y) - 2 * torch.sin(y / 2) ** 2, torch.exp(x) * torch.sin(y))


def zoh(
    A: Complex128[Tensor, "*#modes"], dt: Float[Tensor, "*#modes"]
) -> tuple[Complex128[Tensor, "*modes"], Complex128[Tensor, "*modes"]]:
    """Zero-order hold: log Abar = z and Bbar / B = (e^z - 1) / A, which is dt at A = 0."""
    z = dt * A
    small = z.abs() < 1e-5
    series = 1 + z / 2 + z * z / 6
    quotient = expm1(z) / torch.where(small, torch.ones_like(z), z)
    return z, dt * torch.where(small, series, quotient)


def bilinear(
    A: Complex128[Tensor, "*#modes"], dt: Float[Tensor, "*#modes"]
) -> tuple[Complex128[Tensor, "*modes"], Complex128[Tensor, "*modes"]]:
    """log Abar = log((1 + z/2) / (1 - z/2)) and Bbar / B = dt / (1 - z/2)."""
    half = dt * A / 2
    return torch.log(1 + half) - torch.log(1 - half), dt / (1 - half)


def softmax_scale(
    A: Complex128[Tensor, "*#modes"], z: Complex128[Tensor, "*modes"], L: int
) -> Complex128[Tensor, "*modes"]:
    """The scale of a mode under DSS-SOFTMAX (DSS, proposition 1): (e^g - 1) / ((e^(gL) - 1) A), g = z with its real
    part made negative; 1/x is conj(x) / (|x|² + 1e-7), as published."""
    g = torch.where(A.real > 0, -z, z)
    x = expm1(g * L) * A
    return expm1(g) * x.conj() / (x * x.conj() + 1e-7)
