"""A model that goes out: the exported folder predicts as the run does, without it; damaged folders are refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from records import finish
from test_streaming import untrained
from test_trained_model import CPU, TINY, asked, finished, table, trained
from tiny import ROOT, environment, loaded, model_file, own_task, spt_job
from typer.testing import CliRunner

import spt
from spt.config.job import Job
from spt.errors import CheckpointError, OutputError, SptError, UsageError
from spt.inference.export import _scores_of_seeds, export, random_rows
from spt.inference.trained_model import TrainedModel
from spt.training.load_run import load_run
from spt_cli import app


def exported(path, out, **options):
    """The run's model and the exported one; the run is gone by then."""
    model, test = TrainedModel.open(path), load_run(path).data.test
    test = test.packed().unlabelled()
    export(path, out, **options)
    return model, spt.load_model(out, trust_code=True), test


def same(model, again, rows):
    for values in ("logits", "embed"):
        ours, theirs = (getattr(one, values)(rows, runtime=CPU) for one in (model, again))
        assert len(ours) == len(theirs) == len(rows)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    kept = ("input", "target", "output", "classes", "words", "reading", "task", "length", "interval", "computation")
    assert [name for name in kept if getattr(model, name) != getattr(again, name)] == []


@pytest.mark.parametrize("kind", ["tokens", "bytes", "numbers"])
@pytest.mark.parametrize("target", ["class", "real"])
def test_an_exported_model_answers_as_the_run_to_the_last_bit(kind, target, tmp_path):
    path = trained(tmp_path, kind, target)
    model, again, test = exported(path, tmp_path / "out")
    same(model, again, test)
    assert again.about["seeds"] == {"0": load_run(path).result.test[load_run(path).result.metric]}


@pytest.mark.parametrize("number", [28, 122])
def test_what_the_system_refuses_to_write_is_told_as_such(tmp_path, monkeypatch, number):
    """safetensors has an error of its own for it."""

    def full(*_, **__):
        raise safetensors.SafetensorError(f"Error while serializing: I/O error: none left (os error {number})")

    path = trained(tmp_path, "numbers", "class")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = CliRunner().invoke(app, ["export", str(path), "--out", str(tmp_path / "out")])
    told = {28: "the disk is full", 122: "the disk quota is used up"}[number]
    assert result.exit_code == OutputError.exit_code and told in result.stderr, result.stderr
    assert not (tmp_path / "out").exists() and "a bug" not in result.stderr


def test_scores_of_seeds_are_those_of_like_runs(tmp_path):
    """Neither of the other arm nor of other settings nor in smoke size."""
    finish(tmp_path, "scratch", 0, 0.5)
    finish(tmp_path, "scratch", 1, 0.6)
    finish(tmp_path, "spt", 1, 0.7)
    finish(tmp_path, "spt", 2, 0.8)
    finish(tmp_path, "scratch", 3, 0.9, settings="others")
    finish(tmp_path, "scratch", 4, 0.9, smoke=True)
    finish(tmp_path, "scratch", 5, 0.9)
    (tmp_path / "finetune-scratch5").rename(tmp_path / "finetune-scratch5.old1")  # moved aside, to be made again
    model = untrained("s4d")
    assert _scores_of_seeds(tmp_path / "finetune-scratch0", model) == {"0": 0.5, "1": 0.6}
    assert _scores_of_seeds(tmp_path / "finetune-spt2", model) == {"1": 0.7, "2": 0.8}


def test_rows_of_a_trial_have_times_where_the_model_has():
    model = untrained("s4d")
    assert random_rows(model, 5).steps is None
    steps = random_rows(replace(model, timed=True), 5).steps
    assert steps is not None and steps.shape == (10,) and steps.std() > 0


@pytest.mark.parametrize("ask", ["tags", "numbers", "pairs", "times"])
def test_every_way_of_asking_goes_out(ask, tmp_path):
    model = {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1} if ask == "times" else TINY["model"]
    same(*exported(asked(tmp_path, ask, model=model), tmp_path / "out"))


def test_a_pretraining_run_goes_out(tmp_path):
    job = spt_job(own_task(tmp_path, **TINY))
    model, again, test = exported(finished(job.parent, tmp_path), tmp_path / "out")
    same(model, again, test)
    with pytest.raises(UsageError, match="comes from pretraining"):
        again.predict(test, runtime=CPU)


def test_a_joint_loss_leaves_its_head_behind(tmp_path):
    path = trained(tmp_path, finetune__joint=0.5)
    same(*exported(path, tmp_path / "out"))
    assert not any("denoiser" in name for name in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))


def test_published_batches_share_their_padding_still(tmp_path):
    path = trained(tmp_path, finetune__train__metric_average="per_batch", finetune__train__batch_size=4)
    model, again, test = exported(path, tmp_path / "out")
    assert again.computation.together == 4
    same(model, again, test)


def test_only_the_exported_folder_is_needed(tmp_path):
    """Neither run nor data nor recipe, and nothing of the folder where they were."""
    rows = [(f"{'so good' if i % 2 else 'bad'} {i}!", "good" if i % 2 else "awful") for i in range(60)]
    table(tmp_path / "reviews.csv", rows)
    task = {"name": "custom", "path": "reviews.csv", "text_column": "body", "label_column": "stars", "tokens": "words"}
    path = finished(Job(loaded(tmp_path, task=task, **TINY), "finetune", 0), tmp_path / "runs")
    texts = ["so good!", "bad, and 12", "ünknown"]
    before = TrainedModel.open(path).predict_proba(texts, runtime=CPU)
    export(path, tmp_path / "elsewhere" / "out")
    for name in ("reviews.csv", "runs", "tiny.yaml"):
        shutil.move(tmp_path / name, tmp_path / f"{name}.away")
    model = spt.load_model(tmp_path / "elsewhere" / "out")
    assert np.array_equal(model.predict_proba(texts, runtime=CPU), before)
    assert model.classes == ("awful", "good") and "good" in model.words
    assert set(model.predict(texts, runtime=CPU)) <= {"awful", "good"}
    text = (tmp_path / "elsewhere" / "out" / "config.json").read_text()
    assert str(tmp_path) not in text, "a path of the machine that it was trained on"


def test_a_users_model_goes_out_as_a_copy_that_runs_only_when_trusted(tmp_path):
    extra = "pass\n\nopen(__file__ + '.ran', 'w').close()\n"
    file = model_file(tmp_path, extra=extra)
    path = trained(tmp_path, model={"name": str(file), "d_model": 8, "n_layers": 1})
    model, again, test = exported(path, tmp_path / "out")
    same(model, again, test)
    out = tmp_path / "out"
    assert (out / "model.py").read_bytes() == file.read_bytes()
    (out / "model.py.ran").unlink()
    with pytest.raises(UsageError, match="trust_code=True"):
        spt.load_model(out)
    assert not (out / "model.py.ran").exists(), "nothing ran"
    (out / "model.py").write_text("raise SystemExit")
    with pytest.raises(CheckpointError, match=r"model\.py is damaged"):
        spt.load_model(out, trust_code=True)


def test_code_elsewhere_is_never_loaded(tmp_path):
    path = trained(tmp_path)
    export(path, tmp_path / "out")
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit")
    for name, error, message in (
        (str(evil), CheckpointError, "no file of this folder"),
        ("../evil.py", CheckpointError, "no file of this folder"),
        ("model.py", CheckpointError, "no file of this folder"),
        ("antigravity", UsageError, "plug-in antigravity"),
        ("evil.module", UsageError, "plug-in evil.module"),
    ):
        _changed(tmp_path / "out", lambda c, name=name: c["architecture"]["model"].update(name=name))
        with pytest.raises(error, match=message):
            spt.load_model(tmp_path / "out")


def test_a_checkpoints_sizes_go_out_with_its_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=8, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    transformers.LlamaModel(config).save_pretrained(tmp_path / "llama")
    model = {"name": "hf", "checkpoint": str(tmp_path / "llama"), "causal": True, "d_model": 16, "n_layers": 1}
    path = trained(tmp_path, model=model)
    ours, test = TrainedModel.open(path), load_run(path).data.test.packed().unlabelled()
    export(path, tmp_path / "out")
    shutil.rmtree(tmp_path / "llama")
    same(ours, spt.load_model(tmp_path / "out"), test)


def test_the_card_tells_scores_seeds_and_limits(tmp_path):
    one = own_task(tmp_path, **TINY)
    paths = [finished(spt_job(one, seed), tmp_path) for seed in (0, 1)]
    export(paths[1], tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    results = [load_run(path).result for path in paths]
    index = yaml.safe_load(front)["model-index"][0]["results"][0]
    assert {metric["type"]: metric["value"] for metric in index["metrics"]} == results[1].test
    for result in results:
        assert f"{result.test['accuracy']:.4g} (seed {result.seed})" in body
    assert "pretrain, objective masked: 6 optimiser steps" in body and "finetune, objective supervised" in body
    assert 'spt.load_model("out")' in body and "licence" in body and "12 steps" in body


# ------------------------------------------------------------------------------------------------------ what is refused


def _changed(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def _config(change):
    return lambda folder: _changed(folder, change)


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _other_weights(folder):
    """Of another network, with their own checksum."""
    from spt.inference.exported import checksum

    safetensors.torch.save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    _changed(folder, lambda c: c["files"].update({"model.safetensors": checksum(folder / "model.safetensors")}))


DAMAGES = {
    "not JSON": (lambda f: (f / "config.json").write_text("{"), 6, r"config\.json is damaged: it is not JSON"),
    "not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), 6, "is damaged: it is not JSON"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 100_000), 6, "is damaged: it is not JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), 6, "is not one that `spt export` writes"),
    "another's config": (lambda f: (f / "config.json").write_text('{"model_type": "bert"}'), 6, "is not one that"),
    "a later format": (_config(lambda c: c.update(format=2)), 6, "has format 2 of spt .*, this version .* reads 1"),
    "a format in words": (_config(lambda c: c.update(format="one")), 6, "has format 'one'"),
    "a field gone": (_config(lambda c: c.pop("output")), 6, "damaged: output: missing"),
    "a field too many": (_config(lambda c: c.update(more=1)), 6, "damaged: more: unknown key"),
    "a wrong type": (_config(lambda c: c.update(length="long")), 6, "damaged: length: "),
    "no length": (_config(lambda c: c.update(length=-3)), 6, "damaged: length: "),
    "no input": (_config(lambda c: c["input"].update(kind="Pictures")), 6, "is damaged: KeyError"),
    "a target as input": (_config(lambda c: c.update(input=c["target"])), 6, "Classes is no input"),
    "a wrong vocabulary": (_config(lambda c: c["input"].update(vocab=1)), 6, "is damaged: ValueError: Tokens.vocab"),
    "an unknown option": (_config(lambda c: c["architecture"]["model"].update(x=1)), 6, "cannot be built"),
    "another width": (_config(lambda c: c["architecture"]["model"].update(d_model=16)), 6, "does not fit the network"),
    "weights not named": (_config(lambda c: c.update(files={})), 6, r"does not name model\.safetensors"),
    "files elsewhere": (_config(lambda c: c["files"].update({"../x": "0"})), 6, "is damaged: it is not the file"),
    "weights gone": (lambda f: (f / "model.safetensors").unlink(), 6, r"model\.safetensors is missing"),
    "weights truncated": (_truncated, 6, r"model\.safetensors is damaged: it is not the file that was exported"),
    "weights of another": (_other_weights, 6, "does not fit the network"),
    "config a folder": (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), 2, "neither the folder"),
    "config gone": (lambda f: (f / "config.json").unlink(), 2, "neither the folder of a run nor one that"),
    "all gone": (lambda f: shutil.rmtree(f), 2, "no folder"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    export(trained(folder), folder / "out")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_an_exported_folder_is_one_sentence(damage, intact, tmp_path):
    change, code, message = DAMAGES[damage]
    shutil.copytree(intact / "out", tmp_path / "out")
    change(tmp_path / "out")
    with pytest.raises(SptError, match=message) as caught:
        spt.load_model(tmp_path / "out")
    assert caught.value.exit_code == code and "\n" not in str(caught.value)


def command(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def _run_of(intact):
    return next(intact.glob("finetune-*"))


def _unfinished(folder, run):
    shutil.copytree(run, folder / run.name)
    (folder / run.name / "result.json").unlink()
    return folder / run.name


def _bad_weights(folder, run):
    shutil.copytree(run, folder / run.name)
    (folder / run.name / "checkpoints" / "best" / "model.safetensors").write_bytes(b"")
    return folder / run.name


MISUSES = {
    "no folder": (lambda t, run: t / "no", 2, "no folder"),
    "a file": (lambda t, run: run / "result.json", 2, "no folder"),
    "an empty folder": (lambda t, run: t, 2, "neither the folder of a run"),
    "not finished": (_unfinished, 6, "is not finished"),
    "damaged weights": (_bad_weights, 6, "is damaged"),
    "an exported folder": (lambda t, run: run.parent / "out", 2, "is an exported folder already"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_is_no_finished_run_is_not_exported(misuse, intact, tmp_path):
    source, code, message = MISUSES[misuse]
    done = command(source(tmp_path, _run_of(intact)), "--out", tmp_path / "out")
    assert done.exit_code == code and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*tmp"))


def test_nothing_is_overwritten_and_nothing_is_left_behind(intact, tmp_path, monkeypatch):
    run = _run_of(intact)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in ("", "file", "link"):
        done = command(run, "--out", tmp_path / out)
        assert done.exit_code == 7 and "exists already" in done.stderr
    done = command(run, "--out", tmp_path / "file" / "below")
    assert done.exit_code == 7 and "choose another folder" in done.stderr
    monkeypatch.setattr("spt.inference.export.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_model_that_is_more_than_its_options_and_weights_is_not_exported(tmp_path):
    file = model_file(tmp_path, "x * self.secret", "secret = 1.0\n    def train(self, mode=True):\n        return self")
    text = file.read_text().replace("secret = 1.0", "import random; secret = random.random()")
    file.write_text(text)
    path = trained(tmp_path, model={"name": str(file), "d_model": 8, "n_layers": 1})
    model = TrainedModel.open(path)
    for mixer in model.network.backbone.mixers:
        mixer.secret = 3.0
    from spt.inference.export import _check_answers, _fill

    (tmp_path / "out").mkdir()
    _fill(tmp_path / "out", model)
    with pytest.raises(UsageError, match="keeps something that is neither"):
        _check_answers(model, tmp_path / "out")


def test_the_command_writes_a_folder_that_another_process_opens(intact, tmp_path):
    done = command(_run_of(intact), "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told["files"]) == {"model.safetensors", "config.json", "README.md"}
    program = (
        f"import spt; print(spt.load_model({str(tmp_path / 'out')!r}).predict([[1, 2, 3], [8, 8, 8, 8]]).tolist())"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    model = TrainedModel.open(_run_of(intact))
    assert json.loads(seen.stdout) == model.predict([[1, 2, 3], [8, 8, 8, 8]], runtime=CPU).tolist(), seen.stderr
