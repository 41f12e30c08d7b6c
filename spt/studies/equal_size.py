"""Models of equal size: at which width or depth a model costs as much as another. No torch here."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

TOLERANCE = 0.05  # relative difference of costs up to which models count as equally large
FARTHEST = 256  # from a width to the next one that a model accepts
WIDEST = 1 << 16
NEIGHBOURS = 2  # on either side of the best: counts may jump where inner widths are rounded

Cost = Callable[[int], float | None]  # of a model at this scale; None where its network cannot be built


class Scale(NamedTuple):
    """A width or depth, and what the model costs there."""

    value: int
    cost: float


class NearestScales(NamedTuple):
    """The scale whose cost is nearest to the target, and those below and above."""

    best: Scale
    below: Scale | None
    above: Scale | None


def nearest_scales(
    cost: Cost, start: int, target: float, *, accepts: Callable[[int], bool] = lambda _: True, enough: float = 0.0
) -> NearestScales:
    """Search from `start`, which the model accepts, over the multiples that it accepts.

    Costs are taken to rise with the scale but for small jumps: the search keeps one that is below the target and one
    that is not. It ends at the first scale whose cost is off by a part of at most `enough`, for costs that take long to
    measure; by default at the nearest.
    """
    known: dict[int, float | None] = {}  # costs, by scale

    def is_enough(value: int) -> bool:
        if value not in known:
            known[value] = cost(value)
        found = known[value]
        return found is not None and abs(found / target - 1) <= enough

    def reaches(value: int) -> bool:
        """Does the model cost as much as the target, or more? Below `start`, one that is not built is too small."""
        found = known[value]
        return value > start if found is None else found >= target

    step = next((step for step in range(1, FARTHEST) if accepts(start + step)), None)
    if is_enough(start) or step is None:
        return _nearest(known, target)
    # In steps from the start, both outside of what is left to search.
    least, most = -start // step, (WIDEST - start) // step + 1
    low, high = (least, 0) if reaches(start) else (0, most)
    stride = 1
    while high - low > 1:
        steps = round((_crossing(known, target) - start) / step)
        if high == most:  # upwards no farther than needed, since what is much too large does not fit in memory
            steps = max(low + stride, min(steps, low + (start + low * step) // step))
            stride *= 2
        elif len(known) % 3 == 0:  # so that the ends always come nearer
            steps = (low + high) // 2
        steps = max(low + 1, min(steps, high - 1))
        if is_enough(start + steps * step):
            return _nearest(known, target)
        low, high = (low, steps) if reaches(start + steps * step) else (steps, high)
    for steps in range(max(least + 1, low - NEIGHBOURS), high + NEIGHBOURS + 1):
        if is_enough(start + steps * step) and enough:
            break
    return _nearest(known, target)


def _crossing(known: Mapping[int, float | None], target: float) -> float:
    """The scale at which a power of it, through the two costs nearest to the target, reaches the target."""
    scales = [Scale(value, found) for value, found in known.items() if found]
    near, *others = sorted(scales, key=lambda scale: abs(math.log(scale.cost / target)))
    power = 2.0
    if others:
        power = math.log(others[0].cost / near.cost) / math.log(others[0].value / near.value)
    return near.value * (target / near.cost) ** (1 / min(4.0, max(0.5, power)))


def _nearest(known: Mapping[int, float | None], target: float) -> NearestScales:
    values = [Scale(value, found) for value, found in known.items() if found is not None]
    return NearestScales(
        min(values, key=lambda scale: abs(scale.cost - target)),
        max((scale for scale in values if scale.cost < target), key=lambda scale: scale.cost, default=None),
        min((scale for scale in values if scale.cost >= target), key=lambda scale: scale.cost, default=None),
    )
