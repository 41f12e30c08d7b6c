"""Triton's scans against double precision. test_triton.py runs this file: in Triton's interpreter, where
TRITON_INTERPRET is 1, else on a GPU. The interpreter takes a millisecond a step, so sizes are small."""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from spt.models.ops import backends, scan, selective_scan
from spt.models.ops.recurrence import recurrence
from spt.models.ops.second_order import second_order_scan

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
REAL, COMPLEX, DOUBLE = torch.float32, torch.complex64, torch.float64
SINGLE = {DOUBLE: REAL, torch.complex128: COMPLEX}

Fused = Callable[[Callable[[], list[Tensor]]], list[Tensor]]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Fused:
    """Calls a function while Triton computes scans, and nothing else may."""

    def call(function: Callable[[], list[Tensor]]) -> list[Tensor]:
        with monkeypatch.context() as patch, backends.use("triton", device=DEVICE):
            patch.setattr(scan, "_solve", None)
            return function()

    return call


class Case(NamedTuple):
    B: int
    L: int
    P: int
    kind: torch.dtype = COMPLEX
    per_step: bool = False
    reverse: bool = False
    from_zero: bool = True


CASES = [  # one step, one state; one chunk; a chunk of one step; more states than a program has; many chunks
    Case(1, 1, 1),
    Case(2, 1, 3, REAL, per_step=True, reverse=True),
    Case(2, 13, 3, reverse=True, from_zero=False),
    Case(1, 31, 2, REAL, per_step=True, from_zero=False),
    Case(2, 33, 3),
    Case(1, 35, 67, reverse=True),
    Case(1, 37, 5, per_step=True),
    Case(1, 41, 3, per_step=True, reverse=True, from_zero=False),
    Case(1, 139, 1, REAL, from_zero=False),
    Case(1, 53, 2, REAL, per_step=True, reverse=True),
]


if DEVICE == "cuda":  # minutes in the interpreter
    CASES += [
        Case(16, 1024, 128),
        Case(3, 5003, 130, reverse=True),
        Case(8, 1024, 128, per_step=True, reverse=True),
        Case(8, 1021, 128, per_step=True, from_zero=False),
        Case(4, 2039, 600, REAL, per_step=True),
        Case(4, 16384, 70, REAL, from_zero=False),
    ]


def unit(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Of modulus up to 1: numbers of this type, in double precision."""
    modulus = torch.rand(shape, dtype=DOUBLE)
    drawn = torch.polar(modulus, 7 * torch.rand(shape, dtype=DOUBLE)) if kind.is_complex else 2 * modulus - 1
    return drawn.to(kind).to(drawn.dtype)


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    difference = (found.detach().cpu() - wanted.detach()).abs().max()
    return float(difference / wanted.detach().abs().max().clamp_min(1e-3))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_and_gradients_are_those_of_the_loop(case: Case, fused: Fused):
    """Of coefficients and inputs; gradients in the place of what comes from above, as `recurrence` wants them."""
    a = unit((case.B, case.L, case.P) if case.per_step else (case.P,), case.kind).requires_grad_()
    b, upstream = (unit((case.B, case.L, case.P), case.kind) for _ in range(2))
    initial, entering, first = unit((case.B, case.P), case.kind), b.clone(), -1 if case.reverse else 0
    if not case.from_zero:
        entering[:, first] += a.detach().expand_as(b)[:, first] * initial
    entering.requires_grad_()
    states = scan.sequential(a, entering, reverse=case.reverse)
    da, db = torch.autograd.grad(states, (a, entering), upstream)

    given, from_above, before = (x.to(DEVICE, case.kind) for x in (b, upstream, initial))
    factors = a.detach().to(DEVICE, case.kind if case.per_step else a.dtype)

    def ours() -> list[Tensor]:
        x, g = torch.empty_like(given), from_above.clone()
        scan.solve(factors, given, x, None if case.from_zero else before, case.reverse)
        if case.from_zero:
            return [x, g, scan.gradients(factors, x, g, g, case.reverse)]
        scan.solve_back(factors, g, g, case.reverse)
        return [x, g]

    found = fused(ours)
    assert all(off(x, y) < 3e-7 for x, y in zip(found, (states, db, da), strict=False))
    if DEVICE == "cuda":
        assert all(torch.equal(x, y) for x, y in zip(found, fused(ours), strict=True))


B, L, P, H = 1, 35, 3, 2
USERS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], set[int]]] = {
    # a function, its inputs, and which of them have double precision at all times
    "recurrence": (
        recurrence,
        lambda: [
            unit((B, L, H), REAL),
            unit((P,), COMPLEX),
            unit((P, H), COMPLEX),
            unit((2, H, P), COMPLEX),
            unit((H,), REAL),
        ],
        {1},
    ),
    "second order": (
        second_order_scan,
        lambda: [
            torch.tensor([1.5, -0.5, 0.1]).double(),
            torch.tensor([0.8, 0.9, 0.0025]).double(),
            unit((B, L, P), COMPLEX),
        ],
        {0, 1},
    ),
    "selective": (
        lambda *inputs: selective_scan.selective_scan(*inputs, reverse=True),
        lambda: [
            unit((B, L, H), REAL),
            unit((B, L, H), REAL).abs(),
            -unit((H, P), REAL).abs(),
            unit((B, L, P), REAL),
            unit((B, L, P), REAL),
        ],
        set(),
    ),
    "other layouts": (
        lambda a, b: scan.scan(a, b.transpose(0, 2).conj()),
        lambda: [unit((P,), COMPLEX), unit((P, L, B), COMPLEX)],
        {0},
    ),
}


@pytest.mark.parametrize("name", USERS)
def test_what_is_made_of_scans(name: str, fused: Fused, monkeypatch: pytest.MonkeyPatch):
    """The result, and the gradients of all inputs where that of the result has a stride of zero."""
    monkeypatch.setattr(selective_scan, "_WINDOW", {"cpu": 1, "other": 1})  # several windows
    function, draw, doubles = USERS[name]
    exact = [x.requires_grad_() for x in draw()]
    single = [x.detach() if i in doubles else x.detach().to(SINGLE[x.dtype]) for i, x in enumerate(exact)]
    single = [x.to(DEVICE).requires_grad_() for x in single]

    def with_gradients(inputs: list[Tensor]) -> list[Tensor]:
        y = function(*inputs)
        total = torch.view_as_real(y).sum() if y.is_complex() else y.sum()
        return [y, *torch.autograd.grad(total, inputs)]

    wanted = with_gradients(exact)
    for found, expected in zip(fused(lambda: with_gradients(single)), wanted, strict=True):
        assert found.shape == expected.shape and off(found, expected) < 6e-7


@pytest.mark.parametrize("L", [300] if DEVICE == "cpu" else [300, 2**17])
def test_errors_do_not_grow_with_the_length(L: int, fused: Fused):
    """Of modes that turn and hardly decay: those of single precision, and powers of rounded coefficients, would."""
    rates = torch.complex(-torch.logspace(-7, -5, 16, dtype=DOUBLE), torch.linspace(0.001, 6, 16, dtype=DOUBLE))
    impulse = torch.zeros(1, L, 16, dtype=COMPLEX, device=DEVICE)
    impulse[:, 0] = 1
    (x,) = fused(lambda: [scan.scan(torch.exp(rates).to(DEVICE), impulse)])
    t = torch.arange(L, dtype=DOUBLE)[:, None]
    exact = torch.polar(torch.exp(rates.real * t), torch.remainder(rates.imag * t, 2 * torch.pi))
    assert off(x[0], exact) < 2e-7


@pytest.mark.parametrize("kind", [REAL, COMPLEX])
def test_numbers_that_are_negative_or_conjugated_by_a_flag(kind: torch.dtype, fused: Fused):
    """And coefficients whose gradients nobody asks for."""
    drawn = [unit((1, 20, 2), COMPLEX).to(DEVICE, COMPLEX).conj() for _ in range(2)]
    a, b = drawn if kind.is_complex else (x.imag for x in drawn)
    assert all(x.is_conj() if kind.is_complex else x.is_neg() for x in (a, b))
    b.requires_grad_()

    def ours() -> list[Tensor]:
        x = scan.scan(a, b)
        return [x, *torch.autograd.grad(x, b, a)]

    wanted = scan.sequential(a, b)
    (g,) = torch.autograd.grad(wanted, b, a)
    for found, expected in zip(fused(ours), (wanted, g), strict=True):
        torch.testing.assert_close(found, expected)
