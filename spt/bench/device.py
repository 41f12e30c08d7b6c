"""`spt bench device`: what this device reaches, which bounds every step: matrix products and copies."""

from typing import Any

import torch

from spt.bench.timing import Clock, Precision, Times, alternate, conditions
from spt.models.ops.precision import Float32, float32_products
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

SIDE, QUICK_SIDE = {"cpu": 2048, "cuda": 8192}, 128  # of the square matrices


class _Product:
    """One product of square matrices."""

    def __init__(self, side: int, precision: Precision, clock: Clock) -> None:
        self.clock, self.flops = clock, 2.0 * side**3
        self.float32: Float32 = "tf32" if precision == "tf32" else "ieee"
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.a, self.b = torch.rand(2, side, side, device=clock.device).to(dtype).unbind()
        self.out = torch.empty_like(self.a)

    def __call__(self) -> Times:
        with float32_products(self.float32):
            began = self.clock()
            torch.mm(self.a, self.b, out=self.out)
            return Times(self.clock() - began, 0.0)


class _Copy:
    """One copy: every byte is read and written."""

    def __init__(self, side: int, clock: Clock) -> None:
        self.clock, self.bytes = clock, 2.0 * 4 * side**2
        self.source = torch.rand(side, side, device=clock.device)
        self.target = torch.empty_like(self.source)

    def __call__(self) -> Times:
        began = self.clock()
        self.target.copy_(self.source)
        return Times(self.clock() - began, 0.0)


def bench_device(rounds: int, cpu: bool = False, quick: bool = False) -> dict[str, Any]:
    """What `spt bench device` prints, as plain data: `flops_per_second` by precision, and `bytes_per_second`."""
    device = Runtime(Settings(quiet=True, cpu=cpu)).device
    clock = Clock(device)
    side = QUICK_SIDE if quick else SIDE.get(device.type, SIDE["cuda"])
    precisions: tuple[Precision, ...] = ("fp32", "tf32", "bf16") if device.type == "cuda" else ("fp32", "bf16")
    products = {precision: _Product(side, precision, clock) for precision in precisions}
    copy = _Copy(side, clock)
    timings = alternate([*products.values(), copy], rounds)
    seconds = [timing.median("step") for timing in timings]
    return {
        "kind": "device",
        **conditions(device, rounds),
        "side": side,
        "flops_per_second": {
            name: product.flops / took for (name, product), took in zip(products.items(), seconds, strict=False)
        },
        "bytes_per_second": copy.bytes / seconds[-1],
    }
