"""Diagonal models and SGConv: their kernels are the sums they should be, at every length, and so are the gradients."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from reference_weights import export_reference, import_reference

from spt.checks import model_contract
from spt.checks.model_contract import tiny
from spt.config.job import without_paths
from spt.config.plugins import find_plugin
from spt.config.recipe import Part
from spt.models import dlr, dss, s4d, sgconv
from spt.models.base import Context
from spt.models.ops.discretise import bilinear, parameter_for, positive, zoh
from spt.models.ops.vandermonde import complex_vandermonde, softmax_vandermonde, vandermonde, vandermonde_flops

ROOT = Path(__file__).resolve().parent.parent


def by_definition(W, alpha, theta, lags):
    """sum_n W_n exp(l log lambda_n), complex; one power per mode and lag."""
    log = torch.complex(alpha.double(), theta.double())
    powers = torch.exp(log[..., None] * torch.as_tensor(lags, dtype=torch.float64))
    pair = torch.view_as_complex(W.double().contiguous())
    return torch.einsum("khn,nl->khl" if alpha.dim() == 1 else "khn,hnl->khl", pair, powers)


def modes(K, H, N, shared, dtype=torch.float32, seed=0, decay=(1e-4, 0.3)):
    generator = torch.Generator().manual_seed(seed)
    shape = (N,) if shared else (H, N)
    W = torch.randn(K, H, N, 2, generator=generator, dtype=dtype) / N
    low, high = map(math.log, decay)
    alpha = -torch.exp(low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype))
    theta = 2 * math.pi * torch.rand(shape, generator=generator, dtype=dtype)
    return W.requires_grad_(), alpha.requires_grad_(), theta.requires_grad_()


def off(ours, theirs):
    """Largest difference relative to the largest entry."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300))


def wide(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@settings(max_examples=60)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 9), st.integers(1, 700), st.booleans(), st.integers(0, 99))
def test_kernel_and_gradients_by_definition(K, H, N, length, shared, seed):
    given_modes = modes(K, H, N, shared, torch.float64, seed)
    cotangent = torch.randn(K, H, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    kernel = vandermonde(*given_modes, length)
    wanted = by_definition(*given_modes, range(length)).real
    assert kernel.shape == (K, H, length) and off(kernel, wanted) < 1e-11
    ours = torch.autograd.grad(kernel, given_modes, cotangent)
    theirs = torch.autograd.grad(wanted, given_modes, cotangent)
    assert max(map(off, ours, theirs)) < 1e-9


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_gradcheck(shared, length):
    given_modes = modes(1, 2, 2, shared, torch.float64)
    torch.autograd.gradcheck(lambda *m: vandermonde(*m, length), given_modes)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("length", [1, 7, 1000, 16384])
def test_float32_is_exact_to_one_in_a_million(shared, length):
    """Against float64, relative to the maximum; also where most modes have vanished long before the end."""
    given_modes = modes(2, 8, 40, shared)
    cotangent = torch.randn(2, 8, length, generator=torch.Generator().manual_seed(1))
    kernel = vandermonde(*given_modes, length)
    exact = wide(given_modes)
    wanted = by_definition(*exact, range(length)).real
    assert kernel.dtype == torch.float32 and off(kernel, wanted) < 1e-6
    ours = torch.autograd.grad(kernel, given_modes, cotangent)
    theirs = torch.autograd.grad(wanted, exact, cotangent.double())
    assert all(off(a, b) < 1e-6 or (length == 1 and not b.any()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_a_million_steps(shared):
    """Angles of 6.6 million radians, where a float32 is off by half a radian."""
    length = 1 << 20
    given_modes = modes(1, 2, 12, shared, decay=(1e-8, 1e-3))
    lags = torch.cat([torch.arange(50), torch.randint(length, (2000,)), torch.arange(length - 50, length)])
    kernel, exact = vandermonde(*given_modes, length), wide(given_modes)
    wanted = by_definition(*exact, lags).real
    assert off(kernel[..., lags], wanted) < 1e-6
    ours = torch.autograd.grad(kernel[..., lags].sum(), given_modes)
    theirs = torch.autograd.grad(wanted.sum(), exact)
    assert max(map(off, ours, theirs)) < 2e-6


def test_both_parts():
    given_modes = modes(2, 3, 5, True, torch.float64)
    real, imag = complex_vandermonde(*given_modes, 300)
    wanted = by_definition(*given_modes, range(300))
    assert off(real, wanted.real) < 1e-12 and off(imag, wanted.imag) < 1e-12


def test_kernels_stay_float32_under_autocast():
    given_modes = modes(1, 2, 8, True)
    with torch.autocast("cpu", torch.bfloat16):
        kernel = vandermonde(*given_modes, 50)
        kernel.sum().backward()
    assert kernel.dtype == torch.float32 and off(kernel, by_definition(*given_modes, range(50)).real) < 1e-6
    plain = torch.autograd.grad(vandermonde(*given_modes, 50).sum(), given_modes)
    assert all(torch.equal(m.grad, grad) for m, grad in zip(given_modes, plain, strict=True))


def test_operations_are_those_of_the_product():
    assert vandermonde_flops((2, 64, 256), 1024, shared=True).forward == pytest.approx(4 * 128 * 256 * 1024, rel=0.05)
    assert 4 * 64 * 32 * 1024 <= vandermonde_flops((1, 64, 32), 1024, shared=False).forward < 6 * 64 * 32 * 1024


# Models.

KERNELS = {
    "s4d zoh": (s4d, s4d.S4DKernel, {"d_state": 8}),
    "s4d bilinear": (s4d, s4d.S4DKernel, {"d_state": 8, "disc": "bilinear", "A_init": "lin", "n_ssm": 2}),
    "s4d dss": (s4d, s4d.S4DKernel, {"d_state": 8, "disc": "dss", "A_init": "quad"}),
    "s4d real": (s4d, s4d.S4DKernel, {"d_state": 4, "A_init": "real", "is_real": True, "dt_transform": "softplus"}),
    "s4d untied": (s4d, s4d.S4DKernel, {"d_state": 8, "dt_tie": False, "A_init": "inv", "real_transform": "relu"}),
    "s4d band": (s4d, s4d.S4DKernel, {"d_state": 8, "A_init": "random", "bandlimit": 0.3}),
    "dss exp": (dss, dss.DSSKernel, {"d_state": 6}),
    "dss exp-re-im": (dss, dss.DSSKernel, {"d_state": 6, "version": "exp-re-im"}),
    "dss exp-no-scale": (dss, dss.DSSKernel, {"d_state": 6, "version": "exp-no-scale", "Lambda_init": "lin"}),
    "dss softmax": (dss, dss.DSSKernel, {"d_state": 6, "version": "softmax", "Lambda_init": "randn"}),
    "dlr": (dlr, dlr.DLRKernel, {"d_state": 6}),
    "dlr imag": (dlr, dlr.DLRKernel, {"d_state": 6, "cast": "imag", "angle_init": "randn"}),
    "dlr sum": (dlr, dlr.DLRKernel, {"d_state": 6, "cast": "sum", "decay_max": 0.5}),
    "dlr prod": (dlr, dlr.DLRKernel, {"d_state": 6, "cast": "prod"}),
    "dlr real-prod": (dlr, dlr.DLRKernel, {"d_state": 6, "cast": "real-prod"}),
    "dlr circle": (dlr, dlr.DLRKernel, {"d_state": 6, "version": "imag"}),
    "dlr circle, real weights": (dlr, dlr.DLRKernel, {"d_state": 6, "version": "imag_W_real"}),
    "dlr-r": (dlr, dlr.DLRKernel, {"d_state": 6, "version": "real_W_real"}),
    "sgconv": (sgconv, sgconv.SGConvKernel, {"kernel_dim": 4, "factor_max": 4.0}),
    "sgconv dlr": (sgconv, sgconv.SGConvKernel, {"kernel_dim": 4, "variant": "dlr", "alpha_min": 0.3}),
}


def kernel_of(name, width=4, **more):
    module, kind, options = KERNELS[name]
    torch.manual_seed(0)
    options = {"d_model": width, "max_length": 100, **options, **more}
    return kind(module.Config(**options)).double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_a_short_kernel_is_the_beginning_of_a_long_one(name, causal):
    kernel = kernel_of(name, causal=causal)
    whole = kernel(100)
    assert whole.shape == (1 if causal else 2, 4, 100) and whole.isfinite().all()
    for length in (1, 7, 63):
        assert off(kernel(length), whole[..., :length]) < 1e-10


@pytest.mark.parametrize("name", [name for name in KERNELS if "sgconv" not in name])
def test_a_limited_kernel(name):
    kernel = kernel_of(name, max_kernel_length=30)
    assert kernel.limit == 30 and kernel(100).shape[-1] == 30 and kernel(20).shape[-1] == 20
    if name not in ("s4d dss", "dss softmax"):  # these are normalised over what they are cut to
        assert off(kernel(100), kernel_of(name)(30)) < 1e-10


@pytest.mark.parametrize("name", [name for name in KERNELS if "sgconv" not in name])
def test_steps_are_the_convolution(name):
    kernel = kernel_of(name, causal=True)
    if name in ("s4d dss", "dss softmax", "dlr prod", "dlr real-prod"):
        assert not kernel.recurrent
        return
    u = torch.randn(2, 4, 60, dtype=torch.float64)
    taps, system = kernel(60)[0], kernel.system()
    state = kernel.initial_state(2, system)
    for t in range(60):
        y, state = kernel.step(u[..., t], state, system)
        wanted = (u[..., : t + 1].flip(-1) * taps[:, : t + 1]).sum(-1)
        assert off(y, wanted) < 1e-10
    assert state.shape == kernel.initial_state(2, system).shape


@pytest.mark.parametrize("name", KERNELS)
def test_there_and_back_to_the_published_parameters(name):
    kernel = kernel_of(name)
    raw = export_reference(kernel)
    again = import_reference(kernel, {name: tensor.detach() for name, tensor in raw.items()})
    mine = kernel.state_dict()
    assert set(again) == set(mine)
    kept = [name for name in mine if name != "norm" or "kernel_norm" in raw]  # else it is measured
    assert all(torch.equal(again[name], mine[name]) for name in kept)


@pytest.mark.parametrize("name", KERNELS)
def test_training_of_the_parameters(name):
    """Rates name what is there; the state space does not decay, but for C of S4D and SGConv's weights."""
    kernel = kernel_of(name)
    assert set(kernel.param_groups) == {name for name, _ in kernel.named_parameters()}
    decays = {name for name, group in kernel.param_groups.items() if group.weight_decay}
    assert decays == ({"C"} if name.startswith("s4d") else {"pieces"} if name.startswith("sgconv") else set())


def test_the_published_quirk_of_the_decay():
    groups = kernel_of("dlr", decay_uses_ssm_lr=False).param_groups
    assert groups["log_Lambda_re"].lr is None and not groups["log_Lambda_re"].weight_decay
    assert groups["log_Lambda_im"].lr == groups["W"].lr == 1e-4 == kernel_of("dlr").param_groups["log_Lambda_re"].lr


def test_a_rate_of_its_own_for_lambda_of_dss():
    groups = kernel_of("dss exp", ssm_lr=5e-4, Lambda_lr=1e-4).param_groups
    found = {name: group.lr for name, group in groups.items()}
    assert found == {"log_dt": 5e-4, "W": 5e-4, "Lambda_log_neg_re": 1e-4, "Lambda_im": 1e-4}
    groups = kernel_of("dss exp", ssm_lr=None, Lambda_lr=1e-4).param_groups
    assert (groups["Lambda_im"].lr, groups["W"].lr) == (1e-4, None)


@pytest.mark.parametrize("cast", ["real", "imag", "sum", "prod", "real-prod"])
def test_casts_of_dlr(cast):
    kernel = kernel_of("dlr", cast=cast, width=5)
    kappa = by_definition(kernel.W, *kernel._log_lambda(), range(50))
    wanted = {
        "real": kappa.real,
        "imag": kappa.imag,
        "sum": kappa.real + kappa.imag,
        "prod": kappa.real * kappa.imag,
        "real-prod": torch.cat([kappa.real[:, :2], (kappa.real * kappa.imag)[:, 2:]], dim=1),
    }
    assert off(kernel(50), wanted[cast]) < 1e-11


def test_a_product_is_a_dlr_with_products_of_modes():
    """Re k Im k = Im(k²) / 2: the imaginary cast of N² modes lambda_m lambda_n."""
    kernel = kernel_of("dlr", cast="prod", causal=True)
    alpha, theta = kernel._log_lambda()
    W = torch.view_as_complex(kernel.W.detach())
    pairs = (W[..., :, None] * W[..., None, :]).flatten(2) / 2
    log = ((alpha[:, None] + alpha).flatten(), (theta[:, None] + theta).flatten())
    assert off(kernel(80), by_definition(torch.view_as_real(pairs), *log, range(80)).imag) < 1e-11


def test_any_kernel_of_length_n_is_a_dlr():
    """Without decay the initial modes are a Fourier basis (DLR, section 2): a shift by 37 of 64 is one kernel."""
    config = dlr.Config(d_model=1, d_state=64, causal=True, version="imag", max_length=64)
    kernel = dlr.DLRKernel(config).double()
    with torch.no_grad():
        kernel.W.copy_(torch.view_as_real(torch.exp(-1j * kernel.log_Lambda_im * 37) / 64)[None, None])
    wanted = torch.zeros(1, 1, 64, dtype=torch.float64)
    wanted[..., 37] = 1
    assert (kernel(64) - wanted).abs().max() < 1e-5  # the angles are rounded to float32


def test_initial_dlr():
    config = dlr.Config(d_model=3, d_state=4096, decay_min=1e-3, decay_max=0.1, max_length=9)
    kernel = dlr.DLRKernel(config)
    decay = 2 * kernel.log_Lambda_re.detach() ** 2
    assert 1e-3 * 0.999 < decay.min() < 1.05e-3 and 0.095 < decay.max() < 0.1001
    assert decay.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.1)
    assert (kernel.log_Lambda_im.double() - torch.arange(4096) * (2 * math.pi / 4096)).abs().max() < 1e-6
    assert kernel.W.std().item() == pytest.approx(1 / 4096, rel=0.05)


def test_initial_dss():
    """HiPPO's frequencies at twice the size are those of the skew part, positive, the largest first."""
    kernel = dss.DSSKernel(dss.Config(d_model=2, d_state=32, max_length=9))
    frequencies = kernel.Lambda_im
    assert (frequencies > 0).all() and (frequencies[1:] < frequencies[:-1]).all()
    assert frequencies[0].item() == pytest.approx(1303, abs=1) and 0.2 < frequencies[-1] < 0.6


@pytest.mark.parametrize("rule", [zoh, bilinear])
def test_discretisation_near_zero(rule):
    """(e^z - 1) / A loses no digit where A is small, and its gradient stays finite at A = 0."""
    A = torch.tensor([0.0, -1e-12 + 1e-13j, -1e-6 + 2e-6j, -1e-3j, -0.5 + 3j], dtype=torch.complex128).requires_grad_()
    log, scale = rule(A, torch.tensor(0.1, dtype=torch.float64))
    terms = [(0.1 * A) ** n / math.factorial(n + 1) for n in range(20)]
    series = 0.1 * sum(terms) if rule is zoh else 0.1 / (1 - 0.05 * A)
    assert (scale - series).abs().max() < 1e-16
    assert (log - (0.1 * A if rule is zoh else 2 * torch.atanh(0.05 * A))).abs().max() < 1e-15
    (log.real.sum() + scale.real.sum()).backward()
    assert A.grad.isfinite().all()


@pytest.mark.parametrize("transform", ["exp", "relu", "none", "softplus", "sigmoid"])
def test_transforms(transform):
    values = torch.tensor([1e-9, 1e-4, 0.03, 0.5, 0.9], dtype=torch.float64)
    again = positive(parameter_for(values, transform), transform)
    assert torch.allclose(again, values.clamp_min(1e-4), rtol=1e-9)


def test_the_minimal_s4d_has_conjugate_modes():
    """Re sum C B e^(lz) is the same with + i and the conjugate C."""
    kernel = kernel_of("s4d zoh", causal=True)
    raw = {
        "log_dt": torch.linspace(-5, -3, 4, dtype=torch.float64),
        "log_A_real": torch.zeros(4, 4, dtype=torch.float64),
        "A_imag": torch.arange(16, dtype=torch.float64).view(4, 4),
        "C": torch.randn(4, 4, 2, dtype=torch.float64),
    }
    kernel.load_state_dict(import_reference(kernel, raw))
    dt, A = raw["log_dt"].exp()[:, None], -raw["log_A_real"].exp() + 1j * raw["A_imag"]
    weights = 2 * torch.view_as_complex(raw["C"]) * (torch.exp(dt * A) - 1) / A
    z = dt * A
    assert off(kernel(90), by_definition(torch.view_as_real(weights)[None], z.real, z.imag, range(90)).real) < 1e-11


def test_a_coarser_signal():
    """`rate` 2 makes the kernel of a signal sampled half as often: of the discretised system with twice the step."""
    kernel = kernel_of("s4d zoh")
    kernel.rate = 2.0
    coarse = kernel(50)
    kernel.rate = 1.0
    with torch.no_grad():
        kernel.inv_dt += math.log(2)
    assert off(coarse, kernel(50)) < 1e-12


def test_bandlimit():
    """Modes that turn faster than the limit have no weight."""
    options = {"A_init": "lin", "dt_min": 0.1, "dt_max": 0.1, "d_state": 32}
    some, none, every = (kernel_of("s4d zoh", bandlimit=b, **options) for b in (0.5, 1e-9, 100.0))
    turns = 0.1 * some.A_imag / (2 * math.pi)
    kept = some._discrete()[2].abs() > 0
    assert torch.equal(kept[0], turns < 0.25) and kept.any() and not kept.all()
    assert off(every(9), kernel_of("s4d zoh", **options)(9)) == 0
    assert not none(9)[0].isclose(every(9)[0]).any()


def test_a_softmax_that_grows():
    """Modes with a positive real part neither overflow nor depend on how long the sequence of the moment is."""
    kernel = dss.DSSKernel(
        dss.Config(d_model=2, d_state=4, version="softmax", max_length=5000, dt_min=0.1, dt_max=0.1, causal=True)
    )
    with torch.no_grad():
        kernel.Lambda[::2, 0] = 0.7
    whole = kernel(5000)
    whole.sum().backward()
    assert whole.isfinite().all() and kernel.Lambda.grad.isfinite().all()
    assert off(kernel(4000), whole[..., :4000]) < 1e-5
    assert whole[..., -50:].abs().max() > 1e-3  # the growing modes live at the far end
    assert kernel(6000).shape[-1] == 5000


def test_softmax_by_definition():
    """With modes of either sign; the shift that keeps powers small is a constant to the gradient, as published."""
    torch.manual_seed(0)
    W = torch.randn(2, 3, 4, dtype=torch.complex128, requires_grad=True)
    z = torch.complex(torch.tensor([-0.3, 0.2, -0.1, 0.4], dtype=torch.float64), torch.arange(4.0, dtype=torch.float64))
    z = (z * torch.tensor([[0.5], [1.0], [1.5]])).requires_grad_()
    L, length = 30, 21
    shift = (z.real > 0) * z.detach() * (L - 1)
    wanted = (W[..., None] * torch.exp(z[..., None] * torch.arange(length) - shift[..., None])).sum(2).real
    found = softmax_vandermonde(W, z, L, length, torch.float64)
    assert off(found, wanted) < 1e-12
    cotangent = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(kernel, (W, z), cotangent) for kernel in (found, wanted))
    assert all((a - b).abs().max() < 1e-11 * b.abs().max() for a, b in zip(ours, theirs, strict=True))


def test_sgconv_is_measured_once():
    """Of unit norm when built, also with random weights; later changes to the weights leave the norm alone."""
    for initialisation in ("structured", "random"):
        torch.manual_seed(1)
        config = sgconv.Config(
            d_model=4, n_layers=1, kernel_dim=8, max_length=128, initialisation=initialisation, causal=True
        )
        model = sgconv.build(config)
        kernel = model.mixers[0].kernel
        assert torch.allclose(kernel(128).norm(dim=-1), torch.ones(1, 4), atol=1e-5)
        with torch.no_grad():
            kernel.pieces *= 3
        assert torch.allclose(kernel(128).norm(dim=-1), torch.full((1, 4), 3.0), atol=1e-4)
        other = sgconv.build(config)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.mixers[0].kernel(128), kernel(128))


def test_pieces_of_sgconv():
    """Lengths d, d, 2d, 4d, ...; each weighs half of the one before it."""
    kernel = sgconv.SGConvKernel(sgconv.Config(d_model=1, kernel_dim=4, max_length=30, causal=True))
    with torch.no_grad():
        kernel.pieces.fill_(1.0)
    taps = kernel(30)[0, 0] * kernel.norm
    assert kernel.pieces.shape[0] == 4 and taps.shape[-1] == 30
    wanted = torch.tensor([8.0] * 4 + [4.0] * 4 + [2.0] * 8 + [1.0] * 14)
    assert torch.allclose(taps.flatten(), wanted)


@pytest.mark.parametrize(
    ("module", "options", "complaint"),
    [
        (s4d, {"d_state": 7}, "d_state 7 is odd"),
        (s4d, {"d_model": 10, "n_ssm": 4}, "d_model 10 is not a multiple of n_ssm 4"),
        (s4d, {"dt_min": 1.0}, "dt_min 1.0 is larger than dt_max 0.1"),
        (s4d, {"is_real": True}, "set A_init: real"),
        (dss, {"dt_min": 1.0}, "dt_min 1.0 is larger"),
        (dss, {"version": "exp-re-im", "Lambda_init": "lin"}, "begins at zero"),
        (dss, {"version": "exp-re-im", "Lambda_init": "randn"}, "negative"),
        (dss, {"softmax_length": 4}, "softmax_length is for version softmax"),
        (dlr, {"decay_min": 1.0}, "decay_min 1.0 is larger than decay_max 0.1"),
        (dlr, {"decay_min": 0.0}, "use version imag"),
        (dlr, {"version": "real_W_real", "cast": "prod"}, "no imaginary part"),
        (sgconv, {"alpha_min": 2.0}, "alpha_min 2.0 is larger"),
        (sgconv, {"alpha_max": 2.0}, "alpha_max has no effect with variant gconv"),
        (sgconv, {"variant": "dlr", "factor_min": 1.5}, "factor_min has no effect with variant dlr"),
    ],
)
def test_options_that_contradict_each_other(module, options, complaint):
    with pytest.raises(ValidationError, match=complaint):
        module.Config(**options)


@pytest.mark.parametrize("module", [s4d, dss, dlr, sgconv])
def test_a_batch_may_be_longer_than_the_kernel(module):
    """A model's answer where its longest kernel is shorter than the sequence: the convolution with what there is."""
    options = {} if module is sgconv else {"max_kernel_length": 11}
    model = module.build(module.Config(d_model=4, n_layers=1, max_length=40, **options)).eval()
    x = torch.randn(2, 40, 4)
    y = model(x, Context(torch.ones(2, 40, dtype=torch.bool), padded=False))
    assert y.shape == x.shape and y.isfinite().all()


def test_a_kernel_with_as_many_pieces_ends_where_it_was_trained_to_end():
    """In a network that is built for longer rows, what lies beyond has random weights."""
    trained, longer = (sgconv.SGConvKernel(sgconv.Config(d_model=4, max_length=n, kernel_dim=64)) for n in (100, 120))
    longer.load_state_dict(trained.state_dict())
    assert longer(120).shape[-1] == 120
    longer.for_longer(trained)
    assert torch.equal(longer(120), trained(120)) and longer.limit == trained.limit == trained(120).shape[-1] == 100


MILLION = """
import torch
torch.set_num_threads(2)
from spt.models.dlr import Config, DLRKernel
from spt.runtime.memory import peak_memory
torch.manual_seed(0)
kernel = DLRKernel(Config(d_model=32, d_state=4096, causal=True, decay_min=1e-5, decay_max=1e-5, max_length=1 << 20))
taps = kernel(1 << 20)
taps.backward(torch.randn_like(taps))
assert all(p.grad.isfinite().all() for p in kernel.parameters())
print(peak_memory(torch.device("cpu")))
"""


@pytest.mark.slow
def test_a_million_steps_within_two_gigabytes():
    """The process's largest memory, forward and backward, of the DLR paper's longest shift task."""
    done = subprocess.run([sys.executable, "-c", MILLION], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2e9


@torch.no_grad()
def test_a_dlr_looks_at_padding_only_when_asked_to():
    """Without mask_padding, as published; runs from before there was the option keep their keys."""
    x = model_contract.sequence(2, 9)
    padded = Context(torch.arange(9) < torch.tensor([[9], [4]]), padded=True)
    component = find_plugin("models", "dlr")
    hidden, seen = (tiny(component, causal=False, d_state=8, mask_padding=mask) for mask in (True, False))
    torch.testing.assert_close(seen(x, padded), seen(x, model_contract.all_valid(x)))
    assert not torch.allclose(hidden(x, padded)[1, :4], seen(x, padded)[1, :4], atol=1e-3)
    parts = [Part(name="dlr", d_model=4, W_scale=None, mask_padding=mask) for mask in (True, False)]
    before = {"d_model": 4, "W_scale": None}
    assert [without_paths("models", part) for part in parts] == [before, {**before, "mask_padding": False}]


@pytest.mark.parametrize("length", [64, 128, 129, 192, 256, 300, 576])
def test_a_kernel_of_sgconv_is_at_least_as_long_as_the_input(length):
    """DLR paper, A.6; its code's number of pieces is one too few where the pieces are a power of two and one."""
    for variant in ("gconv", "dlr"):
        kernel = sgconv.SGConvKernel(sgconv.Config(d_model=2, variant=variant, kernel_dim=64, max_length=length))
        assert kernel(length).shape[-1] == length
    for pieces in (4, 16, 64, 256):  # as in the paper's Table 2: nothing changes
        kernel = sgconv.SGConvKernel(sgconv.Config(d_model=2, variant="dlr", kernel_dim=4, max_length=4 * pieces))
        assert len(kernel.pieces) == math.ceil(1 + math.log2(pieces - 1))
