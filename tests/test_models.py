"""The contract, over every model in models/."""

import json

import pytest
import torch
from tiny import loaded, model_file

from spt.checks import model_contract
from spt.checks.model_contract import counted_flops, tiny
from spt.config.job import Job
from spt.config.plugins import find_plugin, listing
from spt.errors import UsageError
from spt.models.base import Context
from spt.training.build import build_stage

MODELS = [row.name for row in listing("models")]
ONLY_TWO_SIDED = {"linformer", "time_mixer"}
FORMS = [(name, causal) for name in MODELS for causal in ([False] if name in ONLY_TWO_SIDED else [False, True])]
IDS = [f"{name}-{'causal' if causal else 'two-sided'}" for name, causal in FORMS]


@pytest.mark.parametrize("promise", model_contract.PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize(("name", "causal"), FORMS, ids=IDS)
def test_contract(name, promise, causal):
    assert promise(find_plugin("models", name), causal) is None


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hf"])
def test_gradients_within_autocast_are_those_outside(name):
    """A loop of one's own may call backward where autocast is on."""
    found = []
    for within in (False, True):
        model = model_contract.tiny(find_plugin("models", name), False)
        x = model_contract.sequence(2, model_contract.valid_length(model, 33))
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x, Context(torch.ones(2, x.shape[1], dtype=torch.bool), False)).float().square().sum()
            if within:
                y.backward()
        if not within:
            y.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    outside, inside = found
    assert inside.isfinite().all() and (inside - outside).norm() <= 0.05 * outside.norm()


@pytest.mark.parametrize("name", sorted(ONLY_TWO_SIDED))
def test_a_model_without_a_causal_form_says_so(name):
    with pytest.raises(UsageError, match="cannot be causal; use causal: false"):
        tiny(find_plugin("models", name), causal=True)


@pytest.mark.parametrize("name", MODELS)
def test_computing_again_changes_nothing(name):
    """Gradient checkpointing, where nothing else holds a kernel."""
    one, two = (tiny(find_plugin("models", name), causal=name not in ONLY_TWO_SIDED).train() for _ in range(2))
    two.recompute = True
    x, weight = model_contract.sequence(2, 9), model_contract.sequence(2, 9, seed=1)
    for model in (one, two):
        (model(x, model_contract.all_valid(x)) * weight).sum().backward()
    for (key, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        if a.requires_grad:
            torch.testing.assert_close(a.grad, b.grad, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    ("name", "reach", "more"),
    [
        ("transformer", "window", {"exact_window": True}),
        ("transformer", "window", {"shared_qk": True, "look_back": 10**9}),
        ("spade", "window", {}),
        ("mega", "chunk", {}),
    ],
)
def test_a_reach_beyond_the_longest_sequence_costs_nothing(name, reach, more):
    far, near = (tiny(find_plugin("models", name), causal=False, **{reach: size}, **more) for size in (10**12, 72))
    assert sum(p.numel() for p in far.parameters()) == sum(p.numel() for p in near.parameters())
    x = model_contract.sequence(2, 63)
    torch.testing.assert_close(far(x, model_contract.all_valid(x)), near(x, model_contract.all_valid(x)))


def test_every_model_is_described():
    assert MODELS
    assert all(row.description.endswith(".") for row in listing("models"))
    assert not [row.name for row in listing("models") if row.description.endswith("et al.")]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("x.cumsum(1)", None),
        ("x.flip(1)", "steps after"),
        ("x + x.sum((0, 1))", "rest of its batch"),
        ("x + torch.rand(())", "two evaluations"),
        ("x * float('nan')", "not finite"),
        ("x.sum(-1)", "Error"),
    ],
)
def test_the_contract_catches_a_broken_model(tmp_path, change, complaint):
    """Each check must be able to fail: a model that breaks one promise is caught by it."""
    path = model_file(tmp_path, forward=change)
    problems = [
        check.detail for check in model_contract.check_contract(find_plugin("models", str(path))) if not check.ok
    ]
    if complaint is None:  # causal and well-behaved, but padded steps are behind, so nothing is wrong with it
        assert problems == []
    else:
        assert any(any(word in problem for word in complaint.split("|")) for problem in problems), problems


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ("param_groups = {'nosuch': ParamGroup(lr=1e-3)}", "names nosuch, which it does not have"),
        (
            "param_groups = {'map.weight': ParamGroup(lr=float('nan'))}",
            "not a ParamGroup with a positive learning rate",
        ),
        ("param_groups = {'map.weight': 0.1}", "not a ParamGroup with a positive learning rate"),
        ("flops = lambda self, length: float('nan')", "flops"),
        ("flops = lambda self, length: -1.0", "flops"),
        ("flops = lambda self, length: None", "flops"),
    ],
)
def test_wrong_declarations_are_refused_before_training_and_by_the_contract(tmp_path, edit, complaint):
    path = model_file(tmp_path, extra=edit)
    assert any(not check.ok for check in model_contract.check_contract(find_plugin("models", str(path))))
    with pytest.raises(UsageError, match=complaint):
        build_stage(Job(loaded(tmp_path, model={"name": "./mine.py", "d_model": 16}), "pretrain", 0))


def test_understated_operations_are_caught():
    component = find_plugin("models", "transformer")
    model = tiny(component, causal=False)
    assert model.flops(63).forward == pytest.approx(counted_flops(model, 63), rel=1e-6)


def test_flops_by_hand():
    # D = 16, H = 4, d_ff = 64, L = 10: qkv 2·10·16·48, out 2·10·16·16, q k^T and its product with v 2·2·10·10·16,
    # feed-forward 2 · 2·10·16·64; two blocks.
    by_hand = 2 * (15360 + 5120 + 6400 + 40960)
    assert tiny(find_plugin("models", "transformer"), causal=False).flops(10).forward == by_hand


@pytest.mark.parametrize(
    "positions", [[], ["rotary"], ["learned"], ["sinusoidal"], ["rotary", "learned", "sinusoidal"]]
)
def test_positions_break_the_symmetry_of_order(positions):
    """Without positions attention cannot tell an order from its reverse; with any of them it can."""
    std = {"position_std": 1.0} if "learned" in positions else {}
    model = tiny(find_plugin("models", "transformer"), causal=False, positions=positions, **std)
    x = model_contract.sequence(1, 7)
    forwards, backwards = model(x, model_contract.all_valid(x)), model(x.flip(1), model_contract.all_valid(x)).flip(1)
    assert torch.allclose(forwards, backwards, atol=1e-4) == (positions == [])


@torch.no_grad()
def test_padding_is_looked_at_only_when_asked_for():
    """Without mask_padding, padded steps are steps like any others: the published code's convention."""
    x = model_contract.sequence(2, 9)
    padded = Context(torch.arange(9) < torch.tensor([[9], [4]]), padded=True)
    component = find_plugin("models", "transformer")
    plain, open_ = (tiny(component, causal=False, mask_padding=mask) for mask in (True, False))
    torch.testing.assert_close(open_(x, padded), open_(x, model_contract.all_valid(x)))
    torch.testing.assert_close(open_(x, model_contract.all_valid(x)), plain(x, model_contract.all_valid(x)))
    assert not torch.allclose(plain(x, padded)[1, :4], open_(x, padded)[1, :4], atol=1e-3)
    other = x.clone()
    other[1, 4:] = x[1, 4:].flip(-1)
    assert model_contract.difference(open_(other, padded)[1, :4], open_(x, padded)[1, :4]) > 1e-3
    assert model_contract.difference(plain(other, padded)[1, :4], plain(x, padded)[1, :4]) < model_contract.TOLERANCE


@pytest.mark.parametrize("norm", ["layer", "scalar"])
def test_a_norm_that_leaves_nothing_of_one_feature_is_refused(norm):
    with pytest.raises(UsageError, match=r"d_model 1 with norm: .* nothing is left"):
        tiny(find_plugin("models", "mingru"), causal=True, d_model=1, norm=norm)
    tiny(find_plugin("models", "mingru"), causal=True, d_model=1, norm="none")


@pytest.mark.parametrize(
    ("norm", "option", "value"),
    [("layer", "norm_momentum", 0.5), ("rms", "norm_unbiased", False), ("none", "norm_eps", 1e-3)],
)
def test_options_of_other_norms_are_refused(norm, option, value):
    module = find_plugin("models", "mingru").module
    with pytest.raises(ValueError, match=f"{option} has no effect with norm: {norm}"):
        module.Config(norm=norm, **{option: value})
    module.Config(norm="batch", **{option: value})


def test_dropout_changes_training_only():
    model = tiny(find_plugin("models", "transformer"), causal=False, dropout=0.5, attention_dropout=0.5)
    x = model_contract.sequence(1, 7)
    assert torch.equal(model(x, model_contract.all_valid(x)), model(x, model_contract.all_valid(x)))
    model.train()
    assert not torch.equal(model(x, model_contract.all_valid(x)), model(x, model_contract.all_valid(x)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"d_model": 10, "n_heads": 4}, "not a multiple"),
        ({"d_model": 6, "n_heads": 2}, "rotate pairs"),
        ({"positions": ["rotary", "rotary"]}, "twice"),
        ({"positions": "rotor"}, "positions"),
        ({"n_heads": 2.5}, "n_heads"),
        ({"feed_forward": "switch", "n_experts": 1}, "n_experts 1 leaves a router nothing to choose"),
    ],
)
def test_contradictions_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        find_plugin("models", "transformer").module.Config.model_validate_json(json.dumps(options))


@pytest.mark.parametrize(
    ("d_ff", "reason"), [(10**13, "one tensor takes 640,000.0 GB"), (2**61, "its tensors have too many numbers")]
)
def test_a_network_that_no_machine_holds_is_refused_in_plain_words(tmp_path, d_ff, reason):
    with pytest.raises(UsageError, match=f"too large to build here: {reason}; take a smaller width") as caught:
        build_stage(Job(loaded(tmp_path, model__d_ff=d_ff), "finetune", 0))
    assert "alloc" not in str(caught.value)


def test_what_is_no_number_is_a_difference():
    some = torch.tensor([1.0, 2.0])
    assert model_contract._if_different(some, some, "odd") is None
    assert model_contract._if_different(some * torch.nan, some, "odd") == "odd (by nan)"
