"""Attention: positions, full and local attention on every backend, the layer and its options."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_weights import export_reference, import_reference
from tiny import ROOT, recipe_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from spt.checks import model_contract
from spt.checks.model_contract import all_valid, counted_flops, difference, sequence, tiny
from spt.config.plugins import find_plugin
from spt.config.recipe import EncoderConfig, HeadConfig, Part
from spt.errors import BackendError, UsageError
from spt.models.attention import Attention, rotary_table, rotate, sinusoids
from spt.models.base import Context
from spt.models.ops import attention, backends
from spt.models.ops.attention import Chunks, Rotary, attend, local_attend, segments, self_mask, xpos_scale
from spt.models.transformer import Config
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks.base import Tokens, Values
from spt.training.build import build_backbone
from spt.training.network import Encoder, Head
from spt.training.objectives import Output
from spt_cli import app

TRANSFORMER = find_plugin("models", "transformer")


@pytest.fixture(autouse=True)
def as_before():
    yield
    backends.use("auto", "attention")


# ---------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("pairs", ["interleaved", "half"])
def test_rotary_is_a_rotation_by_position(pairs):
    """Full width, base 10000: against the definition, one pair at a time, in double precision."""
    x = torch.randn(2, 3, 5, 8)
    y = rotate(x, rotary_table(5, 8), pairs)
    for t in range(5):
        for i in range(4):
            one, other = (2 * i, 2 * i + 1) if pairs == "interleaved" else (i, 4 + i)
            angle = torch.tensor(t * 10000 ** (-2 * i / 8), dtype=torch.float64)
            x0, x1 = x[..., t, one].double(), x[..., t, other].double()
            for place, wanted in (
                (one, x0 * angle.cos() - x1 * angle.sin()),
                (other, x0 * angle.sin() + x1 * angle.cos()),
            ):
                torch.testing.assert_close(y[..., t, place].double(), wanted, atol=1e-6, rtol=1e-6)


def test_rotary_neighbours_in_real_arithmetic():
    """As on GPUs: values and gradients of the complex product."""
    x, table = torch.randn(2, 3, 50, 16, requires_grad=True), rotary_table(50, 16)
    cotangent = torch.randn(x.shape)
    for dtype in (torch.float32, torch.float64):
        forms = [
            rotate(x.to(dtype), table.to(dtype)),
            attention._rotate_real(x.to(dtype), table.to(dtype), "interleaved"),
        ]
        for y in forms:
            assert y.is_contiguous() and y.dtype == dtype
        torch.testing.assert_close(*forms)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, cotangent.to(dtype))[0] for y in forms))
    operations = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Recorder():
        rotate(x.detach().to("meta"), table.to("meta"))
    assert not [name for name in operations if "complex" in name] and len(operations) < 15


@pytest.mark.parametrize("pairs", ["interleaved", "half"])
def test_rotary_products_depend_on_distance_only(pairs):
    q, k = torch.randn(8), torch.randn(8)
    table = rotary_table(4096, 8)
    turned_q, turned_k = rotate(q.expand(4096, 8), table, pairs), rotate(k.expand(4096, 8), table, pairs)
    products = [(turned_q[t] @ turned_k[t - 5]).item() for t in (5, 100, 4095)]
    assert max(products) - min(products) < 1e-4


def test_xpos_products_shrink_with_distance():
    """q_s k_t = sum_i z_i^((s - t) / base) |q_i| |k_i| cos(angle): alike at every place, and less far away."""
    rotary = Rotary(600, 8, xpos=32.0).double()
    x = torch.ones(1, 1, 600, 8, dtype=torch.float64)
    q, k = rotary(x, x)
    scores = (q @ k.mT)[0, 0]
    for apart in (0, 7):
        diagonal = scores.diagonal(-apart)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    z = (torch.arange(4) / 4 + 0.4) / 1.4
    by_hand = (2 * z ** (7 / 32) * (7 * 10000.0 ** (-torch.arange(4) / 4)).cos()).sum().item()
    assert scores[20, 13].item() == pytest.approx(by_hand, rel=1e-6)
    plain_q, plain_k = Rotary(600, 8).double()(x, x)
    assert scores[599, 0].abs() < 0.1 * (plain_q @ plain_k.mT)[0, 0, 599, 0].abs()


def test_angles_of_a_million_steps():
    """The first pair turns by one a step, the second by a hundredth."""
    steps = np.arange(2**20 - 5, 2**20, dtype=np.longdouble)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        table = rotary_table(2**20, 4, dtype=dtype)[-5:].double().numpy()
        for i, frequency in enumerate((1, np.longdouble(1) / 100)):
            assert np.abs(table[:, i, 0] - np.cos(steps * frequency)).max() < tolerance
            assert np.abs(table[:, i, 1] - np.sin(steps * frequency)).max() < tolerance


@pytest.mark.parametrize("xpos", [None, 16.0])
def test_a_rotary_module_follows_its_model(xpos):
    """As exact as the model's numbers, and nothing to save; half precision is turned in float32."""
    rotary = Rotary(50, 8, 100.0, xpos=xpos)
    assert not rotary.state_dict() and rotary.queries.dtype == torch.float32
    exact = torch.view_as_complex(rotary_table(50, 8, 100.0, dtype=torch.float64))
    if xpos:
        exact = exact * xpos_scale(50, 8, xpos)
    assert float((torch.view_as_complex(rotary.double().queries) - exact).abs().max()) < 1e-15
    rotary.float()
    x = torch.randn(1, 2, 50, 8)
    q, _ = rotary(x, x)
    low, _ = rotary(x.bfloat16(), x.bfloat16())
    assert low.dtype == torch.bfloat16 and torch.equal(low, rotate(x.bfloat16().float(), rotary.queries).bfloat16())
    assert torch.equal(rotary.bfloat16()(x.bfloat16(), x.bfloat16())[0], low)  # a model in half precision
    assert difference(low.float(), q) < 0.01


def test_sinusoids_by_definition():
    table = sinusoids(7, 6)
    assert table[3, 2].item() == pytest.approx(math.sin(3 * 10000 ** (-2 / 6)), abs=1e-6)
    assert table[3, 3].item() == pytest.approx(math.cos(3 * 10000 ** (-2 / 6)), abs=1e-6)


# ---------------------------------------------------------------------------------------------------------- operation


class Question(NamedTuple):
    """Of `local_attend`; with w = L, back = ahead = 0, of `attend`."""

    L: int
    w: int
    back: int
    ahead: int
    causal: bool
    G: int
    lengths: tuple[int, ...] | None  # valid steps of both sequences
    band: tuple[int, int] | None
    bias: bool
    scale: float | None

    def inputs(self, H: int = 4, E: int = 4) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.L)
        shapes = {"q": (2, H, self.L, E), "k": (2, self.G, self.L, E), "v": (2, self.G, self.L, E)}
        if self.bias:
            shapes["bias"] = (H, self.w, (self.back + 1 + self.ahead) * self.w)
        drawn = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
        return {name: tensor.requires_grad_() for name, tensor in drawn.items()}

    def valid(self) -> Tensor | None:
        return None if self.lengths is None else torch.arange(self.L) < torch.tensor(self.lengths)[:, None]

    def seen(self) -> Tensor:
        """Who looks at whom, (2, L, L)."""
        t, s = torch.arange(self.L)[:, None], torch.arange(self.L)
        apart = s // self.w - t // self.w
        seen = (apart >= -self.back) & (apart <= self.ahead)
        if self.causal:
            seen &= s <= t
        if self.band is not None:
            seen &= (t - s <= self.band[0]) & (s - t <= self.band[1])
        valid = self.valid()
        return seen.expand(2, -1, -1) & (True if valid is None else valid[:, None])

    def dense(self, inputs: dict[str, Tensor]) -> Tensor:
        """By definition: all scores, a mask, softmax; zeros where nothing is seen."""
        q, k, v = (inputs[name] for name in "qkv")
        k, v = (x.repeat_interleave(q.shape[1] // self.G, dim=1) for x in (k, v))
        scores = torch.einsum("bhte,bhse->bhts", q, k) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.bias:
            t, s = torch.arange(self.L)[:, None], torch.arange(self.L)
            column = s - (t // self.w - self.back) * self.w
            inside = (column >= 0) & (column < inputs["bias"].shape[2])
            scores = scores + torch.where(inside, inputs["bias"][:, t % self.w, column * inside], 0.0)
        seen = self.seen()[:, None]
        weights = torch.where(seen, scores.clamp(max=50).exp(), 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ v

    def ours(self, inputs: dict[str, Tensor]) -> Tensor:
        q, k, v = (inputs[name] for name in "qkv")
        how: dict[str, Any] = {"causal": self.causal, "scale": self.scale, "valid": self.valid()}
        sides = {"back": self.back, "ahead": self.ahead, "band": self.band}
        return local_attend(q, k, v, self.w, **sides, **how, bias=inputs.get("bias"))


@st.composite
def questions(draw: Callable[[Any], Any]) -> Question:
    w, back, causal = draw(st.integers(1, 7)), draw(st.integers(0, 2)), draw(st.booleans())
    awkward = [1, w - 1, w, w + 1, 2 * w, 3 * w - 1, 3 * w, 5 * w + 1]
    L = max(1, draw(st.one_of(st.sampled_from(awkward), st.integers(1, 30))))
    return Question(
        L,
        w,
        back,
        0 if causal else draw(st.integers(0, 2)),
        causal,
        draw(st.sampled_from([1, 2, 4])),
        draw(st.one_of(st.none(), st.tuples(st.integers(0, L), st.integers(0, L)))),
        draw(st.one_of(st.none(), st.tuples(st.integers(0, w + 1), st.integers(0, w + 1)))),
        draw(st.booleans()),
        draw(st.sampled_from([None, 1.3])),
    )


def answers(compute: Callable[[dict[str, Tensor]], Tensor], question: Question, of: Tensor) -> list[Tensor]:
    """What it gives where `of` says, and the gradients of all inputs."""
    inputs = question.inputs()
    y = compute(inputs)
    assert y.isfinite().all()
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double() * of
    found = torch.autograd.grad(y, list(inputs.values()), cotangent, allow_unused=True)
    return [y * of, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs.values(), found, strict=True))]


class Uncovered(torch.autograd.Function):
    """Rows behind the last segment, which a kernel neither writes nor gives a gradient: here they are no numbers."""

    @staticmethod
    def forward(ctx, x, last):
        ctx.last = last
        return torch.cat([x[:last], torch.full_like(x[last:], torch.nan)])

    @staticmethod
    def backward(ctx, grad):
        assert not grad[ctx.last :].any()
        return torch.cat([grad[: ctx.last], torch.full_like(grad[ctx.last :], torch.nan)]), None


def plain_varlen(q, k, v, query_ends, key_ends, longest_q, longest_k, **how):
    """What flash_attn_varlen_func does, segment by segment; causal masks and windows are aligned to the lower right."""
    assert how.pop("dropout_p") == 0 and how.pop("deterministic") is False and query_ends.dtype == torch.int32
    left, right = how["window_size"]
    left, right = (1 << 30 if side < 0 else side for side in (left, 0 if how["causal"] else right))
    n_queries, n_keys = int(query_ends[-1]), int(key_ends[-1])
    q, k, v = Uncovered.apply(q, n_queries), Uncovered.apply(k, n_keys), Uncovered.apply(v, n_keys)
    pieces = [q[:0]]
    for i in range(len(query_ends) - 1):
        rows, keys = slice(query_ends[i], query_ends[i + 1]), slice(key_ends[i], key_ends[i + 1])
        L, M = rows.stop - rows.start, keys.stop - keys.start
        assert 0 <= L <= longest_q and 0 <= M <= longest_k and (M or not L)
        groups = q.shape[1] // k.shape[1]
        own_k, own_v = (x[keys].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q[rows], own_k) * (how["softmax_scale"] or q.shape[-1] ** -0.5)
        ahead = torch.arange(M) - torch.arange(L)[:, None] - M + L
        scores = scores.masked_fill((ahead > right) | (ahead < -left), -torch.inf)
        pieces.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), own_v))
    y = torch.cat(pieces)
    return Uncovered.apply(torch.cat([y, torch.zeros_like(q[len(y) :])]), len(y))


@pytest.fixture(params=["flash", "varlen"])
def flash(request, monkeypatch):
    """Attention by segments, by its arithmetic alone, in double precision."""
    monkeypatch.setattr(backends, request.param, lambda: plain_varlen)
    monkeypatch.setattr(attention, "HALF", (torch.float64,))
    monkeypatch.setitem(backends._PROBES, request.param, lambda device: None)
    return request.param


@given(question=questions(), backend=st.sampled_from(["sdpa", "math"]), rows=st.sampled_from([2, 256]))
def test_local_attention_is_masked_attention(question, backend, rows):
    """Values and gradients of both backends, at every query, also those without any key."""
    everywhere = torch.ones((), dtype=torch.float64)
    wanted = answers(question.dense, question, everywhere)
    before, attention.ROWS = attention.ROWS, rows
    try:
        with backends.use(backend, "attention"):
            found = answers(question.ours, question, everywhere)
    finally:
        attention.ROWS = before
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_segments_are_chunks_and_their_neighbourhoods(flash):
    """What flash-attn is asked is local attention; hidden steps ask nothing."""
    called = []

    @given(question=questions())
    def check(question):
        valid = question.valid()
        of = torch.ones(2, 1, question.L, 1, dtype=torch.float64) * (1 if valid is None else valid[:, None, :, None])
        wanted = answers(question.dense, question, of)
        with backends.use(flash, "attention"):
            found = answers(question.ours, question, of)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        called.append((question.band is not None, question.bias))

    check()
    assert {(False, False), (True, False)} <= set(called)


@given(
    st.integers(1, 9), st.integers(0, 9), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(["sdpa", "math"])
)
def test_attention_to_other_steps(L, more, G, causal, backend):
    """More keys than queries; causal: the last query looks at all."""
    q, k, v = (torch.randn(2, heads, n, 4).double() for heads, n in ((4, L), (G, L + more), (G, L + more)))
    scores = torch.einsum("bhte,bhse->bhts", q, k.repeat_interleave(4 // G, dim=1)) / 2
    hidden = torch.arange(L + more) > torch.arange(L)[:, None] + more if causal else torch.zeros(())
    wanted = scores.masked_fill(hidden.bool(), -torch.inf).softmax(-1) @ v.repeat_interleave(4 // G, dim=1)
    with backends.use(backend, "attention"):
        torch.testing.assert_close(attend(q, k, v, causal=causal), wanted)


def test_a_causal_query_has_a_key():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="4 keys for 5 queries: the first query would see no key"):
        attend(q, q[:, :, :4], q[:, :, :4], causal=True)


def test_a_causal_mask_as_gpus_are_told_of_it():
    """Where torch is told of a lower right corner instead of being given a mask."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 12, 8), torch.randn(2, 4, 12, 8)
    told = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 12))
    torch.testing.assert_close(told, attend(q, k, v, causal=True))


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_gradients_by_differences(backend):
    question = Question(7, 3, 1, 1, False, 1, (7, 4), (2, 3), True, None)
    inputs = question.inputs(H=2, E=2)
    with backends.use(backend, "attention"):
        assert torch.autograd.gradcheck(
            lambda *given: question.ours(dict(zip(inputs, given, strict=True))), list(inputs.values()), fast_mode=True
        )


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_queries_without_keys_give_zeros(backend, dtype, bias):
    """Also in training, where a gradient that is no number would spoil every weight."""
    given = [torch.randn(2, 2, 12, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    valid = torch.arange(12) < torch.tensor([[12], [0]])
    added = torch.randn(2, 4, 12, dtype=dtype, requires_grad=True) if bias else None
    for compute in (
        lambda: attend(*given, valid=valid),
        lambda: local_attend(*given, 4, valid=valid, bias=added),
        lambda: local_attend(*given, 4, ahead=0, causal=True, valid=valid),
    ):
        with backends.use(backend, "attention"):
            y = compute()
            assert y.dtype == dtype and not y[1].any() and y[0].isfinite().all()
            y.float().square().sum().backward()
        assert all(x.grad.isfinite().all() and not x.grad[1].any() for x in given)
        assert added is None or added.grad is None or added.grad.isfinite().all()


def test_no_step_looks_ahead():
    given = [torch.randn(1, 2, 40, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    y = local_attend(*given, 6, back=2, ahead=0, causal=True)
    for t in (0, 5, 6, 20, 39):
        grads = torch.autograd.grad(y[0, :, t].sum(), given, retain_graph=True)
        for grad in grads[1:]:
            assert not grad[:, :, t + 1 :].any()
        assert grads[2][:, :, t // 6 * 6 - 12 if t >= 12 else 0 : t + 1].all()
    with pytest.raises(ValueError, match="no chunk ahead"):
        local_attend(*given, 6, causal=True)


def test_no_step_looks_at_itself_but_the_first():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    y = local_attend(q, k, v, 4, ahead=0, causal=True, bias=self_mask(q, 4, 1, 0))
    torch.testing.assert_close(y[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(y[:, :, 1], v[:, :, 0])
    weights = (q[:, :, 2:3] @ k[:, :, :2].mT / 2).softmax(-1)
    torch.testing.assert_close(y[:, :, 2:3], weights @ v[:, :, :2])
    whole = attend(q, k, v, bias=self_mask(q, 9))
    others = (q @ k.mT / 2).masked_fill(torch.eye(9, dtype=torch.bool), -torch.inf).softmax(-1)
    torch.testing.assert_close(whole, others @ v)


def test_autocast_decides_the_precision():
    given = [torch.randn(2, 4, 30, 8) for _ in range(3)]
    for backend in ("sdpa", "math"):
        for causal in (False, True):
            with backends.use(backend, "attention"), torch.autocast("cpu", torch.bfloat16):
                low = local_attend(*given, 8, ahead=int(not causal), causal=causal)
            exact = local_attend(*given, 8, ahead=int(not causal), causal=causal)
            assert low.dtype == torch.bfloat16 and difference(low.float(), exact) < 0.03


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_dropout_is_of_the_weights(backend):
    """Half of the weights stay and count twice: values of one show how many of ten are left."""
    q = torch.zeros(1, 1, 1000, 4)
    with backends.use(backend, "attention"):
        y = attend(q, q[:, :, :10], torch.ones(1, 1, 10, 4), dropout=0.5)[0, 0, :, 0]
    torch.testing.assert_close(5 * y, (5 * y).round())
    assert float(y.mean()) == pytest.approx(1, abs=0.1) and len(y.unique()) > 3


def saved(compute: Callable[[], Tensor]) -> int:
    """Bytes that are kept for the backward pass."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compute()
    return sum(kept.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_kept_grows_with_the_length_alone(causal, masked):
    def kept(L: int) -> int:
        given = [torch.randn(1, 2, L, 8, requires_grad=True) for _ in range(3)]
        valid = torch.arange(L)[None] < L - 5 if masked and not causal else None
        return saved(lambda: local_attend(*given, 32, ahead=int(not causal), causal=causal, valid=valid))

    assert kept(4096) < 4.2 * kept(1024)
    assert kept(4096) < 20 * 4096 * 16 * 4  # a dense mask has 64 MiB


MEMORY = """
import torch, sys
from spt.bench.timing import memory_growth
from spt.models.ops.attention import local_attend
def once(L):
    given = [torch.randn(1, 2, L, 16, requires_grad=True) for _ in range(3)]
    local_attend(*given, 128, ahead=int(sys.argv[2] == "two-sided"), causal=sys.argv[2] == "causal").sum().backward()
once(1024)
print(memory_growth(torch.device("cpu"), lambda: once(int(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two-sided", "causal"])
def test_memory_grows_with_the_length_alone(kind):
    """Forward and backward pass, each length in a process of its own."""
    peaks = []
    for length in (4096, 16384, 65536):
        command = [sys.executable, "-c", MEMORY, str(length), kind]
        peaks.append(int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] < 6 * peaks[0] and peaks[2] < 5 * peaks[1]
    assert peaks[2] < 65536 * 32 * 4 * 40  # forty times the queries


def test_shapes_alone_are_enough():
    """`spt show` runs a model on tensors without numbers."""
    with FakeTensorMode():
        layer = Attention(16, 4, 70, causal=False, rotary=True, window=8, n_kv_heads=2)
        x = torch.randn(2, 70, 16)
        y = layer(x, Context(torch.ones(2, 70, dtype=torch.bool), padded=True))
    assert y.shape == x.shape


# ------------------------------------------------------------------------------------------------------------- flash


def test_segments_by_hand():
    """Two sequences of 5 steps, the second with 3, in chunks of 2 that look one back."""
    valid = torch.tensor([[True] * 5, [True, False, True, True, False]])
    found = segments(2, 5, Chunks(2, 1), valid, torch.device("cpu"))
    assert found.queries.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 6, 9]  # hidden ones last
    assert found.query_ends.tolist() == [0, 2, 4, 5, 6, 8, 8]  # the last chunk has no step
    assert found.key_ends.tolist() == [0, 2, 6, 9, 10, 13, 15]
    assert found.keys.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 5, 7, 8, 7, 8, 6, 9, 9]  # as many as of full sequences
    assert found.rows[valid.flatten()].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    whole = segments(2, 5, Chunks(5), None, torch.device("cpu"))
    assert whole.queries is None and whole.keys is None and whole.key_ends.tolist() == [0, 5, 10]


def test_flash_is_tried_before_it_is_used():
    """Values and gradients of a small question; what fails, or answers wrongly, is told."""

    def works(*given, **how):
        return plain_varlen(*given, dropout_p=0.0, softmax_scale=None, deterministic=False, **how)

    class Crooked(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, grad: grad + 1)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as in an evaluation
        assert backends._try_flash(works, "cpu") is None
    for wrong in (
        lambda *given, **how: works(*given, **{**how, "causal": False}),
        lambda *given, **how: works(*given, **{**how, "window_size": (-1, -1)}),
        lambda q, *rest, **how: works(Crooked.apply(q), *rest, **how),
    ):
        assert "gave a wrong result" in backends._try_flash(wrong, "cpu")
    assert "on cpu failed (ZeroDivisionError" in backends._try_flash(lambda *given, **how: 1 / 0, "cpu")


def test_flash_takes_half_precision_only(monkeypatch):
    """Not silently computed in another precision than the recipe's."""
    monkeypatch.setitem(backends._PROBES, "flash", lambda device: None)
    monkeypatch.setattr(backends, "flash", lambda: plain_varlen)
    x, runtime = torch.randn(1, 2, 6, 8), Runtime(Settings(attention="flash", cpu=True, quiet=True))
    said = "half precision, but its input is float32; use precision: bf16"
    with pytest.raises(BackendError, match=said), runtime.kernels():
        attend(x, x, x)
    assert backends.current("attention") == "auto"
    with runtime.kernels(), torch.autocast("cpu", torch.bfloat16):
        low = attend(x, x, x, causal=True)
    assert low.dtype == torch.bfloat16 and difference(low.float(), attend(x, x, x, causal=True)) < 0.03


def test_segments_are_found_without_values():
    """Nothing is read from the device: there is nothing to read here."""
    for valid in (None, torch.ones(3, 50, dtype=torch.bool, device="meta")):
        for chunks in (Chunks(50), Chunks(8, 1, 1)):
            found = segments(3, 50, chunks, valid, torch.device("meta"))
            assert all(x is None or x.is_meta for x in found)


def test_segments_are_found_once_for_all_layers(flash, monkeypatch):
    """Once for each batch and kind of neighbourhood; a mask that was changed in place is another one."""
    found = []
    monkeypatch.setattr(attention, "segments", lambda *given: found.append(given[2]) or segments(*given))
    layers = [Attention(8, 2, 20, causal=False, rotary=True, window=w).double() for w in (None, None, 6, 6)]
    x, valid = torch.randn(2, 20, 8).double(), torch.arange(20) < torch.tensor([[20], [7]])
    with backends.use(flash, "attention"):
        for layer in layers:
            layer(x, Context(valid, padded=True))
        assert found == [Chunks(20), Chunks(6, 1, 1)]
        layers[0](x, Context(valid.clone(), padded=True))
        assert len(found) == 3
        valid[1, 8:] = True
        layers[0](x, Context(valid, padded=True))
        assert len(found) == 4
    assert valid in attention._segments_of
    del valid
    assert not attention._segments_of  # kept no longer than the batch


def test_a_sliding_window_needs_no_mask(flash, monkeypatch):
    """Where the band decides, one call for whole sequences; where chunks cut it off, a mask."""
    windows = []

    def recording(*given, **how):
        windows.append((how["window_size"], len(given[3]) - 1))
        return plain_varlen(*given, **how)

    monkeypatch.setattr(backends, flash, lambda: recording)
    q = torch.randn(2, 2, 30, 4).double()
    with backends.use(flash, "attention"):
        local_attend(q, q, q, 8, band=(8, 5))
        local_attend(q, q, q, 8, ahead=0, causal=True, band=3)
        local_attend(q, q, q, 30, back=1, ahead=1, band=(40, 40))
        assert windows == [((8, 5), 2), ((3, 0), 2), ((40, 40), 2)]
        local_attend(q, q, q, 8, band=9)
        assert len(windows) == 3


def test_by_default_padding_and_windows_are_left_to_a_gpu(monkeypatch):
    """In half precision, without dropout, and only where it helps."""
    calls = []

    def recording(*given, **how):
        calls.append(how)
        return plain_varlen(*given, **how)

    monkeypatch.setattr(attention, "_on_cuda", lambda x: True)
    monkeypatch.setattr(backends, "varlen", lambda: recording)
    monkeypatch.setitem(backends._PROBES, "varlen", lambda device: None)
    low = torch.randn(2, 4, 24, 12, dtype=torch.bfloat16)
    valid = torch.arange(24) < torch.tensor([[24], [9]])

    def used(q: Tensor = low, **how: Any) -> bool:
        calls.clear()
        w = how.pop("w", 24)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_fused_on_cuda", lambda q, *rest, **how: q)
            local_attend(q, q[:, :2], q[:, :2], w, **how)
        return bool(calls)

    assert used(valid=valid) and used(w=8, valid=valid)
    assert used(w=8, band=8) and used(w=8, band=5, causal=True, ahead=0)
    assert not used() and not used(w=8) and not used(causal=True, ahead=0)
    assert not used(low.float(), valid=valid) and not used(valid=valid, dropout=0.1)
    assert not used(valid=valid, bias=self_mask(low, 24, 1, 1))
    assert not used(torch.zeros(2, 4, 24, 264, dtype=torch.bfloat16), valid=valid)
    monkeypatch.setitem(backends._PROBES, "varlen", lambda device: "does not work")
    assert not used(valid=valid)


def test_padding_is_skipped_in_the_right_numbers(monkeypatch):
    """Heads of a width that kernels do not have, and dropout, which torch's kernel by segments has not."""
    monkeypatch.setattr(backends, "varlen", lambda: plain_varlen)
    monkeypatch.setitem(backends._PROBES, "varlen", lambda device: None)
    low = torch.randn(2, 4, 24, 12, dtype=torch.bfloat16)
    valid = torch.arange(24) < torch.tensor([[24], [9]])
    wanted = attend(low.float(), low[:, :2].float(), low[:, :2].float(), valid=valid)
    with backends.use("varlen", "attention"):
        found = attend(low, low[:, :2], low[:, :2], valid=valid)
        attend(low, low, low, valid=valid, dropout=0.1)
    found, wanted = (y.transpose(1, 2)[valid] for y in (found, wanted))
    assert difference(found.float(), wanted) < 0.02


def test_the_layer_leaves_padding_to_flash(flash, monkeypatch):
    """Causal attention, which otherwise has no mask: no work on what is hidden. Answers stay."""
    asked = []

    def counting(q, *rest, **how):
        asked.append(int(rest[2][-1]))
        return plain_varlen(q, *rest, **how)

    monkeypatch.setattr(backends, flash, lambda: counting)
    x, valid = torch.randn(2, 20, 8).double(), torch.arange(20) < torch.tensor([[20], [7]])
    for causal, window in ((False, None), (True, None), (False, 6), (True, 6)):
        layer = Attention(8, 2, 20, causal=causal, rotary=True, window=window).double()
        expected = layer(x, Context(valid, padded=True))
        with backends.use(flash, "attention"):
            found = layer(x, Context(valid, padded=True))
        torch.testing.assert_close(found[valid], expected[valid])
    assert asked == [27] * 4


def test_flash_on_the_command_line(tmp_path):
    """Refused in one sentence where there is no GPU; the formula written out computes what the default does."""
    recipe = str(recipe_file(tmp_path))
    arguments = ["compare", recipe, "--smoke", "--seeds", "1", "--cpu", "--json"]
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(app, [*arguments, "--attention", "flash", "--out", str(tmp_path / "no")])
        assert refused.exit_code == 4 and "flash-attn needs a CUDA GPU" in refused.stderr, refused.output
        assert len(refused.stderr.strip().splitlines()) == 1
    means = []
    for how in ("auto", "math"):
        done = CliRunner().invoke(app, [*arguments, "--attention", how, "--out", str(tmp_path / how)])
        assert done.exit_code == 0, done.output
        (row,) = json.loads(done.stdout)["rows"]
        means.append(row["spt"])
    assert means[0] == pytest.approx(means[1], abs=1e-3)
    names = [sorted(path.name for path in (tmp_path / how).iterdir() if path.is_dir()) for how in ("auto", "math")]
    assert names[0] == names[1]  # how it runs is no part of a run's name


def fused_kernels_take(q: Tensor, k: Tensor, v: Tensor, mask: Any, shared: bool) -> bool:
    """The conditions of torch's flash and memory-efficient kernels for CUDA (aten's sdp_utils.cpp), of one or other."""
    half, width = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    equal_heads = q.shape[1] == k.shape[1] and not shared
    flash = half and (mask is None or isinstance(mask, CausalBias)) and width <= 256 and width % 8 == 0
    aligned = isinstance(mask, CausalBias) or mask is None
    if not aligned:
        strides = [step for step, size in zip(mask.stride()[:-1], mask.shape, strict=False) if size > 1]
        aligned = mask.stride(-1) == 1 and not any(n % 8 for n in (*strides, mask.storage_offset()))
    efficient = equal_heads and aligned and width % 8 == 0 and q.dtype != torch.float64
    return all(x.stride(-1) == 1 for x in (q, k, v)) and (flash or efficient)


@given(question=questions(), E=st.sampled_from([4, 6, 8, 16, 300]), half=st.booleans())
def test_no_gpu_is_left_to_the_formula(question, E, half):
    """What attention is given on CUDA in a form that a fused kernel takes; and it stays the same question."""
    dtype, question = torch.bfloat16 if half else torch.float32, question._replace(scale=question.scale and 0.1)
    inputs = {name: x.detach().to(dtype) for name, x in question.inputs(E=E).items()}
    compute = nn.functional.scaled_dot_product_attention

    def checked(q, k, v, *, attn_mask=None, enable_gqa, **how):
        assert fused_kernels_take(q, k, v, attn_mask, enable_gqa)
        if isinstance(attn_mask, CausalBias):
            attn_mask = attn_mask._materialize()
        return compute(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_on_cuda", lambda x: True)
        patch.setattr(nn.functional, "scaled_dot_product_attention", checked)
        with backends.use("sdpa", "attention"):
            found = question.ours(inputs)
    wanted = question.dense({name: x.double() for name, x in inputs.items()})
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.1 if half else 1e-4)


ON_A_GPU = [
    Question(L, 8, 1, 0 if causal else 1, causal, G, lengths, None, False, None)
    for L, causal, G, lengths in [
        (37, False, 2, None),
        (37, False, 2, (37, 12)),
        (37, True, 4, None),
        (8, True, 1, None),
    ]
]


def on_a_gpu(question: Question, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Answers and gradients, against the formula in double precision; the largest differences."""
    valid = question.valid()
    of = torch.ones(2, 1, question.L, 1) if valid is None else valid[:, None, :, None]
    inputs = question.inputs(E=16)

    def compute(given: dict[str, Tensor]) -> list[Tensor]:
        y = question.ours(given) if given["q"].is_cuda else question.dense(given)
        y = torch.where(of.to(y.device).bool(), y, 0.0)
        return [y, *torch.autograd.grad(y.double().square().sum(), list(given.values()))]

    wanted = compute(inputs)
    torch.set_default_device("cuda")
    try:
        with backends.use(backend, "attention"):
            found = compute({name: x.detach().to("cuda", dtype).requires_grad_() for name, x in inputs.items()})
    finally:
        torch.set_default_device(None)
    return [difference(ours.cpu().double(), theirs) for ours, theirs in zip(found, wanted, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("question", ON_A_GPU)
@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_on_a_gpu(question, backend):
    assert max(on_a_gpu(question, backend, torch.float32)) < 1e-2  # TensorFloat-32
    assert max(on_a_gpu(question, backend, torch.bfloat16)) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("E", [6, 16])
@pytest.mark.parametrize("G", [1, 4])
def test_fused_kernels_serve_on_a_gpu(dtype, E, G):
    """Torch raises where only the formula would serve."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    q = torch.randn(2, 4, 37, E, device="cuda", dtype=dtype, requires_grad=True)
    k = torch.randn(2, G, 37, E, device="cuda", dtype=dtype, requires_grad=True)
    valid = torch.arange(37, device="cuda") < torch.tensor([[37], [12]], device="cuda")
    bias = torch.randn(4, 10, 30, device="cuda", requires_grad=True)
    with sdpa_kernel(fused), backends.use("sdpa", "attention"):
        for y in (
            attend(q, k, k),
            attend(q, k, k, causal=True, dropout=0.1),
            attend(q[:, :, 8:], k, k, causal=True),
            attend(q, k, k, valid=valid),
            local_attend(q, k, k, 10, band=7),
            local_attend(q, k, k, 10, bias=bias),
            local_attend(q, k, k, 10, ahead=0, causal=True, bias=bias[..., :20], valid=valid),
        ):
            y.float().sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [37, 8])
def test_torchs_kernel_by_segments_gives_the_formula(length):
    """Padding and sliding windows, chosen by default; nothing waits for the device once the kernel has been tried."""
    assert backends.probe("varlen", "cuda", "attention") is None
    questions = [
        Question(length, 8, 1, 0 if causal else 1, causal, G, lengths, band, False, None)
        for causal, G, lengths, band in [
            (False, 2, (length, 5), None),
            (True, 4, (length, 5), None),
            (False, 4, None, (8, 3)),
            (True, 1, (5, length), (4, 0)),
        ]
    ]
    for question in questions:
        for backend in ("auto", "varlen"):
            assert max(on_a_gpu(question, backend, torch.bfloat16)) < 0.1
    x = torch.randn(2, 4, length, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    valid = torch.arange(length, device="cuda") < torch.tensor([[length], [5]], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for how in ({}, {"band": 3}):
            local_attend(x, x, x, 8, valid=valid, **how).float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_on_a_gpu(dtype):
    x, table = torch.randn(2, 3, 50, 16, dtype=dtype), rotary_table(50, 16)
    assert difference(rotate(x.cuda(), table.cuda()).cpu().float(), rotate(x, table).float()) < 0.01


@pytest.mark.gpu
def test_queries_without_keys_on_a_gpu():
    given = [torch.randn(2, 2, 24, 16, device="cuda", requires_grad=True) for _ in range(3)]
    valid = torch.arange(24, device="cuda") < torch.tensor([[24], [0]], device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = local_attend(*given, 8, valid=valid)
        y.float().square().sum().backward()
        assert y.isfinite().all() and all(x.grad.isfinite().all() for x in given)


@pytest.mark.flash
@pytest.mark.parametrize("question", ON_A_GPU)
def test_flash_gives_the_formula(question):
    """The package itself, forward and backward."""
    assert backends.probe("flash", "cuda", "attention") is None
    assert max(on_a_gpu(question, "flash", torch.bfloat16)) < 0.1


# ------------------------------------------------------------------------------------------------------------- layer


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_softmax_of_scaled_products(causal):
    """Against the textbook loop in double precision, padding included."""
    torch.manual_seed(0)
    layer = Attention(8, 2, 7, causal=causal, rotary=False).double()
    x, valid = torch.randn(2, 7, 8).double(), torch.arange(7) < torch.tensor([[7], [4]])
    y = layer(x, Context(valid, padded=True))
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    expected = torch.zeros_like(x)
    for b in range(2):
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            for t in range(7):
                seen = [s for s in range(7) if valid[b, s] and not (causal and s > t)]
                scores = torch.stack([q[b, t, part] @ k[b, s, part] / 2 for s in seen]).softmax(0)
                expected[b, t, part] = sum(w * v[b, s, part] for w, s in zip(scores, seen, strict=True))
    torch.testing.assert_close(y[valid], layer.out(expected)[valid])


def test_tied_projections_start_alike_and_are_trained_apart():
    tied, free = (tiny(TRANSFORMER, causal=False, tied_projections=tie) for tie in (True, False))
    layers = [mixer for mixer in tied.mixers if isinstance(mixer, Attention)]
    for layer in layers:
        for part in (*layer.qkv.weight.chunk(3), layer.out.weight):
            assert torch.equal(part, layer.out.weight)
        for part in (*layer.qkv.bias.chunk(3), layer.out.bias):
            assert torch.equal(part, layer.out.bias)
        assert float(layer.out.weight.detach().abs().max()) <= 16**-0.5  # U(-1/sqrt(D), 1/sqrt(D))
    assert not torch.equal(layers[0].out.weight, layers[1].out.weight)
    assert torch.equal(layers[1].out.weight, [m for m in free.mixers if isinstance(m, Attention)][1].out.weight)
    assert sum(p.numel() for p in tied.parameters()) == sum(p.numel() for p in free.parameters())
    x = sequence(2, 7)
    (tied(x, all_valid(x)) * sequence(2, 7, seed=2)).sum().backward()
    q, k, v = layers[0].qkv.weight.grad.chunk(3)
    assert not torch.allclose(q, v) and not torch.allclose(k, layers[0].out.weight.grad)


LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "local": {"window": 6},
    "local, two back": {"window": 4, "back": 2},
    "band": {"window": 6, "band": 6},
    "grouped": {"n_kv_heads": 2, "d_head": 6},
    "halves": {"pairs": "half", "base": 500.0, "window": 6},
    "shared": {"shared_qk": True},
    "shared, local": {"shared_qk": True, "window": 6},
    "temperature": {"temperature": True, "window": 6},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_parts(name, causal):
    """One query at a time, from the maps on: every option by its definition."""
    options = {"n_kv_heads": 4, "d_head": 2, "window": None, "back": 1, "band": 99, **LAYERS[name]}
    G, E, w, shared = options["n_kv_heads"], options["d_head"], options["window"] or 99, options.get("shared_qk", False)
    torch.manual_seed(0)
    layer = Attention(8, 4, 20, causal=causal, rotary=True, **LAYERS[name]).double()
    if layer.temperature is not None:
        assert layer.temperature.item() == pytest.approx(E**-0.5)
        with torch.no_grad():
            layer.temperature.fill_(0.3)
    x = torch.randn(1, 20, 8).double()
    y = layer(x, all_valid(x))
    table = rotary_table(20, E, options.get("base", 1e4), dtype=torch.float64)
    parts = layer.qkv(x)[0].split([4 * E, G * E, G * E] if not shared else [4 * E, 4 * E], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, E)).transpose(0, 1) for part in (parts if not shared else (parts[0], *parts)))
    if shared:
        k = k / k.norm(dim=-1, keepdim=True)
    q, k = (rotate(part, table, options.get("pairs", "interleaved")) for part in (q, k))
    heads = torch.zeros(4, 20, E).double()
    for h in range(4):
        for t in range(20):
            seen = [s for s in range(20) if -options["back"] <= s // w - t // w <= 1 and abs(s - t) <= options["band"]]
            seen = [s for s in seen if not (causal and s > t)]
            seen = [s for s in seen if not (shared and s == t)] or [t]
            factor = 0.3 if layer.temperature is not None else E**-0.5
            weights = (k[h * G // 4, seen] @ q[h, t] * factor).softmax(0)
            heads[h, t] = weights @ v[h * G // 4, seen]
    torch.testing.assert_close(y[0], layer.out(heads.transpose(0, 1).flatten(1)))


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 17, 30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("back", "ahead"), [(1, None), (2, 0), (0, 0)])
def test_operations_of_local_attention(length, causal, back, ahead):
    """Those of whole neighbouring chunks: what torch counts of the published, masked form."""
    layer = Attention(8, 2, 40, causal=causal, rotary=False, window=6, back=back, ahead=ahead)
    t, s = torch.arange(length)[:, None] // 6, torch.arange(length) // 6
    sees = (s >= t - back) & (s <= t + (int(not causal) if ahead is None else ahead))
    assert layer.flops(length).forward == 2 * length * 8 * 32 + 4 * 8 * int(sees.sum())


def test_operations_are_those_torch_counts():
    for options in ({"window": 16}, {"n_kv_heads": 2}, {"d_head": 6}, {"shared_qk": True}, {"temperature": True}):
        model = tiny(TRANSFORMER, causal=False, **options)
        assert model.flops(63).forward == pytest.approx(counted_flops(model, 63), rel=1e-6), options


SAME = '"""Attention."""\nfrom spt.models.transformer import Config as Base, build\n\nclass Config(Base):\n'


@pytest.mark.parametrize(
    "fields",
    [
        "    window: int = 8\n    n_kv_heads: int = 2\n    temperature: bool = True\n",
        "    window: int = 5\n    look_back: int = 2\n    shared_qk: bool = True\n    d_head: int = 6\n",
        "    window: int = 16\n    exact_window: bool = True\n    rotary_pairs: str = 'half'\n",
    ],
    ids=["grouped", "shared", "band"],
)
def test_the_contract_of_local_attention(tmp_path, fields):
    path = tmp_path / "mine.py"
    path.write_text(SAME + fields)
    assert [check for check in model_contract.check_contract(find_plugin("models", str(path))) if not check.ok] == []


@torch.no_grad()
def test_a_window_as_long_as_the_sequence_is_no_window():
    x = sequence(2, 63)
    for causal in (False, True):
        whole, windowed = (tiny(TRANSFORMER, causal=causal, **how) for how in ({}, {"window": 63}))
        torch.testing.assert_close(windowed(x, all_valid(x)), whole(x, all_valid(x)))
        assert difference(tiny(TRANSFORMER, causal=causal, window=8)(x, all_valid(x)), whole(x, all_valid(x))) > 1e-3


@torch.no_grad()
def test_xpos_in_a_model():
    """A longer model's tables differ by what scores do not show."""
    x = sequence(2, 60)
    short, long = (
        Attention(16, 4, length, causal=True, rotary=True, xpos=8.0, window=16).double() for length in (60, 90)
    )
    long.load_state_dict(short.state_dict())
    assert not torch.equal(short.rotary.queries, long.rotary.queries[:60])
    torch.testing.assert_close(short(x.double(), all_valid(x)), long(x.double(), all_valid(x)))
    plain = Attention(16, 4, 60, causal=True, rotary=True, window=16).double()
    plain.load_state_dict(short.state_dict())
    assert difference(plain(x.double(), all_valid(x)), short(x.double(), all_valid(x))) > 1e-3


def test_recomputing_activations_changes_nothing():
    x, model = sequence(2, 63), tiny(TRANSFORMER, causal=False, window=8, attention_dropout=0.3).train()
    found = []
    for again in (False, True):
        model.recompute = again
        torch.manual_seed(3)
        (model(x, all_valid(x)) * sequence(2, 63, seed=2)).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{}, {"temperature": True}, {"n_kv_heads": 2, "d_head": 6, "window": 4}])
def test_weights_of_the_published_code(options):
    """There and back; what is missing is named."""
    layer, other = (Attention(8, 4, 20, causal=False, rotary=True, **options) for _ in range(2))
    published = export_reference(layer)
    names = ("Q", "K", "V", "O") if options.get("temperature") else tuple(f"linears.{i}" for i in range(4))
    scale = {"scale"} if options.get("temperature") else set()
    assert set(published) == {f"{name}.{part}" for name in names for part in ("weight", "bias")} | scale
    other.load_state_dict(import_reference(other, published))
    for key, tensor in layer.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key])
    x = torch.randn(2, 9, 8)
    q = x @ published[f"{names[0]}.weight"].mT + published[f"{names[0]}.bias"]
    torch.testing.assert_close(layer.qkv(x)[..., : q.shape[-1]], q)
    published.pop(f"{names[1]}.bias")
    with pytest.raises(ValueError, match=f"have no {names[1]}.bias"):
        import_reference(other, published)


def test_shared_maps_are_not_published():
    with pytest.raises(ValueError, match="one map for queries and keys"):
        export_reference(Attention(8, 2, 9, causal=False, rotary=False, shared_qk=True))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"look_back": 2}, "look_back has no effect without a window"),
        ({"look_ahead": 0}, "look_ahead has no effect without a window"),
        ({"exact_window": True}, "exact_window has no effect without a window"),
        ({"causal": True, "window": 4, "exact_window": True, "look_back": 0}, "lets a step see itself alone"),
        ({"causal": True, "window": 4, "look_ahead": 1}, "sees no window ahead, but look_ahead is 1"),
        ({"n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"d_head": 5}, "a head is 5 wide"),
        ({"positions": [], "rotary_base": 500.0}, "rotary_base has no effect without rotary positions"),
        ({"positions": [], "rotary_pairs": "half"}, "rotary_pairs has no effect"),
        ({"positions": "learned", "causal": True, "xpos": 64.0}, "xpos has no effect"),
        ({"xpos": 64.0}, "needs causal: true"),
        ({"shared_qk": True, "n_kv_heads": 2}, "n_kv_heads cannot differ"),
        ({"tied_projections": True, "n_kv_heads": 2}, "tied_projections copies one map"),
        ({"tied_projections": True, "d_head": 16}, "tied_projections copies one map"),
        ({"tied_projections": True, "shared_qk": True}, "tied_projections copies one map"),
        ({"window": 0}, "window"),
    ],
)
def test_options_that_contradict_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Config.model_validate_json(json.dumps(options))


def test_xpos_that_leaves_the_range_of_numbers():
    part = Part(name="transformer", causal=True, xpos=4.0)
    with pytest.raises(UsageError, match="xpos 4 exceeds the range of float32 within 4,096 steps"):
        build_backbone(part, 4096)
    build_backbone(part, 500)


def test_defaults_that_direction_decides():
    looks = {}
    for causal in (False, True):
        (layer, *_) = tiny(TRANSFORMER, causal=causal, window=8, exact_window=True).mixers
        looks[causal] = (layer.back, layer.ahead, layer.band)
    assert looks == {False: (1, 1, (8, 8)), True: (1, 0, (8, 0))}


# SPT paper, Table 4, rows with fixed sinusoidal positions: task, input, width, layers, heads, inner width, head, and
# the parameters that the published code has then, which end with those given in millions.
ROWS = {
    "ListOps": (Tokens(19), 512, 6, 8, 1024, {}, 10, 12_632_586, 12.63),
    "Text": (Tokens(136), 512, 6, 8, 1024, {"mlp": True}, 2, 12_951_042, 12.95),
    "Retrieval": (Tokens(98), 128, 4, 4, 512, None, 2, 871_810, 0.872),
    "Image": (Values(1), 64, 3, 4, 128, {"mlp": True}, 10, 105_482, 0.105),
    "Pathfinder": (Values(1), 128, 4, 8, 128, {}, 2, 399_106, 0.399),
    "Path-X": (Values(1), 128, 4, 8, 128, {}, 2, 399_106, 0.399),
}


@pytest.mark.parametrize("causal", [False, True], ids=["masked", "causal"])
@pytest.mark.parametrize("name", ROWS)
def test_sizes_of_the_published_models(name, causal):
    input, width, layers, heads, inner, head, classes, exact, millions = ROWS[name]
    options = {"d_model": width, "n_layers": layers, "n_heads": heads, "d_ff": inner, "causal": causal}
    window = {"window": 4096} if name == "Path-X" else {}
    with torch.device("meta"):
        encoder = Encoder(input, width, EncoderConfig())
        backbone = build_backbone(Part(name="transformer", positions="sinusoidal", **options, **window), 16384)
        if head is None:  # two documents, u and v, asked together: [u, v, u - v, u * v]
            top: nn.Module = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, classes))
        else:
            top = Head(width, Output("cross_entropy", False, 1, classes), HeadConfig(**head))
    counted = sum(p.numel() for part in (encoder, backbone, top) for p in part.parameters())
    assert counted - encoder.hidden.numel() == exact  # the published code has the mask's column instead, cut off again
    assert f"{exact / 1e6:.{len(str(millions)) - str(millions).index('.') - 1}f}" == str(millions)
