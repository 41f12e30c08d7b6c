"""Every model family in the pipeline: a comparison end to end, the optimiser groups, the two priors."""

import json

import pytest
import torch
from reference_weights import export_reference, import_reference
from tiny import held_to_table, loaded, recipe_file, run, spt
from typer.testing import CliRunner

from spt.analysis.resolved import resolve_overview
from spt.checks.model_contract import all_valid, sequence, tiny
from spt.config.job import Job
from spt.config.load import packaged, resolve
from spt.config.plugins import find_plugin
from spt.config.recipe import Train
from spt.config.yaml import parse_yaml
from spt.models.base import randomise
from spt.tasks.base import Tokens
from spt.training.build import build_backbone, build_stage
from spt.training.network import Encoder, Head, SequenceModel
from spt.training.objectives import Output
from spt.training.optimizer import optimizer_groups
from spt_cli import app

SMALL = {  # a model of every family, small
    "s4": {"d_state": 8},
    "s4d": {"d_state": 8},
    "dss": {"d_state": 8},
    "dlr": {"d_state": 8},
    "s5": {"d_state": 8, "blocks": 2},
    "lru": {"d_state": 8},
    "sgconv": {"kernel_dim": 8},
    "mega": {"d_state": 4, "d_attention": 8},
}


def model(name: str, **options):
    return {"name": name, "d_model": 16, "n_layers": 1, **SMALL[name], **options}


@pytest.mark.parametrize(
    "name", [name if name in ("s4", "s5") else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_a_comparison_end_to_end(name, tmp_path):
    """Both arms, two seeds, from the command line to the table."""
    recipe = recipe_file(tmp_path, model=model(name))
    arguments = ["compare", recipe, "--smoke", "--seeds", 2, "--json", "--cpu", "--out", tmp_path / "runs"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == name and row["n"] == 2 and row["delta"] is not None


# layers.md section 13: which parameters have a rate of their own, none of which decay, and which do at the recipe's.
TABLE = {
    "s4": {
        r"kernel\.(inv_dt|A_real|A_imag|P|B)": (1e-3, 0.0),
        r"kernel\.C|D|output\..*weight": (0.01, 0.05),
        r".*bias|norms\..*|last_norm\..*": (0.01, 0.0),
    },
    "s4d": {
        r"kernel\.(inv_dt|A_real|A_imag|B)": (1e-3, 0.0),
        r"kernel\.C|D|output\..*weight": (0.01, 0.05),
        r".*bias|norms\..*|last_norm\..*": (0.01, 0.0),
    },
    "dss": {r"kernel\..*": (1e-3, 0.0), r".*": (0.01, 0.05)},
    "dlr": {r"kernel\..*": (1e-4, 0.0), r".*": (0.01, 0.05)},
    "s5": {r"Lambda_.*|B|log_step": (1e-3, 0.0), r".*": (0.01, 0.05)},
    "lru": {r"nu|theta|gamma|B": (0.005, 0.0), r".*": (0.01, 0.05)},
    "sgconv": {
        r"kernel\..*": (1e-3, 0.05),
        r"D|output\..*weight": (0.01, 0.05),
        r".*bias|norms\..*|last_norm\..*": (0.01, 0.0),
    },
    "mega": {r".*": (0.01, 0.05)},
}


@pytest.mark.parametrize("name", SMALL)
def test_optimiser_groups_are_the_published_ones(name):
    held_to_table(tiny(find_plugin("models", name), causal=False, **SMALL[name]), TABLE[name])


def test_show_names_the_groups(tmp_path):
    found = resolve_overview(loaded(tmp_path, model=model("s4")))
    lines = {kind: (g["learning rate"], g["weight decay"]) for g in found["stages"][0]["groups"] for kind in g["of"]}
    assert lines["kernel.A_imag"] == (1e-3, 0.0) and lines["kernel.C"][0] == 0.01


STATE_SPACE = {  # but for the long convolutions, where it is the kernel
    "s5": ("Lambda_re", "Lambda_im", "B", "C", "log_step"),
    "lru": ("nu", "theta", "gamma", "B", "C"),
    "mega": ("ema.kernel.",),
}


@pytest.mark.parametrize("name", SMALL)
def test_random_priors(name, tmp_path):
    """random: every parameter of the network from N(0, 0.1²), head and encoder too; random_ssm: the state space."""
    structured, random, ssm = (
        build_stage(Job(loaded(tmp_path, model=model(name, initialisation=how)), "finetune", 0)).model
        for how in ("structured", "random", "random_ssm")
    )
    flat = torch.cat([p.detach().flatten() for p in random.parameters()])
    assert float(flat.std()) == pytest.approx(0.1, rel=0.05) and abs(float(flat.mean())) < 0.01
    assert not torch.equal(random.head.out.weight, structured.head.out.weight)
    prefixes = STATE_SPACE.get(name, ("kernel.",))
    for (key, one), (_, other) in zip(structured.named_parameters(), ssm.named_parameters(), strict=True):
        state_space = key.startswith(tuple(f"backbone.mixers.0.{prefix}" for prefix in prefixes))
        assert torch.equal(one, other) != state_space, key


@pytest.mark.parametrize("name", SMALL)
def test_a_random_layer_trains(name):
    """Finite answers and gradients from the random prior, whose steps and decays lie far from the structured ones."""
    backbone = tiny(find_plugin("models", name), causal=False, initialisation="random", **SMALL[name]).train()
    x = sequence(2, 63)
    (backbone(x, all_valid(x)) * sequence(2, 63, seed=2)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


def test_random_ssm_needs_a_state_space(tmp_path):
    one = {"name": "transformer", "d_model": 16, "n_layers": 1, "initialisation": "random_ssm"}
    done = spt("show", recipe_file(tmp_path, model=one), cwd=tmp_path)
    assert done.returncode == 2 and "has no state-space parameters; use random" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_randomise_follows_the_seed():
    one, two = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    for module in (one, two):
        torch.manual_seed(5)
        randomise(module)
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("lru", "mega")])
def test_a_state_space_never_decays(name):
    """With the recipe's own rate, and where the recipe lets everything else decay."""
    backbone = tiny(find_plugin("models", name), causal=False, ssm_lr=None, **SMALL[name])
    train = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05, weight_decay_on="all")
    decaying = {name for group in optimizer_groups(backbone, train) if group.weight_decay for name in group.names}
    never = {"s4": "inv_dt", "s4d": "A_real", "dss": "W", "dlr": "log_Lambda_re", "s5": "log_step"}
    for key in decaying:
        assert name == "sgconv" or not key.endswith(never[name]), key
    assert any(key.endswith("bias") for key in decaying)


@pytest.mark.parametrize("name", ["lra/text-s4", "lra/text-dlr"])
def test_the_spt_papers_state_space_networks_decay_as_its_code(name):
    """Everything but the groups of the state space: C, D, norms, biases, encoder with the hidden vector, and head."""
    recipe = resolve(parse_yaml(packaged()[name], name), name)[0]
    with torch.device("meta"):
        encoder, head = Encoder(Tokens(9), 256, recipe.encoder), Head(256, Output("l2", False, 1), recipe.finetune.head)
        model = SequenceModel(encoder, build_backbone(recipe.model, 64), head)
    free = set()
    for section in ("pretrain", "finetune", "scratch"):
        for group in optimizer_groups(model, recipe.train(section)):
            assert group.weight_decay in (0, 0.05)
            free |= {name.rpartition(".")[2] for name in group.names if group.weight_decay == 0}
    spaces = {"s4": {"inv_dt", "A_real", "A_imag", "B", "P"}, "dlr": {"W", "log_Lambda_re", "log_Lambda_im"}}
    assert free == spaces[recipe.model.name]


def test_rates_that_can_be_chosen():
    def rate(name, parameter, **options):
        made = optimizer_groups(tiny(find_plugin("models", name), causal=False, **SMALL[name], **options), train)
        return next((g.learning_rate, g.weight_decay) for g in made if any(n.endswith(parameter) for n in g.names))

    train = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05)
    for name in ("s4", "s4d"):
        assert rate(name, "kernel.C", c_lr=2e-3) == (2e-3, 0.05)
        assert rate(name, "inv_dt", dt_uses_ssm_lr=False) == (0.01, 0.0)
    assert rate("dlr", "log_Lambda_re", decay_uses_ssm_lr=False) == (0.01, 0.0)
    assert rate("lru", "nu", ssm_lr_factor=0.2) == (pytest.approx(0.002), 0.0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "mega"])
def test_dropout_within_a_layer(name, tied):
    """It is there, and drawn once for all steps where it is tied."""
    torch.manual_seed(0)
    backbone = tiny(find_plugin("models", name), causal=False, dropout=0.5, tie_dropout=tied, **SMALL[name]).train()
    answer = backbone.mixers[0].output(torch.ones(1, 8, 16))
    assert bool((answer == answer[:, :1]).all()) == tied
    assert not torch.equal(answer, backbone.mixers[0].output(torch.ones(1, 8, 16)))
    x = backbone.dropout(torch.ones(1, 8, 16))
    assert backbone.dropout.p == 0.5 and bool((x == x[:, :1]).all()) == tied


def test_dropout_where_the_published_code_has_it():
    for name in ("s4", "s4d"):
        assert (
            tiny(find_plugin("models", name), causal=False, pre_activation_dropout=True, **SMALL[name])
            .mixers[0]
            .output.pre_activation_dropout
        )
    s5 = tiny(find_plugin("models", "s5"), causal=False, dropout=0.5, activation="gelu", **SMALL["s5"]).train()
    y = torch.ones(1, 8, 16)
    assert torch.equal(s5.mixers[0].output(y), s5.mixers[0].output(y))  # the stack's alone


def test_lru_is_made_as_flax_makes_it():
    lru = tiny(find_plugin("models", "lru"), causal=False, **SMALL["lru"])
    assert lru.norms[0].unbiased is False and lru.mixers[0].output.approximate == "tanh"
    assert (lru.norms[0].momentum, lru.norms[0].eps) == (0.01, 1e-5)
    assert tiny(find_plugin("models", "lru"), causal=False, norm="layer", **SMALL["lru"]).norms[0].eps == 1e-6
    module = find_plugin("models", "lru").module
    wide = module.build(module.Config(d_model=256, d_state=8, n_layers=1)).mixers[0].output.linear
    assert wide.weight.std().item() == pytest.approx(0.0625, rel=0.01) and not wide.bias.any()
    assert wide.weight.abs().max() < 2.3 * 0.0625


@pytest.mark.parametrize("name", ["s4", "s4d", "dss", "dlr", "s5", "lru"])
@torch.no_grad()
def test_stepping_with_the_norm_behind_the_sum(name):
    backbone = tiny(find_plugin("models", name), causal=True, prenorm=False, norm="layer", **SMALL[name])
    x = sequence(2, 17)
    state, answers = backbone.initial_state(2), []
    for t in range(17):
        answer, state = backbone.step(x[:, t], state)
        answers.append(answer)
    torch.testing.assert_close(torch.stack(answers, 1), backbone(x, all_valid(x)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["s4", "s4d", "dss", "dlr"])
def test_a_kernel_that_ends_is_no_recurrence(name):
    assert tiny(find_plugin("models", name), causal=True, **SMALL[name]).recurrent
    assert not tiny(find_plugin("models", name), causal=True, max_kernel_length=7, **SMALL[name]).recurrent


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_published_tensors_and_back(name, causal):
    """Out of one layer and into another: the same function."""
    one, other = (tiny(find_plugin("models", name), causal, **SMALL[name]).mixers[0] for _ in range(2))
    for parameter in one.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    how = {"length": 0} if name == "s4" else {}  # C itself, not C~
    loaded_ = other.load_state_dict(import_reference(other, export_reference(one, **how), **how), strict=False)
    assert loaded_.unexpected_keys == [] and loaded_.missing_keys == []
    x = sequence(2, 31)
    torch.testing.assert_close(other(x, all_valid(x)), one(x, all_valid(x)))
    with pytest.raises(ValueError, match="published tensors have"):
        import_reference(other, {"nothing": torch.zeros(1)}, **how)


@pytest.mark.parametrize("option", ["real_transform", "dt_transform"])
def test_numbers_that_stand_for_themselves_stay_positive(option):
    backbone = tiny(
        find_plugin("models", "s4d"), causal=False, initialisation="random", **SMALL["s4d"], **{option: "none"}
    )
    x = sequence(1, 1024)
    assert backbone(x, all_valid(x)).isfinite().all()


def test_kernels_are_made_once_a_step(tmp_path, monkeypatch):
    """Six steps of three micro-batches, two evaluations of training, one of the result and one for the temperature."""
    kernel, calls = find_plugin("models", "s4").module.S4Kernel, []
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, length: calls.append(length) or forward(self, length))
    job = Job(loaded(tmp_path, model=model("s4")), "finetune", 0)
    run(job, tmp_path / "runs", micro_batch_size=3)
    assert len(calls) == 6 + 2 + 2
