"""The settings that a search tries, from its space: a grid or random draws, by arm. No torch here."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spt.config.recipe import ResolvedRecipe, Section
from spt.errors import UsageError
from spt.runs.plan import ArmName
from spt.studies.schema import OBJECTIVE, PRETRAIN, PRETRAIN_TUNABLE, TUNABLE, Range, Tune, Value, factor_of

Setting = dict[str, Value]
Space = Mapping[str, tuple[Value, ...] | Range]
MAX_REPEATS = 1000  # repeated draws in a row after which a space counts as exhausted


def arm_space(study: Tune, resolved: ResolvedRecipe, arm: ArmName) -> Space:
    """The study's space with the values that factors such as x0.3 come to in this arm."""
    return {
        name: _multiples(resolved, arm, name, values) if has_factors(values) else values
        for name, values in study.space.items()
    }


def has_factors(values: tuple[Value, ...] | Range) -> bool:
    return not isinstance(values, Range) and any(factor_of(value) is not None for value in values)


def _multiples(resolved: ResolvedRecipe, arm: ArmName, name: str, values: Any) -> tuple[Value, ...]:
    place = f"{resolved.name}: space.{name}"
    part: Any = resolved.recipe.train("pretrain" if name.startswith(PRETRAIN) else supervised_section(arm))
    if name.startswith(OBJECTIVE):
        part = resolved.recipe.pretrain.objective
    own = getattr(part, name.rpartition(".")[2], None)
    if isinstance(own, bool) or not isinstance(own, int | float):
        raise UsageError(f"{place} has multiples, but the recipe's own value is {own}; give the values themselves")
    factors = [(value, factor_of(value)) for value in values]
    multiples = tuple(value if factor is None else _multiple(own, factor) for value, factor in factors)
    if len(set(multiples)) < len(multiples):
        shown = ", ".join(map(str, multiples))
        raise UsageError(f"{place} is {shown}, since the recipe's own value is {own}; give different values")
    return multiples


def _multiple(own: int | float, factor: float) -> int | float:
    if factor == 1:
        return own
    return max(min(own, 1), round(own * factor)) if isinstance(own, int) else float(f"{own * factor:.4g}")


def supervised_section(arm: ArmName) -> Section:
    """Where a recipe has the supervised training of an arm."""
    return "finetune" if arm == "spt" else "scratch"


def settings(study: Tune, space: Space, arm: ArmName) -> Iterator[Setting]:
    """The settings that an arm may try, each once: every combination of the lists, or random draws, for as long as
    there are more.

    Scratch does without pretraining's; of random draws it has the same as SPT, and where two differ in pretraining
    alone, others behind them.
    """
    own = {name: values for name, values in space.items() if arm == "spt" or not name.startswith(PRETRAIN)}
    lists = {name: values for name, values in own.items() if isinstance(values, tuple)}
    if study.trials is None:
        yield from (dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values()))
        return
    rng = np.random.default_rng([study.search_seed, 0x5EA2C4])
    most = math.prod(map(len, lists.values())) if len(lists) == len(own) else math.inf
    seen, repeats = set[str](), 0
    while len(seen) < most and repeats < MAX_REPEATS:
        drawn = {name: _draw(values, name, rng) for name, values in space.items()}
        setting = {name: drawn[name] for name in own}
        if (text := json.dumps(setting)) in seen:
            repeats += 1
        else:
            repeats = 0
            seen.add(text)
            yield setting


def _draw(values: tuple[Value, ...] | Range, name: str, rng: np.random.Generator) -> Value:
    if isinstance(values, tuple):
        return values[int(rng.integers(len(values)))]
    if values.scale == "log":
        drawn = float(np.exp(rng.uniform(np.log(values.low), np.log(values.high))))
    else:
        drawn = float(rng.uniform(values.low, values.high))
    whole = (TUNABLE | PRETRAIN_TUNABLE)[name].annotation in (int, int | None)
    return max(math.ceil(values.low), round(drawn)) if whole else float(f"{drawn:.4g}")
