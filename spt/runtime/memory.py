"""Device and resident memory: peaks, running out of it, giving it back."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux: lets the process's high-water mark start again
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device since the last reset; on a CPU the resident memory of the process, libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine_memory() -> int:
    """Bytes of main memory that this process may have: the machine's, or less where a container says so."""
    sizes = []
    with suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max": no limit
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min((size for size in sizes if size > 0), default=sys.maxsize)


def out_of_memory(error: BaseException) -> bool:
    """Was there no memory for a tensor? CPUs, and some libraries on GPUs, say so in a RuntimeError's text."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


def free_memory() -> None:
    """Give back what the device's allocator keeps for later."""
    clear_device_cache(garbage_collection=True)  # an error's traceback may hold tensors in a cycle
