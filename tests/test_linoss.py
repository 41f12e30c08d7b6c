"""LinOSS: the second-order scan against loops, the layer against its paper's oscillators and the published code."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.models import linoss
from spt.models.mixer import Context
from spt.models.ops.second_order import second_order_scan

ARRAYS = Path(__file__).parent / "arrays"
B, L, D, P = 2, 37, 6, 5
KINDS = ["im", "imex"]


def layer_of(disc, causal=True, dtype=torch.float64):
    """With an oscillator of frequency zero (a double root), one close to that, and one with real roots under imex."""
    torch.manual_seed(3)
    layer = linoss.LinOSS(linoss.Config(d_model=D, d_state=P, causal=causal, disc=disc)).to(dtype)
    with torch.no_grad():
        layer.A_diag[:3] = torch.tensor([-0.3, 1e-9, 16.2])
        layer.steps[2] = 0.0
    return layer


def everything_valid(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def second_order(trace, determinant, b):
    ys = [torch.zeros_like(b[:, 0])] * 2
    for t in range(b.shape[1]):
        ys.append(trace * ys[-1] - determinant * ys[-2] + b[:, t])
    return torch.stack(ys[2:], 1)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 70), reverse=st.booleans())
def test_a_second_order_scan_is_its_loop(length, reverse):
    """Complex, double and real roots; their gradients are finite and those of the loop."""
    trace = torch.tensor([1.2, 2.0, 2.05, -1.9, 0.0], dtype=torch.float64, requires_grad=True)
    determinant = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, length, 5, dtype=torch.complex128, requires_grad=True)
    inputs = (trace, determinant, b)
    ours = second_order_scan(*inputs, reverse=reverse)
    expected = second_order(trace, determinant, b.flip(1) if reverse else b)
    expected = expected.flip(1) if reverse else expected
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-9 * float(expected.detach().abs().max()))
    weight = torch.randn_like(b)
    grads = [torch.autograd.grad((y * weight).real.sum(), inputs) for y in (ours, expected)]
    for mine, theirs in zip(*grads, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-8 * float(theirs.abs().max()))


def test_energy_is_kept_for_many_steps():
    """Roots on the unit circle: in single precision an impulse is as loud after 2^14 steps as the exact solution."""
    angle = torch.tensor([0.001, 0.1, 1.0, 3.0], dtype=torch.float64)
    trace, one = 2 * torch.cos(angle), torch.ones(4, dtype=torch.float64)
    b = torch.zeros(1, 1 << 14, 4, dtype=torch.complex64)
    b[:, 0] = 1
    lags = torch.arange(1, b.shape[1] + 1, dtype=torch.float64)[:, None]
    exact = torch.sin(lags * angle) / torch.sin(angle)
    ours = second_order_scan(trace, one, b)[0].real.double()
    assert float(((ours - exact).abs().amax(0) / exact.abs().amax(0)).max()) < 1e-4


def loop(layer, u, k):
    """y_t of direction k, by the equations for z and y; im solves for both."""
    A, dt = torch.relu(layer.A_diag), torch.sigmoid(layer.steps)
    z = y = torch.zeros(B, P, dtype=torch.complex128)
    states = {}
    for t in range(L - 1, -1, -1) if k else range(L):
        force = torch.complex(u[:, t] @ layer.B[..., 0].T, u[:, t] @ layer.B[..., 1].T)
        z = z + dt * (force - A * y)
        z = z / (1 + dt**2 * A) if layer.implicit else z
        y = y + dt * z
        states[t] = y
    return torch.stack([states[t] for t in range(L)], 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("disc", KINDS)
def test_a_layer_is_its_papers_oscillators(disc, causal):
    layer, x = layer_of(disc, causal), torch.randn(B, L, D, dtype=torch.float64)
    y = layer.D * x
    for k, C in enumerate(layer.C):
        y = y + (loop(layer, x, k) @ torch.view_as_complex(C).T).real
    v, w = (F.gelu(y, approximate="tanh") @ layer.output.linear.weight.T + layer.output.linear.bias).chunk(2, -1)
    expected, ours = v * torch.sigmoid(w), layer(x, everything_valid(x))
    assert (ours - expected).abs().max() < 1e-11 * expected.abs().max()
    grads = [
        torch.autograd.grad((y * torch.cos(torch.arange(D))).sum(), list(layer.parameters())) for y in (ours, expected)
    ]
    for mine, theirs in zip(*grads, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


@pytest.mark.parametrize("disc", KINDS)
def test_linoss_is_the_published_code(disc):
    """tests/arrays/README.md says how the arrays were made. A_diag is -0.3, 10, 1e-9, and two of the initial ones."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(ARRAYS / "linoss.npz").items()}
    mine = {name.removeprefix(disc + "."): array for name, array in arrays.items() if name.startswith(disc + ".")}
    layer = linoss.LinOSS(linoss.Config(d_model=4, d_state=5, causal=True, disc=disc)).double()
    names = ("A_diag", "steps", "B", "C", "D")
    state = {name: mine[name].reshape(layer.get_parameter(name).shape) for name in names}
    state |= {f"output.linear.{ours}": torch.cat([mine[f"{theirs}{i}"] for i in (1, 2)])
              for ours, theirs in (("weight", "w"), ("bias", "b"))}  # fmt: skip
    layer.load_state_dict(state)
    y = layer(arrays["x"], everything_valid(arrays["x"]))
    assert float((y.detach() - mine["y"]).abs().max()) < 1e-12 * float(mine["y"].abs().max())
    (y * torch.cos(torch.arange(4, dtype=torch.float64))).sum().backward()
    for name in names:
        theirs = mine["d" + name]
        found = layer.get_parameter(name).grad.reshape(theirs.shape)
        assert torch.allclose(found, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max())), name


@pytest.mark.parametrize("disc", KINDS)
def test_im_damps_and_imex_does_not(disc):
    layer = layer_of(disc)
    A, dt, S = layer.oscillators()
    largest = torch.linalg.eigvals(
        torch.stack([torch.stack([S, -S * dt * A], -1), torch.stack([S * dt, 1 - S * dt * dt * A], -1)], -2)
    ).abs().amax(-1)[3:]  # fmt: skip
    assert bool((largest < 1).all()) if disc == "im" else torch.allclose(largest, torch.ones_like(largest))


def test_steps_can_be_rescaled():
    """Half the steps at half the rate, of an input that is held, end close to the same state."""
    layer = layer_of("im")
    u = torch.ones(1, 200, D, dtype=torch.float64)
    layer.rescale(0.05)
    fine = layer.mix_sequence(u)[0, 199]
    layer.rescale(0.1)
    coarse, far = layer.mix_sequence(u)[0, 99], layer.mix_sequence(u)[0, 199]
    assert (fine - coarse).abs().max() < 0.1 * (far - coarse).abs().max()
