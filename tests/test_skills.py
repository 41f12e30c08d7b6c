"""The atomic skills against their formulas, written here once more as plain loops, and the laws of their chance."""

import hashlib
import math
from typing import get_args

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats
from scipy.special import ndtri

from spt import rng
from spt.tasks import rows, skills
from spt.tasks.base import Reals, Values
from spt.tasks.rows import subsets
from spt.tasks.skills import Config, Skill, load, make, resample

SKILLS = get_args(Skill)
SMALL = {"length": 24, "train_size": 12, "eval_size": 5}
SPECIAL = {"shift": {"shifts": 4}, "select": {"chosen": 6}, "select_fixed": {"chosen": 6}}


def config(skill, **options):
    return Config(skill=skill, **{**SMALL, **SPECIAL.get(skill, {}), **options})


def rows_of(split):
    """(inputs (T, C), answers (L', K)) of every row, whose targets are missing exactly before the answers."""
    for start, stop in zip(split.starts, split.stops, strict=True):
        inputs, targets = split.values[start:stop], split.targets[start:stop]
        asked = np.isfinite(targets).all(axis=1)
        first = int(np.argmax(asked))
        assert asked[first:].all() and np.isnan(targets[:first]).all()
        yield inputs.astype(np.float64), targets[first:].astype(np.float64)


# ---------------------------------------------------------------------------------------------------- formulas


def shift(inputs, options):
    x, C = inputs[:, 0], options.shifts
    return [[x[i - j * len(x) // C] if i >= j * len(x) // C else 0.0 for j in range(C)] for i in range(len(x))]


def cumsum(inputs, options):
    found, total = [], 0.0
    for i, value in enumerate(inputs[:, 0]):
        total += value
        found.append([total / math.sqrt(i + 1)])
    return found


def cummax(inputs, options):
    return [[max(inputs[: i + 1, 0])] for i in range(len(inputs))]


def reverse(inputs, options):
    L = len(inputs) // 2
    assert not inputs[L:].any()
    return [[inputs[L - 1 - i, 0]] for i in range(L)]


def sort(inputs, options):
    x = inputs[: len(inputs) // 2, 0].tolist()
    assert not inputs[len(x) :].any()
    return [[x[i]] for i in sorted(range(len(x)), key=lambda i: (abs(x[i] - x[0]), i))]


def select(inputs, options):
    x, marks = inputs.T
    assert len(x) == options.length + 2 * options.chosen and set(marks) == {0.0, 1.0}
    assert not inputs[-options.chosen :].any() and marks.sum() == options.chosen
    return [[value] for value, mark in zip(x, marks, strict=True) if mark]


def mips(inputs, options):
    found = []
    for i in range(len(inputs)):
        best = max(range(i + 1), key=lambda j: (sum(inputs[i, d] * inputs[j, 4 + d] for d in range(4)), -j))
        found.append(inputs[best, 8:])
    return found


def context_shift(inputs, options):
    row = inputs[:, 0]
    s = round(math.atan2(row[1], row[0]) / (2 * math.pi) * len(row)) % len(row)
    return [[row[i - s] if i >= s else 0.0] for i in range(len(row))]


def solve(inputs, options):
    N = next(n for n in range(100, 0, -1) if n * n + n * (1 if options.rule == "paper" else 2) <= options.length)
    table = inputs[: N * (N + 1), 0].reshape(N, N + 1)
    assert not inputs[N * (N + 1) :].any()
    assert np.allclose(table[:, :N] @ table[:, :N].T, np.eye(N), atol=1e-5)
    return np.linalg.solve(table[:, :N], table[:, N])[:, None]


FORMULAS = {**globals(), "select_fixed": select, "solve_fixed": solve}


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("rule", ["paper", "code"])
def test_answers_are_the_formulas_of_the_stored_inputs(skill, rule, tmp_path):
    options = config(skill, rule=rule) if skill in ("context_shift", "solve", "solve_fixed") else config(skill)
    data = load(options, tmp_path)
    data.check()
    for split in data.splits.values():
        for inputs, answers in rows_of(split):
            expected = np.array(FORMULAS[skill](inputs, options))
            assert answers.shape == expected.shape
            assert np.allclose(answers, expected, atol=2e-6 if skill.startswith("solve") else 1e-7)


@pytest.mark.parametrize("L", [512, 4096])
def test_shapes_as_published(L, tmp_path):
    shapes = {skill: Config(skill=skill, length=L).shape for skill in SKILLS}  # T, channels, L', K
    assert shapes["shift"] == (L, 1, L, 8)
    assert shapes["reverse"] == shapes["sort"] == (2 * L, 1, L, 1)
    assert shapes["select"] == shapes["select_fixed"] == (L + 64, 2, 32, 1)
    assert shapes["mips"] == (L, 12, L, 4)
    assert shapes["cumsum"] == shapes["cummax"] == shapes["context_shift"] == (L, 1, L, 1)
    assert shapes["solve"] == shapes["solve_fixed"] == (L, 1, {512: 22, 4096: 63}[L], 1)
    assert Config(skill="solve", length=L, rule="code").shape.asked == {512: 21, 4096: 63}[L]
    for skill in SKILLS:
        steps, channels, asked, size = shapes[skill]
        inputs, targets = make(Config(skill=skill, length=L), "train", np.arange(2))
        assert inputs.shape == (2, steps, channels) and targets.shape == (2, steps, size)
        assert inputs.dtype == targets.dtype == np.float32 and np.isfinite(inputs).all()
        assert (np.isfinite(targets).sum(axis=1) == asked).all()


def test_unknowns_are_as_many_as_fit():
    for L in range(4, 700):
        for rule, more in (("paper", 1), ("code", 2)):
            n = Config(skill="solve", length=L, rule=rule).unknowns
            assert n * n + more * n <= L < (n + 1) ** 2 + more * (n + 1)


def test_shifts_that_do_not_divide_the_length():
    inputs, targets = make(config("shift", length=25, shifts=7), "train", np.arange(3))
    assert [int(np.flatnonzero(targets[0, :, j])[0]) for j in range(7)] == [0, 3, 7, 10, 14, 17, 21]
    assert np.array_equal(targets[:, 21:, 6], inputs[:, :4, 0])


@pytest.mark.parametrize("skill", sorted(set(SKILLS) - {"mips", "context_shift", "solve", "solve_fixed"}))
def test_inputs_are_normals_over_their_largest(skill):
    options = Config(skill=skill, length=4096)
    inputs, _ = make(options, "train", np.arange(40))
    values = inputs[:, : 4096 + (32 if "select" in skill else 0), 0].astype(np.float64)
    assert (np.abs(values).max(axis=1) == 1).all()
    for row in values[:3]:
        assert stats.kstest(row / row.std(), "norm").pvalue > 1e-4
    # the largest of n standard normals in absolute value, so that one over it is their deviation
    expected = -ndtri(0.5 * (1 - 0.5 ** (1 / values.shape[1])))
    assert abs(np.median(1 / values.std(axis=1)) / expected - 1) < 0.05


def test_mips_vectors_have_norm_1_and_any_direction():
    inputs, targets = make(Config(skill="mips", length=2048), "train", np.arange(4))
    vectors = inputs.reshape(-1, 4).astype(np.float64)
    assert np.allclose((vectors**2).sum(axis=1), 1, atol=1e-6)
    assert np.abs(vectors.mean(axis=0)).max() < 0.01 and np.allclose(
        vectors.T @ vectors / len(vectors), np.eye(4) / 4, atol=0.01
    )
    assert np.array_equal(targets[:, 0], inputs[:, 0, 8:])  # the first query has one key


# ------------------------------------------------------------------------------------------------ nearest keys


def brute(q, k):
    found = np.zeros(q.shape[:2], np.int64)
    for b, i in np.ndindex(*found.shape):
        products = [sum(float(x) * float(y) for x, y in zip(q[b, i], k[b, j], strict=True)) for j in range(i + 1)]
        found[b, i] = products.index(max(products))
    return found


def unit(rng, *shape):
    vectors = rng.standard_normal(shape).astype(np.float32)
    return vectors / np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("ties", [False, True])
def test_all_ways_to_the_nearest_key_agree(width, ties, monkeypatch):
    rng = np.random.default_rng(width)
    q, k = unit(rng, 2, 90, width), unit(rng, 2, 90, width)
    if ties:  # few keys, many times; queries that are keys
        k = k[:, rng.integers(0, 12, 90)]
        q = k[:, rng.permutation(90)]
    expected = brute(q, k)
    plain = np.zeros_like(expected)
    for cells in (2, 3, 5):
        skills.search(q.astype(np.float64), k.astype(np.float64), cells, plain)  # as it stands, not compiled
        assert np.array_equal(plain, expected)
    assert np.array_equal(skills.nearest(q, k), expected)
    monkeypatch.setattr(skills, "is_compiled", lambda: False)
    assert np.array_equal(skills.nearest(q, k), expected)


def test_the_search_agrees_with_all_products_at_length(monkeypatch):
    options = Config(skill="mips", length=3000)
    one = make(options, "train", np.arange(2))
    monkeypatch.setattr(skills, "is_compiled", lambda: False)
    two = make(options, "train", np.arange(2))
    assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])


def test_sorting_keeps_the_order_of_ties(monkeypatch):
    x = np.array([[0.5, 1.0, 0.0, 0.75, 0.25, 1.0, -1.0, 0.5]] * 2, np.float32)
    x[1] = [0.5, 0.0, 1.0, 0.25, 0.75, 0.5, -1.0, 1.0]
    monkeypatch.setattr(skills, "_normalised", lambda key, length: x)
    _, targets = make(Config(skill="sort", length=8), "train", np.arange(2))
    assert targets[0, 8:, 0].tolist() == [0.5, 0.5, 0.75, 0.25, 1.0, 0.0, 1.0, -1.0]
    assert targets[1, 8:, 0].tolist() == [0.5, 0.5, 0.25, 0.75, 0.0, 1.0, 1.0, -1.0]


# --------------------------------------------------------------------------------------------------------- laws


def test_selected_positions_are_uniform_and_fixed_ones_fixed():
    options = Config(skill="select", length=40, chosen=8)
    inputs, _ = make(options, "train", np.arange(20_000))
    counts = inputs[..., 1].sum(axis=0)
    assert not counts[48:].any()
    assert stats.chisquare(counts[:48]).pvalue > 1e-4
    pairs = inputs[:, :48, 1].T @ inputs[:, :48, 1]  # any two positions together equally often
    pairs = pairs[np.triu_indices(48, 1)]
    assert abs(pairs.mean() / (20_000 * 8 * 7 / 48 / 47) - 1) < 1e-6 and pairs.std() < 1.3 * math.sqrt(pairs.mean())

    fixed = Config(skill="select_fixed", length=40, chosen=8)
    marks = np.concatenate([make(fixed, split, np.arange(9))[0][..., 1] for split in ("train", "val", "test")])
    assert (marks == marks[0]).all() and marks[0].sum() == 8
    other_rows = make(fixed.model_copy(update={"seed": 1}), "train", np.arange(9))[0]
    assert np.array_equal(other_rows[..., 1], marks[:9])
    assert not np.array_equal(
        make(fixed.model_copy(update={"fixed_seed": 1}), "train", np.arange(1))[0][0, :, 1], marks[0]
    )


def test_all_positions_can_be_selected():
    found = subsets(rng.keys(0, "all", rows=np.arange(50)), 7, 7)
    assert (found == np.arange(7)).all()


@pytest.mark.parametrize(("rule", "shifts"), [("paper", 11), ("code", 10)])  # 0 … L-2, 0 … L-3
def test_context_shifts_are_uniform(rule, shifts):
    inputs, targets = make(Config(skill="context_shift", length=12, rule=rule), "train", np.arange(22_000))
    s = (targets[..., 0] != 0).argmax(axis=1)  # the first entry, a cosine, is not 0 for any s but 3 and 9
    cosine, sine = inputs[:, 0, 0], inputs[:, 1, 0]
    said = np.round(np.arctan2(sine, cosine) / (2 * np.pi) * 12).astype(int) % 12
    assert ((s == said) | np.isin(said, (3, 9))).all()
    counts = np.bincount(said, minlength=12)
    assert not counts[shifts:].any() and stats.chisquare(counts[:shifts]).pvalue > 1e-4
    assert np.allclose(np.abs(inputs[:, 2:, 0]).max(axis=1), 1)


def test_matrices_are_haar():
    A = skills.orthonormal(rng.keys(3, "haar", rows=np.arange(4000)), 6)
    assert np.allclose(A @ A.transpose(0, 2, 1), np.eye(6), atol=1e-12)
    assert np.abs(A.mean(axis=0)).max() < 0.03  # 4 deviations of 1/sqrt(6 * 4000); Q without signs fails by far
    trace = np.trace(A, axis1=1, axis2=2)
    assert abs(trace.mean()) < 0.07 and abs((trace**2).mean() - 1) < 0.1 and abs((trace**4).mean() - 3) < 0.5
    assert abs((np.linalg.det(A) > 0).mean() - 0.5) < 0.04
    angle = stats.kstest(A[:, 2, 3] ** 2, stats.beta(0.5, 2.5).cdf)  # a coordinate of a uniform unit vector
    assert angle.pvalue > 1e-4


def test_unknowns_have_norm_1_and_only_they_vary_in_solve_fixed():
    for skill in ("solve", "solve_fixed"):
        inputs, targets = make(Config(skill=skill, length=30), "train", np.arange(2000))  # N = 5
        X = targets[:, -5:, 0]
        assert np.allclose((X**2).sum(axis=1), 1, atol=1e-6) and np.abs(X.mean(axis=0)).max() < 0.05
        A = inputs[:, :, 0].reshape(-1, 5, 6)[:, :, :5]
        assert (A == A[0]).all() == (skill == "solve_fixed")
    held = make(Config(skill="solve_fixed", length=30, seed=7), "test", np.arange(2))[0]
    assert np.array_equal(held[0, :, 0].reshape(5, 6)[:, :5], A[0])


@pytest.mark.parametrize("skill", SKILLS)
def test_one_answer_for_all_explains_nothing(skill):
    options = Config(skill=skill, length=128, **({"chosen": 16} if "select" in skill else {}))
    known, asked = (make(options, split, np.arange(300))[1].astype(np.float64) for split in ("train", "test"))
    variance = np.nanvar(asked)
    assert variance > 1e-3  # R² divides by 1e-5 at least
    assert abs(1 - np.nanmean((asked - np.nanmean(known)) ** 2) / variance) < 0.01


# --------------------------------------------------------------------------------------------- rows and epochs


@pytest.mark.parametrize("skill", SKILLS)
def test_a_row_follows_from_its_address_alone(skill, tmp_path):
    options = config(skill)
    data = load(options, tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "val": 5, "test": 5}
    assert data.input == Values(options.shape.channels) and data.target == Reals(options.shape.size, per_step=True)
    again = resample(options, data.train.ids, 0)
    assert np.array_equal(again.values, data.train.values)
    assert np.array_equal(again.targets, data.train.targets, equal_nan=True)
    assert np.array_equal(again.ids, data.train.ids)

    rows = np.array([7, 2, 11])
    for epoch in (0, 3):
        whole = resample(options, np.arange(12), epoch)
        some = resample(options, rows, epoch)
        for place, row in enumerate(rows.tolist()):
            alone = resample(options, np.array([row]), epoch)
            for one, at in ((some, place), (alone, 0)):
                assert np.array_equal(one.row(at), whole.row(row))
                T = options.shape.steps
                there = one.targets[at * T : (at + 1) * T]
                assert np.array_equal(there, whole.targets[row * T : (row + 1) * T], equal_nan=True)

    short = load(options.model_copy(update={"max_rows": 4}), tmp_path)
    for name, split in short.splits.items():
        assert len(split) == 4
        assert np.array_equal(split.values, data.splits[name].values[: len(split.values)])
        assert np.array_equal(split.ids, data.splits[name].ids[:4])


@pytest.mark.parametrize("skill", SKILLS)
def test_epochs_splits_and_seeds_differ(skill, tmp_path):
    options = config(skill)
    data = load(options, tmp_path)
    other = options.model_copy(update={"seed": 1})
    parts = [*data.splits.values(), *(resample(options, data.train.ids, epoch) for epoch in (1, 2))]
    parts.append(resample(other, data.train.ids, 0))
    inputs = [part.row(i).tobytes() for part in parts for i in range(len(part))]
    answers = [answer.tobytes() for part in parts for _, answer in rows_of(part)]
    assert len(set(inputs)) == len(inputs)
    assert len(set(answers)) == len(answers) or skill == "context_shift"  # shifted out but for the leading pair
    ids = [set(split.ids.tolist()) for split in data.splits.values()]
    assert len(set.union(*ids)) == sum(map(len, ids)) == 22


def test_many_workers_and_chunks_make_the_same_rows(tmp_path, monkeypatch):
    options = config("sort", train_size=100)
    monkeypatch.setenv("SPT_WORKERS", "1")
    one = load(options, tmp_path)
    monkeypatch.setenv("SPT_WORKERS", "3")
    monkeypatch.setattr(rows, "CHUNK", 1000)
    two = load(options, tmp_path)
    assert np.array_equal(one.train.values, two.train.values)


@pytest.mark.parametrize(
    ("ids", "epoch", "words"),
    [([12], 0, "an epoch has 12"), ([-1], 0, "an epoch has 12"), ([], 0, "list"), ([1], -1, "epoch is -1")],
)
def test_rows_that_are_not_there(ids, epoch, words):
    with pytest.raises(ValueError, match=words):
        resample(config("shift"), np.array(ids, np.int64), epoch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skill": "sort", "shifts": 4}, "shifts: 4 is for shift"),
        ({"skill": "shift", "chosen": 4}, "select and select_fixed"),
        ({"skill": "select", "fixed_seed": 4}, "fixed_seed"),
        ({"skill": "cumsum", "rule": "code"}, "rule"),
        ({"skill": "cumsum", "width": 2}, "mips"),
        ({"skill": "shift", "length": 6}, "8 shifts of a row of 6"),
        ({"skill": "copy"}, "skill"),
        ({"length": 3}, "greater than or equal to 4"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ValidationError, match=words):
        Config(**options)


def test_more_than_the_disk_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows take .* GB, for which .* has no room"):
        load(Config(length=2**20, train_size=2**32), tmp_path)


# ------------------------------------------------------------------------------------------------------- chance


def test_quantiles_are_those_of_the_normal_distribution():
    draw = np.random.default_rng(0).integers
    ends = np.array([0, 1, 2, 2**31 - 2, 2**31 - 1], np.uint32)
    lower = np.concatenate([ends, (draw(0, 2**31, 200_000) >> draw(0, 30, 200_000)).astype(np.uint32)])
    found = rng.quantiles(lower)
    assert np.allclose(found, ndtri((lower + 0.5) / 2**32), rtol=5e-7, atol=0)
    assert np.allclose(rng.quantiles(~lower), -found, rtol=5e-7, atol=0)


def test_normals_are_normal_and_of_their_own_row():
    key = rng.keys(0, "test", rows=np.arange(300))
    numbers = rng.normals(key, 2000)
    assert stats.kstest(numbers.reshape(-1)[:200_000].astype(np.float64), "norm").pvalue > 1e-4
    joint = np.corrcoef(numbers)  # rows
    assert np.abs(joint - np.eye(300)).max() < 6 / math.sqrt(2000)
    lags = [float((numbers[:, lag:] * numbers[:, : 2000 - lag]).mean()) for lag in range(1, 40)]
    assert np.abs(lags).max() < 5 / math.sqrt(600_000)
    assert abs((numbers.astype(np.float64) ** 4).mean() - 3) < 0.06


@pytest.mark.parametrize("draw", [rng.normals, rng.uniforms, lambda key, length: rng.below(key, length, 97)])
def test_numbers_depend_on_nothing_but_key_and_place(draw, monkeypatch):
    key = rng.keys(5, "place", rows=np.array([0, 1, 2**40, 17]))
    whole = draw(key, 40_001)  # more than a block
    for length in (1, 2, 7, 1000, 32_769):
        assert np.array_equal(draw(key[2:], length), whole[2:, :length])
    monkeypatch.setattr(rng, "BLOCK", 64)
    assert np.array_equal(draw(key, 999), whole[:, :999])
    assert not np.array_equal(whole[0], whole[1])
    assert draw(key, 0).shape == (4, 0) and draw(key[:0], 5).shape == (0, 5)


def test_purposes_have_streams_of_their_own():
    rows = np.arange(100)
    streams = [rng.keys(*address, rows=rows) for address in ((0, "a"), (0, "b"), (1, "a"), (0, "a", 1))]
    assert len(np.unique(np.concatenate(streams))) == 400


def test_uniforms_and_whole_numbers_are_uniform():
    key = rng.keys(1, "uniform", rows=np.arange(100))
    numbers = rng.uniforms(key, 1001)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert stats.kstest(numbers.reshape(-1), "uniform").pvalue > 1e-4
    assert stats.chisquare(np.bincount(rng.below(key, 1001, 13).reshape(-1), minlength=13)).pvalue > 1e-4


def test_the_same_bits_on_every_machine():
    """Rows in a cache, and results, are named by these bits: only IEEE 754 arithmetic may stand behind them."""
    key = rng.keys(0, "bits", rows=np.arange(64))
    found = rng.normals(key, 4096)
    assert hashlib.sha256(found.astype("<f4").tobytes()).hexdigest()[:16] == BITS
    assert hashlib.sha256(rng.uniforms(key, 100).astype("<f8").tobytes()).hexdigest()[:16] == UNIFORM_BITS


BITS, UNIFORM_BITS = "9a4237a83debdb59", "9d9b6f74c8ba0190"
