"""Handwritten digits, 8x8 pixels read row by row: 64 steps, 10 classes, 1,797 real images, no download.

The images are those that come with scikit-learn (UCI Optical Recognition of Handwritten Digits, test part: 13 writers).
A pixel is one of 17 grey levels, 0 to 16. The set has no official split: a seeded permutation is cut into 1,000
training, 297 validation and 500 test images; the validation images are carved from the 1,297 for training.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens, Values

LEVELS = 17
TEST, VALIDATION = 500, 297  # images


class Config(TaskConfig):
    pixels: Literal["tokens", "values"] = Field("tokens", description="a pixel is one of 17 tokens, or a number")
    split_seed: int = Field(0, ge=0, description="seed of the permutation of the 1,797 images that is cut into splits")


def load(config: Config, raw: Path) -> TaskData:
    from sklearn.datasets import load_digits  # in the function: 1 s to import, and needed once, for preparing

    bunch = load_digits()
    images = bunch.data.astype(np.uint8)  # (1797, 64), 0..16
    labels = bunch.target.astype(np.int64)
    order = np.random.Generator(np.random.PCG64(config.split_seed)).permutation(len(images))
    test, val, train = np.split(order, [TEST, TEST + VALIDATION])

    as_tokens = config.pixels == "tokens"

    def split(rows: NDArray[np.int64]) -> Split:
        pixels = images[rows]
        return Split.from_rows(pixels if as_tokens else pixels[..., None], labels[rows], ids=rows)

    mean, std = images[train].mean(), images[train].std()
    return TaskData(
        input=Tokens(LEVELS) if as_tokens else Values(1, (float(mean),), (float(std),), levels=LEVELS),
        target=Classes(10),
        train=split(train),
        val=split(val),
        test=split(test),
        row_width=8,
    )
