"""What is done with sequences that are too long for the budget: windows, patches, or a cut, as options of the task.

What the command line gives stands; of the rest, long recordings of which there are few become windows, whose answers
are averaged, and where there are many, several steps become one.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from spt.advisor.columns import LONGEST, LabelPeriod
from spt.config.validation import validate_values, validation_messages
from spt.errors import UsageError
from spt.tasks.own.transforms import TransformOptions

MANY = 500  # recordings, which are enough to learn from as they are
MOST_PATCH = 64  # steps that may be one
OVERLAP = 2  # windows that a step lies in
LEAST_CONTEXT, MOST_CONTEXT = 32, 512  # steps of a window whose last label is to be known; a quarter of a recording
MOST_WINDOWS = 100_000  # of all recordings
SHORT_PATCH = 4  # steps of windows that are one, where the budget is short


def given_transforms(
    window: str | None = None,
    stride: str | None = None,
    resample: str | None = None,
    patch: int | None = None,
    spectrogram: str | None = None,
    rate: float | None = None,
) -> dict[str, Any]:
    """Options of the task from those of the command line. Raises UsageError."""
    options: dict[str, Any] = {"window": _span("--window", window), "stride": _span("--stride", stride), "patch": patch}
    options |= {"last_patch": None if patch is None else "pad"}  # whatever their lengths
    options |= {"rate": rate, "resample": None if resample is None else _rate(resample)}
    if spectrogram is not None:
        found = re.fullmatch(r"(\d{1,6})(?:\s*,\s*(\d{1,6}))?", spectrogram.strip())
        if found is None:
            raise UsageError(f"--spectrogram {spectrogram}: steps of a frame, and from one to the next: 256,128")
        frame = int(found[1])
        options["spectrogram"] = {"window": frame, "hop": int(found[2]) if found[2] else max(1, frame // 2)}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        validate_values(
            TransformOptions, {name: value for name, value in given.items() if name != "stride" or "window" in given}
        )  # a window for the stride may be chosen later
    except ValidationError as error:
        problem = "; ".join(validation_messages(TransformOptions, error))
        raise UsageError(f"--{problem}" if re.match(rf"({'|'.join(given)})\b.*: ", problem) else problem) from None
    return given


def _span(option: str, text: str | None) -> int | str | None:
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*s?\s*", text):
        raise UsageError(f"{option} {text}: so many steps, 4000, or seconds, 32s, are expected")
    return int(text) if text.strip().isdigit() else text.strip()


def _rate(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _amount(span: int | str) -> str:
    """Steps, or seconds as they were given."""
    return f"{span:,}" if isinstance(span, int) else span


def label_windows(
    options: Mapping[str, Any], given: Mapping[str, Any], period: LabelPeriod | None, most: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Further options where labels lie in time, and a line that explains them: a window for every label, with some
    steps before it, of `most` steps at most; none where the command line says the window, or no such one is known."""
    how = {"mean": "the mean", "majority": "the commonest", "last": "the last"}[str(options["label_at"])]
    plain = (f"labels: a window has {how} of those within it (label_at in the recipes)",)
    if "window" in given or "resample" in given or period is None:
        return {}, plain
    frame, hop = 1, int(given.get("patch", 1))
    if "spectrogram" in given:
        frame, hop = (int(given["spectrogram"][name]) for name in ("window", "hop"))
    unit = math.lcm(period.steps, hop)
    if unit > most:
        return {}, plain
    context = max(frame, min(MOST_CONTEXT, max(LEAST_CONTEXT, period.shortest // 4), period.shortest))
    window = max(unit, min(-(-context // unit), most // unit) * unit)
    stride: int | str = given.get("stride", unit * -(-period.labels * period.steps // (unit * MOST_WINDOWS)))
    chosen = {"window": window, "label_at": "last"}
    if "stride" not in given and stride != window:
        chosen["stride"] = stride
    its = "with its label" if window == period.steps else "and has the last label within it"
    every = f"one every {period.steps:,} steps" if period.steps > 1 else "one at every step"
    return chosen, (
        f"labels: {every}; a row is a window of {window:,} steps {its}, one every {_amount(stride)} (window, stride, "
        "label_at in the recipes; --window, --stride)",
    )


def shortened(
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    length: int,
    interval: float,
    recordings: int,
    most: int,
    values: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Further options for sequences of up to `length` steps, as the given options leave them, of which a network is to
    see at most `most`; and a line that explains them. `values`: are steps numbers, not tokens?"""
    if length <= most or "window" in given:
        return {}, ()
    if not values:
        line = f"length: up to {length:,} steps; sequences are cut after {most:,} (max_length in the recipes)"
        return {"max_length": most, "truncate": True}, (line,)
    per_step, lists = bool(options.get("per_step")), "label_at" in options
    k = 2 ** math.ceil(math.log2(length / most))
    joined = "patch" in given or "spectrogram" in given
    if not (per_step or lists or joined) and k <= MOST_PATCH and recordings >= MANY:
        line = f"length: up to {length:,} steps; {k} of them are one token (patch in the recipes; --patch, --window)"
        return {"patch": k, "last_patch": "pad"}, (line,)
    patch: dict[str, Any] = {}
    if most < LONGEST and not (per_step or joined):  # the same windows in fewer steps, where the budget is short
        patch, most = {"patch": SHORT_PATCH, "last_patch": "pad"}, LONGEST
    window = most
    if interval < 1 and int(most * interval) >= 1 and not joined:  # whole seconds
        window = round(int(most * interval) / interval)
    unit = SHORT_PATCH if patch else 1
    window -= window % unit
    if "spectrogram" in given:
        unit = int(given["spectrogram"]["hop"])
        window = (most - 1) * unit + int(given["spectrogram"]["window"])
    elif "patch" in given:
        unit = int(given["patch"])
        window = most * unit
    stride = window if per_step else max(unit, window // OVERLAP // unit * unit)
    chosen: dict[str, Any] = {
        "window": window,
        **({} if "stride" in given or per_step else {"stride": stride}),
        **patch,
    }
    how = f", {unit} steps one token (patch)" if patch else ""
    if not per_step and not lists:
        chosen["score"] = "recording"
        how += ", and scored by the mean answer of each recording (score)"
    return chosen, (
        f"length: up to {length * (1 if patch else unit):,} steps; recordings are cut into windows of {window:,}, one "
        "every "
        f"{_amount(given.get('stride', stride))}{how} (window, stride in the recipes; --window, --stride, --patch)",
    )
