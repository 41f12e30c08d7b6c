"""Induction heads (H3, Mamba): a trigger token and the one after it; later the trigger again. What came after it?

Fu, Dao, Saab, Thomas, Rudra, Ré: "Hungry Hungry Hippos" (2023), section 3.1, by the rules of its code (synthetics.py of
HazyResearch/safari), with the sizes of Gu, Dao: "Mamba" (2023), section 4.1 and appendix E.1: 256 steps, 16 tokens, new
rows at every training step, batches of 8. H3 has 31 steps (30 and the trigger), 20 tokens and 5,000 fixed rows.

A row consists of ordinary tokens, with the trigger at a random place and again at the last step, where the token after
the first trigger is asked for. There are V - 2 ordinary tokens: token V - 2 is a special token that other tasks of that
code need and that never occurs here; V - 1 is the trigger. With `copied` C > 1, that many tokens are asked for, each
while the one before it is shown; with `triggers` > 1, half of the rows have up to that many triggers, each followed by
the same tokens.

A network that has learnt the rule answers at any length; the Mamba paper trains on 256 steps and tests on 64 to
1,048,576 (`spt evaluate RUN task.length=1024`).

Letters: V `vocab`, T `length`, C `copied`; B rows, L = T - C steps before the last trigger.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import below, keys, uniforms
from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.rows import Made, asked_of_next, made_splits, resampled, stored

INDEXABLE = True


class Config(TaskConfig):
    vocab: int = Field(16, ge=4, le=2**20, description="tokens, two of them special (V); Mamba: 16, H3: 20")
    length: int = Field(256, ge=4, le=2**24, description="steps (T); Mamba: 256, H3: 31")
    copied: int = Field(1, ge=1, le=1024, description="tokens after the trigger that are asked for (C)")
    triggers: int = Field(
        1,
        ge=1,
        le=64,
        description="half of the rows have up to this many before the last; overlapping ones are left out",
    )
    trained_on: Literal["answers", "all"] = Field(
        "answers",
        description="what training rows ask for: the answers, as validation and test rows do; or the next token at "
        "every step, as in H3's code",
    )
    train_size: int = Field(65_536, ge=1, le=2**32, description="training rows per epoch; Mamba: 8,192 batches of 8")
    eval_size: int = Field(1024, ge=1, le=2**24, description="number of validation rows, and of test rows")
    resample_each_epoch: bool = Field(True, description="new training rows in every epoch, as in Mamba; H3: the same")
    seed: int = Field(0, ge=0, description="seed of all rows")

    def smoke_sizes(self) -> dict[str, int]:
        return {"length": 64}

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if self.length < 2 * self.copied + 2:
            raise ValueError(
                f"length {self.length} has no room for a trigger and {self.copied} tokens, twice; give at least "
                f"{2 * self.copied + 2} steps"
            )
        return self


def load(config: Config, raw: Path) -> TaskData:
    train, val, test = made_splits(config, make, config.train_size, config.eval_size, "induction_heads")
    seen = config.copied > 1 or config.trained_on == "all"  # an answer is an input of the next step
    target = Classes(config.vocab, per_step=True)
    return TaskData(Tokens(config.vocab), target, train, val, test, future=seen)


def resample(config: Config, ids: NDArray[np.int64], epoch: int) -> Split:
    return resampled(config, make, config.train_size, ids, epoch)


def make(config: Config, split: str, rows: NDArray[np.int64], epoch: int = 0) -> Made:
    """Inputs and targets (B, T) of the rows with these numbers."""

    def key(purpose: str) -> NDArray[np.uint64]:
        return keys(config.seed, "induction_heads", purpose, split, epoch, rows=rows)

    V, C, L = config.vocab, config.copied, config.length - config.copied
    whole = np.empty((len(rows), L + 1 + C), np.int64)
    whole[:, :L] = below(key("tokens"), L, V - 2)
    whole[:, L] = V - 1
    places = below(key("places"), config.triggers, L - 1 - C)
    one = uniforms(key("one"), 1) < 0.5
    places = np.sort(np.where(one, places[:, :1], places), axis=1)
    answer = whole[np.arange(len(rows))[:, None], places[:, :1] + 1 + np.arange(C)]
    _put_triggers(whole, places, answer, trigger=V - 1)
    whole[:, L + 1 :] = answer
    asked = np.zeros(whole.shape, np.bool_)
    asked[:, L + 1 :] = True
    asked |= split == "train" and config.trained_on == "all"
    return stored(*asked_of_next(whole, asked), V)


def _put_triggers(whole: NDArray[np.int64], places: NDArray[np.int64], answer: NDArray[np.int64], trigger: int) -> None:
    """At each of a row's ascending places, unless the trigger before it and its answer reach as far."""
    C = answer.shape[1]
    last = np.full(len(whole), -C - 1)
    for place in places.T:
        row = np.flatnonzero(place - last > C)
        last[row] = place[row]
        whole[row, place[row]] = trigger
        whole[row[:, None], place[row, None] + 1 + np.arange(C)] = answer[row]
