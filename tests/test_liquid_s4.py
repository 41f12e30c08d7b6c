"""Liquid-S4: its terms against the paper's recurrence and the published code's factors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from spt.models import liquid_s4
from spt.models.longconv import LongConvolution
from spt.models.ops import dplr

ARRAYS = Path(__file__).parent / "arrays"
B, L, H, N = 2, 13, 4, 6


def liquid(degree=2, causal=True, **options):
    torch.manual_seed(3)
    config = liquid_s4.Config(d_model=H, d_state=N, degree=degree, causal=causal, n_ssm=H, **options)
    layer = liquid_s4.LiquidS4(config).double()
    with torch.no_grad():
        for parameter in layer.kernel.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def dense(layer):
    """Abar (H, N, N), Bbar (H, N) and C (K, H, N), over both modes of every pair."""
    system = dplr.discretise(layer.kernel.state_space())
    F, g, r, Bbar, C = (torch.cat([x, x.conj()], -1) for x in system)
    return torch.diag_embed(F) - g[..., :, None] * r[..., None, :], Bbar, C


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_products_that_end_now_have_the_recurrences_factors(degree):
    """Of the paper's recurrence everything but the terms with a power of Abar in a product: all of it for two steps."""
    layer, u = liquid(degree), torch.randn(B, 2, H, dtype=torch.float64)
    A, Bbar, C = dense(layer)
    x, expected = torch.zeros(B, H, N, dtype=torch.complex128), []
    for t in range(2):
        moved = torch.einsum("hnm,bhm->bhn", A, x) + Bbar * (u[:, t] * x.sum(-1))[..., None]
        x = moved + Bbar * u[:, t, :, None]
        expected.append((C[0] * x).sum(-1).real + layer.D * u[:, t])
    assert torch.allclose(layer.mix_sequence(u), torch.stack(expected, 1), rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_layer_is_s4_and_its_products(degree, causal):
    layer, u = liquid(degree, causal), torch.randn(B, L, H, dtype=torch.float64)
    _, Bbar, C = dense(layer)
    present, s = (C * Bbar).sum(-1).real, Bbar.sum(-1).real
    expected = LongConvolution.mix_sequence(layer, u)
    for t in range(L):
        for p in range(2, degree + 1):
            for k in range(len(C)):
                steps = range(t + 1, t + p + 1) if k else range(t - p + 1, t + 1)
                if min(steps) >= 0 and max(steps) < L:
                    product = torch.stack([u[:, j] for j in steps]).prod(0)
                    expected[:, t] = expected[:, t] + present[k] * s ** (p - 1) * product
    ours = layer.mix_sequence(u)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12 * float(expected.detach().abs().max()))
    weight = torch.cos(torch.arange(H, dtype=torch.float64))
    kernel = [parameter for name, parameter in layer.named_parameters() if not name.startswith("output")]
    grads = [torch.autograd.grad((y * weight).sum(), kernel) for y in (ours, expected)]
    for mine, theirs in zip(*grads, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("causal", [True, False])
def test_liquid_s4_has_the_published_factors(causal):
    """tests/arrays/README.md says how the arrays were made. Theirs adds u_t u_{t-1} in reverse order of time, for the
    second direction in time's own order."""
    everything = {key: torch.from_numpy(array) for key, array in np.load(ARRAYS / "liquid_s4.npz").items()}
    prefix = "uni." if causal else "bi."
    arrays = {key.removeprefix(prefix): array for key, array in everything.items() if key.startswith(prefix)}
    layer, u = liquid(causal=causal, max_kernel_length=37), everything["u"].mT
    theirs = {key.removeprefix("kernel.kernel."): array for key, array in arrays.items()}
    conjugate = torch.tensor([1, -1])
    state = layer.state_dict() | {
        "D": theirs["D"][0],
        "kernel.inv_dt": theirs["log_dt"][:, None],
        "kernel.A_real": theirs["inv_w_real"],
        "kernel.A_imag": theirs["w_imag"],
        "kernel.P": theirs["P"][0],
        "kernel.B": theirs["B"][0] * conjugate,
        "kernel.C": theirs["C"] * conjugate,
    }
    layer.load_state_dict(state)
    s4 = LongConvolution.mix_sequence(layer, u).detach()
    assert (s4.mT - arrays["y_s4"]).abs().max() < 1e-12 * s4.abs().max()
    products = u * torch.nn.functional.pad(u[:, :-1], (0, 0, 1, 0))
    kernel = layer.liquid_kernel().detach()[:, 0]
    terms = kernel[0] * products.flip(1) + (0 if causal else kernel[1] * products)
    assert (terms.mT - (arrays["y"] - arrays["y_s4"])).abs().max() < 1e-12 * terms.abs().max()
    if causal:
        assert torch.allclose(layer.mix_sequence(u).detach() - s4, terms.flip(1))
