"""Kernels recorded as CUDA graphs: by a stand-in for torch's recordings on a CPU, and on a GPU, if there is one."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from spt.bench.launches import LaunchCounter, launches
from spt.bench.models import parse_models
from spt.config.recipe import Part
from spt.errors import BackendError
from spt.models.base import Context
from spt.models.longconv import LongConvolution
from spt.models.ops import backends, graphs
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.build import build_backbone
from spt.training.seeding import seeded

L = 12


class StandIn:
    """As torch's: every pass writes into the same memory, and the backward pass is that of the latest forward pass."""

    def __init__(self, function, samples):
        self.function, self.samples = function, [x.detach().clone().requires_grad_(x.requires_grad) for x in samples]
        self.result = self.run().detach().clone()
        self.gradient = torch.zeros_like(self.result)
        self.gradients = [torch.zeros_like(x) for x in self.samples]
        stand_in = self

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                for sample, x in zip(stand_in.samples, inputs, strict=True):
                    sample.data.copy_(x)
                stand_in.result.copy_(stand_in.run())
                return stand_in.result.detach()

            @staticmethod
            def backward(ctx, gradient):
                stand_in.gradient.copy_(gradient)
                asked = torch.autograd.grad(stand_in.output, stand_in.samples, stand_in.gradient)
                for memory, each in zip(stand_in.gradients, asked, strict=True):
                    memory.copy_(each)
                return tuple(memory.detach() for memory in stand_in.gradients)

        self.graphed = Graphed

    def run(self):
        with torch.enable_grad():
            self.output = self.function(*self.samples)
        return self.output.detach()

    def __call__(self, *inputs):
        return self.graphed.apply(*inputs)


@pytest.fixture
def recordings(monkeypatch):
    """Those that were made, on a CPU in the place of a GPU."""
    made = []

    def make(function, samples, allow_unused_input=False):
        made.append(StandIn(function, samples))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    monkeypatch.setattr(graphs, "_has_graphs", lambda x: True)
    with graphs.use(True, "cuda"):
        yield made


def backbone(model, *, layers=2, **options):
    (variant,) = parse_models([model], layers=layers, width=8, length=str(L), batch="2")
    with seeded(0, "graphs"):
        return build_backbone(Part(name=model, **{**variant.options, **options}), L)


def inputs(length=L, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, 8, generator=generator)
    return x, Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def plain(model, *passes):
    """Outputs and gradients without recordings, of the sum of the passes."""
    with graphs.use(False, "cpu"):
        model.zero_grad()
        outputs = [model(*each) for each in passes]
        sum(y.square().sum() for y in outputs).backward()
        return outputs, gradients(model)


def recordings_of(model):
    first = next(layer for layer in model.modules() if isinstance(layer, LongConvolution))
    return list(first._recordings._found.values())


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    for name, values in expected.items():
        assert torch.allclose(found[name], values, rtol=1e-5, atol=1e-6 * float(values.abs().max())), name


@pytest.mark.parametrize("model", ["s4", "s4d", "dss", "dlr"])
def test_recorded_steps_are_plain_steps(model, recordings):
    network = backbone(model)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for step in range(4):
        (expected,), expected_gradients = plain(network, inputs(seed=step))
        network.zero_grad()
        y = network(*inputs(seed=step))
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
        y.square().sum().backward()
        assert_same(gradients(network), expected_gradients)
        del y
        optimizer.step()
    assert len(recordings) == 1


def test_gradients_that_are_kept_are_not_overwritten(recordings):
    network = backbone("s4")
    _, expected = plain(network, inputs(seed=1), inputs(seed=2))
    network.zero_grad()
    for seed in (1, 2):  # the second is added to the first
        network(*inputs(seed=seed)).square().sum().backward()
    assert_same(gradients(network), expected)


def test_two_forward_passes_before_the_backward_pass(recordings):
    network = backbone("s4")
    _, expected = plain(network, inputs(seed=1), inputs(seed=2))
    network.zero_grad()
    outputs = [network(*inputs(seed=seed)) for seed in (1, 2)]
    sum(y.square().sum() for y in outputs).backward()
    assert_same(gradients(network), expected)


def test_a_result_that_is_kept_does_not_hold_the_recording(recordings):
    network = backbone("s4")
    y = network(*inputs())
    (recording,) = recordings_of(network)
    y.square().sum().backward()
    assert not recording.busy


def test_other_types_have_recordings_of_their_own(recordings):
    network = backbone("s4")
    network(*inputs())
    network.double()
    (x, context), (expected,) = inputs(), plain(network, (inputs()[0].double(), inputs()[1]))[0]
    assert torch.allclose(network(x.double(), context), expected)
    assert len(recordings) == 2


def test_a_pass_that_was_given_up_does_not_hold_the_recording(recordings):
    network = backbone("s4")
    y = network(*inputs())
    (recording,) = recordings_of(network)
    assert recording.busy
    del y
    gc.collect()
    assert not recording.busy


def test_lengths_have_recordings_up_to_a_number(recordings):
    network = backbone("s4")
    for length in range(4, 4 + 2 * graphs.MOST):
        (expected,), _ = plain(network, inputs(length))
        assert torch.allclose(network(*inputs(length)), expected, rtol=1e-5, atol=1e-6)
    assert len(recordings) == graphs.MOST


def test_recordings_end_with_their_model_and_are_not_copied(recordings):
    network = backbone("s4")
    network(*inputs())
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert not recordings_of(copied)
    alive = weakref.ref(recordings.pop())
    assert alive() is not None
    del network
    gc.collect()
    assert alive() is None


def test_not_without_gradients_and_not_unasked(recordings):
    network = backbone("s4")
    with torch.no_grad():
        network(*inputs())
    with graphs.use(False, "cuda"):
        network(*inputs())
    assert not recordings


@pytest.mark.parametrize("fault", ["error", "wrong result", "wrong gradient"])
def test_what_cannot_be_recorded_is_computed_plainly_and_said(fault, recordings, monkeypatch, caplog):
    def make(function, samples, allow_unused_input=False):
        if fault == "error":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        replay = StandIn(function, samples)
        if fault == "wrong result":
            return lambda *inputs: replay(*inputs) * 1.001
        return lambda *inputs: replay(*inputs) + (inputs[0] - inputs[0].detach()).sum()

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    network = backbone("s4")
    (expected,), _ = plain(network, inputs())
    for _ in range(2):
        assert torch.equal(network(*inputs()), expected)
    (message,) = caplog.messages
    assert message.startswith("--cuda-graphs: ") and message.endswith("; continuing without")


def test_elsewhere_it_is_refused():
    runtime = Runtime(Settings(cpu=True, quiet=True, cuda_graphs=True))
    with pytest.raises(BackendError, match="CUDA graphs need an NVIDIA GPU, and this runs on cpu"), runtime.kernels():
        pass
    assert not graphs._enabled


# Launches of a step with 6 layers at 1,024 steps, kernels recorded; test_launches.py has them without.
MOST = {"s4": 258, "s4d": 250, "dss": 220, "dlr": 241}


class Launch(torch.autograd.Function):
    """A recording in a count of launches: copies of its inputs and one launch, and the same for its gradient."""

    @staticmethod
    def forward(ctx, function, counter, *inputs):
        ctx.counter, ctx.inputs = counter, inputs
        counter.counts["copies"] += len(inputs)
        counter.counts["replay"] += 1
        with _disable_current_modes():
            return torch.empty_like(function(*inputs))

    @staticmethod
    def backward(ctx, gradient):
        ctx.counter.counts["copies"] += 1
        ctx.counter.counts["replay"] += 1
        with _disable_current_modes():
            return None, None, *map(torch.empty_like, ctx.inputs)


@pytest.mark.parametrize("model", MOST)
def test_launches_that_are_left(model, recordings, monkeypatch):
    counters = []

    class Kept(LaunchCounter):
        def __init__(self, *args):
            super().__init__(*args)
            counters.append(self)

    def record(function, inputs):
        return graphs._Recording(lambda *values: Launch.apply(function, counters[0], *values))

    monkeypatch.setattr("spt.bench.launches.LaunchCounter", Kept)
    monkeypatch.setattr(graphs, "_record", record)
    (variant,) = parse_models([model], layers=6, length="1024", batch="2")
    counts = launches(variant)
    assert counters[0].counts["replay"] == 2
    assert sum(counts.values()) <= MOST[model]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["s4", "s4d", "dss", "dlr"])
def test_on_a_gpu(model, caplog):
    network = backbone(model).cuda()
    for step, backend in enumerate(["torch", "torch", "auto", "auto"]):
        x, context = inputs(seed=step)
        given = x.cuda(), Context(context.valid.cuda(), padded=False)
        if backend == "auto":
            network = backbone(model).cuda()  # whose recordings are new
        with backends.use(backend, "kernels", "cuda"):
            (expected,), expected_gradients = plain(network, given)
            network.zero_grad()
            with graphs.use(True, "cuda"):
                y = network(*given)
                assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
                y.square().sum().backward()
        found = gradients(network)
        for name, values in expected_gradients.items():
            assert torch.allclose(found[name], values, rtol=1e-3, atol=1e-4 * float(values.abs().max())), name
        del y
    assert not caplog.messages
