"""Models that others are held against: recurrent networks, local convolutions, an MLP over time, no mixing at all."""

import pytest
import torch
import torch.nn.functional as F

from spt.models import bag_of_steps, rnn, tcn, time_mixer
from spt.models.base import Unsupported
from spt.models.mixer import Context

B, D = 2, 6


def context(*lengths: int) -> Context:
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Context(valid, padded=len(set(lengths)) > 1)


def of(module, **options):
    torch.manual_seed(1)
    return module.build(module.Config(**{"d_model": D, "n_layers": 2, **options}))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_recurrent_layer_is_its_equations(cell, causal):
    """Cho et al. 2014, equations 5 to 8; Hochreiter and Schmidhuber 1997 with a forget gate; torch's order of gates."""
    layer = next(iter(of(rnn, cell=cell, causal=causal, expansion=2).mixers)).double()
    x, P = torch.randn(B, 9, D, dtype=torch.float64), 2 * D
    states = []
    for suffix in [""] if causal else ["", "_reverse"]:
        w, v, b, c = (
            getattr(layer.cell, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = memory = torch.zeros(B, P, dtype=torch.float64)
        walk = {}
        for t in reversed(range(9)) if suffix else range(9):
            read, kept = (part.chunk(layer.gates, -1) for part in (x[:, t] @ w.T + b, h @ v.T + c))
            if cell == "gru":
                r, z = (torch.sigmoid(read[k] + kept[k]) for k in (0, 1))
                h = (1 - z) * torch.tanh(read[2] + r * kept[2]) + z * h
            else:
                i, f, o = (torch.sigmoid(read[k] + kept[k]) for k in (0, 1, 3))
                memory = f * memory + i * torch.tanh(read[2] + kept[2])
                h = o * torch.tanh(memory)
            walk[t] = h
        states.append(torch.stack([walk[t] for t in range(9)], 1))
    expected = layer.leave(torch.cat(states, -1))
    layer.cell.flatten_parameters()
    with torch.no_grad():
        ours = layer.leave(layer.cell(x)[0])
        assert float((ours - expected).abs().max()) < 1e-12
        single = layer.float()(x.float(), context(9, 9))
        assert float((single - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(("causal", "before", "after"), [(True, 28, 0), (False, 14, 14)])
def test_a_tcn_sees_as_far_as_its_dilations_reach(causal, before, after):
    """Three blocks of two convolutions over three steps: 2 (1 + 2 + 4) 2 = 28 steps in all."""
    model = of(tcn, causal=causal, n_layers=3, norm="none").double()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)  # so that no ReLU is off
    x = torch.rand(1, 81, D, dtype=torch.float64, requires_grad=True)
    model(x, context(81))[0, 40].sum().backward()
    seen = x.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert (seen[0], seen[-1]) == (40 - before, 40 + after)


def test_a_tcn_begins_again_after_a_cycle():
    model = of(tcn, n_layers=5, cycle=2)
    assert [mixer.first.distance for mixer in model.mixers] == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="kernel_size 4 has no middle"):
        tcn.Config(kernel_size=4)
    assert tcn.Config(kernel_size=4, causal=True).kernel_size == 4


def test_a_convolution_is_a_sum_over_its_steps():
    layer, x = (
        tcn.Convolution(D, 4, width=3, distance=2, causal=True).double(),
        torch.randn(1, D, 9, dtype=torch.float64),
    )
    y = layer(x)
    for t in range(9):
        expected = layer.bias.clone()
        for j in range(3):
            if (at := t - 2 * (2 - j)) >= 0:
                expected = expected + layer.weight[:, :, j] @ x[0, :, at]
        assert torch.allclose(y[0, :, t], expected, atol=1e-12)


def test_a_mixer_over_time_is_one_map_for_all_features():
    model = of(time_mixer, max_length=12, d_time=5, feed_forward="none")
    layer, x = next(iter(model.mixers)), torch.randn(B, 12, D)
    y = layer(x, context(12, 12))
    for d in range(D):
        assert torch.allclose(y[..., d], layer.spread(F.gelu(layer.mix(x[..., d]))), atol=1e-6)
    swapped = x.flip(-1)
    assert torch.allclose(layer(swapped, context(12, 12)), y.flip(-1), atol=1e-6)
    assert not torch.allclose(layer(x.flip(1), context(12, 12)), y.flip(1), atol=1e-3), "places differ"
    with pytest.raises(Unsupported, match="cannot be causal"):
        of(time_mixer, max_length=12, causal=True)


def test_a_bag_of_steps_knows_no_order():
    model, x = of(bag_of_steps), torch.randn(B, 7, D)
    order = torch.randperm(7)
    assert torch.allclose(model(x[:, order], context(7, 7)), model(x, context(7, 7))[:, order], atol=1e-6)
    assert of(bag_of_steps, causal=True).recurrent
