"""The device that the models of this process will run on, for what has to be tried before they do."""

import torch

_cpu_only: bool = True


def run_on_gpu(allowed: bool) -> None:
    """From now on models run on a CUDA device, if there is one and this is allowed; at first, on the CPU."""
    global _cpu_only
    _cpu_only = not allowed


def planned_device() -> torch.device:
    """Asking for it takes no device; using it does."""
    return torch.device("cpu" if _cpu_only or not torch.cuda.is_available() else "cuda")
