"""Tasks that ask at every step, show pairs, tell the time between steps, or make new rows every epoch."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score
from tiny import environment, loaded, recipe_file, run, spt, weights

from spt.analysis.reevaluate import reevaluate
from spt.config.budget import example_count
from spt.config.job import Job
from spt.config.recipe import EncoderConfig, HeadConfig, Part
from spt.data.batching import NOBODY, collate
from spt.data.dataset import open_task
from spt.data.fingerprints import rows_hash, split_record
from spt.errors import DataError, RecipeError, UsageError
from spt.models.base import Context
from spt.rng import Draw
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks.base import IGNORED, Classes, Reals, Split, TaskData, Tokens, Values
from spt.training.budget import plan_steps
from spt.training.build import build_stage
from spt.training.evaluate import batches, evaluate
from spt.training.load_run import load_run
from spt.training.losses import LEAST_VARIANCE, answers, per_answer
from spt.training.metrics import metrics, sums
from spt.training.network import Encoder, Frames, Head
from spt.training.objectives import Inputs, Output, Supervised, Targets

# 24 rows of 6 to 12 tokens; what is asked is the option `ask`.
TASK = '''
"""Every way of asking."""
import numpy as np
from spt.tasks.base import IGNORED, Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values

INDEXABLE = True
LOADED = []

class Config(TaskConfig):
    ask: str = "tags"
    rows: int = 24
    resample_each_epoch: bool = False
    interval: float = 1.0

def one(seed, ask):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(6, 13))
    x = rng.integers(0, 7, n).astype(np.uint8)
    if ask == "tags":
        return x, np.where(rng.random(n) < 0.5, x % 3, IGNORED).astype(np.int8)
    if ask == "numbers":
        y = np.stack([np.cumsum(x) / 10, x / 7.0], 1).astype(np.float32)
        y[: n // 2] = np.nan
        return x, y
    if ask == "next":
        return x, np.append(x[1:], 0)
    return x, rng.exponential(1.0, n).astype(np.float32)

def split(config, name, n, epoch=0, ids=None):
    LOADED.append(n)
    ids = np.arange(n) if ids is None else ids
    base = {"train": 0, "val": 10_000, "test": 20_000}[name]
    seeds = [base + 1000 * epoch + int(i) % 10_000 for i in ids]
    made = [one(seed, config.ask) for seed in seeds]
    rows = [x for x, _ in made]
    if config.ask == "pairs":
        pairs = [(x[: 1 + k % (len(x) - 1)], x[1 + k % (len(x) - 1):]) for k, x in enumerate(rows)]
        return Split.from_pairs(pairs, [int(a[0] > b[0]) for a, b in pairs], ids=base + ids)
    if config.ask in ("times", "plain"):
        times = [t for _, t in made] if config.ask == "times" else None
        return Split.from_rows(rows, [int(x.sum()) % 2 for x in rows], ids=base + ids, steps=times)
    found = Split.from_rows(rows, [y for _, y in made], ids=base + ids, per_step=True)
    if config.ask == "next":
        from dataclasses import replace
        found = replace(found, text_bytes=2 * found.lengths)
    return found

def load(config, raw):
    n = min(config.rows, config.max_rows or config.rows)
    target = {"tags": Classes(3, per_step=True), "numbers": Reals(2, per_step=True), "next": Classes(7, per_step=True)}
    parts = [split(config, name, n) for name in ("train", "val", "test")]
    return TaskData(Tokens(7), target.get(config.ask, Classes(2)), *parts, interval=config.interval,
                    future=config.ask == "next")

def resample(config, ids, epoch):
    return split(config, "train", 0, epoch, ids)
'''


def asking(folder, ask, **changes):
    (folder / "ask.py").write_text(TASK)
    return loaded(folder, **{"task": {"name": "./ask.py", "ask": ask}, **changes})


def data_of(one):
    return open_task(one.recipe.task)


@pytest.mark.parametrize("ask", ["tags", "numbers", "pairs", "times", "next"])
def test_the_store_gives_back_what_belongs_to_steps_and_pairs(ask, tmp_path):
    one = asking(tmp_path, ask)
    from spt.config.plugins import find_plugin

    component = find_plugin("tasks", one.recipe.task.name)
    given = component.module.load(component.module.Config(ask=ask), tmp_path)
    kept = data_of(one)
    assert kept.target == given.target and kept.length == given.length and kept.future == given.future
    for name, split in given.splits.items():
        stored = kept.splits[name]
        assert np.array_equal(stored.values, split.values) and np.array_equal(stored.extents, split.extents)
        assert np.array_equal(stored.targets, split.targets, equal_nan=ask == "numbers")
        for field in ("cuts", "steps", "text_bytes"):
            mine, theirs = getattr(stored, field), getattr(split, field)
            assert (mine is None) == (theirs is None) and (mine is None or np.array_equal(mine, theirs))
        some = stored.take(np.array([5, 2]))
        assert np.array_equal(some.row(1), split.row(2)) and split_record(some) != split_record(stored)


def test_other_targets_of_steps_or_times_are_other_data(tmp_path):
    rows = [np.arange(5, dtype=np.uint8)] * 4
    from spt.data.fingerprints import with_fingerprints

    def prints(steps=None, targets=0, cut=None):
        if cut is not None:
            return with_fingerprints(Split.from_pairs([(row[:cut], row[cut:]) for row in rows], [0, 1, 0, 1]))
        y = [np.full(5, targets, np.int8)] * 4
        times = None if steps is None else [np.full(5, steps, np.float32)] * 4
        return with_fingerprints(Split.from_rows(rows, y, per_step=True, steps=times))

    assert split_record(prints()) == split_record(prints())
    assert split_record(prints()).targets != split_record(prints(targets=1)).targets
    assert len({split_record(prints(steps=s)).inputs for s in (None, 1.0, 2.0)}) == 3
    assert len({split_record(prints(cut=c)).inputs for c in (1, 2, 3)}) == 3


def test_targets_of_steps_are_scored_where_they_are_asked(tmp_path):
    for ask in ("tags", "numbers"):
        data = data_of(asking(tmp_path, ask))
        batch = collate(data.train, np.array([0, 1, NOBODY]), data.input, data.target)
        inputs, targets = Supervised().make_inputs(batch, Draw(0, "x", 0))
        for i in range(3):
            start, stop = data.train.starts[i % 3], data.train.stops[i % 3]
            y = np.asarray(data.train.targets[start:stop])
            asked = (y != IGNORED) if ask == "tags" else np.isfinite(y[:, 0])
            weight = targets.weight[i].numpy()
            assert not weight[stop - start :].any()
            if i < 2:
                assert np.array_equal(weight[: stop - start] > 0, asked)
                shown = targets.values[i, : stop - start].numpy()
                assert np.array_equal(shown[asked].squeeze(), y[asked])
            else:
                assert not weight.any()
        assert torch.isfinite(targets.values.float()).all() and inputs.hidden is None


@pytest.mark.parametrize("ask", ["tags", "numbers", "pairs", "next"])
def test_both_stages_run_and_resume_in_any_cut(ask, tmp_path):
    changes = {"model__causal": ask == "next", "pretrain__objective": {"name": "next" if ask == "next" else "masked"}}
    one = asking(tmp_path, ask, **changes)
    whole = run(Job(one, "finetune", 0, Job(one, "pretrain", 0)), tmp_path / "a")
    cut = run(Job(one, "finetune", 0, Job(one, "pretrain", 0)), tmp_path / "b", micro_batch_size=3)
    for name, value in whole.test.items():
        assert cut.test[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    of_classes = {"loss", "accuracy", "f1_macro", "accuracy_macro"}
    in_training = {
        "tags": of_classes,
        "numbers": {"loss", "mae", "mse", "r2"},
        "pairs": of_classes,
        "next": {"loss", "accuracy", "perplexity", "bits_per_byte"},
    }
    of_test = {"tags": {"auroc", "mcc"}, "numbers": {"spearman"}, "pairs": {"auroc", "f1"}, "next": set()}
    assert set(whole.val) == in_training[ask] and in_training[ask] | of_test[ask] <= set(whole.test)
    if ask == "next":
        assert whole.metric == "bits_per_byte" and not whole.higher_is_better
        assert whole.test["bits_per_byte"] == pytest.approx(whole.test["loss"] / math.log(2) / 2)
        assert whole.test["perplexity"] == pytest.approx(math.exp(whole.test["loss"]))


def test_answers_of_steps_leave_their_scores(tmp_path):
    import pyarrow.parquet as pq

    one = asking(tmp_path, "tags")
    job = Job(one, "finetune", 0)
    result = run(job, tmp_path / "runs")
    table = pq.read_table(tmp_path / "runs" / job.name / "predictions.parquet").to_pydict()
    assert sum(table["right"]) / sum(table["steps"]) == pytest.approx(result.test["accuracy"])
    assert table["id"] == data_of(one).test.ids.tolist()


def test_metrics_that_count_classes_alike_are_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    output = Output("cross_entropy", per_step=True, size=1, classes=5, macro=True)
    logits = torch.randn(7, 11, 5, generator=generator)
    values = torch.randint(0, 4, (7, 11, 1), generator=generator)  # class 4 never occurs, but is answered
    weight = (torch.rand(7, 11, generator=generator) < 0.6).float()
    found = sums(output, logits, Targets(values, weight))
    scores = metrics(output, {name: tensor.sum(0) for name, tensor in found.items()})
    asked = weight.bool()
    truth, said = values[..., 0][asked], answers(output, logits)[..., 0][asked]
    assert scores["f1_macro"] == pytest.approx(f1_score(truth, said, average="macro"))
    with pytest.warns(UserWarning, match="y_pred contains classes"):
        assert scores["accuracy_macro"] == pytest.approx(balanced_accuracy_score(truth, said))
    assert scores["accuracy"] == pytest.approx(float((truth == said).float().mean()))


def test_classes_weigh_alike_over_the_whole_batch_however_it_is_cut(tmp_path):
    objective = Supervised(class_weights="batch")
    data = data_of(asking(tmp_path, "tags"))
    output = objective.output(data)
    logits = torch.randn(24, 12, 3, generator=torch.Generator().manual_seed(1))

    def loss(parts):
        posed = [
            objective.make_inputs(collate(data.train, part, data.input, data.target), Draw(0, "x", 0))[1]
            for part in parts
        ]
        weighed = objective.weighed(objective.output(data), posed, lambda numbers: numbers)
        total = sum(float(targets.weight.sum()) for targets in weighed)
        found = sum(
            float((per_answer(output, logits[part, : t.values.shape[1]], t.values) * t.weight).sum())
            for part, t in zip(parts, weighed, strict=True)
        )
        return found / total, total

    rows = np.arange(24)
    whole, classes = loss([rows])
    assert classes == pytest.approx(3)
    assert loss([rows[:5], rows[5:6], rows[6:]])[0] == pytest.approx(whole, rel=1e-5)
    batch = collate(data.train, rows, data.input, data.target)
    _, targets = objective.make_inputs(batch, Draw(0, "x", 0))
    asked = targets.weight > 0
    plain = per_answer(output, logits, targets.values)[asked]
    truth = targets.values[..., 0][asked]
    by_hand = np.mean([float(plain[truth == c].mean()) for c in range(3)])
    assert whole == pytest.approx(by_hand, rel=1e-5)
    targets = targets._replace(scored=None)  # every step is answered here
    found = sums(output, logits, targets)  # and in an evaluation, over the split
    scores = metrics(output, {name: tensor.sum(0) for name, tensor in found.items()})
    assert scores["loss"] == pytest.approx(by_hand, rel=1e-5)
    equal = Supervised().output(data)
    found = sums(equal, logits, targets)
    assert metrics(equal, {n: t.sum(0) for n, t in found.items()})["loss"] == pytest.approx(
        float(plain.mean()), rel=1e-5
    )


def test_a_gaussian_answer_is_scored_by_its_density():
    output = Output("gaussian", per_step=True, size=2)
    assert output.width == 4
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(1))
    variance = F.elu(logits[..., 2:]) + 1 + LEAST_VARIANCE
    law = torch.distributions.Normal(logits[..., :2], variance.sqrt())
    assert torch.allclose(per_answer(output, logits, y), -law.log_prob(y).mean(-1), atol=1e-5)
    assert torch.equal(answers(output, logits), logits[..., :2])
    head = Head(8, output, HeadConfig(mlp=True))
    assert head(torch.zeros(3, 5, 8), Context(torch.ones(3, 5, dtype=torch.bool), False)).shape == (3, 5, 4)
    assert torch.isfinite(per_answer(output, torch.full((1, 1, 4), -200.0), torch.zeros(1, 1, 2))).all()


def test_gaussian_answers_train(tmp_path):
    one = asking(tmp_path, "numbers", finetune__objective={"name": "supervised", "loss": "gaussian", "metric": "r2"})
    result = run(Job(one, "finetune", 0), tmp_path / "runs")
    assert result.metric == "r2" and result.higher_is_better and {"loss", "mae", "mse", "r2"} <= set(result.test)


def test_a_pair_is_two_sequences_and_one_answer(tmp_path):
    data = data_of(asking(tmp_path, "pairs"))
    batch = collate(data.train, np.array([3, 0]), data.input, data.target)
    assert batch.x.shape[0] == 4 and batch.y.shape == (2,) and batch.rows.tolist() == [3, 0]
    for k, i in enumerate((3, 0)):
        cut = int(data.train.cuts[i])
        row = data.train.row(i)
        assert batch.x[k][batch.context.valid[k]].tolist() == row[:cut].tolist()
        assert batch.x[2 + k][batch.context.valid[2 + k]].tolist() == row[cut:].tolist()
    for mlp in (False, True):
        head = Head(8, Supervised().output(data), HeadConfig(mlp=mlp))
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
        context = Context(torch.ones(4, 6, dtype=torch.bool), False)
        u, v = x.mean(1)[:2], x.mean(1)[2:]
        features = torch.cat([u, v, u - v, u * v], -1)
        if mlp:
            features = F.gelu(head.inner(features))
        assert torch.allclose(head(x, context), head.out(features), atol=1e-6)
        assert head(x, context).shape == (2, 2)


def test_pretraining_draws_both_sequences_of_a_pair_together(tmp_path):
    """A batch of 8 pairs is 16 sequences; an epoch of 24 pairs is three updates."""
    one = asking(tmp_path, "pairs", pretrain__train={"epochs": 2, "batch_size": 8, "learning_rate": 0.01})
    setup = build_stage(Job(one, "pretrain", 0))
    bare, labelled = setup.data.train, data_of(one).train
    assert len(bare) == 24 and bare.targets is None and bare.sequences == 2
    assert np.array_equal(bare.row(3), labelled.row(3)) and np.array_equal(bare.seen, labelled.seen)
    assert plan_steps(setup) == 6 and example_count(6, 24, 8) == 48
    batch = collate(bare, np.arange(8), setup.data.input, setup.data.target)
    assert len(batch.x) == 16 and batch.y is None
    result = run(Job(one, "pretrain", 0), tmp_path / "runs")
    assert result.own.steps == 6 and result.own.examples == 48
    assert result.own.positions == 2 * int(bare.lengths.sum())
    assert result.data["train"].rows == 24


@pytest.mark.parametrize("objective", [{"name": "masked", "ratio": 0.5}, {"name": "next"}])
def test_each_sequence_of_a_pair_is_asked_as_if_it_stood_alone(tmp_path, objective):
    """The first and second of pair r with the chance of sequences 2 r and 2 r + 1, and their scores summed by pair."""
    one = asking(
        tmp_path, "pairs", pretrain__objective=objective, model__causal=objective["name"] == "next",
        pretrain__train={"epochs": 1, "batch_size": 4, "learning_rate": 0.01},
    )  # fmt: skip
    setup, draw = build_stage(Job(one, "pretrain", 0)), Draw(0, "x", 0)
    data = setup.data
    inputs, targets = setup.make_inputs(collate(data.train, np.array([2, 5]), data.input, data.target), draw)
    middle = data.train.starts + data.train.cuts
    alone = replace(
        data.train,
        starts=np.stack([data.train.starts, middle], 1).reshape(-1),
        stops=np.stack([middle, data.train.stops], 1).reshape(-1),
        cuts=None,
    )
    expected, others = setup.make_inputs(collate(alone, np.array([4, 10, 5, 11]), data.input, data.target), draw)
    assert torch.equal(targets.weight, others.weight) and targets.weight.any()
    assert torch.equal(targets.values, others.values) and torch.equal(inputs.x, expected.x)
    _, filled = setup.make_inputs(collate(data.train, np.array([2, NOBODY]), data.input, data.target), draw)
    assert not filled.weight[[1, 3]].any() and filled.weight[[0, 2]].any()
    every = setup.make_inputs(collate(data.train, np.arange(24), data.input, data.target), draw)[1]
    if objective["name"] == "next":  # one fewer than there are steps
        assert setup.objective.scored_steps(data.train) * 24 == every.weight.sum()
    by_pair = {}
    for size in (1, 5):
        scores, _ = evaluate(setup.model, setup, data.val, Runtime(Settings(cpu=True, quiet=True)), draw, at_once=size)
        by_pair[size] = scores["loss"]
    assert by_pair[1] == pytest.approx(by_pair[5], rel=1e-6)


def test_means_of_batches_are_those_of_pairs(tmp_path):
    """24 pairs in batches of 10: two, and four pairs left out."""
    train = {"epochs": 1, "batch_size": 10, "learning_rate": 0.01, "metric_average": "per_batch"}
    one = asking(tmp_path, "pairs", pretrain={"objective": {"name": "next"}, "train": train}, model__causal=True)
    setup = build_stage(Job(one, "pretrain", 0))

    def loss(first, last):
        split, runtime = setup.data.val.take(np.arange(first, last)), Runtime(Settings(cpu=True, quiet=True))
        return evaluate(setup.model, setup, split, runtime, Draw(0, "x", 0), at_once=3)[0]["loss"]

    assert loss(0, 10) != pytest.approx(loss(10, 20))
    assert loss(0, 24) == pytest.approx((loss(0, 10) + loss(10, 20)) / 2)


def test_pairs_have_other_keys_than_when_their_sequences_were_drawn_alone(tmp_path):
    from spt.config.job import digest

    data = data_of(asking(tmp_path, "pairs"))
    records = {name: split_record(split).model_dump() for name, split in data.splits.items()}
    assert rows_hash(data) != digest(records)
    data = data_of(asking(tmp_path, "plain"))
    assert rows_hash(data) == digest({name: split_record(split).model_dump() for name, split in data.splits.items()})


def test_rows_of_a_leaking_pair_are_found(tmp_path):
    from spt.data.fingerprints import refuse_leak
    from spt.errors import CheckpointError

    data = data_of(asking(tmp_path, "pairs"))
    leaked = data.test.seen[7:8]  # the second of pair 3
    with pytest.raises(CheckpointError, match="1 of the 24 test rows"):
        refuse_leak(np.setdiff1d(leaked, data.train.seen), np.empty(0, np.uint64), data, "it")


def test_encoder_knows_where_a_step_lies():
    encoder = Encoder(Tokens(5), 6, EncoderConfig(positions="circle"))
    valid = torch.arange(8) < torch.tensor([[8], [5]])
    x, hidden = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.bool)
    hidden[0, 3] = True
    y = encoder(x, hidden, Context(valid, True))
    for row, length in enumerate((8, 5)):
        for i in range(length):
            angle = 2 * math.pi * i / length
            at = encoder.circle(torch.tensor([math.cos(angle), math.sin(angle)]))
            base = encoder.hidden if hidden[row, i] else encoder.map.weight[0]
            assert torch.allclose(y[row, i], base + at, atol=1e-5)
    assert encoder.flops(8).forward == 2 * 8 * 2 * 6


@pytest.mark.parametrize("together", [1, 3, 100])
def test_frames_in_parts_are_the_plain_network(monkeypatch, together):
    monkeypatch.setattr(Frames, "PART", together * 12 * 10)
    frames = Frames(Values(120, frame=(12, 10)), 4, 5)

    def plain(x):
        y = x.reshape(-1, 1, 12, 10)
        for layer in (frames.first, frames.second):
            y = F.max_pool2d(F.relu(layer(y)), 2)
        return frames.out(F.relu(frames.dense(y.flatten(1)))).reshape(1, 7, 4)

    def gradients(network):
        frames.zero_grad()
        y = network(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in frames.parameters())]

    x = torch.randn(1, 7, 120, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gradients(frames), gradients(plain), rtol=1e-4, atol=1e-5)


def test_frames_are_exported_for_any_number_of_sequences():
    frames = Frames(Values(120, frame=(12, 10)), 4, 5)
    x = torch.randn(40, 60, 120, generator=torch.Generator().manual_seed(0))  # several parts
    program = torch.export.export(frames, (x[:3],), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(x), frames(x), rtol=1e-4, atol=1e-5)


def test_frames_go_through_the_published_convolutions():
    input = Values(576, (0.0,) * 576, (1.0,) * 576, frame=(24, 24))
    encoder = Encoder(input, 16, EncoderConfig(frame_encoder="cnn"))
    shapes = {name: tuple(p.shape) for name, p in encoder.map.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "first.weight": (12, 1, 5, 5),
        "second.weight": (12, 12, 3, 3),
        "dense.weight": (30, 108),
        "out.weight": (16, 30),
    }
    x = torch.randn(2, 3, 576, generator=torch.Generator().manual_seed(0))
    y = encoder(x, None, Context(torch.ones(2, 3, dtype=torch.bool), False))
    assert y.shape == (2, 3, 16)
    alone = encoder(x[1:, 2:], None, Context(torch.ones(1, 1, dtype=torch.bool), False))
    assert torch.allclose(y[1, 2], alone[0, 0], atol=1e-5)  # frame by frame
    for side in range(8, 40):
        frames = Frames(Values(side * side, frame=(side, side)), 4, 5)
        assert frames(torch.zeros(1, 1, side * side)).shape == (1, 1, 4), side
    with pytest.raises(UsageError, match="whose steps are none"):
        Encoder(Values(3), 4, EncoderConfig(frame_encoder="cnn"))
    with pytest.raises(UsageError, match="tokens"):
        Encoder(Tokens(3), 4, EncoderConfig(frame_encoder="cnn"))


def test_flops_of_frames_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    for side in (24, 17):
        frames = Frames(Values(side * side, frame=(side, side)), 16, 30)
        with FlopCounterMode(display=False) as counter:
            frames(torch.zeros(1, 5, side * side))
        assert frames.flops(5).forward == counter.get_total_flops()


def test_what_a_task_asks_and_a_model_cannot_is_refused(tmp_path):
    for ask, changes, said in (
        ("times", {}, "takes no account of the time between steps"),
        ("next", {}, r"set model\.causal=true"),
        ("tags", {"finetune__head": {"pool": "max"}}, "pool: max has no effect"),
        ("numbers", {"finetune__objective": {"name": "supervised", "class_weights": "batch"}}, "class_weights batch"),
        ("plain", {"finetune__objective": {"name": "supervised", "metric": "r2"}}, "metric r2 is none of this task's"),
        ("plain", {"finetune__train__select_by": "bits_per_byte"}, "no metric of this stage"),
    ):
        with pytest.raises(UsageError, match=said):
            build_stage(Job(asking(tmp_path, ask, **changes), "finetune", 0))


def test_times_reach_a_model_that_reads_them(tmp_path):
    model = {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1, "causal": True}
    one = asking(tmp_path, "times", model=model)
    setup = build_stage(Job(one, "finetune", 0))
    data = setup.data
    batch = collate(data.train, np.array([0, 1]), data.input, data.target)
    steps = batch.context.steps
    start, stop = data.train.starts[0], data.train.stops[0]
    assert np.array_equal(steps[0, : stop - start].numpy(), data.train.steps[start:stop])
    y = setup.model(Inputs(batch.x, None, batch.context))
    other = setup.model(Inputs(batch.x, None, batch.context._replace(steps=2 * steps)))
    assert not torch.allclose(y, other)
    run(Job(one, "finetune", 0, Job(one, "pretrain", 0)), tmp_path / "runs")


def test_a_limit_makes_no_more_rows_than_are_asked_for(tmp_path, monkeypatch):
    from spt.config.plugins import find_plugin

    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    whole = data_of(asking(tmp_path, "plain"))
    some = data_of(asking(tmp_path, "plain", task__max_rows=5))
    made = find_plugin("tasks", str(tmp_path / "ask.py")).module.LOADED
    assert made == [24] * 3 + [5] * 3
    assert all(np.array_equal(some.train.row(i), whole.train.row(i)) for i in range(5)) and len(some.test) == 5
    data_of(asking(tmp_path, "plain", task__max_rows=5, task__subset_fraction=0.5))
    assert made[6:] == []  # a fraction is one of all rows, which are there


def test_fresh_rows_are_new_every_epoch_and_the_same_after_an_interruption(tmp_path, monkeypatch):
    one = asking(
        tmp_path, "tags", task__resample_each_epoch=True, finetune__train__epochs=3, finetune__train__steps=None
    )
    seen = []
    original = Supervised.make_inputs

    def make_inputs(self, batch, draw):
        seen.append((draw.epoch, batch.rows.tolist(), batch.x.tolist()))
        return original(self, batch, draw)

    monkeypatch.setattr(Supervised, "make_inputs", make_inputs)
    job = Job(one, "finetune", 0)
    run(job, tmp_path / "a")
    shown = {}
    for epoch, rows, x in seen:
        for row, tokens in zip(rows, x, strict=True):
            shown.setdefault((epoch, row), set()).add(tuple(tokens[:6]))
    assert len({min(shown[epoch, 3]) for epoch in range(3)}) == 3
    monkeypatch.undo()

    from spt.errors import Stopped
    from spt.training.checkpoint import save_state

    def stop(run, runtime, position):
        save_state(run, runtime, position)
        raise Stopped("enough")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("spt.training.loop.save_state", stop)
        run(job, tmp_path / "b", save_every=0.0)
    run(job, tmp_path / "b")
    best = [weights(tmp_path / side / job.name / "checkpoints" / "best") for side in "ab"]
    assert all(np.array_equal(best[0][name], best[1][name]) for name in best[0])
    fixed = asking(tmp_path, "tags", finetune__train__epochs=3, finetune__train__steps=None)
    assert Job(fixed, "finetune", 0).key != job.key


def test_evaluate_tells_a_model_of_another_rate(tmp_path):
    model = {"name": "s4d", "d_model": 8, "n_layers": 1, "d_state": 8}
    one = asking(tmp_path, "plain", model=model)
    job = Job(one, "finetune", 0)
    result = run(job, tmp_path / "runs")
    runtime = Runtime(Settings(quiet=True, cpu=True))
    folder = tmp_path / "runs" / job.name
    assert reevaluate(folder, [], "test", runtime)["scores"] == pytest.approx(result.test)
    validated = reevaluate(folder, [], "val", runtime)["scores"]
    assert {name: validated[name] for name in result.val} == pytest.approx(result.val)
    found = reevaluate(folder, ["task.interval=2.0"], "test", runtime)
    assert found["rate"] == 2 and found["scores"]["loss"] != pytest.approx(result.test["loss"], rel=1e-6)
    for changes, said in (
        (["model.d_model=3"], "does not change the task"),
        (["task.ask=numbers"], "other inputs or targets"),
    ):
        with pytest.raises(UsageError, match=said):
            reevaluate(folder, changes, "test", runtime)
    with pytest.raises(RecipeError, match="no file"):
        reevaluate(folder, ["task.name=./nowhere.py"], "test", runtime)
    (tmp_path / "ask.py").write_text(TASK.replace('"test": 20_000', '"test": 30_000'))
    with pytest.raises(DataError, match=r"not those that .* was trained on"):
        reevaluate(folder, [], "test", runtime)


@pytest.mark.parametrize("model", ["transformer", "hf"])
def test_evaluate_refuses_another_rate_for_a_model_that_knows_no_time(model, tmp_path):
    part = {"name": model, "d_model": 8, "n_layers": 1}
    job = Job(asking(tmp_path, "plain", model=part), "finetune", 0)
    run(job, tmp_path / "runs")
    runtime = Runtime(Settings(quiet=True, cpu=True))
    with pytest.raises(UsageError, match=f"model {model} cannot rescale its step size: .* only their number"):
        reevaluate(tmp_path / "runs" / job.name, ["task.interval=2.0"], "test", runtime)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_evaluate_takes_longer_sequences_where_the_weights_fit(tmp_path, positions):
    task = {"name": "induction_heads", "length": 16, "train_size": 40, "eval_size": 20}
    job = Job(loaded(tmp_path, task=task, model__positions=positions), "finetune", 0)
    run(job, tmp_path / "runs")
    folder, runtime = tmp_path / "runs" / job.name, Runtime(Settings(quiet=True, cpu=True))
    if positions == "learned":
        with pytest.raises(UsageError, match=r"32 steps, but model transformer was built for 16: .*another shape"):
            reevaluate(folder, ["task.length=32"], "test", runtime)
        return
    (longer, again) = (reevaluate(folder, [f"task.length={n}"], "test", runtime)["scores"] for n in (32, 16))
    finished = load_run(folder)
    other = build_stage(Job(loaded(tmp_path, task=task | {"length": 32}), "finetune", 0))
    other.model.load_state_dict(finished.network.state_dict())
    rows, data = other.data.test, other.data
    batch = collate(rows, np.arange(20), data.input, data.target)
    best = other.model.eval()(Inputs(batch.x, None, batch.context))[:, -1].argmax(-1)
    assert longer["accuracy"] == pytest.approx(float((best.numpy() == rows.targets.reshape(20, 32)[:, -1]).mean()))
    assert again == pytest.approx(finished.result.test)


@pytest.mark.parametrize("model", ["s4", "s4d", "dss", "s5"])
def test_a_rescaled_model_reads_every_second_sample_alike(model):
    """Of a slow signal: twice the step on half the samples gives nearly what all samples give at these places."""
    from spt.checks.model_contract import tiny
    from spt.config.plugins import find_plugin

    backbone = tiny(find_plugin("models", model), True).eval()
    length, width = 512, 16
    time = torch.arange(length) / length
    x = torch.sin(2 * math.pi * (1 + torch.arange(width)) * time[:, None] / 4)[None]

    def answer(x):
        return backbone(x, Context(torch.ones(1, x.shape[1], dtype=torch.bool), False))

    with torch.no_grad():
        whole = answer(x)[:, ::2]
        plain = answer(x[:, ::2])
        backbone.rescale(2.0)
        told = answer(x[:, ::2])
        backbone.rescale(1.0)
        assert torch.equal(answer(x[:, ::2]), plain)
    off, blind = ((one - whole)[:, 64:].square().mean().sqrt() for one in (told, plain))
    assert off < 0.5 * blind, (float(off), float(blind))


def test_a_batch_that_shares_its_padding_is_cut_to_what_fits():
    """The padding is the whole batch's, however many rows are answered at once."""
    rows = Split.from_rows([np.zeros((n, 1), np.float32) for n in (9, 3, 7, 5, 2, 8)], np.zeros(6, np.int64))
    groups = batches(rows, 18, 1, together=4)
    assert [(group.rows.tolist(), group.length) for group in groups] == [([0, 1], 9), ([2, 3], 9), ([4, 5], 8)]
    assert [len(group.rows) for group in batches(rows, 18, 3, together=4)] == [3, 1, 2]  # as in training
    assert [len(group.rows) for group in batches(rows, 4, 1, together=4)] == [1] * 6


@pytest.mark.slow
def test_evaluate_from_the_command_line(tmp_path):
    (tmp_path / "ask.py").write_text(TASK)
    recipe_file(tmp_path, task={"name": "./ask.py", "ask": "plain"})
    env = {"SPT_CACHE_DIR": str(tmp_path / "cache")}
    made = spt("finetune", "tiny.yaml", "--scratch", "--cpu", "--json", cwd=tmp_path, env=env)
    result = json.loads(made.stdout)
    folder = f"runs/finetune-{result['key']}"
    done = spt("evaluate", folder, "--cpu", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scores"] == pytest.approx(result["test"])
    for arguments, code, said in (
        (["runs/none"], 2, "no run folder"),
        ([folder, "task.rows=30", "model.name=s4"], 2, "does not change the task"),
    ):
        done = spt("evaluate", *arguments, cwd=tmp_path, env=env)
        assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert environment()


def test_checks_of_a_split_name_what_is_wrong():
    rows = [np.arange(4, dtype=np.uint8)] * 3

    def task(split, target):
        return TaskData(Tokens(9), target, split, split, split)

    tags = [np.array([0, 1, -1, 2], np.int8)] * 3
    task(Split.from_rows(rows, tags, per_step=True), Classes(3, per_step=True)).check()
    for split, target, said in (
        (Split.from_rows(rows, tags, per_step=True), Classes(3), "per_step is not the target's"),
        (Split.from_rows(rows, [0, 1, 2]), Classes(3, per_step=True), "per_step is not the target's"),
        (Split.from_rows(rows, [-np.ones(4, np.int8)] * 3, per_step=True), Classes(3, per_step=True), "no step with"),
        (Split.from_rows(rows, [np.full((4, 1), np.nan)] * 3, per_step=True), Reals(1, True), "no step with"),
        (Split.from_rows(rows, [np.array([[0, np.nan]] * 4)] * 3, per_step=True), Reals(2, True), "NaN in a part"),
        (Split.from_rows(rows, [0, 1, 2], steps=[np.zeros(4)] * 3), Classes(3), "not one positive time"),
        (Split.from_pairs([(rows[0], rows[0][:0])] * 3, [0, 1, 2]), Classes(3), "empty sequence"),
    ):
        with pytest.raises(ValueError, match=said):
            task(split, target).check()
    with pytest.raises(ValueError, match="other lengths"):
        Split.from_rows(rows, [np.zeros(3, np.int8)] * 3, per_step=True)
    with pytest.raises(ValueError, match=r"frame is \(2, 3\)"):
        Values(5, frame=(2, 3))


def test_ones_own_long_table_with_classes_of_steps_and_times(tmp_path):
    """Through the store, both stages and a model that reads times."""
    rng = np.random.default_rng(0)
    lines = ["patient,second,pulse,state"]
    for patient in range(40):
        for second in np.cumsum(rng.integers(1, 4, 12)):
            pulse = rng.normal()
            lines.append(f"p{patient},{second},{pulse:.3f},{'high' if pulse > 0 else 'low'}")
    (tmp_path / "long.csv").write_text("\n".join(lines) + "\n")
    task = {"name": "custom", "path": "long.csv", "id_column": "patient", "time_column": "second"}
    task |= {"value_columns": ["pulse"], "label_column": "state", "per_step": True, "times": "steps"}
    model = {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1}
    one = loaded(tmp_path, task=task, model=model, finetune__train__steps=40)
    data = data_of(one)
    assert data.target == Classes(2, per_step=True) and data.train.steps is not None and data.length == 12
    result = run(Job(one, "finetune", 0, Job(one, "pretrain", 0)), tmp_path / "runs")
    assert result.test["accuracy"] > 0.8


def test_evaluate_never_scores_what_was_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{' '.join(map(str, rng.integers(0, 9, 8)))},{'ab'[rng.integers(2)]}" for _ in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    task = {"name": "custom", "path": "rows.csv", "list_column": "x", "label_column": "y", "tokens": "ids"}
    job = Job(loaded(tmp_path, task=task), "finetune", 0)
    result = run(job, tmp_path / "runs")
    folder, runtime = tmp_path / "runs" / job.name, Runtime(Settings(quiet=True, cpu=True))
    assert reevaluate(folder, [], "test", runtime)["scores"] == pytest.approx(result.test)
    for change in ("task.split_seed=3", "task.test_fraction=0.5"):
        with pytest.raises(UsageError, match="are rows that the run was trained on"):
            reevaluate(folder, [change], "test", runtime)
    with pytest.raises(UsageError, match=r"task.path names other files, .*: spt predict finetune-\w+ FILE answers"):
        reevaluate(folder, ["task.path=rows.csv"], "test", runtime)
    (tmp_path / "rows.csv").write_text("\n".join(["x,y", *[r[:-1] + "ba"[r[-1] == "b"] for r in rows]]) + "\n")
    with pytest.raises(DataError, match="files or code have changed since"):
        reevaluate(folder, [], "test", runtime)


def test_what_resample_returns_is_checked(tmp_path, monkeypatch):
    from dataclasses import replace

    from spt.data import dataset

    data = data_of(asking(tmp_path, "tags", task__resample_each_epoch=True))
    ids = data.train.ids[[3, 1]]
    good = data.resample(ids, 1)
    assert good.ids.tolist() == ids.tolist() and not np.array_equal(
        good.values, data.train.take(np.array([3, 1])).values
    )
    longer = Split.from_rows([np.zeros(50, np.uint8)] * 2, [np.zeros(50, np.int8)] * 2, ids, per_step=True)
    for wrong, said in (
        (None, "returned NoneType, not a Split"),
        (data.train, "do not have the 2 ids asked for"),
        (replace(good, ids=good.ids + 1), "do not have the 2 ids"),
        (replace(good, values=good.values.astype(np.float32)), "float32 values"),
        (replace(good, targets=np.full_like(good.targets, IGNORED)), "no step with a label"),
        (replace(good, targets=good.targets + 7), "outside"),
        (replace(good, values=good.values + 9), "outside"),
        (longer, "a row of 50 steps"),
    ):
        monkeypatch.setattr(dataset, "call_hook", lambda *_, wrong=wrong: wrong)
        with pytest.raises(DataError, match=said):
            data.resample(ids, 1)


def test_a_task_says_how_long_its_rows_can_be(tmp_path):
    one, two = (open_task(Part(name="listops", max_rows=n)) for n in (2, 3))
    assert one.length == two.length == 2000
    assert open_task(Part(name="subtrees", variant="short", max_rows=1)).length == 1999


def test_batch_means_of_scaled_targets():
    """R² of the numbers together, whatever each target's scale in training (the published code's way)."""
    from spt.training.metrics import batch_means

    y = torch.tensor([[0.0, 100], [1, 101], [2, 99], [1, 103]])
    found = []
    for shift, scale in (((), ()), ((1.0, 101.0), (1.0, 2.0))):
        output = Output("l2", per_step=False, size=2, shift=shift, scale=scale)
        logits = y + 1 if not shift else (y + 1 - torch.tensor(shift)) / torch.tensor(scale)
        found.append(batch_means(output, sums(output, logits, Targets(y, torch.ones(4))), 4))
    assert found[0]["r2"] == pytest.approx(1 - 1 / float(y.var(unbiased=False)))
    assert found[1]["r2"] == pytest.approx(found[0]["r2"])
