"""What objectives show and score."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import own_task, run

from spt.config.job import Job
from spt.config.recipe import Train
from spt.data.batching import NOBODY, collate, pieces, share, training_rows
from spt.errors import DataError, UsageError
from spt.rng import Draw, generator, order
from spt.tasks.base import Classes, Labels, Reals, Split, TaskData, Tokens, Values
from spt.training.build import _check_metric
from spt.training.losses import answers, of_scored, per_answer, weighted_sum
from spt.training.metrics import batch_means, metrics, sums
from spt.training.objectives import Masked, Next, Output, Supervised, Targets, evaluation_draw


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


def scores_of(output, logits, targets):
    return metrics(output, {name: value.sum(0) for name, value in sums(output, logits, targets).items()})


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
    inputs, targets = Masked(ratio=0.3).make_inputs(batch, Draw(0, "corruption", 0))
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
        inputs, _ = objective.make_inputs(batch, Draw(0, "corruption", 0))
        other = batch._replace(x=batch.x + inputs.hidden.reshape(inputs.hidden.shape + (1,) * (batch.x.ndim - 2)) * 3)
        assert not torch.equal(other.x, batch.x)
        shown, _ = objective.make_inputs(other, Draw(0, "corruption", 0))
        assert torch.equal(shown.x, inputs.x) and torch.equal(shown.hidden, inputs.hidden)


def test_masks_follow_the_example_not_the_batch():
    data, draw = tokens(), Draw(1, "corruption", 2)
    whole = Masked(ratio=0.5).make_inputs(batch_of(data), draw)[0].hidden
    some, _ = Masked(ratio=0.5).make_inputs(batch_of(data, [9, 4]), draw)
    width = some.hidden.shape[1]
    assert torch.equal(some.hidden, whole[[9, 4], :width])
    assert not torch.equal(whole, Masked(ratio=0.5).make_inputs(batch_of(data), Draw(1, "corruption", 3))[0].hidden)


def test_continuous_targets_are_normalised_or_levels():
    data = values(levels=256)
    batch = batch_of(data)
    _, l1 = Masked(ratio=0.5).make_inputs(batch, Draw(0, "c", 0))
    assert torch.equal(l1.values, batch.x)
    _, levels = Masked(ratio=0.5, loss="cross_entropy").make_inputs(batch, Draw(0, "c", 0))
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
        (Next(loss="l1"), tokens()),
        (Next(loss="cross_entropy"), values()),
        (Supervised(loss="l2"), tokens()),
        (Supervised(loss="cross_entropy"), values()),
        (Supervised(scale="range"), tokens()),
    ],
)
def test_losses_that_do_not_fit_are_refused(objective, data):
    with pytest.raises(UsageError, match=f"objective {type(objective).__name__.lower()}: "):
        objective.output(data)


def test_next_is_the_step_after_and_nothing_is_hidden():
    data = tokens()
    batch = batch_of(data, [5, NOBODY, 9, 2])
    inputs, targets = Next().make_inputs(batch, Draw(0, "corruption", 0))
    assert inputs.hidden is None and torch.equal(inputs.x, batch.x)
    scored = 0
    for i, row in ((0, 5), (2, 9), (3, 2)):
        sequence = data.train.row(row)
        last = len(sequence) - 1  # has no next step
        assert torch.equal(targets.weight[i] > 0, torch.arange(batch.x.shape[1]) < last)
        for t in range(last):
            assert targets.values[i, t, 0] == sequence[t + 1]
        scored += last
    assert float(targets.weight.sum()) == scored  # NOBODY and padding weigh nothing
    assert Next().output(data) == Masked().output(data) == Output("cross_entropy", True, 1, 9)


@pytest.mark.parametrize("objective", [Masked(ratio=0.5), Next()], ids=["masked", "next"])
@pytest.mark.parametrize("loss", ["l1", "cross_entropy"])
def test_losses_on_values_by_hand(objective, loss):
    """Two channels, 256 levels, three lengths in a batch: against a loop over the rows as they are stored."""
    data = values(levels=256)
    objective = objective.model_copy(update={"loss": loss})
    output, batch = objective.output(data), batch_of(data)
    inputs, targets = objective.make_inputs(batch, Draw(4, "corruption", 0))
    logits = torch.randn(*batch.x.shape[:2], output.width, generator=torch.Generator().manual_seed(0))
    total, scored = 0.0, 0
    for i in range(3):
        row = np.asarray(data.train.row(i)).astype(np.int64)
        for t in range(len(row)):
            about = t if inputs.hidden is not None else t + 1
            if about == len(row) or (inputs.hidden is not None and not inputs.hidden[i, t]):
                continue
            scored += 1
            for c in range(2):
                if loss == "l1":
                    truth = (row[about, c] - data.input.mean[c]) / data.input.std[c]
                    total += abs(float(logits[i, t, c]) - truth) / 2
                else:
                    scores = logits[i, t, 256 * c : 256 * (c + 1)].double()
                    total -= float(scores.log_softmax(0)[row[about, c]]) / 2
    assert scored == targets.weight.sum() > 5
    assert targets.scored is not None and len(targets.scored) == scored
    for asked, answered in ((targets, logits.flatten(0, 1)[targets.scored]), (targets._replace(scored=None), logits)):
        assert float(weighted_sum(output, answered, asked)) == pytest.approx(total, rel=1e-5)
        assert scores_of(output, answered, asked)["loss"] == pytest.approx(total / scored, rel=1e-5)


def test_a_batch_with_nothing_to_predict():
    """Sequences of one step weigh nothing and move nothing; a split of them is refused."""
    split = Split.from_rows([np.array([3]), np.array([1])], [0, 1])
    longer = Split.from_rows([np.array([3]), np.array([1, 2])], [0, 1])
    data = TaskData(Tokens(9), Classes(2), longer, split, split)
    inputs, targets = Next().make_inputs(batch_of(data, [0]), Draw(0, "corruption", 0))
    logits = torch.randn(1, 1, 9, requires_grad=True)
    weighted_sum(Next().output(data), of_scored(logits, targets), targets).backward()
    assert inputs.x.tolist() == [[3]] and targets.weight.sum() == 0 and not logits.grad.any()
    with pytest.raises(UsageError, match="one step long"):
        Next().output(TaskData(Tokens(9), Classes(2), split, longer, longer))


def test_next_learns_what_comes_next_and_is_finetuned_from(tmp_path):
    """A sequence that counts up is predicted exactly after its first step; neither a copy nor a guess would be."""
    (tmp_path / "count.py").write_text(
        '''
"""Counting, modulo seven."""
import numpy as np
from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens

class Config(TaskConfig):
    pass

def load(config, raw):
    def split(n, seed):
        rng = np.random.default_rng(seed)
        first, lengths = rng.integers(0, 7, n), rng.integers(1, 9, n)
        return Split.from_rows([(a + np.arange(k)) % 7 for a, k in zip(first, lengths)], first % 2)
    return TaskData(Tokens(7), Classes(2), split(60, 0), split(30, 1), split(30, 2))
'''
    )
    train = {"steps": 60, "batch_size": 20, "learning_rate": 0.02, "evaluate_every": 30}
    one = own_task(
        tmp_path,
        task={"name": "./count.py"},
        model__causal=True,
        pretrain={"objective": {"name": "next"}, "train": train},
    )
    pretrain = Job(one, "pretrain", 0)
    assert run(pretrain, tmp_path / "runs").val["accuracy"] > 0.95
    assert run(Job(one, "finetune", 0, pretrain), tmp_path / "runs").test is not None


@pytest.mark.parametrize("loss", ["l1", "l2"])
def test_supervised_losses_on_real_targets_by_hand(loss):
    output = Output(loss, False, 2)
    logits, truth = torch.randn(5, 2), torch.randn(5, 2)
    weight = torch.tensor([1.0, 1, 0, 1, 1])
    error = (logits - truth)[weight > 0]
    expected = error.abs() if loss == "l1" else error.square()
    assert float(weighted_sum(output, logits, Targets(truth, weight))) == pytest.approx(float(expected.mean(1).sum()))


def real_targets(train, other=((5.0, 5.0),)):
    def split(y):
        return Split.from_rows([np.zeros((3, 1), np.float32)] * len(y), np.asarray(y, np.float64))

    return TaskData(Values(1), Reals(2), split(train), split(other), split(other))


@pytest.mark.parametrize(
    ("scale", "rule"),
    [
        ("standard", lambda y: (y - y.mean(0)) / y.std(0)),
        ("range", lambda y: 2 * (y - y.min(0)) / (y.max(0) - y.min(0)) - 1),
        ("reference", lambda y: 2 * (y - abs(y).min(0)) / (abs(y).max(0) - abs(y).min(0)) - 1),
    ],
)
def test_scaled_targets(scale, rule):
    """The loss sees scaled targets; answers and metrics are in the task's units; only training rows decide."""
    y = np.array([[60.0, -3.0], [100.0, 2.0], [75.0, 0.5], [180.0, -1.0]])
    data = real_targets(y, other=[[1e6, -1e6]])
    output, plain = Supervised(scale=scale).output(data), Supervised().output(data)
    assert plain == Output("l2", False, 2, supervised=True) and hash(output) != hash(plain)
    truth, weight = torch.from_numpy(y).float(), torch.ones(4)
    logits = torch.from_numpy(rule(y)).float()  # the perfect answer
    assert torch.allclose(answers(output, logits), truth, atol=1e-4)
    assert float(per_answer(output, logits, truth).max()) < 1e-9
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    scores = scores_of(output, logits, Targets(truth, weight))
    assert scores["loss"] == pytest.approx(((logits.numpy() - rule(y)) ** 2).mean(), rel=1e-5)
    error = answers(output, logits).numpy() - y
    assert scores["mse"] == pytest.approx((error**2).mean(), rel=1e-5)
    assert scores["mae"] == pytest.approx(abs(error).mean(), rel=1e-5)
    inside = scores_of(plain, logits, Targets(torch.from_numpy(rule(y)).float(), weight))
    assert scores["r2"] == pytest.approx(inside["r2"], rel=1e-5)  # unmoved by shift and scale


def test_targets_of_steps_are_scaled_by_the_rows_in_use():
    """A subset's rows lie beside the others, whose labels it does not have."""
    rows = [np.zeros((2, 1), np.float32)] * 3
    whole = Split.from_rows(
        rows, [np.array([[1.0], [3.0]]), np.array([[50.0], [90.0]]), np.array([[5.0], [7.0]])], per_step=True
    )
    data = TaskData(Values(1), Reals(1, per_step=True), whole.take(np.array([0, 2])), whole, whole)
    output = Supervised(scale="standard").output(data)
    assert (output.shift, output.scale) == ((4.0,), (pytest.approx(np.std([1, 3, 5, 7])),))


def test_mcc_of_labels_at_every_step_needs_all_answers(monkeypatch):
    """Of classes a confusion matrix counts it; labels have none."""
    monkeypatch.setattr("spt.training.build.MOST_SCORES", 10)
    split = Split.from_rows([np.zeros((9, 1), np.float32)] * 4, [np.eye(9, 2, dtype=np.int8)] * 4, per_step=True)
    data = TaskData(Values(1), Labels(2, per_step=True), split, split, split)
    train, output = Train(steps=1, batch_size=1, learning_rate=1.0), Supervised(metric="mcc").output(data)
    with pytest.raises(UsageError, match="metric mcc needs the answers to all steps"):
        _check_metric("mcc", "finetune.train", train, output, data)


def test_a_target_without_spread_cannot_be_scaled():
    with pytest.raises(UsageError, match=r"target 1 has the same value \(0\.1\) in all 2 training rows.*scale none"):
        Supervised(scale="standard").output(real_targets([[1, 0.1], [2, 0.1]]))
    with pytest.raises(UsageError, match="target 0 has the same size"):
        Supervised(scale="reference").output(real_targets([[-1, 0.1], [1, 0.2]]))
    assert Supervised(scale="range").output(real_targets([[-1, 0.1], [1, 0.2]])).scale[0] == 1.0


@pytest.mark.parametrize("loss", ["l1", "l2", "gaussian"])
def test_unknown_quantities_do_not_count(loss):
    """Neither in the loss, whatever number stands there, nor in the metrics; a mean is over what is known."""
    torch.manual_seed(0)
    output = Output(loss, True, 3)
    truth, known = torch.randn(4, 6, 3), torch.rand(4, 6, 3) < 0.6
    known[1, 2] = False
    logits = torch.randn(4, 6, output.width, requires_grad=True)
    weight = known.any(-1).float()
    scored = weight.flatten().nonzero()[:, 0]
    other = torch.where(known, truth, 1e3)
    few = [weighted_sum(output, logits, Targets(values, weight, known=known)) for values in (truth, other)]
    some = weighted_sum(output, logits.flatten(0, 1)[scored], Targets(truth, weight, scored, known))
    torch.testing.assert_close(few[0], few[1], rtol=0, atol=0)
    torch.testing.assert_close(few[0], some)
    columns = [0, 3] if loss == "gaussian" else [0]
    single = per_answer(output._replace(size=1), logits[..., columns], truth[..., :1])
    first = torch.zeros_like(known).index_fill(-1, torch.tensor(0), True)
    torch.testing.assert_close(per_answer(output, logits, truth, first), single)
    (gradient,) = torch.autograd.grad(few[0], logits)
    assert (gradient[..., :3][~known] == 0).all() and (gradient[..., :3][known] != 0).all()
    scores = scores_of(output, logits.detach(), Targets(truth, weight, known=known))
    error = np.ma.masked_array((logits[..., :3] - truth).detach().double().numpy(), ~known.numpy()).reshape(-1, 3)
    assert scores["mae"] == pytest.approx(abs(error).mean(0).mean(), rel=1e-6)
    assert scores["mse"] == pytest.approx((error**2).mean(0).mean(), rel=1e-6)
    spread = np.ma.masked_array(truth.double().numpy(), ~known.numpy()).reshape(-1, 3).var(0)
    assert scores["r2"] == pytest.approx((1 - (error**2).mean(0) / spread).mean(), rel=1e-6)
    with pytest.raises(UsageError, match="metric_average exact"):
        batch_means(output, sums(output, logits.detach(), Targets(truth, weight, known=known)), 2)


def test_unknown_quantities_of_cross_entropy():
    torch.manual_seed(0)
    output = Output("cross_entropy", True, 2, 5)
    logits, truth = torch.randn(3, 4, 10), torch.randint(0, 5, (3, 4, 2))
    known = torch.zeros(3, 4, 2, dtype=torch.bool)
    known[..., 1] = True
    scores = scores_of(output, logits, Targets(truth, torch.ones(3, 4), known=known))
    alone = scores_of(output._replace(size=1), logits[..., 5:], Targets(truth[..., 1:], torch.ones(3, 4)))
    assert scores == pytest.approx(alone, rel=1e-6)


def test_batch_means_are_those_of_the_published_code():
    """Means of full batches' metrics, the last batch dropped, r2 of a batch over all its numbers together."""
    torch.manual_seed(0)
    output = Output("l2", False, 2)
    logits, truth = torch.randn(11, 2), torch.randn(11, 2) * 3 + 1
    truth[4:8] = 2.0  # a batch without spread: divided by 1e-5
    found = batch_means(output, sums(output, logits, Targets(truth, torch.ones(11))), 4)
    parts = [slice(0, 4), slice(4, 8)]
    mse = [float((logits[p] - truth[p]).square().mean()) for p in parts]
    r2 = [1 - e / max(float(truth[p].var(correction=0)), 1e-5) for e, p in zip(mse, parts, strict=True)]
    assert [found["mse"], found["loss"]] == pytest.approx([np.mean(mse)] * 2, rel=1e-5)
    assert found["mae"] == pytest.approx(np.mean([float((logits[p] - truth[p]).abs().mean()) for p in parts]), rel=1e-5)
    assert found["r2"] == pytest.approx(np.mean(r2), rel=1e-3) and r2[1] < -1e4
    shift = (5.0, -3.0)  # of no account, also to the variance of both quantities together
    shifted = output._replace(shift=shift, scale=(1.0, 1.0))
    same = batch_means(shifted, sums(shifted, logits - torch.tensor(shift), Targets(truth, torch.ones(11))), 4)
    assert same == pytest.approx(found, rel=1e-3)
    with pytest.raises(DataError, match="11 rows, not one batch of 12"):
        batch_means(output, sums(output, logits, Targets(truth, torch.ones(11))), 12)


def test_batch_means_of_masked_positions():
    """Each batch is averaged over its own scored positions; one without any is left out."""
    torch.manual_seed(0)
    output = Output("cross_entropy", True, 1, 3)
    logits, truth = torch.randn(9, 5, 3), torch.randint(0, 3, (9, 5, 1))
    weight = (torch.rand(9, 5) < 0.6).float()
    weight[3:6] = 0
    found = batch_means(output, sums(output, logits, Targets(truth, weight)), 3)
    right = (logits.argmax(-1) == truth[..., 0]).float()
    parts = [slice(0, 3), slice(6, 9)]
    assert found["accuracy"] == pytest.approx(np.mean([float(right[p][weight[p] > 0].mean()) for p in parts]), rel=1e-6)
    exact = scores_of(output, logits, Targets(truth, weight))
    assert found["accuracy"] != pytest.approx(exact["accuracy"], rel=1e-3)
    with pytest.raises(DataError, match="no position"):
        batch_means(output, sums(output, logits, Targets(truth, 0 * weight)), 3)


def test_evaluations_draw_alike_or_anew():
    fixed, redrawn = (
        Train(steps=9, batch_size=1, learning_rate=1.0, validation_masks=kind) for kind in ("fixed", "redrawn")
    )
    assert evaluation_draw(fixed, 3, 10) == evaluation_draw(fixed, 4, 20)
    draws = [evaluation_draw(redrawn, seed, step) for seed, step in ((3, 10), (3, 20), (4, 10))]
    assert len({*draws, evaluation_draw(fixed, 3, 10)}) == 4
    assert draws[0] == evaluation_draw(redrawn, 3, 10)  # a resumed run draws the same
    hidden = [Masked(ratio=0.5).make_inputs(batch_of(tokens()), draw)[0].hidden for draw in draws]
    assert not torch.equal(hidden[0], hidden[1])


def test_nobody_weighs_nothing():
    data = tokens()
    batch = batch_of(data, [3, NOBODY])
    _, targets = Supervised().make_inputs(batch, Draw(0, "c", 0))
    assert targets.weight.tolist() == [1, 0]
    _, targets = Masked(ratio=0.9).make_inputs(batch, Draw(0, "c", 0))
    assert targets.weight[1].sum() == 0 and targets.weight[0].sum() > 0


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 6))
def test_shares_cover_a_batch_once(n, world, size):
    rows = generator(0, "rows").permutation(n)
    parts = [share(rows, rank, world) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    joined = np.stack(parts, axis=1).ravel()  # row by row, as they were dealt out
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


def test_the_last_batch_can_be_left_out():
    full = [rows for _, rows in zip(range(6), training_rows(10, 3, 7, 0, drop_last=True), strict=False)]
    epochs = [order(10, 7, epoch) for epoch in (0, 1)]
    assert np.array_equal(np.concatenate([rows for _, rows in full]), np.concatenate([rows[:9] for rows in epochs]))


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


def test_a_large_mean_does_not_swallow_the_variance():
    """Targets of 3e7 and a few: with a scale, r2 is that of what differs."""
    truth = 3e7 + 4 * torch.arange(8.0)[:, None]
    output = Output("l2", per_step=False, size=1, shift=(3e7 + 14,), scale=(9.0,))
    logits = (truth - output.shift[0]) / output.scale[0]
    for guess, r2 in ((logits, 1.0), (torch.zeros(8, 1), 0.0)):
        found = sums(output, guess, Targets(truth, torch.ones(8)))
        totals = {name: tensor.sum(0) for name, tensor in found.items()}
        assert metrics(output, totals)["r2"] == pytest.approx(r2, abs=1e-3)
