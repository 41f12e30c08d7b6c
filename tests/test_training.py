"""The loop: exact resume, paired arms, a batch is a batch however it is cut, nothing seen that must not be."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tiny import (
    RECIPE,
    TASK,
    environment,
    load,
    loaded,
    model_file,
    own_task,
    recipe_file,
    reseal,
    run,
    spt_job,
    weights,
)

import spt.runtime.distributed
from spt.config.job import Job
from spt.config.recipe import EncoderConfig, HeadConfig
from spt.data.batching import collate, training_rows
from spt.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    Interrupted,
    OutputError,
    RecipeError,
    Stopped,
    UsageError,
)
from spt.models.base import Context
from spt.models.ops.attention import sinusoids
from spt.rng import Draw, stream
from spt.runs.folder import RunFolder
from spt.runs.result import Ledger
from spt.runtime.distributed import Runtime
from spt.tasks.base import Tokens, Values
from spt.training import checkpoint, loop, stage
from spt.training.build import build_stage
from spt.training.checkpoint import TrainingState
from spt.training.evaluate import is_better
from spt.training.losses import per_answer, right_answers
from spt.training.metrics import NothingScored
from spt.training.network import Encoder, Head, pool
from spt.training.objectives import Inputs, Output, Targets, evaluation_draw
from spt.training.seeding import seeded

SCORES = ("val", "test", "best_step", "stop", "parameters", "data", "settings", "metric")


def same_result(a, b):
    for name in SCORES:
        assert getattr(a, name) == getattr(b, name), name
    for ledger in ("own", "total"):
        for name in ("steps", "examples", "positions", "flops", "operations"):
            assert getattr(getattr(a, ledger), name) == getattr(getattr(b, ledger), name)


def same_weights(a, b):
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_run_leaves_what_it_promises(tmp_path):
    one = loaded(tmp_path)
    result = run(spt_job(one), tmp_path / "runs")
    (finetune,) = (tmp_path / "runs").glob("finetune-*")
    (pretrain,) = (tmp_path / "runs").glob("pretrain-*")
    expected = {"recipe.yaml", "job.json", "env.json", "metrics.jsonl", "status.json", "checkpoints", "result.json"}
    assert {path.name for path in pretrain.iterdir()} == expected
    assert {path.name for path in finetune.iterdir()} == expected | {"predictions.parquet"}
    assert [p.name for p in (finetune / "checkpoints").iterdir()] == ["best"]
    assert json.loads((finetune / "status.json").read_text())["state"] == "done"
    kinds = [(row["kind"], row["step"]) for row in RunFolder(tmp_path / "runs", finetune.name).metrics()]
    assert kinds == [("train", 3), ("val", 3), ("train", 6), ("val", 6)]
    assert result.total.steps == 12 and result.own.steps == 6
    assert result.own.examples == 48 and result.own.positions == 48 * 64
    predictions = pq.read_table(finetune / "predictions.parquet").to_pydict()
    right = np.equal(predictions["label"], predictions["prediction"]).mean()
    assert right == pytest.approx(result.test["accuracy"])
    assert len(set(predictions["id"])) == 24 and min(predictions["margin"]) >= 0
    again = yaml.safe_load((finetune / "recipe.yaml").read_text())
    assert again == one.recipe.model_dump(mode="json")


def test_finished_runs_are_reused(tmp_path, monkeypatch):
    one = loaded(tmp_path)
    first = run(spt_job(one), tmp_path / "runs")
    monkeypatch.setattr("spt.training.stage.fit", lambda *_: pytest.fail("trained again"))
    assert run(spt_job(one), tmp_path / "runs") == first


def test_the_same_recipe_gives_the_same_numbers_elsewhere(tmp_path):
    one = loaded(tmp_path)
    same_result(run(spt_job(one), tmp_path / "a"), run(spt_job(one), tmp_path / "b"))
    name = spt_job(one).name
    same_weights(tmp_path / "a" / name / "checkpoints/best", tmp_path / "b" / name / "checkpoints/best")


@pytest.mark.parametrize("stop_at", [1, pytest.param(4, marks=pytest.mark.slow), 7])
def test_interrupted_equals_uninterrupted(tmp_path, stop_at):
    """With dropout, so that the random state matters; stopped on, before and after evaluations, within an epoch."""
    options = {"model__dropout": 0.3, "pretrain__train__steps": 8, "pretrain__train__schedule": "cosine"}
    job = Job(loaded(tmp_path, **options), "pretrain", 0)
    whole = run(job, tmp_path / "whole")
    with stopping_after(stop_at), pytest.raises(Stopped, match=f"after step {stop_at}"):
        run(job, tmp_path / "parts")
    status = RunFolder(tmp_path / "parts", job.name).status()
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    resumed = run(job, tmp_path / "parts")
    same_result(whole, resumed)
    same_weights(tmp_path / "whole" / job.name / "checkpoints/best", tmp_path / "parts" / job.name / "checkpoints/best")
    logs = [(tmp_path / part / job.name / "metrics.jsonl").read_text() for part in ("whole", "parts")]
    assert logs[0] == logs[1]


class stopping_after:
    """Deliver a signal to this process in the middle of optimiser step n."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def __enter__(self):
        self.real = spt.runtime.distributed.Runtime.autocast
        count = 0

        def autocast(runtime, precision):
            nonlocal count
            if torch.is_grad_enabled():
                count += 1
                if count == self.step:
                    os.kill(os.getpid(), self.number)
            return self.real(runtime, precision)

        spt.runtime.distributed.Runtime.autocast = autocast

    def __exit__(self, *_):
        spt.runtime.distributed.Runtime.autocast = self.real


def test_ctrl_c_saves_and_says_130(tmp_path):
    job = Job(loaded(tmp_path), "pretrain", 0)
    with stopping_after(2, signal.SIGINT), pytest.raises(Interrupted) as caught:
        run(job, tmp_path / "runs")
    assert caught.value.exit_code == 130
    assert RunFolder(tmp_path / "runs", job.name).status()["exit_code"] == 130


def test_resume_modes(tmp_path, messages):
    job = Job(loaded(tmp_path), "pretrain", 0)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run(job, tmp_path / "runs", resume="must")
    assert not (tmp_path / "runs" / job.name).exists()
    first = run(job, tmp_path / "runs")
    second = run(job, tmp_path / "runs", resume="never")
    same_result(first, second)
    assert (tmp_path / "runs" / f"{job.name}.old1" / "result.json").is_file()  # nothing is lost
    assert "old1" in " ".join(messages)
    assert run(job, tmp_path / "runs", resume="must") == second  # finished: nothing to resume, nothing wrong
    both = spt_job(loaded(tmp_path, pretrain__train__steps=4))
    with stopping_after(2, signal.SIGINT), pytest.raises(Interrupted):
        run(both, tmp_path / "runs")
    assert run(both, tmp_path / "runs", resume="must").parent is not None  # its pretraining was resumed
    again = spt_job(loaded(tmp_path, pretrain__train__steps=4, finetune__train__steps=5))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run(again, tmp_path / "runs", resume="must")  # here nothing was


def test_a_damaged_newest_checkpoint_falls_back(tmp_path, messages):
    job = Job(loaded(tmp_path, pretrain__train__steps=8), "pretrain", 0)
    whole = run(job, tmp_path / "whole")
    with stopping_after(6), pytest.raises(Stopped):
        run(job, tmp_path / "runs", save_every=0.0)
    steps = sorted((tmp_path / "runs" / job.name / "checkpoints").glob("step-*"))
    assert [path.name for path in steps] == ["step-00000005", "step-00000006"]  # the last two are kept
    (steps[-1] / "model.safetensors").write_bytes(b"not weights")
    same_result(whole, run(job, tmp_path / "runs"))
    assert any("step-00000006 cannot be used (model.safetensors is damaged)" in text for text in messages)


@pytest.mark.parametrize("micro", [1, 3, 5])
def test_micro_batches_change_nothing(tmp_path, micro):
    """Uneven pieces with different numbers of masked positions: the gradient is that of the whole batch."""
    job = Job(own_task(tmp_path, pretrain__train__batch_size=7), "pretrain", 0)
    whole, pieces = run(job, tmp_path / "whole"), run(job, tmp_path / "pieces", micro_batch_size=micro)
    assert pieces.val == pytest.approx(whole.val, rel=1e-4)
    one = weights(tmp_path / "whole" / job.name / "checkpoints/best")
    two = weights(tmp_path / "pieces" / job.name / "checkpoints/best")
    assert max(np.abs(one[name] - two[name]).max() for name in one) < 1e-4


@pytest.mark.parametrize("average", ["exact", "per_batch"])
@pytest.mark.parametrize("joint", [None, 0.5])
def test_padding_that_is_seen_is_that_of_the_whole_batch(tmp_path, average, joint):
    """However batches are cut, in training or in evaluation: sequences of 3 to 12 steps."""
    from test_memory import memory_for

    train = {"steps": 6, "batch_size": 7, "learning_rate": 0.01, "evaluate_every": 3, "metric_average": average}
    finetune = {"train": train, **({} if joint is None else {"joint": joint})}
    one = own_task(tmp_path, model__mask_padding=False, finetune=finetune, pretrain__train={**train})
    job = Job(one, "finetune", 0)
    whole, pieces = run(job, tmp_path / "whole"), run(job, tmp_path / "pieces", micro_batch_size=2)
    assert pieces.val == pytest.approx(whole.val, rel=1e-4) and pieces.test == pytest.approx(whole.test, rel=1e-4)
    with memory_for(2, training=False):
        assert run(job, tmp_path / "cut").test == pytest.approx(whole.test, rel=1e-4)
    hidden = Job(own_task(tmp_path, finetune=finetune, pretrain__train={**train}), "finetune", 0)
    assert run(hidden, tmp_path / "hidden").test != pytest.approx(whole.test, rel=1e-4), "padding is seen"


def test_the_time_of_an_evaluation_before_a_stop_is_counted(tmp_path, monkeypatch):
    real = loop.evaluate

    def slow(*given, **more):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, **more)

    job = Job(own_task(tmp_path), "pretrain", 0)
    monkeypatch.setattr(loop, "evaluate", slow)
    with pytest.raises(Stopped):
        run(job, tmp_path / "runs")
    monkeypatch.undo()
    assert run(job, tmp_path / "runs").own.seconds >= 0.3


@pytest.mark.parametrize(
    ("test_rows", "stage", "refused"),
    [(6, "pretrain", False), (6, "finetune", True)],
)
def test_means_over_full_batches_ask_for_rows_that_are_scored(tmp_path, test_rows, stage, refused):
    train = {"steps": 2, "batch_size": 12, "learning_rate": 0.01, "metric_average": "per_batch"}
    own_task(tmp_path, pretrain__train=train, finetune={"train": {**train}})
    toy = tmp_path / "toy.py"
    toy.write_text(toy.read_text().replace("split(19)", f"split({test_rows})"))
    job = Job(load(str(tmp_path / "tiny.yaml")), stage, 0)
    if refused:
        with pytest.raises(UsageError, match="the test split has 6 rows"):
            build_stage(job)
    else:
        build_stage(job)


def test_a_batch_is_weighed_as_a_whole(tmp_path):
    """One step against plain torch: the loss is the mean over all masked positions, not a mean of means."""
    job = Job(own_task(tmp_path, pretrain__train__batch_size=11), "pretrain", 0)

    setup = build_stage(job)
    _, rows = next(training_rows(len(setup.data.train), 11, 0, 0))
    batch = collate(setup.data.train, rows, setup.data.input, setup.data.target)
    inputs, targets = setup.objective.make_inputs(batch, Draw(0, "corruption", 0))
    losses = per_answer(setup.output, setup.model(inputs), targets.values)
    expected = losses[inputs.hidden].mean().item()
    root = tmp_path / "runs"
    shorter = own_task(
        tmp_path, pretrain__train__batch_size=11, pretrain__train__steps=1, pretrain__train__evaluate_every=1
    )
    job = Job(shorter, "pretrain", 0)
    run(job, root, micro_batch_size=2)
    logged = RunFolder(root, job.name).metrics()[0]["loss"]
    assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("micro", [11, 2])
def test_the_accuracy_on_training_batches_is_logged(tmp_path, micro):
    """Of the first step, whose network is the one that is built: 11 answers, however the batch is cut."""
    first = {"steps": 2, "batch_size": 11, "learning_rate": 0.01, "evaluate_every": 1}
    job = Job(own_task(tmp_path, finetune={"train": first}), "finetune", 0)
    setup = build_stage(job)
    _, rows = next(training_rows(len(setup.data.train), 11, 0, 0))
    batch = collate(setup.data.train, rows, setup.data.input, setup.data.target)
    logits = setup.model(setup.objective.make_inputs(batch, Draw(0, "corruption", 0))[0])
    right = (logits.argmax(-1) == batch.y).sum().item()
    run(job, tmp_path / "runs", micro_batch_size=micro)
    lines = [line for line in RunFolder(tmp_path / "runs", job.name).metrics() if line["kind"] == "train"]
    assert lines[0]["accuracy"] == pytest.approx(right / 11)
    assert len(lines) == 2 and 0 <= lines[1]["accuracy"] * 11 <= 11


def test_the_accuracy_is_that_since_the_last_evaluation_and_survives_an_interruption(tmp_path):
    state = TrainingState().after(Ledger(steps=1), loss=2.0, weight=4.0, answers=4.0, right=1.0)
    state = TrainingState.model_validate(state.model_dump(mode="json"))  # saved and read again
    state = state.after(Ledger(steps=1), loss=1.0, weight=4.0, answers=4.0, right=3.0)
    assert state.training_scores == {"loss": 3 / 8, "accuracy": 0.5}
    assert state.evaluated({"loss": 1.0}, True).training_scores == {"loss": 0.0}


@pytest.mark.parametrize("balanced", ["none", "batch"])
def test_steps_without_a_target_are_neither_right_nor_wrong(balanced):
    output = Output("cross_entropy", per_step=True, size=1, classes=2)
    values = torch.tensor([[0, 1, 1], [1, 0, 0]])[..., None]
    weight = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.0, 0.0]]) * (0.25 if balanced == "batch" else 1)
    logits = torch.tensor([[0, 0, 1], [1, 0, 0]])  # right: the first, and of the second row the first
    whole = torch.nn.functional.one_hot(logits, 2).float()
    assert right_answers(output, whole, Targets(values, weight)) == 2
    scored = torch.tensor([0, 1, 3])
    assert right_answers(output, whole.flatten(0, 1)[scored], Targets(values, weight, scored)) == 2


def test_pretraining_and_numbers_have_no_accuracy(tmp_path):
    reals = own_task(tmp_path, task={"name": "./toy.py", "kind": "values", "target": "reals"})
    for job in (Job(own_task(tmp_path), "pretrain", 0), Job(reals, "finetune", 0)):
        run(job, tmp_path / "runs")
        lines = [line for line in RunFolder(tmp_path / "runs", job.name).metrics() if line["kind"] == "train"]
        assert lines and not any("accuracy" in line for line in lines)


def test_arms_are_paired(tmp_path):
    """Same head at the start, same encoder and backbone as pretraining had, same batches in the same order."""
    one = loaded(tmp_path, scratch={"train": {"steps": 9, "batch_size": 8, "learning_rate": 0.01}})
    spt, scratch, pretrain = (
        build_stage(spt_job(one)),
        build_stage(Job(one, "finetune", 0)),
        build_stage(Job(one, "pretrain", 0)),
    )
    for name, tensor in scratch.model.state_dict().items():
        assert torch.equal(tensor, spt.model.state_dict()[name])
        if not name.startswith("head."):
            assert torch.equal(tensor, pretrain.model.state_dict()[name])
    other = build_stage(Job(one, "finetune", 1))
    assert not torch.equal(other.model.head.out.weight, scratch.model.head.out.weight)
    assert Job(one, "finetune", 0).train.steps == 9 and spt_job(one).train.steps == 6
    # the order of batches: seeding.order(n, seed, epoch) alone decides; see test_objectives


def test_pretraining_never_sees_a_label(tmp_path):
    """Structurally: there are none in its data. And in effect: other labels give the same weights, bit for bit."""
    job = Job(own_task(tmp_path), "pretrain", 0)
    assert all(split.targets is None for split in build_stage(job).data.splits.values())
    run(job, tmp_path / "a")
    lying = TASK.replace("[row.sum() > 4.5 * len(row) for row in rows]", "[i % 2 for i in range(n)]")
    assert lying != TASK
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "toy.py").write_text(lying)
    recipe_file(tmp_path / "b", task={"name": "./toy.py"})
    from tiny import load

    other = Job(load(str(tmp_path / "b" / "tiny.yaml")), "pretrain", 0)
    run(other, tmp_path / "c")
    same_weights(tmp_path / "a" / job.name / "checkpoints/best", tmp_path / "c" / other.name / "checkpoints/best")


@pytest.mark.parametrize("target", ["class", "numbers"])
def test_a_test_row_without_a_finite_answer_makes_the_run_one_that_diverged(target, tmp_path):
    """Not a result that cannot be read, nor an error of the library that computes another metric."""
    extreme = TASK.replace("split(40), split(17), split(19))", "split(40), split(17), far(split(19)))").replace(
        "    inputs =", "    def far(rows):\n        rows.values[5] = 1e9\n        return rows\n    inputs ="
    )
    assert extreme.count("far(") == 2
    (tmp_path / "toy.py").write_text(extreme)
    model_file(tmp_path, forward="x / (x.abs().amax(1, keepdim=True) < 1e5)")
    model = {"name": "./mine.py", "d_model": 16, "n_layers": 1, "prenorm": False}
    task = {"name": "./toy.py", "kind": "values", "target": target}
    one = load(str(recipe_file(tmp_path, {**RECIPE, "task": task, "model": model})))
    job = Job(one, "finetune", 0)
    with pytest.raises(DivergedError, match="the 19 rows to be scored is not finite, though it was in"):
        run(job, tmp_path)
    folder = RunFolder(tmp_path, job.name)
    assert (folder.status() or {})["state"] == "diverged" and folder.result() is None


def test_pretraining_trains_on_the_training_split_alone(tmp_path):
    """Change validation and test inputs: the last weights stay the same. Change a training input: they do not."""
    found = {}
    for name, edit in {"plain": "", "val": "val = split(17)", "train": "train = split(40)"}.items():
        folder = tmp_path / name
        folder.mkdir()
        text = TASK.replace("split(40), split(17), split(19))", "train, val, test)").replace(
            "    inputs = {", f"    train, val, test = split(40), split(17), split(19)\n    {edit}\n    inputs = {{"
        )
        (folder / "toy.py").write_text(text)
        from tiny import load

        # One evaluation, at the end: selection, which may look at validation inputs, has nothing to choose.
        path = recipe_file(folder, task={"name": "./toy.py"}, pretrain__train__evaluate_every=6)
        job = Job(load(str(path)), "pretrain", 0)
        run(job, folder / "runs")
        found[name] = folder / "runs" / job.name / "checkpoints/best"
    same_weights(found["plain"], found["val"])
    with pytest.raises(AssertionError):
        same_weights(found["plain"], found["train"])


def test_divergence_stops_and_keeps_the_last_good_weights(tmp_path):
    options = {
        "pretrain__train__learning_rate": 1e38,
        "pretrain__train__max_grad_norm": None,
        "pretrain__train__evaluate_every": 1,
    }
    job = Job(loaded(tmp_path, **options), "pretrain", 0)
    with pytest.raises(DivergedError, match="not finite at step"):
        run(job, tmp_path / "runs")
    status = RunFolder(tmp_path / "runs", job.name).status()
    assert (status["state"], status["exit_code"]) == ("diverged", 5)
    with pytest.raises(DivergedError, match="diverged before"):  # no time is spent on it twice
        run(job, tmp_path / "runs")


def test_early_stopping(tmp_path):
    options = {"finetune__train__patience": 2, "finetune__train__steps": 400, "finetune__train__evaluate_every": 2}
    result = run(Job(own_task(tmp_path, **options), "finetune", 0), tmp_path / "runs")
    assert result.stop == "patience"
    assert result.own.steps == result.best_step + 4 < 400


def test_the_best_checkpoint_is_selected_on_validation(tmp_path):
    options = {
        "finetune__train__steps": 30,
        "finetune__train__evaluate_every": 3,
        "finetune__train__learning_rate": 0.05,
    }
    job = Job(own_task(tmp_path, **options), "finetune", 0)
    result = run(job, tmp_path / "runs")
    rows = [row for row in RunFolder(tmp_path / "runs", job.name).metrics() if row["kind"] == "val"]
    ranked = sorted(rows, key=lambda row: (-row["accuracy"], row["loss"], row["step"]))
    assert result.best_step == ranked[0]["step"]
    assert result.val["accuracy"] == ranked[0]["accuracy"] and result.val["loss"] == ranked[0]["loss"]


@pytest.mark.parametrize(
    ("found", "best", "metric", "verdict"),
    [
        ({"accuracy": 0.5, "loss": 9.0}, {}, "accuracy", True),
        ({"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.5, "loss": 2.0}, "accuracy", True),
        ({"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.5, "loss": 2.0}, "accuracy", False),
        ({"mse": 0.5, "loss": 0.5}, {"mse": 0.4, "loss": 0.4}, "mse", False),
        ({"r2": 0.5, "loss": 0.5}, {"r2": -9.0, "loss": 0.4}, "r2", True),
    ],
)
def test_better(found, best, metric, verdict):
    assert is_better(found, best, metric) is verdict


@pytest.mark.parametrize("how", ["mean", "max", "last"])
def test_pooling_respects_lengths(how):
    x = torch.randn(3, 6, 4)
    valid = torch.arange(6) < torch.tensor([[6], [3], [1]])
    expected = {"mean": lambda r: r.mean(0), "max": lambda r: r.max(0).values, "last": lambda r: r[-1]}[how]
    found = pool(x, Context(valid, padded=True), how)
    for row, length in enumerate((6, 3, 1)):
        torch.testing.assert_close(found[row], expected(x[row, :length]))


def test_steps_are_answered_from_the_last_one_and_their_place_alone(tmp_path):
    """What another step's vector holds changes no answer but through the last, and that changes them all."""
    task = {"name": "mad", "task": "compression", "length": 12, "train_size": 40, "eval_size": 20}
    head = {"pool": "last", "mlp": True}
    model = build_stage(Job(loaded(tmp_path, task=task, finetune__head=head), "finetune", 0)).model.eval()
    x, valid = torch.randn(2, 12, model.head.inner.in_features), torch.ones(2, 12, dtype=torch.bool)
    valid[1, 7:] = False
    context = Context(valid, padded=True)
    model.backbone.forward = lambda y, context: x
    answers = model(Inputs(torch.zeros(2, 12, dtype=torch.long), None, context))
    own = model.head(x[0, 11] + sinusoids(12, x.shape[2]), context)
    torch.testing.assert_close(answers[0], own)
    torch.testing.assert_close(answers[1, 3], model.head((x[1, 6] + sinusoids(12, x.shape[2])[3])[None], context)[0])
    picked = model(Inputs(torch.zeros(2, 12, dtype=torch.long), None, context), torch.tensor([5, 15]))
    torch.testing.assert_close(picked, answers.flatten(0, 1)[[5, 15]])
    x[0, 4] += 1.0
    again = model(Inputs(torch.zeros(2, 12, dtype=torch.long), None, context))
    assert torch.equal(again, answers)
    x[0, 11] += 1.0
    assert (model(Inputs(torch.zeros(2, 12, dtype=torch.long), None, context))[0] != answers[0]).any(-1).all()


@pytest.mark.parametrize("kind", ["tokens", "values", "bytes"])
@pytest.mark.parametrize("target", ["class", "reals"])
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kind_of_task_goes_through_both_stages(tmp_path, kind, target, causal):
    one = own_task(
        tmp_path,
        task__kind=kind,
        task__target=target,
        model__causal=causal,
        finetune__head={"pool": "last" if causal else "max", "mlp": True},
        **({"pretrain__objective__loss": "cross_entropy"} if kind == "bytes" else {}),
    )
    result = run(spt_job(one), tmp_path / "runs")
    assert result.metric == ("accuracy" if target == "class" else "mse")
    assert all(np.isfinite(value) for value in result.test.values())
    table = pq.read_table(tmp_path / "runs" / spt_job(one).name / "predictions.parquet")
    assert len(table) == 19 and ("prediction_1" in table.column_names) == (target == "reals")


def test_bfloat16_runs(tmp_path):
    one = loaded(tmp_path, pretrain__train__precision="bf16", finetune__train__precision="bf16")
    result = run(spt_job(one), tmp_path / "runs")
    assert np.isfinite(result.test["loss"])


def test_two_processes_never_share_a_run(tmp_path):
    job = Job(loaded(tmp_path), "pretrain", 0)
    with RunFolder(tmp_path / "runs", job.name).locked(), pytest.raises(OutputError, match="another process"):
        run(job, tmp_path / "runs")


def test_a_killed_process_resumes_exactly(tmp_path):
    """A real process, a real SIGKILL in the middle of training, another process that goes on."""
    recipe = recipe_file(tmp_path, pretrain__train__steps=60, pretrain__train__evaluate_every=10)
    command = [sys.executable, "-m", "spt_cli", "pretrain", str(recipe), "--json"]
    done = subprocess.run(
        [*command, "--out", "whole"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    whole = json.loads(done.stdout)
    saving = [*command, "--out", "parts", "--save-every", "0"]
    process = subprocess.Popen(saving, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "parts" / Path(whole["run"]).name / "checkpoints"
    deadline = time.monotonic() + 300
    while not list(checkpoints.glob("step-0000002*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert list(checkpoints.glob("step-*"))
    done = subprocess.run(
        [*command, "--out", "parts", "--resume", "must"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    for name in SCORES:
        assert whole[name] == parts[name]
    same_weights(tmp_path / whole["run"] / "checkpoints/best", tmp_path / parts["run"] / "checkpoints/best")


@pytest.mark.parametrize(
    "at", ["spt.training.stage.publish", "spt.runs.folder.RunFolder.finish", "spt.training.stage.clean"]
)
def test_dying_at_the_very_end_loses_nothing(tmp_path, monkeypatch, at):
    """Around the moment the result is written: the next start gives the same result and a usable checkpoint."""
    job = Job(loaded(tmp_path), "finetune", 0)
    whole = run(job, tmp_path / "whole")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(at, die)
        run(job, tmp_path / "runs", save_every=0.0)
    same_result(whole, run(job, tmp_path / "runs"))
    same_weights(tmp_path / "whole" / job.name / "checkpoints/best", tmp_path / "runs" / job.name / "checkpoints/best")


@pytest.mark.gpu
def test_a_gpu_computes_what_the_cpu_does(tmp_path):
    one = loaded(tmp_path)
    job = Job(one, "pretrain", 0)
    from spt.runtime.settings import Settings
    from spt.training.stage import run_stage

    on_gpu = run_stage(job, tmp_path / "gpu", Runtime(Settings(quiet=True)))
    assert on_gpu.environment["device"] != "cpu"
    assert on_gpu.val["loss"] == pytest.approx(run(job, tmp_path / "cpu").val["loss"], rel=1e-2)


def test_test_is_scored_with_the_selected_weights(tmp_path):
    """Unstable training: the best step is not the last, and result, predictions and checkpoint belong together."""
    options = {
        "finetune__train__learning_rate": 1.0,
        "finetune__train__evaluate_every": 1,
        "finetune__train__steps": 12,
    }
    job = Job(own_task(tmp_path, **options), "finetune", 0)
    result = run(job, tmp_path / "runs")
    assert result.best_step < 12
    from spt.runtime.settings import Settings
    from spt.training.checkpoint import load_weights
    from spt.training.evaluate import evaluate

    setup = build_stage(job)
    load_weights(tmp_path / "runs" / job.name / "checkpoints/best", setup.model)
    runtime = Runtime(Settings(cpu=True))
    draw = Draw(0, "evaluation", 0)
    again, found = evaluate(setup.model, setup, setup.data.test, runtime, draw, at_once=3, predict=True)
    assert again == result.test
    table = pq.read_table(tmp_path / "runs" / job.name / "predictions.parquet").to_pydict()
    assert table["prediction"] == found.values.tolist()
    assert evaluate(setup.model, setup, setup.data.val, runtime, draw, at_once=3)[0] == result.val


def test_the_loop_is_plain_adamw(tmp_path, monkeypatch):
    """Five steps written out with torch alone: batches, masks, loss, clipping, betas, decay, warm-up, cosine."""
    norms = []
    clip = Runtime.clip

    def recorded(*arguments):
        norms.append(float(clip(*arguments)))
        return norms[-1]

    monkeypatch.setattr(Runtime, "clip", recorded)
    train = {"steps": 5, "batch_size": 9, "learning_rate": 0.03, "schedule": "cosine", "warmup_steps": 2,
             "weight_decay": 0.2, "betas": [0.8, 0.9], "max_grad_norm": 0.3, "evaluate_every": 5}  # fmt: skip
    job = Job(own_task(tmp_path, pretrain__train={**train}), "pretrain", 3)
    run(job, tmp_path / "runs", micro_batch_size=4)

    setup = build_stage(job)
    matrices = [p for n, p in setup.model.named_parameters() if p.ndim >= 2 and "encoder" not in n]
    others = [p for n, p in setup.model.named_parameters() if p.ndim < 2 or "encoder" in n]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.9), fused=False)
    rates = [0.5, 1.0, 1.0, 0.75, 0.25]  # two steps of warm-up, then half a cosine over three
    for rate, (epoch, rows) in zip(rates, training_rows(40, 9, 3, 0), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * rate
        inputs, _ = setup.objective.make_inputs(
            collate(setup.data.train, rows, setup.data.input, setup.data.target), Draw(3, "corruption", epoch)
        )
        tokens = collate(setup.data.train, rows, setup.data.input, setup.data.target).x
        loss = torch.nn.functional.cross_entropy(setup.model(inputs)[inputs.hidden], tokens[inputs.hidden])
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 0.3))
        assert norm > 0.3  # clipping does something here
        assert norms.pop(0) == pytest.approx(norm, rel=1e-3)  # Adam would hide a gradient of another scale
        optimizer.step()
    found = weights(tmp_path / "runs" / job.name / "checkpoints/best")
    for name, tensor in setup.model.state_dict().items():
        np.testing.assert_allclose(found[name], tensor.numpy(), atol=2e-4, err_msg=name)


def test_masks_are_drawn_anew_each_epoch_and_fixed_in_validation(tmp_path, monkeypatch):
    from spt.training.objectives import Masked

    seen = []
    real = Masked.make_inputs

    def make_inputs(self, batch, draw):
        inputs, targets = real(self, batch, draw)
        order = np.argsort(batch.rows.numpy())
        seen.append((draw.use, draw.epoch, inputs.hidden.numpy()[order]))
        return inputs, targets

    monkeypatch.setattr(Masked, "make_inputs", make_inputs)
    run(Job(loaded(tmp_path, pretrain__train__batch_size=24), "pretrain", 0), tmp_path / "runs")
    training = [hidden for use, _, hidden in seen if use == "corruption"]
    assert [epoch for use, epoch, _ in seen if use == "corruption"] == list(range(6))
    assert not np.array_equal(training[0], training[1])
    validation = [hidden for use, _, hidden in seen if use == "evaluation"]
    assert len(validation) == 3  # two evaluations, and a look beforehand whether anything is scored
    assert np.array_equal(validation[0], validation[1]) and np.array_equal(validation[1], validation[2])


def test_precision_reaches_the_matrix_products(tmp_path, monkeypatch):
    """bf16 in training and evaluation: products in bfloat16, the residual stream and the answers in float32."""
    from spt.models.feedforward import FeedForward

    seen = []
    real = FeedForward.forward

    def forward(self, x, context):
        seen.append((x.dtype, self.up(x).dtype, torch.is_grad_enabled()))
        return real(self, x, context)

    monkeypatch.setattr(FeedForward, "forward", forward)
    one = own_task(tmp_path, task__kind="values", finetune__train__precision="bf16")
    run(Job(one, "finetune", 0), tmp_path / "runs")
    assert {entry[:2] for entry in seen} == {(torch.float32, torch.bfloat16)}
    assert {entry[2] for entry in seen} == {True, False}


def test_dropout_follows_the_seed(tmp_path):
    torch.manual_seed(1)
    one = loaded(tmp_path, model__dropout=0.5)
    first = run(Job(one, "pretrain", 0), tmp_path / "a")
    torch.manual_seed(2)
    assert run(Job(one, "pretrain", 0), tmp_path / "b").val == first.val


def test_launchers_settings_do_not_change_the_training(tmp_path, monkeypatch):
    job = Job(loaded(tmp_path), "pretrain", 0)
    first = run(job, tmp_path / "a")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert run(job, tmp_path / "b").val == first.val


def test_a_gradient_that_is_not_finite_stops_without_clipping(tmp_path, monkeypatch):
    """The loss is fine, the gradient is not: no update is made with it, and no checkpoint holds it."""
    import spt.training.step

    real = spt.training.step.weighted_sum

    def poisoned(output, logits, targets):
        return real(output, logits, targets) + (logits.sum() * 0.0).abs().sqrt()  # d sqrt(0) = inf, times 0 = nan

    monkeypatch.setattr("spt.training.step.weighted_sum", poisoned)
    job = Job(loaded(tmp_path, pretrain__train__max_grad_norm=None), "pretrain", 0)
    with pytest.raises(DivergedError, match="not finite at step 1"):
        run(job, tmp_path / "runs", save_every=0.0)
    assert not list((tmp_path / "runs" / job.name / "checkpoints").glob("*"))


def test_complex_parameters_train(tmp_path):
    (tmp_path / "spin.py").write_text(
        "import torch\nfrom torch import nn\nfrom spt.models.base import Backbone, BackboneConfig, Mixer\n"
        "class Config(BackboneConfig):\n    pass\n"
        "class Spin(Mixer):\n    def __init__(self, d):\n        super().__init__()\n"
        "        self.turn = nn.Parameter(torch.randn(d, dtype=torch.complex64))\n"
        "    def forward(self, x, context):\n        return (x * self.turn).real\n"
        "    def flops(self, length):\n        return 2.0 * length * len(self.turn)\n"
        "def build(config):\n    return Backbone(config, lambda: [Spin(config.d_model)])\n"
    )
    one = loaded(tmp_path, model={"name": "./spin.py", "d_model": 16})
    assert np.isfinite(run(spt_job(one), tmp_path / "runs").test["loss"])


def test_selecting_by_loss_compares_accuracy(tmp_path):
    one = loaded(tmp_path, finetune__train__select_by="loss")
    result = run(Job(one, "finetune", 0), tmp_path / "runs")
    assert (result.metric, result.selected_by, result.higher_is_better) == ("accuracy", "loss", True)
    regression = own_task(tmp_path, task__target="reals", finetune__train__select_by="r2")
    result = run(Job(regression, "finetune", 0), tmp_path / "runs")
    assert (result.metric, result.selected_by, result.chance) == ("mse", "r2", None)


def test_chance_is_that_of_the_commonest_training_class(tmp_path):
    """Class 1 is the commonest in training, class 0 in test."""
    one = own_task(tmp_path)
    text = TASK.replace("row.sum() > 4.5 * len(row)", "(i % 4 == 0) == (n != 40)")
    (tmp_path / "toy.py").write_text(text.replace("for row in rows], np.int64", "for i in range(n)], np.int64"))
    from tiny import load

    one = load(str(tmp_path / "tiny.yaml"))
    data = build_stage(Job(one, "finetune", 0)).data
    assert data.train.targets.mean() > 0.5 > data.test.targets.mean() > 0
    result = run(Job(one, "finetune", 0), tmp_path / "runs")
    assert result.chance == pytest.approx(data.test.targets.mean())


def test_what_is_logged_beyond_the_resumed_step_is_forgotten(tmp_path):
    run_ = RunFolder(tmp_path, "pretrain-x")
    run_.path.mkdir()
    for step in range(1, 6):
        run_.log("val", step, loss=1.0)
    with (run_.path / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n{"step": "x"}\n\xff\n{"kind": "va')  # what a crash or a damaged disk may leave
    run_.forget_metrics_after(3)
    assert [row["step"] for row in run_.metrics()] == [1, 2, 3]


def test_encoder_and_head_are_what_the_recipe_says(tmp_path):
    options = {"encoder": {"init_std": 0.01}, "finetune__head": {"mlp": True}, "model__d_model": 64}
    model = build_stage(Job(loaded(tmp_path, **options), "finetune", 0)).model
    assert model.encoder.map.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert model.encoder.hidden.std().item() == pytest.approx(0.01, rel=0.4)
    assert [layer.out_features for layer in (model.head.inner, model.head.out)] == [64, 10]
    assert build_stage(Job(loaded(tmp_path), "finetune", 0)).model.head.inner is None


def test_the_hidden_vector_of_values_starts_as_the_published_mask_flag():
    """As one column of a linear map from C + 1 inputs and its bias together; a given spread scales the same draws."""
    context = Context(torch.ones(1, 3, dtype=torch.bool), padded=False)
    for channels, told in ((1, 0.577), (3, 0.408)):
        input = Values(channels, (0.0,) * channels, (1.0,) * channels)
        flag = torch.nn.Linear(channels + 1, 20_000)
        with seeded(0, "encoder"):
            encoder = Encoder(input, 20_000, EncoderConfig())
        with seeded(0, "encoder"):
            other = Encoder(input, 20_000, EncoderConfig(hidden_std=0.3))
        assert encoder.hidden.std().item() == pytest.approx(told, rel=0.02)
        assert (flag.weight[:, -1] + flag.bias).std().item() == pytest.approx(told, rel=0.02)
        torch.testing.assert_close(other.hidden, encoder.hidden * 0.3 / encoder.hidden.std(), rtol=0.02, atol=0.0)
        assert torch.equal(other.map.weight, encoder.map.weight)
        y = encoder(torch.zeros(1, 3, channels), torch.tensor([[False, True, False]]), context)
        assert torch.equal(y[0, 1], encoder.hidden)


@pytest.mark.parametrize(("vocab", "told"), [(20, 0.224), (135, 0.086)])
def test_tokens_as_one_hot_vectors_start_as_in_flax(vocab, told):
    torch.manual_seed(0)
    encoder = Encoder(Tokens(vocab), 4096, EncoderConfig(init="flax"))
    weight = encoder.map.weight.detach()
    assert weight.shape == (vocab, 4096) and weight.std().item() == pytest.approx(told, rel=0.02)
    assert weight.abs().max() < 2.3 * told and not encoder.map.bias.any()  # truncated at two deviations
    assert encoder.hidden.std().item() == pytest.approx(told, rel=0.05)
    with torch.no_grad():
        encoder.map.bias.fill_(0.5)
    y = encoder(torch.tensor([[1, 0]]), None, Context(torch.ones(1, 2, dtype=torch.bool), padded=False))
    torch.testing.assert_close(y[0], weight[[1, 0]] + 0.5)
    assert encoder.flops(9).total == 0


@pytest.mark.parametrize("init", ["torch", "flax"])
def test_times_may_be_an_input_of_the_encoder(init):
    """One more column of the last map: the time since the previous step, at hidden steps too."""
    input = Values(576, (0.0,) * 576, (1.0,) * 576, frame=(24, 24))
    config = EncoderConfig(frame_encoder="cnn", step_times="append", init=init)
    with seeded(0, "encoder"):
        encoder = Encoder(input, 4000, config)
    with seeded(0, "encoder"):
        plain = Encoder(input, 4000, config.model_copy(update={"step_times": "model"}))
    assert encoder.times.weight.std().item() == pytest.approx((31 * (3 if init == "torch" else 1)) ** -0.5, rel=0.05)
    valid, steps = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[1.0, 4.0, 2.0], [1.0, 1.0, 7.0]])
    context = Context(valid, padded=False, steps=steps)
    x, hidden = torch.rand(2, 3, 576), torch.tensor([[False, True, False], [False, False, False]])
    added = encoder(x, hidden, context) - plain(x, hidden, context)
    expected = steps[..., None] * encoder.times.weight[:, 0]
    torch.testing.assert_close(added, expected, atol=1e-5, rtol=1e-5)
    assert encoder.for_backbone(context).steps is None and plain.for_backbone(context) is context
    assert encoder.flops(3).forward - plain.flops(3).forward == 2 * 3 * 4000


def test_times_for_the_encoder_need_a_task_that_has_them(tmp_path):
    with pytest.raises(UsageError, match=r"encoder\.step_times: append is for tasks with times"):
        build_stage(Job(loaded(tmp_path, encoder={"step_times": "append"}), "finetune", 0))


def test_maps_start_as_in_flax_where_a_recipe_says_so(tmp_path):
    model = build_stage(
        Job(
            own_task(
                tmp_path,
                task__kind="values",
                encoder={"init": "flax"},
                finetune__head={"init": "flax"},
                model__d_model=256,
            ),
            "finetune",
            0,
        )
    ).model
    channels = model.encoder.map.in_features
    assert model.encoder.map.weight.std().item() == pytest.approx(channels**-0.5, rel=0.15)
    assert not model.encoder.map.bias.any() and not model.head.out.bias.any()
    assert model.head.out.weight.std().item() == pytest.approx(1 / 16, rel=0.15)
    assert model.encoder.hidden.std().item() == pytest.approx((channels + 1) ** -0.5, rel=0.15)


def test_a_head_may_have_another_activation(tmp_path):
    def head(**options):
        torch.manual_seed(0)
        return Head(4, Output("l2", False, 1), HeadConfig(mlp=True, **options))

    context = Context(torch.ones(2, 3, dtype=torch.bool), padded=False)
    x = torch.randn(2, 3, 4)
    inner = head().inner(x.mean(1))
    for name, bent in (
        (None, inner.relu()),
        ("tanh", inner.tanh()),
        ("gelu", torch.nn.functional.gelu(inner)),
        ("gelu_tanh", torch.nn.functional.gelu(inner, approximate="tanh")),
    ):
        one = head(mlp_activation=name)
        torch.testing.assert_close(one(x, context), one.out(bent))
    assert not torch.equal(head(mlp_activation="gelu")(x, context), head(mlp_activation="gelu_tanh")(x, context))
    with pytest.raises(RecipeError, match="mlp_activation has no effect on one linear map; add mlp: true"):
        loaded(tmp_path, finetune__head={"mlp_activation": "tanh"})


def test_a_spread_of_tokens_is_refused_where_there_are_none(tmp_path):
    one = own_task(tmp_path, task__kind="values", encoder={"init_std": 0.3})
    with pytest.raises(UsageError, match=r"encoder\.init_std .* this task has values; .*encoder\.hidden_std"):
        build_stage(Job(one, "finetune", 0))
    with pytest.raises(RecipeError, match="init_std has no effect under init: flax"):
        loaded(tmp_path, encoder={"init": "flax", "init_std": 0.3})
    with pytest.raises(RecipeError, match="frame_features has no effect on one linear map; add frame_encoder: cnn"):
        loaded(tmp_path, encoder={"frame_features": 50})


def test_a_fraction_keeps_the_network(tmp_path):
    """The longest row may lie outside the subset: lengths, shapes and first weights stay those of the whole task."""
    whole, part = (
        build_stage(
            Job(
                own_task(
                    tmp_path, task__subset_fraction=f, model__positions=["learned"], pretrain__train__batch_size=2
                ),
                "pretrain",
                0,
            )
        )
        for f in (1.0, 0.05)
    )
    assert len(part.data.train) == 2 and part.data.train.lengths.max() < whole.data.length == part.data.length
    for (name, a), b in zip(whole.model.state_dict().items(), part.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_other_data_are_another_run(tmp_path, monkeypatch):
    """A task that reads files: another folder, or an edited file, is read again and computed again."""
    (tmp_path / "reader.py").write_text(
        "import numpy as np\nfrom spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens\n"
        "class Config(TaskConfig):\n    pass\n"
        "def sources(config, raw):\n    return [raw / 'rows.npy']\n"
        "def load(config, raw):\n    rows = np.load(raw / 'rows.npy')\n"
        "    part = lambda a, b: Split.from_rows(rows[a:b], rows[a:b, 0] % 2)\n"
        "    return TaskData(Tokens(9), Classes(2), part(0, 20), part(20, 30), part(30, 40))\n"
    )
    path, keys = recipe_file(tmp_path, task={"name": "./reader.py"}), []
    from tiny import load

    for folder, seed in (("a", 0), ("b", 1), ("a", 2), ("a", 0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        np.save(tmp_path / folder / "rows.npy", np.random.default_rng(seed).integers(0, 9, (40, 5)))
        monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path / folder))
        keys.append(Job(load(str(path)), "pretrain", 0).key)
    assert len(set(keys[:3])) == 3 and keys[3] == keys[0]  # the same rows again are the same run


@pytest.mark.parametrize("again", [False, True])
def test_a_run_is_done_only_once_it_is_tidied(again, tmp_path, monkeypatch):
    """Killed in between, at its end or at a later look, it leaves a run that the next to come tidies."""
    job, states = Job(loaded(tmp_path), "pretrain", 0), []
    folder = tmp_path / "runs" / job.name
    if again:
        run(job, tmp_path / "runs")
        (folder / "status.json").unlink()
    status = RunFolder(tmp_path / "runs", job.name).status
    monkeypatch.setattr(stage, "clean", lambda one: states.append((status() or {}).get("state")))
    run(job, tmp_path / "runs")
    assert len(states) == 1 and states[0] != "done" and status()["state"] == "done"
    assert (folder / "result.json").exists()


def test_a_finished_run_whose_status_was_lost_is_put_right(tmp_path, monkeypatch):
    job = Job(loaded(tmp_path), "finetune", 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("spt.training.stage.clean", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        run(job, tmp_path / "runs")
    assert RunFolder(tmp_path / "runs", job.name).status()["state"] == "stopped"
    run(job, tmp_path / "runs")
    assert RunFolder(tmp_path / "runs", job.name).status()["state"] == "done"
    assert [path.name for path in (tmp_path / "runs" / job.name / "checkpoints").iterdir()] == ["best"]


def test_only_needed_checkpoints_are_kept(tmp_path):
    options = {"pretrain__train__steps": 30, "pretrain__train__evaluate_every": 1}
    job = Job(loaded(tmp_path, **options), "pretrain", 0)
    with stopping_after(25), pytest.raises(Stopped):
        run(job, tmp_path / "runs")
    names = {path.name.partition("-")[0] for path in (tmp_path / "runs" / job.name / "checkpoints").iterdir()}
    assert names == {"step", "best"}
    assert len(list((tmp_path / "runs" / job.name / "checkpoints").glob("best-*"))) == 1


def test_states_are_in_the_order_of_their_steps(tmp_path):
    steps = [99_999_500, 100_000_500, 99_999_999]
    for step in steps:
        (tmp_path / f"step-{step:08d}").mkdir()
    assert [path.name for path in checkpoint._steps(tmp_path, "step")] == [f"step-{step:08d}" for step in sorted(steps)]


@pytest.mark.parametrize("masks", ["redrawn", "fixed"])
def test_a_validation_that_hides_nothing_by_chance_is_drawn_as_at_first(masks, tmp_path, monkeypatch):
    """That draw was seen to hide something; without it a long pretraining would end in an error by bad luck."""
    one = own_task(tmp_path, pretrain__train__validation_masks=masks)
    job, real, asked = Job(one, "pretrain", 0), loop.evaluate, []

    def evaluated(prepared, setup, split, runtime, draw, **options):
        asked.append(draw)
        if len(asked) == 1:
            raise NothingScored("no position of this split is scored")
        return real(prepared, setup, split, runtime, draw, **options)

    monkeypatch.setattr(loop, "evaluate", evaluated)
    if masks == "fixed":
        with pytest.raises(NothingScored):
            run(job, tmp_path)
        return
    run(job, tmp_path)
    train = one.recipe.pretrain.train
    assert asked == [evaluation_draw(train, 0, step) for step in (3, 0, 6)]


def test_signals_are_noted_and_a_second_ctrl_c_acts_at_once():
    from spt.runtime.signals import StopSignals

    with pytest.raises(Stopped) as caught, StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signals.check()
    assert type(caught.value) is Stopped and caught.value.exit_code == 75  # the first one says why
    with pytest.raises(KeyboardInterrupt), StopSignals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Interrupted) as caught, StopSignals(alone=False) as signals:
        signal.raise_signal(signal.SIGINT)  # a launcher passes on what the terminal has sent already
        signal.raise_signal(signal.SIGINT)
        signals.wait(60.0)
    assert caught.value.exit_code == 130
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        assert signal.signal(number, handler) is signal.SIG_IGN  # this process is ending already


def test_a_signal_after_the_last_step_is_not_lost():
    from spt.runtime.signals import StopSignals

    with pytest.raises(KeyboardInterrupt), StopSignals():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignals():
        signal.raise_signal(signal.SIGINT)
        raise DivergedError("the loss is not finite")  # the next run would begin


def test_a_validation_loss_that_is_not_finite_is_divergence(tmp_path, monkeypatch):
    monkeypatch.setattr("spt.training.loop.evaluate", lambda *_, **__: ({"loss": float("nan"), "accuracy": 0.0}, None))
    with pytest.raises(DivergedError, match="the validation loss is not finite at step 3"):
        run(Job(loaded(tmp_path), "pretrain", 0), tmp_path / "runs")


def test_dropout_follows_from_seed_step_and_process(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("spt.training.step.seed_step", lambda seed, device: asked.append(seed))
    job = Job(loaded(tmp_path, pretrain__train__steps=3), "pretrain", 0)
    run(job, tmp_path / "runs")

    steps = [stream(0, "dropout", step, 0) & (2**63 - 1) for step in range(3)]
    assert [seed for seed in asked if seed in steps] == steps
    assert stream(0, "dropout", 1, 0) != stream(0, "dropout", 1, 1)


def test_a_copy_of_a_checkpoint_is_left_alone(tmp_path):
    job = Job(loaded(tmp_path, pretrain__train__steps=8), "pretrain", 0)
    whole = run(job, tmp_path / "whole")
    with stopping_after(5), pytest.raises(Stopped):
        run(job, tmp_path / "runs")
    folder = tmp_path / "runs" / job.name / "checkpoints"
    for path in list(folder.iterdir()):
        shutil.copytree(path, path.with_name(f"{path.name}.bak"))
    same_result(whole, run(job, tmp_path / "runs"))
    assert list(folder.glob("*.bak"))


@pytest.mark.parametrize("change", [{"step": 2}, {"best": {"loss": 0.1, "accuracy": 23809.5}}])
def test_a_position_of_another_step_or_with_impossible_scores_is_damage(change, tmp_path, messages):
    job = Job(loaded(tmp_path, pretrain__train__steps=8), "pretrain", 0)
    whole = run(job, tmp_path / "whole")
    with stopping_after(5), pytest.raises(Stopped):
        run(job, tmp_path / "runs")
    (step,) = (tmp_path / "runs" / job.name / "checkpoints").glob("step-*")
    position = json.loads((step / "position.json").read_text())
    (step / "position.json").write_text(json.dumps(position | change))
    reseal(step)
    same_result(whole, run(job, tmp_path / "runs"))
    assert any("position.json is damaged" in text for text in messages)


@pytest.mark.parametrize("content", ["a word", {"state": 3, "param_groups": None}, [1, 2]])
def test_a_state_that_is_something_else_is_refused(content, tmp_path):
    """Readable, and its checksum is right."""
    job = Job(loaded(tmp_path, pretrain__train__steps=8), "pretrain", 0)
    with stopping_after(5), pytest.raises(Stopped):
        run(job, tmp_path / "runs")
    (step,) = (tmp_path / "runs" / job.name / "checkpoints").glob("step-*")
    torch.save(content, step / "optimizer.bin")
    reseal(step)
    with pytest.raises(CheckpointError, match=r"cannot be loaded .*; --resume never starts over"):
        run(job, tmp_path / "runs")


def test_torch_says_in_several_ways_that_the_disk_is_full(tmp_path):
    for text in ("[enforce fail at inline_container.cc:815] .", "basic_ios::clear: iostream error"):
        with pytest.raises(OutputError, match="cannot write"), checkpoint._disk(tmp_path / "best"):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="something else"), checkpoint._disk(tmp_path / "best"):
        raise RuntimeError("something else")


def test_a_validation_split_that_nothing_is_scored_on_is_refused_at_once(tmp_path):
    """Sequences of one step have no next one."""
    lengths = "lengths = rng.integers(3, 13, n)"
    text = TASK.replace(lengths, f"{lengths} if n == 40 else np.ones(n, int)")
    own_task(tmp_path, pretrain__objective={"name": "next"}, model__causal=True)
    (tmp_path / "toy.py").write_text(text)
    from tiny import load

    with pytest.raises(DataError, match="no step of the validation split is scored"):
        build_stage(Job(load(str(tmp_path / "tiny.yaml")), "pretrain", 0))
