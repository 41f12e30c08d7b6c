"""Linformer, against the authors' code and against its formula."""

from pathlib import Path

import numpy as np
import pytest
import torch

from spt.models import linformer
from spt.models.base import Context

ARRAYS = Path(__file__).parent / "arrays"
B, L, M, D, H = 2, 11, 15, 6, 2
SHARING = ("headwise", "key_value", "layerwise")


def model(**options):
    torch.manual_seed(1)
    sizes = {"d_model": D, "n_heads": H, "n_layers": 2, "max_length": M, "projected_length": 5}
    return linformer.build(linformer.Config(**{**sizes, "feed_forward": "none", **options}))


def context(*lengths):
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Context(valid, padded=len(set(lengths)) > 1)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_layer_is_the_published_code(shared):
    """tests/arrays/README.md says how the arrays were made."""
    arrays = {name[2:]: torch.from_numpy(array) for name, array in np.load(ARRAYS / "linformer.npz").items()
              if name.startswith(str(shared))}  # fmt: skip
    layer = model(sharing="key_value" if shared else "headwise").double().mixers[0]
    names = {f"{part}.{kind}": f"{part}_proj.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")}
    names |= {"E.weight": "compress_k.weight"} | ({} if shared else {"F.weight": "compress_v.weight"})
    layer.load_state_dict({ours: arrays[theirs] for ours, theirs in names.items()})
    ours, theirs = layer(arrays["x"], context(L, L)).detach(), arrays["y"]
    assert float((ours - theirs).abs().max()) < 1e-12 * float(theirs.abs().max())
    single = layer.float()(arrays["x"].float(), context(L, L)).detach()
    assert float((single - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("sharing", SHARING)
def test_a_layer_is_equation_7(sharing):
    layer, x = model(sharing=sharing).double().mixers[1], torch.randn(B, L, D, dtype=torch.float64)
    E, F = (each.weight[:, :L] for each in layer.projections)
    heads = []
    for i in range(H):
        rows = slice(i * D // H, (i + 1) * D // H)
        q, k, v = (
            u @ map.weight[rows].T + map.bias[rows] for u, map in ((x, layer.q), (E @ x, layer.k), (F @ x, layer.v))
        )
        scores = torch.exp(q @ k.transpose(1, 2) / (D / H) ** 0.5)
        heads.append(scores / scores.sum(-1, keepdim=True) @ v)
    expected = torch.cat(heads, -1) @ layer.out.weight.T + layer.out.bias
    ours = layer(x, context(L, L))
    assert (ours - expected).abs().max() < 1e-12
    weights = [layer.q.weight, layer.k.weight, layer.v.weight, *{each.weight for each in layer.projections}]
    gradients = [torch.autograd.grad((y * torch.cos(torch.arange(D))).sum(), weights) for y in (ours, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("sharing", "owned"), zip(SHARING, (4, 2, 1), strict=True))
def test_projections_are_stored_once_where_they_are_shared(sharing, owned):
    net = model(sharing=sharing)
    found = [parameter for name, parameter in net.named_parameters() if ".E." in name or ".F." in name]
    stored = [name for name in net.state_dict() if ".E." in name or ".F." in name]
    assert len(found) == len(stored) == owned and all(parameter.shape == (5, M) for parameter in found)
    x = torch.randn(B, L, D)
    (net(x, context(L, L)) * torch.randn(B, L, D)).sum().backward()
    assert all((parameter.grad[:, :L] != 0).all() and not parameter.grad[:, L:].any() for parameter in found)
    wide = model(sharing=sharing, projected_length=100, max_length=300).mixers[0].projections[0].weight
    assert float(wide.detach().std()) == pytest.approx(1 / 20, rel=0.05)


def test_what_stands_in_the_padding_does_not_enter():
    layer, x = model().mixers[0], torch.randn(1, 4, D)
    padded = torch.cat([x, torch.zeros(1, 7, D)], 1)
    valid = torch.arange(11)[None] < 4
    ours = layer(padded, Context(valid, padded=True))[:, :4]
    assert torch.allclose(ours, layer(x, context(4)), atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", []])
def test_positions_are_added_once(positions):
    net, x = model(positions=positions), torch.zeros(1, L, D)
    added = x if net.positions is None else net.positions(x, context(L))
    assert bool(added.any()) == bool(positions)
    with pytest.raises(ValueError, match="position_std has no effect without learned positions"):
        linformer.Config(positions=[], position_std=1.0)


def test_heads_divide_the_width():
    with pytest.raises(ValueError, match="d_model 10 is not a multiple of n_heads 4"):
        linformer.Config(d_model=10)
