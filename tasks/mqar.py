"""Multi-query associative recall (Zoology): pairs of keys and values, then the keys again; what were their values?

Arora, Eyuboglu, Timalsina, Johnson, Poli, Zou, Rudra, Ré: "Zoology: Measuring and Improving Recall in Efficient
Language Models" (2023), section 3, by the rules of its code (multiquery_ar.py). A row begins with K pairs (k, v), keys
and values all different: keys from 1 to V/2 - 1, values from V/2 to V - 1. After them each key occurs once more, at an
even step (counted from 0), where its value is asked for; the value itself does not follow, so a model may look ahead,
and pretraining on the inputs alone never sees an answer. For V = 12, T = 16, K = 2 and filler zeros:

    inputs   2  8  4  7  0  0  4  0  0  0  0  0  2  0  0  0
    targets  .  .  .  .  .  .  7  .  .  .  .  .  8  .  .  .

There are G = (T - 2 K P) / 2 places for queries, drawn without replacement, key after key, the g-th with weight
g^(a - 1): with the code's a = 0.01 near the pairs, as words in a text soon recur; with a = 1 anywhere.

The published settings (T, K) are (64, 4), (128, 8), (256, 16) and (512, 64), with 100,000 training rows, the same in
every epoch, and 3,000 others, which also choose the checkpoint; here validation has rows of its own. For these settings
the code fills with zeros; by default, and in the settings of later papers, with tokens of any kind, keys included.

Letters: V `vocab`, T `length`, K `pairs`, P `passes`, G places; B rows.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import below, exponentials, keys
from spt.tasks.base import IGNORED, Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.rows import Made, made_splits, resampled, shuffled, stored, subsets

INDEXABLE = True


class Config(TaskConfig):
    vocab: int = Field(8192, ge=8, le=2**20, description="tokens, half of them keys and half values (V)")
    length: int = Field(64, ge=4, le=2**16, description="steps (T); the paper has 64, 128, 256 and 512")
    pairs: int = Field(4, ge=1, le=2**14, description="pairs of key and value (K); the paper has 4, 8, 16 and 64")
    passes: int = Field(
        1,
        ge=1,
        le=64,
        description="how often the pairs occur before the queries begin (P); the paper: once, and its code fails on "
        "more; with two or more, pretraining on the inputs has recall to learn",
    )
    power: float = Field(
        0.01, gt=0, le=1, description="a: the g-th place for a query has weight g^(a - 1); 1: all equally likely"
    )
    filler: Literal["random", "zeros"] = Field(
        "random", description="what is between the queries: tokens of any kind, the code's default, or zeros"
    )
    train_size: int = Field(100_000, ge=1, le=2**32, description="training rows (per epoch)")
    eval_size: int = Field(3000, ge=1, le=2**24, description="number of validation rows, and of test rows")
    resample_each_epoch: bool = Field(False, description="new training rows in every epoch; published: the same ones")
    seed: int = Field(0, ge=0, description="seed of all rows")

    def smoke_sizes(self) -> dict[str, int]:
        return {"vocab": 64, "pairs": 4, "length": 64}

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if self.length % 2:
            raise ValueError(f"length is {self.length}; it is even, as pairs and queries take two steps each")
        if 2 * self.pairs * (self.passes + 1) > self.length:
            raise ValueError(
                f"{self.pairs} pairs, {self.passes} times, and their queries take {2 * self.pairs * (self.passes + 1)} "
                f"steps, more than length {self.length}"
            )
        if self.pairs > self.vocab // 2 - 1:
            raise ValueError(
                f"vocab {self.vocab} has {self.vocab // 2 - 1} keys, fewer than pairs {self.pairs}; a row has each once"
            )
        return self

    @property
    def places(self) -> int:
        """G."""
        return self.length // 2 - self.pairs * self.passes


# ------------------------------------------------------------------------------------------------------ hooks


def load(config: Config, raw: Path) -> TaskData:
    train, val, test = made_splits(config, make, config.train_size, config.eval_size, "mqar")
    return TaskData(Tokens(config.vocab), Classes(config.vocab, per_step=True), train, val, test)


def resample(config: Config, ids: NDArray[np.int64], epoch: int) -> Split:
    return resampled(config, make, config.train_size, ids, epoch)


def breakdown(config: Config, rows: Split) -> dict[str, NDArray[Any]]:
    """How many pairs before a query its own pair is: 1 for the one just before it; queries and filler in between count
    too, two steps as a pair. 0 at steps that are not queries."""
    tokens = np.asarray(rows.values).reshape(-1, config.length)
    answers = np.asarray(rows.targets).reshape(tokens.shape)
    row, step = np.nonzero(answers != IGNORED)
    last = 2 * config.pairs * (config.passes - 1)  # of several passes the newest
    where = (tokens[row, last : last + 2 * config.pairs : 2] == tokens[row, step, None]).argmax(axis=1)
    distance = np.zeros(tokens.shape, np.int64)
    distance[row, step] = (step - last) // 2 - where
    return {"distance in pairs": distance.reshape(-1)}


# ------------------------------------------------------------------------------------------------------- rows


def make(config: Config, split: str, rows: NDArray[np.int64], epoch: int = 0) -> Made:
    """Inputs and targets (B, T) of the rows with these numbers."""

    def key(purpose: str) -> NDArray[np.uint64]:
        return keys(config.seed, "mqar", purpose, split, epoch, rows=rows)

    V, T, K = config.vocab, config.length, config.pairs
    shape = len(rows), T
    k = 1 + shuffled(key("order of keys"), subsets(key("keys"), K, V // 2 - 1))
    v = V // 2 + shuffled(key("order of values"), subsets(key("values"), K, V - V // 2))
    context = np.tile(np.stack([k, v], axis=2).reshape(len(rows), -1), config.passes)
    queries = context.shape[1] + 2 * _places(config, key("places"))
    tokens = below(key("filler"), T, V) if config.filler == "random" else np.zeros(shape, np.int64)
    tokens[:, : context.shape[1]] = context
    targets = np.full(shape, IGNORED, np.int64)
    np.put_along_axis(tokens, queries, k, axis=1)
    np.put_along_axis(targets, queries, v, axis=1)
    return stored(tokens, targets, V)


def _places(config: Config, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """(B, K) of 0 … G-1, each drawn by weight among those that are left: the order in which clocks go off that run
    at the speed of the weights. The power may differ in its last bit between machines, which shows only where two
    clocks go off at nearly the same time."""
    weights = np.arange(1, config.places + 1) ** (config.power - 1)
    return np.argsort(exponentials(key, config.places) / weights, axis=1, kind="stable")[:, : config.pairs]
