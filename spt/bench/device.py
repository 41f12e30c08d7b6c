"""`spt bench device`: what this device reaches, which bounds every step: matrix products and copies."""

from typing import Any

import torch

from spt.bench.timing import Clock, Times, alternate, conditions
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

SIDE, QUICK_SIDE = {"cpu": 2048, "cuda": 8192}, 128  # of the square matrices


class _Product:
    """One product of square matrices."""

    def __init__(self, side: int, dtype: torch.dtype, clock: Clock) -> None:
        self.clock, self.flops = clock, 2.0 * side**3
        self.a, self.b = torch.rand(2, side, side, device=clock.device).to(dtype).unbind()
        self.out = torch.empty_like(self.a)

    def __call__(self) -> Times:
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
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    products = {name: _Product(side, dtype, clock) for name, dtype in kinds.items()}
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
