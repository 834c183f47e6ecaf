"""Makes the threads of CPU kernels sleep instead of spin while other programs compete for the cores.

A kernel of T threads finishes with its last thread. Until then, and until the next kernel, OpenMP's threads spin,
because waking a sleeping thread takes longer than most kernels. If another program uses the core of one thread, the
others spin while they wait for it, and take CPU time that it needs. With twice as many busy threads as cores, training
runs at a fifth of its speed or less, instead of half. Sleeping threads leave their CPU time to others.

libgomp, the GNU OpenMP that torch is built with, spins only while it has no more threads than cores (GOMP_SPINCOUNT in
its manual). So a pool of idle threads makes the others sleep, and closing the pool makes them spin again. Results do
not change, because kernels keep their number of threads.
"""

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pretrain.common.memory import control_groups

POLL_SECONDS = 0.5
# Fractions of the time that a thread waits for a core: above the first, the cores count as contended; below the second,
# as free. With only Ray's processes running, the fraction is about 0.03 on two cores.
_CONTENDED_FRACTION, _FREE_FRACTION = 0.10, 0.06
_FREE_POLLS = 4  # number of consecutive polls with free cores before threads spin again
_SPARE_FACTOR = 16  # a pool starts only if limits allow this many times its threads: other workers start pools, too
_MIN_NPROC = 10_000  # a pool starts only if RLIMIT_NPROC, the user's maximum processes and threads, is at least this


@contextlib.contextmanager
def sleep_when_contended() -> Iterator[None]:
    """Inside the context, waiting kernel threads spin while cores are free, and sleep while cores are contended.

    Does nothing on GPUs, if kernels have one thread, if torch uses another OpenMP than GNU's, if the system does not
    record wait times, or if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set.
    """
    import torch

    openmp = loaded_openmp()
    set_by_user = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    not_needed = torch.get_num_threads() == 1 or torch.cuda.is_available()
    if not_needed or set_by_user or openmp is None or not waited_seconds():
        yield
        return
    end = threading.Event()
    watcher = threading.Thread(target=watch, args=(lambda: idle_threads(openmp), end), name="thread-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside the context, CPU kernels use only this thread: for memory-bound work, such as copies."""
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def waited_seconds() -> dict[int, float]:
    """Return the seconds that each thread of this process waited for a core; {} if the system does not record them."""
    seconds = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread may have ended
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return seconds


def watch(
    idle_pool: Callable[[], contextlib.AbstractContextManager[None]],
    end: threading.Event,
    read_waits: Callable[[], Mapping[int, float]] = waited_seconds,
) -> None:
    """Until `end` is set, poll the wait times `read_waits()`, and hold an `idle_pool()` while cores are contended."""
    with contextlib.ExitStack() as pool:
        sleeping, free_polls = False, 0
        waited_before, time_before = read_waits(), time.monotonic()
        while not end.wait(POLL_SECONDS):
            waited, now = read_waits(), time.monotonic()
            waits = [waited[thread] - waited_before[thread] for thread in waited.keys() & waited_before.keys()]
            wait_fraction = max(waits, default=0.0) / (now - time_before)
            waited_before, time_before = waited, now
            free_polls = free_polls + 1 if wait_fraction < _FREE_FRACTION else 0
            if not sleeping and wait_fraction > _CONTENDED_FRACTION and may_start_pool(_pool_size()):
                pool.enter_context(idle_pool())
                sleeping = True
            elif sleeping and free_polls >= _FREE_POLLS:
                pool.close()
                sleeping = False


@contextlib.contextmanager
def idle_threads(openmp: ctypes.CDLL) -> Iterator[None]:
    """Inside the context, hold a pool of sleeping OpenMP threads, one more than there are cores."""
    started, done = threading.Event(), threading.Event()

    def hold() -> None:
        # The OpenMP team runs free(NULL), which does nothing. Its threads belong to this thread and end with it.
        openmp.GOMP_parallel(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p), None, _pool_size(), 0)
        started.set()
        done.wait()

    holder = threading.Thread(target=hold, name="idle-pool", daemon=True)
    holder.start()
    started.wait()
    try:
        yield
    finally:
        done.set()
        holder.join()


def _pool_size() -> int:
    return len(os.sched_getaffinity(0)) + 1


def may_start_pool(threads: int) -> bool:
    """Return whether limits leave ample room for `threads` more threads; at a limit, libgomp would exit the process."""
    address_space, nproc = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    if address_space != resource.RLIM_INFINITY or (nproc != resource.RLIM_INFINITY and nproc < _MIN_NPROC):
        return False
    available_pids: list[int] = []
    for folder in control_groups("pids"):
        with contextlib.suppress(OSError, ValueError):  # no limit, or "max"
            available_pids.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    return all(_SPARE_FACTOR * threads < available for available in available_pids)


def loaded_openmp() -> ctypes.CDLL | None:
    """Return the libgomp that torch uses; None if it uses another OpenMP."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.rpartition(" ")[2] for line in lines if "libgomp" in line}, key=lambda path: "/torch/" in path)
    if not paths:
        return None
    with contextlib.suppress(OSError, AttributeError):
        openmp = ctypes.CDLL(paths[-1])
        openmp.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        openmp.GOMP_parallel.restype = None
        return openmp
    return None
