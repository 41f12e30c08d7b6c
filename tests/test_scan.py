"""Scans against their definition, and the models on them, S5 and LRU: equations, recurrent form, options, rates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from reference_weights import export_reference, import_reference
from torch import Tensor
from torch.autograd import gradcheck

from spt.config.recipe import Train
from spt.models import lru, s5
from spt.models.base import Context, ParamGroup
from spt.models.ops import hippo, scan_products
from spt.models.ops.recurrence import recurrence
from spt.models.ops.scan import discretise, discretise_steps, entry_map, scan, sequential
from spt.training.optimizer import optimizer_groups

DOUBLE = torch.float64
LENGTHS = some.sampled_from([1, 2, 3, 7, 16, 31, 32, 33, 48, 49, 100, 257, 529, 1000])


def coefficients(shape: tuple[int, ...], is_complex: bool, seed: int = 0) -> Tensor:
    """Of modulus up to 1."""
    draw = torch.Generator().manual_seed(seed)
    modulus = torch.rand(shape, dtype=DOUBLE, generator=draw)
    if not is_complex:
        return 2 * modulus - 1
    return torch.polar(modulus, 7 * torch.rand(shape, dtype=DOUBLE, generator=draw))


def everywhere(B: int, L: int) -> Context:
    return Context(torch.ones(B, L, dtype=torch.bool), padded=False)


# The recurrence


@given(LENGTHS, some.integers(1, 3), some.booleans(), some.booleans(), some.booleans())
def test_scan_is_its_definition(L, B, is_complex, per_step, reverse):
    """States, and the gradients of everything that goes in, are those of the loop."""
    kind = torch.complex128 if is_complex else DOUBLE
    a = coefficients((B, L, 3) if per_step else (3,), is_complex)
    b, g = torch.randn(B, L, 3, dtype=kind), torch.randn(B, L, 3, dtype=kind)
    found = []
    for function in (scan, sequential):
        leaves = [tensor.clone().requires_grad_() for tensor in (a, b)]
        x = function(*leaves, reverse=reverse)
        x.backward(g)
        found.append([x, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)])
    for ours, loop in zip(*found, strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-10, atol=1e-10)


@given(LENGTHS.filter(lambda L: L < 300))
def test_a_fixed_scan_is_a_convolution_with_powers(L):
    a, b = coefficients((4,), True), torch.randn(2, L, 4, dtype=torch.complex128)
    lags = torch.arange(L)[:, None] - torch.arange(L)
    kernel = torch.where((lags >= 0)[..., None], a ** lags.clamp_min(0)[..., None], 0)
    torch.testing.assert_close(scan(a, b), torch.einsum("tsp,bsp->btp", kernel, b), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scan(a, b, reverse=True), scan(a, b.flip(1)).flip(1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("per_step", [False, True])
def test_gradients_are_differences(per_step, reverse):
    a = coefficients((2, 37, 2) if per_step else (2,), True).requires_grad_()
    b = torch.randn(2, 37, 2, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda *inputs: scan(*inputs, reverse=reverse), (a, b), fast_mode=True)


def test_views_and_gradients_of_any_layout_are_taken():
    a = coefficients((3,), True)
    b = torch.randn(3, 100, 2, dtype=torch.complex128).transpose(0, 2).requires_grad_()
    x = scan(a, b.conj())
    torch.testing.assert_close(x, sequential(a, b.conj()))
    (ours,) = torch.autograd.grad(x.sum().real, b)  # an expanded gradient
    (loop,) = torch.autograd.grad(sequential(a, b.conj()).sum().real, b)
    torch.testing.assert_close(ours, loop)


@pytest.mark.parametrize("L", [16384, 2**17])
def test_single_precision_errors_do_not_grow_with_the_length(L):
    """Of modes that hardly decay: powers of a rounded coefficient would be off by 4e-3 at the longer length."""
    angle = torch.tensor([0.001, 0.7, 3.1, 6.0], dtype=DOUBLE)
    decay = torch.tensor([1e-7, 1e-6, 1e-5, 1e-7], dtype=DOUBLE)
    a = torch.exp(torch.complex(-decay, angle))
    impulse = torch.zeros(1, L, 4, dtype=torch.complex64)
    impulse[:, 0] = 1
    t = torch.arange(L, dtype=DOUBLE)[:, None]
    exact = torch.polar(torch.exp(-decay * t), torch.remainder(angle * t, 2 * math.pi))
    assert (scan(a, impulse)[0] - exact).abs().max() < 5e-6
    noise = torch.randn(1, L, 4, dtype=torch.complex64)
    double = scan(a, noise.to(torch.complex128))
    assert (scan(a, noise) - double).abs().max() < 1e-5 * double.abs().max()


def system(P: int, H: int, K: int, kind: torch.dtype = torch.complex128) -> list[Tensor]:
    """a, B, C and D."""
    draw = torch.Generator().manual_seed(0)
    B, C = (torch.randn(*shape, dtype=torch.complex128, generator=draw) / 4 for shape in ((P, H), (K, H, P)))
    D = torch.randn(H, dtype=DOUBLE, generator=draw)
    return [coefficients((P,), True), B.to(kind), C.to(kind), D.to(kind.to_real())]


def by_steps(u: Tensor, a: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The definition of `recurrence`."""
    v = u.to(B.dtype) @ B.T
    return D * u + sum((sequential(a, v, reverse=bool(k)) @ C[k].T).real for k in range(len(C)))


@given(
    some.sampled_from([1, 2, 33, 100, 257]), some.integers(1, 3), some.integers(1, 2), some.sampled_from([1, 40, 2**10])
)
def test_a_recurrence_is_its_definition(L, B, K, rows):
    """With all its gradients, however many steps are taken at a time."""
    u, g = (torch.randn(B, 3, L, dtype=DOUBLE).mT for _ in range(2))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spt.models.ops.output._NUMBERS", 3 * rows)
        for function in (recurrence, by_steps):
            leaves = [tensor.clone().requires_grad_() for tensor in (u, *system(4, 3, K))]
            y = function(*leaves)
            found.append([y, *torch.autograd.grad(y, leaves, g)])
    for ours, loop in zip(*found, strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-10, atol=1e-10)


@given(
    some.sampled_from([1, 2, 3, 63, 64, 65, 100, 257, 1000, 4099, 5000]),
    some.integers(1, 3),
    some.integers(1, 2),
    some.integers(1, 6),
)
def test_a_recurrence_by_products_is_the_same(L, B, K, bits):
    """With all its gradients, with one chunk and with chunks of chunks, and with a coefficient of zero."""
    u, g = (torch.randn(B, 3, L, dtype=DOUBLE).mT for _ in range(2))
    leaves = [u, *system(4, 3, K)]
    leaves[1][0] = 0
    found = []
    for preferred in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scan_products, "preferred", lambda x, preferred=preferred: preferred)
            patch.setattr(scan_products, "_BITS", bits)
            scan_products._places.cache_clear()
            inputs = [tensor.clone().requires_grad_() for tensor in leaves]
            y = recurrence(*inputs)
            found.append([y, *torch.autograd.grad(y, inputs, g)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("L", [16384, 2**17])
def test_single_precision_errors_of_products_do_not_grow_with_the_length(L):
    """Nor does the gradient of a coefficient lose digits, which is a sum over all steps."""
    angle = torch.tensor([0.001, 0.7, 3.1, 6.0], dtype=DOUBLE)
    decay = torch.tensor([1e-5, 1e-4, 1e-3, 1e-2], dtype=DOUBLE)
    a = torch.exp(torch.complex(-decay, angle))
    _, B, C, D = system(4, 3, 2)
    u, g = torch.randn(2, 1, L, 3)
    found = []
    for kind in (torch.float32, DOUBLE):
        matrices = (entry_map(B.to(kind.to_complex())), scan_products.exit_rows(C.to(kind.to_complex())))
        leaves = [each.clone().requires_grad_() for each in (u.to(kind), a, *matrices, D.to(kind))]
        y = scan_products.recurrence_by_products(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, g.to(kind))])
    # Gradients of the matrices are a library's sums over all steps, in an order that depends on the processor.
    for single, double, error in zip(*found, (5e-6, 5e-6, 5e-6, 2e-5, 2e-5, 5e-6), strict=True):
        assert (single - double).abs().max() < error * double.abs().max()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (s5, {}),
        (s5, {"causal": True, "disc": "bilinear", "clip_eigs": True}),
        (s5, {"shared_dt": True, "conj_sym": False}),
        (s5, {"parameterisation": "discrete", "norm": "layer"}),
        (lru, {"norm": "none"}),
    ],
)
def test_systems_of_layers_that_are_alike_are_discretised_together(model, options, monkeypatch):
    """On a GPU, by products or scans. Outputs and gradients are those of scans, layer by layer; a layer that differs is
    left to itself."""
    config = model.Config(d_model=6, n_layers=3, d_state=8, **({"blocks": 2} if model is s5 else {}), **options)
    net = model.build(config).double()
    if options.get("causal"):
        net.mixers[1].rescale(2.0)
    x = torch.randn(2, 70, 6, dtype=DOUBLE)
    calls, found = [], []
    kind = type(net.mixers[0])
    own = kind.system
    monkeypatch.setattr(kind, "system", lambda self: (calls.append(self), own(self))[1])
    for together, preferred in ((False, False), (True, True), (True, False)):
        monkeypatch.setattr(scan_products, "together", lambda x, together=together: together)
        monkeypatch.setattr(scan_products, "preferred", lambda x, preferred=preferred: preferred)
        net.zero_grad()
        y = net(x, everywhere(2, 70))
        y.square().sum().backward()
        found.append((y.detach(), *(p.grad.clone() for p in net.parameters())))
    for joint in found[1:]:
        torch.testing.assert_close(joint, found[0], rtol=1e-8, atol=1e-10)
    assert len(calls) == 3 + 2 * (2 if options.get("causal") else 1)
    assert all(layer._joint is None for layer in net.mixers)


def test_systems_are_not_made_together_where_steps_are_irregular(monkeypatch):
    net = s5.build(s5.Config(d_model=4, n_layers=2, d_state=4, blocks=1))
    context = everywhere(1, 9)._replace(steps=torch.rand(1, 9) + 0.5)
    x = torch.randn(1, 9, 4)
    y = net(x, context)
    monkeypatch.setattr(scan_products, "together", lambda x: True)
    monkeypatch.setattr(s5.S5, "system", None)
    torch.testing.assert_close(net(x, context), y)


@pytest.mark.parametrize("K", [1, 2])
def test_a_large_recurrence_in_single_precision_is_as_exact_as_its_numbers(K):
    """At a size at which products go to oneDNN, forward and backward, and a sequence is taken in blocks."""
    u, g = torch.randn(2, 2, 6000, 96)
    found = []
    for kind in (torch.float32, DOUBLE):
        leaves = [each.requires_grad_() for each in (u.to(kind), *system(64, 96, K, kind.to_complex()))]
        y = recurrence(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, g.to(kind))])
    for single, double in zip(*found, strict=True):
        assert (single - double).abs().max() < 3e-6 * double.abs().max()


def test_coefficients_that_do_not_fit_are_refused():
    b = torch.randn(2, 5, 3)
    for function in (scan, sequential):
        with pytest.raises(ValueError, match="do not fit inputs"):
            function(torch.rand(5, 3), b)
        with pytest.raises(ValueError, match="both real or both complex"):
            function(torch.rand(3, dtype=torch.complex64), b)


# Discretisation


def modes() -> tuple[Tensor, Tensor]:
    """Eigenvalues from 0 to far beyond one turn a step, and step sizes."""
    imag = torch.tensor([0.0, 0.0, 0.01, -1.0, 300.0, -5.0], dtype=DOUBLE)
    real = torch.tensor([0.0, -1e-4, -0.5, -0.5, -0.5, -3.0], dtype=DOUBLE)
    return torch.complex(real, imag), torch.tensor([0.1, 1e-3, 0.1, 0.05, 0.1, 1.0], dtype=DOUBLE)


def test_hold_is_exact_also_for_tiny_steps():
    """Against the solution of x' = Lambda x + B by its Taylor series in integers, and at an eigenvalue of zero."""
    Lambda = torch.tensor([0.0, -1e-9, -0.5 + 0.25j], dtype=torch.complex128)
    Delta = torch.tensor([0.01, 0.01, 0.001], dtype=DOUBLE)
    a, f = discretise(Lambda, Delta)
    series = sum(Delta * (Lambda * Delta) ** k / math.factorial(k + 1) for k in range(12))
    torch.testing.assert_close(f, series, rtol=1e-14, atol=0)
    torch.testing.assert_close(a, torch.exp(Lambda * Delta), rtol=1e-15, atol=0)
    ones, v = torch.ones(1, 1), torch.ones(1, 1, 3, dtype=torch.complex64)
    single = discretise_steps(Lambda, Delta, ones, v)[1][0, 0]
    torch.testing.assert_close(single.to(series), series, rtol=3e-7, atol=0)


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_discretisation_has_right_gradients(rule):
    Lambda, Delta = (tensor.requires_grad_() for tensor in modes())
    gaps = 3 * torch.rand(2, 5, dtype=DOUBLE) + 0.1
    v = torch.randn(2, 5, 6, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda L, D: discretise(L, D, rule), (Lambda, Delta))
    assert gradcheck(lambda L, D, v: discretise_steps(L, D, gaps, v, rule), (Lambda, Delta, v))
    shared = Delta[:1].detach().requires_grad_()
    assert gradcheck(lambda L, D, v: discretise_steps(L, D, gaps, v, rule), (Lambda, shared, v))


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_steps_of_length_one_are_regular(rule):
    Lambda, Delta = modes()
    v = torch.randn(2, 4, 6, dtype=torch.complex128)
    a, f = discretise(Lambda, Delta, rule)
    a_t, b_t = discretise_steps(Lambda, Delta, torch.ones(2, 4, dtype=DOUBLE), v, rule)
    torch.testing.assert_close(a_t, a.expand_as(a_t), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(b_t, f * v, rtol=1e-12, atol=1e-14)


def test_fast_modes_turn_exactly_in_single_precision():
    """Hundreds of turns a step: an angle of single precision would be off by 1e-4."""
    Lambda, Delta = torch.tensor([-0.5 - 1303.0j], dtype=torch.complex128), torch.tensor([0.1], dtype=DOUBLE)
    gaps, v = 10 * torch.rand(1, 50) + 1, torch.randn(1, 50, 1, dtype=torch.complex64)
    single = discretise_steps(Lambda, Delta, gaps, v)
    double = discretise_steps(Lambda, Delta, gaps.double(), v.to(torch.complex128))
    for ours, exact in zip(single, double, strict=True):
        assert (ours - exact).abs().max() < 1e-6 * exact.abs().max()


# S5


def small(causal: bool = False, **options) -> s5.S5:
    torch.manual_seed(0)
    config = s5.Config(**{"d_model": 5, "d_state": 8, "blocks": 2, "causal": causal, **options})
    return s5.S5(config).to(DOUBLE).eval()


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_s5_is_the_dense_system_it_diagonalises(rule):
    """The real system of HiPPO-N blocks, discretised as a matrix and stepped one by one."""
    P, H, L = 8, 5, 37
    layer = small(True, shared_dt=True, disc=rule)
    A, _ = hippo.legs(4)
    correction = hippo.legs_rank_correction(4)
    A = torch.block_diag(*[A + correction[:, None] * correction] * 2)
    B, C = torch.randn(P, H, dtype=DOUBLE), torch.randn(H, P, dtype=DOUBLE)
    Lambda, V, inverse = s5.initial_eigenbasis("hippo_n", P, 2, conj_sym=True)
    torch.testing.assert_close(layer.Lambda, Lambda, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(2 * (V @ torch.diag(Lambda) @ inverse).real, A)
    with torch.no_grad():
        layer.Lambda_re.copy_(Lambda.real), layer.Lambda_im.copy_(Lambda.imag)
        layer.B.copy_(torch.view_as_real(inverse @ B.to(V.dtype)))
        layer.C[0].copy_(torch.view_as_real(C.to(V.dtype) @ V))
        Delta, eye = float(layer.Delta), torch.eye(P, dtype=DOUBLE)
        if rule == "zoh":
            A_bar = torch.linalg.matrix_exp(Delta * A)
            B_bar = torch.linalg.solve(A, (A_bar - eye) @ B)
        else:
            A_bar = torch.linalg.solve(eye - Delta / 2 * A, eye + Delta / 2 * A)
            B_bar = torch.linalg.solve(eye - Delta / 2 * A, Delta * B)
        u, x, y = torch.randn(1, L, H, dtype=DOUBLE), torch.zeros(P, dtype=DOUBLE), []
        for t in range(L):
            x = A_bar @ x + B_bar @ u[0, t]
            y.append(C @ x + layer.D * u[0, t])
        torch.testing.assert_close(layer.mix_sequence(u)[0], torch.stack(y), rtol=1e-9, atol=1e-9)


def test_one_state_stands_for_a_conjugate_pair():
    half, whole = small(), small(conj_sym=False)
    with torch.no_grad():
        for name, sign in (("Lambda_re", 1), ("Lambda_im", -1), ("log_step", 1)):
            kept = getattr(half, name)
            getattr(whole, name).copy_(torch.cat([kept, sign * kept]))
        mirror = torch.tensor([1.0, -1.0], dtype=DOUBLE)
        whole.B.copy_(torch.cat([half.B, half.B * mirror]))
        whole.C.copy_(torch.cat([half.C, half.C * mirror], 2))
        whole.D.copy_(half.D)
    u = torch.randn(2, 30, 5, dtype=DOUBLE)
    torch.testing.assert_close(whole.mix_sequence(u), half.mix_sequence(u), rtol=1e-10, atol=1e-10)


def test_gaps_are_those_before_and_after():
    """The first and last valid step have no neighbour there: 1."""
    steps = torch.tensor([[9.0, 2.0, 3.0, 4.0, 9.0], [9.0, 2.0, 3.0, 4.0, 5.0]])
    valid = torch.tensor([[True] * 4 + [False], [True] * 5])
    before, after = s5.gaps_around(Context(valid, padded=True, steps=steps))
    assert before.tolist() == [[1, 2, 3, 4, 1], [1, 2, 3, 4, 5]]
    assert after.tolist() == [[2, 3, 4, 1, 1], [2, 3, 4, 5, 1]]


@pytest.mark.parametrize("activation", ["gelu", "full_glu", "half_glu1", "half_glu2"])
def test_activations_are_those_of_the_paper(activation):
    """With flax's GELU, the tanh approximation."""
    layer = small(activation=activation)
    u = torch.randn(2, 9, 5, dtype=DOUBLE)
    y = layer.mix_sequence(u)
    z = torch.nn.functional.gelu(y, approximate="tanh")
    wanted = z
    if layer.output.linear is not None:
        mapped = layer.output.linear(z)
        gate = torch.sigmoid(mapped[..., -5:])
        wanted = {"full_glu": mapped[..., :5], "half_glu1": z, "half_glu2": y}[activation] * gate
    torch.testing.assert_close(layer(u, everywhere(2, 9)), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("irregular", [False, True])
def test_two_sided_is_forward_and_reversed(irregular):
    """Both directions share eigenvalues and B and see the present; D is counted once."""
    layer, one = small(), small(causal=True)
    u = torch.randn(2, 23, 5, dtype=DOUBLE)
    context = everywhere(2, 23)
    if irregular:
        context = context._replace(steps=torch.rand(2, 23, dtype=DOUBLE) + 0.1)
    gaps = s5.gaps_around(context) if irregular else None
    turned = (gaps[1].flip(1), gaps[0].flip(1)) if gaps else None
    with torch.no_grad():
        for name in ("Lambda_re", "Lambda_im", "B", "D", "log_step"):
            getattr(one, name).copy_(getattr(layer, name))
        one.C.copy_(layer.C[:1])
        y = one.mix_sequence(u, gaps)
        one.C.copy_(layer.C[1:])
        y = y + one.mix_sequence(u.flip(1), turned).flip(1) - one.D * u
        torch.testing.assert_close(layer.mix_sequence(u, gaps), y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"disc": "bilinear"}, {"shared_dt": True, "conj_sym": False}])
def test_equal_gaps_are_a_regular_sampling(options):
    """Gaps of 1 change nothing; gaps of 2 are step_rescale 2, but for the steps that have no neighbour."""
    layer, slow = small(**options), small(step_rescale=2.0, **options)
    u, context = torch.randn(2, 19, 5, dtype=DOUBLE), everywhere(2, 19)
    u[:, 0] = u[:, -1] = 0  # those two
    layer.D.data = slow.D.data
    for like, gap in ((layer, 1.0), (slow, 2.0)):
        steps = torch.full((2, 19), gap, dtype=DOUBLE)
        y = layer(u, context._replace(steps=steps))
        torch.testing.assert_close(y[:, 1:-1], like(u, context)[:, 1:-1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("irregular", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_padding_changes_nothing(irregular, front):
    """Not even by the gaps it claims."""
    layer, L, more = small(), 21, 9
    u, steps = torch.randn(2, L, 5, dtype=DOUBLE), torch.rand(2, L, dtype=DOUBLE) + 0.5
    ends = (more, 0) if front else (0, more)
    padded = torch.nn.functional.pad(u, (0, 0, *ends))
    valid = torch.nn.functional.pad(torch.ones(2, L, dtype=torch.bool), ends)
    context, longer = everywhere(2, L), Context(valid, padded=True)
    if irregular:
        context = context._replace(steps=steps)
        longer = longer._replace(steps=torch.nn.functional.pad(steps, ends, value=1e3))
    alone, together = layer(u, context), layer(padded, longer)[valid].view_as(u)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [{}, {"disc": "bilinear"}, {"parameterisation": "discrete"}, {"conj_sym": False, "activation": "gelu"},
     {"state_matrix": "gaussian", "shared_dt": True}, {"state_matrix": "antisymmetric", "parameterisation": "discrete"},
     {"state_matrix": "s4d_inv"}, {"state_matrix": "s4d_lin"}],
)  # fmt: skip
def test_s5_goes_step_by_step(options):
    layer = small(causal=True, **options)
    u = torch.randn(3, 40, 5, dtype=DOUBLE)
    state, y = layer.initial_state(3), []
    with torch.no_grad():
        for t in range(40):
            y_t, state = layer.step(u[:, t], state)
            y.append(y_t)
        torch.testing.assert_close(torch.stack(y, 1), layer(u, everywhere(3, 40)), rtol=1e-10, atol=1e-10)


def test_s5_goes_step_by_step_with_gaps():
    layer = small(causal=True)
    u, steps = torch.randn(3, 40, 5, dtype=DOUBLE), torch.rand(3, 40, dtype=DOUBLE) + 0.2
    steps[:, 0] = 1
    state, y = layer.initial_state(3), []
    with torch.no_grad():
        for t in range(40):
            y_t, state = layer.step(u[:, t], state, steps[:, t])
            y.append(y_t)
        whole = layer(u, everywhere(3, 40)._replace(steps=steps))
    torch.testing.assert_close(torch.stack(y, 1), whole, rtol=1e-10, atol=1e-10)


def test_clipped_eigenvalues_stay_stable_and_get_no_gradient():
    layer = small(clip_eigs=True)
    with torch.no_grad():
        layer.Lambda_re[::2] = 0.05
    assert (layer.Lambda.real <= -1e-4).all()
    layer(torch.randn(2, 12, 5, dtype=DOUBLE), everywhere(2, 12)).sum().backward()
    assert (layer.Lambda_re.grad[::2] == 0).all() and (layer.Lambda_re.grad[1::2] != 0).all()


OPTIONS = (
    *({"state_matrix": kind} for kind in ("gaussian", "antisymmetric", "s4d_lin", "s4d_inv")),
    *({"state_matrix": kind, "parameterisation": "discrete"} for kind in ("hippo_n", "gaussian", "antisymmetric")),
    *({"state_matrix": kind, "conj_sym": False} for kind in ("hippo_n", "gaussian", "s4d_lin")),
    *({"c_init": kind} for kind in ("trunc_standard_normal", "lecun_normal", "complex_normal")),
    *({"activation": kind} for kind in ("gelu", "full_glu", "half_glu1", "half_glu2")),
    *({"initialisation": kind} for kind in ("random", "random_ssm")),
    {"shared_dt": True},
    {"disc": "bilinear", "clip_eigs": True},
    {"norm": "layer", "prenorm": False, "step_rescale": 2.0},
    {"blocks": 8, "conj_sym": False},
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_trains(options, causal):
    """Finite numbers over a thousand steps, and every parameter moves."""
    torch.manual_seed(0)
    given = {"d_model": 6, "d_state": 8, "blocks": 2, "n_layers": 1, "causal": causal, "dropout": 0.1, **options}
    model = s5.build(s5.Config(**given))
    x, context = torch.randn(2, 1000, 6), everywhere(2, 1000)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    (model(x, context) * torch.randn(2, 1000, 6)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    optimizer.step()
    stuck = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert stuck == []
    assert model(x, context).isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": 3}, "d_state 8 is not a multiple of blocks 3"),
        ({"blocks": 8}, "conj_sym takes eigenvalues in pairs, but a block has 1"),
        (
            {"blocks": 8, "conj_sym": False, "state_matrix": "s4d_inv"},
            "state_matrix s4d_inv takes eigenvalues in pairs",
        ),
        ({"dt_min": 0.2}, "dt_min 0.2 is above dt_max 0.1"),
        ({"parameterisation": "discrete", "clip_eigs": True}, "clip_eigs is for continuous time"),
        ({"parameterisation": "discrete", "step_rescale": 2.0}, "step_rescale is for continuous time"),
        ({"parameterisation": "discrete", "dt_global": True}, "dt_global is for continuous time"),
    ],
)
def test_wrong_options_are_told_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        s5.Config(**{"d_state": 8, "blocks": 2, **options})


def test_irregular_steps_need_a_step_size():
    layer = small(parameterisation="discrete")
    context = everywhere(1, 4)._replace(steps=torch.ones(1, 4, dtype=DOUBLE))
    with pytest.raises(ValueError, match="parameterisation is discrete"):
        layer(torch.randn(1, 4, 5, dtype=DOUBLE), context)


@pytest.mark.parametrize(
    ("options", "own", "own_decayed"),
    [  # the table of the S5 repository: at ssm_lr without decay, and with; all else at the base rate with decay
        ({}, {"Lambda_re", "Lambda_im", "B", "log_step"}, set()),
        ({"dt_global": True}, {"Lambda_re", "Lambda_im", "B"}, set()),
        ({"opt_config": "BandCdecay"}, {"Lambda_re", "Lambda_im", "log_step"}, {"B"}),
        ({"opt_config": "BfastandCdecay"}, {"Lambda_re", "Lambda_im", "log_step"}, set()),
        ({"opt_config": "noBCdecay"}, {"Lambda_re", "Lambda_im", "B", "C", "D", "log_step"}, set()),
        ({"opt_config": "noBCdecay", "dt_global": True}, {"Lambda_re", "Lambda_im", "B", "C", "D"}, set()),
        ({"parameterisation": "discrete"}, {"Lambda_re", "Lambda_im", "B"}, set()),
    ],
)
def test_optimiser_groups_of_s5(options, own, own_decayed):
    model = s5.build(s5.Config(d_model=6, d_state=8, blocks=2, n_layers=1, ssm_lr=1e-4, **options))
    train = Train(steps=1, batch_size=1, learning_rate=4e-3, weight_decay=0.05)
    found = {(group.learning_rate, group.weight_decay): set(group.names) for group in optimizer_groups(model, train)}
    assert found.pop((1e-4, 0.0)) == {f"mixers.0.{name}" for name in own}
    if own_decayed:
        assert found.pop((1e-4, 0.05)) == {f"mixers.0.{name}" for name in own_decayed}
    ((rates, rest),) = found.items()
    assert rates == (4e-3, 0.05)
    assert {"norms.0.weight", "norms.0.bias", "mixers.0.output.linear.bias"} <= rest


def test_s5_starts_as_the_paper_says():
    torch.manual_seed(0)
    H, P = 64, 128
    model = s5.build(s5.Config(d_model=H, d_state=P, blocks=2, n_layers=1, norm="layer"))
    layer = model.mixers[0]
    assert torch.equal(layer.Lambda_re, torch.full((P // 2,), -0.5)) and (layer.Lambda_im < 0).all()
    assert torch.equal(layer.Lambda_im[: P // 4], layer.Lambda_im[P // 4 :])
    assert (layer.Lambda_im[: P // 4].diff() > 0).all()
    assert layer.log_step.min() >= math.log(1e-3) and layer.log_step.max() <= math.log(0.1)
    size = torch.view_as_complex(layer.B.detach()).abs().square().mean()
    assert size == pytest.approx(1 / P, rel=0.1)  # kept by an orthonormal change of basis
    assert torch.view_as_complex(layer.C.detach()).abs().square().mean() == pytest.approx(2 / P, rel=0.1)
    weight = layer.output.linear.weight.detach()
    assert weight.std() == pytest.approx(H**-0.5, rel=0.05) and weight.abs().max() < 2.3 * H**-0.5
    assert (layer.output.linear.bias == 0).all()
    assert model.norms[0].eps == 1e-6 and isinstance(model.last_norm, torch.nn.Identity)
    for c_init, scale in (("lecun_normal", 2 / (H * P)), ("complex_normal", 1.0)):
        C = s5.S5(s5.Config(d_model=H, d_state=P, blocks=2, c_init=c_init)).C.detach()
        assert torch.view_as_complex(C).abs().square().mean() == pytest.approx(scale, rel=0.1)


@pytest.mark.parametrize("kind", ["gaussian", "antisymmetric", "hippo_n", "s4d_lin", "s4d_inv"])
def test_the_eigenbasis_gives_a_real_matrix_back(kind):
    """V Lambda V^-1 is real, block-diagonal and, for the skew one, skew; every mode decays or lasts."""
    torch.manual_seed(0)
    Lambda, V, inverse = s5.initial_eigenbasis(kind, 12, 2, conj_sym=False)
    torch.testing.assert_close(V @ inverse, torch.eye(12, dtype=V.dtype))
    A = V @ torch.diag(Lambda) @ inverse
    assert A.imag.abs().max() < 1e-10 and A[:6, 6:].abs().max() == 0 and (Lambda.real <= 0).all()
    if kind == "antisymmetric":
        torch.testing.assert_close(A, -A.mT)
    half, *_ = s5.initial_eigenbasis(kind, 12, 2, conj_sym=True)
    assert len(half) == 6 and (half.imag <= 0).all()


def test_ablations_start_at_the_eigenvalues_they_name():
    """S4D's lin and inv (its section 4), block by block; in discrete time those of the system discretised once."""
    n = torch.arange(4, dtype=DOUBLE)
    for kind, imag in (("s4d_lin", math.pi * n), ("s4d_inv", 8 / math.pi * (8 / (2 * n + 1) - 1))):
        Lambda, V, inverse = s5.initial_eigenbasis(kind, 16, 2, conj_sym=True)
        torch.testing.assert_close(Lambda, torch.complex(torch.full((8,), -0.5, dtype=DOUBLE), -imag.repeat(2)))
        torch.testing.assert_close(inverse @ V, torch.eye(8, dtype=V.dtype))  # HiPPO-N's eigenvectors
    continuous, discrete = small(), small(parameterisation="discrete")
    torch.testing.assert_close(discrete.Lambda, torch.exp(continuous.Lambda * continuous.Delta), rtol=1e-6, atol=1e-6)
    assert discrete.log_step is None and len(small(shared_dt=True).log_step) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"c_init": "complex_normal", "activation": "full_glu"}, {"shared_dt": True}])
def test_parameters_go_out_and_come_back(options, causal):
    layer = small(causal, **options)
    back = import_reference(layer, export_reference(layer))
    assert set(back) == {name for name, _ in layer.named_parameters()}
    assert all(torch.equal(back[name], parameter) for name, parameter in layer.named_parameters())
    with pytest.raises(ValueError, match="directions"):
        import_reference(small(not causal, **options), export_reference(layer))


def test_states_stay_in_single_precision_under_autocast():
    """Projections may be rounded, the recurrence not: its error would be that of bfloat16 over hundreds of steps."""
    layer = small().float()
    u = torch.randn(2, 300, 5)
    with torch.no_grad():
        exact = layer.states(u)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = layer.states(u)
            assert layer(u, everywhere(2, 300)).isfinite().all()
    for x, y in zip(exact, rounded, strict=True):
        assert y.dtype == torch.complex64
        assert (x - y).abs().max() < 0.02 * x.abs().max()


# LRU


def recurrent_unit(causal: bool = True, **options) -> lru.LRU:
    torch.manual_seed(0)
    return lru.LRU(lru.Config(**{"d_model": 5, "d_state": 6, "causal": causal, **options})).to(DOUBLE).eval()


def test_lru_is_its_equation():
    layer = recurrent_unit(causal=False)
    u = torch.randn(2, 17, 5, dtype=DOUBLE)
    with torch.no_grad():
        a = torch.exp(torch.complex(-torch.exp(layer.nu), torch.exp(layer.theta)))
        B, C = torch.view_as_complex(layer.B), torch.view_as_complex(layer.C)
        v = torch.exp(layer.gamma) * (u.to(B.dtype) @ B.T)
        y = layer.D * u
        for k, order in enumerate((range(17), range(16, -1, -1))):
            x = torch.zeros(2, 6, dtype=B.dtype)
            for t in order:
                x = a * x + v[:, t]
                y[:, t] += (x @ C[k].T).real
        torch.testing.assert_close(layer.mix_sequence(u), y, rtol=1e-10, atol=1e-10)


def test_lru_goes_step_by_step():
    layer = recurrent_unit()
    u = torch.randn(3, 40, 5, dtype=DOUBLE)
    state, y = layer.initial_state(3), []
    with torch.no_grad():
        for t in range(40):
            y_t, state = layer.step(u[:, t], state)
            y.append(y_t)
        torch.testing.assert_close(torch.stack(y, 1), layer(u, everywhere(3, 40)), rtol=1e-10, atol=1e-10)


def test_lru_starts_on_its_ring_with_states_of_unit_variance():
    torch.manual_seed(0)
    layer = lru.LRU(lru.Config(d_model=16, d_state=4000, r_min=0.5, r_max=0.9, max_phase=1.0, causal=True))
    a = layer.system().a.detach()
    assert 0.5 <= a.abs().min() and a.abs().max() <= 0.9001
    assert a.abs().square().mean() == pytest.approx((0.25 + 0.81) / 2, rel=0.01)  # uniform on the area
    assert 0 <= a.angle().min() and a.angle().max() <= 1.0 and a.angle().mean() == pytest.approx(0.5, rel=0.05)
    with torch.no_grad():
        (x,) = layer.states(torch.randn(8, 200, 16))
    assert x[:, 100:].abs().square().mean() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("initialisation", ["structured", "random", "random_ssm"])
@pytest.mark.parametrize("causal", [False, True])
def test_lru_trains(causal, initialisation):
    torch.manual_seed(0)
    model = lru.build(lru.Config(d_model=6, d_state=8, n_layers=1, causal=causal, initialisation=initialisation))
    x, context = torch.randn(2, 1000, 6), everywhere(2, 1000)
    (model(x, context) * torch.randn(2, 1000, 6)).sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())
    train = Train(steps=1, batch_size=1, learning_rate=1e-2, weight_decay=0.05)
    slow, rest = sorted(optimizer_groups(model, train), key=lambda group: group.learning_rate)
    assert (slow.learning_rate, slow.weight_decay, rest.learning_rate, rest.weight_decay) == (5e-3, 0.0, 1e-2, 0.05)
    assert set(slow.names) == {f"mixers.0.{name}" for name in ("nu", "theta", "gamma", "B")}


@pytest.mark.parametrize("causal", [False, True])
def test_lru_parameters_go_out_and_come_back(causal):
    layer = recurrent_unit(causal)
    back = import_reference(layer, export_reference(layer))
    assert set(back) == {name for name, _ in layer.named_parameters()}
    assert all(torch.equal(tensor, layer.get_parameter(name)) for name, tensor in back.items())


def test_an_empty_ring_is_refused():
    with pytest.raises(ValueError, match=r"r_min 0\.9 is not below r_max 0\.5"):
        lru.Config(r_min=0.9, r_max=0.5)


def test_rates_name_what_is_there():
    assert recurrent_unit().param_groups["nu"] == ParamGroup(lr_scale=0.5, weight_decay=False)
    for layer in (small(), small(parameterisation="discrete"), recurrent_unit()):
        assert set(layer.param_groups) <= {name for name, _ in layer.named_parameters()}
