"""Triton's kernels: right in its interpreter, compiled for GPUs without one; and when they are used."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spt.models.ops import backends

FILES = ("kernels_by_triton.py", "scans_by_triton.py")


def run_kernels(file: str, interpreted: bool) -> str:
    """In a process of its own, since Triton reads once whether it interprets."""
    path = Path(__file__).with_name(file)
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(path)]
    done = subprocess.run(command, env=environment, cwd=path.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file):
    pytest.importorskip("triton")
    assert "skipped" not in run_kernels(file, interpreted=True)


@pytest.mark.gpu
def test_on_a_gpu():
    """The same; and times beside torch's, which `-rP` shows."""
    assert backends.probe("triton", "cuda") is None
    for file in FILES:
        run_kernels(file, interpreted=False)
    for operation in backends.TRITON:
        taken = backends.prefers_triton(operation, "cuda:0")
        assert backends.uses_triton(operation, torch.ones(3, device="cuda:0")) == taken  # by `auto`
        seconds = backends._seconds(operation, "cuda")
        sys.stdout.write(f"{operation}: {', '.join(f'{name} {1e3 * s:.3f} ms' for name, s in seconds.items())}\n")


POINTERS = {  # besides float32 and the whole numbers
    **dict.fromkeys(("alpha", "theta", "sums", "w", "y", "drows", "dw"), "*fp64"),
    **dict.fromkeys(("W", "kernel", "grad", "rows", "real_out", "imag_out", "real_grad", "imag_grad"), "*fp32"),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=SLOW)])
@pytest.mark.parametrize(
    ("name", "rows"),
    [("_forward", 64), ("_backward", 32), *(pytest.param(name, 1, marks=SLOW) for name in ("_forward", "_backward"))],
)
@pytest.mark.parametrize("kind", ["vandermonde", "cauchy"])
def test_compiled_without_a_gpu(kind, name, rows, capability, tmp_path, monkeypatch):
    """For A100 and H100: IEEE float32, no approximate sines, the shared memory that every GPU has, and no registers
    kept in memory. That it runs does not follow."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from spt.models.ops import triton_cauchy, triton_vandermonde

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if kind == "cauchy":
        kernel, tile = getattr(triton_cauchy, name), getattr(triton_cauchy, f"_tile{name}")(min(rows, 12), 64)
    else:
        kernel, tile = getattr(triton_vandermonde, name), getattr(triton_vandermonde, f"_tile{name}")(rows)
    tile = tile._asdict()
    warps = tile.pop("num_warps")
    signature = {p: "constexpr" if p in tile else POINTERS.get(p, "i32") for p in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=tile)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert not re.search(r"tf32|sin\.approx|cos\.approx", compiled.asm["ptx"])
    assert compiled.metadata.shared <= 48 * 1024
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "kernel.cubin")]
    assert "STACK:0 " in subprocess.run(command, capture_output=True, text=True, check=True).stdout
