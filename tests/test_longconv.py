"""Long convolutions and what surrounds them: transforms, held kernels, output maps, dropout, norms."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spt.config.plugins import find_plugin
from spt.models.base import Backbone, BackboneConfig, Context, Unsupported
from spt.models.longconv import Kernel, LongConvolution, cached_kernels
from spt.models.ops.convolution import convolve, spectrum, transform_length
from spt.models.ops.dropout import Dropout, keep_mask
from spt.models.ops.norms import BatchNorm, ScalarNorm
from spt.models.ops.output import Output
from spt.models.options import LocalConfig


class Taps(Kernel):
    """A kernel that is its own parameter."""

    calls = 0

    def __init__(self, directions: int, width: int, limit: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(directions, width, limit))
        self.limit = limit

    def forward(self, length):
        self.calls += 1
        return torch.sin(self.taps)[..., :length]

    def flops(self, length):
        return 1.0


def layer(causal=False, width=3, limit=9, **options) -> LongConvolution:
    torch.manual_seed(0)
    config = LocalConfig(d_model=width, causal=causal, **options)
    return LongConvolution(config, Taps(1 if causal else 2, width, limit)).double()


def by_sums(u, kernel):
    """layers.md 1.1: the reverse kernel begins at the next step."""
    y = torch.zeros_like(u)
    for t in range(u.shape[1]):
        for j in range(min(t + 1, kernel.shape[-1])):
            y[:, t] += kernel[0, :, j] * u[:, t - j]
        if len(kernel) == 2:
            for j in range(min(u.shape[1] - 1 - t, kernel.shape[-1])):
                y[:, t] += kernel[1, :, j] * u[:, t + 1 + j]
    return y


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 2), st.integers(0, 999))
def test_convolution_by_sums(batch, length, limit, directions, seed):
    torch.manual_seed(seed)
    u = torch.randn(batch, length, 3, dtype=torch.float64)
    kernel = torch.randn(directions, 3, min(limit, length), dtype=torch.float64)
    n = transform_length(length, kernel.shape[-1], directions == 2)
    torch.testing.assert_close(convolve(u, spectrum(kernel, n), n), by_sums(u, kernel))


def test_no_wrap_at_the_tightest_length():
    """n = L + M - 1 would put the reverse kernel's last lag onto the causal kernel's."""
    u, kernel = torch.randn(1, 8, 2).double(), torch.randn(2, 2, 8).double()
    assert transform_length(8, 8, True) >= 16 and transform_length(8, 8, False) >= 15
    torch.testing.assert_close(convolve(u, spectrum(kernel, 16), 16), by_sums(u, kernel))


@pytest.mark.parametrize("directions", [1, 2])
def test_gradients_of_the_convolution(directions):
    torch.manual_seed(1)
    u = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(directions, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda u, k: convolve(u, spectrum(k, 12), 12), (u, kernel))
    g = torch.randn(2, 7, 3, dtype=torch.float64)
    ours = torch.autograd.grad((convolve(u, spectrum(kernel, 12), 12) * g).sum(), (u, kernel))
    plain = torch.autograd.grad((by_sums(u, kernel) * g).sum(), (u, kernel))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_many_features_are_cut_into_blocks():
    """More features than a block takes, and no multiple of it."""
    u, kernel = torch.randn(4, 4096, 37).double(), torch.randn(1, 37, 16).double()
    n = transform_length(4096, 16, False)
    one = torch.cat([convolve(u[..., h : h + 1], spectrum(kernel[:, h : h + 1], n), n) for h in range(37)], -1)
    torch.testing.assert_close(convolve(u, spectrum(kernel, n), n), one)


@pytest.mark.parametrize("causal", [False, True])
def test_the_skip_weight_counts_once(causal):
    mixer, u = layer(causal), torch.randn(2, 12, 3).double()
    expected = by_sums(u, mixer.kernel(12)) + mixer.D * u
    torch.testing.assert_close(mixer.mix_sequence(u), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reach", [1, 4, 8, 20])
def test_a_reach_is_the_same_on_both_sides(causal, reach):
    """The reverse kernel, which begins at the next step, has one lag fewer."""
    mixer, u = layer(causal, reach=reach), torch.randn(2, 12, 3).double()
    kernel = mixer.kernel(12).clone()
    kernel[0, :, reach + 1 :] = 0
    kernel[1:, :, reach:] = 0
    torch.testing.assert_close(mixer.mix_sequence(u), by_sums(u, kernel) + mixer.D * u)
    mixer.kernel.rate = 0.5  # steps are half as far apart
    assert (mixer.farthest, mixer.lags(100)) == (2 * reach, 2 * reach + 1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", [(12, 12, 12), (12, 7, 7, 5), (5, 12, 7)])
@pytest.mark.parametrize("reach", [None, 6])
def test_held_kernels_give_the_gradients_of_one_batch(lengths, recompute, reach):
    """Computed once for several micro-batches, of different lengths, with and without gradient checkpointing."""
    config = LocalConfig(d_model=3, n_layers=2, reach=reach)
    torch.manual_seed(0)
    backbone = Backbone(config, lambda: [LongConvolution(config, Taps(2, 3, 9))]).double()
    backbone.recompute = recompute
    parts = [torch.randn(2, length, 3).double() for length in lengths]

    def step(x):
        context = Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)
        backbone(x, context).square().sum().backward()

    for part in parts:
        step(part)
    plain = {name: p.grad.clone() for name, p in backbone.named_parameters()}
    backbone.zero_grad()
    kernels = [mixer.kernel for mixer in backbone.mixers]
    for kernel in kernels:
        kernel.calls = 0
    with cached_kernels(backbone, 12) as last:
        for i, part in enumerate(parts):
            if i == len(parts) - 1:
                last()
            step(part)
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])
    assert [kernel.calls for kernel in kernels] == [1, 1]
    assert all(mixer._cached_kernel is None for mixer in backbone.mixers)


@torch.no_grad()
def test_held_kernels_without_gradients():
    mixer, u = layer(), torch.randn(2, 12, 3).double()
    expected = [mixer.mix_sequence(u[:, :length]) for length in (12, 7, 12)]
    mixer.kernel.calls = 0
    with cached_kernels(mixer, 12):
        for length, plain in zip((12, 7, 12), expected, strict=True):
            torch.testing.assert_close(mixer.mix_sequence(u[:, :length]), plain)
    assert mixer.kernel.calls == 1


def test_more_than_was_held_is_computed_anew():
    mixer, u = layer(limit=30), torch.randn(2, 30, 3).double()
    expected = mixer.mix_sequence(u)
    with cached_kernels(mixer, 20):
        torch.testing.assert_close(mixer.mix_sequence(u), expected)


class Product(Taps):
    """A kernel from a matrix product, which autocast would round."""

    def forward(self, length):
        return (self.taps.transpose(0, 2) @ torch.eye(2)).transpose(0, 2)[..., :length]


@pytest.mark.parametrize("held", [False, True])
def test_autocast_rounds_no_kernel(held):
    torch.manual_seed(0)
    mixer = LongConvolution(BackboneConfig(d_model=3), Product(2, 3, 9))
    u = torch.randn(2, 9, 3).bfloat16()
    exact = mixer.mix_sequence(u.float())
    with torch.autocast("cpu", torch.bfloat16), cached_kernels(mixer, 9) if held else contextlib.nullcontext():
        found = mixer.mix_sequence(u.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("early", [False, True, "untied"])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("kind", ["none", "linear", "glu", "half_glu1", "half_glu2"])
@pytest.mark.parametrize("tied", [False, True])
def test_output_maps_are_what_they_say(kind, gelu, early, tied, monkeypatch):
    """Against the same in plain torch with the same masks: values, and gradients of everything."""
    monkeypatch.setattr("spt.models.ops.output._NUMBERS", 3 * 4)  # three steps at a time
    torch.manual_seed(0)
    output = Output(4, kind, gelu=gelu, dropout=0.3, tied=tied, pre_activation_dropout=early).double().train()
    y = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.manual_seed(1)
    found = output(y)
    torch.manual_seed(1)
    ties = ([tied and early != "untied"] if early else []) + [tied]
    masks = [keep_mask(y, 0.3, each) / 0.7 for each in ties]
    seen = y * masks[0] if early else y
    z = F.gelu(seen, approximate="none" if gelu == "exact" else "tanh") * masks[-1]
    if kind == "none":
        expected = z
    else:
        v = z @ output.linear.weight.T + output.linear.bias
        gate = torch.sigmoid(v[..., -4:])
        expected = {"linear": v, "glu": v[..., :4] * gate, "half_glu1": z * gate, "half_glu2": seen * gate}[kind]
    torch.testing.assert_close(found, expected)
    leaves = [y, *output.parameters()]
    ours, theirs = (torch.autograd.grad((x * g).sum(), leaves) for x in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_backward_pass_through_a_gate_is_refused():
    """The first one has put the gradient in place of what the second would need."""
    output = Output(4, "glu")
    z = output(torch.randn(2, 5, 4)).sum()
    z.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.999])
def test_masks_keep_the_right_share(p):
    """Of a million numbers, and of each of the four that are drawn at once."""
    torch.manual_seed(0)
    kept = keep_mask(torch.zeros(1000, 1000), p, False).double().flatten()
    spread = (p * (1 - p) / 1e6) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < 5 * spread
    for lane in range(4):
        assert abs(float(kept[lane::4].mean()) - (1 - p)) < 10 * spread
    centred = kept - kept.mean()
    assert all(abs(float((centred[:-k] * centred[k:]).mean())) < 5e-3 * p * (1 - p) for k in (1, 2, 3, 4))
    assert keep_mask(torch.zeros(3, 7, 5), p, True).shape == (3, 1, 5)


def test_output_keeps_little():
    """Of y -> GLU(W drop(gelu(y)) + b): y, the map's answer and one byte a number."""
    output, kept = Output(64, "glu", dropout=0.5).train(), []
    y = torch.randn(2, 100, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output(y)
    weights = {p.untyped_storage().data_ptr() for p in output.parameters()}
    size = sum(t.untyped_storage().nbytes() for t in kept if t.untyped_storage().data_ptr() not in weights)
    assert size <= y.numel() * (4 + 8 + 1)


@pytest.mark.parametrize("tied", [False, True])
def test_dropout_keeps_the_mean_and_may_be_tied(tied):
    torch.manual_seed(0)
    drop, x = Dropout(0.25, tied), torch.ones(64, 50, 40, requires_grad=True)
    y = drop(x)
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)] and float(y.detach().mean()) == pytest.approx(1, abs=0.05)
    same = bool((y == y[:, :1]).all())
    assert same == tied
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert drop.eval()(x) is x


def test_scalar_norm_has_no_epsilon():
    norm, x = ScalarNorm().double(), torch.randn(2, 5, 8).double()
    with torch.no_grad():
        norm.m.fill_(0.3), norm.s.fill_(1.7)
    expected = 1.7 * (x - x.mean(-1, keepdim=True) + 0.3) / x.std(-1, keepdim=True, correction=0)
    torch.testing.assert_close(norm(x), expected)
    constant = norm(torch.ones(1, 1, 8).double().requires_grad_())
    assert constant.isfinite().all()


def test_batch_norm_is_torchs_and_skips_padding():
    torch.manual_seed(0)
    ours, theirs = BatchNorm(6), nn.BatchNorm1d(6)
    x = torch.randn(4, 9, 6, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    valid = torch.arange(9) < torch.tensor([[9], [4], [1], [7]])
    rows = x[valid]
    for norm in (ours, theirs):
        norm.zero_grad()
    padded, plain = ours(x, valid)[valid], theirs(rows)
    torch.testing.assert_close(padded, plain)
    g = torch.randn_like(plain)
    a, b = (
        torch.autograd.grad((y * g).sum(), [x, *norm.parameters()]) for y, norm in ((padded, ours), (plain, theirs))
    )
    for mine, other in zip(a, b, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.transpose(1, 2)).transpose(1, 2))


def test_batch_norm_counts_padding_where_it_is_asked_to():
    """batch_padded, as published: every step of every example enters the statistics, filler rows do not."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, 4)
    valid = torch.arange(6) < torch.tensor([[6], [2], [6]])
    context = Context(valid, padded=True, real=torch.tensor([True, True, False]))
    found = {}
    for norm in ("batch", "batch_padded"):
        config = BackboneConfig(d_model=4, n_layers=1, norm=norm, prenorm=True)
        backbone = Backbone(config, lambda config=config: [LongConvolution(config, Taps(2, 4, 6))])
        backbone(x, context)
        found[norm] = backbone.norms[0].running_mean
    torch.testing.assert_close(found["batch_padded"], 0.1 * x[:2].mean((0, 1)))
    torch.testing.assert_close(found["batch"], 0.1 * x[valid & context.real[:, None]].mean(0))


def test_batch_norm_follows_once_with_gradient_checkpointing():
    config = BackboneConfig(d_model=4, n_layers=1, norm="batch")
    x, found = torch.randn(2, 6, 4), []
    for recompute in (False, True):
        torch.manual_seed(0)
        backbone = Backbone(config, lambda: [LongConvolution(config, Taps(2, 4, 6))])
        backbone.recompute = recompute
        backbone(x, Context(torch.ones(2, 6, dtype=torch.bool), padded=False)).square().sum().backward()
        found.append((backbone.norms[0].running_mean.clone(), backbone.mixers[0].D.grad.clone()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_post_norm_stands_behind_the_sum():
    config = BackboneConfig(d_model=4, n_layers=1, prenorm=False)
    backbone = Backbone(config, lambda: [LongConvolution(config, Taps(2, 4, 6))])
    x = torch.randn(2, 6, 4)
    context = Context(torch.ones(2, 6, dtype=torch.bool), padded=False)
    expected = backbone.norms[0](x + backbone.mixers[0](x, context))
    torch.testing.assert_close(backbone(x, context), expected)
    assert isinstance(backbone.last_norm, nn.Identity)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("s4", {"n_ssm": 2}),
        ("s4d", {"n_ssm": 1, "disc": "bilinear"}),
        ("s4d", {"disc": "zoh", "dt_tie": False}),
        ("dss", {"version": "exp-re-im", "Lambda_init": "hippo"}),
        ("dss", {"version": "softmax"}),
        ("dlr", {}),
        ("dlr", {"version": "imag"}),
        ("dlr", {"cast": "prod"}),
    ],
)
def test_kernels_of_layers_that_are_alike_are_computed_together(name, options, causal, monkeypatch):
    """Outputs and gradients are those of kernels computed one by one; only the number of calls is less."""
    module = find_plugin("models", name).module
    config = module.Config(d_model=6, n_layers=3, d_state=8, max_length=19, causal=causal, **options)
    net = module.build(config).double()
    x = torch.randn(2, 19, 6, dtype=torch.float64)
    context = Context(torch.ones(2, 19, dtype=torch.bool), padded=False)
    calls, found = [], []
    kernel = type(net.mixers[0].kernel)
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, length: (calls.append(length), forward(self, length))[1])
    for few in (1 << 17, 0):
        monkeypatch.setattr("spt.models.longconv._FEW_TAPS", few)
        net.zero_grad()
        y = net(x, context)
        y.square().sum().backward()
        found.append((y.detach(), *(p.grad.clone() for p in net.parameters())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert len(calls) == (6 if options.get("cast") == "prod" else 4)
    assert all(layer._joint_spectrum is None for layer in net.mixers)


def test_kernels_that_differ_are_not_computed_together(monkeypatch):
    module = find_plugin("models", "s4d").module
    net = module.build(module.Config(d_model=4, n_layers=2, d_state=4, max_length=9))
    net.mixers[1].kernel.rate = 2.0
    context = Context(torch.ones(1, 9, dtype=torch.bool), padded=False)
    x = torch.randn(1, 9, 4)
    y = net(x, context)
    monkeypatch.setattr("spt.models.longconv._FEW_TAPS", 0)
    torch.testing.assert_close(net(x, context), y)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rate", [0.5, 2.0, 40.0])
@pytest.mark.parametrize("name", ["s4", "s4d", "dss"])
def test_a_limited_kernel_keeps_its_time_when_steps_are_resampled(name, rate, causal):
    """Its limit counts steps of training. A transform that is too short would wrap the end around to the beginning."""
    module = find_plugin("models", name).module
    extra = {"version": "exp"} if name == "dss" else {}
    config = module.Config(
        d_model=4, n_layers=1, d_state=4, causal=causal, max_kernel_length=16, max_length=100, **extra
    )
    mixer = module.build(config).mixers[0].double()
    mixer.rescale(rate)
    length, lags = 100, max(1, round(16 / rate))
    with torch.no_grad():
        kernel, x = mixer.kernel(length), torch.randn(1, length, 4, dtype=torch.float64)
        assert kernel.shape[2] == min(length, lags)
        expected = x * mixer.D
        for lag in range(kernel.shape[2]):
            expected[:, lag:] += x[:, : length - lag] * kernel[0, :, lag]
            if not causal:
                expected[:, : length - lag - 1] += x[:, lag + 1 :] * kernel[1, :, lag]
        torch.testing.assert_close(mixer.mix_sequence(x), expected)


def test_weights_without_a_step_size_are_not_rescaled():
    module = find_plugin("models", "dss").module
    for version, possible in (("exp", True), ("exp-re-im", True), ("exp-no-scale", False), ("softmax", False)):
        model = module.build(module.Config(d_model=4, n_layers=1, d_state=4, max_length=9, version=version))
        with contextlib.nullcontext() if possible else pytest.raises(Unsupported):
            model.rescale(2.0)


def test_a_dropout_too_small_to_be_drawn_drops_nothing():
    assert keep_mask(torch.zeros(7, 9), 1e-6, False).all()
