"""Linear attention in chunks, against its definition as a loop in double precision."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from spt.models.ops.linear_attention import (
    linear_attention,
    linear_attention_flops,
    linear_attention_step,
    two_sided_attention,
    two_sided_attention_flops,
)

KINDS = ("none", "head", "step", "feature")
B, H, G, N, P = 2, 4, 2, 3, 5


def inputs(length, kind, strength=1.0, groups=G, dtype=torch.float64):
    """Queries, keys, values; log decays of -strength times up to 1, some of them zero."""
    shapes = [(B, length, groups, N), (B, length, groups, N), (B, length, H, P)]
    tensors = [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    if kind == "none":
        return [*tensors, None]
    shape = {"head": (H,), "step": (B, length, H), "feature": (B, length, H, N)}[kind]
    decays = -strength * torch.rand(*shape, dtype=dtype) * (torch.rand(*shape) < 0.8)
    return [*tensors, decays.requires_grad_()]


def loop(q, k, v, g, reverse=False):
    """o_t = S_t^T q_t, S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    S = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    outputs = {}
    for t in sorted(range(v.shape[1]), reverse=reverse):
        if g is not None:
            log_decay = g if g.ndim == 1 else g[:, t]
            S = torch.exp(log_decay)[..., None, None] * S if g.ndim < 4 else torch.exp(log_decay)[..., None] * S
        S = S + k[:, t, ..., None] * v[:, t, ..., None, :]
        outputs[t] = torch.einsum("bhn,bhnp->bhp", q[:, t], S)
    return torch.stack([outputs[t] for t in sorted(outputs)], 1)


def gradients(y, tensors):
    weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return torch.autograd.grad((y * weights).sum(), [x for x in tensors if x is not None], materialize_grads=True,
                               allow_unused=True)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 20),
    chunk=st.sampled_from([1, 2, 4, 16, 64]),
    kind=st.sampled_from(KINDS),
    strength=st.sampled_from([0.01, 1.0, 50.0]),
    reverse=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
)
@example(37, 8, "head", 1.0, True, 1)
@example(37, 8, "step", 50.0, False, 2)
@example(37, 8, "feature", 50.0, True, 1)
@example(37, 8, "none", 1.0, True, 4)
def test_chunks_compute_the_recurrence(length, chunk, kind, strength, reverse, groups):
    torch.manual_seed(length)
    tensors = inputs(length, kind, strength, groups)
    ours, expected = linear_attention(*tensors, reverse=reverse, chunk=chunk), loop(*tensors, reverse)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12 * float(expected.detach().abs().max()))
    for mine, theirs in zip(gradients(ours, tensors), gradients(expected, tensors), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind):
    torch.manual_seed(1)
    tensors = [x for x in inputs(5, kind, 2.0) if x is not None]
    with torch.no_grad():
        for decays in tensors[3:]:
            decays.sub_(0.01)  # so that no difference makes one positive
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, chunk=2), tensors, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("strength", [1.0, 50.0, 1e4, torch.inf])
def test_strong_decays_are_exact_in_single_precision(kind, strength):
    """Sums of log decays over a chunk reach -3200, whose differences in single precision would be wrong by 1e-4."""
    torch.manual_seed(2)
    *tensors, g = inputs(100, kind, dtype=torch.float32)
    with torch.no_grad():
        g.mul_(torch.where(torch.rand_like(g) < 0.5, 0.1, strength))
        g[g.isnan()] = 0.0
    ours = linear_attention(*tensors, g, chunk=64)
    expected = loop(*(x.double() for x in tensors), g.double())
    assert float((ours - expected).detach().abs().max()) < 2e-6 * float(expected.detach().abs().max())
    assert all(gradient.isfinite().all() for gradient in gradients(ours, [*tensors, g]))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_small_gradients_of_strong_decays_are_exact(kind):
    """Of 1e-8 beside products of 1, in single precision."""
    torch.manual_seed(4)
    *tensors, g = inputs(70, kind, dtype=torch.float32)
    with torch.no_grad():
        g.fill_(-18.0)
    ours = gradients(linear_attention(*tensors, g, chunk=16), [*tensors, g])[-1]
    theirs = gradients(loop(*(x.double() for x in (*tensors, g))), [*tensors, g])[-1]
    assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max()) < 1e-9


def test_half_precision_is_that_of_its_inputs():
    tensors = [x if x is None else x.detach().bfloat16() for x in inputs(70, "step")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_attention(*tensors)
    expected = loop(*(x.double() for x in tensors))
    assert ours.dtype == torch.bfloat16
    assert float((ours - expected).abs().max()) < 2**-8 * float(expected.abs().max())


@pytest.mark.parametrize("kind", KINDS[1:])
def test_decays_may_be_more_precise_than_what_they_weight(kind):
    *tensors, g = (x.detach() for x in inputs(70, kind))
    ours = linear_attention(*(x.float() for x in tensors), g)
    expected = loop(*tensors, g)
    assert ours.dtype == torch.float32
    assert float((ours - expected).abs().max()) < 2e-6 * float(expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_compute_the_same(kind):
    q, k, v, g = (x if x is None else x.detach() for x in inputs(20, kind))
    state, outputs = None, []
    for t in range(20):
        decay = g if g is None or g.ndim == 1 else g[:, t]
        o, state = linear_attention_step(q[:, t], k[:, t], v[:, t], decay, state)
        outputs.append(o)
    assert torch.allclose(torch.stack(outputs, 1), linear_attention(q, k, v, g, chunk=8), rtol=0, atol=1e-12)


def test_two_sided_sums_are_those_of_both_directions_less_the_present():
    q, k, v, _ = (x if x is None else x.detach() for x in inputs(20, "none", groups=H))
    valid = torch.arange(20)[None] < torch.tensor([[20], [13]])
    masked = torch.where(valid[..., None, None], v, 0.0)
    present = (q * k).sum(-1, keepdim=True) * masked
    expected = linear_attention(q, k, masked) + linear_attention(q, k, masked, reverse=True) - present
    assert torch.allclose(two_sided_attention(q, k, v, valid), expected, rtol=0, atol=1e-12)
    assert torch.allclose(two_sided_attention(q, k, masked), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize(("kind", "groups"), [("none", 4), ("head", 4), ("step", 2), ("feature", 4)])
def test_its_operations_are_counted(kind, groups, length):
    with FakeTensorMode():
        tensors = inputs(length, kind, groups=groups, dtype=torch.float32)
        with FlopCounterMode(display=False) as forward:
            y = linear_attention(*tensors)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
    stated = B * linear_attention_flops(length, H, N, P, groups=groups, per_feature=kind == "feature")
    assert stated.forward == pytest.approx(forward.get_total_flops(), rel=0.01)
    assert stated.backward == pytest.approx(backward.get_total_flops(), rel=0.01)


def test_operations_of_two_sided_sums_are_counted():
    q, k, v, _ = inputs(50, "none", groups=H)
    with FlopCounterMode(display=False) as forward:
        y = two_sided_attention(q, k, v)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    stated = B * two_sided_attention_flops(50, H, N, P)
    assert (stated.forward, stated.backward) == (forward.get_total_flops(), backward.get_total_flops())


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_not_kept(kind):
    """Nothing as large as a score for each step and step of a chunk."""
    tensors, sizes = inputs(256, kind, dtype=torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        linear_attention(*tensors, chunk=64)
    assert max(sizes) <= B * 256 * H * max(N, P) < B * 256 * H * 64


def test_what_does_not_fit_is_refused():
    q, k, v, g = inputs(9, "step")
    with pytest.raises(ValueError, match="4 heads of values cannot share 3"):
        linear_attention(q[:, :, :1].expand(-1, -1, 3, -1), k[:, :, :1].expand(-1, -1, 3, -1), v)
    with pytest.raises(ValueError, match="log decays"):
        linear_attention(q, k, v, g[:, :5])
    with pytest.raises(ValueError, match="power of two"):
        linear_attention(q, k, v, chunk=48)
