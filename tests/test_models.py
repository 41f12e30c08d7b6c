"""The contract, over every model in models/."""

import json

import pytest
import torch
from tiny import loaded, model_file

from spt import contract
from spt.components import find, listing
from spt.contract import counted_flops, tiny
from spt.errors import UsageError
from spt.models.attention import Attention, rotary_table, rotate, sinusoids
from spt.models.base import Context
from spt.plan import Job
from spt.stages import bind

MODELS = [row.name for row in listing("models")]


@pytest.mark.parametrize("causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("promise", contract.PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_contract(name, promise, causal):
    assert promise(find("models", name), causal) is None


def test_every_model_is_described():
    assert MODELS
    assert all(row.description for row in listing("models"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("x.cumsum(1)", None),
        ("x.flip(1)", "steps after"),
        ("x + x.sum((0, 1))", "neighbours"),
        ("x + torch.rand(())", "two evaluations"),
        ("x * float('nan')", "not finite"),
        ("x.sum(-1)", "Error"),
    ],
)
def test_the_contract_catches_a_broken_model(tmp_path, change, complaint):
    """Each check must be able to fail: a model that breaks one promise is caught by it."""
    path = model_file(tmp_path, forward=change)
    problems = [check.detail for check in contract.check(find("models", str(path))) if not check.ok]
    if complaint is None:  # causal and well-behaved, but padded steps are behind, so nothing is wrong with it
        assert problems == []
    else:
        assert any(any(word in problem for word in complaint.split("|")) for problem in problems), problems


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ("rates = {'nosuch': Rate(lr=1e-3)}", "names nosuch, which it does not have"),
        ("rates = {'map.weight': Rate(lr=float('nan'))}", "not a Rate that trains"),
        ("rates = {'map.weight': 0.1}", "not a Rate that trains"),
        ("flops = lambda self, length: float('nan')", "flops"),
        ("flops = lambda self, length: -1.0", "flops"),
        ("flops = lambda self, length: None", "flops"),
    ],
)
def test_wrong_declarations_are_refused_before_training_and_by_the_contract(tmp_path, edit, complaint):
    path = model_file(tmp_path, extra=edit)
    assert any(not check.ok for check in contract.check(find("models", str(path))))
    with pytest.raises(UsageError, match=complaint):
        bind(Job(loaded(tmp_path, model={"name": "./mine.py", "d_model": 16}), "pretrain", 0))


def test_understated_operations_are_caught():
    component = find("models", "transformer")
    model = tiny(component, causal=False)
    assert model.flops(63) == pytest.approx(counted_flops(model, 63), rel=1e-6)


def test_flops_by_hand():
    # D = 16, H = 4, d_ff = 64, L = 10: qkv 2·10·16·48, out 2·10·16·16, q k^T and its product with v 2·2·10·10·16,
    # feed-forward 2 · 2·10·16·64; two blocks.
    by_hand = 2 * (15360 + 5120 + 6400 + 40960)
    assert tiny(find("models", "transformer"), causal=False).flops(10) == by_hand


def test_rotary_is_a_rotation_by_position():
    """Interleaved pairs, full width, base 10000: against the definition, one pair at a time, in double precision."""
    x = torch.randn(2, 3, 5, 8)
    y = rotate(x, rotary_table(5, 8))
    for t in range(5):
        for i in range(4):
            angle = torch.tensor(t * 10000 ** (-2 * i / 8), dtype=torch.float64)
            x0, x1 = x[..., t, 2 * i].double(), x[..., t, 2 * i + 1].double()
            torch.testing.assert_close(
                y[..., t, 2 * i].double(), x0 * angle.cos() - x1 * angle.sin(), atol=1e-6, rtol=1e-6
            )
            torch.testing.assert_close(
                y[..., t, 2 * i + 1].double(), x0 * angle.sin() + x1 * angle.cos(), atol=1e-6, rtol=1e-6
            )


def test_rotary_products_depend_on_distance_only():
    q, k = torch.randn(8), torch.randn(8)
    table = rotary_table(4096, 8)
    turned_q, turned_k = rotate(q.expand(4096, 8), table), rotate(k.expand(4096, 8), table)
    products = [(turned_q[t] @ turned_k[t - 5]).item() for t in (5, 100, 4095)]
    assert max(products) - min(products) < 1e-4


def test_sinusoids_by_definition():
    table = sinusoids(7, 6)
    assert table[3, 2].item() == pytest.approx(torch.tensor(3 * 10000 ** (-2 / 6)).sin().item(), abs=1e-6)
    assert table[3, 3].item() == pytest.approx(torch.tensor(3 * 10000 ** (-2 / 6)).cos().item(), abs=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_softmax_of_scaled_products(causal):
    """Against the textbook loop in double precision, padding included."""
    torch.manual_seed(0)
    layer = Attention(8, 2, 7, causal=causal, rotary=False).double()
    x, valid = torch.randn(2, 7, 8).double(), torch.arange(7) < torch.tensor([[7], [4]])
    y = layer(x, Context(valid, padded=True))
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    expected = torch.zeros_like(x)
    for b in range(2):
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            for t in range(7):
                seen = [s for s in range(7) if valid[b, s] and not (causal and s > t)]
                scores = torch.stack([q[b, t, part] @ k[b, s, part] / 2 for s in seen]).softmax(0)
                expected[b, t, part] = sum(w * v[b, s, part] for w, s in zip(scores, seen, strict=True))
    torch.testing.assert_close(y[valid], layer.out(expected)[valid])


@pytest.mark.parametrize(
    "positions", [[], ["rotary"], ["learned"], ["sinusoidal"], ["rotary", "learned", "sinusoidal"]]
)
def test_positions_break_the_symmetry_of_order(positions):
    """Without positions attention cannot tell an order from its reverse; with any of them it can."""
    model = tiny(find("models", "transformer"), causal=False, positions=positions, position_std=1.0)
    x = contract.sequence(1, 7)
    forwards, backwards = model(x, contract.full(x)), model(x.flip(1), contract.full(x)).flip(1)
    assert torch.allclose(forwards, backwards, atol=1e-4) == (positions == [])


@torch.no_grad()
def test_padding_is_looked_at_only_when_asked_for():
    """Without mask_padding, padded steps are steps like any others: the published code's convention."""
    x = contract.sequence(2, 9)
    padded = Context(torch.arange(9) < torch.tensor([[9], [4]]), padded=True)
    component = find("models", "transformer")
    plain, open_ = (tiny(component, causal=False, mask_padding=mask) for mask in (True, False))
    torch.testing.assert_close(open_(x, padded), open_(x, contract.full(x)))
    torch.testing.assert_close(open_(x, contract.full(x)), plain(x, contract.full(x)))
    assert not torch.allclose(plain(x, padded)[1, :4], open_(x, padded)[1, :4], atol=1e-3)
    other = x.clone()
    other[1, 4:] = x[1, 4:].flip(-1)
    assert contract.difference(open_(other, padded)[1, :4], open_(x, padded)[1, :4]) > 1e-3
    assert contract.difference(plain(other, padded)[1, :4], plain(x, padded)[1, :4]) < contract.TOLERANCE


def test_tied_projections_start_alike_and_are_trained_apart():
    component = find("models", "transformer")
    tied, free = (tiny(component, causal=False, tied_projections=tie) for tie in (True, False))
    layers = [mixer for mixer in tied.mixers if isinstance(mixer, Attention)]
    for layer in layers:
        for part in (*layer.qkv.weight.chunk(3), layer.out.weight):
            assert torch.equal(part, layer.out.weight)
        for part in (*layer.qkv.bias.chunk(3), layer.out.bias):
            assert torch.equal(part, layer.out.bias)
        assert float(layer.out.weight.detach().abs().max()) <= 16**-0.5  # U(-1/sqrt(D), 1/sqrt(D))
    assert not torch.equal(layers[0].out.weight, layers[1].out.weight)
    assert torch.equal(layers[1].out.weight, [m for m in free.mixers if isinstance(m, Attention)][1].out.weight)
    assert sum(p.numel() for p in tied.parameters()) == sum(p.numel() for p in free.parameters())
    x = contract.sequence(2, 7)
    (tied(x, contract.full(x)) * contract.sequence(2, 7, seed=2)).sum().backward()
    q, k, v = layers[0].qkv.weight.grad.chunk(3)
    assert not torch.allclose(q, v) and not torch.allclose(k, layers[0].out.weight.grad)


def test_dropout_changes_training_only():
    model = tiny(find("models", "transformer"), causal=False, dropout=0.5, attention_dropout=0.5)
    x = contract.sequence(1, 7)
    assert torch.equal(model(x, contract.full(x)), model(x, contract.full(x)))
    model.train()
    assert not torch.equal(model(x, contract.full(x)), model(x, contract.full(x)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"d_model": 10, "n_heads": 4}, "not a multiple"),
        ({"d_model": 6, "n_heads": 2}, "turn pairs"),
        ({"positions": ["rotary", "rotary"]}, "twice"),
        ({"positions": "rotor"}, "positions"),
        ({"n_heads": 2.5}, "n_heads"),
    ],
)
def test_contradictions_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        find("models", "transformer").module.Config.model_validate_json(json.dumps(options))
