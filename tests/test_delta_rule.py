"""The delta rule in chunks against its recurrence and published code; DeltaNet and Gated DeltaNet against theirs."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from spt.config.recipe import Train
from spt.models import deltanet, gated_deltanet
from spt.models.mixer import Context
from spt.models.ops.delta_rule import CHUNK, chunks, delta_rule, delta_step
from spt.training.optimizer import optimizer_groups

ARRAYS = {
    name: torch.from_numpy(array) for name, array in np.load(Path(__file__).parent / "arrays" / "delta.npz").items()
}
MODELS = {"deltanet": deltanet, "gated_deltanet": gated_deltanet}
B, L, D = 2, 37, 6


def recurrence(q, k, v, beta, log_alpha=None, reverse=False):
    """Step by step, as the papers write it, with the matrix of each step."""
    K, V = k.shape[-1], v.shape[-1]
    S, outputs = torch.zeros(*v.shape[:1], v.shape[2], K, V, dtype=v.dtype), {}
    for t in sorted(range(v.shape[1]), reverse=reverse):
        write = beta[:, t, :, None] * k[:, t]
        keep = torch.eye(K, dtype=v.dtype) - torch.einsum("bni,bnj->bnij", write, k[:, t])
        if log_alpha is not None:
            keep = torch.exp(log_alpha[:, t])[..., None, None] * keep
        S = keep @ S + torch.einsum("bni,bnj->bnij", write, v[:, t])
        outputs[t] = torch.einsum("bnij,bni->bnj", S, q[:, t])
    return torch.stack([outputs[t] for t in sorted(outputs)], 1)


def gradients(function, inputs, weight):
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return y.detach(), torch.autograd.grad((y * weight).sum(), [x for x in inputs if x is not None])


def assert_near(ours, theirs, rtol=1e-9):
    assert (ours - theirs).detach().abs().max() <= rtol * max(1.0, float(theirs.detach().abs().max()))


def everything_valid(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def some_inputs(length, gated, seed, betas=(0.0, 2.0), decays=(0.0, -1e-3, -1.0), keys=3, values=2, heads=2, few=False):
    """`few`: the same two keys over and over, on which a chunk's system is worst."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, length, heads, each, dtype=torch.float64) for each in (keys, keys, values))
    if few:
        k = k[:, :2][:, torch.randint(min(2, length), (length,))]

    def choice(options):
        options = torch.tensor(options, dtype=torch.float64)
        return options[torch.randint(len(options), (B, length, heads))]

    return [q, normalize(k, dim=-1), v, choice(betas), choice(decays) if gated else None]


# ----------------------------------------------------------------------------------------------------------- the rule

BETAS = st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 1.7, 2.0 - 1e-9, 2.0]), min_size=1, max_size=3)
DECAYS = st.lists(st.sampled_from([0.0, -1e-9, -1e-2, -1.0, -30.0, -1e4]), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    length=st.one_of(st.integers(1, 12), st.sampled_from([CHUNK, CHUNK + 1, 2 * CHUNK + 3])),
    gated=st.booleans(),
    reverse=st.booleans(),
    few=st.booleans(),
    betas=BETAS,
    decays=DECAYS,
    seed=st.integers(0, 10**6),
)
def test_chunks_are_the_recurrence(length, gated, reverse, few, betas, decays, seed):
    """Whatever the betas: nothing, all or twice all written; and the decays: none, or nearly all at one step."""
    inputs = some_inputs(length, gated, seed, betas, decays, few=few)
    weight = torch.randn(B, length, 2, 2, dtype=torch.float64)
    ours = gradients(lambda *x: delta_rule(*x, reverse=reverse), inputs, weight)
    theirs = gradients(lambda *x: recurrence(*x, reverse=reverse), inputs, weight)
    assert_near(ours[0], theirs[0])
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert_near(mine, other)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_the_rule_is_the_published_code(kind):
    """tests/arrays/README.md says how the arrays were made; q is scaled there by 1 / sqrt(K)."""
    scale = 1 / math.sqrt(ARRAYS["k"].shape[-1])
    names = ["q", "k", "v", "beta", *(["g"] if kind == "gated" else [])]
    inputs = [ARRAYS[name] for name in names]
    y, found = gradients(lambda q, *rest: delta_rule(scale * q, *rest), inputs, ARRAYS["do"])
    assert_near(y, ARRAYS[f"{kind}.o"], 1e-12)
    for name, gradient in zip(names, found, strict=True):
        assert_near(gradient, ARRAYS[f"{kind}.d{name}"], 1e-12)


@pytest.mark.parametrize("gated", [False, True])
def test_steps_are_the_rule(gated):
    inputs = some_inputs(L, gated, seed=0)
    S, outputs = torch.zeros(B, 2, 3, 2, dtype=torch.float64), []
    for t in range(L):
        o, S = delta_step(S, *(None if x is None else x[:, t] for x in inputs))
        outputs.append(o)
    assert_near(torch.stack(outputs, 1), delta_rule(*inputs), 1e-12)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_single_precision_holds_over_many_steps(beta, few):
    """With beta = 2 and no decay nothing is ever forgotten, and no error either."""
    exact = some_inputs(1500, False, seed=0, betas=(beta,), keys=8, values=4, few=few)
    exact = [None if x is None else x.float().double() for x in exact]
    weight = torch.randn(B, 1500, 2, 4, dtype=torch.float64)
    truth = gradients(delta_rule, exact, weight)
    rounded = gradients(delta_rule, [None if x is None else x.float() for x in exact], weight.float())
    assert rounded[0].dtype == torch.float32
    for mine, other in zip((rounded[0], *rounded[1]), (truth[0], *truth[1]), strict=True):
        assert_near(mine, other, 1e-4)


def test_a_step_that_forgets_everything_leaves_the_decays_after_it_exact():
    """A sum of logarithms of -1000 is rounded to 1e-4 in single precision; differences of such sums must not be."""
    exact = some_inputs(30, True, seed=0, decays=(-0.01,), keys=8, values=4)
    exact[-1][:, 3] = -1000.0
    exact = [x.float().double() for x in exact]
    rounded = delta_rule(*(x.float() for x in exact))
    assert_near(rounded, recurrence(*exact), 2e-6)


@pytest.mark.parametrize("decay", [-1e4, -1e30, -math.inf])
def test_strong_decays_have_finite_gradients(decay):
    inputs = [x.float() for x in some_inputs(70, True, seed=0, decays=(0.0, decay))]
    for reverse in (False, True):
        y, found = gradients(lambda *x, reverse=reverse: delta_rule(*x, reverse=reverse), inputs, torch.ones(()))
        assert y.isfinite().all() and all(gradient.isfinite().all() for gradient in found)


def test_half_precision_is_computed_in_single():
    inputs = [x.bfloat16() for x in some_inputs(L, True, seed=0)]
    with torch.autocast("cpu", torch.bfloat16):
        y = delta_rule(*inputs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, delta_rule(*(x.float() for x in inputs)).bfloat16())


def test_memory_of_the_backward_pass_is_inputs_and_the_states_between_chunks():
    K, V, N, length = 8, 4, 2, 6 * CHUNK
    inputs = [x.float().requires_grad_() for x in some_inputs(length, True, 0, keys=K, values=V, heads=N)]
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        delta_rule(*inputs)
    assert sum(kept.values()) == B * length * N * (2 * K + V + 2) + B * N * (length // CHUNK) * K * V


@given(st.integers(1, 10**6))
def test_chunks_hold_every_step_and_few_more(length):
    n, C = chunks(length)
    assert C <= CHUNK and 0 <= n * C - length < n


# --------------------------------------------------------------------------------------------------------- the layers


def layer(name, causal=True, dtype=torch.float64, **options):
    """With parameters well spread; two heads."""
    torch.manual_seed(3)
    options = {"d_model": D, "n_layers": 1, "d_head": 3 if name == "deltanet" else 2, **options}
    config = MODELS[name].Config(causal=causal, feed_forward="none", **options)
    (one,) = MODELS[name].build(config).mixers
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return one.to(dtype)


def convolved(u, weight, reverse):
    places = [[t + j if reverse else t - j for j in range(len(weight))] for t in range(u.shape[1])]  # of step t, by lag
    return torch.stack(
        [sum(weight[j] * u[:, at] for j, at in enumerate(row) if 0 <= at < u.shape[1]) for row in places], 1
    )


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def expected(one, x, largest_beta=1.0):
    """From the equations at the head of the model's file."""
    total = 0.0
    for direction, rule in enumerate(one.rules):
        N, K, _ = rule.heads
        u = convolved(x @ rule.enter.weight.T, rule.convolution.weight, bool(direction))
        features = (u * sigmoid(u)).unflatten(-1, (N, -1))
        q, k, v = features[..., :K], features[..., K : 2 * K], features[..., 2 * K :]
        q, k = (part / torch.sqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        beta, gate = largest_beta * sigmoid(x @ rule.beta.weight.T), None
        if hasattr(rule, "decay"):
            gate = -torch.exp(rule.A_log) * torch.log(1 + torch.exp(x @ rule.decay.weight.T + rule.dt_bias))
        total = total + recurrence(q / math.sqrt(K), k, v, beta, gate, reverse=bool(direction))
    y = one.norm.weight * total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    if hasattr(one, "gate"):
        gate = x @ one.gate.weight.T
        return (y.flatten(-2) * gate * sigmoid(gate)) @ one.leave.weight.T
    return y.flatten(-2) @ one.leave.weight.T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_its_papers_recurrence(name, causal):
    one, x = layer(name, causal), torch.randn(B, L, D, dtype=torch.float64)
    truth, ours = expected(one, x), one(x, everything_valid(x))
    assert_near(ours, truth, 1e-12)
    found, theirs = (
        torch.autograd.grad((y * torch.cos(torch.arange(D))).sum(), list(one.parameters())) for y in (ours, truth)
    )
    for mine, other in zip(found, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-9, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_negative_eigenvalues_double_beta(name):
    one, x = layer(name, negative_eigenvalues=True), torch.randn(B, L, D, dtype=torch.float64)
    assert_near(one(x, everything_valid(x)), expected(one, x, largest_beta=2.0), 1e-12)


def test_gated_deltanet_is_the_layer_of_qwen3_next():
    """There a head's queries, keys, values and gate stand together in one map, as do its beta and decay; the
    convolution's features are the queries of all heads, their keys, and their values, from the earliest step on."""
    arrays = {name.removeprefix("layer."): array for name, array in ARRAYS.items() if name.startswith("layer.")}
    config = gated_deltanet.Config(d_model=8, d_head=3, n_layers=1, causal=True, feed_forward="none")
    N, K, V = config.heads
    assert (N, K, V) == (2, 3, 6)
    one = gated_deltanet.GatedDeltaNet(config).double()
    q, k, v, gate = arrays["in_proj_qkvz.weight"].unflatten(0, (N, -1)).split((K, K, V, V), dim=1)
    beta, decay = arrays["in_proj_ba.weight"].unflatten(0, (N, 2)).unbind(1)
    parts = arrays["conv1d.weight"][:, 0].flip(-1).split((N * K, N * K, N * V))
    taps = torch.cat([part.unflatten(0, (N, -1)) for part in parts], 1).flatten(0, 1)
    rule = {"enter.weight": torch.cat([q, k, v], 1).flatten(0, 1), "beta.weight": beta, "decay.weight": decay}
    rule |= {"convolution.weight": taps.T, "A_log": arrays["A_log"], "dt_bias": arrays["dt_bias"]}
    whole = {"gate.weight": gate.flatten(0, 1), "norm.weight": arrays["norm.weight"]}
    whole |= {"leave.weight": arrays["out_proj.weight"]}
    one.load_state_dict(whole | {f"rules.0.{name}": value for name, value in rule.items()})
    assert_near(one(arrays["x"], everything_valid(arrays["x"])).detach(), arrays["y"], 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_saturated_gates_have_finite_gradients(name):
    one = layer(name, causal=False, dtype=torch.float32)
    x = 1000 * torch.randn(B, L, D)
    one(x, everything_valid(x)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in one.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_backward_directions_start_at_the_last_valid_step(name):
    one, x = layer(name, causal=False, dtype=torch.float32), torch.randn(1, 9, D)
    padded = torch.cat([x, torch.zeros(1, 60, D)], 1)
    together = one(padded, Context(torch.arange(69)[None] < 9, padded=True))[:, :9]
    assert torch.allclose(together, one(x, everything_valid(x)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "width", "heads"),
    [
        ("deltanet", 128, (4, 32, 32)),
        ("deltanet", 8, (1, 8, 8)),
        ("deltanet", 100, (3, 33, 33)),
        ("gated_deltanet", 128, (3, 32, 64)),
        ("gated_deltanet", 64, (2, 24, 48)),
        ("gated_deltanet", 8, (1, 6, 12)),
        ("gated_deltanet", 1, (1, 1, 2)),
    ],
)
def test_heads_fit_every_width(name, width, heads):
    assert MODELS[name].Config(d_model=width).heads == heads


def test_published_sizes():
    """DeltaNet of 1.3 billion parameters: 16 heads of 128. Gated DeltaNet: 6 heads of 256 keys and 512 values."""
    assert deltanet.Config(d_model=2048, d_head=128).heads == (16, 128, 128)
    assert gated_deltanet.Config(d_model=2048, d_head=256).heads == (6, 256, 512)
    model = gated_deltanet.build(gated_deltanet.Config(d_model=256, n_layers=1, causal=True, feed_forward="none"))
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2 and min(p.shape) > 10) == 6 * 256**2


def test_parameters_start_as_published():
    torch.manual_seed(0)
    rule = gated_deltanet.GatedRule(gated_deltanet.Config(d_model=512, d_head=1))
    A, dt = rule.A_log.detach().exp(), torch.nn.functional.softplus(rule.dt_bias.detach())
    assert 0 < A.min() < 1 and 15 < A.max() < 16 and float(A.mean()) == pytest.approx(8, abs=1)
    assert 1e-3 <= dt.min() * 1.001 and dt.max() <= 0.1001
    assert float(dt.log().mean()) == pytest.approx(math.log(1e-2), abs=0.3), "uniform in the logarithm"
    assert float(rule.enter.weight.detach().std()) == pytest.approx(1 / math.sqrt(512), rel=0.02)
    assert float(rule.convolution.weight.detach().std()) == pytest.approx(0.5, rel=0.05)


def test_decays_are_not_decayed():
    """A_log, dt_bias and norms; matrices and convolutions are, as in the published code."""
    model = gated_deltanet.build(gated_deltanet.Config(d_model=16, n_layers=1))
    for on in ("matrices", "all"):
        train = Train(steps=1, batch_size=1, learning_rate=1e-3, weight_decay=0.1, weight_decay_on=on)
        free = {name for group in optimizer_groups(model, train) if not group.weight_decay for name in group.names}
        assert {f"mixers.0.rules.{k}.{name}" for k in (0, 1) for name in ("A_log", "dt_bias")} <= free
        assert not any(name.endswith(("enter.weight", "convolution.weight")) for name in free)
