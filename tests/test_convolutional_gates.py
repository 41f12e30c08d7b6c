"""Hyena and H3: long convolutions between gates, against sums over steps and the published code."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from spt.models import hyena
from spt.models.mixer import Context

ARRAYS = Path(__file__).parent / "arrays"
B, L, D = 2, 13, 4


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def everything_valid(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def spread(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def affine(layer, x):
    return x @ layer.weight.T + layer.bias


def convolve(kernels, skip, u):
    """Sums over the steps before and, with the second kernel, after: its entry l is that of lag l + 1."""
    y = skip * u
    for t in range(L):
        for s in range(L):
            if s <= t:
                y[:, t] = y[:, t] + kernels[0][:, t - s] * u[:, s]
            elif len(kernels) == 2:
                y[:, t] = y[:, t] + kernels[1][:, s - t - 1] * u[:, s]
    return y


def agree(ours, expected, parameters):
    assert (ours - expected).abs().max() < 1e-12 * expected.abs().max()
    weight = torch.cos(torch.arange(float(D)))
    grads = [torch.autograd.grad((y * weight).sum(), parameters) for y in (ours, expected)]
    for mine, theirs in zip(*grads, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


def published(name):
    """tests/arrays/README.md says how the arrays were made."""
    return {key: torch.from_numpy(array) for key, array in np.load(ARRAYS / f"{name}.npz").items()}


def same_as(layer, parameters, theirs, x, y):
    """Output and gradients, of sum of y cos(feature)."""
    ours = layer(x, everything_valid(x))
    assert float((ours.detach() - y).abs().max()) < 1e-12 * float(y.abs().max())
    (ours * torch.cos(torch.arange(float(ours.shape[-1])))).sum().backward()
    for name, key in parameters.items():
        grad = layer.get_parameter(name).grad
        expected = theirs[key].reshape(grad.shape)
        assert torch.allclose(grad, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max())), name


# -------------------------------------------------------------------------------------------------------------- Hyena


def hyena_layer(order=2, causal=True, longest=16):
    torch.manual_seed(3)
    config = hyena.Config(
        d_model=D, causal=causal, order=order, d_filter=6, bands=2, max_length=longest, feed_forward="none"
    )
    return spread(hyena.Hyena(config))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", [2, 3])
def test_hyena_is_its_papers_recurrence(order, causal):
    layer = hyena_layer(order, causal)
    x, kernel = torch.randn(B, L, D), layer.filters.kernel
    features = kernel.z[:L]
    for i in range(3):
        features = torch.sin(kernel.frequency * affine(kernel.maps[i], features))
    h = (features @ kernel.last.weight.T).T.reshape(1 if causal else 2, order - 1, D, L)
    slow, fast = (math.log(100) / time for time in (1.5, 0.3))
    decay = torch.linspace(slow, fast, (order - 1) * D).reshape(order - 1, D, 1)
    h = h * torch.exp(-decay * torch.arange(float(L)) / 15)
    u, projected = affine(layer.enter, x), []
    for t in range(L):
        lags = range(3) if causal else range(-1, 2)
        near = [w * u[:, t - lag] for w, lag in zip(layer.short.weight, lags, strict=True) if 0 <= t - lag < L]
        projected.append(sum(near) + layer.short.bias)
    *gates, v = torch.stack(projected, 1).split(D, -1)
    for n in range(order - 1):
        v = convolve(h[:, n], layer.filters.D.reshape(order - 1, D)[n], gates[order - 1 - n] * v)
    agree(layer(x, everything_valid(x)), affine(layer.leave, gates[0] * v), list(layer.parameters()))


@pytest.mark.parametrize("order", [2, 3])
def test_hyena_is_the_published_code(order):
    everything = published("hyena")
    arrays = {key[2:]: array for key, array in everything.items() if key.startswith(f"{order}.")}
    layer = hyena_layer(order)
    kernel, implicit = "filters.kernel.", "filter_fn.implicit_filter."
    names = {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")
             for ours, theirs in (("enter", "in_proj"), ("leave", "out_proj"), ("short", "short_filter"),
                                  *((f"{kernel}maps.{i}", f"{implicit}{2 * i}") for i in range(3)))}  # fmt: skip
    names |= {"filters.D": "filter_fn.bias", kernel + "z": "filter_fn.pos_emb.z"}
    names |= {kernel + "last.weight": implicit + "6.weight", kernel + "frequency": implicit + "1.freq"}
    state = {ours: arrays[theirs].reshape(layer.get_parameter(ours).shape) for ours, theirs in names.items()}
    for part in ("", "d."):  # theirs begins with the earliest step
        arrays[part + "short_filter.weight"] = arrays[part + "short_filter.weight"][:, 0].T.flip(0)
    state["short.weight"] = arrays["short_filter.weight"]
    layer.load_state_dict(state)
    same_as(layer, {ours: "d." + theirs for ours, theirs in names.items()}, arrays, everything["x"], arrays["y"])
    assert torch.allclose(layer.filters.kernel.t, arrays["filter_fn.pos_emb.t"][0])


def test_filters_of_hyena_start_as_published():
    theirs = published("hyena")
    kernel = hyena.HyenaFilter(hyena.Config(d_model=D, causal=True, bands=2, max_length=16))
    assert torch.allclose(kernel.decay, theirs["2.filter_fn.modulation.deltas"][0, 0].abs())
    assert float(kernel.frequency.detach().mean()) == 14.0


def test_a_shorter_sequence_has_the_beginning_of_the_filter():
    layer = hyena_layer(causal=False)
    kernel = layer.filters.kernel
    assert torch.equal(kernel(5), kernel(16)[..., :5])
    assert kernel(40).shape[-1] == 16, "and a longer one no more than there is"
