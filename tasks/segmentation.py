"""Pathfinder-Segmentation of the DLR paper: which pixels are on a long path, and on the one with discs at both ends?

Every pixel has a class: 1 on a long path, 2 on the long path with both discs, where the picture has one, 0 elsewhere.
Each short path has a disc, so that discs alone give nothing away. A pixel counts as on a path if drawing the path
leaves a trace there in 8 bits: a halo of faint ringing belongs to the path, gaps and discs do not. Pictures are made by
the published rules (see tasks/generators/pathfinder.py), each row from the seed, its split and its number alone. The
published pictures themselves were never released. The paper's loss and metrics are cross-entropy with weights 1 / count
in the batch, macro F1 and balanced accuracy.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens, Values, row_ids
from spt.tasks.generators.pathfinder import SEGMENTATION, generate

INDEXABLE = True
SIZES = {"paper": (96_000, 2_000, 2_000), "code": (80_000, 10_000, 10_000)}


class Config(TaskConfig):
    resolution: Literal[128, 256, 512] = Field(128, description="pixels per side")
    sizes: Literal["paper", "code"] = Field(
        "paper", description="of 100,000 pictures, 96, 2 and 2 % (DLR paper), or 80, 10 and 10 % (its code)"
    )
    train_size: int | None = Field(None, ge=1, description="training rows; null: as `sizes` says")
    val_size: int | None = Field(None, ge=1, description="validation rows; null: as `sizes` says")
    test_size: int | None = Field(None, ge=1, description="test rows; null: as `sizes` says")
    seed: int = Field(0, ge=0, description="seed of all pictures")
    distractors: int | None = Field(
        None, ge=0, le=100, description="short paths tried; null: the published 16, 16 or 18 (by resolution)"
    )
    pixels: Literal["values", "tokens"] = Field("values", description="a pixel is a number, or one of 256 tokens")

    def smoke_sizes(self) -> dict[str, int]:
        return {"resolution": 128}


def load(config: Config, raw: Path) -> TaskData:
    """Nothing is read from `raw`."""
    law = SEGMENTATION[config.resolution]
    if config.distractors is not None:
        law = law._replace(distractors=config.distractors)
    names = ("train", "val", "test")
    splits = []
    sizes = (config.train_size, config.val_size, config.test_size)
    for name, size, published in zip(names, sizes, SIZES[config.sizes], strict=True):
        n = min(size or published, config.max_rows or size or published)
        rows = generate(law, config.seed, name, n, f"segmentation {law.side}")
        pixels = rows.pixels if config.pixels == "tokens" else rows.pixels[..., None]
        ids = row_ids(name, n)
        splits.append(Split.from_rows(pixels, rows.classes, ids=ids, per_step=True))
    train, val, test = splits
    grey = Values(1, (127.5,), (127.5,), levels=256)
    return TaskData(
        input=Tokens(256) if config.pixels == "tokens" else grey,
        target=Classes(3, per_step=True),
        train=train,
        val=val,
        test=test,
        length=law.side**2,
        row_width=law.side,
        notes=(f"pictures generated here by the published law, seed {config.seed}",),
    )


def class_names(config: Config) -> tuple[str, ...]:
    return ("elsewhere", "long path", "path with both discs")


def breakdown(config: Config, rows: Split) -> dict[str, NDArray[Any]]:
    """Does the row have a path with both discs? How bright is the pixel?"""
    classes = np.asarray(rows.targets).reshape(len(rows), -1)
    joined = np.where((classes == 2).any(1), b"two discs joined", b"none joined")
    return {"brightness": rows.values.reshape(-1), "picture": np.repeat(joined, classes.shape[1])}
