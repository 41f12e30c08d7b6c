"""Mamba and Mamba-2: against the published code, and against their papers' equations as loops in double precision."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.models import mamba, mamba2
from spt.models.mixer import Context
from spt.models.ops import selective_scan as selective
from spt.models.ops.selective_scan import selective_scan

ARRAYS = Path(__file__).parent / "arrays"
B, L, D = 2, 37, 6
SELECTIVE = {"mamba": mamba, "mamba2": mamba2}
SIZES = {"mamba": {"d_state": 4, "dt_rank": 2}, "mamba2": {"d_state": 5, "d_head": 4}}


def mixer(name, causal=True, dtype=torch.float64):
    torch.manual_seed(3)
    config = SELECTIVE[name].Config(d_model=D, n_layers=1, causal=causal, dt_min=0.1, dt_max=2.0, **SIZES[name])
    layer = SELECTIVE[name].build(config).mixers[0].to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for ssm in layer.ssm:  # so that steps far apart matter
            ssm.A_log.sub_(2.0)
    return layer


def everything_valid(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def inputs(batch, length, features, states, dtype=torch.float64):
    torch.manual_seed(5)
    shapes = (batch, length, features), (batch, length, features), (features, states), *[(batch, length, states)] * 2
    u, dt, A, enters, leaves = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [each.requires_grad_() for each in (u, F.softplus(dt), -A.exp(), enters, leaves)]


def scan_loop(u, dt, A, enters, leaves, reverse=False):
    h, y = torch.zeros(len(u), *A.shape, dtype=u.dtype), {}
    for t in sorted(range(u.shape[1]), reverse=reverse):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * u[:, t])[..., None] * enters[:, t, None]
        y[t] = (h * leaves[:, t, None]).sum(-1)
    return torch.stack([y[t] for t in sorted(y)], 1)


def convolve_loop(layer, u, reverse):
    rows = []
    for t in range(L):
        at = [t + j if reverse else t - j for j in range(layer.width)]
        rows.append(layer.bias + sum(w * u[:, s] for w, s in zip(layer.weight, at, strict=True) if 0 <= s < L))
    return F.silu(torch.stack(rows, 1))


def mamba_loop(layer, x):
    u, z = (x @ layer.enter.weight.T).chunk(2, -1)
    total = 0
    for k, ssm in enumerate(layer.ssm):
        v = convolve_loop(ssm.convolution, u, reverse=k == 1)
        p, enters, leaves = (v @ ssm.select.weight.T).split([2, 4, 4], -1)
        dt = F.softplus(p @ ssm.dt.weight.T + ssm.dt.bias)
        total = total + scan_loop(v, dt, -ssm.A_log.exp(), enters, leaves, reverse=k == 1) + ssm.D * v
    return (total * F.silu(z)) @ layer.leave.weight.T


def mamba2_loop(layer, x):
    z, u = (x @ layer.enter.weight.T).chunk(2, -1)
    total = 0
    for k, ssm in enumerate(layer.ssm):
        selected = x @ ssm.select.weight.T
        dt = F.softplus(selected[..., 10:] + ssm.dt_bias)
        v = convolve_loop(ssm.convolution, torch.cat([u, selected[..., :10]], -1), reverse=k == 1)
        v, enters, leaves = v.split([12, 5, 5], -1)
        heads = []
        for h, part in enumerate(v.chunk(3, -1)):
            A = -ssm.A_log[h].exp().expand(4, 5)
            steps = dt[..., h : h + 1].expand_as(part)
            heads.append(scan_loop(part, steps, A, enters, leaves, reverse=k == 1) + ssm.D[h] * part)
        total = total + torch.cat(heads, -1)
    gated = total * F.silu(z)
    normal = gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + 1e-5)
    return (normal * layer.norm.weight) @ layer.leave.weight.T


LOOPS = {"mamba": mamba_loop, "mamba2": mamba2_loop}


def agree(ours, theirs, over, rtol):
    """Outputs, and the gradients of some weighted sum of them."""
    assert (ours - theirs).abs().max() <= rtol * theirs.abs().max()
    weight = torch.cos(torch.arange(ours.numel(), dtype=ours.dtype)).view_as(ours)
    for mine, other in zip(*(torch.autograd.grad((y * weight).sum(), over) for y in (ours, theirs)), strict=True):
        assert (mine - other).abs().max() <= rtol * other.abs().max()


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 80),
    window=st.sampled_from([1, 60, 400, 1 << 19]),
    states=st.integers(1, 5),
    reverse=st.booleans(),
)
def test_a_selective_scan_is_its_definition(length, window, states, reverse):
    """In one window and in several, sequence by sequence and together."""
    values = inputs(2, length, 3, states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selective._WINDOW, "cpu", window)
        agree(selective_scan(*values, reverse=reverse), scan_loop(*values, reverse), values, rtol=1e-10)


@pytest.mark.parametrize("window", [1 << 6, 1 << 12, 1 << 19])
def test_a_selective_scan_keeps_no_states_of_every_step(window, monkeypatch):
    """However large the batch is in comparison to a window."""
    monkeypatch.setitem(selective._WINDOW, "cpu", window)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        selective_scan(*inputs(4, 320, 8, 16))
    states = [x for x in kept.values() if x.ndim == 4]
    assert 0 < sum(x.numel() for x in states) <= (320 // 16 + 1) * 4 * 16 * 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SELECTIVE)
def test_a_layer_is_its_papers_recurrence(name, causal):
    layer, x = mixer(name, causal), torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    agree(layer(x, everything_valid(x)), LOOPS[name](layer, x), [x, *layer.parameters()], rtol=1e-9)


def published(name):
    """Their x, y, the weights w of a sum of outputs, parameters and gradients; a convolution's present comes first."""
    arrays = {key: torch.from_numpy(array) for key, array in np.load(ARRAYS / f"{name}.npz").items()}
    for key in ("conv1d.weight", "grad.conv1d.weight"):
        arrays[key] = arrays[key][:, 0].T.flip(0)
    for of in ("", "grad."):
        arrays[f"{of}zx"], arrays[f"{of}BCdt"] = arrays[f"{of}in_proj.weight"].tensor_split([24])
    return arrays


NAMES = {
    **{"leave.weight": "out_proj.weight", "ssm.0.A_log": "A_log", "ssm.0.D": "D"},
    **{f"ssm.0.convolution.{part}": f"conv1d.{part}" for part in ("weight", "bias")},
}
OWN_NAMES = {
    "mamba": {
        **{"enter.weight": "in_proj.weight", "ssm.0.select.weight": "x_proj.weight"},
        **{"ssm.0.dt.weight": "dt_proj.weight", "ssm.0.dt.bias": "dt_proj.bias"},
    },
    "mamba2": {
        **{"enter.weight": "zx", "ssm.0.select.weight": "BCdt"},  # theirs are one matrix
        **{"norm.weight": "norm.weight", "ssm.0.dt_bias": "dt_bias"},
    },
}


@pytest.mark.parametrize("name", SELECTIVE)
def test_a_layer_is_the_published_code(name):
    """Forward, backward and step by step; tests/arrays/README.md says how the arrays were made."""
    arrays, layer = published(name), mixer(name)
    names = NAMES | OWN_NAMES[name]
    layer.load_state_dict({ours: arrays[theirs] for ours, theirs in names.items()})
    x = arrays["x"].requires_grad_()
    y = layer(x, everything_valid(x))
    torch.testing.assert_close(y, arrays["y"], rtol=0, atol=1e-13)
    (y * arrays["w"]).sum().backward()
    torch.testing.assert_close(x.grad, arrays["dx"], rtol=1e-9, atol=1e-12)
    for ours, theirs in names.items():
        torch.testing.assert_close(layer.get_parameter(ours).grad, arrays[f"grad.{theirs}"], rtol=1e-9, atol=1e-12)
    state = layer.initial_state(len(x))
    for t in range(x.shape[1]):
        step, state = layer.step(x[:, t], state)
        torch.testing.assert_close(step, arrays["y"][:, t], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", SELECTIVE)
def test_saturated_step_sizes_have_finite_gradients(name):
    """Step sizes in the hundreds: everything is forgotten; or none."""
    layer = mixer(name, causal=False, dtype=torch.float32)
    for scale in (100.0, 1e-30):
        layer.zero_grad()
        x = scale * torch.randn(B, L, D)
        layer(x, everything_valid(x)).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", SELECTIVE)
def test_nothing_enters_in_padding(name):
    """Backwards it comes first, and a convolution's bias stands there."""
    layer, x = mixer(name, causal=False, dtype=torch.float32), torch.randn(1, 9, D)
    alone = layer(x, everything_valid(x))
    padded = torch.cat([x, torch.zeros(1, 20, D)], 1)
    valid = torch.arange(29)[None] < 9
    torch.testing.assert_close(layer(padded, Context(valid, padded=True))[:, :9], alone, rtol=1e-4, atol=1e-5)


def test_mamba_starts_as_its_code():
    model = mamba.build(mamba.Config(d_model=256, n_layers=4))
    layer, ssm = model.mixers[0], model.mixers[0].ssm[1]
    assert torch.allclose(ssm.A, -torch.arange(1.0, 17).expand(512, 16)) and (ssm.D == 1).all()
    dt = F.softplus(ssm.dt.bias.detach())
    assert (
        1e-3 <= dt.min() < 1.1e-3
        and 0.09 < dt.max() <= 0.1
        and float(dt.log().mean()) == pytest.approx(math.log(1e-2), abs=0.2)
    )
    assert ssm.dt.in_features == 16 and 0.24 < ssm.dt.weight.detach().abs().max() <= 0.25
    assert 0.49 < ssm.convolution.weight.detach().abs().max() <= 0.5 and ssm.convolution.bias.detach().abs().max() > 0.4
    assert float(layer.leave.weight.detach().abs().max()) == pytest.approx(512**-0.5 / 2, rel=0.01)
    free = [name for name, group in ssm.param_groups.items() if group.weight_decay is False]
    assert free == ["dt.bias", "A_log", "D"]


def test_mamba2_starts_as_its_code():
    model = mamba2.build(mamba2.Config(d_model=512, n_layers=4, d_state=8, d_head=1))
    layer, ssm = model.mixers[0], model.mixers[0].ssm[1]
    A, dt = ssm.A_log.detach().exp(), F.softplus(ssm.dt_bias.detach())
    assert 1 <= A.min() < 1.1 and 15.9 < A.max() <= 16 and float(A.mean()) == pytest.approx(8.5, abs=0.5)
    assert 1e-3 <= dt.min() < 1.1e-3 and 0.09 < dt.max() <= 0.1
    assert (ssm.D == 1).all() and (layer.norm.weight == 1).all()
    assert float(layer.leave.weight.detach().abs().max()) == pytest.approx(1024**-0.5 / 2, rel=0.01)
    free = [name for name, group in ssm.param_groups.items() if group.weight_decay is False]
    assert free == ["dt_bias", "A_log", "D"]


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ({"d_model": 768}, (24, 64)),
        ({"d_model": 128}, (4, 64)),
        ({"d_model": 142}, (4, 71)),
        ({"d_model": 8}, (4, 4)),
        ({"d_model": 1}, (2, 1)),
        ({"d_model": 128, "d_head": 32}, (8, 32)),
        ({"d_model": 100, "d_head": 64}, (3, 64)),
    ],
)
def test_heads_of_mamba2_hold_about_twice_the_width(options, heads):
    assert mamba2.Config(**options).heads == heads


@pytest.mark.parametrize("name", SELECTIVE)
def test_step_sizes_from_larger_to_smaller_are_refused(name):
    with pytest.raises(ValueError, match=r"dt_min 0\.2 is larger than dt_max 0\.1"):
        SELECTIVE[name].Config(dt_min=0.2)
