"""What models state of their operations, forward and backward, against torch's counter and against counts by hand.

The counter sees products on tensors that have shapes alone, attention written out. It is told here what it does not
know: transforms, products added in place, and that a gradient of grouped convolutions costs what forward costs. What
goes element by element is counted by hand.
"""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from test_hf import KINDS as FAMILIES
from test_hf import MORE, built
from test_models import FORMS, IDS
from tiny import loaded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from spt.checks.model_contract import states_its_operations, tiny
from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.config.recipe import EncoderConfig, HeadConfig
from spt.models import deltanet, gated_deltanet, rglru
from spt.models.base import Context, linear_flops
from spt.models.feedforward import SwitchFeedForward
from spt.models.hf import costs
from spt.models.mega import exponentials
from spt.models.ops import dplr
from spt.models.ops import vandermonde as diagonal
from spt.models.ops.convolution import convolve, spectrum, transform_length
from spt.models.ops.counts import KINDS, Counts, as_counts, convolution, linear
from spt.models.ops.counts import spectrum as spectrum_counts
from spt.models.ops.delta_rule import chunks
from spt.models.ops.product import flop_formulas
from spt.models.ops.selective_scan import selective_scan, selective_scan_flops
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks.base import Tokens, Values
from spt.training.budget import mean_flops
from spt.training.build import build_stage
from spt.training.network import Encoder, Head
from spt.training.objectives import Output
from spt.training.optimizer import adamw
from spt.training.step import Learner

ATEN = torch.ops.aten
D, LAYERS, LONGEST = 16, 2, 150
LENGTHS = (64, 150)  # the second is no power of two, and makes kernels in several blocks


# ------------------------------------------------------------------------------------------------------- as counted


def raw(formula):
    formula._get_raw = True
    return formula


@raw
def real_transform(x, *args, out_val, **kwargs):
    """Forward or back: the longer side is the real one."""
    (axis,) = args[0]
    n = max(x.shape[axis], out_val.shape[axis])
    return 2.5 * n * math.log2(n) * (x.numel() // x.shape[axis])


@raw
def complex_transform(x, axes, *args, out_val, **kwargs):
    n = math.prod(x.shape[axis] for axis in axes)
    return 5 * n * math.log2(n) * (x.numel() // n)


@raw
def grouped(grad, x, weight, bias, stride, padding, dilation, transposed, more, groups, mask, out_val):
    return 2 * (x if transposed else grad).numel() * weight[0].numel() * sum(mask[:2])


@raw
def added(into, a, b, *args, out_val, **kwargs):
    return 2 * a.numel() * b.shape[-1]


UNKNOWN = {
    ATEN._fft_r2c: real_transform,
    ATEN._fft_c2r: real_transform,
    ATEN._fft_c2c: complex_transform,
    ATEN.convolution_backward: grouped,
    ATEN.baddbmm_: added,
    **flop_formulas(),
}


def counted(model, length):
    """Forward and backward products and transforms of one sequence in training."""
    model.train()
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH):
        x = torch.empty(1, length, D, requires_grad=True)
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as forward:
            y = model(x, Context(torch.ones(1, length, dtype=torch.bool), padded=False))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as backward:
            torch.autograd.grad(y, [x, *parameters], torch.ones_like(y), allow_unused=True)
    return forward.get_total_flops(), backward.get_total_flops()


# --------------------------------------------------------------------------------------- by hand: element by element


def products_of_spectra(length, kernel=LONGEST):
    """Forward u k; backward conj(u) g, summed, and g conj(k): complex numbers, 6 each and 2 for a sum."""
    bins = transform_length(length, min(length, kernel), False) // 2 + 1
    return D * 6 * bins, D * (6 + 2 + 6) * bins


def tables_of_modes(groups, rows, N, length):
    """The inner table and the blocks' weights; backward both again and their four gradients."""
    T, A = diagonal._blocks(rows, length)
    inner, blocks = 6 * N * math.prod(diagonal._levels(T)), 6 * rows * A * N * (A > 1)
    to_weights = (6 + 2) * rows * A * N * (A > 1)
    to_outer = ((6 + 2) * rows + 6 + 4) * A * N * (A > 1)
    to_inner = (6 + 4) * N * T
    return groups * (inner + blocks), groups * (inner + blocks + to_weights + to_outer + to_inner)


def tables_of_s4(K, length, M=32, T=32):
    """Triangular systems of 32 steps, and products of tables (M, 32): powers of F, folded times r, powers times C, and
    where there is more than one block powers times g; backward again, and for each the gradients of both factors."""
    assert length > T  # several blocks
    solved = (1 + K) * T * T
    tables = 6 * M * T * (1 + (1 + K) + K + 1)
    backward = (6 + 8) * M * T * ((1 + K) + K + 1) + 8 * M * T
    return D * (solved + tables), D * (solved + tables + solved + backward)


def systems_of_the_delta_rule(name, length):
    """In one direction: in both passes the inverse of every chunk's triangular matrix, C² operations for each of its C
    columns. And a convolution over 4 steps."""
    N, keys, values = {"deltanet": deltanet, "gated_deltanet": gated_deltanet}[name].Config(d_model=D).heads
    n, C = chunks(length)
    convolved, inverted = 2 * 4 * length * N * (2 * keys + values), n * N * C**3
    return convolved + inverted, 2 * convolved + inverted


def unseen(name, causal, length):
    """Of one block."""
    K = 1 if causal else 2
    scanned = {"lru": 128, "s5": 128, "hgrn": D, "linoss": 2 * 64}  # linoss: two scans
    if name in scanned:  # backward a scan, and conj(x) g
        return 8 * length * scanned[name] * K, (8 + 8) * length * scanned[name] * K
    if name in ("deltanet", "gated_deltanet"):
        return tuple(K * operations for operations in systems_of_the_delta_rule(name, length))
    if name == "xlstm":  # a convolution over 4 steps, on twice the width
        return 2 * 4 * length * 2 * D * K, 4 * 4 * length * 2 * D * K
    P = rglru.Config(d_model=D).states
    scanned_reals = {"mingru": (D, 0), "minlstm": (D, 0), "rglru": (P, 4)}
    if name in scanned_reals:  # and a convolution over a few steps
        states, width = scanned_reals[name]
        return (2 + 2 * width) * length * states * K, (2 + 1 + 4 * width) * length * states * K
    if name == "mamba":  # all of the scan but C h and B g, which are products; and its convolution
        E = 2 * D
        return (4 * 16 + 2 * 4) * length * E * K, ((19 - 2) * 16 + 4 * 4) * length * E * K
    if name == "mamba2":  # convolutions of E + 2 N features
        return 2 * 4 * length * (2 * D + 256) * K, 4 * 4 * length * (2 * D + 256) * K
    kernels = {
        "dlr": lambda: tables_of_modes(1, K * D, 1024, length),
        "dss": lambda: tables_of_modes(D, K, 64, length),
        "s4d": lambda: tables_of_modes(D, K, 32, length),
        "s4": lambda: tables_of_s4(K, length),
        "spade": lambda: tables_of_s4(K, length),
        "liquid_s4": lambda: tables_of_s4(K, length),
        "sgconv": lambda: (5 * K * D * 256, 6 * K * D * 256) if LONGEST == 150 else None,  # pieces of 64, 64 and 128
        "h3": lambda: map(sum, zip(tables_of_modes(D, K, 32, length), products_of_spectra(length, 64), strict=True)),
        "mega": lambda: (0, -2 * length**2 * 64),  # the scores computed again are not counted
        "hyena": lambda: (2 * 3 * length * 3 * D, 4 * 3 * length * 3 * D),  # a convolution over three steps
    }
    if name not in kernels:
        return 0, 0
    parts = (kernels[name](), products_of_spectra(length))
    return tuple(map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize("even", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one length", "the other"])
@pytest.mark.parametrize(("name", "causal"), FORMS, ids=IDS)
def test_models_state_what_is_counted(name, causal, even):
    """Of two lengths, one in either form."""
    model = tiny(find_plugin("models", name), causal, max_length=LONGEST)
    blocks = 1 if name == "spade" else LAYERS
    length = 40 if name == "rnn" else LENGTHS[causal == even]  # rnn: a loop, its first step has no state to answer for
    stated = as_counts(model.flops(length)) + as_counts(model.shared_flops(length))
    seen, apart = counted(model, length), unseen(name, causal, length)
    assert stated.forward == pytest.approx(seen[0] + blocks * apart[0], rel=0.01)
    assert stated.backward == pytest.approx(seen[1] + blocks * apart[1], rel=0.01)


SOME = {"bert", "mamba2", "convbert", "longformer", "xlstm", "squeezebert"}


@pytest.mark.parametrize("name", sorted(SOME))
def test_models_of_transformers_state_what_is_counted(name):
    kind = (FAMILIES | MORE)[name]
    model = built(name, causal=not kind.two_sided, max_length=200)
    length = model.padded_length(20)
    stated, (forward, backward) = costs.count(model, length), counted(model, length)
    assert (stated.forward, stated.backward) == pytest.approx((forward, backward), rel=0.01)


@pytest.mark.slow
def test_transforms_and_scans_of_transformers_by_hand():
    """A Fourier transform's backward is one more; a selective scan's is twice 6 E N a step, E = 2 D, N = 16. Experts'
    products, each step with its own matrix, are linear maps."""
    fnet = built("fnet")
    forward, backward = counted(fnet, 72)
    assert (fnet.flops(72).forward, fnet.flops(72).backward) == pytest.approx((forward, backward), rel=0.01)
    mamba = built("mamba", causal=True)
    stated, (forward, backward) = costs.count(mamba, 20), counted(mamba, 20)
    assert stated.forward == forward + 2 * 6 * 20 * 32 * 16
    assert stated.backward == backward + 2 * 2 * 6 * 20 * 32 * 16
    experts = built("mixtral").flops(50)
    assert experts.backward == 2 * experts.forward


# ----------------------------------------------------------------------------- what kernels do, operation by operation


class Measured(TorchDispatchMode):
    """All that is multiplied or summed: a product of complex numbers is 6, of a complex and a real one 2."""

    total = 0.0
    quiet = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if self.quiet:
            return out
        if packet in UNKNOWN:
            self.total += UNKNOWN[packet](*args, **(kwargs or {}), out_val=out)
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is ATEN.linalg_solve_triangular:
            self.total += args[1].numel() * args[0].shape[-1]
        elif packet is ATEN.mv:
            self.total += 2 * args[0].numel()
        elif packet in (ATEN.mul, ATEN.mul_):
            whole = all(isinstance(x, torch.Tensor) and x.is_complex() for x in args[:2])
            self.total += out.numel() * (6 if whole else 2 if out.is_complex() else 1)
        elif packet in (ATEN.addcmul, ATEN.addcmul_):
            self.total += 2 * out.numel()
        elif packet is ATEN.sum:
            self.total += (args[0].numel() - out.numel()) * (2 if args[0].is_complex() else 1)
        return out


def measured(function, *inputs):
    """Operations of a function and of its gradients."""
    inputs = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    with Measured() as forward:
        y = function(*inputs)
    with Measured() as backward:
        torch.autograd.grad(y, [x for x in inputs if isinstance(x, torch.Tensor)], torch.ones_like(y))
    return forward.total, backward.total


@pytest.mark.parametrize(
    ("shape", "shared", "length"),
    [((1, 8, 64), True, 100), ((2, 16, 64), True, 1500), ((2, 4, 32), False, 60), ((1, 4, 32), False, 1500)],
)
def test_diagonal_kernels_do_what_is_stated(shape, shared, length, monkeypatch):
    """All but the exponentials. Modes do not decay, since on a CPU those that have vanished are left out."""
    K, H, N = shape
    powers = diagonal.powers

    def quietly(*args):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        for mode in modes:
            mode.quiet = True
        try:
            return powers(*args)
        finally:
            for mode in modes:
                mode.quiet = False

    monkeypatch.setattr(diagonal, "powers", quietly)
    modes = (N,) if shared else (H, N)
    W, alpha, theta = torch.randn(K, H, N, 2), torch.zeros(modes), torch.randn(modes)
    found = measured(lambda *inputs: diagonal.vandermonde(*inputs, length), W, alpha, theta)
    stated = diagonal.vandermonde_flops(shape, length, shared=shared)
    assert (stated.forward, stated.backward) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(("K", "length"), [(1, 20), (2, 1000), (1, 5000)])
def test_kernels_of_s4_do_what_is_stated(K, length):
    """One block; several; and blocks that grow by doubling."""
    H, M = 2, 32

    def some(*shape):
        return 0.1 * torch.randn(*shape, dtype=torch.complex128)

    system = (0.9 * torch.exp(some(H, M)), some(H, M), some(H, M), some(H, M), some(K, H, M))
    found = measured(lambda *x: dplr._Krylov.apply(*x, length, torch.float32), *system)
    stated = dplr.dplr_flops(K, H, M, length)
    assert (stated.forward, stated.backward) == pytest.approx(found, rel=0.01)


def test_convolutions_do_what_is_stated():
    B, L, H = 3, 100, 16
    n = transform_length(L, L, True)
    made = measured(lambda kernel: spectrum(kernel, n), torch.randn(2, H, L))
    assert (spectrum_counts(n, H).forward, spectrum_counts(n, H).backward) == pytest.approx(made, rel=1e-6)
    found = measured(
        lambda u, k: convolve(u, k, n), torch.randn(B, L, H), torch.randn(H, n // 2 + 1, dtype=torch.cfloat)
    )
    stated = B * convolution(n, H)
    assert (stated.forward, stated.backward) == pytest.approx(found, rel=0.01)


def test_selective_scans_do_what_is_stated():
    """In one window that is walked through. Sums count their terms, of which the first is not added."""
    L, E, N = 30, 64, 48
    shapes = (1, L, E), (1, L, E), (E, N), (1, L, N), (1, L, N)
    found = measured(selective_scan, *(-torch.rand(shape) for shape in shapes))
    stated = selective_scan_flops(L, E, N)
    assert (stated.forward, stated.backward) == pytest.approx(found, rel=0.01)


def test_moving_averages_do_what_is_stated():
    """Products alone: tables of real exponentials are left out."""
    model = tiny(find_plugin("models", "mega"), causal=False, max_length=1000)
    kernel = model.mixers[0].ema.kernel
    with FlopCounterMode(display=False) as counter:
        y = exponentials(*kernel.weights(), 1000)
    assert kernel.flops(1000).forward == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert kernel.flops(1000).backward == counter.get_total_flops()


# ------------------------------------------------------------------------------------------------------ blocks by hand


def one_block(name, length, **options):
    """A block's operations at D = 16, both passes by kind."""
    model = tiny(find_plugin("models", name), n_layers=1, max_length=LONGEST, **options)
    return (model.flops(length) + model.shared_flops(length)).by_pass()


def twice(forward):
    return {"forward": forward, "backward": 2 * forward}


def test_a_block_of_full_attention_by_hand():
    """L = 10: q, k, v 2·10·16·48, out 2·10·16·16, feed-forward 2·2·10·16·64; q k^T and its product with v."""
    found = one_block("transformer", 10, causal=True)
    assert found == {"linear": twice(15_360 + 5_120 + 40_960), "attention": twice(2 * 2 * 10 * 10 * 16)}


def test_a_block_of_s4d_by_hand():
    """L = 32, causal, so n = 64, 2.5 n log2 n = 960, 33 frequencies. GLU 2·32·16·32. Of the 32 modes of a feature there
    is one block of 32 positions: a table of 6·32 and a product of 4·32 for each."""
    found = one_block("s4d", 32, causal=True)
    assert found["linear"] == twice(32_768)
    assert found["convolution"]["forward"] == 16 * (3 * 960 + 6 * 33)
    assert found["convolution"]["backward"] == 16 * (3 * 960 + 14 * 33) + 16 * 960
    assert found["kernel"]["forward"] == 16 * 32 * (6 + 4) * 32
    assert found["kernel"]["backward"] == 16 * 32 * (6 + 8 + 6 + 4) * 32
    assert set(found) == {"linear", "convolution", "kernel"}


def test_a_block_of_dlr_by_hand():
    """As before, but 1024 modes are shared by 16 features in both directions."""
    found = one_block("dlr", 32, causal=False)
    assert found["kernel"]["forward"] == 1024 * (6 + 4 * 2 * 16) * 32
    assert found["kernel"]["backward"] == 1024 * (6 + 8 * 2 * 16 + 6 + 4) * 32
    assert found["linear"] == twice(32_768)


def test_a_block_of_s5_by_hand():
    """L = 10, 128 complex states: B u 2·10·16·256 and in each of two directions Re C x as much, a multiply-add of
    complex numbers a state and step; half GLU 2·10·16·16."""
    found = one_block("s5", 10, causal=False)
    assert found == {"linear": twice(3 * 81_920 + 5_120), "scan": twice(2 * 8 * 10 * 128)}


def test_a_block_of_deltanet_by_hand():
    """L = 40: two chunks of 20 steps of one head of 16. Products of all pairs of a chunk's steps with keys (also for
    queries, and for w) and values (u and o), and the inverse; of its steps with a square of keys and three states; and
    one state carried on."""
    found = one_block("deltanet", 40, causal=True, feed_forward="none")
    assert found["linear"] == twice(2 * 40 * (16 * 48 + 16 * 1 + 16 * 16))
    assert found["convolution"] == twice(2 * 40 * 4 * 48)
    assert found["attention"]["forward"] == 2 * (2 * 400 * 5 * 16 + 20**3 + 2 * 20 * 4 * 256) + 2 * 16**3
    assert set(found) == {"linear", "convolution", "attention"}


@pytest.mark.parametrize("routing", ["token", "expert"])
def test_experts_backward(routing):
    """All experts' weights get a gradient only from the steps they take."""
    mixer = SwitchFeedForward(8, 24, 4, routing=routing).train()
    x = torch.randn(1, 64, 8, requires_grad=True)
    y = mixer(x, Context(torch.ones(1, 64, dtype=torch.bool), padded=False))
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert mixer.flops(64).backward == counter.get_total_flops()


# --------------------------------------------------------------------------------------------------- encoder and head


@pytest.mark.parametrize(
    ("input", "config"),
    [
        (Values(3), {}),
        (Tokens(7), {}),
        (Values(3), {"positions": "circle"}),
        (Values(17 * 17, frame=(17, 17)), {"frame_encoder": "cnn", "frame_features": 30}),
    ],
    ids=["values", "tokens", "circle", "frames"],
)
def test_data_get_no_gradient(input, config):
    encoder = Encoder(input, D, EncoderConfig(**config))
    x = torch.zeros(1, 5, dtype=torch.long) if isinstance(input, Tokens) else torch.randn(1, 5, input.channels)
    context = Context(torch.ones(1, 5, dtype=torch.bool), padded=False)
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as forward:
        y = encoder(x, None, context)
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as backward:
        y.sum().backward()
    assert encoder.flops(5).forward == forward.get_total_flops()
    assert encoder.flops(5).backward == backward.get_total_flops()


def test_a_head_by_hand():
    """Two sequences of a pair, [u, v, u - v, u v] of 4·16 numbers to 16, and to 3 classes."""
    head = Head(D, Output("cross_entropy", per_step=False, size=1, classes=3, sequences=2), HeadConfig(mlp=True))
    assert 2 * head.flops(100) == Counts.of("linear", 2 * 64 * 16 + 2 * 16 * 3)


# ----------------------------------------------------------------------------------------------------------- controls


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("changes", [{}, {"finetune__freeze": True}, {"finetune__joint": 0.5}], ids=str)
@pytest.mark.parametrize("task", [{"name": "digits", "max_rows": 24}, {"name": "digits", "pixels": "values"}], ids=str)
def test_an_optimiser_step_as_counted(tmp_path, task, changes, mlp):
    """Of a frozen network forward alone, but for the head, whose features need no gradient; of a joint loss two passes,
    the second with answers where steps are hidden."""
    one = loaded(tmp_path, task=task, finetune__head={"pool": "mean", "mlp": mlp}, **changes)
    setup = build_stage(Job(one, "finetune", 0))
    setup.model.hides_steps(setup.hides)
    runtime = Runtime(Settings(quiet=True, cpu=True))
    learner = Learner(setup, setup.model, adamw(setup.model, setup.train, runtime.device), runtime)
    rows = np.arange(8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter:
        result = learner._step(rows, learner.micro_batches(rows, 0, 8), 0)
    assert result.operations.total == pytest.approx(counter.get_total_flops())
    planned = 8 * mean_flops(setup).total
    assert planned == pytest.approx(result.operations.total, rel=0.05 if "finetune__joint" in changes else 1e-12)


# ------------------------------------------------------------------------------------------------------------- counts


def test_counts_add_up():
    a, b = Counts.of("linear", 2.0), Counts.of("scan", 3.0, 4.0)
    found = sum([a, 2 * b, b / 2, a])
    assert found.by_pass() == {"linear": twice(4.0), "scan": {"forward": 7.5, "backward": 10.0}}
    assert found.by_kind() == {"linear": 12.0, "scan": 17.5}
    assert (found.forward, found.backward, found.total, float(found)) == (11.5, 18.0, 29.5, 11.5)
    assert found - found == Counts() and Counts().by_kind() == {}
    assert {copy.deepcopy(found), pickle.loads(pickle.dumps(found))} == {found}
    with pytest.raises(ValueError, match="not conv"):
        Counts.of("conv", 1.0)
    assert set(KINDS) >= set(found.by_kind())


def test_a_number_is_a_forward_pass():
    assert as_counts(3.0) == Counts.of("other", 3.0, 6.0) == Counts() + 3.0 == 3.0 + Counts()
    assert as_counts(2, "kernel") == Counts.of("kernel", 2.0, 4.0)
    assert linear_flops(torch.nn.Linear(2, 3), 5) + 1 == linear(5, 2, 3) + Counts.of("other", 1.0)
    for wrong in (None, "3", [3.0]):
        with pytest.raises(TypeError, match="Counts"):
            as_counts(wrong)


@pytest.mark.parametrize("backward", ["0.0", "-1.0", "float('nan')"])
def test_a_backward_pass_without_operations_is_caught(tmp_path, backward):
    path = tmp_path / "mine.py"
    path.write_text(
        '"""One map."""\n'
        "from torch import nn\n"
        "from spt.models.base import Backbone, BackboneConfig, Counts, Mixer\n"
        "class Config(BackboneConfig):\n    pass\n"
        "class Map(Mixer):\n"
        "    def __init__(self, d):\n        super().__init__()\n        self.map = nn.Linear(d, d)\n"
        "    def forward(self, x, context):\n        return self.map(x)\n"
        f"    def flops(self, length):\n        return Counts.of('linear', 512.0 * length, {backward})\n"
        "def build(config):\n    return Backbone(config, lambda: [Map(config.d_model)])\n"
    )
    assert "for the backward pass" in states_its_operations(find_plugin("models", str(path)), causal=False)
