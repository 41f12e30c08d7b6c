"""Every model family in the pipeline: a comparison end to end, the optimiser groups, the two priors."""

import json
import re

import pytest
import torch
from tiny import loaded, recipe_file, spt

from spt.components import find
from spt.contract import full, sequence, tiny
from spt.models.base import randomise
from spt.optim import groups
from spt.plan import Job
from spt.recipe import Train
from spt.show import overview
from spt.stages import bind

SMALL = {  # a model of every family, small
    "s4": {"d_state": 8},
    "s4d": {"d_state": 8},
    "dss": {"d_state": 8},
    "dlr": {"d_state": 8},
    "s5": {"d_state": 8, "blocks": 2},
    "lru": {"d_state": 8},
    "sgconv": {"kernel_dim": 8},
}


def model(name: str, **options):
    return {"name": name, "d_model": 16, "n_layers": 1, **SMALL[name], **options}


@pytest.mark.parametrize("name", SMALL)
def test_a_comparison_end_to_end(name, tmp_path):
    """Both arms, two seeds, from the command line to the table."""
    recipe = recipe_file(tmp_path, model=model(name))
    done = spt("compare", recipe, "--seeds", 2, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
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
}


@pytest.mark.parametrize("name", SMALL)
def test_optimiser_groups_are_the_published_ones(name):
    backbone = tiny(find("models", name), causal=False, **SMALL[name])
    train = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05)
    seen = set()
    for group in groups(backbone, train):
        for parameter in group.names:
            own = re.sub(r"^mixers\.\d+\.", "", parameter)
            pattern = next(pattern for pattern in TABLE[name] if re.fullmatch(pattern, own))
            assert (group.learning_rate, group.weight_decay) == pytest.approx(TABLE[name][pattern]), parameter
            seen.add(pattern)
    assert seen == set(TABLE[name]), "a line of the table that no parameter meets"


def test_show_names_the_groups(tmp_path):
    found = overview(loaded(tmp_path, model=model("s4")))
    lines = {kind: (g["learning rate"], g["weight decay"]) for g in found["stages"][0]["groups"] for kind in g["of"]}
    assert lines["kernel.A_imag"] == (1e-3, 0.0) and lines["kernel.C"][0] == 0.01


@pytest.mark.parametrize("name", SMALL)
def test_random_priors(name, tmp_path):
    """random: every parameter of the network from N(0, 0.1²), head and encoder too; random_ssm: the state space."""
    structured, random, ssm = (
        bind(Job(loaded(tmp_path, model=model(name, initialisation=how)), "finetune", 0)).model
        for how in ("structured", "random", "random_ssm")
    )
    flat = torch.cat([p.detach().flatten() for p in random.parameters()])
    assert float(flat.std()) == pytest.approx(0.1, rel=0.05) and abs(float(flat.mean())) < 0.01
    assert not torch.equal(random.head.out.weight, structured.head.out.weight)
    prefixes = structured.backbone.mixers[0].state_space
    for (key, one), (_, other) in zip(structured.named_parameters(), ssm.named_parameters(), strict=True):
        state_space = key.startswith(tuple(f"backbone.mixers.0.{prefix}" for prefix in prefixes))
        assert torch.equal(one, other) != state_space, key


@pytest.mark.parametrize("name", SMALL)
def test_a_random_layer_trains(name):
    """Finite answers and gradients from the random prior, whose steps and decays lie far from the structured ones."""
    backbone = tiny(find("models", name), causal=False, initialisation="random", **SMALL[name]).train()
    x = sequence(2, 63)
    (backbone(x, full(x)) * sequence(2, 63, seed=2)).sum().backward()
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
