"""Selective copying (Mamba): tokens scattered among noise, to be repeated in their order at the end.

Gu, Dao: "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), sections 3.1 and 4.1, appendix E.1:
4,096 steps, 16 tokens including noise, 16 to remember; new rows at every training step. Its code is not published; the
rules are those of the S4 repository's copying.py, from which the Mamba paper's task came. M tokens of 1 … A - 2 are at
places drawn from the first T - M steps, all sets of places equally likely, and noise, token 0, at the others; the last
M steps are the token A - 1, where the M tokens are asked for. A convolution, which is the same for every row, cannot
know where they were; `places: start` puts them first, which it can know.

In copying.py, `l_noise` counts the noise alone: T is l_noise + 2 M. The answers are not in the inputs, so a model may
look ahead, and pretraining on the inputs alone never sees them. MAD's task of this name scatters by another rule:
tasks/mad.py.

Letters: A `vocab`, T `length`, M `copied`; B rows.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import below, keys
from spt.tasks.base import IGNORED, Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.rows import Made, made_splits, resampled, stored, subsets

INDEXABLE = True


class Config(TaskConfig):
    vocab: int = Field(16, ge=4, le=2**20, description="tokens, including noise and the signal to answer (A)")
    length: int = Field(4096, ge=2, le=2**24, description="steps, including those of the answers (T)")
    copied: int = Field(16, ge=1, le=2**16, description="tokens to remember (M)")
    places: Literal["random", "start"] = Field(
        "random", description="where they are: among the noise, or before it (copying that is not selective)"
    )
    train_size: int = Field(10_000, ge=1, le=2**32, description="training rows per epoch; S4's code: 10,000")
    eval_size: int = Field(1000, ge=1, le=2**24, description="number of validation rows, and of test rows")
    resample_each_epoch: bool = Field(True, description="new training rows in every epoch, as published")
    seed: int = Field(0, ge=0, description="seed of all rows")

    def smoke_sizes(self) -> dict[str, int]:
        return {"length": 64}

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if self.length < 2 * self.copied:
            raise ValueError(
                f"length {self.length} has no room for {self.copied} tokens and as many answers; give at least "
                f"{2 * self.copied} steps"
            )
        return self


def load(config: Config, raw: Path) -> TaskData:
    train, val, test = made_splits(config, make, config.train_size, config.eval_size, "selective_copying")
    return TaskData(Tokens(config.vocab), Classes(config.vocab, per_step=True), train, val, test)


def resample(config: Config, ids: NDArray[np.int64], epoch: int) -> Split:
    return resampled(config, make, config.train_size, ids, epoch)


def make(config: Config, split: str, rows: NDArray[np.int64], epoch: int = 0) -> Made:
    """Inputs and targets (B, T) of the rows with these numbers."""

    def key(purpose: str) -> NDArray[np.uint64]:
        return keys(config.seed, "selective_copying", purpose, split, epoch, rows=rows)

    A, T, M = config.vocab, config.length, config.copied
    copied = 1 + below(key("tokens"), M, A - 2)
    places = subsets(key("places"), M, T - M)
    if config.places == "start":
        places = np.broadcast_to(np.arange(M), places.shape)
    tokens = np.zeros((len(rows), T), np.int64)
    np.put_along_axis(tokens, places, copied, axis=1)
    tokens[:, T - M :] = A - 1
    targets = np.full(tokens.shape, IGNORED, np.int64)
    targets[:, T - M :] = copied
    return stored(tokens, targets, A)
