"""The kernels shown are those that layers convolve with; and `spt inspect kernels` on runs of both stages."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from tiny import loaded, model_file, run, spt_job
from torch import nn
from typer.testing import CliRunner

from spt.analysis.kernels import WITH_KERNELS, KernelCurve, curves, layer_kernels, summary
from spt.checks import model_contract
from spt.config.job import Job
from spt.config.plugins import find_plugin, listing
from spt.models.base import Backbone, BackboneConfig, Context, Mixer
from spt.models.longconv import Kernel, LongConvolution
from spt.runs.folder import RunFolder
from spt.training.build import build_stage
from spt_cli import app

LENGTH = 37
OPTIONS = {
    "dlr": {"d_state": 8},
    "dss": {"d_state": 8},
    "lru": {"d_state": 8},
    "mega": {"d_attention": 8},
    "s4": {"d_state": 8, "n_ssm": 2},
    "s4d": {"d_state": 8},
    "s5": {"d_state": 8, "blocks": 2},
    "sgconv": {"kernel_dim": 4},
    "spade": {"d_state": 8, "window": 4},
}
SHORT = {"s4": {"max_kernel_length": 7}, "mega": {"max_kernel_length": 7}, "dlr": {"cast": "real-prod"}}


def convolving(model: nn.Module) -> dict[str, Mixer]:
    found = {name: part for name, part in model.named_modules() if isinstance(part, Mixer)}
    return {name: part for name, part in found.items() if list(part.convolution_kernel(2))}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize("name", [*OPTIONS, "s4-short", "mega-short", "dlr-short"])
def test_the_kernel_is_the_answer_to_an_impulse(name, causal):
    name, _, short = name.partition("-")
    options = {**OPTIONS[name], **(SHORT[name] if short else {})}
    made = model_contract.tiny(find_plugin("models", name), causal, **options).double()
    shown = curves(made, LENGTH)
    assert list(shown) == list(convolving(made)) and len(shown) == (1 if name == "spade" else 2)
    at = 0 if causal else LENGTH // 2
    for place, layer in convolving(made).items():
        layer.D.data.zero_()
        width = len(layer.D)
        # Every feature at a time, so that a layer that mixes them shows every pair.
        impulses = torch.zeros(width, LENGTH, width, dtype=torch.float64)
        impulses[torch.arange(width), at, torch.arange(width)] = 1.0
        with torch.no_grad():
            answers = layer.mix_sequence(impulses)  # (input, L, answer)
        peaks = answers.abs().amax(dim=(0, 2)).numpy()
        curve = shown[place]
        np.testing.assert_allclose(curve.before[: LENGTH - at], peaks[at:], rtol=1e-9, atol=1e-12)
        assert (curve.after is None) == causal
        if curve.after is not None:
            assert curve.after[0] == 0.0
            np.testing.assert_allclose(curve.after[1 : at + 1], peaks[:at][::-1], rtol=1e-9, atol=1e-12)
        with torch.no_grad():  # not the largest alone
            kernel = torch.cat(list(layer.convolution_kernel(LENGTH)), dim=-1)
        mixes = kernel.shape[1] == width**2
        pairs = answers if mixes else answers.diagonal(dim1=0, dim2=2)[..., None].transpose(0, 1)
        told = pairs.permute(2, 0, 1).flatten(0, 1) if mixes else pairs[..., 0]
        lags = min(LENGTH - at, kernel.shape[2])
        torch.testing.assert_close(kernel[0, :, :lags], told[:, at : at + lags], rtol=1e-9, atol=1e-12)


def test_pieces_of_an_impulse_response_join(monkeypatch):
    made = model_contract.tiny(find_plugin("models", "s5"), False, **OPTIONS["s5"]).double()
    whole = curves(made, LENGTH)
    monkeypatch.setattr("spt.models.ops.scan._RESPONSES", 5 * 2 * 16**2)
    layer = next(iter(convolving(made).values()))
    assert [piece.shape[2] for piece in layer.convolution_kernel(LENGTH)] == [5] * 7 + [2]
    for name, curve in curves(made, LENGTH).items():
        np.testing.assert_allclose(curve.largest, whole[name].largest, rtol=1e-12)


def test_every_model_that_convolves_is_named():
    named = set()
    for name in (one.name for one in listing("models")):
        if name != "hf" and convolving(model_contract.tiny(find_plugin("models", name), False)):
            named.add(name)
    assert set(WITH_KERNELS) == named and set(OPTIONS) <= named
    for name in ("transformer", "dlr_attention"):
        assert curves(model_contract.tiny(find_plugin("models", name), False), 8) == {}


class Ramp(Kernel):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 if config.causal else 2, config.d_model))

    def forward(self, length):
        return self.weight[..., None] * torch.arange(1.0, length + 1)


class Both(Mixer):
    """A layer of a user that holds a long convolution, and one that states its kernel for what it holds."""

    def __init__(self, config, states):
        super().__init__()
        self.inner, self.states = LongConvolution(config, Ramp(config)), states

    def forward(self, x, context: Context):
        return self.inner(x, context)

    def convolution_kernel(self, length):
        return [torch.full((1, 3, length), 9.0)] if self.states else ()


def test_a_users_layers_are_found_once():
    config = BackboneConfig(d_model=4, n_layers=1, causal=False)
    found = curves(Backbone(config, lambda: [Both(config, False), Both(config, True)]), 5)
    assert list(found) == ["mixers.0.inner", "mixers.1"]
    own, stated = found.values()
    assert own.before.tolist() == [1, 2, 3, 4, 5] and own.after.tolist() == [0, 1, 2, 3, 4]
    assert stated.largest.tolist() == [9] * 5 and stated.after is None
    told = summary(own)
    assert told == {"peak": 5.0, "peak_lag": 4, "reach_10_percent": 4, "reach_1_percent": 4}


def test_reach_is_the_furthest_lag_above_a_share():
    values = np.array([0.5, 1.0, 0.2, 0.05, 0.02, 0.001])
    told = summary(KernelCurve(values, None))
    assert (told["peak_lag"], told["reach_10_percent"], told["reach_1_percent"]) == (1, 2, 4)
    broken = summary(KernelCurve(np.array([1.0, np.inf]), None))
    assert set(broken.values()) == {None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A pretraining run, what was finetuned from it, and one from scratch: DLR, one layer, two-sided."""
    folder = tmp_path_factory.mktemp("kernels")
    model = {"name": "dlr", "d_model": 8, "n_layers": 1, "d_state": 8, "ssm_lr": None}
    job = spt_job(loaded(folder, model=model))
    run(job, folder)
    scratch = Job(job.resolved, "finetune", 0)
    run(scratch, folder)
    return folder, job, scratch


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_finetuned_run_beside_its_parent(finished):
    folder, job, _ = finished
    done = command("inspect", "kernels", folder / job.name, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["stage"], told["lags"], told["row_width"], told["two_sided"]) == ("finetune", 64, 8, True)
    files = sorted((folder / job.name / "figures").iterdir())
    assert [path.name for path in files] == ["kernels.csv", "kernels.png", "kernels.svg"]
    assert sorted(told["files"]) == [str(path) for path in files]
    rows = read(files[0])
    assert [row["lag"] for row in rows] == [str(lag) for lag in range(64)]
    initial = curves(build_stage(job).model.backbone, 64)["mixers.0"]
    parent = layer_kernels(folder / job.parent.name).layers[0].curves["trained"]
    trained = layer_kernels(folder / job.name).layers[0].curves["trained"]
    for name, curve in (("initial", initial), ("pretrained", parent), ("trained", trained)):
        columns = {name: curve.largest, f"{name}_before": curve.before, f"{name}_after": curve.after}
        for column, values in columns.items():
            assert [float(row[column]) for row in rows] == pytest.approx(values.tolist(), rel=1e-6)
        assert told["layers"][0][name] == summary(curve)
    assert len({tuple(curve.largest) for curve in (initial, parent, trained)}) == 3
    svg = files[2].read_text()
    assert all(word in svg for word in ("at the start", "after pretraining", "after finetuning", "a line every 8"))


def test_a_pretraining_run_and_one_from_scratch(finished, tmp_path):
    folder, job, scratch = finished
    begun = {}
    for name, last in ((job.parent.name, "after pretraining"), (scratch.name, "trained")):
        done = command("inspect", "kernels", folder / name, "--out", tmp_path / name, "--lags", "20", "--log")
        assert done.exit_code == 0, done.output
        assert last in done.stdout and "at the start" in done.stdout
        rows = read(tmp_path / name / "kernels.csv")
        assert len(rows) == 20 and "pretrained" not in rows[0]
        begun[name] = [row["initial"] for row in rows]
        assert begun[name] != [row["trained"] for row in rows]
    assert begun[job.parent.name] == begun[scratch.name]  # both start from the seed's
    assert not (folder / scratch.name / "figures").exists()
    refused = command("inspect", "kernels", folder / scratch.name, "--lags", "65")
    assert refused.exit_code == 2 and "1 to 64 lags" in refused.output


def test_a_parent_that_is_gone_and_damage(finished, tmp_path):
    folder, job, _ = finished
    alone = tmp_path / job.name
    shutil.copytree(folder / job.name, alone)
    done = command("inspect", "kernels", alone, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert f"{job.parent.name} is not beside" in told["notes"][0] and "pretrained" not in told["layers"][0]
    shutil.copytree(folder / job.parent.name, tmp_path / job.parent.name)
    shutil.rmtree(tmp_path / job.parent.name / "checkpoints")
    assert "it is not there" in layer_kernels(alone).notes[0]
    weights = alone / "checkpoints" / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused = command("inspect", "kernels", alone)
    assert refused.exit_code == 6 and "model.safetensors is damaged" in refused.output
    (alone / "result.json").unlink()
    refused = command("inspect", "kernels", alone)
    assert refused.exit_code == 6 and "is not finished" in refused.output
    refused = command("inspect", "kernels", tmp_path / "nowhere")
    assert refused.exit_code == 2 and "no run folder" in refused.output


def test_other_data_and_another_model_are_refused(finished, tmp_path, monkeypatch):
    folder, job, _ = finished
    recipe = (folder / job.name / "recipe.yaml").read_text()
    for change, code, said in (
        (("split_seed: 0", "split_seed: 1"), 3, "are not those that"),
        (("d_state: 8", "d_state: 16"), 6, "another architecture"),
        (("d_state: 8", "d_state: {"), 3, "recipe.yaml, line"),
    ):
        assert recipe.count(change[0]) == 1
        copy = tmp_path / change[1].replace(": ", "-") / job.name
        shutil.copytree(folder / job.name, copy)
        (copy / "recipe.yaml").write_text(recipe.replace(*change))
        refused = command("inspect", "kernels", copy)
        assert refused.exit_code == code and said in refused.output, refused.output


def test_a_model_without_a_kernel(tmp_path):
    one = loaded(tmp_path, model={"name": str(model_file(tmp_path)), "d_model": 8, "n_layers": 1})
    job = Job(one, "pretrain", 0)
    run(job, tmp_path)
    refused = command("inspect", "kernels", tmp_path / job.name)
    assert refused.exit_code == 2
    assert (
        "has no convolution kernel; dlr, dss, h3, hyena, liquid_s4, lru, mega, s4, s4d, s5, sgconv and spade do"
        in refused.output
    )
    assert not (RunFolder(tmp_path, job.name).path / "figures").exists()
    refused = command("inspect", "attention", tmp_path / job.name)
    assert refused.exit_code == 2
    assert "has no softmax attention to show; dlr_attention, spade and transformer do" in refused.output
