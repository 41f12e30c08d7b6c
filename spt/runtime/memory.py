"""Device and resident memory: peaks, running out of it, giving it back."""

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
BLOCK = 1 << 27  # bytes; larger ones would break up what is kept
KEPT = (1 << 31) - 1  # bytes, as many as mallopt's int can say


@cache
def keep_freed_memory() -> None:
    """Have malloc keep freed blocks of up to 128 MiB for the next step, as a GPU's allocator does.

    By itself glibc maps every block of more than 32 MiB anew and unmaps it when it is freed, so that the system fills
    the same pages with zeros at each step. With other libraries nothing happens, and whoever has set GLIBC_TUNABLES or
    a variable MALLOC_… keeps what that says.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    if (libc := _glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Other libraries know mallopt, too, and mean something else by it."""
    with suppress(OSError, TypeError):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "gnu_get_libc_version"):
            return libc
    return None


def _give_back() -> None:
    """What malloc keeps."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _give_back()  # an earlier run's
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
    _give_back()
