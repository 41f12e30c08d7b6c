"""Reach: how far a layer sees, in every model that can be cut to it."""

import pytest
import torch

from spt.checks.model_contract import all_valid, sequence, tiny
from spt.config.job import WITH_REACH
from spt.config.plugins import find_plugin, listing
from spt.models.options import LocalConfig

LENGTH, REACH, LAYERS = 63, 4, 2
SMALL = {
    "transformer": {"n_heads": 2},
    "transformer, shared": {"n_heads": 2, "shared_qk": True},
    "transformer, window": {"n_heads": 2, "window": 5, "exact_window": True},
    "dlr_attention": {"n_heads": 2},
    "s4": {"d_state": 8},
    "s4d": {"d_state": 8},
    "s4d, dss": {"d_state": 8, "disc": "dss"},
    "spade": {"d_state": 8, "n_heads": 2, "window": 8},
    "spade, stack": {"d_state": 8, "n_heads": 2, "window": 8, "combine": "stack"},
    "dss": {"d_state": 8},
    "dss, softmax": {"d_state": 8, "version": "softmax"},
    "dlr": {"d_state": 8},
    "dlr, prod": {"d_state": 8, "cast": "prod"},
    "sgconv": {"kernel_dim": 8},
    "mega": {"n_layers": 1, "d_state": 4, "d_attention": 8},
    "mega, laplace": {"n_layers": 1, "d_state": 4, "d_attention": 8, "attention": "laplace", "relative_bias": "rotary"},
    "tcn": {"n_layers": 3},
    "liquid_s4": {"d_state": 8, "degree": 3},
    "h3": {"n_layers": 1, "d_state": 8},
    "hyena": {"n_layers": 1, "order": 3},
}


def model(case, causal, reach=REACH, **options):
    component = find_plugin("models", case.partition(",")[0])
    given = {"n_layers": LAYERS, **SMALL[case], **options}
    made = tiny(component, causal, reach=reach, **given).double()
    return made, component.module.Config(d_model=16, causal=causal, reach=reach, **given)


def seen(made, step):
    """The distances of the inputs that one output depends on."""
    x = sequence(1, LENGTH).double().requires_grad_()
    (made(x, all_valid(x))[0, step] @ torch.arange(1.0, 17.0).double()).backward()  # not the sum, which norms fix
    slope = x.grad[0].abs().amax(-1)
    return [int(s) - step for s in (slope > 1e-12 * slope.max()).nonzero()[:, 0]]  # transforms round


def test_every_model_with_a_reach_is_here():
    """Keys of runs without a reach leave it out, so those models are listed there too."""
    ours = {row.name for row in listing("models") if row.source == "spt" and row.name != "hf"}
    cut = {name for name in ours if issubclass(find_plugin("models", name).module.Config, LocalConfig)}
    assert cut == {case.partition(",")[0] for case in SMALL} == set(WITH_REACH)


@pytest.mark.parametrize("causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("case", SMALL)
def test_no_output_depends_on_what_is_farther_and_one_on_the_farthest(case, causal):
    made, config = model(case, causal)
    with torch.no_grad():  # maps of queries and keys may start near zero
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    farthest = config.seen()
    assert farthest is not None and 2 * farthest < LENGTH
    chunk = range(30, 35) if case.startswith("mega") else [31]  # attention within it
    found = [seen(made, step) for step in chunk]
    assert min(map(min, found)) == -farthest
    assert max(map(max, found)) == (0 if causal else farthest)
    if config.model_copy(update={"reach": None}).own_reach() is None and not case.startswith("spade"):
        whole, _ = model(case, causal, reach=None)
        assert len(seen(whole, 31)) == (32 if causal else LENGTH)


@pytest.mark.parametrize("case", SMALL)
def test_a_reach_changes_neither_parameters_nor_their_initial_values(case):
    """So that levels of a study are paired by seed."""
    cut, whole = (model(case, False, reach)[0].state_dict() for reach in (REACH, None))
    assert cut.keys() == whole.keys()
    assert all(torch.equal(cut[name], whole[name]) for name in cut)


@pytest.mark.parametrize("causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("case", ["transformer", "dlr_attention", "s4", "dss, softmax", "sgconv", "mega"])
@torch.no_grad()
def test_a_reach_beyond_the_sequence_is_none(case, causal):
    x = sequence(2, 13).double()
    cut, whole = (model(case, causal, reach)[0] for reach in (12, None))
    torch.testing.assert_close(cut(x, all_valid(x)), whole(x, all_valid(x)))


@pytest.mark.parametrize(
    ("name", "options", "own"),
    [
        ("spade", {"max_kernel_length": 64, "window": 128, "causal": True}, 127),
        ("spade", {"max_kernel_length": 300, "window": 128, "causal": True}, 299),
        ("h3", {"max_kernel_length": 8, "d_state": 64, "causal": True}, 63),
        ("liquid_s4", {"max_kernel_length": 2, "degree": 4, "causal": True}, 3),
        ("dss", {"version": "softmax", "softmax_length": 100, "max_kernel_length": 500, "causal": False}, 100),
        ("s4", {"max_kernel_length": 64, "causal": True}, 63),
    ],
)
def test_what_a_layer_sees_as_it_is_counts_all_of_its_parts(name, options, own):
    config = find_plugin("models", name).module.Config
    assert config(**options).own_reach() == own
    if name != "liquid_s4":  # which has nothing to cut there
        assert config(**options, reach=own - 1).reach == own - 1
    with pytest.raises(ValueError, match=f"reach {own} cuts nothing, since a layer sees {own} steps"):
        config(**options, reach=own)
