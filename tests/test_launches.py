"""Launches of a training step, which on a GPU cost time whatever their size: they may only become fewer."""

import pytest
import torch

from spt.bench.launches import LaunchCounter, launches
from spt.bench.models import parse_models

# Forward, backward, clipping and update at 1,024 steps with 6 layers.
MOST = {"dlr": 353, "dss": 475, "lru": 434, "mega": 1201, "s4": 677, "s4d": 522, "s5": 525, "transformer": 441}


@pytest.mark.parametrize("model", MOST)
def test_a_step_launches_at_most_so_much(model):
    (variant,) = parse_models([model], layers=6, length="1024", batch="2")
    counts = launches(variant)
    assert counts is not None and min(counts.values()) > 0
    assert sum(counts.values()) <= MOST[model]


def test_what_computes_is_counted_and_what_looks_is_not():
    x = torch.randn(3, 4)
    with LaunchCounter("cpu") as counter:
        x.T.reshape(2, 6)[0].view(3, 2).add_(torch.empty(2))
        torch.cat([x.detach(), x.exp()])[0].expand(2, 4)
    assert counter.counts == {"clone": 1, "add_": 1, "exp": 1, "cat": 1}


def test_numbers_of_the_host_are_no_launches():
    x = torch.empty(3, device="meta")
    with LaunchCounter() as counter:
        x * (torch.tensor(2.0) + 1)
    assert counter.counts == {"mul": 1}


def test_where_shapes_do_not_tell_nothing_is_counted():
    variants = parse_models(["rnn", "s4"], layers=1, length="16", batch="2", backend="torch,keops")
    assert [launches(variant) is None for variant in variants] == [True, True, False, True]


def test_dropout_is_part_of_the_count():
    plain, more = parse_models(["s4", "s4", "dropout=0.1"], layers=1, length="32", batch="2")
    assert sum(launches(more).values()) > sum(launches(plain).values())
