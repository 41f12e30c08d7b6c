"""Validation errors as sentences, each with its dotted place."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spt.errors import did_you_mean

Model = TypeVar("Model", bound=BaseModel)

_SCALARS = {"bool", "int", "float", "str"}  # branches of unions, as pydantic calls them
_TYPE = "input should be "  # how it begins to say what a value has to be


def validation_messages(model: type[BaseModel], error: ValidationError, place: str = "") -> list[str]:
    """Every problem pydantic found, in our words, with its dotted place."""
    messages = dict[str, list[str]]()
    for problem in error.errors():
        unknown = problem["type"] == "extra_forbidden"  # the last part then is the user's key, whatever it looks like
        parts = [str(part) for part in problem["loc"]]
        key = parts.pop() if unknown else ""
        location = [part for part in parts if "[" not in part]  # not which branch of a union
        if unknown:
            location.append(key or '""')
        elif location and location[-1] in _SCALARS:
            location.pop()
        dotted = ".".join([place, *location] if place else location)
        message = problem["msg"].removeprefix("Value error, ")
        if unknown:
            message = f"unknown key{did_you_mean(location[-1], known_fields(model, location[:-1]))}"
        elif problem["type"] == "missing":
            message = "missing"
        elif problem["type"] == "too_short" and not problem["ctx"]["actual_length"]:
            if problem["input"]:  # nothing is left of it because its items are wrong, which is said of them
                continue
            message = "empty"
        elif problem["type"] not in ("value_error", "json_invalid"):
            shown = json.dumps(problem["input"], default=str)
            message = f"{message[0].lower()}{message[1:]}, not {shown[:60]}"
        given = messages.setdefault(dotted, [])
        if given and given[-1].startswith(_TYPE) and message.startswith(_TYPE):  # the branches of a union, as one
            message = f"{given.pop().rpartition(', not ')[0]} or {message.removeprefix(_TYPE)}"
        given.append(message)
    return [f"{dotted}: {message}" if dotted else message for dotted, given in messages.items() for message in given]


def validate_values(model: type[Model], values: Any) -> Model:
    """The model with these values, as a YAML file has them. Raises ValidationError."""
    # Through JSON, because pydantic's strict mode there still takes a list for a tuple.
    return model.model_validate_json(json.dumps(values, default=str))


def known_fields(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The known keys at a place inside a nested model."""
    for step in location:
        field = model.model_fields.get(step)
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)
