"""What objectives show and score."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spt.batch import NOBODY, collate, pieces, share, training_rows
from spt.errors import DataError, UsageError
from spt.losses import metrics, per_answer, sums, weighted_sum
from spt.objectives import Masked, Output, Supervised, Targets
from spt.seeding import Draw, generator, order
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens, Values


def tokens(n=64, vocab=9, longest=40):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, vocab, rng.integers(3, longest)).astype(np.uint8) for _ in range(n)]
    split = Split.from_rows(rows, rng.integers(0, 2, n))
    return TaskData(Tokens(vocab), Classes(2), split, split, split)


def values(levels=None):
    rng = np.random.default_rng(0)
    kind = np.uint8 if levels else np.float32
    rows = [rng.integers(0, 200, (length, 2)).astype(kind) for length in (5, 9, 7)]
    split = Split.from_rows(rows, rng.normal(size=(3, 1)))
    return TaskData(Values(2, (100.0, 90.0), (50.0, 60.0), levels=levels), Reals(1), split, split, split)


def batch_of(data, rows=None):
    rows = np.arange(len(data.train)) if rows is None else np.asarray(rows)
    return collate(data.train, rows, data.input, data.target)


def test_draws_are_uniform_and_independent_of_batching():
    draw = Draw(3, "corruption", 5)
    index = np.arange(2000)
    u = draw.uniform(index, 514)
    assert 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 3e-4 * 3 and abs(u.var() - 1 / 12) < 3e-4
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.08  # neighbours
    assert abs(np.corrcoef(u[0], u[1])[0, 1]) < 0.16
    some = np.array([1999, 3, 700])
    assert np.array_equal(draw.uniform(some, 514), u[some])  # whatever stands beside it
    assert np.array_equal(draw.uniform(some, 100), u[some, :100])  # a shorter row is a prefix
    for other in (Draw(4, "corruption", 5), Draw(3, "corruption", 6), Draw(3, "evaluation", 5)):
        assert abs(np.corrcoef(other.uniform(index, 514).ravel(), u.ravel())[0, 1]) < 0.005


def test_masking_ratio_and_placement():
    data = tokens(n=400)
    batch = batch_of(data)
    inputs, targets = Masked(ratio=0.3).pose(batch, Draw(0, "corruption", 0))
    share_hidden = inputs.hidden.sum() / batch.context.valid.sum()
    assert abs(float(share_hidden) - 0.3) < 0.02
    assert not (inputs.hidden & ~batch.context.valid).any()  # padding is never hidden, nor scored
    assert torch.equal(targets.weight > 0, inputs.hidden)
    assert torch.equal(targets.values[..., 0], batch.x)
    assert (inputs.x[inputs.hidden] == 0).all()
    assert torch.equal(inputs.x[~inputs.hidden], batch.x[~inputs.hidden])


def test_nothing_hidden_reaches_the_inputs():
    """Change every hidden value: what is shown stays the same, bit for bit."""
    for data in (tokens(), values()):
        batch, objective = batch_of(data), Masked(ratio=0.5)
        inputs, _ = objective.pose(batch, Draw(0, "corruption", 0))
        other = batch._replace(x=batch.x + inputs.hidden.reshape(inputs.hidden.shape + (1,) * (batch.x.ndim - 2)) * 3)
        assert not torch.equal(other.x, batch.x)
        shown, _ = objective.pose(other, Draw(0, "corruption", 0))
        assert torch.equal(shown.x, inputs.x) and torch.equal(shown.hidden, inputs.hidden)


def test_masks_follow_the_example_not_the_batch():
    data, draw = tokens(), Draw(1, "corruption", 2)
    whole = Masked(ratio=0.5).pose(batch_of(data), draw)[0].hidden
    some, _ = Masked(ratio=0.5).pose(batch_of(data, [9, 4]), draw)
    width = some.hidden.shape[1]
    assert torch.equal(some.hidden, whole[[9, 4], :width])
    assert not torch.equal(whole, Masked(ratio=0.5).pose(batch_of(data), Draw(1, "corruption", 3))[0].hidden)


def test_continuous_targets_are_normalised_or_levels():
    data = values(levels=256)
    batch = batch_of(data)
    _, l1 = Masked(ratio=0.5).pose(batch, Draw(0, "c", 0))
    assert torch.equal(l1.values, batch.x)
    _, levels = Masked(ratio=0.5, loss="cross_entropy").pose(batch, Draw(0, "c", 0))
    row = torch.from_numpy(np.asarray(data.train.row(1)).astype(np.int64))
    assert torch.equal(levels.values[1], row)
    assert Masked(loss="cross_entropy").output(data) == Output("cross_entropy", True, 2, 256)
    normal = (np.asarray(data.train.row(1)).astype(np.float32) - [100, 90]) / [50, 60]
    assert np.allclose(batch.x[1].numpy(), normal, atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "data"),
    [
        (Masked(loss="l1"), tokens()),
        (Masked(loss="cross_entropy"), values()),
        (Supervised(loss="l2"), tokens()),
        (Supervised(loss="cross_entropy"), values()),
    ],
)
def test_losses_that_do_not_fit_are_refused(objective, data):
    with pytest.raises(UsageError):
        objective.output(data)


def test_nobody_weighs_nothing():
    data = tokens()
    batch = batch_of(data, [3, NOBODY])
    _, targets = Supervised().pose(batch, Draw(0, "c", 0))
    assert targets.weight.tolist() == [1, 0]
    _, targets = Masked(ratio=0.9).pose(batch, Draw(0, "c", 0))
    assert targets.weight[1].sum() == 0 and targets.weight[0].sum() > 0


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 6))
def test_shares_cover_a_batch_once(n, world, size):
    rows = generator(0, "rows").permutation(n)
    parts = [share(rows, rank, world) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    joined = np.concatenate(parts)
    assert np.array_equal(joined[joined != NOBODY], rows)
    assert np.array_equal(np.concatenate(pieces(rows, size)), rows)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 40))
def test_position_in_the_data_follows_from_the_step(n, batch_size, start):
    fresh, later = training_rows(n, batch_size, 0, 0), training_rows(n, batch_size, 0, start)
    for _ in range(start):
        next(fresh)
    for _ in range(5):
        (epoch, rows), (other_epoch, other) = next(fresh), next(later)
        assert epoch == other_epoch and np.array_equal(rows, other)


def test_an_epoch_shows_every_row_once():
    rows = [next_rows for _, next_rows in zip(range(4), training_rows(10, 3, 7, 0), strict=False)]
    assert sorted(np.concatenate([r for _, r in rows]).tolist()) == list(range(10))
    assert not np.array_equal(order(10, 7, 0), order(10, 7, 1))
    assert not np.array_equal(order(10, 7, 0), order(10, 8, 0))


def test_metrics_do_not_depend_on_batches():
    torch.manual_seed(0)
    output = Output("l1", True, 2)
    logits, truth = torch.randn(12, 5, 2), torch.randn(12, 5, 2)
    weight = (torch.rand(12, 5) < 0.5).float()

    def scores(cuts):
        parts = [sums(output, logits[c], Targets(truth[c], weight[c])) for c in cuts]
        return metrics(output, {name: sum(part[name].sum(0) for part in parts) for name in parts[0]})

    whole = scores([slice(0, 12)])
    assert scores([slice(0, 1), slice(1, 8), slice(8, 12)]) == pytest.approx(whole, rel=1e-12)
    kept = weight.bool()
    error = (logits - truth)[kept]
    assert whole["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert whole["mse"] == pytest.approx(float(error.square().mean()), rel=1e-5)
    from sklearn.metrics import r2_score

    assert whole["r2"] == pytest.approx(r2_score(truth[kept].numpy(), logits[kept].numpy()), rel=1e-5)
    assert whole["loss"] == pytest.approx(whole["mae"], rel=1e-6)


@pytest.mark.parametrize("answer", [3.0, 2.0])
def test_r2_of_a_constant_truth_is_that_of_scikit_learn(answer):
    from sklearn.metrics import r2_score

    output, truth = Output("l2", False, 1), torch.tensor([[3.0], [3.0]])
    found = sums(output, torch.full((2, 1), answer), Targets(truth, torch.ones(2)))
    scores = metrics(output, {name: value.sum(0) for name, value in found.items()})
    assert scores["r2"] == r2_score(truth.numpy(), np.full((2, 1), answer))


def test_nothing_scored_is_said():
    output = Output("l2", False, 1)
    found = sums(output, torch.zeros(2, 1), Targets(torch.zeros(2, 1), torch.zeros(2)))
    with pytest.raises(DataError, match="no position"):
        metrics(output, {name: value.sum(0) for name, value in found.items()})


def test_cross_entropy_over_several_quantities():
    """Two quantities of three classes: the mean of two ordinary cross-entropies."""
    output = Output("cross_entropy", True, 2, 3)
    logits, truth = torch.randn(4, 5, 6), torch.randint(0, 3, (4, 5, 2))
    expected = sum(
        torch.nn.functional.cross_entropy(
            logits[..., 3 * s : 3 * s + 3].flatten(0, 1), truth[..., s].flatten(), reduction="none"
        ).view(4, 5)
        for s in range(2)
    )
    torch.testing.assert_close(per_answer(output, logits, truth), expected / 2)
    weight = torch.rand(4, 5)
    torch.testing.assert_close(weighted_sum(output, logits, Targets(truth, weight)), (expected / 2 * weight).sum())
