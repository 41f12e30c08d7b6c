"""MQAR, MAD, induction heads and selective copying against their rules, row by row, and the laws of their chance.

The same comparisons were made once with rows of the published generators; here are the laws that they follow.
"""

import math
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from spt import rng
from spt.tasks import induction_heads, mad, mqar, rows, selective_copying
from spt.tasks.base import IGNORED
from spt.tasks.rows import first_of_each, shuffled, subsets

MAD = get_args(mad.Name)
SMALL = {
    "mqar": (mqar, {"vocab": 24, "length": 24, "pairs": 3}),
    "induction_heads": (induction_heads, {"length": 20, "copied": 2, "triggers": 3}),
    "Mamba's copying": (selective_copying, {"length": 20, "copied": 4}),
    **{name: (mad, {"task": name, "length": 40}) for name in MAD},
}


def made(name, split="train", n=6, **options):
    """(inputs, targets) of n rows as int64."""
    module, own = SMALL[name]
    inputs, targets = module.make(module.Config(**(own | options)), split, np.arange(n))
    return inputs.astype(np.int64), targets.astype(np.int64)


def asked_in(targets):
    return np.flatnonzero(targets != IGNORED)


# -------------------------------------------------------------------------------------------------------- mqar


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 9), st.sampled_from(["random", "zeros"]), st.data())
def test_every_key_is_asked_for_once_and_its_value_stands_before(pairs, passes, spare, filler, data):
    length, vocab = (
        2 * (pairs * (passes + 1) + spare),
        data.draw(st.integers(2 * pairs + 2, 60).filter(lambda v: v > 7)),
    )
    sizes = {"pairs": pairs, "passes": passes, "length": length, "vocab": vocab, "filler": filler}
    inputs, targets = made("mqar", **sizes)
    half, context = vocab // 2, 2 * pairs * passes
    for row, answers in zip(inputs, targets, strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert np.array_equal(row[:context], np.tile(row[: 2 * pairs], passes))
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1 and keys.max() < half and values.min() >= half and values.max() < vocab
        steps = asked_in(answers)
        assert set(row[steps]) == set(keys) and len(steps) == pairs
        assert (steps >= context).all() and (steps % 2 == 0).all()
        assert [answers[t] for t in steps] == [values[list(keys).index(row[t])] for t in steps]
        rest = np.delete(row, [*range(context), *steps])
        assert filler == "random" or not rest.any()


def test_the_first_pairs_are_asked_for_soon():
    """Of a pair that is drawn first, P(g) is proportional to g^(a - 1); later ones have what is left."""
    n, G = 4000, 9
    inputs, targets = made("mqar", n=n, length=24, pairs=3, power=0.01, filler="zeros")
    at = (targets == inputs[:, 1, None]).argmax(axis=1)
    weights = np.arange(1, G + 1) ** (0.01 - 1)
    assert stats.chisquare(np.bincount((at - 6) // 2, minlength=G), n * weights / weights.sum()).pvalue > 1e-4
    second = (targets == inputs[:, 3, None]).argmax(axis=1)
    law = [
        sum(weights[f] / weights.sum() * weights[g] / (weights.sum() - weights[f]) for f in range(G) if f != g)
        for g in range(G)
    ]
    assert stats.chisquare(np.bincount((second - 6) // 2, minlength=G), n * np.array(law)).pvalue > 1e-4
    inputs, targets = made("mqar", n=n, length=24, pairs=3, power=1, filler="zeros")
    at = (targets == inputs[:, 1, None]).argmax(axis=1)
    assert stats.chisquare(np.bincount((at - 6) // 2, minlength=G)).pvalue > 1e-4


def test_keys_values_and_filler_are_uniform():
    inputs, _ = made("mqar", n=3000, filler="random")
    for first, last, steps in ((1, 12, slice(0, 6, 2)), (12, 24, slice(1, 6, 2)), (0, 24, slice(7, 24, 2))):
        assert stats.chisquare(np.bincount(inputs[:, steps].reshape(-1), minlength=24)[first:last]).pvalue > 1e-4


def test_published_sizes_of_mqar():
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        inputs, targets = made("mqar", n=2, vocab=8192, length=length, pairs=pairs)
        assert inputs.shape == (2, length) and ((targets != IGNORED).sum(axis=1) == pairs).all()
    config = mqar.Config()
    assert (config.train_size, config.eval_size, config.vocab, config.power) == (100_000, 3000, 8192, 0.01)
    assert mqar.make(config, "train", np.arange(1))[0].dtype == np.int16


def test_the_distance_of_a_query_is_told(tmp_path):
    config = mqar.Config(vocab=24, length=24, pairs=3, passes=2, train_size=3, eval_size=2)
    train = mqar.load(config, tmp_path).train
    (distance,) = mqar.breakdown(config, train).values()
    for i, (start, stop) in enumerate(zip(train.starts, train.stops, strict=True)):
        row, told = train.row(i), distance[start:stop]
        for t in asked_in(train.targets[start:stop]):
            newest = max(s for s in range(6, 12, 2) if row[s] == row[t])
            assert told[t] == (t - newest) // 2


# ------------------------------------------------------------------------------------------------------ recall


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("queries", ["all", "last"])
@pytest.mark.parametrize("noise", [None, 0.3, 0.9])
def test_recall_asks_for_keys_that_stood_before(split, queries, noise):
    name = "in_context_recall" if noise is None else "noisy_in_context_recall"
    inputs, targets = made(name, split, 40, queries=queries, noise=noise, length=24)
    ordinary, vocab = (16, 16) if noise is None else (16, 32)
    ordinary -= queries == "last"
    assert inputs.shape == (40, 23 + (queries == "last"))
    for row, answers in zip(inputs, targets, strict=True):
        tokens = [*row, answers[-1]]
        if queries == "last":
            assert tokens.pop(22) == vocab - 1
        known, asked = {}, {}
        for t in range(0, 24, 2):
            key, value = tokens[t : t + 2]
            if key >= ordinary:
                assert min(key, value) >= ordinary and t < 22
                continue
            assert key < ordinary // 2 <= value < ordinary and known.get(key, value) == value
            if key in known and (queries == "all" or t == 22):
                asked[t + (t == 22 and queries == "last")] = value
            known[key] = value
        assert asked[len(row) - 1] == tokens[-1]
        assert {t: answers[t] for t in asked_in(answers)} == asked


def test_the_share_of_noise_and_what_is_asked_last():
    inputs, targets = made("noisy_in_context_recall", n=4000, noise=0.2, length=20)
    noisy = (inputs[:, :-1:2] >= 16).mean()
    # nine pairs, one of ten, which the last may be, is never noise
    assert abs(noisy - 0.2 * (1 - 1 / 10)) < 4 * math.sqrt(0.16 / 36_000)
    assert stats.chisquare(np.bincount(inputs[:, -1], minlength=8)).pvalue > 1e-4
    shown = [[key for key in row[:-1:2] if key < 16] for row in inputs.tolist()]
    earliest = np.mean([row[0] == last for row, last in zip(shown, inputs[:, -1], strict=True)])
    assert abs(earliest - np.mean([1 / len(set(row)) for row in shown])) < 0.03  # all keys shown are alike likely
    assert stats.chisquare(np.bincount(targets[:, -1], minlength=16)[8:]).pvalue > 1e-4


def parse(tokens, keys):
    """Alternating runs of key and value tokens."""
    pairs, key, value = [], [], []
    for token in tokens:
        if token < keys and value:
            pairs.append((tuple(key), tuple(value)))
            key, value = [], []
        (key if token < keys else value).append(token)
    return [*pairs, (tuple(key), tuple(value))]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("queries", ["all", "last"])
@pytest.mark.parametrize(("K", "M", "length"), [(3, 3, 40), (2, 1, 13), (1, 4, 30)])
def test_fuzzy_recall_has_motifs_and_asks_for_those_that_stood_before(split, queries, K, M, length):
    sizes = {"key_tokens": K, "value_tokens": M, "length": length, "queries": queries}
    inputs, targets = made("fuzzy_in_context_recall", split, 60, **sizes)
    special = 1 + (queries == "last")
    keys, padding = (16 - special) // 2, 16 - special
    assert inputs.shape == (60, length)
    for row, answers in zip(inputs.tolist(), targets, strict=True):
        whole = [*row, answers[-1]]
        first = next(t for t, token in enumerate(whole) if token != padding)
        body = whole[first:]
        assert first >= 1 and padding not in body
        if queries == "last":
            sign = body.index(15)
            listed = [*parse(body[:sign], keys), *parse(body[sign + 1 :], keys)]
        else:
            listed = parse(body, keys)
        assert all(len(set(k)) == len(k) and len(set(v)) == len(v) for k, v in listed)
        assert all(len(k) == K or (split == "train" and len(k) < K) for k, _ in listed)
        assert all(1 <= len(v) <= M for _, v in listed)
        assert listed[-1] in listed[:-1], "the last pair has stood before"
        at, known, asked = first, {}, {}
        for i, (key, value) in enumerate(listed):
            at += len(key) + (queries == "last" and i == len(listed) - 1)
            assert known.get(key, value) == value, "a key has one value"
            if key in known and (queries == "all" or i == len(listed) - 1):
                asked |= {at + j - 1: token for j, token in enumerate(value)}
            known[key] = value
            at += len(value)
        assert {t: answers[t] for t in asked_in(answers)} == asked


def test_the_published_rule_may_ask_for_a_pair_that_never_stood():
    never = {}
    for rule in ("paper", "code"):
        inputs, targets = made("fuzzy_in_context_recall", "test", 2000, rule=rule, length=24, queries="last")
        never[rule] = 0
        for row, answers in zip(inputs.tolist(), targets, strict=True):
            sign = row.index(15)
            (last,) = parse([*row[sign + 1 :], answers[-1]], 7)
            never[rule] += last not in parse([token for token in row[:sign] if token != 14], 7)
    assert never["paper"] == 0 and 0.15 < never["code"] / 2000 < 0.26  # of the published generator: 0.2


def test_arrangements_are_distinct_and_alike_likely():
    found = mad.arrangements(rng.uniforms(rng.keys(0, "a", rows=np.arange(12_000)), 3), 4)
    codes = found @ [16, 4, 1]
    assert all(len(set(row)) == 3 for row in found[:200].tolist())
    assert len(np.unique(codes)) == 24 and stats.chisquare(np.unique(codes, return_counts=True)[1]).pvalue > 1e-4


@pytest.mark.parametrize("name", mad.RECALL)
def test_training_rows_may_ask_for_every_next_token(name):
    every, some = (made(name, trained_on=kind) for kind in ("all", "answers"))
    assert np.array_equal(every[0], some[0]) and np.array_equal(every[1][:, :-1], every[0][:, 1:])
    assert np.array_equal(every[1][some[1] != IGNORED], some[1][some[1] != IGNORED])
    held = [made(name, "val", trained_on=kind)[1] for kind in ("all", "answers")]
    assert np.array_equal(*held)


# ------------------------------------------------------------------------------- memory, copying, compression


def test_memorization_has_one_value_for_each_key_in_all_splits():
    known = {}
    for split in ("train", "val", "test"):
        inputs, targets = made("memorization", split, 200)
        assert (inputs[:, 1::2] == 255).all() and (targets[:, ::2] == IGNORED).all()
        assert inputs[:, ::2].max() < 127 <= targets[:, 1::2].min()
        for key, value in zip(inputs[:, ::2].reshape(-1), targets[:, 1::2].reshape(-1), strict=True):
            assert known.setdefault(key, value) == value
    assert len(known) == 127 and len(set(known.values())) == 127 and max(known.values()) < 255
    other = made("memorization", fixed_seed=1)
    assert np.array_equal(other[0], made("memorization")[0]) and not np.array_equal(other[1], made("memorization")[1])


def test_mads_copying_scatters_blanks_before_its_tokens():
    inputs, targets = made("selective_copying", n=3000, length=20, copied=4)
    counts = np.zeros(4, np.int64)
    for row, answers in zip(inputs, targets, strict=True):
        assert row[15] == 15 and (row[16:] == 14).all() and asked_in(answers).tolist() == [16, 17, 18, 19]
        places = np.flatnonzero(row[:15] != 14)
        assert np.array_equal(row[places], answers[16:]) and places[-1] == 14 and row[places].max() < 14
        counts += np.diff(places, prepend=-1) - 1
    assert stats.chisquare(counts).pvalue > 1e-4  # each of 11 blanks before one of four tokens


@pytest.mark.parametrize("places", ["random", "start"])
def test_selective_copying_repeats_its_tokens_in_order(places):
    inputs, targets = made("Mamba's copying", n=3000, places=places)
    counts = np.zeros(16, np.int64)
    for row, answers in zip(inputs, targets, strict=True):
        at = np.flatnonzero(row[:16])
        assert (row[16:] == 15).all() and asked_in(answers).tolist() == [16, 17, 18, 19]
        assert np.array_equal(row[at], answers[16:]) and 1 <= row[at].min() and row[at].max() < 15
        assert places == "random" or at.tolist() == [0, 1, 2, 3]
        counts[at] += 1
    assert places == "start" or stats.chisquare(counts).pvalue > 1e-4
    assert stats.chisquare(np.bincount(targets[targets != IGNORED], minlength=15)[1:]).pvalue > 1e-4


def test_compression_asks_for_every_token():
    inputs, targets = made("compression", n=2000)
    assert np.array_equal(inputs, targets) and (inputs[:, -1] == 15).all()
    assert stats.chisquare(np.bincount(inputs[:, :-1].reshape(-1), minlength=16)[:15]).pvalue > 1e-4


# --------------------------------------------------------------------------------------------- induction heads


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12))
def test_what_stood_behind_the_trigger_is_asked_for(copied, triggers, spare):
    length = 2 * copied + 2 + spare
    inputs, targets = made("induction_heads", n=30, length=length, copied=copied, triggers=triggers)
    for row, answers in zip(inputs, targets, strict=True):
        at = np.flatnonzero(row == 15)
        assert at[-1] == length - copied and 2 <= len(at) <= triggers + 1
        assert asked_in(answers).tolist() == list(range(length - copied, length))
        for place in at[:-1]:
            assert np.array_equal(row[place + 1 : place + 1 + copied], answers[length - copied :])
        assert all(b - a > copied for a, b in pairwise(at[:-1])) and at[-2] + copied < at[-1]
        assert np.array_equal(row[at[-1] + 1 :], answers[length - copied : -1])
        assert 14 not in row


def test_half_of_the_rows_have_one_trigger_at_a_uniform_place():
    inputs, targets = made("induction_heads", n=4000, length=21, copied=1, triggers=1)
    places = (inputs == 15).argmax(axis=1)
    assert stats.chisquare(np.bincount(places)).pvalue > 1e-4 and places.max() == 17
    assert stats.chisquare(np.bincount(targets[:, -1], minlength=14)).pvalue > 1e-4
    inputs, _ = made("induction_heads", n=4000, length=200, copied=1, triggers=2)
    one = ((inputs == 15).sum(axis=1) == 2).mean()
    assert abs(one - (0.5 + 0.5 * 3 / 197)) < 0.04  # two that overlap are one


# --------------------------------------------------------------------------------------------- rows and epochs


@pytest.mark.parametrize("name", SMALL)
def test_a_row_follows_from_its_address_alone(name, tmp_path, monkeypatch):
    module, own = SMALL[name]
    config = module.Config(**own, train_size=12, eval_size=5)
    data = module.load(config, tmp_path)
    data.check()
    assert [len(split) for split in data.splits.values()] == [12, 5, 5]
    for epoch in (0, 3):
        whole, some = module.resample(config, np.arange(12), epoch), module.resample(config, np.array([7, 2]), epoch)
        assert np.array_equal(some.row(0), whole.row(7)) and np.array_equal(some.row(1), whole.row(2))
        T = len(whole.row(0))
        assert np.array_equal(some.targets[T:], whole.targets[2 * T : 3 * T])
        assert np.array_equal(whole.values, data.train.values) == (epoch == 0)
    monkeypatch.setattr(rows, "CHUNK", 1)
    again = module.load(config, tmp_path)
    for split, other in zip(data.splits.values(), again.splits.values(), strict=True):
        assert np.array_equal(split.values, other.values) and np.array_equal(split.targets, other.targets)
    parts = [*data.splits.values(), module.resample(config, np.arange(12), 1)]
    parts.append(module.load(config.model_copy(update={"seed": 1}), tmp_path).train)
    inputs = [part.row(i).tobytes() for part in parts for i in range(len(part))]
    assert len(set(inputs)) == len(inputs)
    with pytest.raises(ValueError, match="an epoch has 12"):
        module.resample(config, np.array([12]), 0)


@pytest.mark.parametrize(
    ("name", "vocab", "length", "train", "steps"),
    [
        ("in_context_recall", 16, 128, 12_800, 127),
        ("noisy_in_context_recall", 32, 128, 12_800, 127),
        ("fuzzy_in_context_recall", 16, 128, 12_800, 128),
        ("memorization", 256, 32, 256, 32),
        ("selective_copying", 16, 256, 12_800, 256),
        ("compression", 16, 32, 12_800, 32),
    ],
)
def test_published_sizes_of_mad(name, vocab, length, train, steps):
    config = mad.Config(task=name)
    assert config.sizes[:3] == (vocab, length, train) and config.steps == steps and config.eval_size == 1280
    for hard in (*((vocab, size) for size in (64, 256, 1024)), (512 if name == "memorization" else 128, length)):
        inputs, targets = mad.make(
            config.model_copy(update={"vocab": hard[0], "length": hard[1]}), "test", np.arange(2)
        )
        assert inputs.shape == targets.shape and inputs.shape[1] == hard[1] - (length - steps)
        assert inputs.max() < hard[0] and (targets != IGNORED).any(axis=1).all()


def test_a_model_that_looks_ahead_would_see_only_answers_that_follow(tmp_path):
    """Those of MAD's recalls do, those of MQAR, of both copyings, of memorization and of one copied token do not."""
    for name, (module, own) in SMALL.items():
        data = module.load(module.Config(**own, max_rows=2), tmp_path)
        targets, inputs = data.test.targets.reshape(2, -1), data.test.values.reshape(2, -1)
        seen = (targets[:, :-1] == inputs[:, 1:])[targets[:, :-1] != IGNORED]
        assert data.future == (name in mad.RECALL or name == "induction_heads"), name
        assert not data.future or seen.all()
    assert not induction_heads.load(induction_heads.Config(max_rows=2), tmp_path).future


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (mqar, {"length": 63}, "length is 63; it is even"),
        (mqar, {"length": 14}, "4 pairs, 1 times, and their queries take 16 steps"),
        (mqar, {"length": 16, "passes": 2}, "24 steps, more than length 16"),
        (mqar, {"vocab": 8}, "vocab 8 has 3 keys, fewer than pairs 4"),
        (mqar, {"power": 0.0}, "greater than 0"),
        (induction_heads, {"length": 5, "copied": 2}, "at least 6 steps"),
        (selective_copying, {"length": 31}, "at least 32 steps"),
        (mad, {"task": "compression", "copied": 4}, "copied: 4 is for selective_copying; the task is compression"),
        (mad, {"task": "memorization", "queries": "last"}, "queries: last is for in_context_recall"),
        (mad, {"noise": 0.5}, "noise: 0.5 is for noisy_in_context_recall"),
        (mad, {"length": 33}, "length is 33; it is even"),
        (mad, {"task": "noisy_in_context_recall", "vocab": 18}, "leaves 2 tokens beside special ones and noise"),
        (mad, {"task": "fuzzy_in_context_recall", "vocab": 6}, "needs 6 or more"),
        (mad, {"task": "fuzzy_in_context_recall", "length": 12}, "it takes at least 13"),
        (mad, {"task": "selective_copying", "length": 33}, "it takes at least 34"),
        (mad, {"task": "copying"}, "task"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_a_sentence(module, options, words):
    with pytest.raises(ValidationError, match=words):
        module.Config(**options)


# ----------------------------------------------------------------------------------------------------- choices


def test_choices_are_uniform():
    key = rng.keys(0, "choices", rows=np.arange(6000))
    orders = shuffled(key, np.broadcast_to(np.arange(3), (6000, 3))) @ [9, 3, 1]
    assert stats.chisquare(np.unique(orders, return_counts=True)[1]).pvalue > 1e-4
    sets = subsets(rng.keys(0, "sets", rows=np.arange(6000)), 2, 4) @ [4, 1]
    assert len(np.unique(sets)) == 6 and stats.chisquare(np.unique(sets, return_counts=True)[1]).pvalue > 1e-4


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_the_first_of_each_value(values):
    found = first_of_each(np.array([values]))[0]
    assert found.tolist() == [value not in values[:i] for i, value in enumerate(values)]


def test_exponentials_are_those_of_uniforms():
    key = rng.keys(0, "clocks", rows=np.arange(20))
    assert np.allclose(rng.exponentials(key, 500), -np.log1p(-rng.uniforms(key, 500)), rtol=1e-8, atol=1e-9)
