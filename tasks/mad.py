"""MAD: six token tasks that show what a layer is good at: recall, copying, compression, memory.

Poli, Thomas, Nguyen, Ponnusamy, Deiseroth, Kersting, Suzuki, Hie, Ermon, Ré, Zhang, Massaroli: "Mechanistic Design and
Scaling of Hybrid Architectures" (2024), by the rules of its code (athms/mad-lab, instances.py). What is asked for:

    in_context_recall        the value of every key that has occurred before; keys and values alternate
    noisy_in_context_recall  the same, with pairs of noise tokens in between
    fuzzy_in_context_recall  the same, with keys and values of one to three tokens; keys outside training have three
    memorization             the value that a key has in all rows, at the step after it, which does not show it
    selective_copying        tokens with blanks in between, in their order, after all of them
    compression              every token of the row from the last step alone: by `finetune.head.pool: last`

In compression each step is answered from the vector of the last step and its own place alone; with another head every
step holds its own answer, and nothing is learnt. In the three recall tasks an answer is the next input, so they are for
causal models, and pretraining on the next token learns them if training is long enough.

For these three, the published code asks for the next token at every step of a training row, and for the answers alone
on test rows; here training rows ask for the answers too, unless `trained_on: all`. It has no validation split, and
picks the best run of a search by its test rows; here validation and test have 1,280 rows each. Rows are the same in
every epoch, as published. Default sizes are the published baselines; harder settings there vary one at a time: V 32,
64, 128 (noisy recall 48, 80, 144), T 256, 512, 1024 (selective copying from 512, compression 64, 128, 256),
`train_size` 6400, 3200, 1600, 800, `noise` 0.4, 0.6, 0.8, `copied` 32, 64, 96; for memorization V alone, 512 … 8192.

Letters: V `vocab`, T steps (`length`, or one less), N pairs in a row, M `copied`; B rows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import GOLDEN, below, keys, mixed, uniforms
from spt.tasks.base import IGNORED, Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.rows import Made, asked_of_next, first_of_each, made_splits, resampled, shuffled, stored

INDEXABLE = True
Name = Literal[
    "in_context_recall",
    "noisy_in_context_recall",
    "fuzzy_in_context_recall",
    "memorization",
    "selective_copying",
    "compression",
]
RECALL: tuple[Name, ...] = ("in_context_recall", "noisy_in_context_recall", "fuzzy_in_context_recall")
ITSELF = "a step's own token is what it asks for: rows are compressed only where finetune.head.pool is last"


class Sizes(NamedTuple):
    """Sizes of a task; the published baseline where an option is null."""

    vocab: int
    length: int
    train_size: int = 12_800
    noise: float = 0.0
    noise_vocab: int = 0
    copied: int = 0
    key_tokens: int = 1
    value_tokens: int = 1


BASELINES: dict[Name, Sizes] = {
    "in_context_recall": Sizes(16, 128),
    "noisy_in_context_recall": Sizes(32, 128, noise=0.2, noise_vocab=16),
    "fuzzy_in_context_recall": Sizes(16, 128, key_tokens=3, value_tokens=3),
    "memorization": Sizes(256, 32, 256),
    "selective_copying": Sizes(16, 256, copied=16),
    "compression": Sizes(16, 32),
}
OWN: dict[str, tuple[Name, ...]] = {
    "noise": ("noisy_in_context_recall",),
    "noise_vocab": ("noisy_in_context_recall",),
    "copied": ("selective_copying",),
    "key_tokens": ("fuzzy_in_context_recall",),
    "value_tokens": ("fuzzy_in_context_recall",),
    "rule": ("fuzzy_in_context_recall",),
    "fixed_seed": ("memorization",),
    "queries": RECALL,
    "trained_on": RECALL,
}


class Config(TaskConfig):
    task: Name = Field("in_context_recall", description="which of the six")
    vocab: int | None = Field(
        None,
        ge=4,
        le=2**16,
        description="tokens, special ones and noise included; null: 16, noisy recall 32, memorization 256",
    )
    length: int | None = Field(
        None,
        ge=4,
        le=2**20,
        description="tokens in a row; null: 128, selective_copying 256, memorization and compression 32",
    )
    noise: float | None = Field(None, ge=0, lt=1, description="noisy recall: share of pairs that are noise; null: 0.2")
    noise_vocab: int | None = Field(
        None, ge=1, le=2**16, description="noisy recall: number of noise tokens, which `vocab` includes; null: 16"
    )
    copied: int | None = Field(None, ge=1, le=2**16, description="selective_copying: tokens to copy (M); null: 16")
    key_tokens: int | None = Field(None, ge=1, le=4, description="fuzzy recall: most tokens of a key; null: 3")
    value_tokens: int | None = Field(None, ge=1, le=4, description="fuzzy recall: most tokens of a value; null: 3")
    queries: Literal["all", "last"] = Field(
        "all",
        description="recall: every key that has occurred before is asked for; or only that of the last pair, after a "
        "special token",
    )
    trained_on: Literal["answers", "all"] = Field(
        "answers",
        description="recall: training rows ask for the answers, as validation and test rows do; or, as in the code, "
        "for the next token at every step",
    )
    rule: Literal["paper", "code"] = Field(
        "paper",
        description="fuzzy recall: the last key has occurred before in every row; or, as in the code, in most of them",
    )
    train_size: int | None = Field(None, ge=1, le=2**32, description="training rows; null: 12,800, memorization 256")
    eval_size: int = Field(1280, ge=1, le=2**24, description="number of validation rows, and of test rows")
    resample_each_epoch: bool = Field(False, description="new training rows in every epoch; published: the same ones")
    seed: int = Field(0, ge=0, description="seed of all rows")
    fixed_seed: int = Field(0, ge=0, description="memorization: seed of the values that keys have")

    def smoke_sizes(self) -> dict[str, int]:
        return {"length": min(64, self.sizes.length)}

    @property
    def sizes(self) -> Sizes:
        given = {name: getattr(self, name) for name in Sizes._fields}
        return BASELINES[self.task]._replace(**{name: size for name, size in given.items() if size is not None})

    @property
    def ordinary(self) -> int:
        """Tokens that are neither special nor noise: the first ones. Where there are keys, they come first of these."""
        sizes = self.sizes
        special = {"in_context_recall": 0, "noisy_in_context_recall": 0, "selective_copying": 2}.get(self.task, 1)
        return sizes.vocab - sizes.noise_vocab - special - (self.queries == "last")

    @property
    def steps(self) -> int:
        """T."""
        return self.sizes.length - (self.task in RECALL[:2] and self.queries == "all")

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        for name, tasks in OWN.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.task not in tasks:
                raise ValueError(f"{name}: {getattr(self, name)} is for {' and '.join(tasks)}; the task is {self.task}")
        sizes, ordinary = self.sizes, self.ordinary
        key_tokens = max(2, sizes.key_tokens)
        if ordinary < 2 * key_tokens or ordinary - ordinary // 2 < sizes.value_tokens:
            raise ValueError(
                f"vocab {sizes.vocab} leaves {max(0, ordinary)} tokens beside special ones and noise; {self.task} "
                f"needs {max(2 * key_tokens, 2 * sizes.value_tokens - 1)} or more"
            )
        if self.task in (*RECALL[:2], "memorization") and sizes.length % 2:
            raise ValueError(f"length is {sizes.length}; it is even, as a key and its value take two steps")
        motifs = 2 * (sizes.key_tokens + sizes.value_tokens)
        least = {"fuzzy_in_context_recall": motifs + 1, "selective_copying": 2 * sizes.copied + 2}.get(self.task, 4)
        if sizes.length < least:
            raise ValueError(f"length {sizes.length} is too short for this {self.task}; it takes at least {least}")
        return self


Key = Callable[[str], NDArray[np.uint64]]  # the rows' keys for one purpose
Tokens64 = NDArray[np.int64]


# ------------------------------------------------------------------------------------------------------ hooks


def load(config: Config, raw: Path) -> TaskData:
    sizes = config.sizes
    train, val, test = made_splits(config, make, sizes.train_size, config.eval_size, config.task)
    return TaskData(
        Tokens(sizes.vocab),
        Classes(sizes.vocab, per_step=True),
        train,
        val,
        test,
        notes=(ITSELF,) if config.task == "compression" else (),
        future=config.task in RECALL,
    )


def resample(config: Config, ids: NDArray[np.int64], epoch: int) -> Split:
    return resampled(config, make, config.sizes.train_size, ids, epoch)


def make(config: Config, split: str, rows: NDArray[np.int64], epoch: int = 0) -> Made:
    """Inputs and targets (B, T) of the rows with these numbers."""

    def key(purpose: str) -> NDArray[np.uint64]:
        return keys(config.seed, "mad", config.task, purpose, split, epoch, rows=rows)

    tokens, targets = MAKERS[config.task](config, key, split == "train")
    return stored(tokens, targets, config.sizes.vocab)


# ----------------------------------------------------------------------------------------------------- recall


def _recall(config: Config, key: Key, training: bool) -> tuple[Tokens64, Tokens64]:
    """N - 1 pairs, keys drawn with replacement, then one more with a key among them; noise in place of some pairs."""
    sizes, ordinary = config.sizes, config.ordinary
    n, N = ordinary // 2, sizes.length // 2
    values = n + below(key("values"), n, ordinary - n)
    drawn = below(key("keys"), N - 1, n)
    noisy = uniforms(key("noise"), N - 1) < sizes.noise
    noisy &= np.arange(N - 1) != below(key("never noise"), 1, N)  # the code draws from N, so that it may be none
    noisy[noisy.all(axis=1), 0] = False
    first = first_of_each(np.where(noisy, -1 - np.arange(N - 1), drawn)) & ~noisy
    chosen = (uniforms(key("last"), 1) * first.sum(axis=1, keepdims=True)).astype(np.int64)
    last = (np.cumsum(first, axis=1) > chosen).argmax(axis=1)[:, None]
    drawn = np.concatenate([drawn, np.take_along_axis(drawn, last, axis=1)], axis=1)
    whole = np.stack([drawn, np.take_along_axis(values, drawn, axis=1)], axis=2)
    if sizes.noise:
        other = ordinary + below(key("noise tokens"), 2 * N - 2, sizes.noise_vocab).reshape(-1, N - 1, 2)
        whole[:, :-1] = np.where(noisy[..., None], other, whole[:, :-1])
    asked = np.zeros(whole.shape, np.bool_)
    asked[:, :-1, 1] = ~first & ~noisy & (config.queries == "all")
    asked[:, -1, 1] = True
    flat, scored = whole.reshape(len(drawn), -1), asked.reshape(len(drawn), -1)
    if config.queries == "last":
        flat = np.insert(flat, 2 * N - 2, sizes.vocab - 1, axis=1)
        scored = np.insert(scored, 2 * N - 2, False, axis=1)
    return _inputs_and_targets(config, flat, scored, training)


def _inputs_and_targets(
    config: Config, whole: Tokens64, scored: NDArray[np.bool_], training: bool
) -> tuple[Tokens64, Tokens64]:
    """Asked for are the tokens to be scored, or on training rows every one, as `trained_on` says."""
    return asked_of_next(whole, scored | (training and config.trained_on == "all"))


class Pairs(NamedTuple):
    """N pairs, more than a row holds, and after them the one that is asked for at its end; or a selection of these."""

    codes: Tokens64  # (B, N + 1) a number for each key
    key_sizes: Tokens64  # (B, N + 1)
    keys: Tokens64  # (B, N + 1, K)
    value_sizes: Tokens64
    values: Tokens64  # (B, N + 1, M)

    @property
    def sizes(self) -> Tokens64:
        return self.key_sizes + self.value_sizes

    @property
    def starts(self) -> Tokens64:
        """Where each begins, when they are laid end to end."""
        return np.cumsum(self.sizes, axis=1) - self.sizes

    def taken(self, order: Tokens64) -> "Pairs":
        """(B, n) of them, by number."""
        return Pairs(
            *(np.take_along_axis(part, order if part.ndim == 2 else order[..., None], axis=1) for part in self)
        )


def _fuzzy_recall(config: Config, key: Key, training: bool) -> tuple[Tokens64, Tokens64]:
    """Pairs until the row is nearly full, then one more with a key among them; padding in front. A key has one to K
    tokens, on held-out rows K, a value one to M, all different."""
    sizes, drawn = config.sizes, _pairs(config, key, training)
    last = drawn.sizes[:, -1:]
    room = sizes.length - last - (sizes.key_tokens + sizes.value_tokens)  # a pair begins before
    pairs = drawn.taken(_order(config, key("place"), drawn, room))
    starts = pairs.starts
    shown = starts < room
    end = (pairs.sizes * shown)[:, :-1].sum(axis=1, keepdims=True) + (config.queries == "last")  # a sign stands there
    asked = ~first_of_each(pairs.codes) & (config.queries == "all")
    starts[:, -1:], shown[:, -1], asked[:, -1] = end, True, True
    starts += sizes.length + 1 - end - last
    whole, scored = _written(config, pairs, starts, shown, asked)
    if config.queries == "last":
        np.put_along_axis(whole, sizes.length - last, sizes.vocab - 1, axis=1)
    return _inputs_and_targets(config, whole, scored, training)


def _order(config: Config, key: NDArray[np.uint64], drawn: Pairs, room: Tokens64) -> Tokens64:
    """(B, N + 2) In which order pairs are shown: the last one, number N, also where the row reaches a random place,
    unless its key has come by itself; and at the end."""
    N = drawn.codes.shape[1] - 1
    starts, numbers = drawn.starts[:, :N], np.arange(N + 1)
    due = starts >= (uniforms(key, 1) * (config.sizes.length - 2 * drawn.sizes[:, N:])).astype(np.int64)
    if config.rule == "paper":
        due |= starts + drawn.sizes[:, :N] >= room
    turn = due.argmax(axis=1)[:, None]
    by_itself = (drawn.codes[:, :N] == drawn.codes[:, N:]) & (numbers[:N] < turn)
    turn[by_itself.any(axis=1)] = N
    order = np.where(numbers == turn, N, numbers - (numbers > turn))
    return np.concatenate([order, np.full_like(turn, N)], axis=1)


def _written(
    config: Config, pairs: Pairs, starts: Tokens64, shown: NDArray[np.bool_], asked: NDArray[np.bool_]
) -> tuple[Tokens64, NDArray[np.bool_]]:
    """Rows of T + 1 tokens, padded with the first that is not ordinary, and which tokens are asked for."""
    B, T = len(starts), config.steps
    whole = np.full((B, T + 2), config.ordinary)  # one column more, for what is not shown
    scored = np.zeros(whole.shape, np.bool_)
    for part, count, begin, wanted in (
        (pairs.keys, pairs.key_sizes, starts, np.zeros_like(asked)),
        (pairs.values, pairs.value_sizes, starts + pairs.key_sizes, asked),
    ):
        within = np.arange(part.shape[2])
        inside = shown[..., None] & (within < count[..., None])
        places = np.where(inside, begin[..., None] + within, T + 1).reshape(B, -1)
        np.put_along_axis(whole, places, part.reshape(B, -1), axis=1)
        np.put_along_axis(scored, places, np.repeat(wanted, len(within), axis=1), axis=1)
    return whole[:, :-1], scored[:, :-1]


def _pairs(config: Config, key: Key, training: bool) -> Pairs:
    """A key's value follows from the row and the key, so that it is the same wherever the key stands."""
    sizes, n = config.sizes, config.ordinary // 2
    N, K, M = sizes.length // 2, sizes.key_tokens, sizes.value_tokens
    chosen = arrangements(uniforms(key("keys"), (N + 1) * K).reshape(-1, N + 1, K), n)
    B = len(chosen)
    key_sizes = 1 + below(key("key sizes"), N + 1, K) if training else np.full((B, N + 1), K)
    codes = ((chosen + 1) * (n + 1) ** np.arange(K) * (np.arange(K) < key_sizes[..., None])).sum(axis=2)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        entries = mixed(key("values")[:, None] + codes.astype(np.uint64) * GOLDEN).reshape(-1)
    draws = uniforms(entries, M + 1).reshape(B, N + 1, M + 1)
    value_sizes = 1 + (draws[..., 0] * M).astype(np.int64)
    return Pairs(codes, key_sizes, chosen, value_sizes, n + arrangements(draws[..., 1:], config.ordinary - n))


def arrangements(u: NDArray[np.float64], n: int) -> Tokens64:
    """(…, s) distinct numbers of 0 … n-1, all arrangements equally likely, from as many uniform numbers."""
    chosen = np.empty(u.shape, np.int64)
    for j in range(u.shape[-1]):
        x = (u[..., j] * (n - j)).astype(np.int64)
        for earlier in np.moveaxis(np.sort(chosen[..., :j], axis=-1), -1, 0):
            x += x >= earlier
        chosen[..., j] = x
    return chosen


# ------------------------------------------------------------------------------- memory, copying, compression


def _memorization(config: Config, key: Key, training: bool) -> tuple[Tokens64, Tokens64]:
    """Keys drawn with replacement; behind each the last token of all, where its value is asked for."""
    n = config.ordinary // 2
    once = keys(config.fixed_seed, "mad", "memorization", "map", rows=np.zeros(1, np.int64))
    values = n + shuffled(once, np.arange(config.ordinary - n)[None])[0, :n]
    drawn = below(key("keys"), config.steps // 2, n)
    tokens = np.stack([drawn, np.full_like(drawn, config.sizes.vocab - 1)], axis=2)
    targets = np.stack([np.full_like(drawn, IGNORED), values[drawn]], axis=2)
    return tokens.reshape(len(drawn), -1), targets.reshape(len(drawn), -1)


def _selective_copying(config: Config, key: Key, training: bool) -> tuple[Tokens64, Tokens64]:
    """M tokens; each blank falls before one of them, all alike likely, so that the last token ends the first part. Then
    the sign to copy and M blanks, where the tokens are asked for."""
    sizes, T = config.sizes, config.steps
    M, blanks = sizes.copied, T - 2 * sizes.copied - 1
    copied = below(key("tokens"), M, config.ordinary)
    B = len(copied)
    before = below(key("blanks"), blanks, M) + M * np.arange(B)[:, None]
    counts = np.bincount(before.reshape(-1), minlength=B * M).reshape(B, M)
    tokens = np.full((B, T), config.ordinary)
    np.put_along_axis(tokens, np.arange(M) + np.cumsum(counts, axis=1), copied, axis=1)
    tokens[:, T - M - 1] = sizes.vocab - 1
    targets = np.full((B, T), IGNORED)
    targets[:, T - M :] = copied
    return tokens, targets


def _compression(config: Config, key: Key, training: bool) -> tuple[Tokens64, Tokens64]:
    """Any tokens, and at the end the last of all, into which the others are to be compressed: all are asked for."""
    tokens = below(key("tokens"), config.steps, config.ordinary)
    tokens[:, -1] = config.ordinary
    return tokens, tokens


MAKERS: dict[Name, Callable[[Config, Key, bool], tuple[Tokens64, Tokens64]]] = {
    "in_context_recall": _recall,
    "noisy_in_context_recall": _recall,
    "fuzzy_in_context_recall": _fuzzy_recall,
    "memorization": _memorization,
    "selective_copying": _selective_copying,
    "compression": _compression,
}
