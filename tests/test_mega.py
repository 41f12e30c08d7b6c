"""Mega: its moving average against the recurrence, its attention against loops, and how the layer joins the stream."""

import math

import pytest
import torch
from pydantic import ValidationError
from tiny import loaded, run, spt
from torch.nn import functional as F

from spt.checks.model_contract import all_valid, tiny
from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.models import mega
from spt.models.base import BackboneConfig, Context
from spt.models.longconv import cached_kernels
from spt.models.mega import EMA, Config, EMAKernel, GatedAttention, RotaryBias, SimpleBias, build
from spt.models.ops.norms import ScaleNorm

KINDS = ("softmax", "laplace", "relu2")


def config(**options):
    return Config(**{"d_model": 6, "d_state": 3, "d_attention": 4, "d_hidden": 5, "max_length": 64, **options})


def ema(**options):
    torch.manual_seed(0)
    return EMA(config(**options)).double()


def attention(**options):
    """With scores far from zero, as the start's are not."""
    torch.manual_seed(0)
    layer = GatedAttention(config(**options)).double().eval()
    with torch.no_grad():
        for parameter in layer.bias.parameters():
            parameter.mul_(30)
    return layer


def streams(*widths, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, length, width, generator=generator, dtype=torch.float64) for width in widths]


def everything(x):
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)


def of_lengths(*lengths):
    longest = max(lengths)
    return Context(torch.arange(longest) < torch.tensor(lengths)[:, None], padded=True)


# -------------------------------------------------------------------------------------------------- moving average


def by_recurrence(layer, u, longest=None):
    """Both directions from their own first step on, each seeing the present; only the last `longest` inputs count."""
    kernel = layer.kernel
    p, alpha = torch.sigmoid(kernel.delta), torch.sigmoid(kernel.alpha)
    y = layer.D * u
    for k, sequence in enumerate((u, u.flip(1))[: len(p)]):
        answers = []
        for t in range(u.shape[1]):
            h = torch.zeros(len(u), *p.shape[1:], dtype=u.dtype)
            for s in range(0 if longest is None else max(0, t + 1 - longest), t + 1):
                h = (1 - p[k] * alpha[k]) * h + p[k] * kernel.beta[k] * sequence[:, s, :, None]
            answers.append((kernel.gamma[k] * h).sum(-1) / math.sqrt(p.shape[-1]))
        answer = torch.stack(answers, 1)
        y = y + (answer.flip(1) if k else answer)
    return y


@pytest.mark.parametrize("longest", [None, 1, 4, 40])
@pytest.mark.parametrize("length", [1, 2, 7, 13])
@pytest.mark.parametrize("causal", [False, True])
def test_the_convolution_is_the_recurrence(causal, length, longest):
    layer = ema(causal=causal, max_kernel_length=longest)
    (u,) = streams(6, length=length)
    torch.testing.assert_close(layer.mix_sequence(u), by_recurrence(layer, u, longest))


@pytest.mark.parametrize("longest", [None, 5])
def test_a_shorter_kernel_is_the_beginning_of_a_longer_one(longest):
    kernel = ema(max_kernel_length=longest).kernel
    for length in range(1, 12):
        short, long = kernel(length), kernel(40)
        torch.testing.assert_close(short, long[..., :length])
        assert short.shape[-1] == min(length, longest or length)


@pytest.mark.parametrize("rate", [0.0, -6.0, -14.0])
@pytest.mark.parametrize("length", [100, 4096, 16384])
@torch.no_grad()
def test_kernels_in_single_precision(length, rate):
    """Slow averages too: q comes within 1e-6 of one, and a rounded logarithm of it would be off by L 6e-8."""
    torch.manual_seed(0)
    kernel = EMAKernel(config(d_model=3, d_state=16))
    kernel.alpha.add_(rate)
    p, alpha = torch.sigmoid(kernel.delta.double()), torch.sigmoid(kernel.alpha.double())
    powers = torch.exp(torch.log1p(-p * alpha)[..., None] * torch.arange(length, dtype=torch.float64))
    both = torch.einsum("kdn,kdnl->kdl", p * kernel.beta * kernel.gamma / 4, powers)
    present = torch.zeros_like(both[1])
    present[:, 0] = both[1, :, 0]
    found = kernel(length)
    assert found.dtype == torch.float32
    for ours, exact in ((found[0], both[0] + present), (found[1, :, :-1], both[1, :, 1:])):
        assert float((ours - exact).abs().max() / exact.abs().max()) < 1e-6


def test_gradients_of_the_kernel():
    kernel = ema(d_model=2).kernel
    names, leaves = zip(*((name, p.detach().requires_grad_()) for name, p in kernel.named_parameters()), strict=True)

    def made(*values):
        return torch.func.functional_call(kernel, dict(zip(names, values, strict=True)), 37)

    assert torch.autograd.gradcheck(made, leaves)


@torch.no_grad()
def test_stepping_a_moving_average():
    layer = ema(causal=True)
    (u,) = streams(6, length=9)
    state, answers = layer.initial_state(2), []
    for t in range(9):
        answer, state = layer.step(u[:, t], state)
        answers.append(answer)
    torch.testing.assert_close(torch.stack(answers, 1), layer(u, everything(u)))
    assert not build(config(causal=True)).recurrent, "the attention has no step"


# ------------------------------------------------------------------------------------------------------- attention


def by_loops(layer, q, k, v, context):
    """One weight after another, by the text of the paper."""
    y = torch.zeros_like(v)
    batch, length, width = q.shape
    c = layer.chunk or length
    bias = layer.bias.by_distance(64)
    for b in range(batch):
        for i in range(length):
            keys = [j for j in range(i // c * c, min((i // c + 1) * c, length)) if bool(context.valid[b, j])]
            keys = [j for j in keys if j <= i or not layer.causal]
            if not keys:
                continue
            scores = torch.stack([q[b, i] @ k[b, j] for j in keys])
            scores = scores / (math.sqrt(width) if layer.kind == "softmax" else len(keys))
            scores = scores + torch.stack([bias[63 + j - i] for j in keys])
            if layer.kind == "softmax":
                weights = scores.exp() / scores.exp().sum()
            elif layer.kind == "laplace":
                weights = 0.5 * (1 + torch.erf((scores - 0.707107) / (0.282095 * math.sqrt(2))))
            else:
                weights = torch.where(scores > 0, scores, 0) ** 2
            y[b, i] = sum(w * v[b, j] for w, j in zip(weights, keys, strict=True))
    return y


@pytest.mark.parametrize("relative_bias", ["simple", "rotary"])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_what_loops_give(kind, causal, chunk, relative_bias):
    """With padding, and a last chunk that is shorter."""
    layer = attention(attention=kind, causal=causal, chunk=None, relative_bias=relative_bias)
    layer.chunk = chunk
    q, k, v = streams(4, 4, 5, length=13)
    for context in (everything(q), of_lengths(13, 8)):
        y, expected = layer.attend(q, k, v, context), by_loops(layer, q, k, v, context)
        valid = context.valid
        torch.testing.assert_close(y[valid], expected[valid])
        assert y.isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_attention(kind, causal, dropout, monkeypatch):
    """Several queries at a time, several chunks at a time, padding, and what dropout has left."""
    monkeypatch.setattr(mega, "_IN_CACHE", 40)
    layer = attention(attention=kind, causal=causal, attention_dropout=dropout).train()
    q, k, v = (x.requires_grad_() for x in streams(4, 4, 2, length=19))
    bias = layer.bias.weight.detach().clone().requires_grad_()
    context = of_lengths(19, 11)

    def attended(q, k, v, bias):
        torch.manual_seed(3)
        with torch.no_grad():
            layer.bias.weight.copy_(bias)
        layer.bias.by_distance = lambda length: bias[64 - length : 63 + length]
        return layer.attend(q, k, v, context)[context.valid]

    assert torch.autograd.gradcheck(attended, (q, k, v, bias), fast_mode=True)
    part = list(mega._blocks_of_queries(q, causal))
    assert [p.i.stop for p in part] == [16, 19, 16, 19], "otherwise this test shows less than it says"


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_queries_do_not_show(kind, monkeypatch):
    layer = attention(attention=kind, causal=True, chunk=20)
    q, k, v = streams(4, 4, 5, length=50)
    found = []
    for size in (1 << 18, 800, 100, 1):
        monkeypatch.setattr(mega, "_IN_CACHE", size)
        found.append(layer.attend(q, k, v, everything(q)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_all_of_it(causal, kind):
    models = []
    for chunk in (None, 20):
        torch.manual_seed(0)
        models.append(build(config(attention=kind, causal=causal, chunk=chunk, max_length=20)))
    for length in (20, 13, 1):
        (x,) = (x.float() for x in streams(6, length=length))
        assert torch.equal(*(model(x, everything(x)) for model in models))


def test_a_chunk_sees_no_other():
    layer = attention(chunk=4)
    q, k, v = streams(4, 4, 5, length=10)
    changed = [torch.cat([x[:, :4], x[:, 4:8] + 1, x[:, 8:]], dim=1) for x in (q, k, v)]
    same = (layer.attend(*changed, everything(q)) == layer.attend(q, k, v, everything(q))).all(-1).all(0)
    assert same.tolist() == [True] * 4 + [False] * 4 + [True] * 2
    (x,) = streams(6, length=10)
    further = torch.cat([x[:, :-1], x[:, -1:] + 1], dim=1)
    moved = layer(further, everything(x)) != layer(x, everything(x))
    assert moved[:, 0].any(), "the moving average spans all chunks"


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, chunk):
    """However much there is of it, and whether it fills a chunk or not; a row of padding alone gives numbers."""
    torch.manual_seed(0)
    model = build(config(attention=kind, chunk=chunk, n_layers=2)).double()
    (x,) = streams(6, length=8)
    alone = model(x, everything(x))
    for more in (1, 2, 5, 9):
        longer = torch.cat([x, 100 * torch.ones(2, more, 6).double()], dim=1)
        for lengths in ((8, 8), (8, 0)):
            y = model(longer, Context(torch.arange(8 + more) < torch.tensor(lengths)[:, None], padded=True))
            torch.testing.assert_close(y[: 1 + lengths[1] // 8, :8], alone[: 1 + lengths[1] // 8])
            assert y.isfinite().all()


def test_little_is_kept_for_the_backward_pass():
    """Nothing of the size of the weights, which full attention has in plenty."""
    layer, length = GatedAttention(config(attention="laplace", max_length=512)), 512
    (x,) = (x.float() for x in streams(6, length=length))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        layer(x, everything(x)).sum().backward()
    assert max(kept) <= 2 * length * 40 < length**2 / 6


def test_weights_stay_in_single_precision_under_autocast():
    """Scores and weights, that is; values and what is made of them have autocast's type."""
    layer = GatedAttention(config(attention="softmax", d_attention=32))
    q, k, v = (x.float() for x in streams(32, 32, 5, length=50))
    exact = layer.attend(q, k, v, everything(q))
    with torch.autocast("cpu", torch.bfloat16):
        same = layer.attend(q, k, v, everything(q))
        rounded = layer.attend(q, k, v.bfloat16(), everything(q))
        y = layer(v.new_ones(2, 50, 6), everything(q))
    assert torch.equal(same, exact)
    assert rounded.dtype == torch.bfloat16 and float((rounded - exact).detach().abs().max()) < 0.02
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


@torch.no_grad()
def test_rotary_bias_is_a_product_of_rotated_vectors():
    torch.manual_seed(0)
    bias = RotaryBias(6).double()
    steps, rates = torch.arange(9.0).double(), 10000.0 ** (-torch.arange(3.0).double() / 3)
    turn = torch.polar(torch.ones(9, 3).double(), torch.outer(steps, rates))
    query, key = (turn * torch.complex(*x.chunk(2)) for x in (bias.alpha, bias.beta))
    torch.testing.assert_close(bias.by_distance(9).unfold(0, 9, 1).flip(0), (query @ key.mH).real)


# ----------------------------------------------------------------------------------------------------------- layer


@pytest.mark.parametrize("prenorm", [False, True])
def test_the_gate_stands_between_the_stream_and_its_successor(prenorm):
    """It is not added: with the gate closed the stream passes, with it open nothing of the stream is left."""
    stack = build(config(n_layers=1, feed_forward="none", prenorm=prenorm, last_norm=False, d_hidden=5)).double()
    layer, norm = stack.mixers[0], stack.norms[0]
    (x,) = streams(6, length=7)
    gate, candidate = layer.candidate(norm(x) if prenorm else x, everything(x))
    expected = (1 - gate) * x + gate * candidate
    torch.testing.assert_close(stack(x, everything(x)), expected if prenorm else norm(expected))
    for value, wanted in ((-200.0, x), (200.0, candidate)):
        with torch.no_grad():
            layer.base.weight[:6] = 0.0
            layer.base.bias[:6] = value
        torch.testing.assert_close(stack(x, everything(x)), wanted if prenorm else norm(wanted))


@pytest.mark.parametrize("recompute", [False, True])
def test_held_kernels_give_the_gradients_of_one_batch(recompute):
    torch.manual_seed(0)
    stack = build(config(n_layers=2, norm="batch", dropout=0.3, chunk=5)).double().train()
    stack.recompute = recompute
    parts = [streams(6, length=length, seed=length)[0] for length in (12, 7, 7)]

    def gradients(last):
        stack.zero_grad()
        torch.manual_seed(1)
        for i, part in enumerate(parts):
            if i == len(parts) - 1:
                last()
            stack(part, everything(part)).square().sum().backward()
        return [p.grad.clone() for p in stack.parameters()]

    plain = gradients(lambda: None)
    with cached_kernels(stack, 12) as last:
        held = gradients(last)
    for one, other in zip(plain, held, strict=True):
        torch.testing.assert_close(one, other)


def test_kernels_are_made_once_a_step(tmp_path, monkeypatch):
    """Six steps of three micro-batches, two evaluations of training, one of the result and one for the temperature."""
    kernel, calls = find_plugin("models", "mega").module.EMAKernel, []
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, length: calls.append(length) or forward(self, length))
    one = loaded(tmp_path, model={"name": "mega", "d_model": 16, "n_layers": 1, "d_state": 4})
    run(Job(one, "finetune", 0), tmp_path / "runs", micro_batch_size=3)
    assert len(calls) == 6 + 2 + 2


def test_dropout_where_the_published_code_has_it():
    """On the moving average, the values, the weights and the candidate: none of them twice, and not on the gate."""
    torch.manual_seed(0)
    context, ones = all_valid(torch.ones(1, 400, 6)), torch.ones(1, 400, 6)
    for name in ("dropout", "hidden_dropout", "attention_dropout"):
        layer = GatedAttention(config(max_length=400, **{name: 0.5})).train()
        assert not torch.equal(layer(ones, context), layer(ones, context)), name
        assert torch.equal(layer.eval()(ones, context), layer(ones, context)), name
    layer = GatedAttention(config(dropout=0.5, tie_dropout=True)).train()
    gate, candidate = layer.candidate(ones[:, :40], all_valid(ones[:, :40]))
    dropped = candidate == 0
    assert (gate > 0).all() and dropped.any() and (dropped == dropped[:, :1]).all()
    stack = build(config(n_layers=1, dropout=0.5, feed_forward="none", last_norm=False, max_length=400)).train()
    with torch.no_grad():  # gates at a half, candidates at silu(5)
        stack.mixers[0].base.weight.zero_()
        stack.mixers[0].base.bias[-6:] = 5.0
        stack.mixers[0].out.weight.zero_()
    dropped = (stack(8 * ones, context) - 4.0).abs() < 1e-4
    assert 0.4 < float(dropped.float().mean()) < 0.6, "a second dropout would leave a quarter"


@torch.no_grad()
def test_attention_dropout_scales_what_is_left():
    layer = attention(attention="relu2", attention_dropout=0.25)
    q, k, v = streams(4, 4, 5, length=60)
    exact = layer.attend(q, k, v, everything(q))
    layer.train()
    mean = torch.stack([layer.attend(q, k, v, everything(q)) for _ in range(400)]).mean(0)
    assert float((mean - exact).norm() / exact.norm()) < 0.1


@torch.no_grad()
def test_it_starts_as_published():
    torch.manual_seed(0)
    stack = build(Config(d_model=64, n_layers=1, max_length=1024))
    layer, feed_forward = stack.mixers
    kernel = layer.ema.kernel
    near = {
        "value.weight": (0, 0.02), "base.weight": (0, 0.02), "out.weight": (0, 0.02), "bias.weight": (0, 0.02),
        "gamma": (0, 0.02), "beta": (0, 0), "value.bias": (0, 0), "base.bias": (0, 0), "out.bias": (0, 0),
        "ema.kernel.delta": (0, 0.2), "ema.kernel.alpha": (0, 0.2), "ema.kernel.gamma": (0, 1), "ema.D": (0, 1),
    }  # fmt: skip
    near |= {f"{name}.{part}": (0, 0.02 * (part == "weight")) for name in ("up", "down") for part in ("weight", "bias")}
    named = dict([*layer.named_parameters(), *feed_forward.named_parameters()])
    assert set(near) | {"ema.kernel.beta"} == set(named)
    for name, (mean, std) in near.items():
        assert float(named[name].mean()) == pytest.approx(mean, abs=0.3 * std), name
        assert float(named[name].std()) == pytest.approx(std, rel=0.3), name
    signs = kernel.beta - torch.tensor([1.0, -1.0]).repeat(8)
    assert float(signs.std()) == pytest.approx(0.02, rel=0.1) and float(signs.mean().abs()) < 0.01
    assert kernel.beta.shape == (2, 64, 16) and layer.value.out_features == 128
    assert feed_forward.up.out_features == 128 and feed_forward.activation == "silu"
    assert build(Config(d_model=64, n_layers=1, max_length=8, d_ff=9)).mixers[1].up.out_features == 9


@pytest.mark.parametrize("eps", [None, 0.5])
def test_scale_norm(eps):
    x, norm = torch.randn(3, 5, 6), ScaleNorm() if eps is None else ScaleNorm(eps)
    assert [(name, p.shape) for name, p in norm.named_parameters()] == [("g", (1,))]
    with torch.no_grad():
        norm.g.fill_(3.0)
    expected = F.rms_norm(x, (6,), torch.full((6,), 3.0), 1e-5 if eps is None else eps)
    torch.testing.assert_close(norm(x), expected)
    assert norm(torch.zeros(2, 6)).isfinite().all()
    assert type(tiny(find_plugin("models", "mega"), causal=False, norm="scale").norms[0]) is type(norm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"relative_bias": "rotary", "d_attention": 5}, "rotary rotates pairs, but d_attention is 5"),
        ({"attention": "linear"}, "laplace"),
        ({"chunk": 0}, "greater than or equal to 1"),
        ({"feed_forward": "none", "ff_dropout": 0.1}, "ff_dropout has no effect without a feed-forward layer"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ValidationError, match=words):
        config(**options)
    assert isinstance(config(feed_forward="none"), BackboneConfig)


def test_chunks_cost_less():
    full_, chunked, truncated = (
        build(Config(max_length=4096, n_layers=1, **options))
        for options in ({}, {"chunk": 128}, {"max_kernel_length": 64})
    )
    scores = 2.0 * 4096 * (4096 - 128) * (64 + 256)
    assert full_.flops(4096).forward - chunked.flops(4096).forward == pytest.approx(scores)
    assert 2 * truncated.shared_flops(4096).forward < full_.shared_flops(4096).forward
    odd = chunked.flops(1000).forward - build(Config(max_length=4096, n_layers=1, chunk=1)).flops(1000).forward
    assert odd == pytest.approx(2.0 * (7 * 128**2 + 104**2 - 1000) * (64 + 256))


@pytest.mark.slow
def test_show_and_the_quick_start(tmp_path):
    done = spt("show", "quickstart", "model.name=mega", "model.d_ff=null", "--all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mega" in done.stdout and "ema.kernel.delta" in done.stdout


def test_a_simple_bias_ends_at_its_longest():
    bias = SimpleBias(4)
    assert torch.equal(bias.by_distance(4), bias.weight) and torch.equal(bias.by_distance(1), bias.weight[3:4])
    with pytest.raises(ValueError, match="attention over 5 steps, but there are biases for 4"):
        bias.by_distance(5)
    assert len(RotaryBias(4).by_distance(500)) == 999
