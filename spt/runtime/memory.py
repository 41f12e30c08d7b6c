"""Device and resident memory: peaks, running out of it, giving it back."""

import ctypes
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
BLOCK = 1 << 27  # bytes; keeping larger ones raised the peak of pendulum/s5 by up to 40 %
KEPT = (1 << 31) - 1  # bytes, the most that mallopt takes


@cache
def keep_freed_memory() -> None:
    """Reuse the memory of freed tensors of up to 128 MiB in the next training step.

    By default, glibc hands every freed block of more than 32 MiB back to the system, and each new block costs page
    faults. Nothing changes with another C library, or where GLIBC_TUNABLES or a variable MALLOC_… is set.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    if (libc := _glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)


def _release_freed_memory() -> None:
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _release_freed_memory()  # or an earlier run's would count
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
    """Give back what the allocators keep for later."""
    clear_device_cache(garbage_collection=True)  # an error's traceback may hold tensors in a cycle
    _release_freed_memory()
