"""Backends of kernels and of attention: each gives what torch gives, or says why it cannot."""

import math
import sys

import pytest
import torch

from spt.models.ops import backends
from spt.models.ops.vandermonde import vandermonde
from spt.models.s4d import Config, S4DKernel


@pytest.fixture(autouse=True)
def as_before():
    yield
    backends.use("auto")
    backends.use("auto", "attention")
    for probe in (*backends._PROBES.values(), backends._probe_operation, backends.prefers_triton):
        probe.cache_clear()


def test_the_default_works_everywhere():
    assert backends.current() == "auto" and backends.probe("auto") is None and backends.probe("torch") is None
    assert backends.current("attention") == "auto" and backends.probe("auto", choice="attention") is None


def test_a_backend_that_does_not_exist():
    with pytest.raises(
        backends.Unavailable, match="no kernel backend 'nosuch'; choose among auto, torch, triton, keops"
    ):
        backends.use("nosuch")
    with pytest.raises(backends.Unavailable, match="no attention backend 'keops'; choose among auto, sdpa, varlen"):
        backends.use("keops", "attention")
    assert "no such backend" in backends.probe("nosuch") and "no such backend" in backends.probe("flash")
    assert backends.current() == backends.current("attention") == "auto"


def test_without_pykeops(monkeypatch):
    """It says what to install, and the choice stays as it was."""
    backends._probe_keops.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "pykeops"] + ["pykeops"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'selfpretrain[keops]'" in backends.probe("keops", "cpu")
    with pytest.raises(backends.Unavailable, match="the kernel backend keops does not work here: pykeops cannot be"):
        backends.use("keops")
    assert backends.current() == "auto"
    problems = {name: backends.probe(name, "cpu") for name in backends.NAMES["kernels"]}
    assert list(problems) == ["auto", "torch", "triton", "keops"]
    assert problems["auto"] is problems["torch"] is None and "cannot be imported" in problems["keops"]


@pytest.mark.slow
def test_without_a_gpu_or_flash_attn(monkeypatch):
    """Each is said, and what to install."""
    with pytest.raises(backends.Unavailable, match="backend flash does not work here: flash-attn needs a CUDA"):
        backends.use("flash", "attention", "cpu")
    for error in (ImportError("no module\nof this name"), OSError("undefined symbol: _ZN3c10"), None):

        def flash(error=error):
            if error:
                raise error
            return lambda *given, **how: given[0]

        monkeypatch.setattr(backends, "flash", flash)
        backends._probe_flash.cache_clear()
        problem = backends.probe("flash", "cuda:0", "attention")
        assert "\n" not in problem
        if error:
            assert problem.startswith("flash-attn cannot be imported") and "'selfpretrain[flash]'" in problem
        else:
            assert "on cuda:0 failed" in problem or "gave a wrong result" in problem
    names = backends.NAMES["attention"]
    works = {name: backends.probe(name, "cpu", "attention") is None for name in names}
    assert works == {"auto": True, "sdpa": True, "varlen": False, "flash": False, "math": True}
    assert backends.current("attention") == "auto"


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (RuntimeError("[KeOps] compiled without cuda support\nmore"), "RuntimeError: [KeOps] compiled without cuda"),
        (None, "gave a wrong result"),
    ],
)
def test_imported_but_broken(monkeypatch, broken, complaint):
    """Found by running a sum, not by importing."""

    class Lazy:
        def __init__(self, values):
            if broken:
                raise broken
            self.values = values

        def __mul__(self, other):
            return Lazy(self.values * other.values)

        def exp(self):
            return self

        def sum(self, dim):
            return self.values.sum(dim)

    backends._probe_keops.cache_clear()
    monkeypatch.setattr(backends, "keops", lambda: type("Module", (), {"LazyTensor": Lazy}))
    problem = backends.probe("keops", "cpu")
    assert complaint in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("difference", "seconds", "taken"),
    [(0.0, 0.5, True), (0.0, 2.0, False), (1e-3, 0.5, False), (math.nan, 0.5, False)],
)
def test_auto_takes_what_agrees_and_is_faster(monkeypatch, difference, seconds, taken):
    """A trial for each: at once for agreement, in turns for times. Whatever fails is not taken."""

    def trial(operation, device, small):
        return lambda: (torch.ones(3) + difference * (backends.current() == "triton"),)

    monkeypatch.setattr(backends, "_trial", trial)
    monkeypatch.setattr(backends, "_seconds", lambda *_: {"torch": 1.0, "triton": seconds})
    assert backends.prefers_triton("cauchy", "cuda") is taken
    problem = backends._probe_operation("cauchy", "cuda")
    assert problem == ("a trial of cauchy on cuda gave a wrong result" if difference else None)
    assert backends.current() == "auto"
    backends.prefers_triton.cache_clear()
    monkeypatch.setattr(backends, "_seconds", lambda *_: 1 / 0)
    assert not backends.prefers_triton("cauchy", "cuda")


def test_triton_on_a_cpu(monkeypatch):
    """Refused if asked for; `auto` does without it and does not even import it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not backends.uses_triton("vandermonde", torch.ones(3))
    with pytest.raises(
        backends.Unavailable, match="backend triton does not work here: Triton's kernels need a GPU, and"
    ):
        backends.use("triton", device="cpu")
    assert "triton cannot be imported" in backends.probe("triton", "cuda")
    assert "failed (" in backends._probe_operation("vandermonde", "cuda")


def test_use_ends_with_its_block(monkeypatch):
    monkeypatch.setattr(backends, "probe", lambda *_: None)
    with backends.use("keops"):
        assert backends.current() == "keops"
        with backends.use("torch"):
            assert backends.current() == "torch"
        assert backends.current() == "keops"
        with backends.use("math", "attention"):  # another choice
            assert (backends.current(), backends.current("attention")) == ("keops", "math")
    assert (backends.current(), backends.current("attention")) == ("auto", "auto")
    backends.use("keops")
    assert backends.current() == "keops"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_keops_gives_what_torch_gives(keops, shared):
    """Values and gradients in float32, also where an angle has been around the circle half a million times."""
    torch.manual_seed(0)
    shape = (4,) if shared else (2, 4)
    given = [torch.randn(2, 2, 4, 2), -1e-4 * torch.rand(shape), 6.28 * torch.rand(shape)]
    for tensor in given:
        tensor.requires_grad_()
    for length in (37, 300_000):
        cotangent = torch.randn(2, 2, length)
        found = {}
        for name in ("torch", "keops"):
            with backends.use(name):
                kernel = vandermonde(*given, length)
                found[name] = [kernel, *torch.autograd.grad(kernel, given, cotangent)]
        for ours, theirs in zip(found["keops"], found["torch"], strict=True):
            assert ours.dtype == torch.float32 and ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= 4e-6 * theirs.abs().max()


@pytest.mark.slow
def test_a_model_with_keops(keops):
    """The gradients of its parameters come through."""
    torch.manual_seed(0)
    kernel = S4DKernel(Config(d_model=2, d_state=4, max_length=20))
    cotangent, found = torch.randn(2, 2, 20), {}
    for name in ("torch", "keops"):
        with backends.use(name):
            taps = kernel(20)
            found[name] = [taps, *torch.autograd.grad(taps, list(kernel.parameters()), cotangent)]
    for ours, theirs in zip(found["keops"], found["torch"], strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
