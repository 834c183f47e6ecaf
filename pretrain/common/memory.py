"""What a process does with the memory it frees, where the C library is glibc; elsewhere these calls do nothing."""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def hold_freed_memory(at_most: int = -1) -> None:
    """Keep what is freed for the next step or batch: fresh pages cost more than the passes that fill them.

    glibc maps and unmaps every block past 32 MiB anew, and the kernel clears its pages each time: a quarter of
    a BERT-Base step on CPU (BENCHMARKS.md).

    Args:
        at_most: bytes at the heap's end that are kept free, below 2 GiB; -1 keeps all.
    """
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, at_most), (_M_TOP_PAD, 64 << 20)):
        _call("mallopt", option, value)


def share_one_heap() -> None:
    """Have threads that start from now on use the first thread's heap: what one of them freed serves all.

    glibc gives each its own, whose blocks past 64 MiB `hold_freed_memory` does not reach. A process whose main thread
    is not ours needs MALLOC_ARENA_MAX=1 in its environment instead.
    """
    _call("mallopt", _M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Give what was freed back to the system: glibc keeps it, and tensors of ever new sizes do not fit into it."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
