"""Triton's kernels against the plain form and against float64. test_triton.py runs this file: in Triton's interpreter,
where TRITON_INTERPRET is 1, else on a GPU. The interpreter takes a millisecond an operation, so sizes are small."""

import math
import os

import pytest
import torch
import triton
import triton.language as tl
from test_diagonal import by_definition, modes, wide

from spt.models.ops import backends, dplr, triton_cauchy, triton_vandermonde
from spt.models.ops.hippo import nplr
from spt.models.ops.vandermonde import softmax_vandermonde, vandermonde

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def off(ours, theirs):
    """Largest difference relative to the largest entry."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max().clamp_min(1e-300))


def operations(node):
    """Names of what autograd will go through."""
    seen, waiting = set(), [node]
    while waiting:
        seen.add(node := waiting.pop())
        waiting += [before for before, _ in node.next_functions if before is not None and before not in seen]
    return {node.name() for node in seen}


def with_gradients(name, function, inputs, cotangent):
    with backends.use(name):
        result = function(*inputs)
        assert ("SumsBackward" in operations(result.grad_fn)) == (name == "triton" and result.dtype == torch.float32)
        return result, *torch.autograd.grad(result, inputs, cotangent)


@triton.jit
def power(decay, theta, position, real, imag, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    turns = triton_vandermonde._fixed_point(tl.load(theta + i))
    x, y = triton_vandermonde._powers(tl.load(decay + i), turns, tl.load(position + i))
    tl.store(real + i, x)
    tl.store(imag + i, y)


def test_powers():
    """At every angle, and at lags where a float32 knows nothing of its angle any more."""
    count = 1024
    eighths = torch.arange(64) * math.pi / 4
    theta = torch.cat([eighths, -eighths, torch.linspace(-50, 50, count - 128, dtype=torch.float64)]).double()
    position = torch.cat([torch.arange(512), (1 << 20) - torch.arange(256), (1 << 24) - torch.arange(256)])
    decay = torch.where(position < 512, -0.01, 0.0)
    given = [x.to(DEVICE) for x in (decay, theta, position)]
    real, imag = torch.empty(2, count, device=DEVICE).unbind()
    power[(1,)](*given, real, imag, COUNT=count)
    turns = theta / (2 * math.pi)  # in whole numbers, without an error
    exact = [float((int(t * 2**60) * int(l)) % 2**60) / 2**60 for t, l in zip(turns, position, strict=True)]
    expected = torch.polar(torch.exp(decay.double() * position), 2 * math.pi * torch.tensor(exact, dtype=torch.float64))
    assert (torch.complex(real, imag).cpu() - expected).abs().max() < 4e-7


@pytest.mark.parametrize(
    ("K", "H", "N", "shared", "length"),
    [
        *(
            (1, 1, 1, False, 1),
            (1, 2, 1, False, 7),
            (2, 2, 33, False, 64),
            (3, 2, 3, False, 65),
            (1, 3, 40, False, 131),
        ),
        *((1, 1, 3, True, 5), (2, 9, 17, True, 65), (1, 67, 33, True, 70)),
    ],
)
def test_vandermonde(K, H, N, shared, length):
    """One state, odd sizes, several tiles of rows, modes and positions; sums and matrix products."""
    given = [x.detach().to(DEVICE).requires_grad_() for x in modes(K, H, N, shared)]
    cotangent = torch.randn(K, H, length, device=DEVICE)

    def function(*inputs):
        return vandermonde(*inputs, length)

    ours, plain = (with_gradients(name, function, given, cotangent) for name in ("triton", "torch"))
    exact = wide(given)
    kernel = by_definition(*(x.cpu() for x in exact), range(length)).real.to(DEVICE)
    expected = kernel, *torch.autograd.grad(kernel, exact, cotangent.double())
    for a, b, c in zip(ours, plain, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if c.any():
            assert off(a, c) < 1e-6 and off(a, b) < 2e-6
        else:
            assert not a.any()  # one step: modes have no gradient


def test_groups_and_float64_modes():
    """Neighbours that share modes; positions divided among programs; and a view of W that is not contiguous."""
    W = torch.randn(2, 40, 2, 6, device=DEVICE).permute(2, 3, 1, 0).requires_grad_()
    alpha = (-torch.rand(3, 40, dtype=torch.float64, device=DEVICE)).requires_grad_()
    theta = (7 * torch.rand(3, 40, dtype=torch.float64, device=DEVICE)).requires_grad_()
    cotangent = torch.randn(2, 6, 200, device=DEVICE)

    def function(*inputs):
        return vandermonde(*inputs, 200)

    ours, plain = (with_gradients(name, function, (W, alpha, theta), cotangent) for name in ("triton", "torch"))
    assert max(map(off, ours, plain)) < 2e-6
    assert [x.dtype for x in ours] == [torch.float32, torch.float32, torch.float64, torch.float64]


def test_signs_that_are_flags():
    """The imaginary part of a conjugate is negated by a flag, and so may be a gradient."""
    z = torch.complex(-torch.rand(1, 1), torch.ones(1, 1)).to(DEVICE)
    theta, cotangent = z.conj().imag, torch.complex(*torch.randn(2, 1, 1, 1, device=DEVICE)).conj().imag
    assert theta.is_neg() and theta.is_contiguous() and cotangent.is_neg() and cotangent.is_contiguous()

    def results():
        W = torch.ones(1, 1, 1, 2, device=DEVICE, requires_grad=True)
        return vandermonde(W, z.real, theta, 3), *torch.autograd.grad(vandermonde(W, z.real, theta, 1), W, cotangent)

    with backends.use("triton"):
        ours = results()
    assert max(map(off, ours, results())) < 1e-6


def test_softmax():
    """Modes that grow, backwards in time; weights in double precision."""
    W = torch.randn(1, 2, 5, dtype=torch.complex128, device=DEVICE).requires_grad_()
    z = (0.1 * torch.randn(2, 5, dtype=torch.complex128, device=DEVICE)).requires_grad_()
    cotangent = torch.randn(1, 2, 50, device=DEVICE)

    def function(W, z):
        return softmax_vandermonde(W, z, 60, 50, torch.float32)

    ours, plain = (with_gradients(name, function, (W, z), cotangent) for name in ("triton", "torch"))
    assert max(map(off, ours, plain)) < 2e-6


def random_space(K, H, M):
    """Modes of S4's start, or fewer of them, with random weights and steps."""
    legs = nplr(2 * M)
    A, P, B = (x.to(torch.complex128).repeat(H, 1) for x in (legs.w, legs.P, legs.B))
    dt, C = torch.logspace(-3, -1, H, dtype=torch.float64), torch.randn(K, H, M, dtype=torch.complex128)
    return dplr.StateSpace(*(x.detach().to(DEVICE).requires_grad_() for x in (dt, A, P, B, C)))


def numerators_and_modes(R, H, M):
    """Random numerators, S4's modes with their steps, and nodes of which some meet a mode to eight digits."""
    space = random_space(1, H, M)
    w = (space.dt[:, None] * space.A).detach()
    y = torch.cat(
        [
            torch.linspace(0, 5, 60, device=DEVICE),
            w.imag.abs().flatten() * (1 + 1e-8),
            torch.tensor([1e6], device=DEVICE),
        ]
    )
    rows = torch.randn(R, H, M, device=DEVICE)
    return rows.requires_grad_(), w.requires_grad_(), y.double()


@pytest.mark.parametrize(("R", "H", "M"), [(1, 1, 1), (8, 2, 4), (12, 1, 17), (20, 3, 33)])
def test_cauchy(R, H, M):
    """One state, odd sizes, several tiles of modes and nodes, at resonance and far from it."""
    rows, w, y = numerators_and_modes(R, H, M)

    def plain(rows, w, y):
        return dplr._cauchy_torch(rows.transpose(0, 1), w, y).permute(2, 1, 0, 3).unbind()

    def results(function, rows):
        sums = torch.stack(function(rows, w, y))
        return sums, *torch.autograd.grad(sums, (rows, w), cotangent.to(sums.dtype))

    cotangent = torch.randn(2, R, H, len(y), device=DEVICE)
    exact = results(plain, rows.detach().double().requires_grad_())
    for a, b in zip(results(triton_cauchy.Sums.apply, rows), exact, strict=True):
        assert a.dtype == (torch.float32 if b.dtype == torch.float64 else b.dtype) and off(a, b) < 1e-6


def test_resonance():
    """Around a mode whose imaginary part has more digits than float32."""
    y = torch.linspace(9.99, 10.01, 130, dtype=torch.float64, device=DEVICE)
    w = torch.tensor([[-1e-4 + (10 + 1 / 3e6) * 1j]], dtype=torch.complex128, device=DEVICE)
    real, imag = triton_cauchy.Sums.apply(torch.ones(1, 1, 1, device=DEVICE), w, y)
    exact = 1 / (w.abs() ** 2 - y**2 - 2j * y * w.real)
    assert off(torch.complex(real, imag)[0], exact) < 5e-7


@pytest.mark.parametrize(
    ("K", "H", "M", "length"), [(1, 1, 1, 1), (1, 2, 1, 2), (2, 3, 5, 7), (1, 2, 33, 131), (5, 2, 4, 64)]
)
def test_kernel_of_s4(K, H, M, length):
    """As near to float64 in the time domain as the plain form of the same sums is; gradients of few features cancel."""
    space, cotangent = random_space(K, H, M), torch.randn(K, H, length, device=DEVICE)

    def function(dtype, algorithm):
        return lambda *leaves: dplr.dplr_kernel(dplr.StateSpace(*leaves), length, dtype, algorithm)

    ours = with_gradients("triton", function(torch.float32, None), space, cotangent)
    plain = with_gradients("torch", function(torch.float32, "cauchy"), space, cotangent)
    exact = with_gradients("torch", function(torch.float64, "krylov"), space, cotangent.double())
    assert off(ours[0], exact[0]) < 1e-6
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert a.dtype == b.dtype and off(a, c) < max(1e-5, 2 * off(b, c))
