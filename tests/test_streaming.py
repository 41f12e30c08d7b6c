"""A recurrent model step by step: after the last step it answers as it does to the whole sequence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_trained_model import CPU

from spt.checks.model_contract import WIDTH
from spt.config.plugins import find_plugin, listing
from spt.config.recipe import EncoderConfig, HeadConfig, Part
from spt.errors import DataError, UsageError
from spt.inference.trained_model import TrainedModel
from spt.models.base import Unsupported
from spt.tasks.base import Classes, Reals, Tokens, Values
from spt.training.build import Architecture, build_network
from spt.training.objectives import Output

TOKENS, VALUES = Tokens(7), Values(2, (1.0, -1.0), (2.0, 0.5))
LENGTH = 24


def untrained(name, input=TOKENS, *, pool="mean", per_step=False, sequences=1, encoder=None, **options):
    """A small network with random weights, as if it had been trained."""
    config = find_plugin("models", name).module.Config(d_model=WIDTH, n_layers=2, **options)
    part = Part(name=name, **config.model_dump(mode="json"))
    output = Output("cross_entropy", per_step, 1, 3, sequences=sequences)
    parts = Architecture(
        model=part, encoder=EncoderConfig(**(encoder or {})), head=HeadConfig(pool=pool, mlp=True), seed=0
    )
    return TrainedModel(
        network=build_network(parts, input, output, LENGTH).eval(),
        architecture=parts,
        input=input,
        target=Classes(3, per_step),
        output=output,
        length=LENGTH,
        sequences=sequences,
    )


NAMES = [row.name for row in listing("models") if row.source == "spt" and row.name != "hf"]


def built(name, *args, **options):
    """None of a model that cannot be causal."""
    try:
        return untrained(name, *args, causal=True, **options)
    except UsageError as error:
        assert isinstance(error.__cause__, Unsupported)
        return None


def sequence(input, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 7, length) if input is TOKENS else rng.normal(size=(length, 2)).astype(np.float32)


def close(a, b):
    return np.allclose(a, b, atol=2e-4 * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("name", NAMES)
def test_step_by_step_it_answers_as_at_once(name):
    """With every pooling, and so far after any number of steps; or it says that it cannot."""
    model = built(name)
    if model is None or not model.network.backbone.recurrent:
        assert name not in ("s4", "s4d", "s5", "lru", "mamba", "mamba2", "mingru", "rnn", "gla", "retnet", "xlstm")
        if model is not None:
            with pytest.raises(UsageError, match="no recurrent form"):
                model.stream()
        return
    for pool, input in (("mean", TOKENS), ("max", VALUES), ("last", VALUES)):
        model, row = built(name, input, pool=pool), sequence(input)
        stream = model.stream()
        answers = [stream(step) for step in row]
        for steps in (1, 7, LENGTH):
            assert close(answers[steps - 1], model.logits([row[:steps]], runtime=CPU)[0]), (pool, steps)
        assert close(stream.features, model.embed([row], runtime=CPU)[0])


@pytest.mark.parametrize("name", ["s4d", "mingru"])
def test_answers_of_steps_stream_too(name):
    model = untrained(name, per_step=True, causal=True)
    stream, row = model.stream(), sequence(TOKENS)
    assert close([stream(step) for step in row], model.logits([row], runtime=CPU)[0])


def test_streams_side_by_side_do_not_meet():
    model = untrained("s5", VALUES, causal=True)
    rows = np.stack([sequence(VALUES, seed=seed) for seed in range(3)])
    stream = model.stream(batch=3)
    for t in range(LENGTH):
        together = stream(rows[:, t])
    assert close(together, model.logits(rows, runtime=CPU)) and stream.features.shape == (3, WIDTH)


def test_a_stream_begins_again():
    model = untrained("lru", causal=True)
    stream, row = model.stream(), sequence(TOKENS)
    first = [stream(step) for step in row]
    stream.restart()
    assert stream.steps == 0 and np.array_equal(first, [stream(step) for step in row])


def test_one_channel_may_be_a_number():
    model = untrained("lru", Values(1), causal=True)
    row = np.linspace(-1, 1, LENGTH)
    a, b = model.stream(), model.stream()
    assert all(np.array_equal(a(float(step)), b([step])) for step in row)
    assert close(a.features, model.embed([row], runtime=CPU)[0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: untrained("s4d"), "two-sided, so that an answer depends on later steps"),
        (lambda: untrained("transformer", causal=True), "no recurrent form"),
        (lambda: untrained("s4d", causal=True, max_kernel_length=8), "no recurrent form"),
        (lambda: untrained("s4d", causal=True, sequences=2), "pairs of sequences"),
        (lambda: replace(untrained("s4d", causal=True), timed=True), "times between steps"),
        (lambda: untrained("s4d", VALUES, causal=True, encoder={"positions": "circle"}), "circle depends on how long"),
        (lambda: untrained("s4d", causal=True, per_step=True, pool="last"), "answered from the last one"),
    ],
)
def test_a_model_that_cannot_stream_says_why(model, message):
    with pytest.raises(UsageError, match=message) as caught:
        model().stream()
    assert "\n" not in str(caught.value)


def test_what_is_no_step_is_refused():
    stream = untrained("s4d", causal=True).stream()
    with pytest.raises(UsageError, match="no step yet"):
        _ = stream.features
    for step, message in ((7, "from 0 to 6"), (-1, "from 0 to 6"), ("a", "not trained|numbers"), ([1, 2], "one token")):
        with pytest.raises(DataError, match=message):
            stream(step)
    assert stream.steps == 0
    values = untrained("s4d", VALUES, causal=True)
    with pytest.raises(DataError, match="2 numbers"):
        values.stream()([1.0, 2.0, 3.0])
    with pytest.raises(DataError, match="one of 2 sequences, but the stream has 3"):
        values.stream(batch=3)([[1.0, 2.0], [1.0, 2.0]])
    with pytest.raises(UsageError, match="batch is 0"):
        values.stream(batch=0)


def test_no_gradient_is_kept():
    model = untrained("s4d", causal=True)
    stream = model.stream()
    stream(1)
    assert not any(
        x.requires_grad for x in torch.utils._pytree.tree_leaves(stream._state) if isinstance(x, torch.Tensor)
    )


@pytest.mark.parametrize("loss", ["l2", "gaussian"])
def test_numbers_come_in_the_units_of_the_target(loss):
    plain = untrained("s4d", VALUES, causal=True)
    output = Output(loss, False, 1, shift=(80.0,), scale=(12.0,))
    network = build_network(plain.architecture, VALUES, output, LENGTH).eval()
    model = replace(plain, network=network, target=Reals(1), output=output)
    stream, rows = model.stream(), sequence(VALUES)
    answer = [stream(step) for step in rows][-1]
    assert answer.shape == (1,)
    assert np.allclose(answer, model.predict([rows], runtime=CPU)[0], atol=1e-3)
