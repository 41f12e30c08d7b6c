"""SPADE and the DLR paper's attention block, against their definitions written out."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from reference_weights import export_reference, import_reference
from safetensors.torch import load, save
from tiny import held_to_table, loaded, recipe_file, run
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from spt.checks import model_contract
from spt.checks.model_contract import all_valid, sequence, tiny
from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.config.recipe import Train
from spt.errors import UsageError
from spt.models.base import Context
from spt.models.spade import BUCKETS, buckets
from spt.training.build import build_stage
from spt.training.optimizer import optimizer_groups
from spt_cli import app

SMALL = {
    "spade": {"d_state": 8, "n_heads": 2, "window": 4},
    "dlr_attention": {"n_heads": 2, "window": 4, "extra_feed_forward": 2},
}


def model(name: str, causal: bool = False, **options):
    """Two blocks, d_model 16, in double precision, every parameter away from where it starts."""
    made = tiny(find_plugin("models", name), causal, **{**SMALL[name], **options}).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


def batch(*valid: int, longest: int):
    x = torch.randn(len(valid), longest, 16, dtype=torch.float64)
    context = Context(torch.arange(longest) < torch.tensor(valid)[:, None], padded=min(valid) < longest)
    return x.masked_fill(~context.valid[..., None], 0.0), context


def heads(x, maps, n):
    """(L, D) -> n heads (L, E) of queries, of keys and of values, by a map's weight and bias."""
    weight, bias = maps
    return [part.split(x.shape[1] // n, dim=1) for part in F.linear(x, weight, bias).chunk(3, dim=1)]


def softmax_rows(q, k, v, sees, score):
    """One head, one query at a time."""
    rows = []
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if sees(i, j)]
        weights = torch.stack([score(i, j, q[i] @ k[j]) for j in keys]).softmax(0)
        rows.append(sum(weight * v[j] for weight, j in zip(weights, keys, strict=True)))
    return torch.stack(rows)


# -------------------------------------------------------------------------------------------------------------- SPADE


def bucket_by_rule(distance: int, causal: bool) -> int:
    """In whole numbers: from m / 2 on, bucket b begins where (d / first)^k reaches the (b - first)th power of the
    ratio of the furthest to the first distance, with m buckets on a side and k = m - first of them shared."""
    m, side = (32, 0) if causal else (16, 16 if distance > 0 else 0)
    away = max(0, -distance) if causal else abs(distance)
    first = m // 2
    if away < first:
        return side + away
    reached = [b for b in range(first, m) if away ** (m - first) * first ** (b - m) * 128 ** (first - b) >= 1]
    return side + max(b for b in reached)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_t5(causal):
    distance = torch.arange(-300, 301)
    assert buckets(distance, causal).tolist() == [bucket_by_rule(int(d), causal) for d in distance]
    unused = set() if causal else {16}  # later, and no step away
    assert set(buckets(distance, causal).tolist()) == set(range(BUCKETS)) - unused
    assert buckets(torch.tensor([-7, -8, -16, -128, -5000, 0, 7, 8]), False).tolist() == [7, 8, 10, 15, 15, 0, 23, 24]
    assert buckets(torch.tensor([-15, -16, -128, 0, 3]), True).tolist() == [15, 16, 31, 0, 0]


def local(mixer, x, w, causal, table):
    """SPADE's attention on one sequence (L, D)."""

    def one(q, k, v, row):
        return softmax_rows(
            q,
            k,
            v,
            lambda i, j: abs(i - j) < w and not (causal and j > i),
            lambda i, j, product: product / math.sqrt(8) + row[bucket_by_rule(j - i, causal)],
        )

    answers = [one(*head) for head in zip(*heads(x, (mixer.qkv.weight, None), 2), table, strict=True)]
    return torch.cat(answers, dim=1) @ mixer.out.weight.T


def state_space(mixer, x):
    """The long convolution on one sequence, as sums (layers.md 1.1)."""
    kernel, y = mixer.kernel(len(x)), mixer.D * x
    for t in range(len(x)):
        for s in range(len(x)):
            if s <= t:
                y[t] = y[t] + kernel[0, :, t - s] * x[s]
            elif len(kernel) == 2:
                y[t] = y[t] + kernel[1, :, s - t - 1] * x[s]
    return y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("combine", ["concat", "weighted", "stack"])
def test_spade_by_definition(combine, causal):
    """Sequences of one step, shorter than a block, of a block, with odd rests; answers and all gradients."""
    spade = model("spade", causal, combine=combine, ssm_weight=0.3 if combine == "weighted" else 0.5)
    first, second = spade.mixers[0], spade.mixers[2]
    table = first.local.positions.weight
    valid = (13, 1, 3, 4, 9)
    x, context = batch(*valid, longest=13)

    def defined(mixer, x):
        if mixer is second:
            return local(second, x, 4, causal, table)
        far = state_space(first.ssm, x)
        if combine == "stack":
            return local(first.local, far, 4, causal, table)
        near = F.layer_norm(local(first.local, x, 4, causal, table), (16,), *first.local_norm.parameters())
        far = F.layer_norm(far, (16,), *first.ssm_norm.parameters())
        if combine == "weighted":
            return 0.3 * far + 0.7 * near
        return first.map.weight @ torch.cat([far, near], 1).T + first.map.bias[:, None]

    for mixer in (first, second):
        parameters = list({*mixer.parameters(), table})
        found, expected = mixer(x, context), []
        for b, n in enumerate(valid):
            answer = defined(mixer, x[b, :n])
            expected.append(answer.T if mixer is first and combine == "concat" else answer)
        for b, n in enumerate(valid):
            torch.testing.assert_close(found[b, :n], expected[b])
        g = [torch.randn(n, 16, dtype=torch.float64) for n in valid]
        ours = sum((found[b, :n] * g[b]).sum() for b, n in enumerate(valid))
        theirs = sum((expected[b] * g[b]).sum() for b in range(len(valid)))
        for a, b in zip(*(torch.autograd.grad(y, parameters) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("promise", model_contract.PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("combine", ["concat", "weighted", "stack"])
def test_contract_with_many_blocks(combine, promise, causal, monkeypatch):
    """The default's window is longer than the contract's sequences."""
    options = {**SMALL["spade"], "window": 5, "combine": combine}
    monkeypatch.setattr(model_contract, "tiny", lambda *where, **more: tiny(*where, **options, **more))
    assert promise(find_plugin("models", "spade"), causal) is None


def test_relative_positions_are_one_parameter():
    """Saved once, trained by all layers, and still shared in a copy."""
    spade, x = model("spade"), sequence(2, 13).double()
    (name,) = [name for name in spade.state_dict() if "positions" in name]
    assert name == "mixers.0.local.positions.weight" and spade.state_dict()[name].shape == (2, BUCKETS)
    twin = copy.deepcopy(spade)
    twin.load_state_dict(load(save(spade.state_dict())))  # safetensors refuses what is there twice
    shared = [mixer._shared[0] for mixer in (twin.mixers[0].local, twin.mixers[2])]
    assert shared[0] is shared[1] is twin.mixers[0].local.positions is not spade.mixers[0].local.positions
    for net in (spade, twin):
        assert (net.mixers[2](x, all_valid(x)) - spade.mixers[2](x, all_valid(x))).abs().max() == 0
    with torch.no_grad():
        twin.get_parameter(name).add_(torch.randn(2, BUCKETS))
    assert not torch.allclose(twin.mixers[2](x, all_valid(x)), spade.mixers[2](x, all_valid(x)), atol=1e-3)
    for mixer in (spade.mixers[0], spade.mixers[2]):
        spade.zero_grad()
        (mixer(x, all_valid(x)) * sequence(2, 13, seed=1)).sum().backward()
        assert spade.get_parameter(name).grad.abs().sum() > 0


def test_relative_positions_under_data_parallelism():
    """DistributedDataParallel, of one process: the gradients it leaves are the model's."""
    spade, x = model("spade").float(), sequence(2, 13)
    plain = copy.deepcopy(spade)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(spade)(x, all_valid(x)).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    plain(x, all_valid(x)).square().sum().backward()
    for ours, theirs in zip(spade.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_state_space(frozen):
    """dt, A, P and B are no optimiser's and get no gradient; what the published code trains all the same, does."""
    spade, x = tiny(find_plugin("models", "spade"), False, freeze_ssm=frozen, **SMALL["spade"]).train(), sequence(2, 13)
    (spade(x, all_valid(x)) * sequence(2, 13, seed=1)).sum().backward()
    made = optimizer_groups(spade, Train(steps=1, batch_size=1, learning_rate=0.01))
    trained = {name for group in made for name in group.names}
    for name, parameter in spade.named_parameters():
        still = frozen and name in {f"mixers.0.ssm.kernel.{part}" for part in ("inv_dt", "A_real", "A_imag", "P", "B")}
        assert (parameter.grad is None, name not in trained) == (still, still), name
    assert "mixers.0.ssm.kernel.C" in trained and "mixers.0.ssm.D" in trained
    free = tiny(find_plugin("models", "spade"), False, **SMALL["spade"])
    torch.testing.assert_close(free(x, all_valid(x)), spade.eval()(x, all_valid(x)))


def test_only_the_first_block_has_a_state_space():
    spade = tiny(find_plugin("models", "spade"), False, **SMALL["spade"], n_layers=4)
    kinds = [type(mixer).__name__ for mixer in spade.mixers]
    assert kinds == ["Augmented", "FeedForward", *["LocalAttention", "FeedForward"] * 3]


def test_projections_start_as_published():
    """Each of q, k and v uniform with a bound of sqrt(6 / 2D) / sqrt(2), the output map sqrt(2) times that."""
    spade = tiny(find_plugin("models", "spade"), False, d_model=128, n_heads=2)
    bound = math.sqrt(1.5 / 128)
    for weight, times in ((spade.mixers[2].qkv.weight, 1), (spade.mixers[2].out.weight, 2**0.5)):
        assert 0.99 * times * bound < float(weight.detach().abs().max()) <= times * bound
    assert float(spade.mixers[0].local.positions.weight.detach().std()) == pytest.approx(1, rel=0.2)


def test_attention_dropout_is_for_training():
    mixer = tiny(find_plugin("models", "spade"), False, **SMALL["spade"], attention_dropout=0.5).mixers[2]
    x = sequence(2, 13)
    assert torch.equal(mixer.eval()(x, all_valid(x)), mixer(x, all_valid(x)))
    assert not torch.equal(mixer.train()(x, all_valid(x)), mixer(x, all_valid(x)))


@pytest.mark.parametrize("causal", [False, True])
def test_operations_of_local_attention_by_count(causal):
    mixer = tiny(find_plugin("models", "spade"), causal, **SMALL["spade"]).mixers[2]
    for length in (1, 3, 4, 11, 63):
        x = sequence(1, length)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            mixer(x, all_valid(x))
        assert mixer.flops(length).forward == counter.get_total_flops(), length


def test_the_kernel_within_a_block_is_made_once_a_step(tmp_path, monkeypatch):
    """As those of other long convolutions: six steps of three micro-batches, two evaluations and the result's."""
    kernel, calls = find_plugin("models", "spade").module.S4Kernel, []
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, length: calls.append(length) or forward(self, length))
    one = {"name": "spade", "d_model": 16, "n_layers": 1, **SMALL["spade"]}
    run(Job(loaded(tmp_path, model=one), "finetune", 0), tmp_path / "runs", micro_batch_size=3)
    assert len(calls) == 6 + 2 + 2


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("spade", {"n_heads": 3}, "128 is not a multiple of n_heads 3"),
        ("spade", {"window": 0}, "window"),
        ("spade", {"ssm_weight": 0.2}, "ssm_weight has no effect with combine: concat"),
        ("spade", {"d_state": 7}, "d_state 7 is odd"),
        ("spade", {"output": "glu"}, "output"),
        ("dlr_attention", {"d_model": 10, "n_heads": 4}, "not a multiple"),
        ("dlr_attention", {"d_model": 12, "n_heads": 4}, "a head is 3 wide"),
        ("dlr_attention", {"output": "half_glu1"}, "output"),
    ],
)
def test_contradictions_are_refused(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        find_plugin("models", name).module.Config.model_validate_json(json.dumps(options))


# ------------------------------------------------------------------------------------- the DLR paper's attention block


def turned(x):
    """Rotary positions of one head (L, E): pairs (2m, 2m + 1) turned by t 10000^(-2m/E)."""
    y = torch.empty_like(x)
    for t in range(len(x)):
        for m in range(x.shape[1] // 2):
            c, s = (f(t * 10000 ** (-2 * m / x.shape[1])) for f in (math.cos, math.sin))
            a, b = x[t, 2 * m], x[t, 2 * m + 1]
            y[t, 2 * m], y[t, 2 * m + 1] = a * c - b * s, a * s + b * c
    return y


def dlr_layer(mixer, x, c, causal):
    """W (u + gelu(attention(u))) + b on one sequence (L, D)."""

    def sees(i, j):
        return abs(i // c - j // c) <= 1 and not (causal and j > i)

    attention = mixer.attention
    answers = [
        softmax_rows(turned(q), turned(k), v, sees, lambda i, j, product: product * attention.temperature)
        for q, k, v in zip(*heads(x, attention.qkv.parameters(), 2), strict=True)
    ]
    y = F.linear(torch.cat(answers, dim=1), *attention.out.parameters())
    for norm, up, _, down in mixer.extra:
        y = y + F.linear(
            F.gelu(F.linear(F.layer_norm(y, (16,), *norm.parameters()), *up.parameters())), *down.parameters()
        )
    y = F.linear(x + F.gelu(y), *mixer.map.parameters())
    return y[:, :16] * torch.sigmoid(y[:, 16:]) if len(mixer.map.weight) == 32 else y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options", [{"window": None, "extra_feed_forward": 0}, {"extra_feed_forward": 0, "output": "glu"}, {}], ids=str
)
def test_dlr_attention_by_definition(options, causal):
    """Full, gated among chunks, and with the two more layers; sequences shorter and longer than a chunk."""
    mixer = model("dlr_attention", causal, **options).mixers[0]
    valid, c = (13, 1, 4, 10), mixer.attention.window or 13
    x, context = batch(*valid, longest=13)
    found, parameters, ours, theirs = mixer(x, context), list(mixer.parameters()), 0.0, 0.0
    for b, n in enumerate(valid):
        expected, g = dlr_layer(mixer, x[b, :n], c, causal), torch.randn(n, 16, dtype=torch.float64)
        torch.testing.assert_close(found[b, :n], expected)
        ours, theirs = ours + (found[b, :n] * g).sum(), theirs + (expected * g).sum()
    for a, b in zip(*(torch.autograd.grad(y, parameters) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("promise", model_contract.PROMISES, ids=lambda promise: promise.__name__)
def test_contract_of_dlr_attention_among_chunks(promise, causal, monkeypatch):
    options = {**SMALL["dlr_attention"], "output": "glu"}
    monkeypatch.setattr(model_contract, "tiny", lambda *where, **more: tiny(*where, **options, **more))
    assert promise(find_plugin("models", "dlr_attention"), causal) is None


def test_the_temperature_starts_at_the_usual_scale():
    mixer = tiny(find_plugin("models", "dlr_attention"), False, d_model=64, n_heads=4).mixers[0]
    assert mixer.attention.temperature.tolist() == [0.25]
    assert not mixer.extra and mixer.map.weight.shape == (64, 64)


@pytest.mark.parametrize("output", ["linear", "glu"])
@pytest.mark.parametrize("expansion", [0, 3])
def test_published_tensors_and_back(output, expansion):
    """Under the names of the DLR repository's layer, into another of ours."""
    options = {"output": output, "extra_feed_forward": expansion}
    one, other = (model("dlr_attention", **options).mixers[0] for _ in range(2))
    raw = export_reference(one)
    behind = ".0" if output == "glu" else ""  # a gate makes the map part of a sequence
    assert raw["attn.Q.weight"].shape == (16, 16) and raw["attn.scale"].shape == (1,)
    assert raw[f"output_linear{behind}.bias"].shape == (32 if output == "glu" else 16, 1)
    if expansion:  # norm, map, activation, map
        assert torch.equal(raw["attn.ff.1.weight"], one.extra[0][1].weight)
        assert torch.equal(raw["attn.ff2.3.bias"], one.extra[1][3].bias)
    found = other.load_state_dict(import_reference(other, raw), strict=False)
    assert found.missing_keys == [] == found.unexpected_keys
    x = sequence(2, 13).double()
    torch.testing.assert_close(other(x, all_valid(x)), one(x, all_valid(x)))
    with pytest.raises(ValueError, match="published tensors have"):
        import_reference(other, {"nothing": torch.zeros(1)})


@pytest.mark.parametrize("tied", [False, True])
def test_dropout_behind_the_activation(tied):
    """Of the activation alone, not of the layer's input."""
    made = tiny(find_plugin("models", "dlr_attention"), False, dropout=0.5, tie_dropout=tied, **SMALL["dlr_attention"])
    mixer, x = made.mixers[0].train(), sequence(1, 13)
    seen = []
    mixer.map.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0] - x))
    mixer(x, all_valid(x)), mixer.eval()(x, all_valid(x))
    dropped = seen[0].abs() < 1e-6
    assert 0.2 < float(dropped.float().mean()) < 0.8
    torch.testing.assert_close(seen[0][~dropped], 2 * seen[1][~dropped])
    assert bool((dropped == dropped[:, :1]).all()) == tied


# ------------------------------------------------------------------------------------------ neither GELU nor output map

LONG = {"s4": {"d_state": 8}, "s4d": {"d_state": 8}, "dss": {"d_state": 8}, "dlr": {"d_state": 8}, "sgconv": {}}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_an_identity_output_leaves_the_convolution(name, causal):
    """y is linear in u, without parameters of its own, step by step too; dropout is the stack's alone."""
    made = tiny(find_plugin("models", name), causal, output="identity", dropout=0.5, n_layers=1, **LONG[name])
    mixer, x = made.mixers[0], sequence(2, 13)
    assert [name for name, _ in mixer.named_parameters() if not name.startswith("kernel.")] == ["D"]
    y = mixer.train()(x, all_valid(x))
    assert torch.equal(y, mixer.mix_sequence(x))
    torch.testing.assert_close(mixer(2 * x, all_valid(x)), 2 * y)
    if causal and name != "sgconv":
        state, steps = mixer.initial_state(2), []
        for t in range(13):
            answer, state = mixer.step(x[:, t], state)
            steps.append(answer)
        torch.testing.assert_close(torch.stack(steps, 1), y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["s4", "s4d"])
def test_an_identity_output_has_no_pre_activation_dropout(name, tmp_path):
    one = {"name": name, "d_model": 16, "output": "identity", "pre_activation_dropout": True}
    with pytest.raises(
        UsageError, match=rf"model {name}: output: identity has no GELU, so pre_activation_dropout has no effect"
    ):
        build_stage(Job(loaded(tmp_path, model=one), "finetune", 0))


# ---------------------------------------------------------------------------------------------------- in the pipeline

TABLE = {  # rate and decay at a recipe's 0.01 and 0.05
    "spade": {
        r"ssm\.kernel\.(inv_dt|A_real|A_imag|P|B)": (1e-3, 0.0),
        r"ssm\.kernel\.C|ssm\.D|.*(qkv|out|map|up|down)\.weight": (0.01, 0.05),
        r".*bias|.*norm.*|local\.positions\.weight": (0.01, 0.0),
    },
    "dlr_attention": {r".*": (0.01, 0.05)},  # the DLR repository lets everything decay
}


@pytest.mark.parametrize("name", SMALL)
def test_optimiser_groups(name):
    held_to_table(tiny(find_plugin("models", name), False, **SMALL[name]), TABLE[name])


def test_the_random_prior_of_a_state_space_within_a_block(tmp_path):
    one = {"name": "spade", "d_model": 16, "n_layers": 2, **SMALL["spade"]}
    plain, random = (
        build_stage(Job(loaded(tmp_path, model={**one, "initialisation": how}), "finetune", 0)).model.backbone
        for how in ("structured", "random_ssm")
    )
    for (name, a), (_, b) in zip(plain.named_parameters(), random.named_parameters(), strict=True):
        assert torch.equal(a, b) != name.startswith("mixers.0.ssm.kernel."), name


@pytest.mark.parametrize("name", SMALL)
def test_a_random_layer_trains(name):
    """Finite answers and gradients where every parameter is drawn from N(0, 0.1²)."""
    made = tiny(find_plugin("models", name), False, initialisation="random", **SMALL[name]).train()
    x = sequence(2, 63)
    (made(x, all_valid(x)) * sequence(2, 63, seed=2)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow
def test_a_comparison_end_to_end(name, tmp_path):
    recipe = recipe_file(tmp_path, model={"name": name, "d_model": 16, "n_layers": 2, **SMALL[name]})
    arguments = ["compare", recipe, "--smoke", "--seeds", 2, "--json", "--cpu", "--out", tmp_path / "runs"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == name and row["n"] == 2 and row["delta"] is not None
