"""Models on linear attention: each against its paper's equations as a loop in double precision, and published code."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spt.models import gla, linear_transformer, performer, retnet
from spt.models.mixer import Context
from spt.models.ops.linear_attention import linear_attention

ARRAYS = Path(__file__).parent / "arrays"
B, L, D, H = 2, 37, 8, 2
MODELS = {"linear_transformer": linear_transformer, "performer": performer, "retnet": retnet, "gla": gla}
SIZES = {"performer": {"features": 10}}
FORMS = [*((name, {}) for name in MODELS), ("performer", {"kernel": "relu"})]
FORMS += [("performer", {"kernel": "relu", "features": None})]
IDS = ["-".join([name, *(str(value) for value in options.values())]) for name, options in FORMS]


def mixer(name, causal=True, dtype=torch.float64, **options):
    """With parameters well spread."""
    torch.manual_seed(3)
    absolute = {"positions": ()} if name in ("linear_transformer", "performer") else {}
    config = MODELS[name].Config(
        **{"d_model": D, "n_heads": H, "n_layers": 1, "causal": causal, "feed_forward": "none", "max_length": 50},
        **{**SIZES.get(name, {}), **absolute, **options},
    )
    layer = next(iter(MODELS[name].build(config).mixers)).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def everything_valid(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def affine(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def heads(x, *widths):
    """(B, L, H, width) of each part."""
    return [part.unflatten(-1, (H, -1)) for part in x.split([H * width for width in widths], -1)]


def phi(name, layer, x):
    if name == "linear_transformer":
        return torch.where(x > 0, x + 1, torch.exp(x))
    if layer.kernel == "relu":
        return (x if layer.W is None else x @ layer.W.T / math.sqrt(len(layer.W))).clamp(min=0) + 1e-3
    u = x / x.shape[-1] ** 0.25  # without c and eps
    return torch.exp(u @ layer.W.T - u.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(layer.W))


def weighted_average(name, layer, x):
    q, k, v = heads(affine(layer.qkv, x), 4, 4, 4)
    weights = torch.einsum("bthm,bshm->bhts", phi(name, layer, q), phi(name, layer, k))
    weights = weights.tril() if layer.causal else weights
    average = torch.einsum("bhts,bshp->bthp", weights, v) / weights.sum(-1).mT[..., None]
    return affine(layer.out, average.flatten(2))


def turned(x, t):
    """Pairs of features as complex numbers, times exp(i t theta)."""
    theta = 10_000.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=torch.float64)
    z = torch.complex(x[..., ::2], x[..., 1::2]) * torch.exp(1j * t * theta)
    return torch.stack([z.real, z.imag], -1).flatten(-2)


def recurrence(name, layer, x, k):
    """norm(o_t) of direction k, from the equations."""
    widths = {"retnet": (4, 4, 8), "gla": (2, 2, 4)}[name]
    q, keys, v = heads(affine(layer.enter[k], x), *widths)
    S, outputs = torch.zeros(B, H, widths[0], widths[2], dtype=torch.float64), {}
    for t in sorted(range(L), reverse=bool(k)):
        if name == "retnet":
            a = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))[:, None]
            query, key = turned(q[:, t], t), turned(keys[:, t], t)
        else:
            gates = affine(layer.widen[k], layer.narrow[k](x[:, t])).unflatten(-1, (H, -1))
            a, query, key = (1 / (1 + torch.exp(-gates))) ** (1 / 16), q[:, t], keys[:, t]
        S = a[..., None] * S + key[..., None] * v[:, t, :, None]
        o = (query[..., None] * S).sum(-2) / math.sqrt(widths[0])
        normal = o / torch.sqrt(o.square().mean(-1, keepdim=True) + (1e-6 if name == "retnet" else 1e-5))
        outputs[t] = normal if name == "retnet" else normal * layer.factors[k]
    return torch.stack([outputs[t] for t in range(L)], 1)


def equations(name, layer, x):
    if name in ("linear_transformer", "performer"):
        return weighted_average(name, layer, x)
    gate = affine(layer.gate, x)
    o = sum(recurrence(name, layer, x, k) for k in range(len(layer.enter)))
    return affine(layer.leave, gate / (1 + torch.exp(-gate)) * o.flatten(2))


@pytest.fixture
def without_eps(monkeypatch):
    monkeypatch.setattr(linear_transformer.LinearAttention, "eps", 0.0)
    monkeypatch.setitem(performer.EPS, "softmax", 0.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "options"), FORMS, ids=IDS)
def test_a_layer_is_its_papers_equations(name, options, causal, without_eps):
    layer, x = mixer(name, causal, **options), torch.randn(B, L, D, dtype=torch.float64)
    ours, expected = layer(x, everything_valid(x)), equations(name, layer, x)
    assert (ours - expected).abs().max() < 1e-12 * expected.abs().max()
    weights = torch.cos(torch.arange(D, dtype=torch.float64))
    gradients = [torch.autograd.grad((y * weights).sum(), list(layer.parameters())) for y in (ours, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_lower_precision_loses_little(name, causal, dtype):
    exact, x = mixer(name, causal), torch.randn(B, 200, D)
    layer = copy.deepcopy(exact).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = layer(x, everything_valid(x))
    expected = exact(x.double(), everything_valid(x))
    error = float((ours - expected).detach().abs().max() / expected.detach().abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(("name", "options"), FORMS, ids=IDS)
def test_steps_compute_what_the_sequence_does(name, options, without_eps):
    layer, x = mixer(name, **options), torch.randn(B, 12, D, dtype=torch.float64)
    state, outputs = layer.initial_state(B), []
    for t in range(12):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
    expected = layer(x, everything_valid(x))
    assert torch.allclose(torch.stack(outputs, 1), expected, rtol=0, atol=1e-10 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_saturated_inputs_have_finite_gradients(name, causal):
    """Arguments of +-1000: features overflow but for their scale, nothing is forgotten, or everything."""
    layer = mixer(name, causal, torch.float32)
    x = 1000 * torch.randn(B, L, D)
    y = layer(x, everything_valid(x))
    y.sum().backward()
    assert y.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(("name", "options"), FORMS, ids=IDS)
def test_padding_changes_nothing(name, options):
    """Whatever is there, and however large the keys that the maps' biases give it."""
    layer, x = mixer(name, causal=False, dtype=torch.float32, **options), torch.randn(1, 9, D)
    if getattr(layer, "qkv", None) is not None and layer.qkv.bias is not None:
        with torch.no_grad():
            layer.qkv.bias.add_(5.0)
    alone = layer(x, everything_valid(x))
    padded = torch.cat([x, torch.zeros(1, 20, D)], 1)
    assert torch.allclose(layer(padded, Context(torch.arange(29)[None] < 9, padded=True))[:, :9], alone, atol=1e-5)


@pytest.mark.parametrize("size", [3.0, 200.0])
def test_padding_does_not_set_the_scale_of_keys(size):
    """Where one feature is negative at every key, padding, which is zero, has the largest."""
    layer = mixer("performer", causal=False, dtype=torch.float32, features=1)
    layer.W.fill_(1.0)
    k = -size * torch.ones(1, 9, H, 4)
    padded, valid = torch.cat([k, torch.zeros(1, 20, H, 4)], 1), torch.arange(29)[None] < 9
    features = layer.features(padded, padded, valid).keys
    assert torch.equal(features[:, :9], layer.features(k, k, None).keys) and features.isfinite().all()


@pytest.mark.parametrize("name", ["linear_transformer", "performer"])
def test_a_row_without_valid_steps_is_finite(name):
    layer, x = mixer(name, causal=False, dtype=torch.float32), torch.zeros(2, 9, D)
    valid = torch.tensor([[True], [False]]).expand(2, 9)
    y = layer(x, Context(valid, padded=True))
    y[0].sum().backward()
    assert y.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_causal_performers_do_not_see_the_scale_of_later_keys():
    """With a c of the whole sequence, one large key at the end would leave only eps of those before."""
    layer, x = mixer("performer", dtype=torch.float32), torch.randn(1, L, D)
    loud = x.clone()
    loud[:, -1] *= 30
    quiet, other = (layer(each, everything_valid(each))[:, :-1] for each in (x, loud))
    assert torch.equal(quiet, other)


@pytest.mark.parametrize("name", ["retnet", "gla"])
def test_heads_start_as_in_the_published_code(name):
    layer = next(iter(MODELS[name].build(MODELS[name].Config(d_model=64, feed_forward="none", max_length=9)).mixers))
    N, P = (16, 32) if name == "retnet" else (8, 16)
    for part, outputs in zip(layer.enter[1].weight.split([4 * N, 4 * N, 4 * P]), (4 * N, 4 * N, 4 * P), strict=True):
        limit = 2**-2.5 * math.sqrt(6 / (64 + outputs))
        assert 0.98 * limit < float(part.detach().abs().max()) <= limit


def test_random_features_are_orthogonal_and_estimate_the_softmax_kernel():
    torch.manual_seed(0)
    W = performer.orthogonal_vectors(10, 4)
    for block in (W[:4], W[4:8], W[8:]):
        products = block @ block.T
        assert torch.allclose(products, torch.diag(products.diagonal()), atol=1e-5)
    layer = mixer("performer", features=2048)
    assert layer.W.mean(0).abs().max() < 0.1, "no direction is likelier than its opposite"
    q, k = 0.25 * torch.randn(2, 1, 6, 1, 4, dtype=torch.float64)
    estimate = (phi("performer", layer, q) * phi("performer", layer, k)).sum(-1)
    assert torch.allclose(estimate, torch.exp((q * k).sum(-1) / 2), rtol=0.05)


def test_features_of_performers_are_moved_with_the_weights():
    one, two = (mixer("performer", dtype=torch.float32) for _ in range(2))
    assert "W" in one.state_dict() and "W" not in dict(one.named_parameters())
    torch.manual_seed(9)
    other = performer.FavorAttention(performer.Config(d_model=D, n_heads=H, features=10, max_length=9))
    assert not torch.equal(other.W, one.W) and torch.equal(one.W, two.W)


def test_what_does_not_fit_is_refused():
    for name, module in MODELS.items():
        with pytest.raises(ValueError, match="d_model 10 is not a multiple of n_heads 4"):
            module.Config(d_model=10, **SIZES.get(name, {}))
    with pytest.raises(ValueError, match="a head is 3 wide"):
        retnet.Config(d_model=12)
    with pytest.raises(ValueError, match="kernel softmax is made of random features"):
        performer.Config(features=None)
    with pytest.raises(ValueError, match="position_std has no effect without learned positions"):
        linear_transformer.Config(position_std=0.1)
    with pytest.raises(ValueError, match="positions names one kind twice"):
        linear_transformer.Config(positions=("learned", "learned"))


def test_feed_forward_layers_of_retnet_have_twice_the_width():
    sizes = {"d_model": 8, "n_layers": 1, "max_length": 9}
    assert list(retnet.build(retnet.Config(**sizes)).mixers)[1].up.out_features == 16
    assert list(retnet.build(retnet.Config(**sizes, d_ff=5)).mixers)[1].up.out_features == 5


# --------------------------------------------------------------- published code; tests/arrays/README.md says how made


@pytest.fixture
def arrays():
    return {name: torch.from_numpy(array) for name, array in np.load(ARRAYS / "linear_attention.npz").items()}


def largest_error(ours, theirs):
    return float((ours.detach() - theirs).abs().max() / theirs.abs().max())


def test_retnet_is_the_published_code(arrays, without_eps):
    layer = mixer("retnet")
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "out_proj")
    q, k, v, gate, out = (arrays[f"retnet_{name}.weight"] for name in names)
    layer.load_state_dict({"enter.0.weight": torch.cat([q, k, v]), "gate.weight": gate, "leave.weight": out})
    x = arrays["retnet_x"]
    assert largest_error(layer(x, everything_valid(x)), arrays["retnet_y"]) < 1e-3, "factors before a norm with eps"
    layer.eps = 0.0
    assert largest_error(layer(x, everything_valid(x)), arrays["retnet_y_eps0"]) < 1e-12


def test_gla_is_the_published_recurrence(arrays):
    q, k, v, g, o = (arrays[f"gla_{name}"] for name in "qkvgo")
    assert largest_error(linear_attention(q * 3**-0.5, k, v, g, chunk=4), o) < 1e-12


def read(layer, arrays, valid=None):
    """What the layer makes of these heads, before its output map."""
    ones = F.pad(arrays["v"], (0, 1), value=1.0)
    sums = layer.attend(layer.features(arrays["q"], arrays["k"], valid), ones, valid)
    return sums[..., :-1] / (sums[..., -1:] + layer.eps)


def test_linear_transformer_is_the_published_code(arrays):
    valid = torch.arange(11)[None] < torch.tensor([[11], [7]])
    assert largest_error(read(mixer("linear_transformer", causal=False), arrays, valid), arrays["linear_o"]) < 1e-12


def test_performer_is_the_published_code(arrays):
    """Causal, theirs has c of the whole sequence, so that eps counts differently."""
    for causal, suffix, bound in ((False, "", 1e-12), (True, "_causal", 1e-4)):
        layer = mixer("performer", causal)
        layer.W = arrays["performer_W"]
        assert largest_error(read(layer, arrays), arrays[f"performer_softmax{suffix}"]) < bound
        layer = mixer("performer", causal, kernel="relu", features=None)
        assert largest_error(read(layer, arrays), arrays[f"performer_relu{suffix}"]) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_a_performer_trains_on_arrays_large_enough_for_the_fast_product(causal):
    model = performer.build(performer.Config(d_model=64, n_layers=1, n_heads=4, causal=causal, max_length=512))
    x = torch.randn(4, 512, 64, requires_grad=True)
    model(x, Context(torch.ones(4, 512, dtype=torch.bool), padded=False)).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
