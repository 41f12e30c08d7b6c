"""xLSTM: mLSTM and sLSTM, each against its paper's equations as a loop in double precision."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spt.models import xlstm
from spt.models.base import Context
from spt.models.slstm import GatedFeedForward

ARRAYS = Path(__file__).parent / "arrays"
B, L, D, H = 2, 23, 6, 2
KINDS = {"mlstm": None, "slstm": 1}


def model(kind="mlstm", dtype=torch.float64, **options):
    """With parameters well spread."""
    torch.manual_seed(3)
    sizes = {"d_model": D, "n_heads": H, "n_layers": 1, "slstm_every": KINDS[kind]}
    net = xlstm.build(xlstm.Config(**{**sizes, **options})).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def layer(kind, **options):
    return model(kind, **options).mixers[0]


def context(*lengths):
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Context(valid, padded=len(set(lengths)) > 1)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def forgets(f, gate):
    return sigmoid(f) if gate == "sigmoid" else torch.exp(f)


def silu(x):
    return x * sigmoid(x)


def blocks(map, x):
    parts = x.chunk(len(map.weight), -1)
    y = torch.cat([part @ w for part, w in zip(parts, map.weight, strict=True)], -1)
    return y if map.bias is None else y + map.bias


def convolved(convolution, u):
    rows = []
    for t in range(u.shape[1]):
        terms = [w * u[:, t - j] for j, w in enumerate(convolution.weight) if t >= j]
        rows.append(silu(sum(terms) + convolution.bias))
    return torch.stack(rows, 1)


def normal(norm, h):
    """Of heads (B, H, P)."""
    centred = h - h.mean(-1, keepdim=True)
    return (centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).flatten(1) * norm.weight


def mlstm_loop(branch, u):
    """Equations 19 to 27, nothing divided by anything."""
    S = u.shape[-1]
    P, a = S // H, convolved(branch.convolution, u)
    C, n, ys = torch.zeros(B, H, P, P, dtype=u.dtype), torch.zeros(B, H, P, dtype=u.dtype), []
    for t in range(u.shape[1]):
        maps = [blocks(map, x[:, t]) for map, x in ((branch.q, a), (branch.k, a), (branch.v, u))]
        gates = torch.cat(maps, -1) @ branch.gates.weight.T + branch.gates.bias
        q, k, v = (each.unflatten(-1, (H, P)) for each in maps)
        i, f = torch.exp(gates[:, :H]), forgets(gates[:, H:], branch.forget_gate)
        k = k / P**0.5
        C = f[..., None, None] * C + i[..., None, None] * v[..., :, None] * k[..., None, :]
        n = f[..., None] * n + i[..., None] * k
        read, norm = (C @ q[..., None])[..., 0], (n * q).sum(-1, keepdim=True)
        ys.append(normal(branch.norm, read / torch.maximum(norm.abs(), torch.ones_like(norm))) + branch.skip * a[:, t])
    return torch.stack(ys, 1)


def slstm_loop(cell, x):
    """Equations 8 to 18 with one matrix R for all gates."""
    P, u = x.shape[-1] // H, convolved(cell.convolution, x)
    c = n = h = torch.zeros(B, H, P, dtype=x.dtype)
    ys = []
    for t in range(x.shape[1]):
        kept = torch.stack([h[:, head] @ cell.R[head] for head in range(H)], 1).chunk(4, -1)
        z, i, f, o = (
            blocks(map, given[:, t]).unflatten(-1, (H, P)) + r
            for map, given, r in zip((cell.z, cell.i, cell.f, cell.o), (x, u, u, x), kept, strict=True)
        )
        i, f = torch.exp(i), forgets(f, cell.gate)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = sigmoid(o) * c / n
        ys.append(normal(cell.norm, h))
    return torch.stack(ys, 1)


def expected(kind, mixer, x, causal):
    if kind == "slstm":
        return sum(
            slstm_loop(cell, x.flip(1)).flip(1) if k else slstm_loop(cell, x) for k, cell in enumerate(mixer.cells)
        )
    u, z = (x @ mixer.up.weight.T).chunk(2, -1)
    states = [
        mlstm_loop(each, u.flip(1)).flip(1) if k else mlstm_loop(each, u) for k, each in enumerate(mixer.branches)
    ]
    assert len(states) == 2 - causal
    return (silu(z) * sum(states)) @ mixer.down.weight.T


@pytest.mark.parametrize("gate", ["sigmoid", "exponential"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_papers_recurrence(kind, causal, gate):
    mixer, x = layer(kind, causal=causal, forget_gate=gate), torch.randn(B, L, D, dtype=torch.float64)
    ours, theirs = mixer(x, context(L, L)), expected(kind, mixer, x, causal)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    gradients = [
        torch.autograd.grad((y * torch.cos(torch.arange(D))).sum(), list(mixer.parameters())) for y in (ours, theirs)
    ]
    for (name, _), mine, their in zip(mixer.named_parameters(), *gradients, strict=True):
        assert torch.allclose(mine, their, rtol=1e-8, atol=1e-9 * float(their.abs().max())), name


def test_the_matrix_memory_is_that_of_transformers():
    """tests/arrays/README.md says how the arrays were made."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(ARRAYS / "mlstm.npz").items()}
    q, k, v, i, f = inputs = [arrays[name].requires_grad_() for name in "qkvif"]
    h = xlstm.mlstm(q, k / 2, v, i, torch.nn.functional.logsigmoid(f))
    assert (h - arrays["h"]).abs().max() < 1e-12 * arrays["h"].abs().max()
    weight = torch.cos(torch.arange(h.numel()).double().view(2, 3, 21, 4)).transpose(1, 2)
    for name, ours in zip("qkvif", torch.autograd.grad((h * weight).sum(), inputs), strict=True):
        theirs = arrays["d" + name]
        assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


def test_a_block_of_mlstm_is_the_published_code():
    """tests/arrays/README.md says how the arrays were made."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(ARRAYS / "mlstm_layer.npz").items()}
    mixer = layer("mlstm", d_model=8, n_heads=2, causal=True)
    mixer.load_state_dict({name: array for name, array in arrays.items() if name not in ("x", "y")})
    y = mixer(arrays["x"], context(21, 21))
    assert (y - arrays["y"]).abs().max() < 1e-12 * arrays["y"].abs().max()


def test_large_gates_do_not_overflow():
    """Inputs weighted by up to exp(200), as the formula in double precision has them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, 70, H, 4, dtype=torch.float64) for _ in range(3))
    log_i = 200 * torch.rand(B, 70, H, dtype=torch.float64)
    log_f = torch.nn.functional.logsigmoid(torch.randn(B, 70, H, dtype=torch.float64))
    sums = log_f.cumsum(1).movedim(1, -1)
    weights = torch.exp(sums[..., None] - sums[..., None, :] + log_i.movedim(1, -1)[..., None, :]).tril()
    scores = weights * torch.einsum("blhp,bmhp->bhlm", q, k)
    total = scores.sum(-1).movedim(-1, 1)[..., None].abs().clamp(min=1)
    formula = torch.einsum("bhlm,bmhp->blhp", scores, v) / total
    ours = xlstm.mlstm(*(x.float() for x in (q, k, v, log_i, log_f)))
    near = formula.abs() < 1e3  # where products q n are far from zero
    assert near.float().mean() > 0.95
    assert (ours - formula)[near].abs().max() < 1e-2
    assert ours.isfinite().all()


@pytest.mark.parametrize("gate", ["sigmoid", "exponential"])
@pytest.mark.parametrize("kind", KINDS)
def test_saturated_gates_have_finite_gradients(kind, gate):
    """Arguments of thousands, of either sign."""
    mixer = layer(kind, dtype=torch.float32, causal=False, forget_gate=gate)
    mixer(1000 * torch.randn(B, 70, D), context(70, 70)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_direction_starts_at_the_last_valid_step(kind):
    mixer, x = layer(kind, dtype=torch.float32, causal=False), torch.randn(B, 9, D)
    padded = torch.cat([x, torch.zeros(B, 11, D)], 1)
    ours = mixer(padded, context(9, 20))
    assert torch.allclose(ours[:1, :9], mixer(x, context(9, 9))[:1], atol=1e-5)
    assert torch.allclose(ours[1:], mixer(padded, context(20, 20))[1:], atol=1e-5)


@torch.no_grad()
def test_blocks_of_slstm_stand_where_asked_and_go_step_by_step():
    net = model("mlstm", dtype=torch.float32, n_layers=4, slstm_every=2, causal=True).eval()
    names = ["MLSTMBlock", "SLSTM", "GatedFeedForward"] * 2
    assert [type(mixer).__name__ for mixer in net.mixers] == names
    x, state, ys = torch.randn(B, L, D), net.initial_state(B), []
    for t in range(L):
        y, state = net.step(x[:, t], state)
        ys.append(y)
    whole = net(x, context(L, L))
    assert net.recurrent and torch.allclose(torch.stack(ys, 1), whole, atol=1e-4)
    changed = torch.cat([x[:, :20], torch.randn(B, L - 20, D)], 1)
    assert torch.allclose(net(changed, context(L, L))[:, :20], whole[:, :20], atol=1e-5)


@pytest.mark.parametrize("gate", ["sigmoid", "exponential"])
def test_forget_gates_start_as_in_the_published_code(gate):
    """Of mLSTM by head, of sLSTM by feature and by block."""
    net = xlstm.build(xlstm.Config(d_model=20, n_layers=3, slstm_every=2, forget_gate=gate))
    mlstm, slstm = net.mixers[:2]
    x = torch.arange(5) / 4
    for bias, start in (
        (mlstm.branches[0].gates.bias[4:], torch.linspace(3, 6, 4)),
        (slstm.cells[0].f.bias, (5 - 12 * x**0.95).repeat(4)),  # the second of three: 0.3 + 1.3 / 2
    ):
        assert torch.allclose(sigmoid(bias) if gate == "sigmoid" else torch.exp(bias), sigmoid(start), atol=1e-6)


def test_maps_start_as_in_the_published_code():
    torch.manual_seed(0)
    mlstm, slstm, ffn = xlstm.build(xlstm.Config(d_model=200, n_layers=2, slstm_every=2)).mixers
    branch, cell = mlstm.branches[0], slstm.cells[0]
    small, wang = (2 / (5 * 200)) ** 0.5, 2 / (2 * 200**0.5)
    stds = {
        small: [mlstm.up, branch.q, branch.k, branch.v, cell.z, cell.i, cell.f, cell.o, ffn.up],
        wang: [mlstm.down, ffn.down],
    }
    for std, layers in stds.items():
        for each in layers:
            assert float(each.weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert not branch.gates.weight.any() and not cell.R.any()
    assert 0 < float(branch.gates.bias[:4].detach().abs().max()) < 0.5
    assert all(each.bias is None for each in (branch.q, branch.k, branch.v, ffn.up, ffn.down))
    assert ffn.down.in_features == 260


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_in_single_precision_where_the_rest_is_not(kind):
    mixer, u = layer(kind, dtype=torch.float32, causal=True), torch.randn(B, L, D)
    part, inputs = (mixer, u) if kind == "slstm" else (mixer.branches[0], torch.randn(B, L, 2 * D))
    state, ys = part.initial_state(B), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for t in range(L):
            y, state = part.step(inputs[:, t], state)
            ys.append(y)
        whole = part(inputs, context(L, L)) if kind == "slstm" else part(inputs)
    assert whole.dtype == torch.float32 and torch.allclose(torch.stack(ys, 1), whole, atol=1e-4)


@pytest.mark.parametrize(("width", "heads", "inner"), [(128, 4, 256), (6, 2, 12), (5, 4, 8), (1, 3, 12), (50, 3, 96)])
def test_the_inner_width_fits_heads_and_blocks(width, heads, inner):
    assert xlstm.Config(d_model=width, n_heads=heads).inner == inner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slstm_every": 8}, "slstm_every 8 has no effect on 4 blocks"),
        ({"slstm_every": 2, "d_model": 10}, "d_model 10 is no multiple of 4"),
        ({"d_model": 2}, "n_heads 4 leaves heads of one feature"),
        ({"d_model": 4, "slstm_every": 2}, "n_heads 4 leaves heads of one feature"),
    ],
)
def test_blocks_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        xlstm.Config(**options)


def test_operations_of_a_block_of_slstm():
    """What torch counts, and the convolution's; the first of its steps has no state to answer for."""
    net, x = model("slstm", dtype=torch.float32, causal=False), torch.randn(1, 100, D, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = net(x, context(100))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    by_hand = 2 * 2 * 4 * D * 100
    assert net.flops(100).forward == forward.get_total_flops() + by_hand
    assert net.flops(100).backward == pytest.approx(backward.get_total_flops() + 2 * by_hand, rel=0.01)
    assert GatedFeedForward(6, 1).flops(10).forward == 2 * 10 * (6 * 16 + 8 * 6)
