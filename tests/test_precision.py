"""What float32 products are rounded to: by torch's settings for GPUs, which a CPU's numbers do not depend on."""

import contextlib
import re
from typing import Any

import pytest
import torch
from test_training import same_result, same_weights
from tiny import loaded, own_task, run
from torch.utils._python_dispatch import TorchDispatchMode

from spt.checks.model_contract import all_valid
from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.models.longconv import LongConvolution, cached_kernels
from spt.models.ops import delta_rule, linear_attention, scan_products, selective_scan
from spt.models.ops.precision import float32_products, ieee_products, in_ieee
from spt.models.ops.recurrence import recurrence
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.stage import run_stage

PRODUCTS = re.compile(r"(bmm|mm|addmm|baddbmm|matmul|_linear_pointwise|convolution.*|einsum)_?$")


def settings() -> tuple[str, ...]:
    backends = torch.backends
    return tuple(each.fp32_precision for each in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn))


class Products(TorchDispatchMode):
    """How each product would be rounded on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if PRODUCTS.match(func._schema.name.split("::")[-1]) and args[0].dtype == torch.float32:
            self.rounded.append(torch.backends.cuda.matmul.fp32_precision == "tf32")
        return func(*args, **(kwargs or {}))


def test_settings_are_made_and_undone():
    before = settings()
    with float32_products("tf32"):
        assert settings() == ("tf32", "tf32", "ieee")
        with float32_products("ieee"):
            assert settings() == ("ieee", "ieee", "ieee")
        assert settings() == ("tf32", "tf32", "ieee")
    with pytest.raises(ZeroDivisionError), float32_products("tf32"):
        raise ZeroDivisionError
    assert settings() == before
    assert torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # a CPU's own: never rounded


def test_a_part_in_ieee_has_the_same_gradients_and_products_without_rounding():
    weight, x = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    plain = torch.autograd.grad((x @ weight).sin().sum(), (x, weight))
    with float32_products("tf32"), Products() as products:
        y = in_ieee(lambda: (x @ weight).sin(), [weight, x, torch.ones(1, requires_grad=True)])
        found = torch.autograd.grad(y.sum(), (x, weight))
        with torch.no_grad():
            assert not in_ieee(lambda: x @ weight, [x]).requires_grad
    assert products.rounded == [False] * 4
    assert all(map(torch.equal, plain, found))
    with float32_products("tf32"), Products() as products:
        (x @ weight).sum().backward()
    assert products.rounded == [True] * 3


KERNELS = {
    "s4": {"d_state": 8},
    "s4d": {"d_state": 8},
    "spade": {"d_state": 8, "window": 4},
    "dss": {"d_state": 8},
    "dlr": {"d_state": 8},
    "h3": {"d_state": 8},
    "hyena": {},
    "sgconv": {},
    "mega": {"d_state": 4},
    "liquid_s4": {"d_state": 8},
}


@pytest.mark.parametrize("way", ["joint", "cached", "recomputed"])
@pytest.mark.parametrize("name", KERNELS)
def test_no_product_of_a_kernel_is_rounded(name, way):
    """Nor one of its gradients; the maps around it are. In whichever way kernels are shared; a CPU's numbers stay."""
    module = find_plugin("models", name).module
    model = module.build(module.Config(d_model=16, n_layers=2, max_length=24, **KERNELS[name]))
    convolutions = [each for each in model.modules() if isinstance(each, LongConvolution)]
    with float32_products("tf32"), Products() as of_kernels:
        for each in convolutions:
            each.taps(24).square().sum().backward()
    assert convolutions and not any(of_kernels.rounded)
    model.recompute = way == "recomputed"
    x, gradients = torch.randn(2, 24, 16), []
    for how in ("ieee", "tf32"):
        model.zero_grad()
        cache = cached_kernels(model, 24) if way == "cached" else contextlib.nullcontext(lambda: None)
        with float32_products(how), Products() as products, cache as last:
            last()
            model(x, all_valid(x)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert any(products.rounded)
    assert products.rounded.count(False) >= (len(of_kernels.rounded) if way != "joint" else bool(of_kernels.rounded))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_no_product_of_a_scan_is_rounded():
    q, k, v = (torch.randn(2, 9, 2, 4, requires_grad=True) for _ in range(3))
    decay = (-torch.rand(2, 9, 2)).requires_grad_()
    by_feature = (-torch.rand(2, 9, 2, 4)).requires_grad_()
    u, B, C = (torch.randn(2, 9, 4, requires_grad=True) for _ in range(3))
    forms: list[Any] = [
        lambda: linear_attention.linear_attention(q, k, v, decay),
        lambda: linear_attention.linear_attention(q, k, v, by_feature, reverse=True),
        lambda: linear_attention.two_sided_attention(q, k, v),
        lambda: delta_rule.delta_rule(q, k, v, torch.sigmoid(decay), decay),
        lambda: selective_scan.selective_scan(u, u.sigmoid(), -torch.ones(4, 4), B, C),
    ]
    inputs = (q, k, v, decay, by_feature, u, B, C)
    for form in forms:
        plain = torch.autograd.grad(form().square().sum(), inputs, allow_unused=True)
        with float32_products("tf32"), Products() as products:
            found = torch.autograd.grad(form().square().sum(), inputs, allow_unused=True)
        assert products.rounded and not any(products.rounded)
        for a, b in zip(plain, found, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_of_a_scan_by_products_only_the_maps_are_rounded(monkeypatch):
    """S5 and LRU as a GPU computes them: one map in, one out, and of each the gradients of both factors."""
    monkeypatch.setattr(scan_products, "preferred", lambda x: True)
    u, D = torch.randn(2, 80, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    a = torch.polar(torch.full((3,), 0.9), torch.rand(3)).to(torch.complex128).requires_grad_()
    enters, leaves = (torch.randn(*shape, dtype=torch.complex64, requires_grad=True) for shape in ((3, 4), (1, 4, 3)))
    with float32_products("tf32"), Products() as products:
        recurrence(u, a, enters, leaves, D).sum().backward()
    assert products.rounded.count(True) == 6 and products.rounded.count(False) >= 6


def test_on_a_cpu_tf32_is_fp32_but_another_run(tmp_path, messages):
    """Number by number; and a line says so."""
    exact, rounded = (
        Job(loaded(tmp_path, finetune__train__precision=precision), "finetune", 0) for precision in ("fp32", "tf32")
    )
    assert exact.key == Job(loaded(tmp_path), "finetune", 0).key != rounded.key
    before = settings()
    results = [run(job, tmp_path / "runs") for job in (exact, rounded)]
    same_result(*(result.model_copy(update={"key": "", "settings": ""}) for result in results))
    same_weights(*(tmp_path / "runs" / job.name / "checkpoints/best" for job in (exact, rounded)))
    assert [result.precision for result in results] == ["fp32", "tf32"]
    assert len([text for text in messages if "tf32 is for NVIDIA GPUs" in text]) == 1
    assert settings() == before


@pytest.mark.parametrize(
    ("precision", "matmul", "convolution"),
    [("fp32", "ieee", "ieee"), ("tf32", "tf32", "tf32"), ("bf16", "ieee", "ieee")],
)
def test_a_stage_on_a_gpu_has_its_own_settings(monkeypatch, precision, matmul, convolution):
    runtime = Runtime(Settings(cpu=True, quiet=True))
    before = settings()
    with runtime.products(precision):
        assert settings() == before
    monkeypatch.setattr(Runtime, "device", torch.device("cuda"))
    with runtime.products(precision):
        assert settings() == (matmul, convolution, "ieee")
    assert settings() == before


def test_what_torch_cannot_compile_beside_tf32_is_said(monkeypatch, messages):
    """Up to 2.13 its compiler asks by a setting that raises beside the newer ones."""
    monkeypatch.setattr("spt.runtime.distributed.compiler_problem", lambda device: None)
    try:
        with float32_products("tf32"):
            torch.get_float32_matmul_precision()
    except RuntimeError:
        with float32_products("tf32"):
            Runtime(Settings(cpu=True, quiet=True)).compile(torch.nn.Linear(1, 1))
        assert "does not compile under precision tf32" in messages[-1]


def test_functions_keep_their_names_and_arguments():
    @ieee_products
    def double(x: torch.Tensor, *, times: float = 2.0) -> torch.Tensor:
        """Twice."""
        return x @ x * times

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    with float32_products("tf32"):
        assert double(torch.eye(2), times=3.0)[0, 0] == 3.0


@pytest.mark.gpu
def test_on_a_gpu_tf32_rounds_maps_alone(tmp_path):
    """A product is off by 1e-4 to 1e-2 of its size, a kernel as little as in float32."""
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = (a.double() @ b.double()).float()
    errors = []
    for how in ("ieee", "tf32"):
        with float32_products(how):
            errors.append(float((a @ b - exact).abs().max() / exact.abs().max()))
    assert errors[0] < 1e-5 < 1e-4 < errors[1] < 1e-2
    module = find_plugin("models", "dlr").module
    layer = module.build(module.Config(d_model=64, n_layers=1, max_length=1024, d_state=64)).cuda().mixers[0]
    with float32_products("ieee"):
        expected = layer.taps(1024)
    with float32_products("tf32"):
        assert torch.equal(layer.taps(1024), expected)
    job = Job(own_task(tmp_path, finetune__train__precision="tf32"), "finetune", 0)
    assert run_stage(job, tmp_path / "runs", Runtime(Settings(quiet=True))).precision == "tf32"
