"""Matrix products by oneDNN: the same numbers as torch's, whatever the layout, and torch's where it cannot serve."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from spt.models.ops import product

M, K, N = 600, 240, 120


def layouts(rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        "plain": torch.randn(rows, columns),
        "transposed": torch.randn(columns, rows).T,
        "every other column": torch.randn(rows, 2 * columns)[:, ::2],
        "every other row": torch.randn(2 * rows, columns)[::2],
        "shifted": torch.randn(rows, columns + 3)[:, 3:],
    }


needs_onednn = pytest.mark.skipif(not product._has_onednn(), reason="this torch has no oneDNN for dense matrices")


@needs_onednn
@pytest.mark.parametrize("bias", [None, torch.ones(N), torch.arange(2.0 * N)[::2]], ids=["none", "plain", "strided"])
def test_products_are_right_in_every_layout(bias: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    for a, b in itertools.product(layouts(M, K).values(), layouts(N, K).values()):
        exact = F.linear(a.double(), b.double(), None if bias is None else bias.double())
        assert product._suits_onednn(a, b)
        assert (product.product(a, b, bias) - exact).abs().max() < 1e-4


@needs_onednn
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_longer_rows_are_copied(transposed: bool) -> None:
    """Left as they are they would take minutes."""
    wide = torch.randn(256, 16384) if transposed else torch.randn(2048, 16384)
    part = wide[:, :2048].T if transposed else wide[:, :256]
    y = product.product(part, part)
    assert torch.allclose(y[:3], part[:3] @ part.T, atol=1e-3)


@needs_onednn
@pytest.mark.parametrize("shape", [(M,), (2, 300), (2, 3, 100)])
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_are_those_of_a_linear_map(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*shape, K), torch.randn(N, K), torch.randn(N) if biased else None
    weights = torch.randn(*shape, N)
    gradients = []
    for function, kind in ((product.linear, torch.float32), (F.linear, torch.float64)):
        given = [each.detach().to(kind).requires_grad_() for each in (x, weight, bias) if each is not None]
        y = function(*given)
        y.square().mul(weights.to(kind)).sum().backward()
        gradients.append([y.detach(), *(each.grad for each in given)])
    for ours, exact in zip(*gradients, strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()


@needs_onednn
def test_a_linear_map_has_second_derivatives() -> None:
    torch.manual_seed(0)
    x = torch.randn(M, K, requires_grad=True)
    weight = torch.randn(N, K)

    def penalty(function: object) -> torch.Tensor:
        (grad,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(grad.square().sum(), x)[0]

    ours, torchs = penalty(product.linear), penalty(F.linear)
    assert (ours - torchs).abs().max() <= 1e-5 * torchs.abs().max()


def test_what_it_does_not_serve_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(M, K), torch.randn(N, K)
    assert not product._suits_onednn(a.double(), b.double())
    assert not product._suits_onednn(a.to(torch.bfloat16), b.to(torch.bfloat16))
    assert not product._suits_onednn(a[:4], b)
    assert not product._suits_onednn(a.to("meta"), b.to("meta"))
    product._has_onednn.cache_clear()
    monkeypatch.setattr(product, "_by_onednn", lambda a, b, bias: torch.zeros(len(a), len(b)))  # wrong numbers
    try:
        assert not product._suits_onednn(a, b)
        assert torch.equal(product.product(a, b), F.linear(a, b))
    finally:
        monkeypatch.undo()
        product._has_onednn.cache_clear()


def test_under_autocast_products_are_in_its_type() -> None:
    layer = product.Linear(K, N)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(M, K)).dtype == torch.bfloat16
