"""Controls what glibc does with freed memory. With other C libraries these functions do nothing."""

from __future__ import annotations

import ctypes

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


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
