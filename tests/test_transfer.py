"""From pretraining to finetuning: a strict copy, refused whenever it would make no sense."""

import json
import shutil

import numpy as np
import pytest
import torch
from tiny import TASK, load, loaded, model_file, own_task, recipe_file, run, spt, spt_job, weights

from spt.config.job import Job
from spt.data.dataset import open_task
from spt.data.fingerprints import overlap, split_record
from spt.errors import CheckpointError, UsageError
from spt.training.build import build_stage
from spt.training.checkpoint import load_pretrained
from spt.training.stage import open_weights


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    one = loaded(folder)
    job = Job(one, "pretrain", 0)
    run(job, folder / "runs")
    return one, folder / "runs" / job.name


def test_every_tensor_of_encoder_and_backbone_is_copied(pretrained):
    one, folder = pretrained
    setup = build_stage(spt_job(one))
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    matches = load_pretrained(
        folder / "checkpoints/best", setup.model, one.recipe.model.model_dump(mode="json"), setup.data.input
    )
    saved = weights(folder / "checkpoints/best")
    moved = 0
    for name, tensor in setup.model.state_dict().items():
        if name.startswith("head."):
            assert torch.equal(tensor, before[name])
        else:
            assert np.array_equal(tensor.numpy(), saved[name])
            moved += not torch.equal(tensor, before[name])
    assert moved > 10  # pretraining did change them
    assert [(m.part, m.outcome) for m in matches] == [("encoder", "copied"), ("backbone", "copied"), ("head", "new")]
    counts = setup.model.parameter_counts()
    assert all(m.parameters == counts[m.part] for m in matches)


def test_the_match_table_is_printed(pretrained, tmp_path, messages):
    one, folder = pretrained
    run(Job(one, "finetune", 0, open_weights(folder)), tmp_path)
    with pytest.raises(CheckpointError, match=r"is not finished \(not a run\)"):
        open_weights(folder / "recipe.yaml")
    table = "\n".join(messages)
    assert "encoder   copied" in table and "backbone  copied" in table and "head      new" in table


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model__d_model": 32}, "d_model 16 there, 32 here"),
        ({"model__n_heads": 4}, "n_heads 2 there, 4 here"),  # the same shapes, another function
        ({"model__causal": True}, "causal False there, True here"),
        ({"model__positions": ["learned"]}, "positions"),
        ({"model__n_layers": 2}, "n_layers"),
        ({"task__pixels": "values"}, "another input"),
    ],
)
def test_another_architecture_is_refused(pretrained, tmp_path, changes, complaint):
    _, folder = pretrained
    other = loaded(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        run(Job(other, "finetune", 0, open_weights(folder)), tmp_path / "runs")
    assert not list((tmp_path / "runs").glob("finetune-*"))  # nothing left behind


def test_another_vocabulary_is_refused(tmp_path):
    one = own_task(tmp_path)
    run(Job(one, "pretrain", 0), tmp_path / "runs")
    parent = open_weights(tmp_path / "runs" / Job(one, "pretrain", 0).name)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "toy.py").write_text(TASK.replace("Tokens(9)", "Tokens(10)"))
    other = load(str(recipe_file(tmp_path / "b", task={"name": "./toy.py"})))
    with pytest.raises(CheckpointError, match="another input"):
        run(Job(other, "finetune", 0, parent), tmp_path / "runs")


@pytest.mark.parametrize("file", ["model.safetensors", "about.json", "rows.npy", "manifest.json"])
def test_a_damaged_checkpoint_is_refused(pretrained, tmp_path, file):
    _one, folder = pretrained
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    path = copy / "checkpoints/best" / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        open_weights(copy)
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_weights(copy)


def test_what_is_not_a_finished_pretraining_is_refused(pretrained, tmp_path):
    one, _folder = pretrained
    with pytest.raises(UsageError, match="no run folder"):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not finished"):
        open_weights(tmp_path)
    result = run(Job(one, "finetune", 0), tmp_path / "runs")
    with pytest.raises(CheckpointError, match="a finetune run"):
        open_weights(tmp_path / "runs" / f"finetune-{result.key}")


def test_rows_of_validation_and_test_are_refused(pretrained, tmp_path):
    """Pretrained on another split of the same images: its training rows are now among validation and test."""
    _, folder = pretrained
    other = loaded(tmp_path, task={"name": "digits", "split_seed": 1})
    with pytest.raises(CheckpointError, match=r"was pretrained on \d+ of the \d+ (validation|test) rows") as caught:
        run(Job(other, "finetune", 0, open_weights(folder)), tmp_path / "runs")
    assert caught.value.exit_code == 6
    assert not list((tmp_path / "runs").glob("finetune-*"))


def test_a_fraction_may_follow_the_whole(pretrained, tmp_path):
    """Pretraining on more of the same training split is no leak."""
    whole = loaded(tmp_path, task={"name": "digits"})
    run(Job(whole, "pretrain", 0), tmp_path / "runs")
    parent = open_weights(tmp_path / "runs" / Job(whole, "pretrain", 0).name)
    part = loaded(tmp_path, task={"name": "digits", "subset_fraction": 0.05})
    result = run(Job(part, "finetune", 0, parent), tmp_path / "runs")
    assert result.parent == parent.key and result.data["train"].rows == 50


def test_the_datas_own_duplicates_are_no_leak_but_are_told(tmp_path, messages):
    """A row that stands in training and in test: both arms see it, and a note says so."""
    one = own_task(tmp_path)
    (tmp_path / "toy.py").write_text(
        TASK.replace(
            "split(40), split(17), split(19))",
            "train, split(17), Split.from_rows([train.row(i) for i in range(7)], train.targets[:7]))",
        ).replace("    inputs = {", "    train = split(40)\n    inputs = {")
    )
    one = load(str(tmp_path / "tiny.yaml"))
    assert overlap(open_task(one.recipe.task)) == {"val": 0, "test": 7}
    run(spt_job(one), tmp_path / "runs")
    assert any("7 of the 7 test rows have the same input as a training row" in text for text in messages)


def test_fingerprints_are_recorded(pretrained, tmp_path):
    one, folder = pretrained
    about = json.loads((folder / "checkpoints/best/about.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    data = open_task(one.recipe.task)
    expected = {name: split_record(split.unlabelled()).model_dump() for name, split in data.splits.items()}
    assert about["data"] == result["data"] == expected
    assert expected["train"]["targets"] is None
    rows = np.load(folder / "checkpoints/best/rows.npy")
    assert np.array_equal(rows, np.sort(data.train.fingerprints))
    finetuned = run(Job(one, "finetune", 0, open_weights(folder)), tmp_path)
    assert finetuned.data["train"].inputs == expected["train"]["inputs"]
    assert finetuned.data["train"].targets is not None


@pytest.mark.slow
def test_finetune_from_a_run_on_the_command_line(pretrained, tmp_path):
    _one, folder = pretrained
    recipe = recipe_file(tmp_path)
    done = spt("finetune", recipe, "--from", folder, "--json", "--out", "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["parent"] == folder.name.removeprefix("pretrain-")
    assert "backbone  copied" in done.stderr
    done = spt("finetune", recipe, "--from", folder, "model.d_model=32", cwd=tmp_path)
    assert done.returncode == 6 and "another architecture" in done.stderr and done.stdout == ""


def test_a_users_model_is_its_content_not_its_place(tmp_path):
    """Moved, its weights still fit; edited into another function of the same shapes, they are refused."""
    for folder, forward in (("a", "x.tanh()"), ("b", "x.tanh()"), ("c", "x.relu()")):
        (tmp_path / folder).mkdir()
        model_file(tmp_path / folder, forward)
        recipe_file(tmp_path / folder, model={"name": "./mine.py", "d_model": 16})
    first, moved, edited = (load(str(tmp_path / folder / "tiny.yaml")) for folder in "abc")
    run(Job(first, "pretrain", 0), tmp_path / "runs")
    parent = open_weights(tmp_path / "runs" / Job(first, "pretrain", 0).name)
    run(Job(moved, "finetune", 0, parent), tmp_path / "runs")
    with pytest.raises(CheckpointError, match="another architecture: name"):
        run(Job(edited, "finetune", 0, parent), tmp_path / "runs")
