"""Models of equal size: at which width or depth a model costs as much as another. No torch here."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

TOLERANCE = 0.05  # relative difference of costs up to which models count as equally large
FARTHEST = 256  # from a width to the next one that a model accepts
WIDEST = 1 << 16
NEIGHBOURS = 2  # on either side of the best: counts may jump where inner widths are rounded

Cost = Callable[[int], float | None]  # of a model at this scale; None where the model refuses it


class Scale(NamedTuple):
    """A width or depth, and what the model costs there."""

    value: int
    cost: float


class NearestScales(NamedTuple):
    """The scale whose cost is nearest to the target, and those below and above."""

    best: Scale
    below: Scale | None
    above: Scale | None


def nearest_scales(cost: Cost, start: int, target: float) -> NearestScales:
    """Search from `start`, which the model accepts, over the multiples that it accepts.

    Costs are taken to rise with the scale but for small jumps, so that bisection finds the crossing.
    """
    known = cache(cost)
    first = known(start)
    assert first is not None, "the search starts at a scale that the model accepts"
    step = next((step for step in range(1, FARTHEST) if known(start + step) is not None), None)
    if step is None:
        return NearestScales(Scale(start, first), None, None)
    least, most = start % step or step, WIDEST // step * step + start % step

    def reaches(value: int) -> bool:
        """Does the model cost as much as the target, or more? It does not where it is too small to be built."""
        found = known(value)
        return found is not None and found >= target if value < start else found is None or found >= target

    low, high = start, start
    stride = step
    if first < target:
        while high < most and not reaches(high):
            low, high, stride = high, min(most, high + stride), 2 * stride
    else:
        while low > least and reaches(low):
            low, high, stride = max(least, low - stride), low, 2 * stride
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (low, middle) if reaches(middle) else (middle, high)
    around = range(low - NEIGHBOURS * step, high + NEIGHBOURS * step + 1, step)
    values = [Scale(value, found) for value in around if value > 0 and (found := known(value)) is not None]
    return NearestScales(
        min(values, key=lambda scale: abs(scale.cost - target)),
        max((scale for scale in values if scale.cost < target), key=lambda scale: scale.cost, default=None),
        min((scale for scale in values if scale.cost >= target), key=lambda scale: scale.cost, default=None),
    )
