"""The angle of a swinging pendulum in noisy pictures of it, 50 of 100 at irregular times (CRU, S5).

The regression of Becker et al. (2019) and Schirmer et al. (2022), as S5 uses it (Smith et al., 2023, section 6.3): a
step is a picture of 24x24 grey levels, and its target is sin and cos of the angle at that moment, scored by the mean
squared error over all frames in use. The time since the previous frame in use, in frames of 0.01 s and 1 at the first
step, is given to models that take it (S5); `times: drop` withholds it (the ablation S5-drop). A step here is the
picture alone; the encoder can append the time to the encoded picture (S5-append; `encoder.step_times: append`).

The simulator follows the published rules: simulation and noise have the published distribution but not the published
numbers, since a row here is determined by the seed, its split and its number alone, while the official code draws all
rows in turn (training and test from seed 42, validation from 43). Which frames of row i are kept is as published.

Letters: B rows, F `frames`, K `kept`; angles in radians, 0 where the pendulum hangs (in the pictures, downwards).
"""

import functools
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import keys, normals, uniforms
from spt.tasks.base import Reals, Split, TaskConfig, TaskData, Values, row_ids
from spt.tasks.parallel import allocate, fill

INDEXABLE = True
MOST = 4096  # frames of a sequence
CHUNK = 1000  # rows at once: the simulation takes each of its steps for all of them together
SIDE, CANVAS = 24, 128  # pixels of a picture, and of the canvas that it is shrunk from
CENTRE, ROD, WIDTH = 64, 55, 8  # pixels of the canvas

GRAVITY, LENGTH, MASS, FRICTION = 9.81, 1.0, 1.0, 0.1
INERTIA = MASS * LENGTH**2 / 3
STEP, STEPS = 1e-4, 100  # seconds of an Euler step, and how many make a frame
TORQUE = 0.1  # standard deviation of what is added to the velocity after each frame
BLUR = 1e-5  # and to the angle that is drawn
DRIFT = 0.2  # the most by which the clearness of a frame differs from the one before
CLEAR = 5  # first frames, always without noise
OFFSETS = {"train": 2000, "val": 1000, "test": 0}  # published: frames of row i are drawn with seed i + offset


class Config(TaskConfig):
    frames: int = Field(100, ge=1, le=MOST, description="frames of the simulation, 0.01 s apart")
    kept: int = Field(
        50, ge=1, le=MOST, description="how many frames, drawn without replacement, make up a row; at most all"
    )
    times: Literal["steps", "drop"] = Field(
        "steps", description="tell the model the time between frames, or withhold it (S5-drop)"
    )
    keeping: Literal["published", "seeded"] = Field(
        "published",
        description="which frames of row i are kept: those that NumPy's default_rng(i + 2000) draws (i + 1000 for "
        "validation, i for test), or those drawn with `seed`",
    )
    validation: Literal["own", "test"] = Field(
        "own", description="own: 1,000 further sequences (S5's code); test: the test sequences (CRU's code)"
    )
    train_size: int = Field(2000, ge=1, le=2**24, description="training sequences; 2,000 as published")
    eval_size: int = Field(1000, ge=1, le=2**24, description="validation and test sequences, each; 1,000 as published")
    seed: int = Field(0, ge=0, description="seed of the simulation and the noise")

    def smoke_sizes(self) -> dict[str, int]:
        return {"kept": 20}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.kept > self.frames:
            raise ValueError(f"kept: {self.kept} of frames: {self.frames}; at most all frames can be kept")
        return self


# ------------------------------------------------------------------------------------------------------ hooks


def load(config: Config, raw: Path) -> TaskData:
    train, test = _split(config, "train", config.train_size), _split(config, "test", config.eval_size)
    val = _split(config, "val", config.eval_size) if config.validation == "own" else test
    notes: tuple[str, ...] = ()
    if val is test:
        notes = ("validation is the test split: scores of the selected checkpoint are optimistic",)
    pictures = Values(SIDE * SIDE, (0.0,) * SIDE**2, (255.0,) * SIDE**2, levels=256, frame=(SIDE, SIDE))
    return TaskData(pictures, Reals(2, per_step=True), train, val, test, notes=notes)


def _split(config: Config, name: str, size: int) -> Split:
    n = size if config.max_rows is None else min(size, config.max_rows)
    pictures = allocate((n, config.kept, SIDE * SIDE), np.uint8)
    targets = np.empty((n, config.kept, 2), np.float32)
    steps = np.empty((n, config.kept), np.float32)
    fill((pictures, targets, steps), functools.partial(make, config, name), n, CHUNK, f"pendulum, {name}")
    ids = row_ids(name, n)
    times = steps if config.times == "steps" else None
    return Split.from_rows(pictures, targets, ids=ids, per_step=True, steps=times)


# -------------------------------------------------------------------------------------------------- sequences


def make(
    config: Config, split: str, first: int, last: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Rows first … last-1: pictures (B, K, 576), targets (B, K, 2) and frames since the previous one (B, K)."""
    rows = np.arange(first, last)
    when = kept_frames(config, split, rows)
    angles = np.take_along_axis(simulate(config, split, rows), when, axis=1)
    clear = np.take_along_axis(clearness(config, split, rows), when, axis=1)
    numbers = (rows[:, None] * MOST + when).reshape(-1)  # so that a frame is the same whichever others are kept
    blur = normals(keys(config.seed, "pendulum", "blur", split, rows=numbers), 1).reshape(when.shape)
    pictures = render(angles + BLUR * blur).reshape(-1, SIDE * SIDE)
    spoil(pictures, clear.reshape(-1), keys(config.seed, "pendulum", "pixels", split, rows=numbers))
    targets = np.stack([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)
    steps = np.diff(when, axis=1, prepend=when[:, :1] - 1).astype(np.float32)
    return pictures.reshape(*when.shape, -1), targets, steps


def kept_frames(config: Config, split: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B, K) ascending frame numbers from 0 on."""
    if config.keeping == "seeded":
        chance = uniforms(keys(config.seed, "pendulum", "kept", split, rows=rows), config.frames)
        return np.sort(np.argsort(chance, axis=1, kind="stable")[:, : config.kept], axis=1)
    draws = (np.random.default_rng(OFFSETS[split] + row) for row in rows.tolist())
    return np.stack([np.sort(draw.choice(config.frames, config.kept, replace=False)) for draw in draws])


def simulate(config: Config, split: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B, F) angles in [-pi, pi): released at rest at any angle, then pushed at random after every frame."""
    seed, frames = config.seed, config.frames
    angle = 2 * np.pi * uniforms(keys(seed, "pendulum", "start", split, rows=rows), 1)[:, 0]  # 0: upright
    pushes = TORQUE * normals(keys(seed, "pendulum", "torque", split, rows=rows), frames).astype(np.float64)
    velocity = np.zeros_like(angle)
    pull = STEP * GRAVITY * LENGTH * MASS / INERTIA
    angles = np.empty((len(rows), frames))
    angles[:, 0] = angle
    change, slowed = np.empty_like(angle), np.empty_like(angle)
    for frame in range(1, frames):
        for _ in range(STEPS):
            np.sin(angle, out=change)
            change *= pull
            np.multiply(velocity, STEP * FRICTION, out=slowed)
            change -= slowed
            velocity += change
            np.multiply(velocity, STEP, out=change)  # semi-implicit: the new velocity moves the angle
            angle += change
        velocity += pushes[:, frame - 1]
        np.mod(angle, 2 * np.pi, out=angle)
        angles[:, frame] = angle
    return angles - np.pi


def clearness(config: Config, split: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B, F) in [0, 1]: 1 where a frame is all picture, 0 where it is all noise; close to that of adjacent frames."""
    seed, frames = config.seed, config.frames
    chance = uniforms(keys(seed, "pendulum", "clearness", split, rows=rows), frames + 2)
    low, high = 0.25 * chance[:, :1], 0.75 + 0.25 * chance[:, 1:2]
    walk = np.empty((len(rows), frames))
    walk[:, 0] = chance[:, 2]
    for frame in range(1, frames):
        walk[:, frame] = np.clip(walk[:, frame - 1] + DRIFT * (2 * chance[:, frame + 2] - 1), 0, 1)
    clear = np.clip((walk - low) / (high - low), 0, 1)
    clear[:, :CLEAR] = 1
    return clear


def spoil(pictures: NDArray[np.uint8], clear: NDArray[np.float64], key: NDArray[np.uint64]) -> None:
    """Mix pictures (n, P), in place, with uniform noise on [0, 255): a share clear (n,) of picture, the rest noise."""
    noisy = np.flatnonzero(clear < 1)
    for part in np.array_split(noisy, len(noisy) // 64 + 1):
        mixed = uniforms(key[part], pictures.shape[1])
        mixed *= 255 * (1 - clear[part, None])
        mixed += clear[part, None] * pictures[part]
        pictures[part] = mixed  # whole part


# --------------------------------------------------------------------------------------------------- pictures


def render(angles: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Clean pictures, (…) -> (…, 24, 24): a thick line from the middle of the canvas to the pendulum's end."""
    across, along = (np.trunc(CENTRE + ROD * part(angles)).astype(np.int64) for part in (np.sin, np.cos))
    ends, which = np.unique(across * CANVAS + along, return_inverse=True)  # Pillow truncates: some hundred ends in all
    drawn = np.stack([_picture(*divmod(end, CANVAS)) for end in ends.tolist()])
    return drawn[which.reshape(angles.shape)]


@functools.lru_cache(maxsize=1024)
def _picture(x: int, y: int) -> NDArray[np.uint8]:
    """(24, 24) as Pillow draws the line to column x, row y of the canvas, and shrinks it."""
    from PIL import Image, ImageDraw

    canvas = Image.new("F", (CANVAS, CANVAS), 0.0)
    ImageDraw.Draw(canvas).line([(CENTRE, CENTRE), (x, y)], fill=1.0, width=WIDTH)
    shrunk = np.asarray(canvas.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    return (np.clip(shrunk, 0, 1) * 255).astype(np.uint8)
