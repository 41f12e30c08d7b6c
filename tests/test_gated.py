"""Gated recurrences: each against its paper's equations as a loop in double precision."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.models import hgrn, mingru, minlstm, rglru
from spt.models.gated import ShortConvolution
from spt.models.mixer import Context

ARRAYS = Path(__file__).parent / "arrays"
B, L, D = 2, 37, 6
GATED = {"mingru": mingru, "minlstm": minlstm, "rglru": rglru, "hgrn": hgrn}
SIZES = {"rglru": {"blocks": 2, "d_hidden": 8}, "hgrn": {"expansion": 2}, "mingru": {"expansion": 2}}


def mixer(name: str, causal: bool = True, dtype=torch.float64, **options):
    """The last mixer but one, which has a layer before it, with parameters well spread."""
    torch.manual_seed(3)
    config = GATED[name].Config(
        **{"d_model": D, "n_layers": 3, "causal": causal, "feed_forward": "none", **SIZES.get(name, {}), **options}
    )
    layer = list(GATED[name].build(config).mixers)[1].to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if name == "hgrn":
            layer.shared[0].to(dtype).Gamma.normal_()
    return layer


def everything_valid(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def g(x):
    return torch.where(x >= 0, x + 0.5, 1 / (1 + torch.exp(-x)))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def affine(layer, x):
    return x @ layer.weight.T + layer.bias


def loop(name, layer, x, k):
    """h_t of direction k, from the equations."""
    P = layer.lru[k].Lambda.numel() if name == "rglru" else layer.enter[k].out_features // {"mingru": 2}.get(name, 3)
    h = torch.zeros(B, P, dtype=torch.complex128 if name == "hgrn" else torch.float64)
    order = range(L - 1, -1, -1) if k else range(L)
    states = {}
    for place, t in enumerate(order):
        if name == "rglru":
            lru, u = layer.lru[k], torch.zeros(B, P, dtype=torch.float64)
            for j, weight in enumerate(lru.convolution.weight):
                if 0 <= (at := t + j if k else t - j) < L:
                    u = u + weight * affine(layer.enter, x[:, at])
            u = u + lru.convolution.bias
            gates = [
                torch.cat([part @ w for part, w in zip(u.chunk(len(gate.weight), -1), gate.weight, strict=True)], -1)
                + gate.bias
                for gate in (lru.recurrence_gate, lru.input_gate)
            ]
            a = (sigmoid(-lru.Lambda)) ** (8 * sigmoid(gates[0]))  # sigmoid(-Lambda) is exp(-softplus(Lambda))
            h = a * h + (torch.sqrt(1 - a**2) if place else 1) * sigmoid(gates[1]) * u
        else:
            parts = affine(layer.enter[k], x[:, t])
            if name == "mingru":
                z, candidate = sigmoid(parts[:, :P]), parts[:, P:]
                h = (1 - z) * h + z * (g(candidate) if layer.candidate == "positive" else candidate)
            elif name == "minlstm":
                forget, enter = sigmoid(parts[:, :P]), sigmoid(parts[:, P : 2 * P])
                h = (forget * h + enter * g(parts[:, 2 * P :])) / (forget + enter)
            else:
                weights = torch.exp(layer.shared[0].Gamma[:, k])
                bound = (weights / weights.sum(0))[: layer.layer].sum(0)
                kept = bound + (1 - bound) * sigmoid(parts[:, 2 * P :])
                real, imaginary = parts[:, :P], parts[:, P : 2 * P]
                c = real * sigmoid(real) + 1j * imaginary * sigmoid(imaginary)
                h = kept * torch.exp(1j * layer.theta[k]) * h + (1 - kept) * c
        states[t] = h
    return torch.stack([states[t] for t in range(L)], 1)


def output(name, layer, x, states):
    if name == "rglru":
        return affine(layer.leave, F.gelu(affine(layer.gate, x), approximate="tanh") * sum(states))
    if name != "hgrn":
        return affine(layer.leave, torch.cat(states, -1))
    gate = affine(layer.gate, x)
    parts = gate * sigmoid(gate) * torch.cat([part for h in states for part in (h.real, h.imag)], -1)
    centred = parts - parts.mean(-1, keepdim=True)
    normal = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return affine(layer.leave, normal * layer.norm.weight + layer.norm.bias)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", GATED)
def test_a_layer_is_its_papers_recurrence(name, causal):
    layer, x = mixer(name, causal), torch.randn(B, L, D, dtype=torch.float64)
    expected = output(name, layer, x, [loop(name, layer, x, k) for k in range(1 if causal else 2)])
    ours = layer(x, everything_valid(x))
    assert (ours - expected).abs().max() < 1e-12 * expected.abs().max()
    gradients = [
        torch.autograd.grad((y * torch.cos(torch.arange(D))).sum(), list(layer.parameters())) for y in (ours, expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


def test_a_linear_candidate_is_section_3_1():
    layer, x = mixer("mingru", candidate="linear"), torch.randn(B, L, D, dtype=torch.float64)
    expected = output("mingru", layer, x, [loop("mingru", layer, x, 0)])
    assert torch.allclose(layer(x, everything_valid(x)), expected, rtol=0, atol=1e-12)
    assert layer.mix_states(x)[0].min() < 0 < mixer("mingru").mix_states(x)[0].min(), "positive states stay positive"


@pytest.mark.parametrize("name", GATED)
def test_saturated_gates_have_finite_gradients(name):
    """Arguments of +-1000: nothing is forgotten, or everything."""
    layer = mixer(name, causal=False, dtype=torch.float32)
    x = 1000 * torch.randn(B, L, D)
    layer(x, everything_valid(x)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_gates_of_minlstm_add_up_to_one_and_remember_with_a_bias():
    plain, biased = (mixer("minlstm", forget_bias=bias) for bias in (0.0, 4.0))
    x = torch.randn(B, L, D, dtype=torch.float64)
    a, biased_a = (layer.coefficients(x, 0).a.mean() for layer in (plain, biased))
    assert biased_a > a + 0.1
    P = plain.enter[0].out_features // 3
    untouched = [each.enter[0].bias for each in (plain, biased)]
    assert torch.allclose(untouched[0][P:], untouched[1][P:]) and torch.allclose(untouched[0][:P] + 4, untouched[1][:P])


def test_rglru_is_the_published_code():
    """tests/arrays/README.md says how the arrays were made."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(ARRAYS / "rglru.npz").items()}
    config = rglru.Config(d_model=6, d_hidden=8, blocks=2, n_layers=1, causal=True, feed_forward="none")
    layer = rglru.RGLRU(config).double()
    block, lru = "lru.0.", "rg_lru."
    names = {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")
             for ours, theirs in (("gate", "linear_y"), ("enter", "linear_x"), ("leave", "linear_out"))}  # fmt: skip
    names |= {block + "convolution.bias": "conv_1d.b", block + "Lambda": lru + "a_param"}
    for ours, theirs in (("recurrence_gate", "a_gate"), ("input_gate", "input_gate")):
        names |= {f"{block}{ours}.weight": f"{lru}{theirs}.w", f"{block}{ours}.bias": f"{lru}{theirs}.b"}
    state = {ours: arrays[theirs].reshape(layer.get_parameter(ours).shape) for ours, theirs in names.items()}
    state[block + "convolution.weight"] = arrays["conv_1d.w"].flip(0)  # theirs begins with the earliest step
    layer.load_state_dict(state)
    ours = layer(arrays["x"], everything_valid(arrays["x"])).detach()
    assert float((ours - arrays["y"]).abs().max()) < 1e-12 * float(arrays["y"].abs().max())


def test_rglru_starts_on_its_ring():
    lru = rglru.Direction(rglru.Config(d_model=512, d_hidden=512))
    a = torch.exp(-F.softplus(lru.Lambda.detach().double()))
    assert 0.9 <= a.min() < 0.91 and 0.995 < a.max() <= 0.999 + 1e-6
    assert float((a**2).mean()) == pytest.approx((0.81 + 0.998) / 2, abs=0.01), "uniform in area"
    assert float(lru.convolution.weight.detach().std()) == pytest.approx(math.sqrt(0.01 / 4), rel=0.1)
    assert not lru.convolution.bias.any()


@pytest.mark.parametrize(("width", "states"), [(128, 168), (16, 24), (6, 8), (96, 128)])
def test_states_of_rglru_are_four_thirds_of_the_width(width, states):
    assert rglru.Config(d_model=width).states == states
    with pytest.raises(ValueError, match="d_hidden 9 is not a multiple of blocks 8"):
        rglru.Config(d_hidden=9)


def test_hgrn_keeps_more_in_deeper_layers():
    model = hgrn.build(hgrn.Config(d_model=D, n_layers=4, causal=True, feed_forward="none"))
    bounds = [float(layer.shared[0](layer.layer, 0).detach().mean()) for layer in model.mixers]
    assert bounds == pytest.approx([0, 0.25, 0.5, 0.75])
    assert sum("Gamma" in name for name, _ in model.named_parameters()) == 1
    x = torch.randn(B, 5, D)
    model(x, everything_valid(x)).sum().backward()
    gamma = next(parameter for name, parameter in model.named_parameters() if "Gamma" in name)
    assert gamma.grad.abs().sum() > 0


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 12), width=st.integers(1, 6), reverse=st.booleans(), bias=st.booleans())
def test_a_short_convolution_is_torchs(length, width, reverse, bias):
    layer, u = ShortConvolution(3, width, std=1.0, bias=bias).double(), torch.randn(2, length, 3, dtype=torch.float64)
    u.requires_grad_()
    v = (u.flip(1) if reverse else u).transpose(1, 2)
    kernel = layer.weight.flip(0).T[:, None]
    expected = F.conv1d(F.pad(v, (width - 1, 0)), kernel, layer.bias, groups=3).transpose(1, 2)
    expected = expected.flip(1) if reverse else expected
    ours = layer(u, reverse=reverse)
    assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-12)
    weight, inputs = torch.randn_like(ours), [u, *layer.parameters()]
    found, truth = (torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, expected))
    assert all(torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12) for mine, theirs in zip(found, truth, strict=True))
    state, steps = layer.initial_state(2), []
    for t in range(length):
        y, state = layer.step(u[:, t], state)
        steps.append(y)
    if not reverse:
        assert torch.allclose(torch.stack(steps, 1), ours, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", GATED)
def test_backward_directions_start_at_the_last_valid_step(name):
    """What padding holds, and how much there is, changes nothing."""
    layer, x = mixer(name, causal=False, dtype=torch.float32), torch.randn(1, 9, D)
    alone = layer(x, everything_valid(x))
    padded = torch.cat([x, torch.zeros(1, 20, D)], 1)
    valid = torch.arange(29)[None] < 9
    assert torch.allclose(layer(padded, Context(valid, padded=True))[:, :9], alone, atol=1e-5)


def test_operations_of_a_scan_of_real_numbers():
    from spt.models.gated import real_scan

    assert SimpleNamespace(**real_scan(10, 3).by_pass()["scan"]).forward == 60.0
