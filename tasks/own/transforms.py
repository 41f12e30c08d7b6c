"""What is done to recordings before a network sees them: they are resampled, cut into windows, and their steps joined
into patches or replaced by the frames of a spectrogram, in this order, before any statistics are computed.

Windows may overlap: they are views of values that are stored once. New rows go through the same function as training
rows.

n recordings, L steps of one, C channels, k steps of a patch, m windows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from spt.tasks.base import IGNORED, Split, TaskConfig
from spt.tasks.own.parsing import HUGE, Cells, NameEncoder, Place, is_empty, parse_number, show
from spt.tasks.parallel import allocate

if TYPE_CHECKING:
    from spt.tasks.own.options import Options
    from spt.tasks.own.rows import Examples

MOST = 1000  # of the whole numbers whose ratio resampling goes by
FLOOR = 1e-10  # of power, below which nothing is told apart: 100 dB under full scale
WHOLE = 1e-6  # how far from a whole number a number of steps may be


class SpectrogramOptions(BaseModel):
    """Frames of a short-time Fourier transform with a Hann window."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    window: int = Field(256, ge=4, le=2**16, description="steps in a frame")
    hop: int | None = Field(
        None, ge=1, description="steps from one frame's start to the next one's (null: half the window)"
    )
    log: bool = Field(True, description="the logarithm of the power; false: the magnitude")

    @property
    def apart(self) -> int:
        """Steps from one frame to the next."""
        return self.window // 2 if self.hop is None else self.hop

    @property
    def bins(self) -> int:
        return self.window // 2 + 1


class TransformOptions(TaskConfig):
    """What is done to every recording, in this order, after it is read and before statistics are computed."""

    rate: float | None = Field(
        None, gt=0, lt=1e12, description="values: steps per second, where neither sound files nor time_column say it"
    )
    resample: float | str | None = Field(
        None,
        description="values: new rate, in steps per second, or a ratio of whole numbers such as 1/4; uses an "
        "anti-aliasing filter",
    )
    window: int | str | None = Field(
        None, description="cut into windows of this many steps, or seconds (32s); a shorter recording is one window"
    )
    stride: int | str | None = Field(
        None,
        description="window: steps, or seconds, from one window's start to the next one's (null: the window's length)",
    )
    last_window: Literal["drop", "keep"] = Field(
        "drop", description="window: what to do with a shorter window at the end of a recording"
    )
    label_at: Literal["last", "mean", "majority"] | None = Field(
        None,
        description="window: a recording has a list of labels in time (long: one per step), and a window gets the last "
        "of those within it, their mean, or the commonest",
    )
    label_rate: float | None = Field(
        None,
        gt=0,
        lt=1e12,
        description="label_at: labels per second (null: one label per k steps, with the smallest whole k that "
        "fits all recordings)",
    )
    score: Literal["window", "recording"] = Field(
        "window",
        description="window: answer and score each window, or each recording, by the mean over its windows (of their "
        "probabilities, or numbers)",
    )
    patch: int | None = Field(
        None, ge=2, le=2**16, description="values: join this many steps into one, with all their channels"
    )
    last_patch: Literal["drop", "pad"] = Field(
        "drop",
        description="patch: leave out steps left over at the end, or fill up the patch by repeating the last one",
    )
    spectrogram: SpectrogramOptions | None = Field(
        None,
        description="values: replace steps by frames of a short-time Fourier transform, whose channels are the "
        "frequencies of one channel after another",
    )

    @field_validator("resample")
    @classmethod
    def _ratio(cls, resample: float | str | None) -> float | str | None:
        if isinstance(resample, str):
            numbers = re.fullmatch(r"\s*([1-9]\d{0,3})\s*/\s*([1-9]\d{0,3})\s*", resample)
            if numbers is None or max(map(int, numbers.groups())) > MOST:
                raise ValueError(
                    f"{resample!r} is neither a rate, a number of steps a second, nor a ratio of whole numbers up to "
                    f"{MOST:,} such as 1/4"
                )
        elif resample is not None and not 0 < resample < 1e12:
            raise ValueError(f"{resample:g} is no rate; a positive number of steps a second is expected")
        return resample

    @field_validator("window", "stride")
    @classmethod
    def _span(cls, span: int | str | None) -> int | str | None:
        number = _seconds(span) if isinstance(span, str) else span
        if number is not None and not 0 < number < 2**40:
            raise ValueError(f"{span!r} is no span; so many steps, 4000, or seconds, 32s, are expected")
        return span

    @model_validator(mode="after")
    def _together(self) -> "TransformOptions":
        if self.window is None:
            needless = {"stride": None, "last_window": "drop", "label_at": None, "score": "window"}
            for name, usual in needless.items():
                if getattr(self, name) != usual:
                    raise ValueError(f"{name} is for windows; say window: so many steps")
        if self.label_rate is not None and self.label_at is None:
            raise ValueError("label_rate is for label_at, which is not given")
        if self.last_patch != "drop" and self.patch is None:
            raise ValueError("last_patch is for patch, which is not given")
        if self.patch is not None and self.spectrogram is not None:
            raise ValueError("patch and spectrogram each replace the steps; give one of them")
        plan(self, self.rate, known=False)  # what is wrong whatever the rate is
        return self

    @property
    def of_values(self) -> list[str]:
        """The options given that have no meaning for tokens."""
        return [name for name in ("rate", "resample", "patch", "spectrogram") if getattr(self, name) is not None]

    @property
    def transforms(self) -> bool:
        return any(option is not None for option in (self.resample, self.window, self.patch, self.spectrogram))


def _seconds(span: str) -> float:
    """Of a span such as 32s; 0 where it is none."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*s\s*", span)
    return float(found[1]) if found else 0.0


MIXING = ("resample", "spectrogram")  # make a number from those of several steps


def check_transforms(config: "Options") -> None:
    """Raise ValueError for options that do not go together."""
    if config.of_values and not config.continuous:
        raise ValueError(f"{config.of_values[0]} is for values; it has no meaning for tokens")
    mixing = [name for name in MIXING if getattr(config, name) is not None]
    if config.missing == "hidden" and mixing:
        raise ValueError(
            f"{mixing[0]} makes every step from several, in which values may be missing; fill them first, or leave "
            f"out {mixing[0]} or missing: hidden"
        )
    if config.rate is not None and config.time_column is not None:
        raise ValueError("rate and time_column are given; the times say how far apart steps are")
    if config.per_step:
        for name in ("patch", "spectrogram", "label_at"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"per_step gives every step a label, which {name} does not keep; leave one of them out"
                )
        if config.score == "recording":
            raise ValueError("score: recording averages answers of windows, but with per_step every step has its own")
    if config.label_at is not None:
        if config.target == "labels":
            raise ValueError("label_at is for one label at a time: classes or numbers, not target: labels")
        if config.score == "recording":
            raise ValueError("score: recording is for one label a recording; with label_at every window has its own")
        if (config.label_at == "mean") != (config.target == "real") and config.label_at != "last":
            kind = "classes" if config.label_at == "mean" else "numbers"
            raise ValueError(f"label_at: {config.label_at} has no meaning for {kind}; last is possible")
        if config.kind == "long" and config.label_rate is not None:
            raise ValueError("label_rate is for lists of labels; in the long layout every step has one")
    if config.times == "steps" and (config.resample or config.patch or config.spectrogram):
        raise ValueError(
            "times: steps tells a model irregular times, which resample, patch and spectrogram do not keep"
        )


def as_read(config: Any) -> Any:
    """The options by which a reader reads recordings that are transformed: whole, with all labels of their steps."""
    if not config.transforms:
        return config
    per_step = config.per_step or (config.label_at is not None and config.kind == "long")
    return config.model_copy(update={"max_length": None, "truncate": False, "per_step": per_step})


# ------------------------------------------------------------------------------------------------------------ the plan


class Plan(NamedTuple):
    """The transforms of recordings of one rate, in steps."""

    up: int = 1
    down: int = 1
    window: int | None = None
    stride: int = 1
    keep_last: bool = False
    patch: int = 1
    pad_patch: bool = False
    spectrogram: SpectrogramOptions | None = None
    max_length: int | None = None
    truncate: bool = False

    @property
    def ratio(self) -> Fraction:
        """Steps after resampling per step before it."""
        return Fraction(self.up, self.down)

    @property
    def resamples(self) -> bool:
        return self.ratio != 1

    @property
    def copies(self) -> bool:
        """Are there values other than those that were read?"""
        return self.resamples or self.patch > 1 or self.spectrogram is not None

    @property
    def apart(self) -> Fraction:
        """Steps, as read, from one step's start to the next one's."""
        return (self.spectrogram.apart if self.spectrogram else self.patch) / self.ratio

    def channels(self, read: int) -> int:
        return read * (self.spectrogram.bins if self.spectrogram else self.patch)

    # lengths, of L steps that were read

    def resampled(self, length: int) -> int:
        return -(-length * self.up // self.down)

    def final(self, length: int) -> int:
        """Steps that this many resampled ones become."""
        if self.spectrogram is not None:
            return max(0, 1 + (length - self.spectrogram.window) // self.spectrogram.apart)
        return -(-length // self.patch) if self.pad_patch else length // self.patch

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Where the windows of this many resampled steps begin and end."""
        if self.window is None or length <= self.window:
            return [(0, length)]
        starts = range(0, length - self.window + 1, self.stride)
        windows = [(start, start + self.window) for start in starts]
        if self.keep_last and windows[-1][1] < length and starts[-1] + self.stride < length:
            windows.append((starts[-1] + self.stride, length))
        return windows


def plan(options: TransformOptions, rate: float | None, *, known: bool = True) -> Plan:
    """What the options mean for recordings of this rate, in steps per second; with `known` False the rate may be
    missing, and options that need it then count as unset. Raises ValueError where they do not go together."""
    up, down = _resampling(options.resample, rate, known)
    after = None if rate is None else rate * up / down
    window, stride = (_in_steps(name, getattr(options, name), after, known) for name in ("window", "stride"))
    patch, spectrogram = options.patch or 1, options.spectrogram
    unit, what = (spectrogram.apart, "the spectrogram's hop") if spectrogram else (patch, "patch")
    if spectrogram is not None and spectrogram.apart > spectrogram.window:
        raise ValueError(
            f"spectrogram: hop {spectrogram.apart:,} is larger than its window {spectrogram.window:,}, so that steps "
            "lie in "
            "no frame; choose a smaller hop"
        )
    if window is not None:
        if spectrogram is not None and window < spectrogram.window:
            raise ValueError(
                f"a window of {window:,} steps holds no frame of {spectrogram.window:,}; choose a longer one, or a "
                "smaller spectrogram.window"
            )
        if spectrogram is None and window % unit:
            raise ValueError(f"window: {window:,} steps are no multiple of {what}, {unit:,}; {_nearest(window, unit)}")
        if stride is not None and stride % unit:
            raise ValueError(f"stride: {stride:,} steps are no multiple of {what}, {unit:,}; {_nearest(stride, unit)}")
        stride = window // unit * unit if stride is None else stride
    limits = {name: getattr(options, name, None) for name in ("max_length", "truncate")}
    return Plan(
        up,
        down,
        window,
        stride or 1,
        options.last_window == "keep",
        patch,
        options.last_patch == "pad",
        spectrogram,
        limits["max_length"],
        bool(limits["truncate"]),
    )


def _nearest(steps: int, unit: int) -> str:
    below = steps // unit * unit
    return f"{below:,} or {below + unit:,} are" if below else f"{unit:,} is the smallest"


def _resampling(resample: float | str | None, rate: float | None, known: bool) -> tuple[int, int]:
    if resample is None:
        return 1, 1
    if isinstance(resample, str):
        ratio = Fraction(resample.replace(" ", ""))
        return ratio.numerator, ratio.denominator
    if rate is None:
        if known:
            raise ValueError(
                f"resample: {resample:g} is a rate, but that of the data is not known; give it as rate:, or a ratio "
                "such "
                "as resample: 1/4"
            )
        return 1, 1
    ratio = Fraction(resample / rate).limit_denominator(MOST)
    if not ratio or ratio.numerator > MOST or abs(float(ratio) * rate / resample - 1) > 1e-6:
        raise ValueError(
            f"resample: from {rate:g} to {resample:g} steps a second is no ratio of whole numbers up to {MOST:,}; "
            "choose "
            "another rate"
        )
    return ratio.numerator, ratio.denominator


def _in_steps(name: str, span: int | str | None, rate: float | None, known: bool) -> int | None:
    if not isinstance(span, str):
        return span
    if rate is None:
        if known:
            raise ValueError(
                f"{name}: {span} is in seconds, but the rate of the data is not known; give it as rate:, or {name} in "
                "steps"
            )
        return None
    steps = _seconds(span) * rate
    if round(steps) < 1 or abs(steps - round(steps)) > WHOLE * max(1.0, steps):
        raise ValueError(f"{name}: {span} are {steps:g} steps at {rate:g} a second; a whole number is needed")
    return round(steps)


# ------------------------------------------------------------------------------------------------- some recordings


class TransformedRows(NamedTuple):
    rows: Split
    recording: NDArray[np.int64]  # (m,) of each row, its number among those that were given
    begins: NDArray[np.int64]  # (m,) and ends: in resampled steps of the recording
    ends: NDArray[np.int64]
    notes: list[str]


def transform(made: Plan, rows: Split, place: Callable[[int], str]) -> TransformedRows:
    """Recordings as a network is shown them, without targets unless these are of steps; `place` says where a recording
    stands. Raises ValueError for one that is too short or too long."""
    if rows.steps is not None and made.copies:
        raise ValueError("times between steps are irregular, so that steps can be neither resampled nor joined")
    lengths = rows.lengths.tolist()
    starts, stops, recording, spans = list[int](), list[int](), list[int](), list[tuple[int, int]]()
    dropped = short = cut = left_over = at = 0
    for i, length in enumerate(lengths):
        resampled = made.resampled(length)
        windows = made.cut(resampled)
        short += made.window is not None and resampled < made.window
        dropped += made.window is not None and windows[-1][1] < resampled
        found = 0
        base = at if made.copies else int(rows.starts[i])
        for begin, end in windows:
            size = made.final(end - begin)
            left_over += made.patch > 1 and bool((end - begin) % made.patch)
            if not size:
                continue
            if made.max_length is not None and size > made.max_length:
                _refuse_long(made, place(i), size)
                size, cut = made.max_length, cut + 1
            start = base + begin // (made.spectrogram.apart if made.spectrogram else made.patch)
            starts.append(start)
            stops.append(start + size)
            recording.append(i)
            spans.append((begin, end))
            found += 1
        if not found:
            unit = f"a frame of {made.spectrogram.window:,}" if made.spectrogram else f"a patch of {made.patch:,}"
            advice = "" if made.spectrogram else ", or say last_patch: pad"
            raise ValueError(
                f"{place(i)}: the sequence has {resampled:,} steps, fewer than {unit}; leave it out{advice}"
            )
        at += made.final(resampled)
    which, edges = np.array(recording, np.int64), np.array(spans, np.int64).reshape(-1, 2)
    changed = replace(
        rows.take(which),
        starts=np.array(starts, np.int64),
        stops=np.array(stops, np.int64),
        sources=_sources(rows)[which],
    )
    if made.window is not None:
        names = [f"{name}@{begin}" for name, begin in zip(changed.ids.tolist(), edges[:, 0].tolist(), strict=True)]
        changed = replace(changed, ids=np.array(names))
    if made.copies:
        changed = replace(changed, values=_values(made, rows, at, place))
        if rows.per_step and rows.targets is not None:
            changed = replace(changed, targets=_nearest_targets(made, rows, at))
    notes = _notes(made, len(lengths), len(which), short, dropped, cut, left_over)
    return TransformedRows(changed, which, edges[:, 0], edges[:, 1], notes)


def _refuse_long(made: Plan, place: str, size: int) -> None:
    if not made.truncate:
        raise ValueError(
            f"{place}: a sequence of {size:,} steps is left, max_length is {made.max_length:,}; raise it, cut with "
            "truncate: true, or choose shorter windows"
        )


def _values(made: Plan, rows: Split, total: int, place: Callable[[int], str]) -> NDArray[Any]:
    """(total, C') The values of all recordings, one behind the other."""
    numeric = rows.values.dtype if made.patch > 1 and not made.resamples else np.dtype(np.float32)
    values = allocate((total, made.channels(rows.values.shape[1])), numeric)
    at = 0
    for i in range(len(rows)):
        steps = rows.row(i)
        if (made.resamples or made.spectrogram) and steps.dtype.kind == "f" and not np.isfinite(steps).all():
            raise ValueError(
                f"{place(i)}: values are missing, so that steps can be neither resampled nor made frames; fill them, "
                "or leave out resample and spectrogram"
            )
        if made.resamples:
            steps = resampled(steps, made.up, made.down)
        if made.spectrogram is not None:
            steps = frames(steps, made.spectrogram)
        elif made.patch > 1:
            steps = patches(steps, made.patch, made.pad_patch)
        values[at : at + len(steps)] = steps
        at += len(steps)
    return values


def resampled(steps: NDArray[Any], up: int, down: int) -> NDArray[np.float32]:
    """(ceil(L up / down), C) With a low-pass filter against aliasing; beyond its ends a recording is continued by the
    line between them."""
    from scipy.signal import resample_poly

    padding = "line" if len(steps) > 1 else "edge"
    return np.asarray(resample_poly(steps.astype(np.float32), up, down, axis=0, padtype=padding), np.float32)


def patches(steps: NDArray[Any], k: int, pad: bool) -> NDArray[Any]:
    """(L / k, k C) The channels of a patch's first step come first."""
    left = len(steps) % k
    if left and pad:
        steps = np.concatenate([steps, np.repeat(steps[-1:], k - left, axis=0)])
    whole = len(steps) // k
    return steps[: whole * k].reshape(whole, -1)


def frames(steps: NDArray[Any], options: SpectrogramOptions) -> NDArray[np.float32]:
    """(frames, bins C) Power of each frequency in frames that lie within the steps, or its logarithm; or magnitudes."""
    from scipy.signal import ShortTimeFFT
    from scipy.signal.windows import hann

    count = max(0, 1 + (len(steps) - options.window) // options.apart)
    if not count:
        return np.empty((0, steps.shape[1] * options.bins), np.float32)
    transform = ShortTimeFFT(hann(options.window, sym=False), options.apart, 1.0, scale_to="magnitude")
    found = transform.stft(
        np.asarray(steps, np.float64).T, p0=0, p1=count, k_offset=transform.m_num_mid
    )  # (C, bins, frames)
    magnitude = np.abs(found).transpose(2, 0, 1).reshape(count, -1)
    return np.asarray(np.log(magnitude**2 + FLOOR) if options.log else magnitude, np.float32)


def _nearest_targets(made: Plan, rows: Split, total: int) -> NDArray[Any]:
    """Of every resampled step, the target of the step that was nearest."""
    targets = np.asarray(rows.targets)
    joined = np.empty((total, *targets.shape[1:]), targets.dtype)
    at = 0
    for start, stop in zip(rows.starts.tolist(), rows.stops.tolist(), strict=True):
        count = made.resampled(stop - start)
        nearest = np.minimum((np.arange(count) * made.down + made.up // 2) // made.up, stop - start - 1)
        joined[at : at + count] = targets[start + nearest]
        at += count
    return joined


def _sources(rows: Split) -> NDArray[np.uint64]:
    """(n,) Fingerprints of whole recordings, as those of rows that nothing was made of, by which a window is known
    that was cut elsewhere."""
    person = rows.values.dtype.str.encode()[:16]
    prints = np.empty(len(rows), np.uint64)
    for i in range(len(rows)):
        row = np.ascontiguousarray(rows.row(i)).reshape(-1).view(np.uint8)
        prints[i] = int.from_bytes(blake2b(row.data, digest_size=8, person=person).digest(), "little")
    return prints


def _notes(made: Plan, n: int, m: int, short: int, dropped: int, cut: int, left_over: int) -> list[str]:
    """One sentence: the notes of a task head its reports."""
    parts = [f"resampled by {made.up}/{made.down}"] if made.resamples else []
    if made.window is not None:
        parts.append(f"{n} recordings cut into {m} windows of {made.window:,} steps, one every {made.stride:,}")
        parts += [f"what is left at the end of {dropped} is not used"] if dropped else []
        parts += [f"{short} shorter than a window are kept as they are"] if short else []
    if made.spectrogram is not None:
        parts.append(
            f"frames of {made.spectrogram.window:,} steps, one every {made.spectrogram.apart:,}, as "
            f"{'log power' if made.spectrogram.log else 'magnitudes'}"
        )
    if made.patch > 1:
        parts.append(f"{made.patch} steps a patch")
        ends = "padded" if made.pad_patch else "left out"
        parts += [f"{left_over} incomplete patches at ends are {ends}"] if left_over else []
    if cut:
        parts.append(f"{cut} of {m} sequences were cut after {made.max_length} steps")
    return ["; ".join(parts)]


# ------------------------------------------------------------------------------------------- what a reader has read


def transform_examples(config: "Options", examples: "Examples", rate: float | None, drop: bool = True) -> "Examples":
    """What was read, transformed; windows are split by the keys of their recordings. With `drop`, windows without a
    label are left out. Raises ValueError."""
    if not config.transforms:
        return examples
    made = plan(config, rate)
    rows, scale = examples.rows, examples.scale
    per_step = rows.per_step  # in which unit places are asked for
    first = rows.starts if per_step else np.arange(len(rows))

    def place_of(recording: int) -> str:
        return examples.place(int(first[recording]))

    if made.spectrogram is not None and scale != (0.0, 1.0):  # a logarithm is of numbers whose full scale is 1
        values = (rows.values.astype(np.float32) - np.float32(scale[0])) / np.float32(scale[1])
        rows, scale = replace(rows, values=values), (0.0, 1.0)
    labels = rows.targets
    in_time = config.label_at is not None and (per_step or np.asarray(labels).dtype == object)  # else there are none
    if in_time:
        rows = replace(rows, targets=None, per_step=False)
    found = transform(made, rows, place_of)
    windows, which = found.rows, found.recording
    notes = [*found.notes]
    if in_time:
        targets = _labels_of_windows(config, made, found, rows, np.asarray(labels), per_step, rate, place_of)
        known = np.isfinite(targets[:, 0]) if targets.ndim == 2 else targets != IGNORED
        drop = drop and config.missing_labels == "refuse"
        kept = np.flatnonzero(known) if drop else np.arange(len(known))
        if not len(kept):
            raise ValueError(f"{config.title}: no window has a label")
        if len(kept) < len(known):
            notes.append(f"{len(known) - len(kept)} windows without a label within them are left out")
        windows, which = replace(windows, targets=targets).take(kept), which[kept]
    if config.score == "recording":
        windows = replace(windows, recordings=which)
    return replace(
        examples,
        rows=windows,
        place=examples.place if windows.per_step and not made.copies else _places(place_of, windows, which),
        splits=examples.splits[which],
        static={name: (names, codes[which]) for name, (names, codes) in examples.static.items()},
        keys=examples.keys[which],
        notes=[*examples.notes, *notes],
        scale=scale,
        interval=float((Fraction(examples.interval) if rate is None else 1 / Fraction(rate)) * made.apart),
    )


def _places(place_of: Callable[[int], str], rows: Split, which: NDArray[np.int64]) -> Callable[[int], str]:
    if not rows.per_step:
        return lambda i: place_of(int(which[i]))
    return lambda i: place_of(int(which[max(0, int(np.searchsorted(rows.starts, i, side="right")) - 1)]))


def transform_rows(
    options: TransformOptions,
    rows: Split,
    rate: float | None = None,
    places: Sequence[str] = (),
    max_length: int | None = None,
) -> Split:
    """Recordings without a table, transformed and cut after `max_length`; `recordings` says which row each window is
    from, since callers want one answer per row. Raises ValueError."""
    if not options.transforms:
        return rows
    made = plan(options, options.rate if rate is None else rate)
    if max_length is not None:
        made = made._replace(max_length=max_length, truncate=True)
    found = transform(made, rows, lambda i: places[i] if places else f"row {rows.ids[i]}")
    windows = found.rows
    return replace(windows, recordings=found.recording) if options.window is not None else windows


# --------------------------------------------------------------------------------------------------- labels in time


def read_label_lists(
    config: "Options", columns: Sequence[tuple[Cells, Place]], encoder: NameEncoder, gaps: bool = False
) -> NDArray[np.object_]:
    """(n,) The labels of each recording: (M,) codes, or (M, K) numbers, IGNORED or NaN where an entry is empty; with
    `gaps` an empty cell is a list without entries."""
    n = len(columns[0][0])
    lists = np.empty(n, np.object_)
    for i in range(n):
        parts = [() if gaps and _is_gap(cells[i]) else _entries(cells[i], place(i)) for cells, place in columns]
        place = columns[0][1](i)
        if config.target == "classes":
            lists[i] = encoder.encode(parts[0], partial(_entry, place), gaps=True)
            continue
        if len({len(part) for part in parts}) > 1:
            raise ValueError(f"{place}: the lists of labels are not equally long")
        lists[i] = np.stack([_numbers(part, place) for part in parts], axis=1)
    return lists


def _entry(place: str, i: int) -> str:
    return f"{place}, label {i + 1}"


def _is_gap(cell: Any) -> bool:
    return not len(cell) if isinstance(cell, list | np.ndarray) else is_empty(cell)


def _entries(cell: Any, place: str) -> Sequence[Any] | NDArray[Any]:
    import json

    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            raise ValueError(f"{place}: {show(cell)} is not a list in JSON") from None
    elif isinstance(cell, str) and len(cell.split()) > 1:
        cell = cell.split()
    if not isinstance(cell, list | np.ndarray) or not len(cell):
        raise ValueError(f"{place}: {show(cell)} is not a list of labels, which label_at needs")
    return cell


def _numbers(entries: Sequence[Any] | NDArray[Any], place: str) -> NDArray[np.float64]:
    """(M,) NaN where an entry is empty."""
    if isinstance(entries, np.ndarray) and entries.dtype.kind in "iuf" and entries.ndim == 1:
        numbers = entries.astype(np.float64)
        if not (np.abs(numbers) >= HUGE).any():
            return numbers
    return np.array(
        [
            np.nan if is_empty(entry) else parse_number(entry, f"{place}, label {j}")
            for j, entry in enumerate(entries, 1)
        ]
    )


def _labels_of_windows(
    config: "Options",
    made: Plan,
    found: TransformedRows,
    rows: Split,
    labels: NDArray[Any],
    per_step: bool,
    rate: float | None,
    place_of: Callable[[int], str],
) -> NDArray[Any]:
    """(m,) codes or (m, K) numbers of the windows; IGNORED or NaN where no label lies within one."""
    width = () if config.target == "classes" else (len(config.labels),)
    targets = np.full((len(found.recording), *width), np.nan if width else IGNORED, np.float64 if width else np.int64)
    apart = 1.0 if per_step else _label_steps(config, [*map(len, labels)], rows.lengths.tolist(), rate, place_of)
    window = 0
    for i in range(len(rows)):
        entries = labels[rows.starts[i] : rows.stops[i]] if per_step else labels[i]
        positions = np.arange(len(entries)) * (apart * made.up / made.down)
        while window < len(found.recording) and found.recording[window] == i:
            low, high = np.searchsorted(positions, [found.begins[window], found.ends[window]]).tolist()
            among = entries[low:high]
            among = among[np.isfinite(among).all(axis=1)] if width else among[among != IGNORED]
            if len(among):
                targets[window] = _label(config.label_at, among)
            window += 1
    return targets


def _label(how: str | None, among: NDArray[Any]) -> Any:
    if how == "mean":
        return among.mean(axis=0)
    if how == "last":
        return among[-1]
    codes, first, counts = np.unique(among, return_index=True, return_counts=True)
    return codes[np.lexsort((first, -counts))[0]]  # of equals the one that comes first


def _label_steps(
    config: "Options", counts: list[int], lengths: list[int], rate: float | None, place_of: Callable[[int], str]
) -> float:
    """Steps, as read, from one label to the next: by the rates, or the smallest whole number of them with which the
    labels of every recording reach to its end and not beyond."""
    if config.label_rate is not None:
        if rate is None:
            raise ValueError(
                "label_rate is in labels a second, but the rate of the data is not known; give it as rate:"
            )
        apart = rate / config.label_rate
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if (count - 1) * apart >= length + apart:
                raise ValueError(
                    f"{place_of(i)}: {count:,} labels at {config.label_rate:g} a second are longer than {length:,} "
                    "steps "
                    f"at {rate:g}"
                )
        return apart
    steps, odd = steps_a_label(counts, lengths)
    if odd is not None:
        raise ValueError(
            f"{place_of(odd)}: {counts[odd]:,} labels for {lengths[odd]:,} steps are not, as in other rows, one for "
            "every so many; give label_rate: (labels a second) and the rate of the steps"
        )
    return float(steps)


def steps_a_label(counts: Sequence[int], lengths: Sequence[int]) -> tuple[int, int | None]:
    """The smallest whole number of steps per label with which the labels of every recording reach its end and not
    beyond; and the first recording, if any, for which no number fits that the recordings before it allow."""
    least = most = 0
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if not count:
            continue
        low, high = -(-length // count), -(-length // (count - 1)) - 1 if count > 1 else length
        least, most = max(least, low), min(most or high, high)
        if least > most:
            return least, i
    return least, None
