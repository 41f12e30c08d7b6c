"""What a program waits for, where a device works through a queue: nothing within a step, once in an evaluation's batch;
and that what is stored does not depend on it."""

import threading

import numpy as np
import pytest
import torch
from test_training import same_result, same_weights, stopping_after
from tiny import loaded, own_task, run
from waits import counted

from spt.config.job import Job
from spt.errors import DivergedError, Stopped
from spt.models.feedforward import SwitchFeedForward
from spt.models.ops import vandermonde
from spt.rng import Draw
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.prefetch import prefetched
from spt.runtime.settings import Settings
from spt.training.build import build_stage
from spt.training.evaluate import evaluate
from spt.training.loop import time_steps
from spt.training.stage import run_stage

SMALL = {"d_model": 16, "n_layers": 1}
TRANSFORMER = {"name": "transformer", **SMALL, "n_heads": 2, "d_ff": 16}
MODELS = {
    "transformer": TRANSFORMER,
    "chunks": {**TRANSFORMER, "window": 4},
    "experts": {**TRANSFORMER, "feed_forward": "switch", "n_experts": 3},
    "s4": {"name": "s4", **SMALL, "d_state": 8, "norm": "batch"},
    "dlr": {"name": "dlr", **SMALL, "d_state": 8},
    "dss": {"name": "dss", **SMALL, "d_state": 8, "version": "softmax"},
    "s5": {"name": "s5", **SMALL, "d_state": 16, "norm": "batch"},
    "mega": {"name": "mega", **SMALL, "d_state": 4, "chunk": 4, "relative_bias": "rotary"},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The forms that layers take where the device is no CPU."""
    monkeypatch.setattr(SwitchFeedForward, "_one_by_one", SwitchFeedForward._in_blocks)
    monkeypatch.setattr(vandermonde, "has_values", lambda x: False)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_waits_and_a_batch_of_an_evaluation_once(tmp_path, monkeypatch, as_on_a_gpu, model, stage):
    scaled = {"task__target": "real", "finetune__objective": {"name": "supervised", "scale": "standard"}}
    one = own_task(tmp_path, model=MODELS[model], **(scaled if model == "s4" else {}))
    setup = build_stage(Job(one, stage, 0))
    with counted(monkeypatch, setup.model) as device:
        time_steps(setup, Runtime(Settings(cpu=True, quiet=True)), 2)
        assert not device.waits
        assert device.events == ["send", "read"] * 2  # for timing's sake alone
        device.events.clear()
        runtime = Runtime(Settings(cpu=True, quiet=True))
        monkeypatch.setattr("spt.training.evaluate.EVALUATION_POSITIONS", 100)
        evaluate(setup.model, setup, setup.data.val, runtime, Draw(0, "evaluation", 0), at_once=1)
    assert not device.waits
    assert device.events == ["send", "read"] * (len(device.events) // 2) and len(device.events) >= 4


def test_steps_of_full_batches_of_equal_lengths_wait_for_nothing_either(tmp_path, monkeypatch):
    """Batch norms take another way there."""
    setup = build_stage(Job(loaded(tmp_path, model=MODELS["s5"]), "finetune", 0))
    with counted(monkeypatch, setup.model) as device:
        time_steps(setup, Runtime(Settings(cpu=True, quiet=True)), 2)
    assert not device.waits


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda x: float(x.sum()), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: (x > 0).nonzero(), "nonzero"),
        (lambda x: x.new_tensor([1.0, 2.0]), "new_tensor"),
        (lambda x: torch.zeros(2).copy_(x[0]), "a copy"),
        (lambda x: x[:, torch.tensor([0])], "index by what is on the CPU"),
        (lambda x: x.repeat_interleave((x[0] > 0).int(), dim=1), "repeat_interleave"),
    ],
)
def test_the_count_itself(monkeypatch, read, kind):
    network = torch.nn.Linear(2, 2, bias=False)
    with counted(monkeypatch, network) as device:
        (network.weight * 2 + torch.ones(2, 2, device="cpu")).sum().backward()
        assert not device.waits
        read(network.weight.grad * 1)
    assert [name.split(" in ")[0] for name in device.waits] == [kind]


def test_losses_are_read_a_step_late_and_nothing_stored_knows(tmp_path, monkeypatch):
    """Six steps, of which the third and the last are evaluated: those are read at once."""
    job = Job(loaded(tmp_path, model__dropout=0.3), "pretrain", 0)
    at_once = run(job, tmp_path / "at once")
    with counted(monkeypatch) as device:
        late = run(job, tmp_path / "late")
    same_result(at_once, late)
    folders = [tmp_path / name / job.name for name in ("at once", "late")]
    same_weights(*(folder / "checkpoints/best" for folder in folders))
    assert (folders[0] / "metrics.jsonl").read_text() == (folders[1] / "metrics.jsonl").read_text()
    three = ["send", "send", "read", "send", "read", "read", "send", "read"]
    assert device.events == three * 2  # the last pair of each: its evaluation


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_diverged_is_found_though_the_next_has_begun(tmp_path, monkeypatch, step):
    """Before, between and at evaluations: the same words, the same weights kept, and none saved."""
    job = Job(loaded(tmp_path, pretrain__train__evaluate_every=2), "pretrain", 0)
    real, count = Runtime.backward, 0

    def backward(runtime, loss):
        nonlocal count
        count += 1
        real(runtime, loss * (float("nan") if count == step else 1.0))

    found = []
    for late in (False, True):
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "backward", backward)
            if late:
                patch.setattr(Runtime, "queues", True)
                patch.setattr(Runtime, "fetch", lambda runtime, tensors: lambda: tensors)
            with pytest.raises(DivergedError, match=f"not finite at step {step}") as caught:
                run(job, tmp_path / str(late), save_every=0.0)
        folder = RunFolder(tmp_path / str(late), job.name)
        files = sorted(path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file())
        state = folder.status()
        found.append((str(caught.value), state["state"], state["reason"], files))
    assert found[0] == found[1]


def test_interrupted_equals_uninterrupted_where_losses_are_read_late(tmp_path, monkeypatch):
    job = Job(loaded(tmp_path, model__dropout=0.3), "pretrain", 0)
    whole = run(job, tmp_path / "whole")
    monkeypatch.setattr(Runtime, "queues", True)
    monkeypatch.setattr(Runtime, "fetch", lambda runtime, tensors: lambda: tensors)
    with stopping_after(2), pytest.raises(Stopped, match="after step 2"):
        run(job, tmp_path / "parts")
    same_result(whole, run(job, tmp_path / "parts"))
    folders = [tmp_path / name / job.name for name in ("whole", "parts")]
    assert (folders[0] / "metrics.jsonl").read_text() == (folders[1] / "metrics.jsonl").read_text()


def test_the_next_value_is_made_ahead_of_its_time():
    made, main = [], threading.get_ident()
    second = threading.Event()

    def make(number: int) -> int:
        assert threading.get_ident() != main
        made.append(number)
        if number == 1:
            second.set()
        return number**2

    values = prefetched(make, iter(range(5)))
    assert next(values) == 0
    assert second.wait(10)  # while nobody asks for it
    assert list(values) == [1, 4, 9, 16] and made == [0, 1, 2, 3, 4]
    assert not list(prefetched(make, []))
    begun = threading.active_count()
    values = prefetched(make, [2, 3])
    next(values)
    values.close()
    assert threading.active_count() == begun
    with pytest.raises(ZeroDivisionError):
        list(prefetched(lambda number: 1 // number, [1, 0]))


def test_evaluation_makes_the_next_batch_in_a_thread(tmp_path, monkeypatch):
    """As training does; and all rows are scored once."""
    from spt.training import evaluate as module

    setup, threads = build_stage(Job(own_task(tmp_path), "finetune", 0)), []
    real = module.collate

    def collate(*given):
        threads.append(threading.get_ident())
        return real(*given)

    monkeypatch.setattr(module, "collate", collate)
    monkeypatch.setattr(module, "EVALUATION_POSITIONS", 30)
    runtime = Runtime(Settings(cpu=True, quiet=True))
    _, found = evaluate(setup.model, setup, setup.data.val, runtime, Draw(0, "x", 0), at_once=1, predict=True)
    assert len(threads) > 2 and threading.get_ident() not in threads
    assert found is not None and np.asarray(found.values).shape == (len(setup.data.val),)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu(tmp_path, monkeypatch, model):
    """CUDA itself says where it is waited for."""
    setup = build_stage(Job(own_task(tmp_path, model=MODELS[model]), "finetune", 0))
    runtime = Runtime(Settings(quiet=True))
    time_steps(setup, runtime, 2)  # what is made once: tables, libraries, pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        time_steps(setup, runtime, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    job = Job(own_task(tmp_path, model=MODELS[model]), "pretrain", 0)
    assert np.isfinite(run_stage(job, tmp_path / "runs", runtime).val["loss"])
