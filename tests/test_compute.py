"""Budgets, operations, schedules and parameter groups, by hand."""

import itertools
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import loaded, own_task, run, spt_job
from torch import nn

from spt.config.budget import Duration, compare_budgets, example_count, expected_longest, total_steps
from spt.config.job import Job
from spt.config.load import packaged, resolve
from spt.config.recipe import Train
from spt.config.yaml import parse_yaml
from spt.models.base import ParamGroup
from spt.runs.result import Ledger
from spt.runtime.memory import peak_memory, reset_peak_memory
from spt.training.build import build_stage
from spt.training.optimizer import adamw, factor, optimizer_groups, set_rates


def train(**options):
    return Train(**{"batch_size": 32, "learning_rate": 0.1, **options})


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 1.0}, 10),  # 300 rows in batches of 32: nine whole ones and one of 12
        ({"epochs": 240.0}, 2400),
        ({"epochs": 0.01}, 1),
        ({"epochs": 1.05}, 11),
        ({"examples": 300}, 10),
        ({"examples": 301}, 11),
        ({"examples": 288}, 9),
        ({"examples": 72000}, 2400),
        ({"flops": 50.0 * 300}, 10),  # 50 operations an example, forward and backward
        ({"flops": 50.0 * 300 + 1}, 11),
        ({"flops": 1.0}, 1),
    ],
)
def test_budgets_in_steps(budget, steps):
    assert total_steps(train(**budget), 300, 50.0) == steps


def test_examples_of_steps():
    assert [example_count(s, 300, 32) for s in (1, 9, 10, 11, 20)] == [32, 288, 300, 332, 600]


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 2000))
def test_an_example_budget_is_met_by_the_fewest_steps(n, batch_size, examples):
    steps = total_steps(train(examples=examples, batch_size=batch_size), n, 1.0)
    assert example_count(steps, n, batch_size) >= examples
    assert steps == 1 or example_count(steps - 1, n, batch_size) < examples


def test_the_ledger_counts_what_was_done(tmp_path):
    """Steps, examples, positions and operations of a task with padding, against a recount by hand."""
    one = own_task(tmp_path, finetune__train__steps=6, finetune__train__batch_size=16)
    job = Job(one, "finetune", 0)
    result = run(job, tmp_path / "runs")
    from spt.data.batching import training_rows

    setup = build_stage(job)
    lengths, model = setup.data.train.lengths, setup.model
    batches = [rows for _, (_, rows) in zip(range(6), training_rows(40, 16, 0, 0), strict=False)]
    assert result.own.steps == 6 and result.own.examples == 80 == sum(map(len, batches))
    assert result.own.positions == 2 * lengths.sum()
    spent = [model.batch_flops(len(rows), int(lengths[rows].max())) for rows in batches]
    assert result.own.flops == sum(counts.forward + counts.backward for counts in spent)
    assert result.own.operations == sum(spent).by_kind() and sum(result.own.operations.values()) == result.own.flops
    assert result.own.seconds > 0 and result.own.peak_bytes > 0


def test_total_cost_includes_pretraining(tmp_path):
    one = loaded(tmp_path)
    job = spt_job(one)
    result, pretrained = run(job, tmp_path / "runs"), run(job.parent, tmp_path / "runs")
    assert result.total == result.own + pretrained.own
    assert result.total.flops > result.own.flops


def test_ledgers_add_up():
    one = Ledger(steps=1, flops=2.0, operations={"linear": 2.0}, peak_bytes=5)
    two = Ledger(steps=2, flops=4.0, operations={"scan": 1.0, "linear": 3.0}, seconds=3.0, peak_bytes=4)
    total = one + two
    assert total == Ledger(steps=3, flops=6.0, operations={"linear": 5.0, "scan": 1.0}, seconds=3.0, peak_bytes=5)
    assert one.operations == {"linear": 2.0}


def test_ledgers_written_before_kinds_were_told_can_be_read():
    old = Ledger.model_validate_json('{"steps": 2, "flops": 6.0}')
    assert old.operations == {} and (old + Ledger(operations={"linear": 1.0})).operations == {"linear": 1.0}


def test_peak_memory_sees_an_allocation():
    device = torch.device("cpu")
    reset_peak_memory(device)
    before = peak_memory(device)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory(device) - before >= 60 << 20
    del block


def test_schedules():
    cosine = train(steps=100, schedule="cosine", warmup_steps=10)
    rates = [factor(step, 100, cosine) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert (
        rates[10] == 1.0
        and rates[55] == pytest.approx(0.5)
        and rates == [*rates[:10], *sorted(rates[10:], reverse=True)]
    )
    assert rates[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    longer = train(steps=100, schedule="cosine", warmup_steps=10, cosine_steps=190)
    assert factor(100, 190, cosine) == factor(100, 101, longer) == pytest.approx(0.5)  # halfway from 10 to 190
    assert factor(150, 200, train(epochs=2, schedule="cosine", cosine_steps=100)) == 0.0
    constant = train(steps=100, warmup_fraction=0.05)
    assert [factor(step, 100, constant) for step in (0, 4, 5, 99)] == [0.2, 1.0, 1.0, 1.0]
    assert factor(0, 1, train(steps=1, schedule="cosine")) == 1.0


class Declared(nn.Module):
    param_groups: ClassVar = {"special": ParamGroup(lr=1e-4), "slow": ParamGroup(lr_scale=0.5, weight_decay=True)}

    def __init__(self):
        super().__init__()
        self.special, self.slow = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
        self.inner = nn.Linear(4, 5)


def test_groups_are_what_the_model_declares():
    model = nn.ModuleDict({"a": Declared(), "b": nn.LayerNorm(4)})
    made = {}
    for group in optimizer_groups(model, train(steps=1, weight_decay=0.3)):
        made |= dict.fromkeys(group.names, (group.learning_rate, group.weight_decay))
    assert made == {
        "a.special": (1e-4, 0.0),
        "a.slow": (0.05, 0.3),
        "a.inner.weight": (0.1, 0.3),
        "a.inner.bias": (0.1, 0.0),
        "b.weight": (0.1, 0.0),
        "b.bias": (0.1, 0.0),
    }
    everything = optimizer_groups(model, train(steps=1, weight_decay=0.3, weight_decay_on="all"))
    assert {name for group in everything if group.weight_decay == 0 for name in group.names} == {"a.special"}


def test_every_parameter_is_in_one_group(tmp_path):
    model = build_stage(spt_job(loaded(tmp_path))).model
    names = [name for group in optimizer_groups(model, train(steps=1)) for name in group.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_warm_up_scales_every_groups_own_rate():
    options = train(steps=10, warmup_steps=10)
    optimizer = adamw(Declared(), options, torch.device("cpu"))
    set_rates(optimizer, 4, 10, options)
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([5e-5, 0.025, 0.05])


def test_budgets_without_incomplete_batches():
    """70 rows in batches of 16: an epoch shows 64 of them."""
    left_out = {"batch_size": 16, "drop_last": True}
    assert total_steps(train(epochs=2, **left_out), 70, 1.0) == 8
    assert total_steps(train(examples=128, **left_out), 70, 1.0) == 8
    assert total_steps(train(examples=129, **left_out), 70, 1.0) == 9
    assert [example_count(s, 70, 16, True) for s in (3, 4, 5)] == [48, 64, 80]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_batch_is_foreseen_as_long_as_its_longest(batch):
    """The mean over all draws, with replacement."""
    lengths = np.array([3, 4, 4, 9, 12])
    expected = np.mean([max(draw) for draw in itertools.product(lengths, repeat=batch)])
    assert expected_longest(lengths, batch) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------------ both arms


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (((300, 3), (100, 1), (200, 2)), "in all as many updates and as many epochs as scratch"),
        (((17600, 200), (281400, 200), (17600, 200)), "in all 17 times as many updates and 2 times as many epochs as"),
        (((200, 2), (100, 1), (50, 0.5)), "in all 0.75 times as many updates and 0.75 times as many epochs as scratch"),
    ],
)
def test_how_long_the_arms_train_is_a_sentence(stages, told):
    sentence = compare_budgets(*(Duration(*stage) for stage in stages))
    assert told in sentence
    updates, epochs = stages[0]
    assert sentence.startswith(f"scratch trains for {updates:,} updates ({epochs} epochs); SPT pretrains for")
    assert ("(1 epoch)" in sentence) == (stages[1][1] == 1)


OWN = {name: text for name, text in packaged().items() if name.startswith(("quickstart", "small/"))}


@pytest.mark.parametrize("name", OWN)
def test_scratch_of_our_own_recipes_trains_as_long_as_both_stages(name):
    """As docs/fairness.md says: as many epochs, in batches of one size."""
    recipe = resolve(parse_yaml(OWN[name], name), name)[0]
    scratch, *stages = (recipe.train(section) for section in ("scratch", "pretrain", "finetune"))
    assert scratch.epochs == sum(train.epochs for train in stages)
    assert {train.batch_size for train in stages} == {scratch.batch_size}
