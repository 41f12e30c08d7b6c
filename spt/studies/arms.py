"""Arms of a study: scratch and SPT, whose difference is reported, and controls, which say what it is made of.

An arm is a recipe of finetuning and, unless it starts at random, one of the pretraining that it starts from. A control
has a text, as `--arms` takes it and reports show it:

    frozen          pretrained, then only the head trained, on features that stay as they are
    parts=A+B       only these parts of the pretrained network are taken over; `encoder` stands for `parts=encoder`
    shuffled        pretrained on inputs whose steps were shuffled
    other=RECIPE    pretrained on the inputs of that recipe's task
    joint=WEIGHT    no first stage; its loss, times this weight, beside the task's own

No torch here.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from spt.config.recipe import MOVED, ResolvedRecipe
from spt.config.validation import validate_values, validation_messages
from spt.config.yaml import is_file_name
from spt.errors import UsageError, did_you_mean
from spt.runs.plan import ARMS

FORMS = (*ARMS, "frozen", "encoder", "parts=A+B", "shuffled", "other=RECIPE", "joint=WEIGHT")


class Arm(NamedTuple):
    """What a row of a study trains in one arm."""

    name: str
    finetuning: ResolvedRecipe
    pretraining: ResolvedRecipe | None  # None: it starts at random


def main_arms(scratch: ResolvedRecipe, spt: ResolvedRecipe, pretraining: ResolvedRecipe | None) -> list[Arm]:
    """Scratch and SPT, whose pretraining may have a recipe of its own; SPT first, since more waits for its first
    stage."""
    return [Arm("spt", spt, pretraining or spt), Arm("scratch", scratch, None)]


def canonical(text: str) -> str:
    """An arm as it is written everywhere. Raises ValueError with a sentence for what is none."""
    kind, _, value = (part.strip() for part in text.partition("="))
    if not value and kind.partition("+")[0].partition(".")[0] in MOVED:  # encoder, backbone.mixers.0+encoder
        kind, value = "parts", kind
    if kind in (*ARMS, "frozen", "shuffled") and "=" not in text:
        return kind
    if kind == "parts" and value and all(part.strip() for part in value.split("+")):
        return "parts=" + "+".join(part.strip() for part in value.split("+"))
    if kind == "other" and value:
        return f"other={value}"
    if kind == "joint" and (weight := _positive(value)):
        return f"joint={weight:g}"
    if kind == "joint":
        raise ValueError(f"arm {text!r}: the weight of the joint loss has to be a number above 0, such as joint=1")
    plain = [form for form in FORMS if "=" not in form]
    near = did_you_mean(text, plain) if "=" not in text else ""
    hint = near if "did you mean" in near else f"; known: {', '.join(FORMS)}"
    raise ValueError(f"arm {text!r} is unknown{hint}")


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def renamed_arm(arm: str, rename: Callable[[str], str]) -> str:
    """The arm, the recipe that it names, if any, under another name."""
    return f"other={rename(arm.removeprefix('other='))}" if arm.startswith("other=") else arm


def control(
    arm: str,
    base: ResolvedRecipe,
    pretraining: ResolvedRecipe | None,
    with_inputs_of: Callable[[ResolvedRecipe, str], ResolvedRecipe],
) -> Arm:
    """A control of a row whose SPT arm has these recipes. `with_inputs_of` is the recipe of a pretraining on the inputs
    of the task that a recipe names. Raises UsageError for settings that contradict the recipe's."""
    kind, _, value = arm.partition("=")
    before = pretraining or base
    if kind == "frozen":
        return Arm(arm, _changed(arm, base, "finetune", freeze=True), before)
    if kind == "parts":
        return Arm(arm, _changed(arm, base, "finetune", load=value.split("+")), before)
    if kind == "joint":
        return Arm(arm, _changed(arm, base, "finetune", joint=float(value)), None)
    if kind == "shuffled":
        return Arm(arm, base, _changed(arm, before, "pretrain", shuffle_steps=True))
    assert kind == "other"
    name = Path(value).stem if is_file_name(value) else value
    return Arm(f"other={name}", base, with_inputs_of(before, value))


def _changed(arm: str, base: ResolvedRecipe, stage: Literal["pretrain", "finetune"], **options: Any) -> ResolvedRecipe:
    part = getattr(base.recipe, stage)
    try:
        part = validate_values(type(part), {**part.model_dump(mode="json"), **options})
    except ValidationError as error:
        raise UsageError(f"{base.name}, arm {arm}: {'; '.join(validation_messages(type(part), error))}") from None
    return replace(base, recipe=base.recipe.model_copy(update={stage: part}))


def with_task_of(base: ResolvedRecipe, other: ResolvedRecipe, max_length: int | None = None) -> ResolvedRecipe:
    """The recipe on the data of another one; its network made for sequences of up to `max_length` steps, where those
    of the other task are shorter."""
    update: dict[str, Any] = {"task": other.recipe.task}
    if max_length is not None:
        update["model"] = base.recipe.model.model_copy(update={"max_length": max_length})
    identities = {**base.identities, "task": other.identities["task"]}
    return replace(base, recipe=base.recipe.model_copy(update=update), identities=identities, data=other.data)


def absolute(name: str, folder: Path) -> str:
    """A recipe's name, or the absolute path of its file."""
    path = folder / os.path.expanduser(name)
    return str(path.resolve()) if is_file_name(path) else name
