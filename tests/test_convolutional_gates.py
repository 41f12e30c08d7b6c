"""Hyena and H3: long convolutions between gates, against sums over steps and the published code."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from spt.models import h3, hyena, liquid_s4
from spt.models.longconv import cached_kernels
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
    # Not bit for bit: products of other sizes may be summed in another order.
    torch.testing.assert_close(kernel(5), kernel(16)[..., :5], rtol=1e-6, atol=1e-7)
    assert kernel(40).shape[-1] == 16, "and a longer one no more than there is"


@pytest.mark.parametrize("name", ["hyena", "h3", "liquid_s4"])
def test_micro_batches_share_a_kernel_and_its_gradient(name):
    """Two halves of a batch with one kernel, and the batch at once."""
    module = {"hyena": hyena, "h3": h3, "liquid_s4": liquid_s4}[name]
    torch.manual_seed(3)
    config = module.Config(d_model=D, n_layers=1, causal=False, max_length=16, feed_forward="none")
    model, x = spread(module.build(config)), torch.randn(4, L, D)

    def backward(part):
        (model(part, everything_valid(part)) * torch.cos(torch.arange(float(D)))).sum().backward()

    backward(x)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with cached_kernels(model, L) as announce_last_pass:
        backward(x[:2])
        announce_last_pass()
        backward(x[2:])
    for parameter, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


# ----------------------------------------------------------------------------------------------------------------- H3


def h3_layer(head_dim=1, causal=True):
    torch.manual_seed(3)
    config = h3.Config(d_model=D, causal=causal, head_dim=head_dim, d_state=6, feed_forward="none")
    return spread(h3.H3(config))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [1, 2])
def test_h3_is_its_papers_recurrence(d, causal):
    """States of both systems, step by step; backwards, outputs of a step come before what enters there."""
    layer, x = h3_layer(d, causal), torch.randn(B, L, D)
    q, k, v = affine(layer.enter, x).split(D, -1)
    shift, system = layer.shift.kernel, layer.diagonal.kernel
    A = torch.complex(-torch.exp(system.A_real), -system.A_imag)
    half = torch.exp(system.inv_dt) * A / 2
    enters = torch.exp(system.inv_dt) / (1 - half) * torch.view_as_complex(system.B)

    def shifted(u, state):
        return torch.cat([torch.zeros_like(state[..., :1]), state[..., :-1]], -1) + shift.B * u[..., None]

    def diagonal(u, state):
        return (1 + half) / (1 - half) * state + enters * u[..., None]

    def run(u, move, leaves, size):
        total = torch.zeros_like(u)
        for backwards in range(len(leaves)):
            state = torch.zeros(*u[:, 0].shape, size, dtype=leaves.dtype)
            for t in range(L - 1, -1, -1) if backwards else range(L):
                if backwards:
                    total[:, t] += (leaves[1] * state).sum(-1).real
                    state = move(u[:, t], state)
                else:
                    state = move(u[:, t], state)
                    total[:, t] += (leaves[0] * state).sum(-1).real
        return total

    k = run(k, shifted, shift.C, 6) + layer.shift.D * k
    y = torch.zeros_like(v)
    leaves = 2 * torch.view_as_complex(system.C)
    for i in range(d):  # of K and Q, in every head
        for j in range(d):  # of V
            product = k[..., i::d] * v[..., j::d]
            y[..., j::d] += q[..., i::d] * (run(product, diagonal, leaves, 3) + layer.diagonal.D * product)
    agree(layer(x, everything_valid(x)), affine(layer.leave, y), list(layer.parameters()))


@pytest.mark.parametrize("d", [1, 2])
def test_h3_is_the_published_code(d):
    """Theirs has modes of positive frequency, ours their conjugates; and in the last map, numbers by place in the head
    first."""
    everything = published("h3")
    arrays = {key[2:]: array for key, array in everything.items() if key.startswith(f"{d}.")}
    order = torch.arange(D).view(d, D // d).T.flatten()
    for part in ("", "d."):
        arrays[part + "output_linear.weight"] = arrays[part + "output_linear.weight"][:, order]
        for name in ("B", "C"):
            arrays[f"{part}kernel.kernel.{name}"] = arrays[f"{part}kernel.kernel.{name}"] * torch.tensor([1, -1])
        for name in ("weight", "bias"):
            arrays[f"{part}enter.{name}"] = torch.cat([arrays[f"{part}{each}_proj.{name}"] for each in "qkv"])
    names = {"shift.D": "ssm_k_D", "diagonal.D": "D", "enter.weight": "enter.weight", "enter.bias": "enter.bias"}
    names |= {"leave.weight": "output_linear.weight", "leave.bias": "output_linear.bias"}
    names |= {f"shift.kernel.{name}": f"ssm_k_kernel.kernel.{name}" for name in ("B", "C")}
    diagonal = {"inv_dt": "log_dt", "A_real": "inv_A_real", "A_imag": "A_imag", "B": "B", "C": "C"}
    names |= {f"diagonal.kernel.{ours}": f"kernel.kernel.{theirs}" for ours, theirs in diagonal.items()}
    layer = h3_layer(d)
    layer.load_state_dict({ours: arrays[key].reshape(layer.get_parameter(ours).shape) for ours, key in names.items()})
    same_as(layer, {ours: "d." + theirs for ours, theirs in names.items()}, arrays, everything["x"], arrays["y"])


def test_heads_of_h3_step_by_step_and_beside_padding():
    layer, x = h3_layer(2), torch.randn(B, L, D)
    state, ys = layer.initial_state(B), []
    for t in range(L):
        y, state = layer.step(x[:, t], state)
        ys.append(y)
    assert torch.allclose(torch.stack(ys, 1), layer(x, everything_valid(x)))
    layer, padded = h3_layer(2, causal=False), torch.cat([x, torch.zeros(B, 20, D)], 1)
    valid = (torch.arange(L + 20) < L).expand(B, -1)
    assert torch.allclose(layer(padded, Context(valid, padded=True))[:, :L], layer(x, everything_valid(x)))


def test_a_shift_starts_as_a_convolution():
    kernel = h3.ShiftKernel(h3.Config(d_model=D, causal=False, d_state=6))
    assert torch.equal(kernel(40), kernel.C), "what enters is the present"
    assert torch.equal(kernel(4), kernel.C[..., :4])
    with pytest.raises(ValueError, match="d_model 6 is not a multiple of head_dim 4"):
        h3.Config(d_model=6, head_dim=4)
