"""Types in annotations are checked while tests run (`--jaxtyping-packages` in pyproject.toml), and shapes with them.

jaxtyping's own check of a call binds its arguments and checks them twice, which takes longer than most functions do. It
is kept where an annotation has the shape of an array; elsewhere beartype alone checks the same types in a fraction of
that time.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

with_shapes = jaxtyping.jaxtyped
without = beartype(conf=BeartypeConf(violation_type=TypeError))  # as jaxtyping's errors are


def install() -> None:
    """Before the first import of spt."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """As jaxtyping's hook decorates every function and class with it."""

    def decorate(target: Any) -> Any:
        if inspect.isclass(target):
            own = dataclasses.is_dataclass(target) and "__init__" in vars(target)
            if not own or has_shapes(target.__init__):
                return with_shapes(target, typechecker=typechecker)
            target.__init__ = without(target.__init__)
            return target
        if not inspect.isfunction(target) or has_shapes(target):
            return with_shapes(target, typechecker=typechecker)
        # A nested function would be decorated again at every call of the outer one.
        return target if "<locals>" in target.__qualname__ else without(target)

    return decorate


def has_shapes(function: Any) -> bool:
    """Has an annotation the shape of an array, or one that cannot be looked into yet?"""
    try:
        return any(map(_has_shape, get_type_hints(function, include_extras=True).values()))
    except Exception:  # a name that is only imported for mypy, or later
        return True


def _has_shape(annotation: Any) -> bool:
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    if isinstance(annotation, (list, tuple)):  # a Callable's arguments
        return any(map(_has_shape, annotation))
    return any(map(_has_shape, get_args(annotation)))
