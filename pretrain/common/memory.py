"""What glibc does with freed memory (with other C libraries nothing changes), and how much this machine has."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def hold_freed_memory(at_most: int = -1) -> None:
    """Keep freed memory for the next step or batch instead of returning it to the system.

    By default glibc maps and unmaps every block above 32 MiB, and the kernel clears its pages each time. That costs a
    quarter of a BERT-Base step on CPU (docs/benchmarks/lab-notes.md).

    Args:
        at_most: bytes to keep at the end of the heap, below 2 GiB; -1 keeps all.
    """
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, at_most), (_M_TOP_PAD, 64 << 20)):
        _call("mallopt", option, value)


def share_one_heap() -> None:
    """Make threads that start from now on use the main heap, so that all threads can reuse freed memory.

    By default glibc gives each thread a heap of its own; `hold_freed_memory` does not affect its blocks above 64 MiB.
    A process whose main thread is not ours needs MALLOC_ARENA_MAX=1 in its environment instead.
    """
    _call("mallopt", _M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return freed memory to the system. glibc would keep it, but tensors of new sizes rarely fit into it."""
    _call("malloc_trim", 0)


def machine_memory() -> tuple[int, int]:
    """Total and free bytes of the machine, or of its container if that has less."""
    import psutil

    machine = psutil.virtual_memory()
    limit, used = _container_memory()
    return min(machine.total, limit), min(machine.available, max(0, limit - used))


def _container_memory() -> tuple[int, int]:
    """Limit and use by the kernel's control groups, version 2 or 1; without the file cache, which can be reclaimed."""
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            words = (Path(folder) / "memory.stat").read_text().split()
            cached = int(dict(zip(words[::2], words[1::2], strict=True))[cache])
            return int((Path(folder) / limit).read_text()), int((Path(folder) / used).read_text()) - cached
        except (OSError, ValueError, KeyError):  # no such version, or "max": no limit
            continue
    return sys.maxsize, 0


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
