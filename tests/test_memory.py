"""Options that save time or memory and leave the science alone: the same batch, the same numbers but for rounding."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny import loaded, own_task, run, spt, spt_job, weights

from spt.config.job import Job
from spt.errors import BackendError
from spt.models.base import Backbone, Context
from spt.runs.folder import RunFolder
from spt.runtime.environment import compiler_problem
from spt.training import loop
from spt.training.step import Learner


def losses(root, job):
    rows = RunFolder(root, job.name).metrics()
    return np.array([row["loss"] for row in rows])


def best(root, job):
    return weights(root / job.name / "checkpoints/best")


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_gradient_checkpointing_gives_the_same_weights(tmp_path, stage):
    """Bit for bit, dropout included: what is computed again draws the same numbers again."""
    job = Job(own_task(tmp_path, model__dropout=0.3, model__n_layers=2), stage, 0)
    run(job, tmp_path / "plain")
    run(job, tmp_path / "recomputed", recompute=True)
    one, two = best(tmp_path / "plain", job), best(tmp_path / "recomputed", job)
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_gradient_checkpointing_keeps_fewer_activations(tmp_path):
    def kept(recompute: bool) -> int:
        from spt.training.build import build_stage

        model = build_stage(Job(loaded(tmp_path, model__n_layers=4), "pretrain", 0)).model
        model.backbone.recompute = recompute
        sizes = []
        x = torch.zeros(4, 64, 16)
        context = Context(torch.ones(4, 64, dtype=torch.bool), False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model.backbone(x, context)
        return sum(sizes)

    assert kept(True) < 0.3 * kept(False)


class memory_for:
    """A machine that holds `most` sequences at once, in training or in evaluation."""

    def __init__(self, most, training=True, kind=torch.OutOfMemoryError):
        self.most, self.training, self.kind, self.seen = most, training, kind, []

    def __enter__(self):
        self.real = Backbone.forward

        def forward(backbone, x, context):
            if backbone.training == self.training:
                self.seen.append(len(x))
                if len(x) > self.most:
                    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
                    raise self.kind(text)
            return self.real(backbone, x, context)

        Backbone.forward = forward
        return self

    def __exit__(self, *_):
        Backbone.forward = self.real


class memory_gone_once:
    """No memory in the n-th forward pass of training."""

    def __init__(self, n):
        self.n, self.count = n, 0

    def __enter__(self):
        self.real = Backbone.forward

        def forward(backbone, x, context):
            self.count += backbone.training
            found = self.real(backbone, x, context)
            if self.count == self.n and backbone.training:
                raise torch.OutOfMemoryError("none left")
            return found

        Backbone.forward = forward

    def __exit__(self, *_):
        Backbone.forward = self.real


@pytest.mark.parametrize("n", [2, 3])
def test_a_step_that_ran_out_of_memory_half_way_begins_anew(tmp_path, n):
    """The gradients of its first micro-batches are not added to those of the second attempt."""
    job = Job(own_task(tmp_path, pretrain__train__batch_size=9, model__dropout=0.2), "pretrain", 0)
    run(job, tmp_path / "whole", micro_batch_size=2)
    with memory_gone_once(n):
        run(job, tmp_path / "parts", micro_batch_size=4)
    assert np.allclose(losses(tmp_path / "whole", job), losses(tmp_path / "parts", job), rtol=1e-5)


def test_a_step_that_is_made_again_has_its_batch_norms_as_before(tmp_path):
    """Compared with a machine that holds no more than the half from the start."""
    job = Job(own_task(tmp_path, pretrain__train__batch_size=8, model__norm="batch"), "pretrain", 0)
    run(job, tmp_path / "halves", micro_batch_size=4)
    with memory_gone_once(1):
        run(job, tmp_path / "found")
    with memory_gone_once(3):  # in the second pass of the second step
        run(job, tmp_path / "late", micro_batch_size=4)
    halves, found = best(tmp_path / "halves", job), best(tmp_path / "found", job)
    assert any(name.endswith("running_mean") for name in halves)
    assert all(np.allclose(halves[name], found[name], rtol=1e-5, atol=1e-7) for name in halves)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_raises_accumulation(tmp_path, kind, messages):
    """8 sequences do not fit, nor 4; the batch stays 8, and so do the numbers."""
    job = Job(own_task(tmp_path, pretrain__train__batch_size=8), "pretrain", 0)
    whole = run(job, tmp_path / "whole")
    with memory_for(3, kind=kind) as machine:
        found = run(job, tmp_path / "parts")
    assert machine.seen[:3] == [8, 4, 2] and max(machine.seen[3:]) == 2  # found out once
    assert [text for text in messages if "out of memory" in text] == [
        "out of memory: continuing with 4 sequences at once; the batch size stays 8",
        "out of memory: continuing with 2 sequences at once; the batch size stays 8",
    ]
    assert np.allclose(losses(tmp_path / "whole", job), losses(tmp_path / "parts", job), rtol=1e-4)
    assert found.own.examples == whole.own.examples and found.own.flops == whole.own.flops


def test_a_resumed_run_remembers_what_memory_holds(tmp_path):
    from test_training import Stopped, stopping_after

    job = Job(own_task(tmp_path), "pretrain", 0)
    with memory_for(3), stopping_after(4), pytest.raises(Stopped):
        run(job, tmp_path / "runs")
    with memory_for(3) as machine:
        run(job, tmp_path / "runs")
    assert max(machine.seen) == 2


def test_no_memory_for_one_sequence_is_said(tmp_path):
    job = Job(own_task(tmp_path), "pretrain", 0)
    with memory_for(0), pytest.raises(BackendError, match="no memory for a single sequence; --gradient-checkpointing"):
        run(job, tmp_path / "runs")
    assert RunFolder(tmp_path / "runs", job.name).status()["exit_code"] == 4


@pytest.mark.parametrize("mask_padding", [True, False])
def test_no_memory_to_evaluate_one_sequence_is_said(tmp_path, mask_padding):
    job = Job(own_task(tmp_path, model__mask_padding=mask_padding), "finetune", 0)
    with memory_for(0, training=False), pytest.raises(BackendError, match="no memory to evaluate one sequence"):
        run(job, tmp_path / "runs")


@pytest.mark.slow
def test_evaluation_that_does_not_fit_takes_smaller_batches(tmp_path):
    job = spt_job(own_task(tmp_path))
    whole = run(job, tmp_path / "whole")
    with memory_for(2, training=False):
        parts = run(job, tmp_path / "parts")
    assert parts.test == pytest.approx(whole.test, rel=1e-4) and parts.val == pytest.approx(whole.val, rel=1e-4)


def test_a_bug_is_not_taken_for_want_of_memory(tmp_path):
    class Bug(RuntimeError):
        pass

    job = Job(own_task(tmp_path), "pretrain", 0)

    def broken(backbone, x, context):
        raise Bug("shapes do not match")

    real, Backbone.forward = Backbone.forward, broken
    try:
        with pytest.raises(Bug):
            run(job, tmp_path / "runs")
    finally:
        Backbone.forward = real


def test_a_micro_batch_is_sought_before_gpus_wait_for_each_other(tmp_path, messages):
    """What several GPUs do first, here with the answers of the others made up: another one holds only 2."""
    from types import SimpleNamespace

    from spt.runtime.distributed import Runtime
    from spt.runtime.settings import Settings
    from spt.training.build import build_stage
    from spt.training.checkpoint import TrainingState

    setup = build_stage(Job(own_task(tmp_path, pretrain__train__batch_size=16), "pretrain", 0))

    class Two(Runtime):
        world, rank = 2, 0
        device = SimpleNamespace(type="cuda")

        def send(self, micro_batch):
            return micro_batch

        def highest(self, numbers):
            return [float(numbers[0] or size_now() > 2)]

    def size_now():
        return machine.seen[-1]

    runtime = Two(Settings(cpu=True))
    learner = Learner(setup, setup.model, torch.optim.SGD(setup.model.parameters(), 0.1), runtime)
    with memory_for(4) as machine:
        assert learner.find_micro_batch(TrainingState(), 10) == 2
    assert machine.seen == [8, 4, 2] and len(messages) == 2
    assert all(p.grad is None for p in setup.model.parameters())


def test_bf16_is_finite_and_close(tmp_path):
    options = {"model__d_model": 32, "pretrain__train__steps": 12, "finetune__train__steps": 12}
    exact = spt_job(own_task(tmp_path, **options))
    run(exact, tmp_path / "runs")
    halves = {"pretrain__train__precision": "bf16", "finetune__train__precision": "bf16"}
    rounded = spt_job(own_task(tmp_path, **options, **halves))
    result = run(rounded, tmp_path / "runs")
    assert result.precision == "bf16" and result.key != exact.key
    for one, two in ((exact, rounded), (exact.parent, rounded.parent)):
        a, b = losses(tmp_path / "runs", one), losses(tmp_path / "runs", two)
        assert np.isfinite(b).all() and not np.array_equal(a, b)
        assert np.allclose(a, b, rtol=0.05, atol=0.02)
    assert all(tensor.dtype == np.float32 for tensor in best(tmp_path / "runs", rounded).values())


@pytest.mark.slow
def test_without_a_compiler_compile_is_declined_in_words(tmp_path):
    """In a process of its own that finds no compiler."""
    own_task(tmp_path)
    env = {"CXX": str(tmp_path / "nowhere"), "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = spt("pretrain", "tiny.yaml", "--compile", "--out", "runs", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("--compile: torch.compile cannot be used here") == 1
    assert "continuing without it" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_compiled_and_not_compiled_agree(tmp_path):
    """Lengths of batches differ, and there is padding; the names of the weights stay."""
    if (problem := compiler_problem("cpu")) is not None:
        pytest.skip(f"torch.compile does not work here: {problem}")
    job = spt_job(own_task(tmp_path, model__n_layers=2, pretrain__train__steps=12))
    plain, compiled = run(job, tmp_path / "plain"), run(job, tmp_path / "compiled", compile=True)
    assert compiled.test == pytest.approx(plain.test, rel=1e-4)
    for each in (job, job.parent):
        assert np.allclose(losses(tmp_path / "plain", each), losses(tmp_path / "compiled", each), rtol=1e-4)
        assert best(tmp_path / "plain", each).keys() == best(tmp_path / "compiled", each).keys()


def test_compile_is_used_when_asked_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("spt.runtime.distributed.compiler_problem", lambda device: None)
    monkeypatch.setattr(Backbone, "compile", lambda self: asked.append(self))
    job = Job(own_task(tmp_path), "pretrain", 0)
    run(job, tmp_path / "runs", compile=True)
    assert len(asked) == 1


FAULTS = """
import resource, torch
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

assert Runtime(Settings(quiet=True, cpu=True)).device.type == "cpu"
def fill():
    torch.ones(12, 1 << 20)  # 48 MiB, freed at once
for _ in range(5):
    fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep what they are used to keep")
def test_the_pages_of_a_freed_tensor_are_used_again():
    """glibc by itself gives blocks of this size back, and the system has to fill them with zeros every time."""

    def faults(**variables: str) -> int:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, env=mine | variables)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    usual = faults(MALLOC_MMAP_THRESHOLD_="33554432")  # the user's own word, here the limit without us
    kept = (faults() for _ in range(3))  # a busy system may take idle pages from a process that waits
    assert any(each * 10 < usual for each in kept)


DENORMALS = """
import sys
import torch
from spt.runtime.denormals import denormals_as_zero, start_threads

def left():
    small = torch.full((1 << 22,), 1e-30)  # large enough for both threads
    return [int(half.count_nonzero()) for half in (small * 1e-10).chunk(2)]

torch.set_num_threads(2)
if sys.argv[1:] == ["late"]:
    left()  # threads are there
start_threads()
found = [left()]
with denormals_as_zero():
    found.append(left())
print(*found, float(torch.tensor(1e-30) * 1e-10) > 0)
"""


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no mode for it")
def test_numbers_too_small_for_full_precision_become_zero_in_every_thread_that_computes():
    """Products with them take many times as long: attention that is sure of one place slowed down to less than half.
    What the program computes by itself is as ever."""

    def found(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-c", DENORMALS, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert found().endswith("[0, 0] True")
    assert not found("late").endswith("[0, 0] True"), "they have to be started here"


OWN = """
import torch
torch.set_num_threads(2)
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
Runtime(Settings(cpu=True, quiet=True))
print(int((torch.full((1 << 22,), 1e-30) * 1e-10).count_nonzero()))
"""


def test_the_threads_of_a_program_that_uses_spt_are_as_ever():
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True)
    assert done.stdout.split() == [str(1 << 22)], done.stderr


def test_training_leaves_a_programs_own_small_numbers_alone(tmp_path, monkeypatch):
    seen, real = [], loop.evaluate

    def evaluated(*arguments, **options):
        seen.append(float(torch.tensor(1e-30) * 1e-10))
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "evaluate", evaluated)
    run(Job(loaded(tmp_path), "finetune", 0), tmp_path)
    assert not any(seen) and seen and float(torch.tensor(1e-30) * 1e-10) > 0
