"""Controls how glibc reuses freed memory (no effect with other C libraries); measures this machine's memory."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

# Parameters of mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
OWN_CGROUPS = Path("/proc/self/cgroup")  # lists the control groups of this process
_CGROUP_ROOT = Path("/sys/fs/cgroup")  # where control groups are mounted


def hold_freed_memory(max_bytes: int = -1) -> None:
    """Keep freed memory for the next step or batch instead of returning it to the system.

    By default glibc maps and unmaps every block above 32 MiB, and the kernel clears its pages each time. That costs a
    quarter of a BERT-Base step on CPU (docs/benchmarks/lab-notes.md).

    Args:
        max_bytes: maximum number of free bytes to keep at the end of the heap, below 2 GiB; -1 keeps all.
    """
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, max_bytes), (_M_TOP_PAD, 64 << 20)):
        _call("mallopt", option, value)


def share_one_heap() -> None:
    """Make new threads use the main heap, so that all threads can reuse freed memory.

    By default glibc gives each thread a separate heap (arena), where blocks above 64 MiB are mapped and unmapped even
    after `hold_freed_memory`. Processes that Ray starts need MALLOC_ARENA_MAX=1 in their environment instead.
    """
    _call("mallopt", _M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return freed memory to the system. glibc would keep it, but after shapes change, tensors rarely fit into it."""
    _call("malloc_trim", 0)


def machine_memory() -> tuple[int, int]:
    """Return total and free bytes of the machine, or of this process's container or job if that has a lower limit."""
    import psutil

    machine = psutil.virtual_memory()
    limits = [(machine.total, machine.available), *_limits()]
    return min(total for total, _ in limits), min(free for _, free in limits)


def control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group (cgroup v2 or v1) and of all its ancestors.

    In a container, the kernel may report the host's path. Then only the outermost folder exists: the container's group.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError, ValueError):  # not Linux
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
                group = root / name.lstrip("/")
                folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return folders


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of each control group that has a limit. The file cache counts as free memory."""
    for folder in control_groups("memory"):
        for limit_file, usage_file, cache_field in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):  # the other cgroup version, or "max": no limit
                words = (folder / "memory.stat").read_text().split()
                cached = int(dict(zip(words[::2], words[1::2], strict=True))[cache_field])
                total = int((folder / limit_file).read_text())
                yield total, max(0, total - int((folder / usage_file).read_text()) + cached)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
