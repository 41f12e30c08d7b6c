"""Triton's scans compiled for GPUs without one, and when they are used; test_triton.py runs them in the interpreter."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spt.models.ops import backends, scan_products


class Recorder:
    """In place of a kernel: keeps what it is called with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *given, **named: self.calls.append(dict(zip(self.kernel.arg_names, given, strict=False)) | named)


POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64"}


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "per_step"),
    [
        (torch.complex64, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((torch.complex64, True), (torch.float32, False), (torch.float32, True))
        ),
    ],
)
def test_compiled_without_a_gpu(kind, per_step, capability, tmp_path, monkeypatch):
    """For A100 and H100, as a scan and its gradients call them: three kernels each, whose threads share no memory and
    never wait for each other, and which keep no registers in memory. That they run does not follow."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from spt.models.ops import triton_scan

    recorders = [Recorder(getattr(triton_scan, name)) for name in ("_chunk_ends", "_carry", "_walk")]
    for recorder in recorders:
        monkeypatch.setattr(triton_scan, recorder.kernel.__name__, recorder)
    x, initial = torch.zeros(2, 100, 128, dtype=kind), torch.zeros(2, 128, dtype=kind)
    a = x if per_step else torch.zeros(128, dtype=torch.promote_types(kind, torch.float64))
    triton_scan.solve(a, x, x, initial, False)
    triton_scan.gradients(a, x, x, x, True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, calls in ((recorder.kernel, recorder.calls) for recorder in recorders):
        assert len(calls) == 2
        for call in calls:
            warps = call.pop("num_warps")
            tensors = {name: POINTERS[value.dtype] for name, value in call.items() if isinstance(value, Tensor)}
            numbers = {name for name, value in call.items() if name not in tensors and value not in (None, 1)}
            numbers -= {name for name in numbers if name.isupper() and len(name) > 1}
            signature = {name: tensors.get(name, "i32" if name in numbers else "constexpr") for name in call}
            constants = {name: value for name, value in call.items() if signature[name] == "constexpr"}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
            assert code.metadata.shared == 0 and "bar.sync" not in code.asm["ptx"]
            (tmp_path / "kernel.cubin").write_bytes(code.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "kernel.cubin")]
            assert "STACK:0 " in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_double_precision_is_left_to_the_plain_form(monkeypatch):
    monkeypatch.setitem(backends._chosen, "kernels", "triton")
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    for operation in ("scan", "scan_varying"):
        for kind, fused in ((torch.float32, True), (torch.complex64, True), (torch.complex128, False)):
            assert backends.uses_triton(operation, torch.zeros(2, 3, 4, dtype=kind)) is fused


def test_products_stand_back_where_triton_scans(monkeypatch):
    """On a GPU, of which the meta device has all but the numbers."""
    x = torch.zeros(3, device="meta")
    assert scan_products.preferred(x)
    monkeypatch.setattr(backends, "uses_triton", lambda operation, _: operation == "scan")
    assert scan_products.together(x) and not scan_products.preferred(x)
