"""The layer between the mixers: plain, and split among experts, against loops over steps."""

import json

import pytest
import torch
from tiny import loaded, recipe_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from spt.analysis.resolved import resolve_overview
from spt.checks import model_contract
from spt.checks.model_contract import all_valid, sequence, tiny
from spt.config.plugins import find_plugin
from spt.config.recipe import Train
from spt.models.base import Context, Unsupported
from spt.models.feedforward import ACTIVATIONS, FeedForward, SwitchFeedForward
from spt.training.optimizer import optimizer_groups
from spt_cli import app

D, F, X = 6, 10, 4
SWITCH = {"feed_forward": "switch", "n_experts": 3, "d_ff": 20}


def layer(routing="token", **options) -> SwitchFeedForward:
    torch.manual_seed(0)
    return SwitchFeedForward(D, F, X, routing=routing, **options).double()


def lengths(*valid: int, longest: int = 13) -> Context:
    return Context(torch.arange(longest) < torch.tensor(valid)[:, None], padded=min(valid) < longest)


def expert(mixer: SwitchFeedForward, e: int, x: torch.Tensor) -> torch.Tensor:
    """One expert, written out."""
    up_bias, down_bias = mixer.up_bias[F * e : F * (e + 1)], mixer.down_bias[D * e : D * (e + 1)]
    return ACTIVATIONS[mixer.activation](x @ mixer.up[e] + up_bias) @ mixer.down[e] + down_bias


def by_token(mixer, x, valid):
    y = torch.zeros_like(x)
    for b in range(len(x)):
        for t in range(x.shape[1]):
            p = (mixer.router.weight @ x[b, t]).softmax(0)
            e = int(p.argmax())
            y[b, t] = p[e] * expert(mixer, e, x[b, t])
    return y


def by_expert(mixer, x, valid):
    y = torch.zeros_like(x)
    for b in range(len(x)):
        n = int(valid[b].sum())
        p = (x[b, :n] @ mixer.router.weight.T).softmax(1)
        many = -(-(1 if mixer.training else 2) * n // X)
        for e in range(X):
            for t in sorted(range(n), key=lambda t: -p[t, e].item())[:many]:
                y[b, t] += p[t, e] * expert(mixer, e, x[b, t])
    return y


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize(("routing", "loop"), [("token", by_token), ("expert", by_expert)])
def test_routing_by_a_loop(routing, loop, activation, training):
    """Answers on valid steps, and all gradients; sequences of 13, 1, 4 and 6 steps."""
    mixer, context = layer(routing, activation=activation).train(training), lengths(13, 1, 4, 6)
    x = torch.randn(4, 13, D, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 13, D, dtype=torch.float64) * context.valid[..., None]
    wanted = [x, *mixer.parameters()]
    ours, theirs = mixer(x, context), loop(mixer, x, context.valid)
    torch.testing.assert_close(ours * context.valid[..., None], theirs * context.valid[..., None])
    for a, b in zip(*(torch.autograd.grad((y * g).sum(), wanted) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


FORMS = ["_one_by_one", "_in_blocks", "_in_groups"]


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("lengths_", [(40, 40, 40), (40, 1, 9), (1, 1, 1), (40, 0, 3)])
def test_experts_at_once_are_experts_one_by_one(form, lengths_):
    """As on GPUs: values and all gradients of the loop; one expert gets nothing, another most."""
    torch.manual_seed(0)
    dtype = torch.float32 if form == "_in_groups" else torch.float64  # as far as torch has grouped products on a CPU
    mixer, context = SwitchFeedForward(8, 16, 5).to(dtype), lengths(*lengths_, longest=max(lengths_))
    x = torch.randn(3, max(lengths_), 8, dtype=dtype, requires_grad=True)
    choice = torch.tensor([0, 0, 0, 1, 3, 4])[torch.randint(6, x.shape[:2])].masked_fill(~context.valid, 5).flatten()
    wanted = [x, *(p for name, p in mixer.named_parameters() if "router" not in name)]
    ours, theirs = (getattr(mixer, name)(x.flatten(0, 1), choice) for name in (form, "_one_by_one"))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(ours, theirs, **tolerance)
    assert not ours[choice == 5].any()
    g = torch.randn(ours.shape, dtype=dtype)
    for a, b in zip(*(torch.autograd.grad(y, wanted, g) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("form", FORMS[1:])
def test_experts_at_once_wait_for_no_value(form):
    """Forward and backward, in as many operations for many experts as for few; where there are no values to read."""
    counts, dtype = [], torch.bfloat16 if form == "_in_groups" else torch.float32
    for n_experts in (2, 12):
        mixer = SwitchFeedForward(8, 16, n_experts, dropout=0.1).to("meta", dtype)
        x = torch.randn(30, 8, device="meta", dtype=dtype, requires_grad=True)
        operations = Operations()
        with operations:
            getattr(mixer, form)(x, torch.zeros(30, dtype=torch.long, device="meta")).sum().backward()
        counts.append(len(operations.names))
        assert x.grad.shape == x.shape and not {"aten::item", "aten::_local_scalar_dense"} & set(operations.names)
    assert counts[0] == counts[1] < 120


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_experts_on_a_gpu(precision):
    """What a CPU computes, and nothing waits for the device."""
    torch.manual_seed(0)
    mixer, x = SwitchFeedForward(16, 32, 4), torch.randn(3, 50, 16)
    context = lengths(50, 7, 20, longest=50)
    exact = mixer(x, context)
    mixer, x, context = mixer.cuda(), x.cuda().requires_grad_(), context._replace(valid=context.valid.cuda())
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
        mixer(x, context).float().square().sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = mixer(x, context)
            y.float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(y.float().cpu(), exact, atol=0.03, rtol=0.03)
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_steps_are_routed_at_all(routing):
    """Different steps take different experts, in different numbers."""
    mixer, x = layer(routing), torch.randn(3, 13, D, dtype=torch.float64)
    choice = mixer.probabilities(x).argmax(-1)
    assert len(set(choice.flatten().tolist())) == X
    y = mixer.train()(x, all_valid(x))
    assert bool((y == 0).all(-1).any()) == (routing == "expert"), "an expert's choice leaves steps out"


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_equal_steps_are_taken_in_their_order(routing):
    """Where steps are alike, padding must not decide which of them an expert takes."""
    mixer, x = layer(routing).eval(), torch.ones(1, 11, D, dtype=torch.float64)
    padded = torch.cat([x, torch.zeros(1, 40, D, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(mixer(padded, lengths(11, longest=51))[:, :11], mixer(x, all_valid(x)))
    if routing == "expert":
        assert (mixer(x, all_valid(x)) != 0).any(-1).nonzero()[:, 1].tolist() == list(range(6))  # 2/4 of 11, the first


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_what_stands_on_padding_does_not_matter(routing):
    mixer, context = layer(routing).eval(), lengths(13, 5, 0)
    x = torch.randn(3, 13, D, dtype=torch.float64)
    other = torch.where(context.valid[..., None], x, 1e3)
    assert torch.equal(mixer(x, context)[context.valid], mixer(other, context)[context.valid])
    assert mixer(other, context).isfinite().all()


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_one_expert_is_the_plain_layer(routing):
    """Its probability is one; it takes every step, once."""
    plain, one = FeedForward(D, F).double(), SwitchFeedForward(D, F, 1, routing=routing).double().eval()
    weights = {"up": plain.up.weight.T[None], "up_bias": plain.up.bias, "down": plain.down.weight.T[None]}
    one.load_state_dict({**weights, "down_bias": plain.down.bias, "router.weight": one.router.weight})
    x = torch.randn(2, 7, D, dtype=torch.float64)
    torch.testing.assert_close(one(x, all_valid(x)), plain(x, all_valid(x)))


def test_experts_start_as_linear_maps_do():
    torch.manual_seed(0)
    mixer = SwitchFeedForward(16, 64, 8)
    for values, inputs in ((mixer.up, 16), (mixer.up_bias, 16), (mixer.down, 64), (mixer.down_bias, 64)):
        bound = inputs**-0.5
        assert 0.97 * bound < float(values.detach().abs().max()) <= bound
        assert float(values.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_memory_does_not_grow_with_the_experts(routing):
    """What is kept for the backward pass in training, but for the weights, against the plain layer."""

    def kept(mixer):
        sizes = {}
        known = {p.untyped_storage().data_ptr() for p in mixer.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        x = torch.randn(2, 512, 64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(x, all_valid(x))
        return sum(sizes.values())

    plain = kept(FeedForward(64, 256))
    assert kept(SwitchFeedForward(64, 256, 16, routing=routing)) < 1.5 * plain


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_operations_by_hand_and_by_count(routing):
    mixer, x = SwitchFeedForward(8, 24, 4, routing=routing), torch.randn(1, 64, 8)
    assert mixer.flops(64).forward == 2 * 64 * 8 * 4 + 4 * 64 * 8 * 24
    with FlopCounterMode(display=False) as counter:
        mixer(x, all_valid(x))
    assert counter.get_total_flops() == mixer.flops(64).forward
    ceiling = {"token": 63, "expert": 64}[routing]  # 63 / 4 steps an expert, rounded up
    assert mixer.flops(63).forward == 2 * 63 * 8 * 4 + 4 * ceiling * 8 * 24


def test_no_expert_works_on_padding():
    mixer, x, half = SwitchFeedForward(8, 24, 4), torch.randn(2, 64, 8), lengths(64, 16, longest=64)
    with FlopCounterMode(display=False) as counter:
        mixer(x, half)
    assert counter.get_total_flops() == 2 * mixer.flops(64).forward - 48 * 4 * 8 * 24


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_halves_are_routed_by_whole_numbers(routing):
    """Under autocast the experts are bfloat16, the router is not."""
    torch.manual_seed(0)
    mixer, x = SwitchFeedForward(16, 32, 4, routing=routing), torch.randn(2, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        p, y = mixer.probabilities(x), mixer(x, all_valid(x))
        from_halves = mixer.probabilities(x.bfloat16())
    assert p.dtype == torch.float32 and torch.equal(p, mixer.probabilities(x))
    assert torch.equal(from_halves, mixer.probabilities(x.bfloat16().float()))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), mixer(x, all_valid(x)), atol=0.02, rtol=0.02)


def test_dropout_within_an_expert():
    for routing in ("token", "expert"):
        mixer, x = layer(routing, dropout=0.5), torch.randn(1, 9, D, dtype=torch.float64)
        assert not torch.equal(mixer.train()(x, all_valid(x)), mixer(x, all_valid(x)))
        assert torch.equal(mixer.eval()(x, all_valid(x)), mixer(x, all_valid(x)))


# ------------------------------------------------------------------------------------------------------- in any stack

STACKS = {"transformer": {}, "dlr": {"d_state": 8}, "s4": {"d_state": 8}}


PROMISES = [
    (routing, causal, promise)
    for routing, causal in (("token", False), ("token", True), ("expert", False))
    for promise in model_contract.PROMISES
    if routing == "token"
    or promise is not model_contract.states_its_operations  # in evaluation there are more, see above
]


@pytest.mark.parametrize(("routing", "causal", "promise"), PROMISES, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("name", STACKS)
def test_contract(name, routing, promise, causal, monkeypatch):
    """The contract of all models, with experts; those that take their steps look ahead."""
    options = {**STACKS[name], **SWITCH, "routing": routing}
    monkeypatch.setattr(model_contract, "tiny", lambda *where, **more: tiny(*where, **options, **more))
    assert promise(find_plugin("models", name), causal) is None


@pytest.mark.parametrize("name", STACKS)
def test_experts_that_look_ahead_are_asked_for_by_name(name):
    options = {**STACKS[name], **SWITCH, "routing": "expert"}
    config = find_plugin("models", name).module.Config
    with pytest.raises(Unsupported, match=r"looks ahead.*routing: token or causal: false"):
        find_plugin("models", name).module.build(config(causal=True, max_length=63, d_model=16, **options))
    ahead = tiny(find_plugin("models", name), causal=True, noncausal_routing=True, **options)
    x = sequence(1, 63)
    other = torch.cat([x[:, :30], sequence(1, 33, seed=1)], dim=1)
    assert not ahead.recurrent
    assert not torch.allclose(ahead(x, all_valid(x))[:, :30], ahead(other, all_valid(x))[:, :30], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"n_experts": 4}, "n_experts has no effect without a feed-forward layer"),
        ({"noncausal_routing": True}, "noncausal_routing has no effect without a feed-forward layer"),
        ({"feed_forward": "mlp", "n_experts": 4}, "n_experts has no effect with feed_forward: mlp"),
        ({"feed_forward": "mlp", "routing": "expert"}, "routing has no effect with feed_forward: mlp"),
        ({"feed_forward": "switch", "noncausal_routing": True}, "unless the model is causal and routing is expert"),
        (
            {"feed_forward": "switch", "routing": "expert", "noncausal_routing": True},
            "unless the model is causal and routing is expert",
        ),
        ({"feed_forward": "switch", "n_experts": 0}, "n_experts"),
    ],
)
def test_settings_without_effect_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        find_plugin("models", "dlr").module.Config.model_validate_json(json.dumps(options))


EXPERTS = {"feed_forward": "switch", "n_experts": 16, "routing": "expert", "noncausal_routing": True}


@pytest.mark.parametrize(
    ("name", "millions", "options"),
    [
        ("transformer", 36, {"n_heads": 8, "d_head": 64}),
        ("transformer", 318, {"n_heads": 8, "d_head": 64, **EXPERTS}),
        ("dlr", 312, {"d_state": 512, "output": "identity", **EXPERTS}),
    ],
)
def test_the_language_models_of_the_dlr_paper_are_as_large_as_published(name, millions, options):
    """Its Table 5: 16 layers of width 384; vectors of 128 for T5's 32,128 tokens, tied, stand before and behind. The
    experts' inner width is not told; four times the layers' gives all three sizes to 0.7 per cent."""
    config = find_plugin("models", name).module.Config(
        d_model=384, n_layers=16, causal=True, max_length=4096, **options
    )
    with torch.device("meta"):
        backbone = find_plugin("models", name).module.build(config)
    size = sum(p.numel() for p in backbone.parameters()) + 32_128 * 128 + 2 * 128 * 384
    assert size / 1e6 == pytest.approx(millions, rel=0.007)


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_gradient_checkpointing_routes_alike(routing):
    found = []
    for recompute in (False, True):
        model = tiny(find_plugin("models", "dlr"), causal=False, d_state=8, **SWITCH, routing=routing).train()
        model.recompute = recompute
        x = sequence(2, 63)
        (model(x, all_valid(x)) * sequence(2, 63, seed=2)).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_biases_are_biases_to_weight_decay():
    train = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05)
    for name, decaying in (("s4", False), ("dlr", True)):  # the DLR repository decays them
        made = optimizer_groups(tiny(find_plugin("models", name), causal=False, **STACKS[name], **SWITCH), train)
        decay = {name: bool(group.weight_decay) for group in made for name in group.names}
        assert decay["mixers.1.up_bias"] == decay["mixers.1.down_bias"] == decaying
        assert decay["mixers.1.up"] and decay["mixers.1.down"] and decay["mixers.1.router.weight"]


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_show_counts_experts_without_numbers(tmp_path, routing):
    """Sequences of equal length, and of different ones; memory near that of the plain layer."""
    one = {"name": "s4", "d_model": 16, "n_layers": 1, "d_state": 8, "d_ff": 64}
    plain = resolve_overview(loaded(tmp_path, model={**one, "feed_forward": "mlp"}))["stages"][0]
    switch = {"feed_forward": "switch", "n_experts": 4, "routing": routing}
    found = resolve_overview(loaded(tmp_path, model={**one, **switch}))["stages"][0]
    kept = [stage["memory estimate"]["activations"] for stage in (plain, found)]
    assert kept[0] < kept[1] < 1.5 * kept[0]
    assert found["parameters"]["backbone"] > plain["parameters"]["backbone"] + 2 * 3 * 16 * 64


def test_a_comparison_end_to_end(tmp_path):
    model = {"name": "dlr", "d_model": 16, "n_layers": 1, "d_state": 8, "feed_forward": "switch", "n_experts": 4}
    recipe = recipe_file(tmp_path, model={**model, "d_ff": 64})
    arguments = ["compare", recipe, "--smoke", "--seeds", 2, "--json", "--cpu", "--out", tmp_path / "runs"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == "dlr" and row["n"] == 2 and row["delta"] is not None
