"""What may be taken from a pretrained network into another one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from spt.config.recipe import MOVED
from spt.errors import UsageError
from spt.training.network import SequenceModel


def selected_tensors(model: SequenceModel, load: Literal["all"] | Sequence[str]) -> set[str]:
    """The names of the tensors that the parts of a pretrained network named in a recipe stand for. Raises UsageError
    for a part that this network does not have."""
    names = [name for name in model.state_dict() if name.partition(".")[0] in MOVED]
    if load == "all":
        return set(names)
    known = _parts(names)
    for part in load:
        if part not in known:
            shown = [name for name in known if name.count(".") <= 2]
            more = ", …" if len(shown) < len(known) else ""
            raise UsageError(f"finetune.load: this network has no part {part}; its parts are {', '.join(shown)}{more}")
    return {name for name in names if any(f"{name}.".startswith(f"{part}.") for part in load)}


def _parts(names: Iterable[str]) -> list[str]:
    """Everything that holds a tensor: encoder, encoder.map, encoder.map.weight, …"""
    ends = {name: [i for i, letter in enumerate(name) if letter == "."] for name in names}
    return list(dict.fromkeys(name[:end] for name in ends for end in (*ends[name], len(name))))


def unlike(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Why weights for one input, as `describe` has it, cannot stand for another task's; nothing where they can.

    Another mean and spread, or number of levels, is no reason: each task's numbers are shown on their own scale.
    """
    texts = {"kind": "{}", "vocab": "{} tokens", "channels": "{} channels a step", "frame": "frames of {} pixels"}
    for name, text in texts.items():
        there, here = theirs.get(name), ours.get(name)
        if there != here:
            return f"{text.format(there)} there, {text.format(here)} here"
    if theirs.get("missing", False) != ours.get("missing", False):
        there, here = ("may" if each.get("missing") else "cannot" for each in (theirs, ours))
        return f"values {there} be missing there and {here} here (missing: hidden)"
    if theirs.get("static", 0) != ours.get("static", 0):
        return f"{theirs.get('static', 0)} static features there, {ours.get('static', 0)} here"
    return "" if theirs.get("codes") == ours.get("codes") else "the same tokens stand for other characters there"


def misfits(theirs: SequenceModel, ours: SequenceModel) -> list[str]:
    """The tensors that one network has and the other has not, or in another shape."""
    there, here = (
        {name: tensor.shape for name, tensor in model.state_dict().items() if name.partition(".")[0] in MOVED}
        for model in (theirs, ours)
    )
    return sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
