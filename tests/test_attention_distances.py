"""The attention weights shown are those that layers use; what is counted of them; and `spt inspect attention`."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from tiny import loaded, own_task, run, spt_job
from typer.testing import CliRunner

from spt.analysis.attention import STATISTICS, WITH_ATTENTION, attention_distances, recorded_attention
from spt.checks import model_contract
from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.models.attention import Attention
from spt.models.base import Context, Mixer
from spt_cli import app

VARIANTS = {
    "full": {},
    "grouped": {"n_kv_heads": 2},
    "temperature": {"temperature": True},
    "shared": {"shared_qk": True},
    "window": {"window": 7},
    "far": {"window": 5, "back": 3},
    "band": {"window": 6, "band": (6, 3)},
    "shared-window": {"window": 7, "shared_qk": True},
}


def joined(layer: Mixer, x: torch.Tensor, context: Context) -> torch.Tensor:
    """(B, H, L, L) of all pieces; nothing stands twice."""
    length = x.shape[1]
    whole, rows = None, 0
    for seen in layer.attention_weights(x, context):
        B, H, R, M = seen.weights.shape
        whole = x.new_zeros(B, H, length, length) if whole is None else whole
        assert seen.first_query == rows and (seen.weights[~seen.visible.expand_as(seen.weights)] == 0).all()
        rows += R
        whole[:, :, seen.first_query : rows, seen.first_key : seen.first_key + M] = seen.weights
    assert rows == length
    return whole


def batch(length: int, width: int, *valid: int) -> tuple[torch.Tensor, Context]:
    x = torch.randn(len(valid), length, width, dtype=torch.float64)
    mask = torch.arange(length) < torch.tensor(valid)[:, None]
    return x.masked_fill(~mask[..., None], 0.0), Context(mask, padded=min(valid) < length)


def held(layer: Mixer, v: torch.Tensor, x: torch.Tensor, context: Context) -> None:
    """Weights times values are the layer's answer."""
    weights = joined(layer, x, context)
    v = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    found = layer.out((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found[context.valid], layer(x, context)[context.valid], rtol=1e-9, atol=1e-11)
    total = weights.sum(-1).transpose(1, 2)[context.valid]
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_weights_times_values_are_the_answer(variant, causal):
    options = dict(VARIANTS[variant])
    if causal and "band" in options:
        options["band"] = (6, 0)
    torch.manual_seed(0)
    layer = Attention(16, 4, 300, causal=causal, rotary=True, **options).double().eval()
    layer.qkv.weight.mul_(5)  # scores that differ
    for length, valid in ((23, (23, 23)), (23, (23, 9)), (300, (300, 277))):  # more than one piece
        x, context = batch(length, 16, *valid)
        v = layer.qkv(x).unflatten(-1, (-1, layer.d_head)).transpose(1, 2).split(layer.sizes, dim=1)[-1]
        held(layer, v, x, context)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@torch.no_grad()
def test_those_of_spade(causal):
    made = model_contract.tiny(find_plugin("models", "spade"), causal, window=6, d_state=8).double()
    layer = made.mixers[2].mixers if hasattr(made.mixers[2], "mixers") else made.mixers[2]
    for length, valid in ((23, (23, 23)), (23, (23, 9)), (300, (300, 277))):
        x, context = batch(length, layer.qkv.in_features, *valid)
        held(layer, layer.qkv(x).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)[2], x, context)


@torch.no_grad()
def test_what_is_counted(monkeypatch):
    """Against every pair written out; padding left out, pieces of a few queries."""
    monkeypatch.setattr("spt.models.ops.attention.ROWS", 4)
    made = model_contract.tiny(find_plugin("models", "transformer"), False, n_heads=2).double()
    x, context = batch(11, model_contract.WIDTH, 11, 6)
    layers = [part for part in made.modules() if isinstance(part, Attention)]
    inputs = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with recorded_attention(made) as found:
        made(x, context)
        made(x[:1, :5], Context(torch.ones(1, 5, dtype=torch.bool), padded=False))
    assert list(found) == ["mixers.0", "mixers.2"]
    for number, (layer, sums) in enumerate(zip(layers, found.values(), strict=True)):
        wanted, even, queries = np.zeros((2, 5)), np.zeros(5), 0
        for given, lengths in ((inputs[number], (11, 6)), (inputs[number + 2], (5,))):
            for row, length in enumerate(lengths):
                one = given[row : row + 1, :length]
                whole = joined(layer, one, Context(torch.ones(1, length, dtype=torch.bool), padded=False))[0].numpy()
                away = abs(np.subtract.outer(np.arange(length), np.arange(length)))
                for q in range(length):
                    near = [(away[q] <= steps).astype(float) for steps in (1, 8, 64)]
                    for head in range(2):
                        a = whole[head, q]
                        wanted[head] += [(a * away[q]).sum(), -(a * np.log(a)).sum(), *(a @ n for n in near)]
                    even += [away[q].mean(), math.log(length), *(n.mean() for n in near)]
                queries += length
        assert sums.queries == queries == 22
        *by_head, uniform = ([numbers[name] for name in STATISTICS] for numbers in sums.means())
        np.testing.assert_allclose(by_head, wanted / queries, rtol=1e-9)
        np.testing.assert_allclose(uniform, even / queries, rtol=1e-9)
    made(x, context)
    assert sums.queries == 22, "watched no longer"


def test_the_models_named_are_those_that_can_be_shown():
    for name in WITH_ATTENTION:
        made = model_contract.tiny(find_plugin("models", name), True)
        with torch.no_grad(), recorded_attention(made) as found:
            x = model_contract.sequence(1, 9)
            made(x, model_contract.all_valid(x))
        assert len(found) == 2
    mega = model_contract.tiny(find_plugin("models", "mega"), True)
    assert all(type(part).attention_weights is Mixer.attention_weights for part in mega.mixers)


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_runs_of_both_stages(tmp_path):
    job = spt_job(loaded(tmp_path))
    run(job, tmp_path)
    for name, last in ((job.parent.name, "after pretraining"), (job.name, "after finetuning")):
        done = command("inspect", "attention", tmp_path / name, "--rows", "3", "--split", "val", "--json")
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert (told["rows"], told["split"], len(told["heads"])) == (3, "val", 2)
        head = told["heads"][0]
        # 64 steps that may all be seen: the mean of |i - j| is (L² - 1) / (3 L).
        assert head["uniform"]["distance"] == pytest.approx((64**2 - 1) / (3 * 64))
        assert head["uniform"]["entropy"] == pytest.approx(math.log(64))
        assert head["trained"] != head["initial"] and 0 < head["initial"]["distance"] < 63
        assert head["trained"]["within_64"] == pytest.approx(1.0, abs=1e-5)
        with (tmp_path / name / "figures" / "attention.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["trained_distance"]) for row in rows] == [h["trained"]["distance"] for h in told["heads"]]
        assert last in (tmp_path / name / "figures" / "attention.svg").read_text()
    shown = command("inspect", "attention", tmp_path / job.name, "--out", tmp_path / "else")
    assert shown.exit_code == 0 and (tmp_path / "else" / "attention.png").is_file()
    assert max(map(len, shown.stdout.splitlines())) <= 80
    found = attention_distances(tmp_path / job.name, rows=10**9)
    assert found.rows == 24


def test_rows_of_unlike_lengths_in_a_causal_model(tmp_path):
    model = {"name": "dlr_attention", "d_model": 8, "n_layers": 1, "n_heads": 2, "window": 4, "causal": True}
    job = Job(own_task(tmp_path, model=model), "finetune", 0)
    run(job, tmp_path)
    found = attention_distances(tmp_path / job.name, rows=5)
    split = found.run.setup.data.test
    lengths = split.lengths[:5].tolist()
    away = [q - k for n in lengths for q in range(n) for k in [np.arange(max(0, q // 4 - 1) * 4, q + 1)]]
    assert found.heads[0].statistics["uniform"]["distance"] == pytest.approx(np.mean([row.mean() for row in away]))
    assert found.heads[0].module.endswith("attention") and [head.head for head in found.heads] == [1, 2]
