"""Each control changes one thing only: weights are frozen, parts loaded, steps shuffled, or a loss added."""

import json
import signal

import numpy as np
import pytest
import torch
from tiny import TASK, load, loaded, own_task, recipe_file, run, spt_job, weights

from spt.config.job import Job
from spt.data.batching import NOBODY, collate, shuffled
from spt.errors import CheckpointError, RecipeError, Stopped, UsageError
from spt.rng import Draw
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.arms import with_task_of
from spt.tasks.base import Classes, Reals, Split, Tokens, Values
from spt.training.build import build_stage
from spt.training.losses import weighted_sum
from spt.training.network import SequenceModel
from spt.training.optimizer import adamw
from spt.training.stage import open_weights
from spt.training.step import Learner
from spt.training.transfer import selected_tensors

BATCH = {"model__norm": "batch", "model__dropout": 0.3}


def best(root, job):
    return weights(root / job.name / "checkpoints/best")


def learner(setup):
    runtime = Runtime(Settings(quiet=True, cpu=True))
    setup.model.hides_steps(setup.hides)
    return Learner(setup, setup.model, adamw(setup.model, setup.train, runtime.device), runtime)


# ----------------------------------------------------------------------------------------------------------- settings


def test_runs_from_before_there_were_controls_keep_their_keys(tmp_path):
    job = spt_job(loaded(tmp_path))
    assert not {"freeze", "load", "joint", "shuffle_steps"} & (job.settings().keys() | job.parent.settings().keys())
    keys = {job.key}
    for changes in ({"freeze": True}, {"load": ["encoder"]}, {"joint": 0.5}, {"joint": 1.0}):
        changed = spt_job(loaded(tmp_path, finetune=json.loads(json.dumps({**FINETUNE, **changes}))))
        assert changed.parent.key == job.parent.key  # one pretraining for all of them
        keys.add(changed.key)
    shuffled_steps = spt_job(loaded(tmp_path, pretrain__shuffle_steps=True))
    assert shuffled_steps.parent.key != job.parent.key
    assert len(keys | {shuffled_steps.key}) == 6


FINETUNE = {"train": {"steps": 6, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 3}}


def test_what_has_no_effect_is_no_part_of_a_key(tmp_path):
    plain, parts = loaded(tmp_path), loaded(tmp_path, finetune__load=["encoder"])
    assert Job(plain, "finetune", 0).key == Job(parts, "finetune", 0).key  # nothing is loaded from scratch
    parts = ["encoder", "backbone.norms"]
    several = [loaded(tmp_path, finetune__load=names) for names in (parts, parts[::-1])]
    assert spt_job(several[0]).key == spt_job(several[1]).key
    assert loaded(tmp_path, finetune__load="encoder").recipe.finetune.load == ("encoder",)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"finetune__load": ["head"]}, "head is no part of encoder or backbone"),
        ({"finetune__load": []}, "names no part"),
        ({"finetune__load": ["encoder", "encoder"]}, "twice"),
        ({"finetune__joint": -1.0}, "greater than or equal to 0"),
        ({"finetune__joint": 1.0, "finetune__freeze": True}, "contradict"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changes, complaint):
    with pytest.raises(RecipeError, match=complaint):
        loaded(tmp_path, **changes)


# ------------------------------------------------------------------------------------------------------------- frozen


def test_a_frozen_network_stays_as_it_was_bit_for_bit(tmp_path):
    """Batch norms' statistics too."""
    job = spt_job(own_task(tmp_path, finetune__freeze=True, **BATCH))
    result = run(job, tmp_path / "runs")
    before, after = best(tmp_path / "runs", job.parent), best(tmp_path / "runs", job)
    kept = [name for name in after if not name.startswith("head.")]
    assert any("running_mean" in name for name in kept) and len(kept) > 10
    assert all(np.array_equal(before[name], after[name]) for name in kept)
    start = build_stage(job).model.state_dict()
    assert not np.array_equal(after["head.out.weight"], start["head.out.weight"].numpy())
    assert "only the head was trained (finetune.freeze)" in result.notes


def test_a_frozen_network_is_a_linear_probe_of_its_features(tmp_path):
    """The same steps, made by hand on features that an evaluation sees: no dropout, the statistics of training."""
    job = spt_job(own_task(tmp_path, finetune__freeze=True, **BATCH))
    setup = build_stage(job)
    learn = learner(setup)
    model, data = setup.model, setup.data
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.out.weight", "head.out.bias"]
    assert {p for group in learn.optimizer.param_groups for p in group["params"]} == set(model.head.parameters())
    model.train()
    (micro_batch,) = learn._make_inputs(np.arange(8), 0)
    logits = model(micro_batch.inputs)
    model.eval()
    with torch.no_grad():
        batch = collate(data.train, np.arange(8), data.input, data.target)
        inputs, _ = setup.objective.make_inputs(batch, Draw(0, "x", 0))
        features = model.backbone(model.encoder(inputs.x, None, inputs.context), inputs.context)
        expected = model.head(features, inputs.context)
    assert torch.equal(logits, expected)
    assert logits.grad_fn is not None and not features.requires_grad


def test_random_features_can_be_frozen_too(tmp_path):
    job = Job(loaded(tmp_path, finetune__freeze=True), "finetune", 0)
    run(job, tmp_path / "runs")
    start, after = build_stage(job).model.state_dict(), best(tmp_path / "runs", job)
    assert all(np.array_equal(start[name].numpy(), after[name]) for name in after if not name.startswith("head."))


# -------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "parts", [["encoder"], ["backbone.mixers.0", "backbone.last_norm"], ["backbone.norms.0.weight"]]
)
def test_only_the_parts_that_are_named_are_taken_over(tmp_path, parts, monkeypatch, messages):
    starts = {}
    real = Learner.step

    def step(self, prefetcher, step, size):
        if step == 0:
            starts[self.setup.job.key] = {n: t.clone() for n, t in self.setup.model.state_dict().items()}
        return real(self, prefetcher, step, size)

    monkeypatch.setattr(Learner, "step", step)
    one = loaded(tmp_path, finetune__load=parts)
    job, scratch = spt_job(one), Job(one, "finetune", 0)
    result = run(job, tmp_path / "runs")
    run(scratch, tmp_path / "runs")
    pretrained = best(tmp_path / "runs", job.parent)
    moved = {name for name in pretrained if any(f"{name}.".startswith(f"{part}.") for part in parts)}
    assert moved
    for name, tensor in starts[job.key].items():
        if name in moved:
            assert np.array_equal(tensor.numpy(), pretrained[name])
        else:
            assert torch.equal(tensor, starts[scratch.key][name])
    assert any(not torch.equal(starts[job.key][name], starts[scratch.key][name]) for name in moved)
    assert any(f"only {', '.join(parts)} was taken over" in note for note in result.notes)
    table = next(message for message in messages if "weights from" in message)
    assert "backbone  new" in table and "copied" in table


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    job = spt_job(loaded(tmp_path, finetune__load=["backbone.layers.0"]))
    complaint = r"no part backbone\.layers\.0; its parts are encoder, encoder\.hidden"
    with pytest.raises(UsageError, match=complaint) as caught:
        run(job, tmp_path / "runs")
    assert "backbone.mixers.0" in str(caught.value) and not (tmp_path / "runs").exists()
    assert selected_tensors(build_stage(Job(job.resolved, "finetune", 0)).model, ["encoder"]) >= {"encoder.hidden"}


# ----------------------------------------------------------------------------------------------------------- shuffled


def batch_of(lengths, draw=None, channels=2, rows=None):
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(length, channels)).astype(np.float32) for length in lengths]
    times = [rng.random(length).astype(np.float32) for length in lengths]
    split = Split.from_rows(sequences, np.zeros((len(lengths), 1)), steps=times).unlabelled()
    index = np.arange(len(lengths)) if rows is None else rows
    return collate(split, index, Values(channels), Reals())


def test_steps_change_places_within_each_row_and_padding_stays():
    batch = batch_of([7, 3, 12, 1])
    moved = shuffled(batch, Draw(0, "corruption", 0))
    assert torch.equal(moved.context.valid, batch.context.valid) and torch.equal(
        moved.context.steps, batch.context.steps
    )
    for i, length in enumerate([7, 3, 12, 1]):
        before, after = batch.x[i, :length], moved.x[i, :length]
        assert torch.equal(before[before[:, 0].argsort()], after[after[:, 0].argsort()])  # whole steps: all channels
        assert length < 3 or not torch.equal(before, after)
        assert not moved.x[i, length:].any()


def test_an_order_follows_from_seed_and_row_alone():
    """Not from the epoch, the batch or its padding."""
    draw = Draw(0, "corruption", 0)
    whole = shuffled(batch_of([7, 3, 12, 9]), draw)
    assert torch.equal(shuffled(batch_of([7, 3, 12, 9]), Draw(0, "corruption", 5)).x, whole.x)
    alone = shuffled(batch_of([7, 3, 12, 9], rows=np.array([0, NOBODY])), draw)
    assert torch.equal(alone.x[0], whole.x[0, :7])
    for other in (Draw(1, "corruption", 0), Draw(0, "evaluation", 0)):
        assert not torch.equal(shuffled(batch_of([7, 3, 12, 9]), other).x, whole.x)
    orders = shuffled(batch_of([12] * 50)._replace(x=torch.arange(12.0).repeat(50, 1)), draw).x
    assert len({tuple(row.tolist()) for row in orders}) == 50


def test_levels_move_with_the_values_they_are_of():
    values = np.arange(24, dtype=np.uint8).reshape(1, 12, 2)
    split = Split.from_rows(values, np.zeros(1, np.int64)).unlabelled()
    moved = shuffled(collate(split, np.arange(1), Values(2, levels=24), Classes(2)), Draw(0, "x", 0))
    assert torch.equal(moved.raw.float(), moved.x) and not torch.equal(moved.x[0], torch.arange(24.0).view(12, 2))


def test_shuffled_pretraining_sees_shuffled_rows_and_the_same_masks(tmp_path, monkeypatch):
    from spt.training.objectives import Masked

    seen = {}
    real = Masked.make_inputs

    def make_inputs(self, batch, draw):
        inputs, targets = real(self, batch, draw)
        seen.setdefault(name, {})[draw, tuple(batch.rows.tolist())] = batch, inputs.hidden
        return inputs, targets

    monkeypatch.setattr(Masked, "make_inputs", make_inputs)
    results = {}
    for name, shuffles in (("plain", False), ("shuffled", True)):
        one = own_task(tmp_path, pretrain__shuffle_steps=shuffles)
        results[name] = run(spt_job(one), tmp_path / "runs")
    assert seen["plain"].keys() == seen["shuffled"].keys() and len(seen["plain"]) > 6
    for (draw, rows), (batch, hidden) in seen["plain"].items():
        moved, also_hidden = seen["shuffled"][draw, rows]
        assert torch.equal(hidden, also_hidden)
        assert torch.equal(shuffled(batch, draw).x, moved.x)
    note = "pretrained on inputs whose steps were shuffled (pretrain.shuffle_steps)"
    assert note in results["shuffled"].notes and note not in results["plain"].notes
    assert results["shuffled"].data == results["plain"].data  # rows are known by what they are, not by their order


def test_shuffled_by_an_order_that_changes_nothing_is_spt(tmp_path, monkeypatch):
    plain = spt_job(own_task(tmp_path))
    control = spt_job(own_task(tmp_path, pretrain__shuffle_steps=True))
    monkeypatch.setattr("spt.training.build.shuffled", lambda batch, draw: batch)
    first, second = (run(job, tmp_path / "runs") for job in (plain, control))
    assert first.test == second.test and first.val == second.val
    here, there = best(tmp_path / "runs", plain), best(tmp_path / "runs", control)
    assert all(np.array_equal(here[name], there[name]) for name in here)
    monkeypatch.undo()
    assert run(control, tmp_path / "again").val != second.val


def test_each_sequence_of_a_pair_has_an_order_of_its_own():
    split = Split.from_pairs([(np.arange(9), np.arange(9))] * 2, np.zeros(2, np.int64)).unlabelled()
    x = shuffled(collate(split, np.arange(2), Tokens(9), Classes(2)), Draw(0, "x", 0)).x
    assert len({tuple(row.tolist()) for row in x}) == 4


# -------------------------------------------------------------------------------------------------------------- joint


@pytest.mark.parametrize("model", [{}, {"model": {"name": "s4d", "d_model": 16, "n_layers": 1, "d_state": 8}}])
@pytest.mark.parametrize("micro", [8, 3])
def test_a_joint_gradient_is_the_sum_of_both(tmp_path, model, micro):
    """Of the task's loss, and of what pretraining asks with the masks it would draw, times the weight."""
    one = own_task(tmp_path, finetune__joint=0.7, finetune__head={"pool": "max"}, **model)
    setup = build_stage(Job(one, "finetune", 3))
    learn = learner(setup)
    gradients = {}
    learn.optimizer.step = lambda: gradients.update({n: p.grad.clone() for n, p in setup.model.named_parameters()})
    object.__setattr__(learn.train, "max_grad_norm", None)
    rows = np.arange(8, 16)
    result = learn._step(rows, learn.micro_batches(rows, 2, micro), 0)

    twin = build_stage(Job(one, "finetune", 3)).model
    pretraining = build_stage(Job(one, "pretrain", 3))
    assert torch.equal(twin.denoiser.out.weight, pretraining.model.head.out.weight)  # where pretraining starts
    draw, losses = Draw(3, "corruption", 2), []
    for questioned, output, denoising in ((setup, setup.output, False), (pretraining, pretraining.output, True)):
        batch = collate(questioned.data.train, rows, questioned.data.input, questioned.data.target)
        inputs, targets = questioned.objective.make_inputs(batch, draw)
        answers = twin(inputs, targets.scored, denoising)
        losses.append(weighted_sum(output, answers, targets) / targets.weight.sum())
    total = losses[0] + 0.7 * losses[1]
    total.backward()
    assert result.outcome().loss / result.weight == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert gradients["encoder.hidden"].any() and gradients["denoiser.out.weight"].any()


def test_without_a_weight_there_is_no_joint_loss(tmp_path):
    plain, none = loaded(tmp_path), loaded(tmp_path, finetune__joint=0.0)
    assert Job(plain, "finetune", 0).key == Job(none, "finetune", 0).key
    assert build_stage(Job(none, "finetune", 0)).joint is None


def test_a_joint_loss_of_pairs_asks_of_both_sequences(tmp_path):
    text = TASK.replace(
        "return Split.from_rows(rows, targets)", "return Split.from_pairs(list(zip(rows, rows[::-1])), targets)"
    )
    (tmp_path / "toy.py").write_text(text)
    one = loaded(tmp_path, task={"name": "./toy.py"}, finetune__joint=1.0)
    setup, pretraining = build_stage(Job(one, "finetune", 0)), build_stage(Job(one, "pretrain", 0))
    draw = Draw(0, "corruption", 1)
    inputs, targets = setup.joint.make_inputs(np.array([4, NOBODY]), draw)
    data = pretraining.data
    expected, others = pretraining.objective.make_inputs(
        collate(data.train, np.array([4, NOBODY]), data.input, data.target), draw
    )
    assert torch.equal(inputs.x, expected.x) and torch.equal(inputs.hidden, expected.hidden)
    assert torch.equal(targets.weight, others.weight)
    result = run(Job(one, "finetune", 0), tmp_path / "runs")
    assert result.parent is None and result.parameters["denoiser"] == pretraining.model.parameter_counts()["head"]


def test_a_joint_loss_leaves_the_statistics_of_batch_norms_to_what_is_shown(tmp_path):
    one = own_task(tmp_path, finetune__joint=1.0, model__norm="batch")
    plain = own_task(tmp_path, model__norm="batch")
    found = []
    for recipe in (plain, one):
        setup = build_stage(Job(recipe, "finetune", 0))
        learn = learner(setup)
        learn._step(np.arange(8), learn.micro_batches(np.arange(8), 0, 8), 0)
        found.append({name: b.clone() for name, b in setup.model.named_buffers() if "running" in name})
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_joint_loss_that_the_model_cannot_be_asked_is_refused(tmp_path):
    one = loaded(tmp_path, finetune__joint=1.0, pretrain__objective={"name": "next"})
    with pytest.raises(UsageError, match="looks ahead"):
        build_stage(Job(one, "finetune", 0))


# -------------------------------------------------------------------------------------------------------- other tasks


def other_job(one, other, max_length=None):
    return Job(one, "finetune", 0, Job(with_task_of(one, other, max_length), "pretrain", 0))


def test_pretraining_on_another_tasks_inputs_moves_its_weights_here(tmp_path, messages):
    one, other = own_task(tmp_path), loaded(tmp_path, task={"name": "./toy.py", "shift": 1})
    job, plain = other_job(one, other), spt_job(one)
    assert job.from_other_task and not plain.from_other_task
    assert job.parent.key == Job(other, "pretrain", 0).key != plain.parent.key  # the same run from either recipe
    result = run(job, tmp_path / "runs")
    assert result.parent == job.parent.key and result.data == run(plain, tmp_path / "runs").data
    assert "pretrained on the inputs of toy" in result.notes
    assert not any("other rows of the training split" in message for message in messages)


def test_the_inputs_of_the_same_task_are_spt(tmp_path):
    one = own_task(tmp_path)
    assert other_job(one, own_task(tmp_path)).key == spt_job(one).key


def test_numbers_keep_their_own_scale_but_not_another_number_of_channels(tmp_path):
    """Another mean and spread do not matter, as they would where one task's weights are named by their folder."""
    (tmp_path / "other").mkdir()
    one = own_task(tmp_path, task={"name": "./toy.py", "kind": "values"})
    (tmp_path / "other" / "toy.py").write_text(TASK.replace("Values(2))", "Values(2, (1.0, 1.0), (2.0, 2.0)))"))
    other = load(str(recipe_file(tmp_path / "other", task={"name": "./toy.py", "kind": "values", "shift": 1})))
    assert run(other_job(one, other), tmp_path / "runs").parent
    with pytest.raises(CheckpointError, match="another input"):
        run(Job(one, "finetune", 1, open_weights(tmp_path / "runs" / other_job(one, other).parent.name)), tmp_path)
    tokens = loaded(tmp_path, task={"name": "./toy.py", "kind": "tokens"})
    with pytest.raises(UsageError, match="do not fit toy: Tokens there, Values here; choose a task with inputs"):
        run(other_job(one, tokens), tmp_path / "unused")
    assert not (tmp_path / "unused").exists()  # before anything is trained


def test_sequences_of_another_length_fit_where_parameters_allow(tmp_path):
    """Learned positions are made for this task's length; longer sequences there cannot be taken."""
    model = {"model__positions": ["learned"]}
    (tmp_path / "long").mkdir()
    short = own_task(tmp_path, **model)
    (tmp_path / "long" / "toy.py").write_text(TASK.replace("integers(3, 13, n)", "integers(3, 30, n)"))
    long = load(str(recipe_file(tmp_path / "long", task={"name": "./toy.py"}, **model)))
    run(other_job(long, short, 29), tmp_path / "runs")
    with pytest.raises(UsageError, match=r"positions\.learned has another shape, since sequences there have 29 steps"):
        build_stage(other_job(short, long))


def test_rows_that_are_tested_here_are_refused_wherever_they_come_from(tmp_path):
    """The other task trains on rows that this one tests."""
    one = loaded(tmp_path)
    other = loaded(tmp_path, task={"name": "digits", "split_seed": 1, "max_rows": 700})
    with pytest.raises(CheckpointError, match="was pretrained on"):
        run(other_job(one, other), tmp_path / "runs")


# -------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("changes", "scratch"),
    [({"finetune__freeze": True}, False), ({"finetune__joint": 0.5}, True), ({"finetune__load": ["encoder"]}, False)],
)
def test_costs_are_what_is_computed(tmp_path, changes, scratch):
    """A frozen network has a smaller backward pass, a joint loss a second pass of both kinds; parents are counted."""
    plain, control = loaded(tmp_path), loaded(tmp_path, **changes)
    jobs = [Job(one, "finetune", 0) if scratch else spt_job(one) for one in (plain, control)]
    first, second = (run(job, tmp_path / "runs") for job in jobs)
    before = (
        0
        if scratch
        else json.loads((tmp_path / "runs" / jobs[0].parent.name / "result.json").read_text())["own"]["flops"]
    )
    assert second.total.flops == second.own.flops + before
    setup = build_stage(jobs[1])
    length, rows = setup.data.length, second.own.examples
    if control.recipe.finetune.freeze:
        model = setup.model
        features = model.encoder.flops(length) + model.backbone.flops(length)
        assert second.own.flops == pytest.approx(rows * (features.forward + model.head.flops(length, data=True).total))
        assert second.own.flops < 0.4 * first.own.flops
    elif control.recipe.finetune.joint:
        assert 1.9 * first.own.flops < second.own.flops < 2.2 * first.own.flops
    else:
        assert second.own.flops == first.own.flops


# ------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "changes",
    [
        {"finetune__freeze": True, **BATCH},
        {"finetune__load": ["encoder"]},
        {"pretrain__shuffle_steps": True},
        {"finetune__joint": 0.5, **BATCH},
    ],
    ids=["frozen", "parts", "shuffled", "joint"],
)
@pytest.mark.slow
def test_a_control_goes_on_bit_for_bit(tmp_path, changes, monkeypatch):
    one = own_task(tmp_path, **changes)
    job = Job(one, "finetune", 0) if "finetune__joint" in changes else spt_job(one)
    whole = run(job, tmp_path / "whole", micro_batch_size=3)
    real, steps = Learner.step, []

    def step(self, prefetcher, number, size):
        steps.append(number)
        if len(steps) == 5:
            signal.raise_signal(signal.SIGTERM)
        return real(self, prefetcher, number, size)

    monkeypatch.setattr(Learner, "step", step)
    with pytest.raises(Stopped):
        run(job, tmp_path / "parts", micro_batch_size=3)
    steps.extend([0] * 10)
    resumed = run(job, tmp_path / "parts", micro_batch_size=3)
    assert (resumed.test, resumed.val, resumed.own.flops) == (whole.test, whole.val, whole.own.flops)
    for each in filter(None, (job, job.parent)):
        here, there = best(tmp_path / "whole", each), best(tmp_path / "parts", each)
        assert all(np.array_equal(here[name], there[name]) for name in here)
    assert (RunFolder(tmp_path / "parts", job.name).status() or {})["state"] == "done"


def test_a_finished_control_can_be_opened_again(tmp_path):
    from spt.training.load_run import load_run

    for changes in ({"finetune__freeze": True}, {"finetune__joint": 0.5}):
        job = Job(loaded(tmp_path, **changes), "finetune", 0)
        run(job, tmp_path / "runs")
        opened = load_run(tmp_path / "runs" / job.name)
        assert opened.job.key == job.key
        assert isinstance(opened.network, SequenceModel) and opened.network.frozen == bool(
            changes.get("finetune__freeze")
        )


def test_memory_is_told_of_what_is_trained(tmp_path):
    """`spt show`: a frozen network saves next to nothing; the passes of a joint loss come one after the other."""
    from spt.analysis.resolved import resolve_overview

    settings = {"plain": {}, "frozen": {"finetune__freeze": True}, "joint": {"finetune__joint": 0.5}}
    stages, needed = {}, {}
    for name, changes in settings.items():
        shown = resolve_overview(loaded(tmp_path, **changes))["stages"]
        stages[name] = {stage["stage"]: stage for stage in shown}
        needed[name] = stages[name]["finetune"]["memory estimate"]
    assert needed["frozen"]["activations"] < 0.1 * needed["plain"]["activations"]
    assert needed["frozen"]["weights, AdamW"] < 0.5 * needed["plain"]["weights, AdamW"]
    pretraining = stages["plain"]["pretrain"]["memory estimate"]["activations"]
    assert needed["joint"]["activations"] == max(needed["plain"]["activations"], pretraining)
    assert stages["frozen"]["finetune"]["groups"][0]["of"] == ["head.out.weight", "head.out.bias"]
    assert stages["joint"]["finetune"]["parameters"]["denoiser"] > 0
